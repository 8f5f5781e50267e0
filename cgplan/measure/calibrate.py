"""Costs of graphs, calibrated on the device: a few keys are captured, measured and freed again.

Note [Chunks]
    The driver takes memory for graphs in chunks, so that one graph shows nothing, or a whole chunk.
    A key is captured again and again, all its graphs alive, until that has happened several times.
    Between two readings that lie ``n`` nodes and ``b`` bytes apart, a node takes more than
    ``(b - chunk) / n`` and less than ``(b + chunk) / n`` bytes; each pair of readings narrows it
    down. Readings before the first chunk do not count: graphs that were freed before may have left
    room in older ones. Where few chunks were taken, another GPU's figure decides between the
    bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any

import torch

from cgplan.backends import GraphBackend
from cgplan.backends.context import CaptureScope
from cgplan.captures.environment import describe_environment
from cgplan.captures.failures import drop_locals
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.config import Config
from cgplan.graphs.wrapper import CUDAGraphEntry
from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.subset import restricted
from cgplan.planning import Plan
from cgplan.planning.costs import representative_keys
from cgplan.pricing.estimated import NODE_BYTES
from cgplan.pricing.measured import MeasuredCosts, MeasuredKey

FEWEST_CHUNKS = 4
FEWEST_CAPTURES = 16
MOST_CAPTURES = 48


def calibrate(
    config: Config, model: Callable[..., Any], backend: GraphBackend, plan: Plan
) -> MeasuredCosts:
    """Capture the representative keys of a plan in throwaway pools, measure them, and free
    everything again.

    Each key is captured twice by itself, which tells the time that the first capture of a process
    spends once (traces, loaded kernels). Loaded kernels stay, and the libraries' workspaces for the
    capture stream: the graphs of a later session with the same backend use them, and its report
    does not count them again.

    Args:
        config: Inputs, metadata and how to capture. Its budget plays no part.
        model: Called with the declared inputs by name, as in a session.
        backend: The device.
        plan: Which keys there are.

    Raises:
        CaptureError, ModelError: as CaptureSession.run; everything is freed then, too.
    """
    keys = representative_keys(plan.keys, plan.max_num_seqs)
    backend.release_cached()
    reserved = backend.memory().reserved
    graphs = ModelGraphs(restricted(plan, keys, config), config, model, backend)
    pools: dict[CUDAGraphMode, dict[int, int]] = {mode: {} for mode, _ in keys}
    seconds, nodes, workspace, once = dict[Key, float](), dict[Key, int | None](), 0, 0.0
    try:
        with graphs.rehearsing(), backend.session(), torch.no_grad():
            for key in keys:
                captured = graphs.capture_key(key)
                first = captured.seconds
                graphs.drop_all()
                if backend.supports("driver_bytes"):
                    outside = (
                        backend.memory().reserved
                        - reserved
                        - graphs.buffers.nbytes
                        - graphs.copied_bytes
                    )
                    workspace = max(workspace, outside)
                captured = graphs.capture_key(key)
                seconds[key] = captured.seconds
                nodes[key] = captured.nodes
                once += max(first - seconds[key], 0.0)
                mode, descriptor = key
                most = pools[mode].get(descriptor.elements, 0)  # of the LoRA cases
                pools[mode][descriptor.elements] = max(most, graphs.pools.nbytes)
                graphs.drop_all()
            rates = _driver_rates(graphs, keys)
            graphs.buffers.restore()
            backend.synchronize()
    except BaseException as error:
        drop_locals(error)
        raise
    finally:
        graphs.free()
    environment = describe_environment(backend, plan.config_hash)
    return MeasuredCosts(
        [
            MeasuredKey(
                m, d.num_active_loras, d.elements, rates[m] * (nodes[m, d] or 1), seconds[m, d]
            )
            for m, d in keys
        ],
        {mode: sorted(sizes.items()) for mode, sizes in pools.items()},
        config,
        source=f"measured on {environment.device}, {environment.date}: {len(keys)} keys, captured "
        "and freed",
        workspace_bytes=workspace,
        once_seconds=once,
    )


def _driver_rates(graphs: ModelGraphs, keys: Sequence[Key]) -> dict[CUDAGraphMode, float]:
    """For each mode the driver memory of a node, or of a key where nodes are not counted; 0 without
    a driver.
    """
    backend, scope, held = graphs.backend, graphs.scope, list[CUDAGraphEntry]()
    rates = {mode: 0.0 for mode, _ in keys}
    if not backend.supports("driver_bytes"):
        return rates
    try:
        # The graphs of one mode stay alive while the next is measured: memory that the driver got
        # back would hide it.
        for mode in rates:
            key = min((k for k in keys if k[0] is mode), key=lambda k: k[1].elements)
            readings = list[tuple[int, int]]()
            nodes = nbytes = chunks = since = 0
            while len(readings) < MOST_CAPTURES and (
                chunks < FEWEST_CHUNKS or since < FEWEST_CAPTURES
            ):
                # Wrappers capture a key again for another scope; the pool is the same.
                graphs.scope = CaptureScope(scope.pool, backend, address_check=scope.address_check)
                captured = graphs.capture_key(key)
                held += graphs.scope.entries
                growth = max(captured.driver_bytes or 0, 0)
                nodes, nbytes = nodes + (captured.nodes or 1), nbytes + growth
                chunks, since = chunks + (growth > 0), since + (nbytes > 0)
                readings.append((nodes, nbytes))
            rates[mode] = bytes_per_node(readings)
        return rates
    finally:
        graphs.drop_all()  # wrappers know the last graphs alone
        for graph in (graph for entry in held for graph in entry.segments):
            backend.reset(graph)
        backend.release_cached()
        graphs.scope = scope


def bytes_per_node(readings: Sequence[tuple[int, int]]) -> float:
    """Driver memory of a node, see Note [Chunks].

    Args:
        readings: (nodes captured so far, bytes that the driver has taken since), one for each graph
            or more.
    """
    points = [reading for reading in readings if reading[1]]  # (bytes never shrink)
    if not points:
        return 0.0
    growths = [
        points[0][1],
        *(after - before for (_, before), (_, after) in pairwise(points) if after > before),
    ]
    chunk = math.gcd(*growths)
    pairs = [(n2 - n1, b2 - b1) for (n1, b1), (n2, b2) in combinations(points, 2)]
    least = max([0.0, *((nbytes - chunk) / nodes for nodes, nbytes in pairs)])
    most = min([math.inf, *((nbytes + chunk) / nodes for nodes, nbytes in pairs)])
    if least > most:  # chunks are not all alike
        return (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
    if len(growths) < FEWEST_CHUNKS:
        return min(max(NODE_BYTES, least), most)
    return (least + most) / 2
