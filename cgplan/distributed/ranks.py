"""The processes of one run: how they meet, by a TCPStore under torchrun, and their common steps.

Note [Steps]
    Each rank brings a value or an error through torch's TCPStore; all get all values, or raise the
    same error. After a late rank there are no more steps. A rank that raises between steps says so
    in the store, where CPU sums look.

Note [Teardown]
    Shared memory is taken down in this order: (1) a step: no rank replays; (2) each rank closes its
    handles of others' memory; (3) a step: no rank reads my memory; (4) graphs, (5) their pool, (6)
    the registry's exports, (7) the group. Where a rank is lost the steps are left out. CUDA IPC
    leaves memory undefined that is freed while open elsewhere, and NCCL waits if its group goes
    before its graphs. `ModelGraphs.free` does (1) to (5), `AllReduce.close` (6), `Ranks.close` (7).
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    TCPStore,
)

from cgplan.config import DistributedConfig
from cgplan.errors import (
    BackendError,
    CgplanError,
    ConfigError,
    DistributedError,
    RankFailedError,
    RankMismatchError,
    RendezvousError,
    first_line,
)
from cgplan.units import listed

# by address, port, attempt
_stores: dict[tuple[str, int, int], Any] = {}
_meetings: Counter[tuple[str, int, int]] = Counter()


@dataclass(frozen=True)
class Place:
    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    agent_store: bool = False  # torchrun's agent keeps it, else rank 0
    attempt: int = 0  # restarts

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Place | None:
        """None outside of torchrun. Raises ConfigError for a missing variable."""
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return None
        rank = int(environment["RANK"])
        world_size = int(environment["WORLD_SIZE"])
        unset = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
        if unset:
            raise ConfigError(
                f"rank {rank} of {world_size}: not set: {', '.join(unset)}",
                remedy="Start the ranks with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and "
                "MASTER_PORT.",
            )
        return cls(
            rank,
            world_size,
            local_rank=int(environment.get("LOCAL_RANK", rank)),
            address=environment["MASTER_ADDR"],
            port=int(environment["MASTER_PORT"]),
            agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )

    @property
    def keeps_store(self) -> bool:
        return self.rank == 0 and not self.agent_store

    @property
    def keeper(self) -> str:
        keeper = "torchrun's agent" if self.agent_store else "rank 0"
        return f"{keeper}, which keeps the store,"


@dataclass(frozen=True)
class Presence:
    host: str
    device: str  # cpu, or a UUID
    problem: str = ""  # why it has none

    @property
    def kind(self) -> str:
        return "the CPU" if self.device == "cpu" else "a GPU"

    @classmethod
    def of(cls, place: Place, device: str) -> tuple[Presence, torch.device]:
        """On the CPU, or the GPU of its local rank."""
        host = socket.gethostname()
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu":
            return cls(host, "cpu"), torch.device("cpu")
        index = int(device.partition(":")[2] or place.local_rank)
        count = torch.cuda.device_count()
        if index >= count:
            problem = f"has no GPU: it wants cuda:{index}, torch sees {count}"
            return cls(host, "none", problem), torch.device("cpu")
        properties = torch.cuda.get_device_properties(index)
        return cls(host, str(properties.uuid)), torch.device("cuda", index)


def absent_from(
    store: Any, keys: Sequence[str], timeout: float, meanwhile: Callable[[], None] = lambda: None
) -> list[str]:
    """Waits for every rank's key; the ranks without one after ``timeout`` seconds. A CgplanError of
    ``meanwhile`` ends the wait.
    """
    deadline = time.monotonic() + timeout
    pause = 0.0005
    while not store.check(list(keys)):
        if time.monotonic() > deadline:
            return [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        try:
            meanwhile()
        except CgplanError:  # a rank has left, perhaps after this step
            if store.check(list(keys)):
                break
            raise
        time.sleep(pause)
        pause = min(1.5 * pause, 0.02)
    return []


def part(store: Any, place: Place, seconds: float) -> None:
    """The store's keeper waits until all have parted."""
    with suppress(RuntimeError):
        store.set(f"parted/{place.rank}", "")
        if place.keeps_store:
            absent_from(store, [f"parted/{rank}" for rank in range(place.world_size)], seconds)


