"""What only CPUs need: object code in memory, fresh pages of the system, threads beside a fork."""

from ferrite.runtime.cpu.kernels import KernelStore, build, functions_of

__all__ = ["KernelStore", "build", "functions_of"]
