"""Costs of graphs, measured on the device.

Note [Chunks]
    The driver takes memory in chunks. Between readings ``n`` nodes and ``b`` bytes apart a node
    takes ``(b - chunk) / n`` to ``(b + chunk) / n`` bytes. Those before the first chunk do not
    count: freed graphs leave room.
"""

import math
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import Any

import torch

from cgplan.backends import GraphBackend
from cgplan.backends.context import CaptureScope
from cgplan.captures.capturer import Capturer
from cgplan.captures.failures import drop_locals
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.config import Config
from cgplan.graphs.wrapper import CUDAGraphEntry
from cgplan.modes import CUDAGraphMode, Key
from cgplan.optimizer.subset import restricted
from cgplan.planning import Plan
from cgplan.pricing.costs import GraphCosts, MeasuredKey, representative_keys
from cgplan.pricing.estimated import NODE_BYTES
from cgplan.reports import GraphRecord

FEWEST_CHUNKS = 4
FEWEST_CAPTURES = 16
MOST_CAPTURES = 48


def calibrate(
    config: Config, model: Callable[..., Any], backend: GraphBackend, plan: Plan
) -> GraphCosts:
    """Capture representative keys of a plan, and free them. Raises as CaptureSession.run.

    Each key is captured twice: first captures also trace and load kernels.
    """
    keys = representative_keys(plan.keys, plan.max_num_seqs)
    backend.release_cached()
    reserved = backend.memory().reserved
    graphs = ModelGraphs(restricted(plan, keys, config), config, model, backend)
    capturer = Capturer(graphs)
    pools: dict[CUDAGraphMode, dict[int, int]] = {mode: {} for mode, _ in keys}
    records = dict[Key, GraphRecord]()
    workspace = 0
    once = 0.0
    try:
        graphs.choose_route()
        with graphs.rehearsing(), backend.session(), torch.no_grad():
            for key in keys:
                first = _captured(graphs, capturer, key)
                graphs.drop_all()
                if backend.counts_driver_bytes:
                    taken = backend.memory().reserved - reserved
                    own = graphs.buffers.nbytes + graphs.copied_bytes
                    workspace = max(workspace, taken - own)
                again = _captured(graphs, capturer, key)
                records[key] = again
                once += max(first.seconds - again.seconds, 0.0)
                mode, descriptor = key
                size = descriptor.elements
                most = pools[mode].get(size, 0)
                pools[mode][size] = max(most, graphs.pools.nbytes)
                graphs.drop_all()
            rates = _driver_rates(graphs, capturer, keys)
            graphs.buffers.refill()
            backend.synchronize()
    except BaseException as error:
        drop_locals(error)
        raise
    finally:
        graphs.free()
    environment = backend.environment(plan.config_hash)
    measured = [
        MeasuredKey(
            mode,
            descriptor.num_active_loras,
            descriptor.elements,
            rates[mode] * (record.nodes or 1),
            record.seconds,
        )
        for (mode, descriptor), record in records.items()
    ]
    return GraphCosts(
        measured,
        {mode: list(sizes.items()) for mode, sizes in pools.items()},
        config,
        source=f"measured on {environment.device}, {environment.date}: {len(keys)} keys, captured "
        "and freed",
        workspace_bytes=workspace,
        once_seconds=once,
    )


def _captured(graphs: ModelGraphs, capturer: Capturer, key: Key) -> GraphRecord:
    found = capturer.capture(key)
    if not isinstance(found, GraphRecord):
        graphs.drop_all()
        found = capturer.capture(key)
    assert isinstance(found, GraphRecord), "a second try has a warm-up"
    return found


def _driver_rates(
    graphs: ModelGraphs,
    capturer: Capturer,
    keys: Sequence[Key],
) -> dict[CUDAGraphMode, float]:
    """Bytes of a node by mode (of a key if nodes are not counted)."""
    backend = graphs.backend
    scope = graphs.scope
    held = list[CUDAGraphEntry]()
    rates = {mode: 0.0 for mode, _ in keys}
    if not backend.counts_driver_bytes:
        return rates
    try:
        # graphs of other modes stay: freed memory would hide the next mode's
        for mode in rates:
            of_mode = [key for key in keys if key[0] is mode]
            key = min(of_mode, key=lambda key: key[1].elements)
            readings = list[tuple[int, int]]()
            nodes = nbytes = 0
            chunks = since = 0
            while len(readings) < MOST_CAPTURES:
                if chunks >= FEWEST_CHUNKS and since >= FEWEST_CAPTURES:
                    break
                # wrappers capture a key again in another scope
                graphs.scope = CaptureScope(scope.pool, backend, address_check=scope.address_check)
                captured = _captured(graphs, capturer, key)
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
        graphs.drop_all()
        for entry in held:
            for graph in entry.segments:
                backend.reset(graph)
        backend.release_cached()
        graphs.scope = scope


def bytes_per_node(readings: Sequence[tuple[int, int]]) -> float:
    """See Note [Chunks]; readings are (nodes, bytes) so far."""
    points = [reading for reading in readings if reading[1]]
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
    if least > most:  # chunks differ
        return (last_bytes - first_bytes) / (last_nodes - first_nodes)
    if len(growths) < FEWEST_CHUNKS:
        return min(max(NODE_BYTES, least), most)
    return (least + most) / 2
