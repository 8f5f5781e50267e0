"""How this process was started: alone, or by torchrun as one of several."""

from __future__ import annotations

import os


def has_ranks() -> bool:
    """Whether torchrun has started more than this process."""
    return os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ


def is_first_rank() -> bool:
    """Whether this process is the one that prints: rank 0, or the only one."""
    return not has_ranks() or os.environ["RANK"] == "0"
