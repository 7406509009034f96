"""Decode several sequences of a Qwen3 together, their keys and values in one paged cache.

    python examples/qwen3_decode.py                                    built-in prompts, the small bundled model
    python examples/qwen3_decode.py "The for statement" --show-blocks  a prompt, and where its tokens lie
    python examples/qwen3_decode.py --model PATH_OR_NAME --check       compare every step with transformers

Each new token is shown as it comes; at the end stands what it took: tokens, tokens per second, blocks, waste.
"""

from typing import Annotated

import typer
from rich.console import Console

from kvpager import LLM, SamplingParams
from kvpager import cli as options
from kvpager.cli.display import Finished, block_tables, figures, stream
from kvpager.cli.verify import TOLERANCE, Comparison, compare_with_transformers


def decode(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Texts to complete.", show_default="four built-in")
    ] = None,
    model: options.Model = None,
    max_tokens: options.MaxTokens = 48,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    block_size: options.BlockSize = 16,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="Record no CUDA graphs.")] = False,
    show_blocks: Annotated[bool, typer.Option("--show-blocks", help="Show block tables and slots.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with transformers; exit 1 on a difference.")] = False,
) -> None:
    """Decode prompts together over a paged key/value cache."""
    console = Console(highlight=False)
    texts = prompts or list(options.BUILT_IN_PROMPTS)
    if check and dtype == "auto":
        dtype = "float32"  # the only one in which differences are small
    llm = LLM(model, device=device, dtype=dtype, block_size=block_size, seed=seed, enforce_eager=enforce_eager)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)

    finished = stream(llm, texts, params, console, titles=texts)
    console.print()
    console.print(figures(llm, finished))
    if show_blocks:
        console.print()
        console.print(block_tables(finished, block_size), soft_wrap=True)
    if check:
        compared = compare_with_transformers(llm, [each.output for each in finished], greedy=temperature == 0)
        report(console, llm, finished, compared)
        raise typer.Exit(0 if compared.passed else 1)


def report(console: Console, llm: LLM, finished: list[Finished], compared: Comparison) -> None:
    """What the comparison found, and whether it is good."""
    steps = sum(len(each.output.outputs[0].token_ids) for each in finished)
    request, step = compared.worst_step
    lines = [
        "",
        f"compared with transformers' eager attention in float32: {steps} steps, tolerance {TOLERANCE:g}",
        *(f"  attention output of layer {n:<3} differs by {most:.1e}" for n, most in enumerate(compared.attention)),
        f"  logits                        differ by  {compared.logits:.1e} (most in sequence {request}, step {step})",
    ]
    if (found := compared.divergence) is not None:
        ours, theirs = (llm.tokenizer.decode([token]) if llm.tokenizer else "" for token in (found.ours, found.theirs))
        lines.append(
            f"  first diverging token: sequence {found.request}, step {found.step}: {found.ours} {ours!r} here, "
            f"{found.theirs} {theirs!r} there, scores {found.gap:.1e} apart"
        )
    elif compared.greedy:
        lines.append("  no token diverges")
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
    console.print("passed" if compared.passed else "FAILED", style="green" if compared.passed else "bold red")


if __name__ == "__main__":
    with options.errors_as_one_line():
        typer.run(decode)
