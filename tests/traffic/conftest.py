"""Fixtures that read traffic from files and texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cgplan.config import Config
from cgplan.errors import TrafficError
from cgplan.planning import build_plan
from cgplan.traffic.files import read_traffic
from cgplan.traffic.histogram import StepShape, Traffic
from cgplan.traffic.simulation import SchedulerBounds, simulate


def _step_time(shape: StepShape) -> float:
    return 3300 + 22 * shape.num_tokens


@pytest.fixture(scope="session")
def read() -> Any:
    """Traffic of a file; requests are simulated."""

    def traffic(path: Path, speedup: float = 1.0, **sections: Any) -> Traffic:
        plan = build_plan(Config.model_validate(sections))
        found = read_traffic(path, plan, speedup=speedup)
        if isinstance(found, Traffic):
            return found
        return simulate(found, SchedulerBounds.of(plan), _step_time)

    return traffic


@pytest.fixture
def written(read: Any, tmp_path: Path) -> Any:
    """Traffic of a text."""

    def traffic(text: str | bytes, name: str = "t.txt", **given: Any) -> Traffic:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read(path, **given)

    return traffic


@pytest.fixture
def refused(written: Any) -> Any:
    """Checks place, message and remedy of the error that a text gets."""

    def check(text: str | bytes, line: int | None, message: str, remedy: str, **given: Any) -> None:
        with pytest.raises(TrafficError) as caught:
            written(text, **given)
        found = caught.value.message
        assert message in found
        assert (f"t.txt:{line}: " if line else "t.txt") in found
        assert remedy in caught.value.remedy
        assert len(found) < 500, "what was found is cut short"

    return check
