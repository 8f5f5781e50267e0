"""Continuous batching over the reference decoder, its batches run in three ways: eagerly, decode by FULL graphs, and
mixed batches in pieces besides.

    python docs/examples/serving.py
    python docs/examples/serving.py --config configs/decoder_0_6b.yaml --requests 512
    python docs/examples/serving.py --requests 20000 --arrivals 0.5 --steps 10000 --modes FULL_AND_PIECEWISE
    python docs/examples/serving.py --requests 20000 --arrivals 0.5 --steps 10000 --modes FULL_AND_PIECEWISE \\
        --policy adaptive --replan-every 500

Requests have the lengths of Azure's trace of a code assistant (`tests/data/README.md`). Its prompts, 4,800 tokens and
more, are scaled down by one factor, so that the longest takes three quarters of what a block table of the configuration
holds; outputs are as recorded, cut to what is left. Tokens are random, and so are the decoder's weights.

The scheduler is the usual one. Each step, every running request that decodes gets one token, then prompts get what is
left of the token budget, in chunks; requests are admitted while there are places and cache blocks for their whole
length, so nothing is ever preempted. Arrivals are counted in steps, not in seconds: each mode sees the same batches.

With `--policy lazy` a graph is captured when a batch first asks for it; with `--policy adaptive` the graphs are planned
anew every so many steps, for the batches since. Memory is compared from when the loop is warm: after 50 steps, and
after three replans.
"""

import argparse
import csv
import random
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

import torch

from cgplan import CUDAGraphMode
from cgplan.backends import select_backend
from cgplan.config import load_config
from cgplan.errors import CgplanError, TrafficError
from cgplan.models.loading import load_model
from cgplan.reports.layout import Column, Grid, TextColumn, describe_sizes, plain_text
from cgplan.runner.manager import CudaGraphManager
from cgplan.traffic.step_times import StepTimes
from cgplan.units import format_bytes

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "tests/data/azure_llm_code_2023.csv"
MODES = ("NONE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


@dataclass
class Request:
    """One request: its tokens grow from the prompt to ``length``, and ``computed`` of them are in the KV cache."""

    arrival: float  # in steps
    tokens: list[int]
    length: int
    prompt: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def pending(self) -> int:
        """Tokens to compute: what is left of the prompt, then one at a time."""
        return len(self.tokens) - self.computed


@dataclass
class Served:
    """What one mode did. ``steps`` counts them by runtime mode; of ``checked`` tokens eager would have chosen ``wrong``
    otherwise on the same padded batch.
    """

    requests: list[Request]
    seconds: float = 0.0
    generated: int = 0
    steps: Counter = field(default_factory=Counter)
    padding: int = 0
    checked: int = 0
    wrong: int = 0
    memory: tuple[int, int] | None = None  # bytes that the allocator holds, warm and at the end
    replans: int = 0
    captures: int = 0
    evictions: int = 0
    sizes: tuple[int, ...] = ()

    @property
    def grown(self) -> int:
        """Bytes that the run has taken since it was warm."""
        return 0 if self.memory is None else self.memory[1] - self.memory[0]


def trace_requests(count: int, capacity: int, vocab_size: int, arrivals: float, seed: int) -> list[Request]:
    """Requests with the trace's lengths; ``arrivals`` of them come in each step on average, all at once if 0."""
    choose, now, found = random.Random(seed), 0.0, []
    with TRACE.open() as file:
        rows = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]
    scale = min(1.0, 0.75 * capacity / max(context for context, _ in rows))
    for number in range(count):
        context, generated = rows[number % len(rows)]
        prompt = max(1, round(context * scale))
        now += choose.expovariate(arrivals) if arrivals else 0.0
        tokens = [choose.randrange(vocab_size) for _ in range(prompt)]
        found.append(Request(now, tokens, min(prompt + max(generated, 1), capacity), prompt))
    return found


