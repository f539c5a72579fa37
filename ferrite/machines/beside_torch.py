"""Where kernels of our own were measured to be as fast as those of the libraries that torch has.

A library stands for the processors that it was measured on. What a method answers is None where a kernel of our own, or
another call, pays, and the reason to leave an operator to torch where it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ferrite.errors import Refusal
from ferrite.tune import ProductProblem


@dataclass(frozen=True)
class MatrixProduct:
    """One of float32. `lie_along`: both factors lie along what is summed, as in a linear layer; `in_panels`: the right
    one is constant, and can lie as a kernel of our own reads it; `has_all_cores`: torch works with all cores, of which
    there are few."""

    rows: int
    inner: int
    columns: int
    lie_along: bool = True
    in_panels: bool = False
    has_all_cores: bool = True

    @property
    def multiplications(self) -> int:
        return self.rows * self.inner * self.columns


@dataclass(frozen=True)
class AttentionSizes:
    """Of attention in float32: rows and keys of a matrix, and the elements of a head. `has_few_threads`: torch works
    with two threads, or one."""

    rows: int
    keys: int
    width: int
    has_few_threads: bool = True


@dataclass(frozen=True)
class BesideTorch:
    """A library beside which nothing was measured: everything is left to torch."""

    def product(self, given: MatrixProduct) -> Refusal | None:
        """A matrix product as a kernel."""
        return Refusal("products of our own are measured on Arm, and with AVX-512 beside MKL")

    def byte_product(self, given: MatrixProduct) -> Refusal | None:
        """A matrix product of bytes as a kernel. Measured (`bench/results/byte-products-x86_64.md`) with one thread
        beside oneDNN on a Xeon with VNNI alone: 0.33 to 1.50 of its time, 0.74 in the geometric mean."""
        return Refusal("products of bytes of our own are measured with one thread only")

    def product_layout(self, given: MatrixProduct, copied: int) -> Refusal | None:
        """A matrix product whose factors lie along what is summed, with one of them copied so that it does not: so many
        elements for each matrix."""
        return Refusal("it is no product that the Arm Compute Library would take")

    def attention(self, given: AttentionSizes) -> Refusal | None:
        """Attention as a kernel."""
        return Refusal("attention of our own is not measured beside torch's on this processor")

    def convolution(self, multiplications: int) -> Refusal | None:
        """A convolution of float32 as a kernel."""
        return Refusal("convolutions of our own are measured on Arm only")

    def lone_convolution(self, taps: int) -> Refusal | None:
        """The same where no other is near."""
        return Refusal("convolutions of our own are measured on Arm only")


@dataclass(frozen=True)
class BesideArmComputeLibrary(BesideTorch):
    """On a Neoverse N1, with one thread and with two."""

    # --- what torch gives to the library: the others go to OpenBLAS
    min_side: int = 9
    min_multiplications: int = 8193

    # --- products: multiplications of one matrix, products of a sum, sides
    min_product: int = 1 << 18
    small_product: int = 1 << 20
    min_summed: int = 16
    long_sum: int = 1024
    thin_side: int = 16
    large_side: int = 512

    # --- convolutions, in multiplications
    min_convolution: int = 1 << 18

    # --- copies for another layout, in elements
    long_row: int = 2048
    large_copy: int = 1 << 17  # of a matrix

    def product(self, given: MatrixProduct) -> Refusal | None:
        """Measured (`bench/results/products-aarch64.md` for one thread, `products-2-threads-aarch64.md`): factors that
        lie along take 0.36 to 1.01 of the time of torch's kernel, the fewer rows the less. Others take 0.6 to 0.95
        while they are small, and up to 1.1 where they are not: torch's kernel then has the same layout to begin with.
        What is thin, too, is better read in the order of memory, as torch does."""
        rows, inner, columns, work = given.rows, given.inner, given.columns, given.multiplications
        goes_to_library = given.lie_along and min(rows, inner, columns) >= self.min_side
        if goes_to_library and work > self.small_product and not given.has_all_cores:
            return Refusal("it is large, and the Arm Compute Library has more threads")
        if inner < self.min_summed or work < self.min_product:
            return Refusal("it is so small that all a kernel of our own can gain is the time of a call")
        if given.lie_along:
            fits = inner > self.long_sum or min(rows, columns) < self.large_side
            return None if columns > 1 and fits else Refusal("it is large, or has a single column")
        if min(rows, columns) < self.thin_side:
            return Refusal("it is thin, and one factor does not lie along what is summed")
        return None if work <= self.small_product else Refusal("it is large, and lies as torch's kernel likes it")

    def product_layout(self, given: MatrixProduct, copied: int) -> Refusal | None:
        """Measured with the copy (`bench/layouts.py`): the library takes 70 microseconds before it begins, for each
        matrix of a batch, and OpenBLAS none, so that small matrices take 0.2 to 0.7 of the time, with one thread or
        two. Larger ones take 0.8 to 1.0 with two, and 1.0 to 1.8 with one: then OpenBLAS has one core, and the other
        library has both. So these are left unless torch has all cores, and they are few. Left, too, are rows so long
        that OpenBLAS is slow to read the columns between them, and large copies."""
        work = given.multiplications
        if min(given.rows, given.inner, given.columns) < self.min_side or work < self.min_multiplications:
            return Refusal("it is so small that the Arm Compute Library does not take it")
        if work <= self.small_product:
            return None
        if not given.has_all_cores:
            return Refusal("it is large, and the Arm Compute Library has more threads")
        if given.inner >= self.long_row:
            return Refusal("its rows are long")
        return Refusal("the copy is large") if copied >= self.large_copy else None

    def convolution(self, multiplications: int) -> Refusal | None:
        """Measured (`bench/results/convolutions-last-aarch64.md`): 0.58 to 1.19 of the time of torch's kernel where
        channels lie side by side, 0.92 in the geometric mean; above 1.1 are small ones of one by one, which pay as
        nothing is turned for them. In groups 0.1 to 0.3: torch has no fast kernel for these."""
        if multiplications < self.min_convolution:
            return Refusal("it is so small that all a kernel of our own can gain is the time of a call")
        return None

    def lone_convolution(self, taps: int) -> Refusal | None:
        """Measured (`bench/results/convolutions*-aarch64.md`): of one by one, up to 1.2 where channels lie side by
        side, and up to 2.3 where they do not; of windows 0.47 to 1.06."""
        if taps == 1:
            return Refusal("it is one by one, and no other convolution is near")
        return None


@dataclass(frozen=True)
class BesideMkl(BesideTorch):
    """On a Xeon with AVX-512, with one thread and with sixteen."""

    # --- products: elements of a weight, its columns, and rows that are multiplied by a frozen one
    min_weight: int = 1 << 18
    max_weight_of_a_row: int = 1 << 24
    min_columns: int = 512
    min_frozen_rows: int = 4
    max_frozen_rows: int = 64

    def product(self, given: MatrixProduct) -> Refusal | None:
        """Measured (`bench/results/products-x86_64.md` for one thread, `products-16-threads-x86_64.md`): MKL is level
        or ahead wherever packing is little beside multiplying, or threads are many. What is taken was faster with one
        thread and with sixteen: a few rows of weights that need not be packed, in 0.37 to 0.95 of MKL's time, and
        single rows, which read the weight once and have their epilogue inside, in 0.74 to 0.98."""
        rows, columns, weight = given.rows, given.columns, given.inner * given.columns
        if weight < self.min_weight:
            return Refusal("it is small, which was not measured beside MKL")
        if rows == 1 and given.lie_along:
            is_measured = weight <= self.max_weight_of_a_row and columns >= self.min_columns
            return None if is_measured else Refusal("it waits for memory, as MKL does")
        if not given.in_panels:
            return Refusal("MKL is as fast where the factors are not frozen")
        is_measured = self.min_frozen_rows <= rows <= self.max_frozen_rows and columns >= self.min_columns
        return None if is_measured else Refusal("MKL is as fast with so many rows, so few, or so few columns")

    # --- attention: keys, and elements of a head
    max_keys: int = 4096
    max_width: int = 128

    def attention(self, given: AttentionSizes) -> Refusal | None:
        """Measured (`bench/results/attention-kernels-x86_64.md`, and with two threads): rows side by side in vectors
        need no key to be packed, as MKL's products do. 0.60 to 0.93 of the time of torch's kernel with many rows, 0.28
        to 0.94 with few. Sixteen threads were not measured."""
        if not given.has_few_threads:
            return Refusal("attention of our own is measured with few threads")
        is_measured = given.keys <= self.max_keys and given.width <= self.max_width
        return None if is_measured else Refusal("attention with so many keys, or such wide heads, was not measured")


UNMEASURED = BesideTorch()
BESIDE_TORCH: Mapping[str, BesideTorch] = {
    "Arm Compute Library": BesideArmComputeLibrary(),
    "MKL with AVX-512": BesideMkl(),
}


# --- windows of each channel by itself --------------------------------------------------------------------------------


@dataclass(frozen=True)
class DepthwiseWindow:
    """`channels_last`: torch has the channels of the result side by side; `computed_by_channels`: loops of our own
    compute the image so."""

    taps: int
    gradients: bool
    channels_last: bool
    has_steps: bool
    computed_by_channels: bool


@dataclass(frozen=True)
class DepthwiseBesideTorch:
    """Convolutions of each channel by itself, as loops beside torch's kernels; measured with two threads, windows of
    3x3 to 7x7. In taps of a window."""

    max_taps: int = 64
    few_taps: int = 9
    some_taps: int = 25
    many_taps: int = 49

    def channels_last(self, given: DepthwiseWindow) -> bool | None:
        """Whether loops have the channels side by side; None where torch's kernels are as fast."""
        raise NotImplementedError


