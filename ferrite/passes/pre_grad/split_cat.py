"""Splits against joins. Every pass has the name under which readers of other compilers look for it.

`pieces` has the algebra, `runs` when a run of pieces is worth it, `sections` what becomes of splits; here each pass is
said in a line or two, with what it fires on and what it leaves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from ferrite.passes.pre_grad import sections
from ferrite.passes.pre_grad.runs import JOINS, cancel, wanted
from ferrite.passes.pre_grad.split_cat_cases import (
    all_three,
    backwards,
    beside_foreign,
    first_two,
    flat,
    floats,
    four,
    result_written,
    split_join,
    without_gradients_between,
    written_between,
)
from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.pipeline import PassContext
from ferrite.rewrite import Case, NodeRule

aten = torch.ops.aten


# --- a split into one -------------------------------------------------------------------------------------------------


def item_written(x: Any) -> Any:
    y = x * 2
    torch.split(y, [4], 1)[0].mul_(3)
    return y + 1


ONE_SECTION = (
    NodeRule(
        name="remove_split_with_size_one_pass",
        purpose="the one item of a split is what was split",
        targets=(operator.getitem,),
        rewrite=sections.all_there_is,
        examples=(
            Case("read", lambda x: torch.split(x, 4, 1)[0] * 2, floats(2, 4)),
            Case("returned, as a view", lambda x: torch.split(x, [4], 1)[0], floats(2, 4)),
            Case("one chunk", lambda x: (p := torch.chunk(x, 1))[0] * 2 + p[0], floats(2, 4)),
            Case("written", item_written, lambda: [torch.rand(2, 4)]),
        ),
        near_misses=(
            Case("two sections", lambda x: torch.split(x, [1, 3], 1)[0] * 2, floats(2, 4)),
            Case("one of them empty", lambda x: torch.split(x, [4, 0], 1)[0] * 2, floats(2, 4)),
            Case("unbound", lambda x: torch.unbind(x)[0] * 2, floats(1, 4)),
        ),
    ),
)


@pre_grad_pass(rules=ONE_SECTION)
def remove_split_with_size_one_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """A split into one section is no split."""
    return cancel(gm, ONE_SECTION, context, twin=False)


# --- a split of a split -----------------------------------------------------------------------------------------------


def split_twice(dim: int, read: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def function(x: Any) -> Any:
        p = torch.split(x, [1, 4, 1], 1)
        return read(p, torch.split(p[1], [1, 1] if dim == 0 else [1, 0, 3], dim))

    return function


SPLIT_TWICE = (
    NodeRule(
        name="merge_splits_pass",
        purpose="an item that is split again is split at once",
        targets=(aten.split_with_sizes.default,),
        roots=sections.items_of_both,
        rewrite=sections.one_split,
        examples=(
            Case(
                "all read",
                split_twice(1, lambda p, q: (p[0] * 1, q[0] * 2, q[1] * 3, q[2] * 4, p[2] * 5)),
                floats(2, 6),
            ),
            Case("some read", split_twice(1, lambda p, q: (q[2] * 4, p[2] * 5)), floats(2, 6)),
            Case("returned", split_twice(1, lambda p, q: (q[0], q[2], p[0])), floats(2, 6)),
        ),
        near_misses=(
            Case("along another dimension", split_twice(0, lambda p, q: q[0] * 2 + q[1]), floats(2, 6)),
            Case("the item is read, too", split_twice(1, lambda p, q: (p[1] * 2, q[0] * 2)), floats(2, 6)),
        ),
    ),
)


@pre_grad_pass(rules=SPLIT_TWICE)
def merge_splits_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """A split of an item of a split, along the same dimension, is one split."""
    return cancel(gm, SPLIT_TWICE, context, twin=False)


# --- slices joined along their own axis -------------------------------------------------------------------------------


def two_joins(x: Any) -> Any:
    p = torch.split(x, [1, 1, 1, 1, 2], 1)
    return torch.cat([p[0], p[1]], 1) * 2, torch.cat([p[2], p[3]], 1) * 3, p[4] * 4


FEWER_SECTIONS = (
    NodeRule(
        name="merge_getitem_cat_pass",
        purpose="items of a split that are joined again are one item of a coarser split",
        targets=(aten.cat.default,),
        roots=sections.join_and_others,
        rewrite=sections.fewer_sections,
        layout="free",
        examples=(
            Case(
                "beside another item",
                lambda x: (p := x.split([1, 2, 1], 1))[2] + torch.cat([p[0], p[1]], 1).sum(),
                floats(2, 4),
            ),
            Case("two joins of one split", two_joins, floats(2, 6)),
            Case(
                "an empty section between",
                lambda x: (p := x.split([1, 0, 2, 1], 1))[3] * torch.cat([p[0], p[1], p[2]], 1).exp(),
                floats(2, 4),
            ),
        ),
        near_misses=(
            Case("nothing else is read", split_join(first_two), floats(2, 4)),
            Case(
                "reversed", lambda x: (p := x.split([1, 2, 1], 1))[2] + torch.cat([p[1], p[0]], 1).sum(), floats(2, 4)
            ),
            Case("an item left out", lambda x: (p := x.split(1, 1))[3] * torch.cat([p[0], p[2]], 1), floats(2, 4)),
            Case("an item read again", lambda x: (p := x.split(1, 1))[0] * torch.cat([p[0], p[1]], 1), floats(2, 4)),
            Case("another dimension", lambda x: (p := x.split(1, 1))[2] * torch.cat([p[0], p[1]]).sum(), floats(2, 4)),
            Case("returned", lambda x: ((p := x.split(1, 1))[3] * 2, torch.cat([p[0], p[1]], 1)), floats(2, 4)),
        ),
    ),
)


@pre_grad_pass(rules=FEWER_SECTIONS)
def merge_getitem_cat_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Items of a split that are joined again become one item, where others of that split are still read."""
    return cancel(gm, FEWER_SECTIONS, context, twin=False)


