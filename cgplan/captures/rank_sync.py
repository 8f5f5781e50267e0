"""Steps that the capture sessions of several ranks take together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cgplan.planning import Plan
from cgplan.reports.records import CaptureReport


class PeerMemory(NamedTuple):
    """``mapped``: (first address, the one after the last, name); ``addresses``: those in a table
    that graphs read.
    """

    mapped: Sequence[tuple[int, int, str]] = ()
    addresses: Sequence[int] = ()


class RankSync:
    """Steps of all ranks; if one fails, all raise. This class, for a single rank, never waits."""

    def begin(self, plan: Plan, free: int | None) -> int | None:  # noqa: ARG002
        """Agree on the plan; returns the least free device memory."""
        return free

    def any_refuses(
        self,
        refused: bool,
        because: BaseException | None = None,  # noqa: ARG002
    ) -> bool:
        """``because``: this rank ran out of memory."""
        return refused

    def dropped(self) -> None:
        """All graphs were freed during a session."""

    def end(self) -> None:
        """After the last capture: make graph buffers known to all."""

    def failed(self, error: BaseException) -> BaseException:
        """The error to raise, the same on all ranks."""
        return error

    def peer_memory(self) -> PeerMemory:
        return PeerMemory()

    def release(self) -> None:
        """Before graphs and their pool are freed."""

    def completed(self, report: CaptureReport) -> CaptureReport:
        return report


SINGLE_RANK = RankSync()
