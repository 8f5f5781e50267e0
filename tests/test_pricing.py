"""What graphs cost: arithmetic over keys, static buffers, and costs from measured captures. The model of PyTorch's caching allocator: cases worked out by hand, and properties."""

from __future__ import annotations

import math
import pickle
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cgplan.buffers.static import StaticBuffers
from cgplan.config import Config, Input, validate_config
from cgplan.config.schema import DType
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.planning import build_plan
from cgplan.pricing import (
    Allocation,
    CachingPool,
    GraphCosts,
    MeasuredKey,
    interpolate,
    representative_keys,
    round_size,
    segment_size,
    static_bytes,
)
from cgplan.reports import CaptureReport, Environment, GraphRecord

MIB = 1 << 20
FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
CONFIG = Config(inputs={"x": Input(shape=("num_tokens", 4), dtype="float32", pad=0)})


def key(num_tokens: int, mode: CUDAGraphMode = FULL, lora: int = 0) -> Key:
    return mode, BatchDescriptor(num_tokens, num_tokens, mode is FULL, lora > 0, lora)


class Linear(GraphCosts):
    """1 KiB of pool a token, 10 bytes of driver memory and 1 ms for each key, 2 s once."""

    source, estimated = "made up", False
    workspace_bytes = 7
    once_seconds = 2.0

    def __init__(self) -> None:
        """There are no captures."""

    def pool_bytes(self, mode: CUDAGraphMode, num_tokens: int) -> int:
        return num_tokens << (10 if mode is FULL else 11)

    def static_bytes(self, num_tokens: int, _: tuple[int, ...] = ()) -> int:
        return 100 + num_tokens

    def driver_bytes(self, key: Key) -> int:
        return 10

    def seconds(self, key: Key) -> float:
        return 0.001


# --- sums over keys -------------------------------------------------------------------------------------------


def test_later_keys_fit_into_the_pool_of_larger_ones() -> None:
    cost = Linear().of([key(8, PIECEWISE), key(4, PIECEWISE), key(20), key(16), key(1)])
    assert [k.pool_bytes for k in cost.keys] == [16 << 10, 0, 4 << 10, 0, 0]
    assert [k.driver_bytes for k in cost.keys] == [10] * 5
    assert (cost.static_bytes, cost.workspace_bytes) == (120, 7)
    assert cost.total_bytes == (20 << 10) + 50 + 120 + 7


def test_what_is_spent_once_is_spent_on_the_first_key() -> None:
    cost = Linear().of([key(4), key(2), key(1)])
    assert [k.seconds for k in cost.keys] == [2.001, 0.001, 0.001]
    assert cost.seconds == pytest.approx(2.003)
    assert (Linear().of([]).total_bytes, Linear().of([]).seconds) == (0, 0)


# --- static buffers -------------------------------------------------------------------------------------------

DIMENSIONS = st.sampled_from(
    ["num_tokens", "num_reqs", "num_reqs + 1", "2 * num_tokens", "3 * num_reqs + 2"]
)
SPECS = st.builds(
    lambda rows, others, dtype: Input(shape=(*others[:1], *rows, *others[1:]), dtype=dtype, pad=0),
    st.lists(DIMENSIONS, max_size=1),
    st.lists(st.integers(1, 5), min_size=1, max_size=2),
    st.sampled_from(get_args(DType)),
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from("abcd"), SPECS), st.integers(0, 40), st.integers(1, 20))
def test_static_bytes_are_those_of_the_buffers(
    specs: dict[str, Input], num_tokens: int, max_num_seqs: int
) -> None:
    config = Config.model_validate({"inputs": specs, "scheduler": {"max_num_seqs": max_num_seqs}})
    buffers = StaticBuffers(specs, num_tokens, min(num_tokens, max_num_seqs), torch.device("cpu"))
    assert static_bytes(config, num_tokens) == buffers.nbytes


@pytest.mark.parametrize("dtype", get_args(DType))
def test_elements_have_torchs_size(dtype: str) -> None:
    config = Config(inputs={"x": Input(shape=(3,), dtype=dtype, pad=0)})
    assert static_bytes(config, 1) == 3 * getattr(torch, dtype).itemsize


# --- which keys tell what the others cost ---------------------------------------------------------------------


def sizes_of(keys: tuple[Key, ...], mode: CUDAGraphMode, lora: int = 0) -> list[int]:
    return [d.num_tokens for m, d in keys if m is mode and d.num_active_loras == lora]


