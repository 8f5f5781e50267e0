"""What ranks run in tests of what happens after something went wrong; see rank_programs.py."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from rank_programs import Doubling, batch, check_runner, config_of, doubled, patience, session

import cgplan
from cgplan.backends.tape import TapeBackend
from cgplan.buffers.static import StaticBuffers
from cgplan.config import DistributedConfig
from cgplan.distributed import AllReduce, RankedCapture, in_step, open_all_reduce, open_ranks
from cgplan.distributed.all_reduce import GLOO_DTYPES
from cgplan.distributed.transports import SharedMemoryTransport
from cgplan.errors import RegistrationError
from cgplan.planning import build_plan
from cgplan.runner.session import CaptureSession

Said = tuple[str, Any]  # ``ok`` and what was returned, or an error's class and message


def tried(call: Callable[[], Any]) -> Said:
    try:
        return "ok", call()
    except BaseException as error:
        return type(error).__name__, getattr(error, "message", str(error))


def captured_again(capture: CaptureSession, rank: int, world_size: int) -> Said:
    def run() -> None:
        runner = capture.run()
        check_runner(runner, rank, world_size)
        runner.close()

    return tried(run)


def once(rank: int, phase: str, times: int = 1) -> Callable[[str], None]:
    """Trouble on rank 1, so many times."""
    left = [times if rank == 1 else 0]

    def trouble(where: str) -> None:
        if where == phase and left[0]:
            left[0] -= 1
            time.sleep(0.2)  # the others wait in an all-reduce meanwhile
            raise ValueError("a defect of the model")

    return trouble


def raises_twice(rank: int, phase: str, budget: bool, all_reduce: str = "custom") -> list[Said]:
    """Rank 1 raises in two captures in a row, then not any more."""
    settings: dict[str, Any] = {"budget": {"max_graphs": 2}} if budget else {}
    settings["compilation"] = {"all_reduce": all_reduce}
    with session(rank, once(rank, phase, 2), **settings) as (ranks, _, capture):
        said = [tried(capture.run), tried(capture.run)]
        return [*said, captured_again(capture, rank, ranks.world_size)]


def no_memory_for_buffers(rank: int) -> Said:
    """Rank 1 has no memory for static buffers; there is a budget, so all go on without a graph."""
    real = StaticBuffers.__init__

    def init(self: Any, specs: Any, tokens: int, *args: Any) -> None:
        if rank == 1 and tokens:
            raise torch.OutOfMemoryError("no memory")
        real(self, specs, tokens, *args)

    StaticBuffers.__init__ = init
    with session(rank, budget={"max_graphs": 2}) as (ranks, _, capture):
        runner = capture.run()
        check_runner(runner, rank, ranks.world_size)
        keys = len(runner.plan.keys)
        runner.close()
    return "ok", keys


def no_report(rank: int) -> list[Said]:
    """Rank 1 cannot make its report, once."""
    real, left = CaptureSession._report, [1 if rank == 1 else 0]

    def report(self: Any, *args: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("the nodes cannot be counted")
        return real(self, *args)

    CaptureSession._report = report
    with session(rank) as (ranks, _, capture):
        return [tried(capture.run), captured_again(capture, rank, ranks.world_size)]


def eagerly_instead(rank: int) -> tuple[Said, int]:
    """After a failed capture all run the model itself; the number of wrong sums."""
    with session(rank, once(rank, "eager")) as (ranks, reducer, capture):
        said, model, wrong = tried(capture.run), Doubling(reducer), 0
        for turn in range(40):
            inputs = [batch(other, turn, (3, 8), torch.float32) for other in range(ranks.world_size)]
            wrong += not torch.allclose(model(inputs[rank]), doubled(inputs, ranks.world_size), rtol=1e-5)
            time.sleep(0.002 * rank)
    return said, wrong


def comes_late(rank: int, all_reduce: str) -> tuple[list[Said], list[float]]:
    """Rank 1 comes to an all-reduce when rank 0 has given up, and both go on; what they say, and wrong sums."""
    said, wrong = [], []
    try:
        with session(rank, compilation={"all_reduce": all_reduce}) as (_, reducer, _):
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


def two_runners(rank: int) -> tuple[Said, Said]:
    """A second model on the all-reduce of a runner that is open; and once that one is closed."""
    with session(rank) as (ranks, reducer, capture):
        runner, config = capture.run(), config_of()
        second = CaptureSession(
            build_plan(config),
            Doubling(reducer),
            reducer.backend,
            config,
            together=RankedCapture(ranks, reducer, config),
        )
        said = tried(second.run)
        check_runner(runner, rank, ranks.world_size)
        runner.close()
        return said, captured_again(second, rank, ranks.world_size)


def dropped_runner(rank: int) -> tuple[Said, str, Said]:
    """A runner that was dropped without close(): what the next capture raises, its remedy, and what helps."""
    with session(rank) as (ranks, reducer, capture):
        runner = capture.run()
        check_runner(runner, rank, ranks.world_size)
        del runner
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
            together = RankedCapture(ranks, other, config)
            second = CaptureSession(build_plan(config), Doubling(other), other.backend, config, together=together)
            return said, remedy, captured_again(second, rank, ranks.world_size)


class OneSum(torch.nn.Module):
    """Sums over ranks once, in a dtype; rank 1 runs out of memory in the warm-ups of two rows."""

    def __init__(self, reducer: AllReduce, dtype: torch.dtype) -> None:
        super().__init__()
        self.reducer, self.dtype, self.is_short = reducer, dtype, reducer.ranks.rank == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_short and len(x) == 2 and not self.reducer.backend.is_capturing():
            time.sleep(0.2)  # the others wait in the sum meanwhile
            raise torch.OutOfMemoryError("out of memory")
        return torch.ops.cgplan.all_reduce(x.to(self.dtype), self.reducer.number).to(x.dtype)


def out_of_memory_beside_a_sum(rank: int, all_reduce: str, dtype: torch.dtype) -> tuple[list[int], list[float]]:
    """A budget drops the key that rank 1 has no memory for; the keys that are left, and sums of several sizes."""
    settings = {"all_reduce": all_reduce, "cudagraph_capture_sizes": [1, 2, 4]}
    with session(rank, compilation=settings, budget={"memory": "10MiB"}) as (_, reducer, capture):
        model = capture._model = OneSum(reducer, dtype)
        runner = capture.run()
        model.is_short = False
        keys = [key.num_tokens for _, key in runner.plan.keys]
        sums = [runner(x=torch.full((rows, 8), 10.0 * rows + rank)).unique().item() for rows in (4, 1, 2, 3)]
        runner.close()
    return keys, sums


def refused_dtype(rank: int, all_reduce: str, dtype: torch.dtype) -> tuple[Said, float]:
    """A sum of a dtype that gloo does not take, and one after it."""
    with session(rank, compilation={"all_reduce": all_reduce}) as (ranks, reducer, capture):
        said = tried(lambda: reducer(torch.ones(16).to(dtype)))
        total = reducer(torch.full((3,), 1.0 + rank, dtype=torch.float64)).unique().item()
        assert captured_again(capture, rank, ranks.world_size) == ("ok", None)
    return said, total


def sums_of_each_dtype(rank: int) -> list[torch.dtype]:
    """Dtypes whose sum is wrong."""
    with session(rank, compilation={"all_reduce": "nccl"}) as (_, reducer, _):
        one, two = torch.ones(4), torch.full((4,), 2.0)
        return [dtype for dtype in GLOO_DTYPES if reducer(one.to(dtype)).tolist() != two.to(dtype).tolist()]


def wrong_arguments(rank: int) -> list[Said]:
    """Rank 1 comes to every other batch without rows, and with what is no batch; sums are right in those between."""
    settings = {
        "metadata": {"starts": {"shape": ["num_reqs + 1"], "dtype": "int32", "pad": "last"}},
        "distributed": {"data_parallel_sync": True},
    }
    idle = {"x": torch.ones(0, 8), "starts": torch.zeros(1, dtype=torch.int32)}
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {**idle, "starts": None}),
        ((), {**idle, "other": idle["x"]}),
        ((), {**idle, "starts": torch.tensor(0, dtype=torch.int32)}),
        ((idle["x"],), {}),
        ((), idle),  # with no memory for its padding
    ]
    real, said = torch.cat, list[Said]()

    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with session(rank, **settings) as (ranks, _, capture):
        runner = capture.run()
        call = in_step(runner, ranks)
        for turn, (args, given) in enumerate(wrong):
            inputs = [batch(other, turn, (2, 8), torch.float32) for other in range(ranks.world_size)]
            right = {"x": inputs[rank], "starts": torch.arange(3, dtype=torch.int32)}
            if rank == 1:
                torch.cat = no_memory if given is idle else real
                said.append(tried(lambda args=args, given=given: call(*args, **given)))
                torch.cat = real
            else:
                said.append(tried(lambda right=right: call(**right)))
            torch.testing.assert_close(call(**right), doubled(inputs, ranks.world_size), rtol=1e-6, atol=1e-6)
        runner.close()
    return said


def late_for_a_batch(rank: int) -> list[Said]:
    """Rank 1 comes to the second batch when the others have given it up; what the batches say. Then all close."""
    with session(rank, distributed={"data_parallel_sync": True}) as (ranks, _, capture):
        runner = capture.run()
        call, said = in_step(runner, ranks), list[Said]()
        for turn in range(3):
            if rank == 1 and turn == 1:
                time.sleep(patience() + 1)
            said.append(tried(lambda: call(x=torch.ones(2, 8)).isfinite().all().item()))
        runner.close()
    return said


def used_after_close(rank: int, all_reduce: str) -> list[Said]:
    with session(rank, compilation={"all_reduce": all_reduce}) as (ranks, reducer, capture):
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
    with session(rank, compilation={"cudagraph_mode": "PIECEWISE"}) as (ranks, reducer, capture):
        capture._model = Plain(reducer.number)
        return captured_again(capture, rank, ranks.world_size)


def interrupted(rank: int) -> Said:
    """Rank 1 is interrupted in a step of the registration."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def run() -> None:
        with session(rank) as (_, _, capture):
            if rank == 1:
                SharedMemoryTransport.export = interrupt
            capture.run()

    return tried(run)


