"""What `LLM` and `Engine` offer beyond plain text: n > 1, chat, log-probabilities, aborts, figures, the trace."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpager import LLM, SamplingParams
from kvpager.engine import Engine, RequestOutput, as_line
from kvpager.errors import ArgumentError, ConfigError, SequenceTooLongError, StateError

PROMPTS = ["The for statement", "Return the file", 'The "with" statement is used to wrap', "import"]


@pytest.fixture(scope="module")
def shared_llm() -> LLM:
    return LLM(num_blocks=64, block_size=4, max_num_seqs=8)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    shared_llm.block_manager.reset_prefix_cache()
    yield shared_llm
    assert_nothing_held(shared_llm)


def assert_nothing_held(llm: LLM) -> None:
    assert llm.block_manager.stats.live == 0
    assert llm.block_manager.num_sequences == 0
    assert llm.block_manager.check_invariants() == []
    assert llm.engine.sampler.num_rows == 0
    assert not llm.engine.has_unfinished_requests()


def run(engine: Engine) -> dict[str, RequestOutput]:
    outputs = {}
    while engine.has_unfinished_requests():
        for event in engine.step():
            if event.output is not None:
                outputs[event.request_id] = event.output
    return outputs


# n > 1 ----------------------------------------------------------------------------------------------------------------


def test_n_completions_share_the_prompt(llm: LLM) -> None:
    prompt = list(range(5, 5 + 18))  # 4 full blocks and 2 positions
    live = {}
    for event in llm.stream(prompt, SamplingParams(n=3, temperature=1.0, seed=2, max_tokens=4, ignore_eos=True)):
        live[len(live)] = llm.block_manager.stats.live
        if event.output is not None:
            output = event.output
    assert live[0] == live[2] == 5, "three sequences, the blocks of one"
    assert live[3] == 4 + 3, "each has a tail of its own, copied when it was written"
    assert llm.block_manager.stats.num_copies == 2
    assert [each.index for each in output.outputs] == [0, 1, 2]
    assert len({each.token_ids for each in output.outputs}) == 3
    assert all(len(each.token_ids) == 4 for each in output.outputs)


def test_n_completions_are_those_of_n_seeds(llm: LLM) -> None:
    """The first is what n = 1 gives; all are the same whoever shares the batch; greedy ones are equal."""
    params = SamplingParams(n=3, temperature=1.2, seed=9, max_tokens=6)
    (three,) = llm.generate(PROMPTS[0], params)
    (one,) = llm.generate(PROMPTS[0], SamplingParams(temperature=1.2, seed=9, max_tokens=6))
    assert three.outputs[0] == one.outputs[0]
    among = llm.generate(PROMPTS, [params, SamplingParams(), SamplingParams(n=2), SamplingParams()])
    assert among[0].outputs == three.outputs
    assert len({each.token_ids for each in among[2].outputs}) == 1


def test_n_that_no_batch_holds(llm: LLM) -> None:
    with pytest.raises(ArgumentError, match="`n`: wanted at most `max_num_seqs` 8, got 9"):
        llm.generate("a", SamplingParams(n=9))


def test_streams_of_n_completions_join_to_their_texts(llm: LLM) -> None:
    params = SamplingParams(n=2, temperature=1.5, seed=1, max_tokens=7)
    texts = {(index, n): "" for index in (0, 1) for n in (0, 1)}
    ends = []
    for event in llm.stream(PROMPTS[:2], params):
        texts[event.index, event.completion] += event.text
        if event.finish_reason is not None:
            ends.append((event.index, event.completion))
            assert event.sequence is not None
        if event.output is not None:
            for each in event.output.outputs:
                assert texts[event.index, each.index] == each.text
    assert sorted(ends) == sorted(texts)


# Sampling parameters -------------------------------------------------------------------------------------------------


def test_penalties_change_what_comes(llm: LLM) -> None:
    plain, bent = llm.generate(
        [PROMPTS[0]] * 2, [SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, repetition_penalty=1.8)]
    )
    assert plain.outputs[0].token_ids != bent.outputs[0].token_ids


def test_stop_strings_and_stop_tokens(llm: LLM) -> None:
    (plain,) = llm.generate(PROMPTS[0], max_tokens=12)
    text, tokens = plain.outputs[0].text, plain.outputs[0].token_ids
    stop = text[8:11]
    (cut,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=12, stop=stop))
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    (ended,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=12, stop_token_ids=[tokens[4]]))
    assert ended.outputs[0].token_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", tokens[4])
    (late,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=12, min_tokens=9, stop_token_ids=[tokens[4]]))
    assert len(late.outputs[0].token_ids) >= 9


def test_none_stops_nowhere(llm: LLM) -> None:
    plain, none = (SamplingParams(max_tokens=4, **values) for values in ({}, {"stop": None, "stop_token_ids": None}))
    prompt = [5, 6, 7]
    assert llm.generate(prompt, none)[0].outputs == llm.generate(prompt, plain)[0].outputs


def test_a_stop_string_in_the_last_token_is_a_stop(llm: LLM) -> None:
    (plain,) = llm.generate(PROMPTS[0], max_tokens=6)
    assert llm.tokenizer is not None
    before = llm.tokenizer.decode(plain.outputs[0].token_ids[:5])
    stop = plain.outputs[0].text[len(before) :]
    (cut,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=6, stop=stop))
    assert cut.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("budget", [None, 3])
def test_prompt_logprobs(budget: int | None) -> None:
    """Each prompt token's, however it is cut into chunks; they neither find nor leave a cached prefix."""
    llm = LLM(num_blocks=64, block_size=4, max_num_seqs=3, max_num_batched_tokens=budget)
    params = SamplingParams(max_tokens=2, prompt_logprobs=2, logprobs=1)
    llm.generate(PROMPTS[2], max_tokens=1)
    (output,) = llm.generate(PROMPTS[2], params)
    assert output.num_cached_tokens == 0
    found = output.prompt_logprobs
    assert found is not None
    assert found[0] is None
    assert len(found) == len(output.prompt_token_ids)
    for token, position in zip(output.prompt_token_ids[1:], found[1:], strict=True):
        assert position is not None
        assert token in position
        assert len(position) in (2, 3)
        best = [each for each in position.values() if each.rank == 1]
        assert best[0].logprob == max(each.logprob for each in position.values())
    own = output.outputs[0].logprobs
    assert own is not None
    assert [next(iter(each)) for each in own] == list(output.outputs[0].token_ids)
    # What the model says of the prompt's last token given the rest is what it samples from there.
    shorter = list(output.prompt_token_ids[:-1])
    (again,) = llm.generate(shorter, SamplingParams(max_tokens=1, logprobs=2))
    last = found[-1]
    assert last is not None
    assert again.outputs[0].logprobs is not None
    best = max(last.values(), key=lambda each: each.logprob)
    (token,) = again.outputs[0].token_ids
    assert last[token].logprob == pytest.approx(best.logprob)
    assert again.outputs[0].logprobs[0][token].logprob == pytest.approx(best.logprob, abs=1e-4)


