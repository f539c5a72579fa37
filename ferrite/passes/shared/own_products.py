"""Which matrix products are kernels of our own, and the operators that they become.

Passes of two stages ask: `post_grad.own_products`, and `freezing.panels`, which stores constant factors as the kernels
read them. What is decided here is decided nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ferrite.capture import products
from ferrite.errors import Refusal
from ferrite.passes.shared.library import define
from ferrite.rewrite import Site

aten = torch.ops.aten
OPERANDS: Mapping[Any, tuple[str, str]] = {
    aten.mm.default: ("self", "mat2"),
    aten.addmm.default: ("mat1", "mat2"),
    aten.bmm.default: ("self", "mat2"),
    aten.baddbmm.default: ("batch1", "batch2"),
}
# Sides, and multiplications, from which torch takes the Arm Compute Library.
MIN_LIBRARY_SIDE, MIN_LIBRARY_MULTIPLICATIONS = 9, 8193
# Multiplications of one matrix; sides.
MIN_WORK, SMALL_WORK, MIDDLING_WORK = 2**18, 2**20, 2**22
MIN_SUMMED, SHORT_SUM, LONG_SUM, MAX_SUMMED = 16, 128, 1024, 2**14
THIN_SIDE, LARGE_SIDE = 16, 512
# Beside MKL: elements of a weight, its columns, and rows that are multiplied by a frozen one.
MIN_WEIGHT, MAX_WEIGHT_OF_A_ROW, MIN_COLUMNS, FROZEN_ROWS = 2**18, 2**24, 512, range(4, 65)
MAX_PIECE, PIECES = 512, range(128, 513)  # of a sum, which the scheduler cuts


@define("product(Tensor left, Tensor right) -> Tensor")
def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The matrix product, of two matrices or of two batches of them."""
    return left.mm(right) if left.ndim == 2 else left.bmm(right)


