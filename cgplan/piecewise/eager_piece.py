"""Eager pieces: functions that run between two segments, at capture and again on every replay.

Note [Output slots]
    A segment reads the result of an eager piece at the address that it saw at capture, but a piece
    may return a fresh tensor each time. So the model gets a slot: memory of the graph pool that is
    allocated at the beginning of the next segment. Each run copies the result into its slot before
    that segment. Memory of the arguments stays at its address and needs no slot. Neither does
    state: parameters, buffers and tensors in attributes of the modules that the piece was called
    on or with, if the piece does not bind them again. Segments may write to both in place. State
    that a piece reaches in another way (a global, a closure, an object that is not a module) is
    copied like any other result. Results that are views of one memory have slots that are views of
    one block: segments may write to one and read another. So has an expanded tensor, whose elements
    share memory.

Note [State that a piece leaves behind]
    The model's Python code runs at capture alone, so only memory carries values from pieces to
    segments. An attribute of a module that the piece binds to a new tensor has a slot, too. The
    attribute holds that slot until the capture ends; the slot follows the attribute as long as
    shape and dtype stay. A piece is refused that puts values into a list or dict that it was given,
    or that gives a tensor other memory: the segments would go on with the values of the capture.
    The look refuses a piece that reads an attribute which a segment binds: a replay does not bind
    it.

Note [Tensor objects]
    In each run a function of the user gets new tensor objects on the memory of the capture, in new
    tuples, lists and dicts, so that it may change them (``transpose_``, ``pop``). Operators of a
    trace change no object, and get the same ones each time. ``detach()`` shares the count of
    writes, which tells the runner what a piece writes into; ``.data`` would not.

Note [Memory of pieces]
    What a piece computes and does not hand out lies elsewhere after the next run. So a dispatch
    mode notes the memory that operators of pieces make. Operators of segments are refused that are
    given it, and so are other pieces, and forwards that return it. The mode does not see into
    compiled code.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import is_namedtuple_instance, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from cgplan.backends import GraphBackend
from cgplan.backends.backend import autocast_cache
from cgplan.backends.blame import blamed_line
from cgplan.backends.host_sync import (
    Args,
    Function,
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

_, _LEAF = tree_flatten(None)
_, _EMPTY = tree_flatten(())
Copies = list[tuple[Tensor, Tensor]]  # slots and values
Attribute = tuple[torch.nn.Module, str]
Make = Callable[[], Any]


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
        function: Function,
        backend: GraphBackend,
        pool: Any,
        *,
        is_traced: bool = False,
    ) -> None:
        self.name = name
        self.line = line
        self.state = AmbientState.now(backend.device.type)
        self._function = function
        self._is_traced = is_traced
        self._backend = backend
        self._pool = pool
        self._results: list[Place] = []
        # attributes that the piece binds, with their slots; until hand_out, with their values
        self._bound: dict[Attribute, Tensor] = {}
        # during the capture: the slots that stand in attributes, and the values to put back
        self._standing: list[tuple[Attribute, Tensor, Tensor]] = []

    def first_run(self, args: Args, kwargs: Kwargs) -> None:
        """Run on the arguments of the capture and keep them."""
        modules = modules_reached(self._function, args, kwargs)
        before = _attributes(modules)
        leaves = tree_leaves((args, kwargs))  # held: no other object gets the id of one
        given = list(map(_identity, leaves))
        self._keep_arguments(args, kwargs)
        with autocast_cache(on=True):
            result = self._function(*args, **kwargs)
        self._refuse_other_arguments(given, tree_leaves((args, kwargs)))
        after = _attributes(modules)
        in_state = _addresses(before) & _addresses(after)
        in_arguments = {address for _, address in given}

        def is_fresh(tensor: Tensor) -> bool:
            address = _address(tensor)
            if address == 0:
                return True
            if address in in_arguments:
                return False
            if address in in_state:
                return self._is_captured(tensor)
            return True

        self._values, self._spec = tree_flatten(result)
        for value in self._values:
            self._refuse_unreachable(value)
            if not isinstance(value, Tensor):
                place = Place(value=value)
            elif is_fresh(value):
                place = Place(slot=value)
            else:
                place = Place(memory=_memory(value))
            self._results.append(place)
        self._find_shared()
        for attribute, value in after.items():
            if type(value) is not Tensor:
                continue
            if before.get(attribute) is value or not is_fresh(value):
                continue
            if self._is_dense(value) and not _repeated(value):
                self._bound[attribute] = value

    def _refuse_other_arguments(
        self,
        given: Iterable[Any],
        leaves: list[Any],
    ) -> None:
        """A piece may take values out of its lists and dicts, but not put others in."""
        rest = iter(given)
        for leaf in leaves:
            if _identity(leaf) not in rest:
                raise CaptureError(
                    f"eager piece {self.name} puts values into a list or dict that it was given, "
                    "or gives a tensor other memory (set_, resize_, .data = ...), at "
                    f"{self.line}; graphs would keep those of the capture",
                    remedy="Return the values, or write them in place (copy_) into a tensor that "
                    "is an argument. Keep records in an object that is not handed to the piece.",
                )

    def _refuse_unreachable(self, value: Any) -> None:
        found = ""
        if hides_tensors(value):
            found = f"a {type(value).__name__}, whose tensors cannot be reached"
        elif isinstance(value, Tensor) and not self._is_dense(value):
            found = described(value)
        if found:
            raise CaptureError(
                f"eager piece {self.name} returned {found}, at {self.line}",
                remedy=f"Return dense tensors on {self._backend.device}, in tuples, lists, dicts "
                "or classes that are registered as pytree nodes; a graph does not see others "
                "change.",
            )

    def _find_shared(self) -> None:
        """Find the results that get views of one block, and the memory of each block."""
        sharing = {}
        for i, place in enumerate(self._results):
            if place.slot is not None and _can_share(place.slot):
                sharing[i] = _address(place.slot)
        counts = Counter(sharing.values())
        self._shared: list[int] = []
        self._blocks: dict[int, Tensor] = {}
        for i, address in sharing.items():
            value = self._values[i]
            if counts[address] > 1 or _repeated(value):
                self._shared.append(i)
                self._blocks[address] = _bytes(value)
        self._sharing = _sharing(self._values, self._shared)

    def hand_out(self) -> tuple[Any, Copies]:
        """The result for the model, and the copies (slot, value) to make before the next segment
        runs.

        Called once, inside that segment's capture, see Note [Output slots].
        """
        blocks = {}
        for address, memory in self._blocks.items():
            blocks[address] = self._new_slot(memory)
        handed = self._values
        copies = Copies()
        for i, place in enumerate(self._results):
            value = place.slot
            if value is None:
                continue
            if i in self._shared:
                block = blocks[_address(value)]
                handed[i] = _view_like(block, value)
            else:
                handed[i] = self._new_slot(value)
            slot = self._borrowed(handed[i])
            self._results[i] = Place(slot)
            copies.append((slot, value.detach()))
        for attribute, value in self._bound.items():
            standing = self._new_slot(value)
            setattr(*attribute, standing)
            self._standing.append((attribute, standing, value))
            slot = self._borrowed(standing)
            self._bound[attribute] = slot
            copies.append((slot, value.detach()))
        self._only: Place | None = None  # of a result that is one leaf, or an empty tuple
        if not self._bound and not self._shared:
            if self._spec == _LEAF:
                self._only = self._results[0]
            elif self._spec == _EMPTY:
                self._only = Place(value=())
        has_parts = len(handed) == self._spec.num_children  # none of them nested
        self._is_flat = has_parts and self._spec.type is tuple
        del self._values, self._blocks
        return tree_unflatten(handed, self._spec), copies

    def end_capture(self) -> None:
        """Give attributes that hold slots the values back that the piece has bound."""
        for attribute, slot, value in self._standing:
            if getattr(*attribute, None) is slot:
                setattr(*attribute, value)
        self._standing = []

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
        elif only.slot is not None:
            if result.requires_grad:
                result = result.detach()
            only.slot.copy_(result)

    def _deliver(self, result: Any) -> None:
        is_tuple = self._is_flat and type(result) is tuple
        if is_tuple and len(result) == len(self._results):
            values: Sequence[Any] = result
        else:
            values, spec = tree_flatten(result)
            if spec != self._spec:
                raise self._changed(f"the structure {spec}", f"{self._spec}")
        copies = Copies()
        for place, value in zip(self._results, values, strict=True):
            if not place.fits(value):
                found = described(value)
                raise self._changed(found, f"{place}")
            if place.slot is not None:
                copies.append((place.slot, value))
        if _sharing(values, self._shared) != self._sharing:
            raise self._changed(
                "a tensor that does not share memory with other results as it did, or is expanded "
                "otherwise,",
                "in their memory",
            )
        for attribute, slot in self._bound.items():
            value = getattr(*attribute, None)
            if not isinstance(value, Tensor):
                continue
            if value.shape == slot.shape and value.dtype is slot.dtype:
                copies.append((slot, value))
        if copies:
            fill(copies, together=not self._shared)

    def _keep_arguments(self, args: Args, kwargs: Kwargs) -> None:
        """Tensors of the pool are borrowed: later segments reuse their blocks, and each replay
        writes them before the piece reads them. Other objects are held; a list without captured
        tensors stays the same list.
        """
        self._args = list(args)
        self._kwargs = dict(kwargs)
        self._makers: list[tuple[Any, Any, Make]] = []
        self._keep(self._args, range(len(args)))
        self._keep(self._kwargs, kwargs)

    def _keep(self, where: Any, keys: Iterable[Any]) -> None:
        for key in keys:
            make = self._maker(where[key])
            if make is None:
                continue
            where[key] = make()
            if not self._is_traced:
                self._makers.append((where, key, make))

    def _maker(self, node: Any) -> Make | None:
        """A function that makes an argument for each run; None if all runs get the same object."""
        if type(node) is Tensor and node.layout is torch.strided:
            kept = node
            if self._is_captured(node):
                kept = self._backend.borrow(node)
            return kept.detach().detach
        if not any(map(self._is_captured, tree_leaves(node))):
            return None
        if type(node) is dict:
            makers = {}
            for key, value in node.items():
                makers[key] = self._maker(value) or _itself(value)
            return lambda: {key: make() for key, make in makers.items()}
        if type(node) in (tuple, list) or is_namedtuple_instance(node):
            parts = []
            for value in node:
                part = self._maker(value) or _itself(value)
                parts.append(part)
            build = getattr(node, "_make", type(node))
            return lambda: build([make() for make in parts])
        return None

    def _is_captured(self, leaf: Any) -> bool:
        if not isinstance(leaf, Tensor):
            return False
        return self._backend.in_pool(leaf, self._pool)

    def _is_dense(self, value: Tensor) -> bool:
        is_here = value.device == self._backend.device
        return is_here and value.layout is torch.strided

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
            "key. Return a changing number as a tensor, pad rows that vary, and clone results that "
            "share memory for some batches alone. A runner takes another batch with "
            "runner.run_eagerly.",
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
        side: The first line of the segment that ran on each side stream, by handle.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        device: str,
        stream: Callable[[], int],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.piece: str | None = None
        self.in_segment = False
        self.made: dict[int, tuple[str, StorageWeakRef]] = {}
        self.side: dict[int, str] = {}
        self._device = device
        self._read: dict[int, weakref.ref[Tensor]] = {}  # by segments
        self._own = WeakIdKeyDictionary()  # what operators made since the capture began
        self._stream = stream
        self._main = stream()

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: Dynamo runs what it has compiled, as without a mode."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if is_composite(func, self._device.upper()):  # in inference mode these come whole
            decompose = as_its_caller(func, func.decompose, self._device)
            with self:
                return decompose(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        given = storages_of(tensors)
        tags = getattr(func, "tags", ())
        if self.in_segment:
            if torch.Tag.cudagraph_unsafe in tags:
                Refusals().refuse_unsafe(func._schema.name)
            stream = self._stream()
            if stream != self._main and stream not in self.side:
                self.side[stream] = blamed_line()
            self.refuse_made(given)
            for tensor in tensors:
                if tensor not in self._own:
                    self._read[id(tensor)] = weakref.ref(tensor)
        run = as_its_caller(func, func, self._device)
        result = run(*args, **kwargs)
        for tensor in tensors_in(result):
            self._own[tensor] = None
        # an operator that changes a tensor object may set it to memory that is older
        if self.piece is not None and torch.Tag.inplace_view not in tags:
            found = storages_of(tensors_in(result))
            for storage, reference in found.items():
                if storage not in given:
                    self.made[storage] = self.piece, reference
        return result

    @contextmanager
    def in_piece(self, name: str) -> Iterator[None]:
        """A block that runs a piece. Raises CaptureError if it lets go of a tensor that segments
        read and did not make.
        """
        self.piece = name
        before = []
        for reference in self._read.values():
            if reference() is not None:
                before.append(reference)
        yield
        self.piece = None
        for reference in before:
            if reference() is None:
                raise CaptureError(
                    f"eager piece {name} replaces a tensor that graph code reads before it, at "
                    f"{blamed_line()}; a graph would always read that of the capture",
                    remedy="Write it in place (copy_), or read it in the eager piece.",
                )

    def refuse_made(self, storages: Iterable[int]) -> None:
        """Raise CaptureError if a piece made one of these storages, by id: graphs do not see the
        one that it makes on replay.
        """
        for storage in storages:
            if storage in self.made:
                raise CaptureError(
                    "graph code reads a tensor that an eager piece made and did not return, at "
                    f"{blamed_line()}; a graph would always read that of the capture. The piece "
                    f"is {self.made[storage][0]}",
                    remedy="Return the tensor from the eager piece, or write it in place (copy_) "
                    "into one that stays.",
                )


class Place(NamedTuple):
    """Where a result is on each replay.

    Attributes:
        slot: Of a fresh tensor, which each replay copies there; its value until it has a slot.
        memory: Of a tensor in memory of an argument, or of a module's state, where it stays.
        value: Of what is no tensor: the segments were captured with it.
    """

    slot: Tensor | None = None
    memory: tuple[Any, ...] = ()
    value: Any = None

    def fits(self, found: Any) -> bool:
        slot = self.slot
        if slot is not None:
            if not isinstance(found, Tensor) or found.shape != slot.shape:
                return False
            return found.dtype is slot.dtype and found.device == slot.device
        if self.memory:
            return isinstance(found, Tensor) and _memory(found) == self.memory
        value = self.value
        if value is found:
            return True
        return type(value) is type(found) and bool(value == found)

    def __str__(self) -> str:
        if self.memory:
            address, shape, *_ = self.memory
            return (
                f"its own argument's memory, or a module's, at {address:#x}, of shape {list(shape)}"
            )
        if self.slot is not None:
            return described(self.slot)
        return described(self.value)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )


def fill(copies: Copies, *, together: bool) -> None:
    """Copy values into slots; ``together``: in one call, if no two slots lie in one memory."""
    if together and len(copies) > 1:
        slots, values = zip(*copies, strict=True)
        torch._foreach_copy_(slots, [value.detach() for value in values])
        return
    for slot, value in copies:
        if value.requires_grad:
            value = value.detach()
        _once(slot).copy_(_once(value))


def _once(tensor: Tensor) -> Tensor:
    """A view of the elements of an expanded tensor that have memory of their own."""
    for dim in _repeated(tensor):
        tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _repeated(tensor: Tensor) -> list[int]:
    """The expanded dimensions, in which elements share memory: they cannot be copied into."""
    found = []
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            found.append(dim)
    return found


def _itself(value: Any) -> Make:
    return lambda: value


def described(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, Tensor):
        shape = list(value.shape)
        kind = f"{value.dtype}, {value.layout}"
        return f"a tensor of shape {shape}, {kind}, on {value.device}"
    return f"{value!r:.200}"


def _attributes(modules: Sequence[torch.nn.Module]) -> dict[Attribute, Any]:
    found = {}
    for module in modules:
        held = vars(module) | module._buffers | module._parameters
        for name, value in held.items():
            found[module, name] = value
    return found


def _identity(leaf: Any) -> tuple[int, int]:
    return id(leaf), _address(leaf)


def _addresses(attributes: dict[Attribute, Any]) -> set[int]:
    """Memory of the tensors among attributes."""
    found = set()
    plain = (Tensor, torch.nn.Parameter)  # other classes may have no memory
    for value in attributes.values():
        if type(value) in plain:
            found.add(_address(value))
    return found


def _address(value: Any) -> int:
    """Where a tensor's storage begins; 0 for what has no memory."""
    if not isinstance(value, Tensor):
        return 0
    if value.layout is not torch.strided:
        return 0
    return value.untyped_storage().data_ptr()


