"""Debug mode: every graph compared with eager, padding poisoned, and outputs that expire visibly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from cgplan.buffers.compare import largest_difference
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.errors import NumbersError
from cgplan.graphs.ambient import random_state_kept
from cgplan.graphs.footprint import look
from cgplan.graphs.model_state import ModelState
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.runner.prepared import PreparedCall


class DebugChecks:
    """The checks of a runner while ``compilation.debug`` is set. A call then costs several times as much.

    On the first call that a graph serves, its results are compared with the model's own code on the same padded batch,
    and with a replay whose padding rows are NaN: real rows must be the same to the last bit. So the forward runs up to
    four times. The model's tensors and attributes that it writes are put back after each run but the last, which is
    the graph's own replay, as far as ModelState keeps them; memory beyond ``compilation.state_copy``, such as a KV
    cache, and state outside of the model are not put back. All runs draw the same random numbers. On every call, the
    output of the call before is filled with NaN.
    """

    def __init__(self, graphed: ModelGraphs) -> None:
        self._graphed = graphed
        # By key and whether there was padding: the difference that was found, None if there is none.
        self._seen: dict[tuple[CUDAGraphMode, BatchDescriptor, bool], str | None] = {}
        self._handed: list[torch.Tensor] = []

    def wrap(self, call: PreparedCall) -> None:
        """Put all checks around the call's replay; its output is a copy, which the next call fills with NaN."""
        found: list[Any] = []
        replay, output = call.replay, call.output

        def read() -> Any:
            replay()
            return _copied(output())

        def checked() -> None:
            found[:] = [self._checked(call, read)]

        call.replay, call.output = checked, found.pop

    def _checked(self, call: PreparedCall, read: Callable[[], Any]) -> Any:
        """The output of a replay. Raises NumbersError: it differs; names the output and the largest deviation."""
        graphed, mode, descriptor, batch = self._graphed, call.route.mode, call.route.descriptor, call.route.batch
        with torch.no_grad():
            for tensor in self._handed:
                tensor.detach().fill_(math.nan)  # the caller may have asked for its gradient
        buffers = graphed.buffers.buffers
        padding = self._padding(descriptor)
        checked = (mode, descriptor, any(padding.values()))
        references = []
        if checked not in self._seen:
            staged = {name: buffer.tensor.clone() for name, buffer in buffers.items()}
            run_eager = partial(graphed.run_eager, descriptor, graphed.views(descriptor))

            def put_back() -> None:  # the model may write into its inputs
                for name, tensor in staged.items():
                    buffers[name].tensor.copy_(tensor)

            written = ModelState.of(graphed.roots, graphed.backend.device)
            look(run_eager, written, graphed.copy_limit())
            written.restore()
            put_back()
            with self._random_state_kept():
                eager = _copied(graphed.outputs.cut(run_eager(), batch.num_tokens, batch.num_reqs))
            references.append(("the model's own code", eager))
            put_back()
            written.restore()
            if any(padding.values()):
                for name, count in padding.items():
                    buffer = buffers[name]
                    buffer.tensor.narrow(buffer.row_dim or 0, buffer.filled, count).fill_(math.nan)
                with self._random_state_kept():
                    references.append(("the same batch with NaN in its padding rows", read()))
                put_back()
                written.restore()
        found = read()
        wrong = self._seen.get(checked) or _difference_of(found, references)
        # A difference is looked for again by the next call; not with other ranks, which run the forward once only.
        if wrong is None or not graphed.is_alone:
            self._seen[checked] = wrong
        if wrong is not None:
            raise NumbersError(f"the replay of {mode} {descriptor} differs from {wrong}", remedy=_REMEDY)
        self._handed = [
            leaf
            for leaf in tree_leaves(found)
            if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        ]
        return found

    def _random_state_kept(self) -> AbstractContextManager[None]:
        return random_state_kept(self._graphed.backend.device, self._graphed.generators)

    def _padding(self, descriptor: BatchDescriptor) -> dict[str, int]:
        """Padding rows of each floating-point input in the staged batch."""
        reqs = self._graphed.padded_reqs(descriptor)
        return {
            name: buffer.count(descriptor.num_tokens, reqs) - buffer.filled
            for name, buffer in self._graphed.buffers.buffers.items()
            if buffer.rows is not None and buffer.tensor.is_floating_point()
        }


def _copied(output: Any) -> Any:
    with torch.inference_mode(False), torch.no_grad():  # else nothing outside of inference mode could fill them
        return tree_map_only(torch.Tensor, torch.Tensor.clone, output)


def _difference_of(found: Any, references: Sequence[tuple[str, Any]]) -> str | None:
    """The first difference of an output from (name, other output), to the last bit; NaN is NaN."""
    leaves, spec = tree_flatten(found)
    for what, reference in references:
        others, other_spec = tree_flatten(reference)
        if spec != other_spec:
            return f"{what}: the outputs have different structures"
        for index, (one, other) in enumerate(zip(leaves, others, strict=True)):
            difference = _difference(one, other)
            if difference is not None:
                return f"{what}: output {index}, {difference}"
    return None


def _difference(one: Any, other: Any) -> str | None:
    """How two leaves of outputs differ, in words; None if they do not. Of leaves that are no tensors only the class is
    compared. Dtypes and shapes come first: torch cannot compare what does not fit.
    """
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        mixed = isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor)
        return "only one of them is a tensor" if mixed else None
    if one.dtype is not other.dtype:
        return f"their dtypes differ: {one.dtype} and {other.dtype}"
    if one.shape != other.shape:
        return f"their shapes differ: {list(one.shape)} and {list(other.shape)}"
    if one.is_floating_point() and one.itemsize == 1:  # of 8-bit floats most operators have no kernel
        one, other = one.float(), other.float()
    unequal = (one != other) & ~((one != one) & (other != other))
    if not unequal.any():
        return None
    return f"the largest deviation is {largest_difference(one, other):.3g}"


_REMEDY = (
    "Look for numbers and branches that Python computed at capture, tensors that moved, padding that reaches real "
    "rows, and random operators that do not draw from torch's generators, such as Python's and NumPy's."
)
