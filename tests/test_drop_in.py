"""``cgplan.graphed``: when it captures, and that it answers with the model's own numbers."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import math
import pickle
import random
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from drop_in_models import (
    Cache,
    Counting,
    Net,
    Noted,
    Point,
    Scaled,
    Scene,
    as_the_model,
    close,
    ready,
    replays,
    rows,
    sizes,
)
from torch import Tensor, nn

import cgplan
from cgplan.backends import GraphBackend
from cgplan.backends.context import current_forward_context
from cgplan.errors import (
    CaptureError,
    ConfigError,
    DispatchMissError,
    NumbersError,
    OutputShapeError,
)
from cgplan.units import format_bytes


@pytest.fixture
def net(backend: GraphBackend) -> Net:
    return Net().to(backend.device).eval()


# --- calls ------------------------------------------------------------------------------------------------------------


def test_the_third_call_of_a_kind_captures(backend: GraphBackend, net: Net) -> None:
    g, x = cgplan.graphed(net), rows(backend, 3)
    for _ in range(2):
        assert torch.equal(g(x), net(x))
        assert not g.runners
    close(g(x), net(x))
    assert sizes(g) == {4}
    kept = []
    for count in (20, 1, 4, 2, 5, 3):
        x = rows(backend, count)
        kept.append((g(x), net(x)))
    for found, wanted in kept:  # copies, which later calls leave alone
        close(found, wanted)
    assert sizes(g) == {1, 2, 4, 8, 32}, "graphs come along where buffers grow"
    assert not g.runners[0].stats.eager
    assert "2 calls ran eagerly: the first calls of a kind" in g.explain()
    assert g.report.records


def test_a_runner_of_a_drop_in_captures_again_by_itself(backend: GraphBackend, net: Net) -> None:
    g, x = cgplan.graphed(net), rows(backend, 3)
    for _ in range(3):
        g(x)
    (runner,) = g.runners
    runner.recapture()
    close(g(x), net(x))
    runner.sleep()
    runner.wake()
    close(g(x), net(x))
    assert not runner.stats.eager


def test_a_part_on_meta_decides_no_device(backend: GraphBackend, net: Net) -> None:
    net.unused = nn.Linear(2, 2, device="meta")
    g, x = cgplan.graphed(net), rows(backend, 3)
    for _ in range(4):
        close(g(x), net(x))
    assert g.graph_calls


def test_kinds_without_a_graph_are_shown_by_what_differs(backend: GraphBackend) -> None:
    model = torch.nn.Linear(8, 8).to(backend.device).eval()
    g = cgplan.graphed(model)
    x = torch.ones(4, 8, device=backend.device)
    with torch.no_grad():
        g(x)
        g(x)
    g(x)
    told = g.explain()
    shown = r"\nnone yet \(2 calls\) +- +no_grad\nnone yet \(1 call\) +- +grad mode\n"
    assert re.search(shown, told)
    assert "all kinds: input: float32 [batch, 8]" in told
    for last in range(5, 15):
        g(torch.ones(2, last, 8, device=backend.device))
    assert g.explain().count("none yet") == 4, "models with many kinds are not listed whole"
    assert "\nnot shown: 8 older kinds without graphs\n" in g.explain()


def test_sizes_and_what_is_larger(backend: GraphBackend, net: Net) -> None:
    g, x = cgplan.graphed(net, sizes=[4, 1]), rows(backend, 9)
    ready(g, net, x[:3])
    for count in (1, 9):
        close(g(x[:count]), net(x[:count]))
    assert sizes(g) == {1, 4}
    assert "1 call ran eagerly: no graph serves the batch" in g.explain()
    strict = cgplan.graphed(net, max_size=6, compilation={"on_miss": "error"})
    ready(strict, net, x[:5])
    assert sizes(strict) == {6}
    with pytest.raises(DispatchMissError):
        strict(x)


def test_the_first_batches_may_be_too_large(backend: GraphBackend, net: Net) -> None:
    g, x = cgplan.graphed(net, sizes=[2]), rows(backend, 5)
    ready(g, net, x)
    close(g(x[:1]), net(x[:1]))
    assert sizes(g) == {2}


def test_structures_go_in_and_come_out(backend: GraphBackend) -> None:
    def model(scene: Scene, extra: dict[str, Any], *more: Tensor, name: str | None = None) -> Any:
        x, y = scene.points
        return {
            "scene": Scene(
                Point(x * scene.scale, y + more[0]), [label + 1 for label in scene.labels], 3.0
            ),
            "same": (name, [extra["deep"][0]["z"] - 1, 7], None),
        }

    g = cgplan.graphed(model)
    for count in (3, 2, 3, 2, 1):
        x, y, z = (rows(backend, count) for _ in range(3))
        labels = [torch.arange(count, device=backend.device), x[:, 0]]
        found = g(Scene(Point(x, y), labels), {"deep": ({"z": z},)}, y, name="n")
        assert type(found["scene"]) is Scene
        assert type(found["scene"].points) is Point
        assert (found["scene"].scale, found["same"][0], found["same"][1][1], found["same"][2]) == (
            3.0,
            "n",
            7,
            None,
        )
        close(list(found["scene"].points), [x * 2, y * 2])
        close(found["scene"].labels, [label + 1 for label in labels])
        close(found["same"][1][0], z - 1)
    assert len(g.runners) == 1
    assert replays(g) == 3


def test_outputs_of_transformers_come_out(backend: GraphBackend) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    def model(x: Tensor, mask: Tensor | None = None) -> Any:
        return outputs.BaseModelOutputWithPooling(
            last_hidden_state=x * 2, pooler_output=None if mask is None else mask + x
        )

    g, x = cgplan.graphed(model), rows(backend, 3)
    for mask in (x, None) * 3:
        found, wanted = g(x, mask=mask), model(x, mask)
        assert type(found) is type(wanted)
        assert found.keys() == wanted.keys()
        close(found.to_tuple(), wanted.to_tuple())
    assert replays(g) == 2


def test_positional_and_keyword_arguments(backend: GraphBackend) -> None:
    def model(a: Tensor, b: Tensor, c: float = 1.0) -> Tensor:
        return a - 2 * b + c

    g, a, b = cgplan.graphed(model), rows(backend, 3), rows(backend, 3)
    ready(g, model, a, b)
    for found in (g(a, b), g(a, b=b), g(b=b, a=a), g(a, a * 0 + b)):
        close(found, a - 2 * b + 1)
    close(g(b=a, a=a), a - 2 * a + 1)
    with pytest.raises(TypeError):
        g(a)


def test_other_constants_are_other_kinds(backend: GraphBackend) -> None:
    """Floats by their bits, 1 and True by their types."""

    def model(x: Tensor, value: Any) -> Tensor:
        return (
            x
            + ("int", "float", "bool", "NoneType").index(type(value).__name__)
            + math.copysign(8, value or 1)
        )

    def told_apart(x: Tensor, value: Any) -> Tensor:
        return (
            model(x, value) * (value if value else 1.0) + math.copysign(2, value)
            if value == 0.0
            else model(x, value)
        )

    g, x = cgplan.graphed(told_apart), rows(backend, 3)
    values = (0.0, -0.0, float("nan"), 1, True, 1.0, None, 2.5)
    for value in values:
        ready(g, told_apart, x, value)
    for value in values:
        close(g(x, value=value), told_apart(x, value))
        close(g(x, value), told_apart(x, value))
    assert replays(g) == 2 * len(values)


def test_constants_that_change_at_each_call_are_told_once_and_evict_nothing(
    backend: GraphBackend, caplog: pytest.LogCaptureFixture
) -> None:
    g, x = cgplan.graphed(lambda x, time: x * time, max_graphs=1), rows(backend, 3)
    for _ in range(3):
        g(x, 0.5)
    for step in range(300):
        close(g(x, float(step)), x * step)
    assert sizes(g) == {4}
    before = replays(g)
    close(g(x, 0.5), x * 0.5)
    assert replays(g) == before + 1
    apart = cgplan.graphed(lambda x, time: x * time)
    for step in range(30):
        apart(x, float(step))
    assert caplog.text.count("argument `time` had 4 values in 4 calls") == 1
    assert "argument `time` had 4 values in 4 calls" in apart.explain()


def test_an_object_is_known_by_identity_and_its_tensors_are_state(backend: GraphBackend) -> None:
    def model(x: Tensor, cache: Cache) -> Tensor:
        cache.total.add_(1)
        return x + cache.total

    g, cache, x = cgplan.graphed(model, dynamic={}), Cache(backend.device), rows(backend, 2)
    for turn in range(1, 7):
        close(g(x, cache), x + turn)
    assert cache.total.tolist() == [6] * 4
    assert replays(g) == 4
    close(g(x, Cache(backend.device)), x + 1)
    array = x.cpu().numpy()
    with pytest.raises(AttributeError, match="ndarray"):  # as without graphs
        g(x, array)


def test_objects_in_another_state_are_another_kind(backend: GraphBackend) -> None:
    def model(x: Tensor, cache: Cache) -> Tensor:
        if not cache.is_ready:
            return x * 10
        cache.total.add_(1)
        return x + cache.total

    g, cache, x = cgplan.graphed(model, dynamic={}), Cache(backend.device), rows(backend, 2)
    for _ in range(5):
        cache.reset()
        close(g(x, cache), x * 10)
        cache.is_ready = True
        for turn in range(1, 6):
            close(g(x, cache), x + turn)
    assert replays(g) == 3 + 23
    assert "all kinds: cache: Cache 1, in one of its states" in g.explain()
    cache = Cache(backend.device)
    for _ in range(3):
        g(x, cache)
    assert "cache: Cache 2, in one of its states" in g.explain()
    states = re.findall(r"Cache\.is_ready: (\w+)", g.explain())
    assert sorted(states) == ["False", "True"], "rows of one cache tell what differs"


def test_a_long_text_of_a_state_is_cut_in_explain(backend: GraphBackend) -> None:
    x, cache = rows(backend, 2), Cache(backend.device)
    g = cgplan.graphed(lambda x, cache: x + cache.total)
    for turn in range(8):
        cache.name = "ab"[turn % 2] * 500
        g(x, cache)
    assert re.search(r"Cache\.name:\s+'a{79}\s", g.explain())


def test_kinds_of_two_objects_that_the_forward_writes_are_told_apart(backend: GraphBackend) -> None:
    """They are not padded, as padding might reach what is written."""

    def model(x: Tensor, cache: Cache) -> Tensor:
        cache.total.add_(x[0])
        return x + cache.total

    g = cgplan.graphed(model)
    for cache in (Cache(backend.device), Cache(backend.device)):
        for _ in range(4):
            g(rows(backend, 2), cache)
    told = g.explain()
    for number in (1, 2):
        assert told.count(f"cache: Cache {number}, in one of its states") == 1


def test_objects_that_the_forward_changes(backend: GraphBackend) -> None:
    """What is filled on first use: that call runs eagerly, and those behind it by a graph."""

    def model(x: Tensor, cache: Cache) -> Tensor:
        if not cache.is_ready:
            cache.total.copy_(x[0])
            cache.is_ready = True
        return x + cache.total

    g, cache = cgplan.graphed(model, dynamic={}), Cache(backend.device)
    for _ in range(5):
        cache.reset()
        first = rows(backend, 2)
        for turn in range(5):
            x = rows(backend, 2) if turn else first
            close(g(x, cache), x + first[0])
    assert replays(g) == 20 - 2
    assert "each run changes cache.is_ready" in g.explain()


class Lazy(nn.Module):
    """Makes its cache when it is asked for; ``forgets``: in each call."""

    def __init__(self, *, forgets: bool = False) -> None:
        super().__init__()
        self.cache: Tensor | None = None
        self.forgets = forgets

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None or self.forgets:
            self.cache = torch.zeros_like(x)
        self.cache += x
        return self.cache * 2


def test_a_model_prepares_itself_again(backend: GraphBackend) -> None:
    """The call after a reset makes the cache anew; the next one is watched, too, and then graphs serve again."""
    model, plain = Lazy(), Lazy()
    g = cgplan.graphed(model.eval())
    for turn in range(16):
        if turn in (1, 8):
            model.cache = plain.cache = None
        x = rows(backend, 3)
        close(g(x), plain(x))
    assert replays(g) == 11
    assert "5 calls ran eagerly: the first calls of a kind" in g.explain()


def test_a_run_that_prepares_the_model_decides_nothing(backend: GraphBackend) -> None:
    """Its writes are no state that each run writes, so batches are padded afterwards."""

    class Tables(nn.Module):
        is_ready = False

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            if not self.is_ready:
                self.table.copy_(torch.ones(4))
                self.is_ready = True
            return x + self.table

    model = Tables().to(backend.device).eval()
    g = cgplan.graphed(model)
    for turn in range(9):
        if turn == 1:
            model.is_ready = False
        x = rows(backend, 3)
        close(g(x), x + 1)
    assert {key.num_tokens for _, key in g.runners[0].plan.keys} == {4}
    assert replays(g) == 6


def test_no_hint_to_ignore_what_decides(backend: GraphBackend) -> None:
    g = cgplan.graphed(Lazy(forgets=True).eval())
    for _ in range(4):
        x = rows(backend, 3)
        close(g(x), x * 2)
    assert "2 calls ran eagerly: each run changes model.cache" in g.explain()
    assert "ignore" not in g.explain()


@pytest.mark.parametrize("turns", [(4, 3), (2, 3, 4, 5, 7), (5, 5, 5, 6, 7)])
def test_a_dict_by_size_reaches_graphs_though_sizes_alternate(
    backend: GraphBackend, turns: tuple[int, ...]
) -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache: dict[int, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            n = x.shape[0]
            if n not in self.cache:
                self.cache[n] = torch.full((n, 1), float(n), device=x.device)
            return x + self.cache[n]

    g = cgplan.graphed(Sized().eval())
    for turn in range(6 * len(turns)):
        x = rows(backend, turns[turn % len(turns)])
        close(g(x), x + x.shape[0])
    assert replays(g) >= 2 * len(turns)


def test_a_forward_that_writes_state_is_served_by_the_third_call(backend: GraphBackend) -> None:
    model, plain = Lazy(), Lazy()
    model.cache, plain.cache = rows(backend, 3), rows(backend, 3)
    plain.cache.copy_(model.cache)
    g = cgplan.graphed(model.eval())
    for _ in range(6):
        x = rows(backend, 3)
        close(g(x), plain(x))
    assert replays(g) == 4
    assert f"output 0: {list(x.shape)}" in g.explain(), "nothing varies"
    assert "nothing is padded" in g.explain()
    g.recapture()
    assert "nothing is padded" not in g.explain()


def test_a_full_house_is_told(backend: GraphBackend, caplog: pytest.LogCaptureFixture) -> None:
    few = cgplan.graphed(lambda x: x + 1, sizes=[1, 2])
    for count in (3, 3, 3, 4, 5):
        few(rows(backend, count))
    given = "(dims.batch; sizes=[1, 2], max_size=None)"
    told = f"no graph serves the batch: larger than the largest capture size {given}"
    assert few.eager_calls == {"the first calls of a kind": 2, told: 3}
    few.warm_up(rows(backend, 3))
    assert caplog.text.count(told) == 1
    assert few.explain().count(told) == 1
    none = cgplan.graphed(lambda x: x + 1, compilation={"cudagraph_mode": "NONE"})
    for _ in range(3):
        none(rows(backend, 3))
    told = "no graph serves the batch: nothing is captured (cudagraph_mode is NONE; sizes=None,"
    assert told in none.explain()
    listed = {"cudagraph_capture_sizes": [1, 2]}
    small = cgplan.graphed(lambda x: x + 1, compilation=listed)
    for _ in range(3):
        small(rows(backend, 3))
    assert "capture size (compilation.cudagraph_capture_sizes; sizes=None," in small.explain()
    g = cgplan.graphed(lambda x: x + 1, max_graphs=1)
    for count in (1, 1, 1, 1, 3):
        g(rows(backend, count))
    told = "max_graphs=1 leaves no room: raise max_graphs, or pad inputs to a few shapes"
    assert f"no graph serves the batch, and {told}" in g.explain()
    calls = g.runners[0].stats.calls
    g.warm_up(rows(backend, 3))
    assert g.runners[0].stats.calls == calls, "a warm-up is no call"


def test_caches_of_past_requests_are_freed(backend: GraphBackend) -> None:
    g, held = cgplan.graphed(lambda x, cache: x + cache.total, max_graphs=2), []
    for _ in range(12):
        cache = Cache(backend.device)
        held.append(weakref.ref(cache))
        for count in (2, 1, 2, 1):
            x = rows(backend, count)
            close(g(x, cache), x)
    del cache
    gc.collect()
    assert sum(ref() is not None for ref in held) <= 2, "those that have a graph"


def test_kinds_that_come_once_are_forgotten(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["cgplan.drop_in.learner"], "_MOST_KINDS", 20)
    g, held = cgplan.graphed(lambda x, key: x * len(key), dynamic={}), []

    class Text(str):  # takes weak references
        __slots__ = ("__weakref__",)

    for count in range(1, 61):
        text = Text("ab")
        held.append(weakref.ref(text))
        x = rows(backend, count, 1)
        close(g(x, {text: 0}), x)
    del text
    gc.collect()
    assert sum(ref() is not None for ref in held) <= 21


@pytest.mark.parametrize("change", ["key", "value", "item", "length"])
def test_containers_that_the_forward_changes_stay_with_it(
    backend: GraphBackend, change: str
) -> None:
    def model(x: Tensor, given: Any) -> Tensor:
        if change == "key":
            given["twice"] = x * 2
        elif change == "value":
            given["n"] += 1
        elif change == "item":
            given[0] = x * 2
        else:
            given.append(x)
        return x + len(given)

    g = cgplan.graphed(model)
    for _ in range(6):
        mine, own = ({"n": 1}, {"n": 1}) if change in ("key", "value") else ([0], [0])
        x = rows(backend, 3)
        close(g(x, mine), model(x, own))
        close(mine, own)
    assert not g.runners
    assert "each run changes" in g.explain()


def test_a_tensor_that_the_forward_writes_is_the_callers(backend: GraphBackend) -> None:
    def model(x: Tensor, given: dict[str, Tensor]) -> Tensor:
        given["y"].mul_(2)
        return x + given["y"]

    for by_data in (False, True):
        g = cgplan.graphed(lambda x, given: model(x, {"y": given["y"].data} if by_data else given))  # noqa: B023
        for _ in range(5):
            x, y = rows(backend, 3), rows(backend, 3)
            wanted = y * 2
            close(g(x, {"y": y}), x + wanted)
            close(y, wanted)
        assert not sizes(g)
        assert "writes into" in g.explain()
    g = cgplan.graphed(lambda x: x.add_(1))
    with torch.inference_mode():  # tensors there have no version
        for _ in range(5):
            x = torch.zeros(3, device=backend.device)
            assert g(x).tolist() == x.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_graphs": 0},
        {"compilation": {"cudagraph_mod": "FULL"}},
        {"pad": {"x": "last"}},
        {"verify": "often"},
        {"grad": "checkpoint"},
        {"ignore": 3},
        {"strict": "yes"},
        {"sizes": []},
        {"sizes": [0]},
        {"sizes": [1, True]},
        {"sizes": "big"},
        {"sizes": [1, 4], "dynamic": {}},
        {"max_size": 4, "dynamic": {}},
    ],
    ids=str,
)
def test_wrong_settings_are_refused_at_once(
    backend: GraphBackend, net: Net, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        cgplan.graphed(net, **wrong)


def test_dimensions_of_dynamic_are_there(backend: GraphBackend) -> None:
    def bounded(x: Tensor) -> Tensor:
        return x.tanh()

    wrong = cgplan.graphed(bounded, dynamic={"x": {2: "width"}})
    with pytest.raises(ConfigError, match="names dimension 2 of 'x', which has 2"):
        wrong(rows(backend, 3))
    g = cgplan.graphed(bounded, dynamic={"x": {-1: "width"}})
    for width in (3, 3, 3, 4, 5):
        x = torch.randn(2, width, device=backend.device)
        close(g(x), x.tanh())
    assert sizes(g) == {4, 8}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripts_and_builtins(backend: GraphBackend, net: Net) -> None:
    x = rows(backend, 3)
    for model in (torch.relu, torch.jit.trace(net, x)):
        g = cgplan.graphed(model)
        ready(g, model, x[:2])
        assert sizes(g) == {2}


def test_functions_are_decorated(backend: GraphBackend) -> None:
    @cgplan.graphed(sizes="powers_of_two", max_size=8)
    def policy(obs: Tensor) -> Tensor:
        """Acts."""
        return obs.tanh()

    x = rows(backend, 3)
    ready(policy, torch.tanh, x)
    assert (policy.__name__, policy.__doc__) == ("policy", "Acts.")
    assert list(inspect.signature(policy).parameters) == ["obs"]
    assert sizes(policy) == {4}


def test_methods_are_decorated_in_a_class_body(backend: GraphBackend) -> None:
    """Each object has its own graphs, and so has a copy of it, be it shallow."""
    first, x = Scaled(2.0).to(backend.device).eval(), rows(backend, 5)
    ready(first, lambda x: first.inner(x) * 2, x)
    others = [
        copy.deepcopy(first),
        pickle.loads(pickle.dumps(first)),
        copy.copy(first),
        Scaled(2.0).to(x.device).eval(),
    ]
    for factor, other in enumerate(others, start=3):
        other.factor = float(factor)
        ready(other, lambda x: other.inner(x) * factor, x)  # noqa: B023
        ready(other.only, lambda x: x * factor, x)  # noqa: B023
        assert replays(other.forward) == replays(other.only) == 1
    close(first(x), first.inner(x) * 2)
    assert replays(first.forward) == 2
    assert pickle.loads(pickle.dumps(first.only)).__self__.factor == 2.0


def test_threads_call_one_after_the_other(backend: GraphBackend, net: Net) -> None:
    g, wrong = cgplan.graphed(net, max_size=8), []
    batches = [rows(backend, count) for count in range(1, 8)]

    def call(first: int) -> None:
        for turn in range(40):
            x = batches[(first + turn) % 7]
            try:
                close(g(x), net(x))
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=call, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert replays(g) == 158


def test_threads_with_streams_or_models_of_their_own(backend: GraphBackend) -> None:
    """A capture in one thread, and a thread that waits for the device, leave each other alone."""
    nets = [Net().to(backend.device).eval() for _ in range(3)]
    shared = cgplan.graphed(nets[0])
    own = [cgplan.graphed(net) for net in nets]
    wrong = list[BaseException]()

    def call(number: int) -> None:
        stream: Any = contextlib.nullcontext()
        if backend.device.type == "cuda":
            stream = torch.cuda.stream(torch.cuda.Stream())
        with stream:
            for turn in range(25):
                x = rows(backend, 1 + (turn + number) % 5)
                try:
                    close(shared(x), nets[0](x))
                    close(own[number](x), nets[number](x))
                except BaseException as error:
                    wrong.append(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


@pytest.mark.gpu
def test_inside_a_capture_of_the_callers_own_the_model_runs() -> None:
    net = Net().to("cuda").eval()
    g = cgplan.graphed(net)
    x = torch.randn(4, 4, device="cuda")
    for _ in range(4):
        g(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = g(x)
    x.copy_(torch.randn(4, 4))
    graph.replay()
    close(y, net(x))


# --- when the model's own code runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verify", "runs"),
    [
        ("off", "110000000000"),
        ("first", "111000000000"),
        ("rarely", "111101000100"),
        ("always", "111111111111"),
    ],
)
def test_when_replays_are_compared(backend: GraphBackend, verify: Any, runs: str) -> None:
    model = Noted().to(backend.device).eval()
    g = cgplan.graphed(model, verify=verify, ignore=["model.calls"])
    seen = []
    for _ in range(12):
        before, x = model.calls, rows(backend, 4)
        close(g(x), model.inner(x))
        seen.append(str(model.calls - before))
    assert "".join(seen) == runs


def test_a_path_to_ignore_where_nothing_is_compared(
    backend: GraphBackend, caplog: pytest.LogCaptureFixture
) -> None:
    model = Noted().to(backend.device).eval()
    g = cgplan.graphed(model, ignore=["model.calls", "model.*.training", "model.cals"])
    drawing = cgplan.graphed(lambda x: x + 0 * random.random(), ignore=["Python's random numbers"])
    for _ in range(4):
        g(rows(backend, 4))
        drawing(rows(backend, 4))
    assert drawing.graph_calls
    assert caplog.text.count("ignore names ") == 1
    told = "ignore names 'model.cals', where nothing is compared yet; did you mean 'model.calls'?"
    assert told in g.explain()
    other = cgplan.graphed(model, ignore=["model.calls", "model.x"])  # like what is above it
    for _ in range(4):
        other(rows(backend, 4))
    assert "ignore names 'model.x', where nothing is compared yet\n" in other.explain()


def test_a_forward_that_changes_python_runs_eagerly(
    backend: GraphBackend, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Noted().to(backend.device).eval(), rows(backend, 3)
    g = cgplan.graphed(model)
    for _ in range(6):
        close(g(x), model.inner(x))
    assert model.calls == 6
    assert not g.runners
    assert (
        "4 calls ran eagerly: each run changes model.calls; ignore=['model.calls'] if it decides"
        in g.explain()
    )
    assert caplog.text.count("each run changes model.calls") == 1


def test_random_numbers_of_python_stay_with_it(backend: GraphBackend) -> None:
    def model(x: Tensor) -> Tensor:
        return x * random.random()

    g, x = cgplan.graphed(model), rows(backend, 3)
    for turn in range(5):
        random.seed(turn)
        found = g(x)
        random.seed(turn)
        close(found, model(x))


def test_a_difference_is_answered_by_the_models_own_code(
    backend: GraphBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """A number that nothing tells of: what a property of a foreign object holds."""
    state = torch.Generator()  # its seed is no value of Python
    state.manual_seed(1)
    g, x = (
        cgplan.graphed(lambda x: x * state.initial_seed(), dynamic={}, verify="always"),
        rows(backend, 3),
    )
    for _ in range(4):
        close(g(x), x)
    for seed in (2, 3, 4, 5):
        state.manual_seed(seed)
        close(g(x), x * seed)
    assert (
        len([line for line in caplog.messages if "differs from the model's own code" in line]) == 2
    )
    assert not replays(g), "the second difference ended the kind"
    state.manual_seed(1)
    strict = cgplan.graphed(
        lambda x: x * state.initial_seed(), dynamic={}, verify="always", strict=True
    )
    ready(strict, lambda x: x, x)
    state.manual_seed(2)
    with pytest.raises(NumbersError):
        strict(x)


def test_a_name_that_no_argument_has_is_told(backend: GraphBackend) -> None:
    def model(x: Tensor, **others: Tensor) -> Tensor:
        return x * others["mask"]

    g = cgplan.graphed(model, pad={"maks": 0, "x": 1}, dynamic={"mask": {0: "rows"}})
    x = rows(backend, 3)
    close(g(x, mask=x), x * x)
    told = "dynamic or pad names 'maks', which a call lacks; did you mean 'mask'?"
    assert told in g.explain()
    assert g.explain().count("which a call lacks") == 1
    g = cgplan.graphed(model, dynamic={"pixels": {0: "rows"}})
    close(g(x, mask=x), x * x)
    told = (
        "dynamic or pad names 'pixels', which a call lacks; it has x, mask; of it nothing varies: "
    )
    assert f"{told}each shape has its graph" in g.explain()


def test_errors_of_the_model_are_the_models(backend: GraphBackend) -> None:
    def model(x: Tensor) -> Tensor:
        if len(x) == 5:
            raise ValueError("the user's")
        return x + 1

    g = cgplan.graphed(model)
    for count in (3, 3, 3, 5, 3, 6):
        x = rows(backend, count)
        if count == 5:
            with pytest.raises(ValueError, match="the user's"):
                g(x)
        else:
            close(g(x), x + 1)


def test_explain_has_the_memory_of_all_kinds(backend: GraphBackend) -> None:
    g = cgplan.graphed(lambda x: x + 1)
    for kind in (torch.float32, torch.float64):
        ready(g, lambda x: x + 1, rows(backend, 3).to(kind))
    reports = [runner.report for runner in g.runners]
    pool = max(report.pool_bytes for report in reports)  # one pool, which grew
    own = sum(report.graph_bytes - report.pool_bytes for report in reports)
    assert len(reports) == 2
    assert f"graphs and their buffers take {format_bytes(pool + own)}" in g.explain()


def test_a_model_that_cannot_be_captured_runs_eagerly_and_is_said(
    backend: GraphBackend, caplog: pytest.LogCaptureFixture
) -> None:
    def model(x: Tensor) -> Tensor:
        return x * 2 if x[0, 0].item() > 0 else x

    g = cgplan.graphed(model)
    as_the_model(lambda x: g(x - 0.5), lambda x: model(x - 0.5), backend, *6 * [3])
    assert not sizes(g)
    assert "no graph could be captured for one kind of calls: " in g.explain()
    assert re.search(r"^eager +0 ", g.explain(), re.MULTILINE)
    [told] = [line for line in caplog.messages if "no graph could be captured" in line]
    assert "Keep the value on the device" in told, "the remedy of the capture"
    with pytest.raises(CaptureError, match="needs the host") as caught:
        as_the_model(cgplan.graphed(model, strict=True), model, backend, 3, 3, 3)
    assert "Keep the value on the device" in caught.value.remedy
    strict, x = cgplan.graphed(model, strict=True), rows(backend, 3)
    for _ in range(2):
        strict(x)
    with pytest.raises(CaptureError):
        strict(x)


# --- what varies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [None, {"a": {0: "batch"}, "b": {0: "batch"}}], ids=str)
def test_nothing_varies_where_inputs_disagree(backend: GraphBackend, dynamic: Any) -> None:
    def model(a: Tensor, b: Tensor) -> Tensor:
        return a.sum() + b

    g = cgplan.graphed(model, dynamic=dynamic)
    for _ in range(4):
        a, b = rows(backend, 3), rows(backend, 5)
        close(g(a, b), model(a, b))
    assert replays(g) == 2
    assert "nothing varies: each shape has its graph" in g.explain()


def test_inputs_beside_the_batch_are_fixed(backend: GraphBackend) -> None:
    def model(
        x: Tensor, y: Tensor, table: Tensor, time: Tensor, one: Tensor
    ) -> tuple[Tensor, Tensor]:
        return x * y + table[0] + time + one, table * 2

    g = cgplan.graphed(model)
    table, time, one = rows(backend, 7), torch.tensor(3.0, device=backend.device), rows(backend, 1)
    for count in (3, 2, 3, 2, 1):
        x, y = rows(backend, count), rows(backend, count)
        close(g(x, y, table, time, one), model(x, y, table, time, one))
    assert len(g.runners) == 1
    assert "output 1: [7, 4]" in g.explain()
    ready(g, model, x, y, table[:5], time, one)
    assert len(g.runners) == 2


@pytest.mark.parametrize("kind", ["cgplan", "torch"])
def test_two_dimensions(backend: GraphBackend, kind: str) -> None:
    def pooled(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        weights = mask / mask.sum(1, keepdim=True).clamp(min=1)
        return (x * weights[..., None]).sum(1), x + 1

    batch, length = (
        (cgplan.Dim("batch", max=4), cgplan.Dim("length", max=16, multiple_of=4))
        if kind == "cgplan"
        else (torch.export.Dim("batch", max=4), torch.export.Dim("length", min=2, max=16))
    )
    g = cgplan.graphed(
        pooled,
        dynamic={"x": {0: batch, 1: length}, "mask": {0: "batch", 1: "length"}},
        max_graphs=6,
    )
    for count, long in ((3, 7), (1, 16), (4, 3), (2, 12), (3, 5)):
        x, mask = (
            rows(backend, count, long, 4),
            torch.ones(count, long, dtype=torch.int64, device=backend.device),
        )
        close(g(x, mask), pooled(x, mask))
    assert replays(g) == 3
    assert "output 0: [batch, 4]" in g.explain()
    assert "output 1: [batch, length, 4]" in g.explain()


def test_a_text_encoder_in_batch_and_length(backend: GraphBackend) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=64,
        max_position_embeddings=32,
    )  # fmt: skip
    bert = transformers.BertModel(config).to(backend.device).eval()
    shape = {0: cgplan.Dim("batch", max=4), 1: cgplan.Dim("length", max=32, multiple_of=8)}
    g = cgplan.graphed(bert, dynamic={"input_ids": shape, "attention_mask": shape})
    for count, length in ((3, 12), (3, 11), (3, 11), (4, 32), (1, 5), (2, 16), (3, 9)):
        ids = torch.randint(1, 64, (count, length), device=backend.device)
        mask = torch.ones_like(ids)
        mask[-1, length // 2 + 1 :] = 0
        found, wanted = g(ids, attention_mask=mask), bert(ids, attention_mask=mask)
        assert type(found) is type(wanted)
        for name in wanted:
            assert found[name].shape == wanted[name].shape
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-3, atol=1e-3)
    boxes = {(key.num_tokens, *key.sizes) for _, key in g.runners[0].plan.keys}
    assert boxes == {(4, 16), (4, 32), (1, 8), (2, 16)}


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Mistral", "beams"])
def test_generate_of_transformers_by_a_static_cache(
    backend: GraphBackend, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Mistral's cache slides: what it does depends on a number of Python, so the model's own code runs. A beam search
    binds other tensors in its cache at each step.
    """
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 64}
    if family != "GPT2":
        sizes |= {"num_key_value_heads": 2, "intermediate_size": 32}
    ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    slides = {"sliding_window": 8} if family == "Mistral" else {}
    made = {"GPT2": "GPT2LMHead", "beams": "LlamaForCausalLM"}.get(family, f"{family}ForCausalLM")
    made, of = made.replace("LMHead", "LMHeadModel"), "Llama" if family == "beams" else family
    config = getattr(transformers, f"{of}Config")(
        max_position_embeddings=64, **sizes, **ends, **slides
    )
    model = getattr(transformers, made)(config).to(backend.device).eval()
    prompts = [torch.randint(2, 64, (2, length), device=backend.device) for length in (9, 5, 9, 3)]
    settings = {
        "max_new_tokens": 12,
        "do_sample": False,
        "disable_compile": True,
        "num_beams": 1 + (family == "beams"),
    }
    wanted = [model.generate(prompt, **settings) for prompt in prompts]
    model.forward = g = cgplan.graphed(model.forward, dynamic={})
    cache = transformers.StaticCache(
        config=config, max_cache_len=21
    )  # with room for one run of a prompt
    for prompt, tokens in zip(prompts, wanted, strict=True):
        cache.reset()
        assert torch.equal(model.generate(prompt, past_key_values=cache, **settings), tokens)
    if family in ("Llama", "GPT2"):
        assert replays(g) == 4 * 11 - 2, "one graph for all steps behind prompts"
    if family == "Mistral":  # of beams, memory that comes again may bring a graph's addresses back
        assert not replays(g)
        assert (
            "calls ran eagerly: an object argument is new or in another state at each call"
            in g.explain()
        )
        assert g.eager_calls["the first calls of a kind"] <= 3, "else a warm-up would never end"
        assert (
            len(
                re.findall(
                    r"each run changes \w+\.layers\[0\]\.cumulative_length_int; answers are right\n",
                    caplog.text,
                )
            )
            == 1
        )


