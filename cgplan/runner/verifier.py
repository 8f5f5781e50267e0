"""Verifier: replays compared with the model's own code, from the same state and the same random
numbers.

Note [Verification]
    A batch runs by the model's own code, then by the graph. The output, and the tensors that the
    graph writes, have to agree within rounding. What runs by the model's own code, and what may
    stand in the padding, depends on who declared the padding:
    * Calls that teach (``RealRows``): the batch without padding. The graph also runs with copies of
      real rows in its padding, which are valid values for the model: real rows have to be equal to
      the last bit. A difference is looked at once more where random numbers are drawn, or where it
      is in a few elements in half precision: if the padded batch agrees with the graph, then other
      sizes round otherwise, or draw other numbers. That is accepted.
    * A configuration: the padded batch, since attention metadata is made for the padded key, and a
      forward may be given sizes. Where no context tells of sizes, the batch without padding runs,
      too: if it differs, and if copies of real rows change the output, or other sizes than rows are
      padded, then padding reaches real rows.
    The answer of a replay that differs is that of the model's own code, with the state that this
    code left. Memory that each run overwrites at places given by inputs, such as a KV cache, is not
    copied: both write it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from cgplan.buffers.compare import Difference, compare, differences, is_equal
from cgplan.buffers.static import torch_dtype
from cgplan.captures.failures import explain_eager_failure
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.errors import NumbersError
from cgplan.graphs.fingerprint import Change, Fingerprint
from cgplan.graphs.put_back import PutBack
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.reports.records import VerifyRecord
from cgplan.runner.prepared import NEVER, Due, PreparedCall, Values, on_device

_COPIES = 4  # of the state, at one time
_FEW = 0.25  # of the elements: those of rows that a router sends elsewhere


@dataclass
class Run:
    """What one way to run a batch gave: its output, the tensors that it wrote, and its time in
    microseconds.
    """

    output: Any
    state: list[Tensor]
    microseconds: float


class _Moment:
    """Copies of the tensors that graphs write, of a batch in the static buffers, and of random
    states; and what puts attributes back, where runs change them.

    Attributes:
        state: Those tensors, as they were.
    """

    def __init__(
        self, graphed: ModelGraphs, call: PreparedCall, python: PutBack | None = None
    ) -> None:
        self._python, self._ignore = python, graphed.config.compilation.ignore
        device = graphed.backend.device
        buffers = graphed.buffers[call.route.descriptor.sizes].buffers.values()
        written = list(graphed.written.values())
        tensors = [*written, *(buffer.tensor for buffer in buffers)]
        self._copies = [(t.untyped_storage(), t.untyped_storage().clone()) for t in tensors]
        self.state = list[Tensor]()
        for tensor, (_, copy) in zip(written, self._copies, strict=False):
            view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            self.state.append(
                view.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())
            )
        defaults = [
            torch.default_generator,
            *torch.cuda.default_generators[device.index or 0 :][:1],
        ]
        self._random = [(g, g.get_state()) for g in (*defaults, *graphed.generators)]

    def put_back(self) -> bool:
        """Whether all could be put back."""
        for storage, copy in self._copies:
            storage.copy_(copy)
        for generator, state in self._random:
            generator.set_state(state)
        return self._python is None or self._python.restore_python(self._ignore)

    def has_drawn_until(self, other: _Moment) -> bool:
        """Whether random numbers were drawn in between."""
        states = zip(self._random, other._random, strict=True)
        return any(not torch.equal(before, after) for (_, before), (_, after) in states)


class Verifier:
    """Verifies the graphs of one runner, see Note [Verification]."""

    def __init__(self, graphed: ModelGraphs) -> None:
        self._graphed, self._rows = graphed, graphed.real_rows
        self._copied = _copied_inputs(graphed)
        compilation = graphed.config.compilation
        self._policy = compilation.verify_policy if graphed.is_alone or compilation.debug else "off"
        self._due: dict[tuple[CUDAGraphMode, BatchDescriptor, bool], Due] = {}
        self._handed: list[Tensor] = []

    def schedule(self, call: PreparedCall) -> None:
        """Say when calls of a kind are verified: padded batches and others of one key have their
        own turns.
        """
        mode, descriptor, batch = call.route.mode, call.route.descriptor, call.route.batch
        if self._policy != "off" and mode is not CUDAGraphMode.NONE:
            is_padded = batch.num_tokens < descriptor.num_tokens or batch.sizes != descriptor.sizes
            call.due = self._due.setdefault((mode, descriptor, is_padded), Due(1))
        if self._graphed.config.compilation.debug:
            call.output = partial(self._expiring, call.output)

    def forget(self, keys: Iterable[Key]) -> None:
        """Verify these keys as new ones: their graphs are gone, or others."""
        for key in keys:
            for is_padded in (False, True):
                self._due.pop((*key, is_padded), None)

    def _expiring(self, output: Callable[[], Any]) -> Any:
        """A copy of an output, which the next call fills with NaN."""
        with torch.no_grad(), torch.inference_mode(False):
            for tensor in self._handed:
                tensor.detach().fill_(math.nan)  # the caller may have asked for its gradient
            found = _copied(output())
        leaves = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        self._handed = [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
        return found

    def replay(self, call: PreparedCall, values: Values) -> None:
        """Replay a call whose batch is in the static buffers, and verify it. Raises NumbersError,
        whose ``output`` is that of the model's own code.
        """
        due = call.due
        record, eager = self.verify(call, values)
        # the number of this replay
        due.replays = 1 if self._policy == "always" else 2 * due.replays or 1
        due.left = {"first": NEVER, "rarely": due.replays, "always": 1}[self._policy]
        if record.failure is not None:
            due.left, due.replays = 1, 0
            raise NumbersError(
                f"the replay of {record.mode} {record.descriptor} differs from the model's own "
                f"code: {record.failure}",
                remedy="Look for numbers and branches that Python computed at capture, tensors "
                "that moved, padding "
                "that reaches real rows, and random operators that do not draw from torch's "
                "generators, such as "
                "Python's and NumPy's.",
                output=None if eager is None else eager.output,
            )

    def verify(
        self, call: PreparedCall, values: Values, *, leaves: bool = True
    ) -> tuple[VerifyRecord, Run | None]:
        """Compare a batch that is in the static buffers, and what the model's own code gave. The
        last run is a replay, and its state stays, or that of the model's own code where the replay
        was wrong; without ``leaves`` neither.
        """
        graphed, compilation = self._graphed, self._graphed.config.compilation
        mode, key = call.route.mode, call.route.descriptor
        held = _COPIES * sum(tensor.nbytes for tensor in graphed.written.values())
        if held > graphed.copy_limit():
            return self._unverified(
                call, f"{held} bytes for copies of state are more than compilation.state_copy"
            )
        kept = PutBack(graphed.record(), 0) if graphed.changes_python else None
        records = list[Fingerprint]()
        if compilation.strict:
            records = [graphed.record(), Fingerprint.of({}, graphed.backend.device, draws=True)]
        begin = _Moment(graphed, call, kept)
        try:
            eager = self._run(partial(self._own_code, call, values))
        except torch.OutOfMemoryError:
            begin.put_back()
            return self._unverified(call, "the model's own code needs more memory than there is")
        changes = self._changes_since(records, mode)
        after = _Moment(graphed, call)
        runs_once = not begin.put_back()  # a further run would find another Python
        where = None
        if self._rows is not None:
            where = self._reached(call, begin)
        elif not runs_once:
            where = self._padding_tells(call, values, begin, has_drawn=begin.has_drawn_until(after))
        replayed = self._run(partial(_replayed, call))
        found = self._differences(replayed, eager, begin)
        wrong = [str(one) for one in found if one.is_wrong]
        remark = None
        few = graphed.is_coarse and all(one.share < _FEW for one in found if one.is_wrong)
        may_explain = where is None and not changes and not runs_once
        explains = wrong and may_explain and (few or begin.has_drawn_until(after))
        if explains and self._is_rounding(call, begin, replayed):
            remark, wrong = (
                f"{wrong[0]}; the padded batch agrees, so other sizes round or draw otherwise",
                [],
            )
            begin.put_back()
            call.replay()
        elif graphed.entry((mode, key)) is None:  # whose output is read once
            begin.put_back()
            call.replay()
        if where is not None:
            wrong = [f"{where} depends on what the padding holds"]
        if changes:
            wrong = [f"a run changes {changes[0]}"]
        if wrong or not leaves:
            begin.put_back()
        if wrong and leaves:
            self._leave_own_state(call, values, after)
        record = VerifyRecord(
            mode=mode,
            descriptor=key,
            differences={one.where: one.largest for one in found},
            tolerance=max((one.limit for one in found), default=0.0),
            eager_us=eager.microseconds,
            graph_us=replayed.microseconds,
            failure=wrong[0] if wrong else None,
            remark=remark,
        )
        return record, eager

    def _unverified(self, call: PreparedCall, why: str) -> tuple[VerifyRecord, None]:
        call.replay()
        route = call.route
        return VerifyRecord(
            mode=route.mode, descriptor=route.descriptor, remark=f"not verified: {why}"
        ), None

    def _leave_own_state(self, call: PreparedCall, values: Values, after: _Moment) -> None:
        """State as the model's own code left it."""
        if self._graphed.overwritten:
            self._own_code(call, values)
        after.put_back()

    def _changes_since(self, records: Sequence[Fingerprint], mode: CUDAGraphMode) -> list[Change]:
        """What code of graphs changed of Python."""
        changes = dict[str, Change]()
        for record in records:
            changes |= record.changes(self._graphed.config.compilation.ignore)
        return [changes[path] for path in self._graphed.of_graphs(mode, changes)]

    # --- ways to run a batch ----------------------------------------------------------------------

    def _run(self, way: Callable[[], Any]) -> Run:
        graphed = self._graphed
        graphed.backend.synchronize()
        start = time.perf_counter()
        output = way()
        graphed.backend.synchronize()
        taken = 1e6 * (time.perf_counter() - start)
        with torch.no_grad():
            return Run(
                _copied(output), [tensor.clone() for tensor in graphed.written.values()], taken
            )

    def _own_code(self, call: PreparedCall, values: Values) -> Any:
        """The model's own code: without padding where calls teach, else on the padded batch."""
        graphed, route = self._graphed, call.route
        if self._rows is not None:
            # it may write there
            tensors = [value.clone() for value in on_device(values, graphed.backend.device)]
            return graphed.run_eager(
                route.unpadded, dict(zip(graphed.config.tensors, tensors, strict=True))
            )
        try:
            with graphed.in_context(route.mode, route.descriptor):
                output = graphed.run_eager(route.descriptor, graphed.views(route.descriptor))
            return graphed.outputs.cut(output, route.batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            failure = explain_eager_failure(error, f"{route.mode} {route.descriptor}")
            raise failure from (error if failure is not error else error.__cause__)

    def _padding_tells(
        self, call: PreparedCall, values: Values, begin: _Moment, *, has_drawn: bool
    ) -> str | None:
        """Where declared padding reaches real rows; not looked for where a context tells the model
        of sizes.
        """
        graphed, route = self._graphed, call.route
        tells_of_sizes = graphed.has_context or graphed.config.metadata or graphed.config.lora
        # ranks run a forward equally often
        if tells_of_sizes or not graphed.is_alone:
            return None
        # rows, which copies of rows do not replace
        is_padded_within = route.batch.sizes != route.descriptor.sizes
        if not is_padded_within and not self._padding(call):
            return None
        static, batch = graphed.buffers[route.descriptor.sizes], route.batch
        rows = static.views(batch.num_tokens, batch.num_reqs or 0)  # of a staged batch: all of it
        for name, value in zip(rows, values, strict=False):
            rows[name] = rows[name][tuple(map(slice, value.shape))]
        rows = {name: view.clone() for name, view in rows.items()}  # values may lie there
        try:
            alone = self._run(lambda: graphed.run_eager(route.unpadded, rows))
        except Exception:  # it is made for padded batches
            begin.put_back()
            return None
        begin.put_back()
        replayed = self._run(partial(_replayed, call))
        begin.put_back()
        parts = differences(replayed.output, alone.output, is_coarse=graphed.is_coarse)
        wrong = [one for one in parts if one.is_wrong]
        if not wrong:
            return None
        other = next((one for one in wrong if one.largest is None), None)
        if other is not None:  # a number beside the tensors, or another structure
            return other.where
        few = graphed.is_coarse and all(one.share < _FEW for one in wrong)
        if is_padded_within and not few and not has_drawn:
            return wrong[0].where
        return self._reached(call, begin)

    def _is_rounding(self, call: PreparedCall, begin: _Moment, replayed: Run) -> bool:
        """Whether the padded batch by the captured code agrees with the graph."""
        graphed, route = self._graphed, call.route
        begin.put_back()
        with graphed.in_context(route.mode, route.descriptor):
            captured = self._run(partial(graphed.warm_up, route.mode, route.descriptor))
        captured.output = graphed.outputs.cut(captured.output, route.batch)
        return not any(one.is_wrong for one in self._differences(captured, replayed, begin))

    def _reached(self, call: PreparedCall, begin: _Moment) -> str | None:
        """What differs between a replay with copies of real rows in the padding, and one
        without.
        """
        padding = self._padding(call)
        if not padding:
            return None
        plain = self._run(partial(_replayed, call))
        begin.put_back()
        for rows, real in padding:
            rows.copy_(real)
        copies = self._run(partial(_replayed, call))
        begin.put_back()
        where = _unequal(plain, copies, compares_state=self._rows is not None)
        if where is None:
            return None
        again = self._run(partial(_replayed, call))  # sums in any order on a GPU
        begin.put_back()
        if _unequal(plain, again, compares_state=self._rows is not None) is None:
            return where
        if any(one.is_wrong for one in self._differences(again, plain, begin)):
            return None  # each replay gives other numbers, whatever the padding holds
        found = self._differences(copies, plain, begin)
        return next((one.where for one in found if one.is_wrong), None)

    def _padding(self, call: PreparedCall) -> list[tuple[Tensor, Tensor]]:
        """Rows of padding, and the real rows that are copied there."""
        graphed, key, batch = self._graphed, call.route.descriptor, call.route.batch
        reqs, found = graphed.padded_reqs(key), []
        for name, buffer in graphed.buffers[key.sizes].buffers.items():
            if name not in self._copied or buffer.row_dim is None:
                continue
            filled = buffer.count(batch.num_tokens, batch.num_reqs or 0)
            end = buffer.count(key.num_tokens, reqs)
            if 0 < filled < end:
                rows = torch.arange(end - filled, device=buffer.tensor.device) % filled
                real = buffer.tensor.index_select(buffer.row_dim, rows)
                found.append((buffer.tensor.narrow(buffer.row_dim, filled, end - filled), real))
        return found

    def _differences(self, found: Run, wanted: Run, begin: _Moment) -> list[Difference]:
        """Of outputs, then of what was written."""
        is_coarse = self._graphed.is_coarse
        parts = [*differences(found.output, wanted.output, is_coarse=is_coarse)]
        states = zip(self._graphed.written, found.state, wanted.state, begin.state, strict=True)
        for path, one, other, before in states:
            parts.append(compare(path, one, other, is_coarse=is_coarse, before=before))
        return parts


def _copied_inputs(graphed: ModelGraphs) -> set[str]:
    """Inputs whose padding may hold copies of real rows: all, where rows are all that inputs
    count.
    """
    inputs = graphed.config.inputs.items()
    if graphed.real_rows is not None:
        return {name for name, _ in inputs if name not in graphed.real_rows.meant_padding}
    counted = {extent.symbol for spec in graphed.config.tensors.values() for extent in spec.extents}
    rows_alone = not graphed.config.metadata and "num_reqs" not in counted
    return {
        n
        for n, spec in inputs
        if spec.pad != "last" and (rows_alone or torch_dtype(spec).is_floating_point)
    }


def _replayed(call: PreparedCall) -> Any:
    call.replay()
    return call.output()


def _copied(output: Any) -> Any:
    # else nothing outside of inference mode could fill them
    with torch.inference_mode(False), torch.no_grad():
        return tree_map_only(Tensor, Tensor.clone, output)


def _unequal(one: Run, other: Run, *, compares_state: bool) -> str | None:
    """The first part that is not equal to the last bit."""
    if not is_equal(one.output, other.output):
        return "the output"
    parts: Sequence[tuple[Tensor, Tensor]] = (
        list(zip(one.state, other.state, strict=True)) if compares_state else []
    )
    return None if all(is_equal(a, b) for a, b in parts) else "the model's state"
