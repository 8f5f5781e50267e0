"""cudagraph_mode AUTO: seconds until a model is ready, against the way that it chooses alone.

    python docs/measure/auto.py qwen3_decode mixtral_decode timm_resnet50d

Each model of zoo.yaml (real size, 1, 4 and 8 rows) is made ready in processes of their own: by AUTO with empty caches
of inductor, by AUTO again with the caches that this left, and by the chosen settings with empty caches.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = [1, 4, 8]


def ready(name, settings):
    """In this process: seconds, the chosen settings and the notes."""
    sys.path.insert(0, str(Path(__file__).parent))
    import torch
    import zoo

    import cgplan

    model = zoo.read_models()[name]
    torch.manual_seed(0)
    dtype = zoo.at(model.dtype, "real")
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device("cuda"):
        module = model.build("real", dtype)
    torch.set_default_dtype(torch.float32)
    module = module.eval().requires_grad_(False)
    inputs = {key: model.input(text, "real") for key, text in model.inputs.items()}
    torch.cuda.synchronize()
    start = time.perf_counter()
    runner = cgplan.capture(
        module,
        inputs,
        compilation={"cudagraph_capture_sizes": SIZES, **settings},
        scheduler={"max_num_seqs": SIZES[-1], "max_num_batched_tokens": SIZES[-1]},
        device="cuda",
    )
    seconds = time.perf_counter() - start
    chosen = runner.config.compilation
    keep = {"cudagraph_mode": chosen.cudagraph_mode.name, "compiler": chosen.compiler}
    keep["splitting_modules"] = list(chosen.splitting_modules)
    print(json.dumps({"seconds": seconds, "settings": keep, "notes": list(runner.plan.notes)}))


def child(name, settings, cache):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, __file__, name, "--settings", json.dumps(settings)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="+")
    parser.add_argument("--settings")
    options = parser.parse_args()
    if options.settings:
        ready(options.models[0], json.loads(options.settings))
        return
    for name in options.models:
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            first = child(name, {"cudagraph_mode": "AUTO"}, one)
            second = child(name, {"cudagraph_mode": "AUTO"}, one)
            print(f"{name}: {first['seconds']:.1f} {second['seconds']:.1f}", flush=True)
            alone = child(name, first["settings"], other)
        print(f"{name}: {first['settings']}")
        print(
            f"  AUTO {first['seconds']:.1f} s, again {second['seconds']:.1f} s, the chosen way alone "
            f"{alone['seconds']:.1f} s: {first['seconds'] / alone['seconds']:.2f} times",
            flush=True,
        )
        for note in first["notes"]:
            print(f"    {note}")


if __name__ == "__main__":
    main()
