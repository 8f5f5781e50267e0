"""One look at an eager run of a forward: what it calls, reads, writes and draws, before anything is captured.

Note [The look]
    A dispatch mode sees each operator of one run on padding. Compiled functions run as they are written: under a
    dispatch mode Dynamo would skip them, then and ever after. The look is no warm-up: warm-ups come after it and run
    everything as the capture will. Eager pieces run on each replay, so they may read, bind and seed as they like. Not
    seen: kernels that do not pass PyTorch's dispatcher, and the code that a forward runs for other sizes.

Note [Rebound state]
    ``self.cache = self.cache + x`` makes a new tensor on each call: a graph would always read the one that was there at
    capture. ``self.step += 1`` is not run by a replay at all. So tensors that operators read and that are gone from the
    model afterwards are refused, if a second look agrees: the first run may be an exception (``self.table =
    self.table.to(device)``). A number is taken as read if it changes on each run, and operators, the numbers that they
    are given or the model's tensors that they read differ from run to run; in FULL also where they differ once it is 0
    or large (a sliding cache that is full). Else the report warns. Results that are only kept are allowed.

Note [State made of inputs]
    A cache of cross attention, or the statistics of a first batch, are computed from the inputs on first use and only
    read afterwards. In a capture the inputs are padding, and what is made of them would stay. So the look follows what
    is computed from inputs, but not through operators that take their shape alone; a tensor of the model that was made
    so by the first look, and that the second one reads and does not make again, is refused.

Note [Random state]
    A replay draws on from where the generator is; it does not run ``torch.manual_seed``. A generator that is not where
    the last operator left it was set by the forward.
"""

from __future__ import annotations

import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_map_only

from cgplan.backends.blame import blamed_line
from cgplan.backends.capture_answers import answering
from cgplan.backends.context import current_forward_context
from cgplan.backends.host_sync import (
    HostGuard,
    Refusals,
    as_its_caller,
    as_written,
    count_writes,
    implemented_in_python,
    is_composite,
    leaves_of,
    names_of,
    probing,
    refuse_host,
    storages_of,
    tensors_in,
    written_tensors,
)
from cgplan.errors import CaptureError, first_line
from cgplan.graphs.ambient import number_of, random_state_kept
from cgplan.graphs.model_state import ModelState, is_same

Part = Literal["segment", "eager piece"]
_COMPUTES_NOTHING = ("empty", "new_empty", "_unsafe_view")  # beginnings of names
_CHECKS_FLOATS = {  # operators that check floats on the device: a failed check ends the process's use of a GPU
    "aten::multinomial": "probabilities", "aten::bernoulli": "probabilities", "aten::bernoulli_": "probabilities",
    "aten::binomial": "probabilities", "aten::binary_cross_entropy": "probabilities", "aten::poisson": "rates",
    "aten::normal": "deviations", "aten::_assert_async": "conditions",
}  # fmt: skip
_CHECKS_INDICES = ("index", "_index_put", "scatter", "gather", "take", "embedding", "_embedding_bag", "nll_loss")
_MAKES_INDICES = ("aten::_to_copy", "aten::copy_", "aten::bucketize", "aten::searchsorted")  # of floats, in any range
_FEW = 512  # bytes
_MANY_CALLS = 1_000_003
_SEED = 0x5EED_0F_A_100C
_NOTHING = object()


def no_operators() -> dict[Part, Counter[str]]:
    """Counts for a forward that was not looked at."""
    return {"segment": Counter(), "eager piece": Counter()}


