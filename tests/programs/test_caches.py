"""Caches of one's own: dicts, lists, buffers and objects that steps write, grow, reorder and reset."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from programs.harness import Program, check, program
from programs.parts import Steps, Wrap, device, ids, rows
from torch import Tensor, nn

import cgplan

programs: list[Program] = []
LENGTH, WIDE = 16, 8


class Attention(nn.Module):
    """One head; keys and values come from the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDE, 3 * WIDE), nn.Linear(WIDE, WIDE)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, -1)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = q @ k.transpose(-1, -2) / WIDE**0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return self.out(scores.softmax(-1) @ v)


class Buffered(Attention):
    """Keys, values and the position in buffers."""

    k: Tensor
    v: Tensor
    at: Tensor

    def __init__(self, batch: int = 2) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(batch, LENGTH, WIDE))
        self.register_buffer("v", torch.zeros(batch, LENGTH, WIDE))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        self.k.index_copy_(1, self.at, k)
        self.v.index_copy_(1, self.at, v)
        y = self.attend(q, self.k, self.v, torch.arange(LENGTH, device=x.device) <= self.at)
        self.at.add_(1)
        return y

    def reset(self) -> None:
        for buffer in self.buffers():
            buffer.zero_()


@dataclass
class Cache:
    """Tensors of one's own class; the length is a tensor."""

    k: Tensor = field(default_factory=lambda: torch.zeros(2, LENGTH, WIDE, device=device))
    v: Tensor = field(default_factory=lambda: torch.zeros(2, LENGTH, WIDE, device=device))
    length: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.long, device=device))

    def reset(self) -> None:
        self.length.zero_()


class Box:
    """The same, and no dataclass; the length is a tensor or a number."""

    def __init__(self, length: Any = 0) -> None:
        self.k, self.v = (torch.zeros(2, LENGTH, WIDE, device=device) for _ in range(2))
        self.length = length

    def reset(self) -> None:
        self.length = 0


def dict_cache() -> dict[str, Tensor]:
    return {name: torch.zeros(2, LENGTH, WIDE, device=device) for name in "kv"}


def write_dict(net: Attention, x: Tensor, cache: dict[str, Tensor], at: Tensor) -> Tensor:
    """A step with a cache in a dict, and its position in a tensor."""
    q, k, v = net.project(x)
    cache["k"].index_copy_(1, at, k)
    cache["v"].index_copy_(1, at, v)
    return net.attend(q, cache["k"], cache["v"], torch.arange(LENGTH, device=x.device) <= at)


def write_object(net: Attention, x: Tensor, cache: Any) -> Tensor:
    """A step with an object whose length is a tensor, which the step raises."""
    q, k, v = net.project(x)
    cache.k.index_copy_(1, cache.length, k)
    cache.v.index_copy_(1, cache.length, v)
    y = net.attend(q, cache.k, cache.v, torch.arange(LENGTH, device=x.device) <= cache.length)
    cache.length.add_(1)
    return y


def attention() -> Attention:
    return Attention().to(device).eval()


def position(at: int) -> Tensor:
    return torch.tensor([at], device=device)


@program(programs)
def dict_written_in_place(graphed: Wrap) -> Steps:
    """Passes a dict of tensors, which each step writes by index_copy_."""
    g, cache = graphed(functools.partial(write_dict, attention())), dict_cache()
    with torch.no_grad():
        for at in range(12):
            yield g(rows(2, 1, WIDE), cache, position(at)), cache


@program(programs)
def dict_written_in_place_unpadded(graphed: Wrap) -> Steps:
    """The same where each shape has its graph; a second request starts at 0 with the same dict."""
    net = attention()
    g, cache = graphed(lambda x, cache, at: write_dict(net, x, cache, at), dynamic={}), dict_cache()
    with torch.no_grad():
        for at in (*range(6), *range(8)):
            yield g(rows(2, 1, WIDE), cache, position(at)), cache


