"""What forwards are made of: experts, noise, quantised and compiled parts, norms, metrics, and state of Python."""

from __future__ import annotations

import itertools
import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from programs.harness import Program, check, program
from programs.parts import Steps, Wrap, device, ids, mlp, rows
from torch import Tensor, nn
from torch.nn import functional as F

programs: list[Program] = []
SIZES = (4, 4, 3, 4, 4, 5, 3, 4, 4, 5, 3, 4)


def calls(g: Any, sizes: tuple[int, ...] = SIZES, wide: int = 8) -> Steps:
    """Calls without gradients, of batches of these sizes."""
    with torch.no_grad():
        for batch in sizes:
            yield g(rows(batch, wide))


class Experts(nn.Module):
    """A router and four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = (
            nn.Linear(8, 4),
            nn.ModuleList(nn.Linear(8, 8) for _ in range(4)),
        )


@program(programs, graphs=True)
def experts_all_computed(graphed: Wrap) -> Steps:
    """Routes by topk, and computes all experts for all rows."""

    class Dense(Experts):
        def forward(self, x: Tensor) -> Tensor:
            top, at = self.router(x).softmax(-1).topk(2)
            gates = torch.zeros(x.shape[0], 4, device=x.device).scatter(1, at, top)
            return (torch.stack([expert(x) for expert in self.experts], 1) * gates[..., None]).sum(
                1
            )

    yield from calls(graphed(Dense().to(device).eval()))


@program(programs)
def experts_by_their_rows(graphed: Wrap) -> Steps:
    """Routes by the indices of each expert's rows."""

    class Sparse(Experts):
        def forward(self, x: Tensor) -> Tensor:
            choice, y = self.router(x).argmax(-1), torch.zeros_like(x)
            for at, expert in enumerate(self.experts):
                mine = (choice == at).nonzero()[:, 0]
                y.index_add_(0, mine, expert(x[mine]))
            return y

    yield from calls(graphed(Sparse().to(device).eval()))