def test_of_each_mode_the_largest_size_and_a_small_one() -> None:
    plan = build_plan(
        Config.model_validate({"compilation": {"cudagraph_mode": "FULL_AND_PIECEWISE"}})
    )
    keys = representative_keys(plan.keys, plan.max_num_seqs)
    assert keys == tuple(key for key in plan.keys if key in set(keys))
    assert sizes_of(keys, PIECEWISE) == [
        512,
        256,
        2,
    ]  # from 256 tokens on, the number of requests stays
    assert sizes_of(keys, FULL) == [256, 2]


def test_of_lora_cases_the_one_without_and_the_one_for_most_adapters() -> None:
    config = {
        "lora": {"max_loras": 4, "specialize_active_lora": True},
        "scheduler": {"max_num_seqs": 64},
    }
    plan = build_plan(
        Config.model_validate({**config, "compilation": {"cudagraph_mode": "FULL_DECODE_ONLY"}})
    )
    keys = representative_keys(plan.keys, plan.max_num_seqs)
    assert (sizes_of(keys, FULL, 0), sizes_of(keys, FULL, 5)) == ([64, 2], [64, 2])
    assert len(keys) == 4
    assert representative_keys([key(4), key(1)], 8) == (key(4),)
    assert representative_keys([], 8) == ()


# --- interpolation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("at", "value"), [(2, 10), (4, 20), (3, 15), (8, 24), (12, 28), (1, 5)])
def test_values_lie_on_the_lines_through_their_neighbours(at: int, value: float) -> None:
    assert interpolate([(2, 10), (4, 20), (8, 24)], at) == pytest.approx(value)
    assert interpolate([(4, 3.0)], at) == 3.0, "a lone point holds everywhere"


# --- measured costs -------------------------------------------------------------------------------------------


def measured(**changes: Any) -> GraphCosts:
    keys = [
        MeasuredKey(FULL, 0, 2, driver_bytes=1000.0, seconds=0.01),
        MeasuredKey(FULL, 0, 10, driver_bytes=1800.0, seconds=0.05),
        MeasuredKey(FULL, 2, 10, driver_bytes=4000.0, seconds=0.1),
    ]
    given: dict[str, Any] = {"source": "a test", "workspace_bytes": 32 * MIB, "once_seconds": 1.5}
    return GraphCosts(keys, {FULL: [(10, 26 * MIB), (2, 6 * MIB)]}, CONFIG, **{**given, **changes})


def test_measured_sizes_cost_what_was_measured() -> None:
    costs = measured()
    assert (costs.pool_bytes(FULL, 10), costs.pool_bytes(FULL, 2)) == (26 * MIB, 6 * MIB)
    assert (costs.driver_bytes(key(10)), costs.seconds(key(2))) == (1800, 0.01)
    assert not costs.estimated


def test_costs_travel_to_other_processes() -> None:
    costs = measured()
    keys = [key(10), key(6), key(2)]
    assert pickle.loads(pickle.dumps(costs)).of(keys) == costs.of(keys)


def test_other_sizes_are_interpolated_in_whole_segments() -> None:
    costs = measured()
    assert costs.pool_bytes(FULL, 6) == 16 * MIB
    assert costs.pool_bytes(FULL, 3) == 10 * MIB  # 8.5, rounded up
    assert costs.driver_bytes(key(6)) == 1400
    assert costs.seconds(key(4)) == pytest.approx(0.02)
    assert costs.pool_bytes(FULL, 1) == 4 * MIB
    assert costs.pool_bytes(FULL, 12) == 32 * MIB


def test_pools_without_segments_are_interpolated_to_the_byte() -> None:
    """As on the tape, where a pool of 52 KiB is one of 52 KiB."""
    costs = GraphCosts([], {FULL: [(2, 100_000), (32, 1_600_064)]}, CONFIG, source="a test")
    assert costs.pool_bytes(FULL, 16) == 100_000 + math.ceil(1_500_064 * 14 / 30)
    assert costs.pool_bytes(FULL, 1) == 50_000
    assert costs.pool_bytes(FULL, 32) == 1_600_064


def test_a_size_below_the_smallest_takes_at_least_its_share() -> None:
    costs = GraphCosts([], {FULL: [(4, 8 * MIB), (8, 32 * MIB)]}, CONFIG, source="a test")
    assert [costs.pool_bytes(FULL, size) for size in (1, 2, 3)] == [2 * MIB, 4 * MIB, 6 * MIB]


