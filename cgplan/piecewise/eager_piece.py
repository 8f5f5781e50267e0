"""Eager pieces: functions that run between two segments, at capture and again on every replay.

Note [Output slots]
    A segment reads the result of an eager piece at the address that it saw at capture, and a piece
    may return a fresh tensor each time. So the model gets a slot: memory of the graph pool,
    allocated at the beginning of the segment that follows. The result is copied into its slot
    before that segment runs. Memory of the arguments stays at its address and needs no slot; nor
    does state: parameters, buffers and tensors in attributes of the modules that the piece was
    called on or with, and that it does not bind again. Segments may write to both in place. State
    that a piece reaches in another way (a global, a closure, an object that is not a module) is
    copied like any other result. Results that are views of one memory have slots that are views of
    one block: segments may write to one and read another. So has an expanded tensor, whose elements
    share memory.

Note [State that a piece leaves behind]
    The model's Python code runs at capture alone, so only memory carries values from pieces to
    segments. An attribute of a module that the piece binds to a new tensor has a slot, too, which
    the attribute holds until the capture ends; the slot follows the attribute as long as shape and
    dtype stay. A piece is refused that puts values into a list or dict that it was given, or that
    gives a tensor other memory: the segments would go on with the values of the capture. A piece
    that reads an attribute which a segment binds is refused by the look: a replay does not bind it.
    Pass such tensors as arguments.

Note [Tensor objects]
    A function of the user gets new tensor objects on the memory of the capture in each run, in new
    tuples, lists and dicts, so that it may change them (``transpose_``, ``pop``). Operators of a
    trace change no object, and get the same ones each time. ``detach()`` shares the count of
    writes, which tells the runner what a piece writes into; ``.data`` would not.

Note [Memory of pieces]
    What a piece computes and does not hand out lies where the next run will not put it. So a
    dispatch mode notes the memory that operators of pieces make, and refuses operators of segments
    that are given it. It does not see into compiled code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import is_namedtuple_instance, tree_flatten, tree_leaves, tree_unflatten

from cgplan.backends import GraphBackend
from cgplan.backends.backend import autocast_cache
from cgplan.backends.blame import blamed_line
from cgplan.backends.host_sync import (
    Args,
    Kwargs,
    Refusals,
    as_its_caller,
    is_composite,
    storages_of,
    tensors_in,
)
from cgplan.buffers.outputs import hides_tensors
from cgplan.errors import CaptureError
from cgplan.graphs.ambient import AmbientState
from cgplan.graphs.footprint import modules_reached

_LEAF, _EMPTY = tree_flatten(None)[1], tree_flatten(())[1]
_PLAIN = (Tensor, torch.nn.Parameter)  # other classes may have no memory of their own
Copies = list[tuple[Tensor, Tensor]]  # slots and values


class EagerPiece:
    """One function between two segments, with its arguments and the places of its results.

    It owns no pool memory: slots and captured arguments are borrowed.

    Args:
        name: For messages: the function's qualified name, the module's dotted name, or the
            splitting operator.
        line: Where the model called it.
        is_traced: The function is operators of a trace, called with tensors and sizes by position.

    Attributes:
        state: Torch's thread-local state at capture; ``run`` expects it.
    """

    def __init__(
        self,
        name: str,
        line: str,
        function: Callable[..., Any],
        backend: GraphBackend,
        pool: Any,
        *,
        is_traced: bool = False,
    ) -> None:
        self.name = name
        self.line = line
        self.state = AmbientState.now(backend.device.type)
        self._function, self._is_traced = function, is_traced
        self._backend, self._pool = backend, pool
        # the value at capture, and its slot
        self._bound: list[tuple[torch.nn.Module, str, Any, Tensor]] = []
        self._results: list[Copied | PassThrough | Constant] = []

    def first_run(self, args: Args, kwargs: Kwargs) -> None:
        """Run on the arguments of the capture and keep them."""
        modules = modules_reached(self._function, args, kwargs)
        before, given = _attributes(modules), _places((args, kwargs))
        self._keep_arguments(args, kwargs)
        with autocast_cache(on=True):
            result = self._function(*args, **kwargs)
        rest = iter(given)  # values may be taken out of lists and dicts
        if not all(
            any(old is new and was == at for old, was in rest)
            for new, at in _places((args, kwargs))
        ):
            raise CaptureError(
                f"eager piece {self.name} puts values into a list or dict that it was given, or "
                "gives a tensor other "
                f"memory (set_, resize_, .data = ...), at {self.line}; graphs would keep those of "
                "the capture",
                remedy="Return the values, or write them in place (copy_) into a tensor that is "
                "an argument. Keep "
                "records in an object that is not handed to the piece.",
            )
        after = _attributes(modules)
        own = {at for _, at in given} - {0}
        state = set.intersection(
            *({_address(t) for t in now.values() if type(t) in _PLAIN} for now in (before, after))
        )

        def is_fresh(leaf: Tensor) -> bool:
            address = _address(leaf)
            is_state = address in state and not self._backend.in_pool(leaf, self._pool)
            return not address or not (address in own or is_state)

        self._flat, self._spec = tree_flatten(result)
        for leaf in self._flat:
            is_tensor = isinstance(leaf, Tensor)
            if hides_tensors(leaf) or (is_tensor and not self._is_dense(leaf)):
                found = (
                    described(leaf)
                    if is_tensor
                    else f"a {type(leaf).__name__}, whose tensors cannot be reached"
                )
                raise CaptureError(
                    f"eager piece {self.name} returned {found}, at {self.line}",
                    remedy=f"Return dense tensors on {self._backend.device}, in tuples, lists, "
                    "dicts or classes that "
                    "are registered as pytree nodes; a graph does not see others change.",
                )
        self._fresh = [isinstance(leaf, Tensor) and is_fresh(leaf) for leaf in self._flat]
        self._bound = [
            (*place, value, value)
            for place, value in after.items()
            if before.get(place) is not value and type(value) is Tensor
            if is_fresh(value) and self._is_dense(value) and not _repeats(value)
        ]
        fresh = [
            t for t, is_new in zip(self._flat, self._fresh, strict=True) if is_new and _can_share(t)
        ]
        counts = Counter(map(_address, fresh))
        self._blocks = {a: _bytes(t) for t in fresh if counts[a := _address(t)] > 1 or _repeats(t)}

    def hand_out(self) -> tuple[Any, Copies]:
        """The result for the model, and the copies (slot, value) to make before the next segment
        runs.

        Called once, inside that segment's capture, see Note [Output slots].
        """
        blocks = {address: self._new_slot(memory) for address, memory in self._blocks.items()}
        handed, copies, self._shared = list(self._flat), Copies(), list[int]()
        for i, (leaf, is_fresh) in enumerate(zip(self._flat, self._fresh, strict=True)):
            if not isinstance(leaf, Tensor):
                self._results.append(Constant(leaf))
            elif not is_fresh:
                self._results.append(
                    PassThrough(leaf.data_ptr(), (leaf.shape, leaf.stride(), leaf.dtype))
                )
            else:
                block = blocks.get(_address(leaf)) if _can_share(leaf) else None
                if block is None:
                    handed[i] = self._new_slot(leaf)
                else:
                    handed[i] = _view_like(block, leaf)
                    self._shared.append(i)
                slot = self._borrowed(handed[i])
                self._results.append(Copied(slot))
                copies.append((slot, leaf.detach()))
        self._sharing = _sharing(self._flat, self._shared)
        self._only = None  # the whole result, in the common cases
        if not self._bound and not self._shared and self._spec in (_LEAF, _EMPTY):
            self._only = self._results[0] if self._results else Constant(())
        self._is_flat = self._spec.type is tuple and len(handed) == self._spec.num_children
        for i, (module, name, value, _) in enumerate(self._bound):
            slot = self._new_slot(value)
            setattr(module, name, slot)
            self._bound[i] = module, name, value, slot
            copies.append((self._borrowed(slot), value.detach()))
        del self._flat, self._fresh, self._blocks
        return tree_unflatten(handed, self._spec), copies

    def end_capture(self) -> None:
        """Give attributes that hold slots the values back that the piece has bound."""
        for i, (module, name, value, slot) in enumerate(self._bound):
            if getattr(module, name, None) is slot:
                setattr(module, name, value)
            self._bound[i] = module, name, None, self._borrowed(slot)

    def run(self) -> None:
        """Run again, in ``state``, and bring the results to their slots.

        Raises CaptureError if they are not what they were at capture; the function's own errors
        pass.
        """
        for where, key, make in self._makers:
            where[key] = make()
        result = self._function(*self._args, **self._kwargs)
        only = self._only
        if only is None or not only.fits(result):
            self._deliver(result)
        elif type(only) is Copied:
            only.slot.copy_(result.detach() if result.requires_grad else result)

    def _deliver(self, result: Any) -> None:
        values: Sequence[Any] = result
        if not (self._is_flat and type(result) is tuple and len(result) == len(self._results)):
            values, spec = tree_flatten(result)
            if spec != self._spec:
                raise self._changed(f"the structure {spec}", f"{self._spec}")
        copies = Copies()
        for place, value in zip(self._results, values, strict=True):
            if not place.fits(value):
                raise self._changed(described(value), f"{place}")
            if isinstance(place, Copied):
                copies.append((place.slot, value))
        if self._shared and _sharing(values, self._shared) != self._sharing:
            raise self._changed(
                "a tensor that does not share memory with other results as it did, or is expanded "
                "otherwise,",
                "in their memory",
            )
        for module, name, _, slot in self._bound:
            value = getattr(module, name, None)
            if isinstance(value, Tensor) and (value.shape, value.dtype) == (slot.shape, slot.dtype):
                copies.append((slot, value))
        if copies:
            fill(copies, together=not self._shared)

    def _keep_arguments(self, args: Args, kwargs: Kwargs) -> None:
        """Tensors of the pool are borrowed: later segments reuse their blocks, and each replay
        writes them before the piece reads them. Other objects are held; a list without captured
        tensors stays the same list.
        """
        inside = {id(t) for t in tensors_in((args, kwargs)) if self._backend.in_pool(t, self._pool)}

        def maker(node: Any) -> Callable[[], Any] | None:
            """Makes the argument for each run; None if it is the same object each time."""
            if type(node) is Tensor and node.layout is torch.strided:
                kept: Tensor = (self._backend.borrow(node) if id(node) in inside else node).detach()
                return kept.detach
            if not any(id(leaf) in inside for leaf in tree_leaves(node)):
                return None
            if type(node) is dict:
                items = {
                    key: maker(value) or partial(_itself, value) for key, value in node.items()
                }
                return lambda: {key: make() for key, make in items.items()}
            if type(node) in (tuple, list) or is_namedtuple_instance(node):
                parts, build = (
                    [maker(v) or partial(_itself, v) for v in node],
                    getattr(node, "_make", type(node)),
                )
                return lambda: build([make() for make in parts])
            return None

        self._args, self._kwargs = list(args), dict(kwargs)
        makers: list[tuple[Any, Any, Callable[[], Any]]] = []
        for where, items in ((self._args, enumerate(args)), (self._kwargs, kwargs.items())):
            makers += [(where, key, make) for key, value in items if (make := maker(value))]
        for where, key, make in makers:
            where[key] = make()
        self._makers = [] if self._is_traced else makers

    def _is_dense(self, value: Tensor) -> bool:
        return value.layout is torch.strided and value.device == self._backend.device

    def _new_slot(self, value: Tensor) -> Tensor:
        # else nothing outside of inference mode could write to it
        with torch.inference_mode(False):
            return self._backend.slot(value)

    def _borrowed(self, slot: Tensor) -> Tensor:
        with torch.inference_mode(False):
            return self._backend.borrow(slot)

    def _changed(self, found: str, wanted: str) -> CaptureError:
        return CaptureError(
            f"eager piece {self.name} returned {found} on replay; at capture it was {wanted}, at "
            f"{self.line}",
            remedy="Return the same structure, shapes, dtypes and numbers for every batch of a "
            "key: a number that "
            "changes as a tensor, rows that vary padded, results that share memory for some "
            "batches alone as clones. "
            "A runner takes another batch with runner.run_eagerly.",
        )


class PieceMemory(TorchDispatchMode):
    """Refuses segments that read what a piece made, see Note [Memory of pieces], and operators that
    are tagged as unsafe in a graph.

    Args:
        device: The kind of device whose autocast counts.
        stream: Returns the handle of the current stream.

    Attributes:
        piece: The name of the piece that runs; None outside of pieces.
        in_segment: Whether operators belong to a segment.
        made: The storages that pieces made, by id, each with the piece's name.
        main: The stream that captures.
        side: The first line of the segment that ran on each other stream, by handle.
    """

    supports_higher_order_operators = True

    def __init__(self, device: str, stream: Callable[[], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stream, self.main, self.side = stream, stream(), dict[int, str]()
        self.piece: str | None = None
        self.in_segment = False
        self._device = device
        self.made: dict[int, tuple[str, StorageWeakRef]] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: Dynamo runs what it has compiled, as without a mode."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_composite(func, self._device.upper()):  # in inference mode these come whole
            with self:
                return as_its_caller(func, func.decompose, self._device)(*args, **kwargs)
        given, tags = storages_of(tensors_in((args, kwargs))), getattr(func, "tags", ())
        if self.in_segment:
            if torch.Tag.cudagraph_unsafe in tags:
                Refusals().refuse_unsafe(func._schema.name)
            stream = self.stream()
            if stream != self.main and stream not in self.side:
                self.side[stream] = blamed_line()
            for storage in given:
                if storage in self.made:
                    raise CaptureError(
                        "graph code reads a tensor that an eager piece made and did not return, at "
                        f"{blamed_line()}; a graph would always read that of the capture. The "
                        "piece "
                        f"is {self.made[storage][0]}",
                        remedy="Return the tensor from the eager piece, or write it in place "
                        "(copy_) into one that stays.",
                    )
        result = as_its_caller(func, func, self._device)(*args, **kwargs)
        is_set = torch.Tag.inplace_view in tags  # to memory that may be older
        if self.piece is not None and not is_set:
            for storage, reference in storages_of(tensors_in(result)).items():
                if storage not in given:
                    self.made[storage] = self.piece, reference
        return result


class Copied(NamedTuple):
    """A fresh tensor: each replay copies it into its slot."""

    slot: Tensor

    def fits(self, value: Any) -> bool:
        slot = self.slot
        if not isinstance(value, Tensor) or value.shape != slot.shape:
            return False
        return value.dtype is slot.dtype and value.device == slot.device

    def __str__(self) -> str:
        return described(self.slot)


class PassThrough(NamedTuple):
    """Memory of an argument, or of the state of a module: it is there already."""

    address: int
    facts: tuple[Any, ...]

    def fits(self, value: Any) -> bool:
        if not isinstance(value, Tensor) or value.data_ptr() != self.address:
            return False
        return (value.shape, value.stride(), value.dtype) == self.facts

    def __str__(self) -> str:
        return (
            f"its own argument's memory, or a module's, at {self.address:#x}, of shape "
            f"{list(self.facts[0])}"
        )


class Constant(NamedTuple):
    """A value that is not a tensor: the segments were captured with it."""

    value: Any

    def fits(self, value: Any) -> bool:
        return self.value is value or (
            type(self.value) is type(value) and bool(self.value == value)
        )

    def __str__(self) -> str:
        return described(self.value)


def fill(copies: Copies, *, together: bool) -> None:
    """Copy values into slots; ``together``: in one call, if no two slots lie in one memory."""
    if together and len(copies) > 1:
        torch._foreach_copy_([slot for slot, _ in copies], [value.detach() for _, value in copies])
        return
    for slot, value in copies:
        _once(slot).copy_(_once(value.detach() if value.requires_grad else value))


def _once(tensor: Tensor) -> Tensor:
    """A view of the elements of an expanded tensor that have memory of their own."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _itself(value: Any) -> Any:
    return value


