"""The three that generate: kvpager, transformers and vLLM, greedy, a fixed number of new tokens."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peers.process import Peer

from engine.models import Prompts
from kvpager import LLM, SamplingParams

# Seconds of wall clock, prefill included, and the new tokens of each prompt.
Generated = tuple[float, list[list[int]]]
Generate = Callable[[Prompts, int], Generated]


def with_kvpager(llm: LLM) -> Generate:
    def generate(prompts: Prompts, num_new: int) -> Generated:
        llm.block_manager.reset_prefix_cache()  # the last round's prompts are not to be found
        ids: Any = prompts
        start = time.perf_counter()
        outputs = llm.generate(ids, SamplingParams(max_tokens=num_new, ignore_eos=True))
        elapsed = time.perf_counter() - start
        return elapsed, [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def with_transformers(model: Any) -> Generate:
    """Its `generate`: prompts are padded to the longest, on the left."""

    @torch.inference_mode()
    def generate(prompts: Prompts, num_new: int) -> Generated:
        start = time.perf_counter()
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=num_new, min_new_tokens=num_new, do_sample=False, pad_token_id=0
        )
        return time.perf_counter() - start, out[:, longest:].tolist()

    return generate


def with_vllm(peer: Peer, checkpoint: Path, dtype: str, threads: int) -> Generate:
    peer.ask("load", model=str(checkpoint), dtype=dtype, threads=threads)

    def generate(prompts: Prompts, num_new: int) -> Generated:
        seconds, tokens = peer.ask("generate", prompts=prompts, num_new=num_new)
        return seconds, tokens

    return generate
