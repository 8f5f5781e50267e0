"""Memory that moved: silent wrong numbers with a bare graph, the right ones or an AddressError with cgplan.

Each test first shows the hazard with the bare backend, then what a runner makes of it.
"""

from __future__ import annotations

import copy

import pytest
import torch
import ways
from checks import capture as bare
from checks import same
from torch import Tensor, nn
from ways import (
    FACTOR,
    FULL,
    KEYS,
    PIECEWISE,
    Cached,
    GraphBackend,
    Model,
    all_ways,
    double,
    each_size,
    full,
    open_runner,
)

import cgplan
from cgplan import (
    AddressError,
    BatchDescriptor,
    CaptureError,
    CUDAGraphWrapper,
    forward_context,
    get_forward_context,
)
from cgplan.graphs import change_detector

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@all_ways
def test_an_input_that_moved(backend: GraphBackend, way: str) -> None:
    """A graph reads the tensor that it was captured with, not the one that the variable holds today: the answer
    belongs to an old batch. A runner copies each batch in; a wrapper on its own refuses a tensor that moved.
    """
    old, new = full(backend, 1), full(backend, 5)
    given = {"x": old}
    graph, out = bare(backend, lambda: given["x"] * 2)
    given["x"] = new
    backend.replay(graph)
    same(out, old * 2)  # stale
    runner = open_runner(backend, Model(backend, way, double), way)
    for x in (old, new, full(backend, 3, 3, 2)):
        same(runner(x=x), x * 2 + 1)
    if way == "full":
        wrapper = CUDAGraphWrapper(double, FULL, backend=backend)
        with forward_context(FULL, BatchDescriptor(4)):
            wrapper(old)
            with pytest.raises(AddressError, match=r"args\[0\]"):
                wrapper(new)


@each_size
def test_metadata_that_moved(backend: GraphBackend, way: str) -> None:
    """Block tables and lengths are built anew for each step, and a graph goes on reading the first ones. Declared as
    metadata they are copied to where the graph reads; on a wrapper of your own a new tensor is an error with its path.
    """

    def scaled(x: Tensor) -> Tensor:
        return x * get_forward_context().metadata["factor"]

    x, two, five = full(backend, 1), full(backend, 2, 1), full(backend, 5, 1)
    with forward_context(metadata={"factor": two}) as context:
        graph, out = bare(backend, lambda: scaled(x))
        context.metadata = {"factor": five}
        backend.replay(graph)
    same(out, x * 2)  # stale
    runner = open_runner(backend, Model(backend, way, scaled), way, metadata={"factor": FACTOR})
    for factor in (two, five):
        same(runner(x=x, factor=factor), x * factor + 1)
    wrapper = CUDAGraphWrapper(scaled, FULL, backend=backend)
    with forward_context(FULL, BatchDescriptor(4), {"factor": two}):
        same(wrapper(x), x * 2)
    with (
        forward_context(FULL, BatchDescriptor(4), {"factor": five}),
        pytest.raises(AddressError, match="factor: 0x"),
    ):
        wrapper(x)


@all_ways
@pytest.mark.parametrize("how", ["data", "assign"])
def test_a_parameter_that_was_rebound(backend: GraphBackend, way: str, how: str) -> None:
    """`weight.data = ...` and `load_state_dict(assign=True)` put new memory under an old name, and graphs go on with
    the old weights. Load in place (`copy_`, `load_state_dict`): that is seen at once. Memory that moved is an error.
    """

    def rebind(layer: nn.Linear) -> None:
        new = layer.weight.data * 10
        if how == "data":
            layer.weight.data = new
        else:
            layer.load_state_dict({"weight": new}, assign=True)

    x, layer = full(backend, 1), nn.Linear(2, 2, bias=False, device=backend.device)
    kept = layer.weight.data
    graph, out = bare(backend, lambda: layer(x))
    rebind(layer)
    backend.replay(graph)
    same(out, x @ kept.T)  # old weights
    model = Model(backend, way)
    runner = open_runner(backend, model, way, outputs="clone")
    runner(x=x)
    model.stem.load_state_dict({"weight": model.stem.weight * 3})
    same(runner(x=x), model(x).detach())
    kept = model.stem.weight.data
    rebind(model.stem)
    with pytest.raises(AddressError, match="weight") as caught:
        runner(x=full(backend, 1, 8, 2))
    assert "in place" in caught.value.remedy


def random_state(backend: GraphBackend, state: Tensor | None = None) -> Tensor:
    on_gpu = backend.device.type == "cuda"
    if state is not None:
        (torch.cuda if on_gpu else torch).set_rng_state(state)
    return torch.cuda.get_rng_state() if on_gpu else torch.get_rng_state()


