"""The planner's plans against exact answers.

    python docs/measure/exact.py boxes [--cases 900]    choices of boxes against HiGHS; needs scipy
    python docs/measure/exact.py lists [--cases 600]    lists of vLLM's model runner V2 against all lists
    python docs/measure/exact.py large                  CPU seconds of 8 to 40 sizes in two dimensions

`boxes` and `lists` draw problems by a seed, and count the plans that are longer than the best.
"""

import argparse
import random
from itertools import combinations, product
from operator import itemgetter
from time import process_time

import numpy as np

from cgplan.config import validate_config
from cgplan.errors import BudgetError, CgplanError
from cgplan.modes import CUDAGraphMode
from cgplan.optimizer.boxes import Purse, exchanged, filled, propose_boxes
from cgplan.optimizer.propose import PlanInputs, plan_graphs
from cgplan.planning import CudagraphDispatcher, build_plan
from cgplan.pricing import GraphCosts
from cgplan.traffic.histogram import SizeCounts, StepShape, Traffic
from cgplan.traffic.step_times import StepTimes

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
CLOSE = 1e-6
WORTH = 1.01e-4  # graphs that bring less are left out
LIMITS = ("graphs", "memory", "seconds", "all")
MODES = ("FULL_DECODE_ONLY", "FULL", "PIECEWISE", "FULL_AND_PIECEWISE")
LORA = (None, None, {"max_loras": 1}, {"max_loras": 2, "specialize_active_lora": True})


# --- choices of boxes -------------------------------------------------------------------------------------------------


