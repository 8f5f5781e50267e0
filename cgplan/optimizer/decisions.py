"""What a plan decides besides sizes: the mode, and the fewest graphs that hold an SLO."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from cgplan.config import Config
from cgplan.errors import BudgetError, ModeError, PlanError, StepTimeError, TrafficError
from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.evidence import ASKED_FOR, PlanCheck, ServicePoint
from cgplan.optimizer.problem import Run, step_clock
from cgplan.optimizer.propose import (
    ALIKE,
    PlanInputs,
    PlannedGraphs,
    plan_graphs,
    point_of,
)
from cgplan.planning import Plan, build_plan
from cgplan.planning.plan import budget_of
from cgplan.pricing import GraphCosts
from cgplan.traffic.histogram import Goal, Service, Traffic
from cgplan.traffic.simulation import RequestTrace, SchedulerBounds, simulate
from cgplan.traffic.step_times import FULL_OF_DECODE, StepTimes
from cgplan.units import format_bytes, format_microseconds

Source = Traffic | RequestTrace
INSURANCE = 0.1  # if none is asked for
HIGHER_LOADS = (2.0, 4.0)  # of a robust plan
OTHER_SHARES = (0.1, 0.05, 0.025)  # of the steps, for each other load, tried in turn
GIVEN_UP = 0.003  # the most by which they may lengthen the mean step of the load itself
# requests, beyond which less is shown and tried; first plans and modes are of so many
LARGE = 200_000
SLOWER = 0.05  # steps of a plan for an SLO, if enough graphs hold it
MOST_FOR_SLO = 128  # graphs that an SLO is tried with; p99 need not fall with more
HALVINGS = 6  # of the memory that an SLO is tried with
NOTABLE = 0.05  # a change of a figure that is worth a word
LEAST = 0.0005  # a share that 0.1% is written for
MIB = 1 << 20  # of memory, which is worth no word
MODES = [
    CUDAGraphMode.FULL_DECODE_ONLY,
    CUDAGraphMode.FULL,
    CUDAGraphMode.PIECEWISE,
    CUDAGraphMode.FULL_AND_PIECEWISE,
]


class Miss(NamedTuple):
    """How far a plan is from one goal of an SLO.

    Attributes:
        share: Excess over the goal, as a share of it; 0 or less: it holds.
        requests: The load, whose requests get ``service``.
    """

    share: float
    text: str
    requests: RequestTrace
    service: Service

    @property
    def holds(self) -> bool:
        return self.share <= 0


Judged = tuple[PlannedGraphs, Miss]
ByMode = dict[CUDAGraphMode, tuple[PlannedGraphs, Miss | None]]


@dataclass(eq=False)
class Planner:
    """Plans for one set of loads.

    Attributes:
        sources: Steps or requests, with their weights.
        failed, insurance: As in ``PlanInputs``.
        objective: robust or mean.
        any_mode: Whether other modes are weighed.
        kv_tokens: Tokens that the KV cache holds; None: all.
        kv_token_bytes: Of a token there; 0: not known.
        replicas: Servers that share the requests.
        one_list, apart: As in ``Evidence``.
        any_memory: Whether a plan may take more than the graphs asked for.
        progress: Told of each plan tried for the SLO: its place, how many, the mode.
    """

    times: StepTimes
    sources: Sequence[tuple[Source, float]]
    costs: GraphCosts | None = None
    failed: Mapping[Key, str] = field(default_factory=dict)
    insurance: float = INSURANCE
    objective: str = "robust"
    any_mode: bool = False
    slo: Sequence[Goal] = ()
    kv_tokens: int | None = None
    kv_token_bytes: int = 0
    replicas: int = 1
    one_list: bool = False
    apart: bool = False
    any_memory: bool = False
    progress: Callable[[int, int, str], object] = lambda *_: None

    def __post_init__(self) -> None:
        self._higher = list[Traffic]()
        self._today: Plan | None = None
        self._asked_bytes = 0  # of the graphs asked for, where costs are known
        self._tried = list[Judged]()  # for the SLO
        self._modes = MODES
        if self.apart or self.times.full_of_decode:  # FULL graphs run decode alone
            self._modes = [mode for mode in MODES if mode.mixed_mode() is not CUDAGraphMode.FULL]
        self._first = list[tuple[Source, float]]()
        self._requests = list[RequestTrace]()
        self._is_large = False
        for source, weight in self.sources:
            short = source
            if isinstance(source, RequestTrace):
                self._requests.append(source)
                self._is_large |= len(source.requests) > LARGE
                short = source.first(LARGE)
            self._first.append((short, weight))
        self._known: dict[Any, tuple[Source, Traffic]] = {}  # simulated, by the source's id

    def decide(self, config: Config) -> Plan:
        """The plan, in the best mode if it may be chosen, with the fewest graphs that hold the SLO.

        Raises TrafficError where an SLO has no requests.
        """
        for source, _ in self.sources:
            if self.slo and isinstance(source, Traffic):
                raise TrafficError(
                    f"an SLO needs requests, and a load counts steps: {source.source}",
                    remedy="Give --traffic FILE with requests: arrivals, prompts, generated "
                    "tokens (docs/planning.md, Requests of a vLLM server); a picture has 1 "
                    "token of context, and generates 0.",
                )
        self._today = build_plan(config)
        if self.costs:
            self._asked_bytes = self.costs.of(self._today.keys).total_bytes
        weighed = self._weighed(config)
        chosen, planned = weighed[0]
        if self.any_mode and self._is_large:  # modes are weighed for the first requests
            planned = self._planned(chosen)
            weighed[0] = chosen, planned
        by_mode: ByMode = {}
        for _, made in weighed:
            by_mode[made.plan.mode] = made, None
        decided = list[str]()
        miss = None
        if self.slo:
            by_slo = self._for_slo(config, weighed)
            planned, miss = by_slo[0]
            if not (miss.holds or self._worst_miss(config, build_plan(config)).holds):
                miss = miss._replace(text=f"{miss.text}; the graphs asked for miss it, too")
            decided.append(self._said_of_slo(planned, miss))
            for made, its in by_slo:
                by_mode[made.plan.mode] = made, its
        reasons = list[str]()
        notes = [*planned.plan.notes]
        if self.any_mode:
            decided += self._mode_change(by_mode, planned)
            notes += self._mode_notes(
                by_mode,
                planned,
            )
        if planned.plan.draft_keys:
            notes.append(
                "max_graphs counts the draft model's graphs; costs do if of a log with drafts"
            )
        planned = planned.with_plan(notes=tuple(notes))
        plan = planned.plan
        if miss and len(self._requests) > 1:
            reasons.append(f"of {len(self._requests)} loads {miss.requests.source}: {miss.text}")
        reasons += self._memory_notes(planned)
        return planned.explained(
            service=tuple(self._points(config, plan, miss)),
            slo=tuple(self.slo),
            objective=self.objective,
            kv_tokens=self.kv_tokens,
            replicas=self.replicas,
            slo_missed=None if miss is None or miss.holds else miss.text,
            decided=tuple(decided),
            decisions=tuple(reasons),
        )

    def check(self, config: Config, plan: Plan) -> PlanCheck:
        """Judge any plan on these loads."""
        traffic = Traffic.mixed(self.steps(config, plan))
        times = self.times
        run = Run(plan.lanes(), traffic, times)
        graphs = len(plan.keys)
        try:
            anew = self._planned(config)
        except BudgetError:  # for any graph of these batches
            config = _eager(config)
            anew = self._planned(config)
        others = {
            "this plan": plan,
            "planned anew": anew.plan,
        }
        if graphs and graphs != len(anew.plan.keys):
            as_many = config.with_values("budget", max_graphs=plan.num_graphs)
            others[f"best with {graphs}"] = self._planned(as_many).plan
        others |= anew.inputs.ladders
        points = []
        allowed = []
        limits = anew.inputs.limits(0)
        most = config.budget.max_graphs or math.inf
        for name, other in others.items():
            ran = Run(other.lanes(), traffic, times)
            price = anew.inputs.price(other.keys)
            point = point_of(
                name,
                other,
                ran,
                **price,
            )
            points.append(point)
            is_allowed = point.num_graphs <= most and anew.inputs.pays_for(limits, other.keys)
            if is_allowed or other is plan:
                allowed.append(point)
        own = points[0]
        least = min(allowed, key=attrgetter("expected_us"))
        regret = own.expected_us / least.expected_us - 1
        of_decode = None
        verdict = f"regret {regret:z.2%} in the plan's mode"
        if own.decode_us and least.decode_us:
            of_decode = own.decode_us / least.decode_us - 1
            words = f", of decode steps {of_decode:z.2%}"
            verdict += words if own.mixed_us else ""
        verdict += f": {format_microseconds(own.expected_us)} a step by this plan"
        if least is not own:
            verdict += f", {format_microseconds(least.expected_us)} ({least.name})"
        missed = None
        if self.slo and self._requests:
            miss = self._worst_miss(config, plan)
            missed = None if miss.holds else miss.text
            judged = "holds its SLO"
            if missed:
                judged = f"misses its SLO: {missed}"
            verdict = f"{judged}; {verdict}"
        elif self.slo:
            verdict = f"SLO not judged, as the traffic counts steps: give requests; {verdict}"
        eager = sum(use.share for use in run.uses if use.size is None)
        if eager >= LEAST:
            verdict = f"{eager:.1%} of the steps run eagerly; {verdict}"
        unsure, notes = times.said_for(plan.mode)
        return PlanCheck(
            traffic_source=traffic.source,
            traffic_weight=traffic.total,
            times_source=times.source,
            warnings=(*unsure, *traffic.warnings),
            notes=(*traffic.notes, *notes),
            points=tuple(points),
            regret=regret,
            decode_regret=of_decode,
            uses=run.uses,
            verdict=times.doubt + verdict,
            slo_missed=missed,
        )

    # --- one plan ---------------------------------------------------------------------------------

    def _planned(
        self,
        config: Config,
        *,
        of_first: bool = False,
    ) -> PlannedGraphs:
        """The plan within the budget, which the graphs of a draft model count in; ``of_first``: for
        the first ``LARGE`` requests. Raises BudgetError where graphs save time, and none fits.
        """
        most = config.budget.max_graphs
        if most is None:
            return self._within_limits(config, of_first)

        @cache
        def planned_with(graphs: int) -> PlannedGraphs:
            bounded = config.with_values("budget", max_graphs=graphs)
            return self._within_limits(bounded, of_first)

        def num_graphs(graphs: int) -> int:
            return planned_with(graphs).plan.num_graphs

        graphs = most
        if num_graphs(most) > most:
            # the most that fit, or 1
            graphs = bisect_right(range(2, most), most, key=num_graphs) + 1
        planned = planned_with(graphs)
        # one size may take several graphs
        while not planned.plan.keys and graphs < planned.inputs.worthwhile:
            graphs += 1
            planned = planned_with(graphs)
        plan = planned.plan
        fewest = plan.num_graphs
        if fewest > most:
            raise BudgetError(
                f"budget.max_graphs is {most}, and one size takes {plan.graph_words}",
                remedy=f"Raise budget.max_graphs to {fewest} at least.",
            )
        budget = plan.budget | {"max_graphs": most}
        return planned.with_plan(budget=budget)

    def _within_limits(
        self,
        config: Config,
        of_first: bool,
    ) -> PlannedGraphs:
        """Without limits of memory and time, if they pay for it; absent, the limit of memory is
        what the graphs asked for take.
        """
        free = config.with_values("budget", memory=None, capture_time=None)
        planned = self._for_loads(free, of_first)
        if free.budget != config.budget:
            inputs = replace(planned.inputs, config=config)
            if inputs.pays_for(inputs.limits(0), planned.plan.keys):
                planned = replace(planned, inputs=inputs)
                planned = planned.with_plan(budget=budget_of(config))
            else:
                planned = self._for_loads(config, of_first)
        most = self._asked_bytes
        cost = planned.plan.predicted
        if cost is None or self.any_memory:
            return planned
        # without graphs asked for, no limit
        if most < MIB or cost.total_bytes <= most + MIB:
            return planned
        bounded = config.with_values("budget", memory=most + MIB)
        with suppress(BudgetError):
            return replace(self._for_loads(bounded, of_first), unlimited=planned)
        return planned

    def _for_loads(
        self,
        config: Config,
        of_first: bool,
    ) -> PlannedGraphs:
        """For steps as they are with the plan; with all graphs that vLLM captures."""
        others = self._others(config)

        def planned_for(steps: list[tuple[Traffic, float]], share: float) -> PlannedGraphs:
            inputs = PlanInputs(
                config,
                steps,
                self.times,
                self.costs,
                self.failed,
                self.insurance,
                [(other, share) for other in others] if share else (),
                one_list=self.one_list,
                today=self._today,
            )
            return plan_graphs(inputs)

        steps = self.steps(config, build_plan(config), of_first=True)
        if self._requests:  # the times of steps change their batches
            first = planned_for(steps, OTHER_SHARES[0])
            steps = self.steps(config, first.plan, of_first=of_first)
        planned = planned_for(steps, 0.0)
        longest = planned.run.expected_us * (1 + GIVEN_UP)
        for share in OTHER_SHARES if others else ():
            robust = planned_for(steps, share)
            if robust.run.expected_us <= longest:
                planned = robust
                break
        return planned.as_captured(others)

    def _others(self, config: Config) -> list[Traffic]:
        """Of a robust plan for one load: 2 and 4 times the load, and the p99 of decode of each."""
        if self.objective != "robust" or len(self.sources) > 1:
            return []
        if not self._higher:
            plan = build_plan(config)
            source, _ = self._first[0]
            loads = [self._simulated(config, plan, source)]
            if isinstance(source, RequestTrace):
                for speed in HIGHER_LOADS:
                    load = self._simulated(config, plan, source.hurried(speed))
                    loads.append(load.changed(source=f"{speed:g} times the load"))
            tails = [load.decode_p99() for load in loads]
            self._higher = [*loads[1:], *filter(None, tails)]
        return self._higher

    def steps(
        self,
        config: Config,
        plan: Plan,
        *,
        of_first: bool = False,
    ) -> list[tuple[Traffic, float]]:
        """Steps to plan for; requests are simulated with the step times of ``plan``."""
        sources = self._first if of_first else self.sources
        found = []
        for source, weight in sources:
            traffic = self._simulated(config, plan, source)
            found.append((traffic, weight))
        return found

    def _simulated(
        self,
        config: Config,
        plan: Plan,
        source: Source,
    ) -> Traffic:
        if isinstance(source, Traffic):
            return source.changed(apart=self.apart)
        bounds = SchedulerBounds.of(
            plan,
            accepted_tokens=config.speculative.accepted_tokens,
            mixes=config.scheduler.mixed_batches,
            kv_tokens=self.kv_tokens,
            ranks=self.replicas if config.distributed.data_parallel_sync else 1,
        )
        key = (id(source), plan.keys, bounds)
        if key not in self._known:
            clock = step_clock(plan, self.times, apart=self.apart)
            traffic = simulate(source, bounds, clock).changed(apart=self.apart)
            assert traffic.service
            run = Run(plan.lanes(), traffic, self.times)
            service = traffic.service.changed(unmeasured=run.unmeasured)
            self._known[key] = source, traffic.changed(service=service)
        return self._known[key][1]

    # --- the mode ---------------------------------------------------------------------------------

    def _weighed(self, config: Config) -> list[tuple[Config, PlannedGraphs]]:
        """The best plan of each mode that may be chosen, the mode with the shortest steps first."""
        found = []
        with suppress(BudgetError):
            asked = self._planned(config, of_first=self.any_mode)
            found.append((config, asked))
        own = build_plan(config).mode
        for mode in self._modes if self.any_mode else ():
            other = config.with_values("compilation", cudagraph_mode=mode)
            with suppress(BudgetError, ModeError, PlanError, StepTimeError):  # it is not planned
                if mode is not own and mode is build_plan(other).mode:
                    planned = self._planned(other, of_first=True)
                    found.append((other, planned))
        if not found:
            self._planned(config)  # raises the error of the mode asked for
        least = min(planned.run.expected_us for _, planned in found)
        longest = least * (1 + ALIKE)

        def place(pair: tuple[Config, PlannedGraphs]) -> tuple[bool, int]:
            _, planned = pair
            is_long = planned.run.expected_us > longest
            return is_long, planned.plan.num_graphs

        return sorted(found, key=place)

    def _mode_change(self, by_mode: ByMode, best: PlannedGraphs) -> Iterator[str]:
        assert self._today
        mode = self._today.mode
        asked, _ = by_mode.get(mode, (None, None))
        if best is asked:
            return
        hint = "--mode keep forbids it"
        if best.plan.mode.mixed_mode() is CUDAGraphMode.FULL:
            hint += ", as is right where FULL was timed in decode alone"
        change = "no graph of that fits"
        if asked:
            longer = best.run.expected_us / asked.run.expected_us - 1
            more = best.plan.num_graphs - asked.plan.num_graphs
            change = f"{more:+} graphs, steps {longer:+.2%}"
        yield f"mode {best.plan.mode}, not {mode}: {change}; {hint}"

    def _mode_notes(self, by_mode: ByMode, best: PlannedGraphs) -> Iterator[str]:
        if self._is_large:
            yield f"modes were weighed for the first {LARGE:,} requests"
        step = best.run.expected_us
        if self.times.full_of_decode and CUDAGraphMode.FULL not in by_mode:
            yield f"mode FULL was not weighed: {FULL_OF_DECODE}"
        for planned, miss in by_mode.values():
            if planned is not best:
                own = planned.run.expected_us
                longer = own / step - 1
                took = f"{format_microseconds(own)} a step ({longer:+.2%})"
                if self._requests:
                    took += " of its own batches"
                if miss and miss.holds:
                    took += ", the SLO holds"
                elif miss:
                    took += f", the SLO is missed: {miss.text}"
                yield f"mode {planned.plan.mode}: {planned.plan.num_graphs} graphs, {took}"

    # --- what requests get ------------------------------------------------------------------------

    def _service(
        self,
        config: Config,
        plan: Plan,
        requests: RequestTrace,
    ) -> Service:
        service = self._simulated(config, plan, requests).service
        assert service
        return service

    def _worst_miss(
        self,
        config: Config,
        plan: Plan,
    ) -> Miss:
        """For the worst load: the goals that it misses, else the one that it misses next.

        Raises TrafficError where no load has the times of a goal.
        """
        found = []
        without = {goal.name for goal in self.slo}
        for requests in self._requests:
            service = self._service(config, plan, requests)
            goals = [(-1.0, "no request has these times")]
            for goal in self.slo:
                time = goal.of(service)
                if time is not None:
                    without.discard(goal.name)
                    wanted = format_microseconds(goal.microseconds)
                    text = f"{goal.name} is {format_microseconds(time)}, {wanted} are asked for"
                    goals.append((time / goal.microseconds - 1, text))
            share, nearest = max(goals)
            missed = "; ".join(text for over, text in goals if over > 0)
            found.append(Miss(share, missed or nearest, requests, service))
        if without:
            listed = " and ".join(sorted(without))
            raise TrafficError(
                f"no step is decode alone, so {listed} cannot be judged",
                remedy="Give ttft_p50, ttft_p99, step_p50 or step_p99.",
            )
        return max(found, key=attrgetter("share"))

    def _for_slo(
        self,
        config: Config,
        weighed: Sequence[tuple[Config, PlannedGraphs]],
    ) -> list[Judged]:
        planned = weighed[0][1]
        miss = self._worst_miss(config, planned.plan)
        if miss.holds and self._worst_miss(config, build_plan(_eager(config))).holds:
            return [(planned, miss)]
        found = []
        least = MOST_FOR_SLO
        for pair in weighed[:1] if self._is_large else weighed:
            fewest, its = self._within_slo(*pair, least)
            if its.holds:
                least = min(least, fewest.plan.num_graphs)
            found.append((fewest, its))
        longest = planned.run.expected_us * (1 + SLOWER)
        best, *others = _fewest_first(found, longest)
        return [self._in_less_memory(*best, longest), *others]

    def _in_less_memory(
        self,
        planned: PlannedGraphs,
        miss: Miss,
        longest: float,
    ) -> Judged:
        """As many graphs in less memory, if short and costs are known."""
        misses, holds = 0, _bytes_of(planned)
        if not (miss.holds and holds and planned.run.expected_us <= longest):
            return planned, miss
        found = [(planned, miss)]
        config = planned.inputs.config
        for index in range(HALVINGS):
            self.progress(index, HALVINGS, f"{planned.plan.mode} in less memory")
            memory = (misses + holds) // 2
            if self._holds(
                config,
                longest,
                found,
                max_graphs=planned.plan.num_graphs,
                memory=memory,
            ):
                holds = memory
            else:
                misses = memory
        least, miss = _fewest_first(found, longest)[0]
        if least is not planned:
            least = replace(least, for_slo=True)
            least = least.with_plan(budget=planned.plan.budget)
        return least, miss

    def _holds(
        self,
        config: Config,
        longest: float,
        found: list[Judged],
        **limits: int,
    ) -> bool:
        """Whether a plan within limits, which joins ``found``, holds the SLO and is short."""
        try:
            made = self._planned(config.with_values("budget", **limits))
        except BudgetError:
            return False
        miss = self._worst_miss(config, made.plan)
        inputs = replace(made.inputs)  # without its curve
        found.append((replace(made, inputs=inputs), miss))
        return miss.holds and made.run.expected_us <= longest

    def _within_slo(
        self,
        config: Config,
        planned: PlannedGraphs,
        enough: int,
    ) -> Judged:
        """The fewest graphs that hold the SLO, if possible with steps little longer; else the plan
        as it is, or one that comes notably nearer. Where the most miss it, doublings are tried.
        """
        first = self._worst_miss(config, planned.plan)
        found = [(planned, first)]
        longest = planned.run.expected_us * (1 + SLOWER)

        most = config.budget.max_graphs or MOST_FOR_SLO
        if first.holds or self._holds(config, longest, found, max_graphs=most):
            enough = MOST_FOR_SLO
        last, _ = found[-1]
        most = min(enough, last.plan.num_graphs)
        numbers: Sequence[int] = range(1, most, 4 if self._is_large else 1)
        if not any(miss.holds for _, miss in found):
            numbers = [1 << power for power in range((most - 1).bit_length())]
        for index, graphs in enumerate(numbers):
            self.progress(index, len(numbers), f"{planned.plan.mode} within the SLO")
            if self._holds(config, longest, found, max_graphs=graphs):
                break
        self._tried += found
        fewest, miss = _fewest_first(found, longest)[0]
        if not miss.holds:
            other, nearest = min(found, key=lambda pair: pair[1].share)
            if 1 + nearest.share < (1 + first.share) * (1 - NOTABLE):
                return other, nearest
            return planned, first
        if fewest is planned:
            return planned, miss
        fewest = replace(fewest, for_slo=True)
        return fewest.with_plan(budget=planned.plan.budget), miss

    def _said_of_slo(self, planned: PlannedGraphs, miss: Miss) -> str:
        said = "holds without graphs, too; graphs worth it stay"
        if not miss.holds:
            plans = f"each of the {len(self._tried)} plans tried"
            said = f"is missed by {plans}: {miss.text}"
        elif self._tried:
            said = f"holds with {planned.plan.graph_words}, the fewest of those tried"
            fewest, _ = _fewest_first(self._tried, math.inf)[0]
            graphs = fewest.plan.num_graphs
            if graphs < planned.plan.num_graphs:
                longer = fewest.run.expected_us / planned.run.expected_us - 1
                said += (
                    f" with mean steps at most {SLOWER:.0%} longer than without it; with "
                    f"--max-graphs {graphs} it holds, too, with steps {longer:+.1%} against this "
                    "plan's"
                )
        share = miss.service.unmeasured
        if share:
            said += f"; {share:.2%} of the steps are extrapolated"
        return f"SLO {', '.join(map(str, self.slo))} {said}"

    def _points(
        self,
        config: Config,
        plan: Plan,
        miss: Miss | None,
    ) -> Iterator[ServicePoint]:
        shown = [source for source, _ in self._first if isinstance(source, RequestTrace)]
        if miss:
            shown = [miss.requests]
        eager = build_plan(_eager(config))
        load = shown[0].source if len(self._requests) > 1 else ""
        plans = {"plan": plan, ASKED_FOR: build_plan(config), "eager": eager}
        for name, other in plans.items() if shown else ():
            service = self._service(config, other, shown[0])
            yield ServicePoint(
                name=name,
                graphs=len(other.keys),
                service=service,
                load=load,
            )

    def _memory_notes(self, planned: PlannedGraphs) -> Iterator[str]:
        cost = planned.plan.predicted
        if cost is None:
            return
        unlimited = planned.unlimited
        if unlimited and unlimited.plan.predicted:
            shorter = 1 - unlimited.run.expected_us / planned.run.expected_us
            most = format_bytes(self._asked_bytes)
            if shorter > 0:
                free = format_bytes(unlimited.plan.predicted.total_bytes)
                yield (
                    f"memory is kept to that of the graphs asked for, {most}; with --memory none "
                    f"{free}, and steps {shorter:.2%} shorter"
                )
        more = cost.total_bytes - self._asked_bytes
        if abs(more) < MIB or not self.kv_token_bytes:
            return
        tokens = abs(more) // self.kv_token_bytes
        taken = "less"
        left = "more"
        if more > 0:
            taken = "more"
            left = "fewer"
        size = format_bytes(abs(more))
        text = f"{size} {taken} than the graphs asked for are {tokens:,} tokens of KV cache"
        if self.kv_tokens:
            share = tokens / self.kv_tokens
            text += f", {share:.1%} {left}"
        yield text


def _fewest_first(found: Sequence[Judged], longest: float) -> list[Judged]:

    def place(pair: Judged) -> tuple[int, int, int]:
        planned, miss = pair
        if not miss.holds:
            return 2, 0, 0
        is_long = planned.run.expected_us > longest
        return int(is_long), planned.plan.num_graphs, _bytes_of(planned)

    return sorted(found, key=place)


def _bytes_of(planned: PlannedGraphs) -> int:
    cost = planned.plan.predicted
    return cost.total_bytes if cost else 0


def _eager(config: Config) -> Config:
    return config.with_values("compilation", cudagraph_mode=CUDAGraphMode.NONE)
