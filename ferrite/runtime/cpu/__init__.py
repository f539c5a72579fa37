"""What only CPUs need: kernels as object code, runs of them, fresh pages of the system."""

from ferrite.runtime.cpu.kernels import build, built_from, source_of
from ferrite.runtime.cpu.runs import Kernels, native_run

__all__ = ["Kernels", "build", "built_from", "native_run", "source_of"]
