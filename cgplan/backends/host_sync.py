"""Operators that need the host."""

import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cgplan.backends.blame import Line, blamed_line
from cgplan.backends.replacing import replaced, setting, shared
from cgplan.errors import CaptureError, HostSyncError

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]

_REMEDY_OF_UNSAFE = (
    "Run it between graphs: choose PIECEWISE, and name it in compilation.splitting_ops, or call "
    "it in an eager piece."
)
_HOST_METHODS = ("cpu", "numpy", "tolist", "__array__", "__repr__")
# its Python kernel waits for other processes
_RECORDED_WHOLE = ("cgplan::all_reduce_row",)
_BUILTIN = ("aten", "prim")
_NEEDS_HOST = {
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
}
ALLOCATIONS = {
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
}
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_TO_HOST = " from the device to the host"


def remedy_at(line: Line) -> str:
    """Against an operator that needs the host."""
    package = re.search(r"[/\\](?:site|dist)-packages[/\\](\w+)", line.file)
    if package:
        return (
            f"The line is of {package[1]}. If it stands for an argument that you left out, such as "
            "a mask, pass that argument; else compute it outside of the graph."
        )
    return (
        "Keep the value on the device (torch.where, masked_fill, index_select with a fixed number "
        "of rows), or compute it outside of the graph."
    )


@dataclass
class Refusals:
    """Operators that needed the host.

    Attributes:
        first: On a GPU the capture is invalid even if the forward caught it.
        constants: By id, host storages computed from Python numbers alone.
        watched: Ids of storages.
        read: The first operation that needed their values, even while not ``is_on``.
    """

    raises: bool = True
    first: CaptureError | None = None
    is_on: bool = True
    constants: dict[int, StorageWeakRef] = field(default_factory=dict)
    watched: Collection[int] = ()
    read: str | None = None

    def refuse(self, operation: str, tree: Any) -> None:
        needed = tensors_in(tree) if self.read is None else []
        if any(storage_id(tensor) in self.watched for tensor in needed):
            self.read = f"{operation}, at {blamed_line()}"
        self._refuse(HostSyncError, f"{operation} needs the host")

    def refuse_unsafe(self, operator: str) -> None:
        what = f"operator {operator} is tagged torch.Tag.cudagraph_unsafe"
        self._refuse(CaptureError, what, _REMEDY_OF_UNSAFE)

    def _refuse(self, kind: type[CaptureError], what: str, remedy: str = "") -> None:
        if not self.is_on:
            return
        line = blamed_line()
        message = f"{what}, at {line}"
        remedy = remedy or remedy_at(line)
        self.first = self.first or kind(message, remedy=remedy)
        if self.raises:
            raise kind(message, remedy=remedy)

    def is_constant(self, tree: Any) -> bool:
        """Whether ``tree`` has tensors, all constants."""
        found = tensors_in(tree)
        return bool(found) and all(storage_id(tensor) in self.constants for tensor in found)

    def follow(
        self,
        func: Any,
        args: Args,
        kwargs: Kwargs,
        result: Any,
    ) -> None:
        is_lifted = func is torch.ops.aten.lift_fresh.default
        if not self.constants and not is_lifted:
            return
        if is_lifted or (self.is_constant((args, kwargs)) and not operator_of(func).draws):
            on_host = [tensor for tensor in tensors_in(result) if tensor.device.type == "cpu"]
            self.constants |= storages_of(on_host)
        else:
            for tensor in written_tensors(func, args, kwargs):
                self.constants.pop(storage_id(tensor), None)


