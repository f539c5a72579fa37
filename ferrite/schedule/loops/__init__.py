"""What every device makes kernels of: statements of a group, where its values live, and loops around them.

In: a group of operations (`schedule/fusion`). Out: bodies of kernels. How long blocks are, which loops threads share
and which are made of vectors is each device's (`schedule/cpu`, `schedule/gpu`).
"""

from ferrite.schedule.loops.scans import has_state

__all__ = ["has_state"]
