"""Which rows of the model's outputs belong to the batch, and which are padding."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import fields, is_dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from cgplan.buffers.batch import Batch
from cgplan.config import Config, Extent
from cgplan.errors import OutputShapeError
from cgplan.modes import BatchDescriptor


class OutputRows:
    """How outputs are cut: in dimension 0 by ``model.output_rows``, or as ``model.output_shapes``
    says.

    Attributes:
        clone: Whether outputs are copied.
    """

    def __init__(self, config: Config) -> None:
        self.clone = config.compilation.outputs == "clone"
        self._config, self._rows = (
            config,
            config.model.output_rows if config.model else "num_tokens",
        )
        self._given = config.model.output_shapes if config.model else None
        self._extents = dict[tuple[int, ...], list[tuple[Extent, ...]]]()

    def shapes(
        self, batch: Batch | BatchDescriptor, num_reqs: int | None
    ) -> Iterable[tuple[int, ...]]:
        """Shapes of the outputs in order, each as far as it is known."""
        tokens = batch.num_tokens
        reqs = tokens // self._config.query_len if num_reqs is None else num_reqs
        extents = self._extents.get(batch.sizes)
        if extents is None:
            shapes = [
                self._config.shape_at(shape, batch.sizes)
                for shape in self._given or ((self._rows,),)
            ]
            extents = self._extents[batch.sizes] = [
                tuple(map(Extent.parse, shape)) for shape in shapes
            ]
        found = [tuple(extent.size(tokens, reqs) for extent in shape) for shape in extents]
        return repeat(*found) if self._given is None else found

    def check(self, output: Any, descriptor: BatchDescriptor, num_reqs: int) -> None:
        """Raise OutputShapeError if padding could not be cut off a padded output of this key and so
        many requests.
        """
        shapes = iter(self.shapes(descriptor, num_reqs))
        for index, leaf in enumerate(tree_leaves(output)):
            if isinstance(leaf, Tensor):
                shape = next(shapes, None)
                if shape is None or tuple(leaf.shape[: None if self._given else 1]) != shape:
                    rows = (
                        f"dimension 0 should have {shape[0] if shape else 'no'} rows ({self._rows})"
                    )
                    said = (
                        rows
                        if self._given is None
                        else f"model.output_shapes says {shape and list(shape)}"
                    )
                    raise OutputShapeError(
                        f"output {index} of the model has shape {list(leaf.shape)}; {said} for "
                        f"{descriptor}",
                        remedy="Return tensors with the batch first, or set output_rows "
                        "(model.output_rows in YAML) to "
                        "what dimension 0 counts: num_tokens or num_reqs; model.output_shapes "
                        "says it for each output.",
                    )
            if hides_tensors(leaf):
                raise OutputShapeError(
                    f"output {index} of the model is a {type(leaf).__name__}, whose tensors "
                    "cannot be reached",
                    remedy="Return tensors in tuples, lists and dicts, or register the class as a "
                    "pytree node.",
                )

    def cut(self, output: Any, batch: Batch) -> Any:
        """The output without its padding: views, or copies where ``clone`` says so."""
        views = self._views(output, batch)
        return tree_map_only(Tensor, torch.clone, views) if self.clone else views

    def _views(self, output: Any, batch: Batch) -> Any:
        shapes = iter(self.shapes(batch, batch.num_reqs))
        return tree_map_only(Tensor, lambda t: t[tuple(map(slice, next(shapes)))], output)

    def reader(self, output: Any, batch: Batch) -> Callable[[], Any]:
        """``cut`` for an output that lies on the same memory each time, as a function: its views
        are made here, once, and each call returns new tensor objects on that memory, or copies.
        """
        # a tensor made in inference mode could be used only there
        with torch.inference_mode(False), torch.no_grad():
            views = self._views(output, batch)
        return renewed(views, clone=self.clone)


def renewed(
    output: Any, only: Container[int] | None = None, *, clone: bool = False
) -> Callable[[], Any]:
    """A function that returns an output each time, with new tensor objects (``detach()``) in new
    lists and dicts, so that callers may change them.

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
    return lambda: tree_unflatten(
        [renew(t) if own else t for t, own in zip(leaves, ours, strict=True)], spec
    )


def hides_tensors(leaf: Any) -> bool:
    """Whether a leaf for pytree holds tensors after all: their padding would be handed out."""
    if isinstance(leaf, Tensor):
        return False
    if is_dataclass(leaf):  # it may have slots
        return any(isinstance(getattr(leaf, field.name, None), Tensor) for field in fields(leaf))
    held = leaf if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", {})
    return any(isinstance(value, Tensor) for value in held.values())
