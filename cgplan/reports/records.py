"""Measurements of a run, in bytes, seconds, microseconds (`_us`)."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field, ValidationError

from cgplan.config.load import read_text
from cgplan.config.schema import TAPE, Record, first_problem
from cgplan.errors import BudgetError, ConfigError, ReportError
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.optimizer.evidence import PlanCheck
from cgplan.planning import Plan
from cgplan.planning.difference import PlanDifference
from cgplan.planning.plan import Descriptor, Lane, Machine, Mode
from cgplan.reports.layout import render_text

Keys = tuple[tuple[Mode, Descriptor], ...]
Limit = Literal["memory", "capture_time", "max_graphs", "reserve", "device memory"]


class ShownRecord(Record):
    def __str__(self) -> str:
        return render_text(self)


class SavedReport(ShownRecord):
    kind: str
    schema_version: int = 1


class KeyRecord(Record):
    mode: Mode
    descriptor: Descriptor

    @property
    def key(self) -> Key:
        return self.mode, self.descriptor

    @property
    def label(self) -> str:
        return f"{self.mode} {self.descriptor}"

    @property
    def lane(self) -> Lane:
        return Lane.of(*self.key)


class VerifyRecord(KeyRecord):
    """A graph compared with the model's own code on one batch.

    Attributes:
        differences: Largest absolute ones by tensor; None: not comparable.
        failure: What differs by more than rounding.
        remark: Why a difference was accepted, or nothing compared.
    """

    differences: dict[str, float | None] = Field(default_factory=dict)
    tolerance: float = 0.0
    eager_us: float = 0.0
    graph_us: float = 0.0
    failure: str | None = None
    remark: str | None = None

    def __str__(self) -> str:
        known = [value for value in self.differences.values() if value is not None]
        largest = max(known, default=0.0)
        said = self.failure or self.remark or "verified"
        figures = f"largest difference {largest:.3g}, {self.tolerance:.3g} allowed"
        times = f"eager {self.eager_us:.0f} us, graph {self.graph_us:.0f} us, one run each"
        return f"{self.label}: {said}; {figures}; {times}"


class Environment(Record):
    """Where and when a report was made."""

    backend: str  # its name
    machine: str
    device: str
    driver: str | None
    cuda: str | None
    torch: str
    python: str
    cgplan: str
    date: str  # UTC, ISO 8601
    config_hash: str
    threads: int | None = None  # of an operator on the host

    @property
    def as_machine(self) -> Machine:
        return Machine(gpu=self.device, driver=self.driver, torch=self.torch)

    @property
    def is_tape(self) -> bool:
        return self.backend == TAPE

    @property
    def notes(self) -> Iterable[str]:
        if self.is_tape:
            yield "bytes and times of the CPU stand-in say little about a GPU"


class GraphRecord(KeyRecord):
    """One captured key."""

    graphs: int  # 1 for FULL, the segments for PIECEWISE
    nodes: int | None  # tape: operators
    pool_growth: int
    driver_bytes: int | None  # in chunks: a key may show 0, the next several
    warmup_seconds: float  # with the look; 0 without
    capture_seconds: float
    eager_pieces: int = 0
    segment_nodes: tuple[int, ...] = ()
    compile_seconds: float = 0.0
    cached: int = 0

    @property
    def seconds(self) -> float:
        return self.warmup_seconds + self.capture_seconds


class StopRecord(KeyRecord):
    limit: Limit
    detail: str
    rank: int | None = None


class BudgetRecord(Record):
    memory: int | None
    capture_time: float | None
    max_graphs: int | None
    reserve: int | None
    used_bytes: int
    used_seconds: float
    left_out: Keys = ()
    stops: tuple[StopRecord, ...] = ()
    skipped: Keys = ()


class FailedKey(KeyRecord):
    error: str
    detail: str
    remedy: str = ""

    @property
    def is_over_budget(self) -> bool:
        return self.error == BudgetError.__name__

    @property
    def text(self) -> str:
        return f"{self.error}: {self.detail}"


def uncapturable(failed: Iterable[FailedKey]) -> dict[Key, str]:
    return {failure.key: failure.text for failure in failed if not failure.is_over_budget}


class SplitRecord(Record):
    route: str  # "ops", "modules" or "wrappers", see compilation.piecewise
    segments: int | None
    eager_pieces: int | None
    captured: dict[str, int]
    eager: dict[str, int]
    eager_operators: dict[str, int] = Field(default_factory=dict)


class StateRecord(Record):
    """State that warm-ups or captures wrote or made."""

    path: str
    nbytes: int
    # device, host: put back from a copy; new: stays; not kept: not put back
    kept: Literal["device", "host", "new", "not kept"]


class RankRecord(Record):
    rank: int
    host: str
    device: str  # the GPU's UUID, or "cpu"
    all_reduce: str  # "custom" or "nccl" (gloo on the CPU)
    rows: int = 0
    mapped_bytes: int = 0
    registration_seconds: float = 0.0
    pool_bytes: int
    static_bytes: int
    total_bytes: int
    session_seconds: float


OwnerKind = Literal[
    "parameter or buffer",
    "state",
    "static buffer",
    "graph pool",
    "another runner's pool",
    "library",
    "peer",
    "host memory",
    "free block",
    "unowned block",
    "unmapped",
    "unproven",
    "proven",
    "disproven",
]
Problem = Literal["free block", "unowned block", "unmapped"]


class OwnerRecord(Record):
    kind: OwnerKind
    name: str
    nbytes: int | None
    words: int
    keys: int


class Finding(KeyRecord):
    problem: Problem
    graph: int
    node: int
    kernel: str  # or memcpy, memset; on the tape the operator
    operator: str | None = None
    line: str | None = None
    address: int
    detail: str

    @property
    def text(self) -> str:
        launched = f", {self.operator} at {self.line}" if self.operator else ""
        return (
            f"{self.label}, node {self.node} ({self.kernel}{launched}): "
            f"{self.problem}, {self.detail}"
        )


class AuditedKey(KeyRecord):
    graphs: int
    nodes: int
    opaque: int
    words: int
    kinds: dict[OwnerKind, int]
    kernels: dict[str, int]


class PointerReport(SavedReport):
    environment: Environment
    owners: tuple[OwnerRecord, ...]
    read_seconds: float
    classify_seconds: float
    notes: tuple[str, ...] = ()


class AuditReport(PointerReport):
    """An audit of a runner's graphs."""

    kind: Literal["audit"] = "audit"
    keys: tuple[AuditedKey, ...]  # in capture order
    findings: tuple[Finding, ...]


