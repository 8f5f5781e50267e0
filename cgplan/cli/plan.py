"""`cgplan plan`, `plan diff` and `plan check`: makes a plan, emits it for an engine, compares two,
tries other traffic.

torch is loaded for `--costs estimate` and `measure` alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from cgplan.cli.costs import Priced, about, costs_of
from cgplan.cli.output import check_outputs, note, publish, save, save_html, show
from cgplan.config import BudgetConfig, Config, LoadedConfig, Override, read_config, validate_config
from cgplan.config.load import read_text
from cgplan.errors import (
    ConfigError,
    PlanError,
    RegretError,
    ReportError,
    StepTimeError,
    TrafficError,
)
from cgplan.optimizer.evidence import Evidence, LadderPoint, PlanCheck, SizeUse
from cgplan.optimizer.subset import within_count
from cgplan.planning import Plan, build_plan
from cgplan.planning.build import refuse_auto
from cgplan.planning.difference import compare, machine_changes, named
from cgplan.planning.engines import Engine, VllmConfig, emit
from cgplan.planning.plan import Machine
from cgplan.reports import load_report
from cgplan.reports.plan_tables import brief, render_difference, said
from cgplan.reports.records import BenchReport, parse_report
from cgplan.units import counted, format_microseconds

if TYPE_CHECKING:
    from cgplan.traffic.histogram import Traffic
    from cgplan.traffic.simulation import RequestTrace
    from cgplan.traffic.step_times import StepTimes


INSURANCE = 0.1  # if none is asked for


class Loads(NamedTuple):
    """Traffic to plan for, and how it counts.

    Attributes:
        files: Each with the speed of its requests; an address of metrics is text.
        weights: Of the files; none: they count alike.
        scales: Each file is planned for at each of these speeds.
        replicas: Servers that share the requests.
        insurance, worst: As for ``propose``; None: a tenth.
    """

    files: tuple[tuple[Path | str, float], ...] = ()
    weights: tuple[float, ...] = ()
    scales: tuple[float, ...] = (1.0,)
    replicas: int = 1
    insurance: float | None = None
    worst: bool = False

    @property
    def is_recorded(self) -> bool:
        """Whether they are requests as they were recorded, of which nothing more was said."""
        said = self.weights or self.insurance is not None or self.worst
        return (
            not said
            and self.scales == (1.0,)
            and self.replicas == 1
            and all(speed == 1 for _, speed in self.files)
        )


def run_plan(
    given: Path | VllmConfig,
    overrides: Sequence[str | Override],
    *,
    loads: Loads,
    step_times: Path | None,
    costs: str | None,
    output: Path | None,
    engine: Engine | None,
    assumed_times: bool,
    html: Path | None,
    verbose: bool,
    as_json: bool,
) -> None:
    path = given if isinstance(given, Path) else None
    loaded = _loaded(given, overrides, engine)
    files = [file for file, _ in loads.files]
    check_outputs((output, html), (path, *files, step_times, costs))
    _check_times(loaded.config, loads, step_times, engine is not None and not assumed_times)
    if loaded.config.dims and (files or costs or engine or loaded.config.traffic is not None):
        others = engine or not loads.is_recorded or len(files) > 1
        priced = costs_of(loaded, costs)
        plan = _for_sizes(loaded.config, files[0] if files else None, step_times, priced, others)
    else:
        one_list = engine == "vllm" or (engine != "sglang" and not isinstance(given, Path))
        rules = {"one_list": one_list, "apart": engine == "sglang"}
        plan = _for_traffic(loaded, loads, step_times, costs_of(loaded, costs), rules)
    if not isinstance(given, Path):
        plan = plan.model_copy(update={"notes": (*given.notes, *plan.notes)})
    if engine is not None or as_json:
        for line in dict.fromkeys(
            (*announcements(plan), *(f"{label}: {text}" for label, text in said(plan)))
        ):
            note(line)
    if engine is None:
        publish(plan, output, as_json=as_json, html=html, shown=None if verbose else brief(plan))
        return
    if output is not None:
        save(output, plan.model_dump_json(indent=2) + "\n")
    if html is not None:
        save_html(html, plan)
    emission = emit(plan, engine)
    for line in emission.notes:
        note(f"note: {line}")
    typer.echo(emission.text)


def _loaded(
    given: Path | VllmConfig, overrides: Sequence[str | Override], engine: Engine | None
) -> LoadedConfig:
    loaded = read_config(given, overrides) if isinstance(given, Path) else given.loaded
    refuse_auto(loaded.config)
    if engine != "sglang" or "scheduler.mixed_batches" in loaded.origins:
        return loaded
    # as it runs by default
    apart = loaded.config.scheduler.model_copy(update={"mixed_batches": False})
    return replace(loaded, config=loaded.config.model_copy(update={"scheduler": apart}))


def _check_times(config: Config, loads: Loads, step_times: Path | None, own: bool) -> None:
    """Raise ConfigError for options without traffic, StepTimeError for ``own`` step times that are
    not given.
    """
    if (
        not loads.files
        and config.traffic is None
        and (not loads.is_recorded or step_times is not None)
    ):
        raise ConfigError(
            "--speedup, --scale, --replicas, --weights, --objective, --insurance and --step-times "
            "are about traffic, "
            "and there is none",
            remedy="Give --traffic FILE, or add a `traffic` section with the request_rate to the "
            "configuration.",
        )
    if loads.weights and len(loads.weights) != len(loads.files):
        raise ConfigError(
            f"{len(loads.weights)} weights for {len(loads.files)} files of traffic",
            remedy="Give --weights one number for each --traffic, such as 3,1.",
        )
    if loads.worst and max(len(loads.files), 1) * len(loads.scales) == 1:
        raise ConfigError(
            "--objective worst is about several loads, and there is one",
            remedy="Give --scale 1,2,4, or --traffic several times.",
        )
    if own and step_times is None and (loads.files or config.traffic) and not config.dims:
        raise StepTimeError(
            "no step times were given, and a plan by the default ones, of another model, is not "
            "emitted",
            remedy="Give --step-times FILE, which `cgplan bench --output` writes on your machine; "
            "or take the default "
            "ones for yours, with --assume-default-times.",
        )


def run_diff(old: Path, new: Path, *, as_json: bool) -> None:
    difference = compare(read_plan(old), read_plan(new))
    if as_json:
        typer.echo(difference.model_dump_json(indent=2))
    else:
        show(render_difference(difference, str(old), str(new)))


def run_check(
    path: Path, loads: Loads, step_times: Path | None, max_regret: float | None, as_json: bool
) -> None:
    """Show a plan on other traffic. Raises RegretError where it is farther from the best one than
    ``max_regret``.
    """
    plan = read_plan(path)
    if plan.config.get("dims"):
        raise PlanError(
            f"{path} has several sizes ({', '.join(plan.dim_names)}), which a check does not know",
            remedy="Plan for the new traffic, and compare the two with `cgplan plan diff`.",
        )
    simulated = {section: plan.config[section] | of for section, of in plan.simulated.items()}
    config = validate_config(plan.config | {"budget": plan.budget} | simulated)
    _check_times(config, loads, step_times, own=False)
    times, made = (
        _times_of(step_times, config),
        Evidence.model_validate(plan.evidence) if plan.evidence else None,
    )
    rules = {name: getattr(made, name) for name in ("insurance", "one_list", "apart") if made}
    steps = _steps(_sources(config, loads, plan), plan, times, config, rules.get("apart", False))
    check = _checked(plan, config, steps, times, rules)
    publish(check, None, as_json=as_json)
    if max_regret is not None and max(check.regret, check.decode_regret or 0) > max_regret:
        raise RegretError(
            f"{path} on {check.traffic_source}: {check.verdict}; --max-regret is {max_regret:.4%}",
            remedy="Plan for this traffic: `cgplan plan --config FILE --traffic FILE --output "
            "FILE`.",
        )


def _checked(
    plan: Plan,
    config: Config,
    loads: list[tuple[Traffic, float]],
    times: StepTimes,
    rules: dict[str, Any],
) -> PlanCheck:
    from cgplan.optimizer.lanes import Run
    from cgplan.optimizer.propose import propose
    from cgplan.traffic.histogram import Traffic

    traffic = Traffic.mixed(loads).model_copy(update={"apart": rules.get("apart", False)})
    run, graphs, total = Run(plan.keys, traffic, times), len(plan.keys), traffic.total
    figures: dict[str, Any] = {
        "expected_us": run.expected_us,
        "padding": run.padding,
        **run.by_kind,
    }
    unused = graphs - sum(use.size is not None for use in run.uses)
    own = LadderPoint(name="this plan", graphs=graphs, unused=unused, **figures)
    anew = propose(config, loads, times, **rules).evidence
    best = [anew.as_point("planned anew")]
    if graphs and graphs != anew.graphs:
        as_many = config.model_copy(update={"budget": BudgetConfig(max_graphs=graphs)})
        best.append(
            propose(as_many, loads, times, **rules).evidence.as_point(f"best with {graphs}")
        )
    bounded = plan.budget.keys() & {"max_graphs", "memory", "capture_time"}
    most = max(graphs, plan.budget.get("max_graphs", 0)) if bounded else math.inf
    least = min(
        own,
        *best,
        *(p for p in anew.ladders if p.graphs <= most),
        key=lambda point: point.expected_us,
    )
    regret = own.expected_us / least.expected_us - 1
    of_decode = own.decode_us / least.decode_us - 1 if own.decode_us and least.decode_us else None
    verdict = f"regret {regret:.2%}" + (
        "" if of_decode is None else f", of decode steps {of_decode:.2%}"
    )
    verdict += f": {format_microseconds(own.expected_us)} a step with {counted(graphs, 'graph')}"
    if least is not own:
        verdict += f", {format_microseconds(least.expected_us)} with {least.graphs} ({least.name})"
    uses = []
    for use in run.uses:
        means = {"step_us": use.microseconds / use.weight, "own_us": use.unpadded / use.weight}
        found: dict[str, Any] = {
            **use.lane._asdict(),
            **means,
            "share": use.weight / total,
            "padding": use.padding,
        }
        uses.append(SizeUse(size=use.size, **found))
    return PlanCheck(
        traffic_source=traffic.source,
        traffic_weight=total,
        times_source=times.source,
        notes=(*traffic.notes, *times.notes_for(plan.mode)),
        points=(own, *best, *anew.ladders),
        regret=regret,
        decode_regret=of_decode,
        uses=tuple(uses),
        verdict=verdict,
    )


def read_plan(path: Path) -> Plan:
    """A saved plan. Raises ReportError, also for another kind of report."""
    report = load_report(path)
    if not isinstance(report, Plan):
        raise ReportError(
            f"{path} is a {report.kind} report, not a plan",
            remedy="Give a file that `cgplan plan --output` wrote.",
        )
    return report


def announcements(plan: Plan) -> Iterator[str]:
    """Lines on differences from the request, for people who do not see the plan itself."""
    for change in plan.changes:
        yield f"note: cudagraph_mode {change.requested} -> {change.resolved}: {change.reason}"
    yield from (f"warning: {warning}" for warning in plan.warnings)


def _for_traffic(
    loaded: LoadedConfig,
    loads: Loads,
    step_times: Path | None,
    priced: Priced,
    rules: dict[str, Any],
) -> Plan:
    config = loaded.config
    if not loads.files and config.traffic is None:
        return _by_ladder(loaded, priced, one_list=rules["one_list"])
    from cgplan.optimizer.propose import choose, propose  # numpy from here on
    from cgplan.traffic.simulation import RequestTrace

    times, base = _times_of(step_times, config, priced.machine), build_plan(config)
    sources = _sources(config, loads, base)
    options = {
        "insurance": INSURANCE if loads.insurance is None else loads.insurance,
        "worst": loads.worst,
        **rules,
    }
    known, traffic = (
        (times, priced.costs, priced.failed),
        _steps(sources, base, times, config, rules["apart"]),
    )
    # they make other batches where steps differ
    if any(isinstance(source, RequestTrace) for source, _ in sources):
        chosen = choose(config, traffic, *known, **options).plan
        traffic = _steps(sources, chosen, times, config, rules["apart"])
    proposal = propose(config, traffic, *known, **options)
    return proposal.plan.model_copy(update={"machine": priced.machine})


def _times_of(file: Path | None, config: Config, machine: Machine | None = None) -> StepTimes:
    """Step times of a file, or the default ones; ``machine``: where costs were measured."""
    from cgplan.traffic.step_times import REMEDY, StepTimes

    if file is None:
        return StepTimes.default()
    text = read_text(file, StepTimeError, REMEDY)  # once: it may be a pipe
    times = StepTimes.parse(text, file)
    return times.model_copy(
        update={"notes": (*times.notes, *_about_times(text, file, config, machine))}
    )


def _sources(
    config: Config, loads: Loads, plan: Plan
) -> list[tuple[Traffic | RequestTrace, float]]:
    """Each load with its weight: a file's, or that of the `traffic` section, at each speed."""
    from cgplan.traffic.files import read_traffic, synthetic_requests
    from cgplan.traffic.simulation import RequestTrace

    rate = config.traffic.request_rate if config.traffic else None
    found = [
        read_traffic(file, plan, speedup=speed, request_rate=rate) for file, speed in loads.files
    ]
    if config.traffic is not None and not found:
        found = [synthetic_requests(config.traffic, plan)]
    sources: list[tuple[Traffic | RequestTrace, float]] = []
    for source, weight in zip(found, loads.weights or [1.0] * len(found), strict=True):
        if isinstance(source, RequestTrace):
            sources += [
                (source.hurried(scale).spread(loads.replicas), weight) for scale in loads.scales
            ]
        elif loads.scales == (1.0,) and loads.replicas == 1:
            sources.append((source, weight))
        else:
            raise TrafficError(
                f"{source.source} counts steps, which have no arrivals",
                remedy="Leave out --scale and --replicas, or give a request trace.",
            )
    return sources


