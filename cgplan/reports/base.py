"""What all records are made of."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """A frozen value that refuses fields it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Timing(Record):
    """Microseconds over repeated calls."""

    median: float
    p99: float
