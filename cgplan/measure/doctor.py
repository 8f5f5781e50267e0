"""What of a step runs inside graphs."""

from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

from cgplan.backends import GraphBackend
from cgplan.captures.failures import drop_locals, explain_eager_failure, raise_caused
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.config import Config
from cgplan.measure.bench import floor_of
from cgplan.modes import CUDAGraphMode
from cgplan.planning import build_plan
from cgplan.reports.records import CoverageRecord, DoctorReport, SplitRecord
from cgplan.runner.auto import timed_keys
from cgplan.runner.replan import REPEATS, on_padding, time_on_padding
from cgplan.runner.runner import GraphRunner


def check_up(runner: GraphRunner) -> DoctorReport:
    """For a few keys on padding; medians in microseconds."""
    graphs = runner.graphs
    rows = list[CoverageRecord]()
    outside = Counter[str]()
    for key, (eager, replays) in time_on_padding(graphs, timed_keys(runner)).items():
        entry = graphs.entry(key)
        step = median(replays)
        if entry is None:  # the model's own code runs between its graphs
            continue
        inside = step
        if entry.eager_pieces:
            outside.clear()
            for piece in entry.graph.eager_pieces:
                place = f"{piece.name}, at {piece.line}"
                outside[place] += 1
            rounds = list[float]()
            segments = [graphs.backend.replay_of(graph) for graph in entry.segments]
            with on_padding(graphs) as rehearsal:
                rehearsal.look(key)
                for _ in range(REPEATS):
                    rehearsal.put_back.rewind()
                    times = [graphs.backend.time_calls(run, 1)[0][0] for run in segments]
                    rounds.append(sum(times))
            inside = min(median(rounds), step)
        rows.append(
            CoverageRecord(
                mode=key[0],
                descriptor=key[1],
                step_us=step,
                eager_us=median(eager),
                inside_us=inside,
            )
        )
    return DoctorReport(
        capture=runner.report,
        floor=floor_of(runner) if rows else None,
        rows=tuple(rows),
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
