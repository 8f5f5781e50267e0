"""Who is still there: heartbeats in the store that torch.distributed meets at, and what ranks say before they fail.

Note [How a failure is noticed]
    Every rank writes a heartbeat into the TCPStore, and its process id when it came. A thread of each rank, the watch,
    looks at those of the others. A rank is lost when its process has ended without a word (seen at once on the same
    machine), when it said that it leaves with an error, or when its heartbeat has stood still for most of the timeout.
    That is final. A rank that has raised inside a common step announces it instead: it is going to come to the end of
    the step, where all raise together, and the others only have to stop waiting for its data until then.
    Whoever keeps the store may stand still, too: then it is the store's silence that tells (PatientStore).
    Whoever waits in code of its own (a barrier over shared memory, say) calls `check` in the loop; a kernel that waits
    is told through `tell`. NCCL's and gloo's waits are ended by their own timeouts, which are set to the same value.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgplan.distributed.store import PatientStore
from cgplan.errors import RankFailedError

logger = logging.getLogger(__name__)

SILENCE = 0.75  # of the timeout: a rank whose heartbeat has stood still for longer is lost
_REMEDY = "Look at what that rank printed; start all ranks again."
_NO_STORE = "Look whether torchrun, or whoever keeps the store, still runs; start all ranks again."


@dataclass(frozen=True, slots=True)
class Process:
    """One process as others can look for it.

    Attributes:
        pid: Its number.
        started: When it began, in the kernel's clock ticks: numbers are used again.
        home: Where that number means something: kernel, and namespace of processes.
    """

    pid: int
    started: str
    home: str

    @classmethod
    def this(cls) -> Process:
        """The process that asks."""
        return cls(os.getpid(), _started(os.getpid()) or "", _home())

    @property
    def is_gone(self) -> bool:
        """Whether it has surely ended; False where that cannot be seen from here."""
        return bool(self.started) and self.home == _home() and _started(self.pid) != self.started


def _started(pid: int) -> str | None:
    """When a process began; None if there is none, or it has ended and its parent has not noticed yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def _home() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class RankWatch:
    """Heartbeats of this rank, and a look at those of the others, see Note [How a failure is noticed].

    Args:
        store: A connection of its own to the common store: others may block theirs.
        rank: This one.
        processes: Of all ranks.
        timeout: Seconds, see ``distributed.timeout``.
        host_rank: The rank whose process holds the store; None where a launcher's does.
    """

    def __init__(
        self, store: PatientStore, rank: int, processes: list[Process], timeout: float, host_rank: int | None = None
    ) -> None:
        self._store, self._rank, self._processes, self._timeout = store, rank, processes, timeout
        self._host_rank = host_rank
        self._lost: RankFailedError | None = None
        self._announced: RankFailedError | None = None
        self._has_left = False
        self._epoch = 0
        self._beats = 0
        self._seen = {peer: ("", time.monotonic()) for peer in self._peers}
        self._listeners: list[Callable[[RankFailedError], None]] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="cgplan-rank-watch", daemon=True)
        self._beat()
        self._thread.start()

    @property
    def lost(self) -> RankFailedError | None:
        """Why ranks cannot go on; None while all are there."""
        return self._lost

    @property
    def is_keeper_gone(self) -> bool:
        """Whether another rank kept the store, and has ended."""
        host = self._host_rank
        return host is not None and host != self._rank and self._processes[host].is_gone

    @property
    def has_left(self) -> bool:
        """Whether this rank has said that it comes to no step any more."""
        return self._has_left

    def check(self) -> None:
        """Raise RankFailedError if a rank is lost, or has announced that it failed in this step."""
        failure = self._lost or self._announced
        if failure is not None:
            raise RankFailedError(failure.message, remedy=failure.remedy)

    def check_lost(self) -> None:
        """Raise RankFailedError if a rank is lost."""
        if self._lost is not None:
            raise RankFailedError(self._lost.message, remedy=self._lost.remedy)

    def tell(self, listener: Callable[[RankFailedError], None]) -> Callable[[], None]:
        """Have a function called, in the watch's thread, for each failure; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def announce(self, step: str, error: BaseException) -> None:
        """Say that this rank has raised in a step, at whose end it will be. Its own waits end, too: the others end
        theirs without a word to it.
        """
        said = {"rank": self._rank, "step": step, "cause": spoken(error)}
        self._store.compare_set(f"announced/{self._epoch}", "", json.dumps(said))
        self._tell(_announcement(said))

    def leave(self, error: BaseException) -> None:
        """Say that this rank ends with an error, and comes to no step any more. For it, the others are lost, too."""
        with self._lock:
            if self._has_left:
                return
            self._has_left = True
            before, why = self._lost, self._lost or (error if isinstance(error, RankFailedError) else None)
            self._lost = before or RankFailedError(f"rank {self._rank} has left: {spoken(error)}", remedy=_REMEDY)
            # Whoever sees this rank gone is to learn of the one that it went because of.
            said = f"rank {self._rank} has ended: {spoken(error)}" if why is None else why.message
            self._tell_all(f"left/{self._rank}", json.dumps({"said": said, "induced": why is not None}))
        if before is None:
            self._tell(self._lost)

    def next_epoch(self) -> None:
        """Forget what was announced: all ranks have raised it."""
        with self._lock:
            self._epoch += 1
            self._announced = None

    def blame(self, patience: float) -> None:
        """Look for a rank that is lost, for some seconds, and raise RankFailedError if there is one."""
        deadline = time.monotonic() + patience
        while True:
            self._look()
            self.check_lost()
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
        self._store.close()

    @property
    def _peers(self) -> list[int]:
        return [rank for rank in range(len(self._processes)) if rank != self._rank]

    def _run(self) -> None:
        while not self._stop.wait(min(0.5, self._timeout / 20)):
            self._look()
            self._beat()

    def _beat(self) -> None:
        self._beats += 1
        self._tell_all(f"beat/{self._rank}", str(self._beats))

    def _tell_all(self, key: str, said: str) -> None:
        """Write to the store, if it is there; ``_look`` says what it means if it is not."""
        if not self.is_keeper_gone:
            with suppress(RuntimeError):
                self._store.set(key, said)

    def _look(self) -> None:
        """Notice what has changed since the last look; no exception leaves it."""
        with self._lock:
            if self._lost is not None or self._stop.is_set():
                return
            gone = [peer for peer in self._peers if self._processes[peer].is_gone]
            if self._host_rank in gone:  # torch prints much where it is asked nevertheless
                self._lose(_without_a_word(self._host_rank))
                return
            try:
                self._read_store(gone)
            except RuntimeError as error:
                if self._stop.is_set():
                    return
                host = self._host_rank
                if gone or host in (None, self._rank):
                    what = f"the store of the ranks does not answer: {first_line(error)}"
                    self._lose(_without_a_word(gone[0]), _REMEDY) if gone else self._lose(what, _NO_STORE)
                elif self._store.is_silent:
                    self._lose(f"rank {host}, which keeps the store, has shown no sign of life: {first_line(error)}")
                else:
                    self._lose(_without_a_word(host))

    def _read_store(self, gone: list[int]) -> None:
        keys = [key for key in (f"left/{peer}" for peer in self._peers) if self._store.check([key])]
        left = [json.loads(self._store.get(key)) for key in keys]
        if left:  # one that went because of another names that one
            self._lose(max(left, key=lambda said: said["induced"])["said"])
            return
        if gone:
            self._lose(_without_a_word(gone[0]))
            return
        for peer in self._peers:
            self._look_at_beat(peer)
        if self._announced is None and self._store.check([f"announced/{self._epoch}"]):
            said = json.loads(self._store.get(f"announced/{self._epoch}"))
            if said["rank"] != self._rank:
                self._announced = _announcement(said)
                self._tell(self._announced)

    def _look_at_beat(self, peer: int) -> None:
        key, now = f"beat/{peer}", time.monotonic()
        beat = self._store.get(key).decode() if self._store.check([key]) else ""
        if beat != self._seen[peer][0]:
            self._seen[peer] = (beat, now)
        elif now - self._seen[peer][1] > SILENCE * self._timeout:
            self._lose(f"rank {peer} has shown no sign of life for {now - self._seen[peer][1]:.0f} s")

    def _lose(self, message: str, remedy: str = _REMEDY) -> None:
        if self._lost is None:
            self._lost = RankFailedError(message, remedy=remedy)
            logger.info("rank %d: %s", self._rank, self._lost.message)
            self._tell(self._lost)

    def _tell(self, failure: RankFailedError) -> None:
        for listener in list(self._listeners):
            try:
                listener(failure)
            except Exception:  # the others are to hear of it, too
                logger.exception("a listener failed")


def _without_a_word(rank: int | None) -> str:
    return f"rank {rank} has ended without a word (killed, or out of memory?)"


def _announcement(said: Mapping[str, Any]) -> RankFailedError:
    return RankFailedError(f"rank {said['rank']} failed in {said['step']}: {said['cause']}", remedy=_REMEDY)


def spoken(error: BaseException) -> str:
    """An error as other ranks read it: its class, and its message in one line."""
    text = getattr(error, "message", None) or str(error) or "no message"
    return f"{type(error).__name__}: {' '.join(str(text).split())}"


def first_line(error: BaseException) -> str:
    """The first line of a message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


__all__ = ["Process", "RankWatch", "first_line", "spoken"]
