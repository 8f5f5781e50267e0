"""What a model gets back after runs on padding, and what stays."""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cgplan
from cgplan import Input
from cgplan.graphs.fingerprint import Fingerprint
from cgplan.graphs.footprint import look
from cgplan.graphs.put_back import PutBack

CPU = torch.device("cpu")
COUNT = 0


def t() -> Tensor:
    return torch.zeros(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("steps", torch.zeros(2))
        self.part = SimpleNamespace(count=0)
        self.count, self.name, self.table = 0, "model", None
        self.log: list[Any] = [t(), {"a": t()}]


def kept_of(value: Any, limit: int = 1 << 30) -> PutBack:
    return PutBack(Fingerprint.of({"x": value}, CPU), limit)


@torch.no_grad()
def looked(value: Any, forward: Callable[[], object], limit: int = 1 << 30) -> PutBack:
    """After a look at a forward."""
    kept = kept_of(value, limit)
    found = look(forward, kept)
    assert found.error is None, found.error
    return kept


@torch.no_grad()
def run(model: Model, change: Callable[[Any], None], captures: int) -> PutBack:
    """After a look, and a warm-up and a capture of each key, with what was changed put back between keys."""
    kept = looked(model, lambda: change(model))
    for _ in range(captures):
        with kept.run():
            change(model)
        with kept.run(captures=True):
            change(model)
        kept.rewind()
    kept.restore()
    return kept


def each(model: Any) -> None:
    """What every run does."""
    model.steps.add_(1)
    model.layer.weight.data.mul_(2)
    model.count += 1
    model.part.count += 1
    model.name += "x"
    model.table = t() if model.table is None else None
    model.made_each_time = t()
    model.buffer = nn.Buffer(t())
    model.log[1]["a"] = model.log[1]["a"] + 1
    model.log.append(t())


@pytest.mark.parametrize("captures", [1, 3])
def test_tensors_and_attributes_that_each_run_changes_are_put_back(captures: int) -> None:
    model = Model()
    weight, inner = model.layer.weight.clone(), model.log[1]["a"]
    kept = run(model, each, captures)
    assert (model.steps.tolist(), model.count, model.name, model.table) == (
        [0, 0],
        0,
        "model",
        None,
    )
    assert model.part.count == 0
    assert torch.equal(model.layer.weight, weight)
    assert not hasattr(model, "made_each_time")
    assert not hasattr(model, "buffer")
    assert {path: how for path, (_, how) in kept.outcome.items()} == {
        "x.steps": "device",
        "x.layer.weight": "device",
    }
    assert len(model.log) == 3 + 2 * captures, "a list keeps what the runs appended"
    assert model.log[1]["a"] is not inner


def once(model: Any) -> None:
    """What the first run does."""
    if model.table is None:
        model.table = torch.arange(2)
        model.steps.fill_(7)
        model.tables = {2: t()}
        model.count = 5


def test_what_is_made_on_first_use_stays_and_is_named() -> None:
    model = Model()
    kept = run(model, once, 2)
    assert model.table is not None
    assert (model.table.tolist(), model.steps.tolist(), model.count) == ([0, 1], [7, 7], 5)
    assert 2 in model.tables
    assert {path for path, (_, how) in kept.outcome.items() if how == "new"} == {
        "x.table", "x.steps", "x.count", "x.tables",
    }  # fmt: skip


def test_where_no_capture_succeeds_all_is_put_back() -> None:
    model = Model()
    kept = looked(model, lambda: once(model))
    kept.keeps_first_use = False
    kept.restore()
    assert (model.steps.tolist(), model.count, model.table) == ([0, 0], 0, None)
    assert not hasattr(model, "tables")


def test_what_was_made_with_a_flag_that_cannot_be_undone_stays_with_it() -> None:
    model: Any = SimpleNamespace(known=np.zeros(1), table=None, rows=torch.zeros(2))

    def forward() -> None:
        if not model.known[0]:
            model.known[0] = 1
            model.table = t()
            model.rows.fill_(3)

    kept = looked(model, forward)
    with kept.run():
        forward()
    kept.keeps_first_use = False
    kept.restore()
    assert (model.known[0], model.table is None, model.rows.tolist()) == (1, False, [3, 3])


def test_what_no_first_run_changes_is_not_made_on_first_use() -> None:
    """But by a run of the same key after it, which a count of runs may have caused."""
    model: Any = SimpleNamespace(count=0, table=None, log={}, last={0})

    def forward() -> None:
        model.count += 1
        model.last.clear()
        model.last.add(model.count)
        model.log[len(model.log)] = model.count
        if model.count == 2:
            model.table = t()

    kept = looked(model, forward)
    with kept.run():
        forward()
    kept.keeps_containers = False
    kept.restore()
    assert (model.count, model.table, model.log, model.last) == (0, None, {}, {0})


def test_what_a_capture_is_the_first_to_bind_is_put_back() -> None:
    """It lies in graph memory."""
    model = Model()
    kept = looked(model, lambda: None)
    with kept.run(captures=True):
        model.table, model.fresh = t(), t()
    kept.restore()
    assert model.table is None
    assert not hasattr(model, "fresh")
    assert kept.outcome == {}


def test_a_counter_that_is_made_on_first_use_begins_where_it_was_made() -> None:
    model = Model()

    def counts(model: Any) -> None:
        if model.table is None:
            model.table, model.filled, model.number = torch.zeros(1), torch.empty(2), 10
            model.filled.fill_(3)
        model.table.add_(1)
        model.number += 1

    run(model, counts, 2)
    assert model.table is not None
    assert model.table.item() == 0
    assert model.filled.tolist() == [3, 3]
    assert model.number == 11, "what the run that made the table left there"


class Slots:
    __slots__ = ("count", "own")
    shared: ClassVar[int] = 0

    def __init__(self) -> None:
        self.own, self.count = t(), 0

    def forward(self) -> None:
        self.own, self.count = self.own + 1, self.count + 1
        type(self).shared += 1


def test_slots_are_put_back_and_closures_globals_dicts_and_classes_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    total, slots, named = 0, Slots(), {"count": 0}
    own = slots.own

    def forward() -> None:
        nonlocal total
        global COUNT
        total, COUNT = total + 1, COUNT + 1
        named["count"] += 1
        slots.forward()

    monkeypatch.setitem(globals(), "COUNT", 0)
    monkeypatch.setattr(Slots, "shared", 0)
    kept = looked(forward, forward)
    with kept.run() as changed:
        forward()
    paths = {"x.<COUNT>", "x.<total>", "x.<named>.count"} | {
        f"x.<slots>.{n}" for n in ("own", "count", "shared")
    }
    assert set(changed) == paths
    kept.restore()
    assert slots.own is own
    assert slots.count == 0
    assert (total, COUNT, named, Slots.shared) == (2, 2, {"count": 2}, 2)
    assert kept.volatile == paths


def test_only_what_is_written_is_copied_and_restore_may_be_called_again() -> None:
    model = Model()

    def forward() -> None:
        model.steps[:1].add_(1)
        torch.add(model.steps, 1, out=model.log[0])
        model.layer(model.steps)

    kept = looked(model, forward)
    assert (
        kept.storages.copied["device"] == 24
    )  # also of small state that no operator was seen to write
    assert [written.path for written in kept.storages.written.values()] == [
        "x.steps",
        "x.log[0]",
    ]
    for _ in range(2):
        kept.restore()
        assert (model.steps.tolist(), model.log[0].tolist()) == ([0, 0], [0, 0])
        model.steps.add_(5)
    kept.storages.clear()
    assert kept.storages.copied["device"] == 0


def test_batch_norm_writes_although_its_schema_does_not_say_so() -> None:
    model = nn.BatchNorm1d(2)
    looked(model, lambda: model(torch.randn(4, 2))).restore()
    assert model.running_mean is not None
    assert model.num_batches_tracked is not None
    assert model.running_mean.tolist() == [0, 0]
    assert model.num_batches_tracked.item() == 0


def test_copies_of_small_state_keep_the_limit() -> None:
    model = SimpleNamespace(state=[torch.zeros(8) for _ in range(10)])
    kept = looked(model, lambda: model.state[9].add_(1), limit=3 * 32)
    assert kept.storages.copied["device"] == 3 * 32


def test_copies_of_what_a_run_makes_keep_the_limit() -> None:
    model = SimpleNamespace(state=None)

    def forward() -> None:
        model.state = [torch.zeros(8) for _ in range(10)]
        for tensor in model.state:
            tensor.add_(1)

    kept = looked(model, forward, limit=3 * 32)
    assert kept.storages.copied["device"] == 3 * 32


def test_what_is_too_large_is_named() -> None:
    model = Model()
    kept = looked(model, lambda: model.steps.add_(1), limit=4)
    kept.restore()
    assert model.steps.tolist() == [1, 1]
    assert kept.outcome == {"x.steps": (8, "not kept")}


def test_inference_tensors_are_put_back() -> None:
    with torch.inference_mode():
        model = SimpleNamespace(steps=torch.zeros(2))
    with torch.inference_mode():
        kept = looked(model, lambda: model.steps.add_(1))
    for _ in range(2):
        with torch.inference_mode(), kept.run():
            model.steps.add_(1)
    kept.restore()
    assert model.steps.tolist() == [0, 0]
    assert kept.outcome == {"x.steps": (8, "device")}


def test_small_tensors_hold_their_first_values_ahead_of_each_run_and_large_ones_at_the_end() -> (
    None
):
    """So positions do not run past a cache."""
    model = SimpleNamespace(small=torch.zeros(1), large=torch.zeros(1 << 20))
    seen = []

    def forward() -> None:
        seen.append((model.small.item(), model.large[0].item()))
        model.small.add_(1)
        model.large.add_(1)

    kept = looked(model, forward)
    for _ in range(2):
        with kept.run():
            forward()
    assert seen == [(0, 0), (0, 1), (0, 2)]
    kept.rewind()
    assert (model.small.item(), model.large[0].item()) == (0, 3)
    kept.restore()
    assert (model.small.item(), model.large[0].item()) == (0, 0)


def test_a_run_tells_what_it_changed_and_not_what_the_run_before_did() -> None:
    model: Any = SimpleNamespace(count=0, table=None, last=None)
    kept = looked(model, lambda: setattr(model, "table", 1))
    with kept.run() as changed:
        model.count = 1
    assert list(map(str, changed.values())) == ["x.count (it was 0 and is 1)"]
    with kept.run() as changed:
        model.table = None
    assert list(map(str, changed.values())) == ["x.table (it was 1 and is None)"]
    with kept.run() as changed:
        pass
    assert changed == {}


def test_what_each_run_binds_is_left_alone_later() -> None:
    model = Model()
    kept = run(model, lambda m: setattr(m, "log", [t(), {"a": t()}]), 1)
    sealed = Fingerprint.of({"x": model}, CPU)
    sealed.volatile |= kept.volatile
    model.log = [None, t()]
    sealed.refuse_moved("FULL 4")
    there, model.steps = model.steps, t()
    assert sealed.moved(Fingerprint.of(sealed.roots, CPU))["changed"][0].startswith("x.steps")
    assert there is not None


def test_what_an_engine_sets_for_a_key_is_no_change_of_the_forward_and_is_put_back() -> None:
    model: Any = SimpleNamespace(context=None, table=None)
    kept = kept_of(model)
    with kept.setting_context():
        model.context = "FULL 4"
    look(lambda: setattr(model, "table", model.context), kept)
    with kept.setting_context():
        model.context = "FULL 2"
    with kept.run() as changed:
        pass
    assert changed == {}
    kept.restore()
    assert model.context is None
    assert model.table == "FULL 4"


def test_attributes_that_one_run_bound_are_put_back_alone_and_the_rest_is_told() -> None:
    model = Model()
    before = Fingerprint.of({"x": model}, CPU)
    model.count, model.part.count = 1, 1
    assert before.undo_attributes()
    assert (model.count, model.part.count) == (0, 0)
    model.count = 1
    model.log.append(1)
    assert not before.undo_attributes()
    assert model.count == 0
    assert len(model.log) == 3
    model.count = 1
    assert before.undo_attributes(["x.log", "x.count"])
    assert model.count == 1, "what is ignored stays as it is"


def test_a_run_that_fails_does_not_tell_that_a_tensor_was_written_on_first_use() -> None:
    model = Model()
    kept = looked(model, lambda: model.steps.add_(1))
    with pytest.raises(ValueError, match="before it writes"), kept.run():
        raise ValueError("before it writes")
    kept.restore()
    assert model.steps.tolist() == [0, 0]


class Fills(nn.Module):
    """Fills a buffer on first use, as tables of rotary embeddings are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2))
        self.is_ready = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_ready:
            self.table.copy_(torch.tensor([7.0, 8.0]))
            self.is_ready = True
        return x * self.table


def test_a_buffer_that_a_capture_filled_on_first_use_keeps_its_numbers() -> None:
    model = Fills().eval()
    inputs = {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    with closing(
        cgplan.capture(model, inputs, compilation={"cudagraph_capture_sizes": [2, 4]}, device="cpu")
    ) as runner:
        assert {record.path: record.kept for record in runner.report.state} == {
            "model.table": "new",
            "model.is_ready": "new",
        }
        assert runner(x=torch.ones(3, 2)).tolist() == [[7, 8]] * 3
    assert model.table.tolist() == [7, 8]


class FillsAtZero(nn.Module):
    """Fills a table where a counter, which each run changes, says that it is new."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(size))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.count == 0:
            self.table.fill_(7.0)
        self.count += 1
        if x.shape[0] == 2:
            raise ValueError("the smallest size fails")
        return x * self.table[:1]


@pytest.mark.parametrize("size", [4, 1 << 20])
def test_where_no_capture_succeeds_a_table_goes_back_with_a_counter_that_flags_it(
    size: int,
) -> None:
    model = FillsAtZero(size).eval()
    inputs = {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    compilation = {"cudagraph_capture_sizes": [2, 4]}
    with pytest.raises(cgplan.ModelError, match="the smallest size fails"):
        cgplan.capture(model, inputs, compilation=compilation, device="cpu")
    assert model.count == 0
    assert model.table[0] == 0


class FillsUnseen(nn.Module):
    """Fills a table behind a flag that no walk sees, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2))
        self.count = 0
        self.fill = functools.cache(lambda: self.table.fill_(7.0))

    def forward(self, x: Tensor) -> Tensor:
        self.fill()
        self.count += 1
        return x * self.table


@pytest.mark.parametrize("policy", ["eager", "lazy"])
@pytest.mark.parametrize("sizes", [[4], [2, 4]])
def test_a_table_behind_an_unseen_flag_stays_beside_a_counter(
    policy: str,
    sizes: list[int],
) -> None:
    model = FillsUnseen().eval()
    inputs = {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    compilation = {"cudagraph_capture_sizes": sizes, "capture_policy": policy}
    with closing(cgplan.capture(model, inputs, compilation=compilation, device="cpu")) as runner:
        for _ in range(3):
            assert runner(x=torch.ones(3, 2)).tolist() == [[7, 7]] * 3
    assert model.table.tolist() == [7, 7]
    assert model.count == (0 if sizes == [2, 4] and policy == "eager" else 1)


class Scales(nn.Module):
    """Scales a weight once, and counts its calls."""

    def __init__(self, flag: str, binds: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2))
        self.flag = flag
        self.is_ready = False
        self.binds = binds
        self.made: Tensor | None = None
        self.state: dict[str, bool] = {}
        self.seen: list[bool] = []
        self.count = 0
        self.fill = functools.cache(lambda: self.scale.mul_(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.flag == "unseen":
            self.fill()
            self.is_ready = True
        elif not self.flags()[self.flag]:
            self.scale.mul_(3)
            if self.binds:
                self.made = torch.ones(2)
            self.is_ready = self.flag == "attribute"
            if self.flag == "dict":
                self.state["ready"] = True
            if self.flag == "list":
                self.seen.append(True)
        self.count += 1
        return x * self.scale

    def flags(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "attribute": self.is_ready,
            "dict": self.state,
            "list": self.seen,
        }


@pytest.mark.parametrize(
    ("flag", "binds"),
    [
        ("count", False),
        ("unseen", False),
        ("attribute", False),
        ("attribute", True),
        ("dict", False),
        ("dict", True),
        ("list", False),
    ],
)
def test_a_tensor_and_what_says_that_it_is_ready_stay_or_go_back_together(
    flag: str,
    binds: bool,
) -> None:
    x = torch.ones(4, 2)
    graphed = cgplan.graphed(Scales(flag, binds).eval(), device="cpu")
    graphed.warm_up(x)
    inputs = {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    compilation = {"cudagraph_capture_sizes": [4]}
    runner = cgplan.capture(
        Scales(flag, binds).eval(), inputs, compilation=compilation, device="cpu"
    )
    with closing(runner), torch.no_grad():
        for batch in (torch.ones(8, 2), x, x):
            assert graphed(batch).tolist() == [[3, 3]] * len(batch)
            assert runner(x=batch).tolist() == [[3, 3]] * len(batch)


class BindsAnew(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.work: Tensor | None = None
        self.note: str | None = None
        self.runs = itertools.count()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones(2)
        self.work = torch.zeros(2)
        self.work.add_(1)
        if next(self.runs) == 2:  # the capture
            self.note = "captured"
        self.count += 1
        return x * self.table


def test_what_goes_back_keeps_no_counter_and_an_attribute_that_was_none_is_none() -> None:
    model = BindsAnew().eval()
    inputs = {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    compilation = {"cudagraph_capture_sizes": [4]}
    cgplan.capture(model, inputs, compilation=compilation, device="cpu").close()
    assert (model.note, model.count) == (None, 0)


class MakesTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(2.0)
        return x * self.table


@pytest.mark.parametrize("warm_ups", ["auto", 0, 1])
def test_a_table_of_first_use_is_held_and_told_when_another_takes_its_place(warm_ups: Any) -> None:
    model = MakesTable().eval()
    inputs = {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    compilation = {"cudagraph_capture_sizes": [4], "cudagraph_num_of_warmups": warm_ups}
    with closing(cgplan.capture(model, inputs, compilation=compilation, device="cpu")) as runner:
        x = torch.ones(4, 2)
        assert runner(x=x).tolist() == [[0, 1]] * 4
        table = weakref.ref(model.table)
        model.table = torch.tensor([5.0, 5.0])
        assert table() is not None
        with pytest.raises(cgplan.NumbersError):
            runner(x=x)


class Keeps(nn.Module):
    """Keeps what it computes from the first batch of a size."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        name = str(x.shape[0])
        if name not in self.kept:
            self.kept[name] = nn.Parameter(x * 2)
        return x + self.kept[name]


@pytest.mark.parametrize("mode", ["FULL", "AUTO"])
@pytest.mark.parametrize("kind", [dict, nn.ParameterDict])
def test_a_refused_capture_leaves_nothing_of_its_padding_in_dicts(mode: str, kind: Any) -> None:
    model = Keeps(kind()).eval()
    inputs = {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    compilation = {"cudagraph_capture_sizes": [2, 4], "cudagraph_mode": mode}
    if mode == "FULL":
        with pytest.raises(cgplan.CaptureError, match=r"on first use") as refused:
            cgplan.capture(model, inputs, compilation=compilation, device="cpu")
        assert "anew" not in (refused.value.remedy or "")
    else:
        cgplan.capture(model, inputs, compilation=compilation, device="cpu").close()
    assert not list(model.kept)
    assert model(torch.ones(4, 2)).tolist() == [[3, 3]] * 4


def test_a_capture_in_service_that_is_refused_leaves_nothing_of_its_batch_in_dicts() -> None:
    model = Keeps({}).eval()
    inputs = {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    compilation = {"cudagraph_capture_sizes": [2, 4], "capture_policy": "lazy"}
    with closing(cgplan.capture(model, inputs, compilation=compilation, device="cpu")) as runner:
        assert runner(x=torch.ones(3, 2)).tolist() == [[3, 3]] * 3
        assert list(model.kept) == ["3"]


class Stream(nn.Module):
    """Adds what the call before left in Python."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        last = self.kept["x"] if isinstance(self.kept, dict) else sum(self.kept)
        if isinstance(self.kept, dict):
            self.kept["x"] = x[0].clone()
        else:
            self.kept.append(x[0].clone())
        return x + last


@pytest.mark.parametrize("kept", [{"x": 1.0}, [1.0], deque([1.0], maxlen=2)])
def test_trials_of_auto_leave_nothing_of_their_padding_in_containers(kept: Any) -> None:
    model = Stream(kept).eval()
    before = copy.copy(kept)
    inputs = {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0.5)}
    compilation = {"cudagraph_capture_sizes": [2, 4], "cudagraph_mode": "AUTO"}
    with closing(cgplan.capture(model, inputs, compilation=compilation, device="cpu")) as runner:
        assert runner.plan.keys == ()
        assert kept == before


class CountsSmall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] <= 4:
            self.count.add_(1)
        return x * 2


@pytest.mark.parametrize("warm_ups", ["auto", 1])
def test_state_that_only_smaller_sizes_write_is_put_back(warm_ups: Any) -> None:
    model = CountsSmall().eval()
    inputs = {"x": Input(shape=("num_tokens", 2), dtype="float32", pad=0)}
    compilation = {
        "cudagraph_capture_sizes": [2, 4, 8, 16],
        "cudagraph_num_of_warmups": warm_ups,
    }
    with closing(cgplan.capture(model, inputs, compilation=compilation, device="cpu")) as runner:
        assert model.count == 0
        runner(x=torch.ones(3, 2))
        runner(x=torch.ones(7, 2))
        assert model.count == 1


def test_what_an_engine_writes_ahead_of_a_run_is_not_the_run_s() -> None:
    model = SimpleNamespace(steps=torch.zeros(1), table=None)

    def forward() -> None:
        model.table = model.table or [1.0]
        model.steps.add_(1)

    kept = kept_of(model)
    with kept.setting_context():
        model.steps.zero_()
    look(forward, kept)
    with kept.run():
        forward()
    assert kept.prepared == []
