"""cudagraph_mode AUTO: time ways to capture a model, keep the fastest."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from cgplan.backends import GraphBackend
from cgplan.backends.context import AmbientState, random_state_kept
from cgplan.backends.replacing import T, replaced
from cgplan.buffers.compare import differences
from cgplan.buffers.static import example_batch
from cgplan.captures.failures import drop_locals
from cgplan.captures.model_graphs import BeforeKey
from cgplan.config import CompilationConfig, Config
from cgplan.errors import (
    AddressError,
    CaptureError,
    CaptureMemoryError,
    ConfigError,
    ModeError,
    ModelError,
    PlanError,
)
from cgplan.graphs.walk import PLAIN
from cgplan.modes import CUDAGraphMode, Key
from cgplan.piecewise.routes import SplitRoute
from cgplan.piecewise.trace import refuse_unknown_ops
from cgplan.planning import Plan, build_plan
from cgplan.planning.plan import PlanChange
from cgplan.reports.records import LEAST_GAIN
from cgplan.runner.replan import REPEATS, on_padding, time_on_padding
from cgplan.runner.runner import GraphRunner
from cgplan.runner.session import CaptureSession
from cgplan.units import format_seconds

logger = logging.getLogger(__name__)
AUTO = CUDAGraphMode.AUTO
_FAILURES = (AddressError, CaptureError, ConfigError, ModeError, ModelError, PlanError)
_MOST_MODULES = 7  # taken out of graphs
_KERNEL_GAP_US = 1.0  # from one kernel of a graph to the next


class Way(NamedTuple):
    name: str
    compilation: CompilationConfig
    taken_out: int = 0  # modules that failed

    def without(self, failed: Sequence[str]) -> list[Way]:
        """Ways without these modules, where that may help."""
        known = self.compilation.splitting_modules
        is_full = self.compilation.cudagraph_mode is CUDAGraphMode.FULL
        can_break_up = is_full or 0 < self.taken_out < _MOST_MODULES
        if not can_break_up or not set(failed) - set(known):
            return []
        modules = (*known, *failed)
        compilation = self.compilation.changed(
            cudagraph_mode=CUDAGraphMode.PIECEWISE,
            piecewise="modules",
            splitting_modules=modules,
        )
        name = f"PIECEWISE without {', '.join(modules)}"
        return [Way(name, compilation, self.taken_out + len(failed))]


class Candidate(NamedTuple):
    """``gains``: eager over graph time by tokens, ascending. ``fusible``: the share of a step that
    a compiler may save. ``route``: with the traces of the trial.
    """

    way: Way
    gains: dict[int, list[float]]
    nbytes: int
    fusible: float = 1.0
    route: SplitRoute | None = None

    def mean(self, pick: Callable[[list[float]], float] = median) -> float:
        return fmean(map(pick, self.gains.values()))

    @property
    def worth(self) -> int:
        """The largest size with a gain of 2%; 0: none."""
        largest = 0
        for size, gains in self.gains.items():
            if median(gains) >= LEAST_GAIN:
                largest = max(largest, size)
        return largest

    def is_tie(self, other: Candidate) -> bool:
        """Whether its gains are within 2% or the rounds, at no larger sizes."""
        if other.worth < self.worth:
            return False
        if self.mean() <= LEAST_GAIN * other.mean():
            return True
        return self.mean(min) <= other.mean() and self.mean() <= other.mean(max)

    @property
    def speed(self) -> str:
        figures = []
        for size, gains in sorted(self.gains.items()):
            spread = f"{gains[0]:.3g} to {gains[-1]:.3g}"
            figures.append(f"{median(gains):.3g}x at {size} ({spread})")
        return f"against eager steps {', '.join(figures)} tokens, in {REPEATS} rounds"

    def __str__(self) -> str:
        return f"{self.way.name}, {self.speed}"


class Choice(BaseModel):
    """``compilation``: the settings that others than those asked for were chosen for."""

    compilation: CompilationConfig
    reason: str
    notes: tuple[str, ...]


@dataclass(eq=False)
class Trials:
    config: Config
    model: Callable[..., Any]
    backend: GraphBackend
    state: Sequence[object] | None = None
    even_if_slower: bool = False
    before_key: BeforeKey | None = None

    def choose(self, use: Callable[[Config, Plan, SplitRoute | None], T]) -> T:
        """``use`` gets what ``choose_mode`` gives, and the trial's traces."""
        refuse_unknown_ops(self.config.compilation.splitting_ops)
        file = self._choice_file()
        choice = _kept_choice(file)
        failed: tuple[str, ...] = ()
        if choice:
            try:
                return use(*self._planned(choice), None)
            except (CaptureError, ModelError) as error:
                drop_locals(error)
                failed = (f"AUTO: the choice of an earlier start failed: {error.message}",)
                _keep_choice(file, "")
        choice, route, is_lasting = self._try_ways()
        if is_lasting:
            _keep_choice(file, choice.model_dump_json(exclude_unset=True))
        choice.notes += failed
        return use(*self._planned(choice), route)

    def _planned(self, choice: Choice) -> tuple[Config, Plan]:
        chosen = choice.compilation
        changed = {name: getattr(chosen, name) for name in chosen.model_fields_set}
        mode = chosen.cudagraph_mode
        if not mode.has_mode(CUDAGraphMode.PIECEWISE):
            changed["splitting_modules"] = ()
        logger.info("cudagraph_mode AUTO -> %s: %s", mode, choice.reason)
        config = self.config.changed(compilation=self.config.compilation.changed(**changed))
        plan = build_plan(config)
        change = PlanChange(requested=AUTO, resolved=mode, reason=choice.reason)
        return config, plan.changed(
            requested_mode=AUTO,
            changes=(change, *plan.changes),
            notes=(*plan.notes, *choice.notes),
        )

    def _choice_file(self) -> Path | None:
        model = self.model
        folder = os.environ.get("CGPLAN_CACHE_DIR", "~/.cache/cgplan")
        if not folder or not isinstance(model, torch.nn.Module):
            return None
        facts = (
            self.backend.environment().model_dump_json(exclude={"date"}),
            self.config.model_dump_json(),
            self.even_if_slower,
            AmbientState.now(self.backend.device.type),
            re.sub(
                r"0x[0-9a-f]+",  # addresses
                "",
                str(model),
            ),
        )
        digest = hashlib.sha256(str(facts).encode())
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if type(tensor) not in (Tensor, torch.nn.Parameter):
                return None
            first = tensor[(slice(1),) * tensor.ndim].tolist()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {first}".encode())
        files = set()
        for each in model.modules():
            module = sys.modules.get(type(each).__module__)
            files.add(getattr(module, "__file__", None) or "")
            hooks = len(each._forward_hooks) + len(each._forward_pre_hooks)
            settings = [pair for pair in vars(each).items() if type(pair[1]) in PLAIN]
            digest.update(f"{hooks} {settings}".encode())
        for file in sorted(filter(os.path.isfile, files)):
            digest.update(Path(file).read_bytes())
        return Path(folder, f"auto-{digest.hexdigest()[:32]}.json").expanduser()

    def _try_ways(self) -> tuple[Choice, SplitRoute | None, bool]:
        """The last is false if time or memory ran out, which another start may have."""
        start = time.perf_counter()
        plan = build_plan(self.config)
        asked = self.config.compilation
        limit = self.config.budget.capture_time
        notes = list[str]()
        candidates = list[Candidate]()
        refused = list[Way]()
        is_lasting = True
        waiting = list(_ways(asked, self.backend))
        while waiting:
            way = waiting.pop(0)
            began = time.perf_counter()
            rest = None if limit is None else limit - (began - start)
            why_not = _cannot_win(way, candidates, refused)
            if not why_not and notes and rest is not None and rest <= 0:
                why_not = "budget.capture_time was spent"
                is_lasting = False
            if why_not:
                notes.append(f"AUTO: {way.name} not tried: {why_not}")
                continue
            failed = list[str]()
            try:
                candidate, note = self._try(way, plan, rest, failed)
            except _FAILURES as error:
                if not notes and isinstance(error, ModelError):  # FULL runs the model as it is
                    raise
                is_asked_for = way.compilation.compiler == asked.compiler
                if isinstance(error, ConfigError) and is_asked_for:
                    raise
                drop_locals(error)
                notes.append(f"AUTO: {way.name} failed: {error.message}. {error.remedy}")
                waiting = [*way.without(failed), *waiting]
                is_lasting &= not isinstance(error, CaptureMemoryError)
                if type(error) is CaptureError:  # a verdict on the forward
                    refused.append(way)
                continue
            took = format_seconds(time.perf_counter() - began)
            notes.append(f"AUTO: {note} (tried in {took})")
            if candidate:
                candidates.append(candidate)
        chosen, route, reason = self._fastest(candidates, plan.capture_sizes)
        before = asked.model_dump(mode="json")
        settings = {
            name: value
            for name, value in chosen.model_dump(mode="json").items()
            if value != before[name]
        }
        took = format_seconds(time.perf_counter() - start)
        notes.append(
            f"AUTO took {took}. To keep this choice without it, write into compilation: "
            f"{json.dumps(settings)}"
        )
        choice = Choice(
            compilation=CompilationConfig.model_validate(settings),
            reason=reason,
            notes=tuple(notes),
        )
        return choice, route, is_lasting

    def _try(
        self,
        way: Way,
        plan: Plan,
        seconds: float | None,
        failed: list[str],
    ) -> tuple[Candidate | None, str]:
        config = self.config
        compilation = way.compilation.changed(
            cudagraph_capture_sizes=tuple(sorted(_timed_sizes(plan, config))),
            max_cudagraph_capture_size=None,
            capture_policy="eager",
        )
        config = config.changed(
            compilation=compilation,
            budget=config.budget.changed(capture_time=seconds),
        )
        # a trace would hold the noting call
        is_traced = compilation.compiler != "eager"
        noting = nullcontext() if is_traced else _failing_module(self.model, failed)
        # the model is looked at once
        with ExitStack() as trial:
            with noting:
                runner = CaptureSession(
                    build_plan(config),
                    self.model,
                    self.backend,
                    config,
                    state=self.state,
                    before_key=self.before_key,
                    trial=trial,
                ).run()
            trial.callback(runner.close)
            return _tried(runner, way)  # the noting call slows eager steps down

    def _fastest(
        self,
        candidates: Sequence[Candidate],
        sizes: Sequence[int],
    ) -> tuple[CompilationConfig, SplitRoute | None, str]:
        none = self.config.compilation.changed(cudagraph_mode=CUDAGraphMode.NONE)
        if not candidates:
            return none, None, "no way to capture the model was found"
        best = max(candidates, key=Candidate.mean)
        ties = list(filter(best.is_tie, candidates))
        taken = min(ties, key=lambda candidate: candidate.nbytes >> 20)  # within a MiB the first
        said = str(taken)
        chosen = taken.way.compilation
        worth = taken.worth
        if not worth:
            said = f"graphs bring less than 2%: {said}"
            if not self.even_if_slower:
                return none, None, said
            return chosen, taken.route, said
        others = ", ".join(candidate.way.name for candidate in ties if candidate is not taken)
        if others:
            said += f"; a tie with {others}: its pool is no larger"
        if worth < max(taken.gains):
            kept = tuple(size for size in sizes if size <= worth)
            chosen = chosen.changed(cudagraph_capture_sizes=kept, max_cudagraph_capture_size=None)
            said += f"; beyond {worth} tokens graphs bring less than 2%"
        return chosen, taken.route, said


