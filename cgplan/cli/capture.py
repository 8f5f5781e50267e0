"""`cgplan capture`, `bench`, `doctor` and `audit`: load the model, capture, measure."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.backend import Trace, span
from cgplan.captures.audit import audit_error
from cgplan.captures.captured_keys import CaptureProgress
from cgplan.captures.model_graphs import SINGLE_RANK, RankSync
from cgplan.cli.options import DoctorRequest, Prepared
from cgplan.cli.output import has_ranks, is_first_rank, note, prints_aside, progress, save
from cgplan.cli.plan import announcements
from cgplan.config import Config
from cgplan.distributed import (
    RankedCapture,
    agree_on_model,
    agree_on_plan,
    agree_on_setup,
    all_reduce_by,
    open_all_reduce,
    open_ranks,
)
from cgplan.errors import AuditError, CaptureError, PlanMismatchError
from cgplan.measure.bench import bench, call_examples, check_up
from cgplan.models.loading import load_model
from cgplan.modes import CUDAGraphMode
from cgplan.piecewise.routes import SplitRoute
from cgplan.planning import Plan
from cgplan.planning.difference import fitted, unused_settings
from cgplan.planning.plan import PlanChange, budget_of
from cgplan.reports import AuditReport, Report
from cgplan.runner.auto import Trials
from cgplan.runner.runner import GraphRunner
from cgplan.runner.session import CaptureSession

Load = Callable[[GraphBackend], Callable[..., Any]]


REPORTS: dict[str, Callable[[GraphRunner], Report]] = {
    "capture": lambda runner: runner.report,
    "doctor": check_up,
    "audit": lambda runner: runner.report.audit or runner.audit(),
}


def run_bench(
    request: DoctorRequest, prepared: Prepared, against: Sequence[str], seed: int | None
) -> None:
    def measured(runner: GraphRunner) -> Report:
        with progress("bench" if is_first_rank() else "") as step:
            return bench(runner, progress=step, against=against, seed=seed)

    run("bench", request, prepared, measured)


def run(
    command: str,
    request: DoctorRequest,
    prepared: Prepared,
    make: Callable[[GraphRunner], Report] | None = None,
) -> None:
    make = make or REPORTS[command]
    trace = Trace()
    with prints_aside(), ExitStack() as stack:
        try:
            with trace.on() if request.trace else nullcontext():
                runner = stack.enter_context(_captured(command, request, prepared))
                if request.trace:
                    call_examples(runner)
            report = make(runner)
        except AuditError as error:
            if command != "audit":
                raise
            report = error.report
    if is_first_rank():
        if request.trace:
            save(request.trace, trace.to_json())
        request.publish(report)
    if isinstance(report, AuditReport) and report.findings:
        raise audit_error(report)


@contextmanager
def _captured(command: str, request: DoctorRequest, prepared: Prepared) -> Iterator[GraphRunner]:
    def load(backend: GraphBackend) -> Callable[..., Any]:
        base_dir = prepared.loaded.base_dir
        device = backend.device
        with span("load model"):
            return load_model(prepared.target, prepared.kwargs, device=device, base_dir=base_dir)

    if has_ranks():
        with _captured_on_ranks(command, request, prepared, load) as runner:
            yield runner
    else:
        yield _captured_alone(command, request, prepared, load)


def _captured_alone(
    command: str,
    request: DoctorRequest,
    prepared: Prepared,
    load: Load,
) -> GraphRunner:
    config = prepared.loaded.config
    plan = prepared.plan
    backend = select_backend(config.device)
    is_auto = config.compilation.cudagraph_mode is CUDAGraphMode.AUTO
    if not is_auto:
        plan = _fitted(plan, config, backend, request)
    model = load(backend)
    began = time.perf_counter()
    failed: tuple[PlanChange, ...] = ()
    if not is_auto:
        try:
            return _run(config, plan, model, backend)
        except CaptureError as error:
            if command != "doctor":
                raise
            reason = f"the capture failed: {error.message}"
            change = PlanChange(requested=plan.mode, resolved=CUDAGraphMode.AUTO, reason=reason)
            failed = (change,)

    def captured(config: Config, plan: Plan, route: SplitRoute | None) -> GraphRunner:
        plan = plan.changed(changes=(*failed, *plan.changes))
        plan = _fitted(plan, config, backend, request)
        return _run(config, plan, model, backend, began=began, route=route)

    return Trials(config, model, backend, even_if_slower=bool(failed)).choose(captured)


@contextmanager
def _captured_on_ranks(
    command: str, request: DoctorRequest, prepared: Prepared, load: Load
) -> Iterator[GraphRunner]:
    """Rank 0's plan is captured. Raises DistributedError on all ranks where one fails."""
    config = prepared.loaded.config
    ranks = open_ranks(config.distributed, config.device)
    assert ranks
    with ranks:
        backend = select_backend(str(ranks.device))
        agree_on_setup(ranks, config, backend, also={"the command": f"cgplan {command}"})
        with ranks.step("fitting the plan"):
            plan = _fitted(prepared.plan, config, backend, request)
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
                ranks.leave(error)  # so that the others do not wait
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
    route: SplitRoute | None = None,
) -> GraphRunner:
    with progress("capture" if is_first_rank() else "") as step:

        def show(at: CaptureProgress) -> None:
            step(at.index, at.total, f"{at.mode} {at.descriptor}")

        session = CaptureSession(
            plan,
            model,
            backend,
            config,
            progress=show,
            together=together,
            began=began,
            route=route,
        )
        return session.run()


def _fitted(
    plan: Plan,
    config: Config,
    backend: GraphBackend,
    request: DoctorRequest,
) -> Plan:
    path = request.plan
    notes = []
    if path:
        machine = backend.environment(plan.config_hash).as_machine
        try:
            found = fitted(plan, config, machine, force=request.force, file=str(path))
        except PlanMismatchError as error:
            error.message = f"{path}: {error.message}"
            raise
        for setting in unused_settings(plan, config):
            unused = "the value in the configuration is not used"
            notes.append(f"{path} decides {setting.name}; {unused}")
        if not plan.budget.items() <= budget_of(config).items():
            notes.append(f"{path} is used; it was made for another budget than the configuration's")
        plan = found.changed(notes=tuple(notes))
    if is_first_rank():
        for line in (*(f"note: {text}" for text in notes), *announcements(plan)):
            note(line)
    return plan
