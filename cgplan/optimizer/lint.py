"""Lint: batches that fall off a cliff, and graphs that no batch needs. Each rule gives sentences with figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from cgplan.modes import CUDAGraphMode
from cgplan.optimizer.lanes import Routes, Served, lanes_of, largest_of, serve, stride_of
from cgplan.planning.plan import Lane, Plan
from cgplan.traffic.histogram import StepShape, Traffic
from cgplan.traffic.step_times import StepTimes

CLIFF = 1.05  # eager over graph, from which on it is worth a word
WIDE = 0.25  # padding, as a share of the tokens that run
FINE = 8  # requests; a step of so many is not called wide, the ladders' own are
MOST_STEPS = 3  # of a lane that are named
SELDOM = 0.005  # share of the steps, or of their time, below which padding does not matter


def lint(plan: Plan, traffic: Traffic, times: StepTimes) -> tuple[str, ...]:
    """All warnings about a plan for this traffic.

    Raises:
        StepTimeError: times of a mode that the plan uses are missing.
    """
    served = serve(plan.keys, traffic, times)
    return (
        *traffic_cliffs(plan, traffic, times),
        *scheduler_cliffs(plan, traffic, times),
        *beyond_the_scheduler(plan, traffic),
        *unreachable_sizes(plan),
        *uneven_sizes(plan),
        *lora_cases(plan, traffic, served),
        *wide_steps(served),
        *unused_modes(plan, traffic, served),
    )


def lint_without_traffic(plan: Plan) -> tuple[str, ...]:
    """Warnings about a plan that was not made for traffic: its sizes alone are known."""
    return (
        *uncaptured_decode(plan),
        *unreachable_sizes(plan),
        *uneven_sizes(plan),
        *sparse_steps(plan),
    )


def uncaptured_decode(plan: Plan) -> Iterator[str]:
    """The largest decode batch of the scheduler, if it has no graph where smaller ones have."""
    most = largest_of(Lane(CUDAGraphMode.FULL, True, 0), plan)
    held = max((sizes[-1] for sizes in plan.lanes().values()), default=most)
    if held < most:
        yield (
            f"scheduler.max_num_seqs allows uniform decode batches of {most} tokens, the largest graph holds {held}: "
            "batches beyond it run eagerly; lower it, or capture that size"
        )


def sparse_steps(plan: Plan) -> Iterator[str]:
    """Steps of a ladder where more than a quarter of what runs is padding, if all sizes of batches are as frequent."""
    lanes = {(Lane(lane.mode, lane.uniform, 0), sizes) for lane, sizes in plan.lanes().items()}
    for lane, sizes in sorted(lanes, key=lambda item: (item[0].mode.name, item[1])):
        stride = stride_of(lane, plan)
        steps = [(below + stride, size) for below, size in pairwise((0, *sizes)) if size - below > FINE * stride]
        wide = [(first, size) for first, size in steps if size - first > 2 * WIDE * size]
        for first, size in wide[:MOST_STEPS]:
            yield (
                f"{lane}: batches of {first} to {size} tokens run at {size}, {(size - first) / 2 / size:.0%} of which "
                "is padding on average"
            )
        if len(wide) > MOST_STEPS:
            yield f"{lane}: and {len(wide) - MOST_STEPS} more steps as wide"


def traffic_cliffs(plan: Plan, traffic: Traffic, times: StepTimes) -> Iterator[str]:
    """Batches larger than every graph for them, where a graph would have been faster."""
    routes = Routes(plan.keys)
    for uniform in (True, False):
        missed = [
            (batch, weight)
            for batch, weight in traffic.histogram
            if batch.uniform is uniform and routes.of(batch) is None and _graph(plan, batch, times) is not None
        ]
        if not missed:
            continue
        largest = max((batch for batch, _ in missed), key=lambda batch: batch.num_tokens)
        mode, graph, eager = _graph(plan, largest, times) or (CUDAGraphMode.NONE, 0.0, 0.0)
        if eager > CLIFF * graph:
            share = sum(weight for _, weight in missed) / traffic.total
            yield (
                f"{_share(share)} of the steps are {_kind(uniform)} batches that no graph holds, up to "
                f"{largest.num_tokens} tokens: there {milliseconds(eager)} eagerly, {milliseconds(graph)} in a {mode} "
                "graph"
            )


def _share(share: float) -> str:
    return f"{share:.2%}" if share >= 5e-5 else "less than 0.01%"


def scheduler_cliffs(plan: Plan, traffic: Traffic, times: StepTimes) -> Iterator[str]:
    """The largest batch that the scheduler makes, if traffic stays below it and a graph would be faster."""
    seqs, tokens = plan.max_num_seqs, plan.max_num_batched_tokens
    reqs = min(seqs, tokens // plan.query_len)
    extremes = [(StepShape(tokens, min(seqs, tokens)), "max_num_batched_tokens")]
    if reqs:
        extremes.insert(0, (StepShape(reqs * plan.query_len, reqs, True), "max_num_seqs"))
    for batch, limit in extremes:
        seen = any(b.uniform is batch.uniform and b.num_tokens >= batch.num_tokens for b, _ in traffic.histogram)
        options = _graph(plan, batch, times)
        if seen or options is None or Routes(plan.keys).of(batch) is not None:
            continue
        mode, graph, eager = options
        if eager > CLIFF * graph:
            yield (
                f"scheduler.{limit} allows {_kind(batch.uniform)} batches of {batch.num_tokens} tokens, which no graph "
                f"holds: {milliseconds(eager)} eagerly, {milliseconds(graph)} in a {mode} graph; lower it, or capture "
                "that size"
            )


def beyond_the_scheduler(plan: Plan, traffic: Traffic) -> Iterator[str]:
    """Traffic that the configuration's scheduler would not make."""
    limits = (
        ("tokens", "num_tokens", "max_num_batched_tokens", plan.max_num_batched_tokens),
        ("requests", "num_reqs", "max_num_seqs", plan.max_num_seqs),
    )
    for what, name, field, limit in limits:
        beyond = [(getattr(batch, name), weight) for batch, weight in traffic.histogram if getattr(batch, name) > limit]
        if beyond:
            share = sum(weight for _, weight in beyond) / traffic.total
            yield (
                f"{_share(share)} of the steps have "
                f"more {what} (up to {max(beyond)[0]}) than scheduler.{field} = {limit}: "
                "the traffic is of another scheduler"
            )


