"""One look at an eager run of a forward, ahead of its capture.

Note [The look]
    Compiled functions run as written: under a dispatch mode Dynamo would skip them ever after. The
    look misses kernels outside of PyTorch's dispatcher, and code for other sizes.
"""

import traceback
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from operator import attrgetter
from typing import Any, Literal

import torch
from torch._prims_common import compute_required_storage_length
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from cgplan.backends.backend import number_of
from cgplan.backends.blame import Line, blamed_line
from cgplan.backends.context import RandomRestores, deriving, random_state_kept
from cgplan.backends.host_sync import (
    Args,
    DispatchMode,
    Kwargs,
    OperatorMode,
    Refusals,
    as_its_caller,
    as_written,
    count_writes,
    host_guard,
    implemented_in_python,
    is_composite,
    leaves_of,
    operator_of,
    probing,
    refuse_host,
    storage_id,
    storages_of,
    tensors_in,
    written_tensors,
)
from cgplan.backends.replacing import answering, replaced, setting
from cgplan.errors import CaptureError, first_line
from cgplan.graphs.fingerprint import ABSENT, Change, Fingerprint, is_same, is_tensor, is_within
from cgplan.graphs.put_back import PutBack
from cgplan.graphs.written import WrittenStorages

Part = Literal["segment", "eager piece"]
_COMPUTES_NOTHING = ("empty", "new_empty", "_unsafe_view")
# at places given by inputs
_OVERWRITES = (
    "index_copy_",
    "index_put_",
    "_index_put_impl_",
    "scatter_",
    "copy_",
)
_PLACES = {torch.int32, torch.int64}
_SEED = 0x5EED_0F_A_100C


@dataclass
class Footprint:
    """The findings of one look.

    Attributes:
        operators: Calls by part and name, without views and bare allocations.
        stale: Paths that graph code bound and an eager piece read.
        carried: Changes by eager pieces of objects that the run made.
        rebound: Changes by graph code of objects that an eager piece was given.
        packages_that_ask: Whose graph code asks for a capture.
        capture_visible_because: The host sync for which they see it.
        written: Operators that first wrote storages, by id.
        storages_read: Ids of storages.
        overwritten: Those written at given places, unread before.
        bytes_read: By (id, bytes) of the model's storages, and offset: what operators of torch read
            there, whatever the values.
    """

    operators: defaultdict[Part, Counter[str]] = field(
        default_factory=partial(defaultdict, Counter),
    )
    names: set[str] = field(default_factory=set)
    host_sync: CaptureError | None = None
    reads: dict[str, torch.Tensor] = field(default_factory=dict)
    generators: dict[int, torch.Generator] = field(default_factory=dict)
    seeded: str | None = None
    breaks: bool = False
    aside: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)
    carried: list[Change] = field(default_factory=list)
    rebound: list[Change] = field(default_factory=list)
    error: str | None = None
    packages_that_ask: set[str] = field(default_factory=set)
    capture_visible_because: CaptureError | None = None
    from_inputs: dict[int, StorageWeakRef] = field(default_factory=dict)
    writes_input: Line | None = None
    overwritten: set[int] = field(default_factory=set)
    written: dict[int, str] = field(default_factory=dict)
    storages_read: set[int] = field(default_factory=set)
    bytes_read: defaultdict[tuple[int, int], dict[int, int]] = field(
        default_factory=partial(defaultdict, dict),
    )
    outside: list[torch.Tensor] = field(default_factory=list)


def note_writes(
    found: Footprint,
    func: Any,
    leaves: Iterable[Any],
    given: Collection[int],
    written: set[int],
    results: Iterable[torch.Tensor],
) -> None:
    """``given``, ``written``: storage ids."""
    made = set(map(storage_id, results))
    made.difference_update(given)
    # ids of storages that the run has freed
    for storage in made:
        found.written.pop(storage, None)
    found.overwritten -= made
    found.storages_read -= made
    for storage in written:
        found.written.setdefault(storage, func._opname)
    overwrites = func._opname in _OVERWRITES
    if overwrites:  # but with `accumulate` or `reduce`
        overwrites = not any(leaf is True or type(leaf) is str for leaf in leaves)
    if overwrites:
        found.overwritten |= written - found.storages_read
        found.storages_read |= set(given) - written
        return
    found.overwritten -= written
    if not operator_of(func).is_view:
        found.storages_read.update(given)


