"""Tensors that a forward reads and binds again are refused at capture. Of other changes of Python a capture warns, and
the first replay finds numbers that depend on them.
"""

from __future__ import annotations

import copy
import gc
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from checks import Tally, back_at, reserved
from torch import Tensor, nn

import cgplan
from cgplan import AddressError, CaptureError, GraphRunner, Input, NumbersError
from cgplan.backends import GraphBackend

WAYS: dict[str, dict[str, Any]] = {
    "full": {"cudagraph_mode": "FULL"},
    "ops": {"cudagraph_mode": "PIECEWISE", "splitting_ops": ["aten::softmax"]},
    "modules": {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["middle"]},
}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Middle(nn.Module):
    """The eager piece."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: Any = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


class Model(nn.Module):
    """``softmax`` of what ``change`` returns, which may do anything to the model's attributes."""

    def __init__(
        self, backend: GraphBackend, change: Callable[[Any, Tensor], Tensor], middle: Any = None
    ) -> None:
        super().__init__()
        self.change = change
        self.middle = middle or Middle()
        self.inner = nn.Module()
        self.step, self.inner.total, self.odd = 0, 0, False
        self.cache = torch.ones(2, device=backend.device)
        self.inner._kept = torch.ones(2, device=backend.device)
        self.listed = [torch.ones(2, device=backend.device)]
        self.array = np.zeros(1)
        self.last: Tensor | None = None
        self.held: Any = None
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(self.change(self, x))


def open_runner(
    backend: GraphBackend, model: Callable[..., Any], way: str, **compilation: Any
) -> GraphRunner:
    return cgplan.capture(
        model,
        {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)},
        compilation={
            "cudagraph_capture_sizes": [4, 8],
            "outputs": "clone",
            **WAYS[way],
            **compilation,
        },
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


def turns_a_flag(model: Model, x: Tensor) -> Tensor:
    model.odd = not model.odd
    return x * (2 if model.odd else 3)


def adds_to_a_list_and_uses_its_length(model: Model, x: Tensor) -> Tensor:
    model.listed.append(x)
    return x * len(model.listed)


def draws_in_python(model: Model, x: Tensor) -> Tensor:
    return x * random.random()


def counts_in_an_array(model: Model, x: Tensor) -> Tensor:
    model.array += 1
    return x * float(model.array[0])


READ = {adds_to_a_tensor: "cache", adds_to_a_private_one_inside: "inner._kept"}


@pytest.mark.parametrize(
    ("change", "named", "way"),
    [
        *((change, named, way) for change, named in READ.items() for way in WAYS),
        (adds_to_one_in_a_list, r"listed\[0\]", "full"),
    ],
)
def test_a_tensor_that_is_read_and_bound_again_is_refused(
    backend: GraphBackend, way: str, change: Callable[..., Tensor], named: str
) -> None:
    open_runner(
        backend, Model(backend, lambda model, x: x), way
    ).close()  # workspaces of libraries stay
    model = Model(backend, change)
    before = reserved(backend)
    with pytest.raises(
        CaptureError, match=f"the forward reads {named} and binds it again"
    ) as caught:
        open_runner(backend, model, way)
    assert "in place" in caught.value.remedy
    del caught
    gc.collect()
    assert back_at(backend, before), "attributes hold no graph memory"


CHANGED = {
    counts_and_uses_it: ("step", "step (it was 1 and is 2)"),
    counts_inside_and_makes_a_tensor_of_it: ("inner.total", "inner.total (it was 1 and is 2)"),
    turns_a_flag: ("odd", "odd (it was True and is False)"),
    adds_to_a_list_and_uses_its_length: (
        "len(model.listed)",
        "len(model.listed) (it was 2 and is 3)",
    ),
    draws_in_python: ("Python's random numbers", "Python's random numbers (its contents)"),
    counts_in_an_array: ("array", "array (its contents)"),
}


