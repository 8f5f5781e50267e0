"""The steps that capture sessions of several ranks take together; ``distributed/`` implements them.
A single rank takes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cgplan.planning import Plan
from cgplan.reports.records import CaptureReport


class PeerMemory(NamedTuple):
    """Memory of other ranks in this process's address space.

    Attributes:
        mapped: First address, the one behind the last, and the name of each part.
        addresses: Those that graphs read from a table.
    """

    mapped: Sequence[tuple[int, int, str]]
    addresses: Sequence[int]


class RankSync:
    """The steps at which a session waits for those of other ranks; this one is for a single rank.

    With several ranks, all of them take each step, and it raises on all of them if one fails.
    """

    def begin(self, plan: Plan, free: int | None) -> int | None:  # noqa: ARG002
        """Before anything is allocated: the ranks capture the same plan, and nothing of an earlier
        pass is registered.

        Returns:
            The free device memory, in bytes, that budgets count with: the least of all ranks.
        """
        return free

    def any_refuses(
        self,
        refused: bool,
        because: BaseException | None = None,  # noqa: ARG002
    ) -> bool:
        """Whether the budget of any rank refuses a key; ``because`` is the error of this rank,
        where its memory ran out.
        """
        return refused

    def dropped(self) -> None:
        """All graphs were freed in the middle of a session: the buffers that they read are
        forgotten.
        """

    def end(self) -> None:
        """After the last capture, before any replay: graph buffers are made known to all ranks."""

    def failed(self, error: BaseException) -> BaseException:
        """After a failure: the error to raise, the same on all ranks."""
        return error

    def peer_memory(self) -> PeerMemory:
        """Memory of other ranks that graphs read."""
        return PeerMemory(mapped=(), addresses=())

    def release(self) -> None:
        """Before graphs and their pool are freed, however the session or the runner ends."""

    def completed(self, report: CaptureReport) -> CaptureReport:
        """The report with those of the other ranks."""
        return report


SINGLE_RANK = RankSync()
