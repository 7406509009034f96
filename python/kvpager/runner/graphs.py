"""CUDA graphs of decode steps: recorded once for each padded number of rows, launched as one ever after.

What a recorded step reads and writes must stay where it is: the inputs are a `StepTensors`' own, padded rows write
nowhere, and every bound that a kernel is launched with is the largest there will be. Names of the options are vLLM's.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# Runs a step's computation and returns its result, always the same tensor.
Replay = Callable[[], Tensor]


def decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of rows that steps are padded to: 1, 2, 4, the multiples of 8 below `max_num_seqs`, and that itself."""
    return (*(size for size in (1, 2, 4, *range(8, max_num_seqs, 8)) if size < max_num_seqs), max_num_seqs)


class CudaCapture:
    """Records computations on a CUDA device. All share one pool of memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> Replay:
        """Runs `compute` once, so that what is made on first use is there, and records it."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        caller = torch.cuda.current_stream()
        stream.wait_stream(caller)
        with torch.cuda.stream(stream):
            compute()
        caller.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
