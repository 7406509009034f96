"""What a step costs the host: everything but the model.

    python benches/host.py [--json FILE]

Steady decode, batch after batch of the same rows. Timed apart: `schedule` (who runs, and the step's slots, tables and
lengths through `DecodeBatch`), `load` (input ids and positions for the model), `commit` (K/V are written; full blocks
enter the prefix index) and `take` (each token to its sequence, who ends). The model is not there; a token is a number.
The last column is the whole `Engine.step` without sampling and without a tokenizer: what it does beyond these is an
event for each token.

Why it matters: at batch 256 a decode step of a small model takes a few milliseconds; Python per row would eat a tenth.
Read the median; `worst` is the 99th percentile and holds the steps in which many rows take a block at once.
"""

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvpager import KVBlockManager, SamplingParams
from kvpager.config import EngineConfig, ModelConfig
from kvpager.engine import Engine
from kvpager.sampling import SampledTokens

CONFIG = ModelConfig(
    vocab_size=32768,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=64,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=True,
    dtype="float32",
    eos_token_ids=(1,),
)
PROMPT, STEPS, WARM = 256, 400, 50


def make_engine(batch: int) -> Engine:
    """An engine whose runner computes nothing and whose sampler says 7."""
    num_blocks = batch * 64
    manager = KVBlockManager(num_blocks, 16, enable_prefix_caching=True)
    hidden = torch.zeros(8192, 1)
    runner: Any = SimpleNamespace(
        block_manager=manager,
        model=SimpleNamespace(config=CONFIG),
        device=torch.device("cpu"),
        run=lambda _tensors, step, *_args, **_kwargs: hidden[: step.num_tokens],
        logits=lambda rows, index=None: rows if index is None else hidden[: len(index)],
    )
    config = EngineConfig(num_blocks=num_blocks, max_num_seqs=batch, max_num_batched_tokens=8192)
    engine = Engine(runner, CONFIG, config)
    everything_ok = np.ones(batch, dtype=np.bool_)
    tokens = np.full(batch, 7, dtype=np.int64)

    def sample(scores: torch.Tensor, _rows: object) -> SampledTokens:
        n = len(scores)
        return SampledTokens(tokens[:n], everything_ok[:n], np.zeros(n))

    engine.sampler.sample = sample  # type: ignore[method-assign, assignment]
    generator = np.random.default_rng(0)
    for _ in range(batch):
        prompt = generator.integers(2, 32768, PROMPT).tolist()
        engine.add_request(prompt, SamplingParams(max_tokens=STEPS + 200, ignore_eos=True))
    while engine.scheduler.num_waiting or engine.scheduler._prefilling:
        engine.step()
    return engine


def measure(batch: int) -> dict[str, float]:
    """Microseconds per step: medians of each part, and of their sum; its 99th percentile; the engine's step."""
    engine = make_engine(batch)
    scheduler = engine.scheduler
    tokens, ok = np.full(batch, 7, dtype=np.int64), np.ones(batch, dtype=np.bool_)
    parts = np.zeros((STEPS, 4))
    for step in range(-WARM, STEPS):
        t0 = time.perf_counter()
        planned = scheduler.schedule()
        engine.block_manager.take_copies()
        t1 = time.perf_counter()
        assert planned is not None
        engine._tensors.load(planned.batch_step, planned.buffers, planned.input_ids, planned.counts)
        t2 = time.perf_counter()
        due = scheduler.commit(planned)
        t3 = time.perf_counter()
        scheduler.take(due, tokens, ok)
        t4 = time.perf_counter()
        if step >= 0:
            parts[step] = (t1 - t0, t2 - t1, t3 - t2, t4 - t3)
    whole = []
    for _ in range(100):
        t0 = time.perf_counter()
        engine.step()
        whole.append(time.perf_counter() - t0)
    sums = parts.sum(axis=1)
    schedule, load, commit, take = np.median(parts, axis=0) * 1e6
    return {
        "batch": batch,
        "schedule": schedule,
        "load": load,
        "commit": commit,
        "take": take,
        "sum": float(np.median(sums)) * 1e6,
        "worst": float(np.quantile(sums, 0.99)) * 1e6,
        "engine_step": float(np.median(whole)) * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(batch) for batch in (1, 8, 32, 128, 256)]
    print("microseconds per step, steady decode, blocks of 16, prefix caching on")
    print("batch  schedule     load   commit     take      sum    worst | engine step")
    for row in rows:
        parts = "".join(f"  {row[name]:7.1f}" for name in ("schedule", "load", "commit", "take", "sum", "worst"))
        print(f"{row['batch']:5.0f} {parts} | {row['engine_step']:8.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
