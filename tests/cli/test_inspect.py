"""`cgplan inspect`: plans with the origin of each value, saved reports, and vLLM's options."""

from __future__ import annotations

import json
import re
from pathlib import Path

from commands import cgplan_command, good, refused, unwrapped

from cgplan.cli.inspect import origin_rows
from cgplan.config import load_config, read_config
from cgplan.errors import ReportError
from cgplan.planning import Plan, build_plan


def test_inspect_shows_a_saved_report_again(home: Path) -> None:
    captured = good("capture", "--config", "good.yaml", "--output", "run.json")
    assert good("inspect", "run.json").stdout == captured.stdout
    assert json.loads(good("inspect", "run.json", "--json").stdout) == json.loads(
        (home / "run.json").read_text()
    )


def test_inspect_shows_two_reports_beside_each_other(home: Path) -> None:
    for name, sizes in {"a": "[1, 2]", "b": "[1, 2, 4]"}.items():
        setting = f"compilation.cudagraph_capture_sizes={sizes}"
        for command in ("capture", "plan"):
            saved = f"{command}_{name}.json"
            good(command, "--config", "good.yaml", "--set", setting, "--output", saved)
    captures = ("capture_a.json", "capture_b.json")
    shown = good("inspect", *captures, "--html", "both.html").stdout
    first, second = (good("inspect", file).stdout for file in captures)
    assert shown == f"capture_a.json\n{first}\ncapture_b.json\n{second}"
    page = (home / "both.html").read_text()
    assert re.findall(r"<h3>(.*?)</h3>", page)[:2] == list(captures)
    both = json.loads(good("inspect", *captures, "--json").stdout)
    assert both["reports"]["capture_b.json"] == json.loads((home / "capture_b.json").read_text())
    plans = ("plan_a.json", "plan_b.json")
    assert good("inspect", *plans).stdout == good("plan", "diff", *plans).stdout


def test_inspect_refuses_two_reports_of_different_kinds(home: Path) -> None:
    good("capture", "--config", "good.yaml", "--output", "run.json")
    good("plan", "--config", "good.yaml", "--output", "plan.json")
    said = refused(ReportError, "inspect", "run.json", "plan.json", "--html", "both.html")
    assert "plan.json is a report of kind plan, not capture" in said
    assert "Give one of kind capture" in said
    assert not (home / "both.html").exists()
    page = cgplan_command("inspect", "good.yaml", "--html", "both.html")
    assert "or run `cgplan plan my.yaml --html plan.html`" in unwrapped(page.stderr)


def test_inspect_prints_a_plan_that_it_reads_again(home: Path) -> None:
    printed = good("inspect", "--config", "good.yaml", "--json").stdout
    assert Plan.from_json(printed) == build_plan(load_config("good.yaml"))
    (home / "plan.json").write_text(printed)
    assert good("inspect", "plan.json").stdout in good("inspect", "--config", "good.yaml").stdout


def test_inspect_notes_that_no_input_counts_rows(home: Path) -> None:
    """As in what `init` writes where all arguments have defaults."""
    (home / "none.yaml").write_text("model: {target: my_model.py:build}\ninputs: {}\n")
    said = "note: no input counts rows: a capture needs one"
    assert said in good("inspect", "--config", "none.yaml").stderr
    assert said not in good("inspect", "--config", "good.yaml").stderr


def test_inspect_shows_the_plan_first_and_then_the_values_that_were_set(home: Path) -> None:
    asked = ("inspect", "--config", "good.yaml", "--set", "lora.max_loras=2")
    brief, whole = good(*asked).stdout, good(*asked, "--all").stdout
    plan, _, values = brief.partition("\nValues set for good.yaml\n")
    assert plan.startswith("Plan: 6 graphs\n")
    assert whole.partition("\nValues of good.yaml\n")[0] == plan
    some = re.findall(r"^([\w.]+) +\S.* (?:line \d+|--set)$", values, re.MULTILINE)
    assert {name.partition(".")[0] for name in some} == {
        "model",
        "device",
        "inputs",
        "compilation",
        "lora",
        "report",
    }
    assert "compilation.on_miss" not in values
    assert re.search(r"^compilation\.on_miss +eager +default$", whole, re.MULTILINE)
    every = re.findall(r"^[\w.]+  ", whole.partition("\nValues of good.yaml\n")[2], re.MULTILINE)[
        1:
    ]
    assert f"and {len(every) - len(some)} defaults, listed with --all" in values
    assert "listed with --all" not in whole


