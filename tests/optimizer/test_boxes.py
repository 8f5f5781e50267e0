"""Boxes for batches of several sizes, against brute force over all sets of boxes."""

from __future__ import annotations

import os
from itertools import combinations, product
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
from plans import propose_boxes

from cgplan.config import Config
from cgplan.errors import BudgetError, PlanError
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.optimizer.boxes import Purse, exchanged
from cgplan.optimizer.evidence import NOT_WORTH_IT, Evidence
from cgplan.optimizer.paths import best_paths
from cgplan.planning import Plan, build_plan, config_hash
from cgplan.pricing import GraphCosts
from cgplan.reports import render_text
from cgplan.traffic.histogram import SizeCounts
from cgplan.traffic.step_times import StepSurface
from cgplan.units import format_microseconds

CASES = int(os.environ.get("CASES", "200")) // 10  # each is tried against all sets of boxes
Counts = dict[tuple[int, ...], int]
DIMS = {"batch": {"max": 64}, "length": {"max": 512}}


def config_of(graphs: int | None = None, dims: Any = DIMS, **sections: Any) -> Config:
    compilation = {"cudagraph_mode": "FULL", **sections.pop("compilation", {})}
    return Config.model_validate(
        {"dims": dims, "budget": {"max_graphs": graphs}, "compilation": compilation, **sections}
    )


def traffic_of(
    counts: Counts, beyond: int = 0, names: tuple[str, ...] = ("batch", "length")
) -> SizeCounts:
    return SizeCounts(names, dict(sorted(counts.items())), beyond, "test")


def proposal_of(
    counts: Counts,
    graphs: int | None = None,
    names: tuple[str, ...] = ("batch", "length"),
    **options: Any,
) -> tuple[Plan, Evidence]:
    found = propose_boxes(config_of(graphs, **options), traffic_of(counts, names=names))
    return found.plan, found.evidence


def evidence_of(counts: Counts, graphs: int | None = None, **options: Any) -> Evidence:
    return proposal_of(counts, graphs, **options)[1]


def boxes_of(evidence: Evidence) -> set[tuple[int | None, ...]]:
    return {(use.size, *use.sizes) for use in evidence.uses}


def random_counts(rng: np.random.Generator, number: int) -> Counts:
    """Traffic of at most so many sizes in each dimension."""
    rows, columns = (np.unique(rng.integers(1, most + 1, number)) for most in (64, 512))
    counts = {pair: int(rng.integers(0, 30)) for pair in product(rows.tolist(), columns.tolist())}
    counts[int(rows[-1]), int(columns[0])] = 1
    return {pair: count for pair, count in counts.items() if count}


def sets_of(
    counts: Counts, graphs: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], np.ndarray]:
    """Boxes, all sets of so many of them by their places, and the mean of the elements that run in each set.

    The mean is infinite where a set holds not all batches.
    """
    boxes = list(product(*(sorted({batch[dim] for batch in counts}) for dim in (0, 1))))
    sets = list(combinations(range(len(boxes)), min(graphs, len(boxes))))
    batches, weights = np.array(list(counts)), np.array(list(counts.values()))
    is_held = (batches[:, None] <= np.array(boxes)).all(-1)
    elements = np.where(is_held, np.prod(boxes, 1) * 1.0, np.inf)
    return boxes, sets, weights @ elements[:, sets].min(2) / weights.sum()


def brute_force(counts: Counts, graphs: int) -> float:
    """The least mean of the elements that run, over all sets of boxes that hold all batches."""
    return float(sets_of(counts, graphs)[2].min())


def test_the_plan_is_the_best_of_all_sets_of_boxes() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        counts, graphs = random_counts(rng, int(rng.integers(2, 5))), int(rng.integers(1, 5))
        evidence = evidence_of(counts, graphs)
        assert evidence.graphs <= graphs
        assert evidence.expected_us.plan == pytest.approx(brute_force(counts, graphs))
        assert all(
            any(np.all(np.less_equal(batch, box)) for box in boxes_of(evidence)) for batch in counts
        )


