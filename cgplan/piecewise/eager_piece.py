"""Eager pieces: functions that run between two segments, at capture and again on every replay.

Note [Output slots]
    A segment reads the result of an eager piece at the address that it saw at capture, and a piece may return a fresh
    tensor each time. So the model gets a slot: memory of the graph pool, allocated at the beginning of the segment that
    follows. The result is copied into its slot before that segment runs. Memory of the arguments stays at its address
    and needs no slot; nor does state: parameters, buffers and tensors in attributes of the modules that the piece was
    called on or with, and that it does not bind again. Segments may write to both in place. State that a piece reaches
    in another way (a global, a closure, an object that is not a module) is copied like any other result. Results that
    are views of one memory have slots that are views of one block: segments may write to one and read another.

Note [State that a piece leaves behind]
    The model's Python code runs at capture alone, so only memory carries values from pieces to segments. An attribute
    of a module that the piece binds to a new tensor has a slot, too, which the attribute holds until the capture ends;
    the slot follows the attribute as long as shape and dtype stay. A piece is refused that puts values into a list or
    dict that it was given, or that gives a tensor other memory: the segments would go on with the values of the
    capture. A piece does not see an attribute that a segment binds: on replay the attribute holds the tensor of the
    last capture. Pass such tensors as arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import is_namedtuple_instance, tree_flatten, tree_leaves, tree_unflatten

from cgplan.backends import GraphBackend
from cgplan.backends.backend import autocast_cache
from cgplan.backends.host_sync import tensors_in
from cgplan.buffers.outputs import hides_tensors
from cgplan.errors import CaptureError
from cgplan.graphs.ambient import AmbientState
from cgplan.graphs.footprint import modules_reached

_LEAF = tree_flatten(None)[1]
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # other classes may have no memory of their own


class EagerPiece:
    """One function between two segments, with its arguments and the places of its results.

    It owns no pool memory: slots and captured arguments are borrowed. Each run of a user's function gets new tensor
    objects on the memory of the capture, so that the function may change the objects (``transpose_``); operators of a
    trace do not, and get the same objects each time: each new object costs the host a microsecond.

    Attributes:
        name: For messages: the function's qualified name, the module's dotted name, or the splitting operator.
        line: Where the model called it.
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
        self._is_traced = is_traced
        self.state = AmbientState.now(backend.device.type)
        self._function = function
        self._backend = backend
        self._pool = pool
        self._lent: list[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor]] = []  # slot, and the piece's value
        self._bound: list[tuple[torch.nn.Module, str, Any]] = []  # the value at capture, then its slot

    def __repr__(self) -> str:
        return f"EagerPiece({self.name!r}, called at {self.line})"

    def first_run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run on the arguments of the capture and keep them."""
        modules = modules_reached(self._function, args, kwargs)
        before, given = _attributes(modules), tree_leaves((args, kwargs))
        tensors = tensors_in(given)
        addresses = list(map(_address, tensors))
        self._keep_arguments(args, kwargs)
        with autocast_cache(on=True):
            result = self._function(*args, **kwargs)
        self._refuse_changed_arguments(given, tree_leaves((args, kwargs)))
        if list(map(_address, tensors)) != addresses:
            raise CaptureError(
                f"eager piece {self.name} gives a tensor that it was given other memory (set_, resize_, .data = ...), "
                f"at {self.line}; graphs would keep that of the capture",
                remedy="Return the new tensor, or write the values in place (copy_).",
            )
        after = _attributes(modules)
        parameters = [p for module in modules for p in module._parameters.values()]
        state = {_address(t) for t in (*before.values(), *parameters) if type(t) in _PLAIN}
        state &= {_address(t) for t in (*after.values(), *parameters) if type(t) in _PLAIN}
        own = set(addresses) - {0}

        def is_kept(leaf: Any) -> bool:
            if not isinstance(leaf, torch.Tensor) or (address := _address(leaf)) == 0:
                return False
            return address in own or (address in state and not self._backend.in_pool(leaf, self._pool))

        self._flat, self._spec = tree_flatten(result)
        self._is_kept = list(map(is_kept, self._flat))
        self._bound = [
            (module, name, value)
            for (module, name), value in after.items()
            if before.get((module, name)) is not value
            and type(value) is torch.Tensor
            and not is_kept(value)
            and value.layout is torch.strided
            and value.device == self._backend.device
            and not _repeats(value)
        ]
        for leaf in self._flat:
            self._check(leaf)
        fresh = [
            leaf
            for leaf, is_kept in zip(self._flat, self._is_kept, strict=True)
            if isinstance(leaf, torch.Tensor) and not is_kept and not _repeats(leaf)
        ]
        counts = Counter(map(_address, fresh))
        self._shared = {a: _bytes(t) for t in fresh if (a := _address(t)) and counts[a] > 1}

    def hand_out(self) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
        """The result for the model, and the copies (slot, value) to make before the next segment runs.

        Called once, inside that segment's capture, see Note [Output slots].
        """
        blocks = {address: (self._new_slot(memory), list[Any]()) for address, memory in self._shared.items()}
        handed, copies, results = [], [], list[_Result]()
        for leaf, is_kept in zip(self._flat, self._is_kept, strict=True):
            handed.append(leaf)
            if not isinstance(leaf, torch.Tensor):
                results.append(Constant(leaf, _numbers_in(leaf)))
            elif is_kept:
                results.append(PassThrough(leaf.data_ptr(), _facts(leaf)))
            else:
                block = None if _repeats(leaf) else blocks.get(_address(leaf))
                handed[-1] = plain = self._new_slot(leaf) if block is None else _view_like(block[0], leaf)
                slot = self._borrowed(plain)
                if block is not None:  # after borrowing, which would lose the bits
                    handed[-1], slot = _with_bits(plain, leaf), _with_bits(slot, leaf)
                copied = CopiedResult(slot)
                shares = block is not None and leaf.numel() > 0
                results.append(AliasedResult.of(copied, leaf, block[1]) if block and shares else copied)
                copies.append((slot, leaf.detach()))
        self._results = results
        self._only = results[0] if self._spec == _LEAF else None
        self._is_flat = self._spec.type is tuple and len(results) == self._spec.num_children
        del self._flat, self._is_kept, self._shared
        for module, name, value in self._bound:
            slot = self._new_slot(value)
            setattr(module, name, slot)
            self._lent.append((module, name, slot, value))
            copies.append((self._borrowed(slot), value.detach()))
        self._bound = [(module, name, CopiedResult(self._borrowed(slot))) for module, name, slot, _ in self._lent]
        return tree_unflatten(handed, self._spec), copies

    def end_capture(self) -> None:
        """Give attributes that hold slots the values back that the piece has bound."""
        for module, name, slot, value in self._lent:
            if getattr(module, name, None) is slot:
                setattr(module, name, value)
        self._lent = []

    def run(self) -> None:
        """Run again, in ``state``, and bring the results to their slots.

        Raises CaptureError if they are not what they were at capture; the function's own errors pass.
        """
        leaves = self._kept if self._is_traced else [t.detach() if is_new else t for t, is_new in self._leaves]
        if self._nested is not None:  # new lists and dicts each time, in case the function edits them
            args, kwargs = tree_unflatten(leaves, self._nested)
            result = self._function(*args, **kwargs)
        elif self._names:
            count = len(leaves) - len(self._names)
            result = self._function(*leaves[:count], **dict(zip(self._names, leaves[count:], strict=True)))
        else:
            result = self._function(*leaves)
        if self._only is not None:  # the common cases, without a walk over a tree
            fits = self._only.accept(result)
        else:
            fits = self._is_flat and type(result) is tuple and len(result) == len(self._results)
            fits = fits and all(map(_accepts, self._results, result))
        if not fits:
            self._deliver(result)
        for module, name, slot in self._bound:
            slot.accept(getattr(module, name, None))

    def _keep_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tensors of the pool are borrowed: later segments reuse their blocks, and each replay writes them before the
        piece reads them. Other objects are held; tuples, lists and dicts with captured tensors are looked into.
        """
        inside = {id(t) for t in tensors_in((args, kwargs)) if self._backend.in_pool(t, self._pool)}

        def is_leaf(node: Any) -> bool:  # a list without captured tensors stays the same list, whoever edits it
            looked_into = type(node) in (tuple, list, dict) or is_namedtuple_instance(node)
            return not looked_into or not any(id(leaf) in inside for leaf in tree_leaves(node))

        def kept(leaf: Any) -> tuple[Any, bool]:
            if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided:
                return leaf, False
            is_plain = id(leaf) in inside and not leaf.is_conj() and not leaf.is_neg()  # borrowing loses those bits
            return (self._backend.borrow(leaf) if is_plain else leaf).detach(), True

        given, self._nested, self._names = [*args, *kwargs.values()], None, tuple(kwargs)
        if not all(map(is_leaf, given)):
            given, self._nested = tree_flatten((args, kwargs), is_leaf=is_leaf)
        self._leaves = list(map(kept, given))
        self._kept = [leaf for leaf, _ in self._leaves]

    def _deliver(self, result: Any) -> None:
        flat, spec = tree_flatten(result)
        if spec != self._spec:
            raise self._changed(f"the structure {spec}", f"{self._spec}")
        for kept, value in zip(self._results, flat, strict=True):
            if not kept.accept(value):
                apart = isinstance(kept, AliasedResult) and kept.copied.fits(value)
                also = ", which does not share memory with other results as it did," if apart else ""
                raise self._changed(f"{described(value)}{also}", str(kept))

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

    def _borrowed(self, slot: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False):
            return self._backend.borrow(slot)

    def _refuse_changed_arguments(self, before: Sequence[Any], after: Sequence[Any]) -> None:
        """Values may be taken out of lists and dicts that the piece was given, but none put in."""
        rest = iter(before)
        if not all(any(old is new for old in rest) for new in after):
            raise CaptureError(
                f"eager piece {self.name} puts values into a list or dict that it was given, at {self.line}; graphs "
                "would keep those of the capture",
                remedy="Return the values, or write them in place into a tensor that is an argument. Keep records in "
                "an object that is not handed to the piece.",
            )

    def _changed(self, found: str, wanted: str) -> CaptureError:
        return CaptureError(
            f"eager piece {self.name} returned {found} on replay; at capture it was {wanted}, at {self.line}",
            remedy="Return the same structure, shapes, dtypes and numbers for every batch of a key: a number that "
            "changes as a tensor, rows that vary padded, results that share memory for some batches alone as clones. "
            "A BreakableCUDAGraphWrapper can tell batches apart with key_fn; a runner has none, and takes such a batch "
            "with runner.run_eagerly.",
        )


