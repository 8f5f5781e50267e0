"""Breaks at modules by name: in captures and looks alone, so the model stays as it is."""

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
from cgplan import ConfigError, GraphRunner, Input
from cgplan.backends import GraphBackend
from cgplan.piecewise.breaks import Breaks

pytestmark = pytest.mark.usefixtures("quiet_collector")


def broken(model: nn.Module, backend: GraphBackend, *patterns: str) -> functools.partial[Any]:
    """The model's forward, broken at modules."""
    return functools.partial(Breaks(model, patterns, (), backend.device.type).forward, model)


def test_breaks_at_modules_are_there_in_a_capture_alone(backend: GraphBackend) -> None:
    model = Broken().to(backend.device).eval()
    x = randn(backend, 4, 6)
    made, y = capture(
        backend, functools.partial(broken(model, backend, "layers.*.mix", "layers.1.*"), x)
    )
    assert kinds(made) == "eSee"
    assert [piece.name for piece in made.eager_pieces] == [
        "layers.0.mix",
        "layers.1.mix",
        "layers.1.out",
    ]
    x.add_(1)
    made.replay()
    with torch.no_grad():
        same(y, model(x))
    assert kinds(capture(backend, lambda: model(x))[0]) == "S"
    assert all("forward" not in vars(module) for module in model.modules())


def test_the_outer_of_two_matching_modules_is_the_piece(backend: GraphBackend) -> None:
    model = Broken().to(backend.device).eval()
    forward = broken(model, backend, "layers.*.mix", "layers.*.mix.inner")
    made, _ = capture(backend, functools.partial(forward, randn(backend, 4, 6)))
    assert [piece.name for piece in made.eager_pieces] == ["layers.0.mix", "layers.1.mix"]


def test_a_forward_that_the_user_replaced_comes_back(backend: GraphBackend) -> None:
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    model[1] = model[0]  # one module, two names
    own = model[0].forward = lambda x: x * 5
    x = randn(backend, 2, 3)
    made, y = capture(backend, functools.partial(broken(model, backend, "*"), x))
    assert [piece.name for piece in made.eager_pieces] == ["0", "0"]
    same(y, x * 5 * 5)
    assert model[0].forward is own


def test_a_forward_that_fails_leaves_no_breaks(backend: GraphBackend) -> None:
    model = Broken().to(backend.device).eval()
    with pytest.raises(RuntimeError):
        capture(
            backend, functools.partial(broken(model, backend, "layers.*.mix"), randn(backend, 4, 5))
        )
    assert all("forward" not in vars(module) for module in model.modules())


def by_modules(
    model: nn.Module, backend: GraphBackend, *patterns: str, sizes: Any = (2,)
) -> GraphRunner:
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


def test_runners_of_one_model_break_at_their_own_modules(backend: GraphBackend) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU()).to(backend.device)
    model[1].forward = nn.functional.gelu  # the user's
    x = randn(backend, 2, 6)
    with torch.no_grad():
        wanted = model(x)
    both, one = by_modules(model, backend, "0", "1"), by_modules(model, backend, "1")
    assert [runner.report.records[0].eager_pieces for runner in (both, one)] == [2, 1]
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        made, y = capture(backend, functools.partial(copied, x))
        assert len(made.eager_pieces) == 0
        same(y, wanted)
    same(both(input=x), wanted)
    same(one(input=x), wanted)
    model.runner = both  # a cycle: the model holds what breaks it
    gone = weakref.ref(model)
    del model, both, one, made, copied
    gc.collect()
    assert gone() is None


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
        assert [*Breaks(model, [pattern], (), "cpu").modules] == ["layers.0", "layers.1"]
        return
    with pytest.raises(ConfigError, match="no submodule matches") as caught:
        Breaks(model, ["layers.*.mix", pattern], (), "cpu")
    assert pattern in caught.value.message
    assert re.search(hint, caught.value.remedy)
