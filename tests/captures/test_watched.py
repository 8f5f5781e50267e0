"""Graphs that anyone captures: what a watch says of memory that was replaced, freed or kept."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgplan
from cgplan import GraphRunner, GraphWatch
from cgplan.backends import GraphBackend, select_backend
from cgplan.captures import watched
from cgplan.errors import AuditError, CgplanError, ConfigError
from cgplan.reports import load_report, render_text
from cgplan.reports.records import WatchReport

Replay = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.qkv(x)
        return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.cache = torch.zeros(4, 64)
        self.register_buffer("scale", torch.full((64,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        self.cache.copy_(x)
        return x * self.scale + self.cache


def made(device: torch.device) -> Model:
    model = Model().to(device).eval().requires_grad_(False)
    model.cache = model.cache.to(device)
    return model


def by_cgplan(model: nn.Module, device: torch.device) -> Replay:
    runner = cgplan.capture(
        model,
        {"x": cgplan.Input(shape=("num_tokens", 64), dtype="float32", pad=0)},
        compilation={"cudagraph_capture_sizes": [4], "address_check": "off", "verify": "off"},
        device=device.type,
    )
    return lambda x: runner(x=x)


def by_torch(model: nn.Module, device: torch.device) -> Replay:
    static = torch.zeros(4, 64, device=device)
    model(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = model(static)

    def replay(x: Tensor) -> Tensor:
        static.copy_(x)
        graph.replay()
        return output

    return replay


def by_callables(model: nn.Module, device: torch.device) -> Replay:
    found: Replay = torch.cuda.make_graphed_callables(
        model, (torch.zeros(4, 64, device=device),), allow_unused_input=True
    )
    return found


def by_inductor(model: nn.Module, device: torch.device) -> Replay:
    compiled = torch.compile(model, mode="reduce-overhead")
    x = torch.zeros(4, 64, device=device)
    with torch.no_grad():
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            compiled(x)
    return compiled


WAYS = [by_cgplan, by_torch, by_callables, by_inductor]


@pytest.fixture(params=WAYS)
def capture(request: pytest.FixtureRequest, backend: GraphBackend) -> Iterator[Any]:
    if backend.is_tape and request.param is not by_cgplan:
        pytest.skip("torch.cuda.graph needs a GPU")
    yield request.param
    torch._dynamo.reset()


def stale(report: WatchReport) -> dict[str, str]:
    return {found.name: found.problem for found in report.stale}


def test_a_graph_whose_memory_lives_has_no_stale_pointer(
    backend: GraphBackend, capture: Any
) -> None:
    device = backend.device
    with torch.no_grad(), cgplan.watch() as watch:
        model = made(device)
        replay = capture(model, device)
        x = torch.randn(4, 64, device=device)
        torch.testing.assert_close(replay(x), model(x), rtol=1e-4, atol=1e-4)
        report = watch.check()
        assert len(report.graphs) >= 1
        assert not report.stale
        graph = report.graphs[0]
        assert __file__ in graph.line
        assert graph.stack[0] == graph.line
        assert (graph.stream is None) == backend.is_tape
        assert any("replay = capture(model, device)" in line for line in graph.stack[1:])
        names = {owner.name for owner in report.owners}
        assert {"Model.layers[1].qkv.weight", "Model.scale", "Model.cache"} <= names
        assert "All pointers are live" in render_text(report)
        assert replay is not None


def assigned(model: Model) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def swapped(model: Model) -> None:
    for layer in model.layers:
        layer.qkv.weight.data = layer.qkv.weight.detach().clone()


def cache_reset(model: Model) -> None:
    model.cache = torch.zeros_like(model.cache)


@pytest.mark.parametrize(
    ("replace", "paths"),
    [
        (assigned, {"Model.layers[*].qkv.weight", "Model.layers[*].qkv.bias", "Model.scale"}),
        (swapped, {"Model.layers[*].qkv.weight"}),
        (cache_reset, {"Model.cache"}),
    ],
)
def test_replaced_memory_is_named_by_path(
    backend: GraphBackend, capture: Any, replace: Callable[[Model], None], paths: set[str]
) -> None:
    device = backend.device
    with torch.no_grad(), cgplan.watch() as watch:
        model = made(device)
        replay = capture(model, device)
        before = watch.baseline()
        assert not before.stale
        replace(model)
        gc.collect()
        report = watch.changed()
        found = stale(report)
        assert paths <= found.keys()
        weights = [s for s in report.stale if s.name == "Model.layers[*].qkv.weight"]
        # the memory of some is free, that of others is taken again
        total = sum(weight.pointers for weight in weights)
        for weight in weights:
            assert total == weight.of >= 3
            assert len(weight.graphs) >= 1
        text = render_text(report)
        assert "are stale" in text
        assert all(path in text for path in paths)
        assert replay is not None


def test_a_reload_in_place_leaves_nothing(backend: GraphBackend, capture: Any) -> None:
    device = backend.device
    with torch.no_grad(), cgplan.watch() as watch:
        model = made(device)
        replay = capture(model, device)
        watch.baseline()
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        assert not watch.changed().stale
        assert replay is not None


@pytest.mark.gpu
@pytest.mark.parametrize("way", [by_cgplan, by_torch, by_callables])
def test_a_replay_that_reads_freed_memory_raises_if_asked(way: Any) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.no_grad(), cgplan.watch(every_replay=True):
        model = made(device)
        replay = way(model, device)
        x = torch.randn(4, 64, device=device)
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        torch.testing.assert_close(replay(x), model(x), rtol=1e-4, atol=1e-4)
        assigned(model)
        gc.collect()
        with pytest.raises(AuditError, match=r"captured at .*reads Model\.\S+, which was freed"):
            replay(x)
    replay(x)  # as ever


@pytest.mark.gpu
def test_a_replay_whose_input_was_dropped_raises_if_asked() -> None:
    with torch.no_grad(), cgplan.watch(every_replay=True):
        static = torch.ones(256, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            between = static * 2
            output = between + 1
        del between  # it lay in the pool
        graph.replay()
        assert output.eq(3).all()
        del static
        with pytest.raises(AuditError, match=r"a tensor of 1.0 KiB, which was freed"):
            graph.replay()


def test_graphs_of_before_are_counted_and_dropped_ones_are_not(backend: GraphBackend) -> None:
    device = backend.device
    way: Any = by_cgplan if backend.is_tape else by_torch
    with torch.no_grad(), ExitStack() as stack:
        model = made(device)
        early = way(model, device)
        watch: GraphWatch = stack.enter_context(cgplan.watch())
        report = watch.check()
        assert not report.graphs
        assert report.unwatched >= 1
        assert "from before the watch: not looked at" in render_text(report)
        del early
        gc.collect()
        assert watch.check().unwatched < report.unwatched
        late = way(model, device)
        with cgplan.watch() as other:
            third = way(model, device)
            assert len(other.check().graphs) == 1
        assert len(watch.check().graphs) == 2
        del third
        gc.collect()
        assert len(watch.check().graphs) == 1
        watch.close()
        fourth = way(model, device)
        assert len(watch.check().graphs) == 1
        del late, fourth


def test_models_of_frozen_objects_have_paths(backend: GraphBackend, capture: Any) -> None:
    device = backend.device
    with torch.no_grad(), cgplan.watch() as watch:
        model = made(device)
        gc.freeze()  # as engines do around their captures
        try:
            replay = capture(model, device)
        finally:
            gc.unfreeze()
        watch.baseline()
        cache_reset(model)
        assert "Model.cache" in stale(watch.changed())
        assert replay is not None


def test_what_is_frozen_after_its_capture_is_held(backend: GraphBackend, capture: Any) -> None:
    device = backend.device
    with torch.no_grad(), cgplan.watch() as watch:
        model = made(device)
        nameless = nn.Linear(64, 64).to(device).requires_grad_(False)
        model.others = {nameless.weight, nameless.bias}  # no paths
        replay = capture(model, device)
        replay(torch.zeros(4, 64, device=device))
        gc.freeze()
        try:
            assert not watch.check().stale
            old = replace_scale(model)
            assert {found.problem for found in watch.check().stale} <= {"unowned block", "moved"}
            assert stale(watch.check()).keys() == {"Model.scale"}
        finally:
            gc.unfreeze()
        assert replay is not None
        assert old is not None


def test_a_model_that_is_captured_right_after_another_has_paths(
    backend: GraphBackend, capture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other lines capture it."""
    monkeypatch.setattr(watched, "_SHARE", 1e9)  # no capture is late enough for a look-up
    device = backend.device
    with torch.no_grad(), cgplan.watch() as watch:
        first = made(device)
        replay = capture(first, device)
        second = made(device)
        other = capture(second, device)
        kept = replace_scale(second)
        report = watch.check()
        assert [found.name for found in report.stale] == ["Model#2.scale"]
        assert report.stale[0].graphs == (report.graphs[-1].name,)
        assert replay is not other
        assert kept is not None