def unreachable_sizes(plan: Plan) -> Iterator[str]:
    """Sizes that no batch is padded to: none lies between the next smaller size and them."""
    for lane, sizes in plan.lanes().items():
        stride, most = stride_of(lane, plan), largest_of(lane, plan)
        pairs = zip((0, *sizes), sizes, strict=False)
        dead = [size for below, size in pairs if min(size, most) // stride <= below // stride]
        if dead:
            batches = f"multiples of {stride}" if stride > 1 else "batches"
            yield (
                f"no batch reaches the {_count(len(dead), 'graph')} of lane {lane} at {_list(dead)} tokens: it runs "
                f"{batches} up to {most}"
            )


def uneven_sizes(plan: Plan) -> Iterator[str]:
    """Sizes that hold no whole number of requests of a uniform batch."""
    q, given = plan.query_len, (plan.config or {}).get("compilation", {}).get("cudagraph_capture_sizes")
    if q == 1:
        return
    uneven = sorted({key.num_tokens for _, key in plan.keys if key.uniform and key.num_tokens % q})
    if uneven:
        yield f"sizes {_list(uneven)} of uniform decode are not multiples of {q}, its tokens a request"
    if isinstance(given, list) and plan.mode.decode_mode() is CUDAGraphMode.FULL:
        rounded = [size for size in sorted(set(given)) if size % q]
        most = max((size for size in given if size <= plan.max_num_batched_tokens), default=0)
        there = sorted({up for size in rounded if (up := -(-size // q) * q) <= most})
        dropped = [size for size in rounded if -(-size // q) * q > most]
        if rounded:
            parts = [f"captured at {_list(there)} instead"] if there else []
            parts += [f"dropped at {_list(dropped)}, where the next multiple is above the largest"] if dropped else []
            yield (
                f"cudagraph_capture_sizes {_list(rounded)} are not multiples of {q}, tokens of a request: as a list "
                f"they are {' and '.join(parts)}"
            )


def lora_cases(plan: Plan, traffic: Traffic, served: Sequence[Served]) -> Iterator[str]:
    """LoRA cases that no batch uses, and batches that no case serves."""
    counts = {batch.num_active_loras for batch, _ in traffic.histogram}
    used = {part.lane.num_active_loras for part in served if part.lane is not None}
    cases = [key.num_active_loras for _, key in plan.keys]
    if plan.max_loras is not None and max(counts) == 0 and 0 in plan.lora_cases:
        number = sum(case > 0 for case in cases)
        seen = f"no batch of the traffic uses adapters, but lora.max_loras is {plan.max_loras}"
        if number:
            yield f"{seen}: {number} of {len(cases)} graphs are for LoRA cases, which are never seen"
        elif cases:
            yield f"{seen}: no graph is for LoRA cases, so that batches with adapters would run eagerly"
    else:
        for case in sorted(set(cases) - used):
            number = cases.count(case)
            yield f"LoRA case {case} is never seen: no batch of the traffic runs in its {_count(number, 'graph')}"
    most = plan.max_loras or 0
    beyond = sum(weight for batch, weight in traffic.histogram if batch.num_active_loras > most)
    if beyond:
        allowed = f"lora.max_loras = {most}" if most else "the configuration, which has no lora section"
        yield (
            f"{_share(beyond / traffic.total)} of the steps have "
            f"more active adapters (up to {max(counts)}) than {allowed}"
        )


def wide_steps(served: Sequence[Served]) -> Iterator[str]:
    """Graphs where more than a quarter of the tokens that run are padding, and that takes time."""
    total = sum(part.weight for part in served)
    for part in served:
        lost = part.microseconds - part.unpadded
        seldom = part.weight < SELDOM * total or lost < SELDOM * part.microseconds
        if part.lane is not None and part.padding > WIDE and not seldom:
            yield (
                f"{part.lane} at {part.size} tokens: {part.padding:.0%} of what runs is padding, in "
                f"{part.weight / total:.1%} of the steps; its batches have {part.tokens / part.weight:.4g} tokens on "
                f"average, and would take {milliseconds(lost / part.weight)} less at their own sizes"
            )


def unused_modes(plan: Plan, traffic: Traffic, served: Sequence[Served]) -> Iterator[str]:
    """Graphs of a mode that no batch runs in, and a mode for batches that traffic does not have."""
    used = {part.lane.mode for part in served if part.lane is not None}
    for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
        number = sum(1 for key_mode, _ in plan.keys if key_mode is mode)
        if number and mode not in used:
            yield f"no batch of the traffic runs in the {_count(number, f'{mode} graph')} of the plan"
    if plan.mode.separate_routine():
        for uniform, runtime in ((True, plan.mode.decode_mode()), (False, plan.mode.mixed_mode())):
            absent = not any(batch.uniform is uniform for batch, _ in traffic.histogram)
            if absent and runtime is not CUDAGraphMode.NONE:
                yield f"the traffic has no {_kind(uniform)} batch; {runtime} graphs in mode {plan.mode} are for those"


def _graph(plan: Plan, batch: StepShape, times: StepTimes) -> tuple[CUDAGraphMode, float, float] | None:
    """The mode whose graph could run a batch, its microseconds, and those of an eager step; None if none could."""
    case = min((case for case in plan.lora_cases if case >= batch.num_active_loras), default=None)
    if case is None or batch.num_tokens > plan.max_num_batched_tokens:
        return None
    for lane in lanes_of(plan.mode, [case]):
        within = not lane.uniform or batch.num_tokens <= plan.query_len * plan.max_num_seqs
        if (batch.uniform or not lane.uniform) and within:
            eager = times.of(CUDAGraphMode.NONE, batch.num_tokens, batch.num_active_loras)
            return lane.mode, times.of(lane.mode, batch.num_tokens, case), eager
    return None


def _kind(uniform: bool) -> str:
    return "uniform decode" if uniform else "mixed"


def milliseconds(microseconds: float) -> str:
    """``4740.0`` -> ``4.74 ms``; three digits, or all before the point."""
    value = microseconds / 1000
    return f"{value:.0f} ms" if value >= 1000 else f"{value:.3g} ms"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _list(sizes: Sequence[int]) -> str:
    shown = ", ".join(map(str, sizes[:6]))
    return shown if len(sizes) <= 6 else f"{shown} and {len(sizes) - 6} more"
