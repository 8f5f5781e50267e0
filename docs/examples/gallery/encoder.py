"""An embedding server: batches vary in the number of texts and in their length; 12 graphs at most."""

import torch
from transformers import BertConfig, BertModel

import cgplan

ROWS, LENGTH = cgplan.Dim("batch", max=8), cgplan.Dim("length", max=128, multiple_of=32)
SHAPE = {0: ROWS, 1: LENGTH}


def model(device):
    torch.manual_seed(0)
    config = BertConfig(hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512)
    return BertModel(config).to(device).eval()


def graphed(net):
    return cgplan.graphed(net, dynamic={"input_ids": SHAPE, "attention_mask": SHAPE}, max_graphs=12)


def batches(device):
    for rows, length in ((2, 30), (8, 100), (3, 64), (1, 17)):
        lengths = torch.randint(1, length + 1, (rows, 1))
        lengths[0] = length
        ids = torch.randint(1, 30_000, (rows, length))
        mask = (torch.arange(length) < lengths).long()
        yield (), {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = model(device)
    fast = graphed(net)
    for args, kwargs in batches(device):
        found, wanted = fast(*args, **kwargs).pooler_output, net(*args, **kwargs).pooler_output
        print(f"{list(kwargs['input_ids'].shape)}: embeddings {list(found.shape)}")
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=2e-3)
    print(fast.explain())


if __name__ == "__main__":
    main()