def solved(cost, weights, purse):
    """The least total by HiGHS; None if no choice is paid for."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import lil_matrix

    rows, columns = cost.shape
    held = [pair for pair in product(range(rows), range(columns)) if np.isfinite(cost[pair])]
    first = len(held)  # then a variable for each column, the largest pool, static buffers of each group
    pool_at, static_at = first + columns, first + columns + 1
    number = static_at + purse.groups
    driver, seconds, pool, static = purse.figures
    lines = [({row: 1 for row, pair in enumerate(held) if pair[0] == of}, 1, 1) for of in range(rows)]
    lines += [({row: 1, first + pair[1]: -1}, -np.inf, 0) for row, pair in enumerate(held)]
    lines.append(({first + column: 1 for column in range(columns)}, 0, purse.graphs))
    lines.append(({first + column: seconds[column] for column in range(columns)}, 0, purse.seconds))
    for column in range(columns):
        lines.append(({pool_at: 1, first + column: -pool[column]}, 0, np.inf))
        lines.append(({static_at + column % purse.groups: 1, first + column: -static[column]}, 0, np.inf))
    memory = {first + column: driver[column] for column in range(columns)}
    memory |= dict.fromkeys(range(pool_at, number), 1)
    lines.append((memory, 0, purse.memory))
    matrix = lil_matrix((len(lines), number))
    for row, (line, _, _) in enumerate(lines):
        for column, value in line.items():
            matrix[row, column] = value
    aim = np.zeros(number)
    aim[:first] = [weights[row] * cost[row, column] for row, column in held]
    whole, most = np.zeros(number), np.ones(number)
    whole[first:pool_at], most[pool_at:] = 1, np.inf
    found = milp(
        aim,
        constraints=LinearConstraint(matrix.tocsr(), [line[1] for line in lines], [line[2] for line in lines]),
        integrality=whole,
        bounds=Bounds(np.zeros(number), most),
        options={"mip_rel_gap": 1e-9},
    )
    assert found.status in (0, 2), found.message
    return found.fun if found.status == 0 else None


def drawn_choice(rng, limits):
    groups, each, rows = int(rng.integers(1, 5)), int(rng.integers(2, 7)), int(rng.integers(2, 16))
    columns = groups * each
    cost = rng.random((rows, columns))
    if rng.random() < 0.4:
        cost.sort(axis=1)
    if rng.random() < 0.6:
        holes = rng.random(cost.shape) < rng.uniform(0, 0.7)
        holes[np.arange(rows), rng.integers(columns, size=rows)] = False
        cost[holes] = np.inf
    weights = rng.random(rows) + 0.01 if rng.random() < 0.7 else np.exp(rng.normal(0, 3, rows))
    rising = np.cumsum(rng.random((2, each, groups)) * rng.choice([0.1, 1, 3]), axis=1)
    pool, static = np.sort(rising[0], axis=0).ravel(), rising[1].ravel()
    driver, seconds = rng.random(columns) * rng.choice([0.01, 1]), rng.random(columns)
    whole = driver.sum() + pool.max() + rising[1][-1].sum()
    purse = Purse(
        int(rng.integers(1, columns + 1)) if limits in ("graphs", "all") else columns,
        whole * float(rng.uniform(0.2, 0.9)) if limits in ("memory", "all") else 1e9,
        seconds.sum() * float(rng.uniform(0.2, 0.7)) if limits in ("seconds", "all") else 1e9,
        np.stack([driver, seconds, pool, static]),
        groups,
    )
    return cost, weights, purse


def boxes(cases, seed):
    rng = np.random.default_rng(seed)
    solvable = missed = longer = 0
    gap = 0.0
    for case in range(cases):
        cost, weights, purse = drawn_choice(rng, LIMITS[case % len(LIMITS)])
        costs = filled(cost, weights)
        tried = [exchanged(costs, weights, purse, [column]) for column in range(costs.shape[1])]
        chosen, _ = min(tried, key=itemgetter(1))
        best = solved(cost, weights, purse)
        if best is None:
            continue
        solvable += 1
        total = float(weights @ cost[:, chosen].min(axis=1)) if chosen else np.inf
        if total == np.inf:
            missed += 1
            continue
        gap = max(gap, total / best - 1)
        longer += total > best * (1 + CLOSE)
    print(
        f"{cases} choices, {solvable} with a solution: {missed} not found, {longer} longer than the best, by up to "
        f"{gap:.1%}"
    )


# --- lists of V2 ------------------------------------------------------------------------------------------------------


def drawn_list(rng):
    """A configuration, traffic and step times."""
    query, seqs, lora = rng.choice([1, 1, 2, 3]), rng.randint(2, 6), rng.choice(LORA)
    top = rng.choice([8, 8, 10])
    compilation = {"cudagraph_mode": rng.choice(MODES), "key_rules": "vllm_v2"}
    data = {"compilation": compilation, "scheduler": {"max_num_seqs": seqs, "max_num_batched_tokens": top}}
    if lora:
        data["lora"] = lora
        compilation["cudagraph_specialize_lora"] = rng.random() < 0.7
    if query > 1:
        data["speculative"] = {"num_speculative_tokens": query - 1}
    seen = {}
    for _ in range(rng.randint(1, 7)):
        adapters = rng.randint(0, lora["max_loras"] if lora else 0)
        if rng.random() < 0.5:
            requests = rng.randint(1, min(seqs, top // query))
            shape = StepShape(query * requests, requests, True, adapters)
        else:
            tokens = rng.randint(1, top)
            shape = StepShape(tokens, rng.randint(1, min(tokens, seqs)), False, adapters)
        seen[shape] = rng.randint(1, 20)
    points = {}
    ranges = rng.choice([((90, 140), (50, 90), (10, 60)), ((50, 150), (20, 120), (10, 140))])
    for mode, (low, high) in zip((NONE, PIECEWISE, FULL), ranges, strict=True):
        time, curve = rng.uniform(low, high), {}
        for size in sorted(rng.sample(range(1, 11), rng.randint(1, 4))):
            curve[size] = time
            time += rng.choice([0, 0, rng.uniform(0, high - low)])
        points[mode, 0] = curve
    return data, Traffic.of(seen, "drawn"), StepTimes.measured(points, "drawn")


def mean_step(plan, traffic, times):
    dispatch, total = CudagraphDispatcher(plan).dispatch, 0.0
    for shape, weight in traffic.histogram:
        tokens, requests, uniform, adapters = shape
        mode, key = dispatch(tokens, uniform, adapters, num_reqs=requests)
        ran = (tokens, adapters) if mode is NONE else (key.num_tokens, key.num_active_loras)
        total += weight * times.of(mode, *ran)
    return total / traffic.total


def lists(cases, seed):
    rng = random.Random(seed)
    tried = over = longer = others = 0
    for _ in range(cases):
        data, traffic, times = drawn_list(rng)
        graphs = rng.randint(1, 4)

        def plan_of(sizes, data=data):
            compilation = {**data["compilation"], "cudagraph_capture_sizes": list(sizes)}
            return build_plan(validate_config({**data, "compilation": compilation}))

        config = validate_config({**data, "budget": {"max_graphs": graphs}})
        base = build_plan(config)
        query, top = base.query_len, base.max_num_batched_tokens
        decode = min(query * base.max_num_seqs, top // query * query)
        has_decode = any(key.uniform for _, key in base.keys)
        eager = sum(weight * times.of(NONE, shape[0], shape[3]) for shape, weight in traffic.histogram)
        best = every = eager / traffic.total
        for sizes in (some for number in range(1, graphs + 1) for some in combinations(range(1, top + 1), number)):
            try:
                plan = plan_of(sizes)
            except CgplanError:
                continue
            if 0 < len(plan.keys) <= graphs:
                step = mean_step(plan, traffic, times)
                every = min(every, step)
                if not has_decode or all(size % query == 0 or size > decode for size in sizes):
                    best = min(best, step)
        try:
            found = plan_graphs(PlanInputs(config, [(traffic, 1.0)], times, one_list=True))
        except BudgetError:
            continue
        tried += 1
        chosen = found.plan.capture_sizes
        step = eager / traffic.total
        if chosen:
            plan = plan_of(chosen)
            over += len(plan.keys) > graphs
            step = mean_step(plan, traffic, times)
        longer += step > best * (1 + WORTH)
        others += every < best * (1 - CLOSE)
    print(
        f"{tried} lists: {over} over their budget; {longer} longer than the best; {others} with a better list of sizes "
        "that are no whole requests"
    )


# --- many sizes -------------------------------------------------------------------------------------------------------


class Costs(GraphCosts):
    """A graph costs 2 MiB and 0.1 s, and its pool 64 bytes for each element."""

    source, estimated = "made up", True
    workspace_bytes, once_seconds = 0, 0.0

    def __init__(self):
        pass

    def pool_bytes(self, _, num_tokens):
        return 64 * num_tokens

    def static_bytes(self, num_tokens, sizes=()):
        return 4 * num_tokens * sum(sizes)

    def driver_bytes(self, _):
        return 2 << 20

    def seconds(self, _):
        return 0.1


def large(draws):
    for number, budget in product((8, 10, 12, 40), ({"max_graphs": 32}, {"memory": "64MiB"}, {"capture_time": 1.6})):
        seconds = []
        for seed in range(draws):
            rng = np.random.default_rng(seed)
            axes = [np.sort(rng.choice(np.arange(1, most + 1), number, False)) for most in (256, 2048)]
            counts = {pair: int(rng.integers(1, 100)) for pair in product(*(axis.tolist() for axis in axes))}
            dims = {"batch": {"max": 256}, "length": {"max": 2048}}
            config = validate_config({"dims": dims, "budget": budget, "compilation": {"cudagraph_mode": "FULL"}})
            began = process_time()
            traffic = SizeCounts(tuple(dims), counts, 0, "drawn")
            propose_boxes(config, traffic, None, Costs())
            seconds.append(process_time() - began)
        print(f"{number} x {number} {budget}: {min(seconds):.1f} to {max(seconds):.1f} s", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["boxes", "lists", "large"])
    parser.add_argument("--cases", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--draws", type=int, default=3)
    options = parser.parse_args()
    if options.what == "large":
        large(options.draws)
    else:
        {"boxes": boxes, "lists": lists}[options.what](options.cases, options.seed)


if __name__ == "__main__":
    main()
