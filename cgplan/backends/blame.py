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
from typing import NamedTuple

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


class Line(NamedTuple):
    file: str
    number: int

    def __str__(self) -> str:
        if not self.number:
            return self.file
        return f"{self.file}:{self.number}: `{linecache.getline(*self).strip()}`"


_UNKNOWN = Line("an unknown line", 0)


def blamed_line(raised: TracebackType | None = None) -> Line:
    """In the frames that run now, or raised."""
    frames = traceback.walk_stack(sys._getframe(1))
    if raised is not None:
        frames = reversed(list(traceback.walk_tb(raised)))
    return next(users_lines(frames))


def users_lines(sources: Iterable[tuple[FrameType | str, int]]) -> Iterator[Line]:
    """Of frames, or files, and lines: outside of torch and cgplan, or else the first in torch."""
    in_torch = _UNKNOWN
    is_users = False
    for source, number in sources:
        if isinstance(source, str):
            lines = [Line(source, number)]
        elif source.f_code.co_filename.startswith("<eval_with_key>"):
            lines = _traced_from(source, number)
        elif "torch._inductor" in str(source.f_globals.get("__name__")):
            continue
        else:
            lines = [Line(source.f_code.co_filename, number)]
        for found in lines:
            if not found.file.startswith(_MACHINERY):
                is_users = True
                yield found
            elif in_torch is _UNKNOWN and found.file.startswith(_IN_TORCH):
                in_torch = found
    if not is_users:
        yield in_torch


def _traced_from(frame: FrameType, line: int) -> list[Line]:
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
    return [Line(name, int(number)) for name, number in reversed(found)]
