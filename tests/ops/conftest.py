"""What the op tests share: the three kernel sets under one name, random paged cases, and an oracle of their own.

`kernels` runs a test on the native CPU library, on the reference kernels, and on the CUDA kernels under the emulator
(csrc/testing/). The oracle is float64 attention over contiguous K/V that a case keeps beside its cache; it shares no
code with the reference.
"""

import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvpager import native, ops
from kvpager.ops import device_errors
from kvpager.ops.op import OPS

ROOT = Path(__file__).resolve().parents[2]
# Absolute error allowed against float64 on the same inputs of order 1: half a unit in the last place of the output.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def define_namespace(name: str) -> torch.library.Library:
    library = torch.library.Library(name, "DEF")
    for op in OPS.values():
        library.define(op.name + op.schema)
    return library


@pytest.fixture(scope="session")
def emulated_library() -> torch.library.Library:
    """The CUDA sources compiled for the emulator, registered as `kvpager_emulated`; see `make sanitize`."""
    spec = importlib.util.spec_from_file_location("native_build", ROOT / "build_backend" / "native_build.py")
    assert spec is not None
    assert spec.loader is not None
    native_build = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = native_build  # its dataclasses look their module up by name
    spec.loader.exec_module(native_build)
    sanitize = os.environ.get("KVPAGER_SANITIZE") == "1"
    out = native_build.emulated_path(ROOT, sanitize)
    report = native_build.build_emulated(ROOT, out, sanitize=sanitize)
    if not report.built and "could not compile" not in report.reason:
        pytest.skip(report.reason)
    assert report.built, report.reason
    library = define_namespace("kvpager_emulated")
    torch.ops.load_library(out)
    return library


@pytest.fixture(scope="session")
def reference_library() -> torch.library.Library:
    library = define_namespace("kvpager_reference")
    for op in OPS.values():
        library.impl(op.name, op.checked_reference, "CPU")
    return library


