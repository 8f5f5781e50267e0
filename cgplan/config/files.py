"""Files that users name: their text, or an error that says what is wrong with them."""

from __future__ import annotations

import difflib
from pathlib import Path

from cgplan.errors import CgplanError

SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars", " ": "spaces"}  # of tables, in place of commas
MOST_NAMED = 3  # files beside a missing one


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
        raise error(f"no such file: {path}", remedy=f"{beside(path)}{remedy}") from None
    except OSError as failure:
        raise error(f"cannot read {path}: {failure.strerror or failure}", remedy=remedy) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        line = data.count(b"\n", 0, failure.start) + 1
        raise error(f"{path}:{line}: not UTF-8 text", remedy=f"Unpack it, or save it as UTF-8. {remedy}") from None


def beside(path: Path) -> str:
    """For a remedy: what a missing file may have been meant to be, the nearest name in its folder, else those alike."""
    if not path.parent.is_dir():
        return f"There is no folder {path.parent}. "
    names = sorted(p.name for p in path.parent.iterdir() if p.is_file())
    if near := difflib.get_close_matches(path.name, names, n=1, cutoff=0.7):
        return f"Did you mean {path.parent / near[0]}? "
    alike = [name for name in names if path.suffix and name.endswith(path.suffix)]
    more = f" and {len(alike) - MOST_NAMED} more" if len(alike) > MOST_NAMED else ""
    return f"That folder has {', '.join(alike[:MOST_NAMED])}{more}. " if alike else ""


__all__ = ["SEPARATORS", "beside", "read_text"]
