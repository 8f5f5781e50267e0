"""What `cgplan plan` decides besides sizes: modes, SLOs, drafts, packed traces."""

from __future__ import annotations

import gzip
import json
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import cgplan_command, good, plan_of, refused, settings, unwrapped

from cgplan import errors
from cgplan.modes import CUDAGraphMode
from cgplan.optimizer import decisions as decisions_module
from cgplan.planning import Plan
from cgplan.reports import load_plan
from cgplan.traffic.histogram import StepShape
from cgplan.traffic.simulation import simulate
from cgplan.traffic.step_times import StepTimes
from cgplan.units import format_microseconds

TIMES = """mode,num_tokens,microseconds
NONE,1,14000
NONE,256,14200
NONE,2048,40000
PIECEWISE,1,{piecewise}
PIECEWISE,2048,38000
FULL,1,3000
FULL,64,4500
FULL,256,8500
"""
BOUNDS = ("--max-num-seqs", "64", "--max-num-batched-tokens", "2048")
BOUNDS_SET = settings("scheduler.max_num_seqs=64", "scheduler.max_num_batched_tokens=2048")
START = Path(__file__).parents[1] / "data" / "vllm_start.log"
GIVEN = ("plan", "--vllm", "{}", *BOUNDS, "--traffic", "trace.csv", "--step-times", "times.csv")
FEW = (*GIVEN[:3], "--max-num-batched-tokens", "64", "--max-num-seqs", "16", *GIVEN[-4:])


@pytest.fixture(autouse=True)
def _trace(home: Path) -> None:
    """Requests of 100 tokens in and 40 out, 20 a second."""
    rows = [f"{n * 0.05:.2f},{50 + n % 100},{20 + n % 40}" for n in range(100)]
    text = "\n".join(["Timestamp,Request tokens,Response tokens", *rows]) + "\n"
    (home / "trace.csv").write_text(text)
    (home / "trace.csv.gz").write_bytes(gzip.compress(text.encode()))
    (home / "times.csv").write_text(TIMES.format(piecewise=5000))


def test_each_mode_with_graphs_is_weighed() -> None:
    without = {CUDAGraphMode.NONE, CUDAGraphMode.AUTO}
    assert set(decisions_module.MODES) == set(CUDAGraphMode) - without


def decisions(plan: Any) -> str:
    evidence = plan.evidence
    return "\n".join((*evidence["decided"], *evidence["decisions"], *plan.notes))


@pytest.mark.parametrize(
    ("piecewise", "options", "mode"),
    [
        (5000, (), "FULL_AND_PIECEWISE"),  # prefill gains by its graphs
        (14000, (), "FULL_DECODE_ONLY"),  # PIECEWISE steps take as long as eager ones
        (14000, ("--mode", "keep"), "FULL_AND_PIECEWISE"),
    ],
)
def test_the_mode_is_that_of_the_shortest_steps(
    home: Path, piecewise: int, options: tuple[str, ...], mode: str
) -> None:
    (home / "times.csv").write_text(TIMES.format(piecewise=piecewise))
    only_uniform = ("--set", "compilation.attention_support=UNIFORM_BATCH")
    plan = plan_of(*GIVEN, *only_uniform, "--max-graphs", "16", *options)
    assert str(plan.mode) == mode
    assert ("--mode keep forbids it" in decisions(plan)) == (mode == "FULL_DECODE_ONLY")
    assert ("mode PIECEWISE: " in decisions(plan)) == (not options)
    if mode == "FULL_DECODE_ONLY":
        assert "mode FULL_DECODE_ONLY, not FULL_AND_PIECEWISE: " in decisions(plan)
        assert {key[0] for key in plan.keys} == {CUDAGraphMode.FULL}
    assert "FULL was timed" not in decisions(plan)


def test_a_mode_that_the_command_names_stays_unless_asked(home: Path) -> None:
    (home / "times.csv").write_text(TIMES.format(piecewise=14000))
    named = [*GIVEN, "--max-graphs", "16", "--mode", "best"]
    named[2] = '{"cudagraph_mode": "FULL_AND_PIECEWISE"}'
    kept = plan_of(*named[:-2])
    assert kept.mode is CUDAGraphMode.FULL_AND_PIECEWISE
    told = "cudagraph_mode was given: --mode best weighs others"
    assert told in kept.notes
    assert told not in plan_of(*GIVEN, "--max-graphs", "16").notes
    assert told not in plan_of(*named).notes
    assert plan_of(*named).mode is CUDAGraphMode.FULL
    first_lines = unwrapped(good(*named).stdout).partition("Ladders")[0]
    assert "mode FULL, not FULL_AND_PIECEWISE: " in first_lines


def test_a_mode_that_takes_graphs_of_decode_for_prefill_says_so(home: Path) -> None:
    (home / "times.csv").write_text(TIMES.format(piecewise=14000))
    plan = plan_of(*GIVEN, "--max-graphs", "16")
    assert plan.mode is CUDAGraphMode.FULL
    assert "as is right where FULL was timed in decode alone" in decisions(plan)


@pytest.mark.parametrize("of_decode", [True, False])
def test_full_times_of_decode_alone_do_not_choose_full_graphs_of_mixed_batches(
    home: Path, of_decode: bool
) -> None:
    times = StepTimes.load(home / "times.csv").model_copy(update={"full_of_decode": of_decode})
    (home / "times.csv").write_text(times.model_dump_json())
    plan = plan_of(*GIVEN, "--max-graphs", "8")
    assert (plan.mode is CUDAGraphMode.FULL) is not of_decode
    said = "mode FULL was not weighed: FULL graphs were timed for uniform decode alone"
    assert (said in decisions(plan)) is of_decode


def test_default_step_times_do_not_change_the_mode() -> None:
    plan = plan_of(*GIVEN[:-2], "--max-graphs", "8")
    assert plan.mode is CUDAGraphMode.FULL_AND_PIECEWISE
    assert not re.search("^mode ", decisions(plan), re.MULTILINE)
    assert "mode FULL" in decisions(plan_of(*GIVEN[:-2], "--max-graphs", "8", "--mode", "best"))


def test_what_requests_get_stands_beside_the_ladder_and_eager_steps() -> None:
    plan = plan_of(*GIVEN, "--max-graphs", "8")
    assert plan.evidence is not None
    mine, asked, eager = plan.evidence["service"]
    assert [point["name"] for point in (mine, asked, eager)] == ["plan", "asked for", "eager"]
    assert (mine["graphs"], eager["graphs"]) == (len(plan.keys), 0)
    tpot = [point["service"]["tpot_us"]["p99"] for point in (mine, asked, eager)]
    assert max(tpot[:2]) < tpot[2]
    assert "What requests get" in good(*GIVEN, "--max-graphs", "8").stdout


