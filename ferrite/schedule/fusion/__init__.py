"""Which operations become one kernel: memory that each touches, what depends on what, groups, repeats of them."""

from ferrite.schedule.fusion.accesses import Layouts, likely

__all__ = ["Layouts", "likely"]
