"""`cgplan plan` and `cgplan plan diff`. `--costs` of plan and inspect."""

from __future__ import annotations

import html
import json
import os
import random
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from commands import (
    REQUESTS,
    cgplan_command,
    good,
    plan_of,
    predicted,
    refused,
    settings,
    unwrapped,
    use_traffic,
)

import cgplan
from cgplan import errors
from cgplan.config import load_config
from cgplan.modes import CUDAGraphMode
from cgplan.optimizer.evidence import PlanCheck
from cgplan.planning import Plan, build_plan
from cgplan.reports import load_plan, load_report, render_text
from cgplan.reports.layout import plain_text
from cgplan.reports.plan_tables import brief
from cgplan.traffic.step_times import StepTimes
from cgplan.units import format_bytes

PLAN = ("plan", "--config", "good.yaml")


def test_plan_shows_and_saves_the_plan(home: Path) -> None:
    result = good(*PLAN, "--output", "plan.json")
    plan = load_report("plan.json")
    assert isinstance(plan, Plan)
    assert plan.model_copy(update={"notes": (), "lint": ()}) == build_plan(load_config("good.yaml"))
    assert result.stdout == plain_text(brief(plan)) + "\n"
    assert good(*PLAN, "--verbose").stdout == render_text(plan) + "\n"
    assert "saved plan.json" in result.stderr
    assert good(*PLAN, "--json").stdout == (home / "plan.json").read_text()


def test_plan_emits_for_an_engine_and_nothing_else(home: Path) -> None:
    narrow = settings(
        "scheduler.max_num_batched_tokens=2", "compilation.attention_support=UNIFORM_BATCH"
    )
    result = good(*PLAN, *narrow, "--emit", "vllm", "--output", "plan.json")
    assert result.stdout == (
        '--compilation-config \'{"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [1, 2], '
        '"max_cudagraph_capture_size": 2}\'\n'
    )
    for line in (
        "saved plan.json",
        "note: cudagraph_mode FULL -> FULL_AND_PIECEWISE: attention_support is UNIFORM_BATCH",
        "warning: capture sizes 4 are dropped: max_num_batched_tokens is 2; raise it to 4, or list "
        "at most 2",
        "note: made for --max-num-seqs 256 --max-num-batched-tokens 2",
    ):
        assert line in unwrapped(result.stderr)
    assert isinstance(load_report("plan.json"), Plan)
    for engine in ("vllm", "sglang", "trtllm", "json"):
        assert "1, 2, 4" in good(*PLAN, "--emit", engine).stdout.replace("1 2 4", "1, 2, 4")


def test_a_report_ends_with_the_options_of_the_engine(home: Path) -> None:
    """Of vLLM where its options were given, of another engine where it was named; a saved plan shows them again."""
    given = ("--vllm", '{"cudagraph_capture_sizes": [1, 2, 4]}', "--max-num-seqs", "4")
    shown = good("plan", *given, "--output", "plan.json", "--html", "plan.html").stdout
    emitted = good("plan", *given, "--emit", "vllm").stdout
    block = f"{emitted.strip()} --max-num-seqs 4 --max-num-batched-tokens 8192"
    assert shown.splitlines()[-1] == block
    assert "For vLLM, by the rules of 0.33.0" in shown
    assert html.escape(block, quote=False) in (home / "plan.html").read_text().replace(
        "&#39;", "'"
    ).replace("&#34;", '"')
    assert good("inspect", "plan.json").stdout.splitlines()[-1] == block
    assert block in good("inspect", *given).stdout
    saved = json.loads((home / "plan.json").read_text())["emission"]
    assert saved["engine"] == "vLLM"
    assert f"{saved['options']} {saved['bounds']}" == block
    assert json.loads(good(*PLAN, "--json").stdout)["emission"] is None
    good(*PLAN, "--emit", "trtllm", "--output", "plan.json")
    assert good("inspect", "plan.json").stdout.endswith(
        "  enable_padding: true\nmax_batch_size: 256\nmax_num_tokens: 8192\n"
    )


def test_sglangs_own_options_decide_the_sizes(home: Path) -> None:
    parallel = ("--sglang", "--tp-size 8 --attn-dp-size 2 --model-path m")
    shown = good(*PLAN, *parallel).stdout
    assert "SGLang would drop 1, 2: its decode sizes are multiples of 4 requests" in shown
    assert "--cuda-graph-bs-decode 4 --cuda-graph-max-bs-decode 4 " in shown.splitlines()[-1]
    assert "--max-running-requests 512" in shown.splitlines()[-1]
    emitted = good(*PLAN, *parallel, "--emit", "sglang")
    assert shown.splitlines()[-1].startswith(emitted.stdout.strip())
    assert "note: made for --max-running-requests 512" in unwrapped(emitted.stderr)
    assert "1 2 4" in good(*PLAN, "--emit", "sglang").stdout
    assert "expected one argument" in refused(errors.ConfigError, *PLAN, "--sglang", "--tp-size")
    for other in ("vllm", "json"):
        told = cgplan_command(*PLAN, *parallel, "--emit", other)
        assert told.exit_code == 2
        assert f"--sglang is not about --emit {other}" in unwrapped(told.stderr)


def test_a_report_by_other_step_times_has_no_options_to_paste(home: Path) -> None:
    use_traffic(home)
    command = ("plan", "--vllm", "{}", "--max-num-seqs", "8", "--traffic", "traffic.csv")
    assert "For vLLM" not in good(*command).stdout
    for times in (("--step-times", "times.csv"), ("--assume-default-times",)):
        assert "For vLLM" in good(*command, *times).stdout


def test_what_is_emitted_for_vllm_is_read_back_to_the_same_keys(home: Path) -> None:
    settings = (
        "--set",
        "compilation.cudagraph_mode=FULL_AND_PIECEWISE",
        "--set",
        "scheduler.max_num_seqs=3",
    )
    emitted = good(*PLAN, *settings, "--emit", "vllm").stdout
    value = shlex.split(emitted)[1]
    again = good(
        "inspect",
        "--vllm",
        value,
        "--max-num-seqs",
        "3",
        "--max-num-batched-tokens",
        "8192",
        "--json",
    ).stdout
    assert Plan.from_json(again).keys == build_plan(load_config("good.yaml", settings[1::2])).keys


def test_plan_options_are_overrides_of_the_budget(home: Path) -> None:
    given = (
        "--max-graphs",
        "2",
        *settings("budget.max_graphs=3"),
        "--memory",
        "1GiB",
        "--capture-time",
        "2min",
    )
    assert plan_of(*PLAN, *given).budget == {
        "max_graphs": 2,
        "memory": 1 << 30,
        "capture_time": 120.0,
    }


def test_plan_for_traffic_finds_its_sizes(home: Path) -> None:
    """Sizes that batches have are best: 2 and 7 for two graphs, where 1 costs 129 instead of 100 microseconds."""
    command = (*use_traffic(home), "--max-graphs", "2")
    shown = good(*command, "--verbose", "--output", "plan.json").stdout
    plan = load_report("plan.json")
    assert isinstance(plan, Plan)
    assert plan.capture_sizes == (2, 7)
    two, seven = 100 + 200 / 7, 100 + 200 * 6 / 7
    assert plan.expected_us == pytest.approx(0.8 * two + 0.2 * seven)
    assert "Ladders on the same traffic" in shown
    assert good("inspect", "plan.json").stdout == shown
    table = [" ".join(line.split()) for line in shown.splitlines()]
    at = table.index("batch of (tokens) is padded to padding rows at most")
    assert table[at + 2 : at + 5] == ["1 to 2 2 1", "3 to 7 7 4", "above 7 no graph -"]
    assert table[0].startswith(
        "Plan: 2 graphs instead of the configured sizes' 3 graphs; --costs estimate tells"
    )
    assert table.index("Why") < at


@pytest.mark.parametrize(("columns", "widest"), [("64", 64), ("130", 130), ("wide", 100)])
def test_reports_obey_columns(
    home: Path, monkeypatch: pytest.MonkeyPatch, columns: str, widest: int
) -> None:
    command = (*use_traffic(home), "--verbose")
    usual = good(*command).stdout
    monkeypatch.setenv("COLUMNS", columns)
    shown = good(*command).stdout
    widths = [len(line) for line in shown.splitlines()]
    assert max(widths) <= widest
    assert (shown == usual) == (widest == 100)


@pytest.mark.parametrize("graphs", [2, 4, 5, 7, 8])
def test_one_list_without_traffic_takes_all_graphs_that_it_may(graphs: int) -> None:
    bounds = ("--max-num-seqs", "256", "--max-num-batched-tokens", "8192")
    plan = Plan.from_json(
        good("plan", "--vllm", "{}", *bounds, "--max-graphs", str(graphs), "--json").stdout
    )
    assert len(plan.keys) == graphs


def test_plan_for_requests_is_made_with_the_step_times_of_the_plan(home: Path) -> None:
    """A request a second of 3 tokens each: one runs at a time."""
    use_traffic(home)
    (home / "trace.csv").write_text(REQUESTS)
    command = (*PLAN, "--traffic", "trace.csv", "--step-times", "times.csv")
    insured = plan_of(*command).evidence
    assert insured is not None
    assert insured["insurance"] == 0.1
    shown = unwrapped(good(*command).stdout)
    whole = unwrapped(good(*command, "--verbose").stdout)
    assert "the largest that may come, max_num_seqs = " in whole
    assert re.search("planned with 10% of unseen sizes and higher loads +binding", shown)
    plan = plan_of(*command, "--insurance", "0")
    for objective, loads in (
        ("robust", "planned with higher loads"),
        ("mean", r"bound [0-9.]+ us"),
    ):
        without = ("--insurance", "0", "--objective", objective)
        shown = unwrapped(good(*command, *without).stdout)
        assert re.search(rf"; {loads} +binding", shown)
    assert plan.capture_sizes == (1, 4)
    assert plan.evidence is not None
    assert plan.evidence["traffic_weight"] == 60


def test_more_requests_decode_than_tokens_are_prefilled_where_both_are_apart(home: Path) -> None:
    (home / "trace.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{n / 99},9,40\n" for n in range(30))
    )
    given = settings(
        "scheduler.mixed_batches=false",
        "scheduler.max_num_seqs=16",
        "scheduler.max_num_batched_tokens=8",
        "compilation.cudagraph_capture_sizes=null",
    )
    plan = plan_of(*PLAN, *given, "--traffic", "trace.csv")
    assert plan.evidence is not None
    assert plan.evidence["expected_us"]["plan"] > 0


def test_the_file_of_a_plan_may_stand_after_options(home: Path) -> None:
    found = good("plan", "--max-graphs", "2", "good.yaml").stdout
    assert found == good(*PLAN, "--max-graphs", "2").stdout


