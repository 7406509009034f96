"""Fills a module's parameters from stored tensors, whatever file they lie in.

Invariant: afterwards every parameter was filled exactly once, from a tensor of the same name and shape; anything else
is a `ConfigError` that names the tensor, raised before the first one is read. The module comes on the meta device, so a
parameter that nobody fills has no values that could pass for weights.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvpager.errors import ConfigError
from kvpager.huge_pages import advise_huge_pages


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file that is not read yet.

    Attributes:
        shape: as the module has it.
        kind: how it is stored, for messages.
        is_supported: whether `read` can make numbers of that.
        read: its values, floating point, on the CPU.
    """

    shape: tuple[int, ...]
    kind: str
    is_supported: bool
    read: Callable[[], Tensor]


def fill_parameters(
    module: nn.Module,
    stored: Mapping[str, StoredTensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    ignored: Collection[str] = (),
    supported: str,
) -> None:
    """Fills every parameter of a module made on the meta device; one tensor is in memory twice at a time.

    Args:
        module: its parameters have the names of the tensors; they are replaced by ones that take no gradient.
        stored: what the files hold, by name.
        dtype: what the parameters become, whatever is stored.
        device: where they go.
        ignored: names that may be stored without need (the head of a tied model).
        supported: the kinds that can be read, for messages.

    Raises:
        ConfigError: a tensor is missing, unexpected, of another shape or kind.
    """
    wanted = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if missing := [name for name in wanted if name not in stored]:
        raise ConfigError(f"checkpoint has no tensor `{missing[0]}`{_and_more(missing)}")
    if unexpected := sorted(stored.keys() - wanted.keys() - set(ignored)):
        raise ConfigError(f"model has no place for the tensor `{unexpected[0]}`{_and_more(unexpected)}")
    for name, shape in wanted.items():
        tensor = stored[name]
        if tensor.shape != shape:
            raise ConfigError(f"tensor `{name}` has shape {list(tensor.shape)}, the config asks for {list(shape)}")
        if not tensor.is_supported:
            raise ConfigError(f"tensor `{name}` is stored as {tensor.kind}; supported: {supported}")
    for (name, _), room in zip(wanted.items(), _make_room(list(wanted.values()), dtype, device), strict=True):
        _replace(module, name, room.copy_(stored[name].read()))


def _make_room(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Uninitialised tensors in one allocation, each at a multiple of 64 bytes, on huge pages where the system has them.

    A step reads every weight once: whole cache lines, and few address translations, are worth a tenth of its time.
    """
    lengths = [math.prod(shape) for shape in shapes]
    unit = 64 // dtype.itemsize
    padded = [-(-length // unit) * unit for length in lengths]
    everything = torch.empty(sum(padded), dtype=dtype, device=device)
    if device.type == "cpu":
        advise_huge_pages(everything)
    parts = everything.split_with_sizes(padded)
    return [part[:length].view(shape) for part, length, shape in zip(parts, lengths, shapes, strict=True)]


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _replace(module: nn.Module, name: str, values: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, nn.Parameter(values, requires_grad=False))