class CopiedResult:
    """A fresh tensor: each replay copies it into its slot."""

    def __init__(self, slot: torch.Tensor) -> None:
        self.slot = slot
        self._shape, self._dtype, self._device = slot.shape, slot.dtype, slot.device

    def fits(self, value: Any) -> bool:
        """Whether shape, dtype and device are those of the capture."""
        if not isinstance(value, torch.Tensor) or value.shape != self._shape:
            return False
        return value.dtype is self._dtype and value.device == self._device

    def accept(self, value: Any) -> bool:
        """Copy ``value`` in; False if it does not fit."""
        if not self.fits(value):
            return False
        self.slot.copy_(value.detach() if value.requires_grad else value)
        return True

    def __str__(self) -> str:
        return described(self.slot)


class AliasedResult(NamedTuple):
    """A fresh tensor that is a view of one memory with others: it is copied if it lies to the first as at capture.

    ``first`` is shared by them: (address of the memory, byte at which the first begins), at capture, then of each run.
    """

    copied: CopiedResult
    first: list[Any]
    distance: int  # from the first, in bytes
    is_first: bool
    layout: tuple[Any, ...]

    @classmethod
    def of(cls, copied: CopiedResult, result: torch.Tensor, first: list[Any]) -> AliasedResult:
        """The next of the results of one memory, as it was returned at capture."""
        is_first = not first
        if is_first:
            first[:] = _address(result), _begin_of(result)
        return cls(copied, first, _begin_of(result) - first[1], is_first, _layout_of(result))

    def accept(self, value: Any) -> bool:
        """As CopiedResult's, once those before it were asked."""
        if not self.copied.fits(value) or value.layout is not torch.strided:
            return False
        place = [_address(value), _begin_of(value) - self.distance]
        if self.is_first:
            self.first[:] = place
        return place == self.first and _layout_of(value) == self.layout and self.copied.accept(value)

    def __str__(self) -> str:
        return f"{self.copied}, in one memory with another result"


