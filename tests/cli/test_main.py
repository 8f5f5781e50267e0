"""Options and exit codes of all commands: what is refused, and what standard error says."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import cgplan_command, good, refused, settings, unwrapped, use_traffic

import cgplan
from cgplan import errors
from cgplan.cli import options
from cgplan.config import load_config
from cgplan.planning import build_plan

REPO = Path(__file__).parents[2]


def test_version() -> None:
    assert good("--version").stdout == f"cgplan {cgplan.__version__}\n"


def test_no_arguments_show_the_help() -> None:
    shown = good().stdout
    assert shown == good("--help").stdout
    listed = shown.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert len(listed) == 11
    for line in listed:
        assert re.search(r"^  \w+ +[A-Z].*[^.]\.$", line), "no whole sentence"
        assert len(line) <= 80


def test_examples_are_listed_by_whole_sentences() -> None:
    lines = good("examples", "list").stdout.splitlines()
    assert len(lines) == len(list(REPO.glob("configs/*.yaml")))
    for line in lines:
        assert line.endswith(".")
        assert len(line) <= 80


def test_quiet_shows_no_progress(home: Path) -> None:
    loud = good("capture", "--config", "good.yaml")
    quiet = good("--quiet", "capture", "--config", "good.yaml")
    assert "capture 1/" in loud.stderr
    assert quiet.stderr == ""
    assert quiet.stdout.startswith("Capture\n")
    late = cgplan_command("capture", "good.yaml", "-q")
    assert "-q; it goes before the command: cgplan -q COMMAND" in late.stderr
    assert "no such file" in refused(errors.ConfigFileError, "-q", "capture", "missing.yaml")


@pytest.mark.parametrize(
    "command", ["capture", "bench", "inspect", "schema", "init", "plan", "plan diff"]
)
def test_help_of_each_command_has_an_example(command: str) -> None:
    assert f"Example:\n    cgplan {command} " in good(*command.split(), "--help").stdout


def in_a_process(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]),
    }
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )


def test_python_dash_m(home: Path) -> None:
    done = in_a_process("-m", "cgplan", "inspect", "--config", "missing.yaml")
    assert done.returncode == errors.ConfigFileError.exit_code
    assert done.stderr.startswith("error: no such file: missing.yaml\n  remedy: ")
    assert done.stdout == ""


def test_torch_is_not_imported(home: Path) -> None:
    """By commands that do not run the model, and before a capture's files are read and refused; the help does without
    the reports' tables, too.
    """
    (home / "plan.json").write_text(build_plan(load_config("good.yaml")).model_dump_json())
    code = """
import sys
from typer.testing import CliRunner
from cgplan.cli.main import app

