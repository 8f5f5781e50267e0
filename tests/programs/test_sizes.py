"""Sizes that change: graphs of nodes and edges, diffusion, pictures, pooled rows, and bounds on graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from programs.harness import Program, check, program
from programs.parts import Steps, Wrap, attempt, device, ids, mlp, rows
from torch import Tensor, nn
from torch.nn import functional as F

import cgplan

programs: list[Program] = []


class Convolution(nn.Module):
    """Adds messages of neighbours, by index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        messages = self.other(x)[edges[0]]
        return (self.own(x) + torch.zeros_like(x).index_add_(0, edges[1], messages)).relu()


def edges_of(nodes: int, count: int) -> Tensor:
    return torch.randint(0, nodes, (2, count), device=device)


SIZES_OF_GRAPHS = (
    (2, 5),
    (2, 5),
    (3, 4),
    (5, 8),
    (3, 4),
    (4, 4),
    (2, 5),
    (5, 8),
    (3, 4),
    (6, 6),
    (8, 2),
    (2, 2),
)


@program(programs)
def nodes_and_edges(graphed: Wrap) -> Steps:
    """Passes graphs with other numbers of nodes and edges."""
    g = graphed(Convolution().to(device).eval())
    with torch.no_grad():
        for nodes, count in SIZES_OF_GRAPHS:
            yield g(rows(nodes, 8), edges_of(nodes, count))


@program(programs)
def as_many_nodes_as_edges(graphed: Wrap) -> Steps:
    """Begins with a graph that has as many edges, in rows, as nodes."""
    net = Convolution().to(device).eval()
    g = graphed(lambda x, edges: net(x, edges.t()))
    with torch.no_grad():
        for nodes, count in (
            (4, 4),
            (4, 4),
            (4, 4),
            (4, 6),
            (3, 5),
            (5, 5),
            (4, 4),
            (6, 3),
            (3, 3),
            (4, 6),
        ):
            yield g(rows(nodes, 8), edges_of(nodes, count).t())


@program(programs, graphs=True)
def one_graph_other_features(graphed: Wrap) -> Steps:
    """Keeps the edges, and changes the features."""
    edges, g = edges_of(6, 10), graphed(Convolution().to(device).eval(), dynamic={})
    with torch.no_grad():
        for _ in range(10):
            yield g(rows(6, 8), edges)


@program(programs)
def nodes_have_a_bound(graphed: Wrap) -> Steps:
    """Says which dimensions are nodes and edges."""
    shapes = {"x": {0: cgplan.Dim("nodes", max=16)}, "edges": {1: cgplan.Dim("edges", max=16)}}
    g = graphed(Convolution().to(device).eval(), dynamic=shapes)
    with torch.no_grad():
        for nodes, count in SIZES_OF_GRAPHS:
            yield g(rows(nodes, 8), edges_of(nodes, count))


