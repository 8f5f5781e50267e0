"""Attributes of torch, of Python and of models that are others inside a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

Block = Callable[[], AbstractContextManager[object]]


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """A block, or a decorator, in which these attributes of an object are others, or are there at
    all. What the object inherits it inherits again afterwards. Of an object that is no class, no
    ``__setattr__`` runs.
    """
    own = vars(owner)
    write = partial(setattr, owner) if isinstance(owner, type) else own.__setitem__
    before = {name: own[name] for name in values if name in own}
    for name, value in values.items():
        write(name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                write(name, before[name])
            else:
                delattr(owner, name)


def shared(block: Block) -> Block:
    """The block, open as long as any thread is inside: the first opens it, the last closes it. It
    may be nested.
    """
    lock, opened, inside = threading.Lock(), ExitStack(), 0

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