def test_sglang_captures_no_more_than_the_plan_allows(home: Path) -> None:
    """Decode and prefill have graphs of their own, whichever mode; a check knows the scheduler and the rule."""
    use_traffic(home)
    rng = random.Random(1)
    rows = "".join(f"{i / 50},{rng.randint(1, 60)},{rng.randint(2, 9)}\n" for i in range(300))
    (home / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    for mode in ("FULL", "PIECEWISE", "FULL_AND_PIECEWISE"):
        options = (
            "--traffic",
            "trace.csv",
            "--assume-default-times",
            "--max-graphs",
            "6",
            "--objective",
            "mean",
            "--insurance",
            "0",
        )
        command = (
            *PLAN,
            *options,
            *settings(f"compilation.cudagraph_mode={mode}", "scheduler.max_num_seqs=32"),
        )
        emitted = good(*command, "--emit", "sglang", "--output", "plan.json").stdout
        lists = re.findall(r"--cuda-graph-bs-(?:decode|prefill) ([\d ]+)", emitted)
        assert 0 < sum(len(sizes.split()) for sizes in lists) <= 6
        plan = Plan.from_json((home / "plan.json").read_text())
        assert plan.evidence is not None
        served = {(use["mode"], use["uniform"]) for use in plan.evidence["uses"]}
        assert served == {"FULL": {("FULL", False), ("NONE", False)}}.get(mode, served)
        checked = json.loads(
            good("plan", "check", "plan.json", "--traffic", "trace.csv", "--json").stdout
        )
        assert any("apart from decode" in note for note in checked["notes"])
        assert checked["points"][0]["expected_us"] == pytest.approx(plan.expected_us)
        assert checked["regret"] == pytest.approx(0, abs=1e-6)


def test_a_check_takes_several_loads(home: Path) -> None:
    """As the plan takes them: then it finds what the plan promised."""
    use_traffic(home)
    trace = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
        f"{i / 9},2,4\n" for i in range(200)
    )
    for name in ("a.csv", "b.csv"):
        (home / name).write_text(trace)
    loads = (
        "--traffic",
        "a.csv",
        "--traffic",
        "b.csv@2.5x",
        "--scale",
        "1,4",
        "--weights",
        "3,1",
        "--replicas",
        "2",
    )
    plan = plan_of(*PLAN, "--step-times", "times.csv", *loads, "--output", "plan.json")
    check = ("plan", "check", "plan.json", "--step-times", "times.csv", "--json")
    found = PlanCheck.model_validate_json(good(*check, *loads).stdout)
    assert found.points[0].expected_us == pytest.approx(plan.expected_us)
    assert "1 weight" not in cgplan_command(*check, *loads[:4], "--weights", "1").stdout
    for wrong in (
        ("--weights", "x"),
        ("--scale", "0"),
        ("--traffic", "a.csv@nox"),
        ("--replicas", "0"),
    ):
        told = cgplan_command(*check, "--traffic", "a.csv", *wrong)
        assert told.exit_code == 2
        assert wrong[0] in told.stderr


def test_a_check_takes_the_step_times_of_the_plan(home: Path) -> None:
    plan = plan_of(*use_traffic(home), "--max-graphs", "2", "--output", "plan.json")
    check = ("plan", "check", "plan.json", "--json", "--traffic", "traffic.csv")
    same = PlanCheck.model_validate_json(good(*check).stdout)
    assert same.times_source == "times.csv"
    assert same.points[0].expected_us == pytest.approx(plan.expected_us)
    (home / "others.csv").write_text("mode,num_tokens,microseconds\nNONE,1,900\nFULL,1,100\n")
    other = "the plan was made with other step times: times.csv"
    for times, is_told in (("others.csv", True), ("times.csv", False)):
        found = PlanCheck.model_validate_json(good(*check, "--step-times", times).stdout)
        assert found.times_source == times
        assert (other in found.notes) is is_told


def test_options_without_effect_are_errors(home: Path) -> None:
    for option in (("--insurance", "5%"), ("--objective", "mean"), ("--weights", "1")):
        assert option[0] in refused(errors.ConfigError, *PLAN, *option)


@pytest.mark.parametrize(
    ("mode", "most"), [("FULL_AND_PIECEWISE", 12), ("FULL", 5), ("FULL_AND_PIECEWISE", 3)]
)
def test_without_traffic_vllm_has_one_list_too(home: Path, mode: str, most: int) -> None:
    given = ("--max-num-seqs", "32", "--max-num-batched-tokens", "512")
    command = (
        "plan",
        "--vllm",
        f'{{"cudagraph_mode": "{mode}"}}',
        *given,
        "--max-graphs",
        str(most),
    )
    plan = plan_of(*command)
    assert 0 < len(plan.keys) <= most
    _, text = shlex.split(good(*command, "--emit", "vllm").stdout)
    anew = Plan.from_json(good("inspect", "--vllm", text, *given, "--json").stdout)
    assert set(anew.keys) == set(plan.keys)
    if most == 12:
        assert {sizes[-1] for sizes in plan.lanes().values()} == {32, 64}, (
            "no lane loses its largest size"
        )


def test_a_check_of_timestamps_in_another_unit_warns_as_a_plan_does(home: Path) -> None:
    """Two requests a second, in seconds where milliseconds are read."""
    good(*use_traffic(home), "--output", "plan.json")
    rows = [
        {"timestamp": i / 2, "input_length": 1200, "output_length": 3, "hash_ids": []}
        for i in range(100)
    ]
    (home / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    traffic = ("--traffic", "trace.jsonl")
    plan = plan_of(*PLAN, *traffic, "--step-times", "times.csv")
    assert plan.evidence is not None
    (warning,) = (text for text in plan.evidence["unsure"] if "timestamps were" in text)
    check = ("plan", "check", "plan.json", *traffic)
    found = PlanCheck.model_validate_json(good(*check, "--json").stdout)
    assert warning in found.warnings
    assert f"warning {warning}" in " ".join(good(*check).stdout.split())
    right = PlanCheck.model_validate_json(good(*check, "--json", "--speedup", "0.001").stdout)
    assert not any("timestamps were" in text for text in right.warnings)


def test_plan_for_requests_that_one_server_cannot_serve_warns(home: Path) -> None:
    use_traffic(home)
    (home / "trace.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"{i / 2e4},4,3\n" for i in range(1000))
    )
    command = (*PLAN, "--traffic", "trace.csv", "--step-times", "times.csv")
    plan = plan_of(*command)
    assert plan.evidence is not None
    assert "overload: requests come" in plan.evidence["unsure"][0]
    head, *_ = re.split(r"^ *sizes ", good(*command).stdout, flags=re.MULTILINE)
    assert "give --replicas; " in " ".join(head.split())
    good(*use_traffic(home), "--output", "plan.json")
    check = ("plan", "check", "plan.json", "--traffic", "trace.csv")
    found = PlanCheck.model_validate_json(good(*check, "--json").stdout)
    assert found.warnings[-1].startswith("overload: requests come")
    shown = " ".join(good(*check).stdout.split())
    assert shown.count("warning overload: requests come") == 1
    assert "so the plan is for full batches alone" in shown
    apart = plan_of(*command, *settings("scheduler.mixed_batches=false"))
    assert apart.evidence is not None
    assert apart.config_hash == plan.config_hash, "a capture does not count with it"
    assert "apart from decode" in " ".join(apart.evidence["traffic_notes"])


def test_plan_for_several_loads(home: Path) -> None:
    use_traffic(home)
    trace = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
        f"{i / 9},2,4\n" for i in range(200)
    )
    for name in ("a.csv", "b.csv"):
        (home / name).write_text(trace)
    command = (*PLAN, "--step-times", "times.csv", "--max-graphs", "3", "--traffic")
    plan = plan_of(
        *command,
        "a.csv",
        "--traffic",
        "b.csv@2.5x",
        "--scale",
        "1,4",
        "--weights",
        "3,1",
        "--replicas",
        "2",
    )
    assert plan.evidence is not None
    sources = [point["source"] for point in plan.evidence["loads"]]
    assert len(sources) == 4
    assert [["2.5 times" in source, "4 times" in source] for source in sources] == [
        [False, False],
        [False, True],
        [True, False],
        [True, True],
    ]
    assert all("1 of 2 replicas" in source for source in sources)
    assert "2 weights for 1 files" in refused(
        errors.ConfigError, *command, "a.csv", "--weights", "1,2"
    )
    for wrong in (
        ("a.csv", "--scale", "0,1"),
        ("a.csv", "--scale", ""),
        ("a.csv@x",),
        ("a.csv", "--weights", "1,,2"),
    ):
        usage = cgplan_command(*command, *wrong)
        assert (usage.exit_code, "no list of numbers above 0" in usage.stderr) == (2, True)
    counts = refused(errors.TrafficError, *PLAN, "--traffic", "traffic.csv", "--scale", "2")
    assert "which have no arrivals" in counts


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "FULL"])
@pytest.mark.parametrize("spec", ["0", "3"])
def test_vllm_captures_the_keys_of_a_plan_that_is_emitted_for_it(
    home: Path, mode: str, spec: str
) -> None:
    use_traffic(home)
    (home / "mixed.csv").write_text(
        "num_tokens,num_reqs,uniform,count\n8,2,,9\n11,3,false,5\n5,1,false,3\n23,2,false,4\n"
    )
    asked = ("plan", "--vllm", json.dumps({"cudagraph_mode": mode}), "--traffic", "mixed.csv")
    bounds = (
        "--max-num-seqs",
        "12",
        "--max-num-batched-tokens",
        "64",
        "--num-speculative-tokens",
        spec,
    )
    for graphs in ("4", "7"):
        command = (
            *asked,
            *bounds,
            "--max-graphs",
            graphs,
            "--emit",
            "vllm",
            "--output",
            "plan.json",
        )
        value = shlex.split(good(*command, "--assume-default-times").stdout)[1]
        planned = load_report("plan.json")
        assert isinstance(planned, Plan)
        taken = Plan.from_json(good("inspect", "--vllm", value, *bounds, "--json").stdout)
        assert set(taken.keys) == set(planned.keys)
        assert 0 < len(planned.keys) <= int(graphs)


def test_plan_for_conversations_needs_a_rate(home: Path) -> None:
    use_traffic(home)
    talk = [{"from": "human", "value": "a b c"}, {"from": "gpt", "value": "d e f"}]
    (home / "chat.json").write_text(json.dumps([{"id": "1", "conversations": talk}] * 9))
    command = (*PLAN, "--traffic", "chat.json", "--step-times", "times.csv")
    assert "with traffic.request_rate in requests a second" in refused(
        errors.TrafficError, *command
    )
    made = "traffic={request_rate: 1, prompt_median: 5, prompt_p95: 9, output_median: 4, output_p95: 8}"
    evidence = plan_of(*command, *settings(made)).evidence
    assert evidence is not None
    assert evidence["traffic_source"] == "chat.json: 9 requests"


def test_plan_for_traffic_that_no_graph_could_serve(home: Path) -> None:
    use_traffic(home)
    (home / "mixed.csv").write_text("num_tokens,count,num_reqs,uniform\n10,5,2,false\n")
    command = (*PLAN, "--traffic", "mixed.csv", "--step-times", "times.csv")
    options = settings("compilation.cudagraph_mode=FULL_DECODE_ONLY")
    assert plan_of(*command, *options).keys == ()
    shown = unwrapped(good(*command, *options).stdout)
    assert "no graph saves time for this traffic: eager steps take no longer" in shown


METRICS = """# HELP cgplan_batches_total Calls by the batch that was asked for.
# TYPE cgplan_batches_total counter
cgplan_batches_total{runner="r",num_tokens="1",uniform="true",num_active_loras="0",instance="a"} 500.0
cgplan_batches_total{runner="r",num_tokens="2",uniform="true",num_active_loras="0",instance="a"} 3e+02
cgplan_batches_total{runner="r",num_tokens="7",uniform="true",num_active_loras="0",instance="a"} 200 1763876000
"""


def test_plan_from_the_metrics_of_a_runner(home: Path) -> None:
    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(METRICS.encode())

        def log_message(self, *_: object) -> None:
            pass

    command = (*use_traffic(home)[:3], "--step-times", "times.csv", "--max-graphs", "2")
    (home / "metrics.txt").write_text(METRICS)
    wanted = plan_of(*command, "--traffic", "traffic.csv")
    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        for source in ("metrics.txt", "traffic.csv", f"{address}/metrics"):
            plan = plan_of(*command, "--from-stats", source)
            assert (plan.keys, plan.expected_us) == (wanted.keys, wanted.expected_us)
        assert f"{address}/other cannot be read: HTTP Error 404" in refused(
            errors.TrafficError, *command, "--from-stats", f"{address}/other"
        )
        server.shutdown()
    assert "cannot be read" in refused(
        errors.TrafficError, *command, "--from-stats", f"{address}/metrics"
    )
    (home / "metrics.txt").write_text(METRICS.replace("3e+02", "NaN"))
    message = refused(errors.TrafficError, *command, "--from-stats", "metrics.txt")
    assert "metrics.txt:4: count is nan" in message
    assert (
        cgplan_command(
            *command, "--from-stats", "metrics.txt", "--traffic", "traffic.csv"
        ).exit_code
        == 2
    )
    refused(errors.TrafficError, *PLAN, *SIZED, "--from-stats", "metrics.txt")


