"""Messages for values that pydantic refused."""

from __future__ import annotations

import textwrap
import typing
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cgplan.errors import ConfigError, did_you_mean
from cgplan.units import grouped

Path_ = tuple[str | int, ...]
Places = Mapping[Path_, str]  # ``line 12``, or the option that gave a value
NOWHERE: Places = MappingProxyType({})


def explain(
    error: ValidationError,
    data: Any,
    source: str,
    root: type[BaseModel],
    places: Places = NOWHERE,
) -> ConfigError:
    """A message for each key; ``source`` names the file or class of ``data``."""
    by_path = grouped((_real_path(detail, data), detail) for detail in error.errors())
    messages = []
    is_unknown = False
    for path, details in by_path.items():
        kinds = {detail["type"] for detail in details}
        is_unknown |= "extra_forbidden" in kinds
        below = [other for other in by_path if other != path and other[: len(path)] == path]
        if "value_error" in kinds or not below:
            message = _message(
                path,
                details,
                root,
                places,
            )
            messages.append(message)
    message = messages[0]
    if len(messages) > 1:
        message = "\n  - ".join((f"{source}:", *messages))
    elif not message.startswith("--"):
        message = f"{source}: {message}"
    remedy = "Correct the value; `cgplan schema --format markdown` describes it."
    if is_unknown:
        remedy = "Correct or remove the key; `cgplan schema --format markdown` lists all keys."
    return ConfigError(message, remedy=remedy)


def first_problem(error: ValidationError) -> str:
    """Pydantic's first complaint, as ``records.0.mode: Field required``."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    what = _problem(first)
    return f"{where}: {what}" if where else what


def _problem(detail: ErrorDetails) -> str:
    return detail["msg"].removeprefix("Value error, ")


def _real_path(detail: ErrorDetails, data: Any) -> Path_:
    """pydantic's location without the names of union members."""
    real: list[str | int] = []
    for part in detail["loc"]:
        if isinstance(data, dict):
            is_inside = part in data
            if not is_inside and detail["type"] == "missing":
                return (*real, part)
        else:
            is_inside = isinstance(data, list | tuple) and part in range(len(data))
        if is_inside:
            real.append(part)
            data = data[part]
    return tuple(real)


def _message(
    path: Path_,
    details: Sequence[ErrorDetails],
    root: type[BaseModel],
    places: Places,
) -> str:
    where = ""
    key = ".".join(map(str, path))
    for depth in range(len(path)):
        place = places.get(path[: depth + 1], "")
        if place.startswith("line "):
            where = f"{place}: "
        elif place == "--set":
            where = "--set "
        elif place.startswith("--"):  # it stands for its one key
            where = ""
            key = place
    named = f"{where}{key}: " if key else where
    for detail in details:
        if detail["type"] == "value_error":
            return f"{named}{_problem(detail)}"
    detail = details[0]
    if detail["type"] == "extra_forbidden":
        return f"{where}unknown key {key!r}{_nearest(path, root)}"
    if detail["type"] == "missing":
        return f"{where}{key!r} is missing"
    words = [detail["msg"].removeprefix("Input should be ") for detail in details]
    allowed = " or ".join(dict.fromkeys(words)).replace("valid tuple", "list")
    shown = textwrap.shorten(repr(details[0]["input"]), 200, placeholder="...")
    return f"{named}found {shown}, expected {allowed}"


def _nearest(path: Path_, root: type[BaseModel]) -> str:
    *parents, name = path
    model = root
    for parent in parents:  # a name in a mapping of sections is no field
        if parent in model.model_fields:
            field = model.model_fields[str(parent)]
            model = _model_in(field.annotation) or model
    fields = list(model.model_fields)
    same_end = [field for field in fields if field.endswith(f"_{name}")]
    for near in (str(name), *same_end):
        hint = did_you_mean(near, fields, " (did you mean {!r}?)")
        if hint:
            return hint
    for section, info in root.model_fields.items():
        inside = _model_in(info.annotation)
        is_mapping = "dict" in str(info.annotation)
        if inside is not None and not is_mapping and name in inside.model_fields:
            return f" (it belongs under {section!r})"
    return f" (allowed here: {', '.join(fields)})"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """As in ``dict[str, Input]`` or ``LoRAConfig | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in typing.get_args(annotation):
        found = _model_in(inner)
        if found is not None:
            return found
    return None
