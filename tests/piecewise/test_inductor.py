"""Inductor: segments that it compiles."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import decoder
import pytest
import torch
import torch.nn.functional as F
from pieces import Attends, open_runner
from torch import Tensor, nn

from cgplan import (
    CaptureSession,
    CUDAGraphMode,
    GraphRunner,
    Input,
    build_plan,
)
from cgplan.backends import GraphBackend, select_backend
from cgplan.config import CompilationConfig, validate_config
from cgplan.piecewise.backend import PiecewiseBackend

PIECEWISE = CUDAGraphMode.PIECEWISE


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def replay_random_batches(
    backend: GraphBackend,
    mode: str,
    batches: int = 20,
    close: dict[str, float] | None = None,
    **compilation: Any,
) -> GraphRunner:
    """Capture the decoder and compare replays with its own code on the same padded batch, bit for bit or as close."""
    tolerance = close or {"rtol": 0, "atol": 0}
    model = decoder.build(num_layers=2).to(backend.device)
    rows, reqs = "num_tokens", "num_reqs"
    config = validate_config(
        {
            "inputs": {
                name: Input(shape=(rows,), dtype="int64", pad=0)
                for name in ("input_ids", "positions")
            },
            "metadata": {
                "slot_mapping": Input(shape=(rows,), dtype="int64", pad=-1),
                "block_tables": Input(shape=(reqs, 4), dtype="int32", pad=0),
                "seq_lens": Input(shape=(reqs,), dtype="int32", pad=0),
                "query_start_loc": Input(shape=("num_reqs + 1",), dtype="int32", pad="last"),
            },
            "compilation": {
                "cudagraph_mode": mode,
                "cudagraph_capture_sizes": [1, 4, 8, 16],
                **compilation,
            },
            "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 32},
        }
    )
    runner = CaptureSession(build_plan(config), model, backend, config).run()
    caches = [
        cache
        for layer in model.layers
        for cache in (layer.self_attn.key_cache, layer.self_attn.value_cache)
    ]
    choose = random.Random(mode)
    for seed in range(batches):
        decode = choose.random() < 0.5
        queries = [1 if decode else choose.randint(1, 5) for _ in range(choose.randint(1, 6))]
        batch = decoder.example_batch(
            model, [choose.randint(0, 40) for _ in queries], queries, max_blocks=4, seed=seed
        )
        tensors = {"input_ids": batch.input_ids, "positions": batch.positions, **batch.metadata}
        before = [cache.clone() for cache in caches]
        found = runner(**tensors).clone()
        after = [cache.clone() for cache in caches]
        for cache, old in zip(caches, before, strict=True):
            cache.copy_(old)
        torch.testing.assert_close(found, runner.run_eagerly(**tensors), **tolerance)
        for cache, new in zip(
            caches, after, strict=True
        ):  # the last block takes what padding rows write
            torch.testing.assert_close(new[:-1], cache[:-1], **tolerance)
    assert bool(runner.stats.replays) == (mode != "NONE")
    return runner


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_inductor_compiles_each_segment_once_for_all_sizes(mode: str) -> None:
    backend = select_backend("cuda")
    model = Attends(layers=4).to(backend.device)
    options = {"compiler": "inductor", "compile_shapes": "dynamic"}
    runner = open_runner(backend, model, cudagraph_mode=mode, **options)
    splitter = runner.graphs.route.splitter
    assert splitter is not None
    # Twice, as one row is a trace of its own: the first segment, those between two attentions, the last one; or the
    # forward as a whole, which FULL compiles.
    assert len(splitter.compiled) == 2 * (1 if mode == "FULL" else 3)
    generator = torch.Generator().manual_seed(1)
    for rows in (1, 8, 3, 2, 5, 8, 1, 4, 7, 6):
        x = torch.randn(rows, 8, generator=generator).to(backend.device)
        torch.testing.assert_close(runner(x=x), model(x), atol=1e-5, rtol=1e-4)
    assert not runner.stats.eager
    if mode == "PIECEWISE":
        assert {r.graphs for r in runner.report.records} == {5}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE"])
def test_the_decoder_under_inductor(mode: str) -> None:
    """Attention writes into a buffer that inductor allocates, and into the cache."""
    close = {"rtol": 1e-3, "atol": 1e-4}
    replay_random_batches(
        select_backend("cuda"),
        mode,
        close=close,
        compiler="inductor",
    )


@pytest.mark.gpu
def test_an_operator_of_several_results_between_compiled_segments() -> None:
    """Fused attention gives logsumexp and random states besides: a tuple, fresh on each call."""

    class Flash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 3 * 2 * 16 * 64) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                q, k, v = layer(x).to(torch.bfloat16).view(-1, 3, 2, 16, 64).unbind(1)
                x = (
                    x
                    + F.scaled_dot_product_attention(q, k, v).float().mean(dim=(1, 2))[:, :8].tanh()
                )
            return x

    backend = select_backend("cuda")
    torch.manual_seed(0)
    model = Flash().to(backend.device)
    runner = open_runner(backend, model, compiler="inductor")
    assert {r.graphs for r in runner.report.records} == {3}
    for rows in (1, 8, 3, 2, 5, 8, 1):
        x = torch.randn(rows, 8).to(backend.device)
        torch.testing.assert_close(runner(x=x), model(x), atol=2e-3, rtol=2e-2)
    assert not runner.stats.eager
    runner.close()


@pytest.mark.parametrize(
    ("mode", "modules"),
    [("PIECEWISE", []), ("FULL_AND_PIECEWISE", ["layers.*.self_attn"])],
)
def test_the_decoder_by_operators_and_by_modules(
    backend: GraphBackend, mode: str, modules: list[str]
) -> None:
    replay_random_batches(backend, mode, splitting_modules=modules)


@torch.library.custom_op("tests_inductor::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """As attention, whose kernel at run time may lay out its result otherwise than the one that the trace chose."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) * 2


