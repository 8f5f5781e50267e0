"""Forwards that are looked at run as they were written, not as torch.compile has compiled them.

Note [Looks at compiled code]
    Dynamo does not run what it has compiled under a dispatch mode, and never does again afterwards: it marks the
    function as one to be skipped, and further keys would be captured without it. So whoever looks at operators through
    a mode tells Dynamo ahead to leave functions alone. It can be told so for the whole process only, and a capture in
    another thread must not meet functions that are left alone. So looks and other threads' sessions take turns: a
    session waits for the looks that are open, and while other threads have sessions, a look tells Dynamo nothing.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LONGEST = 60.0  # seconds; a look is one forward
_turns = threading.Condition()
_sessions, _looks = Counter[int](), Counter[int]()  # that are open, by thread
_stance: Any = None


@contextmanager
def captures_here() -> Iterator[None]:
    """A block of captures in this thread; waits until no other thread looks at a forward."""
    me = threading.get_ident()
    with _turns:
        _turns.wait_for(lambda: not _looks.keys() - {me}, _LONGEST)
        _sessions[me] += 1
    try:
        yield
    finally:
        with _turns:
            _leave(_sessions, me)


@contextmanager
def as_written() -> Iterator[None]:
    """A block in which compiled functions run their own code, see Note [Looks at compiled code]."""
    me = threading.get_ident()
    with _turns:
        if not _looks and not _sessions.keys() - {me}:
            _set_stance()
        _looks[me] += 1
    try:
        yield
    finally:
        with _turns:
            _leave(_looks, me)
            if not _looks:
                _end_stance()
                _turns.notify_all()


def _leave(counts: Counter[int], thread: int) -> None:
    counts[thread] -= 1
    if not counts[thread]:
        del counts[thread]


def _set_stance() -> None:
    global _stance
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and to load it takes seconds
        return
    try:
        _stance = torch.compiler.set_stance("force_eager")
    except RuntimeError:  # in a function that Dynamo is about to trace it cannot be told
        _stance = None


def _end_stance() -> None:
    global _stance
    if _stance is not None:
        _stance.__exit__(None, None, None)
        _stance = None


__all__ = ["as_written", "captures_here"]
