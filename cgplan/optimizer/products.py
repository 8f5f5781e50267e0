"""Graphs shared out: tables by number of graphs, put together (min-plus products) and taken apart again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cgplan.optimizer.paths import Floats


def product(tables: Sequence[Floats], shape: tuple[int, ...]) -> Floats:
    """The least sum of entries of several tables [boxes, K + 1, ...] whose numbers of graphs add up to at most k."""
    total = np.zeros(shape)
    for number, table in enumerate(tables):
        if number == 0:
            total = np.broadcast_to(table, shape)
            continue
        before, total = total, np.full(shape, np.inf)
        for graphs in range(shape[1]):
            np.minimum(
                total[:, graphs:], before[:, graphs, None] + table[:, : shape[1] - graphs], out=total[:, graphs:]
            )
    return total


def shares(curves: Sequence[Floats], graphs: int) -> list[int]:
    """How the best sum of [K + 1] curves shares out at most so many graphs; as few as give the same."""
    sums = [np.zeros(graphs + 1)]
    for curve in curves:
        sums.append(product([sums[-1][None], curve[None, : graphs + 1]], (1, graphs + 1))[0])
    found: list[int] = []
    for before, curve in zip(reversed(sums[:-1]), reversed(curves), strict=True):
        found.insert(0, int((before[graphs::-1] + curve[: graphs + 1]).argmin()))
        graphs -= found[0]
    return found


__all__ = ["product", "shares"]
