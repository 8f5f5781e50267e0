"""Operators that need the host and so cannot stand inside a graph: their names, and the user's
line.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from cgplan.backends.blame import blamed_line
from cgplan.backends.replacing import replaced, shared
from cgplan.errors import CaptureError, HostSyncError

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]

_REMEDY = (
    "Keep the value on the device (torch.where, masked_fill, index_select with a fixed number of "
    "rows), "
    "compute it before the graph, or keep this part out of it."
)
_REMEDY_OF_UNSAFE = (
    "Run it between graphs: choose PIECEWISE, and name it in compilation.splitting_ops, or call "
    "it in an eager piece."
)
_HOST_METHODS = ("cpu", "numpy", "tolist", "__array__", "__repr__")
# its Python kernel waits for other processes, so a replay runs it again
_RECORDED_WHOLE = ("cgplan::all_reduce_row",)
_BUILTIN = ("aten", "prim")
ALLOCATIONS = {
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
}
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


@dataclass(slots=True)
class Refusals:
    """Operators that needed the host in one recording or look.

    Attributes:
        raises: Whether such an operator raises an error; else it is noted, and runs.
        first: The first error, without its frames. On a GPU the capture is invalid although the
            forward caught it.
        is_on: Whether operators are refused now.
        constants: Storages of tensors that were computed from numbers of the Python code alone, by
            their id. On a GPU they lie on the host, where they can be read.
        watched: Ids of storages; what needed a value of these first is noted in ``read``, whatever
            ``is_on`` says.
    """

    raises: bool = True
    first: CaptureError | None = None
    is_on: bool = True
    constants: dict[int, StorageWeakRef] = field(default_factory=dict)
    watched: Collection[int] = ()
    read: str | None = None

    def refuse(self, operation: str, tree: Any) -> None:
        """Note something that needs a value of the tensors in ``tree`` on the host, and raise
        HostSyncError.
        """
        if (
            self.watched
            and self.read is None
            and any(_storage_key(t) in self.watched for t in tensors_in(tree))
        ):
            self.read = f"{operation}, at {blamed_line()}"
        self._refuse(HostSyncError, f"{operation} needs the host", _REMEDY)

    def refuse_unsafe(self, operator: str) -> None:
        """Note an operator that its author keeps out of graphs, and raise CaptureError."""
        what = f"operator {operator} is tagged torch.Tag.cudagraph_unsafe"
        self._refuse(CaptureError, what, _REMEDY_OF_UNSAFE)

    def _refuse(self, kind: type[CaptureError], what: str, remedy: str) -> None:
        if not self.is_on:
            return
        message = f"{what}, at {blamed_line()}"
        self.first = self.first or kind(message, remedy=remedy)
        if self.raises:
            raise kind(message, remedy=remedy)

    def is_constant(self, tree: Any) -> bool:
        """Whether there are tensors in ``tree``, and all of them are constants."""
        found = tensors_in(tree) if self.constants else []
        return bool(found) and all(_storage_key(t) in self.constants for t in found)

    def follow(self, func: Any, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Note which tensors are constants after an operator."""
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        if func is torch.ops.aten.lift_fresh.default or (
            self.is_constant((args, kwargs)) and not is_drawn
        ):
            self.constants |= storages_of([t for t in tensors_in(result) if t.device.type == "cpu"])
        elif self.constants:
            for tensor in written_tensors(func, args, kwargs):
                self.constants.pop(_storage_key(tensor), None)


def storages_of(tensors: Sequence[Tensor]) -> dict[int, StorageWeakRef]:
    """The storages of the dense ones among tensors, by id; no other has it while the reference is
    held.
    """
    dense = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    return {storage._cdata: StorageWeakRef(storage) for storage in dense}


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


class _Guarded(threading.local):
    refusals: tuple[Refusals, ...] = ()  # of the blocks of this thread, the innermost last


_guarded = _Guarded()


