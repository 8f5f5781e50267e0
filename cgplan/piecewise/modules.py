"""Breaks at modules by name: each module that matches is an eager piece until the breaks are removed."""

from __future__ import annotations

import copy
import difflib
import fnmatch
import functools
import re
import weakref
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

from torch import nn

from cgplan.errors import ConfigError
from cgplan.piecewise.breaks import broken_out

_NO_FORWARD = nn.Module.forward  # a ModuleList has this one, say


class _BrokenForward:
    """What stands in for ``forward`` of one module while any handle breaks there; transparent once none does.

    It is taken out again with the last handle, unless somebody has put a forward of their own over it by then. A copy
    of the module, and a pickled one, gets the forward that was there before: breaks belong to the original alone.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.holders: set[object] = set()
        self._before = vars(module).get("forward")
        self._plain = module.forward
        self._broken = broken_out(module.forward, name)
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

    def release(self, holder: object) -> None:
        """Break no longer on behalf of ``holder``."""
        self.holders.discard(holder)
        if not self.holders and vars(self.module).get("forward") is self:
            if self._before is None:
                del vars(self.module)["forward"]
            else:
                vars(self.module)["forward"] = self._before


def _itself(value: Any) -> Any:
    return value


def _release(forwards: Sequence[weakref.ref[_BrokenForward]], holder: object) -> None:
    for reference in forwards:
        if (forward := reference()) is not None:
            forward.release(holder)


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
        self._holder = object()
        self._forwards: list[_BrokenForward] = []
        for name, module in modules.items():
            forward = vars(module).get("forward")
            if not isinstance(forward, _BrokenForward) or forward.module is not module:
                forward = vars(module)["forward"] = _BrokenForward(module, name)
            forward.holders.add(self._holder)
            self._forwards.append(forward)

    def remove(self) -> None:
        """Give the modules their own forward back, where no other handle breaks; a second call does nothing."""
        while self._forwards:
            self._forwards.pop().release(self._holder)

    def remove_after(self, owner: object) -> None:
        """Also remove them when ``owner`` is garbage. What is called then holds neither the handle nor the model."""
        references = [weakref.ref(forward) for forward in self._forwards]
        weakref.finalize(owner, _release, references, self._holder).atexit = False


def break_at_modules(model: nn.Module, patterns: Sequence[str]) -> ModuleBreaks:
    """Make submodules eager pieces of whatever breakable capture they are called in.

    The model's code stays as it is: each module gets a ``forward`` of its own until the handle's ``remove``, whether
    the handle is kept or not. Deep copies and pickles of the model have no breaks; its state dict is not touched.

    Args:
        model: Where the modules are.
        patterns: Dotted names in which ``*``, ``?`` and ``[...]`` stand for parts of one component, such as
            ``layers.*.self_attn``. Of a module inside another one that matches, too, the outer one is the piece.

    Raises:
        ConfigError: the model is no nn.Module, or a pattern matches none of its submodules. Nothing is changed then.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"breaks at modules need an nn.Module, the model is a {type(model).__name__}",
            remedy="Put eager_break_during_capture on the functions that are to stay eager.",
        )
    named = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in named):
            raise ConfigError(f"no submodule matches {pattern!r}", remedy=_near(pattern, list(named)))
    found = {id(module): name for name, module in reversed(named.items()) if _matches(name, *patterns)}
    return ModuleBreaks({name: named[name] for name in reversed(found.values())})


def _matches(name: str, *patterns: str) -> bool:
    parts, split = name.split("."), [pattern.split(".") for pattern in patterns]
    return any(len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted)) for wanted in split)


def _near(pattern: str, names: list[str]) -> str:
    """Names like the pattern, those of numbered layers as one."""
    general = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names))
    near = difflib.get_close_matches(pattern, [*general, *names], n=3)
    if not near:
        return f"The model has {', '.join(general[:10]) or 'no submodules'}{', ...' if len(general) > 10 else ''}."
    return f"Did you mean {' or '.join(near)}?"