@program(programs)
def pooled_by_graph(graphed: Wrap) -> Steps:
    """Takes means over the nodes of each graph, whose number it reads from the index."""
    net = mlp()

    def pooled(x: Tensor, index: Tensor) -> Tensor:
        count = int(index.max()) + 1
        total = x.new_zeros(count, 8).index_add_(0, index, x)
        return net(total / torch.bincount(index, minlength=count).clamp(min=1)[:, None])

    g = graphed(pooled)
    with torch.no_grad():
        for nodes in (4, 4, 5, 4, 6, 5, 4, 4, 7, 5):
            yield g(rows(nodes, 8), (torch.arange(nodes, device=device) // 2))


@program(programs)
def pooled_by_a_number(graphed: Wrap) -> Steps:
    """Says the number of graphs by a Python number."""

    def pooled(x: Tensor, index: Tensor, count: int) -> Tensor:
        most = x.new_full((count, 8), -9.0)
        return most.scatter_reduce(0, index[:, None].expand(-1, 8), x, "amax", include_self=False)

    g = graphed(pooled)
    for nodes in (4, 4, 5, 4, 6, 5, 4, 4, 7, 5):
        yield g(rows(nodes, 8), torch.arange(nodes, device=device) % 3, 3)


@program(programs)
def attention_over_edges(graphed: Wrap) -> Steps:
    """Normalises scores over the edges that end at a node."""
    score = nn.Linear(16, 1).to(device)

    def layer(x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        weights = score(torch.cat([x[source], x[target]], 1)).exp()
        total = x.new_zeros(x.shape[0], 1).index_add_(0, target, weights)
        return torch.zeros_like(x).index_add_(0, target, x[source] * weights / total[target])

    g = graphed(layer)
    with torch.no_grad():
        for nodes, count in SIZES_OF_GRAPHS:
            yield g(rows(nodes, 8), *edges_of(nodes, count))


class Denoiser(nn.Module):
    """Embeds time, and takes noise away."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.guidance = mlp(9, 8), 1.0

    def forward(self, x: Tensor, t: Any, guidance: float | None = None) -> Tensor:
        time = torch.as_tensor(t, device=x.device).float().expand(x.shape[0])[:, None] / 10
        y = self.net(torch.cat([x, time], 1))
        return y * (self.guidance if guidance is None else guidance)


@program(programs)
def time_is_a_number(graphed: Wrap) -> Steps:
    """Passes time steps as Python numbers, which come again with each picture."""
    g = graphed(Denoiser().to(device).eval())
    with torch.no_grad():
        for _ in range(4):
            x = rows(4, 8)
            for t in (9, 6, 3, 0):
                x = x - 0.1 * g(x, t)
                yield x


@program(programs, graphs=True)
def time_is_a_tensor(graphed: Wrap) -> Steps:
    """Passes time steps as tensors without a dimension, and adds to the latents in place."""
    g, x = graphed(Denoiser().to(device).eval()), rows(4, 8)
    with torch.no_grad():
        for t in torch.arange(12, device=device):
            x.sub_(g(x, t), alpha=0.1)
            yield x


@program(programs, graphs=True)
def guidance_is_an_attribute(graphed: Wrap) -> Steps:
    """Sets the guidance scale on the model midway."""
    net = Denoiser().to(device).eval()
    g, x = graphed(net), rows(4, 8)
    with torch.no_grad():
        for at in range(14):
            if at == 7:
                net.guidance = 3.0
            x = x - 0.1 * g(x, torch.full((4,), at, device=device))
            yield x


@program(programs, graphs=True)
def guidance_is_an_argument(graphed: Wrap) -> Steps:
    """Passes another guidance scale midway."""
    g, x = graphed(Denoiser().to(device).eval()), rows(4, 8)
    with torch.no_grad():
        for at in range(14):
            x = x - 0.1 * g(x, torch.full((4,), at, device=device), 1.0 if at < 7 else 2.5)
            yield x


@program(programs, graphs=True)
def scheduler_counts_in_python(graphed: Wrap) -> Steps:
    """Steps a scheduler of one's own around g, which counts and keeps the last noise."""

    class Scheduler:
        at, last = 0, None

        def step(self, noise: Tensor, x: Tensor) -> Tensor:
            mixed = noise if self.last is None else 1.5 * noise - 0.5 * self.last
            self.at, self.last = self.at + 1, noise
            return x - mixed * 0.1

    g, scheduler, x = graphed(Denoiser().to(device).eval()), Scheduler(), rows(4, 8)
    with torch.no_grad():
        for _ in range(10):
            x = scheduler.step(g(x, torch.full((4,), scheduler.at, device=device)), x)
            yield x


@program(programs, graphs=False)
def scheduler_in_the_forward(graphed: Wrap) -> Steps:
    """Has a forward that reads the scale from a table at a number that it counts."""

    class Sampler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.at, self.scales = mlp(8, 8), 0, [0.5, 0.3, 0.1]

        def forward(self, x: Tensor) -> Tensor:
            x = x - self.net(x) * self.scales[self.at % 3]
            self.at += 1
            return x

    sampler = Sampler().to(device).eval()
    g, x = graphed(sampler), rows(4, 8)
    with torch.no_grad():
        for _ in range(12):
            x = g(x)
            yield x, sampler.at


@program(programs)
def latents_are_written_by_the_forward(graphed: Wrap) -> Steps:
    """Passes latents that the forward changes in place, and returns them."""
    net = mlp(8, 8)

    def step(x: Tensor) -> Tensor:
        return x.sub_(net(x), alpha=0.1)

    g, x = graphed(step), rows(4, 8)
    with torch.no_grad():
        for _ in range(12):
            y = g(x)
            yield x, y, y is x


@program(programs)
def output_is_passed_to_be_filled(graphed: Wrap) -> Steps:
    """Passes a tensor that the forward fills, of another size at times."""
    net = mlp()

    def fill(x: Tensor, out: Tensor) -> None:
        out.copy_(net(x))

    g = graphed(fill)
    with torch.no_grad():
        for batch in (4, 4, 3, 4, 4, 3, 4, 3, 4, 4):
            out = rows(batch, 4)
            yield g(rows(batch, 8), out), out


@program(programs, graphs=True)
def conditions_are_stacked(graphed: Wrap) -> Steps:
    """Runs the latents twice in one batch, with and without a condition."""
    g, x = graphed(Denoiser().to(device).eval()), rows(2, 8)
    with torch.no_grad():
        for at in range(10):
            plain, guided = g(torch.cat([x, x + 1]), torch.full((4,), at, device=device)).chunk(2)
            x = x - 0.1 * (plain + 2.0 * (guided - plain))
            yield x


@program(programs, graphs=True)
def residuals_of_a_control(graphed: Wrap) -> Steps:
    """Passes a list of residuals in some steps, and None in the others."""
    net = mlp(8, 8)

    def step(x: Tensor, residuals: list[Tensor] | None = None) -> Tensor:
        return net(x) + (sum(residuals) if residuals is not None else 0)

    g = graphed(step)
    with torch.no_grad():
        for at in range(14):
            yield g(rows(4, 8), [rows(4, 8), rows(4, 8)] if at % 2 else None)


@program(programs, graphs=True)
def patches_and_back(graphed: Wrap) -> Steps:
    """Cuts pictures into patches, mixes them, and puts them together."""
    mix = nn.Linear(12, 12).to(device)

    def forward(x: Tensor) -> Tensor:
        patches = x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3)
        return (
            mix(patches).view(x.shape[0], 2, 2, 3, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(x.shape)
        )

    g = graphed(forward)
    with torch.no_grad():
        for batch in (2, 2, 1, 2, 4, 3, 2, 4, 2, 1):
            yield g(rows(batch, 3, 4, 4))


@program(programs, graphs=True)
def pictures_of_two_sizes(graphed: Wrap) -> Steps:
    """Convolves pictures of two sizes, in channels_last at times."""
    net = (
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        .to(device)
        .eval()
    )
    g = graphed(net, dynamic={})
    with torch.no_grad():
        for at in range(14):
            x = rows(2, 3, *((6, 6) if at % 2 else (4, 8)))
            yield g(x.contiguous(memory_format=torch.channels_last) if at > 8 else x)


@program(programs)
def four_rows_are_merged(graphed: Wrap) -> Steps:
    """Merges each four rows into one, as encoders of pictures do."""
    net = mlp()
    g = graphed(lambda x: net(x.view(-1, 4, 8).mean(1)))
    with torch.no_grad():
        for count in (8, 8, 12, 8, 4, 20, 12, 8, 12, 8):
            yield g(rows(count, 8))


@program(programs)
def rows_that_do_not_merge(graphed: Wrap) -> Steps:
    """Passes a number of rows that cannot be merged, which is an error as ever."""
    g = graphed(lambda x: x.view(-1, 3, 8).sum(1))
    for count in (6, 6, 6, 7, 9, 6, 8, 12, 6, 9):
        yield attempt(g, rows(count, 8))


def _batch_program(name: str, doc: str, function: Any, make: Any = rows) -> None:
    def run(graphed: Wrap) -> Steps:
        g = graphed(function)
        for batch in (3, 4, 3, 5, 3, 7, 8, 3, 6, 5, 3, 1):
            yield g(make(batch, 8))

    run.__name__, run.__doc__ = name, doc
    program(programs)(run)


def _between(x: Tensor) -> Tensor:
    return torch.cdist(x, x)


_batch_program("centred_rows", "Takes the mean of the batch away.", lambda x: x - x.mean(0))
_batch_program("softmax_over_rows", "Normalises over the batch.", lambda x: x.softmax(0))
_batch_program("rows_from_the_last", "Turns the batch round.", lambda x: x.flip(0))
_batch_program("sums_so_far", "Adds up over the batch.", lambda x: x.cumsum(0))
_batch_program(
    "sums_to_come", "Adds up over the rest of the batch.", lambda x: x.sum(0) - x.cumsum(0)
)
_batch_program("best_row", "Finds the best row.", lambda x: (x.argmax(0), x.max()))
_batch_program("below_the_largest", "Takes the largest of the batch away.", lambda x: x - x.amax(0))
_batch_program("divided_by_the_batch", "Divides by the number of rows.", lambda x: x / x.shape[0])
_batch_program(
    "rows_and_their_number", "Returns the number of rows, too.", lambda x: (x * 2, len(x))
)
_batch_program(
    "list_of_rows", "Returns a list with a tensor for each row.", lambda x: list((x * 2).unbind(0))
)
_batch_program(
    "halves_of_the_batch", "Returns the halves of the batch.", lambda x: (x + 1).chunk(2)
)
_batch_program("all_pairs", "Compares all rows with each other.", _between)
_batch_program("ids_from_the_least", "Takes the least id away.", lambda x: x - x.min(), ids)
_batch_program(
    "all_or_nothing", "Multiplies by whether all are true.", lambda x: x * (x > 2).all(), ids
)
_batch_program(
    "most_frequent", "Counts ids.", lambda x: torch.bincount(x.flatten(), minlength=30), ids
)
_batch_program("sorted_rows", "Sorts over the batch.", lambda x: x.sort(0).values, ids)
_batch_program(
    "first_and_last", "Returns the first and the last row.", lambda x: (x[0] + 0, x[-1] + 0)
)
_batch_program(
    "shuffled_halves", "Pairs rows of both ends.", lambda x: x * x.flip(0).mean(1, keepdim=True)
)
_batch_program("embedding_norms", "Divides by the norm of the whole batch.", lambda x: x / x.norm())


@program(programs, graphs=True)
def exits_at_a_depth(graphed: Wrap) -> Steps:
    """Says by a Python number after how many layers to stop."""
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)).to(device)

    def forward(x: Tensor, depth: int = 4) -> Tensor:
        for layer in layers[:depth]:
            x = layer(x).relu()
        return x

    g = graphed(forward)
    with torch.no_grad():
        for at in range(16):
            yield g(rows(4, 8), depth=1 + at % 2 * 3)


@program(programs, graphs=False)
def exits_when_it_is_sure(graphed: Wrap) -> Steps:
    """Looks at a number of the batch on the host, and stops or goes on."""
    first, second = nn.Linear(8, 8).to(device), nn.Linear(8, 8).to(device)

    def forward(x: Tensor) -> Tensor:
        x = first(x)
        return x if x.mean().item() > 0 else second(x)

    g = graphed(forward, dynamic={})
    with torch.no_grad():
        for at in range(12):
            yield g(rows(4, 8) + (at % 3 - 1))


@program(programs, graphs=True)
def larger_than_all_sizes(graphed: Wrap) -> Steps:
    """Passes batches that are larger than the sizes that were given."""
    g = graphed(mlp(), sizes=[4, 8])
    with torch.no_grad():
        for batch in (4, 3, 8, 16, 4, 9, 5, 1, 20, 4, 8, 3):
            yield g(rows(batch, 8))


@program(programs, graphs=True)
def ladder_with_a_largest_size(graphed: Wrap) -> Steps:
    """Names a ladder and its end."""
    g = graphed(mlp(), sizes="powers_of_two", max_size=8)
    with torch.no_grad():
        for batch in (8, 7, 8, 12, 5, 8, 3, 6, 2, 8, 1, 12):
            yield g(rows(batch, 8))


@program(programs, graphs=True)
def any_size(graphed: Wrap) -> Steps:
    """Passes batches of any size, and an empty one."""
    g = graphed(mlp())
    with torch.no_grad():
        for batch in (3, 3, 3, 4, 1, 7, 0, 5, 8, 2, 3, 33, 6, 4):
            yield g(rows(batch, 8))


@program(programs)
def two_graphs_for_many_sizes(graphed: Wrap) -> Steps:
    """Allows two graphs for shapes that go round."""
    g = graphed(mlp(), dynamic={}, max_graphs=2)
    with torch.no_grad():
        for at in range(20):
            yield g(rows(1 + at % 5, 8))


@program(programs, graphs=True)
def two_graphs_for_sizes_that_come_in_runs(graphed: Wrap) -> Steps:
    """Allows two graphs for sizes that come in runs."""
    g = graphed(mlp(), max_graphs=2)
    with torch.no_grad():
        for batch in (1, 2, 4, 8, 1):
            for _ in range(5):
                yield g(rows(batch, 8))


@program(programs)
def mean_over_padding(graphed: Wrap) -> Steps:
    """Takes a mean over a length that is declared to vary, without a mask."""
    shape = {0: cgplan.Dim("batch", max=4), 1: cgplan.Dim("length", max=16)}
    g = graphed(lambda x: x.mean(1), dynamic={"x": shape})
    for length in (5, 5, 5, 7, 8, 3, 5, 12, 9, 5, 8, 5):
        yield g(rows(3, length, 4))


@program(programs, graphs=True)
def mean_under_a_mask(graphed: Wrap) -> Steps:
    """Takes it with a mask."""
    shape = {0: cgplan.Dim("batch", max=4), 1: cgplan.Dim("length", max=16)}

    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)

    g = graphed(masked, dynamic={"x": shape, "mask": shape})
    for batch, length in (
        (3, 5),
        (3, 5),
        (2, 8),
        (4, 7),
        (3, 8),
        (3, 3),
        (1, 16),
        (3, 12),
        (4, 8),
        (3, 5),
    ):
        yield g(rows(batch, length, 4), torch.ones(batch, length, device=device))


