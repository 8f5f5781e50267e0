"""Why a plan has the graphs that it has, as tables and terminal plots."""

from __future__ import annotations

from functools import partial

from rich.console import Group, RenderableType
from rich.text import Text

from cgplan.optimizer.evidence import Evidence, LadderPoint, ParetoPoint, SizeUse
from cgplan.planning.plan import Lane
from cgplan.reports.layout import Drawing, describe_sizes, facts, filled, sentences
from cgplan.reports.plots import PaddingPlot, ParetoPlot, Point, padding_text, pareto_text
from cgplan.units import format_bytes, format_microseconds, format_seconds

_MOST_POINTS = 12
_LADDER_WORDS = (
    "padding: share of all tokens that run, eager steps included; unused: graphs that run no batch",
    "equal: the fewest graphs that give a step as short; within 0.1%: at most 0.1% longer",
    "gain: how much shorter the plan's step is; no gain: the ladder is within 1% of the bound, a graph for every size",
)
_LEFT_OUT_WORDS = "each added to the plan by itself; no gain: steps get less than 0.01% shorter, or longer"


def render_evidence(evidence: Evidence) -> RenderableType:
    """Verdict, Pareto curve, ladders beside it, what each graph runs, and where graphs bring nothing."""
    parts: list[RenderableType] = [_head(evidence), Text(), _sizes(evidence)]
    if evidence.pareto:
        parts += [Text(), Text("Graphs against expected step time", style="bold")]
        parts += [Drawing(partial(pareto_text, pareto_plot(evidence))), Text(), _pareto(evidence)]
    if evidence.ladders:
        parts += [Text(), Text("Ladders on the same traffic", style="bold"), _ladders(evidence)]
        parts.append(sentences(*_LADDER_WORDS))
    if evidence.failed:
        rows = [(f"{part.lane} {describe_sizes(part.sizes)}", part.reason) for part in evidence.failed]
        parts += [Text(), facts("Could not be captured, so the plan does without", rows)]
    if evidence.left_out:
        title = "Left out, of the sizes that the configuration has without traffic"
        parts += [Text(), Text(title, style="bold"), _left_out(evidence), sentences(_LEFT_OUT_WORDS)]
    if evidence.uses:
        title = "Share of all steps that each graph runs, and padding of the tokens that it runs (bars)"
        parts += [Text(), Text(title, style="bold")]
        parts.append(Drawing(partial(padding_text, padding_plot(evidence))))
    if evidence.not_worth:
        parts += [Text(), Text("Sizes not worth a graph", style="bold"), _not_worth(evidence)]
    return Group(*parts)


def pareto_plot(evidence: Evidence) -> ParetoPlot:
    """The curve, the ladders and the plan."""
    points = [Point("this plan", evidence.graphs, evidence.expected_us.plan)]
    points += [Point(ladder.name, ladder.graphs, ladder.expected_us) for ladder in evidence.ladders]
    return ParetoPlot([p.graphs for p in evidence.pareto], [p.expected_us for p in evidence.pareto], points)


def padding_plot(evidence: Evidence) -> PaddingPlot:
    """One bar for each graph, and one for what runs eagerly."""
    return PaddingPlot(
        [_name(use) for use in evidence.uses],
        [use.padding for use in evidence.uses],
        [use.share for use in evidence.uses],
    )


def _name(use: SizeUse) -> str:
    return "eager" if use.size is None else f"{Lane(use.mode, use.uniform, use.num_active_loras)}: {use.size}"


