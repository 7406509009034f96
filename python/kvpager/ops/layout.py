"""The two orders of a cache's axes, and the one the kernels see."""

from typing import Literal

from torch import Tensor

from kvpager.errors import ArgumentError

Layout = Literal["HND", "NHD"]


def scales_as_hnd(
    key_scale: Tensor | None, value_scale: Tensor | None, layout: Layout
) -> tuple[Tensor | None, Tensor | None]:
    """The scales of quantised caches, in the caches' layout without D, as [N, K, S] views."""
    if layout == "HND":
        return key_scale, value_scale
    key_scale, value_scale = (
        scale.transpose(1, 2) if isinstance(scale, Tensor) and scale.dim() == 3 else scale
        for scale in (key_scale, value_scale)
    )
    return key_scale, value_scale


def as_hnd(key_cache: Tensor, value_cache: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The caches as HND views; the kernels take strides."""
    if layout == "HND":
        return key_cache, value_cache
    if layout != "NHD":
        raise ArgumentError("layout", '"HND" or "NHD"', layout)
    for argument, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if not isinstance(cache, Tensor):
            raise ArgumentError(argument, "a tensor", type(cache).__name__)
        if cache.dim() != 4:
            raise ArgumentError(argument, "[N, S, K, D]", f"{cache.dim()} dimensions")
    return key_cache.transpose(1, 2), value_cache.transpose(1, 2)
