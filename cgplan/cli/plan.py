"""`cgplan plan` and `plan check`, with costs of graphs that are saved, estimated or measured; torch
is loaded for `--costs estimate` and `measure` alone.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from cgplan.cli.options import EngineName, Loads, ModeChoice, Objective, PlanRequest, Shown
from cgplan.cli.output import check_outputs, note, prints_aside, progress
from cgplan.config import Config, LoadedConfig, Override, read_config
from cgplan.config.load import read_text
from cgplan.config.schema import TAPE
from cgplan.errors import (
    CaptureMemoryError,
    CgplanError,
    ConfigError,
    ModelError,
    PlanError,
    RegretError,
    ReportError,
    StepTimeError,
    TrafficError,
)
from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.evidence import Evidence
from cgplan.planning import Plan, build_plan
from cgplan.planning.difference import (
    FieldChange,
    machine_changes,
    mismatches,
    named,
    timed_otherwise,
)
from cgplan.planning.engines import (
    NO_OPTIONS,
    Engine,
    VllmConfig,
    read_sglang,
    sizes_by_lane,
    with_emission,
)
from cgplan.planning.plan import RULES, Machine, refuse_auto
from cgplan.planning.vllm_log import StartLog, lowered, without_graphs
from cgplan.pricing import GraphCosts
from cgplan.reports import CaptureReport, Environment, load_plan
from cgplan.reports.plan_tables import brief, said
from cgplan.reports.records import BenchReport, parse_report, uncapturable
from cgplan.units import listed

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cgplan.optimizer.decisions import Source
    from cgplan.traffic.step_times import StepTimes


_REMEDY = (
    "Give a capture report, the log of a start of vLLM, or one of the words estimate and measure."
)


class Priced(NamedTuple):
    costs: GraphCosts | None
    machine: Machine | None = None
    failed: Mapping[Key, str] = MappingProxyType({})  # keys of the report without a graph, and why
    log: StartLog | None = None
    doubts: tuple[str, ...] = ()

    def plan_of(self, plan: Plan) -> Plan:
        predicted = self.costs and self.costs.of(plan.keys)
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
        config = lowered(loaded, log).config
        costs = GraphCosts.from_vllm_log(log, config, given)
        plan = build_plan(config)
        doubts = tuple(log.of_other_options(plan)) if any(log.other_memory(plan)) else ()
        return Priced(costs, log=log, doubts=doubts)
    if not text.lstrip().startswith("{"):
        raise ReportError(f"{given}: {without_graphs(text)}", remedy=_REMEDY)
    report = parse_report(text, given)
    if report.kind == "bench":
        report = report.capture
    if report.kind != "capture":
        raise ReportError(f"{given} is a {report.kind}, not a capture report", remedy=_REMEDY)
    environment = report.environment
    machine = None if environment.driver is None else environment.as_machine
    changes = mismatches(report.plan, loaded.config)
    notes = about(f"the costs of {given}", changes, environment)
    costs = GraphCosts.from_report(report, loaded.config, tuple(notes))
    _check_modes(report, given, loaded.config)
    return Priced(costs, machine, uncapturable(report.failed))


def about(
    subject: str,
    changes: Iterable[FieldChange],
    environment: Environment,
) -> Iterator[str]:
    """Notes on figures of another configuration, or of the tape."""
    found = []
    for change in changes:
        if change.name != "model.target" or change.new is not None:
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
    from cgplan.measure.costs import calibrate
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
    from cgplan.measure.costs import estimate, fake_tensors
    from cgplan.models.loading import load_model

    build = partial(
        load_model,
        target,
        kwargs,
        device=torch.device("cpu"),
        base_dir=loaded.base_dir,
    )

    config = loaded.config
    plan = build_plan(config)
    note("running forwards of the model on tensors without memory, on the CPU")
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


def run_plan(
    request: PlanRequest, settings: Sequence[str | Override], loads: Loads, vllm: VllmConfig | None
) -> None:
    """Raises RegretError where no plan holds the SLO."""
    given = vllm.options if vllm else NO_OPTIONS
    if request.sglang is not None:
        given = read_sglang(request.sglang)
    given = given._replace(
        again=_options({"--costs": request.costs, **loads.measured}),
        rounded=_options({"--costs": request.costs, "--output": request.output}),
    )
    engine = request.engine
    path = None if vllm else request.path
    loaded = vllm.loaded if vllm else read_config(request.path, settings)
    refuse_auto(loaded.config.compilation)
    loaded = _as_engine_runs(loaded, engine, is_read=path is None)
    config = loaded.config
    files = [file for file, _ in loads.files]
    measured = loads.measured.values()
    check_outputs((request.output, request.html), (path, *files, *measured, request.costs))
    _check_loads(config, loads)
    has_traffic = files or config.traffic
    if request.emit or has_traffic:
        _refuse_varlen(config)
    may_be_emitted = loads.step_times or request.assume_default_times or not has_traffic
    if request.emit and not may_be_emitted and not config.dims:
        raise StepTimeError(
            "a plan by the default step times, of another model, is not emitted",
            remedy="Give --step-times FILE, of `cgplan bench --output` or of an engine's log; or "
            "--assume-default-times.",
        )
    priced = costs_of(loaded, request.costs)
    loaded = lowered(loaded, priced.log)
    plans_for = engine or ("vllm" if vllm else None)
    log = None
    if config.dims and (has_traffic or request.costs or request.emit):
        plan = _for_sizes(config, loads, priced, is_emitted=request.emit is not None)
    elif has_traffic:
        times, log = _times_of(loads, loaded.config, priced, loads.replicas)
        loaded = lowered(loaded, log)
        plan = _for_traffic(
            loaded, loads, priced, times, plans_for, is_emitted=request.emit is not None
        )
    else:
        plan = _by_ladder(loaded.config, priced, one_list=plans_for == "vllm")
    if vllm:
        plan = plan.changed(notes=(*vllm.said(priced.log, log), *plan.notes))
    if request.emit or request.as_json:
        told = [f"{label}: {text}" for label, text in said(plan)]
        for line in dict.fromkeys((*announcements(plan), *told)):
            note(line)
    evidence = plan.evidence or {}
    doubt = (evidence.get("step_times") or {}).get("doubt")
    if plans_for and may_be_emitted and not doubt:
        plan = with_emission(plan, plans_for, given)
    request.publish(plan, _shown(plan, request))
    missed = evidence.get("slo_missed")
    if missed is not None:
        remedy = "Serve fewer requests a replica (--replicas), try another max_num_batched_tokens, "
        for limit in evidence["binding"]:
            remedy += f"give a larger --{limit.replace('_', '-')}, "
        raise RegretError(
            "no number of graphs that was tried holds the SLO; with the plan that is shown "
            f"{missed}",
            remedy=f"{remedy}or loosen the SLO.",
        )


def _shown(plan: Plan, request: PlanRequest) -> RenderableType | None:
    if request.emit is EngineName.json:
        return sizes_by_lane(plan)
    emission = plan.emission
    if request.emit and emission:
        bounds = emission.bounds.replace("\n", ", ")
        for line in (*emission.notes, " and ".join((f"made for {bounds}", *emission.environment))):
            note(f"note: {line}")
        return emission.options
    return None if request.verbose else brief(plan)


def run_check(path: Path, loads: Loads, max_regret: float | None, shown: Shown) -> None:
    """Raises RegretError where the plan misses its SLO, or beyond ``max_regret``."""
    plan = load_plan(path)
    if plan.config.get("dims"):
        raise PlanError(
            f"{path} has several sizes ({', '.join(plan.dim_names)}), which no check supports",
            remedy="Plan for the new traffic, and compare the two with `cgplan plan diff`.",
        )
    made = Evidence.model_validate(plan.evidence) if plan.evidence else None
    budget = dict(plan.budget)
    if made and "slo" in made.binding:
        budget["max_graphs"] = plan.num_graphs
        budget["memory"] = plan.predicted and plan.predicted.total_bytes
    config = plan.settings.with_values("budget", **budget)
    _check_loads(config, loads)
    _refuse_varlen(config)
    rules: dict[str, Any] = {"insurance": 0.0, "replicas": 1}
    if made:
        rules = {name: getattr(made, name) for name in RULES}
    if loads.replicas:
        rules["replicas"] = loads.replicas
    times, _ = _times_of(loads, config, Priced(None), rules["replicas"])
    if made:
        if made.step_times and not loads.step_times:
            times = times.model_validate(made.step_times)
        elif times.source != made.times_source:
            other = f"the plan was made with other step times: {made.times_source}"
            times = times.changed(notes=(other, *times.notes))
    from cgplan.optimizer.decisions import Planner  # numpy from here on

    sources = _sources(config, loads, plan, rules["replicas"])
    costs = None
    if plan.predicted and plan.keys:
        costs = GraphCosts.of_captures(
            list(zip(plan.keys, plan.predicted.keys, strict=True)),
            config,
            plan.max_capture_size,
            source=plan.predicted.source,
            workspace_bytes=plan.predicted.workspace_bytes,
        )
    command = _command_anew(path, plan, loads, rules)
    planner = Planner(times, sources, costs, **rules)
    check = planner.check(config, plan)
    for name, value in plan.budget.items():
        command += f" --set budget.{name}={value}"
    shown.publish(check)
    if check.slo_missed:
        raise RegretError(
            f"{path} on {check.traffic_source} misses its SLO: {check.slo_missed}",
            remedy=f"Plan for this traffic: `{command}`, or loosen the SLO.",
        )
    if max_regret is not None and max(check.regret, check.decode_regret or 0) > max_regret:
        raise RegretError(
            f"{path} on {check.traffic_source}: {check.verdict}; --max-regret is "
            f"{max_regret * 100:g}%",
            remedy=f"Plan for this traffic: `{command}`.",
        )


def _command_anew(path: Path, plan: Plan, loads: Loads, rules: Mapping[str, Any]) -> str:
    from cgplan.optimizer.decisions import INSURANCE

    command: str = getattr(plan.emission, "command", "") or "cgplan plan FILE"
    command, *known = command.partition(" --step-times")
    for file, speed in loads.files:
        name = str(file) if speed == 1 else f"{file}@{speed:g}x"
        command += f" --traffic {shlex.quote(name)}"
    repeated = {
        "--output": path.with_stem(f"new-{path.stem}"),
        "--weights": ",".join(map("{:g}".format, loads.weights or ())),
        "--scale": ",".join(map("{:g}".format, loads.scale)),
        "--speedup": loads.speedup,
        "--replicas": rules["replicas"],
        "--kv-cache-tokens": rules.get("kv_tokens"),
        "--objective": rules.get("objective"),
        "--insurance": None if rules["insurance"] == INSURANCE else rules["insurance"],
    }
    command += _options(repeated, 1, "1", Objective.robust)
    for goal in rules.get("slo", ()):
        command += f" --slo {goal.name}={goal.microseconds:.12g}us"
    return command + (_options(loads.measured) or "".join(known) or " --step-times FILE")


def _options(given: Mapping[str, object], *usual: object) -> str:
    """Those with another value than by default, each after a space."""
    told = ""
    for option, value in given.items():
        if value not in (None, "", *usual):
            told += f" {option} {shlex.quote(str(value))}"
    return told


def announcements(plan: Plan) -> Iterator[str]:
    for change in plan.changes:
        yield f"note: cudagraph_mode {change.requested} -> {change.resolved}: {change.reason}"
    for warning in plan.warnings:
        yield f"warning: {warning}"


# --- what is refused ------------------------------------------------------------------------------


def _check_loads(config: Config, loads: Loads) -> None:
    given = {
        "--speedup, --scale, --replicas, --weights, --objective or --insurance": (
            not loads.is_recorded
        ),
        "--step-times": loads.step_times,
        "--slo": loads.slo,
        "--mode best": loads.mode is ModeChoice.best,
        "--kv-cache-tokens": loads.kv_cache_tokens,
        "--kv-token-bytes": loads.kv_token_bytes,
    }
    named = [name for name, value in given.items() if value]
    if named and not loads.files and not config.traffic:
        raise ConfigError(
            f"{listed(named)}: no traffic was given",
            remedy="Give --traffic FILE, or a `traffic` section in the configuration.",
        )
    if loads.lora_step_times and not (loads.step_times and config.lora):
        raise ConfigError(
            f"--lora-step-times {loads.lora_step_times}: no other step times, or no adapters",
            remedy="Give --step-times, too, of steps without adapters, and --enable-lora, or a "
            "`lora` section.",
        )
    if loads.weights and len(loads.weights) != len(loads.files):
        raise ConfigError(
            f"{len(loads.weights)} weights for {len(loads.files)} files of traffic",
            remedy="Give --weights one number for each --traffic, such as 3,1.",
        )


def _refuse_varlen(config: Config) -> None:
    if config.speculative.varlen_decode and config.compilation.key_rules == "vllm_v2":
        raise PlanError(
            "decode graphs of any number of drafts (speculative.varlen_decode) are neither planned "
            "for traffic nor emitted",
            remedy="Leave out --traffic and --emit, or set speculative.varlen_decode: false.",
        )


# --- the plan -------------------------------------------------------------------------------------


def _as_engine_runs(
    loaded: LoadedConfig,
    engine: Engine | None,
    *,
    is_read: bool,
) -> LoadedConfig:
    """The configuration as an engine runs by default; ``is_read``: from the engine's options."""
    config = loaded.config
    if engine == "sglang" and "scheduler.mixed_batches" not in loaded.origins:
        config = config.with_values("scheduler", mixed_batches=False)
    if engine == "vllm" and not is_read and "compilation.key_rules" not in loaded.origins:
        config = config.with_values("compilation", key_rules="vllm_v2")
    if engine == "trtllm":
        mode = build_plan(config).mode
        is_asked_for = not loaded.origin("compilation.cudagraph_mode").endswith("default")
        has_prefill = is_asked_for and mode.mixed_mode() is CUDAGraphMode.PIECEWISE
        if mode.has_mode(CUDAGraphMode.FULL) and not has_prefill:  # off by its default
            config = config.with_values(
                "compilation", cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY
            )
    return replace(loaded, config=config)


