"""Traffic: how often which batch is run. What the planner plans for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from cgplan.errors import TrafficError

MOST_BATCHED_TOKENS = 1 << 20  # the largest bound that a configuration may state
MOST_WEIGHT = 1e18  # sums of times and weights stay finite


class Batch(NamedTuple):
    """What the planner knows of one step: its size in tokens and requests, and the kind of graph that could run it."""

    num_tokens: int
    num_reqs: int
    uniform: bool = False
    num_active_loras: int = 0


class Traffic(BaseModel):
    """A weighted histogram of batches.

    Attributes:
        histogram: (batch, weight), ascending, each batch once, weights above 0. A weight is a number of steps, or any
            figure in proportion to it.
        source: Where it came from, in words.
        notes: What was assumed or left out on the way.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["traffic"] = "traffic"
    histogram: tuple[tuple[Batch, float], ...]
    source: str
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, counts: Mapping[Batch, float] | Iterable[tuple[Batch, float]], source: str, notes: Iterable[str] = ()
    ) -> Traffic:
        """Traffic from counts; those of equal batches are added up, zeros are left out.

        Raises:
            TrafficError: nothing is left, a count is negative or not finite, or a batch cannot be (no token, or fewer
                tokens than requests).
        """
        total: dict[Batch, float] = {}
        for batch, count in counts.items() if isinstance(counts, Mapping) else counts:
            _check(batch, count)
            if count > 0:
                total[batch] = total.get(batch, 0.0) + count
        if not total:
            raise TrafficError(f"{source}: no batch with a count above 0", remedy="Give traffic with a batch in it.")
        return cls(histogram=tuple(sorted(total.items())), source=source, notes=tuple(notes))

    @classmethod
    def from_json(cls, text: str) -> Traffic:
        """Traffic from its JSON form (``model_dump_json``). Raises TrafficError for anything else."""
        try:
            read = cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise TrafficError(
                f"not saved traffic: {where + ': ' if where else ''}{first['msg']}",
                remedy="Give a file that cgplan saved, as it was saved.",
            ) from None
        return cls.of(read.histogram, read.source, read.notes)

    @property
    def total(self) -> float:
        """Sum of all weights: the number of steps, where weights are counts."""
        return sum(weight for _, weight in self.histogram)

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest batch."""
        return max(batch.num_tokens for batch, _ in self.histogram)

    def by_tokens(self, **fields: Any) -> dict[int, float]:
        """Weight by number of tokens, ascending, of the batches whose fields have these values."""
        found: dict[int, float] = {}
        for batch, weight in self.histogram:
            if all(getattr(batch, name) == value for name, value in fields.items()):
                found[batch.num_tokens] = found.get(batch.num_tokens, 0.0) + weight
        return found


def _check(batch: Batch, count: float) -> None:
    if not 0 <= count <= MOST_WEIGHT:
        raise TrafficError(
            f"{batch} has count {count}", remedy=f"A count is a number from 0 up, to {MOST_WEIGHT:.0e} at most."
        )
    if batch.num_tokens > MOST_BATCHED_TOKENS:
        raise TrafficError(
            f"a batch of {batch.num_tokens} tokens is too large",
            remedy=f"At most {MOST_BATCHED_TOKENS} tokens are allowed.",
        )
    if batch.num_reqs < 1 or batch.num_tokens < batch.num_reqs or batch.num_active_loras < 0:
        raise TrafficError(
            f"{batch} cannot be a batch",
            remedy="A batch has at least 1 request, and at least 1 token for each request.",
        )
