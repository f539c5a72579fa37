"""Products of one input with constant matrices become one product with the matrices side by side.

    q = addmm(bq, x, Wq)                y = addmm([bq bk bv], x, [Wq Wk Wv])
    k = addmm(bk, x, Wk)        =>      q, k, v = split(y, widths, 1)
    v = addmm(bv, x, Wv)

One call reads x once and fills a machine better than three. The joined matrix is made once, while compiling, and takes
the place of its parts. The pieces lie in rows of the whole, which must not be seen from outside.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from ferrite.capture import on_real_tensors, torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.options import way
from ferrite.passes.freezing.binary_cases import constant, of
from ferrite.passes.freezing.integer_siblings import INTEGER_SIBLINGS, OPTION
from ferrite.passes.freezing.layers import FrozenLayer, product_at, shared_weight
from ferrite.passes.shared.facts import leaves_quick_way
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import Case, NodeRule, Site, apply_rules

aten = torch.ops.aten
NAME = OPTION


def siblings(node: torch.fx.Node) -> list[torch.fx.Node] | Refusal:
    """All products of the same kind on the same input."""
    first = member(node)
    if isinstance(first, Refusal):
        return first
    source: Any = left_of(first)
    found = []
    for user in sorted(source.users):
        layer = member(user) if user.target is node.target else None
        if isinstance(layer, FrozenLayer) and left_of(layer) is source and alike(layer, first):
            found.append(user)
    return found if len(found) > 1 else Refusal("it is the only product of its input with a constant")


def member(node: torch.fx.Node) -> FrozenLayer | Refusal:
    layer = product_at(node)
    if isinstance(layer, Refusal):
        return layer
    return shared_weight(layer) or layer


def left_of(layer: FrozenLayer) -> Any:
    return layer.arguments["self" if layer.node.target is aten.mm.default else "mat1"]


def alike(one: FrozenLayer, other: FrozenLayer) -> bool:
    """Whether two matrices can stand side by side: of one type, on one device, as high as each other."""
    kinds = {(layer.weight.dtype, layer.weight.device, layer.weight.shape[0]) for layer in (one, other)}
    biases = {layer.bias.dtype if layer.bias is not None else None for layer in (one, other)}
    return len(kinds) == 1 and len(biases) == 1


def merge(site: Site) -> Any:
    how = way(site.options.horizontal, NAME)
    if how == "off":
        return Refusal("the option horizontal is off, or names others")
    layers = [layer for layer in map(product_at, site.roots) if isinstance(layer, FrozenLayer)]
    assert site.constant is not None
    if how == "auto" and are_tiny(layers):
        return Refusal("apart the products are tiny enough for torch's quick way")
    weight = site.constant("siblings_weight", side_by_side([layer.weight for layer in layers]))
    left = left_of(layers[0])
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if biases:
        with on_real_tensors():
            joined = torch.cat(biases)
        together = site.call(aten.addmm.default, site.constant("siblings_bias", joined), left, weight)
    else:
        together = site.call(aten.mm.default, left, weight)
    pieces = site.call(aten.split_with_sizes.default, together, [layer.channels for layer in layers], 1)
    return tuple(site.call(operator.getitem, pieces, index) for index in range(len(layers)))


def are_tiny(layers: list[FrozenLayer]) -> bool:
    """Where one product costs more than several: measured, it does nowhere else."""
    rows, features = torch_api.size_hint(fake_value(layers[0].node).shape[0]), layers[0].weight.shape[0]
    on_cpu = layers[0].weight.device.type == "cpu"
    sizes = [features * layer.channels for layer in layers]
    return on_cpu and leaves_quick_way(rows, max(sizes), sum(sizes))


def side_by_side(weights: list[torch.Tensor]) -> torch.Tensor:
    """Joined in the layout they have: the weight of a linear layer is stored by rows of its transpose."""
    with on_real_tensors():
        if all(weight.t().is_contiguous() for weight in weights):
            return torch.cat([weight.t() for weight in weights]).t()
        return torch.cat(weights, 1)


def layers(*widths: int, then: Callable[[Any], Any] = torch.relu) -> Callable[[Any], Any]:
    return lambda x: [then(aten.addmm.default(constant(n), x, constant(4, n, start=n))) for n in widths]


def one_matrix(x: Any) -> Any:
    matrix = constant(4, 3)
    return aten.mm.default(x, matrix).relu(), aten.mm.default(x, matrix).tanh()


SIBLINGS = NodeRule(
    name=NAME,
    purpose="products of one input with constant matrices are one product",
    targets=(aten.mm.default, aten.addmm.default),
    roots=siblings,
    rewrite=merge,
    layout="free",
    numerics="rounded",
    examples=(
        Case("two", layers(3, 5), of((6, 4))),
        Case("three", layers(4, 4, 4), of((6, 4))),
        Case(
            "without bias",
            lambda x: aten.mm.default(x, constant(4, 3)).relu() * aten.mm.default(x, constant(4, 3, start=2.0)).tanh(),
            of((6, 4)),
        ),
        Case("in bfloat16", lambda x: products_in(x, torch.bfloat16), of((6, 4), dtype=torch.bfloat16)),
    ),
    near_misses=(
        Case("one", layers(3), of((6, 4))),
        Case("they are returned", layers(3, 5, then=lambda y: y), of((6, 4))),
        Case("other inputs", lambda x, y: [*layers(3)(x), *layers(5)(y)], of((6, 4), (6, 4))),
        Case(
            "a matrix is an input",
            lambda x, w: (aten.mm.default(x, constant(4, 3)).relu(), aten.mm.default(x, w).relu()),
            of((6, 4), (4, 3)),
        ),
        Case("one matrix twice", one_matrix, of((6, 4))),
        Case(
            "one has a bias",
            lambda x: [*layers(3)(x), aten.mm.default(x, constant(4, 3)).relu()],
            of((6, 4)),
        ),
        Case("tiny ones", lambda x: [aten.mm.default(x, constant(16, 16)).relu() for _ in range(3)], of((16, 16))),
        Case("the option is off", layers(3, 5), of((6, 4)), {"horizontal": "off"}),
    ),
)


def products_in(x: Any, dtype: torch.dtype) -> Any:
    return [aten.mm.default(x, constant(4, 3, dtype=dtype, start=start)).relu() for start in (0.5, 1.5)]


SIBLING_RULES = (SIBLINGS, INTEGER_SIBLINGS)


@graph_pass(stage="freeze", rules=SIBLING_RULES)
def merge_siblings(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Products of one input with constant matrices become one product."""
    return apply_rules(gm, SIBLING_RULES, context)
