"""The optimizer against brute force over all subsets, and what it claims of its own answers."""

from __future__ import annotations

import math
import os
import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plans import Costs, lists_of, plan_of, propose

from cgplan.config import BudgetConfig, Config
from cgplan.errors import BudgetError
from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.paths import best_paths
from cgplan.optimizer.problem import (
    Chosen,
    Problem,
    Run,
    keys_of,
    largest_of,
    problem_of,
    stride_of,
)
from cgplan.optimizer.search import Limits, Search, best_plan
from cgplan.planning import Plan, build_plan
from cgplan.planning.plan import Lane, lanes_of
from cgplan.pricing import GraphCosts
from cgplan.traffic.histogram import StepShape, Traffic
from cgplan.traffic.step_times import StepTimes

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
DECODE_ONLY, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE


@dataclass(frozen=True)
class Instance:
    lanes: tuple[Lane, ...]
    plan: Plan  # its bounds of a batch
    traffic: Traffic
    times: StepTimes

    def problem(self, costs: GraphCosts | None = None) -> Problem:
        most = self.plan.max_num_batched_tokens  # times are of one size, and hold for all
        return problem_of(self.lanes, self.traffic, self.times, self.plan, costs, asked_to=most)

    def keys(self, problem: Problem, chosen: Chosen) -> list[Key]:
        return [*keys_of(problem.lists_of(chosen), self.plan)]


def bounds(query_len: int, max_num_seqs: int, max_num_batched_tokens: int) -> Plan:
    """A plan of no key, with bounds of a batch."""
    return plan_of("NONE", seqs=max_num_seqs, tokens=max_num_batched_tokens, spec=query_len - 1)


@dataclass(frozen=True)
class Everything:
    """All subsets of all keys: [2 ** keys] mean microseconds, and what the subsets cost."""

    expected: np.ndarray
    graphs: np.ndarray
    memory: np.ndarray
    seconds: np.ndarray
    lanes: dict[Lane, np.ndarray]  # whether a subset has a key of that lane
    has: dict[Key, np.ndarray]  # whether a subset has that key

    def best(self, limits: Limits, lanes: list[Lane] | None = None) -> float:
        return float(self.expected[self.paid(limits, lanes)].min())

    def paid(self, limits: Limits, lanes: list[Lane] | None = None) -> np.ndarray:
        allowed = self.graphs <= limits.graphs
        for lane, has in self.lanes.items():
            if lanes is not None and lane not in lanes:
                allowed &= ~has
        allowed &= self.memory <= limits.memory * (1 + 1e-9)
        allowed &= self.seconds <= limits.seconds * (1 + 1e-9)
        return np.asarray(allowed)


def brute_force(
    instance: Instance, costs: GraphCosts | None = None, *, one_list: bool = False
) -> Everything:
    """Each size of each lane in or out, whether a batch sits there or not; batches by the words of the design.

    ``one_list``: each size in all lanes or in none, and whole requests where a lane is FULL.
    """
    plan, times = instance.plan, instance.times
    strict = one_list and any(lane.mode is FULL for lane in instance.lanes)
    keys = [
        (lane, size)
        for lane in instance.lanes
        for step in [plan.query_len if strict else stride_of(lane, plan)]
        for size in range(step, largest_of(lane, plan) + 1, step)
    ]
    bits = {key: bit for bit, key in enumerate(dict.fromkeys(key[one_list:] for key in keys))}
    assert len(bits) <= 15
    masks = np.arange(1 << len(bits))
    has = {key: (masks >> bits[key[one_list:]] & 1).astype(bool) for key in keys}
    total = np.zeros(masks.size)
    for batch, weight in instance.traffic.histogram:
        took = np.full(masks.size, times.of(NONE, batch.num_tokens, batch.num_active_loras))
        open_ = np.ones(masks.size, dtype=bool)
        for lane in instance.lanes:
            if (
                lane.uniform and not batch.uniform
            ) or lane.num_active_loras < batch.num_active_loras:
                continue
            for size in sorted(
                size for other, size in keys if other == lane and size >= batch.num_tokens
            ):
                hit = open_ & has[lane, size]
                took[hit] = times.of(lane.mode, size, lane.num_active_loras)
                open_ &= ~hit
        total += weight * took
    graphs = sum((h.astype(int) for h in has.values()), np.zeros(masks.size, dtype=int))
    memory, seconds, pool, static = (np.zeros(masks.size) for _ in range(4))
    if costs is not None:
        for (lane, size), chosen in has.items():
            key = lane.key(size, plan.query_len, plan.max_num_seqs)
            memory += costs.driver_bytes(key) * chosen
            seconds += costs.seconds(key) * chosen
            pool = np.maximum(pool, costs.pool_bytes(lane.mode, size) * chosen)
            static = np.maximum(static, costs.static_bytes(size) * chosen)
        memory += pool + static + costs.workspace_bytes * (graphs > 0)
        seconds += costs.once_seconds * (graphs > 0)
    by_lane = {lane: np.zeros(masks.size, dtype=bool) for lane in instance.lanes}
    for (lane, _), chosen in has.items():
        by_lane[lane] |= chosen
    by_key = {
        lane.key(size, plan.query_len, plan.max_num_seqs): chosen
        for (lane, size), chosen in has.items()
    }
    return Everything(total / instance.traffic.total, graphs, memory, seconds, by_lane, by_key)


