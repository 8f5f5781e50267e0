"""The address manifest: where each tensor lay when a graph was captured, by name, and whether it lies there now."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cgplan.errors import AddressError
from cgplan.graphs.address_check import Check, compile_check, nodes_of
from cgplan.graphs.address_difference import AddressDifference, Path, difference_of, keep_known, text_of
from cgplan.graphs.address_walk import Entry, Form, Leaf, Node, Walk

_SHOWN = 10
_ARGUMENT = re.compile(r"args\[(\d+)\]")
_MAX_REBINDS = 8
_FREED = -1
_REMEDY = (
    "Write new values into the captured tensors in place (copy_), declare the tensor as an input so that it is copied "
    "into a static buffer, or capture again."
)


class AddressManifest:
    """Address, form (see `form_of`) and path of every tensor of a device that can be reached from some roots.

    It holds numbers, names, classes and weak references; tensors and modules it holds only once `check` has compiled
    itself. It looks into dicts and other Mappings, lists, tuples, named tuples, deques, dataclasses, ``__slots__``,
    plain objects and modules (parameters, buffers, submodules and attributes), to any depth and through cycles. It does
    not look at attributes that start with an underscore, at properties and class attributes, into sets, iterators,
    functions, classes and threads, nor at attributes of tensors;
    sparse tensors have no address. A path is as in Note [Address paths]. A tensor or container that is reached by
    several paths is named by the first one; the others are aliases, and are checked too.

    """

    __slots__ = ("_addresses", "_check", "_count", "_device", "_ignored", "_memory", "_rebinds", "_repeats", "_top")

    def __init__(
        self,
        top: Node,
        count: int,
        device: torch.device,
        ignored: frozenset[str] = frozenset(),
        *,
        repeats: bool = False,
    ) -> None:
        self._top = top
        self._count = count
        self._device = device
        self._ignored = ignored
        self._repeats = repeats
        self._addresses: Check | None = None  # of `matches`
        self._check: Check | None = None  # of `check`
        self._rebinds = 0
        self._memory: dict[int, StorageWeakRef] = {}  # by the numbers of tensors

    @classmethod
    def of(
        cls,
        roots: Mapping[str, Any],
        device: torch.device,
        *,
        before: AddressManifest | None = None,
        ignored: frozenset[str] = frozenset(),
        repeats: bool = False,
        watches: bool = False,
    ) -> AddressManifest:
        """The manifest of what ``roots`` holds now.

        Args:
            roots: Values by name, such as ``{"args": args, "kwargs": kwargs, "metadata": metadata}``.
            device: Tensors on other devices are left alone. ``cuda`` without an index is the current device.
            before: An earlier manifest of the same roots. What has moved, come or gone since then is not state that a
                graph relies on, and is left alone: a forward that keeps its last result in an attribute, say.
            ignored: More paths to leave alone.
            repeats: Whether it will be checked on each replay: `check` then compiles itself, and holds the tensors and
                modules that the first check met, until the manifest is dropped.
            watches: Whether it will be some other's ``before``: it then knows, without holding it, whether memory is
                still there. What was freed has moved, even if something else lies at its address by now.
        """
        walk = Walk(torch.empty(0, device=device).device)
        top = walk.run(roots)
        if before is not None:
            before._forget_freed()
            moved = difference_of(before._top, top).paths
            ignored |= moved
            if moved:
                keep_known(before._top, top)
        made = cls(top, _count(top), walk.device, ignored, repeats=repeats)
        for tensor, number in walk.tensors.values() if watches else ():
            with suppress(Exception):  # a class of the user's, without a storage
                made._memory[number] = StorageWeakRef(tensor.untyped_storage())
        return made

    def __len__(self) -> int:
        """The number of tensors, each counted once."""
        return self._count

    @property
    def ignored(self) -> frozenset[str]:
        """Paths that are left alone."""
        return self._ignored

    @property
    def paths(self) -> dict[str, int]:
        """The address (bytes) of each tensor by its first path."""
        named, seen = {}, set()
        for path, child in _visit(self._top):
            if isinstance(child, Leaf) and child.number not in seen:
                seen.add(child.number)
                named[text_of(path)] = child.address
        return named

    @property
    def aliases(self) -> dict[str, str]:
        """Further paths of tensors and containers, with the first one of each."""
        first: dict[Any, Path] = {}
        named = {}
        for path, child in _visit(self._top):
            key = child.number if isinstance(child, Leaf) else child
            if first.setdefault(key, path) is not path:
                named[text_of(path)] = text_of(first[key])
        return named

    def matches(self, roots: Mapping[str, Any]) -> bool:
        """Whether all tensors lie where they lay, whatever their shapes and types. Never raises. Fast; the first call
        compiles it.

        False, too, where a container that holds tensors, or that was empty in one, has another class or length, or
        where something else took the place of None: `compare` then says whether an address differs.

        It does not see a tensor that came in place of a number, a string or a tensor of another device, in a container
        without tensors inside (but `args`, `kwargs` and other roots are looked at), or in a slot that was not set.
        """
        if self._addresses is None:
            self._addresses = compile_check(self._top, self._device)
        return _passes(self._addresses, roots)

    def still_holds(self, roots: Mapping[str, Any]) -> bool:
        """Whether a `check` would pass, as far as the function that it compiled can tell; False without one."""
        return self._check is not None and _passes(self._check, roots)

    def compare(self, roots: Mapping[str, Any]) -> AddressDifference:
        """How the structure differs now, by a fresh walk; it sees what the fast check does not."""
        return self._difference(Walk(self._device).run(roots))

    def check(self, roots: Mapping[str, Any], *, what: str, may_grow: bool = False, walk_again: bool = False) -> None:
        """Refuse a structure that the graph cannot be replayed with.

        The first check is a walk. Where checks repeat, further ones are as fast as `matches`, and do not see a tensor
        that is the same object at the same address in another form. What differs in its containers and in no tensor is
        accepted, and compiled anew, at most 8 times.

        Args:
            roots: As for `of`, with the values of this replay.
            what: The graph, for the message.
            may_grow: Accept tensors that were not there at capture: no graph can depend on them.
            walk_again: Walk even where the fast check passes, see Note [Cost of a check].

        Raises:
            AddressError: tensors are missing, added, changed or reshaped; names them.
        """
        holds = self.still_holds(roots)
        if holds and not walk_again:
            return
        walk = Walk(self._device)
        top = walk.run(roots)
        difference = self._difference(top)
        if may_grow:
            self._ignored |= frozenset(difference.added)  # they may move as they like
            difference = replace(difference, added=())
        if difference:
            raise AddressError(_message(what, difference, self._count), remedy=_remedy(difference))
        if not holds and self._rebinds <= _MAX_REBINDS:
            self._rebinds += 1
            if self._ignored:
                keep_known(self._top, top)
            self._top, self._count, self._addresses = top, _count(top), None
            if self._repeats:
                tensors = [tensor for tensor, _ in walk.tensors.values()]
                self._check = compile_check(top, self._device, tensors, walk.modules(), may_grow=may_grow)

    def _forget_freed(self) -> None:
        """Let memory that is not there any more be at no address."""
        for entry in (entry for node in nodes_of(self._top) for entry in node.entries):
            child = entry.child
            if isinstance(child, Leaf) and child.number in self._memory and self._memory[child.number].expired():
                entry.child = replace(child, address=_FREED)

    def _difference(self, top: Node) -> AddressDifference:
        return difference_of(self._top, top, self._ignored)


def _passes(check: Check, roots: Mapping[str, Any]) -> bool:
    try:
        return check(roots)
    except Exception:
        return False


def _visit(top: Node) -> Iterator[tuple[Path, Leaf | Node]]:
    """Path and child of all tensors and containers in the order of the walk; links are not followed."""
    stack: list[tuple[Path, Entry]] = [(None, entry) for entry in reversed(list(top.entries))]
    while stack:
        above, entry = stack.pop()
        path, child = (above, entry.step), entry.child
        if isinstance(child, Leaf | Node):
            yield path, child
        if isinstance(child, Node) and not entry.is_link:
            stack += [(path, inner) for inner in reversed(list(child.entries))]


def _count(top: Node) -> int:
    """The number of tensors, each counted once."""
    return len({e.child.number for node in nodes_of(top) for e in node.entries if isinstance(e.child, Leaf)})


def _form(form: Form) -> str:
    dtype, shape, stride, is_conj, is_neg = form
    bits = f"{', conjugated' if is_conj else ''}{', negated' if is_neg else ''}"
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} with strides {list(stride)}{bits}"


def _remedy(difference: AddressDifference) -> str:
    moved = sorted({int(found[1]) for path in difference.paths if (found := _ARGUMENT.fullmatch(path))})
    if not moved:
        return _REMEDY
    positions = f"({moved[0]},)" if len(moved) == 1 else str(tuple(moved))
    return (
        f"{_REMEDY} Where it is an argument of a CUDAGraphWrapper that eager code makes anew on each call, "
        f"options=CUDAGraphOptions(copied_arguments={positions}) copies it to where the graph reads it."
    )


def _message(what: str, difference: AddressDifference, count: int) -> str:
    kinds = {
        "changed": [f"{path}: {old:#x} at capture, {new:#x} now" for path, old, new in difference.changed],
        "reshaped": [f"{path}: {_form(old)} at capture, {_form(new)} now" for path, old, new in difference.reshaped],
        "missing": list(difference.missing),
        "added": list(difference.added),
    }
    counts = ", ".join(f"{len(lines)} {kind}" for kind, lines in kinds.items() if lines or kind != "reshaped")
    moved = (
        "do not lie where they lay" if any((*kinds["changed"], *kinds["missing"], *kinds["added"])) else "were others"
    )
    shown = [f"{what} was captured with {count} tensors that {moved}: {counts}"]
    for kind, lines in kinds.items():
        shown += [f"  {kind:<7}  {line}" for line in lines[:_SHOWN]]
        if len(lines) > _SHOWN:
            shown.append(f"  and {len(lines) - _SHOWN} more {kind}")
    return "\n".join(shown)
