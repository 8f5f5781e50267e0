"""Traffic: how often each step runs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from cgplan.config.schema import Record, first_problem
from cgplan.errors import TrafficError
from cgplan.planning import Plan
from cgplan.units import format_microseconds, grouped

MOST_BATCHED_TOKENS = 1 << 20  # the largest bound that a configuration may state


class StepShape(NamedTuple):
    """The batch of a step, unpadded."""

    num_tokens: int
    num_reqs: int
    uniform: bool = False
    num_active_loras: int = 0


class Percentiles(Record):
    p50: float
    p99: float

    @classmethod
    def of(cls, nanoseconds: Iterable[tuple[float, int]]) -> Percentiles:
        """Of times and how often each came."""
        times, counts = zip(*sorted(nanoseconds), strict=True)
        ends = list(accumulate(counts))
        half = bisect_left(ends, 0.5 * ends[-1])
        most = bisect_left(ends, 0.99 * ends[-1])
        return cls(
            p50=times[half] / 1000,
            p99=times[most] / 1000,
        )


class Service(Record):
    """What simulated requests get.

    Attributes:
        step_us, decode_us: All steps, and those of uniform decode (None: there is none).
        ttft_us: From the arrival of a request to its first token.
        tpot_us: Between two tokens of a request, its mean; None: no request has two.
        tokens_per_s: Generated tokens, from the first arrival to the last token.
        preempted: Requests that began again for lack of KV cache.
        unmeasured: Share of the steps that are larger than measured ones.
    """

    step_us: Percentiles
    decode_us: Percentiles | None
    ttft_us: Percentiles
    tpot_us: Percentiles | None
    tokens_per_s: float
    preempted: int = 0
    unmeasured: float = 0.0


class Goal(Record):
    """One part of an SLO: ``tpot_p99=30ms``."""

    name: str
    microseconds: float

    def of(self, service: Service) -> float | None:
        """Microseconds that it bounds; None where no request has them."""
        what, percentile = self.name.split("_")
        found = getattr(service, f"{what}_us")
        return found and float(getattr(found, percentile))

    def __str__(self) -> str:
        return f"{self.name}={format_microseconds(self.microseconds)}"


class Traffic(Record):
    """A weighted histogram of steps.

    Attributes:
        histogram: (shape, weight), ascending, each shape once; weights are above 0, in proportion
            to the number of steps.
        notes: Assumptions, and what was left out of the source.
        warnings: Why a plan for it is a bad one.
        apart: FULL graphs run uniform decode alone, and PIECEWISE ones the rest alone.
        inputs: ``Plan.fixed_inputs`` of the runner that counted; None: not known.
    """

    kind: Literal["traffic"] = "traffic"
    histogram: tuple[tuple[StepShape, float], ...]
    source: str
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    apart: bool = False
    service: Service | None = None
    inputs: str | None = None

    @classmethod
    def of(
        cls,
        counts: Mapping[StepShape, float] | Iterable[tuple[StepShape, float]],
        source: str,
        notes: Iterable[str] = (),
        warnings: Iterable[str] = (),
        **others: Any,
    ) -> Traffic:
        """Counts of equal shapes are added up.

        Raises TrafficError if none is above 0, one is negative or not finite, or a shape is
        impossible.
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
            if count:
                total[shape] = total.get(shape, 0.0) + count
        if not total:
            raise TrafficError(
                f"{source}: no batch with a count above 0",
                remedy="Give traffic with a batch in it; of a server, once it served requests.",
            )
        return cls(
            histogram=tuple(sorted(total.items())),
            source=source,
            notes=tuple(notes),
            warnings=tuple(warnings),
            **others,
        )

    @classmethod
    def from_json(cls, text: str) -> Traffic:
        """From ``model_dump_json``. Raises TrafficError for other text."""
        try:
            read = cls.model_validate_json(text)
        except ValidationError as error:
            raise TrafficError(
                f"not saved traffic: {first_problem(error)}",
                remedy="Give a file that cgplan saved, as it was saved.",
            ) from None
        return cls.of(
            read.histogram,
            read.source,
            read.notes,
            read.warnings,
            inputs=read.inputs,
        )

    @cached_property
    def columns(self) -> tuple[Any, Any]:
        """A StepShape of arrays, and the weights."""
        import numpy as np  # slow, and most commands do without

        rows = [(*shape, weight) for shape, weight in self.histogram]
        tokens, reqs, uniform, loras, weights = np.array(rows, dtype=np.float64).T
        return StepShape(tokens, reqs, uniform > 0, loras), weights

    @cached_property
    def total(self) -> float:
        return sum([weight for _, weight in self.histogram])

    @classmethod
    def mixed(cls, parts: Sequence[tuple[Traffic, float]]) -> Traffic:
        """Several kinds of traffic; their weights are shares of the steps."""
        if len(parts) == 1:
            return parts[0][0]
        steps = sum(part.total for part, _ in parts)
        share = steps / sum(weight for _, weight in parts)
        counts = []
        notes: dict[str, None] = {}
        warnings: dict[str, None] = {}
        for part, weight in parts:
            for shape, count in part.histogram:
                scaled = count * weight * share / part.total
                counts.append((shape, scaled))
            notes |= dict.fromkeys(part.notes)
            warnings |= dict.fromkeys(part.warnings)
        source = " and ".join(part.source for part, _ in parts)
        first, _ = parts[0]
        return cls.of(
            counts,
            source,
            notes,
            warnings,
            apart=first.apart,
        )

    def decode_p99(self) -> Traffic | None:
        """Steps of uniform decode of the least size that 99% of them do not exceed, if there are
        any.
        """
        steps = [(shape, weight) for shape, weight in self.histogram if shape.uniform]
        steps.sort(key=lambda step: step[0].num_tokens)
        left = 0.99 * sum(weight for _, weight in steps)
        for shape, weight in steps:
            left -= weight
            if left <= 0:
                source = f"p99 of decode ({shape.num_tokens} tokens) of {self.source}"
                return Traffic.of({shape: 1.0}, source, apart=self.apart)
        return None

    def unseen(self, plan: Plan) -> Traffic:
        """Batches evenly in log size, up to ``max_num_seqs`` requests of the plan, with as many
        steps of each kind (uniform or mixed, LoRA case) as there are here.
        """
        kinds = grouped([(shape[2:], weight) for shape, weight in self.histogram])
        q = plan.query_len
        most = max(min(plan.max_num_seqs, plan.max_num_batched_tokens // q), 1)
        sizes = range(1, most + 1)
        harmonic = sum([1 / reqs for reqs in sizes])
        counts = {}
        for kind, weights in kinds.items():
            weight = sum(weights)
            for reqs in sizes:
                shape = StepShape(q * reqs, reqs, *kind)
                counts[shape] = weight / reqs / harmonic
        source = f"batches of 1 to {most} requests, evenly in log size"
        return Traffic.of(counts, source, apart=self.apart)


class SizeCounts(NamedTuple):
    """Batches by their sizes in several dimensions."""

    names: tuple[str, ...]
    counts: Mapping[tuple[int, ...], int]  # ascending, above 0
    beyond: int  # batches above the largest size of a dimension
    source: str
    warnings: tuple[str, ...] = ()