class DepthwiseOnArm(DepthwiseBesideTorch):
    def channels_last(self, given: DepthwiseWindow) -> bool | None:
        """Torch is as fast for the result where channels lie side by side, unless loops of our own compute the image
        so: then no image is turned. Windows of 7x7 are 1.1 to 1.8 times as fast here, channel by channel, even if the
        image is turned for that. Gradients are 3 to 25 times as fast."""
        if given.taps <= self.some_taps and given.computed_by_channels:
            return True
        if given.taps >= self.many_taps and not given.gradients:
            return False
        return given.channels_last if given.gradients or not given.channels_last else None


class DepthwiseOnX86(DepthwiseBesideTorch):
    def channels_last(self, given: DepthwiseWindow) -> bool | None:
        """Torch generates code for the very window: small ones without steps are 1.0 to 2.1 times as fast here where
        channels lie apart, and gradients of large ones 1.1 to 12 times."""
        is_small, is_plain = given.taps <= self.few_taps, not given.channels_last and not given.has_steps
        pays = is_plain or not is_small if given.gradients else is_plain and is_small
        return given.channels_last if pays else None


ON_ARM, ON_X86 = DepthwiseOnArm(), DepthwiseOnX86()


# --- compressions of embeddings, as calls of torch in another order ---------------------------------------------------


