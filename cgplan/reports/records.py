"""What a run measured, as values that can be printed, saved and reloaded. Bytes, seconds and microseconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from cgplan.config.values import mode_by_name
from cgplan.descriptors import BatchDescriptor
from cgplan.errors import BudgetError
from cgplan.modes import CUDAGraphMode
from cgplan.planning import Plan
from cgplan.planning.plan import Key, Machine
from cgplan.reports.base import Record as _Record
from cgplan.reports.base import Timing as Timing
from cgplan.reports.peer_records import PeersRecord
from cgplan.reports.rank_records import RankRecord

REPORT_SCHEMA_VERSION = 1

Mode = Annotated[CUDAGraphMode, BeforeValidator(mode_by_name), PlainSerializer(str, return_type=str)]
Descriptor = Annotated[BatchDescriptor, PlainSerializer(lambda d: d._asdict(), return_type=dict[str, Any])]


class Environment(_Record):
    """Where and when a report was made.

    Attributes:
        backend: ``cuda`` or ``cpu (tape)``.
        device: Name of the GPU or processor.
        driver: GPU driver's version, None without a GPU.
        cuda: CUDA version that torch was built for, None without.
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


class GraphRecord(_Record):
    """One captured key.

    Attributes:
        mode, descriptor: The key.
        graphs: Graphs that the key has (1 for FULL, the segments for PIECEWISE).
        nodes: Kernel nodes (tape: operators); None where they could not be counted.
        pool_growth: Bytes by which the graph pool grew.
        driver_bytes: Device memory that the driver took for it: free memory lost beyond what torch reserved. The
            driver takes memory in chunks, so a key may show 0 and the next one several. None without a driver.
        warmup_seconds, capture_seconds: Time of the eager warm-ups, and from begin to instantiated graph (to the last
            one where there are eager pieces between them, which run too).
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


class StopRecord(_Record):
    """A key that the budget did not allow.

    Attributes:
        limit: The limit that it would have passed, or did; ``device memory``: there was no more.
        mode, descriptor: The key.
        detail: The figures, in words.
        rank: Whose budget it was, where several ranks capture together; None where there is one process.
    """

    limit: Limit
    mode: Mode
    descriptor: Descriptor
    detail: str
    rank: int | None = None


class BudgetRecord(_Record):
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
    left_out: tuple[tuple[Mode, Descriptor], ...] = ()
    stops: tuple[StopRecord, ...] = ()
    skipped: tuple[tuple[Mode, Descriptor], ...] = ()


class FailedKey(_Record):
    """A key that was to be captured while batches were served, and has no graph.

    Attributes:
        mode, descriptor: The key.
        error: Name of the error's class; ``BudgetError`` where the budget did not allow it.
        detail: What it said.
    """

    mode: Mode
    descriptor: Descriptor
    error: str
    detail: str

    @property
    def is_over_budget(self) -> bool:
        """Whether it was the budget that did not allow it: beside other keys it may fit."""
        return self.error == BudgetError.__name__

    @property
    def text(self) -> str:
        """The error with what it said."""
        return f"{self.error}: {self.detail}"


def uncapturable(failed: Iterable[FailedKey]) -> dict[Key, str]:
    """Keys that no plan should have, and why, for ``propose``."""
    return {(key.mode, key.descriptor): key.text for key in failed if not key.is_over_budget}


class SplitRecord(_Record):
    """Which parts of a PIECEWISE forward are captured and which run eagerly.

    Attributes:
        route: ``ops``, ``modules`` or ``wrappers``, see ``compilation.piecewise``.
        segments, eager_pieces: Parts of each kind in one forward, of a traced model.
        captured, eager: Operators on each side, with the number of their calls in one forward. Of a model that was not
            traced they are those of the first capture: none before it, none where a profiler was looking already, and
            no kernels that do not pass PyTorch's dispatcher. By route ``modules`` ``eager`` names what the capture
            breaks at instead, and ``eager_operators`` has the operators in there.
    """

    route: str
    segments: int | None
    eager_pieces: int | None
    captured: dict[str, int]
    eager: dict[str, int]
    eager_operators: dict[str, int] = Field(default_factory=dict)


class CaptureReport(_Record):
    """What capturing a plan cost.

    Attributes:
        records: One for each key, in capture order.
        pool_bytes: The graph pool after the last capture.
        static_bytes: Static buffers.
        workspace_bytes: What else stays in torch's allocator, outside of the pool: workspaces of libraries, which the
            first warm-up of a process brings.
        driver_bytes: Device memory that the driver took over the whole session, the kernels that warm-ups loaded
            included; None without a driver.
        free_before, free_after: Free device memory around the session, caches given back; None where not known.
        session_seconds: The whole session: warm-ups, captures, reading memory and counting nodes.
        inspection_seconds: The part of it that only this report needed: reading memory and counting nodes.
        split: How PIECEWISE keys are split, None where the plan has none.
        borrowed_outputs: Whether outputs leave their memory to later captures; False: each graph holds its own.
        budget: What the budget allowed, None without one.
        capture_policy, pool: As ``compilation`` has them.
        generation: How often the pools began anew, from 1.
        waiting: Keys that are captured when a batch first asks for them.
        failed: Keys that were asked for and have no graph.
        warnings: What the user should know about.
        ranks: Each rank of a capture by several processes, whose other figures are rank 0's; empty for one process.
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

    @property
    def warmup_seconds(self) -> float:
        """Seconds of all warm-ups."""
        return sum(r.warmup_seconds for r in self.records)

    @property
    def capture_seconds(self) -> float:
        """Seconds of all captures."""
        return sum(r.capture_seconds for r in self.records)

    @property
    def total_bytes(self) -> int:
        """Pool, static buffers, workspaces and driver memory together."""
        return self.pool_bytes + self.static_bytes + self.workspace_bytes + (self.driver_bytes or 0)

    @property
    def graph_driver_bytes(self) -> int:
        """What the driver took while graphs were captured."""
        return sum(r.driver_bytes or 0 for r in self.records)

    @property
    def graph_bytes(self) -> int:
        """Memory that a budget counts: as ``total_bytes``, without the kernels that warm-ups loaded."""
        return self.pool_bytes + self.static_bytes + self.workspace_bytes + self.graph_driver_bytes

    @property
    def origin(self) -> str:
        """Which capture this is, in words: what was captured, where and when."""
        made = f"{self.environment.device}, {self.environment.date}"
        return f"a capture of {len(self.records)} keys on {made}, config {self.environment.config_hash}"

    def __str__(self) -> str:
        from cgplan.reports.tables import render_text

        return render_text(self)


class BenchRecord(_Record):
    """One batch size, run eagerly, through the runner, and as a bare replay.

    Attributes:
        num_tokens: The batch, unpadded.
        mode, descriptor: What the runner dispatched it to.
        padded_rows: Rows of padding that the graph computed besides.
        eager: Latency of the model called eagerly on the batch, from an idle device until it has finished.
        graph: Latency of the runner's call: checks, copies, padding, replay. None if no graph serves the batch.
        replay: Latency of the bare replay. None likewise, and for PIECEWISE.
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
        """Whether the bare replay, which the host hardly matters to, takes a twentieth longer than eager, launches
        included. Padding may be why, so a batch that is padded does not count.
        """
        return self.replay is not None and not self.padded_rows and self.replay.median > 1.05 * self.eager.median


class BenchReport(_Record):
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

    def __str__(self) -> str:
        from cgplan.reports.tables import render_text

        return render_text(self)
