"""Concats and splits of which one undoes part of the other.

    c = cat([a, b], d); cat([c, c[:k]], d)              =>      cat([a, b, a[:k]], d)

    split_with_sizes(cat([a, b], d), [m, n], d)         =>      a, b

    cat(split_with_sizes(x, [m, n], d), d)              =>      x

    split(x, 3, -1), x[2, 10]                           =>      split_with_sizes(x, [3, 3, 3, 1], dim=1)

What is inside a split is read here for every spelling of it: `SplitPart` is one of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.passes.shared.cases import one
from ferrite.rewrite import AnyRule, Case, NodeRule, Site, arguments_of, count_uses

aten = torch.ops.aten
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


@dataclass(frozen=True)
class SplitPart:
    """Item `index` of `source` along `dim`; `sizes` are those of all items."""

    source: torch.fx.Node
    dim: int
    index: int
    sizes: tuple[int | torch.SymInt, ...]
    split: torch.fx.Node


def part_of_split(node: Any) -> SplitPart | None:
    """What an item of a split is, or None for any other node."""
    if not isinstance(node, torch.fx.Node) or node.target is not operator.getitem:
        return None
    split, index = node.args
    if not isinstance(split, torch.fx.Node) or split.target not in SPLITS or not isinstance(index, int):
        return None
    arguments, items = arguments_of(split), fake_value(split)
    dim = arguments["dim"] % fake_value(arguments["self"]).ndim
    return SplitPart(arguments["self"], dim, index % len(items), tuple(item.shape[dim] for item in items), split)


def whole_split(items: Sequence[Any]) -> SplitPart | Refusal:
    """The first part of the split whose parts these are: all of them, once each, in order."""
    parts = [part_of_split(item) for item in items]
    first = parts[0]
    if first is None or [part and (part.split, part.index) for part in parts] != [
        (first.split, index) for index in range(len(first.sizes))
    ]:
        return Refusal("the parts are not those of one split, once each, in order")
    return first


def concat_dim(site: Site) -> int:
    """The dimension of a concat, counted from the front. (Old empty operands have another rank: ask the result.)"""
    return int(site.arguments["dim"] % max(site.value(site.node).ndim, 1))


# --- one spelling -----------------------------------------------------------------------------------------------------


def with_true_sizes(site: Site) -> Any:
    """split(x, n) names the sizes it gives, the rest at the end included."""
    if site.node.target is aten.split_with_sizes.default:
        return Refusal("it names its sizes")
    source, dim = site.arguments["self"], site.arguments["dim"]
    sizes = [item.shape[dim] for item in site.value(site.node)]
    if not all(isinstance(size, int) for size in sizes):
        return Refusal("a size is symbolic")
    return site.call(aten.split_with_sizes.default, source, sizes, dim=dim % site.value(source).ndim)


def with_dim_from_the_front(site: Site) -> Any:
    if site.arguments["dim"] >= 0:
        return Refusal("the dimension is counted from the front")
    if site.node.target is aten.cat.default:
        return site.call(aten.cat.default, list(site.arguments["tensors"]), dim=concat_dim(site))
    dim = site.arguments["dim"] % site.value(site.arguments["self"]).ndim
    return site.call(site.node.target, site.arguments["self"], list(site.arguments["split_sizes"]), dim=dim)


def twice(parts: Any) -> Any:
    return [part * 2 for part in parts]


# Matching knows an argument in every place where it may stand; what is left to normalise are values of arguments.
NORMALIZATION: tuple[AnyRule, ...] = (
    NodeRule(
        name="normalize_split_default_aten",
        purpose="a split into equal chunks names their sizes",
        targets=SPLITS,
        rewrite=with_true_sizes,
        examples=(
            Case("a rest at the end", lambda x: twice(aten.split.Tensor(x, 3, -1)), one(2, 10)),
            Case("one chunk larger than all", lambda x: twice(aten.split.Tensor(x, 30)), one(10)),
            Case("nothing to split, in chunks of nothing", lambda x: twice(aten.split.Tensor(x, 0)), one(0, 2)),
            Case("nothing in any chunk", lambda x: twice(aten.split.Tensor(x, 3, 1)), one(0, 4)),
        ),
        near_misses=(
            Case("sizes are named", lambda x: twice(aten.split_with_sizes.default(x, [4, 6], 1)), one(2, 10)),
        ),
    ),
    NodeRule(
        name="normalize_split_with_size_default_aten",
        purpose="the dimension of a split is counted from the front",
        targets=(aten.split_with_sizes.default,),
        rewrite=with_dim_from_the_front,
        examples=(Case("from the end", lambda x: twice(aten.split_with_sizes.default(x, [4, 6], -1)), one(2, 10)),),
        near_misses=(
            Case("already", lambda x: twice(aten.split_with_sizes.default(x, [4, 6], 1)), one(2, 10)),
            Case("not given", lambda x: twice(aten.split_with_sizes.default(x, [4, 6])), one(10, 2)),
        ),
    ),
    NodeRule(
        name="normalize_cat_default_aten",
        purpose="the dimension of a concat is counted from the front",
        targets=(aten.cat.default,),
        rewrite=with_dim_from_the_front,
        examples=(
            Case("from the end", lambda x: aten.cat.default([x, x], -1), one(2, 3)),
            Case("an old empty operand", lambda x: aten.cat.default([x.new_empty(0), x], -1), one(2, 3)),
        ),
        near_misses=(
            Case("already", lambda x: aten.cat.default([x, x], 1), one(2, 3)),
            Case("not given", lambda x: aten.cat.default([x, x]), one(2, 3)),
        ),
    ),
)


# --- a concat with the beginning of itself ----------------------------------------------------------------------------


def beginning_of_the_first(site: Site) -> Any:
    """cat([c, c[:k]]), where c starts with a of at least k, needs no c."""
    parts = site.arguments["tensors"]
    if len(parts) != 2 or parts[0].target is not aten.cat.default or parts[1].target is not aten.slice.Tensor:
        return Refusal("it is no concat of a concat and a slice")
    inner, piece = parts
    cut, dim = arguments_of(piece), concat_dim(site)
    if cut["self"] is not inner:
        return Refusal("the slice is of something else")
    operands, inner_dim = arguments_of(inner)["tensors"], arguments_of(inner)["dim"]
    rank = fake_value(inner).ndim
    if inner_dim % rank != dim or cut["dim"] % rank != dim:
        return Refusal("the dimensions differ")
    if cut["start"] not in (None, 0) or cut["step"] != 1:
        return Refusal("the slice does not start at the beginning in single steps")
    if set(inner.users) != {piece, site.node} or count_uses(site.node, inner) != 1 or len(piece.users) != 1:
        return Refusal("the inner concat has another user")
    first, end = operands[0], site.value(cut["end"])
    if fake_value(first).ndim != rank:
        return Refusal("the first operand is an empty one of another rank")
    if end is None or not torch_api.known_true(end >= 0):
        return Refusal("the end of the slice is not provably counted from the beginning")
    if not torch_api.known_true(end <= fake_value(first).shape[dim]):
        return Refusal("the slice reaches beyond the first operand")
    site.through(inner, piece)
    # The outer concat promotes all operands together, to the dtype that the inner one had.
    return site.call(aten.cat.default, [*operands, site.call(aten.slice.Tensor, first, dim, 0, cut["end"])], dim)


def with_beginning(end: Any, dim: int = 1, start: int | None = 0) -> Any:
    def function(a: Any, b: Any) -> Any:
        joined = aten.cat.default([a, b], dim)
        return aten.cat.default([joined, aten.slice.Tensor(joined, dim, start, end)], dim)

    return function


def inner_concat_is_read(a: Any, b: Any) -> Any:
    joined = aten.cat.default([a, b], 1)
    return aten.cat.default([joined, aten.slice.Tensor(joined, 1, 0, 2)], 1), joined + 1


def two(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.rand(2, 3), torch.rand(2, 4).to(dtype)]


def two_tall() -> list[torch.Tensor]:
    return [torch.rand(3, 2), torch.rand(4, 2)]


CAT_SLICE_CAT = NodeRule(
    name="cat_slice_cat",
    purpose="a concat with its own beginning takes that from its first operand",
    targets=(aten.cat.default,),
    rewrite=beginning_of_the_first,
    examples=(
        Case("part of the first", with_beginning(2), two),
        Case("all of the first", with_beginning(3), two),
        Case("nothing of the first", with_beginning(0), two),
        Case("counted from the last dimension", with_beginning(2, -1), two),
        Case("no start given", with_beginning(2, 1, None), two),
        Case("along rows", with_beginning(2, 0), two_tall),
        Case("the second is wider", with_beginning(2), lambda: two(torch.float64)),
    ),
    near_misses=(
        Case("beyond the first", with_beginning(4), two),
        Case("up to the last but one", with_beginning(-1), two),
        Case("to the end", with_beginning(None), two),
        Case("not from the beginning", with_beginning(2, 1, 1), two),
        Case("the inner concat is read again", inner_concat_is_read, two),
        Case(
            "the slice is of another dimension",
            lambda a, b: aten.cat.default([(c := aten.cat.default([a, b], 1)), aten.slice.Tensor(c, 0, 0, 1)], 0),
            two,
        ),
    ),
)


# --- a split of a concat ----------------------------------------------------------------------------------------------


def operand_of_the_concat(site: Site) -> Any:
    """Item i of split(cat([a, b, ...])) is operand i where the cuts are those of the concat.

    An operand has its own strides, an item those of the concat: the layout of what reads it is free.
    """
    part = part_of_split(site.node)
    if part is None:
        return Refusal("it is no item of a split")
    concat = part.source
    if concat.target is not aten.cat.default:
        return Refusal("what is split is no concat")
    if len(concat.users) != 1:
        return Refusal("the concat has another user and stays")
    arguments, rank = arguments_of(concat), fake_value(concat).ndim
    operands = arguments["tensors"]
    if arguments["dim"] % rank != part.dim:
        return Refusal("split and joined along different dimensions")
    if len(operands) != len(part.sizes):
        return Refusal("there are more or fewer parts than operands")
    for operand, size in zip(operands, part.sizes, strict=True):
        value = fake_value(operand)
        if value is None or value.ndim != rank:
            return Refusal("an operand is an empty one of another rank")
        if value.dtype != fake_value(concat).dtype:
            return Refusal("the concat widens an operand and stays")
        if not torch_api.known_equal(value.shape[part.dim], size):
            return Refusal("the cuts are not provably those of the concat")
    site.through(concat, part.split)
    return operands[part.index]


def split_of_cat(sizes: list[int], dim: int = 0, split_dim: int = 0) -> Any:
    def function(a: Any, b: Any) -> Any:
        parts = aten.split_with_sizes.default(aten.cat.default([a, b], dim), sizes, split_dim)
        return parts[0] * 2, parts[1] + 1

    return function


def each_part(reader: Callable[[Any], Any], dim: int = 1) -> Callable[..., Any]:
    """What a function makes of each part; along columns their strides are not those of what was joined."""

    def function(a: Any, b: Any) -> Any:
        joined = aten.cat.default([a, b], dim)
        return [reader(part) for part in aten.split_with_sizes.default(joined, [3, 4], dim)]

    return function


def two_transposed() -> list[torch.Tensor]:
    return [item.t() for item in two()]


def concat_is_read(a: Any, b: Any) -> Any:
    joined = aten.cat.default([a, b])
    return aten.split_with_sizes.default(joined, [3, 4])[0] * 2, joined + 1


CAT_SPLIT = NodeRule(
    name="cat_splitwithsizes_replace",
    purpose="the parts of a split concat are what was joined",
    targets=(operator.getitem,),
    rewrite=operand_of_the_concat,
    layout="free",
    examples=(
        Case("cut where joined", split_of_cat([3, 4]), two_tall),
        Case("counted from the last dimension", split_of_cat([3, 4], -2), two_tall),
        Case(
            "even chunks",
            lambda a: (p := aten.split.Tensor(aten.cat.default([a, a.cos()]), 3))[0] * 2 + p[1],
            lambda: [torch.rand(3, 2)],
        ),
        Case("along columns, so that strides differ", split_of_cat([3, 4], 1, 1), two),
        Case("read through a view", each_part(lambda x: aten.t.default(x).sin()), two),
        Case("other strides up to the sum", each_part(lambda x: x.sin().sum(1), 0), two_transposed),
    ),
    near_misses=(
        Case("cut elsewhere", split_of_cat([4, 3]), two_tall),
        Case("more parts", split_of_cat([3, 2, 2]), two_tall),
        Case("another dimension", split_of_cat([1, 1], 0, 1), two_tall),
        Case("the first is narrower", split_of_cat([3, 4]), lambda: [torch.rand(3, 2), torch.rand(4, 2).double()]),
        Case("the concat is read again", concat_is_read, two_tall),
        Case(
            "the parts are returned",
            lambda a, b: aten.split_with_sizes.default(aten.cat.default([a, b]), [3, 4]),
            two_tall,
        ),
        Case("a view of a part is returned", each_part(aten.t.default), two),
        Case("what has its strides is returned", each_part(aten.sin.default, 0), two_transposed),
        Case("memory is read as it lies", each_part(lambda x: aten.as_strided.default(x, [2], [1]).sin()), two),
        Case("it could not be flat", each_part(lambda x: aten.view.default(x, [-1]).sin(), 0), two_transposed),
        Case("random numbers come in its order", each_part(aten.bernoulli.default, 0), two_transposed),
    ),
)


# --- all parts of a split ---------------------------------------------------------------------------------------------


def what_was_split(site: Site) -> Any:
    """cat(split(x)) in order is x."""
    parts = site.arguments["tensors"]
    first = whole_split(parts)
    if isinstance(first, Refusal):
        return first
    if any(len(part.users) > 1 for part in parts):
        return Refusal("a part has another user")
    if first.dim != concat_dim(site):
        return Refusal("split and concatenated along different dimensions")
    site.through(*parts, first.split)
    return first.source


SPLIT_CAT = NodeRule(
    name="splitwithsizes_cat_replace",
    purpose="the concat of all parts of a split gives back what was split",
    targets=(aten.cat.default,),
    rewrite=what_was_split,
    examples=(
        Case(
            "in order",
            lambda x: aten.cat.default(list(aten.split_with_sizes.default(x, [1, 3], 1)), -1) + 1,
            one(2, 4),
        ),
        Case(
            "an empty part",
            lambda x: aten.cat.default(list(aten.split_with_sizes.default(x, [0, 4], 0))) + 1,
            one(4),
        ),
        Case(
            "equal chunks and a rest",
            lambda x: aten.cat.default(list(aten.split.Tensor(x, 3, -1)), 1) + 1,
            one(2, 4),
        ),
    ),
    near_misses=(
        Case(
            "a part is read again",
            lambda x: (p := aten.split_with_sizes.default(x, [2, 2], 1), aten.cat.default(list(p), 1) * p[0].sum())[1],
            one(2, 4),
        ),
        Case(
            "not all of it",
            lambda x: aten.cat.default(list(aten.split_with_sizes.default(x, [1, 1, 2], 1))[:2], 1) + 1,
            one(2, 4),
        ),
        Case(
            "reordered",
            lambda x: aten.cat.default(list(aten.split_with_sizes.default(x, [2, 2], 1))[::-1], 1) + 1,
            one(2, 4),
        ),
        Case(
            "one part twice",
            lambda x: aten.cat.default([aten.split_with_sizes.default(x, [2, 2], 1)[0]] * 2, 1) + 1,
            one(2, 4),
        ),
        Case(
            "another dimension",
            lambda x: aten.cat.default(list(aten.split_with_sizes.default(x, [2, 2], 1)), 0).sum(0),
            one(2, 4),
        ),
        Case(
            "returned",
            lambda x: aten.cat.default(list(aten.split_with_sizes.default(x, [2, 2], 1)), 1),
            one(2, 4),
        ),
        Case(
            "other strides",
            lambda x: aten.cat.default(list(aten.split_with_sizes.default(x.t(), [2, 2], 0)), 0) + 1,
            one(2, 4),
        ),
    ),
)
