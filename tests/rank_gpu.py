"""Programs of ranks on GPUs; see rank_programs.py."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from decoder import build
from rank_programs import (
    Doubling,
    Said,
    batch,
    config_of,
    decoder_config,
    die,
    meeting,
    opened,
    patience,
    session_of,
    tried,
    wrong_sums,
)

from cgplan.backends.host_sync import is_probing
from cgplan.config import Config
from cgplan.distributed import AllReduce, Ranks, all_reduce_by, open_all_reduce


@contextmanager
def on_gpus(
    all_reduce: str = "custom", most: int = 8 << 20
) -> Iterator[tuple[Ranks, AllReduce, Config]]:
    compilation = {"all_reduce": all_reduce, "cudagraph_num_of_warmups": 1}
    config = config_of(
        device="cuda", compilation=compilation, distributed={"all_reduce_max_size": most}
    )
    with opened(config) as (ranks, reducer):
        yield ranks, reducer, config


def replays(
    rank: int, dtype: torch.dtype, sizes: list[int], one_shot_bytes: int, times: int
) -> Any:
    """Sums of graphs that are replayed with changing inputs, and the registration."""
    from cgplan.distributed import all_reduce

    all_reduce.ONE_SHOT_BYTES = {2: one_shot_bytes}
    with on_gpus() as (ranks, reducer, _):
        backend = reducer.backend
        statics = [torch.zeros(size, dtype=dtype, device=ranks.device) for size in sizes]
        reducer.begin_pass()
        graph = backend.new_graph(backend.new_pool())
        with backend.session():
            for static in statics:
                reducer(static)
            with backend.capturing(graph):
                outputs = [reducer(reducer(static) * 0.5 + static) for static in statics]
        registration = reducer.end_pass()
        sums = []
        for turn in range(times):
            given = [
                [batch(other, turn, size, dtype) for other in range(ranks.world_size)]
                for size in sizes
            ]
            for static, inputs in zip(statics, given, strict=True):
                static.copy_(inputs[rank])
            backend.replay(graph)
            backend.synchronize()
            for inputs, output in zip(given, outputs, strict=True):
                first = total(inputs)
                wanted = total([first * 0.5 + x for x in inputs])
                assert torch.equal(output.cpu(), wanted), f"turn {turn}, {len(wanted)} elements"
            sums.append([output.view(torch.uint8).long().sum().item() for output in outputs])
        assert torch.equal(reducer(statics[0]).cpu(), total(given[0]))
        reducer.check()
        reducer.release()
        backend.reset(graph)
    return sums, registration


def total(inputs: list[torch.Tensor]) -> torch.Tensor:
    """In float32, in the order of the ranks, rounded once."""
    found = inputs[0].float()
    for x in inputs[1:]:
        found = found + x.float()
    return found.to(inputs[0].dtype)


def unregistered(rank: int) -> Said:
    """What check() says of a graph that is replayed before registration; then sums are right again."""
    with on_gpus() as (ranks, reducer, _):
        static = torch.ones(64, device=ranks.device)
        reducer.begin_pass()
        graph = reducer.backend.new_graph(reducer.backend.new_pool())
        with reducer.backend.session():
            reducer(static)
            with reducer.backend.capturing(graph):
                reducer(static)
        reducer.backend.replay(graph)
        said = tried(reducer.check)
        reducer.begin_pass()  # the error word and the signals are new
        assert reducer(static).unique().tolist() == [2.0]
        reducer.check()
        reducer.backend.reset(graph)
    return said


def alone(rank: int, is_killed: bool) -> None:
    """Rank 1 does not come to an all-reduce: it sleeps, or is killed."""
    with on_gpus() as (ranks, reducer, _):
        x = torch.ones(1 << 16, device=ranks.device)
        reducer(x)
        torch.cuda.synchronize()
        if rank == 1:
            time.sleep(1 if is_killed else 5 * patience())
            if is_killed:
                die()
            os._exit(0)
        assert reducer(x).isnan().all(), "no sum that could be taken for a right one"
        reducer.check()


def place(rank: int, device: str) -> None:
    meeting(config_of(device=device)).close()


def expandable(rank: int, wanted: str) -> str:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    with on_gpus(wanted) as (ranks, reducer, _):
        assert reducer(torch.ones(8, device=ranks.device)).sum().item() == 16.0
        return reducer.name


def memory(rank: int) -> list[int]:
    """Bytes that torch has reserved after each of several captures and closings."""
    config, reserved = decoder_config(2, "cuda"), []
    assert config.model is not None
    with opened(config) as (ranks, reducer):
        with all_reduce_by(reducer), torch.device(ranks.device):
            model = build(**config.model.kwargs)
        for _ in range(4):
            runner = session_of(reducer, config, model).run()
            runner.recapture()
            runner.sleep()
            runner.wake()
            runner.close()
            del runner
            torch.cuda.empty_cache()
            reserved.append(torch.cuda.memory_reserved())
    return reserved


def stall(seconds: float) -> None:
    """Have the device wait before what is queued next, and not the host."""
    torch.cuda._sleep(int(seconds * 1.5e9))


class RaisesAtItsEnd(Doubling):
    """The first forward raises behind its sums, which the device has not come to yet."""

    def __init__(self, reducer: AllReduce, times: int) -> None:
        super().__init__(reducer)
        self.times = iter(range(times))  # no state of the model, which a failed capture puts back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if is_probing() or self.reducer.backend.is_capturing() or next(self.times, None) is None:
            return super().forward(x)
        stall(1.5)
        super().forward(x)
        raise ValueError("a defect of the model")


def raises_behind_queued_sums(rank: int) -> tuple[Said, int, int]:
    """Both ranks' kernels wait for others that never come; then sums that were wrong, eagerly and in replays."""
    with on_gpus() as (ranks, reducer, config):
        capture = session_of(
            reducer, config, RaisesAtItsEnd(reducer, 1 if rank == 1 else 0).to(ranks.device)
        )
        said = tried(capture.run)
        eagerly = wrong_sums(Doubling(reducer).to(ranks.device), ranks, 20)
        runner = capture.run()
        wrong = wrong_sums(lambda x: runner(x=x), ranks, 20)
        reducer.check()
        runner.close()
    return said, eagerly, wrong


