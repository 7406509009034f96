"""The options that several commands share; `with_settings` gives a command one for each setting of the engine."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from kvpager.cache_dtypes import CACHE_DTYPES
from kvpager.config import EngineConfig, EngineSettings

Model = Annotated[
    str | None,
    typer.Option(help="Model folder, GGUF file or hub name.", show_default="the small one that comes with kvpager"),
]
ModelArgument = Annotated[str | None, typer.Argument(help="Model folder, GGUF file or hub name.")]
MaxTokens = Annotated[int, typer.Option(help="New tokens per prompt, at most.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token, more draws at random.")]
NumPrompts = Annotated[int, typer.Option(help="Requests.")]
InputLen = Annotated[int, typer.Option(help="Tokens of each prompt.")]
OutputLen = Annotated[int, typer.Option(help="Tokens of each answer.")]
OutputJson = Annotated[Path | None, typer.Option(help="Also write the figures here.")]

# Field of `EngineConfig` -> what its option says.
SETTINGS_HELP = {
    "device": "cpu, cuda, cuda:1, …",
    "dtype": "auto, float32, float16 or bfloat16.",
    "seed": "Of the random draws.",
    "block_size": "Token positions per block of the cache.",
    "num_blocks": "Blocks of the pool.",
    "kv_cache_memory_bytes": "Or the bytes that the pool may take.",
    "kv_cache_dtype": f"auto, or codes: {', '.join(each.name for each in CACHE_DTYPES if each.is_codes)}.",
    "eviction_policy": "Which cached blocks go first: lru or another policy of the block manager.",
    "enable_prefix_caching": "Find blocks that other requests computed for the same beginning.",
    "watermark_blocks": "Blocks that an admission leaves free while others run; 1 % of the pool if not given.",
    "max_num_seqs": "Most sequences that run together.",
    "max_num_batched_tokens": "Most tokens of a step; 2,048 if not given.",
    "max_model_len": "Most tokens of a sequence; the model's positions if not given.",
    "attention_backend": "auto, native, flashinfer, flash_attn or reference.",
    "fixed_split": "Tokens per split of a decode's attention; 0 cuts where it suits the device.",
    "enforce_eager": "Record no CUDA graphs.",
}


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `config` of a command by an option for each setting; the command gets an `EngineConfig`."""
    hints = get_type_hints(EngineSettings)
    defaults = {each.name: each.default for each in fields(EngineConfig)}
    own = [each for each in inspect.signature(command).parameters.values() if each.name != "config"]
    added = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults[name],
            annotation=Annotated[hints[name], typer.Option(help=text, rich_help_panel="Engine")],
        )
        for name, text in SETTINGS_HELP.items()
    ]

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        settings = {name: arguments.pop(name) for name in SETTINGS_HELP}
        command(**arguments, config=EngineConfig(**settings))

    run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in [*own, *added]}
    return run