def test_beyond_what_was_measured_nothing_is_free() -> None:
    """Times are noisy: through these the line would reach 0 at 5 tokens."""
    keys = [
        MeasuredKey(FULL, 0, 2, driver_bytes=3000.0, seconds=0.03),
        MeasuredKey(FULL, 0, 4, driver_bytes=1000.0, seconds=0.01),
    ]
    costs = GraphCosts(keys, {FULL: [(4, MIB)]}, CONFIG, source="a test")
    assert [costs.seconds(key(n)) for n in (3, 5, 7, 100)] == [
        pytest.approx(0.02),
        0.01,
        0.01,
        0.01,
    ]
    assert [costs.driver_bytes(key(n)) for n in (3, 5, 100)] == [2000, 1000, 1000]
    assert costs.seconds(key(1)) == pytest.approx(0.04)


def test_keys_with_adapters_are_apart() -> None:
    costs = measured()
    assert costs.driver_bytes(key(6, lora=3)) == 4000
    assert costs.driver_bytes(key(6, PIECEWISE)) == round(
        (1000 + 2900) / 2
    )  # of a mode that was not measured: any
    assert costs.pool_bytes(PIECEWISE, 6) == costs.pool_bytes(FULL, 6) == 16 * MIB


def test_a_key_that_was_measured_costs_what_was_measured_of_it() -> None:
    """Sizes in between are averaged over the numbers of adapters."""
    keys = [
        MeasuredKey(FULL, case, size, 1000.0 * case, 0.01 * case * size)
        for case in (1, 2, 3)
        for size in (2, 4)
    ]
    costs = GraphCosts(keys, {FULL: [(4, MIB)]}, CONFIG, source="a test")
    for measured_key in keys:
        asked = key(measured_key.num_tokens, lora=measured_key.num_active_loras)
        assert (costs.seconds(asked), costs.driver_bytes(asked)) == (
            measured_key.seconds,
            measured_key.driver_bytes,
        )
    assert [costs.seconds(key(3, lora=case)) for case in (1, 3)] == [pytest.approx(0.06)] * 2


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.integers(1, 300), st.integers(0, 500), min_size=1, max_size=5))
def test_a_larger_size_never_needs_a_smaller_pool(points: dict[int, int]) -> None:
    costs = GraphCosts(
        [], {FULL: [(n, mib * MIB) for n, mib in points.items()]}, CONFIG, source="a test"
    )
    found = [costs.pool_bytes(FULL, n) for n in range(1, 320)]
    assert found == sorted(found)
    assert all(costs.pool_bytes(FULL, n) >= mib * MIB for n, mib in points.items())


# --- from a report --------------------------------------------------------------------------------------------


def a_report(
    nodes: int | None = 100, driver: tuple[int, ...] = (2 * MIB, 0, 2 * MIB, 0)
) -> CaptureReport:
    plan = build_plan(
        Config.model_validate(
            {
                "inputs": CONFIG.inputs,
                "compilation": {"cudagraph_capture_sizes": [2, 4, 8, 16]},
                "device": "cuda",
            }
        )
    )
    environment = Environment(
        backend="cuda", machine="Linux", device="A GPU", driver="1", cuda="13", torch="2", python="3", cgplan="0",
        date="2026-01-02T03:04:05+00:00", config_hash="0123456789ab",
    )  # fmt: skip
    records = tuple(
        GraphRecord(
            mode=mode,
            descriptor=descriptor,
            graphs=1,
            nodes=nodes,
            pool_growth=40 * MIB if index == 0 else 0,
            driver_bytes=driver[index],
            warmup_seconds=2.0 if index == 0 else 0.02,
            capture_seconds=0.01,
        )
        for index, (mode, descriptor) in enumerate(plan.keys)
    )
    return CaptureReport(
        environment=environment, plan=plan, records=records, pool_bytes=40 * MIB, static_bytes=256,
        workspace_bytes=32 * MIB, driver_bytes=30 * MIB, free_before=1 << 34, free_after=1 << 33,
        session_seconds=3.0, inspection_seconds=0.1, borrowed_outputs=True,
    )  # fmt: skip


