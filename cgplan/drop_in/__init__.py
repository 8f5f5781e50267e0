"""A drop-in for a model: what a configuration would say is learnt from calls."""

from cgplan.drop_in.call_form import as_called
from cgplan.drop_in.graphed import Graphed, GraphedModule, graphed

__all__ = ["Graphed", "GraphedModule", "as_called", "graphed"]
