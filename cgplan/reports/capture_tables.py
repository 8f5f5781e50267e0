"""Reports and plans as tables: for a terminal, and as plain text of a given width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cgplan.modes import CUDAGraphMode
from cgplan.reports.bench_tables import peers_tables
from cgplan.reports.cost_tables import budget_rows, prediction_table
from cgplan.reports.layout import TEXT_WIDTH, facts, filled, plain_text, sentences
from cgplan.reports.plan_tables import mode_rows, model_rows, render_plan, sizes_row
from cgplan.reports.records import (
    BenchRecord,
    BenchReport,
    CaptureReport,
    Environment,
    GraphRecord,
    Report,
    SplitRecord,
    StateRecord,
    Timing,
    rank_table,
)
from cgplan.units import format_bytes, format_microseconds, format_ratio, format_seconds

TAPE = "cpu (tape)"


def render(report: Report) -> RenderableType:
    """A report or plan for a rich console."""
    if isinstance(report, CaptureReport):
        return _capture(report)
    if isinstance(report, BenchReport):
        return _bench(report)
    return render_plan(report)


def render_text(report: Report, width: int = TEXT_WIDTH) -> str:
    """A report or plan as plain text, without colour codes and without a newline at the end.

    Args:
        report: What is shown.
        width: Columns; longer notes are wrapped there.
    """
    return plain_text(render(report), width)


def _environment(environment: Environment) -> list[tuple[str, str]]:
    cuda = [f"CUDA {environment.cuda}"] if environment.cuda else []
    driver = [f"driver {environment.driver}"] if environment.driver else []
    torch = [f"torch {environment.torch}", *cuda, *driver]
    return [
        ("device", f"{environment.device}, {environment.machine}"),
        ("backend", environment.backend),
        ("versions", ", ".join([f"cgplan {environment.cgplan}", *torch, f"Python {environment.python}"])),
        ("made", f"{environment.date}, config {environment.config_hash}"),
    ]


def _warnings(texts: Iterable[str]) -> list[tuple[str, str]]:
    return [("warning", text) for text in texts]


def _capture(report: CaptureReport) -> RenderableType:
    rows = [*_environment(report.environment), *model_rows(report.plan), *mode_rows(report.plan)]
    rows += [sizes_row(report.plan), *_demand_rows(report)]
    if report.looked_at:
        rows.append(("checked", report.looked_at))
    if report.environment.backend == TAPE:
        rows.append(("note", f"bytes and times are those of {TAPE}, the CPU stand-in, and say little about a GPU"))
    rows += [("note", text) for text in report.plan.notes]
    head = facts("Capture", [*rows, *_warnings(report.warnings)])
    if not report.records:
        return Group(head, Text(), facts("Graphs: none", _totals(report)))
    parts: list[RenderableType] = [head, Text(), _graphs(report.records, report.environment), Text()]
    if report.split is not None:
        parts += [facts("Split", [*split_rows(report.split), *_segment_rows(report)]), Text()]
    if any(place.kept in ("new", "not kept") for place in report.state):
        parts += [_state(report.state), Text()]
    if (predicted := prediction_table(report)) is not None:
        parts += [predicted, Text()]
    if report.ranks:
        parts += [rank_table(report.ranks), Text()]
    return Group(*parts, facts("Totals", _totals(report)))


def _demand_rows(report: CaptureReport) -> list[tuple[str, str]]:
    """When keys are captured and where, if not all at once into one pool; and those that failed since."""
    rows = []
    if report.capture_policy == "lazy":
        waiting = f"{report.waiting} {'is' if report.waiting == 1 else 'are'} waiting"
        rows.append(("captures", f"lazy: when a batch first asks for a key; {waiting}"))
    elif report.capture_policy == "adaptive":
        rows.append(("captures", "adaptive: runner.replan() exchanges keys for those that batches ask for"))
    if report.pool != "shared":
        rows.append(("pools", f"one for each {report.pool.removeprefix('per_')}"))
    if report.generation > 1:
        rows.append(("generation", f"{report.generation}: pools began anew so often"))
    return rows + [("failed", f"{key.mode} {key.descriptor}: {key.text}") for key in report.failed]


def split_rows(split: SplitRecord) -> list[tuple[str, str]]:
    """Which operators are captured and which run eagerly."""

    def listed(counts: dict[str, int]) -> str:
        return ", ".join(f"{name} x{count}" if count > 1 else name for name, count in counts.items()) or "-"

    rows = [("by", {"ops": "operators", "modules": "modules"}.get(split.route, "the model's own wrappers"))]
    if split.segments is not None:
        rows += [("pieces", f"{split.segments} segments, {split.eager_pieces} eager pieces")]
    if split.captured:
        rows += [("captured", listed(split.captured))]
    if split.eager:
        rows += [("eager", listed(split.eager))]
    return [*rows, ("eager calls", listed(split.eager_operators))] if split.eager_operators else rows


def _segment_rows(report: CaptureReport) -> list[tuple[str, str]]:
    """How many nodes each segment of the largest PIECEWISE key has, equal neighbours as one."""
    pieces = [r for r in report.records if r.mode is CUDAGraphMode.PIECEWISE and r.segment_nodes]
    if not pieces:
        return []
    runs = [(nodes, len(list(same))) for nodes, same in groupby(pieces[0].segment_nodes)]
    listed = ", ".join(f"{nodes} x{count}" if count > 1 else str(nodes) for nodes, count in runs)
    kind = "operators" if report.environment.backend == TAPE else "nodes"
    return [(f"{kind} each", f"{listed} (num_tokens {pieces[0].descriptor.num_tokens})")]


def _graphs(records: Sequence[GraphRecord], environment: Environment) -> Table:
    """One row a key. Columns that would be the same in every row, or dashes, are left out."""
    nodes = "operators" if environment.backend == TAPE else "nodes"
    shown = {
        "LoRA": any(r.descriptor.has_lora for r in records),
        "graphs": any(r.graphs > 1 for r in records),
        "driver": any(r.driver_bytes is not None for r in records),
    }
    rows = [
        {
            "mode": f"{r.mode} uniform" if r.descriptor.uniform else str(r.mode),
            "num_tokens": r.descriptor.num_tokens,
            "num_reqs": r.descriptor.num_reqs,
            "LoRA": r.descriptor.num_active_loras,
            "graphs": r.graphs,
            nodes: r.nodes,
            "pool growth": format_bytes(r.pool_growth),
            "driver": format_bytes(r.driver_bytes),
            "warm-up": format_seconds(r.warmup_seconds),
            "capture": format_seconds(r.capture_seconds),
        }
        for r in records
    ]
    return filled([{name: v for name, v in row.items() if shown.get(name, True)} for row in rows], left=("mode",))


def _state(state: Sequence[StateRecord]) -> RenderableType:
    """State that the capture left otherwise than it found it; the rest was put back, and is counted."""
    left = [place for place in state if place.kept in ("new", "not kept")]
    words = {"new": "new: stays", "not kept": "written, not put back"}
    rows: list[dict[str, object]] = [
        {"state": place.path, "size": format_bytes(place.nbytes), "after the capture": words[place.kept]}
        for place in left
    ]
    put_back = [place for place in state if place not in left]
    copied = f"put back besides: {len(put_back)} places, {format_bytes(sum(place.nbytes for place in put_back))}"
    return Group(filled(rows, left=("state", "after the capture")), *([sentences(copied)] if put_back else ()))


def _totals(report: CaptureReport) -> list[tuple[str, str]]:
    keys, graphs = len(report.records), sum(r.graphs for r in report.records)
    parts = [("pool", report.pool_bytes), ("static buffers", report.static_bytes), ("driver", report.driver_bytes)]
    if report.workspace_bytes:
        parts.append(("workspaces", report.workspace_bytes))
    memory = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size is not None)
    rows = [
        ("graphs", f"{graphs} for {keys} key{'s' * (keys != 1)}"),
        ("memory", f"{memory}; total {format_bytes(report.total_bytes)}"),
    ]
    if report.budget is not None:
        rows += budget_rows(report.budget)
    if report.free_before is not None or report.free_after is not None:
        rows.append(("free", f"{format_bytes(report.free_before)} before, {format_bytes(report.free_after)} after"))
    parts_of_time = {
        "warm-up": report.warmup_seconds,
        "capture": report.capture_seconds,
        "inspection": report.inspection_seconds,
        "whole session": report.session_seconds,
    }
    seconds = ", ".join(f"{name} {format_seconds(value)}" for name, value in parts_of_time.items() if value)
    return [*rows, ("time", seconds)]


def _bench(report: BenchReport) -> RenderableType:
    capture = report.capture
    cost = f"{format_bytes(capture.total_bytes)}, captured in {format_seconds(capture.session_seconds)}"
    rows = [
        *_environment(report.environment),
        *model_rows(capture.plan),
        *mode_rows(capture.plan),
        ("graphs", f"{len(capture.records)} keys, {cost}" if capture.records else "none"),
        ("times", f"median and p99 of {report.repeats} calls; host: until the call returned"),
    ]
    adapters = {r.descriptor.num_active_loras for r in report.records if r.descriptor.has_lora}
    if adapters:
        rows.append(("LoRA", f"graphs for {', '.join(map(str, sorted(adapters)))} active adapters"))
    if report.repeats < 100:
        rows.append(("note", f"of {report.repeats} calls, p99 is close to the slowest one"))
    if report.environment.backend == TAPE:
        rows.append(("note", f"all figures come from {TAPE}, the CPU stand-in; a GPU's speed-up is another matter"))
    elif slower := [r.num_tokens for r in report.records if r.is_slower]:
        words = (
            f"graphs take the device longer than the model's own code at {', '.join(map(str, slower))} tokens: other"
        )
        rows.append(("note", f"{words} kernels may be in them than run eagerly, see docs/troubleshooting.md"))
    head = facts("Bench", [*rows, *_warnings(capture.warnings)])
    if not report.records:
        return Group(head, Text(), Text("No size was measured: nothing is captured and report.sizes is absent."))
    ranks = (rank_table(capture.ranks), Text()) if capture.ranks else ()
    parts: list[RenderableType] = [head, Text(), *ranks, *_latencies(report)]
    if report.peers is not None:
        parts += [Text(), peers_tables(report.peers, report.environment.backend)]
    return Group(*parts)


def _latencies(report: BenchReport) -> list[RenderableType]:
    latency = filled([_bench_row(r) for r in report.records], left=("runs as",), gap=1)
    queued = [] if report.environment.backend == TAPE else [_queued_row(r) for r in report.records if r.graph_queued]
    if not queued:  # on the tape no call ever waits for another one
        return [latency]
    title = Text("Calls that follow one another without waiting, time of each", style="bold")
    return [latency, Text(), title, filled(queued, left=())]


def _bench_row(record: BenchRecord) -> dict[str, object]:
    return {
        "tokens": record.num_tokens,
        "runs as": "eager" if record.graph is None else f"{record.mode} {record.descriptor.num_tokens}",
        "padded\nrows": record.padded_rows,
        "eager\nmedian": _median(record.eager),
        "eager\np99": _p99(record.eager),
        "graph\nmedian": _median(record.graph),
        "graph\np99": _p99(record.graph),
        "replay\nmedian": _median(record.replay),
        "speed-\nup": format_ratio(record.speedup),
        "host\neager": _median(record.eager_host),
        "host\ngraph": _median(record.graph_host),
    }


def _queued_row(record: BenchRecord) -> dict[str, object]:
    graph, replay = record.graph_queued, record.replay_queued
    return {
        "tokens": record.num_tokens,
        "graph median": _median(graph),
        "graph p99": _p99(graph),
        "replay median": _median(replay),
        "replay p99": _p99(replay),
        "graph / replay": format_ratio(graph.median / replay.median if graph and replay else None),
    }


def _median(timing: Timing | None) -> str:
    """Without a space before the unit: eleven columns have to fit into a terminal of 80."""
    return format_microseconds(timing.median if timing else None).replace(" ", "")


def _p99(timing: Timing | None) -> str:
    return format_microseconds(timing.p99 if timing else None).replace(" ", "")
