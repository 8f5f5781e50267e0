"""The plan: the ordered list of graphs to capture. It can be printed, saved, reloaded and compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, ValidationError

from cgplan.config import Config
from cgplan.config.values import mode_by_name
from cgplan.descriptors import BatchDescriptor
from cgplan.errors import ReportError
from cgplan.modes import CUDAGraphMode
from cgplan.planning.resolution import ModeChange, resolve_mode
from cgplan.planning.sizes import resolve_sizes

PLAN_SCHEMA_VERSION = 1

Mode = Annotated[CUDAGraphMode, BeforeValidator(mode_by_name), PlainSerializer(str, return_type=str)]
Descriptor = Annotated[BatchDescriptor, PlainSerializer(lambda d: d._asdict(), return_type=dict[str, Any])]
Key = tuple[Mode, Descriptor]


class _Change(BaseModel):
    """A ModeChange in JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    requested: Mode
    resolved: Mode
    reason: str


class Plan(BaseModel):
    """What will be captured, in order; a pure function of the configuration.

    Attributes:
        requested_mode, mode: cudagraph_mode as asked for, and as resolved.
        changes: Each step from the one to the other, with its reason.
        capture_sizes: In tokens, ascending.
        sizes_source: Where the sizes came from.
        keys: (runtime mode, batch descriptor) pairs in capture order: PIECEWISE before FULL, largest first,
            so that later graphs fit into the pool memory that the first one reserved.
        lora_cases: Numbers of active adapters that graphs are captured for; (0,) without LoRA.
        query_len: Tokens of each request in a uniform decode batch.
        max_num_seqs, max_num_batched_tokens, max_loras: Bounds of a batch (max_loras None: no LoRA).
        warnings: What was dropped or changed on the way.
        config_hash: Digest of the configuration that the plan was made from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["plan"] = "plan"
    schema_version: int = PLAN_SCHEMA_VERSION
    requested_mode: Mode
    mode: Mode
    changes: tuple[_Change, ...] = ()
    capture_sizes: tuple[int, ...]
    sizes_source: str
    keys: tuple[Key, ...]
    lora_cases: tuple[int, ...]
    query_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_loras: int | None
    warnings: tuple[str, ...] = ()
    config_hash: str

    @property
    def max_capture_size(self) -> int:
        """Largest capture size in tokens, 0 if nothing is captured."""
        return self.capture_sizes[-1] if self.capture_sizes else 0

    def padding_table(self) -> tuple[int, ...]:
        """``table[n]`` is the capture size that a batch of n tokens is padded to, for n up to max_capture_size."""
        table, sizes = [0], iter(self.capture_sizes)
        for size in sizes:
            table.extend([size] * (size + 1 - len(table)))
        return tuple(table)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Plan from its JSON form (``model_dump_json``). Raises ReportError for another schema or no plan."""
        try:
            data = json.loads(text)
            version = data.get("schema_version") if isinstance(data, dict) else None
            if version != PLAN_SCHEMA_VERSION:
                raise ReportError(
                    f"the plan has schema version {version}, this cgplan reads {PLAN_SCHEMA_VERSION}",
                    remedy="Make the plan again with this version of cgplan.",
                )
            return cls.model_validate(data)
        except (json.JSONDecodeError, ValidationError) as error:
            raise ReportError(f"not a plan: {error}", remedy="Give a file that cgplan saved.") from None


def build_plan(config: Config) -> Plan:
    """Plan for a configuration, without torch and without a device.

    Raises:
        ModeError: the mode cannot be captured with the model's attention.
        PlanError: no capture size is left.
    """
    mode, changes = resolve_mode(config)
    sizes = resolve_sizes(config, mode)
    cases = _lora_cases(config)
    keys = _keys(config, mode, sizes.sizes, cases)
    return Plan(
        requested_mode=config.compilation.cudagraph_mode,
        mode=mode,
        changes=tuple(_change(c) for c in changes),
        capture_sizes=sizes.sizes,
        sizes_source=sizes.source,
        keys=keys,
        lora_cases=cases,
        query_len=config.query_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_loras=config.lora.max_loras if config.lora else None,
        warnings=(*sizes.warnings, *_unused_sizes(config, sizes.sizes, keys)),
        config_hash=config_hash(config),
    )


def config_hash(config: Config) -> str:
    """Digest of what decides a capture: the first 12 hexadecimal digits of the SHA-256 of the sorted JSON.

    The `report` section is left out, so that a bench and a capture of the same graphs have the same digest.
    """
    text = json.dumps(config.model_dump(mode="json", exclude={"report"}), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _unused_sizes(config: Config, sizes: Sequence[int], keys: Sequence[Key]) -> tuple[str, ...]:
    """A warning about sizes that the user listed and no graph is captured for."""
    unused = sorted(set(sizes) - {descriptor.num_tokens for _, descriptor in keys})
    if not unused or not isinstance(config.compilation.cudagraph_capture_sizes, tuple):
        return ()
    return (
        f"capture sizes {', '.join(map(str, unused))} have no graph: a decode batch has at most "
        f"scheduler.max_num_seqs = {config.scheduler.max_num_seqs} requests of {config.query_len} tokens",
    )


def _change(change: ModeChange) -> _Change:
    return _Change(requested=change.requested, resolved=change.resolved, reason=change.reason)


def _lora_cases(config: Config) -> tuple[int, ...]:
    """Numbers of active adapters to capture for; max_loras + 1 stands for any number of them."""
    if config.lora is None:
        return (0,)
    most = config.lora.max_loras
    if not config.compilation.cudagraph_specialize_lora:
        return (most + 1,)
    powers = [1 << k for k in range(most.bit_length())] if config.lora.specialize_active_lora else []
    return (0, *powers, most + 1)


def _keys(config: Config, mode: CUDAGraphMode, sizes: Sequence[int], cases: Sequence[int]) -> tuple[Key, ...]:
    seqs, q = config.scheduler.max_num_seqs, config.query_len
    keys: list[Key] = []
    mixed, decode = mode.mixed_mode(), mode.decode_mode()
    if mixed is not CUDAGraphMode.NONE:
        full = mixed is CUDAGraphMode.FULL
        keys += [
            (mixed, BatchDescriptor(s, min(s, seqs) if full else None, False, case > 0, case))
            for s in sizes
            for case in cases
        ]
    if mode.separate_routine() and decode is CUDAGraphMode.FULL:
        keys += [
            (decode, BatchDescriptor(s, min(s // q, seqs), True, case > 0, case))
            for s in sizes
            if q <= s <= q * seqs
            for case in cases
        ]
    return tuple(
        sorted(keys, key=lambda key: (key[0] is CUDAGraphMode.FULL, -key[1].num_tokens, -key[1].num_active_loras))
    )
