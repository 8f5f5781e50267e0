"""Breakable capture: segments with eager pieces between them, on the tape and on CUDA alike."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import random
import re
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

import pytest
import torch
from checks import host_sync_of, same
from torch import Tensor, nn

import cgplan
from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.context import current_forward_context, forward_context, get_forward_context
from cgplan.captures.failures import drop_locals
from cgplan.config import Config, Input, validate_config
from cgplan.errors import (
    AddressError,
    CaptureError,
    CgplanError,
    ConfigError,
    HostSyncError,
    ModelError,
    SealedError,
)
from cgplan.graphs.wrapper import CUDAGraphOptions, CUDAGraphWrapper
from cgplan.models.decoder import Decoder, ExampleBatch, build, example_batch
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.piecewise.breakable import BreakableCUDAGraphCapture, Segment
from cgplan.piecewise.breaks import eager_break_during_capture
from cgplan.piecewise.eager_piece import EagerPiece
from cgplan.piecewise.modules import break_at_modules
from cgplan.piecewise.wrapper import BreakableCUDAGraphWrapper
from cgplan.planning import build_plan
from cgplan.runner.runner import GraphRunner
from cgplan.runner.session import CaptureSession, describe_split

pytestmark = pytest.mark.usefixtures("quiet_collector")

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
MIB = 1 << 20


def capture(backend: GraphBackend, forward: Callable[[], Any], pool: Any = None) -> tuple[Any, Any]:
    """(capture, output) of a forward, warmed up as a session does."""
    with backend.session(), torch.no_grad():
        forward()
        with BreakableCUDAGraphCapture(backend, backend.new_pool() if pool is None else pool) as made:
            output = forward()
    return made, output


def randn(backend: GraphBackend, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(backend.device)


def kinds(made: BreakableCUDAGraphCapture) -> str:
    return "".join("S" if isinstance(item, Segment) else "e" for item in made.segments)


# --- replay equals eager --------------------------------------------------------------------------------------


@eager_break_during_capture
def doubled(x: Tensor) -> Tensor:
    """Through the host, so that inside a segment it would be an error."""
    return torch.tensor(x.tolist(), device=x.device) * 2


@eager_break_during_capture
def add_in_place(x: Tensor, value: float = 1.0) -> None:
    x.add_(len(x.tolist()) * value)


@eager_break_during_capture
def add_and_return(x: Tensor) -> Tensor:
    return x.add_(len(x.tolist()))


@eager_break_during_capture
def parts(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    made = torch.tensor(x.tolist(), device=x.device)
    return made + 1, {"order": made.argsort(0), "positive": made > 0, "rows": len(x), "none": None, "half": made.half()}


@eager_break_during_capture
def view_of_argument(x: Tensor) -> Tensor:
    return x.mul_(x.sum().item()).t()[1:]


@eager_break_during_capture
def chunks(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    whole = torch.tensor(x.tolist(), device=x.device)
    return whole, whole[:, :3], whole.t()


@eager_break_during_capture
def twice(x: Tensor) -> list[Tensor]:
    made = doubled(x)  # a piece inside a piece is part of it
    return [made, made]


@eager_break_during_capture
def expanded(x: Tensor) -> tuple[Tensor, Tensor]:
    column = torch.tensor(x.tolist(), device=x.device)[:, :1]
    return column.expand(-1, 6), column


@eager_break_during_capture
def pop_all(given: list[Tensor], *, more: dict[str, Any]) -> Tensor:
    total = more.pop("start") * more["factor"]
    while given:
        total = total + doubled(given.pop())
    return total


@eager_break_during_capture
def nothing(*_: Any) -> None:
    """Only a break."""


@eager_break_during_capture
def last_column(x: Tensor) -> Tensor:
    return doubled(x)[:, -1]


CASES: dict[str, tuple[Callable[[Tensor], Any], str]] = {}


def case(segments: str) -> Callable[[Callable[[Tensor], Any]], Callable[[Tensor], Any]]:
    """A forward of x [4, 6] and the items that its capture has: S for a segment, e for an eager piece."""

    def register(forward: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        CASES[forward.__name__] = (forward, segments)
        return forward

    return register


@case("SeSeS")
def chain_of_fresh_tensors(x: Tensor) -> Any:
    return doubled(doubled(x * 3) - 1).relu() + x


@case("SeSeS")
def in_place(x: Tensor) -> Any:
    h = x * 3
    add_in_place(h)
    h = h * 2
    add_in_place(h, value=0.5)
    return h + 1


@case("SeSeS")
def in_place_and_returned(x: Tensor) -> Any:
    return add_and_return(add_and_return(x * 3) * 2) * 2


@case("SeS")
def tuples_and_dicts(x: Tensor) -> Any:
    made, more = parts(x * 2)
    where = torch.where(more["positive"], made, -made)
    return made.gather(0, more["order"]), where * more["rows"], more["half"].float(), more["none"]


@case("SeS")
def view_of_its_argument(x: Tensor) -> Any:
    h = x * 2
    view = view_of_argument(h)
    view.add_(1)
    return h, view.contiguous()


@case("SeS")
def results_that_share_memory(x: Tensor) -> Any:
    whole, left, turned = chunks(x * 2)
    left.mul_(3)
    turned[5].neg_()
    return whole + 0, turned.sum(0)


@case("SeS")
def one_result_twice(x: Tensor) -> Any:
    first, second = twice(x * 2)
    first.add_(1)
    return second * 2


@case("SeS")
def results_that_repeat_elements(x: Tensor) -> Any:
    wide, column = expanded(x * 2)
    return wide + x, column * 2


@case("SeS")
def result_with_strides(x: Tensor) -> Any:
    return last_column(x + 1) * 2


@case("SeS")
def arguments_in_containers(x: Tensor) -> Any:
    return pop_all([x * 2, x * 3], more={"start": x + 1, "factor": 2.0}) - 1


@case("eS")
def piece_first(x: Tensor) -> Any:
    return doubled(x) + 1


@case("Se")
def piece_last(x: Tensor) -> Any:
    return doubled(x + 1)


@case("e")
def one_piece_alone(x: Tensor) -> Any:
    return doubled(x)


@case("SeeSe")
def pieces_in_a_row(x: Tensor) -> Any:
    h = doubled(doubled(x + 1)) * 3
    return doubled(h)


@case("ee")
def pieces_alone(x: Tensor) -> Any:
    return doubled(doubled(x).t())


@case("SeSeSeSeS")
def piece_in_a_loop(x: Tensor) -> Any:
    h, first = x + 1, x * 2
    for layer in range(4):
        h = doubled(h * 0.5) + first + layer
    return h


@case("SeS")
def views_alone_before_a_piece_make_no_segment_of_their_own(x: Tensor) -> Any:
    nothing(x.t())
    h = x.t() * 2
    nothing(h)
    return h.t() + 1


CASES["views_alone_before_a_piece_make_no_segment_of_their_own"] = (
    views_alone_before_a_piece_make_no_segment_of_their_own,
    "eSeS",
)


@case("SeSeSeS")
def residual_that_the_next_segment_drops(x: Tensor) -> Any:
    """Its block is reused while the segment that reads it first is captured."""
    h = x.tanh()
    for _ in range(3):
        h = h + doubled(h * 0.5)
        h = h + ((h * 3).relu() - (h + 1).sigmoid()) * 2
    return h


@case("S")
def no_piece(x: Tensor) -> Any:
    return x * 2 + 1


@case("SeS")
def result_is_written_by_the_next_segment(x: Tensor) -> Any:
    h = doubled(x + 1)
    h.mul_(2).add_(x)
    return h


@case("SeS")
def indices_from_the_host(x: Tensor) -> Any:
    _, more = parts(x * 2)
    table = torch.arange(4.0, device=x.device)
    return table[more["order"]], x[more["order"][:, 0]]


@case("SeS")
def input_as_an_output(x: Tensor) -> Any:
    h = x * 2
    nothing()
    return h + 1, x, x[1:]


@case("SeS")
def autocast_inside(x: Tensor) -> Any:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        h = x @ x.t()
        h = product(h.float())
    return h * 2


@eager_break_during_capture
def conjugates(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = torch.complex(doubled(x), x + 1)
    return made, made.conj(), made.imag, made.conj().imag


@case("SeS")
def views_that_differ_in_sign_alone(x: Tensor) -> Any:
    made, turned, imag, negative = conjugates(x * 2)
    results = made + 0, turned * 2, imag + 0, negative * 2
    turned.mul_(1j)
    negative.add_(1)
    return *results, made + 0


@eager_break_during_capture
def conjugate_of_argument(x: Tensor) -> Tensor:
    return x.mul_(len(x.tolist())).conj()


@case("SeS")
def conjugate_of_its_argument(x: Tensor) -> Any:
    h = torch.complex(x, x + 1)
    turned = conjugate_of_argument(h)
    return turned * 2, h * 2


@eager_break_during_capture
def product(x: Tensor) -> Tensor:
    return doubled(x) @ x


@pytest.mark.parametrize("name", sorted(CASES))
def test_replay_equals_eager_bit_for_bit(backend: GraphBackend, name: str) -> None:
    forward, segments = CASES[name]
    x = randn(backend, 4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of empty graphs; there are none
        made, output = capture(backend, lambda: forward(x))
    same(output, forward(x.clone()))  # a capture is a real forward
    assert kinds(made) == segments
    assert (made.num_graphs, made.num_eager_breaks) == (segments.count("S"), segments.count("e"))
    assert all(backend.num_nodes(graph) for graph in made.graphs)
    for seed in (1, 2, 3, 4):
        fresh = randn(backend, 4, 6, seed=seed)
        x.copy_(fresh)
        made.replay()
        with torch.no_grad():
            same(output, forward(fresh))
        same(x, fresh)


class Counting(nn.Module):
    """A layer whose piece is a method and moves a state on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    @eager_break_during_capture
    def step(self, x: Tensor) -> Tensor:
        """Add the state."""
        self.count += 1
        return x + self.count * len(x.tolist())

    def forward(self, x: Tensor) -> Tensor:
        self.count *= 2
        return self.step(x * 2) + self.count


