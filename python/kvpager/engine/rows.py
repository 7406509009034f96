"""What of an engine goes by row: the sampler's rows, which are the batch's, and the scores of a step's prompts."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from kvpager.engine.requests import Completion, Request
from kvpager.manager import KVBlockManager
from kvpager.runner import ModelRunner
from kvpager.sampling import Sampler, position_logprobs
from kvpager.scheduler import ScheduledStep, Scheduler, Sequence


@dataclass
class SamplerRows:
    """Keeps the sampler's rows those of the batch, and each sequence's completion at hand, by sequence id."""

    sampler: Sampler
    block_manager: KVBlockManager
    completions: dict[int, tuple[Request, Completion]] = field(default_factory=dict)

    def add_row(self, sequence: Sequence) -> None:
        """See `RowFollower`."""
        request, completion = self.completions[sequence.sequence_id]
        self.sampler.add(
            request.params,
            completion.seed,
            request.prompt_token_ids,
            sequence.output_token_ids,
            tuple(sequence.stop_token_ids),
        )

    def remove_row(self, sequence: Sequence) -> None:
        """See `RowFollower`."""
        self.sampler.remove(sequence.row)
        self.completions[sequence.sequence_id][1].state = self.block_manager.sequences[sequence.sequence_id]


def keep_prompt_logprobs(
    step: ScheduledStep,
    hidden: Tensor,
    scheduler: Scheduler,
    runner: ModelRunner,
    completions: Mapping[int, tuple[Request, Completion]],
) -> None:
    """Log-probabilities of the prompt tokens whose predecessors this step computed, for requests that asked.

    Args:
        step: before it is committed.
        hidden: hidden [T, C] of its tokens.
        scheduler: that made it.
        runner: for the scores.
        completions: by sequence id.
    """
    if step.counts is None:
        return
    start = 0
    for sequence, num_tokens in zip(scheduler.running, step.counts.tolist(), strict=True):
        request, completion = completions[sequence.sequence_id]
        if request.prompt_logprobs is not None and completion.index == 0:
            first = scheduler.num_computed_tokens(sequence) - num_tokens
            stop = min(first + num_tokens, len(request.prompt_token_ids) - 1)
            if first < stop:
                scores = runner.logits(hidden[start : start + stop - first])
                tokens = request.prompt_token_ids[first + 1 : stop + 1]
                wanted = [request.params.prompt_logprobs or 0] * len(tokens)
                request.prompt_logprobs[first + 1 : stop + 1] = position_logprobs(scores, tokens, wanted)
        start += num_tokens
