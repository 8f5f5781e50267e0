"""The command line: what each command prints, and how each mistake ends."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner, Result

import cgplan
from cgplan import errors
from cgplan.cli.inspect import origin_rows
from cgplan.cli.main import app
from cgplan.config import load_config, read_config
from cgplan.modes import CUDAGraphMode
from cgplan.planning import Plan, build_plan
from cgplan.planning.plan import Machine
from cgplan.reports import BenchReport, CaptureReport, load_report, render_text
from cgplan.units import format_bytes

REPO = Path(__file__).parents[2]

MODELS = """
import pathlib
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 4)

    def forward(self, x, scale=None):
        y = self.down(torch.relu(self.up(x)))
        return y if scale is None else y * float(scale)

class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.stem = nn.Conv2d(3, 2, 7, stride=7, dtype=torch.bfloat16)

    def forward(self, pixels):
        return self.stem(self.drop(pixels)).flatten(1)

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 8, padding_idx=7)
        self.drop = nn.Dropout(0.5)

    def forward(self, words, offsets):
        return self.drop(self.table(words)) + offsets[:, None]

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x, token_ids, n: int):
        return self.up(x) if x.sum() > 0 else x

def build(width=16):
    return Net(width)

def marking(path):
    pathlib.Path(path).write_text("built")
    return Net()

def chatty():
    print("the builder speaks")
    net = Net()
    def forward(x):
        print("the model speaks")
        return net(x)
    return forward

def raising():
    raise KeyError("weights are missing")

def interrupted():
    raise KeyboardInterrupt

def not_a_model():
    return 3

def scalar():
    return lambda x: x.sum()

def syncing():
    def forward(x):
        return x * x.sum().item()
    return forward

def hungry():
    def forward(x):
        if x.shape[0] == 2:
            raise torch.OutOfMemoryError("tried to allocate 5 GiB")
        return x * 2
    return forward

not_callable = 7
"""

CONFIG: dict[str, Any] = {
    "model": {"target": "models.py:build"},
    "device": "cpu",
    "inputs": {"x": {"shape": ["num_tokens", 8], "dtype": "float32", "pad": 0}},
    "compilation": {"cudagraph_capture_sizes": [1, 2, 4]},
    "report": {"repeats": 3, "warmups": 1, "sizes": [1, 3, 9]},
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file of models and a good configuration."""
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "good.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


