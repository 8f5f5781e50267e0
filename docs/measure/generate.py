"""Tokens a second of transformers' ``generate``, by eager code, transformers' own compilation, and graphed_generate.

    python docs/measure/generate.py [--layers 28] [--tokens 128] [--rows 1,8]

Qwen3-0.6B's shape with random weights in bfloat16, greedy, prompts of 64 tokens. "eager" has transformers' dynamic
cache; "static, compiled" is ``cache_implementation="static"``, which compiles the forward by reduce-overhead on a GPU.
The first calls of each, which capture and compile, are its ready time. Tokens are compared with eager code's.
"""

import argparse
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import cgplan

WARM_UPS, ROUNDS = 4, 3


def decoder(layers, device):
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.device(device):
        return Qwen3ForCausalLM(config).to(torch.bfloat16).eval()


def timed(lm, prompt, options):
    synchronize = torch.cuda.synchronize if prompt.is_cuda else bool
    synchronize()
    start = time.perf_counter()
    output = lm.generate(prompt, **options)
    synchronize()
    return output, time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", default="1,8")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print("| rows | way | first calls, s | tokens a second of a row | equal to eager |")
    print("| --- | --- | --- | --- | --- |")
    for rows in map(int, options.rows.split(",")):
        prompt = torch.randint(2, 150_000, (rows, 64), device=device)
        wanted = None
        for way in ("eager", "graphed_generate", "static, compiled"):
            lm = decoder(options.layers, device)
            given = {"max_new_tokens": options.tokens, "do_sample": False}
            if way == "graphed_generate":
                cgplan.graphed_generate(lm, max_cache_len=64 + options.tokens)
            elif way == "static, compiled":
                given["cache_implementation"] = "static"
            first = sum(timed(lm, prompt, given)[1] for _ in range(WARM_UPS))
            runs = [timed(lm, prompt, given) for _ in range(ROUNDS)]
            output, seconds = min(runs, key=lambda run: run[1])
            wanted = output if wanted is None else wanted
            equal = (output == wanted).float().mean().item()
            speed = options.tokens / seconds
            print(f"| {rows} | {way} | {first:.1f} | {speed:.1f} | {equal:.0%} |", flush=True)
            del lm
            torch._dynamo.reset()


if __name__ == "__main__":
    with torch.no_grad():
        main()
