"""The plan: the graphs to capture, in order; made from a configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from math import prod
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PlainSerializer

from cgplan.config import CompilationConfig, Config, Dim, validate_config
from cgplan.config.schema import Mode as Mode
from cgplan.config.schema import Record
from cgplan.errors import ConfigError, ModeError, PlanError, ReportError
from cgplan.modes import AttentionSupport, BatchDescriptor, CUDAGraphMode
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

    def serves(
        self,
        uniform: Any,
        num_active_loras: Any,
        apart: bool = False,
    ) -> Any:
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
        """``FULL uniform, LoRA case 2``."""
        name = f"{self.mode} uniform" if self.uniform else str(self.mode)
        if self.num_active_loras:
            name = f"{name}, LoRA case {self.num_active_loras}"
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
        command: Plans again for vLLM.
        is_to_paste: False: the engine may drop sizes of it.
    """

    engine: str
    version: str
    options: str
    bounds: str
    environment: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    command: str = ""
    is_to_paste: bool = True

    @property
    def title(self) -> str:
        return f"For {self.engine}, by the rules of {self.version}"

    @property
    def block(self) -> str:
        is_yaml = "\n" in self.bounds
        separator = "\n" if is_yaml else " "
        options = separator.join((self.options, self.bounds))
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
        has_drafts: Whether each key has its share of the graphs of a draft model.
    """

    keys: tuple[KeyCost, ...]
    static_bytes: int
    workspace_bytes: int
    source: str
    estimated: bool
    notes: tuple[str, ...] = ()
    extrapolated: bool = False
    model: str = ""
    has_drafts: bool = False

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
        notes, lint: Beside those of the evidence, if the plan was made for traffic. Once it is
            captured: how its budget differs from the one that bounds the capture.
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
    def fixed_inputs(self) -> list[str]:
        """Inputs with a fixed size, ``pixels [num_tokens, 3, 96, 96]``, which tell runners of one
        model apart; also where num_tokens has another name.
        """
        found = []
        rows = self.dim_names[0]
        for name, given in self.config.get("inputs", {}).items():
            if any(isinstance(size, int) for size in given["shape"]):
                shape = ["num_tokens" if size == rows else str(size) for size in given["shape"]]
                found.append(f"{name} [{', '.join(shape)}]")
        return found

    @property
    def max_capture_size(self) -> int:
        """Largest capture size in tokens, 0 if nothing is captured."""
        return self.capture_sizes[-1] if self.capture_sizes else 0

    @property
    def largest_allowed(self) -> int | None:
        """The largest capture size that the configuration allows, if it names one: beside a list of
        sizes, that only repeats its largest.
        """
        given = self.config["compilation"]
        if isinstance(given["cudagraph_capture_sizes"], list):
            return None
        most: int | None = given["max_cudagraph_capture_size"]
        return most

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
        sizes_of_lanes = [(Lane.of(*key), key[1].num_tokens) for key in self.keys]
        found = grouped(sizes_of_lanes)
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
            kind = data.get("kind") if isinstance(data, dict) else None
            if kind != "plan":
                raise ValueError(f"it is of kind {kind}")
            version = data.get("schema_version")
            if version != PLAN_SCHEMA_VERSION:
                raise ReportError(
                    f"the plan has schema version {version}, this cgplan reads "
                    f"{PLAN_SCHEMA_VERSION}",
                    remedy=_AGAIN,
                )
            return cls.model_validate(data)
        except (ValueError, RecursionError) as error:
            remedy = "Give the text of a plan that cgplan saved, as Path(file).read_text()."
            raise ReportError(f"not a plan: {error}", remedy=remedy) from None


def budget_of(config: Config) -> dict[str, Any]:
    return config.budget.model_dump(mode="json", exclude_none=True)


def capture_fields(config: Config) -> dict[str, Any]:
    """A plan's ``config`` and ``config_hash``."""
    found = config.model_dump(mode="json", exclude=_NOT_CAPTURED)
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode())
    return {"config": found, "config_hash": digest.hexdigest()[:12]}