def described(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, Tensor):
        return (
            f"a tensor of shape {list(value.shape)}, {value.dtype}, {value.layout}, on "
            f"{value.device}"
        )
    return f"{value!r:.200}"


def _attributes(modules: Sequence[torch.nn.Module]) -> dict[tuple[torch.nn.Module, str], Any]:
    return {
        (m, name): t
        for m in modules
        for d in (vars(m), m._buffers, m._parameters)
        for name, t in d.items()
    }


def _places(tree: Any) -> list[tuple[Any, int]]:
    return [(leaf, _address(leaf) if isinstance(leaf, Tensor) else 0) for leaf in tree_leaves(tree)]


def _address(tensor: Tensor) -> int:
    """Where the tensor's storage begins; 0 if it has no memory."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _sharing(values: Sequence[Any], which: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """For each of these values: the first one in the same memory, the distance from that one in
    bytes, and the strides; the stride of a dimension of one element may be any.
    """
    firsts: dict[int, tuple[int, int]] = {}
    found = []
    for i in which:
        value = values[i]
        begin = value.storage_offset() * value.itemsize
        first, begin_of_first = firsts.setdefault(_address(value), (i, begin))
        strides = [step for size, step in zip(value.shape, value.stride(), strict=True) if size > 1]
        found.append((first, begin - begin_of_first, strides))
    return found


def _repeats(tensor: Tensor) -> bool:
    """Whether elements of an expanded tensor share memory, so that it cannot be copied into."""
    return any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _can_share(tensor: Tensor) -> bool:
    """Whether its slot may lie in one block with others'; conjugated views have slots of their
    own.
    """
    return tensor.numel() > 0 and not (tensor.is_conj() or tensor.is_neg())


def _bytes(tensor: Tensor) -> Tensor:
    """All memory that the tensor is a view of, as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )


def _view_like(memory: Tensor, like: Tensor) -> Tensor:
    """A view of bytes with the layout that ``like`` has in its own memory."""
    whole = memory[: memory.numel() - memory.numel() % like.itemsize].view(like.dtype)
    return whole.as_strided(like.shape, like.stride(), like.storage_offset())