def test_methods_and_state(backend: GraphBackend) -> None:
    """State moves on once for the capture and once for each replay, in segments and in pieces."""
    model, other = Counting().to(backend.device), Counting().to(backend.device)
    x = randn(backend, 2, 3)
    made, output = capture(backend, lambda: model(x))
    with torch.no_grad():
        other(x)
        same(output, other(x))
        for seed in range(3):
            x.copy_(randn(backend, 2, 3, seed=seed))
            made.replay()
            same(output, other(x))
            same(model.count, other.count)


def test_random_numbers_are_those_of_eager_calls(backend: GraphBackend) -> None:
    """One forward's for the capture, and one more forward's for each replay, in segments and in pieces."""

    @eager_break_during_capture
    def noisy(x: Tensor) -> Tensor:
        return doubled(x) + torch.rand_like(x)

    def forward() -> Tensor:
        return noisy(x + torch.rand_like(x)) * torch.rand_like(x)

    x = randn(backend, 64, 64)
    with backend.session(), torch.no_grad():
        torch.manual_seed(3)
        eager = [forward() for _ in range(3)]
        torch.manual_seed(3)
        with BreakableCUDAGraphCapture(backend, backend.new_pool()) as made:
            output = forward()
        same(output, eager[0])
        for wanted in eager[1:]:
            made.replay()
            same(output, wanted)


def test_the_decorator_keeps_the_function(backend: GraphBackend) -> None:
    assert str(inspect.signature(add_in_place)) == "(x: 'Tensor', value: 'float' = 1.0) -> 'None'"
    assert (doubled.__name__, doubled.__doc__) == ("doubled", doubled.__wrapped__.__doc__)
    assert Counting.step.__qualname__ == "Counting.step"
    x = randn(backend, 2, 3)
    same(doubled(x), x * 2)


