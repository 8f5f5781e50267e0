"""A model together with its graphs and the memory that they read: what a session fills and a runner calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from cgplan.backends import GraphBackend
from cgplan.backends.context import CaptureScope, forward_context
from cgplan.buffers.static import StaticBuffers
from cgplan.config import Config
from cgplan.errors import AddressError, CaptureMemoryError, CgplanError, InputError
from cgplan.graphs.addresses import AddressManifest
from cgplan.graphs.ambient import AmbientState, generators_of, random_state_kept, refuse_other_generators
from cgplan.graphs.pools import GraphPool, RunnerPools
from cgplan.graphs.rebound import StateSnapshot
from cgplan.graphs.wrapper import CUDAGraphEntry, CUDAGraphOptions, CUDAGraphWrapper
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.piecewise.breaks import calls_breaks
from cgplan.piecewise.routes import choose_route
from cgplan.planning import Plan


class _Metadata(dict[str, Any]):
    """The forward context's metadata; a name that is not declared is answered with those that are."""

    def __missing__(self, name: str) -> Any:
        raise InputError(
            f"the model reads metadata {name!r}, which is not declared",
            remedy=f"Declare it under `metadata`; declared are {', '.join(self) or 'none'}.",
        )


class _Unchecked(CUDAGraphOptions):
    """Of the runner's own wrapper: static buffers do not move; what may is looked at in check_addresses."""

    def policy(self, scope: CaptureScope | None) -> Literal["off"]:  # noqa: ARG002
        return "off"


