"""`LLM`: what goes in and comes out, who waits for whom, and that no block is ever lost."""

import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpager.config
from kvpager import LLM, RequestOutput, SamplingParams
from kvpager.engine import StreamEvent, build
from kvpager.errors import ArgumentError, ConfigError, SequenceTooLongError, StateError, UnknownSequenceError
from kvpager.loader import BUNDLED_MODEL
from kvpager.verify import forward_eager

PROMPTS = ["The for statement", "Return the file", 'The "with" statement is used to wrap', "import"]


@pytest.fixture(scope="module")
def shared_llm() -> LLM:
    return LLM(num_blocks=64, block_size=4)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    yield shared_llm
    assert_nothing_held(shared_llm)


def assert_nothing_held(llm: LLM) -> None:
    assert llm.block_manager.stats.live == 0
    assert llm.block_manager.num_sequences == 0
    assert llm.block_manager.check_invariants() == []


def test_generate_gives_outputs_in_order(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, max_tokens=12)
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        assert isinstance(output, RequestOutput)
        assert output.finished
        assert llm.tokenizer is not None
        assert list(output.prompt_token_ids) == llm.tokenizer.encode(str(output.prompt))
        (completion,) = output.outputs
        assert (completion.index, completion.finish_reason, len(completion.token_ids)) == (0, "length", 12)
        assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert len({output.outputs[0].text for output in outputs}) == 4
    assert len({output.request_id for output in outputs}) == 4


def test_every_form_of_a_prompt(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(PROMPTS[0])
    expected = llm.generate(PROMPTS[0], max_tokens=6)[0].outputs
    for prompt in ([PROMPTS[0]], ids, tuple(ids), [ids], {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]):
        (output,) = llm.generate(prompt, max_tokens=6)  # type: ignore[arg-type]
        assert output.outputs == expected
    mixed = llm.generate([PROMPTS[1], ids, {"prompt_token_ids": ids}], max_tokens=6)
    assert [output.prompt for output in mixed] == [PROMPTS[1], None, None]
    assert mixed[1].outputs == mixed[2].outputs == expected
    assert llm.generate([]) == []


def test_together_is_as_alone(llm: LLM) -> None:
    together = llm.generate(PROMPTS, max_tokens=10)
    alone = [llm.generate(prompt, max_tokens=10)[0] for prompt in PROMPTS]
    assert [output.outputs for output in together] == [output.outputs for output in alone]


def test_parameters_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, temperature=t, seed=5) for n, t in ((1, 0.0), (5, 1.0), (9, 0.0), (5, 2.0))]
    outputs = llm.generate(PROMPTS, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 9, 5]
    again = llm.generate(PROMPTS[1], params[1])[0]
    assert again.outputs == outputs[1].outputs
    assert len(llm.generate(PROMPTS[0])[0].outputs[0].token_ids) == 16


def test_the_two_counters(llm: LLM) -> None:
    """(computed, generated) after a prefill and two decodes: (P, 1), (P + 1, 2), (P + 2, 3)."""
    assert llm.tokenizer is not None
    num_prompt_tokens = [len(llm.tokenizer.encode(prompt)) for prompt in PROMPTS]
    counters: dict[int, list[tuple[int, int]]] = {index: [] for index in range(4)}
    for event in llm.stream(PROMPTS, max_tokens=3):
        computed = (event.sequence or llm.sequence_state(event.request_id)).sequence_length
        counters[event.index].append((computed, len(counters[event.index]) + 1))
    for index, P in enumerate(num_prompt_tokens):
        assert counters[index] == [(P, 1), (P + 1, 2), (P + 2, 3)]


def test_stream_tells_each_token_once(llm: LLM) -> None:
    expected = llm.generate(PROMPTS, max_tokens=8)
    events = list(llm.stream(PROMPTS, max_tokens=8))
    assert [event.index for event in events] == [0, 1, 2, 3] * 8
    for index, output in enumerate(expected):
        mine = [event for event in events if event.index == index]
        assert tuple(event.token_id for event in mine) == output.outputs[0].token_ids
        assert "".join(event.text for event in mine) == output.outputs[0].text
        assert [event.finish_reason for event in mine] == [None] * 7 + ["length"]
        assert [event.output is None for event in mine] == [True] * 7 + [False]
        assert mine[-1].output is not None
        assert mine[-1].output.outputs == output.outputs


