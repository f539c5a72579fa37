"""From an ATen graph to the program that runs it.

In: a `CapturedGraph`. Out, with `lower`: a `HostProgram` of eager calls and the objects it names. With `lower_graph`:
a loop `Program`, where every operator is lowered, composed of lowered ones, or one eager call with a reason.
"""

from ferrite.lower.graph import LoweredProgram, lower_graph
from ferrite.lower.host import Lowered, LoweringFailure, lower
from ferrite.lower.sizes import UnknownSize

__all__ = ["Lowered", "LoweredProgram", "LoweringFailure", "UnknownSize", "lower", "lower_graph"]
