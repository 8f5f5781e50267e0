"""A model together with its graphs and the memory that they read: what a session fills and a runner calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isqrt
from types import FunctionType
from typing import Any
from weakref import finalize

import torch

from cgplan.config import Config
from cgplan.descriptors import BatchDescriptor
from cgplan.errors import AddressError, CaptureError, CaptureMemoryError, InputError
from cgplan.graphs import GraphBackend
from cgplan.graphs.addresses import AddressManifest
from cgplan.graphs.buffers import StaticBuffers
from cgplan.modes import CUDAGraphMode
from cgplan.planning import Plan
from cgplan.runtime.context import CaptureScope, forward_context
from cgplan.runtime.piecewise import PiecewiseModel
from cgplan.runtime.routes import choose_route
from cgplan.runtime.wrapper import CUDAGraphOptions, CUDAGraphWrapper


def _spoken(autocast: tuple[bool, torch.dtype]) -> str:
    return f"in {autocast[1]}" if autocast[0] else "off"


class _Metadata(dict[str, Any]):
    """The forward context's metadata; a name that is not declared is answered with those that are."""

    def __missing__(self, name: str) -> Any:
        raise InputError(
            f"the model reads metadata {name!r}, which is not declared",
            remedy=f"Declare it under `metadata`; declared are {', '.join(self) or 'none'}.",
        )


