"""Ranks: the processes of one run, and the steps that they take together.

Note [Teardown]
    What ranks share is taken down in this order, on error paths too: (1) a barrier: no rank replays any more; (2) each
    rank closes the handles that it has opened of the others' memory; (3) a barrier: nobody reads my memory any more;
    (4) graphs, and (5) their pool are freed; (6) what the registry exported of its own: staging, signals, table;
    (7) the process group. Memory that is freed while another process has it open is not defined for CUDA IPC; a process
    group that is destroyed before a graph with its kernels leaves NCCL waiting. Where a rank is lost there is nobody to
    meet: the barriers are left out, and the rest is done in the same order.
    `GraphedModel.free` does (1) to (5) by way of `RankedCapture.release`, `AllReduce.close` (6), `Ranks.close` (7).
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from cgplan.config import DistributedConfig
from cgplan.distributed.rendezvous import Place, Presence, connect, meet
from cgplan.distributed.store import PatientStore
from cgplan.distributed.watch import SILENCE, RankWatch, first_line, spoken
from cgplan.errors import DistributedError, RankFailedError, RankMismatchError


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank brings to the end of a step. ``induced``: it failed because another one had."""

    step: str
    value: Any
    error: str = ""
    remedy: str = ""
    induced: bool = False


def packed(step: str, value: Any, error: BaseException | None) -> tuple[bytes, BaseException | None]:
    """What a rank brings to a step, and the error that it brings: a value that cannot be sent is one, too."""
    if error is None:
        try:
            return pickle.dumps(Answer(step, value)), None
        except Exception as raised:  # of the value's own class
            error = raised
    induced = isinstance(error, RankFailedError)
    return pickle.dumps(Answer(step, None, spoken(error), getattr(error, "remedy", ""), induced)), error


def end_process_group(*, aborted: bool) -> None:
    """End it. After a failure NCCL is told to give up instead of to wait."""
    if aborted:
        abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
        if abort is not None and dist.get_backend() != "gloo":
            with suppress(RuntimeError):
                abort()
                return
    with suppress(RuntimeError):
        dist.destroy_process_group()


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


logger = logging.getLogger(__name__)

_THE_END = "the end"  # the last step
_LOOK = timedelta(seconds=0.1)  # between two looks at who is still there