@dataclass(slots=True)
class Footprint:
    """The findings of one look.

    Attributes:
        operators: Calls by name, for code in graphs and code between them; views and bare allocations left out.
        names: Names of all operators, with and without overloads; not of those that custom operators call.
        host_sync: The first operator in graph code that needs the host.
        reads: Paths of the model's tensors that graph code read, in order.
        generators: Random generators that operators were given.
        random: Where graph code set the state of a random generator.
        breaks: Whether an eager piece was called.
        trail: The operators in graph code, and the numbers and tensors of the model that they were given, in order.
        moved: Paths of numbers that changed outside of eager pieces.
        unreturned: Where graph code read a tensor that an eager piece made and did not return.
        stale: Values by path that graph code bound and an eager piece read: a replay leaves them as they were.
        rounds: Whether floats became whole numbers that may be out of range as indices.
        error: The first line of what the forward raised.
        asked: Packages of ``hidden_from`` whose code asked in graph code whether a capture is under way.
        told: The host sync for which these packages are told of the capture; absent: they are told of no capture.
        computed: Storages that hold what was computed from inputs, and that are still there, by the id of the storage.
        born: Ids of those that an operator made; others were there before, and were written.
        used: Ids of storages that operators were given.
        read: The first operator that needed a value on the host that was computed from inputs, with its line.
    """

    operators: dict[Part, Counter[str]] = field(default_factory=no_operators)
    names: set[str] = field(default_factory=set)
    host_sync: CaptureError | None = None
    reads: dict[str, None] = field(default_factory=dict)
    generators: dict[int, torch.Generator] = field(default_factory=dict)
    random: str | None = None
    breaks: bool = False
    trail: list[str] = field(default_factory=list)
    moved: dict[str, None] = field(default_factory=dict)
    unreturned: str | None = None
    stale: dict[str, object] = field(default_factory=dict)
    rounds: bool = False
    error: str | None = None
    asked: set[str] = field(default_factory=set)
    told: CaptureError | None = None
    computed: dict[int, StorageWeakRef] = field(default_factory=dict)
    born: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)
    read: str | None = None

    @property
    def checks(self) -> str | None:
        """An operator that checks on the device what is computed from floats, so that NaN may not reach it."""
        for name in self.operators["segment"] + self.operators["eager piece"]:
            by_index = self.rounds and name.removeprefix("aten::").startswith(_CHECKS_INDICES)
            if by_index or name in _CHECKS_FLOATS:
                return f"{name}, which checks {_CHECKS_FLOATS.get(name, 'indices')}"
        return None


