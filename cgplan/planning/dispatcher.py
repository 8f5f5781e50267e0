"""Dispatch: which graph runs this batch. Precomputed, so that a call is one table look-up."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import StrEnum

from cgplan.descriptors import BatchDescriptor
from cgplan.modes import CUDAGraphMode
from cgplan.planning.plan import Plan

Answer = tuple[CUDAGraphMode, BatchDescriptor]


class MissReason(StrEnum):
    """Why no graph serves a batch."""

    NOTHING_CAPTURED = "nothing is captured"
    TOO_LARGE = "larger than the largest capture size"
    MODE_EXCLUDED = "the caller excluded the mode of its graph"
    NO_LORA_CASE = "no graph for this number of active adapters"
    NO_GRAPH_FOR_MIXED = "mixed batches run eagerly in this mode"


class _Row(dict[int, Answer]):
    """Answers by number of tokens. Those that no graph serves are (NONE, unpadded descriptor), made on the first
    question and kept; as in vLLM, such a descriptor holds the number of tokens alone.
    """

    def __missing__(self, num_tokens: int) -> Answer:
        answer = self[num_tokens] = (CUDAGraphMode.NONE, BatchDescriptor(num_tokens))
        return answer


class CudagraphDispatcher:
    """Answers for every batch, from a plan. Immutable in effect: equal questions get equal answers on every rank.

    The table has a row for each (uniform, active adapters, modes allowed); a row is indexed by the number of tokens.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._keys = frozenset(plan.keys)
        self._padded = plan.padding_table()
        self._cases = range(max(plan.lora_cases) + 1)
        # rows[uniform][active adapters][num_tokens], for callers that exclude no mode
        self._rows = tuple({n: self._row(uniform, n, True, True) for n in self._cases} for uniform in (False, True))
        self._restricted: dict[tuple[bool, int, bool, bool], _Row] = {}
        self._eager = _Row()

    def dispatch(
        self,
        num_tokens: int,
        uniform_decode: bool = False,
        num_active_loras: int = 0,
        valid_modes: Collection[CUDAGraphMode] | None = None,
        invalid_modes: Collection[CUDAGraphMode] | None = None,
    ) -> Answer:
        """Runtime mode and descriptor for a batch.

        Args:
            num_tokens: Tokens of the batch, unpadded.
            uniform_decode: Whether each request has ``plan.query_len`` tokens.
            num_active_loras: Distinct adapters in the batch.
            valid_modes: The runtime modes that may be chosen; all if absent. NONE is always possible.
            invalid_modes: Runtime modes that may not be chosen.

        Returns:
            FULL with its key if there is one, else PIECEWISE with its key, else NONE with the unpadded
            descriptor (``explain`` says why). The tuple is shared, not built anew.
        """
        if valid_modes is None and invalid_modes is None:
            try:
                return self._rows[uniform_decode][num_active_loras][num_tokens]
            except KeyError:  # more adapters than any graph serves
                return self._eager[num_tokens]
        if num_active_loras not in self._cases:
            return self._eager[num_tokens]
        valid = None if valid_modes is None else [CUDAGraphMode.parse(mode) for mode in valid_modes]
        invalid = [CUDAGraphMode.parse(mode) for mode in invalid_modes or ()]
        full, piecewise = (
            (valid is None or mode in valid) and mode not in invalid
            for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)
        )
        case = (bool(uniform_decode), num_active_loras, full, piecewise)
        row = self._restricted.get(case)
        if row is None:
            row = self._restricted[case] = self._row(*case)
        return row[num_tokens]

    def explain(
        self,
        num_tokens: int,
        uniform_decode: bool = False,
        num_active_loras: int = 0,
        valid_modes: Collection[CUDAGraphMode] | None = None,
        invalid_modes: Collection[CUDAGraphMode] | None = None,
    ) -> MissReason | None:
        """Why ``dispatch`` answers NONE to the same question; None if a graph serves the batch."""
        asked = (num_tokens, uniform_decode, num_active_loras)
        if self.dispatch(*asked, valid_modes, invalid_modes)[0] is not CUDAGraphMode.NONE:
            return None
        if not self.plan.keys:
            return MissReason.NOTHING_CAPTURED
        if num_active_loras not in self._cases:
            return MissReason.NO_LORA_CASE
        if num_tokens > self.plan.max_capture_size:
            return MissReason.TOO_LARGE
        if self.dispatch(*asked)[0] is not CUDAGraphMode.NONE:
            return MissReason.MODE_EXCLUDED
        return MissReason.NO_GRAPH_FOR_MIXED if not uniform_decode else MissReason.TOO_LARGE

    def _row(self, uniform: bool, num_active_loras: int, full: bool, piecewise: bool) -> _Row:
        case = min(c for c in self.plan.lora_cases if c >= num_active_loras)
        by_size = {
            size: next(self._candidates(size, uniform, case, full, piecewise), None) for size in self.plan.capture_sizes
        }
        answers = ((n, by_size.get(padded)) for n, padded in enumerate(self._padded))
        return _Row((n, answer) for n, answer in answers if answer is not None)

    def _candidates(self, size: int, uniform: bool, case: int, full: bool, piecewise: bool) -> Iterator[Answer]:
        """Keys that could serve a batch padded to ``size``, best first."""
        seqs, q = self.plan.max_num_seqs, self.plan.query_len
        decode_reqs = min(size // q, seqs)
        descriptors = [BatchDescriptor(size, decode_reqs, True, case > 0, case)] if uniform else []
        descriptors.append(BatchDescriptor(size, min(size, seqs), False, case > 0, case))
        answers = [(CUDAGraphMode.FULL, d) for d in descriptors] if full else []
        if piecewise:
            answers.append((CUDAGraphMode.PIECEWISE, BatchDescriptor(size, None, False, case > 0, case)))
        return (answer for answer in answers if answer in self._keys)


__all__ = ["Answer", "CudagraphDispatcher", "MissReason"]