def test_more_graphs_than_the_configured_ones_say_why_and_what_has_fewer(home: Path) -> None:
    (home / "seen.csv").write_text("num_tokens,count\n1,50\n3,200\n8,20\n")
    few = settings("compilation.cudagraph_capture_sizes=[1, 4, 8]")
    command = (*PLAN, *few, "--traffic", "seen.csv")
    shown = " ".join(good(*command).stdout.split())
    found = re.search(
        r"Plan: keep the configured sizes' 3 graphs; (\d+) graphs are as good \((\d+) for batches that "
        r"max_num_seqs = 256 allows and the traffic does not show: --insurance 0 plans without\)",
        shown,
    )
    assert found
    assert 3 < int(found[2]) < int(found[1])
    assert "does not show" not in good(*command, "--insurance", "0").stdout
    for fewer in (("--max-graphs", "3"), settings("scheduler.max_num_seqs=8")):
        plan = plan_of(*command, *fewer)
        assert len(plan.keys) <= 3
        assert "does not show" not in good(*command, *fewer).stdout


def test_statistics_of_graphed_become_its_sizes(home: Path) -> None:
    model = torch.nn.Linear(8, 4).eval()
    with torch.no_grad():
        g = cgplan.graphed(model)
        for size in (1, 3, 5, 7, 3, 5, 5, 7, 12, 3):
            g(torch.randn(size, 8))
        runner = g.runners[0]
        (home / "calls.yaml").write_text(runner.config.model_dump_json())
        (home / "calls.json").write_text(runner.stats.traffic().model_dump_json())
        shown = good("plan", "calls.yaml", "--traffic", "calls.json", "--max-graphs", "3").stdout
        sizes = [int(size) for size in re.search(r"sizes +([\d, ]+)", shown)[1].split(",")]  # type: ignore[index]
        assert sizes == [5, 7, 12]
        planned = cgplan.graphed(model, sizes=sizes)
        for size in sizes:
            planned.warm_up(torch.randn(size, 8))
        assert planned(torch.randn(3, 8)).shape == (3, 4)


def test_plan_says_whose_step_times_it_uses(home: Path) -> None:
    use_traffic(home)
    good("bench", *PLAN[1:], "--output", "bench.json")
    bench = Path("bench.json")
    report = json.loads(bench.read_text())
    for record in report["records"]:  # as of an idle machine
        record["unsure"] = []
        for name, slope in {"eager": 0.3, "graph": 0.2, "graph_queued": 0.2}.items():
            if record[name]:
                record[name]["median"] = slope * (100 + record["num_tokens"])
    bench.write_text(json.dumps(report))
    command = (*PLAN, "--traffic", "traffic.csv", "--step-times", "bench.json")
    untimed = settings("scheduler.max_num_seqs=64", "compilation.address_check=off")
    wider = settings("model.kwargs={width: 32}")
    for changes, told in ((), False), (untimed, False), (wider, True):
        evidence = plan_of(*command, *changes).evidence
        assert evidence is not None
        warnings = " ".join(evidence["unsure"])
        assert "not of a GPU" in warnings
        assert ("measured with another configuration" in warnings) == told
    assert re.search(r"step times +bench\.json, .*cpu \(tape\)", unwrapped(good(*command).stdout))
    message = refused(errors.StepTimeError, *command, "--emit", "vllm")
    assert "of the CPU stand-in is not emitted" in message
    doubt = "by times of cpu (tape), not of a GPU: "
    plan = plan_of(*command, "--output", "plan.json")
    assert plan.evidence is not None
    assert plan.evidence["verdict"].startswith(doubt)
    check = good("plan", "check", "plan.json", "--traffic", "traffic.csv", "--json")
    verdict = json.loads(check.stdout)["verdict"]
    assert verdict.startswith(doubt)
    # a ladder goes on above the sizes that were measured
    assert "20.0% of the steps run eagerly; regret 9.38%" in verdict
    own = ("plan", "--vllm", "{}", "--traffic", "traffic.csv", "--step-times", "bench.json")
    assert "--compilation-config" not in good(*own).stdout
    bench = json.loads(Path("bench.json").read_text())
    bench["records"][0]["unsure"] = ["eager"]
    Path("busy.json").write_text(json.dumps(bench))
    unsure = unwrapped(good(*PLAN, "--traffic", "traffic.csv", "--step-times", "busy.json").stdout)
    doubt = "the step times of busy.json: Not to be trusted, as over twice the fastest call: eager"
    assert " by times of cpu (tape), not of a GPU, not to be trusted: " in unsure
    assert re.search(rf"verdict .*warning +{re.escape(doubt)} .*step times +busy\.json, ", unsure)


def test_step_times_of_a_runner_fit_a_file_of_graphed_with_inputs_of_the_same_size(
    home: Path,
) -> None:
    model = "def build():\n    return torch.nn.AdaptiveAvgPool1d(4).eval()\n"
    (home / "pool.py").write_text(f"import torch\n\n\n{model}")
    runner = "inputs: {input: [[num_tokens, 8], float32, 0]}"
    (home / "runner.yaml").write_text(
        f"{runner}\nmodel: {{target: pool.py:build}}\nscheduler: {{max_num_seqs: 9}}\n"
    )
    sizes = settings("compilation.cudagraph_capture_sizes=[1, 4]")
    good("bench", "runner.yaml", *sizes, "--output", "bench.json")
    g = cgplan.graphed(torch.nn.AdaptiveAvgPool1d(4).eval(), sizes=[1, 4])
    for size in (1, 3, 1, 3):
        g(torch.randn(size, 8))
    (home / "calls.json").write_text(g.runners[0].config.model_dump_json())
    (home / "seen.csv").write_text("batch,count\n1,50\n3,200\n")
    runner_of_engine = (
        'cgplan_info{inputs="input [num_tokens, 8]",runner="a"} 1\n'
        'cgplan_batches_total{num_tokens="3",runner="a",uniform="true"} 300\n'
    )
    (home / "metrics.txt").write_text(runner_of_engine)
    of_engine = ("--config", "calls.json", "--traffic", "metrics.txt")
    assert "take traffic and runner.config of one runner" not in good("plan", *of_engine).stdout
    command = ("--config", "calls.json", "--traffic", "seen.csv", "--step-times", "bench.json")
    assert "another configuration" not in good("plan", *command).stdout
    wider = Path("calls.json").read_text().replace('["batch",8]', '["batch",16]')
    (home / "calls.json").write_text(wider)
    assert "take traffic and runner.config of one runner" in unwrapped(
        good("plan", *of_engine).stdout
    )
    assert (
        'inputs was ["input [num_tokens, 8]"], is ["input [num_tokens, 16]"] here'
    ) in unwrapped(good("plan", *command).stdout)


def test_a_plan_beyond_the_measured_sizes_is_extrapolated(home: Path) -> None:
    """Most steps have 2 or more tokens."""
    command = use_traffic(home)
    rows = "".join(f"{mode},1,{time}\n" for mode, time in (("NONE", 900), ("FULL", 100)))
    (home / "short.csv").write_text(f"mode,num_tokens,microseconds\n{rows}")
    doubt = "% of the steps have sizes that were not measured"
    for name, told in (("short.csv", True), ("times.csv", False)):
        made = good(
            *command[:-1], name, "--emit", "vllm", "--output", "made.json", "--html", "made.html"
        )
        advice = "measure first: `cgplan bench FILE"
        of_vllm = re.search(
            r"or of vLLM two starts, at loads up to \d+ tokens", unwrapped(made.stderr)
        )
        assert (of_vllm is not None) is told
        assert (advice in unwrapped(made.stderr)) is told
        if told:
            few = "scheduler.max_num_batched_tokens=4", "compilation.max_cudagraph_capture_size=4"
            bounded = [part for setting in few for part in ("--set", setting)]
            bounded += ["--set", "compilation.cudagraph_capture_sizes=null"]
            shown = unwrapped(good(*command[:-1], name, *bounded).stdout)
            _, pasted, _ = shown.partition("measure first")[2].split("`", 2)
            assert "'compilation.cudagraph_capture_sizes=[1,2,4]'" in pasted
            good(*shlex.split(pasted.replace("FILE", "good.yaml"))[1:])
        evidence = load_plan(home / "made.json").evidence
        assert evidence is not None
        assert evidence["verdict"].startswith("extrapolated, as ") is told
        assert (doubt in evidence["verdict"]) is told
        shown = unwrapped(good("inspect", "made.json").stdout)
        assert ("extrapolated, as" in shown) is told
        lists = evidence["lanes"]
        beyond = sum(size > 1 for lane in lists for size in lane["sizes"])
        assert (f"{beyond} of {evidence['graphs']} graphs extrapolated" in shown) is told
        if told:
            assert shown.index(advice) < shown.index("--compilation-config")
        page = (home / "made.html").read_text()
        assert ("extrapolated, as " in page) is told


@pytest.mark.parametrize(("unit", "is_told"), [(1e-3, True), (1, False), (1e3, True)])
def test_step_times_in_another_unit_are_told(home: Path, unit: float, is_told: bool) -> None:
    times = {"NONE": 14000, "FULL": 4500}
    rows = "".join(f"{mode},1,{time * unit}\n" for mode, time in times.items())
    (home / "unit.csv").write_text(f"mode,num_tokens,microseconds\n{rows}")
    evidence = plan_of(*use_traffic(home)[:-1], "unit.csv").evidence
    assert evidence is not None
    told = "times the default: is the unit right?"
    assert (told in " ".join(evidence["unsure"])) is is_told
    assert " ".join(evidence["unsure"]).count(told) <= 1


def test_saved_step_times_are_read_again(home: Path) -> None:
    command = use_traffic(home)
    times = StepTimes.load("times.csv")
    (home / "times.json").write_text(times.model_dump_json())
    assert plan_of(*command[:-1], "times.json").keys == plan_of(*command).keys


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
def test_traffic_step_times_and_costs_may_come_through_pipes(home: Path) -> None:
    command = use_traffic(home)[:3]
    (home / "traffic.csv").write_text(REQUESTS)
    good("bench", "--config", "good.yaml", "--output", "bench.json")
    bench = json.loads((home / "bench.json").read_text())
    for record in bench["records"]:
        record["eager"]["median"] *= 100  # so that graphs are worth having on a busy machine, too
    (home / "bench.json").write_text(json.dumps(bench))
    names = ("traffic.csv", "bench.json", "bench.json")

    def options(paths: Sequence[str]) -> list[str]:
        pairs = zip(("--traffic", "--step-times", "--costs"), paths, strict=True)
        return [part for pair in pairs for part in pair]

    from_files = plan_of(*command, *options(names))
    with piped(*(home / name for name in names)) as paths:
        from_pipes = plan_of(*command, *options(paths))
    assert from_pipes.keys == from_files.keys != ()
    assert from_pipes.expected_us == from_files.expected_us
    assert from_pipes.predicted is not None
    assert from_pipes.evidence is not None
    assert from_pipes.evidence["traffic_source"].startswith("a pipe: ")


