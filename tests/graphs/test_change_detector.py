"""What a call sees of changes of a model, at once and in rotation."""

from __future__ import annotations

import ctypes
import gc
import math
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cgplan.graphs import change_detector as watching
from cgplan.graphs.change_detector import ChangeDetector
from cgplan.graphs.fingerprint import Fingerprint

CPU = torch.device("cpu")
TELLS = watching._watcher("Dict") is not None
told = pytest.mark.skipif(not TELLS, reason="this CPython does not tell of changes of dicts")


class Slots:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 1


class Base(nn.Module):
    def factor(self) -> float:
        return 1.0


class Model(Base):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("turn", torch.ones(2, dtype=torch.complex64))
        self.part, self.slots = SimpleNamespace(count=0), Slots()
        self.listed, self.named = [1, 2], {"a": 1}

        self.array = np.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale * self.factor()  # type: ignore[no-any-return, operator]

    def factor(self) -> float:
        return self.gain * super().factor()


@pytest.fixture(autouse=True)
def classes_as_they_were() -> Iterator[None]:
    gain, factor, of_base = Model.gain, Model.factor, Base.factor
    yield
    Base.factor = of_base  # type: ignore[method-assign]
    Model.gain, Model.factor = gain, factor  # type: ignore[method-assign]


def watch_of(model: Any, **options: Any) -> ChangeDetector:
    return ChangeDetector(Fingerprint.of({"model": model}, CPU), **options)


def calls_until_seen(watch: ChangeDetector, most: int = 100) -> int:
    return next(call for call in range(1, most) if not watch.holds())


def calls_of_a_turn(watch: ChangeDetector) -> int:
    """At most; places that are told of have no turn."""
    record = watch.record
    tensors = sum(place.address is not None for place in record.places.values())
    others = len(record.places) + len(record.stateful) - tensors
    is_told = watching._watcher("Dict") is not None
    most = watching._WITH_WATCHER if is_told else watching._WITHOUT_WATCHER
    parts = (tensors, others, len(record.contents))
    return max(math.ceil(part / count) for part, count in zip(parts, most, strict=True))


