"""How loops are arranged for the threads, vectors and caches of a CPU."""

from ferrite.schedule.cpu.scheduling import CpuScheduling

__all__ = ["CpuScheduling"]
