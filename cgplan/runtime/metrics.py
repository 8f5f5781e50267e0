"""A runner's numbers for Prometheus. Needs the extra ``metrics``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from cgplan.errors import CgplanError, InputError
from cgplan.runtime.stats import RunnerStats

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class StatsCollector:
    """Collects the numbers of runners at the moment when a registry asks for them; calls pay nothing for it.

    ``prometheus_client.REGISTRY.register(StatsCollector({"target": runner.stats}))`` puts them beside what a server
    has to tell already.

    Args:
        runners: Their stats by name; the name becomes the label ``runner``.

    Raises:
        InputError: that is no dict of stats by name (of runners themselves, say).
        CgplanError: prometheus_client is not installed.
    """

    def __init__(self, runners: Mapping[str, RunnerStats]) -> None:
        parts: list[tuple[object, type]] = [(runners, Mapping)]
        if isinstance(runners, Mapping):
            parts = [part for name, stats in runners.items() for part in ((name, str), (stats, RunnerStats))]
        wrong = [type(value).__name__ for value, kind in parts if not isinstance(value, kind)]
        if wrong:
            raise InputError(
                f"metrics of stats by name were asked for, and a {wrong[0]} was given",
                remedy='Give a dict, as in StatsCollector({"target": runner.stats}).',
            )
        self._runners = dict(runners)
        try:
            from prometheus_client import core
        except ImportError:
            raise CgplanError(
                "the metrics format of Prometheus needs prometheus_client, which is not installed",
                remedy="Run `pip install prometheus_client`, or install cgplan with the extra `metrics`.",
            ) from None
        self._core = core

    def collect(self) -> Iterator[Metric]:
        """All families; sizes and modes are labels."""
        core, key = self._core, ["runner", "mode", "num_tokens", "num_reqs", "uniform", "num_active_loras"]
        hits = core.CounterMetricFamily("cgplan_replays", "Calls that a graph served, by its key.", labels=key)
        eager = core.CounterMetricFamily(
            "cgplan_eager_calls", "Calls that ran eagerly, by the reason.", labels=["runner", "reason"]
        )
        tokens = core.CounterMetricFamily(
            "cgplan_tokens", "Tokens of batches, and rows of padding besides.", labels=["runner", "kind"]
        )
        captures = core.CounterMetricFamily("cgplan_captures", "Keys that were captured.", labels=["runner"])
        evictions = core.CounterMetricFamily("cgplan_evictions", "Captured keys given up again.", labels=["runner"])
        failures = core.CounterMetricFamily(
            "cgplan_capture_failures", "Keys that could not be captured.", labels=["runner"]
        )
        host = core.SummaryMetricFamily(
            "cgplan_host_seconds", "Host time of the calls that were timed, until they returned.", labels=["runner"]
        )
        for name, stats in self._runners.items():
            for (mode, d), calls in stats.replays.items():
                reqs = "" if d.num_reqs is None else str(d.num_reqs)
                row = [str(mode), str(d.num_tokens), reqs, str(d.uniform).lower(), str(d.num_active_loras)]
                hits.add_metric([name, *row], calls)
            for reason, calls in stats.eager.items():
                eager.add_metric([name, str(reason)], calls)
            tokens.add_metric([name, "real"], stats.real_tokens)
            tokens.add_metric([name, "padding"], stats.padded_rows)
            captures.add_metric([name], stats.captures)
            evictions.add_metric([name], stats.evictions)
            failures.add_metric([name], stats.failures)
            host.add_metric([name], stats.timed_calls, stats.timed_nanoseconds / 1e9)
        yield from (hits, eager, tokens, captures, evictions, failures, host)


def prometheus_text(runners: Mapping[str, RunnerStats]) -> str:
    """The numbers of runners, by name, in Prometheus' text format. Raises as StatsCollector."""
    collector = StatsCollector(runners)
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(collector)
    text: str = generate_latest(registry).decode()
    return text
