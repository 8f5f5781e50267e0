"""`cgplan plan` and `cgplan plan diff`: makes a plan, emits it for an engine, compares two.

torch is loaded for `--costs estimate` and `measure` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cgplan.cli.costs import costs_of
from cgplan.cli.output import check_writable, note, publish, save, show
from cgplan.config import Config, LoadedConfig, Override, read_config
from cgplan.config.load import read_text
from cgplan.errors import ConfigError, OutputPathError, ReportError, StepTimeError
from cgplan.optimizer.subset import within_count
from cgplan.planning import Plan, build_plan
from cgplan.planning.costs import GraphCosts
from cgplan.planning.difference import compare, machine_changes, mismatches, named
from cgplan.planning.engines import Engine, emit
from cgplan.planning.plan import Machine
from cgplan.reports import load_report
from cgplan.reports.plan_tables import padding_plot, pareto_plot, render_difference
from cgplan.reports.plots import PaddingPlot, ParetoPlot, check_plot_path, picture
from cgplan.reports.records import BenchReport, parse_report
from cgplan.traffic.histogram import Traffic

if TYPE_CHECKING:
    from cgplan.traffic.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class Sources:
    """Files and options that a plan is made from, besides the configuration.

    Attributes:
        traffic: A file of traffic; None: the configuration's list or ladder decides.
        speedup: How much faster than recorded the requests of a trace arrive.
        step_times: A file of step times, a saved bench report or a table; None: the stated default.
        costs: A saved capture report, whose memory and times are taken; ``estimate`` or ``measure``, see `costs_of`;
            None: they are not known.
    """

    traffic: Path | None = None
    speedup: float = 1.0
    step_times: Path | None = None
    costs: str | None = None

    @property
    def files(self) -> list[Path]:
        """Those that are given, which nothing may be written over."""
        costs = None if self.costs is None else Path(self.costs)
        return [file for file in (self.traffic, self.step_times, costs) if file is not None]


@dataclass(frozen=True, slots=True)
class Made:
    plan: Plan
    pareto: ParetoPlot | None
    padding: PaddingPlot | None


def run_plan(
    path: Path,
    overrides: Sequence[str | Override],
    sources: Sources,
    *,
    output: Path | None,
    engine: Engine | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Make a plan; save it, show it, or emit it for an engine. Raises the errors of each step."""
    loaded = read_config(path, overrides)
    if plot is not None:
        check_plot_path(plot)
    inputs = {given.resolve() for given in (path, *sources.files)}
    for file in filter(None, (output, plot)):
        if file.resolve() in inputs:
            raise OutputPathError(f"{file} is an input of the plan", remedy="Give the path of another file.")
        check_writable(file)
    if plot is not None and output is not None and plot.resolve() == output.resolve():
        raise OutputPathError(f"{plot} is to hold both the picture and the plan", remedy="Give two files.")
    made = _make(loaded, sources)
    if plot is not None and made.pareto is None and made.padding is None:
        note(f"note: {plot} was not drawn: there is no graph, and no traffic")
    elif plot is not None:
        save(plot, picture(plot, made.pareto, made.padding))
    if engine is not None or as_json:
        for line in _said(made.plan):
            note(line)
    if engine is None:
        publish(made.plan, output, as_json=as_json)
        return
    if output is not None:
        save(output, made.plan.model_dump_json(indent=2) + "\n")
    emission = emit(made.plan, engine)
    for line in emission.notes:
        note(f"note: {line}")
    typer.echo(emission.text)


def run_diff(old: Path, new: Path, *, as_json: bool) -> None:
    """Show what changes from one saved plan to another. Raises ReportError."""
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