SLICES_BACK = (
    NodeRule(
        name="mutate_cat_pass",
        purpose="neighbouring slices joined again are one slice, or the whole",
        targets=(aten.cat.default,),
        rewrite=wanted("stretch", alone=True),
        layout="free",
        examples=(
            Case("all", split_join(all_three), floats(2, 4)),
            Case("some", split_join(first_two), floats(2, 4)),
            Case("items read elsewhere", lambda x: (p := x.split(1, 1))[1] * torch.cat([p[0], p[1]], 1), floats(2, 4)),
            Case("an empty one", split_join(first_two, (2, 0, 2)), floats(2, 4)),
            Case("of a transposed tensor", lambda x: split_join(all_three, dim=0, to=0)(x.t()), floats(2, 4)),
            Case("an old empty operand", split_join(lambda p, x: [torch.empty(0), p[0], p[1]]), floats(2, 4)),
        ),
        near_misses=(
            Case("reversed", split_join(backwards), floats(2, 4)),
            Case("repeated", split_join(lambda p, x: [p[0], p[0]]), floats(2, 4)),
            Case("along another dimension", split_join(all_three, (1, 1, 1), 1, 0), floats(2, 3)),
            Case("with another", split_join(beside_foreign), floats(2, 4)),
            Case("returned", split_join(all_three, read=lambda y: y), floats(2, 4)),
            Case("a view of it returned", split_join(all_three, read=lambda y: y.t()), floats(2, 4)),
            Case("what was split is written between", written_between, lambda: [torch.rand(2, 4)]),
            Case("the result is written", result_written, floats(2, 4)),
            Case("split where nothing is differentiated", without_gradients_between, floats(2, 4)),
        ),
    ),
)


@pre_grad_pass(rules=SLICES_BACK)
def mutate_cat_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """A join of neighbouring slices of one tensor is a slice of it, or the tensor itself."""
    return cancel(gm, SLICES_BACK, context, twin=False)


# --- slices joined and stacked in any way -----------------------------------------------------------------------------

