"""How reports look: tables, labelled facts, plain text. In ASCII, so that they can be piped, logged
and pasted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch
from io import StringIO
from itertools import pairwise, product, zip_longest
from operator import methodcaller
from textwrap import wrap
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.text import Text

TEXT_WIDTH = 100
_UNIT = re.compile(r"(?<=\d) (?=(?:[um]?s|[KMG]?i?B)\b)")
Fact = tuple[str, str]  # a label, and what stands beside it


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
    console = Console(file=file, width=width, color_system=None, force_terminal=False, _environ={})
    console.print(renderable, crop=False)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def describe_sizes(sizes: Sequence[int]) -> str:
    """``(1, 2, 4, 8, 16, 24, 32)`` -> ``1, 2, 4, 8 to 32 by 8``; ``none`` if there are none."""
    parts: list[str] = []
    rest = list(sizes)
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 0
        length = 1 + next(
            (i for i, (a, b) in enumerate(pairwise(rest)) if b - a != step), len(rest) - 1
        )
        if length < 4:  # a shorter run reads better as it is
            parts.append(str(rest[0]))
            length = 1
        else:
            parts.append(f"{rest[0]} to {rest[length - 1]}" + (f" by {step}" if step > 1 else ""))
        del rest[:length]
    return ", ".join(parts) or "none"


@dataclass(frozen=True)
class Column:
    title: str  # may have several lines
    # dotted path of attributes and indices, or a function of the row; None: a dash
    value: str | Callable[[Any], Any]
    format: Callable[[Any], str] = str
    left = False  # text, which may go on in the next line; numbers stand right, in one line

    def cell(self, row: Any) -> str:
        if callable(self.value):
            value = self.value(row)
        else:
            value = row
            for name in self.value.split("."):
                if value is not None:
                    value = value[int(name)] if name.isdigit() else getattr(value, name)
        return "-" if value is None else self.format(value)


class TextColumn(Column):
    left = True


class Grid:
    """A table of rows under a ruled heading, fitted to the console: where the whole is too wide,
    headings and then texts go on in further lines, and words stay whole. A column that is None is
    left out.
    """

    def __init__(self, rows: Iterable[Any], *columns: Column | None, gap: int = 2) -> None:
        self._columns = [column for column in columns if column is not None]
        self._rows = [[column.cell(row) for column in self._columns] for row in rows]
        self._gap = gap

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        titles, widths, gap = self._fitted(options.max_width)

        def line(cells: Iterable[str], style: str = "") -> Text:
            columns = zip(self._columns, cells, widths, strict=True)
            placed = [
                cell.ljust(width) if column.left else cell.rjust(width)
                for column, cell, width in columns
            ]
            return _line(((" " * gap).join(placed), style))

        heads = list(zip_longest(*(title[::-1] for title in titles), fillvalue=""))[::-1]
        yield from (line(cells, "bold") for cells in heads)
        yield _line(("-" * (sum(widths) + gap * (len(widths) - 1)), ""))
        for row in self._rows:
            pairs = zip(row, widths, strict=True)
            yield from map(
                line, zip_longest(*(_wrapped(cell, width) for cell, width in pairs), fillvalue="")
            )

    def _fitted(self, most: int) -> tuple[list[list[str]], list[int], int]:
        """Lines of each heading, widths of the columns, and the gap between them."""
        whole = [column.title.split("\n") for column in self._columns]
        broken = [
            re.sub(r"(?<=-)(?=\w)| ", "\n", column.title).split("\n") for column in self._columns
        ]
        cells = [[row[i] for row in self._rows] for i in range(len(self._columns))]
        texts = [column.left for column in self._columns]
        every = [
            _wrapped("\n".join(c), 1) if text else c for c, text in zip(cells, texts, strict=True)
        ]
        words = [*cells[:1], *every[1:]]  # the first column stays in one line where it can
        # run over
        none = [
            *cells[:1],
            *([] if text else c for c, text in zip(cells[1:], texts[1:], strict=True)),
        ]
        fits = [
            *product((self._gap, 1), (cells, words), (whole, broken)),
            (1, every, broken),
            (1, none, broken),
        ]
        for gap, kept, titles in fits:
            least, widths = (
                [
                    max(map(len, ["-", *title, *piece]))
                    for title, piece in zip(titles, pieces, strict=True)
                ]
                for pieces in (kept, cells)
            )
            for level in range(most, 0, -1):  # the widest columns give way
                fitted = [
                    max(floor, min(width, level))
                    for floor, width in zip(least, widths, strict=True)
                ]
                if sum(fitted) + gap * (len(fitted) - 1) <= most:
                    return titles, fitted, gap
        return titles, least, gap


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of whole words; a number and its unit stay in one."""
    parts = (
        wrap(part, max(width, 1), break_on_hyphens=False, break_long_words=False) or [""]
        for part in _UNIT.sub("\xa0", text).split("\n")
    )
    return [line.replace("\xa0", " ") for lines in parts for line in lines]


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


def facts(title: str, rows: Iterable[Fact]) -> RenderableType:
    """A title over labelled lines; a line that is too long goes on under its own beginning, and
    words stay whole.
    """
    shown = list(rows)

    def draw(width: int) -> Iterator[Text]:
        widest = min(max((len(label) for label, _ in shown), default=0), width // 2)
        for label, value in shown:
            style = "yellow" if label == "warning" else ""
            cells = _wrapped(label, widest), _wrapped(value, width - widest - 4)
            for left, right in zip_longest(*cells, fillvalue=""):
                yield _line((f"  {left:<{widest}}  ", style or "bold"), (right, style))

    return titled(title, Drawing(draw))


def titled(title: str, *parts: RenderableType) -> RenderableType:
    return Group(sentences(title, style="bold", indent=""), *parts)


def stacked(*parts: RenderableType | None) -> RenderableType:
    """Parts below each other with an empty line between them; None is left out."""
    shown = [part for part in parts if part is not None]
    return Group(*[line for part in shown for line in (part, Text())][:-1])


def sentences(*lines: str, style: str = "", indent: str = "  ") -> RenderableType:
    text = "\n".join(lines)
    return Drawing(
        lambda width: (
            _line((indent + line, style)) for line in _wrapped(text, width - len(indent))
        )
    )


def filled(rows: Sequence[Mapping[str, object]], left: Sequence[str]) -> RenderableType:
    """A table of rows by column name; the first row has all columns, and those in ``left`` hold
    text.
    """
    return Grid(
        rows, *((TextColumn if n in left else Column)(n, methodcaller("get", n)) for n in rows[0])
    )
