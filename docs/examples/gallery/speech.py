"""Speech recognition with two models: an encoder for any length of sound, and a predictor that steps token by token."""

import torch
from torch import nn

import cgplan


class Encoder(nn.Conv1d):  # looks at neighbours: the mask hides padding
    def forward(self, banks, mask):
        return super().forward((banks * mask[..., None]).transpose(1, 2)).transpose(1, 2).relu()


class Predictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(30, 64), nn.GRUCell(64, 64), nn.Linear(64, 30)

    def forward(self, frame, token, state):
        state = torch.where((token > 0)[:, None], self.cell(self.embed(token), state), state)
        return self.head((frame + state).tanh()).argmax(-1), state


def model(device):
    torch.manual_seed(0)
    return Predictor().to(device).eval()


def graphed(net):
    return cgplan.graphed(net, sizes=[1, 4])


def batches(device):
    frame = torch.randn(3, 64, device=device)
    yield (frame, torch.zeros(3, dtype=torch.long, device=device), torch.zeros_like(frame)), {}


def transcribe(encoder, predictor, banks, mask):
    frames, token, said = encoder(banks, mask).unbind(1), mask[:, 0].long() * 0, []
    state = torch.zeros_like(frames[0])
    for frame in frames:
        token, state = predictor(frame, token, state)
        said.append(token)
    return torch.stack(said, 1)


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    predictor, encoder = model(device), Encoder(80, 64, 3, padding=1).to(device).eval()
    shape = {0: cgplan.Dim("batch", max=4), 1: cgplan.Dim("frames", max=64, multiple_of=16)}
    fast = cgplan.graphed(encoder, dynamic={"banks": shape, "mask": shape})
    for rows, frames in ((1, 20), (3, 50)):
        banks, mask = torch.randn(rows, frames, 80, device=device), torch.ones(rows, frames, device=device)
        found = transcribe(fast, graphed(predictor), banks, mask)
        assert torch.equal(found, transcribe(encoder, predictor, banks, mask))
        print(f"{rows} x {frames} frames: {int((found > 0).sum())} tokens")


if __name__ == "__main__":
    main()
