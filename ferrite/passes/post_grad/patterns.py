"""The three ordered lists of patterns. A list runs to its end before the next begins.

List 0 makes products, which those of list 2 look for. List 1 prepares. List 2 comes last, since it takes bare matrix
products away from rules that want them.
"""

from __future__ import annotations

from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.passes.post_grad.channels_last import CHANNELS_LAST
from ferrite.passes.post_grad.convolutions import CONVOLUTION_RULES
from ferrite.passes.post_grad.joins import CAT_SLICE_CAT, CAT_SPLIT, joined_dim, part_of_split
from ferrite.passes.post_grad.products import PRODUCT_RULES, bias_stays_behind
from ferrite.passes.post_grad.reductions import PARTIAL_REDUCTION, POINTLESS_CUMSUM
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import AnyRule, Case, Match, NodeRule, Rule, Site, apply_rules

aten = torch.ops.aten


# --- joins and splits that undo each other ----------------------------------------------------------------------------


def joined_again(site: Site) -> Any:
    """cat(split(x)) in order is x."""
    parts = site.arguments["tensors"]
    found = [part for item in parts if (part := part_of_split(item)) is not None]
    if len(found) != len(parts):
        return Refusal("it does not join the parts of a split alone")
    first = found[0]
    if [(part.split, part.index) for part in found] != [(first.split, i) for i in range(len(first.sizes))]:
        return Refusal("the parts are not all there, once each, in order")
    if any(len(part.users) > 1 for part in parts):
        return Refusal("a part has another user")
    if first.dim != joined_dim(site):
        return Refusal("split and joined along different dimensions")
    site.through(*parts, first.split)
    return first.source


SPLIT_CAT = NodeRule(
    name="splitwithsizes_cat_replace",
    purpose="joining all parts of a split gives back what was split",
    targets=(aten.cat.default,),
    rewrite=joined_again,
    examples=(
        Case(
            "in order",
            lambda x: aten.cat.default(list(aten.split_with_sizes.default(x, [1, 3], 1)), -1) + 1,
            lambda: [torch.rand(2, 4)],
        ),
        Case(
            "an empty part",
            lambda x: aten.cat.default(list(aten.split_with_sizes.default(x, [0, 4], 0))) + 1,
            lambda: [torch.rand(4)],
        ),
        Case(
            "equal chunks and a rest",
            lambda x: aten.cat.default(list(aten.split.Tensor(x, 3, -1)), 1) + 1,
            lambda: [torch.rand(2, 4)],
        ),
    ),
    near_misses=(
        Case(
            "a part is read again",
            lambda x: (p := aten.split_with_sizes.default(x, [2, 2], 1), aten.cat.default(list(p), 1) * p[0].sum())[1],
            lambda: [torch.rand(2, 4)],
        ),
        Case(
            "not all of it",
            lambda x: aten.cat.default(list(aten.split_with_sizes.default(x, [1, 1, 2], 1))[:2], 1) + 1,
            lambda: [torch.rand(2, 4)],
        ),
        Case(
            "reordered",
            lambda x: aten.cat.default(list(aten.split_with_sizes.default(x, [2, 2], 1))[::-1], 1) + 1,
            lambda: [torch.rand(2, 4)],
        ),
        Case(
            "one part twice",
            lambda x: aten.cat.default([aten.split_with_sizes.default(x, [2, 2], 1)[0]] * 2, 1) + 1,
            lambda: [torch.rand(2, 4)],
        ),
        Case(
            "another dimension",
            lambda x: aten.cat.default(list(aten.split_with_sizes.default(x, [2, 2], 1)), 0).sum(0),
            lambda: [torch.rand(2, 4)],
        ),
        Case(
            "returned",
            lambda x: aten.cat.default(list(aten.split_with_sizes.default(x, [2, 2], 1)), 1),
            lambda: [torch.rand(2, 4)],
        ),
        Case(
            "other strides",
            lambda x: aten.cat.default(list(aten.split_with_sizes.default(x.t(), [2, 2], 0)), 0) + 1,
            lambda: [torch.rand(2, 4)],
        ),
    ),
)


# --- bias -------------------------------------------------------------------------------------------------------------


