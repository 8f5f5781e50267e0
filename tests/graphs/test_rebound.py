"""State that a forward reads and binds anew is refused at capture; state that it only keeps is not."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from checks import Tally, back_at, reserved
from torch import Tensor, nn

import cgplan
from cgplan import AddressError, CaptureError, GraphRunner, Input
from cgplan.backends import GraphBackend

WAYS: dict[str, dict[str, Any]] = {
    "full": {"cudagraph_mode": "FULL"},
    "ops": {"cudagraph_mode": "PIECEWISE", "splitting_ops": ["aten::softmax"]},
    "modules": {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["middle"]},
}
all_ways = pytest.mark.parametrize("way", list(WAYS))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Middle(nn.Module):
    """The eager piece."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


class Model(nn.Module):
    """``softmax(x * scale)`` and whatever ``change`` does to its attributes on the way."""

    def __init__(self, backend: GraphBackend, change: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.middle = Middle()
        self.inner = nn.Module()
        self.step, self.inner.total = 0, 0
        self.cache = torch.ones(2, device=backend.device)
        self.inner._kept = torch.ones(2, device=backend.device)
        self.listed = [torch.ones(2, device=backend.device)]
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(self.change(self, x))


def open_runner(backend: GraphBackend, model: Callable[..., Any], way: str, **compilation: Any) -> GraphRunner:
    return cgplan.capture(
        model,
        {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)},
        compilation={"cudagraph_capture_sizes": [4, 8], "outputs": "clone", **WAYS[way], **compilation},
        device=backend.device.type,
    )


def adds_to_a_tensor(model: Model, x: Tensor) -> Tensor:
    model.cache = model.cache + x.sum(0)
    return x + model.cache


def adds_to_a_private_one_inside(model: Model, x: Tensor) -> Tensor:
    model.inner._kept = model.inner._kept * 2
    return x + model.inner._kept


def adds_to_one_in_a_list(model: Model, x: Tensor) -> Tensor:
    model.listed[0] = model.listed[0] + 1
    return x + model.listed[0]


def counts_and_uses_it(model: Model, x: Tensor) -> Tensor:
    model.step += 1
    return x * model.step


def counts_inside_and_makes_a_tensor_of_it(model: Model, x: Tensor) -> Tensor:
    model.inner.total += 1
    return x * torch.full((2,), float(model.inner.total), device=x.device)


@all_ways
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (adds_to_a_tensor, "cache"),
        (adds_to_a_private_one_inside, "inner._kept"),
        (counts_and_uses_it, "step"),
        (counts_inside_and_makes_a_tensor_of_it, "inner.total"),
    ],
)
def test_state_that_is_read_and_bound_anew_is_refused(
    backend: GraphBackend, way: str, change: Callable[..., Tensor], named: str
) -> None:
    model = Model(backend, change).eval()
    before = reserved(backend)
    with pytest.raises(CaptureError, match=f"the forward reads {named} and binds it again") as caught:
        open_runner(backend, model, way)
    assert "in place" in caught.value.remedy
    del caught
    gc.collect()
    assert back_at(backend, before), "attributes hold what the warm-up left, no graph memory"


def test_state_in_a_list_is_refused(backend: GraphBackend) -> None:
    with pytest.raises(CaptureError, match=r"the forward reads listed\[0\]"):
        open_runner(backend, Model(backend, adds_to_one_in_a_list).eval(), "full")


def keeps_its_result(model: Model, x: Tensor) -> Tensor:
    model.last = x * 2
    return model.last + 0


def keeps_its_input(model: Model, x: Tensor) -> Tensor:
    model.last = x
    return x * 2


def reads_what_it_has_just_made(model: Model, x: Tensor) -> Tensor:
    model.cache = x.sum(0)
    return x * 2 + 0 * model.cache


def writes_in_place(model: Model, x: Tensor) -> Tensor:
    model.cache.add_(1)
    return x * 2


@pytest.mark.parametrize("way", ["full", "modules"])
@pytest.mark.parametrize("change", [keeps_its_result, keeps_its_input, reads_what_it_has_just_made, writes_in_place])
def test_state_that_is_kept_or_written_in_place_is_none(
    backend: GraphBackend, way: str, change: Callable[..., Tensor]
) -> None:
    with closing(open_runner(backend, Model(backend, change).eval(), way)) as runner:
        assert runner.report.warnings == ()
        x = torch.randn(3, 2, device=backend.device)
        assert torch.equal(runner(x=x), (x * 2).softmax(-1))


class Pair(NamedTuple):
    key: Tensor
    value: Tensor


@dataclass(slots=True)
class Slotted:
    key: Tensor


@dataclass(frozen=True, slots=True)
class FrozenSlotted:
    key: Tensor


class Plain:
    def __init__(self, key: Tensor) -> None:
        self.key = key


def adds_to_a_tuple(held: Any, x: Tensor) -> tuple[Any, Tensor]:
    return ((held[0][0] + x.sum(0),),), held[0][0]


