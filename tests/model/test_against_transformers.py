"""The model over the paged cache computes what transformers' eager attention computes, which shares no code with it."""

from typing import Any

import pytest
import torch

from kvpager import LLM, SamplingParams
from kvpager.config import ModelConfig
from kvpager.verify import forward_eager

TOLERANCE = 1e-4
CHECKPOINTS = ("tiny", "16-8", "8-2", "14-2", "5-1", "qwen2", "llama")


@pytest.mark.parametrize("block_size", [1, 4, 16, 17])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_and_attention_on_forced_tokens(lab: Any, name: str, block_size: int) -> None:
    theirs = lab.reference(name)
    runner = lab.runner(name, block_size=block_size)
    ours = lab.force(runner, [trace.prompt for trace in theirs], [trace.tokens for trace in theirs])
    assert len(ours) >= 4
    assert ours[0].logits.shape == (64, runner.model.config.vocab_size)
    logits = max(float((a.logits - b.logits).abs().max()) for a, b in zip(ours, theirs, strict=True))
    attention = torch.stack(
        [(a.attention - b.attention).abs().amax(dim=(0, 2)) for a, b in zip(ours, theirs, strict=True)]
    )
    print(f"\n{name}, block size {block_size}: logits {logits:.1e}, attention {attention.max():.1e}")
    assert logits <= TOLERANCE
    assert attention.shape == (len(ours), runner.model.config.num_hidden_layers)
    assert bool((attention <= TOLERANCE).all()), attention


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_free_running_greedy_tokens(lab: Any, name: str) -> None:
    """Equal, but for what follows a step whose two best scores lie closer than rounding."""
    theirs = lab.reference(name)
    llm = LLM(lab.folder(name), dtype="float32", num_blocks=64)
    outputs = llm.generate([list(trace.prompt) for trace in theirs], SamplingParams(max_tokens=64, ignore_eos=True))
    close_calls = 0
    for output, trace in zip(outputs, theirs, strict=True):
        ours = output.outputs[0].token_ids
        step = next((step for step in range(64) if ours[step] != trace.tokens[step]), None)
        if step is not None:
            best, second = trace.logits[step].topk(2).values.tolist()
            print(f"\n{name}: differs after a gap of {best - second:.1e} at step {step}")
            assert best - second < 2e-4
            close_calls += 1
    print(f"\n{name}: {close_calls} close calls")
    assert close_calls == 0 or name != "tiny"


def test_the_reference_is_worth_comparing_with(lab: Any) -> None:
    """Flat logits, or a text of one repeated token, would hide a broken cache."""
    for name in CHECKPOINTS:
        for trace in lab.reference(name):
            assert len(set(trace.tokens)) >= 6, name
            assert float(trace.logits.std()) > 0.5, name


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_bfloat16_is_as_close_as_transformers_own(lab: Any, name: str, transformers_trace: Any) -> None:
    """Distance to the float32 run on the same tokens: at most twice that of transformers in bfloat16."""
    exact = lab.reference(name)
    model = lab.transformers_model(name, torch.bfloat16)
    theirs = [transformers_trace(model, trace.prompt, trace.tokens) for trace in exact]
    runner = lab.runner(name, block_size=16, dtype=torch.bfloat16)
    ours = lab.force(runner, [trace.prompt for trace in exact], [trace.tokens for trace in exact])
    their_distance = max(float((a.logits - b.logits).abs().max()) for a, b in zip(theirs, exact, strict=True))
    our_distance = max(float((a.logits - b.logits).abs().max()) for a, b in zip(ours, exact, strict=True))
    print(f"\n{name}: bfloat16 is {our_distance:.2e} off here, {their_distance:.2e} there")
    assert 0 < our_distance <= 2 * their_distance


@pytest.mark.parametrize("name", CHECKPOINTS[1:])
def test_both_spellings_of_the_config_mean_the_same(lab: Any, name: str, tmp_path: Any) -> None:
    """The forced-token test runs two checkpoints in each spelling; here every one is read in both."""
    from_old = ModelConfig.from_folder(lab.respelled(name, tmp_path))
    assert from_old == ModelConfig.from_folder(lab.folder(name))
    assert (from_old.rope_theta, from_old.dtype) == (1e6, "float32")
    assert (from_old.head_dim != from_old.hidden_size // from_old.num_attention_heads) == (name != "qwen2")
    assert (from_old.rope_scaling is not None) == (name == "llama")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 8, 12])
def test_b081_a_prompt_in_chunks_is_the_prompt_at_once(lab: Any, chunk: int, dtype: torch.dtype) -> None:
    prompt = lab.prompts("16-8")[2][:13]
    whole, parts = (lab.runner("16-8", block_size=4, num_blocks=8, dtype=dtype) for _ in range(2))
    seen: list[int] = []
    parts.model.register_forward_pre_hook(lambda _module, inputs: seen.extend(inputs[1].tolist()))
    whole.block_manager.create_sequence(0)
    parts.block_manager.create_sequence(0)
    at_once = forward_eager(whole, [0], [prompt])
    for start in range(0, 13, chunk):
        in_chunks = forward_eager(parts, [0], [prompt[start : start + chunk]])
    assert seen == list(range(13))
    if dtype == torch.bfloat16:
        assert in_chunks.argmax() == at_once.argmax()
        return
    assert float((in_chunks - at_once).abs().max()) <= TOLERANCE
    for layer in range(2):
        for caches in ("key_cache", "value_cache"):
            rows = [_rows(getattr(runner.cache, caches)[layer], runner) for runner in (whole, parts)]
            assert rows[0].shape == (13, 8, 32)
            assert float((rows[0] - rows[1]).abs().max()) <= 1e-5


def _rows(cache: torch.Tensor, runner: Any) -> torch.Tensor:
    """Rows [13, K, D] of a cache [N, K, S, D] at the slots of sequence 0."""
    places = [runner.block_manager.locate(0, position) for position in range(13)]
    return torch.stack([cache[block, :, offset] for block, offset in places])


def test_a_forked_sequence_goes_on_as_the_whole_text_would(lab: Any) -> None:
    """The runner runs owed copies before it writes: two forks write different tokens behind one shared tail block."""
    prompt = lab.prompts("8-2")[1]
    runner = lab.runner("8-2", block_size=4, num_blocks=16)
    runner.block_manager.create_sequence(0)
    forward_eager(runner, [0], [prompt])
    runner.block_manager.fork_sequence(0, 1)
    forked = forward_eager(runner, [0, 1], [[7], [8]])
    for row, token in enumerate((7, 8)):
        runner.block_manager.create_sequence(10 + row)
        alone = forward_eager(runner, [10 + row], [[*prompt, token]])
        assert float((forked[row] - alone[0]).abs().max()) <= TOLERANCE
    assert runner.block_manager.stats.num_copies == 1
