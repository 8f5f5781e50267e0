"""Programs as users write them, run without cgplan and with it, and compared step by step."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import cgplan
from cgplan.graphs import change_detector


@dataclass(frozen=True)
class Program:
    """What a user does, as a generator of all that is compared.

    Attributes:
        run: Takes ``graphed``, builds everything, and yields after each step.
        graphs: True: graphs have to serve some calls; False: none may; None: either is right.
    """

    name: str
    run: Callable[[Callable[..., Any]], Iterator[Any]]
    graphs: bool | None = None
    tolerance: float = 1e-3


def program(
    programs: list[Program], graphs: bool | None = None, tolerance: float = 1e-3
) -> Callable[..., Any]:
    """Register a generator function in a list, by its name."""

    def register(run: Callable[[Callable[..., Any]], Iterator[Any]]) -> Callable[..., Any]:
        programs.append(Program(run.__name__, run, graphs, tolerance))
        return run

    return register


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().cpu()
    if isinstance(value, Mapping):
        return {key: _kept(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_kept(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _kept(vars(value))
    return value


def _steps(
    run: Callable[[Callable[..., Any]], Iterator[Any]], wrap: Callable[..., Any]
) -> Iterator[Any]:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    try:
        for value in run(wrap):
            yield _kept(value)
    except Exception as error:
        yield type(error)


def _identity(model: Any = None, **options: Any) -> Any:
    return (lambda made: made) if model is None else model


def _compare(found: Any, wanted: Any, tolerance: float, where: str) -> None:
    if isinstance(wanted, Tensor):
        assert isinstance(found, Tensor), f"{where}: {found!r}"
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), where
        if wanted.is_floating_point() or wanted.is_complex():
            torch.testing.assert_close(
                found,
                wanted,
                rtol=tolerance,
                atol=1e-5,
                equal_nan=True,
                msg=lambda said: (
                    f"{where}: {found} != {wanted}: {said}"
                ),  # text only where it fails
            )
        else:
            assert torch.equal(found, wanted), f"{where}: {found} != {wanted}"
    elif isinstance(wanted, dict):
        assert isinstance(found, dict), f"{where}: {found!r}"
        assert list(found) == list(wanted), where
        for key, item in wanted.items():
            _compare(found[key], item, tolerance, f"{where}.{key}")
    elif isinstance(wanted, list):
        assert isinstance(found, list), f"{where}: {found!r}"
        assert len(found) == len(wanted), where
        for at, item in enumerate(wanted):
            _compare(found[at], item, tolerance, f"{where}.{at}")
    elif isinstance(wanted, float):
        assert found == wanted or abs(found - wanted) <= 1e-5 + tolerance * abs(wanted), (
            f"{where}: {found} != {wanted}"
        )
    else:
        assert found == wanted, f"{where}: {found!r} != {wanted!r}"


def check(case: Program, wrap: Callable[..., Any] = cgplan.graphed) -> None:
    """Assert that a program does with graphs what it does without."""
    made = list[Any]()

    def kept(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda model: kept(model, **options)
        made.append(wrap(model, **options))
        return made[-1]

    # Rotations, by which some calls pass before a change is seen, have tests of their own.
    every = 3 * (1 << 20,)
    with patch.multiple(change_detector, _WITH_WATCHER=every, _WITHOUT_WATCHER=every):
        wanted, found = list(_steps(case.run, _identity)), list(_steps(case.run, kept))
    assert not isinstance(wanted[-1], type), f"the program itself fails: {wanted[-1]}"
    for at, (one, other) in enumerate(zip(found, wanted, strict=False)):
        _compare(one, other, case.tolerance, f"step {at}")
    assert len(found) == len(wanted)
    if case.graphs is not None and all(isinstance(g, cgplan.Graphed) for g in made):
        replays = sum(
            sum(r.stats.replays.values()) for g in made for r in getattr(g, "runners", ())
        )
        assert (replays > 0) is case.graphs, f"{replays} replays"
