"""Workspaces of cuBLAS that outlive the graphs that use them.

Note [Workspaces]
    torch allocates a workspace at a stream's first matrix product, and graphs hold its address.
    Without a warm-up it lies in the first graph's pool; from torch 2.12 on, freeing a graph drops
    it (pytorch issue 193402). So a session begins with a small product in a pool for the life of
    the process, where torch finds a dropped workspace again. It takes tens of megabytes, so streams
    are lent again.
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
    # freed after a failed foreign capture, it aborts the process at exit
    held = ctypes.py_object(pool)
    ctypes.pythonapi.Py_IncRef(held)
    return pool


def workspace_pool(device: torch.device) -> Any:
    return _pool(device.index).id


@cache
def _operands(device: int) -> tuple[torch.Tensor, ...]:
    default = torch.cuda.stream(torch.cuda.default_stream(device))
    with torch.inference_mode(False), default:
        matrix = torch.zeros(16, 16, device=f"cuda:{device}")
        result = torch.zeros_like(matrix)
    return matrix, result


def own_stream(owner: object) -> torch.cuda.Stream:
    index = torch.cuda.current_device()
    taken = set()
    for stream in list(_owners.values()):
        taken.add(stream.cuda_stream)
    for stream in _lent:
        is_here = stream.device.index == index
        if is_here and stream.cuda_stream not in taken:
            break
    else:
        for _ in range(32):
            stream = torch.cuda.Stream()
            if stream.cuda_stream not in taken:
                break
        _lent.append(stream)
    _owners[owner] = stream
    return stream


@torch.no_grad()
def keep_workspaces(device: torch.device) -> None:
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
