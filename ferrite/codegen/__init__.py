"""From plans and kernels to source text.

In: a plan. Out: Python source of one boxed function, readable, with the model line of each call (`host`), and the
kernels that it runs as LLVM (`llvm`) or Triton (`triton`).
"""

from ferrite.codegen.host import (
    ArenaPart,
    CpuSpelling,
    CudaSpelling,
    Executable,
    HostSource,
    HostSpelling,
    KernelCall,
    RecordedPart,
    Recording,
    RunTable,
    named_objects,
    print_host,
    verify_host,
)

__all__ = [
    "ArenaPart",
    "CpuSpelling",
    "CudaSpelling",
    "Executable",
    "HostSource",
    "HostSpelling",
    "KernelCall",
    "RecordedPart",
    "Recording",
    "RunTable",
    "named_objects",
    "print_host",
    "verify_host",
]
