"""Measurements of a run: print, save, reload. Bytes, seconds, microseconds (`_us`)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field, ValidationError

from cgplan.config.load import read_text
from cgplan.config.messages import first_problem
from cgplan.errors import BudgetError, ConfigError, ReportError
from cgplan.modes import BatchDescriptor, Key
from cgplan.optimizer.evidence import PlanCheck
from cgplan.planning import Plan
from cgplan.planning.costs import Record
from cgplan.planning.difference import PlanDifference
from cgplan.planning.plan import Descriptor, Lane, Machine, Mode
from cgplan.reports.layout import render_text

Keys = tuple[tuple[Mode, Descriptor], ...]
Limit = Literal["memory", "capture_time", "max_graphs", "reserve", "device memory"]


class ShownRecord(Record):
    """A record that ``print`` shows as tables."""

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
    """A graph compared with the model's own code on one batch; ``print`` shows it as a line.

    Attributes:
        differences: Largest absolute ones of outputs and written tensors; None: not comparable.
        tolerance: The largest difference that rounding explains.
        eager_us, graph_us: The model's own code, the replay.
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
        times = f"eager {self.eager_us:.0f} us, graph {self.graph_us:.0f} us"
        return f"{self.label}: {said}; {figures}; {times}"


class Environment(Record):
    """Where and when a report was made."""

    backend: str  # "cuda" or "cpu (tape)"
    machine: str
    device: str
    driver: str | None
    cuda: str | None
    torch: str
    python: str
    cgplan: str
    date: str  # UTC, ISO 8601
    config_hash: str

    @property
    def as_machine(self) -> Machine:
        return Machine(gpu=self.device, driver=self.driver, torch=self.torch)

    @property
    def is_tape(self) -> bool:
        return self.backend == "cpu (tape)"

    @property
    def node_name(self) -> str:
        return "operators" if self.is_tape else "nodes"


class GraphRecord(KeyRecord):
    """One captured key."""

    graphs: int  # 1 for FULL, the segments for PIECEWISE
    nodes: int | None  # tape: operators
    pool_growth: int
    # outside of torch, in chunks: a key may show 0, the next several; None without a driver
    driver_bytes: int | None
    warmup_seconds: float
    capture_seconds: float  # until the last graph is instantiated
    eager_pieces: int = 0
    segment_nodes: tuple[int, ...] = ()
    compile_seconds: float = 0.0  # of the warm-ups, by torch.compile
    cached: int = 0

    @property
    def seconds(self) -> float:
        return self.warmup_seconds + self.capture_seconds


class StopRecord(KeyRecord):
    """A key that the budget did not allow."""

    limit: Limit
    detail: str
    rank: int | None = None


class BudgetRecord(Record):
    """The limits of a budget, and how the capture under it ended."""

    memory: int | None
    capture_time: float | None
    max_graphs: int | None
    reserve: int | None
    used_bytes: int  # CaptureReport.graph_bytes
    used_seconds: float
    left_out: Keys = ()  # before the first capture, the largest first
    stops: tuple[StopRecord, ...] = ()
    skipped: Keys = ()  # other keys without a graph


class FailedKey(KeyRecord):
    """A key whose capture failed while batches were served."""

    error: str
    detail: str

    @property
    def is_over_budget(self) -> bool:
        return self.error == BudgetError.__name__

    @property
    def text(self) -> str:
        return f"{self.error}: {self.detail}"


def uncapturable(failed: Iterable[FailedKey]) -> dict[Key, str]:
    """Keys that no plan should have, and why."""
    return {failure.key: failure.text for failure in failed if not failure.is_over_budget}


class SplitRecord(Record):
    """The captured and the eager parts of one PIECEWISE forward.

    Calls by operator; without a trace those that pass PyTorch's dispatcher, after a capture.
    """

    route: str  # "ops", "modules" or "wrappers", see compilation.piecewise
    segments: int | None  # of a traced model
    eager_pieces: int | None
    captured: dict[str, int]
    eager: dict[str, int]  # by module for route "modules"
    eager_operators: dict[str, int] = Field(default_factory=dict)  # inside these modules


