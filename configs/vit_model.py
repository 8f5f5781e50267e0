"""A vision transformer of transformers, built from its config alone with random weights. Used by
vit_b16.yaml.
"""

from typing import Any

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification


class Classifier(nn.Module):
    """Images [rows, 3, side, side] to logits [rows, classes], as a plain tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of a batch of images.

        Layer by layer: inside a capture ``model(pixel_values=x)`` would build a mask that masks
        nothing, with which attention takes other kernels, in float32 and twice as slow
        (transformers 5.17, `is_tracing`).
        """
        vit = self.model.vit
        hidden = vit.embeddings(x)
        for layer in vit.layers:
            hidden = layer(hidden, None)
        return self.model.classifier(vit.layernorm(hidden)[:, 0])


def build(dtype: str = "bfloat16", classes: int = 1000, **config: Any) -> nn.Module:
    """ViT-B/16 at 224 pixels, or what ``config`` says instead (hidden_size, num_hidden_layers,
    image_size, ...).
    """
    model = ViTForImageClassification(ViTConfig(num_labels=classes, **config))
    return Classifier(model.to(getattr(torch, dtype)).eval().requires_grad_(False))