def choose_mode(
    config: Config,
    model: Callable[..., Any],
    backend: GraphBackend,
    state: Sequence[object] | None = None,
    *,
    even_if_slower: bool = False,
    before_key: BeforeKey | None = None,
) -> tuple[Config, Plan]:
    """The fastest way to capture a model, for ``cudagraph_mode: AUTO``. docs/concepts.md, AUTO,
    says what is tried, and the plan's notes what was.

    The plan ends at the largest size with a gain of 2%; ``even_if_slower``: also below it. The
    model is put back, and all memory is freed. ``before_key`` is as in CaptureSession.

    The choice for a module is kept in a file in ``$CGPLAN_CACHE_DIR``, or ``~/.cache/cgplan``, for
    later starts, which then try nothing; an empty variable keeps none.

    Raises:
        ConfigError: an operator of ``splitting_ops`` is missing, or never called.
        ModelError: the model itself fails.
    """
    trials = Trials(
        config,
        model,
        backend,
        state,
        even_if_slower,
        before_key,
    )
    return trials.choose(lambda *chosen: chosen[:2])


def _kept_choice(file: Path | None) -> Choice | None:
    if file is None:
        return None
    try:
        kept = Choice.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None
    note = f"AUTO: the choice of an earlier start; without {file} the ways are tried again"
    return kept.model_copy(update={"notes": (*kept.notes, note)})


