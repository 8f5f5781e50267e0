"""Programs that the ranks of a test run: functions of the rank, found by name in each process."""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed._functional_collectives as functional_collectives
from checks import Tally, capture
from decoder import Decoder, build, example_batch
from devices import LimitedTape
from typer.testing import CliRunner

import cgplan
from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.context import forward_context
from cgplan.backends.host_sync import is_probing
from cgplan.backends.tape import TapeBackend
from cgplan.cli.main import app
from cgplan.config import Config, load_config
from cgplan.distributed import (
    AllReduce,
    RankedCapture,
    Ranks,
    agree_on_model,
    agree_on_plan,
    agree_on_setup,
    all_reduce_by,
    in_step,
    open_all_reduce,
    open_ranks,
)
from cgplan.distributed.all_reduce import GLOO_DTYPES
from cgplan.distributed.transports import SharedMemoryTransport
from cgplan.errors import CgplanError, DistributedError, ModelError, RegistrationError
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.piecewise.routes import SplitRoute
from cgplan.planning import build_plan
from cgplan.runner.session import CaptureSession

Said = tuple[str, Any]  # ``ok`` and a result, or an error's class and message


def patience() -> float:
    """Seconds that ranks wait for one another."""
    return float(os.environ["RANKS_TIMEOUT"])


def tried(call: Callable[[], Any]) -> Said:
    try:
        return "ok", call()
    except BaseException as error:
        return type(error).__name__, getattr(error, "message", str(error))


def config_of(**settings: Any) -> Config:
    """Of the model below."""
    compilation = {
        "cudagraph_capture_sizes": [1, 4],
        "all_reduce": "custom",
        **settings.pop("compilation", {}),
    }
    distributed = {
        "timeout": patience(),
        "all_reduce_max_size": 1 << 16,
        **settings.pop("distributed", {}),
    }
    return Config(
        device=settings.pop("device", "cpu"),
        inputs={"x": {"shape": ["num_tokens", 8], "dtype": "float32", "pad": 0}},
        compilation=compilation,
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 16},
        distributed=distributed,
        **settings,
    )


def meeting(config: Config | None = None) -> Ranks:
    config = config or config_of()
    ranks = open_ranks(config.distributed, config.device)
    assert ranks is not None
    return ranks


@contextmanager
def opened(config: Config | None = None, backend: Any = None) -> Iterator[tuple[Ranks, AllReduce]]:
    config = config or config_of()
    ranks = meeting(config)
    with (
        ranks,
        open_all_reduce(config, ranks, backend or select_backend(str(ranks.device))) as reducer,
    ):
        yield ranks, reducer


class Doubling(torch.nn.Module):
    """Sums over ranks twice; ``trouble(phase)`` is called where something may go wrong."""

    def __init__(self, reducer: AllReduce, trouble: Any = None, extra: int = 0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((8,), 0.5), requires_grad=False)
        self.reducer, self.trouble, self.extra = reducer, trouble or (lambda _: None), extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_probing() or self.reducer.backend.is_capturing():
            self.trouble("capture" if self.reducer.backend.is_capturing() else "eager")
        y = torch.ops.cgplan.all_reduce(x * self.weight, self.reducer.number)
        for _ in range(1 + self.extra * self.reducer.backend.is_capturing()):
            y = torch.ops.cgplan.all_reduce(y + 1, self.reducer.number)
        if self.reducer.backend.is_capturing():
            self.trouble("behind the last sum")
        return y


def session_of(reducer: AllReduce, config: Config, model: Callable[..., Any]) -> CaptureSession:
    together = RankedCapture(reducer.ranks, reducer, config)
    return CaptureSession(build_plan(config), model, reducer.backend, config, together=together)


@contextmanager
def session(
    trouble: Any = None,
    *,
    model: Callable[[AllReduce], Any] | None = None,
    backend: Any = None,
    **settings: Any,
) -> Iterator[tuple[Ranks, AllReduce, CaptureSession]]:
    """A session of the model above, or of another one."""
    config = config_of(**settings)
    with opened(config, backend) as (ranks, reducer):
        built = Doubling(reducer, trouble) if model is None else model(reducer)
        yield ranks, reducer, session_of(reducer, config, built)


