"""What an engine gives back: outputs, the events of a stream, the figures of a run."""

from dataclasses import dataclass

from kvpager.sampling import PositionLogprobs


@dataclass(frozen=True)
class CompletionOutput:
    """What was generated for a request.

    Attributes:
        index: number of the completion within its request.
        text: without special tokens.
        token_ids: as sampled, the end-of-text token and those of a stop string included.
        finish_reason: ``"stop"`` (a stop token or string), ``"length"`` (`max_tokens` reached), or ``"error"`` (the
            model's scores were not numbers, or left no token to choose).
        stop_reason: the stop string or token of the request that ended it; None for the model's own end-of-text.
        logprobs: of each token, where the request asked.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A request and its completions. ``prompt`` is None where the prompt came as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool


@dataclass(frozen=True)
class StreamEvent:
    """One new token of one request.

    Attributes:
        request_id: whose token it is.
        index: the prompt's place among those given.
        token_id: the token; −1 where the request ended with an error instead.
        text: what it adds to the text; empty while a character is short of bytes. All joined are the whole text.
        finish_reason: None until the request's last event.
        output: the whole request, with its last event.
    """

    request_id: str
    index: int
    token_id: int
    text: str
    finish_reason: str | None = None
    output: RequestOutput | None = None


@dataclass
class RunStats:
    """Figures of one run, kept up to date while it goes on.

    Attributes:
        num_prompt_tokens: prompt tokens computed.
        num_new_tokens: tokens generated, the first of each request (which the prefill gives) included.
        num_prefill_steps, num_decode_steps: steps of either kind.
        prefill_seconds, decode_seconds: wall clock in them, sampling included.
        num_decoded_tokens: tokens that came from decode steps.
        peak_blocks: most blocks that were live after a step.
        peak_fragmentation_tokens: token positions of those blocks that held nothing then.
    """

    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    num_prefill_steps: int = 0
    num_decode_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_decoded_tokens: int = 0
    peak_blocks: int = 0
    peak_fragmentation_tokens: int = 0