def test_a_plan_stays_good_at_higher_loads_unless_the_mean_is_asked_for() -> None:
    keep = (*GIVEN, "--max-graphs", "8", "--mode", "keep")
    robust = plan_of(*keep)
    mean = plan_of(*keep, "--objective", "mean")
    assert robust.evidence is not None
    assert mean.evidence is not None
    sources = [point["source"] for point in robust.evidence["loads"]]
    assert sources[1:3] == ["2 times the load", "4 times the load"]
    assert mean.evidence["loads"] == []
    assert robust.expected_us is not None
    assert mean.expected_us is not None
    assert robust.expected_us <= mean.expected_us * 1.004
    assert max(robust.capture_sizes) > max(mean.capture_sizes)
    ladder = [point["ladder_us"] for point in robust.evidence["loads"]]
    mine = [point["expected_us"] for point in robust.evidence["loads"]]
    assert all(us <= 1.03 * theirs for us, theirs in zip(mine, ladder, strict=True))


def test_an_slo_is_held_by_the_fewest_graphs_with_steps_little_longer() -> None:
    free = plan_of(*GIVEN)
    tried = good(*GIVEN, "--slo", "tpot_p99=10ms").stderr
    assert re.search(
        r"^planning for the traffic 1/\d+: FULL\w* within the SLO$", tried, re.MULTILINE
    )
    held = plan_of(*GIVEN, "--slo", "tpot_p99=10ms")
    assert 1 < len(held.keys) < len(free.keys)
    assert f"holds with {len(held.keys)} graph" in decisions(held)
    assert held.expected_us is not None
    assert free.expected_us is not None
    assert held.expected_us <= 1.05 * free.expected_us
    assert held.evidence is not None
    assert held.evidence["rule"].endswith(
        "the fewest graphs, in the least memory, that hold the SLO"
    )
    assert held.evidence["service"][0]["service"]["tpot_us"]["p99"] <= 10_000
    found = re.search(
        r"with --max-graphs (\d+) it holds, too, with steps \+(\S+)% against this plan's",
        decisions(held),
    )
    assert found
    assert float(found[2]) > 0
    fewer = plan_of(*GIVEN, "--slo", "tpot_p99=10ms", "--max-graphs", found[1])
    assert fewer.num_graphs == int(found[1]) < held.num_graphs
    assert fewer.evidence is not None
    assert fewer.evidence["service"][0]["service"]["tpot_us"]["p99"] <= 10_000
    assert fewer.expected_us is not None
    assert fewer.expected_us > 1.05 * free.expected_us
    longer = fewer.expected_us / held.expected_us - 1
    assert longer == pytest.approx(float(found[2]) / 100, abs=0.01), "than the plan, not than free"


def test_an_slo_is_held_in_the_least_memory_that_was_tried() -> None:
    """Without one the plan has the graphs asked for, or as many as pay."""
    priced = (*GIVEN, "--mode", "keep", "--costs", str(START))
    slo = ("--slo", "tpot_p99=10ms")
    held = plan_of(*priced, *slo)
    same = plan_of(*priced, "--max-graphs", str(held.num_graphs))
    assert held.predicted is not None
    assert same.predicted is not None
    assert held.predicted.total_bytes < same.predicted.total_bytes
    assert held.evidence is not None
    assert held.evidence["service"][0]["service"]["tpot_us"]["p99"] <= 10_000
    half = f"{held.predicted.total_bytes / 2**20 / 2:.0f}MiB"
    less, free = plan_of(*priced, *slo, "--memory", half), plan_of(*priced)
    assert less.expected_us is not None
    assert free.expected_us is not None
    assert less.expected_us > 1.05 * free.expected_us, "so it was no plan with steps little longer"


def uneven(home: Path, seed: int) -> tuple[str, ...]:
    """Of seed 3 the p99 of decode is 3.57, 3.67, 4.50 and 3.67 ms with 1 to 4 FULL graphs."""
    rng = random.Random(seed)
    rows = ["Timestamp,Request tokens,Response tokens"]
    time = 0.0
    for _ in range(150):
        time += rng.expovariate(4)
        for _ in range(rng.choice([1, 1, 1, 1, 1, 1, 1, 2, rng.randint(3, 25)])):
            rows.append(f"{time:.2f},{rng.randint(20, 60)},{rng.randint(10, 60)}")
    (home / "trace.csv").write_text("\n".join(rows) + "\n")
    (home / "times.csv").write_text(TIMES.format(piecewise=14000))
    decode_alone = ("--vllm", '{"cudagraph_mode": "FULL_DECODE_ONLY"}', "--mode", "keep")
    return ("plan", *decode_alone, *GIVEN[3:], "--costs", str(START))


@pytest.mark.parametrize("limit", ["--max-graphs=3", "--capture-time=1.5s"])
def test_fewer_graphs_may_hold_an_slo_that_more_miss(home: Path, limit: str) -> None:
    command = uneven(home, 3)
    assert plan_of(*command, limit, "--slo", "decode_p99=3.6ms").num_graphs == 1
    assert plan_of(*command, limit, "--slo", "decode_p99=3.8ms").num_graphs == 2
    result = cgplan_command(*command, limit, "--slo", "decode_p99=3.3ms")
    assert result.exit_code == errors.RegretError.exit_code
    assert re.search("is missed by each of the [45] plans tried", unwrapped(result.stdout))


@pytest.mark.parametrize(
    ("seed", "goal"),
    [(7, ()), (7, ("--slo", "decode_p99=3.55ms")), (2, ("--slo", "decode_p99=4ms"))],
)
def test_a_budget_that_pays_for_a_plan_leaves_it(
    home: Path, seed: int, goal: tuple[str, ...]
) -> None:
    command = (*uneven(home, seed), *goal)
    free = plan_of(*command)
    assert free.predicted is not None
    memory = f"{free.predicted.total_bytes / 2**20 + 1:.0f}MiB"
    seconds = f"{free.predicted.seconds * 1.01:.3f}s"
    budgets = [("--memory", memory), ("--capture-time", seconds)]
    if goal:
        budgets.append(("--max-graphs", str(free.num_graphs + 1)))
    for budget in budgets:
        bound = plan_of(*command, *budget)
        assert bound.budget
        assert bound.num_graphs == free.num_graphs
        assert bound.predicted is not None
        if goal:  # it tries other plans, one of which may take less
            assert bound.predicted.total_bytes <= free.predicted.total_bytes
        else:
            assert bound.keys == free.keys


