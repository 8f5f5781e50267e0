"""Eager pieces: functions that run between two segments. docs/piecewise.md, State, says what they
may do.

Note [Output slots]
    A piece may return a fresh tensor each time, but a segment reads one address. So each run copies
    the result into a slot: memory of the pool, taken in the next segment. Arguments need none, nor
    does state (of modules that the piece was called on or with) that it does not bind again. Views
    of one memory get slots in one block.

    Each run hands the user's function new tensor objects, which it may change. Unlike ``.data``,
    ``detach()`` shares the count of writes, which the runner watches.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import (
    is_namedtuple_instance,
    tree_flatten,
    tree_leaves,
    tree_structure,
    tree_unflatten,
)
from torch.utils.weak import WeakIdKeyDictionary

from cgplan.backends import GraphBackend
from cgplan.backends.backend import autocast_cache
from cgplan.backends.blame import blamed_line
from cgplan.backends.context import AmbientState
from cgplan.backends.host_sync import (
    Args,
    Function,
    Kwargs,
    OperatorMode,
    Refusals,
    storages_of,
    tensors_in,
)
from cgplan.buffers.batch import alike_to, never
from cgplan.buffers.outputs import hides_tensors
from cgplan.errors import CaptureError
from cgplan.graphs.footprint import modules_reached
from cgplan.graphs.written import bytes_of

_LEAF = tree_structure(None)
_EMPTY = tree_structure(())
Copies = list[tuple[Tensor, Tensor]]  # slot, value
Attribute = tuple[torch.nn.Module, str]
Make = Callable[[], Any]


@dataclass(eq=False)
class EagerPiece:
    """Slots and captured arguments are borrowed.

    Attributes:
        line: Where the model called it.
        is_traced: The function is operators of a trace.
        state: Torch's thread-local state, for ``run``.
    """

    name: str
    line: str
    function: Function
    backend: GraphBackend
    pool: Any
    is_traced: bool

    def __post_init__(self) -> None:
        self.state = AmbientState.now(self.backend.device.type)
        self._results: list[Place] = []
        self._bound: dict[Attribute, Tensor] = {}
        # slots, and the attributes' own values
        self._standing: list[tuple[Attribute, Tensor, Tensor]] = []

    def first_run(
        self,
        args: Args,
        kwargs: Kwargs,
    ) -> None:
        modules = modules_reached(self.function, args, kwargs)
        before = _attributes(modules)
        leaves = tree_leaves((args, kwargs))  # keeps their ids
        given = list(map(_identity, leaves))
        # replays write borrowed tensors before the piece reads them
        self._args = list(args)
        self._kwargs = dict(kwargs)
        self._makers: list[tuple[Any, Any, Make]] = []
        self._keep(self._args, range(len(args)))
        self._keep(self._kwargs, kwargs)
        with autocast_cache(on=True):
            result = self.function(*args, **kwargs)
        self._refuse_other_arguments(given, tree_leaves((args, kwargs)))
        after = _attributes(modules)
        in_state = _addresses(before) & _addresses(after)
        in_arguments = {address for _, address in given}

        def is_fresh(tensor: Tensor) -> bool:
            address = _address(tensor)
            if address == 0 or address not in in_arguments | in_state:
                return True
            return address not in in_arguments and self._is_captured(tensor)

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
        """The piece may take values out of containers, but put no others in."""
        rest = iter(given)
        for leaf in leaves:
            if _identity(leaf) not in rest:
                raise CaptureError(
                    f"eager piece {self.name} puts values into a list or dict that it was given, "
                    "or gives a tensor other memory (set_, resize_, .data = ...), at "
                    f"{self.line}; graphs would keep those of the capture",
                    remedy="Return the values, or write them in place (copy_) into a tensor that "
                    "is an argument. Keep records in another object.",
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
                remedy=f"Return dense tensors on {self.backend.device}, in tuples, lists, dicts "
                "or registered pytree nodes.",
            )

    def _find_shared(self) -> None:
        sharing = {}
        for i, place in enumerate(self._results):
            slot = place.slot
            if slot is None or slot.is_conj() or slot.is_neg():
                continue
            if slot.numel():
                sharing[i] = _address(slot)
        counts = Counter(sharing.values())
        self._shared: list[int] = []
        self._blocks: dict[int, Tensor] = {}
        for i, address in sharing.items():
            value = self._values[i]
            if counts[address] > 1 or _repeated(value):
                self._shared.append(i)
                self._blocks[address] = bytes_of(value.untyped_storage())
        self._sharing = _sharing(self._values, self._shared)

    @torch.inference_mode(mode=False)  # its tensors cannot be written outside
    def hand_out(self) -> tuple[Any, Copies]:
        """The result, and copies to make before the next segment runs; inside its capture."""
        blocks = {address: self.backend.slot(memory) for address, memory in self._blocks.items()}
        handed = self._values
        copies = Copies()
        for i, place in enumerate(self._results):
            value = place.slot
            if value is None:
                continue
            if i in self._shared:
                block = blocks[_address(value)]
                count = block.numel() // value.itemsize
                whole = block[: count * value.itemsize].view(value.dtype)
                handed[i] = whole.as_strided(
                    value.shape,
                    value.stride(),
                    value.storage_offset(),
                )
            else:
                handed[i] = self.backend.slot(value)
            slot = self.backend.borrow(handed[i])
            self._results[i] = Place(slot)
            copies.append((slot, value.detach()))
        for attribute, value in self._bound.items():
            standing = self.backend.slot(value)
            setattr(*attribute, standing)
            self._standing.append((attribute, standing, value))
            slot = self.backend.borrow(standing)
            self._bound[attribute] = slot
            copies.append((slot, value.detach()))
        self._only: Place | None = None  # for one leaf, or ()
        self._slot: Tensor | None = None
        self._is_alike = never
        if not self._bound and not self._shared and self._spec in (_LEAF, _EMPTY):
            self._only = self._results[0] if self._results else Place(value=())
        self._is_flat = self._spec == tree_structure(tuple(handed))
        del self._values, self._blocks
        return tree_unflatten(handed, self._spec), copies

    def end_capture(self) -> None:
        for attribute, slot, value in self._standing:
            if getattr(*attribute, None) is slot:
                setattr(*attribute, value)
        self._standing = []

    def run(self) -> None:
        """Raises CaptureError if the results have changed their form."""
        for where, key, make in self._makers:
            where[key] = make()
        result = self.function(*self._args, **self._kwargs)
        slot = self._slot
        if (
            slot is not None
            and type(result) is Tensor
            and not result.is_nested
            and self._is_alike(result)
        ):
            slot.copy_(result)
            return
        only = self._only
        if only is None or not only.fits(result):
            self._deliver(result)
        elif only.slot is not None:
            if result.requires_grad:
                result = result.detach()
            only.slot.copy_(result)
            self._slot = only.slot
            self._is_alike = alike_to([result])

    def _deliver(self, result: Any) -> None:
        if self._is_flat and type(result) is tuple and len(result) == len(self._results):
            values: Sequence[Any] = result
        else:
            values, spec = tree_flatten(result)
            if spec != self._spec:
                raise self._changed(f"the structure {spec}", f"{self._spec}")
        copies: Copies = []
        for place, value in zip(self._results, values, strict=True):
            if not place.fits(value):
                raise self._changed(
                    described(value),
                    f"{place}",
                )
            if place.slot is not None:
                copies.append((place.slot, value))
        if self._shared and _sharing(values, self._shared) != self._sharing:
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
        fill(copies, together=not self._shared)

    def _keep(
        self,
        where: Any,
        keys: Iterable[Any],
    ) -> None:
        for key in keys:
            make = self._maker(where[key])
            if make is None:
                continue
            where[key] = make()
            if not self.is_traced:
                self._makers.append((where, key, make))

    def _maker(self, node: Any) -> Make | None:
        """None if all runs get the same object."""
        if type(node) is Tensor and node.layout is torch.strided:
            kept = node
            if self._is_captured(node):
                kept = self.backend.borrow(node)
            return kept.detach().detach
        if not any(map(self._is_captured, tree_leaves(node))):
            return None
        if type(node) is dict:
            names = list(node)
            make_values = self._maker(list(node.values()))
            assert make_values is not None
            return lambda: dict(zip(names, make_values(), strict=True))
        if type(node) in (tuple, list) or is_namedtuple_instance(node):
            build = getattr(node, "_make", type(node))
            makers = [self._maker(value) or _itself(value) for value in node]
            return lambda: build([make() for make in makers])
        return None

    def _is_captured(
        self,
        leaf: Any,
    ) -> bool:
        if not isinstance(leaf, Tensor):
            return False
        return self.backend.in_pool(leaf, self.pool)

    def _is_dense(self, value: Tensor) -> bool:
        is_here = value.device == self.backend.device
        return is_here and value.layout is torch.strided

    def _changed(
        self,
        found: str,
        wanted: str,
    ) -> CaptureError:
        return CaptureError(
            f"eager piece {self.name} returned {found} on replay; at capture it was {wanted}, at "
            f"{self.line}",
            remedy="Return the same structure, shapes, dtypes and numbers for every batch of a "
            "key: a changing number as a tensor, with padding for rows that vary, and clones of "
            "results that share memory only sometimes. runner.run_eagerly takes other batches.",
        )


class PieceMemory(OperatorMode):
    """Refuses what a piece made and did not return. It does not see into compiled code.

    Attributes:
        piece: The one that runs.
        made: Ids of storages that pieces made.
        side: The line where the segment began to use each side stream.
    """

    def __init__(
        self,
        device: str,
        stream: Callable[[], int],
    ) -> None:
        super().__init__(device)
        self.piece: str | None = None
        self.in_segment = False
        self.made: dict[int, tuple[str, StorageWeakRef]] = {}
        self.side: dict[int, str] = {}
        self._read: dict[int, weakref.ref[Tensor]] = {}  # by segments
        self._own = WeakIdKeyDictionary()  # made by operators
        self._stream = stream
        self._main = stream()

    def see(
        self,
        func: Any,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
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
        result = self.run(func, args, kwargs)
        results = tensors_in(result)
        for tensor in results:
            self._own[tensor] = None
        # else it may be older memory
        if self.piece is not None and torch.Tag.inplace_view not in tags:
            for storage, reference in storages_of(results).items():
                if storage not in given:
                    self.made[storage] = self.piece, reference
        return result

    @contextmanager
    def in_piece(self, name: str) -> Iterator[None]:
        """CaptureError if the piece drops a tensor that segments read."""
        self.piece = name
        before = [reference for reference in self._read.values() if reference() is not None]
        yield
        self.piece = None
        for reference in before:
            if reference() is None:
                raise CaptureError(
                    f"eager piece {name} replaces a tensor that graph code reads before it, at "
                    f"{blamed_line()}; a graph would read that of the capture",
                    remedy="Write it in place (copy_), or read it in the eager piece.",
                )

    def refuse_made(self, storages: Iterable[int]) -> None:
        """CaptureError if a piece made one of these, by id."""
        for storage in storages:
            if storage in self.made:
                raise CaptureError(
                    "graph code reads a tensor that an eager piece made and did not return, at "
                    f"{blamed_line()}; a graph would read that of the capture. The piece is "
                    f"{self.made[storage][0]}",
                    remedy="Return the tensor from the eager piece, or write it in place (copy_) "
                    "into one that stays.",
                )


class Place(NamedTuple):
    """Where a result lies on each replay.

    Attributes:
        slot: Of a fresh tensor; its value until it has a slot.
        memory: Of a tensor in an argument's or a module's memory.
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


