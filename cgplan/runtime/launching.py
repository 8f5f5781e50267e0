"""The last steps of each call: what may have changed around it is looked at, then the batch is copied in and run."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from cgplan.errors import CgplanError
from cgplan.graphs.copying import CopyIn
from cgplan.runtime.graphed import GraphedModel
from cgplan.runtime.pools import PoolUse
from cgplan.runtime.prepared import PreparedBatch, Values

if TYPE_CHECKING:
    from cgplan.runtime.staging import StagedBuffers


class BatchLauncher:
    """Runs prepared batches of one model, one at a time.

    Args:
        graphed: The model with its graphs.
        use: Who runs the graphs of its pools; shared by the runners of a shared pool.
        name: What messages call the runner.

    Attributes:
        acquire, release: Of the lock that each call takes; it is never waited for.
        use, name: As given.
        marks: How far batches reach into the static buffers.
        current_stream: The handle of the current stream.
        last_staged: The staged buffers whose output is the latest.
    """

    def __init__(self, graphed: GraphedModel, use: PoolUse, name: str) -> None:
        self.acquire, self.release = use.acquire, use.release
        self.use, self.name = use, name
        self.marks = graphed.buffers.marks
        self.current_stream = graphed.backend.stream_getter()
        self.last_staged: weakref.ref[StagedBuffers] | None = None
        self._graphed = graphed
        kind = graphed.backend.device.type  # without an argument it answers for CUDA, in half the time
        self._is_autocast = torch.is_autocast_enabled if kind == "cuda" else partial(torch.is_autocast_enabled, kind)
        self._is_plain = False  # whether a call without autocast has passed
        self._checks_once = graphed.config.compilation.address_policy != "always"

    def launch(self, batch: PreparedBatch, copy_in: CopyIn, values: Values) -> Any:
        """Copy a batch in and run it; the lock is held.

        Raises:
            CgplanError: the stream of the call before is another one, and still has work.
            CaptureError, AddressError: as GraphRunner's call.
        """
        stream, use = self.current_stream(), self.use
        if stream != use.stream or use.user is not self.name:
            use.take_stream(stream, self.name, self._graphed.backend)
        if not self._is_plain or self._is_autocast():
            self._graphed.check_autocast()
            self._is_plain = not self._is_autocast()
        if batch.unchecked:
            self._check_addresses(batch)
        replay = batch.replay
        if replay is None:
            return batch.run(copy_in, values, stream)
        copy_in(values, stream)
        batch.count.calls += 1
        replay()
        return batch.output()

    def _check_addresses(self, batch: PreparedBatch) -> None:
        batch.unchecked = not self._checks_once  # ahead of the check: another thread may ask for one meanwhile
        try:
            self._graphed.check_addresses(batch.route.mode, batch.route.descriptor)
        except BaseException:
            batch.unchecked = True
            raise

    def take_stream(self) -> None:
        """Note that the caller writes on the current stream; the lock is held. Raises as ``launch``."""
        stream, use = self.current_stream(), self.use
        if stream != use.stream or use.user is not self.name:
            use.take_stream(stream, self.name, self._graphed.backend)

    def extend_marks(self, batch: PreparedBatch) -> None:
        """Note that rows of a batch may have been written, and no padding was reset."""
        self.marks.extend(batch.route.batch.num_tokens, batch.route.batch.num_reqs or 0)

    def check(self) -> None:
        """What ``launch`` checks first, for work ahead of it; the lock is held. Raises as it does."""
        self.take_stream()
        self._graphed.check_autocast()

    def under_way(self) -> CgplanError:
        """The error of a call inside a call, or from a second thread."""
        return self.use.under_way(self.name)
