"""The three ordered lists of patterns. A list runs to its end before the next begins.

List 0 makes products, which those of list 2 look for. List 1 prepares. List 2 comes last, since it takes bare matrix
products away from rules that want them.
"""

from __future__ import annotations

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.passes.post_grad.channels_last import CHANNELS_LAST
from ferrite.passes.post_grad.concats import CAT_SLICE_CAT, CAT_SPLIT, SPLIT_CAT
from ferrite.passes.post_grad.convolutions import CONVOLUTION_RULES
from ferrite.passes.post_grad.products import PRODUCT_RULES, bias_stays_behind
from ferrite.passes.post_grad.reductions import PARTIAL_REDUCTION, POINTLESS_CUMSUM
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import AnyRule, Case, Match, Rule, apply_rules

aten = torch.ops.aten


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
