"""From a configuration to its plan: the keys of a list of sizes, or of a ladder."""

from __future__ import annotations

from collections.abc import Sequence

from cgplan.config import Config
from cgplan.descriptors import BatchDescriptor
from cgplan.modes import CUDAGraphMode
from cgplan.planning.plan import Key, Plan, PlanChange, budget_of, capture_config, capture_order, config_hash
from cgplan.planning.resolution import resolve_mode
from cgplan.planning.sizes import resolve_sizes


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
        changes=tuple(PlanChange(requested=c.requested, resolved=c.resolved, reason=c.reason) for c in changes),
        capture_sizes=sizes.sizes,
        sizes_source=sizes.source,
        keys=keys,
        lora_cases=cases,
        query_len=config.query_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_loras=config.lora.max_loras if config.lora else None,
        warnings=(*sizes.warnings, *_unused_sizes(config, sizes.sizes, keys), *_unused_splits(config, mode)),
        config_hash=config_hash(config),
        config=capture_config(config),
        budget=budget_of(config),
    )


def _unused_sizes(config: Config, sizes: Sequence[int], keys: Sequence[Key]) -> tuple[str, ...]:
    """A warning about sizes that the user listed and no graph is captured for."""
    unused = sorted(set(sizes) - {descriptor.num_tokens for _, descriptor in keys})
    if not unused or not isinstance(config.compilation.cudagraph_capture_sizes, tuple):
        return ()
    return (
        f"capture sizes {', '.join(map(str, unused))} have no graph: a decode batch has at most "
        f"scheduler.max_num_seqs = {config.scheduler.max_num_seqs} requests of {config.query_len} tokens",
    )


def _unused_splits(config: Config, mode: CUDAGraphMode) -> tuple[str, ...]:
    """Warnings about splits that the user named and the way to PIECEWISE segments does not look at."""
    compilation = config.compilation
    if not mode.has_mode(CUDAGraphMode.PIECEWISE):
        return ()
    way = compilation.piecewise
    if way == "auto":
        way = "modules" if compilation.splitting_modules else "ops"
    given = {"ops": compilation.splitting_ops, "modules": compilation.splitting_modules}
    return tuple(
        f"compilation.splitting_{kind} are not looked at: segments come from {way} (compilation.piecewise)"
        for kind, names in given.items()
        if names and kind != way
    )


def lora_cases(config: Config) -> tuple[int, ...]:
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
    return capture_order(keys)