def test_an_attribute_that_is_nowhere_names_the_figures(net: Net) -> None:
    g = cgplan.graphed(net)
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'stats'") as caught:
        _ = g.stats
    assert "graph_calls, eager_calls and runners (g.runners[0].stats)" in caught.value.__notes__[0]
    assert not hasattr(g, "stats")


def test_nothing_varies_with_an_empty_dynamic(backend: GraphBackend) -> None:
    def centred(x: Tensor) -> Tensor:
        return x - x.mean(0)

    g = cgplan.graphed(centred, dynamic={})
    as_the_model(g, centred, backend, 3, 2, 3, 2, 3, 2, 3)
    assert sizes(g) == {2, 3}


def test_a_borrowed_output_is_an_argument_of_calls_that_capture(backend: GraphBackend) -> None:
    cell = nn.GRUCell(8, 8).to(backend.device).eval()
    g = cgplan.graphed(cell, outputs="borrow")
    found = wanted = torch.zeros(8, 8, device=backend.device)
    with torch.no_grad():
        for step in range(32):  # requests end one by one, and weights change
            if step == 20:
                cell.weight_hh = nn.Parameter(cell.weight_hh * 2)
            rows = 8 - step // 4
            x = torch.randn(rows, 8, device=backend.device)
            found = g(x, found[:rows])
            wanted = cell(x, wanted[:rows])
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    assert replays(g) > 8