def test_chat(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is a list?"}]
    (one,) = llm.chat(question, max_tokens=4)
    assert list(one.prompt_token_ids) == llm.encode_chat(question)
    two = llm.chat([question, [{"role": "user", "content": "And a tuple?"}]], max_tokens=4)
    assert two[0].outputs == one.outputs
    assert len(two) == 2


def test_progress_is_shown_on_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(llm.generate(PROMPTS, max_tokens=2, show_progress=True)) == 4
    assert capsys.readouterr().out == ""


# The engine below -----------------------------------------------------------------------------------------------------


def test_requests_come_while_others_run(llm: LLM) -> None:
    engine = llm.engine
    alone = llm.generate(PROMPTS, max_tokens=6)
    names = [engine.add_request(PROMPTS[0], SamplingParams(max_tokens=6))]
    engine.step()
    names.append(engine.add_request(PROMPTS[1], SamplingParams(max_tokens=6), request_id="mine"))
    engine.step()
    assert [event.request_id for event in engine.step()] == names
    outputs = run(engine)
    assert [outputs[name].outputs for name in names] == [alone[0].outputs, alone[1].outputs]
    assert engine.step() == []


def test_b116_a_name_is_taken_while_its_request_is_here(llm: LLM) -> None:
    engine = llm.engine
    engine.add_request(PROMPTS[0], SamplingParams(max_tokens=5), request_id="x")
    engine.step()
    with pytest.raises(ArgumentError, match="`request_id`: wanted a name that no unfinished request has, got x"):
        engine.add_request(PROMPTS[1], request_id="x")
    assert len(run(engine)["x"].outputs[0].token_ids) == 5
    engine.add_request(PROMPTS[1], SamplingParams(max_tokens=2), request_id="x")
    assert len(run(engine)["x"].outputs[0].token_ids) == 2


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_b124_abort_in_every_state(n: int, num_steps: int) -> None:
    """While it waits, in its prefill, while it decodes, in the step after its end: one last event, no block held."""
    llm = LLM(num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=4)
    engine = llm.engine
    name = engine.add_request([5, 6, 7, 8, 9, 10], SamplingParams(n=n, max_tokens=2, ignore_eos=True))
    other = engine.add_request([9, 8, 7], SamplingParams(max_tokens=6, ignore_eos=True))
    last = []
    for _ in range(num_steps):
        last += [event for event in engine.step() if event.request_id == name and event.output is not None]
    aborted = engine.abort(name)
    assert (aborted is None) == (len(last) == 1), "what has ended can't be aborted"
    assert engine.abort(name) is None
    assert engine.abort("nobody") is None
    while engine.has_unfinished_requests():
        for event in engine.step():
            if event.request_id == name and event.output is not None:
                last.append(event)
            if event.request_id == other and event.output is not None:
                assert len(event.output.outputs[0].token_ids) == 6
    assert len(last) == 1
    assert last[0].output is not None
    assert {each.finish_reason for each in last[0].output.outputs} <= {"abort", "length"}
    assert len(last[0].output.outputs) == n
    assert_nothing_held(llm)


def test_abort_ends_one_request_of_a_stream(llm: LLM) -> None:
    ended = {}
    for event in llm.stream(PROMPTS[:3], max_tokens=8):
        if event.index == 1 and event.finish_reason is None and not ended:
            llm.abort(event.request_id)
        if event.output is not None:
            ended[event.index] = event.output.outputs[0]
    assert [ended[index].finish_reason for index in range(3)] == ["length", "abort", "length"]
    assert len(ended[1].token_ids) == 1


def test_a_salt_keeps_prefixes_apart(llm: LLM) -> None:
    engine, prompt = llm.engine, list(range(5, 22))
    cached = []
    for salt in (None, None, "a", "a", ""):
        name = engine.add_request(prompt, SamplingParams(max_tokens=1), cache_salt=salt)
        cached.append(run(engine)[name].num_cached_tokens)
    assert cached == [0, 16, 0, 16, 0]


def test_priorities(llm: LLM) -> None:
    engine = LLM(num_blocks=64, block_size=4, max_num_seqs=1).engine
    names = [engine.add_request([n + 5], SamplingParams(max_tokens=1), priority=p) for n, p in enumerate((1, 0, 1))]
    assert list(run(engine)) == [names[1], names[0], names[2]]


def test_when_nobody_can_run_that_is_said(llm: LLM) -> None:
    held = [llm.block_manager.allocate_block() for _ in range(62)]
    with pytest.raises(StateError, match=r"nothing can run: sequence \d+ needs 3 blocks, 2 free of 64"):
        llm.generate(list(range(5, 15)), max_tokens=1)
    for block in held:
        llm.block_manager.free_block(block)
    assert len(llm.generate(list(range(5, 15)), max_tokens=1)) == 1


def test_settings_of_the_engine() -> None:
    with pytest.raises(ConfigError, match="`max_num_batched_tokens` is 7; it must be at least `max_num_seqs` 8"):
        LLM(num_blocks=8, max_num_seqs=8, max_num_batched_tokens=7)
    with pytest.raises(ConfigError, match="`watermark_blocks` is -1; it must be at least 0"):
        LLM(num_blocks=8, watermark_blocks=-1)
    with pytest.raises(ConfigError, match="`fixed_split` is -1; it must be at least 0"):
        LLM(num_blocks=8, fixed_split=-1)
    for seed in (-1, 2**64):
        with pytest.raises(ConfigError, match=rf"`seed` is {seed}; it must be 0 … 2\^64 - 1"):
            LLM(num_blocks=8, seed=seed)
    LLM(num_blocks=8, seed=2**64 - 1).generate([5, 6, 7], SamplingParams(max_tokens=1, temperature=1.0))
    assert LLM(num_blocks=8, fixed_split=32).runner.fixed_split == 32
    llm = LLM(num_blocks=8, block_size=4, max_model_len=9, enable_prefix_caching=False)
    with pytest.raises(SequenceTooLongError, match="10 positions, `max_model_len` is 9"):
        llm.generate([5, 6, 7], max_tokens=7)
    for _ in range(2):
        assert llm.generate([5, 6, 7, 8, 9], max_tokens=4)[0].num_cached_tokens == 0


# Figures --------------------------------------------------------------------------------------------------------------


def test_metrics_of_a_request() -> None:
    llm = LLM(num_blocks=64, block_size=4, max_num_seqs=1)
    moments = iter(range(1000))
    llm.engine._clock = lambda: float(next(moments))
    first, second = llm.generate(PROMPTS[:2], max_tokens=4)
    for output in (first, second):
        metrics = output.metrics
        assert metrics is not None
        assert metrics.queue_seconds is not None
        assert metrics.time_to_first_token_seconds is not None
        assert metrics.e2e_seconds is not None
        assert metrics.time_per_output_token_seconds is not None
        assert 0 < metrics.queue_seconds <= metrics.time_to_first_token_seconds < metrics.e2e_seconds
        later = metrics.e2e_seconds - metrics.time_to_first_token_seconds
        assert metrics.time_per_output_token_seconds <= later / 3
        assert metrics.num_preemptions == 0
    assert second.metrics is not None
    assert first.metrics is not None
    assert second.metrics.queue_seconds > first.metrics.e2e_seconds - 2  # type: ignore[operator]  # one after the other


def test_stats_tell_blocks_and_tokens_apart(llm: LLM) -> None:
    before = llm.stats()
    stream = llm.stream([list(range(5, 14)), list(range(30, 33))], max_tokens=3)
    next(stream)
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 0)
    assert (stats.live_blocks, stats.num_tokens) == (4, 12)
    assert (stats.block_usage, stats.token_usage) == (4 / 64, 12 / 256)
    list(stream)
    stats = llm.stats()
    assert stats.live_blocks + stats.evictable_blocks + stats.fenced_blocks + stats.free_blocks == 64
    assert (stats.live_blocks, stats.num_tokens) == (0, 0)
    assert stats.evictable_blocks == 3, "two full blocks of the first, one of the second"
    assert stats.num_finished - before.num_finished == 2
    assert stats.num_generated_tokens - before.num_generated_tokens == 6