@program(programs, graphs=True)
def views_are_passed(graphed: Wrap) -> Steps:
    """Passes transposed, expanded and sliced tensors."""
    g = graphed(mlp())
    with torch.no_grad():
        for _ in range(4):
            yield g(rows(8, 4).t())
            yield g(rows(1, 8).expand(4, 8))
            yield g(rows(6, 10)[1:5, 2:])
            yield g(rows(8, 8)[::2])


@program(programs, graphs=True)
def dtypes_change(graphed: Wrap) -> Steps:
    """Calls a function with float32, float64 and whole numbers in turn."""
    g = graphed(lambda x, y: (x + y * 2, x > y))
    for at in range(15):
        x = rows(4, 3).mul(9)
        x = (x, x.double(), x.long())[at % 3]
        yield g(x, x.flip(0))


@program(programs, graphs=True)
def one_tensor_twice(graphed: Wrap) -> Steps:
    """Passes a tensor as both arguments, and others at times."""
    net = nn.Bilinear(8, 8, 3).to(device)
    g = graphed(net.eval())
    with torch.no_grad():
        for at in range(10):
            x = rows(4, 8)
            yield g(x, x if at % 3 else rows(4, 8))


@program(programs)
def lookup_in_a_gallery(graphed: Wrap) -> Steps:
    """Compares queries with a gallery of a fixed size, that is an argument, too."""
    gallery = rows(6, 8)
    g = graphed(lambda queries, gallery: (queries @ gallery.t()).topk(2))
    for batch in (4, 3, 4, 2, 4, 8, 5, 4, 1, 4):
        found = g(rows(batch, 8), gallery)
        yield found.values, found.indices


