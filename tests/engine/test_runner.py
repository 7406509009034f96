"""A step's tensors: read in place or copied to a device, padded or not, the model gets the same."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from kvpager import LLM, SamplingParams
from kvpager.runner import StepTensors

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
