"""The hand-off of attention: who is chosen, what is refused, and that every backend gives the specification's numbers.

FlashInfer and flash-attn are played by tests/ops/fake_packages.py; where one is installed beside a GPU it is run too.
"""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

from kvpager import PagedKVCache, native, ops
from kvpager.cache import AttentionMetadata
from kvpager.errors import ArgumentError, ConfigError
from kvpager.ops.attention import backends
from kvpager.ops.attention.backends import call as call_module
from kvpager.ops.attention.backends import flash_attn, flashinfer
from kvpager.ops.attention.options import AttentionKeywords, AttentionOptions, DecodeKeywords
from kvpager.ops.op import OPS

BLOCK_SIZE = {"flashinfer": 16, "flash_attn 2": 256, "flash_attn 3": 16}
MODULES = {"flashinfer": "flashinfer", "flash_attn 2": "flash_attn", "flash_attn 3": "flash_attn_interface"}


def forget():
    for cached in (flashinfer._package, flashinfer._wrapper, flash_attn._version, flash_attn._package):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def fresh():
    forget()
    yield
    forget()


@pytest.fixture
def fakes():
    spec = importlib.util.spec_from_file_location("fake_packages", Path(__file__).with_name("fake_packages.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def install(fakes, monkeypatch):
    """`install("flash_attn 2")`: a fake of that package only, which works on the CPU."""

    def put(*names):
        for module in MODULES.values():
            monkeypatch.delitem(sys.modules, module, raising=False)
        found = {}
        for name in names:
            fake = fakes.flashinfer() if name == "flashinfer" else fakes.flash_attn(int(name[-1]))
            found[MODULES[name]] = fake
            monkeypatch.setitem(sys.modules, MODULES[name], fake)
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: found.get(name) if name in MODULES.values() else find(name)
        )
        monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 16)
        monkeypatch.setattr(call_module, "HANDED_OFF_DEVICE", "cpu")
        return next(iter(found.values()), None)

    return put


@pytest.fixture(params=[*BLOCK_SIZE, "flashinfer on the GPU", "flash_attn on the GPU", "reference"])
def backend(request, install):
    """(name, block size, device) of a backend that can run here."""
    name = request.param.split()[0]
    if request.param == "reference":
        return name, 16, "cpu"
    if request.param in BLOCK_SIZE:
        install(request.param)
        return name, BLOCK_SIZE[request.param], "cpu"
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    if reason := importlib.import_module(f"kvpager.ops.attention.backends.{name}").missing():
        pytest.skip(f"{name}: {reason}")
    return name, 256 if flash_attn._version() == 2 else 16, "cuda"


LENGTHS = [0, 1, 300, 256, 17]
OPTIONS = [{}, {"window": 7}, {"softcap": 3.0}, {"window": 200, "softcap": 2.0, "scale": 0.3}]


def moved(case, device):
    # The packages fetch whole tiles: what is not written must be finite for them.
    caches = [torch.nan_to_num(cache).to(device) for cache in (case.key_cache, case.value_cache)]
    return (*caches, case.block_tables.to(device)), case.seq_lens.to(device)


def same(got, wanted, dtype, tolerance):
    torch.testing.assert_close(got[0].float().cpu(), wanted[0], rtol=0, atol=tolerance[dtype])
    torch.testing.assert_close(got[1].cpu(), wanted[1], rtol=0, atol=1e-3)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("options", OPTIONS)
def test_decode_equals_the_reference(backend, make_case, tolerance, options, layout):
    name, block_size, device = backend
    dtype = torch.float16
    case = make_case(LENGTHS, dtype=dtype, head_dim=64, group=3, block_size=block_size, layout=layout)
    query = case.random(len(LENGTHS), case.num_heads, 64)
    paged, lengths = moved(case, device)
    got = ops.paged_attention_lse(query.to(device), *paged, lengths, layout=layout, backend=name, **options)
    hnd = [cache if layout == "HND" else cache.transpose(1, 2) for cache in (case.key_cache, case.value_cache)]
    wanted = ops.attention.reference.paged_attention(
        query, *hnd, case.block_tables, case.seq_lens, max_seq_len=512, **{"scale": 0.125, **options}
    )
    same(got, wanted, dtype, tolerance)
    without_lse = ops.paged_attention(query.to(device), *paged, lengths, layout=layout, backend=name, **options)
    assert torch.equal(without_lse, got[0])


