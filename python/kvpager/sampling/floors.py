"""Floors under rows of heights: the highest one from which up enough mass lies, exact, without sorting a row.

Floats of one sign are ordered as their bits are, so the floor is found bit by bit: at most 31 tests of a whole row (63
in float64), and fewer where a row's heights span less. A test is three passes that vectorise; `torch.where`, or a mask
of bool, would be ten times slower, and a partial sort of the row costs about as much as all of them.
"""

import torch
from torch import Tensor

_RUN = 256  # masses summed together, by a reduction that is fast


class Scratch:
    """Memory for intermediates, kept from step to step: fresh pages cost more than a pass over them."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, like: Tensor, num_rows: int) -> Tensor:
        """An uninitialised [num_rows, V] of the dtype and device of `like` [·, V]; valid until it is taken again."""
        kept = self._kept.get(name)
        size = num_rows * like.shape[1]
        if kept is None or kept.numel() < size or (kept.dtype, kept.device) != (like.dtype, like.device):
            kept = self._kept[name] = like.new_empty(size)
        return kept[:size].view(num_rows, like.shape[1])


def floor_of_mass(heights: Tensor, masses: Tensor | None, goals: Tensor, top: Tensor, scratch: Scratch) -> Tensor:
    """The highest floor [r] from which up the masses reach the goal; the lowest height where all of them do not.

    Args:
        heights: [r, V] float32 or float64, at most 0.
        masses: [r, V], finite and at least 0; None: 1 each.
        goals: [r] float64.
        top: [r]: a height that the floor is not above.
        scratch: memory to work in.
    """
    integers = torch.int32 if heights.dtype == torch.float32 else torch.int64
    deep = heights.amin(dim=-1).abs().view(integers)  # depths as integers that rise with them; this one is enough
    shallow = top.abs().view(integers) - 1  # not enough; -1 is the bits of no number
    room = scratch.take("kept masses", heights, len(heights))
    while bool((deep - shallow > 1).any()):
        middle = deep - (deep - shallow) // 2
        torch.ge(heights, -middle.view(heights.dtype)[:, None], out=room)
        enough = run_sums(room if masses is None else room.mul_(masses)).sum(dim=-1) >= goals
        deep, shallow = torch.where(enough, middle, deep), torch.where(enough, shallow, middle)
    return -deep.view(heights.dtype)


def run_sums(masses: Tensor) -> Tensor:
    """Sum of each run: [R, V] → [R, ⌈V / 256⌉] float64; the same for a row whatever rows are beside it."""
    V = masses.shape[1]
    whole = V // _RUN * _RUN
    sums = masses[:, :whole].view(len(masses), -1, _RUN).sum(dim=-1)
    if whole < V:
        sums = torch.cat((sums, masses[:, whole:].sum(dim=-1, keepdim=True)), dim=1)
    return sums.double()