def _by_ladder(
    config: Config,
    priced: Priced,
    *,
    one_list: bool,
) -> Plan:
    from cgplan.optimizer.lint import lint_without_traffic
    from cgplan.optimizer.subset import within_count

    plan = priced.plan_of(within_count(build_plan(config), config, one_list=one_list))
    note = (
        "there is no traffic to plan for, so nothing was optimised: these are the sizes of the "
        f"configuration ({plan.sizes_source}). To have them chosen, give --traffic FILE"
    )
    lint = [*lint_without_traffic(plan)]
    limits = [f"budget.{name}" for name in ("memory", "capture_time") if name in plan.budget]
    if limits:
        lint.insert(
            0,
            f"{' and '.join(limits)} did not bound this plan: without traffic memory and time "
            "bound the capture alone",
        )
    return plan.changed(notes=(note, *plan.notes), lint=tuple(lint))


def _for_sizes(
    config: Config,
    loads: Loads,
    priced: Priced,
    *,
    is_emitted: bool,
) -> Plan:
    if len(loads.files) != 1 or is_emitted or not loads.is_recorded:
        raise ConfigError(
            "boxes of `dims` need one --traffic FILE with a column for each dimension, and no "
            "--emit, `traffic` section, --speedup or the like",
            remedy="Join files into one CSV, and leave the other options out.",
        )
    from cgplan.optimizer.boxes import dims_of, propose_boxes
    from cgplan.traffic.files import read_sizes
    from cgplan.traffic.step_times import REMEDY, StepSurface

    surface = None
    doubts = [*priced.doubts]
    file = loads.step_times
    if file:
        text = read_text(file, StepTimeError, REMEDY)
        surface = StepSurface.parse(text, file, config.dim_names)
        doubts += _doubts(text, None, file, config, priced)
    sizes = read_sizes(loads.files[0][0], dims_of(config), build_plan(config))
    plan = propose_boxes(config, sizes, surface, priced.costs)
    evidence = {**(plan.evidence or {})}
    evidence["unsure"] = [*doubts, *evidence["unsure"]]
    return plan.changed(machine=priced.machine, evidence=evidence)


