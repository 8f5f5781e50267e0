"""Ranks: the processes of one run, and the steps that they take together.

Note [Steps]
    All ranks come to the same steps in the same order. Each brings a value, or the error that it
    has raised; all get all values, or all raise the same error. Answers go through torch's
    TCPStore, so a rank that does not come within the timeout is named. That is final: there are no
    more steps then. A rank that raises between two steps says so in the store before it comes to
    the next one: CPU sums that wait for its data look there, and end. Sums on a GPU, and gloo's,
    end by their own timeout; the rank that raised waits for them. torchrun ends the other ranks
    when one is killed; without torchrun they end after the timeout.

Note [Teardown]
    Shared memory is taken down in this order, on error paths too: (1) a step: no rank replays any
    more; (2) each rank closes the handles that it has opened of the others' memory; (3) a step: no
    rank reads my memory any more; (4) graphs, and (5) their pool are freed; (6) the registry's
    exports: staging, signals, table; (7) the group. Memory that is freed while another process has
        it open is undefined for CUDA IPC; a process group that is destroyed
    before a graph with its kernels leaves NCCL waiting. Where a rank is lost the steps are left
    out, the order stays. `ModelGraphs.free` does (1) to (5) through `RankedCapture.release`,
    `AllReduce.close` (6), `Ranks.close` (7).
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from cgplan.config import DistributedConfig
from cgplan.distributed.rendezvous import Place, Presence, absent_from, meet, part
from cgplan.errors import DistributedError, RankFailedError, RankMismatchError, first_line

logger = logging.getLogger(__name__)

_REMEDY = "Look at the output of that rank; start all ranks again."


@dataclass(frozen=True)
class _Answer:
    """A rank's part in a step. ``induced``: it failed because another rank had."""

    step: str
    value: Any = None
    error: str = ""
    remedy: str = ""
    induced: bool = False


