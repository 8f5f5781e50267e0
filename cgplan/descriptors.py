"""The key of a captured graph."""

from typing import NamedTuple


class BatchDescriptor(NamedTuple):
    """What a batch looks like to a graph; together with the runtime mode it is the graph's key.

    A named tuple, because it is hashed on the way to every replay and tuples hash in C.

    Attributes:
        num_tokens: Rows of the batch (tokens), padded to a capture size.
        num_reqs: Requests of the batch, padded; None where the graph does not depend on it (PIECEWISE, eager).
        uniform: Whether every request has the same query length ``1 + num_speculative_tokens``.
        has_lora: Whether the graph runs LoRA adapters.
        num_active_loras: How many distinct adapters the graph serves (0 without LoRA).
    """

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0

    @property
    def query_len(self) -> int | None:
        """Tokens of each request in a uniform batch, None in any other."""
        return self.num_tokens // self.num_reqs if self.uniform and self.num_reqs else None

    def __str__(self) -> str:
        parts = [f"num_tokens={self.num_tokens}"]
        if self.num_reqs is not None:
            parts.append(f"num_reqs={self.num_reqs}")
        if self.uniform:
            parts.append("uniform")
        if self.has_lora:
            parts.append(f"num_active_loras={self.num_active_loras}")
        return " ".join(parts)
