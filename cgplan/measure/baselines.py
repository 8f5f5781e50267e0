"""Other ways to run the same model: what one would write instead of a GraphRunner; torch's are in peers_cuda.py.

Note [Several ways in one process]
    inductor's CUDA graphs drop the process's cuBLAS workspaces before and after each recording, also those that other
    graphs were captured with. So that way is prepared while no other graphs are there, and records nothing later.
    Resetting Dynamo would drop the traces of cgplan's runners: no way does that. What a way compiled is dropped by
    its own code object.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from cgplan.backends import GraphBackend
from cgplan.backends.context import forward_context
from cgplan.errors import CgplanError
from cgplan.graphs.footprint import look
from cgplan.graphs.model_state import ModelState
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.reports.records import OURS
from cgplan.runner.runner import GraphRunner

Call = Callable[[], Any]
INDUCTORS = "code that inductor compiled draws others"


@dataclass(frozen=True, slots=True)
class BenchBatch:
    """One batch that is measured.

    Attributes:
        size: Tokens, unpadded.
        inputs, metadata: Its tensors, on the device.
        options: The other arguments of a runner's call.
        descriptor: What an eager forward sees.
    """

    size: int
    inputs: Mapping[str, torch.Tensor]
    metadata: Mapping[str, torch.Tensor]
    options: Mapping[str, Any]
    descriptor: BatchDescriptor

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Inputs and metadata together."""
        return {**self.inputs, **self.metadata}

    def run(self, model: Callable[..., Any], tensors: Mapping[str, torch.Tensor] | None = None) -> Any:
        """Call a model on the batch, or on other tensors in its place, in the forward context that it may read."""
        given = self.tensors if tensors is None else tensors
        with forward_context(CUDAGraphMode.NONE, self.descriptor, {name: given[name] for name in self.metadata}):
            return model(**{name: given[name] for name in self.inputs})

    def given_to(self, runner: GraphRunner) -> dict[str, torch.Tensor]:
        """The tensors of a runner's call: where it copies none in, views of its static buffers that hold the batch."""
        if runner.config.compilation.cudagraph_copy_inputs or self.size > runner.wanted.max_capture_size:
            return self.tensors
        views = runner.input_views(self.size, self.descriptor.num_reqs)
        for name, value in self.tensors.items():
            views[name].copy_(value)
        return views


class Way(ABC):
    """One way to run a model. It is prepared for some batches, called, and freed; then it can be prepared again.

    Args:
        runner: Knows the model and the device.

    Attributes:
        name: As in reports.
        calls_until_ready: Calls of a new size before it runs as it will from then on.
        note: What one has to know to read its figures, once it is prepared.
    """

    name: str
    calls_until_ready = 1

    def __init__(self, runner: GraphRunner) -> None:
        self._runner = runner
        self.note: str | None = None

    @property
    def backend(self) -> GraphBackend:
        """The device."""
        return self._runner.backend

    @property
    def runner(self) -> GraphRunner:
        """The runner that it is compared with."""
        return self._runner

    def check(self, batches: Sequence[BenchBatch]) -> None:  # noqa: B027
        """Raise what stands against it, before it is prepared; what this costs is not counted."""

    @abstractmethod
    def prepare(self, batches: Sequence[BenchBatch]) -> None:
        """Do all that is done before the first call."""

    @abstractmethod
    def call(self, batch: BenchBatch) -> Call:
        """A call with these tensors, which may be new ones each time."""

    def free(self) -> None:  # noqa: B027
        """Give back what it holds."""

    def settled(self) -> None:  # noqa: B027
        """Look at what the first calls have done."""

    def draws_otherwise(self, batch: BenchBatch) -> str | None:  # noqa: ARG002
        """Why a model that draws random numbers gets others than by its own code, from the same seed; None if not."""
        return None

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """A block around preparation and first calls."""
        yield


class Ours(Way):
    """The runner itself, captured anew."""

    name = OURS

    def prepare(self, batches: Sequence[BenchBatch]) -> None:  # noqa: ARG002
        """Capture the runner's plan."""
        self.runner.recapture()

    def call(self, batch: BenchBatch) -> Call:
        """The runner's call; where it copies nothing in, with the copies that its caller makes."""
        runner, given = self._runner, batch.given_to(self._runner)
        own = [(given[name], value) for name, value in batch.tensors.items() if given[name] is not value]
        call: dict[str, Any] = {**given, **batch.options}

        def run() -> Any:
            for view, value in own:  # batches of other sizes lie on the same memory
                view.copy_(value)
            return runner(**call)

        return run if own else lambda: runner(**call)

    def draws_otherwise(self, batch: BenchBatch) -> str | None:
        """Where the batch is padded, or inductor has compiled the forward."""
        route = self.runner.route(batch.tensors, **batch.options)
        if route.mode is not CUDAGraphMode.NONE and route.descriptor.num_tokens != batch.size:
            return "a padded batch draws others"
        return INDUCTORS if self.runner.config.compilation.compiler == "inductor" else None

    def free(self) -> None:
        """Give the runner's memory back."""
        self.runner.suspend()


class Eager(Way):
    """The model's own code."""

    name = "eager"

    def prepare(self, batches: Sequence[BenchBatch]) -> None:
        """Nothing."""

    def call(self, batch: BenchBatch) -> Call:
        """The model's call."""
        model = self.runner.model
        return lambda: batch.run(model)


class Bare(Way):
    """Graphs by hand: begin and end of a capture for each size into one pool, and nothing else.

    A call copies each tensor into a static one and replays. There is no padding, no dispatch and no check.
    """

    name = "bare"

    def prepare(self, batches: Sequence[BenchBatch]) -> None:
        """Capture each size, the largest first, as often warmed up as the runner does it."""
        backend, model = self.backend, self.runner.model
        self._pool, self._graphs = backend.new_pool(), dict[int, tuple[Any, dict[str, torch.Tensor], Any]]()
        with backend.session():
            for batch in sorted(batches, key=lambda b: -b.size):
                static = {name: value.clone() for name, value in batch.tensors.items()}
                for _ in range(self.runner.config.compilation.cudagraph_num_of_warmups):
                    batch.run(model, static)
                self._graphs[batch.size] = self._capture(batch, static)

    def _capture(self, batch: BenchBatch, static: dict[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor], Any]:
        backend, model = self.backend, self.runner.model
        graph = backend.new_graph(self._pool)
        try:
            with backend.capturing(graph):
                output = batch.run(model, static)
        except CgplanError:
            raise
        except Exception as error:  # of torch's own, which may name no operator
            found = look(lambda: batch.run(model, static), ModelState.of({}, backend.device))
            raise found.host_sync or error from None
        return graph, static, output

    def call(self, batch: BenchBatch) -> Call:
        """Copies and a replay."""
        graph, static, output = self._graphs[batch.size]
        pairs = [(static[name], value) for name, value in batch.tensors.items()]
        replay = self.backend.launcher(graph)

        def run() -> Any:
            for target, value in pairs:
                target.copy_(value)
            replay()
            return output

        return run

    def free(self) -> None:
        """Free graphs and pool."""
        for graph, _, _ in self._graphs.values():
            self.backend.reset(graph)
        self._graphs.clear()
        del self._pool


def used_bytes(backend: GraphBackend) -> int:
    """Device memory that is taken, once caches are given back; on the tape, what pools have reserved."""
    backend.synchronize()
    gc.collect()
    backend.release_cached()
    now = backend.memory()
    return now.reserved if now.free is None or not backend.supports("driver_bytes") else now.total - now.free
