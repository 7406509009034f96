"""Prompts and sampling parameters become requests; everything that can be refused is refused here, before it runs.

Longer than 300 lines, because a request and the checks that it has passed are read together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from numbers import Integral

from kvpager import scheduler
from kvpager.config import EngineConfig, ModelConfig
from kvpager.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from kvpager.errors import ArgumentError, SequenceTooLongError
from kvpager.kinds import is_list, is_text, is_whole
from kvpager.manager import SequenceState
from kvpager.sampling import PositionLogprobs, SamplingParams, request_seed, with_texts
from kvpager.tokenizer import OutputText, Tokenizer

# A prompt: text, token ids, or {"prompt_token_ids": ids}.
Prompt = str | Sequence[int] | Mapping[str, Sequence[int]]


@dataclass(eq=False)
class Completion:
    """One of a request's n completions.

    Attributes:
        index: its number.
        sequence: its tokens, and where it stands with the scheduler.
        seed: of its draws.
        text: turns its tokens into text and looks for its stop strings.
        pieces: text that each token added.
        logprobs: of each token, where the request asked.
        stop_text: the stop string that ended it, if one did.
        state: its blocks as they were just before they were given back.
    """

    index: int
    sequence: scheduler.Sequence
    seed: int
    text: OutputText
    pieces: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    stop_text: str | None = None
    state: SequenceState | None = None


@dataclass(eq=False)
class Request:
    """One prompt on its way through the engine.

    Attributes:
        request_id: its name.
        index: the prompt's place among those given.
        prompt: the text, if it came as one.
        prompt_token_ids: P tokens.
        params: sampling parameters.
        completions: n of them; the first computes the prompt, the others begin as its forks.
        prompt_logprobs: by position, where it asked; filled as the prompt is computed.
        token_text: text of one token; None without a tokenizer.
        num_ended: completions whose last event is out.
        arrival_seconds, scheduled_seconds, first_token_seconds, last_token_seconds, end_seconds: on the engine's clock.
    """

    request_id: str
    index: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    completions: list[Completion]
    prompt_logprobs: list[PositionLogprobs | None] | None
    token_text: Callable[[int], str] | None = None
    num_ended: int = 0
    arrival_seconds: float = 0.0
    scheduled_seconds: float | None = None
    first_token_seconds: float | None = None
    last_token_seconds: float | None = None
    end_seconds: float | None = None

    @property
    def is_finished(self) -> bool:
        """Whether all completions have ended, and said so."""
        return self.num_ended == len(self.completions)

    def with_texts(self, position: PositionLogprobs) -> PositionLogprobs:
        """Log-probabilities with the texts of their tokens, where there is a tokenizer."""
        return position if self.token_text is None else with_texts(position, self.token_text)

    def output(self) -> RequestOutput:
        """The request as its caller sees it."""
        logprobs = self.prompt_logprobs
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            tuple(self._completion_output(each) for each in self.completions),
            self.is_finished,
            self.completions[0].sequence.num_cached_tokens,
            None if logprobs is None else tuple(logprobs),
            self._metrics(),
        )

    def _completion_output(self, completion: Completion) -> CompletionOutput:
        sequence = completion.sequence
        asked_for = sequence.stop_token_id if sequence.stop_token_id in (self.params.stop_token_ids or ()) else None
        return CompletionOutput(
            index=completion.index,
            text="".join(completion.pieces),
            token_ids=tuple(sequence.output_token_ids),
            finish_reason=sequence.finish_reason,
            stop_reason=completion.stop_text or asked_for,
            logprobs=tuple(completion.logprobs) if self.params.logprobs is not None else None,
            error=sequence.error,
        )

    def _metrics(self) -> RequestMetrics:
        def since_arrival(moment: float | None) -> float | None:
            return None if moment is None else moment - self.arrival_seconds

        later = sum(each.sequence.num_generated_tokens for each in self.completions) - len(self.completions)
        first, last = self.first_token_seconds, self.last_token_seconds
        mean = None
        if first is not None and last is not None and later > 0:
            mean = (last - first) * len(self.completions) / later  # they run side by side
        return RequestMetrics(
            queue_seconds=since_arrival(self.scheduled_seconds),
            time_to_first_token_seconds=since_arrival(first),
            time_per_output_token_seconds=mean,
            e2e_seconds=since_arrival(self.end_seconds),
            num_preemptions=sum(each.sequence.num_preemptions for each in self.completions),
        )


class RequestFactory:
    """Makes requests for one model and one pool, and numbers them. O(prompt tokens) each.

    Args:
        model_config: of the model.
        config: of the engine.
        num_blocks: N, of the pool.
        tokenizer: None: prompts come as token ids.
        no_text_because: what a refusal says where there is no tokenizer.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        config: EngineConfig,
        check_fits: Callable[[scheduler.Sequence], None],
        tokenizer: Tokenizer | None,
        no_text_because: str,
    ) -> None:
        self._model_config = model_config
        self._config = config
        self._check_fits = check_fits  # the scheduler's: whether the pool can ever hold a sequence
        self._tokenizer = tokenizer
        self._no_text_because = no_text_because
        self._num_requests = 0
        self._sequence_ids = count()

    def make(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[Request]:
        """One request for each prompt, or an error and none; the arguments and errors are those of `LLM.generate`."""
        if not is_whole(priority):
            raise ArgumentError("priority", "a whole number", repr(priority))
        if cache_salt is not None and not is_text(cache_salt):
            raise ArgumentError("cache_salt", "None or a text without lone surrogates", repr(cache_salt))
        listed = _list_prompts(prompts)
        params = _list_params(sampling_params, len(listed), max_tokens, temperature)
        requests = [
            self._make_one(index, prompt, each, priority, cache_salt)
            for index, (prompt, each) in enumerate(zip(listed, params, strict=True))
        ]
        self._num_requests += len(requests)
        return requests

    def _make_one(
        self, index: int, prompt: Prompt, params: SamplingParams, priority: int, cache_salt: str | None
    ) -> Request:
        params.check_vocabulary(self._model_config.vocab_size)
        if params.n > self._config.max_num_seqs:
            raise ArgumentError("n", f"at most `max_num_seqs` {self._config.max_num_seqs}", params.n)
        token_ids = self._token_ids(index, prompt)
        self._check_length(index, len(token_ids), params.max_tokens)
        number = self._num_requests + index
        finds_prefix = params.prompt_logprobs is None  # else every position has to be computed
        stops = self._stop_token_ids(params)
        completions = [
            Completion(
                index=n,
                sequence=scheduler.Sequence(
                    next(self._sequence_ids),
                    list(token_ids),
                    params.max_tokens,
                    stops,
                    int(priority),
                    cache_salt,
                    finds_prefix,
                ),
                seed=request_seed(params, self._config.seed, number, n),
                text=self._output_text(params),
            )
            for n in range(params.n)
        ]
        completions[0].sequence.adopt([each.sequence for each in completions[1:]])
        try:
            self._check_fits(completions[0].sequence)
        except SequenceTooLongError as error:
            raise SequenceTooLongError(f"prompt {index}: {error}") from None
        return Request(
            request_id=str(number),
            index=index,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            params=params,
            completions=completions,
            prompt_logprobs=None if params.prompt_logprobs is None else [None] * len(token_ids),
            token_text=None if self._tokenizer is None else self._tokenizer.token_text,
        )

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        own = () if params.ignore_eos else self._model_config.eos_token_ids
        known = [token for token in own if token < self._model_config.vocab_size]  # a foreign file may name others
        return frozenset((*known, *map(int, params.stop_token_ids or ())))

    def _output_text(self, params: SamplingParams) -> OutputText:
        if self._tokenizer is None:
            if params.stop_texts:
                raise ArgumentError("stop", f"no text, as {self._no_text_because}", list(params.stop_texts))
            return OutputText(lambda _token: b"")
        token_bytes = partial(self._tokenizer.token_bytes, skip_special_tokens=params.skip_special_tokens)
        return OutputText(
            token_bytes,
            params.stop_texts,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _token_ids(self, index: int, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ArgumentError("prompts", f"token ids, as {self._no_text_because}", "a text")
            if not is_text(prompt):
                raise ArgumentError("prompts", "text without lone surrogates", f"one in prompt {index}")
            token_ids = self._tokenizer.encode(prompt)
        elif isinstance(prompt, Mapping):
            if set(prompt) != {"prompt_token_ids"}:
                raise ArgumentError("prompts", "`prompt_token_ids` as the only key", ", ".join(map(str, prompt)))
            token_ids = _list_ids(index, prompt["prompt_token_ids"])
        else:
            token_ids = _list_ids(index, prompt)
        if not token_ids:
            raise ArgumentError("prompts", "at least one token in each", f"none in prompt {index}")
        for token in token_ids:
            if not is_whole(token) or not 0 <= token < self._model_config.vocab_size:
                wanted = f"token ids in 0 … {self._model_config.vocab_size - 1}"
                raise ArgumentError("prompts", wanted, f"{token!r} in prompt {index}")
        return tuple(map(int, token_ids))

    def _check_length(self, index: int, num_prompt_tokens: int, max_tokens: int) -> None:
        total = num_prompt_tokens + max_tokens
        counted = "1 token" if num_prompt_tokens == 1 else f"{num_prompt_tokens} tokens"
        what = f"prompt {index} has {counted} and asks for {max_tokens} more"
        limit = self._model_config.max_position_embeddings
        if total > limit:
            raise SequenceTooLongError(f"{what}: {total} positions, the model has {limit}")
        if self._config.max_model_len is not None and total > self._config.max_model_len:
            raise SequenceTooLongError(f"{what}: {total} positions, `max_model_len` is {self._config.max_model_len}")


def _list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not is_list(prompts):
        wanted = "a text, a list of token ids, {`prompt_token_ids`: ids}, or a list of those"
        raise ArgumentError("prompts", wanted, type(prompts).__name__)
    if prompts and isinstance(prompts[0], Integral):
        return [prompts]  # type: ignore[list-item]  # one prompt, as token ids
    return list(prompts)  # type: ignore[arg-type]


def _list_ids(index: int, token_ids: Sequence[int]) -> list[int]:
    if not is_list(token_ids):
        raise ArgumentError("prompts", "a text or a list of token ids", f"{type(token_ids).__name__} as prompt {index}")
    return list(token_ids)


def _list_params(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    num_prompts: int,
    max_tokens: int | None,
    temperature: float | None,
) -> list[SamplingParams]:
    shortcuts = {"max_tokens": max_tokens, "temperature": temperature}
    given = {name: value for name, value in shortcuts.items() if value is not None}
    if sampling_params is None:
        return [SamplingParams(**given)] * num_prompts  # type: ignore[arg-type]
    if given:
        raise ArgumentError(next(iter(given)), "None together with `sampling_params`", next(iter(given.values())))
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    listed = list(sampling_params) if isinstance(sampling_params, Sequence) else [sampling_params]
    for params in listed:
        if not isinstance(params, SamplingParams):
            raise ArgumentError("sampling_params", "`SamplingParams`, or a list of them", type(params).__name__)
    if len(listed) != num_prompts:
        raise ArgumentError("sampling_params", f"one, or one for each of {num_prompts} prompts", len(listed))
    return listed
