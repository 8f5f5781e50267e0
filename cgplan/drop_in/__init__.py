"""A drop-in for a model: what a configuration would say is learnt from calls."""

from cgplan.drop_in.graphed import Graphed, GraphedModule, graphed, graphed_generate
from cgplan.drop_in.saved_call import as_called

__all__ = [
    "Graphed",
    "GraphedModule",
    "as_called",
    "graphed",
    "graphed_generate",
]