def config_hash(config: Config) -> str:
    """12 hexadecimal digits of the SHA-256 of a plan's ``config`` as sorted JSON."""
    return str(capture_fields(config)["config_hash"])


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


MOST_BOXES = 10_000  # of sizes in several dimensions
MOST_SPANNED = 100_000  # by the boxes that compilation.boxes names
DEFAULT_SPLITTING_OPS = (
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "higher_order::flex_attention",
    "torch_attn::_varlen_attn",
    "cgplan::attention",
)
LARGEST_DEFAULT_SIZE = 512
Sizes = tuple[int, ...]
Ladder = Callable[[int], Sizes]


def attention_is_split(splitting_ops: tuple[str, ...] | None) -> bool:
    """Whether attention, by the names of operators, stands outside the graph segments."""
    ops = DEFAULT_SPLITTING_OPS if splitting_ops is None else splitting_ops
    return any("attention" in op or "attn" in op for op in ops)


def resolve_mode(config: Config) -> tuple[CUDAGraphMode, tuple[PlanChange, ...]]:
    """The mode that can be captured, and the changes that led there, in order.

    Raises ModeError if mixed batches are to run as FULL graphs, and the attention supports none.
    """
    compilation = config.compilation
    mode = compilation.cudagraph_mode
    support = compilation.attention_support
    split = attention_is_split(compilation.splitting_ops)
    piecewise_or_none = CUDAGraphMode.PIECEWISE if split else CUDAGraphMode.NONE
    never = support is AttentionSupport.NEVER
    changes = []

    def change(to: CUDAGraphMode, reason: str) -> CUDAGraphMode:
        changes.append(PlanChange(requested=mode, resolved=to, reason=reason))
        return to

    if mode is CUDAGraphMode.AUTO:
        to = piecewise_or_none if never else CUDAGraphMode.FULL
        mode = change(to, f"a capture decides AUTO by measuring; this is planned as {to}")
    if compilation.splitting_ops == () and mode.has_mode(CUDAGraphMode.PIECEWISE):
        has_full = mode.has_mode(CUDAGraphMode.FULL)
        to = CUDAGraphMode.FULL if has_full else CUDAGraphMode.NONE
        mode = change(to, "splitting_ops is empty: there is nothing to split at")
    is_mixed = mode.mixed_mode() is CUDAGraphMode.FULL
    if is_mixed and support is not AttentionSupport.ALWAYS:
        if never:
            choices = "PIECEWISE or NONE" if split else "NONE"
            raise ModeError(
                f"cudagraph_mode {mode} captures attention, but attention_support is NEVER",
                remedy=f"Choose {choices} for compilation.cudagraph_mode.",
            )
        to = CUDAGraphMode.FULL_AND_PIECEWISE if split else CUDAGraphMode.FULL_DECODE_ONLY
        reason = f"attention_support is {support}: mixed batches cannot run as FULL graphs"
        mode = change(to, reason)
    reason = ""
    if never:
        reason = "attention_support is NEVER: no graph can hold attention"
    elif config.query_len > 1 and support < AttentionSupport.UNIFORM_BATCH:
        reason = (
            f"attention_support is {support}, but speculative decoding has {config.query_len} "
            "tokens a request"
        )
    if reason and mode.decode_mode() is CUDAGraphMode.FULL:
        mode = change(piecewise_or_none, reason)
    return mode, tuple(changes)


def refuse_auto(compilation: CompilationConfig) -> None:
    if compilation.cudagraph_mode is CUDAGraphMode.AUTO:
        raise ConfigError(
            "cudagraph_mode is AUTO, and the graphs have to be known here before the model is "
            "measured",
            remedy="Name a mode, or leave it out. Or let `cgplan capture` decide on one process, "
            "without --plan, and write the settings that its report notes into the configuration. "
            "In Python, cgplan.choose_mode(config, model, backend) gives that and the plan.",
        )


def _by_strides(
    strides: Mapping[int, int],
    maximum: int,
    *,
    is_ended: bool = True,
) -> Sizes:
    """1, 2, 4, and from each first size by its stride, up to the next; ended by the maximum."""
    sizes = {1, 2, 4}
    if is_ended:
        sizes.add(maximum)
    firsts = [*strides, max(maximum, *strides) + 1]
    for first, end in pairwise(firsts):
        sizes.update(range(first, end, strides[first]))
    return tuple(sorted(sizes.intersection(range(maximum + 1))))


