"""Models that break: the wrapper that dispatches to breakable captures, and breaks at modules by name."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from cgplan.descriptors import BatchDescriptor
from cgplan.errors import CgplanError, ConfigError
from cgplan.graphs import GraphBackend
from cgplan.modes import CUDAGraphMode
from cgplan.runtime.breakable import BreakableCUDAGraphCapture, broken_out
from cgplan.runtime.wrapper import CUDAGraphOptions, CUDAGraphWrapper

_DEFAULTS = CUDAGraphOptions()


class BreakableCUDAGraphWrapper(CUDAGraphWrapper):
    """CUDAGraphWrapper whose graphs break at eager pieces: see there for when it captures and when it replays.

    Entries hold a BreakableCUDAGraphCapture each. A call that captures also computes its result.

    Args:
        runnable: What is captured; its eager pieces are functions under ``eager_break_during_capture``, or modules
            that ``break_at_modules`` named.
        runtime_mode: PIECEWISE or FULL.
        backend, pool, options: As for CUDAGraphWrapper.
        key_fn: Called with the arguments on every call; its hashable result is part of the key, beside the descriptor.
    """

    _computes_while_capturing: ClassVar[bool] = True

    def __init__(
        self,
        runnable: Callable[..., Any],
        runtime_mode: CUDAGraphMode = CUDAGraphMode.PIECEWISE,
        *,
        backend: GraphBackend | None = None,
        pool: Any = None,
        options: CUDAGraphOptions = _DEFAULTS,
        key_fn: Callable[..., Hashable] | None = None,
    ) -> None:
        super().__init__(runnable, runtime_mode, backend=backend, pool=pool, options=options)
        self._key_fn = key_fn

    def _key(self, descriptor: BatchDescriptor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        if self._key_fn is None:
            return descriptor
        key = (descriptor, self._key_fn(*args, **kwargs))
        try:
            hash(key)
        except TypeError as error:
            raise CgplanError(f"key_fn returned {key[1]!r:.200}: {error}", remedy="Return a hashable value.") from None
        return key

    def _record(
        self, pool: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any, dict[int, torch.Tensor]]:
        copied = self._copied_arguments(args, pool)
        with BreakableCUDAGraphCapture(self.backend, pool) as capture:
            slots = {i: capture.new_slot(args[i]) for i in copied}
            output = self.runnable(*(slots.get(i, arg) for i, arg in enumerate(args)), **kwargs)
        return capture, output, slots

    def _replay(self, graph: BreakableCUDAGraphCapture) -> None:
        graph.replay()

    def _free(self, graph: BreakableCUDAGraphCapture) -> None:
        graph.reset()

    def _parts(self, graph: BreakableCUDAGraphCapture) -> tuple[tuple[Any, ...], int]:
        return graph.graphs, graph.num_eager_breaks


class ModuleBreaks:
    """Modules that are eager pieces until ``remove`` is called.

    Attributes:
        names: Their dotted names.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.names = tuple(modules)
        self._undo: list[tuple[nn.Module, Any]] = []
        for name, module in modules.items():
            self._undo.append((module, vars(module).get("forward")))
            vars(module)["forward"] = broken_out(module.forward, name)

    def remove(self) -> None:
        """Give the modules their own forward back; a second call does nothing. The last handle goes first."""
        while self._undo:
            module, before = self._undo.pop()
            if before is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = before


def break_at_modules(model: nn.Module, patterns: Sequence[str]) -> ModuleBreaks:
    """Make submodules eager pieces of whatever breakable capture they are called in.

    The model's code stays as it is: each module gets a ``forward`` of its own until the handle's ``remove``. Copy or
    save a model as a whole (``copy.deepcopy``, pickle) only without breaks; its state dict is not touched.

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
    found = {id(module): name for name, module in reversed(named.items()) if _matches_any(name, patterns)}
    return ModuleBreaks({name: named[name] for name in reversed(found.values())})


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(_matches(name, pattern) for pattern in patterns)


def _near(pattern: str, names: list[str]) -> str:
    """Names like the pattern, those of numbered layers as one."""
    general = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names))
    near = difflib.get_close_matches(pattern, [*general, *names], n=3)
    if not near:
        return f"The model has {', '.join(general[:10]) or 'no submodules'}{', ...' if len(general) > 10 else ''}."
    return f"Did you mean {' or '.join(near)}?"