def test_a_baseline_gives_paths_to_what_was_captured_before(
    backend: GraphBackend, capture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched, "_SHARE", 1e9)
    models = list[Model]()
    replays = list[Replay]()
    with (
        torch.no_grad(),
        cgplan.watch(operators=True) as watch,
    ):  # on a GPU paths of later need proof
        for _ in range(2):
            models.append(made(backend.device))
            replays.append(capture(models[-1], backend.device))
        assert not watch.baseline().stale
        for _ in range(2):  # the first one's place is the captured one
            kept = replace_scale(models[1])
            assert stale(watch.changed()).keys() == {"Model#2.scale"}
        assert kept is not None
        assert len(replays) == 2


def test_what_was_stale_before_hides_no_other_layer(backend: GraphBackend, capture: Any) -> None:
    device = backend.device
    with torch.no_grad(), cgplan.watch() as watch:
        model = made(device)
        replay = capture(model, device)
        old = model.layers[0].qkv.weight
        model.layers[0].qkv.weight = nn.Parameter(old.clone(), requires_grad=False)
        assert "Model.layers[*].qkv.weight" in stale(watch.baseline())
        assert not watch.changed().stale
        kept = model.layers[2].qkv.weight
        model.layers[2].qkv.weight = nn.Parameter(kept.clone(), requires_grad=False)
        report = watch.changed()
        assert "Model.layers[*].qkv.weight" in stale(report)
        assert sum(found.pointers for found in report.stale) == 1
        assert replay is not None