class StateRecord(Record):
    """State of the model that warm-ups or captures wrote or made."""

    path: str
    nbytes: int
    # device, host: put back from a copy; new: stays; not kept: not put back
    kept: Literal["device", "host", "new", "not kept"]

    @property
    def is_put_back(self) -> bool:
        return self.kept in ("device", "host")


class RankRecord(Record):
    """One rank of a capture."""

    rank: int
    host: str
    device: str  # the GPU's UUID, or "cpu"
    all_reduce: str  # "custom", "nccl" (gloo on the CPU) or "symm_mem"
    rows: int = 0  # of the pointer table
    buffers: int = 0
    bases: int = 0  # allocations of these buffers
    mapped_bytes: int = 0  # of other ranks, in this process
    registration_seconds: float = 0.0  # after the last capture, before replays are allowed
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
]
Problem = Literal["free block", "unowned block", "unmapped"]


class OwnerRecord(Record):
    """Memory that captured graphs point into."""

    kind: OwnerKind
    name: str
    nbytes: int | None
    words: int
    keys: int


class Finding(KeyRecord):
    """A pointer of a captured graph into memory that is not the runner's."""

    problem: Problem
    graph: int  # from 0, of the key's graphs
    node: int  # from 0, in capture order
    kernel: str  # or memcpy, memset; on the tape the operator
    operator: str | None = None  # that launched the node; needs compilation.audit
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
    """The graphs of one key."""

    graphs: int
    nodes: int
    opaque: int
    words: int
    kinds: dict[OwnerKind, int]  # pointers by owner
    kernels: dict[str, int]  # nodes by kernel; on the tape by operator


class AuditReport(SavedReport):
    """Who owns the memory that captured graphs point to."""

    kind: Literal["audit"] = "audit"
    environment: Environment
    keys: tuple[AuditedKey, ...]  # in capture order
    owners: tuple[OwnerRecord, ...]
    findings: tuple[Finding, ...]
    read_seconds: float
    classify_seconds: float
    notes: tuple[str, ...] = ()


