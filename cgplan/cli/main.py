"""The commands and their options. What a command needs is imported when it runs, so that `--help` is quick."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cgplan.cli.failures import failures_reported
from cgplan.version import __version__

app = typer.Typer(
    name="cgplan",
    help="Plan, capture and measure CUDA graphs of any PyTorch model, from one YAML file.",
    epilog="\b\nExample:\n  cgplan init my_model.py:build > my.yaml\n  cgplan inspect --config my.yaml\n"
    "  cgplan capture --config my.yaml --output run.json",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: quick, and the same on every terminal
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigPath = Annotated[Path, typer.Option("--config", "-c", metavar="FILE", help="The YAML configuration.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="Override a value by its dotted key; the value is YAML. May be repeated.",
    ),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Also save the report as JSON in this file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and nothing else there.")]
Debug = Annotated[bool, typer.Option("--debug", help="Check everything, slowly (compilation.debug).")]
Traceback = Annotated[bool, typer.Option("--traceback", help="On an error, show where it was raised.")]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="DEVICE", help="Short for --set device=DEVICE: auto, cpu, cuda, cuda:N."),
]


class SchemaFormat(StrEnum):
    """How `cgplan schema` writes the keys of a configuration."""

    json = "json"
    markdown = "markdown"


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Show the version, or the help where no command was given."""
    if version:
        typer.echo(f"cgplan {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _with_debug(overrides: list[str] | None, debug: bool) -> list[str]:
    return [*(overrides or ()), *(["compilation.debug=true"] if debug else [])]


@app.command(
    epilog="\b\nExample:\n  cgplan capture --config configs/decoder_cpu.yaml --output run.json\n"
    "  cgplan capture --config my.yaml --set compilation.cudagraph_mode=FULL --json"
)
def capture(
    config: ConfigPath,
    overrides: Overrides = None,
    device: Device = None,
    output: Output = None,
    as_json: AsJson = False,
    debug: Debug = False,
    show_traceback: Traceback = False,
) -> None:
    """Capture graphs, and report their memory and time."""
    with failures_reported(show_traceback):
        from cgplan.cli.running import run_capture

        run_capture(config, _with_debug(overrides, debug), device=device, output=output, as_json=as_json)


@app.command(
    epilog="\b\nExample:\n  cgplan bench --config configs/decoder_cpu.yaml\n"
    "  cgplan bench --config my.yaml --set report.repeats=100 --output bench.json"
)
def bench(
    config: ConfigPath,
    overrides: Overrides = None,
    device: Device = None,
    output: Output = None,
    as_json: AsJson = False,
    debug: Debug = False,
    show_traceback: Traceback = False,
) -> None:
    """Capture, and time each batch size with and without graphs."""
    with failures_reported(show_traceback):
        from cgplan.cli.running import run_bench

        run_bench(config, _with_debug(overrides, debug), device=device, output=output, as_json=as_json)


@app.command(
    epilog="\b\nExample:\n  cgplan inspect --config configs/decoder_cpu.yaml\n"
    "  cgplan inspect --config my.yaml --json > plan.json\n  cgplan inspect run.json"
)
def inspect(
    report: Annotated[
        Path | None, typer.Argument(metavar="REPORT", help="A saved report or plan (JSON), shown again.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="The YAML configuration to plan.")
    ] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    show_traceback: Traceback = False,
) -> None:
    """Show what would be captured, or a saved report.

    With --config FILE: the plan, and where each value comes from; nothing is run, no GPU is needed. --json prints the
    plan alone, in a form that `cgplan inspect` reads again.
    """
    if (report is None) == (config is None):
        raise typer.BadParameter("give either --config FILE or the path of a saved report")
    if report is not None and overrides:
        raise typer.BadParameter("--set changes a configuration; a saved report stays as it is")
    with failures_reported(show_traceback):
        from cgplan.cli.inspecting import inspect_config, inspect_report

        if config is not None:
            inspect_config(config, overrides or (), as_json=as_json)
        elif report is not None:
            inspect_report(report, as_json=as_json)


@app.command(
    epilog="\b\nExample:\n  cgplan schema > cgplan.schema.json\n"
    "and in the first line of the YAML file, for editor completion:\n"
    "  # yaml-language-server: $schema=cgplan.schema.json"
)
def schema(
    format_: Annotated[
        SchemaFormat, typer.Option("--format", help="A JSON schema for editors, or the reference as markdown.")
    ] = SchemaFormat.json,
) -> None:
    """Print all keys of a configuration."""
    with failures_reported():
        from cgplan.config.reference import json_schema, markdown

        typer.echo(json_schema() if format_ is SchemaFormat.json else markdown(), nl=False)


@app.command(
    epilog="\b\nExample:\n  cgplan init my_model.py:build > my.yaml\n"
    "  cgplan init my_package.models:Net --kwargs '{hidden_size: 64}' > my.yaml"
)
def init(
    target: Annotated[
        str, typer.Argument(help="package.module:callable or path/to/file.py:callable that builds the model.")
    ],
    kwargs: Annotated[
        str, typer.Option("--kwargs", metavar="MAPPING", help="Keyword arguments of the target, as YAML or JSON.")
    ] = "{}",
    show_traceback: Traceback = False,
) -> None:
    """Print a commented starting configuration.

    The model is built on the CPU, and its inputs are read off its forward.
    """
    with failures_reported(show_traceback):
        from cgplan.cli.starting import starting_config

        typer.echo(starting_config(target, kwargs), nl=False)


def main() -> None:
    """The console script."""
    app(prog_name="cgplan")
