"""What is seen of a model, what of it moved, and what is put back."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cgplan.errors import AddressError
from cgplan.graphs.footprint import look
from cgplan.graphs.model_state import ModelState

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["left", "right"])
GLOBAL = torch.zeros(2)
GENERATOR = torch.Generator()


def t() -> Tensor:
    return torch.zeros(2)


class Color(Enum):
    RED = 1


class Key:
    def __repr__(self) -> str:
        raise RuntimeError("the repr of a key was called")


@dataclass
class Data:
    first: Any
    second: Any = None


class Slots:
    __slots__ = ("_hidden", "own", "unset")

    def __init__(self, own: Any) -> None:
        self.own, self._hidden = own, [own.clone()]


class Wrapper(Tensor):
    """A tensor that wraps another one, as quantized weights do."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("an operator ran")


class Loud(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("a tensor's own function was called")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.register_buffer("steps", torch.zeros(2))
        self._cache: Any = [t(), {"a": t()}]
        self.count, self.name, self.table = 0, "model", None

    def forward(self, x: Tensor) -> Tensor:
        return x


def named(function: Callable[..., Any], name: str, value: Any) -> Callable[..., Any]:
    setattr(function, name, value)
    return function


def uses_globals(x: Tensor) -> Tensor:
    return x + GLOBAL + torch.rand(2, generator=GENERATOR)


def closed_over(value: Any) -> Callable[[Tensor], Any]:
    return lambda x: value(x)


def has_a_default(a: Any = GLOBAL) -> Any:
    return a


class Caller:
    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, x: Tensor) -> Tensor:
        return x + GLOBAL

    def method(self, x: Tensor) -> Tensor:
        return x


def holds(value: Any) -> ModelState:
    return ModelState.of({"x": value}, CPU)


def lines(state: ModelState, now: ModelState | None = None) -> list[str]:
    """Kind and path of all that moved."""
    return [
        f"{kind} {line.split(':')[0]}"
        for kind, found in state.moved(now or ModelState.of(state.roots, CPU)).items()
        for line in found
    ]


def addressed(value: Any) -> list[str]:
    return [path for path, place in holds(value).places.items() if place.address is not None]


