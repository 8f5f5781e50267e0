"""Costs of graphs: device memory and start-up time, before anything is captured."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, prod

from cgplan.config import Config
from cgplan.config.values import Record
from cgplan.modes import CUDAGraphMode, Key


@dataclass(frozen=True)
class KeyCost:
    """The cost that one key adds when it is captured after those before it.

    Attributes:
        pool_bytes: Growth of the graph pool.
        driver_bytes: The driver's memory for its nodes, 0 on the tape.
        seconds: Of warm-ups and the capture.
    """

    pool_bytes: int
    driver_bytes: int
    seconds: float


class Predicted(Record):
    """The predicted cost of capturing a list of keys.

    Attributes:
        keys: In capture order.
        static_bytes: Of the static buffers, which all keys share.
        workspace_bytes: What the first graph takes once: library workspaces and more.
        estimated: Whether no figure was measured on the device.
        notes: Why the configuration that is planned for may have other figures.
        extrapolated: Whether a graph is larger than those measured.
    """

    keys: tuple[KeyCost, ...]
    static_bytes: int
    workspace_bytes: int
    source: str
    estimated: bool
    notes: tuple[str, ...] = ()
    extrapolated: bool = False

    @property
    def pool_bytes(self) -> int:
        return sum(cost.pool_bytes for cost in self.keys)

    @property
    def driver_bytes(self) -> int:
        return sum(cost.driver_bytes for cost in self.keys)

    @property
    def total_bytes(self) -> int:
        return self.static_bytes + self.workspace_bytes + self.pool_bytes + self.driver_bytes

    @property
    def seconds(self) -> float:
        return sum(cost.seconds for cost in self.keys)


class GraphCosts(ABC):
    """Predicts the cost of keys that share one pool.

    Attributes:
        source, estimated, notes, workspace_bytes: As in ``Predicted``.
        config: Its inputs are in the static buffers.
        once_seconds: Extra time of the first capture: tracing, loading kernels.
        largest: Elements of the largest graph whose cost is not extrapolated.
    """

    config: Config
    source: str
    estimated: bool
    notes: tuple[str, ...] = ()
    workspace_bytes: int = 0
    once_seconds: float = 0.0
    largest: float = inf

    @abstractmethod
    def pool_bytes(
        self,
        mode: CUDAGraphMode,
        num_tokens: int,
    ) -> int:
        """Bytes of a pool after captures of that mode up to that size (with `dims` the elements of
        a box), largest first. Nondecreasing in the size. A pool of several modes has the largest of
        their bytes.
        """

    def static_bytes(
        self,
        num_tokens: int,
        sizes: tuple[int, ...] = (),
    ) -> int:
        """As the function ``static_bytes``."""
        return static_bytes(self.config, num_tokens, sizes)

    @abstractmethod
    def driver_bytes(self, key: Key) -> int:
        """The driver's memory for one key."""

    @abstractmethod
    def seconds(self, key: Key) -> float:
        """Warm-ups and capture of one key."""

    def falls(
        self,
        mode: CUDAGraphMode,
        sizes: Iterable[int],
    ) -> bool:
        """Whether a larger one of these sizes has a smaller pool, against the contract."""
        held = 0
        for size in sizes:
            pool = self.pool_bytes(mode, size)
            if pool < held:
                return True
            held = pool
        return False

    def of(self, keys: Sequence[Key]) -> Predicted:
        """Cost of capturing these keys, in this order, into one pool."""
        held = 0
        costs: list[KeyCost] = []
        extrapolated = False
        seconds = self.once_seconds
        for key in keys:
            mode, descriptor = key
            extrapolated |= descriptor.elements > self.largest
            pool = max(held, self.pool_bytes(mode, descriptor.elements))
            seconds += self.seconds(key)
            driver = self.driver_bytes(key)
            costs.append(KeyCost(pool - held, driver, seconds))
            held = pool
            seconds = 0.0
        return Predicted(
            keys=tuple(costs),
            static_bytes=sum(
                self.static_bytes(most, sizes) for sizes, most in widest(keys).items()
            ),
            workspace_bytes=self.workspace_bytes if keys else 0,
            source=self.source,
            estimated=self.estimated,
            notes=self.notes,
            extrapolated=extrapolated,
        )


def widest(
    keys: Iterable[Key],
) -> dict[tuple[int, ...], int]:
    """The most tokens with each ``sizes``, for which static buffers are made."""
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
    """Bytes of the static buffers of all inputs and metadata; exact, as
    ``buffers.static.StaticBuffers`` allocates them.

    ``num_tokens`` is the largest capture size with ``sizes`` in the dimensions after the first.
    """
    reqs = min(num_tokens, config.scheduler.max_num_seqs)
    total = 0
    for spec in config.tensors_at(sizes).values():
        bits = re.search(r"\d+", spec.dtype)  # bool has none
        itemsize = int(bits[0]) // 8 if bits else 1
        total += itemsize * prod(extent.size(num_tokens, reqs) for extent in spec.extents)
    return total


def representative_keys(
    keys: Sequence[Key],
    max_num_seqs: int,
) -> tuple[Key, ...]:
    """Keys whose costs tell those of the others, in capture order.

    Of each mode, without and with LoRA adapters: the largest size, the largest in which every token
    can be a request, because costs bend there, and the smallest. Kernels for a single row differ
    from others, so it is above 1 if possible.
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
        small = min((size for size in by_size if size > 1), default=1)
        bend = max((size for size in by_size if size <= max_num_seqs), default=small)
        chosen.update(by_size[size] for size in (small, bend, max(by_size)))
    return tuple(key for key in keys if key in chosen)
