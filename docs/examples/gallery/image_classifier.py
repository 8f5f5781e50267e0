"""An image classifier: batches of 1 to 16 pictures, as a web server has them, each served by the next larger graph."""

import torch
from transformers import ResNetConfig, ResNetForImageClassification

import cgplan


def model(device):
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2])
    return ResNetForImageClassification(config).to(device).eval()


def graphed(net):
    return cgplan.graphed(net, sizes=[1, 4, 16])


def batches(device):
    for rows in (1, 3, 16, 7):
        yield (torch.randn(rows, 3, 64, 64, device=device),), {}


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = model(device)
    fast = graphed(net)
    for args, kwargs in batches(device):
        logits, wanted = fast(*args, **kwargs).logits, net(*args, **kwargs).logits
        print(f"{len(logits)} pictures: classes {logits.argmax(-1).tolist()}")
        torch.testing.assert_close(logits, wanted, rtol=1e-2, atol=1e-3)
    print(fast.explain())


if __name__ == "__main__":
    main()