class Ranks:
    """The processes of one run, one rank each; made by ``open_ranks``, ended by ``close`` or a
    ``with`` block.

    Attributes:
        device: This rank's GPU, or the CPU.
        presences: Host and device of each rank.
        timeout: Seconds that ranks wait for one another.
        lost: Why there are no more steps; None while all ranks are there.
        agreed_on: The error that the last step has raised on all ranks; None if it ended well.
        group: torch's group of all ranks.
    """

    __graph_memory__ = True  # its counters are no state of a model

    def __init__(
        self,
        place: Place,
        device: torch.device,
        presences: Sequence[Presence],
        store: Any,
        timeout: float,
        *,
        owns_group: bool,
    ) -> None:
        self.place = place
        self.rank = place.rank
        self.world_size = place.world_size
        self.device = device
        self.presences = presences
        self.timeout = timeout
        self.lost: RankFailedError | None = None
        self.agreed_on: BaseException | None = None
        self.group = dist.group.WORLD
        self._store, self._owns_group = store, owns_group
        self._steps = 0
        self._has_announced = self.is_closed = False

    def new_group(self) -> Any:
        """Another gloo group of all ranks; a step of all of them."""
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))

    def agree(
        self, step: str, *, error: BaseException | None = None, value: Any = None
    ) -> list[Any]:
        """Come to a step; returns every rank's value, once all have come without an error. See Note
        [Steps].

        Args:
            step: Its name, the same on all ranks.
            error: Why this rank has failed; it may come with it to any step.
            value: Any value that can be pickled.

        Raises:
            RankFailedError: a rank failed, has left, or did not come within the timeout. The same
                words on all ranks.
            RankMismatchError: ranks came to different steps.
            CgplanError: the given error, where all ranks failed with the same one.
            DistributedError: the ranks are closed.
        """
        if self.is_closed:
            raise DistributedError(
                f"{step}: the ranks are closed", remedy="Keep them open as long as they are used."
            )
        answer, self.agreed_on = _Answer(step, value), None
        if error is not None:
            induced = isinstance(error, RankFailedError)
            answer = _Answer(step, None, _spoken(error), getattr(error, "remedy", ""), induced)
        packed = pickle.dumps(answer)
        logger.debug("rank %d: step %d, %s %s", self.rank, self._steps, step, answer.error)
        with self._asking(step):
            self._look_for_lost()
            if error is not None:
                self.announce(error)
            answers = self._exchange(step, packed)
        self._steps += 1
        self._has_announced = False
        self.agreed_on = _failure_of(answers, error)
        if self.agreed_on is error is not None:
            raise error
        if self.agreed_on is not None:
            raise self.agreed_on from error
        return [found.value for found in answers]

    def announce(self, error: BaseException) -> None:
        """Tell the others that this rank has failed and comes to the next step, so that they do not
        wait for its data.
        """
        self._has_announced = self._has_announced or not isinstance(error, DistributedError)
        with suppress(RuntimeError):
            self._store.compare_set(
                f"{self._steps}/failed", "", f"rank {self.rank} failed: {_spoken(error)}"
            )

    def check(self) -> None:
        """Raise RankFailedError if a rank is lost, or has announced that it failed since the last
        step.
        """
        key = f"{self._steps}/failed"
        with self._asking("an all-reduce"):
            self._look_for_lost()
            if self._store.check([key]):
                raise RankFailedError(self._store.get(key).decode(), remedy=_REMEDY)

    def check_lost(self) -> None:
        """Raise RankFailedError if this rank knows that a rank is lost; costs nothing."""
        if self.lost is not None:
            raise RankFailedError(self.lost.message, remedy=self.lost.remedy)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A block that ends well on all ranks, or raises on all of them. Raises as ``agree``."""
        error: BaseException | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.agree(name, error=error)

    def leave(self, error: BaseException) -> None:
        """Take no further step, because of an error; the others raise it at their next step."""
        if self.lost is None:
            message, remedy = f"rank {self.rank} has ended: {_spoken(error)}", _REMEDY
            if isinstance(error, DistributedError):  # it names the rank that failed
                message, remedy = error.message, error.remedy
            self.lost = RankFailedError(message, remedy=remedy)
        with suppress(RuntimeError):
            self._store.compare_set("lost", "", self.lost.message)

    def close(self, error: BaseException | None = None) -> None:
        """Leave, with the error that ends this rank or without one; see Note [Teardown] for the
        steps before.

        Without an error it waits for the others. Raises RankFailedError where one of them failed.
        """
        if self.is_closed:
            return
        try:
            if error is not None:
                self.leave(error)
            elif self.lost is None:
                self.agree("the end")
        finally:
            self.is_closed = True
            part(self._store, self.place, min(self.timeout, 2.0 if self.lost else 10.0))
            del self.group  # its threads would live into the interpreter's end
            if self._owns_group and dist.is_initialized():
                with suppress(RuntimeError):
                    # NCCL would wait for the lost rank
                    if self.lost is not None and dist.get_backend() != "gloo":
                        dist.distributed_c10d._abort_process_group()
                    else:
                        dist.destroy_process_group()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error)

    def _exchange(self, step: str, packed: bytes) -> list[_Answer]:
        """Every rank's answer. The rank that failed first waits longer: the others may wait in a
        sum for it.
        """
        keys, patience = [f"{self._steps}/{rank}" for rank in range(self.world_size)], self.timeout
        self._store.set(keys[self.rank], packed)
        seconds = 2 * patience if self._has_announced else patience
        absent = absent_from(self._store, keys, seconds, self._look_for_lost)
        if absent:
            error = RankFailedError(
                f"rank {', '.join(absent)} did not come to {step} within {patience:g} s: it has "
                "ended, is late, or "
                f"waits in an all-reduce that rank {self.rank} takes no part in",
                remedy="Look at the output of that rank. Every rank has to do as many all-reduces "
                "in each forward as "
                "the others, in the same order. Raise distributed.timeout if it only takes longer.",
            )
            self.leave(error)
            raise error
        answers = [pickle.loads(self._store.get(key)) for key in keys]
        if self._steps > 1:  # all have read it: they have taken the step after it
            self._store.delete_key(f"{self._steps - 2}/{self.rank}")
        return answers

    def _look_for_lost(self) -> None:
        if self.lost is None and self._store.check(["lost"]):
            self.lost = RankFailedError(self._store.get("lost").decode(), remedy=_REMEDY)
        self.check_lost()

    @contextmanager
    def _asking(self, step: str) -> Iterator[None]:
        """A block that uses the store; losing it is final."""
        try:
            yield
        except RuntimeError as failure:
            error = RankFailedError(
                f"{self.place.keeper} ended while rank {self.rank} was in {step}: "
                f"{first_line(failure)}",
                remedy=_REMEDY,
            )
            self.leave(error)
            raise error from failure


def open_ranks(
    settings: DistributedConfig, device: str = "auto", *, place: Place | None = None
) -> Ranks | None:
    """Meet the other ranks, and set torch.distributed up: NCCL between GPUs, gloo between hosts.

    A process group that is there already is used, and left as it is at the end. ``device`` is as
    ``config.device``: ``cuda`` is the GPU of the local rank. ``place`` comes from torchrun's
        environment if absent.

    Returns:
        The ranks, or None outside of torchrun and for a single process.

    Raises:
        RendezvousError, RankMismatchError, BackendError, ConfigError: as ``meet`` and
            ``Place.from_environment``.
        RankFailedError: torch.distributed could not be set up.
    """
    place = Place.from_environment() if place is None else place
    if place is None or place.world_size == 1:
        return None
    presence, own = Presence.of(place, device)
    store, presences = meet(place, presence, settings.timeout)
    owns_group = not dist.is_initialized()
    if own.type == "cuda":
        torch.cuda.set_device(own)
    try:
        if owns_group:
            dist.init_process_group(
                backend="gloo" if own.type == "cpu" else "cpu:gloo,cuda:nccl",
                store=PrefixStore("group", store),
                rank=place.rank,
                world_size=place.world_size,
                timeout=timedelta(seconds=settings.timeout),
            )
    except RuntimeError as failure:
        raise RankFailedError(
            f"rank {place.rank} could not set torch.distributed up: {first_line(failure)}",
            remedy="Look at the output of the other ranks, and at the network between them.",
        ) from failure
    return Ranks(place, own, presences, store, settings.timeout, owns_group=owns_group)


def _failure_of(answers: Sequence[_Answer], error: BaseException | None) -> BaseException | None:
    """The error of a step with these answers; the same on all ranks. ``error`` is this rank's."""
    failed = [(found.induced, rank) for rank, found in enumerate(answers) if found.error]
    if failed:
        if (
            error is not None
            and len(failed) == len(answers)
            and len({found.error for found in answers}) == 1
        ):
            return error
        found = answers[rank := min(failed)[1]]
        message = (
            found.error if found.induced else f"rank {rank} failed in {found.step}: {found.error}"
        )
        return RankFailedError(message, remedy=found.remedy or _REMEDY)
    for rank, found in enumerate(answers):
        if found.step != answers[0].step:
            return RankMismatchError(
                f"rank {rank} came to {found.step!r}, rank 0 to {answers[0].step!r}",
                remedy="Ranks have to make the same calls in the same order.",
            )
    return None


def _spoken(error: BaseException) -> str:
    """An error in one line for other ranks, with its class unless another rank caused it."""
    text = " ".join(str(getattr(error, "message", None) or str(error) or "no message").split())
    return text if isinstance(error, RankFailedError) else f"{type(error).__name__}: {text}"