def test_inspect_shows_the_padding_of_a_configuration_with_one_dimension(home: Path) -> None:
    text = """
dims: {batch: {max: 6, sizes: [2, 6]}}
inputs: {x: {shape: [batch, 4], dtype: float32, pad: 0}}
"""
    (home / "dims.yaml").write_text(text)
    shown = good("inspect", "dims.yaml").stdout
    assert re.search(r"\n3 to 6 +6 +3\nabove 6 +no graph", shown)


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
    rows = {
        row.key: (row.value, row.origin) for row in origin_rows(loaded, build_plan(loaded.config))
    }
    assert rows["device"] == ("cpu", "line 1")
    assert rows["compilation.attention_support"] == ("UNIFORM_BATCH", "line 4")
    assert rows["compilation.cudagraph_mode"] == (
        "FULL -> FULL_AND_PIECEWISE (from attention_support is UNIFORM_BATCH)",
        "line 3",
    )
    assert rows["compilation.cudagraph_capture_sizes"] == (
        "[16, 9999] -> 16 (1) (from compilation.cudagraph_capture_sizes)",
        "line 5",
    )
    assert rows["compilation.max_cudagraph_capture_size"] == (
        "16 (from cudagraph_capture_sizes)",
        "resolved",
    )
    assert rows["compilation.outputs"] == ("borrow", "default")
    assert rows["scheduler.max_num_seqs"] == ("8", "--set")
    assert rows["lora.max_loras"] == ("3", "--set")
    assert rows["lora.rank"] == ("16", "default")
    assert rows["report.sizes"] == ("16 (1) (from cudagraph_capture_sizes)", "resolved")
    shown = good("inspect", "--config", "c.yaml").stdout
    assert re.search(
        r"^compilation\.attention_support +UNIFORM_BATCH +line 4$", shown, re.MULTILINE
    )
    assert "capture sizes 9999 are dropped" in shown


def test_inspect_says_what_sizes_were_resolved_from(home: Path) -> None:
    (home / "c.yaml").write_text("compilation: {max_cudagraph_capture_size: 30}\n")
    loaded = read_config("c.yaml")
    values = {row.key: row.value for row in origin_rows(loaded, build_plan(loaded.config))}
    assert "(from ladder vllm up to 30)" in values["compilation.cudagraph_capture_sizes"]
    assert (
        values["compilation.max_cudagraph_capture_size"]
        == "30 -> 24 (from cudagraph_capture_sizes)"
    )


def test_inspect_shows_the_split(home: Path) -> None:
    command = ("inspect", "--config", "good.yaml", "--split")
    assert "no PIECEWISE graph is planned" in good(*command).stdout
    options = (
        "--set",
        "compilation.cudagraph_mode=PIECEWISE",
        "--set",
        "compilation.splitting_modules=[up]",
    )
    assert "eager up" in " ".join(good(*command, *options).stdout.split())


def test_inspect_shows_what_vllm_would_capture(home: Path) -> None:
    options = (
        "--max-num-seqs",
        "4",
        "--max-num-batched-tokens",
        "64",
        "--num-speculative-tokens",
        "1",
    )
    lora = ("--enable-lora", "--max-loras", "2", "--specialize-active-lora")
    result = good(
        "inspect",
        "--vllm",
        '{"cudagraph_capture_sizes": [2, 8], "backend": "eager"}',
        *options,
        *lora,
    )
    rows = {
        line.split()[0]: re.split(r"  +", line)[1:]
        for line in result.stdout.splitlines()
        if "." in line.split(" ")[0]
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


def test_inspect_tells_what_the_graphs_of_vllm_cost(home: Path) -> None:
    log = Path(__file__).parents[1] / "data" / "vllm_start.log"
    vllm = ("inspect", "--vllm", "{}", "--max-num-seqs", "4", "--max-num-batched-tokens", "64")
    costs = ("--costs", str(log))
    shown = good(*vllm, *costs, "--all").stdout
    assert re.search(r"PIECEWISE +\d+ .* s\n", shown.partition("Cost of each lane")[2])
    assert "Values of vLLM" in shown
    bounded = good(*vllm, *costs, "--set", "budget.max_graphs=3", "--json").stdout
    assert len(Plan.from_json(bounded).keys) == 3
