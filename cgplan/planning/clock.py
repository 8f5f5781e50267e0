"""How long a step lasts under a plan: the clock of a simulation, so that slower steps make larger batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cgplan.modes import CUDAGraphMode
from cgplan.planning.dispatcher import CudagraphDispatcher
from cgplan.planning.plan import Plan
from cgplan.planning.traffic import Batch

if TYPE_CHECKING:
    from cgplan.planning.latency import StepTimes


def step_clock(plan: Plan, times: StepTimes) -> Callable[[Batch], float]:
    """Microseconds of a batch's step: in the mode and at the size that the plan's dispatcher gives it."""
    dispatch = CudagraphDispatcher(plan).dispatch

    def microseconds(batch: Batch) -> float:
        mode, descriptor = dispatch(batch.num_tokens, batch.uniform, batch.num_active_loras)
        adapters = batch.num_active_loras if mode is CUDAGraphMode.NONE else descriptor.num_active_loras
        return times.of(mode, descriptor.num_tokens, adapters)

    return microseconds


__all__ = ["step_clock"]
