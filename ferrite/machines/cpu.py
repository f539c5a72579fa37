"""What the compiler knows of a processor: plain numbers, so that code can be made for another one.

Every number that tells about a processor is a field here, with its unit and its reason. "Tried" says what
`python -m bench.machine` gave on a Neoverse N1 (`bench/results/machine-aarch64.md`): the time with another value to the
time with this one. Where nothing is said, it follows from the sizes of caches and registers, or a wrong value costs
little time and no result. What holds on any of them (limits on code, on rounding and on the time to compile) is a
constant beside its use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ferrite.machines.any_machine import AnyMachine
from ferrite.machines.beside_torch import (
    BESIDE_TORCH,
    EMBEDDING_COMPRESSION,
    ON_ARM,
    ON_X86,
    BesideTorch,
    DepthwiseBesideTorch,
    EmbeddingCompression,
)


@dataclass(frozen=True)
class Machine(AnyMachine):
    """One processor. What a field has by itself is a Neoverse N1's, which is below its successors and today's x86
    servers; vectors and caches are asked of the processor that code is made for (`targets/cpu.py`). The sizes of tiles
    decide no rounding."""

    # --- registers and caches, in bytes
    vector_bytes: int = 16  # of one register: 16 NEON, 32 AVX2, 64 AVX-512
    registers: int = 32  # for vectors: 16 with AVX2
    l1_bytes: int = 1 << 15  # of data; the N1 has 64 KiB, most x86 32 or 48; never asked: it cuts sums
    l1_way_bytes: int = 1 << 14  # that lie so far apart have one place in the cache, of which it has a few
    l2_bytes: int = 1 << 19  # that a thread has for itself; the N1 has 1 MiB, of which code and the stack need some
    line_bytes: int = 64  # that come from memory together

    # --- threads, in additions of one element
    # That a thread should have to be woken for, which takes some microseconds: about as long as these.
    grain: int = 1 << 17
    serial_points: int = 1 << 14  # an eighth of a grain: so little work that threads do not matter to what is fused
    min_shared_rows: int = 8  # that a group must have where there is work for threads: rows are what they share
    min_region_grains: int = 16  # in all, for a region of many small kernels: with less, moving their operands, which
    # are in the caches of one core at first, takes as long as a region saves
    small_kernel_grains: int = 4  # a kernel of up to so many is one of many; a larger one is worth waking threads for
    region_spread: int = 16  # and may be one of many if it is at most this part of all: so threads end together
    min_thread_columns: int = 128  # that a thread gets of a row that is shared: eight lines of the cache, in f32

    # --- loops
    block_elements: int = 4096  # of a flat loop that one step of a thread takes: 16 KiB of f32, half of the L1 cache
    light_point_additions: int = 16  # at a point, up to which four vectors are side by side in a loop, ...
    middling_point_additions: int = 60  # ... and up to which two are: with more, registers would not do
    # (tried: chains that wait for themselves would rather have 32 and 120, 0.76 and 0.90; many values alive were not)
    tile_columns: int = 4096  # whose states wait in a tile while rows are reduced: as many bytes
    tile_side: int = 128  # elements of a tile that is turned: 64 KiB of f32, and rows of eight lines
    # A step of a scan waits for the one before it, but for none of another row. Tried: one 1.00, four 1.24.
    scan_rows_at_once: int = 2
    store_and_load_additions: int = 8  # what keeping a value in a tile costs, in additions
    min_window_step_elements: int = 5  # from one window to the next: so far apart, vectors are better made of the
    # elements of one window than of neighbouring windows
    windows_at_once: int = 4  # neighbours that share weights, which are loaded once for all of them
    window_columns: int = 64  # that go through the rows of an image together; tried: 16 1.3, all of 672 1.5
    min_scan_rows: int = 64  # for which rows are scanned several at once; tried: from 16 to 512 rows no difference
    strip_vectors: int = 4  # side by side: what a column alone decides stays in registers; tried: 2 and 8 alike
    min_strip_additions: int = 8  # saved at every point, for a strip to pay; tried: never 5.6, with one 0.9 to 1.0
    min_strip_rows: int = 8  # for which that pays; tried: 8 and 16 rows without 1.2 and 1.6, 4 rows with 1.1

    # --- reductions
    min_split_elements: int = 1 << 15  # in all: of fewer, one thread has the sum before another is awake
    max_split_results: int = 64  # with more, threads share the results, and need not share what is reduced
    max_column_parts: int = 8  # that columns are cut into, where threads can share nothing else
    max_rows_without_tile: int = 64  # to reduce by columns: for so few, none pays; tried: 32 rows with one 1.1
    min_argmax_values: int = 512  # of fewer, the place moves along with the greatest; tried: 512 without 1.5, 1024 1.9
    min_argmax_blocks: int = 8  # one of which is read again

    # --- matrix products
    # Rows, or columns, up to which packing does not pay where vectors lie along the other side: of each packed element
    # as many sums are made.
    max_direct_side: int = 8
    # Columns for which a left factor that lies along the sums is read as it is: packed it takes 1.03 of the time with
    # 64 columns, 0.97 with 768, and 0.88 where sums are as long as 3072.
    max_unpacked_columns: int = 128
    block_rows: int = 128  # of a result that are summed up together: what they need of a factor stays in the L2 cache
    block_columns: int = 96  # beside them
    block_places: int = 1024  # of the result of a convolution: weights are packed once for so many
    product_blocks: int = 32  # of a result, for threads to share, if each has something to do:
    min_block_products: int = 1 << 19
    min_outer_blocks: int = 8  # blocks of rows, in all matrices of a batch, for threads to share these
    max_shared_panel_bytes: int = 1 << 25  # of a factor that is packed as a whole, for all threads
    products_of_an_addition: int = 2  # that take as long as one addition with its loads and stores

    # Of a few rows times a matrix of bytes: columns that are summed up together, and whether what the next ones will
    # read is asked for, of a single row and a matrix that is too large for the L2 cache. Tried on a Xeon with 4096 by
    # 4096 bytes, which its L3 cache holds: eight columns 1.0, with asking 0.84, four 0.72, two 0.70; with 11008 by 4096
    # all alike, as fast as memory is read.
    columns_read_once: int = 8
    asks_for_next_columns: bool = False
    # Whether products of bytes have one factor without a sign: the right one is stored with 128 added to each byte, and
    # what that adds to a row is taken from its sums. So multiplies x86; Arm multiplies numbers with signs.
    unsigned_bytes: bool = False

    # --- attention: rows of a block, which share what they read of keys and values; keys that are gone through at once,
    # which cut sums: the same on every machine.
    # Queries, scores and results of a block are three tiles of 16 KiB, for rows of 64 elements. Not tried.
    attention_rows: int = 64
    attention_keys: int = 64
    # Of a block with so few rows that vectors lie along keys and values: sums in registers, with what is multiplied
    # beside them, and keys at once. Not tried with fewer than 32 registers.
    few_row_sums: int = 16
    few_row_keys: int = 8
    narrow_rows_cost: float = 1.05  # times as long take rows in narrower blocks, which share less; not tried

    # --- additions to tables, row by row
    min_sorted_row_elements: int = 64  # sorting must be little beside adding a row; tried: 128 without 1.7, 64 1.1
    max_table_rows_per_source: int = 4  # where rows without a source need not be gone through otherwise
    row_vectors_at_once: int = 8  # kept in registers while the sources of a row are added; tried: 4 and 16 alike
    max_shares: int = 32  # of a table, one for a thread: each goes through all ids
    min_share_elements: int = 64  # of a row, for each share: going through the ids must be little beside it

    # --- prefetching of rows, where the hardware does not
    min_prefetch_bytes: int = 1024  # of a row: a shorter one is there soon enough
    max_prefetched_rows: int = 4  # of different tensors

    # --- memory of a run
    min_split_bytes: int = 1 << 16  # that two runs must save over one: one more native call costs a few microseconds

    # --- calls of torch, where one stands for several or several for one
    # Of matrix products in 32 bits, with all threads: two cores of an N1 have 6.2e10 in OpenBLAS, and can have 8e10.
    product_flops: float = 6e10
    # A stack and what takes it apart cost about half of a small call for each member, and 15 microseconds: tiny calls,
    # by the bytes of an operand, are one where they are so many.
    min_tiny_calls: int = 32
    tiny_operand_bytes: int = 2048
    # Multiplications, or rows, up to which torch takes its quick way: products that grow out of it take 1.2 to 3.8 of
    # the time (`bench/results/horizontal-aarch64.md`).
    quick_product_multiplications: int = 8192
    max_quick_rows: int = 8
    # Of the memory that a product moves: where weights are so little, they may be joined in each call.
    small_concat_share: float = 0.05
    # Multiplications from which a convolution of torch's is worth several calls, or images that are turned for it:
    # smaller ones are no faster (the tables in `passes/post_grad/convolutions.py` and `channels_last.py`).
    min_split_convolution: int = 1 << 21
    # And from which a constant weight pays in another layout: in general, and of one by one (`bench/layouts.py`, the
    # table in `passes/freezing/layouts.py`).
    min_weight_layout_convolution: int = 1 << 21
    min_weight_layout_pointwise: int = 1 << 25
    # Rows from which on another layout of a weight pays: a single one is multiplied at the speed of memory, however the
    # weight lies (the table in `passes/freezing/layouts.py`).
    min_layout_rows: int = 2
    # Keys up to which torch's kernel for attention is level with products while training: see `bench/attention.py`.
    max_training_attention_keys: int = 128

    # --- beside torch's own kernels
    # With all of so many cores OpenBLAS is level with the Arm Compute Library, or ahead: measured with two.
    max_openblas_cores: int = 4
    few_threads: int = 2  # with which attention was measured beside MKL's
    beside_torch: Mapping[str, BesideTorch] = field(default_factory=lambda: BESIDE_TORCH, hash=False)  # by its library
    depthwise: DepthwiseBesideTorch = ON_ARM
    compression: EmbeddingCompression = EMBEDDING_COMPRESSION
    relu_keeps_negative_zero: bool = False  # in torch's vector code; its scalar code does, on any

    def lanes(self, *dtypes: torch.dtype) -> int:
        """How many elements one vector instruction handles where values of these types are computed."""
        widest = max((dtype.itemsize for dtype in dtypes), default=4)
        return max(self.vector_bytes // max(widest, 1), 1)

    def flops_per_second(self, itemsize: int) -> float:
        """Of matrix products on elements of so many bytes; shorter ones are computed in 32 bits."""
        return self.product_flops * min(4 / itemsize, 1.0)

    @property
    def product_tile(self) -> tuple[int, int]:
        """Rows, and vectors beside each other, of a tile of sums that registers hold, with what is multiplied beside
        them. Tried on the N1: eight by three 1.5, six by four 1.1, eight by two 1.1. Longer vectors leave a broadcast
        element less to do, so that it should be used more often."""
        if self.vector_bytes <= 16:
            return 4, self.registers // 8
        return (8, 3) if self.registers >= 32 else (4, 3)

    def dot_tile(self, rows: int) -> tuple[int, int]:
        """Rows, and columns beside each other, of a tile of sums each of which is a vector, for so many rows. A vector
        of a factor is used four times; with more rows, lanes are added up for longer at the end of each sum."""
        tall = min(rows, 4)
        return tall, min(self.registers * 3 // 4 // tall, 8)

    @property
    def convolution_tile(self) -> tuple[int, int]:
        """Places, and vectors of channels beside each other, of a tile of sums that registers hold."""
        return 4, self.registers // 8

    @property
    def attention_tile(self) -> tuple[int, int]:
        """Vectors of rows, and keys or columns beside them, whose sums registers hold: an element of a key is used for
        all the rows."""
        return (4, 4) if self.registers >= 32 else (2, 4)

    @property
    def max_dot_rows(self) -> int:
        """Rows up to which packing the right factor takes longer than it saves, where vectors could lie along what is
        summed. At its end each such sum is a vector whose lanes are added up: the more they are, the longer that takes
        beside multiplying. On the N1 packing takes 1.03 of the time with 64 and 128 rows, 0.95 with 512, 0.77 with 3136
        and short sums. With AVX-512 it should be even with about 32: 64 rows take 1.1 to 1.5 of the time of MKL
        without, and 0.8 if nothing need be packed."""
        return 64 if self.vector_bytes <= 16 else 32

    def panel_columns(self, dtype: torch.dtype) -> int:
        """Columns of a matrix that a kernel multiplies at once: those of a panel, where the matrix lies in panels."""
        return self.product_tile[1] * self.lanes(dtype)


NEOVERSE_N1 = Machine()
XEON = Machine(
    vector_bytes=64,
    columns_read_once=4,
    asks_for_next_columns=True,
    unsigned_bytes=True,
    depthwise=ON_X86,
    relu_keeps_negative_zero=True,
)  # with AVX-512
