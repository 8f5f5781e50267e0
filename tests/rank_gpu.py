"""What ranks run on GPUs when they are late, fail, or end; each program runs on the CPU as well, but for its device."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rank_faults import Said, tried
from rank_programs import Doubling, batch, config_of, doubled, patience

from cgplan.backends import select_backend
from cgplan.config import Config
from cgplan.distributed import AllReduce, RankedCapture, Ranks, open_all_reduce, open_ranks
from cgplan.planning import build_plan
from cgplan.runner.session import CaptureSession


@contextmanager
def opened_on(device: str, most: int = 1 << 20) -> Iterator[tuple[Ranks, AllReduce, Config]]:
    config = config_of(compilation={"cudagraph_num_of_warmups": 1}).model_copy(update={"device": device})
    settings = config.distributed.model_copy(update={"timeout": patience(), "all_reduce_max_size": most})
    config = config.model_copy(update={"distributed": settings})
    ranks = open_ranks(config.distributed, device)
    assert ranks is not None
    with ranks, open_all_reduce(config, ranks, select_backend(str(ranks.device))) as reducer:
        yield ranks, reducer, config


def session_of(ranks: Ranks, reducer: AllReduce, config: Config) -> CaptureSession:
    model = Doubling(reducer).to(ranks.device)
    together = RankedCapture(ranks, reducer, config)
    return CaptureSession(build_plan(config), model, reducer.backend, config, together=together)


def stall(device: torch.device, seconds: float) -> None:
    """Have what is queued next wait: the device, where there is one, and not the host."""
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * 1.5e9))
    else:
        time.sleep(seconds)


def sums_of(call: Any, ranks: Ranks, turns: int = 20) -> int:
    """Calls whose sums were wrong."""
    wrong = 0
    for turn in range(turns):
        inputs = [batch(other, turn, (1 + turn % 4, 8), torch.float32) for other in range(ranks.world_size)]
        found = call(inputs[ranks.rank].to(ranks.device)).cpu()
        wrong += not torch.allclose(found, doubled(inputs, ranks.world_size), rtol=1e-5, atol=1e-6)
    return wrong


class RaisesAtItsEnd(Doubling):
    """The first forward raises behind its sums, which the device has not come to yet."""

    def __init__(self, reducer: AllReduce, times: int) -> None:
        super().__init__(reducer)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.times or self.reducer.backend.is_capturing():
            return super().forward(x)
        self.times -= 1
        stall(x.device, 1.5)
        super().forward(x)
        raise ValueError("a defect of the model")


def raises_behind_queued_sums(rank: int, device: str) -> tuple[Said, int, int]:
    """Rank 0's kernels leave their barriers when it hears of it; rank 1's, which come later, must not wait for them."""
    with opened_on(device) as (ranks, reducer, config):
        capture = session_of(ranks, reducer, config)
        capture._model = RaisesAtItsEnd(reducer, 1 if rank == 1 else 0).to(ranks.device)
        said = tried(capture.run)
        eagerly = sums_of(Doubling(reducer).to(ranks.device), ranks)
        runner = capture.run()
        wrong = sums_of(lambda x: runner(x=x), ranks)
        reducer.check()
        runner.close()
    return said, eagerly, wrong


def late_at_random(rank: int, device: str) -> int:
    """Ranks that are late at random before sums, in replays and in eager calls in turns, and recapture on the way."""
    draw = random.Random(rank)
    with opened_on(device) as (ranks, reducer, config):
        runner, wrong = session_of(ranks, reducer, config).run(), 0
        eager = Doubling(reducer).to(ranks.device)
        for turn in range(30):
            if draw.random() < 0.5:
                stall(ranks.device, draw.uniform(0.0, 0.02))
            wrong += sums_of(lambda x: runner(x=x), ranks, 4) + sums_of(eager, ranks, 2)
            if turn % 10 == 9:
                if rank == turn % 2:
                    stall(ranks.device, 0.2)
                    runner(x=torch.ones(4, 8, device=ranks.device))
                else:
                    runner(x=torch.ones(4, 8, device=ranks.device))
                runner.recapture()
        reducer.check()
        runner.close()
    return wrong


def one_allocation(rank: int, device: str) -> int:
    """Staging buffer and signals lie in one allocation: its handle is opened, and closed, twice."""
    wrong = 0
    with opened_on(device, most=4096) as (ranks, reducer, config):
        with open_all_reduce(config, ranks, reducer.backend) as other:
            wrong += sums_of(Doubling(other).to(ranks.device), ranks)
        wrong += sums_of(Doubling(reducer).to(ranks.device), ranks)
        reducer.check()
    return wrong


def after_the_end(rank: int, device: str) -> list[Said]:
    """A second runner on the all-reduce of an open one, and a sum after the end."""
    with opened_on(device) as (ranks, reducer, config):
        runner = session_of(ranks, reducer, config).run()
        second = tried(session_of(ranks, reducer, config).run)
        wrong = sums_of(lambda x: runner(x=x), ranks)
        runner.close()
    return [second, tried(lambda: reducer(torch.ones(8, device=ranks.device))), ("wrong", wrong)]


def counts_wrap_around(rank: int) -> int:
    """The kernels' counts pass the largest int32. GPUs only."""
    with opened_on("cuda") as (ranks, reducer, _):
        kernels: Any = reducer._kernels
        nearly = (1 << 30) - 5
        with ranks.step("counts that are nearly over"):
            torch.cuda.synchronize()
            kernels._counts.fill_(nearly)
            kernels._own[: kernels._signal_bytes].view(torch.int32).fill_(2 * nearly)
            torch.cuda.synchronize()
        wrong = sums_of(Doubling(reducer).to(ranks.device), ranks)
        reducer.check()
    return wrong
