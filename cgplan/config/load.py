"""From a YAML file to a Config, with the line of each key."""

import gzip
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from cgplan.config.schema import Config, Path_, Places, explain
from cgplan.errors import CgplanError, ConfigError, ConfigFileError, OutputPathError, did_you_mean
from cgplan.units import format_bytes, listed

MOST_VALUES = 10_000  # of a document; each alias counts
MOST_BYTES = 1 << 20


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # Python 3.11: RuntimeError for a loop of links
        remedy = "Give the path of a file, in a folder that you may write to."
        problem = error.strerror if isinstance(error, OSError) else str(error)
        raise OutputPathError(f"cannot write {path}: {problem}", remedy=remedy) from error


def read_text(
    path: str | Path,
    error: type[CgplanError],
    remedy: str,
    most: int | None = None,
) -> str:
    """UTF-8 without a byte order mark; without ``most`` also packed by gzip. Raises ``error``, also
    if it is empty or has more than ``most`` bytes.
    """
    path = Path(path)
    try:
        if path.is_char_device():
            raise error(f"{path} is a device, not a file", remedy=remedy)
        with path.open("rb") as file:
            limit = -1 if most is None else most + 1
            data = file.read(limit)
        if most is not None and len(data) > most:
            raise error(f"{path} holds more than {format_bytes(most)}", remedy=remedy)
        if most is None and data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        if not data.strip():
            raise error(f"{path} is empty", remedy=remedy)
    except FileNotFoundError:
        beside = path.parent.glob("*")
        hint = did_you_mean(path.name, [other.name for other in beside])
        raise error(f"no such file: {path}", remedy=hint + remedy) from None
    except (OSError, EOFError, zlib.error) as failure:
        problem = getattr(failure, "strerror", None) or failure
        raise error(f"cannot read {path}: {problem}", remedy=remedy) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        line = data.count(b"\n", 0, failure.start) + 1
        raise error(
            f"{path}:{line}: not UTF-8 text",
            remedy=f"Save it as UTF-8; of a packed file give /dev/stdin, after `zstdcat {path} |`. "
            f"{remedy}",
        ) from None


class Override(NamedTuple):
    """``dotted.key=value``, the value in YAML, and the option that gave it."""

    text: str
    option: str = "--set"


