"""Triton kernels of the custom all-reduce.

Note [Signals]
    Peers can write a rank's signals: [MOST_BLOCKS, WORLD] int32. In a barrier, block b of each rank
    writes a value to place (b, its rank) of all signals, and waits until all places (b, *) of its
    own are as high. The value rises in device memory, and wraps around. All ranks launch the same
    kernels in the same order with the same number of blocks.

    Writes are system-scope atomics that release, waits ones that acquire; `debug_barrier` makes
    both hold for all threads of the block. The last barrier of the one-shot kernel publishes
    nothing: not ORDERED, it spares a fence.

    Slices lie after the signals. They are written again only after the next kernel's first
    barrier, when all blocks of this one have ended.

    The error word is 0 while all is well. A host that learns of a failed rank, or a wait of LIMIT
    looks, writes it and so ends all waits; sums are then NaN. One thread reads it for the block:
    threads that read different values would part in the loop.
"""

from __future__ import annotations

import triton
import triton.language as tl

# values of the error word
UNREGISTERED = 1
TIMED_OUT = 2
ABORTED = 3


@triton.jit
def _look(own, zeros, values, ORDERED: tl.constexpr):
    """0 or more once all ranks have come."""
    wait: tl.constexpr = "acquire" if ORDERED else "relaxed"
    seen = tl.atomic_add(own, zeros, sem=wait, scope="sys")
    return tl.min(seen - values, axis=0)


@triton.jit
def _barrier(
    signals,
    error,
    slot,
    value,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    LIMIT: tl.constexpr,
    ORDERED: tl.constexpr,
):
    """0 if it left without the others, whose memory must not be touched then."""
    tl.debug_barrier()
    ranks = tl.arange(0, WORLD)
    zeros = tl.zeros([WORLD], tl.int32)
    values = zeros + value
    place = slot * WORLD
    theirs = tl.load(signals + ranks).to(tl.pointer_type(tl.int32)) + place + RANK
    write: tl.constexpr = "release" if ORDERED else "relaxed"
    tl.atomic_xchg(theirs, values, sem=write, scope="sys")
    own = tl.load(signals + RANK).to(tl.pointer_type(tl.int32)) + place + ranks
    behind = _look(own, zeros, values, ORDERED)
    looks = 0
    met = 1
    while behind < 0:
        behind = _look(own, zeros, values, ORDERED)
        looks += 1
        if looks == LIMIT:
            tl.atomic_cas(error, 0, 2)
        if looks % 64 == 0:
            if tl.atomic_add(error, 0, sem="relaxed", scope="gpu") != 0:
                behind = 0
                met = 0
    tl.debug_barrier()
    return met


@triton.jit
def _addresses(row, WORLD: tl.constexpr):
    """Loaded before a barrier, which empties the cache."""
    found = ()
    for rank in tl.static_range(WORLD):
        found = found + (tl.load(row + rank),)
    return found


@triton.jit
def _elements(address, like):
    """As ``like``, aligned to a pack."""
    return tl.multiple_of(address.to(tl.pointer_type(like.dtype.element_ty)), 16)


@triton.jit
def _sum(
    inputs,
    first,
    end,
    target,
    size,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of ``size`` elements from ``first``; inputs have ``end`` from there."""
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0) * BLOCK, size, step):
        places = start + tl.arange(0, BLOCK)
        inside = (places < size) & (places < end)
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(WORLD):
            source = _elements(inputs[rank], target) + first
            total += tl.load(source + places, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + places, total.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _void(out, numel, BLOCK: tl.constexpr):
    """A sum that was given up becomes NaN."""
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0) * BLOCK, numel, step):
        places = start + tl.arange(0, BLOCK)
        nothing = tl.full([BLOCK], float("nan"), tl.float32)
        tl.store(out + places, nothing.to(out.dtype.element_ty), mask=places < numel)


@triton.jit(do_not_specialize=["packs"])
def one_shot(
    row,
    out,
    signals,
    counts,
    error,
    packs,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Each rank reads all inputs and writes the whole sum.

    Args:
        row, signals: [WORLD] int64, addresses of each rank's.
        out: [packs * PACK].
        counts: [MOST_BLOCKS] int32, half of the barriers that each block has passed.
        error: [1] int32.
        packs: 16-byte parts, of PACK elements.
        BLOCK: Elements that a block takes at a time.
        LIMIT: Looks before a barrier gives up.
    """
    pid = tl.program_id(0)
    inputs = _addresses(row, WORLD)
    if inputs[RANK] == 0:
        tl.atomic_cas(error, 0, 1)
    else:
        count = tl.load(counts + pid)
        first = 2 * count + 1
        met = _barrier(signals, error, pid, first, RANK, WORLD, LIMIT, True)
        numel = packs * met * PACK
        _sum(inputs, 0, numel, out, numel, WORLD, BLOCK)
        if met:
            _barrier(signals, error, pid, first + 1, RANK, WORLD, LIMIT, False)
        else:
            _void(out, packs * PACK, BLOCK)
        tl.store(counts + pid, count + 1)


@triton.jit(do_not_specialize=["packs", "slice_packs"])
def two_shot(
    row,
    out,
    signals,
    counts,
    error,
    packs,
    slice_packs,
    RANK: tl.constexpr,
    WORLD: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    SIGNAL_BYTES: tl.constexpr,
):
    """Each rank sums one slice of all inputs, then reads the others'. As ``one_shot``, and:

    Args:
        slice_packs: packs / WORLD, rounded up.
        SIGNAL_BYTES: From a rank's signals to its slice.
    """
    pid = tl.program_id(0)
    inputs = _addresses(row, WORLD)
    slices = _addresses(signals, WORLD)
    if inputs[RANK] == 0:
        tl.atomic_cas(error, 0, 1)
    else:
        count = tl.load(counts + pid)
        first = 2 * count + 1
        met = _barrier(
            signals,
            error,
            pid,
            first,
            RANK,
            WORLD,
            LIMIT,
            True,
        )
        numel = packs * PACK
        size = slice_packs * met * PACK
        mine = _elements(slices[RANK] + SIGNAL_BYTES, out)
        _sum(inputs, RANK * size, numel - RANK * size, mine, size, WORLD, BLOCK)
        if met:
            size = size * _barrier(
                signals,
                error,
                pid,
                first + 1,
                RANK,
                WORLD,
                LIMIT,
                True,
            )
        for start in range(pid * BLOCK, size, tl.num_programs(0) * BLOCK):
            places = start + tl.arange(0, BLOCK)
            for rank in tl.static_range(WORLD):
                inside = (places < size) & (places < numel - rank * size)
                part = _elements(slices[rank] + SIGNAL_BYTES, out)
                values = tl.load(part + places, mask=inside)
                tl.store(out + rank * size + places, values, mask=inside)
        if size == 0:
            _void(out, numel, BLOCK)
        tl.store(counts + pid, count + 1)
