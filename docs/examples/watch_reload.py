"""A reload that replaces weights below a graph, what a watch says of it, and a mend. On the tape, or on a GPU:

python docs/examples/watch_reload.py cpu
"""

import sys

import torch
from torch import nn

import cgplan


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def checkpoint(self):
        return {name: torch.randn_like(value) for name, value in self.state_dict().items()}


def captured_by_torch(model):
    static = torch.zeros(4, 64, device="cuda")
    model(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = model(static)

    def replay(x):
        static.copy_(x)
        graph.replay()
        return output

    return replay


def captured_on_tape(model):
    rows = cgplan.Input(shape=("num_tokens", 64), dtype="float32", pad=0)
    options = {"cudagraph_capture_sizes": [4], "address_check": "off", "verify": "off"}  # as an engine's own graphs
    return cgplan.capture(model, {"x": rows}, compilation=options, device="cpu")


@torch.no_grad()
def main(device):
    model = Model().to(device).eval()
    x = torch.randn(4, 64, device=device)
    with cgplan.watch({"model": model}, operators=True) as watch:  # before the first capture
        replay = captured_on_tape(model) if device == "cpu" else captured_by_torch(model)
        watch.baseline()

        def tell(what):
            report = watch.changed()
            is_right = torch.allclose(replay(x), model(x), rtol=1e-4, atol=1e-3)
            print(f"{what}: {len(report.stale)} stale, numbers {'right' if is_right else 'wrong'}")
            return report

        model.load_state_dict(model.checkpoint())
        tell("a reload that copies")

        captured = model.state_dict()  # keeps the memory that the graph reads
        model.load_state_dict(model.checkpoint(), assign=True)
        report = tell("a reload that assigns")

        for name, value in model.state_dict().items():
            captured[name].copy_(value)
        model.load_state_dict(captured, assign=True)
        tell("the new numbers in the old memory")
    print(report)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu")