class HostGuard:
    """A block in which this thread may not call tensor methods that, on a CPU, move values to the
    host without passing the dispatcher.

    The methods are replaced while such a block is open anywhere. A TorchFunctionMode would keep
    torch from its fused paths, as in nn.TransformerEncoderLayer, and would not see into kernels in
    Python.
    """

    def __init__(self, refusals: Refusals) -> None:
        self._refusals, self._replaced = refusals, _methods_replaced()

    def __enter__(self) -> None:
        self._replaced.__enter__()
        _guarded.refusals += (self._refusals,)

    def __exit__(self, *_: object) -> None:
        _guarded.refusals = tuple(r for r in _guarded.refusals if r is not self._refusals)
        self._replaced.__exit__(None, None, None)


@shared
@contextmanager
def _methods_replaced() -> Iterator[None]:
    plain_one_hot = functional.one_hot

    @wraps(plain_one_hot)
    def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
        if not _guarded.refusals or num_classes < 0 or tensor.dtype is not torch.int64:
            return plain_one_hot(tensor, num_classes)
        classes = torch.arange(num_classes, device=tensor.device)
        # on a CPU torch checks the values, on a GPU it does not
        return (tensor.unsqueeze(-1) == classes).long()

    methods = {name: _host_method(name) for name in _HOST_METHODS}
    with replaced(Tensor, **methods), replaced(functional, one_hot=one_hot):
        yield


def _host_method(name: str) -> Function:
    plain = getattr(Tensor, name)

    @wraps(plain)
    def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        for refusals in _guarded.refusals[-1:]:
            if not refusals.is_constant(tensor):
                refusals.refuse(f"Tensor.{name}()", tensor)
        return plain(tensor, *args, **kwargs)

    return method


_is_probing = ContextVar("cgplan_is_probing", default=False)
is_probing = _is_probing.get
"""Whether this thread is in a block of ``probing``."""


@contextmanager
def probing() -> Iterator[None]:
    """A block that runs a forward in this process alone, to learn from it: other ranks may not run
    theirs.
    """
    token = _is_probing.set(True)
    try:
        yield
    finally:
        _is_probing.reset(token)


@contextmanager
def as_written() -> Iterator[None]:
    """A block in which functions under torch.compile run their own code. Under a dispatch mode
    Dynamo would skip its compiled code, then and ever after.
    """
    with ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # else nothing is compiled, and to load it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def refuse_host(func: Any, args: Args, kwargs: Kwargs, refusals: Refusals) -> None:
    """Refuse an operator whose result the host would have to wait for, or that is tagged as unsafe
    in a graph.
    """
    schema, detail = func._schema.name, ""
    if torch.Tag.cudagraph_unsafe in func.tags:
        refusals.refuse_unsafe(schema)
    if refusals.is_constant((args, kwargs)):
        return
    if schema in _INDEXING:
        masks = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        # one value through masks is a masked_fill, which needs no host
        if schema != "aten::index" and masks:
            masks = args[2].numel() != 1 or bool(
                args[3] if len(args) > 3 else kwargs.get("accumulate")
            )
        needs, detail = masks, " with a boolean mask"
    elif schema == "aten::repeat_interleave":
        by_tensor = len(args) < 2 or isinstance(args[1], Tensor)
        needs = by_tensor and kwargs.get("output_size") is None
    elif schema in ("aten::_to_copy", "aten::copy_"):
        needs, detail = _crosses_to_host(schema, args, kwargs), " from the device to the host"
    else:
        needs = (
            torch.Tag.data_dependent_output in func.tags
            or torch.Tag.dynamic_output_shape in func.tags
        )
    if needs:
        refusals.refuse(f"operator {schema}{detail}", (args, kwargs))


def _crosses_to_host(schema: str, args: Args, kwargs: Kwargs) -> bool:
    """Whether a copy goes from a device to host memory; into pinned memory it may, that can be
    captured.
    """
    if schema == "aten::copy_":
        target, source = args[0], args[1]
        return (
            source.device.type != "cpu" and target.device.type == "cpu" and not target.is_pinned()
        )
    device = kwargs.get("device")
    return (
        device is not None and torch.device(device).type == "cpu" and args[0].device.type != "cpu"
    )


