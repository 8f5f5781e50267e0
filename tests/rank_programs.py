"""What the ranks of a test run: functions of the rank, found by name in each process."""

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.context import forward_context
from cgplan.backends.tape import TapeBackend
from cgplan.captures.budget import BudgetGuard
from cgplan.config import Config, DistributedConfig, load_config
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
from cgplan.distributed.transports import SharedMemoryTransport
from cgplan.errors import CgplanError, ModelError, RegistrationError
from cgplan.models.decoder import Decoder, build, example_batch
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.planning import build_plan
from cgplan.runner.session import CaptureSession


def patience() -> float:
    """Seconds that ranks wait for one another."""
    return float(os.environ["RANKS_TIMEOUT"])


@contextmanager
def opened(all_reduce: str = "custom") -> Iterator[tuple[Ranks, AllReduce]]:
    config = Config(
        device="cpu",
        compilation={"all_reduce": all_reduce},
        distributed={"timeout": patience(), "all_reduce_max_size": 1 << 20},
    )
    ranks = open_ranks(config.distributed, "cpu")
    assert ranks is not None
    with ranks:
        reducer = open_all_reduce(config, ranks, select_backend("cpu"))
        yield ranks, reducer
        reducer.close()


def chain(reducer: AllReduce, x: torch.Tensor, count: int) -> torch.Tensor:
    """Reductions that each depend on the one before, with work in between."""
    for index in range(count):
        x = reducer(x * 0.5 + index) - x
    return x


def expected(inputs: list[torch.Tensor], count: int) -> list[torch.Tensor]:
    """The same without ranks."""
    for index in range(count):
        total = sum(((x * 0.5 + index).float() for x in inputs[1:]), (inputs[0] * 0.5 + index).float())
        inputs = [total.to(x.dtype) - x for x in inputs]
    return inputs


def captured(reducer: AllReduce, backend: GraphBackend, x: torch.Tensor, count: int, pool: Any = None) -> Any:
    graph = backend.new_graph(backend.new_pool() if pool is None else pool)
    with backend.session(), backend.capturing(graph):
        out = chain(reducer, x, count)
    return graph, out


def replays(rank: int, dtype: torch.dtype, shapes: list[tuple[int, ...]], count: int, times: int) -> Any:
    """Graphs of several shapes, replayed with changing inputs; the sums, and what the registration came to."""
    results = []
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
                inputs = [batch(other, turn, static.shape, dtype) for other in range(ranks.world_size)]
                static.copy_(inputs[rank])
                backend.replay(graph)
                wanted = expected(inputs, count)[rank]
                assert torch.equal(out, wanted), f"turn {turn}: off by {(out.float() - wanted.float()).abs().max()}"
                results.append((out + static).clone() if turn == times - 1 else None)
        reducer.release()
        for graph, _ in graphs:
            backend.reset(graph)
    return registration, [r.sum().item() for r in results if r is not None]


def batch(rank: int, turn: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + turn)
    return torch.randn(shape, generator=generator).to(dtype)


# --- a model by hand: what most failures are tried on ---


class Doubling(torch.nn.Module):
    """Sums over ranks twice; ``trouble(phase)`` is called where something may go wrong."""

    def __init__(self, reducer: AllReduce, trouble: Any = None, extra: int = 0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((8,), 0.5), requires_grad=False)
        self.reducer, self.trouble, self.extra = reducer, trouble or (lambda _: None), extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.trouble("capture" if self.reducer.backend.is_capturing() else "eager")
        y = torch.ops.cgplan.all_reduce(x * self.weight, self.reducer.number)
        for _ in range(1 + self.extra * self.reducer.backend.is_capturing()):
            y = torch.ops.cgplan.all_reduce(y + 1, self.reducer.number)
        return y


def config_of(**settings: Any) -> Config:
    compilation = {"cudagraph_capture_sizes": [1, 4], **settings.pop("compilation", {})}
    return Config(
        device="cpu",
        inputs={"x": {"shape": ["num_tokens", 8], "dtype": "float32", "pad": 0}},
        compilation=compilation,
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 16},
        distributed={"timeout": patience(), "all_reduce_max_size": 1 << 16, **settings.pop("distributed", {})},
        **settings,
    )