@program(programs)
def experts_by_masks(graphed: Wrap) -> Steps:
    """Routes by masks, skips experts without rows, and counts their use."""

    class Sparse(Experts):
        used: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("used", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            choice, y = self.router(x).argmax(-1), x.clone()
            for at, expert in enumerate(self.experts):
                if (mine := choice == at).any():
                    y[mine] = expert(x[mine])
                    self.used[at] += mine.sum()
            return y

    net = Sparse().to(device).eval()
    for y in calls(graphed(net)):
        yield y, net.used


@program(programs)
def load_of_experts(graphed: Wrap) -> Steps:
    """Counts on the device how often each expert is chosen, by batches of other sizes."""

    class Counting(Experts):
        load: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("load", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            chances = self.router(x).softmax(-1)
            self.load += F.one_hot(chances.argmax(-1), 4).sum(0)
            return chances

    net = Counting().to(device).eval()
    for y in calls(graphed(net)):
        yield y, net.load


@program(programs, graphs=True)
def dropout_is_off(graphed: Wrap) -> Steps:
    """Serves a model with dropout in evaluation mode."""
    yield from calls(graphed(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(device).eval()))


@program(programs)
def dropout_is_on(graphed: Wrap) -> Steps:
    """Calls it in training mode; the numbers are those of eager mode."""
    yield from calls(
        graphed(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(device), dynamic={})
    )


@program(programs)
def dropout_of_a_part(graphed: Wrap) -> Steps:
    """Switches dropout on in a part, for a Monte Carlo estimate, and off again."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(device).eval()
    g = graphed(net, dynamic={})
    for on in (False, True, False):
        net[1].train(on)
        yield from calls(g, (4,) * 6)


@program(programs)
def noise_of_the_default_generator(graphed: Wrap) -> Steps:
    """Adds noise in the forward, and draws numbers between the calls."""
    yield from calls(graphed(lambda x: x + torch.randn_like(x), dynamic={}), (4,) * 12)


@program(programs)
def noise_of_a_generator(graphed: Wrap) -> Steps:
    """Adds noise of a generator that the model holds, and seeds it again midway."""

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator(device).manual_seed(3)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(x.shape, generator=self.generator, device=x.device)

    net = Noisy().eval()
    g = graphed(net, dynamic={})
    for at, y in enumerate(calls(g, (4,) * 14)):
        yield y
        if at == 6:
            net.generator.manual_seed(3)


@program(programs)
def seed_in_the_forward(graphed: Wrap) -> Steps:
    """Seeds torch in the forward, so that the noise is always the same."""

    def forward(x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return x + torch.randn(x.shape, device=x.device)

    g = graphed(forward, dynamic={})
    for _ in range(10):
        yield g(torch.ones(4, 8, device=device)), torch.rand(2)


@program(programs)
def seed_before_each_call(graphed: Wrap) -> Steps:
    """Seeds torch before each call."""
    g = graphed(lambda x: F.gumbel_softmax(x), dynamic={})
    for at in range(12):
        x = rows(4, 8)
        torch.manual_seed(at % 3)
        yield g(x)


@program(programs, graphs=False)
def random_of_python(graphed: Wrap) -> Steps:
    """Draws from Python's generator in the forward, and outside."""
    g = graphed(lambda x: x * random.random())
    for y in calls(g):
        yield y, random.random()


@program(programs, graphs=False)
def random_of_numpy(graphed: Wrap) -> Steps:
    """Drops a layer by NumPy's generator, and draws outside."""
    net = mlp(8, 8)
    g = graphed(lambda x: net(x) if np.random.rand() > 0.3 else x * 2)
    for y in calls(g):
        yield y, float(np.random.rand())


@program(programs)
def quantised_layers(graphed: Wrap) -> Steps:
    """Serves a model with dynamically quantised layers, on the CPU."""
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    g = graphed(torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8))
    with torch.no_grad():
        for batch in SIZES:
            yield g(torch.randn(batch, 8))


@program(programs)
def compiled_part(graphed: Wrap) -> Steps:
    """Has a part that torch.compile runs."""
    net = mlp(8, 8)
    net[0] = torch.compile(net[0], backend="eager", dynamic=False)
    yield from calls(graphed(net, dynamic={}), (4,) * 9)


@program(programs)
def scripted(graphed: Wrap) -> Steps:
    """Graphs a scripted model."""
    yield from calls(graphed(torch.jit.script(mlp())))


@program(programs)
def traced_and_frozen(graphed: Wrap) -> Steps:
    """Graphs a traced and frozen model."""
    yield from calls(
        graphed(torch.jit.freeze(torch.jit.trace(mlp().requires_grad_(False), rows(4, 8))))
    )


@program(programs)
def lazy_layer(graphed: Wrap) -> Steps:
    """Graphs a model whose first layer takes its width from the first call."""
    net = nn.Sequential(nn.LazyLinear(6), nn.Tanh()).to(device).eval()
    g = graphed(net)
    for y in calls(g):
        yield y, list(net[0].weight.shape), type(net[0]).__name__


@program(programs)
def mapped_over_rows(graphed: Wrap) -> Steps:
    """Maps a function over rows by vmap."""
    net = mlp()
    yield from calls(graphed(torch.vmap(lambda row: net(row) * row.sum()), dynamic={}), (4,) * 9)


@program(programs)
def jacobians(graphed: Wrap) -> Steps:
    """Returns the jacobian for each row."""
    net = mlp(8, 2).requires_grad_(False)
    yield from calls(graphed(torch.vmap(torch.func.jacrev(net)), dynamic={}), (4,) * 9)


@program(programs, graphs=True)
def ensemble_of_stacked_models(graphed: Wrap) -> Steps:
    """Runs stacked weights of several models by functional_call."""
    nets = [mlp() for _ in range(3)]
    params, buffers = torch.func.stack_module_state(nets)

    def ensemble(x: Tensor) -> Tensor:
        return torch.vmap(lambda p, b: torch.func.functional_call(nets[0], (p, b), (x,)))(
            params, buffers
        )

    yield from calls(graphed(ensemble, dynamic={}), (4,) * 9)


@program(programs, graphs=True)
def normed_weights(graphed: Wrap) -> Steps:
    """Parametrises a weight by its norm, which is changed midway."""
    net = (
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.ReLU())
        .to(device)
        .eval()
    )
    for at, y in enumerate(calls(graphed(net), SIZES + (4,) * 5)):
        yield y
        if at == 10:
            with torch.no_grad():
                net[0].parametrizations.weight.original0.mul_(2)


