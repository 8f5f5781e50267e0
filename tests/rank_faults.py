"""What ranks run in tests of what happens after something went wrong; see rank_programs.py."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from rank_programs import (
    Doubling,
    Said,
    batch,
    captured_again,
    check_runner,
    config_of,
    doubled,
    meeting,
    patience,
    session,
    session_of,
    tried,
    wrong_sums,
)

import cgplan
from cgplan.backends.tape import TapeBackend
from cgplan.buffers.static import StaticBuffers
from cgplan.distributed import AllReduce, in_step, open_all_reduce
from cgplan.distributed.all_reduce import GLOO_DTYPES
from cgplan.distributed.transports import SharedMemoryTransport
from cgplan.errors import RegistrationError


def once(rank: int, phase: str, times: int = 1) -> Callable[[str], None]:
    """Trouble on rank 1, so many times."""
    left = iter(range(times if rank == 1 else 0))  # no state of the model, which a failed capture puts back

    def trouble(where: str) -> None:
        if where == phase and next(left, None) is not None:
            time.sleep(0.2)  # the others wait in an all-reduce meanwhile
            raise ValueError("a defect of the model")

    return trouble


def fails_once(rank: int, owner: Any, method: str, error: Exception, *, after: bool = False) -> None:
    """Have a method raise on rank 1, once: in place of what it does, or after it."""
    real, left = getattr(owner, method), [1 if rank == 1 else 0]

    def failing(*args: Any) -> Any:
        is_failing, left[0] = left[0], 0
        if is_failing and not after:
            raise error
        result = real(*args)
        if is_failing:
            raise error
        return result

    setattr(owner, method, failing)


def raises_twice(rank: int, phase: str, budget: bool, all_reduce: str = "custom") -> list[Said]:
    """Rank 1 raises in two captures in a row, then not any more."""
    settings: dict[str, Any] = {"budget": {"max_graphs": 2}} if budget else {}
    with session(once(rank, phase, 2), compilation={"all_reduce": all_reduce}, **settings) as (ranks, _, capture):
        return [tried(capture.run), tried(capture.run), captured_again(capture, ranks)]


def no_memory_for_buffers(rank: int) -> Said:
    """Rank 1 has no memory for static buffers; there is a budget, so all go on without a graph."""
    fails_once(rank, StaticBuffers, "__init__", torch.OutOfMemoryError("no memory"))
    with session(budget={"max_graphs": 2}) as (ranks, _, capture):
        runner = capture.run()
        check_runner(runner, ranks)
        runner.close()
    return "ok", len(runner.plan.keys)


def no_report(rank: int) -> list[Said]:
    """Rank 1 cannot make its report, once."""
    fails_once(rank, TapeBackend, "supports", RuntimeError("the nodes cannot be counted"))
    with session() as (ranks, _, capture):
        return [tried(capture.run), captured_again(capture, ranks)]


def no_memory_reading(rank: int) -> list[Said]:
    """Rank 1 fails before it has met the others for its capture, once."""
    with session() as (ranks, _, capture):
        fails_once(rank, TapeBackend, "memory", RuntimeError("the device does not answer"))
        return [tried(capture.run), captured_again(capture, ranks)]


def handles_stay_open(rank: int) -> list[Said]:
    """Rank 1 cannot close a handle of its peer's memory, once."""
    with session() as (ranks, _, capture):
        runner = capture.run()
        error = RegistrationError("the handle cannot be closed")
        fails_once(rank, SharedMemoryTransport, "close", error, after=True)
        return [tried(runner.close), captured_again(capture, ranks)]


def opened_again(rank: int) -> list[Said]:
    """Ranks that meet, capture and part, twice in one process."""

    def run() -> None:
        with session() as (ranks, _, capture):
            assert captured_again(capture, ranks) == ("ok", None)

    return [tried(run), tried(run)]


def eagerly_instead(rank: int) -> tuple[Said, int]:
    """After a failed capture all run the model itself; the number of wrong sums."""
    with session(once(rank, "eager")) as (ranks, reducer, capture):
        return tried(capture.run), wrong_sums(Doubling(reducer), ranks, 40)


