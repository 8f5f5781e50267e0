"""cudagraph_mode AUTO: try the ways to capture a model, time them beside eager steps, and keep the
fastest.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from operator import truediv
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_map_only

from cgplan.backends import GraphBackend
from cgplan.buffers.compare import differences
from cgplan.buffers.static import example_batch
from cgplan.captures.failures import drop_locals
from cgplan.captures.model_graphs import BeforeKey
from cgplan.config import CompilationConfig, Config
from cgplan.errors import CaptureError, ConfigError, ModeError, ModelError, PlanError
from cgplan.graphs.ambient import random_state_kept
from cgplan.modes import CUDAGraphMode, Key
from cgplan.piecewise.split import refuse_unknown_ops
from cgplan.planning import Plan, build_plan
from cgplan.planning.plan import PlanChange
from cgplan.reports.records import CoverageRecord, DoctorReport
from cgplan.runner.replan import REPEATS, time_on_padding
from cgplan.runner.runner import GraphRunner
from cgplan.runner.session import CaptureSession
from cgplan.units import format_seconds

logger = logging.getLogger(__name__)
AUTO = CUDAGraphMode.AUTO
LEAST_GAIN = 1.02  # times as fast as eager; below it graphs are not worth their memory
_MOST_TRIES = 8  # each leaves one module more out of the graphs


class _Way(NamedTuple):
    """A way to capture the model: its settings, times, and the bytes of its graph pool."""

    name: str
    compilation: CompilationConfig
    gains: dict[int, list[float]]  # eager time / graph time in each round, ascending, by tokens
    nbytes: int

    def mean(self, pick: Callable[[list[float]], float] = median) -> float:
        """Of all sizes: the median of the rounds, or another one."""
        return fmean(map(pick, self.gains.values()))

    @property
    def worth(self) -> int:
        """The largest size at which it brings 2%; 0: none."""
        return max(
            (size for size, gains in self.gains.items() if median(gains) >= LEAST_GAIN), default=0
        )

    def is_tie(self, other: _Way) -> bool:
        """Whether this way is less than 2% faster, or the median of each lies inside the other's
        rounds; and the other is worth it as far.
        """
        inside = self.mean(min) <= other.mean() and self.mean() <= other.mean(max)
        return other.worth >= self.worth and (inside or self.mean() <= LEAST_GAIN * other.mean())

    def __str__(self) -> str:
        figures = [
            f"{median(g):.3g}x at {size} ({g[0]:.3g} to {g[-1]:.3g})"
            for size, g in sorted(self.gains.items())
        ]
        return f"{self.name}, against eager steps {', '.join(figures)} tokens, in {REPEATS} rounds"


def choose_mode(
    config: Config,
    model: Callable[..., Any],
    backend: GraphBackend,
    state: Sequence[object] | None = None,
    *,
    anyway: bool = False,
    before_key: BeforeKey | None = None,
) -> tuple[Config, Plan]:
    """The fastest way to capture a model, for ``cudagraph_mode: AUTO``.

    FULL comes first; where it fails, the innermost module that failed runs eagerly, until the rest
    can be captured. Beside it PIECEWISE by operators and, on a GPU, inductor are captured at a few
    sizes, as far as ``budget.capture_time`` lasts and the configuration leaves open: those that
    serve ``report.sizes``, else the smallest, the largest, and that for all requests. Each is timed
    against eager steps. Of ways that are as fast within 2%, or within the spread of their rounds,
    the one with the smallest pool is chosen; the plan ends at the largest size at which it brings
    2%. With ``anyway`` it is chosen where it brings less, too. All memory is given back, and the
    model is as it was. ``before_key`` is as in CaptureSession.

    Returns:
        The configuration with the settings that were chosen, and its plan, whose notes say what was
        tried.

    Raises:
        ConfigError: an operator of ``splitting_ops`` does not exist, or does not occur in the
            traced model.
        ModelError: the model itself fails.
    """
    refuse_unknown_ops(config.compilation.splitting_ops)
    plan, start, notes = build_plan(config), time.perf_counter(), list[str]()
    probes = tuple(sorted(_timed_sizes(plan, config)))
    limit, ways = config.budget.capture_time, list[_Way]()
    for name, compilation in _ways(config.compilation, backend):
        is_full = compilation.cudagraph_mode is CUDAGraphMode.FULL
        for _ in range(_MOST_TRIES):
            rest = None if limit is None else limit - (time.perf_counter() - start)
            if notes and rest is not None and rest <= 0:
                notes.append(
                    f"AUTO: {name} not tried{' again' if is_full else ''}: budget.capture_time "
                    "was spent"
                )
                break
            probed = {"cudagraph_capture_sizes": probes, "max_cudagraph_capture_size": None}
            tried = compilation.model_copy(update={**probed, "capture_policy": "eager"})
            budget = config.budget.model_copy(update={"capture_time": rest})
            probe = config.model_copy(update={"compilation": tried, "budget": budget})
            try:
                with _failing_module(model) as failed:
                    runner = CaptureSession(
                        build_plan(probe), model, backend, probe, state=state, before_key=before_key
                    ).run()
                # Timed without the hook, which slows eager steps down. One block: the model is
                # looked at once.
                with closing(runner), runner._graphed.keeping_state():
                    nbytes, apart = runner.report.pool_bytes, _apart(runner)
                    way = _Way(name, compilation, {} if apart else _gains(runner), nbytes)
                if apart:
                    notes.append(f"AUTO: {name} left out: on example batches {apart}")
                elif way.gains:
                    ways.append(way)
                    notes.append(f"AUTO: {way}")
                else:
                    notes.append(
                        f"AUTO: {name} has no graphs: the configuration or its budget leaves all "
                        "of them out"
                    )
                break
            except (CaptureError, ConfigError, ModeError, ModelError, PlanError) as error:
                if not notes and isinstance(error, ModelError):  # FULL runs the model's own code
                    raise
                if (
                    isinstance(error, ConfigError)
                    and compilation.compiler == config.compilation.compiler
                ):
                    raise  # of the user's settings
                drop_locals(error)
                notes.append(f"AUTO: {name} failed: {error.message}. {error.remedy}")
            if not is_full or not failed or failed[0] in compilation.splitting_modules:
                break
            modules = (*compilation.splitting_modules, *failed)
            name = f"PIECEWISE without {', '.join(modules)}"
            by_modules = {"cudagraph_mode": CUDAGraphMode.PIECEWISE, "piecewise": "modules"}
            compilation = compilation.model_copy(
                update={**by_modules, "splitting_modules": modules}
            )
    chosen, reason = _fastest(config.compilation, ways, plan.capture_sizes, anyway=anyway)
    logger.info("cudagraph_mode AUTO -> %s: %s", chosen.cudagraph_mode, reason)
    asked, settings = (part.model_dump(mode="json") for part in (config.compilation, chosen))
    changed = json.dumps({name: value for name, value in settings.items() if value != asked[name]})
    took = format_seconds(time.perf_counter() - start)
    notes.append(
        f"AUTO took {took}. To keep this choice without it, write into compilation: {changed}"
    )
    config = config.model_copy(update={"compilation": chosen})
    plan = build_plan(config)
    change = PlanChange(requested=AUTO, resolved=chosen.cudagraph_mode, reason=reason)
    return config, plan.model_copy(
        update={
            "requested_mode": AUTO,
            "changes": (change, *plan.changes),
            "notes": (*plan.notes, *notes),
        }
    )


def _ways(
    asked: CompilationConfig, backend: GraphBackend
) -> Iterator[tuple[str, CompilationConfig]]:
    """What may be tried, by name: settings that the user wrote stay."""
    given = asked.model_fields_set
    compilers = [asked.compiler] if "compiler" in given else ["eager"]
    if (
        "compiler" not in given
        and backend.device.type == "cuda"
        and asked.piecewise in ("auto", "ops")
    ):
        compilers.append("inductor")
    by_ops = asked.piecewise in ("auto", "ops") and not asked.splitting_modules
    route = "operators" if by_ops else asked.piecewise.replace("auto", "modules")
    for compiler in compilers:
        words = "" if compiler == "eager" else f" with {compiler}"
        for mode, name in (
            (CUDAGraphMode.FULL, "FULL"),
            (CUDAGraphMode.PIECEWISE, f"PIECEWISE by {route}"),
        ):
            update: dict[str, Any] = {"cudagraph_mode": mode, "compiler": compiler}
            yield f"{name}{words}", asked.model_copy(update=update)


@contextmanager
def _failing_module(model: Callable[..., Any]) -> Iterator[list[str]]:
    """A block; its list then holds the innermost module of the model whose forward raised the last
    error, if any.
    """
    named = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    names, failed, last = (
        {id(module): name for name, module in named if name},
        list[str](),
        list[BaseException](),
    )

    def note(module: torch.nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
        error = sys.exc_info()[1]
        if error is not None and not any(error is one for one in last) and id(module) in names:
            last[:] = [error]
            # in all layers alike
            failed[:] = [re.sub(r"(?<![^.])\d+(?![^.])", "*", names[id(module)])]

    handle = register_module_forward_hook(note, always_call=True)
    try:
        yield failed
    finally:
        handle.remove()
        last.clear()  # its frames hold tensors


def _timed_sizes(plan: Plan, config: Config) -> set[int]:
    """Capture sizes that are timed."""
    sizes = plan.capture_sizes
    served = [size for size in sizes if size <= plan.max_num_seqs]
    asked = {
        sizes[bisect_left(sizes, size)]
        for size in config.report.sizes or ()
        if size <= plan.max_capture_size
    }
    return asked or {*sizes[:1], *served[-1:], *sizes[-1:]}


def _timed_keys(runner: GraphRunner) -> list[Key]:
    sizes = _timed_sizes(runner.plan, runner.config)
    return [key for key in runner.plan.keys if key[1].num_tokens in sizes]


def _apart(runner: GraphRunner) -> str | None:
    """Where the outputs of graphs lie further from those of the model's own code than rounding puts
    them, on example batches, in three calls in a row: Python code of the model may change what it
    computes from call to call.
    """
    graphed, config, device = runner._graphed, runner.config, runner.backend.device
    with graphed.keeping_state() as kept, torch.no_grad(), graphed.buffers.on_padding():
        for mode, descriptor in _timed_keys(runner):
            graphed.look(mode, descriptor)
            views, reqs = graphed.views(descriptor), graphed.padded_reqs(descriptor)
            specs = config.tensors_at(descriptor.sizes)
            for name, tensor in example_batch(specs, descriptor.num_tokens, reqs, device).items():
                views[name].copy_(tensor)
            outputs = list[list[Any]]()
            for run in (
                partial(graphed.run_eager, descriptor),
                partial(graphed.run_graphed, mode, descriptor),
            ):
                kept.restore(between_keys=True)
                graphed.announce(mode, descriptor)
                with random_state_kept(device, graphed.generators):
                    outputs.append(
                        [tree_map_only(Tensor, torch.clone, run(views)) for _ in range(3)]
                    )
            for found in differences(outputs[1], outputs[0], is_coarse=True):
                if found.is_wrong and found.largest is not None:
                    return f"at {descriptor.num_tokens} tokens: {found}"
    return None


def _gains(runner: GraphRunner) -> dict[int, list[float]]:
    found = dict[int, list[float]]()
    for (_, descriptor), times in time_on_padding(runner._graphed, _timed_keys(runner)).items():
        gains = sorted(map(truediv, *times))
        found[descriptor.num_tokens] = min(
            found.get(descriptor.num_tokens, gains), gains, key=median
        )
    return found


def _fastest(
    asked: CompilationConfig, ways: Sequence[_Way], sizes: Sequence[int], *, anyway: bool
) -> tuple[CompilationConfig, str]:
    """The settings, and why: the way with the highest gain on average, up to the last size where it
    is worth it.
    """
    none = asked.model_copy(update={"cudagraph_mode": CUDAGraphMode.NONE})
    if not ways:
        return none, "no way to capture the model was found"
    best = max(ways, key=_Way.mean)
    ties = [way for way in ways if best.is_tie(way)]
    way = min(ties, key=lambda way: way.nbytes >> 20)  # within a MiB the first
    said, chosen = str(way), way.compilation
    if not way.worth:
        return chosen if anyway else none, f"graphs bring less than 2%: {said}"
    if others := ", ".join(other.name for other in ties if other is not way):
        said += f"; a tie with {others}: its pool is no larger"
    if way.worth < max(way.gains):
        kept = tuple(size for size in sizes if size <= way.worth)
        chosen = chosen.model_copy(
            update={"cudagraph_capture_sizes": kept, "max_cudagraph_capture_size": None}
        )
        said += f"; beyond {way.worth} tokens graphs bring less than 2%"
    return chosen, said


def check_up(runner: GraphRunner) -> DoctorReport:
    """How much of a step's time is spent inside graphs, for a few of a runner's keys on padding,
    and what runs outside.

    Times are medians in microseconds, from an idle device; graphs alone are launched one after the
    other.
    """
    graphed, backend = runner._graphed, runner.backend
    rows, outside = list[CoverageRecord](), Counter[str]()
    for (mode, descriptor), times in time_on_padding(runner._graphed, _timed_keys(runner)).items():
        eager, step = map(median, times)
        entry = graphed.entry((mode, descriptor))
        if entry is None:  # the model's own code runs between its graphs
            continue
        pieces = entry.graph.eager_pieces if entry.eager_pieces else ()
        inside = step
        if pieces:
            outside = Counter(f"{piece.name}, at {piece.line}" for piece in pieces)
            replays, rounds = [backend.launcher(graph) for graph in entry.segments], list[float]()
            with graphed.keeping_state() as kept, graphed.buffers.on_padding():
                graphed.look(mode, descriptor)
                for _ in range(REPEATS):
                    kept.restore(between_keys=True)  # positions do not run past a cache
                    rounds.append(sum(backend.time_calls(replay, 1)[0][0] for replay in replays))
            inside = min(median(rounds), step)
        rows.append(
            CoverageRecord(
                mode=mode,
                descriptor=descriptor,
                step_us=step,
                eager_us=eager,
                inside_us=inside,
            )
        )
    return DoctorReport(
        capture=runner.report, rows=tuple(rows), outside=dict(outside.most_common())
    )
