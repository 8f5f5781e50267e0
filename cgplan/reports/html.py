"""Reports as one HTML file to look at: charts, each over a table of the same figures, and the whole
report as text.

The file loads nothing: Apache ECharts and the figures are in it, and its policy lets its own two
scripts run alone, so that a name in a report cannot. A section is a table, and charts that
`page.js` draws from its rows.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import singledispatch
from hashlib import sha256
from itertools import accumulate, chain, pairwise, product, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment as Templates
from jinja2 import FileSystemLoader, StrictUndefined

from cgplan.modes import Key
from cgplan.optimizer.evidence import Evidence
from cgplan.planning import Plan
from cgplan.planning.costs import Predicted
from cgplan.planning.plan import Lane
from cgplan.reports.layout import Fact, describe_sizes
from cgplan.reports.plan_tables import graph_uses, said
from cgplan.reports.records import AuditReport, BenchReport, CaptureReport, Environment, KeyRecord
from cgplan.units import (
    counted,
    format_bytes,
    format_microseconds,
    format_ratio,
    format_seconds,
    grouped,
)
from cgplan.version import __version__

HERE, SCRIPTS = Path(__file__).parent, ("vendor/echarts.min.js", "page.js")
MOST_ROWS, MOST_MAPS = 1000, 4
UNITS: dict[str, Callable[[Any], str]] = {  # of a column; without one it is text
    "bytes": format_bytes, "us": format_microseconds, "s": format_seconds, "share": "{:.1%}".format,
    "ratio": format_ratio, "count": "{:,}".format, "hex": hex,
}  # fmt: skip
Columns = Mapping[str, str]  # the unit of each by its name
Chart = Mapping[str, Any]  # see ``chart``
# bytes by part of the memory, and by the key that has them
Parts = dict[tuple[str, str], int | None]


class Section(NamedTuple):
    """One subject. A section without charts is a list: it is open, and can be searched."""

    title: str
    about: str
    source: str  # of the figures
    columns: Columns
    rows: Sequence[Sequence[Any]]
    charts: Sequence[Chart] = ()


class Page(NamedTuple):
    """What a file shows, from the top to the bottom."""

    title: str
    lead: str
    tiles: Sequence[Fact]  # the figures that matter most
    notes: Sequence[Fact]
    sections: Sequence[Section]


def chart(kind: str, caption: str, x: str, *values: str, **more: Any) -> Chart:
    """Columns ``values`` over column ``x``: lines, bars, treemap, heat, curve, strip. ``more``:
    ``by`` a column, whose names are series, parts of a treemap or rows of a heat map; ``stack``
    bars; ``start`` a column, where they begin; ``where`` a column and its value; ``line`` the
    series of a curve that is one.
    """
    return {"kind": kind, "caption": caption, "x": x, "values": values, **more}


def html_of(page: Page, text: str) -> str:
    """The HTML file; ``text``: the whole report."""
    templates = Templates(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    scripts = [(HERE / name).read_text(encoding="utf-8") for name in SCRIPTS]
    hashes = [b64encode(sha256(script.encode()).digest()).decode() for script in scripts]
    drawn = [(list(s.columns.items()), s.rows if s.charts else (), s.charts) for s in page.sections]
    words = {
        "units": UNITS,
        "zip": zip,
        "most": MOST_ROWS,
        "version": __version__,
        "text": text,
        "drawn": drawn,
    }
    return templates.get_template("page.html.j2").render(
        page=page, scripts=scripts, hashes=hashes, **words
    )


@singledispatch
def page_of(report: Any) -> Page:
    """What is shown of a report; one that has no charts has its text alone."""
    return Page(f"cgplan {report.kind.replace('_', ' ')}", "", (), (), ())


@page_of.register
def _capture(report: CaptureReport) -> Page:
    counts = [(1, r.graphs, r.nodes or 0) for r in report.records]
    names = ("keys", "graphs", "operators" if report.environment.is_tape else "nodes")
    tiles = [
        (name, f"{sum(each):,}")
        for name, each in zip(names, zip(*counts, strict=True), strict=False)
    ]
    tiles += _costs(report.total_bytes, report.session_seconds)
    notes = [
        *(("warning", text) for text in report.warnings),
        *(("note", text) for text in report.plan.notes),
    ]
    return Page(
        _title("Capture", report.plan),
        _lead(report.environment),
        tiles,
        notes,
        [*_of_capture(report)],
    )


@page_of.register
def _bench(report: BenchReport) -> Page:
    capture, ratios = report.capture, [r.speedup for r in report.records if r.speedup]
    span = f"{format_ratio(min(ratios))} to {format_ratio(max(ratios))}" if ratios else "-"
    tiles = [("speed-up by size", span), ("keys", f"{len(capture.records)}")]
    tiles += _costs(capture.total_bytes, capture.session_seconds)
    notes, sections = (
        [("warning", text) for text in capture.warnings],
        [*_of_bench(report), *_of_capture(capture)],
    )
    return Page(_title("Bench", capture.plan), _lead(report.environment), tiles, notes, sections)


@page_of.register
def _plan(plan: Plan) -> Page:
    tiles, lead = (
        [("graphs", f"{len(plan.keys)}")],
        f"{plan.mode}, {counted(len(plan.keys), 'graph')}.",
    )
    if plan.evidence is not None:
        evidence = Evidence.model_validate(plan.evidence)
        lead, expected = (
            f"{evidence.verdict[0].upper()}{evidence.verdict[1:]}.",
            evidence.expected_us,
        )
        known = {"expected step": expected.plan, "step without graphs": expected.eager}
        tiles += [
            (name, format_microseconds(value)) for name, value in known.items() if value is not None
        ]
    sections = [*_of_plan(plan)]
    if (cost := plan.predicted) is not None and plan.keys:
        tiles += _costs(cost.total_bytes, cost.seconds)
        names = [_name(key) for key in plan.keys]
        sides, source = _predicted(plan)
        seconds = [{"start-up": key.seconds} for key in cost.keys]
        sections += [_memory(sides, source), _start_up(names, seconds, source)]
    return Page(_title("Plan", plan), lead, tiles, said(plan), sections)


@page_of.register
def _audit(report: AuditReport) -> Page:
    counts = {"nodes": "nodes", "opaque": "nodes not read", "words": "pointers"}
    tiles = [("findings", f"{len(report.findings):,}")]
    tiles += [
        (title, f"{sum(getattr(key, name) for key in report.keys):,}")
        for name, title in counts.items()
    ]
    tiles.append(("time", format_seconds(report.read_seconds + report.classify_seconds)))
    title, notes = (
        f"Audit of {counted(len(report.keys), 'key')}",
        [("note", text) for text in report.notes],
    )
    return Page(title, _lead(report.environment), tiles, notes, [*_of_audit(report)])


# --- sections -------------------------------------------------------------------------------------


def _of_capture(report: CaptureReport) -> Iterator[Section]:
    source, plan = f"Measured on {_where(report.environment)}.", report.plan
    names = [_name(r.key) for r in report.records]
    if report.records:
        measured = _parts(names, [(r.pool_growth, r.driver_bytes) for r in report.records], report)
        measured["graph pool", "others"] = max(
            report.pool_bytes - sum(r.pool_growth for r in report.records), 0
        )
        measured["driver", "kernels and others"] = max(
            (report.driver_bytes or 0) - report.graph_driver_bytes, 0
        )
        predicted, by = _predicted(plan)
        yield _memory({"measured": measured, **predicted}, f"{source}{by}")
        seconds = [
            (r.compile_seconds, r.warmup_seconds - r.compile_seconds, r.capture_seconds)
            for r in report.records
        ]
        phases = ("compile", "warm-up", "capture")
        yield _start_up(names, [dict(zip(phases, each, strict=True)) for each in seconds], source)
    alike = grouped(
        ((r.segment_nodes, r.eager_pieces), r) for r in report.records if r.eager_pieces
    )
    if rows := [(_together(records), i, *piece) for (segments, pieces), records in alike.items()
                for i, piece in enumerate(_in_turn(segments, pieces), 1) if segments]:  # fmt: skip
        nodes = "operators" if report.environment.is_tape else "nodes"
        about = (
            f"Graph segments, as long as their {nodes}, and the pieces between them that run "
            "eagerly, which have no "
            "length. A report counts these pieces without their places."
        )
        columns = {"keys": "", "place": "count", "piece": "", nodes: "count"}
        drawn = chart("strip", f"Segments by {nodes}, and eager pieces", "keys", nodes, by="piece")
        yield Section("Segments and eager pieces", about, source, columns, rows, [drawn])
    yield from _of_plan(plan)
    yield from _of_audit(report.audit) if report.audit else ()


def _in_turn(segments: Sequence[int], pieces: int) -> Iterator[tuple[str, int | None]]:
    for nodes, index in zip_longest(segments, range(pieces)):
        yield from [] if nodes is None else [("segment", nodes)]
        yield from [] if index is None else [("eager piece", None)]


def _of_bench(report: BenchReport) -> Iterator[Section]:
    source = f"Medians and p99 of {report.repeats} calls, on {_where(report.environment)}."
    ways = {"eager": "eager", "runner": "graph", "bare replay": "replay"}
    queued = {"runner, queued": "graph_queued", "bare replay, queued": "replay_queued"}
    if report.records:
        every = {
            name: [getattr(r, way) for r in report.records]
            for name, way in {**ways, **queued}.items()
        }
        found = [
            [t and getattr(t, at) for t in each]
            for at in ("median", "p99")
            for each in every.values()
        ]
        runs = [f"{r.mode} {r.descriptor.size}" if r.graph else "eager" for r in report.records]
        rows = [
            (r.size, run, *us, r.speedup)
            for r, run, *us in zip(report.records, runs, *found, strict=True)
        ]
        charts = [chart("lines", "Latency by batch size", "batch", *ways)]
        if any(every["runner, queued"]):
            charts.append(
                chart("lines", "Calls that follow one another without waiting", "batch", *queued)
            )
        about = (
            "From an idle device until it has finished: the model's code, the runner's call, "
            "and the graph alone."
        )
        times = {f"{way}{at}": "us" for at in ("", ", p99") for way in every}
        columns = {"batch": "", "runs as": "", **times, "speed-up": "ratio"}
        yield Section("Latency", about, source, columns, rows, charts)
    if report.peers is not None and report.peers.records:
        kinds = {"device": "Calls that follow one another", "host": "Host, until a call returned"}
        columns = {
            "way": "",
            "batch": "",
            "device": "us",
            "latency": "us",
            "host": "us",
            "first call": "s",
        }
        rows = [
            (
                r.name,
                str(r.num_tokens),
                r.device.median,
                r.latency.median,
                r.host.median,
                r.first_call_seconds,
            )
            for r in report.peers.records
        ]
        charts = [
            chart("lines", caption, "batch", kind, by="way") for kind, caption in kinds.items()
        ]
        about = "Ways to run the same model on the same tensors, in turns."
        yield Section("Beside other ways", about, source, columns, rows, charts)


def _parts(
    names: Sequence[str], each: Sequence[tuple[int, int | None]], of: CaptureReport | Predicted
) -> Parts:
    """``each``: the growth of the pool and the driver's bytes by key."""
    parts: Parts = {
        ("static buffers", "all keys"): of.static_bytes,
        ("workspaces", "all keys"): of.workspace_bytes,
    }
    for name, (pool, driver) in zip(names, each, strict=True):
        parts |= {("graph pool", name): pool, ("driver", name): driver}
    return parts


