"""A runner beside its peers: what each way costs to have ready, and how fast it is, in rounds of random order."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from cgplan.buffers.compare import OwnResults, Result
from cgplan.captures.failures import drop_locals
from cgplan.errors import CgplanError
from cgplan.measure.baselines import Bare, BenchBatch, Call, Eager, Ours, Way, used_bytes
from cgplan.measure.peers_cuda import GraphedCallables, ReduceOverhead
from cgplan.reports.records import OURS, CaptureReport, PeerRecord, PeersRecord, Timing, WayRecord, check_peers
from cgplan.runner.runner import GraphRunner

WAYS: Mapping[str, type[Way]] = {way.name: way for way in (Ours, Eager, Bare, GraphedCallables, ReduceOverhead)}
MOST_ROUNDS = 5
LONGEST_REASON = 160  # characters
Progress = Callable[[int, int, str], None]


@dataclass(slots=True)
class _Contender:
    """One way with what is known of it; times are lists of microseconds by size."""

    way: Way
    record: WayRecord
    calls: dict[int, Call] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    device: dict[int, list[float]] = field(default_factory=dict)
    latency: dict[int, list[float]] = field(default_factory=dict)
    host: dict[int, list[float]] = field(default_factory=dict)
    results: dict[int, Result] = field(default_factory=dict)
    is_ready: bool = False

    @property
    def has_failed(self) -> bool:
        return self.record.failure is not None


def bench_peers(
    runner: GraphRunner,
    batches: Sequence[BenchBatch],
    against: Sequence[str],
    *,
    seed: int | None = None,
    progress: Progress | None = None,
) -> PeersRecord:
    """Measure a runner and other ways to run its model, on the same tensors.

    The runner is closed and captured anew, twice: first each way is prepared with nothing else ready, which gives
    what it costs; then all are ready at once and take turns, so that a slow moment of the machine hits all alike.
    Outputs and views that the runner handed out before are no longer valid. A way that fails is a record that says
    why. See Note [Several ways in one process] in peers.py; other graphs of the process should be closed before.

    Args:
        runner: What is compared. It is open again afterwards, unless its capture failed.
        batches: What is run.
        against: Names of peers.
        seed: Of the order; drawn if absent.
        progress: Called with (done, total, what) before each step.

    Raises:
        ConfigError: an unknown peer.
    """
    names = check_peers(against)
    seed = random.SystemRandom().randrange(1 << 16) if seed is None else seed
    bench = _PeerBench(runner, batches, names, random.Random(seed), progress or (lambda *_: None))
    with torch.no_grad():
        bench.run()
    captured = bench.captured
    return PeersRecord(
        seed=seed,
        rounds=bench.rounds,
        repeats=bench.rounds * bench.repeats,
        capture_seconds=captured.session_seconds if captured else None,
        keys=len(captured.records) if captured else 0,
        ways=tuple(c.record for c in bench.contenders),
        records=tuple(_record(c, batch.size) for batch in batches for c in bench.contenders if not c.has_failed),
    )


class _PeerBench:
    def __init__(
        self,
        runner: GraphRunner,
        batches: Sequence[BenchBatch],
        names: Sequence[str],
        order: random.Random,
        progress: Progress,
    ) -> None:
        self.runner, self.batches, self._order, self._progress = runner, batches, order, progress
        self.contenders = [_Contender(WAYS[name](runner), WayRecord(name=name)) for name in (OURS, *names)]
        repeats = runner.config.report.repeats
        self.rounds = min(MOST_ROUNDS, repeats)
        self.repeats = math.ceil(repeats / self.rounds)
        self.captured: CaptureReport | None = None
        self._done, self._steps = 0, 2 * len(self.contenders) + self.rounds

    def run(self) -> None:
        """Costs, times and results of all ways."""
        self._own = OwnResults(self.runner, self.batches, self._order.randrange(1 << 16))
        self.runner.suspend()
        for contender in self._by_cost():
            self._step(f"{contender.way.name}, alone")
            self._guarded(contender, self._cost)
            if contender.way.calls_until_ready == 1 and contender.is_ready:
                self._free(contender)
        for contender in self.contenders:
            self._step(f"{contender.way.name}, beside the others")
            if not contender.is_ready:
                self._guarded(contender, self._prepare)
        for number in range(self.rounds):
            self._step(f"round {number + 1}")
            self._round()
        for contender in self.contenders:
            self._guarded(contender, self._compare)
        for contender in self.contenders[1:]:
            if contender.is_ready:
                self._free(contender)

    def _by_cost(self) -> list[_Contender]:
        """Random, but those that record in their calls last: they stay ready, and record nothing beside others."""
        shuffled = self._order.sample(self.contenders, len(self.contenders))
        return sorted(shuffled, key=lambda c: c.way.calls_until_ready)

    def _step(self, what: str) -> None:
        self._progress(self._done, self._steps, what)
        self._done += 1

    def _guarded(self, contender: _Contender, action: Callable[[_Contender], None]) -> None:
        """Run a step of a way that has not failed yet; what it raises becomes its record."""
        if contender.has_failed:
            return
        try:
            action(contender)
        except Exception as error:
            drop_locals(error)
            contender.record = WayRecord(name=contender.way.name, failure=_reason(error))
            self._free(contender)

    def _free(self, contender: _Contender) -> None:
        contender.is_ready = False
        contender.calls.clear()
        try:
            contender.way.free()
        except Exception as error:  # of what has failed before, this says no more
            if not contender.has_failed:
                contender.record = WayRecord(name=contender.way.name, failure=_reason(error))

    def _cost(self, contender: _Contender) -> None:
        """Seconds and memory of a way with nothing else ready."""
        way, backend = contender.way, self.runner.backend
        way.check(self.batches)
        before = used_bytes(backend)
        start = time.perf_counter()
        self._prepare(contender)
        seconds = time.perf_counter() - start
        taken = used_bytes(backend) - before
        if way.name == OURS:
            self.captured = self.runner.report
        contender.record = WayRecord(name=way.name, ready_seconds=seconds, memory_bytes=taken, note=way.note)

    def _prepare(self, contender: _Contender) -> None:
        """Prepare a way and make its first calls."""
        way, backend = contender.way, self.runner.backend
        contender.is_ready = True
        with way.preparing():
            self._own.restore()
            way.prepare(self.batches)
            for batch in self.batches:
                call = way.call(batch)
                self._own.restore()
                backend.synchronize()
                start = time.perf_counter()
                for _ in range(way.calls_until_ready):
                    call()
                backend.synchronize()
                contender.first.setdefault(batch.size, time.perf_counter() - start)
                contender.calls[batch.size] = call
        way.settled()

    def _round(self) -> None:
        """Every way runs every size, in a new order."""
        pairs = [(c, batch.size) for c in self.contenders if not c.has_failed for batch in self.batches]
        for contender, size in self._order.sample(pairs, len(pairs)):
            self._guarded(contender, partial(self._time, size=size))

    def _time(self, contender: _Contender, size: int) -> None:
        backend, call = self.runner.backend, contender.calls[size]
        self._own.restore()
        for _ in range(2):  # after another way, caches hold its data
            call()
        queued, _ = backend.time_calls(call, self.repeats, queued=True)
        latency, host = backend.time_calls(call, self.repeats)
        contender.device.setdefault(size, []).extend(queued)
        contender.latency.setdefault(size, []).extend(latency)
        contender.host.setdefault(size, []).extend(host)

    def _compare(self, contender: _Contender) -> None:
        """Results now, after all calls: a graph whose memory another way took would show here."""
        for batch in self.batches:
            call, otherwise = contender.calls[batch.size], contender.way.draws_otherwise(batch)
            contender.results[batch.size] = self._own.compare(batch.size, call, otherwise)


def _record(contender: _Contender, size: int) -> PeerRecord:
    deviation, why = contender.results[size]
    return PeerRecord(
        name=contender.way.name,
        num_tokens=size,
        device=_timing(contender.device[size]),
        latency=_timing(contender.latency[size]),
        host=_timing(contender.host[size]),
        first_call_seconds=contender.first[size],
        deviation=deviation,
        not_comparable=why,
    )


def _timing(values: Sequence[float]) -> Timing:
    return Timing(median=float(np.median(values)), p99=float(np.percentile(values, 99)))


def _reason(error: Exception) -> str:
    """One short line: what is too long loses its middle, because what it was may stand at either end."""
    text = error.message if isinstance(error, CgplanError) else f"{type(error).__name__}: {error}"
    line = " ".join((text.splitlines() or [""])[0].split())
    if len(line) <= LONGEST_REASON:
        return line
    half = LONGEST_REASON // 2
    return f"{line[: half - 3]} ... {line[2 - half :]}"
