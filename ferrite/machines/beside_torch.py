"""Where kernels of our own were measured to be as fast as those of the libraries that torch has.

A library stands for the processors that it was measured on. What a method answers is None where a kernel of our own, or
another call, pays, and the reason to leave an operator to torch where it does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ferrite.errors import Refusal


@dataclass(frozen=True)
class BesideTorch:
    """A library beside which nothing was measured: everything is left to torch."""

    def product(
        self,
        rows: int,
        inner: int,
        columns: int,
        *,
        lie_along: bool,
        in_panels: bool = False,
        has_all_cores: bool = True,
    ) -> Refusal | None:
        """A matrix product, of float32, as a kernel. `lie_along`: both factors lie along what is summed, as in a linear
        layer; `in_panels`: the right one is constant, and can lie as the kernel reads it; `has_all_cores`: torch works
        with all cores, of which there are few."""
        return Refusal("products of our own are measured on Arm, and with AVX-512 beside MKL")

    def product_layout(
        self, rows: int, inner: int, columns: int, copied: int, *, has_all_cores: bool = True
    ) -> Refusal | None:
        """A matrix product, of float32, whose factors lie along what is summed, with one of them copied so that it does
        not: so many elements of it."""
        return Refusal("it is no product that the Arm Compute Library would take")


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

    # --- copies for another layout, in elements
    long_row: int = 2048
    large_copy: int = 1 << 17  # of a matrix

    def product(
        self,
        rows: int,
        inner: int,
        columns: int,
        *,
        lie_along: bool,
        in_panels: bool = False,
        has_all_cores: bool = True,
    ) -> Refusal | None:
        """Measured (`bench/results/products-aarch64.md` for one thread, `products-2-threads-aarch64.md`): factors that
        lie along take 0.36 to 1.01 of the time of torch's kernel, the fewer rows the less. Others take 0.6 to 0.95
        while they are small, and up to 1.1 where they are not: torch's kernel then has the same layout to begin with.
        What is thin, too, is better read in the order of memory, as torch does."""
        work = rows * inner * columns
        goes_to_library = lie_along and min(rows, inner, columns) >= self.min_side
        if goes_to_library and work > self.small_product and not has_all_cores:
            return Refusal("it is large, and the Arm Compute Library has more threads")
        if inner < self.min_summed or work < self.min_product:
            return Refusal("it is so small that all a kernel of our own can gain is the time of a call")
        if lie_along:
            fits = inner > self.long_sum or min(rows, columns) < self.large_side
            return None if columns > 1 and fits else Refusal("it is large, or has a single column")
        if min(rows, columns) < self.thin_side:
            return Refusal("it is thin, and one factor does not lie along what is summed")
        return None if work <= self.small_product else Refusal("it is large, and lies as torch's kernel likes it")

    def product_layout(
        self, rows: int, inner: int, columns: int, copied: int, *, has_all_cores: bool = True
    ) -> Refusal | None:
        """Measured with the copy (`bench/layouts.py`): the library takes 70 microseconds before it begins, for each
        matrix of a batch, and OpenBLAS none, so that small matrices take 0.2 to 0.7 of the time, with one thread or
        two. Larger ones take 0.8 to 1.0 with two, and 1.0 to 1.8 with one: then OpenBLAS has one core, and the other
        library has both. So these are left unless torch has all cores, and they are few. Left, too, are rows so long
        that OpenBLAS is slow to read the columns between them, and large copies."""
        work = rows * inner * columns
        if min(rows, inner, columns) < self.min_side or work < self.min_multiplications:
            return Refusal("it is so small that the Arm Compute Library does not take it")
        if work <= self.small_product:
            return None
        if not has_all_cores:
            return Refusal("it is large, and the Arm Compute Library has more threads")
        if inner >= self.long_row:
            return Refusal("its rows are long")
        return Refusal("the copy is large") if copied >= self.large_copy else None


@dataclass(frozen=True)
class BesideMkl(BesideTorch):
    """On a Xeon with AVX-512, with one thread and with sixteen."""

    # --- products: elements of a weight, its columns, and rows that are multiplied by a frozen one
    min_weight: int = 1 << 18
    max_weight_of_a_row: int = 1 << 24
    min_columns: int = 512
    min_frozen_rows: int = 4
    max_frozen_rows: int = 64

    def product(
        self,
        rows: int,
        inner: int,
        columns: int,
        *,
        lie_along: bool,
        in_panels: bool = False,
        has_all_cores: bool = True,
    ) -> Refusal | None:
        """Measured (`bench/results/products-x86_64.md` for one thread, `products-16-threads-x86_64.md`): MKL is level
        or ahead wherever packing is little beside multiplying, or threads are many. What is taken was faster with one
        thread and with sixteen: a few rows of weights that need not be packed, in 0.37 to 0.95 of MKL's time, and
        single rows, which read the weight once and have their epilogue inside, in 0.74 to 0.98."""
        if inner * columns < self.min_weight:
            return Refusal("it is small, which was not measured beside MKL")
        if rows == 1 and lie_along:
            is_measured = inner * columns <= self.max_weight_of_a_row and columns >= self.min_columns
            return None if is_measured else Refusal("it waits for memory, as MKL does")
        if not in_panels:
            return Refusal("MKL is as fast where the factors are not frozen")
        is_measured = self.min_frozen_rows <= rows <= self.max_frozen_rows and columns >= self.min_columns
        return None if is_measured else Refusal("MKL is as fast with so many rows, so few, or so few columns")


UNMEASURED = BesideTorch()
BESIDE_TORCH: Mapping[str, BesideTorch] = {
    "Arm Compute Library": BesideArmComputeLibrary(),
    "MKL with AVX-512": BesideMkl(),
}


# --- windows of each channel by itself --------------------------------------------------------------------------------


@dataclass(frozen=True)
class DepthwiseBesideTorch:
    """Convolutions of each channel by itself, as loops beside torch's kernels; measured with two threads, windows of
    3x3 to 7x7. In taps of a window."""

    max_taps: int = 64
    few_taps: int = 9
    some_taps: int = 25
    many_taps: int = 49

    def channels_last(
        self, taps: int, *, gradients: bool, channels_last: bool, has_steps: bool, computed_by_channels: bool
    ) -> bool | None:
        """Whether loops have the channels side by side; None where torch's kernels are as fast. `channels_last`: how
        torch has the result; `computed_by_channels`: loops of our own compute the image so."""
        raise NotImplementedError


class DepthwiseOnArm(DepthwiseBesideTorch):
    def channels_last(
        self, taps: int, *, gradients: bool, channels_last: bool, has_steps: bool, computed_by_channels: bool
    ) -> bool | None:
        """Torch is as fast for the result where channels lie side by side, unless loops of our own compute the image
        so: then no image is turned. Windows of 7x7 are 1.1 to 1.8 times as fast here, channel by channel, even if the
        image is turned for that. Gradients are 3 to 25 times as fast."""
        if taps <= self.some_taps and computed_by_channels:
            return True
        if taps >= self.many_taps and not gradients:
            return False
        return channels_last if gradients or not channels_last else None


class DepthwiseOnX86(DepthwiseBesideTorch):
    def channels_last(
        self, taps: int, *, gradients: bool, channels_last: bool, has_steps: bool, computed_by_channels: bool
    ) -> bool | None:
        """Torch generates code for the very window: small ones without steps are 1.0 to 2.1 times as fast here where
        channels lie apart, and gradients of large ones 1.1 to 12 times."""
        is_small, is_plain = taps <= self.few_taps, not channels_last and not has_steps
        pays = is_plain or not is_small if gradients else is_plain and is_small
        return channels_last if pays else None


ON_ARM, ON_X86 = DepthwiseOnArm(), DepthwiseOnX86()
