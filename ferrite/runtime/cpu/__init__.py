"""What only CPUs need: kernels as object code, runs of them, fresh pages of the system."""

from ferrite.runtime.cpu.kernels import build
from ferrite.runtime.cpu.runs import Kernels, native_run

__all__ = ["Kernels", "build", "native_run"]
