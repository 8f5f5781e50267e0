"""A call's structure and constants as a hashable key, and its tensors apart from it.

Note [What a form tells apart]
    Floats by their bits, 1 and True by their types, other objects by their identity; fingerprints
    compare what these hold.
"""

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode
from torch.utils._pytree import TreeSpec, tree_flatten

from cgplan.config.schema import DType
from cgplan.errors import OutputShapeError

CONSTANTS = frozenset(
    {
        int,
        float,
        bool,
        str,
        type(None),
    }
)
_CONTAINERS = frozenset({dict, tuple, list})
_STRINGS = frozenset({str})
_BY_VALUE = (
    Enum,
    type,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    bytes,
)
_BY_TEXT = slice, range, complex  # of equal ones only the text differs, as with -0j

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Form = tuple[Any, ...]
ONE_TENSOR: Form = (Tensor,)
Shapes = tuple[torch.Size, ...]


class ById:
    __slots__ = ("_held", "_id")

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        try:
            self._held = weakref.ref(value)
        except TypeError:  # not every object takes weak references
            self._held = lambda: value  # type: ignore[assignment]

    @property
    def value(self) -> Any:
        return self._held()

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ById):
            return False
        return self._id == other._id and self.value is other.value is not None


class ByKey:
    __slots__ = ("key", "value")

    def __init__(self, value: Any, key: Any) -> None:
        self.value = value
        self.key = type(value), key

    def __hash__(self) -> int:
        try:
            return hash(self.key)
        except TypeError:  # the key of a pytree
            return hash(self.key[0])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByKey) and self.key == other.key


def flatten(
    items: Iterable[Any],
    form: list[Any],
    tensors: list[Tensor],
) -> None:
    """The parts of a form are hashable."""
    for value in items:
        kind = type(value)
        if kind is Tensor or isinstance(value, Tensor):
            form.append(Tensor if kind is nn.Parameter else kind)
            tensors.append(value)
        elif kind is float:
            form += float, value.hex()
        elif kind in CONSTANTS:
            form += kind, value
        elif kind is dict:
            keys: Any = tuple(value)
            if not _STRINGS.issuperset(map(type, keys)):
                keys = ByKey(keys, tuple(map(_key_of, keys)))
            form += dict, keys
            flatten(value.values(), form, tensors)
        elif kind is tuple or kind is list:
            form += kind, len(value)
            flatten(value, form, tensors)
        else:
            _flatten_other(value, form, tensors)


def taken_apart(value: Any) -> tuple[Form, list[Tensor]]:
    form = list[Any]()
    tensors = list[Tensor]()
    flatten([value], form, tensors)
    return tuple(form), tensors


def is_tensor_type(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, Tensor)


def _key_of(key: Any) -> Any:
    if type(key) in CONSTANTS:
        return type(key), repr(key)
    return ById(key)


def _flatten_other(
    value: Any,
    form: list[Any],
    tensors: list[Tensor],
) -> None:
    kind = type(value)
    leaves, spec = tree_flatten(value)
    is_scalar = kind.__module__ == "numpy" and hasattr(value, "item")
    if isinstance(value, _BY_VALUE):
        form += kind, value
    elif not spec.is_leaf():
        form += TreeSpec, ByKey(spec, spec)
        flatten(leaves, form, tensors)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        every = dict.fromkeys((*fields, *getattr(value, "__dict__", ())))
        names = [name for name in every if hasattr(value, name)]
        box = ByKey((kind, names), (kind, *names))
        form += dataclasses.Field, box
        held = [getattr(value, name) for name in names]
        flatten(held, form, tensors)
    elif kind in _BY_TEXT:
        form += kind, ByKey(value, repr(value))
    elif is_scalar and not getattr(value, "shape", (1,)):
        key = str(value.dtype), value.tobytes()
        form += kind, ByKey(value, key)
    else:
        form += kind, ById(value)


