"""From what the kernels say to the classes of `kvpager.errors`, and the errors that wait on a device.

A C++ kernel on the CPU raises RuntimeError with the text ``SlotError: …`` or ``ArgumentError: `name`: wanted …, got
…``. A CUDA kernel can't raise: it skips the row and sets a bit of a device error word, which `check_errors` fetches.
"""

import inspect
import os
import re
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from kvpager.errors import ArgumentError, KVPagerError, SlotError
from kvpager.ops.schemas import registered_op

# Bit of the device error word -> (argument, class, what was wanted). The bits are those of csrc/cuda/errors.cuh.
DEVICE_ERRORS = (
    ("slot_mapping", SlotError, "-1 or slots of the pool"),
    ("block_tables", SlotError, "block ids of the pool"),
    ("seq_lens", ArgumentError, "lengths of 0 to M · S and `max_seq_len`"),
    ("query_start_loc", ArgumentError, "starts that rise from 0, within the query, the sequence and `max_query_len`"),
    ("pairs", SlotError, "block ids of the pool"),
    ("key_scale", ArgumentError, "a positive number as the one scale"),
    ("value_scale", ArgumentError, "a positive number as the one scale"),
    ("positions", ArgumentError, "rows of `cos_sin`"),
    ("seq_start_loc", ArgumentError, "rising starts, each at least the sequence's length apart, within `key`"),
    ("changed", ArgumentError, "rows (or -1) and columns of the table"),
    ("schedule", ArgumentError, "one that make_schedule made for these `seq_lens` and `fixed_split`"),
)

# What an op raises when it does not like its arguments: a kernel's text, or the shapes that a wrapper itself reads.
REFUSALS = (RuntimeError, IndexError, ArithmeticError, AttributeError, TypeError)
# Ask the device after every call; set by the environment when kvpager is imported.
CHECKED = os.environ.get("KVPAGER_CHECKED") == "1"

_take_errors = registered_op("take_errors")
_ARGUMENT_TEXT = re.compile(r"ArgumentError: `(\w+)`: wanted (.*), got (.*)")
_SLOT_TEXT = re.compile(r"SlotError: (.*)")
# What torch says of a value that an op's schema does not allow.
_SCHEMA_TEXT = re.compile(
    r"Expected a value of type '(\w+)\S*' for argument '(\w+)' but .* type '(\w+)'.*\n.*\n?Value: (.*)"
)
_WANTED = {"int": "a whole number of 64 bits", "float": "a number"}
_WANTED_TENSORS = {Tensor: "a tensor", Tensor | None: "a tensor or None"}


def typed_error(error: Exception) -> Exception:
    """The kvpager error that a kernel's RuntimeError stands for; the error itself if it is another one."""
    text = str(error)
    if found := _SLOT_TEXT.search(text):
        return SlotError(found[1])
    if found := _ARGUMENT_TEXT.search(text):
        return ArgumentError(found[1], found[2], found[3])
    return error


def raise_typed(error: Exception, check: Callable[..., object], *arguments: object) -> NoReturn:
    """Say what was wrong: the kernels refuse whatever does not fit, the checks here word it as the caller sees it."""
    if isinstance(error, KVPagerError):
        raise error
    _check_tensors(check, arguments)
    try:
        if found := _SCHEMA_TEXT.search(str(error)):
            raise ArgumentError(found[2], _WANTED.get(found[1], found[1]), f"{found[4]} ({found[3]})")
        check(*arguments)
    except ArgumentError as refusal:
        raise refusal from None
    raise typed_error(error) from None


def _check_tensors(check: Callable[..., object], arguments: tuple[object, ...]) -> None:
    """Refuses what stands where `check` has a tensor and is none."""
    signature = inspect.signature(check)
    bound = signature.bind(*arguments)
    bound.apply_defaults()
    for name, value in bound.arguments.items():
        wanted = _WANTED_TENSORS.get(signature.parameters[name].annotation)
        if wanted and not isinstance(value, Tensor) and not (value is None and wanted.endswith("None")):
            raise ArgumentError(name, wanted, type(value).__name__) from None


def check_errors(device: str | torch.device | None = None) -> None:
    """Raise what kernels found wrong on `device` since the last call, and forget it.

    Waits for the device. A no-op on the CPU, where errors are raised at once.

    Args:
        device: the device to ask; the current CUDA device if None, or the CPU where there is none.

    Raises:
        SlotError: a slot or block id outside the pool was met; its row was skipped.
        ArgumentError: a length or query start that does not fit was met; its rows were skipped.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    word = torch.empty(1, dtype=torch.int64, device=device)
    _take_errors(word)
    if error := _error_of(word):
        raise error


def _error_of(word: Tensor) -> KVPagerError | None:
    bits = int(word.item())
    for bit, (argument, kind, wanted) in enumerate(DEVICE_ERRORS):
        if bits >> bit & 1:
            got = "others on the device; their rows were skipped"
            if kind is ArgumentError:
                return ArgumentError(argument, wanted, got)
            return SlotError(f"`{argument}`: wanted {wanted}, got {got}")
    return None
