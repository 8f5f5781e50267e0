"""Workspaces of cuBLAS that outlive every graph that was captured with them.

Note [Workspaces]
    cuBLAS computes in a workspace that torch allocates on the first matrix product of a thread on a
    stream, and keeps by (handle, stream). Graphs are captured with its address. Two things can go
    wrong with graphs that come and go:

    1. without a warm-up, the first product stands in a capture. Then the workspace lies in that
       graph's pool, and all graphs captured later on the stream rely on a pool that is not theirs;
    2. from torch 2.12 on, freeing a graph drops the workspaces of the stream that it was captured
       on, although other graphs were captured there (pytorch issue 193402): other graphs would
       write into memory that is no longer theirs.

    So a session begins with a small product, whose workspace torch puts into a pool that nothing
    else allocates from and that lives as long as the process. When torch drops the workspace, its
    memory stays in that pool, and the next session finds it there again, at the same address.

    A workspace can be used by its own stream alone, and takes tens of megabytes. So the stream of
    an owner that is gone is lent again, before another one is taken.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from typing import Any

import torch

_owners: weakref.WeakKeyDictionary[Any, torch.cuda.Stream] = weakref.WeakKeyDictionary()
_lent: list[torch.cuda.Stream] = []
_TORCH_HAS = 32  # streams of a device, which it hands out in turn


@cache
def _pool(index: int) -> torch.cuda.MemPool:
    """The pool of a device's workspaces."""
    with torch.cuda.device(index):
        pool = torch.cuda.MemPool()
    # never freed: after a failed capture of other code, to free it aborts the process at its exit
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
    return pool


def workspace_pool(device: torch.device) -> Any:
    """The number of the pool in which a device's workspaces lie."""
    return _pool(device.index).id


@cache
def _operands(device: int) -> tuple[torch.Tensor, ...]:
    """Matrices to multiply; they lie beside other small tensors, because they stay, too."""
    stream = torch.cuda.default_stream(device)
    with torch.inference_mode(False), torch.cuda.stream(stream):
        matrix = torch.zeros(16, 16, device=f"cuda:{device}")
        vector = matrix[0]
        result = torch.zeros_like(matrix)
    return matrix, vector, result


def own_stream(owner: object) -> torch.cuda.Stream:
    """A stream of the current device for the captures of ``owner``, as long as that lives, see Note
    [Workspaces].

    One that an earlier owner had, else the next free one of torch's, so that streams made after it
    are others.
    """
    index = torch.cuda.current_device()
    taken = {stream.cuda_stream for stream in list(_owners.values())}
    for stream in _lent:
        is_here = stream.device.index == index
        if is_here and stream.cuda_stream not in taken:
            break
    else:
        for _ in range(_TORCH_HAS):
            stream = torch.cuda.Stream()
            if stream.cuda_stream not in taken:
                break
        _lent.append(stream)
    _owners[owner] = stream
    return stream


@torch.no_grad()
def keep_workspaces(device: torch.device) -> None:
    """Have the current stream's workspaces allocated where they stay, see Note [Workspaces];
    nothing in a capture.
    """
    if torch.cuda.is_current_stream_capturing():
        return
    matrix, vector, result = _operands(device.index)
    pool = _pool(device.index)
    autocast = torch.autocast("cuda", enabled=False)
    with autocast, torch.cuda.use_mem_pool(pool, device=device.index):
        torch.mm(matrix, matrix, out=result)
        torch.addmm(vector, matrix, matrix, out=result)  # the way through cuBLASLt
