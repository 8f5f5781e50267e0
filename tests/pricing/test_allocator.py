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
