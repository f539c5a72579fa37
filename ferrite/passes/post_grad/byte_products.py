"""Matrix products of bytes as kernels of our own, with what follows them inside.

    _int_mm(a, b)       =>      byte_product(a, b)

Bit for bit what torch gives: sums are exact, and wrap where they do not fit 32 bits. Scales, biases and casts that read
the sums are in the kernel. Which products pay is decided in `ferrite.passes.shared.byte_products`.
"""

from __future__ import annotations

from typing import Any

import torch

from ferrite.graph import fake_value
from ferrite.passes.shared.byte_products import in_words, reason_against, reason_to_leave
from ferrite.rewrite import Case, NodeRule, Site

aten = torch.ops.aten


def owned(site: Site) -> Any:
    left, right = site.arguments["self"], site.arguments["mat2"]
    values = fake_value(left), fake_value(right)
    if (refusal := reason_against(site, *values) or reason_to_leave(site, *values)) is not None:
        return refusal
    inner = values[1].shape[0]
    factors = in_words(site, left, 1, inner), in_words(site, right, 0, inner)
    return site.call(torch.ops.ferrite.byte_product.default, *factors)


# --- what it fires on -------------------------------------------------------------------------------------------------


def integers(*shapes: tuple[int, ...]) -> Any:
    return lambda: [torch.randint(-128, 128, shape, dtype=torch.int8) for shape in shapes]


def linear(x: Any, weight: Any) -> Any:
    return aten._int_mm.default(x, aten.permute.default(weight, [1, 0]))


ALWAYS = {"own_products": "always"}
OWN_BYTE_PRODUCT = NodeRule(
    name="own_byte_product",
    purpose="a matrix product of bytes becomes loops, which are fused with what follows them",
    targets=(aten._int_mm.default,),
    rewrite=owned,
    examples=(
        Case("two matrices", aten._int_mm.default, integers((5, 32), (32, 6)), ALWAYS),
        Case("a linear layer", linear, integers((5, 32), (6, 32)), ALWAYS),
        Case("sums that are no multiple of four long", aten._int_mm.default, integers((5, 33), (33, 6)), ALWAYS),
        Case("one row", linear, integers((1, 32), (6, 32)), ALWAYS),
    ),
    near_misses=(
        Case("switched off", linear, integers((5, 32), (6, 32)), {"own_products": "off"}),
        Case("tiny, where that decides", linear, integers((5, 32), (6, 32))),
        Case("short sums", linear, integers((5, 8), (6, 8)), ALWAYS),
    ),
)
