"""Models that are traced and split at operators: replays are right, and enter neither Dynamo nor the model's code."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
from checks import same
from torch import Tensor, nn

import cgplan
from cgplan import (
    AddressError,
    BatchDescriptor,
    CUDAGraphMode,
    GraphRunner,
    Input,
    InputError,
    forward_context,
)
from cgplan.backends import GraphBackend
from cgplan.backends.context import get_forward_context
from cgplan.piecewise import backend as splitter
from cgplan.piecewise.backend import PiecewiseBackend, cgplan_backend
from cgplan.piecewise.breakable import BreakableCUDAGraphCapture
from cgplan.piecewise.trace import PiecewiseModel

PIECEWISE = CUDAGraphMode.PIECEWISE
_LIBRARY = torch.library.Library("recorded", "FRAGMENT")
_LIBRARY.define("middle(Tensor x, Tensor scale) -> Tensor")
_LIBRARY.define("parts(Tensor x, SymInt rows) -> (Tensor, Tensor)")
_looks: list[Callable[[Tensor], None]] = []


def _middle(x: Tensor, scale: Tensor) -> Tensor:
    made = x * scale + 1
    for look in _looks:
        look(made)
    return made


def _parts(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    return x + rows, x.sum(-1)


for _name, _kernel in (("middle", _middle), ("parts", _parts)):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
torch.library.register_fake("recorded::middle", lambda x, scale: torch.empty_like(x), lib=_LIBRARY)
torch.library.register_fake(
    "recorded::parts", lambda x, rows: (torch.empty_like(x), x.new_empty(x.shape[0])), lib=_LIBRARY
)
_LIBRARY.define("plus_metadata(Tensor x) -> Tensor")
_LIBRARY.impl("plus_metadata", lambda x: x + get_forward_context().metadata["bias"], "CompositeExplicitAutograd")
torch.library.register_fake("recorded::plus_metadata", lambda x: torch.empty_like(x), lib=_LIBRARY)
_LIBRARY.define("put_(Tensor(a!) x, Tensor y) -> Tensor(a!)")
_LIBRARY.impl("put_", lambda x, y: x.add_(y), "CompositeExplicitAutograd")
torch.library.register_fake("recorded::put_", lambda x, y: x, lib=_LIBRARY)
_LIBRARY.define("into_(Tensor(a!) x, Tensor y) -> ()")
_LIBRARY.impl("into_", lambda x, y: x.add_(y) is None or None, "CompositeExplicitAutograd")
torch.library.register_fake("recorded::into_", lambda x, y: None, lib=_LIBRARY)
middle, parts = torch.ops.recorded.middle, torch.ops.recorded.parts


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    _looks.clear()


@contextmanager
def replays_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A block in which no trace and no model code may run."""
    with monkeypatch.context() as patch:
        patch.setattr(PiecewiseModel, "traced", lambda *_, **__: pytest.fail("Dynamo was entered"))
        patch.setattr(Model, "forward", lambda *_: pytest.fail("the model's code was run"))
        yield


class Model(nn.Module):
    """Three segments with eager operators between them; one of these returns two tensors and is given a size."""

    def __init__(self, backend: GraphBackend) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 3.0))
        self.to(backend.device)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.first(x)
        a, sums = parts(middle(h, self.scale).relu(), x.shape[0])
        y = self.last(a) + sums[:, None]
        return {"y": y + h, "sums": middle(y, self.scale), "again": y}


def open_runner(backend: GraphBackend, model: Callable[..., Any], **compilation: Any) -> GraphRunner:
    return cgplan.capture(
        model,
        {"x": Input(shape=("num_tokens", 4), dtype="float32", pad=0)},
        compilation={
            "cudagraph_mode": "PIECEWISE",
            "cudagraph_capture_sizes": [2, 4, 8, 16],
            "splitting_ops": ["recorded::middle", "recorded::parts"],
            "outputs": "clone",
            **compilation,
        },
        device=backend.device.type,
    )


def batch(backend: GraphBackend, rows: int) -> Tensor:
    return torch.randn(rows, 4, device=backend.device)


