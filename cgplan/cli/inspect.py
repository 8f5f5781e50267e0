"""`cgplan inspect` of a configuration or of vLLM's options, and `cgplan vllm check`."""

from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import typer
from pydantic import BaseModel
from rich.console import RenderableType

from cgplan.cli.options import InspectRequest
from cgplan.cli.output import note, prints_aside, show, wrapped
from cgplan.cli.plan import costs_of
from cgplan.config import LoadedConfig, read_config
from cgplan.config.load import read_text
from cgplan.config.reference import inline_yaml
from cgplan.errors import PlanError, PlanMismatchError, ReportError
from cgplan.optimizer.subset import within_count
from cgplan.planning import Plan, build_plan
from cgplan.planning.engines import VllmConfig, describe_batches, emit, with_emission
from cgplan.planning.vllm_log import StartLog, lowered, without_graphs
from cgplan.pricing import GraphCosts
from cgplan.reports import load_plan, render
from cgplan.reports.layout import (
    Facts,
    Grid,
    Sentences,
    TextColumn,
    describe_sizes,
    titled,
)
from cgplan.reports.plan_tables import lane_table, predicted_by
from cgplan.units import format_bytes

_LOG = "Give the log of a start of vLLM with CUDA graphs, at its usual level INFO."


class Row(NamedTuple):
    key: str
    value: str
    origin: str


def inspect_config(request: InspectRequest, vllm: VllmConfig | None) -> None:
    loaded = vllm.loaded if vllm else read_config(request.path, request.settings())
    notes: list[str] = []
    priced = costs_of(loaded, request.costs)
    costs = priced.costs
    loaded = lowered(loaded, priced.log)
    plan = priced.plan_of(within_count(build_plan(loaded.config), loaded.config))
    path = "vLLM" if vllm else request.path
    if vllm:
        plan = with_emission(plan, "vllm", vllm.options)
        notes += vllm.said(priced.log)
    if costs and request.as_json:
        notes += costs.notes
    if loaded.config.model and not loaded.config.tensors:
        notes.append("no input counts rows: a capture needs one")
    for text in notes:
        note(f"note: {text}")
    if request.as_json:
        typer.echo(plan.model_dump_json(indent=2))
        return
    parts = [render(plan), lane_table(plan)]
    if request.split:
        parts.append(_split_of(loaded))
    rows = origin_rows(loaded, plan)
    if request.everything:
        parts.append(titled(f"Values of {path}", _key_table(rows)))
    else:
        is_set = [row for row in rows if row.origin not in ("default", "resolved")]
        rest = Sentences(f"and {len(rows) - len(is_set)} defaults, listed with --all")
        parts.append(titled(f"Values set for {path}", _key_table(is_set), rest))
    show(*parts)


def _key_table(rows: Iterable[Row]) -> RenderableType:
    return Grid(rows, *map(TextColumn, Row._fields))


def _split_of(loaded: LoadedConfig) -> RenderableType:
    target, kwargs = loaded.model_for("--split")
    from cgplan.backends import select_backend  # torch from here on
    from cgplan.measure.bench import describe_split
    from cgplan.models.loading import load_model

    with prints_aside():
        backend = select_backend(loaded.config.device)
        model = load_model(target, kwargs, device=backend.device, base_dir=loaded.base_dir)
        found = describe_split(model, loaded.config, backend)
    if found is None:
        return Facts("Split", [("pieces", "none: no PIECEWISE graph is planned")])
    return render(found)


def _start_of(file: Path, read: VllmConfig | None) -> StartLog:
    text = read_text(file, ReportError, _LOG)
    log = StartLog.parse(text)
    if not log:
        raise ReportError(f"{file}: {without_graphs(text)}", remedy=_LOG)
    if not (read or log.graphs or log.sizes):
        raise ReportError(
            f"{file} does not say how many graphs were captured",
            remedy="Log standard error, too: vLLM's progress bars count them.",
        )
    return log


