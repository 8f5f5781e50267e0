"""What a run measured, as values that can be printed, saved and reloaded. Bytes, seconds and microseconds."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cgplan.config.load import read_text
from cgplan.errors import BudgetError, ConfigError, ReportError
from cgplan.modes import Key
from cgplan.planning import Plan
from cgplan.planning.difference import PlanDifference
from cgplan.planning.plan import PLAN_SCHEMA_VERSION, Descriptor, Machine, Mode
from cgplan.reports.layout import render_text

REPORT_SCHEMA_VERSION = 1


class Record(BaseModel):
    """A frozen value that refuses fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ShownRecord(Record):
    """A record with tables: ``print`` shows them as plain text."""

    def __str__(self) -> str:
        return render_text(self)


Keys = tuple[tuple[Mode, Descriptor], ...]


class Environment(Record):
    """Where and when a report was made.

    Attributes:
        backend, device: ``cuda`` or ``cpu (tape)``, and the name of the GPU or processor.
        driver, cuda: Versions of the GPU driver, and of CUDA that torch was built for; None without.
        date: UTC, ISO 8601, to the second.
        config_hash: Digest of the configuration.
    """

    backend: str
    machine: str
    device: str
    driver: str | None
    cuda: str | None
    torch: str
    python: str
    cgplan: str
    date: str
    config_hash: str

    @property
    def as_machine(self) -> Machine:
        """The part that a plan remembers of where its figures were measured."""
        return Machine(gpu=self.device, driver=self.driver, torch=self.torch)

    @property
    def is_tape(self) -> bool:
        """Whether the figures are those of the CPU stand-in."""
        return self.backend == "cpu (tape)"


class GraphRecord(Record):
    """One captured key.

    Attributes:
        mode, descriptor: The key.
        graphs: Graphs that the key has (1 for FULL, the segments for PIECEWISE).
        nodes: Kernel nodes (tape: operators); None where they could not be counted.
        pool_growth: Bytes by which the graph pool grew.
        driver_bytes: Free device memory lost beyond what torch reserved. The driver takes memory in chunks, so a key
            may show 0 and the next one several. None without a driver.
        warmup_seconds, capture_seconds: Time of the eager warm-ups, and from the first begin to the last instantiated
            graph, eager pieces included.
        eager_pieces: Functions that run eagerly between the graphs of the key.
        segment_nodes: The nodes of each graph, in order; empty where they could not be counted.
    """

    mode: Mode
    descriptor: Descriptor
    graphs: int
    nodes: int | None
    pool_growth: int
    driver_bytes: int | None
    warmup_seconds: float
    capture_seconds: float
    eager_pieces: int = 0
    segment_nodes: tuple[int, ...] = ()


Limit = Literal["memory", "capture_time", "max_graphs", "reserve", "device memory"]


class StopRecord(Record):
    """A key that the budget did not allow.

    Attributes:
        limit: The limit that it would have passed, or did; ``device memory``: there was no more.
        mode, descriptor: The key.
        detail: The figures, in words.
        rank: The rank whose budget it was, where several capture together; None where there is one process.
    """

    limit: Limit
    mode: Mode
    descriptor: Descriptor
    detail: str
    rank: int | None = None


class BudgetRecord(Record):
    """What a budget allowed, and how the capture ended.

    Attributes:
        memory, capture_time, max_graphs, reserve: The limits, in bytes and seconds; None where there is none.
        used_bytes: Memory that counts, at the end: see CaptureReport.graph_bytes.
        used_seconds: Time until the last capture was over and read.
        left_out: Keys that were known not to fit before anything was captured, the largest first.
        stops: Where limits were met on the way; with several ranks those of all, as the budget holds for each.
        skipped: Keys of the others that have no graph in the end.
    """

    memory: int | None
    capture_time: float | None
    max_graphs: int | None
    reserve: int | None
    used_bytes: int
    used_seconds: float
    left_out: Keys = ()
    stops: tuple[StopRecord, ...] = ()
    skipped: Keys = ()


class FailedKey(Record):
    """A key that was to be captured while batches were served, and has no graph.

    Attributes:
        mode, descriptor: The key.
        error: Name of the error's class; ``BudgetError`` where the budget did not allow it.
        detail: Its message.
    """

    mode: Mode
    descriptor: Descriptor
    error: str
    detail: str

    @property
    def is_over_budget(self) -> bool:
        """Whether the budget did not allow it: beside other keys it may fit."""
        return self.error == BudgetError.__name__

    @property
    def text(self) -> str:
        return f"{self.error}: {self.detail}"