class Outside:
    """Tensors that graphs read and the walk misses: not made by the run, or outliving it, as in an
    ``lru_cache``. ``known``: ids of the model's and the inputs' storages.
    """

    def __init__(self, known: Iterable[int]) -> None:
        self._known = {0, *known}  # 0 is of no storage
        self._read = dict[int, torch.Tensor]()
        self._made = list[weakref.ref[torch.Tensor]]()

    def note(
        self,
        given: Mapping[int, torch.Tensor],
        results: Iterable[torch.Tensor],
    ) -> None:
        for storage in given.keys() - self._known:
            self._read[storage] = given[storage]
        for tensor in results:
            storage = storage_id(tensor)
            if storage not in self._known:
                self._known.add(storage)
                self._made.append(weakref.ref(tensor))

    def read_of(
        self,
        changes: Mapping[str, Change],
        aside: Collection[str],
    ) -> dict[str, torch.Tensor]:
        """What it read of ``changes``, but of eager pieces."""
        found = dict[str, torch.Tensor]()
        for path, change in changes.items():
            if not is_tensor(change.now) or is_within(path, aside):
                continue
            if storage_id(change.now) in self._read:
                found[path] = change.now
        return found

    def tensors(
        self,
        bound: list[Any],
    ) -> list[torch.Tensor]:
        """``bound``: what the model holds."""
        of_model = storages_of(tensors_in(bound))
        found = list(self._read.values())
        for made in self._made:
            tensor = made()
            if tensor is not None:
                found.append(tensor)
        return [tensor for tensor in found if storage_id(tensor) not in of_model]


