"""Policies that remember: hidden states, normalisers of observations, and what resets them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from programs.harness import Program, check, program
from programs.parts import Steps, Wrap, device, mlp, rows
from torch import Tensor, nn

programs: list[Program] = []


class Recurrent(nn.Module):
    """A GRU cell whose hidden state comes and goes with the call."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 8), nn.Linear(8, 3)

    def forward(
        self, x: Tensor, h: Tensor | None = None, done: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        h = x.new_zeros(x.shape[0], 8) if h is None else h
        h = self.cell(x, h if done is None else h * (1 - done)[:, None])
        return self.head(h), h


class Remembering(nn.Module):
    """A GRU cell that writes its hidden state into a buffer."""

    h: Tensor

    def __init__(self, batch: int = 4) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)
        self.register_buffer("h", torch.zeros(batch, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.h.copy_(self.cell(x, self.h))
        return self.h * 2


class Normaliser(nn.Module):
    """Running mean and variance of observations."""

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, always: bool = False) -> None:
        super().__init__()
        self.always, self.frozen, self.clip = always, False, 5.0
        for name, value in (
            ("mean", torch.zeros(8)),
            ("var", torch.ones(8)),
            ("count", torch.tensor(1e-4)),
        ):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        if (self.training or self.always) and not self.frozen:
            delta, total = x.mean(0) - self.mean, self.count + x.shape[0]
            self.mean.add_(delta * x.shape[0] / total)
            spread = self.var * self.count + x.var(0, unbiased=False) * x.shape[0]
            self.var.copy_((spread + delta**2 * self.count * x.shape[0] / total) / total)
            self.count.copy_(total)
        return ((x - self.mean) / (self.var + 1e-8).sqrt()).clamp(-self.clip, self.clip)


@program(programs, graphs=True)
def hidden_as_argument(graphed: Wrap) -> Steps:
    """Feeds the hidden state that came out of a step into the next one."""
    g = graphed(Recurrent().to(device).eval())
    h = torch.zeros(4, 8, device=device)
    with torch.no_grad():
        for _ in range(12):
            y, h = g(rows(4, 8), h)
            yield y, h


@program(programs, graphs=True)
def lstm_state_in_a_tuple(graphed: Wrap) -> Steps:
    """Passes an LSTM cell's two states as a tuple."""
    cell = nn.LSTMCell(8, 8).to(device).eval()
    g, state = graphed(cell), (torch.zeros(2, 8, device=device), torch.zeros(2, 8, device=device))
    with torch.no_grad():
        for _ in range(10):
            state = g(rows(2, 8), state)
            yield state


@program(programs, graphs=True)
def hidden_starts_as_none(graphed: Wrap) -> Steps:
    """Passes None at the start of an episode."""
    g = graphed(Recurrent().to(device).eval())
    with torch.no_grad():
        for _ in range(3):
            h = None
            for _ in range(5):
                y, h = g(rows(4, 8), h)
                yield y, h


@program(programs, graphs=True)
def done_mask_in_forward(graphed: Wrap) -> Steps:
    """Resets rows by a mask that is an argument."""
    g = graphed(Recurrent().to(device).eval())
    h = torch.zeros(4, 8, device=device)
    with torch.no_grad():
        for _ in range(10):
            y, h = g(rows(4, 8), h, (rows(4) > 0.8).float())
            yield y, h


@program(programs, graphs=True)
def hidden_in_a_buffer(graphed: Wrap) -> Steps:
    """Keeps the hidden state in a buffer that the forward writes."""
    policy = Remembering().to(device).eval()
    g = graphed(policy, dynamic={})
    with torch.no_grad():
        for _ in range(12):
            yield g(rows(4, 8)), policy.h


@program(programs)
def hidden_in_a_buffer_by_default(graphed: Wrap) -> Steps:
    """The same without any option."""
    policy = Remembering(3).to(device).eval()
    g = graphed(policy)
    with torch.no_grad():
        for _ in range(12):
            yield g(rows(3, 8)), policy.h


@program(programs, graphs=False)
def hidden_attribute_is_bound(graphed: Wrap) -> Steps:
    """Binds a new hidden state to an attribute in each step."""

    class Policy(Recurrent):
        state: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            y, self.state = super().forward(x, self.state)
            return y

    policy = Policy().to(device).eval()
    g = graphed(policy)
    with torch.no_grad():
        for at in range(12):
            if at == 7:
                policy.state = None
            yield g(rows(4, 8)), policy.state


@program(programs, graphs=False)
def hidden_buffer_is_bound(graphed: Wrap) -> Steps:
    """Binds a new tensor to a buffer in each step."""

    class Policy(Remembering):
        def forward(self, x: Tensor) -> Tensor:
            self.h = self.cell(x, self.h)
            return self.h * 2

    policy = Policy().to(device).eval()
    g = graphed(policy, dynamic={})
    with torch.no_grad():
        for _ in range(10):
            yield g(rows(4, 8)), policy.state_dict()["h"]


@program(programs, graphs=True)
def done_rows_zeroed_from_outside(graphed: Wrap) -> Steps:
    """Sets rows of the buffer to 0 between steps."""
    policy = Remembering().to(device).eval()
    g = graphed(policy, dynamic={})
    with torch.no_grad():
        for _ in range(12):
            yield g(rows(4, 8)), policy.h
            policy.h[rows(4) > 0.5] = 0


@program(programs, graphs=True)
def reset_binds_zeros(graphed: Wrap) -> Steps:
    """Has a reset that binds new zeros to the buffer, once in an episode."""
    policy = Remembering().to(device).eval()
    g = graphed(policy, dynamic={})
    with torch.no_grad():
        for at in range(16):
            if at == 7:
                policy.h = torch.zeros(4, 8, device=device)
            yield g(rows(4, 8)), policy.h


@program(programs, graphs=True)
def reset_through_g(graphed: Wrap) -> Steps:
    """Resets in place by the wrapped model's attribute."""
    g = graphed(Remembering().to(device).eval(), dynamic={})
    with torch.no_grad():
        for at in range(14):
            if at % 5 == 4:
                g.h.zero_()
            yield g(rows(4, 8)), g.h


@program(programs)
def hidden_made_for_the_batch(graphed: Wrap) -> Steps:
    """Makes a new hidden state whenever the number of environments changes."""

    class Policy(Remembering):
        def forward(self, x: Tensor) -> Tensor:
            if self.h.shape[0] != x.shape[0]:
                self.h = x.new_zeros(x.shape[0], 8)
            return super().forward(x)

    policy = Policy().to(device).eval()
    g = graphed(policy, dynamic={})
    with torch.no_grad():
        for batch in [4] * 6 + [2] * 6 + [4] * 6:
            yield g(rows(batch, 8)), policy.h


@program(programs, graphs=True)
def two_agents_share_a_policy(graphed: Wrap) -> Steps:
    """Plays a policy against itself, with a hidden state for each side."""
    g = graphed(Recurrent().to(device).eval())
    states = [torch.zeros(2, 8, device=device) for _ in range(2)]
    with torch.no_grad():
        for turn in range(12):
            y, states[turn % 2] = g(rows(2, 8), states[turn % 2])
            yield y, states


class Memory(NamedTuple):
    h: Tensor
    steps: Tensor


@program(programs, graphs=True)
def state_in_a_named_tuple(graphed: Wrap) -> Steps:
    """Carries the hidden state and a count of steps in a named tuple."""
    net = Recurrent().to(device).eval()

    def step(x: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        y, h = net(x, memory.h)
        return y, Memory(h, memory.steps + 1)

    g, memory = (
        graphed(step),
        Memory(torch.zeros(4, 8, device=device), torch.zeros(4, dtype=torch.long, device=device)),
    )
    with torch.no_grad():
        for _ in range(10):
            y, memory = g(rows(4, 8), memory)
            yield y, memory.h, memory.steps, type(memory).__name__


@program(programs, graphs=True)
def action_repeat_is_a_number(graphed: Wrap) -> Steps:
    """Says by a Python number how often the cell runs in a step."""
    net = Recurrent().to(device).eval()

    def step(x: Tensor, h: Tensor, repeat: int = 1) -> Tensor:
        for _ in range(repeat):
            h = net(x, h)[1]
        return h

    g, h = graphed(step), torch.zeros(4, 8, device=device)
    with torch.no_grad():
        for at in range(14):
            h = g(rows(4, 8), h, repeat=1 + at % 2)
            yield h


@program(programs)
def lstm_over_windows(graphed: Wrap) -> Steps:
    """Runs a whole LSTM over windows, for another number of them in each call."""
    lstm = nn.LSTM(8, 8, batch_first=True).to(device).eval()
    g = graphed(lambda x: lstm(x)[0][:, -1])
    with torch.no_grad():
        for batch in (2, 3, 4, 3, 2, 4, 4, 3, 1, 4):
            yield g(rows(batch, 5, 8))


@program(programs, graphs=True)
def frames_are_stacked(graphed: Wrap) -> Steps:
    """Shifts the last four observations in a buffer."""

    class Stack(nn.Module):
        frames: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frames", torch.zeros(4, 2, 8))
            self.net = mlp(32)

        def forward(self, x: Tensor) -> Tensor:
            self.frames.copy_(self.frames.roll(-1, 0))
            self.frames[-1].copy_(x)
            return self.net(self.frames.transpose(0, 1).flatten(1))

    stack = Stack().to(device).eval()
    g = graphed(stack, dynamic={})
    with torch.no_grad():
        for _ in range(10):
            yield g(rows(2, 8)), stack.frames


@program(programs, graphs=True)
def normaliser_learns_then_serves(graphed: Wrap) -> Steps:
    """Updates mean and variance in training mode, and then no more."""
    normaliser = Normaliser().to(device)
    g = graphed(normaliser)
    for at in range(14):
        g.train(at < 6)
        yield g(rows(4, 8)), normaliser.mean, normaliser.var, normaliser.count


@program(programs)
def normaliser_counts_rows(graphed: Wrap) -> Steps:
    """Always updates, by batches of other sizes, whose padding must not count."""
    normaliser = Normaliser(always=True).to(device).eval()
    g = graphed(normaliser)
    for batch in (3, 4, 3, 5, 7, 3, 3, 6, 5, 3, 3, 7):
        yield g(rows(batch, 8) + 2), normaliser.mean, normaliser.var, normaliser.count


@program(programs, graphs=True)
def normaliser_of_one_shape(graphed: Wrap) -> Steps:
    """Always updates, where each shape has its graph."""
    normaliser = Normaliser(always=True).to(device).eval()
    g = graphed(normaliser, dynamic={})
    for _ in range(12):
        yield g(rows(3, 8) + 2), normaliser.mean, normaliser.var, normaliser.count


@program(programs, graphs=True)
def normaliser_frozen_by_a_flag(graphed: Wrap) -> Steps:
    """Sets a flag of the model, after which it no longer updates, and takes it back."""
    normaliser = Normaliser(always=True).to(device).eval()
    g = graphed(normaliser, dynamic={})
    for at in range(18):
        normaliser.frozen = 6 <= at < 12
        yield g(rows(3, 8) + 2), normaliser.mean, normaliser.var


@program(programs, graphs=False)
def normaliser_counts_in_python(graphed: Wrap) -> Steps:
    """Counts batches in a Python number."""

    class Counting(nn.Module):
        seen = 0

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.shape[0]
            return x / self.seen

    counting = Counting().eval()
    g = graphed(counting)
    for _ in range(10):
        yield g(rows(4, 8)), counting.seen


@program(programs, graphs=True)
def clip_is_set_from_outside(graphed: Wrap) -> Steps:
    """Narrows a range of the model between calls, on the model and through g."""
    normaliser = Normaliser().to(device).eval()
    g = graphed(normaliser)
    for at in range(18):
        if at == 6:
            normaliser.clip = 0.5
        if at == 12:
            g.clip = 0.1
        yield g(rows(4, 8)), normaliser.clip


@program(programs, graphs=True)
def statistics_are_loaded(graphed: Wrap) -> Steps:
    """Loads the statistics of another normaliser between calls."""
    normaliser, other = Normaliser().to(device).eval(), Normaliser().to(device).train()
    g = graphed(normaliser)
    for at in range(14):
        other(rows(8, 8) * 3)
        if at % 5 == 4:
            normaliser.load_state_dict(other.state_dict())
        yield g(rows(4, 8))


@program(programs, graphs=True)
def returns_are_normalised(graphed: Wrap) -> Steps:
    """Keeps discounted returns of each environment, which a mask ends."""

    class Returns(nn.Module):
        total: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, reward: Tensor, done: Tensor) -> Tensor:
            self.total.mul_(0.9).add_(reward)
            scaled = reward / (self.total.abs().mean() + 1)
            self.total.masked_fill_(done, 0.0)
            return scaled

    returns = Returns().to(device).eval()
    g = graphed(returns, dynamic={})
    for _ in range(12):
        yield g(rows(4), rows(4) > 1), returns.total


@program(programs)
def batch_norm_in_training(graphed: Wrap) -> Steps:
    """Calls a model with batch norm in training mode, by batches of other sizes."""
    net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6)).to(device).train()
    g = graphed(net)
    with torch.no_grad():
        for batch in (3, 5, 3, 3, 6, 3, 5, 5, 3, 3):
            yield g(rows(batch, 8)), net.state_dict()


