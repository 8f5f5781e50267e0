"""A drop-in for a model: what a configuration would say is learnt from calls."""

from cgplan.drop_in.graphed import Graphed, GraphedModule, as_called, graphed, graphed_generate

__all__ = [
    "Graphed",
    "GraphedModule",
    "as_called",
    "graphed",
    "graphed_generate",
]