def _keep_choice(file: Path | None, text: str) -> None:
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    except OSError as error:
        logger.info("AUTO's choice is not kept: %s", error)


def _cannot_win(
    way: Way,
    candidates: Sequence[Candidate],
    refused: Sequence[Way],
) -> str:
    """Why no trial is needed, or nothing."""
    compilation = way.compilation
    if way.taken_out:
        return ""
    for other in refused:
        if compilation.changed(compiler=other.compilation.compiler) == other.compilation:
            return f"the model was refused for {other.name}"
    for candidate in candidates:
        tried = candidate.way.compilation
        if tried.cudagraph_mode is not CUDAGraphMode.FULL:
            continue
        if compilation.cudagraph_mode is CUDAGraphMode.PIECEWISE:
            return "a FULL graph holds the whole forward"
        saved = 1 / (1 - min(candidate.fusible, 0.99))
        if compilation.compiler != tried.compiler and saved < LEAST_GAIN:
            return f"kernels that it can join take {candidate.fusible:.1%} of a step"
    return ""


def _tried(
    runner: GraphRunner,
    way: Way,
) -> tuple[Candidate | None, str]:
    name, compilation, _ = way
    difference = _first_difference(runner)
    gains = _gains(runner)
    if not gains:
        return (
            None,
            f"{name} has no graphs: the configuration or its budget leaves all of them out",
        )
    fusible = _fusible_share(runner)
    route = runner.graphs.route
    candidate = Candidate(
        way,
        gains,
        runner.report.pool_bytes,
        fusible,
        route if route.name == "full" else None,
    )
    if difference is None:
        return candidate, str(candidate)
    note = f"{name} left out: on example batches {difference}; {candidate.speed}"
    if compilation.compiler != "eager":
        settings = {
            "cudagraph_mode": compilation.cudagraph_mode.name,
            "compiler": compilation.compiler,
            "verify": "off",
        }
        note += (
            f". {compilation.compiler} rounds otherwise: a router or argmax may choose otherwise. "
            f"To take it all the same, write into compilation: {json.dumps(settings)}"
        )
    return None, note


