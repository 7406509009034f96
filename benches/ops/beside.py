"""Decode beside what others offer on this machine: torch's attention over contiguous K and V, vLLM's over pages."""

import statistics
from dataclasses import dataclass

import torch
from peers.process import Peer

from ops.decode import DTYPES, HEAD_DIM, NUM_KV_HEADS, Pool, packed_sdpa
from ops.machine import Machine

BATCH = 8
# vLLM's op reads its fp8 caches in blocks of a multiple of 32 only, and has no int8 of one scale a token.
VLLM_HAS = {(dtype, S) for dtype in ("float32", "bfloat16", "float16") for S in (16, 32)} | {("fp8_e4m3", 32)}


@dataclass(frozen=True)
class Beside:
    """One case; milliseconds of each round, in turns. The others' are empty where they have no such case."""

    name: str
    ours_ms: list[float]
    sdpa_ms: list[float]
    vllm_ms: list[float]

    def ratio(self, theirs: list[float]) -> float:
        """How many times as fast as them we are, a round's own ratio; the median."""
        return statistics.median(them / us for us, them in zip(self.ours_ms, theirs, strict=True))


def beside(
    machine: Machine, num_bytes: int, dtypes: list[str], threads: list[int], rounds: int, vllm: Peer | None
) -> list[Beside]:
    """The cases of the roofline: 8 sequences over all of a pool of `num_bytes`, tables shuffled."""
    print(f"\nbeside others: {BATCH} sequences, {num_bytes / 1e9:g} GB of K and V, D = 128; times as fast as they are")
    print(f"{'':32} {'ours':>9} {'SDPA, contiguous':>24} {'vLLM, paged':>24}")
    rows = []
    for dtype in DTYPES:
        if dtype not in dtypes:
            continue
        for block_size in (16, 32):
            pool = Pool(dtype, block_size, num_bytes)
            lengths = [pool.num_tokens // BATCH // block_size * block_size] * BATCH
            their = vllm if (dtype, block_size) in VLLM_HAS else None
            if their is not None:
                their.ask("make_pool", dtype=dtype, block_size=block_size, num_bytes=num_bytes,
                          num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM)  # fmt: skip
            for group in (2, 4):
                for count in threads:
                    name = f"{dtype} G={group} S={block_size} T={count}"
                    rows.append(one_case(name, machine, pool, lengths, group, count, rounds, their))
                    print_case(rows[-1])
    return rows


def one_case(
    name: str,
    machine: Machine,
    pool: Pool,
    lengths: list[int],
    group: int,
    threads: int,
    rounds: int,
    vllm: Peer | None,
) -> Beside:
    torch.set_num_threads(threads)
    call, _ = pool.decode(lengths, group)
    sdpa = None if pool.cache.quantised else packed_sdpa(lengths[0], BATCH, group, pool.cache.dtype)[0]
    if vllm is not None:
        vllm.ask("prepare", lengths=lengths, group=group, threads=threads)
    case = Beside(name, [], [], [])
    for turn in range(rounds + 1):
        took = Beside(name, [machine.clock(call, threads) * 1e3], [], [])
        if sdpa is not None:
            took.sdpa_ms.append(machine.clock(sdpa, threads) * 1e3)
        if vllm is not None:
            took.vllm_ms.append(vllm.ask("run") * 1e3)
        if turn:  # the first is not kept
            for name_of in ("ours_ms", "sdpa_ms", "vllm_ms"):
                getattr(case, name_of).extend(getattr(took, name_of))
    return case


def print_case(case: Beside) -> None:
    def column(times: list[float]) -> str:
        return f"{statistics.median(times):9.2f} ms {case.ratio(times):6.2f} x" if times else f"{'-':>12} {'-':>8}"

    ours = statistics.median(case.ours_ms)
    print(f"  {case.name:30} {ours:9.2f} ms  {column(case.sdpa_ms)}  {column(case.vllm_ms)}", flush=True)
