"""A diffusion transformer's denoising loop: the transformer is replaced inside of a pipeline of someone else's."""

import torch
from torch import nn

import cgplan


class Transformer(nn.Module):
    def __init__(self, width=64, patches=64, layers=4):
        super().__init__()
        self.inward, self.outward = nn.Linear(16, width), nn.Linear(width, 16)
        self.place, self.label = nn.Parameter(torch.randn(1, patches, width) * 0.02), nn.Embedding(10, width)
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, latents, timestep, label):
        hidden = self.inward(latents) + self.place + (self.time(timestep[:, None]) + self.label(label))[:, None]
        return self.outward(self.blocks(hidden))


class Pipeline:
    def __init__(self, device):
        self.transformer = model(device)

    @torch.no_grad()
    def __call__(self, label, steps=10):
        latents = torch.randn(len(label), 64, 16, generator=torch.Generator().manual_seed(1)).to(label.device)
        for time in torch.linspace(1, 0, steps, device=label.device):
            latents = latents - self.transformer(latents, time.expand(len(label)), label) / steps
        return latents


def model(device):
    torch.manual_seed(0)
    return Transformer().to(device).eval()


def graphed(net):
    return cgplan.graphed(net, max_graphs=8)


def batches(device):
    for rows in (1, 4, 3):
        time = torch.full((rows,), 0.5, device=device)
        yield (torch.randn(rows, 64, 16, device=device), time, torch.arange(rows, device=device)), {}


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipe, labels = Pipeline(device), torch.tensor([3, 1, 4], device=device)
    wanted = pipe(labels)
    pipe.transformer = graphed(pipe.transformer)
    torch.testing.assert_close(pipe(labels), wanted, rtol=1e-2, atol=1e-2)
    print(pipe.transformer.report)


if __name__ == "__main__":
    main()
