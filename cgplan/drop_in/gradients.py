"""Gradients of graphs: ``backward`` runs the model's own code again, or raises."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cgplan.errors import GradientError

OwnCode = Callable[[], list[Tensor]]  # tensors of an output with gradients

_NO_GRADIENT = torch._C._functions.DelayedError(b"an output of a graph has no gradient", 1)
# one for all parameters: 300 would cost 365 us a call
_NEEDS_GRADIENT = torch.empty(0, requires_grad=True)


class _OfGraph(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        needs_gradient: Tensor,  # noqa: ARG004
        again: OwnCode,
        at: Sequence[int],
        outputs: Sequence[Tensor],  # in a list: arguments cannot be written in place
    ) -> Any:
        ctx.again = again
        ctx.at = at
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise GradientError(
                "backward(create_graph=True) through an output of a graph, whose gradients have "
                "no graph",
                remedy="Call the model itself where gradients of gradients are needed.",
            )
        outputs = ctx.again()
        roots = []
        given = []
        for at, gradient in zip(ctx.at, gradients, strict=True):
            if gradient is not None:
                roots.append(outputs[at])
                given.append(gradient)
        torch.autograd.backward(roots, given)
        return None, None, None, None


def _refuse(name: str, gradient: Tensor) -> None:  # noqa: ARG001
    raise GradientError(
        f"backward through an output of {name}, which a graph computed without gradients",
        remedy='Pass grad="recompute" to cgplan.graphed or graphed_generate, which runs the model '
        "again in backward; or call model.train() before, as then calls run the model's own code; "
        "or call it under torch.no_grad().",
    )


def with_gradients(
    output: Any,
    requires_grad: Sequence[bool],
    again: OwnCode | None,
    name: str,
) -> Any:
    leaves = list(output) if isinstance(output, tuple) else [output]
    at = [index for index, is_needed in enumerate(requires_grad) if is_needed]
    if again is None:
        # made in C++ and hooked as ``register_hook`` does: a third of a Python Function's time
        for index in at:
            leaves[index].requires_grad = True
            made = _NO_GRADIENT(leaves[index])
            # users' hooks have numbers from 0
            made._backward_hooks = OrderedDict({-1: partial(_refuse, name)})
            made.grad_fn._register_hook_dict(made)  # type: ignore[union-attr]
            leaves[index] = made
    else:
        given = [leaves[index] for index in at]
        outputs = _OfGraph.apply(_NEEDS_GRADIENT, again, at, given)  # type: ignore[no-untyped-call]
        for index, leaf in zip(at, outputs, strict=True):
            leaves[index] = leaf
    return tuple(leaves) if isinstance(output, tuple) else leaves[0]
