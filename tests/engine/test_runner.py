"""A step's tensors: read in place or copied to a device, padded or not, the model gets the same."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvpager import LLM, SamplingParams, ops
from kvpager.config import EngineConfig
from kvpager.engine import build
from kvpager.engine.build import can_capture
from kvpager.runner import StepTensors, decode_sizes

PARAMS = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (13, 14, 9, 24, 16, 1)]
PROMPTS = [[5 + n, *range(30, 36 + 2 * n)] for n in range(6)]


def make_llm(num_blocks: int = 12) -> LLM:
    """So few blocks that some are preempted, and so few tokens a step that prompts are cut."""
    llm = LLM(num_blocks=num_blocks, block_size=4, max_num_seqs=5, max_num_batched_tokens=11)
    llm.runner.cache.storage.fill_(float("nan"))
    return llm


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    llm = make_llm()
    outputs = [output.outputs for output in llm.generate(PROMPTS, PARAMS)]
    assert llm.stats().num_preemptions > 0
    return outputs


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("sizes", [(), (5,), (2, 4), (1, 3, 5, 64)])
def test_copied_and_padded_steps_give_the_same(expected: list[Any], copied: bool, sizes: tuple[int, ...]) -> None:
    llm = make_llm()
    llm.runner.decode_sizes = sizes
    llm.engine._tensors = StepTensors(llm.engine._batch.buffers[0], torch.device("cpu"), copied=copied)
    rows = set()
    forward = llm.runner.model.forward

    def watched(input_ids: torch.Tensor, positions: torch.Tensor, cache: Any, metadata: Any) -> torch.Tensor:
        if metadata.max_query_len == 1:
            rows.add(len(input_ids))
            assert len(metadata.seq_lens) == len(metadata.slot_mapping) == len(input_ids)
            past = metadata.seq_lens == 0
            assert (metadata.slot_mapping[past] == -1).all()
            assert (positions[past] == 0).all()
        return forward(input_ids, positions, cache, metadata)

    llm.runner.model.forward = watched  # type: ignore[method-assign]
    assert [output.outputs for output in llm.generate(PROMPTS, PARAMS)] == expected
    if sizes:
        most = max(sizes)
        assert all(n in sizes or n > most or n == 5 for n in rows)


def test_a_copied_table_follows_the_changes_alone() -> None:
    """After every step the copy is the batch's own table, though only a step that says so uploads it whole."""
    llm = make_llm()
    tensors = StepTensors(llm.engine._batch.buffers[0], torch.device("cpu"), copied=True)
    llm.engine._tensors = tensors
    load, uploads = tensors.load, []

    def checked(step: Any, buffers: Any, input_ids: Any, counts: Any) -> Any:
        found = load(step, buffers, input_ids, counts)
        uploads.append(step.upload_table)
        for field in dataclasses.fields(buffers):
            if field.name != "changed":
                assert torch.equal(getattr(found, field.name), getattr(buffers, field.name)), field.name
                assert getattr(found, field.name) is not getattr(buffers, field.name)
        return found

    tensors.load = checked  # type: ignore[method-assign]
    llm.generate(PROMPTS, PARAMS)
    assert sum(uploads) < len(uploads) / 2


def test_a_steady_decode_makes_no_new_metadata() -> None:
    """The model reads the same memory in every step: the batch's two sets in turn, and one set of inputs."""
    llm = make_llm(64)
    seen = []
    forward = llm.runner.model.forward

    def watched(input_ids: torch.Tensor, positions: torch.Tensor, cache: Any, metadata: Any) -> torch.Tensor:
        if metadata.max_query_len == 1 and len(input_ids) == 3:
            tensors = (input_ids, positions, metadata.slot_mapping, metadata.block_tables, metadata.seq_lens)
            seen.append(tuple(tensor.data_ptr() for tensor in tensors))
        return forward(input_ids, positions, cache, metadata)

    llm.runner.model.forward = watched  # type: ignore[method-assign]
    llm.generate(PROMPTS[:3], SamplingParams(max_tokens=12, ignore_eos=True))
    assert len(seen) >= 8
    assert len(set(seen)) == 2
    assert seen[0] == seen[2] == seen[4]
    assert {pointers[:2] for pointers in seen} == {seen[0][:2]}


def test_positions_of_mixed_rows() -> None:
    llm = make_llm(64)
    tensors, batch, manager = llm.engine._tensors, llm.engine._batch, llm.block_manager
    for number, length in enumerate((5, 2, 7)):
        manager.create_sequence(number)
        manager.append_tokens(number, length)
        manager.commit(number, length)
        batch.add(number)
    counts = np.array([1, 4, 0])
    step = batch.step(counts)
    tensors.load(step, batch.buffers[step.buffer_set], np.arange(5), counts)
    assert tensors.positions[:5].tolist() == [5, 2, 3, 4, 5]
    assert tensors.input_ids[:5].tolist() == [0, 1, 2, 3, 4]