def doubled(inputs: list[torch.Tensor], world_size: int) -> torch.Tensor:
    return (sum(x * 0.5 for x in inputs) + 1) * world_size


def check_runner(runner: Any, rank: int, world_size: int, times: int = 5) -> None:
    for turn in range(times):
        rows = 1 + turn % 4
        inputs = [batch(other, turn, (rows, 8), torch.float32) for other in range(world_size)]
        found = runner(x=inputs[rank])
        torch.testing.assert_close(found, doubled(inputs, world_size), rtol=1e-6, atol=1e-6)


@contextmanager
def session(rank: int, trouble: Any = None, extra: int = 0, backend: Any = None, **settings: Any) -> Iterator[Any]:
    """(ranks, reducer, CaptureSession) of the model above."""
    config = config_of(**settings)
    ranks = open_ranks(config.distributed, "cpu")
    assert ranks is not None
    with ranks, open_all_reduce(config, ranks, backend or select_backend("cpu")) as reducer:
        plan = agree_on_plan(ranks, build_plan(config))
        model = Doubling(reducer, trouble, extra)
        together = RankedCapture(ranks, reducer, config)
        yield ranks, reducer, CaptureSession(plan, model, reducer.backend, config, together=together)


def capture_and_run(rank: int, world_size: int) -> Any:
    """A runner, its recapture, and its report."""
    with session(rank) as (_, reducer, capture):
        runner = capture.run()
        check_runner(runner, rank, world_size)
        rows = [reducer.registry.rows]
        runner.recapture()
        check_runner(runner, rank, world_size)
        rows.append(reducer.registry.rows)
        report = runner.report
        runner.close()
    del reducer, capture, runner
    gc.collect()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:cgplan" in line]
    assert not mapped, f"shared memory is still mapped: {mapped}"
    opened_files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()]
    assert not [name for name in opened_files if "memfd:cgplan" in name]
    return rows, report.ranks


def unequal_counts(rank: int) -> None:
    with session(rank, extra=1 if rank == 1 else 0) as (_, _, capture):
        capture.run()


def unlike(rank: int, kind: str, x: torch.Tensor) -> torch.Tensor:
    """What rank 1 sums with a tensor of another shape or dtype than rank 0 does."""
    if kind == "layout":  # as many bytes
        return x.t() if rank else x
    if kind == "shape":
        return torch.nn.functional.pad(x, (0, 16 * rank))
    return x.to(torch.float16 if rank else torch.bfloat16)


def captures_unlike_inputs(rank: int, kind: str, mode: CUDAGraphMode = CUDAGraphMode.FULL, device: str = "cpu") -> None:
    """Without a warm-up: nothing is summed before the buffers are registered."""
    with opened() if device == "cpu" else on_gpus() as (_, reducer):
        reducer.begin_pass()
        graph = reducer.backend.new_graph(reducer.backend.new_pool())
        x, key = torch.ones(4, 32, device=device), BatchDescriptor(4)
        with reducer.backend.session(), forward_context(mode, key, {}), reducer.backend.capturing(graph):
            reducer(reducer(x))
            reducer(unlike(rank, kind, x))
        reducer.end_pass()


def sums_unlike_tensors(rank: int, kind: str) -> Any:
    """What is raised in the second sum, and the sum of a third one, of equal tensors."""
    with opened() as (_, reducer):
        x = torch.ones(4, 32)
        reducer(x)
        try:
            reducer(unlike(rank, kind, x))
        except CgplanError as error:
            said = type(error).__name__, error.message
        return said, reducer(x).unique().tolist()


