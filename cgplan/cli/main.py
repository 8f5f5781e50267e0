"""The commands and their options. Each command imports its modules when it runs, so that `--help`
is quick.
"""

from __future__ import annotations

from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from re import findall
from typing import Annotated, Any

import typer
from typer import Argument, BadParameter, Context, Option
from typer.core import TyperGroup

from cgplan.cli.output import check_outputs, failures_reported, is_first_rank, publish, save
from cgplan.version import __version__


class EngineName(StrEnum):
    vllm = "vllm"
    sglang = "sglang"
    trtllm = "trtllm"
    json = "json"


class PerformanceMode(StrEnum):
    balanced = "balanced"
    interactivity = "interactivity"
    throughput = "throughput"


class Objective(StrEnum):
    mean = "mean"
    worst = "worst"


class SchemaFormat(StrEnum):
    json = "json"
    markdown = "markdown"


ConfigOption = Option("--config", "-c", metavar="FILE", help="The YAML configuration.")
Config = Annotated[Path | None, ConfigOption]
File = Annotated[
    Path | None, Argument(metavar="FILE", help="The YAML configuration, in place of --config.")
]
OVERRIDE = "Override a value by its dotted key; the value is YAML. May be repeated."
Overrides = Annotated[list[str] | None, Option("--set", "-s", metavar="KEY=VALUE", help=OVERRIDE)]
SAVE = "Also save the result as JSON in this file."
Output = Annotated[Path | None, Option("--output", "-o", metavar="FILE", help=SAVE)]
Html = Annotated[
    Path | None,
    Option("--html", metavar="FILE", help="Also write it as one HTML file, with charts."),
]
AsJson = Annotated[
    bool, Option("--json", help="Print JSON on standard output, and nothing else there.")
]
Trace = Annotated[
    Path | None,
    Option(metavar="FILE", help="Also save a trace of captures and calls, for Perfetto."),
]
Debug = Annotated[bool, Option("--debug", help="Check everything, slowly (compilation.debug).")]
Traceback = Annotated[bool, Option("--traceback", help="On an error, show where it was raised.")]
SAVED_PLAN = "Capture exactly the keys of this saved plan, or refuse if it is not for this."
PlanPath = Annotated[Path | None, Option("--plan", metavar="FILE", help=SAVED_PLAN)]
Force = Annotated[
    bool, Option("--force", help="With --plan: capture it although it was made for something else.")
]
COSTS = (
    "What graphs cost: a capture report or vLLM's log; `estimate`, on the CPU; or `measure`, by "
    "a few captures."
)
Costs = Annotated[str | None, Option("--costs", metavar="SOURCE", help=COSTS)]


def _numbers(text: str) -> tuple[float, ...]:
    """Numbers above 0 between commas."""
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        found = (-1.0,)
    if any(not 0 < number < float("inf") for number in found):
        raise BadParameter(f"{text!r} is no list of numbers above 0, such as 1,2,4")
    return found


