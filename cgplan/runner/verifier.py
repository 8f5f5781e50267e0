"""Replays compared with the model's own code, from the same state and random numbers.

Note [Verification]
    docs/concepts.md, Verified, says which runs are compared. Where calls teach (``RealRows``),
    random numbers may differ if the padded batch agrees; so may few elements in half precision, if
    they do where each row comes twice. Memory that each run overwrites at given places, such as a
    KV cache, is compared only where calls teach: padding shows in it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from operator import lt
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves, tree_map_only

from cgplan.backends.backend import tensor_on
from cgplan.backends.context import restore_random
from cgplan.backends.host_sync import storage_id
from cgplan.buffers.compare import Difference, compare, differences, is_equal
from cgplan.buffers.static import torch_dtype
from cgplan.captures.failures import explain_eager_failure, raise_caused
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.errors import NumbersError
from cgplan.graphs.fingerprint import Change, Fingerprint, Place
from cgplan.graphs.written import copy_limit, version_of
from cgplan.modes import CUDAGraphMode, Key
from cgplan.reports.records import VerifyRecord
from cgplan.runner.prepared import NO_COMPARISON, Due, PreparedCall, Values

logger = logging.getLogger(__name__)
_COPIES = 4  # of the state, at one time
_FEW = 0.25  # of the elements, where a router sends rows elsewhere
_OF_PADDING = "depends on what the padding holds"


class Verifier:
    def __init__(self, graphs: ModelGraphs) -> None:
        self._graphs = graphs
        self._is_debug = graphs.config.compilation.debug
        self._policy = graphs.verify
        self._due: dict[tuple[Key, tuple[bool, ...]], Due] = {}
        graphs.addresses.compare_again = partial(_compare_again, self._due.values())
        self._copied = _copied_inputs(graphs)
        self._handed: list[Tensor] = []
        self._has_told = False

    def schedule(self, call: PreparedCall) -> None:
        key = call.route.key
        mode, descriptor = key
        if self._policy != "off" and mode is not CUDAGraphMode.NONE:
            # padding of each dimension reaches rows in its own way
            pads = tuple(map(lt, call.route.batch.box, descriptor.box))
            call.due = self._due.setdefault((key, pads), Due(1))
        if self._is_debug:
            call.output = partial(self._expiring, call.output)

    def forget(self, keys: Collection[Key]) -> None:
        for of in list(self._due):
            if of[0] in keys:
                del self._due[of]

    def _expiring(self, output: Callable[[], Any]) -> Any:
        """A copy of an output; the next call fills it with NaN."""
        with torch.no_grad(), torch.inference_mode(False):
            for tensor in self._handed:
                tensor.detach().fill_(math.nan)  # it may ask for gradients
            found = _copied(output())
        self._handed = [
            leaf
            for leaf in tree_leaves(found)
            if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        ]
        return found

    def replay(
        self,
        call: PreparedCall,
        values: Values,
    ) -> None:
        due = call.due
        due.left = 1  # also if the model's own code raises
        record, output = self.verify(call, values)
        if record.failure is None:
            if self._policy == "first":
                due.left = NO_COMPARISON
                if record.remark and not self._has_told:
                    logger.warning("%s", record)
                    self._has_told = True
            elif self._policy == "rarely":
                due.verified_at = 2 * due.verified_at or 1
                due.left = due.verified_at
            return
        due.verified_at = 0
        names = self._graphs.config.dim_names[1:]
        sizes = call.route.batch.sizes, record.descriptor.sizes
        padded = ""
        remedy = ""
        for name, size, most in zip(names, *sizes, strict=True):
            if size < most:
                padded += f"; {name} {size} is padded to {most}"
                remedy += (
                    f"List each {name} in dims.{name}.sizes: none is padded then, but a plan may "
                    "merge them. A runner for each is safe. "
                )
        cause = (
            "Look for numbers and branches that Python computed at capture, moved tensors, and "
            "random operators that do not draw from torch's generators."
        )
        if _OF_PADDING in record.failure:
            cause = (
                "Rows reach each other, or the model is in training mode: call .eval(), list each "
                "size, or pass the true count."
            )
        raise NumbersError(
            f"the replay of {record.mode} {record.descriptor} differs from the model's own "
            f"code: {record.failure}{padded}",
            remedy=remedy + cause,
            output=output,
        )

    def verify(
        self,
        call: PreparedCall,
        values: Values,
        *,
        leaves: bool = True,
    ) -> tuple[VerifyRecord, Any]:
        """``leaves``: the state of the answer stays."""
        graphs = self._graphs
        held = _COPIES * sum(tensor.nbytes for tensor in graphs.facts.written.values())
        if held > copy_limit(graphs.config.compilation, graphs.backend):
            why = f"{held} bytes for copies of state are more than compilation.state_copy"
            return _unverified(call, why, leaves=leaves), None
        as_captured = graphs.ambient._replace(
            inference=torch.is_inference_mode_enabled(),
        )
        with as_captured.entered(graphs.backend.device.type):
            comparison = _Comparison(graphs, self._copied, call, values)
            try:
                eager = comparison.run(comparison.own_code)
            except BaseException as error:
                comparison.begin.put_back()
                if not isinstance(error, torch.OutOfMemoryError):
                    raise
                why = "the model's own code needs more memory than there is"
                return _unverified(call, why, leaves=leaves), None
            record = comparison.finish(eager, leaves=leaves)
            return record, (comparison.alone or eager).output


def _compare_again(dues: Iterable[Due]) -> None:
    for due in dues:
        due.left = 1


def _unverified(
    call: PreparedCall,
    why: str,
    *,
    leaves: bool,
) -> VerifyRecord:
    if leaves:
        call.replay()
    return VerifyRecord(
        mode=call.route.mode,
        descriptor=call.route.descriptor,
        remark=f"not verified: {why}",
    )


@dataclass
class _Run:
    output: Any
    state: list[Tensor]
    microseconds: float


class _Moment:
    def __init__(
        self,
        graphs: ModelGraphs,
        call: PreparedCall,
        python: Fingerprint | None = None,
    ) -> None:
        self._python = python
        self._ignore = graphs.config.compilation.ignore
        self._copies = list[tuple[UntypedStorage, UntypedStorage]]()
        self.state = list[Tensor]()
        for tensor in graphs.facts.written.values():
            copy = self._keep(tensor)
            self.state.append(tensor_on(copy, tensor))
        for tensor in graphs.facts.restored.values():
            self._keep(tensor)
        static = graphs.buffers[call.route.descriptor.sizes]
        for buffer in static.buffers.values():
            self._keep(buffer.tensor)
        index = graphs.backend.device.index or 0
        of_gpu = torch.cuda.default_generators[index : index + 1]
        generators = [torch.default_generator, *of_gpu, *graphs.generators]
        self.random = {generator: generator.get_state() for generator in generators}

    def _keep(self, tensor: Tensor) -> UntypedStorage:
        storage = tensor.untyped_storage()
        copy: UntypedStorage = storage.clone()
        self._copies.append((storage, copy))
        return copy

    def put_back(self) -> bool:
        """False where Python changed more than attributes."""
        for storage, copy in self._copies:
            storage.copy_(copy)
        restore_random(self.random)
        return self._python is None or self._python.undo_attributes(self._ignore)


@dataclass(eq=False)
class _Comparison:
    graphs: ModelGraphs
    copied: set[str]
    call: PreparedCall
    values: Values

    def __post_init__(self) -> None:
        graphs = self.graphs
        self._route = self.call.route
        self._facts = graphs.facts
        self._has_rows = graphs.real_rows is not None
        self._can_repeat = True  # a further run finds the same Python
        self._has_drawn = False
        self.alone: _Run | None = None  # by the model's own code, without padding
        self._apart = list[Difference]()  # a replay and that run
        self._python = list[Fingerprint]()
        if graphs.config.compilation.strict:
            host = Fingerprint.of(
                {},
                graphs.backend.device,
                draws=True,
            )
            self._python = [graphs.fingerprint(), host]
        self._versions = list[tuple[Place, int | None]]()
        for record in self._python:
            for place in record.of_tensors:
                self._versions.append((place, version_of(place.value)))
        python = graphs.fingerprint() if self._facts.changes_python else None
        self.begin = _Moment(graphs, self.call, python)

    def finish(
        self,
        eager: _Run,
        *,
        leaves: bool,
    ) -> VerifyRecord:
        graphs = self.graphs
        route = self._route
        begin = self.begin
        changes = self._changes_of_python()
        unseen = self._unseen_write()
        self._after = _Moment(graphs, self.call)
        drawn = map(torch.equal, begin.random.values(), self._after.random.values())
        self._has_drawn = not all(drawn)
        self._can_repeat = begin.put_back()
        where = self._padding_tells()
        replayed = self.run(self._replay)
        found = self._differences(replayed, eager)
        wrong = _wrong(found)
        failure = None
        remark = None
        if changes:
            failure = f"a run changes {changes[0]}"
        elif unseen is not None:
            failure = f"a run of this size writes {unseen}, and a replay does not"
        elif where is not None:
            failure = f"{where} {_OF_PADDING}"
        elif wrong and self._is_rounding(wrong, replayed, eager):
            remark = _by_rows(wrong[0])
        elif wrong:
            failure = str(wrong[0])
        is_read_once = graphs.entry(route.key) is None
        if remark is not None or is_read_once:
            begin.put_back()
            self.call.replay()
        if failure is not None or not leaves:
            begin.put_back()
        if failure is not None and leaves:
            if self._facts.overwritten:
                rerun = self._unpadded_code if self.alone else self.own_code
                rerun()
            self._after.put_back()
        if failure is None:
            for part in _wrong(self._apart):
                remark = _by_rows(part)
        parts = [*found, *self._apart]
        return VerifyRecord(
            mode=route.mode,
            descriptor=route.descriptor,
            differences={part.where: part.largest for part in parts},
            tolerance=max(
                (part.limit for part in parts),
                default=0.0,
            ),
            eager_us=eager.microseconds,
            graph_us=replayed.microseconds,
            failure=failure,
            remark=remark,
        )

    def _changes_of_python(self) -> list[Change]:
        graphs = self.graphs
        changes = dict[str, Change]()
        for record in self._python:
            changes |= record.changes(graphs.config.compilation.ignore)
        return [changes[path] for path in graphs.frozen(self._route.mode, changes)]

    def _unseen_write(self) -> str | None:
        """Of state that the look, at another size, did not see."""
        if self._route.mode is not CUDAGraphMode.FULL:
            return None
        graph_writes = self._facts.storages_written
        for place, version in self._versions:
            is_written = version_of(place.value) != version
            if is_written and storage_id(place.value) not in graph_writes:
                return place.path
        return None

    # --- ways to run the batch --------------------------------------------------------------------

    def run(self, way: Callable[[], Any]) -> _Run:
        backend = self.graphs.backend
        backend.synchronize()
        start = time.perf_counter()
        output = way()
        backend.synchronize()
        microseconds = 1e6 * (time.perf_counter() - start)
        with torch.no_grad():
            state = [tensor.clone() for tensor in self._facts.written.values()]
            return _Run(_copied(output), state, microseconds)

    def _replay(self) -> Any:
        self.call.replay()
        return self.call.output()

    def _replay_again(self) -> _Run:
        replayed = self.run(self._replay)
        self.begin.put_back()
        return replayed

    def own_code(self) -> Any:
        graphs = self.graphs
        route = self._route
        if self._has_rows:
            copies = map(Tensor.clone, self.values)  # the model may write there
            return graphs.run_unpadded(route.unpadded, copies)
        try:
            with graphs.in_context(route.key):
                output = graphs.run_eager(route.descriptor, graphs.views(route.descriptor))
            return graphs.outputs.cut(output, route.batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            failure = explain_eager_failure(
                error,
                f"{route.mode} {route.descriptor}",
                self.graphs.model,
                self.graphs.config.inputs,
            )
            raise_caused(failure, error)

    def _captured_code(self) -> Any:
        graphs = self.graphs
        route = self._route
        with graphs.in_context(route.key):
            output = graphs.warm_up(route.key)
        return graphs.outputs.cut(output, route.batch)

    def _unpadded_code(self) -> Any:
        route = self._route
        batch = route.batch
        static = self.graphs.buffers[route.descriptor.sizes]
        rows = static.views(batch.num_tokens, batch.num_reqs or 0)
        for name, value in zip(rows, self.values, strict=False):  # staged: none
            rows[name] = rows[name][tuple(map(slice, value.shape))]
        copies = {name: view.clone() for name, view in rows.items()}  # values may lie there
        return self.graphs.run_eager(route.unpadded, copies)

    # --- what padding and rounding do -------------------------------------------------------------

    def _padding_tells(self) -> str | None:
        """Where padding reaches real rows."""
        if self._has_rows:
            return self._reached()
        graphs = self.graphs
        route = self._route
        config = graphs.config
        if graphs.before_key is not None or config.metadata or config.lora:
            return None
        if not self._can_repeat or not graphs.is_alone:
            return None
        is_padded_within = route.batch.sizes != route.descriptor.sizes  # within rows
        if not is_padded_within and not self._padding():
            return None
        try:
            alone = self.run(self._unpadded_code)
        except Exception:  # the model needs padded batches
            self.begin.put_back()
            return None
        self.alone = alone
        self._after = _Moment(graphs, self.call)
        self.begin.put_back()
        replayed = self._replay_again()
        self._apart = list(
            differences(
                replayed.output,
                alone.output,
                is_coarse=self._facts.is_coarse,
            )
        )
        wrong = _wrong(self._apart)
        for part in wrong:
            if part.largest is None:  # another structure, or a plain number
                return part.where
        if not wrong:
            return None
        if is_padded_within and not self._has_drawn and not self._are_few(wrong):
            return wrong[0].where
        return self._reached()

    def _reached(self) -> str | None:
        """What copies of real rows in the padding change."""
        padding = self._padding()
        if not padding:
            return None
        plain = self._replay_again()
        for rows, real in padding:
            rows.copy_(real)
        copies = self._replay_again()
        where = self._unequal(plain, copies)
        if where is None:
            return None
        again = self._replay_again()  # sums in any order on a GPU
        if self._unequal(plain, again) is None:
            return where
        if _wrong(self._differences(again, plain)):
            return None  # replays differ anyway
        wrong = _wrong(self._differences(copies, plain))
        return wrong[0].where if wrong else None

    def _padding(self) -> list[tuple[Tensor, Tensor]]:
        graphs = self.graphs
        key = self._route.descriptor
        batch = self._route.batch
        reqs = graphs.padded_reqs(key)
        found = []
        for name, buffer in graphs.buffers[key.sizes].buffers.items():
            if name not in self.copied or buffer.row_dim is None:
                continue
            filled = buffer.count(batch.num_tokens, batch.num_reqs or 0)
            more = buffer.count(key.num_tokens, reqs) - filled
            if filled > 0 and more > 0:
                tensor = buffer.tensor
                rows = torch.arange(more, device=tensor.device) % filled
                real = tensor.index_select(buffer.row_dim, rows)
                padding = tensor.narrow(buffer.row_dim, filled, more)
                found.append((padding, real))
        return found

    def _is_rounding(
        self,
        wrong: Iterable[Difference],
        replayed: _Run,
        eager: _Run,
    ) -> bool:
        """Whether the padded batch agrees, and padding does not cause the difference."""
        if not self._can_repeat:
            return False
        if not self._has_drawn and not self._are_few(wrong):
            return False
        is_padded = self._route.batch.box != self._route.descriptor.box
        if is_padded and self._has_rows and not self._has_drawn and not self._rounds(eager):
            return False
        self.begin.put_back()
        captured = self.run(self._captured_code)
        return not _wrong(self._differences(captured, replayed))

    def _rounds(self, eager: _Run) -> bool:
        """Whether rows round otherwise where each comes twice, as by a router."""
        graphs = self.graphs
        buffers = graphs.buffers[self._route.descriptor.sizes].buffers
        twice = []
        for value, buffer in zip(self.values, buffers.values(), strict=True):
            if buffer.row_dim is None:
                twice.append(value.clone())
            else:
                twice.append(torch.cat([value, value], buffer.row_dim))
        self.begin.put_back()
        try:
            output = graphs.run_unpadded(self._route.unpadded, twice)
            rows = graphs.outputs.cut(output, self._route.batch)
        except Exception:  # the model takes no such batch
            return False
        found = differences(rows, eager.output, is_coarse=self._facts.is_coarse)
        return any(part.is_wrong and part.largest is not None for part in found)

    def _are_few(self, wrong: Iterable[Difference]) -> bool:
        return self._facts.is_coarse and all(part.share < _FEW for part in wrong)

    def _differences(
        self,
        found: _Run,
        wanted: _Run,
    ) -> list[Difference]:
        is_coarse = self._facts.is_coarse
        parts = list(
            differences(
                found.output,
                wanted.output,
                is_coarse=is_coarse,
            )
        )
        states = zip(
            self._facts.written,
            found.state,
            wanted.state,
            self.begin.state,
            strict=True,
        )
        for path, one, other, before in states:
            parts.append(
                compare(
                    path,
                    one,
                    other,
                    is_coarse=is_coarse,
                    before=before,
                )
            )
        return parts

    def _unequal(
        self,
        one: _Run,
        other: _Run,
    ) -> str | None:
        if not is_equal(one.output, other.output):
            return "the output"
        if self._has_rows and not is_equal(one.state, other.state):
            return "the model's state"
        return None


def _copied_inputs(graphs: ModelGraphs) -> set[str]:
    config = graphs.config
    if graphs.real_rows:
        return set(config.inputs) - set(graphs.real_rows.meant_padding)
    rows_alone = not config.metadata
    for spec in config.tensors.values():
        for extent in spec.extents:
            rows_alone &= extent.symbol != "num_reqs"
    return {
        name
        for name, spec in config.inputs.items()
        if spec.pad != "last" and (rows_alone or torch_dtype(spec).is_floating_point)
    }


def _by_rows(part: Difference) -> str:
    return (
        f"differs from the batch without padding: {part}; the padded batch agrees, so the number "
        "of rows matters (a count, rounding or random numbers)"
    )


def _wrong(parts: Iterable[Difference]) -> list[Difference]:
    return [part for part in parts if part.is_wrong]


def _copied(output: Any) -> Any:
    with torch.inference_mode(False), torch.no_grad():
        return tree_map_only(Tensor, Tensor.clone, output)
