"""Facts about FX graphs that several stages ask for.

In: an FX graph, as Dynamo or AOTAutograd made it. Out: where a node came from in the user's model, what its value
looks like, and the graph as Python that runs by itself. Nothing here changes a graph.
"""

from ferrite.graph.facts import describe_value, fake_value, storage_bytes
from ferrite.graph.source import ModelLine, first_model_line, model_line

__all__ = [
    "ModelLine",
    "describe_value",
    "fake_value",
    "first_model_line",
    "model_line",
    "storage_bytes",
]
