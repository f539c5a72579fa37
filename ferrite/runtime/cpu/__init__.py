"""What only CPUs need: object code in memory, fresh pages of the system, threads beside a fork."""

from ferrite.runtime.cpu.kernels import KernelStore, Unit, build, functions_of, object_codes
from ferrite.runtime.cpu.runs import Kernels, native_run

__all__ = ["KernelStore", "Kernels", "Unit", "build", "functions_of", "native_run", "object_codes"]