def fill(
    copies: Copies,
    *,
    together: bool,
) -> None:
    """``together``: in one call, if no slots share memory."""
    if together and len(copies) > 1:
        slots, values = zip(*copies, strict=True)
        torch._foreach_copy_(slots, [value.detach() for value in values])
        return
    for slot, value in copies:
        if value.requires_grad:
            value = value.detach()
        if not together:
            slot = _once(slot)
            value = _once(value)
        slot.copy_(value)


def _once(tensor: Tensor) -> Tensor:
    for dim in _repeated(tensor):
        tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _repeated(tensor: Tensor) -> list[int]:
    """The expanded dimensions, which cannot be copied into."""
    return [
        dim for dim, stride in enumerate(tensor.stride()) if stride == 0 and tensor.shape[dim] > 1
    ]


def _itself(value: Any) -> Make:
    return lambda: value


def described(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = f"{value.dtype}, {value.layout}"
        return f"a tensor of shape {list(value.shape)}, {kind}, on {value.device}"
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
    return {
        _address(value)
        for value in attributes.values()
        if type(value) in (Tensor, torch.nn.Parameter)
    }


def _address(value: Any) -> int:
    """Of the storage; 0 without memory."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return 0
    return value.untyped_storage().data_ptr()


def _sharing(
    values: Sequence[Any],
    which: Sequence[int],
) -> list[tuple[Any, ...]]:
    """By value: the first one in the same memory, the distance from it in bytes, and strides."""
    firsts: dict[int, tuple[int, int]] = {}
    found = []
    for i in which:
        value = values[i]
        begin = value.storage_offset() * value.itemsize
        first, begin_of_first = firsts.setdefault(_address(value), (i, begin))
        strides = [stride for dim, stride in enumerate(value.stride()) if value.shape[dim] > 1]
        found.append((first, begin - begin_of_first, strides))
    return found
