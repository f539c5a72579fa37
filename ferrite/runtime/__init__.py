"""From source text to a callable.

In: the text of a host program and the objects it names. Out: a boxed function: it takes one list, empties it, and
returns the outputs in order. Holds what compiled code calls while it runs.
"""

from ferrite.runtime.discard import discard
from ferrite.runtime.frozen import Frozen, call_frozen
from ferrite.runtime.load import Boxed, load, run_in_eager, run_program

__all__ = ["Boxed", "Frozen", "call_frozen", "discard", "load", "run_in_eager", "run_program"]