def test_stream_comes_while_it_runs(llm: LLM) -> None:
    stream = llm.stream(PROMPTS[0], max_tokens=8)
    assert isinstance(next(stream), StreamEvent)
    assert llm.last_run.num_new_tokens == 1
    assert llm.block_manager.stats.live > 0
    assert len(list(stream)) == 7


def end_after(llm: LLM, monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> int:
    """Makes the token that comes at this place of PROMPTS[0]'s text an end-of-text token."""
    token = llm.generate(PROMPTS[0], max_tokens=num_tokens)[0].outputs[0].token_ids[-1]
    changed = kvpager.config.ModelConfig(**{**vars(llm.model_config), "eos_token_ids": (99, token)})
    monkeypatch.setattr(llm.engine.factory, "_model_config", changed)
    return token


def test_an_end_of_text_token_ends_a_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several ids ends it; the token is counted among the new ones, in streams and without."""
    token = end_after(llm, monkeypatch, 4)
    (output,) = llm.generate(PROMPTS[0], max_tokens=20)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids[-1] == token
    assert 1 <= len(output.outputs[0].token_ids) <= 4
    assert [event.token_id for event in llm.stream(PROMPTS[0], max_tokens=20)] == list(output.outputs[0].token_ids)
    ignoring = llm.generate(PROMPTS[0], SamplingParams(max_tokens=20, ignore_eos=True))[0].outputs[0]
    assert (ignoring.finish_reason, len(ignoring.token_ids)) == ("length", 20)


def test_an_end_at_the_last_token_is_a_stop(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    end_after(llm, monkeypatch, 1)
    assert llm.generate(PROMPTS[0], max_tokens=1)[0].outputs[0].finish_reason == "stop"


def test_a_cut_character_is_flushed_at_the_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.tokenizer is not None
    monkeypatch.setattr(llm.tokenizer, "token_bytes", lambda _token, **_: b"\xe4")
    (output,) = llm.generate(PROMPTS[0], max_tokens=3)
    assert output.outputs[0].text == "\ufffd" * 3
    assert [event.text for event in llm.stream(PROMPTS[0], max_tokens=3)] == ["", "\ufffd", "\ufffd\ufffd"]


def test_waiting_requests_enter_as_blocks_free_up() -> None:
    """6 blocks of 4. Each needs 3 in the end: what five get is what they get with room for all."""
    llm = LLM(num_blocks=6, block_size=4)
    prompts = [[5, 6, 7 + n] for n in range(5)]
    order: list[int] = []
    most_live = 0
    for event in llm.stream(prompts, max_tokens=8):
        if event.index not in order:
            order.append(event.index)
        most_live = max(most_live, llm.block_manager.stats.live)
    assert order == [0, 1, 2, 3, 4]
    assert most_live <= 6
    assert llm.stats().num_preemptions > 0
    assert_nothing_held(llm)
    everyone = LLM(num_blocks=15, block_size=4)
    together = everyone.generate(prompts, max_tokens=8)
    assert [o.outputs for o in together] == [o.outputs for o in llm.generate(prompts, max_tokens=8)]
    assert everyone.stats().num_preemptions == 0


def test_a_long_request_is_not_overtaken() -> None:
    llm = LLM(num_blocks=8, block_size=4)
    params = [SamplingParams(max_tokens=n) for n in (12, 20, 1)]
    first_seen = {event.index: None for event in llm.stream([[5] * 4, [6] * 4, [7] * 4], params)}
    assert list(first_seen) == [0, 1, 2]


def test_no_more_than_max_num_seqs() -> None:
    llm = LLM(num_blocks=64, block_size=4, max_num_seqs=2)
    seen = [llm.block_manager.num_sequences for _ in llm.stream(PROMPTS, max_tokens=4)]
    assert max(seen) == 2


def test_the_last_token_takes_no_slot() -> None:
    llm = LLM(num_blocks=2, block_size=4)
    assert len(llm.generate([5, 6, 7], max_tokens=6)[0].outputs[0].token_ids) == 6
    assert llm.last_run.peak_blocks == 2
    with pytest.raises(
        SequenceTooLongError,
        match=r"prompt 0: 3 prompt tokens and 7 new ones need 3 blocks of 4 tokens, 2 is the most; "
        r"set `num_blocks` to at least 3, or lower `max_tokens` by 1",
    ):
        llm.generate([5, 6, 7], max_tokens=7)


def test_what_can_never_fit_is_refused_before_anything_runs(llm: LLM) -> None:
    made = llm.last_run
    for prompts in (["ok", [5] * 300], [[5] * 2040]):
        with pytest.raises(SequenceTooLongError):
            llm.stream(prompts, max_tokens=20)
    with pytest.raises(SequenceTooLongError) as caught:
        llm.stream(["ok", [5] * 2040], max_tokens=20)
    assert str(caught.value) == "prompt 1 has 2040 tokens and asks for 20 more: 2060 positions, the model has 2048"
    assert llm.last_run is made


def test_a_model_is_used_up_to_its_last_position(lab: Any) -> None:
    llm = LLM(lab.folder("8-2"), num_blocks=17, block_size=16)
    limit = llm.model_config.max_position_embeddings
    (output,) = llm.generate([7] * (limit - 2), SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2
    with pytest.raises(SequenceTooLongError, match=f"{limit + 1} positions, the model has {limit}"):
        llm.generate([7] * (limit - 2), max_tokens=3)


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        ("", {}, "`prompts`: wanted at least one token in each, got none in prompt 0"),
        ([[5], []], {}, "none in prompt 1"),
        ([[2048]], {}, "`prompts`: wanted token ids in 0 … 2047, got 2048 in prompt 0"),
        ([[-1]], {}, "got -1 in prompt 0"),
        ([[1.5]], {}, "got 1.5 in prompt 0"),
        ({"prompt": "x"}, {}, "`prompts`: wanted `prompt_token_ids` as the only key, got prompt"),
        ({"prompt_token_ids": None}, {}, "`prompts`: wanted a text or a list of token ids, got NoneType as prompt 0"),
        (
            5,
            {},
            "`prompts`: wanted a text, a list of token ids, {`prompt_token_ids`: ids}, or a list of those, got int",
        ),
        (["a", None], {}, "`prompts`: wanted a text or a list of token ids, got NoneType as prompt 1"),
        (b"a", {}, "or a list of those, got bytes"),
        ("\ud800", {}, "`prompts`: wanted text without lone surrogates, got one in prompt 0"),
        ("a", {"sampling_params": 5}, "`sampling_params`: wanted `SamplingParams`, or a list of them, got int"),
        (
            "a",
            {"sampling_params": [None]},
            "`sampling_params`: wanted `SamplingParams`, or a list of them, got NoneType",
        ),
        (["a", "b"], {"sampling_params": [SamplingParams()]}, "wanted one, or one for each of 2 prompts, got 1"),
        ("a", {"sampling_params": SamplingParams(), "max_tokens": 3}, "`max_tokens`: wanted None together with"),
        ("a", {"max_tokens": 0}, "`max_tokens`: wanted at least 1, got 0"),
    ],
)
def test_bad_arguments_are_named(llm: LLM, prompts: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        llm.stream(prompts, **arguments)


def test_a_refused_call_changes_no_later_draw() -> None:
    """Requests without a seed draw by their number; one that was refused takes none."""

    def draw(refuse: bool) -> object:
        llm = LLM(num_blocks=16, seed=4)
        if refuse:
            with pytest.raises(ArgumentError):
                llm.generate(["a", []], temperature=1.0)
        return llm.generate("The for", temperature=1.5, max_tokens=12)[0].outputs

    assert draw(refuse=True) == draw(refuse=False)


class BoomError(Exception):
    pass


@pytest.mark.parametrize("error", [BoomError, KeyboardInterrupt])
@pytest.mark.parametrize("failing_step", [0, 3])
@pytest.mark.parametrize("layer", [0, 3])
def test_a_failing_model_leaks_nothing(llm: LLM, error: type[BaseException], failing_step: int, layer: int) -> None:
    step = -1

    def fail(_module: object, _inputs: object) -> None:
        nonlocal step
        step += 1
        if step == failing_step:
            raise error

    hook = llm.runner.model.model.layers[layer].mlp.register_forward_pre_hook(fail)
    try:
        with pytest.raises(error):
            llm.generate(PROMPTS, max_tokens=8)
    finally:
        hook.remove()
    assert_nothing_held(llm)
    assert len(llm.generate(PROMPTS, max_tokens=8)) == 4


@pytest.mark.parametrize("taken", [0, 1, 3, 9])
def test_a_stream_closed_early_leaks_nothing(llm: LLM, taken: int) -> None:
    stream = llm.stream(PROMPTS, max_tokens=8)
    for _ in range(taken):
        next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert_nothing_held(llm)


def test_a_dropped_stream_leaks_nothing(llm: LLM) -> None:
    for _event in llm.stream(PROMPTS, max_tokens=8):
        break
    assert_nothing_held(llm)


def test_a_request_that_ends_gives_its_blocks_back_at_once(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n) for n in (2, 6)]
    held = []
    for event in llm.stream(PROMPTS[:2], params):
        held.append(llm.block_manager.num_sequences)
        if event.output is not None:
            ended, sequence = event.request_id, event.sequence
            assert sequence is not None
            output = event.output.outputs[0]
            assert sequence.sequence_length == len(event.output.prompt_token_ids) + len(output.token_ids) - 1
            assert len(sequence.block_table) == -(-sequence.sequence_length // 4)
            with pytest.raises(UnknownSequenceError):
                llm.sequence_state(ended)
        else:
            assert event.sequence is None
    assert held == [2, 2, 1, 1, 1, 1, 1, 0]


def test_one_run_at_a_time(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, max_tokens=8)
    next(stream)
    with pytest.raises(StateError, match="a stream of this engine is still open"):
        llm.generate("a")
    assert len(list(stream)) == 31, "the open stream is untouched"
    assert len(llm.generate("a")) == 1


def test_figures_of_a_run(llm: LLM) -> None:
    assert llm.tokenizer is not None
    llm.block_manager.reset_prefix_cache()
    llm.generate(PROMPTS, max_tokens=5)
    stats = llm.last_run
    lengths = [len(llm.tokenizer.encode(prompt)) + 4 for prompt in PROMPTS]
    assert stats.num_prompt_tokens == sum(lengths) - 16
    assert (stats.num_new_tokens, stats.num_decoded_tokens) == (20, 16)
    assert (stats.num_prefill_steps, stats.num_decode_steps) == (1, 4)
    assert stats.prefill_seconds > 0
    assert stats.decode_seconds > 0
    assert stats.peak_blocks == sum(-(-length // 4) for length in lengths)
    assert stats.peak_fragmentation_tokens == stats.peak_blocks * 4 - sum(lengths)


def test_the_size_of_the_pool() -> None:
    """The bundled model takes 2 · 4 layers · 2 heads · 32 · 4 bytes = 2 KiB per token."""
    assert LLM(num_blocks=7).block_manager.num_blocks == 7
    assert LLM(kv_cache_memory_bytes=2**20).block_manager.num_blocks == 32
    assert LLM(max_num_seqs=2).block_manager.num_blocks == 2 * 2048 // 16
    assert LLM(max_num_seqs=512).block_manager.num_blocks == 2**30 // (2048 * 16)
    with pytest.raises(ConfigError, match="`kv_cache_memory_bytes`: wanted at least 32768 bytes"):
        LLM(kv_cache_memory_bytes=1000)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("nowhere", "`device` is nowhere; supported: cpu, cuda"),
        ("meta", "`device` is meta; supported: cpu, cuda"),
        ("cuda:9", r"`device` is cuda:9; torch .* sees \d CUDA devices"),
    ],
)
def test_a_device_that_is_not_there(device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(device=device)


@pytest.mark.parametrize(
    ("ids", "tokens", "message"),
    [
        ([0, 0], [[5], [6]], "`sequence_ids`: wanted each at most once"),
        ([0], [[]], "`token_ids`: wanted at least one for each of 1 sequences"),
        ([0], [[5], [6]], "`token_ids`: wanted at least one for each of 1 sequences"),
        ([], [], "`token_ids`: wanted at least one"),
    ],
)
def test_a_bad_step_changes_nothing(llm: LLM, ids: list[int], tokens: list[list[int]], message: str) -> None:
    llm.block_manager.create_sequence(0)
    with pytest.raises(ArgumentError, match=message):
        forward_eager(llm.runner, ids, tokens)
    assert llm.block_manager.sequences[0].sequence_length == 0
    llm.block_manager.release_sequence(0)


def test_a_folder_without_a_tokenizer_takes_token_ids(lab: Any) -> None:
    llm = LLM(lab.folder("16-8"), num_blocks=8)
    assert llm.generate([[3, 4, 5]], max_tokens=3)[0].outputs[0].text == ""
    with pytest.raises(ArgumentError, match=r"token ids, as the model folder has no tokenizer.json"):
        llm.generate("a")
    with pytest.raises(ConfigError, match=r"has no tokenizer.json"):
        llm.encode_chat([{"role": "user", "content": "a"}])


def test_f216_a_folder_whose_tokenizer_can_not_be_used(
    lab: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(lab.folder("16-8"), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps({"decoder": {"type": "Metaspace"}}))
    llm = LLM(tmp_path / "model", num_blocks=8)
    assert llm.tokenizer is None
    assert "decoder of type Metaspace" in caplog.text
    assert len(llm.generate([3, 4, 5], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids) == 3
    for refused in ("a", SamplingParams(stop="a")):
        with pytest.raises(
            ArgumentError, match=r"as the model's tokenizer can't be used: .* decoder of type Metaspace"
        ):
            llm.generate(*((refused,) if isinstance(refused, str) else ([3], refused)))
    with pytest.raises(ConfigError, match="a conversation is text, and the model's tokenizer can't be used"):
        llm.chat([{"role": "user", "content": "a"}])


def test_chat(llm: LLM) -> None:
    ids = llm.encode_chat([{"role": "user", "content": "What is a list?"}])
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(ids) == "user\nWhat is a list?\nassistant\n"
    assert ids.count(1) == 2
    assert llm.generate(ids, max_tokens=2)[0].finished


def test_dtype_auto_says_once_that_it_is_not_the_stored_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED_MODEL, folder)
    config = (folder / "config.json").read_text().replace('"float32"', '"bfloat16"')
    (folder / "config.json").write_text(config)
    monkeypatch.setattr(kvpager.config.engine, "cpu_features", lambda: frozenset({"avx2"}))
    build._say_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="kvpager"):
        for _ in range(2):
            llm = LLM(folder, num_blocks=4)
            assert next(llm.runner.model.parameters()).dtype == llm.runner.cache.dtype == torch.float32
    said = [record.message for record in caplog.records if "bfloat16" in record.message]
    assert said == ["this CPU has no fast bfloat16 arithmetic: computing in float32 (`dtype` overrides)"]
    assert LLM(folder, num_blocks=4, dtype="bfloat16").runner.cache.dtype == torch.bfloat16
    monkeypatch.setattr(kvpager.config.engine, "cpu_features", lambda: frozenset({"avx512_bf16"}))
    assert LLM(folder, num_blocks=4).runner.cache.dtype == torch.bfloat16
