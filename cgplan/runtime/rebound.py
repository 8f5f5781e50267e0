"""State that a forward reads and then binds anew: a graph would go on with the values of its capture.

Note [Rebound state]
    ``self.cache = self.cache + x`` makes a new tensor on each call. A graph reads the one that was there when it was
    captured, always; ``self.step += 1`` is not run by a replay at all. Both are silent. So the attributes that a
    capture has changed are looked for, which costs a walk over the model; only if there are any, the forward runs once
    more, eagerly, and it is watched which of them operators read. A result that is only kept (``self.last = y``) is no
    matter, and what eager pieces do to state is none either: they run on each replay. A number is known to be read if
    the numbers that operators are given differ from run to run; else the report warns of it.

    Not seen: state in globals and closures, inside objects of C extensions, and tensors that are read by kernels which
    do not pass PyTorch's dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from cgplan.errors import CaptureError
from cgplan.graphs.address_layout import SCALARS, Layout
from cgplan.graphs.host_sync import Onlooker

_OWN = frozenset(vars(torch.nn.Module()))  # what torch itself keeps in each module
_CHILDREN = ("_parameters", "_buffers", "_modules")
_NUMBERS = frozenset({int, float, complex})
_MOST = 100_000  # objects that are looked at
_LONGEST = 10_000  # items of a list or dict that is looked into
Place = tuple[int, Any]  # id of the container, key


class StateSnapshot:
    """The tensors and numbers in a model's attributes, lists and dicts, as they are now; it holds all of them.

    Args:
        model: A module, or any object with attributes.
    """

    def __init__(self, model: Any) -> None:
        self._found: dict[Place, tuple[dict[Any, Any] | list[Any], str, Any]] = {}
        seen: set[int] = set()
        layouts: dict[type, bool] = {}
        todo: list[tuple[Any, str]] = [(model, "")]
        while todo and len(seen) < _MOST and len(self._found) < _MOST:
            value, path = todo.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            for container, key, name, item in _items(value):
                step = f"{path}.{name}" if path and not name.startswith("[") else f"{path}{name}"
                kind = type(item)
                if isinstance(item, torch.Tensor) or kind in _NUMBERS:
                    self._found[id(container), key] = (container, step, item)
                elif kind not in layouts and kind not in SCALARS:
                    layouts[kind] = isinstance(item, torch.nn.Module | dict | list) or not Layout.of(kind).closed
                if layouts.get(kind):
                    todo.append((item, step))

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

    def put_back(self, places: Iterable[Place]) -> None:
        """Make it as it was, at these places."""
        for place in places:
            self.put(place, self.before(place))


def _items(value: Any) -> Iterator[tuple[Any, Any, str, Any]]:
    """(container, key, step of the path, item) of a module, dict, list or object."""
    if isinstance(value, dict | list) and len(value) > _LONGEST:  # a vocabulary, say
        return
    if isinstance(value, dict):
        yield from ((value, key, f"[{key!r:.40}]", item) for key, item in list(dict.items(value)))
        return
    if isinstance(value, list):
        yield from ((value, index, f"[{index}]", item) for index, item in enumerate(list(value)))
        return
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict):
        return
    is_module = isinstance(value, torch.nn.Module)
    for name, item in list(attributes.items()):
        if is_module and name in _CHILDREN and isinstance(item, dict):
            yield from ((item, key, str(key), inner) for key, inner in list(item.items()))
        elif not (is_module and name in _OWN):
            yield attributes, name, str(name), item


def _is_same(before: Any, now: Any) -> bool:
    if before is now:
        return True
    if isinstance(before, torch.Tensor) or isinstance(now, torch.Tensor):
        return False
    return type(before) is type(now) and (before == now or before != before)


class _Reads(Onlooker):
    """What operators are given: the tensors among some that they read, and all numbers in order."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in tensors.items()}
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
    tensors = {
        path: value for path, place in changed.items() if isinstance(value := snapshot.before(place), torch.Tensor)
    }
    tensors = {path: tensor for path, tensor in tensors.items() if id(tensor) not in given}
    numbers = [path for path, place in changed.items() if type(snapshot.before(place)) in _NUMBERS]
    if not tensors and not numbers:
        return []
    after = {place: snapshot.value(place) for place in changed.values()}
    snapshot.put_back(changed.values())
    looks = []
    for _ in range(2 if numbers else 1):
        look = _Reads(tensors)
        with suppress(Exception), look:  # a forward that fails has been reported already, or will be
            run()
        looks.append(look)
    read = sorted(set(looks[0].read), key=list(tensors).index)
    frozen = numbers if looks[0].numbers != looks[-1].numbers else []
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
    return (
        [f"the forward changes {', '.join(numbers[:5])}; replays do not, nor do they see it change"] if numbers else []
    )


__all__ = ["StateSnapshot", "check_rebound"]
