"""Measurements of a run as values that can be printed, saved and reloaded. Bytes, seconds and
microseconds.
"""

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

REPORT_SCHEMA_VERSION = 1
Keys = tuple[tuple[Mode, Descriptor], ...]
Limit = Literal["memory", "capture_time", "max_graphs", "reserve", "device memory"]


class ShownRecord(Record):
    """A record with tables: ``print`` shows them as plain text."""

    def __str__(self) -> str:
        return render_text(self)


class KeyRecord(Record):
    """Figures of one key."""

    mode: Mode
    descriptor: Descriptor

    @property
    def key(self) -> Key:
        return self.mode, self.descriptor

    @property
    def lane(self) -> Lane:
        return Lane.of(*self.key)


class VerifyRecord(KeyRecord):
    """A graph compared with the model's own code on one batch; ``print`` shows it as a line.

    Attributes:
        differences: The largest absolute difference of each output and of each tensor that is
            written, by name; None where they cannot be compared.
        tolerance: The largest difference that rounding explains.
        eager_us, graph_us: Microseconds of the model's own code and of the replay, both with the
            copies of their results left out.
        failure: What differs by more than rounding; absent: nothing.
        remark: Why a difference was accepted, or nothing compared.
    """

    differences: dict[str, float | None] = Field(default_factory=dict)
    tolerance: float = 0.0
    eager_us: float = 0.0
    graph_us: float = 0.0
    failure: str | None = None
    remark: str | None = None

    def __str__(self) -> str:
        largest = max(
            (value for value in self.differences.values() if value is not None), default=0.0
        )
        said = self.failure or self.remark or "verified"
        figures = f"largest difference {largest:.3g}, {self.tolerance:.3g} allowed"
        times = f"eager {self.eager_us:.0f} us, graph {self.graph_us:.0f} us"
        return f"{self.mode} {self.descriptor}: {said}; {figures}; {times}"


class Environment(Record):
    """Where and when a report was made."""

    backend: str  # "cuda" or "cpu (tape)"
    machine: str
    device: str  # name of the GPU or processor
    driver: str | None  # version of the GPU driver
    cuda: str | None  # version of CUDA that torch was built for
    torch: str
    python: str
    cgplan: str
    date: str  # UTC, ISO 8601, to the second
    config_hash: str

    @property
    def as_machine(self) -> Machine:
        return Machine(gpu=self.device, driver=self.driver, torch=self.torch)

    @property
    def is_tape(self) -> bool:
        return self.backend == "cpu (tape)"

    @property
    def node_name(self) -> str:
        """What a graph consists of."""
        return "operators" if self.is_tape else "nodes"


class GraphRecord(KeyRecord):
    """One captured key."""

    graphs: int  # 1 for FULL, the segments for PIECEWISE
    nodes: int | None  # kernel nodes (tape: operators); None where they could not be counted
    pool_growth: int  # bytes by which the graph pool grew
    # Free device memory lost beyond what torch reserved. The driver takes memory in chunks, so a
    # key may show 0 and the next one several. None without a driver.
    driver_bytes: int | None
    warmup_seconds: float  # of the eager warm-ups
    # from the first begin to the last instantiated graph, eager pieces included
    capture_seconds: float
    eager_pieces: int = 0  # functions that run eagerly between the graphs
    # of each graph, in order; empty where they could not be counted
    segment_nodes: tuple[int, ...] = ()
    # the part of the warm-ups in which torch.compile traced and compiled
    compile_seconds: float = 0.0
    cached: int = 0  # compilations that torch's caches on disk answered

    @property
    def seconds(self) -> float:
        return self.warmup_seconds + self.capture_seconds


class StopRecord(KeyRecord):
    """A key that the budget did not allow, with the figures in words."""

    limit: Limit  # that the key would have passed, or did; "device memory": there was no more
    detail: str
    rank: int | None = None  # the rank whose budget it was, where several capture together


class BudgetRecord(Record):
    """The limits of a budget, in bytes and seconds, and how the capture under it ended."""

    memory: int | None
    capture_time: float | None
    max_graphs: int | None
    reserve: int | None
    used_bytes: int  # at the end, see CaptureReport.graph_bytes
    used_seconds: float  # until the last capture was over and read
    left_out: Keys = ()  # known not to fit before anything was captured, the largest first
    stops: tuple[StopRecord, ...] = ()  # limits met on the way; with several ranks those of all
    skipped: Keys = ()  # the others that have no graph in the end


class FailedKey(KeyRecord):
    """A key that was to be captured while batches were served, and has no graph."""

    error: str  # name of the error's class; BudgetError where the budget did not allow it
    detail: str  # its message

    @property
    def is_over_budget(self) -> bool:
        return self.error == BudgetError.__name__  # beside other keys it may fit

    @property
    def text(self) -> str:
        return f"{self.error}: {self.detail}"