def uncapturable(failed: Iterable[FailedKey]) -> dict[Key, str]:
    """Keys that no plan should have, and why, for ``propose``."""
    return {(key.mode, key.descriptor): key.text for key in failed if not key.is_over_budget}


class SplitRecord(Record):
    """Which parts of a PIECEWISE forward are captured and which run eagerly.

    Attributes:
        route: ``ops``, ``modules`` or ``wrappers``, see ``compilation.piecewise``.
        segments, eager_pieces: Parts of each kind in one forward, of a traced model.
        captured, eager: Operators on each side, with the number of their calls in one forward; of a model that was not
            traced only those that pass PyTorch's dispatcher, and none before its first capture. By route ``modules``
            ``eager`` names the modules, and ``eager_operators`` the operators in them.
    """

    route: str
    segments: int | None
    eager_pieces: int | None
    captured: dict[str, int]
    eager: dict[str, int]
    eager_operators: dict[str, int] = Field(default_factory=dict)


class StateRecord(Record):
    """A place of the model's state that warm-ups or captures wrote, or that appeared in them.

    Attributes:
        path: The place, such as ``layers.0.cache``.
        nbytes: Bytes of it.
        kept: ``device`` or ``host``: put back from a copy in that memory. ``new``: it appeared during the capture and
            stays. ``not kept``: it was written and not put back.
    """

    path: str
    nbytes: int
    kept: Literal["device", "host", "new", "not kept"]

    @property
    def is_put_back(self) -> bool:
        """Whether it is as the capture found it."""
        return self.kept in ("device", "host")


class RankRecord(Record):
    """One rank of a capture.

    Attributes:
        device: The GPU by its unique number, or ``cpu``.
        all_reduce: ``custom``, ``nccl`` (gloo on the CPU) or ``symm_mem``.
        rows: Rows of the pointer table: captured all-reduces that read the other ranks' graph buffers.
        buffers, bases: Distinct graph buffers that were registered, and allocations that they lie in.
        mapped_bytes: Bytes of other ranks' allocations that were mapped into this process.
        registration_seconds: From the end of the last capture until replays were allowed.
        pool_bytes, static_bytes, total_bytes, session_seconds: As in CaptureReport.
    """

    rank: int
    host: str
    device: str
    all_reduce: str
    rows: int = 0
    buffers: int = 0
    bases: int = 0
    mapped_bytes: int = 0
    registration_seconds: float = 0.0
    pool_bytes: int
    static_bytes: int
    total_bytes: int
    session_seconds: float


class CaptureReport(ShownRecord):
    """What capturing a plan cost.

    Attributes:
        records: One for each key, in capture order.
        pool_bytes: The graph pool after the last capture.
        static_bytes: Static buffers.
        workspace_bytes: Workspaces of libraries, which the first warm-up of a process allocates outside of the pool.
        driver_bytes: Device memory that the driver took over the whole session, with the kernels that warm-ups loaded;
            None without a driver.
        free_before, free_after: Free device memory around the session, caches given back; None where not known.
        session_seconds, inspection_seconds: The whole session, and the part of it that only this report needed: reading
            memory and counting nodes.
        split: How PIECEWISE keys are split, None where the plan has none.
        borrowed_outputs: Whether outputs leave their memory to later captures; False: each graph holds its own.
        budget: What the budget allowed, None without one.
        capture_policy, pool: As ``compilation`` has them.
        generation: How often the pools were made, from 1.
        waiting: Keys that are captured when a batch first asks for them.
        failed: Keys that were asked for and have no graph.
        warnings: What the user should know about.
        ranks: Each rank of a capture by several processes, whose other figures are rank 0's; empty for one process.
        looked_at: The part of the model whose state and addresses are checked, in one line.
        state: State that warm-ups and captures wrote, and where it was kept.
    """

    kind: Literal["capture"] = "capture"
    schema_version: int = REPORT_SCHEMA_VERSION
    environment: Environment
    plan: Plan
    records: tuple[GraphRecord, ...]
    pool_bytes: int
    static_bytes: int
    workspace_bytes: int = 0
    driver_bytes: int | None
    free_before: int | None
    free_after: int | None
    session_seconds: float
    inspection_seconds: float
    split: SplitRecord | None = None
    borrowed_outputs: bool
    budget: BudgetRecord | None = None
    capture_policy: Literal["eager", "lazy", "adaptive"] = "eager"
    pool: Literal["shared", "per_mode", "per_graph"] = "shared"
    generation: int = 1
    waiting: int = 0
    failed: tuple[FailedKey, ...] = ()
    warnings: tuple[str, ...] = ()
    ranks: tuple[RankRecord, ...] = ()
    looked_at: str = ""
    state: tuple[StateRecord, ...] = ()

    @model_validator(mode="after")
    def _each_key_has_its_prediction(self) -> CaptureReport:
        predicted = self.plan.predicted
        if predicted is not None and self.records and len(predicted.keys) != len(self.records):
            raise ValueError(f"{len(predicted.keys)} keys were predicted, and {len(self.records)} captured")
        return self

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
        """Memory that a budget counts: as ``total_bytes``, without the kernels that warm-ups loaded."""
        return self.pool_bytes + self.static_bytes + self.workspace_bytes + self.graph_driver_bytes

    @property
    def origin(self) -> str:
        """Which capture this is, in words: number of keys, device, date, configuration."""
        made = f"{self.environment.device}, {self.environment.date}"
        return f"a capture of {len(self.records)} keys on {made}, config {self.environment.config_hash}"


