"""From a YAML file to a Config: parsing, overrides, and messages that point at the line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from cgplan.config.messages import Path_, explain
from cgplan.config.schema import Config
from cgplan.errors import CgplanError, ConfigError, ConfigFileError

MOST_NAMED = 3  # files beside a missing one
_MERGE = "tag:yaml.org,2002:merge"


def read_text(path: str | Path, error: type[CgplanError], remedy: str) -> str:
    """Text of a UTF-8 file, without a byte order mark.

    Args:
        path: The file.
        error: Raised, with the path, if the file is missing, a folder, not readable, or not UTF-8 text.
        remedy: The file to give instead.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise error(f"no such file: {path}", remedy=f"{beside(path)}{remedy}") from None
    except OSError as failure:
        raise error(f"cannot read {path}: {failure.strerror or failure}", remedy=remedy) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        line = data.count(b"\n", 0, failure.start) + 1
        raise error(f"{path}:{line}: not UTF-8 text", remedy=f"Unpack it, or save it as UTF-8. {remedy}") from None


def beside(path: Path) -> str:
    """For a remedy: files that a missing one may have been meant to be, the nearest name in its folder, else those
    with its suffix.
    """
    if not path.parent.is_dir():
        return f"There is no folder {path.parent}. "
    names = sorted(p.name for p in path.parent.iterdir() if p.is_file())
    if near := difflib.get_close_matches(path.name, names, n=1, cutoff=0.7):
        return f"Did you mean {path.parent / near[0]}? "
    alike = [name for name in names if path.suffix and name.endswith(path.suffix)]
    more = f" and {len(alike) - MOST_NAMED} more" if len(alike) > MOST_NAMED else ""
    return f"That folder has {', '.join(alike[:MOST_NAMED])}{more}. " if alike else ""


class Override(NamedTuple):
    """A value that wins over the file: ``dotted.key=value``, the value in YAML, and the option that gave it."""

    text: str
    option: str = "--set"


@dataclass(frozen=True)
class LoadedConfig:
    """A Config, and where each of its values came from.

    Attributes:
        config: The validated configuration.
        origins: Dotted path of each given value -> ``file.yaml:12``, ``--set`` or another option; other values are
            defaults.
        base_dir: Folder against which file targets are resolved.
    """

    config: Config
    origins: Mapping[str, str]
    base_dir: Path

    def origin(self, path: str) -> str:
        """Where the value at a dotted path came from; values inside a given section count as given with it."""
        while path not in self.origins and "." in path:
            path = path.rpartition(".")[0]
        return self.origins.get(path, "default")


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a configuration file.

    Args:
        path: YAML file.
        overrides: ``dotted.key=value`` pairs, the value in YAML; they win over the file.

    Raises:
        ConfigFileError: the file is missing, unreadable or not YAML.
        ConfigError: an unknown key, a wrong type, or values that contradict each other.
    """
    return read_config(path, overrides).config


def read_config(path: str | Path, overrides: Iterable[str | Override] = ()) -> LoadedConfig:
    """As load_config, and keeps the origin of each value; messages name the option of an Override."""
    path = Path(path)
    remedy = "Give a readable YAML file; `cgplan init` writes a starting configuration."
    data, lines = _parse(read_text(path, ConfigFileError, remedy), path)
    named = {k: line for k, line in lines.items() if all(isinstance(part, str) for part in k)}  # a list is one value
    origins = {".".join(map(str, key)): f"{path.name}:{line}" for key, line in named.items()}
    for given in overrides:
        override = Override(given) if isinstance(given, str) else given
        dotted = _override(data, override)
        for stale in [key for key in origins if key == dotted or key.startswith(f"{dotted}.")]:
            del origins[stale]
        origins[dotted] = override.option
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise explain(error, data, str(path), Config, lines, origins) from None
    leaves = {k: v for k, v in origins.items() if not any(other.startswith(f"{k}.") for other in origins)}
    return LoadedConfig(config, leaves, path.resolve().parent)


def validate_config(data: Mapping[str, Any]) -> Config:
    """Config from a mapping, with cgplan's error messages. Raises ConfigError."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise explain(error, data, "configuration", Config) from None