def uncapturable(failed: Iterable[FailedKey]) -> dict[Key, str]:
    """Keys that no plan should have, and why, for ``propose``."""
    return {failure.key: failure.text for failure in failed if not failure.is_over_budget}


class SplitRecord(Record):
    """Which parts of a PIECEWISE forward are captured and which run eagerly.

    ``captured`` and ``eager`` count the calls of each operator in one forward; of a model that was
    not traced only those that pass PyTorch's dispatcher, and none before its first capture. By
    route ``modules`` ``eager`` counts the modules, and ``eager_operators`` the operators in them.
    """

    route: str  # "ops", "modules" or "wrappers", see compilation.piecewise
    segments: int | None  # in one forward of a traced model
    eager_pieces: int | None
    captured: dict[str, int]
    eager: dict[str, int]
    eager_operators: dict[str, int] = Field(default_factory=dict)


class StateRecord(Record):
    """A place of the model's state that warm-ups or captures wrote, or that appeared in them."""

    path: str  # such as ``layers.0.cache``
    nbytes: int
    # device, host: put back from a copy in that memory. new: appeared during the capture and stays.
    # not kept: written and not put back.
    kept: Literal["device", "host", "new", "not kept"]

    @property
    def is_put_back(self) -> bool:
        return self.kept in ("device", "host")


class RankRecord(Record):
    """One rank of a capture; bytes and seconds as in CaptureReport."""

    rank: int
    host: str
    device: str  # the GPU by its unique number, or "cpu"
    all_reduce: str  # "custom", "nccl" (gloo on the CPU) or "symm_mem"
    # of the pointer table: captured all-reduces that read the other ranks' graph buffers
    rows: int = 0
    buffers: int = 0  # distinct graph buffers that were registered
    bases: int = 0  # allocations that they lie in
    mapped_bytes: int = 0  # of other ranks' allocations, mapped into this process
    registration_seconds: float = 0.0  # from the end of the last capture until replays were allowed
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
    name: str  # such as ``model.layers[0].weight``
    nbytes: int | None  # None where the size is not known
    words: int  # pointers into it, of all graphs
    keys: int  # with such a pointer


class Finding(KeyRecord):
    """A pointer of a captured graph into memory that is not the runner's: a replay reads or writes
    what others do.
    """

    problem: Problem
    graph: int  # from 0, of the key's graphs
    node: int  # from 0, in the order of the capture
    kernel: str  # or memcpy, memset; on the tape the operator
    # that launched the node, and its line; None without ``compilation.audit``
    operator: str | None = None
    line: str | None = None
    address: int
    detail: str  # what is known of the memory

    @property
    def text(self) -> str:
        launched = f", {self.operator} at {self.line}" if self.operator else ""
        return (
            f"{self.mode} {self.descriptor}, node {self.node} ({self.kernel}{launched}): "
            f"{self.problem}, {self.detail}"
        )


class AuditedKey(KeyRecord):
    """Figures of one key's graphs."""

    graphs: int
    nodes: int
    opaque: int  # nodes whose memory cannot be read
    words: int  # pointers that were found
    kinds: dict[OwnerKind, int]  # pointers by the owner of their memory
    kernels: dict[str, int]  # nodes by kernel; on the tape by operator


class AuditReport(ShownRecord):
    """Who owns the memory that captured graphs point to. Seconds."""

    kind: Literal["audit"] = "audit"
    schema_version: int = REPORT_SCHEMA_VERSION
    environment: Environment
    keys: tuple[AuditedKey, ...]  # in capture order
    owners: tuple[OwnerRecord, ...]  # the most pointers first
    findings: tuple[Finding, ...]
    read_seconds: float  # for the nodes of all graphs
    classify_seconds: float  # for their pointers
    notes: tuple[str, ...] = ()