SPLIT_CAT = (
    NodeRule(
        name="split_cat_pass",
        purpose="neighbouring slices in a join or stack are one operand of it, or all",
        targets=JOINS,
        rewrite=wanted("stretch", "slices joined", "slices stacked"),
        layout="free",
        examples=(
            Case("among others", split_join(beside_foreign, to=1), floats(2, 4)),
            Case("along another dimension", split_join(four, (1,) * 4, 1, 0), floats(2, 4)),
            Case("stacked", split_join(four, (1,) * 4, 1, 0, torch.stack), floats(2, 4)),
            Case(
                "stacked behind another",
                split_join(lambda p, x: [x[:, :1], *[p[i] for i in range(5)]], (1,) * 5, 1, 2, torch.stack),
                floats(2, 5),
            ),
            Case(
                "two tensors",
                lambda x, y: flat(torch.cat([*x.split(1), *y.split(1)])),
                lambda: [*floats(2, 3)(), *floats(2, 3)()],
            ),
        ),
        near_misses=(
            Case(
                "unequal slices in a stack",
                lambda x: (p := x.split([1, 2, 1], 1))[1] + torch.stack([p[0], p[2]]).sum(),
                floats(2, 4),
            ),
            Case("reversed", split_join(backwards), floats(2, 4)),
            Case(
                "the next of another tensor",
                lambda x, y: flat(torch.cat([x.split(1)[0], y.split(1)[1]])),
                lambda: [*floats(2, 3)(), *floats(2, 3)()],
            ),
            Case("a run too short", split_join(first_two), floats(2, 4), {"split_cat_min_run": 3}),
            Case(
                "slices that stay, stacked", lambda x: (p := x.split(1, 1))[0] * torch.stack([p[0], p[1]]), floats(2, 2)
            ),
        ),
    ),
    NodeRule(
        name="split_squeeze_pass",
        purpose="items of one, all squeezed, are those of an unbind",
        targets=(aten.split_with_sizes.default,),
        roots=sections.squeezed_items,
        rewrite=sections.unbound,
        examples=(
            Case("all", lambda x: [p.squeeze(1) * 2 for p in torch.split(x, 1, 1)], floats(2, 3)),
            Case("one", lambda x: torch.split(x, 1, 1)[1].squeeze(-1), floats(2, 3)),
        ),
        near_misses=(
            Case("one not squeezed", lambda x: (p := torch.split(x, 1, 1))[0].squeeze(1) + p[1].sum(), floats(2, 3)),
            Case("without a dimension", lambda x: torch.split(x, 1, 1)[0].squeeze() * 2, floats(2, 3)),
            Case("another dimension", lambda x: torch.split(x, 1, 1)[0].squeeze(0) * 2, floats(1, 3)),
            Case("read twice", lambda x: (p := torch.split(x, 1, 1)[0]).squeeze(1) * p, floats(2, 2)),
        ),
    ),
)


@pre_grad_pass(rules=SPLIT_CAT)
def split_cat_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Neighbouring slices in a join or a stack become one operand; a split into ones that are squeezed is an unbind."""
    return cancel(gm, SPLIT_CAT, context, twin=False)


SLICES = (
    NodeRule(
        name="split_cat_to_slices_pass",
        purpose="neighbouring slices in a join, of any number of tensors, are one slice each",
        targets=(aten.cat.default,),
        rewrite=wanted("stretch", "slices joined"),
        layout="free",
        examples=(
            Case("a run among others", split_join(lambda p, x: [x, p[1], p[2], p[3], x], (1,) * 5), floats(2, 5)),
            Case(
                "the join returned",
                split_join(lambda p, x: [x, p[1], p[2], p[3]], (1,) * 5, read=lambda y: y),
                floats(2, 5),
            ),
            Case("along another dimension", split_join(four, (1,) * 4, 1, 0), floats(3, 4)),
        ),
        near_misses=(
            Case("another between", split_join(lambda p, x: [p[0], x, p[1]], (1, 3)), floats(2, 4)),
            Case("reversed", split_join(backwards), floats(2, 4)),
            Case(
                "two, of which one is copied first",
                split_join(lambda p, x: [x[:, :1], p[0], p[1]], (1, 1), 1, 0),
                floats(3, 2),
            ),
        ),
    ),
)


@pre_grad_pass(rules=SLICES)
def split_cat_to_slices_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Runs of slices inside a join become one slice each."""
    return cancel(gm, SLICES, context)


STACKED_SLICES = (
    NodeRule(
        name="split_stack_to_cats_pass",
        purpose="neighbouring equal slices, stacked, are a view of what was split",
        targets=JOINS,
        rewrite=wanted("slices stacked"),
        layout="free",
        examples=(
            Case("along the same dimension", split_join(four, (1,) * 4, 1, 1, torch.stack), floats(2, 4)),
            Case("two dimensions apart", split_join(four, (2,) * 4, 0, 2, torch.stack), floats(8, 3)),
            Case(
                "as a join of unsqueezed",
                lambda x: flat(torch.cat([p.unsqueeze(2) for p in x.split(1, 1)], 2)),
                floats(2, 4),
            ),
        ),
        near_misses=(
            Case("joined", split_join(four, (1,) * 4), floats(2, 4)),
            Case("reversed", split_join(backwards, (1,) * 3, 1, 0, torch.stack), floats(2, 3)),
            Case("returned", split_join(four, (1,) * 4, 1, 0, torch.stack, lambda y: y), floats(2, 4)),
        ),
    ),
)


@pre_grad_pass(rules=STACKED_SLICES)
def split_stack_to_cats_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Equal slices that are stacked become an axis of their own."""
    return cancel(gm, STACKED_SLICES, context)
