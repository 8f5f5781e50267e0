"""`cgplan capture` and `cgplan bench`, of a configuration and of saved plans."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from commands import cgplan_command, good, refused, settings, unwrapped

from cgplan import errors
from cgplan.planning import Plan
from cgplan.planning.plan import Machine
from cgplan.reports import BenchReport, CaptureReport, load_report, render_text

GOOD = ("--config", "good.yaml")


def test_capture_shows_and_saves_the_report(home: Path) -> None:
    result = good("capture", *GOOD, "--output", "run.json")
    report = load_report("run.json")
    assert isinstance(report, CaptureReport)
    assert [key.num_tokens for _, key in report.plan.keys] == [4, 2, 1]
    assert [r.nodes for r in report.records] == [3, 3, 3]
    assert result.stdout == render_text(report) + "\n"
    assert "saved run.json" in result.stderr
    assert sorted(p.name for p in home.iterdir() if p.name != "__pycache__") == [
        "good.yaml",
        "models.py",
        "run.json",
    ]


@pytest.mark.parametrize(("command", "kind"), [("capture", CaptureReport), ("bench", BenchReport)])
def test_json_is_the_saved_report_and_nothing_else(
    home: Path, command: str, kind: type[CaptureReport | BenchReport]
) -> None:
    chatty = settings("model.target=models.py:chatty")
    result = good(command, *GOOD, *chatty, "--json", "-o", "run.json")
    assert kind.model_validate_json(result.stdout) == load_report("run.json")
    assert "the builder speaks" in result.stderr
    assert "the model speaks" in result.stderr


@pytest.mark.parametrize("command", ["capture", "bench"])
def test_a_trace_of_captures_and_calls(home: Path, command: str) -> None:
    assert "saved trace.json" in good(command, *GOOD, "--trace", "trace.json").stderr
    names = Counter(
        event["name"] for event in json.loads(Path("trace.json").read_text())["traceEvents"]
    )
    assert (names["load model"], names["capture session"], names["capture"]) == (1, 1, 3)
    assert (names["launch"], names["FULL size=4 num_reqs=4"]) == (9, 4), "three calls of each size"
    assert "cannot write ." in refused(errors.OutputPathError, command, *GOOD, "--trace", ".")


RUNS = [
    (1, "FULL", 0),
    (3, "FULL", 1),
    (9, "NONE", 0),
]  # sizes of the configuration's report section


def measured(path: str = "bench.json") -> tuple[BenchReport, list[tuple[int, str, int]]]:
    report = load_report(path)
    assert isinstance(report, BenchReport)
    return report, [(r.num_tokens, r.mode.name, r.padded_rows) for r in report.records]


def test_bench_against_baselines(home: Path) -> None:
    options = ("--against", "eager,bare, reduce-overhead", "--seed", "3")
    result = good("bench", *GOOD, *options, "--output", "bench.json")
    report, runs = measured()
    assert runs == RUNS
    assert all(r.eager.median > 0 for r in report.records)
    assert report.peers is not None
    assert report.peers.seed == 3
    ways = {way.name: way.failure is None for way in report.peers.ways}
    assert ways == {"cgplan": True, "eager": True, "bare": True, "reduce-overhead": False}
    assert {r.num_tokens for r in report.peers.records} == {1, 3, 9}
    assert "order    random, seed 3; 3 rounds, 3 calls of each way and size" in result.stdout
    assert result.stdout == render_text(report) + "\n"
    assert good("inspect", "bench.json").stdout == result.stdout


def test_lazy_captures_nothing_and_says_so(home: Path) -> None:
    lazy = (*GOOD, *settings("compilation.capture_policy=lazy"))
    saved_plan()
    report = CaptureReport.model_validate_json(
        good("capture", *lazy, "--plan", "plan.json", "--json").stdout
    )
    assert (report.records, report.pool_bytes, report.capture_policy, report.waiting) == (
        (),
        0,
        "lazy",
        3,
    )
    assert "lazy: when a batch first asks for a key; waiting: 3" in render_text(report)
    assert "none captured of those from " in render_text(report)
    good("bench", *lazy, "--output", "bench.json")
    bench, runs = measured()
    assert runs == RUNS
    assert [r.descriptor.num_tokens for r in bench.capture.records] == [4, 1]


def test_warnings_and_mode_changes_come_before_the_capture(home: Path) -> None:
    narrow = settings(
        "scheduler.max_num_batched_tokens=2", "compilation.cudagraph_mode=FULL_DECODE_ONLY"
    )
    changed = settings("compilation.attention_support=NEVER", "compilation.splitting_ops=[]")
    said = good("capture", *GOOD, *narrow, *changed, "--json").stderr
    assert "note: cudagraph_mode FULL_DECODE_ONLY -> NONE: attention_support is NEVER" in said
    said = good("capture", *GOOD, *narrow, "--json").stderr
    assert re.match(r"warning: .*4 are dropped: max_num_batched_tokens", said)


def test_progress_without_a_terminal_is_a_few_lines(home: Path) -> None:
    sizes = f"compilation.cudagraph_capture_sizes={list(range(1, 21))}"
    result = good("capture", *GOOD, "--set", sizes)
    lines = [line for line in result.stderr.splitlines() if line.startswith("capture ")]
    assert len(lines) <= 11
    assert lines[0] == "capture 1/20: FULL size=20 num_reqs=20"
    assert lines[-1] == "capture 20/20: FULL size=1 num_reqs=1"


def saved_plan(*values: str) -> Plan:
    good("plan", *GOOD, *settings(*values), "--output", "plan.json")
    plan = load_report("plan.json")
    assert isinstance(plan, Plan)
    return plan


def test_a_saved_plan_is_captured_as_it_is(home: Path) -> None:
    plan = saved_plan("compilation.cudagraph_capture_sizes=[2, 3]")
    result = good("capture", *GOOD, "--plan", "plan.json", "--json")
    report = CaptureReport.model_validate_json(result.stdout)
    assert tuple((r.mode, r.descriptor) for r in report.records) == plan.keys
    assert not report.warnings
    said = "plan.json decides compilation.cudagraph_capture_sizes; the value in the configuration is not used"
    assert f"note: {said}" in unwrapped(result.stderr)
    assert said in report.plan.notes, "the report says it, too"


def test_a_capture_says_that_its_plan_was_made_for_another_budget(home: Path) -> None:
    budget = ("budget.max_graphs=2", "budget.memory=2GiB", "budget.capture_time=20s")
    saved_plan(*budget)
    planned = ("capture", *GOOD, "--plan", "plan.json")
    result = good(*planned, *settings("budget.memory=3GiB", "budget.reserve=1kB"))
    said = "plan.json is used; it was made for another budget than the configuration's"
    assert f"note: {said}\n" in unwrapped(result.stderr)
    head = " ".join(result.stdout.partition("num_reqs")[0].split())
    assert f"note {said}" in head
    assert "there is no traffic to plan for" not in head
    same = good(*planned, *settings(*budget, "budget.reserve=1kB"))
    assert "was made for another budget" not in same.output


def test_a_plan_for_something_else_is_refused_by_name(home: Path) -> None:
    plan = saved_plan("scheduler.max_num_seqs=8", "model.kwargs={width: 8}")
    machine = {"gpu": "NVIDIA H200", "driver": "580.1", "torch": torch.__version__}
    (home / "plan.json").write_text(
        plan.model_copy(update={"machine": Machine(**machine)}).model_dump_json()
    )
    message = refused(errors.PlanMismatchError, "capture", *GOOD, "--plan", "plan.json")
    assert message.startswith("error: plan.json: the plan was made for something else\n")
    assert "  - scheduler.max_num_seqs: 8 in the plan, 256 now" in message
    assert "  - model.kwargs.width: 8 in the plan, absent now" in message
    assert "  - gpu: NVIDIA H200 in the plan, " in message
    assert "  - driver: 580.1 in the plan, absent now" in message
    assert "torch" not in message
    assert "--force" in message
    forced = good("capture", *GOOD, "--plan", "plan.json", "--force", "--json")
    report = CaptureReport.model_validate_json(forced.stdout)
    assert tuple((r.mode, r.descriptor) for r in report.records) == plan.keys
    (warning,) = report.warnings
    assert "was forced" in warning
    assert "scheduler.max_num_seqs: 8 in the plan, 256 now" in warning
    assert f"warning: {warning}" in unwrapped(forced.stderr)


@pytest.mark.usefixtures("home")
def test_the_doctor_names_what_runs_outside_of_graphs() -> None:
    piecewise = settings(
        "compilation.cudagraph_mode=PIECEWISE", "compilation.splitting_modules=[down]"
    )
    found = good("doctor", *GOOD, *piecewise, "--output", "doctor.json").stdout
    assert "inside graphs" in found
    assert re.search(
        r"outside down, at \S+models\.py:\d+: `y = self\.down", " ".join(found.split())
    )
    assert good("inspect", "doctor.json").stdout == found
    nothing = good("doctor", *GOOD, *settings("compilation.cudagraph_mode=NONE")).stdout
    assert "Nothing is captured" in nothing


@pytest.mark.usefixtures("home")
def test_the_doctor_says_what_fails_and_measures_the_rest() -> None:
    found = " ".join(
        good("doctor", *GOOD, *settings("model.target=models.py:partly")).stdout.split()
    )
    assert re.search(
        r"FULL -> AUTO: the capture failed: .*_local_scalar_dense needs the host.*models\.py:\d+",
        found,
    )
    assert re.search(r"AUTO -> PIECEWISE: .*PIECEWISE without down\.\*, against eager steps", found)
    assert re.search(r"outside down\.1, at \S+models\.py:\d+", found)
    assert "inside graphs" in found


@pytest.mark.usefixtures("home")
def test_the_doctor_outlives_a_model_of_which_nothing_can_be_captured() -> None:
    syncing = settings("model.target=models.py:syncing")
    found = " ".join(good("doctor", *GOOD, *syncing).stdout.split())
    assert re.search(r"AUTO: FULL failed: .*models\.py:\d+", found)
    assert "AUTO -> NONE: no way to capture the model was found" in found
    assert "Nothing is captured" in found
    said = refused(errors.HostSyncError, "capture", *GOOD, *syncing)
    assert "next: `cgplan doctor`" in said


@pytest.mark.usefixtures("home")
def test_auto_says_what_it_tried_and_measured() -> None:
    found = " ".join(
        good("capture", *GOOD, *settings("compilation.cudagraph_mode=AUTO")).stdout.split()
    )
    assert re.search(r"AUTO -> (NONE|FULL|PIECEWISE): .*against eager steps \S+x at", found)


@pytest.mark.parametrize(
    "arguments", [("plan",), ("capture", "--plan", "plan.json")], ids=["plan", "saved plan"]
)
def test_what_has_to_know_the_graphs_refuses_auto(home: Path, arguments: tuple[str, ...]) -> None:
    (home / "plan.json").write_text(saved_plan().model_dump_json())
    message = refused(
        errors.ConfigError, *arguments, *GOOD, *settings("compilation.cudagraph_mode=AUTO")
    )
    assert "cudagraph_mode is AUTO" in message


DROPS = """
import torch, cgplan
from torch import nn

