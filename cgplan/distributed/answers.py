"""What ranks bring to the end of a step, as it goes from one to all."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from cgplan.distributed.watch import spoken
from cgplan.errors import RankFailedError


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank brings to the end of a step. ``induced``: it failed because another one had."""

    step: str
    value: Any
    error: str = ""
    remedy: str = ""
    induced: bool = False


def packed(step: str, value: Any, error: BaseException | None) -> tuple[bytes, BaseException | None]:
    """What a rank brings to a step, and the error that it brings: a value that cannot be sent is one, too."""
    if error is None:
        try:
            return pickle.dumps(Answer(step, value)), None
        except Exception as raised:  # of the value's own class
            error = raised
    induced = isinstance(error, RankFailedError)
    return pickle.dumps(Answer(step, None, spoken(error), getattr(error, "remedy", ""), induced)), error


__all__ = ["Answer", "packed"]
