"""What the ranks of a test run: functions of the rank, found by name in each process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from cgplan.config import Config
from cgplan.distributed import AllReduce, Ranks, open_all_reduce, open_ranks
from cgplan.graphs import select_backend
from cgplan.graphs.backend import GraphBackend

TIMEOUT = 6.0


@contextmanager
def opened(all_reduce: str = "custom", timeout: float = TIMEOUT, **settings: Any) -> Iterator[tuple[Ranks, AllReduce]]:
    config = Config(
        device="cpu",
        compilation={"all_reduce": all_reduce},
        distributed={"timeout": timeout, "all_reduce_max_size": 1 << 20, **settings},
    )
    ranks = open_ranks(config.distributed, "cpu")
    assert ranks is not None
    with ranks:
        reducer = open_all_reduce(config, ranks, select_backend("cpu"))
        yield ranks, reducer
        reducer.close()


def chain(reducer: AllReduce, x: torch.Tensor, count: int) -> torch.Tensor:
    """Reductions that each depend on the one before, with work in between."""
    for index in range(count):
        x = reducer(x * 0.5 + index) - x
    return x


def expected(inputs: list[torch.Tensor], count: int) -> list[torch.Tensor]:
    """The same without ranks."""
    for index in range(count):
        total = sum(((x * 0.5 + index).float() for x in inputs[1:]), (inputs[0] * 0.5 + index).float())
        inputs = [total.to(x.dtype) - x for x in inputs]
    return inputs


def captured(reducer: AllReduce, backend: GraphBackend, x: torch.Tensor, count: int, pool: Any = None) -> Any:
    graph = backend.new_graph(backend.new_pool() if pool is None else pool)
    with backend.session(), backend.capturing(graph):
        out = chain(reducer, x, count)
    return graph, out


def replays(rank: int, dtype: torch.dtype, shapes: list[tuple[int, ...]], count: int, times: int) -> Any:
    """Graphs of several shapes, replayed with changing inputs; the sums, and what the registration came to."""
    results = []
    with opened() as (ranks, reducer):
        backend = reducer.backend
        pool = backend.new_pool()
        statics = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        reducer.begin_pass()
        for static in statics:
            chain(reducer, static, 1)  # a warm-up, which really reduces
        graphs = [captured(reducer, backend, static, count, pool) for static in statics]
        registration = reducer.end_pass()
        for turn in range(times):
            for static, (graph, out) in zip(statics, graphs, strict=True):
                inputs = [batch(other, turn, static.shape, dtype) for other in range(ranks.world_size)]
                static.copy_(inputs[rank])
                backend.replay(graph)
                wanted = expected(inputs, count)[rank]
                assert torch.equal(out, wanted), f"turn {turn}: off by {(out.float() - wanted.float()).abs().max()}"
                results.append((out + static).clone() if turn == times - 1 else None)
        reducer.release()
        for graph, _ in graphs:
            backend.reset(graph)
    return registration, [r.sum().item() for r in results if r is not None]


def batch(rank: int, turn: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + turn)
    return torch.randn(shape, generator=generator).to(dtype)
