"""From a configuration to the graphs to capture."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from cgplan.config import CompilationConfig, Config, Dim
from cgplan.errors import ConfigError, ModeError, PlanError
from cgplan.modes import AttentionSupport, CUDAGraphMode
from cgplan.planning.plan import (
    SIMULATED,
    Key,
    Plan,
    PlanChange,
    budget_of,
    capture_config,
    capture_order,
    config_hash,
    lanes_of,
)
from cgplan.units import counted, grouped

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
    mode: CUDAGraphMode = compilation.cudagraph_mode
    support: AttentionSupport = compilation.attention_support
    split = attention_is_split(compilation.splitting_ops)
    piecewise_or_none = CUDAGraphMode.PIECEWISE if split else CUDAGraphMode.NONE
    never = support is AttentionSupport.NEVER
    changes: list[PlanChange] = []

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
            remedy="Let `cgplan capture` decide on one process, without --plan, and write the "
            "settings that its report notes into the configuration. In Python, "
            "cgplan.choose_mode(config, model, backend) gives the configuration and the plan.",
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
        found = CaptureSizes(tuple(sorted({box[0] for box in boxes})), "compilation.boxes")
    elif lead is not None and given is None:
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
    every: int = 0,
) -> CaptureSizes:
    """At most ``largest`` if no maximum is given, with each size up to ``every``."""
    q = config.query_len
    seqs = config.scheduler.max_num_seqs
    tokens = config.scheduler.max_num_batched_tokens
    asked = config.compilation.max_cudagraph_capture_size
    wanted = min(2 * q * seqs, largest) if asked is None else asked
    maximum = min(wanted, tokens)
    ladder = LADDERS[name]
    source = f"ladder {name} up to {maximum}"
    if name != "vllm":  # their sizes are request counts
        requests = ladder(maximum // q) if maximum >= q else ()
        return CaptureSizes(tuple(q * number for number in requests), source)
    sizes = {*ladder(maximum), tokens, *range(1, every + 1)}
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
        config_hash=config_hash(config),
        config=capture_config(config),
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
    return tuple(sorted(keys, key=_v2_place)) if is_v2 else capture_order(keys)


def _v2_place(key: Key) -> tuple[bool, int]:
    mode, descriptor = key
    return mode is CUDAGraphMode.FULL, -descriptor.num_tokens


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
    reasons: list[tuple[str, int]] = []
    listed = sorted(set(given)) if isinstance(given, tuple) else ()
    for size in listed:
        rounded = -(-size // q) * q
        if size > tokens:
            reasons.append((f"are dropped: max_num_batched_tokens is {tokens}", size))
        elif size > top:
            reasons.append((f"are dropped: {above}", size))
        elif has_decode and top < rounded <= q * seqs:
            reasons.append((f"have no decode graph: {above}", size))
        elif captured.isdisjoint({size, rounded}):
            why = f"a decode batch has at most {seqs} requests, {counted(q, 'token')} each"
            reasons.append((f"have no graph: {why}", size))
    for why, lost in grouped(reasons).items():
        yield f"capture sizes {', '.join(map(str, lost))} {why}"
    if given in (None, "vllm") and largest is not None and top < largest:
        last = ladder_sizes(config, "vllm").sizes[-1]
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
    if not mode.has_mode(CUDAGraphMode.PIECEWISE):
        return
    route = compilation.piecewise
    if route == "auto":
        route = "modules" if compilation.splitting_modules else "ops"
    is_unread = {
        "ops": compilation.splitting_ops and route == "wrappers",
        "modules": compilation.splitting_modules and route != "modules",
    }
    for kind, unread in is_unread.items():
        if unread:
            yield (
                f"compilation.splitting_{kind} are not looked at: segments come from {route} "
                "(compilation.piecewise)"
            )
