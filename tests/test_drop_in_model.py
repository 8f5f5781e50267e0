"""``cgplan.graphed`` as a stand-in for a model: which may change, be trained, copied and saved."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from drop_in_models import (
    Cache,
    Counting,
    Net,
    Noted,
    Point,
    Scene,
    as_the_model,
    close,
    doubled,
    ready,
    replays,
    rows,
    sizes,
)
from torch import Tensor, nn
from typer.testing import CliRunner

import cgplan
from cgplan.backends import GraphBackend, select_backend
from cgplan.cli.main import app
from cgplan.errors import (
    CgplanError,
    ConfigError,
    GradientError,
    InputError,
    OutputPathError,
)


@pytest.fixture
def net(backend: GraphBackend) -> Net:
    return Net().to(backend.device).eval()


# --- changes of the model ---------------------------------------------------------------------------------------------


def _assign(net: Net) -> None:
    net.load_state_dict(
        {name: tensor + 1 for name, tensor in net.state_dict().items()}, assign=True
    )


def _exchange_data(net: Net) -> None:
    net.inner.weight.data = net.inner.weight.data * 2


def _new_parameter(net: Net) -> None:
    net.inner.weight = nn.Parameter(net.inner.weight * 2)


def _other_memory(net: Net) -> None:
    net.double().float()
    net.inner.bias.data.add_(1)


def _replace(net: Net) -> None:
    net.inner = nn.Linear(4, 3).to(net.inner.weight.device)


def _attribute(net: Net) -> None:
    net.factor = 3.0


@pytest.mark.parametrize(
    "change", [_assign, _exchange_data, _new_parameter, _other_memory, _replace, _attribute]
)
def test_the_next_call_after_a_change_captures_again(
    backend: GraphBackend, net: Net, change: Callable[[Net], None], caplog: pytest.LogCaptureFixture
) -> None:
    g, x = cgplan.graphed(net), rows(backend, 5)
    ready(g, net, x)
    g(x)
    for turn in (1, 2):
        before, served = net(x), replays(g)
        change(net)
        wanted = net(x)
        assert turn == 2 or not torch.equal(before, wanted)
        for _ in range(3):
            close(g(x), wanted)
        # once more: what else is new is not known
        watched = change is _replace or (change is _attribute and turn == 1)
        assert replays(g) - served == 3 - watched
    told = [line for line in caplog.messages if "captured again: " in line]
    assert len(told) == len(set(told)) <= 2  # a tensor that moves again may be another one


@pytest.mark.parametrize("layers", [1, 40])
def test_a_change_that_calls_may_have_missed_is_told(backend: GraphBackend, layers: int) -> None:
    model = nn.Sequential(*(nn.ReLU() for _ in range(layers))).eval()
    g, x = cgplan.graphed(model), rows(backend, 5)
    ready(g, model, x)
    model[layers - 1] = nn.Sigmoid()
    while "captured again" not in g.explain():
        g(x)
    may_be_late = layers > 1 and sys.version_info < (3, 12)
    assert ("call recapture() after such changes" in g.explain()) is may_be_late
    assert ("answers stay right" in g.explain()) is not may_be_late
    close(g(x), model(x))


class Ways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ways = [[0] for _ in range(600)]  # nothing reports a change of a list

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return (y, y[:, :4].sum(0)) if self.ways[-1][0] else (y,)


def test_outputs_from_before_a_change_teach_nothing(backend: GraphBackend) -> None:
    model = Ways().to(backend.device)
    g = cgplan.graphed(model.eval(), verify="always")
    for size in (4, 4, 4, 2, 8, 4):
        g(torch.randn(size, 8, device=backend.device))
    model.ways[-1][0] = 1
    for size in (4, 4, 4, 2, 8, 4):  # for size 4 output 1 could have grown with the batch
        x = torch.randn(size, 8, device=backend.device)
        close(g(x), model(x))
    assert sizes(g) == {2, 4, 8}


def test_a_change_of_tensors_is_late_where_calls_may_have_missed_it(backend: GraphBackend) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(40))).to(backend.device).eval()
    g, x = cgplan.graphed(model), rows(backend, 5)
    late = "call recapture() after such changes"
    for change in (
        model.double,
        model.float,
        lambda: model.load_state_dict(model.state_dict(), assign=True),
        lambda: setattr(model[1].weight, "data", model[1].weight.data + 1),
    ):
        ready(g, model, x.to(model[0].weight.dtype))
        change()
        close(g(x), model(x)) if model[0].weight.dtype == x.dtype else g(x.double())
        assert late not in g.explain(), "each call looks at all addresses"
    model[39].bias = nn.Parameter(model[39].bias + 1)
    before = g.explain().count("captured again")
    while g.explain().count("captured again") == before:
        g(x)
    assert (late in g.explain()) is (sys.version_info < (3, 12)), "40 tensors a call"


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items: list[Any] = [*range(400), torch.ones(2)]  # nothing reports a change of it

    def forward(self, x: Tensor) -> Tensor:
        return x + self.items[-1]


def test_another_tensor_in_a_list_is_late(backend: GraphBackend) -> None:
    model = Listed()
    model.items[-1] = model.items[-1].to(backend.device)
    g, x = cgplan.graphed(model.eval()), torch.zeros(3, 2, device=backend.device)
    ready(g, model, x)
    model.items[-1] = torch.full((1,), 5.0, device=backend.device)
    while "captured again" not in g.explain():
        g(x)
    is_late = sys.version_info >= (3, 12)  # before, it is among the few tensors of each call
    assert ("call recapture() after such changes" in g.explain()) is is_late


def test_numbers_that_change_in_place_are_seen(backend: GraphBackend, net: Net) -> None:
    g, x = cgplan.graphed(net), rows(backend, 5)
    ready(g, net, x)
    with torch.no_grad():
        net.inner.weight.mul_(2)
    net.load_state_dict({name: tensor + 1 for name, tensor in net.state_dict().items()})
    close(g(x), net(x))
    assert replays(g) == 2


def test_values_of_attributes_are_told_apart(backend: GraphBackend, net: Net) -> None:
    g, x = cgplan.graphed(net), rows(backend, 5)
    for factor in (1.0, 1, True, 0.0, -0.0, float("nan"), 2.0):
        net.factor = factor
        for _ in range(3):
            found, wanted = g(x), net(x)
            close(found, wanted)
            assert torch.equal(found.signbit(), wanted.signbit()) or factor != factor
    net.factor = torch.tensor(5.0, device=backend.device)
    for _ in range(3):
        close(g(x), net(x))
    net.factor.fill_(6)
    close(g(x), net(x))


def test_a_value_that_changes_at_each_call(
    backend: GraphBackend, net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    g, x = cgplan.graphed(net), rows(backend, 5)
    for step in range(20):
        net.factor = float(step)
        close(g(x), net(x))
    assert caplog.text.count("captured again: ") == 1
    cures = "; ignore=['model.factor'] if it decides nothing, or make it a tensor and write it in"
    assert cures in caplog.text
    net.factor = torch.tensor(0.0, device=backend.device)
    served = 0
    for step in range(20):
        net.factor.fill_(step)
        close(g(x), net(x))
        served = served or replays(g)
    assert replays(g) >= served + 15


def test_a_value_that_changes_in_each_layer_is_ignored_by_one_path(
    backend: GraphBackend, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Sequential(Net(), nn.Linear(3, 4), Net()).to(backend.device).eval()
    net[1].factor = 1.0
    g, x = cgplan.graphed(net), rows(backend, 5)
    for step in range(6):
        net[0].factor = net[2].factor = float(step)
        close(g(x), net(x))
    assert "ignore=['model[*].factor'] if it decides nothing" in caplog.text
    net[1].factor = 2.0
    net[0].factor = 9.0
    g.recapture()
    for _ in range(3):
        g(x)
    net[0].factor = 8.0
    g(x)
    assert "ignore=['model[0].factor'] if it decides nothing" in caplog.text


class Switched(Net):
    def __init__(self) -> None:
        super().__init__()
        self.on: Any = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + 1 if self.on else y


@pytest.mark.parametrize(
    ("off", "on"),
    [
        (False, True),
        ("", "an adapter"),
        (None, "an adapter"),
        (None, torch.float16),
        (torch.Size(()), torch.Size((2,))),
    ],
)
def test_a_value_that_is_no_number_has_no_hint_to_ignore_it(
    backend: GraphBackend, caplog: pytest.LogCaptureFixture, off: Any, on: Any
) -> None:
    net, x = Switched().to(backend.device).eval(), rows(backend, 5)
    g = cgplan.graphed(net)
    for turn in range(12):
        net.on = on if turn // 4 % 2 else off
        close(g(x), net(x))
    assert "captured again: model.on" in caplog.text
    assert "; answers stay right, and each change costs a capture" in caplog.text
    assert "ignore" not in caplog.text
    assert "costs a capture; 2 changes of model.on freed graphs\n" in g.explain()


def test_a_list_of_names_that_grows_has_no_hint_to_ignore_it(
    backend: GraphBackend, caplog: pytest.LogCaptureFixture
) -> None:
    net, x = Switched().to(backend.device).eval(), rows(backend, 5)
    net.on = []
    g = cgplan.graphed(net)
    for turn in range(8):
        if turn == 4:
            net.on.append("an adapter")
        close(g(x), net(x))
    assert "captured again: len(model.on) (it was 0 and is 1)" in caplog.text
    assert "ignore" not in caplog.text


def test_a_difference_names_what_was_ignored_and_has_changed(
    backend: GraphBackend, caplog: pytest.LogCaptureFixture
) -> None:
    net, x = Switched().to(backend.device).eval(), rows(backend, 5)
    g = cgplan.graphed(net, ignore=["model.on"], verify="always")
    for turn in range(8):
        net.on = turn > 3
        close(g(x), net(x))
    assert "; ignored, and changed since the capture: model.on" in caplog.text


REGISTRY: dict[str, dict[str, int]] = {}


def test_a_table_that_others_fill_is_named_and_can_be_ignored(
    backend: GraphBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """The forward reads it by a computed key, so any entry may decide."""

    class Reads(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if type(self).__name__ not in REGISTRY else x

    path = "model.<REGISTRY>"
    net = Reads().to(backend.device).eval()
    x = rows(backend, 5)
    told, ignoring = cgplan.graphed(net), cgplan.graphed(net, ignore=[path])
    for name in ("<class 'A'>", "<class 'B'>", "<class 'C'>"):
        for _ in range(4):
            close(told(x), net(x))
            close(ignoring(x), net(x))
        REGISTRY[name] = {}
    REGISTRY.clear()
    assert caplog.text.count("captured again: ") == 1
    assert "if it decides nothing" not in caplog.text, "its keys decide"
    assert f"; 2 changes of {path} freed graphs" in told.explain()
    assert "captured again" not in ignoring.explain()


def test_another_output_after_a_change(backend: GraphBackend) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale, self.way = nn.Linear(4, 3), 1.0, 0

        def forward(self, x: Tensor) -> Any:
            y = self.inner(x) * self.scale
            return ((y, self.scale), {"y": y, "s": [self.scale]}, y[:, :2], y.sum(1))[self.way]

    model = Heads().to(backend.device).eval()
    g = cgplan.graphed(model)
    for model.way in (0, 1, 2, 3, 0):
        for model.scale in (1.0, 2.0):
            as_the_model(g, model, backend, 5, 2, 7, 5)
    assert len(g.runners) == 1
    assert sizes(g) == {2, 8}, "batches are padded as before"


def test_a_table_that_is_made_on_first_use(backend: GraphBackend) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.zeros(0, device=backend.device)

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > len(self.table):
                self.table = torch.arange(float(len(x)), device=x.device)
            return x + self.table[: len(x), None]

    g = cgplan.graphed(Positions().eval())
    as_the_model(
        g,
        lambda x: x + torch.arange(len(x), device=x.device)[:, None],
        backend,
        3,
        3,
        3,
        3,
        3,
        9,
        9,
        9,
        3,
        5,
    )
    before = replays(g)
    as_the_model(g, lambda x: x + torch.arange(len(x), device=x.device)[:, None], backend, 9, 3, 5)
    assert replays(g) > before + 2


def test_training_mode_runs_eagerly_and_says_so(
    backend: GraphBackend, net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    g, x = cgplan.graphed(net), rows(backend, 3)
    ready(g, net, x)
    nn.Sequential(g).train()
    assert net.training
    for _ in range(2):
        g(x).sum().backward()
    assert net.inner.weight.grad is not None
    assert caplog.text.count("training mode") == 1
    assert "2 calls ran eagerly: the model is in training mode" in g.explain()
    g.eval()
    before = replays(g)
    ready(g, net, x)
    ready(g, net, x)
    assert replays(g) == before + 6


def test_a_part_in_training_mode(backend: GraphBackend) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(backend.device).eval()
    own, g = copy.deepcopy(net), cgplan.graphed(net)
    with torch.no_grad():
        as_the_model(g, own, backend, 3, 3, 3, 3)
        for model in (net, own):
            model[1].train()
        as_the_model(g, own, backend, 3, 3, 3, 5, 5, 5, 3)
    close(net.state_dict(), own.state_dict())


# --- gradients --------------------------------------------------------------------------------------------------------


def test_backward_raises_and_outputs_ask_as_the_models_do(backend: GraphBackend, net: Net) -> None:
    g, x = cgplan.graphed(net), rows(backend, 3)
    ready(g, net, x)
    found = g(x)
    assert found.requires_grad
    with pytest.raises(GradientError, match='Pass grad="recompute"'):
        found.sum().backward()
    assert "backward through its outputs raises GradientError" in g.explain()
    with torch.no_grad():
        assert not ready(g, net, x).requires_grad


@pytest.mark.parametrize("grad", [None, "recompute"])
def test_parameters_that_ask_for_gradients_later(
    backend: GraphBackend, net: Net, grad: Any
) -> None:
    net.requires_grad_(False)
    g, x = cgplan.graphed(net, grad=grad), rows(backend, 3)
    assert not ready(g, net, x).requires_grad
    net.requires_grad_(True)
    for _ in range(4):
        assert g(x).requires_grad


def test_recomputed_gradients_are_those_of_the_model(backend: GraphBackend, net: Net) -> None:
    def model(x: Tensor) -> dict[str, Any]:
        return {"y": net(x).tanh(), "rest": [net(x) * 2, x.argmax(1), x + 1]}

    def gradients(output: dict[str, Any]) -> list[Tensor]:
        (output["y"].pow(2).sum() + output["rest"][0].sum()).backward()
        found = [
            parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None
        ]
        net.zero_grad()
        return found

    g = cgplan.graphed(model, grad="recompute")
    for count in (3, 3, 3, 3, 2, 5, 3):
        x = rows(backend, count)
        found, wanted = g(x), model(x)
        assert [one.requires_grad for one in found["rest"]] == [True, False, False]
        close(gradients(found), gradients(wanted))
        with torch.no_grad():
            net.inner.weight.sub_(0.1)
    assert replays(g) == 5
    for _ in range(4):
        with torch.autocast(backend.device.type, torch.bfloat16):
            found, wanted = g(x), model(x)
        close(gradients(found), gradients(wanted))


def _write_argument(net: Net, x: Tensor) -> None:
    x.add_(1)


def _step(net: Net, x: Tensor) -> None:
    with torch.no_grad():
        net.inner.weight.add_(1)


def _set_factor(net: Net, x: Tensor) -> None:
    net.factor = 3.0


def _train(net: Net, x: Tensor) -> None:
    net.train()


@pytest.mark.parametrize("change", [_write_argument, _step, _set_factor, _train])
@pytest.mark.parametrize("is_closure", [False, True], ids=["module", "closure"])
def test_changes_between_a_call_and_backward(
    backend: GraphBackend, net: Net, change: Any, *, is_closure: bool
) -> None:
    g, x = (
        cgplan.graphed((lambda x: net(x)) if is_closure else net, grad="recompute"),
        rows(backend, 3),
    )
    ready(g, net, x)
    found = g(x)
    change(net, x)
    with pytest.raises(GradientError, match="has changed between its call and backward"):
        found.sum().backward()


@pytest.mark.parametrize(
    "model",
    [lambda net, x: net(x) * torch.rand_like(x[:, :1]), lambda net, x: net(x) + net.seen.add_(1)],
)
def test_what_could_not_be_recomputed_runs_eagerly(
    backend: GraphBackend, net: Net, model: Any
) -> None:
    net.register_buffer("seen", torch.zeros((), device=backend.device))
    g, x = cgplan.graphed(lambda x: model(net, x), grad="recompute"), rows(backend, 3)
    for turn in range(5):
        found = []
        for way in (g, lambda x: model(net, x)):
            torch.manual_seed(turn)
            way(x).sum().backward()
            found.append(net.inner.bias.grad)
            net.zero_grad()
        close(*found)
    assert net.seen in (0, 10)
    assert "backward could not run it again" in g.explain()


def test_arguments_that_ask_for_gradients_run_eagerly(backend: GraphBackend, net: Net) -> None:
    g, x = cgplan.graphed(net), rows(backend, 3).requires_grad_()
    for _ in range(4):
        g(x).sum().backward()
    assert x.grad is not None
    assert not g.runners
    assert "4 calls ran eagerly: a tensor argument asks for a gradient" in g.explain()
    with torch.no_grad():
        ready(g, net, x)
    assert len(g.runners) == 1


# --- a stand-in for a model -------------------------------------------------------------------------------------------


def test_a_forward_may_be_exchanged(backend: GraphBackend, net: Net) -> None:
    """As with ``torch.compile``: the module keeps it as its forward, not as a module inside."""
    own, x = copy.deepcopy(net), rows(backend, 3)
    net.forward = g = cgplan.graphed(net.forward)
    ready(net, own, x)
    assert replays(g) == 1
    assert net.inner in set(net.modules())
    assert list(inspect.signature(net.forward).parameters) == ["x", "scale"]
    close(copy.deepcopy(net)(x), own(x))
    _other_memory(net)
    close(net(x), own(x) + 1)
    close(net.train()(x), own(x) + 1)
    assert "training mode" in g.explain()


def test_inside_of_torch_compile(backend: GraphBackend, net: Net) -> None:
    """Dynamo leaves it as it is: what is around it is compiled, and the graphs run."""
    g, x = cgplan.graphed(net), rows(backend, 3)
    compiled = torch.compile(nn.Sequential(nn.ReLU(), g, nn.ReLU()), backend="eager")
    with torch.no_grad():
        for _ in range(4):
            close(compiled(x), net(x.relu()).relu())
    assert replays(g) == 2


def test_it_has_what_the_model_has(backend: GraphBackend, net: Net) -> None:
    g = cgplan.graphed(net)
    assert isinstance(g, nn.Module)
    assert g.note == "a note"
    assert g.inner is net.inner
    assert g.state_dict().keys() == net.state_dict().keys()
    assert nn.Sequential(g).state_dict().keys() == nn.Sequential(net).state_dict().keys()
    assert [id(p) for p in g.parameters()] == [id(p) for p in net.parameters()]
    assert list(inspect.signature(g.forward).parameters) == ["x", "scale"]
    with pytest.raises(AttributeError):
        _ = g.nonsense
    seen = list[Tensor]()
    with g.register_forward_hook(lambda module, args, output: seen.append(output)):
        close(g(rows(backend, 2)), seen[0])
    x = rows(backend, 5)
    ready(g, net, x)
    g.load_state_dict({name: value * 2 for name, value in net.state_dict().items()})
    close(g(x), net(x))
    g.factor = 4.0
    assert net.factor == 4
    close(g(x), net(x))
    assert g.to(torch.float64) is g
    ready(g, net, x.double())
    assert g.inner.weight.dtype is torch.float64
    g.recapture()
    assert not g.runners
    ready(g, net, x.double())


@pytest.mark.parametrize(
    "odd", [torch.zeros(()), torch.zeros(0, 4), torch.zeros(2, 4, dtype=torch.complex64)]
)
def test_other_tensors_run_eagerly(backend: GraphBackend, odd: Tensor) -> None:
    g, odd = cgplan.graphed(lambda x: x + 1), odd.to(backend.device)
    for _ in range(4):
        close(g(odd), odd + 1)
    assert not g.runners
    assert "4 calls ran eagerly" in g.explain()


def test_odd_tensors_after_plain_ones_run_eagerly(backend: GraphBackend) -> None:
    class Named(Tensor):
        pass

    g, x = cgplan.graphed(lambda x: x * 2), rows(backend, 3)
    ready(g, lambda x: x * 2, x)
    for odd in (x.to_sparse(), x.to("meta"), x.as_subclass(Named)):  # type: ignore[no-untyped-call]
        found = g(odd)
        assert (found.layout, found.device, type(found)) == (odd.layout, odd.device, type(odd))
    assert replays(g) == 1


def test_copies_and_pickles_have_no_graphs(backend: GraphBackend, net: Net) -> None:
    g, x = cgplan.graphed(net, sizes=[4], max_graphs=3), rows(backend, 3)
    ready(g, net, x)
    for other in (copy.deepcopy(g), pickle.loads(pickle.dumps(g))):
        assert not other.runners
        assert other.inner is not net.inner
        ready(other, net, x)
        assert sizes(other) == {4}
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    with pytest.raises(CgplanError, match="has no graphs"):
        _ = cgplan.graphed(net).report


def test_the_report_counts_the_kinds_that_it_leaves_out(backend: GraphBackend, net: Net) -> None:
    g, x = cgplan.graphed(net), rows(backend, 3)
    ready(g, net, x)
    assert "kinds of calls" not in str(g.report)
    with torch.inference_mode():
        ready(g, net, x)
    assert "one of 2 kinds of calls with graphs; explain() lists all" in str(g.report)
    assert "kinds of calls" not in str(g.runners[0].report)


def test_a_shape_in_an_output_stays_one(backend: GraphBackend) -> None:
    g = cgplan.graphed(lambda x: (x + 1, x.shape))
    for _ in range(8):
        assert g(torch.zeros(3, 2, device=backend.device))[1].numel() == 6
    assert g.graph_calls


class Growing:
    def __init__(self) -> None:
        self.seen = 0


def test_a_warm_up_ends_where_each_run_changes_an_argument(backend: GraphBackend) -> None:
    def model(x: Tensor, cache: Growing) -> Tensor:
        cache.seen += 1
        return x + cache.seen

    x = torch.zeros(2, device=backend.device)
    warm, eager = Growing(), Growing()
    g = cgplan.graphed(model)
    g.warm_up(x, warm)
    by_policy = cgplan.graphed(model, compilation={"capture_policy": "eager"})
    for call in range(1, 7):
        assert g(x, warm).tolist() == by_policy(x, eager).tolist() == [call, call]
    assert not g.graph_calls + by_policy.graph_calls


class Prompted:
    """A cache as one of a model with an encoder, filled."""

    def __init__(self, device: torch.device, steps: int, *, in_dict: bool) -> None:
        self.in_dict = in_dict
        self.filled = dict.fromkeys(range(steps), True)
        self.first = self.last = True
        self.tables = torch.zeros(steps, 2, device=device)
        self.count = torch.zeros(1, device=device)

    def reset(self) -> None:
        self.filled = dict.fromkeys(self.filled, False)
        self.first = self.last = False
        self.count.zero_()

    def fill(self, hidden: Tensor) -> None:
        flags = self.filled if self.in_dict else {0: self.first, len(self.tables) - 1: self.last}
        for step, is_filled in flags.items():
            if not is_filled:
                self.tables[step] = hidden + step
                self.filled[step] = True
                self.first = True
                self.last = self.filled[len(self.tables) - 1]
                break
        self.count.add_(1)


@pytest.mark.parametrize("in_dict", [True, False])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_ahead_leaves_no_flag_of_a_tensor_that_goes_back(
    backend: GraphBackend, steps: int, in_dict: bool
) -> None:
    def model(x: Tensor, hidden: Tensor, cache: Prompted) -> Tensor:
        cache.fill(hidden)
        return x + cache.tables.sum(0) + cache.count

    policy = {"capture_policy": "eager"}
    g = cgplan.graphed(model, dynamic={}, compilation=policy, verify="off")
    cache, other = (Prompted(backend.device, steps, in_dict=in_dict) for _ in range(2))
    for answer in range(4):
        hidden = rows(backend, 2)[0, :2] + answer
        for _ in range(4):
            x = torch.randn(2, device=backend.device)
            torch.testing.assert_close(g(x, hidden, cache), model(x, hidden, other))
        cache.reset()
        other.reset()
    assert g.graph_calls == 16 - 3 * steps, "all but those that fill the cache"


def test_a_warm_up_without_arguments_is_refused(
    backend: GraphBackend, net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    cgplan.graphed(net).warm_up(4)
    assert "takes the arguments of a call: no argument is a tensor" in caplog.text
    with pytest.raises(InputError, match="warmed up by the arguments of a call, and got none"):
        cgplan.graphed(net).warm_up()
    state = rows(backend, 3)
    cgplan.graphed(lambda: state * 2).warm_up()  # it takes none


def test_autocast_is_part_of_a_call(backend: GraphBackend, net: Net) -> None:
    g, x = cgplan.graphed(net), rows(backend, 3)
    for _ in range(2):
        ready(g, net, x)
        with torch.autocast(backend.device.type, torch.bfloat16):
            assert ready(g, net, x).dtype is torch.bfloat16


def test_eager_calls_are_counted_by_reason(backend: GraphBackend, net: Net) -> None:
    g = cgplan.graphed(net)
    for _ in range(4):
        g(rows(backend, 2))
    g.train()
    g(rows(backend, 2))
    assert g.eager_calls == {
        "the first calls of a kind": 2,
        "the model is in training mode; call .eval() for graphs": 1,
    }


def test_explain_tells_grad_mode_and_autocast_apart(backend: GraphBackend, net: Net) -> None:
    g = cgplan.graphed(net)
    x = rows(backend, 2)
    for is_grad, is_cast in ((True, False), (False, False), (False, True)):
        autocast = torch.autocast(backend.device.type, torch.bfloat16, enabled=is_cast)
        for _ in range(3):
            with torch.set_grad_enabled(is_grad), autocast:
                g(x)
    told = g.explain()
    for note, count in (("grad mode", 1), ("no_grad", 2), ("autocast torch.bfloat16", 1)):
        assert told.count(note) == count, told


def test_inside_another_runner_the_model_itself_runs(backend: GraphBackend, net: Net) -> None:
    g, x = cgplan.graphed(net), rows(backend, 3)
    ready(g, net, x)
    outer = cgplan.capture(
        nn.Sequential(g).eval(),
        {"input": cgplan.Input(shape=("num_tokens", 4), dtype="float32", pad=0)},
        compilation={"cudagraph_capture_sizes": [4]},
        device=str(backend.device),
    )
    close(outer(input=x), net(x).detach())
    assert not [warning for warning in outer.report.warnings if "changes" in warning]
    g.recapture()
    close(g(x), net(x))
    close(outer(input=x), net(x).detach())


def test_at_most_max_graphs_and_the_least_used_go(
    backend: GraphBackend, net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    g = cgplan.graphed(net, sizes=[1, 2, 4, 8], max_graphs=3)
    for count in (1, 1, 1, 1, 1, 2, 4, 4, 8, 8, 2):
        x = rows(backend, count)
        close(g(x), net(x))
        assert len(sizes(g)) <= 3
    assert 1 in sizes(g)
    for scale in range(5):
        for _ in range(5):
            close(g(x, float(scale)), net(x, float(scale)))
        assert sum(len(runner.plan.keys) for runner in g.runners) <= 3
    assert caplog.text.count("the least used go") == 1
    told = "the least used go: raise max_graphs, or pad inputs to a few shapes"
    assert f"calls ask for more than 3 graphs; {told}" in g.explain()


# --- ahead of calls, and in files -------------------------------------------------------------------------------------


def test_an_example_teaches_ahead_of_calls(backend: GraphBackend, net: Net) -> None:
    x = rows(backend, 3)
    for example in (x, (x,), {"x": x}):
        g = cgplan.graphed(
            net, example=example, sizes=[2, 4], compilation={"capture_policy": "eager"}
        )
        assert sizes(g) == {2, 4}
        close(g(x), net(x))
        assert replays(g) == 1
        assert "ran eagerly" not in g.explain()


def test_an_eager_policy_warms_up_at_the_first_call(backend: GraphBackend, net: Net) -> None:
    g = cgplan.graphed(net, sizes=[1, 2, 4], max_graphs=4, compilation={"capture_policy": "eager"})
    x = rows(backend, 3)
    for turn, scale in enumerate((1.0, 1.0, 2.0, 1.0)):
        close(g(x, scale), net(x, scale))
        assert replays(g) == turn + 1
        assert 3 <= sum(len(runner.plan.keys) for runner in g.runners) <= 4


def test_a_warm_up_leaves_all_as_it_was(backend: GraphBackend) -> None:
    def model(x: Tensor, cache: Cache) -> Tensor:
        cache.total.add_(1)
        return counting(x) + cache.total + torch.rand_like(x)

    counting, cache, x = (
        Counting().to(backend.device).eval(),
        Cache(backend.device),
        rows(backend, 2),
    )
    g = cgplan.graphed(model, dynamic={})
    torch.manual_seed(3)
    wanted = torch.randn(2, device=backend.device)
    torch.manual_seed(3)
    g.warm_up(x, cache)
    assert torch.equal(torch.randn(2, device=backend.device), wanted)
    assert counting.calls == 0
    assert not cache.total.any()
    assert sizes(g) == {2}
    for turn in (1, 2, 3):
        assert ((g(x, cache) - x - 2 * turn).abs() <= 1).all()
    assert replays(g) == 3


@pytest.mark.parametrize("kind", ["list", "dict", "set", "count"])
def test_containers_lose_what_a_warm_up_without_graphs_put_in(
    backend: GraphBackend, kind: str
) -> None:
    """And a table of numbers stays, as a hidden flag may say that it is there."""

    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.list, self.dict, self.set, self.count = [3], {0: 3}, {0}, [0]
            self.table: Tensor | None = None
            self.filled = cache(self.fill)

        def fill(self, device: torch.device) -> None:
            self.table = torch.arange(4.0, device=device)

        def forward(self, x: Tensor) -> Tensor:
            self.filled(x.device)
            log = getattr(self, kind)
            if kind == "list":
                log.append(len(x))
            elif kind == "dict":
                log[len(log)] = len(x)
            elif kind == "count":
                log[0] += 1
            else:
                log.add(len(log))
            return x * len(log) + self.table + self.count[0]

    model, plain = Logs().eval(), Logs().eval()
    g = cgplan.graphed(model)
    g.warm_up(rows(backend, 3))
    assert len(getattr(model, kind)) == 1
    assert model.count == [0]
    assert model.table is not None
    for n in (3, 3, 2):
        x = rows(backend, n)
        close(g(x), plain(x))


def test_a_warm_up_of_a_model_that_counts_in_its_class(backend: GraphBackend) -> None:
    """Which is not put back: the class may be another model's, too."""

    class Counted(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return x * 2

    g = cgplan.graphed(Counted().eval())
    g.warm_up(rows(backend, 3))
    x = rows(backend, 3)
    close(g(x), x * 2)


@pytest.mark.parametrize(("bound", "is_left"), [("1 MiB", False), (0, True)])
def test_a_warm_up_copies_no_more_state_than_captures_may(bound: str | int, is_left: bool) -> None:
    """Of a model without graphs, as it writes into an argument. The CPU has no other memory."""
    cache = Cache(torch.device("cpu"))

    def model(x: Tensor, cache: Cache) -> Tensor:
        cache.total.add_(1)
        return x.mul_(2)

    g = cgplan.graphed(model, dynamic={}, device="cpu", compilation={"state_copy": bound})
    g.warm_up(torch.ones(2, 4), cache)
    assert not g.runners
    assert bool(cache.total.any()) is is_left


def test_a_warm_up_that_makes_no_graph_says_why(
    backend: GraphBackend, caplog: pytest.LogCaptureFixture
) -> None:
    g = cgplan.graphed(lambda x: x * 2)
    with cgplan.capture_allowed(False):
        g.warm_up(rows(backend, 3))
    assert not g.runners
    assert "no graph may be captured inside capture_allowed(False)" in caplog.text


def test_a_warm_up_of_a_model_that_fails_or_pads_badly(backend: GraphBackend) -> None:
    counting, x = Counting().to(backend.device).eval(), rows(backend, 3)
    failing = cgplan.graphed(lambda x: counting(x) + x[:, 7])
    with pytest.raises(IndexError):
        failing.warm_up(x)
    assert counting.calls == 0
    pairs = cgplan.graphed(lambda x: (x[:, None] - x[None]).flatten(0, 1), example=x)
    close(pairs(x), (x[:, None] - x[None]).flatten(0, 1))
    assert replays(pairs) == 1
    noted = Noted().to(backend.device).eval()
    changing = cgplan.graphed(noted, example=x)
    assert noted.calls == 0
    assert not changing.runners


def test_the_configuration_is_saved(backend: GraphBackend, net: Net, tmp_path: Path) -> None:
    g, x = cgplan.graphed(net, sizes=[1, 4]), rows(backend, 3)
    wanted = ready(g, net, x).detach()
    g.save_config(tmp_path / "my.yaml")
    text = (tmp_path / "my.yaml").read_text()
    assert "# x: float32 [batch, 4]" in text
    assert f"target: {Net.__module__}:Net" in text
    assert "device: auto" in text
    assert "To correct" not in text
    runner = cgplan.capture(net, config=tmp_path / "my.yaml", device=backend.device)
    close(runner(x=x), wanted)
    assert runner.plan.capture_sizes == (1, 4)
    unbounded = cgplan.graphed(net)
    ready(unbounded, net, rows(backend, 5))
    ready(unbounded, net, rows(backend, 12))
    unbounded.save_config(tmp_path / "unbounded.yaml")
    saved = (tmp_path / "unbounded.yaml").read_text()
    assert "dims.batch.max, a guess from calls; captured: 16, 8\n" in saved
    cgplan.graphed(lambda x: x + 1, example=(x,)).save_config(tmp_path / "other.yaml")
    assert "# To fill in: model.target" in (tmp_path / "other.yaml").read_text()


class Nested(nn.Module):
    """Asks for more than tensors by name."""

    def forward(
        self, batch: dict[str, Any], *more: Tensor, scale: Any = None, **named: Tensor
    ) -> Any:
        first, (second, places) = batch["x"], batch["pair"]
        if type(batch["pair"]) is not tuple:
            raise TypeError
        total = first * (scale or 1.0) + second[:, places[0] :] + sum(more)
        return (
            Scene(Point(total, first), [named.get("other", second)])
            if batch["whole"]
            else (total, first)
        )


@pytest.mark.parametrize("whole", [False, True])
def test_a_saved_configuration_calls_as_calls_were(
    backend: GraphBackend, tmp_path: Path, *, whole: bool
) -> None:
    """With constants and nested arguments: the commands take the file as it is, in any order of its inputs."""
    x, y, z = rows(backend, 3), rows(backend, 3), rows(backend, 3)
    args = ({"x": x, "pair": (y, [0, "a"]), "whole": whole}, z)
    g = cgplan.graphed(Nested().eval())
    for _ in range(3):
        wanted = g(*args, scale=2.0, other=z)
    g.save_config(tmp_path / "my.yaml")
    values = yaml.safe_load((tmp_path / "my.yaml").read_text())
    values["inputs"] = dict(reversed(values["inputs"].items()))
    values["device"] = str(backend.device)
    (tmp_path / "turned.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    made_by = values["model"]["kwargs"]
    unfilled = {**values, "model": {**values["model"], "kwargs": {"call": made_by["call"]}}}
    with pytest.raises(ConfigError, match=r"Add model\.kwargs\.target: my_model\.py:build"):
        cgplan.capture(config=unfilled)
    runner = cgplan.capture(config=tmp_path / "turned.yaml")
    assert not runner.report.warnings
    assert not runner.report.state, "nothing of cgplan's own"
    named = {"batch.x": x, "batch.pair.0": y, "more.0": z, "other": z}
    assert set(named) == set(values["inputs"])
    close(runner(**named)[:2], (wanted.points.x, wanted.points.y) if whole else wanted)
    run = CliRunner().invoke(app, ["capture", str(tmp_path / "my.yaml")])
    assert run.exit_code == 0, run.output


def test_what_a_file_cannot_say_is_refused(backend: GraphBackend, net: Net, tmp_path: Path) -> None:
    x = rows(backend, 3)
    for given, named in ((Point(x, 1.0), "batch.pair"), ((x, [0], "$x"), "batch.pair.2")):
        g = cgplan.graphed(
            lambda batch: batch["x"] + batch["pair"][0], example=({"x": x, "pair": given},)
        )
        with pytest.raises(ConfigError, match=f"argument {named} is .*cannot hold"):
            g.save_config(tmp_path / "my.yaml")
    with torch.autocast(backend.device.type, torch.bfloat16):
        g = cgplan.graphed(net, example=(x,))
    with pytest.raises(ConfigError, match="autocast"):
        g.save_config(tmp_path / "my.yaml")
    assert not (tmp_path / "my.yaml").exists()
    g = cgplan.graphed(net, example=(x,))
    with pytest.raises(OutputPathError, match=r"missing.my\.yaml: No such file"):
        g.save_config(tmp_path / "missing" / "my.yaml")


def test_borrowed_outputs(backend: GraphBackend, net: Net) -> None:
    g, y = cgplan.graphed(net, outputs="borrow"), rows(backend, 3)
    found = ready(g, net, rows(backend, 3))
    g(y)
    close(found, net(y))


def test_calls_in_inference_mode(backend: GraphBackend, net: Net) -> None:
    g = cgplan.graphed(net)
    for _ in range(2):
        with torch.inference_mode():
            ready(g, net, rows(backend, 3))
        ready(g, net, rows(backend, 3))


def test_what_captures_log(
    backend: GraphBackend, net: Net, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    ready(cgplan.graphed(net), net, rows(backend, 5))
    assert not caplog.text


def test_one_that_is_dropped_frees_its_graphs_at_once(backend: GraphBackend, net: Net) -> None:
    g = cgplan.graphed(net)
    ready(g, net, rows(backend, 3))
    held = [weakref.ref(g), weakref.ref(g.runners[0])]
    gc.disable()
    try:
        del g
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "settings", [{"splitting_ops": ["aten::relu"]}, {"splitting_modules": ["1"]}], ids=str
)
def test_segments_of_a_model(backend: GraphBackend, settings: dict[str, Any]) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(backend.device).eval()
    g = cgplan.graphed(net, compilation={"cudagraph_mode": "PIECEWISE", **settings})
    as_the_model(g, net, backend, 3, 3, 3, 1, 8)
    assert not g.report.failed
    assert g.report.records[0].eager_pieces == 1


class AddsHooks(nn.Module):
    """As transformers' models do when a call first asks for hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.has_hooks = False

    def forward(self, x: Tensor, hidden: bool = False) -> Tensor:
        self.has_hooks |= hidden
        return x * 2


def test_what_a_first_call_changes_of_the_model_is_told_of_that_call(backend: GraphBackend) -> None:
    g = cgplan.graphed(AddsHooks().eval())
    x = torch.randn(3, 4, device=backend.device)
    for hidden in (False, True, False):
        for _ in range(3):
            torch.testing.assert_close(g(x, hidden=hidden), x * 2)
    why = (
        "captured again, as the first call with hidden = True changed model.has_hooks (it was False"
    )
    assert why in g.explain()
    assert "old graphs" not in g.explain()
    assert replays(g)


def test_splits_that_a_mode_without_segments_ignores_are_told(backend: GraphBackend) -> None:
    net = nn.Linear(4, 4).to(backend.device).eval()
    g = cgplan.graphed(net, compilation={"splitting_modules": ["1"]})
    as_the_model(g, net, backend, 3, 3, 3)
    assert "splitting_modules are not looked at: mode FULL has no segments; set" in g.explain()


def test_a_container_of_modules_stays_one(backend: GraphBackend) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(backend.device).eval()
    g = cgplan.graphed(model)
    assert len(g) == 2
    assert g[0] is model[0]
    assert list(g) == list(model)
    single = cgplan.graphed(nn.Linear(4, 4))
    assert single
    with pytest.raises(TypeError, match="len"):
        len(single)


def test_methods_of_a_class_and_static_ones(backend: GraphBackend) -> None:
    class Head:
        @classmethod
        @cgplan.graphed
        def shifted(cls, x: Tensor) -> Tensor:
            return x + 1

        @cgplan.graphed
        @staticmethod
        def doubled(x: Tensor) -> Tensor:
            return x * 2

    x = torch.ones(3, 4, device=backend.device)
    for _ in range(4):
        assert torch.equal(Head.shifted(x), x + 1)
        assert torch.equal(Head().shifted(x), x + 1)
        assert torch.equal(Head.doubled(x), x * 2)
        assert torch.equal(Head().doubled(x), x * 2)


def test_nested_tensors_run_by_the_models_own_code(backend: GraphBackend) -> None:
    g = cgplan.graphed(lambda x: x * 2)
    parts = [torch.ones(2, 3, device=backend.device), torch.ones(1, 3, device=backend.device)]
    for layout in (torch.strided, torch.jagged):
        x = torch.nested.nested_tensor(parts, layout=layout)
        for _ in range(4):
            assert torch.equal(
                g(x).values() if layout is torch.jagged else g(x)[0],
                (x * 2).values() if layout is torch.jagged else (x * 2)[0],
            )


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: y.to("meta"),
        lambda y: torch.quantize_per_tensor(y.cpu(), 0.1, 0, torch.qint8),
        lambda y: torch.nested.as_nested_tensor([y[0], y[:1].reshape(-1)]),
    ],
    ids=["meta", "quantized", "nested"],
)
def test_outputs_that_no_graph_holds_come_from_the_models_own_code(
    backend: GraphBackend, wrap: Any
) -> None:
    g = cgplan.graphed(lambda x: (x * 2, wrap(x * 2)))
    x = torch.ones(3, 4, device=backend.device)
    for _ in range(5):
        y, wrapped = g(x)
        assert torch.equal(y, x * 2)
        assert type(wrapped) is Tensor
    assert g.graph_calls == 0


def test_a_call_much_like_the_last_one_is_told_apart(backend: GraphBackend) -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y

    g = cgplan.graphed(model)
    x, y = rows(backend, 3), rows(backend, 3, 1)
    parameter = x.clone().requires_grad_()
    transposed = x.T.contiguous().T
    nested = torch.nested.nested_tensor([x], layout=torch.strided)
    for other in ((x.double(), y.double()), (x, x), (transposed, y), (parameter, y)):
        for _ in range(6):
            close(g(x, y), model(x, y))
        for _ in range(4):
            found, wanted = g(*other), model(*other)
            assert (found.dtype, found.requires_grad) == (wanted.dtype, wanted.requires_grad)
            close(found, wanted)
        close(g(x, y), model(x, y))
        assert torch.equal(g(nested, nested)[0], model(nested, nested)[0])
    assert g.eager_calls["a tensor argument asks for a gradient"] == 4
    assert g.eager_calls["an argument is a nested tensor"] == 4


@pytest.mark.parametrize("settings", [{"max_graphs": None}, {"compilation": 3}])
def test_settings_of_another_type_are_typed(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        cgplan.graphed(nn.Linear(4, 4), **settings)


def test_a_change_that_a_comparison_finds_is_not_blamed_on_padding(backend: GraphBackend) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = np.array([2.0])

        def forward(self, x: Tensor) -> Tensor:
            return x * float(self.table[0])

    model = Scaled().eval()
    g, x = cgplan.graphed(model, sizes=[4], verify="always"), rows(backend, 3)
    for turn in range(12):
        if turn in (5, 8):
            model.table[0] += 1  # no dict tells of it
        close(g(x), model(x))
    assert "nothing is padded" not in g.explain()
    assert "captured again: model.table (its contents)" in g.explain()
    assert "; 2 changes of model.table freed graphs" in g.explain()
    assert sizes(g) == {4}


def test_outputs_that_change_their_structure_end_no_call(backend: GraphBackend) -> None:
    """A flag that Python keeps where no walk enters: the second graph of a kind finds another structure."""
    hidden = threading.local()
    hidden.both = False

    def forward(x: Tensor) -> Any:
        return (x * 2, x + 1) if hidden.both else x * 2

    g, x = cgplan.graphed(forward, dynamic={}), rows(backend, 3)
    for _ in range(2):
        close(g(x), x * 2)
    hidden.both = True
    for _ in range(4):
        found = g(x)
        assert isinstance(found, tuple)
        close(found[1], x + 1)


def test_it_is_of_the_models_class_for_libraries_that_ask(net: Net) -> None:
    """As pipelines of diffusers do before they switch an adapter off."""
    g = cgplan.graphed(net)
    assert issubclass(g.__class__, Net)
    assert isinstance(g, Net)
    assert isinstance(g, cgplan.Graphed)
    for again in (copy.deepcopy(g), pickle.loads(pickle.dumps(g))):
        assert type(again) is type(g)
        assert again.__class__ is Net
    assert nn.Sequential(g)[0] is g


def decoder(backend: GraphBackend) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = transformers.Qwen3Config(
        vocab_size=200,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        **shape,
    )
    return transformers.Qwen3ForCausalLM(config).to(backend.device).eval()


def test_transformers_generate_by_graphs(backend: GraphBackend) -> None:
    lm = decoder(backend)
    prompt = torch.randint(2, 200, (2, 9), device=backend.device)
    mask = torch.ones_like(prompt)
    mask[0, :4] = 0
    calls: list[dict[str, Any]] = [
        {"inputs": prompt},
        {"input_ids": prompt, "attention_mask": mask},
        {"inputs": prompt[:1]},
        {"inputs_embeds": lm.get_input_embeddings()(prompt)},
        {"inputs": prompt, "do_sample": True, "num_return_sequences": 2},
        {"inputs": prompt, "num_beams": 2},
        {"inputs": prompt, "use_cache": False},
        {"inputs": prompt, "cache_implementation": "static"},
        {"inputs": prompt[:1], "prompt_lookup_num_tokens": 3},
        {"inputs": prompt[:1], "assistant_early_exit": 1, "max_new_tokens": 2},
        {"inputs": prompt, "max_new_tokens": 24},  # the last one is not cached
    ]

    def generated() -> list[Tensor]:
        torch.manual_seed(1)
        return [lm.generate(**{"max_new_tokens": 12, "do_sample": False, **call}) for call in calls]

    wanted = generated()
    g = cgplan.graphed_generate(lm, max_cache_len=32)
    for _ in range(2):
        for found, own in zip(generated(), wanted, strict=True):
            assert torch.equal(found, own)
    assert replays(g) > 50
    assert "captured again" not in g.explain()
    assert "no input_ids" not in g.explain()
    for asked, told in (
        ({"max_new_tokens": 31}, "max_new_tokens is 31: 39 to cache"),
        ({"max_length": 40}, "max_length is 40: 39 to cache"),
    ):
        wrong = f"the prompt has 9 tokens, and {told}, and max_cache_len is 32"
        with pytest.raises(InputError, match=wrong):
            lm.generate(prompt, **asked)
    longer = torch.cat([prompt, prompt], 1)
    with pytest.raises(InputError, match="max_new_tokens is 20, the default of transformers: 37"):
        lm.generate(longer)
    with pytest.raises(ValueError, match=r"not used by the model: \['max_new_token'\]"):
        lm.generate(longer, max_new_token=3)
    returned = lm.generate(prompt, max_new_tokens=4, return_dict_in_generate=True)
    lm.generate(prompt + 1, max_new_tokens=4)
    longer = torch.cat([returned.sequences, prompt], 1)
    again = {"past_key_values": returned.past_key_values, "max_new_tokens": 4}
    assert torch.equal(
        lm.generate(longer, **again, do_sample=False),
        lm.generate(longer, max_new_tokens=4, do_sample=False),
    )
    default = lm.generate(prompt)
    assert default.shape == (2, 29)
    lm.generation_config.cache_implementation = "dynamic"  # a new one for each call
    before, graphs = g.graph_calls, g.runners
    for _ in range(4):
        assert torch.equal(lm.generate(prompt, max_new_tokens=12, do_sample=False), wanted[0])
    assert g.graph_calls == before
    assert set(g.runners) == set(graphs)
    told = "generate with lm.generation_config.cache_implementation='dynamic' does not use"
    counts = [n for reason, n in g.eager_calls.items() if reason.startswith(told)]
    assert counts == [4 * 12]
    lm.generation_config.cache_implementation = None
    for other in (Net(), "Qwen/Qwen3-0.6B", cgplan.graphed(lm), lm.generate):
        wrong = "is no model of transformers with a KV cache"
        with pytest.raises(ConfigError, match=wrong) as refused:
            cgplan.graphed_generate(other, max_cache_len=8)
        assert (
            "Pass the model itself, with its LM head: `lm`, not `lm.generate`"
            in refused.value.remedy
        )
        assert "`AutoModelForCausalLM.from_pretrained(...)`, `pipe.model`" in refused.value.remedy
    for length in (None, 0, "64"):
        with pytest.raises(ConfigError, match=f"max_cache_len is {length!r}, no whole number"):
            cgplan.graphed_generate(lm, max_cache_len=length)
    hint = "`sizes` and `dynamic` are not needed: each number of rows has a graph; `max_graphs`"
    for name, wanted in (
        ("max_length", f"Did you mean 'max_cache_len'? {hint} bounds them. Arguments are max_c"),
        ("max_cache_length", "Did you mean 'max_cache_len'?"),
        ("max_graph", "Did you mean 'max_graphs'?"),
        ("sizes", hint),
        ("dynamic", hint),
        ("example", hint),
        ("pad", hint),
    ):
        for needed in ({}, {"max_cache_len": 2}):
            with pytest.raises(ConfigError, match=f"generate has no argument '{name}'") as caught:
                cgplan.graphed_generate(lm, **needed, **{name: 2})
            assert caught.value.remedy.startswith(wanted)
            arguments = caught.value.remedy.partition("Arguments are ")[2]
            assert "sizes" not in arguments
    with pytest.raises(ConfigError, match="max_cache_len is None, no whole number"):
        cgplan.graphed_generate(lm)
    own: dict[str, Any]
    for own in (
        {"strict": False},
        {"ignore": ["model.calls"]},
        {"address_check": "always"},
        {"pool": "per_graph"},
    ):
        with pytest.raises(ConfigError, match=f"compilation has {next(iter(own))}, which graphed"):
            cgplan.graphed(Net(), compilation=own)
    longest = {"max_new_tokens": 31, "cache_implementation": "dynamic"}  # as the remedy says
    assert lm.generate(prompt, **longest).shape == (2, 40)
    lm.to(torch.float64)
    assert lm.generate(prompt, max_new_tokens=3).shape == (2, 12)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_cudagraph_capture_size": 2}, "has max_cudagraph_capture_size, which graphed sets"),
        ({"cudagraph_capture_sizes": [1, 2]}, "has cudagraph_capture_sizes, which graphed sets"),
        ({"boxes": [[1]]}, "has boxes, which graphed sets"),
        ({"compiler": "inductor"}, "compiler inductor traces the forward, and its cache"),
        ({"cudagraph_mode": "PIECEWISE"}, "PIECEWISE by operators traces the forward"),
        ({"cudagraph_mode": "AUTO"}, "cudagraph_mode is AUTO"),
        (
            {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["lm_head"], "piecewise": "ops"},
            "PIECEWISE by operators traces the forward",
        ),
    ],
)
def test_generate_refuses_settings_that_give_it_no_graphs(
    settings: dict[str, Any], told: str
) -> None:
    lm = decoder(select_backend("cpu"))
    with pytest.raises(ConfigError, match=told) as refused:
        cgplan.graphed_generate(lm, max_cache_len=16, compilation=settings)
    assert refused.value.remedy.startswith("Leave ")
    assert "forward" not in vars(lm)


def test_paths_of_modules_are_looked_up_ahead_of_calls() -> None:
    lm = decoder(select_backend("cpu"))
    settings = {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["layers.*.self_attn"]}
    for made in (cgplan.graphed, partial(cgplan.graphed_generate, max_cache_len=16)):
        with pytest.raises(
            ConfigError, match=r"no submodule matches 'layers.\*.self_attn'"
        ) as wrong:
            made(lm, compilation=settings)
        assert wrong.value.remedy.startswith("Did you mean model.layers.*.self_attn")
    assert "forward" not in vars(lm)


def test_generate_by_segments_of_modules(backend: GraphBackend) -> None:
    lm = decoder(backend)
    prompt = torch.randint(2, 200, (2, 9), device=backend.device)
    wanted = lm.generate(prompt, max_new_tokens=6, do_sample=False)
    modules = {"splitting_modules": ["model.layers.*.self_attn"]}
    settings = {"cudagraph_mode": "PIECEWISE", **modules}
    g = cgplan.graphed_generate(lm, max_cache_len=16, compilation=settings)
    for _ in range(2):
        assert torch.equal(lm.generate(prompt, max_new_tokens=6, do_sample=False), wanted)
    assert g.graph_calls > 0


def test_another_length_takes_the_place_of_the_first(backend: GraphBackend) -> None:
    lm = decoder(backend)
    prompt = torch.randint(2, 200, (2, 9), device=backend.device)
    wanted = lm.generate(prompt, max_new_tokens=12, do_sample=False)
    first, g = (cgplan.graphed_generate(lm, max_cache_len=length) for length in (16, 32))
    assert torch.equal(lm.generate(prompt, max_new_tokens=12, do_sample=False), wanted)
    assert replays(g)
    assert "memory of generate: 256 KiB in 1 cache" in g.explain()
    assert not first.eager_calls
    for name in ("forward", "generate"):
        delattr(lm, name)
        assert torch.equal(lm.generate(prompt, max_new_tokens=12, do_sample=False), wanted)
    assert replays(g) == 9


def test_generate_finds_each_change_since_the_last_one(backend: GraphBackend) -> None:
    """Of a model with more places than one call looks at, so that no old graph answers."""
    lm = decoder(backend)
    twin = copy.deepcopy(lm)
    prompt = torch.randint(2, 200, (2, 9), device=backend.device)

    def generated(model: Any = lm) -> Tensor:
        found: Tensor = model.generate(prompt, max_new_tokens=6, do_sample=False)
        return found

    def negates(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return -output

    g = cgplan.graphed_generate(lm, max_cache_len=16)
    changes: list[Callable[[Any], Any]] = [
        lambda model: setattr(model.generation_config, "temperature", 0.5),
        lambda model: model.model.layers[1].mlp.register_forward_hook(negates),
    ]
    for count, change in enumerate(changes, 1):
        assert torch.equal(generated(), generated())
        assert replays(g) > 0
        for model in (lm, twin):
            change(model)
        assert torch.equal(generated(), generated(twin))
        assert g.explain().count("captured again: ") == count
    assert "old graphs" not in g.explain()
    for _ in range(4):
        lm.generate(prompt[:, :4], max_new_tokens=1)  # has a graph, and does not come again
    lm.generation_config.temperature = 0.7
    generated()
    told = g.explain()
    assert "freed" in told
    assert "output 0, logits: " in told
    assert "output 0: " not in told


def test_generate_inside_generate_leaves_the_cache_of_the_outer_call(
    backend: GraphBackend,
) -> None:
    lm = decoder(backend)
    prompt = torch.randint(2, 200, (2, 9), device=backend.device)
    seen = list[Tensor]()

    def generates(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == 11:
            seen.append(lm.generate(prompt + 1, max_new_tokens=3, do_sample=False))
        return scores

    def generated() -> Tensor:
        found: Tensor = lm.generate(
            prompt, max_new_tokens=8, do_sample=False, logits_processor=[generates]
        )
        return found

    wanted = generated()
    g = cgplan.graphed_generate(lm, max_cache_len=32)
    for _ in range(4):
        assert torch.equal(generated(), wanted)
    assert replays(g) > 0
    assert all(torch.equal(inner, seen[0]) for inner in seen)
    why = "generate with another one around it does not use the cache that graphed_generate keeps"
    assert f"12 calls ran eagerly: {why}" in g.explain()
    assert "an object argument is new" not in g.explain()


def test_generate_under_autocast_and_inference_mode(backend: GraphBackend) -> None:
    lm = decoder(backend)
    prompt = torch.randint(2, 200, (2, 9), device=backend.device)

    def generated() -> Tensor:
        found: Tensor = lm.generate(prompt, max_new_tokens=6, do_sample=False)
        return found

    def under_autocast() -> Tensor:
        with torch.autocast(backend.device.type, torch.bfloat16):
            return generated()

    wanted = generated()
    wanted_under_autocast = under_autocast()
    g = cgplan.graphed_generate(lm, max_cache_len=32)
    for _ in range(4):
        with torch.inference_mode():
            assert torch.equal(generated(), wanted)
        assert torch.equal(generated(), wanted)
        assert torch.equal(under_autocast(), wanted_under_autocast)
    assert replays(g) > 0


def test_copies_generate_by_themselves(backend: GraphBackend) -> None:
    lm = decoder(backend)
    prompt = torch.randint(2, 200, (2, 9), device=backend.device)
    cgplan.graphed_generate(lm, max_cache_len=32)
    wanted = lm.generate(prompt, max_new_tokens=6, do_sample=False)
    for twin in (copy.deepcopy(lm), pickle.loads(pickle.dumps(lm))):
        for weight in twin.parameters():
            weight.data.zero_()
        assert twin.generate(prompt, max_new_tokens=3)[0, -1] == 0
        assert torch.equal(lm.generate(prompt, max_new_tokens=6, do_sample=False), wanted)


def test_copies_of_what_graphed_generate_returns(backend: GraphBackend) -> None:
    """Such as of a pickle: ``generate`` is the model's, which runs by the copy."""
    lm = decoder(backend)
    prompt = torch.randint(2, 200, (2, 9), device=backend.device)
    g = cgplan.graphed_generate(lm, max_cache_len=32, max_graphs=3)
    wanted = lm.generate(prompt, max_new_tokens=6, do_sample=False)
    assert copy.copy(g) is g
    for other in (copy.deepcopy(g), pickle.loads(pickle.dumps(g)), copy.deepcopy(lm).forward):
        model = other.generate.model
        assert model is not lm
        assert model.forward is other
        assert model.generate is other.generate
        assert torch.equal(other.generate(prompt, max_new_tokens=6, do_sample=False), wanted)
        assert "1 of 3 FULL graphs" in other.explain()
        with pytest.raises(InputError, match="is warmed up by generate"):
            other.warm_up(prompt)
    with pytest.raises(AttributeError) as refused:
        g.load_state_dict({})
    told = "of a method, its object has the rest: call load_state_dict on the model"
    assert told in refused.value.__notes__[0]
    del lm.forward, lm.generate
    copy.copy(g)
    assert "forward" not in vars(lm)


def test_hooks_of_each_request_are_told_once(
    backend: GraphBackend, caplog: pytest.LogCaptureFixture
) -> None:
    lm = decoder(backend)
    twin = copy.deepcopy(lm)
    prompt = torch.randint(2, 200, (2, 9), device=backend.device)
    g = cgplan.graphed_generate(lm, max_cache_len=32)
    for scale in range(4):
        found = list[Tensor]()
        for model in (lm, twin):
            layer = model.model.layers[0].mlp
            hook = layer.register_forward_hook(lambda *call, scale=scale: call[2] * scale)
            found.append(model.generate(prompt, max_new_tokens=6, do_sample=False))
            hook.remove()
        assert torch.equal(*found)
    assert caplog.text.count("captured again: ") == 1
    told = "; 3 changes of model.model.layers[0].mlp._forward_hooks freed graphs"
    assert told in g.explain()
    assert "ignore=" not in g.explain()


@pytest.mark.parametrize("place", ["model", "config", "argument"])
def test_a_static_cache_that_is_asked_for_is_that_of_graphs(
    backend: GraphBackend, place: str
) -> None:
    from transformers import GenerationConfig

    lm = decoder(backend)
    prompt = torch.randint(2, 200, (2, 9), device=backend.device)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    wanted = lm.generate(prompt, **options)
    static = {"cache_implementation": "static"}
    if place == "model":
        lm.generation_config.cache_implementation = "static"
    elif place == "config":
        options = {"generation_config": GenerationConfig(**options, **static)}
    else:
        options |= static
    g = cgplan.graphed_generate(lm, max_cache_len=32)
    for _ in range(2):
        assert torch.equal(lm.generate(prompt, **options), wanted)
    assert replays(g) > 0
    assert set(g.eager_calls) == {"the first calls of a kind"}
    with pytest.raises(InputError, match="the prompt has 30 tokens"):
        lm.generate(prompt[:, :1].expand(2, 30), **options)
    assert torch.equal(lm.generate(prompt, **options), wanted)
    assert "captured again" not in g.explain()  # transformers keeps no length for its own cache
    if place == "model":  # a config without a choice takes the model's
        own = GenerationConfig(max_new_tokens=6, do_sample=False)
        assert torch.equal(lm.generate(prompt, own), wanted)
        assert set(g.eager_calls) == {"the first calls of a kind"}


def test_generate_of_a_subclass_whose_forward_takes_any_arguments(backend: GraphBackend) -> None:
    lm = decoder(backend)

    class Negated(type(lm)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = -output.logits
            return output

    lm.__class__ = Negated
    prompt = torch.randint(2, 200, (2, 9), device=backend.device)
    wanted = lm.generate(prompt, max_new_tokens=6, do_sample=False)
    g = cgplan.graphed_generate(lm, max_cache_len=32)
    for _ in range(2):
        assert torch.equal(lm.generate(prompt, max_new_tokens=6, do_sample=False), wanted)
    assert replays(g) > 0


def test_a_compiled_call_that_graphs_replace_is_told(
    backend: GraphBackend, caplog: pytest.LogCaptureFixture
) -> None:
    lm = decoder(backend)
    lm.compile()
    told = "lm.compile() has no effect: set lm.forward = torch.compile(lm.forward) before"
    assert told in cgplan.graphed_generate(lm, max_cache_len=32).explain()
    assert told in caplog.text


def test_a_cache_that_is_longer_than_the_positions_of_the_model_is_told(
    backend: GraphBackend, caplog: pytest.LogCaptureFixture
) -> None:
    lm = decoder(backend)
    lm.config.max_position_embeddings = 32
    assert "positions" not in cgplan.graphed_generate(lm, max_cache_len=32).explain()
    told = "max_cache_len is 33, and max_position_embeddings of the model is 32: a longer text"
    assert told in cgplan.graphed_generate(lm, max_cache_len=33).explain()
    assert told in caplog.text


def test_generate_that_graphs_do_not_see_is_told(
    backend: GraphBackend, caplog: pytest.LogCaptureFixture
) -> None:
    lm = decoder(backend)
    prompt = torch.randint(2, 200, (2, 9), device=backend.device)
    g = cgplan.graphed(lm)
    assert hasattr(g, "generate")
    assert "max_cache_len=...) sets up graphs" not in caplog.text
    for _ in range(2):
        g.generate(prompt, max_new_tokens=2)
    assert caplog.text.count("max_cache_len=...) sets up graphs") == 1


@pytest.fixture
def t5(backend: GraphBackend) -> Any:
    transformers = pytest.importorskip("transformers")
    widths = {"vocab_size": 200, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_heads": 4}
    ends = {"decoder_start_token_id": 0, "eos_token_id": None}
    config = transformers.T5Config(**widths, **ends, num_layers=2, initializer_factor=20.0)
    torch.manual_seed(0)
    return transformers.T5ForConditionalGeneration(config).to(backend.device).eval()


@pytest.fixture
def bart(backend: GraphBackend) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.BartConfig(
        vocab_size=200,
        d_model=64,
        **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
        init_std=1.0,
        decoder_start_token_id=2,
        eos_token_id=None,
        forced_eos_token_id=None,
    )
    torch.manual_seed(0)
    return transformers.BartForConditionalGeneration(config).to(backend.device).eval()


@pytest.fixture
def mamba(backend: GraphBackend) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    torch.manual_seed(0)
    lm = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, eos_token_id=None))
    lm._can_compile_fullgraph = True  # it does not say
    return lm.to(backend.device).eval()


@pytest.mark.parametrize("name", ["t5", "bart", "mamba"])
def test_generate_with_other_caches_answers_threads_as_the_model_does(
    name: str, backend: GraphBackend, request: pytest.FixtureRequest
) -> None:
    lm = request.getfixturevalue(name)
    options = {"max_new_tokens": 10, "do_sample": False}
    calls = []
    for rows_, length in ((2, 9), (2, 9), (2, 6), (1, 9)):
        prompt = torch.randint(3, 200, (rows_, length), device=backend.device)
        calls.append({"inputs": prompt, **options})
    calls.append({**calls[0], "num_beams": 2})
    embeds = lm.get_input_embeddings()(calls[0]["inputs"])
    calls.append({"inputs_embeds": embeds.detach(), **options})
    if lm.config.is_encoder_decoder:
        mask = torch.ones_like(calls[0]["inputs"])
        mask[0, -4:] = 0
        calls.append({**calls[0], "attention_mask": mask})
        for first in (0, 5):  # with the token to start with, and without
            begin = torch.tensor([[first, 7], [first, 8]], device=backend.device)
            calls.append({**calls[0], "decoder_input_ids": begin})
    wanted = [lm.generate(**call) for call in calls]
    g = cgplan.graphed_generate(lm, max_cache_len=24)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            answers = pool.map(lambda call: lm.generate(**call), calls)
            for found, tokens in zip(answers, wanted, strict=True):
                assert torch.equal(found, tokens)
    assert g.graph_calls > 100
    shown = g.explain()
    assert "captured again" not in shown
    assert "no input_ids" not in shown
    assert not [line for line in shown.splitlines() if line.startswith("none yet")]
    longer = {**options, "max_new_tokens": 26}
    begun = "answer begins with 1" if lm.config.is_encoder_decoder else "prompt has 9"
    with pytest.raises(InputError, match=f"the {begun} tokens, .* and max_cache_len is 24"):
        lm.generate(calls[0]["inputs"], **longer)


@pytest.mark.parametrize("name", ["t5", "bart", "mamba"])
def test_generate_with_other_caches_may_capture_with_its_first_call(
    name: str, backend: GraphBackend, request: pytest.FixtureRequest
) -> None:
    lm = request.getfixturevalue(name)
    kept: list[Tensor] = []

    def keep(tokens: Tensor, scores: Tensor) -> Tensor:
        del tokens
        kept.append(scores.clone())
        return scores

    options = {"max_new_tokens": 5, "do_sample": False, "logits_processor": [keep]}
    prompts = torch.randint(3, 200, (4, 2, 9), device=backend.device)
    for prompt in prompts:
        lm.generate(prompt, **options)
    wanted = kept.copy()
    kept.clear()
    policy = {"capture_policy": "eager"}
    g = cgplan.graphed_generate(lm, max_cache_len=24, compilation=policy)
    for prompt in prompts:
        lm.generate(prompt, **options)
    torch.testing.assert_close(kept, wanted, rtol=1e-3, atol=1e-3)
    assert g.graph_calls == 16, "all but prompts, which fill a cache that says so"


def test_generate_gives_a_start_that_lacks_a_token_its_mask(t5: Any, backend: GraphBackend) -> None:
    """The mask has the length of what is given: transformers adds a column with the token."""
    seen = []
    own_code = t5.prepare_inputs_for_generation

    @wraps(own_code)
    def prepare(tokens: Tensor, **given: Any) -> Any:
        seen.append((tokens.shape[1], given["decoder_attention_mask"].shape[1]))
        return own_code(tokens, **given)

    t5.prepare_inputs_for_generation = prepare
    cgplan.graphed_generate(t5, max_cache_len=24)
    prompt = torch.randint(3, 200, (1, 5), device=backend.device)
    for first in (0, 5):
        begin = torch.tensor([[first, 7, 8]], device=backend.device)
        t5.generate(prompt, decoder_input_ids=begin, max_new_tokens=1)
    assert seen == [(3, 3), (4, 4)]


@pytest.mark.parametrize("start", [3, [3, 4]])
def test_an_answer_that_begins_with_the_start_token_gets_no_second_one(
    t5: Any, backend: GraphBackend, start: int | list[int]
) -> None:
    prompt = torch.randint(3, 200, (2, 5), device=backend.device)
    first = torch.tensor(start, device=backend.device).expand(2)[:, None]
    begin = torch.cat([first, prompt[:, :2]], 1)
    asked = {"max_new_tokens": 6, "do_sample": False, "decoder_start_token_id": start}
    wanted = t5.generate(prompt, decoder_input_ids=begin, **asked)
    cgplan.graphed_generate(t5, max_cache_len=8)
    assert torch.equal(t5.generate(prompt, decoder_input_ids=begin, **asked), wanted)
    with pytest.raises(InputError, match=r"the answer begins with 4 tokens, .*: 9 to cache"):
        t5.generate(prompt, decoder_input_ids=begin + 9, **asked)
    t5.generation_config.decoder_start_token_id = None
    t5.generation_config.bos_token_id = 5
    asked["decoder_start_token_id"] = None
    begin[:, 0] = 5
    assert t5.generate(prompt, decoder_input_ids=begin, **asked).shape == (2, 9)


def test_whisper_generates_by_its_own_code(backend: GraphBackend) -> None:
    """Its encoder makes fewer rows of what it hears."""
    transformers = pytest.importorskip("transformers")
    config = transformers.WhisperConfig(
        vocab_size=60,
        d_model=16,
        num_mel_bins=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        max_source_positions=20,
        decoder_start_token_id=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(0)
    lm = transformers.WhisperForConditionalGeneration(config).to(backend.device).eval()
    heard = torch.randn(1, 8, 40, device=backend.device)
    wanted = lm.generate(heard, max_new_tokens=6)
    g = cgplan.graphed_generate(lm, max_cache_len=16)
    for _ in range(3):
        assert torch.equal(lm.generate(heard, max_new_tokens=6), wanted)
    assert not g.graph_calls
    assert "generate with no input_ids does not use the cache" in g.explain()


def test_more_lengths_of_prompts_than_caches_are_told(
    backend: GraphBackend, t5: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cgplan.graphed_generate(t5, max_cache_len=8)
    for length in range(3, 12):
        prompt = torch.randint(2, 200, (1, length), device=backend.device)
        t5.generate(prompt, max_new_tokens=2)
    assert "up to a few numbers of rows, and pad prompts to a few lengths" in caplog.text


def test_states_of_a_cache_are_one_row_of_explain(backend: GraphBackend, t5: Any) -> None:
    t5.forward = g = cgplan.graphed(t5.forward, dynamic={})
    prompt = torch.randint(2, 200, (2, 9), device=backend.device)
    cache = _own_caches(t5, (32, 9))
    for _ in range(4):
        cache.reset()
        t5.generate(prompt, past_key_values=cache, max_new_tokens=8, disable_compile=True)
    assert "each run changes past_key_values.is_updated[0]" in g.explain()
    table = g.explain().partition("sizes")[2].partition("graphs and their buffers")[0]
    assert table.splitlines()[2].startswith("2 ")
    assert "eager" not in table


def _own_caches(t5: Any, lengths: tuple[int, int]) -> Any:
    from transformers import EncoderDecoderCache, StaticCache

    return EncoderDecoderCache(*(StaticCache(t5.config, max_cache_len=n) for n in lengths))


def test_a_decode_loop_over_a_cache_that_is_reset_between_prompts(
    backend: GraphBackend, t5: Any
) -> None:
    """reset() sets a flag of the cache, by which the first token of a prompt fills its keys."""
    prompts = [torch.randint(2, 200, (2, 9), device=backend.device) for _ in range(5)]
    cache = _own_caches(t5, (32, 9))
    hidden = torch.zeros(2, 9, 64, device=backend.device)

    def step(token: Tensor) -> Any:
        out = t5(
            encoder_outputs=(hidden,),
            decoder_input_ids=token,
            past_key_values=cache,
            use_cache=True,
        )
        return out.logits[:, -1].argmax(-1, keepdim=True)

    g = cgplan.graphed(step, dynamic={}, verify="off")
    for prompt in prompts:
        wanted = t5.generate(prompt, max_new_tokens=12, do_sample=False)
        cache.reset()
        if sys.version_info < (3, 12):
            g.recapture()  # else seen some calls later
        with torch.no_grad():
            hidden.copy_(t5.encoder(prompt).last_hidden_state)
            found = [torch.zeros(2, 1, dtype=torch.long, device=backend.device)]
            for _ in range(12):
                found.append(g(found[-1]))
        assert torch.equal(torch.cat(found, 1), wanted)
    assert g.graph_calls > 40


def test_another_cache_for_each_prompt_is_told(backend: GraphBackend, t5: Any) -> None:
    t5.forward = g = cgplan.graphed(t5.forward, dynamic={})
    prompt = torch.randint(2, 200, (2, 9), device=backend.device)
    options = {"max_new_tokens": 8, "do_sample": False, "disable_compile": True}
    told = "argument `past_key_values` had 3 objects of EncoderDecoderCache, and each has graphs"
    cache = _own_caches(t5, (32, 9))
    for _ in range(4):
        cache.reset()
        t5.generate(prompt, past_key_values=cache, **options)
    assert told not in g.explain()
    for _ in range(2):
        assert told not in g.explain()
        t5.generate(prompt, past_key_values=_own_caches(t5, (32, 9)), **options)
    assert told in g.explain()
    assert "none yet" not in g.explain()


class SmallState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 6:
            self.count.add_(1)
        return x * 2 + self.count


def test_state_that_small_batches_alone_write(backend: GraphBackend) -> None:
    model = SmallState().to(backend.device).eval()
    own = copy.deepcopy(model)
    g = cgplan.graphed(model)
    for size in (8, 8, 7, 8, 5, 8, 5, 5, 5, 5, 3, 8, 5):
        x = torch.randn(size, 4, device=backend.device)
        torch.testing.assert_close(g(x), own(x))
        assert model.count == own.count
    assert "a run of this size writes" in g.explain()
    assert g.graph_calls


@pytest.mark.parametrize("most", [5, 10])
def test_generate_of_many_numbers_of_rows(backend: GraphBackend, most: int) -> None:
    lm = decoder(backend)
    prompts = [torch.full((rows, 4), rows, device=backend.device) for rows in range(1, most + 1)]
    wanted = [lm.generate(prompt, max_new_tokens=6, do_sample=False) for prompt in prompts]
    g = cgplan.graphed_generate(lm, max_cache_len=32, max_graphs=64)
    for _ in range(4):
        for prompt, tokens in zip(prompts, wanted, strict=True):
            assert torch.equal(lm.generate(prompt, max_new_tokens=6, do_sample=False), tokens)
    told = g.explain()
    assert "in another state at each call" not in told
    assert ("keeps 8 caches with graphs, by number of rows" in told) == (most == 10)
    assert ("fill batches up to a few numbers of rows" in told) == (most == 10)
    kept = min(most, 8)
    graphs = sum(len(runner.plan.keys) for runner in g.runners)
    assert graphs == (2 * kept if most == 5 else kept)  # of prompts that came twice, of steps


def test_generate_warms_up_by_itself(backend: GraphBackend) -> None:
    lm = decoder(backend)
    g = cgplan.graphed_generate(lm, max_cache_len=32)
    prompt = torch.full((2, 5), 3, device=backend.device)
    with pytest.raises(InputError, match="is warmed up by generate") as caught:
        g.warm_up(prompt)
    assert "max_new_tokens=4, min_new_tokens=4" in caught.value.remedy
    first = int(lm.generate(prompt, max_new_tokens=1)[0, -1])
    lm.generate(prompt, max_new_tokens=4, min_new_tokens=4, eos_token_id=first)
    assert replays(g) == 1


def test_generate_that_captures_with_its_first_call(backend: GraphBackend) -> None:
    lm = decoder(backend)
    prompt = torch.randint(2, 200, (2, 9), device=backend.device)
    wanted = lm.generate(prompt, max_new_tokens=6, do_sample=False)
    policy = {"capture_policy": "eager"}
    g = cgplan.graphed_generate(lm, max_cache_len=32, compilation=policy)
    assert torch.equal(lm.generate(prompt, max_new_tokens=6, do_sample=False), wanted)
    assert g.graph_calls == 6, "the prompt, too"
    assert not g.eager_calls
    assert "past_key_values: StaticCache 1, in one of its states" in g.explain()


def test_generate_of_many_lengths(backend: GraphBackend, caplog: pytest.LogCaptureFixture) -> None:
    lm = decoder(backend)
    g = cgplan.graphed_generate(lm, max_cache_len=32)
    for length in range(1, 21):
        lm.generate(torch.full((1, length), 3, device=backend.device), max_new_tokens=1)
    assert caplog.text.count("16 shapes came, now input_ids: int64 [1, 18], ") == 1
    prompt = torch.full((1, 20), 3, device=backend.device)
    wanted = lm.generate(prompt, max_new_tokens=1)
    assert not g.graph_calls
    assert torch.equal(lm.generate(prompt, max_new_tokens=1), wanted)
    assert g.graph_calls == 1, "of the third call"
    assert set(g.eager_calls) == {"the first calls of a kind"}


def test_generate_tells_why_it_finds_no_graph(
    backend: GraphBackend, caplog: pytest.LogCaptureFixture
) -> None:
    lm = decoder(backend)
    prompt = torch.randint(2, 200, (2, 9), device=backend.device)
    g = cgplan.graphed_generate(lm, max_cache_len=32)
    lm.generate(prompt, max_new_tokens=20, return_dict_in_generate=True, num_beams=2)
    lm.generate(prompt, max_new_tokens=12, use_cache=False)
    other = (
        "does not use the cache that graphed_generate keeps for graphs; eager tokens are right: "
        "docs/graphed.md, Options and models without graphs"
    )
    reasons = {
        f"generate with return_dict_in_generate=True and num_beams {other}": 20,
        f"generate with use_cache=False {other}": 12,
    }
    assert g.eager_calls == reasons, "for these reasons alone"
    assert all(f"graphed Qwen3ForCausalLM.forward: {reason}" in caplog.text for reason in reasons)


def test_generate_tells_which_half_of_guidance_has_graphs(backend: GraphBackend) -> None:
    lm = decoder(backend)
    prompt = torch.randint(2, 200, (2, 9), device=backend.device)
    options = {"max_new_tokens": 6, "do_sample": False, "guidance_scale": 1.5}
    wanted = lm.generate(prompt, **options)
    g = cgplan.graphed_generate(lm, max_cache_len=32)
    lm.generate(prompt, max_new_tokens=2, guidance_scale=1.0)
    told = "with guidance_scale the unconditional half runs eagerly"
    assert told not in g.explain()
    beams = {**options, "num_beams": 2}
    lm.generate(prompt, **beams)
    assert told not in g.explain(), "both halves run eagerly"
    assert g.eager_calls[next(reason for reason in g.eager_calls if "num_beams" in reason)] == 12
    for _ in range(2):
        assert torch.equal(lm.generate(prompt, **options), wanted)
    assert told in g.explain()
    assert replays(g) > 0


def test_generate_with_a_config_as_transformers_wants_it(
    backend: GraphBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not written, brings no warning, and transformers compiles nothing."""
    from transformers import CompileConfig, GenerationConfig

    lm = decoder(backend)
    compiles = CompileConfig()
    compiles._compile_all_devices = True
    lm.get_compiled_call = None  # it would be called
    prompt = torch.randint(2, 200, (2, 9), device=backend.device)
    config = GenerationConfig(max_new_tokens=6, do_sample=False, compile_config=compiles)
    wanted = lm.generate(prompt, config)
    before = config.to_dict()
    g = cgplan.graphed_generate(lm, max_cache_len=32)
    for given in ((prompt, config), (prompt,)):
        named = {} if given[1:] else {"generation_config": config}
        assert torch.equal(lm.generate(*given, **named), wanted)
    assert replays(g) > 0
    assert config.to_dict() == before
    assert "is deprecated" not in caplog.text


def runs_as_without_graphs(lm: Any, new_tokens: int, max_cache_len: int, told: str) -> None:
    prompt = torch.randint(2, 200, (2, 5), device=lm.device)
    wanted = lm.generate(prompt, max_new_tokens=new_tokens, do_sample=False)
    g = cgplan.graphed_generate(lm, max_cache_len=max_cache_len)
    assert torch.equal(lm.generate(prompt, max_new_tokens=new_tokens, do_sample=False), wanted)
    assert told in g.explain()


def test_generate_without_graphs_for_a_mask_that_is_as_long_as_the_text(
    backend: GraphBackend,
) -> None:
    from transformers import FalconConfig, FalconForCausalLM

    ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    widths = {"vocab_size": 200, "hidden_size": 32, "num_attention_heads": 2}
    config = FalconConfig(**widths, **ends, num_hidden_layers=1, alibi=True)
    lm = FalconForCausalLM(config).to(backend.device).eval()
    runs_as_without_graphs(lm, 6, 16, "generate with alibi does not use the cache")


def test_generate_of_models_that_take_no_static_cache(backend: GraphBackend) -> None:
    """Doge chooses the keys it reads from all that the cache holds, also empty ones."""
    from transformers import DogeConfig, DogeForCausalLM

    ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    widths = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    lm = DogeForCausalLM(DogeConfig(**widths, **heads, **ends)).to(backend.device).eval()
    why = "generate with _can_compile_fullgraph=False of DogeForCausalLM does not use the cache"
    runs_as_without_graphs(lm, 20, 64, why)


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
def test_a_cache_of_the_callers_is_filled(backend: GraphBackend, kind: str) -> None:
    import transformers

    lm = decoder(backend)
    prompt = torch.randint(2, 200, (2, 5), device=backend.device)
    wanted = lm.generate(prompt, max_new_tokens=8, do_sample=False)
    g = cgplan.graphed_generate(lm, max_cache_len=32)
    options = {} if kind == "DynamicCache" else {"config": lm.config, "max_cache_len": 32}
    cache = getattr(transformers, kind)(**options)
    found = lm.generate(prompt, max_new_tokens=8, do_sample=False, past_key_values=cache)
    assert torch.equal(found, wanted)
    assert cache.get_seq_length() == 12
    reasons = " ".join(g.eager_calls)
    is_static = kind == "StaticCache"
    assert ("generate with past_key_values" in reasons) is not is_static
    told = g.explain()
    assert ("generate with past_key_values=DynamicCache does not" in told) is not is_static
    assert ("a new one has no graphs until its third decode step" in told) is is_static
    assert replays(g) == 5 * is_static


def test_generate_without_a_prompt_of_tokens_tells_so(backend: GraphBackend) -> None:
    lm = decoder(backend)
    g = cgplan.graphed_generate(lm, max_cache_len=32)
    g.generate(max_new_tokens=3)
    assert "generate with no input_ids does not use the cache" in g.explain()
    assert "type" not in g.explain()
    with pytest.raises(Exception, match="shape") as refused:  # transformers' own
        lm.generate([[2, 3]], max_new_tokens=3)
    assert "transformers" in str(refused.traceback[-1].path)
    assert "generate with input_ids of type list (pass a tensor) does not use" in g.explain()


def test_generate_with_pictures_by_positions_computed_ahead(backend: GraphBackend) -> None:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    widths = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 64}
    seen = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
    config = Qwen2VLConfig(
        text_config={**widths, **heads, **ends, "rope_parameters": rope},
        vision_config=seen,
        image_token_id=5,
        vision_start_token_id=7,
        vision_end_token_id=8,
    )
    torch.manual_seed(0)
    lm = Qwen2VLForConditionalGeneration(config).to(backend.device).eval()
    picture = torch.tensor([7, 5, 5, 5, 5, 8])
    ids = torch.cat([torch.randint(20, 200, (1, 7)), picture[None]], 1).to(backend.device)
    mask = torch.ones_like(ids)
    grid = torch.tensor([[1, 4, 4]], device=backend.device)
    pixels = torch.randn(16, 3 * 2 * 16, device=backend.device)
    batch = {"input_ids": ids, "attention_mask": mask, "image_grid_thw": grid}
    types = {"mm_token_type_ids": (ids == 5).long()}
    options = {"pixel_values": pixels, "max_new_tokens": 20, "do_sample": False}
    wanted = lm.generate(**batch, **types, **options)
    places, _ = lm.model.get_rope_index(**batch, **types)
    text = (mask.cumsum(-1) - 1).clamp(0)
    g = cgplan.graphed_generate(lm, max_cache_len=32)
    assert torch.equal(lm.generate(**batch, **types, **options), wanted)
    assert not g.graph_calls
    assert "pad them to a few, and replace an argument that grows with each call" in g.explain()
    places = torch.cat([text[None], places])
    assert torch.equal(lm.generate(**batch, position_ids=places, **options), wanted)
    assert replays(g) == 17


def mistral(backend: GraphBackend) -> Any:
    """With a window of 16 tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    widths = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 64}
    config = MistralConfig(**widths, **heads, **ends, sliding_window=16)
    return MistralForCausalLM(config).to(backend.device).eval()


@pytest.mark.parametrize("length", [16, 32])
@pytest.mark.parametrize("kind", ["Mistral", "Gemma2"])
def test_generate_with_a_sliding_window(backend: GraphBackend, kind: str, length: int) -> None:
    """A cache that the window holds needs none; a longer one has no graphs."""
    import transformers

    lm = mistral(backend)
    if kind == "Gemma2":
        heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        widths = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
        ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
        config = transformers.Gemma2Config(**widths, **heads, **ends, sliding_window=16)
        assert "sliding_attention" in config.layer_types
        lm = transformers.Gemma2ForCausalLM(config).to(backend.device).eval()
    prompt = torch.randint(2, 200, (2, 5), device=backend.device)
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    calls = [{"inputs": prompt}, {"input_ids": prompt, "attention_mask": mask}]
    options = {"max_new_tokens": 12, "do_sample": False}
    wanted = [lm.generate(**call, **options) for call in calls]
    g = cgplan.graphed_generate(lm, max_cache_len=length)
    for _ in range(3):
        for call, tokens in zip(calls, wanted, strict=True):
            assert torch.equal(lm.generate(**call, **options), tokens)
    has_graphs = length == 16
    assert (replays(g) > 50) is has_graphs
    told = "generate with sliding or chunked attention does not use the cache"
    assert (told in g.explain()) is not has_graphs
    beyond = "docs/graphed.md, Beyond the window"
    told = f"; max_cache_len=16, the window, has graphs; for longer texts: {beyond}"
    assert (told in g.explain()) is not has_graphs
    assert "ignore" not in g.explain(), "the number decides what the cache does"
    if has_graphs:
        with pytest.raises(InputError) as refused:
            lm.generate(prompt, max_new_tokens=100)
        assert "a larger max_cache_len (above 16, its window, this model" in refused.value.remedy
        assert beyond in refused.value.remedy
        assert "cgplan.load_model serves longer texts" in refused.value.remedy


def test_generate_with_chunked_attention_runs_as_without_graphs(backend: GraphBackend) -> None:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    widths = {"vocab_size": 200, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 32}
    config = Llama4TextConfig(**widths, **heads, **experts, **ends)
    assert "chunked_attention" in config.layer_types
    lm = Llama4ForCausalLM(config).to(backend.device).eval()
    why = "generate with sliding or chunked attention does not use the cache"
    runs_as_without_graphs(lm, 4, 16, why)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_generate_with_flex_attention_runs_as_without_graphs() -> None:
    """Its tokens are others with a static cache."""
    lm = decoder(select_backend("cpu"))
    lm.set_attn_implementation("flex_attention")
    prompt = torch.full((1, 5), 3)
    wanted = lm.generate(prompt, max_new_tokens=2, do_sample=False)
    g = cgplan.graphed_generate(lm, max_cache_len=16)
    assert torch.equal(lm.generate(prompt, max_new_tokens=2, do_sample=False), wanted)
    assert "2 calls ran eagerly: generate with flex_attention does not use" in g.explain()


def test_no_ignore_makes_graphs_of_a_sliding_window(backend: GraphBackend) -> None:
    lm = mistral(backend)
    roots = "past_key_values", "cache", "StaticCache"
    ignore = [f"{root}.layers[*].cumulative_length_int" for root in roots]
    prompts = [
        torch.randint(2, 200, (1, length), device=backend.device) for length in (5, 5, 5, 20, 5, 20)
    ]
    wanted = [lm.generate(prompt, max_new_tokens=12, do_sample=False) for prompt in prompts]
    g = cgplan.graphed_generate(lm, max_cache_len=48, ignore=ignore)
    for prompt, tokens in zip(prompts, wanted, strict=True):
        assert torch.equal(lm.generate(prompt, max_new_tokens=12, do_sample=False), tokens)
    assert not replays(g)
    assert "lm.config.sliding_window" not in g.explain(), "a text may be longer"