def comes_late(rank: int, all_reduce: str) -> tuple[list[Said], list[float]]:
    """Rank 1 comes to an all-reduce when rank 0 has given up, and both go on; what they say, and wrong sums."""
    said, wrong = [], []
    try:
        with session(compilation={"all_reduce": all_reduce}) as (_, reducer, _):
            reducer(torch.ones(8))
            if rank == 1:
                time.sleep(patience() + 0.5)
            for turn in range(4):
                x = torch.full((8,), 10.0 * turn + rank)
                said.append(tried(lambda x=x: reducer(x)[0].item()))
                if said[-1][0] == "ok" and said[-1][1] != 20.0 * turn + 1:
                    wrong.append(said[-1][1])
    except cgplan.CgplanError as error:
        said.append((type(error).__name__, error.message))
    return said, wrong


def late_for_a_batch(rank: int) -> list[Said]:
    """Rank 1 comes to the second batch when the others have given it up; what the batches say. Then all close."""
    with session(distributed={"data_parallel_sync": True}) as (ranks, _, capture):
        runner = capture.run()
        call, said = in_step(runner, ranks), list[Said]()
        for turn in range(3):
            if rank == 1 and turn == 1:
                time.sleep(patience() + 1)
            said.append(tried(lambda: call(x=torch.ones(2, 8)).isfinite().all().item()))
        runner.close()
    return said


def two_runners(rank: int) -> tuple[Said, Said]:
    """A second model on the all-reduce of a runner that is open; and once that one is closed."""
    with session() as (ranks, reducer, capture):
        runner = capture.run()
        second = session_of(reducer, config_of(), Doubling(reducer))
        said = tried(second.run)
        check_runner(runner, ranks)
        runner.close()
        return said, captured_again(second, ranks)


def dropped_runner(rank: int) -> tuple[Said, str, Said]:
    """A runner that was dropped without close(): what the next capture raises, its remedy, and what helps."""
    with session() as (ranks, reducer, capture):
        check_runner(capture.run(), ranks)
        gc.collect()
        remedy = ""

        def again() -> None:
            nonlocal remedy
            try:
                capture.run()
            except cgplan.CgplanError as error:
                remedy = error.remedy
                raise

        said, config = tried(again), config_of()
        with open_all_reduce(config, ranks, reducer.backend) as other:
            return said, remedy, captured_again(session_of(other, config, Doubling(other)), ranks)


class OneSum(torch.nn.Module):
    """Sums over ranks once, in a dtype; rank 1 runs out of memory in the warm-ups of two rows."""

    def __init__(self, reducer: AllReduce, dtype: torch.dtype) -> None:
        super().__init__()
        self.reducer, self.dtype, self.is_short = reducer, dtype, reducer.rank == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_short and len(x) == 2 and not self.reducer.backend.is_capturing():
            time.sleep(0.2)  # the others wait in the sum meanwhile
            raise torch.OutOfMemoryError("out of memory")
        return torch.ops.cgplan.all_reduce(x.to(self.dtype), self.reducer.number).to(x.dtype)


def out_of_memory_beside_a_sum(rank: int, all_reduce: str, dtype: torch.dtype) -> tuple[list[int], list[float]]:
    """A budget drops the key that rank 1 has no memory for; the keys that are left, and sums of several sizes."""
    settings = {"all_reduce": all_reduce, "cudagraph_capture_sizes": [1, 2, 4]}
    models = []

    def model(reducer: AllReduce) -> OneSum:
        models.append(OneSum(reducer, dtype))
        return models[0]

    with session(model=model, compilation=settings, budget={"memory": "10MiB"}) as (_, _, capture):
        runner = capture.run()
        models[0].is_short = False
        keys = [key.num_tokens for _, key in runner.plan.keys]
        sums = [runner(x=torch.full((rows, 8), 10.0 * rows + rank)).unique().item() for rows in (4, 1, 2, 3)]
        runner.close()
    return keys, sums


def refused_dtype(rank: int, all_reduce: str, dtype: torch.dtype) -> tuple[Said, float]:
    """A sum of a dtype that gloo does not take, and one after it."""
    with session(compilation={"all_reduce": all_reduce}) as (ranks, reducer, capture):
        said = tried(lambda: reducer(torch.ones(16).to(dtype)))
        total = reducer(torch.full((3,), 1.0 + rank, dtype=torch.float64)).unique().item()
        assert captured_again(capture, ranks) == ("ok", None)
    return said, total