class GraphedModel:
    """The model, its FULL graphs, their pools and static buffers. It owns all but the model and a given ``pool``.

    Attributes:
        plan, config: What is captured.
        backend: The device.
        most_tokens: Tokens of the largest key that the static buffers hold.
        pools: Where it is captured.
        wrapper: Holds the FULL graphs; in other modes it passes through.
        buffers: Static buffers for the largest key.
        scope: The pool of the key that is captured, and whether capturing is still allowed.
        route: How PIECEWISE segments come about.
        returns_nothing: Whether the model's output held no tensor.
        model: As it was given.
        generators: The random generators of its own that the model draws from.
        notes: What the report should warn of.
        holder: The object whose attributes are the model's state; None for a function.
        before_free: Called before graphs are freed: other ranks may read their memory.
        is_alone: Whether no other rank runs the same forwards beside this one.
    """

    def __init__(
        self,
        plan: Plan,
        config: Config,
        model: Callable[..., Any],
        backend: GraphBackend,
        pool: GraphPool | None = None,
    ) -> None:
        self.plan = plan
        self.config = config
        self.backend = backend
        self.most_tokens = plan.max_capture_size
        self.pools = RunnerPools(config.compilation.pool, backend, pool)
        self.scope = CaptureScope(None, backend, address_check=config.compilation.address_policy)
        self.buffers = self._allocate_buffers()  # before the route, which may change modules until `free`
        self.model = model
        self.find_generators()
        self.route = choose_route(plan, config, model, backend, lambda: calls_breaks(lambda: self._try(model)))
        self.wrapper = CUDAGraphWrapper(self.route.whole, CUDAGraphMode.FULL, backend=backend, options=_Unchecked())
        self.returns_nothing = False
        self.notes: list[str] = []
        self.holder = None if isinstance(model, FunctionType) else getattr(model, "__self__", model)
        self.before_free: Callable[[], None] = lambda: None
        self.is_alone = True
        self._state: AddressManifest | None = None
        self._before: AddressManifest | None = None
        self._bound: frozenset[str] | None = frozenset()  # what one run of a capture binds anew; None ahead of it
        self._checked: set[tuple[CUDAGraphMode, BatchDescriptor]] = set()
        self._moved: str | None = None
        self._refusal: CgplanError | None = None
        self._retired: list[tuple[list[Callable[[], bool]], Callable[[], None]]] = []
        self._ambient = AmbientState.now(backend.device.type)

    def find_generators(self) -> None:
        """Note the generators that the model holds now, for captures from now on; graphs that are there keep theirs."""
        self.generators = generators_of(self.model, self.backend.device)
        for generator in self.generators:
            self.backend.register_generator(generator)

    def _allocate_buffers(self) -> StaticBuffers:
        tokens = self.most_tokens
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
        if self._before is not None or self._state is None:  # else nothing was captured since the last time
            self._state = self._state_now(before=self._before, ignored=self._bound or frozenset())
            self._before, self._bound = None, frozenset()

    @contextmanager
    def captures_again(self) -> Iterator[None]:
        """A block in which more keys may be captured, between batches: static buffers hold padding, and afterwards what
        they held before; torch is in the state of the first captures.
        """
        self.backend.synchronize()
        self.scope.is_open = True
        try:
            with self._ambient.without_grad(self.backend.device.type), self.buffers.on_padding():
                with self.backend.session():
                    yield
                self.backend.synchronize()
        finally:
            self.seal()

    def warm_up(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
        """Run what a key captures, without capturing; where a trace is captured, it is found or made here."""
        call = self.route.whole if mode is CUDAGraphMode.FULL else self.route.warm
        self._run(call, CUDAGraphMode.NONE, descriptor, self.views(descriptor))

    def entry(self, key: Key) -> CUDAGraphEntry | None:
        """The entry that serves a key: ``graph`` replays the whole forward into ``output``. For a PIECEWISE key, whose
        ``graph.replay`` runs eager pieces, the forward context has to be set. None where there is none, or where the
        model's own code runs between graphs (``piecewise: wrappers``).
        """
        mode, descriptor = key
        wrapper = self.wrapper if mode is CUDAGraphMode.FULL else self.route.chain
        entry = None if wrapper is None else wrapper.entries.get(descriptor)
        return entry if entry is not None and entry.scope is self.scope else None

    def evict(self, keys: Collection[Key]) -> None:
        """Free the graphs of these keys; the plan stays as it is.

        A graph whose output somebody still holds is freed when nobody does any more: on the next change, or by
        ``sweep``. Its numbers are no longer valid all the same.
        """
        self.backend.synchronize()
        for wrapper in self.scope.wrappers:
            mine = {descriptor for mode, descriptor in keys if mode is wrapper.runtime_mode}
            for output, free in wrapper.take_out(self.scope, mine):
                self._retired.append(([], free))  # freed by the next sweep, should anything come between here
                self._retired[-1] = (self._watch(output), free)
                del output  # or the sweep below would find it held, by this function
        self._checked.difference_update(keys)
        self.sweep()
        for key in keys:
            self.pools.drop(key)

    def holds(self, key: Key) -> bool:
        """Whether a graph of that key is there."""
        mode, descriptor = key
        return any(
            entry.scope is self.scope and entry.descriptor == descriptor
            for wrapper in self.scope.wrappers
            if wrapper.runtime_mode is mode
            for entry in wrapper.entries.values()
        )

    def _watch(self, output: Any) -> list[Callable[[], bool]]:
        return [self.backend.watch(leaf) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]

    def sweep(self) -> None:
        """Free evicted graphs whose outputs nobody holds, and give memory back."""
        waiting = []
        for held, free in self._retired:
            if any(is_held() for is_held in held):
                waiting.append((held, free))
            else:
                free()
        if len(waiting) < len(self._retired):
            self._retired = waiting
            self.backend.release_cached()

    @property
    def is_invalid(self) -> bool:
        """Whether ``invalidate`` was called."""
        return self._moved is not None

    def invalidate(self, name: str) -> None:
        """Refuse replays from now on, because ``name`` has moved. Raises InputError for what is no name."""
        if not isinstance(name, str) or not name:
            raise InputError(f"invalidate was given {name!r:.100}", remedy='Name what moved, such as "kv_cache".')
        self._moved, self._state = name, None  # which may hold the old memory

    def refuse(self, error: CgplanError) -> None:
        """Raise an error like this one instead of each further replay."""
        self._refusal = error

    def check_autocast(self) -> None:
        """Raise CaptureError if autocast is not as at capture: graphs would give other dtypes than eager calls."""
        now = AmbientState.now(self.backend.device.type)
        self._ambient.refuse_other(now, "traced" if self.route.name == "ops" else "captured", ("autocast",))

    def _state_now(self, *, watches: bool = False, **known: Any) -> AddressManifest | None:
        """Where the model's tensors lie, given what AddressManifest.of is told; None where that is not checked."""
        if self.config.compilation.address_policy == "off" or self.holder is None:
            return None
        known["repeats"] = self.config.compilation.address_policy == "always"
        return AddressManifest.of({"model": self.holder}, self.backend.device, watches=watches, **known)

    def state(self) -> StateSnapshot | None:
        """What is in the model's attributes now; None for a function."""
        return None if self.holder is None else StateSnapshot(self.holder)

    def check_addresses(self, mode: CUDAGraphMode, descriptor: BatchDescriptor, *, again: bool = False) -> None:
        """Raise AddressError if a parameter or buffer of the model has moved since the captures, as often as
        ``compilation.address_check`` says, or ``again``.
        """
        key = (mode, descriptor)
        self.check_valid(f"{mode} {descriptor} was captured")
        policy = self.config.compilation.address_policy
        if policy == "off" or (policy == "first" and not again and key in self._checked):
            return
        if self.generators:
            now = generators_of(self.model, self.backend.device)
            refuse_other_generators(self.generators, now, f"{mode} {descriptor}")
        if self._state is None:
            return
        walk_again = again or key not in self._checked  # `always` sees no less than `first`
        self._state.check({"model": self.holder}, what=f"{mode} {descriptor}", may_grow=True, walk_again=walk_again)
        self._checked.add(key)

    def check_valid(self, what: str) -> None:
        """Raise what ``refuse`` was given; after ``invalidate`` AddressError, whose message begins with ``what``."""
        if self._refusal is not None:
            raise type(self._refusal)(self._refusal.message, remedy=self._refusal.remedy)
        if self._moved is not None:
            raise AddressError(
                f"{what} before {self._moved!r} moved: a replay would use the old memory",
                remedy="Call runner.recapture().",
            )

    def padded_reqs(self, descriptor: BatchDescriptor) -> int:
        """Requests of a key; PIECEWISE keys leave the number open, then as many as there can be."""
        if descriptor.num_reqs is not None:
            return descriptor.num_reqs
        return min(descriptor.num_tokens, self.plan.max_num_seqs)

    def views(self, descriptor: BatchDescriptor) -> dict[str, torch.Tensor]:
        """What the key's graph reads, by name."""
        return self.buffers.views(descriptor.num_tokens, self.padded_reqs(descriptor))

    def run_eager(self, descriptor: BatchDescriptor, tensors: Mapping[str, torch.Tensor]) -> Any:
        """The model's own code on these tensors."""
        return self._run(self.model, CUDAGraphMode.NONE, descriptor, tensors)

    def run_graphed(self, mode: CUDAGraphMode, descriptor: BatchDescriptor, tensors: Mapping[str, torch.Tensor]) -> Any:
        """The model with the graphs of ``mode``, captured on the way if the scope is open."""
        if self.scope.is_open and self._before is None:  # after the first warm-up: what captures move is no state
            self._before, self._bound = self._state_now(watches=True), None
        call = self.wrapper if mode is CUDAGraphMode.FULL else self.route.forward
        output = self._run(call, mode, descriptor, tensors)
        if self._bound is None and (now := self._state_now(before=self._before)) is not None:
            self._bound = now.ignored  # of two buffers in turn, say, which a second run would bring to their places
        return output

    def free(self) -> None:
        """Free graphs, pool and static buffers."""
        try:
            self.backend.synchronize()
        finally:
            before, self.before_free = self.before_free, lambda: None  # other ranks wait for it once
            try:
                before()
            finally:
                self._free()

    def _free(self) -> None:
        for wrapper in self.scope.wrappers:
            wrapper.reset(self.scope)
        for _, free in self._retired:
            free()
        self._retired = []
        self.pools.close()
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
        metadata = _Metadata((name, tensors[name]) for name in self.config.metadata)
        with torch.no_grad(), forward_context(mode, descriptor, metadata, scope=self.scope):
            return call(**{name: tensors[name] for name in self.config.inputs})

    def _try(self, model: Callable[..., Any]) -> None:
        """Run the model's own code on padding."""
        _, smallest = self.plan.keys[-1]
        with random_state_kept(self.backend.device, self.generators):
            self._run(model, CUDAGraphMode.NONE, smallest, self.views(smallest))
