"""Progress on standard error: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

PLAIN_LINES = 10

Step = Callable[[int, int, str], None]


@contextmanager
def progress(doing: str) -> Iterator[Step]:
    """A block that gets ``step(index, total, what)``, to be called before each of ``total`` steps.

    Args:
        doing: What is under way, such as "capture"; nothing is shown where it is empty.
    """
    if not doing:
        yield lambda *_: None
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda index, total, what: _plain(console, doing, index, total, what)
        return
    bar = Progress(
        TextColumn("{task.fields[doing]}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=None, doing=doing)
        yield lambda index, total, what: bar.update(task, completed=index, total=total, description=what)


def _plain(console: Console, doing: str, index: int, total: int, what: str) -> None:
    """One line for each tenth of the way, and one for the last step."""
    first_of_its_tenth = index * PLAIN_LINES // total != (index - 1) * PLAIN_LINES // total
    if first_of_its_tenth or index == total - 1:
        console.file.write(f"{doing} {index + 1}/{total}: {what}\n")
        console.file.flush()
