"""The matrix products of a run and nothing else: what no engine that uses torch's can be faster than."""

import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from engine.models import Prompts

FEW_LAYERS = 4  # enough of them to be out of the caches; the others take as long


@torch.inference_mode()
def linear_seconds(model: Any, prompts: Prompts, num_new: int, max_tokens: int) -> float:
    """Seconds of torch's products with the weights of transformers' `model`, at our shapes.

    Our steps: the prompts' tokens without padding in chunks of `max_tokens`, then a row for each sequence; the head for
    the rows that give a token. A step's rows are timed with up to 4 layers, three times, and scaled to all.
    """
    layers = model.model.layers
    timed = [
        [module.weight for module in layer.modules() if isinstance(module, nn.Linear)] for layer in layers[:FEW_LAYERS]
    ]
    head = model.lm_head.weight
    scale = len(layers) / len(timed)

    def step(rows: int, due: int) -> float:
        return scale * _seconds(timed, rows) + _seconds([[head]], due)

    left, total = sum(map(len, prompts)), 0.0
    while left:
        rows = min(left, max_tokens)
        left -= rows
        total += step(rows, len(prompts)) if not left else scale * _seconds(timed, rows)
    return total + (num_new - 1) * step(len(prompts), len(prompts))


def _seconds(layers: list[list[Tensor]], rows: int) -> float:
    """Of one pass over the weights; the median of three after one that is not kept, or of one if that is long."""
    inputs = {weight.shape[1]: torch.randn(rows, weight.shape[1]).to(weight.dtype) for weight in layers[0]}
    turns: list[float] = []
    while len(turns) < 4:
        start = time.perf_counter()
        for weights in layers:
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)
        turns.append(time.perf_counter() - start)
        if turns[0] > 1.0:
            return turns[0]
    return statistics.median(turns[1:])