class CaptureReport(ShownRecord):
    """Memory (bytes) and time (seconds) that the capture of a plan took; None where a figure is not
    known.
    """

    kind: Literal["capture"] = "capture"
    schema_version: int = REPORT_SCHEMA_VERSION
    environment: Environment
    plan: Plan
    records: tuple[GraphRecord, ...]  # one for each key, in capture order
    pool_bytes: int  # after the last capture
    static_bytes: int  # static buffers
    # of libraries, which the first warm-up of a process allocates outside of the pool
    workspace_bytes: int = 0
    # taken by the driver over the whole session, with the kernels that warm-ups loaded
    driver_bytes: int | None
    free_before: int | None  # free device memory, caches given back
    free_after: int | None
    session_seconds: float  # the whole session
    # the part of it that this report needed: reading memory and counting nodes
    inspection_seconds: float
    split: SplitRecord | None = None  # of PIECEWISE keys
    # outputs leave their memory to later captures; False: each graph holds its own
    borrowed_outputs: bool
    budget: BudgetRecord | None = None
    # as in the configuration, like pool
    capture_policy: Literal["eager", "lazy", "adaptive"] = "eager"
    pool: Literal["shared", "per_mode", "per_graph"] = "shared"
    generation: int = 1  # how often the pools were made
    waiting: int = 0  # keys that are captured when a batch first asks for them
    failed: tuple[FailedKey, ...] = ()  # keys that were asked for and have no graph
    warnings: tuple[str, ...] = ()  # for the user
    # of a capture by several processes, whose other figures are rank 0's
    ranks: tuple[RankRecord, ...] = ()
    looked_at: str = ""  # the part of the model whose state and addresses are checked, in one line
    state: tuple[StateRecord, ...] = ()  # that warm-ups and captures wrote
    audit: AuditReport | None = None  # of the graphs of the session, with ``compilation.audit``

    @property
    def warmup_seconds(self) -> float:
        return sum(r.warmup_seconds for r in self.records)

    @property
    def capture_seconds(self) -> float:
        return sum(r.capture_seconds for r in self.records)

    @property
    def total_bytes(self) -> int:
        """Pool, static buffers, workspaces and driver memory together."""
        return self.pool_bytes + self.static_bytes + self.workspace_bytes + (self.driver_bytes or 0)

    @property
    def graph_driver_bytes(self) -> int:
        """Memory that the driver took while graphs were captured."""
        return sum(r.driver_bytes or 0 for r in self.records)

    @property
    def graph_bytes(self) -> int:
        """Memory that a budget counts: as ``total_bytes``, without the kernels that warm-ups
        loaded.
        """
        return self.pool_bytes + self.static_bytes + self.workspace_bytes + self.graph_driver_bytes

    @property
    def origin(self) -> str:
        made = f"{self.environment.device}, {self.environment.date}"
        return (
            f"a capture of {len(self.records)} keys on {made}, config "
            f"{self.environment.config_hash}"
        )


class Timing(Record):
    """Microseconds over repeated calls."""

    median: float
    p99: float


class BenchRecord(KeyRecord):
    """One batch size, run eagerly, through the runner, and as a bare replay. None where no graph
    serves the batch.
    """

    # unpadded; mode and descriptor: the key that the runner dispatched the batch to
    num_tokens: int
    sizes: tuple[int, ...] = ()  # in the other dimensions, unpadded
    padded_rows: int  # that the graph computed besides
    eager: Timing  # latency of the model called eagerly: from an idle device until it has finished
    graph: Timing | None  # of the runner's call: checks, copies, padding, replay
    replay: Timing | None  # of the bare replay; None for PIECEWISE, too
    # Per call when calls follow one another without waiting: device time, where the device takes
    # longer than the host.
    graph_queued: Timing | None
    replay_queued: Timing | None
    eager_host: Timing  # until the call returned
    graph_host: Timing | None

    @property
    def size(self) -> str:
        """``3``; with more dimensions ``3x100``."""
        return BatchDescriptor(self.num_tokens, sizes=self.sizes).size

    @property
    def speedup(self) -> float | None:
        return None if self.graph is None else self.eager.median / self.graph.median

    @property
    def is_slower(self) -> bool:
        """Whether the bare replay of an unpadded batch takes a twentieth longer than eager,
        launches included.
        """
        return (
            self.replay is not None
            and not self.padded_rows
            and self.replay.median > 1.05 * self.eager.median
        )


OURS = "cgplan"
BASELINE_NAMES = ("eager", "bare", "make_graphed_callables", "reduce-overhead")


class BaselineTiming(Record):
    """Time and memory until one way of running is ready for all sizes: cgplan, or a baseline. None
    if it failed.
    """

    name: str
    # until each size had its first call, of a process that has loaded its kernels
    ready_seconds: float | None = None
    # device memory that was gone then; on the tape, reserved by pools
    memory_bytes: int | None = None
    failure: str | None = None  # why there are no figures
    note: str | None = None  # how to read the figures


class BaselineRecord(Record):
    """One way of running a batch of one size, unpadded; all ways have the same tensors."""

    name: str
    num_tokens: int
    device: Timing  # of a call, when calls follow one another without waiting
    latency: Timing  # from an idle device until it has finished
    host: Timing  # until the call returned
    first_call_seconds: float  # with the compilation and recording that happen in it
    # largest difference from the model's own code on equal inputs, state and seed
    deviation: float | None
    not_comparable: str | None = None  # why there is no deviation


