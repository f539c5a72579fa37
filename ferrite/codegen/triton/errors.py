"""What the printer of Triton source says no to."""

from __future__ import annotations


class UnsupportedKernel(Exception):
    """This kernel has no Triton source; the message says why."""
