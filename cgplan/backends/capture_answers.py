"""What code is told that asks ``torch.cuda.is_current_stream_capturing()``.

Note [Who is told of a capture]
    Some libraries leave out a shortcut inside a capture, because it might read a value on the host: transformers then
    builds attention masks that mask nothing, and attention with a mask takes slower kernels. A graph may hold a
    shortcut that does not read the host. So packages in ``compilation.hide_capture_from`` are told that no capture is
    under way, in the thread that captures, if the look ahead of it saw no host sync. If it saw one, they are told the
    truth in captures, in a second look and in warm-ups, which then run what the graph will hold. All other packages are
    told the truth, but for what Dynamo traces while a block is open. A tape that records counts as a capture.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch

ALL_OTHERS = ""  # in place of a package


class _Thread(threading.local):
    def __init__(self) -> None:
        self.answers: Mapping[str, Callable[[str], bool]] = {}  # by package


_thread, _lock, _blocks = _Thread(), threading.Lock(), 0
_own_answer = torch.cuda.is_current_stream_capturing


def _answer() -> bool:
    if torch.compiler.is_compiling():  # Dynamo cannot trace what follows; a capture will run the trace
        return True
    package = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
    answer = _thread.answers.get(package) or _thread.answers.get(ALL_OTHERS)
    return _own_answer() if answer is None else answer(package)


@contextmanager
def answering(packages: Collection[str], answer: Callable[[str], bool]) -> Iterator[None]:
    """A block in which code of these packages that asks in this thread is told ``answer(package)``; see Note [Who is
    told of a capture]. Packages go by the top-level name of the module that asks. Blocks may be nested.
    """
    global _blocks, _own_answer
    with _lock:
        if not _blocks:
            _own_answer, torch.cuda.is_current_stream_capturing = torch.cuda.is_current_stream_capturing, _answer
        _blocks += 1
    before = _thread.answers
    _thread.answers = {**before, **dict.fromkeys(packages, answer)}
    try:
        yield
    finally:
        _thread.answers = before
        with _lock:
            _blocks -= 1
            if not _blocks:
                torch.cuda.is_current_stream_capturing = _own_answer


__all__ = ["ALL_OTHERS", "answering"]
