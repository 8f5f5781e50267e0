"""The recorded way through a traced model's segments: really taken, and as right and as safe as the wrappers' way."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from checks import same
from torch import Tensor, nn

import cgplan
from cgplan import (
    AddressError,
    BatchDescriptor,
    CaptureError,
    CUDAGraphMode,
    GraphRunner,
    Input,
    InputError,
    forward_context,
)
from cgplan.backends import GraphBackend
from cgplan.backends.context import current_forward_context, get_forward_context
from cgplan.piecewise.backend import PiecewiseBackend, cgplan_backend
from cgplan.piecewise.segments import SegmentWrapper, SplitForward

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


@pytest.fixture
def wrapper_calls(monkeypatch: pytest.MonkeyPatch) -> list[BatchDescriptor]:
    """The keys that wrappers are called for."""
    calls: list[BatchDescriptor] = []
    call = SegmentWrapper.__call__

    def counted(self: SegmentWrapper, *args: Any) -> Any:
        context = current_forward_context()
        if context is not None and context.runtime_mode is PIECEWISE:
            calls.append(context.descriptor)
        return call(self, *args)

    monkeypatch.setattr(SegmentWrapper, "__call__", counted)
    return calls


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


def forward_of(runner: GraphRunner) -> SplitForward:
    """The one split forward that a runner's wrappers belong to."""
    found = [f for f in gc.get_objects() if type(f) is SplitForward]
    (forward,) = [f for f in found if any(r.scope is runner._graphed.scope for r in f.recorded.values())]
    return forward


@pytest.mark.parametrize("policy", ["off", "first", "always"])
def test_after_its_first_replay_a_key_takes_the_recorded_way(
    backend: GraphBackend, wrapper_calls: list[BatchDescriptor], policy: str
) -> None:
    model = Model(backend).eval()
    choose = random.Random(0)
    with closing(open_runner(backend, model, address_check=policy)) as runner:
        for rows in (2, 4, 8, 16):  # the first replay checks, by the wrappers
            runner(x=batch(backend, rows))
        assert wrapper_calls
        wrapper_calls.clear()
        for _ in range(100):
            x = batch(backend, choose.randint(1, 16))
            found, wanted = runner(x=x), runner.run_eagerly(x=x)
            assert found.keys() == wanted.keys()
            for name in found:
                assert torch.equal(found[name], wanted[name])
        assert wrapper_calls == []


def test_what_eager_pieces_read_is_read_anew(backend: GraphBackend, wrapper_calls: list[BatchDescriptor]) -> None:
    """A buffer that only eager pieces read may be another tensor on each call."""
    model = Model(backend).eval()
    with closing(open_runner(backend, model, address_check="off")) as runner:
        x = batch(backend, 4)
        for scale in (3.0, 5.0, 7.0, -1.0):
            model.scale = torch.full((4,), scale, device=backend.device)
            assert torch.equal(runner(x=x)["y"], runner.run_eagerly(x=x)["y"])
        assert len(wrapper_calls) == 3 * 4 + 3, "three segments at each of four captures and once more"


def test_a_parameter_that_moved_is_found_on_the_recorded_way(
    backend: GraphBackend, wrapper_calls: list[BatchDescriptor]
) -> None:
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
    wrapper_calls.clear()
    assert torch.equal(call(), wanted)
    assert wrapper_calls == []
    there, model.last.weight.data = model.last.weight.data, model.last.weight.data.clone()
    with pytest.raises(AddressError, match="1 changed"):
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
    for _ in range(3):  # ahead of the trace, of the capture, of a recorded replay
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


def test_pieces_see_the_context_of_their_call(backend: GraphBackend, wrapper_calls: list[BatchDescriptor]) -> None:
    seen: list[Any] = []
    with closing(open_runner(backend, Model(backend).eval())) as runner:
        x = batch(backend, 4)
        runner(x=x), runner(x=x)
        wrapper_calls.clear()
        _looks.append(lambda _: seen.append(cgplan.get_forward_context()))
        runner(x=x), runner(x=x)
    assert wrapper_calls == []
    assert [c.runtime_mode for c in seen] == [PIECEWISE] * 4
    assert seen[0] is seen[1]
    assert seen[0] is not seen[2]
    assert seen[0].descriptor.num_tokens == 4


def test_results_of_pieces_are_freed_as_soon_as_nobody_reads_them(backend: GraphBackend) -> None:
    """As in the code that torch.fx makes: of a chain of pieces not all results are alive at once."""
    alive: list[int] = []
    results: list[Any] = []

    def look(made: Tensor) -> None:
        alive.append(sum(r() is not None for r in results))
        results.append(weakref.ref(made))

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4, device=backend.device))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(4):
                x = middle(x, self.scale) * 2
            return x

    with closing(open_runner(backend, Chain().eval(), splitting_ops=["recorded::middle"])) as runner:
        x = batch(backend, 4)
        runner(x=x), runner(x=x)
        _looks.append(look)
        runner(x=x)
    assert alive == [0, 0, 0, 0]