def model_of_unlike_sums(rank: int, kind: str, mode: str) -> None:
    """A model whose ranks sum unlike tensors, in its warm-ups and in its graphs."""
    settings = {"cudagraph_mode": mode, "splitting_modules": ["inner"] if mode == "PIECEWISE" else []}
    with session(rank, compilation=settings) as (_, reducer, capture):
        capture._model.inner = torch.nn.Identity()
        capture._model.forward = lambda x: reducer(unlike(rank, kind, capture._model.inner(x)))
        capture.run()


def sums_once_more(rank: int) -> None:
    """Rank 1 does one all-reduce more in its second forward, later than rank 0 has begun to wait in the next step."""
    calls = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        y = reducer(x)
        if rank == 1 and len(calls) == 2:
            time.sleep(1)
            reducer(x)
        return y

    with session(rank, compilation={"cudagraph_capture_sizes": [4], "cudagraph_num_of_warmups": 2}) as (
        _,
        reducer,
        capture,
    ):
        capture._model.forward = forward
        capture.run()


class Counter:
    """Counts how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _: str) -> None:
        self.calls += 1


def counts_its_calls(rank: int) -> None:
    """Rank 1's model has a number that changes, rank 0's has none: only rank 1 looks who reads it."""
    with session(rank, Counter() if rank == 1 else None) as (ranks, _, capture):
        runner = capture.run()
        check_runner(runner, rank, ranks.world_size)
        runner.close()


def raises_in_registration(rank: int, method: str) -> Any:
    """Rank 1's transport fails once; afterwards all capture again."""
    left = [1 if rank == 1 else 0]
    real = getattr(SharedMemoryTransport, method)

    def failing(self: Any, *args: Any) -> Any:
        if left[0] and armed[0]:
            left[0] -= 1
            kind = RegistrationError if method == "open" else torch.OutOfMemoryError
            raise kind(f"{method} does not work")
        return real(self, *args)

    armed = [False]
    setattr(SharedMemoryTransport, method, failing)
    with session(rank) as (ranks, reducer, capture):
        armed[0] = True
        try:
            capture.run()
        except CgplanError as error:
            said = (type(error).__name__, error.message)
        assert not reducer.registry.is_sealed
        runner = capture.run()
        check_runner(runner, rank, ranks.world_size)
        runner.close()
    return said


def raises_in_replay(rank: int, error: type[Exception]) -> None:
    with session(rank) as (_, _, capture):
        runner = capture.run()
        for turn in range(200):
            if rank == 1 and turn == 20:
                raise error("a defect of the caller")
            runner(x=torch.ones(1 + turn % 4, 8))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in(rank: int, victim: int, phase: str) -> Any:
    """One rank is killed in a phase; what the others raise."""

    def trouble(where: str) -> None:
        if rank == victim and where == phase:
            die()

    if phase == "rendezvous" and rank == victim:
        die()
    with session(rank, trouble) as (_, _, capture):
        if phase == "opened" and rank == victim:
            die()
        if phase == "open" and rank == victim:
            SharedMemoryTransport.open = lambda *_: die()
        runner = capture.run()
        for turn in range(2000 if phase == "replay" else 2):
            if phase == "replay" and rank == victim and turn == 20:
                die()
            runner(x=torch.ones(1 + turn % 4, 8))
        runner.close()
    return "ended well"


def oom(rank: int, budget: bool) -> Any:
    """Rank 1's pool holds less than the graphs need."""
    backend = TapeBackend(pool_limit=300 if rank == 1 else None)
    settings = {"budget": {"max_graphs": 2}} if budget else {}
    with session(rank, backend=backend, **settings) as (ranks, _, capture):
        runner = capture.run()
        keys = [key.num_tokens for _, key in runner.plan.keys]
        for turn in range(4):
            inputs = [batch(other, turn, (1, 8), torch.float32) for other in range(ranks.world_size)]
            torch.testing.assert_close(runner(x=inputs[rank]), doubled(inputs, ranks.world_size))
        report = runner.report
        runner.close()
    stops = [(stop.rank, stop.limit, stop.descriptor.num_tokens) for stop in report.budget.stops]
    return keys, stops, str(report)


