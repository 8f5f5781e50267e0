"""Which graphs share a pool, and what its runners must not do at once.

Note [Sharing a pool]
    A replay overwrites what other graphs of the pool left. The pool refuses a call during another
    call or capture, and on another stream while the last one has work.

Note [Generations]
    A pool gives memory back when its last graph is freed. Where new graphs do not fit, or the pool
    is much too large, all are captured again into a new pool.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from cgplan.backends import GraphBackend
from cgplan.backends.backend import PoolMemory
from cgplan.errors import BackendError, CgplanError
from cgplan.modes import Key

PoolPolicy = Literal["shared", "per_mode", "per_graph"]


class PoolUse:
    """One call at a time, on one stream at a time.

    Attributes:
        thread: The holder of the lock, or 0.
        waits: Calls on another stream wait; else they raise.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        lock = threading.Lock()
        self.acquire, self.unlock = lock.acquire, lock.release
        self.thread = 0
        self.waits = False
        self.stream: int | None = None
        self.user = ""
        self.is_shared = is_shared
        self._holder = ""

    def release(self) -> None:
        self.thread = 0  # else this thread's next call seems nested
        self.unlock()

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Waits for other threads, as ``take``."""
        self.take(name)
        self._holder = name
        try:
            yield
        finally:
            self._holder = ""
            self.release()

    def take(self, name: str) -> None:
        """Waits for other threads. Raises CgplanError if this one holds the lock."""
        if not self.acquire(False):
            if self.thread == threading.get_ident():
                other = self._holder or self.user
                if self.is_shared and name != other:  # a lone manager has no other to name
                    raise CgplanError(
                        f"{name!r} was called while a call of {other!r} was under way, and both "
                        "capture into one pool",
                        remedy="Call members from one thread, or give each its own GraphPool.",
                    )
                raise CgplanError(
                    "the runner was called while another call was under way",
                    remedy="Call it from one thread at a time, and leave the block of staged "
                    "buffers first.",
                )
            self.acquire()
        self.thread = threading.get_ident()

    def take_stream(self, stream: int, name: str, backend: GraphBackend) -> None:
        """Raises CgplanError if another stream still has work."""
        if self.stream not in (None, stream):
            if self.waits:
                backend.synchronize()
            elif backend.is_busy(self.stream):
                remedy = "Synchronise the first stream before the second one takes over, or "
                if self.is_shared and name != self.user:
                    raise CgplanError(
                        f"{name!r} was called on another stream than {self.user!r} before, whose "
                        "work is not done, and both capture into one pool",
                        remedy=f"{remedy}give each its own GraphPool.",
                    )
                raise CgplanError(
                    "the runner was called from another stream than before, whose work is not done",
                    remedy=f"{remedy}capture a runner for each, with its own backend (as "
                    "cgplan.capture makes one).",
                )
        self.stream = stream
        self.user = name


class GraphPool:
    """A graph pool for several runners, see Note [Sharing a pool]; closing them frees it.

    Args:
        backend: All members use this very object.

    Raises BackendError for another ``backend``.
    """

    def __init__(self, backend: GraphBackend) -> None:
        if not isinstance(backend, GraphBackend):
            raise BackendError(
                f"a GraphPool on {backend!r:.100}, which is not a GraphBackend",
                remedy='Make one with cgplan.backends.select_backend("auto").',
            )
        self.backend = backend
        self.handle = backend.new_pool()
        self.use = PoolUse(is_shared=True)
        self.members: weakref.WeakSet[RunnerPools] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        return self.backend.pool_bytes(self.handle)


class RunnerPools:
    """Pools by key, or a given one alone."""

    def __init__(self, policy: PoolPolicy, backend: GraphBackend, given: GraphPool | None) -> None:
        self.policy = policy
        self.generation = 1
        self._backend = backend
        self.is_given = given is not None
        self._given = given
        self._pools: dict[Any, Any] = {} if given is None else {None: given.handle}
        self._old: list[Any] = []
        if given is not None:
            given.members.add(self)

    @property
    def is_private(self) -> bool:
        return self._given is None or len(self._given.members) == 1

    @property
    def nbytes(self) -> int:
        """Reserved bytes of all generations."""
        return self.memory().nbytes

    def memory(self) -> PoolMemory:
        return self._backend.pool_memory(*self._pools.values(), *self._old)

    @property
    def left_bytes(self) -> int:
        """Of blocks of earlier generations that tensors hold."""
        return self._backend.pool_memory(*self._old).held

    @property
    def handles(self) -> tuple[Any, ...]:
        return tuple(self._pools.values())

    def of(self, key: Key) -> Any:
        name = {"shared": None, "per_mode": key[0], "per_graph": key}[self.policy]
        if name not in self._pools:
            self._pools[name] = self._backend.new_pool()
        return self._pools[name]

    def drop(self, key: Key) -> None:
        if self.policy == "per_graph" and key in self._pools:
            self._old.append(self._pools.pop(key))
        self._forget_empty()

    def renew(self) -> None:
        """All graphs are freed: Note [Generations]."""
        self.generation += 1
        if not self.is_given:
            self._old += self._pools.values()
            self._pools = {}
            self._forget_empty()

    def close(self) -> None:
        """Leave a shared pool; all graphs are freed."""
        if self._given is not None:
            self._given.members.discard(self)

    def _forget_empty(self) -> None:
        self._old = [pool for pool in self._old if self._backend.pool_bytes(pool)]
