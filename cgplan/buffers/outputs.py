"""Which rows of the model's outputs belong to the batch, and which are padding."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from cgplan.errors import OutputShapeError
from cgplan.modes import BatchDescriptor


@dataclass(frozen=True)
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
        """Raise OutputShapeError if padding could not be cut off a padded output of this key and so many requests."""
        rows = self.count(descriptor.num_tokens, num_reqs)
        for index, leaf in enumerate(tree_leaves(output)):
            if isinstance(leaf, Tensor) and (leaf.ndim == 0 or leaf.shape[0] != rows):
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
        return tree_map_only(Tensor, lambda t: t[:rows].clone() if self.clone else t[:rows], output)

    def reader(self, output: Any, num_tokens: int, num_reqs: int | None) -> Callable[[], Any]:
        """``cut`` for an output that lies on the same memory each time, as a function: its views are made here, once,
        and each call returns new tensor objects on that memory, or copies.
        """
        rows = self.count(num_tokens, num_reqs)
        with torch.inference_mode(False), torch.no_grad():  # a tensor made in inference mode could be used only there
            views = tree_map_only(Tensor, lambda t: t[:rows], output)
        return renewed(views, clone=self.clone)


def renewed(output: Any, only: Container[int] | None = None, *, clone: bool = False) -> Callable[[], Any]:
    """A function that returns an output each time, with new tensor objects (``detach()``) in new lists and dicts, so
    that callers may change them.

    Args:
        output: Tensors in any pytree.
        only: Ids of the tensors that are renewed; the others are returned as they are. Absent: all.
        clone: Copy instead.
    """
    leaves, spec = tree_flatten(output)
    renew = Tensor.clone if clone else Tensor.detach
    ours = [isinstance(leaf, Tensor) and (only is None or id(leaf) in only) for leaf in leaves]
    if isinstance(output, Tensor):
        return (output.clone if clone else output.detach) if ours[0] else lambda: output
    return lambda: tree_unflatten([renew(t) if own else t for t, own in zip(leaves, ours, strict=True)], spec)


def hides_tensors(leaf: Any) -> bool:
    """Whether a leaf for pytree holds tensors after all: their padding would be handed out."""
    if isinstance(leaf, Tensor):
        return False
    if is_dataclass(leaf):  # it may have slots
        return any(isinstance(getattr(leaf, field.name, None), Tensor) for field in fields(leaf))
    held = leaf if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", {})
    return any(isinstance(value, Tensor) for value in held.values())