def replace_scale(model: Model) -> Tensor:
    """Returns the old one, which so stays alive."""
    old = model.scale
    model.scale = old.clone()
    return old


def test_a_graph_of_after_the_baseline_is_told_of_what_was_stale_in_another(
    backend: GraphBackend, capture: Any
) -> None:
    if capture is by_callables:
        pytest.skip("it puts its own forward into the model")
    device = backend.device
    with torch.no_grad(), cgplan.watch() as watch:
        model = made(device)
        first = capture(model, device)
        kept = [replace_scale(model)]
        assert "Model.scale" in stale(watch.baseline())
        report = watch.changed()
        assert (report.stale, report.left_out) == ((), 1)
        assert "All other pointers are live" in render_text(report)
        second = by_cgplan(model, device)
        kept.append(replace_scale(model))
        report = watch.changed()
        assert [(found.name, found.graphs) for found in report.stale] == [
            ("Model.scale", (watch.check().graphs[-1].name,))
        ]
        assert first is not second


def test_a_capture_after_a_closed_one_looks_up_places_anew(backend: GraphBackend) -> None:
    class Swapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.front = torch.zeros(64, device=backend.device)
            self.back = torch.ones(64, device=backend.device)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.front

    with torch.no_grad(), cgplan.watch() as watch:
        model = Swapping().eval()
        first = by_cgplan(model, backend.device)
        del first
        gc.collect()
        model.front, model.back = model.back, model.front
        second = by_cgplan(model, backend.device)
        assert not watch.check().stale
        model.front, model.back = model.back, model.front
        assert stale(watch.check()) == {"Swapping.front": "moved"}
        assert second is not None