def cgplan_command(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def good(*arguments: str) -> Result:
    result = cgplan_command(*arguments)
    assert result.exit_code == 0, result.output
    return result


def refused(error: type[errors.CgplanError], *arguments: str) -> str:
    """What standard error says of a command that ends with ``error``: a message with a remedy, and no traceback."""
    result = cgplan_command(*arguments)
    assert result.exit_code == error.exit_code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    message = result.stderr[result.stderr.index("error: ") :]
    assert "remedy: " in message
    return message


def use_model(target: str) -> tuple[str, ...]:
    return ("capture", "--config", "good.yaml", "--set", f"model.target=models.py:{target}")


# What works


def test_version() -> None:
    assert good("--version").stdout == f"cgplan {cgplan.__version__}\n"


def test_no_arguments_show_the_help() -> None:
    shown = good().stdout
    assert shown == good("--help").stdout
    for command in ("capture", "bench", "inspect", "schema", "init", "plan"):
        assert re.search(rf"^  {command}  .*\.$", shown, re.MULTILINE), f"{command} has no whole sentence in the help"


@pytest.mark.parametrize("command", ["capture", "bench", "inspect", "schema", "init", "plan", "plan diff"])
def test_help_of_each_command_has_an_example(command: str) -> None:
    assert f"Example:\n    cgplan {command} " in good(*command.split(), "--help").stdout


def test_capture_shows_and_saves_the_report(home: Path) -> None:
    result = good("capture", "--config", "good.yaml", "--output", "run.json")
    report = load_report("run.json")
    assert isinstance(report, CaptureReport)
    assert [key.num_tokens for _, key in report.plan.keys] == [4, 2, 1]
    assert [r.nodes for r in report.records] == [3, 3, 3]
    assert result.stdout == render_text(report) + "\n"
    assert "saved run.json" in result.stderr
    assert sorted(p.name for p in home.iterdir() if p.name != "__pycache__") == ["good.yaml", "models.py", "run.json"]


@pytest.mark.parametrize(("command", "kind"), [("capture", CaptureReport), ("bench", BenchReport)])
def test_json_is_the_saved_report_and_nothing_else(
    home: Path, command: str, kind: type[CaptureReport | BenchReport]
) -> None:
    result = good(
        command, "--config", "good.yaml", "--set", "model.target=models.py:chatty", "--json", "-o", "run.json"
    )
    assert kind.model_validate_json(result.stdout) == load_report("run.json")
    assert "the builder speaks" in result.stderr
    assert "the model speaks" in result.stderr


def test_bench_measures_the_sizes_asked_for(home: Path) -> None:
    result = good("bench", "--config", "good.yaml", "--output", "bench.json")
    report = load_report("bench.json")
    assert isinstance(report, BenchReport)
    assert [(r.num_tokens, r.mode.name, r.padded_rows) for r in report.records] == [
        (1, "FULL", 0),
        (3, "FULL", 1),
        (9, "NONE", 0),
    ]
    assert all(r.eager.median > 0 for r in report.records)
    assert result.stdout == render_text(report) + "\n"


def test_bench_against_peers(home: Path) -> None:
    options = ("--against", "eager,bare, reduce-overhead", "--seed", "3")
    result = good("bench", "--config", "good.yaml", *options, "--output", "bench.json")
    report = load_report("bench.json")
    assert isinstance(report, BenchReport)
    assert report.peers is not None
    assert report.peers.seed == 3
    assert [(way.name, way.failure is None) for way in report.peers.ways] == [
        ("cgplan", True),
        ("eager", True),
        ("bare", True),
        ("reduce-overhead", False),
    ]
    assert {r.num_tokens for r in report.peers.records} == {1, 3, 9}
    assert "order    random, seed 3; 3 rounds, 3 calls of each way and size" in result.stdout
    assert result.stdout == render_text(report) + "\n"
    assert good("inspect", "bench.json").stdout == result.stdout


def test_inspect_shows_a_saved_report_again(home: Path) -> None:
    captured = good("capture", "--config", "good.yaml", "--output", "run.json")
    assert good("inspect", "run.json").stdout == captured.stdout
    assert json.loads(good("inspect", "run.json", "--json").stdout) == json.loads((home / "run.json").read_text())


def test_inspect_prints_a_plan_that_it_reads_again(home: Path) -> None:
    printed = good("inspect", "--config", "good.yaml", "--json").stdout
    assert Plan.from_json(printed) == build_plan(load_config("good.yaml"))
    (home / "plan.json").write_text(printed)
    assert good("inspect", "plan.json").stdout in good("inspect", "--config", "good.yaml").stdout


def test_inspect_names_the_origin_of_each_value(home: Path) -> None:
    (home / "c.yaml").write_text(
        "device: cpu\n"
        "compilation:\n"
        "  cudagraph_mode: FULL\n"
        "  attention_support: UNIFORM_BATCH\n"
        "  cudagraph_capture_sizes:\n"
        "    - 16\n"
        "    - 9999\n"
        "lora: {max_loras: 2}\n"
    )
    loaded = read_config("c.yaml", ["scheduler.max_num_seqs=8", "lora={max_loras: 3}"])
    rows = {row.key: (row.value, row.origin) for row in origin_rows(loaded, build_plan(loaded.config))}
    assert rows["device"] == ("cpu", "c.yaml:1")
    assert rows["compilation.attention_support"] == ("UNIFORM_BATCH", "c.yaml:4")
    assert rows["compilation.cudagraph_mode"] == (
        "FULL -> FULL_AND_PIECEWISE (from attention_support is UNIFORM_BATCH)",
        "c.yaml:3",
    )
    assert rows["compilation.cudagraph_capture_sizes"] == (
        "[16, 9999] -> 16 (1) (from max_num_batched_tokens)",
        "c.yaml:5",
    )
    assert rows["compilation.max_cudagraph_capture_size"] == ("16 (from cudagraph_capture_sizes)", "resolved")
    assert rows["compilation.outputs"] == ("borrow", "default")
    assert rows["scheduler.max_num_seqs"] == ("8", "--set")
    assert rows["lora.max_loras"] == ("3", "--set")
    assert rows["lora.rank"] == ("16", "default")
    assert rows["report.sizes"] == ("16 (1) (from cudagraph_capture_sizes)", "resolved")
    shown = good("inspect", "--config", "c.yaml").stdout
    assert re.search(r"^compilation\.attention_support +UNIFORM_BATCH +line 4$", shown, re.MULTILINE)
    assert "9999 above scheduler.max_num_batched_tokens" in shown


def test_inspect_names_the_line_of_a_merged_value(home: Path) -> None:
    text = "scheduler: &base\n  max_num_seqs: 8\nspeculative: {}\nreport: {}\n"
    shared = "inputs:\n  x: &x\n    shape: [num_tokens]\n    dtype: float32\n    pad: 0\n  y:\n    <<: *x\n    pad: 1\n"
    (home / "c.yaml").write_text(text + shared)
    loaded = read_config("c.yaml")
    rows = {row.key: row.origin for row in origin_rows(loaded, build_plan(loaded.config))}
    assert (rows["inputs.y.pad"], rows["inputs.y.dtype"]) == ("c.yaml:12", "c.yaml:8")
    assert rows["speculative.num_speculative_tokens"] == rows["report.repeats"] == "default"


def test_inspect_shows_values_as_yaml_has_them(home: Path) -> None:
    shown = good("inspect", "--config", "good.yaml").stdout
    assert re.search(r"^inputs\.x\.shape +\[num_tokens, 8\] +line ", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("sections", "sizes", "maximum"),
    [
        ({}, "ladder vllm up to 512", "max_num_seqs, max_num_batched_tokens"),
        ({"speculative": {"num_speculative_tokens": 1}}, "ladder vllm", "num_speculative_tokens"),
        ({"compilation": {"max_cudagraph_capture_size": 30}}, "ladder vllm up to 30", "the ladder's steps"),
        ({"compilation": {"cudagraph_mode": "NONE"}}, "cudagraph_mode", "cudagraph_mode"),
        ({"compilation": {"cudagraph_capture_sizes": "sglang"}}, "ladder sglang", "max_num_seqs"),
        (
            {
                "compilation": {"cudagraph_capture_sizes": [2, 5], "cudagraph_mode": "FULL_DECODE_ONLY"},
                "speculative": {"num_speculative_tokens": 1},
            },
            "num_speculative_tokens",
            "cudagraph_capture_sizes",
        ),
    ],
)
def test_inspect_says_what_sizes_were_resolved_from(
    home: Path, sections: dict[str, Any], sizes: str, maximum: str
) -> None:
    (home / "c.yaml").write_text(yaml.safe_dump(sections))
    loaded = read_config("c.yaml")
    values = {row.key: row.value for row in origin_rows(loaded, build_plan(loaded.config))}
    assert sizes in values["compilation.cudagraph_capture_sizes"].rpartition("(from ")[2]
    assert maximum in values["compilation.max_cudagraph_capture_size"].rpartition("(from ")[2]


def test_mode_none_captures_nothing_and_says_so(home: Path) -> None:
    result = good("capture", "--config", "good.yaml", "--set", "compilation.cudagraph_mode=NONE", "--json")
    report = CaptureReport.model_validate_json(result.stdout)
    assert (report.records, report.pool_bytes) == ((), 0)
    assert "Graphs: none" in render_text(report)


def test_lazy_captures_nothing_and_says_so(home: Path) -> None:
    lazy = ("--config", "good.yaml", "--set", "compilation.capture_policy=lazy")
    report = CaptureReport.model_validate_json(good("capture", *lazy, "--json").stdout)
    assert (report.records, report.pool_bytes, report.capture_policy, report.waiting) == ((), 0, "lazy", 3)
    assert "lazy: when a batch first asks for a key; 3 are waiting" in render_text(report)
    assert "none captured of those from " in render_text(report)
    found = good("bench", *lazy, "--output", "bench.json")
    measured = load_report("bench.json")
    assert isinstance(measured, BenchReport)
    assert [(r.num_tokens, r.mode.name, r.padded_rows) for r in measured.records] == [
        (1, "FULL", 0),
        (3, "FULL", 1),
        (9, "NONE", 0),
    ]
    assert [r.descriptor.num_tokens for r in measured.capture.records] == [4, 1]
    assert "bench" in found.stderr.lower()


def test_a_saved_plan_is_captured_under_any_policy(home: Path) -> None:
    good("plan", "--config", "good.yaml", "--output", "plan.json")
    for policy, captured in (("lazy", 0), ("adaptive", 3), ("eager", 3)):
        changed = ("--set", f"compilation.capture_policy={policy}", "--plan", "plan.json", "--json")
        result = good("capture", "--config", "good.yaml", *changed)
        report = CaptureReport.model_validate_json(result.stdout)
        assert (len(report.records), report.capture_policy) == (captured, policy)


def test_inspect_shows_policy_and_pool(home: Path) -> None:
    given = ("--set", "compilation.capture_policy=adaptive", "--set", "compilation.pool=per_graph")
    shown = good("inspect", "--config", "good.yaml", *given).stdout
    assert re.search(r"^compilation\.capture_policy +adaptive +--set$", shown, re.MULTILINE)
    assert re.search(r"^compilation\.pool +per_graph +--set$", shown, re.MULTILINE)
    message = refused(errors.ConfigError, "inspect", "--config", "good.yaml", "--set", "compilation.pool=per_model")
    assert "per_mode" in message


def test_warnings_and_mode_changes_come_before_the_capture(home: Path) -> None:
    narrow = ("--set", "scheduler.max_num_batched_tokens=2", "--set", "compilation.cudagraph_mode=FULL_DECODE_ONLY")
    changed = ("--set", "compilation.attention_support=NEVER", "--set", "compilation.splitting_ops=[]")
    error = good("capture", "--config", "good.yaml", *narrow, "--json").stderr
    assert re.match(r"warning: .*4.* above scheduler\.max_num_batched_tokens", error)
    result = good("capture", "--config", "good.yaml", *narrow, *changed, "--json")
    assert "note: cudagraph_mode FULL_DECODE_ONLY -> NONE: attention_support is NEVER" in result.stderr


def test_progress_without_a_terminal_is_a_few_lines(home: Path) -> None:
    sizes = f"compilation.cudagraph_capture_sizes={list(range(1, 41))}"
    result = good("capture", "--config", "good.yaml", "--set", sizes)
    lines = [line for line in result.stderr.splitlines() if line.startswith("capture ")]
    assert len(lines) <= 11
    assert lines[0] == "capture 1/40: FULL num_tokens=40 num_reqs=40"
    assert lines[-1] == "capture 40/40: FULL num_tokens=1 num_reqs=1"


def test_device_option_wins_over_the_file(home: Path) -> None:
    result = good("capture", "--config", "good.yaml", "--set", "device=cuda:99", "--device", "cpu")
    assert "cpu (tape)" in result.stdout


def test_python_dash_m(home: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-m", "cgplan", "capture", "--config", "missing.yaml"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == errors.ConfigFileError.exit_code
    assert done.stderr.startswith("error: no such file: missing.yaml\n  remedy: ")
    assert done.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["capture", "--help"],
        ["schema"],
        ["inspect", "--config", "good.yaml"],
        ["inspect", "plan.json"],
        ["plan", "--config", "good.yaml", "--plot", "plan.svg", "--emit", "vllm"],
        ["plan", "diff", "plan.json", "plan.json"],
        ["inspect", "--vllm", "{}", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"],
    ],
    ids=" ".join,
)
def test_torch_is_not_imported(home: Path, arguments: list[str]) -> None:
    (home / "plan.json").write_text(build_plan(load_config("good.yaml")).model_dump_json())
    code = (
        "import sys\nfrom cgplan.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules, file=sys.stderr)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout
    assert done.stderr.split()[-2:] == ["0", "False"]


# plan


def test_plan_shows_and_saves_the_plan(home: Path) -> None:
    result = good("plan", "--config", "good.yaml", "--output", "plan.json")
    plan = load_report("plan.json")
    assert isinstance(plan, Plan)
    assert plan.model_copy(update={"notes": (), "lint": ()}) == build_plan(load_config("good.yaml"))
    assert result.stdout == render_text(plan) + "\n"
    assert "saved plan.json" in result.stderr
    assert good("plan", "--config", "good.yaml", "--json").stdout == (home / "plan.json").read_text()


def test_plan_emits_for_an_engine_and_nothing_else(home: Path) -> None:
    narrow = ("--set", "scheduler.max_num_batched_tokens=2", "--set", "compilation.attention_support=UNIFORM_BATCH")
    result = good("plan", "--config", "good.yaml", *narrow, "--emit", "vllm", "--output", "plan.json")
    assert result.stdout == (
        '--compilation-config \'{"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2], '
        '"max_cudagraph_capture_size": 2}\'\n'
    )
    for line in (
        "saved plan.json",
        "note: cudagraph_mode FULL -> FULL_AND_PIECEWISE: attention_support is UNIFORM_BATCH",
        "warning: capture sizes 4 above scheduler.max_num_batched_tokens = 2 were dropped",
        "note: made for --max-num-seqs 256 --max-num-batched-tokens 2",
    ):
        assert line in result.stderr
    assert isinstance(load_report("plan.json"), Plan)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "json"])
def test_plan_knows_each_engine(home: Path, engine: str) -> None:
    assert "1, 2, 4" in good("plan", "--config", "good.yaml", "--emit", engine).stdout.replace("1 2 4", "1, 2, 4")


