"""Constants of one number: calculated while compiling, and taken out of sums and products that they do not change.

    b = full([4], 2.0) * 3; y = x * b        =>      y = x * full([4], 6.0)
    y = x * ones([4])                        =>      y = x
    g = zeros_like(x)                        =>      g = full([4], 0.0)         # x need not be kept for it

To the bit: `x + 0.0` stays, since it makes 0.0 of -0.0; so does `x * 0` for floats, since nan * 0 is nan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ferrite.errors import Refusal
from ferrite.passes.joint.uniform import COPIES, EXACT, LIKE, RESHAPES, Number, Uniform, is_tensor, sizes_as_arguments
from ferrite.passes.shared.cases import full
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import AnyRule, Case, NodeRule, Site, apply_rules

aten, prims = torch.ops.aten, torch.ops.prims

SUMS = (aten.add.Tensor, aten.add.Scalar)
DIFFERENCES = (aten.sub.Tensor, aten.sub.Scalar)
PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)
# Their results are never -0.0.
UNSIGNED_ZERO = (aten.abs.default, aten.exp.default, aten.sigmoid.default, aten._softmax.default)


def folded(site: Site) -> Any:
    """The constant itself, in place of the calls that make it."""
    search, value = Uniform(), site.value(site.node)
    number = search.number(site.node)
    if number is None:
        return Refusal("its elements are not known to be one number")
    source = site.node.all_input_nodes[0] if site.node.target in RESHAPES else None
    if source is not None and len(source.users) > 1:
        return Refusal("it is a view of a constant that others read")
    return constant_like(site, value, number, search)


def constant_like(site: Site, value: torch.Tensor, number: Number, search: Uniform) -> Any:
    sizes = sizes_as_arguments(site, value.shape, search.walked)
    if sizes is None:
        return Refusal("a size has no node of its own")
    site.through(*(node for node in search.walked if node is not site.node))
    return site.call(aten.full.default, sizes, number, dtype=value.dtype, device=value.device, pin_memory=False)


def operands(site: Site) -> list[tuple[torch.fx.Node, Any]]:
    """Each operand that is a tensor with the other one beside it, in the orders in which the other can be neutral."""
    left, right = site.arguments["self"], site.arguments["other"]
    both = [(left, right)]
    if site.node.target in (*SUMS, *PRODUCTS):
        both.append((right, left))
    return [(kept, other) for kept, other in both if isinstance(kept, torch.fx.Node) and is_tensor(kept)]


def without_neutral(site: Site) -> Any:
    value = site.value(site.node)
    if value.dtype.is_complex:
        return Refusal("it is complex: a product has parts that cancel")
    if site.arguments.get("alpha", 1) != 1:
        return Refusal("an operand is scaled")
    search = Uniform()
    for kept, other in operands(site):
        number = search.number(other)
        if number is not None and is_neutral(site, kept, number):
            site.through(*search.walked)
            same = site.value(kept).dtype == value.dtype
            return kept if same else site.call(aten._to_copy.default, kept, dtype=value.dtype)
    return Refusal("no operand is neutral")


def is_neutral(site: Site, kept: torch.fx.Node, number: Number) -> bool:
    """Whether the result is the other operand to the bit."""
    if site.node.target in (*PRODUCTS, *QUOTIENTS):
        return number == 1
    if number != 0:
        return False
    if not site.value(kept).is_floating_point() or kept.target in UNSIGNED_ZERO:
        return True
    # x + -0.0 and x - 0.0 are x; the other two make 0.0 of -0.0
    negative = math.copysign(1.0, number) < 0
    return negative if site.node.target in SUMS else not negative


def zero_of_integers(site: Site) -> Any:
    value = site.value(site.node)
    if value.is_floating_point() or value.dtype.is_complex:
        return Refusal("nan and infinity times zero are no zero")
    search = Uniform()
    if not any(search.number(other) == 0 for _, other in operands(site)):
        return Refusal("no operand is zero")
    return constant_like(site, value, 0, search)


def given(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], list[torch.Tensor]]:
    return lambda: [(torch.rand(shape) * 10 - 5).to(dtype)]


def special() -> list[torch.Tensor]:
    return [torch.tensor([-0.0, 0.0, torch.inf, torch.nan, -3.0, 2.0])]


def after_one_over(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Tells -0.0 from 0.0."""
    return lambda x: aten.reciprocal.default(function(x))


