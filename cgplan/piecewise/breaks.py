"""Functions that break a capture: ``eager_break_during_capture``, and whether a model calls any."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from cgplan.backends.host_sync import current_onlooker, looking_alone
from cgplan.errors import CgplanError
from cgplan.piecewise.breakable import name_of, recording_capture

P = ParamSpec("P")
R = TypeVar("R")


class _Watch(threading.local):
    """Whether a decorated function has been called; None while nobody wants to know."""

    seen: bool | None = None


_watch = _Watch()
_decorated = False  # whether there is any


def eager_break_during_capture(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function or method an eager piece of whatever breakable capture it is called in.

    Outside of a breakable capture, in a FULL capture, and inside another eager piece, the function runs as it is.
    Code that torch.compile traces, PIECEWISE segments by operators among it, takes it in as it is, too. See
    BreakableCUDAGraphCapture.add_eager for what it may return.

    Raises CgplanError for what cannot be called.
    """
    global _decorated
    if not callable(function):
        raise CgplanError(
            f"eager_break_during_capture was given {function!r:.100}, which cannot be called",
            remedy="Put it on a function or method, without arguments.",
        )
    _decorated = True
    broken = broken_out(function, name_of(function))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():  # whatever follows could not be traced
            return function(*args, **kwargs)
        if _watch.seen is not None:
            _watch.seen = True
        return broken(*args, **kwargs)

    return call


def broken_out(function: Callable[P, R], name: str) -> Callable[P, R]:
    """The same as ``eager_break_during_capture``, under a name for messages, and unnoticed by ``calls_breaks``."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        capture = recording_capture()
        if capture is None:
            if (onlooker := current_onlooker()) is not None:  # it looks at segments; here the host may be needed
                return onlooker.run_aside(function, args, kwargs)  # type: ignore[no-any-return]
            return function(*args, **kwargs)
        return capture.add_named(name, function, args, kwargs)  # type: ignore[no-any-return]

    return call


def calls_breaks(forward: Callable[[], object]) -> bool:
    """Whether a forward calls functions under ``eager_break_during_capture``: it is run to see, if there are any.

    A forward that fails is taken to call none: its caller will meet the failure again.
    """
    if not _decorated:
        return False
    _watch.seen = False
    try:
        with looking_alone():  # other ranks may have no such function, and do not run their forward then
            forward()
    except Exception:
        return False
    else:
        return _watch.seen
    finally:
        _watch.seen = None


__all__ = ["broken_out", "calls_breaks", "eager_break_during_capture"]