def audits(rank: int, device: str) -> list[Any]:
    """Owners and findings of graphs that read other ranks' buffers; on GPUs those once a peer's buffers were closed."""
    found: list[Any] = []
    with (
        suppress(DistributedError),  # of the end, which closes them again
        session(
            device=device,
            model=lambda reducer: Doubling(reducer).to(reducer.backend.device),
            compilation={"audit": "report"},
        ) as (_, reducer, capturing),
    ):
        runner = capturing.run()
        report = runner.audit()
        found += [
            {owner.kind for owner in report.owners},
            [finding.text for finding in report.findings],
        ]
        if device == "cuda":
            from cuda.bindings import runtime

            for base, *_ in reducer.peer_memory().mapped:
                runtime.cudaIpcCloseMemHandle(base)
            found.append({finding.problem for finding in runner.audit().findings})
    return found


def batch(rank: int, turn: int, shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + turn)
    return torch.randn(shape, generator=generator).to(dtype)


def doubled(inputs: list[torch.Tensor]) -> torch.Tensor:
    return (sum(x * 0.5 for x in inputs) + 1) * len(inputs)


def wrong_sums(call: Callable[[torch.Tensor], torch.Tensor], ranks: Ranks, turns: int = 5) -> int:
    """Calls of the model above, or of its runner, that give another sum than one process."""
    wrong = 0
    for turn in range(turns):
        inputs = [batch(other, turn, (1 + turn % 4, 8)) for other in range(ranks.world_size)]
        found = call(inputs[ranks.rank].to(ranks.device)).cpu()
        wrong += not torch.allclose(found, doubled(inputs), rtol=1e-5, atol=1e-6)
    return wrong


def check_runner(runner: Any, ranks: Ranks) -> None:
    assert wrong_sums(lambda x: runner(x=x), ranks) == 0


def captured_again(capture: CaptureSession, ranks: Ranks) -> Said:
    def run() -> None:
        runner = capture.run()
        check_runner(runner, ranks)
        runner.close()

    return tried(run)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- graphs by hand ---


def chain(reducer: AllReduce, x: torch.Tensor, count: int) -> torch.Tensor:
    """Reductions that each depend on the one before, with work in between."""
    for index in range(count):
        x = reducer(x * 0.5 + index) - x
    return x


def expected(inputs: list[torch.Tensor], count: int) -> list[torch.Tensor]:
    """The same without ranks."""
    for index in range(count):
        total = sum(
            ((x * 0.5 + index).float() for x in inputs[1:]), (inputs[0] * 0.5 + index).float()
        )
        inputs = [total.to(x.dtype) - x for x in inputs]
    return inputs


def captured(
    reducer: AllReduce, backend: GraphBackend, x: torch.Tensor, count: int, pool: Any = None
) -> Any:
    graph = backend.new_graph(backend.new_pool() if pool is None else pool)
    with backend.session(), backend.capturing(graph):
        out = chain(reducer, x, count)
    return graph, out


def replays(
    rank: int, dtype: torch.dtype, shapes: list[tuple[int, ...]], count: int, times: int
) -> Any:
    """Graphs of several shapes, replayed with changing inputs; returns the registration."""
    with opened() as (ranks, reducer):
        backend = reducer.backend
        pool = backend.new_pool()
        statics = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        reducer.begin_pass()
        for static in statics:
            chain(reducer, static, 1)  # a warm-up, which really reduces
        graphs = [captured(reducer, backend, static, count, pool) for static in statics]
        registration = reducer.end_pass()
        for turn in range(times):
            for static, (graph, out) in zip(statics, graphs, strict=True):
                inputs = [
                    batch(other, turn, static.shape, dtype) for other in range(ranks.world_size)
                ]
                static.copy_(inputs[rank])
                backend.replay(graph)
                wanted = expected(inputs, count)[rank]
                assert torch.equal(out, wanted), (
                    f"turn {turn}: off by {(out.float() - wanted.float()).abs().max()}"
                )
        reducer.release()
        for graph, _ in graphs:
            backend.reset(graph)
    return registration