class Gated(nn.Module):
    """Its tensors lie in one storage."""

    def __init__(self, flat: Tensor, first: Any, second: Any) -> None:
        super().__init__()
        self.register_buffer("first", flat[first])
        self.register_buffer("second", flat[second])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.first + self.second


COLUMN = (slice(None), slice(0, 64))
NEXT_COLUMN = (slice(None), slice(64, 128))


@pytest.mark.parametrize(
    ("first", "second", "other"),
    [(0, 1, 2), (slice(0, 4), slice(4, 8), slice(1, 5)), (slice(1, 5), slice(5, 9), slice(0, 4))],
    ids=["rows", "further", "back"],
)
def test_a_tensor_that_moves_within_its_storage_has_moved(
    backend: GraphBackend, capture: Any, first: Any, second: Any, other: Any
) -> None:
    device = backend.device
    flat = torch.randn(16, 64, device=device)
    with torch.no_grad(), cgplan.watch() as watch:
        model = Gated(flat, first, second).eval()
        replay = capture(model, device)
        assert not watch.baseline().stale
        model.first = flat[first]  # the same place
        assert not watch.changed().stale
        model.first = flat[other]
        report = watch.changed()
        assert stale(report) == {"Gated.first": "moved"}
        assert report.stale[0].pointers == report.stale[0].of
        model.first, model.second = flat[second], flat[first]
        assert stale(watch.check()) == {"Gated.first": "moved", "Gated.second": "moved"}
        assert replay is not None


def test_columns_of_one_tensor_that_change_places_have_moved(backend: GraphBackend) -> None:
    flat = torch.randn(4, 128, device=backend.device)
    with torch.no_grad(), cgplan.watch() as watch:
        model = Gated(flat, COLUMN, NEXT_COLUMN).eval()
        replay = by_cgplan(model, backend.device)
        assert not watch.check().stale
        model.first, model.second = model.second, model.first
        assert stale(watch.check()) == {"Gated.first": "moved", "Gated.second": "moved"}
        assert replay is not None


def test_views_that_share_memory_are_live(backend: GraphBackend, capture: Any) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(64, 192, bias=False)
            self.cut()

        def cut(self) -> None:
            self.parts = self.qkv.weight.detach().split(64)
            self.window = self.qkv.weight.detach()[32:96]

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).split(64, -1)
            return q @ self.parts[1] + k @ self.window + v

    device = backend.device
    with torch.no_grad(), cgplan.watch() as watch:
        model = Fused().to(device).eval().requires_grad_(False)
        model.cut()
        replay = capture(model, device)
        assert not watch.check().stale
        model.cut()
        model.window = model.window[:8]  # as many rows as a batch needs
        assert not watch.check().stale
        kept = model.qkv.weight.data
        model.qkv.weight.data = kept.clone()  # the parts are still of the old one
        assert stale(watch.check()) == {"Fused.qkv.weight": "moved"}
        model.qkv.weight.data = kept
        assert not watch.check().stale
        model.parts = tuple(torch.zeros_like(part) for part in model.parts)
        assert "Fused.parts[*]" in stale(watch.check())
        assert replay is not None


class Slotted(nn.Module):
    """A walk does not enter the set."""

    def __init__(self, flat: Tensor) -> None:
        super().__init__()
        self.slot = flat[0]
        self.rows = {flat[8]}

    def forward(self, x: Tensor) -> Tensor:
        return x * next(iter(self.rows))


