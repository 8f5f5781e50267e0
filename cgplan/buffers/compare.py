"""Results of other ways to run a model, compared with its own code from the same inputs, state and seed.

Note [What can be compared]
    A forward may write into its inputs, into tensors that the model holds, and draw random numbers: a second call then
    says something else, whichever way it is made. So each compared call starts from the same inputs, state and seed.
    A model whose own code, run twice from there, says different things cannot be compared at all: what it goes by is
    not known here (state in closures or globals, another library's generator, atomics in another order). Random numbers
    are the same for the same operators on the same shapes; a way that pads, or has its own generator, draws others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from cgplan.graphs.ambient import random_state_kept
from cgplan.graphs.footprint import look
from cgplan.graphs.model_state import ModelState
from cgplan.measure.baselines import BenchBatch, Call
from cgplan.runner.runner import GraphRunner

_UNLIKE = (
    "its output has another structure, shape, dtype or value beside tensors than that of the model's own code, or "
    "holds no tensor"
)
_UNSTEADY = "the model's own code, run twice from the same inputs, state and seed, gives different results"
_OTHER_NUMBERS = "the model draws random numbers, and {why}"
Result = tuple[float | None, str | None]  # the largest difference, or why there is none


class OwnResults:
    """What a model's own code says of some batches, see Note [What can be compared].

    Args:
        runner: Knows the model and the device.
        batches: Are run here, four times each; afterwards they and the model's state are as they were.
        seed: Of compared calls.
    """

    def __init__(self, runner: GraphRunner, batches: Sequence[BenchBatch], seed: int) -> None:
        model, self._device, self._seed = runner.model, runner.backend.device, seed
        self._inputs = [(tensor, tensor.clone()) for batch in batches for tensor in batch.tensors.values()]
        self._written = ModelState.of({"model": model}, self._device)
        self._generators = self._written.generators
        with random_state_kept(self._device, self._generators):
            free = runner.backend.memory().free or 4 << 30
            look(lambda: [batch.run(model) for batch in batches], self._written, free // 4)
            self._outputs: dict[int, Any] = {}
            self._is_unsteady: set[int] = set()
            self._draws: set[int] = set()
            for batch in batches:
                call = partial(batch.run, model)
                first, second, other = (self._run(call, seed + more) for more in (0, 0, 1))
                self._outputs[batch.size] = first
                if deviation(second, first):
                    self._is_unsteady.add(batch.size)
                elif deviation(other, first):
                    self._draws.add(batch.size)
            self.restore()

    def restore(self) -> None:
        """Make inputs and state what they were at the beginning."""
        for tensor, before in self._inputs:
            tensor.copy_(before)
        self._written.restore()

    def compare(self, size: int, call: Call, draws_otherwise: str | None = None) -> Result:
        """The result of a call for a batch of that size, against the model's own.

        Args:
            size: Of the batch.
            call: Runs it.
            draws_otherwise: Why it draws other random numbers than the model's own code; None if it does not.
        """
        if size in self._is_unsteady:
            return None, _UNSTEADY
        with random_state_kept(self._device, self._generators):
            found = deviation(self._run(call, self._seed), self._outputs[size])
            self.restore()
        if found is None:
            return None, _UNLIKE
        if found and draws_otherwise and size in self._draws:
            return None, _OTHER_NUMBERS.format(why=draws_otherwise)
        return found, None

    def _run(self, call: Callable[[], Any], seed: int) -> Any:
        self.restore()
        torch.manual_seed(seed)
        for generator in self._generators:
            generator.manual_seed(seed)
        return tree_map_only(torch.Tensor, torch.Tensor.clone, call())


def deviation(found: Any, wanted: Any) -> float | None:
    """Largest absolute difference of two outputs; infinite where one has a NaN that the other has not. None where
    their structures, shapes, dtypes or values beside tensors differ, or there is no tensor.
    """
    (leaves, spec), (others, other_spec) = tree_flatten(found), tree_flatten(wanted)
    if spec != other_spec or not all(map(_is_alike, leaves, others)):
        return None
    pairs = [(a, b) for a, b in zip(leaves, others, strict=True) if isinstance(a, torch.Tensor)]
    return max((_largest(a, b) for a, b in pairs), default=None)


def _is_alike(one: Any, other: Any) -> bool:
    """Whether two leaves of outputs can be compared: tensors of one shape and dtype, or equal values of one class."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
            return False
        return (one.shape, one.dtype) == (other.shape, other.dtype)
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    dtype = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(dtype), other.to(dtype)
    apart = (one - other).abs().masked_fill(one.isnan() & other.isnan() | (one == other), 0.0)
    return float(apart.nan_to_num(math.inf, posinf=math.inf).max()) if apart.numel() else 0.0


__all__ = ["OwnResults", "deviation"]
