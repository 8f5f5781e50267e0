"""Which keys run ahead of their captures, and what a capture without a warm-up must not leave."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgplan
from cgplan import Input
from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.tape import TapeBackend
from cgplan.config import validate_config
from cgplan.errors import BackendError, CaptureError, NumbersError
from cgplan.graphs.wrapper import GraphPool
from cgplan.planning import build_plan
from cgplan.runner.runner import GraphRunner
from cgplan.runner.session import CaptureSession

SIZES = (2, 4, 8, 16)


def open_runner(
    backend: GraphBackend, model: Callable[..., Any], pool: GraphPool | None = None, **settings: Any
) -> GraphRunner:
    config = validate_config(
        {
            "inputs": {"x": Input(shape=("num_tokens", 4), dtype="float32", pad=0)},
            "compilation": {"cudagraph_capture_sizes": SIZES, "outputs": "clone", **settings},
            "device": str(backend.device),
        }
    )
    return CaptureSession(build_plan(config), model, backend, config, pool=pool).run()


def without_warm_up(runner: GraphRunner) -> list[int]:
    records = runner.report.records
    return [record.descriptor.num_tokens for record in records if not record.warmup_seconds]


def serves_right(
    backend: GraphBackend, runner: GraphRunner, model: Callable[..., Any], scale: float
) -> None:
    """Graphs and eager calls, the model's own before and after other sizes' replays."""
    with closing(runner), torch.no_grad():
        for size in (3, 16, 1, 8, 4, 2, 16, 7):
            x = torch.randn(size, 4, device=backend.device)
            torch.testing.assert_close(runner(x=x), x * scale)
        for size in SIZES:
            x = torch.randn(size, 4, device=backend.device)
            torch.testing.assert_close(model(x), x * scale)


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 3


class Counting:
    """``x * 3``; notes the rows of each run in Python."""

    def __init__(self) -> None:
        self.runs: tuple[int, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        self.runs += (len(x),)
        return x * 3


def test_the_first_key_of_a_mode_warms_up_for_all(backend: GraphBackend) -> None:
    hidden = threading.local()  # which no walk enters
    hidden.runs = list[int]()

    def model(x: Tensor) -> Tensor:
        hidden.runs.append(len(x))
        return x * 3

    runner = open_runner(backend, model)
    assert without_warm_up(runner) == [8, 4, 2]
    assert hidden.runs == [16, 16, 2, 16, 8, 4, 2]  # a look, two warm-ups, captures
    shown = str(runner.report)
    assert "none for 3 of 4 keys" in shown
    assert "captured again" not in shown
    lines = [re.split(r" {2,}", line) for line in shown.splitlines()]
    names = next(line for line in lines if "warm-up" in line)
    rows = [dict(zip(names, line, strict=True)) for line in lines if line[0] == "FULL"]
    assert [row["warm-up"] == "-" for row in rows] == [False, True, True, True]
    serves_right(backend, runner, model, 3)


def test_a_model_that_changes_python_in_each_run_warms_up_each_key(backend: GraphBackend) -> None:
    model = Counting()
    runner = open_runner(backend, model)
    assert not without_warm_up(runner)
    serves_right(backend, runner, model, 3)


_calls = 0


def by_calls(x: Tensor) -> Tensor:
    """``x * 3`` but for the first call; a global counts."""
    global _calls
    _calls += 1
    return x * (3 if _calls > 1 else 0)


def test_what_stays_as_a_run_left_it_needs_one_warm_up(backend: GraphBackend) -> None:
    global _calls
    _calls = 0
    runner = open_runner(backend, by_calls)
    assert without_warm_up(runner) == [8, 4, 2]
    assert _calls == 7  # a look, two warm-ups, captures
    serves_right(backend, runner, by_calls, 3)


def test_a_capture_that_fails_once_is_tried_again_though_a_global_changes(
    backend: GraphBackend,
) -> None:
    global _calls
    _calls = 1
    unseen = threading.local()  # by the walk
    unseen.fails = True

    def model(x: Tensor) -> Tensor:
        y = by_calls(x)
        if _calls == 7 and unseen.fails:  # the third capture
            unseen.fails = False
            raise RuntimeError("once")
        return y

    runner = open_runner(backend, model)
    assert runner.report.started_again is not None
    assert "once" in runner.report.started_again
    serves_right(backend, runner, model, 3)


_kept: Tensor | None = None


def keeping(x: Tensor) -> Tensor:
    global _kept
    _kept = x * 3
    return _kept + 0


def test_outputs_that_stay_in_a_global_have_no_capture_without_a_warm_up(
    backend: GraphBackend,
) -> None:
    runner = open_runner(backend, keeping)
    assert not without_warm_up(runner)
    assert runner.report.started_again is None
    serves_right(backend, runner, keeping, 3)


class RunningSum(nn.Module):
    """The first call begins anew, which Python says."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.full((1,), 9.0))
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.step == 0:
            self.total.zero_()
        self.step += 1
        self.total.add_(x.max())
        return x * 0 + self.total


