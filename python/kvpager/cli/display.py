"""`stream`: shows texts while they are generated.

One sequence is printed as it grows. Several grow at once: on a terminal each has a line that follows its end, and the
whole texts stand there afterwards; in a pipe or a log a line is printed when it is full, after its sequence's number.
"""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from kvpager.engine import LLM, Prompt, RequestOutput, StreamEvent
from kvpager.sampling import SamplingParams

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_LINE_WIDTH = 76


def stream(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, console: Console, *, titles: Sequence[str]
) -> list[RequestOutput]:
    """Run the prompts and show their texts as they come; the outputs, in the order of the prompts.

    Args:
        llm: the engine.
        prompts: B of them.
        params: for all.
        console: where the texts go.
        titles: B texts, shown as the beginning of each.
    """
    finished: dict[int, RequestOutput] = {}
    run = llm.stream(prompts, params)  # refuses before anything is shown

    def events() -> Iterator[StreamEvent]:
        for event in run:
            if event.output is not None:
                finished[event.index] = event.output
            yield event

    show = _show_one if len(titles) == 1 else _show_live if console.is_terminal else _show_lines
    show(events(), titles, console)
    return [finished[index] for index in sorted(finished)]


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