def adds_to_a_named_tuple(held: Any, x: Tensor) -> tuple[Any, Tensor]:
    return Pair(held.key, held.value + x.sum(0)), held.value


def adds_in_a_slot(held: Any, x: Tensor) -> tuple[Any, Tensor]:
    key, held.key = held.key, held.key + x.sum(0)
    return held, key


def makes_a_frozen_one(held: Any, x: Tensor) -> tuple[Any, Tensor]:
    return FrozenSlotted(held.key + x.sum(0)), held.key


def shifts_a_deque(held: Any, x: Tensor) -> tuple[Any, Tensor]:
    held.append(held[-1] + x.sum(0))
    return held, held[0]


def makes_another_dict(held: Any, x: Tensor) -> tuple[Any, Tensor]:
    return {"a key": held["a key"] + x.sum(0)}, held["a key"]


def makes_another_object(held: Any, x: Tensor) -> tuple[Any, Tensor]:
    return Plain(held.key + x.sum(0)), held.key


CONTAINERS: dict[Callable[[Any, Tensor], tuple[Any, Tensor]], tuple[Callable[[Tensor], Any], str]] = {
    adds_to_a_tuple: (lambda t: ((t,),), r"held\[0\]\[0\]"),
    adds_to_a_named_tuple: (lambda t: Pair(t.clone(), t), r"held\.value"),
    adds_in_a_slot: (Slotted, r"held\.key"),
    makes_a_frozen_one: (FrozenSlotted, r"held\.key"),
    shifts_a_deque: (lambda t: deque([t], maxlen=1), r"held\[0\]"),
    makes_another_dict: (lambda t: {"a key": t}, r"held\['a key'\]"),
    makes_another_object: (Plain, r"held\.key"),
}


@pytest.mark.parametrize("way", ["full", "modules"])
@pytest.mark.parametrize("change", list(CONTAINERS))
def test_state_in_a_container_is_refused(backend: GraphBackend, change: Callable[..., Any], way: str) -> None:
    def forward(model: Model, x: Tensor) -> Tensor:
        model.held, read = change(model.held, x)
        return x + read

    model = Model(backend, forward)
    make, path = CONTAINERS[change]
    model.held = make(torch.ones(2, device=backend.device))
    with pytest.raises(CaptureError, match=rf"the forward reads {path} and binds it again"):
        open_runner(backend, model, way)


@pytest.mark.parametrize("way", ["full", "modules"])
def test_containers_that_are_made_anew_of_the_same_tensors_are_no_state(backend: GraphBackend, way: str) -> None:
    def forward(model: Model, x: Tensor) -> Tensor:
        model.held = {"kept": (model.cache, model.inner), "last": x * 2}
        return x + model.held["kept"][0]

    model = Model(backend, forward).eval()
    with closing(open_runner(backend, model, way)) as runner:
        x = torch.randn(3, 2, device=backend.device)
        assert torch.equal(runner(x=x), (x + 1).softmax(-1))
        assert not runner.report.warnings


def test_a_flag_that_the_forward_turns_each_time_is_refused(backend: GraphBackend) -> None:
    def forward(model: Model, x: Tensor) -> Tensor:
        model.odd = not model.odd
        return x * (2 if model.odd else 3)

    model = Model(backend, forward).eval()
    model.odd = False
    with pytest.raises(CaptureError, match="the forward reads odd and binds it again"):
        open_runner(backend, model, "full")


def test_numbers_that_only_eager_pieces_change_need_no_warning(backend: GraphBackend) -> None:
    class Counting(Middle):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x.softmax(-1) * self.calls

    model = Model(backend, writes_in_place).eval()
    model.middle = Counting().eval()
    with closing(open_runner(backend, model, "modules")) as runner:
        assert not runner.report.warnings
        counted = model.middle.calls
        x = torch.randn(3, 2, device=backend.device)
        first, second = runner(x=x).sum(-1), runner(x=x).sum(-1)
        torch.testing.assert_close(first, torch.full_like(first, counted + 1))
        torch.testing.assert_close(second, torch.full_like(second, counted + 2))


def test_a_piece_may_return_the_state_that_it_then_binds_anew(backend: GraphBackend) -> None:
    class Previous(Middle):
        def forward(self, x: Tensor) -> Tensor:
            before, self.seen = self.seen, x.sum().reshape(1)
            return x + before.sum()

    class Returns(Middle):
        def forward(self, x: Tensor) -> Tensor:
            before, self.seen = self.seen, x.clone()[:1]
            return before

    class Adds(nn.Module):
        def __init__(self, middle: Middle) -> None:
            super().__init__()
            self.middle = middle

        def forward(self, x: Tensor) -> Tensor:
            return x * 2 + self.middle(x * 1)

    for kind in (Previous, Returns):
        model = Adds(kind()).eval()
        model.middle.seen = torch.zeros(1, 2, device=backend.device)
        with closing(open_runner(backend, model, "modules")) as runner:
            assert not runner.report.warnings
            model.middle.seen = torch.zeros(1, 2, device=backend.device)
            xs = [torch.randn(4, 2, device=backend.device) for _ in range(4)]
            found = [runner(x=x) for x in xs]
            model.middle.seen = torch.zeros(1, 2, device=backend.device)
            for x, y in zip(xs, found, strict=True):
                torch.testing.assert_close(y, model(x))


