"""How reports look: tables, labelled facts, plain text. In ASCII, so that they can be piped, logged
and pasted.
"""

from __future__ import annotations

import re
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import singledispatch
from io import StringIO
from itertools import product, zip_longest
from operator import methodcaller
from textwrap import wrap
from typing import Any, ClassVar, NamedTuple

from rich.console import (
    Console,
    ConsoleOptions,
    Group,
    RenderableType,
)
from rich.text import Text

TEXT_WIDTH = 100
_UNIT = re.compile(r"(?<=\d) (?=(?:[um]?s|[KMG]?i?B)\b)")
_BREAK = re.compile(r"(?<=-)(?=\w)| ")  # where a heading may go on in the next line
Lines = list[str]
Fact = tuple[str, str]  # a label, and what stands beside it
percent = "{:.1%}".format


@singledispatch
def render(report: Any) -> RenderableType:
    """A report, plan or other record for a rich console."""
    raise TypeError(f"{type(report).__name__} has no tables")


def render_text(
    report: Any,
    width: int = TEXT_WIDTH,
) -> str:
    """A report, plan or other record as plain text of ``width`` columns, without a newline at the
    end.
    """
    return plain_text(render(report), width)


def plain_text(
    renderable: RenderableType,
    width: int = TEXT_WIDTH,
) -> str:
    file = StringIO()
    console = Console(
        file=file,
        width=width,
        color_system=None,
        force_terminal=False,
        _environ={},
    )
    console.print(renderable, crop=False)
    lines = file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines)


def describe_sizes(sizes: Sequence[int]) -> str:
    """``(1, 2, 4, 8, 16, 24, 32)`` -> ``1, 2, 4, 8 to 32 by 8``; ``none`` if there are none."""
    parts: list[str] = []
    first = 0
    while first < len(sizes):
        last = first
        step = 0
        for place in range(first + 1, len(sizes)):
            distance = sizes[place] - sizes[place - 1]
            if step not in (0, distance):
                break
            step = distance
            last = place
        if last - first < 3:  # a shorter run reads better as it is
            last = first
            parts.append(str(sizes[first]))
        else:
            by = f" by {step}" if step > 1 else ""
            parts.append(f"{sizes[first]} to {sizes[last]}{by}")
        first = last + 1
    return ", ".join(parts) or "none"


@dataclass(frozen=True)
class Column:
    """A column of a table: numbers, which stand right, in one line."""

    title: str  # may have several lines
    # dotted path of attributes and indices, or a function of the row; None: a dash
    value: str | Callable[[Any], Any]
    format: Callable[[Any], str] = str
    on_page_alone: bool = False  # in HTML, not in text

    left: ClassVar = False

    @property
    def name(self) -> str:
        """The title in one line."""
        title = self.title.replace("-\n", "-")
        return title.replace("\n", " ")

    def of(self, row: Any) -> Any:
        if callable(self.value):
            return self.value(row)
        value = row
        for name in self.value.split("."):
            if value is None:
                break
            value = value[int(name)] if name.isdigit() else getattr(value, name)
        return value

    def cell(self, row: Any) -> str:
        value = self.of(row)
        return "-" if value is None else self.format(value)


class TextColumn(Column):
    """Text, which stands left, and may go on in further lines."""

    left = True


class Fit(NamedTuple):
    """How a table stands in a console."""

    titles: list[Lines]
    widths: list[int]
    gap: int  # between columns