@program(programs)
def normed_weights_of_old(graphed: Wrap) -> Steps:
    """Uses the hook that binds a weight before each call."""

    class Normed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.scale = nn.Parameter(torch.ones(()))
            raw = self.weight
            del self._parameters["weight"]
            self.raw = raw
            self.register_forward_pre_hook(
                lambda m, _: setattr(m, "weight", m.raw / m.raw.norm() * m.scale)
            )

    net = Normed().to(device).eval()
    for at, y in enumerate(calls(graphed(net))):
        yield y, net.weight
        if at == 6:
            with torch.no_grad():
                net.scale.mul_(2)


@program(programs)
def spectral_norm(graphed: Wrap) -> Steps:
    """Bounds a weight by its largest singular value; training mode goes on with the estimate."""
    net = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)).to(device)
    g = graphed(net)
    for on in (True, False):
        net.train(on)
        for y in calls(g):
            yield y, net.state_dict()


@program(programs, graphs=True)
def complex_inside(graphed: Wrap) -> Steps:
    """Filters by a Fourier transform."""
    window = rows(5).exp()
    yield from calls(graphed(lambda x: torch.fft.irfft(torch.fft.rfft(x) * window, n=8)))


@program(programs)
def complex_inputs(graphed: Wrap) -> Steps:
    """Passes complex numbers to complex weights."""
    net = nn.Linear(8, 4, dtype=torch.complex64).to(device).eval()
    g = graphed(net)
    with torch.no_grad():
        for batch in SIZES:
            yield g(torch.randn(batch, 8, dtype=torch.complex64, device=device))


@program(programs)
def bags_of_words(graphed: Wrap) -> Steps:
    """Sums embeddings over bags, whose bounds come beside."""
    g = graphed(nn.EmbeddingBag(30, 4, mode="mean").to(device).eval())
    with torch.no_grad():
        for count in (6, 6, 5, 6, 7, 6, 5, 6, 6, 7):
            yield g(ids(count), torch.tensor([0, 2, 3], device=device))


@program(programs)
def sparse_adjacency(graphed: Wrap) -> Steps:
    """Passes a sparse matrix."""
    g = graphed(lambda a, x: torch.sparse.mm(a, x))
    for _ in range(8):
        yield g(rows(4, 4).relu().to_sparse(), rows(4, 3))


@program(programs)
def sparse_adjacency_is_held(graphed: Wrap) -> Steps:
    """Holds a sparse matrix as a buffer."""

    class Graph(nn.Module):
        a: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("a", torch.eye(4).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.a, x) * 2

    yield from calls(graphed(Graph().to(device).eval(), dynamic={}), (4,) * 9)


@program(programs)
def packed_sequences(graphed: Wrap) -> Steps:
    """Packs sequences by lengths that are a list."""
    gru = nn.GRU(8, 4, batch_first=True).to(device).eval()

    def encode(x: Tensor, lengths: list[int]) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        return gru(packed)[1][0]

    g = graphed(encode)
    with torch.no_grad():
        for at in range(10):
            yield g(rows(2, 5, 8), [5, 3 + at % 2])


@program(programs, graphs=True)
def metric_in_tensors(graphed: Wrap) -> Steps:
    """Updates a metric in place in the forward, reads it, and resets it."""

    class Accuracy(nn.Module):
        right: Tensor
        total: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("right", torch.zeros((), dtype=torch.long))
            self.register_buffer("total", torch.zeros((), dtype=torch.long))

        def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
            right = (logits.argmax(-1) == labels).sum()
            self.right += right
            self.total += labels.numel()
            return right / labels.numel()

    metric = Accuracy().to(device).eval()
    g = graphed(metric, dynamic={})
    for at in range(14):
        yield g(rows(4, 3), ids(4, most=3)), metric.right, metric.total
        if at == 6:
            metric.right.zero_()
            metric.total.zero_()


