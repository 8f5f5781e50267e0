"""LoRA adapters by name: loaded, replaced and removed between replays, without a capture."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from adapters import Adapters
from checks import same
from decoder import Decoder, Projection, first_layers
from decoding import NUM_BLOCKS, VOCAB, Chunk, batch_of, configure, decoder, logits_of, one_thread
from torch import Tensor

from cgplan.backends import GraphBackend
from cgplan.backends.tape import TapeBackend
from cgplan.errors import InputError, ModelError
from cgplan.runner.manager import CudaGraphManager

pytestmark = pytest.mark.usefixtures("quiet_collector")
SLOTS, RANK = 3, 4
Q_PROJ = "layers.0.self_attn.q_proj"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def lora_decoder(backend: GraphBackend) -> Decoder:
    """A decoder with empty slots."""
    model = decoder(backend, num_layers=2, max_loras=SLOTS, lora_rank=RANK)
    for slot in range(SLOTS):
        model.remove_lora(slot)
    return model


def projections(model: Decoder) -> dict[str, Projection]:
    return {
        name: module for name, module in model.named_modules() if isinstance(module, Projection)
    }


def weights(model: Decoder, seed: int, rank: int = RANK) -> dict[str, Tensor]:
    """An adapter for every projection."""
    generator, made = torch.Generator().manual_seed(seed), {}
    for name, projection in projections(model).items():
        size_out, size_in = projection.weight.shape
        made[f"{name}.lora_A"] = torch.randn(rank, size_in, generator=generator)
        made[f"{name}.lora_B"] = torch.randn(size_out, rank, generator=generator)
    return made


def small() -> dict[str, Tensor]:
    """An adapter for one projection."""
    return {f"{Q_PROJ}.lora_A": torch.ones(2, 48), f"{Q_PROJ}.lora_B": torch.ones(64, 2)}


def merged(model: Decoder, adapter: dict[str, Tensor] | None) -> Decoder:
    """A decoder without LoRA whose weights have the adapter in them."""
    other = first_layers(model, model.config.num_layers)
    for name, projection in projections(other).items() if adapter else ():
        delta = adapter[f"{name}.lora_B"].double() @ adapter[f"{name}.lora_A"].double()
        projection.weight = torch.nn.Parameter(
            projection.weight + delta.to(projection.weight.device), False
        )
    return other


class Server:
    """A decoder with graphs for every number of adapters; each batch is a fresh prefill of random prompts."""

    def __init__(self, backend: GraphBackend) -> None:
        self.model = lora_decoder(backend)
        config = configure(
            backend,
            max_loras=SLOTS,
            compilation={"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [4, 16]},
            lora={"max_loras": SLOTS, "rank": RANK, "specialize_active_lora": True},
        )
        self.manager = CudaGraphManager(config, self.model, backend)
        self.manager.capture()
        self.adapters = Adapters(self.model, config.lora.max_loras if config.lora else None)

    def run(self, names: list[str | None], seed: int = 0) -> tuple[list[Chunk], list[Tensor]]:
        """The batch, and the logits of each request."""
        choose = random.Random(seed)
        free = choose.sample(range(NUM_BLOCKS), len(names))
        chunks = [
            Chunk([choose.randrange(VOCAB) for _ in range(choose.randint(1, 4))], 0, [block])
            for block in free
        ]
        counts = [len(chunk.tokens) for chunk in chunks]
        device = self.manager.backend.device
        lora_ids, active = self.adapters.batch(names, counts, device)
        batch = batch_of(chunks, device)
        logits = self.manager.run(**batch, lora_ids=lora_ids, num_active_loras=active)
        return chunks, list(logits.clone().split(counts))


@pytest.fixture
def server(backend: GraphBackend) -> Iterator[Server]:
    made = Server(backend)
    yield made
    assert not made.manager.stats.eager, "every batch is served by a graph"
    made.manager.close()


def test_a_batch_that_mixes_adapters_equals_merged_weights(server: Server) -> None:
    given = {
        name: weights(server.model, seed, rank)
        for name, seed, rank in (("fr", 1, 4), ("de", 2, 1), ("pl", 3, 3))
    }
    for name, adapter in given.items():
        server.adapters.load(name, adapter)
    base = merged(server.model, None)
    alone = {name: merged(server.model, adapter) for name, adapter in given.items()}
    choose = random.Random(5)
    for seed in range(16):
        names: list[str | None] = [
            choose.choice([None, *given]) for _ in range(choose.randint(1, 4))
        ]
        names = {0: [None, *given], 1: [None]}.get(seed, names)
        chunks, found = server.run(names, seed)
        for name, chunk, logits in zip(names, chunks, found, strict=True):
            model = base if name is None else alone[name]
            torch.testing.assert_close(logits, logits_of(model, [chunk]), rtol=1e-9, atol=1e-9)
            assert name is None or not torch.allclose(logits, logits_of(base, [chunk]), atol=1e-3)
    cases = {descriptor.num_active_loras for _, descriptor in server.manager.stats.replays}
    assert cases == {0, 1, 2, 4}


def test_changes_take_effect_in_the_next_replay_without_a_capture(server: Server) -> None:
    """Loaded, replaced, removed, and loaded again into the slot that became free."""
    model, adapters = server.model, server.adapters
    old, new = weights(model, 1), weights(model, 2)
    base = merged(model, None)
    report = server.manager.report
    addresses = [projection.lora_a.data_ptr() for projection in projections(model).values()]

    def answer(name: str | None) -> tuple[list[Chunk], Tensor]:
        chunks, [logits] = server.run([name])
        return chunks, logits

    assert adapters.load("one", old) == 0
    assert adapters.load("two", weights(model, 9)) == 1
    chunks, first = answer("one")
    torch.testing.assert_close(first, logits_of(merged(model, old), chunks), rtol=1e-9, atol=1e-9)
    assert adapters.replace("one", new) == 0
    _, second = answer("one")
    torch.testing.assert_close(second, logits_of(merged(model, new), chunks), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(first, second, atol=1e-3)
    adapters.remove("one")
    assert not any(
        projection.lora_a[0].any() or projection.lora_b[0].any()
        for projection in projections(model).values()
    )
    batch = batch_of(chunks, server.manager.backend.device)
    removed = server.manager.run(
        **batch, lora_ids=torch.zeros_like(batch["input_ids"]), num_active_loras=1
    )
    torch.testing.assert_close(removed, logits_of(base, chunks), rtol=1e-9, atol=1e-9)
    assert (
        adapters.load(
            "three", {f"{Q_PROJ}.{part}": old[f"{Q_PROJ}.{part}"] for part in ("lora_A", "lora_B")}
        )
        == 0
    )
    adapters.replace("three", {name: torch.zeros_like(weight) for name, weight in small().items()})
    _, third = answer("three")
    torch.testing.assert_close(third, logits_of(base, chunks), rtol=1e-9, atol=1e-9)
    assert adapters.slots == {"three": 0, "two": 1}
    assert server.manager.report is report
    assert addresses == [projection.lora_a.data_ptr() for projection in projections(model).values()]


def test_what_a_batch_says() -> None:
    adapters = Adapters(lora_decoder(TapeBackend()))
    adapters.load("b", small(), slot=2)
    adapters.load("a", small())
    lora_ids, active = adapters.batch(["b", None, "a", "b"], [1, 3, 2, 1])
    assert lora_ids.tolist() == [2, -1, -1, -1, 0, 0, 2]
    assert lora_ids.dtype is torch.int64
    assert active == 2
    assert adapters.batch([None], [2])[1] == 0
    assert adapters.batch([], []).lora_ids.dtype is torch.int64


# --- mistakes -------------------------------------------------------------------------------------------------


def bad(**changes: Any) -> dict[str, Tensor]:
    shapes = {"lora_A": (2, 48), "lora_B": (64, 2), **changes}
    return {f"{Q_PROJ}.{part}": torch.ones(shape) for part, shape in shapes.items()}


@pytest.mark.parametrize(
    ("wrong", "text", "remedy"),
    [
        (bad(lora_A=(5, 48), lora_B=(64, 5)), "has shapes", f"rank at most {RANK}"),
        (bad(lora_A=(2, 47)), "has shapes", r"lora_A (rank, 48)"),
        (bad(lora_B=(64, 3)), "has shapes", "lora_B (64, rank)"),
        ({}, "has no weights", "<projection>.lora_A"),
        ({f"{Q_PROJ}.lora_A": torch.tensor(1.0)}, "has shapes", "lora_A (rank, 48)"),
        ({name: weight.to(torch.int8) for name, weight in small().items()}, "not finite", "quantized"),
        ({"layers.9.mlp.up_proj.lora_A": torch.ones(2, 48)}, "fits no projection", ".lora_A"),
        ({f"{Q_PROJ}.lora_A": torch.full((2, 48), float("nan")), f"{Q_PROJ}.lora_B": torch.ones(64, 2)},
         "not finite", "damaged"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_change_nothing(wrong: Any, text: str, remedy: str) -> None:
    model = lora_decoder(TapeBackend())
    adapters = Adapters(model)
    adapters.load("good", weights(model, 1))
    before = [projection.lora_a.clone() for projection in projections(model).values()]
    for action in (lambda: adapters.load("new", wrong), lambda: adapters.replace("good", wrong)):
        with pytest.raises(ModelError, match=text) as caught:
            action()
        assert remedy in caught.value.remedy
    same([projection.lora_a for projection in projections(model).values()], before)
    assert adapters.slots == {"good": 0}
    assert adapters.load("new", weights(model, 2)) == 1


@pytest.mark.parametrize("rank", [RANK, 1])
def test_weights_that_lie_in_their_own_slot(backend: GraphBackend, rank: int) -> None:
    """As somebody writes who scales an adapter, or cuts its rank, where it is."""
    model = lora_decoder(backend)
    adapters = Adapters(model)
    adapters.load("one", weights(model, 1))
    slot = adapters.load("two", weights(model, 2))
    own, wanted = {}, []
    for name, projection in projections(model).items():
        own[f"{name}.lora_A"] = projection.lora_a[slot, RANK - rank :]
        own[f"{name}.lora_B"] = projection.lora_b[slot, RANK - rank :].T
        wanted.append(
            (
                projection.lora_a[slot, RANK - rank :].clone(),
                projection.lora_b[slot, RANK - rank :].clone(),
            )
        )
    assert adapters.replace("two", own) == slot
    for projection, (a, b) in zip(projections(model).values(), wanted, strict=True):
        same((projection.lora_a[slot, :rank], projection.lora_b[slot, :rank]), (a, b))
        assert a.any()
        assert not projection.lora_a[slot, rank:].any()
    adapters.remove("two")
    assert not any(projection.lora_b[slot].any() for projection in projections(model).values())


def test_names_and_slots_that_are_taken_or_not_there() -> None:
    model = lora_decoder(TapeBackend())
    adapters = Adapters(model)
    adapters.load("french", small())
    with pytest.raises(ModelError, match="'french' is loaded already, in slot 0") as caught:
        adapters.load("french", small())
    assert "replace" in caught.value.remedy
    with pytest.raises(ModelError, match="slot 0 holds the adapter 'french'") as caught:
        adapters.load("german", small(), slot=0)
    assert "Remove it first" in caught.value.remedy
    for wrong in (SLOTS, -1):
        with pytest.raises(ModelError, match=f"no adapter slot {wrong}") as caught:
            adapters.load("german", small(), slot=wrong)
        assert "from 0 to max_loras - 1" in caught.value.remedy
    replace: Callable[[str], int] = lambda name: adapters.replace(name, small())  # noqa: E731
    for action in (adapters.remove, replace, lambda name: adapters.batch([name], [1])):
        with pytest.raises(InputError, match="no adapter 'frnch' is loaded") as caught:
            action("frnch")
        assert "Did you mean 'french'?" in caught.value.remedy
    adapters.load("german", small())
    adapters.load("polish", small())
    with pytest.raises(
        ModelError, match="all 3 adapter slots are taken, by french, german, polish"
    ) as caught:
        adapters.load("czech", small())
    assert "Remove one that no request needs" in caught.value.remedy
    adapters.remove("german")
    assert adapters.load("czech", small()) == 1


def test_more_adapters_in_a_batch_than_the_configuration_allows(server: Server) -> None:
    adapters = Adapters(server.model, max_active=2)
    for name in ("a", "b", "c"):
        adapters.load(name, small())
    with pytest.raises(
        InputError, match="the batch has 3 different adapters, at most 2 are allowed"
    ) as caught:
        adapters.batch(["a", "b", "c", None], [1, 1, 1, 1])
    assert "lora.max_loras" in caught.value.remedy
    assert adapters.batch(["a", "b", "a", None], [1, 1, 1, 1]).num_active_loras == 2
    with pytest.raises(InputError, match="2 adapter names for 1 requests") as caught:
        adapters.batch(["a", None], [1])
    assert "one for each request" in caught.value.remedy
    chunks = [Chunk([1, 2], 0, [0])]
    batch = batch_of(chunks, server.manager.backend.device)
    ids = torch.full_like(batch["input_ids"], -1)
    before = dict(server.manager.stats.replays)
    with pytest.raises(InputError, match=r"num_active_loras is 5, lora\.max_loras is 3") as caught:
        server.manager.run(**batch, lora_ids=ids, num_active_loras=5)
    assert "raise lora.max_loras" in caught.value.remedy
    assert dict(server.manager.stats.replays) == before
    found = server.manager.run(**batch, lora_ids=ids)
    torch.testing.assert_close(
        found, logits_of(merged(server.model, None), chunks), rtol=1e-9, atol=1e-9
    )


def test_models_without_enough_slots() -> None:
    with pytest.raises(ModelError, match="no adapter slots") as caught:
        Adapters(decoder(TapeBackend()))
    assert "max_loras above 0" in caught.value.remedy
    for wrong in (0, SLOTS + 1):
        with pytest.raises(
            ModelError, match=f"{wrong} adapters in a batch, and the model has 3 slots"
        ):
            Adapters(lora_decoder(TapeBackend()), wrong)
