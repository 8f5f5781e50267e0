"""compiler: inductor under FULL graphs against torch.compile(mode="reduce-overhead"), on the same model.

    python docs/measure/inductor.py configs/transformers_qwen3_0_6b.yaml 1 32

Both run the same batches in one process. Device time is time per call when calls are queued one after another, host
time that of a call on an idle device until it returned; medians.
"""

import argparse
import statistics
import time

import torch

from cgplan.backends import select_backend
from cgplan.buffers.static import example_batch
from cgplan.config import read_config
from cgplan.models.loading import load_model
from cgplan.planning import build_plan
from cgplan.runner.session import CaptureSession

REPEATS = 50


def measure(backend, call):
    """Microseconds of the device and of the host for one call."""
    for _ in range(5):
        call()
    device = statistics.median(backend.time_calls(call, REPEATS, queued=True)[0])
    return device, statistics.median(backend.time_calls(call, REPEATS)[1])


def main(path, sizes):
    loaded = read_config(path, ["compilation.compiler=inductor", "compilation.cudagraph_mode=FULL"])
    config = loaded.config
    backend = select_backend(config.device)
    model = load_model(config.model.target, config.model.kwargs, device=backend.device, base_dir=loaded.base_dir)
    start = time.perf_counter()
    runner = CaptureSession(build_plan(config), model, backend, config).run()
    seconds, records = time.perf_counter() - start, runner.report.records
    compiled = len(runner.graphs.route.splitter.compiled)
    print(f"{runner.report.environment.device}, torch {torch.__version__}; {path}")
    print(
        f"cgplan: {len(records)} sizes of {records[0].graphs} graphs, {compiled} compilations for all of them, "
        f"{seconds:.1f} s with captures",
        flush=True,
    )
    batches = {size: example_batch({**config.inputs, **config.metadata}, size, size, backend.device) for size in sizes}
    found = {size: graphed(runner, model, backend, batch) for size, batch in batches.items()}
    print("tokens                  device us   host us   first call s   largest difference to eager")
    for size, batch in batches.items():
        eager, worst, device, host = found[size]
        print(f"{size:6} cgplan        {device:12.0f}{host:10.1f}{'':15}{worst:16.4f}", flush=True)
        peer_device, peer_host, first, worst = peer(model, backend, batch, eager)
        print(f"{size:6} reduce-overhead{peer_device:11.0f}{peer_host:10.1f}{first:15.1f}{worst:16.4f}")
        print(f"{size:6} ratio         {device / peer_device:12.2f}{host / peer_host:10.2f}")


def graphed(runner, forward, backend, inputs):
    """The model's answer, how far cgplan's is from it, and microseconds of device and host; before any reset."""
    eager = forward(**inputs).clone()
    worst = (runner(**inputs) - eager).abs().max().item()
    return eager, worst, *measure(backend, lambda: runner(**inputs))


def peer(forward, backend, inputs, eager):
    """Microseconds of device and host, seconds until it replays, and how far it is from the model's answer."""
    torch._dynamo.reset()
    compiled = torch.compile(forward, mode="reduce-overhead", dynamic=False)

    def step():
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(**inputs)

    start = time.perf_counter()
    for _ in range(3):  # it records at the second call, and replays from the third on
        answer = step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    worst = (answer - eager).abs().max().item()
    return *measure(backend, step), first, worst


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("sizes", type=int, nargs="+")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    main(given.config, given.sizes)
