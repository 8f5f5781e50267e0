"""What a forward sees beside its arguments: its batch, and torch's state in this thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch.overrides import _get_current_function_mode
from torch.utils._device import DeviceContext

from cgplan.backends.blame import blamed_line
from cgplan.backends.replacing import T, setting
from cgplan.errors import CaptureError, CgplanError, SealedError
from cgplan.modes import RUNTIME_MODES, BatchDescriptor, CUDAGraphMode


@dataclass(slots=True)
class ForwardContext:
    """One forward pass, as the model sees it.

    Attributes:
        descriptor: The graph's key, else the batch's unpadded numbers.
        metadata: Tensors beside the arguments; in captures views of static buffers, owned by
            cgplan.
        derived: What layers computed from it for later layers.
    """

    runtime_mode: CUDAGraphMode
    descriptor: BatchDescriptor
    metadata: Mapping[str, Any]
    scope: CaptureScope | None = None
    derived: dict[str, Any] = field(default_factory=dict)

    def derive(self, key: str, device: torch.device, make: Callable[[], T]) -> T:
        """``make()``, once in a forward."""
        # a warm-up's tensors are not in the graph
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

    Raises CgplanError for a wrong mode, or a graph mode without a descriptor.
    """
    if runtime_mode not in RUNTIME_MODES:
        raise CgplanError(
            f"forward_context cannot have the runtime mode {runtime_mode!r}",
            remedy="Pass CUDAGraphMode.NONE, PIECEWISE or FULL.",
        )
    if descriptor is None and runtime_mode is not CUDAGraphMode.NONE:
        raise CgplanError(
            f"forward_context with runtime mode {runtime_mode} needs a batch descriptor",
            remedy="Pass what CudagraphDispatcher.dispatch returned.",
        )
    context = ForwardContext(runtime_mode, descriptor or BatchDescriptor(0), metadata or {}, scope)
    with setting(_current, context):
        yield context


# a context manager takes too long
set_context = _current.set
reset_context = _current.reset
current_forward_context = _current.get


def get_forward_context() -> ForwardContext:
    """The current context. Raises CgplanError if there is none."""
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break()  # a trace would keep what it reads here
    context = _current.get()
    if context is None:
        raise CgplanError(
            f"no forward context is set, at {blamed_line()}",
            remedy="Call the model inside cgplan.forward_context, or by a GraphRunner.",
        )
    return context


@contextmanager
def deriving(derived: dict[str, Any]) -> Iterator[None]:
    context = _current.get()
    if context is None:
        yield
        return
    before = context.derived
    context.derived = derived
    try:
        yield
    finally:
        context.derived = before


@dataclass
class CaptureScope:
    """What a session lends to graph wrappers inside a model.

    Attributes:
        is_open: False in a sealed runner: wrappers must not capture.
        entries: Captured since they were last taken.
        wrappers: A set, in order; they may outlive the scope, their graphs must not.
        mark: Entries hold it in place of the scope, which would keep graphs.
    """

    pool: Any
    backend: Any = None
    is_open: bool = True
    entries: list[Any] = field(default_factory=list)
    wrappers: dict[Any, None] = field(default_factory=dict)
    address_check: AddressPolicy | None = None
    mark: object = field(default_factory=object, repr=False)


@dataclass(eq=False)
class WatchedMetadata(Mapping[str, Any]):
    """Metadata that notes the names read while ``counts()`` is true."""

    metadata: Mapping[str, Any]
    counts: Callable[[], bool]
    read: set[str] = field(default_factory=set)

    def __getitem__(self, name: str) -> Any:
        if self.counts():
            self.read.add(name)
        return self.metadata[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.metadata)

    def __len__(self) -> int:
        return len(self.metadata)


_capture_allowed: ContextVar[bool] = ContextVar("cgplan_capture_allowed", default=True)
is_capture_allowed = _capture_allowed.get