def _predicted(plan: Plan) -> tuple[dict[str, Parts], str]:
    """The predicted memory, and who predicted it; nothing where nobody did."""
    if (cost := plan.predicted) is None:
        return {}, ""
    names = [_name(key) for key in plan.keys]
    parts = _parts(names, [(key.pool_bytes, key.driver_bytes) for key in cost.keys], cost)
    return {
        "predicted": parts
    }, f" Prediction: {cost.source}{', an estimate' if cost.estimated else ''}."


def _memory(sides: Mapping[str, Parts], source: str) -> Section:
    known = dict.fromkeys(
        row for parts in sides.values() for row, size in parts.items() if size is not None
    )
    sums = {name: format_bytes(sum(filter(None, parts.values()))) for name, parts in sides.items()}
    charts = [chart("treemap", f"{name}: {sums[name]}", "key", name, by="part") for name in sides]
    rows = [(*row, *(parts.get(row) for parts in sides.values())) for row in known]
    about = (
        "Device memory by part, and in it by the key that made it grow. Keys share one pool, so "
        "the first key takes "
        "most of it; the driver takes memory in chunks."
    )
    return Section(
        "Memory",
        about,
        source,
        {"part": "", "key": "", **dict.fromkeys(sides, "bytes")},
        rows,
        charts,
    )


