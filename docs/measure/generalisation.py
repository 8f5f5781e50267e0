"""Plans run with other traffic than they were made for: change of the mean step against the vllm ladder.

    python docs/measure/generalisation.py code=azure_code.csv conv=azure_conv.csv [--seqs 256] [--insurance 0.1,0]

Each trace at loads 1, 2 and 4, in halves, and one trace's plan for another; at most 4, 8, 16 and 32 graphs, and no
limit. Positive: steps are longer than with the ladder. Traffic is simulated with the ladder's graphs.
"""

import argparse
from functools import cache
from itertools import permutations

from cgplan.config import validate_config
from cgplan.optimizer.lanes import Run
from cgplan.optimizer.propose import choose
from cgplan.planning import build_plan
from cgplan.traffic.files import read_traffic
from cgplan.traffic.simulation import SchedulerBounds, simulate, step_clock
from cgplan.traffic.step_times import StepTimes

GRAPHS = (4, 8, 16, 32, None)
TIMES = StepTimes.default()


def config_of(seqs, most):
    budget = {} if most is None else {"max_graphs": most}
    scheduler = {"max_num_seqs": seqs}
    return validate_config(
        {"compilation": {"cudagraph_mode": "FULL_AND_PIECEWISE"}, "scheduler": scheduler, "budget": budget}
    )


def cells(names):
    for name in names:
        for one, other in ((1, 2), (1, 4), (2, 1), (4, 1)):
            yield (name, one, None), (name, other, None)
        yield (name, 1, 0), (name, 1, 1)
        yield (name, 1, 1), (name, 1, 0)
    for one, other in permutations(names, 2):
        yield (one, 1, None), (other, 1, None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--insurance", default="0.1,0")
    options = parser.parse_args()
    files = dict(text.split("=", 1) for text in options.traces)
    ladder = build_plan(config_of(options.seqs, None))

    @cache
    def steps(name, load, half):
        trace = read_traffic(files[name], ladder, speedup=load)
        if half is not None:
            ordered = sorted(trace.requests, key=lambda request: request.arrival_us)
            middle = len(ordered) // 2
            trace = trace._replace(requests=ordered[middle:] if half else ordered[:middle])
        return simulate(trace, SchedulerBounds.of(ladder), step_clock(ladder, TIMES))

    for share in map(float, options.insurance.split(",")):
        worst = dict.fromkeys(GRAPHS, -1.0)
        most_graphs = 0
        print(f"insurance {share:.0%}; ladder of {len(ladder.keys)} graphs; at most {GRAPHS} graphs")
        for planned, seen in cells(files):
            here = steps(*seen)
            theirs, row = Run(ladder.keys, here, TIMES).expected_us, []
            for graphs in GRAPHS:
                keys = choose(config_of(options.seqs, graphs), steps(*planned), TIMES, insurance=share).plan.keys
                row.append(Run(keys, here, TIMES).expected_us / theirs - 1)
                worst[graphs] = max(worst[graphs], row[-1])
            most_graphs = max(most_graphs, len(keys))
            print(
                f"{planned!s:24} -> {seen!s:24} " + " ".join(f"{x:+7.2%}" for x in row) + f"  {len(keys)} graphs",
                flush=True,
            )
        print("worst", " ".join(f"{x:+.2%}" for x in worst.values()), f"; without a limit at most {most_graphs} graphs")


if __name__ == "__main__":
    main()
