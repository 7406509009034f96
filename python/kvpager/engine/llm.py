"""`LLM`: a model by name, and texts for prompts. What runs it is the `Engine` below.

One call at a time drives the engine: `generate` and `chat` to the end, `stream` as its iterator is taken from. Whatever
ends a call - its last token, an exception, a closed iterator, Ctrl-C - ends its requests and gives their blocks back.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from kvpager.config import EngineConfig, EngineSettings
from kvpager.engine.build import make_runner, make_tokenizer
from kvpager.engine.engine import Engine
from kvpager.engine.outputs import RequestOutput, RunStats, StreamEvent
from kvpager.engine.progress import track
from kvpager.engine.requests import Prompt, Request
from kvpager.engine.stats import EngineStats
from kvpager.engine.trace import StepTrace
from kvpager.errors import ArgumentError, ConfigError, StateError, UnknownSequenceError
from kvpager.loader import open_model
from kvpager.manager import SequenceState
from kvpager.sampling import SamplingParams
from kvpager.tokenizer import Message


class LLM:
    """A model with its paged cache.

    Args:
        model: a Hugging Face folder, a GGUF file or a hub name; None: the small one that comes with kvpager.
        config: the settings; None: the defaults of `EngineConfig`.
        trace: a file that gets a JSON line for every step: what it did and why; see `kvpager.engine.trace`.
        overrides: settings by name that differ from `config`, as in ``LLM(kv_cache_dtype="int8", num_blocks=512)``; see
            `EngineConfig` and `CacheConfig`.

    Raises:
        ConfigError: the folder, its model or the settings can't be used, or there is no such setting.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        trace: str | Path | None = None,
        **overrides: Unpack[EngineSettings],
    ) -> None:
        self.config = (config or EngineConfig()).override(**overrides)
        files = open_model(model)
        self.folder, self.model_config = files.path, files.config
        self.tokenizer = make_tokenizer(files)
        self.runner = make_runner(files, self.config)
        self.block_manager = self.runner.block_manager
        self.trace = None if trace is None else StepTrace(trace)
        self.engine = Engine(self.runner, self.model_config, self.config, self.tokenizer, trace=self.trace)
        self.engine.on_computed = self._note_peak
        self.last_run = RunStats()
        self._is_running = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        show_progress: bool = False,
    ) -> list[RequestOutput]:
        """Completes prompts, all together as far as the pool allows.

        Args:
            prompts: a text, a list of token ids, ``{"prompt_token_ids": ids}``, or a list of those.
            sampling_params: for all prompts, or one for each.
            max_tokens, temperature: shortcuts for `SamplingParams` with these values; not together with
                `sampling_params`.
            show_progress: show a bar on stderr: requests done, tokens per second.

        Returns:
            One output for each prompt, in their order.

        Raises:
            ArgumentError: a prompt that is empty or holds a token the model does not know, or bad parameters.
            SequenceTooLongError: prompt and new tokens can never fit the model's positions or the pool.
            StateError: a stream of this engine is still open, or nobody can run as blocks are held from outside.
        """
        requests = self.engine.factory.make(prompts, sampling_params, max_tokens, temperature)
        for _ in track(self._run(requests), len(requests)) if show_progress else self._run(requests):
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

        A step's events come one after the other; the next step runs when the last of them was taken. Closing the
        iterator ends all its requests; `abort` ends one.
        """
        return self._run(self.engine.factory.make(prompts, sampling_params, max_tokens, temperature))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        show_progress: bool = False,
        **variables: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several, in the model's chat template.

        Args:
            messages: ``{"role": …, "content": …}`` each, oldest first; or a list of such conversations.
            sampling_params, max_tokens, temperature, show_progress: as in `generate`.
            variables: more variables of the template, e.g. ``enable_thinking`` of Qwen3's.

        Raises:
            ConfigError: the model has no tokenizer or no chat template.
            ArgumentError: the template refuses these messages.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            raise ArgumentError("messages", "a list of messages, or of such lists", type(messages).__name__)
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts: list[Prompt] = [self.encode_chat(each, **variables) for each in conversations]
        return self.generate(
            prompts, sampling_params, max_tokens=max_tokens, temperature=temperature, show_progress=show_progress
        )

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

    def abort(self, request_id: str) -> None:
        """Ends a request of an open stream; its last event comes with the next step. Unknown names are ignored."""
        self.engine.abort(request_id)

    def stats(self) -> EngineStats:
        """The engine at this moment, in blocks and in tokens; see `EngineStats`."""
        return self.engine.stats()

    def sequence_state(self, request_id: str, completion: int = 0) -> SequenceState:
        """Length and block table of a running request, for people to look at.

        Raises:
            UnknownSequenceError: it waits still, or has given its blocks back.
        """
        request = self.engine.request(request_id)
        sequence_id = -1 if request is None else request.completions[completion].sequence.sequence_id
        if sequence_id not in self.block_manager.sequences:
            raise UnknownSequenceError(sequence_id)
        return self.block_manager.sequences[sequence_id]

    def _run(self, requests: list[Request]) -> Iterator[StreamEvent]:
        if self._is_running:
            raise StateError("a stream of this engine is still open; exhaust or close it first")
        self._is_running = True
        self.last_run = RunStats()
        try:
            for request in requests:
                self.engine.enqueue(request)
            while self.engine.has_unfinished_requests():
                yield from self._step()
        finally:
            self._is_running = False
            for request in requests:
                self.engine.abort(request.request_id)
            self.engine.drop_events()

    def _step(self) -> list[StreamEvent]:
        """One step of the engine, and what it adds to the figures of the run."""
        counts, run = self.engine.scheduler.counts, self.last_run
        num_prefill, num_decode, num_steps = counts.num_prefill_tokens, counts.num_decode_tokens, counts.num_steps
        started = time.perf_counter()
        events = self.engine.step()
        seconds = time.perf_counter() - started
        if counts.num_steps == num_steps:
            return events
        run.num_new_tokens += sum(event.token_id >= 0 for event in events)
        run.num_prompt_tokens += counts.num_prefill_tokens - num_prefill
        if counts.num_prefill_tokens > num_prefill:
            run.num_prefill_steps += 1
            run.prefill_seconds += seconds
        else:
            run.num_decode_steps += 1
            run.num_decoded_tokens += counts.num_decode_tokens - num_decode
            run.decode_seconds += seconds
        return events

    def _note_peak(self) -> None:
        """Keeps the most blocks that were live, and what of them was empty then."""
        run, live = self.last_run, self.block_manager.stats.live
        if live >= run.peak_blocks:
            run.peak_blocks = live
            run.peak_fragmentation_tokens = self.block_manager.internal_fragmentation_tokens()
