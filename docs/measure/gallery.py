"""The gallery beside eager code and what else there is: times of the last batch of each example, in turns.

    python docs/measure/gallery.py [--only encoder,speech] [--rounds 5]

Host: until a call on an idle device returned. Device: calls queued one after another. Ready: until each batch had its
first call, compilation and captures included. Memory: what torch's allocator reserved on the way, kernels not counted.
"""

import argparse
import gc
import importlib
import statistics
import sys
import time
from pathlib import Path

import torch

import cgplan

FOLDER = Path(__file__).parents[1] / "examples" / "gallery"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def reduce_overhead(net):
    compiled = torch.compile(net, mode="reduce-overhead", dynamic=False)

    def call(*args, **kwargs):
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*args, **kwargs)

    return call


def cuda_graph_module(net):
    from tensordict.nn import CudaGraphModule

    modules = {}  # one for each shape, as it refuses others

    def call(*args, **kwargs):
        shapes = tuple(tensor.shape for tensor in (*args, *kwargs.values()))
        if shapes not in modules:
            modules[shapes] = CudaGraphModule(net)
        return modules[shapes](*args, **kwargs)

    return call


def measure(example, device, rounds, repeats):
    torch.manual_seed(0)
    net, batches = example.model(device), list(example.batches(device))
    ways = {"eager": lambda net: net, "cgplan": example.graphed}
    if device == "cuda":
        ways |= {"reduce-overhead": reduce_overhead, "CudaGraphModule": cuda_graph_module}
    backend, ready = cgplan.select_backend(device), {}
    for name, wrap in ways.items():
        gc.collect()
        backend.release_cached()
        before, start = backend.memory().reserved, time.perf_counter()
        try:
            call = wrap(net)
            for args, kwargs in batches:
                for _ in range(4):  # reduce-overhead records in its second call, CudaGraphModule in its third
                    call(*args, **kwargs)
            backend.synchronize()
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0][:90]}")
            continue
        ready[name] = call, time.perf_counter() - start, backend.memory().reserved - before, ([], [])
    args, kwargs = batches[-1]
    for _ in range(rounds):
        for call, _, _, (device_us, host_us) in ready.values():
            host_us += backend.time_calls(lambda call=call: call(*args, **kwargs), repeats)[1]
            device_us += backend.time_calls(lambda call=call: call(*args, **kwargs), repeats, queued=True)[0]
    for name, (_, seconds, nbytes, times) in ready.items():
        device_us, host_us = map(statistics.median, times)
        times = f"device {device_us:8.0f} us, host {host_us:7.0f} us"
        print(f"  {name:16} {times}, ready {seconds:6.2f} s, {nbytes >> 20} MiB")


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(NAMES), help="names of examples")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=50, help="timed calls of a round")
    options = parser.parse_args()
    sys.path.insert(0, str(FOLDER))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(torch.cuda.get_device_name() if device == "cuda" else "cpu (tape)", f"torch {torch.__version__}")
    for name in options.only.split(","):
        print(name, flush=True)
        measure(importlib.import_module(name), device, options.rounds, options.repeats)


if __name__ == "__main__":
    main()
