"""Ranks that are late: who they are, by what all write to the store, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cgplan.errors import RankFailedError


def missing(store: Any, keys: Sequence[str], said: str | None = None) -> list[str]:
    """Ranks that have not written to their key; with ``said``, those that have not written that."""
    there = [store.check([key]) and (said is None or store.get(key).decode() == said) for key in keys]
    return [str(rank) for rank, is_there in enumerate(there) if not is_there]


def late(ranks: Sequence[str], step: str, timeout: float, waiting: int) -> RankFailedError:
    """What is raised once ranks were waited for in vain: where they are instead is not known."""
    return RankFailedError(
        f"rank {', '.join(ranks)} did not come to {step} within {timeout:g} s: it is late, or waits in an all-reduce "
        f"that rank {waiting} takes no part in",
        remedy="Every rank has to do as many all-reduces in each forward as the others, in the same order; where it "
        "does, look at what that rank does, and raise distributed.timeout if it only takes longer.",
    )


__all__ = ["late", "missing"]