def test_a_list_that_the_model_changes_is_the_callers(backend: GraphBackend) -> None:
    def logging(x: Tensor, log: list[int]) -> Tensor:
        log.append(1)
        return x + 1

    g = cgplan.graphed(logging, outputs="borrow")
    x = torch.ones(2, 2, device=backend.device)
    for _ in range(5):
        log = list[int]()
        g(x, log)
        assert log == [1]


def test_gradients_of_calls_on_borrowed_outputs(backend: GraphBackend) -> None:
    model = nn.Linear(8, 8).to(backend.device).eval()
    g = cgplan.graphed(model, outputs="borrow", grad="recompute")
    x = torch.randn(4, 8, device=backend.device)
    for _ in range(4):
        g(x)
    found = []
    for call in (g, model):
        model.zero_grad()
        h = call(x).detach()
        call(h).square().sum().backward()
        found.append(model.weight.grad.clone())
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)


def test_a_capture_calls_another_drop_in_that_captures_elsewhere(backend: GraphBackend) -> None:
    inner = cgplan.graphed(nn.Linear(4, 4).to(backend.device).eval())
    began, may_go = threading.Event(), threading.Event()

    def forward(x: Tensor) -> Tensor:
        if current_forward_context() is not None and not began.is_set():
            began.set()
            may_go.wait(5)
        return inner(x) * 2

    outer = cgplan.graphed(forward)
    x = torch.randn(2, 4, device=backend.device)

    @torch.no_grad()
    def call(g: Callable[[Tensor], Tensor]) -> None:
        g(x)

    call(outer)
    call(outer)  # each of them captures in its next call
    other = threading.Thread(target=call, args=(outer,))
    other.start()
    assert began.wait(30)
    third = threading.Thread(target=call, args=(inner,))  # it waits for the capture
    third.start()
    time.sleep(0.5)
    may_go.set()
    other.join(30)
    third.join(30)
    assert not other.is_alive()
    assert not third.is_alive()


