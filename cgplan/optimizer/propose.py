"""From traffic, step times and costs to a plan, with the evidence for it: figures, limits that
bind, a verdict.
"""

from __future__ import annotations

import math
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

import numpy as np

from cgplan.config import Config
from cgplan.config.values import Record
from cgplan.errors import BudgetError, PlanError
from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.evidence import (
    ASKED_FOR,
    MOST_UNMEASURED,
    NO_BATCH,
    Evidence,
    Expected,
    LadderPoint,
    LaneSizes,
    LoadPoint,
    NextGraph,
    NotWorth,
    ParetoPoint,
    PlanLimit,
    SizeUse,
    ladder_words,
    limit_words,
    of_costs,
)
from cgplan.optimizer.lanes import (
    Run,
    Use,
    largest_of,
    stride_of,
)
from cgplan.optimizer.lint import lint
from cgplan.optimizer.problem import (
    Chosen,
    Problem,
    problem_of,
)
from cgplan.optimizer.search import (
    MOST_GRAPHS,
    Best,
    Limits,
    Search,
    best_plan,
)
from cgplan.planning.build import LADDERS, build_plan
from cgplan.planning.costs import GraphCosts
from cgplan.planning.plan import (
    PLANNED_FOR,
    Lane,
    LeftOut,
    Plan,
    budget_of,
    capture_config,
    capture_order,
    config_hash,
    lanes_of,
)
from cgplan.traffic.histogram import Traffic
from cgplan.traffic.step_times import StepTimes
from cgplan.units import (
    counted,
    format_bytes,
    format_microseconds,
    grouped,
)

WeightedTraffic = Sequence[tuple[Traffic, float]]
WRITTEN: Mapping[str, Callable[[Any], str]] = {
    "max_graphs": str,
    "memory": format_bytes,
    "capture_time": "{:.4g} s".format,
}
FIRST, LAST = 64, 128  # graphs that curves go up to
CLOSE = 0.05  # share of the time that graphs can save at all that a plan without a budget may leave
# Shares of the time of those steps that graphs make faster, see Problem.changeable:
WORTH = 1e-4  # a gain below which graphs are not worth a word
ALIKE = 1e-3  # a difference between steps that count as equally long
NO_GAIN = 0.01  # a distance from the bound below which other sizes bring no gain in step time
EXACT = 1e-6  # a gap that counts as none
ROUNDS = 12  # of weighing loads for the worst regret
NO_GRAPH_GAIN = "no gain"
MUCH_MEMORY = 0.1  # share of the ladder's, above which more is worth a word
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


def best_case(inputs: PlanInputs) -> Case:
    """The plan with the shortest expected step for this traffic inside ``config.budget``.

    With a budget it is the best plan that the budget pays for, less graphs that together bring
    under 0.01%. Without one it has the fewest graphs that bring 95% of what a graph for every size
    would, and are as good as the configured sizes or ladder and as vLLM's: at most 0.1% longer for
    each traffic, and at most 1% for what is insured: other traffic, batches that none shows.

    A key counts as one graph, whatever its segments.

    Raises:
        ModeError, PlanError: as ``build_plan`` does; or batches have several sizes, see
            ``propose_boxes``.
        StepTimeError: times of a mode are missing.
        BudgetError: the budget does not pay for a single graph.
    """
    config = inputs.config
    times = inputs.times
    if config.dims:
        raise PlanError(
            f"steps of requests do not tell {', '.join(config.dims)}, and graphs have these sizes",
            remedy="Use `cgplan plan --traffic FILE`, whose columns are the names of `dims`, and "
            "capture its plan.",
        )
    insured = inputs.insured
    curve = inputs.curve(inputs.loads, insured)
    limits = inputs.limits
    slack = WORTH * curve.problem.changeable
    if inputs.is_bounded:
        _check_one_graph(limits, curve)
    else:
        limits = Limits(_enough_graphs(inputs, curve))
    if limits.graphs < MOST_GRAPHS:  # the number of a plan, given again, is that of the same plan
        graphs = min(limits.graphs, curve.graphs)
        above = float(curve.found.value[graphs]) - curve.problem.best_total
        slack = max(slack - above, 0.0)
    if limits.has_prices or limits.graphs > curve.graphs:
        best = best_plan(curve.problem, limits, slack=slack)
    else:
        best = curve.found.best(limits.graphs, slack)
    best_alone: list[float] = []
    if inputs.worst:
        best, best_alone = _least_regret(curve, best, limits)
    if inputs.failed or inputs.has_room_for_more(curve.problem) or inputs.pools_shrink:
        # neighbours of failed sizes, more graphs, and larger sizes with smaller pools are not tried
        bound = min(best.bound, curve.problem.best_total)
        best = replace(best, bound=bound)
    keys = curve.keys_of(best.chosen)
    run = Run(keys, curve.seen, times)
    if not insured and not inputs.one_list:
        used = {(use.lane, use.size) for use in run.uses}
        keys = tuple(key for key in keys if (Lane.of(*key), key[1].num_tokens) in used)
    sizes = {descriptor.num_tokens for _, descriptor in keys}
    plan = inputs.base.changed(
        capture_sizes=tuple(sorted(sizes)),
        sizes_source=f"{PLANNED_FOR} {curve.seen.source}",
        keys=keys,
        predicted=inputs.costs and inputs.costs.of(keys),
    )
    return Case(plan, inputs, curve, best, run, best_alone)


