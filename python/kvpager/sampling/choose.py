"""From scores to a token, for all rows at once and without sorting the vocabulary.

Scores are looked at as *heights*: (score − best of the row) / temperature, so at most 0; weights are exp(height). Then
every filter is a *floor* below which nothing may be drawn: `min_p` is ln(min_p), `top_k` the k-th height, `top_p` the
highest floor above which enough weight lies. The last two are read off the few greatest heights of a row (`_highest`),
and where all that is left lies among them, the draw is made from these few. Rows that leave more get their floor from
`floors`, and are drawn from whole. Either way the draw goes along the vocabulary, so
that scores that differ by rounding give draws that do.

R rows, V vocabulary, K few. Cost: O(R · V): some six passes over [R, V], of which one is an exponential.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpager.sampling.floors import Scratch, floor_of_mass, run_sums

_RUN = 256  # scores whose best is found together, by a reduction that is fast
_STRIDE = 32  # heights of a column of `_highest`
_FEWEST, _MOST = 64, 256  # heights that count as few; beyond, `floors` is cheaper
_COLDEST = 1e-30  # a lower temperature draws like this one, and would underflow in float32


@dataclass(frozen=True)
class Filters:
    """The sampling parameters of R drawn rows; all tensors on the device of the scores.

    Attributes:
        temperature: [R] float64, above 0.
        top_k: [R] int64; 0: all.
        top_p: [R] float64; 1: all.
        min_p: [R] float64; 0: all.
        most_k: largest of `top_k`.
        any_p, any_min_p: whether some row uses them.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    most_k: int
    any_p: bool
    any_min_p: bool


