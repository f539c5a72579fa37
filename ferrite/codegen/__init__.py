"""From plans and kernels to source text.

In: a plan. Out: Python source of one boxed function, readable, with the model line of each call (`host`), and the
kernels that it runs as LLVM (`llvm`) or Triton (`triton`).
"""

from ferrite.codegen.host import named_objects, print_host
from ferrite.codegen.host_laws import verify_host
from ferrite.codegen.host_recording import RecordedPart, Recording
from ferrite.codegen.host_runs import ArenaPart, KernelCall, RunTable
from ferrite.codegen.host_source import Executable, HostSource
from ferrite.codegen.host_spelling import CpuSpelling, CudaSpelling, HostSpelling
from ferrite.codegen.refusals import RefusedKernels

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
    "RefusedKernels",
    "RunTable",
    "named_objects",
    "print_host",
    "verify_host",
]
