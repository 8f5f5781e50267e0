"""State that a forward reads and then binds anew: a graph would go on with the values of its capture.

Note [Rebound state]
    ``self.cache = self.cache + x`` makes a new tensor on each call. A graph reads the one that was there when it was
    captured, always; ``self.step += 1`` is not run by a replay at all. Both are silent. So the attributes that a
    capture has changed are looked for, which costs a walk over the model; only if there are any, the forward runs once
    more, eagerly, and it is watched which of them operators read. A result that is only kept (``self.last = y``) is no
    matter, and what eager pieces do to state is none either: they run on each replay. A tuple cannot change, but an
    attribute can hold another one (``self.past = ((key, value),)``), and another dict or object likewise: then what was
    in the former is looked for, unless it is at the same place in the new one. A number is known to be read if it
    changes on each run, and the numbers that operators are given differ from run to run; else the report warns of it.

    Not seen: state in globals and closures, inside objects of C extensions, tensors that are read by kernels which do
    not pass PyTorch's dispatcher, what a forward does for some sizes only (the first key of each mode is looked at),
    and state that is None until the capture (there is none with a warm-up).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MemberDescriptorType, NoneType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from cgplan.backends.host_sync import Onlooker
from cgplan.errors import CaptureError
from cgplan.graphs.address_layout import SCALARS, Layout

_OWN = frozenset(vars(torch.nn.Module()))  # what torch itself keeps in each module
_CHILDREN = ("_parameters", "_buffers", "_modules")
_NUMBERS = frozenset({bool, int, float, complex})
_VALUES = _NUMBERS | {NoneType}
_MOST = 100_000  # objects that are looked at
_LONGEST = 10_000  # items of a list or dict that is looked into
Place = tuple[int, Any]  # id of the container, key


class StateSnapshot:
    """The tensors, numbers and containers in a model's attributes, lists and the like, as they are now, all held.

    Args:
        model: A module, or any object with attributes.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._found: dict[Place, tuple[Any, str, Any]] = {}
        seen: set[int] = set()
        kinds: dict[type, bool] = {}
        todo: list[tuple[Any, str]] = [(model, "")]
        while todo and len(seen) < _MOST and len(self._found) < _MOST:
            value, path = todo.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            for container, key, step, item in _items(value, path):
                kind = type(item)
                if kind not in kinds:
                    kinds[kind] = not issubclass(kind, torch.Tensor) and _is_open(kind)
                if kinds[kind]:
                    todo.append((item, step))
                if kinds[kind] or kind in _VALUES or isinstance(item, torch.Tensor):
                    self._found[id(container), key] = (container, step, item)

    def changed(self) -> dict[str, Place]:
        """The places at which something else is now, by path."""
        return {
            path: place
            for place, (container, path, before) in self._found.items()
            if not _is_same(before, self.value(place))
        }

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that were there."""
        return [item for _, _, item in self._found.values() if isinstance(item, torch.Tensor)]

    def value(self, place: Place) -> Any:
        """What is at a place now; None if nothing is."""
        container = self._found[place][0]
        with suppress(LookupError):
            return container[place[1]]
        return None

    def before(self, place: Place) -> Any:
        """What was there."""
        return self._found[place][2]

    def put(self, place: Place, value: Any) -> None:
        """Put something there."""
        with suppress(LookupError):
            self._found[place][0][place[1]] = value

    def lost(self, places: Iterable[Place]) -> dict[str, torch.Tensor]:
        """Tensors, by path, that were there, in containers or by themselves, and are not there any more."""
        bound, inside = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for path, before, place in ((*self._found[place][1:], place) for place in places):
            if isinstance(before, torch.Tensor):
                bound[path] = before
                continue
            now = dict(_leaves(self.value(place), path))
            inside |= {p: t for p, t in _leaves(before, path) if isinstance(t, torch.Tensor) and now.get(p) is not t}
        if inside:  # what the model has in another place, too, and had there before, is not state that went
            others = StateSnapshot(self._model)._found
            stay = {id(item) for at, (_, _, item) in others.items() if at in self._found and item is self.before(at)}
            inside = {p: t for p, t in inside.items() if id(t) not in stay}
        return bound | inside

    def numbers(self, place: Place) -> tuple[str, ...]:
        """The numbers that were there, in a container or by themselves."""
        return _numbers(self.before(place))

    def numbers_now(self, place: Place) -> tuple[str, ...]:
        """The numbers that are there now."""
        return _numbers(self.value(place))

    def put_back(self, places: Iterable[Place]) -> None:
        """Make it as it was, at these places."""
        for place in places:
            self.put(place, self.before(place))


class _Slots:
    """The slots of an object, read and written as items of a dict."""

    def __init__(self, owner: object) -> None:
        kinds = reversed(type(owner).__mro__)
        found = {n: m for kind in kinds if "__slots__" in vars(kind) for n, m in vars(kind).items()}
        self.members = {n: m for n, m in found.items() if isinstance(m, MemberDescriptorType)}
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        try:
            return self.members[name].__get__(self._owner)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self.members[name].__set__(self._owner, value)  # of frozen dataclasses, too


def _items(value: Any, path: str) -> Iterator[tuple[Any, Any, str, Any]]:
    """(container, key, path, item) of a module, dict, list, tuple, deque or object."""
    if isinstance(value, dict | list | tuple | deque) and len(value) > _LONGEST:  # a vocabulary, say
        return
    if isinstance(value, dict):
        yield from ((value, key, f"{path}[{key!r:.40}]", item) for key, item in list(dict.items(value)))
        return
    if isinstance(value, list | tuple | deque):
        yield from ((value, index, f"{path}[{index}]", item) for index, item in enumerate(list(value)))
        return
    dot = f"{path}." if path else ""
    attributes = getattr(value, "__dict__", None)
    is_module = isinstance(value, torch.nn.Module)
    for name, item in list(attributes.items()) if isinstance(attributes, dict) else ():
        if is_module and name in _CHILDREN and isinstance(item, dict):
            yield from ((item, key, f"{dot}{key}", inner) for key, inner in list(item.items()))
        elif not (is_module and name in _OWN):
            yield attributes, name, f"{dot}{name}", item
    if not is_module:
        slots = _Slots(value)
        for name in slots.members:
            with suppress(KeyError):
                yield slots, name, f"{dot}{name}", slots[name]


def _is_open(kind: type) -> bool:
    """Whether what is inside of such an object is looked at."""
    return kind not in SCALARS and (issubclass(kind, torch.nn.Module | dict | list) or not Layout.of(kind).closed)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The tensors and numbers in a container, or the value itself, by path."""
    seen: set[int] = set()
    todo: list[tuple[Any, str]] = [(value, path)]
    while todo and len(seen) < _MOST:
        inner, at = todo.pop()
        if isinstance(inner, torch.Tensor) or type(inner) in _NUMBERS:
            yield at, inner
        elif _is_open(type(inner)) and id(inner) not in seen:
            seen.add(id(inner))
            todo += [(item, step) for _, _, step, item in _items(inner, at)]


