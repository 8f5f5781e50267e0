"""What a wrapper hands out on each replay: the output of its capture, whatever was done to the objects before."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from cgplan.buffers.outputs import rebuilder
from cgplan.buffers.views import HandedViews


class HandedOutput:
    """A captured output, handed out again and again, see HandedViews; lists and dicts are made anew each time.

    Args:
        output: Of the capture. The tensors that the forward made are not handed out themselves, but views of them.
        ours: The ids of those; others (a parameter, an argument) are handed out as they are.

    Attributes:
        was_handed: Whether it was asked for.
    """

    def __init__(self, output: Any, ours: Collection[int]) -> None:
        found: list[torch.Tensor] = []
        build = rebuilder(output, found)
        kept = [id(tensor) in ours for tensor in found]
        views = HandedViews(lambda: tuple([t.detach() for t, keep in zip(found, kept, strict=True) if keep]))
        self.was_handed = False
        self._views = views
        self._next: Callable[[], Any]
        if not any(kept):
            self._next = lambda: build(found)
        elif isinstance(output, torch.Tensor):
            self._next = views.single
        elif all(kept):
            self._next = lambda: build(views.tensors())
        else:
            self._next = lambda: build(_mixed(found, kept, views.tensors()))

    def __call__(self) -> Any:
        """The output, as it was made."""
        self.was_handed = True
        return self._next()

    @property
    def is_kept(self) -> bool:
        """Whether those who were handed it have left its tensors as they were; False if nobody was."""
        return self.was_handed and not self._views.are_changed()


def _mixed(found: list[torch.Tensor], kept: list[bool], views: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    rest = iter(views)
    return [next(rest) if keep else tensor for tensor, keep in zip(found, kept, strict=True)]


__all__ = ["HandedOutput"]
