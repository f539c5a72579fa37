"""Numbers from data that torch takes for others, checked where they are read.

`n = x.sum().item()`, of which an operator assumes that it is a size `s0` (`y.narrow(0, 0, n) + y`), is `s0` in all
that is traced later: AOTAutograd sees an assertion `s0 == s0`, drops it, and with it the number nobody reads. Data may
say otherwise. So such assertions are repeated of the tensor that the number comes from, and of these nothing is known:

    item = sum_1.item()                             item = sum_1.item()
    eq = item == s0                                 eq = item == s0
    _assert_scalar(eq, "... Eq(u0, s0)")    =>      _assert_scalar(eq, "... Eq(u0, s0)")
                                                    same = sum_1.reshape(()) == s0
                                                    _assert_async(same, "... Eq(u0, s0)")
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from ferrite.capture import size_facts
from ferrite.graph import fake_value

aten = torch.ops.aten
COMPUTED = frozenset(
    [
        *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
        *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg),
    ]
)


def check_assumed_numbers(gm: torch.fx.GraphModule) -> None:
    """Repeat what is asserted of such numbers, of the tensors that they come from, in place."""
    assumed = {node for node in gm.graph.nodes if is_item(node) and size_facts.is_so_by_assertion(fake_value(node))}
    if not assumed:
        return
    for node in gm.graph.find_nodes(op="call_function", target=aten._assert_scalar.default):
        condition, message = node.args
        if isinstance(condition, torch.fx.Node) and (found := comes_from(condition, assumed)) is not None:
            with gm.graph.inserting_before(node.next):
                repeat(gm.graph, condition, found, message)
    gm.recompile()


def is_item(node: torch.fx.Node) -> bool:
    if node.op == "call_method":
        return node.target == "item"
    return node.op == "call_function" and node.target in (aten._local_scalar_dense.default, aten.item.default)


def comes_from(condition: torch.fx.Node, assumed: set[torch.fx.Node]) -> list[torch.fx.Node] | None:
    """The nodes to compute anew, operands first; None where no such number is in a condition, or what it is made of
    cannot be computed of tensors."""
    order: dict[torch.fx.Node, bool] = {}

    def visit(node: torch.fx.Node) -> bool:
        """Whether such a number is in it."""
        if node not in order:
            if node in assumed:
                order[node] = True
            else:
                inside = [visit(each) for each in node.all_input_nodes] if node.target in COMPUTED else []
                order[node] = any(inside)
        return order[node]

    return [node for node, inside in order.items() if inside] if visit(condition) else None


def repeat(graph: torch.fx.Graph, condition: torch.fx.Node, nodes: list[torch.fx.Node], message: Any) -> None:
    """Adds the nodes anew, with tensors for numbers, and asserts the last."""
    anew: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in nodes:
        if is_item(node):
            element = graph.call_function(torch.reshape, (node.args[0], ()))
            # on a GPU, an assertion that fails ends the process
            anew[node] = graph.call_function(torch.Tensor.to, (element, "cpu"))
        else:
            args = torch.fx.node.map_arg(node.args, lambda each: anew.get(each, each))
            anew[node] = graph.call_function(node.target, args)  # type: ignore[arg-type]
    graph.call_function(aten._assert_async.msg, (anew[condition], message))
