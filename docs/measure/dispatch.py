"""Time of one CudagraphDispatcher.dispatch call, over random batches.

python docs/measure/dispatch.py
"""

import random
import statistics
import time

from cgplan import Config, CudagraphDispatcher, build_plan

BATCHES = 10_000
GRID = {
    "dims": {
        "rows": {"max": 64, "sizes": list(range(1, 65))},
        "length": {"max": 4096, "sizes": list(range(64, 4097, 64))},
    }
}
CASES = {
    "no LoRA, FULL_AND_PIECEWISE": {"compilation": {"cudagraph_mode": "FULL_AND_PIECEWISE"}},
    "8 adapters by count, FULL": {"lora": {"max_loras": 8, "specialize_active_lora": True}},
    "64 x 64 boxes, FULL": GRID,
}


def main():
    for name, sections in CASES.items():
        plan = build_plan(Config.model_validate(sections))
        start = time.perf_counter()
        dispatch = CudagraphDispatcher(plan).dispatch
        build = time.perf_counter() - start
        random.seed(0)
        adapters = max(plan.lora_cases)
        batches = [
            (random.randint(1, plan.max_capture_size + 64), random.random() < 0.5, random.randint(0, adapters))
            for _ in range(BATCHES)
        ]
        if "dims" in sections:
            batches = [(*batch, None, None, (random.randrange(64, 4097, 64),)) for batch in batches]
            random.shuffle(batches)
        clock = time.perf_counter_ns
        medians = []
        for _ in range(5):
            calls, empty = [], []
            for batch in batches:
                start = clock()
                dispatch(*batch)
                calls.append(clock() - start)
                start = clock()
                empty.append(clock() - start)
            medians.append(statistics.median(calls) - statistics.median(empty))
        best = min(medians) / 1e3
        print(f"{name}: {len(plan.keys)} keys, median {best:.3f} us a call, table built in {build * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
