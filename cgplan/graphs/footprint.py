"""One look at an eager run of a forward: what it calls, reads, writes and draws, before anything is
captured.

Note [The look]
    A dispatch mode sees each operator of one run on padding. Compiled functions run as they are
    written: under a dispatch mode Dynamo would skip them, then and ever after. The look is no
    warm-up: warm-ups come after it and run everything as the capture will. Eager pieces run on each
    replay, so they may read, bind and seed as they like. Not seen: kernels that do not pass
    PyTorch's dispatcher, and the code that a forward runs for other sizes.

Note [What the next run tells]
    The first run may be an exception: it makes what a model makes on first use. So the run after it
    decides, by the fingerprint around it. A tensor that graph code read and that this run binds
    again (``self.cache = self.cache + x``) is refused: a graph would always read the one of the
    capture. So is one that the look computed from inputs, which are padding, and that the model
    goes on with. Other changes of Python are a warning, or an error where ``strict`` is set: a
    replay runs no Python.

Note [Random state]
    A replay draws on from where the generator is; it does not run ``torch.manual_seed``. A
    generator that is not where the last operator left it was set by the forward.
"""

from __future__ import annotations

import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Module
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import tree_map_only

from cgplan.backends.blame import blamed_line
from cgplan.backends.capture_answers import answering
from cgplan.backends.context import current_forward_context
from cgplan.backends.host_sync import (
    Refusals,
    as_its_caller,
    as_written,
    count_writes,
    host_guard,
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
from cgplan.graphs.fingerprint import Change, is_same, is_tensor, is_within
from cgplan.graphs.put_back import PutBack

Part = Literal["segment", "eager piece"]
_COMPUTES_NOTHING = ("empty", "new_empty", "_unsafe_view")  # beginnings of names
# at places given by inputs
_OVERWRITES = ("index_copy_", "index_put_", "_index_put_impl_", "scatter_", "copy_")
_SEED = 0x5EED_0F_A_100C
_NOTHING = object()


def no_operators() -> dict[Part, Counter[str]]:
    """Counts for a forward that was not looked at."""
    return {"segment": Counter(), "eager piece": Counter()}


@dataclass(slots=True)
class Footprint:
    """The findings of one look.

    Attributes:
        operators: Calls by name, for code in graphs and code between them; views and bare
            allocations left out.
        names: Names of all operators, with and without overloads; not of those that custom
            operators call.
        host_sync: The first operator in graph code that needs the host.
        reads: The model's tensors that graph code read, by path, in order.
        generators: Random generators that operators were given.
        random: Where graph code set the state of a random generator.
        breaks: Whether an eager piece was called.
        aside: Paths that eager pieces changed.
        stale: Paths that graph code bound and an eager piece read: a replay leaves them as they
            were.
        error: The first line of what the forward raised.
        packages_that_ask: Packages of ``hidden_from`` that asked in graph code whether a capture is
            under way.
        capture_visible_because: The host sync for which these packages see the capture; absent: it
            is hidden from them.
        computed: Storages that hold what was computed from inputs, and that are still there, by the
            id of the storage.
        read: The first operator that needed a value on the host that was computed from inputs, with
            its line.
        writes_input: Where an operator writes into an argument.
        overwritten: Ids of the storages that operators overwrite at places that are given, and do
            not read before.
    """

    operators: dict[Part, Counter[str]] = field(default_factory=no_operators)
    names: set[str] = field(default_factory=set)
    host_sync: CaptureError | None = None
    reads: dict[str, torch.Tensor] = field(default_factory=dict)
    generators: dict[int, torch.Generator] = field(default_factory=dict)
    random: str | None = None
    breaks: bool = False
    aside: set[str] = field(default_factory=set)
    stale: set[str] = field(default_factory=set)
    error: str | None = None
    packages_that_ask: set[str] = field(default_factory=set)
    capture_visible_because: CaptureError | None = None
    computed: dict[int, StorageWeakRef] = field(default_factory=dict)
    read: str | None = None
    writes_input: str | None = None
    overwritten: set[int] = field(default_factory=set)


class Look(TorchDispatchMode):
    """The mode of a look at a model, whose storages are copied before they are written.

    Args:
        kept: Takes the copies, and names the model's tensors.
        part: The part that code outside of wrappers and eager pieces belongs to.
        eager_ops: Operators that run between segments.
        is_whole: Whether nothing breaks the capture: eager pieces are graph code, too.
        inputs: Arguments of the forward; the look follows what is computed from them.
        hidden_from: Packages that the capture is hidden from in graph code.
        capture_visible_because: The host sync for which they see it nevertheless.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        kept: PutBack,
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
        self._kept, self._state, self._is_whole = kept, kept.before, is_whole
        self._names = {
            id(p.value): p.path for p in reversed(self._state.places.values()) if is_tensor(p.value)
        }
        self._seen = self._changes()
        self._names |= {id(now): path for path, now in self._seen.items() if is_tensor(now)}
        self._part: Part = part
        self._eager_ops, self._key = frozenset(eager_ops), self._state.device.type.upper()
        self._inputs = storages_of(inputs)
        self.found.computed |= self._inputs
        self.refusals.watched = self.found.computed
        self._inside, self._called = 0, set[int]()  # operators in operators; wrappers
        self._derived: dict[Any, Any] = {}
        # by eager pieces
        self._is_aside, self._made = False, dict[int, weakref.ref[torch.Tensor]]()
        self._given: set[int] = set()  # to the eager piece
        self._bound: dict[str, object] = {}  # by graph code, by path
        self._has_drawn = False
        self._read = set[int]()  # ids of storages
        # generators, with their states before the look and after an operator
        self._random: dict[int, list[Any]] = {}
        cuda = torch.cuda.default_generators if self._key == "CUDA" else ()
        self._default = cuda[self._state.device.index or 0] if cuda else torch.default_generator
        for generator in (self._default, *self._state.generators):
            self._know(generator)
            generator.manual_seed(_SEED)  # where no forward would set it
        self._note_states()
        self._has_drawn = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
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
                    redispatched = as_its_caller(func, func.redispatch, self._key.lower())
                    return redispatched(torch._C.DispatchKeySet(key), *args, **kwargs)
                finally:
                    self._inside -= 1
                    count_writes(func, args, kwargs)
        if is_composite(func, self._key):  # in inference mode these come whole
            with self.in_part(part), self:
                return as_its_caller(func, func.decompose, self._key.lower())(*args, **kwargs)
        # A torch function mode, such as a default device of the user's, would see each attribute
        # that is asked for.
        with self.in_part(part), torch._C.DisableTorchFunction():
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._kept.save_written(func, args, kwargs)
        if (generator := kwargs.get("generator")) is not None:
            self._know(generator)
        leaves = leaves_of(args, kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        draws = torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in (
            "aten",
            "prim",
        )
        self._count(func)
        if self._key == "CPU" or any(t.device.type != "cpu" for t in tensors):
            refuse_host(func, args, kwargs, self.refusals)
        if self._part == "segment":
            self._note(tensors)
            if draws or self._has_drawn:
                self._compare()
        try:
            result = as_its_caller(func, func, self._key.lower())(*args, **kwargs)
        finally:
            if draws:
                self._note_states()
        self.refusals.follow(func, args, kwargs, result)
        written = written_tensors(func, args, kwargs)
        if self.found.writes_input is None and storages_of(written).keys() & self._inputs.keys():
            self.found.writes_input = blamed_line()
        self._follow(func, tensors, [*tensors_in(result), *written])
        self._note_overwritten(
            func, leaves, storages_of(tensors).keys(), storages_of(written).keys()
        )
        if func._opname.startswith("_foreach_"):
            count_writes(func, args, kwargs)
        return result

    def _follow(self, func: Any, given: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """Note what an operator computed of the tensors that it was given."""
        takes_shape = func._opname.startswith("new_") or func._opname.endswith("_like")
        if self._inputs and not takes_shape:
            used = {t.untyped_storage()._cdata for t in given if t.layout is torch.strided}
            if any(key in self.found.computed for key in used):
                self.found.computed |= storages_of(results)
        if self._is_aside:
            read = set(map(id, given)) - self._given
            self.found.stale |= {path for path, value in self._bound.items() if id(value) in read}
            known = {t.untyped_storage()._cdata for t in given if id(t) not in self._made}
            for t in results:
                if t.untyped_storage()._cdata not in known:
                    self._made[id(t)] = weakref.ref(t)

    def _note_overwritten(
        self, func: Any, leaves: list[Any], given: Collection[int], written: Collection[int]
    ) -> None:
        # `accumulate`, `reduce`
        accumulates = any(leaf is True or type(leaf) is str for leaf in leaves)
        if func._opname in _OVERWRITES and not accumulates:
            self.found.overwritten |= set(written) - self._read
            self._read |= set(given) - set(written)
            return
        self.found.overwritten -= set(written)
        is_view = (
            any(r.alias_info is not None for r in func._schema.returns)
            and not func._schema.is_mutable
        )
        if not is_view:
            self._read |= set(given)

    def answer(self, package: str) -> bool:
        """Whether code of one of ``hidden_from`` that asks sees a capture now."""
        if not self.refusals.is_on:
            return False
        self.found.packages_that_ask.add(package)
        return self.found.capture_visible_because is not None

    def _changes(self) -> dict[str, object]:
        return {path: change.now for path, change in self._state.changes().items()}

    def _note(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) in self._names:
                self.found.reads.setdefault(self._names[id(tensor)], tensor)

    def _count(self, func: Any) -> None:
        namespace, _, name = func._schema.name.partition("::")
        returns_alias = any(r.alias_info is not None for r in func._schema.returns)
        is_view = torch.Tag.inplace_view in func.tags or (
            returns_alias and not func._schema.is_mutable
        )
        if not (
            self._inside
            or is_view
            or namespace in ("prim", "profiler")
            or name.startswith(_COMPUTES_NOTHING)
        ):
            self.found.operators[self._part][func._schema.name] += 1

    @contextmanager
    def in_part(self, part: Part) -> Iterator[None]:
        """A block that is graph code or runs between graphs; a segment inside an eager piece is
        eager, too.
        """
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
        """A block that a graph wrapper inside the model captures; counted once, as it is
        captured.
        """
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
            if part == "segment":
                self._compare()
            self._note_states()

    def run_unrecorded(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an eager piece. It is handed copies of what it returns of the model's state, as
        graphs are.
        """
        self.found.breaks = True
        if self._is_whole:
            return function(*args, **kwargs)
        before, self._is_aside = self._is_aside, True
        if not before:  # a piece inside a piece follows no graph code
            self._given = set(map(id, tensors_in((args, kwargs))))
            self._bound |= _others(self._seen, self._changes())
        context = current_forward_context()
        derived = {} if context is None else context.derived
        if context is not None:  # as a breakable capture: no segment reads what a piece derives
            context.derived = self._derived
        try:
            with self.in_part("eager piece"):
                result = function(*args, **kwargs)
        finally:
            now = self._changes()
            if not before:
                self.found.aside |= _others({**self._seen, **self._bound}, now).keys()
            self._is_aside, self._seen = before, now
            self._bound = {
                p: value for p, value in self._bound.items() if is_same(now.get(p, _NOTHING), value)
            }
            if context is not None:
                context.derived = derived
        # graphs get slots for what is bound there
        for module in modules_reached(function, args, kwargs):
            for value in (*vars(module).values(), *module._buffers.values()):
                self._made.pop(id(value), None)
        with _disable_current_modes():
            copied = self._names.keys() | self._made.keys()
            return tree_map_only(
                torch.Tensor, lambda t: t.detach() if id(t) in copied else t, result
            )

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
        live = {
            key: ref
            for key, ref in found.computed.items()
            if key not in self._inputs and not ref.expired()
        }
        found.computed = live
        return found


def modules_reached(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Module]:
    """The modules that an eager piece is, is a method of, or is given, and those inside."""
    reached = (function, getattr(function, "__self__", None), *args, *kwargs.values())
    return [inner for module in reached if isinstance(module, Module) for inner in module.modules()]


def _others(before: Mapping[str, object], now: Mapping[str, object]) -> dict[str, object]:
    return {
        path: value for path, value in now.items() if not is_same(before.get(path, _NOTHING), value)
    }


def current_look() -> Look | None:
    """The look that sees the next operator first: no other mode is inside of it, such as a tape's
    that records.
    """
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, Look) else None