def _fusible_share(runner: GraphRunner) -> float:
    """The most of a step of a timed key, without products, convolutions, attention, and operators
    that are not torch's.
    """
    shares = []
    graphs = runner.graphs
    compilation = runner.config.compilation
    is_whole = compilation.cudagraph_mode is CUDAGraphMode.FULL
    if runner.backend.is_tape or compilation.compiler != "eager" or not is_whole:
        return 1.0  # no other way is judged by it
    products = {str(packet).replace(".", "::") for packet in flop_registry}
    with on_padding(graphs) as rehearsal:
        for key in timed_keys(runner):
            rehearsal.put_back.rewind()
            rehearsal.set_context(key)
            with torch.profiler.profile(acc_events=True) as profile:
                graphs.run_eager(key[1], graphs.views(key[1]))
                runner.backend.synchronize()
            total = fusible = 0.0
            for event in profile.events():
                if not event.kernels:
                    continue
                taken = event.self_device_time_total + _KERNEL_GAP_US * len(event.kernels)
                total += taken
                if event.name.startswith("aten::") and event.name not in products:
                    fusible += taken
            if total:
                shares.append(fusible / total)
    return max(shares, default=1.0)


def _ways(
    asked: CompilationConfig,
    backend: GraphBackend,
) -> Iterator[Way]:
    is_given = "compiler" in asked.model_fields_set
    is_traced = asked.piecewise in ("auto", "ops")
    compilers = [asked.compiler if is_given else "eager"]
    if not is_given and is_traced and not backend.is_tape:
        compilers.append("inductor")
    route = asked.piecewise.replace("auto", "modules")
    if is_traced and not asked.splitting_modules:
        route = "operators"
    for compiler in compilers:
        words = "" if compiler == "eager" else f" with {compiler}"
        for mode, name in (
            (CUDAGraphMode.FULL, "FULL"),
            (CUDAGraphMode.PIECEWISE, f"PIECEWISE by {route}"),
        ):
            compilation = asked.changed(cudagraph_mode=mode, compiler=compiler)
            yield Way(f"{name}{words}", compilation)


