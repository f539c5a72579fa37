"""What may stand between the two products, one small function for each spelling.

A function takes a call and yields the ways to read it. A new spelling is a new line in one of the tables:

    SCORES      from the softmax back to the first product: scales, masks, fills, casts, other shapes
    WEIGHTS     from the second product back to the softmax: dropout, casts, other shapes
    SOFTMAXES   the softmax itself
    PRODUCTS    the two products
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.graph import fake_value
from ferrite.passes.attention.constants import number_of
from ferrite.passes.attention.found import (
    Add,
    Arguments,
    Change,
    Dropout,
    Fill,
    Node,
    Nothing,
    Product,
    Refused,
    Scale,
    Softmax,
    Step,
    TensorScale,
)
from ferrite.rewrite.arguments import arguments_of

aten, prims = torch.ops.aten, torch.ops.prims
Reading = Callable[[Node, Arguments], Iterator[Step]]


def is_tensor(item: Any) -> bool:
    return isinstance(item, Node) and isinstance(fake_value(item), torch.Tensor)


# --- shapes and types -------------------------------------------------------------------------------------------------


def other_batch(node: Node, given: Arguments) -> Iterator[Step]:
    """The same elements in the same order, rows and columns as they were: only the batch is spelled otherwise."""
    inner = node.args[0]
    if isinstance(inner, Node) and is_tensor(inner) and same_matrices(fake_value(inner), fake_value(node)):
        yield Step(inner, Nothing())


def same_matrices(old: torch.Tensor, new: torch.Tensor) -> bool:
    if old.dim() < 2 or new.dim() < 2 or not torch_api.known_equal(old.numel(), new.numel()):
        return False
    return all(map(torch_api.known_equal, old.shape[-2:], new.shape[-2:]))


def cast(node: Node, given: Arguments) -> Iterator[Step]:
    """A floating-point type to another, on the same device."""
    inner = node.args[0]
    if not isinstance(inner, Node) or not is_tensor(inner):
        return
    old, new = fake_value(inner), fake_value(node)
    if old.is_floating_point() and new.is_floating_point() and old.device == new.device:
        yield Step(inner, Nothing())


def wider(node: Node, given: Arguments) -> Iterator[Step]:
    for step in cast(node, given):
        if fake_value(step.inner).dtype.itemsize <= fake_value(node).dtype.itemsize:
            yield step


SHAPE_TARGETS = (
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten._reshape_alias.default),
    *(aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default),
    *(aten.clone.default, aten.contiguous.default, aten.alias.default, aten.flatten.using_ints),
    *(aten.unflatten.int, aten.lift_fresh_copy.default),
)
SHAPES: Mapping[Any, Reading] = dict.fromkeys(SHAPE_TARGETS, other_batch)
CAST_TARGETS = (
    *(aten.to.dtype, aten.to.other, aten.to.device, aten.to.dtype_layout, aten.type_as.default),
    *(aten._to_copy.default, prims.convert_element_type.default, "type", "to"),
)

# --- scales and masks -------------------------------------------------------------------------------------------------


def multiplied(node: Node, given: Arguments) -> Iterator[Step]:
    for inner, other in both_ways(given):
        factor = number_of(other)
        if factor is not None:
            yield Step(inner, Scale(factor))
        elif is_tensor(other):
            yield Step(inner, TensorScale(other))


def divided(node: Node, given: Arguments) -> Iterator[Step]:
    inner, other = given["self"], given["other"]
    divisor = number_of(other)
    if divisor is not None:
        if divisor != 0:
            yield Step(inner, Scale(1 / divisor))
    elif is_tensor(other):
        yield Step(inner, TensorScale(other, aten.div.Tensor))


def added(node: Node, given: Arguments) -> Iterator[Step]:
    if given.get("alpha", 1) == 1:
        yield from (Step(inner, Add(other)) for inner, other in both_ways(given) if is_tensor(other))


def subtracted(node: Node, given: Arguments) -> Iterator[Step]:
    if given.get("alpha", 1) == 1 and is_tensor(given["other"]):
        yield Step(given["self"], Add(given["other"], negated=True))


def both_ways(given: Arguments) -> Iterator[tuple[Node, Any]]:
    one, other = given["self"], given["other"]
    if is_tensor(one):
        yield one, other
    if is_tensor(other) and other is not one:
        yield other, one


def chosen(node: Node, given: Arguments) -> Iterator[Step]:
    """where(condition, scores, number) and where(condition, number, scores)."""
    condition = given["condition"]
    for inner, other, when in ((given["self"], given["other"], False), (given["other"], given["self"], True)):
        value = number_of(other)
        if is_tensor(inner) and value is not None:
            yield Step(inner, Fill(condition, value, when))


def filled(node: Node, given: Arguments) -> Iterator[Step]:
    value = number_of(given["value"])
    if value is not None:
        yield Step(given["self"], Fill(given["mask"], value, when=True))


SCORES: Mapping[Any, Reading] = {
    **SHAPES,
    **dict.fromkeys(CAST_TARGETS, wider),
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), multiplied),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), divided),
    aten.add.Tensor: added,
    aten.sub.Tensor: subtracted,
    **dict.fromkeys((aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf), chosen),
    **dict.fromkeys((aten.masked_fill.Scalar, aten.masked_fill.Tensor), filled),
}

# --- dropout ----------------------------------------------------------------------------------------------------------


def dropped(node: Node, given: Arguments) -> Iterator[Step]:
    inner, probability = given["input"], given["p"]
    if given["train"] is False or probability == 0:
        yield Step(inner, Nothing())
    elif isinstance(probability, (int, float)) and given["train"] is True:
        yield Step(inner, Dropout(float(probability)))


def first_result(node: Node, given: Arguments) -> Iterator[Step]:
    """dropped, mask = native_dropout(weights, p, train)."""
    source, index = node.args
    if index == 0 and isinstance(source, Node) and source.target is aten.native_dropout.default:
        yield from dropped(source, arguments_of(source))


WEIGHTS: Mapping[Any, Reading] = {
    **SHAPES,
    **dict.fromkeys(CAST_TARGETS, cast),
    aten.dropout.default: dropped,
    operator.getitem: first_result,
}

# --- the softmax ------------------------------------------------------------------------------------------------------


def whole(node: Node, given: Arguments) -> Softmax | None:
    scores = given["self"]
    old, new = fake_value(scores), fake_value(node)
    if not along_rows(given["dim"], new) or new.dtype.itemsize < old.dtype.itemsize:
        return None
    return Softmax(scores, (node,), safe=node.target is aten._safe_softmax.default)


def in_parts(node: Node, given: Arguments) -> Softmax | None:
    """exp(x - amax(x)) / sum of it."""
    powers, total = given["self"], given["other"]
    if not called(total, aten.sum.dim_IntList) or total.args[0] is not powers or not called(powers, aten.exp.default):
        return None
    shifted = powers.args[0]
    if not called(shifted, aten.sub.Tensor) or arguments_of(shifted)["alpha"] != 1:
        return None
    scores, largest = shifted.args[:2]
    if not called(largest, aten.amax.default) or largest.args[0] is not scores:
        return None
    for reduction in (largest, total):
        asked = arguments_of(reduction)
        dims = asked["dim"]
        if not isinstance(dims, (list, tuple)) or len(dims) != 1 or asked.get("dtype") is not None:
            return None
        if not along_rows(dims[0], fake_value(scores)) or asked["keepdim"] is not True:
            return None
    return Softmax(scores, (node, total, powers, shifted, largest))


def along_rows(dim: Any, value: torch.Tensor) -> bool:
    return value.dim() >= 2 and dim in (-1, value.dim() - 1)


def called(node: Any, target: Any) -> bool:
    return isinstance(node, Node) and node.target is target


SOFTMAXES: Mapping[Any, Callable[[Node, Arguments], Softmax | None]] = {
    aten.softmax.int: whole,
    aten._softmax.default: whole,
    aten._safe_softmax.default: whole,
    aten.div.Tensor: in_parts,
}

# --- the products -----------------------------------------------------------------------------------------------------


def plain(node: Node, given: Arguments) -> Product | None:
    left, right = given["self"], given.get("other", given.get("mat2"))
    return in_order(node, left, right)


def in_order(node: Node, left: Any, right: Any, steps: tuple[Change, ...] = ()) -> Product | None:
    if not is_tensor(left) or not is_tensor(right):
        return None
    ranks = [fake_value(item).dim() for item in (left, right, node)]
    if min(ranks) < 2:
        return None
    orders = [tuple(range(rank)) for rank in ranks]
    return Product(node, left, right, orders[0], orders[1], orders[2], steps)


def with_input(node: Node, given: Arguments) -> Product | None:
    """baddbmm: beta * input + alpha * product."""
    alpha, beta = given["alpha"], given["beta"]
    if not all(isinstance(each, (int, float)) for each in (alpha, beta)) or beta not in (0, 1):
        return None
    steps: tuple[Change, ...] = () if alpha == 1 else (Scale(float(alpha)),)
    steps += (Add(given["self"]),) if beta == 1 else ()
    return in_order(node, given["batch1"], given["batch2"], steps)


def einstein(node: Node, given: Arguments) -> Product | None:
    """einsum("b i h d, b j h d -> b h i j", q, k): labels say which dimension goes where."""
    equation, operands = given["equation"], given["tensors"]
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    left, comma, right = inputs.partition(",")
    labels = (left, right, result)
    if not arrow or not comma or "," in right or len(operands) != 2 or not all(map(is_tensor, operands)):
        return None
    if any(not each.isalpha() or len(set(each)) != len(each) for each in labels):
        return None
    batch = [label for label in result if label in left and label in right]
    rows, columns = ([label for label in result if label in side and label not in batch] for side in (left, right))
    summed = [label for label in left if label in right and label not in result]
    if (len(rows), len(columns), len(summed)) != (1, 1, 1) or set(left + right) != {*result, *summed}:
        return None
    (i,), (j,), (d,) = rows, columns, summed
    return Product(
        node,
        operands[0],
        operands[1],
        tuple(map(left.index, (*batch, i, d))),
        tuple(map(right.index, (*batch, d, j))),
        tuple(map([*batch, i, j].index, result)),
    )


PRODUCTS: Mapping[Any, Callable[[Node, Arguments], Product | None]] = {
    aten.matmul.default: plain,
    aten.bmm.default: plain,
    aten.baddbmm.default: with_input,
    aten.einsum.default: einstein,
}


def product_of(node: Node) -> Product | None:
    read = PRODUCTS.get(node.target)
    found = read(node, arguments_of(node)) if read is not None else None
    if found is not None and any(not fake_value(each).is_floating_point() for each in (found.left, found.right)):
        raise Refused("the product is not of floating-point numbers")
    return found


def softmax_of(node: Node) -> Softmax | None:
    read = SOFTMAXES.get(node.target)
    return read(node, arguments_of(node)) if read is not None else None
