"""Products with matrices that are made as one: what they have in common, and how the one product is written."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.passes.pre_grad import horizontal
from ferrite.passes.pre_grad.horizontal import hints, rows_of
from ferrite.passes.shared.batching import Fusion, Settings
from ferrite.passes.shared.batching.members import identity
from ferrite.passes.shared.facts import leaves_quick_way
from ferrite.pipeline import PassContext
from ferrite.rewrite import Writer, arguments_of, inherit

aten = torch.ops.aten


class Names(NamedTuple):
    """What a product calls its operands; `rows`: its weight holds the results' features in rows, not in columns."""

    input: str
    weight: str
    bias: str | None
    rows: bool


PRODUCTS: Mapping[Any, Names] = {
    aten.linear.default: Names("input", "weight", "bias", True),
    aten.matmul.default: Names("self", "other", None, False),
    aten.mm.default: Names("self", "mat2", None, False),
    aten.addmm.default: Names("mat1", "mat2", "self", False),
}


class MatrixCall(NamedTuple):
    input: torch.fx.Node
    weight: torch.fx.Node
    bias: torch.fx.Node | None
    width: Any


def product_of(node: torch.fx.Node) -> MatrixCall:
    names, given = PRODUCTS[node.target], arguments_of(node)
    weight = given[names.weight]
    width = fake_value(weight).shape[0 if names.rows else 1]
    return MatrixCall(given[names.input], weight, given[names.bias] if names.bias else None, width)


def product_problem(arguments: Mapping[str, Any], values: tuple[torch.Tensor, ...]) -> Refusal | None:
    """Why a product is not one of rows with a matrix, plus a bias for each of its columns."""
    x, weight = values
    if weight.dim() != 2 or x.dim() < 1:
        return Refusal("it is no product with a matrix")
    if not x.is_floating_point() or x.dtype != weight.dtype:
        return Refusal("it is no product of floating point numbers of one dtype")
    if any(arguments.get(factor, 1) != 1 for factor in ("alpha", "beta")):
        return Refusal("it is scaled")
    in_addmm = "mat1" in arguments
    bias = arguments["self"] if in_addmm else arguments.get("bias")
    if bias is None:
        return None
    bias, width = fake_value(bias), weight.shape[1 if in_addmm else 0]
    if bias.dtype != x.dtype or bias.dim() != 1 or not torch_api.known_equal(bias.shape[0], width):
        return Refusal("its bias is not one number for each column")
    return None


# --- one input --------------------------------------------------------------------------------------------------------


def known_width(arguments: Mapping[str, Any], values: tuple[torch.Tensor, ...]) -> Refusal | None:
    known = all(isinstance(size, int) for size in values[1].shape)
    return product_problem(arguments, values) if known else Refusal("the size of its weight is not known")


def side_by_side(
    fusion: Fusion, writer: Writer, members: Sequence[torch.fx.Node], settings: Settings
) -> list[torch.fx.Node]:
    """One product with all weights; layers with one and the same weight and bias share their part of it."""
    target, products = members[0].target, [product_of(member) for member in members]
    places: dict[Any, int] = {}
    distinct: list[MatrixCall] = []
    for each in products:
        if places.setdefault((identity(each.weight), identity(each.bias)), len(distinct)) == len(distinct):
            distinct.append(each)
    x, weight, bias = distinct[0].input, distinct[0].weight, distinct[0].bias
    if len(distinct) > 1:
        weight = writer.call(aten.cat.default, [each.weight for each in distinct], 0 if PRODUCTS[target].rows else 1)
        bias = joined_bias(writer, distinct)
    whole = write_product(writer, target, x, weight, bias)
    if len(distinct) == 1:
        return [whole] * len(members)
    last = fake_value(whole).dim() - 1
    split = writer.call(aten.split_with_sizes.default, whole, [each.width for each in distinct], last)
    parts = [writer.call(operator.getitem, split, index) for index in range(len(distinct))]
    results = [parts[places[(identity(each.weight), identity(each.bias))]] for each in products]
    for result, member in zip(results, members, strict=True):
        inherit(result, member)
    return results


def joined_bias(writer: Writer, products: Sequence[MatrixCall]) -> torch.fx.Node | None:
    """Layers without a bias get zeros, if any has one."""
    if all(each.bias is None for each in products):
        return None
    blocks = [
        each.bias if each.bias is not None else writer.call(aten.new_zeros.default, each.weight, [each.width])
        for each in products
    ]
    return writer.call(aten.cat.default, blocks)


def write_product(
    writer: Writer, target: Any, x: torch.fx.Node, weight: torch.fx.Node, bias: torch.fx.Node | None
) -> torch.fx.Node:
    if target is aten.addmm.default:
        return writer.call(target, bias, x, weight)
    return writer.call(target, x, weight) if bias is None else writer.call(target, x, weight, bias)


def one_input_pays(members: Sequence[torch.fx.Node], copied: int, context: PassContext) -> bool:
    products = [product_of(member) for member in members]
    x = fake_value(products[0].input)
    rows, features, widths = rows_of(x), *hints(x.shape[-1:]), [each.width for each in products]
    frozen = context.is_inference and horizontal.are_frozen(context.options, [each.weight for each in products])
    if copied or x.device.type not in ("cpu", "cuda"):
        return False
    if x.device.type == "cpu":
        return frozen and not leaves_quick_way(rows, features * max(widths), features * sum(widths))
    if frozen or horizontal.concat_is_small(rows, features, widths):
        return True
    moved = features * sum(widths) * x.element_size()
    return horizontal.saves_launches(members, 0, moved, 1 + any(each.bias is not None for each in products))


# --- one weight -------------------------------------------------------------------------------------------------------


def known_rows(arguments: Mapping[str, Any], values: tuple[torch.Tensor, ...]) -> Refusal | None:
    known = all(isinstance(size, int) for value in values for size in value.shape)
    return product_problem(arguments, values) if known else Refusal("its sizes are not known")


def one_weight_pays(members: Sequence[torch.fx.Node], copied: int, context: PassContext) -> bool:
    """On a GPU, where a launch costs more than copying the inputs together. On a CPU it depends on the build."""
    inputs = [product_of(member).input for member in members]
    if fake_value(inputs[0]).device.type != "cuda":
        return False
    return horizontal.saves_launches(members, copied, sum(map(horizontal.bytes_of, inputs)), 1)


def one_after_the_other(
    fusion: Fusion, writer: Writer, members: Sequence[torch.fx.Node], settings: Settings
) -> list[torch.fx.Node]:
    """One product with the rows of all inputs."""
    target, products = members[0].target, [product_of(member) for member in members]
    rows = [rows_of(fake_value(each.input)) for each in products]
    flat = []
    for each, count in zip(products, rows, strict=True):
        shape = fake_value(each.input).shape
        is_flat = len(shape) == 2
        flat.append(each.input if is_flat else writer.call(aten.reshape.default, each.input, [count, shape[-1]]))
    whole = write_product(writer, target, writer.call(aten.cat.default, flat), products[0].weight, products[0].bias)
    split = writer.call(aten.split_with_sizes.default, whole, rows)
    results = []
    for index, member in enumerate(members):
        part = writer.call(operator.getitem, split, index)
        inherit(part, member)
        shape = list(fake_value(member).shape)
        results.append(part if len(shape) == 2 else writer.call(aten.reshape.default, part, shape))
        inherit(results[-1], member)
    return results
