"""Greedy speculative decoding beside plain decoding, each with and without graphs: tokens per
second, and whether the tokens are the same.

    python speculative.py
    python speculative.py --config decoder_0_6b.yaml --set speculative.num_speculative_tokens=3

The draft is the target's first layers, so its weights need no memory and no training (the target's
weights are random, too). Without training, a draft of few layers is never right. ``--later-layers
0.02`` stands in for training: it scales what the target's later layers add, so that the draft
agrees more often, at the cost of a real one. The times are those of decoding, without the prefill.

Plain decoding is the usual loop: each step takes a token for each request, and a batch's tensors go
to the device. Speculative decoding leaves the requests' state there: a step is two replays, and one
copy of the new tokens back.
"""

import argparse
import random
import time
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import torch
from decoder import Decoder, first_layers
from spec_decode import SpecDecodeGraphManager, plan_speculation

from cgplan.backends import GraphBackend, select_backend
from cgplan.config import Config, load_config
from cgplan.errors import CgplanError
from cgplan.models.loading import load_model
from cgplan.reports.layout import Column, Grid, TextColumn, plain_text
from cgplan.runner.manager import CudaGraphManager

FOLDER = Path(__file__).resolve().parent


@dataclass
class Decoded:
    """What one way of decoding brought. ``tokens`` are those of each request behind its prompt."""

    tokens: list[list[int]]
    seconds: float
    steps: int
    acceptance: float | None = None
    graphs: int = 0


