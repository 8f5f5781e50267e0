"""Code that changes a tensor object itself (``transpose_``, ``unsqueeze_``), between graphs and after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import same
from torch import Tensor, nn

import cgplan
from cgplan import (
    BatchDescriptor,
    BreakableCUDAGraphWrapper,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GraphRunner,
    Input,
    forward_context,
)
from cgplan.backends import GraphBackend
from cgplan.errors import CaptureError
from cgplan.graphs.wrapper import CUDAGraphOptions

pytestmark = pytest.mark.usefixtures("quiet_collector")

ROWS = 4


def open_runner(backend: GraphBackend, model: Callable[..., Any], **compilation: Any) -> GraphRunner:
    torch._dynamo.reset()
    return cgplan.capture(
        model,
        {"x": Input(shape=("num_tokens", 4), dtype="float32", pad=0)},
        compilation={"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [2, 4], **compilation},
        device=backend.device.type,
    )


def batch(backend: GraphBackend, seed: int) -> Tensor:
    return torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(seed)).to(backend.device)


def same_as_eager(backend: GraphBackend, runner: GraphRunner, model: nn.Module) -> None:
    for seed in range(5):
        x = batch(backend, seed)
        same(runner(x=x.clone()), model(x.clone()).detach())


def transposing(q: Tensor) -> Tensor:
    q.transpose_(0, 1)  # a square, so that the shape says nothing
    return torch.softmax(q, 1).t()


def unsqueezing(q: Tensor) -> Tensor:
    q.unsqueeze_(0)
    return torch.softmax(q, 1)[0]


def only_later(q: Tensor) -> Tensor:
    only_later.calls += 1  # type: ignore[attr-defined]
    y = torch.softmax(q, 1)
    if only_later.calls > 6:  # type: ignore[attr-defined]
        q.t_()
    return y


def returning_nothing(q: Tensor) -> None:
    q.copy_(torch.softmax(q, 1))
    q.unsqueeze_(0)


def returning_two(q: Tensor) -> tuple[Tensor, Tensor]:
    q.t_()
    return q.t() + 1, torch.softmax(q, 0).t()


def failing(q: Tensor) -> Tensor:
    """Changes its argument and then fails, on each second call."""
    failing.calls += 1  # type: ignore[attr-defined]
    if failing.calls % 2 == 0 and failing.fails:  # type: ignore[attr-defined]
        q.t_()
        raise ValueError("failed")
    return torch.softmax(q, 1)


class Attend(nn.Module):
    """Two linear maps, and between them what changes its argument."""

    def __init__(self, backend: GraphBackend, function: Callable[..., Any], first: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.attend, self.first = cgplan.eager_break_during_capture(function), first
        self.eval().to(backend.device)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:  # the runner's own input is the argument
            return self.down(self.attend(x[:]))
        h = self.up(x)
        found = self.attend(h)
        if found is None:
            found = h.reshape(-1, 4)
        return self.down(found[0] * 2 + found[1] if isinstance(found, tuple) else found)


@pytest.mark.parametrize(
    ("function", "first"),
    [(f, False) for f in (transposing, unsqueezing, only_later, returning_nothing, returning_two)]
    + [(f, True) for f in (transposing, unsqueezing)],
)
def test_eager_pieces_that_change_their_argument(
    backend: GraphBackend, function: Callable[..., Any], first: bool
) -> None:
    only_later.calls = 0  # type: ignore[attr-defined]
    model = Attend(backend, function, first)
    same_as_eager(backend, open_runner(backend, model), model)


class Softmax(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return transposing(q)


class Modules(nn.Module):
    """The same by splitting_modules."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.attend, self.down = nn.Linear(4, 4), Softmax(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.attend(self.up(x)))


def test_modules_that_change_their_argument(backend: GraphBackend) -> None:
    model = Modules().eval().to(backend.device)
    same_as_eager(backend, open_runner(backend, model, splitting_modules=["attend"]), model)


def test_an_eager_piece_that_fails_after_it_changed_its_argument(backend: GraphBackend) -> None:
    failing.calls, failing.fails = 0, False  # type: ignore[attr-defined]
    model = Attend(backend, failing)
    runner = open_runner(backend, model)
    for seed in range(3):
        x = batch(backend, seed)
        failing.calls, failing.fails = 1, True  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="failed"):
            runner(x=x)
        failing.fails = False  # type: ignore[attr-defined]
        same(runner(x=x), model(x).detach())


