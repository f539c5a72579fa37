"""Linear layers on one input whose weights are stored as integers become one.

    q = mm(x, to(Wq, bf16).t()) * sq            y = mm(x, to([Wq; Wk], bf16).t()) * [sq sk]
    k = mm(x, to(Wk, bf16).t()) * sk    =>      q, k = split(y, widths, -1)

The weights stay integers: decoded they would take two to four times the memory, so folding leaves the casts alone. The
scales are joined with them, so that a later rule can still make one call of cast, product and scale.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import on_real_tensors, torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.options import way
from ferrite.passes.freezing.binary_cases import constant, of
from ferrite.passes.freezing.layers import RESHAPES, again, sole_reader
from ferrite.passes.shared.constants import constant_of
from ferrite.passes.shared.facts import only_cast, transposed
from ferrite.rewrite import Case, NodeRule, Site, arguments_of, in_order

aten = torch.ops.aten
INTEGERS = (torch.int8, torch.uint8)
OPTION = "merge_sibling_products"  # by this name the option `horizontal` knows all siblings


@dataclass(frozen=True)
class Scaled:
    """A product with a decoded weight, another shape of it if there is one, and the scale behind."""

    source: torch.fx.Node
    decoding: tuple[torch.fx.Node, ...]  # transpose and cast, the last one first
    weight: torch.Tensor  # as it is stored: [columns, inner], or transposed
    reshape: torch.fx.Node | None
    product: torch.fx.Node
    scaling: torch.fx.Node
    scale: torch.Tensor

    @property
    def columns(self) -> int:
        return int(self.scale.numel())

    @property
    def between(self) -> tuple[torch.fx.Node, ...]:
        return (*([self.reshape] if self.reshape is not None else []), self.product, *self.decoding)

    @property
    def stored_by_columns(self) -> bool:
        return len(self.decoding) == 2 and transposed(self.decoding[0]) is not None

    @property
    def kind(self) -> tuple[Any, ...]:
        """What two of them must have in common."""
        inner = self.weight.shape[1 if self.stored_by_columns else 0]
        values = [fake_value(node).dtype for node in (self.product, self.scaling)]
        shape = None if self.reshape is None else str(tuple(fake_value(self.reshape).shape[:-1]))
        return (self.stored_by_columns, self.weight.dtype, self.weight.device, inner, self.scale.dtype, shape, *values)


def scaled_at(product: torch.fx.Node) -> Scaled | Refusal:
    source, factor = in_order(product)
    decoded = decoding_of(factor)
    if decoded is None:
        return Refusal("the matrix is no constant of integers, decoded")
    decoding, weight = decoded
    reader = sole_reader(product)
    reshape = reader if reader is not None and reader.target in RESHAPES else None
    scaling = sole_reader(reshape) if reshape is not None else reader
    if scaling is None or scaling.target is not aten.mul.Tensor:
        return Refusal("there is no scale behind the product, or others read it too")
    before = reshape if reshape is not None else product
    columns = fake_value(product).shape[1]
    if not torch_api.known_equal(fake_value(before).shape[-1], columns):
        return Refusal("a reshape mixes the columns")
    given = arguments_of(scaling)
    scale = constant_of(given["other"] if given["self"] is before else given["self"])
    if scale is None or scale.shape != (columns,) or not scale.is_floating_point():
        return Refusal("the scale is not one constant number for each column")
    return Scaled(source, decoding, weight, reshape, product, scaling, scale)


def decoding_of(factor: Any) -> tuple[tuple[torch.fx.Node, ...], torch.Tensor] | None:
    """The calls that make a matrix of stored integers, and those; nobody else may read them."""
    nodes: list[torch.fx.Node] = []
    node = factor
    while isinstance(node, torch.fx.Node) and constant_of(node) is None:
        inner = transposed(node) or only_cast(node)
        if inner is None or len(node.users) != 1:
            return None
        nodes.append(node)
        node = inner
    weight = constant_of(node)
    casts = [each for each in nodes if transposed(each) is None]
    if weight is None or weight.dtype not in INTEGERS or len(casts) != 1 or len(nodes) > 2 or len(node.users) != 1:
        return None
    return tuple(nodes), weight


def siblings(node: torch.fx.Node) -> list[torch.fx.Node] | Refusal:
    first = scaled_at(node)
    if isinstance(first, Refusal):
        return first
    beside = (scaled_at(user) for user in sorted(first.source.users) if user.target is node.target)
    alike = [each for each in beside if isinstance(each, Scaled) and each.source is first.source]
    found = [each.scaling for each in alike if each.kind == first.kind]
    return found if len(found) > 1 else Refusal("it is the only such product of its input")


def merge(site: Site) -> Any:
    if way(site.options.horizontal, OPTION) == "off":
        return Refusal("the option horizontal is off, or names others")
    products = [behind(root) for root in site.roots]
    first = products[0]
    assert site.constant is not None
    with on_real_tensors():
        weight = torch.cat([each.weight for each in products], 0 if first.stored_by_columns else 1)
        scale = torch.cat([each.scale for each in products])
    factor = site.constant("siblings_weight", weight)
    for node in reversed(first.decoding):
        factor = again(site, node, factor)
    for each in products:
        site.through(*each.between)
    together = site.call(aten.mm.default, first.source, factor)
    if first.reshape is not None:
        sizes = [*in_order(first.reshape)[1][:-1], scale.numel()]
        together = site.call(first.reshape.target, together, sizes)
    together = site.call(aten.mul.Tensor, together, site.constant("siblings_scale", scale))
    pieces = site.call(aten.split_with_sizes.default, together, [each.columns for each in products], -1)
    return tuple(site.call(operator.getitem, pieces, index) for index in range(len(products)))


def behind(scaling: torch.fx.Node) -> Scaled:
    """The product whose scale a root is."""
    for node in scaling.all_input_nodes:
        product = in_order(node)[0] if node.target in RESHAPES else node
        found = scaled_at(product) if product.target is aten.mm.default else None
        if isinstance(found, Scaled):
            return found
    raise AssertionError(f"{scaling.name} scales no product any more")


# --- what it fires on -------------------------------------------------------------------------------------------------

bf16 = torch.bfloat16


def integers(*shape: int, start: int = -3) -> Any:
    return constant(*shape, dtype=torch.int8, start=start, step=1)


def layer(x: Any, columns: int, start: int = -3) -> Any:
    weight = integers(columns, x.shape[-1], start=start)
    return torch.nn.functional.linear(x, weight.to(x.dtype)) * constant(columns, dtype=x.dtype, start=start + 4)


def two(*columns: int, then: Callable[[Any], Any] = torch.relu) -> Callable[[Any], Any]:
    return lambda x: [then(layer(x, each, start)) for start, each in enumerate(columns, -3)]


def of_a_sequence(x: Any) -> Any:
    flat = x.view(6, 8)
    products = [aten.mm.default(flat, integers(4, 8, start=start).to(x.dtype).t()) for start in (-3, -2, -1)]
    return [torch.relu(aten.view.default(y, [2, 3, 4]) * constant(4, dtype=x.dtype)) for y in products]


def one_weight(x: Any) -> Any:
    weight = integers(4, 8).to(x.dtype)
    return [torch.relu(x @ weight.t() * constant(4, dtype=x.dtype, start=start)) for start in (1, 2)]


def stored_by_rows(x: Any) -> Any:
    matrices = [integers(8, 4, start=start) for start in (-3, -2)]
    return [torch.relu(aten.mm.default(x, each.to(x.dtype)) * constant(4, dtype=x.dtype)) for each in matrices]


INTEGER_SIBLINGS = NodeRule(
    name="merge_sibling_integer_products",
    purpose="scaled products of one input with constant matrices of integers are one product",
    targets=(aten.mm.default,),
    roots=siblings,
    rewrite=merge,
    layout="free",
    numerics="rounded",
    examples=(
        Case("two", two(3, 5), of((6, 8), dtype=bf16)),
        Case("three, of a sequence", of_a_sequence, of((2, 3, 8), dtype=bf16)),
        Case("in float32", two(3, 5), of((6, 8))),
        Case("stored by rows", stored_by_rows, of((6, 8), dtype=bf16)),
    ),
    near_misses=(
        Case("one", two(3), of((6, 8), dtype=bf16)),
        Case("they are returned", two(3, 5, then=lambda y: y), of((6, 8), dtype=bf16)),
        Case("one weight twice", one_weight, of((6, 8), dtype=bf16)),
        Case("other inputs", lambda x, y: [*two(3)(x), *two(5)(y)], of((6, 8), (6, 8), dtype=bf16)),
        Case(
            "no scale",
            lambda x: [torch.relu(aten.mm.default(x, integers(8, 4, start=s).to(bf16))) for s in (1, 2)],
            of((6, 8), dtype=bf16),
        ),
        Case("the option is off", two(3, 5), of((6, 8), dtype=bf16), {"horizontal": "off"}),
    ),
)
