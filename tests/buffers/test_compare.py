"""How far outputs lie apart."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cgplan.buffers.compare import compare
from cgplan.buffers.compare import deviation as deviation_of


@pytest.mark.parametrize(
    ("found", "wanted", "deviation"),
    [
        (torch.tensor([1.0, math.nan, math.inf]), torch.tensor([1.5, math.nan, math.inf]), 0.5),
        (torch.tensor([math.nan]), torch.tensor([1.0]), math.inf),
        (torch.tensor([math.inf]), torch.tensor([1.0]), math.inf),
        (
            (torch.tensor([1, 2]), torch.tensor([True])),
            (torch.tensor([1, 5]), torch.tensor([True])),
            3.0,
        ),
        (torch.tensor([1j]), torch.tensor([1.0 + 0j]), math.sqrt(2)),
        (torch.ones(2), torch.ones(3), None),
        (torch.ones(2), torch.ones(2).double(), None),
        ([torch.ones(2)], (torch.ones(2),), None),
        ("text", "text", None),
        ((torch.ones(2), None), (torch.ones(2), torch.ones(2)), None),
        ((torch.ones(2), torch.ones(2)), (torch.ones(2), None), None),
        ((torch.ones(2), 1), (torch.ones(2), 2), None),
        ((torch.ones(2), math.nan, "a"), (torch.ones(2), math.nan, "a"), 0.0),
        (torch.ones(0), torch.ones(0), 0.0),
    ],
)
def test_deviations(found: Any, wanted: Any, deviation: float | None) -> None:
    assert deviation_of(found, wanted) == (
        pytest.approx(deviation) if deviation is not None else None
    )


@pytest.mark.parametrize(
    ("before", "wanted", "found", "is_wrong"),
    [
        (5000.0, 5003.0, 5004.0, True),  # a count does not round
        (5000.0, 5003.0, 5003.0, False),
        (5000.0, 5002.7, 5003.7, True),  # nor does a sum by as much as it grew
        (5000.0, 5002.7, 5002.701, False),
        (0.25, 0.2500001, 0.2500003, False),  # a state that hardly changes does
    ],
)
def test_state_is_compared_by_its_change(
    before: float, wanted: float, found: float, is_wrong: bool
) -> None:
    states = [torch.tensor([value]) for value in (found, wanted, before)]
    assert compare("state", states[0], states[1], before=states[2]).is_wrong == is_wrong
    assert not compare("output", states[0], states[1]).is_wrong