class WatchedRecord(Record):
    name: str
    line: str  # of its capture
    stack: tuple[str, ...] = ()  # from that line outwards, without torch and cgplan
    stream: int | None = None  # its handle; None on the tape
    nodes: int
    opaque: int
    words: int
    kinds: dict[OwnerKind, int]


class StaleRecord(Record):
    """Pointers into memory that is no longer what it was at the capture.

    ``name``: the tensor's path at the capture, ``*`` for numbers, or the memory. ``of``: all
    pointers to it. ``detail``: what is there now.
    """

    problem: Problem | Literal["moved"]
    name: str
    pointers: int
    of: int
    graphs: tuple[str, ...]
    kernel: str
    operator: str | None = None
    line: str | None = None
    detail: str


class WatchReport(PointerReport):
    kind: Literal["watch"] = "watch"
    graphs: tuple[WatchedRecord, ...]  # in capture order
    stale: tuple[StaleRecord, ...]
    left_out: int = 0  # stale pointers of the baseline
    unwatched: int
    gone: int = 0


class CaptureReport(SavedReport):
    """The cost of a plan's capture; None: not known."""

    kind: Literal["capture"] = "capture"
    environment: Environment
    plan: Plan
    records: tuple[GraphRecord, ...]  # in capture order
    pool_bytes: int
    static_bytes: int
    workspace_bytes: int = 0
    driver_bytes: int | None  # with loaded kernels
    free_before: int | None
    free_after: int | None
    session_seconds: float
    inspection_seconds: float
    split: SplitRecord | None = None
    borrowed_outputs: bool = True  # in saved reports
    budget: BudgetRecord | None = None
    capture_policy: Literal["eager", "lazy", "adaptive"] = "eager"
    pool: Literal["shared", "per_mode", "per_graph"] = "shared"
    generation: int = 1
    waiting: int = 0
    failed: tuple[FailedKey, ...] = ()
    warnings: tuple[str, ...] = ()
    ranks: tuple[RankRecord, ...] = ()  # other figures are those of rank 0
    looked_at: str = ""
    started_again: str | None = None  # why all keys have warm-ups
    state: tuple[StateRecord, ...] = ()
    audit: AuditReport | None = None

    @property
    def warmup_seconds(self) -> float:
        return sum(r.warmup_seconds for r in self.records)

    @property
    def graphs(self) -> int:
        return sum(record.graphs for record in self.records)

    @property
    def capture_seconds(self) -> float:
        return sum(r.capture_seconds for r in self.records)

    @property
    def total_bytes(self) -> int:
        return self._own_bytes + (self.driver_bytes or 0)

    @property
    def graph_driver_bytes(self) -> int:
        """``driver_bytes`` without loaded kernels."""
        return sum(r.driver_bytes or 0 for r in self.records)

    @property
    def graph_bytes(self) -> int:
        """What a budget counts: ``total_bytes`` without loaded kernels."""
        return self._own_bytes + self.graph_driver_bytes

    @property
    def _own_bytes(self) -> int:
        return self.pool_bytes + self.static_bytes + self.workspace_bytes

    @property
    def origin(self) -> str:
        where = self.environment
        made = f"{where.device}, {where.date}, config {where.config_hash}"
        return f"a capture of {len(self.records)} keys on {made}"


