"""What Python costs of a PIECEWISE step: the reference decoder of 28 layers on the CPU, with launches and eager pieces
that do nothing, and without the check of addresses. Copies of what eager pieces return are made.

    python docs/measure/piecewise_python.py ops|modules [--results] [--profile]

With --results each eager piece returns a tensor that has to be copied, by operators too: layers of a norm, a linear map
and a softmax. Least of 7 rounds of 300 calls.
"""

import argparse
import cProfile
import pstats
import time

import torch

from cgplan.backends.tape import TapeBackend
from cgplan.buffers.static import example_batch
from cgplan.config import read_config, validate_config
from cgplan.models.loading import load_model
from cgplan.piecewise.breakable import EagerPiece
from cgplan.planning import build_plan
from cgplan.runner.session import CaptureSession

LAYERS, ROUNDS, CALLS, ROWS = 28, 7, 300, 4
MODES = [
    "compilation.cudagraph_mode=PIECEWISE",
    "compilation.address_check=off",
    f"compilation.cudagraph_capture_sizes=[{ROWS}]",
]
idle = False  # whether launches and pieces do nothing


class IdleBackend(TapeBackend):
    """A tape whose replays can be turned off."""

    def replay_of(self, graph):
        """``replay``, or nothing."""
        replay = super().replay_of(graph)

        def launch():
            if not idle:
                replay()

        return launch


def idling(function):
    """The function, or what it returned last."""
    last = None

    def call(*args, **kwargs):
        nonlocal last
        if not idle:
            last = function(*args, **kwargs)
        return last

    return call


def turn_off_pieces():
    """Let the eager pieces idle."""
    first_run = EagerPiece.first_run

    def run(self, args, kwargs):
        self.function = idling(self.function)
        return first_run(self, args, kwargs)

    EagerPiece.first_run = run


class Layers(torch.nn.Module):
    """Layers whose softmax is the eager piece."""

    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(8) for _ in range(LAYERS))
        self.maps = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(LAYERS))
        self.pieces = torch.nn.ModuleList(torch.nn.Softmax(-1) for _ in range(LAYERS))

    def forward(self, x):
        for norm, linear, piece in zip(self.norms, self.maps, self.pieces, strict=True):
            x = x + piece(linear(norm(x)))
        return x


def layers(route):
    """Configuration and model of the layers."""
    split = {"splitting_ops": ["aten::softmax"]} if route == "ops" else {"splitting_modules": ["pieces.*"]}
    compilation = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [ROWS], "address_check": "off", **split}
    inputs = {"x": {"shape": ["num_tokens", 8], "dtype": "float32", "pad": 0}}
    return validate_config({"inputs": inputs, "compilation": compilation, "device": "cpu"}), Layers().eval()


def decoder(route, backend):
    """Configuration and model of the decoder."""
    split = ["compilation.splitting_modules=[layers.*.self_attn]"] if route == "modules" else []
    loaded = read_config("configs/decoder_cpu.yaml", [f"model.kwargs.num_layers={LAYERS}", *MODES, *split])
    target = loaded.config.model
    model = load_model(target.target, target.kwargs, device=backend.device, base_dir=loaded.base_dir)
    return loaded.config, model


def main():
    global idle
    parser = argparse.ArgumentParser()
    parser.add_argument("route", choices=["ops", "modules"])
    parser.add_argument("--results", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    turn_off_pieces()
    backend = IdleBackend()
    config, model = layers(options.route) if options.results else decoder(options.route, backend)
    runner = CaptureSession(build_plan(config), model, backend, config).run()
    inputs = example_batch({**config.inputs, **config.metadata}, ROWS, ROWS, backend.device)
    for _ in range(5):
        runner(**inputs)
    idle, rounds = True, []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            runner(**inputs)
        rounds.append((time.perf_counter_ns() - start) / CALLS / 1e3)
    best, segments = min(rounds[1:]), runner.report.records[0].graphs
    print(f"by {options.route}, {segments} segments: {best:.1f} us a step, {best / segments:.2f} us a segment")
    if options.profile:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(CALLS):
            runner(**inputs)
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