def late_at_random(rank: int) -> int:
    """Ranks that are late at random before sums, in replays and in eager calls in turns, and recapture on the way."""
    draw = random.Random(rank)
    with on_gpus() as (ranks, reducer, config):
        runner, wrong = session_of(reducer, config, Doubling(reducer).to(ranks.device)).run(), 0
        eager = Doubling(reducer).to(ranks.device)
        for turn in range(30):
            if draw.random() < 0.5:
                stall(draw.uniform(0.0, 0.02))
            wrong += wrong_sums(lambda x: runner(x=x), ranks, 4) + wrong_sums(eager, ranks, 2)
            if turn % 10 == 9:
                if rank == turn % 2:
                    stall(0.2)
                runner(x=torch.ones(4, 8, device=ranks.device))
                runner.recapture()
        reducer.check()
        runner.close()
    return wrong


def one_allocation(rank: int) -> int:
    """Staging buffer and signals lie in one allocation: its handle is opened, and closed, twice."""
    with on_gpus(most=4096) as (ranks, reducer, config):
        with open_all_reduce(config, ranks, reducer.backend) as other:
            wrong = wrong_sums(Doubling(other).to(ranks.device), ranks, 20)
        wrong += wrong_sums(Doubling(reducer).to(ranks.device), ranks, 20)
        reducer.check()
    return wrong


def counts_wrap_around(rank: int) -> int:
    """The kernels' counts pass the largest int32."""
    with on_gpus() as (ranks, reducer, _):
        of_gpu: Any = reducer
        nearly = (1 << 30) - 5
        with ranks.step("counts that are nearly over"):
            torch.cuda.synchronize()
            of_gpu._counts.fill_(nearly)
            of_gpu._own[: of_gpu._signal_bytes].view(torch.int32).fill_(2 * nearly)
            torch.cuda.synchronize()
        wrong = wrong_sums(Doubling(reducer).to(ranks.device), ranks, 20)
        reducer.check()
    return wrong
