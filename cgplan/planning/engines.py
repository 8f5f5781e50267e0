"""Plans as options of vLLM, SGLang and TensorRT-LLM; vLLM's options as a configuration.

Names and rules of ``VERSIONS``: vLLM's config/compilation.py, config/vllm.py, engine/arg_utils.py;
SGLang's srt/arg_groups/fields, srt/model_executor/runner; TensorRT-LLM's LLM API reference,
_torch/pyexecutor.
"""

import json
import shlex
from argparse import ArgumentError, ArgumentParser
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, pairwise
from math import gcd
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from cgplan.config import LoadedConfig, Override, loaded_config
from cgplan.config.schema import Places
from cgplan.errors import ConfigError, did_you_mean
from cgplan.modes import RUNTIME_MODES, CUDAGraphMode
from cgplan.planning.dispatcher import CudagraphDispatcher
from cgplan.planning.plan import Emission, Plan, build_plan, ladder_sizes, lanes_of
from cgplan.units import counted, from_to

VERSIONS = {"vLLM": "0.33.0", "SGLang": "0.5.23", "TensorRT-LLM": "1.4.0rc1"}
OPTION = "--vllm"
# vLLM's defaults that differ from cgplan's.
_DEFAULTS: Mapping[str, Any] = {
    "cudagraph_mode": "FULL_AND_PIECEWISE",
    "cudagraph_num_of_warmups": 1,
    "cudagraph_copy_inputs": False,
    "cudagraph_specialize_lora": True,
}
_TAKEN_OVER = (*_DEFAULTS, "cudagraph_capture_sizes", "max_cudagraph_capture_size", "splitting_ops")
# Keys that change kernels, but no graph; the last two are of releases before 0.33.
_WITHOUT_EFFECT = (
    "backend",
    "cache_dir",
    "compile_cache_save_format",
    "compile_mm_encoder",
    "compile_ranges_endpoints",
    "compile_sizes",
    "custom_ops",
    "debug_dump_path",
    "dynamic_shapes_config",
    "fast_moe_cold_start",
    "inductor_compile_config",
    "inductor_passes",
    "ir_enable_torch_wrap",
    "pass_config",
    "use_inductor_graph_partition",
    "compile_ranges_split_points",
    "use_inductor",
)
# Keys of other graphs: of encoders, and of a YOCO model's replay.
_OTHER_GRAPHS = (
    "cudagraph_mm_encoder",
    "encoder_cudagraph_max_frames_per_batch",
    "encoder_cudagraph_max_vision_items_per_batch",
    "encoder_cudagraph_token_budgets",
    "cudagraph_decoder_replay",
    "decoder_replay_cudagraph_capture_sizes",
    "decoder_replay_trim_threshold",
)
# of vLLM's ladder on GPUs of compute capability 10.x (config/vllm.py)
_LARGEST_ON_BLACKWELL = 1024
# of vLLM's speculative methods, those that its model runner V2 does not have (config/vllm.py)
_METHODS_OF_V1 = ("suffix", "custom_class")
Method = Literal["eagle", "eagle3", "mtp", "ngram", "draft_model", "suffix", "custom_class"]
_PLANNED = (
    "cudagraph_mode",
    "cudagraph_capture_sizes",
    "max_cudagraph_capture_size",
    "cudagraph_specialize_lora",
)
_MODES = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")


Engine = Literal["vllm", "sglang", "trtllm"]


class EngineOptions(NamedTuple):
    """Of an engine's command line, for the options that a plan becomes.

    Attributes:
        multiple: Of tokens; ``in_requests``: decode sizes, of requests: what SGLang's
            ``get_cuda_graph_batch_size_alignment`` asks.
        ranks: Attention DP ranks, which share the bounds.
        decided: Options given for what the plan decides.
        kept: Keys of vLLM's compilation config that no plan decides.
        ladder: Options that change vLLM's ladder, each after a space.
        again, rounded: Options of files for commands that plan, after a space: for other traffic,
            and for rounded sizes.
    """

    multiple: int = 1
    in_requests: bool = False
    ranks: int = 1
    decided: tuple[str, ...] = ()
    kept: Mapping[str, Any] = MappingProxyType({})
    ladder: str = ""
    again: str = ""
    rounded: str = ""


NO_OPTIONS = EngineOptions()


