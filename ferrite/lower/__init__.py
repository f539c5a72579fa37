"""From an ATen graph to the program that computes it.

In: a `CapturedGraph`. Out: a `Program`, where every operator is lowered, composed of lowered ones, or one eager call
with a reason; and the objects that it names.
"""

from ferrite.lower.builder import DrawingKernel, no_threads
from ferrite.lower.cuda_random import THREAD_GROUP, distribution_numbers, dropout_numbers
from ferrite.lower.graph import LoweredProgram, call_instead, call_without_fuel, lower_graph, lower_module
from ferrite.lower.left_to_eager import leave_halves, left_to_eager
from ferrite.lower.probes import correct_forecasts, strides_of_outputs
from ferrite.lower.table import how_lowered
from ferrite.lower.walk import LoweringFailure

__all__ = [
    "THREAD_GROUP",
    "DrawingKernel",
    "LoweredProgram",
    "LoweringFailure",
    "call_instead",
    "call_without_fuel",
    "correct_forecasts",
    "distribution_numbers",
    "dropout_numbers",
    "how_lowered",
    "leave_halves",
    "left_to_eager",
    "lower_graph",
    "lower_module",
    "no_threads",
    "strides_of_outputs",
]