def test_costs_from_a_report_predict_that_capture() -> None:
    report = CaptureReport.model_validate_json(a_report().model_dump_json())
    costs = GraphCosts.from_report(report, CONFIG)
    cost = costs.of(report.plan.keys)
    assert [k.pool_bytes for k in cost.keys] == [40 * MIB, 0, 0, 0]
    assert [k.driver_bytes for k in cost.keys] == [MIB] * 4  # the chunks, spread over the nodes
    assert cost.seconds == pytest.approx(report.warmup_seconds + report.capture_seconds)
    assert cost.total_bytes == report.graph_bytes
    assert costs.once_seconds == pytest.approx(1.98)
    assert costs.seconds(report.plan.keys[0]) == pytest.approx(0.03)
    assert "A GPU" in costs.source
    assert "2026-01-02" in costs.source


def test_a_report_of_one_mode_says_how_it_prices_the_other() -> None:
    """As a runner's replan may meet it: graphs of one mode alone were captured so far."""
    both = {"compilation": {"cudagraph_mode": "FULL_AND_PIECEWISE"}, "lora": {"max_loras": 2}}
    costs = GraphCosts.from_report(a_report(), validate_config(both), ["other words"])
    assert costs.notes == (
        "other words",
        "there are no figures of PIECEWISE graphs: they are priced as FULL ones of the same size",
        "there are no figures of FULL graphs with adapters: they are priced as those without",
    )
    assert costs.pool_bytes(PIECEWISE, 8) == costs.pool_bytes(FULL, 8) == 20 * MIB
    assert GraphCosts.from_report(a_report(), CONFIG).notes == ()


def test_a_report_without_node_counts_spreads_the_driver_over_keys() -> None:
    costs = GraphCosts.from_report(a_report(nodes=None), CONFIG)
    assert costs.driver_bytes(key(8)) == MIB


def test_what_a_plan_predicts_prices_other_sizes_as_its_costs_did() -> None:
    config = validate_config({"compilation": {"cudagraph_mode": "FULL"}})
    keys = [MeasuredKey(FULL, 0, size, MIB, 0.05) for size in (2, 16, 256)]
    pools = {FULL: [(2, 2 * MIB), (256, 100 * MIB)]}
    costs = GraphCosts(keys, pools, config, source="a test", once_seconds=5.0)
    few = build_plan(config.with_values("compilation", cudagraph_capture_sizes=(8, 32, 256)))
    found = costs.of(few.keys)
    by_plan = GraphCosts.of_captures(
        list(zip(few.keys, found.keys, strict=True)), config, source="b"
    )
    ladder = build_plan(config).keys
    assert by_plan.of(ladder).seconds == pytest.approx(costs.of(ladder).seconds)
    assert by_plan.once_seconds == pytest.approx(5.0)


KIB = 1 << 10


def take(block: int, nbytes: int) -> Allocation:
    return Allocation(block, nbytes)


def drop(block: int) -> Allocation:
    return Allocation(block, None)


def after(*events: Allocation) -> CachingPool:
    pool = CachingPool()
    pool.run(events)
    return pool


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 1024, 20 * MIB),
        (10 * MIB - 1, 10 * MIB),  # rounded first: 10 MiB are no longer below the limit
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (58 * MIB + 1, 60 * MIB),
    ],
)
def test_what_a_first_request_takes_from_the_device(nbytes: int, segment: int) -> None:
    assert segment_size(round_size(nbytes)) == segment
    assert after(take(1, nbytes)).reserved == segment


