"""Which rows of the model's outputs belong to the batch, and which are padding."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from cgplan.buffers.batch import Batch
from cgplan.config import Config, Extent
from cgplan.errors import OutputShapeError
from cgplan.modes import BatchDescriptor


@dataclass(frozen=True)
class OutputRows:
    """How outputs are cut: in dimension 0 by ``model.output_rows``, or as ``model.output_shapes`` says."""

    config: Config

    @property
    def clone(self) -> bool:
        """Whether outputs are copied."""
        return self.config.compilation.outputs == "clone"

    @property
    def rows(self) -> str:
        """What dimension 0 of each output counts."""
        return self.config.model.output_rows if self.config.model else "num_tokens"

    def shapes(self, descriptor: Batch | BatchDescriptor, num_reqs: int | None) -> Iterator[tuple[int, ...]]:
        """Shapes of the outputs in order, as far as they are known."""
        tokens = descriptor.num_tokens
        reqs = tokens // self.config.query_len if num_reqs is None else num_reqs
        given = self.config.model.output_shapes if self.config.model else None
        for shape in repeat((self.rows,)) if given is None else given:
            at = map(Extent.parse, self.config.shape_at(shape, descriptor.sizes))
            yield tuple(extent.size(tokens, reqs) for extent in at)

    def check(self, output: Any, descriptor: BatchDescriptor, num_reqs: int) -> None:
        """Raise OutputShapeError if padding could not be cut off a padded output of this key and so many requests."""
        leaves, is_given = tree_leaves(output), self.config.model is not None and self.config.model.output_shapes
        shapes = self.shapes(descriptor, num_reqs)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                shape = next(shapes, None)
                told = None if shape is None else tuple(leaf.shape[: None if is_given else 1])
                if shape is None or told != shape:
                    raise OutputShapeError(
                        f"output {index} of the model has shape {list(leaf.shape)}; "
                        + (
                            f"model.output_shapes says {shape and list(shape)} for {descriptor}"
                            if is_given
                            else f"dimension 0 should have {shape and shape[0]} rows ({self.rows}) for {descriptor}"
                        ),
                        remedy="Return tensors with the batch first, or set output_rows (model.output_rows in YAML) to "
                        "what dimension 0 counts: num_tokens or num_reqs; model.output_shapes says it for each output.",
                    )
            if hides_tensors(leaf):
                raise OutputShapeError(
                    f"output {index} of the model is a {type(leaf).__name__}, whose tensors cannot be reached",
                    remedy="Return tensors in tuples, lists and dicts, or register the class as a pytree node.",
                )

    def cut(self, output: Any, batch: Batch) -> Any:
        """The output without its padding: views, or copies where ``clone`` says so."""
        return (
            tree_map_only(Tensor, Tensor.clone, self._views(output, batch))
            if self.clone
            else self._views(output, batch)
        )

    def _views(self, output: Any, batch: Batch) -> Any:
        shapes = self.shapes(batch, batch.num_reqs)
        return tree_map_only(Tensor, lambda t: t[tuple(map(slice, next(shapes)))], output)

    def reader(self, output: Any, batch: Batch) -> Callable[[], Any]:
        """``cut`` for an output that lies on the same memory each time, as a function: its views are made here, once,
        and each call returns new tensor objects on that memory, or copies.
        """
        with torch.inference_mode(False), torch.no_grad():  # a tensor made in inference mode could be used only there
            views = self._views(output, batch)
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
