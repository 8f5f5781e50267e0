"""`cgplan inspect`: the plan of a configuration and where its values come from, vLLM's plan, or a saved report."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import typer
from pydantic import BaseModel
from rich.console import RenderableType

from cgplan.cli.costs import costs_of
from cgplan.cli.output import note, publish, show
from cgplan.config import Config, LoadedConfig, read_config
from cgplan.config.template import inline_yaml
from cgplan.errors import ReportError
from cgplan.modes import CUDAGraphMode
from cgplan.optimizer.subset import within_count
from cgplan.planning import Plan, build_plan
from cgplan.planning.build import resolve_sizes
from cgplan.pricing.measured import case_costs
from cgplan.reports import load_report, render
from cgplan.reports.layout import Column, Grid, describe_sizes, facts, sentences, titled
from cgplan.reports.plan_tables import case_table, lane_table


class Row(NamedTuple):
    key: str
    value: str
    origin: str


def inspect_config(
    path: Path,
    overrides: Sequence[str],
    *,
    as_json: bool = False,
    split: bool = False,
    costs: str | None = None,
    everything: bool = False,
) -> None:
    """Show the plan of a configuration and the values that were set; with ``everything`` the defaults, too. With
    ``split`` the pieces of its model, with ``costs`` (see ``costs_of``) the predicted cost by lane and LoRA case.
    """
    loaded = read_config(path, overrides)
    plan = within_count(build_plan(loaded.config), loaded.config)
    priced, machine, _ = costs_of(loaded, costs)
    if priced is not None:
        plan = plan.model_copy(update={"predicted": priced.of(plan.keys), "machine": machine})
    if as_json:
        for text in () if priced is None else priced.notes:
            note(f"note: {text}")
        typer.echo(plan.model_dump_json(indent=2))
        return
    named = loaded.config.compilation.splitting_ops or loaded.config.compilation.splitting_modules
    if named and not split and plan.mode.has_mode(CUDAGraphMode.PIECEWISE):
        note("note: a capture, and --split, show which of the splitting operators and modules the model has")
    parts = [render(plan)]
    if plan.predicted is not None and plan.keys:
        parts.append(lane_table(plan))
    if plan.max_loras is not None and plan.keys:
        parts.append(case_table(case_costs(plan, priced), plan.max_loras))
    if split:
        parts.append(_split_of(loaded))
    rows = origin_rows(loaded, plan)
    shown = [row for row in rows if everything or row.origin not in ("default", "resolved")]
    lines = [row._replace(origin=row.origin.replace(f"{path.name}:", "line ")) for row in shown]
    left_out = len(rows) - len(lines)
    rest = [sentences(f"and {left_out} defaults, listed with --all")] if left_out else []
    show(*parts, titled(f"Values of {path}" if everything else f"Values set for {path}", _key_table(lines), *rest))


def _key_table(rows: Iterable[Row]) -> RenderableType:
    return Grid(rows, *(Column(name, name, left=True) for name in Row._fields))


def _split_of(loaded: LoadedConfig) -> RenderableType:
    """Which operators or modules of the model end up where; the model is built for it, and traced or searched."""
    target, kwargs = loaded.model_for("--split")
    from cgplan.backends import select_backend  # torch from here on
    from cgplan.models.loading import load_model
    from cgplan.runner.session import describe_split

    with redirect_stdout(sys.stderr):  # a model's prints are not the result
        backend = select_backend(loaded.config.device)
        built = load_model(target, kwargs, device=backend.device, base_dir=loaded.base_dir)
        found = describe_split(built.forward, loaded.config, backend)
    return facts("Split", [("pieces", "none: no PIECEWISE graph is planned")]) if found is None else render(found)


def inspect_vllm(text: str, *, as_json: bool, **options: Any) -> None:
    """Show vLLM's captures for its own options, see ``read_vllm``."""
    from cgplan.planning.engines import read_vllm

    read = read_vllm(text, **options)
    plan = build_plan(read.loaded.config)
    for line in read.notes:
        note(f"note: {line}")
    if as_json:
        typer.echo(plan.model_dump_json(indent=2))
        return
    rows = [r for r in origin_rows(read.loaded, plan) if r.origin != "default" and r.key != "report.sizes"]
    show(render(plan), titled("vLLM's configuration", _key_table(rows)))


