"""How ranks meet: torch's TCPStore under torchrun's environment, and who is missing if one does not come."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from cgplan.distributed.watch import Process, first_line
from cgplan.errors import BackendError, ConfigError, RankMismatchError, RendezvousError

# By where ranks meet. A process may open its ranks several times, one after another: each time with other keys, in the
# store that it keeps, if it does, until it ends.
_meetings: Counter[tuple[str, int, int]] = Counter()
_kept: dict[tuple[str, int, int], Any] = {}

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's place among the others, as torchrun says it.

    Attributes:
        rank, world_size: From 0; and how many there are.
        local_rank: Number among the ranks of one machine.
        address, port: Where the store listens.
        agent_store: Whether torchrun's agent keeps the store; else rank 0 does.
        attempt: How often torchrun has started the ranks anew.
    """

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    agent_store: bool = False
    attempt: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Place | None:
        """From torchrun's variables; None outside of torchrun. Raises ConfigError where they make no sense."""
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return None
        missing = [name for name in _VARIABLES if name not in environment]
        try:
            place = cls(
                rank=int(environment["RANK"]),
                world_size=int(environment["WORLD_SIZE"]),
                local_rank=int(environment.get("LOCAL_RANK", environment["RANK"])),
                address=environment.get("MASTER_ADDR", ""),
                port=int(environment.get("MASTER_PORT", "0")),
                agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
                attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
            )
        except ValueError as error:
            raise ConfigError(f"the environment of a rank makes no sense: {error}", remedy="Use torchrun.") from None
        if missing or not 0 <= place.rank < place.world_size:
            names = " and ".join(missing)
            what = f"{names} {'are' if len(missing) > 1 else 'is'} not set" if missing else "no such rank"
            raise ConfigError(
                f"rank {place.rank} of {place.world_size}: {what}",
                remedy="Start the ranks with torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.",
            )
        return place


@dataclass(frozen=True, slots=True)
class Presence:
    """What a rank says when it comes.

    Attributes:
        process: Its process.
        host: Its machine.
        device: ``cpu``, or the GPU by its unique number.
        problem: Why it has no device; empty where it has one.
    """

    process: Process
    host: str
    device: str
    problem: str = ""

    @classmethod
    def of(cls, place: Place, device: str) -> tuple[Presence, torch.device]:
        """This rank on the device that the configuration asks for: its own GPU, by its local rank, or the CPU."""
        wanted = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
        here = (Process.this(), socket.gethostname())
        if wanted == "cpu":
            return cls(*here, "cpu"), torch.device("cpu")
        index = int(wanted.partition(":")[2] or place.local_rank)
        count = torch.cuda.device_count()
        if index >= count:
            problem = f"has no GPU: it wants cuda:{index}, and torch sees {count}"
            return cls(*here, "none", problem), torch.device("cpu")
        return cls(*here, str(torch.cuda.get_device_properties(index).uuid)), torch.device("cuda", index)


def connect(place: Place, timeout: float) -> tuple[Any, Any]:
    """Two connections to the common store: for the steps, and for the watch. Raises RendezvousError."""
    hosts = place.rank == 0 and not place.agent_store
    prefix, deadline = f"cgplan/{place.attempt}/{_meetings[_where(place)]}", time.monotonic() + timeout
    try:
        store = _kept.get(_where(place)) or _connection(place, hosts, timeout, deadline)
        if hosts:
            _kept[_where(place)] = store
        beside = _connection(place, False, timeout, deadline)
    except (RuntimeError, OSError) as error:
        keeper = "torchrun's agent" if place.agent_store else "rank 0"
        what = "cannot listen" if hosts else f"found nobody: {keeper}, which keeps the store, did not come"
        raise RendezvousError(
            f"rank {place.rank} {what} at {place.address}:{place.port} within {timeout:g} s: {first_line(error)}",
            remedy="Check that all ranks are started with the same MASTER_ADDR and MASTER_PORT, and that the port is "
            "free.",
        ) from error
    return PrefixStore(prefix, store), PrefixStore(prefix, beside)