@dataclass(frozen=True)
class LoadedConfig:
    config: Config
    # dotted path of each given value -> ``line 12``, ``--set`` or another option
    origins: Mapping[str, str]
    base_dir: Path  # against which file targets are resolved

    def origin(self, path: str) -> str:
        while path not in self.origins and "." in path:
            path = path.rpartition(".")[0]
        return self.origins.get(path, "default")

    def model_for(self, purpose: str) -> tuple[str, dict[str, Any]]:
        """Raises ConfigError, which begins with ``purpose``."""
        model = self.config.model
        if model is None or model.target is None:
            raise ConfigError(
                f"{purpose}: there is no `model` with a target",
                remedy="Add model.target, such as my_model.py:build, or give `--set "
                "model.target=my_model.py:build`.",
            )
        return model.target, model.kwargs


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a YAML file; ``overrides`` (``dotted.key=value``, the value in YAML) win over it.

    Raises ConfigFileError for an unreadable file, ConfigError for wrong keys and values.
    """
    return read_config(path, overrides).config


def read_config(
    path: str | Path,
    overrides: Iterable[str | Override] = (),
) -> LoadedConfig:
    path = Path(path)
    remedy = (
        "Give a YAML file, in which {} means all defaults; `cgplan init my_model.py:build > "
        "my.yaml` writes one."
    )
    if path.suffix.startswith(".py"):
        raise ConfigFileError(f"{path} is a model, not its configuration", remedy=remedy)
    text = read_text(path, ConfigFileError, remedy, MOST_BYTES)
    data, places = _parse(text, path)
    if "kind" in data:  # a report, a plan
        raise ConfigFileError(
            f"{path} is a saved {data['kind']}",
            remedy=f"`cgplan inspect {path}` shows it. {remedy}",
        )
    known = Config.model_fields
    if len(data) > 1 and not any(did_you_mean(str(key), known, cutoff=0.8) for key in data):
        raise ConfigFileError(
            f"{path} is no configuration: its keys are {listed([*data])}, and those of a "
            f"configuration {', '.join(known)}",
            remedy=remedy,
        )
    base_dir = path.resolve().parent
    return loaded_config(
        data,
        str(path),
        overrides,
        places,
        base_dir,
    )


def loaded_config(
    data: dict[str, Any],
    source: str,
    overrides: Iterable[str | Override],
    places: Places,
    base_dir: Path = Path(),
) -> LoadedConfig:
    """Overrides change ``data``. Raises ConfigError, which names ``source``."""
    found = dict(places)
    for given in overrides:
        override = Override(given) if isinstance(given, str) else given
        key = _override(data, override)
        found = {path: at for path, at in found.items() if path[: len(key)] != key}
        for depth in range(1, len(key)):
            if found.setdefault(key[:depth], override.option).startswith("--"):
                found[key[:depth]] = override.option  # the last one is wrong beside others
        found[key] = override.option
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        others = {path: at for path, at in found.items() if at != source}
        raise explain(
            error,
            data,
            source,
            Config,
            others,
        ) from None
    origins: dict[str, str] = {}
    for path, at in found.items():
        if set(map(type, path)) == {str}:  # a list is one value
            origins.pop(".".join(map(str, path[:-1])), None)
            origins[".".join(map(str, path))] = at
    return LoadedConfig(config, origins, base_dir)


def validate_config(data: Any) -> Config:
    return loaded_config(data, "configuration", (), {}).config


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.places: dict[Path_, str] = {}

    def construct_document(self, node: yaml.Node) -> Any:
        for number, _ in enumerate(_places(node, ())):
            if number == MOST_VALUES:
                raise _refusal(f"more than {MOST_VALUES:,} values", node.start_mark)
        data = super().construct_document(node)
        self.places = dict(_places(node, ()))
        return data

    def construct_object(
        self,
        node: yaml.Node,
        deep: bool = False,
    ) -> Any:
        kind = node.tag.rpartition(":")[2]
        try:
            return super().construct_object(node, deep)
        except yaml.YAMLError:
            raise
        # PyYAML raises IndexError for `!!int ''`, say
        except Exception as error:
            problem = f"{str(node.value)[:100]!r} is no {kind}: {error}"
            raise _refusal(problem, node.start_mark) from None

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name = str(key.value)
            if name in lines:
                problem = f"the key {name!r} is given twice (first in line {lines[name]})"
                raise _refusal(problem, key.start_mark)
            lines[name] = key.start_mark.line + 1
        return node


def _refusal(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _problem(error: Exception) -> object:
    return getattr(error, "problem", None) or error


def read_yaml(
    text: str,
    option: str,
    remedy: str,
) -> Any:
    """Raises ConfigError, which begins with ``option``."""
    try:
        return yaml.load(text, Loader=_Loader)
    except Exception as error:
        raise ConfigError(f"{option} is not YAML: {_problem(error)}", remedy=remedy) from None


def _parse(text: str, path: Path) -> tuple[dict[str, Any], Places]:
    try:
        loader = _Loader(text)
        data = loader.get_single_data()
    except Exception as error:  # of PyYAML's scanner: OverflowError for "\\U99999999"
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigFileError(
            f"{path}{where}: not valid YAML: {_problem(error)}",
            remedy="Correct that line: its indentation, quotes, or a key given twice.",
        ) from None
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise ConfigFileError(
            f"{path}: the file holds a {type(data).__name__}, not a mapping",
            remedy="Start with keys such as `model:`; `cgplan init` writes an example.",
        )
    return data, loader.places


def _places(
    node: yaml.Node,
    path: Path_,
) -> Iterator[tuple[Path_, str]]:
    """Merged keys come before a node's own; the last line counts."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, key.value)
            line = key.start_mark.line + 1
            yield inner, f"line {line}"
            yield from _places(value, inner)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            inner = (*path, index)
            line = item.start_mark.line + 1
            yield inner, f"line {line}"
            yield from _places(item, inner)


def _override(data: dict[str, Any], override: Override) -> Path_:
    text, option = override
    dotted, equals, value = text.partition("=")
    dotted = dotted.strip()
    parts = dotted.split(".")
    if not equals or "" in parts:
        raise ConfigError(
            f"--set {text[:80]!r} is not of the form key=value",
            remedy="Write a dotted key, as in --set compilation.cudagraph_mode=FULL.",
        )
    where = f"--set {dotted}" if option == "--set" else option
    parsed = read_yaml(value, f"{where}: the value", "Quote the value.")
    *parents, last = parts
    for parent in parents:
        below = data.get(parent)
        if not isinstance(below, dict | None):
            problem = f"{where}: {parent} is not a section"
            raise ConfigError(problem, remedy="Check the dotted key.")
        # a copy: aliases share mappings
        data[parent] = dict(below or {})
        data = data[parent]
    data[last] = parsed
    return tuple(parts)
