"""Dynamo's code around a traced graph, done by recorded replays themselves: what it is, when it is left alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgplan
from cgplan import GraphRunner, Input
from cgplan.backends import GraphBackend
from cgplan.piecewise.prologue import read_prologue
from cgplan.piecewise.trace import PiecewiseModel

_LIBRARY = torch.library.Library("prologue", "FRAGMENT")
_LIBRARY.define("middle(Tensor x, Tensor scale) -> Tensor")
_LIBRARY.impl("middle", lambda x, scale: x * scale + 1, "CompositeExplicitAutograd")
torch.library.register_fake("prologue::middle", lambda x, scale: torch.empty_like(x), lib=_LIBRARY)
middle = torch.ops.prologue.middle


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Scale(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), value))


class Model(nn.Module):
    """Two segments; the operator between them reads a buffer. ``made`` puts the result together."""

    def __init__(self, made: Callable[..., Any] = lambda model, x, h, y: y) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.parts = nn.ModuleList([Scale(2.0), Scale(3.0)])
        self.made = made

    def forward(self, x: Tensor) -> Any:
        h = middle(self.first(x), self.parts[1].scale)
        return self.made(self, x, h, self.last(h))


def keep(model: Any, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    model.kept = y
    return y


def count(model: Any, x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    model.seen.append(1)
    return y


SIMPLE: dict[str, Callable[..., Any]] = {
    "a tensor": lambda model, x, h, y: y,
    "nested": lambda model, x, h, y: {"y": y, "more": [y + h, (h * 2,)], "again": y},
    "constants": lambda model, x, h, y: (y, None, 3, 0.5, "name", True, h.tanh()),
    "an input": lambda model, x, h, y: (x, y),
    "a parameter": lambda model, x, h, y: [y, model.parts[1].scale.expand(x.shape[0], 4)],
    "a result of the eager piece": lambda model, x, h, y: (h, y),
}
MORE: dict[str, Callable[..., Any]] = {"an attribute that is bound": keep, "a list that grows": count}


def open_runner(backend: GraphBackend, model: nn.Module, **compilation: Any) -> GraphRunner:
    return cgplan.capture(
        model.to(backend.device).eval(),
        {"x": Input(shape=("num_tokens", 4), dtype="float32", pad=0)},
        compilation={
            "cudagraph_mode": "PIECEWISE",
            "cudagraph_capture_sizes": [2, 4],
            "splitting_ops": ["prologue::middle"],
            "outputs": "clone",
            **compilation,
        },
        device=backend.device.type,
    )


def traced(runner: GraphRunner) -> PiecewiseModel:
    found = runner._graphed.route.forward
    assert isinstance(found, PiecewiseModel)
    return found


def batch(backend: GraphBackend, rows: int) -> Tensor:
    return torch.randn(rows, 4, device=backend.device)


def forbid(runner: GraphRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make calls of Dynamo's code fail."""

    def fail(**_: Tensor) -> None:
        raise AssertionError("Dynamo's code was called")

    monkeypatch.setattr(traced(runner), "_compiled", fail)


