"""How a model gets its PIECEWISE segments: traced and split, broken at modules, or wrapped by its
author.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from cgplan.backends import GraphBackend
from cgplan.backends.host_sync import Function
from cgplan.config import CompilationConfig, Config
from cgplan.errors import ConfigError
from cgplan.graphs.footprint import Part, no_operators
from cgplan.graphs.wrapper import CUDAGraphOptions
from cgplan.modes import CUDAGraphMode
from cgplan.piecewise.backend import PiecewiseBackend
from cgplan.piecewise.breakable import BreakableCUDAGraphCapture, BreakableCUDAGraphWrapper
from cgplan.piecewise.breaks import Breaks
from cgplan.piecewise.split import Piece, refuse_unknown_ops
from cgplan.piecewise.trace import PiecewiseModel
from cgplan.planning import Plan
from cgplan.reports.records import SplitRecord
from cgplan.units import listed

_MOST_STATIC = 4  # sizes, where a plan's traffic says which


@dataclass(slots=True, eq=False)
class SplitRoute:
    """A model made ready for capture.

    Attributes:
        name: ``ops``, ``modules``, ``wrappers``, or ``full`` where there are no segments.
        forward: What PIECEWISE keys run: the model, or a wrapper around it.
        whole: What FULL keys capture, and warm up with.
        warm: What PIECEWISE keys warm up with.
        splitter: The torch.compile backend that splits the model, where it is traced.
        breaks: Where it breaks, where it is not.
        operators: What a look at a model that is not traced saw, by part.
    """

    name: str
    forward: Function
    whole: Function
    warm: Function
    splitter: PiecewiseBackend | None = None
    breaks: Breaks | None = field(default=None, repr=False)
    operators: Mapping[Part, Counter[str]] | None = None

    @property
    def pieces(self) -> Sequence[Piece]:
        """The parts of a traced model, once it is traced; empty otherwise."""
        return self.splitter.pieces[0] if self.splitter and self.splitter.pieces else ()

    @property
    def chain(self) -> BreakableCUDAGraphWrapper | None:
        """The wrapper whose captures are whole forwards; None where the model's own code runs
        between graphs.
        """
        is_partitioned = self.splitter is not None and self.splitter.partition
        is_chain = isinstance(self.forward, BreakableCUDAGraphWrapper) and self.name in (
            "ops",
            "modules",
        )
        return self.forward if is_chain and not is_partitioned else None  # type: ignore[return-value]

    def describe(self) -> SplitRecord | None:
        """What ends up where, as far as that is known by now; None where nothing is split."""
        if self.name == "full":
            return None
        seen = self.operators or no_operators()
        # then modules and functions are what is eager, and hold operators
        by_name = self.name == "modules"
        captured = Counter(seen["segment"])
        eager = Counter[str]() if by_name else Counter(seen["eager piece"])
        for piece in self.pieces:
            side = eager if piece.eager else captured
            side.update(name for name in piece.operators if not name.startswith("python::get"))
        if by_name and (capture := next(iter(self._captures), None)):
            eager.update(piece.name for piece in capture.eager_pieces)
        elif self.breaks:
            eager.update(self.breaks.outer)
        kinds = [piece.eager for piece in self.pieces]
        return SplitRecord(
            route=self.name,
            segments=kinds.count(False) if kinds else None,
            eager_pieces=kinds.count(True) if kinds else None,
            captured=dict(captured.most_common()),
            eager=dict(eager.most_common()),
            eager_operators=dict(seen["eager piece"].most_common()) if by_name else {},
        )

    @property
    def _captures(self) -> Sequence[BreakableCUDAGraphCapture]:
        return [entry.graph for entry in self.chain.entries.values()] if self.chain else []

    def warnings(self) -> list[str]:
        """What the user should know about the split, once keys are captured."""
        found = []
        if isinstance(self.forward, PiecewiseModel) and self.forward.over_budget:
            sizes = ", ".join(map(str, self.forward.over_budget))
            found += [
                f"budget.compile_time pays for no more traces of one size: {sizes} tokens share "
                "one (one row may not)"
            ]
        if self.pieces and self.name == "ops" and not any(piece.eager for piece in self.pieces):
            found += [
                "no operator of the model is a splitting op: PIECEWISE graphs are the whole forward"
            ]
        if self.name != "modules" or not self._captures:
            return found
        run = {piece.name for capture in self._captures for piece in capture.eager_pieces}
        if not run:
            return [
                "nothing broke the capture: no module of splitting_modules, no operator of "
                "splitting_ops and no "
                "function under eager_break_during_capture was called, so PIECEWISE graphs are "
                "the whole forward"
            ]
        numbers = ", ".join(self.breaks.numbers) if self.breaks else ""
        told = (
            [f"numbers that are arguments of {numbers} stay those of the capture"]
            if numbers
            else []
        )
        names = self.breaks.modules if self.breaks else ()
        idle = [
            n for n in names if n not in run and not any(n.startswith(f"{outer}.") for outer in run)
        ]
        return told + [
            f"modules that splitting_modules names were never called: {listed(idle, 5)}"
        ] * bool(idle)


def choose_route(
    plan: Plan,
    config: Config,
    model: Function,
    backend: GraphBackend,
    calls_breaks: Callable[[], bool],
) -> SplitRoute:
    """The route that the configuration asks for; without PIECEWISE keys nothing is traced or split.

    ``calls_breaks`` says whether the model calls functions under ``eager_break_during_capture``; it
    may run the model.

    Raises ConfigError where the route does not fit the model, ModelError for a model that
    compile_piecewise made.
    """
    compilation = config.compilation
    piecewise = any(mode is CUDAGraphMode.PIECEWISE for mode, _ in plan.keys)
    name = compilation.piecewise
    if name == "auto":
        by_ops = compilation.splitting_ops is not None or not piecewise
        name = (
            "modules" if compilation.splitting_modules or (not by_ops and calls_breaks()) else "ops"
        )
    if compilation.compiler == "inductor" and piecewise and name != "ops":
        raise ConfigError(
            f"compiler: inductor compiles traced segments, but the segments come from {name}",
            remedy="Use piecewise: ops with inductor, or compiler: eager.",
        )
    # a trace or look comes on demand
    if piecewise and name != "wrappers" and compilation.capture_policy == "lazy":
        refuse_unknown_ops(compilation.splitting_ops)
    if compilation.compiler == "inductor" or (piecewise and name == "ops"):
        if not piecewise:  # inductor may fuse across the whole forward
            whole_forward = {"splitting_ops": (), "use_inductor_graph_partition": False}
            config = config.model_copy(
                update={"compilation": compilation.model_copy(update=whole_forward)}
            )
        split = PiecewiseModel(model, config, backend, _static_sizes(plan, compilation))
        whole = split.traced if compilation.compiler == "inductor" else model
        return SplitRoute(
            "ops" if piecewise else "full", split, whole, split.traced, splitter=split.splitter
        )
    if not piecewise or name == "wrappers":
        return SplitRoute("wrappers" if piecewise else "full", model, model, model)
    breaks = Breaks(
        model, compilation.splitting_modules, compilation.splitting_ops or (), backend.device.type
    )
    options = CUDAGraphOptions(address_check=compilation.address_policy)
    # (a partial, in which the walk over the model finds it)
    wrapper = BreakableCUDAGraphWrapper(
        partial(breaks.forward, model), backend=backend, options=options
    )
    return SplitRoute("modules", wrapper, model, model, breaks=breaks)


def _static_sizes(plan: Plan, compilation: CompilationConfig) -> set[int]:
    """Sizes in tokens that have a trace of their own, see ``compilation.compile_shapes``."""
    sizes = {descriptor.num_tokens for _, descriptor in plan.keys}
    if compilation.compile_shapes == "static":
        return sizes
    if compilation.compile_shapes == "dynamic" or compilation.compiler == "eager" or not sizes:
        return set()
    steps = Counter[int]()
    for use in (plan.evidence or {}).get("uses", ()):
        if use["size"] in sizes:
            steps[use["size"]] += use["share"]
    return {size for size, _ in steps.most_common(_MOST_STATIC)} or {min(sizes), max(sizes)}
