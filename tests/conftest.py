"""Fixtures that several test files share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from cgplan.graphs import GraphBackend, select_backend


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where torch sees none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


@pytest.fixture(autouse=True)
def _frozen_heap() -> None:
    """All that is there before a test kept out of its garbage collections: with torch and the tests in memory each
    takes a third of a second, and each capture starts with one. Frozen anew for each test: tests import as they go.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def quiet_collector() -> Iterator[None]:
    """The collector off but where it is asked to collect; what the module leaves behind is collected after it."""
    gc.collect()
    gc.disable()
    gc.freeze()  # fixtures of the module capture before its first test
    yield
    gc.unfreeze()
    gc.enable()


@pytest.fixture
def collector_as_users_have_it(quiet_collector: None) -> Iterator[None]:
    """The collector on and nothing frozen, for tests of what sessions do with it."""
    gc.unfreeze()
    gc.enable()
    yield
    gc.disable()
    gc.freeze()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Iterator[GraphBackend]:
    """The tape and CUDA, one after the other: the contract is the same."""
    torch.manual_seed(0)
    yield select_backend(request.param)
    gc.collect()  # an exception that the test held may still hold captured tensors
    if request.param == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
