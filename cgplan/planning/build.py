"""From a configuration to its plan: the keys of a list of sizes, or of a ladder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from types import MappingProxyType

from cgplan.config import Config, Dim
from cgplan.errors import ConfigError, ModeError, PlanError
from cgplan.modes import AttentionSupport, BatchDescriptor, CUDAGraphMode
from cgplan.planning.plan import (
    SIMULATED,
    Key,
    Plan,
    PlanChange,
    budget_of,
    capture_config,
    capture_order,
    config_hash,
)

_MOST_BOXES = 100_000  # of sizes in several dimensions
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


def attention_is_split(splitting_ops: tuple[str, ...] | None) -> bool:
    """Whether attention stands outside the graph segments. An operator counts as attention by its
    name.
    """
    ops = DEFAULT_SPLITTING_OPS if splitting_ops is None else splitting_ops
    return any("attention" in op or "attn" in op for op in ops)


def resolve_mode(config: Config) -> tuple[CUDAGraphMode, tuple[PlanChange, ...]]:
    """The mode that can be captured, and the changes that led there, in order: nothing is
    downgraded in silence.

    Raises:
        ModeError: mixed batches are to run as FULL graphs, and the attention supports none.
    """
    compilation = config.compilation
    mode: CUDAGraphMode = compilation.cudagraph_mode
    support: AttentionSupport = compilation.attention_support
    split = attention_is_split(compilation.splitting_ops)
    piecewise_or_none = CUDAGraphMode.PIECEWISE if split else CUDAGraphMode.NONE
    changes: list[PlanChange] = []

    def change(to: CUDAGraphMode, reason: str) -> CUDAGraphMode:
        changes.append(PlanChange(requested=mode, resolved=to, reason=reason))
        return to

    if mode is CUDAGraphMode.AUTO:
        to = piecewise_or_none if support is AttentionSupport.NEVER else CUDAGraphMode.FULL
        mode = change(to, f"a capture decides AUTO by measuring; this is planned as {to}")
    if compilation.splitting_ops == () and mode.has_mode(CUDAGraphMode.PIECEWISE):
        to = CUDAGraphMode.FULL if mode is CUDAGraphMode.FULL_AND_PIECEWISE else CUDAGraphMode.NONE
        mode = change(to, "splitting_ops is empty: there is nothing to split at")
    if mode.mixed_mode() is CUDAGraphMode.FULL and support is not AttentionSupport.ALWAYS:
        if support is AttentionSupport.NEVER:
            raise ModeError(
                f"cudagraph_mode {mode} captures attention, but attention_support is NEVER",
                remedy=f"Choose {'PIECEWISE or NONE' if split else 'NONE'} for "
                "compilation.cudagraph_mode.",
            )
        to = CUDAGraphMode.FULL_AND_PIECEWISE if split else CUDAGraphMode.FULL_DECODE_ONLY
        mode = change(
            to, f"attention_support is {support}: mixed batches cannot run as FULL graphs"
        )
    if mode.decode_mode() is CUDAGraphMode.FULL and support is AttentionSupport.NEVER:
        mode = change(
            piecewise_or_none, "attention_support is NEVER: attention cannot stand inside a graph"
        )
    if (
        mode.decode_mode() is CUDAGraphMode.FULL
        and config.query_len > 1
        and support < AttentionSupport.UNIFORM_BATCH
    ):
        mode = change(
            piecewise_or_none,
            f"attention_support is {support}, but speculative decoding has {config.query_len} "
            "tokens a request",
        )
    return mode, tuple(changes)


def refuse_auto(config: Config) -> None:
    """Raise ConfigError where the mode is AUTO, and has to be known already."""
    if config.compilation.cudagraph_mode is CUDAGraphMode.AUTO:
        raise ConfigError(
            "cudagraph_mode is AUTO, and the graphs have to be known here before the model is "
            "measured",
            remedy="Let `cgplan capture` decide on one process, without --plan, and write the "
            "settings that its report "
            "notes into the configuration. In Python, cgplan.choose_mode(config, model, backend) "
            "gives the "
            "configuration and the plan.",
        )


def vllm(maximum: int) -> tuple[int, ...]:
    """1, 2, 4, then 8..255 by 8, then from 256 by 16. The maximum itself only if it is on the
    stride.
    """
    return tuple(
        s for s in (1, 2, 4, *range(8, 256, 8), *range(256, maximum + 1, 16)) if s <= maximum
    )


def sglang(maximum: int) -> tuple[int, ...]:
    """SGLang's decode ladder: 1, 2, 4, 8, 12, 16..256 by 8, 272..496 by 16, from 512 by 32, and the
    maximum.
    """
    steps = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 497, 16), *range(512, maximum + 1, 32))
    return _up_to(maximum, steps)


def trtllm(maximum: int) -> tuple[int, ...]:
    """TensorRT-LLM's ladder: 1, 2, 4, 8..128 by 8, then by 64, and the maximum."""
    return _up_to(maximum, (1, 2, 4, *range(8, 129, 8), *range(192, maximum + 1, 64)))