def test_inference_mode_and_grad_mode_are_those_of_the_capture(backend: GraphBackend) -> None:
    seen: list[tuple[bool, bool]] = []

    @eager_break_during_capture
    def piece(x: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return x.add_(1) * 2

    x = randn(backend, 2, 3)
    with backend.session(), torch.inference_mode(), BreakableCUDAGraphCapture(backend, backend.new_pool()) as made:
        output = piece(x * 2) + 1
    made.replay()
    with torch.no_grad():
        made.replay()
    assert seen == [(False, True)] * 3
    with torch.inference_mode():
        same(output.clone(), (x * 2 + 1) * 2 + 1)

    def forward() -> Tensor:
        with torch.inference_mode():  # around the break alone
            h = piece(x * 2)
        return h + 1

    made, output = capture(backend, forward)
    x.add_(1)
    made.replay()
    same(output, forward())

    weight = nn.Parameter(torch.ones(3, device=backend.device))
    made, output = capture(backend, lambda: eager_break_during_capture(lambda h: h * weight)(x * 2) + 1)
    with torch.enable_grad():
        made.replay()
    assert not output.requires_grad


# --- the capture object ---------------------------------------------------------------------------------------


def test_add_eager_without_a_decorator(backend: GraphBackend) -> None:
    x = randn(backend, 2, 3)
    with backend.session(), torch.no_grad(), BreakableCUDAGraphCapture(backend, backend.new_pool()) as made:
        h = made.add_eager(lambda h, function: torch.tensor(h.tolist(), device=h.device), x * 2, function=None)
        y = h + 1
    first, piece, second = made.segments
    assert isinstance(first, Segment)
    assert isinstance(second, Segment)
    assert isinstance(piece, EagerPiece)
    assert "lambda" in piece.name
    assert f"{__file__}:" in piece.line
    assert "add_eager(lambda h" in piece.line
    x.add_(1)
    made.replay()
    same(y, x * 2 + 1)


def two_captures(backend: GraphBackend, pool: Any) -> None:
    with BreakableCUDAGraphCapture(backend, pool), BreakableCUDAGraphCapture(backend, pool):
        pass


def test_one_capture_at_a_time_in_each_thread(backend: GraphBackend) -> None:
    x, pool = randn(backend, 2, 3), backend.new_pool()
    seen: list[Any] = []

    def elsewhere() -> None:
        seen.append(doubled(x))  # no capture is active in this thread

    with backend.session(), torch.no_grad():
        with pytest.raises(CaptureError, match="inside another one") as caught:
            two_captures(backend, pool)
        assert __file__ in caught.value.message

        def nested(h: Tensor) -> Tensor:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            with pytest.raises(CaptureError, match="inside another one"), BreakableCUDAGraphCapture(backend, pool):
                pass
            with pytest.raises(CaptureError, match="outside of a segment"):
                again.add_eager(doubled, h)
            return h + 1

        with BreakableCUDAGraphCapture(backend, pool) as again:
            y = again.add_eager(nested, x * 2)
    same(y, x * 2 + 1)
    same(seen, [x * 2])


def test_a_capture_is_used_once_and_replays_until_it_is_reset(backend: GraphBackend) -> None:
    x, pool = randn(backend, 256, 1024), backend.new_pool()
    fresh = BreakableCUDAGraphCapture(backend, pool)
    for call in (fresh.replay, lambda: fresh.add_eager(doubled, x), lambda: fresh.new_slot(x)):
        with pytest.raises(CaptureError):
            call()
    made, y = capture(backend, lambda: doubled(x * 2) + 1, pool)
    with pytest.raises(CaptureError, match="used before"), backend.session(), made:
        pass
    with pytest.raises(CaptureError, match="outside of a segment"):
        made.add_eager(doubled, x)
    made.replay()
    same(y, x * 4 + 1)
    assert backend.pool_bytes(pool) >= x.nbytes
    graphs = made.graphs  # reset, although somebody still has them
    made.reset()
    made.reset()
    assert (len(graphs), made.segments) == (2, ())
    with pytest.raises(CaptureError, match="was reset"):
        made.replay()
    del y
    backend.release_cached()
    assert backend.pool_bytes(pool) == 0


def test_captures_in_a_loop_under_one_name(backend: GraphBackend) -> None:
    """The name lets the capture before go when the next one has begun: a graph must not be destroyed then."""
    x, pool = randn(backend, 64, 64), backend.new_pool()
    doubled(x)
    for _ in range(3):
        with backend.session(), torch.no_grad(), BreakableCUDAGraphCapture(backend, pool) as made:
            y = doubled(x * 2) + 1
        x.add_(1)
        made.replay()
        same(y, x * 4 + 1)
    gone = weakref.ref(made)
    del made
    assert gone() is None


def test_empty_segments_keep_no_graph(backend: GraphBackend) -> None:
    x, pool = randn(backend, 256, 1024), backend.new_pool()
    made, y = capture(backend, lambda: doubled(doubled(doubled(x))), pool)
    assert kinds(made) == "eee"
    assert made.graphs == ()
    for seed in (1, 2):  # the slots are still there, whoever else uses the pool and leaves it
        other, z = capture(backend, lambda: doubled(x + 1) * 2, pool)
        other.reset()
        del other, z
        backend.release_cached()
        x.copy_(randn(backend, 256, 1024, seed=seed))
        made.replay()
        same(y, x * 8)
        y = backend.borrow(y)
    assert backend.pool_bytes(pool) > 0
    made.reset()
    del y
    backend.release_cached()
    assert backend.pool_bytes(pool) == 0


# --- what goes wrong ------------------------------------------------------------------------------------------


class Boom(Exception):
    pass


def explode(*_: Any) -> None:
    raise Boom


def fails_in_the_first_segment(x: Tensor) -> Any:
    explode(x * 2)


def fails_in_a_later_segment(x: Tensor) -> Any:
    h = doubled(x * 2) * 2
    explode(h)


def fails_in_a_piece(x: Tensor) -> Any:
    h = doubled(x * 2) * 2
    return eager_break_during_capture(explode)(h) or h


def fails_in_the_first_piece(x: Tensor) -> Any:
    eager_break_during_capture(explode)(x)


@pytest.mark.parametrize(
    "forward", [fails_in_the_first_segment, fails_in_a_later_segment, fails_in_a_piece, fails_in_the_first_piece]
)
def test_an_exception_ends_the_capture_cleanly(backend: GraphBackend, forward: Callable[[Tensor], Any]) -> None:
    x, pool = randn(backend, 256, 1024), backend.new_pool()
    with backend.session(), torch.no_grad():
        doubled(x)
        before = backend.memory().reserved
        made = BreakableCUDAGraphCapture(backend, pool)
        with pytest.raises(Boom), made:
            forward(x)
    gc.collect()
    backend.release_cached()
    assert backend.pool_bytes(pool) == 0
    assert backend.memory().reserved <= before
    assert made.segments == ()
    same(doubled(x) + 1, x * 2 + 1)  # the model runs eagerly
    again, y = capture(backend, lambda: doubled(x * 2) + 1, pool)
    x.add_(1)
    again.replay()
    same(y, x * 4 + 1)


def test_other_graphs_of_the_pool_survive_a_failure(backend: GraphBackend) -> None:
    x, pool = randn(backend, 64, 64), backend.new_pool()
    made, y = capture(backend, lambda: doubled(x * 2) + 1, pool)
    for forward in (fails_in_a_later_segment, fails_in_a_piece):
        with backend.session(), torch.no_grad(), pytest.raises(Boom), BreakableCUDAGraphCapture(backend, pool):
            forward(x)
        x.add_(1)
        made.replay()
        same(y, x * 4 + 1)


def test_a_model_that_swallows_the_error_of_a_piece(backend: GraphBackend) -> None:
    x, pool = randn(backend, 64, 64), backend.new_pool()

    def forward() -> Tensor:
        h = x * 2
        try:
            eager_break_during_capture(explode)(h)
        except Boom:
            h = h + 1
        return doubled(h)

    with backend.session(), torch.no_grad():
        with pytest.raises(CaptureError, match="eager piece explode failed"), BreakableCUDAGraphCapture(backend, pool):
            forward()
        backend.release_cached()
        assert backend.pool_bytes(pool) == 0
    same(forward(), (x * 2 + 1) * 2)


def test_the_host_is_refused_in_a_segment_after_a_piece() -> None:
    backend = select_backend("cpu")
    x = randn(backend, 4, 6)
    with pytest.raises(HostSyncError, match="needs the host"):
        capture(backend, lambda: (doubled(x) * 2).sum().item(), None)  # (the warm-up is no capture)
    made, y = capture(backend, lambda: doubled(x) * 2)
    made.replay()
    same(y, x * 4)


def test_the_search_for_a_host_operator_passes_over_pieces() -> None:
    """On CUDA the driver says only that something needs the host; a second run, which looks for it, names it."""
    x = torch.ones(4, 6)

    def forward() -> None:
        h = view_of_argument(x * 2)  # .item() inside
        h.nonzero()  # this one

    found = host_sync_of(forward, torch.device("cpu"))
    assert found is not None
    assert "aten::nonzero" in found.message
    assert "# this one" in found.message
    assert host_sync_of(lambda: x.nonzero(), torch.device("cpu")) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_side_stream_must_be_joined_before_a_break(at_the_end: bool) -> None:
    backend = select_backend("cuda")
    x, side, pool = randn(backend, 64, 64), torch.cuda.Stream(), backend.new_pool()

    def forward(join: bool) -> Tensor:
        h = doubled(x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            h = h * 3
        if join:
            torch.cuda.current_stream().wait_stream(side)
        if not at_the_end:
            h = doubled(h)  # the line of the break
        return h

    with pytest.raises(CaptureError, match="side stream that was not joined") as caught:
        capture(backend, lambda: forward(join=torch.cuda.is_current_stream_capturing() is False), pool)
    assert "wait_stream(side)" in caught.value.remedy
    assert ("the end" if at_the_end else "h = doubled(h)  # the line of the break") in caught.value.message
    drop_locals(caught.value)
    backend.release_cached()
    assert backend.pool_bytes(pool) == 0
    made, y = capture(backend, lambda: forward(join=True), pool)
    x.add_(1)
    made.replay()
    same(y, x * (6 if at_the_end else 12))


class Changing:
    """A piece that returns what it is told to."""

    result: Any = None

    def __call__(self, x: Tensor) -> Any:
        return self.result(x) if callable(self.result) else self.result


@pytest.mark.parametrize(
    ("first", "later", "said"),
    [
        (
            lambda x: x * 2,
            lambda x: x[:1] * 2,
            r"a tensor of shape \[1, 3\].*at capture it was a tensor of shape \[2, 3\]",
        ),
        (lambda x: x * 2, lambda x: x.double(), "float64"),
        (lambda x: x * 2, lambda x: (x * 2, x), "structure"),
        (lambda x: x * 2, None, "None"),
        (
            lambda x: x * 2,
            lambda x: (x * 2).cpu() if x.is_cuda else torch.empty_like(x, device="meta"),
            "on (cpu|meta)",
        ),
        (lambda x: {"a": x * 2}, lambda x: {"b": x * 2}, "structure"),
        (lambda x: x[:1], lambda x: x[1:], "argument's memory"),
        (lambda x: x, lambda x: x.clone(), "argument's memory"),
        (lambda x: x, lambda x: x.view(3, 2), "argument's memory"),
        (lambda x: x, lambda x: torch._neg_view(x), "argument's memory"),
        (lambda x: [x * 2, 3], lambda x: [x * 2, 4], "returned 4 on replay; at capture it was 3"),
        (3, 3.0, "returned 3.0 on replay"),
        (True, 1, "returned 1 on replay"),
        (None, lambda x: x * 2, "tensor"),
        (lambda x: [y := x * 2, y], lambda x: [x * 2, x * 3], "does not share memory with other results as it did"),
        (lambda x: [y := x * 2, y[1:]], lambda x: [x * 2, x[1:] * 2], "does not share memory"),
        (lambda x: [y := x * 2, y[1:]], lambda x: [y := x * 2, y[:1]], "does not share memory"),
        (lambda x: [y := x[:, 1:] * 2, y], lambda x: [y := x[:, 1:] * 2, y.t()], "does not share memory"),
        (lambda x: [y := x * 2, y], lambda x: [y := x * 2, torch._neg_view(y)], "does not share memory"),
        (lambda x: [y := x * 2, y], lambda x: [y := x * 2, y.int()], "int32, .*in one memory with another result"),
    ],
)
def test_a_result_that_changes_is_refused(backend: GraphBackend, first: Any, later: Any, said: str) -> None:
    x, piece = randn(backend, 2, 3), Changing()
    piece.result = first
    with backend.session(), torch.no_grad(), BreakableCUDAGraphCapture(backend, backend.new_pool()) as made:
        made.add_eager(piece, x * 2)
        y = x + 1
    made.replay()
    piece.result = later
    with pytest.raises(CaptureError, match=said) as caught:
        made.replay()
    assert "eager piece Changing" in caught.value.message
    assert f"{__file__}:" in caught.value.message
    piece.result = first
    made.replay()
    same(y, x + 1)


def test_results_that_share_memory_may_lie_elsewhere_together(backend: GraphBackend) -> None:
    def piece(x: Tensor) -> Any:
        whole = (torch.cat([x, x, x]) * 2)[skipped:]
        return whole[:2], whole[1:2].t(), whole[:0] if skipped else whole.new_empty(0, 3)

    x, skipped = randn(backend, 2, 3), 0
    with backend.session(), torch.no_grad(), BreakableCUDAGraphCapture(backend, backend.new_pool()) as made:
        rows, column, nothing = made.add_eager(piece, x * 3)
        found = rows + 1, column + 1, nothing + 1
    for skipped in (1, 2):
        made.replay()
        whole = (torch.cat([x, x, x]) * 6)[skipped:]
        same(found, (whole[:2] + 1, whole[1:2].t() + 1, x[:0]))


def test_results_that_are_no_tensors_may_be_equal_anew(backend: GraphBackend) -> None:
    x, piece = randn(backend, 2, 3), Changing()
    piece.result = lambda x: [float("nan"), "text" + str(len(x)), (1, 2), {"k": slice(len(x))}, x * 2]
    with backend.session(), torch.no_grad(), BreakableCUDAGraphCapture(backend, backend.new_pool()) as made:
        y = made.add_eager(piece, x + 1)[-1] + 1
    x.add_(1)
    made.replay()
    same(y, (x + 1) * 2 + 1)


class Loose:
    """A mutable object that is equal to nothing but itself."""

    __slots__ = ("__dict__", "slotted")


class Listed(list[Any]):
    """For pytree no container."""


@pytest.mark.parametrize(
    "change",
    [
        lambda loose: setattr(loose, "number", 2.5),
        lambda loose: setattr(loose, "more", 1),
        lambda loose: delattr(loose, "number"),
        lambda loose: setattr(loose, "slotted", False),
        lambda loose: loose.nested["a"].append(1),
        lambda loose: loose.nested["a"][0].add("c"),
        lambda loose: loose.nested["b"].__setitem__(0, 7),
        lambda loose: setattr(loose, "tensors", [torch.zeros(2)]),
    ],
)
def test_a_mutable_result_must_keep_its_contents(backend: GraphBackend, change: Callable[[Any], Any]) -> None:
    x, piece, loose = randn(backend, 2, 3), Changing(), Loose()
    loose.number, loose.nan, loose.slotted = 1.5, float("nan"), True
    loose.nested = {"a": Listed([{"b"}]), "b": bytearray(b"text"), "cycle": loose}
    loose.tensors = [torch.zeros(2)]
    piece.result = lambda h: (loose, h.mul_(2))
    with backend.session(), torch.no_grad(), BreakableCUDAGraphCapture(backend, backend.new_pool()) as made:
        found, h = made.add_eager(piece, x * 2)
        y = h * found.number
    loose.nan, loose.number = float("nan"), 3 / 2  # other objects of the same value
    made.replay()
    same(y, x * 6)
    change(loose)
    with pytest.raises(CaptureError, match=r"Loose object .* with other contents, at") as caught:
        made.replay()
    assert "key_fn; a runner has none" in caught.value.remedy


def append(_: Tensor, given: Any) -> None:
    given["list"].append(1.5)


def replace_item(_: Tensor, given: Any) -> None:
    given["list"][0] = object()


def append_captured(x: Tensor, given: Any) -> None:
    given["list"].append(x * 2)


def set_key(x: Tensor, given: Any) -> None:
    given["key"] = x


def swap(_: Tensor, given: Any) -> None:
    given["list"].reverse()


@pytest.mark.parametrize("function", [append, replace_item, append_captured, set_key, swap])
@pytest.mark.parametrize("captured", [False, True])
def test_a_piece_that_puts_values_into_what_it_was_given(
    backend: GraphBackend, function: Callable[[Tensor, Any], None], captured: bool
) -> None:
    """Whether the list is the model's own or is built anew for each replay, because captured tensors are inside."""
    x = randn(backend, 2, 3)
    piece = eager_break_during_capture(function)

    def forward() -> Tensor:
        h = x * 2
        piece(h, {"list": [h if captured else "first", "second"], "tuple": ({"old"},)})
        return h + 1

    with pytest.raises(CaptureError, match=f"eager piece {function.__name__} puts values into a list") as caught:
        capture(backend, forward)
    assert f"{__file__}:" in caught.value.message
    assert "Return the values" in caught.value.remedy


def test_a_piece_may_take_values_out_of_what_it_was_given(backend: GraphBackend) -> None:
    x, left = randn(backend, 2, 3), list[int]()

    @eager_break_during_capture
    def consume(h: Tensor, given: list[Any], more: dict[str, Any]) -> Tensor:
        left.append(len(given))
        del given[1]
        return h * more.pop("factor") + given[0]

    made, y = capture(backend, lambda: consume(x * 2, [x + 1, x + 2, 3], {"factor": 2, "rest": x + 3}) * 2)
    x.add_(1)
    made.replay()
    same(y, (x * 4 + x + 1) * 2)
    assert left == [3] * 3


class Stateful(nn.Module):
    """A piece hands out state, and the segment behind it writes there."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.attribute = way, torch.zeros(3)
        self.register_buffer("buffer", torch.zeros(3))
        self.parameter = nn.Parameter(torch.zeros(3))
        self.inner = nn.Module()
        self.inner.register_buffer("buffer", torch.zeros(3))

    @eager_break_during_capture
    def state(self) -> Tensor:
        """Of the kind that ``way`` names."""
        if self.way == "made anew":  # state before it ran, but not what it returns
            self.attribute = self.attribute + 1
        kinds = {
            "buffer": self.buffer,
            "parameter": self.parameter,
            "inner": self.inner.buffer,
            "view": self.buffer[1:],
        }
        return kinds.get(self.way, self.attribute)

    @eager_break_during_capture
    def delayed(self, x: Tensor) -> Tensor:
        """What it was called with the time before; state before it runs, but not afterwards."""
        before, self.attribute = self.attribute, x.clone()
        return before

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "delayed":
            return self.delayed(x[0] * 2) + x
        return self.state().add_(x[0, -1]) + x[:, -1:]

    def now(self) -> list[Tensor]:
        """All state."""
        return [self.buffer, self.parameter.detach(), self.inner.buffer]


@pytest.mark.parametrize("way", ["buffer", "parameter", "inner", "view", "attribute", "made anew", "delayed"])
def test_state_that_a_piece_hands_out(backend: GraphBackend, way: str) -> None:
    """A segment writes to state itself; what is made anew on each call is copied."""
    model, other = Stateful(way).to(backend.device), Stateful(way).to(backend.device)
    model.attribute, other.attribute = (m.attribute.to(backend.device) for m in (model, other))
    x = randn(backend, 2, 3)
    made, output = capture(backend, lambda: model(x))
    with torch.no_grad():
        other(x)
        same(output, other(x))
        for seed in range(3):
            x.copy_(randn(backend, 2, 3, seed=seed))
            made.replay()
            if way == "made anew":  # the segment writes to the slot, and the next replay does not see it
                continue
            same(output, other(x))
            same(model.now(), other.now())
            same(model.attribute, other.attribute)


def test_state_that_moved_is_refused(backend: GraphBackend) -> None:
    model, x = Stateful("buffer").to(backend.device), randn(backend, 2, 3)
    made, _ = capture(backend, lambda: model(x))
    model.buffer = model.buffer.clone()
    with pytest.raises(CaptureError, match="at capture it was its own argument's memory, or a module's"):
        made.replay()


class Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def test_results_that_a_graph_cannot_read_are_refused(backend: GraphBackend) -> None:
    x = randn(backend, 2, 3)
    results: list[tuple[Any, str]] = [
        (lambda h: Box(h * 2), "Box, whose tensors cannot be reached"),
        (lambda h: h.to_sparse(), "torch.sparse_coo"),
        (lambda h: torch.empty_like(h, device="meta"), "on meta"),
    ]
    for function, said in results:
        piece = eager_break_during_capture(function)
        with pytest.raises(CaptureError, match=said):
            capture(backend, functools.partial(piece, x))


def test_an_error_of_a_piece_on_replay_passes(backend: GraphBackend) -> None:
    x, piece = randn(backend, 2, 3), Changing()
    piece.result = lambda h: h * 2
    with backend.session(), torch.no_grad(), BreakableCUDAGraphCapture(backend, backend.new_pool()) as made:
        y = made.add_eager(piece, x * 2) + 1
    piece.result = explode
    with forward_context(PIECEWISE, BatchDescriptor(2)) as context:
        context.derived["mine"] = 1
        with pytest.raises(Boom):
            made.replay()
        assert context.derived == {"mine": 1}
    piece.result = lambda h: h * 2
    made.replay()
    same(y, x * 4 + 1)


# --- memory ---------------------------------------------------------------------------------------------------


def test_without_slots_a_replay_would_be_stale(backend: GraphBackend) -> None:
    """The same capture by hand, where the fresh tensor itself goes on to the next segment."""
    x, pool = randn(backend, 64, 64), backend.new_pool()
    with backend.session(), torch.no_grad():
        h = x * 2
        first, second = backend.new_graph(pool), backend.new_graph(pool)
        with backend.capturing(first):
            h = x * 2
        backend.replay(first)
        fresh = doubled(h)
        with backend.capturing(second):
            stale = fresh + 1
    made, y = capture(backend, lambda: doubled(x * 2) + 1, pool)
    before = x * 4 + 1
    x.add_(1)
    backend.replay(first)
    held = doubled(h)  # what the piece returns now lies elsewhere
    assert held.data_ptr() != fresh.data_ptr()
    backend.replay(second)
    same(stale, before)
    made.replay()
    same(y, x * 4 + 1)


def layered(x: Tensor) -> Tensor:
    """Four layers, with pieces of each kind."""
    h = x + 1
    for _ in range(4):
        h = doubled(h * 0.25) + h
        add_in_place(h, 0.5)
        left, right = chunks(h)[:2]
        h = left + right.repeat(1, 2).tanh()
    return h


@pytest.mark.parametrize("largest_first", [True, False])
def test_sizes_share_a_pool_and_replay_in_any_order(backend: GraphBackend, largest_first: bool) -> None:
    pool, sizes = backend.new_pool(), [64, 32, 8, 1]
    statics = {size: randn(backend, size, 6) for size in sizes}
    wrapper = BreakableCUDAGraphWrapper(layered, backend=backend, pool=pool)
    order = sizes if largest_first else sizes[::-1]
    chooser, growth = random.Random(0), []
    with torch.no_grad():
        for size in order:
            before = backend.pool_bytes(pool)
            with forward_context(PIECEWISE, BatchDescriptor(size)):
                same(wrapper(statics[size]).clone(), layered(statics[size].clone()))
            growth.append(backend.pool_bytes(pool) - before)
        for step in range(20):
            size = chooser.choice(sizes)
            fresh = randn(backend, size, 6, seed=step)
            statics[size].copy_(fresh)
            with forward_context(PIECEWISE, BatchDescriptor(size)):
                output = wrapper(statics[size])
            same(output, layered(fresh))
    if largest_first:
        assert growth[0] > 0
        assert growth[1:] == [0, 0, 0], "smaller captures fit into what the largest one reserved"
    elif backend.device.type == "cpu":  # CUDA reserves 2 MiB at a time
        assert growth[-1] > 0


def test_arguments_and_slots_leave_their_blocks_to_later_segments() -> None:
    """On the tape, where bytes are exact: the pool holds as much for 12 layers as for 3."""
    backend = select_backend("cpu")
    x = randn(backend, 64, 64)

    def forward(layers: int) -> Tensor:
        h = x + 1
        for _ in range(layers):
            h = doubled(h * 0.5)
        return h + 1

    def pool_bytes(layers: int) -> int:
        pool = backend.new_pool()
        made, _ = capture(backend, lambda: forward(layers), pool)
        assert made.num_eager_breaks == layers
        return backend.pool_bytes(pool)

    assert pool_bytes(12) == pool_bytes(3)


def test_memory_from_elsewhere_is_held_by_the_piece(backend: GraphBackend) -> None:
    x, seen = randn(backend, 64, 64), []
    cache = torch.zeros(64, 64, device=backend.device)

    @eager_break_during_capture
    def store(h: Tensor, caches: dict[str, Tensor]) -> Tensor:
        seen.append(caches)
        return caches["cache"].copy_(h)

    caches = {"cache": cache}
    made, _ = capture(backend, lambda: store(x * 2, caches) + 1)
    address = cache.data_ptr()
    del cache
    caches.pop("cache", None)
    x.add_(1)
    with pytest.raises(KeyError):
        made.replay()  # a dict without captured tensors is the very dict, with what is in it now
    assert seen[-1] is caches
    caches["cache"] = torch.zeros(64, 64, device=backend.device)
    if caches["cache"].data_ptr() != address:
        with pytest.raises(CaptureError, match="argument's memory"):
            made.replay()

    cache = torch.zeros(64, 64, device=backend.device)
    held = [cache]
    kept, z = capture(backend, lambda: eager_break_during_capture(Tensor.copy_)(held[0], x * 2) + 1)
    del cache, held[:]
    others = [torch.full((64, 64), 7.0, device=backend.device) for _ in range(8)]
    kept.replay()
    same(z, x * 2 + 1)
    assert all(bool((other == 7).all()) for other in others)


# --- the forward context --------------------------------------------------------------------------------------


def test_pieces_run_in_the_context_of_the_replaying_call(backend: GraphBackend) -> None:
    seen: list[tuple[Any, dict[str, Any]]] = []

    @eager_break_during_capture
    def piece(h: Tensor) -> Tensor:
        context = get_forward_context()
        seen.append((context.metadata["scale"], dict(context.derived)))
        scale = context.derived.setdefault("piece", context.metadata["scale"] * 1)
        return h * scale

    def forward() -> Tensor:
        context = get_forward_context()
        h = x * context.derived.setdefault("segment", context.metadata["scale"] * 1)
        h = piece(h)
        if not warming.pop(0):
            assert "piece" not in context.derived, "a segment would read it at an address of the capture"
        return piece(h) + context.derived["segment"]

    x, warming = randn(backend, 4, 6), [True, False]
    scales = [torch.full((), value, device=backend.device) for value in (2.0, 3.0, 5.0)]
    unchecked = CUDAGraphOptions(address_check="off")  # else it would be refused that a segment's scale moves
    wrapper = BreakableCUDAGraphWrapper(lambda _: forward(), backend=backend, options=unchecked)
    with torch.no_grad():
        for index, scale in enumerate(scales):
            seen.clear()
            with forward_context(PIECEWISE, BatchDescriptor(4), {"scale": scale}) as context:
                if index:
                    context.derived["mine"] = 1
                output = wrapper(x)
                assert context.derived == ({"mine": 1} if index else {})
            same(output, x * 2 * scale * scale + 2)  # what the segments read is that of the capture
            assert [s is scale for s, _ in seen[-2:]] == [True, True]
            assert [sorted(derived) for _, derived in seen[-2:]] == [[], ["piece"]]


def test_a_capture_works_without_a_context(backend: GraphBackend) -> None:
    @eager_break_during_capture
    def piece(h: Tensor) -> Tensor:
        assert current_forward_context() is None
        return h * 2

    x = randn(backend, 4, 6)
    made, y = capture(backend, lambda: piece(x + 1) + 1)
    made.replay()
    same(y, (x + 1) * 2 + 1)


# --- the wrapper ----------------------------------------------------------------------------------------------


def test_the_wrapper_captures_once_for_each_key(backend: GraphBackend) -> None:
    calls: list[int] = []

    def forward(x: Tensor, *, bias: float = 1.0) -> Tensor:
        calls.append(len(x))
        return doubled(x * 2) + bias

    wrapper = BreakableCUDAGraphWrapper(forward, backend=backend, options=CUDAGraphOptions(num_of_warmups=2))
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


def test_a_call_that_captures_runs_the_forward_once(backend: GraphBackend) -> None:
    model, other, x = Counting().to(backend.device), Counting().to(backend.device), randn(backend, 2, 3)
    wrapper = BreakableCUDAGraphWrapper(model, backend=backend, options=CUDAGraphOptions(num_of_warmups=0))
    with torch.no_grad(), forward_context(PIECEWISE, BatchDescriptor(2)):
        for _ in range(3):
            same(wrapper(x), other(x))
            same(model.count, other.count)


@pytest.mark.parametrize("inference", [False, True])
def test_the_wrapper_copies_arguments_that_may_lie_anywhere(backend: GraphBackend, inference: bool) -> None:
    """Segments and eager pieces alike read them from memory that each replay fills."""

    def first_in_a_segment(x: Tensor, y: Tensor) -> Tensor:
        return doubled(x * 2) + y

    def first_in_a_piece(x: Tensor, y: Tensor) -> Tensor:
        return doubled(doubled(x)) + x * y

    def in_a_piece_alone(x: Tensor, y: Tensor) -> Tensor:
        return doubled(x) + y

    def in_no_segment(x: Tensor, y: Tensor) -> Tensor:
        return doubled(x)

    def handed_back(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.t()

    def written_to(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        add_in_place(x)
        return x + y

    forwards = (first_in_a_segment, first_in_a_piece, in_a_piece_alone, in_no_segment, handed_back, written_to)
    pool, y = backend.new_pool(), randn(backend, 64, 64)
    options = CUDAGraphOptions(copied_arguments=(0,), num_of_warmups=0)  # a warm-up would write to the caller's tensor
    wrappers = [BreakableCUDAGraphWrapper(f, backend=backend, pool=pool, options=options) for f in forwards]
    plain = BreakableCUDAGraphWrapper(first_in_a_segment, backend=backend, pool=pool)
    held = [randn(backend, 64, 64, seed=seed) for seed in range(4)]  # all at once, so that each lies elsewhere
    with torch.inference_mode(inference), torch.no_grad(), forward_context(PIECEWISE, BatchDescriptor(64)):
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


def test_key_fn_adds_to_the_key(backend: GraphBackend) -> None:
    def forward(x: Tensor, flag: bool) -> Tensor:
        return doubled(x * 2) + 1 if flag else doubled(x) - 1

    x = randn(backend, 4, 6)
    wrapper = BreakableCUDAGraphWrapper(forward, backend=backend, key_fn=lambda x, flag: flag)
    with torch.no_grad():
        for flag in (True, False, True, False):
            x.add_(1)
            with forward_context(PIECEWISE, BatchDescriptor(4)):
                same(wrapper(x, flag), forward(x, flag))
        assert set(wrapper.entries) == {(BatchDescriptor(4), True), (BatchDescriptor(4), False)}
        for value in (x, (1, (x[0],))):
            told = BreakableCUDAGraphWrapper(forward, backend=backend, key_fn=lambda x, flag, value=value: value)
            with pytest.raises(CgplanError, match="a tensor"), forward_context(PIECEWISE, BatchDescriptor(4)):
                told(x, True)
            assert not told.entries
        unhashable = BreakableCUDAGraphWrapper(forward, backend=backend, key_fn=lambda x, flag: [flag])
        with pytest.raises(CgplanError, match="key_fn returned"), forward_context(PIECEWISE, BatchDescriptor(4)):
            unhashable(x, True)
    wrapper.reset()
    assert not wrapper.entries


def test_a_failed_capture_of_the_wrapper_is_tried_again(backend: GraphBackend) -> None:
    x, fail = randn(backend, 4, 6), [True]

    def forward(x: Tensor) -> Tensor:
        h = doubled(x * 2)
        if fail[0]:
            explode()
        return h + 1

    wrapper = BreakableCUDAGraphWrapper(forward, backend=backend, options=CUDAGraphOptions(num_of_warmups=0))
    with torch.no_grad(), forward_context(PIECEWISE, BatchDescriptor(4)):
        with pytest.raises(Boom):
            wrapper(x)
        assert not wrapper.entries
        fail[0] = False
        same(wrapper(x), x * 4 + 1)
        x.add_(1)
        same(wrapper(x), x * 4 + 1)


class Broken(nn.Module):
    """Two layers with a module between them that the user's code does not know as a piece."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"mix": Mix(), "out": nn.Linear(6, 6)}) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["out"](layer["mix"](x))
        return x


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.eager_runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.eager_runs += 1
        return self.inner(x).softmax(1)


def open_runner(backend: GraphBackend, model: Callable[..., Any], mode: str, sizes: list[int]) -> GraphRunner:
    config = validate_config(
        {
            "inputs": {"x": Input(shape=("num_tokens", 6), dtype="float32", pad=0)},
            "compilation": {"cudagraph_mode": mode, "cudagraph_capture_sizes": sizes, "piecewise": "wrappers"},
            "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 64},
            "device": backend.device.type,
        }
    )
    return CaptureSession(build_plan(config), model, backend, config).run()


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_a_session_with_a_breakable_model(backend: GraphBackend, mode: str) -> None:
    """FULL outside and PIECEWISE inside, in one model and one pool, the report counting both."""
    model = Broken().to(backend.device).eval()
    with backend.session(), torch.no_grad():
        model(randn(backend, 4, 6))  # workspaces of the capture stream, which stay
    before = backend.memory().reserved
    break_at_modules(model, ["layers.*.mix"])
    wrapper = BreakableCUDAGraphWrapper(model, backend=backend)
    runner = open_runner(backend, lambda x: wrapper(x), mode, [2, 4, 8])
    records = {(r.mode, r.descriptor.num_tokens): r for r in runner.report.records}
    found = records[PIECEWISE, 4]
    assert (found.graphs, found.eager_pieces) == (2, 2)  # mix comes first: its empty segment is dropped
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
        forward_context(PIECEWISE, BatchDescriptor(5), scope=runner._graphed.scope),
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
    break_at_modules(model, ["layers.*.mix"])

    def fails_for_two(x: Tensor) -> Tensor:
        y = model(x)
        if len(x) == 2 and get_forward_context().runtime_mode is PIECEWISE:
            raise Boom
        return y

    wrapper = BreakableCUDAGraphWrapper(fails_for_two, backend=backend)
    with backend.session(), torch.no_grad():
        model(randn(backend, 4, 6))  # workspaces of the capture stream, which stay
    before = backend.memory().reserved
    with pytest.raises(CaptureError, match="capture of PIECEWISE num_tokens=2 failed"):
        open_runner(backend, wrapper, "PIECEWISE", [2, 4])
    gc.collect()
    backend.release_cached()
    assert not wrapper.entries
    assert backend.memory().reserved <= before
    same(model(randn(backend, 3, 6)).shape, torch.Size([3, 6]))


# --- breaks at modules ----------------------------------------------------------------------------------------


def test_breaks_at_modules_come_and_go(backend: GraphBackend) -> None:
    model = Broken().to(backend.device).eval()
    x = randn(backend, 4, 6)
    breaks = break_at_modules(model, ["layers.*.mix", "layers.1.*"])
    assert breaks.names == ("layers.0.mix", "layers.1.mix", "layers.1.out")
    made, y = capture(backend, lambda: model(x))
    assert kinds(made) == "eSee"
    assert [item.name for item in made.segments if isinstance(item, EagerPiece)] == list(breaks.names)
    x.add_(1)
    made.replay()
    with torch.no_grad():
        same(y, model(x))
    breaks.remove()
    breaks.remove()
    made, _ = capture(backend, lambda: model(x))
    assert kinds(made) == "S"
    assert all("forward" not in vars(module) for module in model.modules())


def test_the_outer_of_two_matching_modules_is_the_piece(backend: GraphBackend) -> None:
    model = Broken().to(backend.device).eval()
    x = randn(backend, 4, 6)
    break_at_modules(model, ["layers.*.mix", "layers.*.mix.inner"])
    made, _ = capture(backend, lambda: model(x))
    assert [item.name for item in made.segments if isinstance(item, EagerPiece)] == ["layers.0.mix", "layers.1.mix"]


def test_a_forward_that_the_user_replaced_comes_back(backend: GraphBackend) -> None:
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    model[1] = model[0]  # one module, two names
    own = model[0].forward = lambda x: x * 5
    breaks = break_at_modules(model, "*")
    assert breaks.names == ("0",)
    x = randn(backend, 2, 3)
    made, y = capture(backend, lambda: model(x))
    assert made.num_eager_breaks == 2
    same(y, x * 5 * 5)
    breaks.remove()
    assert model[0].forward is own


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_handles_on_one_module_go_in_any_order(backend: GraphBackend, order: tuple[int, int]) -> None:
    model = Broken().to(backend.device).eval()
    own = model.layers[1].mix.forward = functools.partial(type(model.layers[1].mix).forward, model.layers[1].mix)
    handles = break_at_modules(model, ["layers.*.mix"]), break_at_modules(model, ["layers.1.*"])
    x = randn(backend, 4, 6)
    counts = []
    for handle in (None, *(handles[i] for i in order)):
        if handle is not None:
            handle.remove()
            handle.remove()
        counts.append(capture(backend, lambda: model(x))[0].num_eager_breaks)
    assert counts == [3, 2, 0]
    assert vars(model.layers[1].mix).pop("forward") is own
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_forward_that_was_put_over_a_break_stays(backend: GraphBackend) -> None:
    model, x = nn.Sequential(nn.ReLU()), randn(backend, 2, 3)
    breaks = break_at_modules(model, ["0"])
    under = model[0].forward
    over = model[0].forward = lambda x: under(x) + 1
    assert capture(backend, lambda: model(x))[0].num_eager_breaks == 1
    breaks.remove()
    assert model[0].forward is over
    made, y = capture(backend, lambda: model(x))
    assert made.num_eager_breaks == 0
    same(y, x.relu() + 1)


def by_modules(model: nn.Module, backend: GraphBackend, *patterns: str, sizes: Any = (2,)) -> GraphRunner:
    return cgplan.capture(
        model,
        {
            next(iter(inspect.signature(model.forward).parameters)): Input(
                shape=("num_tokens", 6), dtype="float32", pad=0
            )
        },
        compilation={
            "cudagraph_mode": "PIECEWISE",
            "cudagraph_capture_sizes": list(sizes),
            "splitting_modules": list(patterns),
        },
        device=backend.device.type,
    )


def test_a_runner_that_is_dropped_takes_its_breaks_along(backend: GraphBackend) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU()).to(backend.device)
    runner, other = by_modules(model, backend, "0", "1"), by_modules(model, backend, "1")
    del runner
    gc.collect()
    assert ["forward" in vars(module) for module in model] == [False, True]
    other.close()
    del other
    model.runner = by_modules(model, backend, "0")  # a cycle: the model holds what breaks it
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_copies_and_pickles_have_no_breaks(backend: GraphBackend) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)).to(backend.device)
    model[1].forward = nn.functional.gelu  # the user's, and under a break
    x = randn(backend, 2, 6)
    with torch.no_grad():
        wanted = model(x)
    break_at_modules(model, ["0", "1"])
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(copy.deepcopy(model))):
        made, y = capture(backend, functools.partial(copied, x))
        assert made.num_eager_breaks == 0
        same(y, wanted)
        with torch.no_grad():
            copied[0].weight.zero_()
            copied[0].bias.zero_()
            same(copied(x), copied[2].bias.expand(2, 6))
    made, y = capture(backend, lambda: model(x))
    assert made.num_eager_breaks == 2
    same(y, wanted)


