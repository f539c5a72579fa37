"""Matrix products with the rows of one side along the rows of the other: one operand is laid out anew.

    mm(a, b)        a by rows, b by columns     =>      mm(a by columns, b), or mm(a, b by rows)

A linear layer has its operands like that, and so have the scores of attention. On Arm torch gives these products, and
no others, to the Arm Compute Library, which takes 70 microseconds before it begins: for each matrix of a batch. All
others go to OpenBLAS. The smaller operand is copied; often the kernel that makes it writes it so.

Where that was measured to gain: `ferrite.machines.beside_torch`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.machines import MatrixProduct, thread_counts
from ferrite.passes.shared.cases import normal
from ferrite.passes.shared.equal_calls import one_of_equal_calls
from ferrite.passes.shared.facts import beside_torch
from ferrite.passes.shared.own_products import OPERANDS
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import Case, NodeRule, Site, apply_rules

aten = torch.ops.aten


def laid_out(site: Site) -> Any:
    names = OPERANDS[site.node.target]
    left, right = (site.arguments[name] for name in names)
    a, b = fake_value(left), fake_value(right)
    if site.options.product_layouts == "off":
        return Refusal("the option product_layouts is off")
    if a.device.type != "cpu" or a.dtype is not torch.float32:
        return Refusal("products in other layouts are measured for float32 on a cpu only")
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return Refusal("an operand is sparse")
    sizes = (a.shape[-2], a.shape[-1], b.shape[-1])
    if any(torch_api.known_true(size <= 1) for size in sizes):
        return Refusal("it has a single row or column")
    if is_by_columns(a) or not is_by_columns(b):
        return Refusal("the rows of the left do not lie along the columns of the right")
    changed = min((item for item in (b, a) if not stands_for_several(item)), key=elements, default=None)
    if changed is None:
        return Refusal("both operands stand for several copies")
    if site.options.product_layouts == "auto" and (refusal := reason_to_leave(site, sizes, changed)):
        return refusal
    copied = by_rows(site, right) if changed is b else by_columns(site, left)
    given = {**site.arguments, names[changed is b]: copied}
    factors = {name: given.pop(name) for name in ("beta", "alpha") if name in given}
    return site.call(site.node.target, *given.values(), **factors)


def reason_to_leave(site: Site, sizes: tuple[Any, ...], changed: torch.Tensor) -> Refusal | None:
    """Why it was not measured to gain, if it was not."""
    if site.options.executor != "native":
        return Refusal("it was measured among kernels of our own")
    has_all_cores = thread_counts.works_with_all_of_few_cores()
    rows, inner, columns = map(torch_api.size_hint, sizes)
    given = MatrixProduct(rows, inner, columns, has_all_cores=has_all_cores)
    return beside_torch().product_layout(given, elements(changed) // max(batch_of(changed), 1))


def is_by_columns(matrix: torch.Tensor) -> bool:
    down, along = matrix.stride()[-2:]
    return torch_api.known_equal(down, 1) and not torch_api.known_equal(along, 1)


def stands_for_several(matrix: torch.Tensor) -> bool:
    return any(torch_api.known_equal(step, 0) for step in matrix.stride())


def elements(matrix: torch.Tensor) -> int:
    return math.prod(map(torch_api.size_hint, matrix.shape))


def batch_of(matrix: torch.Tensor) -> int:
    return math.prod(map(torch_api.size_hint, matrix.shape[:-2]))


def by_rows(site: Site, matrix: Any) -> Any:
    return site.call(aten.clone.default, matrix, memory_format=torch.contiguous_format)


def by_columns(site: Site, matrix: Any) -> Any:
    *batch, rows, columns = range(fake_value(matrix).ndim)
    order = [*batch, columns, rows]
    return site.call(aten.permute.default, by_rows(site, site.call(aten.permute.default, matrix, order)), order)


# --- what it fires on -------------------------------------------------------------------------------------------------


def linear(x: Any, weight: Any) -> Any:
    return aten.mm.default(x, aten.permute.default(weight, [1, 0]))


def with_bias(x: Any, weight: Any, bias: Any) -> Any:
    return aten.addmm.default(bias, x, aten.permute.default(weight, [1, 0]), beta=3, alpha=2)


def scores(q: Any, k: Any) -> Any:
    return aten.bmm.default(q, aten.permute.default(k, [0, 2, 1]))


def scores_of_heads(q: Any, k: Any) -> Any:
    """Both as a projection leaves them: the heads of a token side by side."""
    return aten.bmm.default(aten.permute.default(q, [1, 0, 2]), aten.permute.default(k, [1, 2, 0]))


def with_mask(mask: Any, q: Any, k: Any) -> Any:
    return aten.baddbmm.default(mask, q, aten.permute.default(k, [0, 2, 1]), alpha=0.5)


def for_all(q: Any, k: Any) -> Any:
    """One matrix for the whole batch."""
    return aten.bmm.default(q, aten.expand.default(aten.permute.default(k, [1, 0]), [3, 4, 6]))


ALWAYS = {"product_layouts": "always"}

PRODUCT_LAYOUT = NodeRule(
    name="product_layout",
    purpose="a product of rows with rows has one operand laid out anew",
    targets=tuple(OPERANDS),
    rewrite=laid_out,
    numerics="rounded",
    examples=(
        Case("a linear layer", linear, normal((5, 4), (6, 4)), ALWAYS),
        Case("a small weight", linear, normal((5, 4), (3, 4)), ALWAYS),
        Case("with a bias, scaled", with_bias, normal((5, 4), (6, 4), (6,)), ALWAYS),
        Case("a batch", scores, normal((3, 5, 4), (3, 6, 4)), ALWAYS),
        Case("heads side by side", scores_of_heads, normal((5, 3, 4), (5, 3, 4)), ALWAYS),
        Case("a batch with a mask", with_mask, normal((3, 5, 6), (3, 5, 4), (3, 6, 4)), ALWAYS),
        Case("one matrix for all", for_all, normal((3, 5, 4), (6, 4)), ALWAYS),
    ),
    near_misses=(
        Case("switched off", linear, normal((5, 4), (6, 4)), {"product_layouts": "off"}),
        Case("tiny, where that decides", linear, normal((5, 4), (6, 4))),
        Case("by rows already", aten.mm.default, normal((5, 4), (4, 6)), ALWAYS),
        Case(
            "by columns already",
            lambda x, w: linear(aten.permute.default(x, [1, 0]), w),
            normal((4, 5), (6, 4)),
            ALWAYS,
        ),
        Case("double precision", linear, normal((5, 4), (6, 4), dtype=torch.float64), ALWAYS),
        Case("a single row", linear, normal((1, 4), (6, 4)), ALWAYS),
        Case("a single column", linear, normal((5, 4), (1, 4)), ALWAYS),
        Case("nothing at all", linear, normal((5, 4), (0, 4)), ALWAYS),
    ),
)


@graph_pass(stage="post_grad", rules=(PRODUCT_LAYOUT,))
def lay_out_products(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Operands of matrix products have the layouts with which torch is fast; products of one operand share a copy."""
    made = apply_rules(gm, (PRODUCT_LAYOUT,), context)
    return made + (one_of_equal_calls(gm, context) if made else 0)
