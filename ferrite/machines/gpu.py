"""What the compiler knows of a GPU: plain numbers, so that a schedule can be made without one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ferrite.machines.any_machine import AnyMachine
from ferrite.machines.gpu_attention import ATTENTION_BLOCKS, AttentionMachine
from ferrite.tune import ProductConfig

MATRIX_UNIT_BYTES = 16  # that they are given at once: rows had better begin at a multiple of it
MATRIX_UNIT_SIDE = 16  # of the smallest blocks that Triton has matrix units multiply, on any GPU


@dataclass(frozen=True)
class MatrixSpeeds:
    """Speeds of torch's matrix products as measured on an H200; between accelerators with matrix units their quotients
    differ less than they do. Rows that begin at a multiple of 4 bytes, but not of 16, lose less of the speed than
    others."""

    flops: float = 7e14  # per second in 16 bits, with aligned sides
    bytes: float = 3e12  # per second
    on_words: float = 0.36  # the part of the speed that is left where rows begin at multiples of 4 bytes
    unaligned: float = 0.22  # and where they do not
    call: float = 35e-6  # seconds that each further call takes in a training step, where the host sets the pace
    margin: float = 1.1  # by which padding must win

    def product(self, sides: Sequence[int], itemsize: int, part: float = 1.0) -> float:
        """Seconds of a product of b times [m, k] @ [k, n]."""
        batch, m, k, n = sides
        speed = self.flops * 2 / itemsize * part
        return max(2 * batch * m * k * n / speed, itemsize * batch * (m * k + k * n + m * n) / self.bytes)

    def copy(self, elements: int, itemsize: int) -> float:
        """Seconds of a call that copies so many."""
        return self.call + 2 * elements * itemsize / self.bytes


@dataclass(frozen=True)
class ProductBlocks:
    """How matrix products of our own are arranged that were not measured one by one. `few_rows`: up to 16 of them, or
    `few_rows_and_many_columns` where that gives every multiprocessor a program; `some_rows`: up to 32; `thin`: with a
    side that is one block; `large`: others, in the first way that gives every multiprocessor a program, and that the
    GPU has descriptors for; `in_32_bits`: those whose factors have so many."""

    few_rows: ProductConfig
    few_rows_and_many_columns: ProductConfig
    some_rows: ProductConfig
    thin: ProductConfig
    large: tuple[ProductConfig, ...]
    in_32_bits: ProductConfig


# Measured: `bench/results/gpu-products.md`, but for products in 32 bits.
PRODUCT_BLOCKS = ProductBlocks(
    few_rows=ProductConfig(16, 16, 256, warps=2, stages=5),
    few_rows_and_many_columns=ProductConfig(16, 64, 128, warps=4, stages=4),
    some_rows=ProductConfig(16, 32, 256, warps=4, stages=4),
    thin=ProductConfig(64, 64, 128, warps=4, stages=4),
    large=(
        ProductConfig(128, 256, 64, warps=8, stages=4, resident=True),
        ProductConfig(128, 256, 64, warps=8, stages=3),
        ProductConfig(128, 128, 64, warps=8, stages=4, resident=True),
        ProductConfig(128, 128, 64, warps=4, stages=4),
        ProductConfig(64, 128, 64, warps=4, stages=4),
        ProductConfig(64, 64, 64, warps=4, stages=4),
    ),
    in_32_bits=ProductConfig(64, 64, 32, warps=4, stages=3),
)


@dataclass(frozen=True)
class GpuMachine(AnyMachine):
    """The numbers are those of an H200; where one was measured, what was seen stands beside it.

    `threads` and `registers`: of one multiprocessor. `shared_bytes`: memory that its threads share. `cache_bytes`:
    of all of them.
    """

    multiprocessors: int = 132
    threads: int = 2048
    registers: int = 1 << 16
    shared_bytes: int = 228 << 10
    cache_bytes: int = 50 << 20
    has_descriptors: bool = True  # it moves blocks of memory by itself, from compute capability 9.0 on

    @property
    def program_shared_bytes(self) -> int:
        """What one program may have of them: a KiB is the system's."""
        return self.shared_bytes - (1 << 10)

    # --- programs -----------------------------------------------------------------------------------------------------

    @property
    def enough_programs(self) -> int:
        """Programs that keep all multiprocessors busy: some wait for memory while others compute."""
        return 4 * self.multiprocessors

    def pieces(self, programs: int, work: int) -> int:
        """In how many parts a reduction is shared that so many programs would do otherwise, with so much work each.
        Measured: sums of 131072 x 1024 in bf16, 71 us with 32 for each multiprocessor, 77 with 8; columns 75 and 83; of
        32768 x 1024, 24 with either, and columns 30 and 25. Steps whose loads are under way while others are added up
        are no quicker (78 and 84 with 8, 71 and 83 with 32), nor are columns in wider blocks (79 to 101)."""
        few = min(self.enough_pieces // programs, work // self.min_piece_elements)
        many = min(self.long_piece_programs * self.multiprocessors // programs, work // self.long_piece_elements)
        return max(few, many)

    @property
    def enough_pieces(self) -> int:
        return self.piece_programs * self.multiprocessors

    # Pieces of one multiprocessor, and where each of them is long; and elements of one, at least.
    piece_programs: int = 8
    long_piece_programs: int = 32
    min_piece_elements: int = 4096
    long_piece_elements: int = 1 << 15
    # Programs that go through rows and keep what columns come to, and rows whose loads are under way in one.
    # Of fewer elements than `shared_elements`, the cache has the rows still when the columns are reduced, and too few
    # rows are there for each program.
    # Measured: layer norm backward of 32768 x 1024 in bf16, 73 us with 1024 programs and 3 rows, 81 with 2 rows, 90
    # with one; 77 with 512 programs; 120 where rows and columns are two kernels (the memory's time is 48). In BERT's
    # training, 512 programs of 4 rows each: 47 us for 2048 x 768, 45 for the gradient of gelu and its columns in 2048 x
    # 3072; Inductor's two kernels take 13 and 22.
    # Rows have so many columns at least: of fewer, a step of a program is too little work.
    # Measured: gradient of relu and batch norm in bf16, channels side by side, with its sums: of 32 x 256 x 56 x 56 147
    # us with kept columns, 80 as two kernels and the sums' last; of 32 x 512 x 28 x 28 48 either way.
    row_programs: int = 1024
    shared_elements: int = 1 << 23
    min_kept_columns: int = 512
    rows_under_way: int = 3
    min_piece_rows: int = 4  # that a program goes through: with fewer, its columns cost more than they save
    kept_column_elements: int = 32  # of a row that one thread has
    # Elements that one program may have though most of the machine is idle: some microseconds, as one launch takes.
    one_program_elements: int = 1 << 15
    # Points of operations up to which one program does them as fast as many: what is fused is then no matter of how
    # programs share it.
    # Measured: sums of rows and of columns of 32 x 128 in bf16 take 4.5 us as one kernel and as two, of 64 x 256 6.9 as
    # one and 6.0 as two, of 128 x 512 16.6 and 6.4.
    one_program_points: int = 1 << 12
    # Elements of rows, or of columns, up to which a program has all of them at once where one kernel goes along both:
    # eight of 512 threads, in registers.
    # Measured: no difference between 1024 and 8192 in backward passes of layer norms of 1024 to 8192 columns.
    max_held_elements: int = 1 << 12
    # Elements of a block that one thread has: 16 bytes of a 16-bit type are one load.
    # Measured: add of 32768 x 1024 in bf16, 52 us with 8 and with 16 (the memory's time is 48).
    thread_elements: int = 8
    # The same where random numbers are made.
    # Measured: dropout of 32768 x 1024 in bf16, 47 us with 16, 51 with 8 (the memory's time is 32).
    random_elements: int = 16
    # Elements of a block that is not gone through in steps, beyond which a thread has twice as many: of a row that is
    # reduced, and of others.
    # Measured: softmax of rows of 2048 to 16384 in bf16 is within 3 % with 1024 to 16384; a chain of activations takes
    # 93.6 us with 1024 to 4096, 96.4 with 512.
    max_row_elements: int = 4096
    max_flat_elements: int = 2048
    # The same where a row is reduced: fewer threads have less to tell each other.
    # Measured: softmax of 32768 x 1024 in bf16, 37 us with 16, 42 with 8, 54 with 4 (the memory's time is 32).
    row_elements: int = 16
    # The same where rows are gone through several times, and only reduced.
    # Measured: argmax over rows of 32768 x 1024 in bf16, 22 us with 32, 24 with 16 (the memory's time is 16).
    reduced_elements: int = 32
    # The same where columns are reduced, a block of rows at a time; where there are fewer programs than that needs to
    # keep all multiprocessors busy; and where a program holds its columns.
    # Measured: statistics of 32 x 512 x 28 x 28 in bf16, channels side by side, 16 us with 16, 27 with 8; sums of 1792
    # pieces of 256 columns, by 16 programs, 7 us with 8, 13 with 16. Statistics of 32 x 1024 x 14 x 14, held: 9.4 us
    # with 64, 14 with 32, 26 with 16; of 32 x 64 x 56 x 56: 8.7, 13 and 23 (the memory's time is 3).
    column_elements: int = 16
    few_column_elements: int = 8
    held_column_elements: int = 64
    # Elements that one program may scan though most of the machine is idle: three launches take as long.
    # Measured: 8 rows of 32768 in bf16, 7.6 us by one program each, 8.7 shared; of 131072, 37.6 and 8.8; one row of
    # 65536, 19.6 and 7.0.
    # And those of a piece, at most, where a longer scan is shared: one block holds them.
    # Measured: a sum along 2^27 numbers in bf16, 202 us with 8192, 259 with 16384, 206 with 4096 (a copy takes 129);
    # 205 where a program goes through 16384 in steps, with loads of three under way; 200 where the last pieces, of
    # which the cache has some still, come first the second time.
    long_scan_elements: int = 1 << 15
    scan_piece_elements: int = 1 << 13
    # Elements of a row that a program sorts, and one thread's: of longer ones the source takes seconds to compile, the
    # more the more a thread has, and torch's own sorts have enough to do.
    max_sorted_elements: int = 256
    sort_thread_elements: int = 4
    # Elements of a flat block, which four warps share; half as many where a point takes so many additions or more, as
    # its values need registers; fewer where multiprocessors would be idle, but no fewer than one warp's of four each.
    # Measured: the first together with `thread_elements`. Activations of 65536 elements in bf16, 4.2 us with 128, 4.0
    # with 64, 4.7 with 256; digamma, erfinv and i1 of 2^25 in float32, 1174 us with half a block, 1192 with all of it.
    flat_block: int = 1024
    heavy_point_additions: int = 150
    min_block_elements: int = 128
    # Elements of a block of windows, and of these one thread's.
    # Measured: pad and max pool of 64 x 256 x 56 x 56 in bf16, 62 us with 256 and 4, 82 with 1 or 2, 73 with 128 and 4,
    # 100 with 512, 162 with 1024; 88 as one flat axis.
    window_block: int = 256
    window_elements: int = 4
    # Elements from one lane to the next, up to which lanes share lines of memory.
    # Measured: max pool of 64 x 256 x 56 x 56 in bf16, 5 x 5 in steps of 5, 46 us where it is near, 113 where it is
    # not; 3 x 3 in steps of 3, 58 and 181; 2 x 2 in steps of 2, 39 and 36.
    max_lane_step: int = 8
    # Lanes of a block for each element: where more would lie outside, neighbouring axes are joined, which costs
    # divisions.
    # Measured: 90 columns of 128, plus 1, in bf16: 28.0 us joined, 29.8 with 1.42 lanes for each element; 100 columns
    # 32.7 and 32.4 (1.28 lanes).
    max_lanes_per_element: float = 1.25
    # Elements of a reduction that are written out: along memory, where neighbours load from far places; across it,
    # where every one is a load of its own, and more would not fit into registers; and of a window, where they are near.
    # Measured: sums of 2^25 numbers in bf16 in rows of 8, 142 us written out, 22 as rows; of 16, 140 and 21; of 4, 38
    # either way. Sums across of 8 to 64, 23 to 25 either way; max pool 3 x 3, 67 written out, 269 not. All of these:
    # bench/results/gpu-fields.md.
    max_written_along: int = 4
    max_written_across: int = 32
    max_written_window: int = 64
    # Elements of a block of short rows: a program has several.
    # Measured: softmax of rows of 64 in bf16, 37 us with 2048, 40 with 1024.
    rows_block: int = 2048
    # Elements of a row that a program keeps in registers, as one value of 4 bytes each: half of the registers of a
    # multiprocessor. With several such values alive, as many times fewer.
    kept_elements: int = 1 << 15
    # The sides of a block of a transposition, in bytes.
    # Measured: 131072 x 1024 in bf16, 135 us with 256, 143 with 128 (the memory's time is 129); 32768 x 1024 in f32, 70
    # with 256, 80 with 128 (64).
    tile_bytes: int = 256
    tile_elements: int = 16  # of one thread
    # Elements that one step of a loop takes: of columns, of a row that is too long to be kept, and of one that is gone
    # through several times, where fewer programs at one time leave more of their rows in the cache.
    # Measured: sums of exponentials of 4096 rows of 50304 in bf16, 113 us with 4096 shared by 8 warps, 121 with 8192
    # (the memory's time is 99). Softmax of 2048 rows of 65536, 159 us with 16384 shared by 32 warps, 163 with 8192
    # shared by 32, 181 by 16 (the memory's time is 129).
    step_elements: int = 4096
    row_step_elements: int = 4096
    again_step_elements: int = 16384
    # Elements of columns that a program holds all at once, instead of going through them in steps; twice as many where
    # there are fewer programs than multiprocessors.
    column_block: int = 1 << 13
    # Rows of a block of columns, whose `step_elements` are so at least 64 columns: 128 bytes in 16 bits, one line.
    max_block_rows: int = 64
    # Elements of rows that are only reduced, up to which `reduced_elements` holds: of more, more threads have some.
    # Measured with rows of 1024 alone (see there); of more than this a thread would have more than 128.
    max_reduced_block_elements: int = 4096
    # Elements in all, from which on a reduction with few results is shared.
    # Measured: sums of 2^13 to 2^19 numbers, 3.9 to 6.5 us, are the same with 2^12 to 2^19: `one_program_elements` and
    # `min_piece_elements` decide those.
    min_split_elements: int = 1 << 15
    # What is added up in one piece of a matrix product at least, where another kernel adds the pieces up.
    # Measured: linears of 4 to 16 rows, 1024 to 8192 summed and 256 to 1024 columns, in bf16, take 7.0 to 9.9 us with
    # 64 to 1024, within 8 % each.
    min_piece_summed: int = 512
    products: ProductBlocks = PRODUCT_BLOCKS
    attention: AttentionMachine = ATTENTION_BLOCKS
    # Rows of one factor, up to which a program has all of them, and computes what little makes an element of the other
    # factor where it reads it: so many loads and additions.
    # Measured: a linear of 16 rows in bf16 and 4096 x 4096 weights of 8 bits with scales, 12.5 us with both loads, 27.6
    # with a weight in memory; of 64 and 128 rows 28 and 32 either way.
    max_factor_readers: int = 64
    max_factor_loads: int = 3
    max_factor_additions: int = 8
    # Bytes that a kernel touches, up to which starting it counts: the memory has them in six microseconds.
    small_bytes: int = 24 << 20
    # Operations of several kernels that become one kernel: in each program they run one after the other.
    max_members_beside: int = 12
    # A small tensor is computed where it is read, if an element takes so few additions and loads: the reader moves at
    # least as many bytes meanwhile. And if so many read each element; with fewer, it is no table, but work that is
    # shared.
    # Measured: a learnt norm of 64 x 256 x 28 x 28 in bf16, 16.8 us where each element computes its factor of 16
    # additions and two loads, 18.9 where a kernel makes them; of 16 x 4096, 3.9 and 6.3; of 2 x 16384, 4.0 and 6.4; of
    # 8 x 2048 x 7 x 7, 5.5 and 5.3.
    max_table_additions: int = 48
    max_table_loads: int = 4
    min_table_readers: int = 2
    # Columns of a matrix up to which it does not matter where its rows begin: writing it takes no time.
    max_thin_columns: int = 16
    # Bytes side by side that make a load of a warp whole, and those that memory gives at once.
    line_bytes: int = 128
    sector_bytes: int = 32
    # Launches that are alike from which on they are one, which takes another launch, of a kernel that writes addresses
    # into memory; lanes up to which a block may be larger than a problem needs; and bytes of what such launches hand to
    # others within a run, which are there for all of them at once.
    # Measured: two small kernels take 5.7 us either way, three 5.9 as one and 7.2 apart, six 6.6 and 12. Lanes of 512
    # to 16384 make no difference to 64 tensors of 1000 to 259000 elements, bytes of 2^16 to 2^24 none to the norms of
    # 64 gradients; without any bytes these take 387 instead of 293.
    min_grouped_launches: int = 3
    max_grouped_block: int = 4096
    max_bytes_between: int = 1 << 20
    # Of the result of a product, from which on it is not to be there twice, padded and not.
    min_bytes_in_rows: int = 32 << 20
    # Bytes that small kernels may keep which wait for the end of a program, to be one launch there.
    max_postponed_bytes: int = 16 << 20
    # Bytes that two runs must save over one: torch's allocator rounds large blocks up to 2 MB.
    min_split_bytes: int = 2 << 20

    # --- calls of torch -----------------------------------------------------------------------------------------------

    # Below what was measured, so that one call is taken instead of several where it pays on slower GPUs, too: copies of
    # 512 MB read and write 4.17e12 bytes a second.
    copy_bytes_per_second: float = 1e12
    matrix_speeds: MatrixSpeeds = MatrixSpeeds()
    # Launches of a run from which on they are a CUDA graph.
    # Measured: 4 small kernels take 55 us one by one and 24 as a graph, 16 take 100 and 52.
    min_graph_launches: int = 3

    def flops_per_second(self, itemsize: int) -> float:
        """Of matrix products on elements of so many bytes."""
        return self.matrix_speeds.flops * 2 / max(itemsize, 1)


H200 = GpuMachine()