def test_memory_without_a_path_beside_a_view_that_moves_is_live(backend: GraphBackend) -> None:
    flat = torch.randn(16, 64, device=backend.device)
    with torch.no_grad(), cgplan.watch() as watch:
        model = Slotted(flat).eval()
        replay = by_cgplan(model, backend.device)
        model.slot = flat[1]
        assert not watch.check().stale
        assert replay is not None


def test_memory_without_a_path_that_was_freed_before_hides_none_freed_since(
    backend: GraphBackend,
) -> None:
    def fresh() -> Tensor:
        return torch.randn(4, 64, device=backend.device)

    others = [fresh(), fresh()]
    with torch.no_grad(), cgplan.watch({"other": nn.Linear(2, 2)}) as watch:
        model = Gated(torch.randn(1), 0, 0).eval()
        model.first = fresh()
        model.second = fresh()
        replay = by_cgplan(model, backend.device)
        assert not watch.baseline().stale
        model.first = others[0]
        gc.collect()
        assert sum(found.pointers for found in watch.baseline().stale) == 1
        assert not watch.changed().stale
        model.second = others[1]
        gc.collect()
        report = watch.changed()
        assert (sum(found.pointers for found in report.stale), report.left_out) == (1, 1)
        assert {found.problem for found in report.stale} <= {"free block", "unmapped"}
        assert replay is not None