def _make(loaded: LoadedConfig, sources: Sources) -> Made:
    config = loaded.config
    costs, machine, failed = costs_of(loaded, sources.costs)
    if sources.traffic is None and config.traffic is None:
        return _by_ladder(loaded, sources, costs, machine)
    if sources.traffic is None and sources.speedup != 1:
        raise ConfigError(
            "--speedup is about recorded requests, and the traffic is that of the configuration",
            remedy="Raise traffic.request_rate, or give --traffic FILE.",
        )
    from cgplan.optimizer.propose import propose
    from cgplan.traffic.files import read_traffic, synthetic_requests
    from cgplan.traffic.simulation import SchedulerBounds, simulate, step_clock
    from cgplan.traffic.step_times import StepTimes  # numpy from here on

    times = _step_times(sources.step_times, config, machine) if sources.step_times else StepTimes.default()
    base = build_plan(config)
    if sources.traffic is not None:
        found = read_traffic(sources.traffic, base, speedup=sources.speedup)
    else:
        assert config.traffic is not None
        found = synthetic_requests(config.traffic, base)

    def steps(plan: Plan) -> Traffic:
        """Steps to plan for; requests are simulated with the step times that they would have under ``plan``."""
        if isinstance(found, Traffic):
            return found
        bounds = SchedulerBounds.of(plan, config.speculative.accepted_tokens)
        return simulate(found, bounds, step_clock(plan, times))

    traffic = steps(base)
    proposal = propose(config, traffic, times, costs, failed)
    again = steps(proposal.plan)
    if again != traffic:  # requests make other batches where steps take another time
        proposal = propose(config, again, times, costs, failed)
    plan, evidence = proposal.plan.model_copy(update={"machine": machine}), proposal.evidence
    return Made(plan, pareto_plot(evidence) if evidence.pareto else None, padding_plot(evidence))


def _step_times(path: Path, config: Config, machine: Machine | None) -> StepTimes:
    """Step times of a file, with notes on where they were measured; ``machine``: where costs were."""
    from cgplan.traffic.step_times import REMEDY, StepTimes

    text = read_text(path, StepTimeError, REMEDY)  # once: it may be a pipe
    times = StepTimes.parse(text, path)
    return times.model_copy(update={"notes": (*times.notes, *_about_times(text, path, config, machine))})


def _about_times(text: str, path: Path, config: Config, machine: Machine | None) -> Iterator[str]:
    if not text.lstrip().startswith("{"):
        return
    report = parse_report(text, path)
    if not isinstance(report, BenchReport):
        return
    if found := named(mismatches(report.capture.plan, config)):
        yield f"the step times of {path} were measured with another configuration: {found}"
    if report.environment.driver is None:
        yield f"the step times of {path} are those of {report.environment.backend}, not of a GPU"
    elif machine is not None and machine != report.environment.as_machine:
        found = named(machine_changes(machine, report.environment.as_machine))
        yield f"the step times of {path} were measured on another machine than the costs: {found}"


def _by_ladder(loaded: LoadedConfig, sources: Sources, costs: GraphCosts | None, machine: Machine | None) -> Made:
    """The plan of a configuration without traffic: its list or ladder decides."""
    if sources.speedup != 1 or sources.step_times is not None:
        raise ConfigError(
            "--speedup and --step-times are about traffic, and there is none",
            remedy="Give --traffic FILE, or add a `traffic` section to the configuration.",
        )
    plan = within_count(build_plan(loaded.config), loaded.config)
    if costs is not None:
        plan = plan.model_copy(update={"predicted": costs.of(plan.keys), "machine": machine})
    plan = plan.model_copy(update=_without_traffic(plan))
    return Made(plan, None, _evenly_padded(plan) if plan.keys else None)


def _without_traffic(plan: Plan) -> dict[str, tuple[str, ...]]:
    from cgplan.optimizer.lint import lint_without_traffic  # numpy from here on

    notes = (
        "there is no traffic to plan for, so nothing was optimised: these are the sizes of the configuration "
        f"({plan.sizes_source}). Give --traffic FILE, or a `traffic` section, to have them chosen",
        *plan.notes,
    )
    limits = [f"budget.{name}" for name in plan.budget or {} if name in ("memory", "capture_time")]
    named = " and ".join(limits)
    unbounded = (
        (f"{named} did not bound this plan: without traffic memory and time bound the capture alone",) if limits else ()
    )
    return {"notes": notes, "lint": (*unbounded, *lint_without_traffic(plan))}


def _evenly_padded(plan: Plan) -> PaddingPlot:
    """Padding of each size where every batch size is as frequent as the others, for want of traffic."""
    lanes = plan.lanes()
    bars = [(lane, below, size) for lane, sizes in lanes.items() for below, size in pairwise((0, *sizes))]
    return PaddingPlot(
        names=[f"{lane}: {size}" for lane, _, size in bars],
        padding=[(size - below - 1) / 2 / size for _, below, size in bars],
    )
