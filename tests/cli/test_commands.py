"""`kvpager chat`, `plan`, `verify`, `bench`, `trace`: what they print and what they find."""

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvpager import LLM, SamplingParams
from kvpager.cli import app
from kvpager.cli.chat import converse, piped_lines, typed_lines
from kvpager.cli.plan import Plan, describe, make_plan
from kvpager.config import EngineConfig
from kvpager.errors import ConfigError
from kvpager.loader import BUNDLED_MODEL, open_model
from kvpager.verify import CLOSE, Difference, Scenario, Verdict, report, run_scenarios, scenarios


def invoke(*arguments: str, stdin: str | None = None, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False, input=stdin)
    assert result.exit_code == exit_code, result.output
    return result.output


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=64, block_size=4, dtype="float32")


# chat ------------------------------------------------------------

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)


def talk(llm: LLM, *lines: str, **options: Any) -> tuple[list[dict[str, str]], str]:
    console = Console(file=io.StringIO(), width=80)
    messages = converse(llm, SHORT, lines, console, **options)
    return messages, console.file.getvalue()  # type: ignore[attr-defined]


def test_a_conversation_is_the_prompt_of_every_turn(llm: LLM) -> None:
    messages, shown = talk(llm, "What is a list?\n", "\n", "And a dict?\n", "/exit", "never")
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    for turn in (1, 3):
        expected = llm.generate(llm.encode_chat(messages[:turn]), SHORT)[0]
        assert messages[turn]["content"] == expected.outputs[0].text
    assert shown.split() == (messages[1]["content"] + " " + messages[3]["content"]).split()
    assert llm.block_manager.stats.live == 0


def test_clear_forgets_all_but_the_system(llm: LLM) -> None:
    messages, shown = talk(llm, "a", "/clear", "b", system="Be short.")
    assert [m["content"] for m in messages[:2]] == ["Be short.", "b"]
    assert len(messages) == 3
    assert "(forgotten)" in shown


def test_an_unknown_command_is_answered_with_those_there_are(llm: LLM) -> None:
    messages, shown = talk(llm, "/exti", "/", "/usr/bin is a folder")
    assert [message["content"] for message in messages if message["role"] == "user"] == ["/usr/bin is a folder"]
    assert "(no command /exti; there are /clear and /exit)" in shown


def test_build_cuda_refuses_an_architecture_before_it_announces_minutes() -> None:
    result = CliRunner().invoke(app, ["build-cuda", "--arch", "sm_1"])
    assert isinstance(result.exception, ConfigError)
    assert "wanted sm_80 or newer, as in sm_90, got sm_1" in str(result.exception)
    assert result.output == ""


def test_a_conversation_that_is_too_long_is_not_extended(llm: LLM) -> None:
    messages, shown = talk(llm, "word " * 300, "hi")
    assert [message["content"] for message in messages if message["role"] == "user"] == ["hi"]
    assert "has grown too long" in shown


def test_an_answer_is_interrupted_and_kept(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = llm.stream

    def interrupted(*arguments: Any) -> Iterator[Any]:
        events = whole(*arguments)
        yield next(events)
        yield next(events)
        events.close()  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "stream", interrupted)
    messages, shown = talk(llm, "What is a list?")
    assert messages[1]["role"] == "assistant"
    assert shown.rstrip().endswith("…")
    assert llm.block_manager.stats.live == 0


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_lines_end_with_the_input(end: type[BaseException]) -> None:
    given = iter(["one", "two"])

    def ask(_prompt: str) -> str:
        try:
            return next(given)
        except StopIteration:
            raise end from None

    assert list(typed_lines(ask)) == ["one", "two"]


def test_f224_a_line_that_is_no_utf8_is_refused_and_the_chat_goes_on(llm: LLM) -> None:
    lines = piped_lines(io.BytesIO(b"\xff\xfe hello\n/clear\nWhat?\n"))
    messages, shown = talk(llm, *lines)
    assert [message["content"] for message in messages[:1]] == ["What?"]
    assert shown.startswith("(that line is no UTF-8 and was not read)\n(forgotten)\n")


def test_f224_a_typed_line_that_is_no_utf8_does_not_end_the_chat() -> None:
    answers: list[Any] = [UnicodeDecodeError("utf-8", b"a\xff", 1, 2, "invalid start byte"), "two", EOFError()]

    def ask(_prompt: str) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    assert list(typed_lines(ask)) == ["a\udcff", "two"]


