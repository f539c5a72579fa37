"""Host programs: the Python function of a plan, which allocates, calls, runs kernels and frees.

`printer` prints it, `laws` checks its text, and `source` is that text with all it names. `spelling` has what differs
by device, `runs` the tables of arguments, `recording` the parts that a GPU replays, `views` what only calls see.
"""

from ferrite.codegen.host.laws import verify_host
from ferrite.codegen.host.printer import named_objects, print_host
from ferrite.codegen.host.recording import RecordedPart, Recording
from ferrite.codegen.host.runs import ArenaPart, KernelCall, RunTable
from ferrite.codegen.host.source import Executable, HostSource
from ferrite.codegen.host.spelling import CpuSpelling, CudaSpelling, HostSpelling

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
