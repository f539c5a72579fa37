"""Which matrix products are kernels of our own, and the operators that they become.

Passes of two stages ask: `post_grad.own_products`, and `freezing.panels`, which stores constant factors as the kernels
read them. What is decided here is decided nowhere else; where it pays was measured: `ferrite.machines.beside_torch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.ir import sum_pieces
from ferrite.machines import MatrixProduct, thread_counts
from ferrite.passes.shared.facts import beside_torch, only_cast, transposed
from ferrite.passes.shared.library import define
from ferrite.rewrite import Site

aten = torch.ops.aten
OPERANDS: Mapping[Any, tuple[str, str]] = {
    aten.mm.default: ("self", "mat2"),
    aten.addmm.default: ("mat1", "mat2"),
    aten.bmm.default: ("self", "mat2"),
    aten.baddbmm.default: ("batch1", "batch2"),
}


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


@define("byte_product(Tensor left, Tensor right) -> Tensor")
def byte_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product of two matrices of bytes with signs, in 32 bits; sums have a multiple of four terms."""
    return left.int().mm(right.int())


@define("byte_product_of_panels(Tensor left, Tensor panels, int columns) -> Tensor")
def byte_product_of_panels(left: torch.Tensor, panels: torch.Tensor, columns: int) -> torch.Tensor:
    """The same with a matrix that lies in panels: of some columns side by side, four steps of all sums after the other.
    Bytes without a sign are those of the matrix with 128 added."""
    count, words, width, word = panels.shape
    matrix = panels.int() - (128 if panels.dtype is torch.uint8 else 0)
    return left.int().mm(matrix.permute(1, 3, 0, 2).reshape(words * word, count * width)[:, :columns])


# --- decisions --------------------------------------------------------------------------------------------------------

Reason = Callable[[Site, torch.Tensor, torch.Tensor], Refusal | None]


def owned(site: Site, reason_against: Reason, reason_to_leave: Reason, written: Callable[..., Any]) -> Any:
    """A product of our own in place of torch's call, where the option `own_products` and both reasons let it be one."""
    left, right = (site.arguments[name] for name in OPERANDS[site.node.target])
    values = fake_value(left), fake_value(right)
    if site.options.own_products == "off":
        return Refusal("the option own_products is off")
    if (refusal := reason_against(site, *values)) is not None:
        return refusal
    if site.options.own_products == "auto" and (refusal := reason_to_leave(site, *values)) is not None:
        return refusal
    return written(site, left, right)


def reason_against(site: Site, left: torch.Tensor, right: torch.Tensor) -> Refusal | None:
    """Why a product cannot be a kernel of our own, as far as kernels go today."""
    if left.device.type != "cpu" or left.dtype not in (torch.float32, torch.float64):
        return Refusal("kernels of our own are there for products of float32 and float64 on a cpu")
    if left.layout is not torch.strided or right.layout is not torch.strided:
        return Refusal("an operand is sparse")
    inner, columns = right.shape[-2:]
    if not all(isinstance(size, int) for size in (inner, columns)):
        return Refusal("its columns, or how long its sums are, are known at run time only")
    if any(isinstance(size, int) and size == 0 for size in (*left.shape, columns)):
        return Refusal("it has no elements, or sums of none")
    if inner > sum_pieces.MAX_SUMMED:
        return Refusal("its sums are so long that packed factors would take much memory")
    if not sum_pieces.product_can_be_cut(inner):
        return Refusal("its sums cannot be cut into equal pieces, and would round worse than torch's")
    if any(site.arguments.get(factor, 1) != 1 for factor in ("alpha", "beta")):
        return Refusal("it is scaled")
    return None


def reason_to_leave(site: Site, left: torch.Tensor, right: torch.Tensor, in_panels: bool = False) -> Refusal | None:
    """Why a kernel of our own was not measured to be at least as fast as torch's, if it was not. `in_panels`: the right
    factor is constant, and can lie as the kernel reads it. Of rows that are known at run time only, what was seen
    decides."""
    if site.options.executor != "native" or left.dtype is not torch.float32:
        return Refusal("products of our own are measured for float32 only")
    if site.arguments and is_stored_short(site.arguments[OPERANDS[site.node.target][1]]):
        return None  # torch would make the long weight at each call, and read four times as much of it
    if all(user.target is aten.cat.default for user in site.node.users):
        return Refusal("torch writes it into its part of a concatenation")
    lie_along = all(torch_api.known_equal(step, 1) for step in (left.stride(-1), right.stride(-2)))
    has_all_cores = thread_counts.works_with_all_of_few_cores()
    rows, (inner, columns) = torch_api.size_hint(left.shape[-2]), right.shape[-2:]
    given = MatrixProduct(rows, inner, columns, lie_along, in_panels, has_all_cores)
    return beside_torch().product(given)


def is_stored_short(factor: Any) -> bool:
    """Whether a factor is converted from a tensor of integers of 8 bits, as weights are that take little memory."""
    if not isinstance(factor, torch.fx.Node):
        return False
    made = transposed(factor) or factor
    stored = only_cast(made)
    stored = stored if stored is None else transposed(stored) or stored
    return stored is not None and fake_value(stored).dtype in (torch.int8, torch.uint8) and len(made.users) == 1


# --- what is written --------------------------------------------------------------------------------------------------


def with_bias(site: Site, made: Any) -> Any:
    """A product of our own, with what the operator adds to it."""
    bias = site.arguments.get("self") if "beta" in site.arguments else None
    return made if bias is None else site.call(aten.add.Tensor, made, bias)
