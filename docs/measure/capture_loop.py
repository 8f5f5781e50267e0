"""cgplan's whole start-up against a bare loop over the same forward: seconds and device memory.

    python docs/measure/capture_loop.py configs/decoder_0_6b.yaml

The bare loop is what one would write by hand: one stream, one pool, one garbage collection, and for each key, largest
first, a warm-up, capture_begin and capture_end, nothing kept but the graphs. Kernels are compiled and loaded before.
The two take turns in one process; medians are shown.
"""

import gc
import statistics
import sys
import time

import torch

from cgplan.backends import select_backend
from cgplan.backends.context import forward_context
from cgplan.buffers.static import StaticBuffers
from cgplan.config import read_config
from cgplan.measure.bench import call_examples
from cgplan.models.loading import load_model
from cgplan.modes import CUDAGraphMode
from cgplan.planning import build_plan
from cgplan.runner.session import CaptureSession

ROUNDS = 5


def used(device):
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def bare_loop(plan, model, config, device, stream):
    """Seconds, of them in warm-ups, and bytes of device memory that are gone afterwards (with static buffers)."""
    before = used(device)
    torch.cuda.synchronize()
    began = time.perf_counter()
    gc.collect()
    gc.disable()
    gc.freeze()
    specs = {**config.inputs, **config.metadata}
    most = plan.max_capture_size
    buffers = StaticBuffers(specs, most, min(most, plan.max_num_seqs), device)
    pool, graphs, warm_ups = torch.cuda.graph_pool_handle(), [], 0.0
    with torch.cuda.stream(stream), torch.no_grad():
        for _, descriptor in plan.keys:
            views = buffers.views(descriptor.num_tokens, descriptor.num_reqs)
            inputs = {name: views[name] for name in config.inputs}
            metadata = {name: views[name] for name in config.metadata}
            start = time.perf_counter()
            with forward_context(CUDAGraphMode.NONE, descriptor, metadata):
                model(**inputs)
            torch.cuda.synchronize()
            warm_ups += time.perf_counter() - start
            graph = torch.cuda.CUDAGraph()
            with forward_context(CUDAGraphMode.FULL, descriptor, metadata):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                model(**inputs)
                graph.capture_end()
            graphs.append(graph)
    torch.cuda.synchronize()
    gc.unfreeze()
    gc.enable()
    seconds = time.perf_counter() - began
    taken = used(device) - before
    for graph in graphs:
        graph.reset()
    return seconds, warm_ups, taken


def session(plan, model, config, backend):
    """The same for cgplan, its report included."""
    before = used(backend.device)
    torch.cuda.synchronize()
    began = time.perf_counter()
    runner = CaptureSession(plan, model, backend, config).run()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    taken = used(backend.device) - before
    report = runner.report
    runner.close()
    return seconds, report.warmup_seconds, taken, report


def sleep(plan, model, config, backend):
    """Seconds to sleep and to wake with all keys, and bytes that a sleep gives back."""
    runner = CaptureSession(plan, model, backend, config).run()
    call_examples(runner)
    before = used(backend.device)
    began = time.perf_counter()
    runner.sleep()
    torch.cuda.synchronize()
    asleep = time.perf_counter() - began
    freed = before - used(backend.device)
    began = time.perf_counter()
    runner.wake()
    torch.cuda.synchronize()
    awake = time.perf_counter() - began
    assert len(runner.plan.keys) == len(plan.keys)
    runner.close()
    return asleep, awake, freed


def main(path, *overrides):
    loaded = read_config(path, overrides)
    config, plan = loaded.config, build_plan(loaded.config)
    backend = select_backend(config.device)
    model = load_model(config.model.target, config.model.kwargs, device=backend.device, base_dir=loaded.base_dir)
    stream = torch.cuda.Stream()  # one for all rounds: each stream has a library workspace of its own
    bare_loop(plan, model, config, backend.device, stream)  # compiles kernels and makes handles
    bare, ours = [], []
    session(plan, model, config, backend)
    for _ in range(ROUNDS):
        bare.append(bare_loop(plan, model, config, backend.device, stream))
        ours.append(session(plan, model, config, backend))
    report = ours[-1][3]
    env, first = report.environment, report.records[0]
    print(f"{env.device}, torch {env.torch}, driver {env.driver}; {path}: {len(plan.keys)} graphs, {ROUNDS} rounds")
    medians = []
    for name, rows in (("bare loop", bare), ("cgplan session", ours)):
        seconds, warm_ups, taken = (statistics.median(row[i] for row in rows) for i in range(3))
        medians.append((seconds, taken))
        print(f"{name:15s} {seconds:7.3f} s, of it warm-ups {warm_ups:.3f} s   {taken / 2**20:8.1f} MiB")
    ratios = [theirs[0] / mine[0] for mine, theirs in zip(bare, ours, strict=True)]
    print(f"ratio           {medians[1][0] / medians[0][0]:7.3f} (by rounds {min(ratios):.2f} to {max(ratios):.2f})")
    print(f"memory          {medians[1][1] / medians[0][1]:8.3f}; {first.nodes} kernel nodes at the largest size")
    cold = sum(not record.warmup_seconds for record in report.records)
    print(
        f"of the session: captures {report.capture_seconds:.3f} s, reading for the report "
        f"{report.inspection_seconds:.3f} s; {cold} keys without a warm-up"
    )
    rows = [sleep(plan, model, config, backend) for _ in range(3)]
    asleep, awake, freed = map(statistics.median, zip(*rows, strict=True))
    print(f"sleep           {asleep:7.3f} s, {freed / 2**20:.1f} MiB given back; wake {awake:.3f} s")
    print("rounds: bare", [round(r[0], 3) for r in bare], "cgplan", [round(r[0], 3) for r in ours])


if __name__ == "__main__":
    main(*sys.argv[1:])