@program(programs)
def gallery_as_large_as_the_batch(graphed: Wrap) -> Steps:
    """Begins with as many queries as the gallery has rows."""
    g = graphed(lambda queries, gallery: F.normalize(queries @ gallery.t(), dim=1))
    for batch in (4, 4, 4, 3, 2, 4, 6, 3, 4, 2):
        yield g(rows(batch, 8), rows(4, 8))


@program(programs)
def boxes_are_filtered(graphed: Wrap) -> Steps:
    """Returns the rows with a high score, so that sizes depend on values."""
    net = mlp(8, 5)

    def detect(x: Tensor) -> Tensor:
        y = net(x)
        return y[y[:, 0] > 0]

    g = graphed(detect)
    with torch.no_grad():
        for batch in (6, 6, 4, 6, 8, 6, 6, 4, 6):
            yield g(rows(batch, 8))


@program(programs, graphs=True)
def outputs_without_elements(graphed: Wrap) -> Steps:
    """A difference of neighbours, of one row at first; and a part that is empty."""
    g, h = graphed(lambda x: x[1:] - x[:-1]), graphed(lambda x: (x * 2, x[:, 8:], x.new_empty(0)))
    for batch in (1, 1, 1, 2, 3, 1, 3, 3, 3, 3):
        x = rows(batch, 8)
        yield g(x)
        yield list(h(x))


