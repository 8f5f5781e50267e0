"""What the contract costs a warm call: of a runner without and with the check of addresses, and of ``g`` without and in
grad mode, for a model of 10 and of 1,000 tensors.

    python docs/measure/contract.py [--device cuda] [--rounds 20] [--calls 200]

The ways run in turns; a call is timed until it returns, from an idle device.
"""

import argparse
import statistics
import time

import torch

import cgplan


class Model(torch.nn.Module):
    """Reads all of its tensors in few kernels: one kernel for each would hide the host's time."""

    def __init__(self, tensors):
        super().__init__()
        self.scales = torch.nn.ParameterList(torch.ones(8) for _ in range(tensors))

    def forward(self, x):
        return x * torch._foreach_mul(list(self.scales), 2.0)[0]


def ways_of(tensors, device):
    x = torch.randn(3, 8, device=device)
    inputs = {"x": cgplan.Input.like(x, pad=0)}
    found = {}
    for check in ("off", "always"):
        model = Model(tensors).to(device).eval()
        compilation = {"cudagraph_capture_sizes": [4], "address_check": check, "verify": "off"}
        runner = cgplan.capture(model, inputs, compilation=compilation, device=device)
        found[f"runner, address_check {check}"] = False, lambda runner=runner: runner(x=x)
    for name, grad in (("g", False), ("g in grad mode", True)):
        g = cgplan.graphed(Model(tensors).to(device).eval(), verify="off")
        with torch.set_grad_enabled(grad):
            for _ in range(4):
                g(x)
        found[name] = grad, lambda g=g: g(x)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=200)
    options = parser.parse_args()
    synchronize = torch.cuda.synchronize if options.device.startswith("cuda") else lambda: None
    for tensors in (10, 1000):
        ways = ways_of(tensors, options.device)
        times = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, (grad, call) in ways.items():
                with torch.set_grad_enabled(grad):
                    for _ in range(options.calls):
                        synchronize()
                        start = time.perf_counter_ns()
                        call()
                        times[name].append((time.perf_counter_ns() - start) / 1e3)
        said = ", ".join(f"{name} {statistics.median(of):.1f} us" for name, of in times.items())
        print(f"{tensors} tensors: {said}")


if __name__ == "__main__":
    main()