def test_only_indices_are_left_out_of_names(backend: GraphBackend) -> None:
    class Mlp2d(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(64, 64)
            self.fc2 = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.fc2(self.fc1(x))
            return found

    with torch.no_grad(), cgplan.watch() as watch:
        model = Mlp2d().to(backend.device).eval().requires_grad_(False)
        replay = by_cgplan(model, backend.device)
        kept = model.fc1.weight
        model.fc1.weight = nn.Parameter(kept.clone(), requires_grad=False)
        assert stale(watch.check()).keys() == {"Mlp2d.fc1.weight"}
        assert replay is not None


def test_what_wraps_a_model_later_or_goes_leaves_its_pointers_live(
    backend: GraphBackend, capture: Any
) -> None:
    device = backend.device
    with torch.no_grad(), cgplan.watch() as watch:
        model = made(device)
        wrapper = nn.Sequential(model)
        replay = capture(model, device)
        watch.baseline()
        del wrapper
        gc.collect()
        assert not watch.changed().stale
        wrapper = nn.Sequential(model)
        other = made(device)
        report = watch.changed()
        assert not report.stale
        assert {"Model.scale", "Sequential[0].scale"} & {owner.name for owner in report.owners}
        assert replay is not None
        assert other is not wrapper


class Quantised(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.qweight = layer.weight * 2

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.qweight.t()


def test_a_module_that_another_one_replaces_has_moved_while_something_holds_it(
    backend: GraphBackend, capture: Any
) -> None:
    device = backend.device
    with torch.no_grad(), cgplan.watch() as watch:
        model: Any = made(device)
        replay = capture(model, device)
        assert not watch.baseline().stale
        old = model.layers[1].qkv
        model.layers[1].qkv = Quantised(old)
        report = watch.changed()
        assert {"Model.layers[*].qkv.weight", "Model.layers[*].qkv.bias"} <= stale(report).keys()
        assert {found.problem for found in report.stale} == {"moved"}
        assert replay is not None


@pytest.mark.parametrize("has_roots", [False, True])
def test_a_weight_that_is_replaced_in_a_module_with_another_path_has_moved(
    backend: GraphBackend, capture: Any, has_roots: bool
) -> None:
    device = backend.device
    first: Any = nn.Module()
    model: Any = made(device)
    with torch.no_grad(), cgplan.watch({"f": first, "m": model} if has_roots else None) as watch:
        replay = capture(model, device)
        assert not watch.baseline().stale
        layers = model.layers
        model.layers = nn.Sequential(*layers)
        model.layers[0] = nn.Sequential(layers[0])
        first.shared = model.layers[2]
        assert not watch.changed().stale
        for layer in layers:
            old = layer.qkv.weight
            layer.qkv.backup = old  # a path
            layer.qkv.weight = nn.Parameter(old.clone(), requires_grad=False)
        report = watch.changed()
        assert {found.problem for found in report.stale} == {"moved"}
        assert sum(found.pointers for found in report.stale) >= 3
        assert all(found.name.endswith("layers[*].qkv.weight") for found in report.stale)
        assert replay is not None


def test_a_module_whose_wrapper_is_dropped_is_live(backend: GraphBackend) -> None:
    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

    device = backend.device
    with torch.no_grad(), cgplan.watch() as watch:
        model = made(device)
        wrapper = Wrapper(model)
        replay = by_cgplan(model, device)
        assert not watch.baseline().stale
        wrapper.model, wrapper.renamed = nn.Identity(), model
        assert not watch.changed().stale
        del wrapper
        gc.collect()
        assert not watch.changed().stale
        assert replay is not None


def test_a_model_that_builds_modules_is_compiled(backend: GraphBackend) -> None:
    def forward(x: Tensor) -> Tensor:
        return nn.Identity()(x) + 1

    x = torch.zeros(2, device=backend.device)
    with torch.no_grad(), cgplan.watch():
        model = made(backend.device)
        compiled = torch.compile(forward, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), x + 1)
        del model
    torch._dynamo.reset()


STEP: dict[str, Tensor] = {}


def scaled_by_step(x: Tensor) -> Tensor:
    return x * STEP["scale"]


class InStep(nn.Module):
    """It reads what an engine sets for each step."""

    def forward(self, x: Tensor) -> Tensor:
        return scaled_by_step(x)


def test_what_an_engine_binds_for_each_step_is_not_stale(
    backend: GraphBackend, capture: Any
) -> None:
    device = backend.device
    static = {"scale": torch.full((64,), 2.0, device=device)}
    STEP.update(static)
    with torch.no_grad(), cgplan.watch() as watch:
        model = InStep()
        replay = capture(model, device)
        assert not watch.baseline().stale
        STEP["scale"] = torch.ones(64, device=device)
        assert not watch.changed().stale
        static.clear()
        gc.collect()
        assert {found.problem for found in watch.changed().stale} <= {"free block", "unmapped"}
        # reduce-overhead copies it into its own memory
        assert watch.changed().stale or capture is by_inductor
        STEP.clear()
        assert replay is not None


def test_graphs_that_are_gone_are_counted(backend: GraphBackend) -> None:
    with torch.no_grad(), cgplan.watch() as watch:
        replay = by_cgplan(made(backend.device), backend.device)
        del replay
        gc.collect()
        report = watch.check()
    assert (len(report.graphs), report.gone) == (0, 1)
    assert "1 graph captured and gone" in render_text(report)


def test_roots_give_the_paths_and_the_report_is_saved(backend: GraphBackend, tmp_path: Any) -> None:
    device = backend.device
    with torch.no_grad(), cgplan.watch() as watch:
        model = made(device)
        replay = by_cgplan(model, device)
        report = watch.check({"other": nn.Linear(2, 2)})
        assert not report.stale
        report = watch.check({"model": model})
        assert not report.stale
        assert "model.layers[0].qkv.weight" in {owner.name for owner in report.owners}
        path = tmp_path / "watch.json"
        path.write_text(report.model_dump_json())
        assert load_report(path) == report
        assert isinstance(replay, object)


def test_a_root_of_a_check_without_tensors_is_refused(backend: GraphBackend) -> None:
    with torch.no_grad(), cgplan.watch() as watch:
        model = made(backend.device)
        replay = by_cgplan(model, backend.device)
        with pytest.raises(ConfigError, match="the root 'cache' holds no tensor"):
            watch.check({"model": model, "cache": None})
        assert not watch.check({"model": model, "again": model}).stale
        assert replay is not None


def test_names_of_roots_need_not_be_text(backend: GraphBackend) -> None:
    numbered: Any = {1: made(backend.device)}
    with torch.no_grad(), cgplan.watch(numbered) as watch:
        replay = by_cgplan(numbered[1], backend.device)
        assert "1.scale" in {owner.name for owner in watch.check().owners}
        assert replay is not None


def test_roots_without_names_are_refused(backend: GraphBackend) -> None:
    with pytest.raises(ConfigError, match="the roots of a watch are a list"):
        cgplan.watch([made(backend.device)])  # type: ignore[arg-type]
    with cgplan.watch() as watch, pytest.raises(ConfigError, match="are a Model"):
        watch.check(made(backend.device))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "empty", [None, 3, "model", (value for value in nn.Linear(2, 2).parameters())]
)
def test_a_root_of_a_watch_without_tensors_is_refused(backend: GraphBackend, empty: Any) -> None:
    with pytest.raises(ConfigError, match="the root 'model' holds no tensor"):
        cgplan.watch({"other": [], "model": empty})
    with cgplan.watch() as watch, pytest.raises(ConfigError, match="'model' holds no tensor"):
        watch.check({"model": empty})