class Wrapped(nn.Module):
    """Wrappers of the model's own; its code between them changes the first one's output."""

    def __init__(self, backend: GraphBackend) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.eval().to(backend.device)
        copied = CUDAGraphOptions(copied_arguments=(0,))
        self.run_up = CUDAGraphWrapper(self.up, CUDAGraphMode.PIECEWISE)
        self.run_down = CUDAGraphWrapper(self.down, CUDAGraphMode.PIECEWISE, options=copied)

    def forward(self, x: Tensor) -> Tensor:
        h = self.run_up(x).transpose_(0, 1)
        return self.run_down(torch.softmax(h, 1).t().contiguous())


def test_a_model_that_changes_what_its_wrappers_return(backend: GraphBackend) -> None:
    model = Wrapped(backend)
    same_as_eager(backend, open_runner(backend, model, piecewise="wrappers", address_check="always"), model)


@pytest.mark.parametrize("borrow", [True, False])
@pytest.mark.parametrize("change", ["t_", "squeeze_", "requires_grad_", "detach_"])
def test_callers_that_change_what_a_wrapper_returns(backend: GraphBackend, borrow: bool, change: str) -> None:
    scale = torch.ones(3, device=backend.device)

    def model(x: Tensor) -> dict[str, Any]:
        return {"y": x * 2, "list": [x[:1] + 1, scale], "rows": 4}

    wrapped = CUDAGraphWrapper(
        model, CUDAGraphMode.FULL, backend=backend, options=CUDAGraphOptions(borrow_outputs=borrow)
    )
    x = torch.empty(4, 4, device=backend.device)
    with torch.no_grad(), forward_context(CUDAGraphMode.FULL, BatchDescriptor(num_tokens=4)):
        for seed in range(5):
            x.copy_(batch(backend, seed))
            found = wrapped(x)
            same(found, model(x))
            assert found["list"][1] is scale
            assert not found["y"].requires_grad
            getattr(found["y"], change)()
            getattr(found["list"][0], change)()
            found["list"].append(x)
        assert wrapped(x)["y"] is not found["y"]


class Viewing(nn.Module):
    """Returns views of what it is given and holds, these themselves, and what an eager piece hands through."""

    def __init__(self, backend: GraphBackend) -> None:
        super().__init__()
        self.piece = cgplan.eager_break_during_capture(lambda x: x.t())
        self.register_buffer("scale", torch.ones(4, 4, device=backend.device))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        made = {"half": x[:2], "turned": self.piece(x), "part": self.scale[1:], "sum": x + self.scale}
        return {**made, "x": x, "scale": self.scale}


