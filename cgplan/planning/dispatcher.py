"""Dispatch: which graph runs this batch. Precomputed, so that a call is one table look-up."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from enum import StrEnum
from itertools import product
from operator import ge

from cgplan.errors import InputError
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.planning.plan import Lane, Plan
from cgplan.units import grouped

Answer = tuple[CUDAGraphMode, BatchDescriptor]
Modes = Collection[CUDAGraphMode] | None
_GRAPHS = frozenset({CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE})


class MissReason(StrEnum):
    """Why no graph serves a batch."""

    NOTHING_CAPTURED = "nothing is captured"
    TOO_LARGE = "larger than the largest capture size"
    MODE_EXCLUDED = "the caller excluded the mode of its graph"
    NO_LORA_CASE = "no graph for this number of active adapters"
    NO_GRAPH_FOR_MIXED = "mixed batches run eagerly in this mode"
    NOT_CAPTURED_YET = "its graph is not captured yet"
    CAPTURE_FAILED = "its graph could not be captured"
    OVER_BUDGET = "the budget has no room for its graph"


def set_of_modes(given: Collection[CUDAGraphMode]) -> frozenset[CUDAGraphMode]:
    """Runtime modes of a call, which may be given by name. Raises InputError for a text in place of
    a collection.
    """
    if isinstance(given, str):
        raise InputError(
            f"the modes {given!r} are a text", remedy=f"Pass a set: {{CUDAGraphMode.{given}}}."
        )
    return frozenset(map(CUDAGraphMode.parse, given))


class _Row(dict[int | tuple[int, ...], Answer]):
    """Answers by the sizes of a batch, rows first (a number where rows alone vary): the first of
    ``keys``, in order of preference, whose box holds it. They are found ahead for all corners of
    the grid that the boxes span; a batch goes up to the next corner. An eager batch gets (NONE,
    unpadded descriptor); as in vLLM, such a descriptor holds the sizes alone.
    """

    def __init__(self, keys: Sequence[Key], num_sizes: int | None) -> None:
        super().__init__()
        self._axes = [sorted(set(axis)) for axis in zip(*(key[1].box for key in keys), strict=True)]
        self._num_sizes, self._corners = num_sizes, dict[tuple[int, ...], int]()
        rank = {key[1].box: i for i, key in reversed([*enumerate(keys)])}
        for corner in product(*(range(len(axis) - 1, -1, -1) for axis in self._axes)):
            beyond = ((*corner[:d], i + 1, *corner[d + 1 :]) for d, i in enumerate(corner))
            own = rank.get(tuple(axis[i] for axis, i in zip(self._axes, corner, strict=True)))
            found = [own, *map(self._corners.get, beyond)]
            self._corners[corner] = min((i for i in found if i is not None), default=len(keys))
        self._keys = keys

    def __missing__(self, asked: int | tuple[int, ...]) -> Answer:
        box = asked if isinstance(asked, tuple) else (asked,)
        if self._num_sizes not in (None, len(box)):
            raise InputError(
                f"a batch of the sizes {box}, where the plan counts {self._num_sizes}",
                remedy="Pass `sizes`: one number for each name of `dims` behind the first.",
            )
        corner = tuple(map(bisect_left, self._axes, box))
        rank = self._corners.get(corner, len(self._keys)) if min(box) > 0 else len(self._keys)
        eager = CUDAGraphMode.NONE, BatchDescriptor(box[0], sizes=box[1:])
        answer = self[asked] = self._keys[rank] if rank < len(self._keys) else eager
        return answer


class CudagraphDispatcher:
    """Answers for every batch, from a plan. Immutable in effect: equal questions get equal answers
    on every rank.

    A batch goes to the first of these that holds it: FULL graphs (those of uniform decode only if
    it is uniform), then PIECEWISE graphs; of each kind those for the fewest adapters that are
    enough; there the smallest size. The table has a row for each (uniform, active adapters, modes
    allowed); a row is indexed by the sizes of the batch.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        # Keys by lane, lanes in the order in which they are asked. FULL graphs of a plan are either
        # all of uniform decode or all of mixed batches.
        ordered = sorted(
            plan.keys,
            key=lambda k: (
                k[0] is not CUDAGraphMode.FULL,
                k[1].num_active_loras,
                k[1].elements,
                k[1].box,
            ),
        )
        self._lanes = grouped((Lane.of(*key), key) for key in ordered)
        self._cases = range(max((*plan.lora_cases, 0)) + 1)
        self._by_lanes: dict[tuple[Lane, ...], _Row] = {}
        self._num_sizes = len(plan.keys[0][1].box) if plan.keys else None
        self._eager = _Row((), self._num_sizes)
        # rows[uniform][active adapters][num_tokens], for callers that exclude no mode; counts of
        # adapters that go to the same LoRA case share a row
        captured = sorted({lane.num_active_loras for lane in self._lanes})
        case_of = [next((case for case in captured if case >= n), -1) for n in self._cases]
        self._rows = tuple(
            {n: rows.get(case, self._eager) for n, case in enumerate(case_of)}
            for rows in (
                {case: self._row(uniform, case, _GRAPHS) for case in captured}
                for uniform in (False, True)
            )
        )

    def dispatch(
        self,
        num_tokens: int,
        uniform_decode: bool = False,
        num_active_loras: int = 0,
        valid_modes: Modes = None,
        invalid_modes: Modes = None,
        sizes: tuple[int, ...] = (),
    ) -> Answer:
        """Runtime mode and descriptor for a batch. With several dimensions: of the boxes that hold
        it, the one with the fewest elements.

        Args:
            num_tokens: Unpadded.
            uniform_decode: Whether each request has ``plan.query_len`` tokens.
            num_active_loras: Distinct adapters in the batch.
            valid_modes: The runtime modes that may be chosen; all if absent. NONE is always
                possible.
            invalid_modes: Runtime modes that may not be chosen.
            sizes: In the other named dimensions, unpadded, see BatchDescriptor.

        Returns:
            FULL or PIECEWISE with its key, else NONE with the unpadded descriptor (``explain`` says
            why).
        """
        asked = (num_tokens, *sizes) if sizes else num_tokens
        if valid_modes is None and invalid_modes is None:
            try:
                return self._rows[uniform_decode][num_active_loras][asked]
            except KeyError:  # more adapters than any graph serves
                return self._eager[asked]
        if num_active_loras not in self._cases:
            return self._eager[asked]
        allowed = _GRAPHS if valid_modes is None else _GRAPHS & set_of_modes(valid_modes)
        return self._row(
            uniform_decode, num_active_loras, allowed - set_of_modes(invalid_modes or ())
        )[asked]

    def explain(
        self,
        num_tokens: int,
        uniform_decode: bool = False,
        num_active_loras: int = 0,
        valid_modes: Modes = None,
        invalid_modes: Modes = None,
        sizes: tuple[int, ...] = (),
    ) -> MissReason | None:
        """Why ``dispatch`` answers this question with NONE; None if a graph serves the batch."""
        asked = (num_tokens, uniform_decode, num_active_loras)
        if self.dispatch(*asked, valid_modes, invalid_modes, sizes)[0] is not CUDAGraphMode.NONE:
            return None
        if not self.plan.keys:
            return MissReason.NOTHING_CAPTURED
        if num_active_loras not in self._cases:
            return MissReason.NO_LORA_CASE
        is_held = any(all(map(ge, key[1].sizes, sizes)) for key in self.plan.keys)
        if num_tokens > self.plan.max_capture_size or not is_held:
            return MissReason.TOO_LARGE
        if self.dispatch(*asked, sizes=sizes)[0] is not CUDAGraphMode.NONE:
            return MissReason.MODE_EXCLUDED
        serving = {
            lane.num_active_loras for lane in self._lanes if uniform_decode or not lane.uniform
        }
        if not serving:
            return MissReason.NO_GRAPH_FOR_MIXED
        return MissReason.TOO_LARGE if max(serving) >= num_active_loras else MissReason.NO_LORA_CASE

    def _row(self, uniform: bool, num_active_loras: int, modes: Collection[CUDAGraphMode]) -> _Row:
        """Answers of the first lane that holds a batch, by its smallest box that does."""
        serving = (
            n for n in self._lanes if n.mode in modes and n.num_active_loras >= num_active_loras
        )
        lanes = tuple(lane for lane in serving if uniform or not lane.uniform)
        if lanes not in self._by_lanes:
            self._by_lanes[lanes] = _Row(
                [key for lane in lanes for key in self._lanes[lane]], self._num_sizes
            )
        return self._by_lanes[lanes]
