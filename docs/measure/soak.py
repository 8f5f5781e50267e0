"""Many replays of captured all-reduces with changing inputs; every 1,000th is compared with torch.distributed's sum.

    torchrun --nproc-per-node 2 docs/measure/soak.py [--replays 100000] [--device cuda]

The graph holds all-reduces of several sizes and dtypes, one-shot and two-shot, each on what the one before left. With
--device cpu the same runs on the tape, over shared memory, against gloo.
"""

import argparse
import time

import torch
import torch.distributed as dist

from cgplan.backends import select_backend
from cgplan.config import Config
from cgplan.distributed import open_all_reduce, open_ranks
from cgplan.errors import CgplanError

SHAPES = [(8, torch.bfloat16), (4096, torch.float32), (65536, torch.bfloat16), (40000, torch.float16),
          (1 << 20, torch.bfloat16)]  # fmt: skip


def refill(statics, rank, turn):
    """New inputs, different on each rank, in place."""
    for index, static in enumerate(statics):
        generator = torch.Generator(static.device).manual_seed(7919 * turn + 31 * index + rank)
        static.normal_(0, 1, generator=generator)


def differences(statics, outputs, tolerance):
    """Sums that are farther from torch.distributed's than rounding explains, and the largest distance."""
    wrong, worst = 0, 0.0
    for static, output in zip(statics, outputs, strict=True):
        wanted = static.float()
        dist.all_reduce(wanted)
        distance = (output.float() - wanted).abs()
        allowed = tolerance[output.dtype] * wanted.abs().clamp(min=1)
        wrong += int((distance > allowed).any())
        worst = max(worst, distance.max().item())
    return wrong, worst


def alike(ranks, outputs):
    """Whether all ranks hold the same bits."""
    sums = [int(output.view(torch.uint8).long().sum()) for output in outputs]
    return len({tuple(found) for found in ranks.agree("the comparison", value=sums)}) == 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--replays", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=1000)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    config = Config(device=options.device, compilation={"all_reduce": "custom"})
    ranks = open_ranks(config.distributed, options.device)
    if ranks is None:
        raise CgplanError("one process has nobody to reduce with", remedy="Start it with torchrun --nproc-per-node 2.")
    tolerance = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
    with ranks:
        backend = select_backend(str(ranks.device))
        reducer = open_all_reduce(config, ranks, backend)
        statics = [torch.zeros(size, dtype=dtype, device=ranks.device) for size, dtype in SHAPES]
        reducer.begin_pass()
        graph = backend.new_graph(backend.new_pool())
        with backend.session():
            for static in statics:
                reducer(static)
            with backend.capturing(graph):
                outputs = [reducer(static) for static in statics]
        reducer.end_pass()
        wrong = compared = unlike = 0
        worst, start = 0.0, time.perf_counter()
        for turn in range(options.replays):
            if turn % 10 == 0:
                refill(statics, ranks.rank, turn)
            backend.replay(graph)
            if (turn + 1) % options.every == 0:
                found, distance = differences(statics, outputs, tolerance)
                wrong, worst, compared = wrong + found, max(worst, distance), compared + 1
                unlike += not alike(ranks, outputs)
                reducer.check()
        backend.synchronize()
        seconds = time.perf_counter() - start
        totals = ranks.agree("the result", value=(wrong, worst))
        if ranks.rank == 0:
            print(
                f"{ranks.world_size} ranks on {ranks.device.type}: {options.replays} replays of {len(SHAPES)} "
                f"all-reduces in {seconds:.0f} s, {compared} comparisons: {sum(w for w, _ in totals)} beyond rounding, "
                f"{unlike} with bits that differ between ranks, largest distance {max(d for _, d in totals):g}"
            )
        reducer.release()
        backend.reset(graph)
        reducer.close()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
