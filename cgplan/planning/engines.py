"""A plan in the words of an inference engine: options and files that vLLM, SGLang and TensorRT-LLM read."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from cgplan.config import Config, LoadedConfig
from cgplan.config.messages import explain
from cgplan.errors import ConfigError
from cgplan.modes import RUNTIME_MODES, CUDAGraphMode
from cgplan.planning.build import build_plan
from cgplan.planning.plan import Plan

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


Engine = Literal["vllm", "sglang", "trtllm", "json"]


@dataclass(frozen=True, slots=True)
class Emission:
    """What an engine is to be given.

    Attributes:
        text: Options for a command line, or a file; without a newline at the end.
        notes: Where the engine does something else than the plan says, and what it costs.
    """

    text: str
    notes: tuple[str, ...] = ()


def emit(plan: Plan, engine: Engine) -> Emission:
    """A plan as an engine reads it.

    The engines have one list of sizes for a kind of batch, whatever the LoRA case; vLLM has one for all. Where the
    plan's lanes differ, their union is emitted, and a note says what that costs.

    Args:
        plan: Any plan.
        engine: ``vllm``: the option ``--compilation-config``, quoted for a shell. ``sglang``: its options for decode
            (sizes in requests) and prefill (in tokens). ``trtllm``: YAML for ``cuda_graph_config`` (in requests).
            ``json``: sizes by lane, for any other.
    """
    return {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm, "json": _json}[engine](plan)


def _vllm(plan: Plan) -> Emission:
    mode = _captured_mode(plan)
    sizes, notes = _vllm_sizes(plan, mode)
    most = plan.max_loras or 0
    by_count = any(0 < case <= most for case in plan.lora_cases)
    config: dict[str, object] = {"cudagraph_mode": mode.name if sizes else "NONE"}
    if sizes:
        config |= {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": sizes[-1]}
    if most and plan.lora_cases == (most + 1,):
        config["cudagraph_specialize_lora"] = False
    text = json.dumps(config)
    read = read_vllm(
        text,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        num_speculative_tokens=plan.query_len - 1,
        max_loras=plan.max_loras,
        specialize_active_lora=by_count,
    )
    captured = build_plan(read.config)
    if set(captured.keys) != set(plan.keys):
        notes.append(
            "vLLM has one list of sizes for all modes and LoRA cases: it captures "
            f"{len(captured.keys)} keys, the plan has {len(plan.keys)}"
        )
    options = f"--max-num-seqs {plan.max_num_seqs} --max-num-batched-tokens {plan.max_num_batched_tokens}"
    if most:
        options += f" --enable-lora --max-loras {most}" + (" --specialize-active-lora" if by_count else "")
    if plan.query_len > 1:
        options += f" and {plan.query_len - 1} speculative tokens"
    return Emission(f"--compilation-config {shlex.quote(text)}", (*notes, f"made for {options}"))


def _vllm_sizes(plan: Plan, mode: CUDAGraphMode) -> tuple[list[int], list[str]]:
    """The union of all lanes. vLLM itself would round sizes up to multiples of q and drop those past its maximum."""
    sizes = _sizes(key.num_tokens for _, key in plan.keys)
    q = plan.query_len
    if q == 1 or mode.decode_mode() is not CUDAGraphMode.FULL:
        return sizes, []
    limit = plan.max_num_batched_tokens // q * q
    rounded = _sizes(min(-(-size // q) * q, limit) for size in sizes if limit)
    if rounded == sizes:
        return sizes, []
    return rounded, [f"sizes were rounded up to multiples of {q}, the tokens of a request, as vLLM does"]


def _sglang(plan: Plan) -> Emission:
    decode, prefill = _requests(plan), _sizes(k.num_tokens for mode, k in plan.keys if mode is CUDAGraphMode.PIECEWISE)
    if decode:
        options = [f"--cuda-graph-bs-decode {_listed(decode)} --cuda-graph-max-bs-decode {decode[-1]}"]
    else:
        options = ["--disable-decode-cuda-graph"]
    if prefill:
        options.append(f"--cuda-graph-bs-prefill {_listed(prefill)} --cuda-graph-max-bs-prefill {prefill[-1]}")
    else:
        options.append("--disable-prefill-cuda-graph")
    notes = [*_unit_notes(plan), *_union_notes(plan, "SGLang", len(decode) + len(prefill))]
    if prefill:
        notes.append("prefill sizes are in tokens; --cuda-graph-backend-prefill chooses how SGLang captures them")
    if _captured_mode(plan) is CUDAGraphMode.FULL:
        notes.append("SGLang has no FULL graphs of mixed batches: they run eagerly")
    elif _captured_mode(plan) is CUDAGraphMode.PIECEWISE:
        notes.append("the plan has no FULL graphs, SGLang takes them for decode batches all the same")
    return Emission(" ".join(options), tuple(notes))


def _trtllm(plan: Plan) -> Emission:
    sizes = _requests(plan)
    if not sizes:
        return Emission("cuda_graph_config: null")
    piecewise = sum(mode is CUDAGraphMode.PIECEWISE for mode, _ in plan.keys)
    notes = [*_unit_notes(plan), *_union_notes(plan, "TensorRT-LLM", len(sizes))]
    if piecewise:
        notes.append(
            f"the plan's {piecewise} PIECEWISE keys are left out: TensorRT-LLM captures such graphs by "
            "torch_compile_config (enable_piecewise_cuda_graph, capture_num_tokens)"
        )
    lines = ("cuda_graph_config:", f"  batch_sizes: [{', '.join(map(str, sizes))}]", "  enable_padding: true")
    return Emission("\n".join(lines), tuple(notes))


def _json(plan: Plan) -> Emission:
    lanes = ",\n".join(
        json.dumps({**lane._asdict(), "mode": lane.mode.name, "sizes": sizes}) for lane, sizes in plan.lanes().items()
    )
    return Emission(f'{{"query_len": {plan.query_len}, "lanes": [\n{lanes}\n]}}')


def _captured_mode(plan: Plan) -> CUDAGraphMode:
    """The mode that has the plan's graphs and no others: a lane may have lost all of its sizes."""
    kinds = {(mode, key.uniform) for mode, key in plan.keys}
    modes = {mode for mode, _ in kinds}
    if (CUDAGraphMode.FULL, False) in kinds:
        return CUDAGraphMode.FULL
    if modes == {CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE}:
        return CUDAGraphMode.FULL_AND_PIECEWISE
    if modes:
        return CUDAGraphMode.PIECEWISE if CUDAGraphMode.PIECEWISE in modes else CUDAGraphMode.FULL_DECODE_ONLY
    return CUDAGraphMode.NONE


