"""Several processes, one rank each."""

from cgplan.backends.context import all_reduce_by, current_all_reduce
from cgplan.distributed.all_reduce import AllReduce, CollectiveAllReduce, open_all_reduce
from cgplan.distributed.data_parallel import DataParallelRunner, in_step
from cgplan.distributed.ranks import Ranks, open_ranks
from cgplan.distributed.registry import GraphBufferRegistry, Registration
from cgplan.distributed.session import RankedCapture, agree_on_model, agree_on_plan, agree_on_setup

__all__ = [
    "AllReduce",
    "CollectiveAllReduce",
    "DataParallelRunner",
    "GraphBufferRegistry",
    "RankedCapture",
    "Ranks",
    "Registration",
    "agree_on_model",
    "agree_on_plan",
    "agree_on_setup",
    "all_reduce_by",
    "current_all_reduce",
    "in_step",
    "open_all_reduce",
    "open_ranks",
]
