"""Devices that ferrite compiles for: one file is one device's way through the compiler, behind the passes."""

from ferrite.targets.choose import target_for
from ferrite.targets.target import Target

__all__ = ["Target", "target_for"]