class Grid:
    """A table of rows under a ruled heading, for a console and for HTML.

    A console gets it fitted: where the whole is too wide, headings and then texts go on in further
    lines, and words stay whole. ``short``: numbers there have no space before their unit.
    """

    def __init__(
        self,
        rows: Iterable[Any],
        *columns: Column,
        gap: int = 2,
        short: bool = False,
    ) -> None:
        self.rows = list(rows)
        self.columns = columns
        self._gap = gap
        self._short = short

    def __rich_console__(
        self,
        console: Console,
        options: ConsoleOptions,
    ) -> Iterator[RenderableType]:
        columns = [column for column in self.columns if not column.on_page_alone]
        cells = [self._cells(column) for column in columns]
        titles, widths, gap = self._fitted(columns, cells, options.max_width)

        def line(words: Iterable[str], style: str = "") -> Text:
            placed: list[str] = []
            for column, word, width in zip(columns, words, widths, strict=True):
                fill = word.ljust if column.left else word.rjust
                placed.append(fill(width))
            text = (" " * gap).join(placed)
            return _line((text, style))

        upward = [reversed(title) for title in titles]  # the last lines stand side by side
        heads = list(zip_longest(*upward, fillvalue=""))
        for words in reversed(heads):
            yield line(words, "bold")
        length = sum(widths) + gap * (len(widths) - 1)
        yield _line(("-" * length, ""))
        for row in zip(*cells, strict=True):
            wrapped = map(_wrapped, row, widths)
            for words in zip_longest(*wrapped, fillvalue=""):
                yield line(words)

    def _cells(self, column: Column) -> Lines:
        cells = [column.cell(row) for row in self.rows]
        if self._short and not column.left:
            return [cell.replace(" ", "") for cell in cells]
        return cells

    def _fitted(
        self,
        columns: Sequence[Column],
        cells: list[Lines],
        most: int,
    ) -> Fit:
        whole: list[Lines] = []
        broken: list[Lines] = []
        every = list(cells)  # what has to fit into its column: the words of texts,
        none = list(cells)  # or nothing of a text, which runs over
        for place, column in enumerate(columns):
            whole.append(column.title.split("\n"))
            in_parts = _BREAK.sub("\n", column.title)
            broken.append(in_parts.split("\n"))
            if column.left:
                text = "\n".join(cells[place])
                every[place] = _wrapped(text, 1)
                none[place] = []
        none[:1] = cells[:1]
        words = [*cells[:1], *every[1:]]  # the first column stays in one line where it can
        fits = [
            *product(
                (self._gap, 1),
                (cells, words),
                (whole, broken),
            ),
            (1, every, broken),
            (1, none, broken),
        ]
        for gap, kept, titles in fits:
            least = _widths(titles, kept)
            wanted = _widths(titles, cells)
            room = most - gap * (len(columns) - 1)
            for level in range(most, 0, -1):  # the widest columns give way
                widths: list[int] = []
                for low, high in zip(least, wanted, strict=True):
                    widths.append(max(low, min(high, level)))
                if sum(widths) <= room:
                    return Fit(titles, widths, gap)
        return Fit(titles, least, gap)


def _widths(
    titles: Iterable[Lines],
    pieces: Iterable[Lines],
) -> list[int]:
    widths: list[int] = []
    for title, piece in zip(titles, pieces, strict=True):
        longest = 1
        for line in (*title, *piece):
            longest = max(longest, len(line))
        widths.append(longest)
    return widths


def _wrapped(text: str, width: int) -> Lines:
    """Lines of whole words; a number and its unit stay in one."""
    lines: Lines = []
    joined = _UNIT.sub("\xa0", text)
    for part in joined.split("\n"):
        found = wrap(
            part,
            max(width, 1),
            break_on_hyphens=False,
            break_long_words=False,
        )
        lines += found or [""]
    return [line.replace("\xa0", " ") for line in lines]


def _line(*parts: tuple[str, str]) -> Text:
    """Text and style of each part. What is longer than the console runs over: rich would break a
    word.
    """
    return Text.assemble(
        *parts,
        no_wrap=True,
        overflow="ignore",
    )


@dataclass(frozen=True)
class Drawing:
    """Lines that are drawn for the columns that there are."""

    draw: Callable[[int], Iterable[Text]]

    def __rich_console__(
        self,
        console: Console,
        options: ConsoleOptions,
    ) -> Iterator[RenderableType]:
        yield from self.draw(options.max_width)


def facts(title: str, rows: Iterable[Fact]) -> RenderableType:
    """A title over labelled lines; a line that is too long goes on under its own beginning, and
    words stay whole.
    """
    shown = list(rows)

    def draw(width: int) -> Iterator[Text]:
        widest = 0
        for label, _ in shown:
            widest = max(widest, len(label))
        widest = min(widest, width // 2)
        for label, value in shown:
            style = "yellow" if label == "warning" else ""
            labels = _wrapped(label, widest)
            values = _wrapped(value, width - widest - 4)
            for left, right in zip_longest(labels, values, fillvalue=""):
                head = f"  {left:<{widest}}  "
                yield _line((head, style or "bold"), (right, style))

    return titled(title, Drawing(draw))


def labelled(label: str, texts: Iterable[str]) -> list[Fact]:
    return [(label, text) for text in texts]


def titled(title: str, *parts: RenderableType | None) -> RenderableType:
    """Parts below each other under a title; None is left out."""
    shown = [part for part in parts if part is not None]
    head = sentences(title, style="bold", indent="")
    return Group(head, *shown)


def stacked(*parts: RenderableType | None) -> RenderableType:
    """Parts below each other with an empty line between them; None is left out."""
    lines: list[RenderableType] = []
    for part in parts:
        if part is not None:
            lines += [part, Text()]
    return Group(*lines[:-1])


def sentences(
    *lines: str,
    style: str = "",
    indent: str = "  ",
) -> RenderableType:
    text = "\n".join(lines)

    def draw(width: int) -> Iterator[Text]:
        for line in _wrapped(text, width - len(indent)):
            yield _line((indent + line, style))

    return Drawing(draw)


def filled(
    rows: Sequence[Mapping[str, object]],
    left: Sequence[str],
) -> RenderableType:
    """A table of rows by column name; the first row has all columns, and those in ``left`` hold
    text.
    """
    columns: list[Column] = []
    for name in rows[0]:
        kind = TextColumn if name in left else Column
        value = methodcaller("get", name)
        columns.append(kind(name, value))
    return Grid(rows, *columns)