def _steps(
    sources: Iterable[tuple[Traffic | RequestTrace, float]],
    plan: Plan,
    times: StepTimes,
    config: Config,
    apart: bool,
) -> list[tuple[Traffic, float]]:
    """Steps to plan for; requests are simulated with the step times that they would have under
    ``plan``.
    """
    from cgplan.traffic.simulation import RequestTrace, SchedulerBounds, simulate, step_clock

    bounds = SchedulerBounds.of(
        plan, config.speculative.accepted_tokens, config.scheduler.mixed_batches
    )
    clock = step_clock(plan, times, apart=apart)
    return [
        (simulate(one, bounds, clock) if isinstance(one, RequestTrace) else one, w)
        for one, w in sources
    ]


def _for_sizes(
    config: Config, file: Path | str | None, step_times: Path | None, priced: Priced, others: object
) -> Plan:
    if others or file is None or isinstance(file, str):
        raise ConfigError(
            "boxes of `dims` are planned for one --traffic FILE with a column for each dimension, "
            "without --speedup, "
            "--insurance and the like, --emit, --from-stats and the `traffic` section",
            remedy="Give that, and leave the others out.",
        )
    from cgplan.optimizer.boxes import dims_of, propose_boxes
    from cgplan.traffic.files import read_sizes
    from cgplan.traffic.step_times import StepSurface  # numpy from here on

    surface = None if step_times is None else StepSurface.load(step_times, config.dim_names)
    proposal = propose_boxes(config, read_sizes(file, dims_of(config)), surface, priced.costs)
    return proposal.plan.model_copy(update={"machine": priced.machine})