def _for_traffic(
    loaded: LoadedConfig,
    loads: Loads,
    priced: Priced,
    times: StepTimes,
    engine: Engine | None,
    *,
    is_emitted: bool,
) -> Plan:
    from cgplan.optimizer.decisions import INSURANCE, LARGE, Planner
    from cgplan.traffic.simulation import RequestTrace

    config = loaded.config
    if is_emitted and TAPE in times.doubt:
        raise StepTimeError(
            "a plan by step times of the CPU stand-in is not emitted",
            remedy="Give --step-times FILE of a GPU, by `cgplan bench` there or an engine's log "
            "(docs/planning.md).",
        )
    mode = loads.mode
    is_named = not loaded.origin("compilation.cudagraph_mode").endswith("default")
    aside: tuple[str, ...] = ()
    if mode is None and loads.step_times and engine == "vllm":
        if is_named:
            aside = ("cudagraph_mode was given: --mode best weighs others",)
        else:
            mode = ModeChoice.best
    if loads.slo and not loads.step_times:
        raise StepTimeError(
            "an SLO needs the step times of your model, and the default ones are of another",
            remedy="Give --step-times FILE, of `cgplan bench FILE --output`, or of an engine at "
            "contexts as long as your requests' (docs/planning.md, Step times).",
        )
    replicas = loads.replicas or 1
    kv_tokens = kv_token_bytes = 0
    if priced.log:
        kv_tokens = priced.log.kv_tokens
        kv_token_bytes = priced.log.kv_token_bytes
    with progress("planning for the traffic") as step:
        planner = Planner(
            times,
            _sources(config, loads, build_plan(config), replicas),
            priced.costs,
            priced.failed,
            INSURANCE if loads.insurance is None else loads.insurance,
            loads.objective,
            any_mode=mode is ModeChoice.best,
            slo=loads.slo or (),
            kv_tokens=loads.kv_cache_tokens or kv_tokens or None,
            kv_token_bytes=loads.kv_token_bytes or kv_token_bytes,
            replicas=replicas,
            one_list=engine == "vllm",
            apart=engine not in (None, "vllm"),
            any_memory="budget.memory" in loaded.origins,
            progress=step,
        )
        plan = planner.decide(config)
    notes = (*aside, *plan.notes)
    for source, _ in planner.sources:
        if isinstance(source, RequestTrace) and len(source.requests) > LARGE:
            of_first = f"the first plan and higher loads are of its first {LARGE:,} requests"
            notes = (f"{source.source}: {of_first}", *notes)
    return plan.changed(machine=priced.machine, notes=notes)