def budget_of_one(rank: int) -> Any:
    """Rank 1 alone refuses the second key."""
    if rank == 1:
        BudgetGuard.stop_before = lambda self, key: key[1].num_tokens == 1
    with session(rank, budget={"max_graphs": 2}) as (_, _, capture):
        runner = capture.run()
        keys = [key.num_tokens for _, key in runner.plan.keys]
        runner.close()
    return keys


def replay_before_registration(rank: int) -> Any:
    with opened() as (_, reducer):
        static = torch.ones(4, 4)
        reducer.begin_pass()
        graph, _ = captured(reducer, reducer.backend, static, 1)
        try:
            reducer.backend.replay(graph)
        except CgplanError as error:
            said = type(error).__name__, error.message
        reducer.end_pass()
        reducer.backend.replay(graph)
        try:
            captured(reducer, reducer.backend, static, 1)
        except CgplanError as error:
            late = type(error).__name__, error.message
        reducer.release()
    return said, late


def order_of_teardown(rank: int, failing: bool) -> Any:
    """What is closed and freed, in order."""
    events: list[str] = []

    def noting(owner: Any, method: str, name: str) -> None:
        real = getattr(owner, method)

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            events.append(name if not callable(name) else name(*args))
            return real(self, *args, **kwargs)

        setattr(owner, method, noted)

    noting(SharedMemoryTransport, "close", "handle")
    noting(SharedMemoryTransport, "free", "exports")
    noting(TapeBackend, "reset", "graph")
    noting(TapeBackend, "release_cached", "pool")
    noting(Ranks, "agree", lambda step: step)
    noting(Ranks, "close", "ranks")
    destroy = torch.distributed.destroy_process_group
    torch.distributed.destroy_process_group = lambda: (events.append("group"), destroy())
    try:
        with session(rank) as (_, _, capture):
            runner = capture.run()
            del events[:]
            try:
                if failing and rank == 1:
                    raise ValueError("a defect")
                if failing:
                    time.sleep(1)
                    runner(x=torch.ones(1, 8))
            except BaseException as error:
                capture._together._ranks.leave(error)
                raise
            finally:
                runner.close()
    except (ValueError, CgplanError):
        pass
    return events


def different_setup(rank: int, what: str) -> None:
    settings: dict[str, Any] = {}
    if rank == 1 and what == "config":
        settings = {"compilation": {"outputs": "clone", "address_check": "off"}}
    if rank == 1 and what == "torch":
        torch.__version__ = "1.0.0"
    config = config_of(**settings)
    ranks = open_ranks(config.distributed, "cpu")
    assert ranks is not None
    with ranks:
        backend = select_backend("cpu")
        agree_on_setup(ranks, config, backend)
        agree_on_model(ranks, torch.nn.Linear(4, 5 if rank == 1 and what == "model" else 4))


def rank_0s_plan(rank: int) -> Any:
    sizes = [1, 2] if rank == 0 else [4]
    config = config_of(compilation={"cudagraph_capture_sizes": sizes})
    ranks = open_ranks(config.distributed, "cpu")
    assert ranks is not None
    with ranks:
        return agree_on_plan(ranks, build_plan(config)).capture_sizes


