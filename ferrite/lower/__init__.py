"""From an ATen graph to the program that runs it.

In: a `CapturedGraph`. Out, with `lower`: a `HostProgram` of eager calls and the objects it names. With `lower_graph`:
a loop `Program`, where every operator is lowered, composed of lowered ones, or one eager call with a reason.
"""

from ferrite.lower.graph import LoweredProgram, lower_graph
from ferrite.lower.host import Lowered, LoweringFailure, lower
from ferrite.lower.probes import correct_forecasts, strides_of_outputs
from ferrite.lower.sizes import UnknownSize

__all__ = [
    "Lowered",
    "LoweredProgram",
    "LoweringFailure",
    "UnknownSize",
    "correct_forecasts",
    "lower",
    "lower_graph",
    "strides_of_outputs",
]