class BaselinesRecord(Record):
    """All ways, cgplan first, measured in one process on the same model and tensors."""

    seed: int  # of the random order
    rounds: int  # in each every way runs every size, in a new order
    repeats: int  # calls of all rounds together
    # cgplan's capture session, a part of its ready_seconds; None if it failed
    capture_seconds: float | None
    keys: int  # graphs that cgplan captured; baselines made one for each size
    ways: tuple[BaselineTiming, ...]
    records: tuple[BaselineRecord, ...]  # by size, in the order of ways

    def of(self, name: str, num_tokens: int) -> BaselineRecord | None:
        return next((r for r in self.records if (r.name, r.num_tokens) == (name, num_tokens)), None)


def check_baselines(names: Iterable[str]) -> tuple[str, ...]:
    """Baselines by name, each once, in the order given. Raises ConfigError for an unknown name."""
    found = tuple(dict.fromkeys(name.strip() for name in names))
    if unknown := [name for name in found if name not in BASELINE_NAMES]:
        remedy = f"Choose among {', '.join(BASELINE_NAMES)}."
        raise ConfigError(f"unknown baseline {unknown[0]!r} to bench against", remedy=remedy)
    return found


class BenchReport(ShownRecord):
    """Latency by batch size."""

    kind: Literal["bench"] = "bench"
    schema_version: int = REPORT_SCHEMA_VERSION
    environment: Environment
    capture: CaptureReport  # memory and time of the graphs
    repeats: int  # timed calls of each size and way
    records: tuple[BenchRecord, ...]  # one for each size
    # other ways to run the same model, where they were asked for
    peers: BaselinesRecord | None = None


class CoverageRecord(KeyRecord):
    """A step of one key on padding: median microseconds from an idle device."""

    eager_us: float
    step_us: float  # with graphs
    inside_us: float  # the graphs of the step alone

    @property
    def inside(self) -> float:
        """The share of the step that is spent inside graphs, from 0 to 1."""
        return self.inside_us / self.step_us


class DoctorReport(ShownRecord):
    """How much of a model's time is spent inside graphs, and what runs outside of them."""

    kind: Literal["doctor"] = "doctor"
    schema_version: int = REPORT_SCHEMA_VERSION
    capture: CaptureReport
    rows: tuple[CoverageRecord, ...]
    outside: dict[str, int]  # calls of eager pieces in a step, by name and line


Way = Literal["proposed", "exchanged", "new generation", "new buffers"]


class ReplanReport(ShownRecord):
    """Changes that a replan made."""

    kind: Literal["replan"] = "replan"
    # from the plan that was captured to the one that traffic deserves now
    difference: PlanDifference
    way: Way  # how the graphs were exchanged
    captured: Keys = ()  # keys that have a graph now and had none before, in capture order
    evicted: Keys = ()  # keys that had a graph and have none now
    recaptured: int = 0  # how many of those that stay were captured again
    # Keys of the new plan that have no graph; and those that failed before, which the plan does
    # without: ``difference.failed`` has them by lane.
    failed: tuple[FailedKey, ...] = ()
    pool_bytes: tuple[int, int]  # all pools before and after
    seconds: float  # planning, measuring and capturing together


Report = AuditReport | CaptureReport | BenchReport | DoctorReport | Plan | PlanCheck
_KINDS: dict[str, type[Report]] = {
    model.model_fields["kind"].default: model for model in get_args(Report)
}
_REMEDY = "Give a JSON file that `cgplan ... --output` wrote."


def load_report(path: str | Path) -> Report:
    """A saved report or plan. Raises ReportError for any other file, and for a schema version that
    is not read.
    """
    return parse_report(read_text(path, ReportError, _REMEDY), path)


def load_plan(path: str | Path) -> Plan:
    """A saved plan. Raises ReportError for any other file, another kind of report too."""
    report = load_report(path)
    if not isinstance(report, Plan):
        raise ReportError(
            f"{path} is a {report.kind} report, not a plan",
            remedy="Give a file that `cgplan plan --output` wrote.",
        )
    return report


def parse_report(text: str, path: str | Path) -> Report:
    """The same from a text that was read already; ``path`` names it in messages. Raises ReportError
    likewise.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        yaml = Path(path).suffix in (".yaml", ".yml")
        hint = "That is a configuration, it seems, which --config takes. " if yaml else ""
        raise ReportError(f"{path}: not JSON: {error}", remedy=f"{hint}{_REMEDY}") from None
    model = _KINDS.get(str(data.get("kind"))) if isinstance(data, dict) else None
    if model is None:
        raise ReportError(f"{path}: not a cgplan report", remedy=_REMEDY)
    found, version = data.get("schema_version"), model.model_fields["schema_version"].default
    if found != version:
        raise ReportError(
            f"{path}: schema version {found!r}, this cgplan reads {version}",
            remedy="Make the report again with this version of cgplan, or read it with the "
            "version that wrote it.",
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ReportError(
            f"{path}: damaged report: {first_problem(error)}", remedy=_REMEDY
        ) from None