def test_the_answer_for_the_traffic_of_the_readme_fits_on_one_screen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = Path(__file__).parents[2]
    command = ("plan", "--config", str(root / "configs/decoder_0_6b.yaml"), "--traffic",
               str(root / "tests/data/azure_llm_code_2023.csv"))  # fmt: skip
    monkeypatch.setenv("COLUMNS", "100")
    shown = good(*command).stdout.splitlines()
    assert len(shown) <= 45
    assert re.match(
        r"Plan: \d+ graphs instead of the vllm ladder's 35 graphs; --costs estimate tells start-up and memory",
        shown[0],
    )
    warned, served, _, source = (line.split("  ")[-1].strip() for line in shown[3:7])
    assert warned.startswith("sizes for another model: give --step-times, by `cgplan bench ")
    assert served.endswith(", all on one server: if several")
    assert source.startswith("default, of another model: ")
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, good(*command).stdout.splitlines())) <= 80


@pytest.mark.parametrize(("count", "is_shown"), [(10, True), (0, False)])
def test_the_first_screen_says_how_much_of_the_traffic_runs_eagerly(
    home: Path, count: int, is_shown: bool
) -> None:
    command = (*use_traffic(home), *settings("compilation.cudagraph_mode=FULL_DECODE_ONLY"))
    rows = f"num_tokens,num_reqs,count\n5,5,30\n10,2,{count}\n"
    (home / "traffic.csv").write_text(rows)
    row = "  eager       25.0% of steps, which have no graph; max_num_seqs stays 256\n"
    assert (row in good(*command).stdout) == is_shown
    whole = row.replace("; max_num_seqs stays 256", "")
    assert (whole in good(*command, *settings("scheduler.max_num_seqs=5")).stdout) == is_shown


def test_steps_of_decode_stand_apart_from_mixed_ones(home: Path) -> None:
    """5 tokens of 5 requests run as uniform decode in 5 or 8, 10 tokens of 2 requests eagerly for 1000 us."""
    command = (
        *use_traffic(home),
        *settings(
            "compilation.cudagraph_mode=FULL_DECODE_ONLY", "compilation.cudagraph_capture_sizes=[8]"
        ),
    )
    (home / "traffic.csv").write_text("num_tokens,num_reqs,count\n5,5,30\n10,2,10\n")
    plan = plan_of(*command)
    assert plan.evidence is not None
    five = 100 + 200 * 4 / 7
    assert plan.evidence["expected_us"]["decode_us"] == pytest.approx(five)
    assert plan.evidence["expected_us"]["mixed_us"] == pytest.approx(1000)
    assert plan.expected_us == pytest.approx((3 * five + 1000) / 4)
    assert [
        point["decode_us"] for point in plan.evidence["ladders"] if point["name"] == "configured"
    ] == [300]
    assert re.search(
        r"^configured +1 +475 us +300 us +1.00 ms ", good(*command).stdout, re.MULTILINE
    )


def test_what_is_emitted_is_planned_by_given_step_times(home: Path) -> None:
    command = use_traffic(home)
    emitted = (*command[:-2], "--emit", "vllm")
    message = refused(errors.StepTimeError, *emitted)
    assert "--step-times FILE" in message
    assert "--assume-default-times" in message
    assert "sizes for another model" in good(*emitted, "--assume-default-times").stderr
    assert good(*command, "--emit", "vllm").stdout.startswith("--compilation-config")


def test_the_whole_report_as_html(home: Path) -> None:
    command = use_traffic(home)
    good(*command, "--html", "plan.html")
    (text,) = re.findall(r"<pre.*?>(.*?)</pre>", (home / "plan.html").read_text(), re.DOTALL)
    assert html.unescape(text).splitlines() == good(*command, "--verbose").stdout.splitlines()
    assert "is an input of the command" in refused(
        errors.OutputPathError, *command, "--html", "times.csv"
    )


def test_plan_says_that_there_is_no_traffic(home: Path) -> None:
    bounded = " ".join(good(*PLAN, "--memory", "2GiB").stdout.split())
    assert "note there is no traffic to plan for, so nothing was optimised" in bounded
    assert "budget.memory did not bound this plan" in bounded
    assert "note: there is no traffic to plan for" in good(*PLAN, "--emit", "vllm").stderr
    assert "no traffic to plan for" not in good(*use_traffic(home)).stdout


@pytest.mark.parametrize("traffic", [True, False], ids=["traffic", "list"])
def test_everything_is_said_once(home: Path, traffic: bool) -> None:
    """Standard output holds the emission alone, standard error all notes; a report and `--json` have them likewise."""
    mode = ("--set", "compilation.cudagraph_mode=FULL_AND_PIECEWISE")
    good("capture", "--config", "good.yaml", *mode, "--output", "run.json")
    changes = ("--set", "scheduler.max_num_seqs=64", *mode)
    command = use_traffic(home) if traffic else PLAN
    command = (*command, "--costs", "run.json", *changes, "--max-graphs", "2")
    emitted = good(*command, "--emit", "vllm")
    option, value, *rest = shlex.split(emitted.stdout)
    assert (option, rest) == ("--compilation-config", [])
    assert json.loads(value)["cudagraph_mode"] in (
        "FULL_AND_PIECEWISE",
        "FULL_DECODE_ONLY",
        "PIECEWISE",
    )
    said = unwrapped(emitted.stderr).splitlines()
    assert len(said) == len(set(said))
    about = [line for line in said if line.startswith("note: the costs of run.json")]
    assert len(about) == 2
    in_json = unwrapped(good(*command, "--json").stderr).splitlines()
    sizes_by_lane = unwrapped(
        good(*command, "--emit", "json").stderr
    ).splitlines()  # vLLM's plan has one list of sizes
    assert [line for line in sizes_by_lane if line in in_json] == in_json
    shown = good(*command, "--verbose")
    words = " ".join(shown.stdout.split())
    assert [words.count(line.removeprefix("note: ")) for line in about] == [1, 1]
    assert shown.stderr == ""
    inspected = ("inspect", "--config", "good.yaml", "--costs", "run.json", *changes)
    assert unwrapped(good(*inspected, "--json").stderr).splitlines() == about
    shown = good(*inspected)
    assert [
        " ".join(shown.stdout.split()).count(line.removeprefix("note: ")) for line in about
    ] == [1, 1]
    assert shown.stderr == ""


START = Path(__file__).parents[1] / "data" / "vllm_start.log"
BOUND = "Chunked prefill is enabled with max_num_batched_tokens={}\n"


def test_plan_for_vllm_without_a_configuration(home: Path) -> None:
    use_traffic(home)
    vllm = (
        "plan",
        "--vllm",
        '{"cudagraph_mode": "FULL_DECODE_ONLY", "backend": "eager"}',
        "--max-num-seqs",
        "8",
    )
    bounds = ("--max-num-batched-tokens", "64", "--traffic", "traffic.csv", "--max-graphs", "2")
    command = (*vllm, *bounds, "--step-times", "times.csv", "--costs", str(START))
    plan = plan_of(*command)
    assert (plan.capture_sizes, plan.max_num_seqs, plan.budget) == ((2, 7), 8, {"max_graphs": 2})
    assert plan.notes[1] == "backend does not change what is captured"
    assert plan.predicted is not None
    assert plan.predicted.estimated
    emitted = good(*command, "--emit", "vllm")
    assert json.loads(shlex.split(emitted.stdout)[1])["cudagraph_capture_sizes"] == [2, 7]
    assert "note: backend does not change what is captured" in emitted.stderr
    steps = plan_of(*vllm, *bounds, "--step-times", str(START)).evidence
    assert steps is not None
    assert steps["times_source"] == f"the log of vLLM, {START}"
    (home / "other.log").write_text(START.read_text().replace("model='m'", "model='b/n'"))
    for costs in ("other.log", str(START)):
        both = ("--step-times", str(START), "--costs", costs)
        of_both = plan_of(*vllm, *bounds, *both).evidence
        assert of_both is not None
        told = f"the step times of {START} are of m, the costs of b/n"
        assert (told in of_both["unsure"]) == (costs == "other.log")
    for wrong in (
        (*vllm, "--config", "good.yaml"),
        ("plan", "--max-num-seqs", "8"),
        (*PLAN, "--blackwell"),
    ):
        assert cgplan_command(*wrong).exit_code == 2
    assert "--max-num-seqs: found 0" in refused(
        errors.ConfigError, "plan", "--vllm", "{}", "--max-num-seqs", "0"
    )


def test_vllm_check(home: Path) -> None:
    log = home / "start.log"
    log.write_text(BOUND.format(8192) + START.read_text())
    bounds = (
        "--max-num-seqs",
        "6",
        "--max-num-batched-tokens",
        "8192",
        "--num-speculative-tokens",
        "6",
    )
    result = cgplan_command(
        "vllm", "check", "--vllm", '{"max_cudagraph_capture_size": 42}', *bounds, "--runner", "v1"
    )
    assert result.exit_code == errors.PlanError.exit_code
    assert (
        "decode batches, by requests of 7 tokens: 1 to 5 in FULL graphs, 6 eagerly\n"
        in result.stdout
    )
    assert "max_cudagraph_capture_size 42 is truncated to 35" in unwrapped(result.stderr)
    v1 = unwrapped(good("vllm", "check", *bounds, "--runner", "v1").stdout)
    assert (
        "vLLM captures 16 graphs in mode FULL_AND_PIECEWISE, sizes in tokens: 7 to 56 by 7, 70, 77\n"
        in v1
    )
    decode = good("vllm", "check", "--vllm", '{"cudagraph_mode": "FULL_DECODE_ONLY"}', *bounds[:2])
    assert (
        "captures 4 graphs in mode FULL_DECODE_ONLY, sizes in tokens: 1, 2, 4, 6\n" in decode.stdout
    )
    drafted = (*bounds, "--speculative-method", "mtp")
    same = (*drafted[:-1], "deepseek_mtp", "--compilation-config", "{}")
    assert good("vllm", "check", *same).stdout == good("vllm", "check", *drafted).stdout
    shown = unwrapped(good("vllm", "check", *drafted, "--log", str(log)).stdout)
    assert "vLLM captures 49 graphs (26 of them of the draft model) in mode" in shown
    assert re.search(r"start with 9 graphs \(.*\), not with 23 graphs and 26 of the draft", shown)
    assert "by the log the graphs took 512 MiB and 3 s" in shown
    assert re.search(
        r"predicted: \S+ \S+ and \S+ s, by the log of vLLM, \S+ \(no graph of the draft model\)",
        shown,
    )
    assert re.search(r"\(\d+\.\d\d GiB on each GPU, \d\.\d\d GiB less than in the log\): ", shown)
    assert unwrapped(good("vllm", "check", *drafted, "--costs", str(log)).stdout) == shown
    as_logged = ("--max-num-batched-tokens", "8,192")
    assert good("vllm", "check", *as_logged).stdout == good("vllm", "check").stdout
    for memory in ("80", "80GiB"):
        same_gpu = good("vllm", "check", *drafted, "--log", str(log), "--gpu-memory", memory)
        assert unwrapped(same_gpu.stdout) == shown
    less = good("vllm", "check", *drafted, "--log", str(log), "--gpu-memory-utilization", "0.5")
    assert "80 GiB of the GPU x --gpu-memory-utilization 0.5, less " in unwrapped(less.stdout)
    none = cgplan_command("vllm", "check", *drafted, "--log", str(log), "--gpu-memory", "2")
    assert none.exit_code == errors.BudgetError.exit_code
    assert "no KV cache fits: " in unwrapped(none.stderr)
    assert "predicted: " in none.stdout
    assert "(10.10 GiB)" not in none.stdout
    refused_log = cgplan_command("vllm", "check", *bounds, "--log", "good.yaml")
    assert refused_log.exit_code == errors.ReportError.exit_code
    told = unwrapped(refused_log.stderr)
    assert "good.yaml: no line `Graph capturing finished" in told
    assert "it begins with '" in told