class CaptureReport(SavedReport):
    """Bytes and seconds that the capture of a plan took; None: not known."""

    kind: Literal["capture"] = "capture"
    environment: Environment
    plan: Plan
    records: tuple[GraphRecord, ...]  # in capture order
    pool_bytes: int
    static_bytes: int
    workspace_bytes: int = 0  # of libraries, outside of the pool
    driver_bytes: int | None  # with kernels that warm-ups loaded
    free_before: int | None
    free_after: int | None
    session_seconds: float
    inspection_seconds: float
    split: SplitRecord | None = None
    borrowed_outputs: bool  # later captures reuse the memory of outputs
    budget: BudgetRecord | None = None
    capture_policy: Literal["eager", "lazy", "adaptive"] = "eager"
    pool: Literal["shared", "per_mode", "per_graph"] = "shared"
    generation: int = 1
    waiting: int = 0  # keys that no batch has asked for yet
    failed: tuple[FailedKey, ...] = ()
    warnings: tuple[str, ...] = ()
    ranks: tuple[RankRecord, ...] = ()  # other figures are those of rank 0
    looked_at: str = ""  # the checked part of the model
    state: tuple[StateRecord, ...] = ()
    audit: AuditReport | None = None  # with compilation.audit

    @property
    def warmup_seconds(self) -> float:
        return sum(r.warmup_seconds for r in self.records)

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

    Latency: from an idle device until it has finished. Queued: calls without waits between them.
    Host: until the call returned.
    """

    num_tokens: int  # unpadded
    sizes: tuple[int, ...] = ()
    padded_rows: int
    eager: Timing
    graph: Timing | None  # the runner's call
    replay: Timing | None
    graph_queued: Timing | None
    replay_queued: Timing | None
    eager_host: Timing
    graph_host: Timing | None

    @property
    def size(self) -> str:
        """``3``, or ``3x100``."""
        return BatchDescriptor(self.num_tokens, sizes=self.sizes).size

    @property
    def speedup(self) -> float | None:
        return None if self.graph is None else self.eager.median / self.graph.median

    @property
    def is_slower(self) -> bool:
        """Whether the bare replay, unpadded, takes 5% longer than an eager call."""
        if not self.replay or self.padded_rows:
            return False
        return self.replay.median > 1.05 * self.eager.median


OURS = "cgplan"
BASELINE_NAMES = ("eager", "bare", "make_graphed_callables", "reduce-overhead")


class BaselineTiming(Record):
    """Cost of cgplan or a baseline; None if it failed."""

    name: str
    ready_seconds: float | None = None  # until each size had its first call
    memory_bytes: int | None = None  # gone then; on the tape, of pools
    failure: str | None = None
    note: str | None = None


class BaselineRecord(Record):
    """One way to run a batch of one size."""

    name: str
    num_tokens: int  # unpadded
    device: Timing
    latency: Timing
    host: Timing
    first_call_seconds: float
    deviation: float | None  # from eager code on equal inputs, state, seed
    not_comparable: str | None = None


class BaselinesRecord(Record):
    """All ways, cgplan first, on the same model and tensors."""

    seed: int
    rounds: int
    repeats: int
    capture_seconds: float | None  # part of its ready_seconds
    keys: int  # that cgplan captured
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


class BenchReport(SavedReport):
    """Latency by batch size."""

    kind: Literal["bench"] = "bench"
    environment: Environment
    capture: CaptureReport
    repeats: int
    records: tuple[BenchRecord, ...]
    peers: BaselinesRecord | None = None


class CoverageRecord(KeyRecord):
    """A step of one key on padding: median latency."""

    eager_us: float
    step_us: float
    inside_us: float

    @property
    def inside(self) -> float:
        """Share of the step inside graphs, 0 to 1."""
        return self.inside_us / self.step_us


class DoctorReport(SavedReport):
    """What of a step runs inside graphs."""

    kind: Literal["doctor"] = "doctor"
    capture: CaptureReport
    rows: tuple[CoverageRecord, ...]
    outside: dict[str, int]  # calls of eager pieces, by name and line


Way = Literal["proposed", "exchanged", "new generation", "new buffers"]


class ReplanReport(ShownRecord):
    """Changes that a replan made."""

    kind: Literal["replan"] = "replan"
    difference: PlanDifference  # from the captured plan to the one for recent traffic
    way: Way
    captured: Keys = ()
    evicted: Keys = ()
    recaptured: int = 0  # of the keys that stay
    failed: tuple[FailedKey, ...] = ()  # also before, see difference
    pool_bytes: tuple[int, int]
    seconds: float


Report = AuditReport | CaptureReport | BenchReport | DoctorReport | Plan | PlanCheck
_KINDS: dict[str, type[Report]] = {
    model.model_fields["kind"].default: model for model in get_args(Report)
}
_REMEDY = "Give a JSON file that `cgplan ... --output` wrote."


def load_report(path: str | Path) -> Report:
    """A saved report or plan. Raises ReportError for any other file or schema version."""
    return parse_report(read_text(path, ReportError, _REMEDY), path)


def load_plan(path: str | Path) -> Plan:
    """A saved plan. Raises ReportError for any other file."""
    report = load_report(path)
    if not isinstance(report, Plan):
        raise ReportError(
            f"{path} is a {report.kind} report, not a plan",
            remedy="Give a file that `cgplan plan --output` wrote.",
        )
    return report


def parse_report(text: str, path: str | Path) -> Report:
    """As ``load_report``, of a text that was read from ``path``."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = ""
        if Path(path).suffix in (".yaml", ".yml"):
            hint = "That is a configuration, it seems, which --config takes. "
        raise ReportError(f"{path}: not JSON: {error}", remedy=f"{hint}{_REMEDY}") from None
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
