"""The commands and their options. What a command needs is imported when it runs, so that `--help` is quick."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cgplan.cli.failures import failures_reported
from cgplan.cli.launched import is_first_rank
from cgplan.cli.options import (
    AsJson,
    ConfigPath,
    Costs,
    Debug,
    Device,
    Force,
    Output,
    Overrides,
    PlanPath,
    SavedPlan,
    Traceback,
)
from cgplan.cli.plan_group import plans
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


_ON_ALL_RANKS = ("capture", "bench")  # the others are of one process, however many torchrun has started


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
    if context.invoked_subcommand not in _ON_ALL_RANKS and not is_first_rank():
        raise typer.Exit  # rank 0 prints, and writes what is to be saved
    if version:
        typer.echo(f"cgplan {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _with_debug(overrides: list[str] | None, debug: bool) -> list[str]:
    return [*(overrides or ()), *(["compilation.debug=true"] if debug else [])]


@app.command(
    epilog="\b\nExample:\n  cgplan capture --config configs/decoder_cpu.yaml --output run.json\n"
    "  cgplan capture --config my.yaml --set compilation.cudagraph_mode=FULL --json\n"
    "  cgplan capture --config my.yaml --plan plan.json"
)
def capture(
    config: ConfigPath,
    overrides: Overrides = None,
    plan: PlanPath = None,
    force: Force = False,
    device: Device = None,
    output: Output = None,
    as_json: AsJson = False,
    debug: Debug = False,
    show_traceback: Traceback = False,
) -> None:
    """Capture graphs, and report their memory and time."""
    saved = SavedPlan.of(plan, force)
    with failures_reported(show_traceback):
        from cgplan.cli.running import run_capture

        run_capture(
            config,
            _with_debug(overrides, debug),
            device=device,
            output=output,
            as_json=as_json,
            saved=saved,
        )


@app.command(
    epilog="\b\nExample:\n  cgplan bench --config configs/decoder_cpu.yaml\n"
    "  cgplan bench --config my.yaml --set report.repeats=100 --output bench.json\n"
    "  cgplan bench --config my.yaml --against eager,bare,make_graphed_callables,reduce-overhead"
)
def bench(
    config: ConfigPath,
    overrides: Overrides = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="NAMES",
            help="Also measure these ways to run the model, in turns with cgplan: eager, bare, "
            "make_graphed_callables, reduce-overhead.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="With --against: of the random order; drawn and shown if absent.")
    ] = None,
    plan: PlanPath = None,
    force: Force = False,
    device: Device = None,
    output: Output = None,
    as_json: AsJson = False,
    debug: Debug = False,
    show_traceback: Traceback = False,
) -> None:
    """Capture, and time each batch size with and without graphs."""
    saved = SavedPlan.of(plan, force)
    if seed is not None and against is None:
        raise typer.BadParameter("--seed is about the order of peers: give --against NAMES with it")
    with failures_reported(show_traceback):
        from cgplan.cli.running import run_bench

        run_bench(
            config,
            _with_debug(overrides, debug),
            device=device,
            output=output,
            as_json=as_json,
            saved=saved,
            against=() if against is None else against.split(","),
            seed=seed,
        )


app.add_typer(plans, name="plan")


@app.command(
    epilog="\b\nExample:\n  cgplan inspect --config configs/decoder_cpu.yaml\n"
    "  cgplan inspect --config my.yaml --json > plan.json\n  cgplan inspect run.json\n"
    """  cgplan inspect --vllm '{"cudagraph_mode": "FULL"}' --max-num-seqs 64"""
)
def inspect(
    report: Annotated[
        Path | None, typer.Argument(metavar="REPORT", help="A saved report or plan (JSON), shown again.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE", help="The YAML configuration to plan.")
    ] = None,
    vllm: Annotated[
        str | None,
        typer.Option("--vllm", metavar="JSON", help="What vLLM's --compilation-config takes; {} is its default."),
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="With --vllm: as vLLM's option.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="With --vllm: as vLLM's option.")] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="With --vllm: of vLLM's --speculative-config.")
    ] = None,
    max_loras: Annotated[int | None, typer.Option(help="With --vllm: as vLLM's option, for --enable-lora.")] = None,
    specialize_active_lora: Annotated[
        bool, typer.Option("--specialize-active-lora", help="With --vllm: as vLLM's option.")
    ] = False,
    split: Annotated[
        bool, typer.Option("--split", help="With --config: build the model, and show how PIECEWISE would split it.")
    ] = False,
    costs: Costs = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    show_traceback: Traceback = False,
) -> None:
    """Show what would be captured, or a saved report.

    With --config FILE: the plan, and where each value comes from; nothing is run, no GPU is needed. --json prints the
    plan alone, in a form that `cgplan inspect` reads again. --costs says what the graphs are predicted to cost, and
    each LoRA case. With --vllm JSON: what vLLM would capture.
    """
    if [report, config, vllm].count(None) != 2:
        raise typer.BadParameter("give one of --config FILE, --vllm JSON, or the path of a saved report")
    if split and (config is None or as_json):
        raise typer.BadParameter("--split shows a configuration's model as a table: give --config FILE, without --json")
    if costs is not None and config is None:
        raise typer.BadParameter("--costs prices a configuration's graphs: give --config FILE with it")
    if config is None and overrides:
        raise typer.BadParameter("--set changes a configuration; a saved report and vLLM's options stay as they are")
    options = (max_num_seqs, max_num_batched_tokens, num_speculative_tokens, max_loras, specialize_active_lora or None)
    if vllm is None and any(option is not None for option in options):
        raise typer.BadParameter("--max-num-seqs and the like are vLLM's options: give --vllm JSON with them")
    with failures_reported(show_traceback):
        from cgplan.cli.inspecting import inspect_config, inspect_report, inspect_vllm

        if config is not None:
            inspect_config(config, overrides or (), as_json=as_json, split=split, costs=costs)
        elif report is not None:
            inspect_report(report, as_json=as_json)
        elif vllm is not None:
            inspect_vllm(
                vllm,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                num_speculative_tokens=num_speculative_tokens or 0,
                max_loras=max_loras,
                specialize_active_lora=specialize_active_lora,
                as_json=as_json,
            )


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
