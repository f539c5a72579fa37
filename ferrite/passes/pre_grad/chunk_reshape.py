"""Pieces that are all reshaped alike and then joined: the whole is reshaped once.

With p the n chunks of x along d, of width w, and T = reshape(movedim(unflatten(x, d, [n, w]), d, 0), [n, *S]):

    cat([reshape(p[i], S)], c)                        =>   flatten(movedim(T, 0, c), c, c + 1)
    stack([reshape(p[i], S)], c)                      =>   movedim(T, 0, c)
    cat([unsqueeze(reshape(p[i], S), c)], c)          =>   the same
    cat([squeeze(p[i], d)], c), w = 1                 =>   flatten(movedim(x, d, c), c, c + 1)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ferrite.passes.pre_grad.pieces import Stretch
from ferrite.passes.pre_grad.runs import JOINS, cancel, wanted
from ferrite.passes.pre_grad.split_cat_cases import flat, floats
from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.pipeline import PassContext
from ferrite.rewrite import Case, NodeRule

aten = torch.ops.aten


def plainly(stretch: Stretch) -> bool:
    return not given_a_dimension(stretch)


def given_a_dimension(stretch: Stretch) -> bool:
    """Reshaped, and given a dimension last; in a stack all are."""
    first = stretch.operands[0]
    return first.lifted or first.between[0].target is aten.unsqueeze.default


def stacked(stretch: Stretch) -> bool:
    return stretch.operands[0].lifted


def squeezed(stretch: Stretch) -> bool:
    pieces = [operand.piece for operand in stretch.operands]
    return all(piece is not None and piece.squeezed for piece in pieces)


def squeezed_whole(stretch: Stretch) -> bool:
    return squeezed(stretch) and stretch.run is not None and stretch.run.whole


# --- cases ------------------------------------------------------------------------------------------------------------


def chunk_join(
    each: Callable[[Any], Any], count: int = 4, dim: int = 0, to: int = 0, join: Any = torch.cat, read: Any = flat
) -> Callable[..., Any]:
    def function(x: Any) -> Any:
        parts = torch.chunk(x, count, dim)
        return read(join([each(parts[i]) for i in range(count)], to))

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


# --- the rules --------------------------------------------------------------------------------------------------------

STACK = (
    NodeRule(
        name="move_reshape_out_of_split_stack_pass",
        purpose="slices reshaped alike and stacked are reshaped once",
        targets=JOINS,
        rewrite=wanted("reshaped", accepts=stacked),
        layout="free",
        examples=(
            Case("along the first", chunk_join(in_pairs, join=torch.stack), floats(8, 3)),
            Case("split and stacked elsewhere", chunk_join(in_pairs, dim=1, to=2, join=torch.stack), floats(3, 8)),
            Case("reshapes that copy", chunk_join(lambda p: p.reshape(6), dim=1, join=torch.stack), floats(3, 8)),
        ),
        near_misses=(
            Case("joined", chunk_join(in_pairs), floats(8, 3)),
            Case("not reshaped", chunk_join(lambda p: p, join=torch.stack), floats(8, 3)),
            Case("another function between", chunk_join(lambda p: p.reshape(6).sin(), join=torch.stack), floats(8, 3)),
        ),
    ),
)


@pre_grad_pass(rules=STACK)
def move_reshape_out_of_split_stack_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Slices that are reshaped alike and stacked: what was split is reshaped once."""
    return cancel(gm, STACK, context)


RESHAPE_CAT = (
    NodeRule(
        name="fuse_chunk_reshape_concat_pass",
        purpose="chunks reshaped alike and joined are reshaped once",
        targets=(aten.cat.default,),
        rewrite=wanted("reshaped", accepts=plainly),
        layout="free",
        examples=(
            Case("rows", chunk_join(in_pairs), floats(8, 3)),
            Case("columns", chunk_join(in_pairs, dim=1), floats(3, 8)),
            Case("joined along the last", chunk_join(in_pairs, dim=0, to=1), floats(8, 3)),
            Case("some of them", some_chunks((1, 2, 3)), floats(8, 3)),
            Case("of a transposed tensor", lambda x: chunk_join(in_pairs)(x.t()), floats(3, 8)),
        ),
        near_misses=(
            Case("a short last one", short_last, floats(5, 3)),
            Case("shuffled", some_chunks((1, 0, 3, 2)), floats(8, 3)),
            Case("one missing", some_chunks((0, 2)), floats(8, 3)),
            Case("not alike", differently, floats(4, 6)),
            Case("a reshape read elsewhere", read_elsewhere, floats(4, 6)),
            Case("returned, and a view", chunk_join(in_pairs, read=lambda y: y), floats(8, 3)),
        ),
    ),
)


