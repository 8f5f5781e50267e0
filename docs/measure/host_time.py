"""Host time of a call beyond that of a bare replay, beside loops written by hand.

    python docs/measure/host_time.py [--device cuda] [--tokens 13] [--rounds 20] [--calls 200] [--parts]

A decode step's five inputs: token ids, positions, slots, sequence lengths and request offsets, of two dtypes, with
padding behind them; the model is one small kernel, so the graph's own replay is as cheap as can be. All ways run in
the same process, in turns, in an order that changes from round to round. "Idle" is the median of calls that are each
made on an idle device; "in a row" is that of calls made right after one another, as a server's host runs ahead.
"Over bare" is what is left without the replay. "All read" asks for each tensor of the block and for the output, as a
caller does who writes them one by one; the blocks above it ask for none. ``--parts`` times the pieces of a call.
"""

import argparse
import operator
import random
import statistics
import time

import torch

import cgplan
from cgplan.modes import CUDAGraphMode

SIZES = (16, 64, 512)
DTYPES = {"ids": "int64", "positions": "int64", "slots": "int64", "lengths": "int32", "starts": "int32"}
SHAPES = {"lengths": ("num_reqs",), "starts": ("num_reqs + 1",)}
PADS = {"slots": -1, "starts": "last"}


def specs(**changes):
    return {
        name: cgplan.Input(shape=SHAPES.get(name, ("num_tokens",)), dtype=dtype, pad={**PADS, **changes}.get(name, 0))
        for name, dtype in DTYPES.items()
    }


def model(**inputs):
    return inputs["ids"] + inputs["positions"]


def open_runner(device, **changes):
    return cgplan.capture(
        model,
        specs(**changes),
        compilation={"cudagraph_capture_sizes": list(SIZES), "max_cudagraph_capture_size": max(SIZES)},
        scheduler={"max_num_seqs": max(SIZES)},
        device=device,
    )


def batch(tokens, device):
    made = {name: torch.arange(tokens + (name == "starts"), dtype=getattr(torch, d)) for name, d in DTYPES.items()}
    return {name: tensor.to(device) for name, tensor in made.items()}


def by_hand(runner, inputs, kind):
    """What engines write: copies into slices of static tensors, and a replay."""
    tokens = len(inputs["ids"])
    padded = min(size for size in SIZES if size >= tokens)
    static = {name: torch.zeros_like(value).new_zeros(max(SIZES) + 1) for name, value in batch(1, "cpu").items()}
    static = {name: value.to(runner.backend.device) for name, value in static.items()}
    graph = graph_of(runner, padded)
    replay = runner.backend.replay_of(graph)
    names = list(inputs)
    if kind == "slices":

        def step():
            for name in names:
                value = inputs[name]
                static[name][: value.shape[0]].copy_(value, non_blocking=True)
            replay()

    elif kind == "views":
        pairs = [(static[name][: value.shape[0]], value) for name, value in inputs.items()]

        def step():
            for view, value in pairs:
                view.copy_(value, non_blocking=True)
            replay()

    else:
        views, values = [static[n][: v.shape[0]] for n, v in inputs.items()], list(inputs.values())

        def step():
            torch._foreach_copy_(views, values)
            replay()

    return step


def graph_of(runner, size):
    (key,) = [d for mode, d in runner.plan.keys if d.num_tokens == size and mode is CUDAGraphMode.FULL]
    return runner.graph(CUDAGraphMode.FULL, key)


def staged(runner, tokens):
    def step():
        with runner.stage(num_tokens=tokens):
            pass

    return step


def staged_and_used(runner, tokens):
    names = list(DTYPES)

    def step():
        with runner.stage(num_tokens=tokens) as buffers:
            for name in names:
                buffers[name]
        return buffers.output

    return step


