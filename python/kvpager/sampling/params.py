"""`SamplingParams`: how the tokens of one request are chosen.

Names and meanings are vLLM's; only the default of `temperature` differs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvpager.errors import ArgumentError
from kvpager.kinds import MAX_SEED, is_list, is_real, is_whole

_WHOLE = ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")
_REAL = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one request.

    Scores change in this order: allowed tokens, bias, penalties, temperature; then the filters, each over what the one
    before left: `min_p`, `top_k`, `top_p`. Tokens whose scores equal the last one kept are kept too.

    Attributes:
        n: completions of the prompt.
        max_tokens: most tokens to generate.
        min_tokens: tokens before which no stop token is drawn and no stop string ends.
        temperature: 0 takes the likeliest token every time (the default: results can be compared and repeated);
            above 0 draws from softmax(logits / temperature).
        top_k: draw from the k likeliest; 0 or −1: all.
        top_p: draw from the fewest likeliest that hold this share of the probability; 1: all.
        min_p: draw from those at least this share as likely as the likeliest; 0: all.
        repetition_penalty: scores of tokens seen in prompt or output are divided by it where above 0, multiplied
            below; 1: none (arXiv:1909.05858).
        presence_penalty: subtracted once from the score of each token that was generated.
        frequency_penalty: subtracted for each time that it was.
        logit_bias: token id → what is added to its score, −100 … 100.
        allowed_token_ids: the only tokens that may come; None: all.
        seed: of the draws, 0 … 2⁶⁴ − 1; None: made from the engine's seed and the request's number.
        stop: texts that end the request; not part of its text. None: none.
        include_stop_str_in_output: make the stop string, or the text of the stop token, part of it.
        stop_token_ids: tokens that end the request, beside the model's own. None: none.
        ignore_eos: generate on past the model's end-of-text tokens.
        logprobs: log-probabilities to give for this many likeliest tokens and the one chosen; None: no one's.
            They are the model's own: before penalties, temperature and filters.
        prompt_logprobs: the same for the tokens of the prompt.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        ArgumentError: a value out of range.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._check_kinds()
        self._make_plain()
        for name, least in (("n", 1), ("max_tokens", 1), ("min_tokens", 0), ("top_k", -1)):
            if getattr(self, name) < least:
                raise ArgumentError(name, f"at least {least}", getattr(self, name))
        if self.min_tokens > self.max_tokens:
            raise ArgumentError("min_tokens", f"at most `max_tokens` {self.max_tokens}", self.min_tokens)
        self._check_numbers()
        self._check_tokens()
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ArgumentError(name, "None or at least 0", value)
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ArgumentError("seed", "0 … 2^64 - 1", self.seed)
        if not all(isinstance(text, str) and text for text in self.stop_texts) or self.stop == "":
            raise ArgumentError("stop", "texts of at least one character", list(self.stop_texts))

    def _check_kinds(self) -> None:
        """Each value is of the kind of its default; what a list holds is looked at where its range is."""
        for name in _WHOLE:
            wanted = "None or a whole number" if name in ("seed", "logprobs", "prompt_logprobs") else "a whole number"
            self._check_kind(name, wanted, is_whole)
        for name in _REAL:
            self._check_kind(name, "a number", is_real)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            self._check_kind(name, "True or False", lambda value: isinstance(value, bool))
        if not isinstance(self.stop, str):
            self._check_kind("stop", "None, a text or a list of texts", is_list)
        self._check_kind("stop_token_ids", "None or a list of token ids", is_list)
        self._check_kind("allowed_token_ids", "None or a list of token ids", is_list)
        self._check_kind("logit_bias", "None or a mapping", lambda value: isinstance(value, Mapping))

    def _make_plain(self) -> None:
        """Turn numpy's numbers into Python's, which no sum makes too big."""
        for name in _WHOLE:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, int(getattr(self, name)))
        for name in _REAL:
            try:
                object.__setattr__(self, name, float(getattr(self, name)))
            except OverflowError:
                raise ArgumentError(name, "a number that a float can hold", "a larger one") from None

    def _check_kind(self, name: str, wanted: str, fits: Callable[[object], bool]) -> None:
        value = getattr(self, name)
        if not fits(value) and not (value is None and wanted.startswith("None")):
            raise ArgumentError(name, wanted, repr(value))

    def _check_numbers(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ArgumentError("temperature", "a finite number of at least 0", self.temperature)
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise ArgumentError("repetition_penalty", "a finite number above 0", self.repetition_penalty)
        ranges = (("top_p", 0, 1), ("min_p", 0, 1), ("presence_penalty", -2, 2), ("frequency_penalty", -2, 2))
        for name, least, most in ranges:
            if not least <= getattr(self, name) <= most:
                raise ArgumentError(name, f"{least} … {most}", getattr(self, name))

    def _check_tokens(self) -> None:
        bias = dict(self.logit_bias or {})
        for token, value in bias.items():
            if not is_real(value) or not -100 <= value <= 100:
                raise ArgumentError("logit_bias", "-100 … 100 for each token", f"{value} for token {token}")
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            raise ArgumentError("allowed_token_ids", "None or at least one token", "none")
        for name, tokens in (
            ("logit_bias", bias),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids or ()),
        ):
            if bad := [token for token in tokens if not is_whole(token) or token < 0]:
                raise ArgumentError(name, "token ids of at least 0", bad[0])

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuses token ids that the model does not have.

        Raises:
            ArgumentError: an id of at least `vocab_size`.
        """
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise ArgumentError(name, f"token ids in 0 … {vocab_size - 1}", token)

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0.0

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """`stop` as texts, however it was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def has_penalties(self) -> bool:
        """Whether what was seen changes a score."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
