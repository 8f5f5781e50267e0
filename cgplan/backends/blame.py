"""Which line of the user's code is to blame."""

from __future__ import annotations

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
    "graphs",
    "measure",
    "piecewise",
    "runner",
    "speculative",
)
_OWN = [Path(__file__).parents[1] / name for name in _FOLDERS]
_MACHINERY = (*(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, *_OWN)), "<")


def users_line(places: Iterable[tuple[str, int]]) -> str:
    """The first of some places, (file, line), that is neither torch's nor cgplan's machinery."""
    for name, line in places:
        if not name.startswith(_MACHINERY) and not name.endswith("/contextlib.py"):
            return f"{name}:{line}: `{linecache.getline(name, line).strip()}`"
    return "an unknown line"


def blamed_line(raised: TracebackType | None = None) -> str:
    """``file:line: source`` of the innermost frame of the user's code: the one that runs now, or
    that raised.

    The code of a traced forward was generated; in its place stands the line that the running node
    was traced from.
    """
    if raised is None:
        return users_line(_places(traceback.walk_stack(sys._getframe(1))))
    return users_line(_places(reversed(list(traceback.walk_tb(raised)))))


def _places(frames: Iterable[tuple[FrameType, int]]) -> Iterator[tuple[str, int]]:
    for frame, line in frames:
        if frame.f_code.co_filename.startswith("<eval_with_key>"):  # torch.fx generated it
            yield from _traced_from(frame, line)
        yield frame.f_code.co_filename, line


def _traced_from(frame: FrameType, line: int) -> Iterator[tuple[str, int]]:
    """The frames, innermost first, that the node in a line of a GraphModule's code was traced
    in.
    """
    values = frame.f_locals
    module = values.get("self")
    # before Python 3.13 a copy that stays with the frame, and tensors with it
    if isinstance(values, dict):
        values.clear()
    if not isinstance(module, GraphModule):
        return
    index = (module._lineno_map or {}).get(line - frame.f_code.co_firstlineno)
    for number, node in enumerate(module.graph.nodes):
        if number == index:
            found = re.findall(r'^ *File "(.+)", line (\d+)', node.stack_trace or "", re.MULTILINE)
            yield from ((name, int(lineno)) for name, lineno in reversed(found))
