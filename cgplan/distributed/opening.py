"""Ranks are opened: they meet, and set torch.distributed up."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from cgplan.config import DistributedConfig
from cgplan.distributed.ranks import Ranks
from cgplan.distributed.rendezvous import Place, Presence, connect, meet
from cgplan.distributed.store import PatientStore
from cgplan.distributed.watch import SILENCE, RankWatch, first_line
from cgplan.errors import RankFailedError


def open_ranks(settings: DistributedConfig, device: str = "auto", *, place: Place | None = None) -> Ranks | None:
    """Meet the other ranks, and set torch.distributed up: NCCL between GPUs, gloo for all that the host says.

    A process group that is there already is used, and left as it is at the end.

    Args:
        settings: The ``distributed`` section.
        device: As ``config.device``; ``cuda`` is the GPU of the local rank.
        place: This rank's; absent: from torchrun's environment.

    Returns:
        The ranks, or None outside of torchrun and for a single process.

    Raises:
        RendezvousError, RankMismatchError, BackendError, ConfigError: see ``connect`` and ``meet``.
    """
    place = Place.from_environment() if place is None else place
    if place is None or place.world_size == 1:
        return None
    presence, own = Presence.of(place, device)
    store, beside = connect(place, settings.timeout)
    presences = meet(store, place, presence, settings.timeout)
    processes = [presence.process for presence in presences]
    heard = PatientStore(beside, SILENCE * settings.timeout)
    watch = RankWatch(heard, place.rank, processes, settings.timeout, None if place.agent_store else 0)
    owns_group = not dist.is_initialized()
    if own.type == "cuda":
        torch.cuda.set_device(own)
    try:
        if owns_group:
            dist.init_process_group(
                backend="gloo" if own.type == "cpu" else "cpu:gloo,cuda:nccl",
                store=PrefixStore("group", store),
                rank=place.rank,
                world_size=place.world_size,
                timeout=timedelta(seconds=settings.timeout),
            )
        kept = PatientStore(store, settings.timeout, watch.check_lost)
        return Ranks(place, own, presences, kept, watch, settings.timeout, owns_group=owns_group)
    except RuntimeError as failure:
        try:
            watch.blame(patience=min(3.0, settings.timeout / 4))
        finally:
            watch.stop()
        raise RankFailedError(
            f"rank {place.rank} could not set torch.distributed up: {first_line(failure)}",
            remedy="Look at what the other ranks printed, and at the network between them.",
        ) from failure


__all__ = ["open_ranks"]
