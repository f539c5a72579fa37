"""Matrix products that are kernels of our own, not torch's: loops like any others, with what follows them inside.

    mm(a, b), bmm(a, b)                     =>      product(a, b)
    addmm(bias, a, b)                       =>      product(a, b) + bias

`torch.ops.ferrite.product` is lowered to a sum of products, which the scheduler arranges in tiles; pointwise operators
that read it become part of the kernel. Whether that pays is decided here and nowhere else (`reason_to_leave`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ferrite.capture import products
from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.passes.post_grad import operators as operators  # defines torch.ops.ferrite
from ferrite.passes.post_grad.product_layouts import MIN_LIBRARY_SIDE, OPERANDS
from ferrite.passes.shared.cases import normal
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import Case, NodeRule, Site, apply_rules

aten = torch.ops.aten
# Multiplications of one matrix; sides.
MIN_WORK, SMALL_WORK, MIDDLING_WORK = 2**18, 2**20, 2**22
MIN_SUMMED, SHORT_SUM, LONG_SUM, MAX_SUMMED = 16, 128, 1024, 2**14
THIN_SIDE, LARGE_SIDE = 16, 512
MAX_PIECE, PIECES = 512, range(128, 513)  # of a sum, which the scheduler cuts


def owned(site: Site) -> Any:
    left, right = (site.arguments[name] for name in OPERANDS[site.node.target])
    if site.options.own_products == "off":
        return Refusal("the option own_products is off")
    if (refusal := reason_against(site, fake_value(left), fake_value(right))) is not None:
        return refusal
    if site.options.own_products == "auto" and (refusal := reason_to_leave(site, fake_value(left), fake_value(right))):
        return refusal
    made = site.call(torch.ops.ferrite.product.default, left, right)
    bias = site.arguments.get("self") if "beta" in site.arguments else None
    return made if bias is None else site.call(aten.add.Tensor, made, bias)


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


def reason_to_leave(site: Site, left: torch.Tensor, right: torch.Tensor) -> Refusal | None:
    """Why a kernel of our own was not measured to be at least as fast as torch's, if it was not."""
    is_native = site.options.executor == "native"
    if not is_native or left.dtype is not torch.float32 or not products.uses_arm_compute_library():
        return Refusal("products of our own are measured for float32 on Arm only")
    if all(user.target is aten.cat.default for user in site.node.users):
        return Refusal("torch writes it into its part of a concatenation")
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    lie_along = left.stride(-1) == 1 and right.stride(-2) == 1
    goes_to_library = lie_along and min(rows, inner, columns) >= MIN_LIBRARY_SIDE
    if goes_to_library and rows * inner * columns > SMALL_WORK and not products.works_with_all_of_few_cores():
        return Refusal("it is large, and the Arm Compute Library has more threads")
    return slower_than_torch(rows, inner, columns, lie_along)


def slower_than_torch(rows: int, inner: int, columns: int, lie_along: bool) -> Refusal | None:
    """The same by sizes. `lie_along`: both factors lie along what is summed, as in a linear layer. On a Neoverse N1
    (`bench/results/products-aarch64.md` for one thread, `products-2-threads-aarch64.md`) these take 0.36 to 1.01 of the
    time of torch's kernel, the fewer rows the less. Others take 0.6 to 0.95 while they are small, and up to 1.1 where
    they are not: torch's kernel then has the same layout to begin with. What is thin, too, is better read in the order
    of memory, as torch does."""
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


# --- what it fires on -------------------------------------------------------------------------------------------------


def linear(x: Any, weight: Any, bias: Any) -> Any:
    return aten.addmm.default(bias, x, aten.permute.default(weight, [1, 0]))


ALWAYS = {"own_products": "always"}

OWN_PRODUCT = NodeRule(
    name="own_product",
    purpose="a matrix product becomes loops, which are fused with what follows them",
    targets=tuple(OPERANDS),
    rewrite=owned,
    numerics="rounded",
    examples=(
        Case("two matrices", aten.mm.default, normal((5, 4), (4, 6)), ALWAYS),
        Case("a linear layer", linear, normal((5, 32), (6, 32), (6,)), ALWAYS),
        Case("in double precision", aten.mm.default, normal((5, 4), (4, 6), dtype=torch.float64), ALWAYS),
        Case("a batch", aten.bmm.default, normal((3, 5, 4), (3, 4, 6)), ALWAYS),
        Case("a batch with a mask", aten.baddbmm.default, normal((3, 5, 6), (3, 5, 4), (3, 4, 6)), ALWAYS),
    ),
    near_misses=(
        Case("switched off", aten.mm.default, normal((5, 4), (4, 6)), {"own_products": "off"}),
        Case("tiny, where that decides", aten.mm.default, normal((5, 4), (4, 6))),
        Case("half precision", aten.mm.default, normal((5, 4), (4, 6), dtype=torch.bfloat16), ALWAYS),
        Case(
            "scaled",
            lambda bias, a, b: aten.addmm.default(bias, a, b, alpha=2),
            normal((6,), (5, 4), (4, 6)),
            ALWAYS,
        ),
        Case("very long sums", aten.mm.default, normal((2, 20000), (20000, 2)), ALWAYS),
        Case("sums of a prime number", aten.mm.default, normal((2, 1031), (1031, 2)), ALWAYS),
        Case("sums of nothing", aten.mm.default, normal((5, 0), (0, 6)), ALWAYS),
    ),
)


@graph_pass(stage="post_grad", rules=(OWN_PRODUCT,))
def own_products(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Matrix products for which our own kernels are as fast as torch's: they hold what follows them, too."""
    return apply_rules(gm, (OWN_PRODUCT,), context)