def sums_of_each_dtype(rank: int) -> list[torch.dtype]:
    """Dtypes whose sum is wrong."""
    with session(compilation={"all_reduce": "nccl"}) as (_, reducer, _):
        one, two = torch.ones(4), torch.full((4,), 2.0)
        return [dtype for dtype in GLOO_DTYPES if reducer(one.to(dtype)).tolist() != two.to(dtype).tolist()]


def wrong_arguments(rank: int) -> list[Said]:
    """Rank 1 comes to every other batch without rows, and with wrong arguments; sums are right in those between."""
    idle = {"x": torch.ones(0, 8), "starts": torch.zeros(1, dtype=torch.int32)}
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {**idle, "other": idle["x"]}),
        ((), {**idle, "starts": torch.tensor(0, dtype=torch.int32)}),
        ((idle["x"],), {}),
        ((), idle),  # with no memory for its padding
    ]
    real, said = torch.cat, list[Said]()

    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    metadata = {"starts": {"shape": ["num_reqs + 1"], "dtype": "int32", "pad": "last"}}
    with session(metadata=metadata, distributed={"data_parallel_sync": True}) as (ranks, _, capture):
        runner = capture.run()
        call = in_step(runner, ranks)
        for turn, (args, given) in enumerate(wrong):
            inputs = [batch(other, turn, (2, 8)) for other in range(ranks.world_size)]
            right = {"x": inputs[rank], "starts": torch.arange(3, dtype=torch.int32)}
            if rank == 1:
                torch.cat = no_memory if given is idle else real
                said.append(tried(lambda args=args, given=given: call(*args, **given)))
                torch.cat = real
            else:
                said.append(tried(lambda right=right: call(**right)))
            torch.testing.assert_close(call(**right), doubled(inputs), rtol=1e-6, atol=1e-6)
        runner.close()
    return said


def used_after_close(rank: int, all_reduce: str) -> list[Said]:
    with session(compilation={"all_reduce": all_reduce}) as (ranks, reducer, capture):
        runner = capture.run()
        reducer.close()
        x = torch.ones(2, 8)
        said = [tried(lambda: reducer(x)), tried(lambda: runner(x=x))]
        runner.close()
    return [*said, tried(lambda: reducer(x)), tried(lambda: ranks.agree("tea"))]


class Plain(torch.nn.Module):
    """Sums over ranks twice, and can be traced."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.weight = torch.nn.Parameter(torch.full((8,), 0.5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.cgplan.all_reduce(x * self.weight, self.number)
        return torch.ops.cgplan.all_reduce(y + 1, self.number)


def breaks_on_one_rank(rank: int) -> Said:
    """Rank 1 alone has a function that breaks captures, so it alone looks whether the model calls it."""
    if rank == 1:
        cgplan.eager_break_during_capture(torch.relu)
    settings = {"cudagraph_mode": "PIECEWISE"}
    with session(model=lambda reducer: Plain(reducer.number), compilation=settings) as (ranks, _, capture):
        return captured_again(capture, ranks)


def interrupted(rank: int) -> Said:
    """Rank 1 is interrupted in a step of the registration."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def run() -> None:
        with session() as (_, _, capture):
            if rank == 1:
                SharedMemoryTransport.export = interrupt
            capture.run()

    return tried(run)


def cannot_be_sent(rank: int) -> list[Said]:
    """Rank 1 brings a value to a step that cannot be pickled; then one that can."""
    with meeting() as ranks:
        bad = tried(lambda: ranks.agree("lunch", value=(lambda: None) if rank else 0))
        return [bad, tried(lambda: ranks.agree("dinner", value=rank))]


class Wrong(Doubling):
    """Rank 1's graph gives other numbers than its model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + float(self.reducer.rank == 1 and self.reducer.backend.is_capturing())


def differs(rank: int) -> list[Said]:
    """Calls in debug mode, where numbers differ on rank 1."""
    with session(model=Wrong, compilation={"debug": True}) as (ranks, _, capture):
        runner = capture.run()
        said = [tried(lambda: wrong_sums(lambda x: runner(x=x), ranks, 1)) for _ in range(3)]
        runner.close()
    return said