def meet(place: Place, presence: Presence, timeout: float) -> tuple[Any, list[Presence]]:
    """The common store, and every rank's presence.

    Raises:
        RendezvousError: a rank did not come in time.
        BackendError, RankMismatchError: as ``check_devices``; on all ranks.
    """
    where = (place.address, place.port, place.attempt)
    if where not in _stores:
        patience = timedelta(seconds=timeout)
        try:
            _stores[where] = TCPStore(
                place.address, place.port, None, place.keeps_store, patience, wait_for_workers=False
            )
        except RuntimeError as error:
            failed = "cannot listen" if place.keeps_store else f"does not reach {place.keeper}"
            raise RendezvousError(
                f"rank {place.rank} {failed} at {place.address}:{place.port} within {timeout:g} s: "
                f"{first_line(error)}",
                remedy="Start all ranks with the same MASTER_ADDR and MASTER_PORT, and a port that "
                "is free.",
            ) from error
    store: Any = PrefixStore(f"cgplan/{place.attempt}/{_meetings[where]}", _stores[where])
    keys = [f"here/{rank}" for rank in range(place.world_size)]
    try:
        store.set(keys[place.rank], pickle.dumps(presence))
        absent = absent_from(store, keys, timeout)
        if absent:
            part(store, place, 1.0)
            raise RendezvousError(
                f"rank {', '.join(absent)} of {place.world_size} did not come within {timeout:g} s",
                remedy="Look at the output of that rank; raise distributed.timeout if it only "
                "starts slowly.",
            )
        found = [pickle.loads(store.get(key)) for key in keys]
    except RuntimeError as error:
        raise RendezvousError(
            f"{place.keeper} ended while rank {place.rank} waited for the others: "
            f"{first_line(error)}",
            remedy="Look at the output of the other ranks.",
        ) from error
    _meetings[where] += 1
    try:
        check_devices(found)
    except CgplanError:
        # else rank 0 ends the others' store
        part(store, place, min(timeout, 10.0))
        raise
    return store, found


def check_devices(found: Sequence[Presence]) -> None:
    """BackendError where a rank has no device of its own, RankMismatchError for other kinds."""
    first: dict[tuple[str, str], int] = {}
    for rank, presence in enumerate(found):
        if presence.problem:
            raise BackendError(
                f"rank {rank} on {presence.host} {presence.problem}",
                remedy="Start one rank a GPU (--nproc-per-node), check CUDA_VISIBLE_DEVICES, or "
                "set device: cpu.",
            )
        if presence.kind != found[0].kind:
            raise RankMismatchError(
                f"rank {rank} runs on {presence.kind}, rank 0 on {found[0].kind}",
                remedy="Set device: cpu or device: cuda for all ranks.",
            )
        other = first.setdefault((presence.host, presence.device), rank)
        if presence.device != "cpu" and other != rank:
            raise BackendError(
                f"ranks {other} and {rank} are on one GPU ({presence.device}) of {presence.host}",
                remedy="Set device: cuda without a number; check CUDA_VISIBLE_DEVICES.",
            )


logger = logging.getLogger(__name__)

_REMEDY = "Look at the output of that rank; start all ranks again."


@dataclass(frozen=True)
class _Answer:
    """``induced``: it failed because another rank had."""

    step: str
    value: Any = None
    error: str = ""
    remedy: str = ""
    induced: bool = False


