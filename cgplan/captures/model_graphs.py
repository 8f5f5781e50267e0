"""A model together with its graphs and the memory that they read: what a session fills and a runner calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

from cgplan.backends import GraphBackend
from cgplan.backends.backend import autocast_cache
from cgplan.backends.context import CaptureScope, forward_context
from cgplan.buffers.outputs import OutputRows
from cgplan.buffers.static import StaticBuffers
from cgplan.config import Config
from cgplan.errors import AddressError, CaptureMemoryError, InputError
from cgplan.graphs.ambient import AmbientState, number_of
from cgplan.graphs.footprint import Footprint, examine, look
from cgplan.graphs.model_state import ModelState
from cgplan.graphs.pools import GraphPool, RunnerPools
from cgplan.graphs.wrapper import CUDAGraphEntry, CUDAGraphOptions, CUDAGraphWrapper
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.piecewise.breaks import any_breaks
from cgplan.piecewise.routes import choose_route
from cgplan.planning import Plan
from cgplan.planning.build import DEFAULT_SPLITTING_OPS
from cgplan.reports.records import StateRecord


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


class ModelGraphs:
    """The model, its FULL graphs, their pools and static buffers. It owns all but the model and a given ``pool``.

    Attributes:
        plan, config: The keys, and how to capture them.
        backend: The device.
        most_tokens: Tokens of the largest key that the static buffers hold.
        pools: Where it is captured.
        wrapper: Holds the FULL graphs; in other modes it passes through.
        buffers: Static buffers for the largest key.
        scope: The pool of the key that is captured, and whether capturing is still allowed.
        route: How PIECEWISE segments come about.
        outputs: How the model's outputs are checked and cut.
        returns_nothing: Whether the model's output held no tensor.
        model: As it was given.
        roots: The objects that are looked at for state, by name: the model, or those that were given as ``state``.
        generators: The random generators that the model draws from, but for the default one.
        footprints: Findings of the looks ahead of the captures, by mode.
        looked_at: One line on what the last captures looked at.
        state: Places that the last captures wrote, and whether they were put back.
        notes: Warnings for the report.
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
        state: Sequence[object] | None = None,
    ) -> None:
        self.plan = plan
        self.config = config
        self.backend = backend
        self.most_tokens = plan.max_capture_size
        self.pools = RunnerPools(config.compilation.pool, backend, pool)
        self.scope = CaptureScope(None, backend, address_check=config.compilation.address_policy)
        self.buffers = self._allocate_buffers()  # before the route, which may change modules until `free`
        self.model = model
        self.roots = {"model": model} if state is None else {f"state[{i}]": item for i, item in enumerate(state)}
        self.generators: tuple[torch.Generator, ...] = ()
        self.footprints: dict[CUDAGraphMode, Footprint] = {}
        self.looked_at = ""
        self.state: tuple[StateRecord, ...] = ()
        self.returns_nothing = False
        rows = config.model.output_rows if config.model else "num_tokens"
        self.outputs = OutputRows(rows, plan.query_len, config.compilation.outputs == "clone")
        self.notes: list[str] = []
        self.before_free: Callable[[], None] = lambda: None
        self.is_alone = True
        self._kept: ModelState | None = None  # while captures may change the model
        self._sealed: ModelState | None = None  # what graphs rely on
        self._has_captured = True
        self._volatile: set[str] = set()
        self._looked: set[CUDAGraphMode] = set()
        self._checked: set[tuple[CUDAGraphMode, BatchDescriptor]] = set()
        self._moved: str | None = None
        self._retired: list[tuple[list[Callable[[], bool]], Callable[[], None]]] = []
        self._ambient = AmbientState.now(backend.device.type)
        self.route = choose_route(plan, config, model, backend, self._calls_breaks)
        self.wrapper = CUDAGraphWrapper(self.route.whole, CUDAGraphMode.FULL, backend=backend, options=_Unchecked())

    @contextmanager
    def keeping_state(self) -> Iterator[None]:
        """A block of captures, or of other runs that no batch asked for: the model is as it was after it, see Note
        [What is put back] in model_state.py. A block inside a block is part of it.
        """
        if self._kept is not None:
            yield
            return
        self.backend.synchronize()
        self._kept = kept = ModelState.of(self.roots, self.backend.device)
        self._use_generators(kept.generators)
        self._looked.clear()
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # a device that is lost says so by the error that is under way
                self._restore(kept)
            raise
        else:
            self._restore(kept)
        finally:
            self._kept = None

    def _restore(self, kept: ModelState) -> None:
        self.backend.synchronize()
        kept.restore()
        self.backend.synchronize()  # the next batch may come on another stream
        self._kept = None
        self._volatile |= kept.volatile
        self.looked_at = kept.summary()
        self.state = tuple(StateRecord(path=p, nbytes=n, kept=how) for p, (n, how) in kept.outcome.items())
        if not self.scope.is_open:
            self.seal()

    @property
    def copied_bytes(self) -> int:
        """Bytes on the device of the copies that the state will be restored from."""
        return 0 if self._kept is None else self._kept.copied()

    @property
    def is_compiled(self) -> bool:
        """Whether the model has parts under torch.compile, as far as the walk sees; inside ``keeping_state``."""
        return self._kept is not None and self._kept.is_compiled

    def noting_capture(self) -> AbstractContextManager[None]:
        """A block that captures one key, after its warm-ups; inside ``keeping_state``."""
        assert self._kept is not None
        return self._kept.noting_capture()

    def look(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
        """Look at the forward, once for each mode, ahead of its warm-ups; inside ``keeping_state``.

        Raises CaptureError as ``footprint.examine``.
        """
        if mode in self._looked:
            return
        assert self._kept is not None
        self._looked.add(mode)
        views, route, limit = self.views(descriptor), self.route, self.copy_limit()
        run = partial(self._run, self.model, CUDAGraphMode.NONE, descriptor, views)
        if mode is CUDAGraphMode.PIECEWISE and route.name == "wrappers":  # Python code runs on each replay
            found = look(run, self._kept, limit, part="eager piece")
        else:
            is_whole, ops = mode is CUDAGraphMode.FULL, self.config.compilation.splitting_ops
            split = (DEFAULT_SPLITTING_OPS if ops is None else ops) if route.name == "ops" and not is_whole else ()
            found, notes = examine(run, self._kept, list(views.values()), limit, eager_ops=split, is_whole=is_whole)
            self.notes += [note for note in notes if note not in self.notes]
        self.footprints[mode] = found
        if mode is CUDAGraphMode.PIECEWISE and route.name in ("modules", "wrappers"):
            route.operators = found.operators
        self._use_generators(tuple(found.generators.values()))

    def _calls_breaks(self) -> bool:
        if not any_breaks():
            return False
        _, smallest = self.plan.keys[-1]
        run = partial(self._run, self.model, CUDAGraphMode.NONE, smallest, self.views(smallest))
        with self.keeping_state():
            assert self._kept is not None
            return look(run, self._kept, self.copy_limit()).breaks

    def copy_limit(self) -> int:
        """Bytes of copies of the model's state that may lie on the device."""
        limit = self.config.compilation.state_copy
        return (self.backend.memory().free or 4 << 30) // 4 if limit is None else limit

    def _use_generators(self, found: Sequence[torch.Generator]) -> None:
        known = set(map(number_of, self.generators))
        new = [generator for generator in found if number_of(generator) not in known]
        self.generators += tuple(new)
        for generator in new:
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
        policy = self.config.compilation.address_policy
        if self._kept is None and (self._has_captured or self._sealed is None) and policy != "off":
            self._sealed = ModelState.of(self.roots, self.backend.device)
            self._sealed.volatile |= self._volatile
            if policy == "first":  # each check is a walk
                self._sealed.let_go()
            self._has_captured = False

    @contextmanager
    def captures_again(self) -> Iterator[None]:
        """A block in which more keys may be captured, between batches: static buffers hold padding, and afterwards what
        they held before; torch is in the state of the first captures.
        """
        self.backend.synchronize()
        self.scope.is_open = True
        try:
            with self.keeping_state(), self._ambient.without_grad(self.backend.device.type), self.buffers.on_padding():
                with self.backend.session():
                    yield
                self.backend.synchronize()
        finally:
            self.seal()

    def warm_up(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> Any:
        """Run what a key captures, without capturing; where a trace is captured, it is found or made here. Returns the
        output.
        """
        is_full = mode is CUDAGraphMode.FULL
        with autocast_cache(on=not is_full and self.route.name == "wrappers"):  # wrappers turn it off for themselves
            call = self.route.whole if is_full else self.route.warm
            return self._run(call, CUDAGraphMode.NONE, descriptor, self.views(descriptor))

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

    def drop_all(self) -> None:
        """Free all graphs and their pools; more can be captured."""
        self.backend.synchronize()
        for wrapper in self.scope.wrappers:
            wrapper.reset(self.scope)
        self.scope.entries, self.scope.wrappers = [], []
        self.backend.release_cached()
        self.pools.renew()

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
        self._moved, self._sealed = name, None  # which may hold the old memory

    def check_autocast(self) -> None:
        """Raise CaptureError if autocast is not as at capture: graphs would give other dtypes than eager calls."""
        now = AmbientState.now(self.backend.device.type)
        self._ambient.refuse_other(now, "traced" if self.route.name == "ops" else "captured", ("autocast",))

    def check_addresses(self, mode: CUDAGraphMode, descriptor: BatchDescriptor, *, again: bool = False) -> None:
        """Raise AddressError if a parameter or buffer of the model has moved since the captures, as often as
        ``compilation.address_check`` says, or ``again``.
        """
        key = (mode, descriptor)
        self.check_valid(f"{mode} {descriptor} was captured")
        policy = self.config.compilation.address_policy
        if policy == "off" or (policy == "first" and not again and key in self._checked):
            return
        if self._sealed is None or (key in self._checked and not again and self._sealed.holds()):
            return
        self._sealed.refuse_moved(f"{mode} {descriptor}", self.roots, may_grow=True)
        self._checked.add(key)

    def check_valid(self, what: str) -> None:
        """After ``invalidate`` raise AddressError, whose message begins with ``what``."""
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
        self._has_captured |= self.scope.is_open
        call = self.wrapper if mode is CUDAGraphMode.FULL else self.route.forward
        return self._run(call, mode, descriptor, tensors)

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
