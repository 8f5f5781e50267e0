"""Plans run with other traffic than they were made for: mean step and p99 of decode steps against the vllm ladder.

    python docs/measure/generalisation.py code=azure_code.csv conv=azure_conv.csv [--seqs 256] [--objective robust,mean]

Of each trace the first half is planned for, as `cgplan plan` does it, and both halves are run at 1, 2 and 4 times the
load: with one list of sizes, as vLLM captures it, and with lists of their own. Traffic is simulated with the ladder's
graphs. Positive: longer than with the ladder. The worst of the six stands in the table; `given` is the half and load
that was planned for. Seconds are CPU time of planning.
"""

import argparse
import csv
import tempfile
from pathlib import Path
from time import process_time

from typer.testing import CliRunner

from cgplan.cli.main import app
from cgplan.config import validate_config
from cgplan.optimizer.problem import step_clock
from cgplan.planning import build_plan
from cgplan.reports import load_plan
from cgplan.traffic.files import read_traffic
from cgplan.traffic.simulation import SchedulerBounds, simulate
from cgplan.traffic.step_times import StepTimes

GRAPHS = (8, 16, 24, None)
LOADS = (1, 2, 4)
TIMES = StepTimes.default()


def figures(plan, traffic):
    """Mean microseconds of all steps, and the p99 of uniform decode steps."""
    clock = step_clock(plan, TIMES)
    total, decode = 0.0, []
    for shape, weight in traffic.histogram:
        microseconds = clock(shape)
        total += weight * microseconds
        if shape.uniform:
            decode.append((microseconds, weight))
    left = 0.99 * sum(weight for _, weight in decode)
    decode.sort()
    while decode[0][1] < left:
        left -= decode.pop(0)[1]
    return total / traffic.total, decode[0][0]


def write_half(file, plan, later, target):
    requests = sorted(read_traffic(file, plan).requests, key=lambda request: request.arrival_us)
    middle = len(requests) // 2
    with target.open("w", newline="") as opened:
        rows = csv.writer(opened)
        rows.writerow(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
        for request in requests[middle:] if later else requests[:middle]:
            rows.writerow((request.arrival_us / 1e6, request.context_tokens, request.generated_tokens))


def planned(kind, half, seqs, graphs, objective, folder):
    output = folder / "plan.json"
    bounds = ["--max-num-seqs", seqs] if kind == "list" else ["--set", f"scheduler.max_num_seqs={seqs}"]
    start = ["--vllm", "{}"] if kind == "list" else ["--config", folder / "own.yaml"]
    most = [] if graphs is None else ["--max-graphs", graphs]
    options = [*start, *bounds, "--traffic", half, "--objective", objective, *most, "--output", output]
    began = process_time()
    result = CliRunner().invoke(app, ["plan", *map(str, options)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return load_plan(output), process_time() - began


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--objective", default="robust,mean")
    options = parser.parse_args()
    scheduler = {"max_num_seqs": options.seqs}
    compilation = {"cudagraph_mode": "FULL_AND_PIECEWISE", "key_rules": "vllm_v2"}
    ladder = build_plan(validate_config({"compilation": compilation, "scheduler": scheduler}))
    folder = Path(tempfile.mkdtemp())
    (folder / "own.yaml").write_text("compilation: {cudagraph_mode: FULL_AND_PIECEWISE}\n")
    print(f"ladder of {len(ladder.keys)} graphs; worst mean and p99 of decode, the same of the load planned for")
    for name, file in (text.split("=", 1) for text in options.traces):
        halves = [folder / f"{name}_{number}.csv" for number in range(2)]
        seen = {}
        for later, half in enumerate(halves):
            write_half(file, ladder, later, half)
            for load in LOADS:
                trace = read_traffic(half, ladder, speedup=load)
                seen[later, load] = simulate(trace, SchedulerBounds.of(ladder), step_clock(ladder, TIMES))
        for kind in ("list", "lanes"):
            for objective in options.objective.split(","):
                for graphs in GRAPHS:
                    plan, seconds = planned(kind, halves[0], options.seqs, graphs, objective, folder)
                    rows = {}
                    for case, traffic in seen.items():
                        pairs = zip(figures(plan, traffic), figures(ladder, traffic), strict=True)
                        rows[case] = [mine / theirs - 1 for mine, theirs in pairs]
                    mean, tail = (max(row[figure] for row in rows.values()) for figure in range(2))
                    given = rows[0, 1]
                    print(
                        f"{name:6} {kind:5} {objective:6} {graphs!s:>4} at most: {len(plan.keys):3} graphs, worst "
                        f"{mean:+7.2%} {tail:+7.2%}, given {given[0]:+7.2%} {given[1]:+7.2%}, {seconds:.1f} s",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
