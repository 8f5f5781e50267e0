"""What an eager piece returned at capture, by kind, and whether what it returns on replay is that again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from cgplan.runtime.frozen import contents


class Slot(NamedTuple):
    """A fresh result: copied."""

    tensor: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def accept(self, value: Any) -> bool:
        """Copy ``value`` in; False if it does not fit."""
        if not isinstance(value, torch.Tensor) or value.shape != self.shape or value.dtype is not self.dtype:
            return False
        if value.device != self.device:
            return False
        self.tensor.copy_(value.detach() if value.requires_grad else value)
        return True

    def describe(self) -> str:
        """In words."""
        return described(self.tensor)


class Given(NamedTuple):
    """A result that is memory of an argument, or of the state of a module: it is there already."""

    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool

    def accept(self, value: Any) -> bool:
        """Whether ``value`` is that memory again."""
        if not isinstance(value, torch.Tensor) or value.data_ptr() != self.address:
            return False
        if value.shape != self.shape or value.stride() != self.stride or value.dtype is not self.dtype:
            return False
        return value.is_conj() == self.is_conj and value.is_neg() == self.is_neg

    def describe(self) -> str:
        """In words."""
        return (
            f"its own argument's memory, or a module's, at {self.address:#x}, {self.dtype} of shape {list(self.shape)}"
        )


class Frozen(NamedTuple):
    """A result that is no tensor: the segments were captured with it."""

    value: Any
    inside: Any  # its contents at capture; None where it cannot change

    def accept(self, value: Any) -> bool:
        """Whether ``value`` is equal, with the contents of the capture; NaN equals NaN."""
        mine = self.value
        if self.inside is not None and contents(value) != self.inside:
            return False
        try:
            return mine is value or (type(mine) is type(value) and bool(mine == value or (mine != mine != value)))
        except Exception:  # whatever a foreign class raises when it is compared
            return False

    def describe(self) -> str:
        """In words."""
        return described(self.value) + ("" if self.inside is None else " with other contents")


def described(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, torch.Tensor):
        layout = "" if value.layout is torch.strided else f" {value.layout}"
        return f"a{layout} tensor of shape {list(value.shape)}, {value.dtype}, on {value.device}"
    return f"{value!r:.200}"


__all__ = ["Frozen", "Given", "Slot", "described"]
