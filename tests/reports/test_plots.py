"""The Pareto curve and the padding of each size: as text."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cgplan.reports.plots import Bar, ParetoPlot, padding_text, pareto_text

CURVE = ParetoPlot(
    curve=list(enumerate([5500.0, 3000.0, 2300.0, 2000.0, 1900.0, 1850.0, 1830.0, 1820.0, 1810.0])),
    points=[("vllm", 35, 1810.0), ("plan", 3, 2000.0)],
)
BARS = [Bar("1", 0.0, 0.7), Bar("8", 0.5, 0.2), Bar("FULL uniform 64", 0.25, 0.1)]


def plotted(text: str) -> dict[str, list[tuple[int, int]]]:
    """(row, column) of each mark inside the axes."""
    found: dict[str, list[tuple[int, int]]] = {}
    for row, line in enumerate(text.splitlines()):
        if "|" in line:
            for column, mark in enumerate(line.partition("|")[2]):
                if mark != " ":
                    found.setdefault(mark, []).append((row, column))
    return found


def test_the_curve_falls_from_left_to_right() -> None:
    marks = plotted(pareto_text(CURVE))
    curve = sorted(marks["*"] + marks["B"], key=lambda at: at[1])  # the plan stands on the curve
    assert len(curve) == 9
    assert [row for row, _ in curve] == sorted(row for row, _ in curve)
    assert curve[0] == (0, 0)
    (vllm,), (plan,) = marks["A"], marks["B"]
    assert vllm[0] == 13, "the best of all stands at the bottom"
    assert vllm[1] > max(column for _, column in curve)
    assert plan in curve


def test_the_axes_have_their_ends_and_the_legend_its_figures() -> None:
    lines = pareto_text(CURVE).splitlines()
    assert lines[0].split()[:3] == ["5.50", "ms", "|*"]
    assert lines[13].split()[:2] == ["1.81", "ms"]
    ticks = [int(n) for n in lines[15].split()]
    assert ticks[0] == 0
    assert ticks[-1] == 35
    assert ticks == sorted(set(ticks))
    assert lines[-2:] == ["  A  vllm: 35 graphs, 1.81 ms", "  B  plan: 3 graphs, 2.00 ms"]


def test_points_on_the_same_place_share_a_letter_and_are_both_explained() -> None:
    points = [("vllm", 35, 1810.0), ("sglang", 35, 1810.1), ("plan", 1, 3000.0), ("other", 35, 1810.0)]
    text = pareto_text(CURVE._replace(points=points))
    assert len(plotted(text)["A"]) == 1
    assert text.splitlines()[-4:] == [
        "  A  vllm: 35 graphs, 1.81 ms",
        "  A  sglang: 35 graphs, 1.81 ms (the same place as vllm)",
        "  B  plan: 1 graph, 3.00 ms",
        "  A  other: 35 graphs, 1.81 ms (the same place as vllm)",
    ]


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=40)  # too slow: how busy the machine is
@given(
    curve=st.lists(st.tuples(st.integers(0, 10_000), st.floats(0.001, 1e8)), min_size=1, max_size=30),
    named=st.lists(st.tuples(st.integers(0, 20_000), st.floats(0.001, 1e8)), max_size=26),
    width=st.integers(60, 120),
)
def test_any_curve_fits_and_is_ascii(
    curve: list[tuple[int, float]], named: list[tuple[int, float]], width: int
) -> None:
    points = [(f"ladder {index}", n, value) for index, (n, value) in enumerate(named)]
    text = pareto_text(ParetoPlot(curve, points), width)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= width
    letters = re.findall(r"^  ([A-Z])  ladder", text, re.MULTILINE)
    assert len(letters) == len(points)
    assert set(letters) == set(plotted(text)) - {"*"}, "each point stands in the picture"


def test_bars_are_as_long_as_the_padding() -> None:
    head, *rows = padding_text(BARS).splitlines()
    assert head.split() == ["size", "steps", "padding"]
    assert [row.rstrip(" #").split()[-1] for row in rows] == ["0.0%", "50.0%", "25.0%"]
    lengths = [row.count("#") for row in rows]
    assert lengths[0] == 0
    assert lengths[1] == pytest.approx(2 * lengths[2], abs=1)
    assert "20.0%" in rows[1]


def test_of_many_bars_the_most_used_are_shown() -> None:
    text = padding_text([Bar(str(n), 0.0, n / 1000) for n in range(40)])
    shown = [int(line.split()[0]) for line in text.splitlines()[1:-1]]
    assert shown == list(range(16, 40))
    assert text.endswith("and 16 more, with fewer steps")
