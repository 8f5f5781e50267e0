"""Torch's own ways to run a model by CUDA graphs, as peers of a GraphRunner; they need a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch

from cgplan.errors import BackendError
from cgplan.graphs.model_state import ModelState
from cgplan.measure.baselines import INDUCTORS, Bare, BenchBatch, Call, Way

_STATIC = "_dynamo_static_input_type"  # where mark_static_address leaves its mark


class _NeedsCuda(Way):
    def check(self, batches: Sequence[BenchBatch]) -> None:  # noqa: ARG002
        """Raise BackendError where there is no GPU."""
        if self.backend.device.type != "cuda":
            raise BackendError(f"it needs CUDA, and this is {self.backend.name}", remedy="Run it on a GPU.")


class GraphedCallables(_NeedsCuda):
    """``torch.cuda.make_graphed_callables``, one for each size in one pool, without gradients."""

    name = "make_graphed_callables"

    def check(self, batches: Sequence[BenchBatch]) -> None:
        """Raise what a capture raises that cleans up behind itself; this one would leave torch's allocator unusable."""
        super().check(batches)
        trial = Bare(self.runner)
        try:
            trial.prepare(batches)
        finally:
            trial.free()

    def prepare(self, batches: Sequence[BenchBatch]) -> None:
        """Capture each size, the largest first, with torch's own number of warm-ups."""
        self._graphed: dict[int, Callable[..., Any]] = {}
        pool, model = torch.cuda.graph_pool_handle(), self.runner.model
        for batch in sorted(batches, key=lambda b: -b.size):
            tensors = tuple(value.clone() for value in batch.tensors.values())

            def forward(*given: torch.Tensor, batch: BenchBatch = batch) -> Any:
                with torch.no_grad():
                    return batch.run(model, dict(zip(batch.tensors, given, strict=True)))

            self._graphed[batch.size] = torch.cuda.make_graphed_callables(forward, tensors, pool=pool)

    def call(self, batch: BenchBatch) -> Call:
        """The graphed callable's call."""
        graphed, tensors = self._graphed[batch.size], tuple(batch.tensors.values())
        return lambda: graphed(*tensors)

    def free(self) -> None:
        """Drop the callables; their graphs go with them."""
        self._graphed.clear()


class ReduceOverhead(_NeedsCuda):
    """``torch.compile(mode="reduce-overhead", dynamic=False)``, with a step marked before each call.

    It compiles for each size from an empty cache. Tensors that the model holds are marked as lying still, as its
    parameters are, because a graph that writes into others would be left out.
    """

    name = "reduce-overhead"
    calls_until_ready = 2  # the first compiles and warms up, the second records

    def prepare(self, batches: Sequence[BenchBatch]) -> None:  # noqa: ARG002
        """Wrap the model; compiling comes with the first calls."""
        model = self.runner.model
        self._mark_static(getattr(model, "__self__", model))

        def forward(**inputs: torch.Tensor) -> Any:
            return model(**inputs)

        # With a code object of its own, so that all that Dynamo keeps of it can be dropped.
        own = FunctionType(forward.__code__.replace(), globals(), "forward", closure=forward.__closure__)
        self._code = own.__code__
        self._compiled = torch.compile(own, mode="reduce-overhead", dynamic=False)
        self._skips = self._skipped()

    def _mark_static(self, holder: Any) -> None:
        device = self.backend.device
        tensors = ModelState.of({"model": holder}, device).tensors
        found = [tensor for tensor in tensors if tensor.device == device and not hasattr(tensor, _STATIC)]
        self._marked = [tensor for tensor in found if not isinstance(tensor, torch.nn.Parameter)]
        for tensor in self._marked:
            torch._dynamo.mark_static_address(tensor, guard=False)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """With an empty cache of compiled code, and room for all sizes."""
        from torch._inductor.utils import fresh_inductor_cache

        limits = {"recompile_limit": 1024, "fail_on_recompile_limit_hit": True}
        with torch._dynamo.config.patch(limits), fresh_inductor_cache():
            yield

    def call(self, batch: BenchBatch) -> Call:
        """A step of the compiled model."""
        compiled = self._compiled

        def run() -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return batch.run(compiled)

        return run

    def draws_otherwise(self, batch: BenchBatch) -> str | None:  # noqa: ARG002
        """Inductor has a generator of its own."""
        return INDUCTORS

    def settled(self) -> None:
        """Note graphs that torch left out."""
        skipped = self._skipped() - self._skips
        if skipped:
            self.note = f"torch left out {skipped} graphs and ran them eagerly; TORCH_LOGS=perf_hints says why"

    def free(self) -> None:
        """Drop recordings and compiled code, and the marks."""
        for tensor in self._marked:
            delattr(tensor, _STATIC)
        self._marked.clear()
        torch._C._dynamo.eval_frame.reset_code(self._code)
        del self._compiled
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()

    @staticmethod
    def _skipped() -> int:
        return int(torch._dynamo.utils.counters["inductor"]["cudagraph_skips"])