def choice(rank: int, wanted: str, hosts: int = 1) -> Any:
    """The all-reduce that is chosen, what is logged, and a sum by it."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("cgplan.distributed").addHandler(handler)
    config = config_of(compilation={"all_reduce": wanted})
    ranks = open_ranks(config.distributed, "cpu")
    assert ranks is not None
    with ranks:
        if hosts > 1:
            ranks.presences = [replace(p, host=f"host{index}") for index, p in enumerate(ranks.presences)]
        with open_all_reduce(config, ranks, select_backend("cpu")) as reducer:
            sums = [
                reducer(x).sum().item()
                for x in (
                    torch.ones(8), torch.ones(3, dtype=torch.float32), torch.ones(5), torch.ones(4, dtype=torch.int64),
                    torch.ones(1 << 16), torch.ones(0), torch.ones(4, 6).T[:, :2],
                )
            ]  # fmt: skip
    return reducer.name, records, sums


def several_steps(rank: int) -> Any:
    """Ranks that come to different steps, and one that is late."""
    ranks = open_ranks(DistributedConfig(timeout=patience()), "cpu")
    assert ranks is not None
    said = []

    def tried(step: str, error: CgplanError | None = None) -> None:
        try:
            ranks.agree(step, error=error)
        except CgplanError as raised:
            said.append((type(raised).__name__, raised.message))

    with ranks:
        tried("tea" if rank else "coffee")
        tried("a step", ModelError("the same everywhere"))
        if rank == 1:
            time.sleep(patience() + 1)
        tried("breakfast")
        tried("lunch")
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
        contexts, queries = ([0, 0], lengths) if step == 0 else ([n + step - 1 for n in lengths], [1, 1])
        batch_ = example_batch(whole, contexts, queries, max_blocks=4)
        ids = batch_.input_ids if next_tokens is None else next_tokens
        wanted = run_alone(whole, ids, batch_)
        found = runner(input_ids=ids, positions=batch_.positions, **batch_.metadata)
        worst = max(worst, (found - wanted).abs().max().item())
        last = [sum(queries[: i + 1]) - 1 for i in range(2)]
        next_tokens = wanted[last].argmax(-1)
        assert torch.equal(found[last].argmax(-1), next_tokens), f"step {step}"
        tokens.append(next_tokens.tolist())
    return worst, tokens


def run_alone(whole: Decoder, ids: torch.Tensor, given: Any) -> torch.Tensor:
    tokens, reqs = len(ids), len(given.metadata["seq_lens"])
    key = BatchDescriptor(tokens, reqs, uniform=tokens == reqs)
    with torch.no_grad(), forward_context(CUDAGraphMode.NONE, key, given.metadata):
        return whole(ids, given.positions)


def split_decoder(rank: int, world_size: int, device: str = "cpu", **compilation: Any) -> Any:
    """Logits and greedy tokens of the split decoder's graphs against those of one process, and a few figures."""
    config = decoder_config(world_size, device, **compilation)
    ranks = open_ranks(config.distributed, device)
    assert ranks is not None
    assert config.model is not None
    with ranks, open_all_reduce(config, ranks, select_backend(str(ranks.device))) as reducer:
        with all_reduce_by(reducer), torch.device(ranks.device):
            model = build(**config.model.kwargs)
        together = RankedCapture(ranks, reducer, config)
        runner = CaptureSession(build_plan(config), model, reducer.backend, config, together=together).run()
        torch.backends.cuda.matmul.allow_tf32 = False
        with torch.device(ranks.device):
            whole = build(**{**config.model.kwargs, "tensor_parallel": 1})
        worst, tokens = decode(runner, whole, 6)
        rows, weights = runner.report.ranks[rank].rows, sum(p.numel() for p in model.parameters())
        reducer.check()
        runner.close()
    return worst, tokens, rows, weights


def impossible_split(rank: int, **kwargs: Any) -> None:
    ranks = open_ranks(DistributedConfig(timeout=patience()), "cpu")
    assert ranks is not None
    with ranks, open_all_reduce(config_of(), ranks, select_backend("cpu")) as reducer, all_reduce_by(reducer):
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
    rank: int, batches: list[list[tuple[int, int]]], sync: bool, sizes: tuple[int, ...] = (1, 4, 8), **settings: Any
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
    ranks = open_ranks(config.distributed, "cpu")
    assert ranks is not None
    ran = []
    with ranks:
        runner = CaptureSession(build_plan(config), Splittable(), select_backend("cpu"), config).run()
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
    return (ran, runner.stats.record()) if settings.get("stats") else ran


# --- two GPUs ---


@contextmanager
def on_gpus(all_reduce: str = "custom") -> Iterator[tuple[Ranks, AllReduce]]:
    config = Config(
        device="cuda",
        compilation={"all_reduce": all_reduce},
        distributed={"timeout": patience()},
    )
    ranks = open_ranks(config.distributed, "cuda")
    assert ranks is not None
    with ranks, open_all_reduce(config, ranks, select_backend(str(ranks.device))) as reducer:
        yield ranks, reducer


