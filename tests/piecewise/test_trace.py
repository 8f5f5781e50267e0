"""Models that are traced and split at operators: replays are right, and enter neither Dynamo nor the model's code. Splitting a traced forward at operators: where the graph is cut. Inductor: segments that it compiles."""

from __future__ import annotations

import copy
import gc
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import decoder
import pytest
import torch
import torch.nn.functional as F
from checks import same
from pieces import Attends, open_runner, randn
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import cgplan
from cgplan import (
    AddressError,
    BatchDescriptor,
    BreakableCUDAGraphCapture,
    CaptureError,
    CaptureSession,
    ConfigError,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GraphRunner,
    HostSyncError,
    Input,
    InputError,
    ModelError,
    NumbersError,
    build_plan,
    forward_context,
)
from cgplan.backends import GraphBackend, select_backend
from cgplan.config import CompilationConfig, validate_config
from cgplan.piecewise.trace import Piece, PiecewiseBackend, PiecewiseModel

PIECEWISE = CUDAGraphMode.PIECEWISE
ATTENTION = "aten::scaled_dot_product_attention"


_LIBRARY = torch.library.Library("recorded", "FRAGMENT")


_LIBRARY.define("middle(Tensor x, Tensor scale) -> Tensor")
_LIBRARY.define("parts(Tensor x, SymInt rows) -> (Tensor, Tensor)")
_LIBRARY.define("put_(Tensor(a!) x, Tensor y) -> Tensor(a!)")
_LIBRARY.impl("put_", lambda x, y: x.add_(y), "CompositeExplicitAutograd")
torch.library.register_fake("recorded::put_", lambda x, y: x, lib=_LIBRARY)
_LIBRARY.define("into_(Tensor(a!) x, Tensor y) -> ()")
_LIBRARY.impl("into_", lambda x, y: x.add_(y) is None or None, "CompositeExplicitAutograd")
torch.library.register_fake("recorded::into_", lambda x, y: None, lib=_LIBRARY)


_LIBRARY.impl("middle", lambda x, scale: x * scale + 1, "CompositeExplicitAutograd")
_LIBRARY.impl("parts", lambda x, rows: (x + rows, x.sum(-1)), "CompositeExplicitAutograd")


middle, parts = torch.ops.recorded.middle, torch.ops.recorded.parts


put_, into_ = torch.ops.recorded.put_, torch.ops.recorded.into_


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


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


def open_model(backend: GraphBackend, model: Callable[..., Any], **compilation: Any) -> GraphRunner:
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


def rows_of(backend: GraphBackend, rows: int) -> Tensor:
    return torch.randn(rows, 4, device=backend.device)


@pytest.mark.parametrize("policy", ["off", "always"])
def test_a_replay_enters_neither_dynamo_nor_the_model(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    model = Model(backend).eval()
    choose = random.Random(0)
    with closing(open_model(backend, model, address_check=policy, verify="off")) as runner:
        for _ in range(50):
            x = rows_of(backend, choose.randint(1, 16))
            with replays_alone(monkeypatch):
                found = runner(x=x)
            same(found, runner.run_eagerly(x=x))
        assert not runner.stats.eager


def test_a_copy_of_a_compiled_model_has_captured_nothing(backend: GraphBackend) -> None:
    compiled = compiled_by(backend, Model(backend).eval(), "recorded::middle", "recorded::parts")
    x = rows_of(backend, 4)
    with torch.no_grad(), forward_context(PIECEWISE, BatchDescriptor(4)):
        wanted = compiled(x=x)["y"].clone()
        copied = copy.deepcopy(compiled)
        assert not copied.entries
        with torch.no_grad():
            copied.unwrap().first.weight.zero_()
        for _ in range(2):
            same(copied(x=x)["y"], copied.unwrap()(x)["y"])
            same(compiled(x=x)["y"], wanted)


def test_a_parameter_that_moved_is_found_outside_of_runners(backend: GraphBackend) -> None:
    model = Model(backend).eval()
    compiled = compiled_by(
        backend, model, "recorded::middle", "recorded::parts", address_check="always"
    )
    x = rows_of(backend, 4)

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
    compiled.reset()


def test_a_descriptor_of_other_rows_than_the_inputs_is_refused(backend: GraphBackend) -> None:
    model = Model(backend).eval()
    compiled = compiled_by(backend, model, "recorded::middle", "recorded::parts")
    x = rows_of(backend, 8)

    def call(rows: int, descriptor: BatchDescriptor, mode: CUDAGraphMode = PIECEWISE) -> Tensor:
        with torch.no_grad(), forward_context(mode, descriptor):
            return compiled(x=x[:rows])["y"].clone()  # type: ignore[no-any-return]

    with torch.no_grad():
        wanted = model(x)["y"]
    for _ in range(2):  # ahead of the capture, and of a replay
        for descriptor in (BatchDescriptor(8), BatchDescriptor(0), BatchDescriptor("4")):  # type: ignore[arg-type]
            with pytest.raises(
                InputError,
                match=r"a batch of num_tokens = 4, the forward context's descriptor says",
            ):
                call(4, descriptor)
        assert torch.equal(
            call(8, BatchDescriptor(8, num_reqs=3)), wanted
        )  # no input counts requests
        assert torch.equal(call(8, BatchDescriptor(8)), wanted)
    with torch.no_grad():
        torch.testing.assert_close(
            call(4, BatchDescriptor(8), CUDAGraphMode.NONE), model(x[:4])["y"]
        )  # no graph runs
    compiled.reset()


def test_a_call_with_gradients_is_captured_by_a_trace_of_its_own(backend: GraphBackend) -> None:
    model = Model(backend).eval()
    split = compiled_by(backend, model, "recorded::middle", "recorded::parts")
    x = rows_of(backend, 4)
    wanted = model(x)["y"].detach()
    for grad in (False, True, False, True):
        split.reset()
        for _ in range(2):
            with torch.set_grad_enabled(grad), forward_context(PIECEWISE, BatchDescriptor(4)):
                torch.testing.assert_close(split(x=x)["y"].detach(), wanted)


def test_the_report_counts_the_nodes_of_each_segment(backend: GraphBackend) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = nn.Softmax(-1)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.attend(x * 2 + 1)
            return x * 3

    with closing(open_model(backend, Layers().eval(), splitting_ops=["aten::softmax"])) as runner:
        record = runner.report.records[0]
        nodes = record.segment_nodes
        assert record.graphs == 4
        assert len(nodes) == 4
        assert nodes[0] == nodes[1] == nodes[2] > nodes[3] > 0
        assert sum(nodes) == record.nodes


class Steps(nn.Module):
    """Whatever is done with an input and a scale."""

    def __init__(self, backend: GraphBackend, steps: Callable[..., Any]) -> None:
        super().__init__()
        self.steps = steps
        self.register_buffer("scale", torch.full((4,), 3.0, device=backend.device))

    def forward(self, x: Tensor) -> Any:
        return self.steps(x, self.scale)


def compiled_by(
    backend: GraphBackend, model: nn.Module, *splitting_ops: str, **compilation: Any
) -> Any:
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


def handed_through_twice(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    made, later = middle(x, scale), x * 2
    again = put_(made, later)
    last = put_(again, again * 5)
    return last + 1, made, again


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
        handed_through_twice,
        writes_between,
        writes_into_a_view_of_a_segments,
    ],
)
def test_results_that_are_handed_on_and_written_to(
    backend: GraphBackend, steps: Callable[..., Any]
) -> None:
    """What an eager piece returns lies elsewhere on each call."""
    model = Steps(backend, steps)
    used = [
        f"recorded::{n}"
        for n in ("middle", "parts", "put_", "into_")
        if n in steps.__code__.co_names
    ]
    compiled, held = compiled_by(backend, model, *used), []
    inputs = {rows: rows_of(backend, rows) for rows in (4, 8)}
    with torch.no_grad():
        for _ in range(4):
            for rows, x in inputs.items():
                wanted = model(x.copy_(rows_of(backend, rows)).clone())
                with forward_context(PIECEWISE, BatchDescriptor(rows)):
                    same(compiled(x=x), wanted)
                held.append(
                    rows_of(backend, rows)
                )  # so that the allocator gives other memory next time
    compiled.reset()


