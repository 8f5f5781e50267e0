"""Where a capture breaks: functions under ``eager_break_during_capture``, and modules by name."""

from __future__ import annotations

import copy
import difflib
import fnmatch
import functools
import re
import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from cgplan.errors import CgplanError, ConfigError
from cgplan.graphs.footprint import current_look
from cgplan.piecewise.breakable import name_of, recording_capture

P = ParamSpec("P")
R = TypeVar("R")

_NO_FORWARD = nn.Module.forward  # a ModuleList has this one, say
_decorated = False  # whether any function is


def eager_break_during_capture(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function or method an eager piece of whatever breakable capture it is called in.

    Outside of a breakable capture, in a FULL capture, and inside another eager piece, the function runs as it is.
    Code that torch.compile traces, PIECEWISE segments by operators among it, takes it in as it is, too. See
    BreakableCUDAGraphCapture.add_eager for what it may return.

    Raises CgplanError for what cannot be called.
    """
    global _decorated
    if not callable(function):
        raise CgplanError(
            f"eager_break_during_capture was given {function!r:.100}, which cannot be called",
            remedy="Put it on a function or method, without arguments.",
        )
    _decorated = True
    broken = broken_out(function, name_of(function))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():  # what follows could not be traced
            return function(*args, **kwargs)
        if (look := current_look()) is not None:
            look.found.breaks = True
        return broken(*args, **kwargs)

    return call


def any_breaks() -> bool:
    """Whether there is any function under ``eager_break_during_capture``."""
    return _decorated


def broken_out(function: Callable[P, R], name: str, *, is_traced: bool = False) -> Callable[P, R]:
    """The same as ``eager_break_during_capture``, under a name for messages, and unnoticed by a look.

    ``is_traced``: the function is operators of a trace.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        capture = recording_capture()
        if capture is not None:
            return capture.add_named(name, function, args, kwargs, is_traced=is_traced)  # type: ignore[no-any-return]
        if (look := current_look()) is not None:  # it looks at segments; here the host may be needed
            return look.run_aside(function, args, kwargs)  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return call


class _BrokenForward:
    """Stands in for ``forward`` of one module while any handle breaks there.

    The last handle takes it out, unless a user's forward was put over it. Copies and pickles of the module get the
    forward that was there before.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.holders: set[object] = set()
        self._before = vars(module).get("forward")
        self._plain, self._broken = module.forward, broken_out(module.forward, name)
        functools.update_wrapper(self, module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._broken if self.holders else self._plain)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        if self._before is not None:
            return copy.deepcopy(self._before, memo)  # type: ignore[no-any-return]
        copied = copy.deepcopy(self.module, memo)  # in a copy of the module, the copy that is being made
        return MethodType(type(copied).forward, copied)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (_itself, (self._before,)) if self._before is not None else (getattr, (self.module, "forward"))


def _itself(value: Any) -> Any:
    return value


def _release(forwards: Sequence[weakref.ref[_BrokenForward]], holder: object) -> None:
    for reference in forwards:
        if (forward := reference()) is None:
            continue
        forward.holders.discard(holder)
        own, before = vars(forward.module), forward._before
        if not forward.holders and own.get("forward") is forward:
            del own["forward"]
            if before is not None:
                own["forward"] = before


class ModuleBreaks:
    """Modules that are eager pieces until ``remove`` is called.

    Several handles may break at one module, and be removed in any order: it stays a piece until the last one is gone.

    Attributes:
        names: Their dotted names.
        outer: Those of them that have a forward, and are in no other such module: the pieces, if they are called.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.names = tuple(modules)
        called = [n for n, module in modules.items() if getattr(module.forward, "__func__", None) is not _NO_FORWARD]
        self.outer = tuple(n for n in called if not any(n.startswith(f"{other}.") for other in called))
        holder, forwards = object(), []
        for name, module in modules.items():
            forward = vars(module).get("forward")
            if not isinstance(forward, _BrokenForward) or forward.module is not module:
                forward = vars(module)["forward"] = _BrokenForward(module, name)
            forward.holders.add(holder)
            forwards.append(weakref.ref(forward))
        self._release = functools.partial(_release, forwards, holder)  # it holds neither this handle nor the model

    def remove(self) -> None:
        """Give the modules their own forward back, where no other handle breaks; a second call does nothing."""
        self._release()

    def remove_after(self, owner: object) -> None:
        """Also remove them when ``owner`` is garbage."""
        weakref.finalize(owner, self._release).atexit = False


def break_at_modules(model: nn.Module, patterns: Sequence[str]) -> ModuleBreaks:
    """Make submodules eager pieces of whatever breakable capture they are called in.

    The model's code stays as it is: each module gets a ``forward`` of its own until the handle's ``remove``, whether
    the handle is kept or not. Deep copies and pickles of the model have no breaks; its state dict is not touched.

    Args:
        model: Where the modules are.
        patterns: Dotted names in which ``*``, ``?`` and ``[...]`` stand for parts of one component, such as
            ``layers.*.self_attn``. Of a module inside another one that matches, too, the outer one is the piece.

    Raises:
        ConfigError: the model is not an nn.Module, or a pattern matches none of its submodules; nothing is changed.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"breaks at modules need an nn.Module, the model is a {type(model).__name__}",
            remedy="Put eager_break_during_capture on the functions that are to stay eager.",
        )
    patterns = [patterns] if isinstance(patterns, str) else patterns
    named = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in named):
            raise ConfigError(f"no submodule matches {pattern!r}", remedy=_near(pattern, list(named)))
    matching = {name: module for name, module in named.items() if any(_matches(name, p) for p in patterns)}
    first_names = {id(module): name for name, module in reversed(matching.items())}
    return ModuleBreaks({name: module for name, module in matching.items() if first_names[id(module)] == name})


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _near(pattern: str, names: list[str]) -> str:
    """Names like the pattern, those of numbered layers as one."""
    general = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names))
    near = difflib.get_close_matches(pattern, [*general, *names], n=3)
    if not near:
        return f"The model has {', '.join(general[:10]) or 'no submodules'}{', ...' if len(general) > 10 else ''}."
    return f"Did you mean {' or '.join(near)}?"
