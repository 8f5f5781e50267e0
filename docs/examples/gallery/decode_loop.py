"""A Hugging Face decode loop with a StaticCache: each step of one token is a graph."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, StaticCache

import cgplan

ROWS, LONGEST = 2, 64


class Step(torch.nn.Module):
    def __init__(self, net, device):
        super().__init__()
        self.net = net
        self.cache = StaticCache(net.config, max_cache_len=LONGEST)
        net(torch.zeros(ROWS, 1, dtype=torch.long, device=device), past_key_values=self.cache)  # allocates it

    def forward(self, token, position):
        for layer in self.cache.layers:
            layer.cumulative_length.copy_(position[0, 0])  # where this token goes
        out = self.net(token, past_key_values=self.cache, position_ids=position, cache_position=position[0])
        return out.logits[:, -1].argmax(-1, keepdim=True)


def model(device):
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=200, num_hidden_layers=3, head_dim=16, **shape)
    with torch.no_grad():
        return Step(Qwen3ForCausalLM(config).to(device).eval(), device).eval()


def graphed(step):
    return cgplan.graphed(step, dynamic={})  # nothing varies: no padding, which would write into the cache


def batches(device):
    for position in range(4):
        yield (torch.ones(ROWS, 1, dtype=torch.long, device=device), torch.full((ROWS, 1), position, device=device)), {}


def tokens(step, device, count=20):
    token, found = torch.ones(ROWS, 1, dtype=torch.long, device=device), []
    for position in range(count):
        token = step(token, torch.full((ROWS, 1), position, device=device))
        found.append(token)
    return torch.cat(found, 1)


@torch.no_grad()
def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    step = model(device)
    found, wanted = tokens(graphed(step), device), tokens(step, device)
    print(found.tolist())
    assert torch.equal(found, wanted)


if __name__ == "__main__":
    main()
