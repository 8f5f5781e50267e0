"""Garbage collection held still while graphs are captured."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class NestedBlocks:
    """Blocks that stand inside each other, and in several threads: the first begins something, the last ends it."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end
        self._lock = threading.Lock()
        self._count = 0

    @property
    def any_open(self) -> bool:
        """Whether what begins has begun."""
        return self._count > 0

    @contextmanager
    def another(self) -> Iterator[None]:
        """One more block."""
        with self._lock:
            if self._count == 0:
                self._begin()
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if self._count == 0:
                    self._end()


_was_enabled = True


def _hold() -> None:
    global _was_enabled
    _was_enabled = gc.isenabled()
    gc.disable()


def _let_go() -> None:
    if _was_enabled:
        gc.enable()


_held = NestedBlocks(_hold, _let_go)


@contextmanager
def collector_quiet() -> Iterator[None]:
    """Collect once, then hold the collector still for the block; a block inside a block is part of it.

    A collection may free a CUDA tensor or run a destructor in the middle of a capture, and costs tens of
    milliseconds on a large heap; torch.cuda.graph runs one for every graph. Nothing is frozen: with the collector off
    that gains nothing, and from Python 3.12 on nobody can tell what the caller froze from what is frozen anyway.
    """
    if not _held.any_open:
        gc.collect()  # outside of the lock: destructors that it runs may open a block, or wait for a thread that does
    with _held.another():
        yield


__all__ = ["NestedBlocks", "collector_quiet"]
