"""From ``model.target`` to a model; errors name the user's line."""

import importlib
import importlib.util
import inspect
import itertools
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from cgplan.errors import CgplanError, ModelError, did_you_mean

_load_numbers = itertools.count()


# of transformers: Mamba's, and others' since 5.24 and before
CACHE_ARGUMENTS = ("cache_params", "cache", "past_key_values")


def cache_argument(model: object) -> str | None:
    for kind in type(model).__mro__:
        forward = vars(kind).get("forward")
        arguments = inspect.signature(forward).parameters if callable(forward) else ()
        for name in CACHE_ARGUMENTS:
            if name in arguments:
                return name
    return None


def beyond_positions(model: Any, max_cache_len: int) -> str:
    """What happens to texts that are longer than the model's positions; empty where none are."""
    text = model.config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None) or max_cache_len
    if longest >= max_cache_len:
        return ""
    return (
        f"max_cache_len is {max_cache_len}, and max_position_embeddings of the model is "
        f"{longest}: a longer text fails if positions are learned, else it is beyond training"
    )


class ForwardArgument(NamedTuple):
    name: str
    required: bool
    annotation: str  # "": none


def refuse_no_model(found: object) -> None:
    if not callable(found) or isinstance(found, type):
        remedy = "Pass a module or a function; model.target in a configuration builds one."
        if isinstance(found, type):
            remedy = f"Pass an instance: {found.__name__}(...)."
        raise ModelError(f"the model is {found!r:.80}", remedy=remedy)


def load_model(
    target: str, kwargs: Mapping[str, Any], *, device: torch.device, base_dir: Path | None = None
) -> Callable[..., Any]:
    """The model that ``target`` returns for ``kwargs``, on the device; modules in eval mode.

    The file's folder, else the current one, stays on ``sys.path``.

    Args:
        target: ``package.module:callable``, ``path/to/file.py:callable``, or ``transformers``.
        base_dir: Where relative paths start; then the current folder.

    Raises:
        ModelError: no such target, it fails, or returns no callable.
    """
    model = call_target(
        target,
        kwargs,
        device=device,
        base_dir=base_dir,
    )
    if isinstance(model, nn.Module):
        with _blaming(f"moving the model of {target} to {device}"):
            return model.to(device).eval()
    if callable(model):
        return model  # type: ignore[no-any-return]
    raise ModelError(
        f"{target} returned {type(model).__name__}, which is not callable",
        remedy="Return an nn.Module or a function that takes the inputs and returns tensors.",
    )


def call_target(
    target: str,
    kwargs: Mapping[str, Any],
    *,
    device: torch.device,
    base_dir: Path | None = None,
    to_fit: str = "Change model.kwargs.",
) -> Any:
    """What a target returns; else as ``load_model``."""
    kwargs = dict(kwargs)
    if target == "transformers":
        target = "cgplan.models.hf:build"
        config_file = kwargs.get("config_file")
        if config_file is not None:
            kwargs["config_file"] = str(find_file(str(config_file), base_dir))
    source, _, attribute = target.rpartition(":")
    if not source or not attribute:
        raise ModelError(
            f"model target {target!r} is malformed",
            remedy="Write package.module:callable, path/to/file.py:callable, or transformers.",
        )
    path = find_file(source, base_dir) if source.endswith(".py") else None
    with _importable(Path.cwd() if path is None else path.parent):
        with _blaming(f"importing {source}"):
            found = _import_module(source) if path is None else _import_file(path)
        remedy = "Name a function or class of it."
        for name in attribute.split("."):
            if not hasattr(found, name):
                hint = did_you_mean(name, (n for n in dir(found) if not n.startswith("_")))
                raise ModelError(f"{source} has no `{name}`", remedy=hint + remedy)
            found = getattr(found, name)
        if isinstance(found, nn.Module) and not kwargs:
            return found
        if not callable(found):
            raise ModelError(
                f"{target} is {type(found).__name__}, which is not callable", remedy=remedy
            )
        with suppress(ValueError):
            signature = inspect.signature(found)
            try:
                signature.bind(**kwargs)
            except TypeError as error:
                message = f"arguments do not fit {target}: {error}"
                hint = ""
                for name in kwargs.keys() - signature.parameters:
                    hint += did_you_mean(name, signature.parameters)
                remedy = f"{hint}It takes {signature}. {to_fit}"
                if not isinstance(found, type) and not inspect.isroutine(found):
                    message = f"{target} is of class {type(found).__name__}, no model"
                    remedy = "Name a function that returns one."
                raise ModelError(message, remedy=remedy) from error
        with _blaming(f"calling {target}"), torch.device(device):
            return found(**kwargs)