def replay_before_registration(rank: int) -> Any:
    with opened() as (_, reducer):
        static = torch.ones(4, 4)
        reducer.begin_pass()
        graph, _ = captured(reducer, reducer.backend, static, 1)
        said = tried(lambda: reducer.backend.replay(graph))
        reducer.end_pass()
        reducer.backend.replay(graph)
        late = tried(lambda: captured(reducer, reducer.backend, static, 1))
        reducer.release()
    return said, late


def unlike(rank: int, kind: str, x: torch.Tensor) -> torch.Tensor:
    """What rank 1 sums with a tensor of another shape or dtype than rank 0 does."""
    if kind == "layout":  # as many bytes
        return x.t() if rank else x
    if kind == "shape":
        return torch.nn.functional.pad(x, (0, 16 * rank))
    return x.to(torch.float16 if rank else torch.bfloat16)


def captures_unlike_inputs(
    rank: int, kind: str, mode: CUDAGraphMode = CUDAGraphMode.FULL, device: str = "cpu"
) -> None:
    """Without a warm-up: nothing is summed before the buffers are registered."""
    with opened(config_of(device=device)) as (_, reducer):
        reducer.begin_pass()
        graph = reducer.backend.new_graph(reducer.backend.new_pool())
        x, key = torch.ones(4, 32, device=device), BatchDescriptor(4)
        with (
            reducer.backend.session(),
            forward_context(mode, key, {}),
            reducer.backend.capturing(graph),
        ):
            reducer(reducer(x))
            reducer(unlike(rank, kind, x))
        reducer.end_pass()


def sums_unlike_tensors(rank: int, kinds: list[str]) -> Any:
    """For each kind: what is raised in a sum of unlike tensors, and the sum of equal ones after it."""
    x, found = torch.ones(4, 32), []
    for kind in kinds:
        with opened() as (_, reducer):
            reducer(x)
            found.append(
                (
                    tried(lambda kind=kind: reducer(unlike(rank, kind, x))),
                    reducer(x).unique().tolist(),
                )
            )
    return found


# --- sessions ---


def capture_and_run(rank: int) -> Any:
    """A runner, its recapture, its sleep, and its report."""
    with session() as (ranks, reducer, capture):
        runner = capture.run()
        check_runner(runner, ranks)
        rows = [reducer.registry.rows]
        runner.recapture()
        check_runner(runner, ranks)
        rows.append(reducer.registry.rows)
        keys = runner.plan.keys
        runner.sleep()
        runner.wake()
        assert runner.plan.keys == keys, "ranks capture in step: all keys at once"
        check_runner(runner, ranks)
        report = runner.report
        runner.close()
    del reducer, capture, runner
    gc.collect()
    mapped = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:cgplan" in line
    ]
    assert not mapped, f"shared memory is still mapped: {mapped}"
    opened_files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()]
    assert not [name for name in opened_files if "memfd:cgplan" in name]
    return rows, report.ranks


def unequal_counts(rank: int) -> None:
    with session(model=lambda reducer: Doubling(reducer, extra=1 if rank == 1 else 0)) as (
        _,
        _,
        capture,
    ):
        capture.run()


def sums_once_more(rank: int) -> None:
    """Rank 1 does one all-reduce more in its second forward, and waits there longer than rank 0 in the next step."""
    calls = Tally()

    def model(reducer: AllReduce) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            calls.append(x)
            y = reducer(x)
            if rank == 1 and len(calls) == 2:
                reducer.ranks.timeout += 10
                reducer(x)
            return y

        return forward

    settings = {"cudagraph_capture_sizes": [4], "cudagraph_num_of_warmups": 2}
    with session(model=model, compilation=settings) as (_, _, capture):
        capture.run()


class Counter:
    """Counts how often it was called."""

    calls = 0

    def __call__(self, _: str) -> None:
        self.calls += 1


def counts_its_calls(rank: int) -> Said:
    """Rank 1's model has a number that changes, rank 0's has none: only rank 1 looks whether the forward reads it."""
    with session(Counter() if rank == 1 else None) as (ranks, _, capture):
        return captured_again(capture, ranks)