@program(programs)
def lengths_come_beside(graphed: Wrap) -> Steps:
    """Passes sequences one after the other in one tensor, with their bounds."""
    net = mlp()

    def pooled(x: Tensor, bounds: Tensor) -> Tensor:
        sums = F.pad(net(x).cumsum(0), (0, 0, 1, 0))
        return sums[bounds[1:]] - sums[bounds[:-1]]

    g = graphed(pooled)
    with torch.no_grad():
        for lengths in (
            (3, 2),
            (3, 2),
            (4, 1),
            (2, 2, 2),
            (5, 3),
            (1, 2),
            (3, 2),
            (2, 2, 2),
            (4, 4),
        ):
            bounds = torch.tensor([0, *lengths], device=device).cumsum(0)
            yield g(rows(sum(lengths), 8), bounds)


class Finished(nn.Module):
    """Counts the episodes that are done, which are rare."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor, which: Tensor, done: Tensor) -> Tensor:
        self.count.index_add_(0, which, done.float())
        return x + self.count[which][:, None]


@program(programs, graphs=True)
def state_that_padding_reaches_for_few_values(graphed: Wrap) -> Steps:
    model = Finished().to(device).eval()
    g = graphed(model)
    for step in range(40):
        count = 4 - step % 2
        done = torch.zeros(count, dtype=torch.bool, device=device)
        done[-1] = step in (13, 27)
        yield g(rows(count, 8), torch.arange(count, device=device), done), model.count


@pytest.mark.parametrize("case", programs, ids=lambda p: p.name)
def test_program(case: Program) -> None:
    check(case)
