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
from functools import cache, cached_property
from typing import Any

import numpy as np

from cgplan.config import Config
from cgplan.errors import BudgetError, PlanError
from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.evidence import (
    ASKED_FOR,
    EAGER_ROW,
    MOST_UNMEASURED,
    NOT_WORTH_IT,
    NOTHING_SAVED,
    Evidence,
    Expected,
    LadderPoint,
    LaneSizes,
    LoadPoint,
    NextGraph,
    ParetoPoint,
    PlanLimit,
    ladder_words,
    of_costs,
)
from cgplan.optimizer.lint import CLIFF, bench_of, doubts, lint, rows_without_graphs
from cgplan.optimizer.problem import (
    Lists,
    Problem,
    Run,
    keys_of,
    problem_of,
)
from cgplan.optimizer.search import (
    MOST_GRAPHS,
    Limits,
    Search,
    best_plan,
)
from cgplan.planning.engines import eager_drafts
from cgplan.planning.plan import (
    LADDERS,
    PLANNED_FOR,
    Lane,
    LeftOut,
    Plan,
    budget_of,
    build_plan,
    capture_fields,
    capture_order,
    lanes_of,
)
from cgplan.pricing import GraphCosts
from cgplan.traffic.histogram import Traffic
from cgplan.traffic.step_times import StepTimes
from cgplan.units import (
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
MOST_OF_CURVE = 128  # graphs; a plan may have MOST_GRAPHS
CLOSE = 0.05  # share of the time that graphs can save at all that a plan without a budget may leave
OUTWEIGHED = (
    "no graph saves time for this traffic: larger batches would be faster in one, but smaller "
    "batches would run in it, too, and lose more"
)
# Shares of the time of those steps that graphs make faster, see Problem.changeable:
WORTH = 1e-4  # a gain below which graphs are not worth a word
ALIKE = 1e-3  # a difference between steps that count as equally long
NO_GAIN = 0.01  # a distance from the bound below which other sizes bring no gain in step time
EXACT = 1e-6  # a gap that counts as none
FAILED = "it could not be captured"


def plan_graphs(inputs: PlanInputs) -> PlannedGraphs:
    """The plan with the shortest expected step for this traffic inside ``config.budget``.

    ``max_graphs`` is the number of graphs, less those that together bring under 0.01%. Without it
    the fewest suffice that bring 95% of what graphs can, and are as good as the configured sizes or
    ladder and as vLLM's: at most 0.1% longer for each traffic, and at most 1% for what is insured.
    Memory and time make them others or fewer, not more.

    A key counts as one graph, whatever its segments.

    Raises:
        ModeError, PlanError: as ``build_plan`` does; or batches have several sizes, see
            ``propose_boxes``.
        StepTimeError: times of a mode are missing.
        BudgetError: the budget does not pay for a single graph.
    """
    config = inputs.config
    if config.dims:
        raise PlanError(
            f"steps of requests have no {', '.join(config.dims)}, and graphs have these sizes",
            remedy="Use `cgplan plan --traffic FILE`, whose columns are the names of `dims`, and "
            "capture its plan.",
        )
    problem = inputs.problem
    most = config.budget.max_graphs
    graphs = min(most or inputs.needed, MOST_GRAPHS)
    goal = problem.best_total + WORTH * problem.changeable  # below it no graph is worth a word
    chosen = inputs.by_graphs.best(min(graphs, MOST_OF_CURVE), goal)
    limits = inputs.limits(graphs)
    keys = keys_of(problem.lists_of(chosen), inputs.base)
    if graphs > MOST_OF_CURVE or not inputs.pays_for(limits, keys):
        problem = inputs.priced(inputs.insured)
        _check_one_graph(limits, problem)
        if most is None:
            limits = replace(limits, graphs=len(keys))
        chosen = best_plan(problem, limits, goal=goal)
    lists = problem.lists_of(chosen)
    run = Run(lists, inputs.seen, inputs.times)
    keys = keys_of(lists, inputs.base)
    sizes = set[int]().union(*lists.values())
    plan = inputs.base.changed(
        capture_sizes=tuple(sorted(sizes)),
        sizes_source=f"{PLANNED_FOR} {inputs.seen.source}",
        keys=keys,
        predicted=inputs.costs and inputs.costs.of(keys),
    )
    return PlannedGraphs(plan, inputs, run)


@dataclass(frozen=True)
class PlanInputs:
    """What a plan is made for, and the curve: the best plans by their number of graphs alone.

    Attributes:
        loads: They share the steps by their weights.
        costs: Absent: only ``budget.max_graphs`` bounds the plan.
        failed: Keys that the plan does without, each with the reason.
        insurance: This share of the steps, below 1, is that of ``Traffic.unseen`` while sizes are
            chosen. Figures of the evidence are of the traffic alone.
        beside: Other traffic, and its share of the steps while sizes are chosen.
        one_list: All lanes have the same sizes, as far as they may hold them.
        today: The graphs asked for, maybe in another mode.
        any_size: Also above all sizes that were measured or asked for.
    """

    config: Config
    loads: WeightedTraffic
    times: StepTimes
    costs: GraphCosts | None = None
    failed: Mapping[Key, str] = field(default_factory=dict)
    insurance: float = 0.0
    beside: WeightedTraffic = ()
    one_list: bool = False
    today: Plan | None = None
    any_size: bool = False

    @cached_property
    def base(self) -> Plan:
        config = self.config
        plan = build_plan(with_sizes(config, (config.query_len,)))
        return plan.changed(
            **capture_fields(config),
            draft_prefill_keys=(),
            draft_decode_keys=(),
            warnings=(),
        )

    @cached_property
    def seen(self) -> Traffic:
        return Traffic.mixed(self.loads)

    @cached_property
    def others(self) -> WeightedTraffic:
        """Traffic that is planned for, too, and, last, batches that none shows."""
        others = list(self.beside)
        if self.insurance:
            others.append((self.seen.unseen(self.base), self.insurance))
        return others

    def with_others(self, seen: Traffic) -> Traffic:
        if not self.others:
            return seen
        rest = 1 - sum(share for _, share in self.others)
        return Traffic.mixed([(seen, rest), *self.others])

    @cached_property
    def insured(self) -> Traffic:
        """What sizes are chosen for."""
        return self.with_others(self.seen)

    def limits(self, graphs: int) -> Limits:
        if self.costs is None:
            return Limits(graphs)
        budget = self.config.budget
        return Limits(graphs, budget.memory or math.inf, budget.capture_time or math.inf)

    @property
    def lora_cases(self) -> tuple[int, ...]:
        cases = self.base.lora_cases
        if self.one_list:
            return cases
        return self.times.told_apart(cases)

    @cached_property
    def ladders(self) -> dict[str, Plan]:
        """Plans of the ladders that fit the configuration, by name; ``configured`` for the sizes
        that it lists, before them no graph, and the graphs asked for in another mode.
        """
        config = self.config
        found = {}
        if self.base.keys and config.compilation.on_miss == "eager":
            found[EAGER_ROW] = self.base.changed(keys=())
        if self.today and self.today.mode is not self.base.mode:
            found[ASKED_FOR] = self.today
        most = config.compilation.max_cudagraph_capture_size
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

    def problem_for(
        self,
        traffic: Traffic,
        costs: GraphCosts | None,
    ) -> Problem:
        asked = self.today or self.ladders.get(self.asked)
        most = asked.max_capture_size if asked else 0
        if self.any_size:
            most = self.base.max_num_batched_tokens
        return problem_of(
            lanes_of(self.base.mode, self.lora_cases),
            traffic,
            self.times,
            self.base,
            costs,
            without=self.failed,
            one_list=self.one_list,
            asked_to=most,
        )

    def priced(self, traffic: Traffic) -> Problem:
        has_prices = self.limits(0).has_prices
        return self.problem_for(traffic, self.costs if has_prices else None)

    def step(
        self,
        lists: Lists,
        traffic: Traffic,
    ) -> float:
        return Run(lists, traffic, self.times).expected_us

    def pays_for(self, limits: Limits, keys: tuple[Key, ...]) -> bool:
        if self.costs is None:
            return True
        cost = self.price(keys)
        return bool(limits.pays_for(0, cost["bytes"], cost["seconds"]))

    # --- the curve --------------------------------------------------------------------------------

    @cached_property
    def problem(self) -> Problem:
        return self.problem_for(self.insured, None)

    @cached_property
    def problem_of_seen(self) -> Problem:
        return self.problem_for(self.seen, None)

    @cached_property
    def by_graphs(self) -> Search:
        return Search(self.problem, Limits(MOST_OF_CURVE))

    @cached_property
    def steps_us(self) -> list[float]:
        """Of the traffic alone, by the number of graphs."""
        return [self.step(self.lists_of(graphs), self.seen) for graphs in range(MOST_OF_CURVE + 1)]

    @cached_property
    def lists_of(self) -> Callable[[int], Lists]:
        return cache(lambda graphs: self.problem.lists_of(self.by_graphs.chosen(graphs)))

    @cached_property
    def needed(self) -> int:
        ladders = self.ladders
        plans = [ladders[name] for name in (self.asked, "vllm") if name in ladders]
        goals = [plan.lanes() for plan in plans or ladders.values()]
        parts = [(load, ALIKE) for load, _ in self.loads]
        parts += [(other, NO_GAIN) for other, _ in self.others]
        longest = []
        for part, share in parts:
            slack = share * self.problem_for(part, None).changeable / part.total
            least = min((self.step(lists, part) for lists in goals), default=math.inf)
            longest.append((part, least + slack))
        problem = self.problem
        fewest = self.by_graphs.fewest(problem.best_total + CLOSE * problem.saved)
        if fewest is None:
            return self.worthwhile
        for graphs in range(max(fewest, 1), MOST_OF_CURVE + 1):
            lists = self.lists_of(graphs)
            if all(self.step(lists, part) <= goal for part, goal in longest):
                return graphs
        return self.worthwhile

    @property
    def worthwhile(self) -> int:
        """The number of graphs from which more bring less than 0.01%."""
        slack = WORTH * self.problem.changeable
        return self.by_graphs.fewest(float(self.by_graphs.value[-1]) + slack) or 0

    def price(self, keys: tuple[Key, ...]) -> dict[str, Any]:
        costs = self.costs
        cost = costs and costs.of(keys)
        return {"bytes": cost and cost.total_bytes, "seconds": cost and cost.seconds}

    def point(self, graphs: int) -> ParetoPoint:
        keys: tuple[Key, ...] = ()
        if self.costs:  # else they have no price
            keys = keys_of(self.lists_of(graphs), self.base)
        return ParetoPoint(
            graphs=graphs,
            expected_us=self.steps_us[graphs],
            **self.price(keys),
        )


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


def _check_one_graph(limits: Limits, problem: Problem) -> None:
    nothing = problem.nothing
    singles: list[tuple[float, float]] = []
    for n, gains in enumerate(problem.gains(nothing)):
        _, *figures = problem.costs_with(nothing, n)
        is_worth = gains > WORTH * problem.changeable
        columns = [of_each[is_worth].tolist() for of_each in figures]
        singles += zip(*columns, strict=True)
    if not singles or any(limits.pays_for(0, *single) for single in singles):
        return
    memory, seconds = min(singles)
    wrong = []
    enough = []
    if memory > limits.memory:
        wrong.append(f"budget.memory is {limits.memory / 2**20:.5g} MiB")
        enough.append(f"budget.memory to {math.ceil(memory / 2**20)}MiB")
    if seconds > limits.seconds:
        wrong.append(f"budget.capture_time is {limits.seconds:.3g} s")
        enough.append(f"budget.capture_time to {seconds * 1.01:.3g}s")
    raise BudgetError(
        f"{' and '.join(wrong)}, but the cheapest graph that a batch gains by takes "
        f"{memory / 2**20:.5g} MiB and {seconds:.3g} s by --costs",
        remedy=f"Raise {' and '.join(enough)} at least, or set compilation.cudagraph_mode: NONE. "
        "--costs measure knows the pool of smaller graphs.",
    )


@dataclass(frozen=True)
class PlannedGraphs:
    """A plan, and all that it was made from.

    Attributes:
        for_slo: Whether its number of graphs is the least that holds an SLO.
        unlimited: The plan that may take more memory than the graphs asked for.
        others: Loads that are shown beside those of the inputs, planned for or not.
    """

    plan: Plan
    inputs: PlanInputs
    run: Run
    for_slo: bool = False
    unlimited: PlannedGraphs | None = None
    others: Sequence[Traffic] = ()

    def with_plan(self, **changed: Any) -> PlannedGraphs:
        return replace(self, plan=self.plan.changed(**changed))

    def as_captured(self, others: Sequence[Traffic]) -> PlannedGraphs:
        """With all graphs that vLLM captures for the sizes, and shown for ``others``, too."""
        plan = self.plan
        inputs = self.inputs
        planned = replace(self, others=others)
        if plan.key_rules != "vllm_v2" or not plan.capture_sizes:
            return planned
        config = inputs.config
        notes = plan.notes
        built = build_plan(with_sizes(config, plan.capture_sizes))
        eager = tuple(eager_drafts(built))
        most = plan.max_num_seqs
        if inputs.one_list and eager and most <= inputs.problem.largest:
            larger = build_plan(with_sizes(config, (*plan.capture_sizes, most)))
            broken = self._broken(larger.keys)
            if broken:
                eager = (f"{eager[0]}, for which the limits have no room",)
                if "memory" in broken:
                    mib = inputs.price(larger.keys)["bytes"] / 2**20
                    eager = (f"{eager[0]}: with it graphs take {mib:.1f} MiB",)
            else:
                built = larger
                eager = ()
                notes += (f"size {most} was added for the draft model's decode, which steps lack",)
        keys = built.keys if inputs.one_list else plan.keys
        planned = planned.with_plan(
            capture_sizes=built.capture_sizes,
            keys=keys,
            draft_prefill_keys=built.draft_prefill_keys,
            draft_decode_keys=built.draft_decode_keys,
            predicted=inputs.costs and inputs.costs.of(keys),
            notes=notes,
            lint=eager,
        )
        return replace(planned, run=self._run_of(planned.plan.lanes()))

    def explained(self, **decided: Any) -> Plan:
        """The plan with its evidence; ``decided``: what that says besides."""
        plan = self.plan
        run = self.run
        inputs = self.inputs
        costs = inputs.costs
        alone = inputs.problem_of_seen
        ladders = {name: self._ladder(name, other) for name, other in inputs.ladders.items()}
        asked = ASKED_FOR if ASKED_FOR in ladders else inputs.asked
        ladder = ladders.get(asked)
        keep = False  # as good as the plan, and not more
        if ladder and self._is_worth_it and not self.for_slo:
            theirs = inputs.ladders[ladder.name]
            is_near = self._change(ladder.expected_us, theirs.lanes()) >= -NO_GAIN
            is_fewer = 0 < ladder.graphs <= len(plan.keys)
            fits = not (self._broken(theirs.keys) or inputs.failed.keys() & theirs.keys)
            keep = is_near and is_fewer and fits
            for load in self._shown:
                least = inputs.step(plan.lanes(), load)
                keep &= inputs.step(theirs.lanes(), load) < CLIFF * least
        told, times_notes = run.times.said_for(plan.mode)
        unsure = [*told, *run.traffic.warnings, *doubts(plan, run)]
        doubt = ""
        if run.unmeasured > MOST_UNMEASURED:
            beyond = f"{run.unmeasured:.0%} of the steps have sizes that were not measured"
            doubt = f"extrapolated, as {beyond}: "
            largest = max(plan.max_capture_size, int(run.batches.num_tokens.max()))
            size = min(largest, plan.max_num_batched_tokens)
            doublings = (1 << power for power in range(size.bit_length()))
            command = bench_of(plan, {*doublings, size})
            unsure.append(
                f"measure first: {command}, or of vLLM two starts, at loads up to {size} tokens "
                "(docs/planning.md, For vLLM), or the engine's own benchmark; then give "
                "--step-times"
            )
        unbounded = self._unbounded
        if unbounded:
            names = [f"budget.{name}" for name in unbounded]
            unsure.append(
                f"{' and '.join(names)} did not bound this plan: give --costs with the log of a "
                "start of vLLM, a capture report, estimate or measure; without it the capture "
                "alone drops what does not fit"
            )
        has_adapters = any(use.num_active_loras for use in run.uses)
        if has_adapters and not any(curve.num_active_loras for curve in run.times.curves):
            unsure.append(
                "steps with adapters were not measured: taken as "
                f"{run.times.lora_overhead:.0%} longer; --lora-step-times tells them "
                "(docs/planning.md, LoRAs in step times)"
            )
        binding = self._binding()
        price = inputs.price(plan.keys)
        evidence = Evidence(
            traffic_source=run.traffic.source,
            traffic_weight=run.traffic.total,
            traffic_notes=run.traffic.notes,
            times_source=run.times.source,
            times_notes=times_notes,
            **of_costs(costs),
            rule=self._rule(),
            graphs=len(plan.keys),
            **price,
            expected_us=Expected(
                plan=run.expected_us,
                eager=self._eager_us,
                bound=alone.infinite_us,
                **run.by_kind,
            ),
            binding=binding,
            next_graph=self._next_graph(binding),
            lanes=tuple(
                LaneSizes(**lane._asdict(), sizes=sizes) for lane, sizes in plan.lanes().items()
            ),
            uses=run.uses,
            pareto=tuple(map(inputs.point, range(1, inputs.worthwhile + 1))),
            ladders=tuple(ladders.values()),
            asked=asked,
            keep=keep,
            notes=tuple(self._notes()),
            warnings=lint(plan, run),
            verdict=run.times.doubt + doubt + self._verdict(ladder),
            unmeasured=run.unmeasured,
            unmeasured_graphs=sum(
                key.num_tokens > run.times.measured_to(mode, key.num_active_loras)
                for mode, key in plan.keys
            ),
            unsure=tuple(unsure),
            unbounded=unbounded,
            padding=run.padding,
            failed=_by_lane(inputs.failed.items()),
            insurance=inputs.insurance,
            other_loads=sum(share for _, share in inputs.beside),
            one_list=inputs.one_list,
            apart=run.traffic.apart,
            loads=tuple(self._loads()),
            step_times=run.times.model_dump(mode="json"),
            **decided,
        )
        return plan.changed(evidence=evidence.model_dump(mode="json"))

    @property
    def _shown(self) -> list[Traffic]:
        return [*(load for load, _ in self.inputs.loads), *self.others]

    def _loads(self) -> Iterator[LoadPoint]:
        if len(self._shown) < 2:
            return
        ladder = self._asked
        for load in self._shown:
            theirs = None
            if ladder:
                theirs = self.inputs.step(ladder.lanes(), load)
            yield LoadPoint(
                source=load.source,
                expected_us=self.inputs.step(self.plan.lanes(), load),
                ladder_us=theirs,
            )

    @property
    def _asked(self) -> Plan | None:
        return self.inputs.ladders.get(self.inputs.asked)

    @property
    def _changeable_us(self) -> float:
        alone = self.inputs.problem_of_seen
        return alone.changeable / alone.weight

    @property
    def _unbounded(self) -> tuple[PlanLimit, ...]:
        limits: tuple[PlanLimit, ...] = ("memory", "capture_time")
        if self.inputs.costs:
            return ()
        return tuple(name for name in limits if name in self.plan.budget)

    def _ladder(
        self,
        name: str,
        plan: Plan,
    ) -> LadderPoint:
        inputs = self.inputs
        run = self._run_of(plan.lanes())
        near = inputs.problem_of_seen.infinite_us + NO_GAIN * self._changeable_us
        return point_of(
            name,
            plan,
            run,
            **inputs.price(plan.keys),
            no_gain=run.expected_us <= near,
        )

    def _run_of(self, lists: Lists) -> Run:
        return Run(lists, self.run.traffic, self.run.times)

    def _broken(self, keys: Sequence[Key]) -> tuple[PlanLimit, ...]:
        cost = self.inputs.price(capture_order(keys))
        limits = budget_of(self.inputs.config)  # an SLO or a draft model may lower max_graphs
        spent: dict[PlanLimit, Any] = {
            "max_graphs": len(keys),
            "memory": cost["bytes"],
            "capture_time": cost["seconds"],
        }
        broken = dict[PlanLimit, None]()
        for name, used in spent.items():
            most = limits.get(name, math.inf)
            if used is not None and used > most:
                is_slo = self.for_slo and most < self.plan.budget.get(name, math.inf)
                broken["slo" if is_slo else name] = None
        return tuple(broken)

    def _rule(self) -> str:
        if self.for_slo:
            return "of the plans tried the fewest graphs, in the least memory, that hold the SLO"
        inputs = self.inputs
        given = []
        for name, written in WRITTEN.items():
            if name in self.plan.budget and name not in self._unbounded:
                limit = self.plan.budget[name]
                given.append(f"{name} {written(limit)}")
        rule = f"the best within the budget ({', '.join(given)})"
        if "max_graphs" in self.plan.budget:
            rule += f", less graphs that together bring under {WORTH:.2%}"
        else:
            ladder = ladder_words(inputs.asked)
            if inputs.asked != "vllm":
                ladder += " and the vllm ladder"
            as_good = f"as good as {ladder} within {ALIKE:.1%}"
            if inputs.others:
                as_good += f", and {NO_GAIN:.0%} for batches not in the traffic"
            suffices = (
                f"the fewest graphs that are {as_good}, and bring {1 - CLOSE:.0%} of "
                f"what graphs can, of up to {MOST_OF_CURVE}"
            )
            most = "no more graphs than suffice without it"
            why = "the budget binds nothing without costs" if self._unbounded else "no budget"
            rule = f"{rule}, with {most}: {suffices}" if given else f"{why}: {suffices}"
        return rule

    def _binding(self) -> tuple[PlanLimit, ...]:
        """Limits that the next better plan of the curve breaks, or, beyond its end, a graph for
        every size.
        """
        inputs = self.inputs
        problem = inputs.problem
        total = inputs.step(self.plan.lanes(), inputs.insured) * problem.weight
        better = total - WORTH * problem.changeable
        if better < problem.best_total:
            return ()
        graphs = inputs.by_graphs.fewest(better)
        if inputs.config.budget.max_graphs is None and (graphs is None or graphs > inputs.needed):
            return ()
        if graphs is None:
            every = [tuple(range(1, lane.sizes.size)) for lane in problem.lanes]
            lists = problem.lists_of(tuple(every))
        else:
            lists = inputs.lists_of(graphs)
        return self._broken(keys_of(lists, inputs.base))

    def _next_graph(self, binding: Sequence[PlanLimit]) -> NextGraph | None:
        inputs = self.inputs
        most = [int(lane.each.max()) for lane in inputs.problem.lanes]  # of a size
        graphs = len(self.plan.keys) + max(most, default=1)
        is_paid = not {"memory", "capture_time"} & {*binding}
        if graphs > MOST_OF_CURVE or not is_paid:
            return None
        gain = max(self.run.expected_us - inputs.steps_us[graphs], 0.0)
        return NextGraph(
            microseconds=gain,
            percent=100 * gain / max(self._changeable_us, EXACT),
        )

    def _notes(self) -> Iterator[str]:
        plan = self.plan
        yield from rows_without_graphs(plan, self.run)
        planned = self.inputs.lora_cases
        merged = [str(case) for case in plan.lora_cases if case not in planned]
        if merged:
            yield (
                f"LoRA cases {', '.join(merged)} were not planned for: their step times are those "
                "of larger cases; to have them weighed, measure them with num_active_loras"
            )
        if plan.budget.get("max_graphs", 0) > MOST_GRAPHS:
            yield f"no more than {MOST_GRAPHS} graphs were planned for"

    def _verdict(self, ladder: LadderPoint | None) -> str:
        if self.plan.mode is CUDAGraphMode.NONE:
            return "nothing is captured: the resolved cudagraph_mode is NONE"
        if not self.plan.keys:
            if self.inputs.problem_of_seen.saved <= 0:
                return NOTHING_SAVED
            if self.inputs.failed:
                return f"no graph that saves time is left: {FAILED}"
            return OUTWEIGHED
        graphs = self.plan.graph_words
        expected = self.run.expected_us
        if not self._is_worth_it:
            eager = format_microseconds(self._eager_us)
            took = f"{eager} a step, this plan {format_microseconds(expected)}"
            verdict = f"{NOT_WORTH_IT}: eager takes {took}"
            if ladder:
                verdict += f", {ladder.words} {format_microseconds(ladder.expected_us)}"
            if self.run.missed.all():
                verdict += f"; the plan's {graphs} are for batches that the traffic does not show"
            return verdict
        if ladder is None:
            return f"{format_microseconds(expected)} a step with {graphs}"
        theirs = f"with {ladder.words}"
        change = self._change(ladder.expected_us, self.inputs.ladders[ladder.name].lanes())
        steps = "steps that either runs in graphs are"
        if change > NO_GAIN:
            why = "--slo asks for the fewest" if self.for_slo else "see what binds"
            return f"{steps} {change:.1%} longer with {graphs} than {theirs}: {why}"
        if ladder.no_gain and change <= ALIKE:
            return (
                f"no gain in step time: {theirs} it is within 1% of the bound; as good in the "
                f"mean step with {graphs}"
            )
        if change < -NO_GAIN:
            return f"{steps} {-change:.1%} shorter with {graphs} than {theirs}"
        return f"steps within 1% of those {theirs}, with {graphs}"

    @property
    def _eager_us(self) -> float:
        seen = self.inputs.problem_of_seen
        return seen.eager_total / seen.weight

    @cached_property
    def _is_worth_it(self) -> bool:
        if self.for_slo or EAGER_ROW not in self.inputs.ladders:
            return True
        return self._change(self._eager_us, {}) <= -NO_GAIN

    def _change(self, expected_us: float, lists: Lists) -> float:
        """How much longer than with these graphs the steps are that graphs of either run."""
        theirs = self._run_of(lists)
        in_graphs = ~(theirs.missed & self.run.missed)
        of_graphs = np.average(theirs.microseconds * in_graphs, weights=theirs.weights)
        return float((self.run.expected_us - expected_us) / max(of_graphs, EXACT))


def point_of(name: str, plan: Plan, run: Run, **more: Any) -> LadderPoint:
    return LadderPoint(
        name=name,
        graphs=len(plan.keys),
        drafts=len(plan.draft_keys),
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
