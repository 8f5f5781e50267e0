"""Plans as tables: keys, costs, padding, the evidence for them, and the difference of two plans."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from cgplan.modes import CUDAGraphMode
from cgplan.optimizer.evidence import Evidence, LadderPoint, PaddingMap, PlanCheck, SizeUse
from cgplan.planning import Plan
from cgplan.planning.difference import FieldChange, Figure, PlanDifference
from cgplan.planning.plan import PLANNED_FOR, Lane
from cgplan.reports.layout import (
    Column,
    Fact,
    Grid,
    TextColumn,
    describe_sizes,
    facts,
    render,
    sentences,
    stacked,
    titled,
)
from cgplan.reports.records import ReplanReport, Way
from cgplan.units import counted, format_bytes, format_microseconds, format_seconds, grouped

if TYPE_CHECKING:
    from cgplan.pricing.measured import CaseCost

MOST_PADDING_ROWS = 12
MOST_POINTS = 12
MOST_SAID = 4  # warnings of a short report
MOST_USES = 24
percent = "{:.1%}".format
MOST_SIZES = 150  # characters of its sizes
_LADDER_WORDS = (
    "padding: share of all tokens that run; gain: how much shorter the plan's step is",
    "no gain: the ladder is within 1% of the bound, a graph for every size",
    "decode, mixed: steps of uniform decode, and of mixed batches (prefill)",
)
_EQUAL_WORDS = (
    "unused: graphs that run no batch",
    "equal: the fewest graphs that give a step as short; within 0.1%: at most 0.1% longer",
)
_REGRET_WORDS = (
    "regret: how much longer steps of this plan are; of decode, of mixed: those of uniform "
    "decode, and others"
)
_LEFT_OUT_WORDS = (
    "each added to the plan by itself; no gain: steps get less than 0.01% shorter, or longer"
)
_WAYS: dict[Way, str] = {
    "proposed": "proposed only: nothing was captured",
    "exchanged": "exchanged inside the pools that were there",
    "new generation": "all captured again: the new graphs need a larger or a much smaller pool",
    "new buffers": "all captured again, into new static buffers, too: the largest size grew",
}
_LANE, _WHY = TextColumn("lane", "lane"), TextColumn("why", "reason")
_SIZES = TextColumn("sizes", "sizes", describe_sizes)
_GRAPHS, _STEP = (
    Column("graphs", "graphs"),
    Column("expected step", "expected_us", format_microseconds),
)
_LADDER = TextColumn("ladder", "name")
_MEMORY, _START_UP = (
    Column("memory", "bytes", format_bytes),
    Column("start-up", "seconds", format_seconds),
)


def brief(plan: Plan) -> RenderableType:
    """The verdict, the ladders and the reasons, in at most 45 lines of 100 columns; ``render``
    shows everything.
    """
    if plan.evidence is None:
        return facts("Plan", [*_rows(plan), *said(plan, brief=True)])
    return stacked(*_answer(plan, Evidence.model_validate(plan.evidence), whole=False))


@render.register
def _plan(plan: Plan) -> RenderableType:
    by_mode = Counter(f"{mode} uniform" if key.uniform else str(mode) for mode, key in plan.keys)
    rows = [
        *_rows(plan),
        (
            "keys",
            ", ".join(f"{count} {mode}" for mode, count in by_mode.items())
            or "none: every batch runs eagerly",
        ),
        (
            "bounds",
            f"max_num_seqs {plan.max_num_seqs}, max_num_batched_tokens "
            f"{plan.max_num_batched_tokens}",
        ),
        ("config", plan.config_hash),
    ]
    padding = _padding(plan) if plan.keys and not plan.config.get("dims") else None
    if plan.evidence is None:
        return stacked(facts("Plan", [*rows, *said(plan)]), padding)
    evidence = Evidence.model_validate(plan.evidence)
    answer = _answer(plan, evidence, whole=True)
    return stacked(*answer, facts("Graphs", rows), padding, *_details(evidence))


def _rows(plan: Plan) -> list[Fact]:
    rows = [*head_rows(plan), ("batches", _served_by(plan))]
    if plan.query_len > 1:
        rows.append(("query length", f"{plan.query_len} tokens of each request in uniform decode"))
    if plan.max_loras is not None:
        cases = ", ".join(map(str, plan.lora_cases))
        rows.append(("LoRA cases", f"{cases} active adapters ({plan.max_loras + 1}: any number)"))
    return [*rows, *_predicted_rows(plan)]


def said(plan: Plan, brief: bool = False) -> list[Fact]:
    """Warnings, and then notes of a plan and its evidence, those on costs first; ``brief``: the
    first few.
    """
    evidence: dict[str, Any] = plan.evidence or {}
    notes = [*(plan.predicted.notes if plan.predicted else ()), *plan.notes]
    notes += [
        text
        for name in ("traffic_notes", "times_notes", "notes")
        for text in evidence.get(name, ())
    ]
    told = [
        ("warning", text) for text in (*plan.warnings, *plan.lint, *evidence.get("warnings", ()))
    ]
    told += [("note", text) for text in notes]
    left = len(told) - MOST_SAID if brief else 0
    return (
        [*told[:MOST_SAID], ("", f"and {left} more, which --verbose shows")] if left > 0 else told
    )


def _headline(plan: Plan, ladders: Sequence[LadderPoint]) -> str:
    """Graphs, start-up time and memory in one sentence: those of the plan, and of the ladder that
    it stands in for.
    """
    sizes, cost = plan.config.get("compilation", {}).get("cudagraph_capture_sizes"), plan.predicted
    asked = sizes if isinstance(sizes, str) else "configured" if sizes else "vllm"
    ladder = next((ladder for ladder in ladders if ladder.name == asked), None)

    def instead(ours: str, theirs: object) -> str:
        return f"{ours} instead of {theirs}" if theirs else ours

    whose = "the configured sizes'" if asked == "configured" else f"the {asked} ladder's"
    told = [instead(counted(len(plan.keys), "graph"), ladder and f"{whose} {ladder.graphs}")]
    if cost is not None:
        known = ladder if ladder and ladder.bytes is not None else None
        told.append(
            "start-up "
            f"{instead(format_seconds(cost.seconds), known and format_seconds(known.seconds))}"
        )
        told.append(
            f"memory {instead(format_bytes(cost.total_bytes), known and format_bytes(known.bytes))}"
        )
    unknown = "; --costs tells start-up time and memory" if cost is None and ladder else ""
    return f"Plan: {', '.join(told)}{unknown}"


def head_rows(plan: Plan) -> list[Fact]:
    """The model's target, the mode or each step from the requested one to it, and the sizes with
    their source.
    """
    target = ((plan.config or {}).get("model") or {}).get("target")
    changes = [
        ("mode", f"{change.requested} -> {change.resolved}: {change.reason}")
        for change in plan.changes
    ]
    source = (
        plan.sizes_source
        if plan.sizes_source.startswith(PLANNED_FOR)
        else f"from {plan.sizes_source}"
    )
    if plan.mode is CUDAGraphMode.NONE:
        text = f"none: {plan.sizes_source}"
    elif not plan.capture_sizes:
        text = f"none captured of those {source}"
    else:
        some = "; each lane has some of them" if len(set(plan.lanes().values())) > 1 else ""
        text = f"{len(plan.capture_sizes)} ({describe_sizes(plan.capture_sizes)}), {source}{some}"
    rows = [*(changes or [("mode", str(plan.mode))]), ("sizes", text)]
    return [("model", str(target)), *rows] if target else rows


def _served_by(plan: Plan) -> str:
    """The modes that run batches: graphs for mixed batches serve uniform decode where it has
    none.
    """
    modes = {lane.uniform: lane.mode for lane in reversed(plan.lanes())}
    mixed = modes.get(False, "eager")
    if not plan.mode.separate_routine():
        return f"all: {mixed}"
    return f"uniform decode: {modes.get(True, mixed)}; mixed: {mixed}"


def _predicted_rows(plan: Plan) -> list[Fact]:
    if (cost := plan.predicted) is None:
        return []
    parts = {
        "pool": sum(key.pool_bytes for key in cost.keys),
        "static buffers": cost.static_bytes,
        "driver": sum(key.driver_bytes for key in cost.keys),
        "workspaces": cost.workspace_bytes,
    }
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    estimated = " (an estimate: nothing of it was measured on the device)" if cost.estimated else ""
    rows = [
        ("memory", f"{listed}; total {format_bytes(cost.total_bytes)}"),
        ("start-up", format_seconds(cost.seconds)),
        ("predicted", f"by {cost.source}{estimated}"),
    ]
    if plan.machine is not None:
        driver = f", driver {plan.machine.driver}" if plan.machine.driver else ""
        rows.append(("measured on", f"{plan.machine.gpu}{driver}, torch {plan.machine.torch}"))
    return rows


def lane_table(plan: Plan) -> RenderableType:
    """Predicted cost of the keys of each lane, for a plan that has predictions."""
    pairs = zip(plan.keys, plan.predicted.keys if plan.predicted else (), strict=True)
    costs = grouped((Lane.of(*key), cost) for key, cost in pairs)
    sizes = plan.lanes()
    table = Grid(
        costs.items(),
        TextColumn("lane", "0"),
        Column("graphs", lambda row: len(row[1])),
        TextColumn("sizes", lambda row: sizes[row[0]], describe_sizes),
        Column("pool", lambda row: sum(cost.pool_bytes for cost in row[1]), format_bytes),
        Column("driver", lambda row: sum(cost.driver_bytes for cost in row[1]), format_bytes),
        Column("start-up", lambda row: sum(cost.seconds for cost in row[1]), format_seconds),
    )
    words = "in capture order; pool: growth beyond the pool that the graphs above have filled"
    return titled("Cost of each lane", table, sentences(words))


def case_table(cases: Sequence[CaseCost], max_loras: int) -> RenderableType:
    """Graphs and cost that each LoRA case adds to a plan."""

    def adapters(case: CaseCost) -> object:
        return case.num_active_loras if case.num_active_loras <= max_loras else "any number"

    words = "what the plan would save without that case alone; cases share the pool"
    if any(case.bytes is None for case in cases):
        words = (
            "memory and start-up are not known: give --costs FILE, --costs estimate or --costs "
            "measure"
        )
    table = Grid(cases, TextColumn("active adapters", adapters), _GRAPHS, _MEMORY, _START_UP)
    return titled("What each LoRA case adds", table, sentences(words))


# --- padding --------------------------------------------------------------------------------------


def _padding(plan: Plan) -> RenderableType:
    """One table for all lanes that have the same sizes."""
    alike = grouped((sizes, lane) for lane, sizes in plan.lanes().items())
    beyond = "no graph" if len(alike) == 1 else "another lane, or no graph"
    tables = []
    for sizes, lanes in alike.items():
        title = " and ".join(
            dict.fromkeys(str(lane._replace(num_active_loras=0)) for lane in lanes)
        )
        if plan.max_loras is not None:
            title += (
                f"; {', '.join(map(str, sorted({lane.num_active_loras for lane in lanes})))} "
                "active adapters"
            )
        if len(alike) > 1:
            title += f": {len(sizes)} ({describe_sizes(sizes)})"
        tables.append(titled(title, _padding_table(sizes, beyond)))
    return stacked(*tables)


def _padding_table(captured: Sequence[int], beyond: str) -> RenderableType:
    """Neighbours of equal distance share a row; in an irregular list, those between two powers of
    two.
    """
    pairs = tuple(pairwise((0, *captured)))
    groups = [list(group) for _, group in groupby(pairs, lambda pair: pair[1] - pair[0])]
    if len(groups) > MOST_PADDING_ROWS:
        groups = [list(group) for _, group in groupby(pairs, lambda pair: pair[1].bit_length())]
    rows: list[tuple[str, str, int | None]] = []
    for group in groups:
        first, sizes = group[0][0] + 1, [size for _, size in group]
        most = max(size - below for below, size in group) - 1
        span = f"{first} to {sizes[-1]}" if sizes[-1] > first else str(first)
        to = (
            "as it is"
            if most == 0
            else f"{'next of ' if len(sizes) > 1 else ''}{describe_sizes(sizes)}"
        )
        rows.append((span, to, most))
    return Grid(
        [*rows, (f"above {captured[-1]}", beyond, None)],
        TextColumn("batch of (tokens)", "0"),
        TextColumn("is padded to", "1"),
        Column("padding rows at most", "2"),
    )


# --- why these graphs -----------------------------------------------------------------------------


def _answer(plan: Plan, evidence: Evidence, whole: bool) -> Iterator[RenderableType | None]:
    """The verdict, the ladders, and why; ``whole``: with all warnings and notes."""
    sizes = "; ".join(f"{part.lane}: {describe_sizes(part.sizes)}" for part in evidence.lanes)
    if len(sizes) > MOST_SIZES and not whole:
        sizes = f"{sizes[:MOST_SIZES].rpartition(', ')[0]}, ...; --verbose shows all"
    modes = [row for row in head_rows(plan) if row[0] == "mode"]
    about_times = [("verdict", evidence.verdict), ("step times", evidence.times_source)]
    yield facts(
        _headline(plan, evidence.ladders),
        [*about_times, *modes, *([("sizes", sizes)] if sizes else [])],
    )
    yield None if evidence.graphs else Text("No graph: every batch runs eagerly.")
    yield _ladders(evidence)
    if evidence.loads:
        ladder, best = (
            Column(name, f"{name}_us", format_microseconds) for name in ("ladder", "best")
        )
        is_known = evidence.loads[0].best_us is not None
        words = (
            "best: the best plan of as many graphs for that load alone"
            if is_known
            else "each as this plan runs it"
        )
        table = Grid(
            evidence.loads, TextColumn("load", "source"), _STEP, ladder, best if is_known else None
        )
        yield titled("Each load", table, sentences(words))
    yield facts("Why", [*_reasons(evidence), *said(plan, brief=not whole)])


def _details(evidence: Evidence) -> Iterator[RenderableType]:
    if evidence.pareto:
        # the curve at powers of two, at the plan and at its ends
        ends = {evidence.pareto[0].graphs, evidence.pareto[-1].graphs, evidence.graphs}
        shown = [p for p in evidence.pareto if p.graphs in ends or not p.graphs & (p.graphs - 1)][
            :MOST_POINTS
        ]
        yield titled(
            "Graphs against expected step time", Grid(shown, _GRAPHS, _STEP, _MEMORY, _START_UP)
        )
    if evidence.pareto and evidence.ladders:
        equal = (Column("equal", "equal.graphs"), Column("within 0.1%", "alike.graphs"))
        table = Grid(evidence.ladders, _LADDER, _GRAPHS, Column("unused", "unused"), *equal)
        yield titled("Fewest graphs that do as well as a ladder", table, sentences(*_EQUAL_WORDS))
    if evidence.failed:
        rows = [
            (f"{part.lane} {describe_sizes(part.sizes)}", part.reason) for part in evidence.failed
        ]
        yield facts("Could not be captured, so the plan does without", rows)
    if evidence.left_out:
        title = "Left out, of the sizes that the configuration has without traffic"
        yield titled(
            title, Grid(evidence.left_out, _LANE, _SIZES, _WHY), sentences(_LEFT_OUT_WORDS)
        )
    if evidence.uses:
        least = sorted((use.share for use in evidence.uses), reverse=True)[:MOST_USES][-1]
        used = [use for use in evidence.uses if use.share >= least]
        columns = (
            TextColumn("graph", _used),
            Column("steps", "share", percent),
            Column("padding", "padding", percent),
        )
        rest = (
            f"and {len(evidence.uses) - len(used)} more, with fewer steps"
            if len(used) < len(evidence.uses)
            else ""
        )
        title = "Share of all steps that each graph runs, and padding of the tokens that it runs"
        yield titled(title, Grid(used, *columns), *([sentences(rest)] if rest else []))
    if evidence.padding_map:
        yield _padding_map(evidence.padding_map)
    if evidence.not_worth:
        spans = TextColumn("sizes", lambda part: f"{part.first} to {part.last}")
        yield titled("Sizes not worth a graph", Grid(evidence.not_worth, _LANE, spans, _WHY))


def _padding_map(found: PaddingMap) -> RenderableType:
    first, second = found.names
    lines = [
        Text(f"{first:>10} |" + "".join(f"{size:>5}" for size in found.columns) + f"  {second}")
    ]
    for size, shares in zip(found.rows, found.shares, strict=True):
        lines.append(Text(f"{size:>10} |"))
        for share in shares:
            cool = round(255 * (1 - (share or 0)))
            style = "" if share is None else f"black on rgb(255,{cool},{cool})"
            lines[-1].append(" " * 5 if share is None else f"{share:.0%}".rjust(5), style)
    return titled(f"Padding of the batches up to each {first} and {second}", *lines)


def _used(use: SizeUse) -> str:
    return (
        "eager"
        if use.size is None
        else f"{use.lane}: {' x '.join(map(str, (use.size, *use.sizes)))}"
    )


def graph_uses(evidence: Evidence) -> list[tuple[str, float, float]]:
    """Each graph, and the eager steps: name, padding of the tokens that it runs, and share of all
    steps.
    """
    return [(_used(use), use.padding, use.share) for use in evidence.uses]


def _reasons(evidence: Evidence) -> Iterator[Fact]:
    expected, worth = evidence.expected_us, evidence.next_graph
    yield "traffic", f"{evidence.traffic_source}: {evidence.traffic_weight:,.0f} steps"
    estimated = " (an estimate)" if evidence.costs_estimated else ""
    yield (
        "costs",
        "not known: give --costs"
        if evidence.costs_source is None
        else evidence.costs_source + estimated,
    )
    yield "rule", evidence.rule
    if evidence.insurance:
        yield (
            "insurance",
            f"{evidence.insurance:.0%} of the steps planned for are of sizes that the traffic "
            "need not show",
        )
    eager = "" if expected.eager is None else f"eager {format_microseconds(expected.eager)}, "
    bounds = f"{eager}with a graph for every size {format_microseconds(expected.bound)}"
    yield "step", f"{format_microseconds(expected.plan)} expected; {bounds}"
    proof = "proven: no plan within the limits is better, by these times and costs"
    if not evidence.exact:
        proof = "lower bound reported" + (
            f", at most {evidence.gap:.1%} above the best" if evidence.gap > 1e-6 else ""
        )
    bound = f"lower bound {format_microseconds(evidence.lower_bound_us)}"
    yield "proof", f"{proof}; {'insurance included' if evidence.insurance else bound}"
    binding = ", ".join(f"budget.{limit}" for limit in evidence.binding) or "no limit"
    unknown = " and ".join(f"budget.{limit}" for limit in evidence.unbounded)
    yield (
        "binding",
        f"{binding}; {unknown} not looked at, for want of --costs" if unknown else binding,
    )
    if worth is not None:
        brings = f"{format_microseconds(worth.microseconds)} a step ({worth.percent:.2g}%)"
        yield "next graph", brings if worth.percent >= 1e-3 else "would bring nothing"


def _ladders(evidence: Evidence) -> RenderableType | None:
    if not evidence.ladders:
        return None
    expected, plan = evidence.expected_us.plan, evidence.as_point("this plan")

    def gain(ladder: LadderPoint) -> str | None:
        shorter = "no gain" if ladder.no_gain else f"{1 - expected / ladder.expected_us:+.1%}"
        return None if ladder is plan else shorter

    table = _beside((plan, *evidence.ladders), TextColumn("gain", gain))
    words = _LADDER_WORDS[: 2 + (None not in (plan.decode_us, plan.mixed_us))]
    return titled("Ladders on the same traffic", table, sentences(*words))


def _beside(points: Sequence[LadderPoint], *more: Column) -> Grid:
    """Plans and ladders below each other: figures that are known, then ``more``."""
    known = {
        name
        for name in ("decode_us", "mixed_us", "bytes")
        if any(getattr(point, name) for point in points)
    }
    kinds = [
        Column(name, f"{name}_us", format_microseconds)
        for name in ("decode", "mixed")
        if f"{name}_us" in known
    ]
    return Grid(
        points,
        _LADDER,
        *(_GRAPHS, Column("step", "expected_us", format_microseconds)),
        *(kinds if len(kinds) == 2 else ()),
        *((_MEMORY, _START_UP) if "bytes" in known else ()),
        Column("padding", "padding", "{:.1%}".format),
        *more,
    )


@render.register
def _check(check: PlanCheck) -> RenderableType:
    rows = [("verdict", check.verdict), ("step times", check.times_source)]
    rows += [("traffic", f"{check.traffic_source}: {check.traffic_weight:,.0f} steps")]
    own = check.points[0]

    def regret(title: str, figure: str) -> Column:
        def longer(point: LadderPoint) -> float | None:
            theirs = getattr(point, figure)
            return getattr(own, figure) / theirs - 1 if theirs and point is not own else None

        return Column(title, longer, "{:+.1%}".format)

    kinds = [
        regret(f"of {name}", f"{name}_us")
        for name in ("decode", "mixed")
        if getattr(own, f"{name}_us")
    ]
    uses = Grid(
        check.uses,
        TextColumn("graph", lambda use: "eager" if use.size is None else f"{use.lane}: {use.size}"),
        *(
            Column(title, name, "{:.1%}".format)
            for title, name in (("steps", "share"), ("padding", "padding"))
        ),
        *(
            Column(title, name, format_microseconds)
            for title, name in (("step", "step_us"), ("at own size", "own_us"))
        ),
        Column(
            "lost",
            lambda use: use.share * (use.step_us - use.own_us) / own.expected_us,
            "{:.1%}".format,
        ),
    )
    words = (
        "at own size: in a graph of the batch's own size; lost: to padding, of the time of all "
        "steps"
    )
    return stacked(
        facts("Check", [*rows, *(("note", text) for text in check.notes)]),
        Group(
            _beside(check.points, regret("regret", "expected_us"), *kinds), sentences(_REGRET_WORDS)
        ),
        Group(uses, sentences(words)),
    )


# --- differences ----------------------------------------------------------------------------------


def render_difference(difference: PlanDifference, old: str, new: str) -> RenderableType:
    """Changes from one plan to another; ``old`` and ``new`` name them."""
    settings = [(change.name, _both(change)) for change in difference.settings] or [
        ("settings", "the same")
    ]
    failed = [
        ("left out", f"{part.lane} {describe_sizes(part.sizes)}: {part.reason}")
        for part in difference.failed
    ]
    notes = [("note", text) for text in difference.notes]
    lanes = Grid(
        difference.changed_lanes,
        _LANE,
        TextColumn("added", lambda part: part.added or None, describe_sizes),
        TextColumn("removed", lambda part: part.removed or None, describe_sizes),
        TextColumn("kept", lambda part: part.kept or None, describe_sizes),
    )
    figures = [
        _figure("graphs", difference.graphs, "{:.0f}".format),
        _figure("memory", difference.memory, lambda value: format_bytes(int(value))),
        _figure("start-up", difference.seconds, format_seconds),
        _figure("expected step", difference.expected_us, format_microseconds),
    ]
    return stacked(
        facts(f"{old} -> {new}", [*settings, *failed, *notes]),
        lanes if difference.changed_lanes else Text("No graph is added or removed."),
        Grid(figures, TextColumn("", "0"), *map(Column, ("old", "new", "change", "share"), "1234")),
    )


def _both(change: FieldChange) -> str:
    """``256 -> 64``, values as JSON has them; limits with their units."""
    formats = {
        "budget.capture_time": format_seconds,
        "budget.memory": format_bytes,
        "budget.reserve": format_bytes,
    }
    text = formats.get(change.name, json.dumps)
    old, new = ("absent" if value is None else text(value) for value in (change.old, change.new))
    return f"{old} -> {new}"


def _figure(name: str, figure: Figure, text: Callable[[float], str]) -> tuple[str | None, ...]:
    old, new = (None if value is None else text(value) for value in (figure.old, figure.new))
    change = share = None
    if figure.change is not None:
        sign = "+" if figure.change > 0 else "-" if figure.change else ""
        change = sign + text(abs(figure.change))
        share = f"{figure.change / figure.old:+.1%}" if figure.old else None
    return name, old, new, change, share


@render.register
def _replan(report: ReplanReport) -> RenderableType:
    has_new = report.captured or report.recaptured or report.way in ("proposed", "exchanged")
    rows = [
        (
            "graphs",
            _WAYS[report.way] if has_new else "all given up with their pools, and none captured",
        )
    ]
    if report.way != "proposed":
        again = f", {report.recaptured} captured again" if report.recaptured else ""
        rows.append(
            ("keys", f"{len(report.captured)} captured, {len(report.evicted)} evicted{again}")
        )
    told = {(part.lane, size) for part in report.difference.failed for size in part.sizes}
    for key in report.failed:
        if (key.lane, key.descriptor.num_tokens) not in told:
            rows.append(("failed", f"{key.mode} {key.descriptor}: {key.text}"))
    before, after = map(format_bytes, report.pool_bytes)
    rows += [("pools", f"{before} before, {after} after"), ("time", format_seconds(report.seconds))]
    return stacked(
        render_difference(report.difference, "captured", "wanted"), facts("Replan", rows)
    )