def ways(device, tokens):
    """(name, target over bare in microseconds or None, call, bare replay that it is compared with)."""
    runner, plain, asked = open_runner(device), open_runner(device, starts=0), open_runner(device, starts=0)
    backend = runner.backend
    on_device, on_host, large = batch(tokens, backend.device), batch(tokens, "cpu"), batch(500, "cpu")
    padded = min(size for size in SIZES if size >= tokens)
    pinned = {n: v.pin_memory() for n, v in on_host.items()} if backend.device.type == "cuda" else on_host
    large_device = {n: v.to(backend.device) for n, v in large.items()}
    bare = backend.replay_of(graph_of(runner, padded))
    for inputs in (on_device, on_host):  # the very numbers
        found = runner(**inputs)
        if found.tolist() != (on_host["ids"] + on_host["positions"]).tolist():
            raise SystemExit("wrong numbers")
    small = f"{tokens} rows"
    return backend, type(runner._copiers[()]).__name__, [
        ("bare replay", None, bare),
        (f"stage(), {padded} rows", 1.0, staged(runner, padded)),
        (f"stage(), {small}", 1.0, staged(plain, tokens)),
        (f"stage(), {small}, all read", None, staged_and_used(asked, tokens)),
        (f"stage(), {small}, one pad: last", None, staged(runner, tokens)),
        (f"five host inputs, {small}", 8.0, lambda: runner(**on_host)),
        ("five host inputs, 500 rows", None, lambda: runner(**large)),
        (f"five device inputs, {small}", 6.0, lambda: runner(**on_device)),
        ("five device inputs, 500 rows", None, lambda: runner(**large_device)),
        ("by hand: slices, device", None, by_hand(runner, on_device, "slices")),
        ("by hand: views, device", None, by_hand(runner, on_device, "views")),
        ("by hand: _foreach_copy_", None, by_hand(runner, on_device, "foreach")),
        ("by hand: slices, pinned host", None, by_hand(runner, pinned, "slices")),
    ]  # fmt: skip


def idle(backend, call, calls):
    times = []
    for _ in range(calls):
        backend.synchronize()
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times


def in_a_row(backend, call, calls):
    """Few enough that the device's queue does not fill up and make the host wait."""
    backend.synchronize()
    times = []
    for _ in range(calls):
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    backend.synchronize()
    return times


def key_of(values, shape=operator.attrgetter("shape"), dtype=operator.attrgetter("dtype")):
    return {(*map(shape, values), *map(dtype, values), *map(torch.Tensor.get_device, values)): None}


def parts(device, tokens):
    """Microseconds of the pieces of a call, each in a loop of its own."""
    runner = open_runner(device)
    backend, on_device, on_host = runner.backend, batch(tokens, runner.backend.device), batch(tokens, "cpu")
    for inputs in (on_device, on_host) * 2:
        runner(**inputs)
    stream, launch = backend.stream_getter(), runner._launcher.launch

    def empty(**inputs):
        return inputs

    pieces = {"a function that takes them": lambda: empty(**on_device), "the current stream": stream}
    for name, inputs, call in zip(("device", "host"), (on_device, on_host), runner._calls.values(), strict=False):
        values = tuple(inputs.values())
        pieces[f"the key, {name}"] = lambda values=values: key_of(values)
        pieces[f"like the call before, {name}"] = lambda call=call, values=values: call.is_alike(*values)
        pieces[f"copies, {name}"] = lambda call=call, values=values: call.copy_in(values, 0, True)
        pieces[f"copies, layout not known, {name}"] = lambda call=call, values=values: call.copy_in(values, 0, False)
        pieces[f"copies and replay, {name}"] = lambda call=call, values=values: launch(call, values, True)
        pieces[f"the output, {name}"] = call.output
    runner.stats.time_every = 1
    pieces["a call, each one timed"] = lambda: runner(**on_device)
    for name, call in pieces.items():
        times = [t for _ in range(10) for t in _loop(backend, call)]
        print(f"  {name:<34}{statistics.median(times):8.2f}")


def _loop(backend, call):
    backend.synchronize()
    start = time.perf_counter_ns()
    for _ in range(100):
        call()
    spent = (time.perf_counter_ns() - start) / 1e5
    backend.synchronize()
    return [spent]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=13)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--parts", action="store_true")
    options = parser.parse_args()
    backend, copier, rows = ways(options.device, options.tokens)
    measured = {name: ([], []) for name, _, _ in rows}
    for _, _, call in rows:
        in_a_row(backend, call, 50)
    for _ in range(options.rounds):
        for name, _, call in random.sample(rows, len(rows)):
            measured[name][0].extend(idle(backend, call, options.calls))
            measured[name][1].extend(in_a_row(backend, call, options.calls))
    medians = {name: tuple(map(statistics.median, times)) for name, times in measured.items()}
    bare = medians["bare replay"]
    device = torch.cuda.get_device_name() if backend.device.type == "cuda" else backend.name
    print(f"{device}, torch {torch.__version__}: host microseconds, medians of {options.rounds * options.calls} calls;")
    print(f"copies by {copier}")
    print(f"{'':<34}{'idle':>8}{'over bare':>11}{'in a row':>10}{'over bare':>11}{'target':>8}")
    for name, target, _ in rows:
        once, row = medians[name]
        aim = "" if target is None else f"{target:.1f}"
        print(f"{name:<34}{once:8.2f}{once - bare[0]:11.2f}{row:10.2f}{row - bare[1]:11.2f}{aim:>8}")
    if options.parts:
        print("pieces of a call, in a row:")
        parts(options.device, options.tokens)


if __name__ == "__main__":
    with torch.no_grad():
        main()
