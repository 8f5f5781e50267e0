"""From traffic to a plan with its evidence."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import plans
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import Costs, propose

from cgplan.config import Config
from cgplan.errors import BudgetError
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.optimizer.evidence import NOT_WORTH_IT, Evidence, LadderPoint
from cgplan.optimizer.lint import lint
from cgplan.optimizer.problem import EAGER, Run, step_clock
from cgplan.planning import LADDERS, CudagraphDispatcher, Plan, build_plan, config_hash
from cgplan.planning.difference import PlanDifference, compare
from cgplan.planning.plan import Lane
from cgplan.pricing import GraphCosts
from cgplan.reports import render_text
from cgplan.reports.layout import plain_text
from cgplan.reports.plan_tables import render_difference
from cgplan.traffic.files import read_traffic
from cgplan.traffic.histogram import StepShape, Traffic
from cgplan.traffic.simulation import SchedulerBounds, simulate
from cgplan.traffic.step_times import StepTimes

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
TRACE = Path(__file__).parents[1] / "data" / "azure_llm_code_2023.csv"
MIB = 1 << 20
# 100 MiB of workspaces, 1 MiB of pool a token, 2 MiB and 0.5 s a graph, 1 s for the first one besides
COSTS = Costs(pool=MIB, static=0, workspace=100 * MIB, each=2 * MIB, seconds=0.5, slope=0, once=1.0)


def config_of(mode: str = "FULL_DECODE_ONLY", sizes: Any = None, **options: Any) -> Config:
    return plans.config_of(mode, sizes, **{"seqs": 64, "tokens": 512, **options})


def decode(most: int = 64, loras: int = 0) -> dict[StepShape, float]:
    """Every size alike."""
    return {StepShape(n, n, True, loras): 10.0 for n in range(1, most + 1)}


def traffic(*parts: dict[StepShape, float]) -> Traffic:
    return Traffic.of([pair for part in parts for pair in part.items()], "by hand", ["a note"])


# A graph takes 100 us and 10 for each token, an eager step 1000 as long as the device takes less.
TIMES = StepTimes.measured(
    {
        (FULL, 0): {1: 110, 400: 4100},
        (PIECEWISE, 0): {1: 310, 400: 4300},
        (NONE, 0): {1: 1000, 90: 1000, 400: 4100},
    },
    "by hand",
)


def evidence_of(
    config: Config, seen: Traffic | None = None, costs: GraphCosts | None = None
) -> Evidence:
    return propose(config, seen or traffic(decode()), TIMES, costs).evidence


def sizes_of(evidence: Evidence) -> list[tuple[int, ...]]:
    return [lane.sizes for lane in evidence.lanes]


def ladder(evidence: Evidence, name: str) -> LadderPoint:
    return next(ladder for ladder in evidence.ladders if ladder.name == name)


# --- the rule of the dispatcher -------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    plan=plans.plans(), tokens=st.integers(1, 120), uniform=st.booleans(), loras=st.integers(0, 12)
)
def test_batches_run_where_the_dispatcher_sends_them(
    plan: Plan, tokens: int, uniform: bool, loras: int
) -> None:
    mode, descriptor = CudagraphDispatcher(plan).dispatch(tokens, uniform, loras)
    (use,) = Run(plan.lanes(), traffic({StepShape(tokens, 1, uniform, loras): 1.0}), TIMES).uses
    if use.size is None:
        assert (mode, use.lane) == (NONE, EAGER)
    else:
        assert (mode, descriptor.uniform, descriptor.num_active_loras, descriptor.num_tokens) == (
            *use.lane,
            use.size,
        )


def test_traffic_through_a_plan() -> None:
    plan = build_plan(config_of("FULL_AND_PIECEWISE", [4, 16], seqs=8))
    run = Run(
        plan.lanes(),
        traffic({StepShape(3, 3, True): 2, StepShape(10, 2): 1, StepShape(20, 2): 1}),
        TIMES,
    )
    decode_part, mixed_part, eager = run.uses
    assert (decode_part.lane, decode_part.size, decode_part.padding) == ((FULL, True, 0), 4, 0.25)
    assert (mixed_part.lane, mixed_part.size) == ((PIECEWISE, False, 0), 16)
    assert (eager.size, eager.padding) == (None, 0.0)
    assert run.expected_us == pytest.approx((2 * 140 + 460 + 1000) / 4)
    assert run.padding == pytest.approx(8 / 44)
    assert (decode_part.share, decode_part.step_us, decode_part.own_us) == (
        pytest.approx(0.5),
        pytest.approx(140),
        pytest.approx(130),
    )


@settings(max_examples=60, deadline=None)
@given(
    weights=st.dictionaries(st.integers(1, 64), st.integers(1, 10**6), min_size=1),
    mode=st.sampled_from(["FULL", "FULL_AND_PIECEWISE"]),
    most=st.none() | st.integers(1, 60),
    insurance=st.sampled_from([0.0, 0.1]),
)
def test_the_number_of_a_plan_given_again_is_its_number(
    weights: dict[int, int], mode: str, most: int | None, insurance: float
) -> None:
    seen = traffic({StepShape(n, n, True): float(count) for n, count in weights.items()})
    graphs = most
    found = list[int]()
    for _ in range(3):
        config = config_of(mode, budget={"max_graphs": graphs} if graphs else {})
        asked, graphs = graphs, len(propose(config, seen, TIMES, insurance=insurance).plan.keys)
        found.append(graphs)
        if graphs == asked:
            break  # the same question again has the same answer
    assert graphs == asked
    assert most is None or found[0] == graphs


# --- keys that could not be captured --------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    lost=st.sets(st.integers(1, 12), max_size=12),
    weights=st.dictionaries(st.integers(1, 12), st.integers(1, 9), min_size=1),
    graphs=st.integers(1, 3),
)
def test_a_plan_does_without_what_could_not_be_captured(
    lost: set[int], weights: dict[int, int], graphs: int
) -> None:
    """The best of all sets of the other sizes at which a batch sits, by going through them."""
    config = config_of("FULL", seqs=16, budget={"max_graphs": graphs})
    seen = traffic({StepShape(n, n, True): float(count) for n, count in weights.items()})
    failed = {(FULL, BatchDescriptor(n, n)): f"HostSyncError: at {n}" for n in lost}
    proposal = propose(config, seen, TIMES, COSTS, failed)
    best = min(
        Run({Lane(FULL, False, 0): sizes} if sizes else {}, seen, TIMES).expected_us
        for count in range(graphs + 1)
        for sizes in combinations(sorted(set(weights) - lost), count)
    )
    assert proposal.evidence.expected_us.plan == pytest.approx(best, rel=2e-4)
    assert not lost & set(proposal.plan.capture_sizes)
    assert {part.reason: part.sizes for part in proposal.evidence.failed} == {
        f"HostSyncError: at {n}": (n,) for n in lost
    }
    assert Plan.model_validate_json(proposal.plan.model_dump_json()) == proposal.plan


def test_what_could_not_be_captured_is_told() -> None:
    config = config_of("FULL", [4, 8], seqs=16, budget={"max_graphs": 3})
    failed = {(FULL, BatchDescriptor(n, n)): "HostSyncError: aten::item" for n in (4, 6)}
    seen = traffic({StepShape(n, n, True): 1.0 for n in (4, 6, 8)})
    before, after = propose(config, seen, TIMES), propose(config, seen, TIMES, failed=failed)
    assert before.plan.capture_sizes == (4, 6, 8)
    assert after.plan.capture_sizes == (8,)
    difference = compare(before.plan, after.plan)
    assert [(part.sizes, part.reason) for part in difference.failed] == [
        ((4, 6), "HostSyncError: aten::item")
    ]
    assert PlanDifference.model_validate_json(difference.model_dump_json()) == difference
    assert compare(after.plan, before.plan).failed == ()
    shown = plain_text(render_difference(difference, "old", "new"))
    assert "left out  FULL 4, 6: HostSyncError: aten::item" in shown
    assert "FULL 4, 6  HostSyncError: aten::item" in render_text(after.plan)


# --- the plan -------------------------------------------------------------------------------------------------


def test_a_proposed_plan_is_a_plan() -> None:
    config = config_of("FULL_AND_PIECEWISE", seqs=16, spec=1, budget={"max_graphs": 6})
    seen = traffic(
        {StepShape(2 * n, n, True): 1.0 for n in range(1, 17)},
        {StepShape(n, 2): 1.0 for n in (5, 40, 41)},
    )
    proposal = propose(config, seen, TIMES, COSTS)
    plan = proposal.plan
    assert len(plan.keys) == 6
    assert plan.config_hash == config_hash(config), "it may be captured with this configuration"
    assert plan.config == build_plan(config).config
    assert plan.sizes_source == "planned for by hand"
    assert plan.capture_sizes == tuple(sorted({key.num_tokens for _, key in plan.keys}))
    assert [mode for mode, _ in plan.keys] == sorted(
        (mode for mode, _ in plan.keys), key=lambda m: m is FULL
    )
    assert all(key.num_tokens == 2 * (key.num_reqs or 0) for mode, key in plan.keys if mode is FULL)
    assert plan.predicted is not None
    assert plan.predicted == COSTS.of(plan.keys)
    assert plan.predicted.source == COSTS.source
    again = Plan.from_json(plan.model_dump_json())
    assert again == plan
    assert Evidence.model_validate(again.evidence) == proposal.evidence
    assert plan.expected_us == proposal.evidence.expected_us.plan


def test_every_figure_of_the_evidence_is_of_the_plan() -> None:
    config, seen = config_of(seqs=64, budget={"max_graphs": 5}), traffic(decode(60))
    proposal = propose(config, seen, TIMES, COSTS)
    evidence, keys = proposal.evidence, proposal.plan.keys
    run = Run(proposal.plan.lanes(), seen, TIMES)
    assert evidence.expected_us.plan == pytest.approx(run.expected_us)
    assert evidence.expected_us.eager == pytest.approx(Run({}, seen, TIMES).expected_us) == 1000
    assert evidence.expected_us.bound == pytest.approx(sum(100 + 10 * n for n in range(1, 61)) / 60)
    cost = COSTS.of(keys)
    assert (evidence.graphs, evidence.bytes, evidence.seconds) == (
        5,
        cost.total_bytes,
        cost.seconds,
    )
    assert (evidence.traffic_source, evidence.traffic_weight, evidence.traffic_notes) == (
        "by hand",
        600,
        ("a note",),
    )
    assert evidence.times_source == TIMES.source
    assert (evidence.costs_source, evidence.costs_estimated) == ("a line", True)
    assert sum(use.share for use in evidence.uses) == pytest.approx(1)
    assert [use.size for use in evidence.uses] == [12, 24, 36, 48, 60]
    assert evidence.uses[0].padding == pytest.approx(1 - 6.5 / 12)
    assert evidence.warnings == lint(proposal.plan, run)


@pytest.mark.parametrize("sizes", [None, "trtllm", [8, 32, 64]])
def test_without_a_budget_the_plan_is_as_good_as_the_ladder_with_the_fewest_graphs(
    sizes: Any,
) -> None:
    config = config_of(sizes=sizes)
    for seen in (
        traffic(decode()),
        traffic({StepShape(n, n, True): 1.0 / n for n in (3, 5, 30, 64)}),
    ):
        proposal = propose(config, seen, TIMES)
        evidence = proposal.evidence
        names = "configured" if isinstance(sizes, list) else sizes or "vllm", "vllm"
        asked = min((ladder(evidence, name) for name in names), key=lambda point: point.expected_us)
        assert evidence.expected_us.plan <= asked.expected_us * (1 + 1e-3)
        assert evidence.expected_us.eager is not None
        close = evidence.expected_us.bound + 0.05 * (
            evidence.expected_us.eager - evidence.expected_us.bound
        )
        assert evidence.expected_us.plan <= close
        fewer = evidence.pareto[evidence.graphs - 2].expected_us
        assert evidence.graphs == 1 or fewer > min(asked.expected_us * (1 + 1e-3), close)
        assert "the fewest graphs that are as good as the" in evidence.rule
        assert evidence.binding == ()


def test_insurance_covers_batches_that_the_traffic_does_not_show() -> None:
    """Planned for decode batches of 3 to 6 requests, run with up to 64."""
    small = traffic({StepShape(n, n, True): 10.0 for n in range(3, 7)})
    bare, insured = (propose(config_of(), small, TIMES, insurance=share) for share in (0.0, 0.1))
    assert max(bare.plan.capture_sizes) == 6
    assert max(insured.plan.capture_sizes) == 64
    for seen, most in ((small, 1.001), (small.unseen(bare.plan), 1.01), (traffic(decode()), 1.05)):
        vllm = Run(build_plan(config_of()).lanes(), seen, TIMES).expected_us
        assert Run(insured.plan.lanes(), seen, TIMES).expected_us <= vllm * most
    assert insured.evidence.insurance == 0.1
    few = propose(config_of(budget={"max_graphs": 2}), small, TIMES, insurance=0.1)
    three = propose(config_of(budget={"max_graphs": 3}), small, TIMES, insurance=0.1)
    assert few.evidence.next_graph is not None
    now, then = few.evidence.expected_us, three.evidence.expected_us
    gain = pytest.approx(max(now.plan - then.plan, 0.0))
    assert few.evidence.next_graph.microseconds == gain, "of the traffic alone"
    assert few.evidence.next_graph.microseconds <= now.plan - now.bound
    assert max(few.plan.capture_sizes) > 30


def test_several_loads_in_one_plan() -> None:
    low, high = traffic(decode(8)), traffic({StepShape(n, n, True): 1e6 for n in range(40, 65)})
    config = config_of(budget={"max_graphs": 6})
    alone = [propose(config, load, TIMES) for load in (low, high)]
    both = propose(config, [(low, 1.0), (high, 1.0)], TIMES)
    assert [point.source for point in both.evidence.loads] == ["by hand", "by hand"]
    for load, point, own in zip((low, high), both.evidence.loads, alone, strict=True):
        assert point.expected_us == pytest.approx(Run(both.plan.lanes(), load, TIMES).expected_us)
        assert (
            own.evidence.expected_us.plan
            <= point.expected_us
            <= own.evidence.expected_us.plan * 1.1
        )
    even = sum(Run(both.plan.lanes(), load, TIMES).expected_us for load in (low, high)) / 2
    assert both.evidence.expected_us.plan == pytest.approx(even), "each load counts by its weight"


def test_the_next_graph_of_a_list_is_a_size_in_all_its_lanes() -> None:
    def found(most: int) -> Evidence:
        config = config_of("FULL_AND_PIECEWISE", budget={"max_graphs": most})
        return propose(config, traffic(decode()), TIMES, one_list=True).evidence

    now = found(2)
    assert now.binding == ("max_graphs",)
    assert now.next_graph is not None
    gain = now.expected_us.plan - found(4).expected_us.plan
    assert now.next_graph.microseconds == pytest.approx(gain)
    assert gain > now.expected_us.plan - found(3).expected_us.plan


def test_the_number_of_graphs_binds() -> None:
    evidence = evidence_of(config_of(budget={"max_graphs": 4}), costs=COSTS)
    assert sizes_of(evidence) == [(16, 32, 48, 64)]
    assert evidence.binding == ("max_graphs",)
    assert "max_graphs 4" in evidence.rule
    fifth = evidence_of(config_of(budget={"max_graphs": 5}))
    assert evidence.next_graph is not None
    gain = evidence.expected_us.plan - fifth.expected_us.plan
    assert evidence.next_graph.microseconds == pytest.approx(gain)
    assert evidence.next_graph.percent == pytest.approx(100 * gain / evidence.expected_us.bound), (
        "all run in graphs"
    )


def test_memory_binds() -> None:
    """100 MiB of workspaces, then 1 MiB for each token of the largest size, and 2 MiB for each graph."""
    evidence = evidence_of(config_of(budget={"memory": "170MiB", "max_graphs": 60}), costs=COSTS)
    (sizes,) = sizes_of(evidence)
    assert evidence.bytes == (100 + sizes[-1] + 2 * len(sizes)) * MIB == 170 * MIB
    assert sizes[-1] < 64, "six batches that run eagerly pay for three graphs below"
    assert evidence.binding == ("memory",)
    assert evidence.next_graph is None, "it is not the number that binds"
    assert "within the budget (max_graphs 60, memory 170 MiB)" in evidence.rule
    small = evidence_of(config_of(budget={"memory": "130MiB"}), costs=COSTS)
    assert small.bytes is not None
    assert small.bytes <= 130 * MIB
    assert sizes_of(small)[0][-1] < 30, "the largest size costs too much"


def test_many_graphs_are_planned_for_where_they_may_be_had() -> None:
    config, seen = config_of(seqs=300), traffic(decode(300))
    cheap = StepTimes.measured({(FULL, 0): {1: 110, 300: 3100}, (NONE, 0): {1: 4000}}, "wide")
    found = {}
    for name, budget in {
        "few": {"max_graphs": 3},
        "many": {"max_graphs": 100},
        "most": {"max_graphs": 999},
    }.items():
        found[name] = propose(config_of(seqs=300, budget=budget), seen, cheap, COSTS).evidence
    few, many, most = (evidence.graphs for evidence in found.values())
    assert few == 3
    assert 90 < many <= 100 < 128 < most <= 256, "less those that bring next to nothing"
    assert "no more than 256 graphs were planned for" in found["most"].notes
    rich = propose(config_of(seqs=300, budget={"memory": "99GiB"}), seen, cheap, COSTS).evidence
    poor = propose(config_of(seqs=300, budget={"memory": "430MiB"}), seen, cheap, COSTS).evidence
    free = propose(config, seen, cheap, COSTS).evidence
    assert free.graphs < 64
    assert poor.graphs <= free.graphs, "memory gives no more graphs than suffice without a limit"
    assert poor.binding == ("memory",)
    assert poor.bytes is not None
    assert poor.bytes <= 430 * MIB
    assert rich.binding == ()
    assert sizes_of(rich) == sizes_of(free), "a budget that pays for the plan changes nothing"
    assert "no more graphs than suffice without it" in rich.rule


def test_graphs_that_bring_less_than_a_hundredth_of_a_percent_are_left_out() -> None:
    seen = traffic(
        {StepShape(64, 64, True): 1e6, StepShape(32, 32, True): 1.0, StepShape(1, 1, True): 1e6}
    )
    evidence = evidence_of(config_of(budget={"max_graphs": 10}), seen)
    assert sizes_of(evidence) == [(1, 64)]
    assert evidence.expected_us.plan <= evidence.expected_us.bound * (1 + 1e-4)


# --- budgets that pay for nothing -----------------------------------------------------------------------------


def test_a_budget_too_small_for_one_graph_names_the_smallest() -> None:
    seen = traffic({StepShape(n, n, True): 1.0 for n in (4, 8)})
    with pytest.raises(BudgetError) as caught:
        evidence_of(config_of(budget={"memory": "100MiB"}), seen, COSTS)
    assert "budget.memory is 100 MiB" in caught.value.message
    assert "the cheapest graph that a batch gains by takes 106 MiB" in caught.value.message
    assert "Raise budget.memory to 106MiB at least" in caught.value.remedy
    assert "--costs measure knows the pool of smaller graphs" in caught.value.remedy
    with pytest.raises(BudgetError, match=r"memory is 105\.98 MiB, but .* takes 106 MiB"):
        evidence_of(config_of(budget={"memory": "105.98MiB"}), seen, COSTS)
    evidence = evidence_of(config_of(budget={"memory": "106MiB"}), seen, COSTS)
    assert sizes_of(evidence) == [(4,)], "the remedy is enough"
    with pytest.raises(BudgetError, match=r"budget.capture_time is 1 s, .* and 1\.5 s") as caught:
        evidence_of(config_of(budget={"capture_time": "1s"}), seen, COSTS)
    assert "budget.capture_time to 1.51s" in caught.value.remedy or "1.52s" in caught.value.remedy
    assert evidence_of(config_of(budget={"capture_time": "1.52s"}), seen, COSTS).graphs == 1


# --- costs that are not known ---------------------------------------------------------------------------------


def test_limits_that_bind_are_named_together() -> None:
    seen = traffic({StepShape(1, 1, True): 1.0, StepShape(60, 60, True): 1.0})
    least = COSTS.of(build_plan(config_of(sizes=[60])).keys)
    budget = {"memory": least.total_bytes + MIB, "capture_time": least.seconds + 0.1}
    evidence = evidence_of(config_of(sizes=[1, 60, 64], budget=budget), seen, COSTS)
    assert sizes_of(evidence) == [(1,)]
    assert evidence.binding == ("memory", "capture_time")
    slow = config_of(
        sizes=[1, 60, 64], budget={"memory": "1GiB", "capture_time": least.seconds + 0.1}
    )
    assert evidence_of(slow, seen, COSTS).binding == ("capture_time",)


def test_without_costs_there_are_no_bytes_and_seconds() -> None:
    proposal = propose(
        config_of(budget={"memory": "1MiB", "max_graphs": 3}), traffic(decode()), TIMES
    )
    evidence = proposal.evidence
    assert evidence.graphs == 3
    assert proposal.plan.predicted is None
    points = [evidence, *evidence.pareto, *evidence.ladders]
    assert {(point.bytes, point.seconds) for point in points} == {(None, None)}
    assert (evidence.costs_source, evidence.costs_estimated) == (None, None)
    assert evidence.unbounded == ("memory",)
    assert evidence.unsure[-1].startswith(
        "budget.memory did not bound this plan: give --costs with the log of"
    )
    assert "max_graphs 3" in evidence.rule
    assert "memory" not in evidence.rule


# --- the curve and the ladders --------------------------------------------------------------------------------


def test_the_curve_falls_and_ends_where_nothing_is_left_to_gain() -> None:
    evidence = evidence_of(config_of(seqs=20), traffic(decode(20)), COSTS)
    assert [point.graphs for point in evidence.pareto] == list(range(1, 21))
    for one, other in pairwise(evidence.pareto):
        assert other.expected_us < one.expected_us
    assert evidence.pareto[-1].expected_us == pytest.approx(evidence.expected_us.bound)
    assert evidence.pareto[0].bytes == (100 + 20 + 2) * MIB
    assert [point.seconds for point in evidence.pareto[:3]] == [1.5, 2.0, 2.5]


def test_no_graph_is_left_whose_batches_another_lane_took() -> None:
    """A graph for LoRA at 28 tokens runs the batches without adapters until these have one of their own."""
    config = config_of(
        "FULL_AND_PIECEWISE", seqs=1, tokens=28, budget={"max_graphs": 5}, lora={"max_loras": 1}
    )
    counts = {(1, 1, False, 0): 26269, (3, 3, True, 0): 55, (21, 21, False, 1): 67,
              (28, 28, False, 0): 82, (240, 5, False, 0): 86}  # fmt: skip
    seen = traffic({StepShape(*shape): weight for shape, weight in counts.items()})
    costs = Costs(pool=MIB, static=9, workspace=100 * MIB, each=2 * MIB, seconds=0.2, slope=0.0, once=0.5)  # fmt: skip
    evidence = propose(config, seen, TIMES, costs).evidence
    assert evidence.graphs == sum(use.size is not None for use in evidence.uses) == 4


def test_a_graph_that_other_lanes_took_the_batches_of_is_left_out() -> None:
    lora = {"max_loras": 2, "specialize_active_lora": False}
    config = config_of("FULL_AND_PIECEWISE", seqs=41, tokens=82, spec=1, lora=lora)
    counts = {(1, 1, False, 0): 192333, (1, 1, False, 4): 738704, (38, 38, True, 3): 208831,
              (53, 53, True, 0): 473017, (71, 71, True, 1): 367902, (70, 70, False, 0): 1}  # fmt: skip
    seen = traffic({StepShape(*shape): weight for shape, weight in counts.items()})
    costs = Costs(pool=MIB, static=9, workspace=100 * MIB, each=2 * MIB, seconds=0.2, slope=0.0, once=0.5)  # fmt: skip
    evidence = propose(config, seen, TIMES, costs).evidence
    assert evidence.graphs == sum(use.size is not None for use in evidence.uses)


def test_ladders_stand_beside_the_curve() -> None:
    config = config_of(seqs=64)
    evidence = evidence_of(config, costs=COSTS)
    eager, *ladders = evidence.ladders
    assert [ladder.name for ladder in ladders] == list(LADDERS)
    assert (eager.name, eager.graphs, eager.bytes, eager.seconds) == ("eager", 0, 0, 0)
    assert eager.expected_us == evidence.expected_us.eager
    vllm = ladder(evidence, "vllm")
    keys = build_plan(config).keys
    assert vllm.graphs == len(keys) == 11
    assert vllm.expected_us == pytest.approx(
        Run(plans.lists_of(keys), traffic(decode()), TIMES).expected_us
    )
    assert (vllm.bytes, vllm.seconds) == (COSTS.of(keys).total_bytes, COSTS.of(keys).seconds)
    for point in ladders:
        assert not point.no_gain
        curve = evidence.pareto[min(point.graphs, len(evidence.pareto)) - 1]
        assert curve.expected_us <= point.expected_us * (1 + 1e-9)


def test_sizes_that_the_configuration_lists_are_a_ladder_too() -> None:
    listed = ladder(evidence_of(config_of(sizes=[1, 8, 64, 100])), "configured")
    assert listed.graphs == 3, "100 is beyond max_num_seqs"
    assert evidence_of(config_of(sizes="trtllm")).ladders[1].name == next(iter(LADDERS))


def test_a_largest_size_bounds_the_ladders_and_the_plan() -> None:
    """A list of sizes repeats its largest beside it, as the options of a plan do: that is no bound."""
    evidence = evidence_of(config_of(max_cudagraph_capture_size=16, budget={"max_graphs": 4}))
    assert ladder(evidence, "powers_of_two").graphs == 5
    assert sizes_of(evidence) == [(4, 8, 12, 16)]
    assert "batches that no graph holds, up to 64 tokens" in "".join(evidence.warnings)
    listed = evidence_of(
        config_of(sizes=[16], max_cudagraph_capture_size=16, budget={"max_graphs": 4})
    )
    assert sizes_of(listed) == [(16, 32, 48, 64)]


@pytest.mark.parametrize("one_list", [False, True])
def test_sizes_stay_within_those_measured_or_asked_for(one_list: bool) -> None:
    """Steps were measured up to 64 tokens of decode and 200 of others; batches have up to 500."""
    points = {(NONE, 0): {1: 9000, 500: 9500}, (PIECEWISE, 0): {1: 310, 200: 600}, (FULL, 0): {1: 110, 64: 300}}  # fmt: skip
    times = StepTimes.measured(points, "by hand")
    batches = {StepShape(n, 2): 1.0 for n in (*range(10, 501, 10), 202)}
    seen = traffic(batches, {StepShape(n, n, True): 1.0 for n in range(8, 129, 8)})

    def largest(**options: Any) -> dict[bool, int]:
        config = config_of("FULL_AND_PIECEWISE", **{"seqs": 128, **options})
        lanes = propose(config, seen, times, one_list=one_list).evidence.lanes
        return {lane.uniform: lane.sizes[-1] for lane in lanes}

    asked_for = largest()  # vLLM's ladder ends at 256
    assert 64 < asked_for[True] <= 128
    assert asked_for[False] == 250
    few = largest(sizes=[1, 8])
    assert few[False] == 200
    assert (few[True] > 64) is one_list, "an engine captures one list in both"
    assert largest(sizes=[1, 400])[False] == 400
    assert largest(max_cudagraph_capture_size=300)[False] == 300
    assert set(largest(max_cudagraph_capture_size=40).values()) == {40}


# --- what is said of it ---------------------------------------------------------------------------------------


def test_no_gain_is_said_where_there_is_none() -> None:
    """Sizes of 64 and above alone: all the steps are close to the bound whatever the ladder."""
    seen = traffic({StepShape(64, 64, True): 1.0, StepShape(63, 63, True): 1.0})
    evidence = evidence_of(config_of(), seen)
    vllm = ladder(evidence, "vllm")
    assert vllm.no_gain
    assert evidence.verdict.startswith("no gain in step time: with the vllm ladder's 11 graphs")
    assert evidence.verdict.endswith("; as good in the mean step with 1 graph")
    of_config = evidence_of(config_of(sizes=[64]), seen)
    assert of_config.verdict.endswith("of the bound; as good in the mean step with 1 graph")
    assert (evidence.keep, of_config.keep) == (False, True)


def test_sizes_as_good_as_as_many_new_ones_are_kept_within_the_budget() -> None:
    """Within 1% of the plan, though not of the bound."""
    times = StepTimes.measured(
        {(NONE, 0): {1: 300, 16: 316}, (FULL, 0): {1: 62, 16: 92}},
        "pictures",
    )
    seen = traffic({StepShape(n, n, True): 1.0 for n in range(1, 16)})

    def found(sizes: list[int], **budget: Any) -> Evidence:
        config = config_of("FULL", sizes, seqs=16, tokens=16, budget=budget)
        return propose(config, seen, times, COSTS).evidence

    best = found([1, 16]).lanes[0].sizes
    asked = [*best[:-1], 16]
    free = found(asked)
    assert not ladder(free, "configured").no_gain
    assert free.keep
    assert not found([*asked, best[0] + 1]).keep
    least = ladder(free, "configured").bytes
    assert least
    assert not found(asked, memory=least - 1).keep


def test_sizes_of_which_one_cannot_be_captured_are_not_kept() -> None:
    failed = {(FULL, BatchDescriptor(4, 4)): "HostSyncError: aten::item"}
    seen = traffic({StepShape(4, 4, True): 1.0, StepShape(16, 16, True): 1000.0})
    for lost, keep in (({}, True), (failed, False)):
        config = config_of("FULL", [4, 16], seqs=16, tokens=64)
        assert propose(config, seen, TIMES, failed=lost, insurance=0.1).evidence.keep is keep


def test_graphs_that_the_traffic_does_not_run_are_no_gain() -> None:
    """They are for the insured batches; eager steps alone are faster than the graphs asked for."""
    times = StepTimes.measured(
        {(NONE, 0): {1: 1000, 4: 2600, 16: 8160}, (FULL, 0): {1: 700, 4: 2500, 16: 8640}},
        "pictures",
    )
    seen = traffic({StepShape(16, 16, True): 1.0})
    found = propose(config_of("FULL", [1, 4, 16]), seen, times, insurance=0.1)
    assert found.evidence.verdict == (
        f"{NOT_WORTH_IT}: eager takes 8.16 ms a step, this plan 8.16 ms, the configured sizes' "
        "3 graphs 8.64 ms; the plan's 4 graphs are for batches that the traffic does not show"
    )
    assert not [said for said in found.evidence.warnings if "LoRA" in said]


@pytest.mark.parametrize(
    ("eager", "others", "is_worth"), [(1005, 0, False), (1020, 0, True), (1020, 9, True)]
)
def test_a_plan_as_long_as_eager_is_not_worth_its_graphs(
    eager: int, others: int, is_worth: bool
) -> None:
    """Others: steps too large for graphs, which hide what the rest gains; the graphs asked for pad."""
    times = StepTimes.measured(
        {(NONE, 0): {1: eager, 4: eager, 99: 50_000}, (FULL, 0): {1: 1000, 4: 1000, 16: 1300}},
        "pictures",
    )
    seen = traffic({StepShape(4, 4, True): 1.0, StepShape(99, 64): others})
    evidence = propose(config_of(sizes=[16]), seen, times).evidence
    assert evidence.graphs
    assert evidence.verdict.startswith(NOT_WORTH_IT) is not is_worth
    same = propose(config_of(sizes=[4]), seen, times).evidence  # as many graphs as the plan has
    assert same.keep is is_worth
    if not is_worth:
        assert "eager takes 1.00 ms a step, this plan 1.00 ms, the conf" in evidence.verdict
        assert "configured sizes' 1 graph 1.30 ms" in evidence.verdict


def test_eager_is_no_row_where_it_may_not_run() -> None:
    names = [each.name for each in evidence_of(config_of(on_miss="error")).ladders]
    assert names == list(LADDERS)


@pytest.mark.parametrize(("slow", "is_told"), [(2500, True), (720, False)])
def test_graphs_between_measured_sizes_are_told_where_times_may_differ(
    slow: int, is_told: bool
) -> None:
    times = StepTimes.measured(
        {(NONE, 0): {1: 9000, 16: 9000}, (FULL, 0): {1: 700, 4: slow, 16: slow}}, "by hand"
    )
    seen = traffic({StepShape(n, n, True): 1.0 for n in (1, 2, 3, 4)})
    options = {"budget": {"max_graphs": 4}, "max_cudagraph_capture_size": 8, "tokens": 8, "seqs": 8}
    evidence = propose(config_of("FULL", **options), seen, times).evidence
    told = [each for each in evidence.unsure if each.startswith("50.0% of the steps run in graphs")]
    assert bool(told) is is_told
    for warning in told:
        assert "between measured sizes (2, 3): their times are guessed" in warning
        assert (
            "sizes=[1,2,3,4]' --set compilation.max_cudagraph_capture_size=null "
            "--set model.target=my_model.py:build --output bench.json`, or" in warning
        )


@pytest.mark.parametrize(
    ("most", "batches", "sizes", "verdict"),
    [
        (
            3,
            (3, 9, 17),
            None,
            r"steps that either runs in graphs are \d+\.\d% shorter with 3 graphs than .* vllm ladder's 11 graphs",
        ),
        (
            3,
            (3, 9, 17),
            [64],
            r"steps that either runs in graphs are 73\.\d% shorter with 3 graphs than .* configured sizes' 1 graph",
        ),
        (
            1,
            range(1, 65),
            None,
            r"steps that either runs in graphs are \d+\.\d% longer with 1 graph than .* vllm ladder's 11 graphs: see what binds",
        ),
        (
            9,
            range(1, 65),
            None,
            r"steps within 1% of those with the vllm ladder's 11 graphs, with 9 graphs",
        ),
    ],
)
def test_the_verdict_compares_with_the_ladder(
    most: int, batches: Sequence[int], sizes: Any, verdict: str
) -> None:
    seen = traffic({StepShape(n, n, True): 1.0 for n in batches})
    assert re.fullmatch(
        verdict, evidence_of(config_of(sizes=sizes, budget={"max_graphs": most}), seen).verdict
    )


def test_the_verdict_is_of_the_steps_that_graphs_run() -> None:
    """Eager steps are faster below 3 tokens, where every batch runs in a graph all the same."""
    times = StepTimes.measured(
        {(FULL, 0): {1: 80, 16: 380}, (NONE, 0): {1: 40, 16: 640, 512: 20480}}, "slow graphs"
    )
    small = {StepShape(n, n, True): 1.0 for n in range(1, 17)}
    for beyond in ({}, {StepShape(512, 1, False): 5.0}):  # runs eagerly, with any graphs
        config = config_of(sizes=[16], seqs=16, budget={"max_graphs": 16})
        evidence = propose(config, traffic(small, beyond), times).evidence
        assert sizes_of(evidence) == [tuple(range(1, 17))]
        assert evidence.verdict == (
            "steps that either runs in graphs are 39.5% shorter with 16 graphs than with the "
            "configured sizes' 1 graph"
        )
        whole = 1 - evidence.expected_us.plan / ladder(evidence, "configured").expected_us
        assert (f"{whole:.1%}" == "39.5%") != bool(beyond)
        assert evidence.expected_us.bound < evidence.expected_us.plan


def test_nothing_is_captured_where_graphs_bring_nothing() -> None:
    slow = StepTimes.measured(
        {(FULL, 0): {1: 1000, 64: 1000}, (NONE, 0): {1: 1000, 64: 1000}}, "no gain"
    )
    for budget in ({}, {"max_graphs": 3}, {"memory": "1MiB"}):
        proposal = propose(config_of(budget=budget), traffic(decode()), slow, COSTS)
        assert proposal.plan.keys == ()
        assert proposal.plan.capture_sizes == ()
        assert proposal.evidence.pareto == ()
        assert proposal.evidence.verdict.startswith("no graph saves time")


def test_the_verdict_says_where_graphs_lose_what_larger_batches_gain() -> None:
    """10 tokens run in the graph of 62, which takes longer than they do eagerly."""
    times = StepTimes.measured(
        {(FULL, 0): {1: 1600, 64: 1700}, (NONE, 0): {1: 1300, 64: 1900}}, "crossing"
    )
    for larger, verdict in (
        (0, "eager steps take no longer"),
        (1, "larger batches would be faster"),
    ):
        seen = traffic({StepShape(10, 2): 9, StepShape(62, 2): larger})
        evidence = propose(config_of("FULL", seqs=32), seen, times).evidence
        assert evidence.graphs == 0
        assert f"no graph saves time for this traffic: {verdict}" in evidence.verdict


def test_the_verdict_says_that_graphs_could_not_be_captured() -> None:
    failed = {(FULL, BatchDescriptor(n, n)): "HostSyncError: aten::item" for n in range(1, 65)}
    uniform = {(FULL, BatchDescriptor(n, n, True)): "HostSyncError" for n in range(1, 65)}
    evidence = propose(config_of(), traffic(decode()), TIMES, failed=failed | uniform).evidence
    assert evidence.graphs == 0
    assert evidence.expected_us.plan > evidence.expected_us.bound
    assert evidence.verdict == "no graph that saves time is left: it could not be captured"


# --- adapters -------------------------------------------------------------------------------------------------


def test_lora_cases_that_are_not_told_apart_are_planned_as_one() -> None:
    config = config_of(
        lora={"max_loras": 4, "specialize_active_lora": True}, budget={"max_graphs": 16}
    )
    proposal = propose(config, traffic(decode(8), decode(8, 2)), TIMES)
    assert {key.num_active_loras for _, key in proposal.plan.keys} == {0, 5}
    assert proposal.plan.lora_cases == (0, 1, 2, 4, 5)
    assert any(
        "LoRA cases 1, 2, 4 were not planned for" in note for note in proposal.evidence.notes
    )
    told = (
        "steps with adapters were not measured: taken as 10% longer; --lora-step-times tells them "
        "(docs/planning.md, LoRAs in step times)"
    )
    assert told in proposal.evidence.unsure
    unseen = propose(config, traffic(decode(8)), TIMES)
    assert {key.num_active_loras for _, key in unseen.plan.keys} == {0}
    assert told not in unseen.evidence.unsure
    assert any(
        "batches with adapters would run eagerly" in warning for warning in unseen.evidence.unsure
    )


def test_lora_cases_that_are_told_apart_are_weighed() -> None:
    times = StepTimes.measured(
        {(FULL, 0): {1: 100}, (FULL, 1): {1: 130}, (FULL, 5): {1: 200}, (NONE, 0): {1: 900}},
        "cases",
    )
    config = config_of(
        lora={"max_loras": 4, "specialize_active_lora": True}, budget={"max_graphs": 2}
    )
    seen = traffic(
        {
            StepShape(8, 8, True, 0): 1.0,
            StepShape(8, 8, True, 1): 9.0,
            StepShape(8, 8, True, 3): 1.0,
        }
    )
    proposal = propose(config, seen, times)
    assert {key.num_active_loras for _, key in proposal.plan.keys} == {1, 5}, (
        "those without adapters go with 1"
    )
    assert proposal.evidence.notes[0].startswith("LoRA cases 2, 4 were not planned for")


# --- anything --------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from([mode.name for mode in CUDAGraphMode]),
    counts=st.dictionaries(
        st.builds(
            lambda n, reqs, uniform, loras: StepShape(max(n, reqs), reqs, uniform, loras),
            st.integers(1, 700), st.integers(1, 90), st.booleans(), st.integers(0, 6),
        ),
        st.floats(1e-3, 1e6),
        min_size=1,
        max_size=20,
    ),
    bounds=st.tuples(st.integers(1, 80), st.integers(4, 600), st.integers(0, 3)),
    lora=st.none() | st.fixed_dictionaries({"max_loras": st.integers(1, 5), "specialize_active_lora": st.booleans()}),
    budget=st.fixed_dictionaries(
        {},
        optional={
            "max_graphs": st.integers(1, 9),
            "memory": st.integers(100 * MIB, 900 * MIB),
            "capture_time": st.floats(1, 9),
        },
    ),
    slope=st.sampled_from([0.0, 0.003]),
)  # fmt: skip
def test_whatever_is_asked_the_evidence_agrees_with_itself(
    mode: str,
    counts: dict[StepShape, float],
    bounds: tuple[int, int, int],
    lora: dict[str, Any] | None,
    budget: dict[str, Any],
    slope: float,
) -> None:
    seqs, tokens, spec = bounds
    config = config_of(mode, seqs=seqs, tokens=tokens, spec=spec, budget=budget, lora=lora)
    costs = Costs(
        pool=MIB, static=9, workspace=100 * MIB, each=2 * MIB, seconds=0.2, slope=slope, once=0.5
    )
    seen = Traffic.of(counts, "drawn")
    try:
        proposal = propose(config, seen, TIMES, costs)
    except BudgetError as error:
        assert "the cheapest graph that a batch gains by" in error.message  # noqa: PT017
        return
    evidence, plan = proposal.evidence, proposal.plan
    assert evidence.expected_us.bound <= evidence.expected_us.plan * (1 + 1e-9)
    assert evidence.expected_us.plan <= evidence.expected_us.eager * (1 + 1e-9)
    assert evidence.graphs == len(plan.keys) <= budget.get("max_graphs", 256)
    assert evidence.bytes is not None
    assert evidence.seconds is not None
    assert evidence.bytes <= budget.get("memory", 1 << 60) * (1 + 1e-8)
    assert evidence.seconds <= budget.get("capture_time", 1e9) * (1 + 1e-8)
    assert evidence.uses == () or all(use.share > 0 for use in evidence.uses)
    assert sum(use.size is not None for use in evidence.uses) == evidence.graphs, (
        "each graph runs something"
    )
    json.loads(plan.model_dump_json())


# --- a real trace ---------------------------------------------------------------------------------------------


def test_a_real_trace_needs_a_third_of_a_ladders_graphs() -> None:
    """Azure's code trace of 2023: the vllm ladder's step time with a third of its graphs, and nothing to gain in it."""
    config = config_of(seqs=512, tokens=8192)
    times = StepTimes.default()
    plan = build_plan(config)
    seen = simulate(read_traffic(TRACE, plan), SchedulerBounds.of(plan), step_clock(plan, times))
    evidence = propose(config, seen, times).evidence
    vllm = ladder(evidence, "vllm")
    assert vllm.graphs == 51
    assert vllm.no_gain
    third = evidence.pareto[vllm.graphs // 3 - 1]
    assert third.expected_us <= vllm.expected_us * (1 + 1e-9)
    assert evidence.verdict.startswith("no gain in step time")


# --- lists of vLLM's model runner V2 ---------------------------------------------------------------------------


def drawn_for_v2(rng: random.Random) -> tuple[dict[str, Any], Traffic]:
    """Bounds, mode, drafts and LoRA of a small server, and its steps."""
    query, seqs, top = rng.choice([1, 1, 2, 3]), rng.randint(2, 6), 8
    loras = rng.choice([0, 0, 1, 2])
    data: dict[str, Any] = {
        "compilation": {"cudagraph_mode": rng.choice(MODES), "key_rules": "vllm_v2"},
        "scheduler": {"max_num_seqs": seqs, "max_num_batched_tokens": top},
        "speculative": {"num_speculative_tokens": query - 1},
    }
    if loras:
        data["lora"] = {"max_loras": loras, "specialize_active_lora": rng.random() < 0.5}
    steps: dict[StepShape, float] = {}
    for _ in range(rng.randint(1, 7)):
        requests, tokens = rng.randint(1, min(seqs, top // query)), rng.randint(1, top)
        uniform = rng.random() < 0.5
        reqs = requests if uniform else rng.randint(1, min(tokens, seqs))
        shape = StepShape(
            query * requests if uniform else tokens, reqs, uniform, rng.randint(0, loras)
        )
        steps[shape] = rng.randint(1, 20)
    return data, traffic(steps)


MODES = ("FULL_DECODE_ONLY", "FULL", "PIECEWISE", "FULL_AND_PIECEWISE")
V2_TIMES = StepTimes.measured(
    {
        (FULL, 0): {1: 10, 3: 11, 4: 19, 8: 31},
        (PIECEWISE, 0): {1: 30, 2: 33, 5: 34, 8: 47},
        (NONE, 0): {1: 60, 6: 62, 8: 70},
    },
    "by hand",
)


@pytest.mark.parametrize("seed", range(int(os.environ.get("CASES", "200")) // 10))
def test_a_list_of_v2_is_the_best_of_all_lists_as_the_dispatcher_runs_them(seed: int) -> None:
    """Of those whose sizes up to the largest decode batch are whole requests."""
    rng = random.Random(seed)
    data, seen = drawn_for_v2(rng)
    graphs = rng.randint(1, 4)

    def plan_of(sizes: Sequence[int]) -> Plan:
        compilation = {**data["compilation"], "cudagraph_capture_sizes": list(sizes)}
        return build_plan(Config.model_validate({**data, "compilation": compilation}))

    def step(plan: Plan | None) -> float:
        total = 0.0
        for shape, weight in seen.histogram:
            tokens, reqs, uniform, adapters = shape
            mode, ran = NONE, (tokens, adapters)
            if plan is not None:
                mode, key = CudagraphDispatcher(plan).dispatch(
                    tokens, uniform, adapters, num_reqs=reqs
                )
                ran = ran if mode is NONE else (key.num_tokens, key.num_active_loras)
            total += weight * V2_TIMES.of(mode, *ran)
        return total / seen.total

    config = Config.model_validate({**data, "budget": {"max_graphs": graphs}})
    base = build_plan(config)
    query = base.query_len
    whole = 0
    if any(key.uniform for _, key in base.keys):
        whole = min(query * base.max_num_seqs, 8 // query * query)
    allowed = [size for size in range(1, 9) if size % query == 0 or size > whole]
    best = step(None)
    for number in range(1, graphs + 1):
        for sizes in combinations(allowed, number):
            plan = plan_of(sizes)
            if len(plan.keys) <= graphs:
                best = min(best, step(plan))
    try:
        found = propose(config, seen, V2_TIMES, one_list=True)
    except BudgetError:
        assert best == pytest.approx(step(None))
        return
    sizes = found.plan.capture_sizes
    plan = plan_of(sizes) if sizes else None
    assert plan is None or len(plan.keys) <= graphs
    assert found.evidence.expected_us.plan == pytest.approx(step(plan))
    assert step(plan) <= best * (1 + 2e-4), "what brings less than 0.01% is left out"


def test_more_than_64_graphs_are_planned_for_where_those_are_not_as_good_as_the_ladder() -> None:
    seen = traffic({StepShape(n, n, True): 1.0 for n in range(1, 257)})
    steep = StepTimes.measured({(FULL, 0): {1: 110, 256: 25_600}, (NONE, 0): {1: 40_000}}, "steep")
    every = config_of(seqs=256, sizes=list(range(1, 257, 3)))
    evidence = propose(every, seen, steep).evidence
    assert 64 < evidence.graphs <= 86
    point = ladder(evidence, "configured")
    assert evidence.expected_us.plan <= point.expected_us * (1 + 1e-3)
