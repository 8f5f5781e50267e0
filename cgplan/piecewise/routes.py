"""How a model gets its PIECEWISE segments."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from cgplan.backends import GraphBackend
from cgplan.backends.host_sync import Function
from cgplan.config import CompilationConfig, Config
from cgplan.errors import ConfigError
from cgplan.graphs.footprint import Part
from cgplan.graphs.wrapper import CUDAGraphOptions
from cgplan.modes import CUDAGraphMode
from cgplan.piecewise.breakable import BreakableCUDAGraphCapture, BreakableCUDAGraphWrapper, Breaks
from cgplan.piecewise.trace import Piece, PiecewiseBackend, PiecewiseModel, refuse_unknown_ops
from cgplan.planning import Plan
from cgplan.planning.plan import DEFAULT_SPLITTING_OPS
from cgplan.reports.records import SplitRecord
from cgplan.units import listed

_MOST_STATIC = 4


@dataclass(eq=False)
class SplitRoute:
    """A model made ready for capture.

    Attributes:
        name: ``ops``, ``modules``, ``wrappers``, or ``full`` without segments.
        forward: For PIECEWISE keys.
        whole: For FULL keys.
        warm: For warm-ups of PIECEWISE keys.
        chain: ``forward``, if its captures are whole forwards.
        operators: Seen by a look, by part; without a trace.
    """

    name: str
    forward: Function
    whole: Function
    warm: Function
    chain: BreakableCUDAGraphWrapper | None = None
    splitter: PiecewiseBackend | None = None
    breaks: Breaks | None = field(default=None, repr=False)
    operators: Mapping[Part, Counter[str]] | None = None
    splitting_ops: Sequence[str] = ()

    @property
    def pieces(self) -> Sequence[Piece]:
        if self.splitter is None or not self.splitter.pieces:
            return ()
        return self.splitter.pieces[0]

    @property
    def _captures(self) -> Sequence[BreakableCUDAGraphCapture]:
        if self.chain is None:
            return []
        return [entry.graph for entry in self.chain.entries.values()]

    def describe(self) -> SplitRecord | None:
        if self.name == "full":
            return None
        seen = self.operators or {}
        captured = Counter(seen.get("segment"))
        eager = Counter(seen.get("eager piece"))
        inside = Counter[str]()
        captures = self._captures
        if self.breaks:
            inside = eager
            eager = Counter(self.breaks.outer)
            if captures:
                eager = Counter(piece.name for piece in captures[0].eager_pieces)
        for piece in self.pieces:
            side = eager if piece.eager else captured
            side.update(name for name in piece.operators if not name.startswith("python::get"))
        kinds = [piece.eager for piece in self.pieces]
        return SplitRecord(
            route=self.name,
            segments=kinds.count(False) if kinds else None,
            eager_pieces=kinds.count(True) if kinds else None,
            captured=dict(captured.most_common()),
            eager=dict(eager.most_common()),
            eager_operators=dict(inside.most_common()),
        )

    def warnings(self) -> list[str]:
        found = []
        pieces = self.pieces
        if self.name == "ops" and pieces and not any(piece.eager for piece in pieces):
            found.append(
                "no operator of the model is a splitting op: PIECEWISE graphs are the whole forward"
            )
        captures = self._captures
        if self.breaks is None or not captures:
            return found
        run = set[str]()
        for capture in captures:
            run.update(piece.name for piece in capture.eager_pieces)
        if not run:
            return [
                "nothing broke the capture: nothing of splitting_modules and splitting_ops and no "
                "function under eager_break_during_capture was called, so PIECEWISE graphs are the "
                "whole forward"
            ]
        if self.breaks.numbers:
            names = ", ".join(self.breaks.numbers)
            found.append(f"numbers that are arguments of {names} stay those of the capture")
        heads = tuple(f"{name}." for name in run)
        idle = [
            name for name in self.breaks.modules if name not in run and not name.startswith(heads)
        ]
        if idle:
            found.append(
                f"modules that splitting_modules names were never called: {listed(idle, 5)}"
            )
        return found


def choose_route(
    plan: Plan,
    config: Config,
    model: Function,
    backend: GraphBackend,
    calls_breaks: Callable[[], bool],
) -> SplitRoute:
    """The configured route. ``calls_breaks`` may run the model to find
    ``eager_break_during_capture``.

    Raises ConfigError where the route does not fit the model, ModelError for a model of
    compile_piecewise.
    """
    compilation = config.compilation
    piecewise = any(mode is CUDAGraphMode.PIECEWISE for mode, _ in plan.keys)
    ops = compilation.splitting_ops
    is_compiled = compilation.compiler == "inductor"
    name = compilation.piecewise
    if name == "auto":
        by_modules = bool(compilation.splitting_modules)
        if piecewise and not by_modules and ops is None:
            by_modules = calls_breaks()
        name = "modules" if by_modules else "ops"
    if is_compiled and piecewise and name != "ops":
        raise ConfigError(
            f"compiler: inductor compiles traced segments, but the segments come from {name}",
            remedy="Use piecewise: ops with inductor, or compiler: eager.",
        )
    # else the first capture finds them
    if piecewise and name != "wrappers" and compilation.is_lazy:
        refuse_unknown_ops(ops)
    if is_compiled or (piecewise and name == "ops"):
        if not piecewise:
            config = config.with_values("compilation", splitting_ops=())
        static = _static_sizes(plan, config.compilation)
        split = PiecewiseModel(model, config, backend, static)
        return SplitRoute(
            name="ops" if piecewise else "full",
            forward=split,
            whole=split.traced if is_compiled else model,
            warm=split.traced,
            chain=split if piecewise else None,
            splitter=split.splitter,
            splitting_ops=DEFAULT_SPLITTING_OPS if ops is None else ops,
        )
    if not piecewise or name == "wrappers":
        return SplitRoute(name if piecewise else "full", model, model, model)
    breaks = Breaks(
        model,
        compilation.splitting_modules,
        ops or (),
        backend.device.type,
    )
    wrapper = BreakableCUDAGraphWrapper(
        partial(breaks.forward, model),  # the walk over the model looks into partials
        backend=backend,
        options=CUDAGraphOptions(address_check=compilation.address_policy),
    )
    return SplitRoute(
        name="modules",
        forward=wrapper,
        whole=model,
        warm=model,
        chain=wrapper,
        breaks=breaks,
        splitting_ops=ops or (),
    )


def _static_sizes(plan: Plan, compilation: CompilationConfig) -> set[int]:
    """In tokens, with a trace of their own."""
    sizes = {descriptor.num_tokens for _, descriptor in plan.keys}
    shapes = compilation.compile_shapes
    if shapes == "static":
        return sizes
    if shapes == "dynamic" or compilation.compiler == "eager" or not sizes:
        return set()
    steps = Counter[int]()
    for use in (plan.evidence or {}).get("uses", ()):
        if use["size"] in sizes:
            steps[use["size"]] += use["share"]
    if not steps:
        return {min(sizes), max(sizes)}
    return {size for size, _ in steps.most_common(_MOST_STATIC)}