class DrawnCosts(GraphCosts):
    """Alike for all boxes but for their memory; or drawn at bends, and on lines between them."""

    source, estimated = "drawn", True

    def __init__(self, rng: np.random.Generator, *, alike: bool) -> None:
        self.points = [1] if alike else range(1, 64 * 512 + 64, 512)
        self.driver, self.took = (
            rng.integers(100, 9000, len(self.points)),
            rng.uniform(0.1, 2, len(self.points)),
        )
        self.slope, self.workspace_bytes, self.once_seconds = (
            float(rng.uniform(0, 0.5)),
            int(rng.integers(500)),
            0.25,
        )

    def pool_bytes(self, mode: CUDAGraphMode, num_tokens: int) -> int:
        return int(self.slope * num_tokens)

    def static_bytes(self, num_tokens: int, sizes: tuple[int, ...] = ()) -> int:
        return num_tokens * sum(sizes) // 16

    def driver_bytes(self, key: Key) -> int:
        return int(np.interp(key[1].elements, self.points, self.driver))

    def seconds(self, key: Key) -> float:
        return float(np.interp(key[1].elements, self.points, self.took))


@pytest.mark.parametrize("alike", [True, False])
def test_memory_and_time_bind_boxes(alike: bool) -> None:
    """Against all sets; where keys cost alike, nothing paid for is missed."""
    rng, longer, refused = np.random.default_rng(6), list[float](), 0
    for _ in range(CASES):
        counts, costs = random_counts(rng, 3), DrawnCosts(rng, alike=alike)
        budget = {
            "memory": int(rng.integers(2_000, 40_000)),
            "capture_time": float(rng.uniform(0.3, 4)),
        }
        config, steps = config_of(budget=budget), list[float]()
        for number in range(1, 10):
            boxes, sets, means = sets_of(counts, number)
            keys = [
                (CUDAGraphMode.FULL, BatchDescriptor(rows, rows, sizes=(n,))) for rows, n in boxes
            ]
            for picked, mean in zip(sets, means.tolist(), strict=True):
                if mean == np.inf:
                    continue
                paid = costs.of([keys[place] for place in picked])
                if paid.total_bytes <= budget["memory"] and paid.seconds <= budget["capture_time"]:
                    steps.append(mean)
        if alike and not steps:
            with pytest.raises(BudgetError, match="hold all batches"):
                propose_boxes(config, traffic_of(counts), costs=costs)
            refused += 1
            continue
        try:
            found = propose_boxes(config, traffic_of(counts), costs=costs)
        except BudgetError:
            refused += 1
            continue
        assert found.plan.predicted is not None
        assert found.plan.predicted.total_bytes <= budget["memory"]
        assert found.plan.predicted.seconds <= budget["capture_time"]
        longer.append(found.evidence.expected_us.plan / min(steps) - 1)
    assert sum(share > 1e-3 for share in longer) <= len(longer) // 20, longer
    assert refused


def test_more_graphs_make_steps_shorter_for_five_sizes_by_five() -> None:
    rng = np.random.default_rng(2)
    counts = {
        (rows, columns): int(rng.integers(1, 100))
        for rows in (1, 4, 9, 30, 64)
        for columns in (20, 64, 200, 300, 500)
    }
    steps = []
    for graphs in range(1, 26):
        evidence = evidence_of(counts, graphs)
        steps.append(evidence.expected_us.plan)
        if graphs <= 3:
            assert steps[-1] == pytest.approx(brute_force(counts, graphs))
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] == evidence.expected_us.bound, "a box for each batch"


@pytest.mark.parametrize(
    ("sizes", "compilation", "graphs", "step"),
    [
        ([2, 6, 10], {}, 3, 32 / 6),
        ([2, 6], {}, None, None),  # a batch of 9 runs in none
        (None, {}, None, None),  # the powers of two
        (None, {"boxes": [[3], [10]]}, 2, 25 / 6),
    ],
)
def test_the_sizes_of_the_configuration_stand_beside_a_plan(
    sizes: list[int] | None, compilation: dict[str, Any], graphs: int | None, step: float | None
) -> None:
    plan, evidence = proposal_of(
        {(1,): 2, (3,): 3, (9,): 1}, 2, compilation=compilation, names=("batch",),
        dims={"batch": {"max": 10, "sizes": sizes}},
    )  # fmt: skip
    found = {ladder.name: ladder for ladder in evidence.ladders}
    assert "powers of two" in found
    configured = found.get("the configured sizes")
    assert (configured is None) is (graphs is None)
    if configured:
        assert configured.graphs == graphs
        assert configured.expected_us == pytest.approx(step)
        words = f"than with the configured sizes ({graphs} graphs)"
        assert words in evidence.verdict
        assert words in " ".join(render_text(plan).split())


