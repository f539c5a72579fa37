"""Where gradients will flow in a graph that autograd has not seen yet.

Two questions. Does a value require a gradient? And does one reach it, from an output of the graph? A value that is
read only through `detach` requires one and gets none: whoever reads it stays without a gradient, not with zeros.

Dynamo's values know whether they require a gradient. Values that a rewrite computed do not; for these, and what reads
them, it is worked out from their operands.
"""

from __future__ import annotations

import torch

from ferrite.graph.aliases import Storage, storages_of
from ferrite.graph.facts import attribute_of, fake_value, leaves, schema_of
from ferrite.graph.regions import mutates

# Their results are numbers of their own, whatever their operand requires.
CUT = frozenset(
    {"detach", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"}
    | {"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"}
)


class GradientFlow:
    """`required` has the nodes whose values require a gradient, `reached` those of them that get one. Linear."""

    def __init__(self, graph: torch.fx.Graph, enabled: bool = True) -> None:
        self.required: set[torch.fx.Node] = set()
        self.reached: set[torch.fx.Node] = set()
        self._find_required(graph, enabled)
        for node in reversed(graph.nodes):
            if node in self.required and any(user.op == "output" or user in self.reached for user in node.users):
                self.reached.add(node)

    def _find_required(self, graph: torch.fx.Graph, enabled: bool) -> None:
        told_by_dynamo: set[torch.fx.Node] = set()  # Dynamo's word holds: nothing before them was rewritten
        written: set[Storage] = set()  # memory into which something that requires a gradient was written
        modes = [enabled]
        for node in graph.nodes:
            switch_mode(node, modes)
            told = "example_value" in node.meta and "rewritten" not in node.meta
            if told and all(operand in told_by_dynamo for operand in node.all_input_nodes):
                told_by_dynamo.add(node)
            needs = says_so(node)
            if not needs and node not in told_by_dynamo and modes[-1] and can_require(node):
                needs = any(operand in self.required for operand in node.all_input_nodes)
                needs = needs or not written.isdisjoint(storages_of(node))
            if needs:
                self.required.add(node)
                if mutates(node):
                    written.update(*(storages_of(operand) for operand in node.all_input_nodes))


def says_so(node: torch.fx.Node) -> bool:
    """Whether a node's own value says that it requires a gradient."""
    value = attribute_of(node) if node.op == "get_attr" else node.meta.get("example_value", fake_value(node))
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves(value))


def can_require(node: torch.fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    schema = schema_of(node.target)
    name = str(schema.name).rpartition("::")[2] if schema is not None else getattr(node.target, "__name__", node.target)
    values = [leaf for leaf in leaves(fake_value(node)) if isinstance(leaf, torch.Tensor)]
    return name not in CUT and any(value.is_floating_point() or value.is_complex() for value in values)


def switch_mode(node: torch.fx.Node, modes: list[bool]) -> None:
    """Follow the calls that switch gradients on and off."""
    name = getattr(node.target, "__name__", "")
    if name == "_set_grad_enabled":
        modes[-1] = bool(node.args[0])
    elif name == "_enter_inference_mode":
        modes.append(modes[-1] and not node.args[0])
    elif name == "_exit_inference_mode" and len(modes) > 1:
        modes.pop()
