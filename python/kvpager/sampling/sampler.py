"""`Sampler`: the requests of a running batch as rows, and one call that chooses all their next tokens.

Rows are numbered as those of a `DecodeBatch` are: `add` appends one, `remove` moves the last into the hole; who calls
both at the same moments can use one number for both. What a row draws depends on its scores, its seed and how many
tokens it has generated, on nothing else: not on its row, its neighbours, or what became of them.

Numbers of a row stand in arrays, so a step costs no Python per row, but for rows with penalties, bias, allowed tokens,
`min_tokens` or log-probabilities.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvpager.errors import ArgumentError, StateError
from kvpager.sampling.choose import Filters, best, draw
from kvpager.sampling.edits import RowEdits, apply_edits
from kvpager.sampling.floors import Scratch
from kvpager.sampling.logprobs import PositionLogprobs, position_logprobs
from kvpager.sampling.params import SamplingParams
from kvpager.sampling.random import uniforms

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class SampledTokens:
    """What `Sampler.sample` chose for R rows, in the order of the scores.

    Attributes:
        token_ids: [R] int64; −1 where `is_ok` is not.
        is_ok: [R] bool; False where the row's scores are NaN, or leave no token to choose (all −inf). Such a request
            has to end with an error; the others are not touched by it.
        margins: [R] float64: by how much of the probability the draw lies away from another token's share; NaN for
            greedy rows. What differs by rounding only may differ in its tokens where this is about as small.
        logprobs: place 0 … R − 1 → log-probabilities, of the rows that asked and are ok.
    """

    token_ids: NDArray[np.int64]
    is_ok: NDArray[np.bool_]
    margins: NDArray[np.float64]
    logprobs: Mapping[int, PositionLogprobs] = field(default_factory=dict)


# The parameters that are plain numbers: one structured row each.
_ROW = np.dtype(
    [
        ("temperature", np.float64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
        ("num_generated", np.uint64),
        ("num_logprobs", np.int64),
        ("has_edits", np.bool_),
    ],
    align=True,
)


class Sampler:
    """State of the requests that run, and the choice of their next tokens.

    Args:
        vocab_size: V.
        max_num_seqs: most rows.
    """

    def __init__(self, vocab_size: int, max_num_seqs: int) -> None:
        self.vocab_size = vocab_size
        self._rows = np.zeros(max_num_seqs, dtype=_ROW)
        self._edits: list[RowEdits | None] = []
        self._scratch = Scratch()

    @property
    def num_rows(self) -> int:
        """Rows taken: 0 … this − 1."""
        return len(self._edits)

    def add(
        self,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: Iterable[int],
        output_token_ids: Sequence[int] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> int:
        """Takes the next row for a request. O(its tokens) with penalties, else O(1).

        Args:
            params: its sampling parameters.
            seed: from `request_seed`.
            prompt_token_ids: for the repetition penalty.
            output_token_ids: what it generated already, if it was preempted.
            stop_token_ids: all tokens that would end it; they can't come before its `min_tokens`.

        Returns:
            The row.

        Raises:
            StateError: no row is left.
            ArgumentError: `params` or `stop_token_ids` name a token that is not in the vocabulary.
        """
        row = self.num_rows
        if row == len(self._rows):
            raise StateError(f"the sampler is full: {row} rows")
        params.check_vocabulary(self.vocab_size)
        if bad := [token for token in stop_token_ids if not 0 <= token < self.vocab_size]:
            raise ArgumentError("stop_token_ids", f"token ids in 0 … {self.vocab_size - 1}", bad[0])
        edits = RowEdits.of(params, stop_token_ids, prompt_token_ids)
        if edits is not None and edits.seen is not None:
            for token in output_token_ids:
                edits.seen.add(token)
        self._rows[row] = (
            params.temperature,
            0 if params.top_k < 0 else min(params.top_k, self.vocab_size),
            params.top_p,
            params.min_p,
            seed,
            len(output_token_ids),
            -1 if params.logprobs is None else min(params.logprobs, self.vocab_size),
            edits is not None,
        )
        self._edits.append(edits)
        return row

    def remove(self, row: int) -> None:
        """Gives a row up; the last row takes its number. O(1).

        Raises:
            ArgumentError: no such row.
        """
        if not 0 <= row < self.num_rows:
            raise ArgumentError("row", f"0 … {self.num_rows - 1}", row)
        last = self._edits.pop()
        if row < self.num_rows:
            self._rows[row] = self._rows[self.num_rows]
            self._edits[row] = last

    def sample(self, scores: Tensor, rows: Rows | Sequence[int] | None = None) -> SampledTokens:
        """Chooses the next token of every row. Changes no state: tell `accept` what became of it.

        Args:
            scores: [R, V] float32 or float64, any device: the model's logits. Overwritten where a request has
                penalties, bias, allowed tokens or `min_tokens`.
            rows: R rows that the scores belong to, in any order; None: rows 0 … R − 1.

        Raises:
            ArgumentError: scores of another shape, or rows that do not exist.

        O(R · V); one transfer to the host.
        """
        chosen = self._check(scores, rows)
        state = self._rows[chosen]
        asked = np.flatnonzero(state["num_logprobs"] >= 0)
        edited = np.flatnonzero(state["has_edits"])
        raw = scores[torch.from_numpy(asked).to(scores.device)] if len(asked) else None
        if len(edited):
            apply_edits(scores, [self._edit(int(place), int(chosen[place])) for place in edited])
        best_scores, tokens = best(scores)
        margins = torch.full((len(chosen),), torch.nan, dtype=torch.float64, device=scores.device)
        drawn = np.flatnonzero(state["temperature"] > 0)
        if len(drawn):
            tokens, margins = self._draw_some(scores, best_scores, tokens, margins, state, drawn)
        is_ok = best_scores.isfinite()
        result = SampledTokens(torch.where(is_ok, tokens, -1).cpu().numpy(), is_ok.cpu().numpy(), margins.cpu().numpy())
        return result if raw is None else _with_logprobs(result, raw, asked, state["num_logprobs"])

    def accept(self, rows: Rows | Sequence[int], token_ids: NDArray[np.int64] | Sequence[int]) -> None:
        """Tells which token each of these rows went on with, usually the one sampled. O(rows).

        Args:
            rows: each at most once.
            token_ids: one for each.
        """
        index = np.asarray(rows, dtype=np.int64)
        self._rows["num_generated"][index] += np.uint64(1)
        for place in np.flatnonzero(self._rows["has_edits"][index]).tolist():
            edits = self._edits[int(index[place])]
            if edits is not None and edits.seen is not None:
                edits.seen.add(int(token_ids[place]))

    def _draw_some(
        self, scores: Tensor, best_scores: Tensor, tokens: Tensor, margins: Tensor, state: NDArray[np.void], drawn: Rows
    ) -> tuple[Tensor, Tensor]:
        """Replaces tokens and margins of the rows that are drawn."""
        state = state[drawn]

        def upload(values: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values)).to(scores.device)

        filters = Filters(
            temperature=upload(state["temperature"]),
            top_k=upload(state["top_k"]),
            top_p=upload(state["top_p"]),
            min_p=upload(state["min_p"]),
            most_k=int(state["top_k"].max()),
            any_p=bool((state["top_p"] < 1).any()),
            any_min_p=bool((state["min_p"] > 0).any()),
        )
        numbers = upload(uniforms(state["seed"], state["num_generated"]))
        if len(drawn) == len(scores):
            return draw(scores, None, best_scores, filters, numbers, self._scratch)
        places = upload(drawn)
        found = draw(scores, places, best_scores[places], filters, numbers, self._scratch)
        return tokens.index_copy(0, places, found[0]), margins.index_copy(0, places, found[1])

    def _edit(self, place: int, row: int) -> tuple[int, RowEdits, int]:
        edits = self._edits[row]
        assert edits is not None  # `has_edits` says so
        return place, edits, int(self._rows["num_generated"][row])

    def _check(self, scores: Tensor, rows: Rows | Sequence[int] | None) -> Rows:
        if scores.dim() != 2 or scores.shape[1] != self.vocab_size:
            raise ArgumentError("scores", f"shape [R, {self.vocab_size}]", list(scores.shape))
        if scores.dtype not in (torch.float32, torch.float64):
            raise ArgumentError("scores", "float32 or float64", scores.dtype)
        chosen = np.arange(len(scores)) if rows is None else np.asarray(rows, dtype=np.int64)
        if len(chosen) != len(scores):
            raise ArgumentError("rows", f"one row for each of {len(scores)} scores", f"{len(chosen)} rows")
        if len(chosen) and not 0 <= chosen.min() <= chosen.max() < self.num_rows:
            raise ArgumentError("rows", f"rows in 0 … {self.num_rows - 1}", chosen.tolist())
        return chosen


def _with_logprobs(result: SampledTokens, raw: Tensor, asked: Rows, counts: NDArray[np.int64]) -> SampledTokens:
    ok = result.is_ok[asked]
    places = asked[ok]
    scores = raw[torch.from_numpy(np.flatnonzero(ok)).to(raw.device)]
    found = position_logprobs(scores, result.token_ids[places].tolist(), counts[places].tolist())
    logprobs = dict(zip(places.tolist(), found, strict=True))
    return SampledTokens(result.token_ids, result.is_ok, result.margins, logprobs)