SEEN: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "tensor": (t, ["x"]),
    "containers": (lambda: [t(), (t(),), deque([t()]), {"a": t()}], ["x[0]", "x[1][0]", "x[2][0]", "x[3].a"]),
    "named tuple": (lambda: Pair(t(), [t()]), ["x.left", "x.right[0]"]),
    "keys": (
        lambda: {"b c": t(), 3: t(), Color.RED: t(), Key(): t(), Key(): t(), "class": t()},
        ["x['b c']", "x[3]", "x[Color.RED]", "x[<Key>]", "x[<Key>]#2", "x.class"],
    ),
    "ordered": (lambda: OrderedDict(a=t()), ["x.a"]),
    "objects": (lambda: SimpleNamespace(a=t(), b=Data(t(), [t()])), ["x.a", "x.b.first", "x.b.second[0]"]),
    "slots": (lambda: Slots(t()), ["x._hidden[0]", "x.own"]),
    "module": (
        Model,
        [
            "x._cache[0]", "x._cache[1].a", "x.steps", "x.layers[0].weight", "x.layers[0].bias",
            "x.layers[1].weight", "x.layers[1].bias",
        ],
    ),
    "partial": (
        lambda: partial(uses_globals, t(), extra=[t()]), ["x.func.<GLOBAL>", "x.args[0]", "x.keywords.extra[0]"],
    ),
    "bound method": (lambda: Caller(t()).method, ["x.held", "x.<GLOBAL>"]),
    "call": (lambda: Caller(t()), ["x.held", "x.<GLOBAL>"]),
    "closure": (lambda: closed_over(nn.Linear(2, 2, bias=False)), ["x.<value>.weight"]),
    "function": (lambda: named(has_a_default, "kept", t()), ["x.__defaults__[0]", "x.kept"]),
    "scripted": (lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2))), ["x[0].weight", "x[0].bias"]),
    "flattened": (lambda: Wrapper(t()), ["x.inner"]),
    "loud": (lambda: t().as_subclass(Loud), ["x"]),
    "compiled": (lambda: torch.compile(nn.Linear(2, 2, bias=False)), ["x._orig_mod.weight"]),
    "nothing": (
        lambda: [torch, Model, {t()}, iter([t()]), t().to("meta"), t().to_sparse(), threading.Lock(), "text", object()],
        [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_what_is_seen(name: str) -> None:
    make, paths = SEEN[name]
    value = make()
    assert sorted(addressed(value)) == sorted(paths)
    state = holds(value)
    assert state.count == len(paths)
    assert state.holds()
    assert lines(state) == []
    assert not state.rebound()
    assert f"{len(paths)} tensors" in state.summary()


def test_generators_and_compiled_code_are_found() -> None:
    own = torch.Generator()
    model = Model()
    model.generators = {"a": [own, torch.default_generator]}
    assert holds(model).generators == (own,)
    assert holds(uses_globals).generators == (GENERATOR,)
    assert not holds(model).is_compiled
    model.compiled = torch.compile(lambda x: x + 1)
    assert holds(model).is_compiled
    assert holds(torch.compile(nn.Linear(2, 2))).is_compiled


def test_no_code_of_the_user_runs() -> None:
    class Touchy:
        def __init__(self) -> None:
            self.__dict__["x"] = self.__dict__["shadowed"] = t()

        @property
        def shadowed(self) -> Tensor:
            raise RuntimeError("a property was evaluated")

        def __getattribute__(self, name: str) -> Any:
            if name == "__dict__":
                return object.__getattribute__(self, name)
            raise RuntimeError(f"__getattribute__ was called for {name}")

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("__eq__ was called")

        __hash__ = None  # type: ignore[assignment]

    class TouchySlots:
        __slots__ = ("gone", "y")

        def __getattr__(self, name: str) -> Any:
            raise SystemExit(f"__getattr__ was called for {name}")

    class TouchyDict(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            raise RuntimeError("__getitem__ was called")

        __iter__ = __len__ = keys = values = items = __getitem__  # type: ignore[assignment]

    class TouchyList(list[Any]):
        def __getitem__(self, key: Any) -> Any:
            raise RuntimeError("__getitem__ was called")

        __iter__ = __len__ = __getitem__  # type: ignore[assignment]

    slots = TouchySlots()
    slots.y = slots.gone = t()
    state = holds([Touchy(), slots, TouchyDict(a=t()), TouchyList([t()])])
    assert state.holds()
    assert lines(state) == []
    del slots.gone
    assert not state.holds()
    assert lines(state) == ["missing x[1].gone"]
    state.restore()
    assert slots.gone is slots.y


def test_cycles_and_shared_containers_end() -> None:
    value: list[Any] = [t()]
    for _ in range(200):  # 2 ** 200 paths
        value = [value, value]
    value.append(value)
    assert holds(value).count == 1
    deep: Any = [leaf := t()]
    for level in range(5000):
        deep = [[deep], {"a": deep}, (deep,), Data(deep)][level % 4]
    state = holds(deep)
    assert state.count == 1
    leaf.data = t()
    assert not state.holds()


def swap_modules(model: Model) -> None:
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


MOVES: dict[str, tuple[Callable[[Model], Any], list[str]]] = {
    "data": (lambda m: setattr(m.layers[0].weight, "data", torch.zeros(2, 2)), ["changed x.layers[0].weight"]),
    "set_": (lambda m: m.steps.set_(t()), ["changed x.steps"]),
    "another parameter": (
        lambda m: setattr(m.layers[1], "bias", nn.Parameter(t())), ["changed x.layers[1].bias"],
    ),
    "another module": (
        lambda m: m.layers.__setitem__(0, nn.Linear(2, 2)),
        ["changed x.layers[0].weight", "changed x.layers[0].bias"],
    ),
    "exchanged": (
        swap_modules,
        [f"changed x.layers[{i}].{n}" for i in (0, 1) for n in ("weight", "bias")],
    ),
    "deleted": (lambda m: delattr(m, "steps"), ["missing x.steps"]),
    "None": (lambda m: setattr(m, "steps", None), ["missing x.steps"]),
    "hidden": (lambda m: m._cache.__setitem__(0, t()), ["changed x._cache[0]"]),
    "shorter": (lambda m: m._cache.pop(), ["missing x._cache[1].a"]),
    "added": (lambda m: m.register_buffer("more", t()), ["added x.more"]),
    "in a dict": (lambda m: m._cache[1].update(b=t()), ["added x._cache[1].b"]),
    "another form": (lambda m: m.steps.as_strided_((1,), (1,)), ["reshaped x.steps"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("lets_go", [False, True])
def test_what_moved_is_named(name: str, lets_go: bool) -> None:
    move, moved = MOVES[name]
    model = Model()
    state, kept = holds(model), holds(model)  # the second keeps memory from being used again
    assert state.holds()
    if lets_go:
        state.let_go()
    move(model)
    if not lets_go and not moved[0].startswith(("added", "reshaped")):
        assert not state.holds()
    assert lines(state, holds(model)) == moved
    if moved[0].startswith("added"):
        state.refuse_moved("FULL 4", {"x": model}, may_grow=True)
        with pytest.raises(AddressError, match="0 changed, 0 missing, 1 added"):
            state.refuse_moved("FULL 4", {"x": model})
    else:
        with pytest.raises(AddressError, match=r"FULL 4 was captured with 7 tensors that"):
            state.refuse_moved("FULL 4", {"x": model}, may_grow=True)
    assert kept


def test_objects_made_again_of_the_same_tensors_pass() -> None:
    a, b = t(), t()
    state = ModelState.of({"metadata": {"layers": [Data(a, Pair(b, 1))], "n": 1}}, CPU).let_go()
    state.refuse_moved("FULL 4", {"metadata": {"layers": [Data(a, Pair(b, 2))], "n": 2}})
    with pytest.raises(AddressError, match=r"metadata\.layers\[0\]\.second\.left"):
        state.refuse_moved("FULL 4", {"metadata": {"layers": [Data(a, Pair(t(), 2))], "n": 2}})


def test_a_second_name_takes_nothing_out() -> None:
    model = Model()
    state = holds(model).let_go()
    model.__dict__ = {"helper": SimpleNamespace(layer=model.layers[0]), **model.__dict__}
    assert not any(state.moved(holds(model), may_grow=True).values())


def test_what_was_exchanged_on_the_same_memory_is_held_from_then_on() -> None:
    model = Model()
    state = holds(model)
    assert state.holds()
    model.steps = model.steps.detach()
    assert not state.holds()
    state.refuse_moved("FULL 4")
    assert state.holds()


def test_nothing_is_held_once_it_let_go() -> None:
    model = Model()
    tensor, state = weakref.ref(model._cache[0]), holds(model)
    state.let_go()
    model._cache = None
    gc.collect()
    assert tensor() is None


# --- what is put back -----------------------------------------------------------------------------------------


def each(model: Any) -> None:
    """What every run does."""
    model.steps.add_(1)
    model.layers[0].weight.data.mul_(2)
    model.count += 1
    model.name += "x"
    model._cache[1]["a"] = model._cache[1]["a"] + 1
    model._cache.append(t())
    model._cache[1][len(model._cache[1])] = t()
    model.table = t() if model.table is None else None
    model.made_each_time = t()


def once(model: Any) -> None:
    """What the first run does."""
    if model.table is None:
        model.table = torch.arange(2)
        model.steps.fill_(7)
        model.tables = {2: t()}
        model.count = 5
        model._cache.append(t())


@torch.no_grad()
def looked(value: Any, forward: Callable[[], None], limit: int = 1 << 20) -> ModelState:
    """The state of an object before a look at a forward."""
    state = holds(value)
    look(forward, state, limit)
    return state


@torch.no_grad()
def run(model: Model, change: Callable[[Any], None], captures: int) -> ModelState:
    state = looked(model, lambda: change(model))
    for _ in range(captures):
        change(model)
        with state.noting_capture():
            change(model)
    state.restore()
    return state


@pytest.mark.parametrize("captures", [0, 1, 3])
def test_what_each_run_changes_is_put_back(captures: int) -> None:
    model = Model()
    weight, inner = model.layers[0].weight.clone(), model._cache[1]["a"]
    state = run(model, each, captures)
    assert (model.steps.tolist(), model.count, model.name, model.table) == ([0, 0], 0, "model", None)
    assert torch.equal(model.layers[0].weight, weight)
    assert list(model._cache[1]) == ["a"]
    assert model._cache[1]["a"] is inner
    assert len(model._cache) == 2
    assert not hasattr(model, "made_each_time")
    assert {path for path, (_, kept) in state.outcome.items() if kept == "device"} == {"x.steps", "x.layers[0].weight"}
    assert not state.rebound()
    assert "new" not in [kept for _, kept in state.outcome.values()]


def test_what_is_made_on_first_use_stays_and_is_named() -> None:
    model = Model()
    state = run(model, once, 2)
    assert model.table is not None
    assert (model.steps.tolist(), model.count, len(model._cache)) == ([7, 7], 5, 3)
    assert 2 in model.tables
    new = {path for path, (_, kept) in state.outcome.items() if kept == "new"}
    assert {"x.table", "x.steps", "x.count", "x._cache"} <= new


def test_where_no_capture_succeeds_all_is_put_back() -> None:
    model = Model()
    state = looked(model, lambda: once(model))
    with pytest.raises(RuntimeError, match="no"), state.noting_capture():
        raise RuntimeError("no")
    state.restore()
    assert (model.steps.tolist(), model.count, model.table, len(model._cache)) == ([0, 0], 0, None, 2)
    assert not hasattr(model, "tables")


def test_what_is_bound_in_closures_globals_deques_and_slots_is_put_back() -> None:
    total, slots, ring = 0, Slots(t()), deque([t()], maxlen=1)
    first, own = ring[0], slots.own

    def forward() -> None:
        nonlocal total
        global GLOBAL
        total, GLOBAL = total + 1, GLOBAL + 1
        slots.own = slots.own + 1
        ring.append(ring[0] + 1)

    before, state = GLOBAL, holds(forward)
    forward()
    assert set(state.rebound()) == {"x.<total>", "x.<GLOBAL>", "x.<slots>.own", "x.<ring>[0]"}
    state.restore()
    assert total == 0
    assert GLOBAL is before
    assert slots.own is own
    assert ring[0] is first


def test_only_what_is_written_is_copied_and_restore_may_be_called_again() -> None:
    model = Model()

    def forward() -> None:
        model.steps[:1].add_(1)
        torch.add(model.steps, 1, out=model._cache[0])
        model(model.steps)

    state = looked(model, forward)
    assert state.copied() == 16
    for _ in range(2):
        state.restore()
        assert (model.steps.tolist(), model._cache[0].tolist()) == ([0, 0], [0, 0])
        model.steps.add_(5)


def test_batch_norm_writes_although_its_schema_does_not_say_so() -> None:
    model = nn.BatchNorm1d(2)
    looked(model, lambda: model(torch.randn(4, 2))).restore()
    assert model.running_mean.tolist() == [0, 0]
    assert model.num_batches_tracked.item() == 0


def test_what_is_too_large_is_named() -> None:
    model = Model()
    state = looked(model, lambda: model.steps.add_(1), limit=4)
    state.restore()
    assert model.steps.tolist() == [1, 1]
    assert state.outcome == {"x.steps": (8, "not kept")}


def test_inference_tensors_are_put_back() -> None:
    with torch.inference_mode():
        model = SimpleNamespace(steps=torch.zeros(2))
    looked(model, lambda: model.steps.add_(1)).restore()
    assert model.steps.tolist() == [0, 0]


def test_what_each_run_binds_is_left_alone_later() -> None:
    model = Model()
    state = run(model, lambda m: setattr(m, "_cache", [t(), {"a": t()}]), 1)
    sealed = holds(model)
    sealed.volatile |= state.volatile
    assert sealed.holds()
    model._cache = [None, t()]
    assert sealed.holds()
    assert lines(sealed) == []
    model.steps = t()
    assert lines(sealed) == ["changed x.steps"]


def test_a_counter_that_is_made_on_first_use_begins_where_it_was_made() -> None:
    model = Model()

    def counts(model: Any) -> None:
        if model.table is None:
            model.table, model.filled = torch.zeros(1), torch.empty(2)
            model.filled.fill_(3)
        model.table.add_(1)

    run(model, counts, 2)
    assert model.table.item() == 0
    assert model.filled.tolist() == [3, 3]