def scaled_and_doubled(x: Tensor, scale: Tensor) -> Tensor:
    return middle(x + 1, scale) * 2


def captured_by(backend: GraphBackend, model: nn.Module) -> Any:
    compiled = compiled_by(backend, model, "recorded::middle")
    x = rows_of(backend, 8)
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
    return {
        kind: found.count(kind)
        for kind in (Tensor, PiecewiseModel, BreakableCUDAGraphCapture, PiecewiseBackend)
    }


def test_a_compiled_model_that_is_dropped_leaves_nothing_behind(backend: GraphBackend) -> None:
    """Dynamo's caches, which no collector sees, held its wrappers with their graphs and tensors."""

    def drop(*, held_by_model: bool) -> weakref.ref[Any]:
        model: Any = Steps(backend, scaled_and_doubled)
        compiled = captured_by(backend, model)
        if held_by_model:
            model.compiled = compiled
        return weakref.ref(model)

    def registered() -> int:
        return sum(found is not None for found in torch._dynamo.eval_frame.cached_backends.values())

    before = what_is_left(), registered()
    gone = [drop(held_by_model=False), drop(held_by_model=True)]
    assert (what_is_left(), registered()) == before
    assert [each() for each in gone] == [None, None]


# --- whole models ---


@pytest.mark.parametrize(
    ("branch", "traces"),
    [
        (lambda rows: rows > 4, 3),
        (lambda rows: rows == 1, 2),
        (lambda rows: 3 <= rows <= 5, 4),
    ],
)
def test_a_model_that_branches_on_the_number_of_rows_is_captured_right(
    backend: GraphBackend, branch: Callable[[int], bool], traces: int
) -> None:
    """Each key holds what the trace for its size launched; a padded batch runs what its key was captured with."""

    def model(x: Tensor) -> Tensor:
        return x.softmax(-1) * 2 if branch(x.shape[0]) else (x + 1).softmax(-1) * 3

    runner = open_runner(backend, model, splitting_ops=["aten::softmax"])
    assert len(runner.graphs.route.splitter.traces) <= traces  # type: ignore[union-attr]
    for rows in (8, 1, 4, 2, 4, 8, 2, 1, 9):
        x = torch.randn(rows, 8).to(backend.device)
        torch.testing.assert_close(runner(x=x), model(x))


