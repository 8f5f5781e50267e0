"""Host time of ``cgplan.graphed`` beyond that of the runner that it calls, for one tensor and for eight nested ones.

    python docs/measure/graphed_host.py [--device cuda] [--rounds 20] [--calls 200]

Both ways run in turns, on an idle device and in a row; outputs are borrowed, so that no copy is timed. Beside them the
time that ``torch.utils._pytree.tree_flatten`` alone takes for the arguments, and that of cloning one output.
"""

import argparse
import statistics
import time

import torch
from torch.utils._pytree import tree_flatten

import cgplan


def nested(obs):
    camera, joints = obs["camera"], obs["joints"]
    return {
        "left": [camera["left"] + 1, camera["right"] * 2],
        "joints": (joints[0] - 1, joints[1] + joints[2]),
        "others": [obs["speed"], obs["force"] * 2, obs["goal"] + 1],
    }


def options_of(description):
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=200)
    return parser.parse_args()


def timed(ways, options, without_grad=()):
    """Median microseconds until each way returned; some of them outside of grad mode."""
    synchronize = torch.cuda.synchronize if options.device.startswith("cuda") else lambda: None
    found = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, call in ways.items():
            with torch.set_grad_enabled(name not in without_grad):
                for _ in range(options.calls):
                    synchronize()
                    start = time.perf_counter_ns()
                    call()
                    found[name].append((time.perf_counter_ns() - start) / 1e3)
    return {name: statistics.median(times) for name, times in found.items()}


def main():
    options = options_of(__doc__)
    x = torch.randn(3, 8, device=options.device)
    camera, joints = {"left": x + 1, "right": x + 2}, [x.clone() for _ in range(3)]
    obs = {"camera": camera, "joints": joints, "speed": x + 3, "force": x + 4, "goal": x}
    for words, model, argument in (("one tensor", lambda x: x + 1, x), ("nested tensors", nested, obs)):
        g = cgplan.graphed(model, outputs="borrow")
        g.warm_up(argument)
        output = g(argument)
        (runner,) = g.runners
        leaves = tree_flatten(argument)[0]
        inputs = dict(zip(runner.config.inputs, leaves, strict=True))
        one = tree_flatten(output)[0][0]
        ways = {
            "runner": lambda runner=runner, inputs=inputs: runner(**inputs),
            "graphed": lambda g=g, argument=argument: g(argument),
            "tree_flatten": lambda argument=argument: tree_flatten(((argument,), {})),
            "clone": one.clone,
        }
        times = timed(ways, options)
        over = times["graphed"] - times["runner"]
        told = ", ".join(f"{name} {time:.1f} us" for name, time in times.items())
        print(f"{len(leaves)} ({words}): {told}; graphed over the runner {over:+.1f} us")


if __name__ == "__main__":
    main()
