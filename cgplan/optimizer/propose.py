"""From traffic, step times and costs to a plan, with the evidence for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict

from cgplan.config import Config
from cgplan.errors import BudgetError, PlanError
from cgplan.modes import Key
from cgplan.optimizer.curve import MOST, WORTH, Curve
from cgplan.optimizer.evidence import Evidence
from cgplan.optimizer.explain import Case
from cgplan.optimizer.lanes import lanes_of, serve
from cgplan.optimizer.problem import problem_of
from cgplan.optimizer.search import Best, Limits, best_plan
from cgplan.planning.build import LADDERS, build_plan
from cgplan.planning.costs import GraphCosts
from cgplan.planning.plan import PLANNED_FOR, Plan, capture_config, config_hash
from cgplan.traffic.histogram import Traffic
from cgplan.traffic.step_times import StepTimes


class Proposal(BaseModel):
    """A plan and why it is as it is; ``plan.evidence`` holds the same in JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: Plan
    evidence: Evidence


def propose(
    config: Config,
    traffic: Traffic,
    times: StepTimes,
    costs: GraphCosts | None = None,
    failed: Mapping[Key, str] = MappingProxyType({}),
) -> Proposal:
    """The plan with the shortest expected step for this traffic inside ``config.budget``.

    All lanes (modes x LoRA cases) are planned together; a lane without sizes leaves its batches to the next one. With
    a budget it is the best plan that the budget pays for, less graphs that together bring under 0.01%. Without one it
    is the one with the fewest graphs that bring 99% of what a graph for every size would bring over eager steps.

    LoRA cases whose step times are not told apart are planned as one, the largest of them. A key counts as one graph,
    also where it has several segments (PIECEWISE). ``budget.reserve`` bounds a capture, not a plan.

    Args:
        config: Mode, bounds of a batch, LoRA, budget; its capture sizes are only compared with.
        traffic: The batches to plan for.
        times: How long steps take.
        costs: Memory and seconds of graphs; None: not known, so that only ``budget.max_graphs`` bounds the plan.
        failed: Keys that could not be captured, and why: the plan does without them, and says so.

    Raises:
        ModeError, PlanError: as ``build_plan`` does.
        StepTimeError: times of a mode are missing.
        BudgetError: the budget does not pay for a single graph.
    """
    base = _without_keys(config)
    lanes = lanes_of(base.mode, times.told_apart(base.lora_cases))
    problem = problem_of(lanes, traffic, times, base, costs, failed)
    curve = Curve.of(problem, base, costs, config.budget.max_graphs)
    limits = _limits(config, costs)
    if limits is not None:
        _check_one_graph(limits, curve, costs)
    best = _best(limits, curve, config.budget.max_graphs)
    keys = curve.keys_of(best.chosen)
    served = serve(keys, traffic, times)
    used = {(part.lane, part.size) for part in served}
    keys = tuple(key for key in keys if ((key[0], key[1].uniform, key[1].num_active_loras), key[1].num_tokens) in used)
    plan = base.model_copy(
        update={
            "capture_sizes": tuple(sorted({descriptor.num_tokens for _, descriptor in keys})),
            "sizes_source": f"{PLANNED_FOR} {traffic.source}",
            "keys": keys,
            "predicted": costs and costs.of(keys),
        }
    )
    sizes, ladders = config.compilation.cudagraph_capture_sizes, dict(_ladders(config))
    asked = "configured" if isinstance(sizes, tuple) else sizes or "vllm"
    evidence = Case(plan, traffic, times, costs, curve, limits, best, served, failed, ladders, asked).evidence()
    plan = plan.model_copy(update={"evidence": evidence.model_dump(mode="json")})
    return Proposal(plan=Plan.model_validate(plan.model_dump()), evidence=evidence)


def _without_keys(config: Config) -> Plan:
    """A plan with all but the keys, whatever sizes the configuration lists."""
    one = {"cudagraph_capture_sizes": (config.query_len,), "max_cudagraph_capture_size": None}
    bare = config.model_copy(update={"compilation": config.compilation.model_copy(update=one)})
    of_config = {"config_hash": config_hash(config), "config": capture_config(config), "warnings": ()}
    return build_plan(bare).model_copy(update=of_config)


