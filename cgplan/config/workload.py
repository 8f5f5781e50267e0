"""What the planner plans for: synthetic traffic, and what graphs may cost."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from cgplan.config.section import Section
from cgplan.config.values import Bytes, BytesToSpend, Count, CountOrZero, Length, SecondsToSpend


class TrafficConfig(Section):
    """Synthetic traffic: Poisson arrivals, lognormal lengths. A file of traffic on the command line wins over it."""

    request_rate: Annotated[float, Field(strict=True, ge=0.001, le=1e6)] = Field(
        description="Requests per second on average; the times between them are exponentially distributed."
    )
    num_requests: Annotated[int, Field(strict=True, ge=1, le=1 << 20)] = Field(
        default=10_000, description="Requests to simulate."
    )
    prompt_median: Length = Field(description="Tokens of a prompt: the median of a lognormal distribution.")
    prompt_p95: Length = Field(description="Tokens of a prompt: the 95th percentile.")
    output_median: Length = Field(description="Tokens generated for a request: the median of a lognormal distribution.")
    output_p95: Length = Field(description="Tokens generated for a request: the 95th percentile.")
    lora_share: Annotated[float, Field(strict=True, ge=0, le=1)] = Field(
        default=0.0, description="Share of the requests that use a LoRA adapter, from 0 to 1."
    )
    num_adapters: Count | None = Field(
        default=None,
        description="Distinct adapters among all requests, each as likely as the others. Absent: lora.max_loras.",
    )
    seed: CountOrZero = Field(default=0, description="Of the random numbers; equal seeds give equal traffic.")

    @model_validator(mode="after")
    def _percentiles_ascend(self) -> TrafficConfig:
        for name in ("prompt", "output"):
            median, p95 = getattr(self, f"{name}_median"), getattr(self, f"{name}_p95")
            if p95 < median:
                raise ValueError(f"{name}_p95 is {p95}, which is below {name}_median = {median}; exchange the two")
        return self


class BudgetConfig(Section):
    """What graphs may cost: bounds of the plan, and of the capture."""

    memory: BytesToSpend | None = Field(
        default=None,
        description="Device memory for all graphs together, their static buffers included: bytes, or with a unit (B, "
        "kB, MB, GB, KiB, MiB, GiB), as in `2GiB`. Absent: no bound.",
    )
    capture_time: SecondsToSpend | None = Field(
        default=None,
        description="Start-up time for all captures together, warm-ups included: seconds, or with a unit (ms, s, min), "
        "as in `30s`. Absent: no bound.",
    )
    max_graphs: Count | None = Field(
        default=None,
        description="Graphs at most. Without traffic to choose by, the largest sizes stay and those with which batches "
        "of all sizes are padded least. Absent: no bound.",
    )
    reserve: Bytes | None = Field(
        default=None,
        description="Device memory that a capture leaves free, in the units of `memory`. Absent: nothing is kept free.",
    )
