"""Paths that were found before: searches with other limits ask for the same ones again, for more graphs or fewer."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from cgplan.optimizer.paths import Paths

MOST_BYTES = 1 << 28


class Solved:
    """Remembers the paths of single sets of weights, those that were asked for last, within ``most_bytes``."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._nbytes = 0
        self._paths: dict[Hashable, Paths] = {}  # the one that was asked for last stands last

    def paths(
        self, names: Sequence[Hashable], graphs: int, solve: Callable[[list[int], Paths | None], Paths]
    ) -> list[Paths]:
        """The paths of each name, for ``graphs`` graphs.

        Args:
            names: What tells sets of weights, times and prices apart.
            graphs: K.
            solve: Called with the numbers of those names that have to be solved, and their paths for fewer graphs
                where these are known; returns the paths of all of them.
        """
        found = [self._paths.pop(name, None) for name in names]
        self._nbytes -= sum(_nbytes(paths) for paths in found if paths is not None)
        missing: dict[int, list[int]] = {}
        for number, paths in enumerate(found):
            if paths is None or paths.graphs < graphs:
                missing.setdefault(-1 if paths is None else paths.graphs, []).append(number)
        for known, numbers in missing.items():
            solved = solve(numbers, None if known < 0 else _together([found[number] for number in numbers]))
            for at, number in enumerate(numbers):
                found[number] = Paths(solved.cost[:, at : at + 1].copy(), solved.parent[:, at : at + 1].copy())
        whole = [paths for paths in found if paths is not None]
        self._paths |= zip(names, whole, strict=True)
        self._nbytes += sum(map(_nbytes, whole))
        while self._nbytes > self._most_bytes and self._paths:
            self._nbytes -= _nbytes(self._paths.pop(next(iter(self._paths))))
        return [paths.up_to(graphs) for paths in whole]


def _nbytes(paths: Paths) -> int:
    return paths.cost.nbytes + paths.parent.nbytes


def _together(several: Sequence[Paths | None]) -> Paths:
    each = [paths for paths in several if paths is not None]
    return Paths(np.concatenate([p.cost for p in each], axis=1), np.concatenate([p.parent for p in each], axis=1))


__all__ = ["Solved"]
