"""Matrix products: sums over one axis of products of two factors, of which each has an axis that the other has not.

In: a reduction that `product_of` knows, alone or with operations behind it at the same points (`convolutions` sees to
that while operations are fused: `reason_apart`). Out: its form, which says what vectors are made of and whether factors
are packed:

dots      along what is summed, where both factors lie along that and rows or columns are few: a linear layer
direct    along the columns, or the rows, where the other side is short
panels    along the columns, where the right factor lies in the order of its use already
packed    along the columns, with factors copied into panels that lie in the order of their use: the right one, and the
          left one unless it lies along what is summed and is read for a few columns only

`ferrite.schedule.cpu.product_loops` makes the loops. They are those that every kernel has: nothing after that knows of
products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ferrite.ir import DOTS, ONE, ZERO, Axis, Cast, Const, Expr, Index, Load, Mod, Number, Op, axis, number, sum_pieces
from ferrite.ir.kernel import Update
from ferrite.ir.program import Operation, Reduce
from ferrite.machines import Machine
from ferrite.schedule.fusion.accesses import axes_in, likely, step_of
from ferrite.schedule.loops.products import ProductAxes, axes_under, factors_in, product_in

TYPES = (torch.float32, torch.float64)
MIN_WORDS = 4  # of a sum over words of four bytes
MIN_SIDE = 2  # rows, and columns: of one there is nothing to share, but words that are loaded


def product_of(operation: Operation) -> ProductAxes | None:
    """The axes of an operation that is a matrix product. Rows, and how many matrices there are, may be known at run
    time only."""
    if factors_in(operation) is None or not isinstance(operation, Reduce):
        return None
    (value,) = operation.values
    is_of_words = isinstance(value, Op) and value.name in DOTS
    if not is_of_words and value.dtype not in TYPES:
        return None
    product = product_in(operation) or one_row(operation)
    if product is None:
        return None
    if not all(is_read(factor) for factor in factors_in(operation) or ()):
        return None
    rows, columns, summed = product.rows, product.columns, product.summed
    if not all(isinstance(item.extent, Number) for item in (columns, summed)):
        return None
    is_row = rows not in operation.axes
    if not (is_of_words or is_row) and min(likely(rows.extent), extent_of(columns)) < MIN_SIDE:
        return None
    least = MIN_WORDS if is_of_words else sum_pieces.MIN_SUMMED
    if not least <= extent_of(summed) <= sum_pieces.MAX_SUMMED:
        return None
    if not is_of_words and not sum_pieces.product_can_be_cut(extent_of(summed)):  # sums of integers are exact
        return None
    return product


def one_row(operation: Reduce) -> ProductAxes | None:
    """A row times a matrix, or a matrix times a column, of bytes: what is loaded of a row is used for several columns,
    and several columns are read side by side. The rows are an axis that nothing depends on."""
    (summed,), factors = operation.reduced, factors_in(operation)
    if len(operation.axes) != 1 or factors is None:
        return None
    columns = operation.axes[0]
    row, matrix = sorted(factors, key=lambda factor: len(axes_under(factor)))
    if axes_under(matrix) != {columns, summed} or axes_under(row) != {summed}:
        return None
    if not is_read(matrix) or load_of(matrix).dtype.itemsize > 1:
        return None
    return ProductAxes((), axis("row", ONE), columns, summed)


def is_product(operation: Operation) -> bool:
    return product_of(operation) is not None


def is_read(factor: Expr) -> bool:
    """Whether a factor is an element in memory, or a shorter one that is converted where it is read, or a word of four
    bytes in memory, perhaps with other signs."""
    return isinstance(factor, Load) or (
        all(isinstance(each, Load) for each in read_in(factor))
        and isinstance(factor, Cast | Op)
        and (isinstance(factor, Cast) or word_in(factor) is not None)
    )


def word_in(factor: Expr) -> Op | None:
    """The word that a factor is, or that it has with other signs."""
    if isinstance(factor, Op) and factor.name == "bitwise_xor" and isinstance(factor.operands[1], Const):
        factor = factor.operands[0]
    return factor if isinstance(factor, Op) and factor.name == "pack_bytes" else None


def read_in(factor: Expr) -> tuple[Expr, ...]:
    """What is read of a factor: one element, or four."""
    if (word := word_in(factor)) is not None:
        return word.operands
    return (factor.arg if isinstance(factor, Cast) else factor,)


def load_of(factor: Expr) -> Load:
    """What is read of a factor, or the first byte of it."""
    found = read_in(factor)[0]
    assert isinstance(found, Load)
    return found


def bytes_apart(factor: Expr) -> int:
    """How many elements are read together, side by side: a word that lies in memory as such is four."""
    first, *rest = (each.coordinates[0] for each in read_in(factor) if isinstance(each, Load))
    is_row = all(each - first is number(place) for place, each in enumerate(rest, 1))
    return 1 + len(rest) if is_row else 1


def axes_of_load(load: Load) -> set[Axis]:
    return set().union(*(axes_in(index) for index in load.coordinates))


def extent_of(item: Axis) -> int:
    """Of an axis whose size is known."""
    assert isinstance(item.extent, Number)
    return item.extent.value


# --- forms ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProductForm:
    """`along`: the axis that vectors are made of. `packs_left`, `packs_right`: which factors are copied first, in the
    order of their use; `panel`: the right one lies so already, with so many columns side by side. `reads_once`: the
    right one is a matrix of bytes, which comes from memory column by column: rows are so few that a tile has all."""

    along: Axis
    packs_left: bool = False
    packs_right: bool = False
    panel: int | None = None
    reads_once: bool = False

    @property
    def is_packed(self) -> bool:
        return self.packs_left or self.packs_right or self.panel is not None


def form_of(product: ProductAxes, update: Update, machine: Machine) -> ProductForm:
    """Which form suits factors that lie like these: of as many rows as are likely, where that is not known. Then tiles
    have no vectors of rows, as nobody knows how long these would be."""
    rows = likely(product.rows.extent)
    thin = min(rows, extent_of(product.columns))
    left, right = factors(product, update)
    if (panel := panel_columns(right, product.columns, machine)) is not None:
        is_read_often = extent_of(product.columns) > machine.max_unpacked_columns and thin > machine.max_direct_side
        return ProductForm(product.columns, is_read_often or step_along(left, product.summed) is not ONE, panel=panel)
    is_row_by_row, *also = (step_along(item, product.summed) is ONE for item in (left, right))
    apart = [not collide(*pair, machine) for pair in ((left, product.rows), (right, product.columns))]
    has_few = rows <= machine.max_dot_rows or extent_of(product.columns) <= machine.max_direct_side
    if is_row_by_row and all(also):
        tall, _ = machine.dot_tile(rows)
        if rows <= tall and load_of(right).dtype.itemsize == 1:
            return ProductForm(product.summed, reads_once=True)
        if all(apart) and has_few:
            return ProductForm(product.summed)
    if thin <= machine.max_direct_side:
        for factor, side in ((right, product.columns), (left, product.rows)):
            if step_along(factor, side) is ONE and isinstance(side.extent, Number) and thin < extent_of(side):
                return ProductForm(side)
    is_read_often = extent_of(product.columns) > machine.max_unpacked_columns
    return ProductForm(product.columns, is_read_often or not (is_row_by_row and apart[0]), packs_right=True)


def panel_columns(factor: Expr, columns: Axis, machine: Machine) -> int | None:
    """How many columns a factor has side by side, where it lies in panels: in the order of its use. A factor that
    repeats after so many others does not."""
    width = machine.panel_columns(factor.dtype)
    waiting = list(load_of(factor).coordinates)
    while waiting:
        index = waiting.pop()
        if isinstance(index, Mod) and index.top is columns and index.bottom is number(width):
            return width
        waiting += index.parts
    return None


def collide(factor: Expr, side: Axis, machine: Machine) -> bool:
    """Whether what is read of neighbouring rows, or columns, has one place in the cache."""
    step = step_along(factor, side)
    size = load_of(factor).dtype.itemsize * bytes_apart(factor)
    return isinstance(step, Number) and step is not ZERO and step.value * size % machine.l1_way_bytes == 0


def factors(product: ProductAxes, update: Update) -> tuple[Expr, Expr]:
    """The factor that has the rows, and the one that has the columns."""
    (value,) = update.values
    one, other = value.args
    return (one, other) if product.columns in axes_of_load(load_of(other)) else (other, one)


def step_along(factor: Expr, item: Axis) -> Index | None:
    """How far elements of a factor are from one place to the next; words in words, where they lie side by side."""
    step, width = step_of(load_of(factor).coordinates[0], item), bytes_apart(factor)
    return step // width if step is not None and width > 1 and step % width is ZERO else step