def test_a_count_that_no_operator_sees_is_a_warning(backend: GraphBackend) -> None:
    def counts(model: Model, x: Tensor) -> Tensor:
        model.step += 1
        return x * 2

    model = Model(backend, counts).eval()
    with closing(open_runner(backend, model, "full")) as runner:
        assert runner.report.warnings == ("the forward changes step; replays do not, nor do they see it change",)
        step, x = model.step, torch.randn(3, 2, device=backend.device)
        assert torch.equal(runner(x=x), (x * 2).softmax(-1))
        assert model.step == step, "that is what the warning says"


def test_eager_pieces_may_bind_their_state_anew(backend: GraphBackend) -> None:
    class Remembers(Middle):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen = self.seen.to(x.device) + 1
            return x.softmax(-1) * self.seen

    model = Model(backend, lambda _, x: x * 2).eval()
    model.middle = Remembers()
    with closing(open_runner(backend, model, "modules")) as runner:
        model.middle.seen = torch.zeros(2)
        x = torch.randn(3, 2, device=backend.device)
        for count in (1, 2, 3):
            assert torch.equal(runner(x=x), (x * 2).softmax(-1) * count)


class Swaps(Middle):
    """Two buffers in turn: after an even number of runs all is where it was."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.turns: list[Any] = [torch.zeros(2, device=device), torch.zeros(2, device=device)]

    def forward(self, x: Tensor) -> Tensor:
        front, back = self.turns
        seen = (0 if front is None else front.to(x.device)) + torch.ones_like(x[0])
        self.turns = [seen if back is None else back.copy_(seen), front]
        return x.softmax(-1) * seen


class SameAddress(Middle):
    """New memory on each run, which happens to lie where the old one lay."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.raw = bytearray(8)
        self.seen: Any = torch.zeros(2, device=device)

    def forward(self, x: Tensor) -> Tensor:
        seen = 0 * x[0] + (0 if self.seen is None else self.seen.to(x.device)) + 1
        self.seen = None
        self.seen = torch.frombuffer(self.raw, dtype=torch.float32).copy_(seen)
        return x.softmax(-1) * seen


@pytest.mark.parametrize("policy", ["first", "always"])
@pytest.mark.parametrize("kind", [Swaps, SameAddress])
@pytest.mark.parametrize("gone", [None, "elsewhere"])
def test_state_that_only_pieces_bind_may_become_anything(
    backend: GraphBackend, kind: type[Middle], gone: str | None, policy: str
) -> None:
    """No graph reads it, wherever the runs of the capture have left it."""
    model = Model(backend, lambda _, x: x * 2).eval()
    model.middle = kind(backend.device)
    now: Any = None if gone is None else torch.zeros(2, device="cpu")
    with closing(open_runner(backend, model, "modules", address_check=policy)) as runner:
        if isinstance(model.middle, Swaps):
            model.middle.turns = [now, now]
        else:
            model.middle.seen = now
        for rows in (3, 8, 1, 4, 6):
            x = torch.randn(rows, 2, device=backend.device)
            found = runner(x=x)
        assert torch.equal(found, (x * 2).softmax(-1) * 5)


@pytest.mark.parametrize("policy", ["first", "always"])
def test_state_that_graphs_read_may_not_go(backend: GraphBackend, policy: str) -> None:
    model = Model(backend, lambda model, x: x * model.scale).eval()
    model.register_buffer("scale", torch.full((2,), 2.0, device=backend.device))
    model.middle = SameAddress(backend.device)
    with closing(open_runner(backend, model, "modules", address_check=policy)) as runner:
        x = torch.randn(3, 2, device=backend.device)
        model.middle.seen, there, model.scale = None, model.scale, None  # type: ignore[assignment]
        with pytest.raises(AddressError, match=r"1 missing, 0 added\n +missing +model\.scale\n"):
            runner(x=x)
        model.scale = there
        assert torch.equal(runner(x=x), (x * 2).softmax(-1))


def test_the_search_leaves_the_model_as_the_capture_did(backend: GraphBackend) -> None:
    """Nothing is kept of the model either."""
    runs = Tally()

    def counts(model: Model, x: Tensor) -> Tensor:
        model.step += 1
        runs.append(model.step)
        return x * 2

    model = Model(backend, counts).eval()
    with closing(open_runner(backend, model, "full")):
        assert model.step == 0
        assert len(runs) > 4, "looks, warm-ups and captures"
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