class Wrapping(nn.Module):
    """Holds a wrapper of its own layer, as the wrapper's docstring says."""

    def __init__(self, kind: type[CUDAGraphWrapper], backend: GraphBackend) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.run = kind(self.layer, PIECEWISE, backend=backend)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x) + 1


@pytest.mark.parametrize("kind", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
def test_a_copied_wrapper_has_captured_nothing(backend: GraphBackend, kind: type[CUDAGraphWrapper]) -> None:
    model = Wrapping(kind, backend).to(backend.device)
    x = randn(backend, 2, 6)
    with forward_context(PIECEWISE, BatchDescriptor(2)):
        model(x)
        copied = copy.deepcopy(model)
        assert type(copied.run) is kind
        assert not copied.run.entries
        assert copied.run.runnable is copied.layer
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


def test_a_wrapper_of_a_traced_module_is_copied_as_a_wrapper(backend: GraphBackend) -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(6, 6)))
    wrapper = CUDAGraphWrapper(traced, PIECEWISE, backend=backend)
    copied = copy.deepcopy(wrapper)
    assert type(copied) is CUDAGraphWrapper
    assert copied.runnable is not traced
    assert copied.graph is copied.runnable.graph
    with pytest.raises(AttributeError, match="no attribute '__len__'"):
        wrapper.__len__()
    assert CUDAGraphWrapper(doubled, PIECEWISE).__name__ == "doubled"


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("layers.*.mixx", r"Did you mean layers\.\*\.mix"),
        ("layer.*.mix", r"layers\.\*\.mix"),
        ("layers.mix", r"layers\.\*\.mix"),
        ("*.mix", "layers"),
        ("layers.*", None),
        ("zzzzzz", r"The model has layers, layers\.\*, layers\.\*\.mix"),
    ],
)
def test_a_pattern_that_matches_nothing(pattern: str, hint: str | None) -> None:
    model = Broken()
    if hint is None:  # `*` stands for one component, no more
        assert break_at_modules(model, [pattern]).names == ("layers.0", "layers.1")
        return
    with pytest.raises(ConfigError, match="no submodule matches") as caught:
        break_at_modules(model, ["layers.*.mix", pattern])
    assert pattern in caught.value.message
    assert re.search(hint, caught.value.remedy)
    assert all("forward" not in vars(module) for module in model.modules()), "nothing is changed"


