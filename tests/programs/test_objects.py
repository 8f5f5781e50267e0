"""Ways to hold and call a graphed model: decorators, methods, copies, threads, contexts, errors, and the end of it."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import io
import pickle
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from programs.harness import Program, check, program
from programs.parts import Steps, Wrap, attempt, device, mlp, rows
from torch import Tensor, nn

import cgplan

programs: list[Program] = []


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Found:
    y: Tensor
    count: int
    name: str = "found"


class Net(nn.Module):
    """A module whose parts are called in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(8, 4), 1.0

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: Tensor | None = None) -> Tensor:
        y = self.inner(x) * scale * self.scale
        return y if shift is None else y + shift

    def encode(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


def net() -> Net:
    return Net().to(device).eval()


SETTINGS = SimpleNamespace(temperature=1.0, calls=0)
MEAN = torch.zeros(8, device=device)


class Agent:
    """No module: its methods call each other, and read and write globals and its class."""

    gain = 1.0

    def __init__(self) -> None:
        self.net = mlp(8, 4)

    def temperature(self) -> float:
        return SETTINGS.temperature * self.gain

    def act(self, x: Tensor) -> Tensor:
        return self.net(x) / self.temperature()

    def normalised(self, x: Tensor) -> Tensor:
        MEAN.lerp_(x.mean(0), 0.1)
        return x - MEAN

    def act_on_normalised(self, x: Tensor) -> Tensor:
        return self.net(self.normalised(x))

    def count(self) -> None:
        SETTINGS.calls += 1

    def act_and_count(self, x: Tensor) -> Tensor:
        self.count()
        return self.net(x)


@program(programs, graphs=True)
def methods_of_an_agent(graphed: Wrap) -> Steps:
    SETTINGS.temperature, Agent.gain = 1.0, 1.0
    agent = Agent()
    bound, inside = graphed(agent.act), graphed(lambda x: agent.act(x))
    with torch.no_grad():
        for step in range(32):
            if step == 9:
                SETTINGS.temperature = 2.0
            if step == 21:
                Agent.gain = 3.0
            x = rows(4, 8)
            yield bound(x)
            yield inside(x)


@program(programs, graphs=True)
def a_mean_in_a_global(graphed: Wrap) -> Steps:
    MEAN.zero_()
    g = graphed(Agent().act_on_normalised)
    with torch.no_grad():
        for _ in range(12):
            yield g(rows(4, 8))
            yield MEAN.clone()


@program(programs, graphs=False)
def a_count_in_a_global(graphed: Wrap) -> Steps:
    SETTINGS.calls = 0
    g = graphed(Agent().act_and_count)
    with torch.no_grad():
        for _ in range(12):
            yield g(rows(4, 8))
            yield SETTINGS.calls


@program(programs, graphs=True)
def decorated_function(graphed: Wrap) -> Steps:
    """Decorates a function."""

    @graphed
    def policy(x: Tensor, temperature: float = 1.0) -> Tensor:
        return (x / temperature).softmax(-1)

    for batch in (4, 4, 3, 4, 8, 5, 4, 3, 8, 4):
        yield policy(rows(batch, 3)), policy.__name__


@program(programs, graphs=True)
def decorated_with_options(graphed: Wrap) -> Steps:
    """Decorates a function, with options."""

    @graphed(sizes=[2, 4])
    def policy(x: Tensor) -> dict[str, Tensor]:
        return {"mean": x.mean(-1), "most": x.amax(-1)}

    for batch in (4, 4, 3, 4, 2, 1, 4, 9, 3, 4):
        yield policy(rows(batch, 3))


@program(programs)
def decorated_method(graphed: Wrap) -> Steps:
    """Decorates a method in the body of a class; two objects have weights of their own."""

    class Agent(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.net, self.scale = mlp(), scale

        @graphed
        def act(self, x: Tensor) -> Tensor:
            return self.net(x) * self.scale

        def forward(self, x: Tensor) -> Tensor:
            return self.act(x) + 1

    agents = Agent(1.0), Agent(3.0)
    with torch.no_grad():
        for at in range(16):
            yield agents[at % 2](rows(4, 8)), agents[at % 2].act(rows(4, 8))
            if at == 9:
                agents[1].scale = 5.0


@program(programs)
def decorated_method_of_a_plain_class(graphed: Wrap) -> Steps:
    """Decorates a method of a class that is no module, with options, and overrides it below."""

    class Filter:
        def __init__(self, weight: Tensor) -> None:
            self.weight = weight

        @graphed(dynamic={})
        def run(self, x: Tensor, power: int = 1) -> Tensor:
            """Weighs rows."""
            return (x * self.weight) ** power

    class Smooth(Filter):
        def run(self, x: Tensor, power: int = 1) -> Tensor:
            return super().run(x, power).mean(0)

    filters = Filter(rows(8)), Filter(rows(8)), Smooth(rows(8))
    for at in range(24):
        one = filters[at % 3]
        yield (
            one.run(rows(4, 8)),
            one.run(rows(4, 8), power=2),
            Filter.run(one, rows(4, 8)),
            Filter.run.__doc__,
        )
        if at == 12:
            filters[0].weight = rows(8)


@program(programs)
def decorated_method_that_counts(graphed: Wrap) -> Steps:
    """Decorates a method that counts on its object."""

    class Agent:
        def __init__(self) -> None:
            self.net, self.steps = mlp(), 0

        @graphed
        def act(self, x: Tensor) -> Tensor:
            self.steps += 1
            return self.net(x) * self.steps

    agents = Agent(), Agent()
    with torch.no_grad():
        for at in range(14):
            yield agents[at % 2].act(rows(4, 8)), agents[0].steps, agents[1].steps


@program(programs, graphs=True)
def method_is_exchanged(graphed: Wrap) -> Steps:
    """Exchanges a method of a model, beside its forward."""
    model = net()
    model.encode = graphed(model.encode)
    with torch.no_grad():
        for at in range(14):
            yield model.encode(rows(4, 8)), model(rows(4, 8))
            if at == 6:
                model.inner.weight.mul_(2)


@program(programs, graphs=True)
def partial_and_lambda(graphed: Wrap) -> Steps:
    """Graphs a partial of a model, and a lambda."""
    model = net()
    g, other = graphed(functools.partial(model, scale=2.0)), graphed(lambda x: model(x).relu())
    with torch.no_grad():
        for batch in (4, 3, 4, 4, 2, 4, 3, 4, 4):
            yield g(rows(batch, 8)), other(rows(batch, 8))


@program(programs, graphs=True)
def callable_object(graphed: Wrap) -> Steps:
    """Graphs an object with __call__, whose attribute is set between calls."""

    class Scaler:
        factor = 2.0

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.factor

    scaler = Scaler()
    g = graphed(scaler)
    for at in range(14):
        if at == 7:
            scaler.factor = 3.0
        yield g(rows(4, 8))


@program(programs, graphs=True)
def by_position_and_by_name(graphed: Wrap) -> Steps:
    """Passes arguments by position, by name, and in another order."""
    g = graphed(net())
    with torch.no_grad():
        for _ in range(4):
            yield g(rows(4, 8), 2.0, shift=rows(4, 4))
            yield g(x=rows(4, 8), shift=rows(4, 4), scale=2.0)
            yield g(shift=rows(4, 4), x=rows(4, 8))
            yield g(rows(4, 8))


@program(programs)
def any_arguments(graphed: Wrap) -> Steps:
    """Takes any number of tensors, and any names."""

    def add(*tensors: Tensor, scale: float = 1.0, **named: Tensor) -> Tensor:
        return (sum(tensors) + sum(named.values())) * scale

    g = graphed(add)
    for at in range(12):
        yield g(*[rows(4, 3) for _ in range(1 + at % 2)], extra=rows(4, 3), scale=0.5)


@program(programs)
def outputs_of_many_forms(graphed: Wrap) -> Steps:
    """Returns a dataclass, a named tuple, numbers, text and None."""
    layer = nn.Linear(8, 4).to(device)

    def forward(x: Tensor) -> dict[str, Any]:
        y = layer(x)
        return {
            "found": Found(y, 3),
            "pair": Pair(y + 1, y + 2),
            "none": None,
            "text": ("a", 1.5),
            "shape": y.shape,
        }

    g = graphed(forward)
    with torch.no_grad():
        for batch in (4, 4, 4, 3, 4, 3, 4, 5, 3):
            found = g(rows(batch, 8))
            yield (
                found,
                type(found["found"]).__name__,
                type(found["pair"]).__name__,
                found["found"].name,
            )


@program(programs)
def generator_is_returned(graphed: Wrap) -> Steps:
    """Has a forward that yields layer by layer."""
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)).to(device)

    def forward(x: Tensor) -> Iterator[Tensor]:
        for layer in layers:
            x = layer(x)
            yield x

    g = graphed(forward)
    with torch.no_grad():
        for _ in range(8):
            yield list(g(rows(4, 8)))


