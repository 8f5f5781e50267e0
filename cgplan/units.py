"""Numbers, lists and groups of values."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    groups: dict[K, list[V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def listed(values: Sequence[object], most: int = 6) -> str:
    """``1, 2, 4 and 3 more``."""
    shown = ", ".join(map(str, values[:most]))
    others = len(values) - most
    if others > 0:
        shown = f"{shown} and {others} more"
    return shown


def counted(number: int, noun: str) -> str:
    """``1 graph``, ``2 graphs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def from_to(first: object, last: object) -> str:
    """``1 to 4``, or ``4``."""
    if first == last:
        return str(last)
    return f"{first} to {last}"


def format_bytes(value: int | None) -> str:
    """``1536`` -> ``1.5 KiB``; in MiB up to 10 GiB; None is a dash."""
    if value is None:
        return "-"
    size = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < (10240 if unit == "MiB" else 1024) or unit == "GiB":
            break
        size /= 1024
    digits = 0 if unit == "B" or abs(size) >= 100 else 1
    return f"{size:.{digits}f} {unit}"


def format_microseconds(value: float) -> str:
    """``1234.5`` -> ``1.23 ms``; three significant digits."""
    number = value
    unit = "us"
    if value >= 1e6:
        number = value / 1e6
        unit = "s"
    elif value >= 1000:
        number = value / 1e3
        unit = "ms"
    digits = 2
    if number >= 99.95:
        digits = 0
    elif number >= 9.995:
        digits = 1
    return f"{number:.{digits}f} {unit}"


def format_seconds(value: float) -> str:
    """``0.01234`` -> ``12.3 ms``."""
    return format_microseconds(value * 1e6)


def format_ratio(value: float) -> str:
    """``1.234`` -> ``1.23x``."""
    digits = 2 if value < 10 else 1
    return f"{value:.{digits}f}x"
