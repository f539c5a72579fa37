"""The three ordered lists of patterns. A list runs to its end before the next begins.

List 0 is free for rules that must precede all others. List 1 prepares. List 2 comes last, since it takes bare matrix
products away from rules that want them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.graph import fake_value
from ferrite.passes.post_grad.joins import CAT_SLICE_CAT, CAT_SPLIT
from ferrite.passes.post_grad.products import PRODUCT_RULES, bias_stays_behind
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import AnyRule, Case, Match, NodeRule, Refusal, Rule, Site, apply_rules

aten = torch.ops.aten

WORTH_REUSING = 4096  # elements: a second reduction over fewer costs less than the bookkeeping


# --- cumsum of a constant ---------------------------------------------------------------------------------------------


def closed_form(site: Site) -> Any:
    """1v, 2v, 3v, ... along one dimension, computed where every index is exact."""
    full, result = site.arguments["self"], site.value(site.node)
    if not isinstance(full, torch.fx.Node) or full.target is not aten.full.default:
        return Refusal("its operand is no constant")
    value, of = full.args[1], fake_value(full)
    if result.ndim == 0:
        return Refusal("it has no dimension")
    if of.dtype.is_complex or result.dtype.is_complex or not isinstance(value, (int, float, bool)):
        return Refusal("the constant is complex or symbolic")
    if full.kwargs.get("pin_memory"):
        return Refusal("it is in pinned memory")
    dim = site.arguments["dim"] % result.ndim
    sizes: Any = full.args[0]
    length = sizes[dim]
    # the constant as the tensor holds it, then as the sum's dtype holds it
    element = torch.tensor(value).to(of.dtype).to(result.dtype).item()
    floating = result.dtype.is_floating_point
    wide = torch.float64 if floating else torch.int64
    stop = site.call(operator.add, length, 1) if isinstance(length, torch.fx.Node) else length + 1
    count = site.call(aten.arange.start, 1, stop, dtype=wide, device=result.device)
    steps = site.call(aten.mul.Tensor, count, element)
    narrow = site.call(aten._to_copy.default, steps, dtype=result.dtype) if wide is not result.dtype else steps
    column = site.call(aten.view.default, narrow, [-1 if axis == dim else 1 for axis in range(result.ndim)])
    spread = site.call(aten.expand.default, column, list(sizes))
    return site.call(aten.clone.default, spread, memory_format=torch.contiguous_format)


POINTLESS_CUMSUM = NodeRule(
    name="pointless_cumsum_replacement",
    purpose="the running sum of a constant has a closed form",
    targets=(aten.cumsum.default,),
    rewrite=closed_form,
    examples=(
        Case("float", lambda x: x + aten.cumsum.default(full([4, 3], 0.5), 1), lambda: [torch.rand(4, 3)]),
        Case("a bool counts as one", lambda x: x + aten.cumsum.default(full([4], 2, torch.bool), 0), lambda: [ones(4)]),
        Case(
            "an int loses its fraction",
            lambda x: x + aten.cumsum.default(full([4], 1.9, torch.int64), 0),
            lambda: [ones(4)],
        ),
        Case(
            "another dtype is asked for",
            lambda x: x + aten.cumsum.default(full([4], 1, torch.int32), 0, dtype=torch.float32),
            lambda: [ones(4)],
        ),
        Case("nothing to sum", lambda x: x + aten.cumsum.default(full([0], 1.0), 0), lambda: [ones(0)]),
        Case("last dimension", lambda x: x + aten.cumsum.default(full([2, 5], 3.0), -1), lambda: [torch.rand(2, 5)]),
        Case(
            "long in half precision",
            lambda x: x + aten.cumsum.default(full([70000], 0.0, torch.float16), 0),
            lambda: [torch.rand(70000).half()],
        ),
    ),
    near_misses=(
        Case("no constant", lambda x: aten.cumsum.default(x, 0), lambda: [ones(4)]),
        Case("no dimension", lambda x: x + aten.cumsum.default(full([], 1.0), 0), lambda: [torch.rand(())]),
    ),
)


def full(shape: list[int], value: Any, dtype: torch.dtype = torch.float32) -> Any:
    return aten.full.default(shape, value, dtype=dtype, device=torch.device("cpu"), pin_memory=False)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


# --- joins and splits that undo each other ----------------------------------------------------------------------------


def dimension(node: torch.fx.Node, dim: int) -> int:
    rank = fake_value(node).ndim
    return dim % rank if rank else 0


def joined_again(site: Site) -> Any:
    """cat(split_with_sizes(x)) in order is x."""
    parts = site.arguments["tensors"]
    first = parts[0]
    if first.target is not operator.getitem or first.args[0].target is not aten.split_with_sizes.default:
        return Refusal("it does not join the parts of a split")
    split = first.args[0]
    source, sizes, *rest = split.args
    if [(part.target, part.args) for part in parts] != [(operator.getitem, (split, i)) for i in range(len(sizes))]:
        return Refusal("the parts are not all there, once each, in order")
    if any(len(part.users) > 1 for part in parts):
        return Refusal("a part has another user")
    split_dim = rest[0] if rest else split.kwargs.get("dim", 0)
    if dimension(source, split_dim) != dimension(source, site.arguments["dim"]):
        return Refusal("split and joined along different dimensions")
    site.through(*parts, split)
    return source


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
    ),
    near_misses=(
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


def bias_is_added_to_rows(match: Match) -> str | None:
    """The bias spreads over the product, never the product over the bias; all of one floating dtype."""
    left, right, bias = match.value("a"), match.value("b"), match.value("bias")
    if not isinstance(bias, torch.Tensor):
        return "the bias is a number"
    if not left.dtype == right.dtype == bias.dtype:
        return "the dtypes differ"
    if not (left.dtype.is_floating_point or left.dtype.is_complex):
        return "integers have no fused product"
    if left.device != bias.device:
        return "the bias is on another device"
    shape = (left.shape[0], right.shape[1])
    if bias.ndim > 2:
        return "the bias has more than two dimensions"
    for size, wanted in zip(reversed(bias.shape), reversed(shape), strict=False):
        if not torch_api.known_equal(size, 1) and not torch_api.known_equal(size, wanted):
            return "the bias does not provably spread over the product"
    return None


ADDMM = Rule(
    name="addmm",
    purpose="a product and a bias are one operator",
    before=lambda a, b, bias: aten.add.Tensor(aten.mm.default(a, b), bias),
    after=lambda a, b, bias: aten.addmm.default(bias, a, b),
    when=(bias_is_added_to_rows, bias_stays_behind),
    examples=(
        Case("a row", lambda a, b, c: aten.add.Tensor(aten.mm.default(a, b), c), lambda: matrices(5)),
        Case("on the left", lambda a, b, c: aten.add.Tensor(c, aten.mm.default(a, b)), lambda: matrices(5)),
        Case("a column", lambda a, b, c: aten.add.Tensor(aten.mm.default(a, b), c), lambda: matrices(3, 1)),
        Case("a whole matrix", lambda a, b, c: aten.add.Tensor(aten.mm.default(a, b), c), lambda: matrices(3, 5)),
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
            "the bias is larger", lambda a, b, c: aten.add.Tensor(aten.mm.default(a, b), c), lambda: matrices(2, 3, 5)
        ),
    ),
)


def matrices(*bias: int) -> list[torch.Tensor]:
    return [torch.rand(3, 4), torch.rand(4, 5), torch.rand(bias)]


# --- reductions -------------------------------------------------------------------------------------------------------


def from_partial(site: Site) -> Any:
    """The largest of all is the largest of the largest of each row, if those are at hand."""
    source, whole = site.arguments["self"], site.node
    partial_of: dict[Any, Any] = {aten.max.default: aten.amax.default, aten.min.default: aten.amin.default}
    kind = partial_of.get(whole.target, whole.target)
    if whole.target is kind and (site.arguments["dim"] or site.arguments["keepdim"]):
        return Refusal("it is partial itself")
    if not torch_api.known_true(site.value(source).numel() >= WORTH_REUSING):
        return Refusal(f"it is not provably over {WORTH_REUSING} elements or more")
    partials = [
        user
        for user in source.users
        if user.target is kind and user is not whole and user < whole and len(user.args) > 1 and user.args[1]
    ]
    if not partials:
        return Refusal("nothing of it is reduced before")
    smallest = min(partials, key=lambda node: torch_api.size_hint(fake_value(node).numel()))
    return site.call(kind, smallest)


PARTIAL_REDUCTION = NodeRule(
    name="reuse_partial",
    purpose="a whole reduction starts from a partial one",
    targets=(aten.amax.default, aten.amin.default, aten.max.default, aten.min.default),
    rewrite=from_partial,
    examples=(
        Case("amax", lambda x: aten.amax.default(x, [1]).sum() + aten.amax.default(x), lambda: [torch.rand(64, 128)]),
        Case(
            "min", lambda x: aten.amin.default(x, [0], True).sum() + aten.min.default(x), lambda: [torch.rand(64, 128)]
        ),
    ),
    near_misses=(
        Case("small", lambda x: aten.amax.default(x, [1]).sum() + aten.amax.default(x), lambda: [torch.rand(4, 128)]),
        Case(
            "another kind",
            lambda x: aten.amin.default(x, [1]).sum() + aten.amax.default(x),
            lambda: [torch.rand(64, 128)],
        ),
    ),
)


PATTERN_LISTS: tuple[tuple[AnyRule, ...], ...] = (
    (),
    (POINTLESS_CUMSUM, CAT_SLICE_CAT),
    (SPLIT_CAT, CAT_SPLIT, *PRODUCT_RULES, ADDMM, PARTIAL_REDUCTION),
)


@graph_pass(stage="post_grad", rules=[rule for rules in PATTERN_LISTS for rule in rules])
def pass_patterns(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Small patterns that have a cheaper form, in three ordered lists."""
    return sum(apply_rules(gm, rules, context) for rules in PATTERN_LISTS if rules)
