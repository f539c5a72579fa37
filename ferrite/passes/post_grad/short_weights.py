"""Weights that are stored as integers of 8 bits with a scale for each column, on a CPU: the scale goes behind the
product, and the weight is converted where the product reads it.

    mm(x, to_f32(w) * s)                =>      product(x, to_f32(w)) * s           s: one number for each column
    mm(x, (to_f32(w) * s).t())          =>      product(x, to_f32(w).t()) * s.t()
    _weight_int8pack_mm(x, w, s)        =>      product(x, to_f32(w).t()) * s

Then a quarter of the bytes are read, and the long weight is never in memory. A sum is scaled once where each of its
terms was: it is rounded otherwise, and no worse. A product with the scale behind it already is `own_product`'s.
"""

from __future__ import annotations

from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.passes.shared.cases import normal
from ferrite.passes.shared.facts import transposed
from ferrite.passes.shared.own_products import OPERANDS, is_stored_short, reason_against, with_bias
from ferrite.rewrite import Case, NodeRule, Site, arguments_of

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default


def scaled_behind(site: Site) -> Any:
    left, right = (site.arguments[name] for name in OPERANDS[site.node.target])
    if not isinstance(right, torch.fx.Node):
        return Refusal("the weight is no result of the graph")
    source = transposed(right)
    scaled = right if source is None else source
    if scaled.target is not aten.mul.Tensor or len(scaled.users) != 1 or len(right.users) != 1:
        return Refusal("the weight is not scaled, or has another reader")
    found = arguments_of(scaled)
    for weight, scale in ((found["self"], found["other"]), (found["other"], found["self"])):
        if is_stored_short(weight) and isinstance(scale, torch.fx.Node):
            break
    else:
        return Refusal("the weight is not stored as integers of 8 bits")
    if (refusal := reason_to_keep(site, fake_value(left), fake_value(right))) is not None:
        return refusal
    if fake_value(weight).shape != fake_value(scaled).shape or fake_value(scale).dtype != fake_value(left).dtype:
        return Refusal("the weight is spread over its scale, or that has another dtype")
    column = 0 if source is not None else 1
    if not is_for_columns(fake_value(scale), column):
        return Refusal("the scale is not one number for each column")
    site.through(*dict.fromkeys((right, scaled)))
    if source is not None:
        weight = site.call(aten.permute.default, weight, [1, 0])
        scale = site.call(aten.permute.default, scale, [1, 0]) if fake_value(scale).ndim == 2 else scale
    made = site.call(torch.ops.ferrite.product.default, left, weight)
    return with_bias(site, site.call(aten.mul.Tensor, made, scale))


def is_for_columns(scale: torch.Tensor, column: int) -> bool:
    """Whether a scale is the same along the other dimension of a matrix."""
    if scale.ndim == 0:
        return True
    along = 1 - column
    if scale.ndim == 1:
        return column == 1
    return scale.ndim == 2 and torch_api.known_equal(scale.shape[along], 1)


def unpacked(site: Site) -> Any:
    x, weight, scales = (site.arguments[name] for name in ("self", "mat2", "scales"))
    left, stored = fake_value(x), fake_value(weight)
    if left.dtype is not torch.float32 or stored.dtype is not torch.int8:
        return Refusal("it is not float32 with a weight of int8")
    if fake_value(scales).dtype is not torch.float32:
        return Refusal("the scales have another dtype")
    if (refusal := reason_to_keep(site, left, stored.to(left.dtype).t())) is not None:
        return refusal
    long = site.call(aten.permute.default, site.call(convert, weight, torch.float32), [1, 0])
    return site.call(aten.mul.Tensor, site.call(torch.ops.ferrite.product.default, x, long), scales)


def reason_to_keep(site: Site, left: torch.Tensor, right: torch.Tensor) -> Refusal | None:
    if site.options.own_products == "off":
        return Refusal("the option own_products is off")
    if site.options.own_products == "auto" and site.options.executor != "native":
        return Refusal("it pays in kernels alone")
    return reason_against(site, left, right)


# --- what they fire on ------------------------------------------------------------------------------------------------


def integers(*sizes: int) -> Any:
    return torch.randint(-127, 128, sizes, dtype=torch.int8)


def layer(scale: tuple[int, ...], bias: bool = False, dtype: torch.dtype = torch.int8) -> Any:
    """Inputs of a layer: of four rows, from 32 to 6."""
    return lambda: [
        torch.randn(4, 32),
        integers(6, 32).to(dtype),
        torch.rand(scale) / 100,
        *([torch.randn(6)] if bias else []),
    ]


def of_scaled(x: Any, w: Any, s: Any) -> Any:
    return aten.mm.default(x, aten.permute.default(aten.mul.Tensor(convert(w, torch.float32), s), [1, 0]))


def of_scaled_across(x: Any, w: Any, s: Any) -> Any:
    return aten.mm.default(x, aten.mul.Tensor(aten.permute.default(convert(w, torch.float32), [1, 0]), s))


def with_a_bias(x: Any, w: Any, s: Any, b: Any) -> Any:
    return aten.addmm.default(b, x, aten.mul.Tensor(s, aten.permute.default(convert(w, torch.float32), [1, 0])))


def read_twice(x: Any, w: Any, s: Any) -> Any:
    long = aten.mul.Tensor(convert(w, torch.float32), s)
    return aten.mm.default(x, aten.permute.default(long, [1, 0])), long


def packed(x: Any, w: Any, s: Any) -> Any:
    if x.dtype is torch.float64:  # for which torch has no such kernel
        return aten.mm.default(x, aten.permute.default(convert(w, torch.float64), [1, 0])) * s
    return aten._weight_int8pack_mm.default(x, w, s)


OFF = {"own_products": "off"}
SCALE_BEHIND_PRODUCT = NodeRule(
    name="scale_behind_product",
    purpose="a weight of 8 bits is converted where a product reads it, and its scale is behind the product",
    targets=(aten.mm.default, aten.addmm.default),
    rewrite=scaled_behind,
    numerics="rounded",
    examples=(
        Case("a linear layer", of_scaled, layer((6, 1))),
        Case("a matrix", of_scaled_across, layer((6,))),
        Case("with a bias", with_a_bias, layer((1, 6), bias=True)),
        Case("one scale for all", of_scaled, layer(())),
        Case("of numbers without a sign", of_scaled, layer((6, 1), dtype=torch.uint8)),
    ),
    near_misses=(
        Case("a scale along the sums", of_scaled, layer((32,))),
        Case("a scale along both", of_scaled, layer((6, 32))),
        Case("a weight of 32 bits", of_scaled, layer((6, 1), dtype=torch.int32)),
        Case("the long weight is read twice", read_twice, layer((6, 1))),
        Case("switched off", of_scaled, layer((6, 1)), OFF),
        Case("no scale", aten.mm.default, normal((4, 32), (32, 6))),
    ),
)
PACKED_INTEGERS = NodeRule(
    name="unpacked_int8_product",
    purpose="a product with a weight of 8 bits is a kernel of our own, and the scale in it",
    targets=(aten._weight_int8pack_mm.default,),
    rewrite=unpacked,
    numerics="rounded",
    examples=(Case("float32", packed, layer((6,))),),
    near_misses=(
        Case("switched off", packed, layer((6,)), OFF),
        Case(
            "in 16 bits",
            lambda x, w, s: aten._weight_int8pack_mm.default(x.bfloat16(), w, s.bfloat16()),
            layer((6,)),
        ),
    ),
)
SHORT_WEIGHT_RULES = (SCALE_BEHIND_PRODUCT, PACKED_INTEGERS)
