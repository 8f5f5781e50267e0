"""Which graphs of a configuration a set of costs has no figures of, and what they are priced as instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cgplan.config import Config
from cgplan.modes import CUDAGraphMode
from cgplan.planning.building import lora_cases
from cgplan.planning.resolution import resolve_mode

CAPTURED_MODES = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)


def stand_in_notes(config: Config, priced: Iterable[tuple[CUDAGraphMode, bool]]) -> Iterator[str]:
    """A note for each kind of graph that has no figures of its own: nothing is priced at nothing.

    Args:
        config: What is planned for: its mode says which graphs there may be, its `lora` for which adapters.
        priced: (mode, has_lora) of what there are figures of.

    Raises:
        ModeError: as ``resolve_mode`` does.
    """
    known = set(priced)
    modes = [mode for mode in CAPTURED_MODES if resolve_mode(config)[0].has_mode(mode)]
    others = " and ".join(str(mode) for mode in CAPTURED_MODES if any(found is mode for found, _ in known))
    for mode in modes if known else ():
        if not any(found is mode for found, _ in known):
            yield f"there are no figures of {mode} graphs: they are priced as {others} ones of the same size"
            continue
        for has_lora in sorted({case > 0 for case in lora_cases(config)}):
            if (mode, has_lora) not in known:
                which, instead = ("with", "without") if has_lora else ("without", "with")
                yield f"there are no figures of {mode} graphs {which} adapters: they are priced as those {instead}"


__all__ = ["CAPTURED_MODES", "stand_in_notes"]
