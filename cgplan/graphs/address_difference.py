"""How two trees of an address manifest differ, and what of a newer one was known to the older."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cgplan.graphs.address_check import nodes_of
from cgplan.graphs.address_walk import Form, Leaf, Node

Path = tuple["Path", str] | None  # the path of the container, and the last step
_STEP = re.compile(r"[.\[]")  # each step but the root's begins with one of these


@dataclass(frozen=True, slots=True)
class AddressDifference:
    """How a structure differs from what a graph was captured with; falsy if it does not.

    Attributes:
        missing: Paths at which there was a tensor and is none.
        added: Paths at which there is a tensor and was none.
        changed: Path, address at capture and address now (bytes), of tensors that lie elsewhere.
        reshaped: Path, and form at capture and now (see `Form`), of tensors that lie where they lay.
    """

    missing: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    changed: tuple[tuple[str, int, int], ...] = ()
    reshaped: tuple[tuple[str, Form, Form], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.added or self.changed or self.reshaped)

    @property
    def paths(self) -> frozenset[str]:
        """All paths at which something differs."""
        return frozenset((*self.missing, *self.added, *(found[0] for found in (*self.changed, *self.reshaped))))

    def without(self, ignored: frozenset[str]) -> AddressDifference:
        """What differs at other paths."""
        return AddressDifference(
            tuple(path for path in self.missing if path not in ignored),
            tuple(path for path in self.added if path not in ignored),
            tuple(found for found in self.changed if found[0] not in ignored),
            tuple(found for found in self.reshaped if found[0] not in ignored),
        )


def keep_known(old: Node, new: Node) -> None:
    """Take out of the new tree what is not as in the old one, and containers by paths at which there was none.

    Of a container with several names what any one of them knows is kept: a new name, that the walk may have met first,
    takes nothing out.
    """
    known: set[tuple[Node | None, str]] = set()
    for (_, step), before, after, parent in _pairs(old, new):
        if isinstance(after, Leaf):
            is_known = isinstance(before, Leaf) and (before.address, before.form) == (after.address, after.form)
        else:
            is_known = not isinstance(after, Node) or isinstance(before, Node) or after.is_empty
        if is_known:
            known.add((parent, step))
    for node in list(nodes_of(new)):
        for part in node.parts:
            part.entries = [entry for entry in part.entries if (node, entry.step) in known]
    _mark_links(new)


def _mark_links(top: Node) -> None:
    """Find out anew which containers are reached before, by another path."""
    met: set[Node] = set()
    stack = list(reversed(list(top.entries)))
    while stack:
        entry = stack.pop()
        if isinstance(entry.child, Node):
            entry.is_link = entry.child in met
            if not entry.is_link:
                met.add(entry.child)
                stack += reversed(list(entry.child.entries))


def _pairs(
    old: Node, new: Node, ignored: frozenset[str] = frozenset()
) -> Iterator[tuple[tuple[Path, str], Any, Any, Node | None]]:
    """Path, child before, child after and the container after, of two trees walked side by side.

    Each pair of containers is met once, so that cycles end and links are compared too; but by each of the paths below
    which something is ignored, and by another one, so that what is ignored of one name is seen of another.
    """
    above = {path[: found.start()] for path in ignored for found in _STEP.finditer(path)}
    seen: set[tuple[Node | None, Node | None, str | None]] = set()
    stack: list[tuple[Path, Any, Any, Node | None, str | None]] = [(None, old, new, None, "")]
    while stack:
        path, before, after, parent, text = stack.pop()
        if path is not None:
            yield path, before, after, parent
            text = None if text is None or text + path[1] not in above else text + path[1]
        pair = (before if isinstance(before, Node) else None, after if isinstance(after, Node) else None)
        if pair != (None, None) and (*pair, text) not in seen:
            seen.add((*pair, text))
            inner = reversed(_children(*pair).items())
            stack += [((path, step), *sides, pair[1], text) for step, sides in inner]


def difference_of(old: Node, new: Node, ignored: frozenset[str] = frozenset()) -> AddressDifference:
    """What differs between two trees, but for the paths that are ignored."""
    missing: list[str] = []
    added: list[str] = []
    changed: list[tuple[str, int, int]] = []
    reshaped: list[tuple[str, Form, Form]] = []
    for path, before, after, _ in _pairs(old, new, ignored):
        if isinstance(before, Leaf) and isinstance(after, Leaf):
            if before.address != after.address:
                changed.append((text_of(path), before.address, after.address))
            elif before.form != after.form:
                reshaped.append((text_of(path), before.form, after.form))
        elif isinstance(before, Leaf):
            missing.append(text_of(path))
        elif isinstance(after, Leaf):
            added.append(text_of(path))
    found = AddressDifference(tuple(missing), tuple(added), tuple(changed), tuple(reshaped))
    return found.without(ignored) if ignored else found


def _children(before: Node | None, after: Node | None) -> dict[str, tuple[Any, Any]]:
    """The children of two containers by their steps."""
    old = {entry.step: entry.child for entry in before.entries} if before else {}
    new = {entry.step: entry.child for entry in after.entries} if after else {}
    return {step: (old.get(step), new.get(step)) for step in (*old, *(step for step in new if step not in old))}


def text_of(path: Path) -> str:
    """A path in words, see Note [Address paths]."""
    steps = []
    while path is not None:
        path, step = path
        steps.append(step)
    return "".join(reversed(steps))
