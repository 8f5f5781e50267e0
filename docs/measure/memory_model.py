"""What graphs are predicted to cost, calibrated and estimated, against what they cost; and whether a budget holds.

    python docs/measure/memory_model.py configs/decoder_0_6b.yaml compilation.cudagraph_mode=FULL_AND_PIECEWISE
    python docs/measure/memory_model.py configs/vision.yaml --cold        the session alone, in a fresh process
    python docs/measure/memory_model.py --allocator                       the model of the allocator against torch's own

Words with `=` override the configuration, as `--set` does. Kernels are loaded first, by eager calls. "On the device" is
free memory lost from before the calibration until after the session; the parts are as in the capture report.
--set-for-estimate KEY=VALUE changes the configuration of the estimate alone, --no-estimate leaves the estimate out.
--estimate-only does nothing else, and needs no GPU.
"""

import argparse
import gc
import random
import time

import torch

from cgplan.backends import select_backend
from cgplan.backends.context import forward_context
from cgplan.buffers.static import example_batch
from cgplan.config import read_config
from cgplan.measure.costs import calibrate, estimate
from cgplan.models.loading import load_model
from cgplan.planning import build_plan
from cgplan.pricing import Allocation, CachingPool, representative_keys
from cgplan.runner.session import CaptureSession

MIB = 1 << 20


def mib(nbytes):
    return f"{nbytes / MIB:8.1f}"


