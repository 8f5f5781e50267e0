"""What a fingerprint sees of a model, what counts as a change, and what has moved."""

from __future__ import annotations

import gc
import io
import itertools
import math
import random
import threading
import weakref
from array import array
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from checks import Wrapper
from torch import Tensor, nn

from cgplan.errors import AddressError
from cgplan.graphs.fingerprint import Fingerprint

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


def holds(value: Any) -> Fingerprint:
    return Fingerprint.of({"x": value}, CPU)


def lines(state: Fingerprint, now: Fingerprint | None = None) -> list[str]:
    """Kind and path of all that moved."""
    return [
        f"{kind} {line.split(':')[0]}"
        for kind, found in state.moved(now or Fingerprint.of(state.roots, CPU)).items()
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
    "methods of a tensor": (lambda: [t().add, t().norm], ["x[0].__self__", "x[1].__self__"]),
    "call": (lambda: Caller(t()), ["x.held", "x.<GLOBAL>"]),
    "closure": (lambda: closed_over(nn.Linear(2, 2, bias=False)), ["x.<value>.weight"]),
    "function": (lambda: named(has_a_default, "kept", t()), ["x.__defaults__[0]", "x.kept"]),
    "scripted": (lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2))), ["x[0].weight", "x[0].bias"]),
    "flattened": (lambda: Wrapper(t()), ["x.inner"]),
    "loud": (lambda: t().as_subclass(Loud), ["x"]),
    "compiled": (lambda: torch.compile(nn.Linear(2, 2, bias=False)), ["x._orig_mod.weight"]),
    "nothing": (
        lambda: [torch, Model, {t()}, t().to("meta"), t().to_sparse(), threading.Lock(), "text", object()], [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_what_is_seen(name: str) -> None:
    make, paths = SEEN[name]
    value = make()
    assert sorted(addressed(value)) == sorted(paths)
    state = holds(value)
    assert state.count == len(paths)
    assert state.changes() == {}
    assert lines(state) == []
    assert f"{len(paths)} tensors" in state.summary()


def test_generators_and_compiled_code_are_found() -> None:
    own = torch.Generator()
    model = Model()
    model.generators = {"a": [own, torch.default_generator]}
    assert holds(model).generators == (own,)
    assert holds(uses_globals).generators == (GENERATOR,)
    model.never = torch.compiler.disable(lambda x: x + 1)
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
    assert not state.changes()
    assert lines(state) == []
    del slots.gone
    assert [str(change) for change in state.changes().values()] == [
        "x[1].gone (it was a tensor [2] and is absent)"
    ]
    assert lines(state) == ["missing x[1].gone"]


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
    assert len(state.changes()) == 1


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
    assert not state.changes()
    if lets_go:
        state.let_go()
    move(model)
    if not lets_go:
        assert state.changes()
    assert lines(state, holds(model)) == moved
    if moved[0].startswith("added"):
        state.refuse_moved("FULL 4", {"x": model}, may_grow=True)
        with pytest.raises(AddressError, match="0 changed, 0 missing, 1 added"):
            state.refuse_moved("FULL 4", {"x": model})
    else:
        with pytest.raises(AddressError, match=r"FULL 4 was captured with 7 tensors; some"):
            state.refuse_moved("FULL 4", {"x": model}, may_grow=True)
    assert kept


def test_objects_made_again_of_the_same_tensors_pass() -> None:
    a, b = t(), t()
    state = Fingerprint.of({"metadata": {"layers": [Data(a, Pair(b, 1))], "n": 1}}, CPU).let_go()
    state.refuse_moved("FULL 4", {"metadata": {"layers": [Data(a, Pair(b, 2))], "n": 2}})
    with pytest.raises(AddressError, match=r"metadata\.layers\[0\]\.second\.left"):
        state.refuse_moved("FULL 4", {"metadata": {"layers": [Data(a, Pair(t(), 2))], "n": 2}})


def test_a_second_name_takes_nothing_out() -> None:
    model = Model()
    state = holds(model).let_go()
    model.__dict__ = {"helper": SimpleNamespace(layer=model.layers[0]), **model.__dict__}
    assert not any(state.moved(holds(model), may_grow=True).values())


def test_what_was_exchanged_on_the_same_memory_has_not_moved() -> None:
    model = Model()
    state = holds(model)
    model.steps = model.steps.detach()
    assert list(state.changes()) == ["x.steps"]
    state.refuse_moved("FULL 4")


def test_nothing_is_held_once_it_let_go() -> None:
    model = Model()
    tensor, state = weakref.ref(model._cache[0]), holds(model)
    state.let_go()
    model._cache = None
    gc.collect()
    assert tensor() is None


def test_addresses_that_graphs_do_not_read_and_that_each_run_binds_are_not_compared() -> None:
    model = Model()
    state = holds(model)
    state.narrow(["x._cache[0]"])
    assert {place.path for place in state.checked()} == {
        "x._cache[0]", "x.steps", *(f"x.layers[{i}].{name}" for i in (0, 1) for name in ("weight", "bias")),
    }  # fmt: skip
    model._cache[1]["a"] = t()
    assert lines(state) == []
    model._cache[0] = t()
    assert lines(state) == ["changed x._cache[0]"]
    state.volatile.add("x._cache")
    assert lines(state) == []
    model.steps = t()
    assert lines(state) == ["changed x.steps"]


def test_an_exchanged_generator_is_refused() -> None:
    model = Model()
    model.generator = torch.Generator()
    state = holds(model)
    model.generator.manual_seed(3)
    state.refuse_moved("FULL 4")
    model.generator = torch.Generator()
    with pytest.raises(
        AddressError, match=r"FULL 4 was captured with other torch\.Generator objects"
    ):
        state.refuse_moved("FULL 4")


# --- what counts as a change ------------------------------------------------------------------------------------


class Holder:
    """Values of all kinds."""

    shared: ClassVar = [1]

    def __init__(self) -> None:
        self.number, self.whole, self.text, self.nothing = 0.0, 1, "on", None
        self.listed, self.named, self.several, self.pair = [1, 2], {"a": 1}, {1}, (1, math.nan)
        self.array, self.raw, self.packed = np.zeros(2), bytearray(2), array("d", [0.0])
        self.random, self.drawn = random.Random(1), np.random.default_rng(1)
        self.written = io.StringIO()
        self.tensor, self.weight = t(), nn.Parameter(torch.zeros(2, 3))
        self.module = nn.Sequential(nn.Linear(2, 2))
        self.act = self.method

    def forward(self, x: Tensor) -> Tensor:
        return x * len(self.shared)

    def method(self, x: Tensor) -> Tensor:
        return x

    def other(self, x: Tensor) -> Tensor:
        return x


CHANGES: dict[str, tuple[Callable[[Holder], Any], list[str]]] = {
    "the sign of 0": (lambda h: setattr(h, "number", -0.0), ["x.number (it was 0.0 and is -0.0)"]),
    "the type": (lambda h: setattr(h, "whole", True), ["x.whole (it was 1 and is True)"]),
    "text": (lambda h: setattr(h, "text", "off"), ["x.text (it was 'on' and is 'off')"]),
    "None": (lambda h: setattr(h, "nothing", t()), ["x.nothing (it was None and is a tensor [2])"]),
    "a longer list": (lambda h: h.listed.append(3), ["len(x.listed) (it was 2 and is 3)"]),
    "a shorter list": (
        lambda h: h.listed.pop(), ["x.listed[1] (it was 2 and is absent)", "len(x.listed) (it was 2 and is 1)"],
    ),
    "an item": (lambda h: h.listed.reverse(), [
        "x.listed[0] (it was 1 and is 2)", "x.listed[1] (it was 2 and is 1)",
    ]),
    "a key": (lambda h: h.named.update(b=2), ["x.named.b (it was absent and is 2)"]),
    "no key": (lambda h: h.named.clear(), ["x.named.a (it was 1 and is absent)"]),
    "another key": (lambda h: (h.named.clear(), h.named.update(b=1)), [
        "x.named.a (it was 1 and is absent)", "x.named.b (it was absent and is 1)",
    ]),
    "a set": (lambda h: (h.several.clear(), h.several.add(2)), ["x.several (its contents)"]),
    "a tuple": (lambda h: setattr(h, "pair", (2, math.nan)), ["x.pair (another tuple)"]),
    "an array": (lambda h: h.array.__setitem__(0, 1), ["x.array (its contents)"]),
    "bytes": (lambda h: h.raw.__setitem__(0, 1), ["x.raw (its contents)"]),
    "an array of Python": (lambda h: h.packed.append(1), ["x.packed (its contents)"]),
    "a generator of Python": (lambda h: h.random.random(), ["x.random (its contents)"]),
    "a generator of NumPy": (lambda h: h.drawn.random(), ["x.drawn (its contents)"]),
    "a buffer of text": (lambda h: h.written.write("a"), ["x.written (its contents)"]),
    "an attribute": (lambda h: setattr(h, "more", 1), ["x.more (it was absent and is 1)"]),
    "a method": (lambda h: setattr(h, "act", h.other), ["x.act (another method)"]),
    "the class": (lambda h: h.shared.append(1), ["len(x.shared) (it was 1 and is 2)"]),
    "the attributes": (
        lambda h: setattr(h, "__dict__", dict(h.__dict__)), ["x.__dict__ (it was 'its own' and is 'another one')"],
    ),
    "memory": (lambda h: h.tensor.set_(t()), ["x.tensor (its memory)"]),
    "a tensor": (lambda h: setattr(h, "tensor", t()), ["x.tensor (another tensor)"]),
    "strides": (lambda h: setattr(h.weight, "data", h.weight.data.view(3, 2).t()), [
        "x.weight (it was torch.float32 [2, 3] with strides [3, 1] "
        "and is torch.float32 [2, 3] with strides [1, 2])",
    ]),
    "a shape": (lambda h: h.tensor.resize_(1), [
        "x.tensor (it was torch.float32 [2] with strides [1] and is torch.float32 [1] with strides [1])",
    ]),
    "a gradient": (
        lambda h: h.weight.requires_grad_(False), ["x.weight.requires_grad (it was True and is False)"],
    ),
    "a mode": (lambda h: h.module[0].eval(), ["x.module[0].training (it was True and is False)"]),
    "a module": (lambda h: h.module.append(nn.ReLU()), ["x.module[1] (it was absent and is a ReLU)"]),
    "a hook": (
        lambda h: h.module[0].register_forward_hook(print),
        ["x.module[0]._forward_hooks[0] (it was absent and is a builtin_function_or_method)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_counts_as_a_change(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Holder, "shared", [1])
    monkeypatch.setattr(torch.utils.hooks.RemovableHandle, "next_id", 0)
    change, found = CHANGES[name]
    holder = Holder()
    state = holds(holder)
    change(holder)
    assert list(map(str, state.changes().values())) == found
    is_tensor_like_before = name in ("memory", "a tensor")
    assert all(found.is_move is is_tensor_like_before for found in state.changes().values())


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_tensor_without_strides_that_was_exchanged_is_named(layout: torch.layout) -> None:
    held = SimpleNamespace(eye=torch.eye(2).to_sparse(layout=layout))
    state = holds(held)
    held.eye = torch.eye(2).to_sparse(layout=layout)
    assert list(map(str, state.changes().values())) == ["x.eye (another tensor)"]


SAME: dict[str, Callable[[Holder], Any]] = {
    "numbers in a tensor": lambda h: h.tensor.add_(1),
    "an equal value": lambda h: setattr(h, "text", "".join(["o", "n"])),
    "an equal tuple": lambda h: setattr(h, "pair", (1, math.nan)),
    "the same items": lambda h: (h.listed.clear(), h.listed.extend([1, 2])),
    "the method again": lambda h: setattr(h, "act", h.method),
    "there and back": lambda h: (h.module.train(False), h.module.train()),
    "a view elsewhere": lambda h: h.weight.view(-1).detach().t_(),
}


@pytest.mark.parametrize("name", SAME)
def test_what_is_no_change(name: str) -> None:
    holder = Holder()
    state = holds(holder)
    SAME[name](holder)
    assert not state.changes()


def test_an_iterator_counts_as_changed_by_each_run() -> None:
    def generate() -> Any:
        yield 1

    state = holds([iter([t()]), generate(), itertools.count()])
    assert set(state.changes()) == {"x[0]", "x[1]", "x[2]"}
    assert state.count == 0


def test_random_generators_of_the_host_are_compared_where_that_is_asked_for() -> None:
    paths = ["Python's random numbers", "NumPy's random numbers"]
    for draw, path in zip((random.random, np.random.random), paths, strict=True):
        plain, asked = holds(None), Fingerprint.of({"x": None}, CPU, draws=True)
        assert not asked.changes()
        draw()
        assert not plain.changes()
        assert list(asked.changes()) == [path]
        assert not asked.without_draws().changes()


def test_what_is_bound_in_closures_globals_slots_and_deques_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    total, slots, ring = 0, Slots(t()), deque([t()], maxlen=1)

    def forward() -> None:
        nonlocal total
        global GLOBAL
        total, GLOBAL = total + 1, GLOBAL + 1
        slots.own = slots.own + 1
        ring.append(ring[0] + 1)

    monkeypatch.setitem(globals(), "GLOBAL", GLOBAL)
    state = holds(forward)
    forward()
    assert set(state.changes()) == {"x.<total>", "x.<GLOBAL>", "x.<slots>.own", "x.<ring>[0]"}


def test_what_is_bound_in_defaults_and_in_tensors_that_wrap_others_is_seen() -> None:
    def scaled(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    held = [scaled, wrapper := Wrapper(t())]
    state = holds(held)
    scaled.__defaults__ = (3.0,)
    wrapper.inner = t()
    assert set(state.changes()) == {"x[0].__defaults__", "x[1].inner"}


def test_what_is_ignored() -> None:
    model = Model()
    state = holds(model)
    model.layers[0].calls = model.layers[1].calls = model.count = 1
    model._cache.append(t())
    paths = {"x.layers[0].calls", "x.layers[1].calls", "x.count", "len(x._cache)"}
    assert set(state.changes()) == paths
    assert set(state.changes(["x.count"])) == paths - {"x.count"}
    assert set(state.changes(["x.layers[*].calls", "x._cache"])) == {"x.count"}
    assert set(state.changes(["x.coun", "x.*.calls", "y.count"])) == paths


def test_a_key_differs_where_values_lengths_or_addresses_do() -> None:
    model = Model()
    first = holds(model).as_key()
    assert {first: 1}[holds(model).as_key()] == 1
    keys = [first]
    for change in (
        lambda: setattr(model, "count", 1),
        lambda: model._cache.append(None),
        lambda: setattr(model, "steps", t()),
        lambda: setattr(model, "steps", None),
    ):
        change()
        keys.append(holds(model).as_key())
    assert len(set(keys)) == 5


def test_a_global_of_another_module_is_seen_and_can_be_put_back() -> None:
    settings = ModuleType("settings_of_models")
    vars(settings)["scale"] = 2
    names: dict[str, Any] = {"__name__": "models_of_users", "settings": settings}
    exec("def forward(x): return x * settings.scale", names)
    record = Fingerprint.of({"model": names["forward"]}, CPU)
    vars(settings)["scale"] = 3
    changes = record.changes()
    assert list(changes) == ["model.<settings.scale>"]
    change = changes["model.<settings.scale>"]
    change.bind(change.was)
    assert vars(settings)["scale"] == 2
    assert not record.changes()
