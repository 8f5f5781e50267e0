"""What a PIECEWISE step costs the host beyond its eager pieces, and the device, beside FULL and eager.

    python docs/measure/piecewise.py configs/decoder_0_6b.yaml [--set KEY=VALUE ...]

Host time is that of a call on an idle device until it returned; the eager pieces are timed inside of it by themselves.
"By hand" is a loop that launches the same graphs and calls the same pieces on the same tensors, and does nothing else:
no cgplan, no traced code. Device time is time per call when calls are queued one after another.
"""

import argparse
import statistics
import time

import torch

from cgplan.backends import select_backend
from cgplan.backends.context import forward_context
from cgplan.buffers.static import example_batch
from cgplan.config import read_config
from cgplan.models.loading import load_model
from cgplan.modes import CUDAGraphMode
from cgplan.piecewise.breakable import EagerPiece
from cgplan.planning import build_plan
from cgplan.runner.session import CaptureSession

REPEATS = 50
spent = [0, 0]  # nanoseconds inside eager pieces, and their number
calls = []  # the eager pieces of the last step, with their arguments


def timed(function):
    def call(*args, **kwargs):
        start = time.perf_counter_ns()
        result = function(*args, **kwargs)
        spent[0] += time.perf_counter_ns() - start
        spent[1] += 1
        calls.append((call, args, kwargs))
        return result

    return call


def watch_eager_pieces():
    """Time each eager piece."""
    first_run = EagerPiece.first_run

    def watched_run(self, args, kwargs):
        self.function = timed(self.function)
        return first_run(self, args, kwargs)

    EagerPiece.first_run = watched_run


def host(backend, call):
    """Medians over calls on an idle device: microseconds of a call, and of its eager pieces; number of pieces."""
    whole, inside = [], []
    for _ in range(REPEATS):
        backend.synchronize()
        spent[:] = 0, 0
        calls.clear()
        start = time.perf_counter_ns()
        call()
        whole.append((time.perf_counter_ns() - start) / 1e3)
        inside.append(spent[0] / 1e3)
    return statistics.median(whole), statistics.median(inside), spent[1]


def by_hand(runner, route):
    """The loop that one would write: the graphs of a key and the pieces of the last step, in turns."""
    captures = [w.entries[route.descriptor].graph for w in dict.fromkeys(runner.graphs.scope.wrappers)]
    graphs = [g for c in captures for g in getattr(c, "graphs", (c,))]
    pieces = [*calls, None]
    views = runner.graphs.views(route.descriptor)
    metadata = {name: views[name] for name in runner.config.metadata}
    replay = runner.backend.replay

    def step():
        with forward_context(route.mode, route.descriptor, metadata, scope=runner.graphs.scope):
            for graph, piece in zip(graphs, pieces, strict=True):
                replay(graph)
                if piece is not None:
                    piece[0](*piece[1], **piece[2])

    return step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 64, 256])
    options = parser.parse_args()
    loaded = read_config(options.config, options.set)
    config = loaded.config
    backend = select_backend(config.device)
    model = load_model(config.model.target, config.model.kwargs, device=backend.device, base_dir=loaded.base_dir)
    watch_eager_pieces()
    start = time.perf_counter()
    runner = CaptureSession(build_plan(config), model, backend, config).run()
    report = runner.report
    seconds = time.perf_counter() - start
    one = report.records[0]
    print(f"{report.environment.device}, torch {report.environment.torch}: {options.config} {' '.join(options.set)}")
    print(
        f"{len(report.records)} keys, {one.graphs} segments and {one.nodes} nodes each; session {seconds:.2f} s, "
        f"captures {report.capture_seconds:.2f} s, warm-ups {report.warmup_seconds:.2f} s, "
        f"{report.total_bytes / 2**20:.0f} MiB"
    )
    print("tokens  mode        host us  in pieces  each segment beyond  by hand  device us  eager host us  device us")
    for size in options.sizes:
        inputs = example_batch({**config.inputs, **config.metadata}, size, size, backend.device)
        call, eager = (lambda i=inputs: runner(**i)), (lambda i=inputs: runner.run_eagerly(padded=False, **i))
        call(), call(), eager()
        route = runner.route(inputs)
        whole, inside, pieces = host(backend, call)
        queued = statistics.median(backend.time_calls(call, REPEATS, queued=True)[0])
        eager_host = host(backend, eager)[0]
        eager_device = statistics.median(backend.time_calls(eager, REPEATS, queued=True)[0])
        each = (whole - inside) / (pieces + 1)
        calls.clear()
        call()
        bare = host(backend, by_hand(runner, route)) if route.mode is CUDAGraphMode.PIECEWISE else (0, 0, 0)
        floor = (bare[0] - bare[1]) / (bare[2] + 1)
        print(
            f"{size:6}  {route.mode!s:10}{whole:9.0f}{inside:11.0f}{each:21.2f}{floor:9.2f}{queued:11.0f}"
            f"{eager_host:15.0f}{eager_device:11.0f}"
        )


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
