"""Reports of runs as tables: capture, bench, doctor, audit."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from rich.console import RenderableType

from cgplan.modes import CUDAGraphMode
from cgplan.planning.plan import Key, Lane
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
    describe_lanes,
    describe_sizes,
    figures,
    labelled,
    memory_text,
    render,
    stacked,
    titled,
)
from cgplan.reports.plan_tables import head_rows, predicted_by
from cgplan.reports.records import (
    LEAST_GAIN,
    OURS,
    AuditReport,
    BaselineRecord,
    BaselinesRecord,
    BenchReport,
    BudgetRecord,
    CaptureReport,
    DoctorReport,
    Environment,
    LatencyReport,
    OwnerRecord,
    PointerReport,
    RankRecord,
    SplitRecord,
    StaleRecord,
    WatchReport,
)
from cgplan.units import (
    counted,
    format_bytes,
    format_microseconds,
    format_ratio,
    format_seconds,
    from_to,
    grouped,
    listed,
)

FLOOR = "What a replay cannot be faster than"
QUEUED = "Calls that follow one another without waiting"
MOST_STOPS = 3
MOST_FINDINGS = 20
_BECAME = {
    "free block": "freed",
    "unmapped": "unmapped",
    "unowned block": "replaced; something holds the old tensor",
    "moved": "moved: its path leads elsewhere",
}
_READ = (
    Column("nodes"),
    Column("not read", "opaque"),
    Column("pointers", "words"),
)


@render.register
def _capture(report: CaptureReport) -> RenderableType:
    head = Facts("Capture", _capture_rows(report), ready(report))
    made = environment(report.environment)
    if not report.records:
        return stacked(head, Facts("Graphs: none", _totals(report)), made)
    predicted = list(_prediction(report))
    split = None
    if report.split:
        split = render(report.split)
    return stacked(
        head,
        captured(report),
        split,
        _state(report),
        Facts("Prediction", predicted) if predicted else None,
        _ranks(report.ranks),
        Facts("Totals", _totals(report)),
        made,
    )


def ready(report: CaptureReport) -> str:
    if not report.records:
        return "Nothing is captured."
    graphs = counted(report.graphs, "graph")
    memory = format_bytes(report.total_bytes)
    return f"{graphs}, {memory}, ready in {format_seconds(report.session_seconds)}."


def _capture_rows(report: CaptureReport) -> Iterator[Fact]:
    yield from head_rows(report.plan)
    if report.looked_at:
        yield "checked", report.looked_at
    if report.capture_policy == "lazy":
        yield (
            "captures",
            f"lazy: when a batch first asks for a key; waiting: {report.waiting}",
        )
    elif report.capture_policy == "adaptive":
        yield "captures", "adaptive: runner.replan() exchanges keys for those that batches ask for"
    elif report.waiting:
        yield "captures", f"{counted(report.waiting, 'key')} when a batch first asks for it"
    if report.pool != "shared":
        yield "pools", f"one for each {report.pool.removeprefix('per_')}"
    for key in report.failed:
        yield "failed", f"{key.label}: {key.text}"
    yield from labelled("note", (*report.environment.notes, *report.plan.notes))
    yield from labelled("warning", report.warnings)


def environment(found: Environment) -> RenderableType:
    versions = {
        "cgplan": found.cgplan,
        "torch": found.torch,
        "CUDA": found.cuda,
        "driver": found.driver,
        "Python": found.python,
    }
    known = [f"{name} {version}" for name, version in versions.items() if version]
    rows = [
        ("device", f"{found.device}, {found.machine}"),
        ("backend", found.backend),
        ("versions", ", ".join(known)),
        ("made", f"{found.date}, config {found.config_hash}".removesuffix(", config ")),
    ]
    return Facts("Environment", rows)


def captured(report: CaptureReport) -> Grid:
    columns = [
        TextColumn("mode", lambda r: f"{r.mode} uniform" if r.descriptor.uniform else r.mode),
        Column(" x ".join(report.plan.dim_names), "descriptor.size"),
        Column("num_reqs", "descriptor.num_reqs"),
    ]
    if any(record.descriptor.has_lora for record in report.records):
        columns.append(Column("LoRA", "descriptor.num_active_loras"))
    if any(record.graphs > 1 for record in report.records):
        columns.append(Column("graphs"))
    nodes = "operators" if report.environment.is_tape else "nodes"
    columns += [Column(nodes, "nodes"), Bytes("pool growth", "pool_growth")]
    if report.driver_bytes is not None:
        columns.append(Bytes("driver", "driver_bytes"))
    columns.append(Seconds("warm-up", lambda r: r.warmup_seconds or None))
    if any(record.compile_seconds for record in report.records):
        columns += [Seconds("compile", "compile_seconds"), Column("cached")]
    columns.append(Seconds("capture", "capture_seconds"))
    return Grid(report.records, *columns)


@render.register
def _split(split: SplitRecord) -> RenderableType:
    routes = {"ops": "operators", "modules": "modules", "wrappers": "the model's own wrappers"}
    rows = [("by", routes.get(split.route, split.route))]
    if split.segments is not None:
        rows.append(("pieces", f"{split.segments} segments, {split.eager_pieces} eager pieces"))
    sides = {"captured": split.captured, "eager": split.eager, "eager calls": split.eager_operators}
    for side, counts in sides.items():
        if counts:
            calls = [f"{name} x{n}" if n > 1 else name for name, n in counts.items()]
            rows.append((side, ", ".join(calls)))
    return Facts("Split", rows)


def _state(report: CaptureReport) -> RenderableType | None:
    words = {"new": "new: stays", "not kept": "written, not put back"}
    left = [place for place in report.state if place.kept in words]
    if not left:
        return None
    return Grid(
        left,
        TextColumn("state", "path"),
        Bytes("size", "nbytes"),
        TextColumn("after the capture", lambda place: words[place.kept]),
    )


def _prediction(report: CaptureReport) -> Iterator[Fact]:
    predicted = report.plan.predicted
    if not predicted:
        return
    parts = [
        ("static buffers", predicted.static_bytes, report.static_bytes),
        ("pool", predicted.pool_bytes, report.pool_bytes),
    ]
    if report.driver_bytes is not None:
        parts += [
            ("workspaces", predicted.workspace_bytes, report.workspace_bytes),
            ("driver", predicted.driver_bytes, report.graph_driver_bytes),
        ]
    parts.append(("memory", sum(part[1] for part in parts), report.graph_bytes))
    yield "costs", predicted_by(predicted)
    yield from labelled("note", predicted.notes)
    yield from labelled("note", _without_graph(report))
    for name, *both in parts:
        yield name, _compared(format_bytes, *both)
    seconds = report.warmup_seconds + report.capture_seconds
    yield "time", _compared(format_seconds, predicted.seconds, seconds)


def _compared(
    text: Callable[[Any], str],
    predicted: float,
    measured: float,
) -> str:
    error = f": {(predicted - measured) / measured:+.1%}" if measured else ""
    return f"{text(predicted)} predicted, {text(measured)} measured{error}"


def _without_graph(report: CaptureReport) -> Iterator[str]:
    why = {}
    if report.budget:
        refused = (*report.budget.left_out, *report.budget.skipped)
        why = dict.fromkeys(refused, "over the budget")
    for failure in report.failed:
        why[failure.key] = "over the budget" if failure.is_over_budget else "failed"
    for record in report.records:
        why.pop(record.key, None)
    for reason, keys in grouped((reason, key) for key, reason in why.items()).items():
        yield f"{_by_lane(keys)} {reason}: not captured, and neither predicted nor measured here"
    if report.waiting:
        waiting = counted(report.waiting, "key")
        yield f"{waiting} waiting for a batch: neither predicted nor measured here"


def _totals(report: CaptureReport) -> Iterator[Fact]:
    yield "graphs", f"{report.graphs} for {counted(len(report.records), 'key')}"
    parts = {
        "pool": report.pool_bytes,
        "static buffers": report.static_bytes,
        "driver": report.driver_bytes,
        "workspaces": report.workspace_bytes or None,
    }
    yield "memory", memory_text(parts, report.total_bytes)
    if report.budget:
        yield from _budget(report.budget)
    if report.free_before is not None:
        before, after = format_bytes(report.free_before), format_bytes(report.free_after)
        yield "free", f"{before} before, {after} after"
    times = {
        "warm-up": report.warmup_seconds,
        "capture": report.capture_seconds,
        "inspection": report.inspection_seconds,
        "whole session": report.session_seconds,
    }
    known = [f"{name} {format_seconds(value)}" for name, value in times.items() if value]
    yield "time", ", ".join(known)
    cold = sum(not record.warmup_seconds for record in report.records)
    if cold:
        yield "warm-ups", f"none for {cold} of {counted(len(report.records), 'key')}"
    if report.started_again:
        yield "warm-ups", f"for all keys, captured again: without one, {report.started_again}"


def _ranks(ranks: Sequence[RankRecord]) -> RenderableType | None:
    if not ranks:
        return None
    return Grid(
        ranks,
        Column("rank"),
        TextColumn("all-reduce", "all_reduce"),
        Column("rows"),
        Bytes("mapped", "mapped_bytes"),
        Seconds("registration", "registration_seconds"),
        Bytes("pool", "pool_bytes"),
        Bytes("memory", "total_bytes"),
        Seconds("session", "session_seconds"),
    )


def _limits(budget: BudgetRecord) -> Iterator[str]:
    if budget.memory is not None:
        yield f"{format_bytes(budget.used_bytes)} of {format_bytes(budget.memory)} used"
    if budget.capture_time is not None:
        yield f"{format_seconds(budget.used_seconds)} of {format_seconds(budget.capture_time)} used"
    if budget.max_graphs is not None:
        yield f"at most {counted(budget.max_graphs, 'graph')}"
    if budget.reserve is not None:
        yield f"{format_bytes(budget.reserve)} kept free"


def _budget(budget: BudgetRecord) -> Iterator[Fact]:
    yield "budget", "; ".join(_limits(budget))
    if budget.left_out:
        rule = "known before not to fit; the largest first"
        if budget.max_graphs is not None:
            rule = "of the keys that fit, max_graphs keeps those that pad least"
        yield "left out", f"{_by_lane(budget.left_out)}: {rule}"
    by_key = grouped(((stop.limit, stop.key), stop) for stop in budget.stops)
    for stops in list(by_key.values())[:MOST_STOPS]:
        first = stops[0]
        ranks = ", ".join(dict.fromkeys(str(stop.rank) for stop in stops))
        where = "" if first.rank is None else f" of rank {ranks}"
        place = f"{first.lane}, {first.descriptor.num_tokens} tokens"
        yield "stopped by", f"{first.limit}{where} at {place}: {first.detail}"
    if len(by_key) > MOST_STOPS:
        yield "", f"and at {len(by_key) - MOST_STOPS} more keys"
    if budget.skipped:
        yield ("not captured", f"{_by_lane(budget.skipped)}: padded to other sizes, or run eagerly")
    if budget.left_out or budget.skipped:
        yield "advice", "`cgplan plan` chooses the keys that gain most within the budget"


def _by_lane(keys: Sequence[Key]) -> str:
    """``9 keys (FULL uniform: 8 to 64 by 8; PIECEWISE: 64)``."""
    lanes = describe_lanes((Lane.of(*key), key[1].num_tokens) for key in keys)
    return f"{counted(len(keys), 'key')} ({lanes})"


# --- bench and doctor -----------------------------------------------------------------------------


@render.register
def _bench(report: BenchReport) -> RenderableType:
    head = Facts("Bench", _bench_rows(report), gain(report))
    made = environment(report.environment)
    if not report.records:
        return stacked(head, made)
    return stacked(
        head,
        _ranks(report.capture.ranks),
        latencies(report),
        titled(f"{QUEUED}, time of each", queued(report)),
        titled(FLOOR, floor(report)),
        *_against_baselines(report),
        made,
    )


def gain(report: LatencyReport) -> str:
    cost = " ".join([ready(report.capture), *unsure(report)])
    if not report.records:
        return "No size was measured: nothing is captured and report.sizes is absent."
    sure = [record for record in report.records if record.speedup]
    if not sure or report.environment.is_tape:
        return cost
    at = from_to(sure[0].size, sure[-1].size)
    gains = [record.speedup for record in sure if record.speedup]
    return f"{_range(gains)} times as fast as eager at {at} {report.unit}. {cost}"


def _range(values: Sequence[float], spec: str = ".3g") -> str:
    return from_to(format(min(values), spec), format(max(values), spec))


def _bench_rows(report: BenchReport) -> Iterator[Fact]:
    yield from head_rows(report.capture.plan)[:-1]  # the table below has the sizes
    repeats = report.repeats
    yield "times", f"median and p99 of {repeats} calls; replay: graphs alone; host: of a call"
    adapters = {r.descriptor.num_active_loras for r in report.records if r.descriptor.has_lora}
    if adapters:
        yield "LoRA cases", describe_sizes(sorted(adapters))
    yield from _floor_rows(report)
    yield from labelled("note", report.environment.notes)
    yield from bench_notes(report)


def bench_notes(report: LatencyReport) -> Iterator[Fact]:
    slower = ", ".join(str(record.num_tokens) for record in report.records if record.is_slower)
    if slower and not report.environment.is_tape:
        longer = "graphs take the device longer than the model's own code at"
        about = "other kernels may be in them than run eagerly, see docs/troubleshooting.md"
        yield "note", f"{longer} {slower} {report.unit}: {about}"
    yield from labelled("warning", report.capture.warnings)


def unsure(report: LatencyReport) -> list[str]:
    found = []
    for record in report.records:
        found += [f"{name} at {record.size}" for name in record.unsure]
    if not found:
        return []
    advice = "measure again on an idle machine"
    if report.environment.threads != 1:
        advice += ", on a CPU with OMP_NUM_THREADS=1"
    return [f"Not to be trusted, as over twice the fastest call: {listed(found)}; {advice}."]


SPEED_UP = Column(
    "speed-\nup", lambda r: "unsure" if r.unsure else r.speedup and format_ratio(r.speedup)
)


def latencies(report: BenchReport) -> Grid:
    return Grid(
        report.records,
        Column(report.unit, "size"),
        TextColumn("runs as", lambda r: f"{r.mode} {r.descriptor.size}" if r.graph else "eager"),
        Column("padded\nrows", "padded_rows"),
        Microseconds("eager\nmedian", "eager.median"),
        Microseconds("eager\np99", "eager.p99"),
        Microseconds("graph\nmedian", "graph.median"),
        Microseconds("graph\np99", "graph.p99"),
        Microseconds("replay\nmedian", "replay.median"),
        Microseconds("replay\np99", "replay.p99", on_page_alone=True),
        SPEED_UP,
        Microseconds("host\neager", "eager_host.median"),
        Microseconds("host\ngraph", "graph_host.median"),
        gap=1,
        short=True,
    )


def queued(report: BenchReport) -> Grid | None:
    rows = [record for record in report.records if record.graph_queued]
    if report.environment.is_tape or not rows:
        return None
    return Grid(
        rows,
        Column(report.unit, "size"),
        Microseconds("graph median", "graph_queued.median"),
        Microseconds("graph p99", "graph_queued.p99"),
        Microseconds("replay median", "replay_queued.median"),
        Microseconds("replay p99", "replay_queued.p99"),
        Column(
            "graph / replay",
            lambda r: r.replay_queued and r.graph_queued.median / r.replay_queued.median,
            format_ratio,
        ),
        short=True,
    )


def _floor_rows(report: LatencyReport) -> Iterator[Fact]:
    found = report.floor
    if found:
        rate = format_bytes(round(1e6 * found.bytes_per_us))
        read = format_bytes(found.weight_bytes)
        each = format_microseconds(found.kernel_us)
        yield "floor", f"{read} of weights at {rate}/s, {each} for each kernel, both measured first"
        if found.state_bytes:
            rest = format_bytes(found.state_bytes)
            took = format_microseconds(found.state_bytes / found.bytes_per_us)
            which = "KV caches, tables, operands of custom operators"
            yield "besides", f"{rest} ({which}), of which a step may read a part: {took} for all"
    else:
        yield "floor", "not measured: it needs an idle GPU with 512 MiB free"


def floor(report: LatencyReport) -> Grid | None:
    found = report.floor
    nodes = {graph.key: graph.nodes for graph in report.capture.records}
    rows = [  # weights are of the whole forward
        record
        for record in report.records
        if record.replay_queued and record.mode is CUDAGraphMode.FULL
    ]
    if not found or not rows:
        return None

    def gaps(row: Any) -> Any:
        kernels = nodes.get(row.key)
        return kernels and kernels * found.kernel_us

    def rest(row: Any) -> Any:
        taken = gaps(row)
        return taken and max(row.replay_queued.median - found.weights_us - taken, 0.0)

    return Grid(
        rows,
        TextColumn("key", "lane"),
        Column(report.unit, "descriptor.size"),
        Microseconds("replay", "replay_queued.median"),
        Microseconds("weights", lambda _: found.weights_us),
        Column("kernels", lambda row: nodes.get(row.key)),
        Microseconds("their gaps", gaps),
        Microseconds("the rest", rest),
        short=True,
    )


def _against_baselines(report: BenchReport) -> Iterator[RenderableType]:
    measured, environment = report.peers, report.environment
    if not measured:
        return
    memory = f"memory of pools on {environment.backend}" if environment.is_tape else "device memory"
    took = measured.capture_seconds
    own = "failed" if took is None else f"{format_seconds(took)}, {measured.keys} keys"
    calls = f"{measured.rounds} rounds, {measured.repeats} calls of each way and size"
    yield Facts(
        "Against baselines",
        [
            ("order", f"random, seed {measured.seed}; {calls}"),
            (
                "ready",
                f"until all sizes had their first call, each way alone; memory: {memory} that it "
                "took",
            ),
            ("capture", f"{OURS}'s own: {own}; the baselines made one graph for each size below"),
            (
                "times",
                "medians; device: calls in a row; latency: from an idle device; host: until "
                "the call returned",
            ),
            ("x", f"how many times {OURS}'s"),
            (
                "diff",
                "largest difference from the model's own code on equal inputs, state and seed",
            ),
        ],
    )
    yield Grid(
        measured.ways,
        TextColumn("way", "name"),
        Seconds("ready in", "ready_seconds"),
        Bytes("memory", "memory_bytes"),
        TextColumn("note", lambda way: f"failed: {way.failure}" if way.failure else way.note or ""),
    )
    if measured.records:
        yield baselines(measured, report.unit)
    reasons = grouped(
        ((record.name, record.not_comparable), record.num_tokens)
        for record in measured.records
        if record.not_comparable
    )
    rows = [(f"{name} {describe_sizes(sizes)}", str(why)) for (name, why), sizes in reasons.items()]
    if rows:
        yield Facts("Not comparable", rows)


def baselines(measured: BaselinesRecord, unit: str) -> Grid:
    def ratio(name: str, record: BaselineRecord) -> float | None:
        ours = measured.of(OURS, record.num_tokens)
        return None if ours is None else getattr(record, name).median / getattr(ours, name).median

    times = []
    for name in ("device", "latency", "host"):
        times += [
            Microseconds(name, f"{name}.median"),
            Column(f"{name}\nx", partial(ratio, name), format_ratio),
        ]
    return Grid(
        measured.records,
        TextColumn("way", "name"),
        Column(unit, "num_tokens"),
        *times,
        Seconds("first\ncall", "first_call_seconds"),
        Column("diff", lambda r: "n/a" if r.deviation is None else f"{r.deviation:.2g}"),
        gap=1,
        short=True,
    )


@render.register
def _doctor(report: DoctorReport) -> RenderableType:
    return stacked(
        Facts("Doctor", doctor_rows(report), verdict(report)),
        coverage(report) if report.records else None,
        titled(FLOOR, floor(report)),
        environment(report.environment),
    )


def doctor_rows(report: DoctorReport) -> Iterator[Fact]:
    yield from head_rows(report.capture.plan)
    if report.records:
        yield "times", f"medians of {report.repeats} calls"
        yield from _floor_rows(report)
    yield from labelled("note", (*report.environment.notes, *report.capture.plan.notes))
    yield from bench_notes(report)
    pieces = report.outside.items()
    yield from labelled("outside", [f"{piece}, {count} in a step" for piece, count in pieces])


def coverage(report: DoctorReport) -> Grid:
    return Grid(
        report.records,
        TextColumn("key", "lane"),
        Column(report.unit, "size"),
        Microseconds("eager", "eager.median"),
        Microseconds("graph", "graph.median"),
        SPEED_UP,
        Column("inside graphs", "inside", "{:.0%}".format),
    )


def verdict(report: DoctorReport) -> str:
    records = report.records
    if not records:
        return "Nothing is captured: all of a step runs outside of graphs."
    said = []
    inside = [record.inside for record in records if record.inside]
    if inside:
        said.append(f"{_range(inside, '.0%')} of a step runs inside graphs.")
    slow = [record for record in records if record.speedup and record.speedup < LEAST_GAIN]
    if len(slow) == len(records) and not report.environment.is_tape:
        said.append("No size is 2% faster than eager: set cudagraph_mode: NONE.")
    else:
        said.append(gain(report))
    return " ".join(said)


# --- audit ----------------------------------------------------------------------------------------


@render.register
def _audit(report: AuditReport) -> RenderableType:
    return stacked(
        Facts("Audit", _looked_at(report, report.keys), dangling(report)),
        _findings(report) if report.findings else None,
        titled("Owners", _owners(report.owners)),
        figures(
            "Keys",
            report.keys,
            TextColumn("key", "label"),
            Column("graphs"),
            *_READ,
            Column("findings", lambda r: sum(finding.key == r.key for finding in report.findings)),
        ),
        environment(report.environment),
    )


def dangling(report: AuditReport) -> str:
    graphs = counted(sum(key.graphs for key in report.keys), "graph")
    if not report.findings:
        return f"No dangling pointers in {graphs}."
    found = counted(len(report.findings), "pointer")
    return f"{found} of {graphs} into memory that is not the runner's."


def _looked_at(
    report: PointerReport,
    parts: Sequence[Any],
) -> list[tuple[str, str]]:
    read, looked_up = format_seconds(report.read_seconds), format_seconds(report.classify_seconds)
    nodes = sum(part.nodes for part in parts)
    text = f"{_words(parts):,} in {nodes:,} nodes; {read} to read, {looked_up} to look up"
    return [("pointers", text), *labelled("note", report.notes)]


def _owners(owners: Sequence[OwnerRecord]) -> Grid:
    words = _words(owners)
    kinds = grouped((owner.kind, owner) for owner in owners)
    return Grid(
        kinds.values(),
        TextColumn("owner", "0.kind"),
        Column("pointers", _words, "{:,}".format),
        Share("share", lambda rows: _words(rows) / words),
        Bytes("size", lambda rows: sum(r.nbytes or 0 for r in rows) or None),
        TextColumn("names", lambda rows: listed([r.name for r in rows], 2)),
    )


# --- watch ----------------------------------------------------------------------------------------


def _first_in(found: StaleRecord) -> str:
    name = found.operator or found.kernel
    return f"{name} at {found.line}" if found.line else name


STALE = (
    TextColumn("memory", "name"),
    TextColumn("what became of it", lambda found: _BECAME[found.problem]),
    TextColumn("pointers", lambda found: f"{found.pointers} of {found.of}"),
    TextColumn("graphs", lambda found: listed(found.graphs, 3)),
    TextColumn("first in", _first_in),
)
_RAW_NODE = 1950  # bytes, as measured in docs/benchmarks.md
WATCHED = (
    TextColumn("graph", "name"),
    *_READ,
    TextColumn("captured at", "line"),
)


@render.register
def _watch(report: WatchReport) -> RenderableType:
    rows = _looked_at(report, report.graphs)
    nodes = sum(graph.nodes for graph in report.graphs)
    if nodes and not report.environment.is_tape:
        kept = format_bytes(nodes * _RAW_NODE)
        rows.insert(1, ("raw graphs", f"the watch keeps them: about {kept} of host memory"))
    return stacked(
        Facts("Watch", rows, liveness(report)),
        figures("Stale", report.stale, *STALE),
        figures("Graphs", report.graphs, *WATCHED),
        titled("Owners", _owners(report.owners)) if report.graphs else None,
        environment(report.environment),
    )


def liveness(report: WatchReport) -> str:
    words = f"{_words(report.graphs):,}"
    captured = counted(len(report.graphs), "graph")
    if report.stale:
        stale = sum(found.pointers for found in report.stale)
        return f"{stale:,} of {words} pointers of {captured} are stale."
    if not report.graphs:
        return "No graph lives that the watch saw."
    others = " other" * bool(report.left_out)
    return f"All{others} pointers are live: {words} in {captured}."


def _words(pointed: Sequence[Any]) -> int:
    return sum(part.words for part in pointed)


def _findings(report: AuditReport) -> RenderableType | None:
    lines = []
    by_address = grouped((finding.address, finding) for finding in report.findings)
    for address, found in by_address.items():
        more = f"; {counted(len(found) - 1, 'more node')}" if len(found) > 1 else ""
        lines.append(f"{address:#x}: {found[0].text}{more}")
    return titled("Findings", Sentences(*lines[:MOST_FINDINGS]))
