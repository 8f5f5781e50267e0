"""What Python decides once, at capture: numbers, branches, random draws, destructors.

Each test first shows the hazard with the bare backend, then what a runner makes of it.
"""

from __future__ import annotations

import gc
import random
import warnings

import pytest
import torch
from checks import capture as bare
from checks import same
from torch import Tensor
from ways import (
    FACTOR,
    FULL,
    PAIRS,
    GraphBackend,
    Model,
    all_ways,
    double,
    full,
    open_runner,
)

from cgplan import (
    BatchDescriptor,
    BreakableCUDAGraphWrapper,
    forward_context,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@all_ways
def test_a_number_of_the_host_is_baked_in(backend: GraphBackend, way: str) -> None:
    """A temperature or a step count that Python holds is a constant of the graph. Hold it in a tensor and declare it
    as an input: then each call has its own.
    """
    x, state = full(backend, 1), {"factor": 2.0}
    graph, out = bare(backend, lambda: x * state["factor"])
    state["factor"] = 5.0
    backend.replay(graph)
    same(out, x * 2)  # stale

    inputs = {"x": PAIRS, "factor": FACTOR}
    runner = open_runner(
        backend, Model(backend, way, lambda x, factor: x * factor), way, inputs=inputs
    )
    for factor in (2.0, 5.0):
        same(runner(x=x, factor=full(backend, factor, 1)), x * factor + 1)


def branching(x: Tensor) -> Tensor:
    return x * 2 if x.shape[0] > 4 else x * 3


@all_ways
def test_a_branch_on_the_number_of_rows(backend: GraphBackend, way: str) -> None:
    """Python goes one way at capture, and every replay goes that way. Each size is captured by itself, and a traced
    model is traced again where a branch differs: so the branch is right (for the padded size).
    """
    x = full(backend, 1, 8, 2)
    graph, out = bare(backend, lambda: branching(x))
    backend.replay(graph)
    assert not torch.equal(out[:4], branching(x[:4]))
    model = Model(backend, way, branching)
    runner = open_runner(backend, model, way)
    for rows in (8, 4):
        same(runner(x=x[:rows]), branching(x[:rows]) + 1)


def test_a_branch_on_what_is_no_tensor(backend: GraphBackend) -> None:
    """A flag decides in Python, and graphs keep the side that was captured. Have a wrapper for each."""
    x, flag = full(backend, 3), {"negate": False}

    def forward(x: Tensor) -> Tensor:
        return -x if flag["negate"] else x * 2

    graph, out = bare(backend, lambda: forward(x))
    flag["negate"] = True
    backend.replay(graph)
    same(out, x * 2)  # the other side
    wrappers = [BreakableCUDAGraphWrapper(forward, FULL, backend=backend) for _ in range(2)]
    with torch.no_grad(), forward_context(FULL, BatchDescriptor(4)):
        for flag["negate"] in (False, True, False, True):
            same(wrappers[flag["negate"]](x), forward(x))


@all_ways
def test_random_numbers_that_repeat(backend: GraphBackend, way: str) -> None:
    """Numbers drawn by Python or NumPy are drawn once, at capture: each step samples the same token. Numbers drawn by
    torch on the device are fresh on each replay, and follow `torch.manual_seed`.
    """
    x = full(backend, 0)
    graph, out = bare(backend, lambda: x + random.random())
    backend.replay(graph)
    first = out.clone()
    backend.replay(graph)
    assert torch.equal(out, first)
    runner = open_runner(
        backend, Model(backend, way, lambda x: x + torch.rand_like(x)), way, outputs="clone"
    )
    drawn = []
    for _ in range(2):
        torch.manual_seed(7)
        drawn += [runner(x=x), runner(x=x)]
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(torch.stack(drawn[:2]), torch.stack(drawn[2:]))


@pytest.mark.usefixtures("collector_as_users_have_it")
def test_a_destructor_that_runs_during_a_capture(backend: GraphBackend) -> None:
    """The garbage collector may run a destructor in the middle of a capture: what it launches becomes part of the
    graph, and runs on each replay. A session collects once, before it, and holds the collector still.
    """
    freed = full(backend, 0, 1)

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            freed.add_(1)

    x = full(backend, 1)

    def forward(x: Tensor) -> Tensor:
        Cycle()
        return x + len([[] for _ in range(5000)])  # enough objects for many collections

    graph, _ = bare(backend, lambda: (forward(x), gc.collect(), x * 2), warmups=0)
    for before in range(2):
        same(freed, full(backend, before, 1))  # one object was freed once, yet
        backend.replay(graph)  # each replay counts it
    threshold = gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    try:
        runner = open_runner(
            backend, forward, verify="off"
        )  # which would run the forward once more
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    freed.zero_()
    same(runner(x=x), x + 5000)
    same(freed, full(backend, 0, 1))


def test_an_empty_graph(backend: GraphBackend) -> None:
    """A forward whose work is done elsewhere (on another device, or once, in a table) captures to nothing, and
    replays nothing in silence. The report warns of graphs without any kernel.
    """
    table = full(backend, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of it on CUDA
        graph, out = bare(backend, lambda: table[:2])
        runner = open_runner(backend, lambda x: table[: len(x)], cudagraph_capture_sizes=[2, 4])
    backend.replay(graph)
    same(out, full(backend, 0, 2, 2))  # whatever goes in
    (warning,) = (w for w in runner.report.warnings if "without any kernel" in w)
    assert "size=2" in warning
    assert "size=4" in warning
    assert not any("without any kernel" in w for w in open_runner(backend, double).report.warnings)
