"""Which line of the user's code is to blame."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

import torch

_FOLDERS = ("backends", "buffers", "graphs", "piecewise", "captures", "runner", "speculative", "measure")
_OWN = [Path(__file__).parents[1] / name for name in _FOLDERS]
_MACHINERY = (*(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, *_OWN)), "<")


def current_line() -> str:
    """``file:line: source`` of the innermost frame that is neither torch's nor cgplan's machinery."""
    return users_line(_stack())


def raising_line(tb: TracebackType | None) -> str:
    """The same for the point where an exception was raised."""
    return users_line((frame.f_code.co_filename, line) for frame, line in reversed(list(traceback.walk_tb(tb))))


def _stack() -> Iterator[tuple[str, int]]:
    return ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe(2)))


def users_line(places: Iterable[tuple[str, int]]) -> str:
    """The first of some places, (file, line), that is neither torch's nor cgplan's machinery."""
    for name, line in places:
        if not name.startswith(_MACHINERY) and not name.endswith("/contextlib.py"):
            return f"{name}:{line}: `{linecache.getline(name, line).strip()}`"
    return "an unknown line"
