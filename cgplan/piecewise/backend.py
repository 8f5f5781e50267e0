"""What Dynamo traces, in pieces."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import fx

from cgplan.backends import GraphBackend
from cgplan.backends.host_sync import Function
from cgplan.config import CompilationConfig
from cgplan.errors import BackendError, CaptureError
from cgplan.piecewise.breaks import as_eager_piece
from cgplan.piecewise.inductor import compile_for_all_sizes, structure_of
from cgplan.piecewise.split import Piece, operator_name, split_graph


class PiecewiseBackend:
    """Splits what Dynamo traced; outside of a capture the pieces run one after the other.

    Attributes:
        traces: They live as long as graphs, which read their constants.
        capture: The next forward enters it.
        codes: Equal for traces that differ in guards alone.
        missed: The last guard that did not hold.
    """

    def __init__(self, compilation: CompilationConfig, backend: GraphBackend) -> None:
        self.splitting_ops = compilation.splitting_ops
        self.compiler = compilation.compiler
        self.backend = backend
        self.traces: list[Function] = []
        self.pieces: list[tuple[Piece, ...]] = []
        self.compiled: dict[Any, Function] = {}
        self.capture: AbstractContextManager[object] | None = None
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
