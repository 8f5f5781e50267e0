"""cgplan's capture session against a bare loop over the same forward: seconds and device memory.

    python docs/measure/capture_loop.py configs/decoder_0_6b.yaml

The bare loop is what one would write by hand: one stream, one pool, one garbage collection, capture_begin and
capture_end for each key, largest first, nothing kept but the graphs. Warm-ups are run by both and not counted. The
two take turns in one process; medians are shown.
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
    """Seconds without warm-ups, and bytes of device memory that are gone afterwards (static buffers included)."""
    before = used(device)
    specs = {**config.inputs, **config.metadata}
    most = plan.max_capture_size
    buffers = StaticBuffers(specs, most, min(most, plan.max_num_seqs), device)
    pool, graphs, seconds = torch.cuda.graph_pool_handle(), [], 0.0
    torch.cuda.synchronize()
    start = time.perf_counter()
    gc.collect()
    gc.disable()
    gc.freeze()
    seconds += time.perf_counter() - start
    with torch.cuda.stream(stream), torch.no_grad():
        for _, descriptor in plan.keys:
            views = buffers.views(descriptor.num_tokens, descriptor.num_reqs)
            inputs = {name: views[name] for name in config.inputs}
            metadata = {name: views[name] for name in config.metadata}
            with forward_context(CUDAGraphMode.NONE, descriptor, metadata):
                model(**inputs)
            torch.cuda.synchronize()
            start = time.perf_counter()
            graph = torch.cuda.CUDAGraph()
            with forward_context(CUDAGraphMode.FULL, descriptor, metadata):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                model(**inputs)
                graph.capture_end()
            graphs.append(graph)
            seconds += time.perf_counter() - start
    gc.unfreeze()
    gc.enable()
    torch.cuda.synchronize()
    taken = used(device) - before
    for graph in graphs:
        graph.reset()
    return seconds, taken


def session(plan, model, config, backend):
    """The same for cgplan: the whole session less the warm-ups and what only its report reads."""
    before = used(backend.device)
    start = time.perf_counter()
    runner = CaptureSession(plan, model, backend, config).run()
    seconds = time.perf_counter() - start
    taken = used(backend.device) - before
    report = runner.report
    runner.close()
    return seconds - report.warmup_seconds - report.inspection_seconds, taken, report


def main(path, *overrides):
    loaded = read_config(path, overrides)
    config, plan = loaded.config, build_plan(loaded.config)
    backend = select_backend(config.device)
    model = load_model(config.model.target, config.model.kwargs, device=backend.device, base_dir=loaded.base_dir)
    stream = torch.cuda.Stream()  # one for all rounds: each stream has a library workspace of its own
    bare_loop(plan, model, config, backend.device, stream)  # compiles kernels and makes handles
    bare, ours = [], []
    for _ in range(ROUNDS):
        bare.append(bare_loop(plan, model, config, backend.device, stream))
        ours.append(session(plan, model, config, backend))
    report = ours[-1][2]
    bare_s, ours_s = (statistics.median(r[0] for r in rows) for rows in (bare, ours))
    bare_b, ours_b = (statistics.median(r[1] for r in rows) for rows in (bare, ours))
    captures = statistics.median(r[2].capture_seconds for r in ours)
    env, first = report.environment, report.records[0]
    pool, static, driver = (b / 2**20 for b in (report.pool_bytes, report.static_bytes, report.driver_bytes))
    print(f"{env.device}, torch {env.torch}, driver {env.driver}; {path}: {len(plan.keys)} graphs, {ROUNDS} rounds")
    print(f"bare loop       {bare_s:7.3f} s   {bare_b / 2**20:8.1f} MiB")
    print(f"cgplan session  {ours_s:7.3f} s   {ours_b / 2**20:8.1f} MiB   (begin to end alone: {captures:.3f} s)")
    print(f"ratio           {ours_s / bare_s:7.3f}     {ours_b / bare_b:8.3f}")
    print(
        f"not counted: warm-ups {report.warmup_seconds:.3f} s, reading for the report {report.inspection_seconds:.3f} s"
    )
    print(
        f"pool {pool:.1f}, static {static:.2f}, driver {driver:.1f} MiB; {first.nodes} kernel nodes at the largest size"
    )
    print("rounds: bare", [round(r[0], 3) for r in bare], "cgplan", [round(r[0], 3) for r in ours])


if __name__ == "__main__":
    main(*sys.argv[1:])
