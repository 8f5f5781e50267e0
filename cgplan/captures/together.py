"""Where a capture session meets those of other ranks. Alone it meets none; ``distributed/``
implements the meetings.
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


class Together:
    """The points at which a session meets those of other ranks. This one has none: every answer is
    its own.

    Where there are ranks, each of these is a step that all of them take, and raises on all of them
    if one fails.
    """

    def begin(self, plan: Plan, free: int | None) -> int | None:  # noqa: ARG002
        """Before anything is allocated: the ranks capture the same plan, and nothing of an earlier
        pass is registered.

        Returns:
            The free device memory, in bytes, that budgets count with: the least of all ranks.
        """
        return free

    def any_refuses(self, refused: bool, because: BaseException | None = None) -> bool:  # noqa: ARG002
        """Whether the budget of some rank refuses a key; ``because`` is what this rank raised,
        where it ran out.
        """
        return refused

    def dropped(self) -> None:
        """After all graphs were freed in the middle of a session: buffers that they read are
        forgotten.
        """

    def end(self) -> None:
        """After the last capture, before any replay: graph buffers are made known to all ranks."""

    def failed(self, error: BaseException) -> BaseException:
        """After a failure: the error to raise, the same on all ranks."""
        return error

    def peer_memory(self) -> PeerMemory:
        """Memory of other ranks that graphs read."""
        return PeerMemory((), ())

    def release(self) -> None:
        """Before graphs and their pool are freed, however the session or the runner ends."""

    def completed(self, report: CaptureReport) -> CaptureReport:
        """The report with those of the other ranks."""
        return report


ALONE = Together()
