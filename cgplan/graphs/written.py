"""State that a forward writes in place: saved, so that a forward can run several times and count once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cgplan.graphs.plain_code import as_written
from cgplan.graphs.rebound import StateSnapshot

LARGEST = 64 << 20  # bytes of a tensor that is saved; a KV cache is larger, and is written with the same values again


class WrittenState:
    """What one eager run of a forward writes of its model's tensors and attributes.

    Not seen is what kernels write that do not pass PyTorch's dispatcher; not saved is what is larger than ``LARGEST``.

    Args:
        model: Whose state it is; None for a function, which has none.
        run: Runs the forward; afterwards all is as it was.
    """

    def __init__(self, model: Any, run: Callable[[], object]) -> None:
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._attributes: StateSnapshot | None = None
        if model is None:
            return
        self._attributes = StateSnapshot(model)
        with as_written(), _Writes(self._attributes.tensors()) as writes:
            run()
        self._saved = list(writes.saved.values())
        self.put_back()

    def put_back(self) -> None:
        """Make it as it was."""
        with torch.no_grad():
            for memory, before in self._saved:
                memory.copy_(before)
        if self._attributes is not None:
            self._attributes.put_back(self._attributes.changed().values())


class _Writes(TorchDispatchMode):
    """Saves memory of some tensors before operators write to it; it looks into eager pieces, too."""

    def __init__(self, state: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._state = {t.untyped_storage().data_ptr() for t in state if t.layout is torch.strided} - {0}
        self.saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Save what is written, and run."""
        kwargs = kwargs or {}
        for tensor in _written(func, args, kwargs):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address in self._state and address not in self.saved and storage.nbytes() <= LARGEST:
                memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
                    storage, 0, (storage.nbytes(),), (1,)
                )
                self.saved[address] = memory, memory.clone()
        return func(*args, **kwargs)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operator's schema says it writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


__all__ = ["LARGEST", "WrittenState"]