def test_a_closed_watch_is_not_entered_again(backend: GraphBackend) -> None:
    watch = cgplan.watch({"model": made(backend.device)})
    with watch:
        assert not watch.check().graphs
    with pytest.raises(CgplanError, match="the watch is closed"), watch:
        pass
    assert not watch.check().graphs


@pytest.mark.gpu
def test_a_graph_that_is_reset_behind_its_watch_is_forgotten() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    model = made(device)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), cgplan.watch() as watch:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(torch.zeros(4, 64, device=device))
    assert len(watch.check().graphs) == 1
    graph.reset()
    assert not watch.check().graphs


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_closed_runner_is_forgotten(backend: GraphBackend, is_closed: bool) -> None:
    with torch.no_grad(), cgplan.watch() as watch:
        model = made(backend.device)
        runner: GraphRunner = cgplan.capture(
            model,
            {"x": cgplan.Input(shape=("num_tokens", 64), dtype="float32", pad=0)},
            compilation={"cudagraph_capture_sizes": [4]},
            device=backend.device.type,
        )
        assert len(watch.check().graphs) == 1
        if is_closed:
            watch.close()
        runner.close()
        report = watch.check()
        assert not report.graphs
        assert not report.gone  # it was closed on purpose
        assert "No graph lives that the watch saw" in render_text(report)


# --- second captures ------------------------------------------------------------------------------


def capture_raw(backend: GraphBackend, call: Callable[[], object], pool: Any = None) -> Any:
    """A graph without a runner, in a pool of its own if none is given."""
    if not backend.is_tape:
        raw = torch.cuda.CUDAGraph()
        with torch.cuda.graph(raw, pool=pool):
            call()
        return raw
    graph = backend.new_graph(pool or backend.new_pool())
    with backend.session():
        backend.begin(graph)
        call()
        backend.end(graph)
    return graph


def pool_of(backend: GraphBackend, graph: Any) -> Any:
    return graph.pool if backend.is_tape else graph.pool()


def chain(model: Model, device: torch.device) -> Callable[[], object]:
    x = torch.zeros(4, 64, device=device)
    model(x)
    return lambda: model(x)


def test_two_captures_prove_pointers_into_the_pool(backend: GraphBackend) -> None:
    device = backend.device
    with torch.no_grad(), cgplan.watch() as watch:
        model = made(device)
        call = chain(model, device)
        workspaces = capture_raw(backend, call)  # of libraries lie in the first pool
        graph, twin = capture_raw(backend, call), capture_raw(backend, call)
        before = watch.check().graphs[1].kinds
        watch.prove(graph, twin)
        report = watch.check()
        kinds = report.graphs[1].kinds
        assert 0 < kinds["proven"] == before["graph pool"] - kinds.get("graph pool", 0)
        assert "disproven" not in kinds
        assert f"proven {kinds['proven']} " in " ".join(render_text(report).split())
        assert "proven" not in report.graphs[0].kinds
        del twin
        gc.collect()
        assert watch.check().graphs[1].kinds == kinds
        model.cache = torch.zeros_like(model.cache)
        assert "Model.cache" in stale(watch.check())
        assert workspaces is not graph


