"""Pools: which graphs share memory, that it is given back, and that graphs of one pool never run at once."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from checks import MIB, back_at, reserved, same
from decoding import one_thread
from devices import WithStreams

from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.tape import TapeBackend
from cgplan.captures.captured_keys import CaptureProgress
from cgplan.config import Config, Input, validate_config
from cgplan.errors import CgplanError
from cgplan.modes import CUDAGraphMode
from cgplan.planning import build_plan
from cgplan.runner.manager import CudaGraphManager, GraphPool, capture_together
from cgplan.runner.runner import GraphRunner
from cgplan.runner.session import CaptureSession

pytestmark = pytest.mark.usefixtures("quiet_collector")
POLICIES = ("shared", "per_mode", "per_graph")
WIDTHS = {"cpu": 16, "cuda": 256}  # a GPU takes memory in large segments


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


class Net(torch.nn.Module):
    def __init__(self, backend: GraphBackend, depth: int = 2) -> None:
        super().__init__()
        with torch.device(backend.device):
            width = WIDTHS[backend.device.type]
            self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(depth))
        self.mix = torch.nn.Identity()
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(self.mix(x)).relu()
        return x


def config_of(backend: GraphBackend, pool: str, **changes: Any) -> Config:
    compilation = {
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "splitting_modules": ["mix"],
        "cudagraph_capture_sizes": [256, 1024],
        "pool": pool,
        **changes,
    }
    return validate_config(
        {
            "inputs": {
                "x": Input(
                    shape=("num_tokens", WIDTHS[backend.device.type]), dtype="float32", pad=0
                )
            },
            "compilation": compilation,
            "scheduler": {"max_num_seqs": 1024},
            "device": backend.device.type,
        }
    )


def open_runner(
    backend: GraphBackend,
    pool: str,
    model: Any = None,
    given: GraphPool | None = None,
    name: str = "runner",
    **c: Any,
) -> GraphRunner:
    config = config_of(backend, pool, **c)
    model = model or Net(backend)
    return CaptureSession(build_plan(config), model, backend, config, pool=given, name=name).run()


def rows(backend: GraphBackend, count: int) -> torch.Tensor:
    return torch.randn(count, WIDTHS[backend.device.type], device=backend.device)


def check(runner: GraphRunner) -> None:
    """Both modes and sizes, bit for bit with eager."""
    for count, uniform in itertools.product((3, 256, 700, 1024), (True, False)):
        x = rows(runner.backend, count)
        same(
            runner(x=x, uniform_decode=uniform).clone(),
            runner.run_eagerly(x=x, uniform_decode=uniform),
        )
    assert not runner.stats.eager


def test_each_policy_gives_right_numbers_and_everything_back(backend: GraphBackend) -> None:
    model, found = Net(backend), []
    first = open_runner(backend, "shared", model)
    check(first)  # the workspace of an eager call stays
    first.close()
    start = reserved(backend)
    for policy in POLICIES:
        runner = open_runner(backend, policy, model)
        assert {mode for mode, _ in runner.plan.keys} == {
            CUDAGraphMode.FULL,
            CUDAGraphMode.PIECEWISE,
        }
        check(runner)
        report = runner.report
        assert report.pool == policy
        assert (f"one for each {policy.removeprefix('per_')}" in str(report)) == (
            policy != "shared"
        )
        if backend.device.type == "cpu":
            assert reserved(backend) == report.pool_bytes
        else:
            static = (
                -(-report.static_bytes // (2 * MIB)) * 2 * MIB
            )  # in whole segments; the slack is that of back_at
            assert abs(reserved(backend) - start - report.pool_bytes - static) <= 2 * MIB
        runner.close()
        assert back_at(backend, start)
        found.append(report.pool_bytes)
    assert found[0] < found[1] < found[2], "more pools take more memory"


def test_what_a_replay_overwrites(backend: GraphBackend) -> None:
    """Of one pool, whatever another graph left; of pools of their own, nothing but a graph's own output."""
    x, y = rows(backend, 1024), rows(backend, 1024)
    for policy, lasts in (("shared", False), ("per_mode", False), ("per_graph", True)):
        runner = open_runner(
            backend, policy, cudagraph_mode="FULL", cudagraph_capture_sizes=[1023, 1024]
        )
        found = runner(x=x)
        kept = found.clone()
        runner(x=y[:1023])
        assert torch.equal(found, kept) == lasts, policy
        runner(x=y)
        assert not torch.equal(found, kept)
        runner.close()
    runner = open_runner(backend, "per_mode")
    found = runner(x=x, uniform_decode=True)
    kept = found.clone()
    runner(x=y, uniform_decode=False)
    same(found, kept)
    runner.close()