class _Loader(yaml.SafeLoader):
    """A SafeLoader that names the line of a scalar that does not fit its tag, such as ``!!int abc``."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception:  # PyYAML's constructors raise anything: IndexError for `!!int ''`, say
            problem = f"{str(node.value)[:40]!r} is not a valid {node.tag.rpartition(':')[2]}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None


def read_yaml(text: str, what: str, remedy: str) -> Any:
    """The value of an option that is written in YAML. Raises ConfigError, which begins with ``what``."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise ConfigError(f"{what} is nested too deeply", remedy=remedy) from None
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)  # the rest of it shows a line that nobody wrote
        raise ConfigError(f"{what} is not YAML: {problem}", remedy=remedy) from None


def _parse(text: str, path: Path) -> tuple[dict[str, Any], dict[Path_, int]]:
    """The document and the line (from 1) of each key; one pass over the YAML nodes gives both."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines = dict(_lines(node, (), path)) if node is not None else {}
        data = loader.construct_document(node) if node is not None else {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigFileError(
            f"{path}{where}: not valid YAML: {error.problem or error.context}",
            remedy="Check the indentation and the quotes at that line and column.",
        ) from None
    except RecursionError:
        raise ConfigFileError(f"{path}: nested too deeply", remedy="Flatten the file.") from None
    except yaml.YAMLError as error:
        raise ConfigFileError(f"{path}: not valid YAML: {error}", remedy="Give a UTF-8 YAML file.") from None
    if not isinstance(data, dict):
        raise ConfigFileError(
            f"{path}: the file holds a {type(data).__name__}, not a mapping",
            remedy="Start with keys such as `model:` and `compilation:`; `cgplan init` writes an example.",
        )
    return data, lines


def _lines(
    node: yaml.Node, path: Path_, file: Path, open_: frozenset[int] = frozenset()
) -> Iterator[tuple[Path_, int]]:
    if id(node) in open_:  # an alias that contains itself
        raise ConfigFileError(f"{file}:{node.start_mark.line + 1}: an alias refers to itself", remedy="Remove it.")
    open_ |= {id(node)}
    if isinstance(node, yaml.MappingNode):
        merged = [value for key, value in node.value if key.tag == _MERGE]
        nodes = [item for v in merged for item in (v.value if isinstance(v, yaml.SequenceNode) else [v])]
        for below in reversed(nodes):  # the strongest is given first; of values that stand twice the last line counts
            yield from _lines(below, path, file, open_)
        seen: dict[object, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigFileError(
                    f"{file}:{line}:{key.start_mark.column + 1}: a {key.id} cannot be a key", remedy="Use a word."
                )
            if key.tag == _MERGE:
                continue
            if key.value in seen:
                raise ConfigFileError(
                    f"{file}:{line}: the key {key.value!r} stands twice (first in line {seen[key.value]})",
                    remedy="Keep one of them.",
                )
            seen[key.value] = line
            yield (*path, key.value), line
            yield from _lines(value, (*path, key.value), file, open_)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, index), item.start_mark.line + 1
            yield from _lines(item, (*path, index), file, open_)


def _override(data: dict[str, Any], override: Override) -> str:
    """Apply one override to the parsed document; returns the dotted key."""
    text, option = override
    dotted, equals, value = text.partition("=")
    dotted = dotted.strip()
    where = f"--set {dotted}" if option == "--set" else option
    if not equals or not all(dotted.split(".")):
        raise ConfigError(
            f"--set {text!r} is not of the form key=value",
            remedy="Write a dotted key, as in --set compilation.cudagraph_mode=FULL.",
        )
    parsed = read_yaml(value, f"{where}: the value", "Quote the value.")
    *parents, last = dotted.split(".")
    at = data
    for parent in parents:
        below = {} if at.get(parent) is None else at[parent]
        if not isinstance(below, dict):
            raise ConfigError(f"{where}: {parent} is not a section", remedy="Check the dotted key.")
        below = at[parent] = dict(below)  # a copy: a YAML alias shares one mapping between several keys
        at = below
    at[last] = parsed
    return dotted
