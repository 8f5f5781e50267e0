"""Choice of the all-reduce: what the configuration asks for, and what this machine can do."""

from __future__ import annotations

import importlib.util
import logging

import torch

from cgplan.backends import GraphBackend
from cgplan.config import Config
from cgplan.distributed.all_reduce import AllReduce, CollectiveAllReduce, SymmetricAllReduce
from cgplan.distributed.kernels import ONE_SHOT_BYTES, CpuAllReduce, CudaAllReduce
from cgplan.distributed.ranks import Ranks
from cgplan.distributed.transports import uses_expandable_segments
from cgplan.errors import AllReduceError

logger = logging.getLogger(__name__)


def open_all_reduce(config: Config, ranks: Ranks, backend: GraphBackend) -> AllReduce:
    """The all-reduce that ``compilation.all_reduce`` asks for; a step of all ranks.

    Raises:
        AllReduceError: custom or symm_mem was asked for and cannot work here; on all ranks.
    """
    wanted, collective = config.compilation.all_reduce, CollectiveAllReduce(ranks, backend)
    if wanted == "nccl":
        return collective
    reasons = ranks.agree("the choice of the all-reduce", value=_why_not(wanted, ranks))
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
    most, rows = config.distributed.all_reduce_max_size, config.distributed.table_rows
    if wanted == "symm_mem":
        return SymmetricAllReduce(ranks, backend, collective, most)
    kind = CpuAllReduce if ranks.device.type == "cpu" else CudaAllReduce
    return kind(ranks, backend, collective, most, rows)


def _why_not(wanted: str, ranks: Ranks) -> str:
    """Why this rank cannot take part in a custom or symm_mem all-reduce; empty if it can."""
    on_cpu = ranks.device.type == "cpu"
    if on_cpu and wanted == "symm_mem":
        return "symmetric memory needs GPUs"
    if not ranks.on_one_machine:
        return "the ranks are on several machines"
    if on_cpu or wanted == "symm_mem":
        return ""
    if ranks.world_size not in ONE_SHOT_BYTES:
        return f"{ranks.world_size} ranks are none of {', '.join(map(str, ONE_SHOT_BYTES))}"
    for module, package in (("triton", "triton"), ("cuda", "cuda-bindings")):
        if importlib.util.find_spec(module) is None:
            return f"{package} is not installed"
    if uses_expandable_segments():
        return "expandable segments are on, whose memory has no IPC handle"
    # GPUs that this process does not see are left to the handles.
    numbers = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    own = ranks.device.index or 0
    for rank, presence in enumerate(ranks.presences):
        peer = numbers.get(presence.device, own)
        if peer != own and not torch.cuda.can_device_access_peer(own, peer):
            return f"its GPU cannot read that of rank {rank} (no peer access)"
    return ""


__all__ = ["open_all_reduce"]
