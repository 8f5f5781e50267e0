"""What graphs cost: device memory and start-up time of a list of keys, before anything is captured."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from cgplan.config import Config
from cgplan.modes import CUDAGraphMode, Key


@dataclass(frozen=True, slots=True)
class KeyCost:
    """What one key adds when it is captured after those before it.

    Attributes:
        pool_bytes: Growth of the graph pool.
        driver_bytes: Device memory that the driver takes for its nodes (0 on the tape).
        seconds: Warm-ups and capture.
    """

    pool_bytes: int
    driver_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PlanCost:
    """What a list of keys costs.

    Attributes:
        keys: Of each key, in capture order.
        static_bytes: Static buffers for the largest key, which all keys share.
        workspace_bytes: Library workspaces and what else the first graph brings with it, once.
    """

    keys: tuple[KeyCost, ...]
    static_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        """Device memory of all of it."""
        return self.static_bytes + self.workspace_bytes + sum(k.pool_bytes + k.driver_bytes for k in self.keys)

    @property
    def seconds(self) -> float:
        """Start-up time of all of it."""
        return sum(k.seconds for k in self.keys)


class GraphCosts(ABC):
    """Predicts what keys cost. The pool is shared, so that a key costs what it adds to those captured before it.

    The planner uses the parts: memory of a set of keys = once(largest key of each mode) + sum of ``each``.

    Attributes:
        source: Where the figures come from, in words; reports show it.
        estimated: Whether nothing of it was measured on the device.
        notes: Why the figures may not be those of the configuration that is planned for.
    """

    source: str
    estimated: bool
    notes: tuple[str, ...] = ()

    @abstractmethod
    def pool_bytes(self, mode: CUDAGraphMode, num_tokens: int) -> int:
        """Bytes of a pool into which graphs of that mode up to that size have been captured, largest first.

        Nondecreasing in the size. The graphs of several modes share one pool, so it has the largest of their bytes.
        """

    @abstractmethod
    def static_bytes(self, num_tokens: int) -> int:
        """Bytes of the static buffers, where ``num_tokens`` is the largest capture size; exact."""

    @abstractmethod
    def driver_bytes(self, key: Key) -> int:
        """Device memory that the driver takes for one key, on top of the pool."""

    @abstractmethod
    def seconds(self, key: Key) -> float:
        """Warm-ups and capture of one key."""

    @property
    @abstractmethod
    def workspace_bytes(self) -> int:
        """What the first capture brings with it, once: library workspaces and the like."""

    @property
    def once_seconds(self) -> float:
        """What the first capture takes longer than when it is made again: tracing, loading kernels."""
        return 0.0

    def of(self, keys: Sequence[Key]) -> PlanCost:
        """Cost of capturing these keys, in this order, into one pool; the first one's seconds include what is spent
        once.
        """
        held, costs = 0, list[KeyCost]()
        for mode, descriptor in keys:
            pool = max(held, self.pool_bytes(mode, descriptor.num_tokens))
            seconds = self.seconds((mode, descriptor)) + (0.0 if costs else self.once_seconds)
            costs.append(KeyCost(pool - held, self.driver_bytes((mode, descriptor)), seconds))
            held = pool
        static = self.static_bytes(max(descriptor.num_tokens for _, descriptor in keys)) if keys else 0
        return PlanCost(tuple(costs), static, self.workspace_bytes if keys else 0)


def static_bytes(config: Config, num_tokens: int) -> int:
    """Bytes of the static buffers of all inputs and metadata, where ``num_tokens`` is the largest capture size; exact.

    The arithmetic of ``graphs.buffers.StaticBuffers``, without allocating them.
    """
    reqs = min(num_tokens, config.scheduler.max_num_seqs)
    specs = (*config.inputs.values(), *config.metadata.values())
    return sum(_itemsize(spec.dtype) * prod(dim.size(num_tokens, reqs) for dim in spec.dims) for spec in specs)


def _itemsize(dtype: str) -> int:
    """Bytes of an element; the first number in a dtype's name counts bits."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1  # bool


def representative_keys(keys: Sequence[Key], max_num_seqs: int) -> tuple[Key, ...]:
    """The keys that tell what the others cost: of each mode, without and with LoRA adapters, the largest size and a
    small one, and between them the largest in which every token can be a request of its own.

    A small one is not of size 1, if there is another: kernels for a single row differ from those for more.

    Args:
        keys: All keys, in capture order; the result is in that order.
        max_num_seqs: Requests of a batch at most: where it is met, costs bend.
    """
    lanes: dict[tuple[CUDAGraphMode, bool], dict[int, Key]] = {}
    for key in sorted(keys, key=lambda key: key[1].num_active_loras):  # of the LoRA cases, the one for the most stays
        lanes.setdefault((key[0], key[1].has_lora), {})[key[1].num_tokens] = key
    chosen = set()
    for by_size in lanes.values():
        small = min((size for size in by_size if size > 1), default=1)
        chosen |= {by_size[max(by_size)], by_size[small]}
        chosen |= {by_size[size] for size in [max((s for s in by_size if s <= max_num_seqs), default=small)]}
    return tuple(key for key in keys if key in chosen)
