"""The operator ``cgplan::all_reduce`` (docs/distributed.md), its implementations, and the choice
among them. ``cgplan::all_reduce_row`` inside it is one node or step.

Note [Unfinished sums]
    Where a rank left a sum, the next one would take the others' parts for its own. On the CPU it
    does no other until `begin_pass` on all ranks, which makes a new group for gloo. On a GPU
    `abort`, or their bound, ends waits of custom kernels. NCCL's end only with its communicator,
    whose kernels graphs may hold: torch's watchdog ends the process.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from cgplan.backends import GraphBackend
from cgplan.backends.context import current_forward_context, define_operator
from cgplan.backends.host_sync import is_probing
from cgplan.captures.model_graphs import PeerMemory
from cgplan.config import Config, DistributedConfig
from cgplan.distributed.ranks import Ranks, refuse_unlike
from cgplan.distributed.registry import SUM_ALIKE, GraphBufferRegistry, Registration
from cgplan.distributed.transports import (
    CudaIpcTransport,
    MemoryTransport,
    SharedMemoryTransport,
    uses_expandable_segments,
)
from cgplan.errors import AllReduceError, DistributedError, RegistrationError, first_line
from cgplan.modes import CUDAGraphMode
from cgplan.units import format_bytes

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
        if reason and self._fallback:
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
        if self._fallback:
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
        if self._fallback:
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


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# a load; inputs are aligned to it
PACK_BYTES = 16
# larger messages are two-shot
ONE_SHOT_BYTES = {
    2: 1 << 20,
    4: 512 << 10,
    8: 256 << 10,
}

_MOST_BLOCKS = 64  # with signals of their own
_WARPS = 8
_BLOCK_BYTES = _WARPS * 32 * PACK_BYTES
# a look takes about a microsecond; kernels have no clock
_LOOKS_PER_SECOND = 1 << 20


class CustomAllReduce(AllReduce):
    """Sums over registered buffers; owns its transport."""

    name = "custom"

    def __init__(
        self,
        ranks: Ranks,
        backend: GraphBackend,
        transport: MemoryTransport,
        fallback: AllReduce,
        settings: DistributedConfig,
    ) -> None:
        super().__init__(ranks, backend, fallback)
        self._transport = transport
        self._max_bytes = settings.all_reduce_max_size
        self.registry = GraphBufferRegistry(ranks, transport, backend.device, settings.table_rows)
        self._staging = transport.empty(self._max_bytes)
        row = self.registry.open_block("staging buffers", self._staging)
        self._staging_row = torch.tensor(row, dtype=torch.int64, device=backend.device)

    @abstractmethod
    def reset(self) -> None:
        """New signals; no rank is in a sum."""

    def why_not(self, x: Tensor) -> str:
        if x.dtype not in DTYPES:
            return f"{x.dtype} is none of float32, float16, bfloat16"
        if x.nbytes > self._max_bytes:
            return (
                "a tensor has more than distributed.all_reduce_max_size, "
                f"{format_bytes(self._max_bytes)}"
            )
        if x.nbytes % PACK_BYTES:
            return f"a tensor's bytes are not a multiple of {PACK_BYTES}"
        return ""

    def placed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.data_ptr() % PACK_BYTES:  # a slice
            x = x.clone()
        context = current_forward_context()
        is_capturing = self.backend.is_capturing()
        is_segment = context is not None and context.runtime_mode is CUDAGraphMode.PIECEWISE
        if is_capturing and not is_segment:
            source = self._transport.place(x)
            row = self.registry.take_row(source)
        else:
            if is_capturing:
                self.registry.note(x)
            source = self._staging[: x.nbytes].view(x.dtype).view(x.shape)
            row = self._staging_row
        if source is not x:
            source.copy_(x)
        return source, row

    def begin_pass(self) -> None:
        """With new signals: a failed rank may have left a barrier early."""
        self.registry.unregister()
        # aborted sums may still write to peers
        with self.ranks.step("the end of all sums"):
            self.reset()
        with self.ranks.step("new signals"):
            self.reset()
        super().begin_pass()

    def end_pass(self) -> Registration:
        return self.registry.register()

    @property
    def is_read(self) -> bool:
        return self.registry.is_sealed and self.registry.rows > 0

    def release(self) -> None:
        self.registry.unregister()

    def peer_memory(self) -> PeerMemory:
        return self.registry.peer_memory()

    def close(self) -> None:
        if self.is_closed:
            return
        super().close()
        try:
            self.registry.close()
        finally:
            self._transport.free()


def _unregistered() -> RegistrationError:
    return RegistrationError(
        "a graph was replayed before its buffers were registered",
        remedy="End the capture pass on all ranks first: AllReduce.end_pass().",
    )


class CudaAllReduce(CustomAllReduce):
    """On 2, 4 or 8 GPUs. A wait ends, with NaN and an error word, after about
    ``distributed.timeout``.
    """

    def __init__(
        self,
        ranks: Ranks,
        backend: GraphBackend,
        transport: MemoryTransport,
        fallback: AllReduce,
        settings: DistributedConfig,
    ) -> None:
        from cgplan.distributed.triton_kernels import ABORTED, one_shot, two_shot

        self._one_shot = one_shot
        self._two_shot = two_shot
        self._limit = min(int(ranks.timeout * _LOOKS_PER_SECOND), (1 << 31) - 1)
        self._signal_bytes = _MOST_BLOCKS * ranks.world_size * 4
        most_packs = math.ceil(settings.all_reduce_max_size / PACK_BYTES / ranks.world_size)
        device = ranks.device
        super().__init__(ranks, backend, transport, fallback, settings)
        self._own = transport.empty(self._signal_bytes + most_packs * PACK_BYTES)
        addresses = self.registry.open_block("signals", self._own)
        self._signals = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._counts = torch.zeros(_MOST_BLOCKS, dtype=torch.int32, device=device)
        self._error = torch.zeros(1, dtype=torch.int32, device=device)
        self._aborted = torch.full((1,), ABORTED, dtype=torch.int32).pin_memory()
        self._beside = torch.cuda.Stream(device)

    def run(self, x: Tensor, out: Tensor, row: Tensor) -> None:
        packs = x.nbytes // PACK_BYTES
        common = {
            "RANK": self.rank,
            "WORLD": self.world_size,
            "PACK": PACK_BYTES // x.itemsize,
            "BLOCK": _BLOCK_BYTES // x.itemsize,
            "LIMIT": self._limit,
            "num_warps": _WARPS,
        }
        given = (row, out, self._signals, self._counts, self._error, packs)
        if x.nbytes <= ONE_SHOT_BYTES[self.world_size]:
            grid = self._grid(x.nbytes)
            self._one_shot[grid](*given, **common)
        else:
            slice_packs = math.ceil(packs / self.world_size)
            grid = self._grid(slice_packs * PACK_BYTES)
            self._two_shot[grid](*given, slice_packs, SIGNAL_BYTES=self._signal_bytes, **common)

    def reset(self) -> None:
        torch.cuda.synchronize(self.ranks.device)
        self._own[: self._signal_bytes].zero_()
        self._counts.zero_()
        self._error.zero_()
        torch.cuda.synchronize(self.ranks.device)

    def abort(self) -> None:
        with torch.cuda.device(self.ranks.device), torch.cuda.stream(self._beside):
            self._error.copy_(self._aborted, non_blocking=True)

    def check(self) -> None:
        from cgplan.distributed.triton_kernels import TIMED_OUT, UNREGISTERED

        code = int(self._error.item())
        if not code:
            return
        self.ranks.check()
        if code == UNREGISTERED:
            raise _unregistered()
        ended = "timed out" if code == TIMED_OUT else "was aborted"
        raise AllReduceError(
            f"an all-reduce on rank {self.rank} {ended}: a rank did not come to it, and sums since "
            "then are wrong",
            remedy="Every rank has to make the same calls in the same order.",
        )

    def _grid(self, nbytes: int) -> tuple[int]:
        blocks = math.ceil(nbytes / _BLOCK_BYTES)
        return (min(blocks, _MOST_BLOCKS),)


class CpuAllReduce(CustomAllReduce):
    """It tries the registration without a GPU; ranks meet in their store."""

    def run(
        self,
        x: Tensor,
        out: Tensor,
        row: Tensor,
    ) -> None:
        """Sums in float32 in the order of the ranks.

        Raises:
            RankMismatchError: shapes or dtypes differ, on all ranks; sums may go on.
            RegistrationError: replayed before registration.
            RankFailedError, AllReduceError: a rank is lost, failed, or late.
        """
        addresses = row.tolist()
        if not all(addresses):
            raise _unregistered()
        with self.whole_sum():
            told = self.ranks.meet_in_sum(f"{list(x.shape)} {x.dtype}")
        refuse_unlike([{"an all-reduce": theirs} for theirs in told], SUM_ALIKE)
        with self.whole_sum():
            total = torch.zeros(x.numel())
            memory = ctypes.c_char * x.nbytes
            for address in addresses:
                total += torch.frombuffer(memory.from_address(address), dtype=x.dtype)
            out.view(-1).copy_(total)
            self.ranks.meet_in_sum("")  # before the inputs change

    def reset(self) -> None:
        self._is_unfinished = False


def open_all_reduce(config: Config, ranks: Ranks, backend: GraphBackend) -> AllReduce:
    """As ``compilation.all_reduce`` says; a step of all ranks. Raises AllReduceError, on all ranks,
    where it cannot work.
    """
    wanted = config.compilation.all_reduce
    collective = CollectiveAllReduce(ranks, backend)
    on_cpu = ranks.device.type == "cpu"
    if wanted == "auto" and on_cpu:
        wanted = "nccl"
    if wanted == "nccl":
        return collective
    reasons = ranks.agree("the choice of the all-reduce", value=_why_not(ranks))
    for rank, reason in enumerate(reasons):
        if reason and wanted != "auto":
            raise AllReduceError(
                f"compilation.all_reduce: {wanted} cannot work here: rank {rank}: {reason}",
                remedy="Set compilation.all_reduce: auto or nccl.",
            )
        if reason:
            if ranks.rank == 0:
                logger.warning(
                    "custom all-reduce: rank %d: %s; %s does it", rank, reason, collective.name
                )
            return collective
    settings = config.distributed
    if on_cpu:
        return CpuAllReduce(ranks, backend, SharedMemoryTransport(), collective, settings)
    transport = CudaIpcTransport(ranks.device)
    return CudaAllReduce(ranks, backend, transport, collective, settings)


def _why_not(ranks: Ranks) -> str:
    """Empty if this rank can take part."""
    if len({presence.host for presence in ranks.presences}) > 1:
        return "the ranks are on several machines"
    if ranks.device.type == "cpu":
        return ""
    if ranks.world_size not in ONE_SHOT_BYTES:
        sizes = ", ".join(map(str, ONE_SHOT_BYTES))
        return f"{ranks.world_size} ranks, where kernels exist for {sizes}"
    packages = {"triton": "triton", "cuda.bindings.runtime": "cuda-bindings"}
    for module, package in packages.items():
        try:
            importlib.import_module(module)
        except ImportError:
            return f"{package} is not installed"
    if uses_expandable_segments():
        return "expandable segments are on, whose memory has no IPC handle"
    # presences name GPUs that this process may not see
    numbers = {}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        numbers[str(properties.uuid)] = index
    own = ranks.device.index or 0
    for rank, presence in enumerate(ranks.presences):
        peer = numbers.get(presence.device, own)
        if peer != own and not torch.cuda.can_device_access_peer(own, peer):
            return f"its GPU cannot read that of rank {rank} (no peer access)"
    return ""