def test_what_is_emitted_for_vllm_is_read_back_to_the_same_keys(home: Path) -> None:
    settings = ("--set", "compilation.cudagraph_mode=FULL_AND_PIECEWISE", "--set", "scheduler.max_num_seqs=3")
    emitted = good("plan", "--config", "good.yaml", *settings, "--emit", "vllm").stdout
    value = shlex.split(emitted)[1]
    again = good("inspect", "--vllm", value, "--max-num-seqs", "3", "--max-num-batched-tokens", "8192", "--json").stdout
    assert Plan.from_json(again).keys == build_plan(load_config("good.yaml", settings[1::2])).keys


def test_plan_draws_the_padding(home: Path) -> None:
    result = good("plan", "--config", "good.yaml", "--plot", "plan.svg")
    assert "saved plan.svg" in result.stderr
    assert "capture size" in (home / "plan.svg").read_text()
    assert "FULL: 4" in (home / "plan.svg").read_text()
    good("plan", "--config", "good.yaml", "--plot", "plan.png")
    assert (home / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--max-graphs", "0", "--set", "budget.max_graphs=3"), "--max-graphs: found 0, expected greater"),
        (("--memory", "0"), "--memory: found 0, which pays for no graph; leave it out"),
        (("--memory", "2 apples"), "--memory: found '2 apples', expected a number of bytes"),
        (("--memory", "{a: 1"), "--memory: the value is not YAML: expected ',' or '}'"),
        (("--capture-time", "soon"), "--capture-time: found 'soon', expected a number of seconds"),
        (("--set", "budget.capture_time=0s"), "--set budget.capture_time: found 0, which pays"),
    ],
)
def test_bad_options_of_the_budget_are_named(home: Path, options: tuple[str, ...], said: str) -> None:
    message = refused(errors.ConfigError, "plan", "--config", "good.yaml", *options)
    assert message.startswith(f"error: {said}")


def test_a_bad_device_option_is_named(home: Path) -> None:
    message = refused(errors.ConfigError, "capture", "--config", "good.yaml", "--device", "gpu")
    assert message.startswith("error: --device: found 'gpu', expected auto")


def test_plan_options_are_overrides_of_the_budget(home: Path) -> None:
    given = ("--max-graphs", "2", "--set", "budget.max_graphs=3", "--memory", "1GiB", "--capture-time", "2min")
    plan = Plan.model_validate_json(good("plan", "--config", "good.yaml", *given, "--json").stdout)
    assert plan.budget == {"max_graphs": 2, "memory": 1 << 30, "capture_time": 120.0}
    noted = good("plan", "--config", "good.yaml", "--memory", "2GiB", "--json").stderr
    assert "warning: budget.memory did not bound this plan: without traffic" in noted


def test_plan_checks_its_files_first(home: Path) -> None:
    asked = ("plan", "--config", "good.yaml", "--set", "compilation.cudagraph_capture_sizes=[9999]")
    assert "a picture ends in .svg or .png" in refused(errors.OutputPathError, *asked, "--plot", "plan.pdf")
    assert "there is no folder" in refused(errors.OutputPathError, *asked, "--plot", "none/plan.svg")
    assert "there is no folder" in refused(errors.OutputPathError, *asked, "--output", "none/plan.json")


HISTOGRAM = "num_tokens,count\n1,500\n2,300\n7,200\n"
REQUESTS = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{second},4,3\n" for second in range(20))
TABLE = "mode,num_tokens,microseconds\neager,1,1000\neager,16,1000\nFULL,1,100\nFULL,8,300\nFULL,16,900\n"


def use_traffic(home: Path) -> tuple[str, ...]:
    (home / "traffic.csv").write_text(HISTOGRAM)
    (home / "times.csv").write_text(TABLE)
    return "plan", "--config", "good.yaml", "--traffic", "traffic.csv", "--step-times", "times.csv"


def test_plan_for_traffic_finds_its_sizes(home: Path) -> None:
    """Sizes that batches have are best: 2 and 7 for two graphs, where 1 costs 129 instead of 100 microseconds."""
    command = use_traffic(home)
    saved = Plan.model_validate_json(good(*command, "--max-graphs", "2", "--json").stdout)
    assert saved.capture_sizes == (2, 7)
    two, seven = 100 + 200 / 7, 100 + 200 * 6 / 7
    assert saved.expected_us == pytest.approx(0.8 * two + 0.2 * seven)
    shown = good(*command, "--max-graphs", "3").stdout
    assert "sizes 3 (1, 2, 7)" in " ".join(shown.split())
    assert "Ladders on the same traffic" in shown
    assert "vllm" in shown


def test_a_saved_plan_for_traffic_shows_what_batches_are_padded_to(home: Path) -> None:
    shown = good(*use_traffic(home), "--max-graphs", "2", "--output", "plan.json").stdout
    table = [" ".join(line.split()) for line in good("inspect", "plan.json").stdout.splitlines()]
    at = table.index("batch of (tokens) is padded to padding rows at most")
    assert table[at + 2 : at + 5] == ["1 to 2 2 1", "3 to 7 7 4", "above 7 no graph -"]
    assert good("inspect", "plan.json").stdout == shown
    assert table.index("Why these graphs") > at


@pytest.mark.parametrize(("columns", "widest"), [("64", 64), ("130", 130), ("0", 100), ("wide", 100)])
def test_reports_obey_columns(home: Path, monkeypatch: pytest.MonkeyPatch, columns: str, widest: int) -> None:
    command = use_traffic(home)
    usual = good(*command).stdout
    monkeypatch.setenv("COLUMNS", columns)
    shown = good(*command).stdout
    widths = [len(line) for line in shown.splitlines()]
    assert max(widths) <= widest
    assert (shown == usual) == (widest == 100)
    axis = next(line for line in shown.splitlines() if "+---" in line)
    assert len(axis) == min(widest, 80), "the chart is drawn for the width"


def test_plan_for_requests_is_made_with_the_step_times_of_the_plan(home: Path) -> None:
    """A request a second of 3 tokens each: one runs at a time."""
    use_traffic(home)
    (home / "trace.csv").write_text(REQUESTS)
    command = ("plan", "--config", "good.yaml", "--traffic", "trace.csv", "--step-times", "times.csv", "--json")
    plan = Plan.model_validate_json(good(*command).stdout)
    assert plan.capture_sizes == (1, 4)
    assert plan.evidence is not None
    assert plan.evidence["traffic_weight"] == 60


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY"])
def test_plan_for_traffic_that_no_graph_could_serve(home: Path, mode: str) -> None:
    use_traffic(home)
    (home / "mixed.csv").write_text("num_tokens,count,num_reqs,uniform\n10,5,2,false\n")
    command = ("plan", "--config", "good.yaml", "--traffic", "mixed.csv", "--step-times", "times.csv")
    options = ("--set", f"compilation.cudagraph_mode={mode}")
    plan = Plan.model_validate_json(good(*command, *options, "--json").stdout)
    assert plan.keys == ()
    assert "No graph: every batch runs eagerly." in good(*command, *options).stdout


def test_plan_says_whose_step_times_it_uses(home: Path) -> None:
    use_traffic(home)
    good("bench", "--config", "good.yaml", "--output", "bench.json")
    command = ("plan", "--config", "good.yaml", "--traffic", "traffic.csv", "--step-times", "bench.json", "--json")
    notes = " ".join(Plan.model_validate_json(good(*command).stdout).evidence["times_notes"])
    assert "not of a GPU" in notes
    assert "another configuration" not in notes
    notes = " ".join(
        Plan.model_validate_json(good(*command, "--set", "scheduler.max_num_seqs=64").stdout).evidence["times_notes"]
    )
    assert "measured with another configuration" in notes


def test_plan_prices_graphs_by_a_report(home: Path) -> None:
    good("capture", "--config", "good.yaml", "--output", "run.json")
    command = use_traffic(home)
    plan = Plan.model_validate_json(good(*command, "--costs", "run.json", "--json").stdout)
    assert plan.predicted is not None
    assert len(plan.predicted.keys) == len(plan.keys)
    assert plan.machine is None, "the tape's figures hold on any machine"
    message = refused(errors.BudgetError, *command, "--costs", "run.json", "--capture-time", "0.001ms")
    assert "budget.capture_time" in message
    (home / "plan.json").write_text(plan.model_dump_json())
    assert "not a capture report" in refused(errors.ReportError, *command, "--costs", "plan.json")
    assert "the words estimate and measure" in refused(errors.ReportError, *command, "--costs", "mesure")


