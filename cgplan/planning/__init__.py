"""From a configuration to a plan: modes, capture sizes, keys, dispatch, costs, other engines. No
torch here.
"""

from cgplan.planning.dispatcher import CudagraphDispatcher, MissReason
from cgplan.planning.plan import LADDERS, Plan, build_plan, config_hash

__all__ = [
    "LADDERS",
    "CudagraphDispatcher",
    "MissReason",
    "Plan",
    "build_plan",
    "config_hash",
]
