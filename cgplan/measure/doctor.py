"""What of a step runs inside graphs."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from cgplan.backends import GraphBackend
from cgplan.captures.failures import drop_locals, explain_eager_failure, raise_caused
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.config import Config
from cgplan.measure.bench import examples, floor_of, latencies
from cgplan.modes import CUDAGraphMode
from cgplan.planning import build_plan
from cgplan.reports.records import DoctorReport, SplitRecord
from cgplan.runner.auto import timed_keys
from cgplan.runner.replan import on_padding
from cgplan.runner.runner import GraphRunner


def check_up(runner: GraphRunner) -> DoctorReport:
    """For a few sizes."""
    boxes = {descriptor.box for _, descriptor in timed_keys(runner)}
    by_box = [examples(runner, *box) for box in sorted(boxes)]
    measured = latencies(runner, by_box)
    records = [record for record in measured if record.graph]
    outside = Counter[str]()
    for record in records:
        entry = runner.graphs.entry(record.key)
        if entry is None:
            continue
        if entry.eager_pieces:
            outside.clear()
            for piece in entry.graph.eager_pieces:
                place = f"{piece.name}, at {piece.line}"
                outside[place] += 1
    return DoctorReport(
        environment=runner.backend.environment(runner.plan.config_hash),
        capture=runner.report,
        repeats=runner.config.report.repeats,
        records=tuple(records),
        floor=floor_of(runner) if records else None,
        outside=dict(outside.most_common()),
    )


def describe_split(
    model: Callable[..., Any],
    config: Config,
    backend: GraphBackend,
) -> SplitRecord | None:
    """None without PIECEWISE keys. For a split by operators, the model runs once on padding and is
    put back, except for a KV cache that padding writes. Raises as choose_route, and ModelError.
    """
    plan = build_plan(config)
    piecewise = [key for key in plan.keys if key[0] is CUDAGraphMode.PIECEWISE]
    if not piecewise:
        return None
    config = config.with_values("compilation", compiler="eager")
    graphs = ModelGraphs(plan, config, model, backend)
    smallest = piecewise[-1]
    try:
        graphs.choose_route()
        if graphs.route.splitter is not None:
            with on_padding(graphs) as rehearsal:
                rehearsal.look(smallest)
                graphs.warm_up(smallest)
        return graphs.route.describe()
    except Exception as error:
        failure = explain_eager_failure(error, f"{smallest[0]} {smallest[1]}")
        drop_locals(error)
        raise_caused(failure, error)
    finally:
        graphs.free()
