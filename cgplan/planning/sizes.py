"""Capture sizes: from what the user gave, or from a ladder, to the sizes that are captured."""

from __future__ import annotations

from dataclasses import dataclass

from cgplan.config import Config
from cgplan.errors import PlanError
from cgplan.modes import CUDAGraphMode
from cgplan.planning.ladders import LADDERS, vllm

LARGEST_DEFAULT_SIZE = 512


@dataclass(frozen=True, slots=True)
class CaptureSizes:
    """The capture sizes of a plan.

    Attributes:
        sizes: In tokens, ascending; empty where nothing is captured.
        source: Where they came from, in words.
        warnings: What was dropped or changed on the way, and why.
    """

    sizes: tuple[int, ...]
    source: str
    warnings: tuple[str, ...] = ()

    @property
    def maximum(self) -> int:
        """Largest size in tokens, 0 if there is none."""
        return self.sizes[-1] if self.sizes else 0


def resolve_sizes(config: Config, mode: CUDAGraphMode) -> CaptureSizes:
    """Capture sizes for a configuration in the resolved mode. Raises PlanError where none is left."""
    if mode is CUDAGraphMode.NONE:
        return CaptureSizes((), "cudagraph_mode is NONE")
    given = config.compilation.cudagraph_capture_sizes
    found = _given(config, given) if isinstance(given, tuple) else _from_ladder(config, given or "vllm")
    if mode.decode_mode() is CUDAGraphMode.FULL and config.query_len > 1:
        found = _rounded(found, config.query_len)
    if not found.sizes:
        raise PlanError(
            f"no capture size is left: {'; '.join(found.warnings) or found.source}",
            remedy="Raise scheduler.max_num_batched_tokens or max_cudagraph_capture_size, give smaller "
            "cudagraph_capture_sizes, or set cudagraph_mode: NONE.",
        )
    return found


def _given(config: Config, given: tuple[int, ...]) -> CaptureSizes:
    limit = config.scheduler.max_num_batched_tokens
    sizes = tuple(sorted(set(given)))
    kept = tuple(s for s in sizes if s <= limit)
    dropped = [str(s) for s in sizes if s > limit]
    warning = f"capture sizes {', '.join(dropped)} above scheduler.max_num_batched_tokens = {limit} were dropped"
    return CaptureSizes(kept, "compilation.cudagraph_capture_sizes", (warning,) if dropped else ())


def _from_ladder(config: Config, name: str) -> CaptureSizes:
    q, seqs, tokens = config.query_len, config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens
    asked = config.compilation.max_cudagraph_capture_size
    maximum = min(min(2 * q * seqs, LARGEST_DEFAULT_SIZE) if asked is None else asked, tokens)
    source = f"ladder {name} up to {maximum}"
    if name != "vllm":  # their sizes are request counts
        return CaptureSizes(tuple(q * s for s in LADDERS[name](maximum // q)) if maximum >= q else (), source)
    sizes = set(vllm(maximum))
    if q == 1:
        sizes.add(seqs)
    elif asked is None:
        sizes.update(q * requests for requests in (*vllm(seqs), seqs))
    sizes.add(tokens)
    kept = tuple(sorted(s for s in sizes if s <= maximum))
    warnings: tuple[str, ...] = ()
    if asked is not None and kept[-1] != asked:
        why = f"scheduler.max_num_batched_tokens is {tokens}" if tokens < asked else "it is off the ladder's stride"
        warnings = (f"max_cudagraph_capture_size {asked} was truncated to {kept[-1]}: {why}",)
    return CaptureSizes(kept, source, warnings)


def _rounded(found: CaptureSizes, q: int) -> CaptureSizes:
    """Sizes rounded up to multiples of the query length, within the maximum: padded batches have whole requests."""
    rounded = tuple(sorted({size for s in found.sizes if (size := -(-s // q) * q) <= found.maximum}))
    return CaptureSizes(rounded, f"{found.source}, rounded up to multiples of {q}", found.warnings)
