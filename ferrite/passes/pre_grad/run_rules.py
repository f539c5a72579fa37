"""Runs of pieces that are concatenated again: which runs each rule takes. They are one algebra (see `pieces`), and one
rewrite (`piece_runs`); readers of other compilers look for its cases under these names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ferrite.passes.pre_grad.piece_runs import CONCATS, Wanted
from ferrite.passes.pre_grad.pieces import Form, Stretch
from ferrite.passes.pre_grad.split_cat_cases import (
    all_three,
    backwards,
    beside_foreign,
    first_two,
    flat,
    four,
    result_written,
    split_concat,
    unbind_concat,
    without_gradients_between,
    written_between,
)
from ferrite.passes.shared.cases import floats
from ferrite.rewrite import Case, NodeRule

aten = torch.ops.aten
CAT = (aten.cat.default,)


def run_rule(
    name: str,
    purpose: str,
    forms: tuple[Form, ...],
    *,
    examples: tuple[Case, ...],
    near_misses: tuple[Case, ...],
    accepts: Callable[[Stretch], bool] = lambda stretch: True,
    targets: tuple[Any, ...] = CONCATS,
    alone: bool = False,
) -> NodeRule:
    return NodeRule(
        name,
        purpose,
        targets,
        Wanted(frozenset(forms), accepts, alone),
        layout="free",
        examples=examples,
        near_misses=near_misses,
    )


# --- slices -----------------------------------------------------------------------------------------------------------

MUTATE_CAT = run_rule(
    "mutate_cat_pass",
    "neighbouring slices concatenated again are one slice, or the whole",
    ("stretch",),
    targets=CAT,
    alone=True,
    examples=(
        Case("all", split_concat(all_three), floats(2, 4)),
        Case("some", split_concat(first_two), floats(2, 4)),
        Case("items read elsewhere", lambda x: (p := x.split(1, 1))[1] * torch.cat([p[0], p[1]], 1), floats(2, 4)),
        Case("an empty one", split_concat(first_two, (2, 0, 2)), floats(2, 4)),
        Case("of a transposed tensor", lambda x: split_concat(all_three, dim=0, to=0)(x.t()), floats(2, 4)),
        Case("an old empty operand", split_concat(lambda p, x: [torch.empty(0), p[0], p[1]]), floats(2, 4)),
    ),
    near_misses=(
        Case("reversed", split_concat(backwards), floats(2, 4)),
        Case("repeated", split_concat(lambda p, x: [p[0], p[0]]), floats(2, 4)),
        Case("along another dimension", split_concat(all_three, (1, 1, 1), 1, 0), floats(2, 3)),
        Case("with another", split_concat(beside_foreign), floats(2, 4)),
        Case("returned", split_concat(all_three, read=lambda y: y), floats(2, 4)),
        Case("a view of it returned", split_concat(all_three, read=lambda y: y.t()), floats(2, 4)),
        Case("what was split is written between", written_between, lambda: [torch.rand(2, 4)]),
        Case("the result is written", result_written, floats(2, 4)),
        Case("split where nothing is differentiated", without_gradients_between, floats(2, 4)),
    ),
)
SPLIT_CAT = run_rule(
    "split_cat_pass",
    "neighbouring slices in a cat or stack are one operand of it, or all",
    ("stretch", "slices concatenated", "slices stacked"),
    examples=(
        Case("among others", split_concat(beside_foreign, to=1), floats(2, 4)),
        Case("along another dimension", split_concat(four, (1,) * 4, 1, 0), floats(2, 4)),
        Case("stacked", split_concat(four, (1,) * 4, 1, 0, torch.stack), floats(2, 4)),
        Case(
            "stacked behind another",
            split_concat(lambda p, x: [x[:, :1], *[p[i] for i in range(5)]], (1,) * 5, 1, 2, torch.stack),
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
        Case("reversed", split_concat(backwards), floats(2, 4)),
        Case(
            "the next of another tensor",
            lambda x, y: flat(torch.cat([x.split(1)[0], y.split(1)[1]])),
            lambda: [*floats(2, 3)(), *floats(2, 3)()],
        ),
        Case("a run too short", split_concat(first_two), floats(2, 4), {"split_cat_min_run": 3}),
        Case("slices that stay, stacked", lambda x: (p := x.split(1, 1))[0] * torch.stack([p[0], p[1]]), floats(2, 2)),
    ),
)
SPLIT_CAT_TO_SLICES = run_rule(
    "split_cat_to_slices_pass",
    "neighbouring slices in a cat, of any number of tensors, are one slice each",
    ("stretch", "slices concatenated"),
    targets=CAT,
    examples=(
        Case("a run among others", split_concat(lambda p, x: [x, p[1], p[2], p[3], x], (1,) * 5), floats(2, 5)),
        Case("returned", split_concat(lambda p, x: [x, p[1], p[2], p[3]], (1,) * 5, read=lambda y: y), floats(2, 5)),
    ),
    near_misses=(
        Case("another between", split_concat(lambda p, x: [p[0], x, p[1]], (1, 3)), floats(2, 4)),
        Case("one is copied first", split_concat(lambda p, x: [x[:, :1], p[0], p[1]], (1, 1), 1, 0), floats(3, 2)),
    ),
)
SPLIT_STACK_TO_CATS = run_rule(
    "split_stack_to_cats_pass",
    "neighbouring equal slices, stacked, are a view of what was split",
    ("slices stacked",),
    examples=(
        Case("along the same dimension", split_concat(four, (1,) * 4, 1, 1, torch.stack), floats(2, 4)),
        Case("two dimensions apart", split_concat(four, (2,) * 4, 0, 2, torch.stack), floats(8, 3)),
        Case("unsqueezed", lambda x: flat(torch.cat([p.unsqueeze(2) for p in x.split(1, 1)], 2)), floats(2, 4)),
    ),
    near_misses=(
        Case("concatenated", split_concat(four, (1,) * 4), floats(2, 4)),
        Case("returned", split_concat(four, (1,) * 4, 1, 0, torch.stack, lambda y: y), floats(2, 4)),
    ),
)

# --- items without their axis -----------------------------------------------------------------------------------------


def unsqueezed(stretch: Stretch) -> bool:
    """Whether a run is of items as `unbind` and `select` give them."""
    return not any(operand.piece is not None and operand.piece.squeezed for operand in stretch.operands)


def squeezed(stretch: Stretch) -> bool:
    return all(operand.piece is not None and operand.piece.squeezed for operand in stretch.operands)


def squeezed_whole(stretch: Stretch) -> bool:
    return squeezed(stretch) and stretch.run is not None and stretch.run.whole


UNBIND_STACK = run_rule(
    "unbind_stack_pass",
    "neighbouring items, stacked or concatenated, are a view of what they were taken from",
    ("selects stacked", "selects concatenated"),
    accepts=unsqueezed,
    examples=(
        Case("stacked again", unbind_concat(all_three, 1, 1), floats(2, 3)),
        Case("stacked along another dimension", unbind_concat(all_three, 0, 2), floats(3, 2, 4)),
        Case("some, concatenated", unbind_concat(lambda p, x: [p[1], p[2], p[3]], 0, 1, torch.cat), floats(4, 2, 3)),
        Case("among others", unbind_concat(lambda p, x: [x.sum(1), *[p[i] for i in range(6)]], 1, 0), floats(2, 6)),
    ),
    near_misses=(
        Case("reversed", unbind_concat(backwards), floats(2, 3)),
        Case("repeated", unbind_concat(lambda p, x: [p[0], p[1], p[1]]), floats(2, 3)),
        Case("items that stay", lambda x: (p := x.unbind(1))[0] * torch.stack([x.sum(1), p[0], p[1]]), floats(2, 2)),
        Case("returned", unbind_concat(all_three, 1, 1, read=lambda y: y), floats(2, 3)),
    ),
)
UNBIND_CAT_TO_VIEW = run_rule(
    "unbind_cat_to_view_pass",
    "neighbouring items, concatenated, are what they were taken from with two dimensions as one",
    ("selects concatenated",),
    accepts=unsqueezed,
    examples=(
        Case("along the first", unbind_concat(all_three, 0, 0, torch.cat), floats(3, 2)),
        Case("two dimensions apart", unbind_concat(all_three, 0, 2, torch.cat), floats(3, 2, 2, 2)),
        Case("selected one by one", lambda x: flat(torch.cat([x[:, 0], x[:, 1]], 1)), floats(2, 2, 3)),
    ),
    near_misses=(
        Case("reversed", unbind_concat(backwards, 0, 0, torch.cat), floats(3, 2)),
        Case("stacked", unbind_concat(all_three, 0, 0), floats(3, 2)),
    ),
)
UNBIND_STACK_TO_SLICES = run_rule(
    "unbind_stack_to_slices_pass",
    "neighbouring items, stacked, are a slice of what they were taken from",
    ("selects stacked",),
    accepts=unsqueezed,
    examples=(
        Case("some", unbind_concat(lambda p, x: [p[1], p[2]], 1, 1), floats(2, 4)),
        Case("behind the last dimension", unbind_concat(all_three, 0, 1), floats(3, 2)),
        Case("unsqueezed", lambda x: flat(torch.cat([p.unsqueeze(0) for p in x.unbind(1)])), floats(2, 3)),
    ),
    near_misses=(
        Case("concatenated", unbind_concat(all_three, 0, 0, torch.cat), floats(3, 2)),
        Case("reversed", unbind_concat(backwards, 0), floats(3, 2)),
    ),
)

# --- reshaped or squeezed in between ----------------------------------------------------------------------------------


def given_a_dimension(stretch: Stretch) -> bool:
    """Reshaped, and given a dimension last; in a stack all are."""
    first = stretch.operands[0]
    return first.lifted or first.between[0].target is aten.unsqueeze.default


def chunk_concat(
    each: Callable[[Any], Any], count: int = 4, dim: int = 0, to: int = 0, concat: Any = torch.cat, read: Any = flat
) -> Callable[..., Any]:
    def function(x: Any) -> Any:
        parts = torch.chunk(x, count, dim)
        return read(concat([each(parts[i]) for i in range(count)], to))

    return function


def some_chunks(indices: tuple[int, ...]) -> Callable[..., Any]:
    def function(x: Any) -> Any:
        parts = torch.chunk(x, 4, 0)
        return flat(torch.cat([parts[i].reshape(6) for i in indices], 0))

    return function


def in_pairs(x: Any) -> Any:
    return x.reshape(3, 2)


def short_last(x: Any) -> Any:
    p = torch.chunk(x, 2, 0)
    return flat(torch.cat([p[0].reshape(-1), p[1].reshape(-1)]))


def differently(x: Any) -> Any:
    p = torch.chunk(x, 2, 0)
    return flat(torch.cat([p[0].reshape(3, 4), p[1].reshape(3, 4).t().reshape(3, 4)]))


def read_elsewhere(x: Any) -> Any:
    p = torch.chunk(x, 2, 0)
    q = p[0].reshape(3, 4)
    return flat(torch.cat([q, p[1].reshape(3, 4)])) + q.sum()


RESHAPED_STACK = run_rule(
    "move_reshape_out_of_split_stack_pass",
    "slices reshaped alike and stacked are reshaped once",
    ("reshaped",),
    accepts=lambda stretch: stretch.operands[0].lifted,
    examples=(
        Case("along the first", chunk_concat(in_pairs, concat=torch.stack), floats(8, 3)),
        Case("split and stacked elsewhere", chunk_concat(in_pairs, dim=1, to=2, concat=torch.stack), floats(3, 8)),
        Case("reshapes that copy", chunk_concat(lambda p: p.reshape(6), dim=1, concat=torch.stack), floats(3, 8)),
    ),
    near_misses=(
        Case("concatenated", chunk_concat(in_pairs), floats(8, 3)),
        Case("not reshaped", chunk_concat(lambda p: p, concat=torch.stack), floats(8, 3)),
        Case("another function between", chunk_concat(lambda p: p.reshape(6).sin(), concat=torch.stack), floats(8, 3)),
    ),
)
RESHAPED_CAT = run_rule(
    "fuse_chunk_reshape_concat_pass",
    "chunks reshaped alike and concatenated are reshaped once",
    ("reshaped",),
    accepts=lambda stretch: not given_a_dimension(stretch),
    targets=CAT,
    examples=(
        Case("rows", chunk_concat(in_pairs), floats(8, 3)),
        Case("columns", chunk_concat(in_pairs, dim=1), floats(3, 8)),
        Case("along the last", chunk_concat(in_pairs, dim=0, to=1), floats(8, 3)),
        Case("some of them", some_chunks((1, 2, 3)), floats(8, 3)),
        Case("of a transposed tensor", lambda x: chunk_concat(in_pairs)(x.t()), floats(3, 8)),
    ),
    near_misses=(
        Case("a short last one", short_last, floats(5, 3)),
        Case("shuffled", some_chunks((1, 0, 3, 2)), floats(8, 3)),
        Case("one missing", some_chunks((0, 2)), floats(8, 3)),
        Case("not alike", differently, floats(4, 6)),
        Case("a reshape read elsewhere", read_elsewhere, floats(4, 6)),
        Case("returned, and a view", chunk_concat(in_pairs, read=lambda y: y), floats(8, 3)),
    ),
)
RESHAPED_UNSQUEEZED_CAT = run_rule(
    "fuse_chunk_reshape_unsqueeze_concat_pass",
    "chunks reshaped alike, given a dimension and concatenated are reshaped once",
    ("reshaped",),
    accepts=given_a_dimension,
    examples=(
        Case("the dimension of the cat", chunk_concat(lambda p: in_pairs(p).unsqueeze(0)), floats(8, 3)),
        Case("in the middle", chunk_concat(lambda p: in_pairs(p).unsqueeze(1), dim=1, to=1), floats(3, 8)),
        Case("another dimension", chunk_concat(lambda p: in_pairs(p).unsqueeze(1), to=0), floats(8, 3)),
        Case("a stack", chunk_concat(in_pairs, to=1, concat=torch.stack), floats(8, 3)),
    ),
    near_misses=(
        Case("not given one", chunk_concat(in_pairs), floats(8, 3)),
        Case("of other tensors", chunk_concat(lambda p: p.sin().reshape(6).unsqueeze(0)), floats(8, 3)),
    ),
)
SQUEEZED_CAT = run_rule(
    "fuse_chunk_squeeze_cat_pass",
    "all chunks of one, squeezed and concatenated, are a reshape of what was split",
    ("selects concatenated",),
    accepts=squeezed_whole,
    targets=CAT,
    examples=(
        Case("the first", chunk_concat(lambda p: p.squeeze(0)), floats(4, 3)),
        Case("two dimensions apart", chunk_concat(lambda p: p.squeeze(0), to=1), floats(4, 2, 3)),
    ),
    near_misses=(
        Case("not of one", chunk_concat(lambda p: p.squeeze(0), 2), floats(4, 3)),
        Case("another dimension", chunk_concat(lambda p: p.squeeze(1)), floats(4, 1)),
        Case("some", lambda x: flat(torch.cat([p.squeeze(0) for p in x.chunk(4)[:3]])), floats(4, 3)),
    ),
)
SOME_SQUEEZED_CAT = run_rule(
    "fuse_split_getitem_squeeze_cat",
    "neighbouring items of one, squeezed and concatenated, are a reshape of a slice",
    ("selects concatenated",),
    accepts=squeezed,
    targets=CAT,
    examples=(
        Case("some", lambda x: flat(torch.cat([p.squeeze(0) for p in x.split(1)[1:]])), floats(4, 3)),
        Case("elsewhere", lambda x: flat(torch.cat([p.squeeze(2) for p in x.split(1, 2)[:3]], 0)), floats(2, 3, 4)),
    ),
    near_misses=(
        Case("shuffled", lambda x: flat(torch.cat([x.split(1)[i].squeeze(0) for i in (1, 0)])), floats(4, 3)),
        Case("without a dimension", lambda x: flat(torch.cat([p.squeeze() for p in x.split(1)])), floats(1, 3)),
        Case("unbound", lambda x: flat(torch.cat(list(x.unbind(0)[:2]))), floats(3, 2)),
    ),
)

# --- where the result must be memory of its own -----------------------------------------------------------------------

ALL_FORMS: tuple[Form, ...] = (
    *("stretch", "slices concatenated", "slices stacked", "selects concatenated", "selects stacked", "reshaped"),
)
CAT_TO_COPY = NodeRule(
    name="cat_to_copy_pass",
    purpose="pieces of one tensor, concatenated in their order, are a copy of it",
    targets=CONCATS,
    rewrite=Wanted(frozenset(ALL_FORMS), alone=True, copied=True),
    examples=(
        Case("returned", split_concat(all_three, read=lambda y: y), floats(2, 4)),
        Case("some of them", split_concat(first_two, read=lambda y: y), floats(2, 4)),
        Case("stacked and returned", split_concat(four, (1,) * 4, 1, 0, torch.stack, lambda y: y), floats(2, 4)),
        Case("items stacked and returned", unbind_concat(all_three, 1, 1, read=lambda y: y), floats(2, 3)),
        Case(
            "in channels last",
            lambda x: torch.cat([x[:, :2], x[:, 2:]], 1),
            lambda: [torch.rand(2, 4, 3, 3).to(memory_format=torch.channels_last)],
        ),
    ),
    near_misses=(
        Case("reversed", split_concat(backwards, read=lambda y: y), floats(2, 4)),
        Case("with another", split_concat(beside_foreign, read=lambda y: y), floats(2, 4)),
        Case("a copy as it is", split_concat(four, (1,) * 4, 1, 0, read=lambda y: y), floats(2, 4)),
        Case("the result is written", result_written, floats(2, 4)),
        Case("written between", written_between, lambda: [torch.rand(2, 4)]),
    ),
)