class Timing(Record):
    """Microseconds of repeated calls."""

    median: float
    p99: float


class BenchRecord(KeyRecord):
    """A batch size, eager, by the runner, and as a bare replay; None: no graph.

    Queued: without waits between calls. Host: until the call returned. Replay of PIECEWISE: its
    segments, without eager pieces.
    """

    num_tokens: int  # unpadded
    sizes: tuple[int, ...] = ()
    padded_rows: int
    eager: Timing
    graph: Timing | None = None
    replay: Timing | None = None
    graph_queued: Timing | None = None
    replay_queued: Timing | None = None
    eager_host: Timing
    graph_host: Timing | None = None
    unsure: tuple[str, ...] = ()  # medians over twice the fastest call

    @property
    def size(self) -> str:
        """``3``, or ``3x100``."""
        return BatchDescriptor(self.num_tokens, sizes=self.sizes).size

    @property
    def speedup(self) -> float | None:
        """None without a graph, and where a median is not to be trusted."""
        if self.graph is None or self.unsure:
            return None
        return self.eager.median / self.graph.median

    @property
    def inside(self) -> float | None:
        """Share of a step inside graphs, 0 to 1; None where not known or not to be trusted."""
        if self.mode is CUDAGraphMode.FULL:
            return 1.0
        if self.graph is None or self.replay is None or self.unsure:
            return None
        return min(self.replay.median / self.graph.median, 1.0)

    @property
    def is_slower(self) -> bool:
        """Whether the unpadded replay takes 5% longer than eager."""
        if not self.replay or self.padded_rows:
            return False
        return self.replay.median > 1.05 * self.eager.median


OURS = "cgplan"
BASELINE_NAMES = ("eager", "bare", "make_graphed_callables", "reduce-overhead")


class BaselineTiming(Record):
    name: str
    ready_seconds: float | None = None
    memory_bytes: int | None = None  # on the tape, of pools
    failure: str | None = None
    note: str | None = None


class BaselineRecord(Record):
    name: str
    num_tokens: int  # unpadded
    device: Timing
    latency: Timing
    host: Timing
    first_call_seconds: float
    deviation: float | None  # from eager code on equal inputs, state, seed
    not_comparable: str | None = None


class BaselinesRecord(Record):
    """All ways, cgplan first, on the same tensors."""

    seed: int
    rounds: int
    repeats: int
    capture_seconds: float | None
    keys: int
    ways: tuple[BaselineTiming, ...]
    records: tuple[BaselineRecord, ...]

    def of(self, name: str, num_tokens: int) -> BaselineRecord | None:
        for record in self.records:
            if record.name == name and record.num_tokens == num_tokens:
                return record
        return None


