"""State of Python in places where users keep it: classes, methods of containers, orders, replaced methods."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any

import pytest
import torch
from programs.harness import Program, check, program
from programs.parts import Steps, Wrap, device, rows
from torch import Tensor, nn

import cgplan

programs: list[Program] = []


def settings(scale: float = 1.0) -> type:
    """A class as a namespace, another one each time."""
    return type("Settings", (), {"scale": scale, "inner": type("Inner", (), {"shift": 0.0})})


class Scaled(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        return x * self.held.scale + self.held.inner.shift


@program(programs, graphs=True)
def a_class_as_a_namespace_that_changes(graphed: Wrap) -> Steps:
    held = settings()
    g = graphed(Scaled(held).eval())
    for step in range(12):
        if step == 5:
            held.scale = 4.0
        if step == 8:
            held.inner.shift = 2.0
        yield g(rows(4, 8))


@program(programs, graphs=False)
def a_class_that_the_forward_counts_in(graphed: Wrap) -> Steps:
    class Counted(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            self.held.scale += 1
            return x * self.held.scale

    g = graphed(Counted(settings()).eval())
    for _ in range(8):
        yield g(rows(4, 8))


@program(programs, graphs=True)
def a_class_in_a_closure_and_its_base(graphed: Wrap) -> Steps:
    base = settings(2.0)
    held = type("Below", (base,), {})
    g = graphed(lambda x: x * held.scale)
    for step in range(10):
        if step == 6:
            base.scale = 3.0
        yield g(rows(4, 8))


@program(programs, graphs=True)
def a_property_that_reads_a_field(graphed: Wrap) -> Steps:
    class Model(nn.Module):
        _scale = 1.0

        @property
        def scale(self) -> float:
            return self._scale

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    g = graphed(Model().eval())
    for step in range(10):
        if step == 6:
            Model._scale = 5.0
        yield g(rows(4, 8))


@program(programs, graphs=False)
def a_method_of_a_list_that_logs(graphed: Wrap) -> Steps:
    log = list[int]()
    append = log.append

    def forward(x: Tensor) -> Tensor:
        append(x.shape[0])
        return x + 1

    g = graphed(forward)
    for _ in range(8):
        yield g(rows(4, 8))
        yield len(log)


@program(programs, graphs=False)
def a_callback_as_an_argument(graphed: Wrap) -> Steps:
    log = list[int]()

    def forward(x: Tensor, note: Any) -> Tensor:
        note()
        return x + 1

    g, note = graphed(forward), functools.partial(log.append, 3)
    for _ in range(8):
        yield g(rows(4, 8), note)
        yield len(log)


@program(programs, graphs=True)
def a_method_of_a_dict_that_looks_up(graphed: Wrap) -> Steps:
    table = {"scale": 1.0}
    get = table.get
    g = graphed(lambda x: x * get("scale"))
    for step in range(10):
        if step == 6:
            table["scale"] = 3.0
        yield g(rows(4, 8))


@program(programs, graphs=False)
def the_least_recently_used_of_a_dict(graphed: Wrap) -> Steps:
    table = OrderedDict(a=1.0, b=2.0)

    def forward(x: Tensor) -> Tensor:
        first = next(iter(table))
        table.move_to_end(first)
        return x * table[first]

    g = graphed(forward)
    for _ in range(8):
        yield g(rows(4, 8))


@program(programs, graphs=True)
def layers_in_another_order(graphed: Wrap) -> Steps:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(device).eval()
    g = graphed(model)
    for step in range(10):
        if step == 6:
            model._modules["0"] = model._modules.pop("0")
        yield g(rows(4, 8))


@program(programs, graphs=True)
def a_method_of_the_class_is_replaced(graphed: Wrap) -> Steps:
    class Model(nn.Module):
        def head(self, x: Tensor) -> Tensor:
            return x

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x) + 1

    g = graphed(Model().eval())
    for step in range(10):
        if step == 6:
            Model.head = lambda self, x: x * 4
        yield g(rows(4, 8))


@pytest.mark.parametrize("case", programs, ids=lambda case: case.name)
def test_a_program_gives_what_it_gives_without_graphs(case: Program) -> None:
    check(case)


def test_captures_that_are_not_allowed_come_later() -> None:
    model = nn.Linear(8, 4).to(device).eval()
    g = cgplan.graphed(model)
    inputs = {"input": cgplan.Input(shape=("num_tokens", 8), dtype="float32", pad=0)}
    lazy = {"capture_policy": "lazy", "cudagraph_capture_sizes": [4], "outputs": "clone"}
    runner = cgplan.capture(model, inputs, compilation=lazy, device=device)
    x = rows(3, 8)
    with torch.no_grad():
        with cgplan.capture_allowed(False):
            for _ in range(4):
                torch.testing.assert_close(g(x), model(x))
                torch.testing.assert_close(runner(x), model(x))
        assert not g.runners
        for _ in range(4):
            torch.testing.assert_close(g(x), model(x))
            torch.testing.assert_close(runner(x), model(x))
    assert sum(g.runners[0].stats.replays.values()) == 4
    assert sum(runner.stats.replays.values()) == 4
    runner.close()


def test_activation_checkpointing_runs_the_models_own_code() -> None:
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).to(device).eval()
    g = cgplan.graphed(model, grad="recompute")
    for _ in range(6):
        model.zero_grad()
        checkpoint(g, rows(3, 8), use_reentrant=False).sum().backward()
        assert model[0].weight.grad is not None
    assert "activation checkpointing" in g.explain()


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (
            lambda m: m.__setitem__(1, nn.GELU()),
            r"model\[1\] is now another object, GELU; at capture ReLU",
        ),
        (lambda m: m[0].register_forward_hook(lambda *a: a[2] * 3), r"_forward_hooks has 1"),
        (lambda m: m.append(nn.Tanh()), r"_modules has 4, at capture 3"),
        (lambda m: m.__delitem__(1), r"_modules has 2, at capture 3"),
    ],
)
def test_capture_refuses_other_modules_and_hooks(change: Any, where: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(device).eval()
    inputs = {"input": cgplan.Input(shape=("num_tokens", 8), dtype="float32", pad=0)}
    sizes = {"cudagraph_capture_sizes": [4]}
    runner = cgplan.capture(model, inputs, compilation=sizes, device=device)
    runner(rows(3, 8))
    change(model)
    with pytest.raises(cgplan.AddressError, match=where):
        runner(rows(3, 8))
    runner.recapture()
    torch.testing.assert_close(runner(rows(3, 8)).shape, torch.Size([3, 8]))
    runner.close()


def test_a_number_that_counts_padding_is_found() -> None:
    inputs = {"x": cgplan.Input(shape=("num_tokens", 8), dtype="float32", pad=0)}
    sizes = {"cudagraph_capture_sizes": [4]}
    counted = cgplan.capture(
        lambda x: {"h": x * 2, "rows": x.shape[0]}, inputs, compilation=sizes, device=device
    )
    assert counted(rows(4, 8))["rows"] == 4
    with pytest.raises(cgplan.NumbersError, match="4, not 3"):
        counted(rows(3, 8))
    counted.close()