@pytest.mark.parametrize("policy", ["off", "first", "always"])
def test_a_replay_enters_neither_dynamo_nor_the_model(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    model = Model(backend).eval()
    choose = random.Random(0)
    with closing(open_runner(backend, model, address_check=policy)) as runner:
        for _ in range(50):
            x = batch(backend, choose.randint(1, 16))
            with replays_alone(monkeypatch):
                found = runner(x=x)
            same(found, runner.run_eagerly(x=x))
        assert not runner.stats.eager


def test_a_parameter_that_moved_is_found_outside_of_runners(backend: GraphBackend) -> None:
    model = Model(backend).eval()
    compiled = cgplan.compile_piecewise(
        model,
        {
            "inputs": {"x": {"shape": ["num_tokens", 4], "dtype": "float32", "pad": 0}},
            "compilation": {
                "cudagraph_mode": "PIECEWISE",
                "cudagraph_capture_sizes": [4],
                "splitting_ops": ["recorded::middle", "recorded::parts"],
                "address_check": "always",
            },
        },
        backend=backend,
    )
    x = batch(backend, 4)

    def call() -> Tensor:
        with torch.no_grad(), forward_context(PIECEWISE, BatchDescriptor(4)):
            return compiled(x=x)["y"].clone()  # type: ignore[no-any-return]

    with torch.no_grad():
        compiled(x=x)
        wanted = model(x)["y"]
    for _ in range(3):
        assert torch.equal(call(), wanted)
    there, model.last.weight.data = model.last.weight.data, model.last.weight.data.clone()
    with pytest.raises(AddressError, match=r"last\.weight"):
        call()
    model.last.weight.data = there
    assert torch.equal(call(), wanted)
    compiled.forget()


@pytest.mark.parametrize("policy", ["off", "first"])
def test_a_descriptor_of_other_rows_than_the_inputs_is_refused(backend: GraphBackend, policy: str) -> None:
    model = Model(backend).eval()
    compiled = compiled_by(backend, model, "recorded::middle", "recorded::parts", address_check=policy)
    x = batch(backend, 8)

    def call(rows: int, descriptor: BatchDescriptor, mode: CUDAGraphMode = PIECEWISE) -> Tensor:
        with torch.no_grad(), forward_context(mode, descriptor):
            return compiled(x=x[:rows])["y"].clone()  # type: ignore[no-any-return]

    with torch.no_grad():
        wanted = model(x)["y"]
    for _ in range(2):  # ahead of the capture, and of a replay
        for descriptor in (BatchDescriptor(8), BatchDescriptor(0), BatchDescriptor("4")):  # type: ignore[arg-type]
            with pytest.raises(InputError, match=r"a batch of num_tokens = 4, the forward context's descriptor says"):
                call(4, descriptor)
        assert torch.equal(call(8, BatchDescriptor(8, num_reqs=3)), wanted)  # no input counts requests
        assert torch.equal(call(8, BatchDescriptor(8)), wanted)
    with torch.no_grad():
        torch.testing.assert_close(call(4, BatchDescriptor(8), CUDAGraphMode.NONE), model(x[:4])["y"])  # no graph runs
    compiled.forget()


def test_a_descriptor_of_other_requests_than_the_inputs_is_refused(backend: GraphBackend) -> None:
    inputs = {
        "x": {"shape": ["num_reqs", 4], "dtype": "float32", "pad": 0},
        "starts": {"shape": ["num_reqs + 1"], "dtype": "int64", "pad": "last"},
    }
    compiled = cgplan.compile_piecewise(
        lambda x, starts: middle(x * 2, x) + starts[1:, None],
        {"inputs": inputs, "compilation": {"splitting_ops": ["recorded::middle"], "cudagraph_capture_sizes": [4, 8]}},
        backend=backend,
    )
    x, starts = batch(backend, 4), torch.arange(5, device=backend.device)
    with torch.no_grad():
        wanted = compiled(x=x, starts=starts).clone()
        for descriptor in (BatchDescriptor(8, 4), BatchDescriptor(8, None)):  # nothing counts tokens
            with forward_context(PIECEWISE, descriptor):
                assert torch.equal(compiled(x=x, starts=starts), wanted)
        with (
            forward_context(PIECEWISE, BatchDescriptor(8, 8)),
            pytest.raises(InputError, match="num_reqs = 4, the forward context's descriptor says 8"),
        ):
            compiled(x=x, starts=starts)
    compiled.forget()


def test_an_error_in_a_piece_passes_and_the_next_call_is_right(backend: GraphBackend) -> None:
    class Boom(Exception):
        pass

    def explode(_: Tensor) -> None:
        raise Boom

    with closing(open_runner(backend, Model(backend).eval())) as runner:
        x = batch(backend, 3)
        for _ in range(3):
            runner(x=x)
        _looks.append(explode)
        with pytest.raises(Boom):
            runner(x=x)
        _looks.clear()
        x = batch(backend, 4)
        assert torch.equal(runner(x=x)["y"], runner.run_eagerly(x=x)["y"])


def test_pieces_see_the_context_of_their_call(backend: GraphBackend) -> None:
    seen: list[Any] = []
    with closing(open_runner(backend, Model(backend).eval())) as runner:
        x = batch(backend, 4)
        runner(x=x), runner(x=x)
        _looks.append(lambda _: seen.append(cgplan.get_forward_context()))
        runner(x=x), runner(x=x)
    assert [c.runtime_mode for c in seen] == [PIECEWISE] * 4
    assert seen[0] is seen[1]
    assert seen[0] is not seen[2]
    assert seen[0].descriptor.num_tokens == 4


def test_metadata_that_moved_is_found_outside_of_runners_too(backend: GraphBackend) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.recorded.plus_metadata(middle(x * 2, x.new_ones(3))) * 2

    options = {"splitting_ops": ["recorded::middle"], "address_check": "always"}
    split = torch.compile(model, backend=cgplan_backend, options=options, dynamic=True)
    x, bias = torch.zeros(4, 3, device=backend.device), torch.ones(3, device=backend.device)
    with torch.no_grad():
        with forward_context(CUDAGraphMode.NONE, BatchDescriptor(4), {"bias": bias}):
            split(x)
        for _ in range(4):
            with forward_context(PIECEWISE, BatchDescriptor(4), {"bias": bias}):
                split(x)
        moved = bias.clone()
        with forward_context(PIECEWISE, BatchDescriptor(4), {"bias": moved}), pytest.raises(AddressError):
            split(x)


def test_a_call_with_gradients_is_captured_by_a_trace_of_its_own(backend: GraphBackend) -> None:
    model = Model(backend).eval()
    options = {"splitting_ops": ["recorded::middle", "recorded::parts"]}
    split = torch.compile(model, backend=cgplan_backend, options=options, dynamic=True)
    x = batch(backend, 4)
    wanted = model(x)["y"].detach()
    for grad in (False, True, False, True):
        with torch.set_grad_enabled(grad):
            split(x)
            with forward_context(PIECEWISE, BatchDescriptor(4)):
                torch.testing.assert_close(split(x)["y"].detach(), wanted)


def test_pieces_run_in_the_grad_mode_that_the_model_sets(backend: GraphBackend) -> None:
    class Switches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = x * 2
            with torch.enable_grad():
                h = middle(h, h)
            return h * 2

    with closing(open_runner(backend, Switches().eval(), splitting_ops=["recorded::middle"])) as runner:
        x = batch(backend, 4)
        for _ in range(3):
            assert torch.equal(runner(x=x), runner.run_eagerly(x=x))


def test_debug_mode_compares_replays(backend: GraphBackend) -> None:
    with closing(open_runner(backend, Model(backend).eval(), debug=True)) as runner:
        x = batch(backend, 4)
        wanted = runner.run_eagerly(x=x)["y"].clone()
        for _ in range(3):
            assert torch.equal(runner(x=x)["y"], wanted)


@pytest.mark.parametrize("way", ["ops", "modules"])
def test_the_report_counts_the_nodes_of_each_segment(backend: GraphBackend, way: str) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.Softmax(-1)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.attend(x * 2 + 1)
            return x * 3

    split: dict[str, Any] = {"splitting_ops": ["aten::softmax"], "splitting_modules": []}
    if way == "modules":
        split = {"splitting_modules": ["attend"], "splitting_ops": None}
    with closing(open_runner(backend, Layers().eval(), **split)) as runner:
        record = runner.report.records[0]
        nodes = record.segment_nodes
        assert record.graphs == 4
        assert len(nodes) == 4
        assert nodes[0] == nodes[1] == nodes[2] > nodes[3] > 0
        assert sum(nodes) == record.nodes
        shown = str(runner.report)
    kind = "operators" if backend.device.type == "cpu" else "nodes"
    assert f"{kind} each" in shown
    assert f"{nodes[0]} x3, {nodes[3]} (num_tokens 16)" in shown


# --- results that are handed through ----------------------------------------------------------------------------

put_, into_ = torch.ops.recorded.put_, torch.ops.recorded.into_


class Steps(nn.Module):
    """Whatever is done with an input and a scale."""

    def __init__(self, backend: GraphBackend, steps: Callable[..., Any]) -> None:
        super().__init__()
        self.steps = steps
        self.register_buffer("scale", torch.full((4,), 3.0, device=backend.device))

    def forward(self, x: Tensor) -> Any:
        return self.steps(x, self.scale)


def compiled_by(backend: GraphBackend, model: nn.Module, *splitting_ops: str, **compilation: Any) -> Any:
    config = {
        "inputs": {"x": {"shape": ["num_tokens", 4], "dtype": "float32", "pad": 0}},
        "compilation": {
            "cudagraph_mode": "PIECEWISE",
            "cudagraph_capture_sizes": [4, 8],
            "splitting_ops": splitting_ops,
            **compilation,
        },
    }
    return cgplan.compile_piecewise(model, config, backend=backend)


def handed_through(x: Tensor, scale: Tensor) -> Tensor:
    made, later = middle(x, scale), x * 2
    return put_(made, later) * 5


def handed_through_twice(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    made, later = middle(x, scale), x * 2
    again = put_(made, later)
    last = put_(again, again * 5)
    return last + 1, made, again


def one_of_several_handed_through(x: Tensor, scale: Tensor) -> Tensor:
    made, sums = parts(x, 3)
    kept = middle(x * 2, scale)
    return put_(made, kept * 2) + put_(sums, kept.sum(-1))[:, None] * kept


def writes_where_a_view_was_made(x: Tensor, scale: Tensor) -> Tensor:
    made, later = middle(x, scale), x * 2
    view = made.view(-1)
    into_(made, later + view.sum())
    return view * 2


def writes_into_a_view(x: Tensor, scale: Tensor) -> Tensor:
    made, later = middle(x, scale), x * 2
    into_(made.view(-1), later.view(-1))
    return made * 2


def writes_between(x: Tensor, scale: Tensor) -> Tensor:
    made, later = middle(x, scale), x * 2
    view = made.view(-1) + later.view(-1).mean()
    into_(made, later)
    made.mul_(2)
    return made * view.view_as(x)


def writes_into_a_view_of_a_segments(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    made = x * 2
    half = made[:, :2]
    half.add_(middle(made, scale)[:, :2])
    return made, half + 1


@pytest.mark.parametrize(
    "steps",
    [
        handed_through,
        handed_through_twice,
        one_of_several_handed_through,
        writes_where_a_view_was_made,
        writes_into_a_view,
        writes_between,
        writes_into_a_view_of_a_segments,
    ],
)
def test_results_that_are_handed_on_and_written_to(backend: GraphBackend, steps: Callable[..., Any]) -> None:
    """What an eager piece returns lies elsewhere on each call."""
    model = Steps(backend, steps)
    used = [f"recorded::{n}" for n in ("middle", "parts", "put_", "into_") if n in steps.__code__.co_names]
    compiled, held = compiled_by(backend, model, *used), []
    inputs = {rows: batch(backend, rows) for rows in (4, 8)}
    with torch.no_grad():
        for _ in range(4):
            for rows, x in inputs.items():
                wanted = model(x.copy_(batch(backend, rows)).clone())
                with forward_context(PIECEWISE, BatchDescriptor(rows)):
                    same(compiled(x=x), wanted)
                held.append(batch(backend, rows))  # so that the allocator gives other memory next time
    compiled.forget()


def into_its_own(x: Tensor, scale: Tensor) -> tuple[Tensor, int]:
    return put_(x * 2, x), 3


def into_a_view_of_the_input(x: Tensor, scale: Tensor) -> tuple[Tensor, int]:
    made = x * 2
    return put_(x.t(), made.t()), 3


@pytest.mark.parametrize("change", ["t_", "unsqueeze_", "requires_grad_"])
@pytest.mark.parametrize("steps", [into_its_own, into_a_view_of_the_input])
def test_a_segments_output_that_the_last_piece_hands_through_may_be_changed_in_place(
    backend: GraphBackend, steps: Callable[..., Any], change: str
) -> None:
    """The last operator writes into what a segment made and returns it; what becomes of that object is the caller's."""
    model = Steps(backend, steps)
    compiled = compiled_by(backend, model, "recorded::put_")
    x = batch(backend, 4)
    for _ in range(4):
        wanted = model(x.copy_(batch(backend, 4)).clone())
        with torch.no_grad(), forward_context(PIECEWISE, BatchDescriptor(4)):
            found = compiled(x=x)
        same(found, wanted)
        found[0].unsqueeze_(0) if change == "unsqueeze_" else getattr(found[0], change)()
    compiled.forget()


# --- models that are dropped -------------------------------------------------------------------------------------


def scaled_and_doubled(x: Tensor, scale: Tensor) -> Tensor:
    return middle(x + 1, scale) * 2


def captured_by(backend: GraphBackend, model: nn.Module) -> Any:
    compiled = compiled_by(backend, model, "recorded::middle")
    x = batch(backend, 8)
    with torch.no_grad():
        wanted = model(x)
        same(compiled(x=x), wanted)
        for _ in range(3):
            with forward_context(PIECEWISE, BatchDescriptor(8)):
                same(compiled(x=x), wanted)
    return compiled


def what_is_left() -> dict[type, int]:
    """Live objects of what a trace consists of, and tensors; those of torch's own caches are fake ones."""
    for _ in range(2):  # what a finalizer lets go is garbage for the next collection
        gc.collect()
    found = [type(each) for each in gc.get_objects()]
    return {kind: found.count(kind) for kind in (Tensor, PiecewiseModel, BreakableCUDAGraphCapture, PiecewiseBackend)}


@pytest.mark.parametrize("how", ["captured", "never called", "forgotten", "held by the model"])
def test_a_compiled_model_that_is_dropped_leaves_nothing_behind(backend: GraphBackend, how: str) -> None:
    """Dynamo's caches, which no collector sees, held its wrappers with their graphs and tensors."""

    def drop() -> weakref.ref[Any]:
        model: Any = Steps(backend, scaled_and_doubled)
        if how == "never called":
            compiled = compiled_by(backend, model, "recorded::middle")
        else:
            compiled = captured_by(backend, model)
        if how == "forgotten":
            compiled.forget()
        elif how == "held by the model":
            model.compiled = compiled
        return weakref.ref(model)

    def registered() -> int:
        return sum(found is not None for found in torch._dynamo.eval_frame.cached_backends.values())

    before = what_is_left(), registered()
    gone = [drop() for _ in range(2)]
    assert (what_is_left(), registered()) == before
    assert [each() for each in gone] == [None, None]


@pytest.mark.parametrize("during", ["trace", "replay"])
def test_a_compiled_model_may_be_dropped_anywhere(
    backend: GraphBackend, during: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector runs in whatever allocates, and may find one there."""
    kept = [captured_by(backend, Steps(backend, scaled_and_doubled))]
    gone = weakref.ref(kept[0])
    split = splitter.split_graph
    model = Steps(backend, scaled_and_doubled)

    def drop(*_: Any) -> None:
        kept.clear()
        gc.collect()

    if during == "trace":
        monkeypatch.setattr(splitter, "split_graph", lambda *given: (drop(), split(*given))[1])
        captured_by(backend, model)
    else:
        compiled = captured_by(backend, model)
        _looks.append(drop)
        with torch.no_grad(), forward_context(PIECEWISE, BatchDescriptor(8)):
            compiled(x=batch(backend, 8))
    assert not kept
    gc.collect()
    assert gone() is None
