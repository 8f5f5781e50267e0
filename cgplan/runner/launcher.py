"""What all calls of a runner share."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from cgplan.captures.model_graphs import ModelGraphs
from cgplan.graphs.pools import PoolUse
from cgplan.runner.prepared import PreparedCall, Values
from cgplan.runner.verifier import Verifier


class Launcher:
    """The caller holds the lock."""

    def __init__(
        self,
        graphs: ModelGraphs,
        use: PoolUse,
        name: str,
    ) -> None:
        self.graphs = graphs
        self.verifier = Verifier(graphs)
        self.use = use
        self.name = name
        self.stream = graphs.backend.stream_getter()
        self.last_staged: Any = None  # its last StagedBuffers
        self._addresses = graphs.addresses
        self._checks_once = graphs.config.compilation.address_policy != "always"
        self._is_plain = False  # a call without autocast has passed
        kind = graphs.backend.device.type
        self._is_autocast = torch.is_autocast_enabled  # without an argument for CUDA, and faster
        if kind != "cuda":
            self._is_autocast = partial(torch.is_autocast_enabled, kind)

    def take_stream(self) -> None:
        """Raises CgplanError if another stream has work."""
        self.use.take_stream(self.stream(), self.name, self.graphs.backend)

    def launch(
        self,
        call: PreparedCall,
        values: Values,
        is_alike: bool = False,
    ) -> None:
        """``is_alike``: the tensors are dense, and like those of the last call."""
        stream = self.stream()
        use = self.use
        if stream != use.stream or use.user is not self.name:
            self.take_stream()
        if not self._is_plain or self._is_autocast():
            self.graphs.check_autocast()
            self._is_plain = not self._is_autocast()
        if call.needs_check and not self._addresses.holds():
            self._addresses.check(call.route.key)
            call.needs_check = not self._checks_once  # then holds() is never true
        call.copy_in(values, stream, is_alike)
        call.count.calls += 1
        due = call.due
        due.left -= 1
        if due.left:
            call.replay()
        else:
            with torch._C._EnableTorchFunction():
                self.verifier.replay(call, values)