@dataclass
class Workload:
    """Prompts, the number of new tokens for each, and each one's cache blocks, which hold them."""

    prompts: list[list[int]]
    count: int
    blocks: list[list[int]]
    block_size: int
    columns: int

    @classmethod
    def random(cls, config: Config, model: Decoder, requests: int, count: int) -> "Workload":
        shape, choose = model.config, random.Random(0)
        if requests < 1:
            raise SystemExit(f"--requests {requests}: give 1 at least, or 0 for max_num_seqs")
        columns = config.metadata["block_tables"].shape[1]
        each = min(columns, shape.num_blocks // requests)
        longest = each * shape.block_size - count
        if count < 2:
            raise SystemExit(
                f"--tokens {count}: the prefill gives a request's first token, so give 2 at least"
            )
        if longest < 1:
            raise SystemExit(
                f"{each} blocks of {shape.block_size} tokens a request do not hold {count} new ones"
            )
        prompts = [
            [choose.randrange(shape.vocab_size) for _ in range(choose.randint(1, longest))]
            for _ in range(requests)
        ]
        blocks = [list(range(number * each, (number + 1) * each)) for number in range(requests)]
        return cls(prompts, count, blocks, shape.block_size, columns)

    def batch(self, chunks: list[tuple[int, list[int], int]]) -> dict[str, torch.Tensor]:
        """Inputs and metadata of a batch of (request, its new tokens, tokens in the cache)."""
        ids, positions, slots, ends = [], [], [], [0]
        for request, tokens, context in chunks:
            places, blocks = range(context, context + len(tokens)), self.blocks[request]
            ids += tokens
            positions += places
            slots += [
                blocks[p // self.block_size] * self.block_size + p % self.block_size for p in places
            ]
            ends.append(len(ids))
        tables = [self.blocks[r] + [0] * (self.columns - len(self.blocks[r])) for r, _, _ in chunks]
        return {
            "input_ids": torch.tensor(ids),
            "positions": torch.tensor(positions),
            "slot_mapping": torch.tensor(slots),
            "block_tables": torch.tensor(tables, dtype=torch.int32),
            "seq_lens": torch.tensor(
                [context + len(tokens) for _, tokens, context in chunks], dtype=torch.int32
            ),
            "query_start_loc": torch.tensor(ends, dtype=torch.int32),
        }


def decode_plainly(manager: CudaGraphManager, work: Workload) -> Decoded:
    """One token a request and step."""
    found = []
    for request, prompt in enumerate(work.prompts):
        logits = manager.run(uniform_decode=False, **work.batch([(request, prompt, 0)]))
        found.append([int(logits[-1].argmax())])
    start = time.perf_counter()
    for step in range(work.count - 1):
        chunks = [(r, [tokens[-1]], len(work.prompts[r]) + step) for r, tokens in enumerate(found)]
        chosen = manager.run(uniform_decode=True, **work.batch(chunks)).argmax(-1).tolist()
        for tokens, token in zip(found, chosen, strict=True):
            tokens.append(token)
    return Decoded(
        found, time.perf_counter() - start, work.count - 1, graphs=len(manager.runner.plan.keys)
    )


def decode_speculatively(manager: SpecDecodeGraphManager, work: Workload) -> Decoded:
    """Several tokens a request and step; those that have enough leave the batch."""
    found, slots = [], {}
    for request, prompt in enumerate(work.prompts):
        logits = manager.prefill(**work.batch([(request, prompt, 0)]))
        found.append([int(logits[-1].argmax())])
        slots[manager.add([*prompt, *found[-1]], work.blocks[request])] = found[-1]
    start, steps = time.perf_counter(), 0
    while slots:
        step = manager.step()
        steps += 1
        for slot, tokens in zip(step.slots, step.tokens(), strict=True):
            slots[slot] += tokens
            if len(slots[slot]) >= work.count:
                del slots[slot][work.count :]
                del slots[slot]
                manager.remove(slot)
    seconds = time.perf_counter() - start
    return Decoded(found, seconds, steps, manager.stats.acceptance, manager.report.graphs)


def decode_all(args: argparse.Namespace) -> dict[str, Decoded]:
    """The four ways on the same prompts, one after the other."""
    # With tied embeddings, random weights repeat the last token for ever, and any draft is right.
    changes = ["model.kwargs.tie_word_embeddings=false", *args.set]
    config = load_config(args.config, changes)
    backend = select_backend(config.device)
    target = load_model(
        config.model.target,
        config.model.kwargs,
        device=backend.device,
        base_dir=Path(args.config).parent,
    )
    draft_layers = args.draft_layers or max(target.config.num_layers // 2, 1)
    scale_later_layers(target, draft_layers, args.later_layers)
    draft = first_layers(target, draft_layers)
    work = Workload.random(
        config, target, args.requests or min(config.scheduler.max_num_seqs, 16), args.tokens
    )
    found = {}
    for name, graphs in (("without graphs", False), ("with graphs", True)):
        moded = (
            config
            if graphs
            else load_config(args.config, [*changes, "compilation.cudagraph_mode=NONE"])
        )
        found[f"plain, {name}"] = _plain(moded, target, backend, work)
        with SpecDecodeGraphManager(moded, target, draft, backend) as manager:
            manager.capture()
            decode_speculatively(manager, work)  # libraries warm up
            found[f"speculative, {name}"] = decode_speculatively(manager, work)
    return found


@torch.no_grad()
def scale_later_layers(target: Decoder, first: int, scale: float) -> None:
    """Scale what the layers from ``first`` on add to the residual stream."""
    for layer in list(target.layers)[first:]:
        layer.self_attn.o_proj.weight.mul_(scale)
        layer.mlp.down_proj.weight.mul_(scale)


def _plain(config: Config, target: Decoder, backend: GraphBackend, work: Workload) -> Decoded:
    """Decoding by one token, with graphs for as many requests as speculation has them for."""
    sizes = plan_speculation(config).num_reqs or None
    changes = {"cudagraph_capture_sizes": sizes, "max_cudagraph_capture_size": None}
    plain = config.model_copy(
        update={
            "speculative": config.speculative.model_copy(update={"num_speculative_tokens": 0}),
            "compilation": config.compilation.model_copy(update=changes),
        }
    )
    with CudaGraphManager(plain, target, backend) as manager:
        manager.capture()
        decode_plainly(manager, work)
        return decode_plainly(manager, work)


def table(found: dict[str, Decoded]) -> str:
    """A row for each way; ``same`` counts requests with the tokens of plain decoding without
    graphs.
    """
    wanted = next(iter(found.values())).tokens
    rows = []
    for name, way in found.items():
        generated = sum(len(tokens) - 1 for tokens in way.tokens)
        same = sum(a == b for a, b in zip(way.tokens, wanted, strict=True))
        rows.append(
            {
                "decoding": name,
                "tokens/s": f"{generated / way.seconds:.0f}",
                "ms a step": f"{1e3 * way.seconds / way.steps:.2f}",
                "steps": way.steps,
                "accepted": None if way.acceptance is None else f"{way.acceptance:.0%}",
                "graphs": way.graphs,
                "same": f"{same}/{len(wanted)}",
            }
        )
    first, *others = rows[0]
    columns = [Column(name, itemgetter(name)) for name in others]
    return plain_text(Grid(rows, TextColumn(first, itemgetter(first)), *columns))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", default=str(FOLDER / "speculative.yaml"))
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change the configuration"
    )
    parser.add_argument(
        "--requests", type=int, default=0, help="decoded together; 0: max_num_seqs, at most 16"
    )
    parser.add_argument("--tokens", type=int, default=32, help="for each request")
    parser.add_argument(
        "--draft-layers", type=int, default=0, help="layers of the draft; 0: half of the target's"
    )
    parser.add_argument(
        "--later-layers",
        type=float,
        default=1.0,
        metavar="SCALE",
        help="of the layers behind those",
    )
    return parser.parse_args(arguments)


def main(given: list[str] | None = None) -> None:
    """The program; a mistake in the configuration or an argument is a message, not a traceback."""
    try:
        print(table(decode_all(parse(given))))
    except CgplanError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
