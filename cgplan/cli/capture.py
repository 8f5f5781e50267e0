"""`cgplan capture` and `cgplan bench`: cheap checks first, the model last."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from typer import BadParameter

from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.backend import Trace, span
from cgplan.captures.audit import audit_error
from cgplan.captures.captured_keys import CaptureProgress
from cgplan.captures.environment import describe_environment
from cgplan.captures.rank_sync import SINGLE_RANK, RankSync
from cgplan.cli.output import check_outputs, has_ranks, is_first_rank, note, progress, publish, save
from cgplan.cli.plan import announcements, read_plan
from cgplan.config import Config, Override, read_config
from cgplan.distributed import (
    RankedCapture,
    agree_on_model,
    agree_on_plan,
    agree_on_setup,
    all_reduce_by,
    open_all_reduce,
    open_ranks,
)
from cgplan.errors import CaptureError, ConfigError, PlanMismatchError
from cgplan.measure.bench import bench, call_examples
from cgplan.models.loading import load_model
from cgplan.modes import CUDAGraphMode
from cgplan.planning import Plan, build_plan
from cgplan.planning.build import refuse_auto
from cgplan.planning.difference import fitted, unused_settings
from cgplan.planning.plan import PlanChange, budget_of
from cgplan.reports import AuditReport, Report
from cgplan.reports.records import check_baselines
from cgplan.runner.auto import check_up, choose_mode
from cgplan.runner.runner import GraphRunner
from cgplan.runner.session import CaptureSession
from cgplan.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Request:
    """Arguments of a capture or bench."""

    config: Path  # the YAML file; overrides win over it
    overrides: Sequence[str | Override]
    # a saved plan to capture in place of the one that follows from the configuration
    plan: Path | None
    force: bool  # capture the saved plan although it was made for something else
    output: Path | None
    as_json: bool
    # for events of the capture, and of a few calls of each size behind it
    trace: Path | None = None
    html: Path | None = None


def run_capture(request: Request) -> None:
    _report(request, "capture", lambda runner: runner.report)


def run_doctor(request: Request) -> None:
    _report(request, "doctor", check_up)


def run_audit(request: Request) -> None:
    settings = ("compilation.audit=report", "compilation.capture_policy=eager")
    overrides = [*request.overrides, *(Override(setting, "cgplan audit") for setting in settings)]
    noted = replace(request, overrides=overrides)
    report = _report(noted, "audit", lambda runner: runner.report.audit or runner.audit())
    if isinstance(report, AuditReport) and report.findings:
        raise audit_error(report)


def run_bench(request: Request, against: Sequence[str], seed: int | None) -> None:
    against = check_baselines(against)
    if against and has_ranks():
        raise ConfigError(
            "--against measures one process, and torchrun has started several",
            remedy="Leave out --against, or run `cgplan bench` without torchrun.",
        )

    def measured(runner: GraphRunner) -> Report:
        with progress("bench" if is_first_rank() else "") as step:
            return bench(runner, progress=step, against=against, seed=seed)

    _report(request, "bench", measured)


def _report(request: Request, command: str, make: Callable[[GraphRunner], Report]) -> Report:
    if request.force and request.plan is None:
        raise BadParameter("--force is about a saved plan: give --plan FILE with it")
    trace = Trace()
    with redirect_stdout(sys.stderr), ExitStack() as stack:  # a model's prints are not the result
        with trace.on() if request.trace else nullcontext():
            runner = stack.enter_context(_captured(command, request))
            if request.trace:
                call_examples(runner)
        report = make(runner)
    if is_first_rank():
        if request.trace:
            save(request.trace, trace.to_json())
        publish(report, request.output, as_json=request.as_json, html=request.html)
    return report


@contextmanager
def _captured(command: str, request: Request) -> Iterator[GraphRunner]:
    """A block with the runner; at its end everything that ranks share is taken down."""
    loaded = read_config(request.config, request.overrides)
    config = loaded.config
    if request.plan is not None or has_ranks():
        refuse_auto(config)
    plan = build_plan(config) if request.plan is None else read_plan(request.plan)
    target, kwargs = loaded.model_for(str(request.config))
    if plan.keys and not any(
        extent.symbol for spec in config.tensors.values() for extent in spec.extents
    ):
        raise ConfigError(
            f"{request.config}: no input has a dimension that counts the rows of a batch",
            remedy="Declare the model's inputs, with num_tokens or num_reqs in a shape; `cgplan "
            "init TARGET` helps.",
        )
    if is_first_rank():
        check_outputs((request.output, request.trace, request.html), (request.config, request.plan))

    def load(backend: GraphBackend) -> Callable[..., Any]:
        with span("load model"):
            return load_model(
                target, kwargs, device=backend.device, base_dir=loaded.base_dir
            ).forward

    if has_ranks():
        with _captured_on_ranks(command, config, plan, request, load) as runner:
            yield runner
    else:
        is_auto = config.compilation.cudagraph_mode is CUDAGraphMode.AUTO
        backend, changes = select_backend(config.device), tuple[PlanChange, ...]()
        if not is_auto:
            plan = _fitted(plan, config, backend, request)
        model, began = load(backend), time.perf_counter()
        if not is_auto:
            try:
                runner = _run(config, plan, model, backend)
            except CaptureError as error:
                if command != "doctor":
                    raise
                reason = f"the capture failed: {error.message}"
                changes = (
                    PlanChange(requested=plan.mode, resolved=CUDAGraphMode.AUTO, reason=reason),
                )
        if is_auto or changes:
            config, plan = choose_mode(config, model, backend, anyway=not is_auto)
            plan = plan.model_copy(update={"changes": (*changes, *plan.changes)})
            runner = _run(
                config, _fitted(plan, config, backend, request), model, backend, began=began
            )
        yield runner


@contextmanager
def _captured_on_ranks(
    command: str,
    config: Config,
    plan: Plan,
    request: Request,
    load: Callable[[GraphBackend], Callable[..., Any]],
) -> Iterator[GraphRunner]:
    """A block with this rank's runner. At its end everything is taken down in the order of Note
    [Teardown].

    Ranks compare their configuration, model, and ``command``, because each command calls the runner
    in its own way; rank 0's plan is captured. Raises DistributedError on all ranks where one is
    missing, differs, or failed.
    """
    ranks = open_ranks(config.distributed, config.device)
    assert ranks is not None
    with ranks:
        backend = select_backend(str(ranks.device))
        agree_on_setup(ranks, config, backend, also={"the command": f"cgplan {command}"})
        with ranks.step("fitting the plan"):
            plan = _fitted(plan, config, backend, request)
        plan = agree_on_plan(ranks, plan)
        with open_all_reduce(config, ranks, backend) as reducer:
            with ranks.step("loading the model"), all_reduce_by(reducer):
                model = load(backend)
            agree_on_model(ranks, model)
            runner = _run(
                config, plan, model, reducer.backend, RankedCapture(ranks, reducer, config)
            )
            try:
                yield runner
                reducer.check()
            except BaseException as error:
                ranks.leave(error)  # the others are not to wait for this one
                raise
            finally:
                runner.close()


def _run(
    config: Config,
    plan: Plan,
    model: Callable[..., Any],
    backend: GraphBackend,
    together: RankSync = SINGLE_RANK,
    began: float | None = None,
) -> GraphRunner:
    with progress("capture" if is_first_rank() else "") as step:

        def show(at: CaptureProgress) -> None:
            step(at.index, at.total, f"{at.mode} {at.descriptor}")

        return CaptureSession(
            plan, model, backend, config, progress=show, together=together, began=began
        ).run()


def _fitted(plan: Plan, config: Config, backend: GraphBackend, request: Request) -> Plan:
    """The plan for this configuration and machine, announced; a saved one is checked. Raises
    PlanMismatchError, unless it is forced.
    """
    path, notes = request.plan, []
    if path is not None:
        try:
            machine = describe_environment(backend, plan.config_hash).as_machine
            found = fitted(plan, config, machine, force=request.force, file=str(path))
        except PlanMismatchError as error:
            raise PlanMismatchError(f"{path}: {error.message}", remedy=error.remedy) from None
        notes = [
            f"{path} decides {setting.name}; the value in the configuration is not used"
            for setting in unused_settings(plan, config)
        ]
        old, new = (_limits(budget) for budget in (plan.budget or {}, budget_of(config)))
        if old and old != new:
            present = (
                f"that of the configuration, {new}, bounds this capture"
                if new
                else "the configuration has none"
            )
            notes.append(f"{path} was made for a budget of {old}; {present}")
        plan = found.model_copy(update={"notes": tuple(notes)})  # its own are about planning
    for line in (
        (*(f"note: {text}" for text in notes), *announcements(plan)) if is_first_rank() else ()
    ):
        note(line)
    return plan


def _limits(budget: dict[str, Any]) -> str:
    """``2 GiB, 40 graphs``; nothing of the reserve, which no plan is made for."""
    words = {
        "memory": format_bytes,
        "capture_time": format_seconds,
        "max_graphs": "{} graphs at most".format,
    }
    return ", ".join(word(budget[name]) for name, word in words.items() if name in budget)