@pytest.mark.parametrize("change", ["t_", "unsqueeze_", "requires_grad_"])
@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("kind", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
def test_callers_that_change_views_of_memory_that_no_graph_owns(
    backend: GraphBackend, kind: type[CUDAGraphWrapper], inference: bool, change: str
) -> None:
    """A view that eager calls would make anew each time is the caller's; an argument or a buffer is what it is."""
    model = Viewing(backend)
    wrapped = kind(model, CUDAGraphMode.PIECEWISE, backend=backend)
    x = torch.empty(4, 4, device=backend.device)
    with forward_context(CUDAGraphMode.PIECEWISE, BatchDescriptor(num_tokens=4)):
        for seed in range(5):
            x.copy_(batch(backend, seed))
            with torch.inference_mode(inference), torch.no_grad():
                found, wanted = wrapped(x), model(x)
            same(found, wanted)
            assert found["x"] is x
            assert found["scale"] is model.scale
            for name in ("half", "turned", "part", "sum"):
                value = found[name]
                assert not value.requires_grad
                if value.is_inference():  # made by the call that captured, in inference mode
                    continue
                value.unsqueeze_(0) if change == "unsqueeze_" else getattr(value, change)()


class Block(nn.Module):
    def __init__(self, backend: GraphBackend, function: Callable[..., Any] = torch.softmax) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function
        self.eval().to(backend.device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.up(x)
        return self.down(self.function(h, -1)), h


@pytest.mark.parametrize("policy", ["off", "first", "always"])
def test_callers_that_change_what_a_compiled_model_returns(backend: GraphBackend, policy: str) -> None:
    torch._dynamo.reset()
    model = Block(backend)
    split = cgplan.compile_piecewise(
        model,
        {
            "inputs": {"x": {"shape": ["num_tokens", 4], "dtype": "float32", "pad": 0}},
            "compilation": {
                "cudagraph_mode": "PIECEWISE",
                "cudagraph_capture_sizes": [4],
                "splitting_ops": ["aten::softmax"],
                "address_check": policy,
            },
        },
        backend=backend,
    )
    x = torch.empty(4, 4, device=backend.device)
    with torch.no_grad():
        split(x=x)
        for seed in range(6):
            x.copy_(batch(backend, seed))
            with forward_context(CUDAGraphMode.PIECEWISE, BatchDescriptor(num_tokens=4)):
                found = split(x=x)
            same(found, model(x))
            found[0].unsqueeze_(0)
            found[1].t_()


_LIBRARY = torch.library.Library("changed", "FRAGMENT")
_LIBRARY.define("attend(Tensor x, int dim) -> Tensor")


def _attend(x: Tensor, dim: int) -> Tensor:
    return transposing(x)


_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("changed::attend", lambda x, dim: torch.empty_like(x), lib=_LIBRARY)


def swapping_memory(q: Tensor) -> Tensor:
    q.data = q.data * 2
    return q.softmax(1)


def setting_memory(q: Tensor) -> None:
    q.set_(q * 2)


@pytest.mark.parametrize("function", [swapping_memory, setting_memory])
def test_an_eager_piece_that_gives_its_argument_other_memory_is_refused(
    backend: GraphBackend, function: Callable[..., Any]
) -> None:
    """Segments that read the argument afterwards would read what the capture left there."""
    model = Attend(backend, function)
    with pytest.raises(
        CaptureError, match=rf"eager piece {function.__name__} gives a tensor .* other memory .*: `found = "
    ):
        open_runner(backend, model)


@pytest.mark.parametrize("policy", ["off", "first", "always"])
def test_operators_that_change_a_segments_output(backend: GraphBackend, policy: str) -> None:
    class Operator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.ops.changed.attend(self.up(x), -1))

    model = Operator().eval().to(backend.device)
    runner = open_runner(backend, model, splitting_ops=["changed::attend"], address_check=policy)
    same_as_eager(backend, runner, model)


def by_segment(h: Tensor) -> Tensor:
    a = torch.softmax(h, -1)
    h.unsqueeze_(0)
    b = a * 2 + h.sum()
    return b + torch.softmax(h, 1)[0] * 3


def by_strides(h: Tensor) -> Tensor:
    a = torch.softmax(h, -1)
    h.transpose_(0, 1)
    b = a * 2
    return b + torch.softmax(h, 0).t() * 3


def by_view(h: Tensor) -> Tensor:
    view = h.detach()
    a = torch.softmax(h, -1)
    view.t_()
    b = a * 2
    return b + torch.softmax(view, 0).t() * 3


def by_itself(h: Tensor) -> Tensor:
    a = torch.softmax(h, -1)
    h.contiguous().unsqueeze_(0)  # which is h
    b = a * 2 + h.sum()
    return b + torch.softmax(h, 1)[0] * 3


def by_squeeze(h: Tensor) -> Tensor:
    h = h.unsqueeze(0) * 1
    a = torch.softmax(h, -1)
    h.squeeze_(0)
    return (a * 2)[0] + torch.softmax(h, -1)


def in_a_piece(h: Tensor) -> Tensor:
    return h.t_().softmax(0).t()


@pytest.mark.parametrize("function", [by_segment, by_strides, by_view, by_itself, by_squeeze, in_a_piece])
def test_a_piece_may_change_the_shape_of_a_tensor_that_another_one_made(
    backend: GraphBackend, function: Callable[[Tensor], Tensor]
) -> None:
    ops = ["aten::softmax", *(["aten::t_"] if function is in_a_piece else [])]
    model = Block(backend, lambda h, _: function(h))
    runner = open_runner(backend, lambda x: model(x)[0], splitting_ops=ops, cudagraph_capture_sizes=[4])
    for seed in range(4):
        x = batch(backend, seed)
        torch.testing.assert_close(runner(x=x), model(x)[0].detach())


def within(h: Tensor) -> Tensor:
    first = (h * 2).unsqueeze_(0)
    return first.softmax(-1)[0]


def of_a_view(h: Tensor) -> Tensor:
    a = torch.softmax(h, -1)
    return a + h[:].unsqueeze_(0)[0]


@pytest.mark.parametrize("function", [within, of_a_view])
def test_shapes_that_a_piece_changes_of_its_own_tensors(
    backend: GraphBackend, function: Callable[[Tensor], Tensor]
) -> None:
    model = Block(backend, lambda h, _: function(h))
    runner = open_runner(backend, model, splitting_ops=["aten::softmax"])
    for seed in range(4):
        x = batch(backend, seed)
        same(runner(x=x), tuple(t.detach() for t in model(x)))


def test_an_eager_piece_that_changes_what_another_one_made(backend: GraphBackend) -> None:
    def function(h: Tensor, _: int) -> Tensor:
        a = torch.softmax(h, -1)
        b = h * 2
        return torch.softmax(a.t_(), 0).t() + b

    model = Block(backend, function)
    runner = open_runner(backend, model, splitting_ops=["aten::softmax", "aten::t_"])
    for seed in range(4):
        x = batch(backend, seed)
        same(runner(x=x), tuple(t.detach() for t in model(x)))