class Ranks:
    """The processes of one run, one rank each; made by ``open_ranks``, ended by ``close`` or a ``with`` block.

    Attributes:
        place: This rank's number, and where the others are.
        device: This rank's GPU, or the CPU.
        presences: What each rank said when it came.
        timeout: Seconds that ranks wait for one another.
        watch: Who is still there.
    """

    __graph_memory__ = True  # what it holds, and counts in threads of its own, is no state of a model

    def __init__(
        self,
        place: Place,
        device: torch.device,
        presences: list[Presence],
        store: PatientStore,
        watch: RankWatch,
        timeout: float,
        *,
        owns_group: bool,
    ) -> None:
        self.place, self.device, self.presences, self.watch, self.timeout = place, device, presences, watch, timeout
        self._store = store
        self._owns_group = owns_group
        self._steps = 0
        self._waits = 0  # for collectives outside of steps
        self._closed = False
        self._renewals: list[Callable[[], None]] = []
        self._is_renewing = False
        self._agreed_on: BaseException | None = None
        self.group = dist.group.WORLD
        self.cpu_group = self.new_group()  # another one than that of the data, which a failure may leave half done

    @property
    def rank(self) -> int:
        """From 0."""
        return self.place.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.place.world_size

    @property
    def group_name(self) -> str:
        """torch's name of the group of all ranks."""
        return dist.group.WORLD.group_name if dist.group.WORLD is not None else ""

    @property
    def on_one_machine(self) -> bool:
        """Whether all ranks run on the same host."""
        return len({presence.host for presence in self.presences}) == 1

    def new_group(self) -> Any:
        """Another group of gloo's with all ranks; a step of all ranks."""
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))

    def agree(self, step: str, *, error: BaseException | None = None, value: Any = None) -> list[Any]:
        """Come to the end of a step; returns every rank's value, once all have come without an error.

        All ranks come to the same steps in the same order. One that has failed comes with its error, to whichever step
        the others are waiting in.

        Raises:
            RankFailedError: a rank failed, is lost, or did not come within the timeout. The same words on all ranks.
                After the last, which nobody can make up for, there are no more steps.
            RankMismatchError: ranks came to different steps.
            CgplanError: the given error, where all ranks failed with the same one.
            DistributedError: the ranks are closed.
        """
        if self._closed and step != _THE_END:
            raise DistributedError(f"{step}: the ranks are closed", remedy="Keep them open as long as they are used.")
        self._steps += 1
        answer, error = packed(step, value, error)
        logger.debug("rank %d: step %d, %s%s", self.rank, self._steps, step, f": {error}" if error else "")
        self.watch.check_lost()
        try:
            if error is not None:
                self.announce(step, error)
            self._store.set(f"at/{self._steps}/{self.rank}", step)
            self._wait_for_all(step)
            answers = self._gather(answer)
        except RuntimeError as failure:  # what gloo and the store raise
            raise self._explained(step, failure) from failure
        self._judge(answers, error)
        return [found.value for found in answers]

    def announce(self, step: str, error: BaseException) -> None:
        """Say that this rank has raised, and will be at the next step: others need not wait for its data until then."""
        if not isinstance(error, RankFailedError):
            self.watch.announce(step, error)

    def renew_after_failures(self, renew: Callable[[], None]) -> Callable[[], None]:
        """Have a function called on all ranks, at the end of each step in which one has failed, where none waits for
        another; it may take steps of its own. Returns what ends that.
        """
        self._renewals.append(renew)
        return lambda: self._renewals.remove(renew) if renew in self._renewals else None

    @property
    def is_closed(self) -> bool:
        """Whether there are no more steps, because this rank has left."""
        return self._closed

    def wait(self, work: Any, waits: Callable[[], None] = lambda: None) -> None:
        """Wait for a collective of gloo's as long as all ranks are there. ``waits`` is called where that takes long.

        Raises:
            RankFailedError: a rank is lost, or has raised in this step.
            RuntimeError: of gloo's own.
        """
        while True:
            try:
                work.wait(_LOOK)
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises its own error; but it may have ended well just after the look was over
                    return
                self.watch.check()
                waits()
            else:
                return

    def wait_in(self, step: str, begin: Callable[[], Any]) -> None:
        """Begin a collective of gloo's with all ranks, and wait for it under a step's name; the store is asked nothing
        where all come in time. Raises RankFailedError as ``agree``: then there are no more steps.
        """
        self._waits += 1
        keys, waits = [f"waits/{rank}" for rank in range(self.world_size)], str(self._waits)
        deadline, absent = time.monotonic() + self.timeout, list[str]()
        try:
            self.wait(begin(), lambda: self._store.set(keys[self.rank], waits))
        except RuntimeError as failure:
            with suppress(RuntimeError):  # the store may be what has failed
                absent = missing(self._store, keys, waits) if time.monotonic() > deadline else []
            raise self._explained(step, failure, absent) from failure

    def forgive(self) -> None:
        """Go on after a failure that was announced, and that all ranks have dealt with: a step of all ranks."""
        self.agree("going on")
        self.watch.next_epoch()
        self.agree("going on again")

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A block that ends well on all ranks, or raises on all of them. Raises as ``agree``."""
        error: BaseException | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.agree(name, error=error)

    def broadcast(self, step: str, value: Any) -> Any:
        """Rank 0's value, on all ranks. Raises as ``agree``."""
        return self.agree(step, value=value if self.rank == 0 else None)[0]

    def leave(self, error: BaseException) -> None:
        """Say that this rank ends with an error. What it closes from now on, it closes without the others."""
        self.watch.leave(error)

    def close(self, error: BaseException | None = None) -> None:
        """Leave, with the error that made this rank leave or without one; see Note [Teardown] for what comes before.

        Without an error it waits for the others, so that no rank misses what another one holds.
        """
        if self._closed:
            return
        self._closed = True
        failure: RankFailedError | None = None
        if error is not None:
            self.leave(error)
        elif self.watch.lost is None:
            try:
                self.agree(_THE_END)
            except RankFailedError as raised:
                failure = raised
        if self.watch.lost is not None:  # else the others would take this rank's end for the cause
            self.leave(self.watch.lost)
        self.watch.stop()
        self._say_goodbye(error or failure)
        self._store.close()
        del self.group, self.cpu_group  # else their threads would outlive them, into the interpreter's end
        if self._owns_group and dist.is_initialized():
            end_process_group(aborted=error is not None or failure is not None)
        if failure is not None:
            raise failure

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error)

    def _wait_for_all(self, step: str) -> None:
        """Wait until every rank has come to this step, so that the exchange itself waits for nobody."""
        keys = [f"at/{self._steps}/{rank}" for rank in range(self.world_size)]
        deadline, pause = time.monotonic() + self.timeout, 0.0005
        while not self._store.check(keys):
            self.watch.check_lost()
            absent = [] if time.monotonic() < deadline else missing(self._store, keys)
            if absent:
                raise self._given_up(step, absent)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        if self._steps > 2:
            self._store.delete_key(f"at/{self._steps - 2}/{self.rank}")

    def _given_up(self, step: str, absent: Sequence[str]) -> RankFailedError:
        """Leave: a step that this rank has given up can be met by nobody any more."""
        error = late(absent, step, self.timeout, self.rank)
        self.leave(error)
        return error

    def _gather(self, answer: bytes) -> list[Answer]:
        """Every rank's answer, over gloo."""
        answers: list[Any] = [None] * self.world_size
        dist.all_gather_object(answers, answer, group=self.cpu_group)
        return [pickle.loads(found) for found in answers]

    def has_agreed_on(self, error: BaseException) -> bool:
        """Whether all ranks raise it, or something like it: it says so, or it is what the last step ended with."""
        return isinstance(error, DistributedError) or error is self._agreed_on

    def _judge(self, answers: list[Answer], error: BaseException | None) -> None:
        """Raise what the answers amount to; the same on all ranks."""
        failed = [(found.induced, rank) for rank, found in enumerate(answers) if found.error]
        if failed:
            self.watch.next_epoch()
            self._renew()
            if error is not None and len(failed) == len(answers) and len({found.error for found in answers}) == 1:
                self._agreed_on = error
                raise error
            first = min(failed)[1]
            found = answers[first]
            raise RankFailedError(
                f"rank {first} failed in {found.step}: {found.error}", remedy=found.remedy or "Look at that rank."
            ) from error
        for rank, found in enumerate(answers):
            if found.step != answers[0].step:
                raise RankMismatchError(
                    f"rank {rank} came to {found.step!r}, rank 0 to {answers[0].step!r}",
                    remedy="Ranks have to make the same calls in the same order.",
                )

    def _renew(self) -> None:
        """Begin anew what ranks count together: one that failed, or was told of it, may have left it half done."""
        if self._is_renewing:
            return
        self._is_renewing = True
        try:
            with suppress(DistributedError):  # there is a failure to be raised already
                for renew in list(self._renewals):
                    renew()
        finally:
            self._is_renewing = False

    def _explained(self, step: str, failure: RuntimeError, absent: Sequence[str] = ()) -> RankFailedError:
        """Who is to blame for what gloo or the store raised; whatever it was, there are no more steps."""
        try:
            self.watch.blame(patience=0.0 if absent else min(3.0, self.timeout / 4))
        except RankFailedError as named:
            return RankFailedError(f"{named.message}; noticed in {step}", remedy=named.remedy)
        if absent:
            return self._given_up(step, absent)
        error = RankFailedError(
            f"rank {self.rank} lost the others in {step}: {first_line(failure)}",
            remedy="Look at what the other ranks printed, and at the network between them.",
        )
        self.leave(error)
        return error

    def _say_goodbye(self, error: BaseException | None) -> None:
        """Whoever keeps the store stays until the others have read what they need."""
        if self.watch.is_keeper_gone:
            return
        with suppress(RuntimeError):
            self._store.set(f"bye/{self.rank}", "")
            if self.rank == 0 and not self.place.agent_store:
                others = [rank for rank in range(1, self.world_size) if not self.presences[rank].process.is_gone]
                keys, deadline = [f"bye/{rank}" for rank in others], time.monotonic() + (2.0 if error else 10.0)
                while keys and not self._store.check(keys) and time.monotonic() < deadline:
                    time.sleep(0.01)