@pytest.mark.parametrize("way", ["full", "modules"])
@pytest.mark.parametrize("change", CHANGED)
def test_numbers_that_each_run_changes_are_told_and_the_first_replay_finds_them(
    backend: GraphBackend, way: str, change: Callable[..., Tensor]
) -> None:
    model = Model(backend, change)
    random.seed(3)
    with closing(open_runner(backend, model, way)) as runner:
        told = (
            f"the forward changes {CHANGED[change][0]}; replays do not, nor do they see it change"
        )
        assert runner.report.warnings == (told,)
        x = torch.randn(4, 2, device=backend.device)
        copied = copy.deepcopy(model), random.getstate()
        with pytest.raises(
            NumbersError, match="differs from the model's own code: output 0, the largest"
        ) as caught:
            runner(x=x)
        random.setstate(copied[1])
        torch.testing.assert_close(caught.value.output, copied[0](x), rtol=0, atol=0)


def test_state_that_lies_where_nobody_looks_is_found_by_its_numbers(backend: GraphBackend) -> None:
    """And padding is not blamed: each replay gives other numbers, whatever it holds."""

    hidden = threading.local()  # which no walk enters
    hidden.state = torch.zeros((), device=backend.device)

    def change(model: Model, x: Tensor) -> Tensor:
        hidden.state.add_(1)
        return x * hidden.state

    with closing(open_runner(backend, Model(backend, change), "full")) as runner:
        assert not runner.report.warnings
        with pytest.raises(
            NumbersError, match="differs from the model's own code: output 0, the largest deviation"
        ):
            runner(x=torch.randn(3, 2, device=backend.device))


@pytest.mark.parametrize("change", CHANGED)
def test_strict_refuses_what_each_run_changes(
    backend: GraphBackend, change: Callable[..., Tensor]
) -> None:
    with pytest.raises(CaptureError) as caught:
        open_runner(backend, Model(backend, change), "full", strict=True)
    assert (
        f"each run changes {CHANGED[change][1]}; a replay runs no Python"
        in caught.value.message.replace("changes model.", "changes ")
    )


def test_strict_captures_what_is_ignored(backend: GraphBackend) -> None:
    ignored = {"strict": True, "ignore": ["model.step"]}
    with closing(open_runner(backend, Model(backend, counts), "full", **ignored)) as runner:
        assert not runner.report.warnings
        x = torch.randn(3, 2, device=backend.device)
        assert torch.equal(runner(x=x), (x * 2).softmax(-1))


@pytest.mark.parametrize("change", [counts_and_uses_it, counts_inside_and_makes_a_tensor_of_it])
def test_what_dynamo_traces_again_on_each_run_is_refused(
    backend: GraphBackend, change: Callable[..., Tensor]
) -> None:
    with pytest.raises(
        CaptureError, match=rf"no longer true: .*{CHANGED[change][0].split('.')[-1]}"
    ):
        open_runner(backend, Model(backend, change), "ops")


def adds_to_what_began_as_none(model: Model, x: Tensor) -> Tensor:
    model.last = x.sum(0) if model.last is None else x.sum(0) + model.last
    return x + model.last


@pytest.mark.parametrize("way", WAYS)
def test_state_that_begins_as_none_and_is_read_and_bound_again_is_refused(
    backend: GraphBackend, way: str
) -> None:
    with pytest.raises(CaptureError, match="the forward reads last and binds it again"):
        open_runner(backend, Model(backend, adds_to_what_began_as_none), way)


def keeps_its_result(model: Model, x: Tensor) -> Tensor:
    model.last = x * 2
    return model.last + 0


def keeps_its_input(model: Model, x: Tensor) -> Tensor:
    model.last = x
    return x * 2


def reads_its_own_result(model: Model, x: Tensor) -> Tensor:
    model.cache = x.sum(0)
    return x * 2 + 0 * model.cache


def writes_in_place(model: Model, x: Tensor) -> Tensor:
    model.cache.add_(1)
    return x * 2


def packs_the_same_tensors(model: Model, x: Tensor) -> Tensor:
    model.held = {"kept": (model.listed[0], model.inner), "last": x * 2}
    return x + x * model.held["kept"][0]


def counts(model: Model, x: Tensor) -> Tensor:
    model.step += 1
    return x * 2


BOUND = {
    keeps_its_result: "last",
    keeps_its_input: "last",
    reads_its_own_result: "cache",
    packs_the_same_tensors: "held",
    counts: "step",
    writes_in_place: None,
}


