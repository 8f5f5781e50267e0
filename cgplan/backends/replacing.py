"""Attributes and context variables with other values in a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
Block = Callable[[], AbstractContextManager[object]]


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """``__setattr__`` runs for classes only."""
    attributes = vars(owner)
    write = partial(setattr, owner) if isinstance(owner, type) else attributes.__setitem__
    before = dict[str, Any]()
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
