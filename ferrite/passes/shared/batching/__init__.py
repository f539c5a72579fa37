"""Calls that are made as one: what several stages need to find them and to put one call in their place.

In: a graph, and a `Fusion` that says which calls are its members and how the one call is written. Out: the graph,
rewritten in place.
"""

from ferrite.passes.shared.batching.members import Settings, shape_key
from ferrite.passes.shared.batching.search import UNLIMITED, Fusion, stacked

__all__ = ["UNLIMITED", "Fusion", "Settings", "shape_key", "stacked"]