class Server:
    """Schedules requests, makes the batches' tensors, and appends the tokens that the model chooses."""

    def __init__(self, manager: CudaGraphManager, model: torch.nn.Module, budget: int):
        self.manager = manager
        self.block_size = model.config.block_size
        self.columns = manager.config.metadata["block_tables"].shape[1]
        self.most = manager.config.scheduler.max_num_seqs
        self.budget = budget
        self.free = list(range(model.config.num_blocks))
        self.running: list[Request] = []

    def admit(self, waiting: deque[Request], step: int) -> None:
        """Take in requests, first come first served, while there is room for all of their tokens."""
        while waiting and waiting[0].arrival <= step and len(self.running) < self.most:
            needed = -(-waiting[0].length // self.block_size)
            if needed > len(self.free):
                break
            request = waiting.popleft()
            request.blocks = [self.free.pop() for _ in range(needed)]
            self.running.append(request)

    def schedule(self) -> list[tuple[Request, int]]:
        """The requests of this step with the number of their tokens: those that decode, then parts of prompts."""
        decoding = [request for request in self.running if request.pending == 1][: self.budget]
        chunks, left = [(request, 1) for request in decoding], self.budget - len(decoding)
        for request in self.running:
            if left > 0 and request.pending > 1:
                chunks.append((request, min(request.pending, left)))
                left -= chunks[-1][1]
        return chunks

    def batch(self, chunks: list[tuple[Request, int]]) -> dict[str, torch.Tensor]:
        """Inputs and metadata by name, on the host: the runner copies them in at once."""
        ids, positions, slots, ends, tables = [], [], [], [0], []
        for request, count in chunks:
            places = range(request.computed, request.computed + count)
            ids += request.tokens[places.start : places.stop]
            positions += places
            slots += [request.blocks[p // self.block_size] * self.block_size + p % self.block_size for p in places]
            ends.append(len(ids))
            tables.append(request.blocks + [0] * (self.columns - len(request.blocks)))
        return {
            "input_ids": torch.tensor(ids),
            "positions": torch.tensor(positions),
            "slot_mapping": torch.tensor(slots),
            "block_tables": torch.tensor(tables, dtype=torch.int32),
            "seq_lens": torch.tensor([r.computed + count for r, count in chunks], dtype=torch.int32),
            "query_start_loc": torch.tensor(ends, dtype=torch.int32),
        }

    def step(self, served: Served, check: bool) -> None:
        """Run one batch. Requests whose last token it computes get a new one; those that are done leave."""
        chunks = self.schedule()
        batch = self.batch(chunks)
        ends = batch["query_start_loc"][1:].long() - 1
        chosen = self.choose(self.manager.run(**batch), ends)
        if check:
            eager = self.choose(self.manager.runner.run_eagerly(**batch), ends)
            served.checked += len(chosen)
            served.wrong += sum(a != b for a, b in zip(chosen, eager, strict=True))
        for (request, count), token in zip(chunks, chosen, strict=True):
            request.computed += count
            if request.pending == 0:
                request.tokens.append(token)
                served.generated += 1
                if len(request.tokens) >= request.length:
                    self.running.remove(request)
                    self.free += request.blocks

    def replan(self, times: StepTimes | None) -> bool:
        """Plan the graphs anew for the batches since the last time; False if there were none."""
        try:
            self.manager.replan(times=times)
        except TrafficError:
            return False
        return True

    @staticmethod
    def choose(logits: torch.Tensor, ends: torch.Tensor) -> list[int]:
        """The most probable token after each request's last one; the step's only copy to the host."""
        return logits[ends.to(logits.device)].argmax(-1).tolist()

    def serve(
        self,
        requests: list[Request],
        seconds: float,
        steps: int,
        check: float,
        replan_every: int = 0,
        times: StepTimes | None = None,
    ) -> Served:
        """Run until all requests are done, the time is up, or so many steps were made; replan every so many, if any."""
        served, waiting, step = Served(requests), deque(requests), 0
        sampled, stats, backend = random.Random(0), self.manager.stats, self.manager.backend
        captures, evictions = stats.captures, stats.evictions
        start, memory, warm = time.perf_counter(), None, max(50, 3 * replan_every)
        while (waiting or self.running) and step < steps and time.perf_counter() - start < seconds:
            self.admit(waiting, step)
            step += 1
            if self.running:
                self.step(served, sampled.random() < check)
            if replan_every and step % replan_every == 0 and self.replan(times):
                served.replans += 1
            if step == warm:  # from here on nothing should grow
                backend.release_cached()
                memory = backend.memory().reserved
        backend.synchronize()
        served.seconds = time.perf_counter() - start
        if memory is not None:
            backend.release_cached()
            served.memory = (memory, backend.memory().reserved)
        served.captures, served.evictions = stats.captures - captures, stats.evictions - evictions
        served.sizes = self.manager.sizes
        for (mode, _), count in stats.replays.items():
            served.steps[mode] += count
        served.steps[CUDAGraphMode.NONE] = sum(stats.eager.values())
        served.padding = stats.padded_rows
        return served


def serve_all(args: argparse.Namespace) -> dict[str, Served]:
    """Each mode on the same requests, with the same model, one after the other."""
    config = load_config(args.config, args.set)
    if "block_tables" not in config.metadata:
        raise SystemExit(
            f"error: {args.config} declares no block_tables: give a configuration of the reference decoder"
        )
    backend = select_backend(config.device)
    model = load_model(
        config.model.target, config.model.kwargs, device=backend.device, base_dir=Path(args.config).parent
    )
    capacity = min(config.metadata["block_tables"].shape[1], model.config.num_blocks) * model.config.block_size
    times = StepTimes.load(args.step_times) if args.step_times else None
    policy = f"compilation.capture_policy={args.policy}"
    configs = {m: load_config(args.config, [*args.set, policy, f"compilation.cudagraph_mode={m}"]) for m in args.modes}
    managers = {mode: CudaGraphManager(moded, model, backend, name=mode) for mode, moded in configs.items()}
    # Mixed batches up to the largest capture size have graphs; all modes take the same budget, so the same batches.
    largest = max(manager.plan.max_capture_size for manager in managers.values())
    bounds = config.scheduler
    budget = args.budget or max(largest or min(512, bounds.max_num_batched_tokens), bounds.max_num_seqs)
    served = {}
    for mode, manager in managers.items():
        with manager:
            manager.capture()
            few = trace_requests(4, capacity, model.config.vocab_size, 0.0, seed=1)
            Server(manager, model, budget).serve(few, seconds=60.0, steps=20, check=0.0)  # libraries warm up
            manager.stats.reset()
            requests = trace_requests(args.requests, capacity, model.config.vocab_size, args.arrivals, seed=0)
            every = args.replan_every if args.policy == "adaptive" and mode != "NONE" else 0
            server = Server(manager, model, budget)
            served[mode] = server.serve(requests, args.seconds, args.steps, args.check, every, times)
    return served


def table(served: dict[str, Served]) -> str:
    """A row for each mode; shares of steps by how they ran, and of padding among all computed tokens."""
    rows = []
    for mode, found in served.items():
        total = found.steps.total()
        computed = sum(request.computed for request in found.requests)
        rows.append(
            {
                "mode": mode,
                "tokens/s": f"{found.generated / found.seconds:.0f}",
                "generated": found.generated,
                "steps": total,
                **{
                    name: f"{found.steps[way] / max(total, 1):.0%}"
                    for name, way in (
                        ("eager", CUDAGraphMode.NONE),
                        ("PIECEWISE", CUDAGraphMode.PIECEWISE),
                        ("FULL", CUDAGraphMode.FULL),
                    )
                },
                "padding": f"{found.padding} ({found.padding / max(computed + found.padding, 1):.0%})",
                "wrong": f"{found.wrong}/{found.checked}",
                "memory": f"+{format_bytes(found.grown)}" if found.grown >= 0 else f"-{format_bytes(-found.grown)}",
            }
        )
    first, *others = rows[0]
    columns = [Column(name, itemgetter(name)) for name in others]
    return plain_text(Grid(rows, TextColumn(first, itemgetter(first)), *columns), width=120)


def on_demand(served: dict[str, Served]) -> str:
    """A line for each mode: what was captured and evicted while it served, and what memory did."""
    lines = []
    for mode, found in served.items():
        warm, end = map(format_bytes, found.memory or (None, None))
        lines.append(
            f"{mode}: {found.replans} replans, {found.captures} captures, {found.evictions} evictions; memory {warm} "
            f"warm, {end} at the end; {found.wrong} wrong of {found.checked} tokens; {len(found.sizes)} sizes at the "
            f"end: {describe_sizes(found.sizes) if found.sizes else 'none'}"
        )
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--config", default=str(ROOT / "configs/decoder_cpu.yaml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the configuration")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each mode, at most")
    parser.add_argument("--steps", type=int, default=sys.maxsize, help="for each mode, at most")
    parser.add_argument("--arrivals", type=float, default=0.0, help="requests a step, on average; 0: all at once")
    parser.add_argument("--budget", type=int, default=0, help="tokens of a step at most; 0: the largest capture size")
    parser.add_argument("--check", type=float, default=0.01, help="share of steps that are compared with eager")
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument(
        "--policy", choices=("eager", "lazy", "adaptive"), default="eager", help="when keys are captured"
    )
    parser.add_argument("--replan-every", type=int, default=100, metavar="STEPS", help="with --policy adaptive")
    parser.add_argument("--step-times", metavar="FILE", help="for replans; absent: measured by the runner")
    args = parser.parse_args(arguments)
    if args.requests < 1 or args.budget < 0:
        parser.error(f"--requests is {args.requests} and --budget {args.budget}: give 1 at least, and no less than 0")
    return args


def main(given: list[str] | None = None) -> None:
    """The program; what is wrong with the configuration or a file is a message, not a traceback."""
    arguments = parse(given)
    try:
        results = serve_all(arguments)
    except CgplanError as error:
        raise SystemExit(f"error: {error}") from None
    print(table(results))
    if arguments.policy != "eager":
        print(on_demand(results))


if __name__ == "__main__":
    main()
