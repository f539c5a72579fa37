"""A sum of linear layers on the pieces of one input is one layer on that input.

    a, b = split(x, [k0, k1], -1)
    linear(a, w0, c) + linear(b, w1)        =>      linear(x, cat([w0, w1], 1), c)

The additions may form any tree. Weights are joined in the order of the pieces, biases are added up, and what else is in
the sum is added at the end. It pays where the weights are joined once and for all, or are at most half as large as what
they are multiplied with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value, same_sizes
from ferrite.options import way
from ferrite.passes.pre_grad import horizontal
from ferrite.passes.pre_grad.horizontal import bytes_of, hints
from ferrite.passes.pre_grad.pieces import Piece, piece_of
from ferrite.passes.pre_grad.predicates import linear_view, sole_user
from ferrite.passes.shared.cases import trainable
from ferrite.passes.shared.facts import leaves_quick_way
from ferrite.rewrite import Case, NodeRule, Site, arguments_of

aten = torch.ops.aten
NAME = "split_linear_add"


class LinearTerm(NamedTuple):
    """A layer on a piece, as a term of the sum."""

    node: torch.fx.Node
    piece: Piece
    weight: torch.fx.Node
    bias: torch.fx.Node | None


def one_layer(site: Site) -> Any:
    terms, rest, additions = summands(site.node)
    if len(terms) < 2:
        return Refusal("it is no sum of layers on pieces")
    runs, problem = runs_of(terms)
    if problem is not None:
        return problem
    chosen = [run for run in runs if len(run) > 1]
    if not chosen:
        return Refusal("the pieces are not neighbours")
    problem = value_problem(site, terms, rest)
    if problem is not None:
        return problem
    if not all(pays(site, run) for run in chosen):
        return Refusal("the calls apart cost no more, by the model of the option horizontal")
    site.through(*additions)
    total = None
    for run in chosen:
        layer = joined(site, run)
        total = layer if total is None else site.call(aten.add.Tensor, total, layer)
    # A tree of additions has an order of its own; what is not folded comes behind, in that order.
    for node in [term.node for run in runs if len(run) == 1 for term in run] + rest:
        total = site.call(aten.add.Tensor, total, node)
    return total


def summands(root: torch.fx.Node) -> tuple[list[LinearTerm], list[torch.fx.Node], list[torch.fx.Node]]:
    """The layers on pieces in a tree of additions, the other terms, and the additions inside."""
    terms: list[LinearTerm] = []
    rest: list[torch.fx.Node] = []
    additions: list[torch.fx.Node] = []
    waiting = operands_of_sum(root)
    while waiting:
        node = waiting.pop(0)
        inner = operands_of_sum(node) if sole_user(node) is not None else []
        term = term_of(node) if not inner else None
        if inner:
            additions.append(node)
            waiting[:0] = inner
        elif term is not None:
            terms.append(term)
        else:
            rest.append(node)
    return terms, rest, additions


def operands_of_sum(node: torch.fx.Node) -> list[torch.fx.Node]:
    if node.target is not aten.add.Tensor:
        return []
    given = arguments_of(node)
    operands = [given["self"], given["other"]]
    plain = given["alpha"] == 1 and all(isinstance(operand, torch.fx.Node) for operand in operands)
    return operands if plain else []


def term_of(node: torch.fx.Node) -> LinearTerm | None:
    found = linear_view(node) if sole_user(node) is not None else None
    piece = piece_of(found.input) if found is not None else None
    if found is None or piece is None or piece.mode != "slice":
        return None
    weight, base = fake_value(found.weight), fake_value(piece.base)
    if piece.axis != base.dim() - 1 or weight.dim() != 2 or not isinstance(weight.shape[0], int):
        return None
    return LinearTerm(node, piece, found.weight, found.bias)


def runs_of(terms: Sequence[LinearTerm]) -> tuple[list[list[LinearTerm]], Refusal | None]:
    """Terms on neighbouring pieces, in the order of the pieces; or why there are none."""
    by_base: dict[torch.fx.Node, list[LinearTerm]] = {}
    for term in terms:
        by_base.setdefault(term.piece.base, []).append(term)
    runs: list[list[LinearTerm]] = []
    for same in by_base.values():
        same.sort(key=lambda term: (term.piece.lo, term.piece.hi))
        for before, term in zip([None, *same], same, strict=False):
            if before is not None and term.piece.lo < before.piece.hi:
                return [], Refusal("two layers read one piece")
            if before is None or term.piece.lo != before.piece.hi:
                runs.append([])
            runs[-1].append(term)
    return runs, None


def value_problem(site: Site, terms: Sequence[LinearTerm], rest: Sequence[torch.fx.Node]) -> Refusal | None:
    value = site.value(site.node)
    if not value.is_floating_point():
        return Refusal("it is no sum of floating point numbers")
    nodes = [*(term.node for term in terms), *rest, *(term.weight for term in terms)]
    nodes += [term.bias for term in terms if term.bias is not None]
    nodes += [term.piece.base for term in terms]
    for node in nodes:
        own = fake_value(node)
        if not isinstance(own, torch.Tensor) or (own.dtype, own.device) != (value.dtype, value.device):
            return Refusal("its terms do not have one dtype and device")
    first = fake_value(terms[0].node).shape
    for term in terms:
        shape = fake_value(term.node).shape
        if not same_sizes(shape, first):
            return Refusal("the layers have results of different shapes")
        if term.bias is not None and list(fake_value(term.bias).shape) != [first[-1]]:
            return Refusal("a bias is not one number for each column")
    return None


def pays(site: Site, run: Sequence[LinearTerm]) -> bool:
    how = way(site.options.horizontal, NAME)
    if how != "auto":
        return how == "always"
    weights = [term.weight for term in run]
    base = fake_value(run[0].piece.base)
    rows, features = horizontal.rows_of(base), run[-1].piece.hi - run[0].piece.lo
    (width,) = hints(fake_value(run[0].node).shape[-1:])
    widest = max(term.piece.width for term in run)
    if base.device.type == "cpu" and leaves_quick_way(rows, width * widest, width * features):
        return False
    read = rows * features * base.element_size()
    return horizontal.are_frozen(site.options, weights) or 2 * sum(map(bytes_of, weights)) <= read


def joined(site: Site, run: Sequence[LinearTerm]) -> Any:
    piece, last = run[0].piece, run[-1].piece
    site.through(*(term.node for term in run), *dict.fromkeys(node for term in run for node in term.piece.made_by))
    x, size = piece.base, fake_value(piece.base).shape[piece.axis]
    if piece.lo != 0 or not torch_api.known_equal(size, last.hi):
        x = site.call(aten.narrow.default, x, piece.axis, piece.lo, last.hi - piece.lo)
    weight = site.call(aten.cat.default, [term.weight for term in run], 1)
    biases = [term.bias for term in run if term.bias is not None]
    if not biases:
        return site.call(aten.linear.default, x, weight)
    return site.call(aten.linear.default, x, weight, functools.reduce(adding(site), biases))


def adding(site: Site) -> Callable[[Any, Any], Any]:
    return lambda left, right: site.call(aten.add.Tensor, left, right)


# --- the rule ---------------------------------------------------------------------------------------------------------

ALWAYS = {"horizontal": "always"}


def balanced(x: Any, *weights: Any) -> Any:
    a, b, c, d = (F.linear(piece, w) for piece, w in zip(x.split(2, -1), weights, strict=True))
    return ((d + b) + (a + c)).relu()


def biased(x: Any, w: Any, v: Any, b: Any, c: Any) -> Any:
    return F.linear(x[:, :2], w, b) + F.linear(x[:, 2:], v, c)


def with_another(x: Any, w: Any, v: Any, y: Any) -> Any:
    return F.linear(x[..., 1:3], w) + (y + F.linear(x[..., 3:], v))


def piece_twice(x: Any, w: Any, v: Any) -> Any:
    return F.linear(x[:, :2], w) + F.linear(x[:, :2], v)


def scaled(x: Any, w: Any, v: Any) -> Any:
    return torch.add(F.linear(x[:, :2], w), F.linear(x[:, 2:], v), alpha=2)


def read_twice(x: Any, w: Any, v: Any) -> Any:
    first = F.linear(x[:, :2], w)
    return first + F.linear(x[:, 2:], v), first.relu()


def not_neighbours(x: Any, w: Any, v: Any) -> Any:
    return F.linear(x[:, :2], w) + F.linear(x[:, 3:], v)


def halves(x: Any, w: Any, v: Any) -> Any:
    return F.linear(x[:, :2], w) + F.linear(x[:, 2:], v)


SUM_RULES = (
    NodeRule(
        name=NAME,
        purpose="a sum of linear layers on pieces of one input is one layer on it",
        targets=(aten.add.Tensor,),
        rewrite=one_layer,
        numerics="rounded",
        examples=(
            Case("four, in another order", balanced, trainable((3, 8), *[(5, 2)] * 4), ALWAYS),
            Case("with biases", biased, trainable((3, 5), (4, 2), (4, 3), (4,), (4,)), ALWAYS),
            Case(
                "part of the input, and something else",
                with_another,
                trainable((2, 3, 5), (4, 2), (4, 2), (4,)),
                ALWAYS,
            ),
            Case("many rows, by the model", halves, trainable((64, 4), (2, 2), (2, 2))),
        ),
        near_misses=(
            Case("a piece twice", piece_twice, trainable((3, 5), (4, 2), (4, 2)), ALWAYS),
            Case("scaled", scaled, trainable((3, 5), (4, 2), (4, 3)), ALWAYS),
            Case("a layer is read again", read_twice, trainable((3, 5), (4, 2), (4, 3)), ALWAYS),
            Case("no neighbours", not_neighbours, trainable((3, 5), (4, 2), (4, 2)), ALWAYS),
            Case("few rows, by the model", halves, trainable((2, 5), (4, 2), (4, 3))),
        ),
    ),
)
