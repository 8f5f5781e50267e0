"""Choice of the all-reduce: what the configuration asks for, and what this machine can do."""

from __future__ import annotations

import importlib.util
import logging

import torch

from cgplan.backends import GraphBackend
from cgplan.config import Config
from cgplan.distributed.all_reduce import AllReduce, CollectiveAllReduce
from cgplan.distributed.custom import CustomAllReduce, Kernels
from cgplan.distributed.ranks import Ranks
from cgplan.distributed.registry import GraphBufferRegistry
from cgplan.distributed.transports import MemoryTransport
from cgplan.errors import AllReduceError

logger = logging.getLogger(__name__)

WORLD_SIZES = (2, 4, 8)  # for which there are kernels


def open_all_reduce(config: Config, ranks: Ranks, backend: GraphBackend) -> AllReduce:
    """The all-reduce that ``compilation.all_reduce`` asks for; a step of all ranks.

    Raises:
        AllReduceError: custom or symm_mem was asked for and cannot work here; on all ranks.
    """
    wanted, collective = config.compilation.all_reduce, CollectiveAllReduce(ranks, backend)
    if wanted == "nccl":
        return collective
    why_not = _symm_mem_unfit if wanted == "symm_mem" else _custom_unfit
    reasons = ranks.agree("the choice of the all-reduce", value=why_not(ranks))
    for rank, reason in enumerate(reasons):
        if reason and wanted != "auto":
            raise AllReduceError(
                f"compilation.all_reduce: {wanted} cannot work here: rank {rank}: {reason}",
                remedy="Set compilation.all_reduce: auto or nccl.",
            )
        if reason:
            if ranks.rank == 0:
                logger.warning("custom all-reduce: rank %d: %s; %s does it", rank, reason, collective.name)
            return collective
    if wanted == "symm_mem":
        from cgplan.distributed.all_reduce import SymmetricAllReduce

        return SymmetricAllReduce(ranks, backend, collective, config.distributed.all_reduce_max_size)
    return _custom(config, ranks, backend, collective)


def _custom(config: Config, ranks: Ranks, backend: GraphBackend, collective: AllReduce) -> CustomAllReduce:
    settings, transport = config.distributed, _transport(ranks)
    registry = GraphBufferRegistry(ranks, transport, backend.device, settings.table_rows)
    kernels: Kernels
    if ranks.device.type == "cpu":
        from cgplan.distributed.kernels import CpuKernels

        kernels = CpuKernels(ranks, registry, transport)
    else:
        from cgplan.distributed.kernels import CudaKernels

        kernels = CudaKernels(
            ranks, registry, transport, settings.all_reduce_max_size, bounded=config.compilation.debug
        )
    return CustomAllReduce(ranks, backend, transport, registry, kernels, collective, settings.all_reduce_max_size)


def _transport(ranks: Ranks) -> MemoryTransport:
    if ranks.device.type == "cpu":
        from cgplan.distributed.transports import SharedMemoryTransport

        return SharedMemoryTransport()
    from cgplan.distributed.transports import CudaIpcTransport

    return CudaIpcTransport(ranks.device)


def _custom_unfit(ranks: Ranks) -> str:
    """Why this rank cannot take part in a custom all-reduce; empty if it can."""
    if not ranks.on_one_machine:
        return "the ranks are on several machines"
    if ranks.device.type == "cpu":
        return ""
    from cgplan.distributed.transports import uses_expandable_segments

    if ranks.world_size not in WORLD_SIZES:
        return f"{ranks.world_size} ranks are none of {', '.join(map(str, WORLD_SIZES))}"
    for module, package in (("triton", "triton"), ("cuda", "cuda-bindings")):
        if importlib.util.find_spec(module) is None:
            return f"{package} is not installed"
    if uses_expandable_segments():
        return "expandable segments are on, whose memory has no IPC handle"
    return _no_peer_access(ranks)


def _no_peer_access(ranks: Ranks) -> str:
    """Which peer's GPU this one cannot read; GPUs that this process does not see are left to the handles."""
    numbers = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    own = ranks.device.index or 0
    for rank, presence in enumerate(ranks.presences):
        peer = numbers.get(presence.device, own)
        if peer != own and not torch.cuda.can_device_access_peer(own, peer):
            return f"its GPU cannot read that of rank {rank} (no peer access)"
    return ""


def _symm_mem_unfit(ranks: Ranks) -> str:
    if ranks.device.type == "cpu":
        return "symmetric memory needs GPUs"
    if not ranks.on_one_machine:
        return "the ranks are on several machines"
    return ""


__all__ = ["WORLD_SIZES", "open_all_reduce"]
