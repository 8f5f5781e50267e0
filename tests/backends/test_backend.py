"""The backend contract, on the tape and on CUDA alike: captures, replays, their hazards, and the life of a graph."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from checks import MIB, back_at, capture, reserved, same
from devices import LimitedTape
from torch import Tensor, nn

from cgplan.backends import GraphBackend, cuda, select_backend
from cgplan.backends.tape import TapeBackend
from cgplan.errors import BackendError, CaptureError, HostSyncError

pytestmark = pytest.mark.usefixtures("quiet_collector")


def test_a_capture_inside_another_one_leaves_the_outer_one_alone(backend: GraphBackend) -> None:
    x, pool = torch.ones(4, device=backend.device), backend.new_pool()
    outer = backend.new_graph(pool)
    with backend.session(), torch.no_grad(), backend.capturing(outer):
        y = x * 2
        inner = backend.capturing(backend.new_graph(pool))
        with pytest.raises(CaptureError, match="inside another one"), inner:
            pass
        y = y + 1
    x.fill_(4)
    backend.replay(outer)
    same(y, x * 2 + 1)


def test_the_stream_of_an_owner_that_is_gone_is_lent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Owner:
        pass

    numbers = itertools.count(1)

    def new_stream() -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=next(numbers), device=torch.device("cuda", 0))

    monkeypatch.setattr(torch.cuda, "Stream", new_stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "_lent", [])
    monkeypatch.setattr(cuda, "_owners", weakref.WeakKeyDictionary())
    first, second = Owner(), Owner()
    taken = [cuda.own_stream(owner).cuda_stream for owner in (first, second)]
    assert taken == [1, 2]
    del first
    gc.collect()
    third, fourth = Owner(), Owner()
    taken = [cuda.own_stream(owner).cuda_stream for owner in (third, fourth)]
    assert taken == [1, 3]


# --- what a capture itself changes: nothing -------------------------------------------------------------------


def test_a_capture_runs_nothing_and_each_replay_does(backend: GraphBackend) -> None:
    """Running statistics are written by operators whose schema does not say so."""
    counter, log = torch.zeros(3, device=backend.device), torch.zeros(2, 3, device=backend.device)
    norm, twin = (nn.BatchNorm1d(3, device=backend.device) for _ in range(2))
    x = torch.arange(12.0, device=backend.device).reshape(4, 3)

    def forward() -> tuple[Tensor, Tensor]:
        counter.add_(1)
        log[1].copy_(counter)
        return counter * 10, norm(x)

    graph, out = capture(backend, forward, warmups=0)
    for done in (0, 1, 2, 3):
        same((counter, log[1]), (torch.full_like(counter, done), torch.full_like(counter, done)))
        same(dict(norm.state_dict()), dict(twin.state_dict()))
        backend.replay(graph)
        with torch.no_grad():
            same(out, (counter * 10, twin(x)))


def test_a_capture_leaves_another_graphs_output_alone(backend: GraphBackend) -> None:
    """Memory of the pool that is held counts as outside memory, too."""
    pool, x = backend.new_pool(), torch.ones(4, device=backend.device)
    first, held = capture(backend, lambda: x * 2, pool)
    backend.replay(first)
    second, _ = capture(backend, lambda: held.add_(1), pool, warmups=0)
    same(held, torch.full_like(held, 2))
    backend.replay(second)
    same(held, torch.full_like(held, 3))


def random_state(backend: GraphBackend) -> Tensor:
    return torch.cuda.get_rng_state() if backend.device.type == "cuda" else torch.get_rng_state()


def draws(x: Tensor) -> tuple[Tensor, ...]:
    return (
        torch.rand_like(x),
        F.dropout(x, 0.5),
        torch.empty_like(x).normal_(),
        torch.bernoulli(x / 2),
    )


@pytest.mark.parametrize("fails", [False, True])
def test_a_capture_leaves_the_random_state_alone(backend: GraphBackend, fails: bool) -> None:
    """A capture runs nothing, so it draws no numbers; nor does one that fails after it has recorded some."""
    x = torch.ones(256, device=backend.device)
    state = random_state(backend)
    if fails:
        with pytest.raises((RuntimeError, HostSyncError)):
            capture(backend, lambda: draws(x)[0].sum().item(), warmups=0)
    else:
        capture(backend, lambda: draws(x), warmups=0)
    same(random_state(backend), state)


def test_random_numbers_are_fresh_on_each_replay(backend: GraphBackend) -> None:
    """A seed gives the numbers that it gives eagerly, whichever of replays and eager calls they are drawn by."""
    x = torch.ones(256, device=backend.device)
    torch.manual_seed(5)
    eager = [draws(x) for _ in range(4)]
    after = random_state(backend)
    for one, other in itertools.combinations(eager, 2):
        assert all(not torch.equal(a, b) for a, b in zip(one, other, strict=True))
    graph, outs = capture(backend, lambda: draws(x))
    for replayed in ({0, 1, 2, 3}, {1, 2}):
        torch.manual_seed(5)
        for step, wanted in enumerate(eager):
            if step in replayed:
                backend.replay(graph)
            same(outs if step in replayed else draws(x), wanted)
        same(random_state(backend), after)


# --- hazards, reproduced --------------------------------------------------------------------------------------


def test_a_parameter_that_moved_leaves_the_graph_on_the_old_memory(backend: GraphBackend) -> None:
    layer, x = (
        nn.Linear(3, 3, bias=False, device=backend.device),
        torch.ones(2, 3, device=backend.device),
    )
    scale = nn.Parameter(torch.ones(3, device=backend.device))
    graph, out = capture(backend, lambda: layer(x) * scale)
    old, factor = layer.weight.data, scale.data
    layer.weight.data, scale.data = torch.zeros_like(old), torch.zeros_like(factor)
    backend.replay(graph)
    same(out, F.linear(x, old))
    old.copy_(torch.full_like(old, 2))
    factor.fill_(10)
    backend.replay(graph)
    same(out, torch.full_like(out, 60))


def test_a_borrowed_output_is_overwritten_by_the_next_replay(backend: GraphBackend) -> None:
    pool, x = backend.new_pool(), torch.ones(4, device=backend.device)
    first, out = capture(backend, lambda: x * 2, pool)
    borrowed = backend.borrow(out)
    assert borrowed.data_ptr() == out.data_ptr()
    del out
    second, other = capture(backend, lambda: x * 3, pool)
    assert other.data_ptr() == borrowed.data_ptr(), "the block was free for the next capture"
    backend.replay(first)
    same(borrowed, torch.full_like(x, 2))
    backend.replay(second)
    same(borrowed, torch.full_like(x, 3))


def test_borrowing_keeps_layout_conjugation_and_sign(backend: GraphBackend) -> None:
    x = torch.arange(4.0, device=backend.device)
    assert backend.borrow(x).data_ptr() == x.data_ptr()

    def forward() -> tuple[Tensor, ...]:
        made = torch.polar(x, x).conj()
        return made, made.imag, (x * 2).view(2, 2).t()[1:, ::2]

    graph, parts = capture(backend, forward, warmups=0)
    backend.replay(graph)
    borrowed = [backend.borrow(part) for part in parts]
    same(tuple(borrowed), forward())
    assert [part.stride() for part in borrowed] == [part.stride() for part in parts]


def test_memory_is_reused_inside_a_graph(backend: GraphBackend) -> None:
    x, pool = torch.ones(MIB, device=backend.device), backend.new_pool()  # 4 MiB

    def forward() -> Tensor:
        y = x
        for _ in range(40):
            y = y + 1
        return y

    graph, out = capture(backend, forward, pool, warmups=0)
    assert 4 * MIB <= backend.pool_bytes(pool) <= 40 * 4 * MIB / 4
    backend.replay(graph)
    same(out, torch.full_like(x, 41))


def test_a_smaller_graph_fits_into_the_pool_of_a_larger_one(backend: GraphBackend) -> None:
    pool, w = backend.new_pool(), torch.ones(256, 256, device=backend.device)
    inputs = {rows: torch.ones(rows, 256, device=backend.device) for rows in (512, 256, 64)}
    outs, grown = {}, {}
    for rows, x in inputs.items():  # largest first
        before = backend.pool_bytes(pool)
        graph, out = capture(backend, lambda x=x: torch.relu(x @ w) + x, pool)
        outs[rows] = (graph, backend.borrow(out))
        del out
        grown[rows] = backend.pool_bytes(pool) - before
    assert grown[512] > 0
    assert grown[256] == grown[64] == 0
    for rows, (graph, out) in outs.items():
        backend.replay(graph)
        same(out, torch.full((rows, 256), 257.0, device=backend.device))


def test_a_held_output_is_kept_and_costs_the_next_graph_its_memory(backend: GraphBackend) -> None:
    pool, x = backend.new_pool(), torch.ones(8 * MIB, device=backend.device)
    first, held = capture(backend, lambda: x * 2, pool, warmups=0)
    before = backend.pool_bytes(pool)
    second, other = capture(backend, lambda: x * 3, pool, warmups=0)
    assert backend.pool_bytes(pool) - before >= held.nbytes
    backend.replay(first)
    backend.replay(second)
    same((held[:4], other[:4]), (torch.full_like(held[:4], 2), torch.full_like(held[:4], 3)))


# --- the life of a graph --------------------------------------------------------------------------------------


def test_nodes_are_counted(backend: GraphBackend) -> None:
    x = torch.ones(4, device=backend.device)
    graph, _ = capture(backend, lambda: torch.relu(x * 2 + 1).view(2, 2).t())
    assert backend.num_nodes(graph) == 3
    empty, _ = capture(backend, lambda: x.view(2, 2))
    assert backend.num_nodes(empty) == 0
    backend.replay(empty)


def test_the_last_reset_frees_the_pool(backend: GraphBackend) -> None:
    x = torch.ones(8 * MIB, device=backend.device)  # 32 MiB
    before, pool = reserved(backend), backend.new_pool()
    one, out = capture(backend, lambda: x + 1, pool, warmups=0)
    other, _ = capture(backend, lambda: x + 2, pool, warmups=0)
    del out, _
    backend.release_cached()
    assert backend.memory().reserved - before >= x.nbytes
    backend.reset(one)
    backend.release_cached()
    assert backend.memory().reserved - before >= x.nbytes, "the other graph still replays on it"
    backend.replay(other)
    backend.reset(other)
    del one, other  # on CUDA a graph also holds the few bytes of its random generator's state
    assert back_at(backend, before)
    assert backend.pool_bytes(pool) == 0


class OwnError(Exception):
    pass


def failing(x: Tensor) -> Tensor:
    y = x * 2
    raise OwnError("in the middle")
    return y


def test_an_exception_inside_a_capture_leaves_no_trace(backend: GraphBackend) -> None:
    x = torch.ones(8 * MIB, device=backend.device)
    state = torch.ones(4, device=backend.device)
    before, pool = reserved(backend), backend.new_pool()

    def forward() -> Tensor:
        state.add_(1)
        return failing(x)

    with pytest.raises(OwnError, match="in the middle"):
        capture(backend, forward, pool, warmups=0)
    gc.collect()
    assert back_at(backend, before)
    assert backend.pool_bytes(pool) == 0
    same(state, torch.ones_like(state))
    same(x * 2, torch.full_like(x, 2))  # the model runs eagerly, and not into the pool
    assert backend.pool_bytes(pool) == 0
    graph, out = capture(backend, lambda: x + 1, pool)
    backend.replay(graph)
    same(out, torch.full_like(x, 2))


def test_memory_that_runs_out_is_told_and_given_back(backend: GraphBackend) -> None:
    x = torch.ones(MIB, device=backend.device)
    if isinstance(backend, TapeBackend):
        backend = LimitedTape(20 * MIB)
    before, pool = reserved(backend), backend.new_pool()
    if backend.device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction((before + 64 * MIB) / backend.memory().total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            capture(backend, lambda: [x + i for i in range(60)], pool, warmups=0)
        gc.collect()
        assert back_at(backend, before)
        graph, out = capture(backend, lambda: x + 1, pool)
        backend.replay(graph)
        same(out, torch.full_like(x, 2))
    finally:
        if backend.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.usefixtures("collector_as_users_have_it")
def test_sessions_hold_the_garbage_collector_still_and_restore_it(backend: GraphBackend) -> None:
    with backend.session():
        assert not gc.isenabled()
        with backend.session():
            assert not gc.isenabled()
        assert not gc.isenabled(), "a session inside a session is part of it"
    assert gc.isenabled()
    with pytest.raises(OwnError), backend.session():
        raise OwnError
    assert gc.isenabled()
    gc.disable()
    try:
        with backend.session():
            pass
        assert not gc.isenabled(), "a caller that had it off keeps it off"
    finally:
        gc.enable()


def test_sessions_of_two_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """And wait for a bounded time: an eager piece that waits for a thread which opens a session would never end."""
    backend, entered, said = TapeBackend(), threading.Event(), list[CaptureError]()

    def other() -> None:
        try:
            with backend.session():
                entered.set()
        except CaptureError as error:
            said.append(error)

    gc.enable()
    thread = threading.Thread(target=other)
    with backend.session(), backend.session():
        thread.start()
        assert not entered.wait(0.1)
        assert not gc.isenabled()
    thread.join(5)
    assert entered.is_set()
    assert gc.isenabled()
    monkeypatch.setattr("cgplan.backends.backend.SESSION_SECONDS", 0.05)
    with backend.session():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(20)
    assert [error.message for error in said] == [
        "another thread has been capturing for more than 0.05 s"
    ]
    gc.disable()


@pytest.mark.usefixtures("collector_as_users_have_it")
def test_a_session_does_not_collect_old_garbage(backend: GraphBackend) -> None:
    """It takes a third of a second in a process that has compiled."""
    runs: list[str] = []

    def count(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            runs.append(phase)

    x, pool = torch.ones(2, device=backend.device), backend.new_pool()
    gc.callbacks.append(count)
    try:
        with backend.session():
            for _ in range(5):
                with backend.capturing(backend.new_graph(pool)):
                    x + 1
        gc.collect()
    finally:
        gc.callbacks.remove(count)
    assert len(runs) == 1  # the one of this test


def test_times_are_microseconds_of_each_call(backend: GraphBackend) -> None:
    x, calls = torch.ones(8, device=backend.device), []
    device, host = backend.time_calls(lambda: calls.append(x + 1), 4)
    assert len(device) == len(host) == len(calls) == 4
    assert all(t > 0 for t in (*device, *host))


def test_readings(backend: GraphBackend) -> None:
    reading = backend.memory()
    assert reading.total > 0
    assert reading.free is None or 0 < reading.free <= reading.total
    assert reading.reserved >= 0
    assert backend.counts_driver_bytes is (backend.device.type == "cuda")


def test_backends_are_chosen_by_device() -> None:
    assert isinstance(select_backend("cpu"), TapeBackend)
    if torch.cuda.is_available():
        assert select_backend("auto").name == "cuda"
        with pytest.raises(BackendError, match="cuda:99"):
            select_backend("cuda:99")
    else:
        assert select_backend("auto").name == "cpu (tape)"
        with pytest.raises(BackendError) as caught:
            select_backend("cuda")
        assert "device: cpu" in caught.value.remedy


def test_a_pool_with_graphs_takes_more_after_a_failed_capture(backend: GraphBackend) -> None:
    """Again and again; graphs captured before and after it replay, and all of them count until they are freed."""
    x = torch.arange(1.0, 9.0, device=backend.device)
    pool = backend.new_pool()
    graphs = [capture(backend, lambda: (x * 2).cumsum(0), pool)]
    for factor in (3, 4):
        with pytest.raises((CaptureError, RuntimeError)):
            capture(backend, lambda: x * float((x * 2).sum().item()), pool)
        graphs.append(capture(backend, lambda n=factor: (x * n).cumsum(0), pool))  # type: ignore[misc]
        assert backend.in_pool(graphs[0][1], pool)
        assert backend.in_pool(graphs[-1][1], pool)
    x.add_(1)
    for (graph, output), factor in zip(graphs, (2, 3, 4), strict=True):
        backend.replay(graph)
        same(output, (x * factor).cumsum(0))
    assert backend.pool_bytes(pool) > 0
    captured = [graph for graph, _ in graphs]
    del graphs, output, graph
    for one in captured:
        backend.reset(one)
    backend.release_cached()
    assert backend.pool_bytes(pool) == 0
    graph, output = capture(backend, lambda: x * 5, pool)
    backend.replay(graph)
    same(output, x * 5)
