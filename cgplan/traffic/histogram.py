"""Traffic: how often which step is run. The planner plans for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import ValidationError

from cgplan.config.messages import first_problem
from cgplan.errors import TrafficError
from cgplan.planning import Plan
from cgplan.planning.costs import Record

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MOST_BATCHED_TOKENS = 1 << 20  # the largest bound that a configuration may state


class StepShape(NamedTuple):
    """Size of a step's batch in tokens and requests, and the kind of graph that could run it."""

    num_tokens: int
    num_reqs: int
    uniform: bool = False
    num_active_loras: int = 0


class Traffic(Record):
    """A weighted histogram of steps.

    Attributes:
        histogram: (shape, weight), ascending, each shape once, weights above 0. A weight is a
            number of steps, or any figure in proportion to it.
        source: Where it came from, in words.
        notes: Assumptions, and parts of the source that were left out.
        warnings: What makes a plan for it a bad one, such as a server that cannot keep up.
        apart: Whether FULL graphs run uniform decode alone, and PIECEWISE ones the other batches
            alone, as in SGLang.
    """

    kind: Literal["traffic"] = "traffic"
    histogram: tuple[tuple[StepShape, float], ...]
    source: str
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    apart: bool = False

    @classmethod
    def of(
        cls,
        counts: Mapping[StepShape, float] | Iterable[tuple[StepShape, float]],
        source: str,
        notes: Iterable[str] = (),
        warnings: Iterable[str] = (),
    ) -> Traffic:
        """Traffic from counts; those of equal shapes are added up, zeros are left out.

        Raises:
            TrafficError: nothing is left, a count is negative or not finite, or a shape cannot be
                (no token, or fewer tokens than requests).
        """
        total: dict[StepShape, float] = {}
        pairs = counts.items() if isinstance(counts, Mapping) else counts
        for shape, count in pairs:
            can_be = 1 <= shape.num_reqs <= shape.num_tokens
            if not can_be or not 0 <= count < math.inf:
                raise TrafficError(
                    f"{source}: {count} batches of {shape.num_tokens} tokens and {shape.num_reqs} "
                    "requests cannot be",
                    remedy="A batch has at least 1 request, and at least 1 token for each; a "
                    "count is 0 or more.",
                )
            if count > 0:
                total[shape] = total.get(shape, 0.0) + count
        if not total:
            raise TrafficError(
                f"{source}: no batch with a count above 0",
                remedy="Give traffic with a batch in it.",
            )
        histogram = tuple(sorted(total.items()))
        return cls(
            histogram=histogram,
            source=source,
            notes=tuple(notes),
            warnings=tuple(warnings),
        )

    @classmethod
    def from_json(cls, text: str) -> Traffic:
        """Traffic from its JSON form (``model_dump_json``). Raises TrafficError for anything
        else.
        """
        try:
            read = cls.model_validate_json(text)
        except ValidationError as error:
            remedy = "Give a file that cgplan saved, as it was saved."
            raise TrafficError(
                f"not saved traffic: {first_problem(error)}", remedy=remedy
            ) from None
        return cls.of(read.histogram, read.source, read.notes, read.warnings)

    @cached_property
    def columns(self) -> npt.NDArray[np.float64]:
        """Tokens, requests, whether uniform, adapters and weight of each shape: [5, shapes]."""
        # it takes longer to import than all of planning, which most commands do without
        import numpy as np

        rows = [(*shape, weight) for shape, weight in self.histogram]
        return np.array(rows, dtype=np.float64).T

    @cached_property
    def total(self) -> float:
        """Sum of all weights: the number of steps, where weights are counts."""
        weights: Iterable[float] = map(itemgetter(1), self.histogram)
        return sum(weights)

    @classmethod
    def mixed(cls, parts: Sequence[tuple[Traffic, float]]) -> Traffic:
        """Traffic of several kinds: each has its weight as a share of the steps, however many it
        counts.
        """
        if len(parts) == 1:
            return parts[0][0]
        steps, weights = 0.0, 0.0
        for part, weight in parts:
            steps += part.total
            weights += weight
        share = steps / weights
        counts: list[tuple[StepShape, float]] = []
        notes: dict[str, None] = {}
        warnings: dict[str, None] = {}
        for part, weight in parts:
            for shape, count in part.histogram:
                counts.append((shape, count * weight * share / part.total))
            notes |= dict.fromkeys(part.notes)
            warnings |= dict.fromkeys(part.warnings)
        source = " and ".join(part.source for part, _ in parts)
        made = cls.of(counts, source, notes, warnings)
        return made.model_copy(update={"apart": parts[0][0].apart})

    def unseen(self, plan: Plan) -> Traffic:
        """Batches that this traffic need not show: spread evenly in log size, up to
        ``max_num_seqs`` requests of the plan, in as many steps of each kind (uniform decode or
        mixed, LoRA case) as there are here.
        """
        shares: dict[tuple[bool, int], float] = {}
        for shape, weight in self.histogram:
            kind = shape.uniform, shape.num_active_loras
            shares[kind] = shares.get(kind, 0.0) + weight
        q = plan.query_len
        most = max(min(plan.max_num_seqs, plan.max_num_batched_tokens // q), 1)
        harmonic = sum(1 / reqs for reqs in range(1, most + 1))
        counts: dict[StepShape, float] = {}
        for (uniform, loras), weight in shares.items():
            for reqs in range(1, most + 1):
                counts[StepShape(q * reqs, reqs, uniform, loras)] = weight / reqs / harmonic
        made = Traffic.of(counts, f"batches of 1 to {most} requests, evenly in log size")
        return made.model_copy(update={"apart": self.apart})


class StepCounts:
    """Counts of steps from a source that may leave out all but their tokens; the rest is guessed
    for a plan's batches.

    Attributes:
        counts: Steps of each shape.
    """

    def __init__(self, plan: Plan) -> None:
        self.counts: dict[StepShape, float] = {}
        self._query_len, self._max_num_seqs = plan.query_len, plan.max_num_seqs
        self._without_reqs = self._without_loras = False
        self._steps = self._tokens = self._uniform = 0  # steps of which ``uniform`` was guessed

    def add(
        self,
        num_tokens: int,
        count: int,
        *,
        num_reqs: int | None = None,
        uniform: bool | None = None,
        num_active_loras: int | None = None,
    ) -> None:
        """Count steps; fields that are None are guessed."""
        q, most = self._query_len, self._max_num_seqs
        if uniform is None:
            if num_reqs:
                uniform = num_tokens == q * num_reqs
            else:
                uniform = num_tokens % q == 0 and num_tokens <= q * most
            self._steps += count
            self._tokens += count * num_tokens
            self._uniform += count * uniform
        if num_reqs is None:
            num_reqs = max(num_tokens // q, 1) if uniform else min(num_tokens, most)
            self._without_reqs = True
        if num_active_loras is None:
            self._without_loras = True
        shape = StepShape(num_tokens, num_reqs, uniform, num_active_loras or 0)
        self.counts[shape] = self.counts.get(shape, 0) + count

    def notes(self) -> Iterator[str]:
        """A sentence for each field that was guessed; how many steps depend on the guess that they
        are uniform.
        """
        if self._steps:
            yield (
                f"uniform decode was guessed for {self._steps:,} steps with {self._tokens:,} "
                "tokens: a batch counts as uniform if its tokens are a multiple of the query "
                f"length, for at most max_num_seqs requests; {self._uniform:,} of these steps do"
            )
        if self._without_reqs:
            yield (
                "requests of a batch were guessed: tokens / query length of a uniform one, else "
                "one for each token, at most max_num_seqs"
            )
        if self._without_loras:
            yield "the source names no LoRA adapters: batches count as using none"


class SizeCounts(NamedTuple):
    """Counts of batches by their sizes in several dimensions."""

    names: tuple[str, ...]
    counts: Mapping[tuple[int, ...], int]  # ascending, above 0
    beyond: int  # batches above the largest size of a dimension
    source: str  # in words
