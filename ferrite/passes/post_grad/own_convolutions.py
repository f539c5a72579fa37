"""Convolutions that are kernels of our own, not torch's: loops like any others, with what follows them inside.

    convolution(x, w, b)        =>      clone(ferrite.convolution(x, w) + b, contiguous)

`torch.ops.ferrite.convolution` is lowered to a sum of products, which the scheduler arranges in tiles; pointwise
operators that read it become part of the kernel. Its result has the channels side by side, as its kernel reads and
writes them. The copy is no work of its own: what reads it reads the image either way. Whether all that pays is decided
in `ferrite.passes.shared.own_convolutions`.
"""

from __future__ import annotations

from typing import Any

import torch

from ferrite.errors import Refusal
from ferrite.passes.post_grad.convolutions import bare, conv
from ferrite.passes.shared.cases import whole_numbers as of
from ferrite.passes.shared.own_convolutions import as_torch_has_it, reason_against, reason_to_leave, window_of
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import Case, NodeRule, Site, apply_rules

aten = torch.ops.aten


def owned(site: Site) -> Any:
    image, weight = (site.arguments[name] for name in ("input", "weight"))
    if site.options.own_convolutions == "off":
        return Refusal("the option own_convolutions is off")
    given = site.value(image), site.value(weight)
    if (refusal := reason_against(site, *given)) is not None:
        return refusal
    if site.options.own_convolutions == "auto" and (refusal := reason_to_leave(site, *given)) is not None:
        return refusal
    return as_torch_has_it(site, site.call(torch.ops.ferrite.convolution.default, image, weight, *window_of(site)))


# --- what it fires on -------------------------------------------------------------------------------------------------

ALWAYS = {"own_convolutions": "always"}

OWN_CONVOLUTION = NodeRule(
    name="own_convolution",
    purpose="a convolution becomes loops, which are fused with what follows them",
    targets=(aten.convolution.default,),
    rewrite=owned,
    numerics="rounded",
    examples=(
        Case("three by three", bare(padding=1), of((1, 4, 6, 5), (6, 4, 3, 3)), ALWAYS),
        Case("a bias, every other place", conv(2, padding=1), of((2, 4, 7, 6), (6, 4, 3, 3), (6,)), ALWAYS),
        Case("taps apart", bare(dilation=2), of((1, 4, 9, 8), (6, 4, 3, 3)), ALWAYS),
        Case("one by one", bare(), of((2, 16, 3, 3), (6, 16, 1, 1)), ALWAYS),
        Case("channels side by side", bare(padding=1), of((2, 4, 6, 5), (6, 4, 3, 3), last=True), ALWAYS),
        Case("one dimension", bare(padding=2), of((2, 4, 9), (6, 4, 5)), ALWAYS),
        Case("three dimensions", bare(padding=1), of((1, 2, 4, 3, 5), (6, 2, 3, 3, 3)), ALWAYS),
        Case("groups", bare(padding=1, groups=2), of((1, 8, 6, 5), (6, 4, 3, 3)), ALWAYS),
        Case("double precision", bare(), of((1, 4, 6, 5), (6, 4, 3, 3), dtype=torch.float64), ALWAYS),
    ),
    near_misses=(
        Case("switched off", bare(padding=1), of((1, 4, 6, 5), (6, 4, 3, 3)), {"own_convolutions": "off"}),
        Case("tiny, where that decides", bare(padding=1), of((1, 4, 6, 5), (6, 4, 3, 3))),
        Case("half precision", bare(), of((1, 4, 6, 5), (6, 4, 3, 3), dtype=torch.bfloat16), ALWAYS),
        Case("each channel alone", bare(groups=6), of((1, 6, 6, 5), (6, 1, 5, 5)), ALWAYS),
        Case("transposed", bare(transposed=True), of((1, 4, 6, 5), (4, 6, 3, 3)), ALWAYS),
        Case("sums of few", bare(), of((1, 3, 6, 5), (6, 3, 2, 2)), ALWAYS),
        Case("many taps of a prime number", bare(), of((1, 1031, 4, 4), (2, 1031, 3, 3)), ALWAYS),
        Case("a single channel", bare(), of((1, 4, 6, 5), (1, 4, 3, 3)), ALWAYS),
        Case("a single place", bare(), of((1, 4, 3, 3), (6, 4, 3, 3)), ALWAYS),
    ),
)


@graph_pass(stage="post_grad", rules=(OWN_CONVOLUTION,))
def own_convolutions(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Convolutions for which our own kernels are faster than torch's: they hold what follows them, too."""
    return apply_rules(gm, (OWN_CONVOLUTION,), context)