def check_baselines(names: Iterable[str]) -> tuple[str, ...]:
    """Each name once. Raises ConfigError for an unknown one."""
    found = tuple(dict.fromkeys(name.strip() for name in names))
    for name in found:
        if name not in BASELINE_NAMES:
            remedy = f"Choose among {', '.join(BASELINE_NAMES)}."
            raise ConfigError(f"unknown baseline {name!r} to bench against", remedy=remedy)
    return found


LEAST_GAIN = 1.02  # below it graphs are not worth their memory


class FloorRecord(Record):
    """What no kernel is faster than: reading the weights, and the kernels' number.

    ``state_bytes``: the model's other memory, of which a step may read a part. ``bytes_per_us``: of
    a copy on this GPU, read and written. ``kernel_us``: of a kernel that does next to nothing, in a
    graph of many.
    """

    weight_bytes: int
    state_bytes: int = 0
    bytes_per_us: float
    kernel_us: float

    @property
    def weights_us(self) -> float:
        return self.weight_bytes / self.bytes_per_us


class LatencyReport(SavedReport):
    environment: Environment
    capture: CaptureReport
    repeats: int
    records: tuple[BenchRecord, ...]
    floor: FloorRecord | None = None

    @property
    def unit(self) -> str:
        return " x ".join(self.capture.plan.dim_names).removeprefix("num_")


class BenchReport(LatencyReport):
    """Latency by batch size."""

    kind: Literal["bench"] = "bench"
    peers: BaselinesRecord | None = None


class DoctorReport(LatencyReport):
    kind: Literal["doctor"] = "doctor"
    schema_version: int = 2
    outside: dict[str, int]


ReplanWay = Literal["proposed", "exchanged", "new generation", "new buffers"]


class ReplanReport(ShownRecord):
    kind: Literal["replan"] = "replan"
    difference: PlanDifference
    verdict: str
    way: ReplanWay
    captured: Keys = ()
    evicted: Keys = ()
    recaptured: int = 0
    failed: tuple[FailedKey, ...] = ()
    pool_bytes: tuple[int, int]
    seconds: float


Report = AuditReport | CaptureReport | BenchReport | DoctorReport | WatchReport | Plan | PlanCheck


class Beside(Record):
    """Reports of one kind by file."""

    reports: dict[str, Report]


_KINDS: dict[str, type[Report]] = {
    model.model_fields["kind"].default: model for model in get_args(Report)
}
_REMEDY = (
    "Give a JSON file that `cgplan ... --output` wrote; --config takes configurations, which "
    "`cgplan init my_model.py:build > my.yaml` makes of Python files."
)


def load_report(path: str | Path, kind: str | None = None) -> Report:
    """A saved report or plan, or only one of a ``kind``. Raises ReportError."""
    report = parse_report(read_text(path, ReportError, _REMEDY), path)
    if kind not in (None, report.kind):
        raise ReportError(
            f"{path} is a report of kind {report.kind}, not {kind}",
            remedy=f"Give one of kind {kind}.",
        )
    return report


def load_plan(path: str | Path) -> Plan:
    """A saved plan. Raises ReportError."""
    report = load_report(path, "plan")
    assert isinstance(report, Plan)
    return report


def parse_report(text: str, path: str | Path) -> Report:
    """As ``load_report``, of a text from ``path``."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path}: not JSON: {error}", remedy=_REMEDY) from None
    model = _KINDS.get(str(data.get("kind"))) if isinstance(data, dict) else None
    if not model:
        raise ReportError(f"{path}: not a cgplan report", remedy=_REMEDY)
    found = data.get("schema_version")
    version = model.model_fields["schema_version"].default
    if found != version:
        raise ReportError(
            f"{path}: schema version {found!r}, this cgplan reads {version}",
            remedy="Make the report again with this version, or read it with its own.",
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ReportError(
            f"{path}: damaged report: {first_problem(error)}", remedy=_REMEDY
        ) from None
