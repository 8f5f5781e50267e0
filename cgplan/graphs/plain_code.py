"""Forwards that are looked at run as they were written, not as torch.compile has compiled them."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from cgplan.graphs.shared_block import SharedBlock


def _leave_compiled_code() -> Callable[[], None]:
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and to load it takes seconds
        return lambda: None
    try:
        stance = torch.compiler.set_stance("force_eager")
    except RuntimeError:  # in a function that Dynamo is about to trace it cannot be told
        return lambda: None
    return lambda: stance.__exit__(None, None, None)


as_written = SharedBlock(_leave_compiled_code)
"""A block in which compiled functions run their own code; a block inside a block is part of it.

Dynamo does not run what it has compiled under a dispatch mode, and it never does again afterwards: it marks the
function as one to be skipped. So whoever looks at operators through a mode tells it ahead to leave the function alone.
The stance is the process's: other threads run their functions as they were written meanwhile, too.
"""
