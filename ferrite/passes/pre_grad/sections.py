"""Splits that become other splits: all their items are replaced together, or none is.

split(split(x, S, d)[i], T, d)                       =>   split(x, S[:i] + T + S[i+1:], d)
cat([p[i], .., p[j]], d), p = split(x, S, d)         =>   an item of split(x, S with i..j as one, d)
squeeze(split(x, [1, 1, ..], d)[i], d)               =>   unbind(x, d)[i]
split(x, [n])[0]                                     =>   x
unbind(f(stack([a, b, ..], d)), d)[i]                =>   f(a), f(b), ..
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.passes.pre_grad.canonical import read_by_position
from ferrite.passes.pre_grad.horizontal import copy_outweighs
from ferrite.passes.pre_grad.pieces import Moves, Piece, operands_of, piece_of, stretches_of
from ferrite.passes.pre_grad.predicates import (
    Concat,
    Unary,
    concat_view,
    is_elementwise_unary,
    is_returned,
    requires_grad,
    sole_user,
)
from ferrite.rewrite import Site, arguments_of

aten = torch.ops.aten
SAVED_CALLS = 3  # the stack, the function of it, and the unbind
Nodes = Sequence[torch.fx.Node]


def items_of(producer: torch.fx.Node) -> list[torch.fx.Node]:
    """The items of a split or unbind that somebody reads, in the order of the graph."""
    return sorted(user for user in producer.users if user.users)


class Sections(NamedTuple):
    """What is split, into which sizes, along which dimension."""

    source: torch.fx.Node
    sizes: list[int]
    dim: int


def sections(split: Any) -> Sections | None:
    """What a split says; None where it is none, or does not have all its sizes written out."""
    if not isinstance(split, torch.fx.Node) or split.target is not aten.split_with_sizes.default:
        return None
    given = arguments_of(split)
    source, sizes, dim = given["self"], given["split_sizes"], given["dim"]
    if not isinstance(sizes, (list, tuple)) or not all(type(number) is int for number in (*sizes, dim)):
        return None
    return Sections(source, list(sizes), dim % fake_value(source).dim()) if read_by_position(split) else None


def known_sections(split: Any) -> Sections:
    found = sections(split)
    assert found is not None
    return found


def index_of(item: Any) -> int:
    return int(item.args[1])


def split_again(site: Site, source: Any, sizes: list[int], dim: int, indices: Sequence[int]) -> tuple[Any, ...]:
    split = site.call(aten.split_with_sizes.default, source, sizes, *([dim] if dim else []))
    return tuple(site.call(operator.getitem, split, index) for index in indices)


# --- a split of a split -----------------------------------------------------------------------------------------------


def items_of_both(inner: torch.fx.Node) -> Nodes | Refusal:
    """All items of a split and of the one that it splits an item of."""
    item = inner.args[0]
    piece = piece_of(item)
    if piece is None or piece.producer is not aten.split_with_sizes.default:
        return Refusal("it does not split an item of a split")
    outer = piece.made_by[-1]
    first, second = sections(outer), sections(inner)
    if first is None or second is None:
        return Refusal("the sizes are not written out")
    if first.dim != second.dim:
        return Refusal("the two split along different dimensions")
    others = [each for each in items_of(outer) if each is not item]
    if sole_user(piece.made_by[0]) is not inner or any(index_of(each) == index_of(item) for each in others):
        return Refusal("what it splits is read elsewhere too")
    return [*others, *items_of(inner)] if items_of(inner) else Refusal("nobody reads its items")


def one_split(site: Site) -> Any:
    item: Any = site.node.args[0]
    outer, place = item.args[0], index_of(item)
    (source, sizes, dim), inner_sizes = known_sections(outer), known_sections(site.node).sizes

    def index(root: torch.fx.Node) -> int:
        if root.args[0] is site.node:
            return place + index_of(root)
        return index_of(root) + (len(inner_sizes) - 1 if index_of(root) > place else 0)

    site.through(outer, item, *outer.users, *site.node.users)
    return split_again(
        site, source, [*sizes[:place], *inner_sizes, *sizes[place + 1 :]], dim, [index(root) for root in site.roots]
    )


# --- neighbours joined again, beside others that are not --------------------------------------------------------------


def concat_and_others(node: torch.fx.Node) -> Nodes | Refusal:
    """A concat of neighbouring items of one split, and the other items of that split."""
    concat = concat_view(node)
    pieces = [piece_of(operand) for operand in concat.operands] if concat is not None else []
    split = neighbours_in_a_split(pieces)
    if concat is None or split is None or concat.kind != "cat" or (found := sections(split)) is None:
        return Refusal("it does not concatenate neighbouring items of one split, each once, in their order")
    if found.dim != concat.dim:
        return Refusal("split and joined along different dimensions")
    if any(sole_user(operand) is None for operand in concat.operands):
        return Refusal("an item is read elsewhere too")
    others = [item for item in items_of(split) if item not in concat.operands]
    if not others:
        return Refusal("nobody reads another item of the split: a slice is enough")
    taken = {index_of(operand) for operand in concat.operands}
    return [node, *others] if taken.isdisjoint(map(index_of, others)) else Refusal("an item is read elsewhere too")


def neighbours_in_a_split(pieces: Sequence[Piece | None]) -> torch.fx.Node | None:
    """The split that these are consecutive items of, by their numbers: one that is empty counts too."""
    items = [piece.made_by for piece in pieces if piece is not None and piece.made_by[0].target is operator.getitem]
    if len(items) < 2 or len(items) != len(pieces) or items[0][-1].target is not aten.split_with_sizes.default:
        return None
    split, first = items[0][-1], index_of(items[0][0])
    in_order = [(split, first + step) for step in range(len(items))]
    return split if [(nodes[-1], index_of(nodes[0])) for nodes in items] == in_order else None


def fewer_sections(site: Site) -> Any:
    operands: Any = site.arguments["tensors"]
    if len(operands) < site.options.split_cat_min_run:
        return Refusal(f"fewer than {site.options.split_cat_min_run} neighbours are joined")
    split, first, count = operands[0].args[0], index_of(operands[0]), len(operands)
    source, sizes, dim = known_sections(split)
    merged = [*sizes[:first], sum(sizes[first : first + count]), *sizes[first + count :]]
    others = [index_of(item) for item in site.roots[1:]]
    indices = [first, *(index if index < first else index - count + 1 for index in others)]
    site.through(split, *split.users)
    return split_again(site, source, merged, dim, indices)


# --- items without the dimension they were split along ----------------------------------------------------------------


def squeezed_items(split: torch.fx.Node) -> Nodes | Refusal:
    found = sections(split)
    if found is None or any(size != 1 for size in found.sizes):
        return Refusal("it is no split into ones")
    readers = [sole_user(item) for item in items_of(split)]
    dropped = [piece_of(reader) for reader in readers]
    if not readers or not all(piece is not None and piece.squeezed for piece in dropped):
        return Refusal("not every item is squeezed along that dimension, and read by nothing else")
    return [reader for reader in readers if reader is not None]


def unbound(site: Site) -> Any:
    source, _, dim = known_sections(site.node)
    unbind = site.call(aten.unbind.int, source, *([dim] if dim else []))
    site.through(*site.node.users)
    return tuple(site.call(operator.getitem, unbind, index_of(root.args[0])) for root in site.roots)


# --- one section ------------------------------------------------------------------------------------------------------


def all_there_is(site: Site) -> Any:
    """The one item of a split is what was split; to the caller it goes as a view, which it was."""
    split: Any = site.node.args[0]
    found = sections(split)
    if found is None or len(found.sizes) != 1:
        return Refusal("it is no item of a split into one")
    site.through(split)
    source, _, dim = found
    return site.call(aten.slice.Tensor, source, *([dim] if dim else [])) if is_returned(site.node) else source


# --- stacked for one call ---------------------------------------------------------------------------------------------


def items_of_stacked(is_exact: bool) -> Callable[[torch.fx.Node], Nodes | Refusal]:
    """The items of unbind(f(stack(..))); `is_exact`: whether f gives the same bits wherever an element stands."""

    def roots(unbind: torch.fx.Node) -> Nodes | Refusal:
        found = stacked_call(unbind)
        if found is None:
            return Refusal("it does not take apart what an elementwise call made of a stack, for it alone")
        call, concat = found
        if call.exact != is_exact:
            return Refusal("another rule takes such functions")
        dtype = fake_value(call.operand).dtype
        if any(fake_value(operand).dtype != dtype for operand in concat.operands):
            return Refusal("the stack widens an operand")
        if arguments_of(unbind)["dim"] != concat.dim:
            return Refusal("stacked and taken apart along different dimensions")
        items = items_of(unbind)
        unread = set(range(len(concat.operands))) - set(map(index_of, items))
        if any(requires_grad(concat.operands[index]) is not False for index in unread):
            return Refusal("an operand whose item nobody reads would have no gradient, instead of zeros")
        return items or Refusal("nobody reads its items")

    return roots


def stacked_call(unbind: torch.fx.Node) -> tuple[Unary, Concat] | None:
    """The elementwise call whose result is taken apart, and the stack it is made on; neither is read elsewhere."""
    middle: Any = unbind.args[0]
    call = is_elementwise_unary(middle)
    concat = concat_view(call.operand) if call is not None else None
    if call is None or concat is None or concat.kind != "stack" or not read_by_position(unbind):
        return None
    alone = sole_user(middle) is unbind and sole_user(call.operand) is middle
    return (call, concat) if alone else None


def one_call_each(site: Site) -> Any:
    """f of each operand; of the tensor they are pieces of, if they are."""
    found, middle = stacked_call(site.node), cast(torch.fx.Node, site.node.args[0])
    assert found is not None
    call, concat = found

    def same_call(operand: Any) -> Any:
        return site.call(middle.target, operand, *middle.args[1:], **middle.kwargs)

    indices = [index_of(root) for root in site.roots]
    stretches = stretches_of(operands_of(concat, fake_value(call.operand).dim()), concat.dim)
    run = stretches[0].run
    site.through(middle, call.operand, *site.node.users)
    if len(stretches) > 1 or run is None or run.shape is not None:
        more = len(set(indices)) - SAVED_CALLS
        if more > 0 and site.options.kernel_rewrites != "always" and not copy_outweighs(fake_value(call.operand), more):
            return Refusal("calls for each cost more than the stack, while they fuse with nothing")
        made = {index: same_call(concat.operands[index]) for index in dict.fromkeys(indices)}
        return tuple(made[index] for index in indices)
    base, sizes = stretches[0].base, [(run.hi - run.lo) // run.count] * run.count
    whole = same_call(base if run.whole else Moves(site.call).write(aten.slice.Tensor, base, run.axis, run.lo, run.hi))
    if run.mode == "slice":
        return split_again(site, whole, sizes, run.axis, indices)
    unbind = site.call(aten.unbind.int, whole, *([run.axis] if run.axis else []))
    return tuple(site.call(operator.getitem, unbind, index) for index in indices)
