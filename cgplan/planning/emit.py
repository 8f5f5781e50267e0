"""A plan in the words of an inference engine: options and files that vLLM, SGLang and TensorRT-LLM read."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from cgplan.modes import CUDAGraphMode
from cgplan.planning.building import build_plan
from cgplan.planning.plan import Plan
from cgplan.planning.vllm_config import read_vllm

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


__all__ = ["Emission", "Engine", "emit"]
