"""One request's fault is that request's: refused when it is added, or ended alone; the others never notice."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpager import LLM, SamplingParams
from kvpager.config import ModelConfig
from kvpager.engine import RequestOutput
from kvpager.errors import ArgumentError

PROMPT = "The for statement"


@pytest.fixture(scope="module")
def shared_llm() -> LLM:
    return LLM(num_blocks=64, block_size=4, max_num_seqs=4)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    shared_llm.block_manager.reset_prefix_cache()
    yield shared_llm
    assert shared_llm.block_manager.stats.live == 0
    assert shared_llm.block_manager.check_invariants() == []
    assert shared_llm.engine.sampler.num_rows == 0
    assert not shared_llm.engine.has_unfinished_requests()


def run(llm: LLM) -> dict[str, RequestOutput]:
    outputs = {}
    while llm.engine.has_unfinished_requests():
        for event in llm.engine.step():
            if event.output is not None:
                outputs[event.request_id] = event.output
    return outputs


@pytest.mark.parametrize("salt", ["\ud800", "a\udfffb", 5, b"x", ["a"]])
def test_f201_a_salt_that_is_no_text_is_refused(llm: LLM, salt: Any) -> None:
    llm.engine.add_request([5], request_id="before")
    with pytest.raises(ArgumentError, match="`cache_salt`: wanted None or a text without lone surrogates, got"):
        llm.engine.add_request([5], cache_salt=salt)
    assert run(llm)["before"].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("name", [5, b"x", "\ud800"])
def test_f201_a_name_that_is_no_text_is_refused(llm: LLM, name: Any) -> None:
    with pytest.raises(ArgumentError, match="`request_id`: wanted None or a text without lone surrogates, got"):
        llm.engine.add_request([5], request_id=name)


@pytest.mark.parametrize("priority", ["high", float("nan"), 1.5, None, True])
def test_f202_a_priority_that_is_no_whole_number_is_refused(llm: LLM, priority: Any) -> None:
    for name in ("a", "b"):
        llm.engine.add_request([5], request_id=name)
    with pytest.raises(ArgumentError, match="`priority`: wanted a whole number, got"):
        llm.engine.add_request([5], priority=priority)
    assert set(run(llm)) == {"a", "b"}


def test_f202_the_scheduler_refuses_what_it_cannot_rank(llm: LLM) -> None:
    from kvpager.scheduler import Sequence

    for wrong in ({"priority": "high"}, {"salt": 5}):
        with pytest.raises(ArgumentError, match=r"`priority`|`cache_salt`"):
            llm.engine.scheduler.add(Sequence(10**6, [5], 4, **wrong))


def test_f203_a_trace_that_cannot_be_written_costs_no_token(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    traced, plain = LLM(num_blocks=64, block_size=4, trace="/dev/full"), LLM(num_blocks=64, block_size=4)
    expected = plain.generate(PROMPT, max_tokens=6)[0].outputs[0]
    (output,) = traced.generate(PROMPT, max_tokens=6)
    assert output.outputs[0] == expected
    assert output.finished
    warnings = [record.getMessage() for record in caplog.records if "trace" in record.getMessage()]
    assert warnings == ["the trace `/dev/full` ends here: No space left on device; the engine goes on"]


def test_f203_a_closed_trace_records_no_more(tmp_path: Path) -> None:
    llm = LLM(num_blocks=64, block_size=4, trace=tmp_path / "trace")
    llm.generate(PROMPT, max_tokens=2)
    assert llm.trace is not None
    llm.trace.close()
    assert len(llm.generate(PROMPT, max_tokens=3)[0].outputs[0].token_ids) == 3
    lines = (tmp_path / "trace").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


@pytest.mark.parametrize(
    ("owner", "method"), [("block_manager", "admit"), ("sampler", "add")], ids=["admission", "sampler"]
)
def test_f201_what_raises_for_one_request_ends_it_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, owner: str, method: str
) -> None:
    """Whatever the cause: the second of three can't come in, and the third comes in its place."""
    engine = llm.engine
    wanted = llm.generate(PROMPT, max_tokens=5)[0].outputs[0]
    target: Any = engine.sampler if owner == "sampler" else engine.scheduler._gate
    real, calls = getattr(target, "add" if owner == "sampler" else "enter"), []

    def second_raises(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("boom")
        return real(*args, **kwargs)

    monkeypatch.setattr(target, "add" if owner == "sampler" else "enter", second_raises)
    for name in ("a", "b", "c"):
        engine.add_request(PROMPT, SamplingParams(max_tokens=5), request_id=name)
    outputs = run(llm)
    assert [outputs[name].outputs[0].finish_reason for name in "abc"] == ["length", "error", "length"]
    assert outputs["b"].outputs[0].error == "boom"
    assert outputs["a"].outputs[0] == outputs["c"].outputs[0] == wanted
    assert sum("boom" in record.getMessage() for record in caplog.records) == 1


def test_f201_a_fork_that_cannot_begin_ends_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=5, ignore_eos=True)
    wanted = llm.generate(PROMPT, params)[0].outputs
    real, calls = llm.engine.sampler.add, []

    def second_raises(*args: Any) -> int:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("no row")
        return real(*args)

    monkeypatch.setattr(llm.engine.sampler, "add", second_raises)
    found = llm.generate(PROMPT, params)[0].outputs
    assert [each.finish_reason for each in found] == ["length", "error", "length"]
    assert (found[1].error, found[1].token_ids) == ("no row", ())
    assert (found[0], found[2]) == (wanted[0], wanted[2])


def test_f201_a_text_that_cannot_be_made_ends_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = llm.generate([PROMPT, [7, 8]], max_tokens=4)
    for name, prompt in (("a", PROMPT), ("b", [7, 8])):
        llm.engine.add_request(prompt, SamplingParams(max_tokens=4), request_id=name)
    request = llm.engine.request("a")
    assert request is not None

    def boom(_token: int) -> str:
        raise ValueError("no such text")

    monkeypatch.setattr(request.completions[0].text, "push", boom)
    outputs = run(llm)
    assert (outputs["a"].outputs[0].finish_reason, outputs["a"].outputs[0].error) == ("error", "no such text")
    assert outputs["b"].outputs == wanted[1].outputs


def test_f201_end_tokens_beyond_the_vocabulary_end_nobody(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids of a model's files: the look-up of stop tokens would have grown to them, or the scores been read there."""
    changed = ModelConfig(**{**vars(llm.model_config), "eos_token_ids": (2**40, 10**6)})
    monkeypatch.setattr(llm.engine.factory, "_model_config", changed)
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=6, min_tokens=6))
    assert len(output.outputs[0].token_ids) == 6


def test_f201_numbers_too_large_for_a_row_are_cut_or_refused(llm: LLM) -> None:
    (output,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=1, logprobs=2**70, top_k=2**70, temperature=1.0))
    (found,) = output.outputs[0].logprobs or ()
    assert len(found) == llm.model_config.vocab_size
    with pytest.raises(ArgumentError, match="`temperature`: wanted a number that a float can hold"):
        SamplingParams(temperature=10**400)
