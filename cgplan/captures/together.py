"""What a capture session does together with other processes. Alone it does nothing of it; ``distributed/`` does."""

from __future__ import annotations

from collections.abc import Callable

from cgplan.errors import CgplanError
from cgplan.planning import Plan
from cgplan.reports.records import CaptureReport


class Together:
    """The points at which a session meets those of other ranks. This one has none: every answer is its own.

    Where there are ranks, each of these is a step that all of them take, and raises on all of them if one fails.
    """

    def begin(self, plan: Plan, free: int | None) -> int | None:  # noqa: ARG002
        """Before anything is allocated: the ranks capture the same plan, and nothing of an earlier pass is registered.

        Returns:
            The free device memory, in bytes, that budgets count with: the least of all ranks.
        """
        return free

    def any(self, refused: bool, because: BaseException | None = None) -> bool:  # noqa: ARG002
        """Whether the budget of some rank refuses a key; ``because`` is what this rank raised, where it ran out."""
        return refused

    def dropped(self) -> None:
        """After all graphs were freed in the middle of a session: buffers that they read are forgotten."""

    def end(self) -> None:
        """After the last capture, before any replay: graph buffers are made known to all ranks."""

    def failed(self, error: BaseException) -> BaseException:
        """After a failure: what is to be raised instead, the same on all ranks."""
        return error

    def release(self) -> None:
        """Before graphs and their pool are freed, however the session or the runner ends."""

    def tell_of_losses(self, tell: Callable[[CgplanError], None]) -> None:
        """Have a method called, from any thread, when the graphs would wait for a rank that is lost."""

    def completed(self, report: CaptureReport) -> CaptureReport:
        """The report with what the other ranks say."""
        return report


ALONE = Together()

__all__ = ["ALONE", "Together"]
