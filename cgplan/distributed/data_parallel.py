"""Data-parallel ranks that run one graph: each has its own batch, all have the same size and mode.

Needed where ranks exchange data inside of the forward (experts that are spread over ranks, say): a rank that replayed
another graph than its peers, or none, would exchange other shapes with them, or nothing. Off by default
(``distributed.data_parallel_sync``), because it costs each step a small all-reduce on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from cgplan.config import Input
from cgplan.distributed.ranks import Ranks
from cgplan.errors import RankFailedError
from cgplan.modes import CUDAGraphMode
from cgplan.runtime.runner import GraphRunner


@dataclass(frozen=True, slots=True)
class AgreedBatch:
    """What all ranks run.

    Attributes:
        mode: The weakest of the modes that the ranks' own batches would run in: NONE, PIECEWISE, FULL.
        num_tokens: The largest of their padded sizes.
    """

    mode: CUDAGraphMode
    num_tokens: int


class DataParallelSync:
    """One small all-reduce over the CPU group: the largest size, and the weakest mode.

    Args:
        ranks: All ranks; each calls it for every step, also for one in which it has nothing to do.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._values = torch.zeros(2, dtype=torch.int64)

    def agree(self, mode: CUDAGraphMode, num_tokens: int) -> AgreedBatch:
        """What all ranks run, given what this one would. Raises RankFailedError where a rank is lost."""
        values = self._values
        values[0], values[1] = num_tokens, -mode.value
        try:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._ranks.cpu_group)
        except RuntimeError as error:
            self._ranks.watch.blame(patience=2.0)
            raise RankFailedError(
                f"ranks lost one another before a batch: {str(error).splitlines()[0]}",
                remedy="Every rank has to come to every step; look at what the others printed.",
            ) from error
        return AgreedBatch(CUDAGraphMode(-int(values[1])), int(values[0]))


class DataParallelRunner:
    """A runner whose batches are padded to what all ranks have agreed on. Not for use from several threads.

    Args:
        runner: This rank's; the caller owns it.
        ranks: All ranks.

    Attributes:
        last: What the last batch was run as.
    """

    def __init__(self, runner: GraphRunner, ranks: Ranks) -> None:
        self._runner = runner
        self._sync = DataParallelSync(ranks)
        self._specs = {**runner.config.inputs, **runner.config.metadata}
        self._by_requests = runner.config.model is not None and runner.config.model.output_rows == "num_reqs"
        self.last: AgreedBatch | None = None

    def __call__(self, **inputs: torch.Tensor) -> Any:
        """Run one batch; arguments, result and errors are those of GraphRunner, and the result has this rank's rows.

        Raises:
            RankFailedError: a rank is lost.
        """
        route = self._runner.route(inputs)
        tokens, reqs = route.batch.num_tokens, route.batch.num_reqs
        size = tokens if route.mode is CUDAGraphMode.NONE else route.descriptor.num_tokens
        agreed = self.last = self._sync.agree(route.mode, size)
        # Behind a decode batch stand requests of padding; tokens of padding in a mixed one belong to nobody.
        is_decode = reqs == tokens and agreed.mode is CUDAGraphMode.FULL
        more_reqs = agreed.num_tokens if is_decode else reqs
        padded = _padded(inputs, self._specs, (tokens, reqs or tokens), (agreed.num_tokens, more_reqs or tokens))
        if agreed.mode is CUDAGraphMode.NONE:
            output = self._runner.run_eagerly(padded=False, **padded)
        else:
            uniform = None if agreed.mode is CUDAGraphMode.FULL else False
            output = self._runner(uniform_decode=uniform, **padded)
        rows = (reqs or tokens) if self._by_requests else tokens
        return tree_map_only(torch.Tensor, lambda t: t[:rows] if t.dim() else t, output)


def in_step(runner: GraphRunner, ranks: Ranks | None) -> GraphRunner | DataParallelRunner:
    """The runner, in step with those of other ranks where ``distributed.data_parallel_sync`` asks for it."""
    if ranks is None or not runner.config.distributed.data_parallel_sync:
        return runner
    return DataParallelRunner(runner, ranks)


def _padded(
    inputs: Mapping[str, torch.Tensor], specs: Mapping[str, Input], have: tuple[int, int], want: tuple[int, int]
) -> dict[str, Any]:
    """Each tensor with the padding that it declares behind its own rows; ``have`` and ``want`` are (tokens, reqs)."""
    found: dict[str, Any] = {}
    for name, tensor in inputs.items():
        spec = specs[name]
        row_dim = spec.row_dim
        more = 0 if row_dim is None else spec.dims[row_dim].size(*want) - spec.dims[row_dim].size(*have)
        if row_dim is None or more == 0:
            found[name] = tensor
            continue
        shape = [more if dim == row_dim else size for dim, size in enumerate(tensor.shape)]
        if spec.pad == "last":
            padding = tensor.narrow(row_dim, tensor.shape[row_dim] - 1, 1).expand(shape)
        else:
            padding = torch.full(shape, spec.pad, dtype=tensor.dtype, device=tensor.device)
        found[name] = torch.cat([tensor, padding], row_dim)
    return found


__all__ = ["AgreedBatch", "DataParallelRunner", "DataParallelSync", "in_step"]
