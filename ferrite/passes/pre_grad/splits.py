"""Splits that nothing is gained by.

a', b' = split(cat([a, b]))                    =>   a, b
split(x, [n])[0], all of it                    =>   x
split(x, sizes)[i], and nobody reads the rest  =>   narrow(x, ...)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.errors import Refusal
from ferrite.graph import GradientFlow, fake_value, mutates, same_sizes, storages_of
from ferrite.passes.pre_grad.predicates import (
    Concat,
    concat_view,
    is_plain,
    is_returned,
    sole_user,
    written_memory,
)
from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.passes.shared.cases import floats, normal, trainable
from ferrite.pipeline import PassContext
from ferrite.rewrite import Case, NodeRule, Site, apply_rules, arguments_of

aten = torch.ops.aten


Spans = list[tuple[torch.fx.Node, tuple[int, int]]]  # operands of a concat, and where in it they lie


@dataclass(frozen=True)
class SplitItem:
    """One item of a split or an unbind: from `start` to `end` along `dim` of the source."""

    split: torch.fx.Node
    source: torch.fx.Node
    dim: int
    start: int
    end: int

    @property
    def keeps_dim(self) -> bool:
        return self.split.target is aten.split_with_sizes.default


def piece_at(node: torch.fx.Node) -> SplitItem | Refusal:
    split: Any = node.args[0]
    if not isinstance(split, torch.fx.Node) or split.target not in (aten.split_with_sizes.default, aten.unbind.int):
        return Refusal("it is no piece of a split")
    arguments, index = arguments_of(split), node.args[1]
    sizes = arguments.get("split_sizes", [1] * len(fake_value(split)))
    source, dim = arguments["self"], arguments["dim"]
    known = type(index) is int and 0 <= index < len(sizes) and all(type(size) is int for size in sizes)
    if not known or type(dim) is not int or dim < 0 or not is_plain(fake_value(source)):
        return Refusal("the sizes are not known")
    start = sum(sizes[:index])
    return SplitItem(split, source, dim, start, start + sizes[index])


def on_pieces(rewrite: Callable[[Site, SplitItem], Any]) -> Callable[[Site], Any]:
    def of_site(site: Site) -> Any:
        piece = piece_at(site.node)
        return piece if isinstance(piece, Refusal) else rewrite(site, piece)

    return of_site


def only_section(site: Site, piece: SplitItem) -> Any:
    if not piece.keeps_dim or len(fake_value(piece.split)) != 1:
        return Refusal("there are several pieces")
    if is_written(site.node):
        return Refusal("it is written to, which eager forbids for pieces that are differentiated")
    site.through(piece.split)
    return piece.source


def only_live_piece(site: Site, piece: SplitItem) -> Any:
    """One view of the source instead of one for each piece."""
    if any(user is not site.node and user.users for user in piece.split.users):
        return Refusal("other pieces are read too")
    if len(fake_value(piece.split)) == 1:
        return Refusal("it is the only piece")
    if is_returned(site.node) or is_written(site.node):
        return Refusal("it is returned or written to, and eager treats pieces otherwise than slices there")
    site.through(piece.split, *(user for user in piece.split.users if user is not site.node))
    if piece.keeps_dim:
        return site.call(aten.narrow.default, piece.source, piece.dim, piece.start, piece.end - piece.start)
    return site.call(aten.select.int, piece.source, piece.dim, piece.start)


def is_written(node: torch.fx.Node) -> bool:
    return not written_memory(node.graph).isdisjoint(storages_of(node))


def piece_of_a_concat(site: Site, piece: SplitItem) -> Any:
    concat = concat_view(piece.source)
    if concat is None or concat.dim != piece.dim or (concat.kind == "cat") != piece.keeps_dim:
        return Refusal("nothing is joined along the dimension that is split")
    spans = operand_spans(concat)
    if spans is None:
        return Refusal("the sizes of the operands are not known")
    touched = [(operand, span) for operand, span in spans if overlap(piece, span)]
    if (problem := gradient_problem(piece, concat, spans, [operand for operand, _ in touched])) is not None:
        return problem
    site.through(piece.split, piece.source)
    if len(touched) == 1:
        ((operand, (start, end)),) = touched
        if (start, end) == (piece.start, piece.end):
            return operand
        return site.call(aten.narrow.default, operand, piece.dim, piece.start - start, piece.end - piece.start)
    if not all(piece.start <= start and end <= piece.end for _, (start, end) in touched) or not touched:
        return Refusal("it holds parts of several operands")
    if not dissolves(piece, [span for _, span in spans]):
        return Refusal("the concat stays for others, so that joining again would copy twice")
    return site.call(aten.cat.default, [operand for operand, _ in touched], piece.dim)


def overlap(piece: SplitItem, span: tuple[int, int]) -> bool:
    return span[0] < piece.end and piece.start < span[1]


def gradient_problem(
    piece: SplitItem, concat: Concat, spans: Spans, touched: Sequence[torch.fx.Node]
) -> Refusal | None:
    """All operands of a concat get a gradient, be it zeros, and all pieces require one, if one operand does."""
    gradients = GradientFlow(piece.split.graph)
    needing = [operand for operand in concat.operands if operand in gradients.required]
    if bool(needing) != any(operand in needing for operand in touched):
        return Refusal("the piece requires a gradient, which its own operands do not")
    if any(user is not piece.split and user in gradients.reached for user in piece.source.users):
        return None
    live = [piece_at(user) for user in piece.split.users if user in gradients.reached]
    for operand in needing:
        others = (user for user in operand.users if user is not piece.source)
        reached = any(user.op == "output" or user in gradients.reached for user in others)
        ranges = [span for each, span in spans if each is operand]
        read = any(isinstance(each, SplitItem) and overlap(each, span) for each in live for span in ranges)
        if not reached and not read and piece.split in gradients.reached:
            return Refusal(f"{operand.name} would have no gradient instead of zeros")
    return None


def operand_spans(concat: Concat) -> Spans | None:
    """Where each operand lies in a concat. Operands without elements and dimensions, which cat allows, lie nowhere."""
    found, start = [], 0
    for operand in concat.operands:
        value = fake_value(operand)
        if concat.kind == "cat" and value.dim() == 1 and same_sizes(value.shape, [0]):
            continue
        size = value.shape[concat.dim] if concat.kind == "cat" else 1
        if type(size) is not int:
            return None
        found.append((operand, (start, start + size)))
        start += size
    return found


def dissolves(piece: SplitItem, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether every piece begins and ends where operands do, can take their place, and nobody else reads the concat."""
    if sole_user(piece.source) is not piece.split:
        return False
    begins, ends = {start for start, _ in spans}, {end for _, end in spans}
    for user in piece.split.users:
        other = piece_at(user)
        if isinstance(other, Refusal) or other.start not in begins or other.end not in ends:
            return False
        if is_returned(user) or any(mutates(reader) for reader in user.users):
            return False
    return True