def test_a_capture_blames_no_forward_for_a_comparison_of_another_thread(
    backend: GraphBackend,
) -> None:
    """That puts the random state back."""
    compares, looks, compared = threading.Event(), threading.Event(), threading.Event()

    def drawing(x: Tensor) -> Tensor:
        if threading.current_thread().name == "compares" and not compares.is_set():
            compares.set()
            looks.wait(0.5)
        return x + torch.rand_like(x)

    def captured(x: Tensor) -> Tensor:
        if current_forward_context() is not None and not looks.is_set():
            looks.set()
            compared.wait(5)
        return x * 2 + torch.rand_like(x)

    x = torch.randn(2, 4, device=backend.device)
    first = cgplan.graphed(drawing, verify="always")
    second = cgplan.graphed(captured)
    for _ in range(4):
        first(x)

    def call() -> None:
        first(x)
        compared.set()

    other = threading.Thread(target=call, name="compares")
    other.start()
    assert compares.wait(30)
    for _ in range(3):
        second(x)
    other.join(30)
    assert first.graph_calls == 3
    assert second.graph_calls == 1, second.explain()


def test_an_attribute_is_deleted_through_the_drop_in() -> None:
    model = nn.Linear(4, 4).eval()
    g = cgplan.graphed(model)
    g.scale = 2
    del g.scale
    assert not hasattr(model, "scale")