@pytest.mark.parametrize(
    ("measured", "planned", "missing"),
    [
        ("PIECEWISE", "FULL", "FULL"),
        ("FULL", "FULL_AND_PIECEWISE", "PIECEWISE"),
        ("PIECEWISE", "FULL_AND_PIECEWISE", "FULL"),
    ],
)
def test_graphs_of_a_mode_that_a_report_does_not_have_are_not_priced(
    home: Path, measured: str, planned: str, missing: str
) -> None:
    traffic = use_traffic(home)
    mode = "compilation.cudagraph_mode="
    good("capture", "--config", "good.yaml", "--set", mode + measured, "--output", "run.json")
    for command in (traffic, traffic[:3], ("inspect", "--config", "good.yaml")):
        message = refused(errors.ReportError, *command, "--set", mode + planned, "--costs", "run.json")
        assert f"run.json does not say what {missing} graphs cost: those that it has are {measured}" in message
        assert f"a capture in mode {planned}, --costs measure or --costs estimate" in message
    plan = Plan.model_validate_json(good(*traffic, "--set", mode + measured, "--costs", "run.json", "--json").stdout)
    assert plan.predicted is not None
    assert plan.predicted.keys[0].pool_bytes > 0


def test_a_report_of_the_same_mode_is_taken_whatever_its_budget_left(home: Path) -> None:
    """Nobody could give another one; what stands in for the mode that it lacks is said."""
    both = ("--set", "compilation.cudagraph_mode=FULL_AND_PIECEWISE")
    good("capture", "--config", "good.yaml", *both, "--set", "budget.max_graphs=1", "--output", "run.json")
    shown = good("plan", "--config", "good.yaml", *both, "--costs", "run.json", "--json").stdout
    predicted = Plan.model_validate_json(shown).predicted
    assert predicted is not None
    assert predicted.notes[-1].startswith("there are no figures of FULL graphs: they are priced as PIECEWISE ones")
    assert predicted.keys[0].pool_bytes > 0


def test_a_report_without_adapters_prices_those_with_them_as_such(home: Path) -> None:
    good("capture", "--config", "good.yaml", "--output", "run.json")
    for command in (use_traffic(home), ("plan", "--config", "good.yaml"), ("inspect", "--config", "good.yaml")):
        shown = good(*command, "--set", "lora.max_loras=2", "--costs", "run.json").stdout
        assert "no figures of FULL graphs with adapters: they are priced as those without" in " ".join(shown.split())
        assert "no figures" not in good(*command, "--costs", "run.json").stdout


@pytest.mark.parametrize("word", ["estimate", "measure"])
def test_a_mode_without_a_configured_size_is_priced_as_the_other(home: Path, word: str) -> None:
    """Traffic may get FULL graphs of 2 tokens, and the sizes of the configuration leave PIECEWISE alone to measure."""
    changes = (
        "compilation.cudagraph_mode=FULL_AND_PIECEWISE",
        "compilation.cudagraph_capture_sizes=[8, 16]",
        "scheduler.max_num_seqs=4",
    )
    command = (*use_traffic(home), *(part for change in changes for part in ("--set", change)))
    plan = Plan.model_validate_json(good(*command, "--costs", word, "--json", "--max-graphs", "1").stdout)
    assert plan.predicted is not None
    assert "there are no figures of FULL graphs: they are priced as PIECEWISE ones of the same size" in (
        plan.predicted.notes
    )
    assert all(key[0] is CUDAGraphMode.FULL for key in plan.keys)
    assert plan.predicted.keys[0].pool_bytes > 0
    assert plan.predicted.seconds > 0


@contextmanager
def piped(*files: Path) -> Iterator[list[str]]:
    """Paths under which each file can be read once, as a shell's ``<(cat FILE)`` gives them."""
    ends = [os.pipe() for _ in files]
    for (_, writing), file in zip(ends, files, strict=True):
        os.write(writing, file.read_bytes())
        os.close(writing)
    yield [f"/dev/fd/{reading}" for reading, _ in ends]
    for reading, _ in ends:
        os.close(reading)


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="no paths of pipes here")
@pytest.mark.parametrize("traffic", [HISTOGRAM, REQUESTS], ids=["histogram", "requests"])
def test_traffic_step_times_and_costs_may_come_through_pipes(home: Path, traffic: str) -> None:
    command = use_traffic(home)[:3]
    (home / "traffic.csv").write_text(traffic)
    good("bench", "--config", "good.yaml", "--output", "bench.json")
    names = ("traffic.csv", "bench.json", "bench.json")

    def options(paths: Sequence[str]) -> list[str]:
        pairs = zip(("--traffic", "--step-times", "--costs"), paths, strict=True)
        return [part for pair in pairs for part in pair]

    from_files = Plan.model_validate_json(good(*command, *options(names), "--json").stdout)
    with piped(*(home / name for name in names)) as paths:
        from_pipes = Plan.model_validate_json(good(*command, *options(paths), "--json").stdout)
    assert from_pipes.keys == from_files.keys != ()
    assert from_pipes.expected_us == from_files.expected_us
    assert from_pipes.predicted is not None


@pytest.mark.parametrize("word", ["estimate", "measure"])
def test_plan_prices_graphs_by_the_model(home: Path, word: str) -> None:
    plan = Plan.model_validate_json(good(*use_traffic(home), "--costs", word, "--json").stdout)
    assert plan.predicted is not None
    assert plan.predicted.estimated is (word == "estimate")
    ladder = Plan.model_validate_json(good("plan", "--config", "good.yaml", "--costs", word, "--json").stdout)
    assert ladder.predicted is not None
    assert len(ladder.predicted.keys) == 3


def test_plan_without_traffic_has_no_use_for_its_options(home: Path) -> None:
    use_traffic(home)
    for option in (("--speedup", "2"), ("--step-times", "times.csv")):
        assert "there is none" in refused(errors.ConfigError, "plan", "--config", "good.yaml", *option)


def test_plan_says_that_there_is_no_traffic(home: Path) -> None:
    shown = " ".join(good("plan", "--config", "good.yaml").stdout.split())
    assert "note there is no traffic to plan for, so nothing was optimised" in shown
    assert "Give --traffic FILE, or a `traffic` section" in shown
    result = good("plan", "--config", "good.yaml", "--emit", "vllm")
    assert "note: there is no traffic to plan for" in result.stderr
    assert "no traffic to plan for" not in good(*use_traffic(home)).stdout
    bounded = good("plan", "--config", "good.yaml", "--memory", "2GiB", "--set", "budget.reserve=1GiB").stdout
    assert "budget.memory did not bound this plan" in " ".join(bounded.split())


def test_plan_warns_where_costs_are_missing_for_a_budget(home: Path) -> None:
    command = (*use_traffic(home), "--memory", "2GiB", "--capture-time", "5s")
    lines = good(*command).stdout.splitlines()
    verdict = next(index for index, line in enumerate(lines) if line.startswith("  verdict"))
    after = " ".join(" ".join(lines[verdict : verdict + 8]).split())
    assert "warning budget.memory and budget.capture_time did not bound this plan" in after
    assert "--costs estimate" in after
    assert "budget.memory and budget.capture_time not looked at" in " ".join(" ".join(lines).split())
    assert "warning: budget.memory" in good(*command, "--emit", "vllm").stderr
    assert "did not bound" not in good(*command, "--costs", "estimate").stdout


def test_plan_says_that_its_costs_are_another_configurations(home: Path) -> None:
    sizes = "compilation.cudagraph_capture_sizes=[1, 8]"
    good("capture", "--config", "good.yaml", "--set", sizes, "--output", "run.json")
    command = (*use_traffic(home), "--costs", "run.json")
    plan = Plan.model_validate_json(good(*command, "--json").stdout)
    assert plan.predicted is not None
    assert plan.predicted.notes == ("the costs of run.json are those of cpu (tape), not of a GPU",)
    other = ("--set", "model.kwargs={width: 32}", "--set", "scheduler.max_num_seqs=7")
    for arguments in (command, ("plan", "--config", "good.yaml", "--costs", "run.json")):
        plan = Plan.model_validate_json(good(*arguments, *other, "--json").stdout)
        assert plan.predicted is not None
        (note, _) = plan.predicted.notes
        assert note == (
            "the costs of run.json were measured with another configuration, and are taken as they are: "
            "model.kwargs.width was absent, is 32 here; "
            "scheduler.max_num_seqs was 256, is 7 here"
        )
        assert "was 256, is 7 here" in " ".join(good(*arguments, *other).stdout.split())
    assert note in Plan.model_validate_json(good(*command, *other, "--json").stdout).evidence["costs_notes"]


@pytest.mark.parametrize("traffic", [True, False], ids=["traffic", "list"])
def test_everything_is_said_once(home: Path, traffic: bool) -> None:
    """Standard output holds the emission alone, standard error all notes; a report and `--json` have them likewise."""
    mode = ("--set", "compilation.cudagraph_mode=FULL_AND_PIECEWISE")
    good("capture", "--config", "good.yaml", *mode, "--output", "run.json")
    changes = ("--set", "scheduler.max_num_seqs=64", *mode)
    command = use_traffic(home) if traffic else ("plan", "--config", "good.yaml")
    command = (*command, "--costs", "run.json", *changes, "--max-graphs", "2")
    emitted = good(*command, "--emit", "vllm")
    option, value, *rest = shlex.split(emitted.stdout)
    assert (option, rest) == ("--compilation-config", [])
    assert json.loads(value)["cudagraph_mode"] in ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE")
    said = emitted.stderr.splitlines()
    assert len(said) == len(set(said))
    about = [line for line in said if line.startswith("note: the costs of run.json")]
    assert len(about) == 2
    in_json = good(*command, "--json").stderr.splitlines()
    assert [line for line in said if line in in_json] == in_json
    shown = good(*command)
    words = " ".join(shown.stdout.split())
    assert [words.count(line.removeprefix("note: ")) for line in about] == [1, 1]
    assert shown.stderr == ""
    inspected = ("inspect", "--config", "good.yaml", "--costs", "run.json", *changes)
    assert good(*inspected, "--json").stderr.splitlines() == about
    shown = good(*inspected)
    assert [" ".join(shown.stdout.split()).count(line.removeprefix("note: ")) for line in about] == [1, 1]
    assert shown.stderr == ""


