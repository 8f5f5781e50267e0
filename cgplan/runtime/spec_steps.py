"""What a step of speculative decoding hands to the host: the new tokens, and what drafting them brought."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class SpecStats:
    """What speculation brought, of the steps whose tokens were read.

    Attributes:
        steps: Steps by number of draft tokens.
        drafted: Draft tokens of all requests.
        accepted: Those that the target agreed with.
        tokens: New tokens, the target's own included.
    """

    steps: Counter[int] = field(default_factory=Counter)
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0

    @property
    def acceptance(self) -> float:
        """Share of the draft tokens that was accepted, 0 if there were none."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def count(self, draft_tokens: int, counts: Sequence[int]) -> None:
        """Add a step that gave so many new tokens to each request."""
        self.steps[draft_tokens] += 1
        self.drafted += draft_tokens * len(counts)
        self.accepted += sum(max(count - 1, 0) for count in counts)
        self.tokens += sum(counts)


@dataclass(slots=True, eq=False)
class SpecRequest:
    """What the host knows of a request.

    Attributes:
        context: Tokens in the target's cache, as of the last step that was read.
        room: Tokens that its blocks hold.
    """

    context: int
    room: int


class SpecStep:
    """One step under way on the device. ``tokens`` waits for it; until then the host is free to do other things.

    Args:
        slots, draft_tokens: As below.
        result: Waits for what ``Verify`` returned, and gives it on the host.
        requests: What the host knows of each.
        stats: Where the step is counted once its tokens are read.

    Attributes:
        slots: The requests, in order.
        draft_tokens: How many tokens were drafted for each.
    """

    def __init__(
        self,
        slots: tuple[int, ...],
        draft_tokens: int,
        result: Callable[[], torch.Tensor],
        requests: Sequence[SpecRequest],
        stats: SpecStats,
    ) -> None:
        self.slots = slots
        self.draft_tokens = draft_tokens
        self._requests = requests
        self._stats = stats
        self._tokens: list[list[int]] | None = None
        self._result = result

    def tokens(self) -> list[list[int]]:
        """The new tokens of each request, in the order of ``slots``: 1 to 1 + draft_tokens of them, and none where the
        request had no block left when the step ran.
        """
        if self._tokens is None:
            self._tokens = [row[1 : 1 + row[0]] for row in self._result().tolist()]
            counts = [len(tokens) for tokens in self._tokens]
            for request, count in zip(self._requests, counts, strict=True):
                request.context += count
            self._stats.count(self.draft_tokens, counts)
        return self._tokens


__all__ = ["SpecRequest", "SpecStats", "SpecStep"]
