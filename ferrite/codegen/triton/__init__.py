"""From kernels to Triton source.

In: a kernel that keeps its laws. Out: a Python module with one Triton function, and how to start it; or the reason why
there is none. Nothing here imports Triton but `run`, when it runs.
"""

from ferrite.codegen.triton.divisibility import row_strides
from ferrite.codegen.triton.emit import fixed_launch, kernel_rows, kernel_source, launch_of, unsupported, written
from ferrite.codegen.triton.grouped import table_lengths, table_words, writer_source, written_at_once
from ferrite.codegen.triton.launch import ALIGNMENT, DESCRIPTOR_BYTES, DESCRIPTORS, FAILURE_WORDS, OPTIONS, LaunchConfig
from ferrite.codegen.triton.support import unsupported_operation

__all__ = [
    "ALIGNMENT",
    "DESCRIPTORS",
    "DESCRIPTOR_BYTES",
    "FAILURE_WORDS",
    "OPTIONS",
    "LaunchConfig",
    "fixed_launch",
    "kernel_rows",
    "kernel_source",
    "launch_of",
    "row_strides",
    "table_lengths",
    "table_words",
    "unsupported",
    "unsupported_operation",
    "writer_source",
    "written",
    "written_at_once",
]