@pytest.mark.parametrize(
    ("option", "error"),
    [
        (("plan", "--config", "{}"), errors.ConfigFileError),
        (("plan", "--config", "good.yaml", "--traffic", "{}"), errors.TrafficError),
        (("plan", "--config", "good.yaml", "--traffic", "traffic.csv", "--step-times", "{}"), errors.StepTimeError),
        (("plan", "--config", "good.yaml", "--traffic", "traffic.csv", "--costs", "{}"), errors.ReportError),
        (("plan", "--config", "good.yaml", "--costs", "{}"), errors.ReportError),
        (("plan", "diff", "{}", "plan.json"), errors.ReportError),
        (("plan", "diff", "plan.json", "{}"), errors.ReportError),
        (("capture", "--config", "good.yaml", "--plan", "{}"), errors.ReportError),
        (("inspect", "{}"), errors.ReportError),
        (("inspect", "--config", "good.yaml", "--costs", "{}"), errors.ReportError),
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
    (home / "digits.json").write_text('{"kind": ' + "1" * 5000 + "}")
    for name in ("binary.dat", "folder", "missing.dat", "digits.json"):
        if name != "digits.json" or error is errors.ReportError:
            assert name in refused(error, *(part.format(name) for part in option))


def test_inspect_shows_what_each_lora_case_adds(home: Path) -> None:
    lora = ("--set", "lora.max_loras=2")
    asked = ("inspect", "--config", "good.yaml", *lora)
    shown = good(*asked).stdout
    assert "What each LoRA case adds" in shown
    assert re.search(r"^0 +3 +- +-$", shown, re.MULTILINE)
    assert re.search(r"^any number +3 +- +-$", shown, re.MULTILINE)
    assert "give --costs FILE, --costs estimate or --costs measure" in shown
    good("capture", "--config", "good.yaml", *lora, "--output", "run.json")
    for source in ("estimate", "measure", "run.json"):
        shown = good(*asked, "--costs", source).stdout
        assert re.search(r"^any number +3 +[\d.]+ \w+ +[\d.]+ [mu]?s$", shown, re.MULTILINE)
        assert "what the plan would save without that case alone" in shown
        plan = Plan.model_validate_json(good(*asked, "--costs", source, "--json").stdout)
        assert plan.predicted is not None
        assert len(plan.predicted.keys) == 6
    assert "What each LoRA case adds" not in good("inspect", "--config", "good.yaml", "--costs", "run.json").stdout


def test_inspect_shows_the_plan_first_and_then_the_values_that_were_set(home: Path) -> None:
    asked = ("inspect", "--config", "good.yaml", "--set", "lora.max_loras=2")
    brief, whole = good(*asked).stdout, good(*asked, "--all").stdout
    plan, _, values = brief.partition("\nValues set for good.yaml\n")
    assert plan.startswith("Plan\n")
    assert whole.partition("\nValues of good.yaml\n")[0] == plan
    some = re.findall(r"^([\w.]+) +\S.* (?:line \d+|--set)$", values, re.MULTILINE)
    assert {name.partition(".")[0] for name in some} == {"model", "device", "inputs", "compilation", "lora", "report"}
    assert "compilation.on_miss" not in values
    assert re.search(r"^compilation\.on_miss +eager +default$", whole, re.MULTILINE)
    every = re.findall(r"^[\w.]+  ", whole.partition("\nValues of good.yaml\n")[2], re.MULTILINE)[1:]
    assert f"and {len(every) - len(some)} defaults, listed with --all" in values
    assert "listed with --all" not in whole


@pytest.mark.parametrize("name", sorted(path.name for path in (REPO / "configs").glob("*.yaml")))
def test_inspect_breaks_no_word_in_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("inspect", "--config", str(REPO / "configs" / name), "--all")
    monkeypatch.setenv("COLUMNS", "300")
    words = set(good(*command).stdout.split())
    monkeypatch.setenv("COLUMNS", "80")
    shown = good(*command).stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert {word for word in shown.split() if word.strip("-") and word not in words} == set()


def test_inspect_with_costs_sums_them_up_by_lane(home: Path) -> None:
    asked = ("inspect", "--config", "good.yaml", "--set", "lora.max_loras=2")
    good("capture", *asked[1:], "--output", "run.json")
    shown = good(*asked, "--costs", "run.json").stdout
    plan = Plan.model_validate_json(good(*asked, "--costs", "run.json", "--json").stdout)
    assert plan.predicted is not None
    pool = {0: 0, 3: 0}
    for (_, descriptor), cost in zip(plan.keys, plan.predicted.keys, strict=True):
        pool[descriptor.num_active_loras] += cost.pool_bytes
    for case, name in ((0, "FULL"), (3, "FULL, 3 adapters")):
        row = re.search(rf"^{name} +3  1, 2, 4 +(\d+(?:\.\d)? \w+) +0 B +[\d.]+ [mu]?s$", shown, re.MULTILINE)
        assert row, shown
        assert row[1] == format_bytes(pool[case])
    assert "Cost of each lane" not in good(*asked).stdout


def test_inspect_shows_the_split(home: Path) -> None:
    command = ("inspect", "--config", "good.yaml", "--split")
    assert "no PIECEWISE graph is planned" in good(*command).stdout
    options = ("--set", "compilation.cudagraph_mode=PIECEWISE", "--set", "compilation.splitting_modules=[up]")
    split = good(*command, *options)
    assert "eager up" in " ".join(split.stdout.split())
    assert "--split" not in split.stderr
    assert "seen at capture, and with --split" in good(*command[:-1], *options).stderr
    assert "--split" not in good(*command[:-1], *options[:2]).stderr, "no names"


def test_plan_diff(home: Path) -> None:
    good("plan", "--config", "good.yaml", "--output", "old.json")
    sizes = ("--set", "compilation.cudagraph_capture_sizes=[1, 8]")
    good("plan", "--config", "good.yaml", *sizes, "--output", "new.json")
    shown = good("plan", "diff", "old.json", "new.json").stdout
    assert shown.startswith("old.json -> new.json\n")
    assert re.search(r"^FULL +8 +2, 4 +1$", shown, re.MULTILINE)
    assert re.search(r"^graphs +3 +2 +-1 +-33\.3%$", shown, re.MULTILINE)
    assert "settings the same" in " ".join(shown.split())
    good("plan", "--config", "good.yaml", "--memory", "2GiB", "--max-graphs", "3", "--output", "bounded.json")
    shown = good("plan", "diff", "old.json", "bounded.json").stdout
    assert re.search(r"^  budget.memory +absent -> 2.0 GiB$", shown, re.MULTILINE)
    assert re.search(r"^  budget.max_graphs +absent -> 3$", shown, re.MULTILINE)
    data = json.loads(good("plan", "diff", "old.json", "new.json", "--json").stdout)
    assert data["lanes"][0]["removed"] == [2, 4]


def test_plan_diff_reads_plans_only(home: Path) -> None:
    good("capture", "--config", "good.yaml", "--output", "run.json")
    assert "run.json is a capture report, not a plan" in refused(
        errors.ReportError, "plan", "diff", "run.json", "run.json"
    )
    message = refused(errors.ReportError, "plan", "diff", "none.json", "run.json")
    assert "no such file: none.json" in message
    assert "Did you mean run.json?" in message


# capture --plan


def saved_plan(*settings: str) -> Plan:
    arguments = [word for setting in settings for word in ("--set", setting)]
    good("plan", "--config", "good.yaml", *arguments, "--output", "plan.json")
    plan = load_report("plan.json")
    assert isinstance(plan, Plan)
    return plan


@pytest.mark.parametrize("command", ["capture", "bench"])
def test_a_saved_plan_is_captured_as_it_is(home: Path, command: str) -> None:
    plan = saved_plan("compilation.cudagraph_capture_sizes=[2, 3]")
    result = good(command, "--config", "good.yaml", "--plan", "plan.json", "--json")
    data = json.loads(result.stdout)
    report = CaptureReport.model_validate(data if command == "capture" else data["capture"])
    assert tuple((r.mode, r.descriptor) for r in report.records) == plan.keys
    assert not report.warnings
    said = "plan.json decides compilation.cudagraph_capture_sizes; what the configuration says of it is not used"
    assert f"note: {said}" in result.stderr
    assert said in report.plan.notes, "the report says it, too"


@pytest.mark.parametrize(
    ("limits", "present"),
    [
        ((), "the configuration has none"),
        (("budget.memory=3GiB", "budget.reserve=1kB"), "that of the configuration, 3.0 GiB, bounds this capture"),
    ],
)
def test_a_capture_says_that_its_plan_was_made_for_another_budget(
    home: Path, limits: tuple[str, ...], present: str
) -> None:
    saved_plan("budget.max_graphs=2", "budget.memory=2GiB", "budget.capture_time=20s")
    arguments = [word for limit in limits for word in ("--set", limit)]
    result = good("capture", "--config", "good.yaml", "--plan", "plan.json", *arguments)
    said = f"plan.json was made for a budget of 2.0 GiB, 20.0 s, 2 graphs at most; {present}"
    assert f"note: {said}\n" in result.stderr
    head = " ".join(result.stdout.partition("num_reqs")[0].split())
    assert f"note {said}" in head
    assert "there is no traffic to plan for" not in head
    alike = ("budget.max_graphs=2", "budget.memory=2GiB", "budget.capture_time=20s", "budget.reserve=1kB")
    arguments = [word for limit in alike for word in ("--set", limit)]
    result = good("capture", "--config", "good.yaml", "--plan", "plan.json", *arguments)
    assert "was made for a budget" not in result.output
    saved_plan()
    assert "was made for a budget" not in good("capture", "--config", "good.yaml", "--plan", "plan.json").output


def test_a_plan_of_any_keys_is_captured_and_run(home: Path) -> None:
    """Lanes with sizes of their own, as a planner may choose them."""
    plan = saved_plan("compilation.cudagraph_mode=FULL_AND_PIECEWISE")
    kept = [(mode, d) for mode, d in plan.keys if d.uniform == (d.num_tokens == 2)]
    lanes = plan.model_copy(update={"keys": tuple(kept)})
    assert [(mode.name, d.num_tokens) for mode, d in kept] == [("PIECEWISE", 4), ("PIECEWISE", 1), ("FULL", 2)]
    (home / "plan.json").write_text(lanes.model_dump_json())
    result = good("bench", "--config", "good.yaml", "--plan", "plan.json", "--json")
    report = BenchReport.model_validate_json(result.stdout)
    assert [(r.num_tokens, r.mode.name, r.padded_rows) for r in report.records] == [
        (1, "FULL", 1),
        (1, "PIECEWISE", 0),  # the same size as a mixed batch
        (3, "PIECEWISE", 1),
        (9, "NONE", 0),
    ]


def test_a_plan_for_something_else_is_refused_by_name(home: Path) -> None:
    plan = saved_plan("scheduler.max_num_seqs=8", "model.kwargs={width: 8}")
    machine = {"gpu": "NVIDIA H200", "driver": "580.1", "torch": torch.__version__}
    (home / "plan.json").write_text(plan.model_copy(update={"machine": Machine(**machine)}).model_dump_json())
    message = refused(errors.PlanMismatchError, "capture", "--config", "good.yaml", "--plan", "plan.json")
    assert message.startswith("error: plan.json: the plan was made for something else\n")
    assert "  - scheduler.max_num_seqs: 8 in the plan, 256 now" in message
    assert "  - model.kwargs.width: 8 in the plan, absent now" in message
    assert "  - gpu: NVIDIA H200 in the plan, " in message
    assert "  - driver: 580.1 in the plan, absent now" in message
    assert "torch" not in message
    assert "--force" in message
    forced = good("capture", "--config", "good.yaml", "--plan", "plan.json", "--force", "--json")
    report = CaptureReport.model_validate_json(forced.stdout)
    assert tuple((r.mode, r.descriptor) for r in report.records) == plan.keys
    (warning,) = report.warnings
    assert "was forced" in warning
    assert "scheduler.max_num_seqs: 8 in the plan, 256 now" in warning
    assert f"warning: {warning}" in forced.stderr


def test_a_plan_of_another_schema_is_refused_also_with_force(home: Path) -> None:
    plan = json.loads(saved_plan().model_dump_json())
    (home / "plan.json").write_text(json.dumps({**plan, "schema_version": 1}))
    arguments = ("capture", "--config", "good.yaml", "--plan", "plan.json", "--force")
    assert "schema version 1, this cgplan reads 2" in refused(errors.ReportError, *arguments)


def test_a_damaged_plan_is_refused(home: Path) -> None:
    plan = json.loads(saved_plan().model_dump_json())
    (home / "plan.json").write_text(json.dumps({**plan, "capture_sizes": [1, 2]}))
    message = refused(errors.ReportError, "capture", "--config", "good.yaml", "--plan", "plan.json")
    assert "4 is not among capture_sizes" in message


# inspect --vllm


def test_inspect_shows_what_vllm_would_capture(home: Path) -> None:
    options = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--num-speculative-tokens", "1")
    lora = ("--max-loras", "2", "--specialize-active-lora")
    result = good("inspect", "--vllm", '{"cudagraph_capture_sizes": [2, 8], "backend": "eager"}', *options, *lora)
    rows = {
        line.split()[0]: re.split(r"  +", line)[1:] for line in result.stdout.splitlines() if "." in line.split(" ")[0]
    }
    assert rows["compilation.cudagraph_mode"] == ["FULL_AND_PIECEWISE", "vLLM's default"]
    assert rows["compilation.cudagraph_capture_sizes"] == ["[2, 8]", "--vllm"]
    assert rows["scheduler.max_num_seqs"] == ["4", "--max-num-seqs"]
    assert rows["speculative.num_speculative_tokens"] == ["1", "--num-speculative-tokens"]
    assert rows["lora.max_loras"] == ["2", "--max-loras"]
    assert rows["lora.specialize_active_lora"] == ["true", "--specialize-active-lora"]
    assert "report.sizes" not in rows
    assert "8 PIECEWISE, 8 FULL uniform" in result.stdout
    assert "note: backend does not change what is captured" in result.stderr


def test_inspect_refuses_what_vllm_does_not_have(home: Path) -> None:
    message = refused(errors.ConfigError, "inspect", "--vllm", '{"cudagraph_capture_size": [1]}')
    assert "did you mean 'cudagraph_capture_sizes'?" in message


# init


def started(home: Path, *arguments: str) -> tuple[str, cgplan.Config]:
    text = good("init", *arguments).stdout
    (home / "my.yaml").write_text(text)
    config = load_config("my.yaml")
    assert build_plan(config).capture_sizes == (1, 2, 4, 8, 16, 32)
    return text, config


def test_init_of_an_mlp_captures_as_it_is(home: Path) -> None:
    text, config = started(home, "models.py:Net", "--kwargs", '{"width": 24}')
    assert set(config.inputs) == {"x"}
    assert (config.inputs["x"].shape, config.inputs["x"].dtype) == (("num_tokens", 8), "float32")
    assert config.model is not None
    assert config.model.kwargs == {"width": 24}
    assert re.search(r"shape: \[num_tokens, 8\] +# guess: up is a Linear with in_features 8", text)
    assert re.search(r"^  # scale: +# has a default", text, re.MULTILINE)
    result = good("capture", "--config", "my.yaml", "--device", "cpu", "--json")
    assert len(CaptureReport.model_validate_json(result.stdout).records) == 6


def test_init_arguments_with_defaults_can_be_uncommented(home: Path) -> None:
    text, _ = started(home, "models.py:Net")
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("  # scale:"))
    lines[start : start + 4] = [line.replace("  # ", "  ", 1) for line in lines[start : start + 4]]
    (home / "more.yaml").write_text("\n".join(lines))
    assert set(load_config("more.yaml").inputs) == {"x", "scale"}


def test_init_reads_images_and_indices(home: Path) -> None:
    _, image = started(home, "models.py:Image")
    assert image.inputs["pixels"].shape == ("num_tokens", 3, 224, 224)
    assert image.inputs["pixels"].dtype == "bfloat16"
    text, words = started(home, "models.py:Words")
    assert (words.inputs["words"].dtype, words.inputs["words"].pad) == ("int64", 7)
    assert words.inputs["words"].example == (0, 50)
    assert words.inputs["offsets"].dtype == "float32"
    assert re.search(r"offsets:\n +shape: \[num_tokens\] +# guess: nothing in the code told it", text)


def test_init_does_not_pretend_where_the_forward_branches(home: Path) -> None:
    text, config = started(home, "models.py:Branches")
    assert config.inputs["x"].shape == ("num_tokens",)
    assert "in_features" not in text
    assert config.inputs["token_ids"].dtype == "int64"
    assert "the forward says int, but inputs are tensors" in text


def test_init_prints_only_yaml(home: Path) -> None:
    result = good("init", "models.py:chatty")
    assert set(yaml.safe_load(result.stdout)["inputs"]) == {"x"}
    assert "the builder speaks" in result.stderr


@pytest.mark.parametrize("kwargs", ["[1, 2]", "{a: ", "3", "{when: 2026-13-01}"])
def test_init_kwargs_must_be_a_mapping(home: Path, kwargs: str) -> None:
    assert "--kwargs" in refused(errors.ConfigError, "init", "models.py:build", "--kwargs", kwargs)


def test_init_kwargs_must_fit(home: Path) -> None:
    message = refused(errors.ModelError, "init", "models.py:build", "--kwargs", "{widht: 3}")
    assert "widht" in message


# Bad configurations


def test_missing_file_names_the_nearest(home: Path) -> None:
    message = refused(errors.ConfigFileError, "capture", "--config", "god.yaml")
    assert "no such file: god.yaml" in message
    assert "good.yaml" in message.partition("remedy:")[2]


def test_unreadable_files(home: Path) -> None:
    (home / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    (home / "folder.yaml").mkdir()
    for name, said in (("binary.yaml", "binary.yaml:1: not UTF-8 text"), ("folder.yaml", "cannot read folder.yaml")):
        assert said in refused(errors.ConfigFileError, "inspect", "--config", name)
    message = refused(errors.ConfigFileError, "inspect", "--config", "nothing-like-it.yaml")
    assert "That folder has binary.yaml, good.yaml. Give a readable YAML file" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model:\n  target: [1, 2\n", "bad.yaml:3:1: not valid YAML"),
        ("a: b: c\n", "bad.yaml:1:5: not valid YAML"),
        ("- 1\n", "the file holds a list"),
        ("device: cpu\ndevice: cpu\n", "bad.yaml:2: the key 'device' stands twice (first in line 1)"),
    ],
)
def test_files_that_are_no_configuration(home: Path, text: str, words: str) -> None:
    (home / "bad.yaml").write_text(text)
    assert words in refused(errors.ConfigFileError, "inspect", "--config", "bad.yaml")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("compilation:\n  cudagraph_mod: FULL\n", ["line 2", "unknown key", "did you mean 'cudagraph_mode'"]),
        ("cudagraph_mode: FULL\n", ["line 1", "unknown key", "'compilation'"]),
        ("scheduler:\n  max_num_seqs: many\n", ["line 2", "scheduler.max_num_seqs", "'many'", "integer"]),
        ("compilation:\n  cudagraph_capture_sizes: []\n", ["line 2", "the list of capture sizes is empty"]),
        ("compilation:\n  cudagraph_capture_sizes: [4, 0]\n", ["line 2", "at least 1, found 0"]),
        ("compilation:\n  cudagraph_capture_sizes:\n    - 4\n    - -3\n", ["line 4", "at least 1, found -3"]),
        (
            "compilation:\n  cudagraph_capture_sizes: [1, 8]\n  max_cudagraph_capture_size: 16\n",
            ["max_cudagraph_capture_size is 16", "cudagraph_capture_sizes is 8"],
        ),
        ("compilation:\n  cudagraph_capture_sizes: vlm\n", ["line 2", "unknown ladder 'vlm'", "vllm", "powers_of_two"]),
        ("compilation:\n  cudagraph_mode: FUL\n", ["line 2", "unknown cudagraph_mode 'FUL'", "did you mean FULL?"]),
        ("device: gpu\n", ["line 1", "device", "'gpu'", "cuda"]),
        ("inputs:\n  x: {shape: [num_tokens], dtype: float32}\n", ["line 2", "'inputs.x.pad' is missing"]),
        ("inputs:\n  x: {shape: [num_rows], dtype: float32, pad: 0}\n", ["line 2", "num_rows", "num_tokens"]),
    ],
)
def test_bad_values_are_named_with_their_line(home: Path, text: str, words: list[str]) -> None:
    (home / "bad.yaml").write_text(text)
    message = refused(errors.ConfigError, "inspect", "--config", "bad.yaml")
    assert "bad.yaml" in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("compilation.on_mis=error", ["--set", "unknown key", "did you mean 'on_miss'"]),
        ("compilation.cudagraph_capture_sizes=[1, -2]", ["--set", "at least 1, found -2"]),
        ("scheduler.max_num_seqs", ["'scheduler.max_num_seqs' is not of the form key=value"]),
        ("device.x=1", ["device is not a section"]),
        ("report={", ["--set report", "not YAML"]),
    ],
)
def test_bad_overrides(home: Path, override: str, words: list[str]) -> None:
    message = refused(errors.ConfigError, "inspect", "--config", "good.yaml", "--set", override)
    for word in words:
        assert word in message