@pytest.mark.parametrize("way", ["full", "modules"])
@pytest.mark.parametrize("change", BOUND)
def test_state_that_graphs_do_not_read_may_be_bound(
    backend: GraphBackend, way: str, change: Callable[..., Tensor]
) -> None:
    model = Model(backend, change)
    held = model.last, model.held, model.cache
    with closing(open_runner(backend, model, way)) as runner:
        warning = f"the forward changes {BOUND[change]}; replays do not, nor do they see it change"
        assert runner.report.warnings == (() if change is writes_in_place else (warning,))
        x = torch.randn(3, 2, device=backend.device)
        assert torch.equal(runner(x=x), (x * 2).softmax(-1))
        assert model.step == 0, "that is what the warning says"
        assert all(
            now is before
            for now, before in zip((model.last, model.held, model.cache), held, strict=True)
        )


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


def adds_in_a_slot(held: Any, x: Tensor) -> tuple[Any, Tensor]:
    key, held.key = held.key, held.key + x.sum(0)
    return held, key


def shifts_a_deque(held: Any, x: Tensor) -> tuple[Any, Tensor]:
    held.append(held[-1] + x.sum(0))
    return held, held[0]


CONTAINERS: dict[
    str, tuple[Callable[[Tensor], Any], Callable[[Any, Tensor], tuple[Any, Tensor]]]
] = {
    r"held\[0\]\[0\]": (
        lambda t: ((t,),),
        lambda held, x: (((held[0][0] + x.sum(0),),), held[0][0]),
    ),
    r"held\.value": (
        lambda t: Pair(t.clone(), t),
        lambda h, x: (Pair(h.key, h.value + x.sum(0)), h.value),
    ),
    r"held\.key": (Slotted, adds_in_a_slot),
    r"held\.key(?# frozen)": (
        FrozenSlotted,
        lambda held, x: (FrozenSlotted(held.key + x.sum(0)), held.key),
    ),
    r"held\.key(?# plain)": (Plain, lambda held, x: (Plain(held.key + x.sum(0)), held.key)),
    r"held\[0\]": (lambda t: deque([t], maxlen=1), shifts_a_deque),
    r"held\['a key'\]": (
        lambda t: {"a key": t},
        lambda held, x: ({"a key": held["a key"] + x.sum(0)}, held["a key"]),
    ),
}


@pytest.mark.parametrize("way", ["full", "modules"])
@pytest.mark.parametrize("path", CONTAINERS)
def test_state_in_a_container_is_refused(backend: GraphBackend, path: str, way: str) -> None:
    make, change = CONTAINERS[path]

    def forward(model: Model, x: Tensor) -> Tensor:
        model.held, read = change(model.held, x)
        return x + read

    model = Model(backend, forward)
    model.held = make(torch.ones(2, device=backend.device))
    with pytest.raises(CaptureError, match=rf"the forward reads {path} and binds it again"):
        open_runner(backend, model, way)


class Remembers(Middle):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen = self.seen.to(x.device) + 1
        return x.softmax(-1) * self.seen * self.calls


def test_eager_pieces_may_count_and_bind_their_state(backend: GraphBackend) -> None:
    model = Model(backend, writes_in_place, Remembers())
    with closing(open_runner(backend, model, "modules")) as runner:
        assert not runner.report.warnings
        model.middle.seen = torch.zeros(2)
        x = torch.randn(3, 2, device=backend.device)
        for count in (1, 2, 3):
            assert torch.equal(runner(x=x), (x * 2).softmax(-1) * count * count)


class Previous(Middle):
    def forward(self, x: Tensor) -> Tensor:
        before, self.seen = self.seen, x.sum().reshape(1)
        return x + before.sum()


class Returns(Middle):
    def forward(self, x: Tensor) -> Tensor:
        before, self.seen = self.seen, x.clone()[:1]
        return before


@pytest.mark.parametrize("kind", [Previous, Returns])
def test_a_piece_may_return_the_state_that_it_then_binds_again(
    backend: GraphBackend, kind: type[Middle]
) -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.middle = kind()

        def forward(self, x: Tensor) -> Tensor:
            return x * 2 + self.middle(x * 1)

    model = Adds().eval()
    model.middle.seen = torch.zeros(1, 2, device=backend.device)
    with closing(open_runner(backend, model, "modules")) as runner:
        assert not runner.report.warnings
        xs = [torch.randn(4, 2, device=backend.device) for _ in range(4)]
        found = []
        for call in (runner, model):
            model.middle.seen = torch.zeros(1, 2, device=backend.device)
            found.append([call(x=x) for x in xs])
        torch.testing.assert_close(*found)


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
        self.seen = torch.zeros(2, device=device)

    def forward(self, x: Tensor) -> Tensor:
        seen = 0 * x[0] + (0 if self.seen is None else self.seen.to(x.device)) + 1
        self.seen = None
        self.seen = torch.frombuffer(self.raw, dtype=torch.float32).copy_(seen)
        return x.softmax(-1) * seen


