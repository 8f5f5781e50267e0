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
from torch import Tensor, UntypedStorage
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
        self, graphs: ModelGraphs, call: PreparedCall, python: PutBack | None = None
    ) -> None:
        self._python = python
        self._ignore = graphs.config.compilation.ignore
        self._copies = list[tuple[UntypedStorage, UntypedStorage]]()
        self.state = list[Tensor]()
        for tensor in graphs.facts.written.values():
            copy = self._keep(tensor)
            view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            layout = tensor.storage_offset(), tensor.shape, tensor.stride()
            self.state.append(view.set_(copy, *layout))
        for buffer in graphs.buffers[call.route.descriptor.sizes].buffers.values():
            self._keep(buffer.tensor)
        of_gpus = torch.cuda.default_generators
        index = graphs.backend.device.index or 0
        generators = [torch.default_generator, *of_gpus[index : index + 1], *graphs.generators]
        self._random = [(generator, generator.get_state()) for generator in generators]

    def _keep(self, tensor: Tensor) -> UntypedStorage:
        storage = tensor.untyped_storage()
        copy: UntypedStorage = storage.clone()
        self._copies.append((storage, copy))
        return copy

    def put_back(self) -> bool:
        """Whether all could be put back."""
        for storage, copy in self._copies:
            storage.copy_(copy)
        for generator, state in self._random:
            generator.set_state(state)
        return self._python is None or self._python.restore_python(self._ignore)

    def has_drawn_until(self, other: _Moment) -> bool:
        """Whether random numbers were drawn in between."""
        for (_, before), (_, after) in zip(self._random, other._random, strict=True):
            if not torch.equal(before, after):
                return True
        return False


