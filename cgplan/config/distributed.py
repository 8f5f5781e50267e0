"""Several processes: what ranks wait for, and what they keep for one another."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cgplan.config.section import Section
from cgplan.config.values import Bytes, Count, Flag, Seconds


class DistributedConfig(Section):
    """Several processes under torchrun, one rank each; without torchrun nothing of it is used."""

    timeout: Annotated[Seconds, Field(gt=0)] = Field(
        default=60.0,
        description="How long ranks wait for one another, with a unit as in `30s`: at the start, at each common step, "
        "and for a rank that has stopped answering.",
    )
    all_reduce_max_size: Bytes = Field(
        default=8 << 20,
        description="Largest tensor that the custom and symm_mem all-reduce take, in the units of `budget.memory`; "
        "larger ones go to NCCL. Two staging buffers of this size are kept on each rank.",
    )
    table_rows: Count = Field(
        default=1 << 14,
        description="Rows of the device pointer table: captured all-reduces at most, in all graphs of a runner.",
    )
    data_parallel_sync: Flag = Field(
        default=False,
        description="Before each batch ranks agree on one graph, by a small all-reduce: the largest padded size and "
        "the weakest mode (`cgplan.distributed.in_step`). Needed where ranks run different batches and exchange data "
        "inside.",
    )
