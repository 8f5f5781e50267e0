"""Learning around a graphed model: gradients, target networks, averages of weights, precision and grad modes."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from programs.harness import Program, check, program
from programs.parts import Steps, Wrap, attempt, device, mlp, rows
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import cgplan

programs: list[Program] = []
RECOMPUTE: dict[str, Any] = {"grad": "recompute"}


class ActorCritic(nn.Module):
    """A backbone with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.actor, self.critic = (
            nn.Linear(8, 16),
            nn.Linear(16, 3),
            nn.Linear(16, 1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.backbone(x).tanh()
        return self.actor(x), self.critic(x)[:, 0]


def gradients(model: nn.Module) -> list[Tensor | None]:
    """Of all parameters."""
    return [p.grad for p in model.parameters()]


@program(programs, graphs=True)
def ppo(graphed: Wrap) -> Steps:
    """Collects steps without gradients, and learns from them with gradients."""
    net = ActorCritic().to(device).eval()
    g, optimizer = graphed(net, **RECOMPUTE), torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        batch = list[Any]()
        with torch.no_grad():
            for _ in range(5):
                x, logits, value = (x := rows(4, 8)), *g(x)
                action = logits.argmax(-1)
                batch.append(
                    (x, action, F.log_softmax(logits, -1).gather(1, action[:, None])[:, 0], value)
                )
                yield logits, value
        x, action, old, value = (torch.cat(part) for part in zip(*batch, strict=True))
        for _ in range(3):
            logits, now = g(x)
            ratio = (F.log_softmax(logits, -1).gather(1, action[:, None])[:, 0] - old).exp()
            loss = (now - value - 1).square().mean() - ratio.clamp(0.8, 1.2).mean()
            optimizer.zero_grad()
            loss.backward()
            yield loss, gradients(net), ratio.requires_grad
            optimizer.step()


@program(programs, graphs=True)
def regression_by_recomputation(graphed: Wrap) -> Steps:
    """Trains by the outputs of graphs."""
    net = mlp()
    g, optimizer = graphed(net, **RECOMPUTE), torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(12):
        loss = g(rows(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, gradients(net), list(net.parameters())


@program(programs, graphs=True)
def head_on_a_graphed_backbone(graphed: Wrap) -> Steps:
    """Trains a head of its own together with the backbone below it."""
    net, head = mlp(), nn.Linear(4, 2).to(device)
    g = graphed(net, **RECOMPUTE)
    optimizer = torch.optim.SGD(itertools.chain(net.parameters(), head.parameters()), 0.1)
    for _ in range(10):
        loss = F.cross_entropy(head(g(rows(4, 8))), torch.tensor([0, 1, 0, 1], device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, gradients(net), gradients(head)


@program(programs, graphs=True)
def head_on_frozen_features(graphed: Wrap) -> Steps:
    """Trains a head on features that ask for no gradient."""
    net, head = mlp().requires_grad_(False), nn.Linear(4, 2).to(device)
    g = graphed(net)
    for _ in range(10):
        features = g(rows(4, 8))
        loss = head(features).square().mean()
        head.zero_grad()
        loss.backward()
        yield features.requires_grad, loss, gradients(head)


@program(programs, graphs=True)
def backbone_is_frozen_and_freed(graphed: Wrap) -> Steps:
    """Lets the backbone's parameters ask for gradients after some epochs."""
    net = mlp().requires_grad_(False)
    g = graphed(net, **RECOMPUTE)
    w = rows(4, 4).requires_grad_()
    for at in range(18):
        if at in (6, 12):
            net.requires_grad_(at == 6)
        y = g(rows(4, 8))
        net.zero_grad()
        (y @ w).sum().backward()
        yield y, y.requires_grad, gradients(net), w.grad


@program(programs, graphs=True)
def one_of_two_outputs_learns(graphed: Wrap) -> Steps:
    """Uses the value alone in the loss."""
    net = ActorCritic().to(device).eval()
    g = graphed(net, **RECOMPUTE)
    for at in range(10):
        net.zero_grad()
        g(rows(4, 8))[at % 2].square().sum().backward()
        yield gradients(net)


@program(programs, graphs=True)
def two_calls_one_backward(graphed: Wrap) -> Steps:
    """Adds the losses of two calls before it goes back."""
    net = mlp()
    g = graphed(net, **RECOMPUTE)
    for _ in range(8):
        net.zero_grad()
        (g(rows(4, 8)).sum() + g(rows(4, 8)).square().sum()).backward()
        yield gradients(net)


@program(programs, graphs=True)
def gradients_add_up(graphed: Wrap) -> Steps:
    """Takes a step after each third batch; the batches differ in size."""
    net = mlp()
    g, optimizer = graphed(net, **RECOMPUTE), torch.optim.SGD(net.parameters(), 0.1)
    for at in range(15):
        (g(rows(4 - at % 3, 8)).square().mean() / 3).backward()
        yield gradients(net)
        if at % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


@program(programs)
def gradients_are_asked_for(graphed: Wrap) -> Steps:
    """Goes back twice, and keeps adding to the gradients."""
    net = mlp()
    g = graphed(net, **RECOMPUTE)
    for _ in range(8):
        y = g(rows(4, 8)).square().sum()
        y.backward(retain_graph=True)
        y.backward()
        yield gradients(net)


@program(programs)
def dropout_in_training(graphed: Wrap) -> Steps:
    """Trains with dropout: the way back has the mask of the way forth."""
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2)).to(device).train()
    g = graphed(net, dynamic={}, **RECOMPUTE)
    for _ in range(10):
        net.zero_grad()
        y = g(rows(4, 8))
        y.sum().backward()
        yield y, gradients(net)


@program(programs, tolerance=2e-2)
def autocast_in_training(graphed: Wrap) -> Steps:
    """Goes forth under autocast and back outside of it."""
    net = mlp()
    g = graphed(net, **RECOMPUTE)
    for _ in range(10):
        net.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            y = g(rows(4, 8))
        y.float().square().sum().backward()
        yield y, gradients(net)


@program(programs, graphs=False)
def argument_asks_for_gradients(graphed: Wrap) -> Steps:
    """Looks for adversarial inputs by the gradient of the input."""
    g = graphed(mlp().requires_grad_(False))
    x = rows(4, 8)
    for _ in range(10):
        x.requires_grad_()
        (slope,) = torch.autograd.grad(g(x)[:, 0].sum(), x)
        yield slope
        x = (x + 0.1 * slope.sign()).detach()


@program(programs, graphs=False)
def encoder_before_learns(graphed: Wrap) -> Steps:
    """Trains what is before g, through a g that is frozen."""
    encoder, g = nn.Linear(8, 8).to(device), graphed(mlp().requires_grad_(False))
    for _ in range(10):
        encoder.zero_grad()
        g(encoder(rows(4, 8))).square().mean().backward()
        yield gradients(encoder)


@program(programs, graphs=False)
def gradient_penalty(graphed: Wrap) -> Steps:
    """Learns from the gradient of the input, which is differentiated twice."""
    net = mlp()
    g = graphed(net, **RECOMPUTE)
    for _ in range(8):
        x = rows(4, 8).requires_grad_()
        (slope,) = torch.autograd.grad(g(x).sum(), x, create_graph=True)
        net.zero_grad()
        slope.square().sum().backward()
        yield slope, gradients(net)


@program(programs)
def argument_asks_in_vain(graphed: Wrap) -> Steps:
    """Passes a parameter as an argument, without gradients and with them."""
    g, code = graphed(mlp()), nn.Parameter(rows(4, 8))
    for at in range(12):
        with torch.set_grad_enabled(at % 4 == 3):
            y = g(code)
        yield y, y.requires_grad


@program(programs, graphs=True)
def outputs_ask_as_in_eager(graphed: Wrap) -> Steps:
    """Toggles gradients between calls, and detaches."""
    g = graphed(mlp())
    for at in range(14):
        with torch.set_grad_enabled(at % 2 == 0):
            y = g(rows(4, 8))
        yield y.detach(), y.requires_grad, y.is_leaf


@program(programs, graphs=True)
def forward_takes_no_gradients(graphed: Wrap) -> Steps:
    """Decorates the forward with no_grad."""

    class Serving(nn.Linear):
        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    g = graphed(Serving(8, 4).to(device).eval())
    for _ in range(10):
        y = g(rows(4, 8))
        yield y, y.requires_grad


@program(programs)
def forces_of_an_energy(graphed: Wrap) -> Steps:
    """Differentiates an energy inside of the forward, under no_grad outside."""
    net = mlp(out=1).requires_grad_(False)

    def forces(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = net(x)[:, 0]
            return energy.detach(), -torch.autograd.grad(energy.sum(), x)[0]

    g = graphed(forces)
    with torch.no_grad():
        for _ in range(10):
            yield g(rows(4, 8))


@program(programs, graphs=True)
def inference_mode_around_calls(graphed: Wrap) -> Steps:
    """Serves in inference mode."""
    g = graphed(mlp())
    for _ in range(10):
        with torch.inference_mode():
            y = g(rows(4, 8))
        yield y, y.requires_grad


@program(programs)
def inference_mode_now_and_then(graphed: Wrap) -> Steps:
    """Serves in inference mode, without gradients, and with them, in turn."""
    g = graphed(mlp())
    modes = torch.inference_mode, torch.no_grad, torch.enable_grad
    for at in range(18):
        with modes[at % 3]():
            y = g(rows(4, 8))
        yield y.requires_grad, y.clone() + 1


@program(programs, graphs=True, tolerance=2e-2)
def autocast_around_some_calls(graphed: Wrap) -> Steps:
    """Calls under autocast and outside of it, in turn."""
    g = graphed(mlp())
    with torch.no_grad():
        for at in range(16):
            with torch.autocast(device, torch.bfloat16, enabled=at % 4 < 2):
                yield g(rows(4, 8))


@program(programs, graphs=True, tolerance=2e-2)
def autocast_in_the_forward(graphed: Wrap) -> Steps:
    """Enters autocast in the forward, whose first step is left in full precision."""
    first, net = nn.Linear(8, 8).to(device), mlp()

    def forward(x: Tensor) -> Tensor:
        x = first(x)
        with torch.autocast(device, torch.bfloat16):
            return net(x)

    g = graphed(forward)
    with torch.no_grad():
        for _ in range(10):
            yield g(rows(4, 8))


@program(programs, graphs=True)
def dqn_soft_update(graphed: Wrap) -> Steps:
    """Lets the target follow in place after each step."""
    online, target = mlp(), mlp()
    g, optimizer = graphed(target), torch.optim.SGD(online.parameters(), 0.1)
    for _ in range(12):
        x = rows(4, 8)
        with torch.no_grad():
            wanted = g(x).max(1).values
        loss = (online(x)[:, 0] - 0.9 * wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(target.parameters(), online.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
        yield wanted, loss


@program(programs, graphs=True)
def dqn_hard_update(graphed: Wrap) -> Steps:
    """Loads the online network into the target, by the model and by g."""
    online, target = mlp(), mlp()
    g = graphed(target)
    with torch.no_grad():
        for at in range(16):
            for weight in online.parameters():
                weight.add_(torch.randn_like(weight) * 0.1)
            if at % 4 == 3:
                (g if at % 8 == 3 else target).load_state_dict(online.state_dict())
            yield g(rows(4, 8))


@program(programs, graphs=True)
def weights_are_assigned(graphed: Wrap) -> Steps:
    """Loads weights with assign=True, which exchanges the tensors."""
    net = mlp()
    g = graphed(net)
    with torch.no_grad():
        for at in range(16):
            if at in (5, 10):
                net.load_state_dict(mlp().state_dict(), assign=True)
            yield g(rows(4, 8))


@program(programs, graphs=True)
def target_is_a_copy(graphed: Wrap) -> Steps:
    """Copies the network before it is graphed; both serve, and one learns."""
    online = mlp()
    target = graphed(copy.deepcopy(online))
    g = graphed(online)
    with torch.no_grad():
        for _ in range(10):
            x = rows(4, 8)
            yield g(x), target(x)
            online[0].weight.mul_(1.1)


@program(programs, graphs=True)
def average_of_weights(graphed: Wrap) -> Steps:
    """Serves the moving average of a model that learns."""
    net = mlp()
    averaged = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    g = graphed(averaged.eval())
    with torch.no_grad():
        for _ in range(12):
            for weight in net.parameters():
                weight.add_(torch.randn_like(weight) * 0.1)
            averaged.update_parameters(net)
            yield g(rows(4, 8)), averaged.n_averaged


@program(programs, graphs=True)
def weights_are_swapped_by_data(graphed: Wrap) -> Steps:
    """Swaps averaged weights in by .data for evaluation, and the others back."""
    net, shadow = mlp(), [p.data * 0.5 for p in mlp().parameters()]
    g = graphed(net)
    with torch.no_grad():
        for at in range(18):
            if at in (6, 12):
                kept = [p.data for p in net.parameters()]
                for weight, other in zip(net.parameters(), shadow, strict=True):
                    weight.data = other
                shadow = kept
            yield g(rows(4, 8))


@program(programs, graphs=True)
def optimizer_steps_beside(graphed: Wrap) -> Steps:
    """Trains the model itself and evaluates by g, which model.train and model.eval tell apart."""
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2)).to(device)
    g, optimizer = graphed(net), torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(4):
        net.train()
        loss = net(rows(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        net.eval()
        with torch.no_grad():
            for _ in range(4):
                yield loss, g(rows(4, 8))


@program(programs, graphs=True)
def adapter_is_merged(graphed: Wrap) -> Steps:
    """Adds a product of two narrow matrices to a weight in place, and takes it away."""
    net, (a, b) = mlp(), (rows(16, 2), rows(2, 8))
    g = graphed(net)
    with torch.no_grad():
        for at in range(15):
            if at in (5, 10):
                net[0].weight.data.add_(a @ b, alpha=1 if at == 5 else -1)
            yield g(rows(4, 8))


@program(programs, graphs=True)
def head_is_replaced(graphed: Wrap) -> Steps:
    """Puts another head on, whose output is wider."""
    net = mlp()
    g = graphed(net)
    with torch.no_grad():
        for at in range(15):
            if at in (5, 10):
                net[2] = nn.Linear(16, at).to(device)
            yield g(rows(4, 8))


@program(programs)
def weights_are_pruned(graphed: Wrap) -> Steps:
    """Prunes a layer between calls, then makes it permanent."""
    net = mlp()
    g = graphed(net)
    with torch.no_grad():
        for at in range(18):
            if at == 6:
                prune.l1_unstructured(net[0], "weight", 0.5)
            if at == 12:
                prune.remove(net[0], "weight")
            yield g(rows(4, 8))


@program(programs, graphs=True)
def rollout_is_kept(graphed: Wrap) -> Steps:
    """Keeps all outputs of a rollout, changes one in place, and compares at the end."""
    g, kept = graphed(ActorCritic().to(device).eval()), list[Any]()
    with torch.no_grad():
        for at in range(12):
            kept.append(g(rows(4, 8)))
            if at % 3 == 0:
                kept[-1][0].add_(1)
    yield kept


@program(programs)
def distribution_is_returned(graphed: Wrap) -> Steps:
    """Returns an object of torch.distributions."""
    net = mlp()

    def policy(x: Tensor) -> torch.distributions.Categorical:
        return torch.distributions.Categorical(logits=net(x))

    g = graphed(policy)
    with torch.no_grad():
        for _ in range(8):
            found = g(rows(4, 8))
            yield found.logits, found.entropy(), found.sample()


@program(programs)
def action_is_sampled_inside(graphed: Wrap) -> Steps:
    """Samples in the forward from the distribution of logits."""
    net = mlp()

    def act(x: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.distributions.Normal(net(x), 1.0, validate_args=False)
        action = found.sample()
        return action, found.log_prob(action)

    g = graphed(act, dynamic={})
    with torch.no_grad():
        for _ in range(12):
            yield g(rows(4, 8))


@program(programs, graphs=True)
def two_critics(graphed: Wrap) -> Steps:
    """Takes the smaller value of two critics, of observation and action."""

    class Critics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nets = nn.ModuleList(mlp(12, 1) for _ in range(2))

        def forward(self, x: Tensor, action: Tensor) -> Tensor:
            return torch.stack([net(torch.cat([x, action], -1)) for net in self.nets]).min(0).values

    g = graphed(Critics().to(device).eval())
    with torch.no_grad():
        for batch in (4, 4, 3, 4, 8, 4, 5, 8, 2, 1):
            yield g(rows(batch, 8), rows(batch, 4))


@program(programs)
def hook_of_a_parameter(graphed: Wrap) -> Steps:
    """Clips gradients by hooks of the parameters, and counts them."""
    net, seen = mlp(), list[int]()

    def clipped(slope: Tensor) -> Tensor:
        seen.append(1)
        return slope.clamp(-0.1, 0.1)

    for weight in net.parameters():
        weight.register_hook(clipped)
    g = graphed(net, **RECOMPUTE)
    for _ in range(8):
        net.zero_grad()
        g(rows(4, 8)).square().sum().backward()
        yield gradients(net), len(seen)


@program(programs, graphs=True)
def trained_by_value_tested_by_graph(graphed: Wrap) -> Steps:
    """Goes through model and g with the same rows, which agree before and after a step."""
    net = mlp()
    g, optimizer, x = graphed(net), torch.optim.SGD(net.parameters(), 0.5), rows(4, 8)
    for _ in range(10):
        with torch.no_grad():
            yield g(x), torch.allclose(g(x), net(x), atol=1e-4)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("case", programs, ids=lambda p: p.name)
def test_program(case: Program) -> None:
    check(case)


def test_a_lost_gradient_is_an_error() -> None:
    """Without grad="recompute" going back raises GradientError once graphs serve: no gradient is lost in silence."""
    net = mlp()
    g, errors = cgplan.graphed(net), list[Any]()
    for _ in range(8):
        net.zero_grad()
        x = rows(4, 8)
        y = g(x)
        assert y.requires_grad
        wanted = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
        errors.append(attempt(y.square().sum().backward))
        if errors[-1] is None:
            for found, grad in zip(gradients(net), wanted, strict=True):
                torch.testing.assert_close(found, grad)
        else:
            assert all(grad is None for grad in gradients(net))
    assert errors[:2] == [None, None]
    assert errors[-1] == "GradientError"
    assert issubclass(cgplan.GradientError, cgplan.CgplanError)