@pytest.mark.parametrize("options", OPTIONS)
def test_prefill_equals_the_reference(backend, make_case, tolerance, options):
    name, block_size, device = backend
    dtype = torch.bfloat16
    case = make_case(LENGTHS[1:], dtype=dtype, head_dim=128, group=2, block_size=block_size)
    starts = torch.tensor([0, 1, 31, 31, 48], dtype=torch.int32)
    query = case.random(50, case.num_heads, 128)  # two rows belong to nobody
    paged, lengths = moved(case, device)
    got = ops.paged_prefill_lse(query.to(device), *paged, starts.to(device), lengths, backend=name, **options)
    wanted = ops.attention.reference.paged_prefill(
        query, case.key_cache, case.value_cache, case.block_tables, starts, case.seq_lens, max_query_len=50,
        max_seq_len=512, **{"scale": 128**-0.5, **options},
    )  # fmt: skip
    same(got, wanted, dtype, tolerance)


def test_flashinfer_is_told_pages_and_their_fill(install, make_case):
    package = install("flashinfer")
    case = make_case([0, 16, 17], dtype=torch.float16, head_dim=64, block_size=16)
    out = torch.empty(3, 4, 64, dtype=torch.float16)
    paged, lengths = moved(case, "cpu")
    ops.paged_attention(case.random(3, 4, 64), *paged, lengths, backend="flashinfer", window=9, out=out)
    (_, given, options), _ = package.calls
    starts, pages, last_fill, *sizes = given
    assert starts.tolist() == [0, 0, 1, 3]
    assert pages.tolist() == [case.block_tables[1, 0], *case.block_tables[2, :2]]
    assert last_fill.tolist() == [0, 16, 1]
    assert {tensor.dtype for tensor in (starts, pages, last_fill)} == {torch.int32}
    assert sizes == [4, 2, 64, 16]
    assert options == {
        "window_left": 8, "logits_soft_cap": 0.0, "sm_scale": 0.125, "q_data_type": torch.float16,
        "kv_data_type": torch.float16,
    }  # fmt: skip


def test_flash_attention_2_is_told_bounds_of_lengths(install, make_case):
    package = install("flash_attn 2")
    case = make_case([300], dtype=torch.float16, head_dim=64, block_size=256)
    paged, lengths = moved(case, "cpu")
    starts = torch.tensor([0, 4], dtype=torch.int32)
    ops.paged_prefill(case.random(4, 4, 64), *paged, starts, lengths, max_seq_len=400, backend="flash_attn")
    ((kind, given),) = package.calls
    assert (kind, given.max_q, given.max_k, given.window_size) == ("varlen", 4, 400, (-1, -1))


REFUSED = [
    ("flashinfer", {"head_dim": 40}, {}, "a head dim of 40 (it has 64, 128, 256)"),
    ("flashinfer", {"dtype": torch.float32}, {}, "torch.float32"),
    ("flashinfer", {}, {"sinks": torch.zeros(4)}, "sinks"),
    ("flashinfer", {}, {"alibi_slopes": torch.zeros(4)}, "alibi_slopes"),
    ("flashinfer", {}, {"fixed_split": 512}, "a fixed split"),
    ("flash_attn 2", {}, {}, "blocks of 16 (version 2 has multiples of 256)"),
    ("flash_attn 3", {"head_dim": 264}, {}, "a head dim of 264 (it has multiples of 8 up to 256)"),
]


@pytest.mark.parametrize(("package", "sizes", "options", "what"), REFUSED)
def test_what_a_package_does_not_take_is_said(install, make_case, package, sizes, options, what):
    install(package)
    case = make_case([5], **{"dtype": torch.float16, "head_dim": 64, "block_size": 16, **sizes})
    paged, lengths = moved(case, "cpu")
    name = package.split()[0]
    with pytest.raises(ArgumentError) as caught:
        ops.paged_attention(case.random(1, 4, case.head_dim), *paged, lengths, backend=name, **options)
    assert str(caught.value) == f"`backend`: wanted one that takes {what}, got {name}"