def bias_is_added_to_rows(match: Match) -> Refusal | None:
    """The bias spreads over the product, never the product over the bias; all of one floating dtype."""
    left, right, bias = match.value("a"), match.value("b"), match.value("bias")
    if not isinstance(bias, torch.Tensor):
        return Refusal("the bias is a number")
    if not left.dtype == right.dtype == bias.dtype:
        return Refusal("the dtypes differ")
    if not (left.dtype.is_floating_point or left.dtype.is_complex):
        return Refusal("integers have no fused product")
    if left.device != bias.device:
        return Refusal("the bias is on another device")
    shape = (left.shape[0], right.shape[1])
    if bias.ndim > 2:
        return Refusal("the bias has more than two dimensions")
    for size, wanted in zip(reversed(bias.shape), reversed(shape), strict=False):
        if not torch_api.known_equal(size, 1) and not torch_api.known_equal(size, wanted):
            return Refusal("the bias does not provably spread over the product")
    return None


ADDMM = Rule(
    name="addmm",
    purpose="a product and a bias are one operator",
    before=lambda a, b, bias: aten.add.Tensor(bias, aten.mm.default(a, b)),
    after=lambda a, b, bias: aten.addmm.default(bias, a, b),
    when=(bias_is_added_to_rows, bias_stays_behind),
    numerics="rounded",
    examples=(
        Case("a row", lambda a, b, c: aten.add.Tensor(aten.mm.default(a, b), c), lambda: matrices(5)),
        Case("on the left", lambda a, b, c: aten.add.Tensor(c, aten.mm.default(a, b)), lambda: matrices(5)),
        Case("a column", lambda a, b, c: aten.add.Tensor(aten.mm.default(a, b), c), lambda: matrices(3, 1)),
        Case("a whole matrix", lambda a, b, c: aten.add.Tensor(aten.mm.default(a, b), c), lambda: matrices(3, 5)),
        Case(
            "a row of two dimensions", lambda a, b, c: aten.add.Tensor(aten.mm.default(a, b), c), lambda: matrices(1, 5)
        ),
        Case("one number in a tensor", lambda a, b, c: aten.add.Tensor(aten.mm.default(a, b), c), lambda: matrices()),
    ),
    near_misses=(
        Case("scaled", lambda a, b, c: aten.add.Tensor(aten.mm.default(a, b), c, alpha=2), lambda: matrices(5)),
        Case("a wider bias", lambda a, b, c: aten.add.Tensor(aten.mm.default(a, b), c.double()), lambda: matrices(5)),
        Case(
            "the product twice",
            lambda a, b, c: (p := aten.mm.default(a, b), aten.add.Tensor(p, p))[1] + c,
            lambda: matrices(2, 3, 5),
        ),
        Case(
            "the product is read again",
            lambda a, b, c: (p := aten.mm.default(a, b), aten.add.Tensor(p, c) * p)[1],
            lambda: matrices(5),
        ),
        Case(
            "one row spreads over the bias",
            lambda a, b, c: aten.add.Tensor(aten.mm.default(a[:1], b), c),
            lambda: matrices(3, 5),
        ),
        Case(
            "integers", lambda a, b, c: aten.add.Tensor(aten.mm.default(a.int(), b.int()), c.int()), lambda: matrices(5)
        ),
        Case("a number", lambda a, b, c: aten.add.Tensor(aten.mm.default(a, b), 2.0) + c, lambda: matrices(2, 3, 5)),
        Case(
            "the bias is larger", lambda a, b, c: aten.add.Tensor(aten.mm.default(a, b), c), lambda: matrices(2, 3, 5)
        ),
    ),
)


def matrices(*bias: int) -> list[torch.Tensor]:
    return [torch.rand(3, 4), torch.rand(4, 5), torch.rand(bias)]


PATTERN_LISTS: tuple[tuple[AnyRule, ...], ...] = (
    (*CONVOLUTION_RULES, CHANNELS_LAST),
    (POINTLESS_CUMSUM, CAT_SLICE_CAT),
    (SPLIT_CAT, CAT_SPLIT, *PRODUCT_RULES, ADDMM, PARTIAL_REDUCTION),
)


@graph_pass(stage="post_grad", rules=[rule for rules in PATTERN_LISTS for rule in rules])
def pass_patterns(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Small patterns that have a cheaper form, in three ordered lists."""
    return sum(apply_rules(gm, rules, context) for rules in PATTERN_LISTS if rules)
