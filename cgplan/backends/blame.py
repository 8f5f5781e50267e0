"""The line of the user's code that is to blame."""

import contextlib
import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch.fx import GraphModule

_FOLDERS = (
    "backends",
    "buffers",
    "captures",
    "drop_in",
    "graphs",
    "measure",
    "piecewise",
    "runner",
)
_TORCH = Path(torch.__file__).parent
_CGPLAN = Path(__file__).parents[1]
_IN_TORCH = f"{_TORCH}{os.sep}"
_MACHINERY = (
    _IN_TORCH,
    *(f"{_CGPLAN / folder}{os.sep}" for folder in _FOLDERS),
    str(_CGPLAN / "api.py"),
    contextlib.__file__,
    "<",
)


def users_lines(places: Iterable[tuple[str, int]]) -> Iterator[str]:
    """Of places outside of torch and cgplan, or else of the first in torch."""
    in_torch = None
    is_found = False
    for place in places:
        if not place[0].startswith(_MACHINERY):
            is_found = True
            yield _shown(*place)
        elif in_torch is None and place[0].startswith(_IN_TORCH):
            in_torch = place
    if not is_found:
        yield "an unknown line" if in_torch is None else _shown(*in_torch)


def _shown(name: str, line: int) -> str:
    return f"{name}:{line}: `{linecache.getline(name, line).strip()}`"


def blamed_line(raised: TracebackType | None = None) -> str:
    """Of the frames that run now, or raised."""
    frames = traceback.walk_stack(sys._getframe(1))
    if raised is not None:
        frames = reversed(list(traceback.walk_tb(raised)))
    return next(users_lines(places_of(frames)))


def places_of(frames: Iterable[tuple[FrameType, int]]) -> Iterator[tuple[str, int]]:
    for frame, line in frames:
        name = frame.f_code.co_filename
        module = str(frame.f_globals.get("__name__"))
        if name.startswith("<eval_with_key>"):
            yield from _traced_from(frame, line)
        elif "torch._inductor" not in module:
            yield name, line


def _traced_from(frame: FrameType, line: int) -> list[tuple[str, int]]:
    values = frame.f_locals
    module = values.get("self")
    if isinstance(values, dict):  # before Python 3.13 a copy that keeps tensors alive
        values.clear()
    if not isinstance(module, GraphModule):
        return []
    index = (module._lineno_map or {}).get(line - frame.f_code.co_firstlineno)
    if index is None:
        return []
    trace = list(module.graph.nodes)[index].stack_trace or ""
    found = re.findall(r'^ *File "(.+)", line (\d+)', trace, re.MULTILINE)
    return [(name, int(number)) for name, number in reversed(found)]