def storage_id(tensor: Tensor) -> int:
    """Of the storage object; 0 if not dense."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def storages_of(tensors: Sequence[Tensor]) -> dict[int, StorageWeakRef]:
    """By ``storage_id``, valid while the reference lives."""
    found = {}
    for tensor in tensors:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            found[storage._cdata] = StorageWeakRef(storage)
    return found


class _Guarded(threading.local):
    refusals: Refusals | None = None


_guarded = _Guarded()


@contextmanager
def host_guard(refusals: Refusals) -> Iterator[None]:
    """Refuse tensor methods that read a CPU's values past the dispatcher. A TorchFunctionMode would
    cost torch fused paths, and not see into Python kernels.
    """
    with _methods_replaced(), replaced(_guarded, refusals=refusals):
        yield


@shared
@contextmanager
def _methods_replaced() -> Iterator[None]:
    plain_one_hot = functional.one_hot

    @wraps(plain_one_hot)
    def one_hot(
        tensor: Tensor,
        num_classes: int = -1,
    ) -> Tensor:
        if _guarded.refusals is None or num_classes < 0 or tensor.dtype is not torch.int64:
            return plain_one_hot(tensor, num_classes)
        classes = torch.arange(num_classes, device=tensor.device)
        # on a CPU torch checks the values
        return (tensor.unsqueeze(-1) == classes).long()

    methods = {name: _host_method(getattr(Tensor, name)) for name in _HOST_METHODS}
    with replaced(Tensor, **methods), replaced(functional, one_hot=one_hot):
        yield


@cache
def _host_method(plain: Function) -> Function:
    @wraps(plain)
    def method(
        tensor: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        refusals = _guarded.refusals
        if refusals and not refusals.is_constant(tensor):
            refusals.refuse(f"Tensor.{plain.__name__}()", tensor)
        return plain(tensor, *args, **kwargs)

    return method


probing = ContextVar("cgplan_is_probing", default=False)  # a block that runs on this rank alone
is_probing = probing.get


def as_written() -> AbstractContextManager[None]:
    """A block in which compiled functions run their own code: under a dispatch mode Dynamo would
    skip its code for good.
    """
    if "torch._dynamo" not in sys.modules:  # the import takes seconds
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def refuse_host(
    func: Any,
    args: Args,
    kwargs: Kwargs,
    refusals: Refusals,
) -> None:
    operator = operator_of(func)
    name = func._schema.name
    if operator.is_unsafe:
        refusals.refuse_unsafe(name)
    needs_host = operator.needs_host
    detail = ""
    if name in _INDEXING:
        dtypes = [index.dtype for index in args[1] if index is not None]
        needs_host = torch.bool in dtypes or torch.uint8 in dtypes
        if name != "aten::index" and args[2].numel() == 1:
            # one value through masks is a masked_fill
            needs_host &= bool(args[3] if len(args) > 3 else kwargs.get("accumulate"))
        detail = " with a boolean mask"
    elif name == "aten::repeat_interleave":
        by_tensor = len(args) < 2 or isinstance(args[1], Tensor)
        needs_host = by_tensor and kwargs.get("output_size") is None
    elif name == "aten::copy_":
        target, source = args[:2]
        to_host = target.device.type == "cpu" and source.device.type != "cpu"
        needs_host = to_host and not target.is_pinned()  # which can be captured
        detail = _TO_HOST
    elif name == "aten::_to_copy":
        device = kwargs.get("device")
        to_host = device is not None and torch.device(device).type == "cpu"
        needs_host = to_host and args[0].device.type != "cpu"
        detail = _TO_HOST
    if needs_host and not refusals.is_constant((args, kwargs)):
        refusals.refuse(f"operator {name}{detail}", (args, kwargs))


@cache
def implemented_in_python(func: Any, key: str) -> bool:
    """Whether its kernel for ``CPU`` or ``CUDA`` is Python code whose operators may be recorded."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace in _BUILTIN:
        return False
    if torch.Tag.cudagraph_unsafe in func.tags or func.name() in _RECORDED_WHOLE:
        return False
    registered = func.name().replace("::", "/")
    kernels = {f"{registered}/{key}", f"{registered}/CompositeExplicitAutograd"}
    return not kernels.isdisjoint(torch.library._impls)


def _has_kernel(func: Any, key: str) -> bool:
    if not isinstance(func, torch._ops.OpOverload):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)


@cache
def is_composite(func: Any, key: str) -> bool:
    """Only inference mode shows these to modes."""
    return _has_kernel(func, "CompositeImplicitAutograd") and not _has_kernel(func, key)


_is_cast = ContextVar("cgplan_is_cast", default=False)


