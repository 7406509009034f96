"""What a stop token leaves in the text, what log-probabilities say, and what they cost the cache and the memory."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvpager import LLM, SamplingParams
from kvpager.config import EngineConfig
from kvpager.errors import ArgumentError
from kvpager.sampling import logprobs as logprobs_module

PROMPT = "The for statement"


@pytest.fixture(scope="module")
def shared_llm() -> LLM:
    return LLM(num_blocks=64, block_size=4, max_num_seqs=8)


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    shared_llm.block_manager.reset_prefix_cache()
    yield shared_llm
    assert shared_llm.block_manager.stats.live == 0
    assert shared_llm.block_manager.check_invariants() == []


@pytest.mark.parametrize("include", [False, True])
def test_f222_the_text_of_a_stop_token(llm: LLM, include: bool) -> None:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    tokens = llm.generate(PROMPT, max_tokens=6)[0].outputs[0].token_ids
    place = next(at for at in range(1, 6) if tokens[at] not in tokens[:at])
    params = SamplingParams(max_tokens=9, stop_token_ids=[tokens[place]], include_stop_str_in_output=include)
    (completion,) = llm.generate(PROMPT, params)[0].outputs
    assert completion.token_ids == tokens[: place + 1]
    assert completion.text == tokenizer.decode(tokens[: place + include])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", tokens[place])


@pytest.mark.parametrize("include", [False, True])
def test_f222_the_text_of_an_end_token(llm: LLM, include: bool) -> None:
    (end, *_) = llm.model_config.eos_token_ids
    params = SamplingParams(
        max_tokens=3, allowed_token_ids=[end], skip_special_tokens=False, include_stop_str_in_output=include
    )
    (completion,) = llm.generate(PROMPT, params)[0].outputs
    assert llm.tokenizer is not None
    assert completion.text == (llm.tokenizer.token_text(end) if include else "")
    assert (completion.token_ids, completion.stop_reason) == ((end,), None)


def test_f223_log_probabilities_name_their_tokens(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=3, logprobs=10**6, prompt_logprobs=2))
    assert llm.tokenizer is not None
    positions = [*(output.outputs[0].logprobs or ()), *(output.prompt_logprobs or ())[1:]]
    for position in positions:
        assert position is not None
        for token, each in position.items():
            assert each.decoded_token == llm.tokenizer.token_bytes(token, skip_special_tokens=False).decode(
                "utf-8", "replace"
            )
    assert any(each.decoded_token == "\ufffd" for each in (positions[0] or {}).values()), "a byte that begins no text"


def test_f225_a_salt_of_a_caller_is_never_the_engines(llm: LLM) -> None:
    prompt = list(range(5, 17))
    for number in range(4):
        llm.generate(prompt, max_tokens=1)
        llm.engine.add_request(prompt, cache_salt=f"prompt_logprobs of request {number}")
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert [each is None for each in output.prompt_logprobs or ()] == [True] + [False] * 11
    assert output.num_cached_tokens == 0


def test_f226_prompt_log_probabilities_are_made_a_piece_at_a_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, params = list(range(5, 45)), SamplingParams(max_tokens=1, prompt_logprobs=3)
    (whole,) = llm.generate(prompt, params)
    vocab_size, sizes = llm.model_config.vocab_size, []
    monkeypatch.setattr(logprobs_module, "PROMPT_LOGPROB_BYTES", 7 * 16 * vocab_size)
    real = llm.runner.logits

    def counted(hidden: Any, *args: Any) -> Any:
        sizes.append(len(hidden))
        return real(hidden, *args)

    monkeypatch.setattr(llm.runner, "logits", counted)
    (pieces,) = llm.generate(prompt, params)
    assert sizes[:6] == [7, 7, 7, 7, 7, 4]
    assert logprobs_module.prompt_logprob_bytes(vocab_size) == 7 * 16 * vocab_size
    for one, other in zip((whole.prompt_logprobs or ())[1:], (pieces.prompt_logprobs or ())[1:], strict=True):
        assert one is not None
        assert other is not None
        assert list(one) == list(other)
        assert [each.logprob for each in one.values()] == pytest.approx([each.logprob for each in other.values()])


def test_f226_the_plan_states_what_they_take() -> None:
    from kvpager.cli.plan import describe, make_plan
    from kvpager.loader import open_model

    plan = make_plan(open_model(None), EngineConfig())
    assert 0 < plan.prompt_logprob_bytes <= logprobs_module.PROMPT_LOGPROB_BYTES
    assert "prompt_logprobs take at most" in dict(describe(plan))["in all"]
    assert logprobs_module.prompt_logprob_bytes(10**8) == 16 * 10**8, "one position is the least"


def test_f227_what_prompt_log_probabilities_compute_is_found_by_others(llm: LLM) -> None:
    """Nothing lies in the cache that can't be found again, and six equal prompts lie there once."""
    prompt = list(range(5, 17))
    for _ in range(6):
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))
        assert output.num_cached_tokens == 0
    assert llm.block_manager.stats.cached == 3
    assert llm.generate(prompt, max_tokens=1)[0].num_cached_tokens == 8


def test_f228_whole_numbers_of_numpy(llm: LLM) -> None:
    plain = SamplingParams(n=2, seed=5, temperature=1.0, max_tokens=4, top_k=9, logprobs=2, stop_token_ids=[3])
    same = SamplingParams(
        n=np.int64(2), seed=np.int64(5), temperature=np.float32(1.0), max_tokens=np.uint8(4), top_k=np.int16(9),
        logprobs=np.int32(2), stop_token_ids=[np.int64(3)], logit_bias={np.int64(2): np.float32(0.0)},
    )  # fmt: skip
    prompt = [5, 6, 7]
    (wanted,), (found,) = llm.generate(prompt, plain), llm.generate([np.int64(each) for each in prompt], same)
    assert found.outputs == wanted.outputs
    assert all(type(token) is int for token in found.prompt_token_ids)
    assert llm.generate({"prompt_token_ids": [np.int32(5)]}, max_tokens=np.int64(2))[0].finished
    llm.engine.add_request([5], SamplingParams(max_tokens=1), priority=np.int64(-1))
    assert llm.engine.step()[-1].output is not None


def test_f228_settings_of_numpy() -> None:
    config = EngineConfig(
        seed=np.uint64(2**63), num_blocks=np.int64(32), block_size=np.int32(4), max_num_seqs=np.int8(2)
    )
    assert config == EngineConfig(seed=2**63, num_blocks=32, block_size=4, max_num_seqs=2)
    params = SamplingParams(temperature=1.0, max_tokens=3)
    one, other = (LLM(config=each).generate([5], params)[0].outputs for each in (config, EngineConfig(seed=2**63)))
    assert one == other


def test_f224_a_chat_with_a_lone_surrogate_is_refused(llm: LLM) -> None:
    with pytest.raises(ArgumentError, match="`messages`: wanted texts without lone surrogates"):
        llm.chat([{"role": "user", "content": "a\ud800"}])


def test_f229_a_stop_string_across_the_floor(llm: LLM) -> None:
    assert llm.tokenizer is not None
    tokens = llm.generate(PROMPT, max_tokens=6)[0].outputs[0].token_ids
    texts = [llm.tokenizer.token_text(token) for token in tokens]
    stop = (texts[1] + texts[2])[1:] if len(texts[1]) > 1 else texts[1] + texts[2]
    (completion,) = llm.generate(PROMPT, SamplingParams(max_tokens=6, min_tokens=2, stop=stop))[0].outputs
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == "".join(texts)[: "".join(texts).index(stop)]
