"""Batches that the caller writes in place: the block, its tensors, its output, and its end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from checks import back_at, reserved, same
from torch import Tensor

import cgplan
from cgplan import GraphRunner, Input
from cgplan.backends import GraphBackend
from cgplan.errors import AddressError, CaptureError, CgplanError, DispatchMissError, InputError
from cgplan.planning import MissReason
from cgplan.runner import runner as runner_module

pytestmark = pytest.mark.usefixtures("quiet_collector")

ROWS = Input(shape=("num_tokens",), dtype="float32", pad=0)
LENGTHS = Input(shape=("num_reqs",), dtype="int32", pad=0)
SUMS = {"x": ROWS, "lengths": LENGTHS}


def sums(x: Tensor, lengths: Tensor) -> Tensor:
    return x + x.sum() + 100 * lengths.sum()


def open_runner(
    backend: GraphBackend,
    model: Callable[..., Any] = lambda x: x * 2,
    specs: dict[str, Input] | None = None,
    **sections: Any,
) -> GraphRunner:
    compilation = {"cudagraph_capture_sizes": [2, 4, 8], **sections.pop("compilation", {})}
    return cgplan.capture(
        model, specs or {"x": ROWS}, compilation=compilation, device=backend.device.type, **sections
    )


def test_a_staged_batch_that_no_graph_serves_runs_eagerly(backend: GraphBackend) -> None:
    runner = open_runner(
        backend,
        sums,
        SUMS,
        compilation={"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [8]},
    )
    with runner.stage(num_tokens=7, num_reqs=2) as buffers:
        assert [len(buffers["x"]), len(buffers["lengths"])] == [7, 2]
        buffers["x"].fill_(1)
        buffers["lengths"].fill_(1)
    same(buffers.output, torch.full((7,), 208.0, device=backend.device))
    assert dict(runner.stats.eager) == {MissReason.NO_GRAPH_FOR_MIXED: 1}
    x = torch.ones(3, device=backend.device)
    same(runner(x=x, lengths=x.int())[0].item(), 304.0)
    strict = open_runner(
        backend, sums, SUMS, compilation={"cudagraph_mode": "FULL_DECODE_ONLY", "on_miss": "error"}
    )
    with pytest.raises(DispatchMissError, match="mixed batches run eagerly"):
        strict.stage(num_tokens=7, num_reqs=2)


def test_staged_batches_in_other_modes(backend: GraphBackend) -> None:
    x = torch.arange(3.0, device=backend.device)
    for compilation in ({"cudagraph_mode": "PIECEWISE"}, {"debug": True}, {"outputs": "clone"}):
        torch._dynamo.reset()
        runner = open_runner(backend, lambda x: x * 2, {"x": ROWS}, compilation=compilation)
        outputs = []
        for value in (x, x + 1):
            with runner.stage(num_tokens=3) as buffers:
                buffers["x"].copy_(value)
            same(buffers.output, value * 2)
            outputs.append(buffers.output)
        assert sum(runner.stats.replays.values()) == 2
        if compilation == {"outputs": "clone"}:
            same(outputs[0], x * 2)


def test_staged_buffers_are_of_no_use_outside_of_their_block(backend: GraphBackend) -> None:
    runner = open_runner(backend, lambda x: x * 2, {"x": ROWS})
    staged = runner.stage(num_tokens=3)
    uses: list[Callable[[], Any]] = [
        lambda: staged["x"], lambda: staged.get("x"), lambda: list(staged.items()), lambda: dict(**staged),
    ]  # fmt: skip
    for _ in range(2):
        for use in uses:
            with pytest.raises(CgplanError, match="used outside of their `with` block") as caught:
                use()
            assert "with runner.stage" in caught.value.remedy
        with staged as buffers:
            assert buffers is staged
            assert [*buffers] == [*buffers.keys()] == ["x"]
            with pytest.raises(CgplanError, match="these staged buffers have no output"):
                _ = buffers.output
            with pytest.raises(InputError, match="unknown input 'xs'") as unknown:
                _ = buffers["xs"]
            assert "Did you mean 'x'?" in unknown.value.remedy
            buffers["x"].fill_(4)
        same(staged.output, torch.full((3,), 8.0, device=backend.device))
    with runner.stage(num_tokens=2) as later:
        later["x"].fill_(1)
    with pytest.raises(CgplanError, match="no output") as caught:
        _ = staged.output
    assert "before the next batch is staged" in caught.value.remedy
    with pytest.raises(CgplanError, match="outside of their"):
        staged.__exit__(None, None, None)
    same(
        runner(x=torch.ones(3, device=backend.device)), torch.full((3,), 2.0, device=backend.device)
    )


def test_nothing_else_runs_inside_a_block(backend: GraphBackend) -> None:
    runner = open_runner(backend, lambda x: x * 2, {"x": ROWS})
    x = torch.ones(3, device=backend.device)
    outcomes: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: outcomes.append(runner(x=x).clone()))
    with runner.stage(num_tokens=3) as buffers:
        buffers["x"].fill_(5)
        calls: list[Callable[[], Any]] = [
            lambda: runner(x=x), lambda: runner.run_eagerly(x=x), runner.stage(num_tokens=2).__enter__,
            runner.stage(num_tokens=3).__enter__, runner.close, runner.recapture, runner.retry_failed,
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(CgplanError, match="while another call was under way") as caught:
                call()
            assert "leave the block" in caught.value.remedy
        thread.start()
        thread.join(0.2)
        assert thread.is_alive(), "a call of another thread waits"
    thread.join()
    same(outcomes[0], x * 2)
    same(runner(x=x), x * 2)


def test_batches_that_cannot_be_staged(backend: GraphBackend) -> None:
    runner = open_runner(backend, sums, SUMS, scheduler={"max_num_seqs": 4})
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"num_tokens": 9}, "hold 1 to 8 tokens, asked for 9", "Ask for fewer"),
        ({"num_tokens": 0}, "asked for 0", "Ask for at least one"),
        ({"num_tokens": -1}, "asked for -1", "Ask for at least one"),
        ({"num_tokens": 4.0}, "asked for 4.0", "whole number"),
        ({"num_tokens": 3, "num_reqs": -1}, "has -1 requests", "at least one"),
        ({"num_tokens": 5}, "5 tokens does not tell how many requests", "num_reqs"),
        ({"num_tokens": 3, "num_reqs": 4}, "4 requests, but 3 tokens", "at least one token"),
        (
            {"num_tokens": 8, "num_reqs": 5},
            "5 requests, but 8 tokens and scheduler.max_num_seqs 4",
            "max_num_seqs",
        ),
        (
            {"num_tokens": 3, "num_reqs": 2, "uniform_decode": True},
            "3 tokens are not 2 requests of 1",
            "mixed",
        ),
        ({"num_tokens": 3, "num_active_loras": 1}, "num_active_loras is 1", "`lora` section"),
    ]
    for asked, message, remedy in wrong:
        with pytest.raises(InputError, match=message) as caught:
            runner.stage(**asked)
        assert remedy in caught.value.remedy
    with runner.stage(num_tokens=8, num_reqs=4) as buffers:
        buffers["x"].fill_(1)
        buffers["lengths"].fill_(0)
    same(buffers.output[0].item(), 9.0)
    drafting = open_runner(
        backend,
        sums,
        SUMS,
        speculative={"num_speculative_tokens": 1},
        compilation={"cudagraph_mode": "FULL"},
    )
    with pytest.raises(InputError, match="does not tell how many requests"):
        drafting.stage(num_tokens=4)
    with drafting.stage(num_tokens=4, uniform_decode=True) as buffers:
        assert len(buffers["lengths"]) == 2


def test_staged_buffers_end_with_their_graphs(backend: GraphBackend) -> None:
    before = reserved(backend)
    big = Input(shape=("num_tokens", 1 << 18), dtype="float32", pad=0)
    runner = open_runner(backend, lambda x: x * 2, {"x": big})
    staged = runner.stage(num_tokens=3)
    with staged as buffers:
        buffers["x"].fill_(1)
    old = weakref.ref(staged.output)
    runner.recapture()
    with pytest.raises(CgplanError, match="are gone") as caught, staged:
        pass
    assert "Call runner.stage" in caught.value.remedy
    with pytest.raises(CgplanError, match="no output"):
        _ = staged.output
    with runner.stage(num_tokens=3) as buffers:
        buffers["x"].fill_(2)
    same(buffers.output[0, 0].item(), 4.0)
    runner.close()
    assert old() is None
    assert back_at(backend, before), "though staged buffers are still held"
    with pytest.raises(CgplanError, match="the runner is closed"):
        runner.stage(num_tokens=3)


def test_only_so_many_sizes_are_kept_ready(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "MOST_PREPARED", 3)
    runner = open_runner(backend, lambda x: x * 2, {"x": ROWS})
    kept = runner.stage(num_tokens=1)
    for count in (1, 2, 3, 4, 5, 1, 5):
        x = torch.arange(float(count), device=backend.device)
        same(runner(x=x), x * 2)
        with runner.stage(num_tokens=count) as buffers:
            buffers["x"].copy_(x)
        same(buffers.output, x * 2)
    assert runner.stage(num_tokens=1) is not kept
    with kept as buffers:
        buffers["x"].fill_(3)
    same(kept.output, torch.full((1,), 6.0, device=backend.device))
    assert runner.stats.calls == 15
    runner.close()
    with pytest.raises(CgplanError, match="are gone"), kept:
        pass


def test_a_dropped_runner_gives_its_memory_back_at_once(backend: GraphBackend) -> None:
    """No cycle of references keeps it: a collection may be far away."""
    runner = open_runner(backend, lambda x: x * 2, {"x": ROWS})
    runner(x=torch.ones(3, device=backend.device))
    with runner.stage(num_tokens=3) as buffers:
        buffers["x"].fill_(1)
    gone = weakref.ref(runner)
    assert not gc.isenabled()
    del runner
    assert gone() is None


def test_what_a_call_checks_is_checked_when_a_block_is_left(backend: GraphBackend) -> None:
    runner = open_runner(backend, lambda x: x * 2, {"x": ROWS})
    with runner.stage(num_tokens=3) as buffers:
        buffers["x"].fill_(1)
    with (
        torch.autocast(backend.device.type, torch.bfloat16),
        pytest.raises(CaptureError, match="was captured with autocast"),
        runner.stage(num_tokens=3) as buffers,
    ):
        buffers["x"].fill_(1)
    runner.invalidate("kv_cache")
    for _ in range(2):
        with (
            pytest.raises(AddressError, match="'kv_cache' moved"),
            runner.stage(num_tokens=3) as buffers,
        ):
            buffers["x"].fill_(2)
        with pytest.raises(AddressError, match="'kv_cache' moved"):
            runner(x=torch.ones(3, device=backend.device))
    large = torch.ones(9, device=backend.device)
    same(runner(x=large), large * 2)
    runner.recapture()
    with runner.stage(num_tokens=3) as buffers:
        buffers["x"].fill_(3)
    same(buffers.output, torch.full((3,), 6.0, device=backend.device))


def test_tensors_cannot_be_exchanged_inside_a_block(backend: GraphBackend) -> None:
    runner, x = open_runner(backend), torch.arange(3.0, device=backend.device)
    with (
        pytest.raises(InputError, match="cannot be put into staged buffers") as caught,
        runner.stage(3) as buffers,
    ):
        buffers["x"] = x
    assert "copy_" in caught.value.remedy
    with pytest.raises(InputError, match="cannot be put into"), runner.stage(3) as buffers:
        buffers["x"] = cast(Any, 3)
    with pytest.raises(InputError, match="unknown input 'X'"), runner.stage(3) as buffers:
        buffers["X"] = x
    with runner.stage(3) as buffers:
        buffers["x"].copy_(x)
        buffers["x"] += 5
        buffers["x"].unsqueeze_(1)  # a tensor object of the caller's own
        assert (list(buffers), len(buffers), "x" in buffers) == (["x"], 1, True)
    same(buffers.output, (x + 5) * 2)
    with pytest.raises(CgplanError, match="outside of their"):
        buffers["x"] = x


def test_a_model_that_changes_its_input_object_in_place_gets_it_as_it_was_made(
    backend: GraphBackend,
) -> None:
    """Batches without a graph run the model's own code on the staged tensors themselves."""
    runner = open_runner(
        backend,
        lambda x: (x.unsqueeze_(0) * 2)[0],
        compilation={"cudagraph_mode": "FULL_DECODE_ONLY"},
        scheduler={"max_num_seqs": 8, "max_num_batched_tokens": 8},
    )
    staged = runner.stage(4, uniform_decode=False)
    for value in (1.0, 2.0, 3.0):
        with staged as buffers:
            buffers["x"].fill_(value)
        same(staged.output, torch.full((4,), 2 * value, device=backend.device))
    assert sum(runner.stats.eager.values()) == 3


