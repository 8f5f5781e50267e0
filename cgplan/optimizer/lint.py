"""Lint: batches that fall off a cliff, and graphs that no batch needs. Each rule gives sentences
with figures.
"""

from bisect import bisect
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from cgplan.modes import CUDAGraphMode
from cgplan.optimizer.problem import Run, largest_of
from cgplan.planning.engines import eager_drafts
from cgplan.planning.plan import LARGEST_DEFAULT_SIZE, Lane, Plan, lanes_of
from cgplan.traffic.histogram import StepShape
from cgplan.traffic.step_times import ABOUT, OF_ANOTHER_MODEL
from cgplan.units import counted, format_microseconds, from_to, grouped, listed

CLIFF = 1.05  # eager over graph, from which on it is worth a word
BETWEEN = 0.05  # of a step, which times between measured ones may be off before they are told


def doubts(plan: Plan, run: Run) -> tuple[str, ...]:
    """Why the plan may be for other steps than those to come."""
    return (
        *_unmeasured_sizes(plan, run),
        *_sizes_between(plan, run),
        *_lora_cases(plan, run),
    )


def lint(plan: Plan, run: Run) -> tuple[str, ...]:
    """Other warnings about a plan for the traffic of ``run``. Raises StepTimeError where times of a
    mode are missing.
    """
    return (
        *_traffic_cliffs(plan, run),
        *_scheduler_cliffs(plan, run),
        *_beyond_the_scheduler(plan, run),
        *_missing_kinds(plan, run),
    )


def lint_without_traffic(plan: Plan) -> Iterator[str]:
    yield from eager_drafts(plan)
    most = largest_of(Lane(CUDAGraphMode.FULL, True, 0), plan)
    held = max((sizes[-1] for sizes in plan.lanes().values()), default=most)
    if held < most and plan.dim_names[0] == "num_tokens":
        kind = "uniform decode " if plan.mode.separate_routine() else ""
        yield (
            f"scheduler.max_num_seqs allows {kind}batches of {most} tokens, the largest "
            f"graph holds {held}: "
            "batches beyond it run eagerly; lower it, or list that size in cudagraph_capture_sizes"
        )


def _traffic_cliffs(plan: Plan, run: Run) -> Iterator[str]:
    may_run = np.zeros_like(run.missed)
    for lane in lanes_of(plan.mode, plan.lora_cases):
        may_run |= run.may_run(lane, largest_of(lane, plan))
    for uniform in (True, False):
        missed = run.missed & may_run & (run.batches.uniform == uniform)
        if not missed.any():
            continue
        tokens = missed * run.batches.num_tokens
        largest, _ = run.traffic.histogram[tokens.argmax()]
        cliff = _cliff(plan, run, largest)
        if cliff:
            kind = "batches" if _are_rows(plan) else f"{_kind(uniform)} batches"
            yield (
                f"{_share(missed, run)} of the steps are {kind} that no graph holds, up to "
                f"{largest.num_tokens} tokens: there {cliff}"
            )


