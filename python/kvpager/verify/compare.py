"""`compare_with_transformers`: compares an engine's logits and attention with transformers' eager attention.

The two share no code. The generated tokens are forced on both, so that one early difference can't make all later ones
meaningless. kvpager replays them through the paged cache, step by step and all sequences together, as they were
generated; transformers sees each whole text at once, without a cache.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from kvpager.engine import LLM, RequestOutput
from kvpager.errors import ConfigError
from kvpager.verify.forward import forward_eager

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Divergence:
    """The first token of a greedy request that transformers would not have chosen."""

    request: int
    step: int
    ours: int
    theirs: int
    gap: float  # between transformers' scores of the two


@dataclass
class Comparison:
    """Largest absolute differences, in float32.

    Attributes:
        logits: over every step of every request.
        attention: per layer, of the attention output [H · D] at each step's last query.
        worst_step: (request, step) of the largest logits difference.
        greedy: whether choices were compared too.
        divergence: None if transformers' greedy choice is ours at every step, or nothing was compared.
    """

    greedy: bool = False
    logits: float = 0.0
    attention: list[float] = field(default_factory=list)
    worst_step: tuple[int, int] = (0, 0)
    divergence: Divergence | None = None

    @property
    def passed(self) -> bool:
        """Whether every difference is within `TOLERANCE`; a NaN is not."""
        return self.divergence is None and all(value <= TOLERANCE for value in (self.logits, *self.attention))


# Logits [steps, V] and attention outputs [L, steps, H · D] of one request.
Trace = tuple[Tensor, Tensor]


def compare_with_transformers(llm: LLM, outputs: Sequence[RequestOutput], *, greedy: bool) -> Comparison:
    """Replays finished requests on both sides and takes the differences. Memory: all logits of all requests.

    Args:
        llm: the engine that made them, in float32, with no run open.
        outputs: what it made.
        greedy: whether they were made at temperature 0, so that transformers' choice must be the same.

    Raises:
        ConfigError: transformers is not installed, or the engine computes or caches in another dtype.
    """
    require_float32(llm)
    theirs = load_transformers(llm)
    result = Comparison(greedy, attention=[0.0] * llm.model_config.num_hidden_layers)
    for request, (output, ours) in enumerate(zip(outputs, _replay(llm, outputs), strict=True)):
        _compare(result, request, output, ours, _trace_transformers(theirs, output))
    return result


def _compare(result: Comparison, request: int, output: RequestOutput, ours: Trace, theirs: Trace) -> None:
    per_step = (ours[0] - theirs[0]).abs().amax(dim=-1)  # [steps]
    if not per_step.max() <= result.logits:
        result.logits, result.worst_step = float(per_step.max()), (request, int(per_step.argmax()))
    for layer, difference in enumerate((ours[1] - theirs[1]).abs().amax(dim=(1, 2)).tolist()):
        result.attention[layer] = max(result.attention[layer], difference, key=_nan_last)
    if not result.greedy or result.divergence is not None:
        return
    for step, token in enumerate(output.outputs[0].token_ids):
        choice = int(theirs[0][step].argmax())
        if choice != token:
            gap = float(theirs[0][step, choice] - theirs[0][step, token])
            result.divergence = Divergence(request, step, token, choice, gap)
            return


def _nan_last(value: float) -> float:
    return float("inf") if value != value else value


def _replay(llm: LLM, outputs: Sequence[RequestOutput]) -> list[Trace]:
    """Our side: as many requests together as the pool holds."""
    traces: list[Trace] = []
    group: list[RequestOutput] = []
    promised = 0
    for output in outputs:
        num_tokens = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
        needed = -(-num_tokens // llm.config.block_size)
        if group and promised + needed > llm.block_manager.num_free_blocks:
            traces += _replay_together(llm, group)
            group, promised = [], 0
        group.append(output)
        promised += needed
    return traces + (_replay_together(llm, group) if group else [])


def _replay_together(llm: LLM, outputs: Sequence[RequestOutput]) -> list[Trace]:
    first_id = max(llm.block_manager.sequences, default=-1) + 1
    ids = [first_id + row for row in range(len(outputs))]
    logits: list[list[Tensor]] = [[] for _ in outputs]
    attention: list[list[Tensor]] = [[] for _ in outputs]
    created: list[int] = []
    try:
        for sequence_id in ids:
            llm.block_manager.create_sequence(sequence_id)
            created.append(sequence_id)
        for step in range(max(len(output.outputs[0].token_ids) for output in outputs)):
            rows = [row for row, output in enumerate(outputs) if step < len(output.outputs[0].token_ids)]
            tokens = [_tokens_of_step(outputs[row], step) for row in rows]
            with _attention_outputs(llm.runner.model, lambda recorded: recorded) as seen:
                step_logits = forward_eager(llm.runner, [ids[row] for row in rows], tokens)
            last = torch.tensor([len(each) for each in tokens]).cumsum(0) - 1
            by_layer = torch.stack(seen)[:, last.to(step_logits.device)].cpu()  # [L, rows, H · D]
            for place, row in enumerate(rows):
                logits[row].append(step_logits[place].cpu())
                attention[row].append(by_layer[:, place])
    finally:
        for sequence_id in created:
            llm.block_manager.release_sequence(sequence_id)
    return [(torch.stack(each), torch.stack(seen, dim=1)) for each, seen in zip(logits, attention, strict=True)]


def _tokens_of_step(output: RequestOutput, step: int) -> Sequence[int]:
    return output.prompt_token_ids if step == 0 else output.outputs[0].token_ids[step - 1 : step]


@torch.inference_mode()
def _trace_transformers(model: nn.Module, output: RequestOutput) -> Trace:
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
    first = len(output.prompt_token_ids) - 1  # the position that gave the first new token
    device = next(model.parameters()).device
    with _attention_outputs(model, lambda recorded: recorded[0]) as seen:  # one text: drop the batch dimension
        logits = model(torch.tensor([tokens], device=device), use_cache=False).logits[0, first:]
    return logits.cpu(), torch.stack(seen)[:, first:].cpu()


@contextmanager
def _attention_outputs(model: nn.Module, pick: Callable[[Tensor], Tensor]) -> Iterator[list[Tensor]]:
    """Records what goes into every layer's output projection: the attention output. Both models name it alike."""
    seen: list[Tensor] = []

    def record(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(pick(inputs[0]))

    hooks = [
        module.register_forward_pre_hook(record)
        for name, module in model.named_modules()
        if name.endswith(".self_attn.o_proj")
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def require_float32(llm: LLM) -> None:
    """Refuse an engine whose rounding alone makes differences.

    Raises:
        ConfigError: it computes, or keeps keys and values, in another dtype than float32.
    """
    if next(llm.runner.model.parameters()).dtype != torch.float32:
        raise ConfigError("differences are only small in float32: choose `dtype` float32")
    if llm.runner.cache.dtype != torch.float32:
        raise ConfigError("differences are only small in float32: choose `kv_cache_dtype` auto")


def load_transformers(llm: LLM) -> nn.Module:
    """The same model by transformers, with eager attention, in float32.

    Raises:
        ConfigError: transformers is not installed, or can't load the model (for GGUF files it needs accelerate).
    """
    try:
        transformers: Any = import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            "transformers is not installed, and the comparison is with it: `pip install transformers`"
        ) from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    place: tuple[Any, dict[str, str]] = (llm.folder, {})
    if llm.folder.is_file():
        place = (llm.folder.parent, {"gguf_file": llm.folder.name})
    try:
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            place[0], attn_implementation="eager", dtype=torch.float32, **place[1]
        )
    except (ImportError, ValueError) as error:  # for a GGUF file it needs gguf and accelerate
        raise ConfigError(f"transformers can't load `{llm.folder}`: {error}") from error
    return model.to(llm.config.device).eval()