class Timing(Record):
    """Microseconds over repeated calls."""

    median: float
    p99: float


class BenchRecord(Record):
    """One batch size, run eagerly, through the runner, and as a bare replay.

    Attributes:
        num_tokens: The batch, unpadded.
        mode, descriptor: What the runner dispatched it to.
        padded_rows: Rows of padding that the graph computed besides.
        eager, graph, replay: Latency from an idle device until it has finished: of the model called eagerly, of the
            runner's call (checks, copies, padding, replay) and of the bare replay. None if no graph serves the batch;
            ``replay`` is None for PIECEWISE, too.
        graph_queued, replay_queued: Time per call when calls follow one another without waiting: device time alone,
            where the device takes longer than the host.
        eager_host, graph_host: Host time until the call returned.
    """

    num_tokens: int
    mode: Mode
    descriptor: Descriptor
    padded_rows: int
    eager: Timing
    graph: Timing | None
    replay: Timing | None
    graph_queued: Timing | None
    replay_queued: Timing | None
    eager_host: Timing
    graph_host: Timing | None

    @property
    def speedup(self) -> float | None:
        """Eager over graph, by medians; None if no graph serves the batch."""
        return None if self.graph is None else self.eager.median / self.graph.median

    @property
    def is_slower(self) -> bool:
        """Whether the bare replay of an unpadded batch takes a twentieth longer than eager, launches included."""
        return self.replay is not None and not self.padded_rows and self.replay.median > 1.05 * self.eager.median


OURS = "cgplan"
PEERS = ("eager", "bare", "make_graphed_callables", "reduce-overhead")


class WayRecord(Record):
    """What it takes to have one way of running ready, for all sizes that were measured.

    Attributes:
        name: ``cgplan``, or a baseline.
        ready_seconds: Until the end of the last size's first call: warm-ups, compilation and capture included, kernels
            and libraries that the process has loaded already not. None if it failed.
        memory_bytes: Device memory that was gone then; on the tape, reserved by pools. None if it failed.
        failure: Why there are no figures; None where there are.
        note: How to read the figures.
    """

    name: str
    ready_seconds: float | None = None
    memory_bytes: int | None = None
    failure: str | None = None
    note: str | None = None


class PeerRecord(Record):
    """One way of running a batch of one size.

    Attributes:
        name: The way.
        num_tokens: The batch, unpadded; the same tensors for all ways.
        device, latency, host: Time of a call when calls follow one another without waiting; from an idle device until
            it has finished; until the call returned.
        first_call_seconds: The first call of this size, with the compilation and recording that happen in it.
        deviation: Largest absolute difference of a result from the model's own code, both from the same inputs, state
            and seed, after all calls; None where they cannot be compared, for the reason in ``not_comparable``.
    """

    name: str
    num_tokens: int
    device: Timing
    latency: Timing
    host: Timing
    first_call_seconds: float
    deviation: float | None
    not_comparable: str | None = None


class PeersRecord(Record):
    """All ways, measured in one process on the same model and tensors.

    Attributes:
        seed: Of the random order.
        rounds, repeats: In each round every way runs every size, in a new order; ``repeats`` calls together.
        capture_seconds: cgplan's own capture session, a part of its ``ready_seconds``; None if it failed.
        keys: Graphs that cgplan captured in it; baselines made one for each size.
        ways: One for each way, cgplan first.
        records: By size, in the order of ``ways``.
    """

    seed: int
    rounds: int
    repeats: int
    capture_seconds: float | None
    keys: int
    ways: tuple[WayRecord, ...]
    records: tuple[PeerRecord, ...]

    def of(self, name: str, num_tokens: int) -> PeerRecord | None:
        """The record of a way at a size; None where that way failed."""
        return next((r for r in self.records if (r.name, r.num_tokens) == (name, num_tokens)), None)


