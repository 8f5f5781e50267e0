"""How torch's process group ends."""

from __future__ import annotations

from contextlib import suppress

import torch.distributed as dist


def end_process_group(*, aborted: bool) -> None:
    """End it. After a failure NCCL is told to give up instead of to wait."""
    if aborted:
        abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
        if abort is not None and dist.get_backend() != "gloo":
            with suppress(RuntimeError):
                abort()
                return
    with suppress(RuntimeError):
        dist.destroy_process_group()


__all__ = ["end_process_group"]
