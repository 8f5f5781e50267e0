"""Kills one of several ranks at a random moment, again and again, on the CPU: hangs and orphans are counted.

    python docs/measure/kills.py [--kills 200] [--world-size 2] [--timeout 10]

Each run meets, captures, registers, replays, captures again and replays; the victim gets SIGKILL at a moment drawn from
the whole of it. Every other rank has to end by itself within the timeout, with an error that names the victim, or well
if the run was over. A rank that runs on is a hang; a process of a run that is there afterwards is an orphan; so is a
segment in /dev/shm.
"""

import argparse
import multiprocessing as mp
import os
import random
import socket
import sys
import time
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path

REPLAYS = 300
context = mp.get_context("forkserver")


def rank_main(sender, rank, world_size, port, timeout):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    import torch

    from cgplan.errors import CgplanError

    torch.set_num_threads(1)
    sender.send(("started", time.monotonic()))
    try:
        run(rank, timeout)
    except CgplanError as error:
        sender.send((type(error).__name__, error.message))
        sys.exit(error.exit_code)
    sender.send(("ended", ""))


def run(rank, timeout):
    import torch

    from cgplan.backends import select_backend
    from cgplan.config import Config
    from cgplan.distributed import RankedCapture, open_all_reduce, open_ranks
    from cgplan.planning import build_plan
    from cgplan.runner.session import CaptureSession

    config = Config(
        device="cpu",
        inputs={"x": {"shape": ["num_tokens", 64], "dtype": "float32", "pad": 0}},
        compilation={"cudagraph_capture_sizes": [1, 4, 8], "all_reduce": "custom"},
        scheduler={"max_num_seqs": 8, "max_num_batched_tokens": 16},
        distributed={"timeout": timeout, "all_reduce_max_size": 1 << 16},
    )
    ranks = open_ranks(config.distributed, "cpu")
    with ranks, open_all_reduce(config, ranks, select_backend("cpu")) as reducer:

        def model(x):
            for _ in range(8):
                x = torch.ops.cgplan.all_reduce(x * 0.25, reducer.number) + 1
            return x

        capture = CaptureSession(
            build_plan(config), model, reducer.backend, config, together=RankedCapture(ranks, reducer, config)
        )
        runner = capture.run()
        for turn in range(REPLAYS):
            if turn == REPLAYS // 2:
                runner.recapture()
            runner(x=torch.full((1 + turn % 8, 64), float(rank)))
        runner.close()


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def start_ranks(world_size, timeout):
    port, ranks = free_port(), []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=rank_main, args=(sender, rank, world_size, port, timeout))
        process.start()
        sender.close()
        ranks.append((process, receiver))
    return ranks


def one_run(world_size, timeout, victim, moment):
    """(how each survivor ended, seconds from the kill to the last end, whether the run was over before)."""
    ranks = start_ranks(world_size, timeout)
    time.sleep(moment)
    was_alive = ranks[victim][0].is_alive()
    ranks[victim][0].kill()
    killed = time.monotonic()
    ends = []
    for rank, (process, receiver) in enumerate(ranks):
        if rank == victim:
            process.join()
            continue
        process.join(max(0.1, killed + timeout + 5 - time.monotonic()))
        said = ("nothing", "")
        try:
            while receiver.poll(0):
                said = receiver.recv()
        except EOFError:
            pass
        if process.is_alive():
            said = ("HANG", "")
            process.kill()
            process.join()
        named = f"rank {victim} " in said[1] or "rank 0, which keeps the store" in said[1]
        ends.append(said[0] if said[0] in ("ended", "HANG") or named else f"{said[0]} (names nobody): {said[1]}")
    return ends, time.monotonic() - killed, was_alive


def processes():
    """Processes that the server of this run has forked and that are still there."""
    found, server = set(), forkserver._forkserver._forkserver_pid
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "stat").read_text().rpartition(")")[2].split()[1] == str(server):
                found.add(int(folder.name))
        except OSError:
            continue
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    context.set_forkserver_preload(["torch._dynamo", "cgplan.distributed", "cgplan.runner.session"])
    segments = {path.name for path in Path("/dev/shm").iterdir()}
    draw = random.Random(options.seed)
    start = time.monotonic()
    whole_run(options)
    length = whole_run(options)
    before = processes()
    ends, slowest, over = Counter(), 0.0, 0
    index = 0
    while index < options.kills:  # those that came after the end do not count
        victim, moment = draw.randrange(options.world_size), draw.uniform(0.0, length)
        found, seconds, was_alive = one_run(options.world_size, options.timeout, victim, moment)
        over += not was_alive
        if not was_alive:
            continue
        index += 1
        ends.update(found)
        slowest = max(slowest, seconds)
        if any(end not in ("ended", "RankFailedError", "RendezvousError") for end in found):
            print(f"kill {index}: rank {victim} after {moment:.3f} s: {found}", flush=True)
    time.sleep(1)
    orphans = processes() - before
    left = {path.name for path in Path("/dev/shm").iterdir()} - segments
    print(
        f"{options.kills} kills among {options.world_size} ranks in {time.monotonic() - start:.0f} s ({over} more came "
        f"after the end): {ends['HANG']} hangs, {len(orphans)} orphans, {len(left)} segments left; the survivors "
        f"ended at most {slowest:.1f} s after the kill: {dict(ends)}"
    )


def whole_run(options):
    """Seconds that a run takes when nobody is killed: the second one, with everything loaded."""
    start = time.monotonic()
    started = start_ranks(options.world_size, options.timeout)
    for process, _ in started:
        process.join()
        if process.exitcode:
            sys.exit(f"a rank that nobody killed ended with {process.exitcode}")
    return time.monotonic() - start


if __name__ == "__main__":
    main()
