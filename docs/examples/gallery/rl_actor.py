"""A reinforcement learning actor: a policy that many small simulators ask, in batches of any number."""

import torch
from torch import nn

import cgplan


class Policy(nn.Module):
    def __init__(self, observations=17, actions=6, width=256):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(observations, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, 2 * actions)

    def forward(self, observation):
        mean, spread = self.head(self.body(observation)).chunk(2, -1)
        return {"action": mean.tanh(), "scale": nn.functional.softplus(spread)}


def model(device):
    torch.manual_seed(0)
    return Policy().to(device).eval()


def graphed(net):
    return cgplan.graphed(net, sizes="powers_of_two", max_size=256)


def batches(device):
    for rows in (1, 100, 256, 37):
        yield (torch.randn(rows, 17, device=device),), {}


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = model(device)
    act = graphed(policy)
    for (observation,), _ in batches(device):
        found = act(observation)
        torch.testing.assert_close(found, policy(observation), rtol=1e-2, atol=1e-3)
        print(f"{len(observation)} observations: first action {found['action'][0, :2].tolist()}")
    try:  # data of TorchRL go in and come out by their tensors
        from tensordict import TensorDict
    except ImportError:
        return
    data = TensorDict({"observation": observation}, batch_size=[len(observation)])
    data.update(act(data["observation"]))
    print(data)


if __name__ == "__main__":
    main()
