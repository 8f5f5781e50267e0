"""Whether a replay equals eager bit for bit: on the unpadded batch where there is no padding, on the padded one where
there is.

python docs/measure/equal_to_eager.py configs/transformers_qwen3_0_6b.yaml 1 3 30 32
"""

import sys

import torch

from cgplan.backends import select_backend
from cgplan.buffers.static import example_batch
from cgplan.config import read_config
from cgplan.models.loading import load_model
from cgplan.planning import build_plan
from cgplan.runner.session import CaptureSession

SEEDS = 10


def main(path, *sizes):
    loaded = read_config(path)
    config, backend = loaded.config, select_backend(loaded.config.device)
    model = load_model(config.model.target, config.model.kwargs, device=backend.device, base_dir=loaded.base_dir)
    runner = CaptureSession(build_plan(config), model, backend, config).run()
    for size in map(int, sizes):
        equal, finite, largest = 0, True, 0.0
        for seed in range(SEEDS):
            batch = example_batch({**config.inputs, **config.metadata}, size, size, backend.device, seed)
            replayed = runner(**batch).clone()
            padded = runner.route(batch).descriptor.num_tokens
            eager = runner.run_eagerly(padded=padded != size, **batch)
            equal += torch.equal(replayed, eager)
            finite &= bool(replayed.isfinite().all())
            largest = max(largest, (replayed - eager).abs().max().item())
        what = "eager" if padded == size else f"eager padded to {padded}"
        print(f"{path} size {size}: equal to {what} {equal} of {SEEDS} times, largest difference {largest}", end="")
        print("" if finite else ", NOT FINITE")


if __name__ == "__main__":
    main(*sys.argv[1:])
