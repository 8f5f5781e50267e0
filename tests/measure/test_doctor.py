"""What of a step runs inside graphs, and what a replay cannot be faster than."""

import torch

import cgplan
from cgplan.backends import GraphBackend
from cgplan.measure.doctor import check_up
from cgplan.reports import render_text
from cgplan.reports.records import FloorRecord


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
        assert [row.inside for row in report.rows] == [1.0, 1.0]
        assert (report.floor is None) is backend.is_tape
        floor = FloorRecord(weight_bytes=4_000_000, bytes_per_us=4e6, kernel_us=0.5)
        text = render_text(report.model_copy(update={"floor": floor}))
        table = text[text.index("What a replay cannot be faster than") :]
        assert "1.00us" in table
        nodes = report.capture.records[0].nodes
        assert nodes is not None
        assert f"{nodes * 0.5:.0f}ns" in table or f"{nodes * 0.5:.2f}us" in table
        runner.close()