def raises_in_registration(rank: int, method: str) -> list[Said]:
    """Rank 1's transport fails once; afterwards all capture again."""
    with session() as (ranks, reducer, capture):
        fails_once(
            rank, SharedMemoryTransport, method, torch.OutOfMemoryError(f"{method} does not work")
        )
        said = tried(capture.run)
        assert not reducer.registry.is_sealed
        return [said, captured_again(capture, ranks)]


def raises_in_replay(rank: int, error: type[Exception]) -> None:
    with session() as (_, _, capture):
        runner = capture.run()
        for turn in range(200):
            if rank == 1 and turn == 20:
                raise error("a defect of the caller")
            runner(x=torch.ones(1 + turn % 4, 8))


def killed_in(rank: int, victim: int, phase: str) -> None:
    """One rank is killed in a phase."""

    def trouble(where: str) -> None:
        if rank == victim and where == phase:
            die()

    with session(trouble) as (_, _, capture):
        runner = capture.run()
        for turn in range(2000):
            if turn == 20:
                trouble("replay")
            runner(x=torch.ones(1 + turn % 4, 8))
        runner.close()


def oom(rank: int, budget: bool) -> Any:
    """Rank 1's pool holds less than the graphs need."""
    backend = LimitedTape(300 if rank == 1 else None)
    settings = {"budget": {"max_graphs": 2}} if budget else {}
    with session(backend=backend, **settings) as (ranks, _, capture):
        runner = capture.run()
        check_runner(runner, ranks)
        report = runner.report
        runner.close()
    stops = [(stop.rank, stop.limit, stop.descriptor.num_tokens) for stop in report.budget.stops]
    return [key.num_tokens for _, key in runner.plan.keys], stops, str(report)


def order_of_teardown(rank: int, failing: bool) -> list[str]:
    """What is closed and freed, in order; where it fails, rank 1 has left before."""
    events: list[str] = []

    def noting(owner: Any, method: str, name: Any) -> None:
        real = getattr(owner, method)

        def noted(*args: Any, **kwargs: Any) -> Any:
            events.append(name if isinstance(name, str) else name(*args))
            return real(*args, **kwargs)

        setattr(owner, method, noted)

    noting(SharedMemoryTransport, "close", "handle")
    noting(SharedMemoryTransport, "free", "exports")
    noting(TapeBackend, "reset", "graph")
    noting(TapeBackend, "release_cached", "pool")
    noting(Ranks, "agree", lambda _, step: step)
    noting(Ranks, "close", "ranks")
    noting(torch.distributed, "destroy_process_group", "group")

    def run() -> None:
        with session() as (ranks, _, capture):
            runner = capture.run()
            del events[:]
            try:
                if failing and rank == 1:
                    raise ValueError("a defect")
                if failing:
                    time.sleep(1)
                    runner(x=torch.ones(1, 8))
            except BaseException as error:
                ranks.leave(error)
                raise
            finally:
                runner.close()

    tried(run)
    return events


def different_setup(rank: int, what: str) -> None:
    settings: dict[str, Any] = {}
    if rank == 1 and what == "config":
        settings = {"compilation": {"outputs": "clone", "address_check": "off"}}
    if rank == 1 and what == "torch":
        torch.__version__ = "1.0.0"
    config = config_of(**settings)
    with meeting(config) as ranks:
        agree_on_setup(ranks, config, select_backend("cpu"))
        agree_on_model(ranks, torch.nn.Linear(4, 5 if rank == 1 and what == "model" else 4))


def rank_0s_plan(rank: int) -> Any:
    config = config_of(compilation={"cudagraph_capture_sizes": [1, 2] if rank == 0 else [4]})
    with meeting(config) as ranks:
        return agree_on_plan(ranks, build_plan(config)).capture_sizes


