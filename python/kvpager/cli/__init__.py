"""The command ``kvpager``: `generate` text, `chat`, `plan` and `verify` a model, `bench` it, show the `env`.

Commands are thin: options in, one call to the library, display out. torch is imported inside them, so that ``--help``
is quick and `env` works where torch does not. An error that kvpager raises on purpose is one line on stderr and exit
code 2.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpager.cli import options
from kvpager.config import EngineConfig
from kvpager.errors import ConfigError, KVPagerError

if TYPE_CHECKING:
    from kvpager.engine import LLM

app = typer.Typer(no_args_is_help=True, add_completion=False, help="A paged key/value cache and a small engine.")
bench_app = typer.Typer(no_args_is_help=True, help="Measure throughput or latency with random token ids.")
app.add_typer(bench_app, name="bench")

# What the small model that comes with kvpager has seen: Python's documentation. Four lengths, so that tables differ.
BUILT_IN_PROMPTS = (
    "The for statement",
    "Return the file",
    'The "with" statement is used to wrap the execution of a block',
    "A class definition defines a class object. The base classes are evaluated first, then the class body is executed",
)


@app.command()
@options.with_settings
def generate(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Texts to complete.", show_default="built-in ones")
    ] = None,
    *,
    model: options.Model = None,
    max_tokens: options.MaxTokens = 64,
    temperature: options.Temperature = 0.0,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")] = False,
    config: EngineConfig,
) -> None:
    """Complete texts, all decoded together, each token shown as it comes."""
    from rich.console import Console

    from kvpager.cli.display import stream
    from kvpager.engine import LLM, Prompt
    from kvpager.sampling import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    llm = LLM(model, config=config)
    texts = prompts or list(BUILT_IN_PROMPTS)
    asked: list[Prompt] = [*texts]
    if chat:
        asked = [{"prompt_token_ids": llm.encode_chat([{"role": "user", "content": text}])} for text in texts]
        texts = [f"{text}\n" for text in texts]  # an answer does not continue the question's line
    stream(llm, asked, params, Console(highlight=False), titles=texts)


@app.command()
@options.with_settings
def chat(
    *,
    model: options.Model = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest that hold this share.")] = 1.0,
    config: EngineConfig,
) -> None:
    """Talk with a model; /clear forgets the conversation, /exit or Ctrl-D ends it."""
    from rich.console import Console

    from kvpager.cli.chat import converse, piped_lines, typed_lines
    from kvpager.engine import LLM
    from kvpager.sampling import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    llm = LLM(model, config=config)
    lines: Iterable[str] = typed_lines(input) if sys.stdin.isatty() else piped_lines(sys.stdin.buffer)
    converse(llm, params, lines, Console(highlight=False), system=system)


@app.command()
@options.with_settings
def plan(model: options.ModelArgument = None, *, config: EngineConfig) -> None:
    """Show what a model and its cache take and what fits, before anything is loaded."""
    from kvpager.cli.plan import describe, make_plan
    from kvpager.loader import open_model

    _show(describe(make_plan(open_model(model), config)))


@app.command()
def verify(
    model: options.ModelArgument = None,
    max_tokens: options.MaxTokens = 32,
    device: Annotated[str, typer.Option(help=options.SETTINGS_HELP["device"])] = EngineConfig.device,
    block_size: Annotated[int, typer.Option(help=options.SETTINGS_HELP["block_size"])] = EngineConfig.block_size,
) -> None:
    """Compare with transformers token for token: batches, chunks, hits, preemption, forks. Exit 1 on a difference."""
    from kvpager.engine import LLM
    from kvpager.verify import report, run_scenarios

    llm = LLM(model, device=device, dtype="float32", block_size=block_size, num_blocks=1)
    prompts = _verified_prompts(llm)
    verdicts = run_scenarios(llm, prompts, max_tokens)
    for line in report(verdicts, len(prompts)):
        typer.echo(line)
    if not all(verdict.passed for verdict in verdicts):
        raise typer.Exit(1)


def _verified_prompts(llm: "LLM") -> list[list[int]]:
    """Several lengths, two with a common beginning of some blocks; token ids where the model has no tokenizer."""
    if llm.tokenizer is None:
        bounded = llm.model_config.vocab_size - 3
        return [[3 + (7 * n + 31 * p * p) % bounded for p in range(length)] for n, length in enumerate((1, 5, 18, 50))]
    common = " ".join(BUILT_IN_PROMPTS)
    texts = [*BUILT_IN_PROMPTS, f"{common} Then it", f"{common} Otherwise the"]
    return [llm.tokenizer.encode(text) for text in texts]


@bench_app.command("throughput")
@options.with_settings
def bench_throughput(
    *,
    model: options.Model = None,
    num_prompts: options.NumPrompts = 32,
    input_len: options.InputLen = 128,
    output_len: options.OutputLen = 64,
    output_json: options.OutputJson = None,
    config: EngineConfig,
) -> None:
    """Many requests at once: tokens per second."""
    from kvpager.cli import bench
    from kvpager.engine import LLM

    llm = LLM(model, config=config)
    figures = bench.throughput(llm, num_prompts=num_prompts, input_len=input_len, output_len=output_len)
    _show(bench.lines(figures))
    bench.save(figures, output_json)


@bench_app.command("latency")
@options.with_settings
def bench_latency(
    *,
    model: options.Model = None,
    batch_size: Annotated[int, typer.Option(help="Requests of a batch.")] = 8,
    input_len: options.InputLen = 32,
    output_len: options.OutputLen = 64,
    num_iters: Annotated[int, typer.Option(help="Batches that count.")] = 5,
    output_json: options.OutputJson = None,
    config: EngineConfig,
) -> None:
    """One batch at a time: milliseconds to the first token, between tokens, in all."""
    from kvpager.cli import bench
    from kvpager.engine import LLM

    llm = LLM(model, config=config)
    figures = bench.latency(llm, batch_size=batch_size, input_len=input_len, output_len=output_len, num_iters=num_iters)
    _show(bench.lines(figures))
    bench.save(figures, output_json)


@app.command()
def trace(file: Annotated[Path, typer.Argument(help="Written by `LLM(…, trace=FILE)`.")]) -> None:
    """Show a trace of steps as log lines: what each did, and why others waited."""
    import json

    from kvpager.engine import as_line

    try:
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read `{file}`: {error}") from error
    for record in records:
        typer.echo(as_line(record))


@app.command("build-cuda")
def build_cuda(
    arch: Annotated[str | None, typer.Option(help="sm_80, sm_90, …", show_default="that of the GPU at hand")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show commands and what compilers say.")] = False,
) -> None:
    """Compile the native library, CUDA kernels included, for this GPU and torch; later runs load it."""
    import torch

    from kvpager.native import gpu_arch
    from kvpager.native.cache import arch_generation, compile_library

    if (wanted := arch or gpu_arch()) is None:
        raise ConfigError("torch sees no GPU; name what to compile for, as in `--arch sm_90`")
    arch_generation(wanted)  # what can't be compiled for is refused before minutes are announced
    typer.echo(f"compiling for {wanted} and torch {torch.__version__}; this takes minutes")
    typer.echo(f"compiled: {compile_library(torch.__version__, wanted, verbose=verbose)}")


@app.command()
def env() -> None:
    """Show versions, native library, instruction sets and GPU, and why what is inactive is so."""
    from kvpager.cli.environment import describe

    _show(describe())


def _show(lines: list[tuple[str, str]]) -> None:
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
