"""Log-probabilities of chosen and likeliest tokens, of outputs and of prompts.

They are the model's own: a score less the log-sum-exp of its row, before sampling parameters change any score.
O(rows that ask · V).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvpager import ops


@dataclass(frozen=True)
class Logprob:
    """One token at one position.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 for the likeliest.
        decoded_token: its text, looked at alone, so U+FFFD for a part of a character; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


# Scores of a prompt are made so many bytes at a time, whatever its length; the scores of one position are the least.
PROMPT_LOGPROB_BYTES = 64 * 2**20
_BYTES_PER_SCORE = 16  # in the model's dtype, in float32, its logarithm, and what comparing and picking the best take

# Of one position: token id → its log-probability; the chosen token first, then the likeliest, best first.
PositionLogprobs = dict[int, Logprob]


def positions_per_piece(vocab_size: int) -> int:
    """Positions of a prompt whose scores `PROMPT_LOGPROB_BYTES` hold; at least 1."""
    return max(1, PROMPT_LOGPROB_BYTES // (_BYTES_PER_SCORE * vocab_size))


def prompt_logprob_bytes(vocab_size: int) -> int:
    """Bytes that log-probabilities of prompts take at most at once: those of a piece."""
    return positions_per_piece(vocab_size) * _BYTES_PER_SCORE * vocab_size


def with_texts(position: PositionLogprobs, text_of: Callable[[int], str]) -> PositionLogprobs:
    """The same log-probabilities, each with its token's text. O(tokens of the position)."""
    return {token: replace(each, decoded_token=text_of(token)) for token, each in position.items()}


def position_logprobs(scores: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[PositionLogprobs]:
    """Log-probabilities at every position.

    Args:
        scores: [P, V] float32 or float64: the model's scores from which each token was, or could have been, chosen.
            For a prompt those of position p belong to its token p + 1.
        token_ids: P tokens that stand there.
        counts: P numbers of likeliest tokens to give beside them; 0 gives the token alone.
    """
    if not token_ids:
        return []
    chosen = torch.tensor(token_ids, device=scores.device)
    lse, ranks = ops.rank_tokens(scores, chosen)
    own = scores.gather(1, chosen[:, None])[:, 0] - lse
    likeliest = scores.topk(min(max(counts), scores.shape[1]))
    logs = likeliest.values - lse[:, None]
    found: list[PositionLogprobs] = []
    rows = zip(token_ids, own.tolist(), ranks.tolist(), counts, strict=True)
    for (token, logprob, rank, count), values, tokens in zip(
        rows, logs.tolist(), likeliest.indices.tolist(), strict=True
    ):
        position = {token: Logprob(logprob, rank)}
        for place, (other, value) in enumerate(zip(tokens[:count], values[:count], strict=True), start=1):
            position.setdefault(other, Logprob(value, place))
        found.append(position)
    return found
