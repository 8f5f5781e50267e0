"""The evidence for a plan: its figures, the limits that bind, the sizes that were left out, and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.curve import CLOSE, MOST, NO_GAIN, WORTH, Curve, ladder_points, price
from cgplan.optimizer.evidence import (
    NO_BATCH,
    Evidence,
    Expected,
    LadderPoint,
    LaneSizes,
    Limit,
    NextGraph,
    NotWorth,
    SizeUse,
)
from cgplan.optimizer.lanes import (
    Routes,
    Served,
    expected_step,
    lanes_of,
    largest_of,
    may_serve,
    padded_share,
    stride_of,
)
from cgplan.optimizer.lint import lint, milliseconds
from cgplan.optimizer.search import Best, Limits
from cgplan.planning.costs import GraphCosts
from cgplan.planning.plan import Lane, LeftOut, Plan, capture_order
from cgplan.traffic.histogram import Traffic
from cgplan.traffic.step_times import StepTimes
from cgplan.units import format_bytes

EXACT = 1e-6  # relative gap that counts as none
EAGER = Lane(CUDAGraphMode.NONE, False, 0)
NO_GRAPH_GAIN = "no gain"
FAILED = "it could not be captured"
CASE = "its LoRA case was not planned for, see the notes"
RULE = "without a budget the plan ends at 99% of what graphs can bring"
UNPROVEN = "the search did not find it, and the plan is not proven to be the best"


@dataclass(frozen=True)
class Case:
    """A plan, and all that it was made from.

    Attributes:
        plan: With the budget of its configuration.
        curve: The best plans by their number of graphs.
        limits: Of the search; None: without a budget.
        best: The answer of the search within these limits.
        served: Traffic run through the plan.
        failed: Keys that the plan does without, and why they could not be captured.
        ladders: Plans of the ladders that fit the configuration, by name; ``configured`` for the sizes that it lists.
        asked: Which of them the configuration asks for; absent from ``ladders`` if no size of it is left.
    """

    plan: Plan
    traffic: Traffic
    times: StepTimes
    costs: GraphCosts | None
    curve: Curve
    limits: Limits | None
    best: Best
    served: Sequence[Served]
    failed: Mapping[Key, str]
    ladders: Mapping[str, Plan]
    asked: str

    def evidence(self) -> Evidence:
        """Everything that a report shows of the plan."""
        problem, plan, costs, served = self.curve.problem, self.plan, self.costs, self.served
        bytes_, seconds = price(costs, plan.keys)
        expected = expected_step(served)
        lower = min(self.best.bound / problem.weight, expected)
        ladders = tuple(ladder_points(self.ladders, self.traffic, self.times, self.curve))
        return Evidence(
            traffic_source=self.traffic.source,
            traffic_weight=self.traffic.total,
            traffic_notes=self.traffic.notes,
            times_source=self.times.source,
            times_notes=self.times.notes_for(plan.mode),
            costs_source=None if costs is None else costs.source,
            costs_estimated=None if costs is None else costs.estimated,
            rule=self._rule(),
            graphs=len(plan.keys),
            bytes=bytes_,
            seconds=seconds,
            expected_us=Expected(plan=expected, eager=problem.eager_total / problem.weight, bound=problem.infinite_us),
            lower_bound_us=lower,
            gap=expected / lower - 1,
            exact=self._exact,
            binding=self._binding(expected),
            next_graph=self._next_graph(expected),
            lanes=tuple(LaneSizes(**lane._asdict(), sizes=sizes) for lane, sizes in plan.lanes().items()),
            uses=tuple(
                SizeUse(
                    **(part.lane or EAGER)._asdict(),
                    size=part.size,
                    share=part.weight / problem.weight,
                    padding=part.padding,
                )
                for part in served
            ),
            pareto=self.curve.points(),
            ladders=ladders,
            not_worth=tuple(not_worth(plan, self.traffic, self.times)),
            notes=tuple(self._notes()),
            warnings=(*self._unbounded_warning(), *lint(plan, self.traffic, self.times)),
            verdict=self._verdict(expected, ladders),
            costs_notes=() if costs is None else costs.notes,
            unbounded=self._unbounded,
            padding=padded_share(served),
            left_out=tuple(by_lane(self._left_out())),
            failed=tuple(by_lane(self.failed.items())),
        )

    @property
    def _exact(self) -> bool:
        return self.best.least <= self.best.bound * (1 + EXACT)

    @property
    def _budget(self) -> dict[str, Any]:
        return self.plan.budget or {}

    @property
    def _unbounded(self) -> tuple[Limit, ...]:
        limits: tuple[Limit, ...] = ("memory", "capture_time")
        return tuple(name for name in limits if name in self._budget and self.costs is None)

    def _unbounded_warning(self) -> Iterator[str]:
        if self._unbounded:
            names = " and ".join(f"budget.{name}" for name in self._unbounded)
            yield (
                f"{names} did not bound this plan: what graphs cost is not known. Give --costs FILE (a capture "
                "report), --costs estimate or --costs measure; without it they bound the capture alone, which drops "
                "what does not fit"
            )

    def _left_out(self) -> Iterator[tuple[Key, str]]:
        """Keys of the configured list or ladder that the plan does not have, and why.

        Each is added to the plan by itself: if steps get less than 0.01% shorter, there is no gain, or no batch that
        would run in it; if they get shorter, the reason is the limits that it would break.
        """
        if self.asked not in self.ladders:
            return
        present, cases = set(self.plan.keys), set(self.times.told_apart(self.plan.lora_cases))
        gains = Gains(self.plan, self.traffic, self.times)
        for key in self.ladders[self.asked].keys:
            if key in present:
                continue
            weight, gain = gains.of(Lane.of(*key), key[1].num_tokens)
            if key[1].num_active_loras not in cases:
                yield key, CASE
            elif key in self.failed:
                yield key, FAILED
            elif weight == 0:
                yield key, NO_BATCH
            elif gain < WORTH:
                yield key, NO_GRAPH_GAIN
            elif broken := self._broken([*self.plan.keys, key]):
                yield key, ", ".join(f"budget.{limit}" for limit in broken)
            elif self.limits is not None:
                yield key, NO_GRAPH_GAIN if self._exact else UNPROVEN
            else:
                yield key, RULE

    def _broken(self, keys: Sequence[Key]) -> tuple[Limit, ...]:
        """Limits of the budget that these keys together are beyond."""
        bytes_, seconds = price(self.costs, capture_order(keys))
        spent: dict[Limit, float | None] = {"max_graphs": len(keys), "memory": bytes_, "capture_time": seconds}
        return tuple(name for name, used in spent.items() if used is not None and used > self._budget.get(name, np.inf))

    def _rule(self) -> str:
        if self.limits is None:
            why = "the budget binds nothing without costs" if self._unbounded else "no budget"
            return f"{why}: the fewest graphs that bring {1 - CLOSE:.0%} of what a graph for every size would bring"
        words: dict[str, Callable[[Any], str]] = {
            "max_graphs": str,
            "memory": format_bytes,
            "capture_time": lambda seconds: f"{seconds:.4g} s",
        }
        known = (name for name in words if name in self._budget and name not in self._unbounded)
        given = ", ".join(f"{name} {words[name](self._budget[name])}" for name in known)
        return f"the best within the budget ({given}), less graphs that together bring under {WORTH:.2%}"

    def _binding(self, expected: float) -> tuple[Limit, ...]:
        """Limits that the next better plan of the curve breaks, or, beyond its end, a graph for every size."""
        better = expected * (1 - WORTH)
        if self.limits is None or better < self.curve.problem.infinite_us:
            return ()
        point = self.curve.fewest(better)
        every = (range(1, lane.sizes.size) for lane in self.curve.problem.lanes)
        return self._broken(self.curve.keys_of(every) if point is None else self.curve.keys(point))

    def _next_graph(self, expected: float) -> NextGraph | None:
        graphs = len(self.plan.keys) + 1
        if graphs > self.curve.graphs:
            return None
        gain = max(expected - self.curve.expected_us(graphs), 0.0)
        return NextGraph(microseconds=gain, percent=100 * gain / expected)

    def _notes(self) -> Iterator[str]:
        plan, apart = self.plan, self.times.told_apart(self.plan.lora_cases)
        merged = [case for case in plan.lora_cases if case not in apart]
        if merged:
            yield (
                f"LoRA cases {', '.join(map(str, merged))} were not planned for: their step times are not told apart "
                f"from those of larger cases; measure them, with num_active_loras, to have them weighed"
            )
        if max(plan.lora_cases) > 0 and not any(curve.num_active_loras for curve in self.times.curves):
            yield f"steps with adapters were not measured: taken as {self.times.lora_overhead:.0%} longer"
        if self._budget.get("max_graphs", 0) > MOST:
            yield f"no more than {MOST} graphs were planned for"
        if plan.mode is CUDAGraphMode.NONE:
            yield "the resolved cudagraph_mode is NONE: nothing is captured"

    def _verdict(self, expected: float, ladders: Sequence[LadderPoint]) -> str:
        graphs = _graphs(len(self.plan.keys))
        ladder = next((ladder for ladder in ladders if ladder.name == self.asked), None)
        if self.plan.mode is CUDAGraphMode.NONE:
            return "nothing is captured: the resolved cudagraph_mode is NONE"
        if not self.plan.keys:
            return "no graph brings anything: eager steps take no longer, or the budget pays for none that saves time"
        if ladder is None:
            return f"{milliseconds(expected)} a step with {graphs}"
        whose = f"the {ladder.name} ladder's" if ladder.name != "configured" else "the configured sizes'"
        change = expected / ladder.expected_us - 1
        if change > NO_GAIN:
            return (
                f"steps {change:.1%} longer than with {whose} {_graphs(ladder.graphs)}, with {graphs}: see what binds"
            )
        if ladder.no_gain:
            away = ladder.expected_us / self.curve.problem.infinite_us - 1
            fewest = None if ladder.equal is None else ladder.equal.graphs
            less = "" if fewest is None else f"; {_graphs(fewest)} {'is' if fewest == 1 else 'are'} as fast"
            return f"no gain in step time: with {whose} {_graphs(ladder.graphs)} it is {away:.2%} above the bound{less}"
        if change < -NO_GAIN:
            return f"steps {-change:.1%} shorter than with {whose} {_graphs(ladder.graphs)}, with {graphs}"
        return f"steps within 1% of those with {whose} {_graphs(ladder.graphs)}, with {graphs}"


def _graphs(number: int) -> str:
    return "1 graph" if number == 1 else f"{number} graphs"


def by_lane(reasons: Iterable[tuple[Key, str]]) -> Iterator[LeftOut]:
    """Keys with their reasons, those of a lane with the same reason together."""
    found: dict[tuple[Lane, str], list[int]] = {}
    for key, reason in reasons:
        found.setdefault((Lane.of(*key), reason), []).append(key[1].num_tokens)
    for (lane, reason), sizes in sorted(found.items(), key=lambda item: (item[0][0].mode.name, *item[0][0][1:])):
        yield LeftOut(**lane._asdict(), sizes=tuple(sorted(sizes)), reason=reason)


class Gains:
    """The gain of one key more, for a plan and traffic."""

    def __init__(self, plan: Plan, traffic: Traffic, times: StepTimes) -> None:
        self._times = times
        self._lanes = lanes_of(plan.mode, plan.lora_cases)
        routes, eager = Routes(plan.keys), len(self._lanes)
        rows = []
        for batch, weight in traffic.histogram:
            lane, size = routes.of(batch) or (None, batch.num_tokens)
            mode, case = (CUDAGraphMode.NONE, batch.num_active_loras) if lane is None else (lane[0], lane[2])
            rank = eager if lane is None else self._lanes.index(lane)
            rows.append((*batch, weight, rank, size, times.of(mode, size, case)))
        table = np.array(rows, dtype=np.float64).T
        self._tokens, _, self._uniform, self._loras, self._weight, self._rank, self._size, self._time = table
        self._total = float(self._weight @ self._time)

    def of(self, lane: Lane, size: int) -> tuple[float, float]:
        """Weight of the batches that would run in the key, and how much shorter that makes the step, as a share."""
        rank = self._lanes.index(lane)
        may_run = (self._tokens <= size) & (self._loras <= lane.num_active_loras)
        if lane.uniform:
            may_run &= self._uniform > 0
        moved = may_run & ((self._rank > rank) | ((self._rank == rank) & (self._size > size)))
        time = self._times.of(lane.mode, size, lane.num_active_loras)
        gain = float(self._weight[moved] @ (self._time[moved] - time))
        return float(self._weight[moved].sum()), gain / self._total


def not_worth(plan: Plan, traffic: Traffic, times: StepTimes) -> Iterator[NotWorth]:
    """Sizes of the plan's lanes at which a graph brings nothing: no batch would run in it, none that comes there is as
    large, or eager steps take no longer. LoRA cases that were not planned for are left out.
    """
    routes, lanes = Routes(plan.keys), lanes_of(plan.mode, plan.lora_cases)
    runs = [(batch, routes.of(batch)) for batch, _ in traffic.histogram]
    ranks = [(batch, len(lanes) if route is None else lanes.index(route[0])) for batch, route in runs]
    planned = times.told_apart(plan.lora_cases)
    for rank, lane in enumerate(lanes):
        if lane.num_active_loras not in planned:
            continue
        largest, stride, case = largest_of(lane, plan), stride_of(lane, plan), lane.num_active_loras
        graph, eager = (times.curve(m, largest, case) for m in (lane.mode, CUDAGraphMode.NONE))
        worth = np.flatnonzero(graph < eager)
        end = int(worth[-1]) // stride * stride if worth.size else 0
        # Batches that graphs of an earlier lane run do not come here.
        wanted = max((batch.num_tokens for batch, at in ranks if at >= rank and may_serve(lane, batch)), default=0)
        wanted = min(-(-wanted // stride) * stride, largest)
        if wanted < end:
            reason = f"no batch of this lane is as large: {wanted} does as well" if wanted else NO_BATCH
            yield NotWorth(**lane._asdict(), first=wanted + 1, last=end, reason=reason)
        if end < largest:
            yield NotWorth(**lane._asdict(), first=end + 1, last=largest, reason="an eager step takes no longer")