def propose(*given: Any, **options: Any) -> Proposal:
    """What ``best_case`` chooses for a ``PlanInputs`` of these, with the evidence for it."""
    return best_case(PlanInputs(*given, **options)).proposal()


@dataclass(frozen=True)
class PlanInputs:
    """What a plan is made for.

    Attributes:
        traffic: Several traffics share the steps by their weights.
        costs: Absent: only ``budget.max_graphs`` bounds the plan.
        failed: Keys that the plan does without, each with the reason.
        insurance: This share of the steps, below 1, is that of ``Traffic.unseen`` while sizes are
            chosen. Figures of the evidence are of the traffic alone, but for the lower bound.
        beside: Other traffic, and its share of the steps while sizes are chosen.
        worst: Minimise the largest regret over the traffics, that is step over best step of as many
            graphs, not the mean step.
        one_list: All lanes have the same sizes, as far as they may hold them.
        today: The graphs asked for, maybe in another mode.
    """

    config: Config
    traffic: Traffic | WeightedTraffic
    times: StepTimes
    costs: GraphCosts | None = None
    failed: Mapping[Key, str] = field(default_factory=dict)
    insurance: float = 0.0
    beside: WeightedTraffic = ()
    worst: bool = False
    one_list: bool = False
    today: Plan | None = None

    @cached_property
    def base(self) -> Plan:
        """The plan without keys."""
        config = self.config
        plan = build_plan(with_sizes(config, (config.query_len,)))
        return plan.changed(
            config_hash=config_hash(config), config=capture_config(config), warnings=()
        )

    @cached_property
    def loads(self) -> WeightedTraffic:
        given = self.traffic
        return [(given, 1.0)] if isinstance(given, Traffic) else given

    @cached_property
    def insured(self) -> WeightedTraffic:
        """Other traffic and, last, batches that none shows."""
        insured = list(self.beside)
        if self.insurance:
            unseen = Traffic.mixed(self.loads).unseen(self.base)
            insured.append((unseen, self.insurance))
        return insured

    @property
    def limits(self) -> Limits:
        """Without costs, memory and seconds bound nothing."""
        budget = self.config.budget
        graphs = min(budget.max_graphs or MOST_GRAPHS, MOST_GRAPHS)
        if self.costs is None:
            return Limits(graphs)
        return Limits(graphs, budget.memory, budget.capture_time)

    @property
    def is_bounded(self) -> bool:
        most = self.config.budget.max_graphs
        return most is not None or self.limits.has_prices

    @property
    def lora_cases(self) -> tuple[int, ...]:
        cases = self.base.lora_cases
        if self.one_list:
            return cases
        return self.times.told_apart(cases)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return lanes_of(self.base.mode, self.lora_cases)

    @cached_property
    def ladders(self) -> dict[str, Plan]:
        """Plans of the ladders that fit the configuration, by name; ``configured`` for the sizes
        that it lists, first the graphs asked for in another mode.
        """
        config = self.config
        compilation = config.compilation
        found = {}
        if self.today and self.today.mode is not self.base.mode:
            found[ASKED_FOR] = self.today
        most = compilation.max_cudagraph_capture_size
        if self.asked == "configured":
            most = None
            with suppress(PlanError):
                found[self.asked] = build_plan(config)
        for name in LADDERS:
            with suppress(PlanError):
                found[name] = build_plan(with_sizes(config, name, most))
        return found

    @property
    def asked(self) -> str:
        """The ladder that the configuration asks for; absent from ``ladders`` if no size of it is
        left.
        """
        sizes = self.config.compilation.cudagraph_capture_sizes
        if isinstance(sizes, tuple):
            return "configured"
        return sizes or "vllm"

    def problem(
        self,
        traffic: Traffic,
        costs: GraphCosts | None,
    ) -> Problem:
        return problem_of(
            self.lanes,
            traffic,
            self.times,
            self.base,
            costs,
            without=self.failed,
            one_list=self.one_list,
        )

    def curve(
        self,
        loads: WeightedTraffic,
        insured: WeightedTraffic,
    ) -> Curve:
        seen = Traffic.mixed(loads)
        planned = seen
        if insured:
            rest = 1 - sum(share for _, share in insured)
            planned = Traffic.mixed([(seen, rest), *insured])
        costs = self.costs if self.limits.has_prices else None
        return Curve(
            self.problem(planned, costs),
            self.problem(seen, None),
            seen,
            self,
        )

    def step(
        self,
        keys: Iterable[Key],
        traffic: Traffic,
    ) -> float:
        return Run(keys, traffic, self.times).expected_us

    @property
    def pools_shrink(self) -> bool:
        """Whether memory is limited and a larger size has a smaller pool."""
        costs = self.costs
        if costs is None or self.limits.memory is None:
            return False
        for lane in self.lanes:
            stride = stride_of(lane, self.base)
            every = range(stride, largest_of(lane, self.base) + 1, stride)
            if costs.falls(lane.mode, every):
                return True
        return False

    def has_room_for_more(self, problem: Problem) -> bool:
        most = self.config.budget.max_graphs or MOST_GRAPHS + 1
        if most <= MOST_GRAPHS or not self.is_bounded:
            return False
        driver, seconds = problem.least(MOST_GRAPHS + 1)[:, -1]
        paid = self.limits.pays_for(MOST_GRAPHS, driver, seconds)
        return math.isfinite(driver) and bool(paid)