def test_breaks_need_a_module() -> None:
    with pytest.raises(ConfigError, match="the model is a function"):
        break_at_modules(lambda x: x, ["*"])  # type: ignore[arg-type]


# --- what ends up where, before any capture ------------------------------------------------------------------


def splitting(backend: GraphBackend, mode: str = "PIECEWISE", **compilation: Any) -> Config:
    return validate_config(
        {
            "inputs": {"x": Input(shape=("num_tokens", 6), dtype="float32", pad=0)},
            "compilation": {"cudagraph_mode": mode, "cudagraph_capture_sizes": [1, 4, 8], **compilation},
            "device": backend.device.type,
        }
    )


@pytest.mark.parametrize("way", [{"splitting_ops": ["aten::softmax"]}, {"splitting_modules": ["layers.*.mix"]}])
def test_a_split_is_described_as_the_session_reports_it(backend: GraphBackend, way: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model = Broken().to(backend.device).eval()
    config, before = splitting(backend, **way), backend.memory().reserved
    found = describe_split(model, config, backend)
    assert found is not None
    if "splitting_ops" in way:
        assert (found.route, found.segments, found.eager_pieces) == ("ops", 3, 2)
        assert found.eager == {"aten::softmax": 2}
        assert found.captured == {"aten::linear": 4}
    else:
        assert (found.route, found.segments, found.eager_pieces) == ("modules", None, None)
        assert found.eager == {"layers.0.mix": 1, "layers.1.mix": 1}
        assert model.layers[0]["mix"].eager_runs == 0, "nothing runs"
    assert all("forward" not in vars(module) for module in model.modules())
    assert backend.memory().reserved <= before + 2 * MIB
    assert describe_split(model, splitting(backend, compiler="inductor", **way), backend) == found
    torch._dynamo.reset()
    reported = CaptureSession(build_plan(config), model, backend, config).run().report.split
    assert reported is not None
    if "splitting_modules" in way:  # known once it has run
        assert reported.captured == {"aten::addmm": 2}, "the others are in the modules"
        assert reported.eager_operators["aten::_softmax"] == 2
        reported = reported.model_copy(update={"captured": {}, "eager_operators": {}})
    assert reported == found
    torch._dynamo.reset()


def test_only_modules_that_break_are_described(backend: GraphBackend) -> None:
    model = Broken().to(backend.device).eval()
    config = splitting(backend, splitting_modules=["layers", "layers.*.mix", "layers.*.mix.inner"])
    found = describe_split(model, config, backend)
    assert found is not None
    assert found.eager == {"layers.0.mix": 1, "layers.1.mix": 1}, "a list is not called, and inner is in mix"
    with closing(CaptureSession(build_plan(config), model, backend, config).run()) as runner:
        assert runner.report.split is not None
        assert runner.report.split.eager == found.eager
        assert runner.report.warnings[0] == "modules that splitting_modules names were never called: layers"


def test_splits_that_are_none_or_cannot_be(backend: GraphBackend) -> None:
    torch._dynamo.reset()
    model, softmax = Broken().to(backend.device).eval(), splitting(backend, splitting_ops=["aten::softmax"])
    before = backend.memory().reserved
    assert describe_split(model, splitting(backend, "FULL"), backend) is None
    with pytest.raises(ConfigError, match="'aten::topk' does not occur"):
        describe_split(model, splitting(backend, splitting_ops=["aten::topk"]), backend)
    with pytest.raises(ConfigError, match="no submodule matches"):
        describe_split(model, splitting(backend, splitting_modules=["layer.*"]), backend)
    torch._dynamo.reset()
    with pytest.raises(ModelError, match="unexpected keyword argument 'x'"):
        describe_split(lambda y: y.softmax(1), softmax, backend)
    assert backend.memory().reserved <= before + 2 * MIB
    torch._dynamo.reset()


# --- the reference decoder ------------------------------------------------------------------------------------

BLOCKS, REQS = 6, 4
SMALL: dict[str, Any] = {"vocab_size": 97, "hidden_size": 48, "head_dim": 16, "block_size": 4, "num_blocks": 64}


class Drawn(NamedTuple):
    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    batch: ExampleBatch


def draw(model: Decoder, chooser: random.Random) -> Drawn:
    """A decode, prefill or mixed batch, padded to a capture size; decode batches run by FULL graphs."""
    kind, reqs = chooser.choice(["decode", "prefill", "mixed"]), chooser.randint(1, REQS)
    contexts = [0 if kind == "prefill" else chooser.randint(0, 12) for _ in range(reqs)]
    queries = [1 if kind == "decode" else chooser.randint(1, 6) for _ in range(reqs)]
    if kind == "mixed":
        queries[0] = 1
    used, seed = sum(queries), chooser.randrange(1000)
    if kind == "decode":
        size = 2 if used <= 2 else 4
        key = BatchDescriptor(size, size, uniform=True)
    else:
        size = 8 if used <= 8 else 24
        key = BatchDescriptor(size)
    padded_reqs = key.num_reqs or REQS
    batch = example_batch(model, contexts, queries, num_tokens=size, num_reqs=padded_reqs, max_blocks=BLOCKS, seed=seed)
    return Drawn(FULL if kind == "decode" else PIECEWISE, key, batch)


def caches(model: Decoder) -> list[Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("_cache")]


def fill(static: ExampleBatch, batch: ExampleBatch) -> None:
    static.input_ids.copy_(batch.input_ids)
    static.positions.copy_(batch.positions)
    for name, tensor in batch.metadata.items():
        static.metadata[name].copy_(tensor)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.gpu)])