def test_an_slo_binds_its_plan_and_checks_judge_by_it(home: Path) -> None:
    (home / "times.csv").write_text(TIMES.format(piecewise=5000))
    made = good(*GIVEN, "--slo", "tpot_p99=10ms", "--slo", "ttft_p99=1s", "--output", "slo.json")
    assert "binding     the SLO, which holds without more" in made.stdout
    assert made.stdout.count("SLO tpot_p99=10.0 ms, ttft_p99=1.00 s holds with") == 1
    assert "SLO" in made.stdout.partition("step times")[0]
    assert "budget.max_graphs" not in made.stdout
    held = load_plan(home / "slo.json")
    assert held.evidence is not None
    assert held.evidence["binding"] == ["slo"]
    assert [goal["name"] for goal in held.evidence["slo"]] == ["tpot_p99", "ttft_p99"]
    check = ("plan", "check", "slo.json", "--traffic", "trace.csv")
    same = json.loads(good(*check, "--json").stdout)
    assert re.match(r"holds its SLO; regret [\d.]+% in the plan's mode", same["verdict"])
    assert same["slo_missed"] is None
    assert same["regret"] < 0.001, "of plans with as many graphs"
    saved = json.loads((home / "slo.json").read_text())
    saved["evidence"]["step_times"]["warnings"] = []  # of earlier versions
    (home / "earlier.json").write_text(json.dumps(saved))
    good("plan", "check", "earlier.json", "--traffic", "trace.csv")
    result = cgplan_command(*check, "--speedup", "40")
    assert result.exit_code == errors.RegretError.exit_code
    assert re.search(
        r"misses its SLO: tpot_p99 is .*, 10.0 ms are asked for", unwrapped(result.stderr)
    )
    anew = "--speedup 40.0 --slo tpot_p99=10000us --slo ttft_p99=1000000us --step-times times.csv"
    assert anew in unwrapped(result.stderr)
    slow = ("--speedup", "0.1", "--max-regret", "0")
    assert "--speedup 0.1 --slo" in unwrapped(cgplan_command(*check, *slow).stderr)
    (home / "steps.csv").write_text("num_tokens,count\n4,10\n")
    steps = json.loads(good(*check[:-1], "steps.csv", "--json").stdout)
    said = "SLO not judged, as the traffic counts steps: give requests; regret "
    assert steps["verdict"].startswith(said)


@pytest.mark.parametrize("limit", [(), ("--max-graphs", "20"), ("--memory", "5GiB")])
def test_an_slo_that_leaves_of_a_budget_binds_in_its_place(limit: tuple[str, ...]) -> None:
    """A larger budget changes nothing of the plan, which a check judges by what it has."""
    priced = (*GIVEN, "--mode", "keep", "--costs", str(START), *limit)
    shown = unwrapped(good(*priced, "--slo", "tpot_p99=10ms", "--output", "slo.json").stdout)
    assert "the graphs asked for; a smaller --slo shortens it" in shown
    assert shown.count("the SLO, which holds without more") == 1
    assert "budget." not in shown.partition("binding")[2].partition("next graph")[0]
    check = ("plan", "check", "slo.json", "--traffic", "trace.csv", "--max-regret", "0.1%")
    assert "this plan" in good(*check).stdout


def test_an_slo_is_tried_in_less_memory_for_the_mode_chosen_alone() -> None:
    told = good(*GIVEN, "--costs", str(START), "--slo", "tpot_p99=10ms").stderr
    modes = re.findall(r"/\d+: (\w+) in less memory$", told, re.MULTILINE)
    assert modes == ["FULL"] * decisions_module.HALVINGS
    assert len(set(re.findall(r": (\w+) within the SLO$", told, re.MULTILINE))) > 1


def test_a_plan_that_leaves_higher_loads_out_says_how_long_their_steps_are() -> None:
    shown = unwrapped(good(*GIVEN, "--slo", "tpot_p99=10ms", "--mode", "keep").stdout)
    above = shown.partition("step times")[0]
    assert re.search(r"2 times the load: \S+ ms a step, \S+ ms with the graphs asked for", above)
    assert "the SLO holds at the loads given alone: --scale 1,2 adds one" in above
    assert "planned with 10% of unseen sizes binding" in shown, "they had no share of the steps"


def test_an_slo_is_held_in_the_mode_with_the_fewest_graphs() -> None:
    goal = ("--slo", "decode_p99=4ms")
    keep = plan_of(*GIVEN, *goal, "--mode", "keep")
    plan = plan_of(*GIVEN, *goal)
    assert len(plan.keys) < len(keep.keys)
    steps = keep.expected_us, plan.expected_us
    assert all(steps)
    change = f"{steps[0] / steps[1] - 1:+.2%}"  # type: ignore[operator]
    took = f"{format_microseconds(steps[0])} a step ({change}) of its own batches, the SLO holds"
    assert f"mode FULL_AND_PIECEWISE: {keep.graph_words}, {took}" in decisions(plan)
    piecewise = decisions(plan).partition("mode PIECEWISE: ")[2]
    assert ", the SLO is missed: decode_p99 is" in piecewise.partition("\n")[0]


def test_a_check_serves_with_the_kv_cache_and_the_replicas_of_the_plan() -> None:
    bounds = ("--kv-cache-tokens", "400", "--replicas", "2", "--speedup", "20")
    plan = plan_of(*GIVEN, *bounds, "--slo", "ttft_p99=9s", "--output", "plan.json")
    assert "a KV cache of 400 tokens" in str(plan.evidence)
    check = ("plan", "check", "plan.json", *GIVEN[-4:-2], "--speedup", "20")
    found = json.loads(good(*check, "--json").stdout)
    assert "for 1 of 2 replicas" in found["traffic_source"]
    assert "all on one server" not in good("inspect", "plan.json").stdout
    assert "a KV cache of 400 tokens" in str(found["notes"])
    alone = json.loads(good(*check, "--replicas", "1", "--json").stdout)
    assert "replicas" not in alone["traffic_source"]
    good(*GIVEN, "--speedup", "20", "--output", "other.json")
    assert "kv_tokens  400 -> absent" in good("plan", "diff", "plan.json", "other.json").stdout


@pytest.mark.parametrize("objective", ["robust", "mean"])
def test_a_check_plans_anew_as_plan_does(objective: str) -> None:
    plan = plan_of(*GIVEN, "--mode", "keep", "--objective", objective, "--output", "plan.json")
    check = json.loads(good("plan", "check", "plan.json", *GIVEN[-4:-2], "--json").stdout)
    anew = next(point for point in check["points"] if point["name"] == "planned anew")
    assert anew["graphs"] == len(plan.keys)
    assert check["regret"] < 1e-6


@pytest.mark.parametrize(
    ("limit", "options"),
    [("memory", "--memory 100MiB"), ("capture_time", "--capture-time 0.7s --memory none")],
)
def test_a_check_regrets_no_limit_of_memory_or_time(limit: str, options: str) -> None:
    """What the plan may not take is no better plan; eager steps are, where no graph fits."""
    made = (*GIVEN, "--mode", "keep", "--costs", str(START), "--insurance", "0")
    plan = plan_of(*made, *options.split(), "--output", "plan.json")
    assert plan.evidence["binding"] == [limit]  # type: ignore[index]
    check = ("plan", "check", "plan.json", "--json")
    found = json.loads(good(*check, *GIVEN[-4:-2], "--max-regret", "1%").stdout)
    own, *others = found["points"]
    assert found["regret"] < 1e-6
    ladder = next(point for point in others if point["name"] == "vllm")
    assert ladder["expected_us"] < own["expected_us"] * 0.99
    known = next(point for point in plan.evidence["ladders"] if point["name"] == "vllm")  # type: ignore[index]
    assert ladder["bytes"] == pytest.approx(known["bytes"], rel=0.02), "as by the log"
    assert ladder["seconds"] == pytest.approx(known["seconds"])
    Path("large.csv").write_text("num_tokens,num_reqs,uniform,count\n60,60,true,9\n")
    large = json.loads(good(*check, "--traffic", "large.csv").stdout)
    fits = large["points"][1]["graphs"] > 0
    assert (large["regret"] > 0) is fits is (limit == "capture_time")


