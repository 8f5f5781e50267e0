"""The account of a plan: the evidence for it, written from what the search found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cgplan.config import Config
from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.curve import CLOSE, MOST, NO_GAIN, WORTH, Curve, ladder_points, not_worth, price
from cgplan.optimizer.evidence import Evidence, Expected, LadderPoint, LaneSizes, LeftOut, Limit, NextGraph, SizeUse
from cgplan.optimizer.lanes import Served, expected_step, padded_share
from cgplan.optimizer.left_out import by_lane, left_out
from cgplan.optimizer.lint import lint, milliseconds
from cgplan.optimizer.search import Best, Limits
from cgplan.planning.costs import GraphCosts
from cgplan.planning.plan import Plan
from cgplan.traffic.histogram import Traffic
from cgplan.traffic.step_times import StepTimes
from cgplan.units import format_bytes

EXACT = 1e-6  # relative gap that is called none


@dataclass(frozen=True)
class Case:
    """What a plan was made from and for. ``limits`` None: without a budget; ``served``: traffic through the plan;
    ``failed``: keys that it had to do without, and why.
    """

    config: Config
    traffic: Traffic
    times: StepTimes
    costs: GraphCosts | None
    plan: Plan
    curve: Curve
    limits: Limits | None
    best: Best
    served: Sequence[Served]
    failed: Mapping[Key, str]

    def evidence(self) -> Evidence:
        """Everything that a report shows of the plan."""
        problem, plan = self.curve.problem, self.plan
        bytes_, seconds = price(self.costs, plan.keys)
        expected = expected_step(self.served)
        lower = min(self.best.bound / problem.weight, expected)
        ladders = tuple(ladder_points(self.config, self.traffic, self.times, self.curve))
        return Evidence(
            traffic_source=self.traffic.source,
            traffic_weight=self.traffic.total,
            traffic_notes=self.traffic.notes,
            times_source=self.times.source,
            times_notes=self.times.notes_for(plan.mode),
            costs_source=None if self.costs is None else self.costs.source,
            costs_estimated=None if self.costs is None else self.costs.estimated,
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
            lanes=tuple(LaneSizes.of(lane, sizes) for lane, sizes in plan.lanes().items()),
            uses=tuple(SizeUse.of(part, problem.weight) for part in self.served),
            pareto=self.curve.points(),
            ladders=ladders,
            not_worth=tuple(not_worth(plan, self.traffic, self.times)),
            notes=tuple(self._notes()),
            warnings=(*self._unbounded_warning(), *lint(self.config, plan, self.traffic, self.times)),
            verdict=self._verdict(expected, ladders),
            costs_notes=() if self.costs is None else self.costs.notes,
            unbounded=self._unbounded,
            padding=padded_share(self.served),
            left_out=tuple(self._left_out()),
            failed=tuple(by_lane(self.failed)),
        )

    @property
    def _exact(self) -> bool:
        return self.best.least <= self.best.bound * (1 + EXACT)

    @property
    def _unbounded(self) -> tuple[Limit, ...]:
        budget = self.config.budget
        limits: dict[Limit, float | None] = {"memory": budget.memory, "capture_time": budget.capture_time}
        return tuple(name for name, limit in limits.items() if limit is not None and self.costs is None)

    def _unbounded_warning(self) -> Iterator[str]:
        if self._unbounded:
            names = " and ".join(f"budget.{name}" for name in self._unbounded)
            yield (
                f"{names} did not bound this plan: what graphs cost is not known. Give --costs FILE (a capture "
                "report), --costs estimate or --costs measure; without it they bound the capture alone, which drops "
                "what does not fit"
            )

    def _left_out(self) -> Iterator[LeftOut]:
        asked = (self.config, self.plan, self.traffic, self.times, self.costs)
        return left_out(*asked, failed=self.failed, budgeted=self.limits is not None, exact=self._exact, worth=WORTH)

    def _rule(self) -> str:
        budget, known = self.config.budget, self.costs is not None
        if self.limits is None:
            why = "the budget binds nothing without costs" if self._unbounded else "no budget"
            return f"{why}: the fewest graphs that bring {1 - CLOSE:.0%} of what a graph for every size would bring"
        limits = [] if budget.max_graphs is None else [f"max_graphs {budget.max_graphs}"]
        if known and budget.memory is not None:
            limits.append(f"memory {format_bytes(budget.memory)}")
        if known and budget.capture_time is not None:
            limits.append(f"capture_time {budget.capture_time:.4g} s")
        given = ", ".join(limits)
        return f"the best within the budget ({given}), less graphs that together bring under {WORTH:.2%}"

    def _binding(self, expected: float) -> tuple[Limit, ...]:
        """What the next better plan of the curve breaks, or, beyond its end, a graph for every size."""
        better, budget = expected * (1 - WORTH), self.config.budget
        if self.limits is None or better < self.curve.problem.infinite_us:
            return ()
        point = self.curve.fewest(better)
        keys = self.curve.all_keys() if point is None else self.curve.keys(point)
        bytes_, seconds = price(self.costs, keys)
        graphs = len(keys)
        broken: dict[Limit, bool] = {
            "max_graphs": budget.max_graphs is not None and graphs > budget.max_graphs,
            "memory": budget.memory is not None and bytes_ is not None and bytes_ > budget.memory,
            "capture_time": budget.capture_time is not None and seconds is not None and seconds > budget.capture_time,
        }
        return tuple(limit for limit, is_broken in broken.items() if is_broken)

    def _next_graph(self, expected: float) -> NextGraph | None:
        graphs = len(self.plan.keys) + 1
        if graphs > self.curve.graphs:
            return None
        gain = max(expected - self.curve.expected_us(graphs), 0.0)
        return NextGraph(microseconds=gain, percent=100 * gain / expected)

    def _notes(self) -> Iterator[str]:
        budget, plan, apart = self.config.budget, self.plan, self.times.told_apart(self.plan.lora_cases)
        merged = [case for case in plan.lora_cases if case not in apart]
        if merged:
            yield (
                f"LoRA cases {', '.join(map(str, merged))} were not planned for: their step times are not told apart "
                f"from those of larger cases; measure them, with num_active_loras, to have them weighed"
            )
        if max(plan.lora_cases) > 0 and not any(curve.num_active_loras for curve in self.times.curves):
            yield f"steps with adapters were not measured: taken as {self.times.lora_overhead:.0%} longer"
        if (budget.max_graphs or 0) > MOST:
            yield f"no more than {MOST} graphs were planned for"
        if plan.mode is CUDAGraphMode.NONE:
            yield "the resolved cudagraph_mode is NONE: nothing is captured"

    def _verdict(self, expected: float, ladders: Sequence[LadderPoint]) -> str:
        graphs = _graphs(len(self.plan.keys))
        asked = self.config.compilation.cudagraph_capture_sizes
        name = "configured" if isinstance(asked, tuple) else asked or "vllm"
        ladder = next((ladder for ladder in ladders if ladder.name == name), None)
        if self.plan.mode is CUDAGraphMode.NONE:
            return "nothing is captured: the resolved cudagraph_mode is NONE"
        if not self.plan.keys:
            return "no graph brings anything: eager steps take no longer, or the budget pays for none that is of use"
        if ladder is None:
            return f"{milliseconds(expected)} a step with {graphs}"
        whose = f"the {ladder.name} ladder's" if name != "configured" else "the configured sizes'"
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
