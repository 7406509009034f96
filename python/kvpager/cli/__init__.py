"""The command ``kvpager``: `generate` text, show the `env`.

Commands are thin: options in, one call to the engine, display out. What is heavy (torch) is imported inside them, so
that ``--help`` is quick and `env` works where torch does not. An error that kvpager raises on purpose is one line on
stderr and exit code 2.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from kvpager.config import EngineConfig
from kvpager.errors import KVPagerError

app = typer.Typer(no_args_is_help=True, add_completion=False, help="A paged key/value cache and a small Qwen3 engine.")

# What the small model that comes with kvpager has seen: Python's documentation. Four lengths, so that tables differ.
BUILT_IN_PROMPTS = (
    "The for statement",
    "Return the file",
    'The "with" statement is used to wrap the execution of a block',
    "A class definition defines a class object. The base classes are evaluated first, then the class body is executed",
)

Model = Annotated[
    str | None, typer.Option(help="Model folder or hub name.", show_default="the small one that comes with kvpager")
]
MaxTokens = Annotated[int, typer.Option(help="New tokens per prompt, at most.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token, more draws at random.")]
Seed = Annotated[int, typer.Option(help="Of the random draws.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")]
Dtype = Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")]
BlockSize = Annotated[int, typer.Option(help="Token positions per block of the cache.")]


@app.command()
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Texts to complete.", show_default="built-in ones")
    ] = None,
    model: Model = None,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = EngineConfig.seed,
    device: Device = EngineConfig.device,
    dtype: Dtype = EngineConfig.dtype,
    block_size: BlockSize = EngineConfig.block_size,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")] = False,
) -> None:
    """Complete texts, all decoded together, each token shown as it comes."""
    from rich.console import Console

    from kvpager.cli.display import stream
    from kvpager.engine import LLM, Prompt
    from kvpager.sampling import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    llm = LLM(model, device=device, dtype=dtype, block_size=block_size, seed=seed)
    texts = prompts or list(BUILT_IN_PROMPTS)
    asked: list[Prompt] = [*texts]
    if chat:
        asked = [{"prompt_token_ids": llm.encode_chat([{"role": "user", "content": text}])} for text in texts]
    stream(llm, asked, params, Console(highlight=False), titles=texts)


@app.command()
def env() -> None:
    """Show versions, native library, instruction sets and GPU, and why what is inactive is so."""
    from kvpager.cli.environment import describe

    lines = describe()
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        typer.echo(f"{name:<{width}}  {value}")


def main() -> None:
    """Entry point of the command."""
    with errors_as_one_line():
        app()


@contextmanager
def errors_as_one_line() -> Iterator[None]:
    """Turns an error that kvpager raises on purpose into one line on stderr and exit code 2."""
    try:
        yield
    except KVPagerError as error:
        print(f"kvpager: {error}", file=sys.stderr)
        raise SystemExit(2) from None