# --- traffic and step times -----------------------------------------------------------------------


def _times_of(
    loads: Loads,
    config: Config,
    priced: Priced,
    replicas: int | None,
) -> tuple[StepTimes, StartLog | None]:
    from cgplan.traffic.step_times import REMEDY, StepTimes

    times, log = StepTimes.default(), None
    doubts = [*priced.doubts]
    in_step = config.distributed.data_parallel_sync
    for file in filter(None, loads.measured.values()):
        text = read_text(file, StepTimeError, REMEDY)  # once: it may be a pipe
        started = StartLog.parse(text)
        log = log or started
        doubts += _doubts(text, started, file, config, priced)
        own = StepTimes.parse(text, file, in_step=in_step)
        times = own if file is loads.step_times else times.beside(own)
    starts = list(filter(None, (log, priced.log)))
    doubts += {start.lowering for start in starts if start.support is not None}
    ranks = max([start.ranks for start in starts], default=1)
    of_ranks = f"the log is of {ranks} data-parallel ranks: "
    if ranks > 1 and replicas != ranks:
        doubts.append(f"{of_ranks}for requests of all give --data-parallel-size {ranks}")
    if ranks > 1 and not in_step:
        doubts.append(
            f"{of_ranks}for a mixture of experts give --set distributed.data_parallel_sync=true"
        )
    return times.changed(unsure=(*doubts, *times.unsure)), log