def look(call: Callable[[], object], kept: PutBack, **options: Any) -> Footprint:
    """Run a forward eagerly, once, by ``call``; its footprint, with the error that it raised. For
    ``kept`` and ``options`` see ``Look``.
    """
    device = kept.before.device
    with kept.run(), random_state_kept(device), probing(), as_written(), ExitStack() as stack:
        mode = Look(kept, **options)
        stack.enter_context(answering(mode.hidden_from, mode.answer))
        if device.type == "cpu":  # elsewhere the dispatcher sees what moves values to the host
            stack.enter_context(host_guard(mode.refusals))
        stack.enter_context(mode)
        try:
            call()
        except Exception as error:
            mode.found.error = f"{type(error).__name__}: {first_line(error)}"
            traceback.clear_frames(error.__traceback__)  # their locals hold tensors, and so memory
        finally:
            stack.close()
            mode.finish()
    return mode.found


def examine(call: Callable[[], object], kept: PutBack, **options: Any) -> Footprint:
    """Look at a forward ahead of its capture. A second look follows where a library has to see the
    capture, see Note [Hidden captures]. For ``kept`` and ``options`` see ``Look``.

    Raises:
        CaptureError: graph code sets the state of a random generator.
    """
    found = look(call, kept, **options)
    is_hidden = found.capture_visible_because is None
    if is_hidden and found.host_sync is not None and found.packages_that_ask:
        found = look(call, kept, **{**options, "capture_visible_because": found.host_sync})
    if found.random is not None:
        raise CaptureError(
            f"the forward sets the state of {found.random}; a replay would not",
            remedy="Seed generators outside of the forward, or keep that part in an eager piece.",
        )
    return found


