"""The plan: the graphs to capture, in order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PlainSerializer

from cgplan.config import Config, validate_config
from cgplan.config.values import Mode as Mode
from cgplan.config.values import Record
from cgplan.errors import ConfigError, ReportError
from cgplan.modes import BatchDescriptor, CUDAGraphMode
from cgplan.units import counted, grouped

PLAN_SCHEMA_VERSION = 2
_AGAIN = "Make the plan again with this version of cgplan."
PLANNED_FOR = "planned for"  # how the source of sizes begins that were chosen for traffic
# Settings that decide how requests become batches, and no capture.
SIMULATED: dict[str, set[str]] = {
    "scheduler": {"mixed_batches"},
    "speculative": {"accepted_tokens", "method", "varlen_decode"},
    "compilation": {"key_rules"},
    "distributed": {"data_parallel_sync"},
}
# Of the evidence, what a planner was asked for.
RULES = ("slo", "objective", "insurance", "kv_tokens", "replicas", "one_list", "apart")
# Settings of reports, planning and serving.
_NOT_CAPTURED: dict[str, bool | set[str]] = {
    "report": True,
    "traffic": True,
    "budget": True,
    **SIMULATED,
    "compilation": {"capture_policy", "key_rules"},
    "distributed": {"timeout", "data_parallel_sync"},
}


def _as_json(descriptor: BatchDescriptor) -> dict[str, Any]:
    fields = descriptor._asdict()
    if not descriptor.sizes:
        del fields["sizes"]
    if descriptor.max_query_len is None:
        del fields["max_query_len"]
    return fields


Descriptor = Annotated[
    BatchDescriptor,
    PlainSerializer(_as_json, return_type=dict[str, Any]),
]
Key = tuple[Mode, Descriptor]


class PlanChange(Record):
    requested: Mode
    resolved: Mode
    reason: str


class Lane(NamedTuple):
    """The keys that differ in size alone."""

    mode: CUDAGraphMode
    uniform: bool
    num_active_loras: int

    @classmethod
    def of(
        cls,
        mode: CUDAGraphMode,
        descriptor: BatchDescriptor,
    ) -> Lane:
        return cls(mode, descriptor.uniform, descriptor.num_active_loras)

    @property
    def place(self) -> float:
        """Smaller for the lane that a batch tries first: graphs of uniform decode alone, FULL,
        PIECEWISE, and of these the fewest adapters.
        """
        place = float(self.num_active_loras)
        if self.mode is not CUDAGraphMode.FULL:
            place += 1e9
        if not self.uniform:
            place += 2e9
        return place

    def serves(self, uniform: Any, num_active_loras: Any, apart: bool = False) -> Any:
        """For one batch, or for arrays; ``apart`` is that of Traffic."""
        is_mixed = not self.uniform
        may = (uniform | is_mixed) & (num_active_loras <= self.num_active_loras)
        if apart:
            may &= uniform == (self.mode is CUDAGraphMode.FULL)
        return may

    def key(
        self,
        num_tokens: int,
        query_len: int,
        max_num_seqs: int,
        sizes: tuple[int, ...] = (),
    ) -> Key:
        case = self.num_active_loras
        reqs = None
        if self.uniform:
            reqs = num_tokens // query_len
        elif self.mode is CUDAGraphMode.FULL:
            reqs = min(num_tokens, max_num_seqs)
        return self.mode, BatchDescriptor(num_tokens, reqs, self.uniform, case > 0, case, sizes)

    def __str__(self) -> str:
        """``FULL uniform, 2 adapters``."""
        name = f"{self.mode} uniform" if self.uniform else str(self.mode)
        if self.num_active_loras:
            name = f"{name}, {counted(self.num_active_loras, 'adapter')}"
        return name


def lanes_of(
    mode: CUDAGraphMode,
    lora_cases: Iterable[int],
) -> tuple[Lane, ...]:
    """The lanes of a resolved mode, in the order in which a batch tries them."""
    kinds = [(mode.mixed_mode(), False)]
    if mode.separate_routine():
        kinds.append((mode.decode_mode(), True))
    lanes = []
    for runtime, uniform in kinds:
        if runtime is not CUDAGraphMode.NONE:
            lanes += [Lane(runtime, uniform, case) for case in lora_cases]
    return tuple(sorted(lanes, key=attrgetter("place")))


class LaneRecord(Record):
    mode: Mode
    uniform: bool
    num_active_loras: int

    @property
    def lane(self) -> Lane:
        return Lane(
            self.mode,
            self.uniform,
            self.num_active_loras,
        )


class LeftOut(LaneRecord):
    """Sizes of one lane that a plan could have and has not.

    Attributes:
        reason: "no batch would run in it"; "no gain" (steps would be less than 0.01% shorter); the
            limits that one more key would break, such as "budget.max_graphs"; or another sentence.
    """

    sizes: tuple[int, ...]
    reason: str


class Machine(Record):
    gpu: str
    driver: str | None
    torch: str


class Emission(Record):
    """A plan in the words of an engine, by the rules of one version.

    Attributes:
        options: Of its command line, or YAML; ``--emit`` prints them.
        notes: How the engine's graphs differ from the plan.
    """

    engine: str
    version: str
    options: str
    bounds: str
    environment: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return f"For {self.engine}, by the rules of {self.version}"

    @property
    def block(self) -> str:
        is_yaml = "\n" in self.bounds
        options = ("\n" if is_yaml else " ").join((self.options, self.bounds))
        return "\n".join((*self.environment, options))


@dataclass(frozen=True)
class KeyCost:
    """The cost that one key adds when it is captured after those before it.

    Attributes:
        pool_bytes: Growth of the graph pool.
        driver_bytes: The driver's memory for its nodes, 0 on the tape.
    """

    pool_bytes: int
    driver_bytes: int
    seconds: float


class Predicted(Record):
    """The predicted cost of capturing a list of keys.

    Attributes:
        workspace_bytes: What the first graph takes once: library workspaces and more.
        estimated: Whether no figure was measured on the device.
        notes: Why the configuration may have other figures.
        extrapolated: Whether a graph is larger than those measured.
        model: Of the log of vLLM, if that is the source.
    """

    keys: tuple[KeyCost, ...]
    static_bytes: int
    workspace_bytes: int
    source: str
    estimated: bool
    notes: tuple[str, ...] = ()
    extrapolated: bool = False
    model: str = ""

    @property
    def pool_bytes(self) -> int:
        return sum(cost.pool_bytes for cost in self.keys)

    @property
    def driver_bytes(self) -> int:
        return sum(cost.driver_bytes for cost in self.keys)

    @property
    def total_bytes(self) -> int:
        return self.static_bytes + self.workspace_bytes + self.pool_bytes + self.driver_bytes

    @property
    def seconds(self) -> float:
        return sum(cost.seconds for cost in self.keys)


class Plan(Record):
    """The graphs to capture, in order.

    Attributes:
        requested_mode, mode: cudagraph_mode as asked for, and as resolved by ``changes``.
        dim_names: What the sizes of a descriptor's ``box`` count.
        capture_sizes: In tokens, ascending, of all lanes together; a lane may lack some.
        keys: In capture order, see ``capture_order``.
        draft_prefill_keys, draft_decode_keys: What an engine captures besides for a draft model.
        lora_cases: Numbers of active adapters; (0,) without LoRA.
        query_len: Tokens of each request in a uniform decode batch.
        config: The settings that decide a capture, in JSON; ``config_hash`` is their digest.
        evidence: Why the planner chose these keys; None where a list or ladder did.
        budget: Limits of the configuration, in JSON.
        simulated: The settings of ``SIMULATED`` that are not defaults, in JSON.
        notes, lint: Of a plan that was not made for traffic; other plans have them in the evidence.
            Once it is captured: how its budget differs from the one that bounds the capture.
        file: The file that a saved plan was read from.
    """

    kind: Literal["plan"] = "plan"
    schema_version: int = PLAN_SCHEMA_VERSION
    requested_mode: Mode
    mode: Mode
    changes: tuple[PlanChange, ...] = ()
    dim_names: tuple[str, ...] = ("num_tokens",)
    capture_sizes: tuple[int, ...]
    sizes_source: str
    keys: tuple[Key, ...]
    key_rules: Literal["vllm_v1", "vllm_v2"] = "vllm_v1"
    draft_prefill_keys: tuple[Key, ...] = ()
    draft_decode_keys: tuple[Key, ...] = ()
    lora_cases: tuple[int, ...]
    query_len: int = Field(ge=1)
    max_num_seqs: int = Field(ge=1)
    max_num_batched_tokens: int = Field(ge=1)
    max_loras: int | None
    warnings: tuple[str, ...] = ()
    config_hash: str
    config: dict[str, Any]
    predicted: Predicted | None = None
    machine: Machine | None = None
    evidence: dict[str, Any] | None = None
    budget: dict[str, Any] = Field(default_factory=dict)
    simulated: dict[str, Any] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    lint: tuple[str, ...] = ()
    emission: Emission | None = None
    file: str | None = None

    @property
    def settings(self) -> Config:
        """``config`` with what is ``simulated``. Raises ReportError for those of other versions."""
        both = {section: self.config[section] | own for section, own in self.simulated.items()}
        try:
            return validate_config(self.config | both)
        except ConfigError as error:
            raise ReportError(f"of the plan's {error.message}", remedy=_AGAIN) from None

    @property
    def max_capture_size(self) -> int:
        """Largest capture size in tokens, 0 if nothing is captured."""
        return self.capture_sizes[-1] if self.capture_sizes else 0

    @property
    def draft_keys(self) -> tuple[Key, ...]:
        return self.draft_prefill_keys + self.draft_decode_keys

    @property
    def num_graphs(self) -> int:
        """Those of a draft model included."""
        return len(self.keys) + len(self.draft_keys)

    @property
    def graph_words(self) -> str:
        words = counted(self.num_graphs, "graph")
        if self.draft_keys:
            words += f" ({len(self.draft_keys)} of them of the draft model)"
        return words

    @property
    def expected_us(self) -> float | None:
        """Expected microseconds of a step over the traffic that the plan was made for."""
        expected = (self.evidence or {}).get("expected_us")
        return expected and float(expected["plan"])

    def lanes(self) -> dict[Lane, tuple[int, ...]]:
        """Capture sizes of each lane, ascending, in tokens."""
        found = grouped([(Lane.of(*key), key[1].num_tokens) for key in self.keys])
        return {lane: tuple(sorted(set(sizes))) for lane, sizes in found.items()}

    def __str__(self) -> str:
        lines = [f"{self.mode}, {len(self.keys)} graphs"]
        for lane, sizes in self.lanes().items():
            lines.append(f"  {lane}: {', '.join(map(str, sizes))} tokens")
        return "\n".join(lines)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """A plan from its ``model_dump_json``. Raises ReportError for anything else."""
        try:
            data = json.loads(text)
            version = data.get("schema_version") if isinstance(data, dict) else None
            if version != PLAN_SCHEMA_VERSION:
                raise ReportError(
                    f"the plan has schema version {version}, this cgplan reads "
                    f"{PLAN_SCHEMA_VERSION}",
                    remedy=_AGAIN,
                )
            return cls.model_validate(data)
        except (ValueError, RecursionError) as error:
            remedy = "Give a file that cgplan saved."
            raise ReportError(f"not a plan: {error}", remedy=remedy) from None


def budget_of(config: Config) -> dict[str, Any]:
    return config.budget.model_dump(mode="json", exclude_none=True)


def capture_config(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json", exclude=_NOT_CAPTURED)


def config_hash(config: Config) -> str:
    """The first 12 hexadecimal digits of the SHA-256 of ``capture_config`` as sorted JSON."""
    text = json.dumps(capture_config(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def capture_order(keys: Iterable[Key]) -> tuple[Key, ...]:
    """PIECEWISE before FULL, largest first: later graphs fit into the pool of the first one."""
    return tuple(sorted(keys, key=_place))


def _place(key: Key) -> tuple[bool, int, int]:
    mode, descriptor = key
    return (
        mode is CUDAGraphMode.FULL,
        -descriptor.elements,
        -descriptor.num_active_loras,
    )
