"""A model of the user's own: `build` returns any nn.Module. Used by vision.yaml."""

import torch
from torch import nn


class SmallViT(nn.Module):
    """Patches, a transformer encoder, and a linear head: images [rows, 3, 64, 64] to logits [rows,
    classes].
    """

    def __init__(self, width: int = 128, layers: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=8, stride=8)
        self.positions = nn.Parameter(torch.zeros(1, 64, width))
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=2 * width, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of a batch of images."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.encoder(tokens).mean(dim=1))


def build(name: str = "small") -> nn.Module:
    """The small model, or the timm model of that name with random weights."""
    if name == "small":
        return SmallViT()
    import timm

    return timm.create_model(name, pretrained=False)
