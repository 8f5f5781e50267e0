"""How reports look: tables, labelled facts, plain text. In ASCII, so that they can be piped, logged
and pasted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from io import StringIO
from itertools import product, zip_longest
from operator import methodcaller
from textwrap import wrap
from typing import Any, ClassVar

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

TEXT_WIDTH = 100
_UNIT = re.compile(r"(?<=\d) (?=(?:[um]?s|[KMG]?i?B)\b)")
Fact = tuple[str, str]  # a label, and what stands beside it
percent = "{:.1%}".format


@singledispatch
def render(report: Any) -> RenderableType:
    """A report, plan or other record for a rich console."""
    raise TypeError(f"{type(report).__name__} has no tables")


def render_text(report: Any, width: int = TEXT_WIDTH) -> str:
    """A report, plan or other record as plain text of ``width`` columns, without a newline at the
    end.
    """
    return plain_text(render(report), width)


def plain_text(renderable: RenderableType, width: int = TEXT_WIDTH) -> str:
    file = StringIO()
    console = Console(
        file=file,
        width=width,
        color_system=None,
        force_terminal=False,
        _environ={},
    )
    console.print(renderable, crop=False)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def describe_sizes(sizes: Sequence[int]) -> str:
    """``(1, 2, 4, 8, 16, 24, 32)`` -> ``1, 2, 4, 8 to 32 by 8``; ``none`` if there are none."""
    parts: list[str] = []
    first = 0
    while first < len(sizes):
        last = min(first + 1, len(sizes) - 1)
        step = sizes[last] - sizes[first]
        while last + 1 < len(sizes) and sizes[last + 1] - sizes[last] == step:
            last += 1
        if last - first < 3:  # a shorter run reads better as it is
            parts.append(str(sizes[first]))
            first += 1
            continue
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
        return self.title.replace("-\n", "-").replace("\n", " ")

    def of(self, row: Any) -> Any:
        if callable(self.value):
            return self.value(row)
        value = row
        for name in self.value.split("."):
            if value is not None:
                value = value[int(name)] if name.isdigit() else getattr(value, name)
        return value

    def cell(self, row: Any) -> str:
        value = self.of(row)
        return "-" if value is None else self.format(value)


class TextColumn(Column):
    """Text, which stands left, and may go on in further lines."""

    left = True


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
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        shown = [column for column in self.columns if not column.on_page_alone]
        cells = [[self._cell(column, row) for row in self.rows] for column in shown]
        titles, widths, gap = self._fitted(
            shown,
            cells,
            options.max_width,
        )

        def line(
            words: Iterable[str],
            style: str = "",
        ) -> Text:
            placed: list[str] = []
            for column, word, width in zip(
                shown,
                words,
                widths,
                strict=True,
            ):
                placed.append(word.ljust(width) if column.left else word.rjust(width))
            return _line(((" " * gap).join(placed), style))

        upward = [reversed(title) for title in titles]  # the last lines stand side by side
        for words in reversed(list(zip_longest(*upward, fillvalue=""))):
            yield line(words, "bold")
        yield _line(("-" * (sum(widths) + gap * (len(widths) - 1)), ""))
        for row in zip(*cells, strict=True):
            wrapped = map(_wrapped, row, widths)
            for words in zip_longest(*wrapped, fillvalue=""):
                yield line(words)

    def _cell(self, column: Column, row: Any) -> str:
        cell = column.cell(row)
        return cell.replace(" ", "") if self._short and not column.left else cell

    def _fitted(
        self,
        columns: Sequence[Column],
        cells: list[list[str]],
        most: int,
    ) -> tuple[list[list[str]], list[int], int]:
        """Lines of each heading, widths of the columns, and the gap between them."""
        whole = [column.title.split("\n") for column in columns]
        broken = [
            re.sub(
                r"(?<=-)(?=\w)| ",
                "\n",
                column.title,
            ).split("\n")
            for column in columns
        ]
        every = list(cells)  # what has to fit into its column: the words of texts,
        none = list(cells)  # or nothing of a text, which runs over
        for place, column in enumerate(columns):
            if column.left:
                every[place] = _wrapped("\n".join(cells[place]), 1)
                none[place] = []
        words = [*cells[:1], *every[1:]]  # the first column stays in one line where it can
        none[:1] = cells[:1]
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
                widths = [
                    max(low, min(high, level))
                    for low, high in zip(
                        least,
                        wanted,
                        strict=True,
                    )
                ]
                if sum(widths) <= room:
                    return titles, widths, gap
        return titles, least, gap


def _widths(
    titles: Iterable[list[str]],
    pieces: Iterable[list[str]],
) -> list[int]:
    widths: list[int] = []
    for title, piece in zip(titles, pieces, strict=True):
        widths.append(
            max(
                map(
                    len,
                    [
                        "-",
                        *title,
                        *piece,
                    ],
                )
            )
        )
    return widths


def _wrapped(
    text: str,
    width: int,
) -> list[str]:
    """Lines of whole words; a number and its unit stay in one."""
    lines: list[str] = []
    for part in _UNIT.sub("\xa0", text).split("\n"):
        lines += wrap(
            part,
            max(width, 1),
            break_on_hyphens=False,
            break_long_words=False,
        ) or [""]
    return [line.replace("\xa0", " ") for line in lines]


def _line(*parts: tuple[str, str]) -> Text:
    """Text and style of each part. What is longer than the console runs over: rich would break a
    word.
    """
    return Text.assemble(*parts, no_wrap=True, overflow="ignore")


@dataclass(frozen=True)
class Drawing:
    """Lines that are drawn for the columns that there are."""

    draw: Callable[[int], Iterable[Text]]

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        yield from self.draw(options.max_width)


def facts(
    title: str,
    rows: Iterable[Fact],
) -> RenderableType:
    """A title over labelled lines; a line that is too long goes on under its own beginning, and
    words stay whole.
    """
    shown = list(rows)

    def draw(width: int) -> Iterator[Text]:
        longest = max((len(label) for label, _ in shown), default=0)
        widest = min(longest, width // 2)
        for label, value in shown:
            style = "yellow" if label == "warning" else ""
            labels = _wrapped(label, widest)
            values = _wrapped(value, width - widest - 4)
            for left, right in zip_longest(labels, values, fillvalue=""):
                yield _line((f"  {left:<{widest}}  ", style or "bold"), (right, style))

    return titled(title, Drawing(draw))


def labelled(
    label: str,
    texts: Iterable[str],
) -> list[Fact]:
    return [(label, text) for text in texts]


def titled(
    title: str,
    *parts: RenderableType | None,
) -> RenderableType:
    """Parts below each other under a title; None is left out."""
    shown = [part for part in parts if part is not None]
    return Group(
        sentences(
            title,
            style="bold",
            indent="",
        ),
        *shown,
    )


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
        columns.append(kind(name, methodcaller("get", name)))
    return Grid(rows, *columns)
