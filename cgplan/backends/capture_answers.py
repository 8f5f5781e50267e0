"""Answers of ``torch.cuda.is_current_stream_capturing()`` by package.

docs/concepts.md, Code that asks whether a capture is under way, says why.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch

from cgplan.backends.replacing import replaced, shared

Answer = Callable[[str], bool]
ALL_OTHERS = ""


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
    """A block in which these top-level packages get ``answer(package)``, in this thread."""
    answers = dict(_answers.by_package)
    for package in packages:
        answers[package] = answer
    with _answering_by_package(), replaced(_answers, by_package=answers):
        yield
