"""Debug mode: every graph compared with eager, padding poisoned, and outputs that expire visibly."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from cgplan.buffers.compare import largest_difference
from cgplan.buffers.static import StaticBuffer
from cgplan.captures.model_graphs import GraphedModel
from cgplan.errors import NumbersError
from cgplan.graphs.ambient import random_state_kept
from cgplan.graphs.written import WrittenState
from cgplan.modes import BatchDescriptor, CUDAGraphMode


class DebugChecks:
    """What a runner does besides while ``compilation.debug`` is set. A call then costs several times as much.

    On the first call that a graph serves, its results are compared with the model's own code on the same padded batch,
    and with a replay whose padding rows are NaN: real rows must be the same to the last bit. So the forward runs up to
    four times. What it writes of the model's tensors and attributes is put back after each run but the last, which is
    the graph's own replay; see WrittenState for what is not put back: tensors over 64 MiB, such as a KV cache, into
    which the same values are written again, and state outside of the model. All of them draw
    the same random numbers. On every call, what the call before returned is filled with NaN.
    """

    def __init__(self, graphed: GraphedModel) -> None:
        self._graphed = graphed
        # By key and whether there was padding: what is wrong, None if nothing.
        self._seen: dict[tuple[CUDAGraphMode, BatchDescriptor, bool], str | None] = {}
        self._handed: list[torch.Tensor] = []

    def replay(
        self, mode: CUDAGraphMode, descriptor: BatchDescriptor, replay: Callable[[], Any], cut: Callable[[Any], Any]
    ) -> Any:
        """Replay a staged batch with all checks.

        Args:
            mode, descriptor: The key.
            replay: Runs its graph on the static buffers.
            cut: Takes the batch's rows out of an output.

        Returns:
            The batch's rows, copied; filled with NaN by the next call.

        Raises:
            NumbersError: a result differs; names the output and the largest deviation.
        """
        with torch.no_grad():
            for tensor in self._handed:
                tensor.detach().fill_(math.nan)  # the caller may have asked for its gradient
        buffers = self._graphed.buffers.buffers
        padding = self._padding(descriptor)
        checked = (mode, descriptor, any(padding.values()))
        references = []
        if checked not in self._seen:
            staged = {name: buffer.tensor.clone() for name, buffer in buffers.items()}
            views = self._graphed.views(descriptor)
            with self._random_state_kept():
                written = WrittenState(self._graphed.holder, lambda: self._graphed.run_eager(descriptor, views))
            _put_back(buffers, staged)  # the model may write into its inputs
            with self._random_state_kept():
                eager = self._graphed.run_eager(descriptor, views)
            references.append(("the model's own code", _copied(cut(eager))))
            _put_back(buffers, staged)
            written.put_back()
            if any(padding.values()):
                for name, count in padding.items():
                    buffer = buffers[name]
                    buffer.tensor.narrow(buffer.row_dim or 0, buffer.filled, count).fill_(math.nan)
                with self._random_state_kept():
                    poisoned = _copied(cut(replay()))
                references.append(("the same batch with NaN in its padding rows", poisoned))
                _put_back(buffers, staged)
                written.put_back()
        found = _copied(cut(replay()))
        wrong = self._seen.get(checked) or _difference_of(found, references)
        # What differs is compared again by the next call; not with other ranks, which run the forward once only.
        if wrong is None or not self._graphed.is_alone:
            self._seen[checked] = wrong
        if wrong is not None:
            raise NumbersError(f"the replay of {mode} {descriptor} differs from {wrong}", remedy=_REMEDY)
        self._handed = [leaf for leaf in tree_leaves(found) if _is_floating(leaf)]
        return found

    def _random_state_kept(self) -> AbstractContextManager[None]:
        return random_state_kept(self._graphed.backend.device, self._graphed.generators)

    def _padding(self, descriptor: BatchDescriptor) -> dict[str, int]:
        """Padding rows of each floating-point input in the staged batch."""
        reqs = self._graphed.padded_reqs(descriptor)
        return {
            name: buffer.rows.size(descriptor.num_tokens, reqs) - buffer.filled
            for name, buffer in self._graphed.buffers.buffers.items()
            if buffer.rows is not None and buffer.tensor.is_floating_point()
        }


def _put_back(buffers: Mapping[str, StaticBuffer], staged: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in staged.items():
        buffers[name].tensor.copy_(tensor)


def _copied(output: Any) -> Any:
    with torch.inference_mode(False), torch.no_grad():  # else nothing outside of inference mode could fill them
        return tree_map_only(torch.Tensor, torch.Tensor.clone, output)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _difference_of(found: Any, references: Sequence[tuple[str, Any]]) -> str | None:
    """The first difference of an output from (what it is compared with, that output), to the last bit; NaN is NaN."""
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
    """How two leaves of outputs differ, in words; None if they do not. Of what is no tensor only the kind is looked at.

    Dtypes and shapes come first: torch raises errors of its own where it is asked to compare what does not fit.
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
