"""Changes to the scores of single tokens: allowed tokens, bias, stop tokens that may not come yet, penalties.

A row with edits keeps the token ids concerned, so that a step touches these and no others: O(tokens concerned)
plus, where `allowed_token_ids` is given, one row of the vocabulary.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvpager.sampling.params import SamplingParams


class SeenTokens:
    """The distinct tokens of one request and how often each was generated. O(1) per token, amortised."""

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        self._ids = np.fromiter(dict.fromkeys(prompt_token_ids), dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float64)
        self._places = {int(token): place for place, token in enumerate(self._ids)}

    def add(self, token_id: int) -> None:
        """Counts a generated token."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):  # full
            room = np.zeros(max(16, len(self._ids)), dtype=np.int64)
            self._ids = np.concatenate((self._ids, room))
            self._counts = np.concatenate((self._counts, room.astype(np.float64)))
        self._ids[place] = token_id
        self._counts[place] += 1

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """[n] distinct tokens of prompt and output."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.float64]:
        """[n] times that each was generated; 0 for those of the prompt only."""
        return self._counts[: len(self._places)]


class RowEdits:
    """What one request changes in its row of scores."""

    def __init__(self, params: SamplingParams, stop_ids: Sequence[int], prompt_token_ids: Iterable[int]) -> None:
        self.params = params
        bias = params.logit_bias or {}
        self.bias_ids = np.array(list(bias), dtype=np.int64)
        self.bias = np.array(list(bias.values()), dtype=np.float64)
        self.stop_ids = np.array(stop_ids if params.min_tokens else (), dtype=np.int64)
        self.seen = SeenTokens(prompt_token_ids) if params.has_penalties else None
        allowed = params.allowed_token_ids
        self.allowed = None if allowed is None else torch.tensor(sorted(set(allowed)), dtype=torch.int64)

    @classmethod
    def of(cls, params: SamplingParams, stop_ids: Sequence[int], prompt_token_ids: Iterable[int]) -> "RowEdits | None":
        """The edits of a request; None if it has none."""
        some = params.has_penalties or params.logit_bias or params.min_tokens or params.allowed_token_ids is not None
        return cls(params, stop_ids, prompt_token_ids) if some else None


def apply_edits(scores: Tensor, edits: Sequence[tuple[int, RowEdits, int]]) -> None:
    """Changes scores [R, V] in place.

    Args:
        scores: float32 or float64, any device.
        edits: (row of scores, its edits, tokens generated so far) of each row that has any.
    """
    for row, edit, _ in edits:
        if edit.allowed is not None:
            allowed = edit.allowed.to(scores.device)
            kept = scores[row, allowed]
            scores[row] = -torch.inf
            scores[row, allowed] = kept
    biased = [(row, edit.bias_ids, edit.bias) for row, edit, _ in edits if len(edit.bias_ids)]
    if biased:
        place, bias = _gathered(scores, biased)
        scores[place] += bias
    banned = [
        (row, edit.stop_ids, np.full(len(edit.stop_ids), -np.inf))
        for row, edit, num_generated in edits
        if len(edit.stop_ids) and num_generated < edit.params.min_tokens
    ]
    if banned:
        place, minus_infinity = _gathered(scores, banned)
        scores[place] = minus_infinity
    _penalise(scores, [(row, edit.params, edit.seen) for row, edit, _ in edits if edit.seen is not None])


def _penalise(scores: Tensor, rows: Sequence[tuple[int, SamplingParams, SeenTokens]]) -> None:
    if not rows:
        return
    place, counts = _gathered(scores, [(row, seen.token_ids, seen.counts) for row, _, seen in rows])
    sizes = [len(seen.token_ids) for _, _, seen in rows]

    def spread(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values), sizes)).to(scores)

    repetition = spread([params.repetition_penalty for _, params, _ in rows])
    values = scores[place]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= spread([params.frequency_penalty for _, params, _ in rows]) * counts
    values -= spread([params.presence_penalty for _, params, _ in rows]) * (counts > 0)
    scores[place] = values


def _gathered(
    scores: Tensor, parts: Sequence[tuple[int, NDArray[np.int64], NDArray[np.float64]]]
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """One index for all rows' tokens, and their numbers in the scores' dtype."""
    rows = np.repeat([row for row, _, _ in parts], [len(ids) for _, ids, _ in parts])
    columns = np.concatenate([ids for _, ids, _ in parts])
    values = np.concatenate([numbers for _, _, numbers in parts])
    index = torch.from_numpy(rows).to(scores.device), torch.from_numpy(columns).to(scores.device)
    return index, torch.from_numpy(values).to(scores)
