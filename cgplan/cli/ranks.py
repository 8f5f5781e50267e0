"""Capture under torchrun: one process a rank, all of them through the same steps."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cgplan.cli.progress import progress
from cgplan.config import LoadedConfig
from cgplan.config.schema import ModelConfig
from cgplan.distributed import (
    AllReduce,
    RankedCapture,
    Ranks,
    agree_on_model,
    agree_on_plan,
    agree_on_setup,
    all_reduce_by,
    open_all_reduce,
    open_ranks,
)
from cgplan.errors import RankFailedError
from cgplan.graphs import GraphBackend, select_backend
from cgplan.models.loading import load_model
from cgplan.planning import Plan
from cgplan.runtime.runner import GraphRunner
from cgplan.runtime.session import CaptureSession


@contextmanager
def captured_on_ranks(
    command: str, loaded: LoadedConfig, model: ModelConfig, plan: Plan, fit: Callable[[GraphBackend], Plan] | None
) -> Iterator[GraphRunner]:
    """A block with this rank's runner. At its end everything is taken down in the order of Note [Teardown].

    Args:
        command: ``capture`` or ``bench``; ranks compare it, because each command calls the runner in its own way.
        loaded: The configuration; ranks compare theirs.
        model: Its model section.
        plan: This rank's plan; rank 0's is captured.
        fit: Makes a saved plan fit this machine; None where the plan follows from the configuration.

    Raises:
        DistributedError: a rank is missing, differs, or failed; all ranks raise it.
    """
    config = loaded.config
    ranks = open_ranks(config.distributed, config.device)
    if ranks is None:
        raise RankFailedError("there are no other ranks", remedy="Start the command with torchrun.")
    ranks.watch.tell(lambda failure: _end_soon(ranks, failure))
    with ranks:
        backend = select_backend(str(ranks.device))
        agree_on_setup(ranks, config, backend, also={"the command": f"cgplan {command}"})
        with ranks.step("fitting the plan"):
            plan = plan if fit is None else fit(backend)
        plan = agree_on_plan(ranks, plan)
        with open_all_reduce(config, ranks, backend) as reducer:
            with ranks.step("loading the model"), all_reduce_by(reducer):
                built = load_model(model.target or "", model.kwargs, device=backend.device, base_dir=loaded.base_dir)
            agree_on_model(ranks, built.forward)
            runner = _captured(loaded, plan, built.forward, reducer)
            try:
                yield runner
                reducer.check()
            except BaseException as error:
                ranks.leave(error)  # the others are not to wait for this one
                raise
            finally:
                runner.close()


def _captured(loaded: LoadedConfig, plan: Plan, model: Callable[..., Any], reducer: AllReduce) -> GraphRunner:
    ranks = reducer.ranks
    with progress("capture" if ranks.rank == 0 else "") as step:
        return CaptureSession(
            plan,
            model,
            reducer.backend,
            loaded.config,
            progress=lambda at: step(at.index, at.total, f"{at.mode} {at.descriptor}"),
            together=RankedCapture(ranks, reducer, loaded.config),
        ).run()


def _end_soon(ranks: Ranks, failure: RankFailedError) -> None:
    """End this process if it has not ended by itself soon after a rank was lost: it may wait for the device for ever.

    torch's watchdog does the same for NCCL; kernels inside of a graph are not in its sight.
    """
    if ranks.watch.lost is None:
        return

    def end() -> None:
        sys.stderr.write(f"error: rank {ranks.rank}: {failure}\n")
        sys.stderr.flush()
        os._exit(failure.exit_code)

    least = 5.0 if ranks.watch.has_left else 1.0  # it ends by itself, with a word and a code of its own
    timer = threading.Timer(max(least, ranks.timeout / 4), end)
    timer.daemon = True
    timer.start()
