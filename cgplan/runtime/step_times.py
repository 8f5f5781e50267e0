"""Step times that a runner measures itself, on padding, so that nothing live is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from cgplan.modes import CUDAGraphMode
from cgplan.planning.costs import Key, representative_keys
from cgplan.runtime.ambient import random_state_kept
from cgplan.runtime.failures import explain_eager_failure
from cgplan.runtime.graphed import GraphedModel

Points = Mapping[tuple[CUDAGraphMode, int], Mapping[int, float]]
REPEATS = 5


def time_on_padding(graphed: GraphedModel, repeats: int = REPEATS) -> Points:
    """Median microseconds of graphs and of eager steps, from an idle device, by (runtime mode, LoRA case) and tokens.

    The representative keys among those that are captured are run on padding. That is what their kernels take, except
    attention over long sequences: padding has none.

    Args:
        graphed: The model with its graphs; no call is under way.
        repeats: Timed calls of each key and way.

    Raises ModelError if the model fails.
    """
    found: dict[tuple[CUDAGraphMode, int], dict[int, float]] = {}
    keys: Sequence[Key] = representative_keys(graphed.plan.keys, graphed.plan.max_num_seqs)
    if not keys:
        return found
    kept = random_state_kept(graphed.backend.device, graphed.generators)
    with torch.no_grad(), graphed.buffers.on_padding(), kept:
        for mode, descriptor in keys:
            views = graphed.views(descriptor)
            ways: dict[CUDAGraphMode, Callable[[], Any]] = {
                mode: partial(graphed.run_graphed, mode, descriptor, views),
                CUDAGraphMode.NONE: partial(graphed.run_eager, descriptor, views),
            }
            for way, call in ways.items():
                try:
                    call()
                except Exception as error:
                    failure = explain_eager_failure(error, f"{mode} {descriptor} on padding")
                    raise failure from (error if failure is not error else error.__cause__)
                device, _ = graphed.backend.time_calls(call, repeats)
                found.setdefault((way, descriptor.num_active_loras), {})[descriptor.num_tokens] = median(device)
    return found
