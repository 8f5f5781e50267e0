"""`cgplan capture` and `cgplan bench`: cheap checks first, the model last."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from cgplan.cli.options import SavedPlan
from cgplan.cli.output import check_writable, note, publish
from cgplan.cli.planning import announce, read_plan
from cgplan.cli.progress import progress
from cgplan.config import Config, LoadedConfig, read_config
from cgplan.config.schema import ModelConfig
from cgplan.errors import ConfigError, PlanMismatchError
from cgplan.planning import Plan, build_plan
from cgplan.planning.difference import fitted, unused_settings

if TYPE_CHECKING:
    from cgplan.graphs import GraphBackend
    from cgplan.runtime.runner import GraphRunner


def run_capture(
    path: Path,
    overrides: Sequence[str],
    *,
    device: str | None,
    output: Path | None,
    as_json: bool,
    saved: SavedPlan | None = None,
) -> None:
    """Capture and publish the report. Raises the errors of each step."""
    with redirect_stdout(sys.stderr):  # what a model prints is not the result
        runner = _captured(path, overrides, device, output, saved)
    publish(runner.report, output, as_json=as_json)


def run_bench(
    path: Path,
    overrides: Sequence[str],
    *,
    device: str | None,
    output: Path | None,
    as_json: bool,
    saved: SavedPlan | None = None,
) -> None:
    """Capture, measure and publish the report. Raises the errors of each step."""
    with redirect_stdout(sys.stderr):  # what a model prints is not the result
        runner = _captured(path, overrides, device, output, saved)
        from cgplan.runtime.bench import bench

        sizes = sorted(set(runner.config.report.sizes or runner.wanted.capture_sizes))
        with progress("bench") as step:
            report = bench(runner, progress=lambda done, total: step(done, total, f"{sizes[done]} tokens"))
    publish(report, output, as_json=as_json)


def _captured(
    path: Path, overrides: Sequence[str], device: str | None, output: Path | None, saved: SavedPlan | None
) -> GraphRunner:
    loaded = read_config(path, [*overrides, *([f"device={device}"] if device else [])])
    config = loaded.config
    model = _model_of(config, path)
    plan = build_plan(config) if saved is None else read_plan(saved.path)
    if plan.keys:
        _check_rows(config, path)
    if output is not None:
        check_writable(output)
    if saved is None:
        announce(plan)
    from cgplan.graphs import select_backend  # torch from here on

    backend = select_backend(config.device)
    if saved is not None:
        plan = _fitted(plan, config, backend, saved)
        announce(plan)
    return _capture(loaded, model, plan, backend)


def _fitted(plan: Plan, config: Config, backend: GraphBackend, saved: SavedPlan) -> Plan:
    """A saved plan for this configuration and machine. Raises PlanMismatchError, unless it is forced."""
    from cgplan.runtime.environment import describe_environment

    for setting in unused_settings(plan, config):
        note(f"note: {saved.path} decides {setting.name}; what the configuration says of it is not used")
    try:
        return fitted(plan, config, describe_environment(backend, plan.config_hash).as_machine, force=saved.force)
    except PlanMismatchError as error:
        raise PlanMismatchError(f"{saved.path}: {error.message}", remedy=error.remedy) from None


def _capture(loaded: LoadedConfig, model: ModelConfig, plan: Plan, backend: GraphBackend) -> GraphRunner:
    from cgplan.models.loading import load_model
    from cgplan.runtime.session import CaptureSession

    built = load_model(model.target or "", model.kwargs, device=backend.device, base_dir=loaded.base_dir)
    with progress("capture") as step:
        return CaptureSession(
            plan,
            built.forward,
            backend,
            loaded.config,
            progress=lambda at: step(at.index, at.total, f"{at.mode} {at.descriptor}"),
        ).run()


def _model_of(config: Config, path: Path) -> ModelConfig:
    if config.model is None or config.model.target is None:
        raise ConfigError(
            f"{path}: there is no `model` with a target, so nothing can be captured",
            remedy="Add model.target, such as my_model.py:build; `cgplan init TARGET` writes a starting configuration.",
        )
    return config.model


def _check_rows(config: Config, path: Path) -> None:
    """A runner tells the size of a batch from its tensors."""
    if all(spec.row_dim is None for spec in (*config.inputs.values(), *config.metadata.values())):
        raise ConfigError(
            f"{path}: no input has a dimension that counts the rows of a batch",
            remedy="Declare the model's inputs, with num_tokens or num_reqs in a shape; `cgplan init TARGET` helps.",
        )
