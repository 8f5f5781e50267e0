"""Functions that break a capture: ``eager_break_during_capture``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from cgplan.errors import CgplanError
from cgplan.graphs.footprint import current_look
from cgplan.piecewise.breakable import name_of, recording_capture

P = ParamSpec("P")
R = TypeVar("R")


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
        if (look := current_look()) is not None:
            look.found.breaks = True
        return broken(*args, **kwargs)

    return call


def broken_out(function: Callable[P, R], name: str, *, is_traced: bool = False) -> Callable[P, R]:
    """The same as ``eager_break_during_capture``, under a name for messages, and unnoticed by a look.

    ``is_traced``: the function is operators of a trace.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        capture = recording_capture()
        if capture is None:
            if (look := current_look()) is not None:  # it looks at segments; here the host may be needed
                return look.run_aside(function, args, kwargs)  # type: ignore[no-any-return]
            return function(*args, **kwargs)
        return capture.add_named(name, function, args, kwargs, is_traced=is_traced)  # type: ignore[no-any-return]

    return call


def any_breaks() -> bool:
    """Whether there is any function under ``eager_break_during_capture``."""
    return _decorated


__all__ = ["any_breaks", "broken_out", "eager_break_during_capture"]