@program(programs)
def coroutine_of_a_forward(graphed: Wrap) -> Steps:
    """Graphs a coroutine."""
    model = net()

    async def forward(x: Tensor) -> Tensor:
        await asyncio.sleep(0)
        return model(x)

    g = graphed(forward)
    with torch.no_grad():
        for _ in range(8):
            yield asyncio.run(g(rows(4, 8)))


@program(programs, graphs=True)
def served_by_asyncio(graphed: Wrap) -> Steps:
    """Calls g in several tasks of one loop."""
    g, batches = graphed(net()), [rows(1 + at % 4, 8) for at in range(12)]

    async def answer(x: Tensor) -> Tensor:
        await asyncio.sleep(0)
        with torch.no_grad():
            y = g(x)
        await asyncio.sleep(0)
        return y

    async def all_answers() -> list[Tensor]:
        return list(await asyncio.gather(*map(answer, batches)))

    for _ in range(2):
        yield asyncio.run(all_answers())


@program(programs)
def four_threads(graphed: Wrap) -> Steps:
    """Calls g by four threads at once, with other inputs."""
    g, batches = graphed(net()), [rows(1 + at % 4, 8) for at in range(24)]

    def answer(x: Tensor) -> Tensor:
        with torch.no_grad():
            return g(x)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            yield list(pool.map(answer, batches))


