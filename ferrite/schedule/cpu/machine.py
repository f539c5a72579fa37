"""What the scheduler knows of a processor: plain numbers, so that a schedule can be made for another one.

Every number that tells about a processor is a field here, with its unit and its reason. What holds on any of them
(limits on code and on the time to compile it, the least size for which a form pays) is a constant beside its use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Machine:
    """One processor. Sizes of caches and costs are those of a Neoverse N1, which are below those of its successors and
    of today's x86 servers; only the vectors are asked of the processor that code is made for (`targets/cpu.py`)."""

    # --- registers and caches, in bytes
    vector_bytes: int = 16  # of one register: 16 NEON, 32 AVX2, 64 AVX-512
    l1_bytes: int = 1 << 15  # of data; the N1 has 64 KiB, most x86 32 or 48
    l2_bytes: int = 1 << 19  # that a thread has for itself; the N1 has 1 MiB, of which code and the stack need some
    line_bytes: int = 64  # that come from memory together

    # --- threads, in additions of one element
    grain: int = (
        1 << 17
    )  # that a thread should have to be woken for, which takes some microseconds: about as long as these
    serial_points: int = 1 << 14  # an eighth of a grain: so little work that threads do not matter to what is fused
    min_shared_rows: int = 8  # that a group must have where there is work for threads: rows are what they share
    min_region_grains: int = 16  # in all, for a region of many small kernels: with less, moving their operands, which
    # are in the caches of one core at first, takes as long as a region saves
    small_kernel_grains: int = 4  # a kernel of up to so many is one of many; a larger one is worth waking threads for
    region_spread: int = 16  # and may be one of many if it is at most this part of all: so threads end together
    min_thread_columns: int = 128  # that a thread gets of a row that is shared: eight lines of the cache, in f32

    # --- loops
    block_elements: int = 4096  # of a flat loop that one step of a thread takes: 16 KiB of f32, half of the L1 cache
    tile_columns: int = 4096  # whose states wait in a tile while rows are reduced: as many bytes
    tile_side: int = 128  # elements of a tile that is turned: 64 KiB of f32, and rows of eight lines
    scan_rows_at_once: int = 2  # a step waits for the one before it, but for none of another row
    store_and_load_additions: int = 8  # what keeping a value in a tile costs, in additions

    # --- prefetching of rows, where the hardware does not
    min_prefetch_bytes: int = 1024  # of a row: a shorter one is there soon enough
    max_prefetched_rows: int = 4  # of different tensors

    # --- memory of a run
    min_split_bytes: int = 1 << 16  # that two runs must save over one: one more native call costs a few microseconds

    def lanes(self, *dtypes: torch.dtype) -> int:
        """How many elements one vector instruction handles where values of these types are computed."""
        widest = max((dtype.itemsize for dtype in dtypes), default=4)
        return max(self.vector_bytes // max(widest, 1), 1)
