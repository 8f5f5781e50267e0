"""BreakableCUDAGraphWrapper, and CUDAGraphWrapper beside it."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import same
from pieces import Boom, Broken, add_in_place, doubled, explode, randn
from pieces import open_runner as open_split
from torch import Tensor, nn

from cgplan import (
    AddressError,
    BatchDescriptor,
    BreakableCUDAGraphCapture,
    BreakableCUDAGraphWrapper,
    CaptureError,
    CaptureSession,
    CUDAGraphMode,
    CUDAGraphOptions,
    CUDAGraphWrapper,
    GraphRunner,
    Input,
    SealedError,
    build_plan,
    forward_context,
    get_forward_context,
)
from cgplan.backends import GraphBackend
from cgplan.config import validate_config
from cgplan.piecewise.breakable import Breaks

pytestmark = pytest.mark.usefixtures("quiet_collector")

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


def open_runner(
    backend: GraphBackend,
    model: Callable[..., Any],
    mode: str,
    sizes: list[int],
    **compilation: Any,
) -> GraphRunner:
    config = validate_config(
        {
            "inputs": {"x": Input(shape=("num_tokens", 6), dtype="float32", pad=0)},
            "compilation": {
                "cudagraph_mode": mode,
                "cudagraph_capture_sizes": sizes,
                "piecewise": "wrappers",
                **compilation,
            },
            "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 64},
            "device": backend.device.type,
        }
    )
    return CaptureSession(build_plan(config), model, backend, config).run()


def test_the_wrapper_captures_once_for_each_key(backend: GraphBackend) -> None:
    calls: list[int] = []

    def forward(x: Tensor, *, bias: float = 1.0) -> Tensor:
        calls.append(len(x))
        return doubled(x * 2) + bias

    wrapper = BreakableCUDAGraphWrapper(
        forward, backend=backend, options=CUDAGraphOptions(num_of_warmups=2)
    )
    x = randn(backend, 4, 6)
    assert wrapper.runtime_mode is PIECEWISE
    same(wrapper(x), x * 4 + 1)  # no context: as it is
    with forward_context(FULL, BatchDescriptor(4)):
        same(wrapper(x), x * 4 + 1)  # another mode: as it is
    assert not wrapper.entries
    calls.clear()
    with torch.no_grad():
        for seed in range(3):
            x.copy_(randn(backend, 4, 6, seed=seed))
            with forward_context(PIECEWISE, BatchDescriptor(4)):
                same(wrapper(x), x * 4 + 1)
    assert calls == [4, 4, 4], "two warm-ups and the capture"
    entry = wrapper.entries[BatchDescriptor(4)]
    assert isinstance(entry.graph, BreakableCUDAGraphCapture)
    assert entry.segments == entry.graph.graphs
    assert (len(entry.segments), entry.eager_pieces) == (2, 1)
    assert entry.capture_seconds > 0
    wrapper.reset()
    assert not wrapper.entries
    with pytest.raises(CaptureError, match="was reset"):
        entry.graph.replay()


@pytest.mark.parametrize("inference", [False, True])
def test_the_wrapper_copies_arguments_that_may_lie_anywhere(
    backend: GraphBackend, inference: bool
) -> None:
    """Segments and eager pieces alike read them from memory that each replay fills."""

    def first_in_a_segment(x: Tensor, y: Tensor) -> Tensor:
        return doubled(x * 2) + y

    def first_in_a_piece(x: Tensor, y: Tensor) -> Tensor:
        return doubled(doubled(x)) + x * y

    def handed_back(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.t()

    def written_to(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        add_in_place(x)
        return x + y

    forwards = (first_in_a_segment, first_in_a_piece, handed_back, written_to)
    pool, y = backend.new_pool(), randn(backend, 64, 64)
    options = CUDAGraphOptions(
        copied_arguments=(0,), num_of_warmups=0
    )  # a warm-up would write to the caller's tensor
    wrappers = [
        BreakableCUDAGraphWrapper(f, backend=backend, pool=pool, options=options) for f in forwards
    ]
    plain = BreakableCUDAGraphWrapper(first_in_a_segment, backend=backend, pool=pool)
    held = [
        randn(backend, 64, 64, seed=seed) for seed in range(4)
    ]  # all at once, so that each lies elsewhere
    with (
        torch.inference_mode(inference),
        torch.no_grad(),
        forward_context(PIECEWISE, BatchDescriptor(64)),
    ):
        for step in range(8):
            y.copy_(randn(backend, 64, 64, seed=100 + step))
            for wrapper, forward in zip(wrappers, forwards, strict=True):
                x = held[step % 4]
                found = wrapper(x, y)
                same(found, forward(x.clone(), y))
                same(x, randn(backend, 64, 64, seed=step % 4))
        plain(held[0], y)
        with pytest.raises(AddressError, match=r"args\[0\]"):
            plain(held[1], y)


def test_a_failed_capture_of_the_wrapper_is_tried_again(backend: GraphBackend) -> None:
    x, fail = randn(backend, 4, 6), [True]

    def forward(x: Tensor) -> Tensor:
        h = doubled(x * 2)
        if fail[0]:
            explode()
        return h + 1

    wrapper = BreakableCUDAGraphWrapper(
        forward, backend=backend, options=CUDAGraphOptions(num_of_warmups=0)
    )
    with torch.no_grad(), forward_context(PIECEWISE, BatchDescriptor(4)):
        with pytest.raises(Boom):
            wrapper(x)
        assert not wrapper.entries
        fail[0] = False
        same(wrapper(x), x * 4 + 1)
        x.add_(1)
        same(wrapper(x), x * 4 + 1)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_a_session_with_a_breakable_model(backend: GraphBackend, mode: str) -> None:
    """FULL outside and PIECEWISE inside, in one model and one pool, the report counting both."""
    model = Broken().to(backend.device).eval()
    with backend.session(), torch.no_grad():
        model(randn(backend, 4, 6))  # workspaces of the capture stream, which stay
    before = backend.memory().reserved
    breaks = Breaks(model, ["layers.*.mix"], (), backend.device.type)
    wrapper = BreakableCUDAGraphWrapper(lambda x: breaks.forward(model, x), backend=backend)
    runner = open_runner(backend, lambda x: wrapper(x), mode, [2, 4, 8], verify="off")
    records = {(r.mode, r.descriptor.num_tokens): r for r in runner.report.records}
    found = records[PIECEWISE, 4]
    assert (found.graphs, found.eager_pieces) == (
        2,
        2,
    )  # mix comes first: its empty segment is dropped
    assert found.nodes is not None
    assert found.nodes >= 2
    mixed = [size for size in (2, 4, 8) if (PIECEWISE, size) in records]
    assert sorted(key.num_tokens for key in wrapper.entries) == mixed == [2, 4, 8]
    if mode == "FULL_AND_PIECEWISE":
        assert (records[FULL, 4].graphs, records[FULL, 4].eager_pieces) == (1, 0)
    mix = model.layers[0]["mix"]
    mix.eager_runs = 0
    for index, tokens in enumerate((3, 8, 1, 4, 2, 7)):
        x = randn(backend, tokens, 6, seed=tokens)
        uniform = bool(index % 2) and mode == "FULL_AND_PIECEWISE"
        runs = mix.eager_runs
        output = runner(x=x, uniform_decode=uniform).clone()
        assert mix.eager_runs - runs == (0 if uniform else 1)
        same(output, runner.run_eagerly(x=x, uniform_decode=uniform))
    with (
        pytest.raises(SealedError),
        torch.no_grad(),
        forward_context(PIECEWISE, BatchDescriptor(5), scope=runner.graphs.scope),
    ):
        wrapper(randn(backend, 5, 6))
    runner.close()
    assert not wrapper.entries
    del runner, output
    gc.collect()
    backend.release_cached()
    assert backend.memory().reserved <= before


def test_a_failed_session_frees_the_segments(backend: GraphBackend) -> None:
    model = Broken().to(backend.device).eval()
    breaks = Breaks(model, ["layers.*.mix"], (), backend.device.type)

    def fails_for_two(x: Tensor) -> Tensor:
        y = breaks.forward(model, x)
        if len(x) == 2 and get_forward_context().runtime_mode is PIECEWISE:
            raise Boom
        return y

    wrapper = BreakableCUDAGraphWrapper(fails_for_two, backend=backend)
    with backend.session(), torch.no_grad():
        model(randn(backend, 4, 6))  # workspaces of the capture stream, which stay
    before = backend.memory().reserved
    with pytest.raises(CaptureError, match="capture of PIECEWISE size=2 failed"):
        open_runner(backend, wrapper, "PIECEWISE", [2, 4])
    gc.collect()
    backend.release_cached()
    assert not wrapper.entries
    assert backend.memory().reserved <= before
    same(model(randn(backend, 3, 6)).shape, torch.Size([3, 6]))


class Wrapping(nn.Module):
    """Holds a wrapper of its own layer, as the wrapper's docstring says."""

    def __init__(self, kind: type[CUDAGraphWrapper], backend: GraphBackend) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.run = kind(self.layer, PIECEWISE, backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x) + 1


