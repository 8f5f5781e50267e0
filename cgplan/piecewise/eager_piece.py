"""Eager pieces: functions that run between two segments, at capture and again on every replay.

Note [Output slots]
    A segment reads what an eager piece returned at the address that it saw at capture, and a piece may return a fresh
    tensor each time. So the model is not given the result but a slot: memory of the graph pool, allocated at the
    beginning of the segment that follows. The result is copied into its slot before that segment runs. What a piece
    returns of its own arguments' memory stays at its address by itself and needs no slot; nor does state: parameters,
    buffers and tensors in attributes of the modules that it was called on or with, which were there before it ran and
    are there afterwards. Segments may write to those in place. State that it reaches in another way (a global, a
    closure, an object that is no module) is copied like any other result, and what a segment writes to it is lost.
    Results that are views of one memory have slots that are views of one block, as segments may write to one and read
    another, so on replay they have to share memory in the same way.

Note [What a piece leaves behind]
    The model's Python code runs at capture alone, so only memory carries news between pieces and segments. A piece
    that adds values to a list, dict or set that it was given is refused, because the segments would go on with the
    values of the capture; so is one that gives a tensor that it was given other memory, and a result that is one
    mutable object with other contents on replay. Nobody sees an attribute that a segment sets and a piece reads, or the
    other way round: on replay it is what the last capture left there, of whichever size. Pass such tensors as arguments
    and results, or write them in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, is_namedtuple_instance, tree_flatten, tree_leaves, tree_unflatten

from cgplan.backends import GraphBackend
from cgplan.backends.host_sync import tensors_in
from cgplan.buffers.outputs import hides_tensors
from cgplan.buffers.views import HandedViews, exact_check, facts_of
from cgplan.errors import CaptureError
from cgplan.graphs.frozen import Containers, contents, modules_of, state_of
from cgplan.graphs.operator_log import marked


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


_always = True.__bool__


class PieceArguments:
    """What a piece was called with at capture.

    Tensors of the pool are borrowed: later segments reuse their blocks, and each replay writes them anew before the
    piece reads them. All else is held as it is: static buffers, parameters, a KV cache, and objects whose inside is
    not looked into. Tuples, lists and dicts are looked into.

    The model hands a piece new tensor objects on each call, so a piece may change one itself (``transpose_``,
    ``unsqueeze_``). On replay the objects are ours: those on memory of the pool, and others that the piece changed at
    capture, are looked at before each run, and made anew where they are no longer as they were.

    Args:
        args: Of the call, before the piece has run on them.
        kwargs: The same.
        backend: Of the capture.
        pool: The graph pool of the capture.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], backend: GraphBackend, pool: Any) -> None:
        inside = {id(t) for t in tensors_in((args, kwargs)) if backend.in_pool(t, pool)}

        def is_leaf(node: Any) -> bool:  # a list without captured tensors stays the same list, whoever edits it
            looked_into = type(node) in (tuple, list, dict) or is_namedtuple_instance(node)
            return not looked_into or not any(id(leaf) in inside for leaf in tree_leaves(node))

        def kept(leaf: Any) -> Any:
            plain = id(leaf) in inside and not leaf.is_conj() and not leaf.is_neg()  # borrowing would lose those bits
            return backend.borrow(leaf) if plain else leaf

        given: list[Any] = [*args, *kwargs.values()]
        spec: TreeSpec | None = None
        if not all(map(is_leaf, given)):
            given, spec = tree_flatten((args, kwargs), is_leaf=is_leaf)
        self._names, self._nested = tuple(kwargs), spec
        self._leaves = list(map(kept, given))
        self._watched = [
            (i, None if id(leaf) in inside else (leaf, facts_of(leaf)), self._leaves[i].detach())
            for i, leaf in enumerate(given)
            if type(leaf) is torch.Tensor and leaf.layout is torch.strided
        ]
        self._handed: HandedViews | None = None
        self._placed: tuple[torch.Tensor, ...] = ()
        self._built: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    @property
    def is_nested(self) -> bool:
        """Whether lists, tuples or dicts are made anew for each run."""
        return self._nested is not None

    def settle(self) -> None:
        """Called once the piece has run at capture: see which tensor objects have to be looked at."""
        watched = [(i, t) for i, other, t in self._watched if other is None or facts_of(other[0]) != other[1]]
        self._positions, masters = [i for i, _ in watched], [t for _, t in watched]
        del self._watched
        if masters:
            self._handed = HandedViews(lambda: tuple([t.detach() for t in masters]))
        self._build()

    def now(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for one run."""
        if self._handed is not None and self._handed.tensors() is not self._placed:
            self._build()
        if self._nested is not None:  # new lists and dicts each time, in case the function edits them
            args, kwargs = tree_unflatten(self._leaves, self._nested)
            return args, kwargs
        return self._built

    def bind(self, function: Callable[..., Any]) -> tuple[Callable[[], Any], Callable[[], bool]]:
        """A call of the function with these arguments, if they are not nested; and whether it still has them, to be
        asked before each call: if not, or where the mode of torch is new, bind again.
        """
        args, kwargs = self.now()
        return partial(function, *args, **kwargs), _always if self._handed is None else self._handed.bound_check()

    def _build(self) -> None:
        if self._handed is not None:
            self._placed = self._handed.tensors()
            for i, tensor in zip(self._positions, self._placed, strict=True):
                self._leaves[i] = tensor
        count = len(self._leaves) - len(self._names)
        if self._nested is None:
            named = zip(self._names, self._leaves[count:], strict=True)
            self._built = tuple(self._leaves[:count]), dict(named)


_LEAF = tree_flatten(None)[1]


class EagerPiece:
    """One function between two segments, with what it needs to run again and where its results go.

    It owns no pool memory: its slots and its captured arguments are borrowed.

    Attributes:
        name: For messages: the function's qualified name, or the module's dotted name.
        line: Where the model called it.
    """

    def __init__(self, name: str, line: str, function: Callable[..., Any], backend: GraphBackend, pool: Any) -> None:
        self.name = name
        self.line = line
        self._function = function
        self._backend = backend
        self._pool = pool
        self._state = TorchState.now(backend.device.type)

    def __repr__(self) -> str:
        return f"EagerPiece({self.name!r}, called at {self.line})"

    def first_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run on the arguments of the capture and keep them, see PieceArguments."""
        modules = modules_of(self._function, args, kwargs)
        before, containers = state_of(modules), Containers((args, kwargs))  # the tensors are held: addresses last
        tensors = list(tensors_in((args, kwargs)))
        addresses = list(map(_address, tensors))
        self._arguments = PieceArguments(args, kwargs, self._backend, self._pool)
        with marked("eager piece"):
            result = self._function(*args, **kwargs)
        self._flat, spec = tree_flatten(result)
        self._arguments.settle()
        if containers.have_new_values():
            raise self._edits_arguments()
        if list(map(_address, tensors)) != addresses:
            raise self._moves_arguments()
        given = set(addresses) - {0}
        state = set(map(_address, before)) & set(map(_address, state_of(modules))) - {0}
        self._spec = _LEAF if spec == _LEAF else spec
        self._is_given = [
            isinstance(leaf, torch.Tensor)
            and (_address(leaf) in given or (_address(leaf) in state and not self._backend.in_pool(leaf, self._pool)))
            for leaf in self._flat
        ]
        fresh = []
        for leaf, is_given in zip(self._flat, self._is_given, strict=True):
            self._check(leaf)
            if isinstance(leaf, torch.Tensor) and not is_given and not _repeats(leaf):
                fresh.append(leaf)
        counts = Counter(map(_address, fresh))  # results that are views of one memory get one slot, and are its views
        self._shared = {a: _bytes(t) for t in fresh if (a := _address(t)) and counts[a] > 1}

    def hand_out(self) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
        """What the model gets for the results, and the copies (slot, value) to make before the next segment runs.

        Called once, inside that segment's capture, see Note [Output slots].
        """
        blocks = {address: (self._new_slot(memory), Block()) for address, memory in self._shared.items()}
        handed, copies, results = [], [], list[Slot | Shared | Given | Frozen]()
        for leaf, is_given in zip(self._flat, self._is_given, strict=True):
            handed.append(leaf)
            if not isinstance(leaf, torch.Tensor):
                results.append(Frozen(leaf, contents(leaf)))
            elif is_given:
                results.append(
                    Given(leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype, leaf.is_conj(), leaf.is_neg())
                )
            else:
                block = None if _repeats(leaf) else blocks.get(_address(leaf))
                handed[-1] = plain = self._new_slot(leaf) if block is None else _view_like(block[0], leaf)
                with torch.inference_mode(False):
                    slot = self._backend.borrow(plain)
                if block is not None:  # after borrowing, which would lose the bits
                    handed[-1], slot = _with_bits(plain, leaf), _with_bits(slot, leaf)
                kept = Slot(slot, slot.shape, slot.dtype, slot.device)
                results.append(kept if block is None or not leaf.numel() else block[1].part(kept, leaf))
                copies.append((slot, leaf.detach()))
        self._results = results
        alone = self._spec is _LEAF and isinstance(results[0], Slot)
        self._only: Slot | None = results[0] if alone else None  # type: ignore[assignment]
        del self._flat, self._is_given, self._shared
        return tree_unflatten(handed, self._spec), copies

    @property
    def state(self) -> TorchState:
        """The state of the thread at capture."""
        return self._state

    def quick(self) -> Callable[[], object]:
        """``replay`` in the state of the capture, for a path on which every call counts; once `hand_out` was called.

        Results are compared with the last one that fitted by one compiled function, and only others one by one.
        """
        only = self._results[0] if self._spec is _LEAF else None
        if self._arguments.is_nested or isinstance(only, Given | Shared) or only is None:
            return self._run
        if isinstance(only, Frozen):
            return self._run if only.value is not None else self._expecting_none()
        bind, deliver = partial(self._arguments.bind, self._function), self._deliver
        (call, is_bound), accept, copy, is_alike = bind(), only.accept, only.tensor.copy_, _no

        def run() -> None:
            nonlocal call, is_bound, is_alike
            if not is_bound():
                call, is_bound = bind()
            result = call()
            if is_alike(result):
                copy(result)
            elif not accept(result):
                deliver(result)  # which says what is wrong
            else:
                is_alike = _no if result.requires_grad else exact_check((result,)) or _no

        return run

    def _expecting_none(self) -> Callable[[], None]:
        bind, deliver = partial(self._arguments.bind, self._function), self._deliver
        call, is_bound = bind()

        def run() -> None:
            nonlocal call, is_bound
            if not is_bound():
                call, is_bound = bind()
            result = call()
            if result is not None:
                deliver(result)

        return run

    def replay(self, now: TorchState) -> None:
        """Run again and bring the results to their slots; ``now`` is the state of the thread.

        Raises CaptureError if they are not what they were at capture; the function's own errors pass.
        """
        if self._state == now:
            self._run()
        else:
            with self._state.restored():
                self._run()

    def _run(self) -> None:
        args, kwargs = self._arguments.now()
        result = self._function(*args, **kwargs)
        if self._only is None or not self._only.accept(result):  # the common case, without a walk over a tree
            self._deliver(result)

    def _deliver(self, result: Any) -> None:
        flat: Sequence[Any]
        if result is None or isinstance(result, torch.Tensor):  # no walk over a tree either
            flat, spec = (result,), _LEAF
        else:
            flat, spec = tree_flatten(result)
        if spec is not self._spec and spec != self._spec:
            raise self._changed(f"the structure {spec}", f"{self._spec}")
        for kept, value in zip(self._results, flat, strict=True):
            if not kept.accept(value):
                found = kept.found(value) if isinstance(kept, Shared) else described(value)
                raise self._changed(found, kept.describe())

    def _check(self, leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor):
            if leaf.device != self._backend.device or leaf.layout is not torch.strided:
                raise CaptureError(
                    f"eager piece {self.name} returned {described(leaf)}, at {self.line}",
                    remedy=f"Return dense tensors on {self._backend.device}; a graph would not see others change.",
                )
        elif hides_tensors(leaf):
            raise CaptureError(
                f"eager piece {self.name} returned a {type(leaf).__name__}, whose tensors cannot be reached, at "
                f"{self.line}",
                remedy="Return tensors in tuples, lists and dicts, or register the class as a pytree node.",
            )

    def _new_slot(self, value: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False):  # else nothing outside of inference mode could write to it
            return self._backend.slot(value)

    def _edits_arguments(self) -> CaptureError:
        return CaptureError(
            f"eager piece {self.name} puts values into a list, dict or set that it was given, at {self.line}; graphs "
            "would keep those of the capture",
            remedy="Return the values, or write them in place into a tensor that is an argument. Keep what is only "
            "recorded in an object that is not handed to the piece.",
        )

    def _moves_arguments(self) -> CaptureError:
        return CaptureError(
            f"eager piece {self.name} gives a tensor that it was given other memory (set_, resize_, .data = ...), at "
            f"{self.line}; graphs would keep that of the capture",
            remedy="Return the new tensor, or write the values in place (copy_).",
        )

    def _changed(self, found: str, wanted: str) -> CaptureError:
        return CaptureError(
            f"eager piece {self.name} returned {found} on replay; at capture it was {wanted}, at {self.line}",
            remedy="Return the same structure, shapes, dtypes and numbers for every batch of a key: a number that "
            "changes as a tensor, rows that vary padded, results that share memory for some batches alone as clones. "
            "A BreakableCUDAGraphWrapper can tell batches apart with key_fn; a runner has none, and takes such a batch "
            "with runner.run_eagerly.",
        )


class TorchState(NamedTuple):
    """What of torch's thread-local state a model may set around a piece: on replay its ``with`` blocks do not run."""

    device: str
    grad: bool
    inference: bool
    autocast: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: str) -> TorchState:
        """The state of this thread."""
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device)
        return cls(device, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, dtype)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A block in this state."""
        autocast = torch.autocast(self.device, dtype=self.dtype, enabled=self.autocast)
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad), autocast:
            yield


def _no(_: object) -> bool:
    """The check that no result passes."""
    return False


def _address(tensor: torch.Tensor) -> int:
    """Where the tensor's storage begins; 0 if it has no memory."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _repeats(tensor: torch.Tensor) -> bool:
    """Whether elements of an expanded tensor share memory, so that it cannot be copied into."""
    return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All memory that the tensor is a view of, as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _view_like(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A view of bytes with the layout that ``like`` has in its own memory, but without its bits."""
    whole = memory[: memory.numel() - memory.numel() % like.itemsize].view(like.dtype)
    return whole.as_strided(like.shape, like.stride(), like.storage_offset())


def _with_bits(plain: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The same memory, read as ``like`` reads its own: views of one memory may differ in these bits alone."""
    plain = plain.conj() if like.is_conj() else plain
    return torch._neg_view(plain) if like.is_neg() else plain


__all__ = ["Block", "Frozen", "Given", "PieceArguments", "Shared", "Slot", "described"]
