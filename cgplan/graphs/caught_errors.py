"""Errors of a capture that the forward itself catches.

Note [Caught errors]
    What CUDA refuses makes a capture invalid, whatever the forward does with the error. What torch refuses before CUDA
    is asked (a copy to host memory that is not pinned, a look at the seed) does not: a forward that catches it goes on,
    and the graph silently lacks the rest of the block. From Python 3.12 on an interpreter tells of each error that is
    raised, and code that raises none is no slower for it. With Python 3.11 such errors are not seen.
"""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager
from types import CodeType

import torch

from cgplan.backends.host_sync import blamed_line
from cgplan.backends.quiet import NestedBlocks
from cgplan.errors import CaptureError

_TORCH_REFUSES = "CUDA graph capture"  # in all such texts
_NAME = "cgplan"
_tool: int | None = None


class _Noted(threading.local):
    error: str | None = None


_noted = _Noted()


def forget_caught() -> None:
    """A capture begins in this thread: what others raised is not its matter."""
    _noted.error = None


def refuse_caught() -> None:
    """Raise CaptureError if an error was raised, and so caught, since this thread's capture began."""
    error, _noted.error = _noted.error, None
    if error is not None:
        raise CaptureError(
            f"the forward catches an error of the capture and goes on without the rest of that block, at {error}",
            remedy="Keep what fails out of the graph, or test torch.cuda.is_current_stream_capturing() before it.",
        )


def _note(_code: CodeType, _offset: int, error: BaseException) -> None:
    """What Python calls in the frame that an error is raised in, or that called what raised it."""
    if isinstance(error, RuntimeError) and _TORCH_REFUSES in str(error) and torch.cuda.is_current_stream_capturing():
        _noted.error = _noted.error or f"{blamed_line()}: {str(error).splitlines()[0]}"


def _listen() -> None:
    global _tool
    if sys.version_info >= (3, 12):
        monitoring = sys.monitoring
        # 0 to 2 and 5 are for debuggers and the like.
        _tool = next((tool for tool in (4, 3) if monitoring.get_tool(tool) is None), None)
        if _tool is not None:
            monitoring.use_tool_id(_tool, _NAME)
            monitoring.register_callback(_tool, monitoring.events.RAISE, _note)
            monitoring.set_events(_tool, monitoring.events.RAISE)


def _stop() -> None:
    global _tool
    if sys.version_info >= (3, 12) and _tool is not None:
        monitoring = sys.monitoring
        monitoring.set_events(_tool, monitoring.events.NO_EVENTS)
        monitoring.register_callback(_tool, monitoring.events.RAISE, None)
        monitoring.free_tool_id(_tool)
        _tool = None


_listening = NestedBlocks(_listen, _stop)


def errors_noted() -> AbstractContextManager[None]:
    """A block in which errors of captures are noted, caught or not; a block inside a block is part of it."""
    return _listening.another()


__all__ = ["errors_noted", "forget_caught", "refuse_caught"]
