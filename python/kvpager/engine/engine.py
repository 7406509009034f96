"""`Engine`: requests in, one step after the other, events out.

A step is: the scheduler says who computes what and takes the slots; the runner computes it; what is written is
committed; the sampler chooses; the tokens go to their requests, and who ends gives its blocks back. The host's part of
a steady decode is independent of how it is spread over requests but for a few operations per new token.

What fails for one request (admitting it, its row of the sampler, scores that leave it no token, its text) ends that
request alone, with "error" and the error's text; the others don't notice. If what all share fails (the model's forward,
the batch's slots, the draw for all rows), the error comes out of `step`, and everyone who ran waits again, with all
tokens that were given out: calling `step` again begins anew. A trace that can't be written ends itself and costs no
token. Whatever ends a request - its last token, a stop, an error, `abort` - gives its blocks back in that moment.

Longer than 300 lines, because the order of a step and the end of each part that fails are one story.
"""

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kvpager.config import EngineConfig, ModelConfig
from kvpager.engine.outputs import RequestOutput, StreamEvent
from kvpager.engine.requests import Completion, Prompt, Request, RequestFactory
from kvpager.engine.rows import SamplerRows, keep_prompt_logprobs
from kvpager.engine.stats import EngineStats, take_stats
from kvpager.engine.trace import StepTrace
from kvpager.errors import ArgumentError
from kvpager.kinds import is_text
from kvpager.manager import DecodeBatch
from kvpager.runner import ModelRunner, StepTensors
from kvpager.sampling import PositionLogprobs, SampledTokens, Sampler, SamplingParams
from kvpager.scheduler import SampleRows, ScheduledStep, Scheduler, Sequence
from kvpager.tokenizer import Tokenizer