def test_no_capture_takes_the_branch_of_a_first_call(backend: GraphBackend) -> None:
    model = RunningSum().to(backend.device).eval()
    runner = open_runner(backend, model)
    assert not without_warm_up(runner)
    with closing(runner), pytest.raises(NumbersError) as caught:
        runner(x=torch.ones(2, 4, device=backend.device))
    assert caught.value.output[0, 0].item() == 1


def test_a_given_number_of_warm_ups_is_kept(backend: GraphBackend) -> None:
    model = Counting()
    runs = list[int]()

    def counted(x: Tensor) -> Tensor:
        output = model(x)
        runs.append(len(x))
        return output

    with closing(open_runner(backend, counted, cudagraph_num_of_warmups=2)):
        assert [runs.count(size) for size in (16, 8, 4, 2)] == [4, 3, 3, 3]


class DictCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.scales:
            self.scales[len(x)] = torch.full((len(x), 1), 3.0, device=x.device)
        return x * self.scales[len(x)]


class HiddenCache(nn.Module):
    """No walk over the model sees it, nor does the look at the largest size."""

    def __init__(self) -> None:
        super().__init__()

        @lru_cache
        def scale(size: int, device: torch.device) -> Tensor:
            return torch.full((size, 1), 3.0, device=device)

        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale(len(x), x.device) if len(x) < 16 else x * 3


@pytest.mark.parametrize("kind", [DictCache, HiddenCache])
@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("warm_ups", ["auto", 0])
def test_what_a_model_keeps_for_a_size_is_computed_where_no_graph_writes(
    backend: GraphBackend, kind: type[nn.Module], is_used: bool, warm_ups: Any
) -> None:
    model = kind().eval()
    if is_used:
        model(torch.zeros(16, 4, device=backend.device))
    runner = open_runner(backend, model, cudagraph_num_of_warmups=warm_ups)
    assert not without_warm_up(runner)
    serves_right(backend, runner, model, 3)


@pytest.mark.gpu
def test_a_size_that_compiles_is_captured_again() -> None:
    backend = select_backend("cuda")

    @torch.compile(backend="eager", dynamic=False)
    def scaled(x: Tensor) -> Tensor:
        return x * 3 if len(x) > 4 else x + x + x

    def model(x: Tensor) -> Tensor:
        return scaled(x)

    torch._dynamo.reset()
    runner = open_runner(backend, model)
    assert not without_warm_up(runner)
    serves_right(backend, runner, model, 3)


def test_compiled_code_is_warmed_up_until_sizes_compile_nothing(backend: GraphBackend) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(Plain(), backend="eager")

    def model(x: Tensor) -> Tensor:
        return compiled(x)  # type: ignore[no-any-return]

    sizes = [1, 2, 3, 4, 5, 6, 7, 8]
    runner = open_runner(backend, model, cudagraph_capture_sizes=sizes)
    # the look compiles for 8 rows, 7 for all; 6 and 5 compile nothing; 1 does, ahead, for itself
    assert without_warm_up(runner) == [4, 3, 2, 1]
    assert runner.report.started_again is None
    with closing(runner), torch.no_grad():
        for size in (3, 1, 8, 5, 2, 7):
            x = torch.randn(size, 4, device=backend.device)
            torch.testing.assert_close(runner(x=x), x * 3)


class Tuned(nn.Module):
    """Reads a number of the device for each new size of 4 and 8, as autotuning does; may keep more."""

    def __init__(self, keeps: str = "") -> None:
        super().__init__()
        self.keeps = keeps
        self.sizes: list[int] = []

        @lru_cache
        def tuned(size: int, device: torch.device) -> float:
            return torch.full((size,), 3.0, device=device).max().item()

        @lru_cache
        def kept(size: int, device: torch.device) -> Tensor:
            return torch.ones(size, 1, device=device)

        self.tuned, self.kept = tuned, kept
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in (4, 8):
            return x * 3
        if self.keeps == "tensor":
            x = x * self.kept(len(x), x.device)
        if self.keeps == "attribute":
            self.last = x * 2
        if self.keeps == "list" and len(x) not in self.sizes:
            self.sizes.append(len(x))
        return x * self.tuned(len(x), x.device)