def test_no_size_left(home: Path) -> None:
    limit = "scheduler.max_num_batched_tokens=3"
    sizes = "compilation.cudagraph_capture_sizes=[8, 16]"
    message = refused(errors.PlanError, "inspect", "--config", "good.yaml", "--set", limit, "--set", sizes)
    assert "no capture size is left" in message
    assert "8, 16" in message


def test_mode_that_the_attention_does_not_support(home: Path) -> None:
    message = refused(
        errors.ModeError, "capture", "--config", "good.yaml", "--set", "compilation.attention_support=NEVER"
    )
    assert "cudagraph_mode FULL" in message
    assert "Choose PIECEWISE or NONE" in message


@pytest.mark.parametrize("command", ["capture", "bench"])
def test_model_and_inputs_are_needed_to_capture(home: Path, command: str) -> None:
    (home / "plan.yaml").write_text("device: cpu\n")
    message = refused(errors.ConfigError, command, "--config", "plan.yaml")
    assert "plan.yaml: there is no `model`" in message
    (home / "plan.yaml").write_text("device: cpu\nmodel: {target: 'models.py:build'}\n")
    message = refused(errors.ConfigError, command, "--config", "plan.yaml")
    assert "no input has a dimension that counts the rows" in message


def test_an_unknown_peer_is_told_before_the_model_is_built(home: Path) -> None:
    marking = ("--set", "model={target: 'models.py:marking', kwargs: {path: built.txt}}")
    message = refused(errors.ConfigError, "bench", "--config", "good.yaml", *marking, "--against", "eager,baer")
    assert message.startswith("error: unknown peer 'baer' to bench against")
    assert "Did you mean 'bare'?" in message
    assert not (home / "built.txt").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(home: Path) -> None:
    message = refused(errors.BackendError, "capture", "--config", "good.yaml", "--device", "cuda")
    assert "torch sees no GPU" in message
    assert "device: cpu" in message


