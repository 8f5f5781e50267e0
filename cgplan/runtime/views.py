"""Views of fixed memory that callers get again and again, kept as they were made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cgplan.runtime.batch import exact_check

_MOST_CHECKS = 4  # one for each mode of torch (inference mode, autocast) in which views are asked for


class HandedViews:
    """Tensors that are handed out, the same objects each time as long as nobody changes one in place.

    What somebody does to a tensor object itself (``unsqueeze_``, ``t_``, ``requires_grad_``) would meet whoever gets it
    next. So it is compared before it is handed out again, by one compiled function, which takes a quarter of the time
    of a fresh view; what is no longer as it was is made anew. Other memory of the same shape, given to it by
    ``.data =`` or ``set_``, is not seen by that function.

    Args:
        make: Makes all of them; what it returned before is left to those who hold it.
    """

    def __init__(self, make: Callable[[], tuple[torch.Tensor, ...]]) -> None:
        self._make = make
        self._checks: list[Callable[..., bool]] = []
        self._renew()

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The views, as they were made."""
        views = self._views
        for is_alike in self._checks:
            if is_alike(*views):
                return views
        return self._looked_at()

    def single(self) -> torch.Tensor:
        """The only view."""
        (view,) = self._views
        for is_alike in self._checks:
            if is_alike(view):
                return view
        return self._looked_at()[0]

    def _looked_at(self) -> tuple[torch.Tensor, ...]:
        """The views, compared one by one: the compiled function also says no in a mode that is new to it."""
        if [_facts(view) for view in self._views] != self._made:
            self._renew()
        elif (check := exact_check(self._views)) is not None:
            self._checks = [*self._checks[1 - _MOST_CHECKS :], check]
        return self._views

    def _renew(self) -> None:
        with torch.inference_mode(False), torch.no_grad():  # a tensor made in inference mode could be used only there
            self._views = self._make()
        self._made = [_facts(view) for view in self._views]
        check = exact_check(self._views)
        self._checks = [] if check is None else [check]


def _facts(view: torch.Tensor) -> tuple[Any, ...]:
    return view.data_ptr(), view.shape, view.stride(), view.dtype, view.requires_grad, view.is_conj(), view.is_neg()


__all__ = ["HandedViews"]