def _about_times(text: str, path: Path, config: Config, machine: Machine | None) -> Iterator[str]:
    """Notes on where step times were measured; ``machine``: where costs were."""
    report = (
        parse_report(text, path) if text.lstrip().startswith("{") and '"kind"' in text else None
    )
    if not isinstance(report, BenchReport):
        return
    yield from about(f"the step times of {path}", report.capture.plan, report.environment, config)
    measured_on = report.environment.as_machine
    if report.environment.driver is not None and machine not in (None, measured_on):
        found = named(machine_changes(machine, measured_on))
        yield f"the step times of {path} were measured on another machine than the costs: {found}"


def _by_ladder(loaded: LoadedConfig, priced: Priced, *, one_list: bool) -> Plan:
    """The plan of a configuration without traffic."""
    from cgplan.optimizer.lint import lint_without_traffic  # numpy from here on

    plan = within_count(build_plan(loaded.config), loaded.config, one_list=one_list)
    predicted = None if priced.costs is None else priced.costs.of(plan.keys)
    plan = plan.model_copy(update={"predicted": predicted, "machine": priced.machine})
    note = (
        "there is no traffic to plan for, so nothing was optimised: these are the sizes of the "
        "configuration "
        f"({plan.sizes_source}). Give --traffic FILE, or a `traffic` section, to have them chosen"
    )
    limits = " and ".join(
        f"budget.{name}" for name in plan.budget or {} if name in ("memory", "capture_time")
    )
    unbounded = (
        f"{limits} did not bound this plan: without traffic memory and time bound the capture alone"
    )
    lint = (*([unbounded] if limits else []), *lint_without_traffic(plan))
    return plan.model_copy(update={"notes": (note, *plan.notes), "lint": lint})
