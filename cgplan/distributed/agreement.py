"""What must be the same on all ranks before they capture: configuration, versions, model, plan."""

from __future__ import annotations

import hashlib
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
from cgplan.reports.records import Environment

_MOST_NAMED = 3  # differences that a message spells out


def agree_on_setup(
    ranks: Ranks, config: Config, backend: GraphBackend, *, also: Mapping[str, Any] | None = None
) -> None:
    """All ranks have rank 0's configuration (but for the device), torch, CUDA, driver, kind of GPU and cgplan.

    Args:
        ranks: All ranks.
        config: This rank's.
        backend: Its device.
        also: What else has to be the same, by the name that a message gives it: the caller's own options, say.

    Raises:
        RankMismatchError: on all ranks; it names the rank, the setting, and both values.
    """
    environment = describe_environment(backend, "")
    versions = {f"version of {name}": value for name, value in _versions(environment).items()}
    said = {**(also or {}), **versions, **_settings(config)}
    _compare(ranks.agree("comparing the ranks", value=said), "Start all ranks from one file and one installation.")


def agree_on_model(ranks: Ranks, model: Callable[..., Any]) -> None:
    """All ranks have built the same model: its class, and names, shapes and dtypes of its parameters and buffers.

    Values are not compared; where a model is split, they differ. Raises RankMismatchError on all ranks.
    """
    said: dict[str, Any] = {"the model's class": f"{type(model).__module__}.{type(model).__qualname__}"}
    if isinstance(model, nn.Module):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            said[f"tensor {name}"] = f"{list(tensor.shape)} {tensor.dtype}"
    _compare(ranks.agree("comparing the models", value=said), "Every rank has to build the same model.")


def agree_on_plan(ranks: Ranks, plan: Plan) -> Plan:
    """Rank 0's plan, on all ranks, checked against its hash.

    Args:
        ranks: All ranks.
        plan: This rank's; only rank 0's counts.

    Raises:
        RankMismatchError: the plan arrived damaged, or a rank reads it otherwise.
    """
    text = plan.model_dump_json()
    text, digest = ranks.broadcast("broadcasting the plan", (text, plan_digest(plan)))
    found = Plan.from_json(text)
    _compare(
        ranks.agree("comparing the plan", value={"the plan's hash": plan_digest(found), "hash as sent": digest}),
        "Install the same version of cgplan on all ranks.",
    )
    return found


def plan_digest(plan: Plan) -> str:
    """The first 12 hexadecimal digits of the SHA-256 of a plan's JSON."""
    return hashlib.sha256(plan.model_dump_json().encode()).hexdigest()[:12]


def _versions(environment: Environment) -> dict[str, Any]:
    gpu = {"the GPU driver": environment.driver, "CUDA": environment.cuda, "the GPU": environment.device}
    versions = {"torch": environment.torch, "cgplan": environment.cgplan}
    return versions | (gpu if torch.version.cuda and environment.backend == "cuda" else {})


def _settings(config: Config) -> dict[str, Any]:
    """Dotted names and values in JSON; the device is each rank's own."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key, below in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), below)
        else:
            flat[prefix] = json.dumps(value)

    walk("", config.model_dump(mode="json", exclude={"device"}))
    return flat


def _compare(said: Sequence[Mapping[str, Any]], remedy: str) -> None:
    for rank, theirs in enumerate(said):
        names = [name for name in {**said[0], **theirs} if theirs.get(name) != said[0].get(name)]
        if not names:
            continue
        parts = [f"{name}: {_shown(theirs, name)}, rank 0 has {_shown(said[0], name)}" for name in names[:_MOST_NAMED]]
        more = f"; and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        raise RankMismatchError(f"rank {rank} differs from rank 0: {'; '.join(parts)}{more}", remedy=remedy)


def _shown(said: Mapping[str, Any], name: str) -> str:
    return str(said.get(name, "nothing"))


__all__ = ["agree_on_model", "agree_on_plan", "agree_on_setup", "plan_digest"]
