"""How reports look, in ASCII."""

import re
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from functools import partial, singledispatch
from io import StringIO
from itertools import product, zip_longest
from textwrap import wrap
from typing import Any, ClassVar

from rich.console import (
    Console,
    ConsoleOptions,
    Group,
    RenderableType,
)
from rich.text import Text

from cgplan.units import (
    format_bytes,
    format_microseconds,
    format_seconds,
    grouped,
)

TEXT_WIDTH = 100
_UNIT = re.compile(r"(?<=\d) (?=(?:[um]?s|[KMG]?i?B)\b)")
_BREAK = re.compile(r"(?<=-)(?=\w)| ")  # where a heading may break
Lines = list[str]
Fact = tuple[str, str]  # label, text
percent = "{:.1%}".format


@singledispatch
def render(report: Any) -> RenderableType:
    """A record for a rich console."""
    raise TypeError(f"{type(report).__name__} has no tables")


def render_text(
    report: Any,
    width: int = TEXT_WIDTH,
) -> str:
    """Without a last newline."""
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


def describe_sizes(sizes: Sequence[int], none: str = "none") -> str:
    """``(1, 2, 4, 8, 16, 24, 32)`` -> ``1, 2, 4, 8 to 32 by 8``; ``()`` -> ``none``."""
    parts = []
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
        if last - first < 3:
            last = first
            parts.append(str(sizes[first]))
        else:
            by = f" by {step}" if step > 1 else ""
            parts.append(f"{sizes[first]} to {sizes[last]}{by}")
        first = last + 1
    return ", ".join(parts) or none


def describe_lanes(sizes: Iterable[tuple[object, int]]) -> str:
    """(lane, size) pairs as ``FULL uniform: 8 to 64 by 8; PIECEWISE: 64``."""
    lanes = grouped(sizes)
    return "; ".join(f"{lane}: {describe_sizes(sorted(of))}" for lane, of in lanes.items())


@dataclass(frozen=True)
class Column:
    """Numbers, to the right in one line; None is a dash.

    Attributes:
        value: Path of attributes and indices, or a function of the row; absent: the title.
        on_page_alone: In HTML, not in text.
    """

    title: str
    value: str | Callable[[Any], Any] = ""
    format: Callable[[Any], str] = str
    on_page_alone: bool = False

    left: ClassVar = False

    @property
    def name(self) -> str:
        title = self.title.replace("-\n", "-")
        return title.replace("\n", " ")

    def of(
        self,
        row: Any,
    ) -> Any:
        if callable(self.value):
            return self.value(row)
        value = row
        path = self.value or self.title
        for name in path.split("."):
            if value is None:
                break
            value = value[int(name)] if name.isdigit() else getattr(value, name)
        return value

    def cell(
        self,
        row: Any,
    ) -> str:
        value = self.of(row)
        return "-" if value is None else self.format(value)


Bytes = partial(Column, format=format_bytes)
Microseconds = partial(Column, format=format_microseconds)
Seconds = partial(Column, format=format_seconds)
Share = partial(Column, format=percent)


class TextColumn(Column):
    left = True


