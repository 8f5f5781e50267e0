"""A report as one HTML file: charts from the rows of tables, and the report as text."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import singledispatch
from hashlib import sha256
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import StrictUndefined, Template

from cgplan.modes import Key
from cgplan.optimizer.evidence import Evidence, SizeUse
from cgplan.planning import Plan
from cgplan.planning.plan import Emission, Lane, Predicted
from cgplan.reports.layout import Bytes, Column, Fact, Facts, Grid, TextColumn, percent, render
from cgplan.reports.plan_tables import POINT, STEP, USES, subject
from cgplan.reports.records import (
    AuditReport,
    BenchReport,
    Beside,
    CaptureReport,
    DoctorReport,
    LatencyReport,
    PointerReport,
    WatchReport,
)
from cgplan.reports.run_tables import (
    FLOOR,
    QUEUED,
    STALE,
    WATCHED,
    baselines,
    captured,
    coverage,
    floor,
    latencies,
    queued,
)
from cgplan.units import format_bytes, format_microseconds, format_ratio, format_seconds, grouped
from cgplan.version import __version__

HERE = Path(__file__).parent
FILES = ("page.html.j2", "vendor/echarts.min.js", "page.js")
NOTED = (  # facts of the text that a page has, too
    "verdict",
    "step",
    "traffic",
    "step times",
    "times",
    "costs",
    "weighed",
    "warning",
    "note",
    "outside",
    "floor",
)
TWO_RECTANGLES = 0.98  # their share, where a map shows nothing else
Chart = Mapping[str, Any]
Parts = dict[tuple[str, str], int | None]  # bytes by part of the memory and name of the key
Row = tuple[Any, ...]
Format = Callable[[Any], str]
count = "{:,}".format
UNITS: Mapping[Format, str] = {
    format_bytes: "bytes",
    format_microseconds: "us",
    format_seconds: "s",
    format_ratio: "ratio",
    percent: "share",
    count: "count",
}


class Section(NamedTuple):
    title: str
    about: str
    table: Grid
    charts: Sequence[Chart] = ()


class Page(NamedTuple):
    """``others`` stand beside it; ``file``: of its report then."""

    title: str
    lead: str = ""
    notes: Sequence[Fact] = ()
    sections: Sequence[Section] = ()
    emission: Emission | None = None
    made: str | None = None
    file: str = ""
    others: Sequence[Page] = ()


def chart(kind: str, caption: str, x: str, *values: str, **more: Any) -> Chart:
    """Columns ``values`` over column ``x``; ``kind``: one of page.js; lines have their p99, too.

    ``by``: the column that names series, parts or rows; ``stack``: bars are; ``in_turn``: a bar
    begins where the one before ends; ``where``: (column, value) of rows; ``line``: a series.
    """
    return {"kind": kind, "caption": caption, "x": x, "values": values, **more}


def html_of(page: Page, text: str) -> str:
    page_text, *scripts = [(HERE / name).read_text(encoding="utf-8") for name in FILES]
    shell: Template = Template(
        page_text, autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    drawn = []
    pages = (page, *page.others)
    for part in pages:
        for section in part.sections:
            columns = section.table.columns
            units = [(column.name, UNITS.get(column.format, "")) for column in columns]
            rows = []
            for row in section.table.rows if section.charts else ():
                rows.append(
                    [(column.cell if column.left else column.of)(row) for column in columns],
                )
            drawn.append((part.file, section.title, units, rows, section.charts))
    # the page's policy runs these scripts alone: no name in a report can run
    return shell.render(
        pages=pages,
        scripts=scripts,
        hashes=[b64encode(sha256(script.encode()).digest()).decode() for script in scripts],
        version=__version__,
        text=text,
        drawn=drawn,
    )


def table_of(rows: Iterable[Any], formats: Mapping[str, Format]) -> Grid:
    columns = []
    for place, (title, shown) in enumerate(formats.items()):
        kind = TextColumn if shown is str else Column
        columns.append(kind(title, str(place), shown))
    return Grid(rows, *columns)


def page_of(report: Any) -> Page:
    """With the answer and the notes of the report's text."""
    if isinstance(report, Beside):
        pages = [page_of(each)._replace(file=file) for file, each in report.reports.items()]
        return pages[0]._replace(others=pages[1:])
    found = list(_facts_in(render(report)))
    rows = []
    for part in found:
        rows += [row for row in part.rows if row[0] in NOTED]
    capture = getattr(report, "capture", report)
    plan = getattr(capture, "plan", report)
    title = report.kind.replace("_", " ").capitalize()
    if isinstance(plan, Plan):
        title += f" of {subject(plan) or plan.mode}"
    lead = found[0].answer or f"{found[0].title.removeprefix('Plan: ')}."
    environment = getattr(capture, "environment", None)
    return Page(
        title,
        lead,
        rows,
        list(sections_of(report)),
        getattr(report, "emission", None),
        environment
        and f"{environment.device}, {environment.backend}, torch {environment.torch}, "
        f"{environment.date[:10]}",
    )