def test_an_slo_is_held_by_each_load() -> None:
    goal = ("--slo", "ttft_p99=100ms", "--max-graphs", "12", "--mode", "keep")
    assert plan_of(*GIVEN, *goal).keys is not None
    shown = []
    for scales in ("1,40", "40,1"):
        result = cgplan_command(*GIVEN, *goal, "--scale", scales, "--json")
        assert result.exit_code == errors.RegretError.exit_code
        evidence = json.loads(result.stdout)["evidence"]
        shown.append(evidence["service"][0])
        assert "40 times" in evidence["service"][0]["load"]
        assert "of 2 loads trace.csv" in "\n".join(evidence["decisions"])
    assert shown[0]["service"]["ttft_us"]["p99"] > 100_000
    assert shown[0] == shown[1]


def test_an_slo_that_the_most_graphs_miss_is_tried_with_doublings() -> None:
    most = len(plan_of(*GIVEN, "--mode", "keep", "--max-graphs", "128").keys)
    assert most > 20, "few enough for each number would tell nothing"
    result = cgplan_command(*GIVEN, "--mode", "keep", "--slo", "tpot_p99=1us")
    assert result.exit_code == errors.RegretError.exit_code
    doublings = (most - 1).bit_length()
    assert f"is missed by each of the {2 + doublings} plans tried" in unwrapped(result.stdout)


def test_an_slo_that_nothing_holds_shows_the_nearest_plan_and_what_it_misses() -> None:
    goals = ("--slo", "tpot_p50=1us", "--slo", "ttft_p99=1us", "--slo", "step_p99=10s")
    result = cgplan_command(*FEW, "--max-graphs", "4", *goals)
    assert result.exit_code == errors.RegretError.exit_code
    assert "What requests get" in result.stdout
    told = unwrapped(result.stderr)
    assert "no number of graphs that was tried holds the SLO" in told
    assert re.search(r"tpot_p50 is 3[^;]*, 1.00 us are asked for; ttft_p99 is", told)
    assert "step_p99 is" not in told
    assert "asked for; the graphs asked for miss it, too" in told


def test_an_slo_that_the_budget_alone_breaks_does_not_blame_the_graphs_asked_for() -> None:
    command = (*GIVEN, "--mode", "keep", "--max-graphs", "1")
    result = cgplan_command(*command, "--slo", "tpot_p99=1us", "--json")
    plan, asked, _ = json.loads(result.stdout)["evidence"]["service"]
    its, theirs = (point["service"]["tpot_us"]["p99"] for point in (plan, asked))
    assert theirs < its
    between = f"tpot_p99={(its + theirs) / 2:.0f}us"
    result = cgplan_command(*command, "--slo", between)
    assert result.exit_code == errors.RegretError.exit_code
    told = unwrapped(result.stderr)
    assert "tpot_p99 is" in told
    assert "miss it, too" not in told
    assert "give a larger --max-graphs, or loosen the SLO" in told


def test_an_slo_that_graphs_change_nothing_of_leaves_the_plan_as_it_is(home: Path) -> None:
    (home / "times.csv").write_text(TIMES.format(piecewise=14000))
    command = (*FEW, "--mode", "keep", "--insurance", "0")
    plain = plan_of(*command)
    result = cgplan_command(*command, "--slo", "step_p99=1us", "--json")
    assert result.exit_code == errors.RegretError.exit_code
    found = [key[1]["num_tokens"] for key in json.loads(result.stdout)["keys"]]
    assert found == [key.num_tokens for _, key in plain.keys]


def test_an_slo_that_eager_steps_hold_leaves_the_plan_as_it_is() -> None:
    plan = plan_of(*GIVEN, "--slo", "tpot_p99=10s")
    assert plan.keys
    assert plan.keys == plan_of(*GIVEN).keys
    assert "tpot_p99=10.0 s holds without graphs, too" in decisions(plan)


@pytest.mark.parametrize("is_measured", [True, False])
def test_an_slo_that_rests_on_extrapolated_prefill_says_so(home: Path, is_measured: bool) -> None:
    times = TIMES if is_measured else re.sub(r"(NONE|PIECEWISE),2048,.*\n", "", TIMES)
    (home / "times.csv").write_text(times.format(piecewise=5000))
    plan = plan_of(*GIVEN, "--slo", "ttft_p99=10s", "--mode", "keep")
    said = re.search(r"SLO .*; (\d+\.\d+)% of the steps are extrapolated", decisions(plan))
    assert (said is None) == is_measured
    assert said is None or float(said[1]) > 0


@pytest.mark.parametrize(
    ("command", "error", "words"),
    [
        (GIVEN[:-2], errors.StepTimeError, "an SLO needs the step times of your model"),
        (
            (*GIVEN[:-4], "--traffic", "steps.csv", *GIVEN[-2:]),
            errors.TrafficError,
            "an SLO needs requests",
        ),
        (
            (*GIVEN, "--traffic", "steps.csv"),
            errors.TrafficError,
            "a load counts steps: steps.csv",
        ),
    ],
)
def test_an_slo_needs_requests_and_step_times(
    home: Path, command: tuple[str, ...], error: type[errors.CgplanError], words: str
) -> None:
    (home / "steps.csv").write_text("num_tokens,count\n4,10\n")
    assert words in refused(error, *command, "--slo", "tpot_p99=30ms")


@pytest.mark.parametrize("others", [(), ("--slo", "ttft_p99=9s")])
def test_an_slo_of_tokens_is_not_judged_by_requests_that_generate_none(
    home: Path, others: tuple[str, ...]
) -> None:
    rows = [f"2026-01-01 00:00:{n:02},1,0" for n in range(20)]
    text = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n"
    (home / "trace.csv").write_text(text)
    of_tokens = ("--slo", "tpot_p99=1us", "--slo", "decode_p99=1us", *others)
    shown = refused(errors.TrafficError, *GIVEN, *of_tokens)
    assert "decode_p99 and tpot_p99 cannot be judged" in shown
    assert "Give ttft_p50, ttft_p99, step_p50 or step_p99" in shown
    assert plan_of(*GIVEN, "--slo", "ttft_p99=9s").evidence["slo"]


@pytest.mark.parametrize(
    "option",
    ["--slo tpot_p99=1s", "--mode best", "--kv-cache-tokens 9000", "--kv-token-bytes 9"],
)
def test_decisions_without_traffic_are_refused(option: str) -> None:
    command = (*GIVEN[:-4], *option.split())
    name = option if "best" in option else option.split()[0]
    assert f"{name}: no traffic was given" in refused(errors.ConfigError, *command)


