"""Garbage collection held still while graphs are captured."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_blocks = 0  # that are open now; sessions stand inside each other, and in several threads
_was_enabled = True
_lock = threading.Lock()


@contextmanager
def collector_quiet() -> Iterator[None]:
    """Collect once, then hold the collector still for the block; a block inside a block is part of it.

    A collection may free a CUDA tensor or run a destructor in the middle of a capture, and costs tens of
    milliseconds on a large heap; torch.cuda.graph runs one for every graph. Nothing is frozen: with the collector off
    that gains nothing, and from Python 3.12 on nobody can tell what the caller froze from what is frozen anyway.
    """
    global _blocks, _was_enabled
    if _blocks == 0:
        gc.collect()  # outside of the lock: destructors that it runs may open a block, or wait for a thread that does
    with _lock:
        if _blocks == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0 and _was_enabled:
                gc.enable()
