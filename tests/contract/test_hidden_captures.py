"""Packages that are told in captures what they are told in eager calls, and who is told the truth.

``asker`` stands for a library that asks whether a capture is under way, and then leaves its shortcut out.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from types import ModuleType
from typing import Any

import pytest
import torch
from checks import Tally, same
from checks import capture as bare
from torch import Tensor, nn
from ways import PAIRS, GraphBackend, Model, each_size, full, open_runner

from cgplan.backends import select_backend
from cgplan.errors import CaptureError, HostSyncError, NumbersError

# Graphs that were told of the capture differ from eager calls, which the first replay would find.
HIDDEN: dict[str, Any] = {"hide_capture_from": ["asker"], "verify": "off"}
_CODE = """
import torch

def asks():
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:  # a torch without CUDA cannot say
        return False
"""


def package(name: str) -> Callable[[], bool]:
    """A function of a module of that package: whether it is told that a capture is under way."""
    module = ModuleType(f"{name}.utils")
    exec(_CODE, vars(module))
    sys.modules |= {
        name: ModuleType(name),
        module.__name__: module,
    }  # Dynamo imports what it traces
    asks: Callable[[], bool] = module.asks
    return asks


asks, others_ask = package("asker"), package("other")


def shortcut(x: Tensor) -> Tensor:
    return x * 2 if asks() else x * 3


def shortcut_of_values(x: Tensor) -> Tensor:
    """Its eager path reads a value on the host."""
    return x * 3 if not asks() and bool((x == x).all()) else x * 2


@pytest.fixture(autouse=True)
def _torchs_own_function() -> Iterator[None]:
    """Stays, whatever a test does."""
    before = torch.cuda.is_current_stream_capturing
    yield
    assert torch.cuda.is_current_stream_capturing is before


@each_size
def test_a_named_package_runs_in_captures_as_in_eager_calls(
    backend: GraphBackend, way: str
) -> None:
    x = full(backend, 1)
    graph, out = bare(backend, lambda: shortcut(x))
    backend.replay(graph)
    same(out, x * 2)  # not what eager calls compute

    for packages, factor in ((["asker"], 3), ([], 2)):
        settings = {**HIDDEN, "hide_capture_from": packages}
        runner = open_runner(backend, Model(backend, way, shortcut), way, **settings)
        same(runner(x=x), x * factor + 1)
        assert not [text for text in runner.report.warnings if "asker" in text]
        runner.close()


@each_size
def test_graphs_of_a_package_that_is_not_named_differ_from_eager_calls(
    backend: GraphBackend, way: str
) -> None:
    """The first replay finds it."""
    x = full(backend, 1)
    with closing(
        open_runner(backend, Model(backend, way, shortcut), way, hide_capture_from=["asker"])
    ) as runner:
        same(runner(x=x), x * 3 + 1)
    with closing(
        open_runner(backend, Model(backend, way, shortcut), way, hide_capture_from=[])
    ) as runner:
        with pytest.raises(
            NumbersError, match="differs from the model's own code: output 0, the largest"
        ) as caught:
            runner(x=x)
        same(caught.value.output, x * 3 + 1)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_trace_is_told_of_the_capture(backend: GraphBackend) -> None:
    """Without an answer Dynamo could not trace the question."""
    runner = open_runner(backend, Model(backend, "ops", shortcut), "ops", **HIDDEN)
    x = full(backend, 1)
    same(runner(x=x), x * 2 + 1)
    same(runner.run_eagerly(x=x), x * 3 + 1)


@each_size
def test_other_packages_are_told_the_truth(backend: GraphBackend, way: str) -> None:
    x = full(backend, 1)
    runner = open_runner(
        backend,
        Model(backend, way, lambda x: x * (2 if others_ask() else 3) * (2 if asks() else 5)),
        way,
        **HIDDEN,
    )
    same(runner(x=x), x * 10 + 1)


@each_size
def test_a_shortcut_that_needs_the_host_is_left_out(backend: GraphBackend, way: str) -> None:
    """The look, the warm-ups and the capture all run the other path, and the report names the line."""
    x, told = full(backend, 1), Tally()

    def noted(x: Tensor) -> Tensor:
        told.append(asks())
        return shortcut_of_values(x)

    runner = open_runner(
        backend, Model(backend, way, noted), way, cudagraph_capture_sizes=[4], **HIDDEN
    )
    assert told[0] is False
    assert set(told[1:]) == {True}
    same(runner(x=x), x * 2 + 1)
    (warning,) = (text for text in runner.report.warnings if "asker is told of captures" in text)
    assert "`return x * 3 if not asks() and bool((x == x).all()) else x * 2`" in warning
    eager = runner.run_eagerly(x=x)
    same(eager, x * 3 + 1)


@each_size
@pytest.mark.parametrize("pool", ["shared", "per_graph"])
def test_a_shortcut_that_needs_the_host_at_some_sizes_is_left_out_there(
    backend: GraphBackend, way: str, pool: str
) -> None:
    """The look runs the largest size alone: the capture of another size fails, and is made again."""
    counter = torch.zeros(1, device=backend.device)

    def stem(x: Tensor) -> Tensor:
        counter.add_(1)
        return shortcut_of_values(x) if len(x) < 8 else shortcut(x)

    runner = open_runner(backend, Model(backend, way, stem), way, pool=pool, **HIDDEN)
    same(counter, torch.zeros_like(counter))
    for rows, factor in ((8, 3), (4, 2)):
        x = full(backend, 1, rows, 2)
        for call in (1, 2):
            same(runner(x=x * call), x * call * factor + 1)
    same(counter, torch.full_like(counter, 4))
    assert [text for text in runner.report.warnings if "asker is told of captures" in text]


@pytest.mark.gpu
def test_values_of_host_tensors_need_no_host_sync() -> None:
    """They are numbers of Python, frozen as such."""
    backend, factor = select_backend("cuda"), torch.tensor(5.0)
    runner = open_runner(backend, lambda x: shortcut(x) * factor.item(), **HIDDEN)
    x = full(backend, 1)
    same(runner(x=x), x * 15)


def test_a_host_sync_behind_the_shortcut_is_what_an_error_names(backend: GraphBackend) -> None:
    """Not that of the path which a capture does not take."""

    def forward(x: Tensor) -> Tensor:
        y = shortcut_of_values(x)
        return y * 2 if bool((y > 0).any()) else y

    with pytest.raises(HostSyncError, match=r"return y \* 2 if bool\(\(y > 0\)\.any\(\)\) else y"):
        open_runner(backend, forward, **HIDDEN)


def test_an_eager_piece_is_told_that_no_capture_is_under_way(backend: GraphBackend) -> None:
    """It is called again on each replay; also where the graphs around it are told of the capture."""
    told = Tally()

    class Piece(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            told.append(asks())
            return x + 1

    model = Model(backend, "modules", shortcut_of_values)
    model.middle = Piece()  # type: ignore[assignment]
    runner = open_runner(backend, model, "modules", cudagraph_num_of_warmups=0, **HIDDEN)
    x = full(backend, 1)
    same(runner(x=x), x * 2 + 1)
    assert set(told) == {False}


def test_other_threads_are_told_the_truth(backend: GraphBackend) -> None:
    here, there = Tally(), Tally()

    def forward(x: Tensor) -> Tensor:
        here.append(asks())
        thread = threading.Thread(target=lambda: there.append(asks()))
        thread.start()
        thread.join()
        return shortcut_of_values(x)

    open_runner(backend, forward, cudagraph_capture_sizes=[4], **HIDDEN)
    assert here[-1]
    assert set(there) == {False}


def test_a_bare_capture_tells_all_packages(backend: GraphBackend) -> None:
    told: list[Any] = []
    bare(backend, lambda: told.append((asks(), others_ask())) or full(backend, 1) * 2, warmups=1)
    assert told == [(False, False), (True, True)]


@pytest.mark.parametrize("when", ["always", "in the capture"])
def test_an_error_of_the_forward_leaves_torch_as_it_was(backend: GraphBackend, when: str) -> None:
    def forward(x: Tensor) -> Tensor:
        if when == "always" or others_ask():
            raise ValueError("no")
        return shortcut(x)

    with pytest.raises(
        CaptureError if when == "in the capture" else Exception, match="ValueError: no"
    ):
        open_runner(backend, forward, **HIDDEN)
    x = full(backend, 1)
    runner = open_runner(backend, lambda x: shortcut(x), inputs={"x": PAIRS}, **HIDDEN)
    same(runner(x=x), x * 3)
