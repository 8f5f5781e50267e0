"""What of a step runs inside graphs, and what a replay cannot be faster than."""

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from pieces import open_runner

import cgplan
from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.tape import TapeBackend
from cgplan.measure.bench import check_up, floor_of
from cgplan.reports import render_text
from cgplan.reports.records import DoctorReport, FloorRecord


def test_a_check_up_has_the_floor_of_its_keys(backend: GraphBackend) -> None:
    with torch.no_grad():
        model = torch.nn.Linear(8, 8).to(backend.device)
        inputs = {"input": cgplan.Input(shape=("num_tokens", 8), dtype="float32", pad=0)}
        runner = cgplan.capture(
            model,
            inputs,
            compilation={"cudagraph_capture_sizes": [2, 4]},
            device=backend.device.type,
        )
        report = check_up(runner)
        assert [record.inside for record in report.records] == [1.0, 1.0]
        assert (report.floor is None) is backend.is_tape
        floor = FloorRecord(weight_bytes=4_000_000, bytes_per_us=4e6, kernel_us=0.5)
        text = render_text(report.model_copy(update={"floor": floor}))
        table = text[text.index("What a replay cannot be faster than") :]
        assert "1.00us" in table
        nodes = report.capture.records[0].nodes
        assert nodes is not None
        assert f"{nodes * 0.5:.0f}ns" in table or f"{nodes * 0.5:.2f}us" in table
        runner.close()


def open_small() -> cgplan.GraphRunner:
    backend = select_backend("cpu")
    return open_runner(backend, lambda x: x * 2, cudagraph_mode="FULL")


def test_the_floor_is_left_out_without_memory_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with closing(open_small()) as runner:
        monkeypatch.setattr(TapeBackend, "is_tape", False)
        monkeypatch.setattr("cgplan.measure.bench.COPIED_BYTES", 1 << 20)
        monkeypatch.setattr(torch, "zeros", refuse)
        assert floor_of(runner) is None


@pytest.mark.parametrize("busy", [None, 0, 1])
def test_the_floor_is_left_out_on_a_busy_device(
    monkeypatch: pytest.MonkeyPatch, busy: int | None
) -> None:
    """``busy``: during the copies, or the kernels."""
    rounds = list[Any]()

    def times(*args: object, **options: object) -> Any:
        rounds.append([1000.0] * 4 + [(2100.0 if len(rounds) == busy else 1900.0)] * 6)
        return rounds[-1], []

    with closing(open_small()) as runner:
        monkeypatch.setattr(TapeBackend, "is_tape", False)
        monkeypatch.setattr("cgplan.measure.bench.COPIED_BYTES", 1 << 20)
        monkeypatch.setattr(TapeBackend, "time_calls", times)
        floor = floor_of(runner)
    assert (floor is None) == (busy is not None)
    if floor is not None:
        assert floor.kernel_us == 1.9
        assert floor.bytes_per_us == pytest.approx((2 << 20) / 1900)


class Napping(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        return x + 1


def test_a_check_up_tells_the_share_of_graphs_and_times_that_noise_decides(
    backend: GraphBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Napping(), torch.nn.Linear(8, 8))
    runner = cgplan.capture(
        model.to(backend.device),
        {"input": cgplan.Input(shape=("num_tokens", 8), dtype="float32", pad=0)},
        compilation={
            "cudagraph_capture_sizes": [4], "cudagraph_mode": "PIECEWISE", "splitting_modules": ["1"],
        },
        device=backend.device.type,
    )  # fmt: skip
    [place] = check_up(runner).outside
    assert place.startswith("1, at ")

    def with_times(*times: float) -> DoctorReport:
        def time_calls(
            call: Callable[[], object], repeats: int, **_: object
        ) -> tuple[list[float], list[float]]:
            began = time.perf_counter()
            call()
            base = 3.0 if time.perf_counter() - began > 0.002 else 1.0
            measured = [base * times[at % len(times)] for at in range(repeats)]
            return measured, measured

        monkeypatch.setattr(runner.backend, "time_calls", time_calls)
        return check_up(runner)

    [record] = with_times(5.0, 6.0).records
    assert (record.inside, record.speedup, record.unsure) == (1 / 3, 1.0, ())
    report = with_times(1.0, 3.0, 3.0)
    text = " ".join(render_text(report).split())
    assert "Not to be trusted" in text
    assert "eager at 4" in text
    assert "unsure -" in text  # neither a speed-up nor a share
    assert "of a step runs" not in text
    assert ("say little about a GPU" in text) is backend.is_tape
    runner.close()
