"""What a capture was predicted to cost beside what it did cost, and what a budget allowed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from cgplan.modes import Key
from cgplan.planning.costs import KeyCost
from cgplan.planning.plan import Lane, Plan
from cgplan.pricing.measured import CaseCost
from cgplan.reports.layout import describe_sizes, facts, filled, sentences
from cgplan.reports.records import BudgetRecord, CaptureReport, StopRecord
from cgplan.units import format_bytes, format_seconds

MOST_STOPS = 3


def prediction_table(report: CaptureReport) -> RenderableType | None:
    """Predicted against measured, key by key and in total; None where nothing was predicted or captured."""
    predicted = report.plan.predicted
    if predicted is None or not report.records:
        return None
    has_driver = any(r.driver_bytes is not None for r in report.records)
    rows: list[dict[str, object]] = []
    for record, cost in zip(report.records, predicted.keys, strict=True):
        rows.append(
            {
                "key": str(Lane.of(record.mode, record.descriptor)),
                "tokens": record.descriptor.num_tokens,
                "pool\npredicted": format_bytes(cost.pool_bytes),
                "\nmeasured": format_bytes(record.pool_growth),
                "driver\npredicted": format_bytes(cost.driver_bytes) if has_driver else None,
                " \nmeasured": format_bytes(record.driver_bytes),
                "time\npredicted": format_seconds(cost.seconds),
                "  \nmeasured": format_seconds(record.warmup_seconds + record.capture_seconds),
            }
        )
    if not has_driver:
        rows = [
            {name: v for name, v in row.items() if name not in ("driver\npredicted", " \nmeasured")} for row in rows
        ]
    title = Text("Predicted against measured", style="bold")
    return Group(title, filled(rows, left=("key",)), Text(), facts("Prediction", _totals(report)))


def _totals(report: CaptureReport) -> list[tuple[str, str]]:
    predicted = report.plan.predicted
    if predicted is None:
        return []
    cost = predicted.cost
    has_driver = report.driver_bytes is not None
    driver = sum(k.driver_bytes for k in cost.keys) if has_driver else 0
    workspace = cost.workspace_bytes if has_driver else 0
    parts = [
        ("static buffers", cost.static_bytes, report.static_bytes),
        ("pool", sum(k.pool_bytes for k in cost.keys), report.pool_bytes),
    ]
    if has_driver:
        parts += [("workspaces", workspace, report.workspace_bytes), ("driver", driver, report.graph_driver_bytes)]
    parts.append(("memory", sum(part[1] for part in parts), report.graph_bytes))
    seconds = report.warmup_seconds + report.capture_seconds
    return [
        ("from", predicted.source + (", an estimate" if predicted.estimated else "")),
        *(("note", text) for text in predicted.notes),
        *_without_graph(report),
        *((name, _against(format_bytes(p), format_bytes(m), p, m)) for name, p, m in parts),
        ("time", _against(format_seconds(cost.seconds), format_seconds(seconds), cost.seconds, seconds)),
    ]


def _without_graph(report: CaptureReport) -> Iterator[tuple[str, str]]:
    """Planned keys that neither side counts, and why."""
    captured = {(r.mode, r.descriptor) for r in report.records}
    why = {(key.mode, key.descriptor): "over the budget" if key.is_over_budget else "failed" for key in report.failed}
    if report.budget is not None:
        refused = (*report.budget.left_out, *report.budget.skipped)
        why = {**dict.fromkeys(refused, "over the budget"), **why}
    for reason in ("over the budget", "failed"):
        keys = [key for key, said in why.items() if said == reason and key not in captured]
        if keys:
            yield "note", f"{_counted(keys)} {reason}: not captured, and neither predicted nor measured here"
    if report.waiting:
        number = f"{report.waiting} key{'s' * (report.waiting > 1)}"
        yield "note", f"{number} waiting for a batch: neither predicted nor measured here"


def _against(predicted: str, measured: str, value: float, truth: float) -> str:
    error = f": {(value - truth) / truth:+.1%}" if truth else ""
    return f"{predicted} predicted, {measured} measured{error}"


def lane_table(plan: Plan) -> RenderableType:
    """What the keys of each lane are predicted to cost; for a plan with a prediction."""
    costs: dict[Lane, list[KeyCost]] = {}
    for (mode, d), cost in zip(plan.keys, plan.predicted.keys if plan.predicted else (), strict=True):
        costs.setdefault(Lane.of(mode, d), []).append(cost)
    sizes = plan.lanes()
    rows: list[dict[str, object]] = [
        {
            "lane": lane,
            "graphs": len(found),
            "sizes": describe_sizes(sizes[lane]),
            "pool": format_bytes(sum(cost.pool_bytes for cost in found)),
            "driver": format_bytes(sum(cost.driver_bytes for cost in found)),
            "start-up": format_seconds(sum(cost.seconds for cost in found)),
        }
        for lane, found in costs.items()
    ]
    words = "in capture order; pool: what these graphs add to the pool that those above them have filled"
    return Group(Text("Cost of each lane", style="bold"), filled(rows, left=("lane", "sizes")), sentences(words))


def case_table(cases: Sequence[CaseCost], max_loras: int) -> RenderableType:
    """What each LoRA case adds to a plan."""
    rows: list[dict[str, object]] = [
        {
            "active adapters": "any number" if case.num_active_loras > max_loras else case.num_active_loras,
            "graphs": case.graphs,
            "memory": None if case.bytes is None else format_bytes(case.bytes),
            "start-up": None if case.seconds is None else format_seconds(case.seconds),
        }
        for case in cases
    ]
    known = all(case.bytes is not None for case in cases)
    words = "  what the plan would save without that case alone; cases share the pool"
    advice = "  memory and start-up are not known: give --costs FILE, --costs estimate or --costs measure"
    title = Text("What each LoRA case adds", style="bold")
    return Group(title, filled(rows, left=("active adapters",)), Text(words if known else advice))


def _passed(budget: BudgetRecord) -> str:
    """Why more seconds were used than the budget has, if so: they cannot be given back."""
    over = budget.capture_time is not None and budget.used_seconds > budget.capture_time
    return ", because the last capture took longer than was known before" if over else ""


def _freed(budget: BudgetRecord) -> str:
    """Why nothing is used although something was in the way of a key, if so."""
    return ": without a graph the static buffers are freed, too" if budget.stops and not budget.used_bytes else ""


def budget_rows(budget: BudgetRecord) -> list[tuple[str, str]]:
    """Limits and what was used of them, and the keys that have no graph."""
    limits = []
    if budget.memory is not None:
        limits.append(f"{format_bytes(budget.used_bytes)} of {format_bytes(budget.memory)} used{_freed(budget)}")
    if budget.capture_time is not None:
        limits.append(
            f"{format_seconds(budget.used_seconds)} of {format_seconds(budget.capture_time)} used{_passed(budget)}"
        )
    if budget.max_graphs is not None:
        limits.append(f"at most {budget.max_graphs} graph{'s' * (budget.max_graphs != 1)}")
    if budget.reserve is not None:
        limits.append(f"{format_bytes(budget.reserve)} kept free")
    rows = [("budget", "; ".join(limits))]
    if budget.left_out:
        rows.append(("left out", f"{_counted(budget.left_out)}: {_rule(budget)}"))
    stops = _by_key(budget.stops)
    for first, *others in stops[:MOST_STOPS]:
        key = f"{Lane.of(first.mode, first.descriptor)}, {first.descriptor.num_tokens} tokens"
        where = "" if first.rank is None else f" of rank {', '.join(str(stop.rank) for stop in (first, *others))}"
        rows.append(("stopped by", f"{first.limit}{where} at {key}: {first.detail}"))
    if len(stops) > MOST_STOPS:
        rows.append(("", f"and at {len(stops) - MOST_STOPS} more keys"))
    if budget.skipped:
        rows.append(("not captured", f"{_counted(budget.skipped)}: padded to other sizes, or run eagerly"))
    if budget.left_out or budget.skipped:
        rows.append(("advice", "`cgplan plan` chooses the keys that gain most within the budget"))
    return rows


def _by_key(stops: Sequence[StopRecord]) -> list[list[StopRecord]]:
    """Stops of several ranks by limit and key, each rank's first; those of one process one by one."""
    found: dict[object, dict[int | None, StopRecord]] = {}
    for index, stop in enumerate(stops):
        key = index if stop.rank is None else (stop.limit, stop.mode, stop.descriptor)
        found.setdefault(key, {}).setdefault(stop.rank, stop)
    return [list(by_rank.values()) for by_rank in found.values()]


def _rule(budget: BudgetRecord) -> str:
    """Why keys were left out before the first capture."""
    if budget.max_graphs is None:
        return "known before not to fit; the largest first"
    if budget.memory is None and budget.capture_time is None and budget.reserve is None:
        return "max_graphs keeps what pads least"
    return "known before not to fit; of what fits, max_graphs keeps what pads least"


def _counted(keys: Sequence[Key]) -> str:
    """``9 keys (FULL uniform: 8 to 64 by 8; PIECEWISE: 64)``."""
    lanes: dict[str, list[int]] = {}
    for key in keys:
        lanes.setdefault(str(Lane.of(*key)), []).append(key[1].num_tokens)
    listed = "; ".join(f"{lane}: {describe_sizes(sorted(sizes))}" for lane, sizes in lanes.items())
    return f"{len(keys)} key{'s' * (len(keys) > 1)} ({listed})"
