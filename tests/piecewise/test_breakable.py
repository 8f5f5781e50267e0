"""Breakable capture: segments with eager pieces between them, on the tape and on CUDA alike."""

from __future__ import annotations

import gc
import random
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import same
from devices import WithStreams
from pieces import Boom, Counting, add_in_place, capture, doubled, explode, kinds, nothing, randn
from torch import Tensor, nn

from cgplan import (
    BatchDescriptor,
    BreakableCUDAGraphCapture,
    BreakableCUDAGraphWrapper,
    CaptureError,
    CUDAGraphMode,
    CUDAGraphOptions,
    HostSyncError,
    SealedError,
    capture_allowed,
    eager_break_during_capture,
    forward_context,
    get_forward_context,
    in_breakable_capture,
)
from cgplan.backends import GraphBackend, select_backend
from cgplan.captures.failures import drop_locals
from cgplan.graphs.pools import GraphPool

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
