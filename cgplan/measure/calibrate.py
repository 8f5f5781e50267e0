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
    graphs = ModelGraphs(
        restricted(plan, keys, config),
        config,
        model,
        backend,
    )
    pools: dict[CUDAGraphMode, dict[int, int]] = {mode: {} for mode, _ in keys}
    seconds = dict[Key, float]()
    nodes = dict[Key, int | None]()
    workspace = 0
    once = 0.0
    try:
        with graphs.rehearsing(), backend.session(), torch.no_grad():
            for key in keys:
                captured = graphs.capture_key(key)
                first = captured.seconds
                graphs.drop_all()
                if backend.supports("driver_bytes"):
                    taken = backend.memory().reserved - reserved
                    own = graphs.buffers.nbytes + graphs.copied_bytes
                    workspace = max(workspace, taken - own)
                captured = graphs.capture_key(key)
                seconds[key] = captured.seconds
                nodes[key] = captured.nodes
                once += max(first - seconds[key], 0.0)
                mode, descriptor = key
                size = descriptor.elements
                most = pools[mode].get(size, 0)  # of the LoRA cases
                pools[mode][size] = max(most, graphs.pools.nbytes)
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
    measured = []
    for key in keys:
        mode, descriptor = key
        found = MeasuredKey(
            mode,
            descriptor.num_active_loras,
            descriptor.elements,
            rates[mode] * (nodes[key] or 1),
            seconds[key],
        )
        measured.append(found)
    return MeasuredCosts(
        measured,
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
    backend = graphs.backend
    scope = graphs.scope
    held = list[CUDAGraphEntry]()
    rates = {mode: 0.0 for mode, _ in keys}
    if not backend.supports("driver_bytes"):
        return rates
    try:
        # The graphs of one mode stay alive while the next is measured: memory that the driver got
        # back would hide it.
        for mode in rates:
            of_mode = [key for key in keys if key[0] is mode]
            key = min(of_mode, key=lambda key: key[1].elements)
            readings = list[tuple[int, int]]()
            nodes = nbytes = 0
            chunks = since = 0
            while len(readings) < MOST_CAPTURES:
                if chunks >= FEWEST_CHUNKS and since >= FEWEST_CAPTURES:
                    break
                # Wrappers capture a key again for another scope; the pool is the same.
                graphs.scope = CaptureScope(
                    scope.pool,
                    backend,
                    address_check=scope.address_check,
                )
                captured = graphs.capture_key(key)
                held += graphs.scope.entries
                growth = max(captured.driver_bytes or 0, 0)
                nodes += captured.nodes or 1
                nbytes += growth
                chunks += growth > 0
                since += nbytes > 0
                readings.append((nodes, nbytes))
            rates[mode] = bytes_per_node(readings)
        return rates
    finally:
        graphs.drop_all()  # wrappers know the last graphs alone
        for entry in held:
            for graph in entry.segments:
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
    first_nodes, first_bytes = points[0]
    last_nodes, last_bytes = points[-1]
    growths = [first_bytes]
    for (_, before), (_, after) in pairwise(points):
        if after > before:
            growths.append(after - before)
    chunk = math.gcd(*growths)
    least = 0.0
    most = math.inf
    for (nodes_before, before), (nodes_after, after) in combinations(points, 2):
        nodes = nodes_after - nodes_before
        nbytes = after - before
        least = max(least, (nbytes - chunk) / nodes)
        most = min(most, (nbytes + chunk) / nodes)
    if least > most:  # chunks are not all alike
        return (last_bytes - first_bytes) / (last_nodes - first_nodes)
    if len(growths) < FEWEST_CHUNKS:
        return min(max(NODE_BYTES, least), most)
    return (least + most) / 2