@pytest.mark.parametrize("keeps", ["", "attribute", "list"])
@pytest.mark.parametrize("warm_ups", ["auto", 0])
def test_a_capture_that_fails_without_a_warm_up_has_one(
    backend: GraphBackend, keeps: str, warm_ups: Any
) -> None:
    """What the failed capture bound is put back, and holds no memory of its pool."""
    model = Tuned(keeps).eval()
    runner = open_runner(backend, model, cudagraph_num_of_warmups=warm_ups)
    assert not without_warm_up(runner)
    said = " ".join(str(runner.report).split())
    assert "warm-ups for all keys, captured again: without one, capture of FULL size=8" in said
    assert "needs the host" in said
    serves_right(backend, runner, model, 3)


def test_what_a_failed_capture_leaves_is_refused(backend: GraphBackend) -> None:
    with pytest.raises(CaptureError, match="without a warm-up") as caught:
        open_runner(backend, Tuned("tensor").eval())
    assert "Build the model again" in caught.value.remedy
    assert "cudagraph_num_of_warmups: 1" in caught.value.remedy
    again = Tuned("tensor").eval()
    runner = open_runner(backend, again, cudagraph_num_of_warmups=1)
    serves_right(backend, runner, again, 3)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(4.0, device=x.device)
        return x * self.table


@pytest.mark.parametrize("rebinds", [False, True])
def test_a_table_of_first_use_is_not_replaced_in_silence(
    backend: GraphBackend, rebinds: bool
) -> None:
    model = Scaled().eval()
    runner = open_runner(backend, model)
    x = torch.randn(1, 4, device=backend.device)
    with closing(runner), torch.no_grad():
        runner(x=x)
        assert model.table is not None
        if rebinds:
            model.table = model.table + 1
        else:
            model.table.data = model.table + 1
        with pytest.raises(NumbersError):
            runner(x=x)


class Grows(nn.Module):
    """Makes a longer table for a longer batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.table):
            self.table = torch.arange(float(len(x)), device=x.device)
        return x + self.table[: len(x), None]


@pytest.mark.parametrize("verify", ["first", "off"])
@pytest.mark.parametrize("address_check", ["always", "first"])
def test_a_table_of_first_use_may_grow(
    backend: GraphBackend, verify: str, address_check: str
) -> None:
    model = Grows().eval()
    settings = {"verify": verify, "address_check": address_check}
    runner = open_runner(backend, model, cudagraph_capture_sizes=[8, 4], **settings)
    with closing(runner), torch.no_grad():
        for rows in (8, 4, 12, 4, 8):
            x = torch.randn(rows, 4, device=backend.device)
            torch.testing.assert_close(runner(x=x), Grows()(x))


class DerivesFromItsTable(nn.Module):
    """Fills a table on its first call, and keeps what a later one derives from it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(4, 4))
        self.is_filled = False
        self.derived: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_filled:
            self.weight.copy_(torch.eye(4, device=x.device) * 3)
            self.is_filled = True
        elif self.derived is None:
            self.derived = self.weight.t().contiguous()
        weight = self.weight if self.derived is None else self.derived
        return x @ weight


@pytest.mark.parametrize("warm_ups", ["auto", 1, 2])
def test_the_second_run_finds_what_the_first_one_filled(
    backend: GraphBackend, warm_ups: Any
) -> None:
    model = DerivesFromItsTable().to(backend.device).eval()
    runner = open_runner(backend, model, cudagraph_num_of_warmups=warm_ups)
    serves_right(backend, runner, model, 3)


