"""How text and blocks are shown to people.

One sequence is printed as it grows. Several grow at once: on a terminal each has a line that follows its end, and the
whole texts stand there afterwards; in a pipe or a log a line is printed when it is full, after its sequence's number.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from kvpager.block_manager import SequenceState
from kvpager.engine import LLM, Prompt, RequestOutput, StreamEvent
from kvpager.sampling import SamplingParams

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_LINE_WIDTH = 76
_MOST_ROWS = 12  # of a block table shown in full


@dataclass(frozen=True)
class Finished:
    """A request at its end: its output, and its sequence as it was just before its blocks were given back."""

    output: RequestOutput
    sequence: SequenceState


def stream(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, console: Console, *, titles: Sequence[str]
) -> list[Finished]:
    """Runs the prompts and shows their texts as they come; what came of each, in the order of the prompts.

    Args:
        llm: the engine.
        prompts: B of them.
        params: for all.
        console: where to.
        titles: B texts, shown as the beginning of each.
    """
    finished: list[Finished] = []
    run = llm.stream(prompts, params)  # refuses before anything is shown

    def events() -> Iterator[StreamEvent]:
        for event in run:
            if event.output is not None and event.sequence is not None:
                finished.append(Finished(event.output, event.sequence))
            yield event

    show = _show_one if len(titles) == 1 else _show_live if console.is_terminal else _show_lines
    show(events(), titles, console)
    return sorted(finished, key=lambda each: int(each.output.request_id))


def _show_one(events: Iterable[StreamEvent], titles: Sequence[str], console: Console) -> None:
    console.print(Text(titles[0], style="bold"), end="", soft_wrap=True)
    for event in events:
        console.print(Text(event.text), end="", soft_wrap=True)
        console.file.flush()
    console.print()


def _show_live(events: Iterable[StreamEvent], titles: Sequence[str], console: Console) -> None:
    texts = [""] * len(titles)
    with Live(console=console, transient=True, refresh_per_second=15) as live:
        for event in events:
            texts[event.index] += event.text
            live.update(_last_words(titles, texts, console.width))
    for index, (title, text) in enumerate(zip(titles, texts, strict=True)):
        body = Text(title, style="bold") + Text(text, style="not bold")
        console.print(Panel(body, title=str(index), title_align="left", border_style=_colour(index)))


def _last_words(titles: Sequence[str], texts: Sequence[str], width: int) -> Text:
    shown = Text(no_wrap=True, overflow="crop")
    for index, (title, text) in enumerate(zip(titles, texts, strict=True)):
        flat = (title + text).replace("\n", "↵")
        shown.append(f"{index} ", style=_colour(index)).append(flat[-(width - 4) :] + "\n")
    return shown


def _show_lines(events: Iterable[StreamEvent], titles: Sequence[str], console: Console) -> None:
    pending = list(titles)

    def put(index: int, line: str) -> None:
        if not line.strip():
            return
        console.print(Text(f"{index} │ {line}"), soft_wrap=True)
        console.file.flush()

    for event in events:
        text = pending[event.index] + event.text
        while "\n" in text or len(text) > _LINE_WIDTH:
            line, text = _cut(text)
            put(event.index, line)
        pending[event.index] = text
        if event.finish_reason is not None and text:
            put(event.index, text)


def _cut(text: str) -> tuple[str, str]:
    """The first line of a text, at its own line break or at the last blank before it gets too wide; and the rest."""
    first, found, rest = text.partition("\n")
    if found and len(first) <= _LINE_WIDTH:
        return first, rest
    at = text.rfind(" ", 1, _LINE_WIDTH + 1)
    return (text[:_LINE_WIDTH], text[_LINE_WIDTH:]) if at < 0 else (text[:at], text[at + 1 :])


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


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
        shown.append(f"sequence {index}", style=f"bold {_colour(index)}")
        shown.append(f": {state.sequence_length} positions in {_count(len(table), 'block')}, block table {table}\n")
        rows = [_block_row(state, logical, block_size) for logical in range(len(table))]
        if len(rows) > _MOST_ROWS:
            half = _MOST_ROWS // 2
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