def open_ranks(settings: DistributedConfig, device: str = "auto", *, place: Place | None = None) -> Ranks | None:
    """Meet the other ranks, and set torch.distributed up: NCCL between GPUs, gloo for all that the host says.

    A process group that is there already is used, and left as it is at the end.

    Args:
        settings: The ``distributed`` section.
        device: As ``config.device``; ``cuda`` is the GPU of the local rank.
        place: This rank's; absent: from torchrun's environment.

    Returns:
        The ranks, or None outside of torchrun and for a single process.

    Raises:
        RendezvousError, RankMismatchError, BackendError, ConfigError: see ``connect`` and ``meet``.
    """
    place = Place.from_environment() if place is None else place
    if place is None or place.world_size == 1:
        return None
    presence, own = Presence.of(place, device)
    store, beside = connect(place, settings.timeout)
    presences = meet(store, place, presence, settings.timeout)
    processes = [presence.process for presence in presences]
    heard = PatientStore(beside, SILENCE * settings.timeout)
    watch = RankWatch(heard, place.rank, processes, settings.timeout, None if place.agent_store else 0)
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
        kept = PatientStore(store, settings.timeout, watch.check_lost)
        return Ranks(place, own, presences, kept, watch, settings.timeout, owns_group=owns_group)
    except RuntimeError as failure:
        try:
            watch.blame(patience=min(3.0, settings.timeout / 4))
        finally:
            watch.stop()
        raise RankFailedError(
            f"rank {place.rank} could not set torch.distributed up: {first_line(failure)}",
            remedy="Look at what the other ranks printed, and at the network between them.",
        ) from failure


__all__ = ["Answer", "Ranks", "end_process_group", "late", "missing", "open_ranks", "packed"]
