"""The command and the example as a user meets them: what they print, and how they fail."""

import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from kvpager import LLM, SamplingParams
from kvpager.cli import app
from kvpager.cli.display import stream
from kvpager.errors import ConfigError
from kvpager.verify import compare_with_transformers

EXAMPLE = Path(__file__).parents[2] / "examples" / "qwen3_decode.py"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1", **environment},
    )


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_generate_one_prompt_prints_its_text_and_nothing_else() -> None:
    text = LLM().generate("The for statement", max_tokens=10)[0].outputs[0].text
    assert invoke("generate", "The for statement", "--max-tokens", "10") == f"The for statement{text}\n"


def test_generate_takes_every_setting_of_the_engine() -> None:
    text = LLM(kv_cache_dtype="int8", num_blocks=9).generate("The for statement", max_tokens=10)[0].outputs[0].text
    settings = ("--kv-cache-dtype", "int8", "--num-blocks", "9", "--no-enable-prefix-caching")
    assert invoke("generate", "The for statement", "--max-tokens", "10", *settings) == f"The for statement{text}\n"


def test_generate_several_prompts_marks_whose_line_it_is() -> None:
    lines = invoke("generate", "--max-tokens", "24").splitlines()
    assert {line.split(" │ ")[0] for line in lines} == {"0", "1", "2", "3"}
    joined = " ".join(line.split(" │ ")[1] for line in lines if line.startswith("0 │"))
    text = "The for statement" + LLM().generate("The for statement", max_tokens=24)[0].outputs[0].text
    assert joined.split() == text.split()
    assert max(map(len, lines)) <= 80


def test_generate_draws_by_seed() -> None:
    drawn = [invoke("generate", "The", "--temperature", "1.2", "--seed", seed) for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]


def test_generate_chat_goes_through_the_template() -> None:
    llm = LLM()
    ids = llm.encode_chat([{"role": "user", "content": "What is a list?"}])
    answer = llm.generate(ids, max_tokens=8)[0].outputs[0].text
    shown = invoke("generate", "What is a list?", "--chat", "--max-tokens", "8")
    assert shown.split() == f"What is a list? {answer}".split()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "./nowhere"], "kvpager: no folder `./nowhere`"),
        (["--max-tokens", "4000"], "asks for 4000 more"),
        (["--temperature", "-1"], "kvpager: `temperature`: wanted a finite number"),
        (["--dtype", "int4"], "kvpager: `dtype` is int4; supported: auto"),
        (["--block-size", "0"], "kvpager: `block_size` is 0"),
        (["--kv-cache-dtype", "int4"], "kvpager: `kv_cache_dtype`: wanted float32"),
        (["--eviction-policy", "fifo"], "kvpager: `eviction_policy`: wanted `lru`"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvpager", "generate", *arguments])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("kvpager", run_name="__main__")
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert message in shown.err


def test_the_module_is_a_command() -> None:
    done = run("-m", "kvpager", "generate", "Return", "--max-tokens", "2", "--device", "nowhere")
    assert done.returncode == 2
    assert done.stderr == "kvpager: `device` is nowhere; supported: cpu, cuda, cuda:0, …\n"
    assert run("-m", "kvpager", "--help").returncode == 0


def test_env_says_what_is_active_and_why_not() -> None:
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in invoke("env").splitlines())
    assert lines.keys() >= {"kvpager", "python", "torch", "allocator", "native library", "CUDA kernels", "GPU", "CPU"}
    assert lines["torch"].startswith(torch.__version__)
    assert re.match(r"loaded: |inactive: .", lines["native library"])
    if not torch.cuda.is_available():
        assert lines["GPU"].startswith("none: ")
        assert lines["CUDA kernels"].startswith("inactive: ")
    without_library = run("-m", "kvpager", "env", KVPAGER_NATIVE="0")
    assert re.search(r"native library +inactive: `KVPAGER_NATIVE=0` is set", without_library.stdout)


def test_env_works_where_torch_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch_cpu.so: wrong ELF class\\nand more')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run("-m", "kvpager", "env", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"torch +does not load: OSError: libtorch_cpu.so: wrong ELF class\n", done.stdout)
    assert re.search(r"native library +inactive: torch does not load", done.stdout)
    assert "instruction sets" in done.stdout


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80, height=24, highlight=False, color_system=None)