@pytest.mark.parametrize(
    ("options", "fewest", "drafts"),
    [
        ("--num-speculative-tokens 3 --speculative-method eagle", 4, 2),
        ("--num-speculative-tokens 3 --speculative-method ngram", 2, 0),
        ("--enable-lora --max-loras 2", 2, 0),
    ],
)
def test_the_fewest_graphs_of_one_size_are_told(options: str, fewest: int, drafts: int) -> None:
    both = json.dumps({"cudagraph_mode": "FULL_AND_PIECEWISE"})
    command = ("plan", "--vllm", both, *FEW[3:], *options.split())
    for graphs in range(1, fewest):
        shown = refused(errors.BudgetError, *command, "--max-graphs", str(graphs))
        assert f"budget.max_graphs is {graphs}, and one size takes {fewest} graphs" in shown
        assert f"Raise budget.max_graphs to {fewest} at least" in shown
    plan = plan_of(*command, "--max-graphs", str(fewest))
    assert plan.keys
    assert plan.num_graphs == fewest
    assert len(plan.draft_keys) == drafts


def test_a_mode_without_room_leaves_the_choice_to_others() -> None:
    drafted = ("--num-speculative-tokens", "3", "--speculative-method", "eagle")
    plan = plan_of(*FEW, *drafted, "--max-graphs", "3")
    assert plan.keys
    assert plan.num_graphs <= 3
    assert f"mode {plan.mode}, not FULL_AND_PIECEWISE: no graph of that fits" in decisions(plan)
    refused(errors.BudgetError, *FEW, *drafted, "--max-graphs", "1")


def test_limits_that_only_a_useless_graph_keeps_are_refused() -> None:
    """Sizes below a request's 4 tokens have one graph, and no batch."""
    drafted = ("--num-speculative-tokens", "3", "--speculative-method", "eagle")
    both = json.dumps({"cudagraph_mode": "FULL_AND_PIECEWISE"})
    command = ("plan", "--vllm", both, *FEW[3:], *drafted, "--costs", str(START))
    told = r"and ([0-9.]+) s by --costs\s+remedy: Raise budget.capture_time to ([0-9.]+s) at least"
    shown = re.search(told, refused(errors.BudgetError, *command, "--capture-time", "1ms"))
    assert shown
    one_graph = f"{float(shown[1]) * 0.75}s"
    assert shown[2] in refused(errors.BudgetError, *command, "--capture-time", one_graph)
    assert plan_of(*command, "--capture-time", shown[2]).keys


def test_a_check_of_an_slo_counts_the_draft_model() -> None:
    """The plan made anew has as many graphs."""
    drafted = ("--num-speculative-tokens", "3", "--speculative-method", "eagle")
    full = ("plan", "--vllm", json.dumps({"cudagraph_mode": "FULL"}), *GIVEN[3:])
    command = (*full, *drafted, "--slo", "tpot_p99=4ms")
    plan = plan_of(*command, "--output", "slo.json")
    assert "slo" in plan.evidence["binding"]  # type: ignore[index]
    shown = good("plan", "check", "slo.json", *GIVEN[-4:-2], "--json").stdout
    own, anew, *_ = json.loads(shown)["points"]
    assert (own["graphs"], anew["graphs"]) == (len(plan.keys), len(plan.keys))


def test_a_check_of_a_budget_counts_the_draft_model() -> None:
    """Sizes that the budget allows without the draft's graphs alone are no better plan."""
    full = ("plan", "--vllm", json.dumps({"cudagraph_mode": "FULL"}), *GIVEN[3:])
    drafted = ("--num-speculative-tokens", "3", "--speculative-method", "eagle")
    few = ("--max-graphs", "6")
    many = plan_of(*full, *drafted[:2], *few)
    sizes = ("--set", f"compilation.cudagraph_capture_sizes={list(many.capture_sizes)}")
    good(*full, *drafted, *few, *sizes, "--output", "few.json")
    check = json.loads(good("plan", "check", "few.json", *GIVEN[-4:-2], "--json").stdout)
    own, *others = check["points"]
    within = [point for point in others if point["graphs"] <= 6]
    allowed = [point for point in (own, *within) if point["graphs"] + point["drafts"] <= 6]
    fastest, best = (min(point["expected_us"] for point in some) for some in (within, allowed))
    assert fastest < best
    assert check["regret"] == own["expected_us"] / best - 1


def test_a_draft_model_counts_in_the_budget(home: Path) -> None:
    drafted = ("--num-speculative-tokens", "3", "--speculative-method", "eagle")
    command = (*GIVEN, *drafted, "--mode", "keep")
    limited = (*command, "--max-graphs", "24")
    shown = unwrapped(good(*limited, "--output", "few.json").stdout)
    plan = load_plan(home / "few.json")
    assert plan.draft_keys
    assert len(plan.keys) + len(plan.draft_keys) <= 24
    assert plan.budget["max_graphs"] == 24
    again = plan_of(*command, "--max-graphs", str(plan.num_graphs))
    assert again.num_graphs == plan.num_graphs
    assert "max_graphs counts the draft model's graphs" in decisions(plan)
    once = f"{plan.num_graphs} graphs ({len(plan.draft_keys)} of them of the draft model)"
    assert f"Plan: {once} instead of" in shown
    assert f"those with the vllm ladder's 179 graphs, with {once}" in shown
    undrafted = (
        "warning     step times are without drafting, unless each row of a table has it: TPOT lacks"
    )
    assert undrafted in shown.partition("sizes  ")[0]
    accepted = "all drafts count as accepted, so TPOT is too short: --set speculative."
    assert f"warning     {accepted}" in shown.partition("sizes  ")[0]
    known = ("--set", "speculative.accepted_tokens=4")
    assert accepted not in " ".join(plan_of(*limited, *known).evidence["unsure"])  # type: ignore[index]
    assert plan.evidence is not None
    assert "max_graphs" in plan.evidence["binding"]
    good(*command, "--output", "more.json")
    more = load_plan(home / "more.json")
    both = good("plan", "diff", "few.json", "more.json").stdout
    assert re.search(rf"graphs +{plan.num_graphs} +{more.num_graphs} ", both)
    emitted = good(*limited, "--emit", "vllm")
    sizes = json.loads(emitted.stdout.split("'")[1])["cudagraph_capture_sizes"]
    assert sizes == list(plan.capture_sizes)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_sizes_are_whole_requests_where_the_runner_rounds_them(runner: str) -> None:
    bounds = ("--max-num-seqs", "64", "--max-num-batched-tokens", "256")
    command = ("plan", "--vllm", "{}", *bounds, *GIVEN[-4:], "--num-speculative-tokens", "2")
    plan = plan_of(*command, "--runner", runner, "--mode", "keep", "--scale", "20")
    mixed = [key.num_tokens for mode, key in plan.keys if mode is CUDAGraphMode.PIECEWISE]
    decode = [key.num_tokens for mode, key in plan.keys if mode is CUDAGraphMode.FULL]
    assert (256 in mixed) == (runner == "v2")
    assert {size for size in mixed if size % 3} <= {size for size in mixed if size > 192}
    assert runner == "v2" or not [size for size in mixed if size % 3]
    assert not [size for size in decode if size % 3]
    assert plan.evidence is not None
    theirs = {point["name"]: point["expected_us"] for point in plan.evidence["ladders"]}
    assert plan.expected_us is not None
    assert plan.expected_us <= theirs["vllm"] * 1.001
    given = ("--set", f"compilation.cudagraph_capture_sizes={list(plan.capture_sizes)}")
    captured = plan_of("plan", "--vllm", "{}", *bounds, *command[-2:], "--runner", runner, *given)
    assert set(captured.keys) == set(plan.keys)