@program(programs)
def threads_after_warm_up(graphed: Wrap) -> Steps:
    """Has graphs captured by one thread, and calls them by others."""
    g, batches = graphed(mlp(), dynamic={}), [rows(4, 8) for _ in range(16)]

    def answer(x: Tensor) -> Tensor:
        with torch.no_grad():
            return g(x).cpu()

    yield [answer(x) for x in batches[:5]]
    with ThreadPoolExecutor(4) as pool:
        yield list(pool.map(answer, batches))


@program(programs, graphs=True)
def pickled(graphed: Wrap) -> Steps:
    """Pickles g and goes on with what comes back, which has weights of its own."""
    g = graphed(mlp())
    with torch.no_grad():
        for _ in range(5):
            yield g(rows(4, 8))
        other = pickle.loads(pickle.dumps(g))
        for at in range(10):
            x = rows(4, 8)
            yield g(x), other(x)
            if at == 5:
                g.get_parameter("0.weight").mul_(2)


@program(programs, graphs=True)
def copied(graphed: Wrap) -> Steps:
    """Copies g after graphs were captured; each goes its way."""
    g = graphed(mlp())
    with torch.no_grad():
        for _ in range(5):
            yield g(rows(4, 8))
        other = copy.deepcopy(g)
        for at in range(12):
            x = rows(4, 8)
            yield g(x), other(x)
            if at == 3:
                other.get_parameter("0.weight").zero_()
            if at == 7:
                g.get_parameter("0.bias").add_(1)