class GraphedModel:
    """The model, its FULL graphs, their pool and static buffers. It owns all but the model and a given ``pool``.

    Attributes:
        plan, config: What is captured.
        backend: The device.
        wrapper: Holds the FULL graphs; in other modes it passes through.
        buffers: Static buffers for the largest key.
        scope: Pool, and whether capturing is still allowed.
        route: How PIECEWISE segments come about.
        returns_nothing: Whether the model's output held no tensor.
        before_free: Called before graphs are freed: other ranks may read their memory.
    """

    def __init__(
        self, plan: Plan, config: Config, model: Callable[..., Any], backend: GraphBackend, pool: Any = None
    ) -> None:
        self.plan = plan
        self.config = config
        self.backend = backend
        self.scope = CaptureScope(backend.new_pool() if pool is None else pool, backend)
        self.buffers = self._allocate_buffers()  # before the route, which may change modules until `free`
        self.route = choose_route(plan, config, model, backend)
        # Static buffers do not move; what may is looked at in check_addresses.
        options = CUDAGraphOptions(address_check="off")
        self.wrapper = CUDAGraphWrapper(
            self.route.forward, CUDAGraphMode.FULL, backend=backend, pool=self.scope.pool, options=options
        )
        self.returns_nothing = False
        self.before_free: Callable[[], None] = lambda: None
        self._holder = None if isinstance(model, FunctionType) else getattr(model, "__self__", model)
        self._state: AddressManifest | None = None
        self._before: AddressManifest | None = None
        self._checked: set[tuple[CUDAGraphMode, BatchDescriptor]] = set()
        self._moved: str | None = None
        self._autocast = self._autocast_now()
        self._is_traced = self.route.splitter is None
        # A trace is frozen, so what no graph runs is left to the model itself, but for what inductor rounds otherwise.
        self._own = model if config.compilation.compiler == "eager" else self.route.forward
        if isinstance(self.route.forward, PiecewiseModel):  # also for a runner that is dropped without being closed
            self._finalizer = finalize(self, self.route.forward.forget)

    def _allocate_buffers(self) -> StaticBuffers:
        tokens = self.plan.max_capture_size
        specs = {**self.config.inputs, **self.config.metadata}
        try:
            return StaticBuffers(specs, tokens, min(tokens, self.plan.max_num_seqs), self.backend.device)
        except RuntimeError as error:  # torch.OutOfMemoryError on a GPU, a plain one from the CPU's allocator
            if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
                raise
            raise CaptureMemoryError(
                f"no memory for static buffers of {tokens} tokens: {str(error).splitlines()[0]}",
                remedy="Lower compilation.max_cudagraph_capture_size, or the fixed dimensions of the inputs.",
            ) from error

    def seal(self) -> None:
        """End the captures: a missing key is an error from now on, and the model's memory must stay where it is."""
        self.scope.is_open = False
        self._state, self._before = self._state_now(before=self._before), None

    def invalidate(self, name: str) -> None:
        """Refuse replays from now on, because ``name`` has moved."""
        self._moved = name

    def check_autocast(self) -> None:
        """Raise CaptureError if autocast is not as at capture: graphs would give other dtypes than eager calls."""
        if self.route.name != "ops" and self._autocast_now() != self._autocast:  # a traced model compares more itself
            raise CaptureError(
                f"the model was captured with autocast {_spoken(self._autocast)} and is called with autocast "
                f"{_spoken(self._autocast_now())}",
                remedy="Call the runner under the autocast state of its capture, or capture again under this one.",
            )

    def _state_now(self, before: AddressManifest | None = None) -> AddressManifest | None:
        """Where the model's tensors lie; None where that is not checked."""
        if self.config.compilation.address_policy == "off" or self._holder is None:
            return None
        return AddressManifest.of({"model": self._holder}, self.backend.device, before=before)

    def _autocast_now(self) -> tuple[bool, torch.dtype]:
        kind = self.backend.device.type
        enabled = torch.is_autocast_enabled(kind)
        return enabled, torch.get_autocast_dtype(kind) if enabled else torch.float32

    def check_addresses(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
        """Raise AddressError if a parameter or buffer of the model has moved since the captures, as often as
        ``compilation.address_check`` says.
        """
        key = (mode, descriptor)
        if self._moved is not None:
            raise AddressError(
                f"{mode} {descriptor} was captured before {self._moved!r} moved: a replay would use the old memory",
                remedy="Call runner.recapture().",
            )
        if self._state is None or (self.config.compilation.address_policy == "first" and key in self._checked):
            return
        self._state.check({"model": self._holder}, what=f"{mode} {descriptor}", may_grow=True)
        self._checked.add(key)

    def padded_reqs(self, descriptor: BatchDescriptor) -> int:
        """Requests of a key; PIECEWISE keys leave the number open, then as many as there can be."""
        if descriptor.num_reqs is not None:
            return descriptor.num_reqs
        return min(descriptor.num_tokens, self.plan.max_num_seqs)

    def views(self, descriptor: BatchDescriptor) -> dict[str, torch.Tensor]:
        """What the key's graph reads, by name."""
        return self.buffers.views(descriptor.num_tokens, self.padded_reqs(descriptor))

    def run_eager(self, descriptor: BatchDescriptor, tensors: Mapping[str, torch.Tensor]) -> Any:
        """The model's own code on these tensors, compiled if inductor compiles it for capture."""
        return self._run(self._own, CUDAGraphMode.NONE, descriptor, tensors)

    def run_graphed(self, mode: CUDAGraphMode, descriptor: BatchDescriptor, tensors: Mapping[str, torch.Tensor]) -> Any:
        """The model with the graphs of ``mode``, captured on the way if the scope is open."""
        if self.scope.is_open and self._before is None:  # after the first warm-up: what captures move is no state
            self._before = self._state_now()
        return self._run(self.wrapper, mode, descriptor, tensors)

    def free(self) -> None:
        """Free graphs, pool and static buffers."""
        self.backend.synchronize()
        try:
            self.before_free()
        finally:
            self._free()

    def _free(self) -> None:
        for wrapper in self.scope.wrappers:
            wrapper.reset(self.scope)
        self.scope.pool, self.scope.is_open, self.scope.entries, self.scope.wrappers = None, False, [], []
        self.buffers.buffers.clear()
        self.route.remove()
        self.backend.release_cached()

    def _run(
        self,
        call: Callable[..., Any],
        mode: CUDAGraphMode,
        descriptor: BatchDescriptor,
        tensors: Mapping[str, torch.Tensor],
    ) -> Any:
        if not self._is_traced:
            self._is_traced = True
            self._trace(descriptor)
        metadata = _Metadata((name, tensors[name]) for name in self.config.metadata)
        with torch.no_grad(), forward_context(mode, descriptor, metadata, scope=self.scope):
            return call(**{name: tensors[name] for name in self.config.inputs})

    def _trace(self, descriptor: BatchDescriptor) -> None:
        """Let the route's compiler see the model, on padding.

        Rows and requests are different primes: a number that is equal to another dimension (the rows of a cache, say)
        could be taken for it, and the code would hold for that size alone. They are three at least, because one row is
        taken for a constant; so the batch has memory of its own.
        """
        rows = _prime_below(self.plan.max_capture_size)
        mixed = self.plan.mode.has_mode(CUDAGraphMode.PIECEWISE)
        reqs = min(_prime_below(rows) if mixed and rows > 3 else rows, self.plan.max_num_seqs)
        specs = {**self.config.inputs, **self.config.metadata}
        views = StaticBuffers(specs, rows, reqs, self.backend.device).views(rows, reqs)
        batch = descriptor._replace(num_tokens=rows, num_reqs=reqs, uniform=False)
        self._run(self.route.forward, CUDAGraphMode.NONE, batch, views)


def _prime_below(most: int) -> int:
    """The largest prime below ``most``, three at least."""
    return next((n for n in range(most - 1, 3, -1) if all(n % d for d in range(2, isqrt(n) + 1))), 3)
