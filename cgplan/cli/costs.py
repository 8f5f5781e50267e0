"""Costs of graphs: saved, estimated or measured."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from cgplan.cli.output import note, prints_aside
from cgplan.config import Config, LoadedConfig
from cgplan.config.load import read_text
from cgplan.errors import CaptureMemoryError, CgplanError, ModelError, ReportError
from cgplan.modes import Key
from cgplan.planning import Plan, build_plan
from cgplan.planning.difference import mismatches, named
from cgplan.planning.plan import Machine
from cgplan.planning.vllm_log import StartLog
from cgplan.pricing.costs import GraphCosts
from cgplan.reports import CaptureReport, Environment
from cgplan.reports.records import parse_report, uncapturable

_REMEDY = (
    "Give a capture report, the log of a start of vLLM, or one of the words estimate and measure."
)


class Priced(NamedTuple):
    costs: GraphCosts | None
    machine: Machine | None = None
    failed: Mapping[Key, str] = MappingProxyType({})  # keys of the report without a graph, and why
    kv_token_bytes: int = 0

    def plan_of(self, plan: Plan) -> Plan:
        predicted = None if self.costs is None else self.costs.of(plan.keys)
        return plan.changed(predicted=predicted, machine=self.machine)


def costs_of(loaded: LoadedConfig, given: str | None) -> Priced:
    if given is None:
        return Priced(None)
    if given in ("estimate", "measure"):
        with prints_aside():
            return Priced(_estimated(loaded)) if given == "estimate" else _measured(loaded)
    text = read_text(given, ReportError, _REMEDY)
    log = StartLog.parse(text)
    if log:
        costs = GraphCosts.from_vllm_log(log, loaded.config, given)
        return Priced(costs, kv_token_bytes=log.kv_token_bytes)
    if not text.lstrip().startswith("{"):
        raise ReportError(
            f"{given}: neither JSON nor a log of vLLM with `Graph capturing finished`",
            remedy=_REMEDY,
        )
    report = parse_report(text, given)
    if report.kind == "bench":
        report = report.capture
    if report.kind != "capture":
        raise ReportError(f"{given} is a {report.kind}, not a capture report", remedy=_REMEDY)
    environment = report.environment
    machine = None if environment.driver is None else environment.as_machine
    notes = tuple(about(f"the costs of {given}", report.plan, environment, loaded.config))
    costs = GraphCosts.from_report(report, loaded.config, notes)
    _check_modes(report, given, loaded.config)
    return Priced(costs, machine, uncapturable(report.failed))


def about(
    subject: str,
    plan: Plan,
    environment: Environment,
    config: Config,
    aside: Collection[str] = (),
) -> Iterator[str]:
    """Notes on figures of another ``plan``, or of the tape; ``aside``: they do not change them."""
    found = []
    for change in mismatches(plan, config):
        is_unnamed = change.name == "model.target" and change.new is None
        if not is_unnamed and change.name not in aside:
            found.append(change)
    if found:
        yield f"{subject} were measured with another configuration: {named(found)}"
    if environment.driver is None:
        yield f"{subject} are those of {environment.backend}, not of a GPU"


def _check_modes(
    report: CaptureReport,
    path: str,
    config: Config,
) -> None:
    from cgplan.optimizer.subset import within_count

    plan = within_count(build_plan(config), config)
    told = {record.mode for record in report.records}
    told.update(mode for mode, _ in uncapturable(report.failed))
    # others stand in where a capture of that mode has no such graph: a budget, lazy captures
    missing = {mode for mode, _ in plan.keys if not report.plan.mode.has_mode(mode)} - told
    if missing:
        lacking = " and ".join(sorted(map(str, missing)))
        had = " and ".join(sorted({str(record.mode) for record in report.records}))
        raise ReportError(
            f"{path} has no costs of {lacking} graphs: its graphs are {had}, and the configuration "
            f"has mode {plan.mode}",
            remedy=f"Give a capture in mode {plan.mode}, --costs measure or --costs estimate.",
        )


def _measured(loaded: LoadedConfig) -> Priced:
    target, kwargs = loaded.model_for("--costs measure")
    from cgplan.backends import select_backend  # torch from here on
    from cgplan.measure.calibrate import calibrate
    from cgplan.models.loading import load_model

    backend = select_backend(loaded.config.device)
    plan = build_plan(loaded.config)
    model = load_model(target, kwargs, device=backend.device, base_dir=loaded.base_dir)
    measured = calibrate(loaded.config, model, backend, plan)
    machine = backend.environment(plan.config_hash).as_machine
    return Priced(measured, None if backend.is_tape else machine)


def _estimated(loaded: LoadedConfig) -> GraphCosts:
    """Raises CaptureMemoryError where the model does not fit into the host's memory."""
    target, kwargs = loaded.model_for("--costs estimate")
    import torch

    from cgplan.captures.failures import is_out_of_memory
    from cgplan.measure.estimate import estimate, fake_tensors
    from cgplan.models.loading import load_model

    cpu = torch.device("cpu")
    build = partial(
        load_model,
        target,
        kwargs,
        device=cpu,
        base_dir=loaded.base_dir,
    )

    config = loaded.config
    plan = build_plan(config)
    note("running forwards of the model on tensors without memory, on the CPU")
    if config.device == "cpu":
        note("note: the estimate is of graphs on a GPU; --costs measure gives the costs here")
    try:
        with fake_tensors():
            try:
                model = build()
            except ModelError as error:
                reason = str(error.__cause__ or error.message).partition("\n")[0]
                note(
                    "the model is built with memory for its weights; without, building fails: "
                    f"{reason}"
                )
            else:
                return estimate(config, model, plan)
        return estimate(config, build(), plan)
    except CgplanError as error:
        if not is_out_of_memory(error.__cause__ or error):
            raise
        raise CaptureMemoryError(
            f"--costs estimate: the model does not fit into this machine's memory: {error.message}",
            remedy="Shrink model.kwargs: KV cache, layers; or give --costs a capture on the GPU.",
        ) from error
