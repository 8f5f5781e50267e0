"""A model that torch.compile traced, with its guards: whether each captured size is found again.

Note [Guarded traces]
    Dynamo may trace such a model several times, and of traces that all fit a call it takes the one that answered last.
    A size that one trace captured may so come to another, which has no graph for it, as soon as a batch between them
    was answered by that one. With the default settings of torch.compile this happens for the largest size: it is traced
    first, as a constant, and the second trace, with a free number of rows, fits it too. So if not all sizes were
    captured by all traces, each is replayed, in both orders.
"""

from __future__ import annotations

from cgplan.captures.model_graphs import GraphedModel
from cgplan.errors import CaptureError, SealedError
from cgplan.modes import CUDAGraphMode
from cgplan.piecewise.segments import RETRACED, SegmentWrapper


def refuse_lost_sizes(graphed: GraphedModel) -> None:
    """See Note [Guarded traces]; after the captures, on padding.

    Raises:
        CaptureError: a captured size is answered by a trace that has not captured it.
    """
    scope, piecewise = graphed.scope, CUDAGraphMode.PIECEWISE
    served: dict[object, set[object]] = {}
    for wrapper in scope.wrappers:
        if isinstance(wrapper, SegmentWrapper) and wrapper.guarded:
            mine = {key for key, entry in wrapper.entries.items() if entry.scope is scope}
            served.setdefault(wrapper.trace, set()).update(mine)
    keys = [descriptor for mode, descriptor in graphed.plan.keys if mode is piecewise]
    keys = [key for key in keys if any(key in mine for mine in served.values())]
    if all(mine >= set(keys) for mine in served.values()):
        return
    was_open, scope.is_open = scope.is_open, False
    try:
        for key in (*keys, *reversed(keys)):
            try:
                graphed.run_graphed(piecewise, key, graphed.views(key))
            except SealedError as error:
                raise CaptureError(
                    f"torch.compile has compiled the model {len(served)} times for the captured sizes, and {key} is "
                    "answered by code that has captured another one",
                    remedy=RETRACED,
                ) from error
    finally:
        scope.is_open = was_open


__all__ = ["refuse_lost_sizes"]