def _requests(plan: Plan) -> list[int]:
    """Sizes of decode batches in requests, by the graphs that serve them: the FULL ones, else the PIECEWISE ones."""
    full = [key.num_tokens for mode, key in plan.keys if mode is CUDAGraphMode.FULL]
    tokens = full or [key.num_tokens for _, key in plan.keys]
    return _sizes(min(-(-size // plan.query_len), plan.max_num_seqs) for size in tokens)


def _unit_notes(plan: Plan) -> list[str]:
    q, most = plan.query_len, plan.max_num_seqs
    notes = [f"decode sizes are in requests of {q} tokens, the plan's in tokens"] if q > 1 else []
    beyond = sorted({k.num_tokens for m, k in plan.keys if m is CUDAGraphMode.FULL and k.num_tokens > q * most})
    if beyond and (CUDAGraphMode.FULL, False) in {(mode, key.uniform) for mode, key in plan.keys}:
        notes.append(
            f"{_listed(beyond)} tokens became {most} requests, as many as a decode batch has: in the plan those graphs "
            "serve decode batches, too"
        )
    return notes


def _union_notes(plan: Plan, engine: str, graphs: int) -> list[str]:
    """What one list for all LoRA cases comes to."""
    if len({key.num_active_loras for _, key in plan.keys}) < 2:
        return []
    return [f"{engine} has no list of sizes by LoRA case: {graphs} sizes were emitted for {len(plan.keys)} keys"]


def _sizes(sizes: Iterable[int]) -> list[int]:
    return sorted(set(sizes))


def _listed(sizes: Sequence[int]) -> str:
    return " ".join(map(str, sizes))


__all__ = ["Emission", "Engine", "VllmConfig", "emit", "read_vllm"]
