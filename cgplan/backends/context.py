"""The forward context: what a model learns of its batch beside its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from cgplan.backends.blame import blamed_line
from cgplan.backends.replacing import T, setting
from cgplan.errors import CgplanError, SealedError
from cgplan.modes import RUNTIME_MODES, BatchDescriptor, CUDAGraphMode

AddressPolicy = Literal["off", "first", "always"]
_OPERATORS = torch.library.Library("cgplan", "FRAGMENT")
_bodies: dict[str, Callable[..., Any]] = {}


def define_operator(schema: str, body: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an operator ``cgplan::name`` on CPUs and GPUs, for good. A second call exchanges the
    body.
    """
    name = schema.partition("(")[0]
    is_new = name not in _bodies
    _bodies[name] = body
    if is_new:
        _OPERATORS.define(schema)
        for key in ("CPU", "CUDA"):
            _OPERATORS.impl(name, lambda *given: _bodies[name](*given), key)
        torch.library.register_fake(f"cgplan::{name}", fake, lib=_OPERATORS)


@dataclass(slots=True)
class CaptureScope:
    """What a capture session lends to the graph wrappers inside a model.

    Attributes:
        backend: For wrappers without one.
        is_open: Whether wrappers may capture; False in a sealed runner.
        entries: Captured since the session last took them.
        wrappers: They may outlive the scope; their graphs must not.
        address_check: Overrides that of wrappers, if given.
        mark: Entries hold it in place of the scope, which would keep graphs until a garbage
            collection.
    """

    pool: Any
    backend: Any = None
    is_open: bool = True
    entries: list[Any] = field(default_factory=list)
    wrappers: list[Any] = field(default_factory=list)
    address_check: AddressPolicy | None = None
    mark: object = field(default_factory=object, repr=False)


class WatchedMetadata(Mapping[str, Any]):
    """Metadata that notes in ``read`` the names read while ``counts()`` is true."""

    def __init__(self, metadata: Mapping[str, Any], counts: Callable[[], bool]) -> None:
        self._metadata = metadata
        self._counts = counts
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        if self._counts():
            self.read.add(name)
        return self._metadata[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._metadata)

    def __len__(self) -> int:
        return len(self._metadata)


@dataclass(slots=True)
class ForwardContext:
    """One forward pass, as the model and its graph wrappers see it.

    Attributes:
        descriptor: The key where a graph runs the batch, else its unpadded numbers.
        metadata: Tensors beside the model's arguments (slot mapping, block tables). Inside a
            capture they are views of static buffers, owned by cgplan.
        scope: The capture session or sealed runner, if any.
        derived: What a layer computed from the metadata for later layers.
    """

    runtime_mode: CUDAGraphMode
    descriptor: BatchDescriptor
    metadata: Mapping[str, Any]
    scope: CaptureScope | None = None
    derived: dict[str, Any] = field(default_factory=dict)

    def derive(self, key: str, device: torch.device, make: Callable[[], T]) -> T:
        """``make()``, once in a forward."""
        # A graph did not record what its warm-up derived.
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        key = f"{key} {capturing}"
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]  # type: ignore[no-any-return]


_current: ContextVar[ForwardContext | None] = ContextVar("cgplan_forward_context", default=None)


@contextmanager
def forward_context(
    runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    descriptor: BatchDescriptor | None = None,
    metadata: Mapping[str, Any] | None = None,
    *,
    scope: CaptureScope | None = None,
) -> Iterator[ForwardContext]:
    """A block with a ForwardContext in this thread or task. Metadata is not copied.

    Raises CgplanError for a mode that is not a runtime mode, or a graph mode without a descriptor.
    """
    if runtime_mode not in RUNTIME_MODES:
        raise CgplanError(
            f"forward_context cannot have the runtime mode {runtime_mode!r}",
            remedy="Pass CUDAGraphMode.NONE, PIECEWISE or FULL, such as "
            "CudagraphDispatcher.dispatch returned.",
        )
    if descriptor is None and runtime_mode is not CUDAGraphMode.NONE:
        raise CgplanError(
            f"forward_context with runtime mode {runtime_mode} needs a batch descriptor",
            remedy="Pass the pair that CudagraphDispatcher.dispatch returned.",
        )
    context = ForwardContext(runtime_mode, descriptor or BatchDescriptor(0), metadata or {}, scope)
    with setting(_current, context):
        yield context


# where a context manager would take too long
set_context = _current.set
reset_context = _current.reset
current_forward_context = _current.get
"""The current forward context, or None."""


def get_forward_context() -> ForwardContext:
    """The current forward context. Raises CgplanError outside of any."""
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break()  # a trace would keep what it reads here
    context = _current.get()
    if context is None:
        raise CgplanError(
            f"no forward context is set, at {blamed_line()}",
            remedy="Call the model inside `with cgplan.forward_context(...)`, or through a "
            "GraphRunner.",
        )
    return context


_capture_allowed: ContextVar[bool] = ContextVar("cgplan_capture_allowed", default=True)
is_capture_allowed = _capture_allowed.get
"""Whether graphs may be captured here."""


def capture_allowed(allowed: bool) -> AbstractContextManager[None]:
    """A block in which graphs may, or may not, be captured in this thread or task; the innermost
    block counts. Where they may not, captured graphs replay, and a capture raises SealedError.
    """
    return setting(_capture_allowed, allowed)


def refuse_forbidden_capture(graph: str) -> None:
    """Raise SealedError inside ``capture_allowed(False)``; ``graph`` names the capture."""
    if not is_capture_allowed():
        raise SealedError(
            f"{graph} is to be captured inside capture_allowed(False), at {blamed_line()}",
            remedy="Capture it before that block, or run the batch in CUDAGraphMode.NONE there.",
        )


class RankSum(Protocol):
    """Sums tensors over ranks. ``number`` is the ``group`` of ``torch.ops.cgplan.all_reduce(x,
    group)``.
    """

    number: int
    rank: int
    world_size: int


_rank_sum: ContextVar[RankSum | None] = ContextVar("cgplan_rank_sum", default=None)
current_all_reduce = _rank_sum.get
"""The all-reduce of the ``all_reduce_by`` block, or None."""


def all_reduce_by(reducer: RankSum) -> AbstractContextManager[None]:
    """A block that builds models which sum by this all-reduce."""
    return setting(_rank_sum, reducer)
