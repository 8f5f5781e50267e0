"""The answers of ``torch.cuda.is_current_stream_capturing()`` to packages that ask.

Note [Hidden captures]
    Some libraries leave out a shortcut inside a capture, because it might read a value on the host:
    transformers then builds attention masks that mask nothing, and attention with a mask takes
    slower kernels. A graph may hold a shortcut that does not read the host. So captures are hidden
    from the packages in ``compilation.hide_capture_from``, in the thread that captures, if the look
    ahead of the capture saw no host sync. If it saw one, these packages see captures, a second look
    and warm-ups as captures; warm-ups then run what the graph will hold. Other packages get the
    true answer, except that Dynamo traces True while a block is open. A tape that records is a
    capture.
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
    by_package: Mapping[str, Callable[[str], bool]] = {}


_answers = _Answers()


@shared
@contextmanager
def _answering_by_package() -> Iterator[None]:
    own_answer = torch.cuda.is_current_stream_capturing

    def is_capturing() -> bool:
        # Dynamo cannot trace what follows; a capture will run the trace
        if torch.compiler.is_compiling():
            return True
        package = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        answers = _answers.by_package
        answer = answers.get(package) or answers.get(ALL_OTHERS)
        return own_answer() if answer is None else answer(package)

    with replaced(torch.cuda, is_current_stream_capturing=is_capturing):
        yield


@contextmanager
def answering(packages: Collection[str], answer: Callable[[str], bool]) -> Iterator[None]:
    """A block in which code of these packages, in this thread, gets ``answer(package)``, see Note
    [Hidden captures]. A package is the top-level name of the module that asks. Blocks may be
    nested.
    """
    answers = {**_answers.by_package, **dict.fromkeys(packages, answer)}
    with _answering_by_package(), replaced(_answers, by_package=answers):
        yield