def _head(evidence: Evidence) -> RenderableType:
    expected, gap = evidence.expected_us, f", at most {evidence.gap:.1%} above the best" if evidence.gap > 1e-6 else ""
    proof = (
        "proven: no plan within the limits is better, by these times and costs"
        if evidence.exact
        else f"lower bound reported{gap}"
    )
    cost = [] if evidence.bytes is None else [f"{format_bytes(evidence.bytes)}"]
    cost += [] if evidence.seconds is None else [f"start-up {format_seconds(evidence.seconds)}"]
    estimated = " (an estimate)" if evidence.costs_estimated else ""
    rows = [
        ("verdict", evidence.verdict),
        *(("warning", text) for text in evidence.warnings),
        ("traffic", f"{evidence.traffic_source}: {evidence.traffic_weight:,.0f} steps"),
        ("step times", evidence.times_source),
        ("costs", "not known: give --costs" if evidence.costs_source is None else evidence.costs_source + estimated),
        ("rule", evidence.rule),
        ("graphs", ", ".join([str(evidence.graphs), *cost])),
        (
            "step",
            f"{format_microseconds(expected.plan)} expected; eager {format_microseconds(expected.eager)}, with a graph "
            f"for every size {format_microseconds(expected.bound)}",
        ),
        ("proof", f"{proof}; lower bound {format_microseconds(evidence.lower_bound_us)}"),
        ("binding", _binding(evidence)),
    ]
    if evidence.next_graph is not None:
        worth = evidence.next_graph
        brings = f"{format_microseconds(worth.microseconds)} a step ({worth.percent:.2g}%)"
        rows.append(("next graph", brings if worth.percent >= 1e-3 else "would bring nothing"))
    notes = (*evidence.traffic_notes, *evidence.times_notes, *evidence.notes)  # of costs: with what they predict
    return facts("Why these graphs", [*rows, *(("note", text) for text in notes)])


def _binding(evidence: Evidence) -> str:
    """Limits that the next better plan breaks, and limits that nothing is known of."""
    binding = ", ".join(f"budget.{limit}" for limit in evidence.binding) or "no limit"
    unknown = " and ".join(f"budget.{limit}" for limit in evidence.unbounded)
    return f"{binding}; {unknown} not looked at, for want of --costs" if unknown else binding


def _sizes(evidence: Evidence) -> RenderableType:
    lanes: list[dict[str, object]] = [
        {"lane": lane.lane, "graphs": len(lane.sizes), "sizes": describe_sizes(lane.sizes)} for lane in evidence.lanes
    ]
    return filled(lanes, left=("lane", "sizes")) if lanes else Text("No graph: every batch runs eagerly.")


def _pareto(evidence: Evidence) -> RenderableType:
    """The curve at powers of two, at the plan and at its end."""
    ends = {evidence.pareto[0].graphs, evidence.pareto[-1].graphs, evidence.graphs}
    shown = [p for p in evidence.pareto if p.graphs in ends or not p.graphs & (p.graphs - 1)][:_MOST_POINTS]
    return filled([_cells(p) for p in shown], left=())


def _cells(point: ParetoPoint | LadderPoint) -> dict[str, object]:
    return {
        "graphs": point.graphs,
        "expected step": format_microseconds(point.expected_us),
        "memory": None if point.bytes is None else format_bytes(point.bytes),
        "start-up": None if point.seconds is None else format_seconds(point.seconds),
    }


def _left_out(evidence: Evidence) -> RenderableType:
    rows: list[dict[str, object]] = [
        {"lane": part.lane, "sizes": describe_sizes(part.sizes), "why": part.reason} for part in evidence.left_out
    ]
    return filled(rows, left=("lane", "sizes", "why"))


def _not_worth(evidence: Evidence) -> RenderableType:
    rows: list[dict[str, object]] = [
        {"lane": part.lane, "sizes": f"{part.first} to {part.last}", "why": part.reason} for part in evidence.not_worth
    ]
    return filled(rows, left=("lane", "sizes", "why"))


def _ladders(evidence: Evidence) -> RenderableType:
    plan: dict[str, object] = {
        "ladder": "this plan",
        "graphs": evidence.graphs,
        "expected step": format_microseconds(evidence.expected_us.plan),
        "memory": None if evidence.bytes is None else format_bytes(evidence.bytes),
        "start-up": None if evidence.seconds is None else format_seconds(evidence.seconds),
        "padding": None if evidence.padding is None else f"{evidence.padding:.1%}",
        "unused": 0,
        "equal": None,
        "within 0.1%": None,
        "gain": None,
    }
    rows = [
        {
            "ladder": ladder.name,
            **_cells(ladder),
            "padding": f"{ladder.padding:.1%}",
            "unused": ladder.unused,
            "equal": None if ladder.equal is None else ladder.equal.graphs,
            "within 0.1%": None if ladder.alike is None else ladder.alike.graphs,
            "gain": "no gain" if ladder.no_gain else f"{1 - evidence.expected_us.plan / ladder.expected_us:+.1%}",
        }
        for ladder in evidence.ladders
    ]
    return filled([plan, *rows], left=("ladder", "gain"))