def _doubts(
    text: str,
    log: StartLog | None,
    file: Path,
    config: Config,
    priced: Priced,
) -> Iterator[str]:
    subject = f"the step times of {file}"
    model = priced.costs and priced.costs.model
    if log and model and log.model not in (None, model):
        yield f"{subject} are of {log.model}, the costs of {model}"
    if not re.search(r'"kind":\s*"bench"', text):
        return
    from cgplan.reports.run_tables import unsure

    report = parse_report(text, file)
    assert isinstance(report, BenchReport)
    environment = report.environment
    for warning in unsure(report):
        yield f"{subject}: {warning}"
    yield from about(subject, timed_otherwise(report.capture.plan, config), environment)
    measured_on = environment.as_machine
    if environment.driver is not None and priced.machine not in (None, measured_on):
        found = named(machine_changes(priced.machine, measured_on))
        yield f"{subject} were measured on another machine than the costs: {found}"


def _sources(
    config: Config,
    loads: Loads,
    plan: Plan,
    replicas: int,
) -> list[tuple[Source, float]]:
    from cgplan.traffic.files import read_traffic
    from cgplan.traffic.simulation import RequestTrace, synthetic_requests

    rate = config.traffic.request_rate if config.traffic else None
    servers = 1 if config.distributed.data_parallel_sync else replicas
    found = [
        read_traffic(file, plan, speedup=speed, request_rate=rate) for file, speed in loads.files
    ]
    if config.traffic and not found:
        found.append(synthetic_requests(config.traffic, plan))
    sources: list[tuple[Source, float]] = []
    weights = loads.weights or [1.0] * len(found)
    for source, weight in zip(found, weights, strict=True):
        if isinstance(source, RequestTrace):
            for scale in loads.scales:
                sources.append((source.hurried(scale).spread(servers), weight))
        elif loads.scales == (1.0,) and loads.replicas in (None, 1):
            sources.append((source, weight))
        else:
            raise TrafficError(
                f"{source.source} counts steps, which have no arrivals",
                remedy="Leave out --scale, --replicas and --data-parallel-size, or give a request "
                "trace.",
            )
    return sources
