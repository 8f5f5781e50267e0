"""What holds of the whole process while any block is open that asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SharedBlock:
    """Blocks that stand inside each other, and in several threads: the first one begins it, the last one ends it.

    Args:
        begin: Makes it so; returns what ends it.
    """

    def __init__(self, begin: Callable[[], Callable[[], object]]) -> None:
        self._begin = begin
        self._end: Callable[[], object] = lambda: None
        self._blocks = 0
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Whether any block is."""
        return self._blocks > 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """A block."""
        with self._lock:
            if self._blocks == 0:
                self._end = self._begin()
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if self._blocks == 0:
                    self._end()