def test_decode_graphs_for_any_number_of_tokens_are_not_planned_for_traffic() -> None:
    varlen = ("--set", "speculative.varlen_decode=true", "--num-speculative-tokens", "2")
    assert "varlen_decode" in refused(errors.PlanError, *GIVEN, *varlen)
    assert "varlen_decode" in refused(errors.PlanError, *GIVEN[:-4], *varlen, "--emit", "vllm")
    plan = plan_of(*GIVEN[:-4], *varlen)
    assert {key.max_query_len for mode, key in plan.keys if mode is CUDAGraphMode.FULL} == {3}
    shown = " ".join(good(*GIVEN[:-4], *varlen).stdout.split())
    assert "batches uniform decode: FULL; mixed: PIECEWISE" in shown
    assert "query length 1 to 3 tokens of each request" in shown


def test_a_lora_case_is_told_apart_from_the_number_of_adapters_that_was_given() -> None:
    (Path("adapters.csv")).write_text(
        "num_tokens,count,num_reqs,uniform,num_active_loras\n8,9,8,true,2\n"
    )
    command = (*GIVEN[:-4], "--enable-lora", "--max-loras", "4", "--traffic", "adapters.csv")
    shown = " ".join(good(*command).stdout.split())
    head = shown.partition("Ladders")[0]
    assert "FULL uniform, LoRA case 5: 8" in head
    assert "LoRA cases 0, 5 active adapters (5: any number up to max_loras 4)" in head
    assert "5 adapters" not in shown
    assert "trtllm" not in shown, "vLLM has no such ladder"
    assert "trtllm" in good(*command, "--verbose").stdout
    told = "steps with adapters were not measured: taken as 10% longer"
    assert told in head
    assert told not in " ".join(good(*GIVEN, "--enable-lora", "--max-loras", "4").stdout.split())


def test_what_a_plan_with_adapters_prints_can_be_pasted() -> None:
    plan = plan_of(*GIVEN, "--enable-lora", "--max-loras", "4")
    assert plan.emission is not None
    pasted = shlex.split(f"{plan.emission.options} {plan.emission.bounds}")
    assert "--enable-lora" in pasted
    checked = good("vllm", "check", *pasted).stdout
    assert f"vLLM captures {len(plan.keys)} graphs" in checked
    alone = plan_of("plan", "--vllm", "{}", "--enable-lora")
    assert alone.keys == plan_of("plan", "--vllm", "{}", "--enable-lora", "--max-loras", "1").keys


def test_the_short_options_of_drafts_are_taken_as_by_vllm() -> None:
    names = ("--num-speculative-tokens", "3", "--speculative-method", "mtp")
    short = ("--spec-tokens", "3", "--spec-method", "mtp")
    with_drafts = plan_of(*GIVEN[:-4], *names)
    assert with_drafts.draft_keys
    assert plan_of(*GIVEN[:-4], *short) == with_drafts


def test_a_full_kv_cache_makes_requests_wait() -> None:
    roomy = plan_of(*GIVEN, "--max-graphs", "8")
    tight = plan_of(*GIVEN, "--max-graphs", "8", "--kv-cache-tokens", "400")
    assert roomy.evidence is not None
    assert tight.evidence is not None
    ttft = [one.evidence["service"][0]["service"]["ttft_us"]["p99"] for one in (roomy, tight)]
    assert ttft[0] < ttft[1]


@pytest.mark.parametrize(
    ("memory", "words", "change"), [("400MiB", "less", "more"), ("4GiB", "more", "fewer")]
)
def test_memory_of_graphs_is_told_as_tokens_of_kv_cache(
    home: Path, memory: str, words: str, change: str
) -> None:
    """50 GiB for 1,000,000 tokens, by vLLM's log: 53,687 bytes a token."""
    start = Path(__file__).parents[1] / "data" / "vllm_start.log"
    size = "INFO [kv_cache_utils.py:1] GPU KV cache size: 1,000,000 tokens\n"
    (home / "start.log").write_text(start.read_text() + size)
    command = (*GIVEN, "--mode", "keep", "--memory", memory, "--costs", "start.log")
    plan = plan_of(*command)
    assert plan.evidence
    assert plan.evidence["kv_tokens"] == 1_000_000
    told = decisions(plan)
    pattern = (
        r"(.+) [MG]iB (\w+) than the graphs asked for are ([\d,]+) tokens of KV cache, .*% (\w+)"
    )
    found = re.search(pattern, told)
    assert found is not None, told
    assert (found[2], found[4]) == (words, change)
    unit = 2**30 if "GiB" in found[0] else 2**20
    tokens = int(found[3].replace(",", ""))
    assert tokens == pytest.approx(float(found[1]) * unit / 53_687, rel=0.02)
    given = re.search(
        r"are ([\d,]+) tokens", decisions(plan_of(*command, "--kv-token-bytes", "100000"))
    )
    assert given is not None
    assert int(given[1].replace(",", "")) == pytest.approx(tokens * 0.53687, abs=1)
    tight = plan_of(*command, "--kv-cache-tokens", "90000")
    assert tight.evidence
    assert tight.evidence["kv_tokens"] == 90_000


def test_packed_traces(home: Path) -> None:
    packed = [part.replace("trace.csv", "trace.csv.gz") for part in GIVEN]
    assert plan_of(*packed, "--max-graphs", "8").keys == plan_of(*GIVEN, "--max-graphs", "8").keys
    whole = (home / "trace.csv.gz").read_bytes()
    for broken in (b"\x1f\x8b\x08broken", whole[:-9], whole[:40] + whole[60:]):
        (home / "trace.csv.gz").write_bytes(broken)
        assert "cannot read" in refused(errors.TrafficError, *packed)


# --- what is simulated ---------------------------------------------------------------------------------------

TOGETHER = ("--set", "distributed.data_parallel_sync=true")


def test_replicas_that_run_in_step_are_ranks_of_one_engine(home: Path) -> None:
    command = (*GIVEN, "--max-graphs", "8", "--mode", "keep", "--speedup", "20")
    apart = plan_of(*command, "--replicas", "4")
    for name in ("-dp", "--data-parallel-size"):
        assert plan_of(*command, name, "4").evidence == apart.evidence
    ranks = plan_of(*command, "--replicas", "4", *TOGETHER)
    assert apart.evidence is not None
    assert ranks.evidence is not None
    assert any("4 ranks step together" in note for note in ranks.evidence["traffic_notes"])
    assert "for 1 of 4 replicas" in apart.evidence["traffic_source"]
    assert "replicas" not in ranks.evidence["traffic_source"]
    assert ranks.simulated["distributed"] == {"data_parallel_sync": True}
    # one prompt makes the step of all ranks a mixed one
    means = [plan.evidence["expected_us"]["plan"] for plan in (apart, ranks) if plan.evidence]
    assert means[0] < means[1]