def _facts_in(part: Any) -> Iterator[Facts]:
    if isinstance(part, Facts):
        yield part
    for inner in getattr(part, "renderables", ()):
        yield from _facts_in(inner)


# --- sections -------------------------------------------------------------------------------------


@singledispatch
def sections_of(_: Any) -> Iterator[Section]:
    yield from ()


@sections_of.register
def _of_capture(report: CaptureReport) -> Iterator[Section]:
    records = report.records
    if records:
        keys = [record.key for record in records]
        grown = map(attrgetter("pool_growth", "driver_bytes"), records)
        measured = _parts(keys, grown, report)
        pool = sum(record.pool_growth for record in records)
        driver = (report.driver_bytes or 0) - report.graph_driver_bytes
        measured["graph pool", "others"] = max(report.pool_bytes - pool, 0)
        measured["driver", "kernels and others"] = max(driver, 0)
        yield _memory({"measured": measured, **_predicted(report.plan)})
        seconds = [
            {
                "compile": record.compile_seconds,
                "warm-up": record.warmup_seconds - record.compile_seconds,
                "capture": record.capture_seconds,
            }
            for record in records
        ]
        yield _start_up(keys, seconds)
        yield Section("Graphs", "In the order of the capture.", captured(report))
    yield from _of_plan(report.plan)
    if report.audit:
        yield from _of_audit(report.audit)


@sections_of.register
def _of_bench(report: BenchReport) -> Iterator[Section]:
    both = ("graph median", "replay median")
    if report.records:
        yield Section(
            "Latency",
            "From an idle device until it has finished: eager, the runner's call, graphs alone.",
            latencies(report),
            [chart("lines", "Latency by batch size", report.unit, "eager median", *both)],
        )
    waiting = queued(report)
    if waiting:
        yield Section(
            QUEUED,
            "Time of each: the runner's call, and graphs alone.",
            waiting,
            [chart("lines", "Time of each call", report.unit, *both)],
        )
    yield from _floor(report)
    if report.peers and report.peers.records:
        yield Section(
            "Beside other ways",
            "Ways to run the model on the same tensors, in turns.",
            baselines(report.peers, report.unit),
            [
                chart("lines", "Calls that follow one another", report.unit, "device", by="way"),
                chart("lines", "Host, until a call returned", report.unit, "host", by="way"),
            ],
        )
    yield from _of_capture(report.capture)


@sections_of.register
def _of_doctor(report: DoctorReport) -> Iterator[Section]:
    if report.records:
        yield Section(
            "Steps",
            "The model's own code, and a step with graphs.",
            coverage(report),
        )
    yield from _floor(report)
    yield from _of_capture(report.capture)


@sections_of.register
def _plan(plan: Plan) -> Iterator[Section]:
    if plan.keys:
        yield _sizes(plan)
    yield from _of_plan(plan)
    cost = plan.predicted
    if cost and plan.keys:
        yield _memory(_predicted(plan))
        seconds = [{"start-up": key.seconds} for key in cost.keys]
        yield _start_up(plan.keys, seconds)


def _floor(report: LatencyReport) -> Iterator[Section]:
    least = floor(report)
    if least:
        yield Section(
            FLOOR,
            "Reading the weights, and the gaps between kernels.",
            least,
        )


def _parts(
    keys: Sequence[Key], each: Iterable[tuple[int, int | None]], of: CaptureReport | Predicted
) -> Parts:
    parts: Parts = {
        ("static buffers", "all keys"): of.static_bytes,
        ("workspaces", "all keys"): of.workspace_bytes,
    }
    for key, (pool, driver) in zip(keys, each, strict=True):
        parts["graph pool", _name(key)] = pool
        parts["driver", _name(key)] = driver
    return parts


def _predicted(plan: Plan) -> dict[str, Parts]:
    cost = plan.predicted
    if not cost:
        return {}
    each = map(attrgetter("pool_bytes", "driver_bytes"), cost.keys)
    return {"predicted": _parts(plan.keys, each, cost)}


def _memory(sides: Mapping[str, Parts]) -> Section:
    rows = {}
    charts = []
    for side, parts in sides.items():
        sizes = sorted(size or 0 for size in parts.values())
        whole = sum(sizes)
        if sum(sizes[-2:]) < TWO_RECTANGLES * whole:
            charts.append(
                chart("treemap", f"{side}: {format_bytes(whole)}", "key", side, by="part")
            )
        for row, size in parts.items():
            if size:
                rows[row] = (*row, *(other.get(row) for other in sides.values()))
    return Section(
        "Memory",
        "Device memory by part and key. The first key of a pool takes most of it.",
        table_of(
            rows.values(),
            {"part": str, "key": str, **dict.fromkeys(sides, format_bytes)},
        ),
        charts,
    )