def rebuild(form: Iterator[Any], tensors: Iterator[Any]) -> Any:
    kind = next(form)
    if kind is Tensor or (kind not in _CONTAINERS and is_tensor_type(kind)):
        return next(tensors)
    detail = next(form)
    if kind is tuple or kind is list:
        return kind([rebuild(form, tensors) for _ in range(detail)])
    if type(detail) in (ById, ByKey):
        detail = detail.value
    if kind is dict:
        return {key: rebuild(form, tensors) for key in detail}
    if kind is float:
        return float.fromhex(detail)
    if kind is TreeSpec:
        leaves = [rebuild(form, tensors) for _ in range(detail.num_leaves)]
        return detail.unflatten(leaves)
    if kind is dataclasses.Field:
        made_of, names = detail
        made = object.__new__(made_of)
        for name in names:
            object.__setattr__(made, name, rebuild(form, tensors))
        return made
    return detail


def call_form(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[list[Any], list[Tensor]]:
    form = [len(args), *kwargs]
    tensors: list[Tensor] = []
    flatten(args, form, tensors)
    if kwargs:
        flatten(kwargs.values(), form, tensors)
    return form, tensors


class Tail(NamedTuple):
    """The last part of a form, after the arguments.

    Attributes:
        same: For each tensor the first one that is the same; empty where all differ.
    """

    same: tuple[int, ...]
    is_grad: bool
    dtype: torch.dtype
    device: torch.device | None
    autocast: Any  # its dtype, or False


def tail_of(tensors: Sequence[Tensor], device: str) -> Tail:
    same: tuple[int, ...] = ()
    if len(tensors) > 1 and len(set(map(id, tensors))) < len(tensors):
        first = dict[int, int]()
        same = tuple(first.setdefault(id(tensor), at) for at, tensor in enumerate(tensors))
    return Tail(
        same,
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        getattr(_get_current_function_mode(), "device", None),
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
    )


@dataclass(slots=True)
class Call:
    args: Args
    kwargs: Kwargs
    form: Form
    tensors: list[Tensor]

    @property
    def tail(self) -> Tail:
        found: Tail = self.form[-1]
        return found

    def by_name(
        self,
        signature: inspect.Signature,
    ) -> dict[str, Any]:
        return arguments_by_name(signature, self.args, self.kwargs)


def arguments_of(
    form: Form,
    count: int,
    keywords: Sequence[str],
    tensors: Iterable[Any],
) -> tuple[Args, Kwargs]:
    values = iter(form[1 + len(keywords) :])
    given = iter(tensors)
    args = tuple(rebuild(values, given) for _ in range(count))
    kwargs = {name: rebuild(values, given) for name in keywords}
    return args, kwargs


def arguments_by_name(
    signature: inspect.Signature,
    args: Args,
    kwargs: Kwargs,
) -> dict[str, Any]:
    try:
        found = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:  # the signature may differ from the code's
        by_position = {f"args.{index}": value for index, value in enumerate(args)}
        return by_position | kwargs
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            rest = found.pop(name, {})
            found |= rest
    return found


def objects_in(
    form: Iterable[Any],
) -> list[Any]:
    return [box.value for box in form if type(box) is ById]


def reason_against(
    form: Sequence[Any],
    tensors: Sequence[Tensor],
) -> str | None:
    if not any(tensor.ndim for tensor in tensors):
        return "no tensor argument has a dimension" if tensors else "no argument is a tensor"
    if not all(tensor.numel() for tensor in tensors):
        return "a tensor argument is empty"
    odd = set()
    for tensor in tensors:
        if str(tensor.dtype).removeprefix("torch.") not in get_args(DType):
            odd.add(str(tensor.dtype))
        if tensor.layout is not torch.strided or tensor.is_nested:
            odd.add(str(tensor.layout))
        if tensor.is_meta:
            odd.add(tensor.device.type)
    for part in form:
        if is_tensor_type(part) and part is not Tensor:
            odd.add(part.__name__)
    for value in objects_in(form):
        if hasattr(value, "__array__"):
            odd.add(type(value).__name__)
    if not odd:
        return None
    return f"an argument is of {', '.join(sorted(odd))}"


def containers_in(value: Any) -> Iterator[Any]:
    """Lists, dicts, dataclasses and tuples, at any depth."""
    inner: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = getattr(value, "__dict__", {}).values()
    else:
        return
    yield value
    for item in inner:
        yield from containers_in(item)


def object_roots(
    form: Iterable[Any],
) -> dict[str, Any]:
    found = dict[str, Any]()
    for value in objects_in(form):
        name = type(value).__name__
        if name in found:
            name = f"{name}#{len(found) + 1}"
        found[name] = value
    return found


def constants_in(
    value: Any,
    path: str,
) -> Iterator[tuple[str, Any]]:
    if type(value) in CONSTANTS:
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from constants_in(item, _below(path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from constants_in(item, f"{path}.{index}")


def _below(
    path: str,
    key: Any,
) -> str:
    return f"{path}.{key}" if path else str(key)


def tensors_by_name(
    value: Any,
    path: str,
) -> Iterator[tuple[str, Tensor]]:
    """``obs.position`` in a mapping, ``obs.0`` elsewhere."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_by_name(item, _below(path, key))
        return
    _, tensors = taken_apart(value)
    for index, tensor in enumerate(tensors):
        name = path if value is tensor else f"{path}.{index}"
        yield name, tensor


def module_of(model: object) -> nn.Module:
    for owner in (model, getattr(model, "__self__", None)):
        if isinstance(owner, nn.Module):
            return owner
    return nn.Module().eval()


def share(
    module: nn.Module,
    model: nn.Module,
) -> None:
    own = module.__dict__
    names = (
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
    )
    for name in names:
        if name in vars(model):  # scripts have none
            own[name] = vars(model)[name]
    own["training"] = getattr(model, "training", False)  # frozen scripts have none


class ByName(nn.Module):
    """The model with tensors by name, and a tensor or a tuple as output.

    Attributes:
        outputs: Form and shapes, by shapes of tensors.
        differs: An output was not as ``returns`` says.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        count: int,
        keywords: Iterable[str],
        form: Form,
        same: Sequence[int] = (),
    ) -> None:
        super().__init__()
        share(self, module_of(model))
        self.form = form
        self._count = count
        self._keywords = tuple(keywords)
        self.__dict__["wrapped"] = model  # not as a module, which would be there twice
        self._same = same
        self.names: tuple[str, ...] = ()
        self.outputs: dict[Shapes, tuple[Form, Shapes]] = {}
        self.is_plain = set(form[1 + len(self._keywords) :]) == {Tensor}
        self.differs = False
        self.returns: Form | None = None

    def __call__(
        self,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return self.forward(*args, **kwargs)  # global hooks run for the model

    def arguments(
        self,
        tensors: Iterable[Any],
    ) -> tuple[Args, Kwargs]:
        return arguments_of(
            self.form,
            self._count,
            self._keywords,
            tensors,
        )

    def forward(self, **tensors: Tensor) -> Any:
        wrapped = self.__dict__["wrapped"]
        if self._same:
            in_order = list(tensors.values())
            for name, at in zip(tensors, self._same, strict=True):
                tensors[name] = in_order[at]
        if self.is_plain and torch.compiler.is_compiling():  # nothing that a trace would not follow
            given = tuple(tensors.values())
            count = self._count
            rest = dict(
                zip(
                    self._keywords,
                    given[count:],
                    strict=True,
                )
            )
            return wrapped(*given[:count], **rest)
        values = [tensors[name] for name in self.names or tensors]
        args, kwargs = self.arguments(values)
        form, leaves = taken_apart(wrapped(*args, **kwargs))
        if not self.names:  # set where a file is captured
            self.outputs[shapes_of(values)] = form, shapes_of(leaves)
        self.differs |= self.returns not in (None, form)
        if form == ONE_TENSOR:
            return leaves[0]
        return tuple(leaves)


def shapes_of(tensors: Iterable[Tensor]) -> Shapes:
    """Raises OutputShapeError for nested tensors."""
    try:
        return tuple(tensor.shape for tensor in tensors)
    except RuntimeError as error:
        raise OutputShapeError("the model returns a nested tensor") from error