@define("wide_product(Tensor left, Tensor right) -> Tensor")
def wide_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The same in 32 bits, of factors of as many or of 16."""
    left, right = left.float(), right.float()
    return left.mm(right) if left.ndim == 2 else left.bmm(right)


@define("product_of_panels(Tensor left, Tensor panels, int columns) -> Tensor")
def product_of_panels(left: torch.Tensor, panels: torch.Tensor, columns: int) -> torch.Tensor:
    """The product with a matrix that lies in panels: some columns side by side, one step of all sums after the other.
    Of the last panel only the first columns may count."""
    count, inner, width = panels.shape
    return left.mm(panels.permute(1, 0, 2).reshape(inner, count * width)[:, :columns])


# --- decisions --------------------------------------------------------------------------------------------------------


def reason_against(site: Site, left: torch.Tensor, right: torch.Tensor) -> Refusal | None:
    """Why a product cannot be a kernel of our own, as far as kernels go today."""
    if left.device.type != "cpu" or left.dtype not in (torch.float32, torch.float64):
        return Refusal("kernels of our own are there for products of float32 and float64 on a cpu")
    if left.layout is not torch.strided or right.layout is not torch.strided:
        return Refusal("an operand is sparse")
    if not all(isinstance(size, int) for size in (*left.shape, *right.shape)):
        return Refusal("its sizes are not known")
    if math.prod((*left.shape, *right.shape)) == 0:
        return Refusal("it has no elements, or sums of none")
    if left.shape[-1] > MAX_SUMMED:
        return Refusal("its sums are so long that packed factors would take much memory")
    if not can_be_cut(left.shape[-1]):
        return Refusal("its sums cannot be cut into equal pieces, and would round worse than torch's")
    if any(site.arguments.get(factor, 1) != 1 for factor in ("alpha", "beta")):
        return Refusal("it is scaled")
    return None


def can_be_cut(length: int) -> bool:
    """Whether the scheduler has equal pieces for sums of so many (`ferrite.schedule.cpu.products.piece_of`)."""
    return length <= MAX_PIECE or any(length % piece == 0 for piece in PIECES)


def reason_to_leave(site: Site, left: torch.Tensor, right: torch.Tensor, in_panels: bool = False) -> Refusal | None:
    """Why a kernel of our own was not measured to be at least as fast as torch's, if it was not. `in_panels`: the right
    factor is constant, and can lie as the kernel reads it."""
    if site.options.executor != "native" or left.dtype is not torch.float32:
        return Refusal("products of our own are measured for float32 only")
    if all(user.target is aten.cat.default for user in site.node.users):
        return Refusal("torch writes it into its part of a concatenation")
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    lie_along = left.stride(-1) == 1 and right.stride(-2) == 1
    goes_to_library = lie_along and min(rows, inner, columns) >= MIN_LIBRARY_SIDE
    is_large = goes_to_library and rows * inner * columns > SMALL_WORK
    if is_large and products.uses_arm_compute_library() and not products.works_with_all_of_few_cores():
        return Refusal("it is large, and the Arm Compute Library has more threads")
    return slower_than_torch(rows, inner, columns, lie_along, in_panels)


def slower_than_torch(rows: int, inner: int, columns: int, lie_along: bool, in_panels: bool) -> Refusal | None:
    """The same by sizes, on this machine. `lie_along`: both factors lie along what is summed, as in a linear layer."""
    if products.uses_arm_compute_library():
        return slower_on_arm(rows, inner, columns, lie_along)
    if products.uses_mkl_with_wide_vectors():
        return slower_on_x86(rows, inner, columns, lie_along, in_panels)
    return Refusal("products of our own are measured on Arm, and with AVX-512 beside MKL")


def slower_on_arm(rows: int, inner: int, columns: int, lie_along: bool) -> Refusal | None:
    """On a Neoverse N1 (`bench/results/products-aarch64.md` for one thread, `products-2-threads-aarch64.md`) factors
    that lie along take 0.36 to 1.01 of the time of torch's kernel, the fewer rows the less. Others take 0.6 to 0.95
    while they are small, and up to 1.1 where they are not: torch's kernel then has the same layout to begin with. What
    is thin, too, is better read in the order of memory, as torch does."""
    if inner < MIN_SUMMED or rows * inner * columns < MIN_WORK:
        return Refusal("it is so small that all a kernel of our own can gain is the time of a call")
    if lie_along and inner < SHORT_SUM and rows * inner * columns > MIDDLING_WORK:
        return Refusal("it is large, and its sums are short")
    if lie_along:
        fits = inner > LONG_SUM or min(rows, columns) < LARGE_SIDE
        return None if columns > 1 and fits else Refusal("it is large, or has a single column")
    if min(rows, columns) < THIN_SIDE:
        return Refusal("it is thin, and one factor does not lie along what is summed")
    return None if rows * inner * columns <= SMALL_WORK else Refusal("it is large, and lies as torch's kernel likes it")


def slower_on_x86(rows: int, inner: int, columns: int, lie_along: bool, in_panels: bool) -> Refusal | None:
    """On a Xeon with AVX-512 (`bench/results/products-x86_64.md` for one thread, `products-16-threads-x86_64.md`) MKL
    is level or ahead wherever packing is little beside multiplying, or threads are many. What is taken was faster with
    one thread and with sixteen: a few rows of weights that need not be packed, in 0.37 to 0.95 of MKL's time, and
    single rows, which read the weight once and have their epilogue inside, in 0.74 to 0.98."""
    if inner * columns < MIN_WEIGHT:
        return Refusal("it is small, which was not measured beside MKL")
    if rows == 1 and lie_along:
        is_measured = inner * columns <= MAX_WEIGHT_OF_A_ROW and columns >= MIN_COLUMNS
        return None if is_measured else Refusal("it waits for memory, as MKL does")
    if not in_panels:
        return Refusal("MKL is as fast where the factors are not frozen")
    is_measured = rows in FROZEN_ROWS and columns >= MIN_COLUMNS
    return None if is_measured else Refusal("MKL is as fast with so many rows, so few, or so few columns")
