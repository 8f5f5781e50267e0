"""Garbage collection held still while graphs are captured."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_quiet() -> Iterator[None]:
    """Collect once, then hold the collector still for the block.

    A collection may free a CUDA tensor or run a destructor in the middle of a capture, and costs tens of
    milliseconds on a large heap; torch.cuda.graph runs one for every graph. Objects that the caller froze stay frozen.
    """
    if not gc.isenabled() and gc.get_freeze_count() > 0:  # held still already, by an outer session
        yield
        return
    gc.collect()
    enabled, frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()
