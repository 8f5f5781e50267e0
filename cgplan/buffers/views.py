"""Views of fixed memory that callers get again and again, kept as they were made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

Check = Callable[..., bool]
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
        self._checks: list[Check] = []
        self._is_alike: Check = _unknown
        self._renew()

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The views, as they were made."""
        return self._views if self._is_alike(*self._views) else self._looked_at()

    def single(self) -> torch.Tensor | None:
        """The first view."""
        return self._view if self._is_alike(self._view) else self._looked_at()[0]

    def bound_check(self) -> Callable[[], bool]:
        """Whether the views of now are as they were made, for who holds them. It may say no where they are: then
        `tensors` is asked, and this again.
        """
        return partial(self._is_alike, *self._views)

    def are_changed(self) -> bool:
        """Whether somebody has changed one of them since they were made."""
        return [facts_of(view) for view in self._views] != self._made

    def _looked_at(self) -> tuple[torch.Tensor, ...]:
        """The views, compared one by one: the compiled function also says no in a mode that is new to it."""
        for check in self._checks:
            if check(*self._views):
                self._is_alike = check
                return self._views
        if self.are_changed():
            self._renew()
        else:
            self._learn()
        return self._views

    def _renew(self) -> None:
        with torch.inference_mode(False), torch.no_grad():  # a tensor made in inference mode could be used only there
            self._views = self._make()
        self._view = next(iter(self._views), None)
        self._made = [facts_of(view) for view in self._views]
        self._checks.clear()
        self._learn()

    def _learn(self) -> None:
        check = exact_check(self._views) if self._views else None
        self._is_alike = _unknown if check is None else check
        if check is not None:
            self._checks = [*self._checks[1 - _MOST_CHECKS :], check]


def _unknown(*_: torch.Tensor) -> bool:
    """The check of tensors that the compiled function does not know."""
    return False


def facts_of(view: torch.Tensor) -> tuple[Any, ...]:
    """What of a tensor object can be changed in place without a write to its memory."""
    address = view.data_ptr() if type(view) is torch.Tensor else 0  # of other classes not all have one
    return address, view.shape, view.stride(), view.dtype, view.requires_grad, view.is_conj(), view.is_neg()


def exact_check(values: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """A function that tells, in half a microsecond, whether tensors are like these: of the same class, dtype, device,
    shape and strides. It may say no to tensors that are alike; those are looked at one by one then.

    Returns:
        None where there is no such function for these tensors.
    """
    guards = _tensor_guards()
    if guards is None or any(type(value) is not torch.Tensor for value in values):
        return None
    check: Callable[..., bool] = guards(*values, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check if check(*values) else None  # no, if a tensor is there twice


@cache
def _tensor_guards() -> Any:
    """Dynamo's compiled checks of tensors, if this torch has them and they do what they are used for here.

    They are private to torch. In Python the same checks take five times as long, which for five inputs is as much as
    all that a call does besides the copies.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        like = torch.empty(2, 3, device="cpu")  # the default device may be another one
        guards: Any = TensorGuards  # its stub knows no positional arguments
        check = guards(like, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        others = [
            like.new_empty(3, 3), like.new_empty(3, 2).t(), like.new_empty(6), like.to(torch.int32), like.to("meta"),
            torch.nn.Parameter(like), like.to(torch.cfloat).conj(),
        ]  # fmt: skip
        works = check(torch.empty_like(like)) and not any(check(other) for other in others)
    except (ImportError, AttributeError, TypeError, RuntimeError, SystemError):
        return None
    return guards if works else None


__all__ = ["HandedViews", "exact_check", "facts_of"]