def test_memory_of_the_pool_that_both_captures_read_is_not_disproven(
    backend: GraphBackend,
) -> None:
    """A table that an earlier capture made, and that the model keeps."""
    tables = list[Tensor]()
    x = torch.ones(64, device=backend.device)

    def call() -> None:
        if not tables:
            tables.append(x * 2)
        outputs.append(tables[0] + x)

    outputs = list[Tensor]()
    with torch.no_grad(), cgplan.watch() as watch:
        x * 2 + x
        maker = capture_raw(backend, call)
        graph = capture_raw(backend, call, pool_of(backend, maker))
        twin = capture_raw(backend, call)
        watch.prove(graph, twin)
        kinds = watch.check().graphs[1].kinds
        assert kinds["proven"] == 1  # the output
        assert kinds["graph pool"] == 1  # the table
        assert "disproven" not in kinds


@pytest.mark.gpu
def test_an_integer_that_is_an_address_by_chance_is_disproven() -> None:
    backend = select_backend("cuda")
    x = torch.zeros(1 << 18, dtype=torch.int64, device=backend.device)
    chance = list[int]()

    def call() -> None:
        between = x * 3  # in its memory there is no output
        if not chance:
            chance.append(between.data_ptr() + 8)
        outputs.append(x + chance[0])

    outputs = list[Tensor]()
    with torch.no_grad(), cgplan.watch() as watch:
        x + (x * 3)[0]
        graph = capture_raw(backend, call)
        before = watch.check().graphs[0]
        twin = capture_raw(backend, call)
        watch.prove(graph, twin)
        after = watch.check().graphs[0]
        assert after.kinds["disproven"] == 1
        assert after.kinds["proven"] == before.kinds["graph pool"] - 1
        assert after.words == before.words
        graph.replay()
        assert outputs[0].eq(chance[0]).all()


def test_other_pairs_are_refused(backend: GraphBackend) -> None:
    device = backend.device
    x = torch.zeros(4, 64, device=device)
    with torch.no_grad():
        x.mul(2).add(1)
        before = capture_raw(backend, lambda: x.mul(2))
        with cgplan.watch() as watch:
            graph = capture_raw(backend, lambda: x.mul(2))
            other = capture_raw(backend, lambda: x.mul(2).add(1))
            same = capture_raw(backend, lambda: x.mul(2), pool_of(backend, graph))
            watch.prove(graph, capture_raw(backend, lambda: x.mul(2)))
            proven = watch.check().graphs[0].kinds
            with pytest.raises(ConfigError, match="graph 0 and graph 1 have different nodes"):
                watch.prove(graph, other)
            assert watch.check().graphs[0].kinds == proven, "what was proven stays"
            for twin, name in ((graph, "graph 0"), (same, "graph 2")):
                with pytest.raises(ConfigError, match=f"graph 0 and {name} are in one pool"):
                    watch.prove(graph, twin)
            for unseen in (before, nn.Identity(), None, set(), "graph 0"):
                with pytest.raises(ConfigError, match="the watch saw graph 0 of the two"):
                    watch.prove(graph, unseen)
                with pytest.raises(ConfigError, match="the watch saw none of the two"):
                    watch.prove(unseen, unseen)
            assert watch.check().graphs[0].kinds == proven
            alike = capture_raw(backend, lambda: x.mul(2))
        with pytest.raises(ConfigError, match="no proof: the watch is closed"):
            watch.prove(graph, alike)
