"""The answers of ``torch.cuda.is_current_stream_capturing()`` to packages that ask.

Note [Hidden captures]
    Inside a capture some libraries leave out a shortcut that might read the host. So transformers
    builds attention masks that mask nothing, and attention takes slower kernels. Captures are
    therefore hidden, in their thread, from the packages in ``compilation.hide_capture_from``, if
    the look saw no host sync. After a host sync these packages see a second look and warm-ups as
    captures, too, so that warm-ups run the graph's code. A tape that records is a capture. Dynamo
    traces True while a block is open.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch

from cgplan.backends.replacing import replaced, shared

Answer = Callable[[str], bool]
ALL_OTHERS = ""  # in place of a package


class _Answers(threading.local):
    by_package: Mapping[str, Answer] = {}


_answers = _Answers()


@shared
@contextmanager
def _answering_by_package() -> Iterator[None]:
    own_answer = torch.cuda.is_current_stream_capturing

    def is_capturing() -> bool:
        # Dynamo cannot trace the rest
        if torch.compiler.is_compiling():
            return True
        package = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        answers = _answers.by_package
        answer = answers.get(package) or answers.get(ALL_OTHERS)
        if answer is None:
            return own_answer()
        return answer(package)

    with replaced(torch.cuda, is_current_stream_capturing=is_capturing):
        yield


@contextmanager
def answering(packages: Collection[str], answer: Answer) -> Iterator[None]:
    """A block in which code of these top-level packages, in this thread, gets
    ``answer(package)``.
    """
    answers = dict(_answers.by_package)
    for package in packages:
        answers[package] = answer
    with _answering_by_package(), replaced(_answers, by_package=answers):
        yield
