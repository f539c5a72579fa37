"""Devices that ferrite compiles for: one file is one device's way through the compiler, behind the passes."""

from ferrite.targets.choose import buildable, target_for
from ferrite.targets.target import Target

__all__ = ["Target", "buildable", "target_for"]
