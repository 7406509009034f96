"""The dtypes that a cache can hold: the one list in Python. A new dtype is one entry here.

Checks, error texts, the formula of bytes, `quantise` and the command line derive from it. A cache holds numbers as they
are, or codes: then each row of D elements has a float32 scale beside it, and code · scale is the number. The kernels
have their own list (csrc/types.h). No torch here: a dtype of torch is named, so that anything may import this module.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvpager.errors import ConfigError

SCALE_BYTES = 4  # float32


@dataclass(frozen=True)
class CacheDtype:
    """What a cache can hold.

    Attributes:
        name: as users write it.
        torch_name: of the dtype in torch.
        element_bytes: bytes of one element.
        largest_code: largest magnitude of a code; None: numbers, which have no scales.
    """

    name: str
    torch_name: str
    element_bytes: int
    largest_code: float | None = None

    @property
    def is_codes(self) -> bool:
        """Whether rows are codes with scales."""
        return self.largest_code is not None

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of one row of K or of V; 0 for numbers."""
        return SCALE_BYTES if self.is_codes else 0


CACHE_DTYPES = (
    CacheDtype("float32", "float32", 4),
    CacheDtype("float16", "float16", 2),
    CacheDtype("bfloat16", "bfloat16", 2),
    CacheDtype("float64", "float64", 8),
    CacheDtype("int8", "int8", 1, largest_code=127.0),
    CacheDtype("fp8_e4m3", "float8_e4m3fn", 1, largest_code=448.0),
    CacheDtype("fp8_e5m2", "float8_e5m2", 1, largest_code=57344.0),
)
_BY_NAME = {name: dtype for dtype in CACHE_DTYPES for name in (dtype.torch_name, dtype.name)}


def cache_dtype(dtype: object, argument: str = "dtype") -> CacheDtype:
    """The entry of a dtype: by its name here, its name in torch, or as a `torch.dtype`.

    Raises:
        ConfigError: no cache holds that dtype; `argument` names the setting.
    """
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if (found := _BY_NAME.get(name)) is None:
        wanted = one_of(known.name for known in CACHE_DTYPES)
        raise ConfigError(f"`{argument}`: wanted {wanted}, got {dtype}")
    return found


def one_of(names: Iterable[str]) -> str:
    """The names as a text, as in "float32, float16 or int8"."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
