"""The recorder of the tape backend: each operator with its storages, and operators that need the
host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from cgplan.backends.backend import tensor_on
from cgplan.backends.blame import blamed_line
from cgplan.backends.host_sync import (
    ALLOCATIONS,
    Args,
    Kwargs,
    Refusals,
    as_its_caller,
    count_writes,
    implemented_in_python,
    is_composite,
    refuse_host,
    tensors_in,
    written_tensors,
)
from cgplan.backends.tape_pool import TapePool
from cgplan.errors import CaptureError

_WRITE_AS_THEY_RETURN = tuple(
    f"aten::{n}" for n in ("mm", "addmm", "bmm", "baddbmm", "_softmax", "cat", "index")
)


@dataclass(frozen=True)
class Step:
    """One operator of a tape: ``call(*args, **kwargs)``, and where its fresh results are copied
    to.
    """

    call: Callable[..., Any]
    args: Args
    kwargs: Kwargs
    copies: tuple[tuple[int, Tensor], ...]  # (index among the flat results, slot)
    is_posted: bool = False  # a send or a receive, which may need those behind it to finish


@dataclass(slots=True)
class _Stretch:
    """A part of a recording that can be undone: memory and generators from before it, and what they
    held then.
    """

    held: frozenset[int]  # blocks of the pool
    generators: dict[int, tuple[torch.Generator, Tensor]]
    saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = field(
        default_factory=dict
    )

    def undo(self) -> None:
        for storage, before in self.saved.values():
            storage.copy_(before)
        for generator, state in self.generators.values():
            generator.set_state(state)


class Recorder(TorchDispatchMode):
    """Hands the operators of a thread to the tape that records, and lets them pass while none does.

    A capture may end, and the next one begin, inside an operator or a backward. torch puts the
    modes from before those back after them, so all tapes of a thread have one mode.
    """

    tape: Tape | None = None

    @contextmanager
    def recording(self, tape: Tape) -> Iterator[None]:
        """A block whose operators go to ``tape``."""
        if self not in _get_current_dispatch_mode_stack():
            _push_mode(self)
        self.tape = tape
        try:
            yield
        finally:
            self.tape = None
            self.leave()

    def leave(self) -> None:
        """Take the mode off the stack."""
        if _get_current_dispatch_mode() is self:
            _pop_mode()

    @contextmanager
    def _on(self) -> Iterator[None]:
        """A block inside an operator, for which torch took the mode off; a capture may have ended
        in it.
        """
        _push_mode(self)
        try:
            yield
        finally:
            self.leave()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Record one operator."""
        kwargs, tape = kwargs or {}, self.tape
        if tape is None:
            return func(*args, **kwargs)
        # look inside: its Python code must not run again on replay
        if implemented_in_python(func, "CPU"):
            return self._look_inside(tape, func, args, kwargs)
        # in inference mode these come whole, and would hide host reads
        if is_composite(func, "CPU"):
            with self._on():
                return as_its_caller(func, func.decompose, "cpu")(*args, **kwargs)
        refuse_host(func, args, kwargs, tape.refusals)
        return tape.record(func, args, kwargs)

    def _look_inside(self, tape: Tape, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Record the operators of one that was written in Python; the whole of it where it needs
        the host.
        """
        refusals, name = tape.refusals, func._schema.name
        before = refusals.first
        count_writes(func, args, kwargs)
        with tape.stretch() as undo:
            try:
                cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
                with self._on():
                    result = as_its_caller(func, func.redispatch, "cpu")(cpu, *args, **kwargs)
            except Exception:
                if refusals.first is before or self.tape is not tape:
                    raise
            if refusals.first is before or self.tape is not tape:
                return result
            undo()
        assert refusals.first is not None
        told = (
            f"{refusals.first.message}; the tape calls operator {name} again on each replay, a "
            "GPU may refuse it"
        )
        tape.notes[told] = None
        refusals.first, refusals.is_on = before, False
        try:
            result = tape.record(func, args, kwargs)
        finally:
            refusals.is_on = True
        if self.tape is not tape:
            raise CaptureError(
                f"operator {name} needs the host, and breaks the capture as well, at "
                f"{blamed_line()}",
                remedy="Read the value inside the eager piece.",
            )
        return result


class Tape:
    """Runs the operators of a forward once and keeps them as ``steps`` whose tensors lie at fixed
    addresses.

    Results of operators are placed in the pool. Views make no step, because addresses do not
    change. Memory from before the recording that is written to gets its old bytes back in
    ``finish``, and so do random generators: on a GPU, too, a capture runs nothing.

    Attributes:
        constants: Addresses of storages that hold numbers of the Python code.
        runs_operator: Whether an operator of the forward runs, not one of the tape's own.
    """

    def __init__(self, pool: TapePool) -> None:
        self.steps: list[Step] = []
        self.refusals = Refusals()
        self.notes: dict[str, None] = {}
        self.constants: set[int] = set()
        self.runs_operator = False
        self._pool = pool
        # Tensors of an earlier graph that are dropped while this one records: their blocks are
        # reused and overwritten.
        self._earlier = [(storage, storage.clone()) for storage in pool.aliases.values()]
        default = torch.default_generator
        self._stretches = [
            _Stretch(frozenset(pool.aliases), {id(default): (default, default.get_state())})
        ]

    def finish(self) -> None:
        """Undo writes of the recording outside the pool, and to blocks that were taken before."""
        self._stretches[0].undo()
        for storage, before in self._earlier:
            storage.copy_(before)

    @contextmanager
    def stretch(self) -> Iterator[Callable[[], None]]:
        """A block of operators; gives a function that undoes and forgets them."""
        known = [generator for generator, _ in self._stretches[0].generators.values()]
        inner = _Stretch(frozenset(self._pool.aliases), {id(g): (g, g.get_state()) for g in known})
        first = len(self.steps)

        def undo() -> None:
            inner.undo()
            del self.steps[first:]

        self._stretches.append(inner)
        try:
            yield undo
        finally:
            self._stretches.pop()

    def record(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run an operator and keep it."""
        schema = func._schema
        given = tensors_in((args, kwargs))
        for tensor in given:
            if tensor.device.type not in ("cpu", "meta") or tensor.layout is not torch.strided:
                raise CaptureError(
                    f"operator {schema.name} has a {tensor.layout} tensor on {tensor.device}, at "
                    f"{blamed_line()}",
                    remedy="The tape records dense tensors on the CPU; use device: cuda for "
                    "others.",
                )
        self._save(func, args, kwargs)
        is_collective = func.namespace in ("c10d", "_c10d_functional")
        call = as_its_caller(func, func, "cpu")
        if func.namespace == "_c10d_functional":
            call = partial(_awaited, func)
        # a constant of the Python code: each replay gets a fresh copy
        if func is torch.ops.aten.lift_fresh.default:
            call = torch.ops.aten.clone.default
            self.constants |= {tensor.untyped_storage().data_ptr() for tensor in given}
        old = {t.untyped_storage()._cdata for t in given}
        # before the operator changes their layout
        fixed = tree_map_only(Tensor, self._fixed, (args, kwargs))
        self.runs_operator = True
        try:
            flat, spec = tree_flatten(call(*args, **kwargs))
        finally:
            self.runs_operator = False
        if func._opname.startswith("_foreach_"):
            count_writes(func, args, kwargs)
        results = {i: t for i, t in enumerate(flat) if isinstance(t, Tensor)}
        fresh = {
            i: t
            for i, t in results.items()
            if t.untyped_storage()._cdata not in old and not _is_void(t)
        }
        placed = self._place(fresh)
        writes = schema.is_mutable and torch.Tag.inplace_view not in func.tags
        is_view = not fresh and not writes and bool(results)
        if is_view and func.namespace != "aten" and not all(r.alias_info for r in schema.returns):
            is_view = False  # it returns an argument without saying so: it may have written to it
            if not is_collective:
                self.notes[
                    f"operator {schema.name} returns an argument, and its schema does not say why"
                ] = None
        if not is_view and schema.name.removeprefix("aten::") not in ALLOCATIONS:
            self._add_step(func, call, fixed, placed, len(flat))
        result = tree_unflatten([placed.get(i, value) for i, value in enumerate(flat)], spec)
        self.refusals.follow(func, args, kwargs, result)
        return result

    def _add_step(
        self, func: Any, call: Any, given: tuple[Any, Any], placed: dict[int, Tensor], results: int
    ) -> None:
        args, kwargs = given
        slots = {i: self._fixed(tensor) for i, tensor in placed.items()}
        step = Step(call, args, kwargs, tuple(slots.items()))
        if func.namespace == "c10d":  # the forward waits for itself, a replay must
            is_posted = func in (torch.ops.c10d.send.default, torch.ops.c10d.recv_.default)
            step = replace(
                step, call=func if is_posted else partial(_awaited, func), is_posted=is_posted
            )
        elif slots and len(slots) == results and (out := _out_variant(func)) is not None:
            overload, names = out  # writes into the slots at once, without a copy
            known = {a.name for a in overload._schema.arguments}
            # the slot has dtype and device
            kept = {name: value for name, value in kwargs.items() if name in known}
            step = Step(overload, args, kept | dict(zip(names, slots.values(), strict=True)), ())
        self.steps.append(step)

    def _place(self, made: dict[int, Tensor]) -> dict[int, Tensor]:
        """Fresh results moved into the pool; results that share a storage share a block."""
        storages: dict[int, torch.UntypedStorage] = {}
        placed = {}
        for i, tensor in made.items():
            source = tensor.untyped_storage()
            if source._cdata not in storages:
                storages[source._cdata] = taken = self._pool.take(source.nbytes())
                if source.nbytes():
                    _bytes(taken, source.nbytes()).copy_(_bytes(source, source.nbytes()))
            placed[i] = tensor_on(storages[source._cdata], tensor)
        return placed

    def _fixed(self, tensor: Tensor) -> Tensor:
        """The tensor as the tape keeps it: the same memory, but no hold on a pool block, and deaf
        to ``.data =``.
        """
        alias = self._pool.alias_of(tensor.untyped_storage())
        return tensor.detach() if alias is None else tensor_on(alias, tensor)

    def _save(self, func: Any, args: Args, kwargs: Kwargs) -> None:
        """Keep the bytes of memory, and the generator's state, that the operator is about to
        change.
        """
        for tensor in written_tensors(func, args, kwargs):
            storage = tensor.untyped_storage()
            for part in self._stretches:
                inside = (
                    self._pool.alias_of(storage) is not None and storage._cdata not in part.held
                )
                if storage.nbytes() and storage._cdata not in part.saved and not inside:
                    part.saved[storage._cdata] = (storage, storage.clone())
        if (generator := kwargs.get("generator")) is not None:
            for part in self._stretches:
                part.generators.setdefault(id(generator), (generator, generator.get_state()))


def _awaited(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a collective, and wait for what it returns."""
    result = func(*args, **kwargs)
    _wait(result)
    return result


def _wait(results: Any) -> None:
    for leaf in tree_leaves(results):
        torch.ops._c10d_functional.wait_tensor(leaf) if isinstance(leaf, Tensor) else leaf.wait()


def replay(steps: list[Step]) -> None:
    """Run the steps of a tape."""
    # A capture in inference mode left tensors that may be written to only there. Autocast did its
    # part while recording.
    with torch.inference_mode(), torch.autocast("cpu", enabled=False):
        posted = list[Any]()
        for step in steps:
            if posted and not step.is_posted:
                _wait(posted)
                posted.clear()
            result = step.call(*step.args, **step.kwargs)
            if step.is_posted:
                posted.append(result)
            if step.copies:
                flat = tree_flatten(result)[0]
                for i, slot in step.copies:
                    slot.copy_(flat[i])
        _wait(posted)


def _is_void(tensor: Tensor) -> bool:
    """Whether it has no memory: derivatives that are zero, and tensors that an ``out=`` is about to
    grow.
    """
    storage = tensor.untyped_storage()
    return tensor._is_zerotensor() or storage.device.type == "meta" or not storage.nbytes()


def _bytes(storage: torch.UntypedStorage, nbytes: int) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (nbytes,), (1,))


@cache
def _out_variant(func: Any) -> tuple[Any, tuple[str, ...]] | None:
    """The overload of ``func`` that writes into given results, and their names; None if there is
    none, or it may grow its results on the way, which memory of the pool cannot, or round in
    another order.
    """
    if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    if torch.Tag.pointwise not in func.tags and func._schema.name not in _WRITE_AS_THEY_RETURN:
        return None
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        known = overload._schema.arguments
        outs = {a.name: str(a.type) for a in known if a.is_out}
        taken = [(a.name, str(a.type)) for a in known if not a.is_out]
        # an out variant may leave dtype, layout and device to its result
        left_out = {"dtype", "layout", "device", "pin_memory"} - {a.name for a in known}
        given = [(a.name, str(a.type)) for a in func._schema.arguments if a.name not in left_out]
        if outs and taken == given and [*outs.values()] == ["Tensor"] * len(func._schema.returns):
            return overload, tuple(outs)
    return None
