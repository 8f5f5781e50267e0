"""Workspaces of cuBLAS that outlive every graph that was captured with them.

Note [Workspaces]
    torch allocates a cuBLAS workspace at the first matrix product of a thread on a stream, and
    graphs hold its address. Two things can go wrong: (1) without a warm-up it lies in the pool of
    the first graph, on which later ones rely; (2) from torch 2.12 on, freeing a graph drops the
    workspaces of its stream (pytorch issue 193402), which other graphs use.

    So a session begins with a small product, whose workspace goes into a pool for the life of the
    process. When torch drops the workspace, the next session finds it there at the same address. A
    workspace takes tens of megabytes and belongs to one stream, so the stream of an owner that is
    gone is lent again.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from typing import Any

import torch

_owners = weakref.WeakKeyDictionary[Any, torch.cuda.Stream]()
_lent: list[torch.cuda.Stream] = []


@cache
def _pool(index: int) -> torch.cuda.MemPool:
    with torch.cuda.device(index):
        pool = torch.cuda.MemPool()
    # freeing it after a failed capture of other code would abort the process at its exit
    held = ctypes.py_object(pool)
    ctypes.pythonapi.Py_IncRef(held)
    return pool


def workspace_pool(device: torch.device) -> Any:
    """The number of the pool of a device's workspaces."""
    return _pool(device.index).id


@cache
def _operands(device: int) -> tuple[torch.Tensor, ...]:
    default = torch.cuda.stream(torch.cuda.default_stream(device))
    with torch.inference_mode(False), default:
        matrix = torch.zeros(16, 16, device=f"cuda:{device}")
        result = torch.zeros_like(matrix)
    return matrix, result


def own_stream(owner: object) -> torch.cuda.Stream:
    """A stream of the current device for captures during the life of ``owner``."""
    index = torch.cuda.current_device()
    taken = set()
    for stream in list(_owners.values()):
        taken.add(stream.cuda_stream)
    for stream in _lent:
        is_here = stream.device.index == index
        if is_here and stream.cuda_stream not in taken:
            break
    else:
        for _ in range(32):  # torch hands out as many in turn
            stream = torch.cuda.Stream()
            if stream.cuda_stream not in taken:
                break
        _lent.append(stream)
    _owners[owner] = stream
    return stream


@torch.no_grad()
def keep_workspaces(device: torch.device) -> None:
    """Have torch put the current stream's workspaces into their pool."""
    if torch.cuda.is_current_stream_capturing():
        return
    matrix, result = _operands(device.index)
    pool = _pool(device.index)
    no_autocast = torch.autocast("cuda", enabled=False)
    in_pool = torch.cuda.use_mem_pool(pool, device=device.index)
    with no_autocast, in_pool:
        torch.mm(matrix, matrix, out=result)
        torch.addmm(  # through cuBLASLt
            matrix[0],
            matrix,
            matrix,
            out=result,
        )
