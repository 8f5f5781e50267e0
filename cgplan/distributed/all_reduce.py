"""The operator ``cgplan::all_reduce`` (docs/distributed.md), and its implementations.
``cgplan::all_reduce_row`` inside it is one node or step.

Note [Unfinished sums]
    Where a rank left a sum, the next one would take the others' parts for its own. On the CPU it
    does no other until `begin_pass` on all ranks, which makes a new group for gloo. On a GPU
    `abort`, or their bound, ends waits of custom kernels. NCCL's end only with its communicator,
    whose kernels graphs may hold: torch's watchdog ends the process.
"""

from __future__ import annotations

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from cgplan.backends import GraphBackend
from cgplan.backends.context import define_operator
from cgplan.backends.host_sync import is_probing
from cgplan.captures.rank_sync import PeerMemory
from cgplan.distributed.ranks import Ranks
from cgplan.distributed.registry import Registration
from cgplan.errors import AllReduceError, DistributedError, first_line

logger = logging.getLogger(__name__)

GLOO_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex32,
    torch.complex64,
    torch.complex128,
)

_numbers = itertools.count(1)
_live: WeakValueDictionary[int, AllReduce] = WeakValueDictionary()


class AllReduce(ABC):
    """It owns ``fallback``, which sums what it cannot.

    Attributes:
        name: As in ``compilation.all_reduce``.
        number: The operator's ``group``.
    """

    __graph_memory__ = True

    name: str

    def __init__(
        self, ranks: Ranks, backend: GraphBackend, fallback: AllReduce | None = None
    ) -> None:
        self.ranks = ranks
        self.rank = ranks.rank
        self.world_size = ranks.world_size
        self.backend = backend
        self.number = next(_numbers)
        self.is_closed = False
        self._fallback = fallback
        self._logged = set[str]()
        self._row = torch.zeros(ranks.world_size, dtype=torch.int64, device=backend.device)
        self._is_unfinished = False  # see Note [Unfinished sums]
        _live[self.number] = self

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.cgplan.all_reduce(x, self.number)
        return result

    def reduce(self, x: Tensor) -> Tensor:
        reason = self.why_not(x)
        if reason and self._fallback is not None:
            if self.rank == 0 and reason not in self._logged:
                logger.warning(
                    "%s all-reduce: %s; %s does it", self.name, reason, self._fallback.name
                )
            self._logged.add(reason)
            return self._fallback.reduce(x)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.numel():
            source, row = self.placed(x.contiguous())
            torch.ops.cgplan.all_reduce_row(source, out, row, self.number)
        return out

    def why_not(self, x: Tensor) -> str:  # noqa: ARG002
        """Why ``fallback`` sums it; the same on all ranks."""
        return ""

    def peer_memory(self) -> PeerMemory:
        return PeerMemory()

    def placed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Where other ranks can read it, and its table row."""
        return x, self._row

    @abstractmethod
    def run(self, x: Tensor, out: Tensor, row: Tensor) -> None:
        """The body of ``cgplan::all_reduce_row``."""

    @contextmanager
    def whole_sum(self) -> Iterator[None]:
        """A sum on the CPU. Raises AllReduceError, or as ``Ranks.check``, if an earlier one was
        left.
        """
        if self._is_unfinished:
            self.ranks.check()
            raise AllReduceError(
                f"rank {self.rank} has left an earlier all-reduce before its end",
                remedy="Capture again on all ranks, or start them again.",
            )
        self._is_unfinished = True
        yield
        self._is_unfinished = False

    def begin_pass(self) -> None:
        """Before captures, on all ranks."""
        if self._fallback is not None:
            self._fallback.begin_pass()

    def end_pass(self) -> Registration:
        """After captures, on all ranks. Raises as GraphBufferRegistry.register."""
        self.ranks.agree("the capture pass")
        return Registration()

    def release(self) -> None:  # noqa: B027
        """Before graphs are freed, on all ranks."""

    def abort(self) -> None:  # noqa: B027
        """End waits of kernels; sums are wrong until ``begin_pass``."""

    def check(self) -> None:  # noqa: B027
        """Raise AllReduceError if a kernel gave up. Waits for the device."""

    @property
    def is_read(self) -> bool:
        """Whether an open runner's graphs sum by it."""
        return False

    def close(self) -> None:
        """Graphs that reduce must be gone."""
        self.is_closed = True
        if self._fallback is not None:
            self._fallback.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.ranks.leave(error)
        self.close()


class CollectiveAllReduce(AllReduce):
    """NCCL, in graphs too, or gloo."""

    name = "nccl"
    _group: Any = None  # torch's own

    def reduce(self, x: Tensor) -> Tensor:
        """Raises AllReduceError for a dtype that gloo does not sum."""
        if x.device.type == "cpu" and x.dtype not in GLOO_DTYPES:
            raise AllReduceError(
                f"gloo, torch's all-reduce on the CPU, cannot sum {x.dtype}",
                remedy="Sum .to(torch.float32), say, and convert the result.",
            )
        return super().reduce(x)

    def run(self, x: Tensor, out: Tensor, row: Tensor) -> None:  # noqa: ARG002
        """Raises RankFailedError on the CPU for a lost rank, AllReduceError for other failures."""
        out.copy_(x)
        on_cpu = x.device.type == "cpu"
        with self.whole_sum() if on_cpu else nullcontext():
            try:
                dist.all_reduce(out, group=self._group)
            except RuntimeError as failure:
                self.ranks.check()
                error = AllReduceError(
                    f"torch's all-reduce failed on rank {self.rank}: {first_line(failure)}",
                    remedy="Every rank has to make the same calls in the same order; look at the "
                    "output of the others.",
                )
                if on_cpu:
                    self.ranks.leave(error)
                raise error from failure

    def begin_pass(self) -> None:
        if self.backend.device.type != "cpu":
            return
        if any(self.ranks.agree("torch's groups", value=self._is_unfinished)):
            with self.ranks.step("a new group of torch's"):
                self._group = self.ranks.new_group()
                self._is_unfinished = False


def _all_reduce(x: Tensor, group: int) -> Tensor:
    found = _at(group)
    # a look runs on one rank alone
    if is_probing() and not found.backend.is_capturing():
        return x.clone()
    return found.reduce(x)


def _all_reduce_row(x: Tensor, out: Tensor, row: Tensor, group: int) -> None:
    found = _at(group)
    # a tape loses results
    if x.device.type == "cpu" and found.backend.is_capturing():
        out.copy_(x)
    else:
        found.run(x, out, row)


def _at(group: int) -> AllReduce:
    found = _live.get(group)
    if found is None or found.is_closed or found.ranks.is_closed:
        raise DistributedError(
            f"all-reduce {group} is closed",
            remedy="Keep the ranks open as long as the model is used.",
        )
    return found


define_operator(
    "all_reduce(Tensor x, int group) -> Tensor", _all_reduce, lambda x, _: torch.empty_like(x)
)
_ROW_SCHEMA = "all_reduce_row(Tensor x, Tensor(a!) out, Tensor row, int group) -> ()"
define_operator(_ROW_SCHEMA, _all_reduce_row, lambda *_: None)
