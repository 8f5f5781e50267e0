"""`cgplan plan`, `plan diff` and `plan check`: makes a plan, emits it for an engine, compares two, tries other traffic.

torch is loaded for `--costs estimate` and `measure` alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from cgplan.cli.costs import Priced, about, costs_of
from cgplan.cli.output import check_writable, note, publish, save, show
from cgplan.config import BudgetConfig, Config, LoadedConfig, Override, read_config, validate_config
from cgplan.config.load import read_text
from cgplan.errors import ConfigError, OutputPathError, PlanError, RegretError, ReportError, StepTimeError, TrafficError
from cgplan.optimizer.evidence import Evidence, LadderPoint, PlanCheck, SizeUse
from cgplan.optimizer.subset import within_count
from cgplan.planning import Plan, build_plan
from cgplan.planning.build import refuse_auto
from cgplan.planning.difference import compare, machine_changes, named
from cgplan.planning.engines import Engine, VllmConfig, emit
from cgplan.planning.plan import Machine
from cgplan.reports import load_report, render
from cgplan.reports.layout import html_text
from cgplan.reports.plan_tables import brief, padding_bars, pareto_plot, render_difference, said
from cgplan.reports.plots import Bar, ParetoPlot, check_plot_path, picture
from cgplan.reports.records import BenchReport, parse_report
from cgplan.units import counted, format_microseconds

if TYPE_CHECKING:
    from cgplan.traffic.histogram import Traffic
    from cgplan.traffic.simulation import RequestTrace
    from cgplan.traffic.step_times import StepTimes


class Loads(NamedTuple):
    """Traffic to plan for, and how it counts.

    Attributes:
        files: Each with the speed of its requests; an address of metrics is text.
        weights: Of the files; none: they count alike.
        scales: Each file is planned for at each of these speeds.
        replicas: Servers that share the requests.
        insurance, worst: As for ``propose``.
    """

    files: tuple[tuple[Path | str, float], ...] = ()
    weights: tuple[float, ...] = ()
    scales: tuple[float, ...] = (1.0,)
    replicas: int = 1
    insurance: float = 0.0
    worst: bool = False

    @property
    def is_recorded(self) -> bool:
        """Whether they are requests as they were recorded."""
        return self.scales == (1.0,) and self.replicas == 1 and all(speed == 1 for _, speed in self.files)


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
    plot: Path | None,
    html: Path | None,
    verbose: bool,
    as_json: bool,
) -> None:
    path = given if isinstance(given, Path) else None
    loaded = _loaded(given, overrides, engine)
    if plot is not None:
        check_plot_path(plot)
    files = [file for file, _ in loads.files]
    _check_outputs((output, plot, html), (path, *files, step_times, costs))
    _check_times(loaded.config, loads, step_times, engine is not None and not assumed_times)
    if loaded.config.dims and (files or costs or engine or loaded.config.traffic is not None):
        others = engine or not loads.is_recorded or len(files) > 1
        priced = costs_of(loaded, costs)
        plan, curve, bars = _for_sizes(loaded.config, files[0] if files else None, step_times, priced, others)
    else:
        one_list = engine == "vllm" or not isinstance(given, Path)
        plan, curve, bars = _for_traffic(loaded, loads, step_times, costs_of(loaded, costs), one_list)
    if not isinstance(given, Path):
        plan = plan.model_copy(update={"notes": (*given.notes, *plan.notes)})
    if plot is not None and curve is None and not bars:
        note(f"note: {plot} was not drawn: there is no graph, and no traffic")
    elif plot is not None:
        save(plot, picture(plot, curve, bars))
    if html is not None:
        save(html, html_text(render(plan), f"cgplan plan of {path.name if path else 'vLLM'}"))
    if engine is not None or as_json:
        for line in dict.fromkeys((*announcements(plan), *(f"{label}: {text}" for label, text in said(plan)))):
            note(line)
    if engine is None:
        publish(plan, output, as_json=as_json, shown=None if verbose else brief(plan))
        return
    if output is not None:
        save(output, plan.model_dump_json(indent=2) + "\n")
    emission = emit(plan, engine)
    for line in emission.notes:
        note(f"note: {line}")
    typer.echo(emission.text)


def _loaded(given: Path | VllmConfig, overrides: Sequence[str | Override], engine: Engine | None) -> LoadedConfig:
    loaded = read_config(given, overrides) if isinstance(given, Path) else given.loaded
    refuse_auto(loaded.config)
    if engine != "sglang" or "scheduler.mixed_batches" in loaded.origins:
        return loaded
    apart = loaded.config.scheduler.model_copy(update={"mixed_batches": False})  # as it runs by default
    return replace(loaded, config=loaded.config.model_copy(update={"scheduler": apart}))


def _check_times(config: Config, loads: Loads, step_times: Path | None, own: bool) -> None:
    """Raise ConfigError for options without traffic, StepTimeError for ``own`` step times that are not given."""
    if not loads.files and config.traffic is None and (not loads.is_recorded or step_times is not None):
        raise ConfigError(
            "--speedup, --scale and --replicas are about requests and --step-times about traffic, and there is none",
            remedy="Give --traffic FILE, or add a `traffic` section with the request_rate to the configuration.",
        )
    if loads.weights and len(loads.weights) != len(loads.files):
        raise ConfigError(
            f"{len(loads.weights)} weights for {len(loads.files)} files of traffic",
            remedy="Give --weights one number for each --traffic, such as 3,1.",
        )
    if own and step_times is None and (loads.files or config.traffic) and not config.dims:
        raise StepTimeError(
            "no step times were given, and a plan by the default ones, of another model, is not emitted",
            remedy="Give --step-times FILE, which `cgplan bench --output` writes on your machine; or take the default "
            "ones for yours, with --assume-default-times.",
        )


def run_diff(old: Path, new: Path, *, as_json: bool) -> None:
    difference = compare(read_plan(old), read_plan(new))
    if as_json:
        typer.echo(difference.model_dump_json(indent=2))
    else:
        show(render_difference(difference, str(old), str(new)))


def run_check(
    path: Path, traffic: Path, speedup: float, step_times: Path | None, max_regret: float | None, as_json: bool
) -> None:
    """Show a plan on other traffic. Raises RegretError where it is farther from the best one than ``max_regret``."""
    plan = read_plan(path)
    if plan.config.get("dims"):
        raise PlanError(
            f"{path} has several sizes ({', '.join(plan.dim_names)}), which a check does not know",
            remedy="Plan for the new traffic, and compare the two with `cgplan plan diff`.",
        )
    from cgplan.traffic.files import read_traffic  # numpy from here on

    config = validate_config(plan.config | {"budget": plan.budget})
    times, found = _times_of(step_times, config), read_traffic(traffic, plan, speedup=speedup)
    check = _checked(plan, config, _steps(found, plan, times, config), times)
    publish(check, None, as_json=as_json)
    if max_regret is not None and max(check.regret, check.decode_regret or 0) > max_regret:
        raise RegretError(
            f"{path} on {traffic}: {check.verdict}; --max-regret is {max_regret:.4%}",
            remedy="Plan for this traffic: `cgplan plan --config FILE --traffic FILE --output FILE`.",
        )


def _checked(plan: Plan, config: Config, traffic: Traffic, times: StepTimes) -> PlanCheck:
    from cgplan.optimizer.lanes import Run
    from cgplan.optimizer.propose import propose

    run, graphs, total = Run(plan.keys, traffic, times), len(plan.keys), traffic.total
    figures: dict[str, Any] = {"expected_us": run.expected_us, "padding": run.padding, **run.by_kind}
    unused = graphs - sum(use.size is not None for use in run.uses)
    own = LadderPoint(name="this plan", graphs=graphs, unused=unused, **figures)
    made = Evidence.model_validate(plan.evidence) if plan.evidence else None
    rules: dict[str, Any] = {"insurance": made.insurance, "one_list": made.one_list} if made else {}
    anew = propose(config, traffic, times, **rules).evidence
    best = [anew.as_point("planned anew")]
    if graphs and graphs != anew.graphs:
        as_many = config.model_copy(update={"budget": BudgetConfig(max_graphs=graphs)})
        best.append(propose(as_many, traffic, times, **rules).evidence.as_point(f"best with {graphs}"))
    bounded = plan.budget.keys() & {"max_graphs", "memory", "capture_time"}
    most = max(graphs, plan.budget.get("max_graphs", 0)) if bounded else math.inf
    least = min(own, *best, *(p for p in anew.ladders if p.graphs <= most), key=lambda point: point.expected_us)
    regret = own.expected_us / least.expected_us - 1
    of_decode = own.decode_us / least.decode_us - 1 if own.decode_us and least.decode_us else None
    verdict = f"regret {regret:.2%}" + ("" if of_decode is None else f", of decode steps {of_decode:.2%}")
    verdict += f": {format_microseconds(own.expected_us)} a step with {counted(graphs, 'graph')}"
    if least is not own:
        verdict += f", {format_microseconds(least.expected_us)} with {least.graphs} ({least.name})"
    uses = []
    for use in run.uses:
        means = {"step_us": use.microseconds / use.weight, "own_us": use.unpadded / use.weight}
        found: dict[str, Any] = {**use.lane._asdict(), **means, "share": use.weight / total, "padding": use.padding}
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
            f"{path} is a {report.kind} report, not a plan", remedy="Give a file that `cgplan plan --output` wrote."
        )
    return report


def announcements(plan: Plan) -> Iterator[str]:
    """Lines on differences from the request, for people who do not see the plan itself."""
    for change in plan.changes:
        yield f"note: cudagraph_mode {change.requested} -> {change.resolved}: {change.reason}"
    yield from (f"warning: {warning}" for warning in plan.warnings)


def _check_outputs(outputs: Iterable[Path | None], inputs: Iterable[Path | str | None]) -> None:
    taken = {Path(file).resolve(): "is an input of the plan" for file in inputs if file is not None}
    for file in filter(None, outputs):
        if problem := taken.get(file.resolve()):
            raise OutputPathError(f"{file} {problem}", remedy="Give the path of another file.")
        check_writable(file)
        taken[file.resolve()] = "is to hold both the picture and the plan"


def _for_traffic(
    loaded: LoadedConfig, loads: Loads, step_times: Path | None, priced: Priced, one_list: bool
) -> tuple[Plan, ParetoPlot | None, list[Bar]]:
    config = loaded.config
    if not loads.files and config.traffic is None:
        return _by_ladder(loaded, priced)
    from cgplan.optimizer.propose import choose, propose  # numpy from here on
    from cgplan.traffic.files import read_traffic, synthetic_requests
    from cgplan.traffic.simulation import RequestTrace

    times, base = _times_of(step_times, config, priced.machine), build_plan(config)
    if loads.files:
        rate = config.traffic.request_rate if config.traffic else None
        found = [read_traffic(file, base, speedup=speed, request_rate=rate) for file, speed in loads.files]
    else:
        assert config.traffic is not None
        found = [synthetic_requests(config.traffic, base)]
    sources = [
        (_scaled(source, scale, loads.replicas), weight)
        for source, weight in zip(found, loads.weights or [1.0] * len(found), strict=True)
        for scale in loads.scales
    ]

    def steps(plan: Plan) -> list[tuple[Traffic, float]]:
        return [(_steps(source, plan, times, config), weight) for source, weight in sources]

    options: dict[str, Any] = {"insurance": loads.insurance, "worst": loads.worst, "one_list": one_list}
    known, traffic = (times, priced.costs, priced.failed), steps(base)
    if any(isinstance(source, RequestTrace) for source, _ in sources):  # they make other batches where steps differ
        traffic = steps(choose(config, traffic, *known, **options).plan)
    proposal = propose(config, traffic, *known, **options)
    plan, evidence = proposal.plan.model_copy(update={"machine": priced.machine}), proposal.evidence
    return plan, pareto_plot(evidence) if evidence.pareto else None, padding_bars(evidence)


def _times_of(file: Path | None, config: Config, machine: Machine | None = None) -> StepTimes:
    """Step times of a file, or the default ones; ``machine``: where costs were measured."""
    from cgplan.traffic.step_times import REMEDY, StepTimes

    if file is None:
        return StepTimes.default()
    text = read_text(file, StepTimeError, REMEDY)  # once: it may be a pipe
    times = StepTimes.parse(text, file)
    return times.model_copy(update={"notes": (*times.notes, *_about_times(text, file, config, machine))})


def _scaled(found: Traffic | RequestTrace, scale: float, replicas: int) -> Traffic | RequestTrace:
    from cgplan.traffic.simulation import RequestTrace

    if isinstance(found, RequestTrace):
        return found.hurried(scale).spread(replicas)
    if scale != 1 or replicas != 1:
        raise TrafficError(
            f"{found.source} counts steps, which have no arrivals",
            remedy="Leave out --scale and --replicas, or give a request trace.",
        )
    return found


def _steps(found: Traffic | RequestTrace, plan: Plan, times: StepTimes, config: Config) -> Traffic:
    """Steps to plan for; requests are simulated with the step times that they would have under ``plan``."""
    from cgplan.traffic.histogram import Traffic
    from cgplan.traffic.simulation import SchedulerBounds, simulate, step_clock

    if isinstance(found, Traffic):
        return found
    bounds = SchedulerBounds.of(plan, config.speculative.accepted_tokens, config.scheduler.mixed_batches)
    return simulate(found, bounds, step_clock(plan, times))


def _for_sizes(
    config: Config, file: Path | str | None, step_times: Path | None, priced: Priced, others: object
) -> tuple[Plan, None, list[Bar]]:
    if others or file is None or isinstance(file, str):
        raise ConfigError(
            "--speedup, --emit, --from-stats and the `traffic` section do not know the boxes of `dims`",
            remedy="Leave them out, and give --traffic FILE with a column for each dimension.",
        )
    from cgplan.optimizer.boxes import dims_of, propose_boxes
    from cgplan.traffic.files import read_sizes
    from cgplan.traffic.step_times import StepSurface  # numpy from here on

    surface = None if step_times is None else StepSurface.load(step_times, config.dim_names)
    proposal = propose_boxes(config, read_sizes(file, dims_of(config)), surface, priced.costs)
    return proposal.plan.model_copy(update={"machine": priced.machine}), None, padding_bars(proposal.evidence)


def _about_times(text: str, path: Path, config: Config, machine: Machine | None) -> Iterator[str]:
    """Notes on where step times were measured; ``machine``: where costs were."""
    report = parse_report(text, path) if text.lstrip().startswith("{") and '"kind"' in text else None
    if not isinstance(report, BenchReport):
        return
    yield from about(f"the step times of {path}", report.capture.plan, report.environment, config)
    measured_on = report.environment.as_machine
    if report.environment.driver is not None and machine not in (None, measured_on):
        found = named(machine_changes(machine, measured_on))
        yield f"the step times of {path} were measured on another machine than the costs: {found}"


def _by_ladder(loaded: LoadedConfig, priced: Priced) -> tuple[Plan, None, list[Bar]]:
    """The plan of a configuration without traffic, and its padding where all batch sizes are equally frequent."""
    from cgplan.optimizer.lint import lint_without_traffic  # numpy from here on

    plan = within_count(build_plan(loaded.config), loaded.config)
    predicted = None if priced.costs is None else priced.costs.of(plan.keys)
    plan = plan.model_copy(update={"predicted": predicted, "machine": priced.machine})
    note = (
        "there is no traffic to plan for, so nothing was optimised: these are the sizes of the configuration "
        f"({plan.sizes_source}). Give --traffic FILE, or a `traffic` section, to have them chosen"
    )
    limits = " and ".join(f"budget.{name}" for name in plan.budget or {} if name in ("memory", "capture_time"))
    unbounded = f"{limits} did not bound this plan: without traffic memory and time bound the capture alone"
    lint = (*([unbounded] if limits else []), *lint_without_traffic(plan))
    bars = [
        Bar(f"{lane}: {size}", (size - below - 1) / 2 / size)
        for lane, sizes in plan.lanes().items()
        for below, size in pairwise((0, *sizes))
    ]
    return plan.model_copy(update={"notes": (note, *plan.notes), "lint": lint}), None, bars