@pytest.mark.parametrize("name", ["flashinfer", "flash_attn"])
def test_a_package_refuses_every_option_that_it_does_not_name(name, make_case):
    """So an option that is added tomorrow is refused by name, not ignored."""
    package = {"flashinfer": flashinfer, "flash_attn": flash_attn}[name]
    given = {"scale": 0.5, "window": 3, "softcap": 2.0}
    assert set(given) == package.OPTIONS <= set(AttentionOptions._fields)
    assert AttentionOptions(**given).unsupported(package.OPTIONS) is None
    tensor = torch.ones(4)
    for option in set(AttentionOptions._fields) - package.OPTIONS:
        assert AttentionOptions(**{option: tensor}).unsupported(package.OPTIONS) == option


def test_the_options_are_the_keywords_of_the_ops():
    assert set(AttentionOptions._fields) == set(AttentionKeywords.__annotations__)
    schemas = [OPS[name].call._schema.arguments for name in ("paged_attention", "paged_prefill")]
    for arguments in schemas:
        assert set(AttentionOptions._fields) <= {argument.name for argument in arguments}
    split = {argument.name for argument in schemas[0]} - {argument.name for argument in schemas[1]}
    assert split == set(DecodeKeywords.__annotations__) - set(AttentionKeywords.__annotations__)


def test_a_quantised_cache_and_the_cpu_are_refused(install, monkeypatch):
    install("flashinfer")
    cache = PagedKVCache(1, 2, 1, 16, 64, dtype="int8")
    query, table = torch.zeros(1, 1, 64, dtype=torch.float16), torch.zeros(1, 1, dtype=torch.int32)
    inputs = (query, cache.key_cache[0], cache.value_cache[0], table, torch.ones(1, dtype=torch.int32))
    scales = {"key_scale": cache.key_scale[0], "value_scale": cache.value_scale[0]}
    with pytest.raises(ArgumentError, match=r"a cache of torch.int8 codes with scales"):
        ops.paged_attention(*inputs, backend="flashinfer", **scales)
    monkeypatch.setattr(call_module, "HANDED_OFF_DEVICE", "cuda")
    with pytest.raises(ArgumentError, match="wanted one that takes tensors on cpu"):
        ops.paged_attention(*inputs, backend="flashinfer", **scales)


def test_a_package_that_is_missing_is_named(install, make_case):
    install()
    case = make_case([5])
    inputs = (case.random(1, 4, 8), case.key_cache, case.value_cache, case.block_tables, case.seq_lens)
    with pytest.raises(
        ArgumentError, match=r"`backend`: .*flashinfer is not installed; `pip install flashinfer-python`"
    ):
        ops.paged_attention(*inputs, backend="flashinfer")
    with pytest.raises(ArgumentError, match=r"\(FlashAttention-3\) nor flash_attn is installed"):
        ops.paged_attention(*inputs, backend="flash_attn")
    with pytest.raises(ArgumentError, match="wanted one of auto, native, flashinfer, flash_attn, reference, got fast"):
        ops.paged_attention(*inputs, backend="fast")
    with pytest.raises(ConfigError, match="`attention_backend` is flashinfer, which can't be used: flashinfer is not"):
        PagedKVCache(1, 2, 1, 4, 8, attention_backend="flashinfer")
    with pytest.raises(ConfigError, match="`attention_backend`: wanted one of auto, native, "):
        PagedKVCache(1, 2, 1, 4, 8, attention_backend="triton")


def test_wrong_arguments_are_refused_before_the_package_sees_them(install, make_case):
    package = install("flash_attn 3")
    case = make_case([5], dtype=torch.float16, head_dim=64, block_size=16)
    paged, lengths = moved(case, "cpu")
    with pytest.raises(ArgumentError, match="`window`"):
        ops.paged_attention(case.random(1, 4, 64), *paged, lengths, backend="flash_attn", window=-1)
    with pytest.raises(ArgumentError, match="`seq_lens`"):
        ops.paged_attention(case.random(1, 4, 64), *paged, lengths.long(), backend="flash_attn")
    assert package.calls == []


