"""Forwards that are looked at run as they were written, not as torch.compile has compiled them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

_blocks = 0  # that are open now; looks stand inside each other, and in several threads
_stance: Any = None
_lock = threading.Lock()


@contextmanager
def as_written() -> Iterator[None]:
    """A block in which compiled functions run their own code; a block inside a block is part of it.

    Dynamo does not run what it has compiled under a dispatch mode, and it never does again afterwards: it marks the
    function as one to be skipped. So whoever looks at operators through a mode tells it ahead to leave the function
    alone. The stance is the process's: other threads run their functions as they were written meanwhile, too.
    """
    global _blocks, _stance
    with _lock:
        if _blocks == 0 and "torch._dynamo" in sys.modules:  # else nothing is compiled, and to load it takes seconds
            with suppress(RuntimeError):  # inside of a function that Dynamo is about to trace it cannot be told
                _stance = torch.compiler.set_stance("force_eager")
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0 and _stance is not None:
                _stance.__exit__(None, None, None)
                _stance = None