def with_sizes(
    config: Config,
    sizes: str | tuple[int, ...],
    most: int | None = None,
) -> Config:
    return config.with_values(
        "compilation",
        cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=most,
    )


def _enough_graphs(
    inputs: PlanInputs,
    curve: Curve,
) -> int:
    ladders = inputs.ladders
    goals = [ladders[name] for name in (inputs.asked, "vllm") if name in ladders]
    parts = [(load, ALIKE) for load, _ in inputs.loads]
    parts += [(other, NO_GAIN) for other, _ in inputs.insured]
    goals = goals or list(ladders.values())
    longest = []
    lanes: list[Lane] = []
    for one in curve.problem.lanes:
        lanes += one.lanes
    for part, share in parts:
        alone = problem_of(
            lanes,
            part,
            inputs.times,
            inputs.base,
            costs=None,
        )
        slack = share * alone.changeable / part.total
        steps = [inputs.step(plan.keys, part) for plan in goals]
        least = min(steps, default=math.inf)
        longest.append((part, least + slack))
    fewest = max(curve.most_of_it(), 1)
    for graphs in range(fewest, curve.graphs + 1):
        keys = curve.keys_of(curve.found.chosen(graphs))
        if all(inputs.step(keys, part) <= goal for part, goal in longest):
            return graphs
    return curve.last()