class Recorder:
    """Stands for CUDA graphs: what it was given first is run again, into the same result, whatever comes later."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.recorded += 1
        result = compute().clone()

        def replay() -> torch.Tensor:
            self.replayed += 1
            return result.copy_(compute())

        return replay


def test_recorded_steps_give_the_same(expected: list[Any]) -> None:
    """Nothing of a later step is seen but what lies in the static tensors."""
    llm = make_llm()
    llm.runner.decode_sizes = decode_sizes(5)
    llm.runner.capture = recorder = Recorder()
    llm.engine._tensors = tensors = StepTensors(llm.engine._batch.buffers[0], torch.device("cpu"), copied=True)
    assert [output.outputs for output in llm.generate(PROMPTS, PARAMS)] == expected
    assert set(tensors.replays) <= {1, 2, 4, 5}
    assert recorder.recorded == len(tensors.replays) >= 2
    assert recorder.replayed > 3 * recorder.recorded
    assert [output.outputs for output in llm.generate(PROMPTS, PARAMS)] == expected
    assert recorder.recorded == len(tensors.replays)


@pytest.mark.parametrize("fixed_split", [0, 4])
@pytest.mark.parametrize("sizes", [(), (2, 5)])
def test_a_split_plan_is_made_once_a_step_for_all_layers(
    expected: list[Any], monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], fixed_split: int
) -> None:
    """Each decode makes one plan and one workspace, and every layer gets those two; prefills make none."""
    llm = make_llm()
    llm.runner.plans_splits, llm.runner.fixed_split, llm.runner.decode_sizes = True, fixed_split, sizes
    made, seen = [], []
    make_split_plan, paged_attention, forward = ops.make_split_plan, ops.paged_attention, llm.runner.model.forward

    def watched_make(seq_lens: torch.Tensor, **options: Any) -> torch.Tensor:
        made.append(make_split_plan(seq_lens, **options))
        return made[-1]

    def watched_attention(*inputs: Any, **options: Any) -> torch.Tensor:
        seen.append((options["split_plan"], options["workspace"]))
        return paged_attention(*inputs, **options)

    def watched_forward(input_ids: torch.Tensor, positions: torch.Tensor, cache: Any, metadata: Any) -> torch.Tensor:
        made_before, seen_before = len(made) - (metadata.max_query_len == 1), len(seen)
        hidden = forward(input_ids, positions, cache, metadata)
        if metadata.max_query_len == 1 and metadata.split_plan is not None:
            layers = seen[seen_before:]
            assert len(layers) == llm.model_config.num_hidden_layers
            assert len(made) == made_before + 1
            assert all(plan is made[-1] and room is metadata.workspace for plan, room in layers)
            assert (metadata.workspace == 0).all()
        else:
            assert metadata.split_plan is metadata.workspace is None
        return hidden

    monkeypatch.setattr(ops, "make_split_plan", watched_make)
    monkeypatch.setattr(ops, "paged_attention", watched_attention)
    monkeypatch.setattr(llm.runner.model, "forward", watched_forward)
    assert [output.outputs for output in llm.generate(PROMPTS, PARAMS)] == expected
    assert len(made) > 20
    assert len(seen) >= len(made) * llm.model_config.num_hidden_layers


def test_a_replayed_step_makes_its_plan_anew(expected: list[Any]) -> None:
    """The plan is part of what is recorded, so a replay cuts by the lengths of its own step."""
    llm = make_llm()
    llm.runner.plans_splits, llm.runner.decode_sizes, llm.runner.capture = True, decode_sizes(5), Recorder()
    llm.engine._tensors = StepTensors(llm.engine._batch.buffers[0], torch.device("cpu"), copied=True)
    assert [output.outputs for output in llm.generate(PROMPTS, PARAMS)] == expected


@pytest.mark.parametrize("most", range(1, 70))
def test_sizes_pad_little(most: int) -> None:
    sizes = decode_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(1, most + 1):
        padded = next(size for size in sizes if size >= rows)
        assert padded < rows + 8
        assert padded < 2 * rows or padded == 1


def test_steps_are_recorded_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_capture(EngineConfig())
    monkeypatch.setattr(build, "native_status", lambda: SimpleNamespace(cuda_kernels=True))
    assert not can_capture(EngineConfig())
    assert can_capture(EngineConfig(device="cuda:1"))
    assert not can_capture(EngineConfig(device="cuda", enforce_eager=True))
    assert not can_capture(EngineConfig(device="cuda", attention_backend="flashinfer"))
    monkeypatch.setattr(build, "native_status", lambda: SimpleNamespace(cuda_kernels=False))
    assert not can_capture(EngineConfig(device="cuda"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_graphs_give_what_eager_steps_give() -> None:
    eager, captured = (
        LLM(device="cuda", dtype="float32", num_blocks=64, block_size=16, enforce_eager=enforce_eager)
        for enforce_eager in (True, False)
    )
    wanted = [output.outputs[0].token_ids for output in eager.generate(PROMPTS, PARAMS)]
    assert [output.outputs[0].token_ids for output in captured.generate(PROMPTS, PARAMS)] == wanted