class Engine:
    """Continuous batching over one model and its cache.

    Args:
        runner: model, cache and block manager; nobody else may use that manager's batch.
        model_config: of the model.
        config: how it is run.
        tokenizer: None: prompts come as token ids, and completions have no text.
        no_text_because: what is said to a request that needs text where there is no tokenizer.
        trace: gets a record of every step.
        clock: seconds; only differences matter.

    Attributes:
        factory: makes requests of prompts, for `enqueue`; what can't be used is refused there.
        on_computed: called in every step when its keys and values are written and nobody has ended yet.

    Raises:
        ConfigError: the settings can't work together.
    """

    def __init__(
        self,
        runner: ModelRunner,
        model_config: ModelConfig,
        config: EngineConfig,
        tokenizer: Tokenizer | None = None,
        *,
        no_text_because: str = "the model has no tokenizer",
        trace: StepTrace | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.runner = runner
        self.block_manager = manager = runner.block_manager
        self.sampler = Sampler(model_config.vocab_size, config.max_num_seqs)
        self._batch: DecodeBatch[Tensor] = DecodeBatch[Tensor].with_capacity(
            manager,
            config.max_num_seqs,
            min(manager.num_blocks, -(-config.longest_sequence(model_config) // manager.block_size)),
            max_tokens=config.step_tokens,
            pin_memory=runner.device.type == "cuda",
        )
        self._tensors = StepTensors(self._batch.buffers[0], runner.device)
        self._rows = SamplerRows(self.sampler, manager)
        watermark = config.watermark_blocks
        self.scheduler = Scheduler(
            manager,
            self._batch,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.step_tokens,
            watermark_blocks=manager.num_blocks // 100 if watermark is None else watermark,
            followers=[self._rows],
        )
        self.factory = RequestFactory(model_config, config, self.scheduler.check_fits, tokenizer, no_text_because)
        self._requests: dict[str, Request] = {}
        self._events: list[StreamEvent] = []  # of requests that ended between steps
        self._trace = trace
        self._clock = clock
        self.on_computed: Callable[[], None] | None = None
        self._num_generated = 0
        self._num_finished = 0

    # Requests ---------------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> str:
        """Queues a request.

        Args:
            prompt: a text, token ids, or ``{"prompt_token_ids": ids}``.
            sampling_params: how its tokens are chosen; None: the defaults.
            request_id: its name while it is here; None: a number.
            priority: a whole number; lower ones go first.
            cache_salt: only requests with the same salt find what this one computes.

        Returns:
            Its name.

        Raises:
            ArgumentError: a bad prompt, bad parameters, another argument of a wrong kind, or a name that is taken.
            SequenceTooLongError: it can never fit the model's positions or the pool.
        """
        if request_id is not None and not is_text(request_id):
            raise ArgumentError("request_id", "None or a text without lone surrogates", repr(request_id))
        if request_id is not None and request_id in self._requests:
            raise ArgumentError("request_id", "a name that no unfinished request has", request_id)
        listed: list[Prompt] = [prompt]
        (request,) = self.factory.make(
            listed, sampling_params or SamplingParams(), priority=priority, cache_salt=cache_salt
        )
        if request_id is not None:
            request.request_id = request_id
        self.enqueue(request)
        return request.request_id

    def enqueue(self, request: Request) -> None:
        """Queues a request that `factory` made."""
        while request.request_id in self._requests:  # somebody took the number as a name
            request.request_id = f"{request.request_id}+"
        self.scheduler.add(request.completions[0].sequence)
        request.arrival_seconds = self._clock()
        self._requests[request.request_id] = request
        for completion in request.completions:
            self._rows.completions[completion.sequence.sequence_id] = request, completion

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request wherever it is; its last events come with the next step. What it got so far, or None.

        A name that is unknown, or whose request has ended, is no error: it may have ended this moment.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        unfinished = [each for each in request.completions if each.sequence.finish_reason is None]
        for completion in unfinished:
            self.scheduler.finish(completion.sequence, "abort")
        for completion in unfinished:
            self._events.append(self._event(request, completion, -1, completion.text.finish()))
        return self._events[-1].output

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return self.scheduler.has_unfinished or bool(self._events)

    def drop_events(self) -> None:
        """Forgets the events of requests that ended between steps: nobody is there to hear them."""
        self._events = []

    def request(self, request_id: str) -> Request | None:
        """An unfinished request, for people to look at."""
        return self._requests.get(request_id)

    # A step -----------------------------------------------------------------------------------------------------------

    def step(self) -> list[StreamEvent]:
        """Runs one step; an event for each new token and each end.

        Raises:
            StateError: nobody can run, as blocks are held outside of the engine.
            Exception: what failed. Everyone who ran waits again.
        """
        events, self._events = self._events, []
        started = self._clock()
        try:
            step = self.scheduler.schedule()
            events += self._failed_events()
            if step is None:
                return events
            hidden = self.runner.run(
                self._tensors,
                step.batch_step,
                step.buffers,
                step.input_ids,
                step.counts,
                max_query_len=step.max_query_len,
                max_seq_len=step.max_seq_len,
            )
            keep_prompt_logprobs(step, hidden, self.scheduler, self.runner, self._rows.completions)
            if self._trace is not None:
                self._trace.note_step(step, self.scheduler, self._name)
            due = self.scheduler.commit(step)
            if self.on_computed is not None:
                self.on_computed()
            events += self._failed_events()
            sampled = self._sample(due, hidden)
        except BaseException:
            self._events = events + self._failed_events() + self._events
            self.scheduler.restart_all()
            raise
        events += self._take(due, sampled, step)
        if self._trace is not None:
            self._trace.write(self._clock() - started, self.stats())
        return events

    @torch.inference_mode()  # the sampler changes scores in place
    def _sample(self, due: SampleRows, hidden: Tensor) -> SampledTokens | None:
        if due.rows is not None and len(due.rows) == 0:
            return None
        sampled = self.sampler.sample(self.runner.logits(hidden, due.token_index), due.rows)
        self.sampler.accept(range(self.sampler.num_rows) if due.rows is None else due.rows, sampled.token_ids)
        return sampled

    def _take(self, due: SampleRows, sampled: SampledTokens | None, step: ScheduledStep) -> list[StreamEvent]:
        """Hands the tokens to their requests."""
        now = self._clock()
        for sequence in step.admitted:
            request, _ = self._rows.completions[sequence.sequence_id]
            if request.scheduled_seconds is None:
                request.scheduled_seconds = now
        if sampled is None:
            return []
        sequences, _ = self.scheduler.take(due, sampled.token_ids, sampled.is_ok)
        self._num_generated += int(sampled.is_ok.sum())
        return [
            self._token_event(sequence, token, place, sampled, now)
            for place, (sequence, token) in enumerate(zip(sequences, sampled.token_ids.tolist(), strict=True))
        ]

    def _token_event(
        self, sequence: Sequence, token_id: int, place: int, sampled: SampledTokens, now: float
    ) -> StreamEvent:
        request, completion = self._rows.completions[sequence.sequence_id]
        if sequence.finish_reason == "error":
            sequence.error = "the scores of its next token are not numbers, or leave no token to choose"
            return self._event(request, completion, token_id, completion.text.finish())
        request.last_token_seconds = now
        if request.first_token_seconds is None:
            request.first_token_seconds = now
        try:
            piece = self._piece(request, completion, token_id, sampled.logprobs.get(place))
        except Exception as error:  # the tokenizer's; what is wrong with one text stops no other
            self._end(sequence, "error")
            sequence.error = str(error) or type(error).__name__
            logging.getLogger("kvpager").error("request %s ends: %s", request.request_id, error, exc_info=error)
            piece = ""
        return self._event(request, completion, token_id, piece)

    def _piece(self, request: Request, completion: Completion, token_id: int, logprobs: PositionLogprobs | None) -> str:
        """The text that a token lets out. Ends its sequence where a stop string is found."""
        sequence, piece = completion.sequence, ""
        if sequence.stop_token_id is None or request.params.include_stop_str_in_output:
            piece = completion.text.push(token_id)
        if logprobs is not None:
            completion.logprobs.append(request.with_texts(logprobs))
        if completion.text.stop_reason is not None:
            completion.stop_text = completion.text.stop_reason
            self._end(sequence, "stop")
        return piece if sequence.finish_reason is None else piece + completion.text.finish()

    def _end(self, sequence: Sequence, reason: str) -> None:
        """End a sequence by its text, even one that its last token ended in the same moment."""
        self.scheduler.finish(sequence, reason)
        sequence.finish_reason = reason

    def _failed_events(self) -> list[StreamEvent]:
        """Events of those that the scheduler could not admit or fork."""
        failed = [self._rows.completions[each.sequence_id] for each in self.scheduler.take_failed()]
        return [self._event(request, completion, -1, completion.text.finish()) for request, completion in failed]

    def _event(self, request: Request, completion: Completion, token_id: int, piece: str) -> StreamEvent:
        completion.pieces.append(piece)
        reason = completion.sequence.finish_reason
        if reason is None:
            return StreamEvent(request.request_id, request.index, token_id, piece, completion=completion.index)
        output = None
        del self._rows.completions[completion.sequence.sequence_id]
        request.num_ended += 1
        if request.num_ended == len(request.completions):
            request.end_seconds = self._clock()
            output = request.output()
            self._num_finished += 1
            del self._requests[request.request_id]
            if self._trace is not None:
                self._trace.note_end(output)
        return StreamEvent(
            request.request_id,
            request.index,
            token_id,
            piece,
            reason,
            output,
            completion.index,
            completion.state,
            completion.sequence.error,
        )

    # Looking ----------------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The engine at this moment. O(table entries)."""
        return take_stats(self.scheduler, self._num_generated, self._num_finished)

    def _name(self, sequence: Sequence) -> str:
        """How a sequence is called in the trace: its request, and its number where there are several."""
        request, completion = self._rows.completions[sequence.sequence_id]
        return request.request_id if len(request.completions) == 1 else f"{request.request_id}/{completion.index}"
