"""kvpager: a paged key/value cache for large language models.

``import kvpager`` is cheap: neither torch nor numpy is loaded until a name that needs them is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpager.block_manager import Admission as Admission
    from kvpager.block_manager import KVBlockManager as KVBlockManager
    from kvpager.block_manager import SequenceState as SequenceState
    from kvpager.cache import AttentionMetadata as AttentionMetadata
    from kvpager.cache import PagedKVCache as PagedKVCache
    from kvpager.decode_batch import BatchBuffers as BatchBuffers
    from kvpager.decode_batch import BatchStep as BatchStep
    from kvpager.decode_batch import DecodeBatch as DecodeBatch
    from kvpager.engine import LLM as LLM
    from kvpager.engine import CompletionOutput as CompletionOutput
    from kvpager.engine import Engine as Engine
    from kvpager.engine import RequestOutput as RequestOutput
    from kvpager.sampling import SamplingParams as SamplingParams

# Public name -> the module that defines it, imported on first use.
_HOMES = {
    "KVBlockManager": "kvpager.block_manager",
    "SequenceState": "kvpager.block_manager",
    "Admission": "kvpager.block_manager",
    "DecodeBatch": "kvpager.decode_batch",
    "BatchBuffers": "kvpager.decode_batch",
    "BatchStep": "kvpager.decode_batch",
    "AttentionMetadata": "kvpager.cache",
    "PagedKVCache": "kvpager.cache",
    "LLM": "kvpager.engine",
    "Engine": "kvpager.engine",
    "RequestOutput": "kvpager.engine",
    "CompletionOutput": "kvpager.engine",
    "SamplingParams": "kvpager.sampling",
}
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