def powers_of_two(maximum: int) -> tuple[int, ...]:
    """1, 2, 4, 8, ... and the maximum."""
    return _up_to(maximum, tuple(1 << k for k in range(maximum.bit_length())))


def _up_to(maximum: int, steps: tuple[int, ...]) -> tuple[int, ...]:
    return (*(s for s in steps if s < maximum), maximum)


LADDERS: Mapping[str, Callable[[int], tuple[int, ...]]] = MappingProxyType(
    {"vllm": vllm, "sglang": sglang, "trtllm": trtllm, "powers_of_two": powers_of_two}
)


@dataclass(frozen=True, slots=True)
class CaptureSizes:
    """The capture sizes of a plan.

    Attributes:
        sizes: In tokens, ascending; empty where nothing is captured.
        source: Where they come from, in words.
        warnings: Sizes that were dropped or changed on the way, and why.
    """

    sizes: tuple[int, ...]
    source: str
    warnings: tuple[str, ...] = ()


def resolve_sizes(config: Config, mode: CUDAGraphMode) -> CaptureSizes:
    """Capture sizes for a configuration in the resolved mode. Raises PlanError where none is
    left.
    """
    if mode is CUDAGraphMode.NONE:
        return CaptureSizes((), "cudagraph_mode is NONE")
    given, q = config.compilation.cudagraph_capture_sizes, config.query_len
    lead = config.dims.get(config.dim_names[0])
    if config.compilation.boxes is not None:
        found = CaptureSizes(
            tuple(sorted({box[0] for box in config.compilation.boxes})), "compilation.boxes"
        )
    elif lead is not None and given is None:
        found = CaptureSizes(sizes_of(lead), f"dims.{lead.name}")
    else:
        found = (
            _given(config, given)
            if isinstance(given, tuple)
            else _from_ladder(config, given or "vllm")
        )
    if mode.decode_mode() is CUDAGraphMode.FULL and q > 1:
        # Padded batches have whole requests. As in vLLM, no size is rounded beyond the largest one.
        maximum = max(found.sizes, default=0)
        rounded = {size for s in found.sizes if (size := -(-s // q) * q) <= maximum}
        if not rounded and q <= maximum:
            rounded = {q}
        source = f"{found.source}, rounded up to multiples of {q}"
        found = replace(found, sizes=tuple(sorted(rounded)), source=source)
    if not found.sizes:
        raise PlanError(
            f"no capture size is left: {'; '.join(found.warnings) or found.source}",
            remedy="Raise scheduler.max_num_batched_tokens or max_cudagraph_capture_size, give "
            "smaller "
            "cudagraph_capture_sizes, or set cudagraph_mode: NONE.",
        )
    return found


def sizes_of(dim: Dim) -> tuple[int, ...]:
    """Capture sizes of a named dimension, ascending."""
    step = dim.multiple_of
    if isinstance(dim.sizes, tuple):
        return tuple(sorted(set(dim.sizes)))
    ladder = (step * size for size in LADDERS[dim.sizes or "powers_of_two"](dim.top // step))
    return tuple(size for size in ladder if size >= dim.min)


def _given(config: Config, given: tuple[int, ...]) -> CaptureSizes:
    limit, source = config.scheduler.max_num_batched_tokens, "compilation.cudagraph_capture_sizes"
    sizes, dropped = (sorted({s for s in given if (s > limit) is above}) for above in (False, True))
    names = ", ".join(map(str, dropped))
    warning = f"capture sizes {names} above scheduler.max_num_batched_tokens = {limit} were dropped"
    return CaptureSizes(tuple(sizes), source, (warning,) if dropped else ())


def _from_ladder(
    config: Config, name: str, largest: int = LARGEST_DEFAULT_SIZE, every: int = 0
) -> CaptureSizes:
    """Sizes of a ladder, up to ``largest`` where no maximum is given, and with each size up to
    ``every``.
    """
    q, seqs, tokens = (
        config.query_len,
        config.scheduler.max_num_seqs,
        config.scheduler.max_num_batched_tokens,
    )
    asked = config.compilation.max_cudagraph_capture_size
    maximum = min(min(2 * q * seqs, largest) if asked is None else asked, tokens)
    source = f"ladder {name} up to {maximum}"
    if name != "vllm":  # their sizes are request counts
        return CaptureSizes(
            tuple(q * s for s in LADDERS[name](maximum // q)) if maximum >= q else (), source
        )
    sizes = {*vllm(maximum), tokens, *range(1, every + 1)}
    if asked is None:  # decode batches of all requests
        sizes |= {q * requests for requests in (*(vllm(seqs) if q > 1 else ()), seqs)}
    kept = tuple(sorted(s for s in sizes if s <= maximum))
    if asked is None or kept[-1] == asked:
        return CaptureSizes(kept, source)
    why = (
        f"scheduler.max_num_batched_tokens is {tokens}"
        if tokens < asked
        else "it is off the ladder's stride"
    )
    return CaptureSizes(
        kept, source, (f"max_cudagraph_capture_size {asked} was truncated to {kept[-1]}: {why}",)
    )


def lora_cases(config: Config) -> tuple[int, ...]:
    """Numbers of active adapters to capture for; max_loras + 1 stands for any number of them."""
    if config.lora is None:
        return (0,)
    most = config.lora.max_loras
    if not config.compilation.cudagraph_specialize_lora:
        return (most + 1,)
    powers = (
        [1 << k for k in range(most.bit_length())] if config.lora.specialize_active_lora else []
    )
    return (0, *powers, most + 1)


def build_plan(config: Config) -> Plan:
    """Plan for a configuration, without torch and without a device.

    Raises:
        ModeError: the mode cannot be captured with the model's attention.
        PlanError: no capture size is left.
    """
    mode, changes = resolve_mode(config)
    sizes = resolve_sizes(config, mode)
    cases = lora_cases(config)
    keys = _keys(config, mode, sizes.sizes, cases)
    return Plan(
        requested_mode=config.compilation.cudagraph_mode,
        mode=mode,
        changes=changes,
        dim_names=config.dim_names,
        capture_sizes=sizes.sizes,
        sizes_source=sizes.source,
        keys=keys,
        lora_cases=cases,
        query_len=config.query_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_loras=config.lora.max_loras if config.lora else None,
        warnings=(*sizes.warnings, *_unused(config, mode, sizes.sizes, keys)),
        config_hash=config_hash(config),
        config=capture_config(config),
        budget=budget_of(config),
        simulated=config.model_dump(mode="json", include=SIMULATED, exclude_defaults=True),
    )


def _keys(
    config: Config, mode: CUDAGraphMode, sizes: Sequence[int], cases: Sequence[int]
) -> tuple[Key, ...]:
    seqs, q, boxes = config.scheduler.max_num_seqs, config.query_len, config.compilation.boxes
    others = [sizes_of(config.dims[name]) for name in config.dim_names[1:]]
    count = prod([len(sizes), *map(len, others)])
    if boxes is None and count > _MOST_BOXES:
        raise PlanError(
            f"{' x '.join(config.dim_names)} are {count:,} boxes of sizes; {_MOST_BOXES:,} are "
            "allowed",
            remedy="Give fewer sizes (dims.NAME.sizes, dims.NAME.max), or name the boxes in "
            "compilation.boxes.",
        )
    grid = boxes or [(size, *rest) for size in sizes for rest in product(*others)]
    keys: list[Key] = []
    mixed, decode = mode.mixed_mode(), mode.decode_mode()
    for case in cases:
        if mixed is not CUDAGraphMode.NONE:
            full = mixed is CUDAGraphMode.FULL
            for s, *rest in grid:
                reqs = min(s, seqs) if full else None
                keys.append((mixed, BatchDescriptor(s, reqs, False, case > 0, case, tuple(rest))))
        if mode.separate_routine() and decode is CUDAGraphMode.FULL:
            for s, *rest in grid:
                if q <= s <= q * seqs:
                    keys.append(
                        (
                            decode,
                            BatchDescriptor(
                                s, min(s // q, seqs), True, case > 0, case, tuple(rest)
                            ),
                        )
                    )
    return capture_order(keys)


def _unused(
    config: Config, mode: CUDAGraphMode, sizes: Sequence[int], keys: Sequence[Key]
) -> Iterator[str]:
    compilation = config.compilation
    unused = sorted(set(sizes) - {descriptor.num_tokens for _, descriptor in keys})
    if unused and isinstance(compilation.cudagraph_capture_sizes, tuple):
        yield (
            f"capture sizes {', '.join(map(str, unused))} have no graph: a decode batch has at "
            "most "
            f"scheduler.max_num_seqs = {config.scheduler.max_num_seqs} requests of "
            f"{config.query_len} tokens"
        )
    if not mode.has_mode(CUDAGraphMode.PIECEWISE):
        return
    route = compilation.piecewise
    if route == "auto":
        route = "modules" if compilation.splitting_modules else "ops"
    for kind, names in (
        ("ops", compilation.splitting_ops),
        ("modules", compilation.splitting_modules),
    ):
        if names and kind != route and (kind, route) != ("ops", "modules"):
            yield (
                f"compilation.splitting_{kind} are not looked at: segments come from {route} "
                "(compilation.piecewise)"
            )