@pytest.fixture(params=[pytest.param("told", marks=told), "not told"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With and without an interpreter that tells of changes."""
    if request.param == "not told":
        monkeypatch.setattr(watching, "_watcher", lambda kind: None)
    return str(request.param)


TOLD: dict[str, tuple[Callable[[Model], Any], str]] = {
    "an attribute": (lambda m: setattr(m, "more", 1), "model.more"),
    "of an object": (lambda m: setattr(m.part, "count", 1), "model.part.count"),
    "a dict": (lambda m: m.named.update(a=2), "model.named.a"),
    "a key": (lambda m: m.named.update(b=2), "model.named.b"),
    "no key": (lambda m: m.named.clear(), "model.named.a"),
    "a mode": (lambda m: m.layers[3].eval(), "model.layers[3].training"),
    "a hook": (lambda m: m.layers[3].register_forward_pre_hook(print), "model.layers[3]._forward_pre_hooks"),
    "a module": (lambda m: m.layers.__setitem__(3, nn.Linear(2, 2)), "model.layers[3]"),
    "a parameter": (lambda m: setattr(m.layers[3], "weight", nn.Parameter(torch.ones(2, 2))), "model.layers[3].weight"),
    "assigned": (
        lambda m: m.load_state_dict({n: t.clone() for n, t in m.state_dict().items()}, assign=True), "model.scale",
    ),
    "a class": (lambda m: setattr(Model, "gain", 2.0), "model.gain"),
    "a method": (lambda m: setattr(Model, "factor", lambda self: 2.0), "model.<factor>"),
    "an overridden method": (
        lambda m: setattr(Base, "factor", lambda self: 2.0),
        "model.<Base.factor>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_a_change_in_a_dict_or_a_class_is_seen_by_the_next_call(name: str, way: str) -> None:
    change, path = TOLD[name]
    model = Model()
    watch = watch_of(model)
    assert watch.holds()
    change(model)
    # Without watched dicts an added key is found by the length of its dict.
    assert calls_until_seen(watch) <= (1 if way == "told" else calls_of_a_turn(watch))
    assert any(found.startswith(path) for found in watch.changes())


UNTOLD: dict[str, tuple[Callable[[Model], Any], str]] = {
    "data": (
        lambda m: setattr(m.layers[3].weight, "data", torch.ones(2, 2)),
        "model.layers[3].weight",
    ),
    "strides": (
        lambda m: setattr(m.layers[3].weight, "data", m.layers[3].weight.data.t()),
        "model.layers[3].weight",
    ),
    "a shape": (lambda m: m.scale.resize_(1), "model.scale"),
    "a dtype": (lambda m: setattr(m.scale, "data", m.scale.data.view(torch.int32)), "model.scale"),
    "conjugated": (lambda m: setattr(m.turn, "data", m.turn.data.conj()), "model.turn"),
    "negated": (lambda m: setattr(m.turn, "data", torch._neg_view(m.turn.data)), "model.turn"),
    "sparse": (
        lambda m: torch.utils.swap_tensors(m.scale, m.scale.to_sparse()),
        "model.scale",
    ),
    "double": (lambda m: m.double(), "model.layers[0].weight"),
    "a gradient": (
        lambda m: m.layers[3].weight.requires_grad_(False),
        "model.layers[3].weight.requires_grad",
    ),
    "a list": (lambda m: m.listed.append(3), "len(model.listed)"),
    "an item": (lambda m: m.listed.reverse(), "model.listed[0]"),
    "a slot": (lambda m: setattr(m.slots, "value", 2), "model.slots.value"),
    "a small array": (lambda m: m.array.__iadd__(1), "model.array"),
}


@pytest.mark.parametrize("name", UNTOLD)
def test_other_changes_are_seen_within_one_rotation(name: str, way: str) -> None:
    change, path = UNTOLD[name]
    model = Model()
    watch = watch_of(model)
    for _ in range(3):
        assert watch.holds()
    change(model)
    assert calls_until_seen(watch) <= calls_of_a_turn(watch)
    assert path in watch.changes()


@pytest.mark.parametrize("at", [0, 7, 19])
def test_each_look_sees_one_tensor_that_moved(at: int, way: str) -> None:
    model = Model()
    watch = watch_of(model)
    assert watch.holds()
    weight = model.layers[at].weight
    kept = weight.data
    weight.data = kept.clone()  # type: ignore[operator]
    assert not watch.holds()
    assert f"model.layers[{at}].weight" in watch.changes()
    weight.data = kept
    assert not watch.changes()
    assert watch.holds()


def test_a_tensor_in_a_list_is_looked_at_with_the_places_that_nothing_reports(way: str) -> None:
    """A list of KV caches, say, beside many parameters."""
    model = Model()
    caches = [torch.ones(2) for _ in range(100)]
    model.caches = caches  # type: ignore[assignment]
    watch = watch_of(model)
    caches[50] = torch.ones(2)
    assert calls_until_seen(watch) <= 10


@pytest.mark.parametrize("name", [*TOLD, *UNTOLD])
def test_where_all_is_compared_at_once_the_next_call_sees_each_change(name: str, way: str) -> None:
    model = Model()
    watch = watch_of(model, at_once=True)
    assert watch.holds()
    (TOLD | UNTOLD)[name][0](model)
    assert not watch.holds()


def test_calls_in_other_modes_of_torch_see_the_same(way: str) -> None:
    model = Model()
    watch = watch_of(model, at_once=True)
    modes: list[Callable[[], Any]] = [
        nullcontext,
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.autocast("cpu"),
    ]
    for enter in (*modes, *modes):
        with enter():
            assert watch.holds()
    weight: Any = model.layers[3].weight
    for is_same in (False, True):
        weight.data = weight.data.t()
        for enter in modes:
            with enter():
                assert watch.holds() == is_same


@torch.no_grad()
def test_forwards_and_numbers_that_are_written_in_place_change_nothing(way: str) -> None:
    model = Model()
    watch = watch_of(model)
    for _ in range(100):
        model(torch.ones(3, 2))
        model.scale.add_(1)  # type: ignore[operator]
        model.load_state_dict(model.state_dict())
        assert watch.holds()
    assert watch.holds_all()


def test_what_is_as_it_was_again_holds_after_it_was_compared(way: str) -> None:
    model = Model()
    watch = watch_of(model)
    model.part.count = 1
    assert watch.changes()
    model.part.count = 0
    assert not watch.changes()
    for _ in range(calls_of_a_turn(watch)):
        assert watch.holds()


@told
def test_a_flag_stays_up_until_everything_was_compared() -> None:
    model = Model()
    watch = watch_of(model)
    model.part.count = 1
    model.part.count = 0
    assert not watch.holds()
    assert not watch.holds()
    assert not watch.changes()
    assert watch.holds()


def test_what_one_ignores_is_no_change(way: str) -> None:
    model = Model()
    watch = watch_of(model)
    model.part.count = 1
    assert list(watch.changes()) == ["model.part.count"]
    assert not watch.changes(["model.part.count"])


def test_a_suspicion_is_held_until_everything_was_compared(way: str) -> None:
    watch = watch_of(Model())
    watch.suspect()
    assert not watch.holds()
    assert not watch.changes()
    assert watch.holds()


def test_chosen_places_and_what_holds_them_count_alone(way: str) -> None:
    """As the tensors do that graphs read: after another change they are compared, and the call goes on."""
    model = Model()
    record = Fingerprint.of({"model": model}, CPU)
    watch = ChangeDetector(record, record.checked())
    for _ in range(2):
        model.part.count += 1
        model.more = nn.Linear(2, 2)
        model.listed.append(3)
        for _ in range(calls_of_a_turn(watch)):
            assert watch.holds() or watch.holds_all()
    there, model.layers = model.layers, nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    assert calls_until_seen(watch) <= (1 if way == "told" else calls_of_a_turn(watch))
    assert not watch.holds_all()
    model.layers = there
    assert watch.holds_all()
    assert watch.holds()


def test_a_place_that_is_gone_does_not_hold(way: str) -> None:
    model = Model()
    record = Fingerprint.of({"model": model}, CPU)
    watch = ChangeDetector(record, record.checked(), at_once=True)
    del model.scale
    assert not watch.holds()
    assert not watch.holds_all()


def test_two_watches_of_one_model_are_told_each(way: str) -> None:
    model = Model()
    first, second, third = (watch_of(model, at_once=True) for _ in range(3))
    third.close()
    model.part.count = 1
    assert not first.holds()
    assert not second.holds()
    first.close()
    model.part.count = 0
    assert not second.changes()
    assert second.holds()
    model.part.count = 1
    assert not second.holds()


def test_nothing_is_held_after_close(way: str) -> None:
    before = len(watching._flags)
    model = Model()
    tensor, watch = weakref.ref(model.layers[0].weight), watch_of(model)
    assert (len(watching._flags) > before) is (way == "told")
    watch.close()
    watch.close()
    assert len(watching._flags) == before
    watch.record = None  # type: ignore[assignment]
    del model
    gc.collect()
    assert tensor() is None


def test_a_watch_that_is_dropped_is_closed() -> None:
    before = len(watching._flags)
    model = Model()
    watch_of(model)
    gc.collect()
    assert len(watching._flags) == before
    model.part.count = 1


@told
def test_a_class_that_changes_again_is_seen_again() -> None:
    watch = watch_of(Model())
    for gain in (2.0, 1.0, 3.0):
        Model.gain = gain
        assert not watch.holds()
        assert bool(watch.changes()) is (gain != 1.0)


@told
@pytest.mark.parametrize("kind", ["Dict", "Type"])
def test_one_watcher_serves_the_process_and_without_a_free_one_all_is_compared_in_rotation(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    assert watching._watcher(kind) == watching._watcher(kind) is not None
    taken = []
    add = getattr(ctypes.pythonapi, f"Py{kind}_AddWatcher")
    try:
        with suppress(RuntimeError):
            for _ in range(9):
                taken.append(add(watching._callbacks[kind]))
        monkeypatch.setattr(watching, "_watcher", watching._watcher.__wrapped__)
        assert watching._watcher(kind) is None
        model = Model()
        watch = watch_of(model)
        assert watch.holds()
        model.part.count = 1
        Model.gain = 2.0
        assert calls_until_seen(watch) <= calls_of_a_turn(watch)
    finally:
        for watcher in taken:
            getattr(ctypes.pythonapi, f"Py{kind}_ClearWatcher")(watcher)


@pytest.mark.parametrize("calls", range(0, 60, 7))
def test_where_all_tensors_moved_any_call_sees_it(calls: int) -> None:
    """Few of thousands of places are tensors, and each call compares some places."""
    layers = [*(nn.Linear(2, 2) for _ in range(8)), *(nn.Dropout(0.1) for _ in range(300))]
    model = nn.Sequential(*layers)
    watch = ChangeDetector(Fingerprint.of({"model": model}, torch.device("cpu")))
    for _ in range(calls):
        assert watch.holds()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert not watch.holds()


@told
@pytest.mark.parametrize("holder", ["builtins", "torch.nn.functional", "__main__"])
def test_the_end_of_the_interpreter_is_quiet(holder: str) -> None:
    """A module that goes late holds a model of classes and dicts that go earlier."""
    lines = [
        "import sys, torch, cgplan",
        "class Net(torch.nn.Linear):",
        "    gain = 1.0",
        "    def forward(self, x): return super().forward(x) * self.gain",
        "g = cgplan.graphed(Net(2, 2).eval(), example=torch.ones(1, 2))",
        f"setattr(sys.modules[{holder!r}], 'my_net', g)",
    ]
    text = "\n".join(lines)
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert not found.stderr


@told
def test_a_class_without_versions_is_compared_by_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = watch_of(Model())
    monkeypatch.setattr(watching, "_takes_version", lambda kind: False)
    assert watch.holds()
    assert not watch.changes()
    assert not watch.holds(), "the caller compares"
    Model.gain = 2.0
    assert watch.changes()


def test_a_mode_of_torch_functions_sees_no_comparison(way: str) -> None:
    """As that of `torch.set_default_device`, which takes a microsecond for each attribute of a tensor."""
    model = Model()

    class Counting(TorchFunctionMode):
        count = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    with Counting() as mode:
        watch = watch_of(model)
        counted = mode.count
        assert watch.holds_all()
        assert not watch.changes()
        assert mode.count == counted
        model.scale.add_(1)
        assert mode.count > counted
