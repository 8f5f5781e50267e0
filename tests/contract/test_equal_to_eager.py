"""The reference decoder gives the logits of eager, bit for bit: in each mode, by each route, with and without LoRA.

What a runner is compared with is a second decoder with the same weights and a cache of its own. Nothing ever traced,
captured or broke it up; it runs the batch as the dispatcher would pad it. Both write to their caches step by step.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from checks import same
from decoder import Decoder, ExampleBatch, build, example_batch
from torch import Tensor

from cgplan import (
    BatchDescriptor,
    CudagraphDispatcher,
    CUDAGraphMode,
    GraphRunner,
    Plan,
    build_plan,
    forward_context,
)
from cgplan.backends import GraphBackend
from cgplan.config import Config, Input, validate_config
from cgplan.runner.session import CaptureSession

pytestmark = pytest.mark.usefixtures("quiet_collector")

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
MODES = {
    mode.name: {mode.decode_mode(), mode.mixed_mode()} - {CUDAGraphMode.NONE}
    for mode in CUDAGraphMode
    if mode is not CUDAGraphMode.AUTO
}
ROUTES: dict[str, dict[str, Any]] = {
    "ops": {},
    "modules": {"splitting_modules": ["layers.*.self_attn"]},
}
# Routes are for segments: where there are none, one is as good as the other.
ROUTES_OF = [
    (mode, route)
    for mode, modes in MODES.items()
    for route in (ROUTES if PIECEWISE in modes else ["ops"])
]
BATCHES = {
    "no LoRA": 50,
    "a graph for each case": 25,
    "one graph for all cases": 25,
}  # of a route: 200 a mode, over both routes
NodesByKey = dict[tuple[CUDAGraphMode, BatchDescriptor], Any]
NODES: dict[tuple[str, ...], NodesByKey] = {}  # of the runners that were opened
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "head_dim": 16,
    "block_size": 4,
    "num_blocks": 64,
}
MAX_BLOCKS, MAX_REQS, MAX_LORAS = 6, 4, 2


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def configure(backend: GraphBackend, mode: str, route: str, lora: str) -> Config:
    rows, reqs = "num_tokens", "num_reqs"
    metadata = {
        "slot_mapping": Input(shape=(rows,), dtype="int64", pad=-1),
        "block_tables": Input(shape=(reqs, MAX_BLOCKS), dtype="int32", pad=0),
        "seq_lens": Input(shape=(reqs,), dtype="int32", pad=0),
        "query_start_loc": Input(shape=("num_reqs + 1",), dtype="int32", pad="last"),
    }
    if lora != "no LoRA":
        metadata["lora_ids"] = Input(shape=(rows,), dtype="int64", pad=-1)
    compilation = {
        "cudagraph_mode": mode,
        "cudagraph_capture_sizes": [1, 4, 16],
        **ROUTES[route],
    }
    each = lora == "a graph for each case"
    given = {
        "inputs": {
            name: Input(shape=(rows,), dtype="int64", pad=0) for name in ("input_ids", "positions")
        },
        "metadata": metadata,
        "compilation": {**compilation, "cudagraph_specialize_lora": each}
        if lora != "no LoRA"
        else compilation,
        "scheduler": {"max_num_seqs": MAX_REQS, "max_num_batched_tokens": 32},
        "device": backend.device.type,
    }
    if lora != "no LoRA":
        given["lora"] = {"max_loras": MAX_LORAS, "specialize_active_lora": each}
    return validate_config(given)


def decoders(backend: GraphBackend, lora: str) -> tuple[Decoder, Decoder]:
    """Two with the same weights, adapters and random caches."""
    dtype = (
        "bfloat16" if backend.device.type == "cuda" else "float32"
    )  # there its attention reads the pages in place
    max_loras = 0 if lora == "no LoRA" else MAX_LORAS
    with torch.device(backend.device):
        pair = [build(**SHAPE, dtype=dtype, max_loras=max_loras, lora_rank=4) for _ in range(2)]
    for cache, other in zip(*map(caches, pair), strict=True):
        other.copy_(cache.normal_())
    return pair[0], pair[1]


def caches(model: Decoder) -> list[Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("_cache")]


def open_runner(
    backend: GraphBackend, mode: str, route: str, lora: str
) -> tuple[GraphRunner, Decoder, Decoder]:
    config = configure(backend, mode, route, lora)
    model, other = decoders(backend, lora)
    runner = CaptureSession(build_plan(config), model, backend, config).run()
    NODES[backend.device.type, mode, route, lora] = {
        (record.mode, record.descriptor): record.nodes for record in runner.report.records
    }
    return runner, model, other


def nodes_of(backend: GraphBackend, mode: str, route: str, lora: str) -> NodesByKey:
    """Captured here where no test has done it."""
    given = (mode, route, lora)
    if (backend.device.type, *given) not in NODES:
        open_runner(backend, *given)[0].close()
    return NODES[backend.device.type, *given]


class Drawn:
    """A random batch: decode, prefill or mixed, with no, some or all requests on an adapter."""

    def __init__(self, choose: random.Random, has_lora: bool) -> None:
        kind, reqs = choose.choice(["decode", "prefill", "mixed"]), choose.randint(1, MAX_REQS)
        self.contexts = [0 if kind == "prefill" else choose.randint(0, 15) for _ in range(reqs)]
        self.queries = [1 if kind == "decode" else choose.randint(1, 5) for _ in range(reqs)]
        if kind == "mixed":
            self.queries[0] = 1
        self.seed = choose.randrange(1000)
        adapters = [choose.randint(-1, MAX_LORAS - 1) if has_lora else -1 for _ in range(reqs)]
        if choose.random() < 0.25:
            adapters = [-1] * reqs
        self.num_active_loras = len({*adapters} - {-1})
        self.lora_ids = [
            a for a, count in zip(adapters, self.queries, strict=True) for _ in range(count)
        ]

    def batch(
        self, model: Decoder, rows: int | None = None, reqs: int | None = None
    ) -> ExampleBatch:
        """The tensors, padded to that many rows and requests."""
        made = example_batch(
            model,
            self.contexts,
            self.queries,
            num_tokens=rows,
            num_reqs=reqs,
            max_blocks=MAX_BLOCKS,
            seed=self.seed,
        )
        if "lora_ids" in made.metadata:
            made.metadata["lora_ids"][: len(self.lora_ids)] = torch.tensor(self.lora_ids)
        return made

    def run_eagerly(self, model: Decoder, plan: Plan) -> Tensor:
        """The logits of the model's own code on the batch as it has to be padded, cut to the batch's rows."""
        rows, reqs, loras = sum(self.queries), len(self.queries), self.num_active_loras
        mode, key = CudagraphDispatcher(plan).dispatch(rows, rows == reqs, loras)
        batch = self.batch(model)
        if mode is CUDAGraphMode.NONE:
            key = BatchDescriptor(rows, reqs, rows == reqs, loras > 0, loras)
        else:
            batch = self.batch(
                model, key.num_tokens, key.num_reqs or min(key.num_tokens, plan.max_num_seqs)
            )
        with torch.no_grad(), forward_context(descriptor=key, metadata=batch.metadata):
            return model(batch.input_ids, batch.positions)[:rows]


def compare(runner: GraphRunner, model: Decoder, other: Decoder, drawn: Drawn) -> None:
    batch = drawn.batch(model)
    given = {"input_ids": batch.input_ids, "positions": batch.positions, **batch.metadata}
    found = runner(**given, num_active_loras=drawn.num_active_loras)
    same(found, drawn.run_eagerly(other, runner.plan))
    for cache, wanted in zip(caches(model), caches(other), strict=True):
        same(cache[:-1], wanted[:-1])  # the last block takes what padding rows write, in any order


@pytest.mark.parametrize("lora", list(BATCHES))
@pytest.mark.parametrize(("mode", "route"), ROUTES_OF)
def test_a_runner_gives_the_logits_of_eager(
    backend: GraphBackend, mode: str, route: str, lora: str
) -> None:
    runner, model, other = open_runner(backend, mode, route, lora)
    choose = random.Random(f"{mode} {route} {lora}")
    batches = BATCHES[lora] * (1 if PIECEWISE in MODES[mode] else 2)
    for step in range(batches):
        if (
            lora != "no LoRA" and step == batches // 2
        ):  # graphs serve an adapter that is loaded after the capture
            projection = model.layers[1].mlp.up_proj
            shapes = {
                "lora_A": (3, projection.weight.shape[1]),
                "lora_B": (projection.weight.shape[0], 3),
            }
            state = {
                f"layers.1.mlp.up_proj.{part}": torch.randn(shape) for part, shape in shapes.items()
            }
            model.load_lora(1, state)
            other.load_lora(1, state)
        compare(runner, model, other, Drawn(choose, has_lora=lora != "no LoRA"))
    replays = runner.stats.replays
    assert {key[0] for key in replays} == MODES[mode]
    assert sum(replays.values()) + sum(runner.stats.eager.values()) == batches
    cases = {descriptor.num_active_loras for _, descriptor in replays}
    if mode != "NONE":
        assert cases == {"no LoRA": {0}, "a graph for each case": {0, 1, 2}}.get(
            lora, {MAX_LORAS + 1}
        )
    runner.close()


@pytest.mark.parametrize("route", list(ROUTES))
def test_adapters_cost_nothing_where_there_are_none(backend: GraphBackend, route: str) -> None:
    """Graphs of batches without LoRA are those of a decoder that has no room for adapters."""
    without, both = (
        nodes_of(backend, "FULL_AND_PIECEWISE", route, lora)
        for lora in ("no LoRA", "a graph for each case")
    )
    assert {key: count for key, count in both.items() if not key[1].has_lora} == without
    adapted = {key: count for key, count in both.items() if key[1].has_lora}
    assert len(adapted) == 3 * len(without)
    assert all(
        count > without[mode, d._replace(has_lora=False, num_active_loras=0)]
        for (mode, d), count in adapted.items()
    )
