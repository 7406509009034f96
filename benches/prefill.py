"""Prefill on the CPU: a prompt of 2,048 tokens, and a chunk of 256 behind 4,096 cached ones, against torch's attention.

8 kv heads, 16 query heads (G = 2), D = 128, blocks of 16 in a shuffled table. Against it:
`scaled_dot_product_attention` on K and V that lie contiguous (with `enable_gqa`, and with heads repeated beforehand),
and for the chunk also on K and V gathered from the blocks first, which is what one does without a paged kernel.
All take turns; a figure is the median,
with the fastest and the slowest of the runs. "ratio" above 1: the paged op is faster than the best contiguous one.
With one thread the time is that of the CPU, so that other processes count little; with more it is that of the clock.

Also the shared prefix: 32 sequences that share 2,048 tokens and have 64 of their own, plain decode against
`shared_prefix_attention`; and the fused front end of a step against its three parts.

    python benches/prefill.py [--threads 2] [--json]      KVPAGER_CPU_ISA=avx2 forces an instruction set
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvpager import native, ops
from kvpager.ops.layers.qk_norm_rope_write import rotate
from kvpager.ops.layers.rms_norm import normed

RUNS = 9
K, G, D, S = 8, 2, 128, 16
Timed = dict[str, Callable[[], object]]


def measure(timed: Timed, threads: int) -> dict[str, dict[str, float]]:
    """Median, fastest and slowest milliseconds of each, taking turns."""
    clock = time.process_time if threads == 1 else time.perf_counter
    runs: dict[str, list[float]] = {name: [] for name in timed}
    for call in timed.values():
        call()
    for _ in range(RUNS):
        for name, call in timed.items():
            started = clock()
            call()
            runs[name].append((clock() - started) * 1e3)
    return {name: {"ms": statistics.median(ms), "min": min(ms), "max": max(ms)} for name, ms in runs.items()}


def prefill(dtype: torch.dtype, query_len: int, length: int) -> Timed:
    """A chunk of query_len tokens at the end of a sequence."""
    num_blocks = length // S
    key_cache, value_cache = (torch.randn(num_blocks, K, S, D).to(dtype) for _ in range(2))
    table = torch.randperm(num_blocks, dtype=torch.int32)[None]
    query = torch.randn(query_len, K * G, D).to(dtype)
    bounds = torch.tensor([0, query_len, length], dtype=torch.int32)

    def gather(cache: Tensor) -> Tensor:
        return cache[table[0].long()].transpose(1, 2).reshape(length, K, D).transpose(0, 1)[None]

    heads, key, value = query.transpose(0, 1)[None].contiguous(), gather(key_cache), gather(value_cache)
    key, value = key.contiguous(), value.contiguous()
    repeated = [rows.repeat_interleave(G, 1) for rows in (key, value)]
    whole = query_len == length
    mask = None if whole else torch.ones(query_len, length, dtype=torch.bool).tril(length - query_len)
    causal = {"attn_mask": mask, "is_causal": whole}
    attend = F.scaled_dot_product_attention
    timed: Timed = {
        "paged": lambda: ops.paged_prefill(query, key_cache, value_cache, table, bounds[:2], bounds[2:]),
        "sdpa, gqa": lambda: attend(heads, key, value, **causal, enable_gqa=True),
        "sdpa, repeated": lambda: attend(heads, *repeated, **causal),
    }
    if not whole:
        timed["gather + sdpa"] = lambda: attend(
            heads, gather(key_cache), gather(value_cache), **causal, enable_gqa=True
        )
    return timed


def shared_prefix(dtype: torch.dtype) -> Timed:
    """Decode of sequences that begin alike."""
    batch, prefix_len, suffix_len = 32, 2048, 64
    shared, own = prefix_len // S, suffix_len // S
    blocks = torch.randperm(shared + batch * own, dtype=torch.int32)
    table = torch.cat([blocks[:shared].expand(batch, -1), blocks[shared:].view(batch, own)], 1)
    caches = [torch.randn(len(blocks), K, S, D).to(dtype) for _ in range(2)]
    query, lengths = torch.randn(batch, 2 * K * G, D).to(dtype), torch.full((batch,), prefix_len + suffix_len).int()
    return {
        "shared": lambda: ops.shared_prefix_attention(query, *caches, table, lengths, prefix_len),
        "plain": lambda: ops.paged_attention(query, *caches, table, lengths),
    }


def front_end(dtype: torch.dtype) -> Timed:
    """Norm, turn and write of 32 tokens, 200 times."""
    T, H = 32, 32
    qkv, weight = torch.randn(T, (H + 2 * K) * D).to(dtype), torch.randn(D).to(dtype)
    cos_sin, rows = torch.randn(T, D), torch.arange(T)
    caches = [torch.zeros(T // S, K, S, D, dtype=dtype) for _ in range(2)]
    out = torch.empty(T, H, D, dtype=dtype)

    def parts() -> None:
        query, key, value = torch.split(qkv.view(T, H + 2 * K, D), [H, K, K], dim=1)
        turned = [rotate(normed(x, weight, 1e-6), cos_sin[:, None]).to(dtype) for x in (query, key)]
        ops.write_kv(turned[1], value, *caches, rows)

    def many(call: Callable[[], object]) -> Callable[[], object]:
        return lambda: [call() for _ in range(200)]

    return {
        "fused": many(lambda: ops.qk_norm_rope_write(qkv, weight, weight, cos_sin, rows, *caches, rows, query_out=out)),
        "in parts": many(parts),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="for machines")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        cases = {
            "prompt of 2,048": prefill(dtype, 2048, 2048),
            "chunk of 256 behind 4,096": prefill(dtype, 256, 4352),
            "32 sequences, 2,048 shared": shared_prefix(dtype),
            "front end, 200 x 32 tokens": front_end(dtype),
        }
        for case, timed in cases.items():
            times = measure(timed, options.threads)
            ours, *others = times
            ratio = min(times[other]["ms"] for other in others) / times[ours]["ms"]
            results.append({"dtype": str(dtype).removeprefix("torch."), "case": case, "ratio": ratio, "times": times})
    if options.json:
        print(json.dumps({"isa": native.active_cpu_isa(), "threads": options.threads, "results": results}, indent=1))
        return
    print(f"instruction set {native.active_cpu_isa() or 'none'}, {options.threads} thread(s), milliseconds")
    for result in results:
        cells = (f"{name} {t['ms']:.1f} [{t['min']:.1f}-{t['max']:.1f}]" for name, t in result["times"].items())
        print(f"{result['dtype']:>9}  {result['case']:<27} ratio {result['ratio']:.2f}   {' · '.join(cells)}")


if __name__ == "__main__":
    main()