@dataclass(eq=False, repr=False)
class Ranks:
    """Made by ``open_ranks``, ended by ``close`` or a ``with`` block.

    Attributes:
        lost: Why there are no more steps.
        agreed_on: The error that the last step raised on all ranks.
    """

    __graph_memory__ = True

    place: Place
    device: torch.device
    presences: Sequence[Presence]
    store: Any
    timeout: float
    owns_group: bool
    lost: RankFailedError | None = None
    agreed_on: BaseException | None = None
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.rank = self.place.rank
        self.world_size = self.place.world_size
        self.group = dist.group.WORLD
        self._steps = 0
        self._sums = 0  # since the last step
        self._told = list[str]()
        self._has_announced = False

    def new_group(self) -> Any:
        """Of gloo; a step of all ranks."""
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))

    def agree(
        self, step: str, *, error: BaseException | None = None, value: Any = None
    ) -> list[Any]:
        """Come to a step; returns every rank's pickled value. ``error``: this rank has failed, at
        any step.

        Raises:
            RankFailedError: a rank failed, has left, or was late.
            RankMismatchError: ranks came to different steps.
            CgplanError: the given error, where all ranks failed with it.
            DistributedError: the ranks are closed.
        """
        if self.is_closed:
            raise DistributedError(
                f"{step}: the ranks are closed", remedy="Keep them open as long as they are used."
            )
        self.agreed_on = None
        answer = _Answer(step, value)
        if error is not None:
            answer = _Answer(
                step,
                error=_spoken(error),
                remedy=getattr(error, "remedy", ""),
                induced=isinstance(error, RankFailedError),
            )
        packed = pickle.dumps(answer)
        logger.debug("rank %d: step %d, %s %s", self.rank, self._steps, step, answer.error)
        with self._asking(step):
            self._look_for_lost()
            if error is not None:
                self.announce(error)
            answers = self._exchange(step, packed, f"{self._steps}", self._look_for_lost)
        self._steps += 1
        self._sums = 0
        self._has_announced = False
        self.agreed_on = _failure_of(answers, error)
        if self.agreed_on is error is not None:
            raise error
        if self.agreed_on is not None:
            raise self.agreed_on from error
        return [found.value for found in answers]

    def meet_in_sum(self, value: str) -> list[str]:
        """Every rank's value. Raises RankFailedError as ``check``, and for a late rank."""
        self._sums += 1
        place = f"{self._steps}/sum {self._sums}"
        with self._asking("an all-reduce"):
            return self._exchange("an all-reduce", pickle.dumps(value), place, self.check)

    def announce(self, error: BaseException) -> None:
        """This rank brings no data before the next step."""
        if not isinstance(error, DistributedError):
            self._has_announced = True
        with suppress(RuntimeError):
            self.store.compare_set(
                f"{self._steps}/failed", "", f"rank {self.rank} failed: {_spoken(error)}"
            )

    def check(self) -> None:
        """Raise RankFailedError for a lost rank, or a failure since the last step."""
        key = f"{self._steps}/failed"
        with self._asking("an all-reduce"):
            self._look_for_lost()
            if self.store.check([key]):
                raise RankFailedError(self.store.get(key).decode(), remedy=_REMEDY)

    def check_lost(self) -> None:
        """``check`` without asking the others."""
        if self.lost:
            raise RankFailedError(self.lost.message, remedy=self.lost.remedy)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """It ends well on all ranks, or raises as ``agree``."""
        error = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.agree(name, error=error)

    def leave(self, error: BaseException) -> None:
        """For good; the others raise the error at their next step."""
        if self.lost is None:
            lost = RankFailedError(f"rank {self.rank} has ended: {_spoken(error)}", remedy=_REMEDY)
            if isinstance(error, DistributedError):  # it names the rank that failed
                lost = RankFailedError(error.message, remedy=error.remedy)
            self.lost = lost
        with suppress(RuntimeError):
            self.store.compare_set("lost", "", self.lost.message)

    def close(self, error: BaseException | None = None) -> None:
        """Leave with an error, or when all have come to the end. Raises RankFailedError. See Note
        [Teardown].
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
            part(self.store, self.place, min(self.timeout, 2.0 if self.lost else 10.0))
            del self.group  # else its threads outlive the interpreter's end
            if self.owns_group and dist.is_initialized():
                with suppress(RuntimeError):
                    # NCCL waits for a lost rank
                    if self.lost and dist.get_backend() != "gloo":
                        dist.distributed_c10d._abort_process_group()
                    else:
                        dist.destroy_process_group()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error)

    def _exchange(
        self, step: str, packed: bytes, place: str, meanwhile: Callable[[], None]
    ) -> list[Any]:
        """A rank that failed waits longer: others may be in a sum."""
        patience = self.timeout
        keys = [f"{place}/{rank}" for rank in range(self.world_size)]
        self._told.append(keys[self.rank])
        self.store.set(keys[self.rank], packed)
        seconds = 2 * patience if self._has_announced else patience
        absent = absent_from(self.store, keys, seconds, meanwhile)
        if absent:
            error = RankFailedError(
                f"rank {', '.join(absent)} did not come to {step} within {patience:g} s: it has "
                f"ended, is late, or waits in an all-reduce that rank {self.rank} takes no part in",
                remedy="Look at the output of that rank. Every rank has to do the same all-reduces "
                "in each forward. Raise distributed.timeout if it only takes longer.",
            )
            self.leave(error)
            raise error
        answers = [pickle.loads(self.store.get(key)) for key in keys]
        if len(self._told) > 2:  # all have read it
            self.store.delete_key(self._told.pop(0))
        return answers

    def _look_for_lost(self) -> None:
        if self.lost is None and self.store.check(["lost"]):
            self.lost = RankFailedError(self.store.get("lost").decode(), remedy=_REMEDY)
        self.check_lost()

    @contextmanager
    def _asking(self, step: str) -> Iterator[None]:
        """Losing the store is final."""
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
    """Meet the other ranks and set torch.distributed up, unless it is. None without torchrun or for
    one process.

    Args:
        device: ``cuda`` is the GPU of the local rank.

    Raises:
        RendezvousError, RankMismatchError, BackendError, ConfigError: as ``meet`` and
            ``Place.from_environment``.
        RankFailedError: torch.distributed could not be set up.
    """
    place = place or Place.from_environment()
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
    return Ranks(place, own, presences, store, settings.timeout, owns_group)


def _failure_of(answers: Sequence[_Answer], error: BaseException | None) -> BaseException | None:
    """The same on all ranks."""
    failed = [(found.induced, rank) for rank, found in enumerate(answers) if found.error]
    if failed:
        errors = {found.error for found in answers}
        if error is not None and len(errors) == 1:  # so all have failed
            return error
        _, rank = min(failed)
        found = answers[rank]
        message = found.error
        if not found.induced:
            message = f"rank {rank} failed in {found.step}: {message}"
        return RankFailedError(message, remedy=found.remedy or _REMEDY)
    for rank, found in enumerate(answers):
        if found.step != answers[0].step:
            return RankMismatchError(
                f"rank {rank} came to {found.step!r}, rank 0 to {answers[0].step!r}",
                remedy="Ranks have to make the same calls in the same order.",
            )
    return None


def _spoken(error: BaseException) -> str:
    text = " ".join(str(getattr(error, "message", None) or str(error) or "no message").split())
    return text if isinstance(error, RankFailedError) else f"{type(error).__name__}: {text}"


def refuse_unlike(found: Sequence[Mapping[str, Any]], remedy: str) -> None:
    """RankMismatchError where a rank differs from rank 0."""
    first = found[0]
    for rank, theirs in enumerate(found):
        unlike = []
        for name in {**first, **theirs}:
            wanted = first.get(name, "nothing")
            value = theirs.get(name, "nothing")
            if value != wanted:
                unlike.append(f"{name}: {value}, rank 0 has {wanted}")
        if unlike:
            raise RankMismatchError(
                f"rank {rank} differs from rank 0: {listed(unlike, 3)}",
                remedy=remedy,
            )