@pytest.mark.parametrize("policy", [*POLICIES, "given"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_memory_is_free_in_any_order_of_closing(
    backend: GraphBackend, policy: str, order: tuple[int, ...]
) -> None:
    """A pool that runners share is free once its last member is; others as their runner closes."""
    models = [Net(backend, depth) for depth in (1, 2, 3)]
    open_runner(backend, "shared", models[0]).close()
    start = reserved(backend)
    given = GraphPool(backend) if policy == "given" else None
    runners = [
        open_runner(backend, "shared" if given else policy, model, given, str(i))
        for i, model in enumerate(models)
    ]
    before = reserved(backend)
    for index in order:
        runners[index].close()
        if given is None:
            assert reserved(backend) <= before - runners[index].report.pool_bytes
            before = reserved(backend)
        for other in runners:
            if not other.is_closed:
                check(other)
                assert given is None or given.nbytes > 0
    assert back_at(backend, start)
    if given is not None:
        assert (given.nbytes, len(given.members)) == (0, 0)
        again = open_runner(backend, "shared", models[0], given)
        check(again)
        again.close()
        assert back_at(backend, start)


def test_graphs_go_while_others_stay_and_memory_is_written_over(backend: GraphBackend) -> None:
    """What evicted graphs leave, a library's workspaces too, is nobody else's: others give the same numbers."""
    models = [Net(backend) for _ in range(2)]
    kept, gone = (
        open_runner(backend, "per_graph", models[0]),
        open_runner(backend, "shared", models[1]),
    )
    x = rows(backend, 1024)
    wanted = kept(x=x).clone()
    gone.close()
    keys = kept.plan.keys
    with kept.graphs.captures_again():
        kept.graphs.evict([key for key in keys if key[1].num_tokens == 256])
    backend.release_cached()
    noise = [torch.full((MIB,), float("nan"), device=backend.device) for _ in range(64)]
    for _ in range(3):
        same(kept(x=x).clone(), wanted)
    assert all(bool(t.isnan().all()) for t in noise), (
        "a replay wrote into memory that is not its own"
    )
    kept.close()


@pytest.mark.gpu
def test_workspaces_survive_without_warm_ups() -> None:
    """The first product of a process would stand in the first capture, and its workspace in that graph's pool."""
    backend = select_backend("cuda")
    one, two, start = Net(backend), Net(backend), reserved(backend)
    first = open_runner(backend, "shared", one, cudagraph_num_of_warmups=0, cudagraph_mode="FULL")
    second = open_runner(backend, "shared", two, cudagraph_num_of_warmups=0, cudagraph_mode="FULL")
    x = rows(backend, 1024)
    wanted = second(x=x).clone()
    first.close()
    backend.release_cached()
    noise = [torch.full((MIB,), float("nan"), device=backend.device) for _ in range(64)]
    same(second(x=x).clone(), wanted)
    assert all(bool(t.isnan().all()) for t in noise)
    second.close()
    del noise, x, wanted
    assert back_at(backend, start)


# --- mistakes -------------------------------------------------------------------------------------------------


def test_managers_share_a_pool_but_not_with_pools_of_their_own() -> None:
    backend = TapeBackend()
    for policy in ("per_mode", "per_graph"):
        with pytest.raises(CgplanError, match=f"compilation.pool is {policy}") as caught:
            open_runner(backend, policy, given=GraphPool(backend))
        assert "pool: shared" in caught.value.remedy
        with pytest.raises(CgplanError, match=f"compilation.pool is {policy}"):
            CudaGraphManager(config_of(backend, policy), Net(backend), pool=GraphPool(backend))
    config, pool = config_of(backend, "shared"), GraphPool(backend)
    managers = [CudaGraphManager(config, Net(backend), pool=pool, name=name) for name in ("a", "b")]
    capture_together(managers)
    for members, manager in zip((2, 1), managers, strict=True):
        assert len(pool.members) == members
        check(manager.runner)
        manager.close()
    assert not pool.members


def test_members_of_a_pool_on_two_streams() -> None:
    backend = WithStreams()
    pool = GraphPool(backend)
    draft, target = (
        open_runner(backend, "shared", given=pool, name=name) for name in ("draft", "target")
    )
    x = rows(backend, 256)
    wanted = target(x=x).clone()
    draft(x=x)
    backend.busy, backend.now = {1}, 2
    with pytest.raises(
        CgplanError, match="'target' was called on another stream than 'draft' before"
    ) as caught:
        target(x=x)
    assert "own GraphPool" in caught.value.remedy
    with (
        pytest.raises(CgplanError, match="another stream than 'draft'"),
        target.stage(num_tokens=256),
    ):
        raise AssertionError("what is written here would race the draft")
    backend.busy = set()
    with target.stage(num_tokens=256) as buffers:
        buffers["x"].copy_(x)
    same(buffers.output.clone(), wanted)
    backend.busy, backend.now = {2}, 1
    with pytest.raises(
        CgplanError, match="'draft' was called on another stream than 'target' before"
    ):
        draft(x=x)
    backend.now = 2
    draft(x=x)
    backend.busy, backend.now = set(), 1
    same(target(x=x).clone(), wanted)
    target.close()
    draft(x=x)
    draft.close()
    assert pool.nbytes == 0


@pytest.mark.parametrize("shares", [False, True])
def test_a_stream_is_looked_at_for_each_pool_and_before_captures_on_demand(shares: bool) -> None:
    backend = WithStreams()
    pool = GraphPool(backend) if shares else None
    one = open_runner(backend, "shared", given=pool, name="one")
    lazy = open_runner(backend, "shared", given=pool, name="lazy", capture_policy="lazy")
    x = rows(backend, 256)
    one(x=x)
    backend.busy, backend.now = {1}, 2
    if shares:
        with pytest.raises(CgplanError, match="'lazy' was called on another stream than 'one'"):
            lazy(x=x)
        assert not lazy.plan.keys
        assert not lazy.report.failed
    else:
        lazy(x=x)
        with pytest.raises(CgplanError, match="the runner was called from another stream"):
            one(x=x)
    backend.busy = set()
    check(lazy)
    assert len(lazy.plan.keys) == 4
    for runner in (lazy, one):
        check(one)
        runner.close()
    assert pool is None or pool.nbytes == 0


def test_a_second_thread_waits_for_a_member() -> None:
    backend = TapeBackend()
    pool, inside, go_on = GraphPool(backend), threading.Event(), threading.Event()
    go_on.set()

    def slow(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert go_on.wait(10)
        return x + 1

    eager = open_runner(
        backend, "shared", slow, pool, "slow", cudagraph_mode="NONE", splitting_modules=[]
    )
    other = open_runner(backend, "shared", Net(backend), pool, "other")
    x = rows(backend, 3)
    eager(x=x)
    inside.clear()
    go_on.clear()
    thread, done = threading.Thread(target=lambda: eager(x=x)), list[torch.Tensor]()
    thread.start()
    assert inside.wait(10)
    waiting = threading.Thread(target=lambda: done.append(other(x=x).clone()))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    go_on.set()
    for each in (thread, waiting):
        each.join()
    assert torch.equal(done[0], other.run_eagerly(x=x))
    check(other)
    other.close()
    eager.close()


class Opening(TapeBackend):
    """Calls ``during`` ahead of each key of a capture, see ``progress``, and while a runner takes new graphs."""

    during: Callable[[], None] = staticmethod(lambda: None)

    def progress(self, _: CaptureProgress) -> None:
        self.during()

    def copier(self, *given: Any, **options: Any) -> Any:
        self.during()
        return super().copier(*given, **options)


def refusals_during(
    backend: Opening, calls: Sequence[Callable[[], Any]], what: Callable[[], Any]
) -> list[str]:
    """What calls were told while something else went on; each has to be refused."""
    told: list[str] = []

    def during() -> None:
        for call in calls:
            with pytest.raises(CgplanError) as caught:
                call()
            told.append(caught.value.message)

    backend.during = during
    try:
        what()
    finally:
        backend.during = lambda: None
    return told


def test_no_member_is_called_while_another_captures() -> None:
    """What the second would replay writes over what the first one's capture has just computed."""
    backend = Opening()
    pool, config, x = GraphPool(backend), config_of(backend, "shared"), rows(backend, 256)
    other = open_runner(backend, "shared", given=pool, name="other")
    calls = (
        lambda: other(x=x),
        lambda: other.run_eagerly(x=x),
        other.recapture,
        other.suspend,
        other.close,
    )
    plan, progress = build_plan(config), backend.progress
    one = CudaGraphManager(config, Net(backend), pool=pool, name="one", progress=progress)
    session = CaptureSession(
        plan, Net(backend), backend, config, pool=pool, name="one", progress=progress
    )
    sessions: list[GraphRunner] = []

    def close_and_capture() -> None:
        one.close()
        one.capture()

    for what in (
        one.capture, one.recapture, lambda: one.runner.recapture(), close_and_capture,
        lambda: sessions.append(session.run()), lambda: sessions[0].recapture(),
    ):  # fmt: skip
        told = refusals_during(backend, calls, what)
        assert len(told) == (len(plan.keys) + 1) * len(calls)
        assert set(told) == {
            "'other' was called while a call of 'one' was under way, and both capture into one pool"
        }
        for runner in (other, one.runner, *sessions):
            check(runner)
    with (
        other.stage(3),
        pytest.raises(CgplanError, match="'one' was called while a call of 'other' was under way"),
    ):
        session.run()
    for runner in (other, one, *sessions):
        runner.close()
    assert pool.nbytes == 0


def test_calls_during_a_recapture_are_typed_errors_and_lose_nothing() -> None:
    backend = Opening()
    x, config = rows(backend, 3), config_of(backend, "per_mode")
    manager = CudaGraphManager(config, Net(backend), backend, progress=backend.progress)
    manager.capture()
    runner = manager.runner
    assert not runner.is_closed
    calls = (
        lambda: manager.run(x=x), lambda: runner.stage(3), lambda: runner.route({"x": x}), runner.retry_failed,
        lambda: runner.input_views(3), manager.recapture, manager.close, runner.sleep, runner.wake,
    )  # fmt: skip
    assert refusals_during(backend, calls, manager.recapture)
    assert manager.runner is runner
    check(runner)
    runner.sleep()
    assert refusals_during(backend, calls, manager.recapture)
    check(runner)
    manager.close()


@pytest.mark.gpu
def test_members_of_a_pool_on_two_cuda_streams() -> None:
    backend = select_backend("cuda")
    pool = GraphPool(backend)
    settings: dict[str, Any] = {"given": pool, "verify": "off"}  # which would wait for the device
    draft, target = (
        open_runner(backend, "shared", name=name, **settings) for name in ("draft", "target")
    )
    x, stream = rows(backend, 256), torch.cuda.Stream()
    wanted = target(x=x).clone()
    torch.cuda._sleep(200_000_000)
    draft(x=x)
    with (
        torch.cuda.stream(stream),
        pytest.raises(CgplanError, match="'target' was called on another stream"),
    ):
        target(x=x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        found = target(x=x).clone()
    stream.synchronize()
    same(found, wanted)
    target.close()
    draft.close()
    gc.collect()
    backend.release_cached()
    assert pool.nbytes == 0
