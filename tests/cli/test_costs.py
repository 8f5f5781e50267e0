"""`--costs` of plan and inspect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import good, refused, use_traffic

from cgplan import errors
from cgplan.modes import CUDAGraphMode
from cgplan.planning import Plan
from cgplan.units import format_bytes


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


@pytest.mark.parametrize("word", ["estimate", "measure"])
def test_plan_prices_graphs_by_the_model(home: Path, word: str) -> None:
    plan = Plan.model_validate_json(good(*use_traffic(home), "--costs", word, "--json").stdout)
    assert plan.predicted is not None
    assert plan.predicted.estimated is (word == "estimate")
    ladder = Plan.model_validate_json(good("plan", "--config", "good.yaml", "--costs", word, "--json").stdout)
    assert ladder.predicted is not None
    assert len(ladder.predicted.keys) == 3


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