def cannot_be_sent(rank: int) -> list[Said]:
    """Rank 1 brings a value to a step that cannot be pickled; then one that can."""
    ranks = open_ranks(DistributedConfig(timeout=patience()), "cpu")
    assert ranks is not None
    with ranks:
        bad = tried(lambda: ranks.agree("lunch", value=(lambda: None) if rank else 0))
        return [bad, tried(lambda: ranks.agree("dinner", value=rank))]


def differs(rank: int) -> list[Said]:
    """In debug mode rank 1's graph gives other numbers than its model; both go on."""

    class Wrong(Doubling):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + float(rank == 1 and self.reducer.backend.is_capturing())

    with session(rank, compilation={"debug": True}) as (ranks, reducer, capture):
        capture._model = Wrong(reducer)
        runner, said = capture.run(), []
        for turn in range(3):
            inputs = [batch(other, turn, (3, 8), torch.float32) for other in range(ranks.world_size)]
            wanted = doubled(inputs, ranks.world_size) + float(rank == 1)
            said.append(tried(lambda given=inputs[rank], sums=wanted: torch.allclose(runner(x=given), sums, rtol=1e-5)))
        runner.close()
    return said


def opened_again(rank: int) -> list[Said]:
    """Ranks that meet, capture and part, twice in one process."""

    def run() -> None:
        with session(rank) as (ranks, _, capture):
            assert captured_again(capture, rank, ranks.world_size) == ("ok", None)

    return [tried(run), tried(run)]


def no_memory_reading(rank: int) -> list[Said]:
    """Rank 1 fails before it has met the others for its capture, once."""
    real, left = TapeBackend.memory, [1 if rank == 1 else 0]

    def memory(self: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("the device does not answer")
        return real(self)

    with session(rank) as (ranks, _, capture):
        TapeBackend.memory = memory
        return [tried(capture.run), captured_again(capture, rank, ranks.world_size)]


def handles_stay_open(rank: int) -> list[Said]:
    """Rank 1 cannot close a handle of its peer's memory, once."""
    real, left = SharedMemoryTransport.close, [1 if rank == 1 else 0]

    def close(self: Any, base: int) -> None:
        real(self, base)
        if left[0]:
            left[0] -= 1
            raise RegistrationError("the handle cannot be closed")

    with session(rank) as (ranks, _, capture):
        runner = capture.run()
        SharedMemoryTransport.close = close
        return [tried(runner.close), captured_again(capture, rank, ranks.world_size)]