def step_of_grid(counts: dict[tuple[int, ...], int], *shape: int) -> float:
    """Mean elements of a full grid, whose sizes pad least in each dimension alone."""
    batches, weights = np.array([*counts]), np.array([*counts.values()], dtype=np.float64)
    elements = np.ones(len(batches))
    for column, most in zip(batches.T, shape, strict=True):
        sizes, index = np.unique(column, return_inverse=True)
        sums = np.append(0.0, np.bincount(index, weights).cumsum())
        number = min(most, sizes.size)
        paths = best_paths(sums[None], np.append(0.0, sizes)[None], number)
        chosen = sizes[np.array(paths.sizes(number, sizes.size)) - 1]
        elements *= chosen[np.searchsorted(chosen, column)]
    return float(weights @ elements / weights.sum())


def test_many_boxes_are_at_least_as_good_as_a_full_grid() -> None:
    rng = np.random.default_rng(3)
    sizes = [
        np.unique(np.clip(rng.lognormal(median, 1, 300), 1, most).astype(int))
        for median, most in ((2, 64), (5, 512))
    ]
    counts = {
        (int(rng.choice(sizes[0][:24])), int(rng.choice(sizes[1]))): int(rng.integers(1, 50))
        for _ in range(500)
    }
    for graphs in (4, 20):
        plan, evidence = proposal_of(counts, graphs)
        assert evidence.expected_us.bound < evidence.expected_us.plan
        grids = [(rows, graphs // rows) for rows in range(1, graphs + 1)]
        assert evidence.expected_us.plan <= min(step_of_grid(counts, *shape) for shape in grids)
    shown = render_text(plan)
    assert "bound: each batch at its best, in a graph;" in shown, "eager steps are not known"


def test_exchanges_count_the_pool_and_static_buffers() -> None:
    """Against all choices, where the largest pool counts, and the static buffers of each group."""
    rng, best, found = np.random.default_rng(7), 0, 0
    sets = [list(some) for n in range(1, 9) for some in combinations(range(8), n)]
    for _ in range(20):
        cost, weights = rng.random((9, 8)), rng.random(9) + 0.1
        rising = np.cumsum(rng.random((2, 4, 2)), axis=1)
        pool, static = np.sort(rising[0].ravel()), rising[1].ravel()
        driver, seconds = rng.random((2, 8))
        figures = np.stack([driver, seconds, pool, static])
        purse = Purse(8, float(rng.uniform(2, 7)), float(rng.uniform(1, 3)), figures, groups=2)
        totals = {}
        for some in sets:
            buffers = np.zeros(2)
            np.maximum.at(buffers, np.array(some) % 2, static[some])
            memory = driver[some].sum() + pool[some].max() + buffers.sum()
            if memory <= purse.memory and seconds[some].sum() <= purse.seconds:
                totals[frozenset(some)] = weights @ cost[:, some].min(1)
        chosen, total = min(
            (exchanged(cost, weights, purse, [n]) for n in range(8)), key=itemgetter(1)
        )
        if chosen:
            found += 1
            assert totals[frozenset(chosen)] == pytest.approx(total)
            best += total == pytest.approx(min(totals.values()))
    assert best >= 0.8 * found > 10


def test_a_sum_of_seconds_that_is_the_limit_is_paid_for() -> None:
    """11 boxes of 0.1 s after 0.5 s are a little over 1.6 s as floats are added."""
    costs = DrawnCosts(np.random.default_rng(8), alike=True)
    costs.took, costs.once_seconds = np.array([0.1]), 0.5
    counts = {(rows, columns): 1 for rows in (1, 4, 9, 64) for columns in (20, 64, 200, 500)}
    found = propose_boxes(config_of(budget={"capture_time": 1.6}), traffic_of(counts), costs=costs)
    assert found.evidence.graphs == 11
    assert found.evidence.binding == ("capture_time",)


def test_the_pool_may_take_much_of_the_memory() -> None:
    rng = np.random.default_rng(8)
    costs = DrawnCosts(rng, alike=True)
    costs.driver[:], costs.slope = 1000, 1.0
    counts = {
        (rows, columns): int(rng.integers(1, 100))
        for rows, columns in product((1, 4, 9, 20, 40, 64), (20, 64, 120, 200, 300, 512))
        if rows * columns <= 6000
    }
    found = propose_boxes(config_of(budget={"memory": 12_000}), traffic_of(counts), costs=costs)
    assert found.evidence.binding == ("memory",)
    assert found.evidence.graphs == 4


def test_other_grids_stand_beside_the_plan() -> None:
    counts = {(1, 500): 10, (64, 10): 10, (3, 40): 80}
    evidence = evidence_of(counts, 3)
    assert boxes_of(evidence) == set(counts)
    (powers,) = evidence.ladders
    assert powers.graphs == 7 * 10
    assert powers.expected_us == pytest.approx((10 * 1 * 512 + 10 * 64 * 16 + 80 * 4 * 64) / 100)
    assert powers.padding == pytest.approx(
        1 - (10 * 500 + 10 * 640 + 80 * 120) / (100 * powers.expected_us)
    )
    assert evidence.padding == 0
    assert min(ladder.expected_us for ladder in evidence.ladders) >= evidence.expected_us.plan


def test_no_full_grid_of_as_many_graphs_is_better() -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        counts = random_counts(rng, 4)
        sizes = [sorted({batch[dim] for batch in counts}) for dim in (0, 1)]
        steps = []
        for rows, columns in ((1, 4), (2, 2), (4, 1), (1, 3), (3, 1), (1, 2), (2, 1), (1, 1)):
            for grid in product(combinations(sizes[0], rows), combinations(sizes[1], columns)):
                if grid[0][-1] == sizes[0][-1] and grid[1][-1] == sizes[1][-1]:
                    up = [
                        np.prod([min(s for s in g if s >= n) for g, n in zip(grid, b, strict=True)])
                        for b in counts
                    ]
                    steps.append(np.dot(up, list(counts.values())) / sum(counts.values()))
        assert evidence_of(counts, 4).expected_us.plan <= min(steps) * (1 + 1e-9)


def test_boxes_have_sizes_that_dimensions_allow() -> None:
    dims = {
        "batch": {"max": 60, "min": 4, "multiple_of": 4},
        "length": {"max": 500, "multiple_of": 64},
    }
    assert boxes_of(evidence_of({(1, 1): 5, (59, 450): 1}, 2, dims=dims)) == {(4, 64), (60, 512)}


def test_times_decide_where_they_are_given() -> None:
    """Two boxes: with elements the rare large batches share one; steps of length 100 take as long as those of 50."""
    counts = {(1, 50): 100, (1, 100): 90, (8, 100): 10}
    flat = StepSurface(
        (np.array([1.0, 8.0]), np.array([50.0, 100.0])),
        np.array([[10.0, 10.0], [20.0, 90.0]]),
        "times.csv",
    )
    found = propose_boxes(config_of(2), traffic_of(counts), flat).evidence
    assert boxes_of(found) == {(1, 100), (8, 100)}
    assert found.expected_us.plan == pytest.approx(0.95 * 10 + 0.05 * 90)
    assert (found.times_source, found.warnings) == ("times.csv", ())
    assert found.verdict.startswith("steps ")
    doubtful = propose_boxes(config_of(2), traffic_of(counts), flat._replace(doubt="by tape: "))
    assert doubtful.evidence.verdict.startswith("by tape: steps ")
    assert found.expected_us.eager is None
    assert boxes_of(evidence_of({(1, 50): 900, (1, 100): 10, (8, 100): 10}, 2)) == {
        (1, 50),
        (8, 100),
    }


@pytest.mark.parametrize(
    ("eager", "bound", "said", "no_gain"),
    [
        ([10.0, 30.0, 120.0], 17.0, "steps 43.3% shorter than eager, ", True),
        ([8.0, 16.0, 60.0], 15.0, f"{NOT_WORTH_IT}: steps 1.2% longer than eager, ", False),
        ([8.0, 10.0, 80.0], 16.1, f"{NOT_WORTH_IT}: steps 5.6% longer than eager, ", False),
    ],
)
def test_eager_steps_stand_beside_a_plan(
    eager: list[float], bound: float, said: str, no_gain: bool
) -> None:
    """A batch of 3 runs eagerly halfway between 2 and 4, and in the graph of 4."""
    sizes, graph = (np.array([2.0, 4.0, 8.0]),), np.array([8.0, 10.0, 80.0])
    times = StepSurface(sizes, graph, "bench.json", np.array(eager))
    config = config_of(2, {"batch": {"max": 8, "multiple_of": 4}})
    plan, found = propose_boxes(config, traffic_of({(3,): 90, (8,): 10}, names=("batch",)), times)
    mean = 0.9 * (eager[0] + eager[1]) / 2 + 0.1 * eager[2]
    expected = found.expected_us
    assert (expected.plan, expected.eager, expected.bound) == pytest.approx((17, mean, bound))
    assert boxes_of(found) == {(4,), (8,)}, "each batch has a graph, whatever eager steps take"
    assert found.verdict.startswith(said)
    assert [ladder.name for ladder in found.ladders if not ladder.graphs] == ["eager"]
    assert [ladder.no_gain for ladder in found.ladders[1:]] == [no_gain]
    shown = " ".join(render_text(plan).split())
    assert f"17.0 us expected; bound {format_microseconds(bound)}" in shown
    assert f"eager 0 {format_microseconds(mean)} 0.0% " in shown
    assert ("% no gain" in shown) is no_gain
    assert "bound: each batch at its best, in a graph or eager;" in shown


def test_boxes_beyond_the_measured_sizes_are_told() -> None:
    """Of (4, 20) the length is beyond them; each box is a graph for each of two LoRA cases."""
    sizes = (np.array([2.0, 4.0]), np.array([5.0, 10.0]))
    times = StepSurface(sizes, np.array([[1.0, 2.0], [3.0, 4.0]]), "times.csv")
    lora = {"lora": {"max_loras": 2}, "compilation": {"cudagraph_specialize_lora": True}}
    plan, found = propose_boxes(config_of(6, **lora), traffic_of({(1, 3): 9, (4, 20): 9}), times)
    assert (found.graphs, found.unmeasured_graphs) == (4, 2)
    assert "; 2 of 4 graphs extrapolated" in " ".join(render_text(plan).split())
    assert evidence_of({(1, 3): 9, (4, 20): 9}).unmeasured_graphs == 0, "1 us for each element"


def test_a_batch_runs_in_the_box_of_the_dispatcher() -> None:
    """The box with the fewest elements is the slower one here."""
    counts = {(1, 10): 1, (8, 20): 1, (2, 100): 1}
    slow = StepSurface(
        (np.array([1.0, 2.0, 8.0]), np.array([10.0, 20.0, 100.0])),
        np.array([[1.0, 1.0, 1.0], [2.0, 2.0, 9.0], [90.0, 90.0, 95.0]]),
        "times.csv",
    )
    found = propose_boxes(config_of(2), traffic_of(counts), slow).evidence
    assert boxes_of(found) == {(8, 20), (2, 100)}
    assert found.expected_us.plan == pytest.approx((90 + 90 + 9) / 3)


def test_too_many_sizes_are_thinned_out() -> None:
    counts = {(1 + n % 3, n): 1 + n % 7 for n in range(1, 400)}
    evidence = evidence_of(counts, 8)
    assert any(note.startswith("too many sizes of length: ") for note in evidence.traffic_notes)
    assert all(
        any(np.all(np.less_equal(batch, box)) for box in boxes_of(evidence)) for batch in counts
    )
    assert all(
        any(box[dim] in {batch[dim] for batch in counts} for dim in (0, 1))
        for box in boxes_of(evidence)
    )


def test_three_dimensions_and_one() -> None:
    dims = {name: {"max": 32} for name in ("batch", "height", "width")}
    counts = {(1, 8, 32): 5, (1, 32, 8): 5, (4, 4, 4): 2}
    found = propose_boxes(config_of(3, dims), traffic_of(counts, names=tuple(dims))).evidence
    assert boxes_of(found) == set(counts)
    assert [ladder.graphs for ladder in found.ladders] == [6**3], (
        "a grid of 4 x 8 has two dimensions"
    )
    one = propose_boxes(
        config_of(2, {"batch": {"max": 32}}),
        traffic_of({(3,): 1, (7,): 5, (8,): 1}, names=("batch",)),
    )
    assert boxes_of(one.evidence) in ({(3,), (8,)}, {(7,), (8,)})
    assert one.evidence.expected_us.plan == pytest.approx((7 + 35 + 8) / 7)


def test_batches_without_a_graph_are_told() -> None:
    found = propose_boxes(config_of(2), traffic_of({(1, 8): 5, (4, 4): 5}, beyond=3)).evidence
    assert found.verdict.endswith("; 3 of 13 batches are left out")
    assert found.warnings[-1] == (
        "3 of 13 batches are above the max of a dimension: they run eagerly, and no figure has "
        "them; --set dims.batch.max=N or --set dims.length.max=N has them planned for"
    )
    assert any("64 x 512" in note for note in found.traffic_notes)
    assert not any("64 x 512" in note for note in evidence_of({(64, 512): 1}, 2).traffic_notes)


@pytest.mark.parametrize("height", ["side", "2 * side"])
def test_a_size_that_an_input_has_twice_counts_twice(height: str) -> None:
    dims = {"batch": {"max": 4}, "side": {"max": 96}}
    pixels = {"shape": ["batch", 3, height, "side"], "dtype": "float32", "pad": 0}
    sections: Any = {"inputs": {"x": pixels}, "model": {"output_shapes": ["batch"]}}
    counts = {(1, 64): 1, (1, 96): 1}
    found = evidence_of(counts, 2, names=("batch", "side"), dims=dims, **sections)
    assert found.expected_us.plan == (64**2 + 96**2) / 2
    one = evidence_of(counts, 1, names=("batch", "side"), dims=dims, **sections)
    padding = 1 - (64**2 + 96**2) / (2 * 96**2)
    assert [use.padding for use in one.uses] == [pytest.approx(padding)]
    assert one.padding == pytest.approx(padding)


def test_the_plan_captures_its_boxes() -> None:
    config = config_of(2)
    proposal = propose_boxes(config, traffic_of({(1, 8): 5, (4, 4): 5}))
    boxes = sorted(boxes_of(proposal.evidence))
    with_boxes = config_of(2, compilation={"boxes": boxes})
    assert sorted(proposal.plan.keys) == sorted(build_plan(with_boxes).keys)
    assert proposal.plan.config_hash == config_hash(config), (
        "so that it is captured with the configuration as it is"
    )
    assert Evidence.model_validate(proposal.plan.evidence) == proposal.evidence


def test_a_graph_is_counted_for_each_lora_case() -> None:
    counts = {(1, 8): 5, (4, 4): 5, (9, 9): 1}
    lora = {"lora": {"max_loras": 2}, "compilation": {"cudagraph_specialize_lora": True}}
    found = propose_boxes(config_of(5, **lora), traffic_of(counts)).evidence
    assert (found.graphs, len(found.uses), found.ladders[0].graphs) == (4, 2, 140)
    with pytest.raises(BudgetError, match=r"budget.max_graphs is 1, too few"):
        propose_boxes(config_of(1, **lora), traffic_of(counts))


def test_a_mode_without_graphs_is_refused() -> None:
    with pytest.raises(PlanError, match="has no graphs"):
        evidence_of({(1, 8): 5}, compilation={"cudagraph_mode": "NONE"})


def test_a_listed_size_that_runs_in_larger_boxes_is_told() -> None:
    """As pictures of 64 in graphs of 96 do."""
    counts = {(1, 64): 5, (2, 96): 5, (4, 64): 5}
    dims = {"batch": {"max": 4}, "side": {"max": 96, "sizes": [64, 96]}}
    names = ("batch", "side")
    text = "batches of side 64 run in larger boxes: right only where padding of side has no effect"
    told = [evidence_of(counts, most, dims=dims, names=names).unsure for most in (1, 3)]
    assert [any(text in warning for warning in each) for each in told] == [True, False]
    dims["side"].pop("sizes")
    found = evidence_of(counts, 1, dims=dims, names=names)
    assert found.warnings == ()
    assert not any(text in warning for warning in found.unsure)


def test_steps_alike_are_as_long() -> None:
    """They had been 0.0% shorter."""
    counts = {(1, 8): 5, (2, 8): 5}
    verdict = evidence_of(counts, dims={"batch": {"max": 2}, "length": {"max": 8}}).verdict
    assert "steps as long as with" in verdict


@pytest.mark.parametrize(("slow", "is_told"), [(2500.0, True), (710.0, False)])
def test_boxes_between_measured_sizes_are_told_where_times_may_differ(
    slow: float, is_told: bool
) -> None:
    surface = StepSurface((np.array([1.0, 4.0]),), np.array([700.0, slow]), "by hand")
    seen = traffic_of({(n,): 1 for n in (1, 2, 3, 4)}, names=("batch",))
    config = config_of(4, dims={"batch": {"max": 4}})
    evidence = propose_boxes(config, seen._replace(warnings=("few",)), surface).evidence
    warning = (
        "50.0% of the steps run in graphs between measured sizes: their times are guessed; "
        "measure them: `cgplan bench FILE --set 'dims.batch.sizes=[1,2,3,4]' "
        "--set model.target=my_model.py:build --output bench.json`"
    )
    assert any(warning in each for each in evidence.unsure) is is_told
    assert "few" in evidence.unsure