def _start_up(
    keys: Sequence[Key],
    each: Sequence[Mapping[str, float]],
) -> Section:
    phases = [phase for phase in each[0] if any(seconds[phase] for seconds in each)]
    rows = [
        (_name(key), *map(seconds.get, phases)) for key, seconds in zip(keys, each, strict=True)
    ]
    return Section(
        "Start-up",
        "Keys in turn, without the time between them.",
        table_of(rows, {"key": str, **dict.fromkeys(phases, format_seconds)}),
        [chart("bars", "Start-up by key", "key", *phases, stack=True, in_turn=True)],
    )


def _of_plan(plan: Plan) -> Iterator[Section]:
    uses: Sequence[SizeUse] = ()
    if plan.evidence:
        evidence = Evidence.model_validate(plan.evidence)
        if evidence.pareto:
            yield _curve(evidence)
        uses = evidence.uses
        if uses:
            yield Section(
                "Use of each graph",
                "Each graph's expected share of steps, and of padding in it.",
                Grid(uses, *USES),
                [chart("bars", "Steps and padding by graph", "graph", "steps", "padding")],
            )
    if plan.keys and not plan.config.get("dims"):
        yield _padding(plan, uses)


def _sizes(plan: Plan) -> Section:
    lanes = grouped((Lane.of(*key), key[1].size) for key in reversed(plan.keys))
    return Section(
        "Capture sizes",
        f"{' x '.join(plan.dim_names)} of each graph.",
        Grid(
            lanes.items(),
            TextColumn("lane", "0"),
            Column("graphs", lambda row: len(row[1])),
            TextColumn("sizes", lambda row: ", ".join(row[1])),
        ),
    )


def _curve(evidence: Evidence) -> Section:
    best = "the best with so many graphs"
    points = [evidence.as_point("this plan"), *evidence.ladders, *evidence.pareto]
    name = TextColumn("plan", lambda row: getattr(row, "name", best))
    return Section(
        "Graphs against step time",
        "Expected step: the best plan of each number of graphs, this plan, and others.",
        Grid(points, name, *POINT),
        [
            chart(
                "curve",
                "Expected step by number of graphs",
                "graphs",
                STEP.name,
                by="plan",
                line=best,
            )
        ],
    )


def _padding(plan: Plan, uses: Sequence[SizeUse]) -> Section:
    steps = "steps so far"
    shown = ["padding", steps] if uses else ["padding"]
    alike = grouped((sizes, lane) for lane, sizes in plan.lanes().items())
    rows = []
    charts = []
    for sizes, lanes in alike.items():
        name = " and ".join(map(str, lanes))
        if uses or len(sizes) < sizes[-1]:
            charts.append(chart("curve", name, "batch", *shown, where=("lane", name), line=steps))
        share = 0.0
        for below, size in pairwise((0, *sizes)):
            share += sum(use.share for use in uses if use.size == size and use.lane in lanes)
            for batch in sorted({below + 1, size}):
                rows.append((name, batch, size, (size - batch) / size, share))
    return Section(
        "Padding",
        "Padding by batch, and with traffic the share of steps so far.",
        table_of(
            rows,
            {"lane": str, "batch": count, "graph": count, **dict.fromkeys(shown, percent)},
        ),
        charts,
    )


@sections_of.register
def _of_audit(report: AuditReport) -> Iterator[Section]:
    if report.findings:
        yield Section(
            "Findings",
            "Pointers of the graphs into memory that is not the runner's.",
            Grid(
                report.findings,
                TextColumn("problem"),
                TextColumn("key", lambda finding: _name(finding.key)),
                Column("graph"),
                Column("node"),
                TextColumn("kernel"),
                TextColumn("operator"),
                TextColumn("line"),
                Column("address", "address", hex),
                TextColumn("detail"),
            ),
        )
    yield _owners(report)


@sections_of.register
def _of_watch(report: WatchReport) -> Iterator[Section]:
    if report.stale:
        yield Section(
            "Stale",
            "Pointers into memory that was freed, replaced or moved since the capture.",
            Grid(report.stale, *STALE),
        )
    if report.graphs:
        yield Section("Graphs", "In the order of their capture.", Grid(report.graphs, *WATCHED))
        yield _owners(report)


def _owners(report: PointerReport) -> Section:
    return Section(
        "Owners",
        "Memory that the graphs point into.",
        Grid(
            report.owners,
            Bytes("size", "nbytes"),
            TextColumn("owner", "name"),
            TextColumn("kind"),
            Column("pointers", "words", count),
            Column("keys"),
        ),
    )


# --- words ----------------------------------------------------------------------------------------


def _name(key: Key) -> str:
    return f"{Lane.of(*key)}: {key[1].size}"