def capture_allowed(allowed: bool) -> AbstractContextManager[None]:
    """Allow or forbid captures in a block of this thread or task. Where they are forbidden a
    capture raises SealedError, and captured graphs replay.
    """
    return setting(_capture_allowed, allowed)


def refuse_forbidden_capture(*key: object) -> None:
    if not is_capture_allowed():
        graph = f"the graph for {' '.join(map(str, key))}" if key else "a graph"
        raise SealedError(
            f"{graph} is to be captured inside capture_allowed(False), at {blamed_line()}",
            remedy="Capture it before that block, or run the batch in CUDAGraphMode.NONE there.",
        )


class RankSum(Protocol):
    """``number`` is the ``group`` of ``torch.ops.cgplan.all_reduce``."""

    number: int
    rank: int
    world_size: int


_rank_sum: ContextVar[RankSum | None] = ContextVar("cgplan_rank_sum", default=None)
current_all_reduce = _rank_sum.get


def all_reduce_by(reducer: RankSum) -> AbstractContextManager[None]:
    """A block that builds models which sum by it."""
    return setting(_rank_sum, reducer)


class AmbientState(NamedTuple):
    """Torch's state in this thread, and its defaults, which compiled functions are guarded by.

    Graphs depend on autocast alone.
    """

    grad: bool
    inference: bool
    autocast: torch.dtype | None
    dtype: torch.dtype
    device: torch.device | None

    @classmethod
    def now(cls, device: str) -> AmbientState:
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast,
            torch.get_default_dtype(),
            # as it was given: compiled functions tell `cuda` from `cuda:0`
            getattr(_get_current_function_mode(), "device", None),
        )

    @contextmanager
    def entered(self, device: str) -> Iterator[None]:
        autocast = torch.autocast(device, self.autocast, enabled=self.autocast is not None)
        before = AmbientState.now(device)
        placed: AbstractContextManager[None] = nullcontext()
        if self.device and self.device != before.device:
            placed = DeviceContext(self.device)
        torch.set_default_dtype(self.dtype)
        try:
            with (
                torch.inference_mode(self.inference),
                torch.set_grad_enabled(self.grad),
                autocast,
                placed,
            ):
                yield
        finally:
            torch.set_default_dtype(before.dtype)

    def refuse_other_autocast(self, device: str, done: str = "captured") -> None:
        now = AmbientState.now(device)
        if now.autocast != self.autocast:
            raise CaptureError(
                f"the model was {done} with autocast {self.autocast_words} and is called with "
                f"autocast {now.autocast_words}",
                remedy="Call it with autocast as at its capture, or capture again.",
            )

    @property
    def autocast_words(self) -> str:
        return "off" if self.autocast is None else f"in {self.autocast}"


class RandomRestores:
    """How often blocks and comparisons of all threads put random states back."""

    number = 0


def restore_random(states: Mapping[torch.Generator, torch.Tensor]) -> None:
    RandomRestores.number += 1
    for generator, state in states.items():
        generator.set_state(state)


@contextmanager
def random_state_kept(
    device: torch.device,
    generators: Iterable[torch.Generator] = (),
) -> Iterator[None]:
    """A block; restores the default generators and these."""
    before = {generator: generator.get_state() for generator in generators}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            restore_random(before)


AddressPolicy = Literal["off", "first", "always"]
_OPERATORS = torch.library.Library("cgplan", "FRAGMENT")
_bodies: dict[str, Callable[..., Any]] = {}


def define_operator(schema: str, body: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """For good; a second call exchanges the body."""
    name = schema.partition("(")[0]
    is_new = name not in _bodies
    _bodies[name] = body
    if is_new:
        _OPERATORS.define(schema)
        for key in ("CPU", "CUDA"):
            _OPERATORS.impl(name, lambda *given: _bodies[name](*given), key)
        torch.library.register_fake(f"cgplan::{name}", fake, lib=_OPERATORS)
