"""Costs of graphs, calibrated on the device: a few keys are captured, measured and freed again.

Note [Chunks]
    The driver takes memory for graphs in chunks, so that one graph shows nothing, or a whole chunk. A key is captured
    again and again, all its graphs alive, until that has happened several times. Between two readings that lie ``n``
    nodes and ``b`` bytes apart, a node takes more than ``(b - chunk) / n`` and less than ``(b + chunk) / n`` bytes;
    each pair of readings narrows it down. Readings before the first chunk do not count: graphs that were freed before
    may have left room in older ones. Where few chunks were taken, another GPU's figure decides between the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import torch

from cgplan.backends import GraphBackend, MemoryReading
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
from cgplan.reports.records import GraphRecord

FEWEST_CHUNKS = 4
FEWEST_CAPTURES = 16
MOST_CAPTURES = 48


def calibrate(config: Config, model: Callable[..., Any], backend: GraphBackend, plan: Plan) -> MeasuredCosts:
    """Capture the representative keys of a plan in throwaway pools, measure them, and free everything again.

    Each key is captured twice by itself, which tells the time that the first capture of a process spends once (traces,
    loaded kernels). These stay: kernels, and the libraries' workspaces for the capture stream,
    which the graphs of a later session with the same backend use, too: its report does not count them again.

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
    before = backend.memory()
    graphed = ModelGraphs(restricted(plan, keys, config), config, model, backend)
    try:
        with graphed.keeping_state(), backend.session(), torch.no_grad():
            alone, workspace, once = _measure_alone(graphed, keys, before)
            rates = _driver_rates(graphed, keys)
            graphed.buffers.restore()
            backend.synchronize()
    except BaseException as error:
        drop_locals(error)
        raise
    finally:
        graphed.free()
    environment = describe_environment(backend, plan.config_hash)
    return MeasuredCosts(
        [MeasuredKey(*a.name, rates[a.name[0]] * (a.nodes or 1), a.seconds) for a in alone],
        {mode: _pools(alone, mode) for mode in rates},
        config,
        source=f"measured on {environment.device}, {environment.date}: {len(keys)} keys, captured and freed",
        workspace_bytes=workspace,
        once_seconds=once,
        bytes_per_node=rates if all(a.nodes is not None for a in alone) else None,
    )


@dataclass(frozen=True, slots=True)
class _Alone:
    """One key, captured alone into an empty pool; ``name`` as in MeasuredKey."""

    name: tuple[CUDAGraphMode, int, int]
    pool_bytes: int
    nodes: int | None
    seconds: float


def _measure_alone(graphed: ModelGraphs, keys: Sequence[Key], before: MemoryReading) -> tuple[list[_Alone], int, float]:
    """Each key by itself; bytes that the session keeps outside of its pool and its buffers; seconds spent once."""
    backend, found, workspace, once = graphed.backend, list[_Alone](), 0, 0.0
    for mode, descriptor in keys:
        first = _seconds(graphed.capture_key((mode, descriptor)))
        graphed.drop_all()
        outside = backend.memory().reserved - before.reserved - graphed.buffers.nbytes - graphed.copied_bytes
        workspace = max(workspace, outside if backend.supports("driver_bytes") else 0)
        done = graphed.capture_key((mode, descriptor))
        once += max(first - _seconds(done), 0.0)
        name = (mode, descriptor.num_active_loras, descriptor.num_tokens)
        found.append(_Alone(name, graphed.pools.nbytes, done.nodes, _seconds(done)))
        graphed.drop_all()
    return found, workspace, once


def _seconds(captured: GraphRecord) -> float:
    return captured.warmup_seconds + captured.capture_seconds


def _smallest(keys: Sequence[Key], mode: CUDAGraphMode) -> Key:
    return min((key for key in keys if key[0] is mode), key=lambda key: key[1].num_tokens)


def _pools(alone: Sequence[_Alone], mode: CUDAGraphMode) -> list[tuple[int, int]]:
    """(num_tokens, bytes of the pool) of a mode, of the LoRA cases the one that needs more."""
    sizes: dict[int, int] = {}
    for measured in alone:
        if measured.name[0] is mode:
            sizes[measured.name[2]] = max(sizes.get(measured.name[2], 0), measured.pool_bytes)
    return sorted(sizes.items())


def _driver_rates(graphed: ModelGraphs, keys: Sequence[Key]) -> dict[CUDAGraphMode, float]:
    """For each mode the driver memory of a node, or of a key where nodes are not counted; 0 without a driver."""
    backend, scope, held = graphed.backend, graphed.scope, list[CUDAGraphEntry]()
    modes = dict.fromkeys(mode for mode, _ in keys)
    if not backend.supports("driver_bytes"):
        return dict.fromkeys(modes, 0.0)
    try:
        # The graphs of one mode stay alive while the next is measured: memory that the driver got back would hide it.
        return {mode: bytes_per_node(_readings(graphed, _smallest(keys, mode), held)) for mode in modes}
    finally:
        _free(graphed, held)
        graphed.scope = scope


def _readings(graphed: ModelGraphs, key: Key, held: list[CUDAGraphEntry]) -> list[tuple[int, int]]:
    """Capture a key again and again, see Note [Chunks]."""
    backend, readings = graphed.backend, list[tuple[int, int]]()
    nodes = nbytes = chunks = since = 0
    while len(readings) < MOST_CAPTURES and (chunks < FEWEST_CHUNKS or since < FEWEST_CAPTURES):
        # Wrappers capture a key again for another scope; the pool is the same.
        graphed.scope = CaptureScope(graphed.scope.pool, backend, address_check=graphed.scope.address_check)
        captured = graphed.capture_key(key)
        held += graphed.scope.entries
        growth = max(captured.driver_bytes or 0, 0)
        nodes, nbytes = nodes + (captured.nodes or 1), nbytes + growth
        chunks, since = chunks + (growth > 0), since + (nbytes > 0)
        readings.append((nodes, nbytes))
    return readings


def _free(graphed: ModelGraphs, held: Sequence[CUDAGraphEntry]) -> None:
    """Free graphs of which wrappers know the last ones alone."""
    graphed.drop_all()
    for entry in held:
        for graph in entry.segments:
            graphed.backend.reset(graph)
    graphed.backend.release_cached()


def bytes_per_node(readings: Sequence[tuple[int, int]]) -> float:
    """Driver memory of a node, see Note [Chunks].

    Args:
        readings: (nodes captured so far, bytes that the driver has taken since), one for each graph or more.
    """
    first = next((i for i, (_, nbytes) in enumerate(readings) if nbytes), None)
    if first is None:
        return 0.0
    points = readings[first:]
    growths = [points[0][1], *(after - before for (_, before), (_, after) in pairwise(points) if after > before)]
    chunk = math.gcd(*growths)
    pairs = [(n2 - n1, b2 - b1) for (n1, b1), (n2, b2) in combinations(points, 2)]
    least = max([0.0, *((nbytes - chunk) / nodes for nodes, nbytes in pairs)])
    most = min([math.inf, *((nbytes + chunk) / nodes for nodes, nbytes in pairs)])
    if least > most:  # chunks are not all alike
        return (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
    if len(growths) < FEWEST_CHUNKS:
        return min(max(NODE_BYTES, least), most)
    return (least + most) / 2