class PassThrough(NamedTuple):
    """Memory of an argument, or of the state of a module: it is there already."""

    address: int
    facts: tuple[Any, ...]

    def accept(self, value: Any) -> bool:
        """Whether ``value`` is that memory again."""
        return isinstance(value, torch.Tensor) and value.data_ptr() == self.address and _facts(value) == self.facts

    def __str__(self) -> str:
        return f"its own argument's memory, or a module's, at {self.address:#x}, of shape {list(self.facts[0])}"


class Constant(NamedTuple):
    """A value that is not a tensor: the segments were captured with it."""

    value: Any
    numbers: str

    def accept(self, value: Any) -> bool:
        """Whether ``value`` is equal, with the numbers in its attributes; NaN equals NaN."""
        mine = self.value
        if _numbers_in(value) != self.numbers:
            return False
        try:
            return mine is value or (type(mine) is type(value) and bool(mine == value or (mine != mine != value)))
        except Exception:  # whatever a foreign class raises when it is compared
            return False

    def __str__(self) -> str:
        return described(self.value) + (f" with {self.numbers}" if self.numbers else "")


_Result = CopiedResult | AliasedResult | PassThrough | Constant


def _accepts(kept: _Result, value: Any) -> bool:
    return kept.accept(value)


def described(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, torch.Tensor):
        layout = "" if value.layout is torch.strided else f" {value.layout}"
        return f"a{layout} tensor of shape {list(value.shape)}, {value.dtype}, on {value.device}"
    return f"{value!r:.200}"


def _numbers_in(value: Any) -> str:
    """Numbers, flags and strings in the attributes of an object, to compare."""
    held = getattr(value, "__dict__", None)
    if not isinstance(held, dict):
        return ""
    return repr({name: item for name, item in held.items() if item is None or isinstance(item, int | float | str)})


def _attributes(modules: Sequence[torch.nn.Module]) -> dict[tuple[torch.nn.Module, str], Any]:
    """Attributes and buffers by module and name."""
    return {(m, name): value for m in modules for d in (vars(m), m._buffers) for name, value in d.items()}


def _address(tensor: torch.Tensor) -> int:
    """Where the tensor's storage begins; 0 if it has no memory."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _begin_of(tensor: torch.Tensor) -> int:
    """Where the tensor begins in its storage, in bytes."""
    return int(tensor.storage_offset() * tensor.itemsize)


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How the tensor reads its memory, but for where it begins; of a dimension of one element the stride is any."""
    strides = [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return (*strides, tensor.is_conj(), tensor.is_neg())


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
