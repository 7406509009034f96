"""The tensor core prefill under the emulator: against the float64 reference, bits that do not move, planted faults."""

import math
import random

import pytest
import torch

from kvpager import ops
from kvpager.ops.tensors import QUANTISED_DTYPES

pytestmark = [pytest.mark.parametrize("kernels", ["emulated"], indirect=True), pytest.mark.usefixtures("kernels")]
CODES = (None, *QUANTISED_DTYPES)
HALVES = (torch.bfloat16, torch.float16)


class Batch:
    """Sequences in a shuffled pool, NaN (or codes with NaN scales) in what is not written; queries of their ends.

    `sizes`: K, group, S, D.
    """

    def __init__(self, seed, number, codes, *, lengths, query_lens, sizes=(2, 2, 16, 64), layout="HND", size=1.0):
        K, group, S, D = sizes
        generator = torch.Generator().manual_seed(seed)
        widths = [-(-length // S) for length in lengths]
        N = sum(widths) + 2
        shape = (N, K, S, D) if layout == "HND" else (N, S, K, D)
        poison = torch.full(shape, math.nan, dtype=number)
        if codes is not None:
            poison = torch.randint(-128, 127, shape, generator=generator).to(torch.int8).view(codes)
        self.caches = [poison.clone(), poison.clone()]
        scales = [torch.full(shape[:3], math.nan) for _ in range(2)] if codes is not None else [None, None]
        self.options = {"key_scale": scales[0], "value_scale": scales[1], "layout": layout}
        blocks = torch.randperm(N, generator=generator).tolist()
        self.table = torch.full((len(lengths), max(widths, default=0) + 1), -7, dtype=torch.int32)
        for row, length in enumerate(lengths):
            for column in range(widths[row]):
                self.table[row, column] = blocks.pop()
            positions = torch.arange(length)
            slots = self.table[row].long()[positions // S] * S + positions % S
            key, value = torch.randn(2, length, K, D, generator=generator) * size
            ops.write_kv(key.to(number), value.to(number), *self.caches, slots, **self.options)
        self.starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        padding = 2  # query rows of no sequence
        self.query = torch.randn(sum(query_lens) + padding, K * group, D, generator=generator).to(number)

    def attend(self, *, max_seq_len=4096, **options):
        """With room for long sequences by default, so that few rows are cut over several blocks."""
        return ops.paged_prefill_lse(
            self.query, *self.caches, self.table, self.starts, self.lengths, max_seq_len=max_seq_len,
            max_query_len=int(self.starts.diff().max()), **self.options, **options,
        )  # fmt: skip

    def reference(self, *, scale, sinks=None, alibi_slopes=None, **options):
        """In float64, over the numbers of the caches."""
        caches, scales = self.caches, [self.options["key_scale"], self.options["value_scale"]]
        wide = [
            cache.double() if factor is None else cache.double() * factor.double().unsqueeze(-1)
            for cache, factor in zip(caches, scales, strict=True)
        ]
        if self.options["layout"] == "NHD":
            wide = [cache.transpose(1, 2) for cache in wide]
        return ops.attention.reference.paged_prefill(
            self.query.double(), *wide, self.table, self.starts, self.lengths, scale=scale,
            sinks=None if sinks is None else sinks.double(),
            alibi_slopes=None if alibi_slopes is None else alibi_slopes.double(),
            max_query_len=10**6, max_seq_len=10**6, **options,
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("number", HALVES)
def test_b066_b078_b079_b084_equals_the_float64_reference(monkeypatch, tolerance, number, codes, seed):
    """Prompts, chunks, drafts and nothing, in one batch; every head dim, ratio, block size and option in turn."""
    monkeypatch.setenv("KVPAGER_EMULATE_SEED", str(seed))
    rng = random.Random(seed + 10 * CODES.index(codes) + 100 * HALVES.index(number))
    K, group = rng.choice(((1, 1), (2, 3), (1, 8), (1, 7), (2, 2)))
    D = rng.choice((64, 80, 128, 256) if group < 7 else (64, 96))
    lengths = [0, rng.choice((63, 64, 65, 130)), rng.randint(1, 20)]
    most = rng.choice((8, 40, 130))  # 8: the rows of a sequence are few
    query_lens = [min(length, most if length > 20 else rng.randint(0, most)) for length in lengths]
    batch = Batch(
        seed, number, codes, lengths=lengths, query_lens=query_lens, sizes=(K, group, rng.choice((1, 5, 16)), D),
        layout=rng.choice(("HND", "NHD")),
    )  # fmt: skip
    options = {"scale": 0.11, "window": rng.choice((0, 0, 1, 40)), "softcap": rng.choice((0.0, 3.0))}
    options["sinks"] = rng.choice((None, torch.randn(K * group)))
    options["alibi_slopes"] = rng.choice((None, torch.rand(K * group) - 0.02))
    out, lse = batch.attend(**options)
    wanted, wanted_lse = batch.reference(**options)
    # A weight times the scale of a value is rounded to the type of the queries: another half unit of the last place.
    atol = tolerance[number] * (1.0 if codes is None else 1.5)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=atol)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=0, atol=1e-5)
    assert (out[-2:] == 0).all()


@pytest.mark.parametrize("size", [1e-6, 1e4])
@pytest.mark.parametrize("codes", CODES[1:])
@pytest.mark.parametrize("number", HALVES)
def test_scales_far_from_1_lose_nothing(number, codes, size):
    """float16 has subnormals from 6e-5 down and ends at 65504: weights times scales must fit all the same."""
    if number is torch.float16 and size < 1:
        size = 1e-4  # the rows themselves are float16
    batch = Batch(3, number, codes, lengths=[90], query_lens=[20], size=size)
    out, _ = batch.attend(scale=0.1 / size)
    wanted, _ = batch.reference(scale=0.1 / size)
    torch.testing.assert_close(out.double() / size, wanted / size, rtol=0, atol=1e-2)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize(("window", "slopes"), [(0, None), (50, None), (50, torch.tensor([0.5, 0.0, 0.1, -0.01]))])
def test_b081_bits_do_not_depend_on_chunks(codes, window, slopes):
    """100 tokens at once and in chunks: each token gets the same bits, as long as its rows are not few."""
    whole = Batch(1, torch.bfloat16, codes, lengths=[100], query_lens=[100], sizes=(2, 2, 16, 128))
    options = {"scale": 0.1, "window": window, "alibi_slopes": slopes}
    out, _ = whole.attend(**options)
    pieces = []
    for first, last in ((0, 33), (33, 70), (70, 100)):
        bounds = torch.tensor([0, last - first, last], dtype=torch.int32)
        pieces.append(
            ops.paged_prefill(
                whole.query[first:last], *whole.caches, whole.table, bounds[:2], bounds[2:], **options, **whole.options,
            )
        )  # fmt: skip
    assert torch.equal(torch.cat(pieces), out[:100])


@pytest.mark.parametrize("query_len", [4, 70], ids=["shared rows", "own rows"])
@pytest.mark.parametrize("codes", CODES[:2])
@pytest.mark.parametrize(("setting", "number"), [("SKIP_BARRIER", 2), ("SKIP_BARRIER", 5), ("SKIP_WAIT", 2), ("", 0)])
def test_planted_faults_are_caught(monkeypatch, codes, query_len, setting, number):
    """Without one of its barriers, or one of its waits for a copy, some schedule gives wrong numbers."""
    batch = Batch(2, torch.bfloat16, codes, lengths=[200], query_lens=[query_len], sizes=(1, 2, 16, 64))
    wanted, _ = batch.reference(scale=0.1)
    if setting == "SKIP_WAIT" and codes is None:
        number += 1  # the first wait of the loop is for what has landed already
    if setting:
        monkeypatch.setenv(f"KVPAGER_EMULATE_{setting}", str(number))
    differ = []
    for seed in range(4):  # 0: copies land when waited for, and no sooner
        monkeypatch.setenv("KVPAGER_EMULATE_SEED", str(seed))
        differ.append(
            not torch.allclose(batch.attend(scale=0.1, max_seq_len=200)[0].double(), wanted, rtol=0, atol=1e-2)
        )
    assert any(differ) == bool(setting)


def test_other_calls_take_the_plain_kernel():
    """Head dims, dtypes and strides that 16-byte accesses do not fit give the same numbers."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 3, 2, 16, 72, generator=generator).bfloat16()
    query, table = torch.randn(9, 4, 72, generator=generator).bfloat16(), torch.tensor([[2, 0, 1]], dtype=torch.int32)
    bounds = torch.tensor([0, 9, 40], dtype=torch.int32)
    for dims in (slice(0, 64), slice(4, 68), slice(0, 36)):  # aligned; at 8 bytes; 72 bytes a row
        caches = [cache[..., dims] for cache in (keys, values)]
        out = ops.paged_prefill(query[..., dims], *caches, table, bounds[:2], bounds[2:], scale=0.1)
        wide = [cache.double() for cache in caches]
        wanted = ops.attention.reference.paged_prefill(
            query[..., dims].double(), *wide, table, bounds[:2], bounds[2:], scale=0.1, max_query_len=9, max_seq_len=48
        )[0]
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1.6e-2)