@pre_grad_pass(rules=RESHAPE_CAT)
def fuse_chunk_reshape_concat_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Chunks that are reshaped alike and joined: what was split is reshaped once."""
    return cancel(gm, RESHAPE_CAT, context)


RESHAPE_UNSQUEEZE_CAT = (
    NodeRule(
        name="fuse_chunk_reshape_unsqueeze_concat_pass",
        purpose="chunks reshaped alike, given a dimension and joined are reshaped once",
        targets=JOINS,
        rewrite=wanted("reshaped", accepts=given_a_dimension),
        layout="free",
        examples=(
            Case("the dimension of the join", chunk_join(lambda p: in_pairs(p).unsqueeze(0)), floats(8, 3)),
            Case("in the middle", chunk_join(lambda p: in_pairs(p).unsqueeze(1), dim=1, to=1), floats(3, 8)),
            Case("another dimension", chunk_join(lambda p: in_pairs(p).unsqueeze(1), to=0), floats(8, 3)),
            Case("a stack", chunk_join(in_pairs, to=1, join=torch.stack), floats(8, 3)),
        ),
        near_misses=(
            Case("not given one", chunk_join(in_pairs), floats(8, 3)),
            Case("of other tensors", chunk_join(lambda p: p.sin().reshape(6).unsqueeze(0)), floats(8, 3)),
        ),
    ),
)


@pre_grad_pass(rules=RESHAPE_UNSQUEEZE_CAT)
def fuse_chunk_reshape_unsqueeze_concat_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Chunks that are reshaped alike, given a dimension and joined: what was split is reshaped once."""
    return cancel(gm, RESHAPE_UNSQUEEZE_CAT, context)


SQUEEZE_CAT = (
    NodeRule(
        name="fuse_chunk_squeeze_cat_pass",
        purpose="all chunks of one, squeezed and joined, are a reshape of what was split",
        targets=(aten.cat.default,),
        rewrite=wanted("selects joined", accepts=squeezed_whole),
        layout="free",
        examples=(
            Case("the first", chunk_join(lambda p: p.squeeze(0)), floats(4, 3)),
            Case("two dimensions apart", chunk_join(lambda p: p.squeeze(0), to=1), floats(4, 2, 3)),
        ),
        near_misses=(
            Case("not of one", chunk_join(lambda p: p.squeeze(0), 2), floats(4, 3)),
            Case("another dimension", chunk_join(lambda p: p.squeeze(1)), floats(4, 1)),
            Case("some", lambda x: flat(torch.cat([p.squeeze(0) for p in x.chunk(4)[:3]])), floats(4, 3)),
        ),
    ),
)


@pre_grad_pass(rules=SQUEEZE_CAT)
def fuse_chunk_squeeze_cat_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """All chunks of one, squeezed and joined: two dimensions of what was split become one."""
    return cancel(gm, SQUEEZE_CAT, context)


SPLIT_SQUEEZE_CAT = (
    NodeRule(
        name="fuse_split_getitem_squeeze_cat",
        purpose="neighbouring items of one, squeezed and joined, are a reshape of a slice",
        targets=(aten.cat.default,),
        rewrite=wanted("selects joined", accepts=squeezed),
        layout="free",
        examples=(
            Case("some", lambda x: flat(torch.cat([p.squeeze(0) for p in x.split(1)[1:]])), floats(4, 3)),
            Case("elsewhere", lambda x: flat(torch.cat([p.squeeze(2) for p in x.split(1, 2)[:3]], 0)), floats(2, 3, 4)),
        ),
        near_misses=(
            Case("shuffled", lambda x: flat(torch.cat([x.split(1)[i].squeeze(0) for i in (1, 0)])), floats(4, 3)),
            Case("without a dimension", lambda x: flat(torch.cat([p.squeeze() for p in x.split(1)])), floats(1, 3)),
            Case("unbound", lambda x: flat(torch.cat(list(x.unbind(0)[:2]))), floats(3, 2)),
        ),
    ),
)


@pre_grad_pass(rules=SPLIT_SQUEEZE_CAT)
def fuse_split_getitem_squeeze_cat(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Neighbouring items of one, squeezed and joined: two dimensions of a slice become one."""
    return cancel(gm, SPLIT_SQUEEZE_CAT, context)
