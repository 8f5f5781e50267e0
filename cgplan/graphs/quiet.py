"""Garbage collection held still while graphs are captured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cgplan.graphs.shared_block import SharedBlock


def _hold_still() -> Callable[[], None]:
    if not gc.isenabled():
        return lambda: None
    gc.disable()
    return gc.enable


_held_still = SharedBlock(_hold_still)


@contextmanager
def collector_quiet() -> Iterator[None]:
    """Collect once, then hold the collector still for the block; a block inside a block is part of it.

    A collection may free a CUDA tensor or run a destructor in the middle of a capture, and costs tens of
    milliseconds on a large heap; torch.cuda.graph runs one for every graph. Nothing is frozen: with the collector off
    that gains nothing, and from Python 3.12 on nobody can tell what the caller froze from what is frozen anyway.
    """
    if not _held_still.is_open:
        gc.collect()  # outside of the lock: destructors that it runs may open a block, or wait for a thread that does
    with _held_still():
        yield
