"""How a model gets its PIECEWISE segments: traced and split, broken at modules, or wrapped by its author."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cgplan.config import Config
from cgplan.errors import ConfigError
from cgplan.graphs import GraphBackend
from cgplan.modes import CUDAGraphMode
from cgplan.planning import Plan
from cgplan.reports.records import SplitRecord
from cgplan.runtime.breakable_models import BreakableCUDAGraphWrapper, ModuleBreaks, break_at_modules
from cgplan.runtime.piecewise import PiecewiseBackend, compile_piecewise
from cgplan.runtime.splitting import Piece
from cgplan.runtime.wrapper import CUDAGraphOptions


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SplitRoute:
    """A model made ready for capture. Its breaks go when it is removed, or dropped.

    Attributes:
        name: ``ops``, ``modules``, ``wrappers``, or ``full`` where there are no segments.
        forward: What is called: the model, or what stands for it.
        splitter: The torch.compile backend that splits it, where it is traced.
        breaks: The modules that it breaks at, where it is not.
    """

    name: str
    forward: Callable[..., Any]
    splitter: PiecewiseBackend | None = None
    breaks: ModuleBreaks | None = field(default=None, repr=False)

    @property
    def pieces(self) -> Sequence[Piece]:
        """The parts of a traced model, once it is traced; empty otherwise."""
        return self.splitter.pieces[0] if self.splitter and self.splitter.pieces else ()

    def describe(self) -> SplitRecord | None:
        """What ends up where; None where nothing is split."""
        if self.name == "full":
            return None
        sides = {eager: Counter[str]() for eager in (False, True)}
        for piece in self.pieces:
            sides[piece.eager].update(name for name in piece.operators if not name.startswith("python::get"))
        if self.breaks is not None:
            sides[True].update(self.breaks.names)
        kinds = [piece.eager for piece in self.pieces]
        return SplitRecord(
            route=self.name,
            segments=kinds.count(False) if kinds else None,
            eager_pieces=kinds.count(True) if kinds else None,
            captured=dict(sides[False].most_common()),
            eager=dict(sides[True].most_common()),
        )

    def remove(self) -> None:
        """Give the model back as it was."""
        if self.breaks is not None:
            self.breaks.remove()


def choose_route(plan: Plan, config: Config, model: Callable[..., Any], backend: GraphBackend) -> SplitRoute:
    """The way that the configuration asks for. Raises ConfigError where it does not fit the model.

    A plan without PIECEWISE keys needs no segments, whatever its mode: nothing is traced, and mixed batches run the
    model itself.
    """
    compilation = config.compilation
    piecewise = any(mode is CUDAGraphMode.PIECEWISE for mode, _ in plan.keys)
    name = compilation.piecewise
    if name == "auto":
        name = "modules" if compilation.splitting_modules else "ops"
    if compilation.compiler == "inductor" and piecewise and name != "ops":
        raise ConfigError(
            f"compiler: inductor compiles traced segments, but the segments come from {name}",
            remedy="Use piecewise: ops with inductor, or compiler: eager.",
        )
    if compilation.compiler == "inductor" or (piecewise and name == "ops"):
        compiled = compile_piecewise(model, config, backend=backend, max_tokens=plan.max_capture_size)
        return SplitRoute("ops" if piecewise else "full", compiled, splitter=compiled.backend)
    if not piecewise or name == "wrappers":
        return SplitRoute("wrappers" if piecewise else "full", model)
    breaks: ModuleBreaks | None = None
    if compilation.splitting_modules:
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                "compilation.splitting_modules needs an nn.Module",
                remedy="Put eager_break_during_capture on functions.",
            )
        breaks = break_at_modules(model, compilation.splitting_modules)
    options = CUDAGraphOptions(address_check=compilation.address_policy)
    route = SplitRoute("modules", BreakableCUDAGraphWrapper(model, backend=backend, options=options), breaks=breaks)
    if breaks is not None:
        breaks.remove_after(route)  # of a runner that nobody closed
    return route
