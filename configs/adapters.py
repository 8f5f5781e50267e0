"""LoRA adapters by name: which fixed slot holds which, and the metadata of a batch.

Captured graphs read the slots' memory, which never moves. Loading, replacing or removing an adapter
copies into a slot on the current stream, as the replays run: those queued before see the old
weights, those queued after the new ones, and nothing is captured again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cgplan.buffers.static import Tensors
from cgplan.errors import InputError, ModelError, did_you_mean

NO_SLOT = -1


class HasSlots(Protocol):
    """A model with fixed adapter slots, such as the reference decoder."""

    @property
    def max_loras(self) -> int: ...

    def load_lora(self, slot: int, state: Tensors) -> None:
        """Copy an adapter into a slot, in place, or raise ModelError and leave the slot as it
        was.
        """

    def remove_lora(self, slot: int) -> None:
        """Zero a slot, in place."""


class AdapterBatch(NamedTuple):
    """Adapters of a batch.

    Attributes:
        lora_ids: [num_tokens] int64, each token's slot, -1 for none; a metadata input of the model.
        num_active_loras: Distinct adapters, for the runner's call.
    """

    lora_ids: Tensor
    num_active_loras: int


class Adapters:
    """Names for the adapter slots of a model, which hold the weights.

    Remove or replace an adapter only when no running request needs it: the next replay silently
    computes such a request with the new weights, or without an adapter. A new adapter may get the
    slot at once.

    Args:
        model: This object manages all its slots, and takes them for empty. The caller owns it.
        max_active: Distinct adapters in one batch at most, as ``lora.max_loras`` says; absent: as
            many as slots.

    Raises:
        ModelError: the model has no slots, or ``max_active`` is not between 1 and their number.
    """

    def __init__(self, model: HasSlots, max_active: int | None = None) -> None:
        slots = getattr(model, "max_loras", 0)
        if slots < 1:
            raise ModelError(
                "the model has no adapter slots", remedy="Build it with max_loras above 0."
            )
        if max_active is not None and not 1 <= max_active <= slots:
            raise ModelError(
                f"{max_active} adapters in a batch, and the model has {slots} slots",
                remedy="Build it with max_loras as large as lora.max_loras at least.",
            )
        self.max_active = slots if max_active is None else max_active
        self._model = model
        self._slots: dict[str, int] = {}

    @property
    def slots(self) -> Mapping[str, int]:
        """Slot of each adapter, by name."""
        return dict(self._slots)

    def load(self, name: str, weights: Tensors, slot: int | None = None) -> int:
        """Copy a new adapter into a slot and return the slot; absent: the first free one.
        ``weights`` are as ``Decoder.load_lora`` takes them, on any device.

        Raises:
            ModelError: the name or the slot is in use or not there, no slot is free, or the weights
                do not fit. Nothing changed.
        """
        if name in self._slots:
            raise ModelError(
                f"an adapter {name!r} is loaded already, in slot {self._slots[name]}",
                remedy="Call replace to give it other weights, or choose another name.",
            )
        holders = {place: held for held, place in self._slots.items()}
        if slot is None:
            slot = next(
                (free for free in range(self._model.max_loras) if free not in holders), None
            )
        if slot is None:
            raise ModelError(
                f"all {self._model.max_loras} adapter slots are taken, by {', '.join(self._slots)}",
                remedy="Remove one that no request needs, or build the model with a larger "
                "max_loras.",
            )
        if slot in holders:
            raise ModelError(
                f"slot {slot} holds the adapter {holders[slot]!r}",
                remedy="Remove it first, or name no slot.",
            )
        self._copy(slot, weights)
        self._slots[name] = slot
        return slot

    def replace(self, name: str, weights: Tensors) -> int:
        """Copy other weights into an adapter's slot and return it. Raises InputError for an unknown
        name, and ModelError, with the old weights in place, where the new ones do not fit.
        """
        slot = self._slot(name)
        self._copy(slot, weights)
        return slot

    def remove(self, name: str) -> None:
        """Zero an adapter's slot and free it. Raises InputError for an unknown name."""
        self._model.remove_lora(self._slot(name))
        del self._slots[name]

    def batch(
        self,
        names: Sequence[str | None],
        query_lens: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> AdapterBatch:
        """The metadata of a batch of requests.

        Args:
            names: Adapter of each request, None for none.
            query_lens: Tokens of each request in this batch.
            device: Where ``lora_ids`` is made.

        Raises:
            InputError: an unknown name, more distinct adapters than ``max_active``, or lists of
                different lengths.
        """
        if len(names) != len(query_lens):
            raise InputError(
                f"{len(names)} adapter names for {len(query_lens)} requests",
                remedy="Give one for each request, None for no adapter.",
            )
        slots = [NO_SLOT if name is None else self._slot(name) for name in names]
        active = len({*slots} - {NO_SLOT})
        if active > self.max_active:
            raise InputError(
                f"the batch has {active} different adapters, at most {self.max_active} are allowed",
                remedy="Put the requests into several batches, or raise lora.max_loras.",
            )
        ids = [slot for slot, count in zip(slots, query_lens, strict=True) for _ in range(count)]
        return AdapterBatch(torch.tensor(ids, dtype=torch.int64, device=device), active)

    def _copy(self, slot: int, weights: Tensors) -> None:
        if not weights:
            raise ModelError(
                "the adapter has no weights",
                remedy="Give <projection>.lora_A and .lora_B, or None as a request's adapter.",
            )
        self._model.load_lora(slot, weights)

    def _slot(self, name: str) -> int:
        if name not in self._slots:
            loaded = f"Loaded are {', '.join(self._slots) or 'none'}."
            raise InputError(
                f"no adapter {name!r} is loaded", remedy=did_you_mean(name, self._slots) + loaded
            )
        return self._slots[name]