class Look(TorchDispatchMode):
    """The mode of a look at a model in ``state``, where storages are copied before they are written, up to ``limit``
    bytes on their device.

    Args:
        part: The part that code outside of wrappers and eager pieces belongs to.
        eager_ops: Operators that run between segments.
        is_whole: Whether nothing breaks the capture: eager pieces are graph code, too.
        now: A later record of the model, which gives tensors their names, and numbers their values before the look;
            absent: ``state`` gives the names, and changes of numbers are not noted.
        inputs: Arguments of the forward; the look follows what is computed from them.
        hidden_from: Packages that are told in graph code that no capture is under way, unless ``told`` is given.
        told: The host sync for which they are told of a capture.
        expected: The trail of another look: no operator is run any more after one that is not in its place there.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        state: ModelState,
        limit: int,
        part: Part = "segment",
        eager_ops: Collection[str] = (),
        *,
        is_whole: bool = False,
        now: ModelState | None = None,
        inputs: Sequence[torch.Tensor] = (),
        hidden_from: Collection[str] = (),
        told: CaptureError | None = None,
        expected: list[str] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found, self.hidden_from = Footprint(told=told), hidden_from
        self.refusals = Refusals(raises=False)
        self._state, self._limit, self._now, self._is_whole = state, limit, now, is_whole
        places = (now or state).places.values()
        self._names = {id(p.value): p.path for p in places if isinstance(p.value, torch.Tensor)}
        self._part: Part = part
        self._eager_ops, self._key = frozenset(eager_ops), state.device.type.upper()
        self._inputs = storages_of(inputs)
        self.found.computed |= self._inputs
        self.refusals.watched = self.found.computed
        self._expected, self._is_lost = expected, False
        self._inside, self._called = 0, set[int]()  # operators in operators; wrappers
        self._last = self._numbers()
        self._derived: dict[Any, Any] = {}
        self._is_aside, self._made = False, dict[int, weakref.ref[torch.Tensor]]()  # by eager pieces
        self._given: set[int] = set()  # to the eager piece
        self._bound: dict[str, object] = {}  # by graph code, by path
        self._seen = self._rebound()
        self._has_drawn = False
        self._random: dict[int, list[Any]] = {}  # generators, with their states before the look and after an operator
        cuda = torch.cuda.default_generators if self._key == "CUDA" else ()
        self._default = cuda[state.device.index or 0] if cuda else torch.default_generator
        for generator in (self._default, *state.generators):
            self._know(generator)
            generator.manual_seed(_SEED)  # where no forward would set it
        self._note_states()
        self._has_drawn = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note an operator, and run it."""
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):  # a higher-order operator
            try:
                return func(*args, **kwargs)
            finally:
                self._note_states()
        names = names_of(func)
        if not self._inside:
            self.found.names |= names
        is_eager = bool(names & self._eager_ops) and not self._inside
        part: Part = "eager piece" if is_eager else self._part
        if implemented_in_python(func, self._key):
            with self.in_part(part), self:
                self._count(func)
                self._inside += 1
                try:
                    key = getattr(torch._C.DispatchKey, self._key)
                    return func.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
                finally:
                    self._inside -= 1
                    count_writes(func, args, kwargs)
        if is_composite(func, self._key):  # in inference mode these come whole
            with self.in_part(part), self:
                return as_its_caller(func, func.decompose, self._key.lower())(*args, **kwargs)
        # A torch function mode, such as a default device of the user's, would see each attribute that is asked for.
        with self.in_part(part), torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._state.save_written(func, args, kwargs, self._limit)
        if (generator := kwargs.get("generator")) is not None:
            self._know(generator)
        leaves = leaves_of(args, kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        draws = torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in ("aten", "prim")
        self._count(func)
        if self._key == "CPU" or any(t.device.type != "cpu" for t in tensors):
            refuse_host(func, args, kwargs, self.refusals)
        if self._part == "segment":
            self._note(func, leaves)
            if draws or self._has_drawn:
                self._compare()
        try:
            result = func(*args, **kwargs)
        finally:
            if draws:
                self._note_states()
        self.refusals.follow(func, args, kwargs, result)
        self._follow(func, tensors, [*tensors_in(result), *written_tensors(func, args, kwargs)])
        if func._opname.startswith("_foreach_"):
            count_writes(func, args, kwargs)
        return result

    def _follow(self, func: Any, given: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """Note what an operator computed of the tensors that it was given."""
        if func._schema.name in _MAKES_INDICES and any(t.is_floating_point() for t in given):
            self.found.rounds |= any(t.dtype in (torch.int32, torch.int64) for t in results)
        takes_shape = func._opname.startswith("new_") or func._opname.endswith("_like")
        if self._inputs and not takes_shape:
            used = {t.untyped_storage()._cdata for t in given if t.layout is torch.strided}
            self.found.used |= used
            if any(key in self.found.computed for key in used):
                made = storages_of(results)
                self.found.computed |= made
                self.found.born |= made.keys() - used
        if self._is_aside:
            read = set(map(id, given)) - self._given
            self.found.stale |= {path: value for path, value in self._bound.items() if id(value) in read}
            known = {t.untyped_storage()._cdata for t in given if id(t) not in self._made}
            for t in results:
                if t.untyped_storage()._cdata not in known:
                    self._made[id(t)] = weakref.ref(t)

    def answer(self, package: str) -> bool:
        """What code of one of ``hidden_from`` is told that asks whether a capture is under way."""
        self.found.asked |= {package} if self.refusals.is_on else set()
        return self.found.told is not None and self.refusals.is_on

    def _rebound(self) -> dict[str, object]:
        return {path: now for path, (now, _) in self._state.rebound().items()}

    def _note(self, func: Any, leaves: list[Any]) -> None:
        trail = self.found.trail
        begin = len(trail)
        trail.append(func._schema.name)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                if isinstance(leaf, bool | int | float | complex):
                    trail.append(repr(leaf))
            elif id(leaf) in self._names:
                self.found.reads[self._names[id(leaf)]] = None
                trail.append(self._names[id(leaf)])
            elif id(leaf) in self._made and self._made[id(leaf)]() is leaf:
                self.found.unreturned = self.found.unreturned or blamed_line()
            elif func is torch.ops.aten.lift_fresh.default and leaf.device.type == "cpu" and leaf.nbytes <= _FEW:
                trail.append(repr(leaf.untyped_storage().tolist()))  # it is made of numbers
        self._is_lost |= self._expected is not None and trail[begin:] != self._expected[begin : len(trail)]
        if self._is_lost:
            raise CaptureError("another operator than expected")  # not run: its indices may be anywhere

    def _count(self, func: Any) -> None:
        namespace, _, name = func._schema.name.partition("::")
        returns_alias = any(r.alias_info is not None for r in func._schema.returns)
        is_view = torch.Tag.inplace_view in func.tags or (returns_alias and not func._schema.is_mutable)
        if not (self._inside or is_view or namespace in ("prim", "profiler") or name.startswith(_COMPUTES_NOTHING)):
            self.found.operators[self._part][func._schema.name] += 1

    @contextmanager
    def in_part(self, part: Part) -> Iterator[None]:
        """A block that is graph code or runs between graphs; a segment inside an eager piece is eager, too."""
        before = self._part
        if part == before:
            yield
            return
        self._end_part(before)
        self._part, self.refusals.is_on = part, part == "segment"
        try:
            yield
        finally:
            self._end_part(part)
            self._part, self.refusals.is_on = before, before == "segment"

    @contextmanager
    def in_wrapper(self, wrapper: object, *, is_whole: bool) -> Iterator[None]:
        """A block that a graph wrapper inside the model captures; counted once, as it is captured."""
        before, again = self._is_whole, id(wrapper) in self._called
        self._called.add(id(wrapper))
        self._is_whole, self._inside = is_whole, self._inside + again
        try:
            with self.in_part("segment"):
                yield
        finally:
            self._is_whole, self._inside = before, self._inside - again

    def _end_part(self, part: Part) -> None:
        with _disable_current_modes():
            now = self._numbers()
            if part == "segment":
                last = self._last
                self.found.moved |= {p: None for p in now if p in last and not is_same(last[p], now[p])}
                self._compare()
            self._last = now
            self._note_states()

    def _numbers(self) -> Mapping[str, object]:
        return {} if self._now is None else _later(self._now).numbers

    def run_aside(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an eager piece. It is handed copies of what it returns of the model's state, as graphs are."""
        self.found.breaks = True
        if self._is_whole:
            return function(*args, **kwargs)
        before, self._is_aside = self._is_aside, True
        if not before:  # a piece inside a piece follows no graph code
            self._given = set(map(id, tensors_in((args, kwargs))))
            now = self._rebound().items()
            self._bound |= {path: value for path, value in now if self._seen.get(path, _NOTHING) is not value}
        context = current_forward_context()
        derived = {} if context is None else context.derived
        if context is not None:  # as a breakable capture: no segment reads what a piece derives
            context.derived = self._derived
        try:
            with self.in_part("eager piece"):
                result = function(*args, **kwargs)
        finally:
            self._is_aside, self._seen = before, self._rebound()
            self._bound = {p: value for p, value in self._bound.items() if self._seen.get(p, _NOTHING) is value}
            if context is not None:
                context.derived = derived
        for module in modules_reached(function, args, kwargs):  # graphs get slots for what is bound there
            for value in (*vars(module).values(), *module._buffers.values()):
                self._made.pop(id(value), None)
        with _disable_current_modes():
            copied = self._names.keys() | self._made.keys()
            return tree_map_only(torch.Tensor, lambda t: t.detach() if id(t) in copied else t, result)

    def _know(self, generator: torch.Generator) -> None:
        key = number_of(generator)
        if key not in self._random:
            self._random[key] = [generator, generator.get_state(), generator.get_state()]
            if key != number_of(self._default):
                self.found.generators[key] = generator

    def _note_states(self) -> None:
        for known in self._random.values():
            before, known[2] = known[2], known[0].get_state()
            self._has_drawn |= not torch.equal(before, known[2])

    def _compare(self) -> None:
        """Note a generator that is not where the last operator left it."""
        for key, (generator, _, after) in self._random.items() if self.found.random is None else ():
            if not torch.equal(after, generator.get_state()):
                is_default = key == number_of(self._default)
                names = [p.path for p in self._state.places.values() if p.value is generator]
                names.append("torch's default generator" if is_default else "a torch.Generator")
                self.found.random = f"{names[0]}, before {blamed_line()}"

    def finish(self) -> Footprint:
        """The findings. Generators are where they were before the look."""
        found = self.found
        if found.error is None:
            self._end_part(self._part)
        for generator, before, _ in self._random.values():
            generator.set_state(before)
        found.host_sync, found.read = self.refusals.first, self.refusals.read
        live = {key: ref for key, ref in found.computed.items() if key not in self._inputs and not ref.expired()}
        found.computed = live
        return found


def modules_reached(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Module]:
    """The modules that an eager piece is, is a method of, or is given, and those inside."""
    reached = (function, getattr(function, "__self__", None), *args, *kwargs.values())
    return [inner for module in reached if isinstance(module, Module) for inner in module.modules()]


def current_look() -> Look | None:
    """The look that sees the next operator first: no other mode is inside of it, such as a tape's that records."""
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, Look) else None


def look(call: Callable[[], object], state: ModelState, limit: int = 0, **options: Any) -> Footprint:
    """Run a forward eagerly, once, by ``call``; its footprint, with the error that it raised. For ``state``, ``limit``
    and ``options`` see ``Look``.
    """
    state.rewind()
    with random_state_kept(state.device), probing(), as_written(), ExitStack() as stack:
        mode = Look(state, limit, **options)
        stack.enter_context(answering(mode.hidden_from, mode.answer))
        if state.device.type == "cpu":  # elsewhere the dispatcher sees what moves values to the host
            stack.enter_context(HostGuard(mode.refusals))
        stack.enter_context(mode)
        try:
            call()
        except Exception as error:
            mode.found.error = f"{type(error).__name__}: {first_line(error)}"
            traceback.clear_frames(error.__traceback__)  # their locals hold tensors, and so memory
        finally:
            stack.close()
            mode.finish()
            state.adopt_fresh()
    return mode.found


def examine(
    call: Callable[[], object], state: ModelState, inputs: Sequence[torch.Tensor], limit: int, **options: Any
) -> tuple[Footprint, list[str]]:
    """Look at a forward ahead of its capture, see Note [Rebound state]: the footprint, and warnings for the report.

    Args:
        call, state, limit, options: As for ``look``.
        inputs: Arguments of the forward, which the model may keep.

    Raises:
        CaptureError: graph code reads state that it binds again or a list that it adds to, or sets the state of a
            random generator; an eager piece reads what graph code binds; or the model keeps what it computed from
            inputs on first use.
    """
    options["inputs"] = inputs
    found, before = look(call, state, limit, **options), state
    if found.told is None and found.host_sync is not None and found.asked:  # Note [Who is told of a capture]
        options["told"], hidden, before = found.host_sync, found, _later(state)
        found = look(call, state, limit, now=before, **options)
        found.computed = {key: ref for key, ref in hidden.computed.items() if not ref.expired()} | found.computed
        found.born |= hidden.born
    if found.random is not None:
        raise CaptureError(
            f"the forward sets the state of {found.random}; a replay would not",
            remedy="Seed generators outside of the forward, or keep that part in an eager piece.",
        )
    first = ModelState.of(before.roots, before.device) if found.computed else _later(before)
    numbers = first.numbers
    differ = any(path in numbers and not is_same(value, numbers[path]) for path, value in before.numbers.items())
    lists = before.grown()
    kept = found.computed or found.read
    unsure = found.unreturned or found.stale or differ or lists or kept or state.has_blind_writes()
    unsure = unsure or (found.breaks and bool(before.rebound()))  # segments may read lengths of what pieces bind
    runs_again = options.get("part") == "eager piece"  # Python code on each replay: segments are handed what changes
    if not (kept or (not runs_again and (unsure or _lost(found, before, first, inputs)))):
        return found, []
    again = look(call, state, limit, now=first, **options)
    if runs_again:
        _refuse_made(found, again, first, _later(first))
        return found, []
    given = set(map(id, inputs))  # the same objects in both runs, so the second one binds nothing new
    if stale := [path for path, value in found.stale.items() if path in again.stale or id(value) in given]:
        raise CaptureError(
            f"an eager piece reads {_listed(stale)}, which graph code binds on each call; a replay would not",
            remedy="Pass it to the piece as an argument, or have the piece compute it.",
        )
    if again.unreturned is not None:
        raise CaptureError(
            f"graph code reads a tensor that an eager piece made and did not return, at {again.unreturned}; a graph "
            "would always read that of the capture",
            remedy="Return the tensor from the eager piece, or write it in place (copy_) into one that stays.",
        )
    second = _later(first)
    refused, moved = _lost(again, first, second, inputs), list(again.moved)
    lists &= first.grown()
    read = [path for path in again.reads if path.rpartition("[")[0] in lists]
    refused += [path for path in read if id(first.places[path].value) not in given]
    if moved:
        run = partial(look, call, state, limit, **options)
        third = run(now=second)
        refused += [path for path in moved if path in third.moved and third.trail != again.trail]
        if options.get("is_whole") and not refused:  # else eager pieces would run with what is tried
            refused += _deciding_numbers(moved, third, second, run)
    elif found.breaks and again.trail != found.trail:
        third = look(call, state, limit, now=second, **options)
        if third.trail != again.trail:
            raise CaptureError(
                "graph code runs other operators or gives them other numbers on each run, as eager pieces change "
                f"{_listed(list(first.rebound()))}; a graph would always use those of the capture",
                remedy="Compute what depends on them in the eager piece, or pass it as an input.",
            )
    if refused:
        raise CaptureError(
            f"the forward reads {_listed(refused)} and binds it again on each call; a graph would always read what was "
            "there at capture",
            remedy="Write in place (self.cache.add_(x), a one-element tensor for a counter), pass it as an input, or "
            "do it outside of the forward.",
        )
    _refuse_made(found, again, first, second)
    return found, [f"the forward changes {_listed(moved)}; replays do not, nor do they see it change"] if moved else []


def _deciding_numbers(
    moved: Sequence[str], last: Footprint, state: ModelState, run: Callable[..., Footprint]
) -> list[str]:
    """The numbers, if it depends on them which operators run: set to 0 and to a large number, for two runs each.
    ``last`` is the look before. Python's state is as it was afterwards.
    """
    for value in (0, _MANY_CALLS):
        now = ModelState.of(state.roots, state.device)
        counts = [p for path in moved if (p := now.places.get(path)) is not None and type(p.value) in (int, float)]
        for place in counts:
            with suppress(LookupError, AttributeError, TypeError):  # a tuple cannot change
                place.container[place.key] = value
        tried = [run(expected=last.trail) for _ in range(2 if counts else 0)]
        now.restore()
        if any((look.trail, look.error) != (last.trail, last.error) for look in tried):
            return [place.path for place in counts]
    return []


def _refuse_made(found: Footprint, again: Footprint, first: ModelState, second: ModelState) -> None:
    """Raise CaptureError for what the first look made of inputs and the second one used, see Note [State made of
    inputs]. ``first`` and ``second`` are the records of the model after them.
    """
    ids = found.computed.keys() & again.used - (again.computed.keys() - found.born)
    stayed = {path: value for path, value in _stayed(first, second).items() if isinstance(value, torch.Tensor)}
    what = _listed([path for path, tensor in stayed.items() if not ids.isdisjoint(storages_of([tensor]))])
    known = storages_of([place.value for place in first.places.values() if isinstance(place.value, torch.Tensor)])
    if not what and any(not found.computed[key].expired() for key in ids - known.keys()):
        what = "a tensor that it keeps where cgplan does not look"
    if not what and found.read and not again.read:
        what = f"a value for the host ({found.read})"
    if what:
        raise CaptureError(
            f"the forward computes {what} on first use, from inputs that are padding here, and goes on with the result",
            remedy="Run the model on one real batch before the capture.",
        )


def _later(state: ModelState) -> ModelState:
    return ModelState.of(state.roots, state.device) if state.rebound() or state.grown() else state


def _lost(found: Footprint, before: ModelState, now: ModelState, inputs: Sequence[torch.Tensor]) -> list[str]:
    """Paths of tensors that graph code read and that are gone from the model."""
    stay = {*map(id, inputs), *map(id, _stayed(before, now).values())}
    return [path for path in found.reads if id(before.places[path].value) not in stay]


def _stayed(before: ModelState, now: ModelState) -> dict[str, Any]:
    """What is where it was, by path."""
    there = now.places
    return {path: p.value for path, p in before.places.items() if path in there and there[path].value is p.value}


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(path.removeprefix("model.") for path in paths[:5])
