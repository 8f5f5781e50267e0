"""Data-parallel ranks that exchange data inside the forward."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cgplan.buffers.static import Tensors, pad_value
from cgplan.config import Input
from cgplan.distributed.ranks import Ranks
from cgplan.errors import RankFailedError
from cgplan.modes import CUDAGraphMode
from cgplan.runner.routing import RoutedBatch
from cgplan.runner.runner import GraphRunner


@dataclass(frozen=True)
class AgreedBatch:
    # the weakest: NONE, PIECEWISE, FULL
    mode: CUDAGraphMode
    num_tokens: int  # the largest
    num_active_loras: int = 0


class DataParallelRunner:
    """Pads batches to the size that all ranks agreed on; for one thread. The caller owns
    ``runner``. Making it is a step of all ranks. An idle rank calls it with tensors of 0 rows.
    """

    def __init__(
        self,
        runner: GraphRunner,
        ranks: Ranks,
    ) -> None:
        self._runner = runner
        self._ranks = ranks
        # a failure may leave a sum unfinished
        self._group = ranks.new_group()
        self._batches = 0
        self._specs = runner.config.tensors
        model = runner.config.model
        self._by_requests = model is not None and model.output_rows == "num_reqs"
        self.last: AgreedBatch | None = None

    def __call__(
        self,
        *,
        uniform_decode: bool | None = None,
        num_active_loras: int = 0,
        **inputs: Tensor,
    ) -> Any:
        """Run one batch; the result has this rank's rows.

        Raises:
            RankFailedError: a rank is lost or late (then for good), or has refused its batch.
        """
        try:
            is_idle = self._is_idle(inputs)
            if is_idle:
                one_request = (self._runner.plan.query_len, 1)
                inputs = _padded(inputs, self._specs, (0, 0), one_request)
                uniform_decode = True
                num_active_loras = 0
            route = self._runner.route(inputs, uniform_decode, num_active_loras)
            is_eager = route.mode is CUDAGraphMode.NONE
            size = (route.batch if is_eager else route.descriptor).num_tokens
        except Exception:  # else the others meet this rank's next batch
            self._largest(0, -CUDAGraphMode.FULL.value, 0, self._ranks.rank + 1)
            raise
        size, weakest, adapters, refused = self._largest(
            size, -route.mode.value, route.num_active_loras, 0
        )
        if refused:
            raise RankFailedError(
                f"rank {refused - 1} refused its batch",
                remedy="Look at the error of that rank; the next batch can be run.",
            )
        agreed = AgreedBatch(CUDAGraphMode(-weakest), size, adapters)
        self.last = agreed
        output = self._run(agreed, route, inputs, is_idle)
        rows = route.batch.num_tokens
        if is_idle:
            rows = 0
        elif self._by_requests:
            rows = route.batch.num_reqs or rows
        return tree_map_only(Tensor, lambda t: t[:rows] if t.dim() else t, output)

    def _largest(self, *own: int) -> list[int]:
        """Of each number; one all-reduce on the CPU."""
        self._batches += 1
        self._ranks.check_lost()
        values = torch.tensor(own)
        try:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)
        except RuntimeError as failure:
            self._ranks.check()
            error = RankFailedError(
                f"a rank did not come to batch {self._batches} within {self._ranks.timeout:g} s, "
                "or has ended",
                remedy="Look at the output of all ranks; start them again.",
            )
            self._ranks.leave(error)
            raise error from failure
        return values.tolist()

    def _run(
        self,
        agreed: AgreedBatch,
        route: RoutedBatch,
        inputs: Tensors,
        is_idle: bool,
    ) -> Any:
        """Padding after a decode batch is requests, in a mixed one of no request."""
        plan = self._runner.plan
        size = agreed.num_tokens
        tokens = route.batch.num_tokens
        reqs = route.batch.num_reqs or tokens
        wanted_reqs = reqs
        more, rest = divmod(size, plan.query_len)
        uniform = route.uniform and agreed.mode is CUDAGraphMode.FULL
        if rest or more > plan.max_num_seqs:
            uniform = False
        if uniform:
            wanted_reqs = more
        padded = _padded(inputs, self._specs, (tokens, reqs), (size, wanted_reqs))
        if agreed.mode is CUDAGraphMode.NONE:
            uniform = route.uniform and size == tokens
            loras = route.num_active_loras
            return self._runner.run_eagerly(
                padded=False, uniform_decode=uniform, num_active_loras=loras, **padded
            )
        loras = agreed.num_active_loras
        output = self._runner(uniform_decode=uniform, num_active_loras=loras, **padded)
        self._runner.stats.recount(
            self._runner.route(padded, uniform, loras), None if is_idle else route
        )
        return output

    def _is_idle(self, inputs: Tensors) -> bool:
        for name, spec in self._specs.items():
            given = inputs.get(name)
            dim = spec.row_dim
            if given is not None and dim is not None and dim < given.dim():
                return spec.extents[dim].count(given.shape[dim]) == 0
        return False


def in_step(runner: GraphRunner, ranks: Ranks | None) -> GraphRunner | DataParallelRunner:
    """The runner, or a DataParallelRunner where ``distributed.data_parallel_sync`` is set."""
    if ranks is None or not runner.config.distributed.data_parallel_sync:
        return runner
    return DataParallelRunner(runner, ranks)


def _padded(
    inputs: Tensors,
    specs: Mapping[str, Input],
    have: tuple[int, int],
    want: tuple[int, int],
) -> dict[str, Any]:
    """``have`` and ``want`` are (tokens, reqs)."""
    found = dict(inputs)
    for name, spec in specs.items():
        tensor = inputs.get(name)
        row_dim = spec.row_dim
        if tensor is None or row_dim is None or row_dim >= tensor.dim():
            continue
        rows = spec.extents[row_dim]
        more = rows.size(*want) - rows.size(*have)
        if more == 0:
            continue
        shape = list(tensor.shape)
        shape[row_dim] = more
        if spec.pad == "last" and tensor.shape[row_dim]:
            padding = tensor.narrow(row_dim, tensor.shape[row_dim] - 1, 1).expand(shape)
        else:
            padding = tensor.new_full(shape, pad_value(spec))
        found[name] = torch.cat([tensor, padding], row_dim)
    return found
