"""Decode several sequences of a Qwen3 together, their keys and values in one paged cache.

    python examples/qwen3_decode.py                                    built-in prompts, the small bundled model
    python examples/qwen3_decode.py "The for statement" --show-blocks  a prompt, and where its tokens lie
    python examples/qwen3_decode.py --model PATH_OR_NAME --check       compare every step with transformers

On a terminal each new token is shown as it comes; behind the texts stand tokens, tokens per second, blocks and waste.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvpager import LLM, RequestOutput, SamplingParams, SequenceState
from kvpager.errors import KVPagerError
from kvpager.verify import TOLERANCE, Comparison, compare_with_transformers

# What the bundled model has seen: Python's documentation. Four lengths, so that tables differ.
PROMPTS = (
    "The for statement",
    "Return the file",
    'The "with" statement is used to wrap the execution of a block',
    "A class definition defines a class object. The base classes are evaluated first, then the class body is executed",
)
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
MOST_ROWS = 12  # of a block table shown in full


@dataclass(frozen=True)
class Finished:
    """A request at its end: its output, and its sequence as it was just before its blocks were given back."""

    output: RequestOutput
    sequence: SequenceState


def decode(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Texts to complete.", show_default="four built-in")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model folder, GGUF file or hub name.")] = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens per prompt, at most.")] = 48,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the random draws.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")] = "cpu",
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, int8, fp8_e4m3, …")] = "auto",
    block_size: Annotated[int, typer.Option(help="Token positions per block of the cache.")] = 16,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="Record no CUDA graphs.")] = False,
    show_blocks: Annotated[bool, typer.Option("--show-blocks", help="Show block tables and slots.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with transformers; exit 1 on a difference.")] = False,
) -> None:
    """Decode prompts together over a paged key/value cache."""
    console = Console(highlight=False)
    if check and dtype == "auto":
        dtype = "float32"  # the only one in which differences are small
    llm = LLM(
        model, device=device, dtype=dtype, kv_cache_dtype=kv_cache_dtype, block_size=block_size, seed=seed,
        enforce_eager=enforce_eager,
    )  # fmt: skip
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)

    finished = stream(llm, prompts or PROMPTS, params, console)
    console.print(figures(llm, finished))
    if show_blocks:
        console.print()
        console.print(block_tables(finished, block_size), soft_wrap=True)
    if check:
        compared = compare_with_transformers(llm, [each.output for each in finished], greedy=temperature == 0)
        report(console, llm, finished, compared)
        raise typer.Exit(0 if compared.passed else 1)


def stream(llm: LLM, prompts: Sequence[str], params: SamplingParams, console: Console) -> list[Finished]:
    """Complete the prompts; the end of each text as it grows, if this is a terminal, and all whole texts at the end."""
    texts, finished = list(prompts), dict[int, Finished]()
    with Live(console=console, transient=True, refresh_per_second=15) as live:
        for event in llm.stream(list(prompts), params):
            texts[event.index] += event.text
            if event.output is not None and event.sequence is not None:
                finished[event.index] = Finished(event.output, event.sequence)
            if console.is_terminal:
                ends = [text.replace("\n", "↵")[-console.width + 1 :] for text in texts]
                live.update(Text("\n".join(ends), no_wrap=True))
    for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        shown = Text(prompt, style=f"bold {COLOURS[index % len(COLOURS)]}")
        console.print(shown.append(text[len(prompt) :], style="not bold default"), end="\n\n", soft_wrap=True)
    return [finished[index] for index in sorted(finished)]


def figures(llm: LLM, finished: Sequence[Finished]) -> Table:
    """A table of the run: tokens and blocks of each sequence, speed and waste of the whole."""
    stats, block_size = llm.last_run, llm.config.block_size
    table = Table(
        title=f"{_count(len(finished), 'sequence')} over blocks of {block_size} positions", title_justify="left"
    )
    table.add_column("sequence", no_wrap=True)
    for name in ("prompt\ntokens", "new\ntokens", "ended\nby", "blocks", "unused\nslots"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, each in enumerate(finished):
        completion, state = each.output.outputs[0], each.sequence
        unused = len(state.block_table) * block_size - state.sequence_length
        table.add_row(
            str(index),
            str(len(each.output.prompt_token_ids)),
            str(len(completion.token_ids)),
            str(completion.finish_reason),
            str(len(state.block_table)),
            str(unused),
        )
    wasted, positions = stats.peak_fragmentation_tokens, stats.peak_blocks * block_size
    blocks = f"{stats.peak_blocks} of {llm.block_manager.num_blocks}"
    table.add_section()
    table.add_row("all, at the peak", str(stats.num_prompt_tokens), str(stats.num_new_tokens), "", blocks, f"{wasted}")
    table.add_row("internal fragmentation", "", "", "", "", _percent(wasted, positions))
    prefill, decode = (
        _rate(stats.num_prompt_tokens, stats.prefill_seconds),
        _rate(stats.num_decoded_tokens, stats.decode_seconds),
    )
    table.add_row("tokens/s prefill, decode", prefill, decode)
    return table


def block_tables(finished: Sequence[Finished], block_size: int) -> Text:
    """Each sequence's block table, and the slots that its token positions lie in."""
    shown = Text()
    for index, each in enumerate(finished):
        state = each.sequence
        table = list(state.block_table)
        shown.append(f"sequence {index}", style=f"bold {COLOURS[index % len(COLOURS)]}")
        shown.append(f": {state.sequence_length} positions in {_count(len(table), 'block')}, block table {table}\n")
        rows = [_block_row(state, logical, block_size) for logical in range(len(table))]
        if len(rows) > MOST_ROWS:
            half = MOST_ROWS // 2
            rows = [*rows[:half], f"  … {len(rows) - 2 * half} more blocks …", *rows[-half:]]
        shown.append("\n".join(rows) + "\n")
    shown.append(f"slot = block · {block_size} + position mod {block_size}; the last token sampled takes no slot\n")
    return shown


def _block_row(state: SequenceState, logical: int, block_size: int) -> str:
    block = state.block_table[logical]
    first, end = logical * block_size, min((logical + 1) * block_size, state.sequence_length)
    slot, last = block * block_size, end - 1
    empty = block_size - (end - first)
    row = f"  positions {first:>4} … {last:<4}  block {block:>4}  slots {slot:>5} … {slot + last - first:<5}"
    return row.rstrip() if not empty else f"{row}  {empty} unused"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:,.0f}" if seconds else "-"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def report(console: Console, llm: LLM, finished: Sequence[Finished], compared: Comparison) -> None:
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
    try:
        typer.run(decode)
    except KVPagerError as error:
        print(f"kvpager: {error}", file=sys.stderr)
        raise SystemExit(2) from None