def _least_regret(
    curve: Curve,
    best: Best,
    limits: Limits,
) -> tuple[Best, list[float]]:
    """The plan with the least largest regret, of those that are best for some weights of the loads;
    and the best step of each load. Candidates do not depend on weights.
    """
    inputs = curve.inputs
    loads = [load for load, _ in inputs.loads]
    alone = []
    for load in loads:
        own = inputs.curve([(load, 1.0)], ())
        keys = own.keys_of(best_plan(own.problem, limits).chosen)
        alone.append(inputs.step(keys, load))
    weights = 1 / np.array(alone)
    chosen = best.chosen
    found = chosen
    least = math.inf
    for step in range(ROUNDS):
        keys = curve.keys_of(chosen)
        steps = [inputs.step(keys, load) for load in loads]
        regrets = np.divide(steps, alone) - 1
        if regrets.max() < least:
            found = chosen
            least = float(regrets.max())
        apart = regrets - regrets.mean()
        apart /= max(float(np.abs(apart).max()), EXACT)
        weights *= np.exp(4 / (1 + step) * apart)
        weighed = list(zip(loads, weights.tolist(), strict=True))
        own = inputs.curve(weighed, inputs.insured)
        chosen = best_plan(own.problem, limits).chosen
    total = curve.problem.total_of(found)
    return Best(found, total, best.bound), alone


