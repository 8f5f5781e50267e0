"""What cgplan says about values that pydantic refused: the line, the key, what is allowed, the nearest name."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from cgplan.errors import ConfigError

Path_ = tuple[str | int, ...]
MOST_SHOWN = 200  # characters of a value in a message
_NOWHERE: Mapping[Any, Any] = MappingProxyType({})
_CONTRADICTION: Final = "contradiction"
_IN_OUR_WORDS = ("value_error", _CONTRADICTION)  # what validators raise


def contradiction(message: str, *keys: str) -> PydanticCustomError:
    """What a validator raises for two values of its section that cannot both stand, by the names of their keys."""
    return PydanticCustomError(_CONTRADICTION, "{message}", {"message": message, "keys": keys})


def explain(
    error: ValidationError,
    data: Any,
    what: str,
    root: type[BaseModel],
    lines: Mapping[Path_, int] = _NOWHERE,
    origins: Mapping[str, str] = _NOWHERE,
) -> ConfigError:
    """cgplan's error for what pydantic found wrong.

    Args:
        error: What pydantic raised.
        data: What it was given.
        what: The file, or what was to be made.
        root: The model that was to be made; its fields are the valid names.
        lines: Line of each key, where it came from a file.
        origins: Where each dotted key came from.
    """
    messages = _messages(error, data, root, lines, origins)
    head = "" if messages[1:] == [] and messages[0].startswith("--") else f"{what}: "  # an option is not in the file
    return ConfigError(_joined(head, messages), remedy=_remedy(error, origins))


def _joined(head: str, messages: Sequence[str]) -> str:
    return head + messages[0] if len(messages) == 1 else head.rstrip() + "".join(f"\n  - {m}" for m in messages)


def _messages(
    error: ValidationError,
    data: Any,
    root: type[BaseModel],
    lines: Mapping[Path_, int],
    origins: Mapping[str, str],
) -> list[str]:
    """One message a key; the several complaints of a union about one value are joined."""
    by_path: dict[Path_, list[ErrorDetails]] = {}
    for detail in error.errors():
        by_path.setdefault(_real_path(detail["loc"], data, detail["type"]), []).append(detail)
    deepest = [p for p in by_path if not any(other[: len(p)] == p and other != p for other in by_path)]
    return [
        _message(path, details, root, lines, origins)
        for path, details in by_path.items()
        if path in deepest or any(d["type"] in _IN_OUR_WORDS for d in details)
    ]


def _real_path(loc: Path_, data: Any, kind: str) -> Path_:
    """pydantic's location without the names of union members that it mixes in."""
    real: list[str | int] = []
    for part in loc:
        if (isinstance(data, dict) and part in data) or (
            isinstance(data, list | tuple) and isinstance(part, int) and part < len(data)
        ):
            real.append(part)
            data = data[part]  # type: ignore[index]
        elif isinstance(data, dict) and kind == "missing":
            real.append(part)
            break
    return tuple(real)


def _message(
    path: Path_,
    details: Sequence[ErrorDetails],
    root: type[BaseModel],
    lines: Mapping[Path_, int],
    origins: Mapping[str, str],
) -> str:
    dotted = ".".join(map(str, path))
    at = path
    while at and at not in lines:
        at = at[:-1]
    above = (".".join(map(str, path[:depth])) for depth in range(1, len(path) + 1))
    option = next((origins[name] for name in above if origins.get(name, "").startswith("--")), None)
    where = "--set " if option else f"line {lines[at]}: " if at in lines else ""
    if option not in (None, "--set"):
        where, dotted = "", str(option)  # it has one key, and stands for that
    detail = next((d for d in details if d["type"] in _IN_OUR_WORDS), details[0])
    if detail["type"] == "extra_forbidden":
        return f"{where}unknown key {dotted!r}{_nearest(path, root)}"
    if detail["type"] == "missing":
        return f"{where}{dotted!r} is missing"
    if detail["type"] in _IN_OUR_WORDS:
        return f"{where}{dotted + ': ' if dotted else ''}{detail['msg'].removeprefix('Value error, ')}"
    texts = dict.fromkeys(d["msg"].removeprefix("Input should be ").replace("valid tuple", "list") for d in details)
    return f"{where}{dotted}: found {_shown(detail['input'])}, expected {' or '.join(texts)}"


def _shown(value: Any) -> str:
    """A value in one line; a tensor's numbers, say, are cut short."""
    text = " ".join(repr(value).split())
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..., a {type(value).__name__}"


def _nearest(path: Path_, root: type[BaseModel]) -> str:
    *parents, name = path
    fields = _fields(parents, root)
    near = difflib.get_close_matches(str(name), fields, n=1)
    if near:
        return f" (did you mean {near[0]!r}?)"
    for section, info in root.model_fields.items():  # a right key in the wrong place
        model = _model_in(info.annotation)
        if model and "dict" not in str(info.annotation) and name in model.model_fields:
            return f" (it belongs under {section!r})"
    return f" (allowed here: {', '.join(fields)})" if fields else ""


def _fields(parents: Sequence[str | int], root: type[BaseModel]) -> list[str]:
    model: type[BaseModel] | None = root
    annotation: Any = None
    for parent in parents:
        if model is not None and parent in model.model_fields:
            annotation = model.model_fields[str(parent)].annotation
            model = None if typing.get_origin(annotation) is dict else _model_in(annotation)
        else:
            model = _model_in(annotation)
    return list(model.model_fields) if model else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model that an annotation such as ``dict[str, Input]`` or ``LoRAConfig | None`` mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, typing.get_args(annotation))), None)


def _remedy(error: ValidationError, origins: Mapping[str, str]) -> str:
    details = error.errors()
    if any(detail["type"] == "extra_forbidden" for detail in details):
        return "Correct or remove the key; docs/config-reference.md lists all, `cgplan schema` gives editor completion."
    for detail in details:
        if detail["type"] == _CONTRADICTION:
            names = [".".join(map(str, (*detail["loc"], key))) for key in detail["ctx"]["keys"]]
            in_file = [name for name in names if not origins.get(name, "--").startswith("--")]
            if len(in_file) == 1:  # the other one came by an option, which is what is wanted now
                return f"Add --set {in_file[0]}=null, which takes back what {origins[in_file[0]]} says."
    return "Correct the value; docs/config-reference.md says what each key holds."