class FillsOnce(nn.Module):
    """Fills a buffer at the first batch of 4 or 8 rows, behind a flag that no walk sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros(1))
        hidden = threading.local()

        def fill() -> None:
            if not hasattr(hidden, "is_filled"):
                self.scale.fill_(3)
                hidden.is_filled = True

        self.fill = fill

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in (4, 8):
            return x * 3
        self.fill()
        return x * self.scale


def test_what_a_capture_writes_first_is_computed(backend: GraphBackend) -> None:
    model = FillsOnce().to(backend.device).eval()
    runner = open_runner(backend, model)
    assert runner.report.started_again == "FULL size=8 num_reqs=8 leaves scale"
    assert "for all keys, captured again" in str(runner.report)
    assert not without_warm_up(runner)
    with closing(runner), torch.no_grad():
        x = torch.randn(4, 4, device=backend.device)
        torch.testing.assert_close(model(x), x * 3)


def test_what_the_smallest_size_writes_first_stays(backend: GraphBackend) -> None:
    scale = torch.zeros(1, device=backend.device)

    @lru_cache
    def fill(rows: int) -> None:
        if rows == 2:
            scale.fill_(3)

    def model(x: Tensor) -> Tensor:
        fill(len(x))
        return x * scale

    with closing(open_runner(backend, model)) as runner:
        assert [state.kept for state in runner.report.state] == ["new"]
        x = torch.randn(2, 4, device=backend.device)
        torch.testing.assert_close(runner(x=x), x * 3)
        torch.testing.assert_close(model(x), x * 3)


class CountsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            self.total.add_(1)
        return x + self.total


@pytest.mark.parametrize("warm_ups", ["auto", 0, 1, 2])
def test_what_the_second_run_alone_writes_is_put_back(backend: GraphBackend, warm_ups: Any) -> None:
    """Without a warm-up the capture would write in each replay."""
    model = CountsTwice().to(backend.device).eval()
    refused = pytest.raises(CaptureError, match="total") if warm_ups == 0 else nullcontext()
    with refused:
        open_runner(
            backend, model, cudagraph_num_of_warmups=warm_ups, cudagraph_capture_sizes=[4]
        ).close()
    assert model.calls == 0
    assert model.total == 0


class SmallState(nn.Module):
    """Counts batches of few rows."""

    def __init__(self, asks: int = 0) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        if len(x) <= 2:
            self.count.add_(1)
        return x * 3 if len(x) != self.asks else x * x.max().item()


def test_a_refused_capture_puts_back_what_the_smallest_size_wrote(backend: GraphBackend) -> None:
    model = SmallState(asks=4).to(backend.device).eval()
    with pytest.raises(CaptureError, match=r"needs the host"):
        open_runner(backend, model)
    assert model.count == 0


@pytest.mark.parametrize("mode", ["FULL", "AUTO"])
def test_times_on_padding_put_back_what_small_sizes_write(backend: GraphBackend, mode: str) -> None:
    model = SmallState().to(backend.device).eval()
    runner = cgplan.capture(
        model,
        {"x": torch.zeros(16, 4, device=backend.device)},
        compilation={
            "cudagraph_mode": mode,
            "cudagraph_capture_sizes": SIZES,
            "capture_policy": "adaptive",
            "compiler": "eager",
        },
    )
    with closing(runner):
        if mode == "FULL":
            runner(x=torch.zeros(16, 4, device=backend.device))
            runner.replan(apply=False)
        assert model.count == 0


class FillsRows(nn.Module):
    """A row of a table for each size, behind a flag in a container, which is not put back."""

    def __init__(self, flags: Any) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(32))
        self.flags = flags

    def forward(self, x: Tensor) -> Tensor:
        size = len(x)
        if size not in self.flags:
            self.table[size] = 3
            if isinstance(self.flags, set):
                self.flags.add(size)
            else:
                self.flags[size] = True
        return x * self.table[size]


@pytest.mark.parametrize("warm_ups", ["auto", 1])
@pytest.mark.parametrize("flags", [set, dict])
def test_rows_that_each_size_fills_once_stay_as_their_flags_do(
    backend: GraphBackend, flags: Callable[[], Any], warm_ups: Any
) -> None:
    model = FillsRows(flags()).to(backend.device).eval()
    runner = open_runner(backend, model, cudagraph_num_of_warmups=warm_ups)
    with closing(runner), torch.no_grad():
        for size in (16, 8, 4, 2, 8):
            x = torch.randn(size, 4, device=backend.device)
            torch.testing.assert_close(runner(x=x), x * 3)
            torch.testing.assert_close(model(x), x * 3)


def test_keys_in_service_and_in_a_shared_pool_warm_up(backend: GraphBackend) -> None:
    model = Plain().eval()
    with closing(open_runner(backend, model, capture_policy="lazy")) as runner:
        for size in SIZES:
            runner(x=torch.zeros(size, 4, device=backend.device))
        assert len(runner.report.records) == 4
        assert not without_warm_up(runner)
    with closing(open_runner(backend, model, GraphPool(backend))) as runner:
        assert not without_warm_up(runner)


class OnlyReplays(TapeBackend):
    """A backend without what audits ask for."""

    logging_operators = GraphBackend.logging_operators
    nodes = GraphBackend.nodes
    blocks = GraphBackend.blocks


def test_a_backend_that_audits_cannot_read_captures_and_replays() -> None:
    backend = OnlyReplays()
    model = Plain()
    with pytest.raises(BackendError, match="cannot be read") as told:
        open_runner(backend, model, audit="error")
    assert told.value.remedy == "Set audit: off."
    runner = open_runner(backend, model)
    x = torch.randn(3, 4)
    expected = model(x)
    with closing(runner):
        torch.testing.assert_close(runner(x=x), expected)
        with pytest.raises(BackendError, match="cannot be read"):
            runner.audit()


def test_captures_of_models_that_compile_nothing_need_no_dynamo(backend: GraphBackend) -> None:
    """Its import takes seconds. In a process of its own, as tests import it."""
    code = f"""