def _numbers(value: Any) -> tuple[str, ...]:
    return tuple(f"{path}={leaf!r}" for path, leaf in _leaves(value, "") if type(leaf) in _NUMBERS)


def _is_same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if type(before) not in _NUMBERS or type(before) is not type(now):
        return False
    return bool(before == now or before != before)


class _Reads(Onlooker):
    """What operators are given: the tensors among some that they read, and all numbers in order.

    Args:
        tensors: Those to look for, by name.
        numbers: Tells those of the model's state that may change.

    Attributes:
        moved: Which of the latter changed, but not in eager pieces.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], numbers: Callable[[], Mapping[str, tuple[str, ...]]]
    ) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._now, self._last = numbers, numbers()
        self.moved: set[str] = set()
        self.read: list[str] = []
        self.numbers: list[object] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Note the arguments, and run."""
        for leaf in tree_leaves((args, kwargs)):
            if not isinstance(leaf, torch.Tensor):
                self.numbers.append(repr(leaf) if type(leaf) in SCALARS else type(leaf))
            elif id(leaf) in self._names:
                self.read.append(self._names[id(leaf)])
            elif leaf.device.type == "cpu" and leaf.dim() == 0 and func is torch.ops.aten.lift_fresh.default:
                self.numbers.append(leaf.item())
        return func(*args, **(kwargs or {}))

    def run_aside(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an eager piece. State that it returns is read by it, and for graphs there is a copy."""

        def apart(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            return tree_map_only(torch.Tensor, lambda t: t.detach() if id(t) in self._names else t, result)

        self.note_moved()
        result = super().run_aside(apart, args, kwargs)
        self._last = self._now()
        return result

    def note_moved(self) -> None:
        """Note what changed since an eager piece ended, or all began."""
        now = self._now()
        self.moved |= {path for path, value in now.items() if value != self._last[path]}


def check_rebound(snapshot: StateSnapshot, run: Callable[[], object], inputs: Sequence[torch.Tensor]) -> list[str]:
    """What a report should say of state that a capture has changed; ``run`` runs the forward eagerly.

    The state is put back where anything is wrong, and after each run.

    Args:
        snapshot: Made before the capture.
        run: The same forward, on the same inputs.
        inputs: What the forward is given: it may keep that.

    Returns:
        Warnings.

    Raises:
        CaptureError: operators read state that the forward binds anew; names the attributes.
    """
    changed = snapshot.changed()
    given = {id(tensor) for tensor in inputs}
    tensors = {path: t for path, t in snapshot.lost(changed.values()).items() if id(t) not in given}
    numbers = {
        path: place
        for path, place in changed.items()
        if (before := snapshot.numbers(place)) and before != snapshot.numbers_now(place)
    }
    if not tensors and not numbers:
        return []
    after = {place: snapshot.value(place) for place in changed.values()}
    snapshot.put_back(changed.values())
    looks = []
    for _ in range(2 if numbers else 1):
        look = _Reads(tensors, lambda: {path: snapshot.numbers_now(place) for path, place in numbers.items()})
        with suppress(Exception), look:  # a forward that fails has been reported already, or will be
            run()
        look.note_moved()
        looks.append(look)
    read = sorted(set(looks[0].read), key=list(tensors).index)
    moved = [path for path in numbers if path in looks[0].moved]
    frozen = [path for path in moved if path in looks[-1].moved] if looks[0].numbers != looks[-1].numbers else []
    if read or frozen:
        snapshot.put_back(changed.values())
        names = ", ".join((*read, *frozen)[:5])
        raise CaptureError(
            f"the forward reads {names} and binds it anew on each call; a graph would always read what was there at "
            "capture",
            remedy="Write in place (self.cache.add_(x), a one-element tensor for a counter), pass it as an input, or "
            "do it outside of the forward.",
        )
    for place, value in after.items():
        snapshot.put(place, value)
    return [f"the forward changes {', '.join(moved[:5])}; replays do not, nor do they see it change"] if moved else []


__all__ = ["StateSnapshot", "check_rebound"]