def judge(
    found: Footprint, changed: Mapping[str, Change], kept: PutBack, *, runs_again: bool
) -> None:
    """Compare a look with the run after it, which changed ``changed``; see Note [What the next run
    tells]. ``runs_again``: Python code runs on each replay, and segments are handed what it makes.

    Raises:
        CaptureError: a graph would use tensors of the capture in place of those that each run
            makes.
    """
    if not runs_again:
        _refuse_rebound(found, changed, kept)
    if made := listed(kept.made_of(found.computed)):
        _refuse_first_use(made, kept)


def refuse_value(found: Footprint, kept: PutBack) -> None:
    """Refuse a capture whose first run asked for a value, if what it made is still there. Raises
    CaptureError.
    """
    if found.read and kept.has_made:
        _refuse_first_use(f"a value for the host ({found.read})", kept)


def _refuse_first_use(what: str, kept: PutBack) -> None:
    remedy = "Run the model on one real batch before the capture."
    if kept.leaves_python:
        remedy = f"Dicts and lists keep what they were given, so make the model anew. {remedy}"
    raise CaptureError(
        f"the forward computes {what} on first use, from inputs that are padding here, and goes "
        "on with the result",
        remedy=remedy,
    )


def _refuse_rebound(found: Footprint, changed: Mapping[str, Change], kept: PutBack) -> None:
    if stale := [path for path in found.stale if path in changed]:
        raise CaptureError(
            f"an eager piece reads {listed(stale)}, which graph code binds on each call; a replay "
            "would not",
            remedy="Pass it to the piece as an argument, or have the piece compute it.",
        )
    refused = kept.gone(found.reads, changed)
    refused += [
        path
        for path, change in changed.items()
        if change.is_reshaped and not is_within(path, found.aside)
    ]
    if refused:
        raise CaptureError(
            f"the forward reads {listed(refused)} and binds it again on each call; a graph would "
            "always read what was "
            "there at capture",
            remedy="Write in place (self.cache.add_(x), a one-element tensor for a counter), pass "
            "it as an input, or "
            "do it outside of the forward.",
        )


def listed(paths: Iterable[str]) -> str:
    """The first paths, without the root's name."""
    return ", ".join(path.removeprefix("model.") for path in [*paths][:5])
