"""The container of a GGUF file: its fields and where its tensors lie. Reads versions 2 and 3, little-endian.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Read here rather than by the `gguf` package, which
takes seconds for a vocabulary; that one is needed only to dequantise. The file is mapped, not read. O(header).
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpager.errors import ConfigError

_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: np.uint8,
    1: np.int8,
    2: np.uint16,
    3: np.int16,
    4: np.uint32,
    5: np.int32,
    6: np.float32,
    7: np.bool_,
    10: np.uint64,
    11: np.int64,
    12: np.float64,
}
_DEEPEST = 4  # arrays in arrays


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies.

    Attributes:
        shape: rows first, as torch has it (the file names the fastest dimension first).
        type_id: of ggml: 0 is float32, 1 float16, 30 bfloat16, others are quantised.
        offset: of its first byte in the file.
    """

    shape: tuple[int, ...]
    type_id: int
    offset: int


class GGUFFile:
    """Fields and tensors of a file.

    Attributes:
        path: of the file.
        fields: name → number, bool, text or list of those.
        tensors: name → where it lies.
        content: [bytes of the file] uint8, mapped.

    Raises:
        ConfigError: it can't be read, is no GGUF file, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.content: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
            raise ConfigError(f"can't read `{path}`: {error}") from error
        try:
            self.fields, self.tensors = _read(_Reader(self.content.data))
        except (struct.error, ValueError, IndexError, OverflowError, MemoryError) as error:
            raise ConfigError(f"`{path}` is no sound GGUF file: {error}") from error

    def raw(self, name: str, num_bytes: int) -> NDArray[np.uint8]:
        """The bytes of a tensor, mapped.

        Raises:
            ConfigError: they reach past the end of the file.
        """
        start = self.tensors[name].offset
        if start + num_bytes > len(self.content):
            raise ConfigError(
                f"`{self.path}` is cut off: tensor `{name}` ends at byte {start + num_bytes} of {len(self.content)}"
            )
        return self.content[start : start + num_bytes]


class _Reader:
    """Takes one value after the other off a buffer."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self.offset = 0

    def take(self, num_bytes: int) -> memoryview:
        end = self.offset + num_bytes
        if end > len(self._buffer):
            raise ValueError(f"it ends at byte {len(self._buffer)}, byte {end} is asked for")
        part = self._buffer[self.offset : end]
        self.offset = end
        return part

    def unpack(self, form: str) -> Any:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]

    def text(self) -> str:
        return str(self.take(self.unpack("Q")), "utf-8", "replace")

    def value(self, type_id: int, depth: int = 0) -> Any:
        if type_id == _STRING:
            return self.text()
        if type_id == _ARRAY:
            inner, length = self.unpack("I"), self.unpack("Q")
            if inner in _NUMBERS:
                dtype = np.dtype(_NUMBERS[inner]).newbyteorder("<")
                return np.frombuffer(self.take(length * dtype.itemsize), dtype).tolist()
            if depth == _DEEPEST or length > len(self._buffer):
                raise ValueError(f"an array of {length} arrays, {depth} deep")
            return [self.value(inner, depth + 1) for _ in range(length)]
        if type_id not in _NUMBERS:
            raise ValueError(f"a field of unknown type {type_id}")
        dtype = np.dtype(_NUMBERS[type_id]).newbyteorder("<")
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()


def _read(reader: _Reader) -> tuple[Mapping[str, Any], Mapping[str, GGUFTensor]]:
    if bytes(reader.take(4)) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = reader.unpack("I")
    if version not in (2, 3):
        raise ValueError(f"version {version}, supported: 2, 3 (little-endian)")
    num_tensors, num_fields = reader.unpack("Q"), reader.unpack("Q")
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        name = reader.text()
        fields[name] = reader.value(reader.unpack("I"))
    found = [_tensor(reader) for _ in range(num_tensors)]
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"`general.alignment` is {alignment}")
    start = -(-reader.offset // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, type_id, offset in found:
        if name in tensors:
            raise ValueError(f"tensor `{name}` is stored twice")
        tensors[name] = GGUFTensor(shape, type_id, start + offset)
    return fields, tensors


def _tensor(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    name, num_dims = reader.text(), reader.unpack("I")
    if num_dims > 4:
        raise ValueError(f"tensor `{name}` has {num_dims} dimensions")
    shape = tuple(reader.unpack("Q") for _ in range(num_dims))
    return name, shape[::-1], reader.unpack("I"), reader.unpack("Q")