def _start_up(names: Sequence[str], each: Sequence[Mapping[str, float]], source: str) -> Section:
    """Seconds of each key by phase, in the order of the capture."""
    phases = [phase for phase in each[0] if any(seconds[phase] for seconds in each)]
    begins = accumulate((sum(seconds.values()) for seconds in each), initial=0.0)
    rows = [
        (*head, *map(seconds.get, phases))
        for *head, seconds in zip(names, begins, each, strict=False)
    ]
    about = (
        "Time of each key, one after the other from the first on. The time between keys is left "
        "out."
    )
    drawn = chart("bars", "Start-up by key", "key", *phases, stack=True, start="begins after")
    columns = {"key": "", **dict.fromkeys(("begins after", *phases), "s")}
    return Section("Start-up", about, source, columns, rows, [drawn])


def _of_plan(plan: Plan) -> Iterator[Section]:
    if plan.evidence is not None:
        evidence = Evidence.model_validate(plan.evidence)
        source = f"Expected for {evidence.traffic_source}, with step times {evidence.times_source}."
        if evidence.pareto:
            best, ladders = (
                "the best with so many graphs",
                [evidence.as_point("this plan"), *evidence.ladders],
            )
            named = [(p.name, p) for p in ladders] + [(best, p) for p in evidence.pareto]
            rows = [(name, p.graphs, p.expected_us, p.bytes, p.seconds) for name, p in named]
            columns = {
                "plan": "",
                "graphs": "count",
                "step": "us",
                "memory": "bytes",
                "start-up": "s",
            }
            drawn = chart(
                "curve", "Expected step by number of graphs", "graphs", "step", by="plan", line=best
            )
            about = (
                "Mean time of a step by the number of graphs: the best plan of each number, "
                "this plan, and ladders."
            )
            yield Section("Graphs against step time", about, source, columns, rows, [drawn])
        if evidence.uses:
            about = (
                "Share of all steps that each graph runs, and of padding in the tokens that it "
                "runs."
            )
            drawn = chart("bars", "Use of each graph", "graph", "steps", "padding")
            columns = {"graph": "", "padding": "share", "steps": "share"}
            yield Section(
                "Use of each graph", about, source, columns, graph_uses(evidence), [drawn]
            )
        if (found := evidence.padding_map) is not None:
            first, second = (f"{name} up to" for name in found.names)
            boxes = zip(product(found.rows, found.columns), chain(*found.shares), strict=True)
            cells = [(*box, share) for box, share in boxes if share is not None]
            drawn = chart("heat", "Padding by size", second, "padding", by=first)
            about = (
                "Share of padding in what batches up to each size run. An empty cell had no batch."
            )
            columns = {first: "count", second: "count", "padding": "share"}
            yield Section("Padding", about, source, columns, cells, [drawn])
    if plan.keys and not plan.config.get("dims"):
        alike = grouped((sizes, str(lane)) for lane, sizes in plan.lanes().items())
        lanes = {" and ".join(names): sizes for sizes, names in alike.items()}
        padded = [
            (lane, batch, size, (size - batch) / size)
            for lane, sizes in lanes.items()
            for below, size in pairwise((0, *sizes))
            for batch in sorted({below + 1, (below + size + 1) // 2, size})
        ]
        about = (
            "A batch is padded up to the next captured size. For each graph the smallest batch, "
            "one in the middle and "
            "the largest: the share of padding in its rows."
        )
        source = f"Computed from the plan's sizes, {plan.sizes_source}."
        columns = {"lane": "", "batch": "count", "graph": "count", "padding": "share"}
        maps = [
            chart("heat", lane, "batch", "padding", by="graph", where=("lane", lane))
            for lane in lanes
        ]
        yield Section("Padding", about, source, columns, padded, maps)


def _of_audit(report: AuditReport) -> Iterator[Section]:
    source = f"Read from the graphs on {_where(report.environment)}."
    about = (
        "Pointers of the graphs into memory that is not the runner's: a replay reads or writes "
        "what others do."
    )
    names = ("problem", "key", "graph", "node", "kernel", "operator", "line", "address", "detail")
    columns = dict.fromkeys(names, "") | {"graph": "count", "node": "count", "address": "hex"}
    yield Section("Findings", about, source, columns, [_cells(f, columns) for f in report.findings])
    columns = {"name": "", "kind": "", "nbytes": "bytes", "words": "count", "keys": "count"}
    owners = [_cells(owner, columns) for owner in report.owners]
    columns = {"owner": "", "kind": "", "size": "bytes", "pointers": "count", "keys": "count"}
    yield Section(
        "Owners", "All memory that the graphs point into, by name.", source, columns, owners
    )
    drawn = chart("bars", "Pointers by key", "key", "pointers", by="kind", stack=True)
    kinds = [(_name(key.key), *item) for key in report.keys for item in key.kinds.items()]
    columns, about = (
        {"key": "", "kind": "", "pointers": "count"},
        "Pointers of each key, by the kind of their memory.",
    )
    yield Section("Pointers by kind of owner", about, source, columns, kinds, [drawn])
    kernel = "operator" if report.environment.is_tape else "kernel"
    alike = grouped((tuple(sorted(key.kernels.items())), key) for key in report.keys if key.kernels)
    nodes = {_together(keys): kernels for kernels, keys in alike.items()}
    rows = [(keys, *item) for keys, kernels in nodes.items() for item in kernels]
    maps = [chart("treemap", keys, kernel, "nodes", where=("keys", keys)) for keys in nodes][
        :MOST_MAPS
    ]
    about = f"Nodes of a key's graphs, by {kernel}. Keys with equal counts stand together."
    yield Section(
        f"Nodes by {kernel}", about, source, {"keys": "", kernel: "", "nodes": "count"}, rows, maps
    )


def _name(key: Key) -> str:
    return f"{Lane.of(*key)}: {key[1].size}"


def _cells(record: Any, columns: Columns) -> list[Any]:
    """Attributes of a record by their names; a key is written out."""
    return [_name(record.key) if column == "key" else getattr(record, column) for column in columns]


def _together(records: Sequence[KeyRecord]) -> str:
    """``FULL uniform: 1, 2, 4, 8 to 256 by 8``; boxes one by one."""
    if any(r.descriptor.sizes for r in records):
        return ", ".join(_name(r.key) for r in records)
    lanes = grouped((str(r.lane), r.descriptor.num_tokens) for r in records)
    return "; ".join(f"{lane}: {describe_sizes(sorted(sizes))}" for lane, sizes in lanes.items())


def _title(kind: str, plan: Plan) -> str:
    return f"{kind} of {(plan.config.get('model') or {}).get('target') or plan.mode}"


def _costs(memory: int, seconds: float) -> list[Fact]:
    return [("memory", format_bytes(memory)), ("start-up", format_seconds(seconds))]


def _where(environment: Environment) -> str:
    made = environment.date.replace("T", " ").replace("+00:00", " UTC")
    return f"{environment.device}, {environment.backend}, {made}"


def _lead(environment: Environment) -> str:
    aside = (
        " Bytes and times of the CPU stand-in say little about a GPU."
        if environment.is_tape
        else ""
    )
    return f"{_where(environment)}, torch {environment.torch}.{aside}"
