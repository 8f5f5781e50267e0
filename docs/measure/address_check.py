"""Time of the address check, by the number of tensors and the structure that they are in.

python docs/measure/address_check.py [device]
"""

import sys
import time
import timeit
from functools import partial

import torch

from cgplan.graphs.fingerprint import Fingerprint

COUNTS = (10, 100, 1000)
ROUNDS = 300


class Layer:
    def __init__(self, tensors):
        self.a, self.b, self.c, self.d, self.e, self.f, self.g, self.h, self.i, self.j = tensors


def tens(tensors):
    return [tensors[i : i + 10] for i in range(0, len(tensors), 10)]


def modules(tensors):
    return torch.nn.ModuleList(torch.nn.ParameterList(group) for group in tens(tensors))


class Block(torch.nn.Module):
    """Ten tensors as a decoder layer has them: in modules of one or two, two steps below."""

    def __init__(self, tensors):
        super().__init__()
        given = iter(tensors)
        for name, parts in (("attention", ("q", "k", "v", "o")), ("mlp", ("gate", "up", "down", "norm"))):
            inner = torch.nn.Module()
            for part in parts:
                module = torch.nn.Module()
                module.weight = torch.nn.Parameter(next(given))
                setattr(inner, part, module)
            inner.register_buffer("cache", next(given))
            setattr(self, name, inner)


def model(tensors):
    return torch.nn.ModuleList(Block(group) for group in tens(tensors))


STRUCTURES = {
    "flat list": list,
    "dict": lambda tensors: {f"layers.{i}": tensor for i, tensor in enumerate(tensors)},
    "objects of 10": lambda tensors: {"layers": [Layer(group) for group in tens(tensors)]},
    "lists of 10": tens,
    "dicts of 10": lambda tensors: [dict(zip("abcdefghij", group, strict=True)) for group in tens(tensors)],
    "modules of 10": modules,
    "a model": model,
}


def best(call):
    """Least microseconds of a call, over many rounds of a few calls."""
    once = min(timeit.repeat(call, number=1, repeat=5))
    number = max(1, int(200e-6 / once))
    return min(timeit.repeat(call, number=number, repeat=ROUNDS)) / number * 1e6


def main():
    device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    print(f"torch {torch.__version__}, {device}; least of {ROUNDS} rounds")
    print(f"{'structure':<14} {'tensors':>7} {'check us':>9} {'allowed us':>10} {'first ms':>10} {'compare us':>10}")
    for name, build in STRUCTURES.items():
        for count in COUNTS:
            tensors = [torch.zeros(4, device=device) for _ in range(count)]
            roots = {"args": (), "kwargs": {}, "metadata": build(tensors)}
            start = time.perf_counter()
            state = Fingerprint.of(roots, device)
            state.holds()
            walk = (time.perf_counter() - start) * 1e3
            check, compare = best(state.holds), best(partial(state.refuse_moved, name, roots))
            allowed = 2 + 0.05 * count
            print(f"{name:<14} {count:>7} {check:>9.2f} {allowed:>10.1f} {walk:>10.2f} {compare:>10.0f}")
    tensors = [torch.zeros(4, device=device) for _ in range(1000)]
    pointer = torch.Tensor.data_ptr
    print(f"data_ptr alone, of 1000 tensors: {best(lambda: [*map(pointer, tensors)]):.2f} us")
    equal = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
    if equal is None:
        print("torch's own comparison of addresses: not in this build")
    else:
        addresses, indices = [*map(pointer, tensors)], [*range(1000)]
        print(f"torch's own comparison, of 1000 tensors: {best(lambda: equal(tensors, addresses, indices)):.2f} us")


if __name__ == "__main__":
    main()
