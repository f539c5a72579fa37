"""What the scheduler knows of a GPU: plain numbers, so that a schedule can be made without one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuMachine:
    """The numbers are those of an H200; where one was measured, what was seen stands beside it.

    `threads` and `registers`: of one multiprocessor. `shared`: bytes of memory that its threads share. `bandwidth`:
    bytes a second that a large copy reads and writes.
    """

    multiprocessors: int = 132
    threads: int = 2048
    registers: int = 1 << 16
    shared: int = 228 << 10
    cache: int = 50 << 20
    bandwidth: float = 4.17e12  # measured: copies of 512 MB

    # --- programs -----------------------------------------------------------------------------------------------------

    @property
    def enough_programs(self) -> int:
        """Programs that keep all multiprocessors busy: some wait for memory while others compute."""
        return 4 * self.multiprocessors

    # Elements of a block that one thread has: 16 bytes of a 16-bit type are one load.
    # Measured: add of 32768 x 1024 in bf16, 52 us with 8 (the memory's time is 47).
    thread_elements: int = 8
    # Elements of a flat block, which four warps share.
    flat_block: int = 1024
    # Elements of a block of short rows: a program has several.
    rows_block: int = 1024
    # Elements of a row that a program keeps in registers, as one value of 4 bytes each: half of the registers of a
    # multiprocessor. With several such values alive, as many times fewer.
    kept_elements: int = 1 << 15
    # Elements that one step of a loop takes, where a row is too long to be kept.
    step: int = 4096
    # Bytes side by side that make a load of a warp whole.
    line: int = 128