def _share(text: str) -> float:
    """``1%`` or ``0.01``."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1
    if not 0 <= share < 1:
        raise BadParameter(f"{text!r} is no share: write 1% or 0.01")
    return share


def _file(text: str) -> tuple[Path, float]:
    """A file, and how much faster its requests come: ``trace.csv@2x``."""
    name, _, faster = text.rpartition("@")
    is_faster = bool(name) and faster.endswith("x") and not Path(text).exists()
    return Path(name if is_faster else text), _numbers(faster[:-1])[0] if is_faster else 1.0


TRAFFIC = "Traffic: a histogram, a trace, a log; FILE@2x: twice as fast. Repeat."
Files = Annotated[list[Any] | None, Option("--traffic", metavar="FILE", parser=_file, help=TRAFFIC)]
Weights = Annotated[
    Any, Option(metavar="LIST", parser=_numbers, help="Of several files of traffic, such as 3,1.")
]
Scale = Annotated[
    Any, Option(metavar="LIST", parser=_numbers, help="These speeds together, such as 1,2,4.")
]
Replicas = Annotated[int, Option(metavar="N", min=1, help="Servers that share the requests.")]
Speedup = Annotated[
    float, Option(metavar="X", min=1e-6, help="Requests of a trace arrive X times as fast.")
]
StepTimes = Annotated[
    Path | None, Option(metavar="FILE", help="Step times: a bench report, or a table.")
]
DEVICE = "Short for --set device=DEVICE: auto, cpu, cuda, cuda:N."
Device = Annotated[str | None, Option("--device", metavar="DEVICE", help=DEVICE)]
Vllm = Annotated[
    str | None,
    Option(metavar="JSON", help="What vLLM's --compilation-config takes; {} is its default."),
]
WITH_VLLM = "With --vllm: as vLLM's option."
MaxNumSeqs = Annotated[int | None, Option(help=WITH_VLLM)]
MaxNumBatchedTokens = Annotated[int | None, Option(help=WITH_VLLM)]
SpeculativeTokens = Annotated[
    int | None, Option(help="With --vllm: of vLLM's --speculative-config.")
]
MaxLoras = Annotated[int | None, Option(help="With --vllm: as vLLM's option, for --enable-lora.")]
SpecializeActiveLora = Annotated[bool, Option("--specialize-active-lora", help=WITH_VLLM)]
Performance = Annotated[PerformanceMode | None, Option(help=WITH_VLLM)]
Blackwell = Annotated[
    bool, Option("--blackwell", help="With --vllm: on a GPU of compute capability 10.x.")
]
OF_VLLM = (
    "max_num_seqs", "max_num_batched_tokens", "num_speculative_tokens", "max_loras",
    "specialize_active_lora",
    "performance_mode", "blackwell",
)  # fmt: skip
YAML = (".yaml", ".yml")
SHORT_FOR = {  # options by the key that they set
    "device": "device",
    "debug": "compilation.debug",
    "max_graphs": "budget.max_graphs",
    "memory": "budget.memory",
    "capture_time": "budget.capture_time",
}
PLAIN: dict[str, Any] = {  # help: quick, and the same on every terminal
    "context_settings": {"help_option_names": ["-h", "--help"]},
    "rich_markup_mode": None,
}


class _Plans(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """A configuration stands where the name of a command may stand."""
        return super().parse_args(
            ctx, ["--file", *args] if args and args[0].endswith(YAML) else args
        )


plans = typer.Typer(cls=_Plans, **PLAIN)
app = typer.Typer(
    name="cgplan",
    help="Plan, capture and measure CUDA graphs of any PyTorch model, from one YAML file.",
    epilog="\b\nExample:\n  cgplan init my_model.py:build > my.yaml\n  cgplan inspect my.yaml\n"
    "  cgplan capture my.yaml --output run.json",
    add_completion=False,
    pretty_exceptions_enable=False,
    **PLAIN,
)


@app.callback(invoke_without_command=True)
def root(
    context: Context,
    version: Annotated[bool, Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Show the version, or the help where no command was given."""
    if (
        context.invoked_subcommand not in ("capture", "bench", "doctor", "audit")
        and not is_first_rank()
    ):
        raise typer.Exit  # the other commands are of one process, however many torchrun has started
    if version:
        typer.echo(f"cgplan {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _configuration(file: Path | None, config: Path | None) -> Path:
    path = file or config
    if path is None or path != (config or path):
        raise BadParameter("give one configuration, as FILE or --config FILE")
    return path


def _settings(overrides: list[str] | None, **short: object) -> list[Any]:
    """The values of ``--set`` and of the options that are short for one."""
    from cgplan.config import Override

    settings: list[str | Override] = [*(overrides or ())]
    for name, value in short.items():
        option = f"--{name.replace('_', '-')}"
        if value == "":
            raise BadParameter(f"{option} is empty; leave it out, or give it a value")
        if value is not None:
            settings.append(Override(f"{SHORT_FOR[name]}={value}", option))
    return settings


def _of_vllm(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of a command's arguments that were given and are options of vLLM: they make sense
    beside --vllm alone.
    """
    given = {
        name: arguments[name]
        for name in OF_VLLM
        if arguments[name] is not None and arguments[name] is not False
    }
    if given and arguments["vllm"] is None:
        raise BadParameter(
            "--max-num-seqs and the like are vLLM's options: give --vllm JSON with them"
        )
    return given


@app.command(
    epilog="\b\nExample:\n  cgplan capture configs/decoder_cpu.yaml --output run.json\n"
    "  cgplan capture my.yaml --set compilation.cudagraph_mode=FULL --json\n"
    "  cgplan capture my.yaml --plan plan.json"
)
def capture(
    file: File = None,
    config: Config = None,
    overrides: Overrides = None,
    plan: PlanPath = None,
    force: Force = False,
    device: Device = None,
    output: Output = None,
    trace: Trace = None,
    html: Html = None,
    as_json: AsJson = False,
    debug: Debug = False,
    show_traceback: Traceback = False,
) -> None:
    """Capture graphs, and report their memory and time."""
    with failures_reported(show_traceback):
        from cgplan.cli.capture import Request, run_capture

        settings = _settings(overrides, device=device, debug=debug or None)
        run_capture(
            Request(
                _configuration(file, config), settings, plan, force, output, as_json, trace, html
            )
        )


@app.command(
    epilog="\b\nExample:\n  cgplan bench configs/decoder_cpu.yaml\n"
    "  cgplan bench my.yaml --set report.repeats=100 --output bench.json\n"
    "  cgplan bench my.yaml --against eager,bare,make_graphed_callables,reduce-overhead"
)
def bench(
    file: File = None,
    config: Config = None,
    overrides: Overrides = None,
    against: Annotated[
        str | None,
        Option(
            metavar="NAMES",
            help="Also measure these ways to run the model, in turns with cgplan: eager, bare, "
            "make_graphed_callables, reduce-overhead.",
        ),
    ] = None,
    seed: Annotated[
        int | None, Option(help="With --against: of the random order; drawn and shown if absent.")
    ] = None,
    plan: PlanPath = None,
    force: Force = False,
    device: Device = None,
    output: Output = None,
    trace: Trace = None,
    html: Html = None,
    as_json: AsJson = False,
    debug: Debug = False,
    show_traceback: Traceback = False,
) -> None:
    """Capture, and time each batch size with and without graphs."""
    if seed is not None and against is None:
        raise BadParameter("--seed is about the order of baselines: give --against NAMES with it")
    with failures_reported(show_traceback):
        from cgplan.cli.capture import Request, run_bench

        settings = _settings(overrides, device=device, debug=debug or None)
        baselines = () if against is None else against.split(",")
        run_bench(
            Request(
                _configuration(file, config), settings, plan, force, output, as_json, trace, html
            ),
            baselines,
            seed,
        )


@app.command(epilog="\b\nExample:\n  cgplan doctor my.yaml --set compilation.cudagraph_mode=AUTO")
def doctor(
    file: File = None,
    config: Config = None,
    overrides: Overrides = None,
    device: Device = None,
    output: Output = None,
    as_json: AsJson = False,
    show_traceback: Traceback = False,
) -> None:
    """Capture, and say how much of a step runs inside graphs, what runs outside of them, and why.

    Where the capture fails, it shows what cudagraph_mode: AUTO captures instead.
    """
    with failures_reported(show_traceback):
        from cgplan.cli.capture import Request, run_doctor

        settings = _settings(overrides, device=device)
        run_doctor(Request(_configuration(file, config), settings, None, False, output, as_json))


@app.command(epilog="\b\nExample:\n  cgplan audit my.yaml --output audit.json")
def audit(
    file: File = None,
    config: Config = None,
    overrides: Overrides = None,
    device: Device = None,
    output: Output = None,
    html: Html = None,
    as_json: AsJson = False,
    show_traceback: Traceback = False,
) -> None:
    """Capture, and say who owns the memory that each pointer in each graph points to.

    Pointers into memory that is free, gone, or held by others alone are findings; the exit code is
    then 25.
    """
    with failures_reported(show_traceback):
        from cgplan.cli.capture import Request, run_audit

        settings = _settings(overrides, device=device)
        run_audit(
            Request(_configuration(file, config), settings, None, False, output, as_json, html=html)
        )


@plans.callback(
    invoke_without_command=True,
    epilog="\b\nExample:\n  cgplan plan my.yaml --output plan.json\n"
    "  cgplan plan my.yaml --traffic requests.csv --max-graphs 16\n"
    "  cgplan plan my.yaml --emit vllm\n  cgplan plan diff plan-old.json plan.json",
)
def plan_(
    context: Context,
    file: Annotated[Path | None, Option(hidden=True)] = None,
    config: Config = None,
    vllm: Vllm = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    num_speculative_tokens: SpeculativeTokens = None,
    max_loras: MaxLoras = None,
    specialize_active_lora: SpecializeActiveLora = False,
    performance_mode: Performance = None,
    blackwell: Blackwell = False,
    overrides: Overrides = None,
    traffic: Files = None,
    weights: Weights = None,
    scale: Scale = "1",
    replicas: Replicas = 1,
    objective: Annotated[
        Objective, Option(help="Of several loads: the mean step, or the worst regret over them.")
    ] = Objective.mean,
    insurance: Annotated[
        Any,
        Option(
            metavar="SHARE",
            parser=_share,
            help="Steps of sizes that traffic need not show: 10%; 0: none.",
        ),
    ] = None,
    from_stats: Annotated[
        str | None,
        Option(
            metavar="URL|FILE",
            help="In place of --traffic: the metrics of a runner, or their address.",
        ),
    ] = None,
    speedup: Speedup = 1.0,
    step_times: StepTimes = None,
    costs: Costs = None,
    max_graphs: Annotated[int | None, Option(help="Short for --set budget.max_graphs=N.")] = None,
    memory: Annotated[
        str | None, Option(metavar="BYTES", help="Short for --set budget.memory=2GiB.")
    ] = None,
    capture_time: Annotated[
        str | None, Option(metavar="TIME", help="Short for --set budget.capture_time=30s.")
    ] = None,
    engine: Annotated[
        EngineName | None, Option("--emit", help="Print the plan for an engine, and nothing else.")
    ] = None,
    assume_default_times: Annotated[
        bool,
        Option(
            "--assume-default-times",
            help="With --emit: take the default step times, of another model.",
        ),
    ] = False,
    html: Html = None,
    verbose: Annotated[
        bool, Option("--verbose", "-v", help="Show everything: curve, padding, sizes left out.")
    ] = False,
    output: Output = None,
    as_json: AsJson = False,
    show_traceback: Traceback = False,
) -> None:
    """Plan which graphs to capture, or compare two plans.

    Nothing is captured. `cgplan capture --plan FILE` captures a saved plan.
    """
    if context.invoked_subcommand is not None:
        for name in context.params:
            if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE":
                raise BadParameter(
                    "options stand behind `plan diff` and `plan check`, which have their own: see "
                    "--help"
                )
        return
    of_vllm = _of_vllm(locals())
    path = _configuration(file, config) if vllm is None or file or config else None
    if path is not None and vllm is not None:
        raise BadParameter("give either a configuration or --vllm JSON")
    if traffic and from_stats is not None:
        raise BadParameter("give either --traffic or --from-stats")
    if engine is not None and as_json:
        raise BadParameter("give either --emit or --json; --output saves the plan beside either")
    with failures_reported(show_traceback):
        from cgplan.cli.plan import Loads, run_plan
        from cgplan.planning.engines import read_vllm

        settings = _settings(
            overrides, max_graphs=max_graphs, memory=memory, capture_time=capture_time
        )
        run_plan(
            path or read_vllm(vllm or "", overrides=settings, **of_vllm),
            settings,
            loads=Loads(
                tuple(traffic or () if from_stats is None else [(from_stats, 1.0)]),
                weights or (),
                tuple(speedup * scaled for scaled in scale),
                replicas,
                insurance,
                objective == "worst",
            ),
            step_times=step_times,
            costs=costs,
            output=output,
            engine=engine.value if engine else None,
            assumed_times=assume_default_times,
            html=html,
            verbose=verbose,
            as_json=as_json,
        )


@plans.command("diff", epilog="\b\nExample:\n  cgplan plan diff plan-old.json plan.json")
def plan_diff(
    old: Annotated[Path, Argument(metavar="OLD", help="A saved plan.")],
    new: Annotated[Path, Argument(metavar="NEW", help="A saved plan.")],
    as_json: AsJson = False,
    show_traceback: Traceback = False,
) -> None:
    """Show what changes from one plan to another.

    Sizes by lane, and in sum graphs, bytes, start-up seconds and the expected step time.
    """
    with failures_reported(show_traceback):
        from cgplan.cli.plan import run_diff

        run_diff(old, new, as_json=as_json)


@plans.command(
    "check",
    epilog="\b\nExample:\n  cgplan plan check plan.json --traffic tomorrow.csv --step-times "
    "bench.json --max-regret 1%",
)
def plan_check(
    plan: Annotated[Path, Argument(metavar="PLAN", help="A saved plan.")],
    traffic: Files,
    weights: Weights = None,
    scale: Scale = "1",
    replicas: Replicas = 1,
    speedup: Speedup = 1.0,
    step_times: StepTimes = None,
    max_regret: Annotated[
        float | None,
        Option(
            metavar="SHARE",
            parser=_share,
            help="1%, say: if steps are longer by more, exit with 24.",
        ),
    ] = None,
    as_json: AsJson = False,
    show_traceback: Traceback = False,
) -> None:
    """Try a saved plan on other traffic.

    Shows how much longer steps are than with the best plans for that traffic, and than with the
    ladders.
    """
    with failures_reported(show_traceback):
        from cgplan.cli.plan import Loads, run_check

        loads = Loads(
            tuple(traffic or ()),
            weights or (),
            tuple(speedup * scaled for scaled in scale),
            replicas,
        )
        run_check(plan, loads, step_times, max_regret, as_json)


app.add_typer(plans, name="plan")


@app.command(
    epilog="\b\nExample:\n  cgplan inspect configs/decoder_cpu.yaml\n"
    "  cgplan inspect my.yaml --json > plan.json\n  cgplan inspect run.json\n"
    """  cgplan inspect --vllm '{"cudagraph_mode": "FULL"}' --max-num-seqs 64"""
)
def inspect(
    report: Annotated[
        Path | None,
        Argument(
            metavar="REPORT", help="A saved report or plan (JSON), shown again; or a YAML file."
        ),
    ] = None,
    config: Config = None,
    everything: Annotated[
        bool, Option("--all", help="With --config: list the defaults, too.")
    ] = False,
    vllm: Vllm = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    num_speculative_tokens: SpeculativeTokens = None,
    max_loras: MaxLoras = None,
    specialize_active_lora: SpecializeActiveLora = False,
    performance_mode: Performance = None,
    blackwell: Blackwell = False,
    split: Annotated[
        bool,
        Option(
            "--split", help="With --config: build the model, and show how PIECEWISE would split it."
        ),
    ] = False,
    costs: Costs = None,
    overrides: Overrides = None,
    html: Html = None,
    as_json: AsJson = False,
    show_traceback: Traceback = False,
) -> None:
    """Show what would be captured, or a saved report.

    With --config FILE: the plan, and the values that were set, with their lines; nothing is run, no
    GPU is needed. --json prints the plan alone, in a form that `cgplan inspect` reads again.
    --costs says what the graphs are predicted to cost, and each LoRA case. With --vllm JSON: what
    vLLM would capture.
    """
    of_vllm = _of_vllm(locals())
    if report is not None and report.suffix in YAML:
        report, config = None, _configuration(report, config)
    if [report, config, vllm].count(None) != 2:
        raise BadParameter("give one of --config FILE, --vllm JSON, or the path of a saved report")
    for option, value in {
        "--split": split,
        "--all": everything,
        "--costs": costs,
        "--set": overrides,
    }.items():
        if value and config is None:
            raise BadParameter(f"{option} is about a configuration: give --config FILE with it")
        if value and as_json and option in ("--split", "--all"):
            raise BadParameter(f"{option} shows a table: leave out --json")
    if html is not None and report is None:
        raise BadParameter("--html is about a saved report: give its path with it")
    with failures_reported(show_traceback):
        from cgplan.cli.inspect import inspect_config, inspect_vllm

        if config is not None:
            inspect_config(
                config,
                overrides or (),
                as_json=as_json,
                split=split,
                costs=costs,
                everything=everything,
            )
        elif report is not None:
            from cgplan.reports import load_report

            check_outputs((html,), (report,))
            publish(load_report(report), None, as_json=as_json, html=html)
        elif vllm is not None:
            from cgplan.planning.engines import read_vllm

            inspect_vllm(read_vllm(vllm, **of_vllm), as_json=as_json)


engines = typer.Typer(help="What vLLM captures with its options; nothing is run.", **PLAIN)


@engines.command(
    epilog="\b\nExample:\n"
    """  cgplan vllm check --vllm '{"max_cudagraph_capture_size": 42}' --max-num-seqs 6\n"""
    "  cgplan vllm check --max-num-seqs 256 --log start.log"
)
def check(
    vllm: Vllm = "{}",
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxNumBatchedTokens = None,
    num_speculative_tokens: SpeculativeTokens = None,
    max_loras: MaxLoras = None,
    specialize_active_lora: SpecializeActiveLora = False,
    performance_mode: Performance = None,
    blackwell: Blackwell = False,
    log: Annotated[
        Path | None, Option(metavar="FILE", help="vLLM's log of a start: memory and seconds.")
    ] = None,
    show_traceback: Traceback = False,
) -> None:
    """Say which sizes vLLM leaves out, which batches run eagerly, and what the graphs leave to the
    KV cache.

    The exit code is 5 if vLLM does not capture sizes that were asked for.
    """
    of_vllm = _of_vllm(locals())
    with failures_reported(show_traceback):
        from cgplan.cli.inspect import check_vllm
        from cgplan.planning.engines import read_vllm

        check_vllm(read_vllm(vllm or "", **of_vllm), log)


app.add_typer(engines, name="vllm")


@app.command(
    epilog="\b\nExample:\n  cgplan schema > cgplan.schema.json\n"
    "and in the first line of the YAML file, for editor completion:\n"
    "  # yaml-language-server: $schema=cgplan.schema.json"
)
def schema(
    format_: Annotated[
        SchemaFormat,
        Option("--format", help="A JSON schema for editors, or the reference as markdown."),
    ] = SchemaFormat.json,
) -> None:
    """Print all keys of a configuration."""
    with failures_reported():
        from cgplan.config.reference import json_schema, markdown

        typer.echo(json_schema() if format_ is SchemaFormat.json else markdown(), nl=False)


@app.command(
    epilog="\b\nExample:\n  cgplan init my_model.py:build > my.yaml\n"
    "  cgplan init my_package.models:Net --kwargs '{hidden_size: 64}' > my.yaml\n"
    "  cgplan init Qwen/Qwen3-0.6B > my.yaml"
)
def init(
    target: Annotated[
        str | None,
        Argument(help="package.module:callable, path/file.py:callable, or a Hugging Face model."),
    ] = None,
    kwargs: Annotated[
        str, Option(metavar="MAPPING", help="Keyword arguments of the target, as YAML or JSON.")
    ] = "{}",
    example: Annotated[
        str | None, Option(metavar="TARGET", help="The target, where --call is given.")
    ] = None,
    call: Annotated[
        str | None,
        Option(metavar="TARGET", help="file.py:callable that returns the arguments of one call."),
    ] = None,
    show_traceback: Traceback = False,
) -> None:
    """Print a commented starting configuration.

    The model is built on the CPU, and its inputs are read off its forward; with --call off one
    call, which proves that padding is harmless, so that the configuration captures as it is. A
    Hugging Face model is an id in the local cache, or a folder; its config.json alone is read, and
    the configuration builds it with random weights.
    """
    with failures_reported(show_traceback):
        from cgplan.cli.init import starting_config
        from cgplan.errors import ConfigError

        if (made := target or example) is None or (example and not call):
            raise ConfigError(
                "no model, or --example without --call",
                remedy="Name the target that makes the model.",
            )
        typer.echo(starting_config(made, kwargs, call), nl=False)


examples = typer.Typer(
    help="Configurations to start from, with the models that they need.", **PLAIN
)
_INSTALLED = Path(__file__).parents[1] / "examples"
_EXAMPLES = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[2] / "configs"


@examples.command("list")
def list_() -> None:
    """List the examples, each with the beginning of what it says about itself."""
    for path in sorted(_EXAMPLES.glob("*.yaml")):
        first = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        typer.echo(f"{path.stem:23} {first}")


@examples.command(
    epilog="\b\nExample:\n  cgplan examples copy vision demo\n  cgplan capture demo/vision.yaml"
)
def copy(name: str, folder: Annotated[Path, Argument(metavar="DIR")] = Path()) -> None:
    """Copy an example, and the Python files that it names, into a folder, which is made if it is
    missing.
    """
    with failures_reported():
        from cgplan.config.load import read_text
        from cgplan.errors import ConfigFileError, OutputPathError, did_you_mean

        known = [path.stem for path in _EXAMPLES.glob("*.yaml")]
        if name not in known:
            remedy = f"{did_you_mean(name, known)}See `cgplan examples list`."
            raise ConfigFileError(f"there is no example {name!r}", remedy=remedy)
        text = read_text(_EXAMPLES / f"{name}.yaml", ConfigFileError, "")
        files = dict.fromkeys((f"{name}.yaml", *findall(r"\b\w+\.py\b", text)))
        if taken := [file for file in files if (folder / file).exists()]:
            raise OutputPathError(
                f"there is a {folder / taken[0]} already", remedy="Give another folder."
            )
        with suppress(OSError):  # then nothing can be saved there, and the error says why
            folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            save(folder / file, (_EXAMPLES / file).read_bytes())


app.add_typer(examples, name="examples")


def main() -> None:
    """The console script."""
    app(prog_name="cgplan")
