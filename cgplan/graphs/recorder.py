"""What the tape backend sees while it records: each operator, its storages, and what needs the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from cgplan.errors import CaptureError, HostSyncError
from cgplan.graphs.source import current_line
from cgplan.graphs.tape_pool import TapePool

_REMEDY = (
    "Keep the value on the device (torch.where, masked_fill, index_select with a fixed number of rows), "
    "compute it before the graph, or keep this part out of it."
)
_HOST_METHODS = {
    torch.Tensor.cpu: "cpu",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.tolist: "tolist",
    torch.Tensor.__array__: "__array__",
}
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of a tape: ``call(*args, **kwargs)``, and where its fresh results are copied to."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    copies: tuple[tuple[int, torch.Tensor], ...]  # (index among the flat results, slot)


class HostGuard(TorchFunctionMode):
    """Refuses tensor methods that, on a CPU, move values to the host without passing the dispatcher."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse ``.cpu()``, ``.numpy()``, ``.tolist()``; hand on anything else."""
        name = _HOST_METHODS.get(func)
        if name is not None:
            raise HostSyncError(f"Tensor.{name}() needs the host inside a capture, at {current_line()}", remedy=_REMEDY)
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Runs the operators of a forward once and keeps them as steps whose tensors lie at fixed addresses.

    Tensors that operators make are placed in the pool. Views make no step, because addresses do not change. Memory
    from before the recording that is written to gets its old bytes back in ``finish``, and so does the random
    generator: on a GPU, too, a capture runs nothing.
    """

    def __init__(self, pool: TapePool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self._pool = pool
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._rng = torch.get_rng_state()

    def finish(self) -> None:
        """Undo what the recording wrote outside the pool."""
        for storage, before in self._saved.values():
            storage.copy_(before)
        self._saved.clear()
        torch.set_rng_state(self._rng)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record one operator."""
        kwargs = kwargs or {}
        if _implemented_in_python(func):  # look inside: its Python code must not run again on replay
            with self:
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        _refuse_host(func, args, kwargs)
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        _refuse_foreign(func, given)
        self._save_written(func, args, kwargs)
        if func is torch.ops.aten.lift_fresh.default:  # a constant of the Python code: each replay gets a fresh copy
            func = torch.ops.aten.clone.default
        old = {t.untyped_storage()._cdata for t in given}
        flat, spec = tree_flatten(func(*args, **kwargs))
        fresh = [i for i, t in enumerate(flat) if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in old]
        placed = self._place({i: flat[i] for i in fresh})
        is_view = not fresh and not func._schema.is_mutable and any(isinstance(t, torch.Tensor) for t in flat)
        if not is_view and func._schema.name.removeprefix("aten::") not in _ALLOCATIONS:
            self._add_step(func, args, kwargs, placed, len(flat))
        for i, tensor in placed.items():
            flat[i] = tensor
        return tree_unflatten(flat, spec)

    def _add_step(self, func: Any, args: Any, kwargs: Any, placed: dict[int, torch.Tensor], results: int) -> None:
        args, kwargs = tree_map_only(torch.Tensor, self._fixed, (args, kwargs))
        slots = {i: self._fixed(tensor) for i, tensor in placed.items()}
        out = _out_variant(func) if slots and len(slots) == results else None
        if out is None:
            self.steps.append(Step(func, args, kwargs, tuple(slots.items())))
        else:  # write into the slot at once, without a copy
            overload, names = out
            known = {a.name for a in overload._schema.arguments}
            kept = {name: value for name, value in kwargs.items() if name in known}  # the slot has dtype and device
            self.steps.append(Step(overload, args, kept | dict(zip(names, slots.values(), strict=True)), ()))

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
            placed[i] = _on(storages[source._cdata], tensor)
        return placed

    def _fixed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the tape keeps it: the same memory, but no hold on a pool block, and deaf to ``.data =``."""
        alias = self._pool.alias_of(tensor.untyped_storage())
        return tensor.detach() if alias is None else _on(alias, tensor)

    def _save_written(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Keep the bytes of outside memory that the operator is about to write."""
        if not func._schema.is_mutable:
            return
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            for tensor in tree_flatten(value)[0]:
                storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
                if storage is None or storage._cdata in self._saved or self._pool.alias_of(storage) is not None:
                    continue
                self._saved[storage._cdata] = (storage, storage.clone())


def replay(steps: list[Step]) -> None:
    """Run the steps of a tape."""
    with torch.no_grad():
        for step in steps:
            result = step.call(*step.args, **step.kwargs)
            if step.copies:
                flat = tree_flatten(result)[0]
                for i, slot in step.copies:
                    slot.copy_(flat[i])


def _on(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """A tensor on ``storage`` with the layout of ``like``."""
    base = torch.empty(0, dtype=like.dtype).set_(storage, like.storage_offset(), like.size(), like.stride())
    base = base.conj() if like.is_conj() else base
    return torch._neg_view(base) if like.is_neg() else base


def _bytes(storage: torch.UntypedStorage, nbytes: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (nbytes,), (1,))


def _refuse_host(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise HostSyncError for an operator whose result the host would have to wait for."""
    schema = func._schema.name
    if schema in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        masks = [t for t in args[1] if t is not None and t.dtype in (torch.bool, torch.uint8)]
        if schema != "aten::index" and masks:  # one value through masks is a masked_fill, which needs no host
            accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
            masks = [] if args[2].numel() == 1 and not accumulate else masks
        needs = bool(masks)
    elif schema == "aten::repeat_interleave":
        needs = kwargs.get("output_size") is None
    else:
        needs = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    if needs:
        raise HostSyncError(
            f"operator {schema}{' with a boolean mask' if 'index' in schema else ''} needs the host inside a capture, "
            f"at {current_line()}",
            remedy=_REMEDY,
        )


def _refuse_foreign(func: Any, given: list[torch.Tensor]) -> None:
    for tensor in given:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise CaptureError(
                f"operator {func._schema.name} has a {tensor.layout} tensor on {tensor.device}, at {current_line()}",
                remedy="The tape records dense tensors on the CPU; use device: cuda for others.",
            )


@cache
def _implemented_in_python(func: Any) -> bool:
    """Whether the operator's CPU kernel was registered from Python, so that it calls operators that we can record."""
    if func.namespace in ("aten", "prim") or not isinstance(func, torch._ops.OpOverload):
        return False
    name = func._schema.name.replace("::", "/")
    overload = f".{func._overloadname}" if func._overloadname != "default" else ""
    keys = ("CPU", "CompositeExplicitAutograd")
    return any(f"{name}{overload}/{key}" in torch.library._impls for key in keys)


@cache
def _out_variant(func: Any) -> tuple[Any, tuple[str, ...]] | None:
    """The overload of ``func`` that writes into given results, and their names; None if there is none."""

    def inputs(schema: Any) -> list[tuple[str, str]]:
        made = ("dtype", "layout", "device", "pin_memory")  # an out variant may leave these to its result
        return [(a.name, str(a.type)) for a in schema.arguments if not a.is_out and a.name not in made]

    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        outs = tuple(a.name for a in overload._schema.arguments if a.is_out)
        if outs and len(outs) == len(func._schema.returns) and inputs(overload._schema) == inputs(func._schema):
            return overload, outs
    return None
