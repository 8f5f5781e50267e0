"""Plans, and their differences, as tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from cgplan.modes import CUDAGraphMode
from cgplan.optimizer.evidence import (
    Evidence,
    LadderPoint,
    LoadPoint,
    PlanCheck,
    SizeUse,
    limit_words,
)
from cgplan.planning import Plan
from cgplan.planning.difference import FieldChange, Figure, PlanDifference, compare
from cgplan.planning.plan import PLANNED_FOR, Lane, Predicted
from cgplan.reports.layout import (
    Bytes,
    Column,
    Fact,
    Facts,
    Grid,
    Microseconds,
    Seconds,
    Sentences,
    Share,
    TextColumn,
    describe_sizes,
    figures,
    labelled,
    memory_text,
    render,
    stacked,
    titled,
    verbatim,
)
from cgplan.reports.records import Beside, ReplanReport, ReplanWay
from cgplan.units import (
    format_bytes,
    format_microseconds,
    format_seconds,
    from_to,
    grouped,
)

MOST_LADDERS = 4
MOST_PADDING_ROWS = 12
MOST_POINTS = 12
MOST_SAID = 4
MOST_USES = 24
MOST_SIZES = 150  # characters
SAME_MEMORY = 0.01  # a change of memory that is none
NOTABLE = 0.05  # how much longer steps of a load are for a warning
LEAST_SHOWN = 0.0005  # a share that 0.1% is written for
_WAYS: dict[ReplanWay, str] = {
    "proposed": "proposed only: nothing was captured",
    "exchanged": "exchanged inside the pools",
    "new generation": "all captured again: the pool needs another size",
    "new buffers": "all captured again, into new static buffers: the largest size grew",
}
_LANE = TextColumn("lane")
_SIZES = TextColumn("sizes", "sizes", describe_sizes)
_LADDER = TextColumn("ladder", "name")
GRAPHS = Column("graphs")
STEP = Microseconds("expected step", "expected_us")
_COSTS = (Bytes("memory", "bytes"), Seconds("start-up", "seconds"))
POINT = (GRAPHS, STEP, *_COSTS)


def _used(use: SizeUse) -> str:
    if use.size is None:
        return "eager"
    return f"{use.lane}: {' x '.join(map(str, (use.size, *use.sizes)))}"


USES = (TextColumn("graph", _used), Share("steps", "share"), Share("padding"))


@render.register
def _plan(plan: Plan, whole: bool = True) -> RenderableType:
    rows = [*_rows(plan)]
    padding = None
    if whole:
        rows += _more_rows(plan)
        if plan.keys and len(plan.config.get("dims") or ()) < 2:
            padding = _padding(plan)
    if not plan.evidence:
        rows += said(plan, brief=not whole)
        head = Facts(f"Plan: {plan.graph_words}", rows)
        return stacked(head, padding, _to_paste(plan))
    evidence = Evidence.model_validate(plan.evidence)
    details = []
    if whole:
        details = [Facts("Graphs", rows), padding, *_details(evidence)]
    return stacked(*_answer(plan, evidence, whole), *details, _to_paste(plan))


brief = partial(_plan, whole=False)


def _to_paste(plan: Plan) -> RenderableType | None:
    emission = plan.emission
    if not emission or (plan.evidence or {}).get("keep"):
        return None
    notes = Facts(emission.title, labelled("note", emission.notes))
    if not emission.is_to_paste:
        return notes
    return Group(notes, verbatim(emission.block))


def _rows(plan: Plan) -> Iterator[Fact]:
    yield from head_rows(plan)
    yield "batches", _served_by(plan)
    if plan.query_len > 1:
        least = "1 to " if any(key.max_query_len for _, key in plan.keys) else ""
        yield "query length", f"{least}{plan.query_len} tokens of each request in uniform decode"
    if plan.max_loras is not None:
        cases = ", ".join(map(str, plan.lora_cases))
        most = plan.max_loras
        any_number = f"{most + 1}: any number up to max_loras {most}"
        yield "LoRA cases", f"{cases} active adapters ({any_number})"
    cost = plan.predicted
    if not cost:
        return
    parts = {
        "pool": cost.pool_bytes,
        "static buffers": cost.static_bytes,
        "driver": cost.driver_bytes,
        "workspaces": cost.workspace_bytes,
    }
    yield "memory", memory_text(parts, cost.total_bytes)
    yield "start-up", format_seconds(cost.seconds)
    yield "costs", predicted_by(cost)
    machine = plan.machine
    if machine:
        version = f", driver {machine.driver}" if machine.driver else ""
        yield "measured on", f"{machine.gpu}{version}, torch {machine.torch}"


def predicted_by(cost: Predicted) -> str:
    source = cost.source
    if cost.estimated:
        source += ", an estimate"
    if cost.extrapolated:
        source += ", extrapolated to larger graphs"
    return source


def _more_rows(plan: Plan) -> Iterator[Fact]:
    by_mode = Counter[str]()
    for mode, key in plan.keys:
        by_mode[f"{mode} uniform" if key.uniform else str(mode)] += 1
    keys = ", ".join(f"{count} {mode}" for mode, count in by_mode.items())
    yield "keys", keys or "none: every batch runs eagerly"
    bounds = f"max_num_seqs {plan.max_num_seqs}, max_num_batched_tokens"
    yield "bounds", f"{bounds} {plan.max_num_batched_tokens}"
    yield "config", plan.config_hash


def said(plan: Plan, brief: bool = False) -> list[Fact]:
    evidence = plan.evidence or {}
    notes = [*plan.notes]
    if plan.predicted:
        notes = [*plan.predicted.notes, *notes]
    for name in ("notes", "traffic_notes", "times_notes"):
        notes += evidence.get(name, ())
    warnings = [*plan.warnings, *plan.lint]
    for name in ("unsure", "warnings"):
        warnings += evidence.get(name, ())
    weighed = []
    for name in ("decided", "decisions"):
        weighed += labelled("weighed", evidence.get(name, ()))
    notes = [text for text in notes if text not in warnings]
    told = labelled("warning", warnings)
    told += labelled("note", notes)
    shown = max(MOST_SAID - len(weighed), len(warnings))
    left = len(told) - shown
    if not brief or left <= 0:
        return [*weighed, *told]
    return [*weighed, *told[:shown], ("", f"{left} more with --verbose")]


def _headline(plan: Plan, evidence: Evidence) -> str:
    named = (ladder for ladder in evidence.ladders if evidence.asked in (None, ladder.name))
    ladder = next(named, None)
    graphs = plan.graph_words
    if ladder and (plan.keys or ladder.graphs):
        if not evidence.keep:
            graphs += f" instead of {ladder.words}"
        elif evidence.graphs > ladder.graphs:
            graphs = f"keep {ladder.words}; {graphs} are as good"
        else:
            graphs = f"keep {ladder.words}"
        idle = evidence.graphs - sum(use.size is not None for use in evidence.uses)
        if idle and evidence.insurance and evidence.graphs > ladder.graphs > 0:
            graphs += (
                f" ({idle} for batches that max_num_seqs = {plan.max_num_seqs} allows and the "
                "traffic does not show: --insurance 0 plans without)"
            )
    if plan.mode is CUDAGraphMode.NONE:
        return f"Plan: {graphs} in mode NONE: leave out cudagraph_mode, or add --mode best"
    cost = plan.predicted
    if not cost:
        hint = "; --costs estimate tells start-up and memory"
        if plan.key_rules == "vllm_v2":
            hint = "; --costs start.log, vLLM's log of a start, tells start-up and memory"
        return f"Plan: {graphs}{hint if ladder else ''}"
    seconds = format_seconds(cost.seconds)
    memory = format_bytes(cost.total_bytes)
    if ladder and ladder.bytes is not None:
        seconds += f" instead of {format_seconds(ladder.seconds or 0)}"
        theirs = format_bytes(ladder.bytes)
        if theirs != memory:
            memory += f" instead of {theirs}"
        if abs(cost.total_bytes - ladder.bytes) <= SAME_MEMORY * ladder.bytes:
            memory += "; for less: --memory" if evidence.slo else "; for less: --memory or --slo"
    about = "estimated " if cost.estimated or cost.extrapolated else ""
    start = "captures" if cost.estimated else "start-up"
    lacking = ""
    if plan.draft_keys and not cost.has_drafts:
        lacking = "; start-up and memory are without the draft model's"
    return f"Plan: {graphs}, {about}{start} {seconds}, {about}memory {memory}{lacking}"


def subject(plan: Plan) -> str:
    """The model, and the first input with a fixed size, which tells resolutions apart."""
    parts = []
    target = (plan.config.get("model") or {}).get("target")
    if target:
        parts.append(str(target))
    parts += plan.fixed_inputs[:1]
    return ", ".join(parts)


def head_rows(plan: Plan) -> list[Fact]:
    rows = []
    model = subject(plan)
    if model:
        rows.append(("model", model))
    for change in plan.changes:
        rows.append(("mode", f"{change.requested} -> {change.resolved}: {change.reason}"))
    if not plan.changes:
        rows.append(("mode", str(plan.mode)))
    rows.append(("sizes", _sizes(plan)))
    return rows


def _sizes(plan: Plan) -> str:
    source = plan.sizes_source
    if plan.mode is CUDAGraphMode.NONE:
        return f"none: {source}"
    if not source.startswith(PLANNED_FOR):
        source = f"from {source}"
    sizes = plan.capture_sizes
    if not sizes:
        return f"none captured of those {source}"
    some = "; each lane has some of them" if len(set(plan.lanes().values())) > 1 else ""
    return f"{len(sizes)} ({describe_sizes(sizes)}), {source}{some}"


def _served_by(plan: Plan) -> str:
    """Uniform decode without graphs of its own takes those of mixed batches."""
    captured = {mode: mode for mode, _ in plan.keys}
    mixed = captured.get(plan.mode.mixed_mode(), "eager")
    if not plan.mode.separate_routine():
        return f"all: {mixed}"
    return f"uniform decode: {captured.get(plan.mode.decode_mode(), mixed)}; mixed: {mixed}"


def lane_table(plan: Plan) -> RenderableType | None:
    if not plan.predicted:
        return None
    sizes = plan.lanes()
    rows = []
    lanes = [Lane.of(*key) for key in plan.keys]
    by_lane = grouped(zip(lanes, plan.predicted.keys, strict=True))
    for lane, costs in by_lane.items():
        pool = sum(cost.pool_bytes for cost in costs)
        driver = sum(cost.driver_bytes for cost in costs)
        seconds = sum(cost.seconds for cost in costs)
        rows.append((lane, len(costs), sizes[lane], pool, driver, seconds))
    return figures(
        "Cost of each lane",
        rows,
        TextColumn("lane", "0"),
        Column("graphs", "1"),
        TextColumn("sizes", "2", describe_sizes),
        Bytes("pool", "3"),
        Bytes("driver", "4"),
        Seconds("start-up", "5"),
        words=["in capture order; pool: growth beyond the graphs above"],
    )


# --- padding --------------------------------------------------------------------------------------


def _padding(plan: Plan) -> RenderableType:
    """Sizes of equal distance, else between powers of two, share a row."""
    alike = grouped((sizes, lane) for lane, sizes in plan.lanes().items())
    beyond = "no graph" if len(alike) == 1 else "another lane, or no graph"
    unit = plan.dim_names[0].removeprefix("num_")
    tables = []
    for captured, lanes in alike.items():
        names = {}
        cases = set()
        for lane in lanes:
            names[str(lane._replace(num_active_loras=0))] = lane
            cases.add(lane.num_active_loras)
        title = " and ".join(names)
        if plan.max_loras is not None:
            title += f"; LoRA cases {', '.join(map(str, sorted(cases)))}"
        if len(alike) > 1:
            title += f": {len(captured)} ({describe_sizes(captured)})"
        pairs = tuple(pairwise((0, *captured)))
        groups = [list(group) for _, group in groupby(pairs, lambda pair: pair[1] - pair[0])]
        if len(groups) > MOST_PADDING_ROWS:
            groups = [list(group) for _, group in groupby(pairs, lambda pair: pair[1].bit_length())]
        rows: list[tuple[str, str, int | None]] = []
        for group in groups:
            sizes = [size for _, size in group]
            most = max(size - below for below, size in group) - 1
            to = describe_sizes(sizes)
            if len(sizes) > 1:
                to = f"next of {to}"
            span = from_to(group[0][0] + 1, sizes[-1])
            rows.append((span, to if most else "as it is", most))
        rows.append((f"above {captured[-1]}", beyond, None))
        table = Grid(
            rows,
            TextColumn(f"batch of ({unit})", "0"),
            TextColumn("is padded to", "1"),
            Column("padding rows at most", "2"),
        )
        tables.append(titled(title, table))
    return stacked(*tables)


# --- why these graphs -----------------------------------------------------------------------------


def _answer(
    plan: Plan,
    evidence: Evidence,
    whole: bool,
) -> Iterator[RenderableType | None]:
    sizes = "; ".join(f"{part.lane}: {describe_sizes(part.sizes)}" for part in evidence.lanes)
    if plan.config.get("dims"):
        sizes = ", ".join(_used(use).partition(": ")[2] for use in evidence.uses)
    if len(sizes) > MOST_SIZES and not whole:
        sizes = f"{sizes[:MOST_SIZES].rpartition(', ')[0]}, ...; --verbose shows all"
    rows = [("verdict", evidence.verdict)]
    rows += labelled("weighed", evidence.decided)
    rows += labelled("warning", evidence.unsure)
    worst = max(evidence.loads, key=_longer, default=None)
    if worst and _longer(worst) >= NOTABLE:
        took = format_microseconds(worst.expected_us)
        took += f" a step, {format_microseconds(worst.ladder_us or 0)} with the graphs asked for"
        limits = ", --".join(evidence.binding).replace("_", "-")
        remedy = "keep those if these steps matter, or add --scale 1,2,4"
        if limits:
            remedy = f"a larger --{limits} shortens it"
        if "slo" in evidence.binding:
            remedy = (
                "a smaller --slo shortens it; the SLO holds at the loads given alone: --scale 1,2 "
                "adds one"
            )
        rows.append(("warning", f"{worst.source}: {took}; {remedy}"))
    told = [row for row in said(plan, brief=not whole) if row not in rows]
    traffic = f"{evidence.traffic_source}: {evidence.traffic_weight:,.0f} steps"
    if evidence.service and evidence.replicas == 1:
        traffic += ", all on one server: if several share them, give --replicas"
    rows.append(("traffic", traffic))
    rows.append(("step times", evidence.times_source))
    rows += [row for row in _rows(plan) if row[0] in ("mode", "LoRA cases")]
    if sizes:
        label = "also as good" if evidence.keep else "sizes"
        rows.append((label, sizes))
        share = sum(use.share for use in evidence.uses if use.size is None)
        if share >= LEAST_SHOWN:
            eager = f"{share:.1%} of steps, which have no graph"
            if plan.max_capture_size < plan.max_num_seqs:
                eager += f"; max_num_seqs stays {plan.max_num_seqs}"
            rows.append(("eager", eager))
    yield Facts(_headline(plan, evidence), rows)
    yield _ladders(evidence, whole)
    if whole or not evidence.other_loads:
        yield figures(
            "Each load",
            evidence.loads,
            TextColumn("load", "source"),
            STEP,
            Microseconds("ladder", "ladder_us"),
            words=["each as this plan runs it"],
        )
    words = [f"of {load}" for load in {point.load for point in evidence.service} if load]
    if any(point.service.unmeasured for point in evidence.service):
        shares = ", ".join(f"{point.service.unmeasured:.1%}" for point in evidence.service)
        words.append(f"extrapolated, as larger than those measured: {shares} of the steps")
    yield figures(
        "What requests get",
        evidence.service,
        TextColumn("graphs of", "name"),
        GRAPHS,
        Microseconds("TTFT p50", "service.ttft_us.p50"),
        Microseconds("p99", "service.ttft_us.p99"),
        Microseconds("TPOT p50", "service.tpot_us.p50"),
        Microseconds("p99", "service.tpot_us.p99"),
        Microseconds("decode step p99", "service.decode_us.p99"),
        Column("tokens/s", "service.tokens_per_s", "{:.0f}".format),
        words=words,
    )
    yield Facts("Why", [*_reasons(plan, evidence, whole), *told])


def _longer(load: LoadPoint) -> float:
    """Than with the graphs asked for, as a share."""
    return load.expected_us / (load.ladder_us or load.expected_us) - 1


def _details(evidence: Evidence) -> Iterator[RenderableType | None]:
    if evidence.pareto:
        ends = (evidence.pareto[0].graphs, evidence.pareto[-1].graphs, evidence.graphs)
        shown = [
            point
            for point in evidence.pareto
            if point.seconds != 0 and (point.graphs in ends or point.graphs.bit_count() == 1)
        ]
        yield figures(
            "Graphs against expected step time",
            shown[:MOST_POINTS],
            *POINT,
            words=[
                "for the batches and mode of this plan, without graphs of a draft model or "
                "limits of memory and time; other graphs have other batches"
            ],
        )
    if evidence.failed:
        rows = [
            (f"{part.lane} {describe_sizes(part.sizes)}", part.reason) for part in evidence.failed
        ]
        yield Facts("Could not be captured, so the plan does without", rows)
    if evidence.uses:
        least = sorted((use.share for use in evidence.uses), reverse=True)[:MOST_USES][-1]
        used = [use for use in evidence.uses if use.share >= least]
        rest = len(evidence.uses) - len(used)
        more = [f"and {rest} more, with fewer steps"] if rest else []
        yield figures(
            "Share of all steps, and padding, of each graph",
            used,
            *USES,
            words=more,
        )


def _assumptions(plan: Plan, evidence: Evidence) -> Iterator[Fact]:
    yield "costs", predicted_by(plan.predicted) if plan.predicted else "not known: give --costs"
    yield "rule", evidence.rule
    if evidence.insurance:
        unseen = "of the steps have sizes not seen, to the largest that may come, max_num_seqs"
        yield "insurance", f"{evidence.insurance:.0%} {unseen} = {plan.max_num_seqs}"
    loads = evidence.loads
    if evidence.other_loads:
        names = dict.fromkeys(load.source.partition(" (")[0] for load in loads[1:])
        told = f"{evidence.other_loads:.0%} of steps: {', '.join(names)}"
        longest = max(map(_longer, loads))
        yield "loads", f"{told}; steps {longest:+z.1%} at worst"


def _reasons(plan: Plan, evidence: Evidence, whole: bool) -> Iterator[Fact]:
    if whole:
        yield from _assumptions(plan, evidence)
    more = []
    if evidence.insurance:
        more.append(f"{evidence.insurance:.0%} of unseen sizes")
    if evidence.other_loads:
        more.append("higher loads")
    bound = format_microseconds(evidence.expected_us.bound)
    step = f"{format_microseconds(evidence.expected_us.plan)} expected; bound {bound}"
    if evidence.unmeasured_graphs:
        step += f"; {evidence.unmeasured_graphs} of {evidence.graphs} graphs extrapolated"
    if more:
        step += f"; planned with {' and '.join(more)}"
    yield "step", step
    binding = ", ".join(map(limit_words, evidence.binding)) or "no limit"
    if evidence.unbounded:
        unknown = " and ".join(f"budget.{limit}" for limit in evidence.unbounded)
        binding += f"; {unknown} not looked at, for want of --costs"
    yield "binding", binding
    worth = evidence.next_graph
    if worth:
        brings = f"{format_microseconds(worth.microseconds)} a step ({worth.percent:.2g}%)"
        if evidence.one_list:
            brings += " with a size more"
        if not evidence.binding and "max_graphs" not in plan.budget:
            brings += (
                "; --max-graphs has it (the plan is at least as good as your sizes and vLLM's)"
            )
        unseen = f"is for {' or '.join(more)}, and " if more else ""
        nothing = f"{unseen}would bring this traffic nothing"
        yield "next graph", brings if worth.percent >= 1e-3 else nothing


def _ladders(evidence: Evidence, whole: bool) -> RenderableType | None:
    if not evidence.ladders:
        return None
    expected = evidence.expected_us
    plan = evidence.as_point("this plan")
    eager = "" if expected.eager is None else " or eager"

    def gain(ladder: LadderPoint) -> str | None:
        if ladder is plan:
            return None
        shorter = 1 - expected.plan / ladder.expected_us
        is_near = ladder.no_gain and shorter > -LEAST_SHOWN
        return "no gain" if is_near else f"{shorter:+.1%}"

    shown = evidence.ladders
    more = ""
    most = 2 if evidence.one_list else MOST_LADDERS  # others are of other engines
    if len(shown) > most and not whole:
        more = f"; {len(shown) - most} more with --verbose"
        shown = shown[:most]
    words = [
        f"padding: share of all that runs; gain: how much shorter the plan's step is{more}",
        f"bound: each batch at its best, in a graph{eager}; no gain: graphs within 1% of it",
    ]
    table = _beside((plan, *shown), TextColumn("gain", gain))
    return titled("Ladders on the same traffic", table, Sentences(*words))


def _beside(points: Sequence[LadderPoint], *more: Column) -> Grid:
    columns = [_LADDER, GRAPHS, Microseconds("step", "expected_us")]
    if any(point.decode_us for point in points) and any(point.mixed_us for point in points):
        columns += [Microseconds("decode", "decode_us"), Microseconds("mixed", "mixed_us")]
    if any(point.bytes for point in points):
        columns += _COSTS
    return Grid(
        points,
        *columns,
        Share("padding"),
        *more,
    )


@render.register
def _check(check: PlanCheck) -> RenderableType:
    rows = [
        ("verdict", check.verdict),
        *labelled("warning", check.warnings),
        ("step times", check.times_source),
        ("traffic", f"{check.traffic_source}: {check.traffic_weight:,.0f} steps"),
        *labelled("note", check.notes),
    ]
    own = check.points[0]
    whole = own.expected_us

    def regret(figure: str, point: LadderPoint) -> float | None:
        theirs = getattr(point, figure)
        if point is own or not theirs:
            return None
        mine = getattr(own, figure)
        return float(mine / theirs - 1)

    compared = {"regret": "expected_us"}
    regret_words = "regret: how much longer steps of this plan are"
    if own.decode_us and own.mixed_us:
        compared |= {"of decode": "decode_us", "of mixed": "mixed_us"}
        regret_words += "; of decode, of mixed: those of uniform decode, and others"
    regrets = [
        Column(title, partial(regret, figure), "{:+z.1%}".format)
        for title, figure in compared.items()
    ]
    uses = Grid(
        check.uses,
        *USES,
        Microseconds("step", "step_us"),
        Microseconds("at own size", "own_us"),
        Share("lost", lambda use: use.share * (use.step_us - use.own_us) / whole),
    )
    words = "at own size: in a graph of the batch's size; lost: to padding, of all time"
    return stacked(
        Facts("Check", rows),
        Group(_beside(check.points, *regrets), Sentences(regret_words)),
        Group(uses, Sentences(words)),
    )


# --- differences ----------------------------------------------------------------------------------


def render_difference(
    difference: PlanDifference,
    old: str,
    new: str,
) -> RenderableType:
    rows = [(change.name, _both(change)) for change in difference.settings]
    rows = rows or [("settings", "the same")]
    for part in difference.failed:
        rows.append(("left out", f"{part.lane} {describe_sizes(part.sizes)}: {part.reason}"))
    rows += labelled("note", difference.notes)
    lanes: RenderableType = Text("No graph of the model is added or removed.")
    if difference.changed_lanes:
        columns = [
            TextColumn(name, name, lambda sizes: describe_sizes(sizes, "-"))
            for name in ("added", "removed", "kept")
        ]
        lanes = Grid(difference.changed_lanes, _LANE, *columns)
    both = Grid(
        [
            _figure(
                "graphs",
                difference.graphs,
                "{:.0f}".format,
            ),
            _figure("memory", difference.memory, format_bytes),
            _figure("start-up", difference.seconds, format_seconds),
            _figure("expected step", difference.expected_us, format_microseconds),
        ],
        TextColumn("", "0"),
        Column("old", "1"),
        Column("new", "2"),
        Column("change", "3"),
        Column("share", "4"),
    )
    return stacked(
        Facts(f"{old} -> {new}", rows),
        lanes,
        both,
    )


@render.register
def _side_by_side(both: Beside) -> RenderableType:
    reports = both.reports.values()
    plans = [report for report in reports if isinstance(report, Plan)]
    if len(plans) > 1:
        return render_difference(compare(*plans), *both.reports)
    parts = []
    for file, report in both.reports.items():
        parts.append(titled(file, render(report)))
    return stacked(*parts)


def _both(change: FieldChange) -> str:
    formats = {
        "budget.capture_time": format_seconds,
        "budget.memory": format_bytes,
        "budget.reserve": format_bytes,
    }
    text = formats.get(change.name, json.dumps)
    both = []
    for value in (change.old, change.new):
        both.append("absent" if value is None else text(value))
    return " -> ".join(both)


def _figure(
    name: str,
    figure: Figure,
    text: Callable[[Any], str],
) -> tuple[str | None, ...]:
    both = []
    for value in (figure.old, figure.new):
        both.append(None if value is None else text(value))
    if figure.change is None:
        return name, *both, None, None
    change = text(abs(figure.change))
    if figure.change:
        change = f"{'+' if figure.change > 0 else '-'}{change}"
    share = f"{figure.change / figure.old:+.1%}" if figure.old else None
    return name, *both, change, share


@render.register
def _replan(report: ReplanReport) -> RenderableType:
    rows = [("graphs", _WAYS[report.way])]
    is_kept = report.way in ("proposed", "exchanged")
    if not (is_kept or report.captured or report.recaptured):
        rows = [("graphs", "all given up with their pools, and none captured")]
    rows.append(("verdict", report.verdict))
    if report.way != "proposed":
        keys = f"{len(report.captured)} captured, {len(report.evicted)} evicted"
        if report.recaptured:
            keys += f", {report.recaptured} captured again"
        rows.append(("keys", keys))
    told: set[tuple[Lane, int]] = set()
    for part in report.difference.failed:
        told.update((part.lane, size) for size in part.sizes)
    for key in report.failed:
        if (key.lane, key.descriptor.num_tokens) not in told:
            rows.append(("failed", f"{key.label}: {key.text}"))
    before, after = map(format_bytes, report.pool_bytes)
    rows.append(("pools", f"{before} before, {after} after"))
    rows.append(("time", format_seconds(report.seconds)))
    difference = render_difference(report.difference, "captured", "wanted")
    return stacked(difference, Facts("Replan", rows))
