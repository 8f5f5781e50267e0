"""Costs of graphs without a GPU: a few keys are recorded on the tape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cgplan.backends import GraphBackend, select_backend
from cgplan.captures.failures import drop_locals
from cgplan.captures.key_capture import KeyCapture
from cgplan.captures.model_graphs import GraphedModel
from cgplan.config import Config
from cgplan.errors import BackendError
from cgplan.optimizer.subset import restricted
from cgplan.planning import Plan
from cgplan.planning.costs import representative_keys
from cgplan.pricing.estimated import EstimatedCosts, Recording


def estimate(
    config: Config, model: Callable[..., Any], plan: Plan, backend: GraphBackend | None = None
) -> EstimatedCosts:
    """Record the representative keys of a plan on the tape, two or three of each mode, and free all of it again.

    Recording a key costs its warm-ups and a few forwards of that size on the CPU. Other sizes follow from the
    recorded ones: what a forward allocates is affine in the number of its rows.

    Args:
        config: Inputs, metadata and how to capture. With ``compiler: inductor`` the operators are recorded as they
            were traced, because the tape cannot record compiled kernels.
        model: The model, on the CPU.
        plan: Which keys there are.
        backend: The tape to record on; absent: one that leaves the model's memory as it was.

    Raises:
        CaptureError, ModelError: as CaptureSession.run.
    """
    backend, note = backend or select_backend("cpu"), ""
    if config.compilation.compiler == "inductor":
        compilation = config.compilation.model_copy(update={"compiler": "eager", "use_inductor_graph_partition": False})
        config = config.model_copy(update={"compilation": compilation})
        note = "recorded without inductor, which fuses operators and so needs less"
    keys = representative_keys(plan.keys, plan.max_num_seqs)
    recordings: list[Recording] = []
    graphed = GraphedModel(restricted(plan, keys, config), config, model, backend)
    try:
        capture = KeyCapture.of(graphed)
        with backend.session(), torch.no_grad():
            for key in keys:
                log = backend.log_allocations(graphed.pools.of(key))
                if log is None:
                    raise BackendError(
                        f"{backend.name} does not tell what captures allocate", remedy="Record on the tape."
                    )
                log.clear()
                operators = capture.capture(*key).record(backend).nodes or 0
                recordings.append(Recording.of(key, operators, log))
    except BaseException as error:
        drop_locals(error)
        raise
    finally:
        graphed.free()
    return EstimatedCosts(recordings, config, note)
