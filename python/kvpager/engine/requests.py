"""Prompts and wishes become requests; everything that can be refused is refused here, before anything runs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvpager.config import EngineConfig, ModelConfig
from kvpager.engine.outputs import CompletionOutput, RequestOutput, StreamEvent
from kvpager.errors import ArgumentError, SequenceTooLongError
from kvpager.sampling import PositionLogprobs, SamplingParams, request_seed
from kvpager.tokenizer import OutputText, Tokenizer

# A prompt: text, token ids, or {"prompt_token_ids": ids}.
Prompt = str | Sequence[int] | Mapping[str, Sequence[int]]


@dataclass
class Request:
    """One prompt on its way through the engine.

    Attributes:
        index: the prompt's place among those given.
        sequence_id: its number since the engine was made; names its sequence in the block manager.
        prompt: the text, if it came as one.
        prompt_token_ids: P tokens.
        params: wishes.
        num_blocks: blocks it holds at worst: those of P + max_tokens - 1 tokens, as the last one takes no slot.
        seed: of its draws.
        stop_token_ids: tokens that end it.
        text: turns its tokens into text and looks for its stop strings.
        generated: tokens sampled so far.
        logprobs: log-probabilities of each of them, where it asked.
        pieces: text that each of them added.
        finish_reason: None while it runs.
        stop_reason: the stop string or token that ended it, if it was one of its own.
    """

    index: int
    sequence_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    num_blocks: int
    seed: int
    stop_token_ids: tuple[int, ...]
    text: OutputText
    generated: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def next_tokens(self) -> Sequence[int]:
        """What the next step computes: the prompt, then the token sampled last."""
        return self.generated[-1:] or self.prompt_token_ids

    def take(self, token: int, is_ok: bool, logprobs: PositionLogprobs | None) -> None:
        """Adds a sampled token and decides whether it is the last; without one, the request ends with an error."""
        if not is_ok:
            self.finish_reason = "error"
            self.pieces.append(self.text.finish())
            return
        self.generated.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        piece = self.text.push(token)
        can_stop = len(self.generated) >= self.params.min_tokens
        if self.text.stop_reason is not None:
            self.finish_reason, self.stop_reason = "stop", self.text.stop_reason
        elif token in self.stop_token_ids and can_stop:
            self.finish_reason = "stop"
            self.stop_reason = token if token in self.params.stop_token_ids else None
        elif len(self.generated) == self.params.max_tokens:
            self.finish_reason = "length"
        self.pieces.append(piece + (self.text.finish() if self.finish_reason else ""))

    def last_event(self) -> StreamEvent:
        """What a stream tells about the token taken last."""
        output = self.output() if self.finish_reason is not None else None
        token = -1 if self.finish_reason == "error" else self.generated[-1]
        return StreamEvent(str(self.sequence_id), self.index, token, self.pieces[-1], self.finish_reason, output)

    def output(self) -> RequestOutput:
        """The request as its caller sees it."""
        completion = CompletionOutput(
            index=0,
            text="".join(self.pieces),
            token_ids=tuple(self.generated),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=tuple(self.logprobs) if self.params.logprobs is not None else None,
        )
        finished = self.finish_reason is not None
        return RequestOutput(str(self.sequence_id), self.prompt, self.prompt_token_ids, (completion,), finished)


class RequestFactory:
    """Makes requests for one model and one pool, and numbers them. O(prompt tokens) each."""

    def __init__(
        self, model_config: ModelConfig, config: EngineConfig, num_blocks: int, tokenizer: Tokenizer | None
    ) -> None:
        self._model_config = model_config
        self._config = config
        self._num_blocks = num_blocks
        self._tokenizer = tokenizer
        self._num_requests = 0

    def make(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        max_tokens: int | None,
        temperature: float | None,
    ) -> list[Request]:
        """One request for each prompt, or an error and none; the arguments and errors are those of `LLM.generate`."""
        listed = _list_prompts(prompts)
        params = _list_params(sampling_params, len(listed), max_tokens, temperature)
        requests = [self._make_one(*numbered) for numbered in zip(range(len(listed)), listed, params, strict=True)]
        self._num_requests += len(requests)
        return requests

    def _make_one(self, index: int, prompt: Prompt, params: SamplingParams) -> Request:
        params.check_vocabulary(self._model_config.vocab_size)
        for name, supported in (("n", 1), ("prompt_logprobs", None)):
            if getattr(params, name) != supported:
                raise ArgumentError(name, f"{supported} (nothing else is computed yet)", getattr(params, name))
        token_ids = self._token_ids(index, prompt)
        number = self._num_requests + index
        return Request(
            index=index,
            sequence_id=number,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=token_ids,
            params=params,
            num_blocks=self._worst_case_blocks(index, len(token_ids), params.max_tokens),
            seed=request_seed(params, self._config.seed, number),
            stop_token_ids=self._stop_token_ids(params),
            text=self._output_text(params),
        )

    def _stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        own = () if params.ignore_eos else self._model_config.eos_token_ids
        return tuple(dict.fromkeys((*own, *params.stop_token_ids)))

    def _output_text(self, params: SamplingParams) -> OutputText:
        if self._tokenizer is None:
            if params.stop_texts:
                raise ArgumentError("stop", "no text, as the model has no tokenizer", list(params.stop_texts))
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
                raise ArgumentError("prompts", "token ids, as the model folder has no tokenizer.json", "a text")
            token_ids = self._tokenizer.encode(prompt)
        elif isinstance(prompt, Mapping):
            if set(prompt) != {"prompt_token_ids"}:
                raise ArgumentError("prompts", "`prompt_token_ids` as the only key", ", ".join(map(str, prompt)))
            token_ids = list(prompt["prompt_token_ids"])
        else:
            token_ids = list(prompt)
        if not token_ids:
            raise ArgumentError("prompts", "at least one token in each", f"none in prompt {index}")
        for token in token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self._model_config.vocab_size:
                wanted = f"token ids in 0 … {self._model_config.vocab_size - 1}"
                raise ArgumentError("prompts", wanted, f"{token} in prompt {index}")
        return tuple(token_ids)

    def _worst_case_blocks(self, index: int, num_prompt_tokens: int, max_tokens: int) -> int:
        total = num_prompt_tokens + max_tokens
        what = f"prompt {index} has {num_prompt_tokens} tokens and asks for {max_tokens} more"
        if total > self._model_config.max_position_embeddings:
            raise SequenceTooLongError(
                f"{what}: {total} positions, the model has {self._model_config.max_position_embeddings}"
            )
        num_blocks = -(-(total - 1) // self._config.block_size)  # the last token takes no slot
        if num_blocks > self._num_blocks:
            raise SequenceTooLongError(
                f"{what}: {num_blocks} blocks of {self._config.block_size}, the pool has {self._num_blocks}"
            )
        return num_blocks


def _list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]  # one prompt, as token ids
    return list(prompts)  # type: ignore[arg-type]


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
    if len(sampling_params) != num_prompts:
        raise ArgumentError("sampling_params", f"one, or one for each of {num_prompts} prompts", len(sampling_params))
    return list(sampling_params)