@program(programs, graphs=True)
def state_of_g(graphed: Wrap) -> Steps:
    """Saves the state of g, and loads it into another g."""
    g, other = graphed(mlp()), graphed(mlp())
    with torch.no_grad():
        for at in range(14):
            x = rows(4, 8)
            yield g(x), other(x), list(g.state_dict()), sum(p.numel() for p in g.parameters())
            if at == 6:
                saved = io.BytesIO()
                torch.save(g.state_dict(), saved)
                saved.seek(0)
                yield str(other.load_state_dict(torch.load(saved)))


@program(programs, graphs=True)
def methods_of_modules(graphed: Wrap) -> Steps:
    """Moves g, switches its mode, applies a function, and asks for its parts."""
    g = graphed(net())
    with torch.no_grad():
        for at in range(20):
            if at == 5:
                yield (
                    g.to(device).double().float().training,
                    g.eval().training,
                    isinstance(g, nn.Module),
                )
            if at == 10:
                g.apply(lambda module: isinstance(module, nn.Linear) and module.weight.fill_(0.1))
                yield [name for name, _ in g.named_parameters()], g.inner.weight, g.scale
            if at == 14:
                g.requires_grad_(False)
                yield [p.requires_grad for p in g.parameters()], g.encode(rows(2, 8))
            yield g(rows(4, 8))


@program(programs, graphs=True)
def part_of_a_larger_model(graphed: Wrap) -> Steps:
    """Puts g into a model, which is then switched and moved as a whole."""
    model = nn.Sequential(graphed(mlp(8, 8)), nn.Dropout(0.0), nn.Linear(8, 2).to(device))
    with torch.no_grad():
        for at in range(16):
            if at % 8 == 0:
                model.train(at == 0)
            yield model(rows(4, 8)), len(list(model.parameters()))


@program(programs)
def graphed_within_graphed(graphed: Wrap) -> Steps:
    """Graphs a model that holds a graphed part."""
    inner = graphed(mlp(8, 8))
    g = graphed(nn.Sequential(nn.Linear(8, 8).to(device), inner).eval())
    with torch.no_grad():
        for at in range(12):
            x = rows(4, 8)
            yield g(x), inner(x)
            if at == 6:
                inner.get_parameter("0.weight").mul_(2)


@program(programs)
def graphed_twice(graphed: Wrap) -> Steps:
    """Graphs one model twice, with other options, and calls the model itself between."""
    model = mlp()
    g, other = graphed(model), graphed(model, dynamic={})
    with torch.no_grad():
        for at in range(12):
            x = rows(4, 8)
            yield g(x), other(x), model(x)
            if at == 6:
                model[0].weight.mul_(2)


@program(programs)
def called_with_other_weights(graphed: Wrap) -> Steps:
    """Calls g by functional_call with other weights, and with its own between."""
    model = mlp()
    g, other = graphed(model), {name: p.detach() * 2 for name, p in model.named_parameters()}
    with torch.no_grad():
        for at in range(14):
            x = rows(4, 8)
            yield torch.func.functional_call(g, other, (x,)) if at % 3 == 2 else g(x), model(x)


