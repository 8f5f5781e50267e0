"""PIECEWISE by tracing and splitting: where the graph is cut, and that what runs is still the model."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import cgplan
from cgplan import (
    AddressError,
    BatchDescriptor,
    CaptureError,
    ConfigError,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GraphRunner,
    HostSyncError,
    ModelError,
    NumbersError,
    build_plan,
    forward_context,
)
from cgplan.backends import GraphBackend, select_backend
from cgplan.config import Input, validate_config
from cgplan.models import decoder
from cgplan.piecewise.backend import PiecewiseBackend, cgplan_backend
from cgplan.piecewise.split import Piece
from cgplan.runner.session import CaptureSession

PIECEWISE = CUDAGraphMode.PIECEWISE


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def open_runner(backend: GraphBackend, model: Callable[..., Any], width: int = 8, **compilation: Any) -> GraphRunner:
    config = validate_config(
        {
            "inputs": {"x": Input(shape=("num_tokens", width), dtype="float32", pad=0)},
            "compilation": {
                "cudagraph_mode": "PIECEWISE",
                "cudagraph_capture_sizes": [1, 2, 4, 8],
                "outputs": "clone",
                **compilation,
            },
            "device": backend.device.type,
        }
    )
    return CaptureSession(build_plan(config), model, backend, config).run()


def pieces_of(forward: Callable[..., Any], *splitting_ops: str, rows: int = 4) -> tuple[Piece, ...]:
    """How a forward over [rows, 8] is split."""
    splitter = PiecewiseBackend(splitting_ops or None)
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


# --- where the graph is cut -----------------------------------------------------------------------------------


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
        (lambda x: x + x, "aten::add"),
        (lambda x: x - 1, "aten::sub"),
        (lambda x: 2 * x, "aten::mul"),
        (lambda x: x / 3, "aten::div"),
        (lambda x: x[:, :4], "aten::slice"),
        (lambda x: x[0], "aten::select"),
        (lambda x: x[x[:, 0].argsort()], "aten::index"),
    ],
)
def test_python_operators_have_the_names_of_pytorch(written: Callable[[Tensor], Tensor], name: str) -> None:
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
    assert str(caught.value.remedy).startswith("Operators are named namespace::name, as in aten::softmax. ")


def test_consecutive_splitting_ops_stay_together() -> None:
    pieces = pieces_of(lambda x: (x * 2).softmax(-1).softmax(0).softmax(-1) * 3, "aten::softmax")
    assert kinds(pieces) == [(False, 1), (True, 3), (False, 1)]


def test_pieces_without_work_are_merged() -> None:
    """A view between two splitting ops would be a graph without a kernel."""
    pieces = pieces_of(lambda x: (x + 1).softmax(-1).view(2, -1).transpose(0, 1).softmax(0) + 1, "aten::softmax")
    assert kinds(pieces) == [(False, 1), (True, 4), (False, 1)]
    assert kinds(pieces_of(lambda x: (x + 1).softmax(-1).view(2, -1).mul(2).softmax(0), "aten::softmax"))[1:] == [
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

    assert [p.eager for p in pieces_of(forward, "aten::softmax")] == [False, True, False, True, False]


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


def test_outside_of_any_context_the_backend_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).requires_grad_(False)
    compiled = torch.compile(model, backend=cgplan_backend)
    for rows in (4, 4, 7, 1):
        x = torch.randn(rows, 8)
        assert torch.equal(compiled(x), model(x))


# --- what runs ------------------------------------------------------------------------------------------------


class Attends(nn.Module):
    """Attention through PyTorch's operator, which returns a fresh tensor on each call; rows do not see each other."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = (part.unflatten(1, (2, 2, 2)) for part in layer(x).chunk(3, dim=1))
            x = x + F.scaled_dot_product_attention(q, k, v).flatten(1).tanh() * 2
        return x * x.sigmoid()


def test_what_an_eager_piece_returns_is_brought_to_the_next_segment(backend: GraphBackend) -> None:
    model = Attends().to(backend.device)
    runner = open_runner(backend, model)
    assert {r.graphs for r in runner.report.records} == {4}
    generator = torch.Generator().manual_seed(1)
    for rows in (1, 8, 3, 2, 5, 8, 1, 4, 7, 6):
        x = torch.randn(rows, 8, generator=generator).to(backend.device)
        found = runner(x=x)
        assert torch.equal(found, runner.run_eagerly(x=x))
        torch.testing.assert_close(found, model(x))
    assert not runner.stats.eager


