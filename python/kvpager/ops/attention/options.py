"""The options of attention: the one list. Wrappers, checks, reference, backends and the cache pass them on as a record.

A new option is a field of `AttentionOptions`, a keyword of `AttentionKeywords`, a line of `check_options`, and what the
reference and the kernels make of it. Backends and functions that do not know it refuse it by name (`unsupported`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self, TypedDict

import torch
from torch import Tensor

from kvpager.errors import ArgumentError
from kvpager.ops.tensors import accumulate_dtype, refuse


class AttentionOptions(NamedTuple):
    """What attention is computed with, beside query, caches, tables and lengths.

    Attributes:
        scale: factor of the scores, finite; 1 / √D if None.
        window: positions a query sees, itself included; 0 = all. Blocks wholly before the window are not read.
        softcap: c > 0 bends a score s to c · tanh(s / c), before the mask; 0 = none.
        sinks: sinks [H] float32 (float64 with float64): logits added to each head's softmax denominator.
        alibi_slopes: alibi_slopes [H], like `sinks`: slope · (position of the key − position of the query) is added to
            a head's scores, after the softcap (ALiBi, Press et al. 2022). A slope that is not finite gives NaN.
        key_scale: of a quantised cache, key_scale [N, K, S] or, NHD, [N, S, K] float32, or [1] for the whole cache.
        value_scale: value_scale, like `key_scale`.
    """

    scale: float | None = None
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> Self:
        """The options among an op's keywords."""
        return cls(**{name: keywords[name] for name in cls._fields if name in keywords})

    def unsupported(self, supported: frozenset[str]) -> str | None:
        """The first option that is given and not among the supported ones; None if there is none."""
        for name, value in self._asdict().items():
            if name not in supported and not same(value, self._field_defaults[name]):
                return name
        return None


def same(one: object, two: object) -> bool:
    """Whether two values of an option are the same; tensors are if they are one object."""
    return one is two or (not isinstance(one, Tensor) and one == two)


class ScoreKeywords(TypedDict, total=False):
    """The options that a cache's `attend` takes; see `AttentionOptions`."""

    scale: float | None
    window: int
    softcap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None


class ScaleKeywords(TypedDict, total=False):
    """The scales of a quantised cache; see `AttentionOptions`."""

    key_scale: Tensor | None
    value_scale: Tensor | None


class AttentionKeywords(ScoreKeywords, ScaleKeywords, total=False):
    """The options as keywords of an op; see `AttentionOptions`."""


class DecodeKeywords(AttentionKeywords, total=False):
    """The options of `paged_attention`: `AttentionOptions`, and how sequences are cut.

    Attributes:
        fixed_split: tokens of a split: then each row's result is the same, bit for bit, whatever else is in the batch
            and however many threads run. 0 lets the kernel cut long sequences where it suits the device.
        split_plan: from `kvpager.ops.make_split_plan` for these lengths; None lets the kernel cut for itself.
        workspace: uint8 of at least `kvpager.ops.workspace_bytes`, zeroed, and left zeroed; None lets the kernel find
            room itself.
    """

    fixed_split: int
    split_plan: Tensor | None
    workspace: Tensor | None


_SCHEMA_TYPES = {int: "int", float: "float", Tensor | None: "Tensor?"}
# The options in an op's schema, but the scale, which a wrapper makes a number.
OPTIONS_SCHEMA = ", ".join(
    f"{_SCHEMA_TYPES[AttentionOptions.__annotations__[name]]} {name}={default}"
    for name, default in AttentionOptions._field_defaults.items()
    if name != "scale"
)


def check_options(options: AttentionOptions, query: Tensor) -> None:
    """Metadata of the options, beside query [T, H, D]; the scales are checked beside their caches."""
    H, dtype = query.shape[1], accumulate_dtype(query.dtype)
    for name, numbers in (("sinks", options.sinks), ("alibi_slopes", options.alibi_slopes)):  # one for each head
        if numbers is None or (numbers.shape == (H,) and numbers.dtype is dtype and numbers.device == query.device):
            continue
        refuse(name, f"[{H}] {str(dtype).removeprefix('torch.')} on {query.device}", numbers)
    if options.window < 0:
        raise ArgumentError("window", "0 (all positions) or a positive number of positions", options.window)
    check_factors(options.scale, options.softcap, dtype)


def check_factors(scale: float | None, softcap: float, dtype: torch.dtype) -> None:
    """Numbers by which scores are multiplied and bent are finite where they are used: in arithmetic of `dtype`."""
    largest = torch.finfo(dtype).max
    if not 0 <= softcap <= largest:
        raise ArgumentError("softcap", "0 (none) or a finite positive number", softcap)
    if isinstance(scale, (int, float)) and not -largest <= scale <= largest:
        raise ArgumentError("scale", "a finite number", scale)
