"""Which rows of outputs belong to the batch."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from cgplan.buffers.batch import Batch
from cgplan.config import Config, Extent
from cgplan.errors import OutputShapeError
from cgplan.modes import BatchDescriptor


class OutputRows:
    """Cuts padding off by ``model.output_rows`` or ``model.output_shapes``."""

    def __init__(self, config: Config) -> None:
        model = config.model
        self.clone = config.compilation.outputs == "clone"
        self._config = config
        self._rows = model.output_rows if model else "num_tokens"
        self._given = model.output_shapes if model else None
        self._extents: dict[tuple[int, ...], list[list[Extent]]] = {}

    def shapes(
        self,
        batch: Batch | BatchDescriptor,
        num_reqs: int | None,
    ) -> Iterator[tuple[int, ...]]:
        tokens = batch.num_tokens
        reqs = tokens // self._config.query_len if num_reqs is None else num_reqs
        sizes = batch.sizes
        if sizes not in self._extents:
            parsed = []
            for declared in self._given or ((self._rows,),):
                shape = self._config.shape_at(declared, sizes)
                parsed.append(list(map(Extent.parse, shape)))
            self._extents[sizes] = parsed
        extents: Iterable[list[Extent]] = self._extents[sizes]
        if not self._given:
            extents = cycle(extents)
        for each in extents:
            yield tuple(extent.size(tokens, reqs) for extent in each)

    def check(
        self,
        output: Any,
        descriptor: BatchDescriptor,
        num_reqs: int,
    ) -> None:
        """Raise OutputShapeError if padding cannot be cut off."""
        shapes = self.shapes(descriptor, num_reqs)
        for index, leaf in enumerate(tree_leaves(output)):
            if isinstance(leaf, Tensor):
                shape = next(shapes, None)
                known = leaf.shape
                if not self._given:
                    known = known[:1]
                if tuple(known) == shape:
                    continue
                said = f"model.output_shapes says {shape and list(shape)}"
                if self._given is None:
                    rows = shape[0] if shape else "no"
                    said = f"dimension 0 should have {rows} rows ({self._rows})"
                raise OutputShapeError(
                    f"output {index} of the model has shape {list(leaf.shape)}; {said} for "
                    f"{descriptor}",
                    remedy="Write num_tokens in place of the number of rows in shapes of inputs. "
                    "Return tensors with the batch first, or set output_rows (model.output_rows "
                    "in YAML) to what dimension 0 counts: num_tokens or num_reqs; or "
                    "model.output_shapes.",
                )
            if hides_tensors(leaf):
                raise OutputShapeError(
                    f"output {index} of the model is a {type(leaf).__name__}, whose tensors "
                    "cannot be reached",
                    remedy="Return tensors in tuples, lists and dicts, or register the class as a "
                    "pytree node.",
                )

    def cut(
        self,
        output: Any,
        batch: Batch,
    ) -> Any:
        """Views without padding, or copies if ``clone``."""
        views = self._views(output, batch)
        return tree_map_only(Tensor, torch.clone, views) if self.clone else views

    def _views(
        self,
        output: Any,
        batch: Batch,
    ) -> Any:
        shapes = self.shapes(batch, batch.num_reqs)

        def cut(tensor: Tensor) -> Tensor:
            rows = map(slice, next(shapes))
            return tensor[tuple(rows)]

        return tree_map_only(Tensor, cut, output)

    def reader(
        self,
        output: Any,
        batch: Batch,
    ) -> Callable[[], Any]:
        """``cut`` of an output in fixed memory."""
        # else of use only in inference mode
        with torch.inference_mode(False), torch.no_grad():
            views = self._views(output, batch)
        return renewed(views, clone=self.clone)


def renewed(
    output: Any,
    only: Container[int] | None = None,
    *,
    clone: bool = False,
) -> Callable[[], Any]:
    """New tensor objects in new containers each time. ``only``: ids of the tensors that are
    renewed.
    """
    leaves, spec = tree_flatten(output)
    places = []
    tensors = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and (only is None or id(leaf) in only):
            places.append(i)
            tensors.append(leaf)
    if isinstance(output, Tensor) and tensors:
        return output.clone if clone else output.detach
    renew: Any = partial(
        map,
        Tensor.clone if clone else Tensor.detach,
    )
    forms = {(type(tensor), tensor.dtype) for tensor in tensors}
    if clone and len(tensors) > 1 and forms == {(Tensor, tensors[0].dtype)}:
        renew = _cloned_by_one_launch
    if type(output) is tuple and list(map(id, output)) == list(map(id, tensors)):
        return lambda: tuple(renew(tensors))  # faster than tree_unflatten

    def read() -> Any:
        handed = list(leaves)
        for i, tensor in zip(places, renew(tensors), strict=True):
            handed[i] = tensor
        return tree_unflatten(handed, spec)

    return read


def _cloned_by_one_launch(tensors: list[Tensor]) -> list[Tensor]:
    clones = list(map(torch.empty_like, tensors))
    torch._foreach_copy_(clones, tensors)
    return clones


def hides_tensors(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return False
    held: Iterable[Any]
    if isinstance(leaf, Mapping):
        held = leaf.values()
    elif is_dataclass(leaf):
        held = [getattr(leaf, field.name, None) for field in fields(leaf)]
    else:
        held = getattr(leaf, "__dict__", {}).values()
    return any(isinstance(value, Tensor) for value in held)