def test_the_decoder_with_its_attention_broken_out(backend: GraphBackend, dtype: str) -> None:
    """FULL graphs for decode, segments for prefill and mixed batches, one pool: logits and caches as eagerly."""
    with torch.device(backend.device):
        model = build(**SMALL, num_layers=3, dtype=dtype)
    chooser = random.Random(7)
    for cache in caches(model):
        cache.normal_()
    pool = backend.new_pool()
    breaks = break_at_modules(model, ["layers.*.self_attn"])
    piecewise = BreakableCUDAGraphWrapper(model, backend=backend, pool=pool)
    both = CUDAGraphWrapper(piecewise, FULL, backend=backend, pool=pool)
    statics: dict[BatchDescriptor, ExampleBatch] = {}
    modes: list[CUDAGraphMode] = []
    for _ in range(30):
        mode, key, batch = draw(model, chooser)
        static = statics.setdefault(key, batch)
        fill(static, batch)
        before = [cache.clone() for cache in caches(model)]
        with torch.no_grad(), forward_context(descriptor=key, metadata=batch.metadata):
            wanted = model(batch.input_ids, batch.positions)
        written = [cache.clone() for cache in caches(model)]
        for cache, value in zip(caches(model), before, strict=True):
            cache.copy_(value)
        with torch.no_grad(), forward_context(mode, key, static.metadata):
            found = both(static.input_ids, static.positions)
        same(found, wanted)
        for cache, value in zip(caches(model), written, strict=True):
            same(cache[:-1], value[:-1])  # the last block takes what padding rows write, in any order
        modes.append(mode)
    assert set(modes) == {FULL, PIECEWISE}
    assert len(modes) - len(statics) > 20, "most batches were replays"
    for entry in piecewise.entries.values():
        assert (len(entry.segments), entry.eager_pieces) == (4, 3)
    both.reset()
    piecewise.reset()
    breaks.remove()