@program(programs, graphs=True)
def batch_norm_trains_and_serves_in_turn(graphed: Wrap) -> Steps:
    """Switches between training and evaluation by the model's own methods."""
    net = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6)).to(device)
    g = graphed(net)
    with torch.no_grad():
        for at in range(18):
            net.train(at % 6 == 0)
            yield g(rows(4, 8)), net[1].running_mean, net[1].num_batches_tracked


@program(programs, graphs=True)
def observation_is_a_dict(graphed: Wrap) -> Steps:
    """Passes a dict of observations, of which some calls lack one."""
    net = mlp()

    def policy(obs: dict[str, Tensor]) -> dict[str, Tensor]:
        x = obs["state"] + obs["goal"] if "goal" in obs else obs["state"]
        return {"action": net(x), "features": x}

    g = graphed(policy)
    with torch.no_grad():
        for at in range(14):
            obs = {"state": rows(4, 8), "goal": rows(4, 8)}
            yield g(obs if at % 2 else {"state": obs["state"]})


@program(programs)
def observation_is_an_array(graphed: Wrap) -> Steps:
    """Passes arrays of NumPy, which the forward turns into tensors."""
    net = mlp()
    g = graphed(lambda obs: net(torch.as_tensor(obs, dtype=torch.float32, device=device)))
    with torch.no_grad():
        for _ in range(8):
            yield g(np.random.randn(4, 8))