def as_its_caller(
    operator: Any,
    function: Function,
    device: str,
) -> Function:
    """The function with the caller's autocast, unless that casts for the whole operator. torch
    turns it off in modes, but kernels such as ``_transformer_encoder_layer_fwd`` need it.
    """
    if isinstance(operator, torch._ops.HigherOrderOperator):
        return function
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        is_on = torch.is_autocast_enabled(device)
    if not is_on or _is_cast.get():
        return function
    has_cast = _has_kernel(operator, f"Autocast{device.upper()}")
    autocast = torch.autocast(device, torch.get_autocast_dtype(device), enabled=not has_cast)

    def call(*args: Any, **kwargs: Any) -> Any:
        with setting(_is_cast, has_cast), torch._C._PreserveDispatchKeyGuard(), autocast:
            return function(*args, **kwargs)

    return call


class DispatchMode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's wrapper that skips a mode imports Dynamo, for seconds

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        for kind in types:
            if hasattr(kind, "__tensor_flatten__"):
                return NotImplemented  # the mode sees the operators inside
        return self.see(func, args, kwargs or {})

    def see(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        raise NotImplementedError


_SKIP = eval_frame._FrameAction.SKIP
eval_frame.set_code_exec_strategy(  # Dynamo skips it, with what it calls
    DispatchMode.__torch_dispatch__.__code__,
    eval_frame._FrameExecStrategy(_SKIP, _SKIP),
)


class OperatorMode(DispatchMode):
    supports_higher_order_operators = True

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    @classmethod
    def is_infra_mode(cls) -> bool:  # so that Dynamo compiles under it
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def run(
        self,
        func: Any,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """The mode sees the parts of a composite operator."""
        if not is_composite(func, self.device.upper()):
            return self.run_whole(func, args, kwargs)
        decompose = as_its_caller(func, func.decompose, self.device)
        with self:
            return decompose(*args, **kwargs)

    def run_whole(
        self,
        func: Any,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        result = as_its_caller(func, func, self.device)(*args, **kwargs)
        is_foreach = getattr(func, "_opname", "").startswith("_foreach_")
        if is_foreach or implemented_in_python(func, self.device.upper()):
            count_writes(func, args, kwargs)
        return result


class Operator(NamedTuple):
    """Its traits.

    Attributes:
        names: ``namespace::name``, with and without the overload.
        statistics: Arguments written in training, which no schema marks.
    """

    names: frozenset[str]
    arguments: list[str]
    written: list[str]
    statistics: list[str]
    draws: bool
    is_view: bool
    is_unsafe: bool
    needs_host: bool


@cache
def operator_of(func: Any) -> Operator:
    schema = func._schema
    name = schema.name
    arguments = []
    written = []
    statistics = []
    for argument in schema.arguments:
        arguments.append(argument.name)
        alias = argument.alias_info
        # c10d's schemas mark nothing
        if func.namespace == "c10d" or (alias is not None and alias.is_write):
            written.append(argument.name)
        elif argument.name in ("running_mean", "running_var"):
            statistics.append(argument.name)
    is_alias = any(value.alias_info for value in schema.returns)
    return Operator(
        frozenset((name, f"{name}.{func._overloadname}")),
        arguments,
        written,
        statistics,
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        is_view=is_alias and not schema.is_mutable,
        is_unsafe=torch.Tag.cudagraph_unsafe in func.tags,
        needs_host=not _NEEDS_HOST.isdisjoint(func.tags),
    )


def written_tensors(
    func: Any,
    args: Args,
    kwargs: Kwargs,
) -> list[Tensor]:
    operator = operator_of(func)
    written = operator.written
    if not written and not operator.statistics:
        return []
    given = {**dict(zip(operator.arguments, args, strict=False)), **kwargs}
    if given.get("training"):
        written = written + operator.statistics
    return tensors_in([*map(given.get, written)])


def count_writes(
    func: Any,
    args: Args,
    kwargs: Kwargs,
) -> None:
    """Under a mode torch does not count writes of Python operators and ``_foreach_``."""
    written = written_tensors(func, args, kwargs)
    counted = [tensor for tensor in written if not tensor.is_inference()]
    torch.autograd.graph.increment_version(counted)


def tensors_in(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    found = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
    return found


def leaves_of(args: Args, kwargs: Kwargs) -> list[Any]:
    leaves = []
    for value in (*args, *kwargs.values()):
        if type(value) in (list, tuple):
            leaves += value
        else:
            leaves.append(value)
    return leaves
