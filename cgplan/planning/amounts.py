"""Bytes as people read them, in plans and reports alike."""

from __future__ import annotations


def format_bytes(value: int | None) -> str:
    """``1536`` -> ``1.5 KiB``. None, where nothing was measured, is a dash."""
    if value is None:
        return "-"
    size = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 100 else f"{size:.1f} {unit}"


__all__ = ["format_bytes"]
