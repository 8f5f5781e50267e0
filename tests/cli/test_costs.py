"""`--costs` of plan and inspect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import good, plan_of, predicted, refused, settings, unwrapped, use_traffic

from cgplan import errors
from cgplan.modes import CUDAGraphMode
from cgplan.units import format_bytes

GOOD = ("--config", "good.yaml")
PLAN, INSPECT = ("plan", *GOOD), ("inspect", *GOOD)
MODE = "compilation.cudagraph_mode="


def captured(*values: str) -> None:
    good("capture", *GOOD, *settings(*values), "--output", "run.json")


def test_plan_prices_graphs_by_a_report(home: Path) -> None:
    captured()
    command = use_traffic(home)
    plan = plan_of(*command, "--costs", "run.json")
    assert plan.predicted is not None
    assert len(plan.predicted.keys) == len(plan.keys)
    assert plan.predicted.notes == ("the costs of run.json are those of cpu (tape), not of a GPU",)
    assert plan.machine is None, "the tape's figures hold on any machine"
    message = refused(
        errors.BudgetError, *command, "--costs", "run.json", "--capture-time", "0.001ms"
    )
    assert "budget.capture_time" in message
    (home / "plan.json").write_text(plan.model_dump_json())
    assert "not a capture report" in refused(errors.ReportError, *command, "--costs", "plan.json")
    assert "the words estimate and measure" in refused(
        errors.ReportError, *command, "--costs", "mesure"
    )


@pytest.mark.parametrize(
    ("measured", "planned", "missing"),
    [
        ("FULL", "FULL_AND_PIECEWISE", "PIECEWISE"),
        ("PIECEWISE", "FULL_AND_PIECEWISE", "FULL"),
    ],
)
def test_graphs_of_a_mode_that_a_report_does_not_have_are_not_priced(
    home: Path, measured: str, planned: str, missing: str
) -> None:
    traffic = use_traffic(home)
    captured(MODE + measured)
    for command in (traffic, PLAN, INSPECT):
        message = refused(
            errors.ReportError, *command, *settings(MODE + planned), "--costs", "run.json"
        )
        assert f"run.json has no costs of {missing} graphs: its graphs are {measured}" in message
        assert f"a capture in mode {planned}, --costs measure or --costs estimate" in message
    assert (
        predicted(*traffic, *settings(MODE + measured), "--costs", "run.json").keys[0].pool_bytes
        > 0
    )


def test_a_report_of_the_same_mode_is_taken_whatever_its_budget_left(home: Path) -> None:
    """Nobody could give another one; what stands in for the mode that it lacks is said."""
    both = f"{MODE}FULL_AND_PIECEWISE"
    captured(both, "budget.max_graphs=1")
    cost = predicted(*PLAN, *settings(both), "--costs", "run.json")
    assert cost.notes[-1].startswith(
        "there are no figures of FULL graphs: they are priced as PIECEWISE ones"
    )
    assert cost.keys[0].pool_bytes > 0


@pytest.mark.parametrize("word", ["estimate", "measure"])
def test_plan_prices_graphs_by_the_model(home: Path, word: str) -> None:
    """Also FULL graphs of 2 tokens, where the sizes of the configuration leave PIECEWISE alone to measure."""
    traffic = use_traffic(home)
    assert predicted(*traffic, "--costs", word).estimated is (word == "estimate")
    assert len(predicted(*PLAN, "--costs", word).keys) == 3
    changes = (
        f"{MODE}FULL_AND_PIECEWISE",
        "compilation.cudagraph_capture_sizes=[8, 16]",
        "scheduler.max_num_seqs=4",
    )
    plan = plan_of(*traffic, *settings(*changes), "--costs", word, "--max-graphs", "1")
    cost = plan.predicted
    assert cost is not None
    assert (
        "there are no figures of FULL graphs: they are priced as PIECEWISE ones of the same size"
        in cost.notes
    )
    assert all(mode is CUDAGraphMode.FULL for mode, _ in plan.keys)
    assert cost.keys[0].pool_bytes > 0
    assert cost.seconds > 0


def test_plan_warns_where_costs_are_missing_for_a_budget(home: Path) -> None:
    command = (*use_traffic(home), "--memory", "2GiB", "--capture-time", "5s")
    lines = good(*command).stdout.splitlines()
    why = lines[lines.index("Why") :]
    warning = next(index for index, line in enumerate(why) if line.startswith("  warning"))
    after = " ".join(" ".join(why[warning : warning + 3]).split())
    assert "warning budget.memory and budget.capture_time did not bound this plan" in after
    assert "--costs estimate" in after
    assert "budget.memory and budget.capture_time not looked at" in " ".join(
        " ".join(lines).split()
    )
    assert "warning: budget.memory" in good(*command, "--emit", "vllm").stderr
    assert "did not bound" not in good(*command, "--costs", "estimate").stdout


def test_the_first_line_calls_extrapolated_costs_estimated(home: Path) -> None:
    captured("compilation.cudagraph_capture_sizes=[1, 4]")
    costs = ("--insurance", "0", "--costs", "run.json", "--output", "plan.json")
    for largest, told in ((4, ""), (7, "estimated ")):
        command = use_traffic(home)
        (home / "traffic.csv").write_text(f"num_tokens,count\n1,500\n{largest},500\n")
        assert plan_of(*command, *costs).max_capture_size == largest
        shown = unwrapped(good("inspect", "plan.json").stdout)
        assert f", {told}start-up" in shown
        assert ("extrapolated to larger graphs" in shown) is (largest == 7)


def test_plan_says_that_its_costs_are_another_configurations(home: Path) -> None:
    captured("compilation.cudagraph_capture_sizes=[1, 8]")
    traffic = use_traffic(home)
    other = (
        *settings("model.kwargs={width: 32}", "scheduler.max_num_seqs=7"),
        "--costs",
        "run.json",
    )
    for command in (traffic, PLAN):
        (note, _) = predicted(*command, *other).notes
        assert note == (
            "the costs of run.json were measured with another configuration: "
            "model.kwargs.width was absent, is 32 here; "
            "scheduler.max_num_seqs was 256, is 7 here"
        )
        assert "was 256, is 7 here" in " ".join(good(*command, *other).stdout.split())
    evidence = plan_of(*traffic, *other).evidence
    assert evidence is not None
    assert note in evidence["costs_notes"]


def test_inspect_shows_what_each_lora_case_adds_and_sums_costs_up_by_lane(home: Path) -> None:
    asked = (*INSPECT, *settings("lora.max_loras=2"))
    shown = good(*asked).stdout
    assert "What each LoRA case adds" in shown
    assert re.search(r"^0 +3 +- +-$", shown, re.MULTILINE)
    assert re.search(r"^any number +3 +- +-$", shown, re.MULTILINE)
    assert "give --costs FILE, --costs estimate or --costs measure" in shown
    assert "Cost of each lane" not in shown
    captured("lora.max_loras=2")
    for source in ("estimate", "measure", "run.json"):
        shown = good(*asked, "--costs", source).stdout
        assert re.search(r"^any number +3 +[\d.]+ \w+ +[\d.]+ [mu]?s$", shown, re.MULTILINE)
        assert "what the plan would save without that case alone" in shown
        plan = plan_of(*asked, "--costs", source)
        assert plan.predicted is not None
        assert len(plan.predicted.keys) == 6
    pool = {0: 0, 3: 0}
    for (_, descriptor), cost in zip(plan.keys, plan.predicted.keys, strict=True):
        pool[descriptor.num_active_loras] += cost.pool_bytes
    for case, name in ((0, "FULL"), (3, "FULL, 3 adapters")):
        row = re.search(
            rf"^{name} +3  1, 2, 4 +(\d+(?:\.\d)? \w+) +0 B +[\d.]+ [mu]?s$", shown, re.MULTILINE
        )
        assert row, shown
        assert row[1] == format_bytes(pool[case])
    assert "What each LoRA case adds" not in good(*INSPECT, "--costs", "run.json").stdout


def test_a_log_without_captures_is_no_source_of_costs(home: Path) -> None:
    (home / "eager.log").write_text("INFO Initializing a V1 LLM engine (v0.33.0)\n")
    message = refused(errors.ReportError, *use_traffic(home), "--costs", "eager.log")
    assert "neither JSON nor a log of vLLM with `Graph capturing finished`" in message