@pytest.fixture
def slow_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where many tensors are in it."""
    for name in ("_WITH_WATCHER", "_WITHOUT_WATCHER"):
        monkeypatch.setattr(change_detector, name, (1, 1, 1))


class Deep(nn.Module):
    """Many tensors; draws, or counts what it has seen, where asked."""

    def __init__(self, device: torch.device, does: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, device=device) for _ in range(150))
        self.register_buffer("total", torch.zeros(2, device=device))
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh() / 10
        if self.does == "counts":
            self.total.add_(x.sum(0))  # type: ignore[operator]
            return x + self.total  # type: ignore[operator]
        return x + torch.rand_like(x) if self.does == "draws" else x


@torch.no_grad()
@pytest.mark.parametrize("does", ["", "draws", "counts"])
@pytest.mark.usefixtures("slow_rotation")
def test_one_of_300_tensors_moves(backend: GraphBackend, does: str) -> None:
    """Nothing tells of `.data =`. The call after it is answered with the new weight, writes state and draws once; a
    declared runner raises before it does."""

    def both() -> tuple[Tensor, Tensor]:
        before = random_state(backend)
        found = g(x)
        after = random_state(backend)
        random_state(backend, before)
        wanted = own(x)
        assert torch.equal(random_state(backend), after)
        return found, wanted

    x = torch.randn(3, 2, device=backend.device)
    model = Deep(backend.device, does).eval()
    own = copy.deepcopy(model)
    g = cgplan.graphed(model, dynamic={}, verify="first")
    for _ in range(5):
        torch.testing.assert_close(*both())
    for at in (149, 3, 77):
        for layers in (model.layers, own.layers):
            layers[at].weight.data = layers[at].weight.data * 2  # type: ignore[union-attr, operator]
        torch.testing.assert_close(*both())
        torch.testing.assert_close(*both())
    assert g.graph_calls == 9
    compilation = {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [3]}
    inputs = {"x": cgplan.Input(shape=("num_tokens", 2), dtype=torch.float32, pad=0)}
    runner = cgplan.capture(own, inputs=inputs, compilation=compilation, device=backend.device)
    for _ in range(3):
        runner(x=x)
    own.layers[149].weight.data = own.layers[149].weight.data.clone()  # type: ignore[union-attr, operator]
    more = torch.randn(5, 2, device=backend.device)
    if not does:
        torch.testing.assert_close(runner(x=more), own(more))  # too many for a graph
    total = own.total.clone()  # type: ignore[operator]
    with pytest.raises(AddressError, match=r"layers\[149\]\.weight"):
        runner(x=x)
    torch.testing.assert_close(own.total, total)
    runner.close()


@torch.no_grad()
@pytest.mark.usefixtures("slow_rotation")
def test_a_borrowed_output_that_comes_back_after_a_weight_moved(backend: GraphBackend) -> None:
    model = Deep(backend.device, "").eval()
    own = copy.deepcopy(model)
    g = cgplan.graphed(model, dynamic={}, verify="first", outputs="borrow")
    y = wanted = torch.randn(3, 2, device=backend.device)
    for step in range(12):
        if step == 7:
            for layers in (model.layers, own.layers):
                layers[149].weight.data = layers[149].weight.data * 2  # type: ignore[union-attr, operator]
        y, wanted = g(y), own(wanted)
        torch.testing.assert_close(y, wanted)


@each_size
def test_a_kv_cache_that_was_reallocated(backend: GraphBackend, way: str) -> None:
    """Someone resizes the KV cache; graphs go on writing keys to the old memory, by then perhaps another tensor's.
    With `address_check: always` the next call is an error that names the cache; put back, the graph is good again.
    """
    x, slots = full(backend, 1), torch.arange(4, device=backend.device)
    layer = Cached(backend)
    old = layer.cache  # held here, so that nobody else's memory is written to
    graph, _ = bare(backend, lambda: layer(x, slots))
    layer.cache = torch.zeros_like(old)
    x.fill_(7)
    backend.replay(graph)
    same(old[:4], x)
    assert not layer.cache.any()  # the keys went elsewhere
    model = Model(backend, way, Cached(backend))
    runner = open_runner(backend, model, way, inputs=KEYS, address_check="always")
    runner(x=x, slots=slots)
    old, model.stem.cache = model.stem.cache, torch.zeros_like(old)
    with pytest.raises(AddressError, match="cache: 0x"):
        runner(x=x, slots=slots)
    model.stem.cache = old
    same(runner(x=x * 2, slots=slots), x * 2 + 1)


def test_weak_references_across_segments(backend: GraphBackend) -> None:
    """Segments hand each other tensors that do not hold their memory, to save it; a segment that is captured meanwhile
    may put its own results there, and then overwrites what it still reads. Wrappers hold it until it has been read.
    """

    def last(y: Tensor) -> Tensor:
        return (y + 1) * 3 + y

    pool, x = backend.new_pool(), full(backend, 2)
    first, out = bare(backend, lambda: x * 2, pool)
    weak = backend.borrow(out)
    del out
    second, out = bare(backend, lambda: last(weak), pool, warmups=0)
    backend.replay(first)
    backend.replay(second)
    assert not torch.equal(out, last(x * 2))
    segments = [CUDAGraphWrapper(part, PIECEWISE, backend=backend) for part in (double, last)]
    runner = open_runner(backend, lambda x: segments[1](segments[0](x)), "wrappers")
    for x in (full(backend, 2), full(backend, 3, 7, 2), full(backend, 4)):
        same(runner(x=x), last(x * 2))


@pytest.mark.parametrize("way", ["ops", "modules", "wrappers"])
def test_an_eager_piece_that_returns_a_fresh_tensor(
    backend: GraphBackend, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention between two segments returns its result wherever the allocator likes; the next segment reads where
    the result of the capture lay. cgplan copies it there; wrappers need `copied_arguments`, and refuse it otherwise.
    """
    monkeypatch.setattr(ways, "kept", [])
    h = full(backend, 1)
    at_capture = torch.ops.ways.middle(h)
    graph, out = bare(backend, lambda: at_capture * 2)
    torch.ops.ways.middle(h.fill_(9))
    backend.replay(graph)
    same(out, full(backend, 4))  # stale: (1 + 1) * 2
    runner = open_runner(backend, Model(backend, way, double, double), way)
    for x in (full(backend, 1), full(backend, 9), full(backend, 5, 6, 2)):
        same(runner(x=x), (x * 2 + 1) * 2)
    model = Model(backend, way, double, double)
    model.segments = tuple(CUDAGraphWrapper(double, PIECEWISE, backend=backend) for _ in range(2))
    runner = open_runner(backend, model, "wrappers")
    with pytest.raises(AddressError, match=r"args\[0\]") as caught:
        runner(x=full(backend, 1))
    assert "copied_arguments=(0,)" in str(caught.value.remedy)


