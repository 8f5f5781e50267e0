"""CudaGraphManager and the pool that several of them share."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import back_at, reserved, same
from decoding import one_thread

import cgplan
from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.tape import TapeBackend
from cgplan.captures.captured_keys import CaptureProgress
from cgplan.config import Config, Input, validate_config
from cgplan.errors import BackendError, CaptureError, CgplanError, HostSyncError, PlanError
from cgplan.modes import CUDAGraphMode
from cgplan.planning import build_plan
from cgplan.runner.manager import CudaGraphManager, GraphPool, PoolReport, capture_together
from cgplan.traffic.step_times import StepTimes
from cgplan.units import format_bytes

pytestmark = pytest.mark.usefixtures("quiet_collector")
WIDTH = 64
TIMES = StepTimes.measured(
    {(CUDAGraphMode.NONE, 0): {1: 1000, 512: 3000}, (CUDAGraphMode.FULL, 0): {1: 100, 512: 1500}},
    "made up",
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def baseline(backend: GraphBackend) -> int:
    """Bytes that are reserved once libraries have what they keep for themselves."""
    with CudaGraphManager(config_of(backend, [8, 128]), MLP(backend), backend) as manager:
        manager.capture()
        manager.run(x=rows(backend, 3))
        MLP(backend)(rows(backend, 3))
    return reserved(backend)


def config_of(backend: GraphBackend, sizes: list[int], **compilation: Any) -> Config:
    return validate_config(
        {
            "inputs": {"x": Input(shape=("num_tokens", WIDTH), dtype="float32", pad=0)},
            "compilation": {
                "cudagraph_mode": "FULL",
                "cudagraph_capture_sizes": sizes,
                **compilation,
            },
            "device": backend.device.type,
        }
    )


class MLP(torch.nn.Module):
    """Layers whose results are all alive in turn, so that a capture takes some memory."""

    def __init__(self, backend: GraphBackend, depth: int = 3) -> None:
        super().__init__()
        with torch.device(backend.device):
            self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.to(backend.device).requires_grad_(False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in self.layers:
            x = layer(x).relu()
        return x


def rows(backend: GraphBackend, count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, device=backend.device)


def test_planned_at_once_captured_when_told_to_then_called_like_the_model(
    backend: GraphBackend,
) -> None:
    model = MLP(backend)
    manager = CudaGraphManager(config_of(backend, [8, 2, 4]), model, backend, name="mlp")
    assert model.calls == 0
    assert manager.sizes == (2, 4, 8)
    assert [d.num_tokens for _, d in manager.plan.keys] == [8, 4, 2]
    assert not manager.is_captured
    for use in (
        lambda: manager.run(x=rows(backend, 2)),
        lambda: manager.report,
        lambda: manager.stats,
    ):
        with pytest.raises(CgplanError, match="'mlp' has no graphs") as caught:
            use()
        assert "capture()" in caught.value.remedy
    report = manager.capture()
    assert len(report.records) == 3
    assert manager.is_captured
    assert manager.report is report
    calls = model.calls
    for count in (1, 3, 8):
        x = rows(backend, count)
        found = manager.run(x=x).clone()
        assert model.calls == calls
        torch.testing.assert_close(found, model(x))
        calls = model.calls
    assert sum(manager.stats.replays.values()) == 3
    manager.close()


def test_capture_close_and_capture_again(backend: GraphBackend) -> None:
    model, x = MLP(backend), rows(backend, 3)
    before = baseline(backend)
    with CudaGraphManager(
        config_of(backend, [4], address_check="always"), model, backend
    ) as manager:
        manager.capture()
        with pytest.raises(CgplanError, match="'model' is captured already") as caught:
            manager.capture()
        assert "recapture" in caught.value.remedy
        first = manager.run(x=x).clone()
        with torch.no_grad():
            model.layers[0].weight.data = -model.layers[
                0
            ].weight.data  # elsewhere, with other numbers
        with pytest.raises(cgplan.AddressError):
            [manager.run(x=x) for _ in range(2)]  # nothing tells of it, and its place has its turn
        manager.recapture()
        second = manager.run(x=x).clone()
        torch.testing.assert_close(second, model(x))
        assert not torch.allclose(first, second)
    manager.close()
    with pytest.raises(CgplanError, match="has no graphs"):
        manager.run(x=x)
    assert back_at(backend, before)
    manager.capture()
    same(manager.run(x=x), second)
    manager.close()


def test_who_reads_numbers_reads_those_after_a_recapture_too(backend: GraphBackend) -> None:
    """A server registers them once; what they counted before the last replan is not planned for again."""
    config = config_of(backend, [2, 8], capture_policy="adaptive")
    with CudaGraphManager(config, MLP(backend), backend) as manager:
        manager.capture()
        runner, stats = manager.runner, manager.stats
        stats.time_every = 1
        manager.run(x=rows(backend, 7))
        manager.replan(times=TIMES)
        assert manager.sizes == (7,)
        manager.recapture()
        assert manager.sizes == (7,), "what was planned last"
        manager.run(x=rows(backend, 3))
        assert manager.runner is runner
        assert manager.stats is stats
        assert (stats.calls, stats.timed_calls, stats.captures) == (2, 2, 2 + 1 + 1)
        assert list(stats.replays.values()) == [1, 1]
        manager.replan(times=TIMES)
        assert manager.sizes == (3,)
        manager.close()
        manager.capture()
        assert manager.stats.calls == 0, "a new beginning"


def test_a_manager_alone_is_told_of_its_own_two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TapeBackend()
    stream = [1]
    monkeypatch.setattr(backend, "stream_getter", lambda: lambda: stream[0])
    monkeypatch.setattr(backend, "is_busy", lambda stream: True)
    with CudaGraphManager(config_of(backend, [4]), MLP(backend), backend) as manager:
        manager.capture()
        manager.run(x=rows(backend, 3))
        stream[0] = 2
        with pytest.raises(
            CgplanError, match="the runner was called from another stream than before"
        ) as caught:
            manager.run(x=rows(backend, 3))
        assert "GraphPool" not in caught.value.remedy


def test_a_recapture_that_is_refused_or_fails(backend: GraphBackend) -> None:
    class Asks(MLP):
        asks = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (float(x.sum().item()) if self.asks else 1)

    model, x = Asks(backend), rows(backend, 3)
    manager = CudaGraphManager(config_of(backend, [4]), model, backend)
    assert manager.recapture().records, "a first capture"
    wanted = manager.run(x=x).clone()
    with (
        manager.runner.stage(3),
        pytest.raises(CgplanError, match="while another call was under way") as caught,
    ):
        manager.recapture()
    assert "leave the block of staged buffers" in caught.value.remedy, (
        "nothing of other members: there are none"
    )
    same(manager.run(x=x), wanted)
    model.asks = True
    with pytest.raises(HostSyncError):
        manager.recapture()
    assert not manager.is_captured
    model.asks = False
    manager.capture()
    same(manager.run(x=x), wanted)
    manager.close()


# --- one pool for several -------------------------------------------------------------------------------------


def together(backend: GraphBackend) -> tuple[GraphPool, dict[str, CudaGraphManager]]:
    """A small and a large model that share a pool."""
    pool = GraphPool(backend)
    config = config_of(backend, [64, 128])
    return pool, {
        name: CudaGraphManager(config, MLP(backend, depth), pool=pool, name=name)
        for name, depth in (("draft", 2), ("target", 6))
    }


def test_models_that_share_a_pool_take_turns(backend: GraphBackend) -> None:
    """The one with the largest size is captured first, so that the other fits into the same memory."""
    pool, seen = GraphPool(backend), list[str]()

    def told(name: str, _: CaptureProgress) -> None:
        seen.append(name)

    before, models = baseline(backend), {"draft": MLP(backend, 2), "target": MLP(backend, 6)}
    managers = {
        name: CudaGraphManager(
            config_of(backend, sizes),
            models[name],
            pool=pool,
            name=name,
            progress=lambda _, name=name: seen.append(name),
        )
        for name, sizes in (("draft", [32, 64]), ("target", [64, 128]))
    }
    report = capture_together(list(managers.values()))
    assert seen == ["target"] * 2 + ["draft"] * 2
    assert list(report.parts) == ["target", "draft"]
    alone = {}
    for name, manager in managers.items():
        with CudaGraphManager(manager.config, models[name], backend) as other:
            other.capture()
            alone[name] = other.pool.nbytes
    assert max(alone.values()) <= pool.nbytes < sum(alone.values())
    assert isinstance(report, PoolReport)
    assert (report.graphs, report.pool_bytes, report.static_bytes) == (
        4,
        pool.nbytes,
        (128 + 64) * WIDTH * 4,
    )
    assert report.total_bytes == report.pool_bytes + report.static_bytes + report.outside_bytes
    if backend.device.type == "cpu":
        grown = [
            sum(record.pool_growth for record in part.records) for part in report.parts.values()
        ]
        assert sum(grown) == report.pool_bytes
    for words in ("draft", "target", f"4 graphs in one pool of {format_bytes(pool.nbytes)}"):
        assert words in str(report)
    for count in (3, 64, 100, 128, 1):
        for name, manager in managers.items():
            x = rows(backend, count)
            torch.testing.assert_close(manager.run(x=x), models[name](x), msg=name)
    managers["target"].close()
    assert pool.nbytes > 0
    x = rows(backend, 7)
    torch.testing.assert_close(managers["draft"].run(x=x), models["draft"](x))
    managers["draft"].close()
    assert pool.nbytes == 0
    assert back_at(backend, before)


def test_an_output_is_valid_until_the_next_call_of_any_member(backend: GraphBackend) -> None:
    """The hazard of sharing, so that nobody takes it for a promise; ``outputs: clone`` is the way out."""
    pool, managers = together(backend)
    capture_together(list(managers.values()))
    x = rows(backend, 128)
    found = managers["draft"].run(x=x)
    kept = found.clone()
    managers["target"].run(x=rows(backend, 128))
    assert not torch.equal(found, kept), "the models do not share memory"
    for manager in managers.values():
        manager.close()
    config = config_of(backend, [128], outputs="clone")
    clones = [CudaGraphManager(config, MLP(backend), pool=pool, name=name) for name in ("a", "b")]
    capture_together(clones)
    found = clones[0].run(x=x)
    kept = found.clone()
    clones[1].run(x=rows(backend, 128))
    same(found, kept)
    for manager in clones:
        manager.close()


def test_all_are_captured_or_none(backend: GraphBackend) -> None:
    pool, managers = together(backend)

    def fails(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    before = baseline(backend)
    broken = CudaGraphManager(config_of(backend, [2]), fails, pool=pool, name="broken")
    with pytest.raises(CaptureError):
        capture_together([*managers.values(), broken])
    assert not any(manager.is_captured for manager in managers.values())
    assert pool.nbytes == 0
    assert back_at(backend, before)
    capture_together(list(managers.values()))
    with pytest.raises(CgplanError, match="captured already"):
        capture_together(list(managers.values()))
    assert all(manager.is_captured for manager in managers.values())
    for manager in managers.values():
        manager.close()


def test_the_example_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "engine.md"
    blocks = re.findall(
        r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    (block,) = (block for block in blocks if "GraphPool" in block)
    names: dict[str, Any] = {}
    exec(compile(block, str(page), "exec"), names)
    assert names["y"].shape == (3, 8)
    assert "4 graphs in one pool" in capsys.readouterr().out
    assert not any(manager.is_captured for manager in names["managers"])


# --- mistakes -------------------------------------------------------------------------------------------------


def test_managers_that_cannot_be_captured_together() -> None:
    backend = TapeBackend()
    config, pool = config_of(backend, [2]), GraphPool(backend)
    one, two = (CudaGraphManager(config, MLP(backend), pool=pool) for _ in range(2))
    other = CudaGraphManager(config, MLP(backend), backend, name="other")
    for wrong in ([one, two], [one, other], []):
        with pytest.raises(CgplanError, match="cannot be captured together") as caught:
            capture_together(wrong)
        assert "one GraphPool" in caught.value.remedy
        assert not any(manager.is_captured for manager in wrong)
    with pytest.raises(BackendError, match="'model' was given a pool of another backend") as caught:
        CudaGraphManager(config, MLP(backend), TapeBackend(), pool=pool)
    assert "select_backend" in caught.value.remedy
    with pytest.raises(PlanError):
        CudaGraphManager(
            config, MLP(backend), pool=pool, plan=build_plan(config_of(backend, [4]))
        ).capture()


def test_a_second_thread_waits_while_another_member_runs() -> None:
    """What the second would replay could overwrite what the first one's graph is reading."""
    backend = TapeBackend()
    pool, inside, go_on = GraphPool(backend), threading.Event(), threading.Event()

    def slow(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert go_on.wait(10)
        return x + 1

    eager = CudaGraphManager(
        config_of(backend, [2], cudagraph_mode="NONE"), slow, pool=pool, name="slow"
    )
    other = CudaGraphManager(config_of(backend, [2]), MLP(backend), pool=pool, name="other")
    go_on.set()
    capture_together([other, eager])
    inside.clear()
    go_on.clear()
    x = rows(backend, 2)
    thread = threading.Thread(target=lambda: eager.run(x=x))
    thread.start()
    assert inside.wait(10)
    waiting = threading.Thread(target=lambda: other.run(x=x))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    go_on.set()
    for each in (thread, waiting):
        each.join()
    assert sum(other.stats.replays.values()) == 1


@pytest.mark.gpu
def test_a_second_stream_is_refused_while_the_first_has_work() -> None:
    backend = select_backend("cuda")
    _, managers = together(backend)
    capture_together(list(managers.values()))
    x = rows(backend, 128)
    managers["draft"].run(x=x)  # a first replay is verified, and waits for the device
    wanted = managers["target"].run(x=x).clone()
    backend.synchronize()
    stream = torch.cuda.Stream()
    torch.cuda._sleep(200_000_000)  # a tenth of a second of work, then the call
    managers["draft"].run(x=x)
    with (
        torch.cuda.stream(stream),
        pytest.raises(CgplanError, match="'target' was called on another stream") as caught,
    ):
        managers["target"].run(x=x)
    assert "Synchronise the first stream" in caught.value.remedy
    torch.cuda.current_stream().synchronize()
    with torch.cuda.stream(stream):
        found = managers["target"].run(x=x).clone()
    stream.synchronize()
    same(found, wanted)
    for manager in managers.values():
        manager.close()
