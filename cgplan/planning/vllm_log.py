"""vLLM's own log: the cost of its graphs, and the times of its steps.

Lines of ``VERSIONS["vLLM"]``: v1/worker/gpu_model_runner.py, v1/worker/gpu/model_runner.py
(captures), v1/worker/gpu_worker.py (memory), v1/metrics/loggers.py (iterations).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import NamedTuple

from cgplan.config import LoadedConfig
from cgplan.errors import BudgetError, StepTimeError
from cgplan.modes import AttentionSupport, CUDAGraphMode
from cgplan.planning.engines import VERSIONS
from cgplan.planning.plan import Plan, build_plan
from cgplan.units import counted, format_bytes, grouped, listed

GIB = 1 << 30
MIB = 1 << 20
FAR = 1.5  # times what was predicted, or of another rank
MOST_UNLIKE = 0.05  # steps of ranks that run together
_START = "Initializing a V1 LLM engine"
_VERSION = re.compile(rf"(?:{_START} \(v|API server version )([\w.+-]+)")
_FINISHED = re.compile(r"Graph capturing finished in (\d+) secs, took (-?[\d.]+) GiB")
_ANOTHER = re.compile(f"{_FINISHED.pattern}|enforce_eager=True|(?=non-default args)")
_ESTIMATED = re.compile(
    r"CUDA graph pool memory: -?[\d.]+ GiB \(actual\), ([\d.]+) GiB \(estimated\)"
)
_PROFILED = re.compile(r"Profiling CUDA graph memory: (.*)")
_GROUP = re.compile(r"(PIECEWISE|FULL)=(\d+) \(largest=(\d+)\)")
_BAR = re.compile(
    r"Capturing CUDA graphs \((?:[^()]*, )?(PIECEWISE|FULL)\):[^\r\n]*?\d+/([1-9]\d*) \["
)
_OPTION = r"`--kv-cache-memory(?:-bytes)?=(-?\d+)`[^`]*"
_ADVICE = re.compile(
    r"Free memory on device \(([\d.]+)/([\d.]+) GiB\) on startup\. Desired GPU memory utilization "
    rf"is \(([\d.]+), [\d.]+ GiB\)\.[^`]*{_OPTION}{_OPTION}Current kv cache memory in use is "
    r"(-?[\d.]+) GiB"
)
_DRAFTS = re.compile(
    r"speculative_config=(?:None|SpeculativeConfig\(method='(?:\w+_(?=mtp))?(\w+)'"
    r".*?num_spec_tokens=(\d+))"
)
_KV_TOKENS = re.compile(r"GPU KV cache size: ([\d,]+) tokens")
_CAPTURES = re.compile(
    rf"(?:{_START}(?:.*? model='([^']*)')?.*?'cudagraph_mode': <|- Mode: *)"
    r"(?:CUDAGraphMode\.)?(\w+)"
    r"(?:.*?'cudagraph_capture_sizes': |\s*\n.*- Capture sizes: )(\[[\d, ]*\])"
)
_LOWERED = re.compile(
    rf"is not supported with .*\(support: .*?({'|'.join(AttentionSupport.__members__)})[^)]*\); "
    r"setting cudagraph_mode=(\w+)"
)
_GIVEN = re.compile(r"non-default args: (.*)")
_SEQS = re.compile(r"'max_num_seqs': (\d+)")
_LORAS = re.compile(r"(?=.*'enable_lora': True)(?:.*'max_loras': (\d+))?")
_BOUND = re.compile(r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)")
_RANKS = re.compile(r"data_parallel_size=(\d+)")
_STEP = re.compile(
    r"Iteration\((\d+)\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, "
    r"(\d+) generation tokens, iteration elapsed time: ([\d.]+) ms(?! \(dummy\))"
)


@dataclass(frozen=True)
class StartLog:
    """vLLM's last start with graphs; of several ranks, the one whose graphs took most. Figures that
    the log does not tell are 0.

    Attributes:
        seconds: Of all captures, whole.
        bytes: Device memory that they took, to 0.01 GiB.
        graphs: (graphs, tokens of the largest) by runtime mode.
        reserved: Bytes that vLLM kept free for the graphs.
        advice: The numbers of its line on ``--kv-cache-memory``.
        drafts: Speculative tokens of a request; None if the log does not tell it.
        method: That drafts them.
        max_loras: 0 without adapters; None if the log does not tell it.
        model, mode, sizes: That vLLM was to capture; ``mode`` as its attention backend lowered it.
        support: Of that backend; None if it lowered no mode.
        ranks: Of data parallelism, of a mixture of experts: others log 1.
        starts: With graphs, in the log.
        kv_tokens: That the KV cache holds.
        kv_token_bytes: Of one there, by ``advice``.
    """

    seconds: float
    bytes: int
    graphs: dict[CUDAGraphMode, tuple[int, int]]
    reserved: int
    advice: tuple[float, ...]
    version: str = ""
    model: str | None = None
    mode: CUDAGraphMode | None = None
    sizes: tuple[int, ...] = ()
    kv_tokens: int = 0
    kv_token_bytes: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    drafts: int | None = None
    method: str | None = None
    max_loras: int | None = None
    support: AttentionSupport | None = None
    ranks: int = 1
    starts: int = 1

    @classmethod
    def parse(cls, text: str) -> StartLog | None:
        """None if the log does not tell how long the captures took."""
        ranks = _ranks_of(text)
        parts = text.split(_START)
        starts = [place for place, part in enumerate(parts) if _FINISHED.search(part)]
        if not starts:
            return None
        last = starts[-1]
        text = _START + parts[last]
        # ranks have an engine each, all before the captures
        server = _ANOTHER.split("".join(parts[:last]))[-1]
        seconds, taken = zip(*_FINISHED.findall(text), strict=True)
        captures = _CAPTURES.search(text)
        support, mode = [(None, captures and captures[2]), *_LOWERED.findall(server + text)][-1]
        sizes = sorted(json.loads(captures[3])) if captures else []
        graphs = {}
        for name, bar in _BAR.findall(text):
            count, largest = int(bar), 0
            if sizes:
                cases = -(-count // len(sizes))  # of LoRA
                largest = sizes[count // cases - 1]
            graphs[CUDAGraphMode[name]] = count, largest
        for name, count, largest in _GROUP.findall("\n".join(_PROFILED.findall(text))):
            graphs[CUDAGraphMode[name]] = int(count), int(largest)
        reserved = 0.0
        if "CUDA graph memory profiling is enabled" in text:
            reserved = max(map(float, _ESTIMATED.findall(text)), default=0.0)
        advice = [tuple(map(float, found)) for found in _ADVICE.findall(text)]
        advised = min(advice, key=itemgetter(3), default=())
        tokens = int(["0", *_KV_TOKENS.findall(text)][-1].replace(",", ""))
        kv_bytes = 0.0
        if advised and tokens:
            kv_bytes = advised[-1] * GIB / tokens
        version = _VERSION.search(text)
        drafts = _DRAFTS.search(text)
        given = ["", *_GIVEN.findall(server)][-1]
        loras = _LORAS.match(given)
        most = int(loras[1] or 1) if loras else 0
        # graphs with adapters, which no line tells, are more than sizes
        has_more = any(count > len(sizes) > 0 for count, _ in graphs.values())
        return cls(
            seconds=max(map(float, seconds)),
            bytes=round(max(0.0, *map(float, taken)) * GIB),
            graphs=graphs,
            reserved=round(reserved * GIB),
            advice=advised,
            version=version[1] if version else "",
            model=captures and captures[1],
            mode=mode and CUDAGraphMode.parse(mode),
            sizes=tuple(sizes),
            kv_tokens=tokens,
            kv_token_bytes=round(kv_bytes),
            max_num_seqs=int(["0", *_SEQS.findall(given)][-1]),
            max_num_batched_tokens=int(["0", *_BOUND.findall(server)][-1]),
            drafts=drafts and int(drafts[2] or 0),
            method=drafts and drafts[1],
            max_loras=most if loras or (given and not has_more) else None,
            support=support and AttentionSupport[support],
            ranks=ranks,
            starts=len(starts),
        )

    @property
    def lowering(self) -> str:
        return f"vLLM lowered the mode to {self.mode}: its attention_support is {self.support}"

    def doubts(self, plan: Plan) -> Iterator[str]:
        """Why its figures may not be those of these graphs of vLLM."""
        if self.starts > 1:
            yield f"the log has {self.starts} starts with graphs; the last is read"
        if self.support is not None:
            yield self.lowering
        for bound in ("max_num_seqs", "max_num_batched_tokens"):
            had, has = getattr(self, bound), getattr(plan, bound)
            if had not in (0, has):
                yield f"the log is of --{bound.replace('_', '-')} {had}, not {has}"
        if (plan.query_len > 1 and self.drafts is None) or (
            plan.max_loras and self.max_loras is None
        ):
            yield (
                "the log does not tell its speculative tokens or --max-loras, which may be others: "
                "give it from its first line"
            )
        nearest = VERSIONS["vLLM"]
        if self.version and self.version.split(".")[:2] != nearest.split(".")[:2]:
            yield (
                f"the log is of vLLM {self.version}, the rules are of {nearest}, the nearest known"
            )
        if not self.sizes:
            yield (
                "the log does not name its capture sizes, which may be others than these, nor what "
                "was kept free for graphs, which the KV cache may have: give it from its first line"
            )
        if self.sizes and not self.graphs:
            yield (
                "the log has neither progress bars nor `Profiling CUDA graph memory`: the number "
                "of graphs was not compared; keep standard error (2>&1)"
            )

    def started(self, plan: Plan) -> Plan:
        """``plan`` with the log's mode and sizes."""
        if not self.sizes:
            return plan
        tokens = max(*self.sizes, plan.max_num_batched_tokens)
        config = plan.settings.with_values("scheduler", max_num_batched_tokens=tokens)
        config = config.with_values(
            "compilation",
            cudagraph_mode=self.mode,
            cudagraph_capture_sizes=self.sizes,
            max_cudagraph_capture_size=None,
        )
        return build_plan(config)

    def other_memory(self, plan: Plan) -> Iterator[str]:
        """Drafts and adapters that are not the plan's, and take memory besides graphs."""
        drafted = plan.query_len - 1
        method = plan.settings.speculative.method or ""
        if self.drafts not in (None, drafted):
            yield f"{counted(self.drafts, 'speculative token')}, not {drafted}"
        # eagle3 is one with eagle, ngram_gpu with ngram
        elif self.method and not self.method.startswith(method[:5]):
            yield f"drafts of {self.method}, not {method}"
        most = plan.max_loras or 0
        if self.max_loras not in (None, most):
            yield f"--max-loras {self.max_loras}, not {most}"

    def of_other_options(self, plan: Plan) -> Iterator[str]:
        """A sentence, if the start had other graphs, drafts or adapters."""
        own = Counter({mode: count for mode, (count, _) in self.graphs.items()})
        of_plan = Counter(mode for mode, _ in plan.keys)  # bars of draft models have other names
        started = self.started(plan)
        is_alike = {*started.keys} == {*plan.keys}
        found = [*self.other_memory(plan)]
        if not found and is_alike and own in (Counter(), of_plan):
            return
        if self.max_num_seqs not in (0, plan.max_num_seqs):
            found.append(f"--max-num-seqs {self.max_num_seqs}, not {plan.max_num_seqs}")
        if started.mode is not plan.mode:
            found.append(f"mode {started.mode}, not {plan.mode}")
        had, has = ({key.num_tokens for _, key in which.keys} for which in (plan, started))
        for word, sizes in (("without", had - has), ("with", has - had)):
            if sizes:
                found.append(f"{word} sizes {listed(sorted(sizes))}")
        if not found and not is_alike:
            found.append("vLLM has one list of sizes for all modes: plan by --emit vllm")
        elif not found and not self.max_num_seqs:
            found.append("it does not tell its --max-num-seqs")
        counts = []
        for mode, count in own.items():
            other = "" if count == of_plan[mode] else f", not {of_plan[mode]}"
            counts.append(f"{count} {mode}{other}")
        graphs = counted(own.total(), "graph") if own else "other graphs"
        drafts = f" and {len(plan.draft_keys)} of the draft model" if plan.draft_keys else ""
        asked = f"{counted(len(plan.keys), 'graph')}{drafts}"
        others = "" if asked == graphs else f", not with {asked}"
        yield f"the log is of a start with {graphs} ({'; '.join([*counts, *found])}){others}"

    def said(self, plan: Plan, of_other_options: Sequence[str] = ()) -> Iterator[str]:
        if self.graphs and not of_other_options:
            counts = listed([f"{count} {mode}" for mode, (count, _) in self.graphs.items()])
            drafts = len(plan.draft_keys)
            aside = f"; {drafts} of the draft model were not compared" if drafts else ""
            yield f"as asked for: {counted(len(plan.keys), 'graph')} ({counts}){aside}"
        for doubt in self.doubts(plan):
            yield f"warning: {doubt}"
        cost = plan.predicted
        if cost and cost.model and self.model not in (None, cost.model):
            yield f"warning: the log is of {self.model}, the plan's costs of {cost.model}"
        kept = ""
        if self.reserved:
            kept = f", and vLLM kept {format_bytes(self.reserved)} free for them"
        if cost and not of_other_options and self.seconds > FAR * cost.seconds + 1:
            yield (
                f"warning: the captures took {self.seconds:.0f} s, {cost.seconds:.3g} s were "
                "predicted"
            )
        yield (
            f"by the log the graphs took {format_bytes(self.bytes)} and {self.seconds:.0f} s{kept}"
        )
        if not self.advice:
            return
        _, _, share, fits, whole, used = self.advice
        yield (
            f"the KV cache has {used:.2f} GiB; vLLM itself advises --kv-cache-memory-bytes "
            f"{fits:.0f} to stay within --gpu-memory-utilization {share:g}, {whole:.0f} to use the "
            "whole GPU"
        )

    def overrun(self, plan: Plan) -> Iterator[str]:
        """A sentence, if the graphs took far more memory than predicted."""
        cost = plan.predicted
        if cost and self.bytes > FAR * cost.total_bytes + 150 * MIB:  # left free
            yield (
                f"the graphs took {format_bytes(self.bytes)}, "
                f"{format_bytes(cost.total_bytes)} were predicted"
            )

    def kv_cache(
        self,
        plan: Plan,
        graph_bytes: int,
        utilization: float | None,
        gpu_gib: float | None,
    ) -> Iterator[str]:
        """Raises BudgetError if nothing is left."""
        if not self.advice:
            yield (
                "the log has no line `Free memory on device`, as with --kv-cache-memory-bytes, or "
                "it was cut: what is left for the KV cache was not computed"
            )
            return
        others = [*self.other_memory(plan)]
        if others:
            loras = (
                f"--enable-lora --max-loras {self.max_loras}" if self.max_loras else "no adapters"
            )
            drafts = f"--spec-method {self.method} --spec-tokens {self.drafts}"
            yield (
                f"no --kv-cache-memory-bytes: the log has {listed(others)}; give "
                f"{drafts if self.drafts else 'no drafts'} and {loras}, or another log"
            )
            return
        if not self.max_num_batched_tokens:
            yield (
                "no --kv-cache-memory-bytes: the log does not tell its --max-num-batched-tokens, "
                "with which activations grow: give it from its first line"
            )
            return
        _, total, share, fits, _, used = self.advice
        room = fits + self.bytes - graph_bytes
        if self.reserved:  # the advice takes off the graphs twice, rounded to 0.01 GiB
            room += self.reserved - GIB // 200
        today = total * share
        rest = today - room / GIB
        total = gpu_gib or total
        share = utilization or share
        left = total * share - rest
        if left <= 0:
            raise BudgetError(
                f"no KV cache fits: {-left:.2f} GiB are missing, as all else takes {rest:.2f} GiB",
                remedy="Give another --gpu-memory-utilization or GPU, or capture fewer graphs.",
            )
        size = f"{left:.2f} GiB on each GPU"
        if self.kv_token_bytes:
            size += f", {left * GIB / self.kv_token_bytes:,.0f} tokens"
        if total * share == today and self.sizes:
            change = "less" if left < used else "more"
            size += f", {abs(left - used):.2f} GiB {change} than in the log"
        yield (
            f"--kv-cache-memory-bytes {left * GIB:.0f} ({size}): {total:g} GiB of the GPU x "
            f"--gpu-memory-utilization {share:g}, less {rest:.2f} GiB for all else, at the log's "
            f"--max-num-batched-tokens {self.max_num_batched_tokens}, of it "
            f"{format_bytes(graph_bytes)} for graphs"
        )