class VllmConfig(NamedTuple):
    """``lost``: sizes that were asked for and that vLLM does not capture."""

    loaded: LoadedConfig
    notes: tuple[str, ...]
    lost: tuple[str, ...]
    options: EngineOptions

    def said(self, *logs: object) -> tuple[str, ...]:
        """The notes, and without a log the one on what it alone tells."""
        told = (
            "vLLM lowers the mode where its attention backend cannot be captured: only its log "
            "tells (--costs, --log)"
        )
        return self.notes if any(logs) else (*self.notes, told)


def read_vllm(
    text: str,
    *,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    num_speculative_tokens: int = 0,
    speculative_method: Method | None = None,
    runner: Literal["v1", "v2"] | None = None,
    max_loras: int | None = None,
    specialize_active_lora: bool = False,
    performance_mode: Literal["balanced", "interactivity", "throughput"] = "balanced",
    blackwell: bool = False,
    overrides: Iterable[str | Override] = (),
) -> VllmConfig:
    """The configuration that captures for the same batches as vLLM with these options.

    ``text`` is its ``--compilation-config``, a JSON object. Absent bounds are cgplan's defaults,
    because vLLM's depend on the GPU. ``max_loras`` is None without ``--enable-lora``; ``runner`` is
    V2, unless it lacks the speculative method; ``blackwell`` is compute capability 10.x;
    ``overrides`` win.

    Raises:
        ConfigError: a wrong text or value, or a model runner without the speculative method.
        PlanError: no capture size is left.
    """
    given = _parse(text)
    runner, said = _runner(runner, speculative_method)
    notes = [said, *_ignored(given, runner)]
    asked = {name: given[name] for name in _TAKEN_OVER if given.get(name) is not None}
    options: dict[str, Any] = {
        "scheduler.max_num_seqs": max_num_seqs,
        "scheduler.max_num_batched_tokens": max_num_batched_tokens,
        "lora.max_loras": max_loras,
        "lora.specialize_active_lora": None if max_loras is None else specialize_active_lora,
    }
    if num_speculative_tokens:
        options["speculative.num_speculative_tokens"] = num_speculative_tokens
        if speculative_method not in _METHODS_OF_V1:
            options["speculative.method"] = speculative_method
    elif speculative_method:
        raise ConfigError(
            f"--speculative-method {speculative_method}: the number of drafts is missing",
            remedy="Give --num-speculative-tokens; the model's configuration has that of mtp.",
        )
    if num_speculative_tokens and speculative_method is None and runner == "v2":
        notes.append(
            "the speculative method was not given: graphs of a draft model, which eagle and mtp "
            "have, are not counted"
        )
    if specialize_active_lora and max_loras is None:
        notes.append("--specialize-active-lora: no adapter is counted without --max-loras")
    found = [
        *_overrides(asked, options),
        Override(f"compilation.key_rules=vllm_{runner}", "--runner"),
    ]
    mode = str(asked.get("cudagraph_mode", _DEFAULTS["cudagraph_mode"]))
    level = given.get("mode")
    is_compiled = level in (None, _MODES.index("VLLM_COMPILE"))
    if not is_compiled and "PIECEWISE" in mode.upper():
        found.append(Override("compilation.cudagraph_mode=NONE", f"{OPTION}, mode {level}"))
        notes.append(
            f"cudagraph_mode {mode} -> NONE: vLLM has PIECEWISE graphs with mode 3 only, mode is "
            f"{level}"
        )
    overrides = tuple(overrides)
    places: Places = {("compilation", name): OPTION for name in asked}
    loaded = loaded_config({"compilation": asked}, OPTION, (*found, *overrides), places)
    config = loaded.config
    if config.compilation.cudagraph_capture_sizes is None:
        ladder = "vllm_interactivity" if performance_mode == "interactivity" else "vllm"
        widest = ladder_sizes(config, ladder, _LARGEST_ON_BLACKWELL).sizes
        usual = ladder_sizes(config, ladder).sizes
        sizes = widest if blackwell else usual
        if sizes != widest:
            notes.append(
                f"vLLM's sizes end at {sizes[-1]}, and on GPUs of compute capability 10.x (B200, "
                f"GB200, B300) at {widest[-1]}: --blackwell"
            )
        named = ladder if sizes == usual else [*sizes]
        if named != "vllm":
            option = "--blackwell" if blackwell else "--performance-mode"
            found.append(Override(f"compilation.cudagraph_capture_sizes={named}", option))
            loaded = loaded_config({"compilation": asked}, OPTION, (*found, *overrides), places)
    is_doubled = performance_mode == "throughput"
    doubled = ", and --performance-mode throughput doubles it" * is_doubled
    logged = "; its log has `Chunked prefill is enabled with max_num_batched_tokens=`"
    for name, where in {"max_num_seqs": "", "max_num_batched_tokens": logged}.items():
        if options[f"scheduler.{name}"] is None:
            notes.append(
                f"--{name.replace('_', '-')} was not given: {getattr(config.scheduler, name)} was "
                f"taken, vLLM's default depends on the GPU{doubled}{where}"
            )
    kept = {name: value for name, value in given.items() if name not in _PLANNED}
    ladder = "" if performance_mode == "balanced" else f" --performance-mode {performance_mode}"
    ladder += " --blackwell" if blackwell else ""
    engine_options = EngineOptions(kept=kept, ladder=ladder)
    return VllmConfig(loaded, tuple(notes), build_plan(config).warnings, engine_options)


