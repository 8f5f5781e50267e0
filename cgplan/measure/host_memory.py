"""Memory of the host: what is left of it, and a bound that turns its end into an error before the system kills."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

KEPT = 1 << 28  # bytes left to others
_ASKED = "can't allocate memory"  # what torch's allocator says


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process may still take before the system has to kill one: of the machine, and of each control
    group that it is in (a container's limit); None where the system does not tell.
    """
    found = [_line(proc / "meminfo", "MemAvailable"), *_left_in_groups(proc, cgroups)]
    return min((left for left in found if left is not None), default=None)


class BoundedMemory:
    """A block in which the process cannot take more memory than the host has: allocations fail before that, and so
    Python raises MemoryError, torch a RuntimeError that ``is_out_of_memory`` knows. Where the system has no such bound
    (Linux's ``RLIMIT_DATA``) the block does nothing.

    Attributes:
        available: Bytes that were available when the block began, None where that is not known.
    """

    def __init__(self) -> None:
        self.available = available_memory()
        self._before: tuple[int, int] | None = None

    def __enter__(self) -> BoundedMemory:
        taken = _line(Path("/proc/self/status"), "VmData")
        if resource is None or taken is None or self.available is None:
            return self
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        bound = taken + max(self.available - KEPT, 0)
        if soft == resource.RLIM_INFINITY or bound < soft:
            self._before = soft, hard
            _set_limit(bound, hard)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._before is not None:
            _set_limit(*self._before)

    def allow(self, nbytes: int) -> None:
        """Addresses without memory behind them do not count."""
        if self._before is not None:
            soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
            _set_limit(soft + nbytes, hard)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation on the host failed."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _ASKED in str(error))


def _set_limit(soft: int, hard: int) -> None:
    with suppress(ValueError, OSError):  # above the hard limit, say: then that holds
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _left_in_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Bytes left in each control group, those above it included. Memory of files that are not in use counts as left."""
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, usage = cgroups, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, usage = cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = top / path.strip("/")
        for group in (folder, *folder.parents):
            most, used = _text(group / limit).strip(), _text(group / usage).strip()
            if most.isdigit() and used.isdigit():
                cached = re.findall(r"^(?:total_)?inactive_file (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
                yield max(int(most) - int(used) + max(map(int, cached), default=0), 0)
            if group == top:
                break


def _line(path: Path, name: str) -> int | None:
    """Bytes of a line such as ``MemAvailable:   123 kB``."""
    found = re.search(rf"^{name}:\s*(\d+) kB$", _text(path), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


__all__ = ["BoundedMemory", "available_memory", "is_out_of_memory"]