@pytest.mark.parametrize("kind", ["each call", "first call", "its own"])
def test_an_eager_piece_binds_a_tensor_that_a_segment_reads(
    backend: GraphBackend, kind: str
) -> None:
    """A graph would read the tensor of the capture. What the piece binds in its own modules gets a slot; elsewhere, as
    in a context object, cgplan cannot know of it, and refuses. A table that the first call makes stays.
    """

    class Context:
        held: Tensor | None = None

    context = Context()

    class Binds(nn.Module):
        mine: Tensor

        def forward(self, x: Tensor) -> Tensor:
            if kind == "its own":
                self.mine = x * 3
            elif kind == "each call" or context.held is None:
                context.held = (
                    x * 3 if kind == "each call" else torch.full((2,), 3.0, device=x.device)
                )
            return x + 1

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.middle = Binds()

        def forward(self, x: Tensor) -> Tensor:
            y = self.middle(x * 2)
            held = self.middle.mine if kind == "its own" else context.held
            assert held is not None
            return y + held

    if kind == "each call":
        with pytest.raises(
            CaptureError,
            match=r"an eager piece made and did not return, at .*test_addresses\.py:\d+",
        ):
            open_runner(backend, Reads(), "modules")
        return
    runner = open_runner(backend, Reads(), "modules")
    for value in (1, 2):
        same(
            runner(x=full(backend, value)),
            full(backend, value * 2 + 1 + (value * 6 if kind == "its own" else 3)),
        )
    runner.close()


def test_an_exchange_of_graphs_hides_no_move(backend: GraphBackend) -> None:
    """Its captures would take the addresses of now for those that older graphs read."""
    model = nn.Linear(2, 2, device=backend.device).eval()
    inputs = {"input": cgplan.Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    lazy = {"cudagraph_capture_sizes": [1, 4], "capture_policy": "lazy"}
    runner = cgplan.capture(model, inputs, compilation=lazy, device=backend.device)
    x = torch.randn(1, 2, device=backend.device)
    runner(x)
    others = set(runner.reachable.keys) - set(runner.plan.keys)
    kept = model.weight.data
    model.weight.data = kept.clone()
    with pytest.raises(AddressError, match="1 changed"):
        runner.exchange(others)
    model.weight.data = kept
    runner.exchange(others)
    runner.invalidate("weights")
    runner.exchange(evicted=others)
    for use in (runner, runner.verify):
        with pytest.raises(AddressError, match="'weights' moved"):
            use(x)


@pytest.mark.parametrize("ahead", ["exchange", "verify"])
def test_a_check_without_a_replay_is_no_first_one(backend: GraphBackend, ahead: str) -> None:
    model = nn.Linear(2, 2, device=backend.device).eval()
    inputs = {"input": cgplan.Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    lazy = {
        "cudagraph_capture_sizes": [1, 4],
        "capture_policy": "lazy",
        "address_check": "first",
        "verify": "off",
    }
    runner = cgplan.capture(model, inputs, compilation=lazy, device=backend.device)
    x = torch.randn(4, 2, device=backend.device)
    runner(x[:1])
    runner.exchange(runner.reachable.keys)
    if ahead == "verify":
        runner.verify(x)
    model.weight.data = model.weight.data.clone()
    with pytest.raises(AddressError, match="1 changed"):
        runner(x)
    runner.close()