def test_a_start_is_checked_against_the_plan(home: Path) -> None:
    """By its graphs, with what was predicted of them; 9 are those of the log."""
    log = home / "start.log"
    log.write_text(BOUND.format(8192) + START.read_text())
    for name, sizes in (
        ("same.json", "[1, 2, 4, 8, 16]"),
        ("fewer.json", "[1, 8]"),
        ("others.json", "[1, 2, 3, 8, 16]"),
    ):
        command = (
            "plan",
            "--vllm",
            f'{{"cudagraph_capture_sizes": {sizes}, "custom_ops": ["+rms_norm"]}}',
            "--max-num-seqs",
            "8",
        )
        good(*command, "--costs", str(log), "--output", name)
    checked = ("vllm", "check", "--log", str(log), "--plan")
    shown = unwrapped(good(*checked, "same.json").stdout)
    assert shown.startswith("The plan has 9 graphs")
    assert "predicted: 512 MiB and 3 s, by the log of vLLM" in shown
    assert "as asked for: 9 graphs (5 PIECEWISE, 4 FULL)\n" in shown
    assert "by the log the graphs took 512 MiB and 3 s" in shown
    counts = r"Capturing CUDA graphs .*\n|.*Profiling CUDA graph memory.*\n"
    Path("barless.log").write_text(re.sub(counts, "", START.read_text()))
    unsure = unwrapped(good(*checked[:2], "--log", "barless.log", "--plan", "same.json").stdout)
    assert "warning: the log has neither progress bars nor" in unsure
    assert "number of graphs was not compared; keep standard error (2>&1)" in unsure
    assert "as asked for" not in unsure
    assert "neither progress bars" not in shown
    Path("eager.log").write_text("config: model='m', enforce_eager=True, compilation_config={}")
    eager = "eager.log: this start has --enforce-eager: give the log of the start with graphs"
    for given in (("vllm", "check", "--log", "eager.log"), (*command, "--costs", "eager.log")):
        assert eager in refused(errors.ReportError, *given)
    Path("heavy.log").write_text(START.read_text().replace("took 0.50 GiB", "took 0.95 GiB"))
    heavy = ("vllm", "check", "--log", "heavy.log", "--plan", "same.json")
    far = cgplan_command(*heavy)
    assert far.exit_code == errors.PlanMismatchError.exit_code
    told = unwrapped(far.stderr)
    assert "same.json: the graphs took 973 MiB, 512 MiB were predicted" in told
    assert "Plan again with --costs heavy.log" in told
    Path("heavy.log").write_text(START.read_text().replace("took 0.50 GiB", "took 0.85 GiB"))
    assert "were predicted" not in good(*heavy).stdout
    for tokens, warned in ((2048, True), (8192, False)):
        text = BOUND.format(tokens) + START.read_text().replace("finished in 3", "finished in 6")
        Path("slow.log").write_text(text)
        slow = good(*heavy[:3], "slow.log", *heavy[4:])
        assert "warning: the captures took 6 s, 3 s were predicted\n" in slow.stdout
        warning = "warning: the log is of --max-num-batched-tokens 2048, not 8192"
        assert (warning in unwrapped(slow.stdout)) is warned
    result = cgplan_command(*checked, "fewer.json")
    assert result.exit_code == errors.PlanMismatchError.exit_code
    assert result.stdout.startswith("The plan has 4 graphs")
    options = ("--vllm", '{"cudagraph_capture_sizes": [1, 8]}', "--max-num-seqs", "8")
    of_options = unwrapped(good(*checked[:-1], *options).stdout)
    line = re.compile(r"--kv-cache-memory-bytes \d+ .* for graphs")
    assert line.findall(unwrapped(result.stdout)) == [], "the start had other graphs"
    assert line.findall(shown)
    assert line.findall(of_options) not in ([], line.findall(shown))
    said = (
        "fewer.json: the log is of a start with 9 graphs (5 PIECEWISE, not 2; 4 FULL, not 2; with sizes 2, 4, 16), "
        "not with 4 graphs"
    )
    assert said in unwrapped(result.stderr)
    of_costs = (
        f"The costs of the plan are of {log}: with it give the last lines above in place of --plan"
    )
    assert of_costs in unwrapped(result.stderr)
    unlike = cgplan_command(*heavy[:3], "slow.log", "--plan", "fewer.json")
    assert "were predicted" not in unlike.stdout, "the graphs are others"
    assert (
        "Start vLLM with the plan's options, the last lines above, or give its own plan"
        in unwrapped(unlike.stderr)
    )
    other = cgplan_command(*checked, "others.json")
    assert other.exit_code == errors.PlanMismatchError.exit_code
    assert "without sizes 3; with sizes 4" in unwrapped(other.stderr)
    pasted = shlex.split(other.stdout.splitlines()[-1])
    assert json.loads(pasted[1])["cudagraph_capture_sizes"] == [1, 2, 3, 8, 16]
    assert json.loads(pasted[1])["custom_ops"] == ["+rms_norm"]
    assert pasted[2:4] == ["--max-num-seqs", "8"]
    earlier = str(START.parent / "golden" / "plan_ladder.json")
    assert "Make the plan again with this version" in refused(errors.ReportError, *checked, earlier)
    Path("uncounted.log").write_text("Graph capturing finished in 3 secs, took 0.50 GiB")
    uncounted = ("vllm", "check", "--plan", "same.json", "--log", "uncounted.log")
    assert "does not say how many graphs" in refused(errors.ReportError, *uncounted)
    for option in (("--vllm", "{}"), ("--max-num-seqs", "8")):
        refusal = cgplan_command(*checked, "same.json", *option)
        assert refusal.exit_code == 2
        assert "--plan FILE holds vLLM's options" in refusal.stderr


def test_a_start_whose_mode_was_lowered_is_planned_as_it_ran(home: Path) -> None:
    """Also by its step times alone; a plan of before is refused with what to type."""
    use_traffic(home)
    first, _, rest = START.read_text().partition("\n")
    change = (
        "CUDAGraphMode.FULL_AND_PIECEWISE is not supported with FlexBackend backend (support: "
        "AttentionCGSupport.NEVER); setting cudagraph_mode=PIECEWISE"
    )
    lowered = re.sub(r"Capturing CUDA graphs \(decode.*\n|, FULL=4 \(largest=8\)", "", rest)
    Path("low.log").write_text(f"{first}\n{change}\n{lowered}")
    options = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64")
    command = ("plan", "--vllm", "{}", *options, "--traffic", "traffic.csv")
    for given in (
        ("--step-times", "low.log"),
        ("--step-times", "low.log", "--costs", "low.log"),
        ("--step-times", str(START), "--costs", "low.log"),
        ("--assume-default-times", "--costs", "low.log"),
    ):
        plan = plan_of(*command, *given)
        assert {plan.mode, *(mode for mode, _ in plan.keys)} == {CUDAGraphMode.PIECEWISE}
        assert plan.emission is not None
        assert '"cudagraph_mode": "PIECEWISE"' in plan.emission.options
        assert plan.settings.compilation.attention_support.name == "NEVER"
        said = "vLLM lowered the mode to PIECEWISE: its attention_support is NEVER"
        assert plan.evidence is not None
        assert [*plan.evidence["unsure"]].count(said) == 1
    above = good(*command, "--step-times", "low.log", "--costs", "low.log").stdout
    above = unwrapped(above.partition("  sizes ")[0])
    assert "vLLM lowered the mode to PIECEWISE: its attention_support is NEVER" in above
    assert "FULL_AND_PIECEWISE -> PIECEWISE: attention_support is NEVER" in above
    assert plan_of("inspect", "--vllm", "{}", *options, "--costs", "low.log").num_graphs == 5
    shown = good("vllm", "check", *options, "--log", "low.log").stdout
    assert "vLLM captures 5 graphs in mode PIECEWISE" in shown
    told = "only its log tells"
    logged = cgplan_command("vllm", "check", *options, "--log", "low.log").stderr
    assert told not in unwrapped(logged), "the log has told it"
    assert told in unwrapped(cgplan_command("vllm", "check", *options).stderr)
    for given, noted in ((("--step-times", "low.log"), False), (("--insurance", "0"), True)):
        assert any(told in text for text in plan_of(*command, *given).notes) is noted
    assert "as asked for: 5 graphs (5 PIECEWISE)\n" in shown
    good("plan", "--vllm", "{}", *options, "--output", "before.json")
    Path("lower.log").write_text(f"{change}\n{first}\n{lowered}")
    for log in ("low.log", "lower.log"):
        before = cgplan_command("vllm", "check", "--plan", "before.json", "--log", log)
        assert before.exit_code == errors.PlanMismatchError.exit_code
        remedy = f"remedy: vLLM lowered the mode: plan again with --costs {log}"
        assert remedy in unwrapped(before.stderr)
    good(*command, "--step-times", "low.log", "--costs", "low.log", "--output", "after.json")
    after = cgplan_command("vllm", "check", "--plan", "after.json", "--log", "low.log")
    assert "mode FULL" not in after.output


def test_a_start_that_forgot_its_drafts_is_another(home: Path) -> None:
    """It has as many graphs of these sizes as the plan has of both models."""
    use_traffic(home)
    drafts = ("--num-speculative-tokens", "1", "--speculative-method", "mtp")
    command = (
        "plan",
        "--vllm",
        '{"cudagraph_capture_sizes": [2, 4, 8, 16]}',
        "--max-num-seqs",
        "16",
    )
    good(*command, *drafts, "--output", "drafted.json")
    good(*command, "--output", "alone.json")
    text = START.read_text().replace("[1, 2, 4, 8, 16]", "[2, 4, 8, 16]").replace("5/5", "4/4")
    text = text.replace("PIECEWISE=5", "PIECEWISE=4").replace(
        "FULL=4 (largest=8", "FULL=4 (largest=16"
    )
    form = "SpeculativeConfig(method='mtp', model='m', num_spec_tokens={})"
    starts = {"drafted": form.format(1), "alone": "None", "twice": form.format(2)}
    for name, start in starts.items():
        Path(f"{name}.log").write_text(
            text.replace("model='m'", f"model='m', speculative_config={start}")
        )
    checked = ("vllm", "check", "--plan")
    for name in ("drafted", "alone"):
        good(*checked, f"{name}.json", "--log", f"{name}.log")
    forgot = cgplan_command(*checked, "drafted.json", "--log", "alone.log")
    assert forgot.exit_code == errors.PlanMismatchError.exit_code
    assert (
        "a start with 8 graphs (4 PIECEWISE; 4 FULL; 0 speculative tokens, not 1), not "
        "with 8 graphs and 8 of the draft model" in unwrapped(forgot.stderr)
    )
    assert "--kv-cache-memory-bytes: the log has" not in unwrapped(forgot.stdout)
    other = cgplan_command(*checked, "drafted.json", "--log", "twice.log")
    assert other.exit_code == errors.PlanMismatchError.exit_code
    assert "; 2 speculative tokens, not 1)" in unwrapped(other.stderr)
    *_, hint, options = forgot.stdout.splitlines()
    assert hint == (
        "made for 1 speculative token: add --speculative-config to vLLM, and `--spec-method mtp "
        "--spec-tokens 1` to `cgplan vllm check`"
    )
    assert options.startswith("--compilation-config")
    more = cgplan_command(*checked, "alone.json", "--log", "drafted.log")
    assert more.exit_code == errors.PlanMismatchError.exit_code
    assert "(4 PIECEWISE; 4 FULL; 1 speculative token, not 0)" in unwrapped(more.stderr)
    priced = good(*command, *drafts, "--costs", "twice.log", "--verbose").stdout
    assert "start with 8 graphs (4 PIECEWISE; 4 FULL; 2 speculative tokens, not 1)" in unwrapped(
        priced
    )
    for name, is_priced in (("twice", True), ("alone", False)):
        given = ("--traffic", "traffic.csv", "--step-times", "times.csv", "--costs", f"{name}.log")
        first, _, _ = good(*command, *drafts, *given).stdout.partition("verdict")
        assert (
            "start-up and memory are without the draft model's" in " ".join(first.split())
        ) is not is_priced