def choice(rank: int, wanted: str, hosts: int = 1) -> Any:
    """The all-reduce that is chosen, what is logged, and sums by it."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("cgplan.distributed").addHandler(handler)
    config = config_of(compilation={"all_reduce": wanted})
    given = [
        torch.ones(8), torch.ones(3, dtype=torch.float32), torch.ones(5), torch.ones(4, dtype=torch.int64),
        torch.ones(1 << 16), torch.ones(0), torch.ones(4, 6).T[:, :2],
    ]  # fmt: skip
    with meeting(config) as ranks:
        if hosts > 1:
            ranks.presences = [
                replace(p, host=f"host{index}") for index, p in enumerate(ranks.presences)
            ]
        with open_all_reduce(config, ranks, select_backend("cpu")) as reducer:
            return reducer.name, records, [reducer(x).sum().item() for x in given]


def several_steps(rank: int) -> list[Said]:
    """Ranks that come to different steps, and one that is late."""
    with meeting() as ranks:
        said = [
            tried(lambda: ranks.agree("tea" if rank else "coffee")),
            tried(lambda: ranks.agree("a step", error=ModelError("the same everywhere"))),
        ]
        if rank == 1:
            time.sleep(patience() + 1)
        return [*said, tried(lambda: ranks.agree("breakfast")), tried(lambda: ranks.agree("lunch"))]


# --- something goes wrong on one rank ---


def once(rank: int, phase: str, times: int = 1) -> Callable[[str], None]:
    """Trouble on rank 1, so many times."""
    left = iter(
        range(times if rank == 1 else 0)
    )  # no state of the model, which a failed capture puts back

    def trouble(where: str) -> None:
        if where == phase and next(left, None) is not None:
            time.sleep(0.2)  # the others wait in an all-reduce meanwhile
            raise ValueError("a defect of the model")

    return trouble


def fails_once(
    rank: int, owner: Any, method: str, error: Exception, *, after: bool = False
) -> None:
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
    with session(once(rank, phase, 2), compilation={"all_reduce": all_reduce}, **settings) as (
        ranks,
        _,
        capture,
    ):
        return [tried(capture.run), tried(capture.run), captured_again(capture, ranks)]


def fails_beside_the_capture(rank: int, what: str) -> list[Said]:
    """Rank 1 fails once before its capture, in its report, or in closing a handle; then all capture again."""
    with session() as (ranks, _, capture):
        run: Callable[[], Any] = capture.run
        if what == "memory":
            fails_once(rank, TapeBackend, "memory", RuntimeError("the device does not answer"))
        elif what == "report":
            fails_once(rank, SplitRoute, "describe", RuntimeError("the segments are not counted"))
        else:
            run = capture.run().close
            error = RegistrationError("the handle cannot be closed")
            fails_once(rank, SharedMemoryTransport, "close", error, after=True)
        return [tried(run), captured_again(capture, ranks)]


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


def several_runners(rank: int) -> tuple[list[Said], str]:
    """A second capture on the all-reduce of an open runner, and on one of a runner that was dropped; and a remedy."""
    with session() as (ranks, reducer, capture):
        runner = capture.run()
        second = session_of(reducer, config_of(), Doubling(reducer))
        said = [tried(second.run)]
        check_runner(runner, ranks)
        runner.close()
        said.append(captured_again(second, ranks))
        check_runner(capture.run(), ranks)
        del runner
        gc.collect()
        try:
            second.run()
        except cgplan.CgplanError as error:
            said.append((type(error).__name__, error.message))
            remedy = error.remedy
        config = config_of()
        with open_all_reduce(config, ranks, reducer.backend) as other:
            said.append(captured_again(session_of(other, config, Doubling(other)), ranks))
    return said, remedy


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


def out_of_memory_beside_a_sum(
    rank: int, all_reduce: str, dtype: torch.dtype
) -> tuple[list[int], list[float]]:
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
        sums = [
            runner(x=torch.full((rows, 8), 10.0 * rows + rank)).unique().item()
            for rows in (4, 1, 2, 3)
        ]
        runner.close()
    return keys, sums


def dtypes(rank: int, all_reduce: str, dtype: torch.dtype) -> tuple[Said, list[torch.dtype]]:
    """A sum of a dtype that gloo does not take, and then dtypes whose sum is wrong."""
    with session(compilation={"all_reduce": all_reduce}) as (ranks, reducer, capture):
        said, one, two = (
            tried(lambda: reducer(torch.ones(16).to(dtype))),
            torch.ones(4),
            torch.full((4,), 2.0),
        )
        wrong = [
            dtype
            for dtype in GLOO_DTYPES
            if reducer(one.to(dtype)).tolist() != two.to(dtype).tolist()
        ]
        assert captured_again(capture, ranks) == ("ok", None)
    return said, wrong


def used_after_close(rank: int) -> list[Said]:
    with session() as (ranks, reducer, capture):
        runner = capture.run()
        reducer.close()
        x = torch.ones(2, 8)
        said = [tried(lambda: reducer(x)), tried(lambda: runner(x=x))]
        runner.close()
    return [*said, tried(lambda: reducer(x)), tried(lambda: ranks.agree("tea"))]


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


class Wrong(Doubling):
    """Rank 1's graph gives other numbers than its model."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + float(
            self.reducer.rank == 1 and self.reducer.backend.is_capturing()
        )


