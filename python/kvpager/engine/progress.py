"""A progress bar on stderr for long runs."""

from collections.abc import Iterable, Iterator

from kvpager.engine.outputs import StreamEvent


def track(events: Iterable[StreamEvent], num_requests: int) -> Iterator[StreamEvent]:
    """Passes events on, and shows requests done of all and tokens per second meanwhile."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    num_tokens = 0
    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=5) as progress:
        task = progress.add_task("requests", total=num_requests, rate="")
        for event in events:
            num_tokens += event.token_id >= 0
            elapsed = progress.tasks[0].elapsed
            rate = f"{num_tokens / elapsed:,.0f} tokens/s" if elapsed else ""
            progress.update(task, advance=1 if event.output is not None else 0, rate=rate)
            yield event