def best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The best score of each row and its token, the first of equals: scores [R, V] → [R], [R] int64.

    A NaN counts as best. Ten times as fast as ``argmax`` on a CPU, which does not vectorise over the last dimension.
    """
    R, V = scores.shape
    whole = V // _RUN * _RUN
    if whole == 0:
        values, tokens = scores.max(dim=-1)
        return values, tokens
    runs = scores[:, :whole].view(R, -1, _RUN)
    run = runs.amax(dim=-1).argmax(dim=-1)  # [R]: the first run that holds the best
    rows = torch.arange(R, device=scores.device)
    values, places = runs[rows, run].max(dim=-1)
    tokens = run * _RUN + places
    if whole < V:
        tail_values, tail_places = scores[:, whole:].max(dim=-1)
        is_tail = (tail_values > values) | (tail_values.isnan() & ~values.isnan())
        values = torch.where(is_tail, tail_values, values)
        tokens = torch.where(is_tail, tail_places + whole, tokens)
    return values, tokens


def draw(
    scores: Tensor, rows: Tensor | None, best_scores: Tensor, filters: Filters, uniforms: Tensor, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """Draws a token for each of some rows.

    Args:
        scores: [·, V] float32 or float64; −inf where a token may not come. Only read.
        rows: [R] int64, those that are drawn; None: all.
        best_scores: [R] from `best`. Where one is not finite, what is drawn means nothing.
        filters: what is left to draw from.
        uniforms: [R] float64 in [0, 1): where in the distribution, counted along the vocabulary.
        scratch: memory to work in.

    Returns:
        Tokens [R] int64, and margins [R] float64: by how much of the probability `uniforms` would have to move for
        another token. O(R · V).
    """
    temperature = filters.temperature.clamp(min=_COLDEST).to(scores.dtype)
    heights = scratch.take("heights", scores, len(best_scores))
    chosen = scores if rows is None else torch.index_select(scores, 0, rows, out=heights)
    torch.sub(chosen, best_scores[:, None], out=heights).div_(temperature[:, None])
    if not (filters.most_k or filters.any_p or filters.any_min_p):
        return _draw_by_weight(_weights(heights, scratch), uniforms)
    few, few_tokens = _highest(heights, min(max(_FEWEST, filters.most_k + 1), _MOST))
    floor = _floors(heights, few, filters, scratch)
    tokens, margins = _draw_from_few(few, few_tokens, floor, uniforms)
    wide = _rows_where(~_is_settled(few, floor, scores.shape[1]))
    if len(wide):
        tokens[wide], margins[wide] = _draw_by_weight(_above(heights, wide, floor, scratch), uniforms[wide])
    return tokens, margins


def _floors(heights: Tensor, few: Tensor, filters: Filters, scratch: Scratch) -> Tensor:
    """The least height [R] that each row may draw; −inf where all may come."""
    floor = filters.min_p.log().to(heights.dtype)  # -inf where 0
    if filters.most_k:
        floor = torch.maximum(floor, _floor_of_k(heights, few, filters.top_k, scratch))
    if filters.any_p:
        floor = torch.maximum(floor, _floor_of_p(heights, few, floor, filters.top_p, scratch))
    return floor


def _floor_of_k(heights: Tensor, few: Tensor, top_k: Tensor, scratch: Scratch) -> Tensor:
    K, V = few.shape[1], heights.shape[1]
    floor = few.gather(1, (top_k.clamp(1, K) - 1)[:, None]).squeeze(1)
    beyond = _rows_where((top_k > K) & (top_k < V))
    if len(beyond):
        rest, goals = _some(heights, beyond), top_k[beyond].double()
        floor[beyond] = floor_of_mass(rest, None, goals, few[beyond, -1], scratch)
    return torch.where((top_k > 0) & (top_k < V), floor, -torch.inf)


def _floor_of_p(heights: Tensor, few: Tensor, floor: Tensor, top_p: Tensor, scratch: Scratch) -> Tensor:
    """The highest floor that leaves at least `top_p` of the weight that earlier floors left."""
    K = few.shape[1]
    few_weights = torch.exp(few.double())
    total = few_weights.masked_fill(few < floor[:, None], 0.0).sum(dim=-1)
    wide = _rows_where(~_is_settled(few, floor, heights.shape[1]) & (top_p < 1.0))
    if len(wide):
        total[wide] = run_sums(_above(heights, wide, floor, scratch)).sum(dim=-1)
    goals = top_p * total
    place = (few_weights.cumsum(dim=-1) < goals[:, None]).sum(dim=-1)
    found = few.gather(1, place.clamp(max=K - 1)[:, None]).squeeze(1)
    found = torch.where(top_p < 1.0, found, -torch.inf)
    beyond = _rows_where((place == K) & (top_p < 1.0))
    if len(beyond):
        rest = _some(heights, beyond)
        found[beyond] = floor_of_mass(rest, _weights(rest, scratch), goals[beyond], few[beyond, -1], scratch)
    return found


def _is_settled(few: Tensor, floor: Tensor, vocab_size: int) -> Tensor:
    """Whether all heights from the floor up are among the few: [R] bool."""
    return (floor > few[:, -1]) | (few.shape[1] == vocab_size)


def _rows_where(mask: Tensor) -> Tensor:
    return mask.nonzero().squeeze(1)


def _weights(heights: Tensor, scratch: Scratch) -> Tensor:
    return torch.exp(heights, out=scratch.take("weights", heights, len(heights)))


def _above(heights: Tensor, rows: Tensor, floor: Tensor, scratch: Scratch) -> Tensor:
    """Weights of some rows, 0 below the floor."""
    heights, floor = _some(heights, rows), floor[rows]
    weights = _weights(heights, scratch)
    if not bool(floor.isinf().all()):
        is_kept = scratch.take("kept masses", heights, len(heights))
        weights.mul_(torch.ge(heights, floor[:, None], out=is_kept))  # as 1 and 0: vectorised, which a bool is not
    return weights


def _some(heights: Tensor, rows: Tensor) -> Tensor:
    """Some rows, in order; no copy where they are all."""
    return heights if len(rows) == len(heights) else heights[rows]


def _highest(heights: Tensor, num_highest: int) -> tuple[Tensor, Tensor]:
    """The K greatest heights of each row, best first, and their tokens: [R, V] → [R, min(K, V)] twice.

    They lie in the K columns with the greatest maxima, so only those are looked through: a column is every
    (V // 32)-th height, as a reduction over the middle dimension is the fast one.
    """
    K, V = num_highest, heights.shape[1]
    columns = V // _STRIDE
    if columns <= K:
        found = heights.topk(min(K, V))
        return found.values, found.indices
    table = heights[:, : columns * _STRIDE].view(-1, _STRIDE, columns)  # [R, 32, columns]
    chosen = table.amax(dim=1).topk(K, sorted=False).indices  # [R, K]
    inside = table.gather(2, chosen[:, None, :].expand(-1, _STRIDE, -1)).flatten(1)  # [R, 32 · K]
    found = torch.cat((inside, heights[:, columns * _STRIDE :]), dim=1).topk(K)
    places = found.indices
    in_table = places // K * columns + chosen.gather(1, places % K)
    return found.values, torch.where(places < _STRIDE * K, in_table, places + _STRIDE * (columns - K))


def _draw_from_few(few: Tensor, few_tokens: Tensor, floor: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Token and margin by the few [R, K] from the floor up, along the vocabulary."""
    few_tokens, order = few_tokens.sort(dim=-1)
    few = few.gather(1, order)
    weights = torch.exp(few.double()).masked_fill_(few < floor[:, None], 0.0)
    rises = weights.cumsum(dim=-1)
    total = rises[:, -1]
    target = uniforms * total
    place, margin = _fall(rises, weights, target)
    return few_tokens.gather(1, place[:, None]).squeeze(1), margin / total


def _draw_by_weight(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Token and margin by weights [R, V] that need not sum to 1: first the run that the draw falls into, then in it."""
    V = weights.shape[1]
    sums = run_sums(weights)
    rises = sums.cumsum(dim=-1)
    total = rises[:, -1]
    target = uniforms * total
    run = _first_above(rises, sums, target)  # [R]
    before = (rises - sums).gather(1, run[:, None]).squeeze(1)
    places = run[:, None] * _RUN + torch.arange(_RUN, device=weights.device)  # [R, 256]
    inside = weights.gather(1, places.clamp(max=V - 1)).double().masked_fill_(places >= V, 0.0)
    rises = before[:, None] + inside.cumsum(dim=-1)
    place, margin = _fall(rises, inside, target)
    return run * _RUN + place, margin / total


def _fall(rises: Tensor, steps: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The place [R] that the target falls into, and how far it lies from the ends of that place's step."""
    place = _first_above(rises, steps, target)
    end = rises.gather(1, place[:, None]).squeeze(1)
    start = end - steps.gather(1, place[:, None]).squeeze(1)
    return place, torch.minimum(target - start, end - target).clamp(min=0.0)


def _first_above(rises: Tensor, steps: Tensor, target: Tensor) -> Tensor:
    """The first place [R] whose running sum exceeds the target; rounding may not push it past the last weight."""
    last = steps.shape[1] - 1 - (steps.flip(1) > 0).to(torch.uint8).argmax(dim=-1)
    return torch.minimum((rises <= target[:, None]).sum(dim=-1), last)
