"""From scores to a token, for all rows at once and without sorting the vocabulary.

Scores are looked at as *gaps*: how far each lies below its row's best, divided by the temperature; weights are
exp(−gap). Then every filter is a bound on the gap (a *limit*): `min_p` is −ln(min_p), `top_k` the k-th smallest gap,
`top_p` the smallest bound below which enough weight lies. The last two are read off the few smallest gaps of a row
(`_smallest`); where those do not reach, the bound is found by bisection over the values a float can have. What lies
within the limit is drawn from in vocabulary order, so that scores that differ by rounding give draws that do.

R rows, V vocabulary, K smallest gaps. Cost: O(R · V), a dozen passes over [R, V] where something is filtered.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_RUN = 256  # scores whose best is found together, by a reduction that is fast
_STRIDE = 32  # gaps of a column of `_smallest`
_FEWEST, _MOST = 64, 256  # smallest gaps looked at; beyond, bisection is cheaper
_COLDEST = 1e-30  # a lower temperature draws like this one, and would underflow in float32


@dataclass(frozen=True)
class Filters:
    """What each of R drawn rows wishes; all tensors on the device of the scores.

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


def draw(scores: Tensor, best_scores: Tensor, filters: Filters, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draws a token for each row.

    Args:
        scores: [R, V] float32 or float64; −inf where a token may not come.
        best_scores: [R] finite, from `best`.
        filters: what is left to draw from.
        uniforms: [R] float64 in [0, 1): where in the distribution, counted along the vocabulary.

    Returns:
        Tokens [R] int64, and margins [R] float64: by how much of the probability `uniforms` would have to move for
        another token. O(R · V).
    """
    temperature = filters.temperature.clamp(min=_COLDEST).to(scores.dtype)
    gaps = (best_scores[:, None] - scores).div_(temperature[:, None])
    weights = torch.exp(-gaps)
    limit = _limits(gaps, weights, filters)
    if limit is not None:
        weights = torch.where(gaps <= limit[:, None], weights, 0.0)
    return _draw_by_weight(weights, uniforms)


def _limits(gaps: Tensor, weights: Tensor, filters: Filters) -> Tensor | None:
    """The widest gap [R] that each row may draw; None where no row filters."""
    if not (filters.most_k or filters.any_p or filters.any_min_p):
        return None
    limit = -filters.min_p.log().to(gaps.dtype)  # inf where 0
    if not (filters.most_k or filters.any_p):
        return limit
    few = _smallest(gaps, min(max(_FEWEST, filters.most_k), _MOST))  # [R, K]
    if filters.most_k:
        limit = torch.minimum(limit, _limit_of_k(gaps, few, filters.top_k))
    if filters.any_p:
        limit = torch.minimum(limit, _limit_of_p(gaps, weights, few, limit, filters.top_p))
    return limit


def _limit_of_k(gaps: Tensor, few: Tensor, top_k: Tensor) -> Tensor:
    K = few.shape[1]
    limit = few.gather(1, (top_k.clamp(1, K) - 1)[:, None]).squeeze(1)
    limit = torch.where(top_k > 0, limit, torch.inf)
    beyond = ((top_k > K) & (top_k < gaps.shape[1])).nonzero().squeeze(1)
    if len(beyond):
        wide, goals = gaps[beyond], top_k[beyond]
        limit[beyond] = _bisect(lambda bound: (wide <= bound[:, None]).sum(dim=-1) >= goals, wide)
    return torch.where(top_k >= gaps.shape[1], torch.inf, limit)


def _limit_of_p(gaps: Tensor, weights: Tensor, few: Tensor, limit: Tensor, top_p: Tensor) -> Tensor:
    """The smallest bound with at least `top_p` of the weight that earlier limits left."""
    weights = torch.where(gaps <= limit[:, None], weights, 0.0)
    goals = top_p * _sums(weights).sum(dim=-1)
    reached = torch.exp(-few.double()).cumsum(dim=-1)  # [R, K]
    place = (reached < goals[:, None]).sum(dim=-1)
    bounds = few.gather(1, place.clamp(max=few.shape[1] - 1)[:, None]).squeeze(1)
    bounds = torch.where(top_p < 1.0, bounds, torch.inf)
    beyond = ((place == few.shape[1]) & (top_p < 1.0)).nonzero().squeeze(1)
    if len(beyond):
        wide, left, wanted = gaps[beyond], weights[beyond], goals[beyond]
        bounds[beyond] = _bisect(
            lambda bound: _sums(torch.where(wide <= bound[:, None], left, 0.0)).sum(dim=-1) >= wanted, wide
        )
    return bounds


def _smallest(gaps: Tensor, num_smallest: int) -> Tensor:
    """The K smallest gaps of each row, ascending: [R, V] → [R, min(K, V)].

    The K smallest lie in the K columns with the smallest minima, so only those are looked through: a column is every
    (V // 32)-th gap, as a reduction over the middle dimension is the fast one.
    """
    K, V = num_smallest, gaps.shape[1]
    columns = V // _STRIDE
    if columns <= K:
        return gaps.topk(min(K, V), largest=False).values
    table = gaps[:, : columns * _STRIDE].view(-1, _STRIDE, columns)  # [R, 32, columns]
    chosen = table.amin(dim=1).topk(K, largest=False, sorted=False).indices  # [R, K]
    found = table.gather(2, chosen[:, None, :].expand(-1, _STRIDE, -1)).flatten(1)
    return torch.cat((found, gaps[:, columns * _STRIDE :]), dim=1).topk(K, largest=False).values


def _bisect(is_enough: Callable[[Tensor], Tensor], gaps: Tensor) -> Tensor:
    """The smallest bound for which `is_enough` holds, exactly: floats of one sign are ordered as their bits are.

    Args:
        is_enough: bounds [r] → [r] bool, growing; inf is taken to be enough.
        gaps: [r, V], for their dtype. 31 or 63 calls.
    """
    integers, bits = (torch.int32, 31) if gaps.dtype == torch.float32 else (torch.int64, 63)
    infinity = torch.tensor(math.inf, dtype=gaps.dtype).view(integers).item()
    high = torch.full((len(gaps),), int(infinity), dtype=integers, device=gaps.device)
    low = torch.full_like(high, -1)  # never enough
    for _ in range(bits):
        middle = low + (high - low) // 2
        enough = is_enough(middle.clamp(min=0).view(gaps.dtype))
        high, low = torch.where(enough, middle, high), torch.where(enough, low, middle)
    return high.view(gaps.dtype)


def _draw_by_weight(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Token and margin by weights [R, V] that need not sum to 1: first the run that the draw falls into, then in it."""
    V = weights.shape[1]
    sums = _sums(weights)
    rises = sums.cumsum(dim=-1)
    total = rises[:, -1]
    target = uniforms * total
    run = _first_above(rises, sums, target)  # [R]
    before = (rises - sums).gather(1, run[:, None]).squeeze(1)
    places = run[:, None] * _RUN + torch.arange(_RUN, device=weights.device)  # [R, 256]
    inside = weights.gather(1, places.clamp(max=V - 1)).double().masked_fill_(places >= V, 0.0)
    rises = before[:, None] + inside.cumsum(dim=-1)
    place = _first_above(rises, inside, target)
    end = rises.gather(1, place[:, None]).squeeze(1)
    start = end - inside.gather(1, place[:, None]).squeeze(1)
    return run * _RUN + place, torch.minimum(target - start, end - target).clamp(min=0.0) / total


def _sums(weights: Tensor) -> Tensor:
    """Sum of each run: [R, V] → [R, ⌈V / 256⌉] float64; the same for a row whatever rows are beside it."""
    V = weights.shape[1]
    whole = V // _RUN * _RUN
    sums = weights[:, :whole].view(len(weights), -1, _RUN).sum(dim=-1)
    if whole < V:
        sums = torch.cat((sums, weights[:, whole:].sum(dim=-1, keepdim=True)), dim=1)
    return sums.double()


def _first_above(rises: Tensor, steps: Tensor, target: Tensor) -> Tensor:
    """The first place [R] whose running sum exceeds the target; rounding may not push it past the last weight."""
    last = steps.shape[1] - 1 - (steps.flip(1) > 0).to(torch.uint8).argmax(dim=-1)
    return torch.minimum((rises <= target[:, None]).sum(dim=-1), last)