CONSTANT_FOLD_UNIFORM = NodeRule(
    name="constant_fold_uniform_value",
    purpose="a tensor of one number is a constant, however it is calculated",
    targets=(*EXACT, *RESHAPES, *COPIES, *LIKE),
    rewrite=folded,
    examples=(
        Case("a product", lambda x: x * (full([4, 3], 2.0) * 3), given(4, 3)),
        Case("a chain", lambda x: x * ((full([4, 1], 2.0) - full([3], 0.5)).abs() / 4), given(4, 3)),
        Case("converted", lambda x: x + full([4], 1.7).to(torch.int32), given(4)),
        Case("half precision rounds", lambda x: x + full([4], 0.1, torch.float16) * 0.3, given(4)),
        Case("compared", lambda x: aten.where.self(full([4], 2.0) > 1, x, -x), given(4)),
        Case("a view", lambda x: x + full([12], 2.0).view(4, 3), given(4, 3)),
        Case("part of it", lambda x: x + full([8], 2.0)[:4], given(4)),
        Case("a copy", lambda x: x * full([4], -0.0).clone(), given(4)),
        Case("like another tensor", lambda x: aten.zeros_like.default(x) - x, given(4, 3)),
        Case("new, beside another tensor", lambda x: aten.new_full.default(x, [4], 2) - x, given(4)),
        Case("an integer that wraps", lambda x: x + full([4], 127, torch.int8) * 2, given(4, dtype=torch.int8)),
        Case("infinite", lambda x: x + full([4], 1.0) / 0, given(4)),
        Case("returned", lambda x: full([4], 2.0) + 1, given(4)),
    ),
    near_misses=(
        Case("one operand is not constant", lambda x: full([4], 2.0) * x, given(4)),
        Case("random", lambda x: torch.rand(4) * 2 + x, given(4)),
        Case("not rounded once", lambda x: x + full([4], 2.0).exp() * 2, given(4)),
        Case("bits of another width", lambda x: x + full([4], 2.0).view(torch.int16).clone()[:4], given(4)),
        Case("strides of the other", lambda x: x + aten.zeros_like.default(x.t()).sin(), given(4, 4)),
        Case("too large for the dtype", lambda x: x + full([4], 1e30).to(torch.int32), given(4)),
        Case(
            "a view of what others read",
            lambda x: (c := full([12], 2.0), x + c.view(4, 3), c.sin())[1:],
            given(4, 3),
        ),
        Case("complex", lambda x: x + full([4], 2.0, torch.complex64) * 3, given(4)),
    ),
)

IDENTITY_ARITH = NodeRule(
    name="identity_arith",
    purpose="adding nothing, or multiplying by one, is the operand",
    targets=(*SUMS, *DIFFERENCES, *PRODUCTS, *QUOTIENTS),
    rewrite=without_neutral,
    layout="free",
    examples=(
        Case("times ones", after_one_over(lambda x: x * full([6], 1.0)), special),
        Case("ones first", after_one_over(lambda x: full([6], 1.0) * x), special),
        Case("times a number", after_one_over(lambda x: x * 1), special),
        Case("by ones", after_one_over(lambda x: x / full([], 1.0)), special),
        Case("minus zero", after_one_over(lambda x: x - full([6], 0.0)), special),
        Case("plus the negative zero", after_one_over(lambda x: x + full([6], -0.0)), special),
        Case("plus zero behind a magnitude", after_one_over(lambda x: x.abs() + full([6], 0.0)), special),
        Case("integers plus zero", lambda x: (x + full([4], 0, torch.int64)) * 2, given(4, dtype=torch.int64)),
        Case("integers become floats", lambda x: (x * full([4], 1.0)).sin(), given(4, dtype=torch.int32)),
        Case("integers divided", lambda x: (x / 1).sin(), given(4, dtype=torch.int32)),
        Case("a constant that spreads", lambda x: (x * full([1], 1.0)).sin(), given(4, 3)),
        Case("an operand that is spread", lambda x: (x.expand(4, 3) * full([4, 3], 1.0)).sin(), given(3)),
    ),
    near_misses=(
        Case("plus zero", after_one_over(lambda x: x + full([6], 0.0)), special),
        Case("minus the negative zero", after_one_over(lambda x: x - full([6], -0.0)), special),
        Case("a number that is not one", lambda x: x * 2, given(4)),
        Case("zero minus it", lambda x: full([4], 0, torch.int64) - x, given(4, dtype=torch.int64)),
        Case("one divided by it", lambda x: full([4], 1.0) / x, given(4)),
        Case("the operand is spread", lambda x: x * full([4, 3], 1.0), given(3)),
        Case("returned", lambda x: x * full([4], 1.0), given(4)),
        Case("complex", lambda x: (x * full([4], 1.0)).abs(), given(4, dtype=torch.complex64)),
        Case("scaled", lambda x: aten.add.Tensor(full([4], 0), x, alpha=2), given(4, dtype=torch.int64)),
    ),
)

MUL_ZERO = NodeRule(
    name="mul_zero",
    purpose="integers times zero are zero",
    targets=PRODUCTS,
    rewrite=zero_of_integers,
    layout="free",
    examples=(
        Case("a number", lambda x: x * 0, given(4, dtype=torch.int64)),
        Case("a constant", lambda x: x * full([4], 0, torch.int32) + 1, given(4, dtype=torch.int32)),
        Case("bool", lambda x: x * full([4], 0, torch.bool), given(4, dtype=torch.bool)),
        Case("transposed", lambda x: (x.t() * 0).sum(), given(4, 3, dtype=torch.int32)),
    ),
    near_misses=(
        Case("floats", lambda x: x * 0, special),
        Case("integers that become floats", lambda x: x * 0.0, given(4, dtype=torch.int64)),
        Case("not zero", lambda x: x * 2, given(4, dtype=torch.int64)),
        Case("transposed and returned", lambda x: x.t() * 0, given(4, 3, dtype=torch.int32)),
    ),
)

CONSTANT_RULES: tuple[AnyRule, ...] = (CONSTANT_FOLD_UNIFORM, IDENTITY_ARITH, MUL_ZERO)


@graph_pass(stage="joint", rules=CONSTANT_RULES)
def constant_fold_uniform_value(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Constants of one number are calculated while compiling; neutral ones leave sums and products."""
    return apply_rules(gm, CONSTANT_RULES, context)