def test_a_table_of_each_size_takes_two_traces_a_size(backend: GraphBackend) -> None:
    tables: dict[int, Tensor] = {}

    def model(x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows not in tables:
            tables[rows] = torch.arange(float(rows), device=x.device)[:, None]
        return (x * tables[rows]).softmax(-1)

    runner = open_runner(
        backend,
        model,
        splitting_ops=["aten::softmax"],
        compiler="eager",
        cudagraph_capture_sizes=[1, 2, 3, 4, 6, 8],
    )
    for rows in (8, 6, 4, 3, 2, 1):
        x = torch.randn(rows, 8).to(backend.device)
        same(runner(x=x), model(x))


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize(("shapes", "traces"), [("auto", 1), ("dynamic", 1), ("static", 4)])
def test_sizes_share_a_trace_or_have_their_own(
    backend: GraphBackend, mode: str, shapes: str, traces: int
) -> None:
    model = Model(backend).eval()
    with closing(open_model(backend, model, cudagraph_mode=mode, compile_shapes=shapes)) as runner:
        splitter = runner.graphs.route.splitter
        assert splitter is not None
        assert len(splitter.traces) == traces
        assert all(record.compile_seconds > 0 for record in runner.report.records[: traces - 1])
        for rows in (1, 2, 3, 8, 16):
            x = rows_of(backend, rows)
            same(runner(x=x), runner.run_eagerly(x=x))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize(("shapes", "traces"), [("dynamic", 1), ("auto", 3), ("static", 4)])
def test_inductor_compiles_sizes_together_or_alone(mode: str, shapes: str, traces: int) -> None:
    backend = select_backend("cuda")
    model = Model(backend).eval()
    cached = []
    for _ in range(2):  # the second one finds the first one's code on disk
        with closing(
            open_model(
                backend, model, cudagraph_mode=mode, compiler="inductor", compile_shapes=shapes
            )
        ) as runner:
            assert len(runner.graphs.route.splitter.traces) == traces  # type: ignore[union-attr]
            cached.append(sum(record.cached for record in runner.report.records))
            for rows in (1, 3, 8, 16):
                x = rows_of(backend, rows)
                torch.testing.assert_close(
                    runner(x=x), runner.run_eagerly(x=x), atol=1e-4, rtol=1e-4
                )
    assert cached[1] > 0


def test_a_model_that_every_call_changes_is_refused_with_the_guard(backend: GraphBackend) -> None:
    calls = []

    def model(x: Tensor) -> Tensor:
        calls.append(0)
        return x.softmax(-1) * len(calls)

    with pytest.raises(
        CaptureError, match=r"each run of the model computes something else.*calls\.append"
    ) as caught:
        open_runner(backend, model, splitting_ops=["aten::softmax"])
    assert "self.step.add_(1)" in caught.value.remedy


class Remembers(nn.Module):
    """Counts its calls, which operators read or do not; or makes a table on its first call."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.step, self.table = way, 0, None

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "table":
            self.table = torch.arange(4.0, device=x.device) if self.table is None else self.table
            return x.softmax(-1) * self.table
        self.step += 1
        return x.softmax(-1) * (self.step if self.way == "read" else 2)


@pytest.mark.parametrize("way", ["read", "counted", "table"])
def test_a_number_that_changes_is_refused_outside_of_runners_if_operators_read_it(
    backend: GraphBackend, way: str
) -> None:
    model = Remembers(way)
    compiled = compiled_by(backend, model, "aten::softmax")
    for rows in (4, 8):
        x = rows_of(backend, rows)
        for _ in range(3):
            with torch.no_grad(), forward_context(PIECEWISE, BatchDescriptor(rows)):
                if way != "read":
                    same(compiled(x=x.copy_(rows_of(backend, rows))), model(x))
                    continue
                with pytest.raises(
                    CaptureError, match=r"condition of .* trace is no longer true: .*\.step == \d+"
                ):
                    compiled(x=x)
    compiled.reset()


def test_a_function_under_vmap_stays_whole(backend: GraphBackend) -> None:
    """torch switches vmap on and off in the traced code, so no piece may end in between."""

    def model(x: Tensor) -> Tensor:
        h = torch.vmap(lambda row: row.sin() * row.sum())(x)
        return torch.vmap(lambda row: (row + 1).softmax(-1))(h.softmax(-1)) * 2

    runner = open_runner(
        backend, model, splitting_ops=["aten::softmax"], cudagraph_capture_sizes=[1, 4]
    )
    assert [piece.eager for piece in runner.graphs.route.pieces] == [
        False,
        True,
        False,
        True,
        False,
    ]
    for rows in (4, 1, 3):
        x = torch.randn(rows, 8).to(backend.device)
        torch.testing.assert_close(runner(x=x), model(x))


class Writing(nn.Module):
    """Writes rows into a cache, as attention does into its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(9, 8))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        self.cache[slots] = x
        return (x + self.cache[slots]).softmax(-1) * 2


def test_rows_that_are_written_by_index(backend: GraphBackend) -> None:
    inputs = {
        "x": Input(shape=("num_tokens", 8), dtype="float32", pad=0),
        "slots": Input(shape=("num_tokens",), dtype="int64", pad=8),
    }
    compilation = {
        "cudagraph_mode": "PIECEWISE",
        "cudagraph_capture_sizes": [1, 4],
        "splitting_ops": ["aten::softmax"],
    }
    model, other = (Writing().to(backend.device) for _ in range(2))
    runner = cgplan.capture(model, inputs, compilation=compilation, device=backend.device.type)
    for rows in (1, 3, 4, 6, 1):
        x, slots = (
            torch.randn(rows, 8).to(backend.device),
            torch.randperm(8)[:rows].to(backend.device),
        )
        torch.testing.assert_close(runner(x=x, slots=slots), other(x, slots))
        torch.testing.assert_close(model.cache[:8], other.cache[:8])


class Scaled(nn.Module):
    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(width, width), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.linear((x * 2).softmax(-1)) * self.scale


