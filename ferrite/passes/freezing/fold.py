"""What depends on constants alone is computed while compiling.

    t = permute(W, [1, 0])                          C = W.permute(1, 0)   (a constant, in W's memory)
    s = rsqrt(var + eps)                    =>      S = (var + eps).rsqrt()
    y = mm(x, t) * s                                y = mm(x, C) * S

A call is computed if all it reads is known, and it always gives the same: nothing random, nothing that writes, no
operator of which we know nothing. (So weights that are decoded by the operators of quantised graphs stay encoded.) Of
what is known, only what somebody needs at run time is stored; it is not where

- it would take more memory than what it was computed from, times `MAX_GROWTH`: an expanded mask, a decoded weight;
- no constant went into it: `full` and `arange` are made quicker than loaded;
- an output shares its memory: the caller may write into it, and gets a new one from every call.

Then what it reads is stored, and the call stays. Values are eager's to the bit: the same calls on the same tensors.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ferrite.capture import on_real_tensors
from ferrite.errors import NotApplied, Refusal
from ferrite.graph import (
    fake_value,
    has_effect,
    is_known_operator,
    is_random,
    leaves,
    model_line,
    mutates,
    storage_bytes,
    storages_of,
)
from ferrite.passes.shared.constants import constant_of
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import VisibleMemory, difference

# Times the bytes of what a constant was computed from: not measured. Padding and joining stay below, a decoded weight
# and an expanded mask do not.
MAX_GROWTH = 1.5

Node = torch.fx.Node


@graph_pass(stage="freeze")
def constant_fold(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """What depends on constants alone is computed now."""
    return fold_constants(gm, context)


def fold_constants(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Fold once, all that can be; how many constants were made."""
    refused: set[Node] = set()
    while True:
        plan = FoldPlan(gm.graph, refused)
        try:
            values = plan.compute()
        except CannotFold as problem:
            refused.add(problem.node)  # an error is raised when the call runs, as in eager
            continue
        return store(gm, values, context)


class CannotFold(NotApplied):
    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(Refusal(reason, model_line(node)))
        self.node = node


class FoldPlan:
    """Which calls can be computed, and of which the result is needed."""

    def __init__(self, graph: torch.fx.Graph, refused: set[Node]) -> None:
        self.graph, self.refused = graph, refused
        self.visible = VisibleMemory(graph)
        self.sources: dict[Node, frozenset[Node]] = {}  # the constants that went into what is known
        for node in graph.nodes:
            if constant_of(node) is not None and node.op == "get_attr":
                self.sources[node] = frozenset((node,))
            elif self.can_compute(node):
                self.sources[node] = frozenset().union(*(self.sources[operand] for operand in node.all_input_nodes))
        self.needed = self.choose()

    def can_compute(self, node: Node) -> bool:
        if node.op != "call_function" or node in self.refused or node.meta.get("unbacked_bindings"):
            return False
        if not all(operand in self.sources for operand in node.all_input_nodes):
            return False
        if node.target is operator.getitem:
            return True
        if not is_known_operator(node) or has_effect(node) or is_random(node) or mutates(node):
            return False
        places = storages_of(node)
        seen = any(place in self.visible.readers for place in places)
        return not seen and self.visible.written.isdisjoint(places)

    def choose(self) -> list[Node]:
        """What is stored. From the last call to the first: one that is not stored needs what it reads."""
        found = []
        for node in reversed(self.graph.nodes):
            if node not in self.sources or node.op == "get_attr":
                continue
            if all(user in self.sources for user in node.users):
                continue  # read by what is known only, or by nobody
            if self.is_worth_it(node):
                found.append(node)
            else:
                del self.sources[node]
        return found[::-1]

    def is_worth_it(self, node: Node) -> bool:
        value, sources = fake_value(node), self.sources[node]
        if not isinstance(value, torch.Tensor) or not sources:
            return False
        shared = any(not storages_of(source).isdisjoint(storages_of(node)) for source in sources)
        return shared or bytes_of((node,)) <= MAX_GROWTH * bytes_of(sources)

    def compute(self) -> dict[Node, torch.Tensor]:
        """The needed values. Each value in between is let go after its last use."""
        wanted = self.with_operands(self.needed)
        last_use = {operand: node for node in wanted for operand in node.all_input_nodes}
        known: dict[Node, Any] = {}
        with on_real_tensors():
            for node in wanted:
                known[node] = constant_of(node) if node.op == "get_attr" else self.value(node, known)
                for operand in node.all_input_nodes:
                    if last_use[operand] is node and operand not in self.needed:
                        known.pop(operand, None)
            return {node: known[node].detach() for node in self.needed}

    def with_operands(self, needed: Iterable[Node]) -> list[Node]:
        """What has to be computed for some nodes, in the order of the graph."""
        wanted: set[Node] = set()
        waiting = list(needed)
        while waiting:
            node = waiting.pop()
            if node not in wanted:
                wanted.add(node)
                waiting += node.all_input_nodes
        return [node for node in self.graph.nodes if node in wanted]

    def value(self, node: Node, known: Mapping[Node, Any]) -> Any:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda operand: known[operand])
        try:
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception as problem:
            raise CannotFold(node, f"it fails: {problem}") from problem
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves(value)):
            raise CannotFold(node, "it has no numbers")
        if (unlike := difference(fake_value(node), value)) is not None:
            raise CannotFold(node, unlike)  # others were told of another layout
        return value


def bytes_of(nodes: Iterable[Node]) -> int:
    """The memory behind some constants or results of calls on constants; sizes are known there."""
    return sum(int(storage_bytes(fake_value(node))) for node in nodes)


def store(gm: torch.fx.GraphModule, values: Mapping[Node, torch.Tensor], context: PassContext) -> int:
    names = (f"_folded_{number}" for number in itertools.count())
    names = (name for name in names if not hasattr(gm, name))
    count = 0
    first = next((node for node in gm.graph.nodes if node.op != "placeholder"), None)
    for node, value in values.items():
        if not context.fuel.left:
            break
        name = next(names)
        gm.register_buffer(name, value, persistent=False)
        assert first is not None
        with gm.graph.inserting_before(first):
            constant = gm.graph.get_attr(name)
        constant.meta.update(node.meta)
        node.replace_all_uses_with(constant)
        context.fuel.spend()
        context.count("constant_fold")
        count += 1
    if count:
        drop_unused(gm)
    return count


def drop_unused(gm: torch.fx.GraphModule) -> int:
    """Erase calls and constants that nobody reads, and let go of the tensors; how many nodes."""
    erased = 0
    for node in reversed(gm.graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and not has_effect(node):
            gm.graph.erase_node(node)
            erased += 1
    read = {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}
    for name in [name for name in gm._buffers if name not in read]:
        delattr(gm, name)
    return erased


@graph_pass(stage="freeze", keeps_values=True)
def drop_unused_constants(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Constants that nobody reads any more are let go."""
    return drop_unused(gm)