def _connection(place: Place, hosts: bool, timeout: float, deadline: float) -> Any:
    """One TCPStore. It is tried again and again for a short time, because its own retries go far beyond a timeout; and
    not before somebody listens, because it prints what it does in vain.
    """
    while True:
        patience = timedelta(seconds=timeout if hosts else min(5.0, timeout))
        try:
            if not hosts:
                socket.create_connection((place.address, place.port), min(5.0, timeout)).close()
            store = TCPStore(place.address, place.port, None, hosts, patience, wait_for_workers=False)
        except (RuntimeError, OSError):
            if hosts or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            store.set_timeout(timedelta(seconds=timeout))
            return store


def meet(store: Any, place: Place, presence: Presence, timeout: float) -> list[Presence]:
    """What every rank says of itself, once all have come.

    Raises:
        RendezvousError: a rank did not come within the timeout, or came twice.
        BackendError, RankMismatchError: a rank has no GPU, or two have the same; on all ranks alike.
    """
    try:
        found = _gather(store, place, presence, timeout)
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {place.rank} lost the store at {place.address}:{place.port} while it waited for the others: "
            f"{first_line(error)}",
            remedy="Look at what the other ranks printed.",
        ) from error
    _meetings[_where(place)] += 1
    check_devices(found)
    return found


def _where(place: Place) -> tuple[str, int, int]:
    return place.address, place.port, place.attempt


def _gather(store: Any, place: Place, presence: Presence, timeout: float) -> list[Presence]:
    if store.add(f"came/{place.rank}", 1) > 1:
        raise RendezvousError(
            f"rank {place.rank} came twice to {place.address}:{place.port}",
            remedy="Another run uses the same port, or two processes were given the same RANK.",
        )
    store.set(f"here/{place.rank}", json.dumps(asdict(presence)))
    keys, deadline = [f"here/{rank}" for rank in range(place.world_size)], time.monotonic() + timeout
    while not store.check(keys):
        if time.monotonic() > deadline:
            absent = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
            store.compare_set("absent", "", absent)
        if store.check(["absent"]):  # the first whose patience is over speaks for all
            _give_up(store, place, keys, timeout)
        time.sleep(0.01)
    found = []
    for key in keys:
        said = json.loads(store.get(key))
        found.append(Presence(**{**said, "process": Process(**said["process"])}))
    return found


def _give_up(store: Any, place: Place, keys: list[str], timeout: float) -> NoReturn:
    """Raise that a rank is missing; whoever keeps the store stays until the others have read it."""
    absent = store.get("absent").decode()
    store.set(f"gave up/{place.rank}", "")
    if place.rank == 0:
        here = [f"gave up/{rank}" for rank, key in enumerate(keys) if store.check([key])]
        deadline = time.monotonic() + 2
        while not store.check(here) and time.monotonic() < deadline:
            time.sleep(0.01)
    raise RendezvousError(
        f"rank {absent} of {place.world_size} did not come within {timeout:g} s",
        remedy="Look at what that rank printed; raise distributed.timeout if it only starts slowly.",
    )


def check_devices(found: list[Presence]) -> None:
    """Each rank has a device of its own, all of one kind. Raises BackendError and RankMismatchError."""
    for rank, presence in enumerate(found):
        if presence.problem:
            raise BackendError(
                f"rank {rank} on {presence.host} {presence.problem}",
                remedy="Start as many ranks on a machine as it has GPUs (--nproc-per-node), check "
                "CUDA_VISIBLE_DEVICES, or set device: cpu.",
            )
    kinds = {presence.device == "cpu" for presence in found}
    if len(kinds) > 1:
        odd = next(rank for rank, p in enumerate(found) if (p.device == "cpu") != (found[0].device == "cpu"))
        raise RankMismatchError(
            f"rank {odd} runs on {_kind(found[odd])}, rank 0 on {_kind(found[0])}",
            remedy="Set device: cpu or device: cuda for all ranks.",
        )
    places: dict[tuple[str, str], int] = {}
    for rank, presence in enumerate(found):
        first = places.setdefault((presence.host, presence.device), rank)
        if presence.device != "cpu" and first != rank:
            raise BackendError(
                f"ranks {first} and {rank} are on one GPU ({presence.device}) of {presence.host}",
                remedy="Leave device: cuda without a number, so that each rank takes the GPU of its local rank; check "
                "CUDA_VISIBLE_DEVICES.",
            )


def _kind(presence: Presence) -> str:
    return "the CPU" if presence.device == "cpu" else "a GPU"


__all__ = ["Place", "Presence", "check_devices", "connect", "meet"]
