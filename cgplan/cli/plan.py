"""`cgplan plan` and `cgplan plan diff`: makes a plan, emits it for an engine, compares two.

torch is loaded for `--costs estimate` and `measure` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path

import typer

from cgplan.cli.costs import Priced, about, costs_of
from cgplan.cli.output import check_writable, note, publish, save, show
from cgplan.config import Config, LoadedConfig, Override, read_config
from cgplan.config.load import read_text
from cgplan.errors import ConfigError, OutputPathError, ReportError, StepTimeError
from cgplan.optimizer.subset import within_count
from cgplan.planning import Plan, build_plan
from cgplan.planning.build import refuse_auto
from cgplan.planning.difference import compare, machine_changes, named
from cgplan.planning.engines import Engine, emit
from cgplan.planning.plan import Machine
from cgplan.reports import load_report
from cgplan.reports.plan_tables import padding_bars, pareto_plot, render_difference
from cgplan.reports.plots import Bar, ParetoPlot, check_plot_path, picture
from cgplan.reports.records import BenchReport, parse_report


def run_plan(
    path: Path,
    overrides: Sequence[str | Override],
    *,
    traffic: Path | None,
    speedup: float,
    step_times: Path | None,
    costs: str | None,
    output: Path | None,
    engine: Engine | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    loaded = read_config(path, overrides)
    refuse_auto(loaded.config)
    if plot is not None:
        check_plot_path(plot)
    _check_outputs((output, plot), (path, traffic, step_times, costs))
    if traffic is None and (speedup != 1 or (step_times is not None and loaded.config.traffic is None)):
        raise ConfigError(
            "--speedup is about recorded requests and --step-times about traffic, and there is none",
            remedy="Give --traffic FILE, or add a `traffic` section with the request_rate to the configuration.",
        )
    if loaded.config.dims and (traffic or costs or engine or loaded.config.traffic is not None):
        plan, curve, bars = _for_sizes(loaded.config, traffic, step_times, costs or engine or speedup != 1)
    else:
        plan, curve, bars = _for_traffic(loaded, traffic, speedup, step_times, costs_of(loaded, costs))
    if plot is not None and curve is None and not bars:
        note(f"note: {plot} was not drawn: there is no graph, and no traffic")
    elif plot is not None:
        save(plot, picture(plot, curve, bars))
    if engine is not None or as_json:
        for line in _said(plan):
            note(line)
    if engine is None:
        publish(plan, output, as_json=as_json)
        return
    if output is not None:
        save(output, plan.model_dump_json(indent=2) + "\n")
    emission = emit(plan, engine)
    for line in emission.notes:
        note(f"note: {line}")
    typer.echo(emission.text)


def run_diff(old: Path, new: Path, *, as_json: bool) -> None:
    difference = compare(read_plan(old), read_plan(new))
    if as_json:
        typer.echo(difference.model_dump_json(indent=2))
    else:
        show(render_difference(difference, str(old), str(new)))


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


def _said(plan: Plan) -> Iterator[str]:
    """Warnings and notes of a plan's report, where the report is not shown."""
    yield from announcements(plan)
    evidence = plan.evidence or {}
    yield from (f"warning: {text}" for text in (*plan.lint, *evidence.get("warnings", ())))
    of_costs = plan.predicted.notes if plan.predicted else ()
    of_evidence = (evidence.get(name, ()) for name in ("traffic_notes", "times_notes", "notes"))
    yield from (f"note: {text}" for text in (*plan.notes, *of_costs, *chain(*of_evidence)))


def _check_outputs(outputs: Iterable[Path | None], inputs: Iterable[Path | str | None]) -> None:
    taken = {Path(file).resolve(): "is an input of the plan" for file in inputs if file is not None}
    for file in filter(None, outputs):
        if problem := taken.get(file.resolve()):
            raise OutputPathError(f"{file} {problem}", remedy="Give the path of another file.")
        check_writable(file)
        taken[file.resolve()] = "is to hold both the picture and the plan"


def _for_traffic(
    loaded: LoadedConfig, file: Path | None, speedup: float, step_times: Path | None, priced: Priced
) -> tuple[Plan, ParetoPlot | None, list[Bar]]:
    config = loaded.config
    if file is None and config.traffic is None:
        return _by_ladder(loaded, priced)
    from cgplan.optimizer.propose import propose
    from cgplan.traffic.files import read_traffic, synthetic_requests
    from cgplan.traffic.histogram import Traffic
    from cgplan.traffic.simulation import SchedulerBounds, simulate, step_clock
    from cgplan.traffic.step_times import REMEDY, StepTimes  # numpy from here on

    times = StepTimes.default()
    if step_times is not None:
        text = read_text(step_times, StepTimeError, REMEDY)  # once: it may be a pipe
        times = StepTimes.parse(text, step_times)
        notes = (*times.notes, *_about_times(text, step_times, config, priced.machine))
        times = times.model_copy(update={"notes": notes})
    base = build_plan(config)
    if file is not None:
        rate = config.traffic.request_rate if config.traffic else None
        found = read_traffic(file, base, speedup=speedup, request_rate=rate)
    else:
        assert config.traffic is not None
        found = synthetic_requests(config.traffic, base)

    def steps(plan: Plan) -> Traffic:
        """Steps to plan for; requests are simulated with the step times that they would have under ``plan``."""
        if isinstance(found, Traffic):
            return found
        bounds = SchedulerBounds.of(plan, config.speculative.accepted_tokens, config.scheduler.mixed_batches)
        return simulate(found, bounds, step_clock(plan, times))

    traffic = steps(base)
    proposal = propose(config, traffic, times, priced.costs, priced.failed)
    again = steps(proposal.plan)
    if again != traffic:  # requests make other batches where steps take another time
        proposal = propose(config, again, times, priced.costs, priced.failed)
    plan, evidence = proposal.plan.model_copy(update={"machine": priced.machine}), proposal.evidence
    return plan, pareto_plot(evidence) if evidence.pareto else None, padding_bars(evidence)


def _for_sizes(
    config: Config, file: Path | None, step_times: Path | None, others: object
) -> tuple[Plan, None, list[Bar]]:
    if others or file is None:
        raise ConfigError(
            "--costs, --speedup, --emit and the `traffic` section do not know the boxes of `dims`",
            remedy="Leave them out, and give --traffic FILE with a column for each dimension.",
        )
    from cgplan.optimizer.boxes import dims_of, propose_boxes
    from cgplan.traffic.files import read_sizes
    from cgplan.traffic.step_times import StepSurface  # numpy from here on

    surface = None if step_times is None else StepSurface.load(step_times, config.dim_names)
    proposal = propose_boxes(config, read_sizes(file, dims_of(config)), surface)
    return proposal.plan, None, padding_bars(proposal.evidence)


def _about_times(text: str, path: Path, config: Config, machine: Machine | None) -> Iterator[str]:
    """Notes on where step times were measured; ``machine``: where costs were."""
    report = parse_report(text, path) if text.lstrip().startswith("{") else None
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
