"""What a watch costs, and whether it finds stale pointers where there are none.

    python docs/measure/watch.py [--graphs 100] [--nodes 1000] [--zoo bert,t5,...] [--gallery]

First graphs of a chain of small kernels, by ``torch.cuda.graph``, with and without a watch, each row in its own
process: seconds of the captures, memory of the process and of the device, microseconds of a replay, and the seconds of
``check``; "checked" is ``watch(every_replay=True)``. Then models of zoo.yaml, each captured by ``torch.cuda.graph`` and
by reduce-overhead under a watch: all pointers must be live. With ``--words`` each is captured by ``torch.cuda.graph``
twice, in two pools that live together: ``watch.prove`` then counts how often the rule of an audit
(docs/audit.md, What it reads) is wrong. With ``--gallery`` its programs under tensordict's CudaGraphModule and under
cgplan. Needs a GPU.
"""

import argparse
import gc
import importlib
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import gallery
import zoo

import cgplan
from cgplan.buffers.static import example_batch


def capture(call):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    return graph, output


def memory():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), torch.cuda.mem_get_info()[0]


def chain(weights, nodes):
    def call():
        x = weights[0]
        for index in range(nodes):
            x = x + weights[index % len(weights)]
        return x

    return call


def captures(count, call):
    torch.cuda.synchronize()
    gc.collect()
    rss, free = memory()
    start = time.perf_counter()
    graphs = [capture(call) for _ in range(count)]
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    now = memory()
    return graphs, took, now[0] - rss, free - now[1]


def replay_time(graph):
    times = []
    for _ in range(200):
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def overhead(count, nodes, watched):
    """One row, in a process of its own: memory that was freed before would hide what is kept."""
    model = torch.nn.ParameterList(torch.zeros(1024, device="cuda") for _ in range(64))
    call = chain(list(model), nodes)
    capture(call)
    watch = None
    if watched != "plain":
        watch = cgplan.watch({"model": model}, every_replay=watched == "checked")
    graphs, took, rss, device = captures(count, call)
    cells = [watched, f"{took:.3f}", f"{rss / 2**20:.1f}", f"{device / 2**20:.1f}", f"{replay_time(graphs[0][0]):.1f}"]
    if watch is not None:
        report = watch.check()
        assert len(report.graphs) == count
        assert not report.stale, report
        cells.append(f"{report.read_seconds:.2f} + {report.classify_seconds:.2f}")
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def overheads(options):
    print(
        "| watch | captures, s | process, MiB | device, MiB | replay, us | check: reading + looking up, s |", flush=True
    )
    for row in ("plain", "watched", "checked") * 3:
        command = [sys.executable, __file__, "--graphs", str(options.graphs), "--nodes", str(options.nodes)]
        subprocess.run([*command, "--row", row], check=True)


def ways(module, batch):
    """Captured graphs, which stay alive with what is returned."""
    yield "torch.cuda.graph", lambda: (module(**batch), capture(lambda: module(**batch)))
    compiled = torch.compile(module, mode="reduce-overhead")

    def by_inductor():
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            compiled(**batch)

    yield "reduce-overhead", by_inductor


def example(model):
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = model.build("tiny", zoo.at(model.dtype, "tiny")).eval().requires_grad_(False)
    inputs = {name: cgplan.Input(**model.input(text, "tiny")) for name, text in model.inputs.items()}
    return module, example_batch(inputs, 2, 2, torch.device("cuda"))


def words(model):
    module, batch = example(model)
    with torch.no_grad(), cgplan.watch() as watch:
        module(**batch)
        # workspaces of libraries lie in the pool of the first capture that needs them
        captures = [capture(lambda: module(**batch)) for _ in range(3)]
        before = watch.check().graphs[1].kinds
        watch.prove(captures[1][0], captures[2][0])
        after = watch.check().graphs[1]
        del captures
    cells = [
        model.name,
        after.nodes,
        after.words,
        before.get("graph pool", 0),
        after.kinds.get("proven", 0),
        after.kinds.get("disproven", 0),
        after.kinds.get("graph pool", 0),
        before.get("unproven", 0),
        after.kinds.get("unproven", 0),
    ]
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def show(name, way, report):
    pointers = sum(graph.words for graph in report.graphs)
    print(f"| {name} | {way} | {len(report.graphs)} | {pointers} | {len(report.stale)} |", flush=True)
    for stale in report.stale:
        print(f"    {stale}")


def look_at(model):
    module, batch = example(model)
    for name, run in ways(module, batch):
        torch._dynamo.reset()
        with torch.no_grad(), cgplan.watch() as watch:
            kept = run()
            gc.collect()
            report = watch.check()
        show(model.name, name, report)
        del kept


def look_at_program(name):
    example = importlib.import_module(name)
    for way, wrap in (("CudaGraphModule", gallery.cuda_graph_module), ("cgplan", example.graphed)):
        with torch.no_grad(), cgplan.watch() as watch:
            call = wrap(example.model("cuda"))
            for args, kwargs in example.batches("cuda"):
                for _ in range(4):
                    call(*args, **kwargs)
            gc.collect()
            report = watch.check()
        show(name, way, report)
        del call


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--graphs", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--zoo", default="")
    parser.add_argument("--gallery", action="store_true")
    parser.add_argument("--row", choices=("plain", "watched", "checked"), help=argparse.SUPPRESS)
    parser.add_argument("--words", action="store_true")
    parser.add_argument("--seconds", type=float, default=200)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    if options.row:
        overhead(options.graphs, options.nodes, options.row)
        return
    if options.graphs:
        overheads(options)
    models = zoo.read_models()
    if options.words:
        titles = "nodes, pointers, of the pool, proven, disproven, neither, unproven before, unproven after"
        print(f"| model | {titles.replace(', ', ' | ')} |")
    else:
        print("| model | way | graphs | pointers | stale |")
    names = list(models) if options.zoo == "all" else [name for name in options.zoo.split(",") if name]
    for name in names:
        if time.monotonic() > end:
            print(f"not looked at: {name}")
            continue
        try:
            (words if options.words else look_at)(models[name])
        except Exception as error:  # the others go on
            print(f"| {name} | {type(error).__name__}: {str(error)[:200]} |", flush=True)
    if options.gallery:
        sys.path.insert(0, str(gallery.FOLDER))
        for name in gallery.NAMES:
            look_at_program(name)


if __name__ == "__main__":
    main()
