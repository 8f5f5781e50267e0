"""What vLLM's own log says of its graphs: how many, how much memory, how many seconds, and how long
steps took.

The lines are those of vLLM 0.33.0: v1/worker/gpu_model_runner.py and v1/worker/gpu/model_runner.py
(captures and their profile), v1/worker/gpu_worker.py (memory), v1/metrics/loggers.py (iterations).
Other releases lack some of them.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from cgplan.modes import CUDAGraphMode
from cgplan.units import format_bytes

GIB, MIB = 1 << 30, 1 << 20
_START = "Initializing a V1 LLM engine"
_FINISHED = re.compile(r"Graph capturing finished in (\d+) secs, took (-?[\d.]+) GiB")
_ESTIMATED = re.compile(
    r"CUDA graph pool memory: -?[\d.]+ GiB \(actual\), ([\d.]+) GiB \(estimated\)"
)
_PROFILED = re.compile(r"Profiling CUDA graph memory: (.*)")
_GROUP = re.compile(r"(PIECEWISE|FULL)=(\d+) \(largest=(\d+)\)")
_BAR = re.compile(r"Capturing CUDA graphs \((?:[^()]*, )?(PIECEWISE|FULL)\):[^\r\n]*?\d+/(\d+) \[")
_BY_MODE = re.compile(
    r"Estimated (PIECEWISE|FULL) CUDA graph memory: ([\d.]+) MiB first-capture \+ \((\d+)-1\) . "
    r"([\d.]+) MiB per-graph"
)
_OPTION = r"`--kv-cache-memory(?:-bytes)?=(-?\d+)`[^`]*"
_ADVICE = re.compile(
    r"Free memory on device \(([\d.]+)/([\d.]+) GiB\) on startup\. Desired GPU memory utilization "
    r"is "
    rf"\(([\d.]+), [\d.]+ GiB\)\.[^`]*{_OPTION}{_OPTION}Current kv cache memory in use is "
    r"(-?[\d.]+) GiB"
)
_RESERVES = "CUDA graph memory profiling is enabled"
_CAPTURES = re.compile(
    rf"{_START}.*?'cudagraph_mode': <CUDAGraphMode\.(\w+).*?'cudagraph_capture_sizes': (\[[\d, "
    r"]*\])"
)
_STEP = re.compile(
    r"Iteration\(\d+\): (\d+) context requests, (\d+) context tokens, (\d+) generation requests, "
    r"(\d+) generation tokens, iteration elapsed time: ([\d.]+) ms(?! \(dummy\))"
)


@dataclass(frozen=True)
class StartLog:
    """What the log of vLLM's last start says of its graphs; of several ranks the figures of the one
    that took most.

    Attributes:
        seconds: Of all captures, whole.
        bytes: Device memory that they took, to 0.01 GiB.
        graphs: (graphs, tokens of the largest) by runtime mode; the second is 0 where the log does
            not say it.
        reserved: Bytes that vLLM kept free for the graphs by its own estimate.
        by_mode: (bytes of the first graph, bytes of each other) by runtime mode, as vLLM's estimate
            has them: in logs of level DEBUG.
        advice: The numbers of vLLM's line on ``--kv-cache-memory``.
    """

    seconds: float
    bytes: int
    graphs: dict[CUDAGraphMode, tuple[int, int]]
    reserved: int
    by_mode: dict[CUDAGraphMode, tuple[float, float]]
    advice: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> StartLog | None:
        """None where the log does not tell how long the captures took."""
        text = text[max(text.rfind(_START), 0) :]
        finished = [(float(gib), float(seconds)) for seconds, gib in _FINISHED.findall(text)]
        if not finished:
            return None
        graphs = {CUDAGraphMode[mode]: (int(count), 0) for mode, count in _BAR.findall(text)}
        for mode, count, largest in _GROUP.findall("\n".join(_PROFILED.findall(text))):
            graphs[CUDAGraphMode[mode]] = int(count), int(largest)
        reserved = (
            max(map(float, _ESTIMATED.findall(text)), default=0.0) if _RESERVES in text else 0.0
        )
        advice = min(
            (tuple(map(float, found)) for found in _ADVICE.findall(text)),
            key=lambda a: a[3],
            default=(),
        )
        return cls(
            seconds=max(seconds for _, seconds in finished),
            bytes=round(max(0.0, *(gib for gib, _ in finished)) * GIB),
            graphs=graphs,
            reserved=round(reserved * GIB),
            by_mode={
                CUDAGraphMode[m]: (float(first) * MIB, float(each) * MIB)
                for m, first, _, each in _BY_MODE.findall(text)
            },
            advice=advice,
        )

    def said(self) -> Iterator[str]:
        """Sentences on the memory of the graphs, and on the options that give what they leave to
        the KV cache.
        """
        kept = (
            f", and vLLM kept {format_bytes(self.reserved)} free for them" if self.reserved else ""
        )
        yield (
            f"by the log the graphs took {format_bytes(self.bytes)} and {self.seconds:.0f} s{kept}"
        )
        if not self.advice:
            return
        free, total, share, fits, whole, used = self.advice
        yield (
            f"the KV cache has {used:.2f} GiB; vLLM itself advises --kv-cache-memory-bytes "
            f"{fits:.0f} to stay within "
            f"--gpu-memory-utilization {share:g}, {whole:.0f} to use the whole GPU"
        )
        if self.reserved:
            room = self.reserved - GIB // 200  # the log rounds to 0.01 GiB
            better = min(share + (self.reserved - self.bytes) / GIB / total, free / total)
            yield (
                "that advice takes off the graphs twice, as estimated and as captured: "
                f"{fits + room:.0f} "
                f"({(fits + room) / GIB:.2f} GiB) stays within it, too, as does "
                "--gpu-memory-utilization "
                f"{int(better * 1e4) / 1e4:.4f}"
            )


def logged_steps(text: str) -> Iterator[tuple[tuple[CUDAGraphMode, int], float]]:
    """((runtime mode, tokens that ran), microseconds) of each step of vLLM's
    ``--enable-logging-iteration-details``.

    The sizes and the mode of the start before it tell which graph ran a step: of one token for each
    request, the one for decode. Steps before the first start in the log, and those with speculative
    tokens, are left out.
    """
    mode, sizes = None, list[int]()
    for line in text.splitlines():
        started, step = _CAPTURES.search(line), _STEP.search(line)
        if started:
            mode, sizes = CUDAGraphMode.parse(started[1]), sorted(json.loads(started[2]))
        elif mode is not None and step:
            prefilled, prompts, decoding, decoded = map(int, step.groups()[:4])
            tokens, microseconds = prompts + decoded, float(step[5]) * 1e3
            if decoded != decoding or not tokens:
                continue
            runs = mode.mixed_mode() if prefilled else mode.decode_mode()
            place = bisect_left(sizes, tokens)
            if runs is CUDAGraphMode.NONE or place == len(sizes):
                yield (CUDAGraphMode.NONE, tokens), microseconds
            else:
                yield (runs, sizes[place]), microseconds
