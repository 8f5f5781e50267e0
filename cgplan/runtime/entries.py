"""What a graph wrapper is told, and what it keeps of each capture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from cgplan.descriptors import BatchDescriptor
from cgplan.errors import AddressError, CaptureError, ConfigError
from cgplan.graphs import GraphBackend
from cgplan.graphs.addresses import AddressManifest
from cgplan.graphs.source import current_line
from cgplan.modes import CUDAGraphMode
from cgplan.runtime.ambient import AmbientState
from cgplan.runtime.context import AddressPolicy, CaptureScope
from cgplan.runtime.handed_outputs import HandedOutput


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, slots=True)
class CUDAGraphOptions:
    """How a wrapper captures.

    Attributes:
        borrow_outputs: Hand out outputs that do not hold their memory in the pool, so that later captures reuse it:
            an output is then valid until the next replay of any graph in the pool. False: outputs hold their memory.
        num_of_warmups: Eager runs before a capture outside of a session; a session has its own.
        copied_arguments: Positions of arguments that may lie elsewhere on each call: they get memory in the pool, and
            each replay copies them there; shape and dtype must be those of the capture. All other arguments must lie
            where they lay at capture.
        address_check: Whether that is checked: ``off``, ``first`` (on each graph's first replay) or ``always``.
            Arguments are checked, and what graphs read of the forward context's metadata; not the parameters and
            buffers of a module that is wrapped. Inside of a runner its ``compilation.address_check`` counts as well:
            see ``policy``.
    """

    borrow_outputs: bool = True
    num_of_warmups: int = 1
    copied_arguments: tuple[int, ...] = ()
    address_check: AddressPolicy = "first"

    def __post_init__(self) -> None:
        """Raise ConfigError for values that are not as described."""
        if self.address_check not in ("off", "first", "always"):
            raise ConfigError(f"address_check is {self.address_check!r:.100}", remedy="Choose off, first or always.")
        if not _is_count(self.num_of_warmups):
            raise ConfigError(f"num_of_warmups is {self.num_of_warmups!r:.100}", remedy="Give a number from 0.")
        if not isinstance(self.copied_arguments, tuple) or not all(map(_is_count, self.copied_arguments)):
            raise ConfigError(
                f"copied_arguments is {self.copied_arguments!r:.100}",
                remedy="Give a tuple of positions from 0, such as (0, 2).",
            )

    def policy(self, scope: CaptureScope | None) -> AddressPolicy:
        """How often addresses are checked in a scope: a runner's ``off`` is off, and ``always`` of either is always."""
        ruling = None if scope is None else scope.address_check
        if ruling == "off":
            return ruling
        return "always" if ruling == "always" else self.address_check

    def check_copied(self, args: tuple[Any, ...]) -> None:
        """Raise CaptureError where ``copied_arguments`` names something else than a tensor of a call."""
        for i in self.copied_arguments:
            if i >= len(args) or not isinstance(args[i], torch.Tensor):
                found = f"{args[i]!r:.100}" if i < len(args) else f"one of {len(args)} arguments"
                raise CaptureError(
                    f"copied_arguments names argument {i}, which is {found}",
                    remedy="Name positions of tensors that are passed by position.",
                )


def refuse_nested(backend: GraphBackend) -> None:
    """Raise CaptureError where a wrapper is to capture inside of another one's capture."""
    if backend.is_capturing():
        raise CaptureError(
            f"the model holds graph wrappers of its own, and is to be captured as a whole as well, at {current_line()}",
            remedy="For PIECEWISE set compilation.piecewise: wrappers, or take the wrappers out. A wrapper inside "
            "another one needs another runtime mode.",
        )


@dataclass(frozen=True, slots=True, eq=False)
class CUDAGraphEntry:
    """One captured graph.

    Attributes:
        descriptor: The batch that it serves.
        graph: What the wrapper replays: the backend's graph, or a breakable capture.
        output: What the callable returned at capture, on graph memory; each replay overwrites it.
        handed: Gives the output to code of the user, which may change the tensor objects, see HandedOutput.
        slots: Memory of the copied arguments, by position.
        manifest: Where the other arguments and the metadata lay at capture; None where they are not checked.
        capture_seconds: From begin to the end of the capture, instantiation included.
        backend: Captured it, and replays it.
        scope: The session or runner that it belongs to; another one's inputs lie elsewhere, so it is of no use there.
        metadata: Names that its graphs read of the context's metadata, outside of runners; theirs is checked whole.
        segments: The backend's graphs that it consists of, in order.
        eager_pieces: How many functions run eagerly between them.
        ambient: Torch's state around the capture.
        pooled: What of the output lies in the pool: while somebody holds that, the graph must not be freed.
    """

    descriptor: BatchDescriptor
    graph: Any
    output: Any
    handed: HandedOutput
    slots: Mapping[int, torch.Tensor]
    manifest: AddressManifest | None
    capture_seconds: float
    backend: GraphBackend = field(repr=False)
    scope: CaptureScope | None = field(repr=False)
    metadata: frozenset[str] = frozenset()
    segments: tuple[Any, ...] = ()
    eager_pieces: int = 0
    ambient: AmbientState | None = None
    pooled: tuple[torch.Tensor, ...] = ()

    def check_copied(self, args: tuple[Any, ...], mode: CUDAGraphMode) -> None:
        """Raise AddressError for a copied argument of another shape or dtype than at capture, or that is missing."""
        for i, slot in self.slots.items():
            try:
                fits = args[i].shape == slot.shape and args[i].dtype is slot.dtype
            except (IndexError, AttributeError):
                fits = False
            if not fits:
                found = _described(args[i]) if i < len(args) else f"missing among {len(args)} arguments"
                raise AddressError(
                    f"{mode} {self.descriptor}: argument {i}, which is copied, is {found}; at capture it was "
                    f"{_described(slot)}",
                    remedy="Pass it by position with the shape and dtype of the capture, or give batches that differ "
                    "descriptors that differ.",
                )


def _described(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else f"{value!r:.100}"