def test_models_that_differ_in_width_and_numbers_are_captured_one_after_the_other(
    backend: GraphBackend,
) -> None:
    """Dynamo takes what differed from the last trace of the same code for a variable."""
    for width, scale in ((8, 0.5), (16, 0.25), (4, 3.0)):
        model = Scaled(width, scale).to(backend.device)
        runner = open_runner(backend, model, width=width, splitting_ops=["aten::softmax"])
        x = torch.randn(3, width).to(backend.device)
        torch.testing.assert_close(runner(x=x), model(x))


def test_offsets_and_lengths_of_one_batch_may_be_combined(backend: GraphBackend) -> None:
    """num_reqs + 1 offsets and num_reqs lengths in one operator; and a branch on their number against the tokens'."""
    inputs = {
        "x": Input(shape=("num_tokens", 8), dtype="float32", pad=0),
        "starts": Input(shape=("num_reqs + 1",), dtype="int64", pad="last"),
        "lens": Input(shape=("num_reqs",), dtype="int64", pad=0),
    }

    def model(x: Tensor, starts: Tensor, lens: Tensor) -> Tensor:
        return x.softmax(-1) * (starts[1:] - starts[:-1] + lens).sum()

    def branches(x: Tensor, starts: Tensor, lens: Tensor) -> Tensor:
        return x.softmax(-1) * (2 if lens.shape[0] == x.shape[0] else 3) + starts[0]

    compilation = {
        "cudagraph_mode": "PIECEWISE",
        "cudagraph_capture_sizes": [4, 8],
        "splitting_ops": ["aten::softmax"],
    }
    config = validate_config(
        {
            "inputs": inputs,
            "compilation": compilation,
            "scheduler": {"max_num_seqs": 4},
            "device": backend.device.type,
        }
    )
    for forward in (model, branches):
        runner = CaptureSession(build_plan(config), forward, backend, config).run()
        for tokens in (4, 8):
            batch = {
                "x": torch.randn(tokens, 8).to(backend.device),
                "starts": torch.tensor([0, 2, 3, 4, tokens]).to(backend.device),
                "lens": torch.tensor([4, 9, 1, 0]).to(backend.device),
            }
            torch.testing.assert_close(runner(**batch), forward(**batch))


def test_python_state_that_changed_after_the_trace_reaches_eager_runs(
    backend: GraphBackend,
) -> None:
    model = Scaled(8, 2.0).to(backend.device)
    runner = open_runner(backend, model, splitting_ops=["aten::softmax"])
    model.scale = 5.0
    x, large = torch.randn(3, 8).to(backend.device), torch.randn(9, 8).to(backend.device)
    assert torch.equal(runner(x=large), model(large))
    torch.testing.assert_close(runner.run_eagerly(x=x), model(x))
    checked = open_runner(backend, model, splitting_ops=["aten::softmax"], debug=True)
    model.scale = 7.0
    with pytest.raises(NumbersError):
        checked(x=x)


