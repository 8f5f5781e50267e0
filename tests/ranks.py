"""Several real processes for one test: forked from a server that has imported torch, each with a hard end."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any

from cgplan.errors import CgplanError

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "cgplan.distributed",
        "cgplan.runner.session",
        "cgplan.cli.capture",
        "rank_programs",
    ]
)
HANG = "hang"


@dataclass
class Outcome:
    """The end of one rank: the result of its function, its error, or ``HANG``."""

    exit_code: int | None = None
    value: Any = None
    error: str = ""
    message: str = ""
    seconds: float = 0.0
    trace: str = field(default="", repr=False)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def environment(rank: int, world_size: int, port: int, patience: float) -> dict[str, str]:
    """As torchrun sets it, but for the agent's store: rank 0 keeps it."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "RANKS_TIMEOUT": str(patience),
    }  # fmt: skip


def _main(
    sender: Connection,
    given: dict[str, str],
    target: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> None:
    os.environ.update(given)
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # sessions collect garbage, and torch's modules would take a third of a second each time
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo's messages about lost peers
    try:
        sender.send(("value", target(int(given["RANK"]), *args, **kwargs)))
    except CgplanError as error:
        sender.send(("error", type(error).__name__, error.message, traceback.format_exc()))
        os._exit(error.exit_code)
    except BaseException as error:
        sender.send(("error", type(error).__name__, str(error), traceback.format_exc()))
        os._exit(1)
    os._exit(0)  # as quickly as a crash: memory that is left then is a leak


def run_ranks(
    world_size: int,
    target: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    patience: float = 10.0,
    timeout: float = 40.0,
    absent: tuple[int, ...] = (),
) -> list[Outcome]:
    """Run ``target(rank, *args, **kwargs)`` in so many processes, and wait for all of them.

    Args:
        patience: Seconds that the ranks wait for one another.
        timeout: Seconds after which a process that still runs is killed and counts as hanging.
        absent: Ranks that are never started.
    """
    port, start = free_port(), time.monotonic()
    outcomes = [Outcome() for _ in range(world_size)]
    started = {}
    for rank in range(world_size):
        if rank in absent:
            continue
        receiver, sender = _context.Pipe(duplex=False)
        given = environment(rank, world_size, port, patience)
        process = _context.Process(target=_main, args=(sender, given, target, args, dict(kwargs)))
        process.start()
        sender.close()
        started[rank] = (process, receiver)
    for rank, (process, receiver) in started.items():
        outcome = outcomes[rank]
        _receive(receiver, outcome, max(0.0, start + timeout - time.monotonic()))
        process.join(max(0.1, start + timeout - time.monotonic()))
        outcome.seconds = time.monotonic() - start
        if process.is_alive():
            outcome.error = HANG
            process.kill()
            process.join()
        outcome.exit_code = process.exitcode
        process.close()
    return outcomes


def _receive(receiver: Connection, outcome: Outcome, patience: float) -> None:
    try:
        if not receiver.poll(patience):
            return
        kind, *said = receiver.recv()
    except (EOFError, OSError):
        return  # killed
    if kind == "value":
        outcome.value = said[0]
    else:
        outcome.error, outcome.message, outcome.trace = said


def values(outcomes: list[Outcome]) -> list[Any]:
    """The result of every rank; fails with the traceback of the first that did not."""
    for rank, outcome in enumerate(outcomes):
        if outcome.exit_code is None:  # not started
            continue
        assert not outcome.error, (
            f"rank {rank}: {outcome.error}: {outcome.message}\n{outcome.trace}"
        )
        assert outcome.exit_code == 0, f"rank {rank} ended with {outcome.exit_code}"
    return [outcome.value for outcome in outcomes]