@contextmanager
def _failing_module(model: Callable[..., Any], failed: list[str]) -> Iterator[None]:
    """``failed`` gets the innermost module that raised."""
    names = {}
    last = None
    if isinstance(model, torch.nn.Module):
        names = {id(module): name for name, module in model.named_modules() if name}

    run_module = torch.nn.Module.__call__

    def noting(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal last
        try:
            return run_module(module, *args, **kwargs)
        except Exception as error:
            if error is not last and id(module) in names:
                last = error
                # in all layers
                failed[:] = [
                    re.sub(
                        r"(?<![^.])\d+(?![^.])",
                        "*",
                        names[id(module)],
                    )
                ]
            raise

    try:
        with replaced(torch.nn.Module, __call__=noting):
            yield
    finally:
        last = None  # its frames hold tensors


def _timed_sizes(
    plan: Plan,
    config: Config,
) -> set[int]:
    sizes = plan.capture_sizes
    asked = {
        sizes[bisect_left(sizes, size)]
        for size in config.report.sizes or ()
        if size <= plan.max_capture_size
    }
    served = [size for size in sizes if size <= plan.max_num_seqs]
    return asked or {*sizes[:1], *served[-1:], *sizes[-1:]}


def timed_keys(runner: GraphRunner) -> list[Key]:
    sizes = _timed_sizes(runner.plan, runner.config)
    return [key for key in runner.plan.keys if key[1].num_tokens in sizes]


def _first_difference(runner: GraphRunner) -> str | None:
    """Three calls: Python may differ in the second."""
    graphs = runner.graphs
    device = runner.backend.device
    with on_padding(graphs) as rehearsal:
        for key in timed_keys(runner):
            descriptor = key[1]
            views = graphs.views(descriptor)
            reqs = graphs.padded_reqs(descriptor)
            specs = runner.config.tensors_at(descriptor.sizes)
            examples = example_batch(specs, descriptor.num_tokens, reqs, device)
            for name, tensor in examples.items():
                views[name].copy_(tensor)
            outputs = []
            eager = partial(graphs.run_eager, descriptor, views)
            replay = partial(graphs.run_wrapped, key, views)
            for run in (eager, replay):
                calls = list[Any]()
                outputs.append(calls)
                random = random_state_kept(device, graphs.generators)
                with rehearsal.from_same_state(key, replays=run is replay), random:
                    for _ in range(3):
                        output = run()
                        calls.append(tree_map_only(Tensor, torch.clone, output))
            for found in differences(outputs[1], outputs[0], is_coarse=True):
                if found.is_wrong and found.largest is not None:
                    where = f"at {descriptor.num_tokens} tokens"
                    return f"{where}: {found}, in {found.share:.1%} of its elements"
    return None


def _gains(runner: GraphRunner) -> dict[int, list[float]]:
    """By tokens, of the key with the least gain."""
    found = dict[int, list[float]]()
    times_of = time_on_padding(runner.graphs, timed_keys(runner))
    for (_, descriptor), (eager, replays) in times_of.items():
        gains = sorted(map(truediv, eager, replays))
        size = descriptor.num_tokens
        found[size] = min(found.get(size, gains), gains, key=median)
    return found
