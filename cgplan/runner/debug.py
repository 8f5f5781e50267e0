"""Debug mode: every graph compared with eager, padding poisoned, and outputs that expire visibly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from cgplan.buffers.compare import differences
from cgplan.captures.failures import explain_eager_failure
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.errors import NumbersError
from cgplan.graphs.ambient import random_state_kept
from cgplan.graphs.footprint import look
from cgplan.graphs.model_state import ModelState
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.runner.prepared import PreparedCall


class DebugChecks:
    """The checks of a runner while ``compilation.debug`` is set. A call then costs several times as much.

    On the first call that a graph serves, its results are compared with those of the code that it was captured from
    (the model's own, or what inductor made of it), run eagerly on the same padded batch, and with a replay whose
    padding rows are NaN, or copies of real rows where operators check values on the device: real rows must be the same
    to the last bit. So the forward runs up to four times. The model's
    tensors and attributes that it writes are put back after each run but the last, which is the graph's own replay, as
    far as ModelState keeps them; memory beyond ``compilation.state_copy``, such as a KV cache, and state outside of the
    model are not put back. All runs draw the same random numbers. On every call, the output of the call before is
    filled with NaN.
    """

    def __init__(self, graphed: ModelGraphs) -> None:
        self._graphed = graphed
        # By key and whether there was padding: the difference that was found, None if there is none.
        self._seen: dict[tuple[CUDAGraphMode, BatchDescriptor, bool], str | None] = {}
        self._handed: list[Tensor] = []

    def wrap(self, call: PreparedCall) -> None:
        # the output is a copy, which the next call fills with NaN
        found: list[Any] = []
        replay, output = call.replay, call.output

        def read() -> Any:
            replay()
            return _copied(output())

        def checked() -> None:
            found[:] = [self._checked(call, read)]

        call.replay, call.output = checked, found.pop

    def _checked(self, call: PreparedCall, read: Callable[[], Any]) -> Any:
        mode, descriptor = call.route.mode, call.route.descriptor
        with torch.no_grad():
            for tensor in self._handed:
                tensor.detach().fill_(math.nan)  # the caller may have asked for its gradient
        padding = self._padding(descriptor, call.route.batch.sizes)
        checked = (mode, descriptor, bool(padding))
        try:
            references = [] if checked in self._seen else self._references(call, padding, read)
        except Exception as error:
            failure = explain_eager_failure(error, f"{mode} {descriptor}")
            raise failure from (error if failure is not error else error.__cause__)
        found = read()
        wrong = self._seen.get(checked)
        for name, reference in references:
            unlike = (f"{name}: {words}" for words, largest in differences(found, reference) if largest != 0)
            wrong = wrong or next(unlike, None)
        # A difference is looked for again by the next call; not with other ranks, which run the forward once only.
        if wrong is None or not self._graphed.is_alone:
            self._seen[checked] = wrong
        if wrong is not None:
            raise NumbersError(
                f"the replay of {mode} {descriptor} differs from {wrong}",
                remedy="Look for numbers and branches that Python computed at capture, tensors that moved, padding "
                "that reaches real rows, and random operators that do not draw from torch's generators, such as "
                "Python's and NumPy's.",
            )
        leaves = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        self._handed = [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
        return found

    def _references(
        self, call: PreparedCall, padding: list[tuple[Tensor, Tensor]], read: Callable[[], Any]
    ) -> list[tuple[str, Any]]:
        graphed, descriptor, batch = self._graphed, call.route.descriptor, call.route.batch
        staged = [
            (buffer.tensor, buffer.tensor.clone()) for buffer in graphed.buffers[descriptor.sizes].buffers.values()
        ]
        run_eager = partial(graphed.run_eager, descriptor, graphed.views(descriptor))
        written = ModelState.of(graphed.roots, graphed.backend.device)

        @contextmanager
        def undone() -> Iterator[None]:  # the model may write into its inputs
            try:
                with random_state_kept(graphed.backend.device, graphed.generators):
                    yield
            finally:
                for tensor, values in staged:
                    tensor.copy_(values)
                written.restore()

        with undone():
            checks = look(run_eager, written, graphed.copy_limit()).checks
        name = "the model's own code"
        if graphed.config.compilation.compiler == "inductor":  # whose kernels round otherwise
            name, run_eager = "the compiled model", partial(graphed.warm_up, call.route.mode, descriptor)
        with undone():
            eager = _copied(graphed.outputs.cut(run_eager(), batch))
        if not padding:
            return [(name, eager)]
        if checks is None:
            try:
                with undone():
                    for rows, _ in padding:
                        rows.fill_(math.nan)
                    return [(name, eager), ("the same batch with NaN in its padding rows", read())]
            except RuntimeError:  # an eager piece, or an operator that the look does not know
                if graphed.backend.device.type != "cpu":  # the device may be lost
                    raise
        with undone():
            for rows, real in padding:
                rows.copy_(real)
            return [(name, eager), ("the same batch with copies of real rows in its padding rows", read())]

    def _padding(self, descriptor: BatchDescriptor, sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        """Padding of floating-point inputs in each dimension, and one real slice beside it."""
        reqs, found, real = self._graphed.padded_reqs(descriptor), [], self._graphed.config.tensors_at(sizes)
        for name, buffer in self._graphed.buffers[descriptor.sizes].buffers.items():
            for dim, extent in enumerate(real[name].extents if buffer.tensor.is_floating_point() else ()):
                filled, end = extent.offset, buffer.tensor.shape[dim]
                if dim == buffer.row_dim:
                    filled, end = buffer.filled, buffer.count(descriptor.num_tokens, reqs)
                if 0 < filled < end:
                    padding = buffer.tensor.narrow(dim, filled, end - filled)
                    found.append((padding, buffer.tensor.narrow(dim, 0, 1)))
        return found


def _copied(output: Any) -> Any:
    with torch.inference_mode(False), torch.no_grad():  # else nothing outside of inference mode could fill them
        return tree_map_only(Tensor, Tensor.clone, output)
