"""Files that users name: their text, or an error that says what is wrong with them."""

from __future__ import annotations

import difflib
from pathlib import Path

from cgplan.errors import CgplanError


def read_text(path: str | Path, error: type[CgplanError], remedy: str) -> str:
    """Text of a UTF-8 file, without a byte order mark.

    Args:
        path: The file.
        error: Raised, with the path, if it is missing, a folder, not readable, or no UTF-8 text.
        remedy: What to give instead.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        folder = path.parent if path.parent.is_dir() else Path()
        near = difflib.get_close_matches(path.name, [p.name for p in folder.iterdir() if p.is_file()], n=1)
        hint = f"Did you mean {folder / near[0]}? " if near else ""
        raise error(f"no such file: {path}", remedy=f"{hint}{remedy}") from None
    except OSError as failure:
        raise error(f"cannot read {path}: {failure.strerror or failure}", remedy=remedy) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        line = data.count(b"\n", 0, failure.start) + 1
        raise error(f"{path}:{line}: not UTF-8 text", remedy=f"Unpack it, or save it as UTF-8. {remedy}") from None


__all__ = ["read_text"]
