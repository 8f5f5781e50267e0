"""`cgplan plan` and its subcommands: their options. What they need is imported when they run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cgplan.cli.failures import failures_reported
from cgplan.cli.options import AsJson, Costs, Overrides, Traceback


class PlanGroup(TyperGroup):
    """Tells a file without its option from a command that is misspelt."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As usual, but for files."""
        if args[0] not in self.commands and Path(args[0]).exists():
            ctx.fail(f"{args[0]} stands without an option: give --config FILE, --traffic FILE, or `diff OLD NEW`")
        return super().resolve_command(ctx, args)


plans = typer.Typer(cls=PlanGroup, context_settings={"help_option_names": ["-h", "--help"]}, rich_markup_mode=None)


class EngineName(StrEnum):
    """What `cgplan plan --emit` writes for."""

    vllm = "vllm"
    sglang = "sglang"
    trtllm = "trtllm"
    json = "json"


def _is_given(context: typer.Context, name: str | None) -> bool:
    source = context.get_parameter_source(name or "")
    return source is not None and source.name == "COMMANDLINE"


@plans.callback(
    invoke_without_command=True,
    epilog="\b\nExample:\n  cgplan plan --config my.yaml --output plan.json\n"
    "  cgplan plan --config my.yaml --traffic requests.csv --max-graphs 16\n"
    "  cgplan plan --config my.yaml --emit vllm\n  cgplan plan diff plan-old.json plan.json",
)
def plan_(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="The YAML configuration to plan for.")
    ] = None,
    overrides: Overrides = None,
    traffic: Annotated[
        Path | None,
        typer.Option("--traffic", metavar="FILE", help="Traffic to plan for: a histogram, a trace, or vLLM's log."),
    ] = None,
    speedup: Annotated[
        float, typer.Option("--speedup", metavar="X", min=1e-6, help="Requests of a trace arrive X times as fast.")
    ] = 1.0,
    step_times: Annotated[
        Path | None, typer.Option("--step-times", metavar="FILE", help="Step times: a bench report, or a table.")
    ] = None,
    costs: Costs = None,
    max_graphs: Annotated[int | None, typer.Option("--max-graphs", help="Short for --set budget.max_graphs=N.")] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="BYTES", help="Short for --set budget.memory=2GiB.")
    ] = None,
    capture_time: Annotated[
        str | None, typer.Option("--capture-time", metavar="TIME", help="Short for --set budget.capture_time=30s.")
    ] = None,
    engine: Annotated[
        EngineName | None, typer.Option("--emit", help="Print the plan for an engine, and nothing else.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it: an SVG or PNG.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Also save the plan as JSON in this file.")
    ] = None,
    as_json: AsJson = False,
    show_traceback: Traceback = False,
) -> None:
    """Plan which graphs to capture, or compare two plans.

    Nothing is captured. `cgplan capture --plan FILE` captures a saved plan.
    """
    if context.invoked_subcommand is not None:
        misplaced = [p.opts[0] for p in context.command.params if _is_given(context, p.name)]
        if misplaced:
            command = context.invoked_subcommand
            raise typer.BadParameter(
                f"{misplaced[0]} is no option of `cgplan plan {command}`, or stands before {command} and not behind it"
            )
        return
    if config is None:
        raise typer.BadParameter("give --config FILE")
    if engine is not None and as_json:
        raise typer.BadParameter("give either --emit or --json; --output saves the plan beside either")
    budget = {"max_graphs": max_graphs, "memory": memory, "capture_time": capture_time}
    for name, text in (("--memory", memory), ("--capture-time", capture_time)):
        if text is not None and not text.strip():
            raise typer.BadParameter(f"{name} is empty; leave it out for no limit")
    for name, file in (("--plot", plot), ("--output", output), ("--traffic", traffic), ("--step-times", step_times)):
        if file == Path():
            raise typer.BadParameter(f"{name} is empty, or the current folder: give the path of a file")
    with failures_reported(show_traceback):
        from cgplan.cli.planning import Sources, run_plan
        from cgplan.config import Override

        given = [
            Override(f"budget.{name}={value}", f"--{name.replace('_', '-')}")
            for name, value in budget.items()
            if value is not None
        ]

        run_plan(
            config,
            [*(overrides or ()), *given],
            Sources(traffic, speedup, step_times, costs),
            output=output,
            engine=engine.value if engine else None,
            plot=plot,
            as_json=as_json,
        )


@plans.command("diff", epilog="\b\nExample:\n  cgplan plan diff plan-old.json plan.json")
def plan_diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A saved plan.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="A saved plan.")],
    as_json: AsJson = False,
    show_traceback: Traceback = False,
) -> None:
    """Show what changes from one plan to another.

    Sizes by lane, and in sum graphs, bytes, start-up seconds and the expected step time.
    """
    with failures_reported(show_traceback):
        from cgplan.cli.planning import run_diff

        run_diff(old, new, as_json=as_json)
