"""What a block size costs, 1 to 256: the numbers behind the default of 16."""

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from kvpager import KVBlockManager
from ops.decode import Figure, Pool, against_roofline, macs
from ops.machine import Machine

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
NUM_SEQUENCES, APPEND_FROM, APPEND_STEPS = 256, 512, 256
CONTEXT = 32768
POOL_TOKENS = 1 << 18  # 1 GB of bfloat16 with K = 8, D = 128


@dataclass(frozen=True)
class Row:
    """One block size.

    Attributes:
        block_size: S.
        waste: positions of a pool that hold nothing, over all, for lengths spread evenly over 1 to 2,048.
        lost_hit_tokens: tokens of a shared prefix that are computed again because their block is not full, on average.
        table_bytes: of the block table of 32k tokens.
        append_ns: of the metadata plane for a token: one for each of 256 sequences, in batches, from Python.
        admit_us: of the metadata plane for a prompt of 32k tokens whose blocks are all cached but the last.
        decode: attention over the whole pool.
    """

    block_size: int
    waste: float
    lost_hit_tokens: float
    table_bytes: int
    append_ns: float
    admit_us: float
    decode: Figure


def waste(block_size: int) -> float:
    lengths = range(1, 2049)
    return 1 - sum(lengths) / sum(-(-length // block_size) * block_size for length in lengths)


def append_ns(block_size: int) -> float:
    """Nanoseconds per token: 256 sequences grow from 512 to 768 tokens; the quickest of three turns."""
    turns = []
    for _ in range(3):
        manager = KVBlockManager(POOL_TOKENS // block_size, block_size)
        ids = torch.arange(NUM_SEQUENCES)
        slots = torch.empty(NUM_SEQUENCES, dtype=torch.int64)
        for sequence in range(NUM_SEQUENCES):
            manager.create_sequence(sequence)
            manager.append_tokens(sequence, APPEND_FROM)
        start = time.perf_counter()
        for _ in range(APPEND_STEPS):
            manager.slot_mapping_for_append(ids, out=slots)
        turns.append((time.perf_counter() - start) / APPEND_STEPS / NUM_SEQUENCES * 1e9)
    return min(turns)


def admit_us(block_size: int) -> float:
    """Microseconds to admit a prompt of 32k tokens that is cached; the median of nine."""
    manager = KVBlockManager(POOL_TOKENS // block_size, block_size, enable_prefix_caching=True)
    prompt = np.random.default_rng(0).integers(0, 2**15, CONTEXT)
    slots = np.empty(CONTEXT, dtype=np.int64)
    turns = []
    for sequence in range(10):
        start = time.perf_counter()
        manager.admit(sequence, prompt, out=slots)
        turns.append((time.perf_counter() - start) * 1e6)
        manager.commit(sequence, CONTEXT)
        manager.release_sequence(sequence)
    return statistics.median(turns[1:])


def sweep(machine: Machine, num_bytes: int, threads: int, rounds: int) -> list[Row]:
    print(f"\nblock sizes: bfloat16, G=2, 8 sequences that fill the pool, {threads} threads")
    print("   S    waste  lost of a hit  table of 32k      append  admit 32k   decode of the roofline")
    rows = []
    for block_size in BLOCK_SIZES:
        pool = Pool("bfloat16", block_size, num_bytes)
        lengths = [pool.num_tokens // 8 // block_size * block_size] * 8
        call, read = pool.decode(lengths, 2)
        decode = against_roofline(f"S={block_size}", machine, call, read, macs(lengths, 2), threads, rounds)
        row = Row(block_size, waste(block_size), (block_size - 1) / 2, 4 * -(-CONTEXT // block_size),
                  append_ns(block_size), admit_us(block_size), decode)  # fmt: skip
        rows.append(row)
        print(
            f"{block_size:4} {row.waste:8.2%} {row.lost_hit_tokens:9.1f} tokens {row.table_bytes:8} bytes "
            f"{row.append_ns:6.1f} ns {row.admit_us:7.0f} us   {decode.milliseconds:6.1f} ms {decode.fraction:5.0%} "
            f"({decode.fraction_min:.0%} to {decode.fraction_max:.0%})",
            flush=True,
        )
    return rows
