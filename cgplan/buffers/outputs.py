"""Which rows of the model's outputs belong to the batch, and which are padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from operator import itemgetter
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from cgplan.buffers.views import HandedViews
from cgplan.errors import OutputShapeError
from cgplan.modes import BatchDescriptor


@dataclass(frozen=True, slots=True)
class OutputRows:
    """How outputs are cut.

    Attributes:
        symbol: What dimension 0 of each output counts.
        query_len: Tokens of each request in a uniform batch; tells requests from tokens where nothing else does.
        clone: Whether outputs are copied.
    """

    symbol: Literal["num_tokens", "num_reqs"]
    query_len: int
    clone: bool

    def count(self, num_tokens: int, num_reqs: int | None) -> int:
        """Rows of an output for a batch."""
        if self.symbol == "num_tokens":
            return num_tokens
        return num_tokens // self.query_len if num_reqs is None else num_reqs

    def check(self, output: Any, descriptor: BatchDescriptor, num_reqs: int) -> None:
        """Raise OutputShapeError if the padding of a padded output could not be cut off.

        Args:
            output: What the model returned.
            descriptor: The key that it ran for.
            num_reqs: Requests that it ran for.
        """
        rows = self.count(descriptor.num_tokens, num_reqs)
        if isinstance(output, torch.Tensor) and output.ndim and output.shape[0] == rows:  # the common case
            return
        for index, leaf in enumerate(tree_leaves(output)):
            if isinstance(leaf, torch.Tensor) and (leaf.ndim == 0 or leaf.shape[0] != rows):
                raise OutputShapeError(
                    f"output {index} of the model has shape {list(leaf.shape)}; dimension 0 should have {rows} rows "
                    f"({self.symbol}) for {descriptor}",
                    remedy="Return tensors with the batch first, or set output_rows (model.output_rows in YAML) to "
                    "what dimension 0 counts: num_tokens or num_reqs.",
                )
            if hides_tensors(leaf):
                raise OutputShapeError(
                    f"output {index} of the model is a {type(leaf).__name__}, whose tensors cannot be reached",
                    remedy="Return tensors in tuples, lists and dicts, or register the class as a pytree node.",
                )

    def cut(self, output: Any, num_tokens: int, num_reqs: int | None) -> Any:
        """The output without its padding rows: views, or copies where ``clone`` says so."""
        rows = self.count(num_tokens, num_reqs)
        if isinstance(output, torch.Tensor):  # the common case, without a walk over a tree
            return output[:rows].clone() if self.clone else output[:rows]
        return tree_map_only(torch.Tensor, lambda t: t[:rows].clone() if self.clone else t[:rows], output)

    def cutter(self, output: Any, num_tokens: int, num_reqs: int | None) -> Callable[[], Any]:
        """``cut`` for an output that lies on the same memory each time: its views are made here, once.

        Returns:
            A function that gives the cut output: the same tensors on each call, but for those that a caller has changed
            in place (see HandedViews), or copies where ``clone`` says so, in lists and dicts of their own.
        """
        rows, found = self.count(num_tokens, num_reqs), list[torch.Tensor]()
        build = rebuilder(output, found)
        handed = HandedViews(lambda: tuple([tensor[:rows] for tensor in found]))
        if self.clone:
            views = handed.tensors()
            if isinstance(output, torch.Tensor):
                return views[0].clone
            return lambda: build([view.clone() for view in views])
        if isinstance(output, torch.Tensor):
            return handed.single
        return lambda: build(handed.tensors())


def rebuilder(value: Any, found: list[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], Any]:
    """A function that builds an output anew, as far as it can be changed, from other tensors in the order of ``found``,
    which is filled here with those of ``value``.
    """
    if isinstance(value, torch.Tensor):
        found.append(value)
        return itemgetter(len(found) - 1)
    if type(value) in (tuple, list):
        parts = [rebuilder(part, found) for part in value]
        if type(value) is list:
            return lambda tensors: [part(tensors) for part in parts]
        return lambda tensors: tuple([part(tensors) for part in parts])
    if type(value) is dict:
        items = [(key, rebuilder(part, found)) for key, part in value.items()]
        return lambda tensors: {key: part(tensors) for key, part in items}
    leaves, spec = tree_flatten(value)
    others = [rebuilder(leaf, found) if isinstance(leaf, torch.Tensor) else _same(leaf) for leaf in leaves]
    return lambda tensors: tree_unflatten([other(tensors) for other in others], spec)


def _same(leaf: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
    return lambda _: leaf


def hides_tensors(leaf: Any) -> bool:
    """Whether something that pytree takes for a leaf holds tensors: their padding would be handed out."""
    if isinstance(leaf, torch.Tensor | type):
        return False
    if isinstance(leaf, set | frozenset):
        return any(isinstance(value, torch.Tensor) for value in leaf)
    if isinstance(leaf, Iterator):
        return True
    if isinstance(leaf, Mapping):
        return any(isinstance(value, torch.Tensor) for value in leaf.values())
    names = [f.name for f in fields(leaf)] if is_dataclass(leaf) else getattr(leaf, "__dict__", ())
    return any(isinstance(getattr(leaf, name, None), torch.Tensor) for name in names)
