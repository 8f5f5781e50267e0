"""How ranks meet: a TCPStore under torchrun."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from cgplan.errors import (
    BackendError,
    CgplanError,
    ConfigError,
    RankMismatchError,
    RendezvousError,
    first_line,
)

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
