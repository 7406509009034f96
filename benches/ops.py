"""How fast decode attention is over a paged cache: `python benches/ops.py [--json] [--plot roofline.png] [--quick]`.

What is timed, against what, and why:

- roofline: decode over a pool of 1 GB or more with shuffled tables, as fraction of what the machine could do at best,
  the slower of reading the bytes of K and V once and of multiplying and adding what has to be. Both limits are measured
  in the same rounds, with the same threads, over a buffer of the pool's size in pages of the same kind.
- shapes: the same tokens as one long sequence, a few, many, and mixed lengths: cutting by tokens must make them equal.
- ladder: from the lesson to the product, and torch's ways of doing the same: gather + SDPA, SDPA over contiguous K and
  V with packed heads (it has no pages to follow), flex attention (`--flex`, it compiles first).
- block sizes 1 … 256: waste and table bytes against decode speed: why 16 is the default.
- overhead: a call of the raw op with nothing to do, over an op of the same signature that does nothing.

How to read it: medians of rounds; beside a fraction stand its smallest and largest. On a busy machine the limits and
the kernel suffer alike, so trust fractions before times, and a narrow spread before both.
`--clock cpu` counts processor time in place of wall time, on every line alike.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from kvpager import KVBlockManager, native, ops
from kvpager.ops import reference

sys.path.insert(0, str(Path(__file__).parent))

from data_plane.decode import (
    DTYPES,
    HEAD_DIM,
    NUM_KV_HEADS,
    Figure,
    Pool,
    against_roofline,
    macs,
    packed_sdpa,
)  # fmt: skip
from data_plane.machine import Machine, cpu_seconds, wall_seconds

SWEEP_BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def roofline(machine: Machine, num_bytes: int, threads: list[int], rounds: int) -> list[Figure]:
    figures = []
    for dtype in DTYPES:
        for block_size in (16, 32):
            pool = Pool(dtype, block_size, num_bytes)
            lengths = [pool.num_tokens // 8 // block_size * block_size] * 8
            for group in (2, 4):
                call, read = pool.decode(lengths, group)
                for count in threads:
                    name = f"{dtype} G={group} S={block_size} T={count}"
                    work = macs(lengths, group)
                    figures.append(against_roofline(name, machine, call, read, work, count, rounds))
                    print_figure(figures[-1])
    return figures


def print_figure(figure: Figure) -> None:
    print(
        f"{figure.name:32} {figure.milliseconds:9.2f} ms {figure.gbs:6.1f} GB/s of {figure.read_gbs:5.1f}   "
        f"{figure.fraction:5.0%} ({figure.fraction_min:.0%} to {figure.fraction_max:.0%})",
        flush=True,
    )


def alternate(
    machine: Machine, calls: dict[str, Callable[[], object]], threads: int, rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each call in each round, taken in turns; a first turn is not kept."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            elapsed = machine.clock(call, threads) * 1e3
            if turn:
                times[name].append(elapsed)
    return times


def print_times(title: str, times: dict[str, list[float]]) -> dict[str, float]:
    print(f"\n{title}")
    medians = {name: statistics.median(runs) for name, runs in times.items()}
    for name, runs in times.items():
        print(f"  {name:44} {medians[name]:10.3f} ms   ({min(runs):.3f} to {max(runs):.3f})")
    return medians


def shapes(machine: Machine, num_bytes: int, threads: int, rounds: int) -> dict[str, float]:
    """1 × 32k, 8 × 4k, 64 × 512 and mixed lengths of the same sum."""
    torch.set_num_threads(threads)
    pool = Pool("bfloat16", 16, num_bytes)
    total = min(32768, pool.num_tokens // 2 // 1024 * 1024)
    mixed = [total // 2, total // 4] + [total // 256] * 64
    batches = {
        f"1 x {total}": [total], f"8 x {total // 8}": [total // 8] * 8, f"64 x {total // 64}": [total // 64] * 64,
        f"mixed, {len(mixed)} sequences": mixed,
    }  # fmt: skip
    calls = {name: pool.decode(lengths, 2)[0] for name, lengths in batches.items()}
    return print_times(
        f"shapes: bfloat16, G=2, {total} tokens, {threads} threads", alternate(machine, calls, threads, rounds)
    )


def ladder(machine: Machine, threads: int, rounds: int, flex: bool) -> dict[str, float]:
    """The same decode, 8 sequences of 2,048 tokens in float32, G=2, from the lesson to the product."""
    torch.set_num_threads(threads)
    B, length, group = 8, 2048, 2
    pool = Pool("float32", 16, B * length * 2 * NUM_KV_HEADS * HEAD_DIM * 4)
    native_call, _ = pool.decode([length] * B, group)
    cache = (pool.cache.key_cache[0], pool.cache.value_cache[0])
    table, lengths = pool.order[: B * length // 16].reshape(B, -1), torch.full((B,), length, dtype=torch.int32)
    query = torch.randn(B, NUM_KV_HEADS * group, HEAD_DIM)
    scale = 1 / math.sqrt(HEAD_DIM)
    rows = [torch.empty(B * length, NUM_KV_HEADS, HEAD_DIM) for _ in range(2)]

    def gather_and_sdpa() -> torch.Tensor:
        key, value = ops.gather_kv(*cache, table, lengths, key=rows[0], value=rows[1])
        heads = [x.view(B, length, NUM_KV_HEADS, HEAD_DIM).transpose(1, 2) for x in (key, value)]
        packed = query.view(B, NUM_KV_HEADS, group, HEAD_DIM)
        return torch.nn.functional.scaled_dot_product_attention(packed, *heads, scale=scale)

    inputs = (query, *cache, table, lengths)
    calls: dict[str, Callable[[], object]] = {
        "lesson: block after block in torch": lambda: reference.paged_attention_blockwise(*inputs, scale=scale),
        "specification: gather in torch": lambda: reference.paged_attention(*inputs, scale=scale, max_seq_len=length),
        "gather_kv + SDPA": gather_and_sdpa,
        "SDPA, packed heads, contiguous": packed_sdpa(length, B, group, torch.float32)[0],
        "native": native_call,
    }
    if flex:
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention)
        contiguous = [torch.full((B, NUM_KV_HEADS, length, HEAD_DIM), 0.01) for _ in range(2)]
        heads = query.view(B, -1, 1, HEAD_DIM)
        calls["flex attention, compiled, contiguous"] = lambda: compiled(
            heads, *contiguous, scale=scale, enable_gqa=True
        )
    return print_times(
        f"ladder: float32, G=2, {B} x {length} tokens, {threads} threads", alternate(machine, calls, threads, rounds)
    )


def block_sizes(machine: Machine, num_bytes: int, threads: int, rounds: int) -> list[dict[str, float]]:
    """What a block size costs: positions that hold nothing, table bytes, appends, and decode speed."""
    torch.set_num_threads(threads)
    print(f"\nblock sizes: bfloat16, G=2, 8 x 4096 tokens, {threads} threads; waste for lengths of 1 to 2,048")
    rows = []
    for block_size in SWEEP_BLOCK_SIZES:
        pool = Pool("bfloat16", block_size, num_bytes)
        call, read = pool.decode([min(4096, pool.num_tokens // 8 // block_size * block_size)] * 8, 2)
        call()
        elapsed = statistics.median(machine.clock(call, threads) for _ in range(rounds))
        lengths = range(1, 2049)
        waste = 1 - sum(lengths) / sum(-(-length // block_size) * block_size for length in lengths)
        manager = KVBlockManager(-(-4096 // block_size), block_size)
        manager.create_sequence(0)
        start = time.perf_counter()
        for _ in range(4096):
            manager.append_token(0)
        append_ns = (time.perf_counter() - start) / 4096 * 1e9
        row = {
            "block_size": block_size, "waste": waste, "table_bytes_32k": 4 * -(-32768 // block_size),
            "append_ns": append_ns, "decode_gbs": read / elapsed / 1e9,
        }  # fmt: skip
        rows.append(row)
        print(
            f"  {block_size:4}   waste {waste:6.2%}   table of 32k tokens {row['table_bytes_32k']:7} bytes   "
            f"append {append_ns:5.0f} ns   decode {row['decode_gbs']:5.1f} GB/s",
            flush=True,
        )
    return rows


def overhead(machine: Machine, rounds: int) -> dict[str, float]:
    """Microseconds of a raw call over one sequence of one token, above an op of the same signature without a body."""
    torch.set_num_threads(1)
    cache = torch.zeros(2, 1, 16, 16)
    query, out = torch.zeros(1, 1, 16), torch.zeros(1, 1, 16)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    arguments = (out, None, query, cache, cache, table, lengths)
    calls = 20_000

    def run(op: Callable[..., None]) -> Callable[[], None]:
        def loop() -> None:
            for _ in range(calls):
                op(*arguments, scale=1.0, max_seq_len=16)

        return loop

    empty = torch.ops.kvpager_bench.nothing.default
    ours = torch.ops.kvpager.paged_attention.default
    times = alternate(machine, {"nothing": run(empty), "paged_attention": run(ours)}, 1, rounds)
    micros = {name: statistics.median(runs) / calls * 1e3 for name, runs in times.items()}
    difference = micros["paged_attention"] - micros["nothing"]
    print(f"\noverhead: empty op {micros['nothing']:.2f} us, paged_attention {micros['paged_attention']:.2f} us: "
          f"{difference:+.2f} us (bar: 3)")  # fmt: skip
    return {**micros, "difference": difference}


def plot(figures: list[Figure], path: Path) -> None:
    """The roofline of the most threads, and every case of that many threads under it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    threads = max(figure.name.rsplit("T=", 1)[1] for figure in figures)
    shown = [figure for figure in figures if figure.name.endswith(f"T={threads}")]
    read, peak = (statistics.median(getattr(figure, name) for figure in shown) for name in ("read_gbs", "gmacs"))
    x = [0.1 * 1.1**step for step in range(60)]
    pyplot.figure(figsize=(8, 5))
    pyplot.loglog(x, [min(peak, read * intensity) for intensity in x], "k", label=f"{read:.0f} GB/s, {peak:.0f} GMAC/s")
    for dtype in DTYPES:
        cases = [figure for figure in shown if figure.name.startswith(dtype + " ")]
        pyplot.plot(
            [case.macs_per_byte for case in cases], [case.gbs * case.macs_per_byte for case in cases], "o", label=dtype
        )
    pyplot.xlabel("multiply-adds for each byte of K and V")
    pyplot.ylabel("10⁹ multiply-adds a second")
    pyplot.title(f"paged_attention, {native.active_cpu_isa()}, {threads} threads")
    pyplot.legend()
    pyplot.grid(alpha=0.3, which="both")
    pyplot.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--plot", type=Path, help="write the roofline here, as PNG (needs matplotlib)")
    parser.add_argument("--isa", help="instruction set of the kernels; the best of this CPU if not given")
    parser.add_argument("--threads", default="1,2", help="comma-separated thread counts (default 1,2)")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="pool and buffer; above the last-level cache")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a machine that others use too"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="overhead,roofline,shapes,ladder,block_sizes", help="tables, comma-separated")
    parser.add_argument("--flex", action="store_true", help="add flex attention to the ladder")
    options = parser.parse_args()
    if options.isa:
        native.select_cpu_isa(options.isa)
    num_bytes, threads = int(options.gigabytes * 1e9), [int(count) for count in options.threads.split(",")]
    machine = Machine(num_bytes, cpu_seconds if options.clock == "cpu" else wall_seconds)
    wanted = options.only.split(",")
    results: dict[str, object] = {
        "isa": native.active_cpu_isa(), "gigabytes": options.gigabytes, "clock": options.clock,
    }  # fmt: skip
    figures: list[Figure] = []
    if "overhead" in wanted:
        results["overhead_us"] = overhead(machine, options.rounds)
    if "roofline" in wanted:
        print(f"\nroofline: pool of {options.gigabytes} GB, K = 8, D = 128, shuffled tables, {results['isa']}")
        figures = roofline(machine, num_bytes, threads, options.rounds)
        results["roofline"] = [asdict(figure) for figure in figures]
    if "shapes" in wanted:
        results["shapes_ms"] = shapes(machine, num_bytes, max(threads), options.rounds)
    if "ladder" in wanted:
        results["ladder_ms"] = ladder(machine, max(threads), options.rounds, options.flex)
    if "block_sizes" in wanted:
        results["block_sizes"] = block_sizes(machine, num_bytes, max(threads), options.rounds)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.plot and figures:
        plot(figures, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
