"""From kernels to Triton source.

In: a kernel that keeps its laws. Out: a Python module with one Triton function, and how to start it; or the reason why
there is none. Nothing here imports Triton but `run`, when it runs.
"""

from ferrite.codegen.triton.emit import fixed_launch, kernel_source, launch_of, unsupported, written
from ferrite.codegen.triton.launch import FAILURE_WORDS, OPTIONS, Launch
from ferrite.codegen.triton.support import unsupported_operation

__all__ = [
    "FAILURE_WORDS",
    "OPTIONS",
    "Launch",
    "fixed_launch",
    "kernel_source",
    "launch_of",
    "unsupported",
    "unsupported_operation",
    "written",
]
