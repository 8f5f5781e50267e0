"""A model's state around forwards that nobody asked for: what captures and timed runs in service write is put back.

Note [State in service]
    A lazy capture, a replan or a recapture runs the forward on padding, between two batches of a model that serves.
    Memory that each run writes in place (a counter, a decay, running statistics) and numbers in attributes would move
    on by that, and the next batches would compute from it. So their values are saved before and copied back after.
    What the forward has bound anew stays, because a graph may have been captured with it. What the warm-ups have
    written or counted, and the capture after them has not, stays as well: it was made once, a table that is filled on
    first use, say, and neither the graph nor a later call would make it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any

import torch

from cgplan.backends import GraphBackend
from cgplan.graphs.rebound import StateSnapshot

LARGEST = 1 << 20  # bytes of a tensor that is saved; what is larger is a KV cache, into which padding writes nothing
_NUMBERS = frozenset({int, float, complex})
_CURRENT: ContextVar[KeptState | None] = ContextVar("cgplan_state_kept", default=None)
Look = dict[Any, Any]


class KeptState:
    """Values of a model's small tensors and of its numbers, as they are now; see Note [State in service].

    It holds the tensors, and copies of them on their device, or on the host where that has no memory left.

    Args:
        model: A module, or any object with attributes.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._snapshot = model, StateSnapshot(model)
        tensors = {id(tensor): tensor for tensor in self._snapshot.tensors() if _is_small(tensor)}
        self._saved = [(tensor, _copy_of(tensor)) for tensor in tensors.values()]
        self._warmed: set[Any] = set()
        self._captured: set[Any] = set()

    def look(self) -> Look:
        """The state's version now: how often tensors were written to, and the numbers that have changed."""
        found: Look = {
            index: -1 if tensor.is_inference() else tensor._version for index, (tensor, _) in enumerate(self._saved)
        }
        numbers = (place for place in self._snapshot.changed().values() if self._is_number(place))
        return found | {place: self._snapshot.value(place) for place in numbers}

    @contextmanager
    def noting_capture(self, cold: Look) -> Iterator[None]:
        """A block that captures. What changed since ``cold`` was changed by warm-ups, what changes in it by both."""
        warm = self.look()
        self._warmed |= _differing(cold, warm)
        try:
            yield
        finally:
            self._captured |= _differing(warm, self.look())

    def put_back(self) -> None:
        """Copy back what was saved and is still there."""
        once = self._warmed - self._captured
        there = {id(tensor) for tensor in StateSnapshot(self._model).tensors()}
        for index, (tensor, copy) in enumerate(self._saved):
            alike = (tensor.shape, tensor.dtype) == (copy.shape, copy.dtype) and _is_small(tensor)
            if alike and id(tensor) in there and index not in once:
                _write(tensor, copy)
        changed = self._snapshot.changed().values()
        self._snapshot.put_back([place for place in changed if self._is_number(place) and place not in once])

    def _is_number(self, place: Any) -> bool:
        return type(self._snapshot.before(place)) in _NUMBERS and type(self._snapshot.value(place)) in _NUMBERS


@contextmanager
def state_kept(model: Any, backend: GraphBackend) -> Iterator[None]:
    """A block that runs forwards, on streams of its own say, and leaves the values of a model's state as they were.

    Args:
        model: Whose state; None for a function, which has none.
        backend: Its device is idle when values are saved, when they are copied back, and afterwards.
    """
    if model is None:
        yield
        return
    backend.synchronize()
    kept = KeptState(model)
    token = _CURRENT.set(kept)
    try:
        backend.synchronize()
        yield
    except BaseException:
        with suppress(RuntimeError):  # a device that is lost says so by the error that is under way
            _put_back(kept, backend)
        raise
    else:
        _put_back(kept, backend)
    finally:
        _CURRENT.reset(token)


def _put_back(kept: KeptState, backend: GraphBackend) -> None:
    backend.synchronize()
    kept.put_back()
    backend.synchronize()  # the next batch may come on another stream


def look_at_state() -> Look:
    """The versions of what the block around keeps; empty where no runner is in service."""
    kept = _CURRENT.get()
    return {} if kept is None else kept.look()


@contextmanager
def capture_noted(cold: Look) -> Iterator[None]:
    """A block that captures a key, for what the block around keeps; ``cold``: a look before its warm-ups."""
    kept = _CURRENT.get()
    with nullcontext() if kept is None else kept.noting_capture(cold):
        yield


def _differing(before: Look, after: Look) -> set[Any]:
    """Keys of which one look has another value, or none."""
    missing = object()
    return {key for key in {**before, **after} if before.get(key, missing) != after.get(key, missing)}


def _is_small(tensor: torch.Tensor) -> bool:
    """Whether it is an ordinary tensor of at most LARGEST bytes, with memory of its own that can be written to."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.device.type == "meta":
        return False
    if not isinstance(tensor, torch.nn.Parameter) and type(tensor) is not torch.Tensor:
        return False
    if not 0 < tensor.nbytes <= LARGEST or tensor.is_conj() or tensor.is_neg():
        return False
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return False
    storage = tensor.untyped_storage()
    # On a GPU memory of others: an output of the runner, which may be gone with its pool.
    return storage.nbytes() > 0 and (storage.resizable() or not tensor.is_cuda)


@torch.no_grad()
def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return tensor.detach().clone()
    except torch.OutOfMemoryError:
        return tensor.detach().cpu()


def _write(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    """Copy back, unless nothing was written: weights may lie in memory that cannot be, and autograd counts writes."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        if not torch.equal(_bytes(tensor).to(copy.device), _bytes(copy)):
            tensor.copy_(copy)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes in order: NaN is equal to itself, and some dtypes cannot be compared."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


__all__ = ["LARGEST", "KeptState", "capture_noted", "look_at_state", "state_kept"]
