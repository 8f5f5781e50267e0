"""From traffic, step times and costs to a plan, with the evidence for it: figures, limits that
bind, a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np

from cgplan.config import Config
from cgplan.errors import BudgetError, PlanError
from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.evidence import (
    NO_BATCH,
    Evidence,
    Expected,
    LadderPoint,
    LaneSizes,
    Limit,
    LoadPoint,
    NextGraph,
    NotWorth,
    ParetoPoint,
    SizeUse,
)
from cgplan.optimizer.lanes import Run, lanes_of, largest_of, stride_of
from cgplan.optimizer.lint import lint
from cgplan.optimizer.problem import Problem, problem_of
from cgplan.optimizer.search import MOST, Best, Limits, Search, best_plan
from cgplan.planning.build import LADDERS, build_plan
from cgplan.planning.costs import GraphCosts, Record
from cgplan.planning.plan import (
    PLANNED_FOR,
    Lane,
    LeftOut,
    Plan,
    capture_config,
    capture_order,
    config_hash,
)
from cgplan.traffic.histogram import Traffic
from cgplan.traffic.step_times import StepTimes
from cgplan.units import counted, format_bytes, format_microseconds, grouped

FIRST, LAST = 64, 128  # graphs that curves go up to
CLOSE = 0.05  # share of the time that graphs can save at all that a plan without a budget may leave
# Shares of the time of those steps that graphs make faster, see Problem.changeable:
WORTH = 1e-4  # a gain below which graphs are not worth a word
ALIKE = 1e-3  # a difference between steps that count as equally long
NO_GAIN = 0.01  # a distance from the bound below which other sizes bring no gain in step time
EXACT = 1e-6  # a gap that counts as none
Insured = Sequence[tuple[Traffic, float]]  # with their shares of the steps that are planned for
ROUNDS = 12  # of weighing loads for the worst regret
NO_GRAPH_GAIN = "no gain"
FAILED = "it could not be captured"
CASE = "its LoRA case was not planned for, see the notes"
RULE = (
    "without a budget the plan has the fewest graphs that are as good as the ladder and bring "
    "95% of what graphs can"
)
UNPROVEN = "the search did not find it, and the plan is not proven to be the best"


class Proposal(Record):
    """A plan and why it is as it is; ``plan.evidence`` holds the same in JSON."""

    plan: Plan
    evidence: Evidence


def choose(
    config: Config,
    traffic: Traffic | Sequence[tuple[Traffic, float]],
    times: StepTimes,
    costs: GraphCosts | None = None,
    failed: Mapping[Key, str] = MappingProxyType({}),
    *,
    insurance: float = 0.0,
    beside: Sequence[tuple[Traffic, float]] = (),
    worst: bool = False,
    one_list: bool = False,
    apart: bool = False,
) -> Case:
    """The plan with the shortest expected step for this traffic inside ``config.budget``.

    With a budget it is the best plan that the budget pays for, less graphs that together bring
    under 0.01%. Without one it has the fewest graphs that bring 95% of what a graph for every size
    would, and are as good as the configured sizes or ladder and as vLLM's: at most 0.1% longer for
    each traffic, and at most 1% for what is insured: other traffic, batches that none shows.

    LoRA cases with the same step times are planned as one, the largest of them. A key counts as one
    graph, whatever its segments. Without ``costs``, only ``budget.max_graphs`` bounds the plan. The
    plan does without keys in ``failed``, each with its reason.

    Args:
        traffic: Several traffics share the steps by their weights.
        insurance: This share of the steps, below 1, is that of ``Traffic.unseen`` while sizes are
            chosen. Figures of the evidence are of the traffic alone, but for the lower bound.
        beside: Other traffic, and its share of the steps while sizes are chosen.
        worst: Minimise the largest regret over the traffics, that is step over best step of as many
            graphs, not the mean step.
        one_list: All lanes have the same sizes, as far as they may hold them.
        apart: As in Traffic.

    Raises:
        ModeError, PlanError: as ``build_plan`` does; or batches have several sizes, see
            ``propose_boxes``.
        StepTimeError: times of a mode are missing.
        BudgetError: the budget does not pay for a single graph.
    """
    sizes, budget = config.compilation.cudagraph_capture_sizes, config.budget
    if config.dims:
        raise PlanError(
            f"steps of requests do not tell {', '.join(config.dims)}, and graphs have these sizes",
            remedy="Use `cgplan plan --traffic FILE`, whose columns are the names of `dims`, and "
            "capture its plan.",
        )
    base = build_plan(_with_sizes(config, (config.query_len,)))  # all but the keys
    base = base.model_copy(
        update={
            "config_hash": config_hash(config),
            "config": capture_config(config),
            "warnings": (),
        }
    )
    loads = [(traffic, 1.0)] if isinstance(traffic, Traffic) else list(traffic)
    loads = [(load.model_copy(update={"apart": apart}), weight) for load, weight in loads]
    lanes = lanes_of(base.mode, base.lora_cases if one_list else times.told_apart(base.lora_cases))
    ladders = dict(_ladders(config))
    asked = "configured" if isinstance(sizes, tuple) else sizes or "vllm"

    limited = costs if (budget.memory, budget.capture_time) != (None, None) else None

    insured = [(other.model_copy(update={"apart": apart}), share) for other, share in beside]
    if insurance:
        insured.append((Traffic.mixed(loads).unseen(base), insurance))

    def curve_of(loads: Sequence[tuple[Traffic, float]], insured: Insured = insured) -> Curve:
        seen = Traffic.mixed(loads)
        planned = seen
        if insured:
            rest = 1 - sum(share for _, share in insured)
            planned = Traffic.mixed([(seen, rest), *insured])
        of = partial(problem_of, lanes, times=times, plan=base, without=failed, one_list=one_list)
        problem, alone = of(planned, costs=limited), of(seen, costs=None)
        return Curve(
            problem,
            alone,
            seen,
            times,
            base,
            costs,
            budget.max_graphs or 0,
        )

    memory, seconds = (budget.memory, budget.capture_time) if costs is not None else (None, None)
    limits = Limits(
        min(budget.max_graphs or MOST, MOST),
        memory,
        seconds,
    )
    bounded = any(limit is not None for limit in (budget.max_graphs, memory, seconds))
    curve = curve_of(loads)
    goals = [ladders[name] for name in (asked, "vllm") if name in ladders] or [*ladders.values()]
    is_good = _as_good_as(
        () if bounded else goals,
        curve,
        [load for load, _ in loads],
        insured,
    )
    if bounded:
        _check_one_graph(limits, curve)
    else:
        counts = range(curve.most_of_it(), curve.graphs + 1)
        enough = (graphs for graphs in counts if is_good(curve.keys_of(curve.found.chosen(graphs))))
        limits = Limits(next(enough, None) or curve.last())
    slack = WORTH * curve.problem.changeable * bounded
    if (memory, seconds) == (None, None) and limits.graphs <= curve.graphs:
        best = curve.found.best(limits.graphs, slack)
    else:
        best = best_plan(curve.problem, limits, slack=slack)
    alone: list[float] = []
    if len(loads) > 1 and worst:
        best, alone = _least_regret(
            curve,
            best,
            limits,
            loads,
            curve_of,
        )
    driver, spent = curve.problem.least(MOST + 1)[:, -1]
    has_room = bounded and (budget.max_graphs or MOST + 1) > MOST and math.isfinite(driver)
    falls = False
    if costs is not None and memory is not None:
        for lane in lanes:
            stride = stride_of(lane, base)
            every = range(stride, largest_of(lane, base) + 1, stride)
            falls = falls or costs.falls(lane.mode, every)
    # The budget has room for more than are planned; or neighbours of sizes that failed, or larger
    # sizes with smaller pools, which are not tried, may do.
    if (has_room and limits.pays_for(MOST, driver, spent)) or failed or falls:
        best = replace(
            best, bound=min(best.bound, curve.problem.infinite_us * curve.problem.weight)
        )
    keys = curve.keys_of(best.chosen)
    run = Run(keys, curve.seen, times)
    if not insured and not one_list:
        used = {(use.lane, use.size) for use in run.uses}
        keys = tuple(key for key in keys if (Lane.of(*key), key[1].num_tokens) in used)
    plan = base.model_copy(
        update={
            "capture_sizes": tuple(sorted({descriptor.num_tokens for _, descriptor in keys})),
            "sizes_source": f"{PLANNED_FOR} {curve.seen.source}",
            "keys": keys,
            "predicted": costs and costs.of(keys),
        }
    )
    return Case(
        plan,
        curve,
        bounded,
        best,
        run,
        failed,
        ladders,
        asked,
        insurance,
        insured,
        worst,
        one_list,
        [load for load, _ in loads],
        alone,
        falls,
    )


def propose(*given: Any, **options: Any) -> Proposal:
    """What ``choose`` chooses, with the evidence for it."""
    return choose(*given, **options).proposal()


def _as_good_as(
    ladders: Sequence[Plan], curve: Curve, loads: Sequence[Traffic], insured: Insured
) -> Callable[[Iterable[Key]], bool]:
    """Whether keys are as good as all ladders."""
    parts = [(load, ALIKE) for load in loads]
    parts += [(other, NO_GAIN) for other, _ in insured]
    goals = []
    for part, share in parts if ladders else ():
        lanes = [lane for one in curve.problem.lanes for lane in one.lanes]
        changeable = (
            problem_of(
                lanes,
                part,
                curve.times,
                curve.plan,
                None,
            ).changeable
            / part.total
        )
        least = min(Run(ladder.keys, part, curve.times).expected_us for ladder in ladders)
        goals.append((part, least + share * changeable))
    return lambda keys: all(
        Run(keys, part, curve.times).expected_us <= goal for part, goal in goals
    )


def _least_regret(
    curve: Curve,
    best: Best,
    limits: Limits,
    loads: Sequence[tuple[Traffic, float]],
    curve_of: Callable[..., Curve],
) -> tuple[Best, list[float]]:
    """The plan with the least largest regret, of those that are best for some weights of the loads;
    and the best step of each load. Candidates do not depend on weights.
    """
    alone = []
    for load, _ in loads:
        own = curve_of([(load, 1.0)], ())
        keys = own.keys_of(best_plan(own.problem, limits).chosen)
        alone.append(Run(keys, load, curve.times).expected_us)
    weights = np.array([1 / least for least in alone])
    chosen, found, least = best.chosen, best.chosen, math.inf
    for step in range(ROUNDS):
        keys = curve.keys_of(chosen)
        regrets = (
            np.array([Run(keys, load, curve.times).expected_us for load, _ in loads]) / alone - 1
        )
        if regrets.max() < least:
            found, least = chosen, float(regrets.max())
        apart = regrets - regrets.mean()
        weights *= np.exp(4 / (1 + step) * apart / max(float(np.abs(apart).max()), EXACT))
        weighed = [(load, float(weight)) for (load, _), weight in zip(loads, weights, strict=True)]
        chosen = best_plan(curve_of(weighed).problem, limits).chosen
    return Best(
        found,
        curve.problem.total_of(found),
        best.bound,
    ), alone


def _with_sizes(config: Config, sizes: str | tuple[int, ...], most: int | None = None) -> Config:
    changed = {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": most}
    return config.model_copy(update={"compilation": config.compilation.model_copy(update=changed)})


def _ladders(config: Config) -> Iterator[tuple[str, Plan]]:
    if listed := isinstance(config.compilation.cudagraph_capture_sizes, tuple):
        with suppress(PlanError):
            yield "configured", build_plan(config)
    most = None if listed else config.compilation.max_cudagraph_capture_size
    for name in LADDERS:
        with suppress(PlanError):
            yield name, build_plan(_with_sizes(config, name, most))


def _check_one_graph(limits: Limits, curve: Curve) -> None:
    problem = curve.problem
    singles = [
        tuple((index,) if other is lane else () for other in problem.lanes)
        for lane in problem.lanes
        for index in range(1, lane.sizes.size)
    ]
    paid = [problem.costs_of(single) for single in singles]
    if not paid or any(limits.pays_for(0, *cost[1:]) for cost in paid):
        return
    (_, memory, seconds), single = min(
        zip(paid, singles, strict=True), key=lambda pair: pair[0][1:]
    )
    cheapest = " and ".join(f"{mode} {descriptor}" for mode, descriptor in curve.keys_of(single))
    wrong, enough = [], []
    if limits.memory is not None and memory > limits.memory:
        wrong.append(f"budget.memory is {format_bytes(int(limits.memory))}")
        enough.append(f"budget.memory to {math.ceil(memory / 2**20)}MiB")
    if limits.seconds is not None and seconds > limits.seconds:
        wrong.append(f"budget.capture_time is {limits.seconds:.3g} s")
        enough.append(f"budget.capture_time to {seconds * 1.01:.3g}s")
    assert curve.costs is not None, "without costs a graph costs nothing"
    raise BudgetError(
        f"{' and '.join(wrong)}, but the cheapest graph that a batch gains by, "
        f"{cheapest}, takes {format_bytes(int(memory))} (pool, static buffers, workspaces and "
        f"driver) and {seconds:.3g} s; by costs {curve.costs.source}, between and beyond whose "
        "sizes they are interpolated",
        remedy=f"Raise {' and '.join(enough)} at least, or set compilation.cudagraph_mode: NONE. "
        "`cgplan capture` with "
        "that size alone in compilation.cudagraph_capture_sizes shows what it really takes.",
    )


@dataclass(frozen=True)
class Curve:
    """The best plans by their number of graphs, if nothing else is limited.

    Attributes:
        problem: Of what is planned for, what is insured included.
        alone, seen: The problem of the traffic alone, and the traffic.
        plan: Has the bounds of a batch.
        most: Graphs that the budget allows; 0: any number.
    """

    problem: Problem
    alone: Problem
    seen: Traffic
    times: StepTimes
    plan: Plan
    costs: GraphCosts | None
    most: int

    @cached_property
    def found(self) -> Search:
        """Of 64 graphs; of 128 where the budget allows more, or 64 are not enough."""
        found, problem = Search(self.problem, Limits(FIRST)), self.problem
        near = problem.infinite_us * problem.weight + NO_GAIN * problem.changeable
        if found.value[-1] > near or self.most > FIRST:
            found = Search(problem, Limits(LAST))
        return found

    @cached_property
    def steps(self) -> list[float]:
        """Mean microseconds of a step of the traffic alone, by the number of graphs."""
        chosen = [*map(self.found.chosen, range(self.graphs + 1))]
        steps = {
            one: Run(self.keys_of(one), self.seen, self.times).expected_us for one in {*chosen}
        }
        return [steps[one] for one in chosen]

    @property
    def graphs(self) -> int:
        return self.found.value.size - 1

    def expected_us(self, graphs: int) -> float:
        return float(self.found.value[graphs]) / self.problem.weight

    def fewest(self, expected_us: float) -> int | None:
        """The fewest graphs with which steps are no longer than that."""
        goal = expected_us * self.problem.weight * (1 + 1e-9)
        enough = np.flatnonzero(self.found.value <= goal)
        return int(enough[0]) if enough.size else None

    def most_of_it(self) -> int:
        """The fewest graphs that bring 95% of what a graph for every size would; beyond a curve
        that is too short.
        """
        eager, bound = self.problem.eager_total, self.problem.infinite_us * self.problem.weight
        return int(np.append(self.found.value <= bound + CLOSE * (eager - bound), True).argmax())

    def last(self) -> int:
        """The number of graphs from which more bring less than 0.01%."""
        slack = WORTH * self.problem.changeable / self.problem.weight
        return self.fewest(self.expected_us(self.graphs) + slack) or 0

    def keys_of(self, chosen: Iterable[Iterable[int]]) -> tuple[Key, ...]:
        return self.problem.keys_of(chosen, self.plan)

    def price(self, keys: tuple[Key, ...]) -> dict[str, Any]:
        """``bytes`` and ``seconds`` of keys, in capture order; None where costs are not known."""
        cost = None if self.costs is None else self.costs.of(keys)
        return {"bytes": cost and cost.total_bytes, "seconds": cost and cost.seconds}

    def point(self, graphs: int | None) -> ParetoPoint | None:
        if graphs is None:
            return None
        keys = self.keys_of(self.found.chosen(graphs))
        return ParetoPoint(
            graphs=graphs,
            expected_us=self.steps[graphs],
            **self.price(keys),
        )


@dataclass(frozen=True)
class Case:
    """A plan, and all that it was made from.

    Attributes:
        bounded: Whether the budget limits the search.
        run: Traffic run through the plan.
        failed: Keys that the plan does without, and why they could not be captured.
        ladders: Plans of the ladders that fit the configuration, by name; ``configured`` for the
            sizes that it lists.
        asked: Which of them the configuration asks for; absent from ``ladders`` if no size of it is
            left.
        loads, best_alone: The traffics, and the best step of each, where that was sought.
    """

    plan: Plan
    curve: Curve
    bounded: bool
    best: Best
    run: Run
    failed: Mapping[Key, str]
    ladders: Mapping[str, Plan]
    asked: str
    insurance: float
    insured: Insured
    worst: bool
    one_list: bool
    loads: Sequence[Traffic]
    best_alone: Sequence[float]
    falls: bool

    def proposal(self) -> Proposal:
        evidence = self.evidence()
        noted = {"evidence": evidence.model_dump(mode="json")}
        return Proposal(plan=self.plan.model_copy(update=noted), evidence=evidence)

    def evidence(self) -> Evidence:
        plan, curve, run, costs = self.plan, self.curve, self.run, self.curve.costs
        problem, alone = curve.problem, curve.alone
        lower = min(self.best.bound, self.best.least)
        saved = max(problem.eager_total - problem.infinite_us * problem.weight, EXACT)
        ladders = tuple(self._ladder(name, ladder) for name, ladder in self.ladders.items())
        return Evidence(
            traffic_source=run.traffic.source,
            traffic_weight=run.traffic.total,
            traffic_notes=run.traffic.notes,
            times_source=run.times.source,
            times_notes=run.times.notes_for(plan.mode),
            costs_source=None if costs is None else costs.source,
            costs_estimated=None if costs is None else costs.estimated,
            rule=self._rule(),
            graphs=len(plan.keys),
            **curve.price(plan.keys),
            expected_us=Expected(
                plan=run.expected_us,
                eager=alone.eager_total / alone.weight,
                bound=alone.infinite_us,
                **run.by_kind,
            ),
            lower_bound_us=min(
                lower / problem.weight, math.inf if self.insured else run.expected_us
            ),
            gap=(problem.total_of(self.best.chosen) - lower) / saved,
            exact=self._exact,
            binding=self._binding(),
            next_graph=self._next_graph(),
            lanes=tuple(
                LaneSizes(**lane._asdict(), sizes=sizes) for lane, sizes in plan.lanes().items()
            ),
            uses=tuple(
                SizeUse(
                    **u.lane._asdict(),
                    size=u.size,
                    share=u.weight / run.traffic.total,
                    padding=u.padding,
                )
                for u in run.uses
            ),
            pareto=tuple(filter(None, map(curve.point, range(1, curve.last() + 1)))),
            ladders=ladders,
            not_worth=tuple(self._not_worth()),
            notes=tuple(self._notes()),
            warnings=(
                *run.traffic.warnings,
                *filter(None, [self._unbounded_warning]),
                *lint(plan, run),
            ),
            verdict=self._verdict(ladders),
            costs_notes=() if costs is None else costs.notes,
            unbounded=self._unbounded,
            padding=run.padding,
            left_out=_by_lane(self._left_out()),
            failed=_by_lane(self.failed.items()),
            insurance=self.insurance,
            other_loads=sum(share for _, share in self.insured) - self.insurance,
            one_list=self.one_list,
            apart=run.traffic.apart,
            loads=tuple(self._loads()),
        )

    def _loads(self) -> Iterator[LoadPoint]:
        ladder = self.ladders.get(self.asked)
        others = [other for other, _ in self.insured]
        if self.insurance:
            others.pop()  # batches that none shows
        loads = [*self.loads, *others]
        if len(loads) == 1:
            return
        missing: list[float | None] = [None] * len(loads)
        best = [*self.best_alone, *missing][: len(loads)]
        for load, alone in zip(loads, best, strict=True):
            theirs = None if ladder is None else Run(ladder.keys, load, self.run.times).expected_us
            mine = Run(self.plan.keys, load, self.run.times).expected_us
            yield LoadPoint(
                source=load.source,
                expected_us=mine,
                ladder_us=theirs,
                best_us=alone,
            )

    @property
    def _exact(self) -> bool:
        is_mean = not (self.worst and len(self.loads) > 1)  # which the bound is of
        return (
            is_mean and self.best.least <= self.best.bound + EXACT * self.curve.problem.changeable
        )

    @property
    def _changeable_us(self) -> float:
        """Of the mean step of the traffic: what the steps take that graphs make faster."""
        return self.curve.alone.changeable / self.curve.alone.weight

    @property
    def _unchanged_us(self) -> float:
        """Of the mean step: what the other steps take, with any graphs."""
        return self.curve.alone.infinite_us - self._changeable_us

    @property
    def _unbounded(self) -> tuple[Limit, ...]:
        limits: tuple[Limit, ...] = ("memory", "capture_time")
        return tuple(
            name for name in limits if name in self.plan.budget and self.curve.costs is None
        )

    @property
    def _unbounded_warning(self) -> str:
        names = " and ".join(f"budget.{name}" for name in self._unbounded)
        return names and (
            f"{names} did not bound this plan: what graphs cost is not known. Give --costs FILE "
            "(a capture report), "
            "--costs estimate or --costs measure; without it they bound the capture alone, which "
            "drops what does "
            "not fit"
        )

    @property
    def _planned_cases(self) -> tuple[int, ...]:
        cases = self.plan.lora_cases
        return cases if self.one_list else self.run.times.told_apart(cases)

    def _ladder(self, name: str, plan: Plan) -> LadderPoint:
        run, curve = (
            Run(
                plan.keys,
                self.run.traffic,
                self.run.times,
            ),
            self.curve,
        )
        alike = run.expected_us + ALIKE * self._changeable_us
        return LadderPoint(
            name=name,
            graphs=len(plan.keys),
            expected_us=run.expected_us,
            **curve.price(plan.keys),
            padding=run.padding,
            unused=len(plan.keys) - sum(use.size is not None for use in run.uses),
            equal=curve.point(self._fewest(run.expected_us)),
            alike=curve.point(self._fewest(alike)),
            no_gain=run.expected_us <= curve.alone.infinite_us + NO_GAIN * self._changeable_us,
            **run.by_kind,
        )

    def _fewest(self, expected_us: float) -> int | None:
        """The same of the traffic alone."""
        if not self.insured:
            return self.curve.fewest(expected_us)
        return next(
            (n for n, step in enumerate(self.curve.steps) if step <= expected_us * (1 + 1e-9)), None
        )

    def _left_out(self) -> Iterator[tuple[Key, str]]:
        """Keys of the configured list or ladder that the plan does not have, and why; each is added
        to the plan by itself.
        """
        asked, cases = self.ladders.get(self.asked), self._planned_cases
        for key in asked.keys if asked else ():
            if key in self.plan.keys:
                continue
            weight, gain = self.run.gain_of(Lane.of(*key), key[1].num_tokens)
            if key[1].num_active_loras not in cases:
                yield key, CASE
            elif key in self.failed:
                yield key, FAILED
            elif weight == 0:
                yield key, NO_BATCH
            elif gain < WORTH * self._changeable_us:
                yield key, NO_GRAPH_GAIN
            elif broken := self._broken([*self.plan.keys, key]):
                yield key, ", ".join(f"budget.{limit}" for limit in broken)
            else:
                yield key, RULE if not self.bounded else NO_GRAPH_GAIN if self._exact else UNPROVEN

    def _broken(self, keys: Sequence[Key]) -> tuple[Limit, ...]:
        cost, budget = self.curve.price(capture_order(keys)), self.plan.budget
        spent: dict[Limit, Any]
        spent = {"max_graphs": len(keys), "memory": cost["bytes"], "capture_time": cost["seconds"]}
        return tuple(
            name
            for name, used in spent.items()
            if used is not None and used > budget.get(name, np.inf)
        )

    def _rule(self) -> str:
        return self._limits() + ", with the least regret of the worst load" * (
            self.worst and len(self.loads) > 1
        )

    def _limits(self) -> str:
        if not self.bounded:
            why = "the budget binds nothing without costs" if self._unbounded else "no budget"
            asked = (
                "the configured sizes" if self.asked == "configured" else f"the {self.asked} ladder"
            )
            ladder = asked + " and the vllm ladder" * (self.asked != "vllm")
            unseen = (
                f", and {NO_GAIN:.0%} for batches that the traffic does not show"
                if self.insured
                else ""
            )
            as_good = f"as good as {ladder} within {ALIKE:.1%}{unseen}"
            return (
                f"{why}: the fewest graphs that are {as_good}, and bring {1 - CLOSE:.0%} of "
                "what graphs can"
            )
        write: dict[str, Callable[[Any], str]]
        write = {"max_graphs": str, "memory": format_bytes, "capture_time": "{:.4g} s".format}
        known = [name for name in write if name in self.plan.budget and name not in self._unbounded]
        given = ", ".join(f"{name} {write[name](self.plan.budget[name])}" for name in known)
        return (
            f"the best within the budget ({given}), less graphs that together bring under "
            f"{WORTH:.2%}"
        )

    def _binding(self) -> tuple[Limit, ...]:
        """Limits that the next better plan of the curve breaks, or, beyond its end, a graph for
        every size.
        """
        problem = self.curve.problem
        better = (problem.total_of(self.best.chosen) - WORTH * problem.changeable) / problem.weight
        if not self.bounded or better < problem.infinite_us:
            return ()
        graphs = self.curve.fewest(better)
        every = [range(1, lane.sizes.size) for lane in problem.lanes]
        return self._broken(
            self.curve.keys_of(every if graphs is None else self.curve.found.chosen(graphs))
        )

    def _next_graph(self) -> NextGraph | None:
        graphs, problem = len(self.plan.keys) + 1, self.curve.problem
        if graphs > self.curve.graphs:
            return None
        gain = max(
            problem.total_of(self.best.chosen) / problem.weight - self.curve.expected_us(graphs),
            0.0,
        )
        return NextGraph(
            microseconds=gain, percent=100 * gain * problem.weight / max(problem.changeable, EXACT)
        )

    def _not_worth(self) -> Iterator[NotWorth]:
        """Sizes of the planned lanes at which a graph brings nothing."""
        for lane in lanes_of(self.plan.mode, self._planned_cases):
            largest, stride = largest_of(lane, self.plan), stride_of(lane, self.plan)
            modes, sizes = (lane.mode, CUDAGraphMode.NONE), np.arange(largest + 1)
            graph, eager = (
                self.run.times.at(
                    mode,
                    sizes,
                    lane.num_active_loras,
                )
                for mode in modes
            )
            end = int(np.flatnonzero(graph < eager).max(initial=0)) // stride * stride
            wanted = min(-(-self.run.largest_batch(lane) // stride) * stride, largest)
            if wanted < end:
                reason = (
                    f"no batch of this lane is as large: {wanted} does as well"
                    if wanted
                    else NO_BATCH
                )
                yield NotWorth(
                    **lane._asdict(),
                    first=wanted + 1,
                    last=end,
                    reason=reason,
                )
            if end < largest:
                yield NotWorth(
                    **lane._asdict(),
                    first=end + 1,
                    last=largest,
                    reason="an eager step takes no longer",
                )

    def _notes(self) -> Iterator[str]:
        plan, times = self.plan, self.run.times
        if merged := [str(case) for case in plan.lora_cases if case not in self._planned_cases]:
            yield (
                f"LoRA cases {', '.join(merged)} were not planned for: their step times are not "
                "told apart from those "
                "of larger cases; measure them, with num_active_loras, to have them weighed"
            )
        if max(plan.lora_cases) > 0 and not any(curve.num_active_loras for curve in times.curves):
            yield (
                f"steps with adapters were not measured: taken as {times.lora_overhead:.0%} longer"
            )
        if plan.budget.get("max_graphs", 0) > MOST:
            yield f"no more than {MOST} graphs were planned for"
        if self.falls:
            yield "costs have smaller pools for larger sizes, so no plan is proven to be the best"
        if plan.mode is CUDAGraphMode.NONE:
            yield "the resolved cudagraph_mode is NONE: nothing is captured"

    def _verdict(self, ladders: Sequence[LadderPoint]) -> str:
        expected, graphs = self.run.expected_us, counted(len(self.plan.keys), "graph")
        ladder = next((ladder for ladder in ladders if ladder.name == self.asked), None)
        if self.plan.mode is CUDAGraphMode.NONE:
            return "nothing is captured: the resolved cudagraph_mode is NONE"
        if not self.plan.keys:
            return (
                "no graph saves time within the budget"
                if self.bounded
                else "no graph saves time: eager steps take no longer"
            )
        if ladder is None:
            return f"{format_microseconds(expected)} a step with {graphs}"
        whose = (
            "the configured sizes'"
            if ladder.name == "configured"
            else f"the {ladder.name} ladder's"
        )
        theirs = f"with {whose} {counted(ladder.graphs, 'graph')}"
        change = (expected - ladder.expected_us) / max(
            ladder.expected_us - self._unchanged_us, EXACT
        )
        if change > NO_GAIN:
            return (
                f"steps that graphs run are {change:.1%} longer than {theirs}, with {graphs}: "
                "see what binds"
            )
        if ladder.no_gain:
            away = (ladder.expected_us - self.curve.alone.infinite_us) / max(
                self._changeable_us, EXACT
            )
            verb = "is" if len(self.plan.keys) == 1 else "are"
            return (
                f"no gain in step time: {theirs} it is {away:.2%} above the bound; {graphs} "
                f"{verb} as good"
            )
        if change < -NO_GAIN:
            return f"steps that graphs run are {-change:.1%} shorter than {theirs}, with {graphs}"
        return f"steps within 1% of those {theirs}, with {graphs}"


def _by_lane(reasons: Iterable[tuple[Key, str]]) -> tuple[LeftOut, ...]:
    found = grouped(((Lane.of(*key), reason), key[1].num_tokens) for key, reason in reasons)
    ordered = sorted(found.items(), key=lambda item: (item[0][0].mode.name, *item[0][0][1:]))
    return tuple(
        LeftOut(
            **lane._asdict(),
            sizes=tuple(sorted(sizes)),
            reason=why,
        )
        for (lane, why), sizes in ordered
    )
