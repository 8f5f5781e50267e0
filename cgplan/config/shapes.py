"""Symbolic shapes: which dimension of an input counts the rows of a batch."""

from __future__ import annotations

import re
from dataclasses import dataclass

SYMBOLS = ("num_tokens", "num_reqs")
_DIM = re.compile(r"(?:(?P<factor>\d+)\s*\*\s*)?(?P<symbol>[a-z_]+)\s*(?:\+\s*(?P<offset>\d+))?")


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension: ``factor * symbol + offset``, or just ``offset`` where there is no symbol.

    Attributes:
        symbol: ``num_tokens``, ``num_reqs``, or None for a fixed size.
        factor: Rows of the input for each row of the batch.
        offset: Rows that every batch has besides (the 1 in ``num_reqs + 1``).
    """

    symbol: str | None
    factor: int
    offset: int

    @classmethod
    def parse(cls, value: int | str) -> Dim:
        """Dimension from YAML: ``224``, ``num_tokens``, ``num_reqs + 1`` or ``2 * num_tokens``. Raises ValueError."""
        if isinstance(value, int):
            if value < 1:
                raise ValueError(f"a dimension must be at least 1, found {value}")
            return cls(None, 0, value)
        match = _DIM.fullmatch(value.strip())
        if match is None or match["symbol"] not in SYMBOLS:
            raise ValueError(
                f"cannot read the dimension {value!r}; allowed are a number, num_tokens, num_reqs, "
                "num_reqs + 1, 2 * num_tokens and the like"
            )
        factor = int(match["factor"] or 1)
        if factor < 1:
            raise ValueError(f"the factor in {value!r} must be at least 1")
        return cls(match["symbol"], factor, int(match["offset"] or 0))

    def size(self, num_tokens: int, num_reqs: int) -> int:
        """Rows of this dimension in a batch of ``num_tokens`` tokens and ``num_reqs`` requests."""
        if self.symbol is None:
            return self.offset
        return self.factor * (num_tokens if self.symbol == "num_tokens" else num_reqs) + self.offset

    def count(self, size: int) -> int | None:
        """The symbol's value for which this dimension has ``size`` rows, None if there is none."""
        rest = size - self.offset
        return rest // self.factor if self.symbol and rest >= 0 and rest % self.factor == 0 else None
