"""What several programs are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Wrap = Callable[..., Any]
Steps = Iterator[Any]
device = "cuda" if torch.cuda.is_available() else "cpu"


def rows(*sizes: int) -> Tensor:
    """Numbers of a normal distribution."""
    return torch.randn(*sizes, device=device)


def ids(*sizes: int, most: int = 30) -> Tensor:
    """Whole numbers."""
    return torch.randint(1, most, sizes, device=device)


def mlp(wide: int = 8, out: int = 4) -> nn.Sequential:
    """Two layers, in evaluation mode, whose parameters ask for gradients."""
    return nn.Sequential(nn.Linear(wide, 16), nn.Tanh(), nn.Linear(16, out)).to(device).eval()


def attempt(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a call returns, or the name of the error that it raises."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return type(error).__name__