def _scheduler_cliffs(plan: Plan, run: Run) -> Iterator[str]:
    seqs = plan.max_num_seqs
    tokens = plan.max_num_batched_tokens
    q = plan.query_len
    reqs = min(seqs, tokens // q)
    extremes = [
        (StepShape(reqs * q, reqs, True), "max_num_seqs", q, "requests"),
        (StepShape(tokens, min(seqs, tokens)), "max_num_batched_tokens", 1, "tokens"),
    ]
    for batch, limit, each, unit in extremes if reqs else extremes[1:]:
        alike = run.batches.uniform == batch.uniform
        as_large = run.batches.num_tokens >= batch.num_tokens
        if _are_rows(plan) or (alike & as_large).any():
            continue
        lanes = plan.lanes().items()
        largest = [sizes[-1] for lane, sizes in lanes if run.serves(lane, batch)]
        most = max(largest, default=0)
        if most >= batch.num_tokens:
            continue
        size = batch.num_tokens
        cliff = _cliff(plan, run, batch)
        if not cliff and batch.uniform and most:
            size = most // each * each + each  # the first above all graphs
            cliff = _cliff(plan, run, batch._replace(num_tokens=size))
        if cliff:
            held = f"; at most {most // each} {unit} run in graphs: lower {limit} to that, or"
            yield (
                f"scheduler.{limit} allows {_kind(batch.uniform)} batches of {size} "
                f"tokens, which no graph holds: {cliff}{held if most else ':'} accept eager steps"
            )


def rows_without_graphs(plan: Plan, run: Run) -> Iterator[str]:
    """A note in place of warnings where rows are all that batches count: eager code serves the
    large ones.
    """
    rows = plan.max_num_seqs
    held = plan.max_capture_size
    if _are_rows(plan) and held < rows:
        cliff = _cliff(plan, run, StepShape(rows, rows))
        if cliff:
            share = _share(run.batches.num_tokens > held, run)
            yield (
                f"batches of {from_to(held + 1, rows)} rows, {share} of the steps, run eagerly: "
                f"at {rows} rows {cliff}"
            )


def _are_rows(plan: Plan) -> bool:
    """Whether each request is one row, and one kind of graphs runs all batches."""
    is_one = plan.max_num_seqs == plan.max_num_batched_tokens and plan.query_len == 1
    return is_one and not plan.mode.separate_routine()


def _cliff(plan: Plan, run: Run, batch: StepShape) -> str | None:
    """Times of a batch without and with a graph, if a graph may hold it and would be faster."""
    tokens = batch.num_tokens
    for lane in lanes_of(plan.mode, plan.lora_cases):
        if tokens <= largest_of(lane, plan) and run.serves(lane, batch):
            break
    else:
        return None
    eager = run.times.of(
        CUDAGraphMode.NONE,
        tokens,
        batch.num_active_loras,
    )
    graph = run.times.of(
        lane.mode,
        tokens,
        lane.num_active_loras,
    )
    if eager <= CLIFF * graph:
        return None
    return (
        f"{format_microseconds(eager)} eagerly, {format_microseconds(graph)} in a {lane.mode} graph"
    )


def _unmeasured_sizes(plan: Plan, run: Run) -> Iterator[str]:
    found = []
    for lane, sizes in plan.lanes().items():
        most = run.times.measured_at(lane.mode, lane.num_active_loras)[-1]
        beyond = [size for size in sizes if size > ABOUT * most]
        if beyond and lane.mode in {curve.mode for curve in run.times.curves}:
            largest = beyond[-1]
            tokens = plan.max_num_seqs * plan.query_len
            start = f"{'no drafts and ' * (plan.query_len > 1)}--max-num-seqs {tokens}"
            steps = f"steps of {most + 1} to {largest} tokens"
            if lane.uniform:
                steps = f"up to {largest} requests at once"
            if largest > min(2 * tokens, LARGEST_DEFAULT_SIZE):  # vLLM's own sizes end there
                in_ladder = min(-(-largest // 16) * 16, plan.max_num_batched_tokens)
                start += f" and --max-cudagraph-capture-size {in_ladder}"
            text = (
                f"steps were measured up to {counted(most, 'token')}, the gain of {listed(beyond)} "
                f"is extrapolated; to leave it out, write max_cudagraph_capture_size {most}, and "
                f"no list of sizes; to measure it: send {steps} to vLLM with {start}, or a bench"
            )
            found.append((text, str(lane)))
    for text, names in grouped(found).items():
        yield f"{' and '.join(names)}: {text}"


def _sizes_between(plan: Plan, run: Run) -> Iterator[str]:
    """On graphs between measured sizes whose times differ so much that a step may, too."""
    sizes = []
    share = may_differ = 0.0
    measured: set[int] = set()
    for use in run.uses:
        known = run.times.measured_at(use.mode, use.num_active_loras)
        if use.size is None or not known[0] < use.size < known[-1] or use.size in known:
            continue
        above = known[bisect(known, use.size)]
        most = run.times.of(use.mode, above, use.num_active_loras)
        sizes.append(use.size)
        measured.update(known)
        share += use.share
        may_differ += use.share * (most - (use.step_us or most))
    if may_differ > BETWEEN * run.expected_us and OF_ANOTHER_MODEL not in run.times.unsure:
        yield (
            f"{share:.1%} of the steps run in graphs between measured sizes ({listed(sizes)}): "
            f"their times are guessed; measure them: {bench_of(plan, measured.union(sizes))}, or a "
            "start of vLLM with them"
        )


def bench_of(plan: Plan, *sizes: Iterable[float]) -> str:
    """The command that measures those sizes, by dimension, that the scheduler's bounds allow."""
    command = "cgplan bench FILE"
    for name, of_dim in zip(plan.dim_names, sizes, strict=True):
        allowed = [f"{size:.0f}" for size in sorted(of_dim) if size <= plan.max_num_batched_tokens]
        setting = f"dims.{name}.sizes"
        if name == "num_tokens":
            setting = "compilation.cudagraph_capture_sizes"
        command += f" --set '{setting}=[{','.join(allowed)}]'"
    if plan.config["compilation"]["max_cudagraph_capture_size"] is not None:
        command += " --set compilation.max_cudagraph_capture_size=null"
    target = (plan.config["model"] or {}).get("target") or "my_model.py:build"
    return f"`{command} --set model.target={target} --output bench.json`"


def _beyond_the_scheduler(plan: Plan, run: Run) -> Iterator[str]:
    batches = run.batches
    for what, sizes, field in (
        ("tokens", batches.num_tokens, "max_num_batched_tokens"),
        ("requests", batches.num_reqs, "max_num_seqs"),
    ):
        limit = getattr(plan, field)
        beyond = sizes > limit
        if beyond.any():
            yield (
                f"{_share(beyond, run)} of the steps have more {what} (up to {sizes.max():.0f}) "
                f"than scheduler.{field} = {limit}: raise it, or the traffic is of another "
                "scheduler"
            )


def _lora_cases(plan: Plan, run: Run) -> Iterator[str]:
    most = plan.max_loras or 0
    used = {use.num_active_loras for use in run.uses if use.size is not None}
    cases = [key.num_active_loras for _, key in plan.keys]
    loras = run.batches.num_active_loras
    largest = int(loras.max())
    if plan.max_loras is not None and largest == 0 and 0 in plan.lora_cases:
        number = sum(case > 0 for case in cases)
        seen = f"no batch of the traffic uses adapters, but lora.max_loras is {most}"
        if number:
            yield (
                f"{seen}: {number} of {len(cases)} graphs are for LoRA cases, which are never "
                "seen, or not told: a trace tells them in a column Adapter, a traffic section by "
                "lora_share, vLLM's log does not"
            )
        elif cases:
            yield (
                f"{seen}: no graph is for LoRA cases, so that batches with adapters would run "
                "eagerly"
            )
    elif plan.max_loras is not None:
        unseen = sorted(set(cases) - used)
        graphs = sum(case in unseen for case in cases)
        if unseen:
            lever = "; with --runner v1 cudagraph_specialize_lora false drops those of case 0"
            yield (
                f"LoRA cases {listed(unseen)} are never seen: no batch of the traffic runs in "
                f"their {counted(graphs, 'graph')}{'' if unseen[0] else lever}"
            )
    beyond = loras > most
    if beyond.any():
        allowed = (
            f"lora.max_loras = {most}" if most else "the configuration, which has no lora section"
        )
        yield (
            f"{_share(beyond, run)} of the steps have more active adapters (up to {largest}) "
            f"than {allowed}"
        )


def _missing_kinds(plan: Plan, run: Run) -> Iterator[str]:
    if plan.mode.separate_routine():
        seen = set(run.batches.uniform.tolist())
        for lane in lanes_of(plan.mode, (0,)):
            if lane.uniform not in seen:
                yield (
                    f"the traffic has no {_kind(lane.uniform)} batch; {lane.mode} graphs in mode "
                    f"{plan.mode} are for those"
                )


def _kind(uniform: bool) -> str:
    return "uniform decode" if uniform else "mixed"


def _share(rows: Any, run: Run) -> str:
    share = run.weights[rows].sum() / run.traffic.total
    return f"{share:.2%}" if share >= 5e-5 else "less than 0.01%"