@pytest.fixture(params=["baseline", "avx2", "avx512", "avx512_bf16"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test on the native CPU kernels of one instruction set."""
    if request.param not in native.native_status().cpu_isas:
        pytest.skip("not on this machine, or no native library")
    before = native.active_cpu_isa()
    native.select_cpu_isa(request.param)
    yield request.param
    native.select_cpu_isa(before)


@dataclass(frozen=True)
class Kernels:
    """A kernel set. `atomic`: a bad value leaves everything unwritten, not only its row."""

    name: str
    atomic: bool


@pytest.fixture(params=["native", "native avx512", "native avx2", "native baseline", "reference", "emulated"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Point the wrappers of `kvpager.ops` at one kernel set; "native" alone is the best instruction set of the CPU."""
    name, _, isa = request.param.partition(" ")
    if name == "native":
        status = native.native_status()
        if not status.loaded:
            pytest.skip(f"native library: {status.reason}")
        before = native.active_cpu_isa()
        if isa and (isa == before or isa not in status.cpu_isas):
            pytest.skip(f"{isa} is not here" if isa != before else f"{isa} runs as native")
        native.select_cpu_isa(isa or before)
        yield Kernels(name, atomic=True)
        native.select_cpu_isa(before)
        return
    request.getfixturevalue(f"{name}_library")
    namespace = getattr(torch.ops, f"kvpager_{name}")
    for op in OPS.values():
        monkeypatch.setattr(op, "call", getattr(namespace, op.name).default)
    if name == "emulated":
        monkeypatch.setattr(device_errors, "CHECKED", True)  # the kernels can't raise: ask after every call
        ops.check_errors("cpu")
    yield Kernels(name, atomic=name == "reference")


@dataclass
class Case:
    """Sequences in a poisoned, permuted cache, and the same K/V contiguous. Everything unwritten holds `poison`."""

    lengths: list[int]
    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    layout: str
    generator: torch.Generator
    poison: float = math.nan
    interleaved: bool = False
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        K, S, D = self.num_kv_heads, self.block_size, self.head_dim
        widths = [-(-length // S) for length in self.lengths]
        N = sum(widths) + 3  # some blocks belong to nobody
        poison = 6e4 if self.poison == 1e30 and self.dtype is torch.float16 else self.poison
        inner = (K, S, D) if self.layout == "HND" else (S, K, D)
        if self.interleaved:
            both = torch.full((N, 2, *inner), poison, dtype=self.dtype)
            self.key_cache, self.value_cache = both[:, 0], both[:, 1]
        else:
            self.key_cache = torch.full((N, *inner), poison, dtype=self.dtype)
            self.value_cache = torch.full((N, *inner), poison, dtype=self.dtype)
        order = torch.randperm(N, generator=self.generator).tolist()
        M = max(widths, default=0) + 1
        # Padding entries are nonsense that must not be read.
        table = torch.randint(-(2**31), 2**31 - 1, (len(self.lengths), M), generator=self.generator)
        for row, width in enumerate(widths):
            table[row, :width] = torch.tensor(order[:width], dtype=torch.int64)
            del order[:width]
        self.block_tables = table.to(torch.int32)
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32)
        for row, length in enumerate(self.lengths):
            self.keys.append(self.random(length, K, D))
            self.values.append(self.random(length, K, D))
            for position in range(length):
                block, offset = int(table[row, position // S]), position % S
                for cache, rows in ((self.key_cache, self.keys), (self.value_cache, self.values)):
                    block_rows = cache[block] if self.layout == "NHD" else cache[block].transpose(0, 1)
                    block_rows[offset] = rows[row][position]

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def oracle(
        self,
        row: int,
        query: Tensor,
        position: int,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Float64 attention of one query [H, D] that stands at `position` of a sequence: (out [H, D], lse [H])."""
        first = max(0, position + 1 - window) if window else 0
        outs, lses = [], []
        for head in range(self.num_heads):
            kv_head = head // self.group
            keys = self.keys[row][first : position + 1, kv_head].double()
            values = self.values[row][first : position + 1, kv_head].double()
            logits = (keys @ query[head].double()) * scale
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            if alibi_slopes is not None:
                logits += alibi_slopes[head].double() * (torch.arange(first, position + 1) - position)
            extra = logits.new_empty(0) if sinks is None else sinks[head].double().reshape(1)
            weights = torch.softmax(torch.cat([logits, extra]), 0)[: len(logits)]
            outs.append(weights @ values)
            lses.append(torch.logsumexp(torch.cat([logits, extra]), 0))
        return torch.stack(outs), torch.stack(lses)


@pytest.fixture
def make_case() -> Callable[..., Case]:
    """`make_case(lengths, ...)`: a `Case` with small defaults; `seed` makes it reproducible."""

    def make(
        lengths: list[int],
        *,
        seed: int = 0,
        num_kv_heads: int = 2,
        group: int = 2,
        head_dim: int = 8,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
        layout: str = "HND",
        poison: float = math.nan,
        interleaved: bool = False,
    ) -> Case:
        generator = torch.Generator().manual_seed(seed)
        return Case(lengths, num_kv_heads, group, head_dim, block_size, dtype, layout, generator, poison, interleaved)

    return make


@dataclass
class Ramp:
    """K all 0 and V at position p equal to p: attention over positions a … b gives (a + b) / 2, whatever the query."""

    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor


@pytest.fixture
def make_ramp() -> Callable[..., Ramp]:
    """`make_ramp(lengths)`: sequences of a ramp, S = 4, one kv head of dim 8, NaN in everything unwritten."""

    def make(lengths: list[int], *, block_size: int = 4, dtype: torch.dtype = torch.float32) -> Ramp:
        widths = [-(-length // block_size) for length in lengths]
        N = sum(widths) + 2
        key_cache = torch.full((N, 1, block_size, 8), math.nan, dtype=dtype)
        value_cache = key_cache.clone()
        table = torch.full((len(lengths), max(widths, default=0)), -1, dtype=torch.int32)
        fresh = list(range(N - 1, -1, -1))
        for row, length in enumerate(lengths):
            for position in range(length):
                if position % block_size == 0:
                    table[row, position // block_size] = fresh.pop(0)
                block = int(table[row, position // block_size])
                key_cache[block, :, position % block_size] = 0
                value_cache[block, :, position % block_size] = position
        return Ramp(key_cache, value_cache, table, torch.tensor(lengths, dtype=torch.int32))

    return make


@pytest.fixture
def tolerance() -> dict[torch.dtype, float]:
    return TOLERANCE