def test_capturing_again_and_closing_drop_what_was_recorded(
    backend: GraphBackend, wrapper_calls: list[BatchDescriptor]
) -> None:
    runner = open_runner(backend, Model(backend).eval())
    x = batch(backend, 4)
    for _ in range(2):
        runner(x=x), runner(x=x)
        forward = forward_of(runner)
        assert list(forward.recorded) == [BatchDescriptor(4)]
        runner.invalidate("scale")
        with pytest.raises(AddressError, match="'scale' moved"):
            runner(x=x)
        runner.recapture()
        assert forward.recorded == {}
        wrapper_calls.clear()
        assert torch.equal(runner(x=x)["y"], runner.run_eagerly(x=x)["y"])
        assert len(wrapper_calls) == 3
    runner.close()


def test_metadata_that_moved_is_found_outside_of_runners_too(backend: GraphBackend) -> None:
    """Also once the key is recorded."""

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


def test_with_gradients_the_wrappers_answer(backend: GraphBackend, wrapper_calls: list[BatchDescriptor]) -> None:
    model = Model(backend).eval()
    split = torch.compile(
        model, backend=cgplan_backend, options={"splitting_ops": ["recorded::middle", "recorded::parts"]}, dynamic=True
    )
    x = batch(backend, 4)
    with torch.no_grad():
        wanted = model(x)["y"]
        split(x)
        for _ in range(3):
            with forward_context(PIECEWISE, BatchDescriptor(4)):
                assert torch.equal(split(x)["y"], wanted)
    wrapper_calls.clear()
    split(x)  # a trace of its own: Dynamo guards the grad mode
    with forward_context(PIECEWISE, BatchDescriptor(4)):
        found = split(x)["y"]
    assert torch.allclose(found, wanted)
    assert len(wrapper_calls) == 3


def test_a_piece_that_changes_the_grad_mode_is_not_recorded(
    backend: GraphBackend, wrapper_calls: list[BatchDescriptor]
) -> None:
    class Switches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = x * 2
            with torch.enable_grad():
                h = middle(h, h)
            return h * 2

    with closing(open_runner(backend, Switches().eval(), splitting_ops=["recorded::middle"])) as runner:
        x = batch(backend, 4)
        for _ in range(3):
            wrapper_calls.clear()
            assert torch.equal(runner(x=x), runner.run_eagerly(x=x))
            assert wrapper_calls


def test_debug_mode_takes_the_recorded_way_too(backend: GraphBackend, wrapper_calls: list[BatchDescriptor]) -> None:
    with closing(open_runner(backend, Model(backend).eval(), debug=True)) as runner:
        x = batch(backend, 4)
        wanted = runner.run_eagerly(x=x)["y"].clone()
        for _ in range(2):
            assert torch.equal(runner(x=x)["y"], wanted)
        wrapper_calls.clear()
        assert torch.equal(runner(x=x)["y"], wanted)
        assert wrapper_calls == []


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


@pytest.mark.parametrize("steps", [handed_through, handed_through_twice, one_of_several_handed_through])
@pytest.mark.parametrize("policy", ["off", "first", "always"])
def test_a_fresh_result_that_another_piece_hands_through_is_copied_again(
    backend: GraphBackend, steps: Callable[..., Any], policy: str
) -> None:
    """It lies elsewhere on each call, although the piece that returns it was given it."""
    model = Steps(backend, steps)
    used = [f"recorded::{n}" for n in ("middle", "parts", "put_") if n in steps.__code__.co_names]
    compiled, held = compiled_by(backend, model, *used, address_check=policy), []
    inputs = {rows: batch(backend, rows) for rows in (4, 8)}
    with torch.no_grad():
        compiled(x=inputs[8])
        for _ in range(5):
            for rows, x in inputs.items():
                wanted = model(x.copy_(batch(backend, rows)).clone())
                with forward_context(PIECEWISE, BatchDescriptor(rows)):
                    same(compiled(x=x), wanted)
                held.append(batch(backend, rows))  # so that the allocator gives other memory next time
    compiled.forget()


def writes_where_a_view_was_made(x: Tensor, scale: Tensor) -> Tensor:
    made, later = middle(x, scale), x * 2
    view = made.view(-1)
    into_(made, later + view.sum())
    return view * 2


def writes_into_a_view(x: Tensor, scale: Tensor) -> Tensor:
    made, later = middle(x, scale), x * 2
    into_(made.view(-1), later.view(-1))
    return made * 2


@pytest.mark.parametrize("steps", [writes_where_a_view_was_made, writes_into_a_view])
def test_a_write_that_would_reach_one_copy_of_a_fresh_result_only_is_refused(
    backend: GraphBackend, steps: Callable[..., Any]
) -> None:
    compiled = compiled_by(backend, Steps(backend, steps), "recorded::middle", "recorded::into_")
    with torch.no_grad(), pytest.raises(CaptureError, match=r"writes into what an eager piece returned: .*into_, at "):
        compiled(x=batch(backend, 4))