import sys
import torch, cgplan

device = {str(backend.device)!r}
model = torch.nn.Linear(4, 4, device=device).eval()
x = torch.ones(2, 4, device=device)
sizes = {{"cudagraph_capture_sizes": [2]}}
given = cgplan.Input(shape=("num_tokens", 4), dtype="float32", pad=0)
runner = cgplan.capture(model, {{"input": given}}, compilation=sizes, device=device)
runner(input=x)
g = cgplan.graphed(model)
for _ in range(4):
    g(x)
assert g.graph_calls and runner.stats.calls
assert "torch._dynamo" not in sys.modules
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class WritesNothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("empty", torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.empty.zero_()
        return x * 3


def test_an_empty_tensor_has_no_values_to_lose(backend: GraphBackend) -> None:
    model = WritesNothing().to(backend.device).eval()
    serves_right(backend, open_runner(backend, model), model, 3)
    drop_in = cgplan.graphed(model)
    x = torch.randn(3, 4, device=backend.device)
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(drop_in(x), x * 3)
    assert "graphs answered 2 calls" in drop_in.explain()


class FilledBehindAView(nn.Module):
    """Large, and filled once behind a flag that no walk sees; the view comes first."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.zeros(1 << 20)
        self.register_buffer("head", table[:0])
        self.register_buffer("table", table)

        @lru_cache
        def fill() -> None:
            self.table.fill_(3.0)

        self.fill = fill

    def forward(self, x: Tensor) -> Tensor:
        self.fill()
        return x * self.table[:4]


def test_an_empty_view_hides_no_write_of_its_storage(backend: GraphBackend) -> None:
    with backend.device:
        model = FilledBehindAView().eval()
    serves_right(backend, open_runner(backend, model), model, 3)
    assert model.table[0] == 3


class ReadsAtOneSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 8:
            return x * x.sum().item()
        if self.table is None:
            self.table = torch.full((4,), 3.0, device=x.device)
        return x * self.table


def test_a_key_that_read_a_value_and_failed_blames_no_other_key(backend: GraphBackend) -> None:
    model = ReadsAtOneSize().to(backend.device).eval()
    with closing(open_runner(backend, model, capture_policy="lazy")) as runner:
        runner.exchange(runner.reachable.keys)
        assert [failed.descriptor.num_tokens for failed in runner.report.failed] == [8]
        x = torch.randn(4, 4, device=backend.device)
        torch.testing.assert_close(runner(x=x), x * 3)
        assert runner.stats.replays.total() == 1


def test_traced_keys_and_full_ones_beside_them_need_few_warm_ups(backend: GraphBackend) -> None:
    model = Plain().to(backend.device).eval()
    runner = open_runner(
        backend, model, cudagraph_mode="FULL_AND_PIECEWISE", piecewise="ops", compiler="eager"
    )
    assert without_warm_up(runner) == [2, 8, 4, 2]  # PIECEWISE, then FULL
    runner.close()


class FilledOnce(nn.Module):
    """Behind a flag that no walk sees, while each run changes another attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(4))
        self.calls = 0

        @lru_cache
        def fill() -> None:
            self.table.fill_(3.0)

        self.fill = fill

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.fill()
        return x * self.table


def test_a_change_that_later_runs_began_without_is_no_flag(backend: GraphBackend) -> None:
    model = FilledOnce().to(backend.device).eval()
    serves_right(backend, open_runner(backend, model), model, 3)
    assert model.table.tolist() == [3.0] * 4
