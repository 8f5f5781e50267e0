"""Where a capture breaks: functions under ``eager_break_during_capture``, modules by name, and
operators by name.

Note [Breaks at operators]
    A dispatch mode sees the operators of a forward while segments record. It stands above the
    backend's own modes, so it steps aside where code outside of operators breaks the capture;
    inside the call of an operator torch has taken it off already. A composite operator
    (``scaled_dot_product_attention``) reaches no dispatch mode: its kernels do. Below autograd it
    comes whole, so the forward runs there, and torch raises an error if it computes gradients.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from cgplan.backends.host_sync import (
    Args,
    Function,
    Kwargs,
    as_its_caller,
    is_composite,
    names_of,
)
from cgplan.backends.replacing import replaced
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

    Outside of a breakable capture, in a FULL capture, inside another eager piece, and where
    torch.compile traces it (PIECEWISE by operators does), the function runs as it is. See
    BreakableCUDAGraphCapture.add_eager for what it may return.
    """
    global _decorated
    _decorated = True
    return as_eager_piece(function, name_of(function))


def any_breaks() -> bool:
    """Whether there is any function under ``eager_break_during_capture``."""
    return _decorated


def as_eager_piece(
    function: Callable[P, R],
    name: str,
    *,
    is_traced: bool = False,
) -> Callable[P, R]:
    """The function as an eager piece, under a name for messages. ``is_traced``: it is operators of
    a trace.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():  # what follows could not be traced
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


class Breaks(TorchDispatchMode):
    """Modules and operators that are eager pieces of the breakable captures of ``forward``.

    The model's code and modules stay as they are: the modules have another ``forward`` while one is
    captured, or looked at. For operators see Note [Breaks at operators].

    Args:
        patterns: Dotted names of submodules in which ``*``, ``?`` and ``[...]`` stand for parts of
            one component, such as ``layers.*.self_attn``. Of a module inside another one that
            matches, too, the outer one is the piece.
        names: Operators, as ``namespace::name`` or ``namespace::name.overload``.
        device: The kind of device whose autocast counts.

    Attributes:
        modules: The modules by their dotted names.
        outer: Those of them that have a forward, and are in no other such module: the pieces, if
            they are called.
        numbers: Names of operators that were called with numbers during captures: replays pass the
            same ones.

    Raises:
        ConfigError: ``patterns`` for a model that is no module, or a pattern that matches no
            submodule.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        model: Function,
        patterns: Sequence[str],
        names: Collection[str],
        device: str,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = _matching(model, patterns) if patterns else {}
        self.numbers: dict[str, None] = {}
        self._names = frozenset(names)
        self._device = device
        called = []
        for name, module in self.modules.items():
            if getattr(module.forward, "__func__", None) is not _NO_FORWARD:
                called.append(name)
        heads = tuple(f"{name}." for name in called)
        outer = [name for name in called if not name.startswith(heads)]
        self.outer = tuple(outer)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled parts of the model stay compiled."""
        return True

    def forward(self, model: Function, *args: Any, **kwargs: Any) -> Any:
        """Call the model, broken where a breakable capture or a look is under way."""
        is_recording = recording_capture() is not None
        if not is_recording and current_look() is None:
            return model(*args, **kwargs)
        with ExitStack() as stack:
            for name, module in self.modules.items():
                piece = as_eager_piece(module.forward, name)
                stack.enter_context(replaced(module, forward=piece))
            if self._names:
                stack.enter_context(torch._C._AutoDispatchBelowAutograd())
                if is_recording:  # a look knows the operators by itself
                    stack.enter_context(self)
            return model(*args, **kwargs)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> Any:
        """Break the capture, or run the operator in the segment."""
        kwargs = kwargs or {}
        capture = recording_capture()
        if capture is None or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        run = as_its_caller(func, func, self._device)
        if self._names.isdisjoint(names_of(func)):
            if not is_composite(func, self._device.upper()):
                return run(*args, **kwargs)
            decompose = as_its_caller(func, func.decompose, self._device)
            with self:
                return decompose(*args, **kwargs)
        name = func._schema.name
        for leaf in tree_leaves((args, kwargs)):
            if type(leaf) in (int, float, complex):
                self.numbers[name] = None
        # then tensor objects stay as they are
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
    """The submodules that patterns name, each once."""
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
            near = _near(pattern, list(named))
            raise ConfigError(f"no submodule matches {pattern!r}", remedy=near)
        matching.update(found)
    first: dict[int, str] = {}
    for name, module in named.items():
        if name in matching:
            first.setdefault(id(module), name)
    return {name: named[name] for name in first.values()}


def _near(pattern: str, names: list[str]) -> str:
    """Names like the pattern, those of numbered layers as one."""
    general = [re.sub(r"(?<=\.)\d+(?![^.])", "*", name) for name in names]
    general = list(dict.fromkeys(general))
    hint = did_you_mean(pattern, general + names, "Did you mean {}?", 3)
    if hint:
        return hint
    return f"The model has {listed(general, 10) or 'no submodules'}."