def split_again(sizes: Sequence[int], use: Callable[..., Any], dim: int = 0, to: int = 0) -> Callable[..., Any]:
    return lambda a, b: use(*torch.split(torch.cat([a, b], to), list(sizes), dim))


def written_piece(a: Any, b: Any) -> Any:
    first, second = torch.split(torch.cat([a, b]).detach(), [2, 3])
    first.add_(1)
    return first.sum() + second


def operand_written(a: Any, b: Any) -> Any:
    y, z = a.sin(), b.sin()
    first, second = torch.split(torch.cat([y, z]), [2, 3])
    y.add_(1)
    z.add_(1)
    return first.sum() + second + y.sum()


def written_slice(x: Any) -> Any:
    first = torch.split(x.detach(), [1, 2])[0]
    first.add_(1)
    return first * 2


AB = trainable((2, 4), (3, 4))
SPLITS: tuple[NodeRule, ...] = (
    NodeRule(
        name="split_of_one",
        purpose="a split into one piece is what was split",
        targets=(operator.getitem,),
        rewrite=on_pieces(only_section),
        examples=(
            Case("split", lambda x: torch.split(x, 3, 0)[0] + 1, floats(3, 2)),
            Case("chunk", lambda x: x.chunk(1, 1)[0] + 1, floats(3, 2)),
        ),
        near_misses=(
            Case("two pieces", lambda x: torch.split(x, 2, 0)[0] + 1, floats(3, 2)),
            Case("returned", lambda x: torch.split(x, 3, 0)[0], floats(3, 2)),
            Case("unbind drops the dimension", lambda x: x.unbind(0)[0] + 1, floats(1, 2)),
        ),
    ),
    NodeRule(
        name="split_of_cat",
        purpose="the pieces of a concat are its operands, narrowed or joined anew where the boundaries differ",
        targets=(operator.getitem,),
        rewrite=on_pieces(piece_of_a_concat),
        examples=(
            Case("the operands", split_again([2, 3], lambda p, q: p.sum() + q), AB),
            Case("only one is read", split_again([2, 3], lambda p, q: q * 2), normal((2, 4), (3, 4))),
            Case("inside one operand", split_again([2, 1, 2], lambda p, q, r: p + q + r), AB),
            Case("along another dimension", split_again([1, 2], lambda p, q: p + q, 1, 1), trainable((2, 1), (2, 2))),
            Case(
                "several operands",
                lambda a, b: sum(p.sum() for p in torch.split(torch.cat([a, b, a.sin(), b]), [5, 5])),
                AB,
            ),
            Case("unbind of stack", lambda a, b: torch.stack([a, b], 1).unbind(1)[1] + a, trainable((2, 3), (2, 3))),
            Case(
                "an operand without elements",
                split_again([3], lambda p: p + 1),
                lambda: [torch.rand(0), torch.rand(3, 4).requires_grad_()],
            ),
        ),
        near_misses=(
            Case("another dimension", split_again([1, 3], lambda p, q: p.sum() + q, 1), AB),
            Case("half of one and of the other", split_again([1, 3, 1], lambda p, q, r: q * 2), AB),
            Case("the other gets a gradient of zeros", split_again([2, 3], lambda p, q: q * 2), AB),
            Case("a piece is written", written_piece, AB),
            Case("an operand is written", operand_written, AB),
            Case("an operand is returned too", lambda a, b: torch.split(torch.cat([a, b]), [2, 3])[0], AB),
            Case(
                "dtypes differ",
                lambda a, b: torch.split(torch.cat([a, b.double()]), [2, 3])[0] + 1,
                AB,
            ),
            Case(
                "only one is differentiated",
                split_again([2, 3], lambda p, q: p.sin()),
                lambda: [torch.rand(2, 4), torch.rand(3, 4).requires_grad_()],
            ),
        ),
        layout="free",
    ),
    NodeRule(
        name="one_live_piece",
        purpose="a piece whose siblings nobody reads is a slice",
        targets=(operator.getitem,),
        rewrite=on_pieces(only_live_piece),
        examples=(
            Case("split", lambda x: torch.split(x, [1, 2], 0)[1] + 1, floats(3, 2)),
            Case("chunk", lambda x: x.chunk(2, -1)[0] + 1, floats(2, 4)),
            Case("unbind", lambda x: x.unbind(1)[2] + 1, floats(2, 3)),
        ),
        near_misses=(
            Case("two are read", lambda x: (lambda p: p[0] + p[1])(x.chunk(2, -1)), floats(2, 4)),
            Case("returned", lambda x: x.chunk(2, -1)[0], floats(2, 4)),
            Case("written", written_slice, floats(3, 2)),
        ),
    ),
)


@pre_grad_pass(rules=SPLITS)
def remove_split_ops_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Splits of concats, into one piece, of which one piece is read, or that nobody reads, go away."""
    return remove_dead_pieces(gm.graph) + apply_rules(gm, SPLITS, context)


def remove_dead_pieces(graph: torch.fx.Graph) -> int:
    erased = 0
    for node in reversed(graph.nodes):
        is_piece = node.target is operator.getitem and not isinstance(piece_at(node), Refusal)
        if not node.users and (is_piece or node.target in (aten.split_with_sizes.default, aten.unbind.int)):
            graph.erase_node(node)
            erased += 1
    return erased
