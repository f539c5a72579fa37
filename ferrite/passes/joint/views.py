"""Views that lead back to where they began, and what is asked for twice.

    view(view(x, [12]), [4, 3])                 =>      x                     (x has the shape [4, 3])
    permute(permute(x, [1, 2, 0]), [2, 0, 1])   =>      x
    view(x, int8) twice                         =>      one view
    sym_size(x, 0) * 2 twice                    =>      one product

A view of the shape it has (`pointless_view`) is `view_default_noop`, of the rules for calls that compute what they are
given.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value, stream_of
from ferrite.passes.shared.cases import one
from ferrite.passes.shared.noops import NOOP_RULES
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import AnyRule, Case, GraphRule, NodeRule, Site, apply_rules, arguments_of

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
PERMUTES = (aten.permute.default, aten.transpose.int, aten.t.default)


def source(node: Any, targets: tuple[Any, ...]) -> torch.fx.Node | None:
    """What a call of one of these operators is given; None for any other node."""
    if not isinstance(node, torch.fx.Node) or node.target not in targets:
        return None
    found = arguments_of(node)["self"]
    return found if isinstance(found, torch.fx.Node) else None


def viewed_back(site: Site) -> Any:
    """The engine compares shape and strides: equal ones mean that the second view undoes the first."""
    middle = site.arguments["self"]
    start = source(middle, VIEWS)
    if start is None:
        return Refusal("it is no view of a view")
    site.through(middle)
    return start


def axes(node: torch.fx.Node) -> list[int]:
    """The order in which a call takes the dimensions of its operand."""
    given, rank = arguments_of(node), fake_value(node).ndim
    if node.target is aten.permute.default:
        return [dim % rank for dim in given["dims"]]
    order = list(range(rank))
    if rank > 1:
        first, second = (given["dim0"], given["dim1"]) if node.target is aten.transpose.int else (0, 1)
        order[first], order[second] = order[second], order[first]
    return order


def permuted_back(site: Site) -> Any:
    middle = site.arguments["self"]
    start = source(middle, PERMUTES)
    if start is None:
        return Refusal("it is no permutation of a permutation")
    inner = axes(middle)
    if [inner[dim] for dim in axes(site.node)] != sorted(inner):
        return Refusal("the dimensions end up in another order")
    site.through(middle)
    return start


def in_backward(node: torch.fx.Node) -> bool:
    """Whether autograd made a node; where capturing notes what is forward, the rest is backward."""
    tag = node.meta.get("partitioner_tag")
    if tag is not None:
        return "backward" in tag
    first = next(iter(node.graph.nodes))
    return first.meta.get("partitioner_tag") is not None


def may_read(node: torch.fx.Node, earlier: torch.fx.Node) -> bool:
    """Whether what reads a node may read an earlier one instead: the forward part cannot wait for the backward part."""
    return in_backward(node) or not in_backward(earlier)


def seen_before(site: Site) -> Any:
    """An earlier view of the same bits as the same dtype."""
    viewed = site.arguments["self"]
    for other in viewed.users:
        same = other.target is site.node.target and arguments_of(other) == dict(site.arguments)
        if same and other < site.node and may_read(site.node, other):
            return other
    return Refusal("no earlier view is the same")


class DedupeSizes(GraphRule):
    """Sizes are numbers: two nodes with one expression are one, and an input that holds it needs no node at all."""

    name = "dedupe_symint_uses"
    purpose = "a size that is known already is not calculated again"
    layout = "kept"
    targets = (
        aten.sym_size.int,
        aten.sym_stride.int,
        aten.sym_numel.default,
        *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod),
    )

    def apply(self, gm: torch.fx.GraphModule, context: PassContext) -> int:
        total = 0
        for node, other in self.found(gm).items():
            if isinstance(other, torch.fx.Node) and context.fuel.left:
                node.replace_all_uses_with(other)
                gm.graph.erase_node(node)
                context.fuel.spend()
                context.count(self.name)
                total += 1
        return total

    def explain(self, gm: torch.fx.GraphModule, context: PassContext) -> Mapping[torch.fx.Node, Refusal | None]:
        found = self.found(gm).items()
        return {node: other if isinstance(other, Refusal) else None for node, other in found}

    def found(self, gm: torch.fx.GraphModule) -> dict[torch.fx.Node, torch.fx.Node | Refusal]:
        """Each candidate with the earlier node that has its value, or why there is none. Linear."""
        first: dict[Any, torch.fx.Node] = {}
        outcome: dict[torch.fx.Node, torch.fx.Node | Refusal] = {}
        for node in gm.graph.nodes:
            value = fake_value(node)
            if not isinstance(value, torch.SymInt):
                continue
            expression = torch_api.expression(value)
            earlier = first.setdefault(expression, node)
            if node.op == "placeholder" or node.target not in self.targets:
                continue
            if earlier is node:
                outcome[node] = Refusal("no earlier node has this value")
            elif node.meta.get("unbacked_bindings"):
                outcome[node] = Refusal("it is where the value becomes known")
            elif not may_read(node, earlier) or stream_of(node) != stream_of(earlier):
                outcome[node] = Refusal(f"{earlier.name} belongs to the backward part or to another stream")
                first[expression] = node
            else:
                outcome[node] = earlier
        return outcome

    examples = (
        Case(
            "twice the length",
            lambda x: (
                n := x.nonzero().shape[0],
                aten.new_zeros.default(x, [n * 2]),
                aten.new_ones.default(x, [n * 2]),
            )[1:],
            lambda: [torch.tensor([0.0, 1.0, 2.0])],
        ),
    )
    near_misses = (
        Case(
            "twice and three times the length",
            lambda x: (
                n := x.nonzero().shape[0],
                aten.new_zeros.default(x, [n * 2]),
                aten.new_ones.default(x, [n * 3]),
            )[1:],
            lambda: [torch.tensor([0.0, 1.0, 2.0])],
        ),
    )


POINTLESS_VIEW_PAIR = NodeRule(
    name="pointless_view_pair",
    purpose="a view back to the shape at the start is the start",
    targets=VIEWS,
    rewrite=viewed_back,
    examples=(
        Case("there and back", lambda x: x.view(12).view(4, 3) + 1, one(4, 3)),
        Case("with open sizes", lambda x: x.view(-1).view(-1, 3) + 1, one(4, 3)),
        Case("the middle is read", lambda x: (y := x.view(12), y.sin(), y.view(4, 3) + 1)[1:], one(4, 3)),
    ),
    near_misses=(
        Case("to another shape", lambda x: x.view(12).view(3, 4) + 1, one(4, 3)),
        Case("returned", lambda x: x.view(12).view(4, 3), one(4, 3)),
        Case("something between", lambda x: x.view(12).sin().view(4, 3), one(4, 3)),
    ),
)

POINTLESS_PERMUTE_PAIR = NodeRule(
    name="pointless_permute_pair",
    purpose="a permutation that undoes the one before leaves nothing to do",
    targets=PERMUTES,
    rewrite=permuted_back,
    examples=(
        Case("three dimensions", lambda x: x.permute(1, 2, 0).permute(2, 0, 1) + 1, one(2, 3, 4)),
        Case("counted from the end", lambda x: x.permute(-2, -1, 0).permute(-1, 0, 1) + 1, one(2, 3, 4)),
        Case("transposed twice", lambda x: x.t().t() + 1, one(2, 3)),
        Case("two spellings", lambda x: x.transpose(0, -1).permute(2, 1, 0) + 1, one(2, 3, 4)),
    ),
    near_misses=(
        Case("it goes round", lambda x: x.permute(1, 2, 0).permute(1, 2, 0) + 1, one(3, 3, 3)),
        Case("once", lambda x: x.permute(1, 0) + 1, one(2, 3)),
        Case("returned", lambda x: x.permute(1, 0).permute(1, 0), one(2, 3)),
    ),
)

DEDUPE_VIEWS = NodeRule(
    name="dedupe_view_dtype",
    purpose="the same bits are viewed as a dtype once",
    targets=(aten.view.dtype,),
    rewrite=seen_before,
    examples=(
        Case("twice", lambda x: x.view(torch.int32) + x.view(torch.int32).abs(), one(4)),
        Case("of another width", lambda x: x.view(torch.int8) + x.view(torch.int8).abs(), one(4)),
    ),
    near_misses=(Case("two dtypes", lambda x: x.view(torch.int32) + x.view(torch.float32).abs(), one(4)),),
)

(POINTLESS_VIEW,) = (rule for rule in NOOP_RULES if rule.name == "view_default_noop")
VIEW_RULES: tuple[AnyRule, ...] = (
    POINTLESS_VIEW,
    POINTLESS_VIEW_PAIR,
    POINTLESS_PERMUTE_PAIR,
    DEDUPE_VIEWS,
    DedupeSizes(),
)


@graph_pass(stage="joint", rules=VIEW_RULES)
def pointless_views(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Views that lead back to their start go; equal views of bits and equal sizes become one."""
    return apply_rules(gm, VIEW_RULES, context)