@pytest.mark.parametrize("settings", [(), ("--kv-cache-dtype", "int8", "--eviction-policy", "slru")])
def test_chat_as_a_command(settings: tuple[str, ...]) -> None:
    shown = invoke("chat", "--max-tokens", "4", *settings, stdin="What is a list?\n/clear\n/exit\n")
    assert shown.strip().endswith("(forgotten)")
    assert len(shown.splitlines()) >= 2


# plan ------------------------------------------------------------


def test_plan_reads_the_config_only(tmp_path: Path) -> None:
    """2 · 4 layers · 2 heads · 32 · 4 bytes = 2 KiB a token; the pool is that of `LLM` with the same settings."""
    shutil.copy(BUNDLED_MODEL / "config.json", tmp_path)
    plan = make_plan(open_model(tmp_path), EngineConfig())
    llm = LLM()
    assert plan.num_parameters == sum(parameter.numel() for parameter in llm.runner.model.parameters())
    assert plan.bytes_per_block == llm.runner.cache.bytes_per_block == 16 * 2048
    assert plan.num_blocks == llm.block_manager.num_blocks
    assert plan.cache_bytes == plan.num_blocks * llm.runner.cache.bytes_per_block
    assert plan.weight_bytes == 4 * plan.num_parameters
    assert make_plan(open_model(tmp_path), EngineConfig(dtype="bfloat16")).bytes_per_block == 16 * 1024
    assert make_plan(open_model(tmp_path), EngineConfig(kv_cache_memory_bytes=2**20)).num_blocks == 32
    with pytest.raises(ConfigError, match=r"`kv_cache_memory_bytes`: wanted at least 32768 bytes .*, got 1000"):
        make_plan(open_model(tmp_path), EngineConfig(kv_cache_memory_bytes=1000))


def a_plan(num_blocks: int, available_bytes: int | None) -> Plan:
    return Plan(250_000, "float32", "float32", 1_000_000, 10_000, 10, num_blocks, 400, available_bytes)


def test_what_fits() -> None:
    plan = a_plan(30, None)
    assert plan.longest_request == 301
    assert [plan.concurrent(tokens) for tokens in (1, 10, 11, 12, 151, 152, 301, 302)] == [30, 30, 30, 15, 2, 1, 1, 0]
    assert a_plan(100, None).longest_request == 400
    assert [name for name, _ in describe(plan)][-1] == "in all"


@pytest.mark.parametrize(
    ("available", "verdict"),
    [
        (1_300_000, "1.24 MiB available: fits"),
        (1_299_999, "lacks 1 bytes; `num_blocks` 29 would fit"),
        (1_010_000, "lacks 283.20 KiB; `num_blocks` 1 would fit"),
        (1_009_999, "the weights alone lack 1 bytes"),
    ],
)
def test_what_is_lacking_and_what_to_set(available: int, verdict: str) -> None:
    assert verdict in dict(describe(a_plan(30, available)))["memory"]


def test_plan_as_a_command() -> None:
    shown = invoke("plan", "--num-blocks", "100")
    assert "100 blocks of 16, 1,600 tokens" in shown
    assert "longest request  1,601 tokens (the model has 2,048 positions)" in shown
    shown = invoke("plan", "--kv-cache-dtype", "int8")
    assert "cache per token  576 bytes in int8" in shown  # 2 · 4 layers · 2 heads · (32 codes + 4 bytes of scale)


# verify ------------------------------------------------------------

PROMPTS = [[5, 6, 7], list(range(3, 40)), [*range(3, 35), 9], [8]]


def test_verify_exercises_every_scenario(llm: LLM) -> None:
    verdicts = {verdict.scenario.name: verdict for verdict in run_scenarios(llm, PROMPTS, 12)}
    assert all(verdict.passed for verdict in verdicts.values())
    assert verdicts["prefix hits"].num_cached_tokens > 60
    assert verdicts["preemption"].num_preemptions > 0
    assert verdicts["one by one, no cache"].num_tokens == 48
    assert verdicts["forks"].num_tokens == 3 * 48
    assert verdicts["prefix hits"].num_tokens == 2 * 48


def test_verify_finds_a_scenario_that_changes_the_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its copies, a fork writes into its parent's block."""
    forks = Scenario("forks", n=3)
    monkeypatch.setattr(scenarios, "scenarios_for", lambda *_: (forks, Scenario("together")))
    monkeypatch.setattr("kvpager.cache.PagedKVCache.copy_blocks", lambda _self, _pairs: None)
    found = dict(zip(("forks", "together"), run_scenarios(llm, PROMPTS, 12), strict=True))
    assert found["together"].passed
    assert not found["forks"].passed


