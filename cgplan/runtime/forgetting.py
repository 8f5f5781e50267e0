"""What Dynamo keeps of a traced model, dropped with it."""

from __future__ import annotations

from contextlib import suppress
from types import CodeType

import torch

from cgplan.runtime.piecewise import PiecewiseBackend

_dropped: list[tuple[CodeType, PiecewiseBackend]] = []  # that are still to be forgotten


def forget_trace(code: CodeType, backend: PiecewiseBackend) -> None:
    """Drop what Dynamo keeps of a function: its cache holds the graphs' wrappers, where no collector sees them.

    It may be called again.
    """
    torch._C._dynamo.eval_frame.reset_code(code)
    backends = torch._dynamo.eval_frame.cached_backends
    for key, found in backends.copy().items():  # a copy: other threads compile meanwhile
        if found is backend or getattr(found, "compiler_fn", None) is backend:  # what torch.compile puts around it
            backends.pop(key, None)
    backend.compiled.clear()


def forget_dropped(code: CodeType, backend: PiecewiseBackend) -> None:
    """The same for a model that is gone, wherever that was found. In the middle of a capture, which freed graphs would
    make invalid on a GPU, it is put off until the next model is made or goes.
    """
    _dropped.append((code, backend))
    if not backend.backend.is_capturing():
        forget_put_off()


def forget_put_off() -> None:
    """Forget the models that went in the middle of a capture; outside of one."""
    with suppress(IndexError):  # another thread took the last one
        while _dropped:
            forget_trace(*_dropped.pop())


__all__ = ["forget_dropped", "forget_put_off", "forget_trace"]