class Grid:
    """A table for a console and for HTML.

    On a narrow console first headings break, then texts, between words. ``short``: no space before
    units.
    """

    def __init__(
        self, rows: Iterable[Any], *columns: Column, gap: int = 2, short: bool = False
    ) -> None:
        self.rows = list(rows)
        self.columns = columns
        self._gap = gap
        self._short = short

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        columns = [column for column in self.columns if not column.on_page_alone]
        cells = []
        for column in columns:
            texts = [column.cell(row) for row in self.rows]
            if self._short and not column.left:
                texts = [text.replace(" ", "") for text in texts]
            cells.append(texts)
        titles, widths, gap = self._fitted(
            columns,
            cells,
            options.max_width,
        )

        def line(
            words: Iterable[str],
            style: str = "",
        ) -> Text:
            placed = []
            for column, word, width in zip(
                columns,
                words,
                widths,
                strict=True,
            ):
                fill = word.ljust if column.left else word.rjust
                placed.append(fill(width))
            text = (" " * gap).join(placed)
            return _line((text, style))

        upward = map(reversed, titles)
        heads = list(zip_longest(*upward, fillvalue=""))
        for words in reversed(heads):
            yield line(words, "bold")
        length = sum(widths) + gap * (len(widths) - 1)
        yield _line(("-" * length, ""))
        for row in zip(*cells, strict=True):
            wrapped = map(_wrapped, row, widths)
            for words in zip_longest(*wrapped, fillvalue=""):
                yield line(words)

    def _fitted(
        self, columns: Sequence[Column], cells: list[Lines], most: int
    ) -> tuple[list[Lines], list[int], int]:
        whole = [column.title.split("\n") for column in columns]
        broken = [_BREAK.sub("\n", column.title).split("\n") for column in columns]
        every = list(cells)  # must fit: the words of texts
        none = list(cells)  # must fit: numbers; texts run over
        for place, column in enumerate(columns):
            if column.left:
                every[place] = _wrapped("\n".join(cells[place]), 1)
                none[place] = []
        none[:1] = cells[:1]
        words = [*cells[:1], *every[1:]]  # the first column stays in one line
        fits = [
            *product((self._gap, 1), (cells, words), (whole, broken)),
            (1, every, broken),
            (1, none, broken),
        ]
        for gap, kept, titles in fits:
            limits = list(zip(_widths(titles, kept), _widths(titles, cells), strict=True))
            room = most - gap * (len(columns) - 1)
            for level in range(most, 0, -1):
                # widest columns first
                widths = [max(least, min(wanted, level)) for least, wanted in limits]
                if sum(widths) <= room:
                    return titles, widths, gap
        return titles, widths, gap


def _widths(
    titles: Iterable[Lines],
    pieces: Iterable[Lines],
) -> list[int]:
    widths = []
    for title, piece in zip(titles, pieces, strict=True):
        lines = "\n".join([*title, *piece]).split("\n")
        widths.append(max(1, *map(len, lines)))
    return widths


def _wrapped(
    text: str,
    width: int,
) -> Lines:
    lines = []
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
    return Text.assemble(
        *parts,
        no_wrap=True,
        overflow="ignore",
    )


def verbatim(text: str) -> Text:
    return _line((text, ""))


class Sentences:
    def __init__(self, *lines: str, style: str = "", indent: str = "  ") -> None:
        self.text = "\n".join(lines)
        self.style = style
        self.indent = indent

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        for line in _wrapped(self.text, options.max_width - len(self.indent)):
            yield _line((self.indent + line, self.style))


class Facts:
    def __init__(
        self,
        title: str,
        rows: Iterable[Fact],
        answer: str = "",
    ) -> None:
        self.title = title
        self.rows = list(rows)
        self.answer = answer

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        yield heading(self.title)
        if self.answer:
            yield Sentences(self.answer)
        width = options.max_width
        lengths = [len(label) for label, _ in self.rows]
        widest = min(max(lengths, default=0), width // 2)
        for label, value in self.rows:
            style = "yellow" if label == "warning" else ""
            labels = _wrapped(label, widest)
            values = _wrapped(value, width - widest - 4)
            for left, right in zip_longest(labels, values, fillvalue=""):
                head = f"  {left:<{widest}}  "
                yield _line((head, style or "bold"), (right, style))


def memory_text(
    parts: Mapping[str, int | None],
    total: int,
) -> str:
    known = [f"{name} {format_bytes(size)}" for name, size in parts.items() if size is not None]
    return f"{', '.join(known)}; total {format_bytes(total)}"


def labelled(
    label: str,
    texts: Iterable[str],
) -> list[Fact]:
    return [(label, text) for text in texts]


def titled(title: str, *parts: RenderableType | None) -> RenderableType | None:
    """None without a part."""
    shown = [part for part in parts if part is not None]
    if not shown:
        return None
    return Group(heading(title), *shown)


def heading(title: str) -> RenderableType:
    return Sentences(title, style="bold", indent="")


def figures(
    title: str, rows: Sequence[Any], *columns: Column, words: Sequence[str] = ()
) -> RenderableType | None:
    if not rows:
        return None
    below = Sentences(*words) if words else None
    return titled(title, Grid(rows, *columns), below)


def stacked(*parts: RenderableType | None) -> RenderableType:
    lines = []
    for part in parts:
        if part is not None:
            lines += [part, Text()]
    return Group(*lines[:-1])