def test_plan_diff_shows_costs_that_one_side_has(home: Path) -> None:
    command = ("plan", "--vllm", '{"cudagraph_capture_sizes": [1, 8]}', "--max-num-seqs", "8")
    good(*command, "--output", "old.json")
    good(
        *command,
        "--costs",
        str(START),
        "--set",
        "compilation.cudagraph_capture_sizes=[8]",
        "--output",
        "new.json",
    )
    shown = good("plan", "diff", "old.json", "new.json").stdout
    assert re.search(r"^memory +- +[\d.]+ MiB +- +-$", shown, re.MULTILINE)
    assert re.search(r"^start-up +- +667 ms +- +-$", shown, re.MULTILINE)
    assert re.search(r"^PIECEWISE +- +1 +8$", shown, re.MULTILINE)


def test_plan_diff_lists_no_model_that_an_engine_has_by_itself(home: Path) -> None:
    good("plan", "--vllm", "{}", "--max-num-seqs", "8", "--output", "vllm.json")
    good("plan", "good.yaml", "--output", "own.json")
    assert "model." not in good("plan", "diff", "own.json", "vllm.json").stdout


def test_sizes_that_sequence_parallelism_may_drop_are_not_to_be_pasted() -> None:
    bounds = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64")
    for sizes, is_to_paste in (([1, 2, 4], False), ([8, 16], True)):
        given = {"pass_config": {"enable_sp": True}, "cudagraph_capture_sizes": sizes}
        shown = good("plan", "--vllm", json.dumps(given), *bounds).stdout
        assert ("\n--compilation-config" in shown) is is_to_paste
        assert ("For multiples of 8" in unwrapped(shown)) is not is_to_paste


