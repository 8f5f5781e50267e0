"""Which graphs of a configuration a set of costs has no figures of, and what they are priced as instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cgplan.config import Config
from cgplan.modes import CUDAGraphMode
from cgplan.planning.building import lora_cases
from cgplan.planning.resolution import resolve_mode

_CAPTURED = (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)


def stand_in_notes(config: Config, priced: Iterable[tuple[CUDAGraphMode, bool]]) -> Iterator[str]:
    """A note for each kind of graph that has no figures of its own: nothing is priced at nothing.

    Args:
        config: What is planned for: its mode says which graphs there may be, its `lora` for which adapters.
        priced: (mode, has_lora) of what there are figures of.

    Raises:
        ModeError: as ``resolve_mode`` does.
    """
    known = set(priced)
    measured = [mode for mode in _CAPTURED if any(found is mode for found, _ in known)]
    mode_of_plan, _ = resolve_mode(config)
    for mode in filter(mode_of_plan.has_mode, _CAPTURED if known else ()):
        if mode not in measured:
            others = " and ".join(map(str, measured))
            yield f"there are no figures of {mode} graphs: they are priced as {others} ones of the same size"
            continue
        for has_lora in sorted({case > 0 for case in lora_cases(config)}):
            if (mode, has_lora) not in known:
                which, instead = ("with", "without") if has_lora else ("without", "with")
                yield f"there are no figures of {mode} graphs {which} adapters: they are priced as those {instead}"


__all__ = ["stand_in_notes"]
