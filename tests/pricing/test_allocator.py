"""The model of PyTorch's caching allocator: cases worked out by hand, and properties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cgplan.pricing.allocator import Allocation, CachingPool, round_size, segment_size

KIB, MIB = 1 << 10, 1 << 20


def take(block: int, nbytes: int) -> Allocation:
    return Allocation(block, nbytes)


def drop(block: int) -> Allocation:
    return Allocation(block, None)


def after(*events: Allocation) -> CachingPool:
    pool = CachingPool()
    pool.run(events)
    return pool


@pytest.mark.parametrize(
    ("nbytes", "rounded"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)]
)
def test_requests_are_rounded_to_512_bytes(nbytes: int, rounded: int) -> None:
    assert round_size(nbytes) == rounded
    assert after(take(1, nbytes)).allocated == rounded


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
    pool = after(take(1, nbytes))
    assert pool.reserved == segment
    assert pool.allocated == round_size(nbytes)


def test_small_requests_share_a_segment_until_it_is_full() -> None:
    assert after(take(1, MIB), take(2, MIB)).reserved == 2 * MIB
    assert after(take(1, MIB), take(2, MIB), take(3, 1)).reserved == 4 * MIB


def test_a_large_block_keeps_a_rest_of_up_to_one_mib() -> None:
    """4 x 4 MiB + 3 MiB leave 1 MiB of the 20: no more than kSmallSize, so the fifth block has it."""
    pool = after(*(take(i, 4 * MIB) for i in range(4)), take(4, 3 * MIB))
    assert (pool.reserved, pool.allocated) == (20 * MIB, 20 * MIB)
    pool.run([drop(4), take(5, 3 * MIB - 512)])
    assert pool.allocated == 16 * MIB + 3 * MIB - 512  # here the rest is larger, and cut off
    assert pool.num_free_blocks == 1


def test_best_fit_takes_the_smallest_block_that_holds_the_request() -> None:
    """Holes of 6 and 3 MiB: a request of 3 takes the hole of 3, so that one of 6 still fits."""
    pool = after(take(1, 6 * MIB), take(2, 2 * MIB), take(3, 3 * MIB), take(4, 9 * MIB))
    assert pool.reserved == 20 * MIB
    pool.run([drop(1), drop(3), take(5, 3 * MIB), take(6, 6 * MIB)])
    assert (pool.reserved, pool.num_free_blocks) == (20 * MIB, 0)


def test_holes_that_no_request_fits_into_cost_a_segment() -> None:
    """2 holes of 3 MiB with a block between them do not make 6."""
    pool = after(take(1, 3 * MIB), take(2, 11 * MIB // 2), take(3, 3 * MIB), take(4, 17 * MIB // 2))
    pool.run([drop(1), drop(3), take(5, 6 * MIB)])
    assert pool.reserved == 40 * MIB


def test_neighbours_are_merged_from_both_sides() -> None:
    pool = after(*(take(i, 4 * MIB) for i in range(5)))
    pool.run([drop(0), drop(2), drop(1), take(5, 9 * MIB)])  # 12 MiB in one piece again
    assert pool.reserved == 20 * MIB
    pool.run([drop(3), drop(4), drop(5)])
    assert (pool.num_free_blocks, pool.allocated, pool.peak) == (1, 0, 20 * MIB)


def test_free_blocks_serve_their_own_stream_alone() -> None:
    pool = CachingPool()
    pool.allocate(1, 4 * MIB, stream=1)
    pool.release(1)
    pool.allocate(2, 4 * MIB, stream=2)
    assert pool.reserved == 40 * MIB
    pool.allocate(3, 4 * MIB, stream=1)
    assert pool.reserved == 40 * MIB


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


def test_releasing_what_is_not_there_changes_nothing() -> None:
    pool = after(take(1, 4 * MIB), drop(7), drop(1), drop(1))
    assert (pool.allocated, pool.num_free_blocks) == (0, 1)


def test_constants_are_those_of_the_torch_that_is_installed() -> None:
    from pathlib import Path

    from cgplan.pricing import allocator

    header = Path(torch.__file__).parent / "include" / "c10" / "core" / "AllocatorConfig.h"
    if not header.exists():
        pytest.skip("this torch has no headers, or keeps its constants elsewhere")
    text = header.read_text()
    for name, value in {
        "kSmallBuffer": allocator.SMALL_BUFFER,
        "kMinBlockSize": allocator.MIN_BLOCK_SIZE,
        "kSmallSize": allocator.SMALL_SIZE,
        "kMinLargeAlloc": allocator.MIN_LARGE_ALLOC,
        "kRoundLarge": allocator.ROUND_LARGE,
        "large_segment_size_": allocator.LARGE_BUFFER,
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
def test_reserved_memory_holds_what_is_taken(events: list[Allocation]) -> None:
    pool, living, most = CachingPool(), dict[int, int](), 0
    for event in events:
        before = pool.reserved
        pool.run([event])
        if event.nbytes is None:
            del living[event.block]
            assert pool.reserved == before
        else:
            living[event.block] = round_size(event.nbytes)
            assert pool.reserved in (before, before + segment_size(living[event.block]))
        most = max(most, sum(living.values()))
        assert sum(living.values()) <= pool.allocated <= sum(living.values()) + MIB * len(living)
    assert pool.reserved >= pool.peak >= most


@settings(max_examples=100, deadline=None)
@given(histories(), st.randoms())
def test_an_empty_pool_is_one_block_for_each_segment(events: list[Allocation], random: object) -> None:
    """In whatever order the last blocks go."""
    pool, segments = CachingPool(), 0
    for event in events:
        before = pool.reserved
        pool.run([event])
        segments += pool.reserved > before
    left = [event.block for event in events if event.nbytes is not None]
    random.shuffle(left)  # type: ignore[attr-defined]
    pool.run(map(drop, left))
    assert (pool.allocated, pool.num_free_blocks) == (0, segments)


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(1, 12), st.integers(1, 20))
def test_captures_of_the_same_forward_cost_one(nbytes: int, layers: int, times: int) -> None:
    """Each layer's output is dropped when the next one has its own, as in a forward."""
    forward = [take(0, nbytes)]
    for layer in range(1, layers):
        forward += [take(layer, nbytes), drop(layer - 1)]
    forward.append(drop(layers - 1))
    once = after(*forward)
    pool = after(*(forward * times))
    assert pool.reserved == once.reserved
    assert once.peak <= 2 * (round_size(nbytes) + MIB)
