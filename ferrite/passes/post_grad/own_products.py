"""Matrix products that are kernels of our own, not torch's: loops like any others, with what follows them inside.

    mm(a, b), bmm(a, b)                     =>      product(a, b)
    addmm(bias, a, b)                       =>      product(a, b) + bias

`torch.ops.ferrite.product` is lowered to a sum of products, which the scheduler arranges in tiles; pointwise operators
that read it become part of the kernel. Whether that pays is decided in `ferrite.passes.shared.own_products`. Weights of
8 bits are `short_weights`, factors that are both of 8 bits `byte_products`.
"""

from __future__ import annotations

from typing import Any

import torch

from ferrite.passes.post_grad.byte_products import OWN_BYTE_PRODUCT
from ferrite.passes.post_grad.gpu_products import OWN_PRODUCT_ON_GPU
from ferrite.passes.post_grad.short_weights import SHORT_WEIGHT_RULES
from ferrite.passes.shared.cases import normal
from ferrite.passes.shared.own_products import OPERANDS, owned, reason_against, reason_to_leave, with_bias
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import Case, NodeRule, Site, apply_rules

aten = torch.ops.aten


def owned_on_cpu(site: Site) -> Any:
    return owned(site, reason_against, reason_to_leave, written)


def written(site: Site, left: Any, right: Any) -> Any:
    return with_bias(site, site.call(torch.ops.ferrite.product.default, left, right))


# --- what it fires on -------------------------------------------------------------------------------------------------


def linear(x: Any, weight: Any, bias: Any) -> Any:
    return aten.addmm.default(bias, x, aten.permute.default(weight, [1, 0]))


ALWAYS = {"own_products": "always"}

OWN_PRODUCT = NodeRule(
    name="own_product",
    purpose="a matrix product becomes loops, which are fused with what follows them",
    targets=tuple(OPERANDS),
    rewrite=owned_on_cpu,
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


RULES = (*SHORT_WEIGHT_RULES, OWN_PRODUCT, OWN_BYTE_PRODUCT, OWN_PRODUCT_ON_GPU)


@graph_pass(stage="post_grad", rules=RULES)
def own_products(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Matrix products for which our own kernels are as fast as torch's: they hold what follows them, too."""
    return apply_rules(gm, RULES, context)
