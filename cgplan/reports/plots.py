"""Pictures: the Pareto curve and the padding of each size, as plain text in a report and as SVG or PNG."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from string import ascii_uppercase
from textwrap import wrap
from typing import TYPE_CHECKING, NamedTuple

from cgplan.errors import OutputPathError
from cgplan.units import counted, format_microseconds, grouped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".svg", ".png")
TEXT_ROWS = 14
MOST_BARS = 24
_MARGIN = 10  # columns left of the axis


class ParetoPlot(NamedTuple):
    """Expected step time by number of graphs."""

    curve: Sequence[tuple[int, float]]  # (graphs, microseconds): the best step with so many graphs; at least one
    points: Sequence[tuple[str, int, float]] = ()  # (name, graphs, microseconds) of ladders, and of the plan


class Bar(NamedTuple):
    """One capture size; shares from 0 to 1."""

    name: str
    padding: float  # of its rows
    steps: float | None = None  # of all steps; None for all bars where there is no traffic


def pareto_text(plot: ParetoPlot, width: int = 80) -> str:
    """The curve in ASCII over a logarithmic axis of graphs, with a letter for each place that has points."""
    every = [*plot.curve, *((graphs, microseconds) for _, graphs, microseconds in plot.points)]
    every_x, every_y = sorted({graphs for graphs, _ in every}), [microseconds for _, microseconds in every]
    columns = width - _MARGIN - 2
    low, high = min(every_y), max(every_y)

    def place(graphs: float, microseconds: float) -> tuple[int, int]:
        most = math.log1p(every_x[-1]) - math.log1p(every_x[0])
        along = (math.log1p(graphs) - math.log1p(every_x[0])) / most if most else 0
        below = (high - microseconds) / (high - low) if high > low else 0
        return round(below * (TEXT_ROWS - 1)), round(along * (columns - 1))

    grid = [[" "] * columns for _ in range(TEXT_ROWS)]
    for graphs, microseconds in plot.curve:
        row, column = place(graphs, microseconds)
        grid[row][column] = "*"
    first: dict[tuple[int, int], tuple[str, str]] = {}  # letter and name of the first point at a place
    legend = [("*", "the best with so many graphs, expected step time")]
    for name, graphs, microseconds in plot.points:
        at = place(graphs, microseconds)
        shared = f" (the same place as {first[at][1]})" if at in first else ""
        mark, _ = first.setdefault(at, (ascii_uppercase[len(first)], name))
        grid[at[0]][at[1]] = mark
        legend.append((mark, f"{name}: {counted(graphs, 'graph')}, {format_microseconds(microseconds)}{shared}"))
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


def padding_text(bars: Sequence[Bar], width: int = 80) -> str:
    """One bar a size, as long as its share of padding; of too many bars those with the largest shares of steps."""
    steps = [bar.steps or 0.0 for bar in bars]
    shown = sorted(sorted(range(len(bars)), key=lambda index: -steps[index])[:MOST_BARS])
    names = max(len("size"), *(len(bars[index].name) for index in shown))
    lines = [f"{'size':>{names}}  {'steps':>7}{'padding':>9}"]
    for index in shown:
        name, padding, _ = bars[index]
        drawn = "#" * round(padding * max(width - names - 21, 10))
        lines.append(f"{name:>{names}}  {steps[index]:>7.1%}  {padding:>7.1%}  {drawn}".rstrip())
    if len(shown) < len(bars):
        lines.append(f"and {len(bars) - len(shown)} more, with fewer steps")
    return "\n".join(lines)


def check_plot_path(path: Path) -> None:
    """Raise OutputPathError if ``path`` does not end as a picture does, or matplotlib is not installed."""
    if path.suffix.lower() not in SUFFIXES:
        raise OutputPathError(
            f"cannot draw {path}: a picture ends in {' or '.join(SUFFIXES)}",
            remedy=f"Name it {path.stem or 'plan'}{SUFFIXES[0]}, say.",
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise OutputPathError(
            f"cannot draw {path}: matplotlib is not installed", remedy="Install it: pip install 'cgplan[plot]'"
        )


def picture(path: Path, pareto: ParetoPlot | None, bars: Sequence[Bar]) -> bytes:
    """The plots that are there, below one another, in the format that the suffix of ``path`` names."""
    check_plot_path(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    count = (pareto is not None) + bool(bars)
    # A fixed salt and no date: equal plots give equal files.
    with rc_context({"svg.hashsalt": "cgplan", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 4.5 * max(count, 1)), layout="constrained")
        if pareto is not None:
            _draw_pareto(figure.add_subplot(count, 1, 1), pareto)
        if bars:
            _draw_padding(figure.add_subplot(count, 1, count), bars)
        data = BytesIO()
        kind = path.suffix.lower().removeprefix(".")
        figure.savefig(data, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return data.getvalue()


def _draw_pareto(axes: Axes, plot: ParetoPlot) -> None:
    every_x, every_y = zip(*plot.curve, strict=True)
    axes.step(every_x, every_y, where="post", marker=".", label="best with so many graphs")
    together = grouped(
        ((graphs, time), name) for name, graphs, time in plot.points
    )  # a dot would hide another one below it
    for (graphs, microseconds), names in together.items():
        axes.plot([graphs], [microseconds], "o", label=f"{', '.join(names)} ({graphs})")
    axes.set_xscale("symlog", linthresh=10)
    ticks = [n for n in (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if n <= max(every_x)]
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set(xlabel="graphs", ylabel="expected step time (us)")
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_padding(axes: Axes, bars: Sequence[Bar]) -> None:
    at = range(len(bars))
    axes.bar(at, [100 * bar.padding for bar in bars], label="padding, of the rows at this size")
    if steps := [100 * bar.steps for bar in bars if bar.steps is not None]:
        axes.plot(at, steps, "k.", label="steps at this size, of all")
    every = max(1, len(bars) // 16)
    axes.set_xticks(list(at)[::every], [bar.name for bar in bars][::every], rotation=45, ha="right")
    axes.set(xlabel="capture size (tokens)", ylabel="%")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
