"""Rules by which a split becomes another split, or goes. `sections` has what they do; here is what they fire on."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from ferrite.passes.pre_grad import sections
from ferrite.passes.pre_grad.split_cat_cases import first_two, split_concat
from ferrite.passes.shared.cases import floats
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

# --- slices joined along their own axis -------------------------------------------------------------------------------


def two_joins(x: Any) -> Any:
    p = torch.split(x, [1, 1, 1, 1, 2], 1)
    return torch.cat([p[0], p[1]], 1) * 2, torch.cat([p[2], p[3]], 1) * 3, p[4] * 4


FEWER_SECTIONS = (
    NodeRule(
        name="merge_getitem_cat_pass",
        purpose="items of a split that are joined again are one item of a coarser split",
        targets=(aten.cat.default,),
        roots=sections.concat_and_others,
        rewrite=sections.fewer_sections,
        layout="free",
        examples=(
            Case(
                "beside another item",
                lambda x: (p := x.split([1, 2, 1], 1))[2] + torch.cat([p[0], p[1]], 1).sum(),
                floats(2, 4),
            ),
            Case("two concats of one split", two_joins, floats(2, 6)),
            Case(
                "an empty section between",
                lambda x: (p := x.split([1, 0, 2, 1], 1))[3] * torch.cat([p[0], p[1], p[2]], 1).exp(),
                floats(2, 4),
            ),
        ),
        near_misses=(
            Case("nothing else is read", split_concat(first_two), floats(2, 4)),
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

SPLIT_SQUEEZE = (
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

# --- stacked for one call ---------------------------------------------------------------------------------------------


def through_stack(function: Any, dims: tuple[int, int] = (0, 0), read: Any = None) -> Callable[..., Any]:
    """Two tensors stacked, a function of the stack, the two taken out again."""

    def run(a: Any, b: Any) -> Any:
        parts = torch.unbind(function(torch.stack([a, b], dims[0])), dims[1])
        return (read or (lambda p: (p[0] * 2, p[1] + 1)))(parts)

    return run


def many_of_them(count: int) -> Callable[..., Any]:
    """A function of a stack of so many that differ, taken apart again."""

    def run(x: Any) -> Any:
        rows = [x * number for number in range(1, count + 1)]
        return [part * 2 for part in torch.unbind(torch.tanh(torch.stack(rows)))]

    return run


def two(*shape: int, other: torch.dtype = torch.float32) -> Callable[[], list[Any]]:
    return lambda: [torch.randn(shape).requires_grad_(), torch.randn(shape).to(other).requires_grad_()]


def of_pieces(x: Any) -> Any:
    p = torch.split(x, 2, 1)
    q = torch.unbind(torch.relu(torch.stack([p[0], p[1]], 0)), 0)
    return q[0] * 2 + q[1]


def of_items(x: Any) -> Any:
    p = torch.unbind(x, 1)
    q = torch.unbind(torch.relu(torch.stack([p[1], p[2]], 0)), 0)
    return q[0] * 2 + q[1]


def stack_read(a: Any, b: Any) -> Any:
    stacked = torch.stack([a, b])
    p = torch.unbind(torch.relu(stacked))
    return p[0] + p[1] + stacked.sum()


STACKED_CALLS = (
    NodeRule(
        name="merge_stack_tahn_unbind_pass",
        purpose="a function of a stack that is taken apart again is computed for each",
        targets=(aten.unbind.int,),
        roots=sections.items_of_stacked(is_exact=False),
        rewrite=sections.one_call_each,
        layout="free",
        numerics="rounded",
        examples=(
            Case("tanh", through_stack(torch.tanh), two(2, 3)),
            Case("sigmoid, along another dimension", through_stack(torch.sigmoid, (1, 1)), two(2, 3)),
            Case("as many calls as before", many_of_them(3), floats(2, 4)),
            Case("a stack that costs more than calls", many_of_them(5), floats(64, 128)),
            Case("calls that fuse", many_of_them(5), floats(2, 4), {"kernel_rewrites": "always"}),
        ),
        near_misses=(
            Case("taken apart along another dimension", through_stack(torch.tanh, (0, 1)), two(2, 3)),
            Case("more calls than before", many_of_them(5), floats(2, 4)),
            Case("no elementwise function", through_stack(lambda s: s.softmax(0)), two(2, 3)),
            Case("an item not read, with a gradient", through_stack(torch.tanh, read=lambda p: p[0] * 2), two(2, 3)),
            Case("the items are returned", through_stack(torch.tanh, read=lambda p: (p[0], p[1])), two(2, 3)),
        ),
    ),
    NodeRule(
        name="merge_stack_relu_unbind_pass",
        purpose="the same for functions that give the same bits wherever an element stands",
        targets=(aten.unbind.int,),
        roots=sections.items_of_stacked(is_exact=True),
        rewrite=sections.one_call_each,
        layout="free",
        examples=(
            Case("relu", through_stack(torch.relu), two(2, 3)),
            Case("with numbers", through_stack(lambda s: s.clamp(-1, 0.5), (1, 1)), two(2, 3)),
            Case("of neighbouring slices", of_pieces, floats(2, 4)),
            Case("of neighbouring items", of_items, floats(2, 4)),
        ),
        near_misses=(
            Case("the stack is read", stack_read, two(2, 3)),
            Case("another dtype in the stack", through_stack(torch.relu), two(2, 3, other=torch.float64)),
            Case("rounded elsewhere", through_stack(torch.tanh), two(2, 3)),
        ),
    ),
)
