"""What `cgplan plan` decides besides sizes: the mode, and the fewest graphs that hold an SLO."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from cgplan.cli.costs import Priced
from cgplan.cli.options import Loads, ModeChoice, Objective
from cgplan.config import Config, with_values
from cgplan.errors import BudgetError, ModeError, PlanError, StepTimeError, TrafficError
from cgplan.modes import CUDAGraphMode
from cgplan.optimizer.evidence import ASKED_FOR, ServicePoint
from cgplan.optimizer.lanes import Run
from cgplan.optimizer.propose import ALIKE, Case, Request, choose
from cgplan.planning import Plan, build_plan
from cgplan.traffic.histogram import Service, Traffic
from cgplan.traffic.simulation import (
    RequestTrace,
    SchedulerBounds,
    StepClock,
    simulate,
)
from cgplan.traffic.step_times import FULL_OF_DECODE, StepTimes
from cgplan.units import counted, format_bytes, format_microseconds

if TYPE_CHECKING:
    Source = Traffic | RequestTrace

INSURANCE = 0.1  # if none is asked for
HIGHER_LOADS = (2.0, 4.0)  # of a robust plan
OTHER_SHARES = (0.1, 0.05, 0.025)  # of the steps, for each other load; the first that
GIVEN_UP = 0.003  # makes the mean step of the load itself at most so much longer
# requests, beyond which less is shown and tried; first plans and modes are of so many
LARGE = 200_000
MOST = 128  # graphs that an SLO is tried with
# Changes of a figure by other bounds: worth a word, too large a loss, and none
NOTABLE = 0.05
MOST_LOSS = 0.1
SAME = 0.01
MODES = [
    CUDAGraphMode.FULL_DECODE_ONLY,
    CUDAGraphMode.FULL,
    CUDAGraphMode.PIECEWISE,
    CUDAGraphMode.FULL_AND_PIECEWISE,
]


class Miss(NamedTuple):
    """How far a plan is from one goal of an SLO.

    Attributes:
        share: Of the goal; 0 or less: it holds.
        text: The times found, and the goals.
        requests: The load, and with ``service`` what its requests get.
    """

    share: float
    text: str
    requests: RequestTrace
    service: Service

    @property
    def holds(self) -> bool:
        return self.share <= 0


class Planner:
    """Plans for one set of loads.

    Args:
        sources: Steps or requests, with their weights.
        one_list: As in ``Request``.
        apart: As in Traffic.
    """

    def __init__(
        self,
        loads: Loads,
        times: StepTimes,
        priced: Priced,
        sources: Sequence[tuple[Source, float]],
        *,
        one_list: bool = False,
        apart: bool = False,
    ) -> None:
        self._loads = loads
        self._times = times
        self._priced = priced
        self._sources = sources
        self._one_list = one_list
        self._apart = apart
        self._higher = list[Traffic]()
        self._today: Plan | None = None
        self._modes = MODES
        if apart or times.full_of_decode:  # FULL graphs run decode alone
            self._modes = [mode for mode in MODES if mode.mixed_mode() is not CUDAGraphMode.FULL]
        self._first: list[Source] = []
        for source, _ in sources:
            first = source if isinstance(source, Traffic) else source.first(LARGE)
            self._first.append(first)
        self._known: dict[Any, tuple[Source, Traffic]] = {}  # simulated, by the source's id

    @property
    def _is_large(self) -> bool:
        return any(len(trace.requests) > LARGE for trace in self._requests)

    @property
    def _requests(self) -> list[RequestTrace]:
        """The loads of requests."""
        return [source for source, _ in self._sources if isinstance(source, RequestTrace)]

    def decide(self, config: Config) -> Plan:
        """The plan, in the best mode if it may be chosen, with the fewest graphs that hold the SLO.

        Raises TrafficError and StepTimeError where an SLO needs more than was given.
        """
        self._check_slo()
        asked = config
        self._today = build_plan(asked)
        notes = list[str]()
        is_best = self._loads.mode is ModeChoice.best
        if is_best:
            config, plan, notes = self._best_mode(config)
        if not is_best or self._is_large:
            plan = self.plan(config)
        miss = None
        if self._loads.slo:
            miss = self._worst_miss(config, plan)
            said = "holds without graphs, too; those worth it stay"
            if not miss.holds or not self._worst_miss(config, build_plan(_eager(config))).holds:
                plan, miss = self._within_slo(config, plan, miss)
                said = f"is missed with each number of graphs tried: {miss.text}"
                if miss.holds:
                    graphs = counted(len(plan.keys), "graph")
                    said = f"holds with {graphs}, the fewest of those tried"
            share = miss.service.unmeasured
            if share:
                said += f"; {share:.2%} of the steps are extrapolated"
            notes.append(f"SLO {', '.join(map(str, self._loads.slo))} {said}")
        return self._with_service(asked, plan, notes, miss)

    # --- one plan ---------------------------------------------------------------------------------

    def plan(self, config: Config, *, of_first: bool = False) -> Plan:
        """The plan within the budget, which the graphs of a draft model count in; ``of_first``: for
        the first ``LARGE`` requests.
        """
        most = config.budget.max_graphs
        plan = self._plan(config, of_first=of_first)
        if most is None or plan.num_graphs <= most:
            return plan
        low = 0
        high = most
        fits: Plan | None = None
        while high - low > 1:
            middle = (low + high) // 2
            bounded = with_values(config, "budget", max_graphs=middle)
            plan = self._plan(bounded, of_first=of_first)
            if plan.num_graphs <= most:
                fits = plan
                low = middle
            else:
                high = middle
        if fits is None:
            raise BudgetError(
                f"budget.max_graphs is {most}, and one size takes {plan.num_graphs} graphs, those "
                "of the draft model included",
                remedy=f"Allow {plan.num_graphs} graphs.",
            )
        return fits.model_copy(update={"budget": {**fits.budget, "max_graphs": most}})

    def _plan(self, config: Config, *, of_first: bool) -> Plan:
        plan = self._chosen(config, of_first=of_first)
        if config.compilation.key_rules == "vllm_v2":
            return self._as_engine_captures(config, plan)
        return plan

    def _chosen(self, config: Config, *, of_first: bool) -> Plan:
        loads = self._loads
        options: dict[str, Any] = {
            "insurance": INSURANCE if loads.insurance is None else loads.insurance,
            "worst": loads.objective is Objective.worst,
            "one_list": self._one_list,
            "today": self._today,
        }
        known = self._times, self._priced.costs, self._priced.failed
        others = self._others(config)

        def chosen_for(steps: list[tuple[Traffic, float]], share: float) -> Case:
            beside = [(other, share) for other in others] if share else ()
            return choose(Request(config, steps, *known, beside=beside, **options))

        steps = self.steps(config, build_plan(config), of_first=True)
        if self._requests:  # the times of steps change their batches
            chosen = chosen_for(steps, OTHER_SHARES[0])
            steps = self.steps(config, chosen.plan, of_first=of_first)
        best = chosen_for(steps, 0.0)
        longest = best.run.expected_us * (1 + GIVEN_UP)
        for share in OTHER_SHARES if others else ():
            robust = chosen_for(steps, share)
            if robust.run.expected_us <= longest:
                return robust.proposal().plan
        plan = best.proposal().plan
        if others:
            note = (
                "2 and 4 times the load were not planned for: the step would be more than "
                f"{GIVEN_UP:.1%} longer; --scale 1,2,4 --objective worst plans for them"
            )
            plan = plan.model_copy(update={"notes": (*plan.notes, note)})
        return plan

    def _others(self, config: Config) -> list[Traffic]:
        """Of a robust plan for one load: 2 and 4 times the load, and the p99 of decode of each."""
        if self._loads.objective is not Objective.robust or len(self._sources) > 1:
            return []
        if not self._higher:
            plan = build_plan(config)
            source = self._first[0]
            loads = [self._simulated(config, plan, source)]
            if isinstance(source, RequestTrace):
                for speed in HIGHER_LOADS:
                    load = self._simulated(config, plan, source.hurried(speed))
                    loads.append(load.model_copy(update={"source": f"{speed:g} times the load"}))
            tails = [load.decode_p99() for load in loads]
            self._higher = [*loads[1:], *filter(None, tails)]
        return self._higher

    def _as_engine_captures(
        self,
        config: Config,
        plan: Plan,
    ) -> Plan:
        """The graphs that vLLM's model runner V2 captures for the sizes of a plan."""
        if not plan.capture_sizes:
            return plan
        sizes = with_values(
            config,
            "compilation",
            cudagraph_capture_sizes=plan.capture_sizes,
            max_cudagraph_capture_size=None,
        )
        built = build_plan(sizes)
        found: dict[str, Any] = {
            "draft_prefill_keys": built.draft_prefill_keys,
            "draft_decode_keys": built.draft_decode_keys,
        }
        if set(built.keys) != set(plan.keys) and self._one_list:
            costs = self._priced.costs
            found |= {"keys": built.keys, "predicted": costs and costs.of(built.keys)}
        return plan.model_copy(update=found)

    def steps(
        self,
        config: Config,
        plan: Plan,
        *,
        of_first: bool = False,
    ) -> list[tuple[Traffic, float]]:
        """Steps to plan for; requests are simulated with the step times of ``plan``."""
        found = []
        for (source, weight), first in zip(self._sources, self._first, strict=True):
            traffic = self._simulated(config, plan, first if of_first else source)
            found.append((traffic, weight))
        return found

    def _simulated(
        self,
        config: Config,
        plan: Plan,
        source: Source,
    ) -> Traffic:
        marked = {"apart": self._apart}
        if isinstance(source, Traffic):
            return source.model_copy(update=marked)
        bounds = SchedulerBounds.of(
            plan,
            accepted_tokens=config.speculative.accepted_tokens,
            mixes=config.scheduler.mixed_batches,
            kv_tokens=self._loads.kv_cache_tokens,
            ranks=self._loads.replicas if config.distributed.data_parallel_sync else 1,
        )
        key = (id(source), plan.keys, bounds)
        if key not in self._known:
            clock = StepClock(plan, self._times, apart=self._apart)
            traffic = simulate(source, bounds, clock)
            traffic = traffic.model_copy(update=marked)
            assert traffic.service is not None
            run = Run(plan.keys, traffic, self._times)
            known = {"unmeasured": run.unmeasured()}
            service = traffic.service.model_copy(update=known)
            traffic = traffic.model_copy(update={"service": service})
            self._known[key] = source, traffic
        return self._known[key][1]

    # --- the mode ---------------------------------------------------------------------------------

    def _best_mode(
        self,
        config: Config,
    ) -> tuple[Config, Plan, list[str]]:
        """The mode with the shortest steps; of those within 0.1% the one with the fewest graphs."""
        asked = self.plan(config, of_first=True)
        found = [(config, asked)]
        for mode in self._modes:
            other = with_values(config, "compilation", cudagraph_mode=mode)
            try:
                if mode is asked.mode or build_plan(other).mode is not mode:
                    continue
                found.append((other, self.plan(other, of_first=True)))
            except (BudgetError, ModeError, PlanError, StepTimeError):
                continue  # it cannot be planned
        least = min(_expected(plan) for _, plan in found)
        alike = [pair for pair in found if _expected(pair[1]) <= least * (1 + ALIKE)]
        chosen, best = min(alike, key=lambda pair: pair[1].num_graphs)
        notes = list[str]()
        if self._is_large:
            notes.append(f"modes were weighed for the first {LARGE:,} requests")
        if best is not asked:
            notes.append(
                f"mode {best.mode}, not {asked.mode}: "
                f"{counted(best.num_graphs, 'graph')} instead of {asked.num_graphs}, steps "
                f"{_expected(best) / _expected(asked) - 1:+.2%}; --mode keep forbids it"
            )
        weighed = [plan.mode for _, plan in found]
        if self._times.full_of_decode and CUDAGraphMode.FULL not in weighed:
            notes.append(f"mode FULL was not weighed: {FULL_OF_DECODE}")
        for _, plan in found:
            if plan is not best:
                longer = _expected(plan) / _expected(best) - 1
                step = format_microseconds(_expected(plan))
                graphs = counted(plan.num_graphs, "graph")
                notes.append(f"mode {plan.mode}: {graphs}, {step} a step ({longer:+.2%})")
        return chosen, best, notes

    # --- what requests get ------------------------------------------------------------------------

    def _check_slo(self) -> None:
        if not self._loads.slo:
            return
        for source, _ in self._sources:
            if isinstance(source, Traffic):
                raise TrafficError(
                    f"an SLO is about requests, and a load counts steps: {source.source}",
                    remedy="Give --traffic FILE with requests: arrivals, prompts, generated "
                    "tokens.",
                )
        if self._loads.step_times is None:
            raise StepTimeError(
                "an SLO needs the step times of your model, and the default ones are of another",
                remedy="Give --step-times FILE: eager steps and graphs by size, at contexts as "
                "long as your requests'.",
            )

    def _service(
        self,
        config: Config,
        plan: Plan,
        requests: RequestTrace,
    ) -> Service:
        service = self._simulated(config, plan, requests).service
        assert service is not None
        return service

    def _worst_miss(
        self,
        config: Config,
        plan: Plan,
    ) -> Miss:
        """Of the load that comes nearest to a miss: all goals missed, else the nearest."""
        found = list[Miss]()
        for requests in self._requests:
            service = self._service(config, plan, requests)
            goals = [(-1.0, "no request has these times")]
            for goal in self._loads.slo or ():
                time = goal.of(service)
                if time is not None:
                    wanted = format_microseconds(goal.microseconds)
                    text = f"{goal.name} is {format_microseconds(time)}, {wanted} are asked for"
                    goals.append((time / goal.microseconds - 1, text))
            share, nearest = max(goals)
            missed = "; ".join(text for over, text in goals if over > 0)
            found.append(Miss(share, missed or nearest, requests, service))
        return max(found, key=attrgetter("share"))

    def _within_slo(
        self,
        config: Config,
        plan: Plan,
        first: Miss,
    ) -> tuple[Plan, Miss]:
        """The plan with the fewest graphs of those tried, by halving, that hold the SLO. If none
        does, the plan as it is, or one that comes notably nearer.
        """
        found = [(plan, first)]

        def holds_with(graphs: int) -> bool:
            try:
                made = self.plan(with_values(config, "budget", max_graphs=graphs))
            except BudgetError:
                return False
            miss = self._worst_miss(config, made)
            found.append((made, miss))
            return miss.holds

        most = config.budget.max_graphs or MOST
        if not first.holds and not holds_with(most):
            other, nearest = min(found, key=lambda pair: pair[1].share)
            if 1 + nearest.share < (1 + first.share) * (1 - NOTABLE):
                return other, nearest
            return plan, first
        low = 0
        high = plan.num_graphs if first.holds else most
        while high - low > 1:
            middle = (low + high) // 2
            if holds_with(middle):
                high = middle
            else:
                low = middle
        held = [pair for pair in found if pair[1].holds]
        fewest, miss = min(held, key=lambda pair: pair[0].num_graphs)
        if fewest is plan:
            return plan, miss
        number = "budget.max_graphs in what follows is that number"
        rule = f"the fewest graphs of those tried with which the SLO holds; {number}"
        evidence = {**(fewest.evidence or {}), "rule": rule}
        return fewest.model_copy(update={"budget": plan.budget, "evidence": evidence}), miss

    def _with_service(
        self,
        config: Config,
        plan: Plan,
        notes: list[str],
        miss: Miss | None,
    ) -> Plan:
        """The plan with what requests get, and why it is as it is."""
        points = [point.model_dump(mode="json") for point in self._points(config, plan, miss)]
        if miss is not None and len(self._requests) > 1:
            notes.append(f"of {len(self._requests)} loads {miss.requests.source}: {miss.text}")
        notes += self._as_kv_cache(config, plan)
        notes += self._other_bounds(config, self._shown(miss))
        if plan.draft_keys:
            notes.append(
                f"vLLM captures {counted(len(plan.draft_keys), 'graph')} of the draft model "
                "besides; max_graphs counts them, costs and step times do not"
            )
        decided = {
            "service": points,
            "slo_missed": None if miss is None or miss.holds else miss.text,
            "decisions": notes,
        }
        return plan.model_copy(update={"evidence": {**(plan.evidence or {}), **decided}})

    def _points(
        self,
        config: Config,
        plan: Plan,
        miss: Miss | None,
    ) -> Iterator[ServicePoint]:
        requests = self._shown(miss)
        if requests is None:
            return
        eager = build_plan(_eager(config))
        plans = {"plan": plan, ASKED_FOR: build_plan(config), "eager": eager}
        for name, other in plans.items():
            service = self._service(config, other, requests)
            yield ServicePoint(name=name, graphs=len(other.keys), service=service)

    def _shown(self, miss: Miss | None) -> RequestTrace | None:
        """The load whose requests are shown."""
        if miss is not None:
            return miss.requests
        if self._requests and len(self._requests[0].requests) <= LARGE:
            return self._requests[0]
        return None

    def _other_bounds(
        self,
        config: Config,
        requests: RequestTrace | None,
    ) -> Iterator[str]:
        """Half and double the bounds of the scheduler, where these requests are served better."""
        if requests is None or len(requests.requests) > LARGE:
            if self._requests:
                yield f"other bounds were not tried, with more than {LARGE:,} requests"
            return
        plan = build_plan(config)
        traffic = self._simulated(config, plan, requests)
        tokens, reqs, *_ = traffic.columns.max(axis=1)
        for name, largest in (("max_num_seqs", reqs), ("max_num_batched_tokens", tokens)):
            bound = getattr(plan, name)
            for value in (bound // 2, 2 * bound):
                if not value or largest < min(bound, value + 1):
                    continue  # no step would be another one
                bounded = with_values(config, "scheduler", **{name: value})
                try:
                    other = build_plan(bounded)
                except (ModeError, PlanError):
                    continue
                gains = _gains(
                    self._service(config, plan, requests),
                    self._service(bounded, other, requests),
                )
                if gains:
                    yield f"{name} {value} instead of {bound}: {gains}"

    def _as_kv_cache(
        self,
        config: Config,
        plan: Plan,
    ) -> Iterator[str]:
        """What the memory that the plan saves or takes is worth as KV cache."""
        costs = self._priced.costs
        each = self._loads.kv_token_bytes or self._priced.kv_token_bytes
        if costs is None or not each or plan.predicted is None:
            return
        asked = costs.of(build_plan(config).keys)
        more = plan.predicted.total_bytes - asked.total_bytes
        if not more:
            return
        tokens = abs(more) // each
        text = (
            f"{format_bytes(abs(more))} {'more' if more > 0 else 'less'} than the graphs asked for "
            f"are {tokens:,} tokens of KV cache"
        )
        if self._loads.kv_cache_tokens:
            share = tokens / self._loads.kv_cache_tokens
            text += f", {share:.1%} {'fewer' if more > 0 else 'more'}"
        yield text


def _eager(config: Config) -> Config:
    return with_values(config, "compilation", cudagraph_mode=CUDAGraphMode.NONE)


def _gains(now: Service, other: Service) -> str:
    """How figures change if one of them gets notably better, and none loses half as much."""
    rows = [
        ("TTFT p99", now.ttft_us.p99, other.ttft_us.p99, format_microseconds),
        ("tokens/s", now.tokens_per_s, other.tokens_per_s, "{:.0f}".format),
    ]
    if now.tpot_us and other.tpot_us:
        rows.append(("TPOT p99", now.tpot_us.p99, other.tpot_us.p99, format_microseconds))
    told = []
    alike = []
    gain = loss = 0.0
    for name, before, after, write in rows:
        change = after / before - 1
        if abs(change) > SAME:
            told.append(f"{name} {write(after)} instead of {write(before)}")
        else:
            alike.append(name)
        if name == "tokens/s":
            change = before / after - 1
        gain = max(gain, -change)
        loss = max(loss, change)
    if gain < NOTABLE or loss > min(gain / 2, MOST_LOSS):
        return ""
    if alike:
        told.append(f"{' and '.join(alike)} the same")
    if other.unmeasured > now.unmeasured:
        told.append(f"{other.unmeasured:.1%} of its steps extrapolated")
    return ", ".join(told)


def _expected(plan: Plan) -> float:
    expected = plan.expected_us
    assert expected is not None
    return expected