def test_writes_into_the_one_copy_that_is_read_are_right(backend: GraphBackend) -> None:
    def steps(x: Tensor, scale: Tensor) -> Tensor:
        made, later = middle(x, scale), x * 2
        view = made.view(-1) + later.view(-1).mean()
        into_(made, later)  # the view that the segment has made is not read any more
        return made * view.view_as(x)

    model = Steps(backend, steps)
    compiled = compiled_by(backend, model, "recorded::middle", "recorded::into_")
    x = batch(backend, 4)
    with torch.no_grad():
        compiled(x=x)
        for _ in range(5):
            wanted = model(x.copy_(batch(backend, 4)).clone())
            with forward_context(PIECEWISE, BatchDescriptor(4)):
                same(compiled(x=x), wanted)
    compiled.forget()


def into_its_own(x: Tensor, scale: Tensor) -> tuple[Tensor, int]:
    return put_(x * 2, x), 3


def into_a_view_of_the_input(x: Tensor, scale: Tensor) -> tuple[Tensor, int]:
    made = x * 2
    return put_(x.t(), made.t()), 3


@pytest.mark.parametrize("change", ["t_", "unsqueeze_", "requires_grad_"])
@pytest.mark.parametrize("steps", [into_its_own, into_a_view_of_the_input])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_segments_output_that_the_last_piece_hands_through_may_be_changed_in_place(
    backend: GraphBackend,
    wrapper_calls: list[BatchDescriptor],
    steps: Callable[..., Any],
    change: str,
    recorded: bool,
) -> None:
    """The last operator writes into what a segment made and returns it; what becomes of that object is the caller's."""
    model = Steps(backend, steps)
    compiled = compiled_by(backend, model, "recorded::put_")
    x = batch(backend, 4)
    with torch.set_grad_enabled(not recorded):
        compiled(x=x)
    for count in range(5):
        wrapper_calls.clear()
        wanted = model(x.copy_(batch(backend, 4)).clone())
        with torch.set_grad_enabled(not recorded), forward_context(PIECEWISE, BatchDescriptor(4)):
            found = compiled(x=x)
        assert (wrapper_calls == []) is (recorded and count > 1)
        same(found, wanted)
        found[0].unsqueeze_(0) if change == "unsqueeze_" else getattr(found[0], change)()
    compiled.forget()


def test_the_call_that_captures_writes_once(backend: GraphBackend) -> None:
    """Outside of a session a segment is warmed up on real values: what it writes of other pieces counts once."""

    def steps(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        made = x * 2
        half = made[:, :2]
        half.add_(middle(made, scale)[:, :2])
        return made, half + 1

    model = Steps(backend, steps)
    compiled = compiled_by(backend, model, "recorded::middle")
    with torch.no_grad():
        compiled(x=batch(backend, 8))
        for rows in (4, 8):
            x = batch(backend, rows)
            for _ in range(3):
                wanted = model(x.copy_(batch(backend, rows)).clone())
                with forward_context(PIECEWISE, BatchDescriptor(rows)):
                    same(compiled(x=x), wanted)
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
    return {kind: found.count(kind) for kind in (Tensor, SegmentWrapper, SplitForward, PiecewiseBackend)}


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


@pytest.mark.parametrize("during", ["trace", "capture", "replay"])
def test_a_compiled_model_may_be_dropped_anywhere(
    backend: GraphBackend, during: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector runs in whatever allocates, and may find one there."""
    kept = [captured_by(backend, Steps(backend, scaled_and_doubled))]
    gone = weakref.ref(kept[0].backend)
    split = backend.split_graph
    model = Steps(backend, scaled_and_doubled)

    def drop(*_: Any) -> None:
        kept.clear()
        gc.collect()

    if during == "trace":
        monkeypatch.setattr(backend, "split_graph", lambda *given: (drop(), split(*given))[1])
        captured_by(backend, model)
    elif during == "replay":
        compiled = captured_by(backend, model)
        _looks.append(drop)
        with torch.no_grad(), forward_context(PIECEWISE, BatchDescriptor(8)):
            x = batch(backend, 8)
            compiled(x=x)
    else:

        def forward(x: Tensor) -> Tensor:
            if backend.is_capturing():
                drop()
            return x * 2

        wrapper, x = cgplan.CUDAGraphWrapper(forward, CUDAGraphMode.FULL, backend=backend), batch(backend, 3)
        gc.collect()  # graphs of other tests
        for _ in range(2):
            with forward_context(CUDAGraphMode.FULL, BatchDescriptor(3)):
                same(wrapper(x), x * 2)
        assert gone() is not None, "to free graphs now would make the capture invalid"
        compiled_by(backend, model, "recorded::middle")
    assert not kept
    gc.collect()
    assert gone() is None
