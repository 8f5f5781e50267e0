"""The torch.compile backend."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.host_sync import Function
from cgplan.config import CompilationConfig, validate_config
from cgplan.errors import BackendError, CaptureError, CgplanError, ConfigError, SealedError
from cgplan.graphs.wrapper import CUDAGraphOptions
from cgplan.modes import BatchDescriptor
from cgplan.piecewise.breakable import BreakableCUDAGraphCapture, BreakableCUDAGraphWrapper
from cgplan.piecewise.breaks import as_eager_piece
from cgplan.piecewise.inductor import compile_for_all_sizes, structure_of
from cgplan.piecewise.split import Piece, operator_name, split_graph

_OPTIONS = ("splitting_ops", "compiler", "address_check", "debug")


class PiecewiseBackend:
    """Splits what Dynamo traced; outside of a capture the pieces run one after the other.

    Attributes:
        traces: They live as long as graphs, which read their constants.
        compiled: Segments that inductor compiled, by structure.
        capture: The next forward enters it.
        codes: Equal for traces that differ in guards alone.
        missed: The last guard that did not hold.
    """

    def __init__(self, compilation: CompilationConfig, backend: GraphBackend | None = None) -> None:
        self.splitting_ops = compilation.splitting_ops
        self.compiler = compilation.compiler
        self.backend = backend or select_backend()
        self.options = CUDAGraphOptions(address_check=compilation.address_policy)
        self.traces: list[Function] = []
        self.pieces: list[tuple[Piece, ...]] = []
        self.compiled: dict[Any, Function] = {}
        self.capture: BreakableCUDAGraphCapture | None = None
        self.codes: set[str] = set()
        self.missed = ""
        if self.compiler == "inductor" and self.backend.device.type == "cpu":
            raise BackendError(
                "the tape cannot record compiler: inductor, whose kernels do not pass PyTorch's "
                "dispatcher",
                remedy="Set compilation.compiler: eager where there is no GPU.",
            )

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Function:  # noqa: ARG002
        if self.backend.is_capturing():
            raise CaptureError(
                f"Dynamo traces the model again inside a capture: {self.missed or 'no trace fits'}",
                remedy="Leave the model's Python attributes and torch's modes as they are in the "
                "warm-ups.",
            )
        self.codes.add(gm.code)
        split, pieces = split_graph(gm, self.splitting_ops)
        for piece in pieces:
            module = getattr(split, piece.name)
            # generates `forward`
            _ = module.code
            if piece.eager:
                names = [operator_name(node) or "" for node in module.graph.nodes]
                # they may change a tensor object's shape (t_)
                in_place = any(name.endswith("_") for name in names)
                module.forward = as_eager_piece(
                    module.forward,
                    piece.title,
                    is_traced=not in_place,
                )
            elif self.compiler == "inductor":
                key = structure_of(module)
                if key not in self.compiled:
                    self.compiled[key] = compile_for_all_sizes(module)
                module.forward = self.compiled[key]
        _ = split.code
        self.traces.append(split)
        self.pieces.append(pieces)

        def forward_of_pieces(*args: Any) -> Any:
            capture = self.capture
            self.capture = None
            with capture or nullcontext():
                return split(*args)

        return forward_of_pieces


class _TraceWrapper(BreakableCUDAGraphWrapper):
    def _missing(self, descriptor: BatchDescriptor) -> SealedError:
        return SealedError(
            f"torch.compile answers {descriptor} by a trace that has captured no PIECEWISE graph "
            "for it",
            remedy="Capture the model itself, without torch.compile. Or let one trace serve all "
            "sizes: call torch._dynamo.maybe_mark_dynamic(x, 0) on each input before the compiled "
            "call, or pass dynamic=True where no size equals another dimension.",
        )


def cgplan_backend(gm: fx.GraphModule, example_inputs: Sequence[Any], **given: Any) -> Function:
    """``torch.compile(model, backend="cgplan", options={"splitting_ops": [...]})``.

    ``options`` are fields of ``compilation``: splitting_ops, compiler, address_check, debug. Each
    traced graph is one BreakableCUDAGraphWrapper.

    Raises:
        ConfigError: a wrong option, or torch's ``mode``.
        BackendError: inductor without a GPU.
        CaptureError: a new trace inside a capture.
    """
    try:
        devices = [value.device for value in example_inputs if isinstance(value, torch.Tensor)]
        backend = select_backend(str(devices[0])) if devices else None
        splitter = PiecewiseBackend(_compilation_of(given), backend)
        forward = splitter(gm, example_inputs)
        return _TraceWrapper(forward, backend=splitter.backend, options=splitter.options)
    except CgplanError as error:
        if isinstance(error, ConfigError) and "does not occur" in error.message:
            error.remedy += (
                " Where Dynamo breaks the model's graph, each part has to hold the operator; "
                "torch.compile(..., fullgraph=True) names the line of the break."
            )
        # torch.compile wraps other errors
        kind = type(error)
        bases = (kind, torch._dynamo.exc.ShortenTraceback)
        mixed = type(kind.__name__, bases, {"__module__": kind.__module__})
        passing: Any = mixed.__new__(mixed, *error.args)
        vars(passing).update(vars(error), first_useful_frame=None)
        raise passing from None


def _compilation_of(given: dict[str, Any]) -> CompilationConfig:
    options = (given.pop("options", None) or {}) | given
    if "mode" in options:
        raise ConfigError(
            f"torch.compile(backend='cgplan') has no mode, found {options['mode']!r}",
            remedy='Leave it out; to compile segments, pass options={"compiler": "inductor"}.',
        )
    compilation: CompilationConfig = validate_config({"compilation": options}).compilation
    for idle in sorted(set(options) - set(_OPTIONS)):
        raise ConfigError(
            f"torch.compile(backend='cgplan'): {idle} says which graphs a session captures, and "
            "means nothing here",
            remedy=f"Options are {', '.join(_OPTIONS)}. For the others use cgplan.capture or "
            "cgplan.compile_piecewise.",
        )
    return compilation
