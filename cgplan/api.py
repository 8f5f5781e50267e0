"""The short way in: capture a model in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from cgplan.backends import select_backend
from cgplan.config import Config, validate_config
from cgplan.errors import ConfigError
from cgplan.planning import build_plan
from cgplan.runner.runner import GraphRunner
from cgplan.runner.session import CaptureProgress, CaptureSession

Section = Mapping[str, Any] | BaseModel


def capture(
    model: Callable[..., Any],
    inputs: Mapping[str, Any],
    *,
    metadata: Mapping[str, Any] | None = None,
    compilation: Section | None = None,
    scheduler: Section | None = None,
    lora: Section | None = None,
    speculative: Section | None = None,
    report: Section | None = None,
    budget: Section | None = None,
    device: str = "auto",
    output_rows: str = "num_tokens",
    state: Sequence[object] | None = None,
    progress: Callable[[CaptureProgress], None] | None = None,
) -> GraphRunner:
    """Plan, capture, and return a runner.

    Args:
        model: Any callable or nn.Module, on the device already; it is called with the inputs by name.
        inputs: ``cgplan.Input`` by name, one for each argument of the forward.
        metadata: ``cgplan.Input`` by name for tensors that the model reads from the forward context.
        compilation, scheduler, lora, speculative, report, budget: Sections of the configuration, as mappings or models.
        device: ``auto``, ``cuda``, ``cuda:N`` or ``cpu``.
        output_rows: What dimension 0 of each output counts: ``num_tokens`` or ``num_reqs``.
        state: The objects whose tensors and attributes the model relies on, where it is a method of a larger one, such
            as ``cgplan.capture(engine.forward_decode, ..., state=[engine.model])``; absent: the model.
        progress: Called before each key.

    Raises:
        ConfigError, PlanError, BackendError: before anything runs; ModelError: the model cannot be called.
        CaptureError: see CaptureSession.run.
    """
    sections = {
        "metadata": metadata,
        "compilation": compilation,
        "scheduler": scheduler,
        "lora": lora,
        "speculative": speculative,
        "report": report,
        "budget": budget,
    }
    if not isinstance(inputs, Mapping):
        raise ConfigError(
            f"inputs is a {type(inputs).__name__}, not a mapping",
            remedy="Pass a dict of cgplan.Input by name, one for each argument of the forward.",
        )
    given = {name: value for name, value in sections.items() if value is not None}
    model_section = {"output_rows": output_rows}
    config: Config = validate_config({"model": model_section, "inputs": dict(inputs), "device": device, **given})
    plan = build_plan(config)
    return CaptureSession(plan, model, select_backend(device), config, progress=progress, state=state).run()
