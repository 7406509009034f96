"""Decode attention against the roofline of the machine: cases, and how each is timed."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpager import PagedKVCache, ops
from kvpager.cache_dtypes import CACHE_DTYPES
from kvpager.huge_pages import advise_huge_pages
from ops.machine import Machine

NUM_KV_HEADS, HEAD_DIM = 8, 128
DTYPES = {each.name: getattr(torch, each.torch_name) for each in CACHE_DTYPES if each.name != "float64"}


@dataclass(frozen=True)
class Figure:
    """One measured case: medians, and the quickest and slowest fraction of the rounds."""

    name: str
    milliseconds: float
    gbs: float
    read_gbs: float
    fraction: float
    fraction_min: float
    fraction_max: float
    macs_per_byte: float
    gmacs: float


class Pool:
    """A pool of `num_bytes` with shuffled tables, every page written."""

    def __init__(self, dtype: str, block_size: int, num_bytes: int, seed: int = 0) -> None:
        per_token = 2 * NUM_KV_HEADS * (HEAD_DIM * DTYPES[dtype].itemsize + (4 if DTYPES[dtype].itemsize == 1 else 0))
        num_blocks = num_bytes // (per_token * block_size)
        self.cache = PagedKVCache(1, num_blocks, NUM_KV_HEADS, block_size, HEAD_DIM, dtype=DTYPES[dtype])
        self.cache.storage.view(torch.uint8).fill_(60)  # small ordinary numbers in every dtype
        for scale in (*self.cache.key_scale, *self.cache.value_scale):
            scale.fill_(0.01)
        self.query_dtype = torch.bfloat16 if self.cache.quantised else DTYPES[dtype]
        self.generator = torch.Generator().manual_seed(seed)
        self.order = torch.randperm(num_blocks, generator=self.generator).to(torch.int32)

    @property
    def num_tokens(self) -> int:
        return self.cache.num_blocks * self.cache.block_size

    def decode(self, lengths: list[int], group: int) -> tuple[Callable[[], None], int]:
        """A call that decodes one token for sequences of these lengths, and the bytes of K and V it reads."""
        S = self.cache.block_size
        widths = [-(-length // S) for length in lengths]
        table = torch.full((len(lengths), max(widths)), -1, dtype=torch.int32)
        used = 0
        for row, width in enumerate(widths):
            table[row, :width] = self.order[used : used + width]
            used += width
        seq_lens = torch.tensor(lengths, dtype=torch.int32)
        query = torch.randn(len(lengths), NUM_KV_HEADS * group, HEAD_DIM, generator=self.generator)
        query = query.to(self.query_dtype)
        out = torch.empty_like(query)
        cache = self.cache
        scales = {}
        if cache.quantised:
            scales = {"key_scale": cache.key_scale[0], "value_scale": cache.value_scale[0]}

        def call() -> None:
            ops.paged_attention(
                query, cache.key_cache[0], cache.value_cache[0], table, seq_lens, max_seq_len=max(lengths), out=out,
                **scales,
            )  # fmt: skip

        return call, sum(lengths) * cache.bytes_per_token


def against_roofline(
    name: str, machine: Machine, call: Callable[[], None], num_bytes: int, num_macs: int, threads: int, rounds: int
) -> Figure:
    """Rounds of: read the buffer, multiply and add, run the kernel; the fraction is taken within a round."""
    torch.set_num_threads(threads)
    call()
    times, reads, fractions, peaks = [], [], [], []
    for _ in range(rounds):
        read, peak, elapsed = machine.read_gbs(threads), machine.fma_gops(threads), machine.clock(call, threads)
        floor = max(num_bytes / read, num_macs / peak) / 1e9
        times.append(elapsed)
        reads.append(read)
        peaks.append(peak)
        fractions.append(floor / elapsed)
    middle = statistics.median(times)
    return Figure(
        name, middle * 1e3, num_bytes / middle / 1e9, statistics.median(reads), statistics.median(fractions),
        min(fractions), max(fractions), num_macs / num_bytes, statistics.median(peaks),
    )  # fmt: skip


def macs(lengths: list[int], group: int) -> int:
    """Multiply-adds of one decode: one for each element of K and of V and each query head of its group."""
    return 2 * sum(lengths) * NUM_KV_HEADS * group * HEAD_DIM


def packed_sdpa(lengths: int, batch: int, group: int, dtype: torch.dtype) -> tuple[Callable[[], Tensor], int]:
    """torch's attention over contiguous K and V, the heads of a group packed as query rows: it has no pages."""
    shape = (batch, NUM_KV_HEADS, lengths, HEAD_DIM)
    key, value = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
    for tensor in (key, value):
        advise_huge_pages(tensor)  # as the pool has
        tensor.fill_(0.01)
    query = torch.randn(batch, NUM_KV_HEADS, group, HEAD_DIM).to(dtype)
    scale = 1 / math.sqrt(HEAD_DIM)
    return (
        lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale),
        2 * key.numel() * key.element_size(),
    )
