"""Dispatch: the graph that runs a batch, by one look-up in a table."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from enum import StrEnum
from itertools import product
from operator import ge, getitem, itemgetter
from typing import Any

from cgplan.errors import InputError
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.planning.plan import Lane, Plan
from cgplan.units import counted, grouped

Answer = tuple[CUDAGraphMode, BatchDescriptor]
Modes = Collection[CUDAGraphMode] | None
Box = tuple[int, ...]
_GRAPHS = frozenset({CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE})


class MissReason(StrEnum):
    NOTHING_CAPTURED = "nothing is captured"
    TOO_LARGE = "larger than the largest capture size"
    MODE_EXCLUDED = "the caller excluded the mode of its graph"
    NO_LORA_CASE = "no graph for this number of active adapters"
    NO_GRAPH_FOR_MIXED = "mixed batches run eagerly in this mode"
    NOT_CAPTURED_YET = "its graph is not captured yet"
    CAPTURE_FAILED = "its graph could not be captured"
    OVER_BUDGET = "the budget has no room for its graph"


def set_of_modes(given: Collection[CUDAGraphMode]) -> frozenset[CUDAGraphMode]:
    """Runtime modes, also by name. Raises InputError for a string."""
    if isinstance(given, str):
        raise InputError(
            "modes is a string; pass a set",
            remedy=f"Pass {{CUDAGraphMode.{given}}}.",
        )
    return frozenset(map(CUDAGraphMode.parse, given))


class _Row(dict[int | Box, Answer]):
    """Answers by the sizes of a batch, rows first.

    An answer is the first of ``keys`` whose box holds the batch. It is known for each corner of the
    grid that the boxes span; a batch goes up to the next corner. An eager batch gets (NONE,
    unpadded descriptor); as in vLLM, that descriptor holds sizes alone.
    """

    def __init__(
        self,
        keys: Sequence[Key],
        num_sizes: int | None,
    ) -> None:
        super().__init__()
        self._keys = keys
        self._num_sizes = num_sizes
        none = len(keys)
        ranks: dict[Box, int] = {}
        for rank, (_, descriptor) in enumerate(keys):
            ranks.setdefault(descriptor.box, rank)
        self._axes = [sorted(set(axis)) for axis in zip(*ranks, strict=True)]
        self._corners: dict[Box, int] = {}
        places = [reversed(range(len(axis))) for axis in self._axes]
        for corner in product(*places):  # the largest one first
            box = tuple(map(getitem, self._axes, corner))
            best = ranks.get(box, none)
            for dim in range(len(corner)):
                above = list(corner)
                above[dim] += 1
                best = min(best, self._corners.get(tuple(above), none))
            self._corners[corner] = best

    def __missing__(self, asked: int | Box) -> Answer:
        box = asked if isinstance(asked, tuple) else (asked,)
        if self._num_sizes not in (None, len(box)):
            raise InputError(
                f"the batch has {counted(len(box), 'size')}; the plan has {self._num_sizes}",
                remedy="Pass `sizes`: one number for each name of `dims` after the first.",
            )
        rows, *others = box
        eager = BatchDescriptor(rows, sizes=tuple(others))
        answer = CUDAGraphMode.NONE, eager
        corner = tuple(map(bisect_left, self._axes, box))
        rank = self._corners.get(corner, len(self._keys))
        if min(box) > 0 and rank < len(self._keys):
            answer = self._keys[rank]
        self[asked] = answer
        return answer


class CudagraphDispatcher:
    """Answers from a plan alone: the same ones on every rank.

    The first lane (``Lane.place``) that serves a batch and holds it runs it, at the smallest size.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        ordered = sorted(plan.keys, key=_preference)
        self._lanes = grouped((Lane.of(*key), key) for key in ordered)
        self._is_v2 = plan.key_rules == "vllm_v2"
        most = max(plan.lora_cases, default=0)
        self._cases = range(most + 1)
        self._by_lanes: dict[tuple[Lane, ...], _Row] = {}
        self._num_sizes = len(plan.keys[0][1].box) if plan.keys else None
        self._eager = _Row((), self._num_sizes)
        # rows[uniform][active adapters][num_tokens], for callers that exclude no mode
        self._rows = []
        for uniform in (False, True):
            rows = {}
            for active in self._cases:
                rows[active] = self._row(uniform, active, _GRAPHS)
            self._rows.append(rows)

    def dispatch(
        self,
        num_tokens: int,
        uniform_decode: bool = False,
        num_active_loras: int = 0,
        valid_modes: Modes = None,
        invalid_modes: Modes = None,
        sizes: tuple[int, ...] = (),
        *,
        num_reqs: int | None = None,
        uniform_query_len: int | None = None,
        max_query_len: int | None = None,
    ) -> Answer:
        """FULL or PIECEWISE and the descriptor of its key; else NONE with the unpadded descriptor,
        and ``explain`` says why. Of several boxes, the one with the fewest elements.

        Args:
            num_tokens: Unpadded.
            uniform_decode: Whether each request has ``plan.query_len`` tokens.
            num_active_loras: Distinct adapters.
            valid_modes: Those that may be chosen, beside NONE; absent: all.
            invalid_modes: Those that may not.
            sizes: In the other named dimensions, unpadded.
            num_reqs: This and what follows decides with key_rules vllm_v2 alone.
            uniform_query_len: Tokens of each request, where all have as many.
            max_query_len: Of each request at most, in a batch without prefill.
        """
        if self._is_v2:
            if uniform_decode:
                uniform_query_len = max_query_len = self.plan.query_len
            cases = self.plan.lora_cases
            at = bisect_left(cases, num_active_loras)
            last = len(cases) - 1
            case = cases[min(at, last)]
            batch = BatchDescriptor(
                num_tokens,
                num_reqs,
                has_lora=case > 0,
                num_active_loras=case,
                max_query_len=max_query_len,
            )
            return self._answer_of_v2(
                batch,
                uniform_query_len,
                _allowed(valid_modes, invalid_modes),
            )
        asked = (num_tokens, *sizes) if sizes else num_tokens
        if valid_modes is None and invalid_modes is None:
            try:
                return self._rows[uniform_decode][num_active_loras][asked]
            except KeyError:  # more adapters than any graph serves
                return self._eager[asked]
        if num_active_loras not in self._cases:
            return self._eager[asked]
        allowed = _allowed(valid_modes, invalid_modes)
        row = self._row(uniform_decode, num_active_loras, allowed)
        return row[asked]

    def _answer_of_v2(
        self,
        batch: BatchDescriptor,
        uniform_query_len: int | None,
        modes: Collection[CUDAGraphMode],
    ) -> Answer:
        """Of vLLM's model runner V2: of the first lane whose smallest graph that has the tokens
        takes the batch.
        """
        for lane, keys in self._lanes.items():
            at = bisect_left(keys, batch[:1], key=itemgetter(1))
            is_for = lane.num_active_loras == batch.num_active_loras
            is_for &= lane.mode in modes
            if not is_for or at == len(keys) or batch.num_tokens <= 0:
                continue
            mode, key = keys[at]
            fits = not key.uniform or key.uniform_query_len == uniform_query_len
            if key.max_query_len is not None:
                asked = batch.max_query_len
                fits = asked is not None and asked <= key.max_query_len
            if key.num_reqs is not None and batch.num_reqs is not None:
                fits = fits and batch.num_reqs <= key.num_reqs
            if fits:
                return mode, key
        return CUDAGraphMode.NONE, batch._replace(max_query_len=None)

    def explain(
        self,
        num_tokens: int,
        uniform_decode: bool = False,
        num_active_loras: int = 0,
        valid_modes: Modes = None,
        invalid_modes: Modes = None,
        sizes: tuple[int, ...] = (),
    ) -> MissReason | None:
        """Why ``dispatch`` answers with NONE; None if a graph serves the batch."""
        asked = num_tokens, uniform_decode, num_active_loras
        mode, _ = self.dispatch(
            *asked,
            valid_modes,
            invalid_modes,
            sizes,
        )
        if mode is not CUDAGraphMode.NONE:
            return None
        if not self.plan.keys:
            return MissReason.NOTHING_CAPTURED
        if num_active_loras not in self._cases:
            return MissReason.NO_LORA_CASE
        held = [all(map(ge, descriptor.sizes, sizes)) for _, descriptor in self.plan.keys]
        if num_tokens > self.plan.max_capture_size or not any(held):
            return MissReason.TOO_LARGE
        mode, _ = self.dispatch(*asked, sizes=sizes)
        if mode is not CUDAGraphMode.NONE:
            return MissReason.MODE_EXCLUDED
        serving = [lane for lane in self._lanes if lane.serves(uniform_decode, 0)]
        if not serving:
            return MissReason.NO_GRAPH_FOR_MIXED
        if max(lane.num_active_loras for lane in serving) < num_active_loras:
            return MissReason.NO_LORA_CASE
        return MissReason.TOO_LARGE

    def _row(
        self,
        uniform: bool,
        num_active_loras: int,
        modes: Collection[CUDAGraphMode],
    ) -> _Row:
        keys = []
        lanes = []
        for lane, own in self._lanes.items():
            if lane.serves(uniform, num_active_loras) and lane.mode in modes:
                lanes.append(lane)
                keys += own
        asked = tuple(lanes)
        if asked not in self._by_lanes:
            self._by_lanes[asked] = _Row(keys, self._num_sizes)
        return self._by_lanes[asked]


def _allowed(valid: Modes, invalid: Modes) -> frozenset[CUDAGraphMode]:
    allowed = _GRAPHS
    if valid is not None:
        allowed &= set_of_modes(valid)
    if invalid is not None:
        allowed -= set_of_modes(invalid)
    return allowed


def _preference(key: Key) -> tuple[Any, ...]:
    lane = Lane.of(*key)
    _, descriptor = key
    return (
        lane.place,
        descriptor.elements,
        descriptor.box,
    )
