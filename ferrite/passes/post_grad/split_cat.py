"""Groups of rules that take a tensor apart and put it together again; a user turns each on by its name.

    normalization_aten_pass         split(x, 3), x[4]                                =>  split_with_sizes(x, [3, 1])
    split_cat_aten_pass             cat([a, p[2], p[3], ...]), p = split(x)          =>  cat([a, x[m:n], ...])
    select_cat_aten_pass            cat([x[:, 0], x[:, 1]], 1)                       =>  reshape(x, ...)
    unbind_stack_aten_pass          stack([x[:, 0], x[:, 1]], 1)                     =>  x
    move_view_after_cat_aten_pass   cat([reshape(p[0]), reshape(p[1])]), p = split   =>  reshape(permute(x))

All of a tensor means: every index from 0 to its size, once, in order, and provably the whole size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value, same_sizes
from ferrite.options import settings_of
from ferrite.passes.post_grad.concats import NORMALIZATION, SplitPart, concat_dim, part_of_split, whole_split
from ferrite.passes.shared.cases import one
from ferrite.rewrite import AnyRule, Case, NodeRule, Site, arguments_of, in_order

aten = torch.ops.aten
RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class Runs:
    """How many neighbours make a slice: it saves less than it costs where it stands for fewer."""

    min_run: int = 10


# --- items of a split -------------------------------------------------------------------------------------------------


def runs_as_slices(site: Site) -> Any:
    """Neighbours in the concat that are neighbours in one split become one slice, or all that was split."""
    operands, dim = list(site.arguments["tensors"]), concat_dim(site)
    least = settings_of(site.options.post_grad_fusions, "split_cat_aten_pass", Runs).min_run
    found = [item for run in runs(operands, dim) for item in shortened(site, run, dim, least)]
    if found == operands:
        return Refusal(f"no whole split and no {least} neighbours of one are joined")
    site.through(*(node for item in operands if (part := part_of_split(item)) for node in (item, part.split)))
    first = part_of_split(operands[0])
    if first is not None and found == [first.source]:
        return first.source
    return site.call(aten.cat.default, found, dim)


def runs(operands: Sequence[torch.fx.Node], dim: int) -> list[list[torch.fx.Node]]:
    """The operands; neighbours that are consecutive items of one split along the dimension stand together."""
    found: list[list[torch.fx.Node]] = []
    last: SplitPart | None = None
    for operand in operands:
        part = part_of_split(operand)
        part = part if part is not None and part.dim == dim else None
        if last is not None and part is not None and (part.split, part.index) == (last.split, last.index + 1):
            found[-1].append(operand)
        else:
            found.append([operand])
        last = part
    return found


def shortened(site: Site, run: list[torch.fx.Node], dim: int, least: int) -> list[torch.fx.Node]:
    part = part_of_split(run[0])
    if part is None or part.dim != dim:
        return run
    if len(run) == len(part.sizes):
        return [part.source]
    if len(run) < max(least, 2) or not all(isinstance(size, int) for size in part.sizes):
        return run
    start = sum(part.sizes[: part.index])
    end = start + sum(part.sizes[part.index : part.index + len(run)])
    return [site.call(aten.slice.Tensor, part.source, dim, start, end)]


def rejoined(function: Callable[..., Any], count: int = 12, dim: int = 0) -> Callable[..., Any]:
    """A case: split in rows of one, the parts handed to a function that says what is joined."""
    return lambda x: aten.cat.default(function(aten.split_with_sizes.default(x, [1] * count, 0), x.sin()), dim) + 1


SPLIT_CAT: tuple[AnyRule, ...] = (
    NodeRule(
        name="split_cat_aten",
        purpose="neighbours in a concat that were neighbours in a split are one slice",
        targets=(aten.cat.default,),
        rewrite=runs_as_slices,
        examples=(
            Case("a long run", rejoined(lambda p, y: [y, *p[1:11], y]), one(12, 3)),
            Case("a run alone", rejoined(lambda p, y: p[2:]), one(12, 3)),
            Case("the whole split among others", rejoined(lambda p, y: [y, *p, y]), one(12, 3)),
            Case("the whole split alone", rejoined(lambda p, y: list(p)), one(12, 3)),
            Case("a short whole split", rejoined(lambda p, y: [*p, y], 3), one(3, 3)),
            Case(
                "as short a run as was asked for",
                rejoined(lambda p, y: [y, *p[2:5]]),
                one(12, 3),
                {"post_grad_fusions": {"split_cat_aten_pass": {"min_run": 3}}},
            ),
            Case("the same run twice", rejoined(lambda p, y: [*p[:10], *p[:10]]), one(12, 3)),
        ),
        near_misses=(
            Case("a short run", rejoined(lambda p, y: [y, *p[2:11]]), one(12, 3)),
            Case("an operand between", rejoined(lambda p, y: [*p[:6], y, *p[6:]]), one(12, 3)),
            Case("along another dimension", rejoined(lambda p, y: list(p), dim=1), one(12, 3)),
            Case("reordered", rejoined(lambda p, y: list(p)[::-1]), one(12, 3)),
            Case("one item repeated", rejoined(lambda p, y: [*p[:5], p[4], *p[5:]]), one(12, 3)),
            Case(
                "returned", lambda x: aten.cat.default(list(aten.split_with_sizes.default(x, [1] * 12, 0))), one(12, 3)
            ),
        ),
    ),
)


# --- items of a select or an unbind -----------------------------------------------------------------------------------


def item_of(node: Any) -> tuple[torch.fx.Node, int, int] | None:
    """The source, the dimension and the index of one item without that dimension; None for any other node."""
    if not isinstance(node, torch.fx.Node):
        return None
    if node.target is aten.select.int:
        arguments = arguments_of(node)
        source, index = arguments["self"], arguments["index"]
    elif node.target is operator.getitem and getattr(node.args[0], "target", None) is aten.unbind.int:
        arguments = arguments_of(node.args[0])  # type: ignore[arg-type]
        source, index = arguments["self"], node.args[1]
    else:
        return None
    return (source, arguments["dim"] % fake_value(source).ndim, index) if isinstance(index, int) else None


def all_items(nodes: Sequence[Any]) -> tuple[torch.fx.Node, int] | Refusal:
    """The source and the dimension of which these are all items, once each, in order."""
    items = [item_of(node) for node in nodes]
    first = items[0]
    if first is None:
        return Refusal("it does not concatenate selected items")
    source, dim, _ = first
    if items != [(source, dim, index) for index in range(len(items))]:
        return Refusal("the items are not those of one tensor, once each, in order")
    if not torch_api.known_equal(fake_value(source).shape[dim], len(items)):
        return Refusal("the items are not provably all there are")
    return source, dim


def with_unbind(items: Sequence[torch.fx.Node]) -> list[torch.fx.Node]:
    """Items, and the unbind they are of, if any."""
    unbinds = [item.all_input_nodes[0] for item in items if item.target is operator.getitem]
    return [*items, *unbinds]


def selected_and_joined(site: Site) -> Any:
    found = all_items(site.arguments["tensors"])
    if isinstance(found, Refusal):
        return found
    source, dim = found
    if dim != concat_dim(site):
        return Refusal("selected and joined along different dimensions")
    site.through(*with_unbind(site.arguments["tensors"]))
    return merge_with_next(site, source, dim)


def merge_with_next(site: Site, node: torch.fx.Node, dim: int) -> Any:
    """Make one dimension of two neighbours; `reshape` copies where a view cannot."""
    value = fake_value(node)

    def size(axis: int) -> Any:
        return value.shape[axis] if isinstance(value.shape[axis], int) else site.call(aten.sym_size.int, node, axis)

    outer, inner = size(dim), size(dim + 1)
    both_known = isinstance(outer, int) and isinstance(inner, int)
    merged = outer * inner if both_known else site.call(operator.mul, outer, inner)
    rest = range(dim + 2, value.ndim)
    return site.call(aten.reshape.default, node, [*map(size, range(dim)), merged, *map(size, rest)])


def stacked_again(site: Site) -> Any:
    """stack(unbind(x)), also where the stack is spelled as a concat of what `unsqueeze` gave."""
    operands, rank = site.arguments["tensors"], site.value(site.node).ndim
    dim = site.arguments["dim"] % max(rank, 1)
    if site.node.target is aten.cat.default:
        if any(item.target is not aten.unsqueeze.default for item in operands):
            return Refusal("it does not concatenate items given a dimension")
        if any(arguments_of(item)["dim"] % rank != dim for item in operands):
            return Refusal("an item was given another dimension than it is joined along")
        site.through(*operands)
        operands = [arguments_of(item)["self"] for item in operands]
    found = all_items(operands)
    if isinstance(found, Refusal):
        return found
    site.through(*with_unbind(operands))
    return found[0] if found[1] == dim else Refusal("selected and stacked along different dimensions")


def picked(dim: int, indices: Sequence[int], to: int) -> Callable[..., Any]:
    return lambda x: aten.cat.default([aten.select.int(x, dim, i) for i in indices], to) + 1


def restacked(dim: int, new_dim: int, to: int, count: int = 3) -> Callable[..., Any]:
    def function(x: Any) -> Any:
        items = [aten.select.int(x, dim, i) for i in range(count)]
        return aten.cat.default([aten.unsqueeze.default(item, new_dim) for item in items], to) + 1

    return function


SELECT_CAT: tuple[AnyRule, ...] = (
    NodeRule(
        name="select_cat_aten",
        purpose="joining all items of a dimension merges it with the next",
        targets=(aten.cat.default,),
        rewrite=selected_and_joined,
        examples=(
            Case("first dimension", picked(0, range(3), 0), one(3, 4, 5)),
            Case("in the middle, from the end", picked(-2, range(3), 1), one(2, 3, 5)),
            Case("unbind", lambda x: aten.cat.default(list(aten.unbind.int(x, 0)), 0) + 1, one(3, 4)),
            Case("transposed, so that it copies", lambda x: picked(0, range(3), 0)(x.t()), one(4, 3)),
        ),
        near_misses=(
            Case(
                "from two tensors",
                lambda x: aten.cat.default([aten.select.int(x, 0, 0), aten.select.int(x.sin(), 0, 1)], 0) + 1,
                one(2, 4),
            ),
            Case("not all", picked(0, range(2), 0), one(3, 4)),
            Case("reordered", picked(0, (1, 0, 2), 0), one(3, 4)),
            Case("along another dimension", picked(0, range(3), 1), one(3, 4, 5)),
            Case("returned", lambda x: aten.cat.default(list(aten.unbind.int(x, 0)), 0), one(3, 4)),
        ),
    ),
)

UNBIND_STACK: tuple[AnyRule, ...] = (
    NodeRule(
        name="unbind_stack_aten",
        purpose="stacking all items of a dimension gives back what they were taken from",
        targets=(aten.cat.default, aten.stack.default),
        rewrite=stacked_again,
        examples=(
            Case("select and unsqueeze", restacked(1, 1, 1), one(2, 3, 4)),
            Case("counted from the end", restacked(-2, -2, 1), one(2, 3, 4)),
            Case("unbind and stack", lambda x: aten.stack.default(list(aten.unbind.int(x, 1)), 1) + 1, one(2, 3)),
        ),
        near_misses=(
            Case("given another dimension", restacked(1, 0, 1), one(3, 3, 3)),
            Case("stacked along another dimension", restacked(1, 0, 0), one(3, 3, 3)),
            Case("not all", restacked(1, 1, 1, 2), one(2, 3, 4)),
            Case("returned", lambda x: aten.stack.default(list(aten.unbind.int(x, 1)), 1), one(2, 3)),
        ),
    ),
)


# --- reshapes between a split and a concat ----------------------------------------------------------------------------


def reshape_after_concat(site: Site) -> Any:
    views, dim = site.arguments["tensors"], concat_dim(site)
    if any(view.target not in RESHAPES for view in views):
        return Refusal("it does not concatenate reshaped parts")
    items = [in_order(view)[0] for view in views]
    first = whole_split(items)
    if isinstance(first, Refusal):
        return first
    site.through(*views, *items, first.split)
    source, value = first.source, fake_value(first.source)
    kept = [axis for axis in range(value.ndim) if axis != first.dim]
    if all(torch_api.known_equal(size, 1) for size in first.sizes) and all(drops(view, first.dim) for view in views):
        order = [*kept[:dim], first.dim, *kept[dim:]]
        moved = source if order == sorted(order) else site.call(aten.permute.default, source, order)
        return merge_with_next(site, moved, dim)
    shape = list(site.value(site.node).shape)
    if first.dim == dim == 0 and all(isinstance(size, int) for size in shape):
        # rows in, rows out: the elements come in the order they have in memory, whatever the shapes between
        return site.call(aten.reshape.default, source, shape)
    return Refusal("a reshape does more than drop the dimension of the split")


def drops(view: torch.fx.Node, dim: int) -> bool:
    """Whether a reshape leaves out one dimension of size one and nothing else."""
    old = list(fake_value(view.all_input_nodes[0]).shape)
    new = fake_value(view).shape
    del old[dim]
    return same_sizes(old, new)


def reshaped(sizes: list[int], dim: int, shape: list[int], to: int) -> Callable[..., Any]:
    def function(x: Any) -> Any:
        parts = aten.split_with_sizes.default(x, sizes, dim)
        return aten.cat.default([aten.reshape.default(part, shape) for part in parts], to) + 1

    return function


def reshaped_and_foreign(x: Any) -> Any:
    parts = aten.split_with_sizes.default(x, [1, 1], 0)
    return aten.cat.default([aten._unsafe_view.default(parts[0], [4]), aten._unsafe_view.default(x[1:].sin(), [4])]) + 1


MOVE_VIEW_AFTER_CAT: tuple[AnyRule, ...] = (
    NodeRule(
        name="move_view_after_cat_aten",
        purpose="parts reshaped alike and joined are reshaped once",
        targets=(aten.cat.default,),
        rewrite=reshape_after_concat,
        examples=(
            Case("dropped and joined in front", reshaped([1, 1, 1], 0, [4, 5], 0), one(3, 4, 5)),
            Case("joined along a later dimension", reshaped([1, 1, 1], 0, [4, 5], 1), one(3, 4, 5)),
            Case("joined along an earlier dimension", reshaped([1, 1], 2, [3, 4], 0), one(3, 4, 2)),
            Case("rows, reshaped in any way", reshaped([2, 2], 0, [1, 3, 2], 0), one(4, 3)),
        ),
        near_misses=(
            Case("not only dropped", reshaped([1, 1], 0, [4, 3], 1), one(2, 3, 4)),
            Case("parts of two rows", reshaped([2, 2], 0, [3, 2], 1), one(4, 3)),
            Case("a part of another tensor", reshaped_and_foreign, one(2, 4)),
        ),
    ),
)

SPLIT_CAT_GROUPS: Mapping[str, tuple[AnyRule, ...]] = {
    "normalization_aten_pass": NORMALIZATION,
    "split_cat_aten_pass": SPLIT_CAT,
    "select_cat_aten_pass": SELECT_CAT,
    "unbind_stack_aten_pass": UNBIND_STACK,
    "move_view_after_cat_aten_pass": MOVE_VIEW_AFTER_CAT,
}