def _ranks_of(text: str) -> int:
    return max(map(int, _RANKS.findall(text)), default=1)


def lowered(loaded: LoadedConfig, log: StartLog | None) -> LoadedConfig:
    """With the attention of the log's start, unless it was given."""
    if not log or log.support is None or "compilation.attention_support" in loaded.origins:
        return loaded
    config = loaded.config.with_values("compilation", attention_support=log.support)
    return replace(loaded, config=config)


def without_graphs(text: str) -> str:
    """Why it is no log of a start with graphs."""
    if "setting cudagraph_mode=NONE" in text:
        return "vLLM captured no graph, as `setting cudagraph_mode=NONE` in it says"
    if "enforce_eager=True" in text:
        return "this start has --enforce-eager: give the log of the start with graphs"
    return f"no line `Graph capturing finished`; it begins with {text[:40]!r}"


def steps_before_start(text: str) -> int:
    return len(_STEP.findall(_CAPTURES.split(text, 1)[0]))


class _Iteration(NamedTuple):
    """Of one rank, after the start that ``mode`` and ``sizes`` are of."""

    mode: CUDAGraphMode
    sizes: Sequence[int]
    tokens: int
    is_mixed: bool
    microseconds: float


def _iterations(text: str) -> Iterator[tuple[tuple[int, str], _Iteration]]:
    """By the start before it, and its own number."""
    mode = model = timed = None
    sizes: list[int] = []
    starts = 0
    for line in text.splitlines():
        started = _CAPTURES.search(line)
        step = _STEP.search(line)
        change = _LOWERED.search(line)
        if change and mode:
            mode = CUDAGraphMode.parse(change[2])
        elif started:
            model, name, captured = started.groups()
            mode = CUDAGraphMode.parse(name)
            sizes = sorted(json.loads(captured))
            starts += 1
        elif mode is not None and step:
            prefilled, prompts, decoding, decoded = map(int, step.groups()[1:5])
            tokens = prompts + decoded
            if decoded != decoding or not tokens:
                continue
            timed = timed or model
            if model not in (None, timed):
                raise StepTimeError(
                    f"the log has steps of {timed} and of {model}",
                    remedy="Give starts of one model.",
                )
            took = float(step[6]) * 1e3
            yield (starts, step[1]), _Iteration(mode, sizes, tokens, prefilled > 0, took)