def test_an_output_changed_in_place_before_it_is_read(backend: GraphBackend) -> None:
    """The same object was handed out before; whoever reads later gets one as it was made."""
    runner, x = open_runner(backend), torch.arange(3.0, device=backend.device)
    staged = runner.stage(3)
    outputs = []
    for _ in range(2):
        with staged as buffers:
            buffers["x"].copy_(x)
        if outputs:
            outputs[0].unsqueeze_(1)
        outputs.append(staged.output)
        assert staged.output is outputs[-1]
    same(outputs[1], x * 2)
    copies = open_runner(backend, compilation={"outputs": "clone"})
    with copies.stage(3) as buffers:
        buffers["x"].copy_(x)
    copies(x=x + 5)
    same(buffers.output, x * 2)
    with runner.stage(2):
        pass
    with pytest.raises(CgplanError, match="no output"):
        _ = staged.output
    last = runner.stage(3)
    with last:
        pass
    runner.close()
    with pytest.raises(CgplanError, match="no output"):
        _ = last.output


def test_writing_into_static_buffers_from_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused ahead of the first write, while the stream before has work; the stream of each write is noted."""
    backend = cgplan.backends.select_backend("cpu")
    current, busy = 0, True
    monkeypatch.setattr(type(backend), "stream_getter", lambda self: lambda: current)
    monkeypatch.setattr(type(backend), "is_busy", lambda self, stream: busy)
    runner, x = open_runner(backend), torch.arange(3.0)
    runner(x=x)
    current = 7
    staged = runner.stage(3)
    ways: list[Callable[[], Any]] = [
        staged.__enter__, lambda: runner.run_eagerly(x=x), lambda: runner.run_eagerly(x=x, padded=False),
    ]  # fmt: skip
    for way in ways:
        with pytest.raises(
            CgplanError, match="from another stream than before, whose work is not done"
        ):
            way()
    for number, eagerly in enumerate((True, False)):
        busy, current = False, 10 + number
        if eagerly:
            same(runner.run_eagerly(x=x), x * 2)
        else:
            with pytest.raises(ZeroDivisionError), staged:  # it was written to, and nothing ran
                raise ZeroDivisionError
        busy, current = True, 7
        with pytest.raises(CgplanError, match="from another stream"):
            runner(x=x)
    busy = False
    same(runner(x=x), x * 2)


@pytest.mark.gpu
def test_static_buffers_are_not_written_behind_the_back_of_a_busy_stream() -> None:
    runner = cgplan.capture(
        lambda x: x * 2, {"x": ROWS}, device="cuda", compilation={"cudagraph_capture_sizes": [4]}
    )
    x = torch.ones(3, device="cuda")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(500_000_000)
        output = runner.run_eagerly(x=x)
    with torch.cuda.stream(second):
        with pytest.raises(CgplanError, match="from another stream"), runner.stage(3) as buffers:
            buffers["x"].fill_(5)
        for call in (runner, runner.run_eagerly):
            with pytest.raises(CgplanError, match="from another stream"):
                call(x=x * 5)
        first.synchronize()
        same(output, x * 2)
        with runner.stage(3) as buffers:
            buffers["x"].fill_(5)
        same(buffers.output, x * 10)


def test_a_call_inside_a_capture_by_a_staged_batch_is_refused() -> None:
    """It does not wait for itself."""
    refused = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        if made and not refused:
            with pytest.raises(CgplanError, match="while another call was under way") as found:
                made[0](x=torch.ones(3, 8))
            refused.append(found.value)
        return x + 1

    made: list[GraphRunner] = []
    inputs = {"x": cgplan.Input(shape=("num_tokens", 8), dtype="float32", pad=0)}
    compilation = {"cudagraph_capture_sizes": [4], "capture_policy": "lazy", "verify": "off"}
    runner = cgplan.capture(forward, inputs, compilation=compilation, device="cpu")
    made.append(runner)
    with runner.stage(num_tokens=3) as buffers:
        buffers["x"].fill_(1.0)
    assert buffers.output.sum() == 3 * 8 * 2
    runner.close()
    assert refused
