"""The commands. Each imports its modules when it runs: `--help` answers at once."""

import sys
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from re import findall, search
from typing import Annotated, Any

import typer
from typer import Argument, BadParameter, Context, Option
from typer.core import TyperCommand, TyperGroup

from cgplan.cli.options import (
    VLLM_JSON,
    YAML,
    AuditRequest,
    CaptureRequest,
    DoctorRequest,
    InspectRequest,
    Loads,
    PlannedLoads,
    PlanRequest,
    Shown,
    VllmOptions,
    WatchRequest,
    gib,
    share,
    with_options,
)
from cgplan.cli.output import (
    check_outputs,
    has_ranks,
    is_first_rank,
    note,
    save,
    show,
    shows_progress,
)
from cgplan.errors import ConfigError, ConfigFileError, OutputPathError, did_you_mean
from cgplan.version import __version__

SchemaFormat = StrEnum("SchemaFormat", "json markdown")
Run = Callable[..., None]
PLAIN: dict[str, Any] = {  # the same help on every terminal
    "context_settings": {"help_option_names": ["-h", "--help"]},
    "rich_markup_mode": None,
}
_HINTS = {  # by what is said; the first counts
    "option: --speculative-config": "Of vLLM: give --speculative-method, --num-speculative-tokens",
    ": --max-cudagraph-c": """Of vLLM: write --vllm '{"max_cudagraph_capture_size": N}'""",
    ": --.*cudagraph-c": """Of vLLM: write --vllm '{"cudagraph_capture_sizes": [1, 2, 4]}'""",
    "option: (-d|--data-parallel-size)$": "Leave it out: the answer is for one rank",
    "^-O|: (-O|--optim)": (
        """Write --vllm '{}' for -O2, -O3, '{"cudagraph_mode": "PIECEWISE"}' for -O1 and """
        "-O.cudagraph_mode=PIECEWISE; -O0 has no graph: leave it out"
    ),
    "option: -c": f"Of vLLM: {VLLM_JSON}",
    "option: --tensor-parallel-size": "Of vLLM, whose log has its effect: leave it out",
    "option: --enforce-eager$": "Of vLLM, which captures no graph then: leave it out",
    "option: --(gpu-memory(-utilization)?|kv-cache-memory(-bytes)?)$": (
        "`cgplan vllm check --log FILE` takes GPU memory, gives --kv-cache-tokens"
    ),
    r"equal to 1|<=1\.|valid (number|float)": "Write a number such as 0.9",
    "of 'eagle'": "Give mtp for any _mtp, none for others, such as medusa",
    r"(command '|extra.*\()\S+\.(csv|jsonl?|log|txt)\b": (
        "Of a saved plan: `cgplan inspect FILE`, or `cgplan plan check FILE`; of traffic: `cgplan "
        "plan CONFIGURATION.yaml --traffic FILE`; of a start: --log FILE; of a configuration: "
        "--config FILE"
    ),
    "option: --((tp|dp|attn|moe)-|cuda-graph|max-running|chunked-prefill-size)": (
        "Of SGLang: --sglang '--tp-size 8'; its bounds are those of the configuration"
    ),
    "there is no configuration": (
        "vLLM's options take its place: --vllm '{}'; for SGLang write its bounds into one"
    ),
    r"option: -[-ctpd]|(command '|\()(vllm|serve)|extra.*\(\S+/": (
        "Of vLLM: --vllm JSON of `plan` or `vllm check` takes keys of its --compilation-config; "
        "beside it go --max-num-seqs and others of -h; leave out the rest and the model "
        "(docs/planning.md, For vLLM)"
    ),
}


class _Command(TyperCommand):
    def parse_args(self, ctx: Any, args: Any) -> Any:
        """Refuse a second value for an option that takes one: the last would count."""
        given: Any = self.make_parser(ctx).parse_args([*args])[2]
        for option in given:
            if given.count(option) > 1 and not (option.multiple or option.is_flag):
                raise BadParameter(f"{option.opts[0]} is given twice: give it once")
        return super().parse_args(ctx, args)


