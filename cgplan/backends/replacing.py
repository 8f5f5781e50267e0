"""What captures replace in torch and Python for a block.

docs/concepts.md, Code that asks whether a capture is under way, says why its answers differ.
"""

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Block = Callable[[], AbstractContextManager[object]]


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """``__setattr__`` runs for classes only."""
    attributes = vars(owner)
    write = partial(setattr, owner) if isinstance(owner, type) else attributes.__setitem__
    before = {}
    for name, value in values.items():
        if name in attributes:
            before[name] = attributes[name]
        write(name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                write(name, before[name])
            else:
                delattr(owner, name)


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def shared(block: Block) -> Block:
    """The first thread inside opens it, the last one closes it."""
    lock = threading.Lock()
    opened = ExitStack()
    inside = 0

    @contextmanager
    def enter() -> Iterator[None]:
        nonlocal inside
        with lock:
            if not inside:
                opened.enter_context(block())
            inside += 1
        try:
            yield
        finally:
            with lock:
                inside -= 1
                if not inside:
                    opened.close()

    return enter


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
    answers = {**_answers.by_package, **dict.fromkeys(packages, answer)}
    with _answering_by_package(), replaced(_answers, by_package=answers):
        yield