def test_segments_do_not_take_the_memory_that_they_read(backend: GraphBackend) -> None:
    """A segment's output lies in the pool; the next capture must not place its own results there."""
    segments = [
        CUDAGraphWrapper(function, PIECEWISE, backend=backend)
        for function in (lambda x: x * 2, lambda y: (y + 1) * 3 + y, lambda z: (z - 1).abs() * z)
    ]

    def model(x: Tensor) -> Tensor:
        for segment in segments:
            x = segment(x)
        return x

    runner = open_runner(backend, model, piecewise="wrappers")
    for rows in (8, 1, 3, 8, 2):
        x = torch.randn(rows, 8, device=backend.device)
        y = x * 2
        z = (y + 1) * 3 + y
        assert torch.equal(runner(x=x), (z - 1).abs() * z)
    assert runner.report.split is not None
    assert runner.report.split.captured == {"aten::mul": 3, "aten::add": 2, "aten::sub": 1, "aten::abs": 1}
    assert runner.report.split.eager == {}


def replay_random_batches(
    backend: GraphBackend, mode: str, batches: int = 20, close: dict[str, float] | None = None, **compilation: Any
) -> GraphRunner:
    """Capture the decoder and compare replays with its own code on the same padded batch, bit for bit."""
    model = decoder.build(num_layers=2).to(backend.device)
    rows, reqs = "num_tokens", "num_reqs"
    config = validate_config(
        {
            "inputs": {name: Input(shape=(rows,), dtype="int64", pad=0) for name in ("input_ids", "positions")},
            "metadata": {
                "slot_mapping": Input(shape=(rows,), dtype="int64", pad=-1),
                "block_tables": Input(shape=(reqs, 4), dtype="int32", pad=0),
                "seq_lens": Input(shape=(reqs,), dtype="int32", pad=0),
                "query_start_loc": Input(shape=("num_reqs + 1",), dtype="int32", pad="last"),
            },
            "compilation": {"cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 4, 8, 16], **compilation},
            "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 32},
        }
    )
    runner = CaptureSession(build_plan(config), model, backend, config).run()
    caches = [cache for layer in model.layers for cache in (layer.self_attn.key_cache, layer.self_attn.value_cache)]
    choose = random.Random(mode)
    for seed in range(batches):
        decode = choose.random() < 0.5
        queries = [1 if decode else choose.randint(1, 5) for _ in range(choose.randint(1, 6))]
        batch = decoder.example_batch(model, [choose.randint(0, 40) for _ in queries], queries, max_blocks=4, seed=seed)
        tensors = {"input_ids": batch.input_ids, "positions": batch.positions, **batch.metadata}
        before = [cache.clone() for cache in caches]
        found = runner(**tensors).clone()
        after = [cache.clone() for cache in caches]
        for cache, old in zip(caches, before, strict=True):
            cache.copy_(old)
        torch.testing.assert_close(found, runner.run_eagerly(**tensors), **(close or {"rtol": 0, "atol": 0}))
        # The last block takes what padding rows write; real blocks must be the same to the last bit.
        assert all(torch.equal(cache[:-1], new[:-1]) for cache, new in zip(caches, after, strict=True))
    assert bool(runner.stats.replays) == (mode != "NONE")
    return runner


# --- what Python code may depend on ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("branch", "traces"),
    [
        (lambda rows: rows > 4, 3),
        (lambda rows: rows != 2, 3),
        (lambda rows: rows == 1, 2),
        (lambda rows: rows % 4 != 0, 3),
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
    assert len(runner._graphed.route.splitter.traces) <= traces  # type: ignore[union-attr]
    for rows in (8, 1, 4, 2, 4, 8, 2, 1, 9):
        x = torch.randn(rows, 8).to(backend.device)
        torch.testing.assert_close(runner(x=x), model(x))


def test_a_model_that_every_call_changes_is_refused_with_the_guard(backend: GraphBackend) -> None:
    calls = []

    def model(x: Tensor) -> Tensor:
        calls.append(0)
        return x.softmax(-1) * len(calls)

    sizes = list(range(1, 12))
    with pytest.raises(CaptureError, match=r"no trace holds for the next key: .*calls\.append") as caught:
        open_runner(backend, model, splitting_ops=["aten::softmax"], cudagraph_capture_sizes=sizes)
    assert "splitting_modules" in caught.value.remedy
    assert torch._dynamo.config.recompile_limit == 8


class Writing(nn.Module):
    """Writes rows into a cache, as attention does into its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("cache", torch.zeros(9, 8))

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        if self.way == "set":
            self.cache[slots] = x
        elif self.way == "index_put_":
            self.cache.index_put_((slots,), x)
        elif self.way == "index_copy_":
            self.cache.index_copy_(0, slots, x)
        else:
            self.cache.scatter_(0, slots[:, None].expand(-1, 8), x)
        return (x + self.cache[slots]).softmax(-1) * 2


@pytest.mark.parametrize("way", ["set", "index_put_", "index_copy_", "scatter_"])
def test_rows_that_are_written_by_index(backend: GraphBackend, way: str) -> None:
    inputs = {
        "x": Input(shape=("num_tokens", 8), dtype="float32", pad=0),
        "slots": Input(shape=("num_tokens",), dtype="int64", pad=8),
    }
    compilation = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, 4], "splitting_ops": ["aten::softmax"]}
    model, other = (Writing(way).to(backend.device) for _ in range(2))
    runner = cgplan.capture(model, inputs, compilation=compilation, device=backend.device.type)
    for rows in (1, 3, 4, 6, 1):
        x, slots = torch.randn(rows, 8).to(backend.device), torch.randperm(8)[:rows].to(backend.device)
        torch.testing.assert_close(runner(x=x, slots=slots), other(x, slots))
        torch.testing.assert_close(model.cache[:8], other.cache[:8])


class Scaled(nn.Module):
    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(width, width), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.linear((x * 2).softmax(-1)) * self.scale


def test_models_that_differ_in_width_and_numbers_are_captured_one_after_the_other(backend: GraphBackend) -> None:
    """Dynamo takes what differed from the last trace of the same code for a variable."""
    for width, scale in ((8, 0.5), (16, 0.25), (4, 3.0)):
        model = Scaled(width, scale).to(backend.device)
        runner = open_runner(backend, model, width=width, splitting_ops=["aten::softmax"])
        x = torch.randn(3, width).to(backend.device)
        torch.testing.assert_close(runner(x=x), model(x))


def test_a_capture_of_one_row_alone(backend: GraphBackend) -> None:
    def model(x: Tensor) -> Tensor:
        return x.softmax(-1) + torch.arange(x.shape[0], dtype=x.dtype, device=x.device)[:, None]

    runner = open_runner(backend, model, splitting_ops=["aten::softmax"], cudagraph_capture_sizes=[1])
    for rows in (1, 5, 7):
        x = torch.randn(rows, 8).to(backend.device)
        assert torch.equal(runner(x=x), model(x))


def test_a_model_may_write_into_what_an_eager_piece_returned(backend: GraphBackend) -> None:
    def model(x: Tensor) -> Tensor:
        y = (x * 2).softmax(-1)
        view = y.view(-1)
        y.mul_(3)
        return y.softmax(-1) + view.view_as(y)

    runner = open_runner(backend, model, splitting_ops=["aten::softmax"])
    for rows in (8, 1, 3):
        x = torch.randn(rows, 8).to(backend.device)
        torch.testing.assert_close(runner(x=x), model(x))


def test_views_made_between_eager_operators_may_be_written_to(backend: GraphBackend) -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        first = y.softmax(-1)
        view = y.view(-1)
        second = first.softmax(-1)
        view.mul_(3)
        return second + y

    runner = open_runner(backend, model, splitting_ops=["aten::softmax"])
    for rows in (8, 1, 3):
        x = torch.randn(rows, 8).to(backend.device)
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

    compilation = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [4, 8], "splitting_ops": ["aten::softmax"]}
    config = validate_config(
        {"inputs": inputs, "compilation": compilation, "scheduler": {"max_num_seqs": 4}, "device": backend.device.type}
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


def test_python_state_that_changed_after_the_trace_reaches_eager_runs(backend: GraphBackend) -> None:
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
            return super().forward(x) + torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8], device=x.device)

    model = Constant(8, 2.0).to(backend.device)
    runner = open_runner(backend, model, splitting_ops=["aten::softmax"])
    torch._dynamo.reset()
    gc.collect()
    for rows in (3, 1, 8, 9):
        x = torch.randn(rows, 8).to(backend.device)
        torch.testing.assert_close(runner(x=x), model(x))
    runner.recapture()
    torch.testing.assert_close(runner(x=x[:4]), model(x[:4]))


def test_runners_leave_nothing_behind(backend: GraphBackend) -> None:
    """Dynamo's caches are invisible to the collector, and held the wrappers and the pool of a dropped runner."""
    model = Scaled(8, 2.0).to(backend.device)

    def alive() -> int:
        gc.collect()
        return sum(isinstance(found, CUDAGraphWrapper) for found in gc.get_objects())

    def capture(close: bool) -> None:
        runner = open_runner(backend, model, splitting_ops=["aten::softmax"])
        if close:
            runner.close()

    capture(close=True)
    before = alive()
    for close in (True, False, True, False):
        capture(close)
    assert alive() <= before


def traces_left() -> tuple[int, int]:
    """Backends of traces that are alive, and all backends that Dynamo has registered."""
    gc.collect()
    alive = sum(type(found) is PiecewiseBackend for found in gc.get_objects())
    return alive, sum(found is not None for found in torch._dynamo.eval_frame.cached_backends.values())


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


def test_a_runner_that_its_model_holds_is_collected(backend: GraphBackend) -> None:
    model: Any = Scaled(8, 2.0).to(backend.device)
    model.runner = open_runner(backend, model, splitting_ops=["aten::softmax"])
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_check_of_a_maximum_is_no_branch(backend: GraphBackend) -> None:
    def model(x: Tensor) -> Tensor:
        if x.shape[0] > 16:
            raise ValueError("more than 16 rows")
        return x * 2

    runner = open_runner(backend, model)
    for rows in (3, 8, 16):
        x = torch.randn(rows, 8).to(backend.device)
        assert torch.equal(runner(x=x), x * 2)
    with pytest.raises(ValueError, match="more than 16 rows"):
        runner(x=torch.randn(17, 8).to(backend.device))


def test_a_graph_break_names_the_line(backend: GraphBackend) -> None:
    def model(x: Tensor) -> Tensor:
        print("breaks")
        torch._dynamo.graph_break()
        return x * 2

    with pytest.raises(CaptureError, match=r"cannot be traced as one graph, at .*test_piecewise.py:\d+") as caught:
        open_runner(backend, model)
    assert "splitting_modules" in caught.value.remedy


def test_wrappers_inside_a_traced_model_are_pointed_out(backend: GraphBackend) -> None:
    inner = CUDAGraphWrapper(lambda x: x * 2, PIECEWISE, backend=backend)
    with pytest.raises(CaptureError, match="graph wrappers of its own") as caught:
        open_runner(backend, lambda x: inner(x) + 1)
    assert "piecewise: wrappers" in caught.value.remedy


def test_what_an_operator_raises_in_a_trace_is_told_with_its_line(backend: GraphBackend) -> None:
    weight = torch.ones(7, 8, device=backend.device)

    def model(x: Tensor) -> Tensor:
        return torch.softmax(x, -1) @ weight

    said = r"at .*test_piecewise\.py:\d+: `return torch\.softmax\(x, -1\) @ weight`: RuntimeError: .*7x8"
    with pytest.raises(ModelError, match=said):
        open_runner(backend, model, splitting_ops=["aten::softmax"])


def test_an_operator_that_fails_in_the_trace_alone_is_told_with_its_line(backend: GraphBackend) -> None:
    def fake(x: Tensor) -> Tensor:
        raise RuntimeError("no fake today")

    with torch.library._scoped_library("pwfake", "FRAGMENT") as library:
        library.define("half(Tensor x) -> Tensor")
        library.impl("half", lambda x: x / 2, "CompositeExplicitAutograd")
        torch.library.register_fake("pwfake::half", fake, lib=library)

        def model(x: Tensor) -> Tensor:
            y: Tensor = torch.ops.pwfake.half(torch.softmax(x, -1))
            return y

        said = r"the model runs, but cannot be traced, at .*test_piecewise\.py:\d+: .*no fake today"
        with pytest.raises(CaptureError, match=said) as caught:
            open_runner(backend, model, splitting_ops=["aten::softmax"])
    assert "register_fake" in caught.value.remedy


class Wrapped(torch.nn.Module):
    """Two segments of its own."""

    def __init__(self, mode: CUDAGraphMode) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.run_first, self.run_second = (CUDAGraphWrapper(m, mode) for m in (self.first, self.second))
        self.middle = torch.nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.run_second(self.middle(self.run_first(x)))


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_wrappers_inside_a_capture_of_the_whole_are_pointed_out(backend: GraphBackend, mode: str) -> None:
    model = Wrapped(CUDAGraphMode[mode]).to(backend.device)
    words = r"graph wrappers of its own, and is to be captured as a whole as well, at .*test_piecewise\.py:\d+: `return"
    modules = {"splitting_modules": ["middle"]} if mode == "PIECEWISE" else {}
    with pytest.raises(CaptureError, match=words) as caught:
        open_runner(backend, model, cudagraph_mode=mode, **modules)
    assert type(caught.value) is CaptureError
    assert "piecewise: wrappers" in caught.value.remedy


def test_a_trace_is_not_run_under_another_autocast_state(backend: GraphBackend) -> None:
    model = Attends(1).to(backend.device)
    runner = open_runner(backend, model)
    x = torch.randn(3, 8, device=backend.device)
    expected = runner(x=x)
    with (
        torch.autocast(backend.device.type, dtype=torch.bfloat16),
        pytest.raises(CaptureError, match="was traced with"),
    ):
        runner(x=x)
    assert torch.equal(runner(x=x), expected)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_a_parameter_that_moved_is_named_before_the_first_replay(backend: GraphBackend, mode: str) -> None:
    model = Attends(2).to(backend.device)
    runner = open_runner(backend, model, cudagraph_mode=mode)
    x = torch.randn(4, 8, device=backend.device)
    expected = runner(x=x)
    old = model.layers[1].weight.data
    model.layers[1].weight.data = old * 2
    with pytest.raises(AddressError, match=r"model\.layers\[?'?1'?\]?\.weight"):
        runner(x=x[:2])
    model.layers[1].weight.data = old
    assert torch.equal(runner(x=x), expected)


def test_addresses_are_checked_as_often_as_asked(backend: GraphBackend) -> None:
    x = torch.randn(4, 8, device=backend.device)
    for policy, is_seen in (("off", False), ("first", False), ("always", True)):
        torch._dynamo.reset()
        model = Attends(1).to(backend.device)
        runner = open_runner(backend, model, cudagraph_mode="FULL", address_check=policy)
        expected = runner(x=x)
        model.layers[0].weight.data = model.layers[0].weight.data * 2
        if is_seen:
            with pytest.raises(AddressError):
                runner(x=x)
        else:  # the graph still reads the old memory, silently: what the check is for
            assert torch.equal(runner(x=x), expected)


def test_a_wrapper_refuses_an_argument_that_moved(backend: GraphBackend) -> None:
    wrapper = CUDAGraphWrapper(lambda x, y: x * 2 + y["z"], CUDAGraphMode.FULL, backend=backend)
    x, z = torch.ones(4, device=backend.device), torch.ones(4, device=backend.device)
    with torch.no_grad(), forward_context(CUDAGraphMode.FULL, BatchDescriptor(4)):
        assert wrapper(x, {"z": z}).tolist() == [3.0] * 4
        with pytest.raises(AddressError, match=r"args\[1\]\.z"):
            wrapper(x, {"z": z.clone()})
        z.fill_(5)
        assert wrapper(x, {"z": z}).tolist() == [7.0] * 4


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_state_that_moved_is_named_until_it_is_captured_again(backend: GraphBackend, mode: str) -> None:
    model = Attends(2).to(backend.device)
    runner = open_runner(backend, model, cudagraph_mode=mode)
    x = torch.randn(3, 8, device=backend.device)
    before = runner(x=x)
    with torch.no_grad():
        for layer in model.layers:
            layer.weight = nn.Parameter(layer.weight * 2)
    runner.invalidate("weights")
    with pytest.raises(AddressError, match=f"{mode} .* was captured before 'weights' moved") as caught:
        runner(x=x)
    assert "recapture" in caught.value.remedy
    torch._dynamo.reset()
    runner.recapture()
    found = runner(x=x)
    torch.testing.assert_close(found, model(x).detach())
    assert not torch.equal(found, before)
    assert {r.mode.name for r in runner.report.records} == {mode}
    runner.close()


def test_one_model_is_captured_again_and_again(backend: GraphBackend) -> None:
    """Dynamo would stop after eight traces of one function."""
    model = Attends(layers=1).to(backend.device)
    x = torch.randn(3, 8).to(backend.device)
    for _ in range(12):
        runner = open_runner(backend, model, cudagraph_capture_sizes=[4])
        torch.testing.assert_close(runner(x=x), model(x))
        runner.close()


def test_two_runners_of_one_traced_model(backend: GraphBackend) -> None:
    model = Attends(2).to(backend.device)
    one, other = open_runner(backend, model), open_runner(backend, model)
    for rows in (3, 8, 1, 2):
        x = torch.randn(rows, 8, device=backend.device)
        assert torch.equal(one(x=x), other(x=x))
        torch.testing.assert_close(one(x=x), model(x).detach())


def test_the_report_says_what_is_captured_and_what_is_not(backend: GraphBackend) -> None:
    runner = open_runner(backend, Attends(3).to(backend.device))
    split = runner.report.split
    assert split is not None
    assert (split.route, split.segments, split.eager_pieces) == ("ops", 4, 3)
    assert {(key.graphs, key.eager_pieces) for key in runner.report.records} == {(4, 3)}
    assert split.eager == {"aten::scaled_dot_product_attention": 3}
    assert split.captured["aten::linear"] == 3
    assert split.captured["aten::sigmoid"] == 1
    assert type(runner.report).model_validate_json(runner.report.model_dump_json()) == runner.report
    text = str(runner.report)
    assert "4 segments, 3 eager pieces" in text
    assert "aten::scaled_dot_product_attention x3" in text
    by_modules = open_runner(backend, Attends(2).to(backend.device), splitting_modules=["layers.*"])
    assert by_modules.report.split is not None
    assert set(by_modules.report.split.eager) == {"layers.0", "layers.1"}
    assert by_modules.report.split.captured["aten::sigmoid"] == 1
    assert "aten::sigmoid" in str(by_modules.report)
    assert open_runner(backend, lambda x: x * 2, cudagraph_mode="FULL").report.split is None


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
def test_a_dimension_that_is_as_long_as_the_largest_batch(backend: GraphBackend, compiler: str) -> None:
    if compiler == "inductor" and backend.device.type == "cpu":
        pytest.skip("inductor needs a GPU")
    model = Cached().to(backend.device)
    runner = open_runner(backend, model, compiler=compiler)
    for rows in (1, 3, 8, 2):
        x = torch.randn(rows, 8).to(backend.device)
        torch.testing.assert_close(runner(x=x), model(x), atol=1e-5, rtol=1e-4)


def test_a_plan_without_piecewise_keys_is_not_traced(backend: GraphBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed batches run the model itself then, and need no trace at capture."""
    monkeypatch.setattr(PiecewiseBackend, "__call__", lambda *_: pytest.fail("traced"))
    config = validate_config(
        {
            "inputs": {"x": Input(shape=("num_tokens", 8), dtype="float32", pad=0)},
            "compilation": {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": [2, 4]},
            "device": backend.device.type,
        }
    )
    plan = build_plan(config)
    plan = plan.model_copy(update={"keys": tuple(key for key in plan.keys if key[0] is CUDAGraphMode.FULL)})
    model = Attends(layers=2).to(backend.device)
    runner = CaptureSession(plan, model, backend, config).run()
    assert runner.report.split is None
    x = torch.randn(3, 8).to(backend.device)
    torch.testing.assert_close(runner(x=x, uniform_decode=True), model(x))
    torch.testing.assert_close(runner(x=x, uniform_decode=False), model(x))
    assert (sum(runner.stats.replays.values()), sum(runner.stats.eager.values())) == (1, 1)


# --- inductor ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("partition", [False, True])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_inductor_compiles_each_segment_once_for_all_sizes(mode: str, partition: bool) -> None:
    backend = select_backend("cuda")
    model = Attends(layers=4).to(backend.device)
    runner = open_runner(
        backend, model, cudagraph_mode=mode, compiler="inductor", use_inductor_graph_partition=partition
    )
    splitter = runner._graphed.route.splitter
    assert splitter is not None
    # Twice, as one row is a trace of its own: the first segment, those between two attentions, the last one; or the
    # forward as a whole.
    assert len(splitter.compiled) == 2 * (1 if partition else 3)
    generator = torch.Generator().manual_seed(1)
    for rows in (1, 8, 3, 2, 5, 8, 1, 4, 7, 6):
        x = torch.randn(rows, 8, generator=generator).to(backend.device)
        torch.testing.assert_close(runner(x=x), model(x), atol=1e-5, rtol=1e-4)
    assert not runner.stats.eager
    if mode == "PIECEWISE" and not partition:  # inductor decomposes attention over heads of this size
        assert {r.graphs for r in runner.report.records} == {5}


@pytest.mark.gpu
@pytest.mark.parametrize("partition", [False, True])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_the_decoder_under_inductor(mode: str, partition: bool) -> None:
    """Attention writes into a buffer that inductor allocates, and into the cache."""
    close = {"rtol": 1e-3, "atol": 1e-4}
    replay_random_batches(
        select_backend("cuda"), mode, close=close, compiler="inductor", use_inductor_graph_partition=partition
    )


@pytest.mark.gpu
def test_an_operator_of_several_results_between_partitions() -> None:
    """Fused attention gives logsumexp and random states besides: a tuple, fresh on each call."""

    class Flash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 3 * 2 * 16 * 64) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                q, k, v = layer(x).to(torch.bfloat16).view(-1, 3, 2, 16, 64).unbind(1)
                x = x + F.scaled_dot_product_attention(q, k, v).float().mean(dim=(1, 2))[:, :8].tanh()
            return x

    backend = select_backend("cuda")
    torch.manual_seed(0)
    model = Flash().to(backend.device)
    runner = open_runner(backend, model, compiler="inductor", use_inductor_graph_partition=True)
    assert {r.graphs for r in runner.report.records} == {3}
    for rows in (1, 8, 3, 2, 5, 8, 1):
        x = torch.randn(rows, 8).to(backend.device)
        torch.testing.assert_close(runner(x=x), model(x), atol=2e-3, rtol=2e-2)
    assert not runner.stats.eager
    runner.close()


def test_a_partition_without_inductor_is_refused() -> None:
    with pytest.raises(ConfigError, match="use_inductor_graph_partition needs compiler: inductor"):
        validate_config({"compilation": {"use_inductor_graph_partition": True}})


# --- on demand ------------------------------------------------------------------------------------------------


class Softmax(nn.Module):
    """Rows of whole numbers, and one operator to split at; ``breaks`` makes it untraceable."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, device=device)
        self.breaks = False

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return torch.softmax(self.up(x), -1) * 2


def lazy(backend: GraphBackend, model: nn.Module, *splitting_ops: str, **compilation: Any) -> GraphRunner:
    ops = list(splitting_ops) or ["aten::softmax"]
    return open_runner(backend, model, splitting_ops=ops, capture_policy="lazy", **compilation)


def rows_of(backend: GraphBackend, count: int) -> Tensor:
    return torch.randn(count, 8, device=backend.device)


def run_without_capture(runner: GraphRunner, x: Tensor) -> Tensor:
    with runner.no_capture():
        found: Tensor = runner(x=x)
    return found


EAGER: dict[str, tuple[int, Callable[[GraphRunner, Tensor], Any]]] = {
    "too large": (9, lambda runner, x: runner(x=x)),
    "no_capture": (2, run_without_capture),
    "run_eagerly": (2, lambda runner, x: runner.run_eagerly(x=x)),
}


@pytest.mark.parametrize("first", [*EAGER, "graphed"])
def test_a_trace_on_demand_is_made_in_the_inference_mode_of_the_session(backend: GraphBackend, first: str) -> None:
    model = Softmax(backend.device)
    runner = lazy(backend, model)
    with torch.inference_mode():
        count, call = (2, lambda runner, x: runner(x=x)) if first == "graphed" else EAGER[first]
        x = rows_of(backend, count)
        torch.testing.assert_close(call(runner, x), model(x))
    for count in (2, 4):
        x = rows_of(backend, count)
        assert torch.equal(runner(x=x), runner.run_eagerly(x=x))
    assert runner.plan.capture_sizes == (2, 4)
    assert not runner.report.failed
    runner.close()


def test_a_trace_on_demand_is_made_in_the_autocast_of_the_session(backend: GraphBackend) -> None:
    model, kind = Softmax(backend.device), backend.device.type
    runner = lazy(backend, model)
    x = rows_of(backend, 2)
    with torch.autocast(kind, dtype=torch.bfloat16):
        runner.run_eagerly(x=x)
        with pytest.raises(CaptureError, match="autocast"):
            runner(x=x)
    assert torch.equal(runner(x=x), runner.run_eagerly(x=x))
    assert not runner.report.failed
    runner.close()
    with torch.autocast(kind, dtype=torch.bfloat16):
        runner = lazy(backend, model)
    runner.run_eagerly(x=x)
    with torch.autocast(kind, dtype=torch.bfloat16):
        assert torch.equal(runner(x=x), model(x))
    assert runner.plan.capture_sizes == (2,)
    runner.close()


def test_what_runs_eagerly_needs_no_trace_and_a_trace_that_fails_is_remembered(backend: GraphBackend) -> None:
    model = Softmax(backend.device)
    model.breaks = True
    runner = lazy(backend, model)
    for count, call in EAGER.values():
        x = rows_of(backend, count)
        torch.testing.assert_close(call(runner, x), model(x))
    assert not runner.report.failed
    for failures, count in enumerate((2, 2, 8, 8), start=1):
        x = rows_of(backend, count)
        torch.testing.assert_close(runner(x=x), model(x))
        with runner.stage(count) as buffers:
            buffers["x"].copy_(x)
        torch.testing.assert_close(buffers.output, model(x))
        assert len(runner.report.failed) == runner.stats.failures == (failures + 1) // 2
    for key in runner.report.failed:
        assert key.error == "CaptureError"
        assert key.detail.startswith(f"capture of PIECEWISE {key.descriptor}: the model cannot be traced as one graph")
    model.breaks = False
    runner(x=rows_of(backend, 4))
    runner(x=rows_of(backend, 2))
    assert runner.plan.capture_sizes == (4,), "a key that failed is not tried again by itself"
    runner.retry_failed()
    for count in (4, 2):
        x = rows_of(backend, count)
        assert torch.equal(runner(x=x), runner.run_eagerly(x=x))
    assert runner.plan.capture_sizes == (2, 4)
    runner.close()


def test_a_splitting_op_that_does_not_occur_is_remembered_on_demand(backend: GraphBackend) -> None:
    model = Softmax(backend.device)
    runner = lazy(backend, model, "aten::softmax", "aten::gelu")
    x = rows_of(backend, 2)
    for _ in range(2):
        torch.testing.assert_close(runner(x=x), model(x))
        [failed] = runner.report.failed
        assert failed.error == "ConfigError"
        assert "'aten::gelu' does not occur in the model" in failed.detail
    assert runner.stats.failures == 1
    runner.close()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("aten::sofmax", "aten::softmax"), ("softmax", "aten::softmax"), ("cgplan::atention", "cgplan::attention"),
        ("aten::softmax.nonesuch", "aten::softmax"), ("python::nonesuch", "namespace::name"),
    ],
)  # fmt: skip
def test_a_splitting_op_that_does_not_exist_is_an_error_at_the_start(
    backend: GraphBackend, name: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=f"the operator '{name}' does not exist") as caught:
        lazy(backend, Softmax(backend.device), "aten::softmax", name)
    assert hint in caught.value.remedy


def test_a_splitting_op_may_be_a_function_that_is_no_operator(backend: GraphBackend) -> None:
    assert not hasattr(torch.ops.aten, "softsign")
    runner = open_runner(
        backend, lambda x: F.softsign(x * 2) + 1, splitting_ops=["aten::softsign"], capture_policy="lazy"
    )
    x = rows_of(backend, 2)
    assert torch.equal(runner(x=x), F.softsign(x * 2) + 1)
    assert [piece.eager for piece in runner._graphed.route.pieces] == [False, True, False]
    runner.close()
    for name in ("aten::softmax.int", "aten::__add__", "python::getitem", "higher_order::cond"):
        lazy(backend, Softmax(backend.device), name).close()  # may occur in other models


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
    runner = CaptureSession(build_plan(config), lambda x: torch.softmax(up_to_eight(x), -1) * 2, backend, config).run()
    assert runner.plan.capture_sizes == (4, 8)
    for count in (3, 8):
        x = rows_of(backend, count)
        torch.testing.assert_close(runner(x=x), torch.softmax(x, -1) * 2)
    runner.close()


def branches_on_a_value(x: Tensor) -> Tensor:
    if x.max().item() > 5:
        return x.softmax(1)
    return x.softmax(1) * 2


def test_code_that_depends_on_a_value_is_named(backend: GraphBackend) -> None:
    with pytest.raises(HostSyncError, match=r"depends on a value .*test_piecewise\.py:\d+: `if x\.max\(\)\.item"):
        open_runner(backend, branches_on_a_value, splitting_ops=["aten::softmax"])