LADDERS: Mapping[str, Ladder] = {
    "vllm": partial(_by_strides, {8: 8, 256: 16}, is_ended=False),
    "sglang": partial(_by_strides, {8: 4, 16: 8, 256: 16, 512: 32}),
    "trtllm": partial(_by_strides, {8: 8, 128: 64}),
    "powers_of_two": partial(_by_strides, {1 << k: 1 << k for k in range(3, 21)}),
    "vllm_interactivity": partial(_by_strides, {1: 1, 32: 8, 256: 16}, is_ended=False),
}


class CaptureSizes(NamedTuple):
    """In tokens, ascending; empty if nothing is captured."""

    sizes: Sizes
    source: str


def resolve_sizes(config: Config, mode: CUDAGraphMode) -> CaptureSizes:
    """Raises PlanError if none is left."""
    if mode is CUDAGraphMode.NONE:
        return CaptureSizes((), "cudagraph_mode is NONE")
    given = config.compilation.cudagraph_capture_sizes
    boxes = config.compilation.boxes
    lead = config.dims.get(config.dim_names[0])
    if boxes is not None:
        leading = sorted({box[0] for box in boxes})
        found = CaptureSizes(tuple(leading), "compilation.boxes")
    elif lead and given is None:
        found = CaptureSizes(sizes_of(lead), f"dims.{lead.name}")
    elif isinstance(given, tuple):
        limit = config.scheduler.max_num_batched_tokens
        kept = sorted(size for size in set(given) if size <= limit)
        found = CaptureSizes(tuple(kept), "compilation.cudagraph_capture_sizes")
    else:
        found = ladder_sizes(config, given or "vllm")
    q = config.query_len
    is_rounded = config.compilation.key_rules == "vllm_v1"
    if mode.has_mode(CUDAGraphMode.FULL) and q > 1 and is_rounded:
        # as in vLLM, no size is rounded beyond the largest one
        maximum = max(found.sizes, default=0)
        sizes = set()
        for size in found.sizes:
            rounded = -(-size // q) * q
            if rounded <= maximum:
                sizes.add(rounded)
        if not sizes and q <= maximum:
            sizes = {q}
        source = f"{found.source}, rounded up to multiples of {q}"
        found = CaptureSizes(tuple(sorted(sizes)), source)
    if not found.sizes:
        asked = f" of {', '.join(map(str, given))}" if isinstance(given, tuple) else ""
        raise PlanError(
            f"no capture size is left{asked}: {found.source}",
            remedy="Raise scheduler.max_num_batched_tokens or max_cudagraph_capture_size, give "
            "smaller cudagraph_capture_sizes, or set cudagraph_mode: NONE.",
        )
    return found


def sizes_of(dim: Dim) -> Sizes:
    step = dim.multiple_of
    if isinstance(dim.sizes, tuple):
        return tuple(sorted(set(dim.sizes)))
    ladder = LADDERS[dim.sizes or "powers_of_two"]
    sizes = [step * size for size in ladder(dim.top // step)]
    return tuple(size for size in sizes if size >= dim.min)


def ladder_sizes(
    config: Config,
    name: str,
    largest: int = LARGEST_DEFAULT_SIZE,
) -> CaptureSizes:
    """At most ``largest`` if no maximum is given."""
    q = config.query_len
    seqs = config.scheduler.max_num_seqs
    tokens = config.scheduler.max_num_batched_tokens
    asked = config.compilation.max_cudagraph_capture_size
    wanted = min(2 * q * seqs, largest) if asked is None else asked
    maximum = min(wanted, tokens)
    ladder = LADDERS[name]
    source = f"ladder {name} up to {maximum}"
    if not name.startswith("vllm"):  # their sizes are request counts
        requests = ladder(maximum // q) if maximum >= q else ()
        return CaptureSizes(tuple(q * number for number in requests), source)
    sizes = {*ladder(maximum), tokens}
    if asked is None:  # decode batches of all requests
        sizes.add(q * seqs)
        if q > 1:
            sizes.update(q * number for number in ladder(seqs))
    kept = tuple(sorted(sizes.intersection(range(maximum + 1))))
    return CaptureSizes(kept, source)


def lora_cases(config: Config) -> Sizes:
    """max_loras + 1 stands for any number."""
    if config.lora is None:
        return (0,)
    most = config.lora.max_loras
    has_own = config.compilation.cudagraph_specialize_lora
    if not has_own and config.compilation.key_rules == "vllm_v1":
        return (most + 1,)
    if not (has_own and config.lora.specialize_active_lora):
        return (0, most + 1)
    return (0, *(1 << k for k in range(most.bit_length())), most + 1)


def build_plan(config: Config) -> Plan:
    """The plan of a configuration; nothing runs.

    Raises:
        ModeError: the mode cannot be captured with the model's attention.
        PlanError: no capture size is left.
        ConfigError: `dims` make too many boxes of sizes.
    """
    mode, changes = resolve_mode(config)
    sizes = resolve_sizes(config, mode)
    cases = lora_cases(config)
    rules = config.compilation.key_rules
    speculative = config.speculative
    draft_prefill: tuple[Key, ...] = ()
    draft_decode: tuple[Key, ...] = ()
    is_v2 = rules == "vllm_v2"
    widest = config.query_len if is_v2 and speculative.varlen_decode else None
    keys = _keys(config, mode, sizes.sizes, cases, max_query_len=widest)
    if is_v2 and speculative.has_draft_graphs:
        draft_prefill = _keys(config, mode, sizes.sizes, (0,))
        is_full = mode.decode_mode() is CUDAGraphMode.FULL
        if is_full and speculative.num_speculative_tokens > 1:
            one = CUDAGraphMode.FULL_DECODE_ONLY
            draft_decode = _keys(config, one, sizes.sizes, (0,), query_len=1)
    return Plan(
        requested_mode=config.compilation.cudagraph_mode,
        mode=mode,
        changes=changes,
        dim_names=config.dim_names,
        capture_sizes=sizes.sizes,
        sizes_source=sizes.source,
        keys=keys,
        key_rules=rules,
        draft_prefill_keys=draft_prefill,
        draft_decode_keys=draft_decode,
        lora_cases=cases,
        query_len=config.query_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_loras=config.lora.max_loras if config.lora else None,
        warnings=(*_lost(config, sizes.sizes, keys), *_unread(config.compilation, mode)),
        **capture_fields(config),
        budget=budget_of(config),
        simulated=config.model_dump(mode="json", include=SIMULATED, exclude_defaults=True),
    )


def _keys(
    config: Config,
    mode: CUDAGraphMode,
    sizes: Sequence[int],
    cases: Sequence[int],
    *,
    query_len: int | None = None,
    max_query_len: int | None = None,
) -> tuple[Key, ...]:
    """In the order of vLLM's model runner V1 or V2: decode graphs for whole requests of
    ``query_len`` tokens, or of up to ``max_query_len``; mixed graphs for the sizes as they are.
    """
    is_v2 = config.compilation.key_rules == "vllm_v2"
    if is_v2 and len(config.dim_names) > 1:
        raise ConfigError(
            f"key_rules vllm_v2 know one dimension; dims names {', '.join(config.dim_names)}",
            remedy="Use key_rules: vllm_v1 for batches with several sizes.",
        )
    seqs = config.scheduler.max_num_seqs
    q = query_len or config.query_len
    keys = dict[Key, None]()  # in order; two sizes may round up to the same
    for lane, box in product(lanes_of(mode, cases), _boxes(config, sizes)):
        tokens, *others = box
        if lane.uniform:
            if is_v2 and not max_query_len:
                tokens = -(-tokens // q) * q
            if tokens > min(q * seqs, sizes[-1]) or not (max_query_len or tokens >= q):
                continue
        _, key = lane.key(
            tokens,
            q,
            seqs,
            tuple(others),
        )
        if lane.uniform and max_query_len:
            key = key._replace(
                num_reqs=min(tokens, seqs),
                uniform=False,
                max_query_len=max_query_len,
            )
        keys[lane.mode, key] = None
    if not is_v2:
        return capture_order(keys)
    return tuple(sorted(keys, key=lambda key: (key[0] is CUDAGraphMode.FULL, -key[1].num_tokens)))


def _boxes(
    config: Config,
    sizes: Sequence[int],
) -> Sequence[tuple[int, ...]]:
    """Raises ConfigError if they are too many, or span too many."""
    given = config.compilation.boxes
    first, *others = config.dim_names
    axes: dict[str, Collection[int]] = {first: sizes}
    for dim, name in enumerate(others, start=1):
        if given is None:
            axes[name] = sizes_of(config.dims[name])
        else:
            axes[name] = {box[dim] for box in given}
    most = MOST_BOXES if given is None else MOST_SPANNED
    count = prod(map(len, axes.values()))
    if count > most and config.dims:
        widest = max(config.dims, key=lambda name: len(axes[name]))
        remedy = "Give boxes that share sizes."
        if given is None:
            remedy = (
                f"Give fewer sizes (dims.{widest}.sizes or dims.{widest}.max), or name the boxes "
                "in compilation.boxes."
            )
        raise ConfigError(
            f"{widest} has {len(axes[widest])} sizes: {' x '.join(axes)} span {count:,} boxes; "
            f"{most:,} are allowed",
            remedy=remedy,
        )
    return list(product(*axes.values())) if given is None else given


def _lost(
    config: Config,
    sizes: Sizes,
    keys: Sequence[Key],
) -> Iterator[str]:
    given = config.compilation.cudagraph_capture_sizes
    largest = config.compilation.max_cudagraph_capture_size
    seqs = config.scheduler.max_num_seqs
    tokens = config.scheduler.max_num_batched_tokens
    if not sizes or config.compilation.boxes is not None:
        return
    q = config.query_len
    top = sizes[-1]
    captured = {descriptor.num_tokens for _, descriptor in keys}
    has_decode = any(descriptor.uniform for _, descriptor in keys)
    above = f"as multiples of {q} tokens, a request's, they are above the largest size"
    reasons = []
    listed = sorted(set(given)) if isinstance(given, tuple) else ()
    for size in listed:
        rounded = -(-size // q) * q
        if size > tokens:
            why = f"max_num_batched_tokens is {tokens}; raise it to {max(listed)}"
            reasons.append((f"are dropped: {why}, or list at most {tokens}", size))
        elif size > top:
            reasons.append((f"are dropped: {above}", size))
        elif has_decode and top < rounded <= q * seqs:
            reasons.append((f"have no decode graph: {above}", size))
        elif captured.isdisjoint({size, rounded}):
            why = f"a decode batch has at most {seqs} requests, {counted(q, 'token')} each"
            reasons.append((f"have no graph: {why}", size))
    for why, lost in grouped(reasons).items():
        yield f"capture sizes {', '.join(map(str, lost))} {why}"
    if isinstance(given, str | None) and largest and top < largest:
        last = ladder_sizes(config, given or "vllm").sizes[-1]
        why = f"the ladder ends at {last}"
        if tokens < largest:
            why = f"max_num_batched_tokens is {tokens}"
        if top < last:
            why += f", and the last multiple of {q} tokens, a request's, at {top}"
        yield f"max_cudagraph_capture_size {largest} is truncated to {top}: {why}"


def _unread(
    compilation: CompilationConfig,
    mode: CUDAGraphMode,
) -> Iterator[str]:
    route = compilation.segments_from
    why = f"segments come from {route} (compilation.piecewise)"
    is_auto = compilation.cudagraph_mode is CUDAGraphMode.AUTO  # planned as FULL
    if not is_auto and not mode.has_mode(CUDAGraphMode.PIECEWISE):
        route = mode.name
        why = f"mode {route} has no segments; set cudagraph_mode to PIECEWISE"
    is_unread = {
        "ops": compilation.splitting_ops and route == "wrappers",
        "modules": compilation.splitting_modules and route != "modules",
    }
    for kind, unread in is_unread.items():
        if unread:
            yield f"compilation.splitting_{kind} are not looked at: {why}"
