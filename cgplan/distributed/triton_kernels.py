"""Triton kernels of the custom all-reduce: one-shot and two-shot, over a row of the registry's
pointer table.

Note [Signals]
    Each rank has signals that its peers can write: [MOST_BLOCKS, WORLD] int32. In a barrier, block
    b of each rank writes a value to place (b, its rank) of every rank's signals, and waits until
    all places (b, *) of its own are as high. The value comes from a count in device memory that the
    kernel itself raises, so a replayed graph needs nothing from the host; counts wrap around, and
    are compared by their difference. All ranks launch the same kernels in the same order with the
    same number of blocks, so the counts of block b are equal everywhere. Blocks wait for no other
    block of their own rank.

    Writes are system-scope atomics that release what the block wrote before, waits are system-scope
    atomics that acquire; `debug_barrier` makes the one hold for, and the other wait for, all
    threads of the block. The last barrier of the one-shot kernel publishes nothing: its reads are
    over, as what was made of them is stored. It is not ORDERED, which spares a fence over the whole
    system.

    A kernel has two barriers. One-shot: before the first read all inputs are written; after the
    last one no rank reads my input any more, so that what follows may overwrite it. Two-shot: as
    before; then after the slices are reduced, which also says that no rank reads my input any more.
    The slices lie behind the signals, and are not written again before the first barrier of the
    next kernel, at which all blocks of this kernel have ended everywhere.

    The error word is 0 while all is well. A host that learns that a rank failed writes it, which
    ends all waits; so does a wait of LIMIT looks. Sums since then are NaN, and the host finds out
    why when it reads the word (`CudaAllReduce.check`). The kernel reads it by atomics, of which one
    thread hands the result to the whole block: threads that saw different values would part ways in
    the loop.
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
    """How far the rank that is farthest behind is behind; 0 or more once all have come."""
    if ORDERED:
        seen = tl.atomic_add(own, zeros, sem="acquire", scope="sys")
    else:
        seen = tl.atomic_add(own, zeros, sem="relaxed", scope="sys")
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
    """Block ``slot`` of all ranks meets: each writes ``value`` to all, and waits for it from all.

    Returns 1, or 0 if it has left without the others: their memory may be gone then, and must not
    be touched.
    """
    tl.debug_barrier()
    ranks = tl.arange(0, WORLD)
    values = tl.zeros([WORLD], tl.int32) + value
    place = slot * WORLD
    theirs = tl.load(signals + ranks).to(tl.pointer_type(tl.int32)) + place + RANK
    if ORDERED:
        tl.atomic_xchg(theirs, values, sem="release", scope="sys")
    else:
        tl.atomic_xchg(theirs, values, sem="relaxed", scope="sys")
    own = tl.load(signals + RANK).to(tl.pointer_type(tl.int32)) + place + ranks
    zeros = tl.zeros([WORLD], tl.int32)
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
    """The row's addresses, which are loaded before a barrier: they do not change, and a barrier
    empties the cache.
    """
    found = ()
    for rank in tl.static_range(WORLD):
        address = tl.load(row + rank)
        found = found + (address,)
    return found


@triton.jit
def _void(out, numel, BLOCK: tl.constexpr):
    """Write NaN: a sum that was given up must not be taken for one."""
    first = tl.program_id(0) * BLOCK
    step = tl.num_programs(0) * BLOCK
    for start in range(first, numel, step):
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
    """Every rank reads all inputs and writes the whole sum.

    Args:
        row: [WORLD] int64, address of each rank's input.
        out: [packs * PACK], the sum.
        signals: [WORLD] int64, address of each rank's signals.
        counts: [MOST_BLOCKS] int32, barriers that each block has passed, divided by 2.
        error: [1] int32, the error word.
        packs: 16-byte parts of a message; PACK elements are one.
        BLOCK: Elements that a block takes at a time.
        LIMIT: Looks at the signals before a barrier gives up.
    """
    pid = tl.program_id(0)
    inputs = _addresses(row, WORLD)
    if inputs[RANK] == 0:
        tl.atomic_cas(error, 0, 1)
    else:
        count = tl.load(counts + pid)
        met = _barrier(
            signals,
            error,
            pid,
            2 * count + 1,
            RANK,
            WORLD,
            LIMIT,
            True,
        )
        numel = packs * met * PACK
        for start in range(pid * BLOCK, numel, tl.num_programs(0) * BLOCK):
            places = start + tl.arange(0, BLOCK)
            inside = places < numel
            total = tl.zeros([BLOCK], tl.float32)
            for rank in tl.static_range(WORLD):
                source = inputs[rank].to(tl.pointer_type(out.dtype.element_ty))
                source = tl.multiple_of(source, 16)
                total += tl.load(source + places, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + places, total.to(out.dtype.element_ty), mask=inside)
        if met:
            _barrier(
                signals,
                error,
                pid,
                2 * count + 2,
                RANK,
                WORLD,
                LIMIT,
                False,
            )
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
    """Every rank sums one slice of all inputs, then reads the others' slices.

    Args:
        slice_packs: Packs of a slice: packs / WORLD, rounded up.
        SIGNAL_BYTES: From a rank's signals to its slice.

    The other arguments are those of ``one_shot``.
    """
    pid = tl.program_id(0)
    inputs = _addresses(row, WORLD)
    slices = _addresses(signals, WORLD)
    if inputs[RANK] == 0:
        tl.atomic_cas(error, 0, 1)
    else:
        count = tl.load(counts + pid)
        met = _barrier(
            signals,
            error,
            pid,
            2 * count + 1,
            RANK,
            WORLD,
            LIMIT,
            True,
        )
        numel = packs * PACK
        size = slice_packs * met * PACK
        mine = (slices[RANK] + SIGNAL_BYTES).to(tl.pointer_type(out.dtype.element_ty))
        mine = tl.multiple_of(mine, 16)
        for start in range(pid * BLOCK, size, tl.num_programs(0) * BLOCK):
            places = start + tl.arange(0, BLOCK)
            inside = (places < size) & (places < numel - RANK * size)
            total = tl.zeros([BLOCK], tl.float32)
            for rank in tl.static_range(WORLD):
                source = inputs[rank].to(tl.pointer_type(out.dtype.element_ty))
                source = tl.multiple_of(source, 16) + RANK * size
                total += tl.load(source + places, mask=inside, other=0.0).to(tl.float32)
            tl.store(mine + places, total.to(out.dtype.element_ty), mask=inside)
        if met:
            size = size * _barrier(
                signals,
                error,
                pid,
                2 * count + 2,
                RANK,
                WORLD,
                LIMIT,
                True,
            )
        for start in range(pid * BLOCK, size, tl.num_programs(0) * BLOCK):
            places = start + tl.arange(0, BLOCK)
            for rank in tl.static_range(WORLD):
                inside = (places < size) & (places < numel - rank * size)
                part = (slices[rank] + SIGNAL_BYTES).to(tl.pointer_type(out.dtype.element_ty))
                part = tl.multiple_of(part, 16)
                values = tl.load(part + places, mask=inside)
                tl.store(out + rank * size + places, values, mask=inside)
        if size == 0:
            _void(out, numel, BLOCK)
        tl.store(counts + pid, count + 1)