def _ladders(config: Config) -> Iterator[tuple[str, Plan]]:
    """Plans of the sizes that the configuration lists and of each ladder that fits it, by name."""
    asked = config.compilation
    listed = isinstance(asked.cudagraph_capture_sizes, tuple)
    for name in ("configured", *LADDERS) if listed else LADDERS:
        sizes: dict[str, str | None] = {"cudagraph_capture_sizes": name}
        if listed:
            sizes["max_cudagraph_capture_size"] = None
        changed = asked if name == "configured" else asked.model_copy(update=sizes)
        with suppress(PlanError):
            yield name, build_plan(config.model_copy(update={"compilation": changed}))


def _limits(config: Config, costs: GraphCosts | None) -> Limits | None:
    """The budget, None if there is none."""
    budget = config.budget
    known = costs is not None
    limits = Limits(
        graphs=min(budget.max_graphs or MOST, MOST),
        memory=budget.memory if known else None,
        seconds=budget.capture_time if known else None,
    )
    return None if budget.max_graphs is None and (limits.memory, limits.seconds) == (None, None) else limits


def _best(limits: Limits | None, curve: Curve, most: int | None) -> Best:
    """The plan that the budget or the rule without one asks for. Where the budget pays for more graphs than are planned
    for, the bound is lower.
    """
    problem = curve.problem
    if not problem.lanes:
        return Best((), problem.eager_total, problem.eager_total)
    if limits is not None:
        best = best_plan(problem, limits, tolerance=WORTH)
        asked = most is not None and most <= limits.graphs
        memory, seconds = problem.cheapest(limits.graphs + 1)
        if asked or math.isinf(memory) or not limits.pays_for(limits.graphs, memory, seconds):
            return best
        return replace(best, bound=min(best.bound, problem.infinite_us * problem.weight))
    graphs = curve.enough()
    if graphs is None:
        graphs = curve.fewest(curve.expected_us(curve.graphs) * (1 + WORTH)) or 0
    return best_plan(curve.problem, Limits(graphs), tolerance=WORTH)


def _check_one_graph(limits: Limits, curve: Curve, costs: GraphCosts | None) -> None:
    """Raises BudgetError if no graph at all can be paid for."""
    problem, lanes = curve.problem, range(len(curve.problem.lanes))
    singles = [
        tuple((index,) if lane == at else () for lane in lanes)
        for at in lanes
        for index in range(1, problem.lanes[at].sizes.size)
    ]
    paid = {single: problem.costs_of(single) for single in singles}
    if not paid or any(limits.pays_for(*cost) for cost in paid.values()):
        return
    single, (_, memory, seconds) = min(paid.items(), key=lambda item: item[1][1:])
    ((mode, descriptor),) = curve.keys_of(single)
    wrong, enough = [], []
    if limits.memory is not None and memory > limits.memory:
        wrong.append(f"budget.memory is {_in_bytes(limits.memory)}")
        small = memory < 2**20
        enough.append(f"budget.memory to {-(-memory // (2**10 if small else 2**20)):.0f}{'KiB' if small else 'MiB'}")
    if limits.seconds is not None and seconds > limits.seconds:
        wrong.append(f"budget.capture_time is {limits.seconds:.3g} s")
        enough.append(f"budget.capture_time to {seconds * 1.01:.3g}s")
    source = f"; by costs {costs.source}, between and beyond whose sizes they are interpolated" if costs else ""
    raise BudgetError(
        f"{' and '.join(wrong)}, but the smallest graph, {mode} {descriptor}, takes {_in_bytes(memory)} (pool, "
        f"static buffers, workspaces and driver) and {seconds:.3g} s{source}",
        remedy=f"Raise {' and '.join(enough)} at least, or set compilation.cudagraph_mode: NONE. `cgplan capture` with "
        "that size alone in compilation.cudagraph_capture_sizes shows what it really takes.",
    )


def _in_bytes(amount: float) -> str:
    unit, name = next(((u, n) for u, n in ((2**20, "MiB"), (2**10, "KiB")) if amount >= u), (1, "bytes"))
    return f"{amount / unit:.4g} {name}"
