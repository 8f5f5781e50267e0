"""Breaks at modules by name come and go."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import re
import weakref
from typing import Any

import pytest
import torch
from checks import same
from pieces import Broken, capture, kinds, randn
from torch import nn

import cgplan
from cgplan import (
    ConfigError,
    CUDAGraphMode,
    GraphRunner,
    Input,
)
from cgplan.backends import GraphBackend
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
    breaks = break_at_modules(model, ["layers.*.mix", "layers.*.mix.inner"])
    assert breaks.names == ("layers.0.mix", "layers.0.mix.inner", "layers.1.mix", "layers.1.mix.inner")
    made, _ = capture(backend, lambda: model(x))
    assert [piece.name for piece in made.eager_pieces] == ["layers.0.mix", "layers.1.mix"]


def test_a_forward_that_the_user_replaced_comes_back(backend: GraphBackend) -> None:
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    model[1] = model[0]  # one module, two names
    own = model[0].forward = lambda x: x * 5
    breaks = break_at_modules(model, ["*"])
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
    x = randn(backend, 2, 6)
    assert kinds(capture(backend, functools.partial(model, x))[0]) == "ee"
    del runner
    gc.collect()
    assert kinds(capture(backend, functools.partial(model, x))[0]) == "Se"
    other.close()
    assert kinds(capture(backend, functools.partial(model, x))[0]) == "S"
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
    breaks = break_at_modules(model, ["0", "1"])
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(copy.deepcopy(model))):
        made, y = capture(backend, functools.partial(copied, x))
        assert made.num_eager_breaks == 0
        same(y, wanted)
        with torch.no_grad():
            copied[0].weight.zero_()
            copied[0].bias.zero_()
            same(copied(x), copied[2].bias.expand(2, 6))
    made, y = capture(backend, lambda: model(x))
    assert made.num_eager_breaks == len(breaks.names) == 2
    same(y, wanted)


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("layers.*.mixx", r"Did you mean layers\.\*\.mix"),
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