def test_the_default_is_our_own(install, make_case):
    package = install("flashinfer")
    case = make_case([5], dtype=torch.float16, head_dim=64, block_size=16)
    paged, lengths = moved(case, "cpu")
    query = case.random(1, 4, 64)
    default = ops.paged_attention(query, *paged, lengths)
    assert package.calls == []
    if native.native_status().loaded:
        assert torch.equal(ops.paged_attention(query, *paged, lengths, backend="native"), default)
        assert package.calls == []


@pytest.mark.parametrize(
    ("there", "chosen"),
    [(("flash_attn 3", "flashinfer"), "flashinfer"), (("flash_attn 3",), "flash_attn_interface"), ((), None)],
)
def test_auto_on_a_gpu_without_kernels_takes_what_is_installed(install, monkeypatch, make_case, there, chosen):
    install(*there)
    case = make_case([5], dtype=torch.float16, head_dim=64, block_size=16)
    tables = (case.block_tables, case.seq_lens)
    call = backends.AttentionCall.of(case.random(1, 4, 64), case.key_cache, tables, {"max_seq_len": 16})
    object.__setattr__(call, "device", torch.device("cuda"))
    monkeypatch.setattr(backends.AttentionCall, "of", lambda *_: call)
    monkeypatch.setattr(call_module, "HANDED_OFF_DEVICE", "cuda")
    monkeypatch.setattr(backends, "native_status", lambda: type("Status", (), {"cuda_kernels": False}))
    monkeypatch.setattr(flashinfer, "plan", lambda call: "flashinfer")
    monkeypatch.setattr(flash_attn, "plan", lambda call: "flash_attn_interface")
    assert backends.planned("auto", None, None, (), {}) == chosen


def test_a_cache_plans_a_step_once_for_all_layers(install, make_case):
    package = install("flashinfer")
    cache = PagedKVCache(3, 4, 1, 16, 64, dtype=torch.float16, attention_backend="flashinfer")
    cache.storage.normal_()
    table, lengths = torch.tensor([[0, 2], [1, 0]], dtype=torch.int32), torch.tensor([17, 5], dtype=torch.int32)
    slots, starts = torch.tensor([32, 20]), torch.arange(3, dtype=torch.int32)
    query = torch.randn(2, 2, 64).half()

    def attend(metadata):
        return [cache.attend(layer, query, metadata) for layer in range(3)]

    metadata = AttentionMetadata(slots, table, lengths, starts, 1, 32)
    outs = attend(metadata)
    assert [kind for kind, *_ in package.calls] == ["plan", "run", "run", "run"]
    for layer, out in enumerate(outs):
        wanted = ops.paged_attention(query, cache.key_cache[layer], cache.value_cache[layer], table, lengths)
        torch.testing.assert_close(out, wanted, rtol=0, atol=2e-3)
    lengths[0] = 3
    out = attend(AttentionMetadata(slots, table, lengths, starts, 1, 32))[2]
    assert [kind for kind, *_ in package.calls].count("plan") == 2
    wanted = ops.paged_attention(query, cache.key_cache[2], cache.value_cache[2], table, lengths)
    torch.testing.assert_close(out, wanted, rtol=0, atol=2e-3)
    # Another cache of the same device takes the workspace in between.
    other = PagedKVCache(1, 4, 1, 16, 64, dtype=torch.float16, attention_backend="flashinfer")
    again = AttentionMetadata(slots, table, lengths, starts, 1, 32)
    first = cache.attend(0, query, again)
    other.attend(0, query[:1], AttentionMetadata(slots[:1], table[:1], lengths[:1], starts[:2], 1, 32))
    assert torch.equal(cache.attend(0, query, again), first)
    package.calls.clear()
    cache.attend(0, query, metadata, window=3)
    assert [kind for kind, *_ in package.calls].count("plan") == 1
    mixed = AttentionMetadata(slots, table, lengths, torch.tensor([0, 1, 2], dtype=torch.int32), 2, 32)
    assert not math.isnan(cache.attend(0, query, mixed).sum())
    assert package.calls[-2][2]["causal"]