@cache
def implemented_in_python(func: Any, key: str) -> bool:
    """Whether the operator's kernel for a dispatch key (``CPU``, ``CUDA``) was registered from
    Python: the operators that it calls pass the dispatcher and can be seen there. One that is
    tagged as unsafe in a graph counts as a whole.
    """
    if not isinstance(func, torch._ops.OpOverload) or func.namespace in _BUILTIN:
        return False
    if torch.Tag.cudagraph_unsafe in func.tags:
        return False
    overload = "" if func._overloadname == "default" else f".{func._overloadname}"
    name = func._schema.name.replace("::", "/") + overload
    keys = {key, "CompositeExplicitAutograd"}
    return func._schema.name not in _RECORDED_WHOLE and any(
        f"{name}/{k}" in torch.library._impls for k in keys
    )


@cache
def is_composite(func: Any, key: str) -> bool:
    """Whether the operator is made of others alone on the device of a dispatch key (``CPU``,
    ``CUDA``); outside of inference mode such ones never reach a mode.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    is_operator = isinstance(func, torch._ops.OpOverload)
    return (
        is_operator and has(func.name(), "CompositeImplicitAutograd") and not has(func.name(), key)
    )


_is_cast = ContextVar("cgplan_is_cast", default=False)  # inside an operator that autocast casts for


def as_its_caller(operator: Any, function: Function, device: str) -> Function:
    """The function, in a dispatch mode, under autocast as an operator's code is outside of modes:
    on if the caller has it on, unless autocast casts for the operator as a whole. Modes are called
    with autocast off, and kernels such as that of ``_transformer_encoder_layer_fwd`` call operators
    that autocast casts for.
    """
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        is_on = torch.is_autocast_enabled(device)
    if not is_on or _is_cast.get():
        return function
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    is_operator = isinstance(operator, torch._ops.OpOverload)
    has_cast = is_operator and has_kernel(operator.name(), f"Autocast{device.upper()}")
    autocast = torch.autocast(device, torch.get_autocast_dtype(device), enabled=not has_cast)
    return partial(_call_under, function, autocast, has_cast)


def _call_under(
    function: Function, autocast: torch.autocast, has_cast: bool, *args: Any, **kwargs: Any
) -> Any:
    token = _is_cast.set(has_cast)
    try:
        with torch._C._PreserveDispatchKeyGuard(), autocast:
            return function(*args, **kwargs)
    finally:
        _is_cast.reset(token)


@cache
def names_of(func: Any) -> frozenset[str]:
    """The names by which a configuration may name an operator: ``namespace::name``, and with its
    overload.
    """
    return frozenset((func._schema.name, f"{func._schema.name}.{func._overloadname}"))


@cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    schema = func._schema
    found = []
    for index, argument in enumerate(schema.arguments):
        is_marked = argument.alias_info is not None and argument.alias_info.is_write
        if is_marked or func.namespace == "c10d":  # schemas of collectives mark nothing
            found.append((index, argument.name))
    return found


@cache
def _statistics(func: Any) -> dict[str, int]:
    """Where some overloads of batch norm have their running statistics, which they write in
    training although their schemas do not say so, and where they are told of training.
    """
    names = [argument.name for argument in func._schema.arguments]
    wanted = ("running_mean", "running_var", "training")
    is_silent = not func._schema.is_mutable and names.count("training") == 1
    return {name: names.index(name) for name in wanted if name in names} if is_silent else {}


def written_tensors(func: Any, args: Args, kwargs: Kwargs) -> list[Tensor]:
    """The tensors among its arguments that an operator writes."""

    def given(index: int, name: str) -> Any:
        return args[index] if index < len(args) else kwargs.get(name)

    found = []
    for index, name in _written_arguments(func):
        found += tensors_in(given(index, name))
    statistics = _statistics(func)
    if statistics and given(statistics["training"], "training"):
        for name, index in statistics.items():
            found += tensors_in(given(index, name))
    return found


def count_writes(func: Any, args: Args, kwargs: Kwargs) -> None:
    """Count the writes of an operator in its tensors' versions: under a mode torch does not, for an
    operator written in Python and for ``_foreach_``.
    """
    torch.autograd.graph.increment_version(
        [t for t in written_tensors(func, args, kwargs) if not t.is_inference()]
    )


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors among the leaves of nested arguments."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def leaves_of(args: Args, kwargs: Kwargs) -> list[Any]:
    """The leaves of an operator's arguments, which hold lists at most."""
    values = (*args, *kwargs.values())
    return [
        leaf for value in values for leaf in (value if type(value) in (list, tuple) else (value,))
    ]
