"""Molecular dynamics: energy and forces of a graph network, whose atoms and edges vary from step to step.

Padded edges have the weight 0, so nothing that they carry counts; padded atoms have no edges.
"""

import torch
from torch import nn

import cgplan


class Potential(nn.Module):
    def __init__(self, width=64, layers=3):
        super().__init__()
        self.kinds = nn.Embedding(10, width)
        self.messages = nn.ModuleList(nn.Linear(2 * width + 1, width) for _ in range(layers))
        self.head = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, kinds, places, edges, weight):
        hidden, (start, end) = self.kinds(kinds), edges
        apart = ((places[start] - places[end]) ** 2).sum(-1, keepdim=True)
        for message in self.messages:
            sent = message(torch.cat([hidden[start], hidden[end], apart], -1)).tanh() * weight[:, None]
            hidden = hidden + torch.zeros_like(hidden).index_add(0, end, sent)
        return self.head(hidden).squeeze(-1)


def model(device):
    torch.manual_seed(0)
    return Potential().to(device).eval()


def graphed(net):
    atoms, edges = cgplan.Dim("atoms", max=64, multiple_of=16), cgplan.Dim("edges", max=512, multiple_of=64)
    shapes = {"kinds": {0: atoms}, "places": {0: atoms}, "edges": {1: edges}, "weight": {0: edges}}
    return cgplan.graphed(net, dynamic=shapes, pad={"weight": 0}, max_graphs=16)


def batches(device):
    for atoms, edges in ((20, 90), (64, 500), (33, 130), (21, 80)):
        kinds, places = torch.randint(0, 10, (atoms,)), torch.randn(atoms, 3)
        pairs, weight = torch.randint(0, atoms, (2, edges)), torch.ones(edges)
        yield tuple(tensor.to(device) for tensor in (kinds, places, pairs, weight)), {}


@torch.no_grad()
def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = model(device)
    fast = graphed(net)
    for args, _ in batches(device):
        energies = fast(*args)
        torch.testing.assert_close(energies, net(*args), rtol=1e-2, atol=1e-3)
        print(f"{len(args[0])} atoms, {len(args[3])} edges: energy {float(energies.sum()):.4f}")
    print(fast.explain())


if __name__ == "__main__":
    main()
