"""kvpager: a paged key/value cache for large language models.

``import kvpager`` is cheap: neither torch nor numpy is loaded until a name that needs them is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpager.cache import AttentionMetadata as AttentionMetadata
    from kvpager.cache import PagedKVCache as PagedKVCache
    from kvpager.engine import LLM as LLM
    from kvpager.engine import CompletionOutput as CompletionOutput
    from kvpager.engine import Engine as Engine
    from kvpager.engine import RequestOutput as RequestOutput
    from kvpager.manager import Admission as Admission
    from kvpager.manager import BatchBuffers as BatchBuffers
    from kvpager.manager import BatchStep as BatchStep
    from kvpager.manager import DecodeBatch as DecodeBatch
    from kvpager.manager import KVBlockManager as KVBlockManager
    from kvpager.manager import SequenceState as SequenceState
    from kvpager.sampling import SamplingParams as SamplingParams

# Module -> its names that are public here. The module is imported when one is first used. Type checkers can't follow
# that: for them the names stand above, and a test keeps the two alike.
_NAMES = {
    "manager": ("KVBlockManager", "SequenceState", "Admission", "DecodeBatch", "BatchBuffers", "BatchStep"),
    "cache": ("AttentionMetadata", "PagedKVCache"),
    "engine": ("LLM", "Engine", "RequestOutput", "CompletionOutput"),
    "sampling": ("SamplingParams",),
}
_HOMES = {name: f"kvpager.{module}" for module, names in _NAMES.items() for name in names}
_SUBMODULES = ("errors", "ops")

__all__ = [*_HOMES, *_SUBMODULES, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name in _SUBMODULES:
        value = import_module(f"kvpager.{name}")
    elif name == "__version__":
        from kvpager._core import __version__ as value
    else:
        raise AttributeError(f"module `kvpager` has no attribute `{name}`")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