@program(programs)
def dict_of_two_requests(graphed: Wrap) -> Steps:
    """Serves two requests in turn, each with its dict."""
    net = attention()
    g = graphed(lambda x, cache, at: write_dict(net, x, cache, at), dynamic={})
    caches = dict_cache(), dict_cache()
    with torch.no_grad():
        for at in range(14):
            yield g(rows(2, 1, WIDE), caches[at % 2], position(at // 2)), caches


@program(programs)
def dict_per_request(graphed: Wrap) -> Steps:
    """Makes a new dict for each request."""
    net = attention()
    g = graphed(lambda x, cache, at: write_dict(net, x, cache, at), dynamic={})
    with torch.no_grad():
        for _ in range(4):
            cache = dict_cache()
            for at in range(3):
                yield g(rows(2, 1, WIDE), cache, position(at)), cache


@program(programs)
def list_of_tuples_grows(graphed: Wrap) -> Steps:
    """Passes keys and values of each layer in a list of tuples, and gets a longer one."""
    layers = [attention(), attention()]

    def step(
        x: Tensor, past: list[tuple[Tensor, Tensor]] | None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        present = []
        for i, layer in enumerate(layers):
            q, k, v = layer.project(x)
            if past is not None:
                k, v = torch.cat([past[i][0], k], 1), torch.cat([past[i][1], v], 1)
            x = x + layer.attend(q, k, v)
            present.append((k, v))
        return x, present

    g = graphed(step)
    with torch.no_grad():
        for _ in range(3):
            past = None
            for _ in range(5):
                y, past = g(rows(2, 1, WIDE), past)
                yield y, past


@program(programs)
def list_is_appended_to(graphed: Wrap) -> Steps:
    """Passes a list to which the step appends."""
    net = attention()

    def step(x: Tensor, past: list[Tensor]) -> Tensor:
        past.append(x)
        q, k, v = net.project(torch.cat(past, 1))
        return net.attend(q, k, v)[:, -1]

    g, past = graphed(step), list[Tensor]()
    with torch.no_grad():
        for _ in range(10):
            yield g(rows(2, 1, WIDE), past), len(past)


@program(programs)
def dict_entries_are_bound(graphed: Wrap) -> Steps:
    """Passes a dict in which the step binds longer tensors."""
    net = attention()

    def step(x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        q, k, v = net.project(x)
        cache["k"] = torch.cat([cache["k"], k], 1)
        cache["v"] = torch.cat([cache["v"], v], 1)
        return net.attend(q, cache["k"], cache["v"])

    g, cache = graphed(step), {name: torch.zeros(2, 1, WIDE, device=device) for name in "kv"}
    with torch.no_grad():
        for _ in range(10):
            yield g(rows(2, 1, WIDE), cache), cache


@program(programs, graphs=True)
def cache_in_buffers(graphed: Wrap) -> Steps:
    """Keeps keys, values and the position in buffers, and resets them between requests."""
    net = Buffered().to(device).eval()
    g = graphed(net, dynamic={})
    with torch.no_grad():
        for _ in range(3):
            for _ in range(5):
                yield g(rows(2, 1, WIDE)), net.k, net.at
            net.reset()


@program(programs, graphs=True)
def caches_of_layers(graphed: Wrap) -> Steps:
    """Stacks layers that have caches of their own."""
    net = nn.Sequential(Buffered(), nn.LayerNorm(WIDE), Buffered()).to(device).eval()
    g = graphed(net, dynamic={})
    with torch.no_grad():
        for at in range(14):
            if at == 8:
                for layer in (net[0], net[2]):
                    layer.reset()
            yield g(rows(2, 1, WIDE)), net.state_dict()


@program(programs, graphs=True)
def cache_is_cropped(graphed: Wrap) -> Steps:
    """Takes tokens back by setting the position in place, as speculative decoding does."""
    net = Buffered().to(device).eval()
    g = graphed(net, dynamic={})
    with torch.no_grad():
        for at in range(14):
            yield g(rows(2, 1, WIDE)), net.at
            if at % 4 == 3:
                net.at.sub_(2)


@program(programs, graphs=True)
def beams_reorder_buffers_in_place(graphed: Wrap) -> Steps:
    """Reorders rows of the cache in place after each step."""
    net = Buffered().to(device).eval()
    g = graphed(net, dynamic={})
    with torch.no_grad():
        for _ in range(10):
            yield g(rows(2, 1, WIDE)), net.k
            beams = ids(2, most=3) - 1
            net.k.copy_(net.k[beams])
            net.v.copy_(net.v[beams])


@program(programs, graphs=True)
def beams_bind_buffers_at_times(graphed: Wrap) -> Steps:
    """Binds a reordered cache, in some steps alone."""
    net = Buffered().to(device).eval()
    g = graphed(net, dynamic={})
    with torch.no_grad():
        for at in range(16):
            yield g(rows(2, 1, WIDE)), net.k
            if at in (4, 9):
                net.k, net.v = net.k.flip(0), net.v.flip(0)


@program(programs)
def beams_bind_a_dict(graphed: Wrap) -> Steps:
    """Binds reordered tensors in the dict after each step."""
    net = attention()
    g, cache = graphed(lambda x, cache, at: write_dict(net, x, cache, at), dynamic={}), dict_cache()
    with torch.no_grad():
        for at in range(10):
            yield g(rows(2, 1, WIDE), cache, position(at)), cache
            cache["k"], cache["v"] = cache["k"].flip(0), cache["v"].flip(0)


@program(programs)
def position_is_a_number(graphed: Wrap) -> Steps:
    """Writes at a Python number, which comes again with each request."""

    class Decoder(Buffered):
        def forward(self, x: Tensor, start: int) -> Tensor:  # type: ignore[override]
            q, k, v = self.project(x)
            self.k[:, start : start + x.shape[1]] = k
            self.v[:, start : start + x.shape[1]] = v
            return self.attend(q, self.k[:, : start + x.shape[1]], self.v[:, : start + x.shape[1]])

    net = Decoder().to(device).eval()
    g = graphed(net, dynamic={})
    with torch.no_grad():
        for _ in range(4):
            yield g(rows(2, 3, WIDE), 0), net.k
            for at in range(3, 6):
                yield g(rows(2, 1, WIDE), at), net.k


@program(programs)
def position_is_a_number_by_default(graphed: Wrap) -> Steps:
    """Writes at a Python number that never comes again, into a dict that is passed."""
    net = attention()

    def step(x: Tensor, cache: dict[str, Tensor], at: int) -> Tensor:
        q, cache["k"][:, at], cache["v"][:, at] = net.project(x)
        return net.attend(q[:, None], cache["k"][:, : at + 1], cache["v"][:, : at + 1])

    g, cache = graphed(step), dict_cache()
    with torch.no_grad():
        for at in range(12):
            yield g(rows(2, WIDE), cache, at), cache


@program(programs)
def dataclass_with_a_tensor_length(graphed: Wrap) -> Steps:
    """Passes a dataclass that the step writes, and resets it."""
    net, cache = attention(), Cache()
    g = graphed(lambda x, cache: write_object(net, x, cache), dynamic={})
    with torch.no_grad():
        for at in range(14):
            if at == 7:
                cache.reset()
            yield g(rows(2, 1, WIDE), cache), vars(cache)


@program(programs)
def object_with_a_tensor_length(graphed: Wrap) -> Steps:
    """Passes an object that the step writes in place alone; a longer request has another one."""
    net = attention()
    g = graphed(lambda x, cache: write_object(net, x, cache), dynamic={})
    with torch.no_grad():
        for steps in (6, 8):
            cache = Box(torch.zeros(1, dtype=torch.long, device=device))
            for _ in range(steps):
                yield g(rows(2, 1, WIDE), cache), vars(cache)


def write_counted(net: Attention, x: Tensor, cache: Box) -> Tensor:
    """A step with an object whose length is a number."""
    q, cache.k[:, cache.length], cache.v[:, cache.length] = net.project(x)
    cache.length += 1
    return net.attend(q[:, None], cache.k[:, : cache.length], cache.v[:, : cache.length])


@program(programs, graphs=False)
def object_with_a_number(graphed: Wrap) -> Steps:
    """Passes an object in which the step counts by a Python number, and resets it."""
    net, cache = attention(), Box()
    g = graphed(lambda x, cache: write_counted(net, x, cache), dynamic={})
    with torch.no_grad():
        for at in range(15):
            if at % 5 == 0:
                cache.reset()
            yield g(rows(2, WIDE), cache), vars(cache)


@program(programs, graphs=False)
def model_holds_an_object_with_a_number(graphed: Wrap) -> Steps:
    """Has that object as an attribute of the model."""

    class Decoder(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.cache = Box()

        def forward(self, x: Tensor) -> Tensor:
            return write_counted(self, x, self.cache)

    net = Decoder().to(device).eval()
    g = graphed(net, dynamic={})
    with torch.no_grad():
        for at in range(15):
            if at % 5 == 0:
                net.cache.reset()
            yield g(rows(2, WIDE)), vars(net.cache)


@program(programs, graphs=True)
def model_holds_an_object(graphed: Wrap) -> Steps:
    """Has an object with tensors as an attribute, and replaces the whole object."""

    class Decoder(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.cache = Cache()

        def forward(self, x: Tensor) -> Tensor:
            return write_object(self, x, self.cache)

    net = Decoder().to(device).eval()
    g = graphed(net, dynamic={})
    with torch.no_grad():
        for at in range(18):
            if at == 6:
                net.cache.reset()
            if at == 12:
                net.cache = Cache()
            yield g(rows(2, 1, WIDE)), vars(net.cache)


@program(programs)
def filled_flag_of_an_object(graphed: Wrap) -> Steps:
    """Computes keys of a memory once for each object, which says by a flag that it has them."""
    net = attention()

    def step(x: Tensor, memory: Tensor, cache: Box) -> Tensor:
        q, k, v = net.project(x)
        if not cache.length:
            _, k, v = net.project(memory)
            cache.k[:, :3], cache.v[:, :3] = k, v
            cache.length = 3
        return net.attend(q, cache.k[:, :3], cache.v[:, :3])

    g, cache = graphed(step, dynamic={}), Box()
    with torch.no_grad():
        for _ in range(3):
            memory = rows(2, 3, WIDE)
            cache.reset()
            for _ in range(5):
                yield g(rows(2, 1, WIDE), memory, cache), cache.k, cache.length


@program(programs)
def memory_is_computed_once(graphed: Wrap) -> Steps:
    """Encodes on first use, and forgets what was encoded for the next input."""

    class Decoder(Attention):
        memory: Tensor | None = None

        def forward(self, x: Tensor, source: Tensor) -> Tensor:
            if self.memory is None:
                self.memory = source.cumsum(1)
            q, _, _ = self.project(x)
            return self.attend(q, self.memory, self.memory)

    net = Decoder().to(device).eval()
    g = graphed(net, dynamic={})
    with torch.no_grad():
        for _ in range(3):
            net.memory, source = None, rows(2, 3, WIDE)
            for _ in range(6):
                yield g(rows(2, 1, WIDE), source), net.memory


@program(programs, graphs=True)
def ring_with_a_tensor(graphed: Wrap) -> Steps:
    """Writes a ring of the last four values, whose position is a tensor."""

    class Ring(nn.Module):
        values: Tensor
        at: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("values", torch.zeros(4, WIDE))
            self.register_buffer("at", torch.zeros(1, dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.values.index_copy_(0, self.at, x)
            self.at.add_(1).remainder_(4)
            return self.values.mean(0)

    ring = Ring().to(device).eval()
    g = graphed(ring, dynamic={})
    for _ in range(12):
        yield g(rows(1, WIDE)), ring.values, ring.at


@program(programs, graphs=False)
def ring_with_a_number(graphed: Wrap) -> Steps:
    """Writes a ring whose position is a Python number, which comes round."""

    class Ring(nn.Module):
        values: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("values", torch.zeros(3, WIDE))
            self.at = 0

        def forward(self, x: Tensor) -> Tensor:
            self.values[self.at] = x[0]
            self.at = (self.at + 1) % 3
            return self.values.mean(0)

    ring = Ring().to(device).eval()
    g = graphed(ring, dynamic={})
    for _ in range(12):
        yield g(rows(1, WIDE)), ring.values, ring.at


@program(programs, graphs=False)
def window_is_bound(graphed: Wrap) -> Steps:
    """Keeps the last values of a stream as an attribute, as causal convolutions do."""

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.left = nn.Conv1d(WIDE, WIDE, 3), torch.zeros(1, WIDE, 2, device=device)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([self.left, x], 2)
            self.left = x[:, :, -2:]
            return self.conv(x)

    net = Causal().to(device).eval()
    g = graphed(net, dynamic={})
    with torch.no_grad():
        for _ in range(10):
            yield g(rows(1, WIDE, 4)), net.left


@program(programs, graphs=True)
def window_is_written(graphed: Wrap) -> Steps:
    """Keeps them in a buffer."""

    class Causal(nn.Module):
        left: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(WIDE, WIDE, 3)
            self.register_buffer("left", torch.zeros(1, WIDE, 2))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([self.left, x], 2)
            self.left.copy_(x[:, :, -2:])
            return self.conv(x)

    net = Causal().to(device).eval()
    g = graphed(net, dynamic={})
    with torch.no_grad():
        for _ in range(10):
            yield g(rows(1, WIDE, 4)), net.left


@program(programs, graphs=True)
def masks_are_kept_by_length(graphed: Wrap) -> Steps:
    """Makes a mask on first use of a length, and keeps it in a dict of the model."""

    class Masked(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.masks = dict[int, Tensor]()

        def forward(self, x: Tensor) -> Tensor:
            length = x.shape[1]
            if length not in self.masks:
                self.masks[length] = torch.ones(
                    length, length, dtype=torch.bool, device=x.device
                ).tril()
            return self.attend(*self.project(x), self.masks[length])

    net = Masked().to(device).eval()
    g = graphed(net, dynamic={})
    with torch.no_grad():
        for length in [4] * 5 + [6] * 5 + [4, 6, 5] * 3 + [4] * 6:
            yield g(rows(2, length, WIDE)), list(net.masks)


@program(programs)
def masks_are_kept_by_functools(graphed: Wrap) -> Steps:
    """Makes masks by a function with lru_cache."""
    net = attention()

    @functools.lru_cache
    def causal(length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool, device=device).tril()

    g = graphed(lambda x: net.attend(*net.project(x), causal(x.shape[1])), dynamic={})
    with torch.no_grad():
        for length in [4] * 5 + [6] * 5 + [4, 6] * 3:
            yield g(rows(2, length, WIDE))


@program(programs, graphs=True)
def rotation_grows_on_demand(graphed: Wrap) -> Steps:
    """Makes a longer table of cosines when a longer input comes, and binds it."""

    class Rotary(nn.Module):
        cos: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cos", torch.arange(4.0).cos(), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] > self.cos.shape[0]:
                self.cos = torch.arange(2.0 * x.shape[1], device=x.device).cos()
            return x * self.cos[: x.shape[1], None]

    net = Rotary().to(device).eval()
    g = graphed(net, dynamic={})
    for length in [4] * 5 + [7] * 5 + [4] * 3 + [20] * 5 + [4] * 6:
        yield g(rows(2, length, WIDE)), net.cos.shape[0]


@program(programs, graphs=True)
def blocks_of_a_table(graphed: Wrap) -> Steps:
    """Writes keys into the blocks that a table names, as paged attention does."""

    class Paged(Attention):
        pool: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("pool", torch.zeros(8, 4, WIDE))

        def forward(self, x: Tensor, table: Tensor, at: Tensor) -> Tensor:
            q, k, _ = self.project(x)
            block = table.gather(1, (at // 4)[:, None])[:, 0]
            self.pool.index_put_((block, at % 4), k)
            keys = self.pool[table].flatten(1, 2)
            mask = torch.arange(8, device=x.device)[None, None] <= at[:, None, None]
            return self.attend(q[:, None], keys, keys, mask)

    net = Paged().to(device).eval()
    g = graphed(net, dynamic={})
    table = torch.tensor([[5, 2], [1, 7]], device=device)
    with torch.no_grad():
        for at in (*range(8), *range(4)):
            yield g(rows(2, WIDE), table, torch.tensor([at, at], device=device)), net.pool
            table = table.flip(0) if at == 7 else table


@program(programs)
def cache_is_returned(graphed: Wrap) -> Steps:
    """Gets the cache that was passed back, beside the output."""
    net = attention()

    def step(x: Tensor, cache: Box) -> tuple[Tensor, Box]:
        return write_object(net, x, cache), cache

    g, cache = graphed(step, dynamic={}), Box(torch.zeros(1, dtype=torch.long, device=device))
    with torch.no_grad():
        for _ in range(10):
            y, out = g(rows(2, 1, WIDE), cache)
            yield y, out is cache, out.k, out.length


@program(programs)
def cache_is_made_inside(graphed: Wrap) -> Steps:
    """Gets an object that the forward made, and passes it to the next step."""
    net = attention()

    def step(x: Tensor, cache: Box | None = None) -> tuple[Tensor, Box]:
        made = Box(0)
        _, k, v = net.project(x)
        made.k, made.v = (k, v) if cache is None else (cache.k + k, cache.v + v)
        made.length = 1 if cache is None else cache.length + 1
        return net.attend(x, made.k, made.v), made

    g, cache = graphed(step), None
    with torch.no_grad():
        for at in range(12):
            y, cache = g(rows(2, 1, WIDE), None if at == 6 else cache)
            yield y, cache.length, cache.k


@program(programs, graphs=True)
def growing_prefix(graphed: Wrap) -> Steps:
    """Runs the whole prefix again for each token, by a bounded length."""
    net, embed, head = (
        attention(),
        nn.Embedding(30, WIDE).to(device),
        nn.Linear(WIDE, 30).to(device),
    )

    def logits(tokens: Tensor) -> Tensor:
        mask = torch.ones(
            tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device
        ).tril()
        return head(net.attend(*net.project(embed(tokens)), mask))

    g = graphed(logits, dynamic={"tokens": {0: "batch", 1: cgplan.Dim("length", max=16)}})
    with torch.no_grad():
        for _ in range(2):
            tokens = ids(1, 2)
            for _ in range(12):
                y = g(tokens)
                yield y
                tokens = torch.cat([tokens, y[:, -1:].argmax(-1)], 1)


@program(programs)
def growing_prefix_by_default(graphed: Wrap) -> Steps:
    """The same without any option, and the prefix in dimension 0."""
    embed, cell = nn.Embedding(30, WIDE).to(device), nn.Linear(WIDE, 30).to(device)
    g = graphed(lambda tokens: cell(embed(tokens).cumsum(0))[-1])
    with torch.no_grad():
        for _ in range(2):
            tokens = ids(2)
            for _ in range(8):
                y = g(tokens)
                yield y
                tokens = torch.cat([tokens, y.argmax().view(1)])


@program(programs, graphs=True)
def speech_frames_until_a_stop(graphed: Wrap) -> Steps:
    """Makes frames from frames until a stop output is high, with a state that comes and goes."""
    net, head = nn.GRUCell(WIDE, WIDE).to(device), nn.Linear(WIDE, WIDE + 1).to(device)

    def step(frame: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = net(frame, h)
        y = head(h)
        return y[:, :-1].tanh(), y[:, -1].sigmoid(), h

    g = graphed(step)
    with torch.no_grad():
        for _ in range(3):
            frame, h, stop, steps = rows(1, WIDE), rows(1, WIDE), torch.zeros(1), 0
            while steps < 6 and float(stop) < 0.9:
                frame, stop, h = g(frame, h)
                steps += 1
                yield frame, stop
            yield steps


@program(programs)
def temperature_of_a_settings_object(graphed: Wrap) -> Steps:
    """Passes an object of settings, which is changed between calls."""

    class Settings:
        temperature, top = 1.0, 3

    head, settings = nn.Linear(WIDE, 30).to(device), Settings()

    def sample(x: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
        found = (head(x) / settings.temperature).topk(settings.top)
        return found.values, found.indices

    g = graphed(sample)
    with torch.no_grad():
        for at in range(15):
            if at == 5:
                settings.temperature = 0.5
            if at == 10:
                settings.top = 5
            yield g(rows(2, WIDE), settings)


@program(programs, graphs=True)
def finished_rows_are_dropped(graphed: Wrap) -> Steps:
    """Looks at finished rows on the host after each step, and goes on with the others."""
    head = nn.Linear(WIDE, WIDE).to(device)
    g, x = graphed(lambda x: head(x).tanh()), rows(8, WIDE)
    with torch.no_grad():
        for _ in range(12):
            x = g(x)
            yield x
            x = x[x[:, 0] < 0.4] if len(x) > 2 else rows(8, WIDE)
            x = x if len(x) else rows(8, WIDE)


@pytest.mark.parametrize("case", programs, ids=lambda p: p.name)
def test_program(case: Program) -> None:
    check(case)
