"""Pictures: the Pareto curve and the padding of each size, as plain text in a report and as SVG or PNG."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from cgplan.errors import OutputPathError
from cgplan.units import format_microseconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".svg", ".png")
TEXT_ROWS = 14
LEGEND_MARKS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MOST_BARS = 24
_MARGIN = 10  # columns left of the axis


@dataclass(frozen=True, slots=True)
class Point:
    """A named point beside a curve, a ladder say: ``graphs`` of them give a step of ``microseconds``."""

    name: str
    graphs: int
    microseconds: float


@dataclass(frozen=True, slots=True)
class ParetoPlot:
    """Expected step time by number of graphs.

    Attributes:
        graphs, microseconds: The curve: the best expected step with so many graphs; of equal length, at least one.
        points: Ladders beside it, and the plan that was chosen.
    """

    graphs: Sequence[int]
    microseconds: Sequence[float]
    points: Sequence[Point] = ()


@dataclass(frozen=True, slots=True)
class PaddingPlot:
    """How much of each size is padding.

    Attributes:
        names: Of each bar, a capture size say.
        padding: Share of the rows that are padding, from 0 to 1, of the batches that run at that size.
        share: Share of all steps that run at it, from 0 to 1; empty without traffic.
    """

    names: Sequence[str]
    padding: Sequence[float]
    share: Sequence[float] = ()


def pareto_text(plot: ParetoPlot, width: int = 80) -> str:
    """The curve in ASCII: ``*`` is the curve, letters are the points, with a legend below.

    The numbers of graphs stand on a logarithmic axis: the first few graphs matter most. Points that fall on the same
    place share a letter, and the legend says with which other one.
    """
    points = list(plot.points)[: len(LEGEND_MARKS)]
    every_x = sorted({*plot.graphs, *(p.graphs for p in points)})
    every_y = [*plot.microseconds, *(p.microseconds for p in points)]
    columns = width - _MARGIN - 2
    low, high = min(every_y), max(every_y)

    def place(graphs: float, microseconds: float) -> tuple[int, int]:
        most = math.log1p(every_x[-1]) - math.log1p(every_x[0])
        along = (math.log1p(graphs) - math.log1p(every_x[0])) / most if most else 0
        below = (high - microseconds) / (high - low) if high > low else 0
        return round(below * (TEXT_ROWS - 1)), round(along * (columns - 1))

    grid = [[" "] * columns for _ in range(TEXT_ROWS)]
    for x, y in zip(plot.graphs, plot.microseconds, strict=True):
        row, column = place(x, y)
        grid[row][column] = "*"
    marks: dict[tuple[int, int], str] = {}
    first: dict[str, str] = {}
    legend = [("*", "the best with so many graphs, expected step time")]
    for point in points:
        at = place(point.graphs, point.microseconds)
        mark = grid[at[0]][at[1]] = marks.setdefault(at, LEGEND_MARKS[len(marks)])
        graphs = "1 graph" if point.graphs == 1 else f"{point.graphs} graphs"
        shared = f" (the same place as {first[mark]})" if mark in first else ""
        first.setdefault(mark, point.name)
        legend.append((mark, f"{point.name}: {graphs}, {format_microseconds(point.microseconds)}{shared}"))
    labels = {0: format_microseconds(high), TEXT_ROWS - 1: format_microseconds(low)}
    lines = [f"{labels.get(i, ''):>{_MARGIN}} |{''.join(cells)}".rstrip() for i, cells in enumerate(grid)]
    lines.append(f"{'':>{_MARGIN}} +{'-' * columns}")
    lines.append(f"{'':>{_MARGIN + 2}}{_ticks([(x, place(x, high)[1]) for x in every_x], columns)}")
    lines.append(f"{'':>{_MARGIN + 2}}{'graphs'.center(columns)}".rstrip())
    wrapped = (wrap(text, width, initial_indent=f"  {mark}  ", subsequent_indent=" " * 5) for mark, text in legend)
    return "\n".join([*lines, *(line for part in wrapped for line in part)])


def _ticks(values: Sequence[tuple[int, int]], columns: int) -> str:
    """Numbers of graphs at their columns, as many as fit without touching; the last one stands always."""
    line, last = "", str(values[-1][0])
    for value, column in values:
        start = min(column, columns - len(str(value)))
        is_last = value == values[-1][0]
        if (not line or start > len(line)) and (is_last or start + len(str(value)) < columns - len(last)):
            line = line.ljust(start) + str(value)
    return line


def padding_text(plot: PaddingPlot, width: int = 80) -> str:
    """One bar a size, as long as its share of padding; of too many bars those with the largest shares of steps."""
    weight = plot.share or plot.padding
    shown = sorted(sorted(range(len(plot.names)), key=lambda i: -weight[i])[:MOST_BARS])
    names = max(len("size"), *(len(plot.names[i]) for i in shown))
    bar = max(width - names - (18 if plot.share else 9) - 3, 10)
    lines = [f"{'size':>{names}}  {'steps':>7}{'padding':>9}" if plot.share else f"{'size':>{names}}  padding"]
    for i in shown:
        share = f"{plot.share[i]:>7.1%}  " if plot.share else ""
        drawn = "#" * round(plot.padding[i] * bar)
        lines.append(f"{plot.names[i]:>{names}}  {share}{plot.padding[i]:>7.1%}  {drawn}")
    if len(shown) < len(plot.names):
        rest = len(plot.names) - len(shown)
        lines.append(f"and {rest} more, {'with fewer steps' if plot.share else 'with less padding'}")
    return "\n".join(line.rstrip() for line in lines)


def check_plot_path(path: Path) -> None:
    """Raise OutputPathError if ``path`` does not end as a picture does, or matplotlib is not installed."""
    if path.suffix.lower() not in SUFFIXES:
        raise OutputPathError(
            f"cannot draw {path}: a picture ends in {' or '.join(SUFFIXES)}",
            remedy=f"Name it {path.with_suffix(SUFFIXES[0]).name}, say.",
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise OutputPathError(
            f"cannot draw {path}: matplotlib is not installed", remedy="Install it: pip install 'cgplan[plot]'"
        )


def picture(path: Path, pareto: ParetoPlot | None, padding: PaddingPlot | None) -> bytes:
    """The plots that are there, below one another, in the format that the suffix of ``path`` names.

    Raises OutputPathError as check_plot_path does. Nothing is written.
    """
    check_plot_path(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    count = sum(plot is not None for plot in (pareto, padding))
    # A fixed salt and no date: equal plots give equal files.
    with rc_context({"svg.hashsalt": "cgplan", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 4.5 * max(count, 1)), layout="constrained")
        if pareto is not None:
            _draw_pareto(figure.add_subplot(count, 1, 1), pareto)
        if padding is not None:
            _draw_padding(figure.add_subplot(count, 1, count), padding)
        data = BytesIO()
        kind = path.suffix.lower().removeprefix(".")
        figure.savefig(data, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return data.getvalue()


def _draw_pareto(axes: Axes, plot: ParetoPlot) -> None:
    axes.step(plot.graphs, plot.microseconds, where="post", marker=".", label="best with so many graphs")
    together: dict[tuple[int, float], list[str]] = {}
    for point in plot.points:  # a dot would hide another one below it
        together.setdefault((point.graphs, point.microseconds), []).append(point.name)
    for (graphs, microseconds), names in together.items():
        axes.plot([graphs], [microseconds], "o", label=f"{', '.join(names)} ({graphs})")
    axes.set_xscale("symlog", linthresh=10)
    ticks = [n for n in (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if n <= max(plot.graphs)]
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set(xlabel="graphs", ylabel="expected step time (us)")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_padding(axes: Axes, plot: PaddingPlot) -> None:
    at = range(len(plot.names))
    axes.bar(at, [100 * value for value in plot.padding], label="padding, of the rows at this size")
    if plot.share:
        axes.plot(at, [100 * value for value in plot.share], "k.", label="steps at this size, of all")
    every = max(1, len(plot.names) // 16)
    axes.set_xticks(list(at)[::every], list(plot.names)[::every], rotation=45, ha="right")
    axes.set(xlabel="capture size (tokens)", ylabel="%")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
