"""What the contract costs a warm call: of a runner without and with the check of addresses, and of ``g`` without and in
grad mode, for a model of 10 and of 1,000 tensors.

    python docs/measure/contract.py [--device cuda] [--rounds 20] [--calls 200]

The ways run in turns; a call is timed until it returns, from an idle device.
"""

import torch
from graphed_host import options_of, timed

import cgplan

IN_GRAD_MODE = "g in grad mode"


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
        found[f"runner, address_check {check}"] = lambda runner=runner: runner(x=x)
    for name in ("g", IN_GRAD_MODE):
        g = cgplan.graphed(Model(tensors).to(device).eval(), verify="off")
        with torch.set_grad_enabled(name == IN_GRAD_MODE):
            for _ in range(4):
                g(x)
        found[name] = lambda g=g: g(x)
    return found


def main():
    options = options_of(__doc__)
    for tensors in (10, 1000):
        ways = ways_of(tensors, options.device)
        times = timed(ways, options, without_grad={name for name in ways if name != IN_GRAD_MODE})
        said = ", ".join(f"{name} {time:.1f} us" for name, time in times.items())
        print(f"{tensors} tensors: {said}")


if __name__ == "__main__":
    main()
