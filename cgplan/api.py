"""Capture a model in one call."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Never

import torch
from pydantic import BaseModel

from cgplan.backends import select_backend
from cgplan.captures.captured_keys import Progress
from cgplan.captures.model_graphs import BeforeKey
from cgplan.config import Config, Input, load_config, validate_config
from cgplan.errors import ConfigError, ModelError, refuse_others
from cgplan.models.loading import load_model, refuse_no_model
from cgplan.modes import CUDAGraphMode
from cgplan.planning import build_plan
from cgplan.runner.auto import Trials
from cgplan.runner.runner import GraphRunner
from cgplan.runner.session import CaptureSession

logger = logging.getLogger(__name__)
Section = Mapping[str, Any] | BaseModel


def capture(
    model: Callable[..., Any] | None = None,
    inputs: Mapping[str, Any] | None = None,
    *,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    metadata: Mapping[str, Any] | None = None,
    dims: Mapping[str, Any] | None = None,
    compilation: Section | None = None,
    scheduler: Section | None = None,
    lora: Section | None = None,
    speculative: Section | None = None,
    report: Section | None = None,
    budget: Section | None = None,
    device: str | torch.device | None = None,
    output_rows: str | None = None,
    output_shapes: Sequence[Sequence[int | str]] | None = None,
    state: Sequence[object] | None = None,
    progress: Progress | None = None,
    before_key: BeforeKey | None = None,
    **others: Never,
) -> GraphRunner:
    """Plan, capture, and return a runner.

        cgplan.capture(model, {"x": cgplan.Input(shape=("num_tokens", 8), dtype="float32", pad=0)})
        cgplan.capture(config="my.yaml")  # the file names the model

    Warnings of the report are logged.

    Args:
        model: A callable or nn.Module on the device, called with the inputs by name. Absent:
            ``model.target`` of the configuration.
        inputs: ``Input`` by name, for each argument of the forward; in short ``(shape, dtype,
            pad)``; or an example tensor of floating point, whose dimension 0 counts
            ``num_tokens``.
        config: A configuration, its mapping, or its file; then no sections.
        metadata: ``Input`` by name for tensors in the forward context.
        dims: ``Dim`` by name; several need ``output_shapes``.
        compilation, scheduler, lora, speculative, report, budget: Sections, as mappings or models.
        device: ``auto``, ``cuda``, ``cuda:N`` or ``cpu``; absent: the configuration's.
        output_rows: What dimension 0 of each output counts: ``num_tokens`` or ``num_reqs``.
        output_shapes: Of each output, as in ``[["num_tokens", "side", "side"]]``.
        state: What a method reads, as in ``[engine.model]``, instead of the model.
        progress: Called before each key.
        before_key: Sets an engine's context before each key, see CaptureSession.

    Raises:
        ConfigError, PlanError, BackendError: before anything runs.
        ModelError: the model cannot be loaded or called.
        CaptureError: see CaptureSession.run.
    """
    refuse_others(
        capture,
        others,
        'Sizes are compilation={"cudagraph_capture_sizes": [1, 4]}, as are settings such as '
        "outputs; a plan is captured by CaptureSession(plan, model, backend, config).run().",
    )
    if model is not None:
        refuse_no_model(model)
    shapes = {"output_rows": output_rows, "output_shapes": output_shapes}
    sections = {
        "inputs": None if inputs is None else _declared(inputs),
        "metadata": metadata,
        "dims": dims,
        "compilation": compilation,
        "scheduler": scheduler,
        "lora": lora,
        "speculative": speculative,
        "report": report,
        "budget": budget,
        "model": {name: value for name, value in shapes.items() if value is not None} or None,
    }
    given = {name: value for name, value in sections.items() if value is not None}
    folder = Path(config).parent if isinstance(config, str | Path) else None
    config = _configuration(config, given)
    config = config.changed(device=str(device or config.device))
    plan = build_plan(config)
    backend = select_backend(config.device)
    if model is None:
        if config.model is None or config.model.target is None:
            raise ModelError(
                "no model was given", remedy="Pass one, or a configuration with model.target."
            )
        model = load_model(
            config.model.target, config.model.kwargs, device=backend.device, base_dir=folder
        )
    session = partial(
        CaptureSession,
        model=model,
        backend=backend,
        progress=progress,
        state=state,
        before_key=before_key,
        began=time.perf_counter(),
    )
    if config.compilation.cudagraph_mode is CUDAGraphMode.AUTO:
        trials = Trials(config, model, backend, state, before_key=before_key)
        runner = trials.choose(
            lambda config, plan, route: session(plan, config=config, route=route).run()
        )
    else:
        runner = session(plan, config=config).run()
    for warning in runner.report.warnings:
        logger.warning("%s", warning)
    return runner


def _configuration(config: Any, sections: dict[str, Any]) -> Config:
    if config is None:
        if "inputs" not in sections:
            raise ConfigError(
                "neither inputs nor config were given",
                remedy="Pass cgplan.Input by name, or a file.",
            )
        return validate_config({"model": {}, **sections})
    if sections:
        names = [*sections.pop("model", {}), *sections]
        raise ConfigError(
            f"config and {', '.join(names)} were both given",
            remedy="Put the sections into the configuration.",
        )
    if isinstance(config, Config):
        return config
    return load_config(config) if isinstance(config, str | Path) else validate_config(config)


def _declared(inputs: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(inputs, Mapping):
        raise ConfigError(
            f"inputs is a {type(inputs).__name__}",
            remedy='Name each argument of the forward, as in {"x": x}; cgplan.graphed takes '
            "arguments as they are.",
        )
    for name, value in inputs.items():
        parts = value.values() if isinstance(value, Mapping) else value
        is_list = isinstance(value, Mapping | list | tuple)
        if is_list and any(isinstance(part, Input | torch.Tensor) for part in parts):
            raise ConfigError(
                f"input {name!r} is nested, and `capture` takes tensors by name",
                remedy="Use cgplan.graphed, which takes nested arguments.",
            )
    examples = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    for name, tensor in examples.items():
        if not tensor.is_floating_point():
            raise ConfigError(
                f"input {name!r} is an example of {tensor.dtype}, which does not say what padding "
                "rows hold",
                remedy=f"Pass cgplan.Input.like({name}, pad=0) if 0 is harmless, or the value "
                "that is (-1 for slots).",
            )
    if len({tensor.shape[:1] for tensor in examples.values()}) > 1:
        raise ConfigError(
            "dimension 0 differs: "
            f"{', '.join(f'{name} {list(tensor.shape)}' for name, tensor in examples.items())}",
            remedy="Pass examples of one batch, and cgplan.Input for other tensors.",
        )
    return {**inputs, **{name: Input.like(tensor, pad=0) for name, tensor in examples.items()}}
