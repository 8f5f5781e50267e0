"""Which keys run ahead of their captures.

Note [Captures without a warm-up]
    A capture computes nothing before its first replay, and graphs of a pool write over each other's
    memory. So a capture without a warm-up stands only if it left nothing that others might read: no
    change of Python, no memory of the pool, no compilation. Models that change Python in each run,
    or hold compiled code, have a warm-up for each key. A compilation alone: the key is
    captured again, after a warm-up. Else all keys are captured again with warm-ups, in a new pool:
    what the model keeps has been replayed once, and lies where no graph writes. A failed capture
    cannot be replayed, so the smallest key of a lane is run ahead of all captures: a model that
    keeps something for each size shows it there.
"""

from __future__ import annotations

from typing import Literal

from cgplan.modes import Key
from cgplan.planning.plan import Lane

ANEW = "Make the model anew, and set compilation.cudagraph_num_of_warmups: 1."


class WarmUps:
    """Numbers of warm-ups.

    Args:
        asked: Runs of each key; ``auto``: of the first one of a lane.

    Attributes:
        may_skip: Keys may do without; all graphs can be freed for a new start.
        starts_again: The last key asks for that start.
    """

    def __init__(
        self,
        asked: int | Literal["auto"],
        *,
        may_skip: bool,
    ) -> None:
        self._asked = asked
        self.may_skip = may_skip and asked in ("auto", 0)
        self.starts_again = False
        self._keys = set[Key]()  # that need one
        self._lanes = set[Lane]()  # that had one

    def of(
        self,
        key: Key,
        *,
        may_skip: bool,
    ) -> int:
        asked = self._asked
        if asked != "auto" and asked > 0:
            return asked
        if not (self.may_skip and may_skip) or key in self._keys:
            return 1
        return int(asked == "auto" and Lane.of(*key) not in self._lanes)

    def note_run(self, key: Key) -> bool:
        """Whether the smallest key of its lane has to run, too."""
        lane = Lane.of(*key)
        is_new = lane not in self._lanes
        self._lanes.add(lane)
        return is_new and self.may_skip

    def add(
        self,
        key: Key,
        *,
        is_lasting: bool,
    ) -> None:
        """``key`` needs one; if that is lasting, all do, and captures start again."""
        self._keys.add(key)
        if is_lasting:
            self.may_skip = False
            self.starts_again = True
