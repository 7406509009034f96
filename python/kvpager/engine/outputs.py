"""What an engine gives back: outputs, the events of a stream, figures of a run."""

from dataclasses import dataclass

from kvpager.manager import SequenceState
from kvpager.sampling import PositionLogprobs


@dataclass(frozen=True)
class CompletionOutput:
    """What was generated for a request.

    Attributes:
        index: number of the completion within its request.
        text: without special tokens, and without the stop string or token that ended it, unless the request asks for
            them.
        token_ids: as sampled, the end-of-text token and those of a stop string included.
        finish_reason: ``"stop"`` (a stop token or string), ``"length"`` (`max_tokens` reached), ``"abort"``, or
            ``"error"`` (something of this completion could not be computed; `error` says what).
        stop_reason: the stop string or token of the request that ended it; None for the model's own end-of-text.
        logprobs: of each token, where the request asked.
        error: what went wrong, in words, where `finish_reason` is ``"error"``; the other completions are not touched.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None
    error: str | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Where a request's time went, in seconds; None for what did not come to be.

    Attributes:
        queue_seconds: from arrival to the first step it ran in.
        time_to_first_token_seconds: from arrival to the first token of any completion.
        time_per_output_token_seconds: mean over the tokens after the first, of all completions.
        e2e_seconds: from arrival to its end.
        num_preemptions: how often blocks of its completions were taken away.
    """

    queue_seconds: float | None
    time_to_first_token_seconds: float | None
    time_per_output_token_seconds: float | None
    e2e_seconds: float | None
    num_preemptions: int


@dataclass(frozen=True)
class RequestOutput:
    """A request and its completions.

    Attributes:
        request_id: its name.
        prompt: the text; None where the prompt came as token ids.
        prompt_token_ids: what was computed.
        outputs: n completions, by index.
        finished: whether all have ended.
        num_cached_tokens: prompt tokens that were found computed; None while it waits.
        prompt_logprobs: of each prompt token where the request asked; None for the first, which nothing predicts.
        metrics: where its time went.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    metrics: RequestMetrics | None = None


@dataclass(frozen=True)
class StreamEvent:
    """One new token of one completion, or its end.

    Attributes:
        request_id: whose token it is.
        index: the prompt's place among those given.
        token_id: the token; −1 where the completion ended without one: with an error, or aborted.
        text: what it adds to the text; empty while a character is short of bytes. All joined are the whole text.
        finish_reason: None until the completion's last event.
        output: the whole request, with its last event.
        completion: which of the request's n completions.
        sequence: with the completion's last event, its length and blocks as they were just before they were given back.
        error: what went wrong, where `finish_reason` is ``"error"``.
    """

    request_id: str
    index: int
    token_id: int
    text: str
    finish_reason: str | None = None
    output: RequestOutput | None = None
    completion: int = 0
    sequence: SequenceState | None = None
    error: str | None = None


@dataclass
class RunStats:
    """Figures of one run of `LLM`, kept up to date while it goes on. A step with a prefill chunk is a prefill step.

    Attributes:
        num_prompt_tokens: tokens computed in chunks; after a preemption again.
        num_new_tokens: tokens generated, the first of each request (which the prefill gives) included.
        num_prefill_steps, num_decode_steps: steps of either kind.
        prefill_seconds, decode_seconds: wall clock in them, sampling included.
        num_decoded_tokens: tokens that came from decode steps.
        peak_blocks: most blocks that were live in a step.
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