def _check_one_graph(limits: Limits, curve: Curve) -> None:
    problem = curve.problem
    nothing = [()] * len(problem.lanes)
    singles = []
    for n, lane in enumerate(problem.lanes):
        for index in range(1, lane.sizes.size):
            single: list[tuple[int, ...]] = [*nothing]
            single[n] = (index,)
            _, memory, seconds = problem.costs_of(tuple(single))
            if limits.pays_for(0, memory, seconds):
                return
            singles.append((memory, seconds, tuple(single)))
    if not singles:
        return
    memory, seconds, cheapest = min(singles)
    names = [f"{mode} {descriptor}" for mode, descriptor in curve.keys_of(cheapest)]
    wrong = []
    enough = []
    if limits.memory is not None and memory > limits.memory:
        wrong.append(f"budget.memory is {format_bytes(int(limits.memory))}")
        enough.append(f"budget.memory to {math.ceil(memory / 2**20)}MiB")
    if limits.seconds is not None and seconds > limits.seconds:
        wrong.append(f"budget.capture_time is {limits.seconds:.3g} s")
        enough.append(f"budget.capture_time to {seconds * 1.01:.3g}s")
    costs = curve.inputs.costs
    assert costs is not None, "without costs a graph costs nothing"
    raise BudgetError(
        f"{' and '.join(wrong)}, but the cheapest graph that a batch gains by, "
        f"{' and '.join(names)}, takes {format_bytes(int(memory))} (pool, static buffers, "
        f"workspaces and driver) and {seconds:.3g} s; by costs {costs.source}, between and beyond "
        "whose sizes they are interpolated",
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
    """

    problem: Problem
    alone: Problem
    seen: Traffic
    inputs: PlanInputs

    @cached_property
    def found(self) -> Search:
        """Of 64 graphs; of 128 where the budget allows more, or 64 are not enough."""
        problem = self.problem
        found = Search(problem, Limits(FIRST))
        near = problem.best_total + ALIKE * problem.changeable
        most = self.inputs.config.budget.max_graphs or 0
        if found.value[-1] > near or most > FIRST:
            found = Search(problem, Limits(LAST))
        return found

    @cached_property
    def steps(self) -> list[float]:
        """Mean microseconds of a step of the traffic alone, by the number of graphs."""
        known: dict[Chosen, float] = {}
        steps = []
        for graphs in range(self.graphs + 1):
            chosen = self.found.chosen(graphs)
            if chosen not in known:
                keys = self.keys_of(chosen)
                known[chosen] = self.inputs.step(keys, self.seen)
            steps.append(known[chosen])
        return steps

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
        problem = self.problem
        enough = problem.best_total + CLOSE * problem.saved
        graphs = self.fewest(enough / problem.weight)
        return self.graphs + 1 if graphs is None else graphs

    def last(self) -> int:
        """The number of graphs from which more bring less than 0.01%."""
        problem = self.problem
        slack = WORTH * problem.changeable / problem.weight
        least = self.expected_us(self.graphs)
        return self.fewest(least + slack) or 0

    def keys_of(self, chosen: Chosen) -> tuple[Key, ...]:
        return self.problem.keys_of(chosen, self.inputs.base)

    def price(self, keys: tuple[Key, ...]) -> dict[str, Any]:
        """``bytes`` and ``seconds`` of keys, in capture order; None where costs are not known."""
        costs = self.inputs.costs
        if costs is None:
            return {"bytes": None, "seconds": None}
        cost = costs.of(keys)
        return {"bytes": cost.total_bytes, "seconds": cost.seconds}

    def point(self, graphs: int) -> ParetoPoint:
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
        run: Traffic run through the plan.
        best_alone: The best step of each load, where that was sought.
        for_slo: Whether its number of graphs is the least that holds an SLO.
    """

    plan: Plan
    inputs: PlanInputs
    curve: Curve
    best: Best
    run: Run
    best_alone: Sequence[float]
    for_slo: bool = False

    def with_plan(self, **changed: Any) -> Case:
        return replace(self, plan=self.plan.changed(**changed))

    def proposal(self, **decided: Any) -> Proposal:
        """``decided``: what the evidence says besides."""
        evidence = self._evidence(decided)
        plan = self.plan.changed(evidence=evidence.model_dump(mode="json"))
        return Proposal(plan=plan, evidence=evidence)

    def _evidence(self, decided: Mapping[str, Any]) -> Evidence:
        plan = self.plan
        curve = self.curve
        run = self.run
        inputs = self.inputs
        costs = inputs.costs
        problem = curve.problem
        alone = curve.alone
        lower = min(self.best.bound, self.best.least)
        lower_us = lower / problem.weight
        if not inputs.insured:
            lower_us = min(lower_us, run.expected_us)
        lost = problem.total_of(self.best.chosen) - lower
        ladders = [self._ladder(name, ladder) for name, ladder in inputs.ladders.items()]
        warnings = [*run.times.warnings, *run.traffic.warnings]
        doubt = ""
        if run.unmeasured > MOST_UNMEASURED:
            beyond = f"{run.unmeasured:.0%} of the steps have sizes that were not measured"
            doubt = f"extrapolated, as {beyond}: "
            size = max(plan.max_capture_size, *run.batches.num_tokens.astype(int))
            largest = f"compilation.max_cudagraph_capture_size={size}"
            warnings.append(
                f"measure first: `cgplan bench FILE --set {largest} --output bench.json`, or the "
                "engine's own benchmark; then give --step-times"
            )
        unbounded = self._unbounded
        if unbounded:
            names = [f"budget.{name}" for name in unbounded]
            warnings.append(
                f"{' and '.join(names)} did not bound this plan: what graphs cost is not known. "
                "Give --costs FILE (a capture report), --costs estimate or --costs measure; "
                "without it they bound the capture alone, which drops what does not fit"
            )
        price = curve.price(plan.keys)
        compared = ASKED_FOR, inputs.asked
        asked = next((point for point in ladders if point.name in compared), None)
        if asked is not None:
            warnings += self._memory_grows(price["bytes"], asked)
        return Evidence(
            traffic_source=run.traffic.source,
            traffic_weight=run.traffic.total,
            traffic_notes=run.traffic.notes,
            times_source=run.times.source,
            times_notes=run.times.notes_for(plan.mode),
            **of_costs(costs),
            rule=self._rule(),
            graphs=len(plan.keys),
            **price,
            expected_us=Expected(
                plan=run.expected_us,
                eager=alone.eager_total / alone.weight,
                bound=alone.infinite_us,
                **run.by_kind,
            ),
            lower_bound_us=lower_us,
            gap=lost / max(problem.saved, EXACT),
            exact=self._exact,
            binding=self._binding(),
            next_graph=self._next_graph(),
            lanes=tuple(
                LaneSizes(**lane._asdict(), sizes=sizes) for lane, sizes in plan.lanes().items()
            ),
            uses=tuple(use_of(use, run) for use in run.uses),
            pareto=tuple(map(curve.point, range(1, curve.last() + 1))),
            ladders=tuple(ladders),
            not_worth=tuple(self._not_worth()),
            notes=tuple(self._notes()),
            warnings=(*warnings, *lint(plan, run)),
            verdict=run.times.doubt + doubt + self._verdict(asked),
            unmeasured=run.unmeasured,
            unbounded=unbounded,
            padding=run.padding,
            left_out=_by_lane(self._left_out()),
            failed=_by_lane(inputs.failed.items()),
            insurance=inputs.insurance,
            other_loads=sum(share for _, share in inputs.beside),
            one_list=inputs.one_list,
            apart=run.traffic.apart,
            loads=tuple(self._loads()),
            step_times=run.times.model_dump(mode="json"),
            **decided,
        )

    def _loads(self) -> Iterator[LoadPoint]:
        loads = [load for load, _ in (*self.inputs.loads, *self.inputs.beside)]
        if len(loads) < 2:
            return
        ladder = self._asked
        for load, alone in zip_longest(loads, self.best_alone):
            theirs = None
            if ladder is not None:
                theirs = self.inputs.step(ladder.keys, load)
            yield LoadPoint(
                source=load.source,
                expected_us=self.inputs.step(self.plan.keys, load),
                ladder_us=theirs,
                best_us=alone,
            )

    @property
    def _asked(self) -> Plan | None:
        return self.inputs.ladders.get(self.inputs.asked)

    @property
    def _exact(self) -> bool:
        if self.inputs.worst:  # the bound is of the mean
            return False
        tolerance = EXACT * self.curve.problem.changeable
        return self.best.least <= self.best.bound + tolerance

    @property
    def _changeable_us(self) -> float:
        """Of the mean step of the traffic: what the steps take that graphs make faster."""
        alone = self.curve.alone
        return alone.changeable / alone.weight

    @property
    def _unbounded(self) -> tuple[PlanLimit, ...]:
        limits: tuple[PlanLimit, ...] = ("memory", "capture_time")
        if self.inputs.costs is not None:
            return ()
        return tuple(name for name in limits if name in self.plan.budget)

    def _ladder(
        self,
        name: str,
        plan: Plan,
    ) -> LadderPoint:
        curve = self.curve
        run = Run(plan.keys, self.run.traffic, self.run.times)
        step = run.expected_us
        near = curve.alone.infinite_us + NO_GAIN * self._changeable_us
        return point_of(
            name,
            run,
            len(plan.keys),
            **curve.price(plan.keys),
            drafts=len(plan.draft_keys),
            equal=self._point_within(step),
            alike=self._point_within(step + ALIKE * self._changeable_us),
            no_gain=step <= near,
        )

    def _point_within(self, expected_us: float) -> ParetoPoint | None:
        """The fewest graphs with which the traffic alone takes no longer."""
        goal = expected_us * (1 + 1e-9)
        for graphs, step in enumerate(self.curve.steps):
            if step <= goal:
                return self.curve.point(graphs)
        return None

    def _left_out(self) -> Iterator[tuple[Key, str]]:
        """Each is added to the plan by itself."""
        asked = self._asked
        for key in asked.keys if asked else ():
            if key not in self.plan.keys:
                yield key, self._reason_without(key)

    def _reason_without(self, key: Key) -> str:
        inputs = self.inputs
        descriptor = key[1]
        if descriptor.num_active_loras not in inputs.lora_cases:
            return CASE
        if key in inputs.failed:
            return FAILED
        weight, gain = self.run.gain_of(Lane.of(*key), descriptor.num_tokens)
        if weight == 0:
            return NO_BATCH
        if gain < WORTH * self._changeable_us:
            return NO_GRAPH_GAIN
        broken = self._broken([*self.plan.keys, key])
        if broken:
            return ", ".join(map(limit_words, broken))
        if not inputs.is_bounded:
            return RULE
        return NO_GRAPH_GAIN if self._exact else UNPROVEN

    def _broken(self, keys: Sequence[Key]) -> tuple[PlanLimit, ...]:
        cost = self.curve.price(capture_order(keys))
        limits = budget_of(self.inputs.config)  # an SLO or a draft model may lower max_graphs
        spent: dict[PlanLimit, Any] = {
            "max_graphs": len(keys),
            "memory": cost["bytes"],
            "capture_time": cost["seconds"],
        }
        broken: list[PlanLimit] = []
        for name, used in spent.items():
            most = limits.get(name, math.inf)
            if used is not None and used > most:
                is_slo = self.for_slo and name == "max_graphs"
                broken.append("slo" if is_slo else name)
        return tuple(broken)

    def _rule(self) -> str:
        if self.for_slo:
            return "the fewest graphs of those tried with which the SLO holds"
        inputs = self.inputs
        given = []
        for name, written in WRITTEN.items():
            if name in self.plan.budget and name not in self._unbounded:
                limit = self.plan.budget[name]
                given.append(f"{name} {written(limit)}")
        ladder = ladder_words(inputs.asked)
        if inputs.asked != "vllm":
            ladder += " and the vllm ladder"
        as_good = f"as good as {ladder} within {ALIKE:.1%}"
        if inputs.insured:
            as_good += f", and {NO_GAIN:.0%} for batches not in the traffic"
        why = "the budget binds nothing without costs" if self._unbounded else "no budget"
        rule = (
            f"{why}: the fewest graphs that are {as_good}, and bring {1 - CLOSE:.0%} of "
            f"what graphs can, of up to {LAST}"
        )
        if inputs.is_bounded:
            rule = (
                f"the best within the budget ({', '.join(given)}), less graphs that together bring "
                f"under {WORTH:.2%}"
            )
        if inputs.worst:
            rule += ", with the least regret of the worst load"
        return rule

    def _binding(self) -> tuple[PlanLimit, ...]:
        """Limits that the next better plan of the curve breaks, or, beyond its end, a graph for
        every size.
        """
        curve = self.curve
        problem = curve.problem
        total = problem.total_of(self.best.chosen)
        better = total - WORTH * problem.changeable
        if not self.inputs.is_bounded or better < problem.best_total:
            return ()
        graphs = curve.fewest(better / problem.weight)
        if graphs is None:
            every = [tuple(range(1, lane.sizes.size)) for lane in problem.lanes]
            chosen: Chosen = tuple(every)
        else:
            chosen = curve.found.chosen(graphs)
        return self._broken(curve.keys_of(chosen))

    def _next_graph(self) -> NextGraph | None:
        graphs = len(self.plan.keys) + 1
        problem = self.curve.problem
        if graphs > self.curve.graphs:
            return None
        now = problem.total_of(self.best.chosen) / problem.weight
        gain = max(now - self.curve.expected_us(graphs), 0.0)
        share = gain * problem.weight / max(problem.changeable, EXACT)
        return NextGraph(microseconds=gain, percent=100 * share)

    def _not_worth(self) -> Iterator[NotWorth]:
        """Sizes of the planned lanes at which a graph brings nothing."""
        for lane in self.inputs.lanes:
            largest = largest_of(lane, self.plan)
            stride = stride_of(lane, self.plan)
            sizes = np.arange(largest + 1)
            case = lane.num_active_loras
            graph = self.run.times.at(lane.mode, sizes, case)
            eager = self.run.times.at(CUDAGraphMode.NONE, sizes, case)
            faster = np.flatnonzero(graph < eager)
            end = int(faster.max(initial=0)) // stride * stride
            batch = self.run.largest_batch(lane)
            wanted = min(-(-batch // stride) * stride, largest)
            reason = NO_BATCH
            if wanted:
                reason = f"no batch of this lane is as large: {wanted} does as well"
            spans = [
                (wanted, end, reason),
                (end, largest, "an eager step takes no longer"),
            ]
            for below, last, why in spans:
                if below < last:
                    yield NotWorth(
                        **lane._asdict(),
                        first=below + 1,
                        last=last,
                        reason=why,
                    )

    def _notes(self) -> Iterator[str]:
        plan = self.plan
        times = self.run.times
        planned = self.inputs.lora_cases
        merged = [str(case) for case in plan.lora_cases if case not in planned]
        if merged:
            yield (
                f"LoRA cases {', '.join(merged)} were not planned for: their step times are not "
                "told apart from those of larger cases; measure them, with num_active_loras, to "
                "have them weighed"
            )
        if max(plan.lora_cases) > 0 and not any(curve.num_active_loras for curve in times.curves):
            yield (
                f"steps with adapters were not measured: taken as {times.lora_overhead:.0%} longer"
            )
        if plan.budget.get("max_graphs", 0) > MOST_GRAPHS:
            yield f"no more than {MOST_GRAPHS} graphs were planned for"
        if self.inputs.pools_shrink:
            yield "costs have smaller pools for larger sizes, so no plan is proven to be the best"
        if plan.mode is CUDAGraphMode.NONE:
            yield "the resolved cudagraph_mode is NONE: nothing is captured"

    def _memory_grows(
        self,
        nbytes: int | None,
        ladder: LadderPoint,
    ) -> Iterator[str]:
        if not nbytes or not ladder.bytes:
            return
        more = nbytes - ladder.bytes
        if more > max(MUCH_MEMORY * ladder.bytes, 1 << 20):
            theirs = math.ceil(ladder.bytes / 2**20)
            yield (
                f"these graphs take {format_bytes(more)} more memory than {ladder.words}: "
                f"--memory {theirs}MiB (budget.memory) plans for no more"
            )

    def _verdict(self, ladder: LadderPoint | None) -> str:
        if self.plan.mode is CUDAGraphMode.NONE:
            return "nothing is captured: the resolved cudagraph_mode is NONE"
        if not self.plan.keys:
            if self.inputs.is_bounded:
                return "no graph saves time within the budget"
            return "no graph saves time: eager steps take no longer"
        number = len(self.plan.keys)
        graphs = counted(number, "graph")
        expected = self.run.expected_us
        if ladder is None:
            return f"{format_microseconds(expected)} a step with {graphs}"
        theirs = f"with {ladder.words}"
        unchanged = self.curve.alone.infinite_us - self._changeable_us
        changed = max(ladder.expected_us - unchanged, EXACT)
        change = (expected - ladder.expected_us) / changed
        if change > NO_GAIN:
            return (
                f"steps that graphs run are {change:.1%} longer than {theirs}, with {graphs}: "
                "see what binds"
            )
        if ladder.no_gain:
            above = ladder.expected_us - self.curve.alone.infinite_us
            away = above / max(self._changeable_us, EXACT)
            verb = "is" if number == 1 else "are"
            judged = f"{graphs} {verb} as good"
            if change > ALIKE:
                judged = f"with {graphs} steps are {change:.1%} longer"
            return f"no gain in step time: {theirs} it is {away:.2%} above the bound; {judged}"
        if change < -NO_GAIN:
            return f"steps that graphs run are {-change:.1%} shorter than {theirs}, with {graphs}"
        return f"steps within 1% of those {theirs}, with {graphs}"


def use_of(use: Use, run: Run, **more: Any) -> SizeUse:
    return SizeUse(
        **use.lane._asdict(),
        size=use.size,
        share=use.weight / run.traffic.total,
        padding=use.padding,
        **more,
    )


def point_of(name: str, run: Run, graphs: int, **more: Any) -> LadderPoint:
    """Graphs beside others, by the traffic that ran through them."""
    used = [use for use in run.uses if use.size is not None]
    return LadderPoint(
        name=name,
        graphs=graphs,
        unused=graphs - len(used),
        expected_us=run.expected_us,
        padding=run.padding,
        **run.by_kind,
        **more,
    )


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