# --- while somebody looks at a forward -------------------------------------------------------------------------


@eager_break_during_capture
def halved(x: Tensor) -> Tensor:
    return x * 0.5


def test_what_is_captured_inside_of_a_piece_is_whole_while_the_forward_is_looked_at(backend: GraphBackend) -> None:
    """A piece may capture something of its own (a runner inside of it that captures lazily); FULL graphs hold what
    breaks elsewhere.
    """
    x, made = randn(backend, 4, 6), {}

    @eager_break_during_capture
    def piece() -> None:
        graph = backend.new_graph(backend.new_pool())
        with backend.session(), torch.no_grad():
            halved(x)
            with backend.capturing(graph):
                made["output"] = halved(x) + 1
        made["graph"] = graph

    assert host_sync_of(piece, backend.device) is None
    x.copy_(randn(backend, 4, 6, seed=1))
    backend.replay(made["graph"])
    same(made["output"], x * 0.5 + 1)
    backend.reset(made["graph"])


class Keeps(nn.Module):
    """A module that binds a tensor to an attribute of its own, or of the model."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.kept, self.outer = way, None, [None]
        self.register_buffer("buffer", torch.zeros(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "attribute":
            self.kept = torch.relu(x)
        elif self.way == "buffer":
            self.buffer = torch.relu(x)
        else:  # of itself: no segment reads it
            self.kept = x.clone() if self.kept is None else torch.cat([self.kept, x])
        return x * 2


class ReadsKept(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.s = Keeps(way)

    def forward(self, x: Tensor) -> Tensor:
        h = self.s(x + 1) * 3
        if self.s.way == "attribute":
            return h + self.s.kept
        return h + self.s.buffer[: len(x)]


@pytest.mark.parametrize("way", ["attribute", "buffer", "growing"])
def test_segments_read_state_that_a_piece_binds(backend: GraphBackend, way: str) -> None:
    model, other = ReadsKept(way).to(backend.device), ReadsKept(way).to(backend.device)
    with closing(by_modules(model, backend, "s", sizes=[4])) as runner, torch.no_grad():
        assert runner.report.records[0].eager_pieces == 1
        for seed in range(4):
            x = randn(backend, 4, 6, seed=seed)
            same(runner(x=x), other(x))
        kept = model.s.kept if way == "attribute" else model.s.buffer
        assert not backend.in_pool(kept, runner._graphed.scope.pool)