@program(programs)
def metric_of_other_sizes(graphed: Wrap) -> Steps:
    """Updates a confusion matrix by batches of other sizes."""

    class Confusion(nn.Module):
        counts: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("counts", torch.zeros(3, 3, dtype=torch.long))

        def forward(self, found: Tensor, labels: Tensor) -> Tensor:
            self.counts.view(-1).index_add_(0, found * 3 + labels, torch.ones_like(found))
            return found == labels

    metric = Confusion().to(device).eval()
    g = graphed(metric)
    for batch in SIZES:
        yield g(ids(batch, most=3), ids(batch, most=3)), metric.counts


@program(programs, graphs=False)
def logged_in_a_dict(graphed: Wrap) -> Steps:
    """Keeps the latest activations in a dict of the model."""

    class Logging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.log = mlp(), dict[str, Tensor]()

        def forward(self, x: Tensor) -> Tensor:
            y = self.net(x)
            self.log["mean"], self.log["most"] = y.mean(), y.amax(0)
            return y

    net = Logging().to(device).eval()
    for y in calls(graphed(net)):
        yield y, net.log


@program(programs, graphs=False)
def logged_in_a_list(graphed: Wrap) -> Steps:
    """Appends to a list of the model, and to a deque."""

    class Logging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen, self.last = mlp(), list[Tensor](), deque[int](maxlen=2)

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(x.sum())
            self.last.append(x.shape[0])
            return self.net(x)

    net = Logging().to(device).eval()
    for y in calls(graphed(net)):
        yield y, len(net.seen), torch.stack(net.seen), list(net.last)


@program(programs, graphs=False)
def activations_by_a_hook(graphed: Wrap) -> Steps:
    """Watches a layer by a hook that appends what it sees."""
    net, seen = mlp(), list[Tensor]()
    net[0].register_forward_hook(lambda module, args, output: seen.append(output.sum()))
    for y in calls(graphed(net)):
        yield y, len(seen), torch.stack(seen)


@program(programs)
def hook_comes_and_goes(graphed: Wrap) -> Steps:
    """Registers a hook that changes outputs and appends, and removes it."""
    net, seen = mlp(), list[float]()
    g, handle = graphed(net), None
    with torch.no_grad():
        for at in range(18):
            if at == 6:
                handle = net[0].register_forward_hook(
                    lambda module, args, output: (seen.append(1.0), output * 2)[1]
                )
            if at == 12 and handle is not None:
                handle.remove()
            yield g(rows(4, 8)), len(seen)


@program(programs, graphs=True)
def hook_that_only_computes(graphed: Wrap) -> Steps:
    """Registers a hook that changes outputs, once graphs serve."""
    net = mlp()
    g = graphed(net)
    with torch.no_grad():
        for at in range(14):
            if at == 7:
                net[2].register_forward_hook(lambda module, args, output: output.clamp(min=0))
            yield g(rows(4, 8))


CALLS = 0


