"""The collector while graphs are captured: held still by whoever is first, let go by whoever is last."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest

from cgplan.backends import quiet
from cgplan.backends.quiet import collector_quiet

pytestmark = pytest.mark.usefixtures("collector_as_users_have_it")


def test_blocks_stand_inside_each_other() -> None:
    with collector_quiet():
        with collector_quiet():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_quiet():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_error_lets_it_go() -> None:
    with pytest.raises(ValueError, match="inside"), collector_quiet():
        raise ValueError("inside")
    assert gc.isenabled()


def in_another_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_blocks_that_begin_at_once_leave_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread begins while the first one collects, and ends after it: both find no block open."""
    first_may_end, second_has_begun = threading.Event(), threading.Event()
    collect, threads = gc.collect, list[threading.Thread]()

    def second() -> None:
        with collector_quiet():
            second_has_begun.set()
            assert first_may_end.wait(60)

    def collecting(*_: int) -> int:
        if not threads:
            threads.append(threading.Thread(target=second))
            threads[0].start()
            assert second_has_begun.wait(60)
        return collect()

    monkeypatch.setattr(quiet.gc, "collect", collecting)
    with collector_quiet():
        assert not gc.isenabled()
    assert not gc.isenabled(), "the second block is still open"
    first_may_end.set()
    threads[0].join()
    assert gc.isenabled()


def test_a_destructor_that_the_collection_runs_may_open_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may even wait for another thread that does: nothing is locked meanwhile."""
    collect, ran = gc.collect, list[bool]()

    def other() -> None:
        with collector_quiet():
            ran.append(gc.isenabled())

    def collecting(*_: int) -> int:
        if not ran:
            ran.append(True)
            in_another_thread(other)
        return collect()

    monkeypatch.setattr(quiet.gc, "collect", collecting)
    with collector_quiet():
        assert ran == [True, False]
    assert gc.isenabled()
