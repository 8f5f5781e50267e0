"""Costs of graphs: device memory and start-up time of a list of keys, before anything is
captured.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from pydantic import BaseModel, ConfigDict

from cgplan.config import Config
from cgplan.modes import CUDAGraphMode, Key


class Record(BaseModel):
    """A frozen value that refuses fields it does not know."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        defer_build=True,
    )


@dataclass(frozen=True)
class KeyCost:
    """The cost that one key adds when it is captured after those before it.

    Attributes:
        pool_bytes: Growth of the graph pool.
        driver_bytes: Device memory that the driver takes for its nodes, 0 on the tape.
        seconds: Of warm-ups and the capture.
    """

    pool_bytes: int
    driver_bytes: int
    seconds: float


class Predicted(Record):
    """The predicted cost of capturing a list of keys.

    Attributes:
        keys: Of each key, in capture order.
        static_bytes: Static buffers for the largest key, which all keys share.
        workspace_bytes: Library workspaces and other memory that the first graph takes once.
        estimated: Whether no figure was measured on the device.
        notes: Why the figures may not be those of the configuration that is planned for.
    """

    keys: tuple[KeyCost, ...]
    static_bytes: int
    workspace_bytes: int
    source: str
    estimated: bool
    notes: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        total = self.static_bytes + self.workspace_bytes
        for cost in self.keys:
            total += cost.pool_bytes + cost.driver_bytes
        return total

    @property
    def seconds(self) -> float:
        return sum(cost.seconds for cost in self.keys)


class GraphCosts(ABC):
    """Predicts the cost of keys. They share one pool: a key costs the memory that it adds to those
    captured before it.

    Attributes:
        source, estimated, notes, workspace_bytes: As in the predictions.
        config: Its inputs are what static buffers hold.
        once_seconds: Time that the first capture takes longer than a second one would: tracing,
            loading kernels.
    """

    config: Config
    source: str
    estimated: bool
    notes: tuple[str, ...] = ()
    workspace_bytes: int = 0
    once_seconds: float = 0.0

    @abstractmethod
    def pool_bytes(self, mode: CUDAGraphMode, num_tokens: int) -> int:
        """Bytes of a pool into which graphs of that mode up to that size (with `dims` the elements
        of a box) have been captured, largest first.

        Nondecreasing in the size. The graphs of several modes share one pool, so it has the largest
        of their bytes.
        """

    def static_bytes(
        self,
        num_tokens: int,
        sizes: tuple[int, ...] = (),
    ) -> int:
        """Bytes of the static buffers, where ``num_tokens`` is the largest size with such others;
        exact.
        """
        return static_bytes(self.config, num_tokens, sizes)

    @abstractmethod
    def driver_bytes(self, key: Key) -> int:
        """Device memory that the driver takes for one key."""

    @abstractmethod
    def seconds(self, key: Key) -> float:
        """Warm-ups and capture of one key."""

    def of(self, keys: Sequence[Key]) -> Predicted:
        """Cost of capturing these keys, in this order, into one pool. ``once_seconds`` count for
        the first one.
        """
        held = 0
        costs: list[KeyCost] = []
        seconds = self.once_seconds
        for key in keys:
            mode, descriptor = key
            pool = max(held, self.pool_bytes(mode, descriptor.elements))
            seconds += self.seconds(key)
            driver = self.driver_bytes(key)
            costs.append(KeyCost(pool - held, driver, seconds))
            held, seconds = pool, 0.0
        static = 0
        for sizes, tokens in widest(keys).items():
            static += self.static_bytes(tokens, sizes)
        return Predicted(
            keys=tuple(costs),
            static_bytes=static,
            workspace_bytes=self.workspace_bytes if keys else 0,
            source=self.source,
            estimated=self.estimated,
            notes=self.notes,
        )


def widest(keys: Iterable[Key]) -> dict[tuple[int, ...], int]:
    """The most tokens with each ``sizes``: what static buffers are for."""
    found: dict[tuple[int, ...], int] = {}
    for _, descriptor in keys:
        most = found.get(descriptor.sizes, 0)
        found[descriptor.sizes] = max(most, descriptor.num_tokens)
    return found


def static_bytes(
    config: Config,
    num_tokens: int,
    sizes: tuple[int, ...] = (),
) -> int:
    """Bytes of the static buffers of all inputs and metadata, where ``num_tokens`` is the largest
    capture size with such ``sizes`` in the dimensions behind the first; exact.

    The arithmetic of ``buffers.static.StaticBuffers``, without allocating them.
    """
    reqs = min(num_tokens, config.scheduler.max_num_seqs)
    total = 0
    for spec in config.tensors_at(sizes).values():
        bits = re.search(r"\d+", spec.dtype)  # the first number in a dtype's name; bool has none
        itemsize = int(bits[0]) // 8 if bits else 1
        lengths = [extent.size(num_tokens, reqs) for extent in spec.extents]
        total += itemsize * prod(lengths)
    return total


def representative_keys(keys: Sequence[Key], max_num_seqs: int) -> tuple[Key, ...]:
    """Keys whose costs tell those of the others, in capture order.

    Of each mode, without and with LoRA adapters: the largest size, a small one, and between them
    the largest in which every token can be a request, because costs bend there. The small one is
    not of size 1 if there is another: kernels for a single row differ from those for more.
    """
    lanes: dict[tuple[CUDAGraphMode, bool], dict[int, Key]] = {}
    # of the LoRA cases, the one for the most stays
    for key in sorted(keys, key=lambda key: key[1].num_active_loras):
        mode, descriptor = key
        lane = mode, descriptor.has_lora
        by_size = lanes.setdefault(lane, {})
        by_size[descriptor.elements] = key
    chosen: set[Key] = set()
    for by_size in lanes.values():
        several = [size for size in by_size if size > 1]
        small = min(several, default=1)
        one_token_each = [size for size in by_size if size <= max_num_seqs]
        bend = max(one_token_each, default=small)
        for size in (small, bend, max(by_size)):
            chosen.add(by_size[size])
    return tuple(key for key in keys if key in chosen)
