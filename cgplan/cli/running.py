"""`cgplan capture` and `cgplan bench`: cheap checks first, the model last."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cgplan.cli.launched import has_ranks, is_first_rank
from cgplan.cli.options import SavedPlan
from cgplan.cli.output import check_writable, note, publish
from cgplan.cli.planning import announce, read_plan
from cgplan.cli.progress import progress
from cgplan.config import Config, LoadedConfig, Override, read_config
from cgplan.config.schema import ModelConfig
from cgplan.errors import ConfigError, PlanMismatchError
from cgplan.planning import Plan, build_plan
from cgplan.planning.difference import fitted, unused_settings
from cgplan.planning.plan import budget_of
from cgplan.reports.peer_records import check_peers
from cgplan.reports.units import format_bytes, format_seconds

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
    with redirect_stdout(sys.stderr), _captured("capture", path, overrides, device, output, saved) as runner:
        report = runner.report
    if is_first_rank():
        publish(report, output, as_json=as_json)


def run_bench(
    path: Path,
    overrides: Sequence[str],
    *,
    device: str | None,
    output: Path | None,
    as_json: bool,
    saved: SavedPlan | None = None,
    against: Sequence[str] = (),
    seed: int | None = None,
) -> None:
    """Capture, measure and publish the report. Raises the errors of each step."""
    against = check_peers(against)
    if against and has_ranks():
        raise ConfigError(
            "--against measures one process, and torchrun has started several",
            remedy="Leave out --against, or run `cgplan bench` without torchrun.",
        )
    with redirect_stdout(sys.stderr), _captured("bench", path, overrides, device, output, saved) as runner:
        from cgplan.runtime.bench import bench

        with progress("bench" if is_first_rank() else "") as step:
            report = bench(runner, progress=step, against=against, seed=seed)
    if is_first_rank():
        publish(report, output, as_json=as_json)


@contextmanager
def _captured(
    command: str,
    path: Path,
    overrides: Sequence[str],
    device: str | None,
    output: Path | None,
    saved: SavedPlan | None,
) -> Iterator[GraphRunner]:
    """A block with the runner; what ranks share is taken down when it is over. What a model prints is not the result:
    callers send it to standard error.
    """
    loaded = read_config(path, [*overrides, *([Override(f"device={device}", "--device")] if device else [])])
    config = loaded.config
    model = _model_of(config, path)
    plan = build_plan(config) if saved is None else read_plan(saved.path)
    if plan.keys:
        _check_rows(config, path)
    if output is not None and is_first_rank():
        check_writable(output)
    if saved is None and is_first_rank():
        announce(plan)
    if has_ranks():
        from cgplan.cli.ranks import captured_on_ranks

        fit = None if saved is None else (lambda backend: _fitted(plan, config, backend, saved))
        with captured_on_ranks(command, loaded, model, plan, fit) as runner:
            yield runner
        return
    from cgplan.graphs import select_backend  # torch from here on

    backend = select_backend(config.device)
    if saved is not None:
        plan = _fitted(plan, config, backend, saved)
        announce(plan)
    yield _capture(loaded, model, plan, backend)


def _fitted(plan: Plan, config: Config, backend: GraphBackend, saved: SavedPlan) -> Plan:
    """A saved plan for this configuration and machine. Raises PlanMismatchError, unless it is forced."""
    from cgplan.runtime.environment import describe_environment

    try:
        machine = describe_environment(backend, plan.config_hash).as_machine
        found = fitted(plan, config, machine, force=saved.force, file=str(saved.path))
    except PlanMismatchError as error:
        raise PlanMismatchError(f"{saved.path}: {error.message}", remedy=error.remedy) from None
    unused = (
        f"{saved.path} decides {setting.name}; what the configuration says of it is not used"
        for setting in unused_settings(plan, config)
    )
    notes = (*unused, *_about_budgets(plan, config, saved.path))
    for text in notes if is_first_rank() else ():
        note(f"note: {text}")
    return found.model_copy(update={"notes": notes})  # its own are about planning


def _about_budgets(plan: Plan, config: Config, path: Path) -> Iterator[str]:
    """Where a plan was made for other limits than those that bound its capture."""
    old, new = (_limits(budget) for budget in (plan.budget or {}, budget_of(config)))
    if old and old != new:
        present = f"that of the configuration, {new}, bounds this capture" if new else "the configuration has none"
        yield f"{path} was made for a budget of {old}; {present}"


def _limits(budget: Mapping[str, Any]) -> str:
    """``2 GiB, 40 graphs``; nothing of the reserve, which no plan is made for."""
    words = {"memory": format_bytes, "capture_time": format_seconds, "max_graphs": "{} graphs at most".format}
    return ", ".join(word(budget[name]) for name, word in words.items() if name in budget)


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
