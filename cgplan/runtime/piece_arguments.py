"""The arguments of an eager piece, kept so that it can run again on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, is_namedtuple_instance, tree_flatten, tree_leaves, tree_unflatten

from cgplan.graphs import GraphBackend
from cgplan.graphs.host_sync import tensors_in
from cgplan.runtime.views import HandedViews, facts_of

_always = True.__bool__


class PieceArguments:
    """What a piece was called with at capture.

    Tensors of the pool are borrowed: later segments reuse their blocks, and each replay writes them anew before the
    piece reads them. All else is held as it is: static buffers, parameters, a KV cache, and objects whose inside is
    not looked into. Tuples, lists and dicts are looked into.

    The model hands a piece new tensor objects on each call, so a piece may change one itself (``transpose_``,
    ``unsqueeze_``). On replay the objects are ours: those on memory of the pool, and others that the piece changed at
    capture, are looked at before each run, and made anew where they are no longer as they were.

    Args:
        args: Of the call, before the piece has run on them.
        kwargs: The same.
        backend: Of the capture.
        pool: The graph pool of the capture.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], backend: GraphBackend, pool: Any) -> None:
        inside = {id(t) for t in tensors_in((args, kwargs)) if backend.in_pool(t, pool)}

        def is_leaf(node: Any) -> bool:  # a list without captured tensors stays the same list, whoever edits it
            looked_into = type(node) in (tuple, list, dict) or is_namedtuple_instance(node)
            return not looked_into or not any(id(leaf) in inside for leaf in tree_leaves(node))

        def kept(leaf: Any) -> Any:
            plain = id(leaf) in inside and not leaf.is_conj() and not leaf.is_neg()  # borrowing would lose those bits
            return backend.borrow(leaf) if plain else leaf

        given: list[Any] = [*args, *kwargs.values()]
        spec: TreeSpec | None = None
        if not all(map(is_leaf, given)):
            given, spec = tree_flatten((args, kwargs), is_leaf=is_leaf)
        self._names, self._nested = tuple(kwargs), spec
        self._leaves = list(map(kept, given))
        self._watched = [
            (i, None if id(leaf) in inside else (leaf, facts_of(leaf)), self._leaves[i].detach())
            for i, leaf in enumerate(given)
            if type(leaf) is torch.Tensor and leaf.layout is torch.strided
        ]
        self._handed: HandedViews | None = None
        self._placed: tuple[torch.Tensor, ...] = ()
        self._built: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    @property
    def is_nested(self) -> bool:
        """Whether lists, tuples or dicts are made anew for each run."""
        return self._nested is not None

    def settle(self) -> None:
        """Called once the piece has run at capture: see which tensor objects have to be looked at."""
        watched = [(i, t) for i, other, t in self._watched if other is None or facts_of(other[0]) != other[1]]
        self._positions, masters = [i for i, _ in watched], [t for _, t in watched]
        del self._watched
        if masters:
            self._handed = HandedViews(lambda: tuple([t.detach() for t in masters]))
        self._build()

    def now(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for one run."""
        if self._handed is not None and self._handed.tensors() is not self._placed:
            self._build()
        if self._nested is not None:  # new lists and dicts each time, in case the function edits them
            args, kwargs = tree_unflatten(self._leaves, self._nested)
            return args, kwargs
        return self._built

    def bind(self, function: Callable[..., Any]) -> tuple[Callable[[], Any], Callable[[], bool]]:
        """A call of the function with these arguments, if they are not nested; and whether it still has them, to be
        asked before each call: if not, or where the mode of torch is new, bind again.
        """
        args, kwargs = self.now()
        return partial(function, *args, **kwargs), _always if self._handed is None else self._handed.bound_check()

    def _build(self) -> None:
        if self._handed is not None:
            self._placed = self._handed.tensors()
            for i, tensor in zip(self._positions, self._placed, strict=True):
                self._leaves[i] = tensor
        count = len(self._leaves) - len(self._names)
        if self._nested is None:
            named = zip(self._names, self._leaves[count:], strict=True)
            self._built = tuple(self._leaves[:count]), dict(named)


__all__ = ["PieceArguments"]
