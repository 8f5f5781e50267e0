"""Two and four real processes: the registry, the all-reduce on the CPU."""

from __future__ import annotations

import pytest
import rank_programs as programs
import torch
from ranks import run_ranks, values


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_right_through_many_replays(world_size: int, dtype: torch.dtype) -> None:
    shapes = [(3, 8), (1, 64), (5, 40)]
    found = values(run_ranks(world_size, programs.replays, dtype, shapes, 3, 20))
    for registration, _ in found:
        assert registration.rows == 9
        assert registration.opened == (world_size - 1) * registration.bases