def check_vllm(
    read: VllmConfig | None,
    file: Path | None,
    saved: Path | None,
    utilization: float | None,
    gpu_gib: float | None,
) -> None:
    """Raises PlanError for sizes that vLLM does not capture, ReportError for another log, and
    PlanMismatchError for a start of other graphs than the saved plan's, or far more memory,
    BudgetError where no KV cache fits.
    """
    log = _start_of(file, read) if file else None
    if read:
        config = lowered(read.loaded, log).config
        plan = build_plan(config)
    else:
        assert saved
        plan = load_plan(saved)
    captures = "vLLM captures" if read else "The plan has"
    said = [
        f"{captures} {plan.graph_words} in mode {plan.mode}, sizes in tokens: "
        f"{describe_sizes(sorted({key.num_tokens for _, key in plan.keys}))}",
        *describe_batches(plan),
    ]
    others = []
    nbytes = 0
    if log:
        others = [*log.of_other_options(plan)]
        predicted = plan.predicted
        if others and read:
            said += others
            costs = GraphCosts.from_vllm_log(log, config, str(file))
            predicted = costs.of(plan.keys)
        said += log.said(plan, others)
        nbytes = log.bytes
        if predicted:
            said.append(
                f"predicted: {format_bytes(predicted.total_bytes)} and {predicted.seconds:.3g} s, "
                f"by {predicted_by(predicted)}"
            )
            if others:
                nbytes = predicted.total_bytes
    typer.echo(wrapped("\n".join(said)))
    if others and not read:
        own = plan.emission
        emission = own if own and own.engine == "vLLM" else emit(plan, "vllm")
        typer.echo("\n".join((*emission.notes, emission.block)))
        remedy = f"vLLM lowered the mode: plan again with --costs {file}."
        if log and log.support is None:
            remedy = (
                "Start vLLM with the plan's options, the last lines above, or give its own plan."
            )
        if predicted and predicted.source.endswith(f", {file}"):
            remedy = (
                f"The costs of the plan are of {file}: with it give the last lines above in place "
                "of --plan, which is for the log of a new start."
            )
        raise PlanMismatchError(f"{saved}: {others[0]}", remedy=remedy)
    for line in log.kv_cache(plan, nbytes, utilization, gpu_gib) if log else ():
        typer.echo(wrapped(line))
    if read and read.lost:
        raise PlanError(
            "vLLM does not capture all that was asked for\n  - " + "\n  - ".join(read.lost),
            remedy="Give the sizes of batches as cudagraph_capture_sizes, in decode multiples of "
            f"{plan.query_len}, the largest included, and no max_cudagraph_capture_size.",
        )
    for far in log.overrun(plan) if log else ():
        raise PlanMismatchError(f"{saved}: {far}", remedy=f"Plan again with --costs {file}.")


def origin_rows(loaded: LoadedConfig, plan: Plan) -> list[Row]:
    config = loaded.config
    given = config.compilation
    resolved = {}
    sizes = f"{describe_sizes(plan.capture_sizes)} ({len(plan.capture_sizes)})"
    if plan.changes:
        reasons = ", ".join(change.reason.partition(":")[0] for change in plan.changes)
        resolved["compilation.cudagraph_mode"] = f"{plan.mode} (from {reasons})"
    if plan.capture_sizes != given.cudagraph_capture_sizes:
        source = plan.sizes_source
        if plan.capture_sizes != build_plan(config).capture_sizes:
            source += ", budget.max_graphs"
        resolved["compilation.cudagraph_capture_sizes"] = f"{sizes} (from {source})"
    if plan.max_capture_size != given.max_cudagraph_capture_size:
        resolved["compilation.max_cudagraph_capture_size"] = (
            f"{plan.max_capture_size} (from cudagraph_capture_sizes)"
        )
    if config.report.sizes is None:
        resolved["report.sizes"] = f"{sizes} (from cudagraph_capture_sizes)"
    rows = []
    for row in _rows(config, "", loaded):
        found = resolved.get(row.key)
        if found is not None and row.origin == "default":
            row = Row(row.key, found, "resolved")
        elif found is not None:
            row = row._replace(value=f"{row.value} -> {found}")
        rows.append(row)
    return rows


def _rows(section: BaseModel, prefix: str, loaded: LoadedConfig) -> Iterator[Row]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        is_given = name in section.model_fields_set
        parts = {f"{prefix}{name}": value}
        if isinstance(value, dict) and value:
            parts = {f"{prefix}{name}.{item}": inner for item, inner in value.items()}
        for key, inner in parts.items():
            if isinstance(inner, BaseModel):
                yield from _rows(inner, f"{key}.", loaded)
                continue
            if isinstance(inner, Enum):
                inner = inner.name
            elif isinstance(inner, tuple):
                inner = [*inner]
            text = "absent" if inner is None else inline_yaml(inner)
            yield Row(key, text, loaded.origin(key) if is_given else "default")