class RunLog(OperatorMode):
    """What a warm-up writes, and reads outside of the model. Compiled kernels show neither."""

    def __init__(
        self,
        device: str,
        storages: WrittenStorages,
        known: Iterable[int],
        *,
        shows_writes: bool = True,
    ) -> None:
        super().__init__(device)
        self.outside = Outside(known)
        self._storages = storages
        self._found = Footprint()
        if shows_writes:
            storages.watched = self._found.written, self._found.overwritten

    def see(
        self,
        func: Any,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        is_plain = isinstance(func, torch._ops.OpOverload)
        written = written_tensors(func, args, kwargs) if is_plain else []
        self._storages.save(written, adopts=False)
        result = self.run(func, args, kwargs)
        given = dict[int, torch.Tensor]()
        for tensor in tensors_in((args, kwargs)):
            given[storage_id(tensor)] = tensor
        results = tensors_in(result)
        self.outside.note(given, results)
        if is_plain and not implemented_in_python(func, self.device.upper()):
            note_writes(
                self._found,
                func,
                leaves_of(args, kwargs),
                given,
                set(map(storage_id, written)),
                results,
            )
        return result


@dataclass
class _Random:
    """``states`` after operators; another one is the forward's, or of a draw elsewhere."""

    generator: torch.Generator
    seed: int
    states: list[torch.Tensor]


class Look(DispatchMode):
    """The mode of a look.

    Args:
        part: Of code outside of wrappers and eager pieces.
        is_whole: Eager pieces are graph code, too.
        hidden_from: Packages that do not see the capture.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        put_back: PutBack,
        part: Part = "segment",
        eager_ops: Collection[str] = (),
        *,
        is_whole: bool = False,
        inputs: Sequence[torch.Tensor] = (),
        hidden_from: Collection[str] = (),
        capture_visible_because: CaptureError | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Footprint(capture_visible_because=capture_visible_because)
        self.hidden_from = hidden_from
        self.refusals = Refusals(raises=False)
        self._put_back = put_back
        put_back.storages.watched = self.found.written, self.found.overwritten
        self._state = put_back.before
        self._is_whole = is_whole
        self._part = part
        self._eager_ops = frozenset(eager_ops)
        self._device = self._state.device.type
        self._key = self._device.upper()
        self._depth = 0  # nested operators
        self._called_wrappers = set[int]()
        self._names = {  # of the model's tensors
            id(place.value): place.path for place in reversed(self._state.of_tensors)
        }
        self._last_changes = dict[str, object]()
        for path, change in put_back.last.items():
            self._last_changes[path] = change.now
            if is_tensor(change.now):
                self._names[id(change.now)] = path
        self._inputs = storages_of(inputs)
        self._of_model = storages_of(self._state.tensors)
        self.outside = Outside((*self._of_model, *self._inputs))
        self.found.from_inputs |= self._inputs
        self.refusals.watched = self.found.from_inputs
        self._of_state = self._state.container_ids()
        self._in_piece = False
        self._of_piece = set[int]()  # ids of its arguments
        self._given = dict[int, object]()  # to pieces, by id
        self._left = Fingerprint(  # of these, after the last piece
            {},
            self._state.device,
        )
        self._made_by_pieces = dict[int, weakref.ref[torch.Tensor]]()
        self._bound_by_graphs: dict[str, object] = {}
        self._derived_by_pieces: dict[Any, Any] = {}
        self._random: dict[int, _Random] = {}
        self._restores = RandomRestores.number
        self._default = torch.default_generator
        if self._device == "cuda":
            self._default = torch.cuda.default_generators[self._state.device.index or 0]
        self._has_drawn = False
        for generator in (self._default, *self._state.generators):
            known = self._know(generator)
            generator.manual_seed(_SEED)  # no forward sets it
            known.seed = _SEED
            known.states.append(generator.get_state())

    def see(
        self,
        func: Any,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        if not isinstance(func, torch._ops.OpOverload):  # a higher-order operator
            try:
                return func(*args, **kwargs)
            finally:
                self._note_states()
        is_eager = False
        if not self._depth:
            names = operator_of(func).names
            self.found.names |= names
            is_eager = not names.isdisjoint(self._eager_ops)
        if not is_eager:
            return self._run(func, args, kwargs)
        with self.in_part("eager piece"):
            return self._run(func, args, kwargs)

    def _run(
        self,
        func: Any,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        if implemented_in_python(func, self._key):
            with self:
                self._count(func)
                self._depth += 1
                try:
                    key = getattr(torch._C.DispatchKey, self._key)
                    redispatched = as_its_caller(func, func.redispatch, self._device)
                    return redispatched(torch._C.DispatchKeySet(key), *args, **kwargs)
                finally:
                    self._depth -= 1
                    count_writes(func, args, kwargs)
        if is_composite(func, self._key):  # whole in inference mode
            with self:
                return as_its_caller(func, func.decompose, self._device)(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # else function modes see each attribute
            return self._record(func, args, kwargs)

    def _record(
        self,
        func: Any,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        found = self.found
        written = written_tensors(func, args, kwargs)
        self._put_back.storages.save(written)
        generator = kwargs.get("generator")
        if generator is not None:
            self._know(generator)
        leaves = leaves_of(args, kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        ids = [*map(storage_id, tensors)]
        given = dict(zip(ids, tensors, strict=True))
        is_foreign = func.namespace not in ("aten", "prim")
        may_draw = is_foreign or operator_of(func).draws
        self._count(func)
        if self._key == "CPU" or any(tensor.device.type != "cpu" for tensor in tensors):
            refuse_host(func, args, kwargs, self.refusals)
        takes_shape = func._opname.startswith("new_") or func._opname.endswith("_like")
        if self._part == "segment":
            # whole numbers choose what is read; operators of others may choose, too
            dtypes = map(attrgetter("dtype"), tensors)
            reads_all = _PLACES.isdisjoint(dtypes)
            if is_foreign or takes_shape or operator_of(func).is_view:
                reads_all = False
            self._note_reads(
                ids,
                tensors,
                reads_all=reads_all,
            )
            if may_draw or self._has_drawn:
                self._find_seeded()
        try:
            result = as_its_caller(func, func, self._device)(*args, **kwargs)
        finally:
            if may_draw:
                self._note_states()
        self.refusals.follow(func, args, kwargs, result)
        results = [*tensors_in(result), *written]
        self.outside.note(given, results)
        ids_written = set(map(storage_id, written))
        if found.writes_input is None and not ids_written.isdisjoint(self._inputs):
            found.writes_input = blamed_line()
        if not takes_shape and not found.from_inputs.keys().isdisjoint(given):
            found.from_inputs |= storages_of(results)
        if self._in_piece:
            self._follow_piece(tensors, results)
        note_writes(
            found,
            func,
            leaves,
            given,
            ids_written,
            results,
        )
        if func._opname.startswith("_foreach_"):
            count_writes(func, args, kwargs)
        return result

    def _note_reads(
        self,
        ids: Iterable[int],
        given: Iterable[torch.Tensor],
        *,
        reads_all: bool,
    ) -> None:
        found = self.found
        for storage, tensor in zip(ids, given, strict=True):
            name = self._names.get(id(tensor))
            if name is not None:
                found.reads.setdefault(name, tensor)
            if storage in self._of_model:
                parts = found.bytes_read[storage, tensor.untyped_storage().nbytes()]
                offset = int(tensor.storage_offset())
                span = compute_required_storage_length(
                    tensor.shape,
                    tensor.stride(),
                    storage_offset=0,
                )
                read = reads_all * min(span, tensor.numel()) * tensor.itemsize
                parts[offset] = max(parts.get(offset, 0), read)

    def _count(self, func: Any) -> None:
        if not self._depth and _computes(func):
            self.found.operators[self._part][func._schema.name] += 1

    def answer(self, package: str) -> bool:
        if not self.refusals.is_on:
            return False
        self.found.packages_that_ask.add(package)
        return self.found.capture_visible_because is not None

    @contextmanager
    def in_part(
        self,
        part: Part,
    ) -> Iterator[None]:
        before = self._part
        if part == before:
            yield
            return
        self._go_on_in(part)
        try:
            yield
        finally:
            self._go_on_in(before)

    def _go_on_in(self, part: Part) -> None:
        with _disable_current_modes():
            if self._part == "segment":
                self._find_seeded()
            self._note_states()
        self._part = part
        self.refusals.is_on = part == "segment"

    @contextmanager
    def in_wrapper(
        self,
        wrapper: object,
        *,
        is_whole: bool,
    ) -> Iterator[None]:
        """A block that a wrapper captures; its operators count once."""
        again = id(wrapper) in self._called_wrappers
        self._called_wrappers.add(id(wrapper))
        inside = replaced(self, _is_whole=is_whole, _depth=self._depth + again)
        with inside, self.in_part("segment"):
            yield

    def run_unrecorded(
        self,
        function: Callable[..., Any],
        args: Args,
        kwargs: dict[str, Any],
    ) -> Any:
        """Copies what a piece returns of the model, as graphs do."""
        self.found.breaks = True
        if self._is_whole:
            return function(*args, **kwargs)
        if not self._in_piece:  # not inside a piece
            self._of_piece = set(map(id, tensors_in((args, kwargs))))
            self._bound_by_graphs |= _others(self._last_changes, self._changes())
            self.found.rebound += self._left.changes().values()
        made = dict[int, object]()

        def note(node: object) -> bool:  # of each node, containers too
            storages = storages_of(tensors_in(node)).keys()
            is_computed = storages - self._of_model.keys() - self._inputs.keys()
            if is_computed and type(node) in (list, dict):
                return False  # replays make a new one
            if not isinstance(node, Module | torch.Tensor | tuple):
                self._given[id(node)] = node
                if id(node) not in self._of_state:
                    made[id(node)] = node
            return False

        passed = (
            *args,
            *kwargs.values(),
        )
        tree_leaves(
            passed,
            is_leaf=note,
        )
        given = self._record_of(made)
        try:
            with (
                replaced(self, _in_piece=True),
                deriving(self._derived_by_pieces),  # no segment reads it
                self.in_part("eager piece"),
            ):
                result = function(*args, **kwargs)
        finally:
            now = self._changes()
            bound = self._bound_by_graphs
            if not self._in_piece:
                self._left = self._record_of(self._given)
                before = {**self._last_changes, **bound}
                self.found.aside |= _others(before, now).keys()
            self._last_changes = now
            for path, value in list(bound.items()):
                if not is_same(now.get(path, ABSENT), value):
                    del bound[path]
        self.found.carried += given.changes().values()
        # graphs get slots for it
        for module in modules_reached(function, args, kwargs):
            for value in (*vars(module).values(), *module._buffers.values()):
                self._made_by_pieces.pop(id(value), None)
        with _disable_current_modes():
            copied = self._names.keys() | self._made_by_pieces.keys()
            return tree_map_only(
                torch.Tensor,
                lambda tensor: tensor.detach() if id(tensor) in copied else tensor,
                result,
            )

    def _record_of(
        self,
        objects: Mapping[int, object],
    ) -> Fingerprint:
        roots = dict[str, object]()
        for item in objects.values():
            name = type(item).__name__
            roots[f"{name} {len(roots)}"] = item
        return Fingerprint.of(
            roots,
            self._state.device,
        )

    def _follow_piece(
        self,
        given: list[torch.Tensor],
        results: list[torch.Tensor],
    ) -> None:
        read = set(map(id, given)) - self._of_piece
        for path, value in self._bound_by_graphs.items():
            if id(value) in read:
                self.found.stale.add(path)
        known = {storage_id(tensor) for tensor in given if id(tensor) not in self._made_by_pieces}
        for tensor in results:
            if storage_id(tensor) not in known:
                self._made_by_pieces[id(tensor)] = weakref.ref(tensor)

    def _changes(self) -> dict[str, object]:
        return {path: change.now for path, change in self._state.changes().items()}

    def _know(self, generator: torch.Generator) -> _Random:
        key = number_of(generator)
        if key not in self._random:
            state = generator.get_state()
            self._random[key] = _Random(
                generator,
                generator.initial_seed(),
                [state],
            )
            if key != number_of(self._default):
                self.found.generators[key] = generator
        return self._random[key]

    def _note_states(self) -> None:
        for known in self._random.values():
            state = known.generator.get_state()
            if not torch.equal(known.states[-1], state):
                self._has_drawn = True
                known.states.append(state)

    def _find_seeded(self) -> None:
        if self.found.seeded is not None:
            return
        for known in self._random.values():
            generator = known.generator
            state = generator.get_state()
            if torch.equal(known.states[-1], state):
                continue
            is_set = generator.initial_seed() != known.seed
            is_set = is_set or any(torch.equal(state, earlier) for earlier in known.states)
            # another thread drew, or put random states back
            if not is_set or RandomRestores.number > self._restores:
                known.states.append(state)
                continue
            name = "a torch.Generator"
            if number_of(generator) == number_of(self._default):
                name = "torch's default generator"
            paths = [p.path for p in self._state.places.values() if p.value is generator]
            self.found.seeded = f"{[*paths, name][0]}, before {blamed_line()}"

    def finish(self) -> None:
        found = self.found
        if found.error is None:
            self._go_on_in(self._part)
            found.rebound += self._left.changes().values()
        for known in self._random.values():
            known.generator.set_state(known.states[0])
        found.host_sync = self.refusals.first
        found.from_inputs = {
            key: reference
            for key, reference in found.from_inputs.items()
            if key not in self._inputs and not reference.expired()
        }


@cache
def _computes(func: Any) -> bool:
    is_idle = func.namespace in ("prim", "profiler") or func._opname.startswith(_COMPUTES_NOTHING)
    is_view = torch.Tag.inplace_view in func.tags or operator_of(func).is_view
    return not is_idle and not is_view


def modules_reached(
    function: Callable[..., Any],
    args: Args,
    kwargs: Mapping[str, Any],
) -> list[Module]:
    found = list[Module]()
    for module in (function, getattr(function, "__self__", None), *args, *kwargs.values()):
        if isinstance(module, Module):
            found += module.modules()
    return found


def _others(
    before: Mapping[str, object],
    now: Mapping[str, object],
) -> dict[str, object]:
    return {
        path: value for path, value in now.items() if not is_same(before.get(path, ABSENT), value)
    }


def current_look() -> Look | None:
    """None inside of another mode, such as a tape's."""
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, Look) else None


def look(
    call: Callable[[], object],
    put_back: PutBack,
    **options: Any,
) -> Footprint:
    """Run a forward eagerly, once; ``options`` of ``Look``."""
    device = put_back.before.device
    failed = None
    try:
        with (
            put_back.run(),
            random_state_kept(device),
            setting(probing, True),
            as_written(),
            ExitStack() as stack,
        ):
            mode = Look(put_back, **options)
            stack.enter_context(answering(mode.hidden_from, mode.answer))
            if device.type == "cpu":  # on a GPU the dispatcher sees it
                stack.enter_context(host_guard(mode.refusals))
            stack.enter_context(mode)
            try:
                call()
            except Exception as error:
                failed = error
                raise
            finally:
                stack.close()
                mode.finish()
    except Exception as error:
        if error is not failed:
            raise
        mode.found.error = f"{type(error).__name__}: {first_line(error)}"
        traceback.clear_frames(error.__traceback__)  # locals hold tensors
    put_back.computed |= mode.found.from_inputs
    if mode.refusals.read:
        put_back.values_read.setdefault(put_back.key, mode.refusals.read)
    bound = [change.now for change in put_back.last.values()]
    mode.found.outside = mode.outside.tensors(bound)
    return mode.found
