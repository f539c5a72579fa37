"""How loops are arranged for the grids and blocks of a GPU."""

from ferrite.schedule.gpu.products import Tuned, candidates
from ferrite.schedule.gpu.scatter import ATOMIC_TYPES
from ferrite.schedule.gpu.scheduling import GpuScheduling

__all__ = ["ATOMIC_TYPES", "GpuScheduling", "Tuned", "candidates"]
