"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cgplan.backends import GraphBackend, select_backend


def pytest_configure() -> None:
    """Threads for the cores that a worker of pytest-xdist has to itself: more would only wait for one another."""
    os.environ["CGPLAN_CACHE_DIR"] = ""  # no test gets what another one left
    gc.freeze()  # torch and what it brought: collecting the tests collects garbage too
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))


def _work_unit(nodeid: str) -> str:
    """What one worker runs, one after the other: a file's tests, which share fixtures; and all tests that start ranks,
    so that no more ranks run than one test needs, and none sees the shared memory of another one's.
    """
    file = nodeid.split("::")[0]
    return "ranks" if file.startswith("tests/ranks/") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files to workers as ``--dist loadfile`` does it, but for the ranks."""
    from xdist.scheduler import LoadScopeScheduling

    class InUnits(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _work_unit(nodeid)

    return InUnits(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest work unit first; and what needs a GPU is skipped where torch sees none."""
    items.sort(key=lambda item: _work_unit(item.nodeid) != "ranks")
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


@pytest.fixture(autouse=True)
def _frozen_heap() -> None:
    """All that is there before a test kept out of its garbage collections: with torch and the tests in memory each
    takes a third of a second, and each capture starts with one. Frozen again for each test: tests import as they go.
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
def fresh_dynamo(quiet_collector: None) -> None:
    """No traces of the test before."""
    torch._dynamo.reset()


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
