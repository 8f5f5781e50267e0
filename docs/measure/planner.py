"""The planner against the ladders, on a real trace and three synthetic ones.

    python docs/measure/planner.py [--step-times bench.json] [--costs capture.json]
    python docs/measure/planner.py --extreme    two lanes of 8,192 sizes, keys of unequal cost, a memory budget
    python docs/measure/planner.py --million FILE    write a trace of a million requests, drawn from the real one

Expected step time, padding, graphs and, with --costs, start-up and memory; "third" is the optimum with at most a third
of the vllm ladder's graphs. Step times default to those of a decoder in Qwen3-0.6B's shape on one H200.
"""

import argparse
import csv
import time
from pathlib import Path

import numpy as np

from cgplan.config import validate_config
from cgplan.modes import CUDAGraphMode
from cgplan.optimizer.evidence import Evidence
from cgplan.optimizer.problem import step_clock
from cgplan.optimizer.propose import PlanInputs, plan_graphs
from cgplan.planning import LADDERS, build_plan
from cgplan.pricing import GraphCosts, MeasuredKey
from cgplan.reports import load_report
from cgplan.traffic.files import read_traffic
from cgplan.traffic.histogram import StepShape, Traffic
from cgplan.traffic.simulation import SchedulerBounds, simulate, synthetic_requests
from cgplan.traffic.step_times import StepTimes

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
MODE = {"compilation": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}
TRACE = Path(__file__).parents[2] / "tests" / "data" / "azure_llm_code_2023.csv"
SYNTHETIC = {
    "chat": {"request_rate": 20, "prompt_median": 300, "prompt_p95": 1500, "output_median": 200, "output_p95": 800},
    "summaries": {"request_rate": 8, "prompt_median": 3000, "prompt_p95": 7000, "output_median": 80, "output_p95": 200},
    "burst": {"request_rate": 200, "prompt_median": 60, "prompt_p95": 200, "output_median": 60, "output_p95": 300},
}


def config_of(seqs, traffic=None):
    return validate_config({**MODE, "scheduler": {"max_num_seqs": seqs}, **({"traffic": traffic} if traffic else {})})


def extreme():
    """The longest search that was found: nothing about it repeats, and no key costs as much as another."""
    most, mib, rng = 8192, 1 << 20, np.random.default_rng(0)
    weights = rng.exponential(size=(2, most)).tolist()
    seen = {StepShape(n, n, True): weights[0][n - 1] for n in range(1, most + 1)}
    seen |= {StepShape(n, n // 2): weights[1][n - 1] for n in range(2, most + 1)}
    points = {FULL: {1: 100, most: 82020}, PIECEWISE: {1: 300, most: 82220}, NONE: {1: 9100, most: 101920}}
    times = StepTimes.measured({(mode, 0): table for mode, table in points.items()}, "made up")
    keys = [
        MeasuredKey(mode, 0, size, least * (1 + growth * size), 1.0)
        for mode, least, growth in ((FULL, 2 * mib, 2e-5), (PIECEWISE, 6 * mib, 2e-5))
        for size in (1, most)
    ]
    pools = {mode: [(1, mib), (most, 512 * mib)] for mode in (FULL, PIECEWISE)}
    for share in (0.3, 0.7, 0.9):
        budget = {"memory": int(share * 744) * mib}
        scheduler = {"max_num_seqs": most, "max_num_batched_tokens": most}
        config = validate_config({**MODE, "scheduler": scheduler, "budget": budget})
        costs = GraphCosts(keys, pools, config, source="made up", workspace_bytes=32 * mib)
        start, cpu = time.perf_counter(), time.process_time()
        plan = plan_graphs(PlanInputs(config, [(Traffic.of(seen, "made up"), 1.0)], times, costs)).explained()
        evidence = Evidence.model_validate(plan.evidence)
        print(
            f"{budget['memory'] // mib} MiB: {evidence.graphs} graphs, {evidence.expected_us.plan:.0f} us, "
            f"{time.perf_counter() - start:.1f} s ({time.process_time() - cpu:.1f} s of the processor)"
        )


def write_million(file):
    """Lengths are those of random requests of the trace, arrivals a Poisson process of its rate."""
    header, *rows = csv.reader(TRACE.open())
    rng = np.random.default_rng(0)
    picked = rng.integers(len(rows), size=1_000_000)
    seconds = np.cumsum(rng.exponential(1 / 2.57, size=picked.size))
    with open(file, "w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(header)
        for index, arrival in zip(picked, seconds, strict=True):
            writer.writerow((f"{arrival:.6f}", *rows[index][1:]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-times")
    parser.add_argument("--costs")
    parser.add_argument("--extreme", action="store_true")
    parser.add_argument("--million", metavar="FILE")
    options = parser.parse_args()
    if options.million:
        write_million(options.million)
        return
    if options.extreme:
        extreme()
        return
    times = StepTimes.load(options.step_times) if options.step_times else StepTimes.default()
    report = load_report(options.costs) if options.costs else None
    print(f"step times: {times.source}")
    print(
        "traffic            seqs  steps    plan us  graphs  of vllm  third us | ladder us (graphs, equal, padding): "
        f"{', '.join(LADDERS)}; seconds of simulation, planning"
    )
    cases = [(f"azure code x{speed}", speed, None) for speed in (1, 2, 4, 8)]
    cases += [(name, 1, section) for name, section in SYNTHETIC.items()]
    for name, speed, section in cases:
        for seqs in (64, 256, 512):
            config = config_of(seqs, section)
            costs = GraphCosts.from_report(report, config) if report else None
            start = time.perf_counter()
            plan = build_plan(config)
            trace = synthetic_requests(config.traffic, plan) if section else read_traffic(TRACE, plan, speedup=speed)
            traffic = simulate(trace, SchedulerBounds.of(plan), step_clock(plan, times))
            simulated = time.perf_counter() - start
            plan = plan_graphs(PlanInputs(config, [(traffic, 1.0)], times, costs)).explained()
            evidence = Evidence.model_validate(plan.evidence)
            planned = time.perf_counter() - start - simulated
            ladders = {ladder.name: ladder for ladder in evidence.ladders}
            third = ladders["vllm"].graphs // 3
            best = min((p for p in evidence.pareto if p.graphs <= third), key=lambda p: p.expected_us)
            shown = []
            for ladder in map(ladders.get, LADDERS):
                equal = (p.graphs for p in evidence.pareto if p.expected_us <= ladder.expected_us * (1 + 1e-9))
                shown.append(f"{ladder.expected_us:8.0f} ({ladder.graphs}, {next(equal, None)}, {ladder.padding:.1%})")
            print(
                f"{name:18} {seqs:4} {traffic.total:6.0f} {evidence.expected_us.plan:10.0f} {evidence.graphs:7} "
                f"{third:8} {best.expected_us:9.0f} | {' '.join(shown)}; {simulated:.2f}, {planned:.2f} s"
            )
            if costs is not None:
                vllm = ladders["vllm"]
                print(
                    f"{'':24} plan {evidence.bytes / 2**20:.0f} MiB, {evidence.seconds:.2f} s; "
                    f"vllm {vllm.bytes / 2**20:.0f} MiB, {vllm.seconds:.2f} s"
                )


if __name__ == "__main__":
    main()
