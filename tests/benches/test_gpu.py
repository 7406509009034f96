"""The parts of benches/gpu.py that need no GPU: shapes, bars, verdicts, the table, the list of checks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHES = Path(__file__).resolve().parents[2] / "benches"


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    from gpu import figures

    return figures


@pytest.fixture
def steps(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHES))
    from gpu import steps

    return steps


def test_bytes_of_a_shape(figures):
    assert figures.Shape(1, 32768, "bf16").num_bytes == 134_217_728
    assert figures.Shape(256, 8192, "bf16").num_bytes == 8_589_934_592
    assert figures.Shape(1, 32768, "fp8").num_bytes == 67_108_864 * 132 // 128
    assert [shape.name for shape in figures.SHAPES[:2]] == ["1 x 32k bf16", "1 x 128k bf16"]
    assert len(figures.SHAPES) == 10


def test_bars(figures):
    bars = {shape.name: figures.bar(shape) for shape in figures.SHAPES}
    assert bars == {
        "1 x 32k bf16": 0.75, "1 x 128k bf16": 0.90, "32 x 4k bf16": 0.90, "128 x 2k bf16": 0.90,
        "256 x 8k bf16": 0.93, "1 x 32k fp8": 0.65, "1 x 128k fp8": 0.85, "32 x 4k fp8": 0.85,
        "128 x 2k fp8": 0.85, "256 x 8k fp8": 0.85,
    }  # fmt: skip


def test_layers_go_round_but_fit(figures):
    small, large = figures.Shape(1, 32768, "bf16"), figures.Shape(256, 8192, "bf16")
    assert figures.layers_for(small, 1 << 30, 24 << 30) == 8
    assert figures.layers_for(large, 1 << 30, 24 << 30) == 1
    assert figures.layers_for(large, 1 << 40, 24 << 30) == 3
    assert figures.layers_for(large, 1 << 30, 1 << 30) == 1


def test_verdicts(figures):
    shape = figures.Shape(1, 32768, "bf16")
    assert figures.copy_gbs(10**9, 0.5e-3) == 4000

    def figure(ours, **others):
        return figures.Figure(shape, {"kvpager": ours, **others}, 4000.0)

    assert figure(40.0).fraction == pytest.approx(134_217_728 / 40e-6 / 4e12)
    assert figure(40.0, SDPA=10.0).verdict() == "ok"
    assert figure(40.0, flashinfer=39.0, flash_attn=41.0).best_peer == "flashinfer"
    assert figure(40.0, flashinfer=39.0).verdict() == "ok"
    assert figure(40.0, flashinfer=30.0).verdict() == "33% slower than flashinfer"
    assert figure(50.0, flash_attn=43.5).verdict() == "below 75%, 15% slower than flash_attn"


def test_the_table_has_a_column_for_everybody(figures):
    first = figures.Figure(figures.SHAPES[0], {"kvpager": 40.0, "flashinfer": 45.0, "SDPA": 80.0}, 4200.0)
    second = figures.Figure(figures.SHAPES[5], {"kvpager": 25.0}, 4200.0)
    header, *rows = figures.as_table([first, second])
    assert " ".join(header.split()) == "shape MB kvpager us flashinfer us SDPA us GB/s copy GB/s fraction bar verdict"
    assert " ".join(rows[0].split()) == "1 x 32k bf16 134 40.0 45.0 80.0 3355 4200 79.9% 75% ok"
    assert " ".join(rows[1].split()).startswith("1 x 32k fp8 69 25.0 - - ")
    told = json.loads(json.dumps(figures.as_json([first])))
    assert told[0]["shape"] == {"batch": 1, "length": 32768, "kv": "bf16"}
    assert told[0]["verdict"] == "ok"


def test_checks_come_in_order_and_say_what_is_missing(steps):
    names = [step.name for step in steps.all_steps(sanitizer=None)]
    assert names == [
        "build", "budgets", "tests on the device", "memcheck", "racecheck", "decode script, eager",
        "decode script, captured graphs",
    ]  # fmt: skip
    skipped = [step.name for step in steps.all_steps(sanitizer=None) if step.skip]
    assert skipped == ["memcheck", "racecheck"]
    assert not [step for step in steps.all_steps(sanitizer="/opt/compute-sanitizer") if step.skip]
    for step in steps.all_steps():
        assert all((steps.ROOT / word).exists() for word in step.command if word.endswith(".py"))


def test_a_step_that_fails_is_shown(steps, capfd):
    good = steps.Step("good", (sys.executable, "-c", "print('quiet')"), {})
    assert steps.run(good, {}).outcome == "passed"
    bad = steps.Step("bad", (sys.executable, "-c", "import os; raise SystemExit(os.environ['WHY'])"), {"WHY": "broken"})
    assert steps.run(bad, {}).outcome == "failed"
    assert steps.run(steps.Step("absent", ("/no/such/program",), {}), {}).outcome == "failed"
    assert steps.run(steps.Step("none", (), {}, "no GPU"), {}).outcome == "skipped: no GPU"
    said = capfd.readouterr().out
    assert "broken" in said
    assert "quiet" not in said


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_what_is_timed_computes_the_same(figures, monkeypatch, kv):
    """On the CPU, with short sequences."""
    from gpu import calls

    inputs = calls.Inputs(figures.Shape(2, 96, kv), device="cpu", layers=2)
    assert len(calls.ours(inputs)) == 2
    calls.ours(inputs)[1]()
    ours = inputs.out.clone()
    for run in calls.peer("reference", inputs) or []:
        run()
    if kv == "bf16":  # the reference is given no scales here
        torch.testing.assert_close(inputs.out, ours, rtol=0, atol=2e-2)
        assert calls.packed_sdpa(inputs)[0]().shape == (2, 8, 4, 128)
    assert ours.isfinite().all()
    assert calls.peer("flashinfer", inputs) is None
    assert calls.block_size_of("flashinfer") == 16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = subprocess.run([sys.executable, str(BENCHES / "gpu.py")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs a GPU, and torch sees none" in done.stdout
