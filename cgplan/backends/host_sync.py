"""Operators that need the host and so cannot stand inside a graph: their names, and the user's line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from cgplan.backends.blame import blamed_line
from cgplan.errors import HostSyncError

_REMEDY = (
    "Keep the value on the device (torch.where, masked_fill, index_select with a fixed number of rows), "
    "compute it before the graph, or keep this part out of it."
)
_HOST_METHODS = {
    torch.Tensor.cpu: "cpu",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.tolist: "tolist",
    torch.Tensor.__array__: "__array__",
    torch.Tensor.__repr__: "__repr__",
}
_RECORDED_WHOLE = ("cgplan::all_reduce_row",)  # its Python kernel waits for other processes, so a replay runs it again
_BUILTIN = ("aten", "prim")
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


@dataclass(slots=True)
class Refusals:
    """Operators that needed the host in one recording or look.

    Attributes:
        raises: Whether such an operator raises an error; else it is noted, and runs.
        first: The first error, without its frames. On a GPU the capture is invalid although the forward caught it.
        is_on: Whether operators are refused now.
    """

    raises: bool = True
    first: HostSyncError | None = None
    is_on: bool = True

    def refuse(self, operation: str) -> None:
        """Note something that needs the host, and raise HostSyncError."""
        if not self.is_on:
            return
        message = f"{operation} needs the host inside a capture, at {blamed_line()}"
        self.first = self.first or HostSyncError(message, remedy=_REMEDY)
        if self.raises:
            raise HostSyncError(message, remedy=_REMEDY)


class HostGuard(TorchFunctionMode):
    """Refuses tensor methods that, on a CPU, move values to the host without passing the dispatcher.

    torch leaves this mode for the call of an operator. A kernel in Python that is made of other operators runs within
    that call and never reaches a dispatch mode, so the guard calls it with itself in force.
    """

    def __init__(self, refusals: Refusals) -> None:
        super().__init__()
        self.refusals = refusals

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if (name := _HOST_METHODS.get(func)) is not None:
            self.refusals.refuse(f"Tensor.{name}()")
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverloadPacket) and func._qualified_op_name.split("::")[0] not in _BUILTIN:
            overload = torch._C._jit_resolve_packet(func._qualified_op_name, *args, **kwargs)
            func = getattr(func, overload or "default")
        if implemented_in_python(func, "CompositeImplicitAutograd"):
            with self:
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        return func(*args, **kwargs)


def drop_idle_guards() -> None:
    """Take guards whose refusals are off from this thread's modes: torch puts a mode back after the call of an operator
    that it left the mode for, whatever happened in the call.
    """
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    for mode in reversed(modes):
        if not (isinstance(mode, HostGuard) and not mode.refusals.is_on):
            _push_mode(mode)


_is_probing = ContextVar("cgplan_is_probing", default=False)
is_probing = _is_probing.get
"""Whether this thread is in a block of ``probing``."""


@contextmanager
def probing() -> Iterator[None]:
    """A block that runs a forward in this process alone, to learn from it: other ranks may not run theirs."""
    token = _is_probing.set(True)
    try:
        yield
    finally:
        _is_probing.reset(token)


@contextmanager
def as_written() -> Iterator[None]:
    """A block in which functions under torch.compile run their own code. Under a dispatch mode Dynamo would skip its
    compiled code, then and ever after.
    """
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and to load it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def refuse_host(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], refusals: Refusals) -> None:
    """Refuse an operator whose result the host would have to wait for."""
    schema, detail = func._schema.name, ""
    if schema in _INDEXING:
        masks = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        if schema != "aten::index" and masks:  # one value through masks is a masked_fill, which needs no host
            masks = args[2].numel() != 1 or bool(args[3] if len(args) > 3 else kwargs.get("accumulate"))
        needs, detail = masks, " with a boolean mask"
    elif schema == "aten::repeat_interleave":
        by_tensor = len(args) < 2 or isinstance(args[1], torch.Tensor)
        needs = by_tensor and kwargs.get("output_size") is None
    elif schema in ("aten::_to_copy", "aten::copy_"):
        needs, detail = _crosses_to_host(schema, args, kwargs), " from the device to the host"
    else:
        needs = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    if needs:
        refusals.refuse(f"operator {schema}{detail}")


def _crosses_to_host(schema: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a copy goes from a device to host memory; into pinned memory it may, that can be captured."""
    if schema == "aten::copy_":
        target, source = args[0], args[1]
        return source.device.type != "cpu" and target.device.type == "cpu" and not target.is_pinned()
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cpu" and args[0].device.type != "cpu"


@cache
def implemented_in_python(func: Any, key: str) -> bool:
    """Whether the operator's kernel for a dispatch key (``CPU``, ``CUDA``) was registered from Python: the operators
    that it calls pass the dispatcher and can be seen there.
    """
    if not isinstance(func, torch._ops.OpOverload) or func.namespace in _BUILTIN:
        return False
    overload = "" if func._overloadname == "default" else f".{func._overloadname}"
    name = func._schema.name.replace("::", "/") + overload
    keys = {key} if key == "CompositeImplicitAutograd" else {key, "CompositeExplicitAutograd"}
    return func._schema.name not in _RECORDED_WHOLE and any(f"{name}/{k}" in torch.library._impls for k in keys)


@cache
def is_composite(func: Any) -> bool:
    """Whether the operator is made of others alone; outside of inference mode such ones never reach a mode."""
    return isinstance(func, torch._ops.OpOverload) and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )


_is_cast = ContextVar("cgplan_is_cast", default=False)  # inside an operator that autocast casts for


def as_its_caller(operator: Any, function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The function, in a dispatch mode, under autocast as an operator's code is outside of modes: on if the caller has
    it on, unless autocast casts for the operator as a whole. Modes are called with autocast off.
    """
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        is_on = torch.is_autocast_enabled(device)
    if not is_on or _is_cast.get():
        return function
    has_cast = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), f"Autocast{device.upper()}")
    autocast = torch.autocast(device, torch.get_autocast_dtype(device), enabled=not has_cast)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        token = _is_cast.set(has_cast)
        try:
            with torch._C._PreserveDispatchKeyGuard(), autocast:
                return function(*args, **kwargs)
        finally:
            _is_cast.reset(token)

    return call


@cache
def names_of(func: Any) -> frozenset[str]:
    """The names by which a configuration may name an operator: ``namespace::name``, and with its overload."""
    return frozenset((func._schema.name, f"{func._schema.name}.{func._overloadname}"))


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    schema = func._schema
    found = []
    for index, argument in enumerate(schema.arguments):
        marked = argument.alias_info is not None and argument.alias_info.is_write
        # Of batch norm, some overloads write running statistics although their schema does not say so.
        if marked or (not schema.is_mutable and argument.name in ("running_mean", "running_var")):
            found += tensors_in(args[index] if index < len(args) else kwargs.get(argument.name))
    return found


def count_writes(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Count the writes of an operator written in Python in its tensors' versions, as torch does outside of modes."""
    torch.autograd.graph.increment_version([t for t in written_tensors(func, args, kwargs) if not t.is_inference()])


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """All tensors among the leaves of nested arguments."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
