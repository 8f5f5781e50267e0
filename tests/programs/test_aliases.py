"""Arguments that are the same tensor, or tensors of the model; methods of submodules; modes around a call; states of objects."""

from __future__ import annotations

import decimal
import functools
import gc
import weakref
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs.harness import Program, check, program
from programs.parts import Steps, Wrap, device, mlp, rows
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import cgplan

programs: list[Program] = []


@program(programs, graphs=True)
def attention_that_asks_whether_key_is_query(graphed: Wrap) -> Steps:
    layer = nn.Linear(8, 8).to(device)

    def attend(query: Tensor, key: Tensor) -> Tensor:
        return layer(query) * (2.0 if query is key else 1.0) + key

    g = graphed(attend)
    for step in range(16):
        x = rows(4, 8)
        yield g(x, x) if step % 2 else g(x, rows(4, 8))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("h", torch.zeros(4, 8))
        self.default = torch.ones(4, 8, device=device)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        self.h.copy_(0.5 * self.h + x)  # written before the argument is read
        return h * 2 if h is not self.default else h * 3


@pytest.mark.parametrize("first", [2, 7], ids=["captured with it", "later"])
@pytest.mark.parametrize("which", ["h", "view", "default"])
def test_a_tensor_of_the_model_as_an_argument(which: str, first: int) -> None:
    def steps(graphed: Wrap) -> Steps:
        model = Recurrent().to(device).eval()
        g = graphed(model)
        for step in range(12):
            shared = {"h": model.h, "view": model.h[:], "default": model.default}[which]
            yield g(rows(4, 8), shared if step >= first else torch.zeros(4, 8, device=device))

    check(Program(which, steps, first == 7))


@dataclass
class Sample:
    x: Tensor

    def __post_init__(self) -> None:
        self.scale = 1.0


@program(programs, graphs=True)
def a_dataclass_with_attributes_that_are_no_fields(graphed: Wrap) -> Steps:
    g = graphed(lambda sample: sample.x * sample.scale)
    for step in range(12):
        sample = Sample(rows(4, 8))
        sample.scale = 4.0 if step > 6 else 1.0
        yield g(sample)


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(8, 8)
        self.config = {"gain": 1.0}

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"y": self.net(x) * self.config["gain"], "config": self.config}


@program(programs, graphs=False)
def a_dict_of_the_model_that_the_caller_writes(graphed: Wrap) -> Steps:
    g = graphed(Configured().to(device).eval())
    for step in range(16):
        answer = g(rows(4, 8))
        if step % 5 == 4:
            answer["config"]["gain"] *= 0.5
        yield answer["y"]


@program(programs, graphs=False)
def a_list_that_was_given_comes_back(graphed: Wrap) -> Steps:
    layer = nn.Linear(8, 8).to(device)
    g = graphed(lambda x, past: (layer(x) + past[0], past))
    past = [rows(4, 8), rows(4, 8)]
    for _ in range(8):
        y, returned = g(rows(4, 8), past)
        returned.reverse()
        yield y, past


class Choice(Enum):
    LOW = 1.0
    HIGH = 5.0


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (Choice.LOW, Choice.HIGH),
        (decimal.Decimal(1), decimal.Decimal(5)),
        ((Choice.LOW,), (Choice.HIGH,)),
    ],
)
def test_an_object_argument_that_holds_another_value(low: Any, high: Any) -> None:
    def scale(held: Any) -> float:
        held = held[0] if isinstance(held, tuple) else held
        return float(getattr(held, "value", held))

    def steps(graphed: Wrap) -> Steps:
        g, options = graphed(lambda x, o: x * scale(o.v)), SimpleNamespace(v=low)
        for step in range(14):
            options.v = high if step > 6 else low
            yield g(rows(4, 8), options)

    check(Program("state", steps, True))


GAIN = {"z": 1.0}


class Vae(nn.Module):
    scale = (1.0,)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def encode(self, x: Tensor) -> Tensor:
        return self.layer(x) * GAIN["z"] * self.scale[0]


