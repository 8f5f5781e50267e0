"""RankedCapture: a capture session's meetings with those of the other ranks."""

from __future__ import annotations

import logging
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cgplan.captures.together import Together
from cgplan.config import Config
from cgplan.distributed.agreement import plan_digest
from cgplan.distributed.all_reduce import AllReduce
from cgplan.distributed.ranks import Ranks
from cgplan.distributed.registry import Registration
from cgplan.errors import CgplanError, DistributedError, RankFailedError, RankMismatchError, RegistrationError
from cgplan.planning import Plan
from cgplan.reports.records import CaptureReport, RankRecord

logger = logging.getLogger(__name__)

_PASS, _REPORT = "the capture pass", "the report"


class RankedCapture(Together):
    """What sessions of several ranks do together; one for each session.

    Args:
        ranks: All ranks.
        reducer: Whose buffers the graphs read.
        config: With a budget, ranks agree before and after each key.
    """

    def __init__(self, ranks: Ranks, reducer: AllReduce, config: Config) -> None:
        self._ranks, self._reducer = ranks, reducer
        self._has_budget = any(limit is not None for limit in vars(config.budget).values())
        self._registration: Registration | None = None
        self._next = _PASS  # the step at which the others wait for this rank; none once a failure is known to all
        self._failed = False

    def begin(self, plan: Plan, free: int | None) -> int | None:
        """Unregister what an earlier pass left, and compare the plans.

        Raises:
            RegistrationError: another runner's graphs are registered: their rows would be written anew.
            RankMismatchError: ranks have different plans.
        """
        self._failed = False
        with self._step_of_all():
            self._ranks.watch.check_lost()
            if self._reducer.is_read:
                raise RegistrationError(
                    "graphs of another runner reduce by this all-reduce, and new ones would take their rows",
                    remedy="close() that runner first; where it was dropped without close(), or is to stay, open "
                    "another all-reduce for this model: open_all_reduce().",
                )
            self._reducer.begin_pass()
            said = self._ranks.agree("beginning the capture", value=(plan_digest(plan), free))
            for rank, (digest, _) in enumerate(said):
                if digest != said[0][0]:
                    raise RankMismatchError(
                        f"rank {rank} is about to capture plan {digest}, rank 0 plan {said[0][0]}",
                        remedy="Capture the plan that agree_on_plan returns.",
                    )
        return min((free for _, free in said if free is not None), default=None)

    def any(self, refused: bool, because: BaseException | None = None) -> bool:
        """Whether any rank's budget refuses a key; where there is a budget, a step of all ranks."""
        if not self._has_budget:
            return refused
        if because is not None:
            self._ranks.announce("the capture", because)
        with self._step_of_all():
            return any(self._ranks.agree("the budget", value=refused))

    def dropped(self) -> None:
        """Forget the rows of graphs that were freed, and what was announced."""
        with self._step_of_all():
            self._ranks.forgive()
            self._reducer.begin_pass()

    def end(self) -> None:
        """Register the graphs' buffers; from now on they may be replayed. Raises as AllReduce.end_pass."""
        with self._step_of_all():
            self._registration = self._reducer.end_pass()
        self._next = _REPORT

    def failed(self, error: BaseException) -> BaseException:
        """Come with the error to where the others wait, and return what all ranks raise.

        Whoever is interrupted does not wait for anybody: this rank leaves.
        """
        self._failed = True
        step, self._next = self._next, _PASS
        if not isinstance(error, Exception):
            self._ranks.leave(error)
            return error
        try:
            if step == _PASS:
                self._reducer.end_pass(error)
            elif step:
                self._ranks.agree(step, error=error)
        except Exception as agreed:
            return agreed
        return error

    @contextmanager
    def _step_of_all(self) -> Iterator[None]:
        """A block of steps; what it raises is raised on all ranks, so nobody waits for this one to say so. For anything
        else that is raised there is no step to come to any more.
        """
        before, self._next = self._next, ""
        try:
            yield
        except BaseException as error:
            if not self._ranks.has_agreed_on(error):
                self._ranks.leave(error)
            raise
        self._next = before

    def release(self) -> None:
        """Close the peers' handles, between two barriers: then graphs may be freed."""
        before = self._next
        try:
            with self._step_of_all():
                self._reducer.release()
        except DistributedError as error:
            if not self._failed:
                raise
            logger.warning("rank %d: %s", self._ranks.rank, error.message)
        finally:
            self._next = before

    def tell_of_losses(self, tell: Callable[[CgplanError], None]) -> None:
        """A kernel that waits for a lost rank ends with a wrong sum; so no graph that has one is replayed any more."""
        watch, method, own = self._ranks.watch, weakref.WeakMethod(tell), weakref.ref(self)

        def told(failure: RankFailedError) -> None:
            refuse, capture = method(), own()
            if refuse is not None and capture is not None and capture.has_rows and watch.lost is not None:
                refuse(failure)

        weakref.finalize(self, watch.tell(told)).atexit = False

    @property
    def has_rows(self) -> bool:
        """Whether graphs of the last pass read other ranks' memory."""
        return self._registration is not None and self._registration.rows > 0

    def completed(self, report: CaptureReport) -> CaptureReport:
        """The report with a record of each rank and the stops of all budgets, on all ranks."""
        registered = self._registration
        own = RankRecord(
            rank=self._ranks.rank,
            host=socket.gethostname(),
            device=self._ranks.presences[self._ranks.rank].device,
            all_reduce=self._reducer.name,
            rows=registered.rows if registered else 0,
            buffers=registered.buffers if registered else 0,
            bases=registered.bases if registered else 0,
            mapped_bytes=registered.mapped_bytes if registered else 0,
            registration_seconds=registered.seconds if registered else 0.0,
            pool_bytes=report.pool_bytes,
            static_bytes=report.static_bytes,
            total_bytes=report.total_bytes,
            session_seconds=report.session_seconds,
        )
        stops = () if report.budget is None else report.budget.stops
        with self._step_of_all():
            said = self._ranks.agree(_REPORT, value=(own, stops))
        self._next = _PASS  # of the next capture
        found = report.model_copy(update={"ranks": tuple(record for record, _ in said)})
        if found.budget is None:
            return found
        of_all = [stop.model_copy(update={"rank": rank}) for rank, (_, stops) in enumerate(said) for stop in stops]
        return found.model_copy(update={"budget": found.budget.model_copy(update={"stops": tuple(of_all)})})


__all__ = ["RankedCapture"]
