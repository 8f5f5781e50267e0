"""A robot's policy at batch 1: 50 times a second, and never late. Prints the median and the 99.9th percentile."""

import time

import torch
from torch import nn

import cgplan


class Policy(nn.Module):
    """A camera picture and joint angles in, a chunk of eight actions out."""

    def __init__(self, width=128):
        super().__init__()
        self.eye = nn.Sequential(nn.Conv2d(3, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Flatten(2))
        self.joints, self.queries = nn.Linear(7, width), nn.Parameter(torch.randn(1, 8, width))
        self.see = nn.Linear(64, width)
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.head = nn.Linear(width, 7)

    def forward(self, picture, angles):
        seen = self.see(self.eye(picture).transpose(1, 2))
        asked = self.queries + self.joints(angles)[:, None]
        return self.head(self.attend(asked, seen, seen, need_weights=False)[0])


def model(device):
    torch.manual_seed(0)
    return Policy().to(device).eval()


def graphed(net):
    return cgplan.graphed(net, sizes=[1])


def batches(device):
    yield (torch.randn(1, 3, 84, 84, device=device), torch.randn(1, 7, device=device)), {}


@torch.no_grad()
def main(steps=1000):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = model(device)
    ((picture, angles), _), *_ = batches(device)
    for name, act in (("eager", policy), ("graphed", graphed(policy))):
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            act(picture, angles).cpu()
            times.append((time.perf_counter() - start) * 1e6)
        times = sorted(times[len(times) // 10 :])
        print(f"{name}: {times[len(times) // 2]:.0f} us, p99.9 {times[int(len(times) * 0.999)]:.0f} us")
    torch.testing.assert_close(act(picture, angles), policy(picture, angles), rtol=1e-2, atol=1e-3)


if __name__ == "__main__":
    main()