@pytest.mark.parametrize("policy", ["first", "always"])
@pytest.mark.parametrize("kind", [Swaps, SameAddress])
@pytest.mark.parametrize("gone", [None, "elsewhere"])
def test_state_that_only_pieces_bind_may_become_anything(
    backend: GraphBackend, kind: type[Any], gone: str | None, policy: str
) -> None:
    """No graph reads it, wherever the runs of the capture have left it. A comparison would run the piece more often."""
    model = Model(backend, lambda _, x: x * 2, kind(backend.device))
    now: Any = None if gone is None else torch.zeros(2, device="cpu")
    with closing(
        open_runner(backend, model, "modules", address_check=policy, verify="off")
    ) as runner:
        setattr(model.middle, *(("turns", [now, now]) if kind is Swaps else ("seen", now)))
        for rows in (3, 8, 1, 4, 6):
            x = torch.randn(rows, 2, device=backend.device)
            found = runner(x=x)
        assert torch.equal(found, (x * 2).softmax(-1) * 5)


@pytest.mark.parametrize("policy", ["first", "always"])
def test_state_that_graphs_read_may_not_go(backend: GraphBackend, policy: str) -> None:
    model = Model(backend, lambda model, x: x * model.scale, SameAddress(backend.device))
    model.register_buffer("scale", torch.full((2,), 2.0, device=backend.device))
    with closing(open_runner(backend, model, "modules", address_check=policy)) as runner:
        x = torch.randn(3, 2, device=backend.device)
        model.middle.seen, there, model.scale = None, model.scale, None  # type: ignore[assignment]
        with pytest.raises(AddressError, match=r"1 missing, 0 added\n +missing +model\.scale\n"):
            runner(x=x)
        model.scale = there
        assert torch.equal(runner(x=x), (x * 2).softmax(-1))


def test_a_weight_that_is_transposed_in_place_is_refused(backend: GraphBackend) -> None:
    """It lies where it lay, and a graph reads it by its old strides."""
    model = Model(backend, lambda model, x: x @ model.weight)
    model.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=backend.device))
    with closing(open_runner(backend, model, "full")) as runner:
        x = torch.randn(3, 2, device=backend.device)
        runner(x=x)
        model.weight.data = model.weight.data.t()
        with pytest.raises(
            AddressError,
            match=r"1 reshaped, .*\n +reshaped +model\.weight: .* strides \[2, 1\] at capture",
        ):
            runner(x=x)


def test_looks_leave_nothing_of_their_runs_and_hold_no_model(backend: GraphBackend) -> None:
    runs = Tally()

    def tallies(model: Model, x: Tensor) -> Tensor:
        model.step += 1
        runs.append(model.step)
        return x * 2

    model = Model(backend, tallies)
    with closing(open_runner(backend, model, "full")):
        assert model.step == 0
        assert len(runs) > 4, "looks, warm-ups and captures"
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


class Grows(nn.Module):
    """As rotary embeddings whose frequencies depend on the length: a buffer that is bound again where a batch asks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Buffer(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if float(x.max()) > len(self.table):
            self.table = torch.arange(1.0, int(x.max()) + 2, device=x.device)
        return x * self.table.sum()


@pytest.mark.parametrize(
    "way", [{}, {"address_check": "always"}, {"capture_policy": "lazy"}], ids=str
)
def test_a_piece_may_bind_its_own_buffers_again_while_serving(
    backend: GraphBackend, way: dict[str, Any]
) -> None:
    models = [
        Model(backend, lambda _, x: x + 1, Grows()).to(backend.device).eval() for _ in range(2)
    ]
    with closing(open_runner(backend, models[0], "modules", **way)) as runner:
        for largest in (0.5, 3.0, 1.0, 6.0):
            x = torch.full((4, 2), largest, device=backend.device)
            torch.testing.assert_close(runner(x=x), models[1](x), rtol=0, atol=0)
        assert not runner.report.failed
