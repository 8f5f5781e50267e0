"""What code is told that asks ``torch.cuda.is_current_stream_capturing()``.

Note [Who is told of a capture]
    Some libraries leave out a shortcut inside a capture, because it might read a value on the host:
    transformers then builds attention masks that mask nothing, and attention with a mask takes
    slower kernels. A graph may hold a shortcut that does not read the host. So packages in
    ``compilation.hide_capture_from`` are told that no capture is under way, in the thread that
    captures, if the look ahead of it saw no host sync. If it saw one, they are told the truth in
    captures, in a second look and in warm-ups, which then run what the graph will hold. All other
    packages are told the truth, but for what Dynamo traces while a block is open. A tape that
    records counts as a capture.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch

from cgplan.backends.replacing import replaced, shared

ALL_OTHERS = ""  # in place of a package


class _Answers(threading.local):
    def __init__(self) -> None:
        self.by_package: Mapping[str, Callable[[str], bool]] = {}


_answers = _Answers()


@shared
@contextmanager
def _answering_by_package() -> Iterator[None]:
    own_answer = torch.cuda.is_current_stream_capturing

    def answer() -> bool:
        # Dynamo cannot trace what follows; a capture will run the trace
        if torch.compiler.is_compiling():
            return True
        package = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        found = _answers.by_package.get(package) or _answers.by_package.get(ALL_OTHERS)
        return own_answer() if found is None else found(package)

    with replaced(torch.cuda, is_current_stream_capturing=answer):
        yield


@contextmanager
def answering(packages: Collection[str], answer: Callable[[str], bool]) -> Iterator[None]:
    """A block in which code of these packages that asks in this thread is told ``answer(package)``;
    see Note [Who is told of a capture]. Packages go by the top-level name of the module that asks.
    Blocks may be nested.
    """
    before = _answers.by_package
    with (
        _answering_by_package(),
        replaced(_answers, by_package={**before, **dict.fromkeys(packages, answer)}),
    ):
        yield
