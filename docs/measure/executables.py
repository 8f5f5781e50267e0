"""A census: which sizes of a model could share one executable graph, and what that would cost.

    python docs/measure/executables.py [--models qwen3,bert,...] [--largest 128]

Each model of zoo.yaml is captured in FULL at 1, 2, 4, 8 and every eighth size. Graphs are grouped three ways: by their
kernels, with blocks and shared memory; the same with grids; and by what the driver accepts (cuGraphExecUpdate from the
executable of the largest size). Then the times of an update and of an instantiation (medians), the first replay after
each, and the memory of an executable.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from cuda.bindings import driver, runtime

sys.path.insert(0, str(Path(__file__).parent))
import zoo

import cgplan

MODELS = "qwen3,bert,t5,mixtral,timm_resnet50d,timm_vit_small"
COPIES = 16  # executables, for their memory


def checked(result):
    error, *values = result
    if int(error):
        raise RuntimeError(str(error))
    return values[0] if len(values) == 1 else values


def kernels(graph, grids):
    """A graph's nodes as a hashable list, without the addresses that they read."""
    count = checked(driver.cuGraphGetNodes(graph))[1]
    found = []
    for node in checked(driver.cuGraphGetNodes(graph, count))[0]:
        kind = checked(driver.cuGraphNodeGetType(node))
        if kind != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            found.append(int(kind))
            continue
        given = checked(driver.cuGraphKernelNodeGetParams(node))
        block = given.blockDimX, given.blockDimY, given.blockDimZ
        grid = (given.gridDimX, given.gridDimY, given.gridDimZ) if grids else ()
        found.append((int(given.func), block, given.sharedMemBytes, grid))
    return tuple(found)


def instantiated(graph):
    return checked(runtime.cudaGraphInstantiate(graph, 0))


def microseconds(call, *arguments):
    torch.cuda.synchronize()
    began = time.perf_counter()
    value = call(*arguments)
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - began), value


def launch(executable):
    checked(runtime.cudaGraphLaunch(executable, torch.cuda.current_stream().cuda_stream))


def census(model, sizes):
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, zoo.at(model.dtype, "real")))
    with torch.device("cuda"):
        module = model.build("real", zoo.at(model.dtype, "real")).eval().requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    inputs = {name: model.input(text, "real") for name, text in model.inputs.items()}
    runner = cgplan.capture(
        module,
        inputs,
        compilation={"cudagraph_capture_sizes": sizes},
        scheduler={"max_num_seqs": max(sizes), "max_num_batched_tokens": max(sizes)},
        device="cuda",
    )
    graphs = []
    for key in runner.plan.keys:
        raw = runner.graph(*key).graph.raw_cuda_graph()
        graphs.append((driver.CUgraph(raw), runtime.cudaGraph_t(raw)))
    groups = [len(Counter(kernels(graph, grids) for graph, _ in graphs)) for grids in (False, True)]
    largest = instantiated(graphs[0][1])
    accepted, updates, instantiations, after_update, after_instantiation = 0, [], [], [], []
    for _, graph in graphs:
        took, result = microseconds(runtime.cudaGraphExecUpdate, largest, graph)
        if int(result[0]):
            runtime.cudaGetLastError()
            checked(runtime.cudaGraphExecDestroy(largest))
            largest = instantiated(graphs[0][1])
        else:
            accepted += 1
            updates.append(took)
            after_update.append(microseconds(launch, largest)[0])
        took, executable = microseconds(instantiated, graph)
        instantiations.append(took)
        after_instantiation.append(microseconds(launch, executable)[0])
        checked(runtime.cudaGraphExecDestroy(executable))
    free = torch.cuda.mem_get_info()[0]
    copies = [instantiated(graphs[0][1]) for _ in range(COPIES)]
    for executable in copies:
        launch(executable)
    torch.cuda.synchronize()
    memory = (free - torch.cuda.mem_get_info()[0]) / COPIES
    figures = [statistics.median(times) for times in (updates, instantiations, after_update, after_instantiation)]
    cells = [model.name, len(graphs), len(kernels(graphs[0][0], False)), f"{groups[0]}, {groups[1]}", accepted]
    cells.append("{:.0f}, {:.0f}".format(*figures[:2]))
    cells.append("{:.0f}, {:.0f}".format(*figures[2:]))
    cells.append(f"{memory / 2**20:.2f}")
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
    for executable in copies:
        checked(runtime.cudaGraphExecDestroy(executable))
    runner.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--largest", type=int, default=128)
    options = parser.parse_args()
    models = zoo.read_models()
    sizes = [1, 2, 4, *range(8, options.largest + 1, 8)]
    print("| model | graphs | nodes | groups by kernels, with grids | updates accepted | update, instantiation, us |")
    print("first replay after them, us | MiB of an executable |")
    for name in options.models.split(","):
        try:
            census(models[name], sizes)
        except Exception as error:  # the others go on
            print(f"| {name} | {type(error).__name__}: {error} |", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
