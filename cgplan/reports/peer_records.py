"""cgplan beside other ways to run the same model: what was measured, and the names of the ways."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from cgplan.errors import ConfigError
from cgplan.reports.base import Record, Timing

OURS = "cgplan"
PEERS = ("eager", "bare", "make_graphed_callables", "reduce-overhead")


class WayRecord(Record):
    """What it takes to have one way of running ready, for all sizes that were measured.

    Attributes:
        name: ``cgplan``, or a peer.
        ready_seconds: From nothing (but kernels and libraries that the process has loaded) to the end of the last
            size's first call: warm-ups, compilation and capture included. None if it failed.
        memory_bytes: Device memory that was gone then, beyond what it had been before; on the tape, what the pools
            had reserved. Nothing else was ready at that time. None if it failed.
        failure: Why there are no figures; None where there are.
        note: What one has to know to read them.
    """

    name: str
    ready_seconds: float | None = None
    memory_bytes: int | None = None
    failure: str | None = None
    note: str | None = None


class PeerRecord(Record):
    """One way of running a batch of one size.

    Attributes:
        name: The way.
        num_tokens: The batch, unpadded; the same tensors for all ways.
        device: Time of a call when calls follow one another without waiting: of the device alone, where it takes
            longer than the host.
        latency: From an idle device until it has finished the call.
        host: Until the call returned, on an idle device.
        first_call_seconds: The first call of this size: with compilation and recording, where they happen in it; what
            was captured ahead is in the way's ``ready_seconds`` alone.
        deviation: Largest absolute difference of a result from the model's own code, both from the same inputs, state
            and seed, after all calls; None where they cannot be compared.
        not_comparable: Why; None where they can.
    """

    name: str
    num_tokens: int
    device: Timing
    latency: Timing
    host: Timing
    first_call_seconds: float
    deviation: float | None
    not_comparable: str | None = None


class PeersRecord(Record):
    """All ways, measured in one process on the same model and tensors.

    Attributes:
        seed: Of the random order.
        rounds, repeats: In each round every way runs every size, in a new order; ``repeats`` calls in all.
        capture_seconds: cgplan's own capture session, a part of its ``ready_seconds``; None if it failed.
        keys: Graphs that cgplan captured in it; its peers made one for each size.
        ways: One for each way, cgplan first.
        records: By size, in the order of ``ways``.
    """

    seed: int
    rounds: int
    repeats: int
    capture_seconds: float | None
    keys: int
    ways: tuple[WayRecord, ...]
    records: tuple[PeerRecord, ...]

    def of(self, name: str, num_tokens: int) -> PeerRecord | None:
        """One row; None where that way failed."""
        return next((r for r in self.records if (r.name, r.num_tokens) == (name, num_tokens)), None)


def check_peers(names: Iterable[str]) -> tuple[str, ...]:
    """Peers by name, each once, in the order given. Raises ConfigError for a name that there is not."""
    found = tuple(dict.fromkeys(name.strip() for name in names))
    for name in found:
        if name not in PEERS:
            near = difflib.get_close_matches(name.replace("_", "-"), PEERS, n=1) or difflib.get_close_matches(
                name, PEERS, n=1
            )
            hint = f"Did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"unknown peer {name!r} to bench against", remedy=f"{hint}Choose among {', '.join(PEERS)}."
            )
    return found
