"""A batch of vector times matrix as a product and a sum: abc,abcd->abd, which fuse into one loop."""

from __future__ import annotations

from typing import Any

import torch

from ferrite.errors import Refusal
from ferrite.machines import machine_of
from ferrite.passes.pre_grad.horizontal import bytes_of
from ferrite.passes.pre_grad.predicates import requires_grad
from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.passes.shared.kernel_rules import becomes_a_kernel
from ferrite.pipeline import PassContext
from ferrite.rewrite import Case, NodeRule, Site, apply_rules

aten = torch.ops.aten

# As one kernel this takes 0.2 to 0.4 of the time. As calls of torch the product is held in memory, which is as large as
# the matrices. Training pays for that, since what einsum makes of it takes as much again for the gradients: 0.2 to 0.7
# of the time on CPUs and a GPU, where inference takes 0.5 to 1.3 (`python -m bench.passes rewrites`).


def product_and_sum(site: Site) -> Any:
    """abc,abcd->abd."""
    equation, tensors = str(site.arguments["equation"]).replace(" ", ""), site.arguments["tensors"]
    left, arrow, result = equation.partition("->")
    names = left.split(",")
    if not arrow or len(names) != 2 or len(tensors) != 2 or not all(map(str.isalpha, (*names, result))):
        return Refusal("it is no product of two, written out")
    vector, matrix = names
    if len(set(matrix)) != 4 or len(matrix) != 4 or vector != matrix[:3] or result != matrix[:2] + matrix[3]:
        return Refusal("it is not abc,abcd->abd of four different letters")
    if any(site.value(tensor).dtype not in (torch.float32, torch.float64) for tensor in tensors):
        return Refusal("the product of another dtype than float32 or float64 would be rounded first")
    small = bytes_of(tensors[1]) <= machine_of(site.value(tensors[1]).device).max_held_product_bytes
    if not becomes_a_kernel(site.options) and not (small and requires_grad(site.node) is True):
        return Refusal("the product would be held in memory, and is large or not trained")
    wide = site.call(aten.unsqueeze.default, tensors[0], 3)
    return site.call(aten.sum.dim_IntList, site.call(aten.mul.Tensor, wide, tensors[1]), [2])


def einsum(
    equation: str,
    *sizes: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    fused: bool = True,
    trained: bool = True,
) -> Case:
    def make_inputs() -> list[Any]:
        return [torch.rand(size, dtype=dtype).requires_grad_(trained) for size in sizes]

    label = f"{equation}, {dtype}" if fused else f"{equation}, {'trained' if trained else 'not trained'}, in eager"
    options = {"executor": "native" if fused else "calls"}
    return Case(label, lambda x, y: torch.einsum(equation, x, y) + 1, make_inputs, options)


EINSUM = (
    NodeRule(
        name="einsum_to_pointwise_pass",
        purpose="a batch of vector times matrix is a product and a sum, which fuse",
        targets=(aten.einsum.default,),
        rewrite=product_and_sum,
        layout="free",
        numerics="rounded",
        examples=(
            einsum("abc,abcd->abd", (2, 3, 4), (2, 3, 4, 5)),
            einsum("kij, kijx -> kix", (2, 3, 4), (2, 3, 4, 2), dtype=torch.float64),
            einsum("abc,abcd->abd", (2, 3, 4), (2, 3, 4, 5), trained=False),
            einsum("abc,abcd->abd", (2, 3, 4), (2, 3, 4, 5), fused=False),
        ),
        near_misses=(
            einsum("abc,abcd->abd", (2, 3, 4), (2, 3, 4, 5), fused=False, trained=False),
            einsum("abb,abbd->abd", (2, 3, 3), (2, 3, 3, 2)),
            einsum("abc,abcc->abc", (2, 3, 4), (2, 3, 4, 4)),
            einsum("...c,...cd->...d", (2, 3, 4), (2, 3, 4, 5)),
            einsum("abc,abcd->acd", (2, 3, 4), (2, 3, 4, 5)),
            einsum("abc,abcd->abd", (2, 3, 4), (2, 3, 4, 5), dtype=torch.bfloat16),
        ),
    ),
)


@pre_grad_pass(rules=EINSUM)
def einsum_to_pointwise_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """A batch of vector times matrix becomes a product and a sum, as one kernel or in training."""
    return apply_rules(gm, EINSUM, context)