def test_a_check_knows_that_ranks_run_in_step() -> None:
    command = (*GIVEN, "--max-graphs", "8", "--mode", "keep", "--speedup", "20")
    good(*command, "--replicas", "4", *TOGETHER, "--output", "plan.json")
    check = ("plan", "check", "plan.json", *GIVEN[-4:], "--speedup", "20", "--replicas", "4")
    assert "4 ranks step together" in unwrapped(good(*check).stdout)


def test_nothing_is_simulated_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def counted(trace: Any, bounds: Any, clock: Any) -> Any:
        shapes = [StepShape(n, n, uniform) for n in range(1, 65) for uniform in (True, False)]
        seen.append((trace.source, bounds, tuple(map(clock, shapes))))
        return simulate(trace, bounds, clock)

    monkeypatch.setattr(decisions_module, "simulate", counted)
    plan_of(*GIVEN, "--max-graphs", "8", "--slo", "tpot_p99=10ms")
    assert 4 < len(seen) == len(set(seen))


def test_long_traces_are_planned_by_their_first_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions_module, "LARGE", 60)
    sizes = []

    def sized(trace: Any, bounds: Any, clock: Any) -> Any:
        sizes.append(len(trace.requests))
        return simulate(trace, bounds, clock)

    monkeypatch.setattr(decisions_module, "simulate", sized)
    plan = plan_of(*GIVEN, "--max-graphs", "8")
    assert sizes.count(100) == 1
    assert set(sizes) == {60, 100}
    assert plan.evidence is not None
    assert [point["graphs"] for point in plan.evidence["service"]][-1] == 0
    assert "modes were weighed for the first 60 requests" in decisions(plan)
    sizes.clear()
    kept = plan_of(*GIVEN, "--max-graphs", "8", "--mode", "keep")
    assert any("higher loads are of its first 60 requests" in note for note in kept.notes)
    assert sizes.count(100) == 1
    assert set(sizes) == {60, 100}


# --- times that were not measured -----------------------------------------------------------------------------


def test_rows_name_the_steps_that_were_not_measured(home: Path) -> None:
    shown = good(*GIVEN, "--max-graphs", "8").stdout
    assert "extrapolated, as larger" not in unwrapped(shown)
    short = "".join(line for line in TIMES.splitlines(keepends=True) if "2048" not in line)
    (home / "times.csv").write_text(short.format(piecewise=5000))
    shown = unwrapped(good(*GIVEN, "--max-graphs", "8", "--speedup", "20").stdout)
    assert re.search(r"extrapolated, as larger than those measured: .*\d+\.\d% of the steps", shown)


@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY"])
def test_the_plan_is_compared_with_the_graphs_that_were_asked_for(mode: str) -> None:
    assert "asked for" not in good(*GIVEN, "--mode", "keep").stdout.partition("What requests")[0]
    given = (*GIVEN, "--set", f"compilation.cudagraph_mode={mode}", "--mode", "best")
    plan = plan_of(*given)
    assert str(plan.mode) != mode
    assert plan.evidence is not None
    asked = plan.evidence["ladders"][1]
    assert (asked["name"], asked["graphs"]) == ("asked for", plan.evidence["service"][1]["graphs"])
    theirs = "no graphs, as asked for"
    if asked["graphs"]:
        theirs = f"the {asked['graphs']} graphs asked for"
    assert f"shorter with {len(plan.keys)} graphs than with {theirs}" in plan.evidence["verdict"]
    shown = unwrapped(good(*given).stdout)
    head, hint, _ = shown.partition("; --costs start.log, ")
    assert hint
    few, more, why = head.partition(" (7 for batches that max_num_seqs = 64 allows")
    assert few == f"Plan: {len(plan.keys)} graphs instead of {theirs}"
    assert bool(more) == bool(asked["graphs"]), "no plan has 0 graphs by --max-graphs"
    assert not more or why.endswith("does not show: --insurance 0 plans without)")


def test_tensorrt_gets_the_whole_budget_for_decode(home: Path) -> None:
    """Unless prefill graphs are asked for, which it captures besides."""
    bounds = (
        "--set",
        "scheduler.max_num_seqs=64",
        "--set",
        "scheduler.max_num_batched_tokens=2048",
    )
    command = ("plan", "good.yaml", *GIVEN[-4:], *bounds, "--max-graphs", "12")
    emitted = yaml.safe_load(good(*command, "--emit", "trtllm").stdout)
    assert len(emitted["cuda_graph_config"]["batch_sizes"]) == 12
    assert "prefill_cuda_graph_backend" not in emitted
    mode = ("--set", "compilation.cudagraph_mode=FULL_AND_PIECEWISE")
    emitted = yaml.safe_load(good(*command, *mode, "--emit", "trtllm").stdout)
    assert emitted["prefill_cuda_graph_backend"] == "breakable"
    sizes = emitted["cuda_graph_config"]["batch_sizes"], emitted["prefill_capture_num_tokens"]
    assert all(sizes)
    assert len(sizes[0]) + len(sizes[1]) <= 12


def test_the_best_mode_is_one_that_the_engine_runs() -> None:
    both = ("--set", "compilation.cudagraph_mode=FULL_AND_PIECEWISE", "--max-graphs", "8")
    command = ("plan", "good.yaml", *GIVEN[-4:], *BOUNDS_SET, *both, "--mode", "best")
    for engine in ("trtllm", "sglang"):
        good(*command, "--emit", engine, "--output", "plan.json")
        plan = Plan.model_validate_json(Path("plan.json").read_text())
        weighed = {line.split()[1].strip(":") for line in decisions(plan).splitlines()}
        known = {"FULL_DECODE_ONLY", "PIECEWISE", "FULL_AND_PIECEWISE"}
        assert {*weighed, str(plan.mode)} == known


def test_asked_for_is_of_the_mode_that_was_asked_for(home: Path) -> None:
    (home / "times.csv").write_text(TIMES.format(piecewise=14000))
    shown = []
    for mode in ("best", "keep"):
        plan = plan_of(*GIVEN, "--mode", mode, "--max-graphs", "16")
        assert plan.evidence is not None
        shown.append(plan.evidence["service"][1])
    assert shown[0] == shown[1]
    assert shown[0]["name"] == "asked for"


def test_wrong_goals_are_refused() -> None:
    for wrong in ("tpot=1ms", "tpot_p99=3", "tpot_p99=fast", "tpot_p99=0ms", "ttft_p99=1h"):
        result = cgplan_command(*GIVEN, "--slo", wrong)
        assert result.exit_code == 2
        assert "is no SLO: write tpot_p99=30ms, the unit us, ms or s" in unwrapped(result.stderr)


