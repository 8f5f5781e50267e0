"""Counts of a runner's calls: one addition a call, summed on demand."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cgplan.errors import CgplanError, TrafficError
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.planning import MissReason, Plan
from cgplan.runner.routing import RoutedBatch
from cgplan.traffic.files import COLUMNS
from cgplan.traffic.histogram import StepShape, Traffic
from cgplan.units import counted, listed

if TYPE_CHECKING:
    from prometheus_client.core import Metric

Asked = tuple[int, int | None, bool, int, CUDAGraphMode, BatchDescriptor, MissReason | None]
Mark = tuple[int, Mapping[Asked, int]]  # resets so far, calls by batch
Sample = tuple[Sequence[object], int]  # labels, count

MOST_BATCHES = 100_000
EXACT_BATCHES = 512  # tokens that metrics do not round
UNTIMED = 1 << 62


@dataclass(slots=True, eq=False)
class BatchCount:
    """Calls with one batch, unpadded, answered alike; ``reason``: why no graph did."""

    num_tokens: int
    num_reqs: int | None
    uniform: bool
    num_active_loras: int
    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    reason: MissReason | None
    calls: int = 0


class RunnerStats:
    """How calls were answered. Staged blocks are not timed.

    Attributes:
        failures: Captures in service that failed or were over the budget.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.captures = 0
        self.evictions = 0
        self.failures = 0
        self.timed_calls = 0
        self.timed_nanoseconds = 0
        self.replays_before = Counter[Key]()  # the last start, wake or reset
        self._resets = 0
        self._counts: dict[Asked, BatchCount] = {}
        self.time_every = 16

    @property
    def time_every(self) -> int:
        """One call of so many is timed; 0: none."""
        return self._time_every

    @time_every.setter
    def time_every(self, calls: int) -> None:
        self._time_every = operator.index(calls)
        self._untimed = calls - 1 if calls > 0 else UNTIMED  # calls between timed ones
        self.until_timed = self._untimed

    def add_time(self, nanoseconds: int) -> None:
        self.timed_calls += 1
        self.timed_nanoseconds += nanoseconds
        self.until_timed = self._untimed

    def count_of(
        self,
        route: RoutedBatch,
        reason: MissReason | None = None,
    ) -> BatchCount:
        """After 100,000 batches, tokens alone tell new ones apart."""
        batch = route.batch
        asked = (
            batch.num_tokens,
            batch.num_reqs,
            route.uniform,
            route.num_active_loras,
            route.mode,
            route.descriptor,
            reason,
        )
        if asked not in self._counts and len(self._counts) >= MOST_BATCHES:
            asked = (batch.num_tokens, None, *asked[2:])
        return self._counts.setdefault(asked, BatchCount(*asked))

    def recount(
        self,
        ran: RoutedBatch,
        asked: RoutedBatch | None,
    ) -> None:
        """Count the last call, if a graph served it, as ``asked``; None: not at all."""
        if ran.mode is CUDAGraphMode.NONE:
            return
        self.count_of(ran).calls -= 1
        if asked:
            served = replace(
                asked,
                mode=ran.mode,
                descriptor=ran.descriptor,
            )
            self.count_of(served).calls += 1

    @property
    def counts(self) -> list[BatchCount]:
        """Any thread may ask."""
        known = list(self._counts.values())  # copied at once
        return [count for count in known if count.calls]

    @property
    def replays(self) -> Counter[Key]:
        total = Counter[Key]()
        for count in self.counts:
            if count.reason is None:
                total[count.mode, count.descriptor] += count.calls
        return total

    @property
    def eager(self) -> Counter[MissReason]:
        total = Counter[MissReason]()
        for count in self.counts:
            if count.reason is not None:
                total[count.reason] += count.calls
        return total

    @property
    def calls(self) -> int:
        return sum(count.calls for count in self.counts)

    @property
    def real_tokens(self) -> int:
        return sum(count.calls * count.num_tokens for count in self.counts)

    @property
    def padded_rows(self) -> int:
        rows = 0
        for count in self.counts:
            rows += count.calls * (count.descriptor.num_tokens - count.num_tokens)
        return rows

    def reset(self) -> None:
        """Count from 0 again, but for captures."""
        self._resets += 1
        self.replays_before = Counter()
        for count in list(self._counts.values()):
            count.calls = 0
        self.timed_calls = 0
        self.timed_nanoseconds = 0

    def __str__(self) -> str:
        graphs = [f"{mode} {key}: {calls}" for (mode, key), calls in self.replays.most_common()]
        reasons = [f"{reason}: {calls}" for reason, calls in self.eager.most_common()]
        return (
            f"{counted(self.calls, 'call')}: {self.real_tokens} tokens, and {self.padded_rows} of "
            "padding\n"
            f"by graphs: {listed(graphs, 3) or 'none'}\n"
            f"eagerly: {listed(reasons, 3) or 'none'}\n"
            f"keys: {self.captures} captured, {self.evictions} evicted, {self.failures} failed"
        )

    def table(self) -> str:
        """The table that vLLM logs, with settings; the planner reads it as traffic."""
        rows = Counter[tuple[int, int, CUDAGraphMode]]()
        for count in self.counts:
            rows[count.num_tokens, count.descriptor.num_tokens, count.mode] += count.calls
        cells: list[Sequence[str]] = [COLUMNS]
        by_calls = sorted(rows.items(), key=lambda row: (-row[1], row[0][:2]))
        for (tokens, padded, mode), calls in by_calls:
            figures = tokens, padded, padded - tokens, mode, calls
            cells.append(tuple(map(str, figures)))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = []
        for row in cells:
            padded_cells = map(str.ljust, row, widths)
            lines.append(f"| {' | '.join(padded_cells)} |")
        rules = ["-" * (width + 2) for width in widths]
        lines.insert(1, f"|{'|'.join(rules)}|")
        head = (
            "**CUDAGraph Config Settings:**\n\n"
            f"- Mode: {self.plan.mode}\n"
            f"- Capture sizes: {list(self.plan.capture_sizes)}\n\n"
            "**CUDAGraph Stats:**\n"
        )
        return "\n".join([head, *lines, ""])

    def prometheus(self, runner: str = "runner") -> str:
        """Prometheus' text format. Raises as StatsCollector."""
        collector = StatsCollector({runner: self})
        from prometheus_client import generate_latest

        return generate_latest(collector).decode()

    def mark(self) -> Mark:
        """The counts now, for ``traffic``."""
        calls = {asked: count.calls for asked, count in list(self._counts.items())}
        return self._resets, calls

    def traffic(self, since: Mark | None = None) -> Traffic:
        """The batches since a ``mark`` or a later ``reset``. Raises TrafficError."""
        found = []
        notes = []
        earlier: Mapping[Asked, int] = {}
        if since is not None and since[0] == self._resets:
            earlier = since[1]
        for asked, count in list(self._counts.items()):
            calls = count.calls - earlier.get(asked, 0)
            if not calls:
                continue
            found.append((self._batch(count), calls))
            if count.num_reqs is None:
                notes = [
                    "no input counts requests: num_reqs of these batches are as many as their "
                    "tokens allow"
                ]
        inputs = ", ".join(self.plan.fixed_inputs)
        if not found:
            raise TrafficError(
                f"the runner{inputs and f' of {inputs}'} had no call since its warm-up",
                remedy="Skip it, or warm up inside the no_grad or inference_mode that the handler "
                "enters.",
            )
        return Traffic.of(found, "runner.stats", notes, inputs=inputs)

    def samples(self) -> dict[str, Iterable[Sample]]:
        """By counter; few enough batches for a monitor."""
        replays = []
        for (mode, key), calls in self.replays.items():
            labels = (
                mode,
                key.num_tokens,
                key.num_reqs or "",
                str(key.uniform).lower(),
                key.num_active_loras,
                *key.sizes,
            )
            replays.append((labels, calls))
        batches = Counter[Sequence[object]]()
        for count in self.counts:
            tokens, _, is_uniform, loras = self._batch(count)
            if not is_uniform and tokens > EXACT_BATCHES:
                most = max(tokens, self.plan.max_num_batched_tokens)
                tokens = min(math.ceil(tokens / 64) * 64, most)
            labels = (
                tokens,
                str(is_uniform).lower(),
                loras,
            )
            if count.reason is None:
                labels += count.descriptor.sizes
            batches[labels] += count.calls
        return {
            "replays": replays,
            "batches": batches.items(),
            "eager_calls": [((reason,), calls) for reason, calls in self.eager.items()],
            "tokens": [(("real",), self.real_tokens), (("padding",), self.padded_rows)],
            "captures": [((), self.captures)],
            "evictions": [((), self.evictions)],
            "capture_failures": [((), self.failures)],
        }

    def _batch(self, count: BatchCount) -> StepShape:
        reqs = count.num_reqs
        if reqs is None:
            per_request = self.plan.query_len if count.uniform else 1
            reqs = min(count.num_tokens // per_request, self.plan.max_num_seqs)
        # not beyond max_num_seqs
        uniform = count.uniform and count.num_tokens == reqs * self.plan.query_len
        return StepShape(count.num_tokens, reqs, uniform, count.num_active_loras)


_COUNTERS = {  # descriptions, and further labels
    "replays": (
        "Calls that a graph served, by its key; uniform: one of uniform decode alone.",
        ("mode", "num_tokens", "num_reqs", "uniform", "num_active_loras"),
    ),
    "batches": (
        "Calls by the batch that was asked for; uniform: of decode alone, which graphs of mixed "
        "batches serve, too. Mixed ones of over 512 tokens are the next multiple of 64.",
        ("num_tokens", "uniform", "num_active_loras"),
    ),
    "eager_calls": ("Calls that ran eagerly, by the reason.", ("reason",)),
    "tokens": ("Tokens of batches, and rows of padding besides.", ("kind",)),
    "captures": ("Keys that were captured.", ()),
    "evictions": ("Captured keys whose graphs were freed.", ()),
    "capture_failures": ("Keys that could not be captured.", ()),
}


class StatsCollector:
    """Collects runners' numbers: ``prometheus_client.REGISTRY.register(StatsCollector({"target":
    runner.stats}))``; of one, ``runner.stats``. Raises CgplanError for others, and without
    prometheus_client.
    """

    def __init__(
        self,
        runners: Mapping[str, RunnerStats] | RunnerStats,
    ) -> None:
        named = runners if isinstance(runners, Mapping) else {"runner": runners}
        for found in named.values():
            if not isinstance(found, RunnerStats):
                raise CgplanError(
                    f"StatsCollector got a {type(found).__name__}, and takes runner.stats by name",
                    remedy='Write StatsCollector({"NAME": runner.stats}), one for each runner.',
                )
        self._runners = dict(named)
        try:
            from prometheus_client import core
        except ImportError:
            raise CgplanError(
                "the metrics format of Prometheus needs prometheus_client, which is not installed",
                remedy="Run `pip install prometheus_client`, or install cgplan with the extra "
                "`metrics`.",
            ) from None
        self._core = core

    def collect(self) -> Iterator[Metric]:
        samples = {runner: stats.samples() for runner, stats in self._runners.items()}
        for name, (about, labels) in _COUNTERS.items():
            family = self._core.CounterMetricFamily(
                f"cgplan_{name}",
                about,
            )
            for runner, found in samples.items():
                names = ["runner", *labels, *self._runners[runner].plan.dim_names[1:]]
                for values, count in found[name]:
                    given = zip(names, map(str, [runner, *values]), strict=False)
                    family.add_sample(f"cgplan_{name}_total", dict(given), count)
            yield family
        info = self._core.InfoMetricFamily(
            "cgplan", "Inputs that have a fixed size, with their shapes.", labels=["runner"]
        )
        for runner, stats in self._runners.items():
            info.add_metric([runner], {"inputs": ", ".join(stats.plan.fixed_inputs)})
        yield info
        host = self._core.SummaryMetricFamily(
            "cgplan_host_seconds",
            "Host time of every 16th call (RunnerStats.time_every), until it returned.",
            labels=["runner"],
        )
        for runner, stats in self._runners.items():
            host.add_metric([runner], stats.timed_calls, stats.timed_nanoseconds / 1e9)
        yield host
