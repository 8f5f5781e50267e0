"""Which operators a forward calls while it is captured: those in graphs, and those of eager code between them.

Note [Operators of a capture]
    A CUDA graph knows kernels alone, and a dispatch mode would keep code that torch.compile has compiled from running
    while it is captured. So operators are noted as a profiler notes them, by PyTorch's own hooks in the dispatcher:
    they change nothing. These tell names and what was called inside of what, so an operator that is made of others
    alone stands for those, and others for themselves; views and bare allocations are left out. Not seen are kernels
    that do not pass the dispatcher, such as those that inductor has made, and what other threads run. `marked` says
    where a segment, an eager piece, or cgplan's own work around them begins and ends.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch._C._autograd import (
    _disable_profiler,
    _disable_profiler_legacy,
    _enable_profiler,
    _enable_profiler_legacy,
)
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig, _RecordFunctionFast

from cgplan.backends.host_sync import is_composite

Part = Literal["segment", "eager piece", "around graphs"]
ALREADY_PROFILED = "Profiler is already enabled"  # what torch says to a second one in a thread
_PREFIX = "cgplan: "
_OWN = ("profiler", "prim")  # namespaces of operators that compute nothing
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
_AS_VIEWS = {"_unsafe_view"}  # whose schema does not say that they are
_INSIDE, _SILENT = "inside", "silent"


class _Noting(threading.local):
    is_on = False


_noting = _Noting()


@dataclass(frozen=True, slots=True)
class OperatorCounts:
    """Names of operators, with the number of their calls: those in segments, and those of eager code."""

    captured: Counter[str] = field(default_factory=Counter)
    eager: Counter[str] = field(default_factory=Counter)


def marked(part: Part) -> AbstractContextManager[object]:
    """A block that is one part of a forward with segments; while nobody notes operators here, any block."""
    return _RecordFunctionFast(f"{_PREFIX}{part}") if _noting.is_on else nullcontext()


@contextmanager
def noted_operators(*, outside: Part) -> Iterator[OperatorCounts]:
    """A block whose operators are counted, once it has ended well; none where this thread is profiled already.

    Args:
        outside: What code is that no marker stands around.
    """
    counts = OperatorCounts()
    try:
        _enable_profiler_legacy(_plain(ProfilerState.CPU))
    except RuntimeError:
        yield counts
        return
    threads: Any = ()
    _noting.is_on = True
    try:
        yield counts
    finally:
        _noting.is_on = False
        with suppress(RuntimeError):  # somebody has ended it
            threads = _disable_profiler_legacy()
    for events in threads:
        _count(events, outside, counts)


def end_prepared_trace() -> None:
    """End what a profiler had prepared when it could not start. The next one does so; with torch 2.11 it fails."""
    only_cpu = {torch.profiler.ProfilerActivity.CPU}
    try:
        with torch.profiler.profile(activities=only_cpu):
            pass
    except RuntimeError:
        _enable_profiler(_plain(ProfilerState.KINETO), only_cpu)
        _disable_profiler()


def _plain(state: ProfilerState) -> ProfilerConfig:
    """Without shapes, memory, stacks, FLOPs and modules."""
    return ProfilerConfig(state, False, False, False, False, False, _ExperimentalConfig())


def _count(events: Any, outside: Part, counts: OperatorCounts) -> None:
    """Add what one thread has called."""
    sides = {"segment": counts.captured, "eager piece": counts.eager, "around graphs": None}
    inside: list[Counter[str] | None] = [sides[outside]]  # for each call that is under way: where to count
    for event in events:
        kind = event.kind()
        if kind == "pop" and len(inside) > 1:
            inside.pop()
        elif kind == "push":
            name, side = event.name(), inside[-1]
            part = name.removeprefix(_PREFIX)
            if part in sides and part != name:
                inside.append(sides[part])
            elif side is None or (role := _role(name)) == _INSIDE:
                inside.append(side)
            else:
                inside.append(None)
                if role != _SILENT:
                    side[name] += 1


@cache
def _role(name: str) -> str:
    """Whether a call counts under its own name, by what it calls, or not at all."""
    namespace, separator, rest = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), rest, None) if separator and rest.isidentifier() else None
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return _INSIDE  # a block that somebody has named
    if namespace in _OWN or rest in ALLOCATIONS | _AS_VIEWS:
        return _SILENT
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    overloads = [o for o in overloads if torch._C._dispatch_has_kernel(o.name()) and not _fills(o)]
    if overloads and all(map(is_composite, overloads)):
        return _INSIDE
    return _SILENT if overloads and all(map(_is_view, overloads)) else name


def _fills(overload: Any) -> bool:
    """Whether it writes to results that it is given."""
    return any(argument.is_out for argument in overload._schema.arguments)


def _is_view(overload: Any) -> bool:
    if overload._schema.is_mutable:
        return torch.Tag.inplace_view in overload.tags
    return any(result.alias_info is not None for result in overload._schema.returns)


__all__ = ["ALLOCATIONS", "ALREADY_PROFILED", "OperatorCounts", "end_prepared_trace", "marked", "noted_operators"]