def tensors(value: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(value)


@pytest.mark.parametrize("name", SIMPLE)
def test_a_recorded_key_does_without_dynamos_code(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = Model(SIMPLE[name])
    with closing(open_runner(backend, model)) as runner:
        for rows in (2, 4):
            runner(x=batch(backend, rows))
        forbid(runner, monkeypatch)
        for rows in (1, 2, 3, 4, 1):
            x = batch(backend, rows)
            found, wanted = runner(x=x), runner.run_eagerly(x=x)
            assert torch.utils._pytree.tree_structure(found) == torch.utils._pytree.tree_structure(wanted)
            for one, other in zip(tensors(found), tensors(wanted), strict=True):
                assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("name", MORE)
def test_code_that_does_more_is_called_each_time(backend: GraphBackend, name: str) -> None:
    model = Model(MORE[name])
    model.seen, model.kept = [], None
    with closing(open_runner(backend, model, outputs="borrow")) as runner:
        calls, compiled = [], traced(runner)._compiled

        def counted(**inputs: Tensor) -> Any:
            calls.append(1)
            return compiled(**inputs)

        traced(runner)._compiled = counted
        for _ in range(3):
            y = runner(x=batch(backend, 4))
        assert len(calls) == 3
        assert model.kept is None or torch.equal(model.kept, y)


def test_what_eager_pieces_are_given_is_read_anew(backend: GraphBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the model at each call, wherever on the way to it something has been exchanged."""
    model = Model()
    with closing(open_runner(backend, model, address_check="off")) as runner:
        x = batch(backend, 4)
        runner(x=x), runner(x=x)
        forbid(runner, monkeypatch)
        model.parts[1].scale = torch.full((4,), 5.0, device=backend.device)
        assert torch.equal(runner(x=x), runner.run_eagerly(x=x))
        model.parts[1] = Scale(7.0).to(backend.device)
        assert torch.equal(runner(x=x), runner.run_eagerly(x=x))
        model.parts = nn.ModuleList([Scale(0.0), Scale(9.0)]).to(backend.device)
        assert torch.equal(runner(x=x), runner.run_eagerly(x=x))


class Holder:
    """A plain object."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


HOLDERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda t: {"scale": t}, lambda h: h["scale"]),
    "list": (lambda t: [t, t + 1], lambda h: h[-1]),
    "object": (Holder, lambda h: h.value),
    "a key that is no string or number": (lambda t: {(1, 2): t}, lambda h: h[1, 2]),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_what_lies_in_attributes_is_read_anew(backend: GraphBackend, name: str) -> None:
    hold, get = HOLDERS[name]

    class Holds(Model):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(middle(self.first(x), get(self.held)))

    model = Holds()
    model.held = hold(torch.ones(4, device=backend.device))
    with closing(open_runner(backend, model, address_check="off")) as runner:
        assert (traced(runner)._forward() is None) == name.startswith("a key"), "such keys are left to Dynamo's code"
        for value in (1.0, 1.0, 1.0, 5.0, -7.0):
            model.held = hold(torch.full((4,), value, device=backend.device))
            x = batch(backend, 3)
            assert torch.equal(runner(x=x), runner.run_eagerly(x=x))


def test_where_addresses_are_checked_each_time_all_are_read(backend: GraphBackend) -> None:
    model = Model()
    with closing(open_runner(backend, model, address_check="always")) as runner:
        x = batch(backend, 4)
        for _ in range(3):
            assert torch.equal(runner(x=x), runner.run_eagerly(x=x))
        kept, model.first.weight.data = model.first.weight.data, model.first.weight.data.clone()
        with pytest.raises(cgplan.AddressError, match=r"model\.first\.weight"):
            runner(x=x)
        assert kept.numel()


def prologue_of(source: str, results: int = 1, **names: Any) -> Any:
    """What is found of ``forward(**inputs)`` with these lines, whose globals are ``names``."""
    body = "\n  ".join(["def outer(model):", "def forward(**inputs):", *(f"  {line}" for line in source.splitlines())])
    made: dict[str, Any] = {}
    exec(f"{body}\n  return forward", made)
    return read_prologue(made["outer"](None).__code__, {"__compiled_fn_1": None, **names}, ("x",), results)


def test_paths_and_results() -> None:
    found = prologue_of(
        "y = __compiled_fn_1(inputs['x'], model._modules['a'].w, model._modules['a'].v, G[2].w)\n"
        "return {'y': y[0], 'x': inputs['x'], 1: (model, None, -1)}",
        G=object(),
    )
    assert found.arguments == (
        ("inputs", "['x']"),
        ("model", "._modules", "['a']", ".w"),
        ("model", "._modules", "['a']", ".v"),
        ("names", "['G']", "[2]", ".w"),
    )
    assert found.result(["a0"]) == "{'y': a0, 'x': inputs['x'], 1: (model, None, -1, )}"
    assert found.read({1: "a", 2: "b", 0: "c"}) == [
        "read_0 = model._modules", "read_1 = read_0['a']", "a = read_1.w", "b = read_1.v", "c = inputs['x']",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "source",
    [
        "return __compiled_fn_1(inputs['x'])[0] if model.flag else None",
        "model.a = __compiled_fn_1(inputs['x'])[0]\nreturn model.a",
        "y = __compiled_fn_1(inputs['x'])\nmodel.items.append(y[0])\nreturn y[0]",
        "y = __compiled_fn_1(inputs['x'])\nmodel['a'] = y[0]\nreturn y[0]",
        "y = __compiled_fn_1(inputs['x'])\ndel model.a\nreturn y[0]",
        "return __compiled_fn_1(__compiled_fn_1(inputs['x'])[0])",
        "return inputs['x']",
        "return __compiled_fn_1(model.a + 1)",
        "return __compiled_fn_1(*model.a)",
        "return __compiled_fn_1([model.a])",
        "return __compiled_fn_1(inputs['x'])[0].item()",
        "return [y for y in model.a] + [__compiled_fn_1(inputs['x'])]",
        "return G(__compiled_fn_1(inputs['x'])[0])",
        "return len(__compiled_fn_1(inputs['x']))",
        "return {(1, 2): __compiled_fn_1(inputs['x'])[0]}",
        "return __compiled_fn_1(inputs['x'])[0], 1e999",
        "return __compiled_fn_1(inputs['x'])[0], {1, 2}",
        "return __compiled_fn_1(inputs['x'])[0], (model.a == 1)",
        "return __compiled_fn_1(model[1:2])",
        "with model.a: return __compiled_fn_1(inputs['x'])",
    ],
)
def test_code_that_does_more_is_none(source: str) -> None:
    assert prologue_of("return __compiled_fn_1(inputs['x'])[0]") is not None
    assert prologue_of(source, G=math.sqrt) is None
