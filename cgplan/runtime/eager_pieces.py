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
from torch.utils._pytree import tree_flatten, tree_unflatten

from cgplan.errors import CaptureError
from cgplan.graphs import GraphBackend
from cgplan.graphs.host_sync import tensors_in
from cgplan.graphs.operator_log import marked
from cgplan.runtime.batch import exact_check
from cgplan.runtime.frozen import Containers, contents, modules_of, state_of
from cgplan.runtime.outputs import hides_tensors
from cgplan.runtime.piece_arguments import PieceArguments
from cgplan.runtime.piece_results import Block, Frozen, Given, Shared, Slot, described

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
