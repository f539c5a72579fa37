"""How loops are arranged for the grids and blocks of a GPU."""

from ferrite.schedule.gpu.machine import GpuMachine
from ferrite.schedule.gpu.products import Tuned, candidates
from ferrite.schedule.gpu.scheduling import GpuScheduling

__all__ = ["GpuMachine", "GpuScheduling", "Tuned", "candidates"]
