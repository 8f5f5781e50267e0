"""How a model would be split, without a capture: which operators end up in graph segments and which between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cgplan.config import Config
from cgplan.graphs import GraphBackend, select_backend
from cgplan.modes import CUDAGraphMode
from cgplan.planning import build_plan
from cgplan.reports.records import SplitRecord
from cgplan.runtime.failures import drop_locals, explain_eager_failure
from cgplan.runtime.graphed import GraphedModel


def describe_split(
    model: Callable[..., Any], config: Config, backend: GraphBackend | None = None
) -> SplitRecord | None:
    """What a session's report would say of the split, before any capture.

    By operators, the model is traced, for which it runs on padding values as in a session's warm-up: it may write to
    its KV cache where padding writes. By modules, the patterns are matched and nothing runs. Either way the model is
    left as it was, and all memory is given back.

    Args:
        model: Any callable or nn.Module; called with the declared inputs by name.
        config: As for a session. Inductor is left out where it does not itself decide on the split.
        backend: The device; chosen by ``config.device`` if absent.

    Returns:
        The split; None where the plan has no PIECEWISE keys, so that nothing is split.

    Raises:
        ConfigError: a splitting op, or a module pattern, that does not occur in the model.
        CaptureError: the model cannot be traced as one graph, or branches on the number of rows.
        ModelError: the model itself failed.
    """
    plan = build_plan(config)
    piecewise = [key for key in plan.keys if key[0] is CUDAGraphMode.PIECEWISE]
    if not piecewise:
        return None
    if not config.compilation.use_inductor_graph_partition:
        compilation = config.compilation.model_copy(update={"compiler": "eager"})
        config = config.model_copy(update={"compilation": compilation})
    graphed = GraphedModel(plan, config, model, backend or select_backend(config.device))
    mode, smallest = piecewise[-1]
    try:
        if graphed.route.splitter is not None:
            graphed.trace(smallest)
        return graphed.route.describe()
    except Exception as error:
        failure = explain_eager_failure(error, f"{mode} {smallest}")
        drop_locals(error)
        raise failure from (error if failure is not error else error.__cause__)
    finally:
        graphed.free()