class Verifier:
    """Verifies the graphs of one runner, see Note [Verification]."""

    def __init__(self, graphs: ModelGraphs) -> None:
        self._graphs = graphs
        self._facts = graphs.facts
        self._compilation = compilation = graphs.config.compilation
        self._has_rows = graphs.real_rows is not None
        self._copied = _copied_inputs(graphs)
        self._policy = "off"
        if graphs.is_alone or compilation.debug:
            self._policy = compilation.verify_policy
        self._due: dict[tuple[CUDAGraphMode, BatchDescriptor, bool], Due] = {}
        self._handed: list[Tensor] = []

    def schedule(self, call: PreparedCall) -> None:
        """Say when calls of a kind are verified: padded batches and others of one key have their
        own turns.
        """
        mode = call.route.mode
        key = call.route.descriptor
        batch = call.route.batch
        if self._policy != "off" and mode is not CUDAGraphMode.NONE:
            is_padded = batch.num_tokens < key.num_tokens or batch.sizes != key.sizes
            call.due = self._due.setdefault((mode, key, is_padded), Due(1))
        if self._compilation.debug:
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
        self._handed = []
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
                self._handed.append(leaf)
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
        if record.failure is None:
            return
        due.left = 1
        due.replays = 0
        raise NumbersError(
            f"the replay of {record.mode} {record.descriptor} differs from the model's own "
            f"code: {record.failure}",
            remedy="Look for numbers and branches that Python computed at capture, tensors that "
            "moved, padding that reaches real rows, and random operators that do not draw from "
            "torch's generators, such as Python's and NumPy's.",
            output=None if eager is None else eager.output,
        )

    def verify(
        self, call: PreparedCall, values: Values, *, leaves: bool = True
    ) -> tuple[VerifyRecord, Run | None]:
        """Compare a batch that is in the static buffers, and what the model's own code gave. The
        last run is a replay, and its state stays, or that of the model's own code where the replay
        was wrong; without ``leaves`` neither.
        """
        graphs = self._graphs
        mode = call.route.mode
        key = call.route.descriptor
        held = _COPIES * sum(tensor.nbytes for tensor in self._facts.written.values())
        if held > graphs.copy_limit():
            return self._unverified(
                call, f"{held} bytes for copies of state are more than compilation.state_copy"
            )
        kept = PutBack(graphs.record(), 0) if self._facts.changes_python else None
        records = self._python_before()
        begin = _Moment(graphs, call, kept)
        try:
            eager = self._run(partial(self._own_code, call, values))
        except torch.OutOfMemoryError:
            begin.put_back()
            return self._unverified(call, "the model's own code needs more memory than there is")
        changes = self._changes_since(records, mode)
        after = _Moment(graphs, call)
        has_drawn = begin.has_drawn_until(after)
        can_repeat = begin.put_back()  # else a further run would find another Python
        remark = None
        where = self._padding_tells(call, values, begin, can_repeat, has_drawn)
        replayed = self._run(partial(_replayed, call))
        found = self._differences(replayed, eager, begin)
        wrong = [part for part in found if part.is_wrong]
        failure = str(wrong[0]) if wrong else None
        may_round = where is None and not changes and can_repeat
        may_round = may_round and (has_drawn or self._are_few(wrong))
        if wrong and may_round and self._is_rounding(call, begin, replayed):
            remark = f"{failure}; the padded batch agrees, so other sizes round or draw otherwise"
            failure = None
            begin.put_back()
            call.replay()
        elif graphs.entry((mode, key)) is None:  # whose output is read once
            begin.put_back()
            call.replay()
        if where is not None:
            failure = f"{where} depends on what the padding holds"
        if changes:
            failure = f"a run changes {changes[0]}"
        if failure is not None or not leaves:
            begin.put_back()
        if failure is not None and leaves:
            self._leave_own_state(call, values, after)
        record = VerifyRecord(
            mode=mode,
            descriptor=key,
            differences={part.where: part.largest for part in found},
            tolerance=max([0.0, *(part.limit for part in found)]),
            eager_us=eager.microseconds,
            graph_us=replayed.microseconds,
            failure=failure,
            remark=remark,
        )
        return record, eager

    def _unverified(self, call: PreparedCall, why: str) -> tuple[VerifyRecord, None]:
        call.replay()
        mode = call.route.mode
        key = call.route.descriptor
        return VerifyRecord(mode=mode, descriptor=key, remark=f"not verified: {why}"), None

    def _leave_own_state(self, call: PreparedCall, values: Values, after: _Moment) -> None:
        """State as the model's own code left it."""
        if self._facts.overwritten:
            self._own_code(call, values)
        after.put_back()

    def _python_before(self) -> list[Fingerprint]:
        """Where changes of Python are refused: what there is of it."""
        if not self._compilation.strict:
            return []
        graphs = self._graphs
        return [graphs.record(), Fingerprint.of({}, graphs.backend.device, draws=True)]

    def _changes_since(self, records: Sequence[Fingerprint], mode: CUDAGraphMode) -> list[Change]:
        """What code of graphs changed of Python."""
        changes = dict[str, Change]()
        for record in records:
            changes |= record.changes(self._compilation.ignore)
        return [changes[path] for path in self._graphs.of_graphs(mode, changes)]

    def _are_few(self, wrong: Iterable[Difference]) -> bool:
        """Whether rounding may explain them: a few elements where it decides on whole rows."""
        return self._facts.is_coarse and all(part.share < _FEW for part in wrong)

    # --- ways to run a batch ----------------------------------------------------------------------

    def _run(self, way: Callable[[], Any]) -> Run:
        backend = self._graphs.backend
        backend.synchronize()
        start = time.perf_counter()
        output = way()
        backend.synchronize()
        microseconds = 1e6 * (time.perf_counter() - start)
        with torch.no_grad():
            state = [tensor.clone() for tensor in self._facts.written.values()]
            return Run(_copied(output), state, microseconds)

    def _own_code(self, call: PreparedCall, values: Values) -> Any:
        """The model's own code: without padding where calls teach, else on the padded batch."""
        graphs = self._graphs
        route = call.route
        if self._has_rows:
            # it may write there
            tensors = [value.clone() for value in on_device(values, graphs.backend.device)]
            named = dict(zip(graphs.config.tensors, tensors, strict=True))
            return graphs.run_eager(route.unpadded, named)
        try:
            with graphs.in_context(route.mode, route.descriptor):
                output = graphs.run_eager(route.descriptor, graphs.views(route.descriptor))
            return graphs.outputs.cut(output, route.batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            failure = explain_eager_failure(error, f"{route.mode} {route.descriptor}")
            raise failure from (error if failure is not error else error.__cause__)

    def _padding_tells(
        self,
        call: PreparedCall,
        values: Values,
        begin: _Moment,
        can_repeat: bool,
        has_drawn: bool,
    ) -> str | None:
        """Where padding reaches real rows. What a configuration declares is not looked at where a
        context tells the model of sizes.
        """
        if self._has_rows:
            return self._reached(call, begin)
        graphs = self._graphs
        route = call.route
        config = graphs.config
        knows_sizes = graphs.before_key is not None or config.metadata or config.lora
        # ranks run a forward equally often
        if not can_repeat or knows_sizes or not graphs.is_alone:
            return None
        # rows, which copies of rows do not replace
        is_padded_within = route.batch.sizes != route.descriptor.sizes
        if not is_padded_within and not self._padding(call):
            return None
        rows = self._unpadded(call, values)
        try:
            alone = self._run(partial(graphs.run_eager, route.unpadded, rows))
        except Exception:  # it is made for padded batches
            begin.put_back()
            return None
        begin.put_back()
        replayed = self._run(partial(_replayed, call))
        begin.put_back()
        parts = differences(replayed.output, alone.output, is_coarse=self._facts.is_coarse)
        wrong = [part for part in parts if part.is_wrong]
        if not wrong:
            return None
        other = next((part for part in wrong if part.largest is None), None)
        if other is not None:  # a number beside the tensors, or another structure
            return other.where
        if is_padded_within and not has_drawn and not self._are_few(wrong):
            return wrong[0].where
        return self._reached(call, begin)

    def _unpadded(self, call: PreparedCall, values: Values) -> dict[str, Tensor]:
        """Copies of a batch's own rows in the static buffers; of a staged batch ``values`` are
        empty.
        """
        batch = call.route.batch
        static = self._graphs.buffers[call.route.descriptor.sizes]
        rows = static.views(batch.num_tokens, batch.num_reqs or 0)
        for name, value in zip(rows, values, strict=False):
            rows[name] = rows[name][tuple(map(slice, value.shape))]
        return {name: view.clone() for name, view in rows.items()}  # values may lie there

    def _is_rounding(self, call: PreparedCall, begin: _Moment, replayed: Run) -> bool:
        """Whether the padded batch by the captured code agrees with the graph."""
        graphs = self._graphs
        route = call.route
        begin.put_back()
        with graphs.in_context(route.mode, route.descriptor):
            captured = self._run(partial(graphs.warm_up, route.mode, route.descriptor))
        captured.output = graphs.outputs.cut(captured.output, route.batch)
        return not any(part.is_wrong for part in self._differences(captured, replayed, begin))

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
        where = self._unequal(plain, copies)
        if where is None:
            return None
        again = self._run(partial(_replayed, call))  # sums in any order on a GPU
        begin.put_back()
        if self._unequal(plain, again) is None:
            return where
        if any(part.is_wrong for part in self._differences(again, plain, begin)):
            return None  # each replay gives other numbers, whatever the padding holds
        found = self._differences(copies, plain, begin)
        return next((part.where for part in found if part.is_wrong), None)

    def _padding(self, call: PreparedCall) -> list[tuple[Tensor, Tensor]]:
        """Rows of padding, and the real rows that are copied there."""
        graphs = self._graphs
        key = call.route.descriptor
        batch = call.route.batch
        reqs = graphs.padded_reqs(key)
        found = list[tuple[Tensor, Tensor]]()
        for name, buffer in graphs.buffers[key.sizes].buffers.items():
            if name not in self._copied or buffer.row_dim is None:
                continue
            filled = buffer.count(batch.num_tokens, batch.num_reqs or 0)
            more = buffer.count(key.num_tokens, reqs) - filled
            if filled > 0 and more > 0:
                rows = torch.arange(more, device=buffer.tensor.device) % filled
                real = buffer.tensor.index_select(buffer.row_dim, rows)
                found.append((buffer.tensor.narrow(buffer.row_dim, filled, more), real))
        return found

    def _differences(self, found: Run, wanted: Run, begin: _Moment) -> list[Difference]:
        """Of outputs, then of what was written."""
        is_coarse = self._facts.is_coarse
        parts = list(differences(found.output, wanted.output, is_coarse=is_coarse))
        states = zip(self._facts.written, found.state, wanted.state, begin.state, strict=True)
        for path, one, other, before in states:
            parts.append(compare(path, one, other, is_coarse=is_coarse, before=before))
        return parts

    def _unequal(self, one: Run, other: Run) -> str | None:
        """The first part that is not equal to the last bit."""
        if not is_equal(one.output, other.output):
            return "the output"
        if self._has_rows and not is_equal(one.state, other.state):
            return "the model's state"
        return None


def _copied_inputs(graphs: ModelGraphs) -> set[str]:
    """Inputs whose padding may hold copies of real rows: all, where rows are all that inputs
    count.
    """
    config = graphs.config
    if graphs.real_rows is not None:
        return set(config.inputs) - set(graphs.real_rows.meant_padding)
    counted = set[str | None]()
    for spec in config.tensors.values():
        counted.update(extent.symbol for extent in spec.extents)
    rows_alone = not config.metadata and "num_reqs" not in counted
    found = set[str]()
    for name, spec in config.inputs.items():
        if spec.pad != "last" and (rows_alone or torch_dtype(spec).is_floating_point):
            found.add(name)
    return found


def _replayed(call: PreparedCall) -> Any:
    call.replay()
    return call.output()


def _copied(output: Any) -> Any:
    # else nothing outside of inference mode could fill them
    with torch.inference_mode(False), torch.no_grad():
        return tree_map_only(Tensor, Tensor.clone, output)