@pytest.mark.parametrize("model", [None, 3, nn.Linear])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(cgplan.ModelError, match=r"the model is "):
        cgplan.graphed(model)
    with pytest.raises(cgplan.ConfigError, match="graphed has no argument 'size'") as caught:
        cgplan.graphed(size=[1])  # type: ignore[arg-type]
    assert "Did you mean 'sizes'?" in caught.value.remedy
    with pytest.raises(cgplan.ConfigError, match="no argument 'batch_sizes'") as caught:
        cgplan.graphed(batch_sizes=[1])  # type: ignore[arg-type]
    assert "Did you mean 'sizes'?" in caught.value.remedy
    with pytest.raises(cgplan.ConfigError, match="no argument 'budget'") as caught:
        cgplan.graphed(budget=2**30)  # type: ignore[arg-type]
    assert "The budget is max_graphs" in caught.value.remedy
    with pytest.raises(cgplan.ConfigError, match="max_size has no effect beside a list of sizes"):
        cgplan.graphed(sizes=[1, 2], max_size=16)
    if not torch.cuda.is_available():
        with pytest.raises(cgplan.BackendError):
            cgplan.graphed(device="cuda")
    assert callable(cgplan.graphed(sizes=[1]))


@pytest.mark.parametrize(
    "settings",
    [{"sizes": [1]}, {"max_size": 1}, {"dynamic": {"input": {0: cgplan.Dim("b", max=1)}}}],
)
def test_batches_beyond_one_row_run_eagerly(
    backend: GraphBackend, settings: dict[str, Any]
) -> None:
    model = nn.Linear(4, 4).to(backend.device).eval()
    g = cgplan.graphed(model, **settings)
    with torch.no_grad():
        for size in (3, 1, 1, 1, 3, 2, 1, 3):
            x = torch.randn(size, 4, device=backend.device)
            torch.testing.assert_close(g(x), model(x))
    assert g.graph_calls == 3
    assert sum(g.eager_calls.values()) == 5
    g.recapture()
    assert g.graph_calls == 3


def test_wrong_dynamic(backend: GraphBackend) -> None:
    with pytest.raises(ConfigError, match="names no dimension"):
        cgplan.graphed(lambda x: x, dynamic={"x": {0: torch.export.Dim.AUTO}})
    with pytest.raises(ConfigError, match="batch has a Dim, and sizes"):
        cgplan.graphed(lambda x: x, sizes=[2], dynamic={"x": {0: cgplan.Dim("batch", max=4)}})(
            rows(backend, 2)
        )
    with pytest.raises(ConfigError, match="dynamic names 'y'"):
        cgplan.graphed(lambda x: x, dynamic={"y": {0: "batch"}})
    part = cgplan.graphed(lambda point: point.x * 2, dynamic={"point.x": {0: "rows"}})
    with pytest.raises(ConfigError, match=r"names 'point\.x'") as caught:
        part(Point(rows(backend, 2), rows(backend, 2)))
    assert "point.0, point.1" in caught.value.remedy
    with pytest.raises(ConfigError, match="the example is a int"):
        cgplan.graphed(nn.Linear(4, 4), example=5)


def test_settings_that_no_graph_of_a_drop_in_can_have_are_refused_when_it_is_made() -> None:
    with pytest.raises(ConfigError, match="cudagraph_mode is AUTO") as caught:
        cgplan.graphed(nn.Linear(4, 4), compilation={"cudagraph_mode": "AUTO"})
    assert caught.value.remedy == "Leave cudagraph_mode out, or name a mode."
    with pytest.raises(ConfigError, match="did you mean 'cudagraph_capture_sizes'"):
        cgplan.graphed(nn.Linear(4, 4), compilation={"sizes": [4]})
    never: dict[str, Any]
    for never in (
        {"max_cudagraph_capture_size": 4},
        {"cudagraph_copy_inputs": False},
        {"key_rules": "vllm_v2"},
    ):
        told = f"compilation has {next(iter(never))}, which graphed sets"
        with pytest.raises(ConfigError, match=told) as caught:
            cgplan.graphed(nn.Linear(4, 4), compilation=never)
        assert "where rows vary sizes and max_size" in caught.value.remedy
    wrong: dict[str, Any]
    for wrong in ({"max_graphs": 0}, {"verify": "sometimes"}):
        ((name, value),) = wrong.items()
        with pytest.raises(ConfigError, match=f"^{name}: found {value!r}, expected"):
            cgplan.graphed(nn.Linear(4, 4), **wrong)