def test_a_log_of_ranks_asks_for_their_options(home: Path) -> None:
    use_traffic(home)
    log = START.read_text().replace("model='m',", "model='m', data_parallel_size=4,")
    other = [
        line.replace("Engine 000", "Engine 001") for line in log.splitlines() if "Iter" in line
    ]
    (home / "ranks.log").write_text("\n".join([log, *other]))
    command = ("plan", "--vllm", "{}", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")
    requests = "TIMESTAMP,ContextTokens,GeneratedTokens\n0,5,3\n1,9,4\n"
    (home / "requests.csv").write_text(requests)
    files = ("--traffic", "requests.csv", "--step-times", "ranks.log")
    log_of = "warning the log is of 4 data-parallel ranks: "
    told = f"{log_of}for requests of all give --data-parallel-size 4"
    together = ("--set", "distributed.data_parallel_sync=true")
    mixture = f"{log_of}for a mixture of experts give {' '.join(together)}"
    for given, is_told in (((), True), (("-dp", "4"), False)):
        shown = " ".join(good(*command, *files, *given).stdout.split())
        assert (told in shown) is is_told
        assert mixture in shown
    assert log_of not in " ".join(good(*command, *files, "-dp", "4", *together).stdout.split())
    good(*command, *files, "--output", "plan.json")
    checked = good("plan", "check", "plan.json", *files).stdout
    assert told in " ".join(checked.split())
    default = good(*command, *files[:2], "--costs", "ranks.log").stdout
    assert told in " ".join(default.split())


def test_costs_of_another_number_of_adapters_are_a_warning_above_the_sizes(home: Path) -> None:
    use_traffic(home)
    given = "INFO non-default args: {'max_num_seqs': 8, 'enable_lora': True, 'max_loras': 2}\n"
    (home / "start.log").write_text(given + START.read_text())
    command = ("plan", "--vllm", "{}", "--max-num-seqs", "8", "--max-num-batched-tokens", "64")
    files = ("--traffic", "traffic.csv", "--step-times", "times.csv", "--costs", "start.log")
    for most, is_told in (("4", True), ("2", False)):
        shown = good(*command, "--enable-lora", "--max-loras", most, *files).stdout
        assert ("--max-loras 2, not 4" in " ".join(shown.split())) is is_told
        head, *_ = re.split(r"^ *sizes ", shown, flags=re.MULTILINE)
        assert (" warning the log is of a start with " in " ".join(head.split())) is is_told


def test_plan_diff_names_another_speculative_method(home: Path) -> None:
    """The model's graphs are the same, those of a draft model go."""
    for method in ("eagle3", "ngram"):
        drafts = ("--num-speculative-tokens", "3", "--speculative-method", method)
        good("plan", "--vllm", "{}", "--max-num-seqs", "8", *drafts, "--output", f"{method}.json")
    shown = good("plan", "diff", "eagle3.json", "ngram.json").stdout
    assert re.search(r'^ +speculative\.method +"eagle3" -> "ngram"$', shown, re.MULTILINE)
    assert "No graph of the model is added or removed." in shown
    old, new = map(load_plan, ("eagle3.json", "ngram.json"))
    row = rf"^graphs +{old.num_graphs} +{new.num_graphs} +-{len(old.draft_keys)} "
    assert re.search(row, shown, re.MULTILINE)


def test_plan_diff(home: Path) -> None:
    for name, options in {
        "old": (),
        "new": settings("compilation.cudagraph_capture_sizes=[1, 8]"),
        "bounded": ("--memory", "2GiB", "--max-graphs", "3"),
    }.items():
        good(*PLAN, *options, "--output", f"{name}.json")
    shown = good("plan", "diff", "old.json", "new.json").stdout
    assert shown.startswith("old.json -> new.json\n")
    assert re.search(r"^FULL +8 +2, 4 +1$", shown, re.MULTILINE)
    assert re.search(r"^graphs +3 +2 +-1 +-33\.3%$", shown, re.MULTILINE)
    assert "settings the same" in " ".join(shown.split())
    shown = good("plan", "diff", "old.json", "bounded.json").stdout
    assert re.search(r"^  budget.memory +absent -> 2048 MiB$", shown, re.MULTILINE)
    assert re.search(r"^  budget.max_graphs +absent -> 3$", shown, re.MULTILINE)
    data = json.loads(good("plan", "diff", "old.json", "new.json", "--json").stdout)
    assert data["lanes"][0]["removed"] == [2, 4]
    good("capture", *PLAN[1:], "--output", "run.json")
    message = refused(errors.ReportError, "plan", "diff", "run.json", "run.json")
    assert "run.json is a report of kind capture, not plan" in message
    message = refused(errors.ReportError, "plan", "diff", "none.json", "run.json")
    assert "no such file: none.json" in message
    assert "Did you mean 'new.json'?" in message


def test_steps_with_adapters_may_have_a_log_of_their_own(home: Path) -> None:
    """FULL graphs of a log run decode alone, which a table of its medians would not tell."""
    slower = re.sub(r"time: (\d+)", lambda found: f"time: 1{found[1]}", START.read_text())
    Path("lora.log").write_text(slower)
    rows = "".join(f"{n},{n},true,{loras},5\n" for n in (2, 8) for loras in (0, 1))
    Path("loras.csv").write_text(f"num_tokens,num_reqs,uniform,num_active_loras,count\n{rows}")
    bounds = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64")
    command = ("plan", "--vllm", "{}", *bounds, "--traffic", "loras.csv")
    adapters = ("--enable-lora", "--max-loras", "2")
    plain, loras = ("--step-times", str(START)), ("--lora-step-times", "lora.log")
    unmeasured = " ".join(good(*command, *adapters, *plain).stdout.split())
    assert "steps with adapters were not measured: taken as 10% longer; --lora-step-" in unmeasured
    good(*command, *adapters, *plain, *loras, "--output", "plan.json")
    shown = " ".join(good("inspect", "plan.json").stdout.split())
    assert "were not measured: taken as 10%" not in shown
    assert f"step times the log of vLLM, {START}; with adapters the log of vLLM, lora.log" in shown
    assert "warning with adapters: FULL was measured at 4 tokens only" in shown
    assert "mode FULL was not weighed: FULL graphs were timed for uniform decode alone" in shown
    plan = load_plan("plan.json")
    assert plan.evidence is not None
    times = StepTimes.model_validate(plan.evidence["step_times"])
    assert (times.of(CUDAGraphMode.FULL, 4), times.of(CUDAGraphMode.FULL, 4, 3)) == (2200, 12200)
    assert plan.emission is not None
    assert plan.emission.command.endswith(f" --step-times {START} --lora-step-times lora.log")
    for given in ((*command, *plain, *loras), (*command, *adapters, *loras)):
        message = refused(errors.ConfigError, *given)
        assert "--lora-step-times lora.log: no other step times, or no adapters" in message


def test_a_plan_on_other_traffic(home: Path) -> None:
    """Graphs of 2 and 7 tokens; then batches have 4 tokens, which take 1200/7 instead of 600/7 us above 100."""
    command = (*use_traffic(home), "--max-graphs", "2", "--insurance", "0")
    good(*command, "--output", "plan.json")
    (home / "tomorrow.csv").write_text(
        "num_tokens,num_reqs,uniform,count\n4,4,true,90\n2,1,false,10\n"
    )
    check = ("plan", "check", "plan.json", "--step-times", "times.csv", "--traffic")
    same = PlanCheck.model_validate_json(
        good(*check, "traffic.csv", "--max-regret", "0%", "--json").stdout
    )
    assert (same.regret, same.decode_regret) == (0, 0)
    four, in_seven, two = 100 + 600 / 7, 100 + 1200 / 7, 100 + 200 / 7
    failed = cgplan_command(*check, "tomorrow.csv", "--max-regret", "46%", "--json")
    assert failed.exit_code == errors.RegretError.exit_code
    anew = (
        "cgplan plan FILE --traffic tomorrow.csv --output new-plan.json --insurance 0.0 --step-times "
        "times.csv"
    )
    assert f"`{anew} --set budget.max_graphs=2`" in unwrapped(failed.stderr)
    config = '{"cudagraph_mode": "FULL", "pass_config": {"enable_sp": true}}'
    drafts = (
        "--enable-lora",
        "--max-loras",
        "2",
        "--speculative-method",
        "ngram",
        "--num-speculative-tokens",
        "1",
    )
    vllm = ("--vllm", config, "--max-num-seqs", "16", "--max-graphs", "3", *drafts)
    bounded = (*vllm, "--kv-cache-tokens", "9000", "--mode", "keep", "--output", "vllm.json")
    good("plan", *command[3:-4], *bounded)
    (home / "low.csv").write_text("num_tokens,num_reqs,uniform,count\n2,1,true,90\n")
    missed = cgplan_command(
        "plan", "check", "vllm.json", "--traffic", "low.csv", "--max-regret", "0%"
    )
    told = (
        """`cgplan plan --vllm '{"pass_config": {"enable_sp": true}}' --max-num-seqs 16 """
        "--max-num-batched-tokens 8192 --enable-lora --max-loras 2 --num-speculative-tokens 1 "
        "--speculative-method ngram --traffic low.csv --output new-vllm.json --kv-cache-tokens 9000 "
        "--step-times times.csv --set budget.max_graphs=3`"
    )
    assert told in unwrapped(missed.stderr)
    found = PlanCheck.model_validate_json(failed.stdout)
    assert found.regret == pytest.approx(
        (0.9 * in_seven + 0.1 * two) / (0.9 * four + 0.1 * two) - 1
    )
    assert found.decode_regret == pytest.approx(in_seven / four - 1)
    assert found.warnings == ()
    assert found.verdict.startswith("regret ")
    good(*command[:-1], "0.25", "--objective", "mean", "--output", "mean.json")
    (home / "low.csv").write_text("num_tokens,num_reqs,uniform,count\n1,1,true,90\n")
    missed = cgplan_command(*check[:2], "mean.json", *check[3:], "low.csv", "--max-regret", "0%")
    assert "--objective mean --insurance 0.25 --step-times" in unwrapped(missed.stderr)
    unknown = cgplan_command(*check[:3], *check[-1:], "tomorrow.csv", "--max-regret", "46%")
    assert " --step-times FILE --set budget.max_graphs=2`" in unwrapped(unknown.stderr)
    assert [(use.size, use.share, use.step_us, use.own_us) for use in found.uses] == [
        (2, 0.1, pytest.approx(two), pytest.approx(two)), (7, 0.9, pytest.approx(in_seven), pytest.approx(four)),
    ]  # fmt: skip
    shown = good(*check, "tomorrow.csv", "--max-regret", "0.47").stdout
    assert re.search(r"^this plan +2 +257 us +271 us +129 us +41.5% +- +- +-$", shown, re.MULTILINE)
    assert re.search(r"^FULL: 7 +90.0% +42.9% +271 us +186 us +30.0%$", shown, re.MULTILINE)
    assert "of decode, of mixed: " in shown
    (home / "decode.csv").write_text("num_tokens,num_reqs,uniform,count\n4,4,true,90\n")
    assert "of decode" not in good(*check, "decode.csv").stdout, "it repeats the regret"
    (home / "check.json").write_text(failed.stdout)
    assert good("inspect", "check.json").stdout.splitlines()[3:] == shown.splitlines()[3:]
    for share in ("some", "5", "-1%"):
        assert cgplan_command(*check, "tomorrow.csv", "--max-regret", share).exit_code == 2


def test_a_check_tells_the_steps_without_graphs_first(home: Path) -> None:
    command = (*use_traffic(home), "--max-graphs", "1", "--insurance", "0")
    good(*command, "--output", "plan.json")
    (home / "large.csv").write_text("num_tokens,count\n8,9\n1,1\n")
    plan = plan_of(*command)
    eager = 0.9 if plan.max_capture_size < 8 else 0
    assert eager
    check = ("plan", "check", "plan.json", "--traffic", "large.csv", "--json")
    found = PlanCheck.model_validate_json(good(*check).stdout)
    assert found.verdict.startswith("90.0% of the steps run eagerly; regret ")


def test_a_ladder_that_is_better_is_a_regret_where_no_budget_bars_it(home: Path) -> None:
    (home / "tomorrow.csv").write_text(
        "num_tokens,count\n" + "".join(f"{n},1\n" for n in range(1, 9))
    )
    for budget, name in ((), "configured"), (("--max-graphs", "1"), "planned anew"):
        sizes = "compilation.cudagraph_capture_sizes=[1, 2, 3, 4, 5, 6, 7, 8]"
        command = (*use_traffic(home), *settings(sizes), *budget)
        plan = plan_of(*command)
        plan = plan.model_copy(update={"keys": plan.keys[:1]})
        (home / "plan.json").write_text(plan.model_dump_json())
        check = (
            "plan",
            "check",
            "plan.json",
            "--step-times",
            "times.csv",
            "--traffic",
            "tomorrow.csv",
            "--json",
        )
        found = PlanCheck.model_validate_json(good(*check).stdout)
        best = next(point for point in found.points if point.name == name)
        assert found.regret == pytest.approx(found.points[0].expected_us / best.expected_us - 1)


def test_empty_options_of_plan_and_files_that_it_would_write_over(home: Path) -> None:
    Path("h.csv").write_text("num_tokens,count\n1,10\n3,20\n")
    traffic = (*PLAN, "--traffic", "h.csv")
    for option in ("--memory", "--capture-time"):
        result = cgplan_command(*traffic, option, "")
        assert result.exit_code == 2
        assert f"{option} is empty" in result.stderr
    for option in ("--html", "--output"):
        assert "error: cannot" in refused(errors.OutputPathError, *traffic, option, "")
    for over in ("h.csv", "good.yaml"):
        assert f"{over} is an input of the command" in refused(
            errors.OutputPathError, *traffic, "--output", over
        )
    assert Path("h.csv").read_text().startswith("num_tokens")
    none = settings("compilation.cudagraph_mode=NONE")
    assert (
        "nothing is captured: the resolved cudagraph_mode is NONE" in good(*traffic, *none).stdout
    )


# --- several sizes ----------------------------------------------------------------------------------------------

SIZED = settings(
    "compilation.cudagraph_capture_sizes=null",
    "dims={batch: {max: 16}, length: {max: 64}}",
    "inputs.x.shape=[batch, length, 8]",
    "model.output_shapes=[[batch, length, 4]]",
)


def sized(home: Path, *more: str) -> tuple[str, ...]:
    (home / "lengths.csv").write_text(
        "batch,length,count\n1,60,100\n3,20,200\n12,10,50\n16,9,5\n20,9,1\n"
    )
    return (*PLAN, *SIZED, "--traffic", "lengths.csv", *more)


def test_plan_for_batches_of_several_sizes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = sized(home, "--max-graphs", "3", "--verbose")
    shown = good(*command, "--output", "plan.json").stdout
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split()[0] == "verdict"
    assert re.search(
        r"verdict steps [\d.]+% shorter than with powers of two \(\d+ graphs\)",
        " ".join(shown.split()),
    )
    assert "no step times were given" in " ".join(" ".join(lines).split())
    assert [line.split()[0] for line in lines if line.startswith(("this plan", "powers"))] == [
        "this",
        "powers",
    ]
    assert "FULL: 3 x 20" in shown
    assert good("inspect", "plan.json").stdout == shown
    saved = load_report("plan.json")
    assert isinstance(saved, Plan)
    assert {key.box for _, key in saved.keys} == {(1, 60), (3, 20), (16, 10)}
    assert saved.expected_us == pytest.approx((100 * 60 + 200 * 60 + 55 * 160) / 355)


def test_boxes_of_a_plan_are_captured_and_measured(home: Path) -> None:
    """Full grids are measured whole: their bench gives the times of the next plan."""
    good(*sized(home, "--max-graphs", "3"), "--output", "plan.json")
    captured = json.loads(
        good("capture", *PLAN[1:], *SIZED, "--plan", "plan.json", "--json").stdout
    )
    assert {(r["descriptor"]["num_tokens"], *r["descriptor"]["sizes"]) for r in captured["records"]} == {
        (1, 60), (3, 20), (16, 10),
    }  # fmt: skip
    grid = settings(
        "dims={batch: {max: 16, sizes: [1, 16]}, length: {max: 64, sizes: [8, 64]}}",
        "report.sizes=null",
    )
    good("bench", *PLAN[1:], *SIZED, *grid, "--output", "bench.json")
    shown = " ".join(good(*sized(home, "--step-times", "bench.json")).stdout.split())
    assert "warning the step times of bench.json are those of cpu (tape), not of a GPU" in shown


def test_a_size_that_runs_in_larger_boxes_is_told_with_step_times_too(home: Path) -> None:
    grid = settings("dims={batch: {max: 16}, length: {max: 64, sizes: [20, 64]}}")
    (home / "times.csv").write_text("batch,length,microseconds\n1,20,5\n16,20,5\n1,64,6\n16,64,6\n")
    command = sized(home, *grid, "--max-graphs", "1", "--step-times", "times.csv", "--json")
    unsure = (Plan.from_json(good(*command).stdout).evidence or {})["unsure"]
    assert any("batches of length 20 run in larger boxes" in text for text in unsure)


def test_memory_binds_boxes(home: Path) -> None:
    """Of an estimate, and of a capture's report, which the captured plan then meets."""
    command = sized(home, "--json")
    good(
        "capture", *PLAN[1:], *SIZED, *settings("dims.batch.sizes=[1, 16]"), "--output", "run.json"
    )
    for costs in ("estimate", "measure", "run.json"):
        free = Plan.from_json(good(*command, "--costs", costs).stdout)
        assert free.predicted is not None
        limit = f"{free.predicted.total_bytes - 1}B"
        bound = Plan.from_json(good(*command, "--costs", costs, "--memory", limit).stdout)
        assert bound.predicted is not None
        assert bound.predicted.total_bytes < free.predicted.total_bytes
        assert (free.evidence or {})["binding"] == []
        assert (bound.evidence or {})["binding"] == ["memory"]
        assert "one for all takes" in refused(
            errors.BudgetError, *command, "--costs", costs, "--memory", "1B"
        )
    shown = good(*command[:-1], "--memory", "9B", "--verbose").stdout
    assert "budget.memory not looked at" in " ".join(shown.split()), shown


def test_plan_for_batches_of_several_sizes_by_their_times(home: Path) -> None:
    (home / "times.csv").write_text(
        "batch,length,microseconds\n1,1,100\n16,1,100\n1,64,100\n16,64,500\n"
    )
    shown = good(*sized(home, "--step-times", "times.csv")).stdout
    assert "no step times were given" not in shown
    assert "times.csv" in shown


def test_what_a_plan_of_several_sizes_refuses(home: Path) -> None:
    for option in (("--speedup", "2"), ("--emit", "vllm")):
        assert f"{option[0]}" in refused(errors.ConfigError, *sized(home, *option))
    made = "traffic={request_rate: 1, prompt_median: 5, prompt_p95: 9, output_median: 4, output_p95: 8}"
    assert "`traffic` section" in refused(errors.ConfigError, *PLAN, *SIZED, *settings(made))
    good(*sized(home), "--output", "plan.json")
    check = ("plan", "check", "plan.json", "--traffic", "lengths.csv")
    assert "has several sizes (batch, length)" in refused(errors.PlanError, *check)
    (home / "other.csv").write_text("num_tokens,count\n1,1\n")
    told = refused(errors.TrafficError, *sized(home)[:-1], "other.csv")
    assert "unknown column 'num_tokens'" in told
    assert "batch, length" in told
    (home / "times.csv").write_text("batch,length,microseconds\n1,1,1\n2,2,2\n")
    told = refused(errors.StepTimeError, *sized(home, "--step-times", "times.csv"))
    assert "no times of a full grid" in told


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("plan --vllm --max-num-seqs 256", "--vllm '{}' --max-num-seqs"),
        ("vllm check --vllm --max-num-seqs 256", "--vllm '{}' --max-num-seqs"),
        ("plan vllm serve a/b --max-num-seqs 256 --port 80", "'vllm'. Of vLLM: --vllm JSON"),
        ("plan --vllm {} vllm serve a/b", "'vllm'. Of vLLM: --vllm JSON"),
        ("vllm check vllm serve a/b", "Of vLLM: --vllm JSON"),
        ("vllm serve a/b --port 80", "Of vLLM: --vllm JSON"),
        ("vllm check a/b", "leave out the rest and the model"),
        (
            "plan -cc.cudagraph_mode=FULL",
            """-cc.cudagraph_mode=FULL is vLLM's: write --vllm '{"cudagraph_mode": "FULL"}'""",
        ),
        ("plan --vllm {} --speculative-method medusa", "/ '--spec-method': 'medusa' is not"),
        ("plan --vllm {} --speculative-method medusa", "Give mtp for any _mtp, none for others"),
        ("vllm check --speculative-method qwen3_next_mtp", "Give mtp for any _mtp"),
        ("plan --vllm {} --memory 2", "2 has no unit: add MiB, GiB or B of memory, ms or s"),
        (
            "plan --vllm {} --memory 2147483648",
            "2147483648 has no unit: add MiB, GiB or B of memory",
        ),
        ("plan --vllm {} --capture-time 3", "3 has no unit: add MiB, GiB or B of memory, ms or s"),
        (
            "plan --vllm {} --capture-time 1.5",
            "1.5 has no unit: add MiB, GiB or B of memory, ms or s of time",
        ),
        ("plan my.yaml batches.csv", "of traffic: `cgplan plan CONFIGURATION.yaml --traffic FILE`"),
        ("plan metrics96.txt --traffic my.yaml", "`cgplan plan CONFIGURATION.yaml --traffic FILE`"),
        ("plan p.json", "Of a saved plan: `cgplan inspect FILE`, or `cgplan plan check FILE`"),
        (
            "plan --vllm {} --cudagraph-capture-sizes 1 2",
            """Of vLLM: write --vllm '{"cudagraph_capture_sizes": [1, 2, 4]}'""",
        ),
        (
            "plan --vllm {} --max-cudagraph-capture-size 512",
            """Of vLLM: write --vllm '{"max_cudagraph_capture_size": N}'""",
        ),
        ("plan --enable-lora", "are vLLM's options: add --vllm '{}'"),
        ("plan --speculative-config {}", "give --speculative-method, --num-speculative-tokens"),
        ("inspect p.json --verbose", "; `inspect` shows all of a saved plan"),
        ("vllm check -O1", """'{"cudagraph_mode": "PIECEWISE"}' for -O1"""),
        ("plan --optimization-level 0", "-O0 has no graph: leave it out"),
        ("vllm check --data-parallel-size 8", "Leave it out: the answer is for one rank"),
        ("vllm check -dp 8", "Leave it out: the answer is for one rank"),
        (
            "vllm check -cc.cudagraph_mode=FULL",
            """-c. Of vLLM: write --vllm '{"cudagraph_mode": "FULL"}'""",
        ),
        ("vllm check -O.cudagraph_mode=PIECEWISE", "for -O1 and -O.cudagraph_mode=PIECEWISE"),
        ("plan s.yaml --tp-size 2", "Of SGLang: --sglang '--tp-size 8'"),
        ("plan --sglang --tp=8", "for SGLang write its bounds into one"),
        ("plan --traffic x.csv", "vLLM's options take its place: --vllm '{}'"),
        ("vllm check new.log", "of a start: --log FILE"),
        (
            "plan --vllm {} -tp 2",
            "beside it go --max-num-seqs and others of -h; leave out the rest",
        ),
        ("plan --vllm {} --port 80", "Of vLLM: --vllm JSON"),
        ("vllm check --traffic x.csv", "--traffic. Of `cgplan plan`"),
        ("vllm check --gpu-memory-utilization 0.9", "without --log"),
        ("vllm check --log a.log --gpu-memory-utilization 90", "--gpu-memory-utilization"),
        ("vllm check --log a.log --gpu-memory-utilization 90", "Write a number such as 0.9"),
        ("vllm check --log a.log --gpu-memory-utilization 85%", "Write a number such as 0.9"),
        ("vllm check --tensor-parallel-size 2", "whose log has its effect: leave it out"),
        ("plan --vllm {} -tp 2", "leave out the rest"),
        ("plan check p.json --slo tpot_p99=5ms", "a saved plan holds its settings, SLO"),
        ("plan check p.json --kv-cache-tokens 5", "a saved plan holds its settings, SLO"),
        ("plan check p.json --from-stats http://s/metrics", "--traffic FILE` takes saved metrics"),
        ("plan serve.json", "of a configuration: --config FILE"),
        (
            "plan check p.json --set speculative.accepted_tokens=2",
            "a saved plan holds its settings",
        ),
        (
            "plan --vllm {} --kv-cache-memory-bytes 5",
            "`cgplan vllm check --log FILE` takes GPU memory",
        ),
        ("plan --gpu-memory 40", "`cgplan vllm check --log FILE` takes GPU memory"),
        ("vllm check --log a.log --gpu-memory 81920", "write 80 or 80GiB"),
        ("vllm check --log a.log --gpu-memory 40GB", "write 80 or 80GiB"),
        ("inspect --vllm {} --max_num_seqs 4", "(Possible options: --max-num-seqs)"),
        ("plan --vllm {} --enforce-eager", "leave it out"),
        ("inspect --vllm {} --enforce-eager", "leave it out"),
        ("plan --vllm {} --max-num-seqs 100 --max-num-batched-tokens 64", "which vLLM refuses"),
        ("vllm check --max-num-seqs 100 --max-num-batched-tokens 64", "which vLLM refuses"),
        (
            "plan --vllm {} --max-num-batched-tokens 8k",
            "'8k' is no whole number from 0: write 8000 or 8192",
        ),
        (
            "plan --vllm {} --kv-cache-tokens 37,3344",
            "'37,3344' is no whole number from 1, such as 16",
        ),
        ("vllm check --vllm -O3", "-O3 is vLLM's. Write --vllm '{}' for -O2, -O3"),
        ("plan --vllm {} --model a/b", "leave out the rest and the model"),
        ("plan --vllm {} --kv-cache-tokens 0", "'0' is no whole number from 1"),
    ],
)
def test_options_of_vllm_that_cannot_be_planned_are_explained(command: str, said: str) -> None:
    result = cgplan_command(*command.split())
    assert result.exit_code == 2
    assert said in unwrapped(result.stderr)


