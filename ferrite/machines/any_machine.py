"""What is asked of every device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class AnyMachine(ABC):
    # --- calls of torch, where one stands for several or several for one ----------------------------------------------

    # What a call takes by itself, or a launch. Below what was measured, so that one is taken where it pays on other
    # machines, too: four small kernels take 55 microseconds on an H200. On a CPU it was not measured by itself: what
    # comes of it is the table in `passes/pre_grad/horizontal.py`.
    call_seconds: float = 4e-6
    # What a copy reads and writes; below what was measured, for the same reason: two cores of a Neoverse N1 copy 6e10.
    copy_bytes_per_second: float = 1e10

    # --- what is written, and read again: not measured one by one, but with all that was compiled by them -------------

    # At an element, up to which each of its readers computes it again: about what writing it and reading it take.
    max_recomputed_additions: int = 12
    max_recomputed_loads: int = 2
    # Over an element, up to which it asks all of them whether they took it; else they add to memory where it is.
    max_asked_windows: int = 32
    # Along both axes of a transposition, for tiles to pay.
    min_tiled_elements: int = 8
    # That are reduced, for a second reduction to take the results of the first.
    min_reused_elements: int = 4096
    # Of a product in training that kernels of torch hold in memory before it is added up: the table is in
    # `passes/pre_grad/einsum.py`.
    max_held_product_bytes: int = 1 << 24

    @abstractmethod
    def flops_per_second(self, itemsize: int) -> float:
        """Of matrix products on elements of so many bytes."""