def shown_on(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_shows_whole_texts_at_the_end() -> None:
    llm, console = LLM(num_blocks=64), terminal()
    finished = stream(llm, ["Return the", "The"], SamplingParams(max_tokens=30), console, titles=["Return the", "The"])
    panels = shown_on(console).rpartition("\x1b[")[2]
    assert panels.count("╭") == panels.count("╰") == 2
    words = " ".join(line.strip("│ ") for line in panels.splitlines() if line.startswith("│")).split()
    texts = " ".join(str(each.prompt) + each.outputs[0].text for each in finished).split()
    assert words == texts


def test_figures_and_block_tables() -> None:
    llm = LLM(num_blocks=64, block_size=4)
    example = runpy.run_path(str(EXAMPLE))
    finished = [
        example["Finished"](event.output, event.sequence)
        for event in llm.stream([[5, 6, 7], [8] * 70], max_tokens=3)
        if event.output is not None
    ]
    assert [each.sequence.sequence_length for each in finished] == [5, 72]
    table = Console(file=io.StringIO(), width=100)
    table.print(example["figures"](llm, finished))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown_on(table).splitlines() if "│" in line]
    assert rows[0] == ["0", "3", "3", "length", "2", "3"]
    assert rows[1] == ["1", "70", "3", "length", "18", "0"]
    assert rows[2] == ["all, at the peak", "73", "6", "", "20 of 64", "3"]
    assert rows[3][-1] == "3.8 %"
    assert all(re.fullmatch(r"[\d,]+", cell) for cell in rows[4][1:3])
    shown = str(example["block_tables"](finished, 4))
    first = list(finished[0].sequence.block_table)
    assert f"sequence 0: 5 positions in 2 blocks, block table {first}" in shown
    row = rf"positions +4 … 4 +block +{first[1]}  slots +{4 * first[1]} … {4 * first[1]} +3 unused"
    assert re.search(row, shown)
    assert "… 6 more blocks …" in shown


def decode(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(str(EXAMPLE), *arguments)


def test_the_example_with_everything() -> None:
    done = decode("--check", "--show-blocks", "--max-tokens", "20", "--block-size", "5")
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.rstrip().endswith("passed")
    assert "4 sequences over blocks of 5 positions" in done.stdout
    assert done.stdout.count("block table [") == 4
    for table in re.findall(r"block table \[(.*)\]", done.stdout):
        assert len(set(table.split(", "))) == len(table.split(", "))
    assert "80 steps, tolerance 0.0001" in done.stdout
    assert done.stdout.count("attention output of layer") == 4
    assert "no token diverges" in done.stdout


def test_the_example_with_a_prompt_of_ones_own() -> None:
    done = decode("Return the", "--max-tokens", "5", "--temperature", "0.8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Return the")
    assert "1 sequence over blocks of 16 positions" in done.stdout
    assert decode("--model", "./nowhere").stderr.startswith("kvpager: no folder `./nowhere`")


def test_the_check_finds_a_wrong_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """One weight is off: logits, the layer's attention output and in the end a token show it."""
    llm = LLM(num_blocks=64)
    llm.runner.model.model.layers[1].self_attn.v_proj.weight[0] += 0.5
    outputs = llm.generate(["The for statement", "Return"], max_tokens=30)
    compared = compare_with_transformers(llm, outputs, greedy=True)
    assert not compared.passed
    assert compared.logits > 1e-4
    assert compared.attention[0] <= 1e-4 < compared.attention[1]
    found = compared.divergence
    assert found is not None
    assert outputs[found.request].outputs[0].token_ids[found.step] == found.ours != found.theirs
    assert found.gap > 0
    assert compare_with_transformers(llm, outputs, greedy=False).divergence is None
    assert llm.block_manager.stats.live == 0


def test_the_check_finds_not_a_number() -> None:
    llm = LLM(num_blocks=64)
    outputs = llm.generate("Return", max_tokens=4)
    llm.runner.model.model.layers[3].mlp.down_proj.weight[0] = float("nan")
    assert not compare_with_transformers(llm, outputs, greedy=True).passed


def test_the_check_replays_in_groups_where_the_pool_is_small() -> None:
    llm = LLM(num_blocks=5, block_size=4)
    outputs = llm.generate([[5, 6, 7], [8, 9], [10] * 9], max_tokens=6)
    assert compare_with_transformers(llm, outputs, greedy=True).passed
    assert llm.block_manager.stats.live == 0


def test_the_check_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: Any = []
    with pytest.raises(ConfigError, match="differences are only small in float32"):
        compare_with_transformers(LLM(num_blocks=4, dtype="bfloat16"), outputs, greedy=True)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="transformers is not installed"):
        compare_with_transformers(LLM(num_blocks=4), outputs, greedy=True)
