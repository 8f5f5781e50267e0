"""Calls in files: a kind as a configuration, and the target that calls its model."""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from cgplan.drop_in.call_form import CONSTANTS, ByName, arguments_by_name, call_form
from cgplan.drop_in.kinds import Kind
from cgplan.errors import ConfigError
from cgplan.models.loading import load_model

_OF_GRAPHED = {
    "capture_policy",
    "strict",
    "ignore",
    "verify",
    "address_check",
}


class Name(str):
    """The name of a tensor, in its place."""


def as_called(
    target: str,
    call: Mapping[str, Any],
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    """The model with tensors by name. ``call``: constants, lists, mappings, `{$tuple: [...]}`, and
    `$name` for a tensor.
    """
    model = load_model(target, kwargs, device=torch.get_default_device())
    marks = dict[str, Tensor]()

    def filled(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("$"):
            return marks.setdefault(value[1:], torch.empty(0))
        if isinstance(value, list):
            return [filled(item) for item in value]
        if not isinstance(value, dict):
            return value
        items = {name: filled(item) for name, item in value.items()}
        return tuple(items["$tuple"]) if items.keys() == {"$tuple"} else items

    signature = inspect.signature(getattr(model, "forward", model))
    arguments = OrderedDict((name, filled(value)) for name, value in call.items())
    given = inspect.BoundArguments(signature, arguments)
    form, ordered = call_form(given.args, given.kwargs)
    made = ByName(
        model,
        len(given.args),
        given.kwargs,
        tuple(form),
    )
    name_of = {id(mark): name for name, mark in marks.items()}
    made.names = tuple(name_of[id(tensor)] for tensor in ordered)
    return made


def written(
    value: Any,
    path: str,
) -> Any:
    """As ``as_called`` reads it. Raises ConfigError where YAML has no form for it."""
    kind = type(value)
    if isinstance(value, Name):
        return f"${value}"
    if kind in (list, tuple):
        items = [written(item, f"{path}.{at}") for at, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: written(item, f"{path}.{key}") for key, item in value.items()}
    if kind in CONSTANTS and not str(value).startswith("$"):
        return value
    raise ConfigError(
        f"argument {path} is {value!r:.80}, of {kind.__name__}, which a YAML file cannot hold",
        remedy="`graphed` a function that makes the argument itself, as `cgplan examples copy "
        "transformers_qwen3_0_6b` does with a static cache.",
    )


def target_of(model: object) -> str | None:
    kind = type(model)
    found = getattr(sys.modules[kind.__module__], kind.__qualname__, None)
    if found is not kind or kind.__module__ == "__main__":
        return None
    if not isinstance(model, nn.Module):
        return None
    if kind.__init__ is not nn.Module.__init__ and inspect.signature(kind).parameters:
        return None
    return f"{kind.__module__}:{kind.__qualname__}"


def config_text(
    kind: Kind,
    signature: inspect.Signature,
    target: str | None,
    kwargs: Mapping[str, Any] | None,
) -> str:
    tail = kind.form[-1]
    if tail.autocast:
        raise ConfigError(
            "calls were made under torch.autocast, which a file cannot hold",
            remedy="Enter torch.autocast in the model's forward, and call it outside.",
        )
    assert kind.runner is not None
    config = kind.runner.config
    values = config.model_dump(
        mode="json",
        exclude_defaults=True,
        exclude={
            "dims": {"__all__": {"name"}},
            "compilation": _OF_GRAPHED,
        },
    )
    values["device"] = "auto"
    made_by = dict[str, Any]()
    if target:
        made_by["target"] = target
    if kwargs:
        made_by["kwargs"] = dict(kwargs)
    args, keywords = kind.forward.arguments(map(Name, kind.specs))
    call = arguments_by_name(signature, args, keywords)
    key = "model.target"
    if list(call.items()) != [(name, name) for name in kind.specs]:
        if target is not None:
            file = target.partition(":")[0]
            if file.endswith(".py"):
                made_by["target"] = str(Path(target).resolve())
        made_by["call"] = {name: written(value, name) for name, value in call.items()}
        made_by = {"target": "cgplan.drop_in:as_called", "kwargs": made_by}
        key = "model.kwargs.target"
    values["model"] = made_by | values.get("model", {})
    notes = ["Written by cgplan, which saw calls of this kind:", *kind.notes]
    for name in sorted(kind.grows):
        notes.append(f"To correct: dims.{name}.max, a guess from calls")
    if target is None:
        notes.append(
            f"To fill in: {key}, a function that returns the model, such as my_model.py:build"
        )
    text = "".join(f"# {note}\n" for note in notes)
    return text + yaml.safe_dump(
        values,
        sort_keys=False,
        default_flow_style=None,
        width=110,
    )
