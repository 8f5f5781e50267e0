"""Where a capture breaks: at functions, modules and operators.

Note [Breaks at operators]
    A dispatch mode sees a segment's operators. It stands above the backend's modes, so it steps
    aside where other code breaks the capture. Composite operators reach it below autograd only:
    torch raises an error for gradients.
"""

import fnmatch
import functools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from cgplan.backends.host_sync import (
    Args,
    Function,
    Kwargs,
    OperatorMode,
    as_its_caller,
    operator_of,
)
from cgplan.backends.replacing import replaced
from cgplan.errors import ConfigError, did_you_mean
from cgplan.graphs.footprint import current_look
from cgplan.piecewise.breakable import name_of, recording_capture
from cgplan.units import listed

P = ParamSpec("P")
R = TypeVar("R")

_NO_FORWARD = nn.Module.forward
_decorated = False


def eager_break_during_capture(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function or method an eager piece of the breakable capture that calls it;
    BreakableCUDAGraphCapture.add_eager says what it may return.

    In FULL captures, other eager pieces and traces it runs as it is.
    """
    global _decorated
    _decorated = True
    return as_eager_piece(function, name_of(function))


def any_breaks() -> bool:
    return _decorated


def as_eager_piece(
    function: Callable[P, R],
    name: str,
    *,
    is_traced: bool = False,
) -> Callable[P, R]:

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        capture = recording_capture()
        if capture is not None:
            with _operator_breaks_aside():
                return capture.add_named(  # type: ignore[no-any-return]
                    name,
                    function,
                    args,
                    kwargs,
                    is_traced=is_traced,
                )
        look = current_look()
        if look is not None:
            return look.run_unrecorded(function, args, kwargs)  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return call


class Breaks(OperatorMode):
    """Modules and operators that are eager pieces; for operators see Note [Breaks at operators].

    Args:
        patterns: Dotted names of submodules; ``*``, ``?`` and ``[...]`` stand for parts of one
            component. The outermost match is the piece.
        names: ``namespace::name`` or ``namespace::name.overload``.

    Attributes:
        outer: The outermost modules with a forward.
        numbers: Operators that captures called with numbers, which replays repeat.

    Raises:
        ConfigError: ``model`` is no module, or a pattern matches none.
    """

    def __init__(
        self,
        model: Function,
        patterns: Sequence[str],
        names: Collection[str],
        device: str,
    ) -> None:
        super().__init__(device)
        self.modules = _matching(model, patterns) if patterns else {}
        self.numbers: dict[str, None] = {}
        self._names = frozenset(names)
        called = [
            name
            for name, module in self.modules.items()
            if getattr(module.forward, "__func__", None) is not _NO_FORWARD
        ]
        heads = tuple(f"{name}." for name in called)
        self.outer = [name for name in called if not name.startswith(heads)]

    def forward(self, model: Function, *args: Any, **kwargs: Any) -> Any:
        is_recording = recording_capture() is not None
        if not is_recording and current_look() is None:
            return model(*args, **kwargs)
        with ExitStack() as stack:
            for name, module in self.modules.items():
                piece = as_eager_piece(module.forward, name)
                stack.enter_context(replaced(module, forward=piece))
            if self._names:
                stack.enter_context(torch._C._AutoDispatchBelowAutograd())
                if is_recording:
                    stack.enter_context(self)
            return model(*args, **kwargs)

    def see(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        capture = recording_capture()
        if capture is None or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if self._names.isdisjoint(operator_of(func).names):
            return self.run(func, args, kwargs)
        name = func._schema.name
        for leaf in tree_leaves((args, kwargs)):
            if type(leaf) in (int, float, complex):
                self.numbers[name] = None
        run = as_its_caller(func, func, self.device)
        is_traced = torch.Tag.inplace_view not in func.tags
        return capture.add_named(name, run, args, kwargs, is_traced=is_traced)


@contextmanager
def _operator_breaks_aside() -> Iterator[None]:
    mode = _get_current_dispatch_mode()
    if not isinstance(mode, Breaks):
        yield
        return
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        mode.__enter__()  # type: ignore[no-untyped-call]


def _matching(model: Function, patterns: Sequence[str]) -> dict[str, nn.Module]:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "compilation.splitting_modules needs an nn.Module",
            remedy="Put eager_break_during_capture on functions.",
        )
    named = dict(model.named_modules(remove_duplicate=False))
    del named[""]
    matching = set[str]()
    for pattern in patterns:
        wanted = pattern.split(".")
        found = []
        for name in named:
            parts = name.split(".")
            fits = all(map(fnmatch.fnmatchcase, parts, wanted))
            if fits and len(parts) == len(wanted):
                found.append(name)
        if not found:
            numbered = [re.sub(r"(?<=\.)\d+(?![^.])", "*", name) for name in named]
            layers = list(dict.fromkeys(numbered))  # as one
            hint = did_you_mean(pattern, [*layers, *named], "Did you mean {}?", 3)
            has = f"The model has {listed(layers, 10) or 'no submodules'}."
            raise ConfigError(f"no submodule matches {pattern!r}", remedy=hint or has)
        matching.update(found)
    first: dict[int, str] = {}
    for name, module in named.items():
        if name in matching:
            first.setdefault(id(module), name)
    return {name: named[name] for name in first.values()}
