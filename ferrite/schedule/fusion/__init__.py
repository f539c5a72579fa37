"""Which operations become one kernel: memory that each accesses, what depends on what, groups, repeats of them."""

from ferrite.schedule.fusion.accesses import BufferTable, likely

__all__ = ["BufferTable", "likely"]
