"""Captured all-reduce: cgplan's kernels, NCCL and PyTorch's symmetric memory, in one run.

    torchrun --nproc-per-node 2 docs/measure/all_reduce.py [--count 64] [--rounds 20] [--one-shot-bytes N]

For each size, a CUDA graph of 64 all-reduces in a row is replayed; microseconds are device time of one of them, the
median over rounds of the slowest rank. NCCL and symmetric memory reduce in place, on memory that needs no copy;
cgplan's kernels are out of place. Before it is timed, each is compared with NCCL on random numbers.
"""

import argparse
import statistics

import torch
import torch.distributed as dist

from cgplan.backends import select_backend
from cgplan.config import Config
from cgplan.distributed import open_all_reduce, open_ranks
from cgplan.errors import CgplanError

SIZES = [1 << power for power in range(13, 24)]  # 8 KiB to 8 MiB


def graph_of(backend, pool, call, count):
    graph = backend.new_graph(pool)
    with backend.session():
        for _ in range(2):
            call()
        with backend.capturing(graph):
            for _ in range(count):
                call()
    return graph


def microseconds(backend, ranks, graph, count, rounds):
    """Of one all-reduce: the median over rounds, of the slowest rank."""
    for _ in range(3):
        backend.replay(graph)
    times = []
    for _ in range(rounds):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(5):
            backend.replay(graph)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (5 * count))
    found = ranks.agree("the times", value=statistics.median(times))
    return max(found)


def custom(size, options, ranks, backend, reducer):
    x = torch.randn(size // 2, device=ranks.device).bfloat16()
    reducer.begin_pass()
    graph = graph_of(backend, backend.new_pool(), lambda: reducer(x), options.count)
    registration = reducer.end_pass()
    if registration.rows != options.count:
        print(f"only {registration.rows} of {options.count} all-reduces were captured by the custom kernels")
    summed = reducer(x)
    wanted = x.clone()
    dist.all_reduce(wanted)
    worst = (summed.float() - wanted.float()).abs().max().item()
    return graph, worst


def symmetric(size, options, backend, buffer, name):
    x = buffer[:size].view(torch.bfloat16)
    x.zero_()
    if size <= options.symm_one_shot:
        call = lambda: torch.ops.symm_mem.one_shot_all_reduce(x, "sum", name)  # noqa: E731
    else:
        call = lambda: torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", name)  # noqa: E731
    return graph_of(backend, backend.new_pool(), call, options.count)


def symmetric_buffer(ranks):
    from torch.distributed import _symmetric_memory as symmetric_memory

    name = dist.group.WORLD.group_name
    try:
        buffer = symmetric_memory.empty(SIZES[-1], dtype=torch.uint8, device=ranks.device)
        symmetric_memory.rendezvous(buffer, name)
    except RuntimeError as error:
        print(f"rank {ranks.rank}: no symmetric memory: {str(error).splitlines()[0]}")
        buffer = None
    if None in ranks.agree("symmetric memory", value=buffer if buffer is None else True):
        return None, name
    return buffer, name


def measure(options, ranks, backend, reducer):
    buffer, name = (None, "") if options.no_symm_mem else symmetric_buffer(ranks)
    if ranks.rank == 0:
        print(f"{torch.cuda.get_device_name()}, {ranks.world_size} ranks, torch {torch.__version__}, bfloat16")
        print("    bytes   NCCL us  custom us   ratio  symm_mem us   ratio  largest difference from NCCL")
    for size in SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=ranks.device)
        graph = graph_of(backend, backend.new_pool(), lambda x=x: dist.all_reduce(x), options.count)
        by_nccl = microseconds(backend, ranks, graph, options.count, options.rounds)
        backend.reset(graph)
        graph, worst = custom(size, options, ranks, backend, reducer)
        by_custom = microseconds(backend, ranks, graph, options.count, options.rounds)
        reducer.check()
        reducer.release()
        backend.reset(graph)
        line = f"{size:9}{by_nccl:10.2f}{by_custom:11.2f}{by_custom / by_nccl:8.2f}"
        if buffer is not None:
            graph = symmetric(size, options, backend, buffer, name)
            by_symmetric = microseconds(backend, ranks, graph, options.count, options.rounds)
            backend.reset(graph)
            line += f"{by_symmetric:13.2f}{by_symmetric / by_nccl:8.2f}"
        else:
            line += f"{'-':>13}{'-':>8}"
        if ranks.rank == 0:
            print(f"{line}  {worst:g}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--one-shot-bytes", type=int, help="largest message that cgplan reduces in one shot")
    parser.add_argument("--symm-one-shot", type=int, default=512 << 10)
    parser.add_argument("--no-symm-mem", action="store_true")
    options = parser.parse_args()
    config = Config(device="cuda", compilation={"all_reduce": "custom"})
    ranks = open_ranks(config.distributed, "cuda")
    if ranks is None:
        raise CgplanError("one process has nobody to reduce with", remedy="Start it with torchrun --nproc-per-node 2.")
    with ranks:
        backend = select_backend(str(ranks.device))
        if options.one_shot_bytes is not None:
            from cgplan.distributed import all_reduce

            all_reduce.ONE_SHOT_BYTES = dict.fromkeys((2, 4, 8), options.one_shot_bytes)
        reducer = open_all_reduce(config, ranks, backend)
        measure(options, ranks, backend, reducer)
        reducer.close()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