@dataclass(frozen=True)
class EmbeddingCompression:
    """From which sizes on the other order was measured to be faster on a CPU: the table in
    `passes/pre_grad/compress_worth.py`. `least_times_fewer`: operations, for a product of pairs."""

    max_weight_side: int = 1024  # rows of a weight, or of what it mixes, that a kernel keeps in caches
    max_weight_rows: int = 4
    min_concat_bytes: int = 1 << 23
    min_part_bytes: int = 1 << 16  # of a part in each sample
    min_sample_columns: int = 512
    min_dot_multiplications: int = 1 << 22
    least_times_fewer: int = 2


EMBEDDING_COMPRESSION = EmbeddingCompression()


# --- GPUs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BesideCuBlas:
    """The library on a GPU that nothing was measured on: everything is left to torch."""

    def product(self, problem: ProductProblem) -> Refusal | None:
        """A matrix product as a kernel, arranged by sizes alone."""
        return Refusal("products of our own are not measured to be faster on this GPU")


@dataclass(frozen=True)
class BesideCuBlasOnH200(BesideCuBlas):
    """`bench/results/gpu-products.md`: linear layers on a few rows, which read a weight once, take 0.86 to 0.89 of the
    library's time, and 0.96 to 0.98 where the weight is larger than what is taken here; on a single row 0.71 and 0.80.
    With 32 rows both take as long, and with more the library is up to 1.25 times as fast; of squares, 1.15 times with
    sides of 1024, 1.02 with 4096, and 0.98 with 16384. A single row in 32 bits takes 0.66 to 0.85, whether the library
    may round factors or not."""

    sides: tuple[int, int] = (4096, 8192)  # of weights that were faster
    sides_of_a_row: tuple[int, int] = (4096, 14336)  # the same for a single row
    max_rows: int = 16
    multiple: int = 16  # of elements of both sides: rows begin where vectors do

    def product(self, problem: ProductProblem) -> Refusal | None:
        least, most = self.sides_of_a_row if problem.rows == 1 else self.sides
        weight = problem.columns, problem.summed
        max_rows = 1 if problem.dtype == "f32" else self.max_rows
        if problem.batch > 1 or problem.rows > max_rows:
            return Refusal("cuBLAS is as fast or faster but for a few rows in 16 bits, and a single one in 32")
        if (problem.left, problem.right) != ("summed", "summed") or any(side % self.multiple for side in weight):
            return Refusal("it was not measured beside cuBLAS with factors that lie so")
        if min(weight) < least or max(weight) > most:
            return Refusal("cuBLAS is as fast with a weight of that size, or it was not measured")
        return None


def beside_cublas(gpu: str) -> BesideCuBlas:
    """By the name that torch has for a GPU."""
    return BesideCuBlasOnH200() if "H200" in gpu else BesideCuBlas()
