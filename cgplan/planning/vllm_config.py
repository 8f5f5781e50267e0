"""vLLM's compilation config, read into ours: what vLLM would capture for it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cgplan.config import Config, LoadedConfig
from cgplan.config.messages import explain
from cgplan.errors import ConfigError
from cgplan.modes import RUNTIME_MODES

OPTION = "--vllm"
# What vLLM takes where nothing is given and cgplan takes something else.
_DEFAULTS: Mapping[str, Any] = {
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "cudagraph_num_of_warmups": 1,
    "cudagraph_copy_inputs": False,
    "cudagraph_specialize_lora": True,
}
_TAKEN_OVER = (*_DEFAULTS, "cudagraph_capture_sizes", "max_cudagraph_capture_size", "splitting_ops")
# Keys that change how kernels are compiled, or what encoders capture, but not which graphs the decoder has.
_WITHOUT_EFFECT = frozenset(
    {
        "backend", "cache_dir", "compile_cache_save_format", "compile_mm_encoder", "compile_ranges_endpoints",
        "compile_ranges_split_points", "compile_sizes", "cudagraph_mm_encoder", "custom_ops", "debug_dump_path",
        "dynamic_shapes_config", "encoder_cudagraph_max_frames_per_batch",
        "encoder_cudagraph_max_vision_items_per_batch", "encoder_cudagraph_token_budgets", "fast_moe_cold_start",
        "inductor_compile_config", "inductor_passes", "ir_enable_torch_wrap", "pass_config", "use_inductor",
        "use_inductor_graph_partition",
    }
)  # fmt: skip
_MODES = {"NONE": 0, "STOCK_TORCH_COMPILE": 1, "DYNAMO_TRACE_ONCE": 2, "VLLM_COMPILE": 3}
_SPLIT_BY_COMPILATION = 3


@dataclass(frozen=True)
class VllmConfig:
    """vLLM's settings as a configuration.

    Attributes:
        loaded: The configuration, with the origin of each value: an option, or vLLM's default.
        notes: What was left out, assumed or changed on the way.
    """

    loaded: LoadedConfig
    notes: tuple[str, ...]

    @property
    def config(self) -> Config:
        """The configuration."""
        return self.loaded.config


def read_vllm(
    text: str,
    *,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    num_speculative_tokens: int = 0,
    max_loras: int | None = None,
    specialize_active_lora: bool = False,
) -> VllmConfig:
    """What vLLM would capture for, from its own options.

    Args:
        text: vLLM's ``--compilation-config``: a JSON object.
        max_num_seqs, max_num_batched_tokens: As vLLM's options of these names. Absent: cgplan's defaults, with a
            note; vLLM's own depend on the GPU.
        num_speculative_tokens: Of its ``--speculative-config``.
        max_loras: As its option; None without ``--enable-lora``.
        specialize_active_lora: As its option.

    Raises:
        ConfigError: the text is not JSON, or names a key that vLLM does not have, or a value that cannot be.
    """
    given = _named_mode(_parse(text))
    notes = [f"{name} does not change what is captured" for name in given if name in _WITHOUT_EFFECT]
    mode, changed = _cudagraph_mode(given)
    compilation = {name: given[name] for name in _TAKEN_OVER if given.get(name) is not None} | mode
    bounds = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    data: dict[str, Any] = {
        "compilation": {**_DEFAULTS, **compilation},
        "scheduler": {name: value for name, value in bounds.items() if value is not None},
        "speculative": {"num_speculative_tokens": num_speculative_tokens} if num_speculative_tokens else {},
    }
    if max_loras is not None:
        data["lora"] = {"max_loras": max_loras, "specialize_active_lora": specialize_active_lora}
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise explain(error, data, OPTION, Config) from None
    origins = _origins(data, compilation)
    if mode:
        origins["compilation.cudagraph_mode"] = f"{OPTION}, mode {given['mode']}"
    notes += [
        f"--{name.replace('_', '-')} was not given: {getattr(config.scheduler, name)} was taken, vLLM's default "
        "depends on the GPU"
        for name, value in bounds.items()
        if value is None
    ]
    assumed = "vLLM lowers the mode where its attention backend cannot be captured; here it is taken to be capturable"
    return VllmConfig(LoadedConfig(config, origins, Path()), (*notes, *changed, assumed))


def _parse(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{OPTION} {text!r} is not JSON: {error}",
            remedy="Give what vLLM's --compilation-config takes, in single quotes: "
            """--vllm '{"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2, 4]}'.""",
        ) from None
    if not isinstance(given, dict):
        raise ConfigError(
            f"{OPTION} {text!r} is not a JSON object",
            remedy="""Give a JSON object, such as --vllm '{"cudagraph_mode": "FULL"}'; '{}' shows vLLM's defaults.""",
        )
    known = sorted({*_TAKEN_OVER, *_WITHOUT_EFFECT, "mode"})
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(
                f"{OPTION}: vLLM's compilation config has no key {name!r}{hint}",
                remedy=f"Correct or remove the key. Those that decide what is captured: {', '.join(_TAKEN_OVER)}.",
            )
    return given


def _named_mode(given: dict[str, Any]) -> dict[str, Any]:
    """The same with cudagraph_mode by name: vLLM takes the values of its runtime modes, too."""
    number = given.get("cudagraph_mode")
    if not isinstance(number, int) or isinstance(number, bool):
        return given
    names = {mode.value: mode.name for mode in RUNTIME_MODES}
    if number not in names:
        raise ConfigError(
            f"{OPTION}: found cudagraph_mode {number}, vLLM's numbers are 0 to {max(names)}",
            remedy=f"Choose one of {', '.join(f'{n} ({name})' for n, name in names.items())}, or write the name of "
            "another mode.",
        )
    return {**given, "cudagraph_mode": names[number]}


def _cudagraph_mode(given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A mode that differs from the one given, where vLLM's compilation mode rules PIECEWISE graphs out."""
    level = given.get("mode")
    if level is None:
        return {}, ()
    number = _MODES.get(level.upper()) if isinstance(level, str) else level
    if isinstance(number, bool) or number not in _MODES.values():
        raise ConfigError(
            f"{OPTION}: found mode {level!r}, vLLM's compilation mode is 0 to 3",
            remedy=f"Choose one of {', '.join(f'{n} ({name})' for name, n in _MODES.items())}, or leave it out.",
        )
    asked = str(given.get("cudagraph_mode") or _DEFAULTS["cudagraph_mode"])
    if number == _SPLIT_BY_COMPILATION or "PIECEWISE" not in asked.upper():
        return {}, ()
    return {"cudagraph_mode": "NONE"}, (
        f"cudagraph_mode {asked} -> NONE: vLLM has PIECEWISE graphs with mode {_SPLIT_BY_COMPILATION} only, "
        f"mode is {level}",
    )


def _origins(data: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, str]:
    """Where each value came from, by dotted key."""
    origins = {f"compilation.{name}": OPTION if name in given else "vLLM's default" for name in data["compilation"]}
    for section in ("scheduler", "speculative", "lora"):
        origins |= {f"{section}.{name}": f"--{name.replace('_', '-')}" for name in data.get(section, {})}
    return origins


__all__ = ["VllmConfig", "read_vllm"]