def differs(rank: int) -> list[Said]:
    """Calls in debug mode, where numbers differ on rank 1."""
    with session(model=Wrong, compilation={"debug": True}) as (ranks, _, capture):
        runner = capture.run()
        said = [tried(lambda: wrong_sums(lambda x: runner(x=x), ranks, 1)) for _ in range(3)]
        runner.close()
    return said


# --- the decoder, split over ranks ---


def decoder_config(world_size: int, device: str = "cpu", **compilation: Any) -> Config:
    path = Path(__file__).parents[1] / "configs" / "decoder_tp2_cpu.yaml"
    kwargs = f"model.kwargs.tensor_parallel={world_size}"
    heads = ["model.kwargs.num_heads=8", "model.kwargs.num_kv_heads=4", "model.kwargs.num_layers=2"]
    given = [f"compilation.{name}={value}" for name, value in compilation.items()]
    wait = f"distributed.timeout={patience()}"
    sizes = "compilation.cudagraph_capture_sizes=[2,4]"
    return load_config(path, [f"device={device}", kwargs, *heads, sizes, wait, *given])


def decode(runner: Any, whole: Decoder, steps: int) -> Any:
    """Greedy decoding of two requests, by the runner and by a decoder in one process: largest distance, and tokens."""
    worst, tokens = 0.0, []
    lengths, next_tokens = [5, 3], None
    for step in range(steps + 1):
        contexts, queries = (
            ([0, 0], lengths) if step == 0 else ([n + step - 1 for n in lengths], [1, 1])
        )
        batch_ = example_batch(whole, contexts, queries, max_blocks=4)
        ids = batch_.input_ids if next_tokens is None else next_tokens
        key = BatchDescriptor(len(ids), 2, uniform=len(ids) == 2)
        with torch.no_grad(), forward_context(CUDAGraphMode.NONE, key, batch_.metadata):
            wanted = whole(ids, batch_.positions)
        found = runner(input_ids=ids, positions=batch_.positions, **batch_.metadata)
        worst = max(worst, (found - wanted).abs().max().item())
        last = [sum(queries[: i + 1]) - 1 for i in range(2)]
        next_tokens = wanted[last].argmax(-1)
        assert torch.equal(found[last].argmax(-1), next_tokens), f"step {step}"
        tokens.append(next_tokens.tolist())
    return worst, tokens


def split_decoder(rank: int, world_size: int, device: str = "cpu", **compilation: Any) -> Any:
    """Logits and greedy tokens of the split decoder's graphs against those of one process, and a few figures."""
    config = decoder_config(world_size, device, **compilation)
    assert config.model is not None
    with opened(config) as (ranks, reducer):
        with all_reduce_by(reducer), torch.device(ranks.device):
            model = build(**config.model.kwargs)
        runner = session_of(reducer, config, model).run()
        torch.backends.cuda.matmul.allow_tf32 = False
        with torch.device(ranks.device):
            whole = build(**{**config.model.kwargs, "tensor_parallel": 1})
        worst, tokens = decode(runner, whole, 6)
        rows, weights = runner.report.ranks[rank].rows, sum(p.numel() for p in model.parameters())
        reducer.check()
        runner.close()
    return worst, tokens, rows, weights


def impossible_split(rank: int, **kwargs: Any) -> None:
    with opened() as (_, reducer), all_reduce_by(reducer):
        build(**kwargs)


