"""Three kinds of fault, each caught whole by a property: what is padding, where things lie, what a setting does.

Property 9: nothing unwritten, padded or skipped has a part in a result. Property 10: strides, views, head ratios and
block ids give the oracle's value. Property 11: each setting changes the result by the amount predicted, in every path.
"""

import math
import random

import pytest
import torch

from kvpager import ops
from kvpager.errors import ArgumentError

NATIVE_AND_REFERENCE = pytest.mark.parametrize("kernels", ["native", "reference", "emulated"], indirect=True)


def fills(dtype):
    """What may lie where nothing was written."""
    return (math.nan, math.inf, -math.inf, torch.finfo(dtype).max, 0.5)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


# --- property 9: padding and poison -----------------------------------------------------------------------------------


def whole_step(seed, fill, illegal):
    """Every op once on a padded batch; all that must not matter is `fill` (floats) or `illegal` (table entries).

    Returns all results and the written part of the caches. What is drawn depends on the seed alone.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16, torch.float64))
    K, group, D, S = rng.choice((1, 2)), rng.choice((1, 3, 4)), rng.choice((8, 20, 64)), rng.choice((1, 4, 16))
    H, lengths = K * group, [rng.randint(0, 3 * S + 1) for _ in range(3)]
    wide = torch.promote_types(dtype, torch.float32)

    def random_rows(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    def filled(*shape, of=dtype):
        return torch.full(shape, fill, dtype=of)

    widths = [-(-length // S) for length in lengths]
    N, M = sum(widths) + 2, max(widths) + 2
    free = torch.randperm(N, generator=generator).tolist()
    table = torch.full((3, M), illegal, dtype=torch.int32)
    slots = []
    for row, length in enumerate(lengths):
        for position in range(length):
            if position % S == 0:
                table[row, position // S] = free.pop()
            slots.append(int(table[row, position // S]) * S + position % S)
    caches = [filled(N, K, S, D), filled(N, K, S, D)]
    skipped = 2  # rows in the middle whose slot is -1, and rows behind that have no slot
    T = len(slots)
    order = torch.tensor([-1] * skipped + slots)
    rows = [torch.cat([filled(skipped, K, D), random_rows(T, K, D), filled(3, K, D)]) for _ in range(2)]
    ops.write_kv(*rows, *caches, order)

    options = {"window": rng.choice((0, 3)), "softcap": rng.choice((0.0, 2.0))}
    lens = ints(*lengths)
    query = random_rows(3, H, D)
    decoded = ops.paged_attention_lse(
        query, *caches, table, lens, **options, out=filled(3, H, D), lse=filled(3, H, of=wide)
    )
    query_lens = [rng.randint(0, length) for length in lengths]
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    queries = torch.cat([random_rows(int(starts[-1]), H, D), filled(2, H, D)])
    prefilled = ops.paged_prefill_lse(
        queries, *caches, table, starts, lens, **options,
        out=filled(len(queries), H, D), lse=filled(len(queries), H, of=wide),
    )  # fmt: skip
    empty = torch.full((3, H), -math.inf, dtype=wide)
    merged = ops.merge_attention_lse(*decoded, filled(3, H, D), empty, out=filled(3, H, D), lse=filled(3, H, of=wide))
    assert torch.equal(merged[0], decoded[0])  # an empty part changes nothing
    # The fused op, into the slots of the same tokens; the skipped rows have queries, but no slot.
    qkv = torch.cat([random_rows(skipped + T, (H + 2 * K) * D), filled(2, (H + 2 * K) * D)])
    angles = torch.rand(9, D, generator=generator).to(wide)
    positions = torch.cat([torch.randint(0, 9, (skipped + T,), generator=generator), torch.tensor([illegal, illegal])])
    fused = ops.qk_norm_rope_write(
        qkv, random_rows(D), None, angles, positions, *caches, order, query_out=filled(skipped + T, H, D)
    )
    for length, result in zip(lengths, decoded[0], strict=True):
        assert length > 0 or (result == 0).all()
    assert (prefilled[0][int(starts[-1]) :] == 0).all()
    written = torch.zeros(N * S, dtype=torch.bool)
    written[slots] = True
    by_slot = [cache.transpose(1, 2).reshape(N * S, K, D) for cache in caches]
    for cache in by_slot:
        rest = cache[~written]
        assert torch.equal(rest, torch.full_like(rest, fill)) or (math.isnan(fill) and rest.isnan().all())
    return [*decoded, *prefilled, *merged, fused, *(cache[written] for cache in by_slot)]


@NATIVE_AND_REFERENCE
@pytest.mark.parametrize("seed", range(10))
def test_property_9_padding_and_poison_have_no_part(kernels, seed):
    wanted = whole_step(seed, 0.25, 0)
    for fill in fills(torch.float16):
        for illegal in (-1, 2**31 - 1):
            got = whole_step(seed, fill, illegal)
            for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
                assert torch.equal(a, b), (fill, illegal, index)
                assert not a.isnan().any()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("isa")
def test_property_9_on_every_isa(seed):
    wanted = whole_step(100 + seed, 0.25, 0)
    got = whole_step(100 + seed, math.nan, 2**31 - 1)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


# --- property 10: addressing and layout -------------------------------------------------------------------------------


def scattered(rng, sizes, dtype, fill=math.nan):
    """A tensor of these sizes, the last dimension contiguous, whose others lie in any order, with holes."""
    order = list(range(len(sizes) - 1))
    rng.shuffle(order)
    padded = [sizes[axis] * rng.choice((1, 2)) + rng.choice((0, 1)) for axis in order]
    memory = torch.full((*padded, sizes[-1] + rng.choice((0, 3))), fill, dtype=dtype)
    view = memory.permute(*(order.index(axis) for axis in range(len(order))), len(order))
    for axis, size in enumerate(sizes[:-1]):
        step = rng.choice((1, 2)) if view.shape[axis] >= 2 * size else 1
        view = view.narrow(axis, 0, size * step).unfold(axis, 1, step).squeeze(-1)
    return view[..., : sizes[-1]]


@NATIVE_AND_REFERENCE
@pytest.mark.parametrize("seed", range(25))
def test_property_10_strides_views_and_ratios(kernels, tolerance, seed):
    """Writes and reads through views of any strides; the oracle sees contiguous rows only."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16, torch.float64))
    wide = torch.promote_types(dtype, torch.float32)
    K, group, S = rng.choice((1, 2, 3)), rng.choice((1, 2, 5, 7)), rng.choice((1, 2, 3, 16, 33))
    D, H = rng.choice((1, 3, 8, 24, 64, 80, 128)), K * group
    lengths = [rng.randint(1, 2 * S + 3) for _ in range(2)]
    widths = [-(-length // S) for length in lengths]
    N = sum(widths) + 5
    caches = [scattered(rng, (N, K, S, D), dtype) for _ in range(2)]
    blocks = list(range(N - 1, N - 1 - sum(widths), -1))  # the highest ids
    rng.shuffle(blocks)
    table = scattered(rng, (2, max(widths) + 1, 1), torch.int32, fill=-1)[..., 0]
    for row, width in enumerate(widths):
        table[row, :width] = ints(*(blocks.pop() for _ in range(width)))
    lens = scattered(rng, (2, 1), torch.int32, fill=0)[:, 0].copy_(ints(*lengths))
    keys, values = ([torch.randn(length, K, D, generator=generator).to(dtype) for length in lengths] for _ in range(2))
    for row, length in enumerate(lengths):
        slots = [int(table[row, position // S]) * S + position % S for position in range(length)]
        rows = [scattered(rng, (length, K, D), dtype).copy_(source[row]) for source in (keys, values)]
        ops.write_kv(*rows, *caches, scattered(rng, (length, 1), torch.int64, fill=0)[:, 0].copy_(torch.tensor(slots)))
    query_lens = [rng.randint(1, length) for length in lengths]
    starts = scattered(rng, (3, 1), torch.int32, fill=0)[:, 0]
    starts.copy_(torch.tensor([0, *query_lens]).cumsum(0))
    T = sum(query_lens)
    query = scattered(rng, (T, H, D), dtype).copy_(torch.randn(T, H, D, generator=generator))
    results = [(scattered(rng, (rows, H, D), dtype), scattered(rng, (rows, H, 1), wide)[..., 0]) for rows in (T, 2)]
    ops.paged_prefill(query, *caches, table, starts, lens, out=results[0][0], lse=results[0][1])
    last = starts[1:].long() - 1
    ops.paged_attention(query[last], *caches, table, lens, out=results[1][0], lse=results[1][1])
    for row, (length, query_len) in enumerate(zip(lengths, query_lens, strict=True)):
        for index in range(query_len):
            seen = length - query_len + index + 1
            token = int(starts[row]) + index
            for head in range(H):
                logits = keys[row][:seen, head // group].double() @ query[token, head].double() * D**-0.5
                wanted = torch.softmax(logits, 0) @ values[row][:seen, head // group].double()
                places = [(results[0], token)] + ([(results[1], row)] if seen == length else [])
                for (out, lse), place in places:
                    torch.testing.assert_close(out[place, head].double(), wanted, rtol=0, atol=tolerance[dtype])
                    assert abs(float(lse[place, head]) - float(torch.logsumexp(logits, 0))) < 1e-5


def test_property_10_offsets_past_2_31(tmp_path):
    """Prefill and the fused op on blocks whose offset in elements passes 2^31: a sparse file stands for the pool."""
    S, D, stride = 4, 8, 2**30 + 64
    with (tmp_path / "pool").open("wb") as file:
        file.truncate(4 * (3 * stride + S * D))
    pool = torch.from_file(str(tmp_path / "pool"), shared=True, size=3 * stride + S * D, dtype=torch.float32)
    caches = [torch.as_strided(pool, (4, 1, S, D), (stride, S * D, D, 1), offset) for offset in (0, 0)]
    qkv, angles = torch.randn(4, 3 * D), torch.cat([torch.ones(1, D // 2), torch.zeros(1, D // 2)], 1)
    qkv[:, D : 2 * D] = qkv[:, 2 * D :]  # both caches are one memory: key = value
    slots = torch.arange(12, 16)
    query = ops.qk_norm_rope_write(qkv, None, None, angles, torch.zeros(4, dtype=torch.int64), *caches, slots)
    assert torch.equal(pool[3 * stride :].view(S, D), qkv[:, 2 * D :])
    out = ops.paged_prefill(query, *caches, ints(3)[None], ints(0, 4), ints(4))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), qkv[None, :, D : 2 * D], qkv[None, :, 2 * D :], is_causal=True
    )
    torch.testing.assert_close(out, wanted.transpose(0, 1), rtol=0, atol=1e-6)


# --- property 11: a setting changes the result by the predicted amount ------------------------------------------------

PATHS = ("decode", "prefill", "chunk", "shared prefix")


def attend(path, keys, values, query, **options):
    """Attention of the last of len(keys) positions, D = 1, one head, S = 2, by one of the paths: (out, lse)."""
    n = len(keys)
    caches = [torch.full((-(-n // 2), 1, 2, 1), math.nan) for _ in range(2)]
    for cache, rows in zip(caches, (keys, values), strict=True):
        cache.view(-1)[:n] = torch.tensor(rows, dtype=torch.float32)
    table, lens = torch.arange(-(-n // 2), dtype=torch.int32)[None], ints(n)
    one = torch.tensor([[[float(query)]]])
    options = {"scale": 1.0, **options}
    if path == "decode":
        out, lse = ops.paged_attention_lse(one, *caches, table, lens, **options)
    elif path == "prefill":
        out, lse = ops.paged_prefill_lse(one.expand(n, 1, 1), *caches, table, ints(0, n), lens, **options)
    elif path == "chunk":  # two tokens on a cached prefix
        out, lse = ops.paged_prefill_lse(one.expand(2, 1, 1), *caches, table, ints(0, 2), lens, **options)
    else:
        out, lse = ops.shared_prefix_attention_lse(one, *caches, table, lens, 2, **options)
    return float(out[-1, 0, 0]), float(lse[-1, 0])


def expect(got, logits, values, extra=()):
    """`got` is (out, lse) of these logits over these values; `extra` logits have none."""
    total = sum(math.exp(logit) for logit in (*logits, *extra))
    out = sum(math.exp(logit) * value for logit, value in zip(logits, values, strict=True)) / total
    assert got == (pytest.approx(out, abs=2e-6), pytest.approx(math.log(total), abs=2e-6))
    return out


KEYS, VALUES, QUERY = (0.5, -1.0, 2.0, 1.0, -0.25), (1.0, 10.0, -3.0, 5.0, 2.0), 1.5
SCORES = [key * QUERY for key in KEYS]


@NATIVE_AND_REFERENCE
@pytest.mark.parametrize("path", PATHS)
class TestProperty11:
    def test_scale(self, kernels, path):
        plain = expect(attend(path, KEYS, VALUES, QUERY), SCORES, VALUES)
        for scale in (0.5, -1.0, 0.0):
            got = attend(path, KEYS, VALUES, QUERY, scale=scale)
            assert expect(got, [scale * score for score in SCORES], VALUES) != pytest.approx(plain, abs=0.1)

    def test_default_scale_is_of_the_head_dim(self, kernels, path):
        expect(attend(path, KEYS, VALUES, QUERY, scale=None), SCORES, VALUES)  # D = 1

    def test_softcap(self, kernels, path):
        plain = expect(attend(path, KEYS, VALUES, QUERY), SCORES, VALUES)
        for cap in (0.5, 3.0):
            got = attend(path, KEYS, VALUES, QUERY, softcap=cap)
            bent = [cap * math.tanh(score / cap) for score in SCORES]
            assert expect(got, bent, VALUES) != pytest.approx(plain, abs=0.05)
        # The cap bends scaled scores, not the dot products.
        got = attend(path, KEYS, VALUES, QUERY, softcap=1.0, scale=2.0)
        expect(got, [math.tanh(2 * score) for score in SCORES], VALUES)

    def test_sinks(self, kernels, path):
        plain = expect(attend(path, KEYS, VALUES, QUERY), SCORES, VALUES)
        for sink in (-2.0, 3.0):
            got = attend(path, KEYS, VALUES, QUERY, sinks=torch.tensor([sink]))
            assert expect(got, SCORES, VALUES, [sink]) != pytest.approx(plain, abs=1e-3)

    def test_alibi(self, kernels, path):
        if path == "shared prefix":
            with pytest.raises(ArgumentError, match="`alibi_slopes`: wanted none beside a shared prefix"):
                attend(path, KEYS, VALUES, QUERY, alibi_slopes=torch.tensor([0.5]))
            return
        plain = expect(attend(path, KEYS, VALUES, QUERY), SCORES, VALUES)
        for slope in (0.5, -0.25):
            distances = range(1 - len(KEYS), 1)
            biased = [score + slope * distance for score, distance in zip(SCORES, distances, strict=True)]
            got = attend(path, KEYS, VALUES, QUERY, alibi_slopes=torch.tensor([slope]))
            assert expect(got, biased, VALUES) != pytest.approx(plain, abs=0.05)
            # Neither the scale nor the cap touches it.
            got = attend(path, KEYS, VALUES, QUERY, alibi_slopes=torch.tensor([slope]), softcap=1.0, scale=2.0)
            bent = [math.tanh(2 * score) + slope * at for score, at in zip(SCORES, distances, strict=True)]
            expect(got, bent, VALUES)

    def test_window(self, kernels, path):
        if path == "shared prefix":
            # A window has no shared prefix: the op refuses one, rather than ignoring it.
            with pytest.raises(ArgumentError, match="`window`: wanted none beside a shared prefix, got 3"):
                attend(path, KEYS, VALUES, QUERY, window=3)
            return
        results = set()
        for window in range(1, 6):
            got = attend(path, KEYS, VALUES, QUERY, window=window)
            results.add(round(expect(got, SCORES[-window:], VALUES[-window:]), 3))
        assert len(results) == 5
        expect(attend(path, KEYS, VALUES, QUERY, window=6), SCORES, VALUES)

    def test_lengths_and_tables(self, kernels, path):
        expect(attend(path, KEYS[:4], VALUES[:4], QUERY), SCORES[:4], VALUES[:4])
        expect(attend(path, KEYS[::-1], VALUES[::-1], QUERY), SCORES, VALUES)  # positions carry no weight of their own

    def test_extremes(self, kernels, path):
        """Scores of ±1e30 leave one position; a NaN query gives NaN, no other number."""
        out, lse = attend(path, (0.0, 1.0, -1.0), (4.0, 7.0, 9.0), 1e30)
        assert (out, lse) == (7.0, pytest.approx(1e30))
        assert math.isnan(attend(path, KEYS, VALUES, math.nan)[0])


@NATIVE_AND_REFERENCE
class TestProperty11OfTheFusedOp:
    def run(self, *, eps=0.0, q_weight=None, k_weight=None, position=1, angles=(0.3, 1.1)):
        """One token, H = K = 1, D = 2: query (3, 4), key (-6, 8), value (5, 7). Returns query, key and value."""
        cos_sin = torch.tensor([[math.cos(angle), math.sin(angle)] for angle in angles])
        caches = [torch.zeros(1, 1, 1, 2) for _ in range(2)]
        weights = [None if weight is None else torch.tensor(weight) for weight in (q_weight, k_weight)]
        query = ops.qk_norm_rope_write(
            torch.tensor([[3.0, 4.0, -6.0, 8.0, 5.0, 7.0]]), *weights, cos_sin, torch.tensor([position]), *caches,
            torch.tensor([0]), eps=eps,
        )  # fmt: skip
        return [complex(*rows.flatten().tolist()) for rows in (query, *caches)]

    def check(self, got, query, key):
        assert got == [pytest.approx(query, abs=1e-5), pytest.approx(key, abs=1e-5), complex(5, 7)]

    def test_position_and_angles(self, kernels):
        for position, angle in ((0, 0.3), (1, 1.1)):
            turn = complex(math.cos(angle), math.sin(angle))
            self.check(self.run(position=position), complex(3, 4) * turn, complex(-6, 8) * turn)

    def test_each_norm_alone(self, kernels):
        none = {"angles": (0.0, 0.0)}
        q_rms, k_rms = math.sqrt(12.5), math.sqrt(50)
        self.check(self.run(q_weight=(2.0, 3.0), **none), complex(6, 12) / q_rms, complex(-6, 8))
        self.check(self.run(k_weight=(2.0, 3.0), **none), complex(3, 4), complex(-12, 24) / k_rms)

    def test_eps(self, kernels):
        ones = {"q_weight": (1.0, 1.0), "k_weight": (1.0, 1.0), "angles": (0.0, 0.0)}
        self.check(self.run(eps=50.0, **ones), complex(3, 4) / math.sqrt(62.5), complex(-6, 8) / 10)
