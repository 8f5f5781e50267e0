"""Comparisons of all ranks before they capture: configuration, versions, model, plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cgplan.backends import GraphBackend
from cgplan.captures.environment import describe_environment
from cgplan.config import Config
from cgplan.distributed.ranks import Ranks
from cgplan.errors import RankMismatchError
from cgplan.planning import Plan
from cgplan.units import listed


def agree_on_setup(
    ranks: Ranks, config: Config, backend: GraphBackend, *, also: Mapping[str, Any] | None = None
) -> None:
    """All ranks have rank 0's configuration (but for the device), torch, CUDA, driver, kind of GPU and cgplan.

    ``also``: other values that have to be the same, by their names in messages: the caller's options, say. Raises
    RankMismatchError on all ranks; it names the rank, the setting, and both values.
    """
    found = describe_environment(backend, "")
    versions = {"torch": found.torch, "cgplan": found.cgplan}
    if torch.version.cuda and found.backend == "cuda":
        versions |= {"the GPU driver": str(found.driver), "CUDA": str(found.cuda), "the GPU": str(found.device)}
    own = {**(also or {}), **{f"version of {name}": value for name, value in versions.items()}}
    own |= _flat("", config.model_dump(mode="json", exclude={"device"}))
    compare(ranks.agree("comparing the ranks", value=own), "Start all ranks from one file and one installation.")


def agree_on_model(ranks: Ranks, model: Callable[..., Any]) -> None:
    """All ranks have built the same model: its class, and names, shapes and dtypes of its parameters and buffers.

    Values are not compared; where a model is split, they differ. Raises RankMismatchError on all ranks.
    """
    own: dict[str, Any] = {"the model's class": f"{type(model).__module__}.{type(model).__qualname__}"}
    if isinstance(model, nn.Module):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            own[f"tensor {name}"] = f"{list(tensor.shape)} {tensor.dtype}"
    compare(ranks.agree("comparing the models", value=own), "Every rank has to build the same model.")


def agree_on_plan(ranks: Ranks, plan: Plan) -> Plan:
    """Rank 0's plan, on all ranks; ``RankedCapture`` compares its hash. Raises as ``Ranks.agree``."""
    value = plan.model_dump_json() if ranks.rank == 0 else None
    return Plan.from_json(ranks.agree("broadcasting the plan", value=value)[0])


def _flat(prefix: str, value: Any) -> dict[str, str]:
    """Dotted names and values in JSON."""
    if not isinstance(value, Mapping) or not value:
        return {prefix: json.dumps(value)}
    names = {f"{prefix}.{key}" if prefix else str(key): below for key, below in value.items()}
    return {name: text for key, below in names.items() for name, text in _flat(key, below).items()}


def compare(found: Sequence[Mapping[str, Any]], remedy: str) -> None:
    """All ranks have rank 0's values, by name. Raises RankMismatchError; it names the rank and both values."""
    for rank, theirs in enumerate(found):
        unlike = [
            f"{name}: {theirs.get(name, 'nothing')}, rank 0 has {found[0].get(name, 'nothing')}"
            for name in {**found[0], **theirs}
            if theirs.get(name) != found[0].get(name)
        ]
        if unlike:
            raise RankMismatchError(f"rank {rank} differs from rank 0: {listed(unlike, 3)}", remedy=remedy)
