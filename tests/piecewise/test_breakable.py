"""Breakable capture: segments with eager pieces between them, on the tape and on CUDA alike. Eager pieces: their arguments, results and state at capture and on each replay. Breaks at modules by name: in captures and looks alone, so the model stays as it is."""

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
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import same
from devices import WithStreams
from pieces import (
    Boom,
    Broken,
    Changing,
    Counting,
    add_in_place,
    capture,
    doubled,
    explode,
    kinds,
    nothing,
    open_runner,
    randn,
)
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._pytree import tree_leaves

import cgplan
from cgplan import (
    BatchDescriptor,
    BreakableCUDAGraphCapture,
    BreakableCUDAGraphWrapper,
    CaptureError,
    ConfigError,
    CUDAGraphMode,
    CUDAGraphOptions,
    GraphRunner,
    HostSyncError,
    Input,
    SealedError,
    capture_allowed,
    eager_break_during_capture,
    forward_context,
    get_forward_context,
    in_breakable_capture,
)
from cgplan.backends import GraphBackend, select_backend
from cgplan.captures.failures import drop_locals
from cgplan.graphs.wrapper import GraphPool
from cgplan.piecewise.breakable import Breaks

pytestmark = pytest.mark.usefixtures("quiet_collector")

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


@eager_break_during_capture
def parts(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    made = torch.tensor(x.tolist(), device=x.device)
    return made + 1, {
        "order": made.argsort(0),
        "positive": made > 0,
        "rows": len(x),
        "none": None,
        "half": made.half(),
    }


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


CASES: dict[str, tuple[Callable[[Tensor], Any], str]] = {}


def case(segments: str) -> Callable[[Callable[[Tensor], Any]], Callable[[Tensor], Any]]:
    """A forward of x [4, 6] and the items that its capture has: S for a segment, e for an eager piece."""

    def register(forward: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        CASES[forward.__name__] = (forward, segments)
        return forward

    return register


@case("SeSeS")
def in_place_and_returned(x: Tensor) -> Any:
    return add_in_place(add_in_place(x * 3) * 2) * 2


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
def arguments_in_containers(x: Tensor) -> Any:
    return pop_all([x * 2, x * 3], more={"start": x + 1, "factor": 2.0}) - 1


@case("e")
def one_piece_alone(x: Tensor) -> Any:
    return doubled(x)


@case("SeeSe")
def pieces_in_a_row(x: Tensor) -> Any:
    h = doubled(doubled(x + 1)) * 3
    return doubled(h)


@case("SeSeSeSeS")
def piece_in_a_loop(x: Tensor) -> Any:
    h, first = x + 1, x * 2
    for layer in range(4):
        h = doubled(h * 0.5) + first + layer
    return h


@case("eSeS")
def views_alone_before_a_piece_make_no_segment(x: Tensor) -> Any:
    nothing(x.t())
    h = x.t() * 2
    nothing(h)
    return h.t() + 1


@case("SeSeSeS")
def residual_that_the_next_segment_drops(x: Tensor) -> Any:
    """Its block is reused while the segment that reads it first is captured."""
    h = x.tanh()
    for _ in range(3):
        h = h + doubled(h * 0.5)
        h = h + ((h * 3).relu() - (h + 1).sigmoid()) * 2
    return h


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
    assert (len(made.graphs), len(made.eager_pieces)) == (segments.count("S"), segments.count("e"))
    assert all(backend.num_nodes(graph) for graph in made.graphs)
    for seed in (1, 2, 3, 4):
        fresh = randn(backend, 4, 6, seed=seed)
        x.copy_(fresh)
        made.replay()
        with torch.no_grad():
            same(output, forward(fresh))
        same(x, fresh)


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


def test_inference_mode_and_grad_mode_are_those_of_the_capture(backend: GraphBackend) -> None:
    seen: list[tuple[bool, bool]] = []

    @eager_break_during_capture
    def piece(x: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return x.add_(1) * 2

    x = randn(backend, 2, 3)
    with (
        backend.session(),
        torch.inference_mode(),
        BreakableCUDAGraphCapture(backend, backend.new_pool()) as made,
    ):
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
    made, output = capture(
        backend, lambda: eager_break_during_capture(lambda h: h * weight)(x * 2) + 1
    )
    with torch.enable_grad():
        made.replay()
    assert not output.requires_grad


def test_add_eager_without_a_decorator(backend: GraphBackend) -> None:
    x = randn(backend, 2, 3)
    with (
        backend.session(),
        torch.no_grad(),
        BreakableCUDAGraphCapture(backend, backend.new_pool()) as made,
    ):
        h = made.add_eager(
            lambda h, function: torch.tensor(h.tolist(), device=h.device), x * 2, function=None
        )
        y = h + 1
    first, piece, second = made.segments
    assert made.graphs == (first, second)
    assert made.eager_pieces == (piece,)
    assert "lambda" in piece.name
    assert f"{__file__}:" in piece.line
    assert "made.add_eager(" in piece.line
    x.add_(1)
    made.replay()
    same(y, x * 2 + 1)


def test_a_capture_inside_another_one_is_refused(backend: GraphBackend) -> None:
    x, pool = randn(backend, 2, 3), backend.new_pool()

    def nested(h: Tensor) -> Tensor:
        if in_breakable_capture():
            with (
                pytest.raises(CaptureError, match="inside another one") as caught,
                BreakableCUDAGraphCapture(backend),
            ):
                pass
            assert __file__ in caught.value.message
            with pytest.raises(CaptureError, match="outside of a segment"):
                made.add_eager(doubled, h)
        return h + 1

    with backend.session(), torch.no_grad(), BreakableCUDAGraphCapture(backend, pool) as made:
        y = made.add_eager(nested, x * 2)
        with (
            pytest.raises(CaptureError, match="inside another one"),
            BreakableCUDAGraphCapture(backend, pool),
        ):
            pass
        z = y * 2
    x.add_(1)
    made.replay()
    same(z, (x * 2 + 1) * 2)


def test_a_breakable_capture_inside_a_plain_one_is_refused(backend: GraphBackend) -> None:
    """The plain one goes on."""
    x, pool = randn(backend, 2, 3), backend.new_pool()
    graph = backend.new_graph(pool)
    with backend.session(), torch.no_grad(), backend.capturing(graph):
        y = x * 2
        inner = BreakableCUDAGraphCapture(backend, pool)
        with pytest.raises(CaptureError, match="inside another one") as caught, inner:
            pass
        z = y + 1
    assert f"{__file__}:" in caught.value.message
    x.add_(1)
    backend.replay(graph)
    same(z, x * 2 + 1)
    assert not in_breakable_capture()


@pytest.mark.gpu
def test_a_session_inside_the_capture_of_another_backend_is_refused() -> None:
    outer, inner = select_backend("cuda"), select_backend("cuda")
    x = randn(outer, 2, 3)
    graph = outer.new_graph(outer.new_pool())
    with outer.session(), torch.no_grad(), outer.capturing(graph):
        y = x * 2
        with pytest.raises(CaptureError, match="inside another one"), inner.session():
            pass
    x.add_(1)
    outer.replay(graph)
    same(y, x * 2)


def test_a_capture_where_none_is_allowed(backend: GraphBackend) -> None:
    x = randn(backend, 2, 3)
    with capture_allowed(False), pytest.raises(SealedError, match="capture_allowed"):
        capture(backend, lambda: doubled(x))
    assert not in_breakable_capture()
    made, y = capture(backend, lambda: doubled(x))
    with capture_allowed(False):
        made.replay()
    same(y, x * 2)


def test_captures_in_two_threads_take_turns(backend: GraphBackend) -> None:
    """A thread that captures waits for the capture of another one; without a capture it is not held up."""
    x, pool, seen = randn(backend, 2, 3), backend.new_pool(), list[Any]()

    def capture_too() -> None:
        seen.append((in_breakable_capture(), doubled(x)))
        with (
            backend.session(),
            torch.no_grad(),
            BreakableCUDAGraphCapture(backend, backend.new_pool()) as other,
        ):
            y = doubled(x * 3) + 1
        other.replay()
        seen.append(y.clone())

    thread = threading.Thread(target=capture_too)

    def start(h: Tensor) -> Tensor:
        thread.start()
        thread.join(0.3)
        return h + 1

    with backend.session(), torch.no_grad(), BreakableCUDAGraphCapture(backend, pool) as made:
        assert in_breakable_capture()
        y = made.add_eager(start, x * 2)
        assert thread.is_alive()
    assert not in_breakable_capture()
    thread.join()
    same(y, x * 2 + 1)
    same(seen, [(False, x * 2), x * 6 + 1])


def test_the_pool_tells_the_backend(backend: GraphBackend) -> None:
    x, pool = randn(backend, 2, 3), GraphPool(backend)
    for given in ({"pool": backend.new_pool()}, {"pool": pool}, {"backend": backend}):
        with backend.session(), torch.no_grad(), BreakableCUDAGraphCapture(**given) as made:
            assert in_breakable_capture()
            y = doubled(x * 2) + 1
        made.replay()
        same(y, x * 4 + 1)
    assert not in_breakable_capture()
    assert pool.nbytes > 0


def test_a_capture_is_used_once_and_replays_until_it_is_reset(backend: GraphBackend) -> None:
    x, pool = randn(backend, 256, 1024), backend.new_pool()
    fresh = BreakableCUDAGraphCapture(backend, pool)
    for call in (fresh.replay, lambda: fresh.add_eager(doubled, x)):
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


def fails_in_the_first_segment(x: Tensor) -> Any:
    explode(x * 2)


def fails_in_a_later_segment(x: Tensor) -> Any:
    h = doubled(x * 2) * 2
    explode(h)


def fails_in_a_piece(x: Tensor) -> Any:
    h = doubled(x * 2) * 2
    return eager_break_during_capture(explode)(h) or h


@pytest.mark.parametrize(
    "forward", [fails_in_the_first_segment, fails_in_a_later_segment, fails_in_a_piece]
)
def test_an_exception_ends_the_capture_cleanly(
    backend: GraphBackend, forward: Callable[[Tensor], Any]
) -> None:
    """The model runs on, the pool is empty, and graphs of other pools and new ones replay."""
    x, pool = randn(backend, 256, 1024), backend.new_pool()
    other, found = capture(backend, lambda: doubled(x * 3) + 1)
    with backend.session(), torch.no_grad():
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
    other.replay()
    same((y, found), (x * 4 + 1, x * 6 + 1))


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
        with (
            pytest.raises(CaptureError, match="eager piece explode failed"),
            BreakableCUDAGraphCapture(backend, pool),
        ):
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


class Unjoined(WithStreams):
    """A device on which no capture is valid."""

    def end(self, graph: Any) -> None:
        self.abort(graph)
        raise CaptureError("the capture is not valid: unjoined work", remedy="-")


def test_a_segment_that_is_not_valid_names_its_side_streams() -> None:
    backend = Unjoined()
    x = randn(backend, 2, 3)

    def forward() -> Tensor:
        h = x * 2
        for backend.now in (2, 3):
            z = h * 3  # aside
        backend.now = 1
        return doubled(h) + z

    with pytest.raises(CaptureError, match="the segment before eager piece doubled") as caught:
        capture(backend, forward)
    for stream in (2, 3):
        said = f"side stream {stream:#x} since {__file__}:"
        assert said in caught.value.message
    assert caught.value.message.count("`z = h * 3  # aside`") == 2
    assert "side stream 0x1" not in caught.value.message
    assert "wait_stream(side)" in caught.value.remedy


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

    with pytest.raises(CaptureError, match=r"the segment before .* is not valid") as caught:
        capture(
            backend, lambda: forward(join=torch.cuda.is_current_stream_capturing() is False), pool
        )
    assert "wait_stream(side)" in caught.value.remedy
    assert (
        "the end" if at_the_end else "h = doubled(h)  # the line of the break"
    ) in caught.value.message
    drop_locals(caught.value)
    backend.release_cached()
    assert backend.pool_bytes(pool) == 0
    made, y = capture(backend, lambda: forward(join=True), pool)
    x.add_(1)
    made.replay()
    same(y, x * (6 if at_the_end else 12))


@pytest.mark.gpu
def test_attention_in_a_piece_while_a_side_stream_is_forked() -> None:
    backend = select_backend("cuda")
    x, side = randn(backend, 2, 8, 64, 16), torch.cuda.Stream()
    attend = eager_break_during_capture(F.scaled_dot_product_attention)

    def forward() -> Tensor:
        h = x * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = h * 3
        y = attend(h, h, h)
        torch.cuda.current_stream().wait_stream(side)
        return y + z

    with pytest.raises(
        CaptureError, match=r"before eager piece .*attention.* is not valid"
    ) as caught:
        capture(backend, forward)
    assert f"side stream {side.cuda_stream:#x} since" in caught.value.message
    assert "`z = h * 3`" in caught.value.message


@pytest.mark.gpu
def test_one_of_two_side_streams_is_not_joined_at_the_end() -> None:
    backend = select_backend("cuda")
    x, sides = randn(backend, 64, 64), [torch.cuda.Stream() for _ in range(2)]

    def forward() -> list[Tensor]:
        h, results = doubled(x), list[Tensor]()
        for side in sides:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                results.append(h * 3)
        torch.cuda.current_stream().wait_stream(sides[0])
        return results

    with pytest.raises(CaptureError, match="the segment before the end is not valid") as caught:
        capture(backend, forward)
    for side in sides:
        assert f"side stream {side.cuda_stream:#x} since" in caught.value.message


def layered(x: Tensor) -> Tensor:
    """Four layers, with pieces of each kind."""
    h = x + 1
    for _ in range(4):
        h = doubled(h * 0.25) + h
        add_in_place(h, 0.5)
        left, right = chunks(h)[:2]
        h = left + right.repeat(1, 2).tanh()
    return h


def test_sizes_share_a_pool_and_replay_in_any_order(backend: GraphBackend) -> None:
    pool, sizes = backend.new_pool(), [64, 32, 8, 1]
    statics = {size: randn(backend, size, 6) for size in sizes}
    wrapper = BreakableCUDAGraphWrapper(layered, backend=backend, pool=pool)
    chooser, growth = random.Random(0), []
    with torch.no_grad():
        for size in sizes:
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
    assert growth[0] > 0
    assert growth[1:] == [0, 0, 0], "smaller captures fit into what the largest one reserved"


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
        assert len(made.eager_pieces) == layers
        return backend.pool_bytes(pool)

    assert pool_bytes(12) == pool_bytes(3)


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
            assert "piece" not in context.derived, (
                "a segment would read it at an address of the capture"
            )
        return piece(h) + context.derived["segment"]

    x, warming = randn(backend, 4, 6), [True, False]
    scales = [torch.full((), value, device=backend.device) for value in (2.0, 3.0, 5.0)]
    unchecked = CUDAGraphOptions(
        address_check="off"
    )  # else it would be refused that a segment's scale moves
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


ROWS = 4


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
        (lambda x: x[:1], lambda x: x[1:], "argument's memory"),
        (lambda x: x, lambda x: x.view(3, 2), "argument's memory"),
        (lambda x: [x * 2, 3], lambda x: [x * 2, 4], "returned 4 on replay; at capture it was 3"),
        (3, 3.0, "returned 3.0 on replay"),
        (None, lambda x: x * 2, "tensor"),
        (
            lambda x: [y := x * 2, y],
            lambda x: [x * 2, x * 3],
            "does not share memory with other results as it did",
        ),
        (lambda x: [y := x * 2, y[1:]], lambda x: [y := x * 2, y[:1]], "does not share memory"),
        (
            lambda x: [y := x[:, 1:] * 2, y],
            lambda x: [y := x[:, 1:] * 2, y.t()],
            "does not share memory",
        ),
    ],
)
def test_a_result_that_changes_is_refused(
    backend: GraphBackend, first: Any, later: Any, said: str
) -> None:
    x, piece = randn(backend, 2, 3), Changing()
    piece.result = first
    with (
        backend.session(),
        torch.no_grad(),
        BreakableCUDAGraphCapture(backend, backend.new_pool()) as made,
    ):
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


def test_a_result_of_the_same_shape_may_be_another_kind_of_tensor(backend: GraphBackend) -> None:
    """Other strides, a lazy negation, a gradient, a module's parameter; and each of them twice."""
    weight, piece = nn.Parameter(randn(backend, 3, 3)), Changing()
    x = randn(backend, 3, 3)
    kinds: list[Callable[[Tensor], Tensor]] = [
        lambda x: x * 2,
        lambda x: (x * 2).t(),
        lambda x: torch._neg_view(x),
        lambda x: x * weight,
        lambda _: weight,
    ]
    piece.result = kinds[0]
    with (
        backend.session(),
        torch.no_grad(),
        BreakableCUDAGraphCapture(backend, backend.new_pool()) as made,
    ):
        y = made.add_eager(piece, x * 2) + 1
    for result in [*kinds, *reversed(kinds)]:
        piece.result = result
        for seed in range(2):
            x.copy_(randn(backend, 3, 3, seed=seed))
            with torch.enable_grad():
                made.replay()
            same(y, (result(x * 2) + 1).detach())
    assert not y.requires_grad


def test_results_that_share_memory_may_lie_elsewhere_together(backend: GraphBackend) -> None:
    def piece(x: Tensor) -> Any:
        whole = (torch.cat([x, x, x]) * 2)[skipped:]
        return whole[:2], whole[1:2].t(), whole[:0] if skipped else whole.new_empty(0, 3)

    x, skipped = randn(backend, 2, 3), 0
    with (
        backend.session(),
        torch.no_grad(),
        BreakableCUDAGraphCapture(backend, backend.new_pool()) as made,
    ):
        rows, column, nothing = made.add_eager(piece, x * 3)
        found = rows + 1, column + 1, nothing + 1
    for skipped in (1, 2):
        made.replay()
        whole = (torch.cat([x, x, x]) * 6)[skipped:]
        same(found, (whole[:2] + 1, whole[1:2].t() + 1, x[:0]))


def expanded_rows(x: Tensor) -> Tensor:
    return x.mean(1, keepdim=True).expand(-1, 3)


def seen_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = x * 2
    return whole, whole[:, :1].expand(-1, 3)


@pytest.mark.parametrize("piece", [expanded_rows, seen_twice])
def test_segments_write_to_results_whose_elements_share_memory(
    backend: GraphBackend, piece: Callable[[Tensor], Any]
) -> None:
    x = randn(backend, 2, 3)

    def forward(run: Callable[[Tensor], Any]) -> Any:
        result = run(x + 1)
        first = result if isinstance(result, Tensor) else result[0]
        first[:, :1].neg_()
        return result

    made, output = capture(backend, lambda: forward(eager_break_during_capture(piece)))
    for seed in range(3):
        x.copy_(randn(backend, 2, 3, seed=seed))
        made.replay()
        same(output, forward(piece))


def test_a_result_that_is_no_longer_expanded_is_refused(backend: GraphBackend) -> None:
    piece, x = Changing(), randn(backend, 2, 3)
    piece.result = expanded_rows
    made, _ = capture(backend, lambda: eager_break_during_capture(piece)(x) * 2)
    piece.result = lambda x: x * 2
    with pytest.raises(CaptureError, match="expanded otherwise"):
        made.replay()


def test_several_results_are_copied_in_one_call(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy is a launch; results of other dtypes, with gradients, or of no rows among them."""
    weight, calls = nn.Parameter(torch.ones(3, device=backend.device)), list[int]()
    together = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda to, found: (calls.append(len(to)), together(to, found))
    )

    def piece(x: Tensor) -> Any:
        with torch.enable_grad():
            return x * 2, (x + 1).double(), x * weight, x[:0] * 2, x.t() * 3

    x = randn(backend, 2, 3)
    with (
        backend.session(),
        torch.no_grad(),
        BreakableCUDAGraphCapture(backend, backend.new_pool()) as made,
    ):
        found = [result + 1 for result in made.add_eager(piece, x * 2)]
    x.add_(1)
    with torch.enable_grad():
        made.replay()
    same(found, [(result + 1).detach() for result in piece(x * 2)])
    assert calls == [5]
    assert not any(result.requires_grad for result in found)


@pytest.mark.parametrize(
    "nested",
    [
        lambda x: (x * 2, {"weights": x * 3}),
        lambda x: (x * 2, [x * 3]),
        lambda x: ((x * 2,), (None,)),
        lambda x: (x * 2, (x * 3, x * 4)),
    ],
)
def test_results_may_be_nested(backend: GraphBackend, nested: Any) -> None:
    """With as many leaves as parts, too."""
    x = randn(backend, 2, 3)
    with (
        backend.session(),
        torch.no_grad(),
        BreakableCUDAGraphCapture(backend, backend.new_pool()) as made,
    ):
        results = tree_leaves(made.add_eager(nested, x + 1))
        found = [result + 1 for result in results if result is not None]
    x.add_(1)
    made.replay()
    expected = [leaf for leaf in tree_leaves(nested(x + 1)) if leaf is not None]
    same(found, [leaf + 1 for leaf in expected])


def test_results_that_are_not_tensors_may_be_equal_objects(backend: GraphBackend) -> None:
    x, piece = randn(backend, 2, 3), Changing()
    piece.result = lambda x: ["text" + str(len(x)), (1, 2), {"k": slice(len(x))}, x * 2]
    with (
        backend.session(),
        torch.no_grad(),
        BreakableCUDAGraphCapture(backend, backend.new_pool()) as made,
    ):
        y = made.add_eager(piece, x + 1)[-1] + 1
    x.add_(1)
    made.replay()
    same(y, (x + 1) * 2 + 1)


def append(_: Tensor, given: Any) -> None:
    given["list"].append(1.5)


def set_key(x: Tensor, given: Any) -> None:
    given["key"] = x


@pytest.mark.parametrize("function", [append, set_key])
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

    with pytest.raises(
        CaptureError, match=f"eager piece {function.__name__} puts values into a list"
    ) as caught:
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

    made, y = capture(
        backend, lambda: consume(x * 2, [x + 1, x + 2, 3], {"factor": 2, "rest": x + 3}) * 2
    )
    x.add_(1)
    made.replay()
    same(y, (x * 4 + x + 1) * 2)
    assert left == [3] * 3


class Stateful(nn.Module):
    """A piece hands out state, and the segment behind it writes there."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.attribute = way, torch.zeros(3)
        self.inner = nn.Module()
        self.inner.register_buffer("buffer", torch.zeros(3))

    @eager_break_during_capture
    def state(self) -> Tensor:
        """Of the kind that ``way`` names."""
        if self.way == "made anew":  # state before it ran, but not what it returns
            self.attribute = self.attribute + 1
        return {"buffer": self.inner.buffer, "view": self.inner.buffer[1:]}.get(
            self.way, self.attribute
        )

    @eager_break_during_capture
    def delayed(self, x: Tensor) -> Tensor:
        """What it was called with the time before; state before it runs, but not afterwards."""
        before, self.attribute = self.attribute, x.clone()
        return before

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "delayed":
            return self.delayed(x[0] * 2) + x
        return self.state().add_(x[0, -1]) + x[:, -1:]


@pytest.mark.parametrize("way", ["buffer", "view", "attribute", "made anew", "delayed"])
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
            if (
                way == "made anew"
            ):  # the segment writes to the slot, and the next replay does not see it
                continue
            same(output, other(x))
            same((model.inner.buffer, model.attribute), (other.inner.buffer, other.attribute))


def test_state_that_moved_is_refused(backend: GraphBackend) -> None:
    model, x = Stateful("buffer").to(backend.device), randn(backend, 2, 3)
    made, _ = capture(backend, lambda: model(x))
    model.inner.buffer = model.inner.buffer.clone()
    with pytest.raises(
        CaptureError, match="at capture it was its own argument's memory, or a module's"
    ):
        made.replay()


class Keeps(nn.Module):
    """A module that binds a tensor to an attribute of its own, or of the model."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.kept, self.outer = way, None, [None]
        self.register_buffer("buffer", torch.zeros(4, 4))

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
    with (
        closing(
            open_runner(
                backend, model, width=4, splitting_modules=["s"], cudagraph_capture_sizes=[4]
            )
        ) as runner,
        torch.no_grad(),
    ):
        assert runner.report.records[0].eager_pieces == 1
        for seed in range(4):
            x = randn(backend, 4, 4, seed=seed)
            same(runner(x=x), other(x))
        kept = model.s.kept if way == "attribute" else model.s.buffer
        assert not backend.in_pool(kept, runner.graphs.scope.pool)


class Leaves:
    """A piece that leaves what it computes in an attribute that no module has."""

    kept: Tensor

    @eager_break_during_capture
    def __call__(self, x: Tensor) -> Tensor:
        self.kept = x * 3
        return x + 1


@eager_break_during_capture
def added(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@pytest.mark.parametrize("read", ["whole", "view", "write", "returned too", "another piece"])
@pytest.mark.parametrize("inference", [False, True])
def test_segments_must_not_read_what_a_piece_made_aside(
    backend: GraphBackend, read: str, inference: bool
) -> None:
    piece, x = Leaves(), randn(backend, 2, 3)
    returning = eager_break_during_capture(lambda h: setattr(piece, "kept", h * 3) or piece.kept)

    def forward(x: Tensor) -> Tensor:
        if read == "returned too":
            return returning(x * 2) + piece.kept
        y = piece(x * 2)
        if read == "another piece":
            return added(y, piece.kept) * 2
        if read == "write":
            piece.kept.mul_(y)
            return y
        return y + (piece.kept if read == "whole" else piece.kept[0])

    said = r"an eager piece made and did not return, at .*test_breakable\.py:\d+: `.*piece\.kept"
    with torch.inference_mode(inference):
        with pytest.raises(CaptureError, match=said) as caught:
            capture(backend, lambda: forward(x))
        assert "copy_" in caught.value.remedy
        made, output = capture(backend, lambda: piece(x * 2) + x)  # it may leave what nobody reads
        made.replay()
        same(output, x * 3 + 1)
    wrapper = BreakableCUDAGraphWrapper(forward, backend=backend)
    with forward_context(PIECEWISE, BatchDescriptor(2)), pytest.raises(CaptureError, match=said):
        wrapper(x)
    assert not wrapper.entries


def test_a_forward_must_not_return_what_a_piece_made_aside(backend: GraphBackend) -> None:
    piece, x = Leaves(), randn(backend, 2, 3)
    wrapper = BreakableCUDAGraphWrapper(lambda x: (piece(x * 2), [piece.kept]), backend=backend)
    with (
        forward_context(PIECEWISE, BatchDescriptor(2)),
        pytest.raises(CaptureError, match="an eager piece made and did not return"),
    ):
        wrapper(x)
    assert not wrapper.entries


@pytest.mark.parametrize("wrapped", [False, True])
def test_segments_must_not_read_what_a_piece_replaces_later(
    backend: GraphBackend, wrapped: bool
) -> None:
    """The tensor was made aside by the piece of the run before."""
    piece, x = Leaves(), randn(backend, 2, 3)

    def forward(x: Tensor) -> Tensor:
        before = piece.kept * 2
        return piece(x * 2) + before

    def run() -> None:
        if wrapped:
            with forward_context(PIECEWISE, BatchDescriptor(2)):
                BreakableCUDAGraphWrapper(forward, backend=backend)(x)
        else:
            capture(backend, lambda: forward(x))

    piece.kept = torch.zeros_like(x)
    said = r"Leaves.* replaces a tensor that graph code reads before it, at .*`return piece\(x"
    with pytest.raises(CaptureError, match=said) as caught:
        run()
    assert "copy_" in caught.value.remedy


def test_a_piece_may_replace_what_a_segment_made(backend: GraphBackend) -> None:
    piece, x = Leaves(), randn(backend, 2, 3)

    def forward() -> Tensor:
        piece.kept = x * 5
        before = piece.kept * 2
        return piece(x * 2) + before

    made, output = capture(backend, forward)
    x.add_(1)
    made.replay()
    same(output, x * 2 + 1 + x * 10)


@torch.library.custom_op(
    "eager_piece_tests::unsafe", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def unsafe(x: Tensor) -> Tensor:
    return x + 1


def test_operators_tagged_as_unsafe_run_in_pieces_alone(backend: GraphBackend) -> None:
    x = randn(backend, 2, 3)
    said = r"eager_piece_tests::unsafe is tagged .*: `.*unsafe\(x\) \* 2"
    with pytest.raises(CaptureError, match=said):
        capture(backend, lambda: unsafe(x) * 2)
    made, output = capture(backend, lambda: eager_break_during_capture(unsafe)(x) * 2)
    x.add_(1)
    made.replay()
    same(output, (x + 1) * 2)


class Made:
    table: Tensor | None = None


def test_segments_read_what_a_piece_made_before_the_capture(backend: GraphBackend) -> None:
    state, x = Made(), randn(backend, 2, 3)

    @eager_break_during_capture
    def piece(x: Tensor) -> Tensor:
        if state.table is None:
            state.table = torch.ones_like(x)
        return x + state.table

    made, output = capture(backend, lambda: piece(x * 2) + state.table)
    x.add_(1)
    made.replay()
    same(output, x * 2 + 2)


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
    with (
        backend.session(),
        torch.no_grad(),
        BreakableCUDAGraphCapture(backend, backend.new_pool()) as made,
    ):
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


def test_memory_from_elsewhere_is_held_by_the_piece(backend: GraphBackend) -> None:
    x = randn(backend, 64, 64)
    cache = torch.zeros(64, 64, device=backend.device)
    held = [cache]
    kept, z = capture(backend, lambda: eager_break_during_capture(Tensor.copy_)(held[0], x * 2) + 1)
    del cache, held[:]
    others = [torch.full((64, 64), 7.0, device=backend.device) for _ in range(8)]
    x.add_(1)
    kept.replay()
    same(z, x * 2 + 1)
    assert all(bool((other == 7).all()) for other in others)


def transposing(q: Tensor) -> Tensor:
    q.transpose_(0, 1)  # a square, so that the shape says nothing
    return torch.softmax(q, 1).t()


def returning_two(q: Tensor) -> tuple[Tensor, Tensor]:
    q.t_()
    return q.t() + 1, torch.softmax(q, 0).t()


class Attend(nn.Module):
    """Two linear maps, and between them what changes its argument."""

    def __init__(
        self, backend: GraphBackend, function: Callable[..., Any], first: bool = False
    ) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.attend, self.first = cgplan.eager_break_during_capture(function), first
        self.eval().to(backend.device)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:  # the runner's own input is the argument
            return self.down(self.attend(x[:]))
        h = self.up(x)
        found = self.attend(h)
        return self.down(found[0] * 2 + found[1] if isinstance(found, tuple) else found)


@pytest.mark.parametrize(
    ("function", "first"),
    [(transposing, False), (returning_two, False), (transposing, True)],
)
def test_eager_pieces_that_change_their_argument(
    backend: GraphBackend, function: Callable[..., Any], first: bool
) -> None:
    model = Attend(backend, function, first)
    runner = open_runner(backend, model, width=4, cudagraph_capture_sizes=[2, 4])
    for seed in range(5):
        x = randn(backend, 4, 4, seed=seed)
        same(runner(x=x.clone()), model(x.clone()).detach())


def setting_memory(q: Tensor) -> Tensor:
    return q.set_(q * 2)


def test_an_eager_piece_that_gives_its_argument_other_memory_is_refused(
    backend: GraphBackend,
) -> None:
    """Segments that read the argument afterwards would read what the capture left there."""
    model = Attend(backend, setting_memory)
    with pytest.raises(
        CaptureError,
        match=r"eager piece setting_memory .* gives a tensor other memory .*: `found = ",
    ):
        open_runner(backend, model, width=4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_higher_order_operator_in_a_piece(backend: GraphBackend) -> None:
    q = randn(backend, 1, 1, 16, 16)
    with backend.session(), torch.no_grad(), BreakableCUDAGraphCapture(backend) as recorded:
        h = recorded.add_eager(lambda q: flex_attention(q, q, q), q * 2)
        y = h + 1
    q.copy_(randn(backend, 1, 1, 16, 16))
    with torch.no_grad():
        recorded.replay()
        torch.testing.assert_close(y, flex_attention(q * 2, q * 2, q * 2) + 1)
    recorded.reset()


def broken(model: nn.Module, backend: GraphBackend, *patterns: str) -> functools.partial[Any]:
    """The model's forward, broken at modules."""
    return functools.partial(Breaks(model, patterns, (), backend.device.type).forward, model)


def test_breaks_at_modules_are_there_in_a_capture_alone(backend: GraphBackend) -> None:
    model = Broken().to(backend.device).eval()
    x = randn(backend, 4, 6)
    made, y = capture(
        backend, functools.partial(broken(model, backend, "layers.*.mix", "layers.1.*"), x)
    )
    assert kinds(made) == "eSee"
    assert [piece.name for piece in made.eager_pieces] == [
        "layers.0.mix",
        "layers.1.mix",
        "layers.1.out",
    ]
    x.add_(1)
    made.replay()
    with torch.no_grad():
        same(y, model(x))
    assert kinds(capture(backend, lambda: model(x))[0]) == "S"
    assert all("forward" not in vars(module) for module in model.modules())


def test_the_outer_of_two_matching_modules_is_the_piece(backend: GraphBackend) -> None:
    model = Broken().to(backend.device).eval()
    forward = broken(model, backend, "layers.*.mix", "layers.*.mix.inner")
    made, _ = capture(backend, functools.partial(forward, randn(backend, 4, 6)))
    assert [piece.name for piece in made.eager_pieces] == ["layers.0.mix", "layers.1.mix"]


def test_a_forward_that_the_user_replaced_comes_back(backend: GraphBackend) -> None:
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    model[1] = model[0]  # one module, two names
    own = model[0].forward = lambda x: x * 5
    x = randn(backend, 2, 3)
    made, y = capture(backend, functools.partial(broken(model, backend, "*"), x))
    assert [piece.name for piece in made.eager_pieces] == ["0", "0"]
    same(y, x * 5 * 5)
    assert model[0].forward is own


def test_a_forward_that_fails_leaves_no_breaks(backend: GraphBackend) -> None:
    model = Broken().to(backend.device).eval()
    with pytest.raises(RuntimeError):
        capture(
            backend, functools.partial(broken(model, backend, "layers.*.mix"), randn(backend, 4, 5))
        )
    assert all("forward" not in vars(module) for module in model.modules())


def by_modules(
    model: nn.Module, backend: GraphBackend, *patterns: str, sizes: Any = (2,)
) -> GraphRunner:
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


def test_runners_of_one_model_break_at_their_own_modules(backend: GraphBackend) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU()).to(backend.device)
    model[1].forward = nn.functional.gelu  # the user's
    x = randn(backend, 2, 6)
    with torch.no_grad():
        wanted = model(x)
    both, one = by_modules(model, backend, "0", "1"), by_modules(model, backend, "1")
    assert [runner.report.records[0].eager_pieces for runner in (both, one)] == [2, 1]
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        made, y = capture(backend, functools.partial(copied, x))
        assert len(made.eager_pieces) == 0
        same(y, wanted)
    same(both(input=x), wanted)
    same(one(input=x), wanted)
    model.runner = both  # a cycle: the model holds what breaks it
    gone = weakref.ref(model)
    del model, both, one, made, copied
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("layers.*.mixx", r"Did you mean layers\.\*\.mix"),
        ("layers.mix", r"layers\.\*\.mix"),
        ("*.mix", "layers"),
        ("layers.*", None),
        ("zzzzzz", r"The model has layers, layers\.\*, layers\.\*\.mix"),
    ],
)
def test_a_pattern_that_matches_nothing(pattern: str, hint: str | None) -> None:
    model = Broken()
    if hint is None:  # `*` stands for one component, no more
        assert [*Breaks(model, [pattern], (), "cpu").modules] == ["layers.0", "layers.1"]
        return
    with pytest.raises(ConfigError, match="no submodule matches") as caught:
        Breaks(model, ["layers.*.mix", pattern], (), "cpu")
    assert pattern in caught.value.message
    assert re.search(hint, caught.value.remedy)