# --- data-parallel ranks ---


class Splittable(torch.nn.Module):
    """Segments around a module that is kept out of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * 2) + 1


def data_parallel(
    rank: int,
    batches: list[list[tuple[int, int]]],
    sync: bool,
    sizes: tuple[int, ...] = (1, 4, 8),
    **settings: Any,
) -> Any:
    """(tokens, requests) of each rank's batches; what each was run as."""
    config = Config(
        device="cpu",
        inputs={"x": {"shape": ["num_tokens", 2], "dtype": "float32", "pad": 0}},
        metadata={"starts": {"shape": ["num_reqs + 1"], "dtype": "int32", "pad": "last"}},
        compilation={
            "cudagraph_mode": settings.get("mode", "FULL_AND_PIECEWISE"),
            "splitting_modules": ["inner"],
            "cudagraph_capture_sizes": list(sizes),
        },
        scheduler={"max_num_seqs": 8, "max_num_batched_tokens": 16},
        speculative={"num_speculative_tokens": settings.get("speculative", 0)},
        distributed={"timeout": patience(), "data_parallel_sync": sync},
    )
    ran = []
    with meeting(config) as ranks:
        runner = CaptureSession(
            build_plan(config), Splittable(), select_backend("cpu"), config
        ).run()
        call = in_step(runner, ranks)
        for tokens, reqs in batches[rank]:
            x = torch.randn(tokens, 2)
            starts = torch.linspace(0, tokens, reqs + 1).int()
            uniform = None if not settings.get("speculative") else tokens == 2 * reqs
            try:
                assert torch.equal(call(x=x, starts=starts, uniform_decode=uniform), x * 2 + 1)
            except CgplanError as error:
                ran.append((type(error).__name__, error.message))
                continue
            ran.append((str(call.last.mode), call.last.num_tokens) if sync else type(call).__name__)
        runner.close()
    if not settings.get("stats"):
        return ran
    stats = runner.stats
    return ran, (stats.traffic().histogram, stats.real_tokens, stats.padded_rows)


# --- commands ---


def command(rank: int, *of_ranks: list[str]) -> tuple[int, str, str]:
    """A command of cgplan, with each rank's arguments: its exit code, and what it prints."""
    done = CliRunner().invoke(app, of_ranks[rank])
    return done.exit_code, done.stdout, done.stderr


def _gathered(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, x)
    return torch.stack(parts)


def _summed(x: torch.Tensor, **options: Any) -> torch.Tensor:
    if (work := torch.distributed.all_reduce(x, **options)) is not None:
        work.wait()
    return x


COLLECTIVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all_reduce": _summed,
    "all_reduce, later": lambda x: _summed(x, async_op=True),
    "all_gather": _gathered,
    "functional": lambda x: functional_collectives.all_reduce(
        x, "sum", torch.distributed.group.WORLD
    ),
    "functional gather": lambda x: functional_collectives.all_gather_tensor(
        x, 0, torch.distributed.group.WORLD
    ),
}


def collectives_in_a_forward(rank: int) -> list[str]:
    """Those of torch.distributed that a replay does not repeat."""
    torch.distributed.init_process_group("gloo")
    wrong, state = [], torch.ones(3)
    for name, collective in COLLECTIVES.items():
        backend, x = TapeBackend(), torch.zeros(3)

        def forward(
            x: torch.Tensor, collective: Any = collective, state: torch.Tensor = state
        ) -> torch.Tensor:
            return collective(x * 2).sum() + _summed(state.mul_(0.5))

        state.fill_(1)
        graph, out = capture(backend, lambda x=x, forward=forward: forward(x), warmups=0)  # type: ignore[misc]
        moved = state.tolist() != [1, 1, 1]
        for step in range(4):
            x.fill_(10 * rank + step)
            state.fill_(step)
            backend.replay(graph)
            found = out.clone(), state.clone()
            state.fill_(step)
            moved |= not torch.equal(found[0], forward(x)) or not torch.equal(found[1], state)
        wrong += [name] * moved
        backend.reset(
            graph
        )  # whoever drops the last reference to a gloo group joins its threads, with the GIL
    torch.distributed.destroy_process_group()
    return wrong
