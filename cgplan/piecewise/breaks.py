"""Where a capture breaks: functions under ``eager_break_during_capture``, modules by name, and
operators by name.

Note [Breaks at operators]
    A dispatch mode sees the operators of a forward while segments record. It stands on the
    backend's own modes, so it steps aside where code outside of operators breaks the capture;
    inside the call of an operator torch has taken it off already. A composite operator
    (``scaled_dot_product_attention``) would reach no dispatch mode, only the kernels that it chose;
    below autograd it comes whole. So gradients cannot be computed in such a forward: torch raises
    an error there.
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

from cgplan.backends.host_sync import Args, Kwargs, as_its_caller, is_composite, names_of
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
    return broken_out(function, name_of(function))


def any_breaks() -> bool:
    """Whether there is any function under ``eager_break_during_capture``."""
    return _decorated


def broken_out(function: Callable[P, R], name: str, *, is_traced: bool = False) -> Callable[P, R]:
    """The same under a name for messages. ``is_traced``: the function is operators of a trace."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():  # what follows could not be traced
            return function(*args, **kwargs)
        capture = recording_capture()
        if capture is not None:
            with _operator_breaks_aside():
                return capture.add_named(name, function, args, kwargs, is_traced=is_traced)  # type: ignore[no-any-return]
        # it looks at segments; here the host may be needed
        if (look := current_look()) is not None:
            return look.run_aside(function, args, kwargs)  # type: ignore[no-any-return]
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
        model: Callable[..., Any],
        patterns: Sequence[str],
        names: Collection[str],
        device: str,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = _matching(model, patterns) if patterns else {}
        called = [
            n
            for n, m in self.modules.items()
            if getattr(m.forward, "__func__", None) is not _NO_FORWARD
        ]
        self.outer = tuple(
            n for n in called if not any(n.startswith(f"{other}.") for other in called)
        )
        self.numbers: dict[str, None] = {}
        self._names, self._device = frozenset(names), device

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled parts of the model stay compiled."""
        return True

    def forward(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the model, broken where a breakable capture or a look is under way."""
        is_recording = recording_capture() is not None
        if not is_recording and current_look() is None:
            return model(*args, **kwargs)
        with ExitStack() as stack:
            for name, module in self.modules.items():
                stack.enter_context(replaced(module, forward=broken_out(module.forward, name)))
            if self._names:
                stack.enter_context(torch._C._AutoDispatchBelowAutograd())
            if self._names and is_recording:  # a look knows the operators by itself
                stack.enter_context(self)
            return model(*args, **kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Break the capture, or run the operator in the segment."""
        kwargs, capture = dict(kwargs or {}), recording_capture()
        if capture is None or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if self._names & names_of(func):
            name, leaves = func._schema.name, tree_leaves((args, kwargs))
            if any(
                isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)
                for leaf in leaves
            ):
                self.numbers[name] = None
            # then tensor objects stay as they are
            is_traced = torch.Tag.inplace_view not in func.tags
            return capture.add_named(
                name, as_its_caller(func, func, self._device), args, kwargs, is_traced=is_traced
            )
        if is_composite(func, self._device.upper()):
            with self:
                return as_its_caller(func, func.decompose, self._device)(*args, **kwargs)
        return as_its_caller(func, func, self._device)(*args, **kwargs)


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


def _matching(model: Callable[..., Any], patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The submodules that patterns name, each once."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "compilation.splitting_modules needs an nn.Module",
            remedy="Put eager_break_during_capture on functions.",
        )
    named = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    matching = set[str]()
    for pattern in patterns:
        wanted = pattern.split(".")
        parts = {name: name.split(".") for name in named}
        found = [
            n
            for n, p in parts.items()
            if len(p) == len(wanted) and all(map(fnmatch.fnmatchcase, p, wanted))
        ]
        if not found:
            raise ConfigError(
                f"no submodule matches {pattern!r}", remedy=_near(pattern, list(named))
            )
        matching.update(found)
    first = {id(module): name for name, module in reversed(named.items()) if name in matching}
    return {name: module for name, module in named.items() if first.get(id(module)) == name}


def _near(pattern: str, names: list[str]) -> str:
    """Names like the pattern, those of numbered layers as one."""
    general = list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?![^.])", "*", name) for name in names))
    hint = did_you_mean(pattern, [*general, *names], "Did you mean {}?", 3)
    return hint or f"The model has {listed(general, 10) or 'no submodules'}."
