"""Models that are built for their shapes alone: their weights and caches have addresses, but take no memory.

Note [Untouched memory]
    Pages that nobody has written to read as zeros and take no memory. So, while a model is built, large tensors that
    it makes empty, zero or random are laid on such pages, and what would fill them with zeros or random numbers is left
    out. All else runs as it is: a tensor that is written to otherwise takes its memory then. The model has the
    operators, shapes and strides of the real one, and zeros for weights, which is no matter where only allocations are
    recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LARGE = 1 << 20  # bytes; below, memory is taken as usual
_MAKING = {
    "empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided",
    "zeros", "zeros_like", "new_zeros", "rand", "rand_like", "randn", "randn_like",
}  # fmt: skip
_FILLING = {
    "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_",
}  # fmt: skip


class UntouchedMemory(TorchDispatchMode):
    """A block in which large tensors on the CPU take no memory, see Note [Untouched memory].

    Args:
        mapped: Called with the bytes of each such tensor, before it is made.
    """

    def __init__(self, mapped: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mapped = mapped
        self._untouched: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Make a tensor without memory, leave a filling out, or run."""
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in _MAKING and (made := self._made(func, args, kwargs)) is not None:
            return made
        if name in _FILLING and self._is_untouched(args[0]):
            return args[0]
        if func._schema.is_mutable:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                    self._untouched.pop(leaf.untyped_storage()._cdata, None)
        return func(*args, **kwargs)

    def _is_untouched(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._untouched

    def _made(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """The tensor that the operator would make; None where it is small, or not for the CPU."""
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = kwargs.get("device") or (given[0].device if given else torch.device("cpu"))
        drawn = {"generator", "out", "names"} & kwargs.keys()
        if torch.device(device).type != "cpu" or drawn or kwargs.get("pin_memory"):
            return None
        layout = func(*args, **{**kwargs, "device": torch.device("meta")})
        if layout.layout is not torch.strided or (nbytes := layout.untyped_storage().nbytes()) < LARGE:
            return None
        self._mapped(nbytes)
        storage = torch.from_numpy(np.zeros(nbytes, np.uint8)).untyped_storage()  # calloc: pages are not written to
        self._untouched[storage._cdata] = storage
        made = torch.empty(0, dtype=layout.dtype, device="cpu")
        return made.set_(storage, 0, layout.size(), layout.stride())


__all__ = ["UntouchedMemory"]
