"""``before_key``: an engine's own context is set ahead of each key, whenever and however the key is captured."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checks import Tally, same
from torch import Tensor, nn

import cgplan
from cgplan import CUDAGraphMode, GraphRunner, eager_break_during_capture
from cgplan.backends import GraphBackend
from cgplan.errors import ModelError
from cgplan.modes import RUNTIME_MODES, BatchDescriptor
from cgplan.runner.manager import CudaGraphManager
from cgplan.traffic.histogram import StepShape, Traffic
from cgplan.traffic.step_times import StepTimes

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
CONTEXT: Any = SimpleNamespace(scale=None, size=0)  # as engines have one, which their layers read
INPUTS = {"x": (("num_tokens", 4), "float32", 0), "scale": ("num_tokens", "float32", 0)}
TIMES = StepTimes.measured(
    {
        (mode, 0): {1: us, 8: 2 * us}
        for mode, us in zip(RUNTIME_MODES, (1000, 200, 100), strict=True)
    },
    "made up",
)
WAYS: dict[str, dict[str, Any]] = {
    "full": {"cudagraph_mode": "FULL"},
    "modules": {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["attend"]},
    "functions": {"cudagraph_mode": "PIECEWISE"},
}


class Attend(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if CONTEXT.size != len(x):
            raise RuntimeError(f"the context is that of {CONTEXT.size} rows, not of {len(x)}")
        return x * CONTEXT.scale[:, None]


attend_apart = eager_break_during_capture(Attend().forward)


class Net(nn.Module):
    def __init__(self, *, apart: bool = False) -> None:
        super().__init__()
        self.attend, self.apart = Attend(), apart

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return (attend_apart(x + 1) if self.apart else self.attend(x + 1)) * 2


class Engine:
    """Sets the context ahead of each key and of each batch."""

    def __init__(self) -> None:
        self.announced = Tally()
        self.views: dict[int, Mapping[str, Tensor]] = {}

    def before_key(
        self, mode: CUDAGraphMode, key: BatchDescriptor, views: Mapping[str, Tensor]
    ) -> None:
        assert mode is not CUDAGraphMode.NONE
        self.announced.append(key.num_tokens)
        self.views[key.num_tokens] = views
        CONTEXT.scale, CONTEXT.size = views["scale"], key.num_tokens

    def equals_the_model(self, runner: GraphRunner, count: int) -> None:
        device = runner.backend.device
        x, scale = torch.randn(count, 4, device=device), torch.randn(count, device=device)
        size = runner.padded(count)
        assert size is not None
        CONTEXT.scale, CONTEXT.size = torch.nn.functional.pad(scale, (0, size - count)), size
        same(runner(x, scale), (x + 1) * scale[:, None] * 2)


def opened(backend: GraphBackend, way: str, engine: Engine, policy: str = "eager") -> GraphRunner:
    CONTEXT.scale, CONTEXT.size = None, 0
    compilation = {**WAYS[way], "cudagraph_capture_sizes": [2, 4], "capture_policy": policy}
    model = Net(apart=way == "functions").to(backend.device)
    return cgplan.capture(
        model, INPUTS, compilation=compilation, device=backend.device, before_key=engine.before_key
    )


@pytest.mark.parametrize("way", WAYS)
def test_each_key_has_its_context_at_the_start_and_again(backend: GraphBackend, way: str) -> None:
    engine = Engine()
    runner = opened(backend, way, engine)
    assert engine.announced[-2:] == [4, 2], "largest first"
    assert {size: list(views["x"].shape) for size, views in engine.views.items()} == {
        4: [4, 4],
        2: [2, 4],
    }
    for count in (1, 4, 2, 3):
        engine.equals_the_model(runner, count)
    engine.announced.clear()
    runner.recapture()
    assert engine.announced[-2:] == [4, 2]
    engine.equals_the_model(runner, 3)


class CountsRuns(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.lin.compile(backend="eager")
        self.run = itertools.count().__next__

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        self.run()
        return super().forward(x, scale)


def test_a_context_is_no_first_use_that_a_second_look_is_due_to(backend: GraphBackend) -> None:
    engine = Engine()
    CONTEXT.scale, CONTEXT.size = None, 0
    model = CountsRuns().to(backend.device)
    compilation = {"cudagraph_capture_sizes": [4]}
    cgplan.capture(
        model, INPUTS, compilation=compilation, device=backend.device, before_key=engine.before_key
    )
    assert model.run() == 3, "one look, one warm-up, one capture"


@pytest.mark.parametrize("way", WAYS)
def test_a_key_that_a_batch_asks_for_has_its_context(backend: GraphBackend, way: str) -> None:
    engine = Engine()
    runner = opened(backend, way, engine, "lazy")
    engine.announced.clear()
    engine.equals_the_model(runner, 3)
    assert set(engine.announced) == {4}
    engine.equals_the_model(runner, 1)
    assert set(engine.announced) == {4, 2}
    engine.equals_the_model(runner, 4)
    assert not runner.report.failed


@pytest.mark.parametrize("way", WAYS)
def test_a_replan_times_and_captures_in_the_context(backend: GraphBackend, way: str) -> None:
    engine = Engine()
    runner = opened(backend, way, engine, "adaptive")
    traffic = Traffic.of([(StepShape(3, 3, True, 0), 5)], "made up")
    runner.replan(traffic=traffic, apply=False)  # times eager steps and graphs
    report = runner.replan(traffic=traffic, times=TIMES)
    assert not report.failed
    assert runner.plan.capture_sizes == (3,)
    engine.equals_the_model(runner, 3)


def test_auto_tries_each_way_in_the_context(backend: GraphBackend) -> None:
    engine = Engine()
    runner = cgplan.capture(
        Net().to(backend.device),
        INPUTS,
        compilation={
            "cudagraph_mode": "AUTO",
            "splitting_modules": ["attend"],
            "cudagraph_capture_sizes": [2, 4],
        },
        device=backend.device,
        before_key=engine.before_key,
    )
    tried = [note for note in runner.report.plan.notes if "against eager steps" in note]
    assert len(tried) == 1 + (backend.device.type == "cuda"), (
        runner.report.plan.notes
    )  # inductor, too


def test_a_first_replay_is_compared_in_the_context_of_its_key(backend: GraphBackend) -> None:
    engine = Engine()
    runner = opened(backend, "full", engine)
    CONTEXT.scale, CONTEXT.size = None, 0  # a replay of a FULL graph needs none
    engine.announced.clear()
    x, scale = torch.randn(3, 4, device=backend.device), torch.randn(3, device=backend.device)
    same(runner(x, scale), (x + 1) * scale[:, None] * 2)
    assert engine.announced == [4]
    assert (CONTEXT.scale, CONTEXT.size) == (None, 0)


def test_a_manager_passes_it_on(backend: GraphBackend) -> None:
    engine = Engine()
    config = cgplan.Config(
        inputs=INPUTS, compilation={"cudagraph_capture_sizes": [2, 4]}, device=backend.device.type
    )
    with CudaGraphManager(
        config, Net().to(backend.device), backend, before_key=engine.before_key
    ) as manager:
        manager.capture()
        engine.equals_the_model(manager.runner, 3)
        x, scale = torch.ones(4, 4, device=backend.device), torch.ones(4, device=backend.device)
        same(manager.run(x, scale), torch.full_like(x, 4))


@pytest.mark.parametrize("way", WAYS)
def test_its_errors_are_the_models(backend: GraphBackend, way: str) -> None:
    engine = Engine()

    def failing(mode: CUDAGraphMode, key: BatchDescriptor, views: Mapping[str, Tensor]) -> None:
        engine.before_key(mode, key, views)
        if key.num_tokens == 2:
            raise KeyError("no blocks for this key")

    compilation = {**WAYS[way], "cudagraph_capture_sizes": [2, 4]}
    options: dict[str, Any] = {"device": backend.device, "before_key": failing}
    model = Net(apart=way == "functions").to(backend.device)
    with pytest.raises(
        ModelError, match=r"size=2.* at .*test_engine_context.py:\d+.*no blocks for this key"
    ):
        cgplan.capture(model, INPUTS, compilation=compilation, **options)
    if way == "functions":  # choosing the route runs the model in the context of the smallest key
        return
    runner = cgplan.capture(
        model, INPUTS, compilation={**compilation, "capture_policy": "lazy"}, **options
    )
    engine.equals_the_model(runner, 4)
    runner.stage(2)  # asks for the key, and runs nothing
    assert [failed.error for failed in runner.report.failed] == ["ModelError"]
    assert runner.padded(2) == 4, "the larger graph serves it"
    engine.equals_the_model(runner, 2)


class Slots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slots", torch.arange(8))
        self.register_buffer("cache", torch.zeros(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        slots = self.slots[: len(x)]
        self.cache.index_copy_(0, slots, x)
        return self.cache.index_select(0, slots) + slots[:, None]


@pytest.mark.parametrize("policy", ["eager", "lazy"])
@pytest.mark.parametrize("verify", ["off", "first"])
def test_what_an_engine_writes_in_place_is_put_back(
    backend: GraphBackend, policy: str, verify: str
) -> None:
    model = Slots().to(backend.device).eval()
    sizes = {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [2, 4]}
    runner = cgplan.capture(
        model,
        {"x": INPUTS["x"]},
        compilation={**sizes, "capture_policy": policy, "verify": verify},
        device=str(backend.device),
        before_key=lambda *_: model.slots.fill_(15),  # where padding may write
    )
    assert model.slots.tolist() == list(range(8))
    cache = model.cache.clone()
    for first in range(3):
        slots = torch.arange(8, device=backend.device) + first
        model.slots.copy_(slots)
        x = torch.randn(4, 4, device=backend.device)
        same(runner(x=x), x + slots[:4, None])
        assert model.slots.tolist() == slots.tolist()
        cache[first : first + 4] = x
        same(model.cache[:15], cache[:15])
    runner.close()


def test_what_an_engine_makes_for_a_key_stays_as_it_filled_it(backend: GraphBackend) -> None:
    model = Net().to(backend.device).eval()

    def before_key(mode: CUDAGraphMode, key: BatchDescriptor, views: Mapping[str, Tensor]) -> None:
        scale = torch.zeros(key.num_tokens, device=backend.device)
        scale[:] = 3.0
        CONTEXT.scale, CONTEXT.size = scale, key.num_tokens
        views["x"].fill_(7.0)  # padding, or a batch that is compared

    runner = cgplan.capture(
        model,
        INPUTS,
        compilation={"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [4]},
        device=str(backend.device),
        before_key=before_key,
    )
    x = torch.randn(4, 4, device=backend.device)
    same(runner(x=x, scale=torch.ones(4, device=backend.device)), (x + 1) * 6)
    runner.close()


def test_memory_too_large_for_copies_leaves_room_for_other_memory(backend: GraphBackend) -> None:
    model = Slots().to(backend.device).eval()
    model.register_buffer("large", torch.zeros(1 << 12, device=backend.device))

    def before_key(*_: Any) -> None:
        model.large[-1:].zero_()
        model.slots.fill_(15)

    runner = cgplan.capture(
        model,
        {"x": INPUTS["x"]},
        compilation={"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [4], "state_copy": 4096},
        device=str(backend.device),
        before_key=before_key,
    )
    assert model.slots.tolist() == list(range(8))
    x = torch.randn(4, 4, device=backend.device)
    same(runner(x=x), x + torch.arange(4, device=backend.device)[:, None])
    runner.close()


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4))
        self.is_filled = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_filled:
            self.table.fill_(3.0)
            self.is_filled = True
        return x + self.table


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_a_table_that_first_use_fills_stays_where_an_engine_cleared_it(
    backend: GraphBackend, policy: str
) -> None:
    model = Filled().to(backend.device).eval()

    def before_key(*_: Any) -> None:
        if not model.is_filled:
            model.table.zero_()

    runner = cgplan.capture(
        model,
        {"x": INPUTS["x"]},
        compilation={"cudagraph_mode": "FULL", "capture_policy": policy, "verify": "off"},
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 4},
        device=str(backend.device),
        before_key=before_key,
    )
    for rows in (4, 2, 3):
        x = torch.randn(rows, 4, device=backend.device)
        same(runner(x=x), x + 3)
    runner.close()