@pytest.mark.parametrize("kind", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
def test_a_copied_wrapper_has_captured_nothing(
    backend: GraphBackend, kind: type[CUDAGraphWrapper]
) -> None:
    model = Wrapping(kind, backend).to(backend.device)
    x = randn(backend, 2, 6)
    with forward_context(PIECEWISE, BatchDescriptor(2)):
        model(x)
        copied = copy.deepcopy(model)
        assert type(copied.run) is kind
        assert not copied.run.entries
        assert copied.run.unwrap() is copied.layer
        assert copied.run.backend is backend
        with torch.no_grad():
            copied.layer.weight.zero_()
            copied.layer.bias.zero_()
            wanted = model.layer(x) + 1
            first = copied(x).clone()
            same(copied(x), torch.ones_like(x))
            same(first, torch.ones_like(x))
            same(model(x), wanted)
    assert len(model.run.entries) == len(copied.run.entries) == 1


def test_captures_are_logged(backend: GraphBackend, caplog: pytest.LogCaptureFixture) -> None:
    x, quiet = randn(backend, 4, 6), CUDAGraphOptions(debug_log_enable=False)
    wrappers = [
        BreakableCUDAGraphWrapper(doubled, backend=backend, options=o)
        for o in (CUDAGraphOptions(), quiet)
    ]
    with (
        caplog.at_level(logging.DEBUG, logger="cgplan"),
        forward_context(PIECEWISE, BatchDescriptor(4)),
    ):
        for wrapper in wrappers * 2:
            wrapper(x)
    found = [r.getMessage() for r in caplog.records if r.name.startswith("cgplan")]
    assert found == ["capturing a PIECEWISE graph for size=4"]


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

    runner = open_split(backend, model, piecewise="wrappers")
    for rows in (8, 1, 3, 8, 2):
        x = torch.randn(rows, 8, device=backend.device)
        y = x * 2
        z = (y + 1) * 3 + y
        assert torch.equal(runner(x=x), (z - 1).abs() * z)
    assert runner.report.split is not None
    assert runner.report.split.captured == {
        "aten::mul": 3,
        "aten::add": 2,
        "aten::sub": 1,
        "aten::abs": 1,
    }
    assert runner.report.split.eager == {}


class Wrapped(torch.nn.Module):
    """Two segments of its own."""

    def __init__(self, mode: CUDAGraphMode) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.run_first, self.run_second = (
            CUDAGraphWrapper(m, mode) for m in (self.first, self.second)
        )
        self.middle = torch.nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.run_second(self.middle(self.run_first(x)))


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_wrappers_inside_a_capture_of_the_whole_are_pointed_out(
    backend: GraphBackend, mode: str
) -> None:
    model = Wrapped(CUDAGraphMode[mode]).to(backend.device)
    words = (
        r"graph wrappers, and a session captures it as a whole, at .*test_wrapper\.py:\d+: `return"
    )
    modules = {"splitting_modules": ["middle"]} if mode == "PIECEWISE" else {}
    with pytest.raises(CaptureError, match=words) as caught:
        open_split(backend, model, cudagraph_mode=mode, **modules)
    assert type(caught.value) is CaptureError
    assert "piecewise: wrappers" in caught.value.remedy
