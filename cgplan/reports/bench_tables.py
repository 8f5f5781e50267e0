"""A bench report as tables: latency by size, and cgplan beside its baselines."""

from __future__ import annotations

from functools import partial

from rich.console import RenderableType
from rich.text import Text

from cgplan.reports.capture_tables import environment_rows, rank_table
from cgplan.reports.layout import Column, Grid, TextColumn, describe_sizes, facts, render, sentences, stacked, titled
from cgplan.reports.plan_tables import head_rows
from cgplan.reports.records import OURS, BaselineRecord, BaselinesRecord, BenchReport, DoctorReport, Environment
from cgplan.units import format_bytes, format_microseconds, format_ratio, format_seconds, grouped


@render.register
def _bench(report: BenchReport) -> RenderableType:
    capture, environment = report.capture, report.environment
    cost = f"{format_bytes(capture.total_bytes)}, captured in {format_seconds(capture.session_seconds)}"
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
        rows.append(("note", f"all figures come from {backend}, the CPU stand-in; a GPU's speed-up is another matter"))
    elif slower := ", ".join(str(r.num_tokens) for r in report.records if r.is_slower):
        words = f"graphs take the device longer than the model's own code at {slower} tokens: other kernels may be in"
        rows.append(("note", f"{words} them than run eagerly, see docs/troubleshooting.md"))
    head = facts("Bench", [*rows, *(("warning", text) for text in capture.warnings)])
    if not report.records:
        return stacked(head, Text("No size was measured: nothing is captured and report.sizes is absent."))
    return stacked(
        head,
        rank_table(capture.ranks) if capture.ranks else None,
        _latencies(report),
        _queued(report),
        *(() if report.peers is None else _against_baselines(report.peers, environment)),
    )


def _short(microseconds: float) -> str:
    return format_microseconds(microseconds).replace(" ", "")  # eleven columns have to fit into a terminal of 80


def _latencies(report: BenchReport) -> RenderableType:
    return Grid(
        report.records,
        Column("tokens", "num_tokens"),
        TextColumn("runs as", lambda r: f"{r.mode} {r.descriptor.num_tokens}" if r.graph else "eager"),
        Column("padded\nrows", "padded_rows"),
        *(Column(f"{way}\n{at}", f"{way}.{at}", _short) for way in ("eager", "graph") for at in ("median", "p99")),
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
        Column("tokens", "num_tokens"),
        *(
            Column(f"{way} {at}", f"{way}_queued.{at}", _short)
            for way in ("graph", "replay")
            for at in ("median", "p99")
        ),
        Column(
            "graph / replay",
            lambda r: r.graph_queued and r.replay_queued and r.graph_queued.median / r.replay_queued.median,
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
            ("ready", f"until all sizes had their first call, each way alone; memory: {lost} that was gone then"),
            ("capture", f"{OURS}'s own: {own}; the baselines made one graph for each size below"),
            ("times", "medians; device: calls that follow one another; latency: from an idle device; host: until the "
             "call returned"),
            ("x", f"how many times {OURS}'s"),
            ("diff", "largest difference from the model's own code, after all calls; from the same inputs, state and "
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
    sizes = grouped(((r.name, r.not_comparable), r.num_tokens) for r in measured.records if r.not_comparable)
    reasons = [(f"{name} {describe_sizes(found)}", reason) for (name, reason), found in sizes.items()]
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
        return stacked(head, sentences("Nothing is captured: all of a step runs outside of graphs."))
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