class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.held = {torch.ones(8)}  # a walk does not find it

    def forward(self, x):
        mode = cgplan.get_forward_context().runtime_mode
        is_capture = mode is cgplan.CUDAGraphMode.FULL
        return x * self.held.pop() if self.held and is_capture else x * 2
"""


def test_an_audit_captures_twice_if_asked(home: Path) -> None:
    by_option = settings("compilation.audit=prove")
    assert "proven" in good("audit", *GOOD, *by_option).stdout
    assert "proven" not in good("audit", *GOOD).stdout
    Path("file.yaml").write_text(
        Path("good.yaml").read_text().replace("compilation:\n", "compilation:\n  audit: prove\n")
    )
    assert "proven" in good("audit", "file.yaml").stdout
    message = refused(errors.ConfigError, "audit", *GOOD, *settings("compilation.audit=proof"))
    assert "compilation.audit" in message


@pytest.mark.parametrize("audit", ["off", "error", "prove"])
def test_an_audit_shows_its_table_with_findings(home: Path, audit: str) -> None:
    Path("drops.py").write_text(DROPS)
    target = settings("model.target=drops.py:Drops", f"compilation.audit={audit}")
    result = cgplan_command("audit", *GOOD, *target, "--output", "audit.json")
    assert result.exit_code == errors.AuditError.exit_code, result.output
    assert "free block" in result.stdout
    assert ("proven" in result.stdout) is (audit == "prove")
    assert "captured graphs have 1 pointer" in result.stderr
    assert load_report("audit.json").kind == "audit"