@turned.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class Turns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return turned(x.unflatten(-1, (4, 2)) + 1).softmax(-1).flatten(1) * 3


def test_a_segment_is_handed_its_inputs_in_the_layout_that_it_was_compiled_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[int, ...]] = []

    def compile_nothing(module: Any, inputs: Any, **_: Any) -> Any:
        forward = module.forward

        def run(*args: Any) -> Any:
            found.extend(arg.stride() for arg in args if isinstance(arg, Tensor))
            return forward(*args)

        return run

    monkeypatch.setattr(torch._inductor, "standalone_compile", compile_nothing)
    splitter = PiecewiseBackend(
        CompilationConfig(splitting_ops=["tests_inductor::turned"]), select_backend("cpu")
    )
    splitter.compiler = "inductor"  # which the tape cannot record
    model, x = Turns(), torch.randn(3, 8)
    torch.testing.assert_close(torch.compile(model, backend=splitter)(x), model(x), rtol=0, atol=0)
    assert found == [(8, 1), (8, 2, 1)]


@pytest.mark.gpu
def test_inductor_behind_an_operator_with_another_layout_than_its_trace() -> None:
    backend, model = select_backend("cuda"), Turns()
    options = {"compiler": "inductor", "splitting_ops": ["tests_inductor::turned"]}
    runner = open_runner(backend, model, cudagraph_mode="PIECEWISE", **options)
    for rows in (1, 3, 8):
        x = torch.randn(rows, 8, device=backend.device)
        torch.testing.assert_close(runner(x=x), model(x), rtol=1e-5, atol=1e-5)


COMPILING = """
import sys, time
import torch
import cgplan
from torch._inductor.async_compile import AsyncCompile

def many(x):
    total = x[:, :1]
    for width in range(2, 40):  # a kernel each
        total = total + torch.softmax(x[:, :width].sin(), -1).square().cumsum(-1)[:, -1:]
    return total

if sys.argv[1] == "cuda":
    inputs = {"x": cgplan.Input(shape=("num_tokens", 64), dtype="float32", pad=0)}
    settings = {"cudagraph_capture_sizes": [1, 2, 4], "cudagraph_mode": "FULL", "compiler": "inductor"}
    cgplan.capture(many, inputs, compilation=settings, device="cuda")
else:  # no kernels of Triton: jobs that take as long
    from pathlib import Path
    workers = AsyncCompile.process_pool()
    workers.submit(Path(sys.argv[2], "begun").touch)
    jobs = [workers.submit(time.sleep, 600) for _ in range(2)]
    [job.result() for job in jobs]
"""


def running(session: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.gpu)]
)
def test_a_process_killed_while_it_compiles_leaves_no_child(
    backend: GraphBackend, tmp_path: Path, how: signal.Signals
) -> None:
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    program = tmp_path / "compiling.py"
    program.write_text(COMPILING)
    process = subprocess.Popen(
        [sys.executable, program, backend.device.type, kernels],
        env={
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "2",
            "TRITON_CACHE_DIR": str(kernels),
        },
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not any(kernels.iterdir()):
            assert process.poll() is None, "it ended before it compiled"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert len(running(process.pid)) > 2, "with workers"
        process.send_signal(how)
        assert process.wait() == -how
        deadline = time.monotonic() + 30
        while running(process.pid):
            assert time.monotonic() < deadline, "children stay"
            time.sleep(0.1)
    finally:
        for left in running(process.pid):
            os.kill(left, signal.SIGKILL)
        process.wait()
