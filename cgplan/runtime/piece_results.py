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


class Block:
    """The one memory of several fresh results: where the first of them lay when it was last returned."""

    def __init__(self) -> None:
        self.place = (0, 0)  # address of the storage, and bytes from there
        self._begin: int | None = None

    def part(self, slot: Slot, result: torch.Tensor) -> Shared:
        """The next of the results, as it was returned at capture."""
        begin, is_first = _begin_of(result), self._begin is None
        if self._begin is None:
            self._begin = begin
        return Shared(slot, self, is_first, begin - self._begin, _layout_of(result))


class Shared(NamedTuple):
    """A fresh result that is a view of one memory with others: their slots are views of one block, so that it is copied
    only if it lies to the others as at capture.
    """

    slot: Slot
    block: Block
    is_first: bool
    distance: int  # from the first, in bytes
    layout: tuple[Any, ...]

    def accept(self, value: Any) -> bool:
        """As Slot's, once those before it in the block were asked."""
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.shape != self.slot.shape:
            return False
        place = value.untyped_storage().data_ptr(), _begin_of(value) - self.distance
        if self.is_first:
            self.block.place = place
        return place == self.block.place and _layout_of(value) == self.layout and self.slot.accept(value)

    def describe(self) -> str:
        """In words."""
        return f"{self.slot.describe()}, in one memory with another result"

    def found(self, value: Any) -> str:
        """A value that it does not accept, in words."""
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (self.slot.shape, self.slot.dtype):
            return described(value)
        return f"{described(value)}, which does not share memory with other results as it did,"


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


def _begin_of(tensor: torch.Tensor) -> int:
    """Where the tensor begins in its storage, in bytes."""
    return int(tensor.storage_offset() * tensor.itemsize)


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How the tensor reads its memory, but for where it begins; of a dimension of one element the stride is any."""
    strides = [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return (*strides, tensor.is_conj(), tensor.is_neg())


def described(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, torch.Tensor):
        layout = "" if value.layout is torch.strided else f" {value.layout}"
        return f"a{layout} tensor of shape {list(value.shape)}, {value.dtype}, on {value.device}"
    return f"{value!r:.200}"


__all__ = ["Block", "Frozen", "Given", "Shared", "Slot", "described"]