def check_peers(names: Iterable[str]) -> tuple[str, ...]:
    """Baselines by name, each once, in the order given. Raises ConfigError for an unknown name."""
    found = tuple(dict.fromkeys(name.strip() for name in names))
    for name in found:
        if name not in PEERS:
            spellings = (name.replace("_", "-"), name)
            near = [match for spelt in spellings for match in difflib.get_close_matches(spelt, PEERS, n=1)]
            hint = f"Did you mean {near[0]!r}? " if near else ""
            remedy = f"{hint}Choose among {', '.join(PEERS)}."
            raise ConfigError(f"unknown peer {name!r} to bench against", remedy=remedy)
    return found


class BenchReport(ShownRecord):
    """Latency by batch size.

    Attributes:
        capture: What the graphs cost.
        repeats: Timed calls of each size and way.
        records: One for each size.
        peers: Other ways to run the same model, where they were asked for.
    """

    kind: Literal["bench"] = "bench"
    schema_version: int = REPORT_SCHEMA_VERSION
    environment: Environment
    capture: CaptureReport
    repeats: int
    records: tuple[BenchRecord, ...]
    peers: PeersRecord | None = None


Way = Literal["proposed", "exchanged", "new generation", "new buffers"]


class ReplanReport(ShownRecord):
    """What a replan changed.

    Attributes:
        difference: From the plan that was captured to the one that traffic deserves now.
        way: How the graphs were exchanged.
        captured: Keys that have a graph now and had none before, in capture order.
        evicted: Keys that had a graph and have none now.
        recaptured: How many of those that stay were captured again.
        failed: Keys of the new plan that have no graph, with the reason; and those that failed before, which the plan
            does without: ``difference.failed`` has them by lane.
        pool_bytes: All pools before and after, in bytes.
        seconds: Planning, measuring and capturing together.
    """

    kind: Literal["replan"] = "replan"
    difference: PlanDifference
    way: Way
    captured: Keys = ()
    evicted: Keys = ()
    recaptured: int = 0
    failed: tuple[FailedKey, ...] = ()
    pool_bytes: tuple[int, int]
    seconds: float


Report = CaptureReport | BenchReport | Plan
_KINDS: dict[object, tuple[type[CaptureReport] | type[BenchReport] | type[Plan], int]] = {
    "capture": (CaptureReport, REPORT_SCHEMA_VERSION),
    "bench": (BenchReport, REPORT_SCHEMA_VERSION),
    "plan": (Plan, PLAN_SCHEMA_VERSION),
}
_REMEDY = "Give a JSON file that `cgplan ... --output` wrote."


def load_report(path: str | Path) -> Report:
    """A saved report or plan. Raises ReportError for any other file, and for a schema version that is not read."""
    return parse_report(read_text(path, ReportError, _REMEDY), path)


def _whole_number(digits: str) -> int:
    if len(digits) > 18:  # sums of them have to be numbers that a float holds
        raise ValueError(f"the number {digits[:18]}... is too large")
    return int(digits)


def parse_report(text: str, path: str | Path) -> Report:
    """The same from a text that was read already; ``path`` names it in messages. Raises ReportError likewise."""
    try:
        data = json.loads(text, parse_int=_whole_number)
    except json.JSONDecodeError as error:
        yaml = Path(path).suffix in (".yaml", ".yml")
        hint = "That is a configuration, it seems, which --config takes. " if yaml else ""
        where = f"{path}:{error.lineno}:{error.colno}"
        raise ReportError(f"{where}: not JSON: {error.msg}", remedy=f"{hint}{_REMEDY}") from None
    except (RecursionError, ValueError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else f"not JSON: {error}"
        raise ReportError(f"{path}: {problem}", remedy=_REMEDY) from None
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ReportError(f"{path}: not a cgplan report (its kind is {kind!r})", remedy=_REMEDY)
    model, version = _KINDS[kind]
    if data.get("schema_version") != version:
        raise ReportError(
            f"{path}: schema version {data.get('schema_version')!r}, this cgplan reads {version}",
            remedy="Make the report again with this version of cgplan, or read it with the version that wrote it.",
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        wrong = ": ".join(filter(None, (where, first["msg"].removeprefix("Value error, "))))
        raise ReportError(f"{path}: damaged report: {wrong}", remedy=_REMEDY) from None