def taken(device):
    """Bytes of the device that are in use, caches given back."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def load(path, overrides, device):
    loaded = read_config(path, overrides)
    config = loaded.config
    model = load_model(config.model.target, config.model.kwargs, device=device, base_dir=loaded.base_dir)
    return config, model


def run_eagerly(config, model, plan, device):
    """Load kernels: eager forwards of the representative sizes, on the default stream."""
    specs = {**config.inputs, **config.metadata}
    for _, descriptor in representative_keys(plan.keys, plan.max_num_seqs):
        reqs = descriptor.num_reqs or min(descriptor.num_tokens, plan.max_num_seqs)
        batch = example_batch(specs, descriptor.num_tokens, reqs, device)
        with torch.no_grad(), forward_context(metadata={name: batch[name] for name in config.metadata}) as context:
            context.descriptor = descriptor
            model(**{name: batch[name] for name in config.inputs})


def parts_of(cost):
    return {
        "static": cost.static_bytes,
        "workspace": cost.workspace_bytes,
        "pool": sum(k.pool_bytes for k in cost.keys),
        "driver": sum(k.driver_bytes for k in cost.keys),
    }


def measured_parts(report):
    return {
        "static": report.static_bytes,
        "workspace": report.workspace_bytes,
        "pool": report.pool_bytes,
        "driver": report.graph_driver_bytes,
    }


def table(plan, report, truth, workspace, predictions):
    """One row a part; the workspaces, which the calibration has brought already, count as measured there."""
    measured = measured_parts(report)
    measured["workspace"] = max(measured["workspace"], workspace)
    columns = {name: parts_of(costs.of(plan.keys)) for name, costs in predictions.items()}
    print(f"{'MiB':<12}{'measured':>10}" + "".join(f"{name:>12}" for name in columns))
    for part in measured:
        print(f"{part:<12}{mib(measured[part]):>10}" + "".join(f"{mib(c[part]):>12}" for c in columns.values()))
    total, sums = sum(measured.values()), {name: sum(c.values()) for name, c in columns.items()}
    print(f"{'total':<12}{mib(total):>10}" + "".join(f"{mib(s):>12}" for s in sums.values()))
    print(f"{'error':<12}{'':>10}" + "".join(f"{(s - total) / total:>+12.1%}" for s in sums.values()))
    print(f"{'on the device':<13}{mib(truth):>9}" + "".join(f"{(s - truth) / truth:>+12.1%}" for s in sums.values()))
    seconds = report.warmup_seconds + report.capture_seconds
    print(
        f"{'seconds':<12}{seconds:>10.2f}" + "".join(f"{c.of(plan.keys).seconds:>12.2f}" for c in predictions.values())
    )
    for name, s in sums.items():
        within = abs(s - total) <= max(0.05 * total, 4 * MIB)
        print(f"{name}: off by {(s - total) / MIB:+.1f} MiB, {'within' if within else 'NOT within'} 5% or 4 MiB")


def describe(report):
    records = report.records
    graphs, nodes = sum(r.graphs for r in records), [records[0].nodes, records[-1].nodes]
    growth = [round((r.driver_bytes or 0) / MIB, 1) for r in records]
    pool = [round(r.pool_growth / MIB, 1) for r in records if r.pool_growth]
    captures, session = mib(report.graph_driver_bytes), mib(report.driver_bytes or 0)
    print(f"session: {len(records)} keys, {graphs} graphs, {nodes[0]} nodes in the first key, {nodes[1]} in the last")
    print(f"  driver {captures} MiB while capturing, {session} in the session; by key {growth}")
    print(f"  pool growth by key {pool}")


def budget(name, config, plan, model, backend, limit):
    """Half of what the ladder needs: ends inside it, the report is right, batches have the right numbers."""
    before = taken(backend.device)
    half = config.model_copy(update={"budget": config.budget.model_copy(update={"memory": limit})})
    start = time.perf_counter()
    runner = CaptureSession(plan, model, backend, half).run()
    seconds, report, lost = time.perf_counter() - start, runner.report, taken(backend.device) - before
    same, batches = 0, [1, 3, plan.max_capture_size // 2, plan.max_capture_size]
    for size in batches:
        batch = example_batch({**config.inputs, **config.metadata}, size, min(size, plan.max_num_seqs), backend.device)
        uniform = plan.query_len == 1 and size <= plan.max_num_seqs
        replayed = runner(**batch, uniform_decode=uniform).clone()
        same += torch.equal(replayed, runner.run_eagerly(**batch, uniform_decode=uniform))
    inside = "inside" if report.graph_bytes <= limit else "NOT INSIDE"
    used = f"{report.graph_bytes / MIB:.1f} MiB used, {lost / MIB:.1f} on the device"
    lanes = {str(lane): list(sizes) for lane, sizes in runner.plan.lanes().items()}
    stops = [(stop.limit, str(stop.mode), stop.descriptor.num_tokens) for stop in report.budget.stops]
    print(f"budget {limit / MIB:.1f} MiB, {name}: {inside}: {used}; {seconds:.2f} s")
    print(f"  {len(report.records)} of {len(plan.keys)} keys: {lanes}")
    outcome = report.budget
    print(f"  left out {len(outcome.left_out)}, skipped {len(outcome.skipped)}, {len(stops)} stops: {stops[:4]}")
    print(f"  {same} of {len(batches)} batches equal eager; workspaces {mib(report.workspace_bytes)} MiB")
    runner.close()


def check_allocator(rounds=30, length=150):
    """Random histories inside a capture: the pool's segments against the model's."""
    backend, agree = select_backend("cuda"), 0
    for seed in range(rounds):
        rng, living, events, model = random.Random(seed), {}, [], CachingPool()
        for block in range(length):
            while living and rng.random() < 0.45:
                events.append(Allocation(living.pop(rng.choice(list(living))), None))
            nbytes = rng.choice([rng.randrange(1, 4096), rng.randrange(1, 2 * MIB), rng.randrange(1, 40 * MIB)])
            living[block] = block
            events.append(Allocation(block, nbytes))
        pool, token, held = backend.new_pool(), torch.zeros(1, device=backend.device), {}
        graph = backend.new_graph(pool)
        with backend.session(), backend.capturing(graph):
            for event in events:
                if event.nbytes is None:
                    del held[event.block]
                else:
                    held[event.block] = torch.empty(event.nbytes, dtype=torch.uint8, device=backend.device)
            token.add_(1)
        model.run(events)
        agree += model.reserved == backend.pool_bytes(pool)
        if model.reserved != backend.pool_bytes(pool):
            print(f"seed {seed}: model {model.reserved / MIB:.0f} MiB, torch {backend.pool_bytes(pool) / MIB:.0f} MiB")
        held.clear()
        backend.reset(graph)
        backend.release_cached()
    print(f"the model of the allocator agrees with torch {torch.__version__} in {agree} of {rounds} random histories")


def estimated(args):
    start, overrides = time.perf_counter(), [*args.overrides, "device=cpu", *args.set_for_estimate]
    config, model = load(args.config, overrides, torch.device("cpu"))
    loaded = time.perf_counter()
    costs = estimate(config, model, build_plan(config))
    print(f"estimated in {time.perf_counter() - loaded:.2f} s, the model was made in {loaded - start:.2f} s")
    print(f"  {costs.source}")
    return costs


def main(args):
    if args.allocator:
        check_allocator()
        return
    if args.estimate_only:
        costs = estimated(args)
        parts = parts_of(costs.of(build_plan(read_config(args.config, args.overrides).config).keys))
        print(f"{args.config} {' '.join(args.overrides)}: MiB", {name: round(b / MIB, 1) for name, b in parts.items()})
        return
    backend = select_backend("cuda")
    config, model = load(args.config, [*args.overrides, "device=cuda"], backend.device)
    plan = build_plan(config)
    run_eagerly(config, model, plan, backend.device)
    before, predictions, workspace = taken(backend.device), {}, 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {args.config} {' '.join(args.overrides)}")
    if not args.cold:
        start = time.perf_counter()
        costs = predictions["calibrated"] = calibrate(config, model, backend, plan)
        workspace = costs.workspace_bytes
        seconds, left = time.perf_counter() - start, taken(backend.device) - before
        print(f"calibrated in {seconds:.2f} s, {costs.once_seconds:.2f} s spent once;")
        print(f"  {mib(left)} MiB stay, of it workspaces {mib(workspace)}")
    runner = CaptureSession(plan, model, backend, config).run()
    truth, report = taken(backend.device) - before, runner.report
    describe(report)
    runner.close()
    if not args.cold and not args.no_estimate:
        predictions["estimated"] = estimated(args)
    table(plan, report, truth, workspace, predictions)
    if not args.cold:
        limit = report.graph_bytes // 2
        budget("nothing predicted", config, plan, model, backend, limit)
        predicted = costs.of(plan.keys)
        if report.workspace_bytes == 0:  # the calibration has brought them
            predicted = predicted.model_copy(update={"workspace_bytes": 0})
        budget("predicted", config, plan.model_copy(update={"predicted": predicted}), model, backend, limit)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--set-for-estimate", action="append", default=[])
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--no-estimate", action="store_true")
    parser.add_argument("--estimate-only", action="store_true")
    parser.add_argument("--allocator", action="store_true")
    main(parser.parse_args())