# Bad models


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("no_such_package.models:build", ["no_such_package"]),
        ("nowhere.py:build", ["no file nowhere.py"]),
        ("models.py:biuld", ["no `biuld`", "Did you mean `build`?"]),
        ("models.py:not_callable", ["int, which is not callable"]),
        ("models.py:not_a_model", ["returned int, which is not callable"]),
        ("models.py", ["malformed"]),
        ("models.py:raising", ["KeyError", "weights are missing", "models.py:"]),
    ],
)
def test_bad_targets(home: Path, target: str, words: list[str]) -> None:
    message = refused(errors.ModelError, "capture", "--config", "good.yaml", "--set", f"model.target={target}")
    for word in words:
        assert word in message


def test_traceback_is_shown_on_demand(home: Path) -> None:
    result = cgplan_command(*use_model("raising"), "--traceback")
    assert result.exit_code == errors.ModelError.exit_code
    trace, _, message = result.stderr.rpartition("error: ")
    assert 'raise KeyError("weights are missing")' in trace
    assert trace.index("KeyError") < trace.index("cgplan.errors.ModelError")
    assert "remedy: " in message


@pytest.mark.parametrize(
    ("shape", "name", "words"),
    [
        ("[num_tokens, 9]", "x", ["the model failed eagerly", "num_tokens=4", "models.py:"]),
        ("[num_tokens, 8]", "z", ["the model failed eagerly", "'z'"]),
    ],
)
def test_inputs_that_the_model_does_not_take(home: Path, shape: str, name: str, words: list[str]) -> None:
    inputs = f"inputs={{{name}: {{shape: {shape}, dtype: float32, pad: 0}}}}"
    message = refused(errors.ModelError, "capture", "--config", "good.yaml", "--set", inputs)
    for word in words:
        assert word in message


def test_output_without_the_batch_dimension(home: Path) -> None:
    message = refused(errors.OutputShapeError, *use_model("scalar"))
    assert "output 0 of the model has shape []" in message


def test_model_that_needs_the_host(home: Path) -> None:
    message = refused(errors.HostSyncError, *use_model("syncing"))
    assert "_local_scalar_dense" in message or "item" in message
    assert "return x * x.sum().item()" in message


def test_out_of_memory_names_the_key(home: Path) -> None:
    (home / "run.json").write_text("the old report")
    message = refused(errors.CaptureMemoryError, *use_model("hungry"), "--output", "run.json")
    assert "num_tokens=2" in message
    assert "tried to allocate 5 GiB" in message
    assert "Lower compilation.max_cudagraph_capture_size" in message
    assert (home / "run.json").read_text() == "the old report"


