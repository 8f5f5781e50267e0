"""What will be captured: sizes, modes, keys, the plan and its dispatcher. No torch here."""

from cgplan.planning.build import LADDERS, build_plan
from cgplan.planning.dispatcher import CudagraphDispatcher, MissReason
from cgplan.planning.plan import Plan, config_hash

__all__ = ["LADDERS", "CudagraphDispatcher", "MissReason", "Plan", "build_plan", "config_hash"]
