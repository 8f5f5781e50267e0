"""Eager pieces: their arguments, results and state at capture and on each replay."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from checks import same
from pieces import Boom, Changing, capture, explode, open_runner, randn
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._pytree import tree_leaves

import cgplan
from cgplan import (
    BatchDescriptor,
    BreakableCUDAGraphCapture,
    BreakableCUDAGraphWrapper,
    CaptureError,
    CUDAGraphMode,
    eager_break_during_capture,
    forward_context,
)
from cgplan.backends import GraphBackend

pytestmark = pytest.mark.usefixtures("quiet_collector")

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
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


def expanded(x: Tensor) -> Tensor:
    return x.mean(1, keepdim=True).expand(-1, 3)


def seen_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    whole = x * 2
    return whole, whole[:, :1].expand(-1, 3)


@pytest.mark.parametrize("piece", [expanded, seen_twice])
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
    piece.result = expanded
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

    said = r"an eager piece made and did not return, at .*test_eager_piece\.py:\d+: `.*piece\.kept"
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
