"""Options of the commands: dataclasses whose fields hold what typer has to know."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from typer import Argument, BadParameter, Option, echo

from cgplan.cli.output import (
    check_outputs,
    failures_reported,
    has_ranks,
    is_first_rank,
    save,
    show,
    tell,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from cgplan.config import LoadedConfig, Override
    from cgplan.config.schema import Record
    from cgplan.planning import Plan
    from cgplan.planning.engines import Engine, VllmConfig
    from cgplan.traffic.histogram import Goal

YAML = (".yaml", ".yml")
SHORT_FOR = {  # options by the key that they set
    "device": "device",
    "debug": "compilation.debug",
    "max_graphs": "budget.max_graphs",
    "memory": "budget.memory",
    "capture_time": "budget.capture_time",
}
PerformanceMode = StrEnum("PerformanceMode", "balanced interactivity throughput")
SpeculativeMethod = StrEnum(
    "SpeculativeMethod", "eagle eagle3 mtp deepseek_mtp ngram draft_model suffix custom_class"
)
Runner = StrEnum("Runner", "v1 v2")
Objective = StrEnum("Objective", "robust mean")
ModeChoice = StrEnum("ModeChoice", "keep best")
VLLM_JSON = """write --vllm '{"cudagraph_mode": "FULL"}'"""
GOALS = "ttft_p50, ttft_p99, tpot_p50, tpot_p99, step_p50, step_p99, decode_p99"
MICROSECONDS = {"us": 1.0, "ms": 1e3, "s": 1e6}


class EngineName(StrEnum):
    vllm = "vllm"
    sglang = "sglang"
    trtllm = "trtllm"
    json = "json"


def option(words: str, *names: str, default: object = None, kind: Any = Option, **more: Any) -> Any:
    return field(default=default, metadata={"typer": kind(*names, help=words, **more)})


flag = partial(option, default=False)
file_option = partial(option, metavar="FILE")


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each option of its groups as a parameter, and --traceback.

    An error ends it with a message and an exit code.
    """
    groups: dict[str, Any] = {}
    parameters: list[Parameter] = []
    for parameter in signature(command, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
        else:
            parameters.append(parameter)
    for group in (*groups.values(), _Always):
        for each in fields(group):
            if each.metadata:
                parameters.append(
                    Parameter(
                        each.name,
                        Parameter.KEYWORD_ONLY,
                        default=each.default,
                        annotation=Annotated[each.type, each.metadata["typer"]],
                    )
                )

    @wraps(command)
    def run(show_traceback: bool, **given: Any) -> None:
        with failures_reported(show_traceback):
            for name, group in groups.items():
                options = [each.name for each in fields(group) if each.name in given]
                given[name] = group(**{option: given.pop(option) for option in options})
            command(**given)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run


@dataclass
class _Always:
    show_traceback: bool = flag("On an error, show where it was raised.", "--traceback")


def numbers(text: str) -> tuple[float, ...]:
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        found = (-1.0,)
    if any(not 0 < number < float("inf") for number in found):
        raise BadParameter(f"{text!r} is no list of numbers above 0, such as 1,2,4")
    return found


def whole(text: str, least: int = 0) -> int:
    """Also with thousands as Python or vLLM's log writes them."""
    thousands = re.fullmatch(r"(\d+)k", text.lower())
    try:
        found = int(re.sub(r"(?<=\d),(?=\d{3}\b)", "", text))
    except ValueError:
        found = -1
    if found < least:
        hint = ", such as 16"
        if thousands:
            hint = f": write {int(thousands[1]) * 1000} or {int(thousands[1]) * 1024}"
        raise BadParameter(f"{text!r} is no whole number from {least}{hint}")
    return found


def share(text: str) -> float:
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = -1
    if not 0 <= found < 1:
        raise BadParameter(f"{text!r} is no share: write 1% or 0.01")
    return found


def goal(text: str) -> "Goal":
    names = GOALS.replace(", ", "|")
    found = re.fullmatch(rf"({names})=([0-9]+(?:\.[0-9]+)?)(us|ms|s)", text)
    if found is None or float(found[2]) <= 0:
        raise BadParameter(
            f"{text!r} is no SLO: write tpot_p99=30ms, the unit us, ms or s, with one of {GOALS}"
        )
    from cgplan.traffic.histogram import Goal

    name, number, unit = found.groups()
    return Goal(name=name, microseconds=float(number) * MICROSECONDS[unit])


def compilation_config(text: str) -> str:
    if text.startswith("-O"):
        raise BadParameter(f"{text} is vLLM's")
    if text.startswith("-"):
        raise BadParameter(f"JSON is missing before {text}: write --vllm '{{}}' {text}")
    return text


def yaml_file(text: str) -> Path:
    if text.startswith("c.") and "=" in text:
        raise BadParameter(f"-c{text} is vLLM's: {VLLM_JSON}")
    return Path(text)


def limit(text: str) -> str:
    if text[-1:].isdigit():
        raise BadParameter(f"{text} has no unit: add MiB, GiB or B of memory, ms or s of time")
    return "null" if text == "none" else text


def gib(text: str) -> float:
    """``80`` or ``80GiB``, of a GPU."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(GiB)?", text)
    if not found or not 1 <= float(found[1]) <= 1024:
        raise BadParameter(f"{text!r} is no GPU's memory in GiB: write 80 or 80GiB")
    return float(found[1])


def traffic_file(text: str) -> tuple[Path, float]:
    """As ``trace.csv@2x``: its requests come twice as fast."""
    name, _, faster = text.rpartition("@")
    if name and faster.endswith("x") and not Path(text).exists():
        return Path(name), numbers(faster[:-1])[0]
    return Path(text), 1.0


def result_file(text: str, other: str) -> Path:
    if text.endswith(other):
        raise BadParameter(f"{text} ends in {other}: --output writes JSON, --html writes HTML")
    return Path(text)


# Options of several groups. Click 8.1 takes no partial function as a parser.
count = partial(option, metavar="N", parser=whole)
count_from_1 = partial(count, parser=lambda text: whole(text, least=1))
COSTS = partial(
    option,
    "What graphs cost: a capture report, vLLM's log, `estimate` or `measure`.",
    metavar="SOURCE",
)
TRAFFIC = partial(
    file_option,
    "Traffic: a histogram, a trace, a log; FILE@2x: twice as fast. Repeat.",
    parser=traffic_file,
)


@dataclass
class Shown:
    output: Path | None = None
    html: Path | None = None
    as_json: bool = flag("Print JSON on standard output, and nothing else there.", "--json")

    def publish(self, report: "Record", text: "RenderableType | None" = None) -> None:
        """Save a report as JSON and as HTML, and show it, or ``text``, even if that fails."""
        from cgplan.reports import render, render_text

        content = report.model_dump_json(indent=2)
        try:
            if self.output:
                save(self.output, f"{content}\n")
            if self.html:
                from cgplan.reports.html import html_of, page_of

                save(self.html, html_of(page_of(report), render_text(report)))
        finally:
            if self.as_json:
                text = content
            if isinstance(text, str):
                echo(text)
            else:
                show(text or render(report))


@dataclass
class Saved(Shown):
    output: Path | None = file_option(
        "Also save the result as JSON in this file.",
        "--output",
        "-o",
        parser=lambda text: result_file(text, ".html"),
    )
    html: Path | None = file_option(
        "Also write it as one HTML file, with charts.",
        parser=lambda text: result_file(text, ".json"),
    )


@dataclass
class Given:
    file: Path | None = file_option("The YAML configuration, in place of --config.", kind=Argument)
    config: Path | None = file_option("The YAML configuration.", "--config", "-c", parser=yaml_file)
    overrides: list[str] | None = option(
        "Override a value by its dotted key; the value is YAML. Repeat.",
        "--set",
        "-s",
        metavar="KEY=VALUE",
    )

    @property
    def path(self) -> Path:
        path = self.file or self.config
        if not path or path != (self.config or path):
            raise BadParameter("there is no configuration, or two: give FILE or --config FILE")
        return path

    def settings(self) -> "list[str | Override]":
        """Of ``--set``, and of options that are short for one."""
        from cgplan.config import Override

        settings: list[str | Override] = list(self.overrides or ())
        for name, key in SHORT_FOR.items():
            value = getattr(self, name, None)
            if value is None or value is False:
                continue
            switch = f"--{name.replace('_', '-')}"
            if value == "":
                raise BadParameter(f"{switch} is empty; leave it out, or give it a value")
            settings.append(Override(f"{key}={value}", switch))
        return settings


class Prepared(NamedTuple):
    loaded: "LoadedConfig"
    plan: "Plan"
    target: str
    kwargs: dict[str, Any]


@dataclass
class DoctorRequest(Saved, Given):
    plan: Path | None = None
    force: bool = False
    device: str | None = option(
        "Short for --set device=DEVICE: auto, cpu, cuda, cuda:N.", "--device", metavar="DEVICE"
    )
    trace: Path | None = None

    def prepare(self) -> Prepared:
        if self.force and not self.plan:
            raise BadParameter("--force is about a saved plan: give --plan FILE with it")
        from cgplan.config import read_config

        path = self.path
        loaded = read_config(path, self.settings())
        from cgplan.errors import ConfigError
        from cgplan.planning import build_plan
        from cgplan.planning.plan import refuse_auto
        from cgplan.reports import load_plan

        config = loaded.config
        if self.plan or has_ranks():
            refuse_auto(config.compilation)
        plan = load_plan(self.plan) if self.plan else build_plan(config)
        target, kwargs = loaded.model_for(str(path))
        symbols = {extent.symbol for spec in config.tensors.values() for extent in spec.extents}
        if plan.keys and not any(symbols):
            raise ConfigError(
                f"{path}: no input has a dimension that counts the rows of a batch",
                remedy="Declare or uncomment an input with num_tokens or num_reqs; `cgplan init "
                "TARGET --call EXAMPLE` writes all.",
            )
        if is_first_rank():
            check_outputs((self.output, self.trace, self.html), (path, self.plan))
            tell("loading PyTorch", in_logs=False)
        return Prepared(loaded, plan, target, kwargs)


@dataclass
class AuditRequest(DoctorRequest):
    def settings(self) -> "list[str | Override]":
        from cgplan.config import Override, read_config

        settings = super().settings()
        own = ["compilation.capture_policy=eager"]
        if read_config(self.path, settings).config.compilation.audit != "prove":
            own.append("compilation.audit=report")
        return [*settings, *(Override(setting, "cgplan audit") for setting in own)]


@dataclass
class WatchRequest(Saved):
    fail_on_stale: bool = flag(
        "Exit with 25 for any stale pointer, also into memory that something holds.",
        "--fail-on-stale",
    )
    every_replay: bool = flag(
        "Raise AuditError in the line that replays a graph whose memory was freed, slowly.",
        "--every-replay",
    )


@dataclass
class CaptureRequest(DoctorRequest):
    plan: Path | None = file_option("Capture exactly the keys of this saved plan.")
    force: bool = flag("With --plan: capture a plan that was made for something else.", "--force")
    trace: Path | None = file_option("Also save a trace of captures and calls, for Perfetto.")
    debug: bool = flag("Check everything, slowly (compilation.debug).", "--debug")


@dataclass
class PlanRequest(Saved, Given):
    file: Path | None = option("", hidden=True)
    costs: str | None = COSTS()
    max_graphs: int | None = count("Short for --set budget.max_graphs=N.")
    memory: str | None = option(
        "Short for --set budget.memory=2GiB; none: even more than the graphs asked for.",
        metavar="BYTES",
        parser=limit,
    )
    capture_time: str | None = option(
        "Short for --set budget.capture_time=30s.", metavar="TIME", parser=limit
    )
    emit: EngineName | None = option("Print the plan for an engine, and nothing else.")
    sglang: str | None = option("SGLang's options, as on its command line.", metavar="OPTIONS")
    assume_default_times: bool = flag(
        "With --emit: take the default step times, of another model.", "--assume-default-times"
    )
    verbose: bool = flag("Show everything: the curve, padding, all notes.", "--verbose", "-v")

    @property
    def engine(self) -> "Engine | None":
        if self.emit is None:
            return None if self.sglang is None else "sglang"
        asked: Engine | Literal["json"] = self.emit.value
        return None if asked == "json" else asked


@dataclass
class InspectRequest(Saved, Given):
    file: Path | None = option(
        "A saved report or plan (JSON), shown again; or a YAML file.",
        metavar="REPORT",
        kind=Argument,
    )
    other: Path | None = file_option("A second report, beside it.", kind=Argument)
    everything: bool = flag("With --config: list the defaults, too.", "--all")
    split: bool = flag(
        "With --config: build the model, and show how PIECEWISE would split it.", "--split"
    )
    costs: str | None = COSTS()
    output: Path | None = None


@dataclass
class Loads:
    traffic: list[Any] | None = TRAFFIC(default=...)
    weights: Any = option(
        "Weights of several --traffic files, such as 3,1.", metavar="LIST", parser=numbers
    )
    scale: Any = option(
        "Planned for together: 1,2,4 times the load.", metavar="LIST", parser=numbers, default="1"
    )
    replicas: int | None = count_from_1(
        "Servers, or data-parallel ranks, that share the requests.",
        "--replicas",
        "--data-parallel-size",
        "-dp",
    )
    speedup: float = option(
        "Requests of a trace arrive X times as fast.", metavar="X", min=1e-6, default=1.0
    )
    step_times: Path | None = file_option(
        "Step times: a bench report, a table, or an engine's benchmark."
    )
    lora_step_times: Path | None = file_option(
        "Beside --step-times: of steps that all have adapters, such as a log of them alone."
    )
    objective: Objective = Objective.robust
    insurance: float | None = None
    from_stats: str | None = None
    mode: ModeChoice | None = None
    slo: list[Any] | None = None
    kv_cache_tokens: int | None = None
    kv_token_bytes: int | None = None

    @property
    def files(self) -> list[tuple[Path | str, float]]:
        """(file or address of metrics, speed of its requests)."""
        return list(self.traffic or ()) if self.from_stats is None else [(self.from_stats, 1.0)]

    @property
    def measured(self) -> dict[str, Path | None]:
        return {"--step-times": self.step_times, "--lora-step-times": self.lora_step_times}

    @property
    def scales(self) -> tuple[float, ...]:
        return tuple(self.speedup * scaled for scaled in self.scale)

    @property
    def is_recorded(self) -> bool:
        is_other = self.objective is not Objective.robust
        said = self.weights or self.insurance is not None or is_other
        speeds = [self.replicas or 1, *self.scales, *(speed for _, speed in self.files)]
        return not said and set(speeds) == {1}


@dataclass
class PlannedLoads(Loads):
    traffic: list[Any] | None = TRAFFIC()
    objective: Objective = option(
        "Minimise the mean step of the loads given (mean), or with 2 and 4 times the load and the "
        "p99 of decode (robust).",
        default=Objective.robust,
    )
    insurance: Any = option(
        "Steps of sizes that the traffic lacks, as a share: 10%.", metavar="SHARE", parser=share
    )
    from_stats: str | None = option(
        "In place of --traffic: the metrics of a runner, or their address.", metavar="URL|FILE"
    )
    mode: ModeChoice | None = option(
        "best: the mode with the shortest steps; the default for vLLM with times and no mode named."
    )
    slo: list[Any] | None = option(
        "The fewest graphs that hold it, such as tpot_p99=30ms; several times.",
        metavar="NAME=TIME",
        parser=goal,
    )
    kv_cache_tokens: int | None = count_from_1(
        "Tokens that the KV cache holds; absent: as a log in --costs has it, or no limit."
    )
    kv_token_bytes: int | None = count_from_1("Bytes of a token in the KV cache.")


OF_VLLM = "With --vllm: as vLLM's option."


@dataclass
class VllmOptions:
    vllm: Any = option(
        "What vLLM's --compilation-config takes; {} is its default.",
        "--vllm",
        "--compilation-config",
        metavar="JSON",
        parser=compilation_config,
    )
    max_num_seqs: int | None = count(OF_VLLM)
    max_num_batched_tokens: int | None = count(OF_VLLM)
    num_speculative_tokens: int | None = count(
        "With --vllm: of vLLM's --speculative-config.", "--num-speculative-tokens", "--spec-tokens"
    )
    speculative_method: SpeculativeMethod | None = option(
        "With --vllm: method of vLLM's --speculative-config; mtp for any _mtp; absent for medusa.",
        "--speculative-method",
        "--spec-method",
    )
    runner: Runner | None = option(
        "With --vllm: its model runner; absent: v2 if it has the method."
    )
    enable_lora: bool = flag("With --vllm: as --max-loras 1, if that is absent.", "--enable-lora")
    max_loras: int | None = count(OF_VLLM)
    specialize_active_lora: bool = flag(OF_VLLM, "--specialize-active-lora")
    performance_mode: PerformanceMode | None = option(OF_VLLM)
    blackwell: bool = flag("With --vllm: on a GPU of compute capability 10.x.", "--blackwell")

    def read(self, overrides: "Sequence[str | Override]" = ()) -> "VllmConfig | None":
        tokens = self.max_num_batched_tokens
        seqs = self.max_num_seqs
        if tokens and seqs and tokens < seqs:
            raise BadParameter(
                f"--max-num-batched-tokens {tokens} is below --max-num-seqs {seqs}, which vLLM "
                "refuses: raise the one or lower the other"
            )
        options: dict[str, Any] = {}
        for name, value in vars(self).items():
            if name not in ("vllm", "enable_lora") and value is not None and value is not False:
                options[name] = "mtp" if value == "deepseek_mtp" else value
        if self.enable_lora:
            options.setdefault("max_loras", 1)
        if self.vllm is not None:
            from cgplan.planning.engines import read_vllm

            is_ignored = not self.enable_lora and options.pop("max_loras", None)
            found = read_vllm(self.vllm, overrides=overrides, **options)
            if is_ignored:
                note = "--max-loras ignored, as vLLM does without --enable-lora: add that"
                found = found._replace(notes=(note, *found.notes))
            return found
        if options:
            raise BadParameter("--max-num-seqs and the like are vLLM's options: add --vllm '{}'")
        return None