def test_the_trace_says_why(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    llm = LLM(num_blocks=5, block_size=4, max_num_seqs=2, max_num_batched_tokens=6, watermark_blocks=0, trace=path)
    llm.generate([list(range(5, 13)), list(range(20, 28)), [7]], max_tokens=5)
    assert llm.trace is not None
    llm.trace.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    first: dict[str, Any] = records[0]
    assert first["admitted"] == {"0": 0}
    assert first["prefill"] == {"0": [0, 6]}
    assert first["held_back"] == "tokens"
    assert {record["held_back"] for record in records} >= {"tokens", "blocks", None}
    assert [name for record in records for name in record["preempted"]] == ["1"]
    ended = {name: why for record in records for name, why in record["finished"].items()}
    assert ended == {"0": ["length"], "1": ["length"], "2": ["length"]}
    lines = [as_line(record) for record in records]
    assert lines[0].startswith("step 1: 0 decode, 0 computes 0…5, 0 admitted (0 tokens cached), 1 running, 2 waiting")
    assert "(no token left in the step: `max_num_batched_tokens`), 2 of 5 blocks live" in lines[0]
    assert any("1 preempted (not enough blocks)" in line for line in lines)
    with pytest.raises(ConfigError, match="can't write"):
        LLM(num_blocks=5, trace=tmp_path / "nowhere" / "steps.jsonl")
