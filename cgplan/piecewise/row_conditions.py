"""Conditions on the number of rows under which a trace holds, and those that the trace must not depend on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch

from cgplan.config import Dim
from cgplan.errors import CaptureError


def refuse_branches_on_size(max_rows: int, dims: Mapping[int, Dim]) -> bool:
    """Raise CaptureError if the trace went one of several ways because of the number of rows.

    A condition that all sizes up to ``max_rows`` fulfil (a check of a maximum, say) is none; True if there are such.
    """
    context, bounded = torch._guards.TracingContext.try_get(), False
    if context is None or context.fake_mode is None or context.fake_mode.shape_env is None:
        return False
    for expression, place in {g.expr: str(g.sloc) for g in context.fake_mode.shape_env.guards}.items():
        condition = _declared(expression, context.fake_mode.shape_env, dims)
        equal = getattr(condition, "rel_op", "") == "==" and all(side.is_symbol for side in condition.args)
        if not condition.free_symbols or (equal and not dims):  # nothing about rows, or two inputs of one batch
            continue
        # torch itself asks of one row whether strides matter; that is no branch of the model.
        first = 1 if "_dynamo/" in place else 2
        if len(condition.free_symbols) > 1 or not _holds(condition, range(first, max_rows + 1)):
            raise CaptureError(
                f"the model's Python code depends on the number of rows ({expression}), at {place}",
                remedy=f"Other sizes would take another way. {_hint(expression)}Avoid the branch, or use "
                "compilation.splitting_modules; or piecewise: modules, for functions under eager_break_during_capture.",
            )
        bounded = True
    return bounded


def _hint(expression: Any) -> str:
    """What torch may have asked where the model's code shows no branch."""
    if not isinstance(expression, sympy.Eq | sympy.Ne) or sympy.Integer(1) not in expression.args:
        return ""
    return "`tensor[index] = rows` asks whether there is one row; index_put_, index_copy_ and scatter_ do not. "


def _declared(expression: Any, shape_env: Any, dims: Mapping[int, Dim]) -> Any:
    """A condition in terms of num_tokens and num_reqs: ``s1 - 1 == s2`` is true of num_reqs + 1 and num_reqs."""
    values = getattr(shape_env, "backed_var_to_val", None) or shape_env.var_to_val
    known = {symbol: dims.get(int(values[symbol])) for symbol in expression.free_symbols if symbol in values}
    return expression.subs(
        {
            symbol: dim.factor * sympy.Symbol(str(dim.symbol), integer=True, positive=True) + dim.offset
            for symbol, dim in known.items()
            if dim is not None
        }
    )


def _holds(condition: Any, sizes: Iterable[int]) -> bool:
    """Whether a condition on one symbol is true for these sizes."""
    (symbol,) = condition.free_symbols
    return all(bool(condition.subs(symbol, n)) for n in sizes)


__all__ = ["refuse_branches_on_size"]