def test_verify_finds_wrong_weights_and_shows_both_sides(llm: LLM) -> None:
    weight = llm.runner.model.model.layers[2].mlp.down_proj.weight
    kept = weight.detach().clone()
    try:
        weight.mul_(1.7)
        verdicts = run_scenarios(llm, PROMPTS, 12)
    finally:
        weight.copy_(kept)
    difference = next(d for d in verdicts[0].differences if not d.is_close)
    assert difference.ours != difference.theirs
    assert difference.their_scores[1] > difference.their_scores[0]
    lines = "\n".join(report(verdicts, 4))
    assert "one by one, no cache  DIFFERS: " in lines
    assert f"ours {difference.ours}, transformers' {difference.theirs}; log-probabilities" in lines
    assert lines.endswith("4 requests: not as transformers")


def test_a_close_call_is_none_of_ours() -> None:
    close = Difference(0, 3, 5, 6, (-1.0, None), (-1.0 - CLOSE / 2, -1.0))
    verdict = Verdict(Scenario("together"), 4, 0, 0, (close,))
    assert verdict.passed
    lines = report([verdict], 1)
    assert lines[0].endswith("equal, 1 close calls: 4 tokens")
    assert "here -1.000000 and -, there" in lines[1]
    assert lines[2] == "1 requests: as transformers, in every scenario"
    assert not Verdict(Scenario("x"), 4, 0, 0, (Difference(0, 3, 5, 6, (-1.0, None), (-1.1, -1.0)),)).passed


def test_verify_as_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenarios, "scenarios_for", lambda *_: (Scenario("together"),))
    assert "6 requests: as transformers, in every scenario" in invoke("verify", "--max-tokens", "4")
    monkeypatch.setattr(Difference, "is_close", False)
    monkeypatch.setattr(scenarios, "_first_difference", lambda *_: Difference(0, 0, 1, 2, (0.0, 0.0), (0.0, 0.0)))
    assert "not as transformers" in invoke("verify", "--max-tokens", "4", exit_code=1)


def test_verify_needs_float32() -> None:
    with pytest.raises(ConfigError, match="differences are only small in float32"):
        run_scenarios(LLM(num_blocks=4, dtype="bfloat16"), PROMPTS, 4)


@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_verify_other_families(lab: Any, name: str) -> None:
    llm = LLM(lab.folder(name), dtype="float32", num_blocks=1, block_size=4)
    assert all(verdict.passed for verdict in run_scenarios(llm, [[5, 6, 7], [8] * 9], 8))


# bench, trace ------------------------------------------------------------


def test_bench_throughput(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    sizes = ["--num-prompts", "3", "--input-len", "5", "--output-len", "4", "--output-json", str(path)]
    shown = invoke("bench", "throughput", *sizes)
    figures = json.loads(path.read_text())
    assert (figures["num_prompts"], figures["input_len"], figures["output_len"]) == (3, 5, 4)
    assert figures["output_tokens_per_second"] * figures["seconds"] == pytest.approx(12)
    assert figures["total_tokens_per_second"] * figures["seconds"] == pytest.approx(27)
    assert "output tokens per second" in shown


def test_bench_latency(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    sizes = ["--batch-size", "2", "--input-len", "5", "--output-len", "3", "--num-iters", "2"]
    invoke("bench", "latency", *sizes, "--output-json", str(path))
    figures = json.loads(path.read_text())
    assert figures["slowest_ms"] >= figures["latency_ms"] > figures["first_token_ms"] > 0
    assert figures["between_tokens_ms"] > 0
    assert "between tokens ms  -" in invoke("bench", "latency", *sizes[:4], "--output-len", "1", "--num-iters", "1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["throughput", "--num-prompts", "0"], "`num_prompts`: wanted at least 1, got 0"),
        (["throughput", "--input-len", "0"], "`input_len`: wanted at least 1, got 0"),
        (["latency", "--num-iters", "0"], "`num_iters`: wanted at least 1, got 0"),
    ],
)
def test_bench_says_what_it_wants(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        invoke("bench", *arguments)


def test_a_trace_is_shown_in_words(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    llm = LLM(num_blocks=8, block_size=4, trace=path)
    llm.generate([[5, 6, 7], [8, 9]], max_tokens=3)
    assert llm.trace is not None
    llm.trace.close()
    lines = invoke("trace", str(path)).splitlines()
    assert len(lines) == len(path.read_text().splitlines()) >= 3
    assert all(line.startswith("step ") for line in lines)
    with pytest.raises(ConfigError, match="can't read"):
        invoke("trace", str(tmp_path / "none"))
