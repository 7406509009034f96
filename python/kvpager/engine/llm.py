"""`LLM`: requests in, tokens out.

Requests are admitted first come first served; those admitted together are prefilled together, then all that run are
decoded together. A request is admitted when the blocks it can come to need at worst are not promised to others, so a
running one never lacks a block; the others wait until some are given back.

Two counters are never mixed: *computed* tokens have their keys and values in the cache, *generated* ones were sampled.
After the prefill of P prompt tokens they are (P, 1): the sampled token's own keys and values are written by the next
step, which makes them (P + 1, 2). So the last token of a request never takes a slot.

Whatever ends a run - its last token, an exception, a closed generator, Ctrl-C - gives every sequence's blocks back.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvpager.block_manager import SequenceState
from kvpager.config import EngineConfig
from kvpager.engine.build import make_runner, make_tokenizer
from kvpager.engine.outputs import RequestOutput, RunStats, StreamEvent
from kvpager.engine.requests import Prompt, Request, RequestFactory
from kvpager.errors import ConfigError, StateError
from kvpager.loader import open_model
from kvpager.sampling import Sampler, SamplingParams
from kvpager.tokenizer import Message


class LLM:
    """A model with its paged cache.

    Args:
        model: a Hugging Face folder, a GGUF file or a hub name; None: the small one that comes with kvpager.
        device, dtype, block_size, num_blocks, kv_cache_memory_bytes, max_num_seqs, seed: see `EngineConfig`. With
            neither `num_blocks` nor a budget the pool takes 1 GiB, or less where `max_num_seqs` sequences of the
            model's full length need less.

    Raises:
        ConfigError: the folder, its model or the settings can't be used.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str = EngineConfig.device,
        dtype: str = EngineConfig.dtype,
        block_size: int = EngineConfig.block_size,
        num_blocks: int | None = None,
        kv_cache_memory_bytes: int | None = None,
        max_num_seqs: int = EngineConfig.max_num_seqs,
        seed: int = EngineConfig.seed,
    ) -> None:
        self.config = EngineConfig(device, dtype, block_size, num_blocks, kv_cache_memory_bytes, max_num_seqs, seed)
        files = open_model(model)
        self.folder, self.model_config = files.path, files.config
        self.tokenizer = make_tokenizer(files)
        self.runner = make_runner(files, self.config)
        self.block_manager = self.runner.block_manager
        self.stats = RunStats()
        self._requests = RequestFactory(self.model_config, self.config, self.block_manager.num_blocks, self.tokenizer)
        self._sampler = Sampler(self.model_config.vocab_size, max_num_seqs)
        self._rows: list[Request] = []  # of the sampler
        self._is_running = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts, all together as far as the pool allows.

        Args:
            prompts: a text, a list of token ids, ``{"prompt_token_ids": ids}``, or a list of those.
            sampling_params: for all prompts, or one for each.
            max_tokens, temperature: shortcuts for `SamplingParams` with these values; not together with
                `sampling_params`.

        Returns:
            One output for each prompt, in their order.

        Raises:
            ArgumentError: a prompt that is empty or holds a token the model does not know, or bad parameters.
            SequenceTooLongError: prompt and new tokens can never fit the model's positions or the pool.
            StateError: a stream of this engine is still open.
        """
        requests = self._requests.make(prompts, sampling_params, max_tokens, temperature)
        for _ in self._run(requests):
            pass
        return [request.output() for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> Iterator[StreamEvent]:
        """Like `generate`, but gives each token as it comes. The arguments are checked now, not at the first token.

        A request's blocks are given back after the last event of the step in which it finished was taken. Closing the
        iterator ends all its requests.
        """
        return self._run(self._requests.make(prompts, sampling_params, max_tokens, temperature))

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Token ids of a conversation in the model's chat template; see `Tokenizer.apply_chat_template`.

        Raises:
            ConfigError: the model has no tokenizer or no chat template.
            ArgumentError: the template refuses these messages.
        """
        if self.tokenizer is None:
            raise ConfigError(f"`{self.folder}` has no tokenizer.json")
        text = self.tokenizer.apply_chat_template(messages, **variables)
        return self.tokenizer.encode(text, add_special_tokens=False)

    def sequence_state(self, request_id: str) -> SequenceState:
        """Length and block table of a running request, for people to look at.

        Raises:
            UnknownSequenceError: the request waits still, or has given its blocks back.
        """
        return self.block_manager.sequences[int(request_id)]

    def _run(self, requests: list[Request]) -> Iterator[StreamEvent]:
        if self._is_running:
            raise StateError("a stream of this engine is still open; exhaust or close it first")
        self._is_running = True
        self.stats = RunStats()
        waiting, running = deque(requests), list[Request]()
        try:
            while waiting or running:
                admitted = self._admit(waiting, running)
                self._step(admitted or running, prefill=bool(admitted))
                for request in list(admitted or running):
                    yield request.last_event()
                for request in [request for request in running if request.finish_reason is not None]:
                    self.block_manager.release_sequence(request.sequence_id)
                    running.remove(request)
                    self._leave_sampler(request)
        finally:
            self._is_running = False
            for request in list(self._rows):
                self._leave_sampler(request)
            for request in requests:
                if request.sequence_id in self.block_manager.sequences:
                    self.block_manager.release_sequence(request.sequence_id)

    def _admit(self, waiting: deque[Request], running: list[Request]) -> list[Request]:
        """Moves requests from the head of the queue to those that run, as long as their worst case is covered."""
        promised = sum(request.num_blocks for request in running)
        admitted = []
        while waiting and len(running) < self.config.max_num_seqs:
            promised += waiting[0].num_blocks
            if promised > self.block_manager.num_blocks:
                break
            request = waiting.popleft()
            self.block_manager.create_sequence(request.sequence_id)
            self._sampler.add(
                request.params, request.seed, request.prompt_token_ids, stop_token_ids=request.stop_token_ids
            )
            self._rows.append(request)
            running.append(request)
            admitted.append(request)
        return admitted

    def _leave_sampler(self, request: Request) -> None:
        """Gives the request's row up; the last one takes its place, here as in the sampler."""
        row = self._rows.index(request)
        self._sampler.remove(row)
        last = self._rows.pop()
        if last is not request:
            self._rows[row] = last

    def _step(self, batch: Sequence[Request], *, prefill: bool) -> None:
        """One forward pass and one new token for every request of the batch."""
        started = time.perf_counter()
        next_tokens = [request.next_tokens for request in batch]
        logits = self.runner.step([request.sequence_id for request in batch], next_tokens)
        rows = [self._rows.index(request) for request in batch]
        sampled = self._sampler.sample(logits, rows)
        self._sampler.accept(rows, sampled.token_ids)
        for place, request in enumerate(batch):
            request.take(int(sampled.token_ids[place]), bool(sampled.is_ok[place]), sampled.logprobs.get(place))
        seconds = time.perf_counter() - started
        stats = self.stats
        stats.num_new_tokens += len(batch)
        if prefill:
            stats.num_prefill_steps += 1
            stats.num_prompt_tokens += sum(map(len, next_tokens))
            stats.prefill_seconds += seconds
        else:
            stats.num_decode_steps += 1
            stats.num_decoded_tokens += len(batch)
            stats.decode_seconds += seconds
        if (live := self.block_manager.stats.live) >= stats.peak_blocks:
            stats.peak_blocks = live
            stats.peak_fragmentation_tokens = self.block_manager.internal_fragmentation_tokens()
