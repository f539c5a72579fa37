"""Shapes given twice, and splits that nothing is gained by.

reshape(reshape(x, a), b)                      =>   reshape(x, b), or x where b is the shape of x
a', b' = split(cat([a, b]))                    =>   a, b
split(x, sizes)[i], and nobody reads the rest  =>   narrow(x, ...)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value, same_sizes
from ferrite.passes.pre_grad.predicates import (
    is_plain,
    is_shape_view,
    keeps_order,
    sole_user,
)
from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.passes.shared.cases import floats
from ferrite.pipeline import PassContext
from ferrite.rewrite import Case, NodeRule, Site, apply_rules

aten = torch.ops.aten
# They leave the strides of other dimensions alone.
UNITS = frozenset({aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default})


def back_to_an_earlier_shape(site: Site) -> Any:
    """Elements keep their order through every change of shape, so what has the old shape again is the old value."""
    shape = site.value(site.node).shape
    passed: list[torch.fx.Node] = []
    node: Any = site.node.args[0]
    while isinstance(node, torch.fx.Node) and is_plain(fake_value(node)):
        if same_sizes(fake_value(node).shape, shape):
            if any(each.target not in UNITS for each in (site.node, *passed)) and moves_ones(fake_value(node)):
                return Refusal(f"a dimension of {node.name} may get another stride")
            site.through(*passed)
            return node
        if not keeps_order(node):
            break
        passed.append(node)
        node = node.args[0]
    return Refusal("no value before it has this shape")


def moves_ones(value: torch.Tensor) -> bool:
    """Whether a reshape, even to the same sizes, may change the stride of a dimension of one. It does so in eager; in
    the forecast it does not, and forecasts of such strides are not eager's before they are corrected."""
    return not all(torch_api.known_true(size > 1) for size in value.shape)


def without_the_shape_between(site: Site) -> Any:
    inner: Any = site.node.args[0]
    if not keeps_order(inner) or not isinstance(inner.args[0], torch.fx.Node):
        return Refusal("its operand is not reshaped")
    if sole_user(inner) is None:
        return Refusal(f"{inner.name} is read elsewhere too")
    source, sizes = fake_value(inner.args[0]), list(fake_value(site.node).shape)
    if not is_plain(source) or not all(type(size) is int for size in (*source.shape, *source.stride(), *sizes)):
        return Refusal("the sizes are not known")
    is_view = site.node.target is aten.view.default and is_shape_view(inner)
    if is_view and not viewable(source, sizes):
        return Refusal(f"{inner.args[0].name} cannot be viewed so")
    if moves_ones(source) and moves_ones(fake_value(site.node)):  # else the others tell where ones lie
        return Refusal(f"a dimension of {inner.args[0].name} may get another stride")
    site.through(inner)
    return site.call(aten.view.default if is_view else aten.reshape.default, inner.args[0], sizes)


def viewable(value: torch.Tensor, sizes: Sequence[int]) -> bool:
    try:
        torch.empty_strided(value.shape, value.stride(), device="meta").view(sizes)
    except RuntimeError:
        return False
    return True


def written(x: Any) -> Any:
    y = x.t().reshape(6).reshape(3, 2)
    y.add_(1)
    return y * 2


SHAPES = (aten.reshape.default, aten.view.default)
RESTORED = NodeRule(
    name="reshape_back",
    purpose="what has the shape of a value before it again is that value",
    targets=(
        *(*SHAPES, aten.flatten.using_ints, aten.ravel.default),
        *UNITS,
    ),
    rewrite=back_to_an_earlier_shape,
    examples=(
        Case("the shape it has", lambda x: x.reshape(2, -1) + 1, floats(2, 3)),
        Case("flatten of flat", lambda x: x.flatten() + 1, floats(6)),
        Case("there and back", lambda x: x.unflatten(1, (3, 2)).flatten(1) + 1, floats(2, 6)),
        Case("squeeze(unsqueeze)", lambda x: x.unsqueeze(1).squeeze(1) + 1, floats(2, 3)),
        Case("unsqueeze(squeeze)", lambda x: x.sin().squeeze().unsqueeze(0) + 1, floats(1, 3)),
        Case("over three", lambda x: x.view(6).view(3, 2).unsqueeze(0).reshape(2, 3) + 1, floats(2, 3)),
        Case("a copy between", lambda x: torch.cat([x.t().reshape(6).reshape(3, 2)] * 2), floats(2, 3)),
    ),
    near_misses=(
        Case("another shape", lambda x: x.reshape(3, 2) + 1, floats(2, 3)),
        Case("transposed between", lambda x: x.unsqueeze(0).transpose(1, 2).reshape(2, 3) + 1, floats(2, 3)),
        Case("squeezed elsewhere", lambda x: x.unsqueeze(0).squeeze(2) + 1, floats(2, 1)),
        Case("the gradient of one row", lambda x: x.squeeze().unsqueeze(0) + 1, floats(1, 3)),
        Case("returned", lambda x: x.reshape(6).reshape(2, 3), floats(2, 3)),
        Case("a dimension of one is moved", lambda x: x.reshape(1, 6) + 1, floats(1, 6)),
        Case("a copy that is written", written, floats(2, 3)),
        Case("the copy's strides returned", lambda x: x.t().reshape(6).reshape(3, 2), floats(2, 3)),
    ),
    layout="free",
)
RESHAPE_TWICE = NodeRule(
    name="reshape_twice",
    purpose="of two shapes one after the other, the second counts",
    targets=SHAPES,
    rewrite=without_the_shape_between,
    examples=(
        Case("reshape", lambda x: x.reshape(6).reshape(3, 2) + 1, floats(2, 3)),
        Case("view", lambda x: x.view(6).view(3, 2) + 1, floats(2, 3)),
        Case("returned", lambda x: x.view(6).view(3, 2), floats(2, 3)),
        Case("three", lambda x: x.flatten().unsqueeze(0).view(3, 2) + 1, floats(2, 3)),
        Case("the first copies, so does the second", lambda x: x.t().reshape(6).view(2, 3) + 1, floats(2, 3)),
    ),
    near_misses=(
        Case("the first is read elsewhere", lambda x: (lambda y: y.view(3, 2) + y.sum())(x.view(6)), floats(2, 3)),
        Case("as another dtype between", lambda x: x.view(torch.int32).view(6) + 1, floats(2, 3)),
        Case("only one", lambda x: x.view(6) + 1, floats(2, 3)),
        Case("a copy, written later", lambda x: x.t().reshape(6).view(2, 3).add_(1), floats(2, 3)),
        Case("a dimension of one is moved", lambda x: x.view(6, 1).view(1, 6, 1) + 1, floats(1, 6)),
        Case("the copy is returned", lambda x: x.t().reshape(6).view(3, 1, 2), floats(2, 3)),
    ),
)
RESHAPES = (RESTORED, RESHAPE_TWICE)


@pre_grad_pass(rules=RESHAPES)
def remove_reshape_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Of shapes that follow one another the last is kept, or none where it is the one before them."""
    return apply_rules(gm, RESHAPES, context)
