"""PIECEWISE by splitting the traced forward: the torch.compile backend."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Literal

import torch
from torch import fx

from cgplan.backends import GraphBackend, select_backend
from cgplan.config import CompilationConfig, Dim, validate_config
from cgplan.errors import BackendError, CaptureError, CgplanError, ConfigError
from cgplan.graphs.wrapper import CUDAGraphOptions
from cgplan.piecewise.fresh import fresh_arguments, written_arguments
from cgplan.piecewise.partition import PartitionedForward, compile_for_all_sizes, structure_of
from cgplan.piecewise.row_conditions import refuse_branches_on_size
from cgplan.piecewise.segments import SegmentWrapper, SplitForward
from cgplan.piecewise.split import Piece, split_graph

Compiler = Literal["eager", "inductor"]


class PiecewiseBackend:
    """A torch.compile backend: splits what Dynamo traced and wraps each segment in a CUDAGraphWrapper(PIECEWISE).

    Outside of a forward context the segments run as they are, so the compiled model is then just the model.

    Args:
        splitting_ops: See ``compilation.splitting_ops``.
        compiler: ``eager`` runs a segment's operators as they were traced; ``inductor`` compiles each distinct segment
            once, for all sizes.
        backend: Device of the graphs; chosen as for ``auto`` if absent.
        address_check: See ``compilation.address_check``.
        partition: See ``compilation.use_inductor_graph_partition``.
        max_rows: For a trace whose guards are not kept: the largest number of rows that it will be run with.

    Attributes:
        is_bounded: Whether the trace is known to hold up to ``max_rows`` only.
        dims: What the sizes at the trace stand for, where the inputs declare it.
        pieces: Of each graph that was traced, in order.
        compilations: How many distinct segments inductor compiled.
        last: The forward that was split last, as long as Dynamo holds it.
    """

    def __init__(
        self,
        splitting_ops: Sequence[str] | None = None,
        compiler: Compiler = "eager",
        backend: GraphBackend | None = None,
        address_check: Literal["off", "first", "always"] = "first",
        partition: bool = False,
        max_rows: int | None = None,
    ) -> None:
        self.splitting_ops = splitting_ops
        self.compiler = compiler
        self.partition = partition
        self.max_rows = max_rows
        self.is_bounded = False
        self.dims: dict[int, Dim] = {}
        self.address_check = address_check
        self.backend = backend or select_backend()
        self.pieces: list[tuple[Piece, ...]] = []
        self.compiled: dict[Any, Callable[..., Any]] = {}
        self.last: Callable[[], SplitForward | None] = lambda: None
        if compiler == "inductor" and self.backend.device.type == "cpu":
            raise BackendError(
                "compiler: inductor on the tape: its kernels do not pass PyTorch's dispatcher and cannot be recorded",
                remedy="Set compilation.compiler: eager where there is no GPU.",
            )

    @property
    def compilations(self) -> int:
        """Distinct segments that inductor compiled."""
        return len(self.compiled)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:  # noqa: ARG002
        """Split and wrap; Dynamo calls this once for each graph. PiecewiseModel says what ``max_rows`` changes."""
        if self.max_rows is not None:
            if self.pieces:
                raise CaptureError(
                    "the model is traced a second time: torch._dynamo.reset() dropped the trace that was captured",
                    remedy="Capture again after torch._dynamo.reset().",
                )
            refuse_branches_on_size(self.max_rows, self.dims)
        forward = self._partitioned(gm) if self.partition else self._split(gm)
        if self.max_rows is not None:  # inductor may have added conditions
            self.is_bounded |= refuse_branches_on_size(self.max_rows, self.dims)
        return forward

    def _split(self, gm: fx.GraphModule) -> Callable[..., Any]:
        split, pieces = split_graph(gm, self.splitting_ops)
        self.pieces.append(pieces)
        fresh = fresh_arguments(split, pieces)
        runnables: dict[str, Callable[..., Any]] = {}
        for piece in pieces:
            module = getattr(split, piece.name)
            _ = module.code  # generates it: until then `forward` is a stub that does so on each call
            runnables[piece.name] = module.forward
            if not piece.eager:
                compiled = self._compile(module) if self.compiler == "inductor" else module.forward
                options = CUDAGraphOptions(copied_arguments=fresh[piece.name], address_check=self.address_check)
                runnables[piece.name] = SegmentWrapper(
                    compiled,
                    guarded=self.max_rows is None,
                    written=written_arguments(module),
                    backend=self.backend,
                    options=options,
                )
        forward = SplitForward(split, runnables, pieces)
        self.last = weakref.ref(forward)
        return forward

    def _partitioned(self, gm: fx.GraphModule) -> Callable[..., Any]:
        forward = PartitionedForward(self.backend, CUDAGraphOptions(address_check=self.address_check))
        forward.compile(gm, self.splitting_ops)
        self.compiled[gm] = forward
        self.pieces.append(forward.pieces(gm, self.splitting_ops))
        return forward

    def _compile(self, module: fx.GraphModule) -> Callable[..., Any]:
        key = structure_of(module)
        if key not in self.compiled:
            self.compiled[key] = compile_for_all_sizes(module)
        return self.compiled[key]


_OPTIONS = {
    "splitting_ops": "splitting_ops",
    "compiler": "compiler",
    "address_check": "address_policy",
    "debug": "address_policy",
    "use_inductor_graph_partition": "use_inductor_graph_partition",
}


_BROKEN_GRAPH = (
    "Those are the operators of one graph: where Dynamo breaks the model's graph it hands over several, and each has "
    "to hold the operator. torch.compile(..., fullgraph=True) names the line that it breaks at."
)


def cgplan_backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **given: Any) -> Callable[..., Any]:
    """``torch.compile(model, backend="cgplan", options={"splitting_ops": [...]})``.

    ``options`` are fields of ``compilation``: splitting_ops, compiler, address_check, debug (which is address_check:
    always here) and use_inductor_graph_partition. The others say which graphs a session captures.

    Raises:
        ConfigError: an option that does not exist, has a wrong value, or means nothing here; a ``mode`` of torch's.
        Others as PiecewiseBackend. They pass torch.compile as they are.
    """
    try:
        return PiecewiseBackend(**_checked(given))(gm, example_inputs)
    except CgplanError as error:
        if isinstance(error, ConfigError) and "does not occur" in error.message:
            error = ConfigError(error.message, remedy=f"{error.remedy} {_BROKEN_GRAPH}")
        raise _passing(error) from None


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of PiecewiseBackend that torch.compile was given. Raises ConfigError."""
    options = {**given, **(given.get("options") or {})}
    options.pop("options", None)
    if "mode" in options:
        raise ConfigError(
            f"torch.compile(backend='cgplan') has no mode, found {options['mode']!r}",
            remedy='Leave it out; to compile segments, pass options={"compiler": "inductor"}.',
        )
    compilation: CompilationConfig = validate_config({"compilation": options}).compilation
    idle = sorted(set(options) - set(_OPTIONS))
    if idle:
        raise ConfigError(
            f"torch.compile(backend='cgplan'): {idle[0]} says which graphs a session captures, and means nothing here",
            remedy=f"Options are {', '.join(_OPTIONS)}. For the others use cgplan.capture or cgplan.compile_piecewise.",
        )
    return {
        "splitting_ops": compilation.splitting_ops,
        "compiler": compilation.compiler,
        "address_check": compilation.address_policy,
        "partition": compilation.use_inductor_graph_partition,
    }


def _passing(error: CgplanError) -> CgplanError:
    """The same error, of a class that torch.compile hands on as it is; it puts others inside one of its own."""
    kind = type(error)
    mixed = type(kind.__name__, (kind, torch._dynamo.exc.ShortenTraceback), {"__module__": kind.__module__})
    passing: Any = mixed.__new__(mixed, *error.args)
    vars(passing).update(vars(error))
    passing.first_useful_frame = _NO_FRAME
    return passing  # type: ignore[no-any-return]


_NO_FRAME: FrameType | None = None