class _Plans(TyperGroup, _Command):
    def parse_args(self, ctx: Any, args: Any) -> Any:
        """A configuration may stand in the place of a command, also after options."""
        rest = self.make_parser(ctx).parse_args([*args])[1]
        if rest and rest[0].endswith(YAML):
            args = [*args[: -len(rest)], "--file", *rest]
        return super().parse_args(ctx, args)


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """A word that may be vLLM's is refused with what takes its place."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            usage: Any = error
            said = getattr(usage, "message", "").removeprefix("Value error, ")
            option = said.rpartition("option: ")[2]
            near = did_you_mean(option, getattr(usage, "possibilities", None) or (), cutoff=0.85)
            hint = next((told for words, told in _HINTS.items() if search(words, said)), "")
            if option in ("-q", "--quiet"):
                said += "; it goes before the command: cgplan -q COMMAND"
            elif any(option in each.opts[:1] for each in self.commands["plan"].params):
                hint = (
                    "Of `cgplan plan`: a saved plan holds its settings, SLO and budget; `plan "
                    "check --traffic FILE` takes saved metrics; `vllm check` has only options of "
                    "vLLM, and the attention of --log; `inspect` shows all of a saved plan"
                )
            elif near and option != "--model":
                hint = ""
            if hasattr(usage, "param_type"):  # it is missing
                said = f"Write {usage.ctx.command.epilog.splitlines()[2].strip()}"
            if hint and usage.ctx.command.name in ("plan", "inspect", "check", "vllm"):
                said = f"{said.rstrip('.')}. {hint}"
                usage.possibilities = None
            if said:
                usage.message = said
            raise


def example(*lines: str) -> str:
    return "\n  ".join(("\b\nExample:", *lines))


def command(group: typer.Typer, *lines: str, name: str | None = None) -> Callable[[Run], Run]:
    def add(run: Run) -> Run:
        group.command(name, cls=_Command, epilog=example(*lines))(with_options(run))
        return run

    return add


app = typer.Typer(
    cls=_Commands,
    name="cgplan",
    help="Plan, capture and measure CUDA graphs of any PyTorch model, from one YAML file.",
    epilog=example(
        "cgplan init my_model.py:build > my.yaml",
        "cgplan inspect my.yaml",
        "cgplan capture my.yaml --output run.json",
    ),
    pretty_exceptions_enable=False,
    **PLAIN,
)
plans = typer.Typer(cls=_Plans, **PLAIN)
engines = typer.Typer(help="What vLLM captures with its options; nothing is run.", **PLAIN)
examples = typer.Typer(
    help="Configurations to start from, with the models that they need.", **PLAIN
)


@app.callback(invoke_without_command=True)
def root(
    context: Context,
    version: Annotated[bool, Option("--version", help="Show the version and exit.")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    shows_progress.set(not quiet)
    on_all_ranks = ("capture", "bench", "doctor", "audit", "watch")
    if context.invoked_subcommand not in on_all_ranks and not is_first_rank():
        raise typer.Exit
    if version:
        typer.echo(f"cgplan {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _run(name: str, request: DoctorRequest) -> None:
    prepared = request.prepare()
    from cgplan.cli.capture import run

    run(name, request, prepared)


@command(
    app,
    "cgplan capture configs/decoder_cpu.yaml --output run.json",
    "cgplan capture my.yaml --set compilation.cudagraph_mode=FULL --json",
    "cgplan capture my.yaml --plan plan.json",
)
def capture(request: CaptureRequest) -> None:
    """Capture graphs, and report their memory and time."""
    _run("capture", request)


@command(
    app,
    "cgplan bench configs/decoder_cpu.yaml",
    "cgplan bench my.yaml --set report.repeats=100 --output bench.json",
    "cgplan bench my.yaml --against eager,bare,make_graphed_callables,reduce-overhead",
)
def bench(
    request: CaptureRequest,
    against: Annotated[
        str | None,
        Option(
            metavar="NAMES",
            help="Beside other ways: eager, bare, make_graphed_callables, reduce-overhead.",
        ),
    ] = None,
    seed: Annotated[
        int | None, Option(help="With --against: of the random order; absent: drawn.")
    ] = None,
) -> None:
    """Capture, and time each batch size with and without graphs."""
    if seed is not None and against is None:
        raise BadParameter("--seed is about the order of baselines: give --against NAMES with it")
    prepared = request.prepare()
    from cgplan.reports import check_baselines

    baselines = () if against is None else check_baselines(against.split(","))
    if baselines and has_ranks():
        raise ConfigError(
            "--against measures one process, and torchrun has started several",
            remedy="Leave out --against, or run `cgplan bench` without torchrun.",
        )
    from cgplan.cli.capture import run_bench

    run_bench(request, prepared, baselines, seed)


@command(app, "cgplan doctor my.yaml --set compilation.cudagraph_mode=AUTO")
def doctor(request: DoctorRequest) -> None:
    """Capture, and say how much of a step runs inside graphs.

    Where the capture fails, cudagraph_mode: AUTO is captured instead.
    """
    _run("doctor", request)


@command(app, "cgplan audit my.yaml --output audit.json")
def audit(request: AuditRequest) -> None:
    """Capture, and say who owns the memory that the graphs point to.

    Pointers into memory that is free, gone, or held by others are findings: the exit code is 25.
    """
    _run("audit", request)


@command(
    app,
    "cgplan watch -- python serve.py --port 8000",
    "cgplan watch --output watch.json -- vllm serve Qwen/Qwen3-0.6B",
)
def watch(
    program: Annotated[list[str], Argument(metavar="COMMAND", help="After --, to be run.")],
    request: WatchRequest,
) -> None:
    """Run a program, and say which of its CUDA graphs are stale.

    The table comes when it ends, and on SIGUSR1. Pointers into freed memory give exit code 25;
    --fail-on-stale gives it for all stale ones.
    """
    check_outputs((request.output, request.html), ())
    from cgplan.cli.watch import run_watch

    run_watch(program, request)


@plans.callback(
    invoke_without_command=True,
    epilog=example(
        "cgplan plan my.yaml --output plan.json",
        "cgplan plan my.yaml --traffic requests.csv --max-graphs 16",
        "cgplan plan my.yaml --emit vllm",
        "cgplan plan diff plan-old.json plan.json",
    ),
)
@with_options
def plan_(context: Context, request: PlanRequest, loads: PlannedLoads, engine: VllmOptions) -> None:
    """Plan which graphs to capture, or compare two plans.

    Nothing is captured. `cgplan capture --plan FILE` captures a saved plan.
    """
    if context.invoked_subcommand is not None:
        sources = map(context.get_parameter_source, context.params)
        if any(getattr(source, "name", "") == "COMMANDLINE" for source in sources):
            raise BadParameter("put options after `plan diff` and `plan check`: see their --help")
        return
    if engine.vllm is not None and (request.file or request.config):
        raise BadParameter("give either a configuration or --vllm JSON")
    if loads.traffic and loads.from_stats is not None:
        raise BadParameter("give either --traffic or --from-stats")
    if request.emit and request.as_json:
        raise BadParameter("give either --emit or --json; --output saves the plan beside either")
    if request.sglang is not None and request.emit not in (None, "sglang"):
        raise BadParameter(f"--sglang is not about --emit {request.emit}")
    from cgplan.cli.plan import run_plan

    settings = request.settings()
    run_plan(request, settings, loads, engine.read(settings))


@command(plans, "cgplan plan diff plan-old.json plan.json", name="diff")
def plan_diff(
    old: Annotated[Path, Argument(metavar="OLD", help="A saved plan.")],
    new: Annotated[Path, Argument(metavar="NEW", help="A saved plan.")],
    shown: Shown,
) -> None:
    """Show what changes from one plan to another: sizes, memory, times."""
    from cgplan.planning.difference import compare
    from cgplan.reports import load_plan
    from cgplan.reports.plan_tables import render_difference

    difference = compare(load_plan(old), load_plan(new))
    if shown.as_json:
        typer.echo(difference.model_dump_json(indent=2))
    else:
        show(render_difference(difference, str(old), str(new)))


@command(
    plans,
    "cgplan plan check plan.json --traffic tomorrow.csv --max-regret 1%",
    name="check",
)
def plan_check(
    plan: Annotated[Path, Argument(metavar="PLAN", help="A saved plan.")],
    loads: Loads,
    shown: Shown,
    max_regret: Annotated[
        float | None,
        Option(
            metavar="SHARE",
            parser=share,
            help="Such as 1%: if steps are longer by more, exit with 24.",
        ),
    ] = None,
) -> None:
    """Try a saved plan on other traffic, beside the best plans for it and the ladders."""
    from cgplan.cli.plan import run_check

    run_check(plan, loads, max_regret, shown)


@command(
    app,
    "cgplan inspect configs/decoder_cpu.yaml",
    "cgplan inspect my.yaml --json > plan.json",
    "cgplan inspect before.json after.json --html both.html",
    """cgplan inspect --vllm '{"cudagraph_mode": "FULL"}' --max-num-seqs 64""",
)
def inspect(request: InspectRequest, engine: VllmOptions) -> None:
    """Show what would be captured, or a saved report.

    Of a configuration: the plan, and the values that were set. --json prints the plan alone.
    """
    report = request.file
    if report and report.suffix in YAML:
        report = None
    is_configuration = request.config is not None or request.file != report
    if [report is not None, is_configuration, engine.vllm is not None].count(True) != 1:
        raise BadParameter("give one of my.yaml, --vllm JSON, or a saved report")
    tables = {"--split": request.split, "--all": request.everything}
    if report:
        of_configuration = {**tables, "--costs": request.costs, "--set": request.overrides}
        for option, value in of_configuration.items():
            if value:
                raise BadParameter(f"{option} is about a configuration: give --config FILE with it")
    for option, value in tables.items():
        if value and request.as_json:
            raise BadParameter(f"{option} shows a table: leave out --json")
    if (request.html or request.other) and not report:
        raise BadParameter(
            "--html and a second file are about a saved report: give its path, or run `cgplan plan "
            "my.yaml --html plan.html`"
        )
    vllm = engine.read(request.settings())
    if report:
        from cgplan.reports.records import Beside, load_report

        other = request.other
        check_outputs((request.html,), (report, other))
        first = load_report(report)
        reports = {str(report): first}
        if other:
            reports[str(other)] = load_report(other, first.kind)
        request.publish(Beside(reports=reports) if other else first)
        return
    from cgplan.cli.inspect import inspect_config

    inspect_config(request, vllm)


@command(
    engines,
    """cgplan vllm check --vllm '{"max_cudagraph_capture_size": 42}' --max-num-seqs 6""",
    "cgplan vllm check --max-num-seqs 256 --log start.log",
    "cgplan vllm check --plan plan.json --log new.log  # of a start with the plan",
)
def check(
    engine: VllmOptions,
    log: Annotated[
        Path | None, Option("--log", "--costs", metavar="FILE", help="vLLM's log of a start.")
    ] = None,
    plan: Annotated[
        Path | None,
        Option(metavar="FILE", help="A saved plan, in place of --vllm."),
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, Option(metavar="SHARE", help="Absent: the log's.", min=0.01, max=1)
    ] = None,
    gpu_memory: Annotated[
        float | None, Option(metavar="GIB", help="Of the GPU; absent: the log's.", parser=gib)
    ] = None,
) -> None:
    """Say which sizes vLLM leaves out, which batches run eagerly, and what its KV cache gets.

    The exit code is 5 if sizes that were asked for are left out, 20 if no KV cache fits, 21 if the
    log's start has other graphs than the plan, or far more memory.
    """
    from cgplan.cli.inspect import check_vllm

    if not log and (gpu_memory or gpu_memory_utilization):
        raise BadParameter("another GPU memory than the log's, without --log FILE")
    if plan is None:
        engine.vllm = engine.vllm or "{}"
    elif engine != VllmOptions():
        raise BadParameter("--plan FILE holds vLLM's options: leave out --vllm and the like")
    vllm = engine.read()
    for line in vllm.said(log) if vllm else ():
        note(f"note: {line}")
    check_vllm(vllm, log, plan, gpu_memory_utilization, gpu_memory)


@command(
    app,
    "cgplan schema > cgplan.schema.json",
    "# in the first line of a YAML file, for editor completion:",
    "# yaml-language-server: $schema=cgplan.schema.json",
)
def schema(
    format_: Annotated[
        SchemaFormat,
        Option("--format", help="A JSON schema for editors, or the reference as markdown."),
    ] = SchemaFormat.json,
) -> None:
    """Print all keys of a configuration."""
    from cgplan.config.reference import json_schema, markdown

    typer.echo(json_schema() if format_ is SchemaFormat.json else markdown(), nl=False)


@command(
    app,
    "cgplan init my_model.py:build > my.yaml",
    "cgplan init my_package.models:Net --kwargs '{hidden_size: 64}' > my.yaml",
    "cgplan init Qwen/Qwen3-0.6B > my.yaml",
)
def init(
    target: Annotated[
        str,
        Argument(help="package.module:callable, path/file.py:callable, or a Hugging Face model."),
    ],
    kwargs: Annotated[
        str, Option(metavar="MAPPING", help="Keyword arguments of the target, as YAML or JSON.")
    ] = "{}",
    call: Annotated[
        str | None,
        Option(metavar="TARGET", help="file.py:callable that returns the arguments of one call."),
    ] = None,
) -> None:
    """Print a commented starting configuration.

    Inputs are read from the forward, or with --call from one call, which also tries padding. A
    Hugging Face model is an id in the local cache, or a folder, and gets random weights.
    """
    from cgplan.config.load import read_yaml

    option = f"--kwargs {kwargs!r}"
    remedy = "Write keyword arguments, such as '{hidden_size: 64}'."
    arguments = read_yaml(kwargs, option, remedy)
    if not isinstance(arguments, dict):
        raise ConfigError(f"{option} is not a mapping of names to values", remedy=remedy)
    from cgplan.cli.init import starting_config

    typer.echo(starting_config(target, arguments, call), nl=False)


_INSTALLED = Path(__file__).parents[1] / "examples"
_EXAMPLES = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[2] / "configs"


@examples.command("list")
def list_() -> None:
    """List the examples, each with its first line."""
    for path in sorted(_EXAMPLES.glob("*.yaml")):
        first = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        typer.echo(f"{path.stem:23} {first}")


@command(examples, "cgplan examples copy vision demo", "cgplan capture demo/vision.yaml")
def copy(name: str, folder: Annotated[Path, Argument(metavar="DIR")] = Path()) -> None:
    """Copy an example and its Python files into a folder, which is made if it is missing."""
    from cgplan.config.load import read_text

    known = [path.stem for path in _EXAMPLES.glob("*.yaml")]
    if name not in known:
        raise ConfigFileError(
            f"there is no example {name!r}",
            remedy=f"{did_you_mean(name, known)}See `cgplan examples list`.",
        )
    text = read_text(_EXAMPLES / f"{name}.yaml", ConfigFileError, "")
    files = dict.fromkeys((f"{name}.yaml", *findall(r"\b\w+\.py\b", text)))
    for file in files:
        if (folder / file).exists():
            raise OutputPathError(
                f"there is a {folder / file} already", remedy="Give another folder."
            )
    with suppress(OSError):  # saving says why
        folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        save(folder / file, (_EXAMPLES / file).read_bytes())


app.add_typer(plans, name="plan")
app.add_typer(engines, name="vllm")
app.add_typer(examples, name="examples")


def main() -> None:
    """The console script."""
    try:
        app(prog_name="cgplan")
    except OSError as error:  # while the help was written
        note(f"error: cannot write the output: {error.strerror}\n  remedy: Make room there.")
        sys.exit(OutputPathError.exit_code)