def _runner(
    asked: Literal["v1", "v2"] | None, method: Method | None
) -> tuple[Literal["v1", "v2"], str]:
    if method in _METHODS_OF_V1:
        if asked == "v2":
            raise ConfigError(
                f"vLLM's model runner V2 has no speculative method {method}",
                remedy="Leave out --runner, or give --runner v1.",
            )
        return "v1", f"graphs are those of model runner V1: V2 has no speculative method {method}"
    if asked == "v1":
        return "v1", "graphs are those of model runner V1 (VLLM_USE_V2_MODEL_RUNNER=0)"
    return "v2", "graphs are those of model runner V2, vLLM's default; V1's: --runner v1"


def _ignored(given: Mapping[str, Any], runner: str) -> Iterator[str]:
    if runner == "v2" and given.get("cudagraph_specialize_lora") is False:
        yield "model runner V2 ignores cudagraph_specialize_lora; V1 does not: --runner v1"
    for name in given:
        if name == "pass_config" and _has_sequence_parallelism(given):
            yield (
                "pass_config: with enable_sp vLLM drops sizes that are no multiple of its "
                "--tensor-parallel-size"
            )
        elif name in _WITHOUT_EFFECT:
            yield f"{name} does not change what is captured"
    others = [name for name in given if name in _OTHER_GRAPHS]
    if others:
        yield (
            f"{' and '.join(others)}: graphs of encoders and of decoder replay are not among "
            "those shown"
        )


def _has_sequence_parallelism(given: Mapping[str, Any]) -> bool:
    passes = given.get("pass_config")
    return isinstance(passes, Mapping) and bool(passes.get("enable_sp"))


