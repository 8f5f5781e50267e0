"""`cgplan plan` and `cgplan plan diff`."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import REQUESTS, cgplan_command, good, plan_of, refused, settings, use_traffic

from cgplan import errors
from cgplan.config import load_config
from cgplan.planning import Plan, build_plan
from cgplan.reports import load_report, render_text

PLAN = ("plan", "--config", "good.yaml")


def test_plan_shows_and_saves_the_plan(home: Path) -> None:
    result = good(*PLAN, "--output", "plan.json")
    plan = load_report("plan.json")
    assert isinstance(plan, Plan)
    assert plan.model_copy(update={"notes": (), "lint": ()}) == build_plan(load_config("good.yaml"))
    assert result.stdout == render_text(plan) + "\n"
    assert "saved plan.json" in result.stderr
    assert good(*PLAN, "--json").stdout == (home / "plan.json").read_text()


def test_plan_emits_for_an_engine_and_nothing_else(home: Path) -> None:
    narrow = settings("scheduler.max_num_batched_tokens=2", "compilation.attention_support=UNIFORM_BATCH")
    result = good(*PLAN, *narrow, "--emit", "vllm", "--output", "plan.json")
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
    for engine in ("vllm", "sglang", "trtllm", "json"):
        assert "1, 2, 4" in good(*PLAN, "--emit", engine).stdout.replace("1 2 4", "1, 2, 4")


def test_what_is_emitted_for_vllm_is_read_back_to_the_same_keys(home: Path) -> None:
    settings = ("--set", "compilation.cudagraph_mode=FULL_AND_PIECEWISE", "--set", "scheduler.max_num_seqs=3")
    emitted = good(*PLAN, *settings, "--emit", "vllm").stdout
    value = shlex.split(emitted)[1]
    again = good("inspect", "--vllm", value, "--max-num-seqs", "3", "--max-num-batched-tokens", "8192", "--json").stdout
    assert Plan.from_json(again).keys == build_plan(load_config("good.yaml", settings[1::2])).keys


def test_plan_draws_the_padding(home: Path) -> None:
    assert "saved plan.svg" in good(*PLAN, "--plot", "plan.svg").stderr
    drawn = (home / "plan.svg").read_text()
    assert "capture size" in drawn
    assert "FULL: 4" in drawn


def test_plan_options_are_overrides_of_the_budget(home: Path) -> None:
    given = ("--max-graphs", "2", *settings("budget.max_graphs=3"), "--memory", "1GiB", "--capture-time", "2min")
    assert plan_of(*PLAN, *given).budget == {"max_graphs": 2, "memory": 1 << 30, "capture_time": 120.0}


def test_plan_for_traffic_finds_its_sizes(home: Path) -> None:
    """Sizes that batches have are best: 2 and 7 for two graphs, where 1 costs 129 instead of 100 microseconds."""
    command = (*use_traffic(home), "--max-graphs", "2")
    shown = good(*command, "--output", "plan.json").stdout
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
    assert table.index("Why these graphs") > at


@pytest.mark.parametrize(("columns", "widest"), [("64", 64), ("130", 130), ("wide", 100)])
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
    plan = plan_of(*PLAN, "--traffic", "trace.csv", "--step-times", "times.csv")
    assert plan.capture_sizes == (1, 4)
    assert plan.evidence is not None
    assert plan.evidence["traffic_weight"] == 60


def test_plan_for_requests_that_one_server_cannot_serve_warns(home: Path) -> None:
    use_traffic(home)
    (home / "trace.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{i / 2e4},4,3\n" for i in range(1000))
    )
    command = (*PLAN, "--traffic", "trace.csv", "--step-times", "times.csv")
    plan = plan_of(*command)
    assert plan.evidence is not None
    assert "overload: requests come" in plan.evidence["warnings"][0]
    assert "replicas would do" in " ".join(good(*command).stdout.split())
    apart = plan_of(*command, *settings("scheduler.mixed_batches=false"))
    assert apart.evidence is not None
    assert apart.config_hash == plan.config_hash, "a capture does not count with it"
    assert "apart from decode" in " ".join(apart.evidence["traffic_notes"])


def test_plan_for_conversations_needs_a_rate(home: Path) -> None:
    use_traffic(home)
    talk = [{"from": "human", "value": "a b c"}, {"from": "gpt", "value": "d e f"}]
    (home / "chat.json").write_text(json.dumps([{"id": "1", "conversations": talk}] * 9))
    command = (*PLAN, "--traffic", "chat.json", "--step-times", "times.csv")
    assert "traffic.request_rate" in refused(errors.TrafficError, *command)
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
    assert "No graph: every batch runs eagerly." in good(*command, *options).stdout


def test_plan_says_whose_step_times_it_uses(home: Path) -> None:
    use_traffic(home)
    good("bench", *PLAN[1:], "--output", "bench.json")
    command = (*PLAN, "--traffic", "traffic.csv", "--step-times", "bench.json")
    for changes, told in ((), False), (settings("scheduler.max_num_seqs=64"), True):
        evidence = plan_of(*command, *changes).evidence
        assert evidence is not None
        notes = " ".join(evidence["times_notes"])
        assert "not of a GPU" in notes
        assert ("measured with another configuration" in notes) == told


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
    assert re.search(r"^  budget.memory +absent -> 2.0 GiB$", shown, re.MULTILINE)
    assert re.search(r"^  budget.max_graphs +absent -> 3$", shown, re.MULTILINE)
    data = json.loads(good("plan", "diff", "old.json", "new.json", "--json").stdout)
    assert data["lanes"][0]["removed"] == [2, 4]
    good("capture", *PLAN[1:], "--output", "run.json")
    message = refused(errors.ReportError, "plan", "diff", "run.json", "run.json")
    assert "run.json is a capture report, not a plan" in message
    message = refused(errors.ReportError, "plan", "diff", "none.json", "run.json")
    assert "no such file: none.json" in message
    assert "Did you mean 'new.json'?" in message


def test_empty_options_of_plan_and_files_that_it_would_write_over(home: Path) -> None:
    Path("h.csv").write_text("num_tokens,count\n1,10\n3,20\n")
    traffic = (*PLAN, "--traffic", "h.csv")
    for option in ("--memory", "--capture-time"):
        result = cgplan_command(*traffic, option, "")
        assert result.exit_code == 2
        assert f"{option} is empty" in result.stderr
    for option in ("--plot", "--output"):
        assert "error: cannot" in refused(errors.OutputPathError, *traffic, option, "")
    for over in ("h.csv", "good.yaml"):
        assert f"{over} is an input of the plan" in refused(errors.OutputPathError, *traffic, "--output", over)
    assert Path("h.csv").read_text().startswith("num_tokens")
    none = settings("compilation.cudagraph_mode=NONE")
    assert "nothing is captured: the resolved cudagraph_mode is NONE" in good(*traffic, *none).stdout
    assert "it.svg was not drawn: there is no graph" in good(*PLAN, *none, "--plot", "it.svg").stderr
    assert not Path("it.svg").exists()


# --- several sizes ----------------------------------------------------------------------------------------------

SIZED = settings(
    "compilation.cudagraph_capture_sizes=null",
    "dims={batch: {max: 16}, length: {max: 64}}",
    "inputs.x.shape=[batch, length, 8]",
    "model.output_shapes=[[batch, length, 4]]",
)


def sized(home: Path, *more: str) -> tuple[str, ...]:
    (home / "lengths.csv").write_text("batch,length,count\n1,60,100\n3,20,200\n12,10,50\n16,9,5\n20,9,1\n")
    return (*PLAN, *SIZED, "--traffic", "lengths.csv", *more)


def test_plan_for_batches_of_several_sizes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = sized(home, "--max-graphs", "3")
    shown = good(*command, "--output", "plan.json").stdout
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].split()[0] == "verdict"
    assert re.search(r"verdict steps [\d.]+% shorter than with the best full grid, ", " ".join(shown.split()))
    assert "no step times were given" in " ".join(lines[2:6])
    assert [line.split()[0] for line in lines if line.startswith(("this plan", "the best full", "powers", "even"))] == [
        "this", "the", "powers", "even",
    ]  # fmt: skip
    assert "FULL: 3 x 20" in shown
    at = lines.index("Padding of the batches up to each batch and length")
    assert lines[at + 1].split() == ["batch", "|", "9", "10", "20", "60", "length"]
    assert lines[at + 4].split() == ["12", "|", "25%"], "12 x 10 runs in 16 x 10"
    assert good("inspect", "plan.json").stdout == shown
    saved = load_report("plan.json")
    assert isinstance(saved, Plan)
    assert {key.box for _, key in saved.keys} == {(1, 60), (3, 20), (16, 10)}
    assert saved.expected_us == pytest.approx((100 * 60 + 200 * 60 + 55 * 160) / 355)


def test_boxes_of_a_plan_are_captured_and_measured(home: Path) -> None:
    """Full grids are measured whole: their bench gives the times of the next plan."""
    good(*sized(home, "--max-graphs", "3"), "--output", "plan.json")
    captured = json.loads(good("capture", *PLAN[1:], *SIZED, "--plan", "plan.json", "--json").stdout)
    assert {(r["descriptor"]["num_tokens"], *r["descriptor"]["sizes"]) for r in captured["records"]} == {
        (1, 60), (3, 20), (16, 10),
    }  # fmt: skip
    grid = settings("dims={batch: {max: 16, sizes: [1, 16]}, length: {max: 64, sizes: [8, 64]}}", "report.sizes=null")
    good("bench", *PLAN[1:], *SIZED, *grid, "--output", "bench.json")
    assert "bench.json" in good(*sized(home, "--step-times", "bench.json")).stdout


def test_plan_for_batches_of_several_sizes_by_their_times(home: Path) -> None:
    (home / "times.csv").write_text("batch,length,microseconds\n1,1,100\n16,1,100\n1,64,100\n16,64,500\n")
    shown = good(*sized(home, "--step-times", "times.csv")).stdout
    assert "no step times were given" not in shown
    assert "times.csv" in shown


def test_what_a_plan_of_several_sizes_refuses(home: Path) -> None:
    for option in (("--costs", "estimate"), ("--speedup", "2"), ("--emit", "vllm")):
        assert f"{option[0]}" in refused(errors.ConfigError, *sized(home, *option))
    made = "traffic={request_rate: 1, prompt_median: 5, prompt_p95: 9, output_median: 4, output_p95: 8}"
    assert "`traffic` section" in refused(errors.ConfigError, *PLAN, *SIZED, *settings(made))
    (home / "other.csv").write_text("num_tokens,count\n1,1\n")
    told = refused(errors.TrafficError, *sized(home)[:-1], "other.csv")
    assert "unknown column 'num_tokens'" in told
    assert "batch, length" in told
    (home / "times.csv").write_text("batch,length,microseconds\n1,1,1\n2,2,2\n")
    told = refused(errors.StepTimeError, *sized(home, "--step-times", "times.csv"))
    assert "no times of a full grid" in told
