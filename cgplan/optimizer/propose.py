"""From traffic, step times and costs to a plan, with the evidence for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType

from cgplan.config import Config
from cgplan.errors import BudgetError, PlanError
from cgplan.modes import Key
from cgplan.optimizer.curve import WORTH, Curve
from cgplan.optimizer.evidence import Evidence
from cgplan.optimizer.explain import Case
from cgplan.optimizer.lanes import Run, lanes_of
from cgplan.optimizer.problem import problem_of
from cgplan.optimizer.search import MOST, Limits, best_plan
from cgplan.planning.build import LADDERS, build_plan
from cgplan.planning.costs import GraphCosts, Record
from cgplan.planning.plan import PLANNED_FOR, Lane, Plan, capture_config, config_hash
from cgplan.traffic.histogram import Traffic
from cgplan.traffic.step_times import StepTimes
from cgplan.units import format_bytes


class Proposal(Record):
    """A plan and why it is as it is; ``plan.evidence`` holds the same in JSON."""

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

    The capture sizes of ``config`` are only compared with. Without ``costs``, only ``budget.max_graphs`` bounds the
    plan. Keys in ``failed`` could not be captured, with the reason: the plan does without them, and says so.

    Raises:
        ModeError, PlanError: as ``build_plan`` does.
        StepTimeError: times of a mode are missing.
        BudgetError: the budget does not pay for a single graph.
    """
    sizes, budget = config.compilation.cudagraph_capture_sizes, config.budget
    base = build_plan(_with_sizes(config, (config.query_len,)))  # all but the keys
    base = base.model_copy(
        update={"config_hash": config_hash(config), "config": capture_config(config), "warnings": ()}
    )
    lanes = lanes_of(base.mode, times.told_apart(base.lora_cases))
    problem = problem_of(lanes, traffic, times, base, costs, failed)
    curve = Curve.of(problem, base, costs, budget.max_graphs)
    memory, seconds = (budget.memory, budget.capture_time) if costs is not None else (None, None)
    limits = Limits(min(budget.max_graphs or MOST, MOST), memory, seconds)
    bounded = (budget.max_graphs, memory, seconds) != (None, None, None)
    if bounded:
        _check_one_graph(limits, curve)
    else:
        enough = curve.enough()
        limits = Limits(curve.last() if enough is None else enough)
    best = best_plan(problem, limits, tolerance=WORTH)
    if bounded and (budget.max_graphs or MOST + 1) > MOST:
        least = problem.cheapest(MOST + 1)
        if math.isfinite(least[0]) and limits.pays_for(MOST, *least):  # the budget has room for more than are planned
            best = replace(best, bound=min(best.bound, problem.infinite_us * problem.weight))
    keys = curve.keys_of(best.chosen)
    run = Run(keys, traffic, times)
    used = {(use.lane, use.size) for use in run.uses}
    keys = tuple(key for key in keys if (Lane.of(*key), key[1].num_tokens) in used)
    plan = base.model_copy(
        update={
            "capture_sizes": tuple(sorted({descriptor.num_tokens for _, descriptor in keys})),
            "sizes_source": f"{PLANNED_FOR} {traffic.source}",
            "keys": keys,
            "predicted": costs and costs.of(keys),
        }
    )
    asked = "configured" if isinstance(sizes, tuple) else sizes or "vllm"
    evidence = Case(plan, curve, bounded, best, run, failed, dict(_ladders(config)), asked).evidence()
    plan = plan.model_copy(update={"evidence": evidence.model_dump(mode="json")})
    return Proposal(plan=Plan.model_validate(plan.model_dump()), evidence=evidence)


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
    if not paid or any(limits.pays_for(*cost) for cost in paid):
        return
    (_, memory, seconds), single = min(zip(paid, singles, strict=True), key=lambda pair: pair[0][1:])
    ((mode, descriptor),) = curve.keys_of(single)
    wrong, enough = [], []
    if limits.memory is not None and memory > limits.memory:
        wrong.append(f"budget.memory is {format_bytes(int(limits.memory))}")
        unit, name = (2**10, "KiB") if memory < 2**20 else (2**20, "MiB")
        enough.append(f"budget.memory to {-(-memory // unit):.0f}{name}")
    if limits.seconds is not None and seconds > limits.seconds:
        wrong.append(f"budget.capture_time is {limits.seconds:.3g} s")
        enough.append(f"budget.capture_time to {seconds * 1.01:.3g}s")
    assert curve.costs is not None, "without costs a graph costs nothing"
    raise BudgetError(
        f"{' and '.join(wrong)}, but the smallest graph, {mode} {descriptor}, takes {format_bytes(int(memory))} (pool, "
        f"static buffers, workspaces and driver) and {seconds:.3g} s; by costs {curve.costs.source}, between and "
        "beyond whose sizes they are interpolated",
        remedy=f"Raise {' and '.join(enough)} at least, or set compilation.cudagraph_mode: NONE. `cgplan capture` with "
        "that size alone in compilation.cudagraph_capture_sizes shows what it really takes.",
    )
