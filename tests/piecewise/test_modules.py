"""Breaks at modules by name come and go."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import random
import re
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from checks import same
from pieces import Broken, capture, kinds, randn
from torch import Tensor, nn

import cgplan
from cgplan import (
    BatchDescriptor,
    BreakableCUDAGraphWrapper,
    ConfigError,
    CUDAGraphMode,
    CUDAGraphWrapper,
    GraphRunner,
    Input,
    forward_context,
)
from cgplan.backends import GraphBackend
from cgplan.models import decoder
from cgplan.piecewise.breaks import break_at_modules

pytestmark = pytest.mark.usefixtures("quiet_collector")

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


def test_breaks_at_modules_come_and_go(backend: GraphBackend) -> None:
    model = Broken().to(backend.device).eval()
    x = randn(backend, 4, 6)
    breaks = break_at_modules(model, ["layers.*.mix", "layers.1.*"])
    assert breaks.names == ("layers.0.mix", "layers.1.mix", "layers.1.out")
    made, y = capture(backend, lambda: model(x))
    assert kinds(made) == "eSee"
    assert [piece.name for piece in made.eager_pieces] == list(breaks.names)
    x.add_(1)
    made.replay()
    with torch.no_grad():
        same(y, model(x))
    breaks.remove()
    breaks.remove()
    made, _ = capture(backend, lambda: model(x))
    assert kinds(made) == "S"
    assert all("forward" not in vars(module) for module in model.modules())


def test_the_outer_of_two_matching_modules_is_the_piece(backend: GraphBackend) -> None:
    model = Broken().to(backend.device).eval()
    x = randn(backend, 4, 6)
    break_at_modules(model, ["layers.*.mix", "layers.*.mix.inner"])
    made, _ = capture(backend, lambda: model(x))
    assert [piece.name for piece in made.eager_pieces] == ["layers.0.mix", "layers.1.mix"]


def test_a_forward_that_the_user_replaced_comes_back(backend: GraphBackend) -> None:
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    model[1] = model[0]  # one module, two names
    own = model[0].forward = lambda x: x * 5
    breaks = break_at_modules(model, "*")
    assert breaks.names == ("0",)
    x = randn(backend, 2, 3)
    made, y = capture(backend, lambda: model(x))
    assert made.num_eager_breaks == 2
    same(y, x * 5 * 5)
    breaks.remove()
    assert model[0].forward is own


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_handles_on_one_module_go_in_any_order(backend: GraphBackend, order: tuple[int, int]) -> None:
    model = Broken().to(backend.device).eval()
    own = model.layers[1].mix.forward = functools.partial(type(model.layers[1].mix).forward, model.layers[1].mix)
    handles = break_at_modules(model, ["layers.*.mix"]), break_at_modules(model, ["layers.1.*"])
    x = randn(backend, 4, 6)
    counts = []
    for handle in (None, *(handles[i] for i in order)):
        if handle is not None:
            handle.remove()
            handle.remove()
        counts.append(capture(backend, lambda: model(x))[0].num_eager_breaks)
    assert counts == [3, 2, 0]
    assert vars(model.layers[1].mix).pop("forward") is own
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_forward_that_was_put_over_a_break_stays(backend: GraphBackend) -> None:
    model, x = nn.Sequential(nn.ReLU()), randn(backend, 2, 3)
    breaks = break_at_modules(model, ["0"])
    under = model[0].forward
    over = model[0].forward = lambda x: under(x) + 1
    assert capture(backend, lambda: model(x))[0].num_eager_breaks == 1
    breaks.remove()
    assert model[0].forward is over
    made, y = capture(backend, lambda: model(x))
    assert made.num_eager_breaks == 0
    same(y, x.relu() + 1)


def by_modules(model: nn.Module, backend: GraphBackend, *patterns: str, sizes: Any = (2,)) -> GraphRunner:
    return cgplan.capture(
        model,
        {
            next(iter(inspect.signature(model.forward).parameters)): Input(
                shape=("num_tokens", 6), dtype="float32", pad=0
            )
        },
        compilation={
            "cudagraph_mode": "PIECEWISE",
            "cudagraph_capture_sizes": list(sizes),
            "splitting_modules": list(patterns),
        },
        device=backend.device.type,
    )


def test_a_runner_that_is_dropped_takes_its_breaks_along(backend: GraphBackend) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU()).to(backend.device)
    runner, other = by_modules(model, backend, "0", "1"), by_modules(model, backend, "1")
    del runner
    gc.collect()
    assert ["forward" in vars(module) for module in model] == [False, True]
    other.close()
    del other
    model.runner = by_modules(model, backend, "0")  # a cycle: the model holds what breaks it
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_copies_and_pickles_have_no_breaks(backend: GraphBackend) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)).to(backend.device)
    model[1].forward = nn.functional.gelu  # the user's, and under a break
    x = randn(backend, 2, 6)
    with torch.no_grad():
        wanted = model(x)
    break_at_modules(model, ["0", "1"])
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(copy.deepcopy(model))):
        made, y = capture(backend, functools.partial(copied, x))
        assert made.num_eager_breaks == 0
        same(y, wanted)
        with torch.no_grad():
            copied[0].weight.zero_()
            copied[0].bias.zero_()
            same(copied(x), copied[2].bias.expand(2, 6))
    made, y = capture(backend, lambda: model(x))
    assert made.num_eager_breaks == 2
    same(y, wanted)


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("layers.*.mixx", r"Did you mean layers\.\*\.mix"),
        ("layer.*.mix", r"layers\.\*\.mix"),
        ("layers.mix", r"layers\.\*\.mix"),
        ("*.mix", "layers"),
        ("layers.*", None),
        ("zzzzzz", r"The model has layers, layers\.\*, layers\.\*\.mix"),
    ],
)
def test_a_pattern_that_matches_nothing(pattern: str, hint: str | None) -> None:
    model = Broken()
    if hint is None:  # `*` stands for one component, no more
        assert break_at_modules(model, [pattern]).names == ("layers.0", "layers.1")
        return
    with pytest.raises(ConfigError, match="no submodule matches") as caught:
        break_at_modules(model, ["layers.*.mix", pattern])
    assert pattern in caught.value.message
    assert re.search(hint, caught.value.remedy)
    assert all("forward" not in vars(module) for module in model.modules()), "nothing is changed"


def test_breaks_need_a_module() -> None:
    with pytest.raises(ConfigError, match="the model is a function"):
        break_at_modules(lambda x: x, ["*"])  # type: ignore[arg-type]


BLOCKS, REQS = 6, 4


SMALL: dict[str, Any] = {"vocab_size": 97, "hidden_size": 48, "head_dim": 16, "block_size": 4, "num_blocks": 64}


class Drawn(NamedTuple):
    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    batch: decoder.ExampleBatch


def draw(model: decoder.Decoder, chooser: random.Random) -> Drawn:
    """A decode, prefill or mixed batch, padded to a capture size; decode batches run by FULL graphs."""
    kind, reqs = chooser.choice(["decode", "prefill", "mixed"]), chooser.randint(1, REQS)
    contexts = [0 if kind == "prefill" else chooser.randint(0, 12) for _ in range(reqs)]
    queries = [1 if kind == "decode" else chooser.randint(1, 6) for _ in range(reqs)]
    if kind == "mixed":
        queries[0] = 1
    used, seed = sum(queries), chooser.randrange(1000)
    if kind == "decode":
        size = 2 if used <= 2 else 4
        key = BatchDescriptor(size, size, uniform=True)
    else:
        size = 8 if used <= 8 else 24
        key = BatchDescriptor(size)
    padded_reqs = key.num_reqs or REQS
    batch = decoder.example_batch(
        model, contexts, queries, num_tokens=size, num_reqs=padded_reqs, max_blocks=BLOCKS, seed=seed
    )
    return Drawn(FULL if kind == "decode" else PIECEWISE, key, batch)


def caches(model: decoder.Decoder) -> list[Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("_cache")]


def fill(static: decoder.ExampleBatch, batch: decoder.ExampleBatch) -> None:
    static.input_ids.copy_(batch.input_ids)
    static.positions.copy_(batch.positions)
    for name, tensor in batch.metadata.items():
        static.metadata[name].copy_(tensor)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.gpu)])
def test_the_decoder_with_its_attention_broken_out(backend: GraphBackend, dtype: str) -> None:
    """FULL graphs for decode, segments for prefill and mixed batches, one pool: logits and caches as eagerly."""
    with torch.device(backend.device):
        model = decoder.build(**SMALL, num_layers=3, dtype=dtype)
    chooser = random.Random(7)
    for cache in caches(model):
        cache.normal_()
    pool = backend.new_pool()
    breaks = break_at_modules(model, ["layers.*.self_attn"])
    piecewise = BreakableCUDAGraphWrapper(model, backend=backend, pool=pool)
    both = CUDAGraphWrapper(piecewise, FULL, backend=backend, pool=pool)
    statics: dict[BatchDescriptor, decoder.ExampleBatch] = {}
    modes: list[CUDAGraphMode] = []
    for _ in range(30):
        mode, key, batch = draw(model, chooser)
        static = statics.setdefault(key, batch)
        fill(static, batch)
        before = [cache.clone() for cache in caches(model)]
        with torch.no_grad(), forward_context(descriptor=key, metadata=batch.metadata):
            wanted = model(batch.input_ids, batch.positions)
        written = [cache.clone() for cache in caches(model)]
        for cache, value in zip(caches(model), before, strict=True):
            cache.copy_(value)
        with torch.no_grad(), forward_context(mode, key, static.metadata):
            found = both(static.input_ids, static.positions)
        same(found, wanted)
        for cache, value in zip(caches(model), written, strict=True):
            same(cache[:-1], value[:-1])  # the last block takes what padding rows write, in any order
        modes.append(mode)
    assert set(modes) == {FULL, PIECEWISE}
    assert len(modes) - len(statics) > 20, "most batches were replays"
    for entry in piecewise.entries.values():
        assert (len(entry.segments), entry.eager_pieces) == (4, 3)
    both.reset()
    piecewise.reset()
    breaks.remove()