@program(programs)
def observation_is_a_list(graphed: Wrap) -> Steps:
    """Passes numbers in a list, other ones in each call."""
    net = mlp()
    g = graphed(lambda obs: net(torch.tensor(obs, device=device)))
    with torch.no_grad():
        for at in range(8):
            yield g([float(at)] * 8)


@program(programs, graphs=True)
def deterministic_is_a_flag(graphed: Wrap) -> Steps:
    """Asks now for the mean, and now for the mean with noise that is passed."""
    net = mlp()

    def act(x: Tensor, noise: Tensor, deterministic: bool = False) -> Tensor:
        return net(x) if deterministic else net(x) + noise

    g = graphed(act)
    with torch.no_grad():
        for at in range(14):
            yield g(rows(4, 8), rows(4, 4), deterministic=at % 3 == 0)


@program(programs, graphs=True)
def environments_end_one_by_one(graphed: Wrap) -> Steps:
    """Steps fewer and fewer environments, with the hidden states of those that go on."""
    g = graphed(Recurrent().to(device).eval(), sizes=[2, 4, 8])
    h: Any = torch.zeros(8, 8, device=device)
    with torch.no_grad():
        for alive in (8, 8, 7, 7, 6, 5, 4, 4, 3, 3, 3, 2, 1):
            y, h = g(rows(alive, 8), h[:alive])
            yield y, h


@pytest.mark.parametrize("case", programs, ids=lambda p: p.name)
def test_program(case: Program) -> None:
    check(case)