@pytest.mark.parametrize(
    ("events", "reserved"),
    [
        # small requests share a segment until it is full
        ([take(1, MIB), take(2, MIB)], 2),
        ([take(1, MIB), take(2, MIB), take(3, 1)], 4),
        # a large block keeps a rest of up to 1 MiB: the fifth has what is left of 20 MiB, so that nothing is free
        ([*(take(i, 4 * MIB) for i in range(4)), take(4, 3 * MIB), take(5, 1 * MIB + 512)], 40),
        ([*(take(i, 4 * MIB) for i in range(4)), take(4, 3 * MIB - 512), take(5, 1 * MIB + 512)], 20),
        # best fit: of holes of 6 and 3 MiB a request of 3 takes the hole of 3, so that one of 6 still fits
        (
            [
                *(take(n, mib * MIB) for n, mib in enumerate((6, 2, 3, 9))),
                drop(0), drop(2), take(5, 3 * MIB), take(6, 6 * MIB),
            ],
            20,
        ),
        # 2 holes of 3 MiB with a block between them do not make 6
        (
            [
                *(take(n, mib * MIB // 2) for n, mib in enumerate((6, 11, 6, 17))),
                drop(0), drop(2), take(5, 6 * MIB),
            ],
            40,
        ),
        # neighbours are merged from both sides
        ([*(take(i, 4 * MIB) for i in range(5)), drop(0), drop(2), drop(1), take(5, 12 * MIB)], 20),
        # two empty segments do not make one
        ([take(1, 20 * MIB), take(2, 20 * MIB), drop(1), drop(2), take(3, 40 * MIB)], 80),
        # releasing a block that is not there changes nothing; 0 bytes take none
        ([take(1, 4 * MIB), drop(7), drop(1), drop(1), take(2, 0), take(3, 20 * MIB)], 20),
    ],
)  # fmt: skip
def test_reserved_memory_by_hand(events: list[Allocation], reserved: int) -> None:
    assert after(*events).reserved == reserved * MIB


def test_captures_into_one_pool_reuse_what_the_earlier_ones_dropped() -> None:
    """The second capture fits into the first one's memory, but for what the first still holds."""

    def forward(rows: int, first: int) -> list[Allocation]:
        hidden, wide = first, first + 1
        return [take(hidden, rows * MIB), take(wide, 4 * rows * MIB), drop(hidden), drop(wide)]

    pool = after(*forward(8, 0))
    assert pool.reserved == 20 * MIB + 32 * MIB
    pool.run(forward(4, 10))
    pool.run(forward(2, 20))
    assert pool.reserved == 52 * MIB
    held = [event for event in forward(8, 30) if event != drop(31)]  # the output is kept
    pool.run(held)
    assert pool.reserved == 52 * MIB
    pool.run(forward(8, 40))
    assert pool.reserved == 52 * MIB + 32 * MIB


def test_constants_are_those_of_the_torch_that_is_installed() -> None:
    from pathlib import Path

    from cgplan import pricing

    header = Path(torch.__file__).parent / "include" / "c10" / "core" / "AllocatorConfig.h"
    if not header.exists():
        pytest.skip("this torch has no headers, or keeps its constants elsewhere")
    text = header.read_text()
    for name, value in {
        "kSmallBuffer": pricing.SMALL_BUFFER,
        "kMinBlockSize": pricing.MIN_BLOCK_SIZE,
        "kSmallSize": pricing.SMALL_SIZE,
        "kMinLargeAlloc": pricing.MIN_LARGE_ALLOC,
        "kRoundLarge": pricing.ROUND_LARGE,
        "large_segment_size_": pricing.LARGE_BUFFER,
    }.items():
        assert f"{name} = {value};" in text or f"{name}{{{value}}};" in text, name


# --- properties -----------------------------------------------------------------------------------------------

SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 2 * MIB),
    st.integers(1, 30 * MIB),
    st.sampled_from([MIB, MIB + 1, 10 * MIB]),
)


@st.composite
def histories(draw: st.DrawFn) -> list[Allocation]:
    """Allocations and releases of living blocks, in any order."""
    events: list[Allocation] = []
    living: list[int] = []
    for block in range(draw(st.integers(1, 40))):
        while living and draw(st.booleans()):
            events.append(drop(living.pop(draw(st.integers(0, len(living) - 1)))))
        events.append(take(block, draw(SIZES)))
        living.append(block)
    return events


@settings(max_examples=200, deadline=None)
@given(histories())
def test_reserved_memory_holds_what_is_taken_and_serves_it_again(events: list[Allocation]) -> None:
    """A release takes no memory, a request at most one segment, and an empty pool serves the same history again."""
    pool, living = CachingPool(), dict[int, int]()
    for event in events:
        before = pool.reserved
        pool.run([event])
        if event.nbytes is None:
            del living[event.block]
            assert pool.reserved == before
        else:
            living[event.block] = round_size(event.nbytes)
            assert pool.reserved in (before, before + segment_size(living[event.block]))
        assert sum(living.values()) <= pool.reserved
    before = pool.reserved
    pool.run(map(drop, [*living]))
    largest = max(round_size(event.nbytes) for event in events if event.nbytes is not None)
    pool.run([take(0, largest)])
    assert pool.reserved == before, "blocks of an empty pool are whole segments"