def logged_steps(
    text: str,
    *,
    in_step: bool = False,
) -> Iterator[tuple[CUDAGraphMode, int, float, bool]]:
    """(runtime mode, tokens that ran, microseconds, whether it prefills) by
    ``--enable-logging-iteration-details``.

    The start before a step tells its graph. Steps before the first start, and those with
    speculative tokens, are left out. ``in_step``: data-parallel ranks run iterations of one number
    together, padded to the largest, and mixed if one is. Raises StepTimeError for two models, or
    where such iterations took unlike times.
    """
    found = [*_iterations(text)]
    steps = [[own] for _, own in found]
    if in_step:
        steps = [*grouped(found).values()]
    together = unlike = 0
    for ranks in steps:
        together += len(ranks) > 1
        times = [rank.microseconds for rank in ranks]
        unlike += max(times) > FAR * min(times)
        mode, sizes, tokens, *_ = max(ranks, key=attrgetter("tokens"))
        is_mixed = any(rank.is_mixed for rank in ranks)
        runs = mode.mixed_mode() if is_mixed else mode.decode_mode()
        place = bisect_left(sizes, tokens)
        if place == len(sizes):
            runs = CUDAGraphMode.NONE
        if runs is not CUDAGraphMode.NONE:
            tokens = sizes[place]
        yield runs, tokens, max(times), is_mixed
    if in_step and not together and _ranks_of(text) > 1:
        raise StepTimeError(
            "no iteration of the log is of several data-parallel ranks",
            remedy="Give one log that all ranks wrote, not one after another; or a table "
            "mode,num_tokens,microseconds, with the tokens of the largest rank.",
        )
    if unlike > MOST_UNLIKE * together:
        raise StepTimeError(
            f"of {together} iterations that several data-parallel ranks have by number, {unlike} "
            "took unlike times: the log does not tell which iterations were one step",
            remedy="In place of the log give a table mode,num_tokens,microseconds, with the tokens "
            "of the largest rank.",
        )