def test_replays_do_not_need_what_dynamo_keeps(backend: GraphBackend) -> None:
    class Constant(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.arange(8.0, device=x.device)

    model = Constant(8, 2.0).to(backend.device)
    runner = open_runner(backend, model, splitting_ops=["aten::softmax"])
    torch._dynamo.reset()
    gc.collect()
    for rows in (3, 1, 8, 9):
        x = torch.randn(rows, 8).to(backend.device)
        torch.testing.assert_close(runner(x=x), model(x))
    runner.recapture()
    torch.testing.assert_close(runner(x=x[:4]), model(x[:4]))


def traces_left() -> tuple[int, int]:
    """Backends of traces that are alive, and all backends that Dynamo has registered."""
    gc.collect()
    alive = sum(type(found) is PiecewiseBackend for found in gc.get_objects())
    return alive, sum(
        found is not None for found in torch._dynamo.eval_frame.cached_backends.values()
    )


def test_recaptures_and_closed_runners_leave_no_trace_behind(backend: GraphBackend) -> None:
    """Dynamo registers the backends of traces, under ids that differ from torch to torch."""
    model = Scaled(8, 2.0).to(backend.device)
    before = traces_left()
    runner = open_runner(backend, model, splitting_ops=["aten::softmax"])
    captured = traces_left()
    assert captured == (before[0] + 1, before[1] + 1)
    for _ in range(3):
        runner.recapture()
    assert traces_left() == captured
    runner.close()
    del runner
    assert traces_left() == before


def test_a_graph_break_names_the_line(backend: GraphBackend) -> None:
    def model(x: Tensor) -> Tensor:
        print("breaks")
        torch._dynamo.graph_break()
        return x * 2

    with pytest.raises(
        CaptureError, match=r"cannot be traced as one graph, at .*test_trace.py:\d+"
    ) as caught:
        open_runner(backend, model)
    assert "splitting_modules" in caught.value.remedy


def test_a_model_whose_trace_fails_keeps_its_state(backend: GraphBackend) -> None:
    count = torch.zeros(1, device=backend.device)

    def model(x: Tensor) -> Tensor:
        count.add_(1)  # by the look, and not by the run that is traced
        torch._dynamo.graph_break()
        return x + count

    with pytest.raises(CaptureError, match="cannot be traced as one graph"):
        open_runner(backend, model)
    assert count == 0


def test_wrappers_inside_a_traced_model_are_pointed_out(backend: GraphBackend) -> None:
    inner = CUDAGraphWrapper(lambda x: x * 2, PIECEWISE, backend=backend)
    with pytest.raises(CaptureError, match="graph wrappers, and PIECEWISE traces it") as caught:
        open_runner(backend, lambda x: inner(x) + 1)
    assert "piecewise: wrappers" in caught.value.remedy


def test_what_an_operator_raises_in_a_trace_is_told_with_its_line(backend: GraphBackend) -> None:
    weight = torch.ones(7, 8, device=backend.device)

    def model(x: Tensor) -> Tensor:
        return torch.softmax(x, -1) @ weight

    said = (
        r"at .*test_trace\.py:\d+: `return torch\.softmax\(x, -1\) @ weight`: RuntimeError: .*7x8"
    )
    with pytest.raises(ModelError, match=said):
        open_runner(backend, model, splitting_ops=["aten::softmax"])


def test_an_operator_that_fails_in_the_trace_alone_is_told_with_its_line(
    backend: GraphBackend,
) -> None:
    def fake(x: Tensor) -> Tensor:
        raise RuntimeError("no fake today")

    with torch.library._scoped_library("pwfake", "FRAGMENT") as library:
        library.define("half(Tensor x) -> Tensor")
        library.impl("half", lambda x: x / 2, "CompositeExplicitAutograd")
        torch.library.register_fake("pwfake::half", fake, lib=library)

        def model(x: Tensor) -> Tensor:
            y: Tensor = torch.ops.pwfake.half(torch.softmax(x, -1))
            return y

        said = r"the model runs, but cannot be traced, at .*test_trace\.py:\d+: .*no fake today"
        with pytest.raises(CaptureError, match=said) as caught:
            open_runner(backend, model, splitting_ops=["aten::softmax"])
    assert "register_fake" in caught.value.remedy


def test_one_model_is_captured_again_and_again(backend: GraphBackend) -> None:
    """Dynamo would stop after eight traces of one function."""
    model, x = Scaled(8, 2.0).to(backend.device), torch.randn(3, 8).to(backend.device)
    for _ in range(9):
        runner = open_runner(
            backend, model, splitting_ops=["aten::softmax"], cudagraph_capture_sizes=[4]
        )
        torch.testing.assert_close(runner(x=x), model(x))
        runner.close()


class Cached(nn.Module):
    """A cache with as many rows as the largest batch has: a trace at that size could take the one for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(8, 1, 5, 8))

    def forward(self, x: Tensor) -> Tensor:
        states = x[:, None, None]
        rows = self.cache[: x.shape[0]]
        rows.scatter_(2, torch.ones_like(states, dtype=torch.int64), states * 2)
        return F.scaled_dot_product_attention(states, rows[:, :, :4], rows[:, :, :4])[:, 0, 0] * 3


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 12),
    reason="torch 2.11 does not trace this slice: attention asks for its size",
)
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_a_dimension_that_is_as_long_as_the_largest_batch(
    backend: GraphBackend, compiler: str
) -> None:
    if compiler == "inductor" and backend.device.type == "cpu":
        pytest.skip("inductor needs a GPU")
    model = Cached().to(backend.device)
    runner = open_runner(backend, model, compiler=compiler)
    for rows in (1, 3, 8, 2):
        x = torch.randn(rows, 8).to(backend.device)
        torch.testing.assert_close(runner(x=x), model(x), atol=1e-5, rtol=1e-4)


@torch.library.custom_op("cgplan_test::up_to_eight", mutates_args=())
def up_to_eight(x: Tensor) -> Tensor:
    if len(x) > 8:
        raise torch.OutOfMemoryError("out of memory")
    return x.clone()


@up_to_eight.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_trace_that_runs_out_of_memory_is_made_with_fewer_rows(backend: GraphBackend) -> None:
    config = validate_config(
        {
            "inputs": {"x": Input(shape=("num_tokens", 8), dtype="float32", pad=0)},
            "compilation": {
                "cudagraph_mode": "PIECEWISE",
                "cudagraph_capture_sizes": [4, 8, 32],
                "splitting_ops": ["aten::softmax"],
            },
            "budget": {"max_graphs": 10},
            "device": backend.device.type,
        }
    )
    runner = CaptureSession(
        build_plan(config), lambda x: torch.softmax(up_to_eight(x), -1) * 2, backend, config
    ).run()
    assert runner.plan.capture_sizes == (4, 8)
    for count in (3, 8):
        x = rows8(backend, count)
        torch.testing.assert_close(runner(x=x), torch.softmax(x, -1) * 2)
    runner.close()


def branches_on_a_value(x: Tensor) -> Tensor:
    if x.max().item() > 5:
        return x.softmax(1)
    return x.softmax(1) * 2


def test_code_that_depends_on_a_value_is_named(backend: GraphBackend) -> None:
    with pytest.raises(
        HostSyncError, match=r"depends on a value .*test_trace\.py:\d+: `if x\.max\(\)\.item"
    ):
        open_runner(backend, branches_on_a_value, splitting_ops=["aten::softmax"])


def rows8(backend: GraphBackend, count: int) -> Tensor:
    return torch.randn(count, 8, device=backend.device)


SMALL: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 64,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "Qwen3ForCausalLM": (
        "Qwen3Config",
        {**SMALL, "num_key_value_heads": 2, "head_dim": 8},
        ATTENTION,
    ),
    "MambaForCausalLM": (
        "MambaConfig",
        {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1},
        "aten::conv1d",
    ),
}


class Ids(nn.Module):
    """A model of transformers, called with ids alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_transformers_by_operators(backend: GraphBackend, kind: str) -> None:
    """One row is a trace, more rows are another one."""
    transformers = pytest.importorskip("transformers")
    config, sizes, op = KINDS[kind]
    torch.manual_seed(0)
    model = (
        Ids(getattr(transformers, kind)(getattr(transformers, config)(**sizes)))
        .eval()
        .to(backend.device)
    )
    runner = cgplan.capture(
        model,
        {"ids": Input(shape=("num_tokens", 6), dtype="int64", pad=0)},
        compilation={
            "cudagraph_mode": "PIECEWISE",
            "cudagraph_capture_sizes": [4, 2, 1],
            "splitting_ops": [op],
        },
        device=backend.device.type,
    )
    assert len(runner.graphs.route.splitter.traces) == 2  # type: ignore[union-attr]
    layers = sizes["num_hidden_layers"]
    assert {(r.graphs, r.eager_pieces) for r in runner.report.records} == {(layers + 1, layers)}
    for rows in (4, 3, 1, 2, 4):
        ids = torch.randint(0, 61, (rows, 6), device=backend.device)
        torch.testing.assert_close(runner(ids=ids), model(ids).detach(), atol=1e-4, rtol=1e-4)
    assert not runner.stats.eager
    runner.close()


class Block(nn.Module):
    def __init__(self, backend: GraphBackend, function: Callable[..., Any] = torch.softmax) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function
        self.eval().to(backend.device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.up(x)
        return self.down(self.function(h, -1)), h


def by_view(h: Tensor) -> Tensor:
    view = h.detach()
    a = torch.softmax(h, -1)
    view.t_()
    b = a * 2
    return b + torch.softmax(view, 0).t() * 3


def in_a_piece(h: Tensor) -> Tensor:
    return h.t_().softmax(0).t()


@pytest.mark.parametrize("function", [by_view, in_a_piece])
def test_a_piece_may_change_the_shape_of_a_tensor_that_another_one_made(
    backend: GraphBackend, function: Callable[[Tensor], Tensor]
) -> None:
    ops = ["aten::softmax", *(["aten::t_"] if function is in_a_piece else [])]
    model = Block(backend, lambda h, _: function(h))
    runner = open_runner(
        backend, lambda x: model(x)[0], 4, splitting_ops=ops, cudagraph_capture_sizes=[4]
    )
    for seed in range(4):
        x = randn(backend, 4, 4, seed=seed)
        torch.testing.assert_close(runner(x=x), model(x)[0].detach())


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def pieces_of(forward: Callable[..., Any], *splitting_ops: str, rows: int = 4) -> tuple[Piece, ...]:
    """How a forward over [rows, 8] is split."""
    splitter = PiecewiseBackend(
        CompilationConfig(splitting_ops=splitting_ops or None), select_backend("cpu")
    )
    x = torch.randn(rows, 8)
    with torch.no_grad():
        expected = forward(x)
        try:
            found = torch.compile(forward, backend=splitter, fullgraph=True)(x)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            raise error.inner_exception from None
    assert torch.equal(found, expected)
    assert len(splitter.pieces) == 1
    return splitter.pieces[0]


def kinds(pieces: tuple[Piece, ...]) -> list[tuple[bool, int]]:
    return [(piece.eager, len(piece.operators)) for piece in pieces]


def test_segments_stand_around_a_splitting_op() -> None:
    pieces = pieces_of(lambda x: (x * 2).softmax(-1).relu() + 1, "aten::softmax")
    assert [(p.eager, p.operators) for p in pieces] == [
        (False, ("aten::mul",)),
        (True, ("aten::softmax",)),
        (False, ("aten::relu", "aten::add")),
    ]


@pytest.mark.parametrize(
    ("written", "name"),
    [
        (lambda x: x @ x.T, "aten::matmul"),
        (lambda x: 2 * x, "aten::mul"),
        (lambda x: x / 3, "aten::div"),
        (lambda x: x[:, :4], "aten::slice"),
        (lambda x: x[0], "aten::select"),
        (lambda x: x[x[:, 0].argsort()], "aten::index"),
    ],
)
def test_python_operators_have_the_names_of_pytorch(
    written: Callable[[Tensor], Tensor], name: str
) -> None:
    pieces = pieces_of(lambda x: written(x.exp()).relu().sum(), name)
    assert [p.eager for p in pieces] == [False, True, False]
    assert name in pieces[1].operators
    assert "aten::exp" in pieces[0].operators
    assert "aten::relu" in pieces[2].operators


def test_arithmetic_with_sizes_is_no_operator_of_tensors() -> None:
    with pytest.raises(ConfigError, match="'aten::add' does not occur") as caught:
        pieces_of(lambda x: x.new_zeros(x.shape[0] + 1).relu() * x[0, 0], "aten::add")
    assert "aten::mul, aten::new_zeros, aten::relu, aten::select" in str(caught.value.remedy)


@pytest.mark.parametrize("name", ["softmax", "aten.softmax", ""])
def test_an_operator_without_a_namespace(name: str) -> None:
    with pytest.raises(ConfigError, match="does not exist") as caught:
        pieces_of(lambda x: x.softmax(-1), name)
    assert str(caught.value.remedy).startswith(
        "Operators are named namespace::name, as in aten::softmax. "
    )


def test_pieces_without_work_are_merged() -> None:
    """A view between two splitting ops would be a graph without a kernel."""
    pieces = pieces_of(
        lambda x: (x + 1).softmax(-1).view(2, -1).transpose(0, 1).softmax(0) + 1, "aten::softmax"
    )
    assert kinds(pieces) == [(False, 1), (True, 4), (False, 1)]
    assert kinds(
        pieces_of(lambda x: (x + 1).softmax(-1).view(2, -1).mul(2).softmax(0), "aten::softmax")
    )[1:] == [
        (True, 1),
        (False, 2),
        (True, 1),
    ]


def test_items_of_a_tuple_stay_with_it() -> None:
    def forward(x: Tensor) -> Tensor:
        values, where = (x + 1).topk(3)
        a, b = values.chunk(2, 1)
        return a.sum() + b.sum() + where.float().sum()

    first, second, third = pieces_of(forward, "aten::topk")
    assert (first.eager, second.eager, third.eager) == (False, True, False)
    assert second.operators == ("aten::topk", "python::getitem", "python::getitem")


def test_mutations_keep_their_order() -> None:
    def forward(x: Tensor) -> Tensor:
        made = torch.zeros_like(x)
        made.add_(x)
        y = made.softmax(-1)
        made.mul_(3)
        z = made.softmax(-1)
        made.zero_()
        return y + z * 2 + made

    assert [p.eager for p in pieces_of(forward, "aten::softmax")] == [
        False,
        True,
        False,
        True,
        False,
    ]


def test_default_splitting_ops_are_attention() -> None:
    def forward(x: Tensor) -> Tensor:
        q = (x * 2).view(1, 2, -1, 4)
        return F.scaled_dot_product_attention(q, q, q).reshape(x.shape) + 1

    assert [p.eager for p in pieces_of(forward)] == [False, True, False]
    assert kinds(pieces_of(lambda x: x * 2 + 1)) == [(False, 2)]


def test_a_splitting_op_that_is_not_there_is_answered_with_what_is() -> None:
    with pytest.raises(ConfigError, match="'aten::softmaxx' does not exist") as caught:
        pieces_of(lambda x: (x * 2).softmax(-1), "aten::softmaxx")
    assert "Did you mean aten::softmax" in caught.value.remedy
    torch._dynamo.reset()
    with pytest.raises(ConfigError, match="'aten::topk' does not occur in the model") as caught:
        pieces_of(lambda x: (x * 2).softmax(-1), "aten::topk")
    assert "aten::softmax" in caught.value.remedy


def replay_random_batches(
    backend: GraphBackend,
    mode: str,
    batches: int = 20,
    close: dict[str, float] | None = None,
    **compilation: Any,
) -> GraphRunner:
    """Capture the decoder and compare replays with its own code on the same padded batch, bit for bit or as close."""
    tolerance = close or {"rtol": 0, "atol": 0}
    model = decoder.build(num_layers=2).to(backend.device)
    rows, reqs = "num_tokens", "num_reqs"
    config = validate_config(
        {
            "inputs": {
                name: Input(shape=(rows,), dtype="int64", pad=0)
                for name in ("input_ids", "positions")
            },
            "metadata": {
                "slot_mapping": Input(shape=(rows,), dtype="int64", pad=-1),
                "block_tables": Input(shape=(reqs, 4), dtype="int32", pad=0),
                "seq_lens": Input(shape=(reqs,), dtype="int32", pad=0),
                "query_start_loc": Input(shape=("num_reqs + 1",), dtype="int32", pad="last"),
            },
            "compilation": {
                "cudagraph_mode": mode,
                "cudagraph_capture_sizes": [1, 4, 8, 16],
                **compilation,
            },
            "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 32},
        }
    )
    runner = CaptureSession(build_plan(config), model, backend, config).run()
    caches = [
        cache
        for layer in model.layers
        for cache in (layer.self_attn.key_cache, layer.self_attn.value_cache)
    ]
    choose = random.Random(mode)
    for seed in range(batches):
        decode = choose.random() < 0.5
        queries = [1 if decode else choose.randint(1, 5) for _ in range(choose.randint(1, 6))]
        batch = decoder.example_batch(
            model, [choose.randint(0, 40) for _ in queries], queries, max_blocks=4, seed=seed
        )
        tensors = {"input_ids": batch.input_ids, "positions": batch.positions, **batch.metadata}
        before = [cache.clone() for cache in caches]
        found = runner(**tensors).clone()
        after = [cache.clone() for cache in caches]
        for cache, old in zip(caches, before, strict=True):
            cache.copy_(old)
        torch.testing.assert_close(found, runner.run_eagerly(**tensors), **tolerance)
        for cache, new in zip(
            caches, after, strict=True
        ):  # the last block takes what padding rows write
            torch.testing.assert_close(new[:-1], cache[:-1], **tolerance)
    assert bool(runner.stats.replays) == (mode != "NONE")
    return runner


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_inductor_compiles_each_segment_once_for_all_sizes(mode: str) -> None:
    backend = select_backend("cuda")
    model = Attends(layers=4).to(backend.device)
    options = {"compiler": "inductor", "compile_shapes": "dynamic"}
    runner = open_runner(backend, model, cudagraph_mode=mode, **options)
    splitter = runner.graphs.route.splitter
    assert splitter is not None
    # Twice, as one row is a trace of its own: the first segment, those between two attentions, the last one; or the
    # forward as a whole, which FULL compiles.
    assert len(splitter.compiled) == 2 * (1 if mode == "FULL" else 3)
    generator = torch.Generator().manual_seed(1)
    for rows in (1, 8, 3, 2, 5, 8, 1, 4, 7, 6):
        x = torch.randn(rows, 8, generator=generator).to(backend.device)
        torch.testing.assert_close(runner(x=x), model(x), atol=1e-5, rtol=1e-4)
    assert not runner.stats.eager
    if mode == "PIECEWISE":
        assert {r.graphs for r in runner.report.records} == {5}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_the_decoder_under_inductor(mode: str) -> None:
    """Attention writes into a buffer that inductor allocates, and into the cache."""
    close = {"rtol": 1e-3, "atol": 1e-4}
    replay_random_batches(
        select_backend("cuda"),
        mode,
        close=close,
        compiler="inductor",
    )


@pytest.mark.gpu
def test_an_operator_of_several_results_between_compiled_segments() -> None:
    """Fused attention gives logsumexp and random states besides: a tuple, fresh on each call."""

    class Flash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 3 * 2 * 16 * 64) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                q, k, v = layer(x).to(torch.bfloat16).view(-1, 3, 2, 16, 64).unbind(1)
                x = (
                    x
                    + F.scaled_dot_product_attention(q, k, v).float().mean(dim=(1, 2))[:, :8].tanh()
                )
            return x

    backend = select_backend("cuda")
    torch.manual_seed(0)
    model = Flash().to(backend.device)
    runner = open_runner(backend, model, compiler="inductor")
    assert {r.graphs for r in runner.report.records} == {3}
    for rows in (1, 8, 3, 2, 5, 8, 1):
        x = torch.randn(rows, 8).to(backend.device)
        torch.testing.assert_close(runner(x=x), model(x), atol=2e-3, rtol=2e-2)
    assert not runner.stats.eager
    runner.close()


@pytest.mark.parametrize(
    ("mode", "modules"),
    [("PIECEWISE", []), ("FULL_AND_PIECEWISE", ["layers.*.self_attn"])],
)
def test_the_decoder_by_operators_and_by_modules(
    backend: GraphBackend, mode: str, modules: list[str]
) -> None:
    replay_random_batches(backend, mode, splitting_modules=modules)


@torch.library.custom_op("tests_inductor::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """As attention, whose kernel at run time may lay out its result otherwise than the one that the trace chose."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) * 2


@turned.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class Turns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return turned(x.unflatten(-1, (4, 2)) + 1).softmax(-1).flatten(1) * 3


def test_a_segment_is_handed_its_inputs_in_the_layout_that_it_was_compiled_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[int, ...]] = []

    def compile_nothing(module: Any, inputs: Any, **_: Any) -> Any:
        forward = module.forward

        def run(*args: Any) -> Any:
            found.extend(arg.stride() for arg in args if isinstance(arg, Tensor))
            return forward(*args)

        return run

    monkeypatch.setattr(torch._inductor, "standalone_compile", compile_nothing)
    splitter = PiecewiseBackend(
        CompilationConfig(splitting_ops=["tests_inductor::turned"]), select_backend("cpu")
    )
    splitter.compiler = "inductor"  # which the tape cannot record
    model, x = Turns(), torch.randn(3, 8)
    torch.testing.assert_close(torch.compile(model, backend=splitter)(x), model(x), rtol=0, atol=0)
    assert found == [(8, 1), (8, 2, 1)]


@pytest.mark.gpu
def test_inductor_behind_an_operator_with_another_layout_than_its_trace() -> None:
    backend, model = select_backend("cuda"), Turns()
    options = {"compiler": "inductor", "splitting_ops": ["tests_inductor::turned"]}
    runner = open_runner(backend, model, cudagraph_mode="PIECEWISE", **options)
    for rows in (1, 3, 8):
        x = torch.randn(rows, 8, device=backend.device)
        torch.testing.assert_close(runner(x=x), model(x), rtol=1e-5, atol=1e-5)


COMPILING = """
import sys, time
import torch
import cgplan
from torch._inductor.async_compile import AsyncCompile

def many(x):
    total = x[:, :1]
    for width in range(2, 40):  # a kernel each
        total = total + torch.softmax(x[:, :width].sin(), -1).square().cumsum(-1)[:, -1:]
    return total

if sys.argv[1] == "cuda":
    inputs = {"x": cgplan.Input(shape=("num_tokens", 64), dtype="float32", pad=0)}
    settings = {"cudagraph_capture_sizes": [1, 2, 4], "cudagraph_mode": "FULL", "compiler": "inductor"}
    cgplan.capture(many, inputs, compilation=settings, device="cuda")
else:  # no kernels of Triton: jobs that take as long
    from pathlib import Path
    workers = AsyncCompile.process_pool()
    workers.submit(Path(sys.argv[2], "begun").touch)
    jobs = [workers.submit(time.sleep, 10) for _ in range(2)]
    [job.result() for job in jobs]
"""


def running(session: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.gpu)]
)
def test_a_process_killed_while_it_compiles_leaves_no_child(
    backend: GraphBackend, tmp_path: Path, how: signal.Signals
) -> None:
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    program = tmp_path / "compiling.py"
    program.write_text(COMPILING)
    process = subprocess.Popen(
        [sys.executable, program, backend.device.type, kernels],
        env={
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "2",
            "TRITON_CACHE_DIR": str(kernels),
        },
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not any(kernels.iterdir()):
            assert process.poll() is None, "it ended before it compiled"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert len(running(process.pid)) > 2, "with workers"
        process.send_signal(how)
        assert process.wait() == -how
        deadline = time.monotonic() + 30
        while running(process.pid):
            assert time.monotonic() < deadline, "children stay"
            time.sleep(0.1)
    finally:
        for left in running(process.pid):
            os.kill(left, signal.SIGKILL)
        process.wait()