def inspect_report(path: Path, *, as_json: bool) -> None:
    if path.suffix in (".yaml", ".yml"):
        raise ReportError(
            f"{path} is not a saved report", remedy=f"For a configuration: cgplan inspect --config {path}"
        )
    publish(load_report(path), None, as_json=as_json)


def origin_rows(loaded: LoadedConfig, plan: Plan) -> list[Row]:
    """Each value with its origin: file and line, `--set`, default, or resolved; a resolved value names its source."""
    resolved = _resolved(loaded.config, plan)
    rows = []
    for key, value, origin in _rows(loaded.config, "", loaded):
        found = resolved.get(key, "")
        if not found:
            rows.append(Row(key, value, origin))
        elif origin == "default":
            rows.append(Row(key, found, "resolved"))
        else:
            rows.append(Row(key, f"{value} -> {found}", origin))
    return rows


def _rows(section: BaseModel, prefix: str, loaded: LoadedConfig) -> Iterator[Row]:
    for name in type(section).model_fields:
        value, key = getattr(section, name), f"{prefix}{name}"
        if isinstance(value, BaseModel):
            yield from _rows(value, f"{key}.", loaded)
        elif isinstance(value, dict) and value:
            for item, inner in value.items():
                if isinstance(inner, BaseModel):
                    yield from _rows(inner, f"{key}.{item}.", loaded)
                else:
                    yield Row(f"{key}.{item}", _text(inner), loaded.origin(f"{key}.{item}"))
        else:
            given = name in section.model_fields_set
            yield Row(key, _text(value), loaded.origin(key) if given else "default")


def _text(value: Any) -> str:
    if value is None:
        return "absent"
    return inline_yaml(value.name if hasattr(value, "name") else list(value) if isinstance(value, tuple) else value)


def _resolved(config: Config, plan: Plan) -> dict[str, str]:
    """Values that planning found or changed, by key, each with its source."""
    given, asked = config.compilation.cudagraph_capture_sizes, config.compilation.max_cudagraph_capture_size
    found: dict[str, str] = {}
    sizes = f"{describe_sizes(plan.capture_sizes)} ({len(plan.capture_sizes)})"
    if plan.changes:
        reasons = ", ".join(change.reason.partition(":")[0] for change in plan.changes)  # the plan has them in full
        found["compilation.cudagraph_mode"] = f"{plan.mode} (from {reasons})"
    if plan.capture_sizes != given:
        found["compilation.cudagraph_capture_sizes"] = f"{sizes} (from {_sizes_source(config, plan)})"
    if asked is None or asked != plan.max_capture_size:
        if not plan.capture_sizes:
            source = "cudagraph_mode"
        elif isinstance(given, tuple):
            source = "cudagraph_capture_sizes"
        elif asked is not None:
            source = "the ladder's steps, max_num_batched_tokens"
        else:
            query = "num_speculative_tokens, " if plan.query_len > 1 else ""
            source = f"max_num_seqs, {query}max_num_batched_tokens"
        found["compilation.max_cudagraph_capture_size"] = f"{plan.max_capture_size} (from {source})"
    if config.report.sizes is None:
        found["report.sizes"] = f"{sizes} (from cudagraph_capture_sizes)"
    return found


def _sizes_source(config: Config, plan: Plan) -> str:
    given = config.compilation.cudagraph_capture_sizes
    if not plan.capture_sizes:
        return "cudagraph_mode"
    resolved = resolve_sizes(config, plan.mode).sizes
    counted = resolved != plan.capture_sizes
    if not isinstance(given, tuple):
        return f"{plan.sizes_source}, budget.max_graphs" if counted else plan.sizes_source
    kept = tuple(sorted({size for size in given if size <= plan.max_num_batched_tokens}))
    causes = {
        "max_num_batched_tokens": len(kept) < len(set(given)),
        "num_speculative_tokens": kept != resolved,
        "budget.max_graphs": counted,
    }
    return ", ".join(name for name, applies in causes.items() if applies) or "the same, sorted"