def _overrides(asked: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[Override]:
    """vLLM's defaults for what is not asked for, and its options by dotted names."""
    for name, value in _DEFAULTS.items():
        if name not in asked:
            yield Override(f"compilation.{name}={value}", "vLLM's default")
    for name, value in options.items():
        if value is not None:
            option = name.partition(".")[2].replace("_", "-")
            yield Override(f"{name}={value}", f"--{option}")


def describe_batches(plan: Plan) -> Iterator[str]:
    q, tokens = plan.query_len, plan.max_num_batched_tokens
    decode = _modes_of(plan, q, min(plan.max_num_seqs, tokens // q), uniform=True)
    yield f"decode batches, by requests of {counted(q, 'token')}: {decode}"
    yield f"mixed batches, by tokens: {_modes_of(plan, 1, tokens, uniform=False)}"
    yield from eager_drafts(plan)


def eager_drafts(plan: Plan) -> Iterator[str]:
    most = plan.max_num_seqs
    largest = max((key.num_tokens for _, key in plan.draft_decode_keys), default=0)
    in_graphs = plan.draft_keys and plan.mode.decode_mode() is CUDAGraphMode.FULL
    if in_graphs and plan.query_len > 2 and largest < most:
        rest = from_to(largest + 1, most)
        yield f"draft model, decode: {rest} requests run eagerly without size {most}"


def _modes_of(plan: Plan, each: int, most: int, *, uniform: bool) -> str:
    """``1 to 8 in FULL graphs, 9 to 256 eagerly``, in units of ``each`` tokens."""
    dispatcher = CudagraphDispatcher(plan)
    tried = range(1, min(most, plan.max_capture_size + 1) + 1)
    first = 1
    words = []
    for mode, alike in groupby(dispatcher.dispatch(number * each, uniform)[0] for number in tried):
        last = first + len(list(alike)) - 1
        if last == tried[-1]:
            last = most
        graphs = "eagerly" if mode is CUDAGraphMode.NONE else f"in {mode} graphs"
        words.append(f"{from_to(first, last)} {graphs}")
        first = last + 1
    return ", ".join(words)


def _parse(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{OPTION} {text!r:.200} is not JSON: {error}",
            remedy="Give what vLLM's --compilation-config takes, in single quotes, and other "
            """options beside it: --vllm '{"cudagraph_mode": "FULL"}' --max-num-seqs 256.""",
        ) from None
    if not isinstance(given, dict):
        raise ConfigError(
            f"{OPTION} {text!r} is not a JSON object",
            remedy="""Give a JSON object, such as --vllm '{"cudagraph_mode": "FULL"}'; """
            "'{}' shows vLLM's defaults.",
        )
    known = sorted({*_TAKEN_OVER, *_WITHOUT_EFFECT, *_OTHER_GRAPHS, "mode"})
    unknown = [name for name in given if name not in known]
    if unknown:
        hint = did_you_mean(unknown[0], known, " (did you mean {!r}?)")
        raise ConfigError(
            f"{OPTION}: vLLM's compilation config has no key {unknown[0]!r}{hint}",
            remedy="Correct or remove the key; options, as --max-num-seqs, go beside --vllm. "
            f"Keys that decide what is captured: {', '.join(_TAKEN_OVER)}.",
        )
    number, level = given.get("cudagraph_mode"), given.get("mode")
    *modes, _ = CUDAGraphMode.__members__  # AUTO is not vLLM's
    if isinstance(number, str) and number.upper() not in modes:
        raise ConfigError(
            f"{OPTION}: vLLM has no cudagraph_mode {number}",
            remedy=f"{did_you_mean(number, modes)}Give one of {', '.join(modes)}.",
        )
    sizes = given.get("cudagraph_capture_sizes")
    if isinstance(sizes, str):
        raise ConfigError(
            f"{OPTION}: found cudagraph_capture_sizes {sizes!r}, vLLM takes a list of numbers",
            remedy="Give a list; --set compilation.cudagraph_capture_sizes takes a ladder's name.",
        )
    if isinstance(number, int):  # vLLM takes the values of its runtime modes, too
        names = {mode.value: mode.name for mode in RUNTIME_MODES}
        given["cudagraph_mode"] = names.get(number, number)
    if isinstance(level, str) and level.upper() in _MODES:
        given["mode"] = _MODES.index(level.upper())
    elif level is not None and level not in range(len(_MODES)):
        choices = [f"{number} ({name})" for number, name in enumerate(_MODES)]
        raise ConfigError(
            f"{OPTION}: found mode {level!r}, vLLM's compilation mode is 0 to 3",
            remedy=f"Choose one of {', '.join(choices)}, or leave it out.",
        )
    return given


_DECIDED = (
    "--cuda-graph",
    "--disable-cuda-graph",
    "--max-running-requests",
    "--chunked-prefill-size",
)


def read_sglang(text: str) -> EngineOptions:
    """From SGLang's command line. Raises ConfigError for a wrong value."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for names in (
        "--tp-size --tensor-parallel-size --tp",
        "--dp-size --data-parallel-size --dp",
        "--attn-dp-size --attention-data-parallel-size",
        "--attn-cp-size --attention-context-parallel-size",
    ):
        parser.add_argument(*names.split(), type=int, default=1)
    parser.add_argument("--moe-dense-tp-size", type=int)
    parser.add_argument("--moe-a2a-backend", default="none")
    for name in ("dp-attention", "two-batch-overlap"):
        parser.add_argument(f"--enable-{name}", action="store_true")
    remedy = "Give SGLang's options: --sglang '--tp-size 8 --attn-dp-size 2'."
    try:
        given, rest = parser.parse_known_args(shlex.split(text))
    except (ArgumentError, ValueError) as error:
        raise ConfigError(f"--sglang {text!r:.200}: {error}", remedy=remedy) from None
    ranks = given.attn_dp_size
    if given.enable_dp_attention and ranks == 1:
        ranks = given.dp_size
    groups = ranks * given.attn_cp_size
    if min(ranks, given.attn_cp_size, given.tp_size) < 1 or given.tp_size % groups:
        raise ConfigError(
            f"--sglang: a tensor parallel size of {given.tp_size} is not {groups} equal groups",
            remedy=remedy,
        )
    gathers_moe = given.moe_a2a_backend != "none" or given.moe_dense_tp_size is not None
    multiple = 2 if given.enable_two_batch_overlap else 1
    if ranks > 1 or gathers_moe:
        multiple *= given.tp_size // groups
    if multiple % given.attn_cp_size:
        multiple *= given.attn_cp_size
    decided = tuple(word.partition("=")[0] for word in rest if word.startswith(_DECIDED))
    return EngineOptions(multiple, given.enable_two_batch_overlap, ranks, decided)


def emit(plan: Plan, engine: Engine, given: EngineOptions = NO_OPTIONS) -> Emission:
    """Options of vLLM, quoted for a shell, or of SGLang, or YAML for TensorRT-LLM.

    Engines have one list of sizes for a kind of batch, vLLM one for all. If the plan's lanes
    differ, their union is emitted, with a note.
    """
    if engine == "sglang":
        return _sglang(plan, given)
    return _vllm(plan, given) if engine == "vllm" else _trtllm(plan)


def with_emission(plan: Plan, engine: Engine, given: EngineOptions = NO_OPTIONS) -> Plan:
    """The plan with its emission, if options can ask for its graphs."""
    if plan.config.get("dims") or any(key.max_query_len for _, key in plan.keys):
        return plan
    return plan.changed(emission=emit(plan, engine, given))


def _vllm(plan: Plan, given: EngineOptions) -> Emission:
    mode, q, most = _captured_mode(plan), plan.query_len, plan.max_loras or 0
    is_v2 = plan.key_rules == "vllm_v2"
    sizes = list(plan.capture_sizes)
    notes = []
    if not is_v2:
        sizes = _sizes(plan, *RUNTIME_MODES)
        if q > 1 and mode.has_mode(CUDAGraphMode.FULL):
            # vLLM itself would drop sizes that round up past its maximum
            limit = plan.max_num_batched_tokens // q * q
            rounded = _unique(min(-(-size // q) * q, limit) for size in sizes if limit)
            if rounded != sizes:
                sizes = rounded
                notes.append(
                    f"sizes were rounded up to multiples of {q}, the tokens of a request, as vLLM "
                    "does"
                )
    by_count = any(0 < case <= most for case in plan.lora_cases)
    bounds = (
        f"--max-num-seqs {plan.max_num_seqs} --max-num-batched-tokens {plan.max_num_batched_tokens}"
    )
    if most:
        bounds += f" --enable-lora --max-loras {most}"
    if by_count:
        bounds += " --specialize-active-lora"
    kept = {**given.kept}
    if most and not plan.settings.compilation.cudagraph_specialize_lora:
        kept["cudagraph_specialize_lora"] = False
    config = {**kept, "cudagraph_mode": mode.name if sizes else "NONE"}
    if sizes:
        config["cudagraph_capture_sizes"] = sizes
        config["max_cudagraph_capture_size"] = sizes[-1]
    step = gcd(*sizes)
    may_drop = _has_sequence_parallelism(kept) and step % 8 > 0
    if may_drop:
        rounded = _rounded_up(sizes, 8)
        again = {**kept, "cudagraph_mode": mode.name, "cudagraph_capture_sizes": rounded}
        notes.append(
            "with enable_sp vLLM drops sizes that are no multiple of --tensor-parallel-size, and "
            f"does not start if the largest is none: these are multiples of {step}. For multiples "
            "of 8 (any multiple of that size will do) plan without --traffic and --step-times: "
            f"`{_command(plan, again, bounds)}{given.rounded}`"
        )
    text = json.dumps(config)
    largest = plan.largest_allowed
    asked = {**kept, "max_cudagraph_capture_size": largest} if largest else kept
    read = read_vllm(
        text,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        num_speculative_tokens=q - 1,
        runner="v2" if is_v2 else "v1",
        max_loras=plan.max_loras,
        specialize_active_lora=by_count,
    )
    captured = build_plan(read.loaded.config).keys
    if set(captured) != set(plan.keys):
        notes.append(
            "vLLM has one list of sizes for all modes and LoRA cases: it captures "
            f"{len(captured)} keys, the plan has {len(plan.keys)}"
        )
    if q > 1:
        method = plan.settings.speculative.method
        named = f"--spec-method {method} " if method else ""
        notes.append(
            f"made for {counted(q - 1, 'speculative token')}: add --speculative-config to vLLM, "
            f"and `{named}--spec-tokens {q - 1}` to `cgplan vllm check`"
        )
    is_v1 = not is_v2 and (q > 1 or "cudagraph_specialize_lora" in kept)
    if is_v1:
        notes.append("made for model runner V1: add `--runner v1` to `cgplan vllm check`")
    return Emission(
        engine="vLLM",
        version=VERSIONS["vLLM"],
        options=f"--compilation-config {shlex.quote(text)}",
        bounds=bounds,
        # else both runners capture the same
        environment=("VLLM_USE_V2_MODEL_RUNNER=0",) if is_v1 else (),
        notes=tuple(notes),
        command=_command(plan, asked, bounds + given.ladder) + given.again,
        is_to_paste=not may_drop,
    )


def _command(plan: Plan, compilation: Mapping[str, Any], bounds: str) -> str:
    command = f"cgplan plan --vllm {shlex.quote(json.dumps(compilation))} {bounds}"
    if plan.key_rules != "vllm_v2":
        command += " --runner v1"
    if plan.query_len > 1:
        command += f" --num-speculative-tokens {plan.query_len - 1}"
    for name, value in plan.simulated.get("speculative", {}).items():
        option = "--speculative-method " if name == "method" else f"--set speculative.{name}="
        command += f" {option}{value}"
    return command


def _sglang(plan: Plan, given: EngineOptions) -> Emission:
    asked = _requests(plan)
    multiple, in_requests, ranks, decided, *_ = given
    step = multiple if in_requests else multiple // gcd(multiple, plan.query_len)
    decode = _rounded_up(asked, step)
    tokens = _sizes(plan, CUDAGraphMode.PIECEWISE)
    prefill = _rounded_up(tokens, multiple)
    notes = _list_notes(plan, "SGLang", len(decode) + len(prefill))
    if decided:
        notes.append(
            f"--sglang: {', '.join(decided)} ignored; graphs and bounds are those of "
            "the plan and its configuration"
        )
    dropped = [str(size) for size in asked if size % step]
    if dropped:
        notes.append(
            f"SGLang would drop {', '.join(dropped)}: its decode sizes are multiples of {step} "
            "requests; here are the next ones"
        )
    if prefill != tokens:
        notes.append(f"prefill sizes were rounded up to multiples of {multiple}, as SGLang does")
    if prefill:
        notes.append(
            "prefill sizes are in tokens; SGLang captures them by its default, "
            "--cuda-graph-backend-prefill breakable, and not for models that it knows to fail there"
        )
    eager = []
    for below, size in pairwise((0, *prefill)):
        first = below + 1
        last = (size - 1) // 2
        if last >= first:
            eager.append(from_to(first, last))
    if eager:
        notes.append(
            f"prefill batches of {', '.join(eager)} tokens run eagerly: SGLang pads to at most "
            "twice the tokens"
        )
    options = []
    for kind, sizes, usual, graphs in (
        ("decode", decode, "full", "decode"),
        ("prefill", prefill, "breakable on CUDA", "PIECEWISE"),
    ):
        if sizes:
            listed = " ".join(map(str, sizes))
            options.append(
                f"--cuda-graph-bs-{kind} {listed} --cuda-graph-max-bs-{kind} {sizes[-1]}"
            )
            continue
        options.append(f"--cuda-graph-backend-{kind} disabled")
        notes.append(
            f"--cuda-graph-backend-{kind} disabled turns off SGLang's default, {usual}: the plan "
            f"(mode {plan.mode}) has no {graphs} graphs; without that option SGLang captures sizes "
            "of its own"
        )
    if _captured_mode(plan) is CUDAGraphMode.FULL:
        notes.append(
            "the plan's FULL graphs of mixed batches serve decode alone: for prefill SGLang calls "
            "--cuda-graph-backend-prefill full experimental"
        )
    bounds = (
        f"--max-running-requests {plan.max_num_seqs * ranks} "
        f"--chunked-prefill-size {plan.max_num_batched_tokens * ranks}"
    )
    return Emission(
        engine="SGLang",
        version=VERSIONS["SGLang"],
        options=" ".join(options),
        bounds=bounds,
        notes=tuple(notes),
    )


def _trtllm(plan: Plan) -> Emission:
    decode = _requests(plan)
    prefill = _sizes(plan, CUDAGraphMode.PIECEWISE)
    notes = _list_notes(plan, "TensorRT-LLM", len(decode) + len(prefill))
    options = f"cuda_graph_config:\n  batch_sizes: {decode}\n  enable_padding: true"
    if not decode:
        options = "cuda_graph_config: null"
        notes.append(
            f"{options} turns off TensorRT-LLM's default, graphs of decode batches: the plan has "
            "none"
        )
    if prefill:
        options += f"\nprefill_cuda_graph_backend: breakable\nprefill_capture_num_tokens: {prefill}"
        notes.append(
            "prefill sizes are tokens of batches with a prompt, mixed ones too; breakable is "
            "experimental, for text models alone; piecewise needs torch_compile_config"
        )
    bounds = f"max_batch_size: {plan.max_num_seqs}\nmax_num_tokens: {plan.max_num_batched_tokens}"
    return Emission(
        engine="TensorRT-LLM",
        version=VERSIONS["TensorRT-LLM"],
        options=options,
        bounds=bounds,
        notes=tuple(notes),
    )


def sizes_by_lane(plan: Plan) -> str:
    lanes = [
        json.dumps({**lane._asdict(), "mode": lane.mode.name, "sizes": sizes})
        for lane, sizes in plan.lanes().items()
    ]
    text = ",\n".join(lanes)
    reserved = ""
    if plan.predicted:
        # AISimulate's name; an engine has static buffers of its own
        taken = plan.predicted.total_bytes - plan.predicted.static_bytes
        reserved = f'"cuda_graph_reserved_bytes": {taken}, '
    return f'{{"query_len": {plan.query_len}, {reserved}"lanes": [\n{text}\n]}}'


def _captured_mode(plan: Plan) -> CUDAGraphMode:
    """The mode with the plan's graphs alone: a lane may have no size."""
    lanes = {lane._replace(num_active_loras=0) for lane in plan.lanes()}
    for mode in CUDAGraphMode:
        if lanes == {*lanes_of(mode, (0,))}:
            return mode
    return plan.mode


def _sizes(plan: Plan, *modes: CUDAGraphMode) -> list[int]:
    return _unique(key.num_tokens for mode, key in plan.keys if mode in modes)


def _requests(plan: Plan) -> list[int]:
    tokens = _sizes(plan, CUDAGraphMode.FULL)
    return _unique(min(-(-size // plan.query_len), plan.max_num_seqs) for size in tokens)


def _list_notes(plan: Plan, engine: str, graphs: int) -> list[str]:
    q, most = plan.query_len, plan.max_num_seqs
    notes = []
    if q > 1:
        notes.append(f"decode sizes are in requests of {q} tokens, the plan's in tokens")
    full = [key for mode, key in plan.keys if mode is CUDAGraphMode.FULL and not key.uniform]
    beyond = _unique(key.num_tokens for key in full if key.num_tokens > q * most)
    if beyond:
        notes.append(
            f"{' '.join(map(str, beyond))} tokens became {most} requests, as many as a decode "
            "batch has: in the plan those graphs serve decode batches, too"
        )
    cases = {key.num_active_loras for _, key in plan.keys}
    if len(cases) > 1:
        notes.append(
            f"{engine} has no list of sizes by LoRA case: {graphs} sizes were emitted for "
            f"{len(plan.keys)} keys"
        )
    return notes


def _rounded_up(sizes: Iterable[int], step: int) -> list[int]:
    return _unique(-(-size // step) * step for size in sizes)


def _unique(sizes: Iterable[int]) -> list[int]:
    return sorted(set(sizes))