def forward_signature(model: Callable[..., Any]) -> list[ForwardArgument]:
    """Without ``*args``, ``**kwargs`` and flags that have a default."""
    function = model.forward if isinstance(model, nn.Module) else model
    found = []
    for name, given in inspect.signature(function).parameters.items():
        if given.kind in (given.VAR_POSITIONAL, given.VAR_KEYWORD):
            continue
        annotation = ""
        if given.annotation is not given.empty:
            annotation = inspect.formatannotation(given.annotation).strip("'")
        required = given.default is given.empty
        is_flag = "bool" in annotation and "Tensor" not in annotation
        is_flag |= isinstance(given.default, bool)
        if is_flag and not required:
            continue
        found.append(
            ForwardArgument(
                name,
                required,
                annotation,
            )
        )
    return found


def find_file(name: str, base_dir: Path | None) -> Path:
    """An absolute path, in ``base_dir`` or the current folder. Raises ModelError."""
    folders = (base_dir or Path.cwd(), Path.cwd())
    files = dict.fromkeys(folder / Path(name).expanduser() for folder in folders)
    for file in files:
        if file.is_file():
            return file.resolve()
    if Path(name).suffix != ".py" and any(file.is_dir() for file in files):
        raise ModelError(f"{name} is a folder", remedy=f"Give {Path(name) / 'config.json'}.")
    looked = " and ".join(map(str, files))
    beside = [other.name for file in files for other in file.parent.glob(f"*{file.suffix}")]
    where = "Paths start from the configuration file's folder. " if base_dir else ""
    raise ModelError(
        f"no file {name}: looked for {looked}",
        remedy=f"{did_you_mean(Path(name).name, beside)}{where}".strip(),
    )


def parse_dtype(name: object) -> torch.dtype:
    """A floating-point one, such as bfloat16. Raises ModelError."""
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ModelError(
            f"model.kwargs.dtype: unknown dtype {name!r}",
            remedy="Choose float32, bfloat16 or float16.",
        )
    return dtype


_neighbours: dict[str, Path] = {}  # folders of targets' modules


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """``folder`` is first on ``sys.path``, then last; its modules replace other targets'."""
    importlib.invalidate_caches()
    for name, home in list(_neighbours.items()):
        if home != folder and ((folder / f"{name}.py").is_file() or (folder / name).is_dir()):
            for loaded in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
                del sys.modules[loaded]
    before = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        for name in set(sys.modules) - before:
            origin = getattr(sys.modules[name], "__file__", None)
            if origin in (str(folder / f"{name}.py"), str(folder / name / "__init__.py")):
                _neighbours[name] = folder


def _import_module(source: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{source}.".startswith(f"{error.name}."):
            raise  # the module's own import is missing
        raise ModelError(
            f"no module named {error.name!r} (model target {source})",
            remedy="Install it, run from its folder, or name path/to/file.py:callable.",
        ) from error


def _import_file(path: Path) -> ModuleType:
    name = f"cgplan_target_{next(_load_numbers)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _blaming(doing: str) -> Iterator[None]:
    """Errors become ModelErrors with the innermost line outside of packages."""
    try:
        yield
    except CgplanError:
        raise
    except (Exception, SystemExit) as error:
        installed = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))
        whole = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in whole if frame.filename != __file__]
        own = [frame for frame in frames if not frame.filename.startswith((*installed, "<"))]
        last = (own or frames)[-1:]
        where = f"{last[0].filename}:{last[0].lineno}" if last else "a builtin"
        if isinstance(error, SyntaxError) and error.filename:
            where = f"{error.filename}:{error.lineno}"
        raise ModelError(
            f"{doing} failed: {type(error).__name__}: {str(error).strip() or 'no message'}\n  at "
            f"{where}",
            remedy="Correct the model, model.kwargs or the device.",
        ) from error