@pytest.mark.parametrize(
    "command",
    [
        "capture --gpu-memory-utilization 0.9",
        "plan p.json",
        "plan --emit vllmx",
        "inspect p.json -v",
        "plan --vllm {} --trafic x.csv",
        "plan --vllm {} --max-num-seq 4",
        "vllm check --gpu-memory-utilisation 0.9",
        "vllm check --traffic x.csv",
    ],
)
def test_other_words_are_refused_without_a_word_on_vllm(command: str) -> None:
    result = cgplan_command(*command.split())
    assert result.exit_code == 2
    assert "Of vLLM" not in result.stderr
    assert "--traffic" not in command or "--traceback" not in result.stderr
    for word, near in (
        ("--trafic ", "--traffic"),
        ("seq ", "--max-num-seqs"),
        ("isation", "ization"),
    ):
        assert (near in result.stderr) >= (word in command)


def test_as_many_tokens_as_requests_are_planned_for_vllm() -> None:
    good("plan", "--vllm", "{}", "--max-num-seqs", "64", "--max-num-batched-tokens", "6_4")


@pytest.mark.parametrize(
    ("option", "error", "said"),
    [
        ("--traffic", errors.TrafficError, "made.json is a saved plan, not traffic"),
        (
            "--step-times",
            errors.StepTimeError,
            "made.json is a saved plan, which has no step times",
        ),
    ],
)
def test_a_plan_is_neither_traffic_nor_step_times(
    home: Path, option: str, error: type[errors.CgplanError], said: str
) -> None:
    command = use_traffic(home)
    good(*command, "--output", "made.json")
    given = [*command[:-1], "made.json"]
    if option == "--traffic":
        given = [*PLAN, "--traffic", "made.json"]
    assert said in refused(error, *given)


def test_an_option_of_one_value_is_given_once(home: Path) -> None:
    command = use_traffic(home)
    assert command[-2] == "--step-times"
    traffic = command[command.index("--traffic") :][:2]
    good(*command, *traffic, "--set", "scheduler.max_num_seqs=8", "--set", "device=cpu")
    good(*command, "--verbose", "-v")
    twice = [*command, *command[-2:]]
    costs = [*command, "--costs", "a", "--costs", "estimate"]
    logs = ("vllm", "check", "--log", str(START), "--log", str(START))
    number = ("plan", "good.yaml", "--max-graphs", "2", "--max-graphs=2")
    seqs = ("vllm", "check", "--max-num-seqs", "8", "--max-num-seqs", "16")
    for again, name in (
        (twice, "--step-times"),
        (costs, "--costs"),
        (logs, "--log"),
        (number, "--max-graphs"),
        (seqs, "--max-num-seqs"),
    ):
        result = cgplan_command(*again)
        assert result.exit_code == 2
        assert f"{name} is given twice: give it once" in unwrapped(result.stderr)


def test_a_log_without_steps_is_no_step_times(home: Path) -> None:
    log = "INFO 11-20 14:02:51 [api_server.py:1772] vLLM API server\nINFO 11-20 14:02:52, a, b\n"
    (home / "server.log").write_text(log)
    said = refused(errors.StepTimeError, *use_traffic(home)[:-1], "server.log")
    assert "server.log: the log has no iteration" in said
    assert "no table of CUDA graph statistics" in refused(
        errors.TrafficError, *PLAN, "--traffic", "server.log"
    )


GOOD = ("--config", "good.yaml")
PLANNED, INSPECT = ("plan", *GOOD), ("inspect", *GOOD)
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
    for command in (traffic, PLANNED, INSPECT):
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
    cost = predicted(*PLANNED, *settings(both), "--costs", "run.json")
    assert cost.notes[-1].startswith(
        "there are no figures of FULL graphs: they are priced as PIECEWISE ones"
    )
    assert cost.keys[0].pool_bytes > 0


@pytest.mark.parametrize("word", ["estimate", "measure"])
def test_plan_prices_graphs_by_the_model(home: Path, word: str) -> None:
    """Also FULL graphs of 2 tokens, where the sizes of the configuration leave PIECEWISE alone to measure."""
    traffic = use_traffic(home)
    assert predicted(*traffic, "--costs", word).estimated is (word == "estimate")
    of_whole_start = (
        "start-up" if word == "measure" else "captures"
    )  # building is no part of an estimate
    assert f"{of_whole_start} " in good(*traffic, "--costs", word).stdout.partition("memory")[0]
    assert len(predicted(*PLANNED, "--costs", word).keys) == 3
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
    above = " ".join("\n".join(lines).partition("\n  sizes ")[0].split())
    assert "budget.memory and budget.capture_time did not bound this plan: give" in above
    assert "--costs with the log of a start of vLLM, a capture report, estimate or measure" in above
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
    for command in (traffic, PLANNED):
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


def test_inspect_sums_costs_up_by_lane(home: Path) -> None:
    asked = (*INSPECT, *settings("lora.max_loras=2"))
    shown = good(*asked).stdout
    assert "Cost of each lane" not in shown
    captured("lora.max_loras=2")
    for source in ("estimate", "measure", "run.json"):
        shown = good(*asked, "--costs", source).stdout
        plan = plan_of(*asked, "--costs", source)
        assert plan.predicted is not None
        assert len(plan.predicted.keys) == 6
    pool = {0: 0, 3: 0}
    for (_, descriptor), cost in zip(plan.keys, plan.predicted.keys, strict=True):
        pool[descriptor.num_active_loras] += cost.pool_bytes
    for case, name in ((0, "FULL"), (3, "FULL, LoRA case 3")):
        row = re.search(
            rf"^{name} +3  1, 2, 4 +(\d+(?:\.\d)? \w+) +0 B +[\d.]+ [mu]?s$", shown, re.MULTILINE
        )
        assert row, shown
        assert row[1] == format_bytes(pool[case])


def test_a_log_without_captures_is_no_source_of_costs(home: Path) -> None:
    (home / "eager.log").write_text("INFO Initializing a V1 LLM engine (v0.33.0)\n")
    message = refused(errors.ReportError, *use_traffic(home), "--costs", "eager.log")
    assert "no line `Graph capturing finished`" in message


@pytest.mark.parametrize("enabled", [False, True])
def test_adapters_that_vllm_would_not_take_are_noted(enabled: bool) -> None:
    lora = ["--max-loras", "4", *["--enable-lora"] * enabled]
    shown = good("plan", "--vllm", "{}", "--max-num-seqs", "8", *lora).stdout
    told = "--max-loras ignored, as vLLM does without --enable-lora" in shown
    assert told is not enabled, "its graphs are counted as vLLM captures them"
    assert ("LoRA cases" in shown) is enabled