# --- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x + x.mean(0),
        lambda x: (x + 1).softmax(0),
        lambda x: x.flip(0),
        lambda x: nn.functional.pad(x, (0, 0, 0, 1)),
        lambda x: x.mean(0, dtype=torch.float64),
        lambda x: x / len(x),
    ],
    ids=["mean", "softmax", "flip", "row behind", "mean alone", "count"],
)
def test_padding_that_reaches_real_rows(
    backend: GraphBackend, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    g = cgplan.graphed(model)
    as_the_model(g, model, backend, *3 * [3], *4 * [2], *4 * [3], *4 * [5], 7, 3)
    assert caplog.text.count("so nothing is padded, and each shape has its own graph") == 1
    assert "so nothing is padded, and each shape has its own graph" in g.explain()
    assert sizes(g) == {2, 3, 5}
    strict, x = cgplan.graphed(model, strict=True), rows(backend, 3).abs()
    strict(x)
    strict(x)
    with pytest.raises((NumbersError, OutputShapeError)):
        strict(x)


def test_a_strict_graph_that_differs_raises_once(backend: GraphBackend) -> None:
    hidden = threading.local()  # which no walk enters
    hidden.scale = 1.0
    g = cgplan.graphed(lambda x: x * hidden.scale, strict=True, verify="always")
    x = rows(backend, 4)
    for _ in range(4):
        g(x)
    hidden.scale = 2.0
    with pytest.raises(NumbersError):
        g(x)
    for _ in range(3):
        close(g(x), x * 2)
    assert g.runners[0].stats.captures == 2


def test_statistics_go_on_in_the_next_runner_of_a_kind(backend: GraphBackend, net: Net) -> None:
    g = cgplan.graphed(net)
    for _ in range(4):
        g(rows(backend, 3))
    [runner] = g.runners
    stats = runner.stats
    for n in (5, 40, 40):  # buffers of 16 rows, then larger ones
        g(rows(backend, n))
    assert g.runners[0] is not runner
    net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
    for _ in range(3):
        g(rows(backend, 3))
    assert g.runners[0].stats is stats
    assert stats.calls == g.graph_calls == stats.traffic().total == 8
    assert stats.captures == 4


def test_outputs_of_a_dict_keep_their_keys_in_what_is_explained(backend: GraphBackend) -> None:
    def model(x: Tensor) -> dict[str, Any]:
        return {"logits": x * 2, "states": {"first": x[:, :2], "others": (x + 1, 3)}}

    g = cgplan.graphed(model)
    for _ in range(3):
        g(rows(backend, 3))
    told = g.explain()
    for line in (
        "output 0, logits: [batch, 4]",
        "output 1, states.first: [batch, 2]",
        "output 2, states.others.0: [batch, 4]",
    ):
        assert line in told


def test_a_head_of_another_width_after_new_weights_is_padded(
    backend: GraphBackend, net: Net
) -> None:
    """Two changes with a call after each: nothing watched the model when the head came."""
    g = cgplan.graphed(net, sizes=[1, 4, 8])
    for n in (3, 3, 3, 3, 1, 8):
        g(rows(backend, n))
    net.inner.weight = nn.Parameter(torch.randn_like(net.inner.weight))
    g(rows(backend, 2))
    net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)
    g(rows(backend, 2))
    net.inner = nn.Linear(4, 5).to(backend.device)
    eager = sum(g.eager_calls.values())
    for n in (2, 3, 5, 2, 6, 7):
        x = rows(backend, n)
        torch.testing.assert_close(g(x), net(x))
    assert sum(g.eager_calls.values()) == eager + 1
    assert "output 0: [batch, 5]" in g.explain()


def test_outputs_of_two_sizes_that_disagree_are_not_padded(backend: GraphBackend) -> None:
    def model(x: Tensor) -> Tensor:
        return x[:4] * 2

    g = cgplan.graphed(model, verify="off")
    for n in (3, 5, 5, 3, 5, 3, 5, 3, 5):
        x = rows(backend, n)
        torch.testing.assert_close(g(x), model(x))
    assert g.graph_calls


def test_a_kind_without_graphs_keeps_its_calls(backend: GraphBackend, net: Net) -> None:
    g = cgplan.graphed(lambda x, scale: net(x) * scale, max_graphs=1)
    calls = [1.0] * 6 + [2.0] * 12
    for scale in calls:
        g(rows(backend, 2), scale)
    assert re.search(r"freed +4 +.*scale = 1.0\n *2 +10 +.*scale = 2.0\n", g.explain())


@pytest.mark.parametrize("model", [lambda x: x - x.amin(0), lambda x: x * (x > 0).all()])
def test_reductions_that_copies_of_a_row_do_not_change(backend: GraphBackend, model: Any) -> None:
    g = cgplan.graphed(model)
    as_the_model(g, model, backend, *3 * [3], *4 * [2], *4 * [3], *4 * [5], 7, 3)
    assert sizes(g) == {2, 4, 8}


@pytest.mark.parametrize("pad", [float("-inf"), 100.0])
def test_pad_names_the_value_that_is_ignored(backend: GraphBackend, pad: float) -> None:
    def largest(x: Tensor) -> Tensor:
        return x - x.max(0).values

    g = cgplan.graphed(largest, pad={"x": pad})
    as_the_model(lambda x: g(-x - 1), lambda x: largest(-x - 1), backend, 3, 3, 3, 2, 1, 5, 6)
    assert pad == 100 or sizes(g) == {1, 2, 4, 8}


def test_a_length_without_a_mask(backend: GraphBackend) -> None:
    def mean(x: Tensor) -> Tensor:
        return x.mean(1)

    g = cgplan.graphed(mean, dynamic={"x": {0: "batch", 1: "length"}})
    for length in (8, 8, 8, 5, 5, 5, 6, 8):
        x = rows(backend, 4, length)
        close(g(x), mean(x))
    assert "so nothing is padded" in g.explain()


def test_static_buffers_are_made_for_the_boxes_that_come(backend: GraphBackend) -> None:
    """Sizes up to 64 by four names are 343 boxes of 64 rows, the largest of 64 MiB."""
    dims = {"x": {0: "a", 1: "b", 2: "c", 3: "d"}}
    g, x = cgplan.graphed(lambda x: x * 2, dynamic=dims), rows(backend, 9, 9, 9, 9)
    for _ in range(3):
        close(g(x), x * 2)
    (runner,) = g.runners
    assert replays(g) == 1
    assert runner.report.static_bytes == 64 * 16**3 * x.itemsize
    close(g(x[:, :3]), x[:, :3] * 2)
    assert runner.report.static_bytes == 64 * (16 + 4) * 16**2 * x.itemsize


def test_masked_padding(backend: GraphBackend) -> None:
    def total(x: Tensor, mask: Tensor) -> Tensor:
        return (x * mask).sum(0)

    g = cgplan.graphed(total, dynamic={"x": {0: "n"}, "mask": {0: "n"}})
    for count in (3, 3, 3, 2, 6, 5):
        x, mask = (
            rows(backend, count),
            torch.ones(count, 1, dtype=torch.int64, device=backend.device),
        )
        close(g(x, mask), x.sum(0))


def test_copies_of_real_rows_are_valid_indices(backend: GraphBackend) -> None:
    table = torch.arange(10.0, device=backend.device)
    g = cgplan.graphed(lambda x: table[x.long() - 1])
    for values in ((3, 9, 1), (3, 9, 1), (2, 4, 6), (1, 2, 10, 4, 8)):
        x = torch.tensor(values, dtype=torch.float32, device=backend.device)
        close(g(x), x - 1)


@pytest.mark.parametrize("pad", [{}, {"edges": 3}], ids=str)
def test_indices_that_are_padded_to_a_row_behind(
    backend: GraphBackend, pad: dict[str, float]
) -> None:
    def gathered(atoms: Tensor, edges: Tensor) -> Tensor:
        return atoms.index_add(0, edges[1], atoms[edges[0]])

    dims = {
        "atoms": {0: cgplan.Dim("atoms", max=4, sizes=(4,))},
        "edges": {1: cgplan.Dim("edges", max=8)},
    }
    g = cgplan.graphed(gathered, dynamic=dims, pad=pad)
    for count in (3, 3, 3, 2, 3):
        atoms, edges = (
            rows(backend, count),
            torch.tensor([[1, 0, 1], [0, 1, 1]], device=backend.device),
        )
        close(g(atoms, edges), gathered(atoms, edges))
    assert ("nothing is padded" in g.explain()) == (not pad)


