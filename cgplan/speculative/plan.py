"""The plan of speculative decoding, in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cgplan.config import Config, Input, ModelConfig
from cgplan.errors import ConfigError, InputError
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.planning import Plan, build_plan
from cgplan.planning.build import refuse_auto
from cgplan.reports.layout import (
    Column,
    Grid,
    TextColumn,
    describe_sizes,
    plain_text,
)

INPUTS = ("input_ids", "positions")
METADATA = ("slot_mapping", "block_tables", "seq_lens", "query_start_loc")


@dataclass(frozen=True)
class SpecPlan:
    """The graphs of speculative decoding, in parts of one pool.

    ``target`` and ``draft`` run mixed batches, ``verify k=3`` 4 tokens a request, ``propose k=3``
    3 steps of the draft.

    ``parts`` are in capture order; ``num_reqs`` have graphs for decoding.
    """

    parts: Mapping[str, Plan]
    configs: Mapping[str, Config]
    draft_tokens: tuple[int, ...]
    num_reqs: tuple[int, ...]

    @property
    def keys(self) -> tuple[tuple[str, CUDAGraphMode, BatchDescriptor], ...]:
        """(part, runtime mode, descriptor) of each graph, in capture order."""
        return tuple((name, *key) for name, plan in self.parts.items() for key in plan.keys)

    def __str__(self) -> str:
        table = Grid(
            self.parts.items(),
            TextColumn("part", "0"),
            TextColumn("mode", "1.mode"),
            Column(
                "tokens a request",
                lambda row: row[1].query_len if row[0].startswith("verify") else None,
            ),
            Column("graphs", lambda row: len(row[1].keys)),
            TextColumn("sizes", "1.capture_sizes", describe_sizes),
        )
        return f"{plain_text(table)}\n\n{len(self.keys)} graphs in one pool"


def plan_speculation(config: Config, draft_tokens: Sequence[int] | None = None) -> SpecPlan:
    """Plan speculative decoding; ``draft_tokens`` are more numbers, up to the configuration's.

    Decoding is captured if uniform decode has FULL graphs, for as many requests as the sizes hold.

    Raises:
        ConfigError: mode AUTO, no draft tokens, LoRA, several pools, or an unknown input.
        InputError: ``draft_tokens`` out of range.
        PlanError: as build_plan.
    """
    _check(config)
    most = config.speculative.num_speculative_tokens
    numbers = sorted({most, *(draft_tokens or ())}, reverse=True)
    for number in numbers:
        check_draft_tokens(number, range(1, most + 1))
    plan = build_plan(config)
    counts = set()
    if plan.mode.decode_mode() is CUDAGraphMode.FULL:
        for mode, descriptor in plan.keys:
            count = min(descriptor.num_tokens // plan.query_len, plan.max_num_seqs)
            if mode is CUDAGraphMode.FULL and count:
                counts.add(count)
    mixed = _part(config, plan.mode.mixed_mode(), plan.capture_sizes)
    propose = _decode(config, counts, {}, 0)
    configs = {"target": mixed, "draft": mixed}
    for number in numbers:
        configs[f"verify k={number}"] = _decode(config, counts, {"input_ids": "num_tokens"}, number)
        configs[f"propose k={number}"] = propose
    plans = [(name, build_plan(part)) for name, part in configs.items()]
    plans.sort(key=lambda plan: -plan[1].max_capture_size)
    return SpecPlan(
        dict(plans),
        configs,
        tuple(numbers),
        tuple(sorted(counts)),
    )


def check_draft_tokens(number: int, allowed: Sequence[int]) -> None:
    """Raises InputError."""
    if number not in allowed:
        possible = ", ".join(map(str, sorted(allowed)))
        raise InputError(
            f"{number} draft tokens were asked for; possible are {possible}",
            remedy="Raise speculative.num_speculative_tokens, or add the number to draft_tokens.",
        )


def _check(config: Config) -> None:
    refuse_auto(config.compilation)
    if config.speculative.num_speculative_tokens < 1:
        raise ConfigError(
            "speculative.num_speculative_tokens is 0: nothing is drafted",
            remedy="Set it to the most draft tokens of a request, such as 3.",
        )
    if config.lora:
        raise ConfigError(
            "the configuration has a `lora` section, which speculative decoding does not fill",
            remedy="Leave `lora` and `lora_ids` out.",
        )
    if config.compilation.pool != "shared":
        raise ConfigError(
            f"compilation.pool is {config.compilation.pool}, and speculative decoding captures "
            "all parts into one pool",
            remedy="Set compilation.pool: shared.",
        )
    wrong = {*(set(config.inputs) ^ set(INPUTS)), *(set(config.metadata) - set(METADATA))}
    tables = config.metadata.get("block_tables")
    if not tables:
        wrong.add("block_tables")
    if wrong:
        raise ConfigError(
            f"speculative decoding cannot fill the model's inputs: {', '.join(sorted(wrong))}",
            remedy=f"Declare the inputs {', '.join(INPUTS)}, the metadata block_tables, and those "
            f"of {', '.join(METADATA)} that the model reads.",
        )
    if tables and [dim.symbol for dim in tables.extents] != ["num_reqs", None]:
        raise ConfigError(
            f"block_tables has shape {list(tables.shape)}",
            remedy="Declare it as [num_reqs, blocks of a request at most].",
        )


def _part(config: Config, mode: CUDAGraphMode, sizes: Sequence[int], **settings: Any) -> Config:
    settings |= {
        "cudagraph_mode": mode,
        "cudagraph_capture_sizes": tuple(sizes) or None,
        "max_cudagraph_capture_size": None,
        "cudagraph_copy_inputs": True,  # one batch goes to two models
    }
    return config.with_values("compilation", **settings)


def _decode(
    config: Config, counts: set[int], inputs: Mapping[str, str], draft_tokens: int
) -> Config:
    query_len = 1 + draft_tokens
    scheduler = config.scheduler
    declared = {name: Input(shape=(rows,), dtype="int64", pad=0) for name, rows in inputs.items()}
    # padding has the last row
    declared["rows"] = Input(
        shape=("num_reqs",),
        dtype="int64",
        pad=scheduler.max_num_seqs,
    )
    most = max(scheduler.max_num_batched_tokens, query_len * scheduler.max_num_seqs)
    speculative = {"num_speculative_tokens": draft_tokens, "accepted_tokens": None}
    part = _part(
        config,
        CUDAGraphMode.FULL_DECODE_ONLY if counts else CUDAGraphMode.NONE,
        [query_len * count for count in sorted(counts)],
        outputs="borrow",
        compiler="eager",
        splitting_modules=(),
        debug=False,  # comparing runs a forward twice, and these advance requests
    )
    return part.changed(
        model=ModelConfig(output_rows="num_reqs"),
        inputs=declared,
        metadata={},
        scheduler=scheduler.changed(max_num_batched_tokens=most),
        speculative=config.speculative.changed(**speculative),
    )
