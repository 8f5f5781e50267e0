"""Reports of runs as tables: a capture with its graphs, budget and ranks; a bench beside its
baselines; the doctor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, islice
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from cgplan.modes import CUDAGraphMode
from cgplan.planning.plan import Key, Lane
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
from cgplan.reports.plan_tables import head_rows
from cgplan.reports.records import (
    OURS,
    AuditReport,
    BaselineRecord,
    BaselinesRecord,
    BenchReport,
    BudgetRecord,
    CaptureReport,
    DoctorReport,
    Environment,
    Finding,
    OwnerRecord,
    RankRecord,
    SplitRecord,
)
from cgplan.units import (
    counted,
    format_bytes,
    format_microseconds,
    format_ratio,
    format_seconds,
    grouped,
    listed,
)

MOST_STOPS = 3
MOST_FINDINGS = 20


@render.register
def _capture(report: CaptureReport) -> RenderableType:
    rows = [*environment_rows(report.environment), *head_rows(report.plan)]
    if report.looked_at:
        rows.append(("checked", report.looked_at))
    rows += _policy(report)
    if report.environment.is_tape:
        backend = report.environment.backend
        rows.append(
            (
                "note",
                f"bytes and times are those of {backend}, the CPU stand-in, and say little about "
                "a GPU",
            )
        )
    rows += [("note", text) for text in report.plan.notes]
    head = facts("Capture", [*rows, *(("warning", text) for text in report.warnings)])
    if not report.records:
        return stacked(head, facts("Graphs: none", _totals(report)))
    split = (
        None
        if report.split is None
        else facts("Split", [*_split_rows(report.split), *_segment_rows(report)])
    )
    return stacked(
        head,
        _graphs(report),
        split,
        _state(report),
        *_prediction(report),
        rank_table(report.ranks) if report.ranks else None,
        facts("Totals", _totals(report)),
    )


def environment_rows(environment: Environment) -> list[Fact]:
    names = {
        "cgplan": "cgplan",
        "torch": "torch",
        "cuda": "CUDA",
        "driver": "driver",
        "python": "Python",
    }
    versions = [
        f"{name} {version}"
        for field, name in names.items()
        if (version := getattr(environment, field))
    ]
    return [
        ("device", f"{environment.device}, {environment.machine}"),
        ("backend", environment.backend),
        ("versions", ", ".join(versions)),
        ("made", f"{environment.date}, config {environment.config_hash}"),
    ]


def _policy(report: CaptureReport) -> Iterator[Fact]:
    if report.capture_policy == "lazy":
        waiting = f"{report.waiting} {'is' if report.waiting == 1 else 'are'} waiting"
        yield "captures", f"lazy: when a batch first asks for a key; {waiting}"
    elif report.capture_policy == "adaptive":
        yield "captures", "adaptive: runner.replan() exchanges keys for those that batches ask for"
    if report.pool != "shared":
        yield "pools", f"one for each {report.pool.removeprefix('per_')}"
    if report.generation > 1:
        yield "generation", f"the pools were made {report.generation} times"
    yield from (("failed", f"{key.mode} {key.descriptor}: {key.text}") for key in report.failed)


def _graphs(report: CaptureReport) -> RenderableType:
    records, has_driver = report.records, report.driver_bytes is not None
    return Grid(
        records,
        TextColumn("mode", lambda r: f"{r.mode} uniform" if r.descriptor.uniform else r.mode),
        Column(" x ".join(report.plan.dim_names), "descriptor.size"),
        Column("num_reqs", "descriptor.num_reqs"),
        Column("LoRA", "descriptor.num_active_loras")
        if any(r.descriptor.has_lora for r in records)
        else None,
        Column("graphs", "graphs") if any(r.graphs > 1 for r in records) else None,
        Column("operators" if report.environment.is_tape else "nodes", "nodes"),
        Column("pool growth", "pool_growth", format_bytes),
        Column("driver", "driver_bytes", format_bytes) if has_driver else None,
        Column("warm-up", "warmup_seconds", format_seconds),
        Column("compile", "compile_seconds", format_seconds)
        if any(r.compile_seconds for r in records)
        else None,
        Column("cached", "cached") if any(r.compile_seconds for r in records) else None,
        Column("capture", "capture_seconds", format_seconds),
    )


@render.register
def _split(split: SplitRecord) -> RenderableType:
    return facts("Split", _split_rows(split))


def _split_rows(split: SplitRecord) -> Iterator[Fact]:
    yield (
        "by",
        {"ops": "operators", "modules": "modules"}.get(split.route, "the model's own wrappers"),
    )
    if split.segments is not None:
        yield "pieces", f"{split.segments} segments, {split.eager_pieces} eager pieces"
    sides = {"captured": split.captured, "eager": split.eager, "eager calls": split.eager_operators}
    yield from ((name, _repeated(counts.items())) for name, counts in sides.items() if counts)


def _segment_rows(report: CaptureReport) -> Iterator[Fact]:
    pieces = [r for r in report.records if r.mode is CUDAGraphMode.PIECEWISE and r.segment_nodes]
    if pieces:
        listed = _repeated(
            (nodes, len(list(same))) for nodes, same in groupby(pieces[0].segment_nodes)
        )
        kind = "operators" if report.environment.is_tape else "nodes"
        yield f"{kind} each", f"{listed} (num_tokens {pieces[0].descriptor.num_tokens})"


def _repeated(counts: Iterable[tuple[object, int]]) -> str:
    """``linear x4, relu``."""
    return ", ".join(f"{name} x{count}" if count > 1 else str(name) for name, count in counts)


def _state(report: CaptureReport) -> RenderableType | None:
    """State that the capture left otherwise than it found it; the other places are counted."""
    left = [place for place in report.state if not place.is_put_back]
    if not left:
        return None
    words = {"new": "new: stays", "not kept": "written, not put back"}
    table = Grid(
        left,
        TextColumn("state", "path"),
        Column("size", "nbytes", format_bytes),
        TextColumn("after the capture", lambda place: words[place.kept]),
    )
    rest = [place.nbytes for place in report.state if place.is_put_back]
    put_back = f"put back besides: {counted(len(rest), 'place')}, {format_bytes(sum(rest))}"
    return Group(table, *([sentences(put_back)] if rest else ()))


def _prediction(report: CaptureReport) -> tuple[RenderableType, ...]:
    predicted, has_driver = report.plan.predicted, report.driver_bytes is not None
    if predicted is None:
        return ()
    table = Grid(
        zip(report.records, predicted.keys, strict=True),
        TextColumn("key", "0.lane"),
        Column("tokens", "0.descriptor.num_tokens"),
        Column("pool\npredicted", "1.pool_bytes", format_bytes),
        Column("measured", "0.pool_growth", format_bytes),
        Column("driver\npredicted", "1.driver_bytes", format_bytes) if has_driver else None,
        Column("measured", "0.driver_bytes", format_bytes) if has_driver else None,
        Column("time\npredicted", "1.seconds", format_seconds),
        Column("measured", "0.seconds", format_seconds),
    )
    parts = [
        ("static buffers", predicted.static_bytes, report.static_bytes),
        ("pool", sum(k.pool_bytes for k in predicted.keys), report.pool_bytes),
    ]
    if has_driver:
        parts.append(("workspaces", predicted.workspace_bytes, report.workspace_bytes))
        parts.append(
            ("driver", sum(k.driver_bytes for k in predicted.keys), report.graph_driver_bytes)
        )
    parts.append(("memory", sum(part[1] for part in parts), report.graph_bytes))

    def compared(text: Callable[[Any], str], predicted: float, measured: float) -> str:
        error = f": {(predicted - measured) / measured:+.1%}" if measured else ""
        return f"{text(predicted)} predicted, {text(measured)} measured{error}"

    totals = [
        ("from", predicted.source + (", an estimate" if predicted.estimated else "")),
        *(("note", text) for text in (*predicted.notes, *_without_graph(report))),
        *((name, compared(format_bytes, *figures)) for name, *figures in parts),
        (
            "time",
            compared(
                format_seconds, predicted.seconds, report.warmup_seconds + report.capture_seconds
            ),
        ),
    ]
    return titled("Predicted against measured", table), facts("Prediction", totals)


def _without_graph(report: CaptureReport) -> Iterator[str]:
    refused = (*report.budget.left_out, *report.budget.skipped) if report.budget else ()
    why = dict.fromkeys(refused, "over the budget")
    why |= {
        failure.key: "over the budget" if failure.is_over_budget else "failed"
        for failure in report.failed
    }
    captured = {record.key for record in report.records}
    for reason in ("over the budget", "failed"):
        if keys := [key for key, said in why.items() if said == reason and key not in captured]:
            yield (
                f"{_by_lane(keys)} {reason}: not captured, and neither predicted nor measured here"
            )
    if report.waiting:
        yield (
            f"{counted(report.waiting, 'key')} waiting for a batch: neither predicted nor "
            "measured here"
        )


def _totals(report: CaptureReport) -> list[Fact]:
    keys, graphs = len(report.records), sum(r.graphs for r in report.records)
    parts = [
        ("pool", report.pool_bytes),
        ("static buffers", report.static_bytes),
        ("driver", report.driver_bytes),
    ]
    if report.workspace_bytes:
        parts.append(("workspaces", report.workspace_bytes))
    memory = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size is not None)
    rows = [
        ("graphs", f"{graphs} for {counted(keys, 'key')}"),
        ("memory", f"{memory}; total {format_bytes(report.total_bytes)}"),
    ]
    if report.budget is not None:
        rows += budget_rows(report.budget)
    if report.free_before is not None:
        rows.append(
            (
                "free",
                f"{format_bytes(report.free_before)} before, {format_bytes(report.free_after)} "
                "after",
            )
        )
    times = {
        "warm-up": report.warmup_seconds,
        "capture": report.capture_seconds,
        "inspection": report.inspection_seconds,
        "whole session": report.session_seconds,
    }
    return [
        *rows,
        (
            "time",
            ", ".join(f"{name} {format_seconds(value)}" for name, value in times.items() if value),
        ),
    ]


def rank_table(ranks: Sequence[RankRecord]) -> RenderableType:
    """One row a rank, and one for all: sums of bytes and counts, the longest of the times."""
    counts = ("rows", "buffers", "bases", "mapped_bytes", "pool_bytes", "total_bytes")
    together = RankRecord.model_construct(
        **{name: sum(getattr(record, name) for record in ranks) for name in counts},
        **{
            name: max(getattr(r, name) for r in ranks)
            for name in ("registration_seconds", "session_seconds")
        },
        rank="all",
        all_reduce=", ".join(dict.fromkeys(record.all_reduce for record in ranks)),
    )
    return Grid(
        [*ranks, together],
        TextColumn("rank", "rank"),
        TextColumn("all-reduce", "all_reduce"),
        *(Column(name, name) for name in ("rows", "buffers", "bases")),
        Column("mapped", "mapped_bytes", format_bytes),
        Column("registration", "registration_seconds", format_seconds),
        Column("pool", "pool_bytes", format_bytes),
        Column("memory", "total_bytes", format_bytes),
        Column("session", "session_seconds", format_seconds),
    )


def budget_rows(budget: BudgetRecord) -> list[Fact]:
    """Limits and how much of them was used, and the keys that have no graph."""
    limits = []
    if budget.memory is not None:
        freed = (
            ": without a graph the static buffers are freed, too"
            if budget.stops and not budget.used_bytes
            else ""
        )
        limits.append(
            f"{format_bytes(budget.used_bytes)} of {format_bytes(budget.memory)} used{freed}"
        )
    if budget.capture_time is not None:
        over = budget.used_seconds > budget.capture_time
        passed = ", because the last capture took longer than was known before" if over else ""
        limits.append(
            f"{format_seconds(budget.used_seconds)} of {format_seconds(budget.capture_time)} "
            f"used{passed}"
        )
    if budget.max_graphs is not None:
        limits.append(f"at most {counted(budget.max_graphs, 'graph')}")
    if budget.reserve is not None:
        limits.append(f"{format_bytes(budget.reserve)} kept free")
    rows = [("budget", "; ".join(limits))]
    if budget.left_out:
        rule = "known before not to fit; the largest first"
        if budget.max_graphs is not None:
            fits = budget.memory is None and budget.capture_time is None and budget.reserve is None
            rule = "" if fits else "known before not to fit; of those that fit, "
            rule += "max_graphs keeps the keys that pad least"
        rows.append(("left out", f"{_by_lane(budget.left_out)}: {rule}"))
    by_key = grouped(((stop.limit, stop.key), stop) for stop in budget.stops)
    for stops in list(by_key.values())[:MOST_STOPS]:
        first, ranks = stops[0], dict.fromkeys(str(stop.rank) for stop in stops)
        where = "" if first.rank is None else f" of rank {', '.join(ranks)}"
        place = f"{first.lane}, {first.descriptor.num_tokens} tokens"
        rows.append(("stopped by", f"{first.limit}{where} at {place}: {first.detail}"))
    if len(by_key) > MOST_STOPS:
        rows.append(("", f"and at {len(by_key) - MOST_STOPS} more keys"))
    if budget.skipped:
        rows.append(
            ("not captured", f"{_by_lane(budget.skipped)}: padded to other sizes, or run eagerly")
        )
    if budget.left_out or budget.skipped:
        rows.append(("advice", "`cgplan plan` chooses the keys that gain most within the budget"))
    return rows


def _by_lane(keys: Sequence[Key]) -> str:
    """``9 keys (FULL uniform: 8 to 64 by 8; PIECEWISE: 64)``."""
    lanes = grouped((Lane.of(*key), key[1].num_tokens) for key in keys)
    listed = "; ".join(f"{lane}: {describe_sizes(sorted(sizes))}" for lane, sizes in lanes.items())
    return f"{counted(len(keys), 'key')} ({listed})"


# --- bench and doctor -----------------------------------------------------------------------------


@render.register
def _bench(report: BenchReport) -> RenderableType:
    capture, environment = report.capture, report.environment
    cost = (
        f"{format_bytes(capture.total_bytes)}, captured in "
        f"{format_seconds(capture.session_seconds)}"
    )
    rows = [
        *environment_rows(environment),
        *head_rows(capture.plan)[:-1],  # the table below has the sizes
        ("graphs", f"{len(capture.records)} keys, {cost}" if capture.records else "none"),
        ("times", f"median and p99 of {report.repeats} calls; host: until the call returned"),
    ]
    if adapters := {r.descriptor.num_active_loras for r in report.records if r.descriptor.has_lora}:
        rows.append(("LoRA", f"graphs for {', '.join(map(str, sorted(adapters)))} active adapters"))
    if report.repeats < 100:
        rows.append(("note", f"of {report.repeats} calls, p99 is close to the slowest one"))
    if environment.is_tape:
        backend = environment.backend
        rows.append(
            (
                "note",
                f"all figures come from {backend}, the CPU stand-in; a GPU's speed-up is another "
                "matter",
            )
        )
    elif slower := ", ".join(str(r.num_tokens) for r in report.records if r.is_slower):
        words = (
            f"graphs take the device longer than the model's own code at {slower} tokens: other "
            "kernels may be in"
        )
        rows.append(("note", f"{words} them than run eagerly, see docs/troubleshooting.md"))
    head = facts("Bench", [*rows, *(("warning", text) for text in capture.warnings)])
    if not report.records:
        return stacked(
            head, Text("No size was measured: nothing is captured and report.sizes is absent.")
        )
    return stacked(
        head,
        rank_table(capture.ranks) if capture.ranks else None,
        _latencies(report),
        _queued(report),
        *(() if report.peers is None else _against_baselines(report.peers, environment)),
    )


def _short(microseconds: float) -> str:
    # eleven columns have to fit into a terminal of 80
    return format_microseconds(microseconds).replace(" ", "")


def _latencies(report: BenchReport) -> RenderableType:
    return Grid(
        report.records,
        Column("tokens", "size"),
        TextColumn("runs as", lambda r: f"{r.mode} {r.descriptor.size}" if r.graph else "eager"),
        Column("padded\nrows", "padded_rows"),
        *(
            Column(f"{way}\n{at}", f"{way}.{at}", _short)
            for way in ("eager", "graph")
            for at in ("median", "p99")
        ),
        Column("replay\nmedian", "replay.median", _short),
        Column("speed-\nup", "speedup", format_ratio),
        Column("host\neager", "eager_host.median", _short),
        Column("host\ngraph", "graph_host.median", _short),
        gap=1,
    )


def _queued(report: BenchReport) -> RenderableType | None:
    rows = [] if report.environment.is_tape else [r for r in report.records if r.graph_queued]
    if not rows:
        return None
    table = Grid(
        rows,
        Column("tokens", "size"),
        *(
            Column(f"{way} {at}", f"{way}_queued.{at}", _short)
            for way in ("graph", "replay")
            for at in ("median", "p99")
        ),
        Column(
            "graph / replay",
            lambda r: (
                r.graph_queued
                and r.replay_queued
                and r.graph_queued.median / r.replay_queued.median
            ),
            format_ratio,
        ),
    )
    return titled("Calls that follow one another without waiting, time of each", table)


def _against_baselines(measured: BaselinesRecord, environment: Environment) -> list[RenderableType]:
    lost = f"memory of pools on {environment.backend}" if environment.is_tape else "device memory"
    took = measured.capture_seconds
    own = "failed" if took is None else f"{format_seconds(took)}, {measured.keys} keys"
    calls = f"{measured.rounds} rounds, {measured.repeats} calls of each way and size"
    head = facts(
        "Against baselines",
        [
            ("order", f"random, seed {measured.seed}; {calls}"),
            ("ready", f"until all sizes had their first call, each way alone; memory: {lost} that "
                      "was gone then"),
            ("capture", f"{OURS}'s own: {own}; the baselines made one graph for each size below"),
            ("times", "medians; device: calls that follow one another; latency: from an idle "
                      "device; host: until the "
             "call returned"),
            ("x", f"how many times {OURS}'s"),
            ("diff", "largest difference from the model's own code, after all calls; from the "
                     "same inputs, state and "
             "seed"),
        ],
    )  # fmt: skip
    ready = Grid(
        measured.ways,
        TextColumn("way", "name"),
        Column("ready in", "ready_seconds", format_seconds),
        Column("memory", "memory_bytes", format_bytes),
        TextColumn("note", lambda way: f"failed: {way.failure}" if way.failure else way.note or ""),
    )

    def ratio(name: str, record: BaselineRecord) -> float | None:
        ours = measured.of(OURS, record.num_tokens)
        return None if ours is None else getattr(record, name).median / getattr(ours, name).median

    times = Grid(
        measured.records,
        TextColumn("way", "name"),
        Column("tokens", "num_tokens"),
        *(
            column
            for name in ("device", "latency", "host")
            for column in (
                Column(name, f"{name}.median", _short),
                Column(f"{name}\nx", partial(ratio, name), format_ratio),
            )
        ),
        Column("first\ncall", lambda r: _short(r.first_call_seconds * 1e6)),
        Column("diff", lambda r: "n/a" if r.deviation is None else f"{r.deviation:.2g}"),
        gap=1,
    )
    sizes = grouped(
        ((r.name, r.not_comparable), r.num_tokens) for r in measured.records if r.not_comparable
    )
    reasons = [
        (f"{name} {describe_sizes(found)}", reason) for (name, reason), found in sizes.items()
    ]
    return [
        head,
        ready,
        *([times] if measured.records else []),
        *([facts("Not comparable", reasons)] if reasons else []),
    ]


@render.register
def _doctor(report: DoctorReport) -> RenderableType:
    plan = report.capture.plan
    rows = [*environment_rows(report.capture.environment), *head_rows(plan)]
    rows += [("note", text) for text in plan.notes]
    rows += [("warning", text) for text in report.capture.warnings]
    rows += [("outside", f"{piece}, {count} in a step") for piece, count in report.outside.items()]
    head = facts("Doctor", rows)
    if not report.rows:
        return stacked(
            head, sentences("Nothing is captured: all of a step runs outside of graphs.")
        )
    table = Grid(
        report.rows,
        TextColumn("key", "lane"),
        Column("tokens", "descriptor.num_tokens"),
        Column("eager", "eager_us", format_microseconds),
        Column("step", "step_us", format_microseconds),
        Column("speed-up", lambda r: f"{r.eager_us / r.step_us:.2f}x"),
        Column("inside graphs", lambda r: f"{r.inside:.0%}"),
    )
    return stacked(head, table)


@render.register
def _audit(report: AuditReport) -> RenderableType:
    seconds = (
        f"{format_seconds(report.read_seconds)} to read, "
        f"{format_seconds(report.classify_seconds)} to look up"
    )
    nodes, words = sum(key.nodes for key in report.keys), sum(key.words for key in report.keys)
    rows = [
        *environment_rows(report.environment),
        ("pointers", f"{words:,} in {nodes:,} nodes; {seconds}"),
    ]
    found = f"{counted(len(report.findings), 'pointer')} into memory that is not the runner's"
    rows += [("findings", found if report.findings else "none")]
    rows += [("note", text) for text in report.notes]
    keys = Grid(
        report.keys,
        TextColumn("key", lambda r: f"{r.mode} {r.descriptor}"),
        Column("graphs", "graphs"),
        Column("nodes", "nodes"),
        Column("not read", "opaque"),
        Column("pointers", "words"),
        Column("findings", lambda r: sum(finding.key == r.key for finding in report.findings)),
    )
    kinds = dict[str, list[OwnerRecord]]()
    for owner in report.owners:
        kinds.setdefault(owner.kind, []).append(owner)
    owners = Grid(
        kinds.values(),
        TextColumn("owner", "0.kind"),
        Column("pointers", lambda rows: f"{sum(r.words for r in rows):,}"),
        Column("share", lambda rows: f"{sum(r.words for r in rows) / words:.1%}"),
        Column("size", lambda rows: sum(r.nbytes or 0 for r in rows) or None, format_bytes),
        TextColumn("names", lambda rows: listed([r.name for r in rows], 2)),
    )
    return stacked(
        facts("Audit", rows),
        _findings(report) if report.findings else None,
        titled("Owners", owners),
        titled("Keys", keys),
    )


def _findings(report: AuditReport) -> RenderableType:
    """Each address in a line, with the first node that holds it."""
    nodes = dict[int, list[Finding]]()
    for finding in report.findings:
        nodes.setdefault(finding.address, []).append(finding)
    lines = (
        f"{found[0].address:#x}: {found[0].text}"
        + (f"; {counted(len(found) - 1, 'more node')}" if found[1:] else "")
        for found in nodes.values()
    )
    return titled("Findings", sentences(*islice(lines, MOST_FINDINGS)))
