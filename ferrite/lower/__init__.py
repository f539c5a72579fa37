"""From an ATen graph to the program that runs it.

In: a `CapturedGraph`. Out: a `HostProgram` and the objects it names. Today every operator becomes one eager call with
the reason `not yet lowered`; allocation, sizes and tuples are the host program's own.
"""

from ferrite.lower.host import Lowered, LoweringFailure, lower

__all__ = ["Lowered", "LoweringFailure", "lower"]
