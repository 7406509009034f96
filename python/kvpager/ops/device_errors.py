"""From what the kernels say to the classes of `kvpager.errors`, and the errors that wait on a device.

A C++ kernel on the CPU raises RuntimeError with the text ``SlotError: …`` or ``ArgumentError: `name`: wanted …, got
…``. A CUDA kernel can't raise: it skips the row and sets a bit of a device error word, which
`kvpager.ops.check_errors` fetches.
"""

import os
import re

from kvpager.errors import ArgumentError, KVPagerError, SlotError

# Bit of the device error word -> (argument, class, what was wanted). The bits are those of csrc/cuda/device/errors.cuh.
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
    ("split_plan", ArgumentError, "one that make_split_plan made for these `seq_lens` and `fixed_split`"),
)

# What an op raises when it refuses its arguments: a kernel's text, or torch's words for what has no such shape.
REFUSALS = (RuntimeError, IndexError, ArithmeticError, AttributeError, TypeError)
# Ask the device after every call; set by the environment when kvpager is imported.
CHECKED = os.environ.get("KVPAGER_CHECKED") == "1"

_ARGUMENT_TEXT = re.compile(r"ArgumentError: `(\w+)`: wanted (.*), got (.*)")
_SLOT_TEXT = re.compile(r"SlotError: (.*)")
# What torch says of a value that an op's schema does not allow.
_SCHEMA_TEXT = re.compile(
    r"Expected a value of type '(\w+)\S*' for argument '(\w+)' but .* type '(\w+)'.*\n.*\n?Value: (.*)"
)
_WANTED = {"int": "a whole number of 64 bits", "float": "a number"}


def typed_error(error: Exception) -> Exception:
    """The kvpager error that a kernel's RuntimeError stands for; the error itself if it is another one."""
    text = str(error)
    if found := _SLOT_TEXT.search(text):
        return SlotError(found[1])
    if found := _ARGUMENT_TEXT.search(text):
        return ArgumentError(found[1], found[2], found[3])
    return error


def refused_number(error: Exception) -> ArgumentError | None:
    """The kvpager error for a number that does not fit an op's schema; None if that is not what torch says."""
    if found := _SCHEMA_TEXT.search(str(error)):
        return ArgumentError(found[2], _WANTED.get(found[1], found[1]), f"{found[4]} ({found[3]})")
    return None


def error_of(bits: int) -> KVPagerError | None:
    """The first error that a device's error word tells of."""
    for bit, (argument, kind, wanted) in enumerate(DEVICE_ERRORS):
        if bits >> bit & 1:
            got = "others on the device; their rows were skipped"
            if kind is ArgumentError:
                return ArgumentError(argument, wanted, got)
            return SlotError(f"`{argument}`: wanted {wanted}, got {got}")
    return None