def run(*arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and result.stdout, result.output

def refuse(exit_code, *arguments):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == exit_code, result.output

run("--help")
run("capture", "--help")
assert "cgplan.reports" not in sys.modules
run("schema")
run("inspect", "--config", "good.yaml")
run("inspect", "plan.json")
run("inspect", "--vllm", "{}", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
run("plan", "--config", "good.yaml", "--html", "plan.html", "--emit", "vllm")
run("plan", "diff", "plan.json", "plan.json")
refuse(4, "capture", "missing.yaml")
refuse(3, "bench", "good.yaml", "--set", "devise=cpu")
refuse(3, "bench", "good.yaml", "--against", "baer")
refuse(16, "capture", "good.yaml", "--plan", "good.yaml")
refuse(17, "audit", "good.yaml", "--html", ".")
refuse(3, "init", "models.py:build", "--kwargs", "[1]")
assert "torch" not in sys.modules
"""
    done = in_a_process("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["inspect", "run.json", "--config", "good.yaml"],
        ["inspect", "run.json", "--set", "device=cpu"],
        ["inspect", "good.yaml", "run.json"],
        ["inspect", "other.yaml", "--config", "good.yaml"],
        ["capture"],
        ["capture", "other.yaml", "--config", "good.yaml"],
        ["bench", "other.yaml", "--config", "good.yaml"],
        ["doctor", "other.yaml", "--config", "good.yaml"],
        ["plan", "other.yaml", "--config", "good.yaml"],
        ["plan", "good.yaml", "diff", "old.json", "new.json"],
        ["capture", "--config", "good.yaml", "--nonsense"],
        ["capture", "--config", "good.yaml", "--force"],
        ["bench", "--config", "good.yaml", "--seed", "1"],
        ["inspect", "--vllm", "{}", "--config", "good.yaml"],
        ["inspect", "--config", "good.yaml", "--max-num-seqs", "4"],
        ["inspect", "run.json", "--costs", "estimate"],
        ["plan"],
        ["plan", "--config", "good.yaml", "--emit", "vllm", "--json"],
        ["plan", "--config", "good.yaml", "diff", "old.json", "new.json"],
        ["plan", "--json", "diff", "old.json", "new.json"],
        ["plan", "--config", "good.yaml", "--traffic", "a.csv", "--speedup", "0"],
    ],
    ids=" ".join,
)
def test_wrong_options_end_with_2(home: Path, arguments: list[str]) -> None:
    result = cgplan_command(*arguments)
    assert result.exit_code == 2
    assert "Error" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_command_without_a_file_does_not_speak_of_a_value_that_was_given(home: Path) -> None:
    assert "there is no configuration, or two" in unwrapped(cgplan_command("capture").stderr)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        (("plan", "--config", "{}"), errors.ConfigFileError),
        (("plan", "--config", "good.yaml", "--traffic", "{}"), errors.TrafficError),
        (
            ("plan", "--config", "good.yaml", "--traffic", "traffic.csv", "--step-times", "{}"),
            errors.StepTimeError,
        ),
        (
            ("plan", "--config", "good.yaml", "--traffic", "traffic.csv", "--costs", "{}"),
            errors.ReportError,
        ),
        (("plan", "diff", "plan.json", "{}"), errors.ReportError),
        (("capture", "--config", "good.yaml", "--plan", "{}"), errors.ReportError),
        (("inspect", "{}"), errors.ReportError),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_files_that_cannot_be_read_are_named(
    home: Path, option: tuple[str, ...], error: type[errors.CgplanError]
) -> None:
    use_traffic(home)
    good("plan", "--config", "good.yaml", "--output", "plan.json")
    (home / "binary.dat").write_bytes(b"good\n\xff\xfe\x00")
    (home / "folder").mkdir()
    for name in ("binary.dat", "folder", "missing.dat", "/dev/zero"):
        assert name in refused(error, *(part.format(name) for part in option))


def test_examples_are_listed_and_copied_with_their_models(home: Path) -> None:
    names = [line.split()[0] for line in good("examples", "list").stdout.splitlines()]
    assert names == sorted(path.stem for path in (REPO / "configs").glob("*.yaml"))
    wanted = {"lora": "adapters.py", "speculative": "spec_decode.py"}
    for name in names:
        good("examples", "copy", name, name)
        target = load_config(f"{name}/{name}.yaml").model.target  # type: ignore[union-attr]
        file = target.partition(":")[0]
        files = [
            file,
            *(["speculative.py"] if name == "speculative" else []),
            wanted.get(name, file),
            "attention.py" if file == "decoder.py" else file,
        ]
        if file.endswith(".py"):
            assert all((home / name / needed).is_file() for needed in files)
    assert "there is a vision/vision.yaml already" in refused(
        errors.OutputPathError, "examples", "copy", "vision", "vision"
    )
    assert "Did you mean 'vision'?" in refused(errors.ConfigFileError, "examples", "copy", "vison")
    assert "cannot write good.yaml" in refused(
        errors.OutputPathError, "examples", "copy", "lora", "good.yaml"
    )


def test_traceback_is_shown_on_demand(home: Path) -> None:
    result = cgplan_command(*use_model("raising"), "--traceback")
    assert result.exit_code == errors.ModelError.exit_code
    trace, _, message = result.stderr.rpartition("error: ")
    assert 'raise KeyError("weights are missing")' in trace
    assert trace.index("KeyError") < trace.index("cgplan.errors.ModelError")
    assert "remedy: " in message


def test_interrupt(home: Path) -> None:
    result = cgplan_command(*use_model("interrupted"))
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "interrupted"


def test_a_forward_does_not_end_the_command(home: Path) -> None:
    message = refused(errors.ModelError, *use_model("exiting"))
    assert "the model's code ends the program" in message
    assert "models.py:" in message
    assert "SystemExit(42)" in message


@pytest.mark.parametrize(("columns", "width"), [("50", 50), ("", 80)])
def test_errors_fit_the_terminal(
    home: Path, monkeypatch: pytest.MonkeyPatch, columns: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    result = cgplan_command(*use_model("not_a_model"))
    lines = result.stderr.partition("  more: ")[0].splitlines()  # a path stays whole
    assert width - 20 < max(map(len, lines)) <= width
    assert "a function that takes the inputs and returns tensors." in unwrapped(result.stderr)


def test_internal_error_is_one_line_and_advice(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a defect\nof two lines")

    monkeypatch.setattr("cgplan.planning.build_plan", broken)
    result = cgplan_command("capture", "--config", "good.yaml")
    assert result.exit_code == 1
    assert unwrapped(result.stderr).splitlines()[-2] == "internal error: RuntimeError: a defect"
    assert "--traceback" in unwrapped(result.stderr).splitlines()[-1]
    assert "Traceback" not in result.stderr


def use_model(target: str) -> tuple[str, ...]:
    return ("capture", "--config", "good.yaml", "--set", f"model.target=models.py:{target}")


CAPTURE = ("capture", "--config", "good.yaml")
PLAN = ("plan", "--config", "good.yaml")
X = "{shape: [num_tokens, 8], dtype: float32, pad: 0}"


def set_to(**values: str) -> tuple[str, ...]:
    """``--set`` for each value, of keys with two underscores for the dot."""
    return settings(*(f"{key.replace('__', '.')}={value}" for key, value in values.items()))


def target(name: str) -> tuple[str, ...]:
    return (*CAPTURE, *set_to(model__target=name))


@pytest.mark.parametrize(
    ("error", "arguments", "words"),
    [
        ("ConfigFileError", ("capture", "--config", "god.yaml"), ["no such file: god.yaml", "mean 'good.yaml'?"]),
        ("ConfigError", (*PLAN, *set_to(compilation__on_mis="error")), ["--set", "did you mean 'on_miss'"]),
        ("ConfigError", (*PLAN, *set_to(report="{")), ["--set report: the value is not YAML"]),
        ("ConfigError", (*CAPTURE, "--device", "gpu"), ["error: --device: found 'gpu', expected auto"]),
        ("ConfigError", (*PLAN, "--max-graphs", "0", *set_to(budget__max_graphs="3")), ["--max-graphs: found 0, exp"]),
        ("ConfigError", (*PLAN, "--memory", "0B"), ["--memory: found 0, which pays for no graph; leave it out"]),
        ("ConfigError", (*PLAN, "--speedup", "2"), ["no traffic was given"]),
        ("ConfigError", (*PLAN, "--step-times", "times.csv"), ["error: --step-times: no traffic was given"]),
        ("ConfigError", (*CAPTURE, *set_to(model="null")), ["good.yaml: there is no `model`"]),
        ("ConfigError", ("bench", *CAPTURE[1:], *set_to(inputs="{}")), ["no input has a dimension that counts"]),
        ("ConfigError", ("bench", *CAPTURE[1:], "--against", "eager,baer"), ["baseline 'baer'", "eager, bare"]),
        ("ConfigError", ("init", "models.py:build", "--kwargs", "[1, 2]"), ["--kwargs '[1, 2]' is not a mapping"]),
        ("ConfigError", ("init", "models.py:build", "--kwargs", "{a: "), ["--kwargs '{a: ' is not YAML"]),
        ("ConfigError", ("inspect", "--vllm", '{"cudagraph_capture_size": [1]}'), ["mean 'cudagraph_capture_sizes'?"]),
        ("PlanError", (*PLAN, *set_to(compilation__cudagraph_capture_sizes="[8, 16]",
                                      scheduler__max_num_batched_tokens="3")), ["no capture size is left", "8, 16"]),
        ("ModeError", (*CAPTURE, *set_to(compilation__attention_support="NEVER")), ["FULL", "PIECEWISE or NONE"]),
        ("ModelError", target("no_such_package.models:build"), ["no_such_package"]),
        ("ModelError", target("nowhere.py:build"), ["no file nowhere.py", "Paths start from the configuration"]),
        ("ModelError", ("init", "modles.py:build"), ["no file modles.py", "mean 'models.py'?"]),
        ("ConfigError", (*CAPTURE, *set_to(inputs__y__dtype="float32")), ["--set 'inputs.y.shape' is missing"]),
        ("ModelError", target("models.py:biuld"), ["no `biuld`", "Did you mean 'build'?"]),
        ("ModelError", target("models.py:not_callable"), ["int, which is not callable"]),
        ("ModelError", target("models.py:not_a_model"), ["returned int, which is not callable"]),
        ("ModelError", target("models.py:raising"), ["KeyError", "weights are missing", "models.py:"]),
        ("ModelError", (*CAPTURE, *set_to(inputs=f"{{x: {X.replace('8', '9')}}}")),
         ["the model failed on a batch", "size=4", "models.py:"]),
        ("ModelError", (*CAPTURE, *set_to(inputs=f"{{z: {X}}}")), ["the model failed on a batch", "'z'"]),
        ("OutputShapeError", target("models.py:scalar"), ["output 0 of the model has shape []"]),
        ("HostSyncError", target("models.py:syncing"), ["item", "return x * x.sum().item()"]),
        ("CaptureMemoryError", target("models.py:hungry"),
         ["size=2", "tried to allocate 5 GiB", "Lower compilation.max_cudagraph_capture_size"]),
        ("OutputPathError", (*PLAN, "--html", "none/plan.html"), ["cannot write none/plan.html: No such file"]),
        ("OutputPathError", (*PLAN, "--html", "it", "--output", "./it"), ["it is to hold two results"]),
        ("ReportError", (*PLAN, "--costs", ""), ["cannot read ."]),
        ("ConfigFileError", ("capture", "models.py:build"), ["models.py:build is a model", "`cgplan init"]),
        ("ConfigFileError", ("capture", "god.yaml"), ["no such file: god.yaml", "mean 'good.yaml'?"]),
        ("ModelError", ("init", "no/model"), ["no/model is neither a target nor a Hugging Face model on this machine"]),
        ("ModelError", ("init", "."), ["name a folder with a config.json"]),
        ("ReportError", ("plan", "diff", "good.yaml", "good.yaml"), ["--config takes configurations, which `cgplan init"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)  # fmt: skip
def test_mistakes_end_with_a_message_and_a_remedy(
    home: Path, error: str, arguments: tuple[str, ...], words: list[str]
) -> None:
    before = {path: path.read_text() for path in home.iterdir() if path.is_file()}
    message = refused(getattr(errors, error), *arguments)
    for word in words:
        assert word in message
    assert {path: path.read_text() for path in home.iterdir() if path.is_file()} == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(home: Path) -> None:
    message = refused(errors.BackendError, *CAPTURE, "--device", "cuda")
    assert "torch sees no GPU" in message
    assert "device: cpu" in message


@pytest.mark.parametrize("command", ["capture", "bench", "doctor", "inspect", "plan"])
def test_a_configuration_may_stand_without_its_option(home: Path, command: str) -> None:
    def shown(*arguments: str) -> Any:
        report = json.loads(good(command, *arguments, "--json").stdout)
        plan = report.get("capture", report).get("plan", report)
        return plan["keys"], plan["config_hash"]

    wanted = shown("--config", "good.yaml")
    assert shown("good.yaml") == wanted
    assert shown("good.yaml", "--config", "good.yaml") == wanted
    assert shown("good.yaml", "--set", "compilation.cudagraph_capture_sizes=[2]") != wanted


def test_outputs_that_cannot_be_written(home: Path) -> None:
    (home / "one").symlink_to(home / "two")
    (home / "two").symlink_to(home / "one")
    os.mkfifo(home / "pipe")  # nobody reads it
    for name in ("one", "pipe"):
        assert "cannot write" in refused(
            errors.OutputPathError, "capture", "good.yaml", "--output", name
        )


@pytest.mark.parametrize("words", [["inspect", "--config", "good.yaml"], ["--help"], ["--version"]])
def test_a_full_disk_behind_standard_output(home: Path, words: list[str]) -> None:
    command = [sys.executable, "-m", "cgplan", *words]
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=home, check=False
        )
    assert found.returncode == errors.OutputPathError.exit_code
    assert "error: cannot write the output: No space left on device" in found.stderr


def test_control_characters_of_a_file_do_not_reach_the_terminal(home: Path) -> None:
    text = (home / "good.yaml").read_text()
    (home / "red.yaml").write_text(re.sub("target: .*", r'target: "\\e[31mred:x"', text))
    said = refused(errors.ModelError, "capture", "red.yaml")
    assert "\x1b" not in said
    assert "\\x1b[31mred" in said


@pytest.mark.parametrize(
    ("command", "example"),
    [
        ("plan check plan.json", "Write cgplan plan check plan.json --traffic tomorrow.csv"),
        ("plan diff plan.json", "Write cgplan plan diff plan-old.json plan.json"),
        ("examples copy", "Write cgplan examples copy vision demo"),
    ],
)
def test_what_is_missing_comes_with_a_command_to_write(command: str, example: str) -> None:
    result = cgplan_command(*command.split())
    assert result.exit_code == 2
    assert example in unwrapped(result.stderr)


def test_parsers_of_options_have_the_name_that_click_8_1_reads() -> None:
    parsers = [
        each.metadata["typer"].parser
        for group in vars(options).values()
        if dataclasses.is_dataclass(group)
        for each in dataclasses.fields(group)
        if each.metadata
    ]
    parsers = [parser for parser in parsers if parser]
    assert len(parsers) > 10
    assert [parser for parser in parsers if not hasattr(parser, "__name__")] == []