@program(programs, graphs=False)
def count_in_a_global(graphed: Wrap) -> Steps:
    """Counts calls in a global number."""
    global CALLS
    CALLS = 0

    def forward(x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return x * 2

    for y in calls(graphed(forward)):
        yield y, CALLS


@program(programs, graphs=False)
def count_in_a_closure(graphed: Wrap) -> Steps:
    """Counts calls in a variable of the function around."""
    count = 0

    def forward(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * (count % 2)

    for y in calls(graphed(forward)):
        yield y, count


@program(programs, graphs=False)
def count_on_the_class(graphed: Wrap) -> Steps:
    """Counts calls in an attribute of the class."""

    class Counted(nn.Module):
        made = 0

        def forward(self, x: Tensor) -> Tensor:
            Counted.made += 1
            return x + Counted.made

    for y in calls(graphed(Counted().eval())):
        yield y, Counted.made


@program(programs, graphs=False)
def next_of_an_iterator(graphed: Wrap) -> Steps:
    """Takes the next of a cycle in each call."""

    class Cycling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = itertools.cycle([1.0, 2.0, 3.0])

        def forward(self, x: Tensor) -> Tensor:
            return x * next(self.scales)

    yield from calls(graphed(Cycling().eval()))


@program(programs, graphs=False)
def mode_toggles_itself(graphed: Wrap) -> Steps:
    """Has a text in the model that each call changes."""

    class Toggling(nn.Module):
        mode = "add"

        def forward(self, x: Tensor) -> Tensor:
            self.mode, mode = ("mul", self.mode) if self.mode == "add" else ("add", self.mode)
            return x + 1 if mode == "add" else x * 2

    net = Toggling().eval()
    for y in calls(graphed(net)):
        yield y, net.mode


@program(programs, graphs=False)
def warm_up_counts_down(graphed: Wrap) -> Steps:
    """Scales by a number that goes down with each call, and so on for ever."""

    class Warming(nn.Module):
        left = 1.0

        def forward(self, x: Tensor) -> Tensor:
            self.left *= 0.9
            return x * (1 - self.left)

    yield from calls(graphed(Warming().eval()))


@program(programs, graphs=False)
def every_third_call(graphed: Wrap) -> Steps:
    """Writes its statistics in each third call alone."""

    class Third(nn.Module):
        mean: Tensor
        at = 0

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            self.at += 1
            if self.at % 3 == 0:
                self.mean.lerp_(x.mean(0), 0.5)
            return x - self.mean

    net = Third().to(device).eval()
    for y in calls(graphed(net)):
        yield y, net.mean, net.at


@program(programs, graphs=True)
def adapter_by_name(graphed: Wrap) -> Steps:
    """Selects an adapter by a name that is set on the model."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.active = nn.Linear(8, 8), "one"
            self.adapters = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("one", "two")})

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.adapters[self.active](x)

    net = Adapted().to(device).eval()
    g = graphed(net)
    with torch.no_grad():
        for at in range(21):
            if at % 7 == 0:
                net.active = "two" if at == 7 else "one"
            yield g(rows(4, 8))


@program(programs, graphs=True)
def layer_is_added(graphed: Wrap) -> Steps:
    """Appends a layer to the model between calls."""
    net = mlp(8, 8)
    g = graphed(net)
    with torch.no_grad():
        for at in range(14):
            if at == 7:
                net.append(nn.Linear(8, 3).to(device))
            yield g(rows(4, 8))


@program(programs, graphs=True)
def buffer_is_filled_from_outside(graphed: Wrap) -> Steps:
    """Holds a scale as a plain tensor, which is filled and later replaced."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(8, device=device)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    net = Scaled().eval()
    g = graphed(net)
    for at in range(18):
        if at == 6:
            net.scale.fill_(2)
        if at == 12:
            net.scale = torch.full((8,), 3.0, device=device)
        yield g(rows(4, 8))


@program(programs, graphs=True)
def moved_to_another_precision(graphed: Wrap) -> Steps:
    """Makes the model double by its own method, then single by g's."""
    net = mlp()
    g = graphed(net)
    with torch.no_grad():
        for at in range(18):
            if at == 6:
                net.double()
            if at == 12:
                g.float()
            yield g(rows(4, 8).to(torch.float64 if 6 <= at < 12 else torch.float32))


@program(programs, graphs=True)
def attention_layers(graphed: Wrap) -> Steps:
    """Serves an encoder of torch, with a mask in some calls."""
    net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).to(device).eval()
    g = graphed(net)
    mask = torch.zeros(4, 5, dtype=torch.bool, device=device)
    mask[:, 4] = True
    with torch.no_grad():
        for at in range(14):
            yield g(rows(4, 5, 8), src_key_padding_mask=mask)[:, :4] if at % 2 else g(rows(4, 5, 8))


@program(programs)
def model_with_a_logger_and_a_lock(graphed: Wrap) -> Steps:
    """Holds things that are no numbers: a lock, a logger, a file-like object."""
    import io
    import logging
    import threading

    class Service(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.lock = mlp(), threading.Lock()
            self.logger, self.out = logging.getLogger("service"), io.StringIO()

        def forward(self, x: Tensor) -> Tensor:
            with self.lock:
                self.logger.debug("a batch")
                self.out.write(f"{len(x)} ")
                return self.net(x)

    net = Service().to(device).eval()
    for y in calls(graphed(net)):
        yield y, net.out.getvalue()


@pytest.mark.parametrize("case", programs, ids=lambda p: p.name)
def test_program(case: Program) -> None:
    check(case)
