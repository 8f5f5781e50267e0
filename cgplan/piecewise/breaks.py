"""Where a capture breaks: functions under ``eager_break_during_capture``, modules by name, and operators by name.

Note [Breaks at operators]
    A dispatch mode sees the operators of a forward while segments record. It stands on the backend's own modes, so it
    steps aside where code outside of operators breaks the capture; inside the call of an operator torch has taken it
    off already. A composite operator (``scaled_dot_product_attention``) would reach no dispatch mode, only the kernels
    that it chose; below autograd it comes whole. So gradients cannot be computed in such a forward: torch raises an
    error there.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from cgplan.backends.host_sync import Args, Kwargs, as_its_caller, is_composite, names_of
from cgplan.errors import ConfigError, did_you_mean
from cgplan.graphs.footprint import current_look
from cgplan.piecewise.breakable import name_of, recording_capture
from cgplan.units import listed

P = ParamSpec("P")
R = TypeVar("R")

_NO_FORWARD = nn.Module.forward  # a ModuleList has this one, say
_decorated = False  # whether any function is


def eager_break_during_capture(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function or method an eager piece of the breakable capture that it is called in.

    Outside of a breakable capture, in a FULL capture, inside another eager piece, and where torch.compile traces it
    (PIECEWISE by operators does), the function runs as it is. See BreakableCUDAGraphCapture.add_eager for what it may
    return.
    """
    global _decorated
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
            with _operator_breaks_aside():
                return capture.add_named(name, function, args, kwargs, is_traced=is_traced)  # type: ignore[no-any-return]
        if (look := current_look()) is not None:  # it looks at segments; here the host may be needed
            return look.run_aside(function, args, kwargs)  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return call


class OperatorBreaks(TorchDispatchMode):
    """Operators that are eager pieces of the breakable captures of ``forward``, see Note [Breaks at operators].

    Args:
        names: ``namespace::name`` or ``namespace::name.overload``.
        model: What ``forward`` runs.
        device: The kind of device whose autocast counts.

    Attributes:
        numbers: Names of those that were called with numbers during captures: replays pass the same ones.
    """

    supports_higher_order_operators = True

    def __init__(self, names: Collection[str], model: Callable[..., Any], device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers: dict[str, None] = {}
        self._names, self._model, self._device = frozenset(names), model, device

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled parts of the model stay compiled."""
        return True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model, broken at the operators where a breakable capture or a look is under way."""
        if recording_capture() is None and current_look() is None:
            return self._model(*args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            if recording_capture() is None:  # a look knows the operators by itself
                return self._model(*args, **kwargs)
            with self:
                return self._model(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        """Break the capture, or run the operator in the segment."""
        kwargs, capture = dict(kwargs or {}), recording_capture()
        if capture is None or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if self._names & names_of(func):
            name, leaves = func._schema.name, tree_leaves((args, kwargs))
            if any(isinstance(leaf, int | float | complex) and not isinstance(leaf, bool) for leaf in leaves):
                self.numbers[name] = None
            is_traced = torch.Tag.inplace_view not in func.tags  # then tensor objects stay as they are
            return capture.add_named(name, as_its_caller(func, func, self._device), args, kwargs, is_traced=is_traced)
        if is_composite(func, self._device.upper()):
            with self:
                return as_its_caller(func, func.decompose, self._device)(*args, **kwargs)
        return func(*args, **kwargs)


@contextmanager
def _operator_breaks_aside() -> Iterator[None]:
    mode = _get_current_dispatch_mode()
    if not isinstance(mode, OperatorBreaks):
        yield
        return
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        mode.__enter__()  # type: ignore[no-untyped-call]


class _BrokenForward:
    """Stands in for ``forward`` of one module; it breaks captures while its handle lives and is not removed.

    Copies and pickles of the module get the forward that was there before.
    """

    def __init__(self, module: nn.Module, name: str, handle: ModuleBreaks) -> None:
        self.handle = weakref.ref(handle)
        self.before = vars(module).get("forward")
        self._plain, self._broken = module.forward, broken_out(module.forward, name)
        functools.update_wrapper(self, module.forward, updated=())

    @property
    def is_on(self) -> bool:
        handle = self.handle()
        return handle is not None and not handle.is_removed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._broken if self.is_on else self._plain)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._plain, memo)  # a bound method gets the copy of its module

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (self._plain,)


class ModuleBreaks:
    """Modules that are eager pieces until ``remove`` is called or this handle is garbage.

    Several handles may break at one module and be removed in any order: it stays a piece until the last one is gone.

    Attributes:
        names, modules: Their dotted names, and the modules.
        outer: Those of them that have a forward, and are in no other such module: the pieces, if they are called.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.names, self.is_removed, self.modules = tuple(modules), False, list(modules.values())
        called = [n for n, module in modules.items() if getattr(module.forward, "__func__", None) is not _NO_FORWARD]
        self.outer = tuple(n for n in called if not any(n.startswith(f"{other}.") for other in called))
        for name, module in modules.items():
            vars(module)["forward"] = _BrokenForward(module, name, self)

    def remove(self) -> None:
        """Give the modules their own forward back, where no other handle breaks; a second call does nothing."""
        self.is_removed = True
        for own in map(vars, self.modules):
            while isinstance(forward := own.get("forward"), _BrokenForward) and not forward.is_on:
                del own["forward"]
                if forward.before is not None:
                    own["forward"] = forward.before


def break_at_modules(model: nn.Module, patterns: Sequence[str]) -> ModuleBreaks:
    """Make submodules eager pieces of the breakable capture that they are called in, as long as the handle lives.

    The model's code and state dict stay as they are: each module gets a ``forward`` of its own. Deep copies and pickles
    of the model have no breaks.

    Args:
        model: Where the modules are.
        patterns: Dotted names in which ``*``, ``?`` and ``[...]`` stand for parts of one component, such as
            ``layers.*.self_attn``. Of a module inside another one that matches, too, the outer one is the piece.

    Raises:
        ConfigError: a pattern matches no submodule; nothing is changed.
    """
    named = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    matching: dict[str, nn.Module] = {}
    for pattern in patterns:
        wanted = pattern.split(".")
        parts = {name: name.split(".") for name in named}
        found = [n for n, p in parts.items() if len(p) == len(wanted) and all(map(fnmatch.fnmatchcase, p, wanted))]
        if not found:
            raise ConfigError(f"no submodule matches {pattern!r}", remedy=_near(pattern, list(named)))
        matching |= {name: named[name] for name in found}
    ordered = {name: module for name, module in named.items() if name in matching}
    first_names = {id(module): name for name, module in reversed(ordered.items())}
    return ModuleBreaks({name: module for name, module in ordered.items() if first_names[id(module)] == name})


def _near(pattern: str, names: list[str]) -> str:
    """Names like the pattern, those of numbered layers as one."""
    general = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?![^.])", "*", name) for name in names))
    hint = did_you_mean(pattern, [*general, *names], "Did you mean {}?", 3)
    return hint or f"The model has {listed(general, 10) or 'no submodules'}."
