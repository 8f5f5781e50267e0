"""How tables look: columns, labelled facts, plain text. In ASCII, so that they can be piped, logged and pasted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise

from rich.box import Box
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

TEXT_WIDTH = 100
# One rule under the header, in ASCII: a table can be piped, logged and pasted anywhere.
_RULED = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


def plain_text(renderable: RenderableType, width: int = TEXT_WIDTH) -> str:
    """What rich would show on a terminal of ``width`` columns, as plain text."""
    file = StringIO()
    Console(file=file, width=width, color_system=None, force_terminal=False, _environ={}).print(renderable)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def describe_sizes(sizes: Sequence[int]) -> str:
    """``(1, 2, 4, 8, 16, 24, 32)`` -> ``1, 2, 4, 8 to 32 by 8``; ``none`` if there are none."""
    parts: list[str] = []
    rest = list(sizes)
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 0
        length = 1 + next((i for i, (a, b) in enumerate(pairwise(rest)) if b - a != step), len(rest) - 1)
        if length < 4:  # a shorter run reads better as it is
            parts.append(str(rest[0]))
            length = 1
        else:
            parts.append(f"{rest[0]} to {rest[length - 1]}" + (f" by {step}" if step > 1 else ""))
        del rest[:length]
    return ", ".join(parts) or "none"


def columns(*names: str, left: Sequence[str] = (), gap: int = 2) -> Table:
    """An empty table with a ruled header. Columns hold numbers and stand right, except for those in ``left``.

    Where the width is too small, the first column stays whole.
    """
    table = Table(box=_RULED, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0), header_style="bold")
    for name in names:
        justify: JustifyMethod = "left" if name in left else "right"
        table.add_column(Text(name), justify=justify, overflow="fold", no_wrap=name == names[0])
    return table


def cells(*values: object) -> list[Text]:
    """A row as plain texts, None as a dash. What users write, such as ``[num_tokens, 64]``, is no rich markup."""
    return [Text("-" if value is None else str(value)) for value in values]


def facts(title: str, rows: Iterable[tuple[str, str]]) -> RenderableType:
    """A title over labelled lines; a line that is too long goes on under its own beginning."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in rows:
        style = "yellow" if label == "warning" else ""
        grid.add_row(Text(f"  {label}", style=style or "bold"), Text(value, style=style))
    return Group(Text(title, style="bold"), grid)


@dataclass(frozen=True, slots=True)
class Drawing:
    """Text that is drawn for the columns that it is given, at least 40 and at most 80."""

    draw: Callable[[int], str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield Text(self.draw(min(max(options.max_width, 40), 80)))


def sentences(*lines: str) -> RenderableType:
    """Remarks under a table, each on lines of its own."""
    return Group(*(Padding(Text(line), (0, 0, 0, 2)) for line in lines))


def filled(rows: Sequence[dict[str, object]], left: Sequence[str], gap: int = 2) -> Table:
    """A table of rows by column name; the first row has all columns."""
    table = columns(*rows[0], left=left, gap=gap)
    for row in rows:
        table.add_row(*cells(*(row.get(name) for name in rows[0])))
    return table
