"""transformers Qwen3-0.6B and ViT-B/16, random weights, at batch 1, 16 and 32: cgplan beside its baselines.

    python docs/measure/baselines.py [qwen3] [vit] [--repeats 30] [--seed 0] [--output FOLDER]

Each model is one `cgplan bench --against ...` in a process of its own; docs/benchmarks.md says what the columns mean.
All capture the same three sizes. Most of the time goes into reduce-overhead, which compiles each size.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "configs"
MODELS = {"qwen3": "transformers_qwen3_0_6b.yaml", "vit": "vit_b16.yaml"}
BASELINES = "eager,bare,make_graphed_callables,reduce-overhead"
SIZES = "[1, 16, 32]"


def command(model, options):
    settings = {
        "compilation.cudagraph_capture_sizes": SIZES,
        "scheduler.max_num_seqs": 32,
        "scheduler.max_num_batched_tokens": 32,
        "report.sizes": SIZES,
        "report.repeats": options.repeats,
    }
    made = [sys.executable, "-m", "cgplan", "bench", "--config", str(CONFIGS / MODELS[model]), "--against", BASELINES]
    for key, value in settings.items():
        made += ["--set", f"{key}={value}"]
    if options.output is not None:
        made += ["--output", str(options.output / f"baselines_{model}.json")]
    return [*made, "--seed", str(options.seed)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", metavar="MODEL", help="qwen3, vit; all if absent")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    for model in options.models or MODELS:
        start = time.perf_counter()
        print(f"== {model}", flush=True)
        done = subprocess.run(command(model, options), check=False)
        print(f"{model}: {time.perf_counter() - start:.0f} s, exit code {done.returncode}\n", flush=True)


if __name__ == "__main__":
    main()