def test_interrupt(home: Path) -> None:
    result = cgplan_command(*use_model("interrupted"))
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "interrupted"


@pytest.mark.parametrize("show", [False, True])
def test_internal_error_is_one_line_and_advice(home: Path, monkeypatch: pytest.MonkeyPatch, show: bool) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a defect\nof two lines")

    monkeypatch.setattr("cgplan.cli.capture.build_plan", broken)
    result = cgplan_command("capture", "--config", "good.yaml", *(["--traceback"] if show else []))
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-2] == "internal error: RuntimeError: a defect"
    assert "--traceback" in result.stderr.splitlines()[-1]
    assert ("Traceback" in result.stderr) == show


# Output paths


def output_refused(home: Path, output: str) -> str:
    """The message for an output path that cannot be written; the model has not been built when it comes."""
    marker = home / "marker"
    kwargs = f"model.kwargs={{path: {marker}}}"
    command = ("capture", "--config", "good.yaml", "--set", "model.target=models.py:marking", "--set", kwargs)
    message = refused(errors.OutputPathError, *command, "--output", output)
    assert not marker.exists()
    good(*command)
    assert marker.exists()
    return message


def test_output_in_a_missing_folder(home: Path) -> None:
    assert f"there is no folder {Path('nowhere')}" in output_refused(home, "nowhere/run.json")


def test_output_is_a_folder(home: Path) -> None:
    (home / "there").mkdir()
    assert "cannot write there: it is a folder" in output_refused(home, "there")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder that nobody can write to")
def test_output_in_a_folder_that_cannot_be_written(home: Path) -> None:
    assert "cannot write /proc/run.json" in output_refused(home, "/proc/run.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_output_file_that_cannot_be_written(home: Path) -> None:
    (home / "run.json").write_text("old")
    (home / "run.json").chmod(0o444)
    assert "cannot write run.json" in output_refused(home, "run.json")


def test_failed_capture_leaves_no_file(home: Path) -> None:
    before = {p.name for p in home.iterdir()}
    refused(errors.ModelError, *use_model("raising"), "--output", "run.json")
    assert {p.name for p in home.iterdir()} - before <= {"__pycache__"}


def test_output_replaces_the_old_file_and_keeps_link_and_mode(home: Path) -> None:
    (home / "real.json").write_text("old")
    (home / "real.json").chmod(0o640)
    (home / "run.json").symlink_to("real.json")
    good("capture", "--config", "good.yaml", "--output", "run.json")
    assert (home / "run.json").is_symlink()
    assert isinstance(load_report("real.json"), CaptureReport)
    assert (home / "real.json").stat().st_mode & 0o777 == 0o640


def test_report_is_shown_even_if_it_cannot_be_saved(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    result = cgplan_command("capture", "--config", "good.yaml", "--output", "run.json", "--json")
    assert result.exit_code == errors.OutputPathError.exit_code
    assert "No space left on device" in result.stderr
    assert len(CaptureReport.model_validate_json(result.stdout).records) == 3
    assert not list(home.glob("*.tmp")) + list(home.glob(".*.tmp"))


def test_output_to_a_pipe_does_not_replace_it(home: Path) -> None:
    os.mkfifo("pipe")  # a device would do, too, but a defect would cost the machine its device
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        good("capture", "--config", "good.yaml", "--output", "pipe")
        assert Path("pipe").is_fifo()
        assert len(CaptureReport.model_validate_json(os.read(reader, 2**16)).records) == 3
    finally:
        os.close(reader)


# Saved reports


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"kind": "capture", "schema_version": 999}', ["schema version 999", "Make the report again"]),
        ("{", ["run.json:1:2: not JSON"]),
        ('{"kind": "other"}', ["not a cgplan report"]),
        ('{"kind": "capture", "schema_version": 1}', ["damaged report: environment"]),
    ],
)
def test_inspect_refuses_other_files(home: Path, content: str, words: list[str]) -> None:
    (home / "run.json").write_text(content)
    message = refused(errors.ReportError, "inspect", "run.json")
    for word in words:
        assert word in message


def test_inspect_of_a_configuration_without_the_option(home: Path) -> None:
    assert "cgplan inspect --config good.yaml" in refused(errors.ReportError, "inspect", "good.yaml")


def test_inspect_of_a_missing_report(home: Path) -> None:
    assert "no such file: missing.json" in refused(errors.ReportError, "inspect", "missing.json")


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["inspect", "run.json", "--config", "good.yaml"],
        ["inspect", "run.json", "--set", "device=cpu"],
        ["capture"],
        ["capture", "--config", "good.yaml", "--nonsense"],
        ["capture", "--config", "good.yaml", "--force"],
        ["bench", "--config", "good.yaml", "--seed", "1"],
        ["inspect", "--vllm", "{}", "--config", "good.yaml"],
        ["inspect", "--vllm", "{}", "--set", "device=cpu"],
        ["inspect", "--config", "good.yaml", "--max-num-seqs", "4"],
        ["inspect", "run.json", "--costs", "estimate"],
        ["inspect", "run.json", "--all"],
        ["plan"],
        ["plan", "diff", "plan.json"],
        ["plan", "--config", "good.yaml", "diff", "a.json", "b.json"],
        ["plan", "--config", "good.yaml", "--emit", "tgi"],
        ["plan", "--config", "good.yaml", "--emit", "vllm", "--json"],
        ["plan", "--config", "good.yaml", "--traffic", "a.csv", "--speedup", "0"],
        ["schema", "--format", "xml"],
    ],
    ids=" ".join,
)
def test_wrong_options_end_with_2(home: Path, arguments: list[str]) -> None:
    result = cgplan_command(*arguments)
    assert result.exit_code == 2
    assert "Error" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--json", "diff", "plan.json", "plan.json"),
            "--json is no option of `cgplan plan diff`, or stands",
        ),
        (("--traffic", "x.csv", "diff", "plan.json", "plan.json"), "--traffic is no option of `cgplan plan diff`"),
        (("plan.json",), "plan.json stands without an option: give --config FILE"),
        (("--config", "good.yaml", "plan.json"), "plan.json stands without an option: give --config FILE"),
        (("dif", "plan.json", "plan.json"), "Did you mean 'diff'?"),
    ],
)
def test_arguments_of_plan_that_would_be_passed_over(home: Path, arguments: tuple[str, ...], said: str) -> None:
    good("plan", "--config", "good.yaml", "--output", "plan.json")
    result = cgplan_command("plan", *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_empty_names_of_plans_and_costs(home: Path) -> None:
    result = cgplan_command("capture", "--config", "good.yaml", "--plan", "")
    assert result.exit_code == 2
    assert "--plan is empty" in result.stderr
    assert "--costs is empty" in refused(errors.ReportError, "plan", "--config", "good.yaml", "--costs", "")


def test_a_picture_and_a_plan_have_files_of_their_own(home: Path) -> None:
    both = ("plan", "--config", "good.yaml", "--plot", "it.svg", "--output", "./it.svg")
    assert "it.svg is to hold both the picture and the plan" in refused(errors.OutputPathError, *both)
    assert not (home / "it.svg").exists()


def test_a_plan_without_graphs_and_traffic_has_no_picture(home: Path) -> None:
    none = ("plan", "--config", "good.yaml", "--set", "compilation.cudagraph_mode=NONE", "--plot", "it.svg")
    assert "it.svg was not drawn: there is no graph" in good(*none).stderr
    assert not (home / "it.svg").exists()


def test_a_configuration_in_place_of_a_report_is_told_apart(home: Path) -> None:
    good("plan", "--config", "good.yaml", "--output", "plan.json")
    assert "a configuration, it seems" in refused(errors.ReportError, "plan", "diff", "plan.json", "good.yaml")


def test_what_is_emitted_comes_with_the_notes_of_its_evidence(home: Path) -> None:
    (home / "h.csv").write_text("num_tokens,count\n1,10\n3,20\n")
    said = good("plan", "--config", "good.yaml", "--traffic", "h.csv", "--emit", "vllm").stderr
    assert "note: no step times were given: these are of another model than yours" in said
    assert "note: of 30 steps with 70 tokens, whether a batch is uniform" in said


def test_empty_options_of_plan_and_files_that_it_would_write_over(home: Path) -> None:
    Path("h.csv").write_text("num_tokens,count\n1,10\n3,20\n")
    traffic = ("plan", "--config", "good.yaml", "--traffic", "h.csv")
    for option in ("--memory", "--capture-time", "--plot", "--output"):
        result = cgplan_command(*traffic, option, "")
        assert result.exit_code == 2
        assert f"{option} is empty" in result.stderr
    for over in ("h.csv", "good.yaml"):
        result = cgplan_command(*traffic, "--output", over)
        assert result.exit_code == 17
        assert f"{over} is what the plan is made from" in result.stderr
    assert Path("h.csv").read_text().startswith("num_tokens")
    nothing = good(*traffic, "--set", "compilation.cudagraph_mode=NONE").stdout
    assert "nothing is captured: the resolved cudagraph_mode is NONE" in nothing