def test_a_model_of_one_size(backend: GraphBackend) -> None:
    other = rows(backend, 3)
    g = cgplan.graphed(lambda x: x + other)
    as_the_model(g, lambda x: x + other, backend, *7 * [3])
    assert sizes(g) == {3}
    assert "nothing is padded" in g.explain()


@pytest.mark.parametrize(
    "model",
    [
        lambda x: (x[:, None] - x[None]).flatten(0, 1),
        lambda x: x[::2],
        lambda x: x[:4],
        lambda x: (x + 1, len(x)),
        lambda x: [x + 1] * len(x),
    ],
    ids=["pairs", "every other", "first", "a number", "structure"],
)
def test_outputs_that_do_not_follow(backend: GraphBackend, model: Any) -> None:
    g = cgplan.graphed(model)
    as_the_model(g, model, backend, 5, 5, 5, 3, 3, 3, 3, 5, 5, 5, 2, 8, 7, 8, 7, 8, 7)
    assert replays(g) >= 4
    assert "so nothing is padded" in g.explain()


def test_objects_as_outputs_stay_with_the_model(backend: GraphBackend) -> None:
    g = cgplan.graphed(lambda x: Counting())
    for _ in range(4):
        assert type(g(rows(backend, 3))) is Counting
    assert "cannot be reached: return tensors alone, or of transformers pass use_" in g.explain()


def test_outputs_of_several_sizes(backend: GraphBackend) -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        return x.t() + 1, x.repeat_interleave(2, 0), x.new_ones(3) + 1, x @ x.t(), x.amax(1)

    g = cgplan.graphed(model)
    as_the_model(g, model, backend, 3, 3, 3, 5, 1, 4, 7)
    assert len(g.runners) == 1
    assert replays(g) == 5


def test_a_size_that_is_that_of_the_batch_by_chance(backend: GraphBackend, net: Net) -> None:
    g = cgplan.graphed(net, strict=True)  # three features, and three rows
    ready(g, net, rows(backend, 3))
    assert sizes(g) == {4}


def test_features_that_are_as_many_as_the_rows_are_not_cut(backend: GraphBackend) -> None:
    model = nn.Linear(4, 4).to(backend.device).eval()
    g = cgplan.graphed(model, sizes=[4, 8], verify="off")
    for count in (4, 4, 4, 3, 8, 3):
        x = torch.randn(count, 4, device=backend.device)
        torch.testing.assert_close(g(x), model(x))
    assert replays(g) == 4


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (complex(-1, 0.0), complex(-1, -0.0)),
        (range(0), range(5, 5)),
        ({0.0: None}, {-0.0: None}),
        ({1: None}, {True: None}),
    ],
)
def test_equal_values_that_are_not_the_same(backend: GraphBackend, first: Any, second: Any) -> None:
    def model(x: Tensor, value: Any) -> Tensor:
        return x + sum(repr(value).encode())

    g = cgplan.graphed(model, verify="off")
    x = rows(backend, 3)
    for value in (first, first, first, first, second, second, second, second):
        torch.testing.assert_close(g(x, value), model(x, value))
    assert replays(g) == 4


def test_two_tensors_after_one_that_came_twice(backend: GraphBackend) -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return x - y if x is y else x + y

    g = cgplan.graphed(model, verify="off")
    x, y = rows(backend, 3), rows(backend, 3)
    for second in (x, x, x, x, y, y, y, y, x, y, x, x, y, y):
        torch.testing.assert_close(g(x, second), model(x, second))
    assert replays(g) == 10


@contextmanager
def of_doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", ["dtype", "autocast", "mode"])
def test_a_call_like_the_last_one_in_another_state_of_torch(
    backend: GraphBackend, name: str
) -> None:
    device = backend.device.type

    def model(x: Tensor) -> Tensor:
        states = (
            torch.get_default_dtype() is torch.float64,
            torch.is_autocast_enabled(device),
            torch.empty(0).device.type == "meta",
        )
        return x + sum(2**at for at, state in enumerate(states) if state)

    g, x = cgplan.graphed(model, verify="off"), rows(backend, 3)
    states: dict[str, AbstractContextManager[Any]] = {
        "dtype": of_doubles(),
        "autocast": torch.autocast(device, torch.bfloat16),
        "mode": torch.device("meta"),
    }
    for _ in range(5):
        torch.testing.assert_close(g(x), model(x))
    with states[name]:
        wanted = model(x)
        for _ in range(4):
            assert torch.equal(g(x), wanted)
    assert torch.equal(g(x), model(x))
    assert replays(g) >= 4


@pytest.mark.parametrize("dynamic", [None, {}], ids=["padded", "exact"])
def test_state_and_random_numbers_are_as_without_graphs(
    backend: GraphBackend, dynamic: Any
) -> None:
    model = Counting().to(backend.device).eval()
    g, x = cgplan.graphed(model, dynamic=dynamic), rows(backend, 3)
    torch.manual_seed(3)
    wanted = torch.randn(2, device=backend.device)
    torch.manual_seed(3)
    for turn in range(1, 10):
        count = 3 - turn % 2
        close(g(x[:count]), x[:count] + turn)
    assert model.calls == 9
    assert torch.equal(torch.randn(2, device=backend.device), wanted)


def test_padding_changes_no_state(backend: GraphBackend) -> None:
    class Usage(nn.Module):
        usage: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("usage", torch.zeros(8))

        def forward(self, ids: Tensor) -> Tensor:
            self.usage.index_add_(0, ids, torch.ones_like(ids, dtype=torch.float32))
            return ids * 2

    model, own = Usage().to(backend.device).eval(), Usage().to(backend.device).eval()
    g = cgplan.graphed(model)
    for count in (3, 3, 3, 2, 2, 3, 5, 5, 5, 4):
        ids = torch.randint(0, 8, (count,), device=backend.device)
        close(g(ids), own(ids))
        close(model.usage, own.usage)
    assert (
        "the forward writes state, which padding might reach; so nothing is padded" in g.explain()
    )


@pytest.mark.parametrize(
    "pad",
    [
        {},
        {"slot": 8},
    ],
    ids=str,
)
def test_padding_that_is_written_at_slots(backend: GraphBackend, pad: dict[str, float]) -> None:
    class Slots(nn.Module):
        slots: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("slots", torch.full((9,), 7.0))

        def forward(self, x: Tensor, slot: Tensor) -> Tensor:
            self.slots.index_copy_(0, slot, x)
            return self.slots[slot]

    model, own = Slots().to(backend.device).eval(), Slots().to(backend.device).eval()
    g = cgplan.graphed(model, pad=pad)
    for count in (3, 3, 3, 2, 3, 5):
        x, slot = (
            rows(backend, count, 1)[:, 0],
            torch.randperm(7, device=backend.device)[:count] + 1,
        )
        close(g(x, slot), own(x, slot))
        close(model.slots[:8], own.slots[:8])


def test_random_models(backend: GraphBackend) -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    g, x = cgplan.graphed(noisy, dynamic={}), rows(backend, 3)
    for turn in range(6):
        torch.manual_seed(turn)
        found = g(x)
        torch.manual_seed(turn)
        if backend.device.type == "cpu":  # elsewhere graphs draw from other offsets
            close(found, noisy(x))
        assert ((found - x) < 1).all()
    padded = cgplan.graphed(lambda x: nn.functional.dropout(x, 0.5))
    seen = [padded(torch.ones(3, 1000, device=backend.device)) for _ in range(6)]
    assert all(0.9 < one.mean() < 1.1 for one in seen)
    assert len({one.sum(1).tolist().__repr__() for one in seen}) == 6
    assert replays(padded) == 4


def test_choices_in_half_precision(backend: GraphBackend) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(
                torch.randn(50, 32, device=backend.device, dtype=torch.bfloat16)
            )

        def forward(self, ids: Tensor) -> Tensor:
            return (self.table[ids].cumsum(1) @ self.table.T)[:, -1].argmax(-1)

    model = Last().eval()
    g = cgplan.graphed(model, dynamic={"ids": {0: "batch", 1: "length"}})
    for length in (8, 8, 8, 6, 6, 6):
        ids = torch.randint(1, 50, (8, length), device=backend.device)
        assert torch.equal(g(ids), model(ids))


