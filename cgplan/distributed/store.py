"""The ranks' connection to the common store, with an end to each wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

_SLICE = 0.1  # seconds between two looks at whether to wait on

_Question = tuple[Callable[..., Any], tuple[Any, ...], SimpleQueue[tuple[bool, Any]]]


class PatientStore:
    """A store whose questions are answered, or raise RuntimeError, within a time.

    torch's TCPStore waits without end for a keeper that stands still (a process that was stopped, a machine that is
    gone), in ``check`` above all. So a thread of its own asks. After a silence nothing is asked any more.

    Args:
        store: One connection; nobody else uses it.
        patience: Seconds.
        meanwhile: Called now and then while an answer is waited for; what it raises ends that.
    """

    def __init__(self, store: Any, patience: float, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._store, self._patience, self._meanwhile = store, patience, meanwhile
        self._questions: SimpleQueue[_Question | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_silent = False
        threading.Thread(target=self._answer, name="cgplan-store", daemon=True).start()

    @property
    def is_silent(self) -> bool:
        """Whether an answer did not come."""
        return self._is_silent

    def set(self, key: str, value: str) -> None:
        """Write a key."""
        self._ask(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        """Read a key that is there."""
        return bytes(self._ask(self._store.get, key))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these keys are there."""
        return bool(self._ask(self._store.check, list(keys)))

    def compare_set(self, key: str, expected: str, value: str) -> None:
        """Write a key if it holds what is expected; nothing, where that is empty."""
        self._ask(self._store.compare_set, key, expected, value)

    def delete_key(self, key: str) -> None:
        """Drop a key."""
        self._ask(self._store.delete_key, key)

    def close(self) -> None:
        """End the thread, once it has its answer."""
        self._questions.put(None)

    def _ask(self, question: Callable[..., Any], *args: Any) -> Any:
        answer: SimpleQueue[tuple[bool, Any]] = SimpleQueue()
        with self._lock:
            if self._is_silent:
                raise RuntimeError("it did not answer before")
            self._questions.put((question, args, answer))
            has_failed, value = self._waited(answer)
        if has_failed:
            raise value
        return value

    def _waited(self, answer: SimpleQueue[tuple[bool, Any]]) -> tuple[bool, Any]:
        for _ in range(max(1, round(self._patience / _SLICE))):  # no deadline: this process itself may have stood still
            with suppress(Empty):
                return answer.get(timeout=_SLICE)
            self._meanwhile()
        self._is_silent = True
        raise RuntimeError(f"no answer within {self._patience:g} s")

    def _answer(self) -> None:
        while (asked := self._questions.get()) is not None:
            question, args, answer = asked
            try:
                answer.put((False, question(*args)))
            except Exception as error:
                answer.put((True, error))
            del question, args, answer, asked


__all__ = ["PatientStore"]
