"""A model's forward on static buffers, in its forward context."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cgplan.backends import GraphBackend
from cgplan.backends.backend import autocast_cache, number_of, span
from cgplan.backends.capture_answers import answering
from cgplan.backends.context import CaptureScope, forward_context
from cgplan.buffers.static import StaticBoxes, Tensors
from cgplan.captures.addresses import AddressChecks
from cgplan.config import Config
from cgplan.errors import ConfigError, InputError
from cgplan.graphs.ambient import AmbientState
from cgplan.graphs.fingerprint import Fingerprint, is_within
from cgplan.graphs.wrapper import CUDAGraphWrapper
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.piecewise.routes import SplitRoute
from cgplan.planning import Plan
from cgplan.planning.costs import widest

State = Sequence[object] | Mapping[str, object] | None
BeforeKey = Callable[[CUDAGraphMode, BatchDescriptor, Tensors], object]


class _Metadata(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise InputError(
            f"the model reads metadata {name!r}, which is not declared",
            remedy=f"Declare it under `metadata`; declared are {', '.join(self) or 'none'}.",
        )


class ForwardFacts:
    """What captures found of the forward, for as long as its graphs live.

    Attributes:
        capture_visible: Modes in which packages see captures.
        aside: Paths that eager pieces change.
        overwritten: Ids of storages that each run overwrites unread.
        is_coarse: In half precision or TensorFloat32.
        outside: What graphs read, and others may drop.
        read_whole: Bytes of storages by id, as in a Footprint.
    """

    def __init__(self) -> None:
        self.capture_visible = set[CUDAGraphMode]()
        self.aside = set[str]()
        self.written = dict[str, Tensor]()
        self.overwritten = set[int]()
        self.read_whole = dict[int, int]()
        self.changes_python = False
        self.is_coarse = False
        self.outside = list[Tensor]()
        self.notes = list[str]()

    @property
    def storages_written(self) -> set[int]:
        """Their ids."""
        found = set(self.overwritten)
        for tensor in self.written.values():
            found.add(tensor.untyped_storage()._cdata)
        return found

    @property
    def weight_bytes(self) -> int:
        """Of what each run reads and none writes."""
        written = self.storages_written
        total = 0
        for storage, nbytes in self.read_whole.items():
            if storage not in written:
                total += nbytes
        return total

    def note(self, *warnings: str) -> None:
        for warning in warnings:
            if warning not in self.notes:
                self.notes.append(warning)


@dataclass(eq=False, repr=False)
class ModelForward:
    """How a model is run: with the rows of its static buffers, eagerly or through its wrappers.

    Attributes:
        roots: The objects whose state counts, by name.
    """

    plan: Plan
    config: Config
    model: Callable[..., Any]
    backend: GraphBackend
    before_key: BeforeKey | None = None
    on_demand: bool = False
    state: State = None
    route: SplitRoute = field(init=False)
    wrapper: CUDAGraphWrapper = field(init=False)

    def __post_init__(self) -> None:
        backend = self.backend
        state = self.state
        policy = self.config.compilation.address_policy
        self.scope = CaptureScope(None, backend, address_check=policy)
        self.allocate_buffers(self.plan.keys)
        self.generators: tuple[torch.Generator, ...] = ()
        self.facts = ForwardFacts()
        self.roots: dict[str, Any] = {}
        if isinstance(state, Mapping):
            self.roots |= state
        elif state is None:
            self.roots["model"] = self.model
        elif not isinstance(state, Iterable):
            raise ConfigError(
                f"state is {state!r:.80}",
                remedy="List the objects whose tensors the model uses: state=[model].",
            )
        else:
            for index, item in enumerate(state):
                name = f"state[{index}]"
                self.roots[name] = item
                found = Fingerprint.of({name: item}, backend.device)
                if found.tensors:
                    continue
                self.facts.note(
                    f"{name} ({type(item).__name__}) holds no tensor: `state` lists the "
                    "objects whose tensors the model uses"
                )
        self.addresses = AddressChecks(self.roots, backend.device, policy)
        self.ambient = AmbientState.now(backend.device.type)

    # --- buffers ----------------------------------------------------------------------------------

    def allocate_buffers(self, keys: Sequence[Key]) -> None:
        """Captures on demand make buffers as needed. Raises CaptureMemoryError and
        BackendError.
        """
        config = self.config
        most = widest(keys)
        self.most_tokens = max(most.values(), default=0)
        if not most:
            most = {(1,) * (len(config.dim_names) - 1): 0}
        rows = {}
        for sizes, tokens in most.items():
            rows[sizes] = tokens, min(tokens, self.plan.max_num_seqs)
        self.buffers = StaticBoxes(
            rows,
            config.tensors_at,
            self.backend.device,
        )
        if not self.on_demand:
            for sizes in rows:
                self.buffers[sizes]

    def padded_reqs(self, descriptor: BatchDescriptor) -> int:
        """The most requests, if a key leaves them open."""
        if descriptor.num_reqs is not None:
            return descriptor.num_reqs
        return min(descriptor.num_tokens, self.plan.max_num_seqs)

    def views(self, descriptor: BatchDescriptor) -> dict[str, Tensor]:
        return self.buffers[descriptor.sizes].views(
            descriptor.num_tokens,
            self.padded_reqs(descriptor),
        )

    def use_generators(self, found: Iterable[torch.Generator]) -> None:
        known = set(map(number_of, self.generators))
        for generator in found:
            if number_of(generator) not in known:
                self.generators += (generator,)
                self.backend.register_generator(generator)

    # --- runs -------------------------------------------------------------------------------------

    def runs_python_again(self, mode: CUDAGraphMode) -> bool:
        """Whether a replay runs Python between wrappers."""
        return mode is CUDAGraphMode.PIECEWISE and self.route.name == "wrappers"

    def frozen(
        self,
        mode: CUDAGraphMode,
        paths: Iterable[str],
    ) -> list[str]:
        """Paths that no replay changes."""
        if self.runs_python_again(mode):
            return []
        return [path for path in paths if not is_within(path, self.facts.aside)]

    def capture_answers(
        self,
        mode: CUDAGraphMode,
        *,
        capturing: bool,
    ) -> AbstractContextManager[None]:
        is_visible = mode in self.facts.capture_visible
        hidden_from = self.config.compilation.hide_capture_from
        # eager pieces ask torch
        if is_visible and capturing:
            hidden_from = ()
        return answering(
            hidden_from,
            lambda _: is_visible,
        )

    def check_autocast(self) -> None:
        done = "traced" if self.route.name == "ops" else "captured"
        self.ambient.refuse_other_autocast(self.backend.device.type, done)

    def warm_up(self, key: Key) -> Any:
        mode, descriptor = key
        call = self.route.warm
        if mode is CUDAGraphMode.FULL:
            call = self.route.whole
        cache = autocast_cache(on=self.runs_python_again(mode))
        with cache, self.capture_answers(mode, capturing=False), span("warm-up"):
            return self.run(call, CUDAGraphMode.NONE, descriptor, self.views(descriptor))

    def run_wrapped(
        self,
        key: Key,
        tensors: Tensors,
    ) -> Any:
        """Through the wrapper, which captures while the scope is open, and replays else."""
        mode, descriptor = key
        call = self.route.forward
        if mode is CUDAGraphMode.FULL:
            call = self.wrapper
        return self.run(call, mode, descriptor, tensors)

    def run_eager(
        self,
        descriptor: BatchDescriptor,
        tensors: Tensors,
    ) -> Any:
        with autocast_cache(on=self.route.name == "wrappers"):
            return self.run(self.model, CUDAGraphMode.NONE, descriptor, tensors)

    def run_unpadded(
        self,
        descriptor: BatchDescriptor,
        values: Iterable[Tensor],
    ) -> Any:
        """``values``: in the order of their declaration, on the device or on the host."""
        named = {}
        for name, value in zip(self.config.tensors, values, strict=True):
            named[name] = value.to(self.backend.device)
        return self.run_eager(descriptor, named)

    def run(
        self,
        call: Callable[..., Any],
        mode: CUDAGraphMode,
        descriptor: BatchDescriptor,
        tensors: Tensors,
    ) -> Any:
        """The metadata goes into the forward context."""
        inputs = {}
        for name in self.config.inputs:
            inputs[name] = tensors[name]
        metadata = _Metadata()
        for name in self.config.metadata:
            metadata[name] = tensors[name]
        with (
            torch.no_grad(),
            forward_context(
                mode,
                descriptor,
                metadata,
                scope=self.scope,
            ),
        ):
            return call(**inputs)
