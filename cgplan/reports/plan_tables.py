"""Plans, and the difference of two, as tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cgplan.modes import CUDAGraphMode
from cgplan.planning import Plan
from cgplan.planning.plan import PLANNED_FOR, Lane
from cgplan.reports.layout import describe_sizes, facts, filled
from cgplan.units import format_bytes, format_microseconds, format_seconds

if TYPE_CHECKING:
    from cgplan.planning.difference import FieldChange, Figure, PlanDifference

MOST_PADDING_ROWS = 12


def render_plan(plan: Plan) -> RenderableType:
    """A plan: what will be captured, what it is predicted to cost, and what batches are padded to."""
    by_mode = Counter(f"{mode} uniform" if key.uniform else str(mode) for mode, key in plan.keys)
    rows = [
        *model_rows(plan),
        *mode_rows(plan),
        sizes_row(plan),
        ("keys", ", ".join(f"{count} {mode}" for mode, count in by_mode.items()) or "none: every batch runs eagerly"),
        ("batches", _ways(plan)),
        ("bounds", f"max_num_seqs {plan.max_num_seqs}, max_num_batched_tokens {plan.max_num_batched_tokens}"),
    ]
    if plan.query_len > 1:
        rows.append(("query length", f"{plan.query_len} tokens of each request in uniform decode"))
    if plan.max_loras is not None:
        cases = ", ".join(map(str, plan.lora_cases))
        rows.append(("LoRA cases", f"{cases} active adapters ({plan.max_loras + 1}: any number)"))
    said = [("note", text) for text in plan.notes] + [("warning", text) for text in (*plan.warnings, *plan.lint)]
    head = facts("Plan", [*rows, *predicted_rows(plan), ("config", plan.config_hash), *said])
    parts = [head]
    if plan.keys:
        parts.append(_padding_of_all(plan) if _has_one_list(plan) else _padding_by_lane(plan))
    if (why := _why(plan)) is not None:
        parts.append(why)
    return Group(*[part for found in parts for part in (found, Text())][:-1])


def _why(plan: Plan) -> RenderableType | None:
    """Why the plan is as it is; None where it does not say, or not in the words of this version."""
    if plan.evidence is None:
        return None
    from cgplan.optimizer.evidence import Evidence  # only here, so that a plan without evidence is shown at once
    from cgplan.reports.evidence_tables import render_evidence

    try:
        return render_evidence(Evidence.model_validate(plan.evidence))
    except ValidationError:
        return None


def model_rows(plan: Plan) -> list[tuple[str, str]]:
    """The target of the model that the plan was made for, where its configuration names one."""
    model = (plan.config or {}).get("model")
    target = model.get("target") if isinstance(model, dict) else None
    return [("model", str(target))] if target else []


def mode_rows(plan: Plan) -> list[tuple[str, str]]:
    """The mode, or each step from what was asked for to it."""
    changes = [("mode", f"{change.requested} -> {change.resolved}: {change.reason}") for change in plan.changes]
    return changes or [("mode", str(plan.mode))]


def sizes_row(plan: Plan) -> tuple[str, str]:
    """How many sizes there are, which, and where they came from."""
    source = plan.sizes_source if plan.sizes_source.startswith(PLANNED_FOR) else f"from {plan.sizes_source}"
    if plan.mode is CUDAGraphMode.NONE:
        return "sizes", f"none: {plan.sizes_source}"
    if not plan.capture_sizes:
        return "sizes", f"none captured of those {source}"
    some = "" if _has_one_list(plan) else "; each lane has some of them"
    return "sizes", f"{len(plan.capture_sizes)} ({describe_sizes(plan.capture_sizes)}), {source}{some}"


def render_difference(difference: PlanDifference, old: str, new: str) -> RenderableType:
    """What changes from one plan to another; ``old`` and ``new`` name them."""
    settings = [(change.name, _both(change)) for change in difference.settings] or [("settings", "the same")]
    failed = [("left out", f"{part.lane} {describe_sizes(part.sizes)}: {part.reason}") for part in difference.failed]
    notes = [("note", text) for text in difference.notes]
    parts: list[RenderableType] = [facts(f"{old} -> {new}", [*settings, *failed, *notes]), Text()]
    lanes: list[dict[str, object]] = [
        {
            "lane": lane.lane,
            "added": describe_sizes(lane.added) if lane.added else None,
            "removed": describe_sizes(lane.removed) if lane.removed else None,
            "kept": len(lane.kept),
        }
        for lane in difference.changed_lanes
    ]
    parts += [filled(lanes, left=("lane", "added", "removed")) if lanes else Text("No graph is added or removed.")]
    figures: list[dict[str, object]] = [
        _figure("graphs", difference.graphs, lambda value: f"{value:.0f}"),
        _figure("memory", difference.memory, lambda value: format_bytes(int(value))),
        _figure("start-up", difference.seconds, format_seconds),
        _figure("expected step", difference.expected_us, format_microseconds),
    ]
    return Group(*parts, Text(), filled(figures, left=("",)))


def _both(change: FieldChange) -> str:
    """``256 -> 64``, values as JSON has them; limits with their units."""
    formats = {"budget.capture_time": format_seconds, "budget.memory": format_bytes, "budget.reserve": format_bytes}
    text = formats.get(change.name, json.dumps)
    old, new = ("absent" if value is None else text(value) for value in (change.old, change.new))
    return f"{old} -> {new}"


def _figure(name: str, figure: Figure, text: Callable[[float], str]) -> dict[str, object]:
    change = figure.change
    share = f"{change / figure.old:+.1%}" if change is not None and figure.old else None
    return {
        "": name,
        "old": None if figure.old is None else text(figure.old),
        "new": None if figure.new is None else text(figure.new),
        "change": None if change is None else f"{'+' if change > 0 else '-' if change < 0 else ''}{text(abs(change))}",
        "share": share,
    }


def predicted_rows(plan: Plan) -> list[tuple[str, str]]:
    """What the keys are predicted to cost, and where that comes from."""
    if plan.predicted is None:
        return []
    cost = plan.predicted.cost
    parts = {
        "pool": sum(key.pool_bytes for key in cost.keys),
        "static buffers": cost.static_bytes,
        "driver": sum(key.driver_bytes for key in cost.keys),
        "workspaces": cost.workspace_bytes,
    }
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    estimated = " (an estimate: nothing of it was measured on the device)" if plan.predicted.estimated else ""
    rows = [
        ("memory", f"{listed}; total {format_bytes(cost.total_bytes)}"),
        ("start-up", format_seconds(cost.seconds)),
        ("predicted", f"by {plan.predicted.source}{estimated}"),
    ]
    if plan.machine is not None:
        driver = f", driver {plan.machine.driver}" if plan.machine.driver else ""
        rows.append(("measured on", f"{plan.machine.gpu}{driver}, torch {plan.machine.torch}"))
    return [*rows, *(("note", text) for text in plan.predicted.notes)]


def _ways(plan: Plan) -> str:
    """What runs batches up to the largest size: graphs for mixed batches serve uniform decode where it has none."""
    lanes = plan.lanes()
    mixed = next((str(lane.mode) for lane in lanes if not lane.uniform), "eager")
    decode = next((str(lane.mode) for lane in lanes if lane.uniform), mixed)
    return f"uniform decode: {decode}; mixed: {mixed}" if plan.mode.separate_routine() else f"all: {mixed}"


def _captured(plan: Plan) -> list[int]:
    """Sizes that have a graph, ascending: decode graphs may end before the sizes do."""
    return sorted({descriptor.num_tokens for _, descriptor in plan.keys})


def _has_one_list(plan: Plan) -> bool:
    """Whether every lane has all sizes up to its largest: then what a batch is padded to does not depend on it."""
    captured = _captured(plan)
    return all(list(sizes) == [s for s in captured if s <= sizes[-1]] for sizes in plan.lanes().values())


def _padding(captured: Sequence[int], beyond: str) -> Table:
    """What batches are padded to; ``beyond`` says what serves those above the largest size."""
    rows = _padding_rows(captured)
    rows.append({"batch of (tokens)": f"above {captured[-1]}", "is padded to": beyond})
    return filled(rows, left=("batch of (tokens)", "is padded to"))


def _padding_of_all(plan: Plan) -> RenderableType:
    """The same for all lanes together, under their names."""
    ends = {str(Lane(lane.mode, lane.uniform, 0)): sizes[-1] for lane, sizes in plan.lanes().items()}
    captured = _captured(plan)
    names = [name if end == captured[-1] else f"{name} up to {end}" for name, end in ends.items()]
    cases = sorted({lane.num_active_loras for lane in plan.lanes()})
    title = "; ".join(filter(None, (" and ".join(names), _adapters(plan, cases))))
    return Group(Text(title, style="bold"), _padding(captured, "no graph"))


def _adapters(plan: Plan, cases: Sequence[int]) -> str:
    return "" if plan.max_loras is None else f"{', '.join(map(str, sorted(cases)))} active adapters"


def _padding_by_lane(plan: Plan) -> RenderableType:
    """The same for each lane; lanes that differ in the LoRA case alone share theirs."""
    alike: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for lane, sizes in plan.lanes().items():
        alike.setdefault((str(Lane(lane.mode, lane.uniform, 0)), sizes), []).append(lane.num_active_loras)
    parts: list[RenderableType] = []
    for (name, sizes), cases in alike.items():
        lanes = ", ".join(filter(None, (name, _adapters(plan, cases))))
        title = f"{lanes}: {len(sizes)} ({describe_sizes(sizes)})"
        parts += [Text(title, style="bold"), _padding(sizes, "another lane, or no graph"), Text()]
    return Group(*parts[:-1])


def _padding_rows(captured: Sequence[int]) -> list[dict[str, object]]:
    """Sizes of equal distance that follow each other share a row."""
    pairs = tuple(pairwise((0, *captured)))
    groups = _neighbours(pairs, lambda below, size: size - below)
    if len(groups) > MOST_PADDING_ROWS:  # an irregular ladder: sizes between two powers of two in one row
        groups = _neighbours(pairs, lambda _, size: size.bit_length())
    rows: list[dict[str, object]] = []
    for group in groups:
        first, sizes = group[0][0] + 1, [size for _, size in group]
        most = max(size - below for below, size in group) - 1
        span = f"{first} to {sizes[-1]}" if sizes[-1] > first else str(first)
        to = "as it is" if most == 0 else f"{'next of ' if len(sizes) > 1 else ''}{describe_sizes(sizes)}"
        rows.append({"batch of (tokens)": span, "is padded to": to, "padding rows at most": most})
    return rows


def _neighbours(pairs: Iterable[tuple[int, int]], alike: Callable[[int, int], int]) -> list[list[tuple[int, int]]]:
    """(size below, size) pairs, those that follow each other and are alike together."""
    return [list(group) for _, group in groupby(pairs, lambda pair: alike(*pair))]
