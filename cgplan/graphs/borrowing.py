"""CUDA memory without its owner: tensors that do not hold the block that they lie in."""

from __future__ import annotations

from functools import cache

import torch


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory whose storage does not own it."""
    storage = tensor.untyped_storage()
    unowned = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    same = empty.set_(unowned, tensor.storage_offset(), tensor.size(), tensor.stride())
    same = same.conj() if tensor.is_conj() else same
    return torch._neg_view(same) if tensor.is_neg() else same


@cache
def can_borrow(device: torch.device) -> bool:
    """Whether this torch makes tensors on memory that they do not own; tried once, on a small tensor."""
    probe = torch.arange(4, device=device)
    try:
        same = unowned(probe[1:])
        return same.data_ptr() == probe[1:].data_ptr() and same.tolist() == [1, 2, 3]
    except (AttributeError, RuntimeError, TypeError):
        return False
