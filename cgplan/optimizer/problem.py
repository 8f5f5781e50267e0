"""The sizes that the search chooses among, and the batches that want them, as arrays."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.lanes import key_of, largest_of, may_serve, stride_of
from cgplan.optimizer.paths import Floats, Ints
from cgplan.planning.costs import GraphCosts
from cgplan.planning.plan import Lane, Plan
from cgplan.traffic.histogram import Traffic
from cgplan.traffic.step_times import StepTimes


@dataclass(frozen=True)
class Candidates:
    """Sizes that a lane may have, ascending; index 0 stands for none. Arrays are [N + 1].

    Attributes:
        sizes: In tokens.
        times: Microseconds of a step at that size.
        driver: Bytes that the driver takes for each key; 0 without costs, as all below.
        seconds: Warm-ups and capture of each key.
        pool, static: Bytes of the pool and of the static buffers, where that size is the largest.
    """

    lane: Lane
    sizes: Ints
    times: Floats
    driver: Floats
    seconds: Floats
    pool: Floats
    static: Floats


@dataclass(frozen=True)
class Demand:
    """Batches that try the same lanes. Arrays of sums are cumulative over ``tokens``: [n + 1], 0 first.

    Attributes:
        lanes: Indices of the lanes that may serve them, in the order in which they are tried.
        tokens: Sizes of the batches, ascending: [n].
        weight: Weights.
        eager: Weights times the microseconds of eager steps.
        best: Weights times the least microseconds that any lane or an eager step could take.
    """

    lanes: tuple[int, ...]
    tokens: Ints
    weight: Floats
    eager: Floats
    best: Floats

    def below(self, sizes: Ints) -> Ints:
        """How many entries of ``tokens`` each size holds."""
        return np.searchsorted(self.tokens, sizes, side="right")


@dataclass(frozen=True)
class Problem:
    """All that a search needs to know.

    Attributes:
        lanes: Candidates of each lane, in the order in which lanes are tried; the last one serves every demand.
        demands: Batches that a graph may serve.
        eager_us: Weight times microseconds of the batches that none may serve.
        weight: Of all batches.
        workspace, once: Bytes and seconds that the first graph brings with it.
    """

    lanes: tuple[Candidates, ...]
    demands: tuple[Demand, ...]
    eager_us: float
    weight: float
    workspace: float = 0.0
    once: float = 0.0

    @property
    def infinite_us(self) -> float:
        """Mean microseconds of a step if every batch had a graph of its own size, and ran in its best mode."""
        return (self.eager_us + sum(float(demand.best[-1]) for demand in self.demands)) / self.weight

    @property
    def eager_total(self) -> float:
        """Microseconds without graphs, times weight."""
        return self.eager_us + sum(float(demand.eager[-1]) for demand in self.demands)

    def cheapest(self, graphs: int) -> tuple[float, float]:
        """Bytes and seconds that so many graphs cost at least, whichever they are; inf if there are not so many."""
        if graphs > sum(lane.sizes.size - 1 for lane in self.lanes):
            return np.inf, np.inf
        driver, seconds = (
            np.concatenate([getattr(lane, cost)[1:] for lane in self.lanes]) for cost in ("driver", "seconds")
        )
        return (
            self.workspace + float(np.sort(driver)[:graphs].sum()),
            self.once + float(np.sort(seconds)[:graphs].sum()),
        )

    def total_of(self, chosen: Sequence[Sequence[int]]) -> float:
        """Microseconds, times weight, if these candidates of each lane are captured."""
        total = self.eager_us
        for demand in self.demands:
            passed = 0
            for index in demand.lanes:
                lane, picked = self.lanes[index], list(chosen[index])
                held = np.maximum(demand.below(lane.sizes[picked]), passed)
                runs = np.diff(demand.weight[held], prepend=demand.weight[passed])
                total += float(runs @ lane.times[picked])
                passed = int(held[-1]) if picked else passed
            total += float(demand.eager[-1] - demand.eager[passed])
        return total

    def costs_of(self, chosen: Sequence[Sequence[int]]) -> tuple[int, float, float]:
        """Graphs, bytes and seconds of the chosen candidates of each lane."""
        picked = [(lane, list(sizes)) for lane, sizes in zip(self.lanes, chosen, strict=True) if sizes]
        if not picked:
            return 0, 0.0, 0.0
        driver = sum(float(lane.driver[sizes].sum()) for lane, sizes in picked)
        largest = [
            max(float(getattr(lane, part)[sizes].max()) for lane, sizes in picked) for part in ("pool", "static")
        ]
        seconds = self.once + sum(float(lane.seconds[sizes].sum()) for lane, sizes in picked)
        return sum(len(sizes) for _, sizes in picked), self.workspace + driver + sum(largest), seconds


def problem_of(
    lanes: Sequence[Lane],
    traffic: Traffic,
    times: StepTimes,
    plan: Plan,
    costs: GraphCosts | None,
    without: Collection[Key] = (),
) -> Problem:
    """The problem of planning these lanes for this traffic; the keys in ``without`` are no candidates.

    Raises:
        StepTimeError: step times of a lane's mode, or of eager steps, are missing.
    """
    lanes = [lane for lane in lanes if any(may_serve(lane, batch) for batch, _ in traffic.histogram)]
    groups, eager_us = _grouped(lanes, traffic, times)
    found: list[Candidates] = []
    for index in reversed(range(len(lanes))):  # where a lane may end depends on those after it
        wanted = [rows for served, rows in groups.items() if index in served]
        above = max((float(c.times[-1]) for c in found), default=0.0)
        found.insert(0, _candidates(lanes[index], wanted, times, plan, above, costs, without))
    return Problem(
        lanes=tuple(found),
        demands=tuple(_demand(served, rows, found, times, plan) for served, rows in sorted(groups.items())),
        eager_us=eager_us,
        weight=traffic.total,
        workspace=float(costs.workspace_bytes) if costs is not None else 0.0,
        once=costs.once_seconds if costs is not None else 0.0,
    )


_Rows = dict[tuple[int, float], float]  # weight by tokens and microseconds of an eager step


def _grouped(lanes: Sequence[Lane], traffic: Traffic, times: StepTimes) -> tuple[dict[tuple[int, ...], _Rows], float]:
    """Batches by the lanes that may serve them, and the time of those that none may."""
    eager: dict[int, list[float]] = {}
    groups: dict[tuple[int, ...], _Rows] = {}
    alone = 0.0
    for batch, weight in traffic.histogram:
        curve = eager.get(batch.num_active_loras)
        if curve is None:
            curve = times.curve(CUDAGraphMode.NONE, traffic.max_tokens, batch.num_active_loras).tolist()
            eager[batch.num_active_loras] = curve
        served = tuple(index for index, lane in enumerate(lanes) if may_serve(lane, batch))
        if served:
            rows, row = groups.setdefault(served, {}), (batch.num_tokens, curve[batch.num_tokens])
            rows[row] = rows.get(row, 0.0) + weight
        else:
            alone += weight * curve[batch.num_tokens]
    return groups, alone


def _candidates(
    lane: Lane,
    wanted: Sequence[_Rows],
    times: StepTimes,
    plan: Plan,
    above: float,
    costs: GraphCosts | None,
    without: Collection[Key],
) -> Candidates:
    """Sizes at which a batch sits, up to the last one that can be worth a graph: Note [Candidates] of the optimizer.

    Where other lanes follow (their slowest graph takes ``above``), a batch may fall to one of those.
    """
    stride, largest = stride_of(lane, plan), largest_of(lane, plan)
    slowest: dict[int, float] = {}
    for rows in wanted:
        for tokens, eager in rows:
            size = -(-tokens // stride) * stride
            if size <= largest:
                slowest[size] = max(slowest.get(size, above), eager)
    batches = np.array([0, *sorted(slowest)], dtype=np.int64)
    misses = np.maximum.accumulate([0.0, *(slowest[int(size)] for size in batches[1:])])
    allowed = np.array([not without or size == 0 or key_of(lane, int(size), plan) not in without for size in batches])
    sizes, misses = batches[allowed], misses[allowed]
    curve = times.curve(lane.mode, int(sizes[-1]), lane.num_active_loras)[sizes]
    useful = np.flatnonzero(curve < misses)
    keep = int(useful[-1]) + 1 if useful.size else 1
    sizes, curve = sizes[:keep], curve[:keep]
    if costs is None:
        return Candidates(lane, sizes, curve, *(np.zeros(keep) for _ in range(4)))
    keys = [key_of(lane, int(size), plan) for size in sizes[1:]]
    return Candidates(
        lane=lane,
        sizes=sizes,
        times=curve,
        driver=np.array([0, *(costs.driver_bytes(key) for key in keys)], dtype=np.float64),
        seconds=np.array([0, *(costs.seconds(key) for key in keys)], dtype=np.float64),
        pool=np.array([0, *(costs.pool_bytes(lane.mode, int(size)) for size in sizes[1:])], dtype=np.float64),
        static=np.array([0, *(costs.static_bytes(int(size)) for size in sizes[1:])], dtype=np.float64),
    )


def _demand(served: tuple[int, ...], rows: _Rows, lanes: Sequence[Candidates], times: StepTimes, plan: Plan) -> Demand:
    tokens = np.array(sorted({n for n, _ in rows}), dtype=np.int64)
    place = {int(n): index for index, n in enumerate(tokens)}
    graph = np.full(tokens.size, np.inf)
    for index in served:
        lane = lanes[index].lane
        stride, largest = stride_of(lane, plan), largest_of(lane, plan)
        sizes = -(-tokens // stride) * stride
        fits = sizes <= largest
        if fits.any():
            curve = times.curve(lane.mode, int(sizes[fits][-1]), lane.num_active_loras)
            graph[fits] = np.minimum(graph[fits], curve[sizes[fits]])
    weight, eager, best = (np.zeros(tokens.size) for _ in range(3))
    for (n, time), count in rows.items():
        at = place[n]
        weight[at] += count
        eager[at] += count * time
        best[at] += count * min(time, graph[at])
    weight, eager, best = (np.concatenate([[0.0], np.cumsum(values)]) for values in (weight, eager, best))
    return Demand(served, tokens, weight, eager, best)