def _sharing(
    values: Sequence[Any],
    which: Sequence[int],
) -> list[tuple[Any, ...]]:
    """For each of these values: the first one in the same memory, the distance from that one in
    bytes, and the strides; the stride of a dimension of one element may be any.
    """
    firsts: dict[int, tuple[int, int]] = {}
    found = []
    for i in which:
        value = values[i]
        begin = value.storage_offset() * value.itemsize
        address = _address(value)
        first, begin_of_first = firsts.setdefault(address, (i, begin))
        strides = []
        for dim, stride in enumerate(value.stride()):
            if value.shape[dim] > 1:
                strides.append(stride)
        found.append((first, begin - begin_of_first, strides))
    return found


def _can_share(tensor: Tensor) -> bool:
    """Whether its slot may lie in one block with others'; conjugated views have slots of their
    own.
    """
    if tensor.is_conj() or tensor.is_neg():
        return False
    return tensor.numel() > 0


def _bytes(tensor: Tensor) -> Tensor:
    """All memory that the tensor is a view of, as bytes."""
    storage = tensor.untyped_storage()
    size = (storage.nbytes(),)
    nothing = torch.empty(
        0,
        dtype=torch.uint8,
        device=tensor.device,
    )
    return nothing.set_(storage, 0, size, (1,))


def _view_like(memory: Tensor, like: Tensor) -> Tensor:
    """A view of bytes with the layout that ``like`` has in its own memory."""
    count = memory.numel() // like.itemsize
    whole = memory[: count * like.itemsize].view(like.dtype)
    return whole.as_strided(
        like.shape,
        like.stride(),
        like.storage_offset(),
    )