def test_the_line_of_loads_names_those_that_were_planned_for(home: Path) -> None:
    share = r"loads +\d+% of steps: "
    shown = unwrapped(good(*GIVEN, "--max-graphs", "8", "--verbose").stdout)
    assert re.search(share + "2 times the load, 4 times the load, p99 of decode; steps ", shown)
    rows = "".join(f"{n},{100 - n},{n},true\n" for n in range(1, 60))
    (home / "trace.csv").write_text(f"num_tokens,count,num_reqs,uniform\n{rows}")
    assert re.search(share + "p99 of decode; steps ", unwrapped(good(*GIVEN, "-v").stdout))


def test_a_full_batch_keeps_its_graph_for_1_mib() -> None:
    """By a log a graph is 1 MiB and more: with not a byte more than today the largest would be 31."""
    sizes = settings(
        "compilation.cudagraph_capture_sizes=[4,16,32]",
        "compilation.cudagraph_mode=FULL_DECODE_ONLY",
        "scheduler.max_num_seqs=32",
    )
    plan = plan_of(*GIVEN, "--costs", str(START), "--speedup", "3", "--mode", "keep", *sizes)
    assert plan.max_capture_size == 32


def test_a_plan_takes_no_more_memory_than_the_graphs_asked_for_unless_asked() -> None:
    command = (*GIVEN, "--costs", str(START))
    plan = plan_of(*command)
    free = plan_of(*command, "--memory", "none")
    asked = plan_of("plan", "--vllm", "{}", *BOUNDS, "--costs", str(START))
    assert plan.predicted is not None
    assert free.predicted is not None
    assert asked.predicted is not None
    assert plan.predicted.total_bytes <= asked.predicted.total_bytes < free.predicted.total_bytes
    said = "memory is kept to that of the graphs asked for, "
    assert re.search(
        rf"{said}.*; with --memory none .*, and steps [\d.]+% shorter", decisions(plan)
    )
    assert said not in decisions(free)
    assert plan_of(*command, "--memory", "100GiB").keys == free.keys
    none = plan_of(*command, "--set", "compilation.cudagraph_mode=NONE", "--mode", "best")
    assert none.keys
    assert said not in decisions(none)


def test_a_plan_keeps_the_size_of_the_draft_models_decode_where_the_budget_has_room(
    home: Path,
) -> None:
    """The largest decode of the draft model has a token of each of 50 requests."""
    drafted = ("--num-speculative-tokens", "3", "--speculative-method", "eagle")
    command = (*GIVEN[:3], "--max-num-seqs", "50", *GIVEN[5:], *drafted)
    plan = plan_of(*command)
    added = "size 50 was added for the draft model's decode, which steps lack"
    alone = "draft model, decode: "
    assert added in plan.notes
    assert 50 in plan.capture_sizes
    assert max(key.num_tokens for _, key in plan.draft_decode_keys) == 50
    assert not plan.lint
    ran = {use["size"] for use in plan.evidence["uses"]}  # type: ignore[index]
    assert ran <= {None, *(key.num_tokens for _, key in plan.keys)}
    few = plan_of(*command, "--max-graphs", str(plan.num_graphs - 1))
    assert few.num_graphs < plan.num_graphs
    assert added not in few.notes
    assert few.lint[0].startswith(alone)
    assert few.lint[0].endswith("for which the limits have no room")
    priced = (*command, "--costs", str(START), "--memory")
    free = plan_of(*priced, "none").predicted
    assert free
    memory = free.total_bytes // (1 << 20)
    for limit in (memory + 1, memory - 300):
        fits = plan_of(*priced, f"{limit}MiB")
        assert added in fits.notes
        assert fits.predicted
        just = fits.predicted.total_bytes // (1 << 20) + 1  # the draft's graphs have no price
        assert added in plan_of(*priced, f"{just}MiB").notes
    good(*priced, f"{memory}MiB", "--output", "bounded.json")
    bounded = load_plan(home / "bounded.json")
    assert bounded.predicted
    assert bounded.predicted.total_bytes <= memory << 20
    (told,) = bounded.lint
    room = r"run eagerly without size 50, for which the limits have no room: with it graphs take"
    assert re.search(rf"{room} {memory}\.[1-9] MiB", told)
    checked = cgplan_command("vllm", "check", "--plan", "bounded.json", "--log", str(START))
    assert alone in checked.stdout


def test_a_change_of_mode_says_by_how_many_graphs(home: Path) -> None:
    (home / "times.csv").write_text(TIMES.format(piecewise=14000))
    plan = plan_of(*GIVEN, "--max-graphs", "16")
    asked_for = plan_of(*GIVEN, "--max-graphs", "16", "--mode", "keep")
    more = plan.num_graphs - asked_for.num_graphs
    assert f"mode FULL, not FULL_AND_PIECEWISE: {more:+} graphs, steps -" in decisions(plan)


def test_from_mode_none_no_size_is_above_those_measured(home: Path) -> None:
    """No graph is asked for, so that vLLM's sizes up to 8 are none that exist."""
    lines = [line for line in TIMES.format(piecewise=5000).splitlines() if ",1," in line]
    four = [line.replace(",1,", ",4,") for line in lines]
    (home / "times.csv").write_text("\n".join((TIMES.splitlines()[0], *lines, *four)))
    none = json.dumps({"cudagraph_mode": "NONE"})
    bounds = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64")
    plan = plan_of("plan", "--vllm", none, *bounds, *GIVEN[-4:], "--mode", "best")
    assert plan.max_capture_size == 4


@pytest.mark.parametrize(
    ("sizes", "seqs"),
    [({"max_cudagraph_capture_size": 32}, "128"), ({"cudagraph_mode": "FULL"}, "1024")],
)
def test_the_draft_models_size_is_none_that_plans_may_not_have(sizes: Any, seqs: str) -> None:
    """vLLM's own sizes end at 512, and the measured FULL ones at 256."""
    drafted = ("--num-speculative-tokens", "3", "--speculative-method", "eagle", "--mode", "keep")
    bounds = ("--max-num-seqs", seqs, "--max-num-batched-tokens", "4096")
    plan = plan_of("plan", "--vllm", json.dumps(sizes), *bounds, *GIVEN[-4:], *drafted)
    assert plan.max_capture_size <= sizes.get("max_cudagraph_capture_size", 512)
    assert plan.lint[0].endswith(f"{seqs} requests run eagerly without size {seqs}")
    step = plan.evidence["expected_us"]  # type: ignore[index]
    assert step["plan"] >= step["bound"]


def test_sizes_are_not_kept_where_a_higher_load_needs_others(home: Path) -> None:
    """Of the load itself, 5 requests are the p99; of twice as many a second, 25."""
    asked = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
    command = ("plan", "--vllm", json.dumps(asked), *GIVEN[3:], "--mode", "keep")
    for objective, keep in (("robust", False), ("mean", True)):
        plan = plan_of(*command, "--objective", objective)
        assert plan.evidence is not None
        assert plan.evidence["keep"] is keep
        shown = good(*command, "--objective", objective).stdout
        assert ("\n--compilation-config" in shown) is not keep
