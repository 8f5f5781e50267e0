"""The address manifest: what it names, what the fast check and the comparison notice, and what they never touch."""

from __future__ import annotations

import gc
import re
import threading
import types
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cgplan.errors import AddressError, CgplanError
from cgplan.graphs.address_difference import AddressDifference
from cgplan.graphs.addresses import AddressManifest

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["left", "right"])


class Plain:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


@dataclass
class Data:
    first: Any
    second: Any = None
    third: Any = field(default=None, repr=False)


class Base:
    __slots__ = ("inherited",)


class Slots(Base):
    __slots__ = ("_hidden", "own", "unset")

    def __init__(self, own: Any, inherited: Any = None) -> None:
        self.own, self.inherited, self._hidden = own, inherited, own


class Both(Slots):
    """Slots from its bases, and a ``__dict__``."""


class Color(Enum):
    RED = 1


class Key:
    def __repr__(self) -> str:
        raise RuntimeError("the repr of a key was called")


class Called:
    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self) -> Any:
        return self.held


class Wrapper(torch.Tensor):
    """A tensor that wraps another one, as quantized weights do."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("an operator ran")


class Loud(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("a tensor's own function was called")


def t() -> torch.Tensor:
    return torch.zeros(2)


def manifest(value: Any) -> AddressManifest:
    return AddressManifest.of({"x": value}, CPU)


def paths(value: Any) -> list[str]:
    return list(manifest(value).paths)


STRUCTURES = {
    "tensor": (t, ["x"]),
    "parameter": (lambda: torch.nn.Parameter(t()), ["x"]),
    "list": (lambda: [t(), 3, t()], ["x[0]", "x[2]"]),
    "tuple": (lambda: (t(), (t(),)), ["x[0]", "x[1][0]"]),
    "named tuple": (lambda: Pair(t(), [t()]), ["x.left", "x.right[0]"]),
    "deque": (lambda: deque([t()]), ["x[0]"]),
    "dict": (lambda: {"a": t(), "b c": t(), 3: t(), (1, "k"): t()}, ["x.a", "x['b c']", "x[3]", "x[(1, 'k')]"]),
    "number keys": (lambda: {1.5: t(), None: t(), True: t(), float("nan"): t()}, None),
    "keyword key": (lambda: {"class": t()}, ["x['class']"]),
    "enum key": (lambda: {Color.RED: t()}, ["x[Color.RED]"]),
    "object keys": (lambda: {Key(): t(), Key(): t()}, ["x[<Key>]", "x[<Key>]#2"]),
    "tensor key": (lambda: {t(): t()}, ["x[<Tensor>]"]),
    "OrderedDict": (lambda: OrderedDict(a=t()), ["x.a"]),
    "defaultdict": (lambda: defaultdict(list, a=[t()]), ["x.a[0]"]),
    "proxy": (lambda: types.MappingProxyType({"a": t(), Color.RED: t()}), ["x.a", "x[Color.RED]"]),
    "dataclass": (lambda: Data(t(), third=[t()]), ["x.first", "x.third[0]"]),
    "plain": (lambda: Plain(a=t(), b=Plain(c=t())), ["x.a", "x.b.c"]),
    "namespace": (lambda: types.SimpleNamespace(a=t(), b=[t()]), ["x.a", "x.b[0]"]),
    "partial": (lambda: partial(_with, t(), extra=[t()]), ["x.args[0]", "x.keywords.extra[0]"]),
    "partial of an object": (lambda: partial(Called(t())), ["x.func.held"]),
    "slots": (lambda: Slots(t(), t()), ["x.inherited", "x.own"]),
    "both": (lambda: _with(Both(t(), t()), extra=t()), ["x.extra", "x.inherited", "x.own"]),
    "module": (lambda: _module(), ["x.cache[0]", "x.scale", "x.steps", "x.layers[0].weight", "x.layers[0].bias"]),
    "wrapper": (lambda: Wrapper(t()), ["x.inner"]),
    "loud": (lambda: t().as_subclass(Loud), ["x"]),
    "empty tensor": (lambda: torch.empty(0), ["x"]),
}


def _with(value: Any, **attributes: Any) -> Any:
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


def _module() -> torch.nn.Module:
    module = torch.nn.Module()
    module.cache = [t()]
    module.scale = torch.nn.Parameter(t())
    module.register_parameter("none", None)
    module.register_buffer("steps", t())
    module.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    return module


@pytest.mark.parametrize("name", STRUCTURES)
def test_each_structure_is_named_and_matches(name: str) -> None:
    make, expected = STRUCTURES[name]
    value = make()
    made = manifest(value)
    assert expected is None or sorted(made.paths) == sorted(expected)
    assert len(made) == len(made.paths) > 0
    for _ in range(20):  # past the point where the interpreter specialises
        assert made.matches({"x": value})
    assert not made.compare({"x": value})
    assert not made.matches({"x": make()}) or name == "empty tensor"
    assert name == "empty tensor" or made.compare({"x": make()})


def test_addresses_are_those_of_the_tensors() -> None:
    x = torch.zeros(4)
    assert manifest([x, x[1:]]).paths == {"x[0]": x.data_ptr(), "x[1]": x.data_ptr() + 4}


def test_the_order_of_a_dict_is_of_no_account() -> None:
    a, b = t(), t()
    made = manifest({"a": a, "b": b})
    assert made.matches({"x": {"b": b, "a": a}})
    assert not made.matches({"x": {"a": b, "b": a}})


def test_metadata_built_anew_for_each_step_matches() -> None:
    a, b = t(), t()
    made = manifest({"layers": [Data(a, Pair(b, 1))], "n": 1})
    assert made.matches({"x": {"layers": [Data(a, Pair(b, 2))], "n": 2}})


def test_aliases_keep_their_first_path_and_are_checked() -> None:
    shared, inner = t(), Plain(a=t())
    value = {"first": shared, "layers": [inner, inner], "second": [shared]}
    made = manifest(value)
    assert list(made.paths) == ["x.first", "x.layers[0].a"]
    assert made.aliases == {"x.second[0]": "x.first", "x.layers[1]": "x.layers[0]"}
    assert len(made) == 2
    value["second"][0] = t()
    assert not made.matches({"x": value})
    assert [c[0] for c in made.compare({"x": value}).changed] == ["x.second[0]"]
    value["second"][0] = shared
    value["layers"][1] = Plain(a=t())
    assert not made.matches({"x": value})
    assert made.compare({"x": value}).changed == (
        ("x.layers[1].a", inner.a.data_ptr(), value["layers"][1].a.data_ptr()),
    )
    shared.data = t()
    assert [c[0] for c in made.compare({"x": value}).changed] == ["x.first", "x.layers[1].a", "x.second[0]"]


def test_cycles_end() -> None:
    value: list[Any] = [t()]
    node = Plain(up=value, here=t())
    node.me = node
    value += [value, node, {"back": node}]
    made = manifest(value)
    assert list(made.paths) == ["x[0]", "x[2].here"]
    assert made.aliases == {"x[1]": "x", "x[2].up": "x", "x[2].me": "x[2]", "x[3].back": "x[2]"}
    assert made.matches({"x": value})
    node.up = [t()]
    assert not made.matches({"x": value})
    changed = made.compare({"x": value})
    assert [c[0] for c in changed.changed] == ["x[2].up[0]"]


def test_shared_containers_do_not_multiply() -> None:
    value: list[Any] = [t()]
    for _ in range(200):  # 2 ** 200 paths
        value = [value, value]
    made = manifest(value)
    assert len(made) == 1
    assert made.matches({"x": value})
    assert not made.compare({"x": value})


def test_deep_nesting_meets_no_recursion_limit() -> None:
    leaf = t()
    value: Any = [leaf]
    for level in range(5000):
        value = [[value], {"a": value}, (value,), Plain(a=value), Data(value)][level % 5]
    made = manifest(value)
    assert list(made.paths.values()) == [leaf.data_ptr()]
    assert made.matches({"x": value})
    leaf.data = t()
    assert not made.matches({"x": value})
    assert len(made.compare({"x": value}).changed) == 1


def test_what_is_left_alone() -> None:
    class WithClassTensor:
        attribute = t()

    function = lambda: None  # noqa: E731
    function.tensor = t()
    thread = threading.Thread(target=function)
    thread.tensor = t()
    lock = threading.Lock()
    value = [
        torch, WithClassTensor, WithClassTensor(),
        function, thread, lock, threading.Condition(lock), {t()}, iter([t()]),
        (x for x in [t()]), t().to("meta"), t().to_sparse(), weakref.ref(Plain()), Color.RED, "text", 1, None,
        Plain(_private=t()), object(), range(3), torch.float32, torch.Size([1]),
    ]  # fmt: skip
    assert paths(value) == []
    assert manifest(value).matches({"x": value})


def test_no_code_of_the_user_runs() -> None:
    class Touchy:
        def __init__(self) -> None:
            self.__dict__["x"] = self.__dict__["shadowed"] = t()

        @property
        def prop(self) -> torch.Tensor:
            raise RuntimeError("a property was evaluated")

        @property
        def shadowed(self) -> torch.Tensor:
            raise RuntimeError("a property was evaluated")

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"__getattr__ was called for {name}")

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("__eq__ was called")

        __hash__ = None  # type: ignore[assignment]

    class Guarded(Touchy):
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(f"__getattribute__ was called for {name}")

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
    value = [Touchy(), slots, TouchyDict(a=t()), TouchyList([t()])]
    object.__setattr__(guarded := Guarded.__new__(Guarded), "z", t())
    value.append(guarded)
    made = manifest(value)
    assert made.matches({"x": value})
    assert not made.compare({"x": value})
    del slots.gone
    assert not made.matches({"x": value})  # without a call of __getattr__, which would end the test run
    assert made.compare({"x": value}).missing == ("x[1].gone",)


def test_broken_mappings_are_left_alone() -> None:
    class Broken(UserDict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("no")

    assert paths([Broken(), t()]) == ["x[1]"]


def test_an_item_that_is_an_attribute_too_is_named_once() -> None:
    class Output(OrderedDict[str, Any]):
        pass

    value = Output(a=t())
    value.__dict__["a"] = value["a"]
    value.__dict__["b"] = t()
    assert paths(value) == ["x.a", "x.b"]
    value.__dict__["a"] = t()
    assert paths(value) == ["x.a", "x.a#2", "x.b"]


def replace(value: Any, new: Any) -> None:
    value["a"][1] = new


MUTATIONS = {
    "another tensor": (lambda v: replace(v, t()), "changed"),
    "data": (lambda v: setattr(v["a"][1], "data", t()), "changed"),
    "set_": (lambda v: v["a"][1].set_(t()), "changed"),
    "None": (lambda v: replace(v, None), "missing"),
    "a number": (lambda v: replace(v, 3), "missing"),
    "a string": (lambda v: replace(v, "text"), "missing"),
    "an object": (lambda v: replace(v, Plain()), "missing"),
    "another device": (lambda v: replace(v, v["a"][1].to("meta")), "missing"),
    "a list of it": (lambda v: replace(v, [v["a"][1]]), "both"),
    "shrunk": (lambda v: v["a"].pop(), "missing"),
    "grown": (lambda v: v["a"].append(t()), "added"),
    "cleared": (lambda v: v["a"].clear(), "missing"),
    "container gone": (lambda v: v.pop("a"), "missing"),
    "container is a tensor": (lambda v: v.update(a=torch.stack(v["a"])), "both"),
    "container is a number": (lambda v: v.update(a=3), "missing"),
    "key added": (lambda v: v.update(c=t()), "added"),
    "key renamed": (lambda v: v.update(c=v.pop("b")), "both"),
    "attribute gone": (lambda v: delattr(v["b"], "p"), "missing"),
    "attribute added": (lambda v: setattr(v["b"], "q", t()), "added"),
    "empty list filled": (lambda v: v["b"].empty.append(t()), "added"),
    "None filled": (lambda v: setattr(v["b"], "none", t()), "added"),
    "another object": (lambda v: v.update(b=Data(t())), "both"),
    "in a namespace": (lambda v: setattr(v["n"], "kv", t()), "changed"),
    "slot deleted": (lambda v: delattr(v["s"], "own"), "missing"),
    "parameter": (lambda v: setattr(v["m"], "weight", torch.nn.Parameter(t())), "changed"),
    "parameter gone": (lambda v: delattr(v["m"], "weight"), "missing"),
    "empty tensor elsewhere": (lambda v: v.update(e=torch.empty(0, device="meta")), "missing"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_is_noticed(name: str) -> None:
    mutate, kind = MUTATIONS[name]
    plain = Plain(p=t(), none=None, empty=[])
    value = {"a": [t(), t()], "b": plain, "s": Slots(t()), "m": torch.nn.Linear(2, 2), "e": torch.empty(0)}
    value["n"] = types.SimpleNamespace(kv=t())
    kept = [*value["a"], value["n"].kv]  # freed memory would be given to the next tensor
    made = manifest(value)
    assert made.matches({"x": value})
    mutate(value)
    assert not made.matches({"x": value})
    difference = made.compare({"x": value})
    found = {k for k in ("missing", "added", "changed") if getattr(difference, k)}
    assert found == ({"missing", "added"} if kind == "both" else {kind})
    with pytest.raises(AddressError):
        made.check({"x": value}, what="FULL 4")
    assert kept


GROUPS = {
    "list": lambda tensors: tensors,
    "dict": lambda tensors: {f"k.{i}": tensor for i, tensor in enumerate(tensors)},
    "plain": lambda tensors: Plain(**{f"k{i}": tensor for i, tensor in enumerate(tensors)}),
    "parameters": lambda tensors: torch.nn.ParameterList(tensors),
}


@pytest.mark.parametrize("name", GROUPS)
def test_many_tensors_in_one_container(name: str) -> None:
    tensors = [t() for _ in range(20)]
    made = manifest(GROUPS[name](tensors))
    assert len(made) == 20
    assert made.matches({"x": GROUPS[name](list(tensors))})
    others = [tensors[:19], [*tensors, t()], [*tensors[:7], t(), *tensors[8:]], [*tensors[1:], tensors[0]], []]
    for other in others:
        assert not made.matches({"x": GROUPS[name](other)})
        assert made.compare({"x": GROUPS[name](other)})
    if name != "parameters":
        assert not made.matches({"x": GROUPS[name]([*tensors[:7], None, *tensors[8:]])})
    kept, tensors[3].data = tensors[3].detach(), t()
    assert not made.matches({"x": GROUPS[name](tensors)})
    assert len(made.compare({"x": GROUPS[name](tensors)}).changed) == 1
    assert kept.numel()


def test_keys_of_many_tensors() -> None:
    value = {f"k{i}": t() for i in range(20)}
    made = manifest(value)
    assert made.matches({"x": dict(reversed(value.items()))})
    assert not made.matches({"x": {f"k{i + 1}": tensor for i, tensor in enumerate(value.values())}})


@pytest.mark.gpu
def test_a_device_and_the_host() -> None:
    on_host, on_device = t(), t().cuda()
    value = {"h": on_host, "d": on_device, "e": torch.empty(0, device="cuda")}
    made = AddressManifest.of({"x": value}, torch.device("cuda"))
    assert made.paths == {"x.d": on_device.data_ptr(), "x.e": 0}
    assert made.matches({"x": value | {"h": t()}})
    assert not made.matches({"x": value | {"d": on_device.cpu()}})
    assert not made.matches({"x": value | {"e": torch.empty(0)}})
    assert made.compare({"x": value | {"d": on_device.cpu()}}).missing == ("x.d",)


@pytest.mark.parametrize("roots", [{}, {"y": 1}, {"x": None}, {"x": [], "y": []}, 5, None])
def test_other_roots_do_not_match_and_do_not_raise(roots: Any) -> None:
    assert not manifest([t()]).matches(roots)


def test_roots_without_tensors_are_looked_at() -> None:
    made = AddressManifest.of({"args": (5,), "kwargs": {}, "metadata": None}, CPU)
    assert len(made) == 0
    assert made.matches({"args": (6,), "kwargs": {}, "metadata": None})
    x = t()
    for roots in ({"args": (5, x)}, {"kwargs": {"mask": x}}, {"metadata": x}):
        now = {"args": (5,), "kwargs": {}, "metadata": None} | roots
        assert not made.matches(now)
        assert len(made.compare(now).added) == 1


def test_numbers_and_lists_of_numbers_may_change() -> None:
    value = {"x": t(), "ids": [1, 2], "n": 1}
    made = manifest(value)
    value["ids"].append(3)
    value["n"] = 2
    assert made.matches({"x": value})


def test_added_attribute_is_seen_by_comparison() -> None:
    value = {"x": t(), "config": Plain(n=1)}  # holds no tensor: the fast check does not look inside
    made = manifest(value)
    value["config"].late = t()
    assert made.matches({"x": value})
    assert made.compare({"x": value}).added == ("x.config.late",)


def test_structure_that_changed_without_addresses_is_accepted_and_learnt() -> None:
    a = t()
    made = manifest([a])
    for value in ((a,), [a, 1], {0: a}):
        roots = {"x": value}
        assert not made.matches(roots)
        made.check(roots, what="FULL 4")
        assert made.matches(roots)
    for _ in range(20):
        made.check({"x": [a]}, what="FULL 4")
        made.check({"x": (a,)}, what="FULL 4")
    with pytest.raises(AddressError):
        made.check({"x": [t()]}, what="FULL 4")


def test_nothing_is_kept_alive() -> None:
    value = {Key(): Plain(a=t()), "shared": [t()]}
    alive = [weakref.ref(v) for v in (value["shared"][0], *value)[:1]]
    alive += [weakref.ref(v) for v in value.values() if isinstance(v, Plain)]
    alive += [weakref.ref(next(iter(value))), weakref.ref(next(iter(value.values())).a)]
    made = manifest(value)
    assert made.matches({"x": value})
    assert not made.compare({"x": value})
    del value
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4
    assert len(made.paths) == 2


def test_the_device_may_be_given_without_its_index_or_with_it() -> None:
    x = t()
    assert len(AddressManifest.of({"x": x}, torch.device("cpu", 0))) == 1
    assert len(AddressManifest.of({"x": x}, torch.device("meta"))) == 0


def test_equal_structures_share_code_but_not_addresses() -> None:
    a, b = [t(), t()], [t(), t()]
    first, second = manifest(a), manifest(b)
    assert first.matches({"x": a})
    assert second.matches({"x": b})
    assert not first.matches({"x": b})
    assert not second.matches({"x": a})


def test_the_message() -> None:
    value = {"moved": [t() for _ in range(12)], "gone": t(), "rest": t()}
    made = manifest(value)
    old, value["moved"] = value["moved"], [t() for _ in range(12)]
    del value["gone"]
    value["late"] = t()
    with pytest.raises(AddressError) as caught:
        made.check({"x": value}, what="FULL BatchDescriptor(4)")
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "FULL BatchDescriptor(4) was captured with 14 tensors that do not lie where they lay: "
        "12 changed, 1 missing, 1 added"
    )
    for i in range(10):
        now = value["moved"][i].data_ptr()
        assert lines[1 + i] == f"  changed  x.moved[{i}]: {old[i].data_ptr():#x} at capture, {now:#x} now"
    assert lines[11:14] == ["  and 2 more changed", "  missing  x.gone", "  added    x.late"]
    assert "in place" in lines[14]
    assert "static buffer" in lines[14]
    assert "capture again" in lines[14]
    assert issubclass(AddressError, CgplanError)
    assert AddressError.exit_code == 18
    assert not AddressDifference()


# Random structures. `located` is a second, naive walk: (path, container, key, tensor), containers by their first path.


@st.composite
def structures(draw: st.DrawFn) -> list[Any]:
    containers: list[Any] = []
    tensors: list[torch.Tensor] = []

    def build(depth: int) -> Any:
        kinds = ["tensor", "scalar", "old tensor", "old container"]
        kind = draw(st.sampled_from(kinds if depth == 0 else [*kinds, *CONTAINERS, *CONTAINERS]))
        if kind == "old tensor" and tensors:
            return draw(st.sampled_from(tensors))
        if kind == "old container" and containers:
            return draw(st.sampled_from(containers))
        if kind in CONTAINERS:
            count = 2 if kind in ("named", "data", "slots") else draw(st.integers(0, 3))
            made = CONTAINERS[kind]([build(depth - 1) for _ in range(count)])
            containers.append(made)
            return made
        if kind == "scalar":
            return draw(st.sampled_from([None, 1, "s"]))
        tensors.append(t())
        return tensors[-1]

    top: list[Any] = [t(), *(build(3) for _ in range(draw(st.integers(1, 3))))]
    for _ in range(draw(st.integers(0, 2))):  # cycles
        lists = [top, *(c for c in containers if type(c) is list)]
        draw(st.sampled_from(lists)).append(draw(st.sampled_from([top, *containers])))
    return top


CONTAINERS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "dict": lambda items: {("a", 1, "b c")[i]: item for i, item in enumerate(items)},
    "named": lambda items: Pair(*items),
    "data": lambda items: Data(*items),
    "slots": lambda items: Slots(*items),
    "plain": lambda items: Plain(**{"abc"[i]: item for i, item in enumerate(items)}),
}


def children(container: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(container, Pair):
        return [(f".{n}", n, getattr(container, n)) for n in container._fields]
    if isinstance(container, list | tuple):
        return [(f"[{i}]", i, item) for i, item in enumerate(container)]
    if isinstance(container, dict):
        return [({"a": ".a", 1: "[1]", "b c": "['b c']"}[k], k, item) for k, item in container.items()]
    if isinstance(container, Slots):
        return [(f".{n}", n, getattr(container, n)) for n in ("inherited", "own")]
    return [(f".{n}", n, item) for n, item in vars(container).items()] if hasattr(container, "__dict__") else []


def located(top: Any) -> list[tuple[str, Any, Any, torch.Tensor]]:
    found: list[tuple[str, Any, Any, torch.Tensor]] = []
    seen: set[int] = set()

    def walk(path: str, container: Any) -> None:
        if id(container) in seen or isinstance(container, torch.Tensor):
            return
        seen.add(id(container))
        for step, key, item in children(container):
            if isinstance(item, torch.Tensor):
                found.append((path + step, container, key, item))
            walk(path + step, item)

    walk("x", top)
    return found


def put(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, list | dict):
        container[key] = value
    else:
        setattr(container, key, value)


@settings(max_examples=200, deadline=None)
@given(structures(), st.data())
def test_random_structures(top: list[Any], data: st.DataObject) -> None:
    roots = {"x": top}
    made = AddressManifest.of(roots, CPU)
    places = located(top)
    first = {id(tensor): path for path, _, _, tensor in reversed(places)}
    assert made.paths == {path: tensor.data_ptr() for path, _, _, tensor in places if first[id(tensor)] == path}
    assert {p for p, *_ in places} - set(made.paths) <= set(made.aliases)
    assert made.matches(roots)
    assert not made.compare(roots)

    path, container, key, tensor = data.draw(st.sampled_from(places), "place")
    action = data.draw(st.sampled_from(["swap", "replace", "remove", "append"]), "action")
    address = tensor.data_ptr()
    if action == "append":
        top.append(t())
        expected = AddressDifference(added=(f"x[{len(top) - 1}]",))
    elif action == "swap" or isinstance(container, tuple):
        held = tensor.detach()  # else the new memory could be the old
        tensor.data = t()
        same = [p for p, _, _, other in places if other is tensor]
        expected = AddressDifference(changed=tuple((p, address, tensor.data_ptr()) for p in same))
        assert held.data_ptr() == address
    elif action == "replace":
        put(container, key, new := t())
        expected = AddressDifference(changed=((path, address, new.data_ptr()),))
    else:
        put(container, key, None)
        expected = AddressDifference(missing=(path,))
    assert not made.matches(roots)
    found = made.compare(roots)
    assert (found.missing, found.added) == (expected.missing, expected.added)
    assert sorted(found.changed) == sorted(expected.changed)
    with pytest.raises(AddressError, match="FULL 4 was captured with"):
        made.check(roots, what="FULL 4")


@settings(max_examples=100, deadline=None)
@given(structures(), structures())
def test_random_structures_in_place_of_each_other(old: list[Any], new: list[Any]) -> None:
    made = manifest(old)
    assert not made.matches({"x": new})
    assert made.compare({"x": new})


def reviewed(tensor: torch.Tensor, way: str) -> torch.Tensor:
    """The same memory in another form."""
    match way:
        case "type":
            return tensor.view(torch.int32)
        case "shape":
            return tensor.reshape(2, 8)
        case "rows":
            return tensor[:2]
        case "strides":
            return tensor.t()
        case "negated":
            return torch._neg_view(tensor)
    raise AssertionError(way)


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("way", ["type", "shape", "rows", "strides", "negated"])
def test_memory_in_another_form_is_refused(way: str, many: bool, repeats: bool) -> None:
    """Also where the check has been compiled, and where tensors are compared as a group."""
    tensors = [torch.zeros(4, 4) for _ in range(20 if many else 3)]
    held = {"w": tensors}
    made = AddressManifest.of({"x": held}, CPU, repeats=repeats)
    for _ in range(3):
        made.check({"x": held}, what="FULL 4")
    held["w"] = [*tensors[:1], reviewed(tensors[1], way), *tensors[2:]]
    assert made.matches({"x": held}), "the addresses are the same"
    assert made.compare({"x": held}).reshaped[0][0] == "x.w[1]"
    for _ in range(2):
        with pytest.raises(
            AddressError,
            match=r"were others: 0 changed, 1 reshaped, 0 missing, 0 added\n  reshaped  x\.w\[1\]: float32 \[4, 4\]",
        ):
            made.check({"x": held}, what="FULL 4")
    held["w"] = [tensor.view(4, 4) for tensor in tensors]  # other objects of the same form
    made.check({"x": held}, what="FULL 4")
    held["w"][0] = torch.zeros(4, 4)
    with pytest.raises(AddressError, match="1 changed"):
        made.check({"x": held}, what="FULL 4")


def test_what_came_after_the_capture_may_change_again_and_again() -> None:
    model = torch.nn.Linear(2, 2)
    made = AddressManifest.of({"model": model}, CPU, repeats=True)
    for size in range(1, 5):
        model.last = torch.zeros(size)
        made.check({"model": model}, what="FULL 4", may_grow=True)
    model.weight.data = torch.zeros(2, 2)
    with pytest.raises(AddressError, match=r"1 changed, 0 missing, 0 added\n  changed  model\.weight"):
        made.check({"model": model}, what="FULL 4", may_grow=True)


@pytest.mark.parametrize("repeats", [False, True])
def test_only_a_check_that_repeats_keeps_tensors(repeats: bool) -> None:
    held = [t()]
    made = AddressManifest.of({"x": held}, CPU, repeats=repeats)
    for _ in range(2):
        made.check({"x": held}, what="FULL 4")
    assert made.still_holds({"x": held}) == repeats
    reference = weakref.ref(held.pop())
    gc.collect()
    assert (reference() is not None) == repeats
    del made
    gc.collect()
    assert reference() is None


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.norm = torch.nn.LayerNorm(2)
        self.register_buffer("cache", t())
        self.register_buffer("none", None)
        self.state = Plain(kv=[t(), t()], empty=[])
        self.size = 2


class Deep(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.tied = self.blocks[0].linear
        self.tables = torch.nn.ParameterList(t() for _ in range(20))  # so many are read by one call
        self.last = None


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    one.data, other.data = other.data, one.data


MODEL_MUTATIONS = {
    "memory": lambda m: setattr(m.blocks[2].linear.weight, "data", torch.zeros(2, 2)),
    "set_": lambda m: m.blocks[1].cache.set_(t()),
    "two swapped": lambda m: swap(m.blocks[0].norm.weight, m.blocks[0].norm.bias),
    "one of many": lambda m: setattr(m.tables[7], "data", t()),
    "a parameter": lambda m: setattr(m.blocks[1].norm, "weight", torch.nn.Parameter(torch.ones(2))),
    "none": lambda m: setattr(m.blocks[1].norm, "weight", None),
    "deleted": lambda m: delattr(m.blocks[1], "cache"),
    "a number": lambda m: (delattr(m.blocks[1], "cache"), setattr(m.blocks[1], "cache", 3)),
    "a module": lambda m: setattr(m.blocks[1], "norm", torch.nn.LayerNorm(2)),
    "a block": lambda m: m.blocks.__setitem__(2, Block()),
    "a tie": lambda m: setattr(m, "tied", torch.nn.Linear(2, 2)),
    "a dict of parameters": lambda m: setattr(m.blocks[0].norm, "_parameters", dict.fromkeys(("weight", "bias"))),
    "all attributes": lambda m: setattr(m.blocks[0].norm, "__dict__", dict(vars(torch.nn.LayerNorm(2)))),
    "an attribute's list": lambda m: setattr(m.blocks[0].state, "kv", [t(), t()]),
    "an attribute's item": lambda m: m.blocks[0].state.kv.__setitem__(1, t()),
}
GROWTH = {
    "an attribute": lambda m: setattr(m, "last", t()),
    "a module": lambda m: setattr(m.blocks[0], "more", torch.nn.Linear(2, 2)),
    "a buffer": lambda m: m.blocks[1].register_buffer("late", t()),
    "in place of None": lambda m: setattr(m.blocks[1], "none", t()),
    "in an empty list": lambda m: m.blocks[2].state.empty.append(t()),
    "a number": lambda m: setattr(m.blocks[2], "size", 3),
    "a block": lambda m: m.blocks.append(Block()),
}


def repeated(model: torch.nn.Module) -> AddressManifest:
    """A manifest as a runner checks it under `always`, compiled."""
    made = AddressManifest.of({"model": model}, CPU, repeats=True)
    made.check({"model": model}, what="FULL 4", may_grow=True)
    assert made.still_holds({"model": model})
    return made


@pytest.mark.parametrize("name", MODEL_MUTATIONS)
def test_what_moves_in_a_model_is_found_by_repeated_checks(name: str) -> None:
    model = Deep()
    kept = [p.detach() for p in model.parameters()], [b.detach() for b in model.buffers()]
    kept_lists = [block.state.kv for block in model.blocks], [[*block.state.kv] for block in model.blocks]
    made = repeated(model)
    MODEL_MUTATIONS[name](model)
    assert not made.still_holds({"model": model})
    with pytest.raises(AddressError):
        made.check({"model": model}, what="FULL 4", may_grow=True)
    assert kept
    assert kept_lists


@pytest.mark.parametrize("name", GROWTH)
def test_what_comes_to_a_model_is_no_matter_to_repeated_checks(name: str) -> None:
    model = Deep()
    made = repeated(model)
    GROWTH[name](model)
    for _ in range(2):
        made.check({"model": model}, what="FULL 4", may_grow=True)
    assert made.still_holds({"model": model})
    kept = model.blocks[2].linear.weight.detach()
    model.blocks[2].linear.weight.data = torch.zeros(2, 2)
    with pytest.raises(AddressError, match=r"model\.blocks\[2\]\.linear\.weight"):
        made.check({"model": model}, what="FULL 4", may_grow=True)
    assert kept.numel()


def test_another_parameter_on_the_same_memory_is_accepted_and_one_of_another_form_is_not() -> None:
    model = Deep()
    made = repeated(model)
    weight = model.blocks[0].linear.weight
    model.blocks[0].linear.weight = torch.nn.Parameter(weight.detach())
    made.check({"model": model}, what="FULL 4", may_grow=True)
    model.blocks[0].linear.weight = torch.nn.Parameter(weight.detach().t())
    with pytest.raises(AddressError, match="1 reshaped"):
        made.check({"model": model}, what="FULL 4", may_grow=True)


def test_a_tensor_that_is_conjugated_is_refused() -> None:
    model = torch.nn.Module()
    model.register_buffer("w", torch.zeros(3, dtype=torch.complex64))
    made = repeated(model)
    model.w = model.w.conj()
    with pytest.raises(
        AddressError, match=r"model\.w: complex64 \[3\] .*, complex64 \[3\] with strides \[1\], conjugated"
    ):
        made.check({"model": model}, what="FULL 4", may_grow=True)


SECOND_NAMES = {
    "a module": lambda m: setattr(m.blocks[0], "before", m.blocks[2]),
    "in a list": lambda m: setattr(m.blocks[0], "before", [m.blocks[2]]),
    "in a new module": lambda m: setattr(m.blocks[0], "before", torch.nn.ModuleList([m.blocks[2]])),
    "of a part": lambda m: setattr(m.blocks[0], "before", m.blocks[2].linear),
    "of the model": lambda m: setattr(m.blocks[0].state, "above", m),
    "a list": lambda m: setattr(m.blocks[0], "before", m.blocks[2].state.kv),
    "a tensor": lambda m: setattr(m.blocks[0], "before", m.blocks[2].linear.weight),
}
OF_THE_LAST_BLOCK = {
    "a weight": (
        lambda m: setattr(m.blocks[2].linear, "weight", torch.nn.Parameter(torch.ones(2, 2))),
        "linear.weight",
    ),
    "a list's item": (lambda m: m.blocks[2].state.kv.__setitem__(1, t()), "state.kv[1]"),
}


@pytest.mark.parametrize("during", [False, True])
@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("moved", OF_THE_LAST_BLOCK)
@pytest.mark.parametrize("name", SECOND_NAMES)
def test_a_second_name_takes_nothing_out_of_the_check(name: str, moved: str, repeats: bool, during: bool) -> None:
    """Whether it comes after the capture or during it, and though the walk meets it before the first name."""
    model = Deep()
    kept = model.blocks[2].linear.weight, [*model.blocks[2].state.kv]
    before = AddressManifest.of({"model": model}, CPU)
    if during:
        SECOND_NAMES[name](model)
    made = AddressManifest.of({"model": model}, CPU, before=before, repeats=repeats)
    count, paths = len(before), before.paths
    SECOND_NAMES[name](model)
    for _ in range(3):
        made.check({"model": model}, what="FULL 4", may_grow=True)
    assert made.still_holds({"model": model}) == repeats
    assert (len(made), made.paths) == (count, paths)
    move, path = OF_THE_LAST_BLOCK[moved]
    move(model)
    for _ in range(2):
        with pytest.raises(
            AddressError, match=rf"1 changed, 0 missing, 0 added\n  changed  model\.blocks\[2\]\.{re.escape(path)}"
        ):
            made.check({"model": model}, what="FULL 4", may_grow=True)
    assert kept


def test_a_second_name_may_go_again() -> None:
    model = Deep()
    made = repeated(model)
    for _ in range(2):
        model.blocks[0].before = model.blocks[2]
        made.check({"model": model}, what="FULL 4", may_grow=True)
        model.blocks[0].before = torch.nn.Linear(2, 2)
        made.check({"model": model}, what="FULL 4", may_grow=True)
        del model.blocks[0].before
        made.check({"model": model}, what="FULL 4", may_grow=True)
        assert made.still_holds({"model": model})


@pytest.mark.parametrize("repeats", [False, True])
def test_what_is_ignored_by_one_name_is_seen_by_another(repeats: bool) -> None:
    """A longer list takes the place of a shorter one that holds the same: its last tensor is new there, not here."""
    shared = t()
    model = Plain(short=[shared], long=[shared, t()])
    made = AddressManifest.of({"model": model}, CPU, repeats=repeats)
    model.short = model.long
    for _ in range(2):
        made.check({"model": model}, what="FULL 4", may_grow=True)
    kept = model.long[1]
    model.long[1] = t()
    for _ in range(2):
        with pytest.raises(AddressError, match=r"1 changed, 0 missing, 0 added\n  changed  model\.long\[1\]"):
            made.check({"model": model}, what="FULL 4", may_grow=True)
    assert kept.numel()


def test_results_that_a_forward_keeps_by_two_names_are_left_alone() -> None:
    last = [t()]
    last.append(last)
    model = Plain(w=t(), a=last, b=last)
    before = AddressManifest.of({"model": model}, CPU)
    last[0] = kept = t()
    made = AddressManifest.of({"model": model}, CPU, before=before, repeats=True)
    assert len(made) == 1
    last[0] = t()
    for _ in range(2):
        made.check({"model": model}, what="FULL 4", may_grow=True)
    assert kept.numel()


@pytest.mark.parametrize("change", ["t_", "data"])
def test_the_same_object_in_another_form_is_found_by_a_walk(change: str) -> None:
    model = Deep()
    made = repeated(model)
    weight = model.blocks[1].linear.weight

    def transpose() -> None:
        if change == "data":
            weight.data = weight.data.t()
        else:
            with torch.no_grad():
                weight.t_()

    transpose()
    for _ in range(2):
        with pytest.raises(AddressError, match=r"1 reshaped, .*\n  reshaped  model\.blocks\[1\]\.linear\.weight"):
            made.check({"model": model}, what="FULL 4", may_grow=True, walk_again=True)
    transpose()
    made.check({"model": model}, what="FULL 4", may_grow=True, walk_again=True)
    assert made.still_holds({"model": model})
