"""Capture of 67 sizes in FULL_AND_PIECEWISE, beside a loop of torch.cuda.graph over the same FULL keys.

    python docs/measure/many_sizes.py configs/decoder_0_6b.yaml [--largest 512] [--rounds 2] [--device cuda]

The sizes are 1, 2, 4 and 8 to 512 by 8. The loop is what one would write by hand: `with torch.cuda.graph(graph,
pool=pool)` for each FULL key, the largest first, with as many warm-ups as cgplan makes. The two take turns in one
process, so that the first round of each finds kernels and libraries as the other left them; the loop goes first.
Seconds are of everything from static buffers to the last graph; device memory is what was gone afterwards, with caches
given back. Warm-ups are shown apart. On the tape (`--device cpu`) the loop uses the tape's own captures.
"""

import argparse
import gc
import time

import torch

from cgplan.backends import select_backend
from cgplan.backends.context import forward_context
from cgplan.buffers.static import StaticBuffers
from cgplan.config import read_config
from cgplan.measure.bench import used_bytes
from cgplan.models.loading import load_model
from cgplan.modes import CUDAGraphMode
from cgplan.planning import build_plan
from cgplan.runner.session import CaptureSession

MIB = 2**20


def capturing(backend, pool):
    """A new graph and the block that captures into it."""
    if backend.device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        return graph, torch.cuda.graph(graph, pool=pool)
    graph = backend.new_graph(pool)
    return graph, backend.capturing(graph)


def by_hand(plan, model, config, backend):
    """(seconds, of them warm-ups, bytes, graphs) of the loop; the graphs are freed again."""
    gc.collect()
    before, start, warm = used_bytes(backend), time.perf_counter(), 0.0
    most = plan.max_capture_size
    specs = {**config.inputs, **config.metadata}
    buffers = StaticBuffers(specs, most, min(most, plan.max_num_seqs), backend.device)
    on_gpu = backend.device.type == "cuda"
    pool, graphs = torch.cuda.graph_pool_handle() if on_gpu else backend.new_pool(), []
    for descriptor in [d for mode, d in plan.keys if mode is CUDAGraphMode.FULL]:
        views = buffers.views(descriptor.num_tokens, descriptor.num_reqs)
        inputs = {name: views[name] for name in config.inputs}
        metadata = {name: views[name] for name in config.metadata}
        began = time.perf_counter()
        warmups = config.compilation.cudagraph_num_of_warmups
        for _ in range(1 if warmups == "auto" else warmups):
            with forward_context(CUDAGraphMode.NONE, descriptor, metadata):
                model(**inputs)
        backend.synchronize()
        warm += time.perf_counter() - began
        graph, block = capturing(backend, pool)
        with block, forward_context(CUDAGraphMode.NONE, descriptor, metadata):
            output = model(**inputs)
        del output  # its memory is for the next graph, as in cgplan
        graphs.append(graph)
    backend.synchronize()
    seconds, count = time.perf_counter() - start, len(graphs)
    taken = used_bytes(backend) - before
    for graph in graphs:
        graph.reset() if on_gpu else backend.reset(graph)
    return seconds, warm, taken, count


def session(plan, model, config, backend):
    """The same of a cgplan session, and its report."""
    gc.collect()
    before, start = used_bytes(backend), time.perf_counter()
    runner = CaptureSession(plan, model, backend, config).run()
    seconds = time.perf_counter() - start
    taken = used_bytes(backend) - before
    report = runner.report
    runner.close()
    return seconds, report.warmup_seconds, taken, sum(r.graphs for r in report.records), report


def show(name, seconds, warm, taken, graphs):
    print(f"{name:<26}{seconds:9.2f} s{warm:9.2f} s{seconds - warm:9.2f} s{taken / MIB:10.1f} MiB{graphs:8d} graphs")


def settings(options):
    sizes = [1, 2, 4, *range(8, options.largest + 1, 8)]
    return [
        f"device={options.device}",
        f"compilation.cudagraph_capture_sizes={sizes}",
        "compilation.max_cudagraph_capture_size=null",
        "compilation.cudagraph_mode=FULL_AND_PIECEWISE",
        f"scheduler.max_num_seqs={options.largest}",
        f"scheduler.max_num_batched_tokens={max(options.largest, 8192)}",
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--largest", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    loaded = read_config(options.config, settings(options))
    config = loaded.config
    plan, backend = build_plan(config), select_backend(config.device)
    model = load_model(config.model.target, config.model.kwargs, device=backend.device, base_dir=loaded.base_dir)
    modes = [mode for mode, _ in plan.keys]
    counts = {mode.name: modes.count(mode) for mode in dict.fromkeys(modes)}
    print(
        f"{options.config}: {len(plan.capture_sizes)} sizes, keys {counts}, {backend.name}, torch {torch.__version__}"
    )
    print(f"{'':<26}{'seconds':>11}{'warm-ups':>11}{'the rest':>11}{'memory':>14}")
    with torch.no_grad():
        for number in range(options.rounds):
            show(f"torch.cuda.graph, round {number + 1}", *by_hand(plan, model, config, backend))
            *figures, report = session(plan, model, config, backend)
            show(f"cgplan, round {number + 1}", *figures)
            for mode in counts:
                records = [r for r in report.records if r.mode.name == mode]
                seconds = sum(r.capture_seconds for r in records)
                warm, graphs = sum(r.warmup_seconds for r in records), sum(r.graphs for r in records)
                grown = sum(r.pool_growth + (r.driver_bytes or 0) for r in records)
                show(f"  of it {mode}", seconds + warm, warm, grown, graphs)
            print(f"  for the report alone    {report.inspection_seconds:9.2f} s")


if __name__ == "__main__":
    main()