def test_means_in_half_precision(backend: GraphBackend) -> None:
    embed = nn.Embedding(20, 16).to(backend.device, torch.bfloat16).eval()
    mean = cgplan.graphed(lambda ids: embed(ids).mean(1), dynamic={"ids": {1: "length"}})
    for length in (64, 64, 64, 40, 40, 40):
        ids = torch.randint(1, 20, (3, length), device=backend.device)
        torch.testing.assert_close(mean(ids), embed(ids).mean(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_that_reaches_few_numbers_is_no_rounding(
    backend: GraphBackend, dtype: torch.dtype
) -> None:
    """One number of eight counts the padded length: in half precision few that differ may be rounding."""

    def first_counts(x: Tensor) -> Tensor:
        y = x * 2
        y[:, 0] = y.sum(1) / x.shape[1]
        return y

    g = cgplan.graphed(first_counts, dynamic={"x": {0: "batch", 1: "length"}})
    for _ in range(8):
        x = (torch.randn(2, 5, 8, device=backend.device) + 1).to(dtype)
        torch.testing.assert_close(g(x), first_counts(x), rtol=0.05, atol=0.05)
    assert "nothing is padded" in g.explain()


def test_large_numbers_of_a_mask_hide_no_difference(backend: GraphBackend) -> None:
    def scores(ids: Tensor) -> Tensor:
        low = torch.full((len(ids), 1), torch.finfo(torch.float32).min, device=ids.device)
        return torch.cat([ids.float().mean(1, keepdim=True), low], 1)

    g, ids = (
        cgplan.graphed(scores, dynamic={"ids": {1: "length"}}),
        torch.full((1, 5), 8, device=backend.device),
    )
    for _ in range(5):
        close(g(ids), scores(ids))


def test_a_miss_with_an_object_is_the_error_that_was_asked_for() -> None:
    class Cache:
        scale = 2.0

    def forward(x: torch.Tensor, cache: Cache) -> torch.Tensor:
        return x * cache.scale

    cache = Cache()
    g = cgplan.graphed(forward, max_size=4, compilation={"on_miss": "error"})
    for count in (2, 3, 4, 3):
        g(torch.ones(count, 8), cache)
    with pytest.raises(cgplan.DispatchMissError):
        g(torch.ones(8, 8), cache)


def test_explain_names_the_constant_that_sets_kinds_apart_and_counts_answers(
    backend: GraphBackend,
) -> None:
    def scaled(x: Tensor, flag: bool = False) -> Tensor:
        if x.shape[1] == 1:
            raise RuntimeError("one column")
        return x * 2 if flag else x

    g = cgplan.graphed(scaled)
    x = torch.ones(3, 2, device=backend.device)
    for _ in range(3):
        g(x, flag=True)
        g(x, flag=False)
    with pytest.raises(RuntimeError, match="one column"):
        g(x[:, :1])
    told = g.explain()
    assert "flag = True" in told
    assert "flag = False" in told
    assert "4 calls ran eagerly: the first calls of a kind" in told


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((1,), "no argument is a tensor"),
        ((torch.tensor(1.0),), "no tensor argument has a dimension"),
        ((torch.ones(0, 2),), "a tensor argument is empty"),
    ],
    ids=["number", "scalar", "empty"],
)
def test_calls_without_a_batch_say_why(arguments: tuple[Any, ...], reason: str) -> None:
    g = cgplan.graphed(lambda x: x * 2, device="cpu")
    g(*arguments)
    assert f"1 call ran eagerly: {reason}" in g.explain()


def test_boxes_beyond_what_a_configuration_holds_run_eagerly(backend: GraphBackend) -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    g = cgplan.graphed(double, dynamic={"x": {dim: f"d{dim}" for dim in range(6)}})
    x = torch.randn(6 * [9], device=backend.device)
    for _ in range(4):
        assert torch.equal(g(x), double(x))
    assert "10,000" in g.explain()


def test_an_interrupted_warm_up_leaves_the_state(backend: GraphBackend) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n = nn.Buffer(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.n.add_(1)
            raise KeyboardInterrupt

    model = Counting().to(backend.device).eval()
    with pytest.raises(KeyboardInterrupt):
        cgplan.graphed(model).warm_up(torch.ones(2, 2, device=backend.device))
    assert model.n.item() == 0


@torch.no_grad()
def test_weights_that_the_first_run_makes(backend: GraphBackend) -> None:
    """Lazy modules; that run may be cgplan's."""
    for options in ({}, {"example": (torch.randn(4, 8, device=backend.device),)}):
        net = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2)).to(backend.device).eval()
        g = cgplan.graphed(net, **options)
        for _ in range(4):
            x = torch.randn(3, 8, device=backend.device)
            torch.testing.assert_close(g(x), net(x))
        assert g.graph_calls


@torch.no_grad()
def test_a_batch_that_the_model_refuses_ends_no_graphs() -> None:
    """Its call, which would capture, raises as the model does; the next one captures."""
    net = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2)).eval()
    g = cgplan.graphed(net, sizes=[4, 8])
    good, bad = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 99])
    for ids in (good, good):
        g(ids)
    with pytest.raises(IndexError):
        g(bad)
    for _ in range(3):
        torch.testing.assert_close(g(good), net(good))
    assert g.graph_calls == 3
    more = torch.tensor([1, 2, 3, 4, 5])
    with pytest.raises(IndexError):
        g(torch.tensor([1, 2, 3, 4, 99]))
    for _ in range(3):
        torch.testing.assert_close(g(more), net(more))
    torch.testing.assert_close(g(good), net(good))
    assert g.graph_calls == 7
    assert [len(runner.plan.keys) for runner in g.runners] == [2]


@torch.no_grad()
def test_statistics_count_batches_that_are_too_large() -> None:
    """Plans of sizes come from them."""
    net = nn.Linear(4, 2).eval()
    g = cgplan.graphed(net, sizes=[1, 4])
    for size in (3, 3, 3, 24, 3, 24, 24):
        g(torch.randn(size, 4))
    (runner,) = g.runners
    traffic = runner.stats.traffic()
    assert {shape.num_tokens: count for shape, count in traffic.histogram} == {3: 2, 24: 3}
    assert sum(runner.stats.eager.values()) == 3


def test_a_graph_of_another_autocast_makes_room(backend: GraphBackend) -> None:
    g = cgplan.graphed(nn.Linear(4, 4).to(backend.device).eval(), max_graphs=1)
    x = torch.randn(3, 4, device=backend.device)
    with torch.no_grad():
        for _ in range(4):
            g(x)
        with torch.autocast(backend.device.type, dtype=torch.bfloat16):
            for _ in range(20):
                g(x)
    assert g.graph_calls > 15
    assert "could not be captured" not in str(g.eager_calls) + g.explain()


class TableOfConstants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def forward(self, x: Tensor, k: int = 0) -> Tensor:
        if k not in self.tables:
            self.tables[k] = torch.full((4,), k + 1.0, device=x.device)
        return x * self.tables[k]


@pytest.mark.parametrize("policy", ["lazy", "eager"])
def test_a_kind_that_is_warmed_up_and_adds_to_the_model_keeps_its_graphs(
    backend: GraphBackend, policy: str
) -> None:
    g = cgplan.graphed(TableOfConstants().eval(), compilation={"capture_policy": policy})
    x = torch.randn(3, 4, device=backend.device)
    with torch.no_grad():
        for _ in range(4):
            g(x)
        known = g.graph_calls
        if policy == "lazy":
            g.warm_up(x, k=1)
        for _ in range(3):
            torch.testing.assert_close(g(x, k=1), x * 2)
    assert g.graph_calls == known + 3


class Kept:
    def __init__(self, size: int = 1) -> None:
        self.values = torch.zeros(size)


def test_a_kept_object_has_graphs_whatever_came_before() -> None:
    def model(x: Tensor, cache: Kept) -> Tensor:
        return x + cache.values.sum()

    g = cgplan.graphed(model, dynamic={}, device="cpu")
    x = torch.ones(2)
    for _ in range(30):  # new ones
        g(x, Kept())
    for _ in range(3):
        grows = Kept()
        for size in range(1, 33):
            grows.values = torch.zeros(size)
            g(x, grows)
    learnt = g.eager_calls["the first calls of a kind"]
    assert learnt <= 17 + 3 * 6, "a cache that grows is tried less and less"
    assert not g.graph_calls
    two = Kept(), Kept(2)
    for _ in range(4):
        for kept in two:
            assert torch.equal(g(x, kept), x)
    assert g.graph_calls == 2


def test_ignore_and_hints_are_for_values_of_python(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval().requires_grad_(False)
    g = cgplan.graphed(model, device="cpu")
    ignores = cgplan.graphed(model, device="cpu", ignore=["model[0]", "model[*].bias"])
    x = torch.ones(2, 4)
    for _ in range(3):
        g(x), ignores(x)
    assert "ignore names 'model[0]', which holds model[0]: graphs keep" in caplog.text
    assert "ignore names 'model[*].bias', which holds model[0].bias: graphs" in caplog.text
    model[0].bias.data = model[0].bias.data.clone()
    g(x)
    assert "bias (its memory); answers stay right; write it in place (`copy_`)" in caplog.text
    assert "ignore=" not in caplog.text
    for _ in range(2):
        g(x)
    caplog.clear()
    model[0].weight.data = torch.ones(2, 4)
    model[0].bias.data = torch.ones(2)
    g(x)
    assert "model[0].weight (it was torch.float32 [4, 4]" in caplog.text
    for _ in range(3):
        g(x)
    model[1].train()
    g(x)
    assert "model[1].training" in caplog.text
    assert "ignore=" not in caplog.text
