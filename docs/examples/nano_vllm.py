"""nano-vllm (https://github.com/GeeeekExplorer/nano-vllm) with its decode graphs replaced by cgplan's, at run time.

    python docs/examples/nano_vllm.py PATH_OF_A_CHECKOUT [--requests 64] [--layers 28]

Both kinds of graphs serve the same requests, three times each in turns, in Qwen3-0.6B's shape with random weights, and
take the most likely token. The table compares tokens, seconds of the captures, and times of decode steps, of the last
two times: a host that others use may be twice as slow from one time to the next. Where flash-attn is not installed,
attention runs through PyTorch, for both.
"""

import argparse
import gc
import itertools
import random
import statistics
import sys
import tempfile
import time
import types
from pathlib import Path

import numpy as np
import torch

import cgplan
from cgplan import Input


def use_cgplan(runner_class, set_context, verify):
    """Let a ModelRunner of nano-vllm capture and replay its decode steps by cgplan."""
    run_model = runner_class.run_model

    @torch.inference_mode()  # as it is called: compiled functions have other code outside of it
    def capture_cudagraph(self):
        config = self.config
        most, width = min(config.max_num_seqs, 512), -(-config.max_model_len // self.block_size)

        def decode(input_ids, positions, **_of_context):
            return self.model(input_ids, positions)

        def before_key(_mode, _key, views):
            set_context(False, **{name: views[name] for name in ("slot_mapping", "context_lens", "block_tables")})

        self.graph_pool, self.width = None, width
        self.graphs = cgplan.capture(
            decode,
            {
                "input_ids": Input(shape=("num_tokens",), dtype="int64", pad=0),
                "positions": Input(shape=("num_tokens",), dtype="int64", pad=0),
                "slot_mapping": Input(shape=("num_tokens",), dtype="int32", pad=-1),
                "context_lens": Input(shape=("num_tokens",), dtype="int32", pad=0),
                "block_tables": Input(shape=("num_tokens", width), dtype="int32", pad=0),
            },
            compilation={"cudagraph_capture_sizes": [1, 2, 4, 8, *range(16, most + 1, 16)], "verify": verify},
            scheduler={"max_num_seqs": most},
            device="cuda",
            state=[self.model],
            before_key=before_key,
        )

    def prepare_decode(self, seqs):
        """The batch in host memory, from where cgplan fills the static buffers."""
        set_context(False)
        lengths = np.array([len(seq) for seq in seqs])
        last_blocks = np.array([seq.block_table[-1] for seq in seqs])
        tables = np.zeros((len(seqs), self.width), np.int32)
        blocks = itertools.zip_longest(*(seq.block_table for seq in seqs), fillvalue=0)
        for column, held in zip(tables.T, blocks, strict=False):
            column[:] = held
        batch = {
            "input_ids": np.array([seq.last_token for seq in seqs]),
            "positions": lengths - 1,
            "slot_mapping": (last_blocks * self.block_size + (lengths - 1) % self.block_size).astype(np.int32),
            "context_lens": lengths.astype(np.int32),
            "block_tables": tables,
        }
        return {name: torch.from_numpy(array) for name, array in batch.items()}, None

    @torch.inference_mode()
    def run_graph(self, batch, positions, is_prefill):
        if is_prefill:
            return run_model(self, batch, positions, is_prefill)
        hidden = self.graphs(**batch)
        set_context(False)
        return self.model.compute_logits(hidden)

    runner_class.capture_cudagraph, runner_class.run_model = capture_cudagraph, run_graph
    runner_class.prepare_decode = prepare_decode


def plain_attention():
    """A module in place of flash_attn: paged attention through PyTorch, by operators that give the same numbers on each
    call, which attention kernels do not promise.
    """

    def attend(q, k, v, mask, scale):
        """By key head: the rows of all heads of q that it answers, on its keys and values."""
        scores = (q @ k.transpose(-1, -2)).float() * scale
        return scores.masked_fill(~mask, -1e30).softmax(-1).to(v.dtype) @ v

    def decode(q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, causal):  # noqa: ARG001
        blocks = block_table.clamp(min=0).long()
        k, v = (cache[blocks].flatten(1, 2).transpose(1, 2) for cache in (k_cache, v_cache))
        seen = torch.arange(k.shape[2], device=q.device) < cache_seqlens[:, None]
        out = attend(q[:, 0].unflatten(1, (k.shape[1], -1)), k, v, seen[:, None, None], softmax_scale)
        return out.flatten(1, 2)[:, None]

    def prefill(q, k, v, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, block_table, **_):
        out, starts, others = torch.empty_like(q), cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        heads, each = k.shape[-2], q.shape[-2] // k.shape[-2]
        for i, (start, end) in enumerate(itertools.pairwise(starts)):
            length = others[i + 1] - others[i]
            own = slice(others[i], others[i + 1])
            pages = None if block_table is None else block_table[i].clamp(min=0).long()
            keys, values = (t[own] if pages is None else t[pages].flatten(0, 1)[:length] for t in (k, v))
            mask = torch.ones(end - start, length, dtype=torch.bool, device=q.device).tril(length - end + start)
            rows = q[start:end].unflatten(1, (heads, each)).permute(1, 2, 0, 3).flatten(1, 2)
            found = attend(rows, keys.transpose(0, 1), values.transpose(0, 1), mask.repeat(each, 1), softmax_scale)
            out[start:end] = found.unflatten(1, (each, -1)).permute(2, 0, 1, 3).flatten(1, 2)
        return out

    return types.SimpleNamespace(flash_attn_with_kvcache=decode, flash_attn_varlen_func=prefill, __spec__=None)


def random_weights(model, path):  # noqa: ARG001
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(std=0.05)
        if "norm" in name:
            parameter.data.add_(1)


def reload(model, watch):
    """Print what a watch sees of the graphs, and of a reload that puts new tensors in place of the weights."""
    report = watch.baseline()
    print(report)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    gc.collect()
    print(watch.changed())


def serve(runner_class, config_class, scheduler_class, sequence_class, sampling, options, folder):
    """Serve all requests: tokens by request, seconds of the captures, and lists of microseconds: of decode steps, and
    of the host in preparing and calling them.
    """
    config = config_class(
        folder, max_num_seqs=options.seqs, max_model_len=512, max_num_batched_tokens=8192, gpu_memory_utilization=0.3
    )
    seconds, steps, host = [], [], []

    def timed(name, into):
        function = getattr(runner_class, name)

        def call(self, *args):
            start = time.perf_counter()
            result = function(self, *args)
            if name == "capture_cudagraph":
                torch.cuda.synchronize()
            into.append(time.perf_counter() - start)
            return result

        setattr(runner_class, name, call)
        return lambda: setattr(runner_class, name, function)

    watch = cgplan.watch() if options.watch else None
    prepared, called = [], []
    undo = [timed("capture_cudagraph", seconds), timed("prepare_decode", prepared), timed("run_model", called)]
    runner = runner_class(config, 0, [])
    runner.sampler = lambda logits, temperatures: logits.argmax(-1)  # noqa: ARG005
    scheduler, choose = scheduler_class(config), random.Random(0)
    requests = []
    for _ in range(options.requests):
        prompt = [choose.randrange(1, 50_000) for _ in range(choose.randrange(16, 256))]
        requests.append(sequence_class(prompt, sampling(max_tokens=choose.randrange(16, 200), ignore_eos=True)))
        scheduler.add(requests[-1])
    while not scheduler.is_finished():
        seqs, is_prefill = scheduler.schedule()
        calls = len(called)
        start = time.perf_counter()
        tokens = runner.call("run", seqs, is_prefill)
        if not is_prefill:
            steps.append((time.perf_counter() - start) * 1e6)
            host.append((prepared[-1] + called[calls]) * 1e6)
        scheduler.postprocess(seqs, tokens, is_prefill)
    for each in undo:
        each()
    if watch is not None:
        reload(runner.model, watch)
        watch.close()
    runner.exit()
    del runner
    gc.collect()  # its KV cache
    torch.cuda.empty_cache()
    return [request.completion_token_ids for request in requests], seconds[0], steps, host


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", help="folder that holds nanovllm/")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seqs", type=int, default=64, help="max_num_seqs")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--watch", action="store_true", help="check the graphs' pointers after each run and a reload")
    parser.add_argument("--verify", choices=["first", "off"], default="first", help="compare first replays, or none")
    options = parser.parse_args()
    if not Path(options.checkout, "nanovllm").is_dir():
        parser.error(f"{options.checkout} is not a checkout of nano-vllm")
    if not torch.cuda.is_available():
        parser.error("nano-vllm needs a CUDA device")
    sys.path.insert(0, options.checkout)
    try:
        import flash_attn  # noqa: F401
    except ImportError:
        sys.modules["flash_attn"] = plain_attention()
    from nanovllm.config import Config
    from nanovllm.engine import model_runner
    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.engine.sequence import Sequence
    from nanovllm.sampling_params import SamplingParams
    from transformers import Qwen3Config

    model_runner.load_model = random_weights
    parts = (model_runner.ModelRunner, Config, Scheduler, Sequence, SamplingParams)
    with tempfile.TemporaryDirectory() as folder:
        Qwen3Config(
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=options.layers,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            dtype="bfloat16",
            tie_word_embeddings=True,
        ).save_pretrained(folder)
        runner_class = model_runner.ModelRunner
        replaced = {name: getattr(runner_class, name) for name in ("capture_cudagraph", "run_model", "prepare_decode")}
        own, ours = [], []
        for _ in range(3):  # the first of each fills torch's caches on disk
            own.append(serve(*parts, options, folder))
            torch._dynamo.reset()
            use_cgplan(runner_class, model_runner.set_context, options.verify)
            ours.append(serve(*parts, options, folder))
            torch._dynamo.reset()
            for name, function in replaced.items():
                setattr(runner_class, name, function)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    tokens = own[2][0]
    for name, other in (("its own, once more", own[1][0]), ("cgplan", ours[2][0])):
        equal = sum(a == b for a, b in zip(tokens, other, strict=True))
        print(f"requests with the tokens of its own graphs: {name} {equal} of {len(tokens)}")
    print(f"{'':24}{'its own':>14}{'cgplan':>14}{'ratio':>8}")
    for name, index, figure in (
        ("capture, s", 1, lambda seconds: seconds),
        ("all decode steps, s", 2, lambda steps: sum(steps) / 1e6),
        ("decode step, us", 2, statistics.median),
        ("host of prepare and call", 3, statistics.median),
    ):
        a, b = ([figure(run[index]) for run in runs[1:]] for runs in (own, ours))
        digits = 0 if min(a) > 100 else 2
        shown = [", ".join(f"{value:.{digits}f}" for value in values) for values in (a, b)]
        print(f"{name:24}{shown[0]:>14}{shown[1]:>14}{sum(b) / sum(a):8.2f}")


if __name__ == "__main__":
    main()