@program(programs)
def gradient_by_func(graphed: Wrap) -> Steps:
    """Differentiates by torch.func with respect to weights that are passed."""
    g = graphed(mlp())
    params = {name: p.detach() for name, p in g.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(g, params, (x,)).square().mean()

    for _ in range(8):
        x = rows(4, 8)
        yield torch.func.grad(loss)(params, x)
        with torch.no_grad():
            yield g(x)


@program(programs)
def mapped_from_outside(graphed: Wrap) -> Steps:
    """Maps g over a further dimension by vmap, after plain calls."""
    g = graphed(mlp())
    with torch.no_grad():
        for at in range(10):
            yield torch.vmap(g)(rows(3, 4, 8)) if at % 3 == 2 else g(rows(4, 8))


@program(programs, graphs=True)
def default_device(graphed: Wrap) -> Steps:
    """Calls under a default device, which the forward takes for what it makes."""
    g = graphed(lambda x: x + torch.ones(x.shape[-1]) / 3)
    with torch.device(device):
        for _ in range(10):
            yield g(torch.randn(4, 8))


@program(programs)
def default_dtype_changes(graphed: Wrap) -> Steps:
    """Sets another default dtype, which the forward takes for what it makes, and sets it back."""
    g = graphed(lambda x: x + torch.ones(x.shape[-1], device=x.device) / 3)
    for at in range(15):
        x = rows(4, 8)
        torch.set_default_dtype(torch.float64 if at >= 10 else torch.float32)
        try:
            yield g(x)
        finally:
            torch.set_default_dtype(torch.float32)


@program(programs)
def errors_are_the_models(graphed: Wrap) -> Steps:
    """Passes a wrong width, a wrong dtype, too many arguments, and none, between right calls."""
    g = graphed(net())
    with torch.no_grad():
        for _ in range(4):
            yield attempt(g, rows(4, 8))
            yield attempt(g, rows(4, 7)), attempt(g, rows(8)), attempt(g, rows(4, 8).long())
            yield (
                attempt(g),
                attempt(g, rows(4, 8), 1.0, 2.0),
                attempt(g, rows(4, 8), what=1),
                attempt(g, None),
            )


@program(programs)
def errors_of_a_check_in_the_model(graphed: Wrap) -> Steps:
    """Has a forward that refuses some batches."""

    def forward(x: Tensor, kind: str) -> Tensor:
        if kind not in ("a", "b"):
            raise KeyError(kind)
        if x.shape[0] > 4:
            raise ValueError("too many rows")
        return x * 2

    g = graphed(forward)
    for at in range(16):
        yield attempt(g, rows(2 + at % 4, 8), "abc"[at % 3])


@program(programs)
def fails_once(graphed: Wrap) -> Steps:
    """Fails in the first call, as a server that is not there, and then works."""

    class Remote(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.ready = mlp(), False

        def forward(self, x: Tensor) -> Tensor:
            if not self.ready:
                self.ready = True
                raise ConnectionError("not ready")
            return self.net(x)

    model = Remote().to(device).eval()
    g = graphed(model)
    with torch.no_grad():
        for at in range(14):
            if at == 8:
                model.ready = False
            yield attempt(g, rows(4, 8)), model.ready


@program(programs)
def fails_at_the_third_call(graphed: Wrap) -> Steps:
    """Fails in each third call, by a count of its own."""

    class Flaky(nn.Module):
        at = 0

        def forward(self, x: Tensor) -> Tensor:
            self.at += 1
            if self.at % 3 == 0:
                raise RuntimeError("again")
            return x * self.at

    model = Flaky().eval()
    g = graphed(model)
    for _ in range(12):
        yield attempt(g, rows(4, 8)), model.at


@program(programs, graphs=True)
def models_share_weights(graphed: Wrap) -> Steps:
    """Shares an embedding between two models; one writes it, and binds another later."""
    one, two = mlp(), mlp()
    two[0] = one[0]
    g, other = graphed(one), graphed(two)
    with torch.no_grad():
        for at in range(20):
            if at == 6:
                one[0].weight.mul_(2)
            if at == 12:
                one[0].weight = nn.Parameter(torch.ones_like(one[0].weight))
            x = rows(4, 8)
            yield g(x), other(x)


@program(programs, graphs=True)
def many_models_in_turn(graphed: Wrap) -> Steps:
    """Serves several models in turn, each through its g, and drops one."""
    served = {name: graphed(mlp()) for name in "abc"}
    with torch.no_grad():
        for at in range(24):
            if at == 12:
                del served["b"]
                gc.collect()
            name = list(served)[at % len(served)]
            yield name, served[name](rows(4, 8))


@program(programs, graphs=True)
def attributes_through_g(graphed: Wrap) -> Steps:
    """Sets, reads and replaces attributes of the model through g."""
    g = graphed(net())
    with torch.no_grad():
        for at in range(20):
            if at == 5:
                g.scale = 2.0
            if at == 10:
                g.inner = nn.Linear(8, 3).to(device)
            yield g(rows(4, 8)), g.scale, hasattr(g, "nothing"), attempt(getattr, g, "nothing")


@program(programs, graphs=True)
def hooks_on_g(graphed: Wrap) -> Steps:
    """Registers a hook on g, which runs in each call, and removes it."""
    g, seen, handle = graphed(net()), list[int](), None
    with torch.no_grad():
        for at in range(18):
            if at == 6:
                handle = g.register_forward_hook(
                    lambda module, args, output: seen.append(len(args))
                )
            if at == 12 and handle is not None:
                handle.remove()
            yield g(rows(4, 8)), len(seen)


@program(programs)
def forward_is_called_by_name(graphed: Wrap) -> Steps:
    """Calls g.forward, as some libraries do."""
    g = graphed(net())
    with torch.no_grad():
        for _ in range(10):
            yield g.forward(rows(4, 8)), g(rows(4, 8))


@program(programs)
def compiled_around(graphed: Wrap) -> Steps:
    """Compiles a function that calls g."""
    g = graphed(mlp(), dynamic={})

    @torch.compile(backend="eager", dynamic=False)
    def step(x: Tensor) -> Tensor:
        return g(x) + 1

    with torch.no_grad():
        for _ in range(8):
            yield step(rows(4, 8))


@program(programs, graphs=True)
def borrowed_outputs(graphed: Wrap) -> Steps:
    """Asks for outputs that are valid until the next call, and copies them at once."""
    g = graphed(net(), outputs="borrow")
    with torch.no_grad():
        for batch in (4, 4, 3, 4, 2, 4, 4, 3, 4):
            yield g(rows(batch, 8)).clone()


@program(programs)
def example_is_given(graphed: Wrap) -> Steps:
    """Gives an example, so that the first call finds graphs."""
    model = net()
    g = graphed(model, example=(torch.zeros(4, 8, device=device),), sizes=[2, 4])
    with torch.no_grad():
        for batch in (4, 4, 3, 1, 2, 4, 3, 4, 6):
            yield g(rows(batch, 8))


class Settings:
    """An object of the user's that a forward reads."""

    def __init__(self, scale: float) -> None:
        self.scale, self.act, self.names = scale, torch.relu, {1}

    def reset(self) -> None:
        self.names = {1}


@program(programs)
def two_settings_of_one_class(graphed: Wrap) -> Steps:
    """Passes two objects of one class, and changes each: a number, a function, what a set holds."""

    def forward(x: Tensor, a: Settings, b: Settings) -> Tensor:
        return b.act(x * a.scale + b.scale) * (2 if 1 in a.names else 3)

    a, b, g = Settings(1.0), Settings(2.0), graphed(forward)
    for at in range(24):
        if at == 6:
            a.scale = 3.0
        if at == 12:
            b.act = torch.tanh
        if at == 18:
            a.names.remove(1)
        yield g(rows(4, 8), a, b)


@program(programs, graphs=True)
def a_hook_of_all_modules(graphed: Wrap) -> Steps:
    """Has a global hook from the start, and takes it away."""
    net = mlp()
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, given, output: output * 2
    )
    try:
        g = graphed(net)
        for at in range(16):
            if at == 8:
                handle.remove()
            yield g(rows(4, 8))
    finally:
        handle.remove()


@program(programs)
def two_views_of_one_storage(graphed: Wrap) -> Steps:
    """Keeps sums of batches in two rows of one tensor."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = torch.zeros(2, 8, device=device)
            self.first, self.second = self.both[0], self.both[1]

        def forward(self, x: Tensor) -> Tensor:
            self.first.add_(0)
            self.second.add_(x.sum(0))
            return x * 2

    net = Sums()
    g = graphed(net)
    for _ in range(12):
        yield g(rows(3, 8)), net.both


@program(programs)
def a_cache_by_positions_beside_another_size(graphed: Wrap) -> Steps:
    """Writes rows of a cache at positions, where two sizes vary, so padding would be position 0."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = torch.zeros(8, 8, device=device)

        def forward(self, v: Tensor, at: Tensor, other: Tensor) -> Tensor:
            self.cache.index_copy_(0, at, v)
            return v * 2 + other.sum()

    net = Cached()
    g = graphed(net, dynamic={"v": {0: "rows"}, "at": {0: "rows"}, "other": {0: "more"}})
    at = torch.tensor([2, 3, 4], device=device)
    for _ in range(12):
        yield g(rows(3, 8), at, rows(5)), net.cache


def test_whole_numbers_are_compared_exactly() -> None:
    """float64 holds not all of int64."""
    scale = [2**60]
    runner = cgplan.capture(
        lambda x: x + scale[0],
        {"x": cgplan.Input(shape=("num_tokens",), dtype="int64", pad=0)},
        compilation={"cudagraph_capture_sizes": [4], "verify": "always"},
        device=str(device),
    )
    x = torch.zeros(4, dtype=torch.int64, device=device)
    runner(x=x)
    scale[0] += 1
    with pytest.raises(cgplan.NumbersError):
        runner(x=x)


def test_gradients_of_gradients_are_refused() -> None:
    g = cgplan.graphed(mlp(), grad="recompute")
    for _ in range(4):
        out = g(rows(4, 8)).sum()
    with pytest.raises(cgplan.GradientError, match="create_graph"):
        out.backward(create_graph=True)


@pytest.mark.parametrize("case", programs, ids=lambda p: p.name)
def test_program(case: Program) -> None:
    check(case)


def served(model: Any, *args: Any) -> Any:
    """A graphed model after eight calls."""
    g = cgplan.graphed(model)
    with torch.no_grad():
        for _ in range(8):
            g(*(args or (rows(4, 8),)))
    return g


def test_a_model_is_freed_with_its_graphs() -> None:
    """A user deletes model and g: both are gone, and the weights with them."""
    model = mlp()
    g = served(model)
    gone = [weakref.ref(thing) for thing in (model, model[0].weight, g)]
    del model, g
    gc.collect()
    assert [ref() is None for ref in gone] == [True] * 3


def test_a_model_outlives_its_graphs() -> None:
    """A user deletes g alone, and goes on with the model."""
    model = mlp()
    x = rows(4, 8)
    with torch.no_grad():
        wanted = model(x)
        gone = weakref.ref(served(model))
        gc.collect()
        assert gone() is None
        torch.testing.assert_close(model(x), wanted)


def test_graphs_of_a_method_are_freed_with_its_object() -> None:
    """A user makes and drops objects whose method is decorated in the body of the class."""

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        @cgplan.graphed
        def act(self, x: Tensor) -> Tensor:
            return self.net(x)

    gone = []
    with torch.no_grad():
        for _ in range(3):
            agent = Agent()
            for _ in range(8):
                x = rows(4, 8)
                torch.testing.assert_close(agent.act(x), agent.net(x))
            gone += [weakref.ref(agent), weakref.ref(agent.net[0].weight)]
    del agent
    gc.collect()
    assert [ref() is None for ref in gone] == [True] * 6


def test_objects_of_requests_are_not_kept() -> None:
    """A user makes a new object for each request: g keeps no more than a few alive."""

    class Request:
        def __init__(self) -> None:
            self.scale, self.shift = 2.0, rows(8)

    def forward(x: Tensor, request: Request) -> Tensor:
        return x * request.scale + request.shift

    g, gone = cgplan.graphed(forward), list[Any]()
    for _ in range(8):
        request = Request()
        for _ in range(2):
            x = rows(4, 8)
            torch.testing.assert_close(g(x, request), forward(x, request))
        gone.append(weakref.ref(request))
    del request
    gc.collect()
    assert sum(ref() is not None for ref in gone) <= 2


def test_a_replaced_weight_is_freed() -> None:
    """A user replaces a layer: after the next calls the old weights are gone."""
    model = mlp()
    g = served(model)
    gone = weakref.ref(model[0].weight)
    model[0] = nn.Linear(8, 16).to(device)
    with torch.no_grad():
        for _ in range(6):
            x = rows(4, 8)
            torch.testing.assert_close(g(x), model(x))
    gc.collect()
    assert gone() is None
