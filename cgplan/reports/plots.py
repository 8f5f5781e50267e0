"""The Pareto curve and the padding of each size, as plain text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from string import ascii_uppercase
from textwrap import wrap
from typing import NamedTuple

from cgplan.units import counted, format_microseconds

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