@st.composite
def curves(draw: st.DrawFn, first: int, steps: list[int], most: int) -> dict[int, float]:
    """Nondecreasing, with flat steps and cliffs."""
    rises = draw(st.lists(st.sampled_from(steps), min_size=most - 1, max_size=most - 1))
    return {n + 1: float(first + sum(rises[:n])) for n in range(most)}


@st.composite
def instances(draw: st.DrawFn, mode: CUDAGraphMode, cases: tuple[int, ...], most: int) -> Instance:
    q = draw(st.integers(1, 3))
    plan = bounds(q, draw(st.integers(1, max(most // q, 1))), draw(st.integers(q, most)))
    uniform = st.builds(
        lambda reqs, loras: StepShape(reqs * q, reqs, True, loras),
        st.integers(1, max(most // q, 1)),
        st.sampled_from(cases),
    )
    mixed = st.builds(
        lambda n, loras: StepShape(n, 1, False, loras), st.integers(1, most), st.sampled_from(cases)
    )
    counts = draw(st.dictionaries(uniform | mixed, st.integers(1, 9), min_size=1, max_size=12))
    points = {
        NONE: draw(curves(draw(st.sampled_from([4, 9, 20])), [0, 0, 0, 1, 3], most)),
        PIECEWISE: draw(curves(draw(st.sampled_from([2, 5, 8])), [0, 0, 1, 2], most)),
        FULL: draw(curves(draw(st.sampled_from([2, 5, 8])), [0, 0, 1, 2, 6], most)),
    }
    times = StepTimes.measured({(m, 0): p for m, p in points.items()}, "drawn")
    return Instance(lanes_of(mode, cases), plan, Traffic.of(counts, "drawn"), times)


ONE_LANE = st.sampled_from([FULL, PIECEWISE, DECODE_ONLY]).flatmap(
    lambda mode: instances(mode, (0,), 14)
)
TWO_LANES = instances(BOTH, (0,), 7) | st.sampled_from([FULL, DECODE_ONLY]).flatmap(
    lambda mode: instances(mode, (0, 2), 7)
)
FOUR_LANES = instances(BOTH, (0, 2), 3)
LINES = st.builds(
    Costs,
    pool=st.integers(0, 6),
    static=st.integers(0, 2),
    workspace=st.integers(0, 9),
    each=st.integers(0, 9),
    seconds=st.floats(0.1, 2),
    slope=st.just(0.0),
    once=st.sampled_from([0.0, 0.5, 2.0]),
)
SLOPES = st.builds(
    Costs,
    pool=st.integers(0, 6),
    static=st.integers(0, 2),
    workspace=st.integers(0, 9),
    each=st.integers(1, 9),
    seconds=st.floats(0.1, 2),
    slope=st.sampled_from([0.01, 0.1, 1.0]),
    once=st.sampled_from([0.0, 0.5, 2.0]),
)
BUDGETS = st.builds(
    Limits,
    graphs=st.integers(1, 5),
    memory=st.just(math.inf) | st.integers(5, 150).map(float),
    seconds=st.just(math.inf) | st.floats(0.2, 6),
)


# --- one lane -------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    rises=st.lists(st.lists(st.integers(0, 3), min_size=40, max_size=40), min_size=1, max_size=3),
    weights=st.lists(st.lists(st.integers(0, 5), min_size=40, max_size=40), min_size=3, max_size=3),
    prices=st.none() | st.lists(st.integers(0, 9), min_size=40, max_size=40),
    number=st.integers(1, 40),
)
def test_paths_are_the_least_of_all(
    rises: list[list[int]],
    weights: list[list[int]],
    prices: list[int] | None,
    number: int,
) -> None:
    """Against the recurrence as it is written, for kinds of batches that share sizes."""
    graphs, kinds = 6, len(rises)
    sums, times = (
        np.array([[0.0, *np.cumsum(row[:number])] for row in rows[:kinds]], dtype=np.float64)
        for rows in (weights, rises)
    )
    price = 0.0 if prices is None else np.array([0.0, *prices[:number]])
    paths = best_paths(sums, times, graphs, price)
    steps = ((sums[:, None, :] - sums[:, :, None]) * times[:, None, :]).sum(0)
    steps = (steps + price).tolist()  # [from, to]

    before = [0.0] + [math.inf] * number
    for level in range(1, graphs + 1):
        before = [
            0.0,
            *(min(before[i] + steps[i][j] for i in range(j)) for j in range(1, number + 1)),
        ]
        assert paths.cost[level].tolist() == pytest.approx(before)
        sizes = paths.sizes(level, number)
        assert len(sizes) <= level
        assert sizes == sorted(set(sizes))
        assert sum(steps[i][j] for i, j in pairwise([0, *sizes])) == pytest.approx(before[number])


@settings(max_examples=80, deadline=None)
@given(instance=ONE_LANE)
def test_one_lane_is_exact_for_every_number_of_graphs(instance: Instance) -> None:
    problem, every = instance.problem(), brute_force(instance)
    if not problem.lanes:
        assert every.expected.min() == every.expected.max()
        return
    found = Search(problem, Limits(6))
    for graphs in range(1, 7):
        assert found.value[graphs] / problem.weight == pytest.approx(every.best(Limits(graphs)))
        keys = instance.keys(problem, found.chosen(graphs))
        assert len(keys) <= graphs
        assert Run(lists_of(keys), instance.traffic, instance.times).expected_us == pytest.approx(
            found.value[graphs] / problem.weight
        )


def line(points: dict[int, float], eager: dict[int, float], counts: dict[int, float]) -> Instance:
    """Decode batches only."""
    traffic = Traffic.of({StepShape(n, n, True): w for n, w in counts.items()}, "by hand")
    times = StepTimes.measured({(FULL, 0): points, (NONE, 0): eager}, "by hand")
    return Instance(lanes_of(DECODE_ONLY, (0,)), bounds(1, 64, 64), traffic, times)


def best_sizes(instance: Instance, limits: Limits, costs: GraphCosts | None = None) -> list[int]:
    problem = instance.problem(costs)
    keys = instance.keys(problem, best_plan(problem, limits))
    return sorted(key.num_tokens for _, key in keys)


def test_a_size_on_a_flat_step_gives_way_to_a_larger_one() -> None:
    """Up to 8 tokens a graph takes 3: one graph at 8 serves all that three would."""
    instance = line({1: 3, 8: 3, 16: 5}, {1: 20}, {1: 5, 3: 5, 8: 5, 16: 1})
    assert best_sizes(instance, Limits(2)) == [8, 16]


def test_a_size_on_a_flat_step_stays_where_it_is_the_largest_that_can_be_paid_for() -> None:
    """4 and 8 tokens take as long, but the memory of 8 is above the budget."""
    instance = line({1: 3, 8: 3}, {1: 20}, {2: 1, 4: 5, 8: 5})
    costs = Costs(pool=10, static=0, workspace=0, each=1, seconds=0.1, slope=0, once=0)
    assert best_sizes(instance, Limits(2, memory=45), costs) == [4]
    assert best_sizes(instance, Limits(2, memory=81), costs) == [8]


def test_a_size_on_a_flat_step_stays_where_larger_batches_are_faster_eagerly() -> None:
    """Eager steps are noisy: 4 tokens take 9, but 5 to 8 tokens with other adapters take 4."""
    counts = {StepShape(4, 4, True, 0): 9, StepShape(8, 8, True, 1): 9}
    times = StepTimes.measured(
        {(FULL, 0): {1: 5}, (FULL, 1): {1: 5}, (NONE, 0): {1: 9}, (NONE, 1): {1: 4}}, "by hand"
    )
    lanes = lanes_of(DECODE_ONLY, (1,))
    instance = Instance(lanes, bounds(1, 8, 8), Traffic.of(counts, "by hand"), times)
    assert best_sizes(instance, Limits(2)) == [4]


def test_sizes_that_are_no_faster_than_eager_steps_are_no_candidates() -> None:
    instance = line({1: 3, 8: 8, 16: 16}, {1: 8, 8: 8, 16: 16}, {1: 1, 4: 1, 7: 1, 8: 1, 16: 1})
    assert instance.problem().lanes[0].sizes.tolist() == [0, 1, 4, 7]
    assert best_sizes(instance, Limits(9)) == [1, 4, 7]


# --- several lanes --------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(instance=TWO_LANES | FOUR_LANES)
def test_curves_of_several_lanes_are_of_plans_and_fall(instance: Instance) -> None:
    problem, every = instance.problem(), brute_force(instance)
    if not problem.lanes:
        return
    found = Search(problem, Limits(5))
    for graphs in range(1, 6):
        truth = every.best(Limits(graphs)) * problem.weight
        assert found.value[graphs] >= truth * (1 - 1e-9)
        chosen = found.chosen(graphs)
        assert sum(map(len, chosen)) <= graphs
        assert problem.total_of(chosen) == pytest.approx(found.value[graphs])
    assert (np.diff(found.value) <= 1e-9 * found.value[0]).all(), "a graph more does not hurt"


FREE = Costs(pool=0, static=0, workspace=0, each=0, seconds=1, slope=0, once=0)


def four_lanes(
    counts: dict[StepShape, float], times: dict[CUDAGraphMode, list[float]], *, most: int
) -> Instance:
    """``times``: of 1, 2, ... tokens."""
    points = {(mode, 0): dict(enumerate(steps, 1)) for mode, steps in times.items()}
    return Instance(
        lanes_of(BOTH, (0, 2)),
        bounds(1, most, max(map(len, times.values()))),
        Traffic.of(counts, "by hand"),
        StepTimes.measured(points, "by hand"),
    )


# From a graph for decode steps and one for mixed ones, the two graphs for all steps with adapters are
# three lists away.
THREE_LISTS_AWAY = four_lanes(
    {
        StepShape(1, 1, False, 0): 1,
        StepShape(1, 1, True, 0): 1,
        StepShape(1, 1, True, 2): 1,
        StepShape(2, 2, True, 0): 2,
    },
    {NONE: [4, 5], PIECEWISE: [2, 3], FULL: [2, 2]},
    most=1,
)
# One graph or two save nothing.
THREE_OR_NONE = four_lanes(
    {
        **{StepShape(n, n, True, 0): weight for n, weight in {1: 9, 2: 9, 3: 2}.items()},
        StepShape(1, 1, False, 0): 1,
        StepShape(1, 1, False, 2): 1,
    },
    {NONE: [4, 7, 20], PIECEWISE: [4, 7, 20], FULL: [4, 7, 10]},
    most=3,
)


@settings(max_examples=60, deadline=None)
@given(instance=FOUR_LANES, costs=LINES, limits=BUDGETS)
@example(instance=THREE_LISTS_AWAY, costs=FREE, limits=Limits(2))
@example(instance=THREE_OR_NONE, costs=FREE, limits=Limits(4))
def test_four_lanes_are_close_to_the_best(instance: Instance, costs: Costs, limits: Limits) -> None:
    """The ends are improved one at a time, which may stop short; a plan of one kind of graph is never missed."""
    problem, every = instance.problem(costs), brute_force(instance, costs)
    if not problem.lanes:
        return
    best = best_plan(problem, limits)
    truth = every.best(limits) * problem.weight
    total = problem.total_of(best)
    assert total >= truth * (1 - 1e-9)
    check_within(instance, problem, best, costs, limits, total)
    one_lane = min(every.best(limits, [lane]) for lane in instance.lanes) * problem.weight
    assert total <= one_lane * (1 + 1e-9)


def test_two_lanes_have_the_lists_beside_the_best_of_one_alone() -> None:
    decode, mixed = (6, 7, 1), (7, 4, 5, 6, 3, 8)
    counts = {StepShape(n, n, True): float(count) for n, count in enumerate(decode, 1)}
    counts |= {StepShape(n, 1): float(count) for n, count in enumerate(mixed, 1)}
    points = {FULL: {1: 10, 6: 70}, PIECEWISE: {1: 40, 6: 180}, NONE: {1: 300, 6: 400}}
    times = StepTimes.measured({(mode, 0): each for mode, each in points.items()}, "made up")
    instance = Instance(lanes_of(BOTH, (0,)), bounds(1, 3, 6), Traffic.of(counts, "made up"), times)
    problem, every = instance.problem(), brute_force(instance)
    best = problem.total_of(best_plan(problem, Limits(3)))
    assert best / problem.weight == pytest.approx(every.best(Limits(3)))


def test_a_lora_case_is_dropped_where_sharing_is_better() -> None:
    """Without adapters a step takes 10, with LoRA kernels 11. One graph serves all; with two, each kind has its own."""
    traffic = Traffic.of({StepShape(8, 8, True, 0): 3, StepShape(8, 8, True, 2): 1}, "by hand")
    times = StepTimes.measured(
        {(FULL, 0): {1: 10}, (FULL, 3): {1: 11}, (NONE, 0): {1: 50}}, "by hand"
    )
    instance = Instance(lanes_of(FULL, (0, 3)), bounds(1, 8, 8), traffic, times)
    problem = instance.problem()
    found = [instance.keys(problem, best_plan(problem, Limits(k))) for k in (1, 2)]
    assert [sorted(key.num_active_loras for _, key in keys) for keys in found] == [[3], [0, 3]]
    total = problem.total_of(best_plan(problem, Limits(2)))
    assert total / problem.weight == pytest.approx((3 * 10 + 11) / 4)


# --- budgets --------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(instance=ONE_LANE, costs=LINES, limits=BUDGETS)
def test_budgets_are_exact_where_keys_cost_the_same(
    instance: Instance, costs: Costs, limits: Limits
) -> None:
    problem, every = instance.problem(costs), brute_force(instance, costs)
    if not problem.lanes:
        return
    best = best_plan(problem, limits)
    total = problem.total_of(best)
    assert total / problem.weight == pytest.approx(every.best(limits))
    check_within(instance, problem, best, costs, limits, total)


@settings(max_examples=80, deadline=None)
@given(instance=ONE_LANE | TWO_LANES | FOUR_LANES, costs=SLOPES | LINES, limits=BUDGETS)
def test_budgets_of_unequal_keys_are_kept(instance: Instance, costs: Costs, limits: Limits) -> None:
    problem, every = instance.problem(costs), brute_force(instance, costs)
    if not problem.lanes:
        return
    best = best_plan(problem, limits)
    total = problem.total_of(best)
    assert total >= every.best(limits) * problem.weight * (1 - 1e-9)
    check_within(instance, problem, best, costs, limits, total)


def check_within(
    instance: Instance, problem: Problem, chosen: Chosen, costs: Costs, limits: Limits, total: float
) -> None:
    """The plan costs what its costs say, is within the limits, and takes the time that it is said to take."""
    keys = instance.keys(problem, chosen)
    cost = costs.of(keys)
    assert limits.pays_for(len(keys), cost.total_bytes, cost.seconds)
    assert problem.costs_of(chosen) == pytest.approx((len(keys), cost.total_bytes, cost.seconds))
    expected = Run(lists_of(keys), instance.traffic, instance.times).expected_us
    assert expected == pytest.approx(total / problem.weight)


def test_a_size_on_a_flat_step_stays_where_the_larger_one_costs_more() -> None:
    """4 and 8 tokens take as long; beside 16, the seconds of 4 can be paid for, those of 8 cannot."""
    instance = line({1: 3, 8: 3, 16: 9}, {1: 20}, {4: 5, 8: 5, 16: 9})
    costs = Costs(pool=0, static=0, workspace=0, each=0, seconds=1, slope=1, once=0)
    assert best_sizes(instance, Limits(8, seconds=17 + 5), costs) == [4, 16]
    assert best_sizes(instance, Limits(8, seconds=17 + 9), costs) == [8, 16]


def test_slack_saves_graphs() -> None:
    instance = line({1: 1, 32: 32}, {1: 100}, dict.fromkeys(range(1, 33), 1))
    problem = instance.problem()
    least = problem.total_of(best_plan(problem, Limits(20)))
    exact, rough = (best_plan(problem, Limits(20), goal=share * least) for share in (0.0, 1.1))
    assert len(rough[0]) < len(exact[0]) == 20
    assert problem.total_of(rough) <= 1.1 * problem.total_of(exact)


def test_slack_saves_graphs_where_a_limit_pays_for_more_than_suffice() -> None:
    instance = line({1: 1, 32: 32}, {1: 100}, dict.fromkeys(range(1, 33), 1))
    problem = instance.problem(Costs(0, 0, 0, 1, 0.0, 0.0, 0.0))
    _, memory, _ = problem.costs_of(best_plan(problem, Limits(12)))
    least = problem.total_of(best_plan(problem, Limits(20)))
    free, bound = (
        best_plan(problem, Limits(20, most), goal=1.1 * least) for most in (math.inf, memory)
    )
    assert len(bound[0]) <= len(free[0]) < 12


# --- costs that fall, and one list of sizes -------------------------------------------------------------------


class Noisy(Costs):
    """Costs of each size by a table, which may fall."""

    def __init__(self, table: list[tuple[int, float]]) -> None:
        super().__init__(pool=1, static=1, workspace=3, each=1, seconds=1, slope=0, once=0.5)
        self.table = table

    def driver_bytes(self, key: Key) -> int:
        return self.table[key[1].num_tokens - 1][0] + 2 * (key[0] is PIECEWISE)

    def seconds(self, key: Key) -> float:
        return self.table[key[1].num_tokens - 1][1]


NOISY = st.builds(
    Noisy, st.lists(st.tuples(st.integers(0, 30), st.floats(0.1, 3)), min_size=14, max_size=14)
)


@settings(max_examples=120, deadline=None)
@given(instance=ONE_LANE | TWO_LANES, costs=NOISY, limits=BUDGETS)
def test_budgets_are_kept_where_costs_fall_with_the_size(
    instance: Instance, costs: Noisy, limits: Limits
) -> None:
    problem = instance.problem(costs)
    if not problem.lanes:
        return
    best = best_plan(problem, limits)
    check_within(instance, problem, best, costs, limits, problem.total_of(best))


def test_a_cheap_size_is_found_where_no_batch_sits() -> None:
    """Costs state nothing of where they fall: a graph of 6 tokens costs a sixth of one of 5."""
    instance = line({1: 3, 5: 5, 6: 6, 14: 9}, {1: 20}, {5: 9, 14: 1})
    table = [(0, 3.0)] * 5 + [(0, 0.5)] + [(0, 3.0)] * 58
    problem, limits = instance.problem(Noisy(table)), Limits(2, seconds=1.2)
    best = best_plan(problem, limits)
    assert best_sizes(instance, limits, Noisy(table)) == [6]
    assert problem.total_of(best) == pytest.approx(9 * 6 + 1 * 20)


@settings(max_examples=120, deadline=None)
@given(instance=ONE_LANE | TWO_LANES | FOUR_LANES, graphs=st.integers(1, 8))
def test_one_list_for_all_lanes_is_exact(instance: Instance, graphs: int) -> None:
    """Every set of sizes, each in all lanes that may hold it; where a graph of a larger size is not slower."""
    plan, times = instance.plan, instance.times
    most = plan.max_num_batched_tokens
    problem = problem_of(
        instance.lanes, instance.traffic, times, plan, None, one_list=True, asked_to=most
    )
    if not problem.lanes:
        return
    found = Search(problem, Limits(graphs))
    served = problem.lanes[0].lanes
    lists = brute_force(replace(instance, lanes=served), one_list=True)
    least = lists.best(Limits(graphs))
    keys = instance.keys(problem, found.chosen(graphs))
    assert len(keys) <= graphs
    expected = Run(lists_of(keys), instance.traffic, times).expected_us
    if all(one.mode is FULL for one in served):  # times of a mode never fall
        assert expected == pytest.approx(least)
    assert expected <= found.value[-1] / problem.weight * (1 + 1e-9)


# --- random plans with all that there is -----------------------------------------------------------------------

CASES = int(os.environ.get("CASES", "200"))  # as many are tried; 1000 take a minute
TOP, MOST = 12, 12  # tokens; keys, or sizes of a list
MOST_GRAPHS = 99  # where nothing limits them
LORA: tuple[Any, ...] = (
    None, None, {"max_loras": 1}, {"max_loras": 1, "specialize_active_lora": True}, {"max_loras": 2},
)  # fmt: skip


class Drawn(GraphCosts):
    """Costs of a key that grow with its size, fall, or do as they like."""

    source, estimated = "drawn", True

    def __init__(self, rng: random.Random) -> None:
        how = rng.choice(["grow", "fall", "any"])
        self.workspace_bytes, self.once_seconds = rng.choice([0, 5]), rng.choice([0.0, 0.7])
        self.pools = {
            mode: np.cumsum(rng.choices([0, 0, 1, 3], k=TOP + 1)).tolist()
            for mode in (FULL, PIECEWISE)
        }
        self.static = np.cumsum(rng.choices([0, 0, 1], k=TOP + 1)).tolist()
        names = [
            (mode, uniform, case)
            for mode in (FULL, PIECEWISE)
            for uniform in (True, False)
            for case in range(4)
        ]
        self.each = {name: self._drawn(rng, how) for name in names}

    @staticmethod
    def _drawn(rng: random.Random, how: str) -> list[tuple[int, float]]:
        least, slope, sizes = rng.randint(0, 12), rng.choice([0, 1, 2]), range(TOP + 1)
        if how == "any":
            return [(rng.randint(0, 20), rng.uniform(0.1, 3)) for _ in sizes]
        return [
            (least + slope * n, 0.3 + 0.1 * slope * n)
            for n in (sizes if how == "grow" else reversed(sizes))
        ]

    def pool_bytes(self, mode: CUDAGraphMode, num_tokens: int) -> int:
        return int(self.pools[mode][num_tokens])

    def static_bytes(self, num_tokens: int, _: tuple[int, ...] = ()) -> int:
        return int(self.static[num_tokens])

    def driver_bytes(self, key: Key) -> int:
        return self._of(key)[0]

    def seconds(self, key: Key) -> float:
        return self._of(key)[1]

    def _of(self, key: Key) -> tuple[int, float]:
        return self.each[key[0], key[1].uniform, key[1].num_active_loras][key[1].num_tokens]


def step_times(rng: random.Random, cases: tuple[int, ...]) -> StepTimes:
    def points(first: list[float], rises: list[int]) -> dict[int, float]:
        return dict(
            enumerate(np.cumsum([rng.choice(first), *rng.choices(rises, k=TOP - 1)]).tolist(), 1)
        )

    cases = cases if rng.random() < 0.5 else (0,)
    drawn = {NONE: [0, 0, 0, 1, 3], PIECEWISE: [0, 0, 1, 2], FULL: [0, 0, 1, 2, 6]}
    return StepTimes.measured(
        {
            (m, case): points([4.0, 9.0, 20.0] if m is NONE else [2.0, 5.0, 8.0], drawn[m])
            for m in drawn
            for case in cases
        },
        "drawn",
    )


def drawn_traffic(rng: random.Random, q: int, seqs: int, tokens: int, most_loras: int) -> Traffic:
    kinds = rng.choice([(True,), (False,), (True, False), (True, False)])
    counts = dict[StepShape, float]()
    for _ in range(rng.randint(1, 8)):
        loras = rng.randint(0, most_loras)
        reqs = rng.randint(1, max(1, min(seqs, tokens // q)))
        uniform = StepShape(q * reqs, reqs, True, loras)
        counts[
            uniform if rng.choice(kinds) else StepShape(rng.randint(1, tokens), 1, False, loras)
        ] = rng.choice([1, 9, 40])
    return Traffic.of(counts, "drawn")


def check(seed: int) -> float | None:
    """How much longer the plan's steps are than the best, as a share of what graphs change; None: it is
    refused. What is wrong is asserted.
    """
    rng = random.Random(seed)
    one_list, keys = rng.random() < 0.5, MOST + 1
    while not 0 < keys <= MOST:
        mode, q, lora = (
            rng.choice([FULL, PIECEWISE, DECODE_ONLY, BOTH, BOTH]),
            rng.choice([1, 2, 3]),
            rng.choice(LORA),
        )
        seqs, tokens = rng.randint(1, 7), rng.randint(q, TOP)
        config = Config.model_validate({
            "compilation": {"cudagraph_mode": mode, "cudagraph_capture_sizes": list(range(q, tokens + 1, q))},
            "scheduler": {"max_num_seqs": seqs, "max_num_batched_tokens": tokens},
            "speculative": {"num_speculative_tokens": q - 1},
            "lora": lora,
        })  # fmt: skip
        base = build_plan(config)
        times = step_times(rng, base.lora_cases)
        lanes = lanes_of(
            base.mode, base.lora_cases if one_list else times.told_apart(base.lora_cases)
        )
        keys = (
            tokens
            if one_list
            else sum(largest_of(lane, base) // stride_of(lane, base) for lane in lanes)
        )
    seen = drawn_traffic(rng, q, seqs, tokens, lora["max_loras"] if lora else 0)
    insurance, costs = rng.choice([0.0, 0.0, 0.1]), Drawn(rng) if rng.random() < 0.7 else None
    budget: dict[str, Any] = {"max_graphs": rng.randint(1, 8)} if rng.random() < 0.5 else {}
    if costs is not None:
        budget |= {"memory": rng.randint(1, 60)} if rng.random() < 0.6 else {}
        budget |= {"capture_time": rng.uniform(0.3, 9)} if rng.random() < 0.6 else {}
    traffic = (
        Traffic.mixed([(seen, 1 - insurance), (seen.unseen(base), insurance)])
        if insurance
        else seen
    )
    instance = Instance(lanes, base, traffic, times)
    all_sets = brute_force(instance, costs, one_list=one_list)
    limits = Limits(
        budget.get("max_graphs", MOST_GRAPHS),
        budget.get("memory", math.inf),
        budget.get("capture_time", math.inf),
    )
    paid = all_sets.paid(limits)
    bounded = config.model_copy(update={"budget": BudgetConfig(**budget)})
    try:
        made = propose(bounded, seen, times, costs, insurance=insurance, one_list=one_list)
    except BudgetError:
        assert all_sets.expected[paid].min() >= all_sets.expected[0] - 1e-9, (
            "graphs that are paid for save time"
        )
        return None
    plan = made.plan
    if "max_graphs" not in budget:  # what suffices without a budget bounds the number
        free = propose(config, seen, times, costs, insurance=insurance, one_list=one_list)
        assert len(plan.keys) <= len(free.plan.keys), "a budget gives more graphs than none"
        paid = paid & (all_sets.graphs <= len(plan.keys))
    least = float(all_sets.expected[paid].min())
    mine = float(
        all_sets.expected[
            np.all([has == (key in plan.keys) for key, has in all_sets.has.items()], axis=0)
        ][0]
    )
    changeable = instance.problem().changeable / traffic.total
    assert len(plan.keys) <= limits.graphs
    return (mine - least) / max(changeable, 1e-9)


def test_plans_are_close_to_the_best_of_all_sets_of_keys() -> None:
    wrong, longer = list[str](), list[float]()
    for seed in range(CASES):
        try:
            found = check(seed)
        except AssertionError as error:
            wrong.append(f"seed {seed}: {error}".partition("\n")[0])
            continue
        if found is not None:
            longer.append(found)
    assert not wrong, wrong
    missed = [share for share in longer if share > 1e-3]
    assert len(missed) <= CASES // 50, missed
    assert CASES // 50 < len(longer) < CASES, "some are refused"