class Base(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * GAIN["z"]


class Derived(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


@program(programs, graphs=True)
def what_a_method_of_a_submodule_reads(graphed: Wrap) -> Steps:
    vae = Vae().to(device).eval()
    pipe = nn.Module()
    pipe.vae = vae
    g = graphed(lambda x: pipe.vae.encode(x))
    for step in range(16):
        if step == 6:
            GAIN["z"] = 2.0
        if step == 10:
            Vae.scale = (3.0,)
        yield g(rows(4, 8))
    GAIN["z"], Vae.scale = 1.0, (1.0,)


@program(programs, graphs=True)
def what_an_overridden_forward_reads(graphed: Wrap) -> Steps:
    g = graphed(Derived().eval())
    for step in range(12):
        GAIN["z"] = 2.0 if step > 6 else 1.0
        yield g(rows(4, 8))
    GAIN["z"] = 1.0


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.nn.functional.linear else found


@program(programs, graphs=True)
def modes_around_a_call(graphed: Wrap) -> Steps:
    layer = nn.Linear(8, 8).to(device).eval()
    g = graphed(lambda x: (layer(x), torch.ones(3)))
    for step in range(10):
        x = rows(4, 8)
        if step > 5:
            with Doubling():
                yield g(x)[0]
            with torch.device("meta"):
                yield str(g(x)[1].device)
        yield g(x)


@program(programs, graphs=True)
def outputs_that_are_written_before_backward(graphed: Wrap) -> Steps:
    model = mlp()
    g = graphed(model)
    for _ in range(8):
        model.zero_grad()
        y = g(rows(3, 8))
        y += 1
        y.mul_(2).sum().backward()
        yield model[0].weight.grad


@pytest.mark.parametrize("case", programs, ids=lambda case: case.name)
def test_program(case: Program) -> None:
    options = {"grad": "recompute"} if "backward" in case.name else {}
    check(case, lambda model=None, **more: cgplan.graphed(model, **{**options, **more}))


@functools.lru_cache(maxsize=1)
def table(length: int) -> Tensor:
    return torch.linspace(0, length, length, device=device)


def test_tables_that_only_a_cache_of_functions_holds() -> None:
    """A graph keeps what it reads, and the cache may drop: its memory would be given to others."""
    layer = nn.Linear(8, 8).to(device).eval()
    table.cache_clear()
    inputs = {"x": cgplan.Input(shape=("num_tokens", 16, 8), dtype="float32", pad=0)}
    sizes = {"cudagraph_capture_sizes": [2, 4]}

    def model(x: Tensor) -> Tensor:
        return layer(x) + table(x.shape[1])[:, None] + table(x.shape[0])[:, None, None]

    def right(x: Tensor) -> Tensor:
        rows, length = (torch.linspace(0, n, n, device=device) for n in x.shape[:2])
        return layer(x) + length[:, None] + rows[:, None, None]

    runner = cgplan.capture(model, inputs, compilation=sizes, device=device)
    for count in (2, 4, 2, 4):
        table(1000)
        junk = [torch.full((n,), -77.0, device=device) for n in (2, 4, 16) for _ in range(64)]
        x = rows(count, 16, 8)
        torch.testing.assert_close(runner(x=x), right(x))
        del junk
    runner.close()


@pytest.mark.parametrize("only", [(1,), (1, 2), (1, 2, 4)])
def test_a_table_that_some_sizes_read_is_held(only: tuple[int, ...]) -> None:
    table.cache_clear()
    inputs = {"x": cgplan.Input(shape=("num_tokens", 4), dtype="float32", pad=0)}
    sizes = {"cudagraph_capture_sizes": [1, 2, 4]}

    def model(x: Tensor) -> Tensor:
        return x * table(len(x)).sum() if len(x) in only else x * 2

    runner = cgplan.capture(model, inputs, compilation=sizes, device=device)
    held = weakref.ref(table(1))
    table(1000)
    gc.collect()
    assert held() is not None
    runner.close()
    del runner
    gc.collect()
    assert held() is None
