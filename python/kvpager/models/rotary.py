"""Rotary positions (arXiv:2104.09864): which angle each pair of values turns by, plain or stretched as in Llama 3.1.

Pair j of a head (values j and j + D/2) turns by ``position · frequency[j]``; `kvpager.ops.qk_norm_rope_write` turns it.
Frequencies and angles are float32.
"""

import math

import torch
from torch import Tensor

from kvpager.config import Llama3RopeScaling, ModelConfig, RopeFactors


def inverse_frequencies(config: ModelConfig, device: torch.device | None = None) -> Tensor:
    """Radians per position of each pair: [D/2] float32; ``theta^(−2j/D)``, then scaled as the config says."""
    D = config.head_dim
    exponents = torch.arange(0, D, 2, dtype=torch.int64, device=device).float() / D
    frequencies = 1.0 / config.rope_theta**exponents
    if isinstance(config.rope_scaling, Llama3RopeScaling):
        return _stretched(frequencies, config.rope_scaling)
    if isinstance(config.rope_scaling, RopeFactors):
        return frequencies / torch.tensor(config.rope_scaling.factors, device=device)
    return frequencies


def _stretched(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Llama 3.1: what turns slowly is divided by `factor`, what turns fast is kept, and between the two it blends.

    Slow: fewer than `low_freq_factor` turns over the original context; fast: more than `high_freq_factor`.
    Source: "The Llama 3 Herd of Models" (arXiv:2407.21783) and the published ``rope_scaling`` of its checkpoints.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


class RotaryTable:
    """Cosines, then sines, of every position's angles, for all layers and steps: [P, D], made when first needed.

    Args:
        config: of the model.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._rows: Tensor | None = None

    def rows(self, num_positions: int, like: Tensor) -> Tensor:
        """At least `num_positions` rows [P, D] beside `like`: float32, or float64 where it is.

        The table at least doubles when it grows, so growing costs O(1) a position.
        """
        dtype = torch.promote_types(like.dtype, torch.float32)
        rows = self._rows
        if rows is None or len(rows) < num_positions or rows.device != like.device or rows.dtype is not dtype:
            positions = torch.arange(
                max(num_positions, 2 * len(rows) if rows is not None else 1024), device=like.device
            )
            frequencies = inverse_frequencies(self._config, like.device)
            angles = positions.float()[:, None] * frequencies  # [P, D/2]
            self._rows = rows = torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)
        return rows