def gpu_replays(rank: int, dtype: torch.dtype, sizes: list[int], one_shot_bytes: int, times: int) -> Any:
    from cgplan.distributed import kernels

    kernels.ONE_SHOT_BYTES = {2: one_shot_bytes}
    with on_gpus() as (ranks, reducer):
        backend = reducer.backend
        pool = backend.new_pool()
        statics = [torch.zeros(size, dtype=dtype, device=ranks.device) for size in sizes]
        reducer.begin_pass()
        graph = backend.new_graph(pool)
        with backend.session():
            for static in statics:
                reducer(static)
            with backend.capturing(graph):
                outputs = [reducer(reducer(static) * 0.5 + static) for static in statics]
        registration = reducer.end_pass()
        sums = []
        for turn in range(times):
            given = [[batch(other, turn, size, dtype) for other in range(ranks.world_size)] for size in sizes]
            for static, inputs in zip(statics, given, strict=True):
                static.copy_(inputs[rank])
            backend.replay(graph)
            backend.synchronize()
            for inputs, output in zip(given, outputs, strict=True):
                first = total(inputs)
                wanted = total([first * 0.5 + x for x in inputs])
                assert torch.equal(output.cpu(), wanted), f"turn {turn}, {len(wanted)} elements"
            sums.append([output.view(torch.uint8).long().sum().item() for output in outputs])
        eager = reducer(statics[0])
        assert torch.equal(eager.cpu(), total(given[0]))
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


def gpu_unregistered(rank: int) -> Any:
    with on_gpus() as (ranks, reducer):
        static = torch.ones(64, device=ranks.device)
        reducer.begin_pass()
        graph = reducer.backend.new_graph(reducer.backend.new_pool())
        with reducer.backend.session():
            reducer(static)
            with reducer.backend.capturing(graph):
                reducer(static)
        reducer.backend.replay(graph)
        try:
            reducer.check()
        except CgplanError as error:
            said = type(error).__name__, error.message
        reducer.begin_pass()  # the error word and the signals are new
        reducer(static)
        reducer.check()
        reducer.backend.reset(graph)
    return said


def gpu_alone(rank: int, is_killed: bool) -> None:
    """Rank 1 does not come to an all-reduce: it sleeps, or is killed."""
    with on_gpus() as (ranks, reducer):
        x = torch.ones(1 << 16, device=ranks.device)
        reducer(x)
        torch.cuda.synchronize()
        if rank == 1:
            time.sleep(1 if is_killed else 5 * patience())
            if is_killed:
                die()
            os._exit(0)
        total = reducer(x)
        assert total.isnan().all(), "no sum that could be taken for a right one"
        reducer.check()


def gpu_place(rank: int, device: str) -> None:
    ranks = open_ranks(DistributedConfig(timeout=patience()), device)
    assert ranks is not None
    ranks.close()


def gpu_expandable(rank: int, wanted: str) -> str:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    with on_gpus(wanted) as (ranks, reducer):
        torch.testing.assert_close(reducer(torch.ones(8, device=ranks.device)).sum().item(), 16.0)
        return reducer.name


def gpu_memory(rank: int) -> list[int]:
    """Bytes that torch has reserved after each of several captures and closings."""
    config = decoder_config(2, "cuda")
    ranks = open_ranks(config.distributed, "cuda")
    assert ranks is not None
    assert config.model is not None
    reserved = []
    with ranks, open_all_reduce(config, ranks, select_backend(str(ranks.device))) as reducer:
        with all_reduce_by(reducer), torch.device(ranks.device):
            model = build(**config.model.kwargs)
        for _ in range(4):
            together = RankedCapture(ranks, reducer, config)
            runner = CaptureSession(build_plan(config), model, reducer.backend, config, together=together).run()
            runner.recapture()
            runner.close()
            del runner
            torch.cuda.empty_cache()
            reserved.append(torch.cuda.memory_reserved())
    return reserved
