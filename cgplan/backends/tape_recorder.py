"""The recorder of the tape backend: each operator with its storages, and operators that need the host."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from cgplan.backends.backend import tensor_on
from cgplan.backends.blame import blamed_line
from cgplan.backends.host_sync import (
    HostGuard,
    Refusals,
    count_writes,
    implemented_in_python,
    is_composite,
    refuse_host,
    tensors_in,
    written_tensors,
)
from cgplan.backends.tape_pool import TapePool
from cgplan.errors import CaptureError

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of a tape: ``call(*args, **kwargs)``, and where its fresh results are copied to."""

    call: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    copies: tuple[tuple[int, torch.Tensor], ...]  # (index among the flat results, slot)


class Recorder(TorchDispatchMode):
    """Runs the operators of a forward once and keeps them as ``steps`` whose tensors lie at fixed addresses.

    Results of operators are placed in the pool. Views make no step, because addresses do not change. Memory from before
    the recording that is written to gets its old bytes back in ``finish``, and so do random generators: on a GPU, too,
    a capture runs nothing.
    """

    def __init__(self, pool: TapePool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self.refusals = Refusals()
        self._pool = pool
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._held = frozenset(pool.aliases)
        # Tensors of an earlier graph that are dropped while this one records: their blocks are reused and overwritten.
        self._earlier = [(storage, storage.clone()) for storage in pool.aliases.values()]
        default = torch.default_generator
        self._generators = {id(default): (default, default.get_state())}

    def finish(self) -> None:
        """Undo writes of the recording outside the pool, and to blocks that were taken before."""
        for storage, before in (*self._saved.values(), *self._earlier):
            storage.copy_(before)
        for generator, state in self._generators.values():
            generator.set_state(state)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record one operator."""
        kwargs = kwargs or {}
        if implemented_in_python(func, "CPU"):  # look inside: its Python code must not run again on replay
            count_writes(func, args, kwargs)
            with self, HostGuard(self.refusals):  # the call of the operator left the guard around the capture
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        if is_composite(func):  # in inference mode these come whole, and would hide host reads
            with self:
                return func.decompose(*args, **kwargs)
        refuse_host(func, args, kwargs, self.refusals)
        given = tensors_in((args, kwargs))
        for tensor in given:
            if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
                raise CaptureError(
                    f"operator {func._schema.name} has a {tensor.layout} tensor on {tensor.device}, at {blamed_line()}",
                    remedy="The tape records dense tensors on the CPU; use device: cuda for others.",
                )
        self._save_written(func, args, kwargs)
        if (generator := kwargs.get("generator")) is not None:
            self._generators.setdefault(id(generator), (generator, generator.get_state()))
        if func is torch.ops.aten.lift_fresh.default:  # a constant of the Python code: each replay gets a fresh copy
            func = torch.ops.aten.clone.default
        old = {t.untyped_storage()._cdata for t in given}
        fixed = tree_map_only(torch.Tensor, self._fixed, (args, kwargs))  # before the operator changes their layout
        flat, spec = tree_flatten(func(*args, **kwargs))
        fresh = {
            i: t for i, t in enumerate(flat) if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in old
        }
        placed = self._place(fresh)
        writes = func._schema.is_mutable and torch.Tag.inplace_view not in func.tags
        is_view = not fresh and not writes and any(isinstance(t, torch.Tensor) for t in flat)
        if not is_view and func._schema.name.removeprefix("aten::") not in ALLOCATIONS:
            self._add_step(func, fixed, placed, len(flat))
        return tree_unflatten([placed.get(i, value) for i, value in enumerate(flat)], spec)

    def _add_step(self, func: Any, given: tuple[Any, Any], placed: dict[int, torch.Tensor], results: int) -> None:
        args, kwargs = given
        slots = {i: self._fixed(tensor) for i, tensor in placed.items()}
        if slots and len(slots) == results and (out := _out_variant(func)) is not None:
            overload, names = out  # writes into the slots at once, without a copy
            known = {a.name for a in overload._schema.arguments}
            kept = {name: value for name, value in kwargs.items() if name in known}  # the slot has dtype and device
            step = Step(overload, args, kept | dict(zip(names, slots.values(), strict=True)), ())
            if _gives_the_same(step, names):
                self.steps.append(step)
                return
        self.steps.append(Step(func, args, kwargs, tuple(slots.items())))

    def _place(self, made: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
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

    def _fixed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the tape keeps it: the same memory, but no hold on a pool block, and deaf to ``.data =``."""
        alias = self._pool.alias_of(tensor.untyped_storage())
        return tensor.detach() if alias is None else tensor_on(alias, tensor)

    def _save_written(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the bytes of outside memory that the operator is about to write."""
        for tensor in written_tensors(func, args, kwargs):
            storage = tensor.untyped_storage()
            inside = self._pool.alias_of(storage) is not None and storage._cdata not in self._held
            if storage._cdata not in self._saved and not inside:
                self._saved[storage._cdata] = (storage, storage.clone())


def replay(steps: list[Step]) -> None:
    """Run the steps of a tape."""
    with torch.inference_mode():  # a capture in inference mode left tensors that may be written to only there
        for step in steps:
            result = step.call(*step.args, **step.kwargs)
            if step.copies:
                flat = tree_flatten(result)[0]
                for i, slot in step.copies:
                    slot.copy_(flat[i])


def _bytes(storage: torch.UntypedStorage, nbytes: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (nbytes,), (1,))


def _gives_the_same(step: Step, names: tuple[str, ...]) -> bool:
    """Whether an out variant, tried on scratch memory, keeps its layout and writes the values of the slots.

    Some grow their result on the way, which memory of the pool cannot, or round in another order.
    """
    slots = [step.kwargs[name] for name in names]
    scratch = [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype) for t in slots]
    for tensor in scratch:
        nbytes = tensor.untyped_storage().nbytes()
        _bytes(tensor.untyped_storage(), nbytes).fill_(0xA5)
    places = [(t.data_ptr(), t.size(), t.stride()) for t in scratch]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of results that grow
            step.call(*step.args, **{**step.kwargs, **dict(zip(names, scratch, strict=True))})
    except (RuntimeError, TypeError):
        return False
    if places != [(t.data_ptr(), t.size(), t.stride()) for t in scratch]:
        return False
    return all(torch.equal(_raw(a), _raw(b)) for a, b in zip(scratch, slots, strict=True))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements as bytes: NaN equals NaN."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu")
    return flat.copy_(tensor.reshape(-1)).view(torch.uint8)


@cache
def _out_variant(func: Any) -> tuple[Any, tuple[str, ...]] | None:
    """The overload of ``func`` that writes into given results, and their names; None if there is none."""
    if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:  # could not be tried
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
