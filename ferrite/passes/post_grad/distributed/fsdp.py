"""Parameters that FSDP gathers into an input of the graph are read where they were gathered, and the input stays empty.

    resize_storage_bytes_(p, full); fsdp.copy_(p, y); z = use(p); resize_storage_bytes_(p, 0)     =>     z = use(y)

So graphs look that trace the hooks of FSDP: before each use the memory of the whole parameter is made, filled, and
given up again. Where layers are used several times, each use reads what was copied last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import NotApplied, warn_user
from ferrite.graph import Storage, argument, mutates, schema_of, storages_of
from ferrite.pipeline import PassContext, graph_pass

RESIZE = "inductor::resize_storage_bytes_"
COPY = "fsdp::copy_"


@graph_pass(stage="post_grad")
def remove_fsdp2_unsharded_param_graph_input_usage(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Parameters that FSDP copies into inputs are read from where they were gathered."""
    if copy_operator() is None or not gm.graph.find_nodes(op="call_function", target=copy_operator(), sort=False):
        return 0
    uses = Uses(gm.graph)
    return sum(uses.replace(parameter) for parameter in uses.copies if context.fuel.left)


def copy_operator() -> Any | None:
    """FSDP defines it, when it is imported."""
    return torch_api.find_operator("fsdp.copy_.default") if hasattr(torch.ops.fsdp, "copy_") else None


def calls(node: torch.fx.Node, name: str) -> bool:
    schema = schema_of(node.target)
    return schema is not None and schema.name == name


class Uses:
    """What happens to the inputs of a graph that are parameters: where they grow, are filled, and shrink."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        self.place: Mapping[torch.fx.Node, int] = {node: place for place, node in enumerate(graph.nodes)}
        self.copies: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        self.grows: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        self.shrinks: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        for node in graph.nodes:
            if calls(node, COPY):
                target = node.args[0]
                if not isinstance(target, torch.fx.Node) or target.op != "placeholder":
                    raise NotApplied(f"{node.name} copies a parameter into something that is no input")
                self.copies.setdefault(target, []).append(node)
            elif calls(node, RESIZE):
                of = node.args[0]
                if isinstance(of, torch.fx.Node) and of.op == "placeholder":
                    which = self.shrinks if argument(node, "new_size") == 0 else self.grows
                    which.setdefault(of, []).append(node)

    def replace(self, parameter: torch.fx.Node) -> int:
        copies, grows = self.copies[parameter], self.grows.get(parameter, [])
        shrinks = self.shrinks.get(parameter, [])
        pairs = list(zip(grows, shrinks, strict=False))
        if len(grows) != len(shrinks) or any(self.place[grow] > self.place[shrink] for grow, shrink in pairs):
            warn_user(
                f"the memory of {parameter.name} is made in one graph and given up in another: it is used as it is"
            )
            return 0
        mine = {*copies, *grows, *shrinks}
        aliases = storages_of(parameter)
        for node in self.graph.nodes:
            if node not in mine and mutates(node) and writes_into(node, aliases):
                raise NotApplied(f"{node.name} changes the parameter {parameter.name}, which FSDP owns")
        places = [self.place[copy] for copy in copies]
        for user in list(parameter.users):
            if user in mine or user.op == "output":
                continue
            before = [number for number, place in enumerate(places) if place < self.place[user]]
            if before:
                user.replace_input_with(parameter, copies[before[-1]].args[1])  # type: ignore[arg-type]
        for node in sorted(mine, key=self.place.__getitem__, reverse=True):
            if not node.users:
                self.graph.erase_node(node)
        return len(copies)


def writes_into(node: torch.fx.Node, storages: frozenset[Storage]) -> bool:
    """Whether a node writes into an operand that lives in one of these."""
    schema = schema_of(node.target)
    for position, parameter in enumerate(schema.arguments if schema is not None else ()):
        if parameter.alias_info is None or not parameter.alias_info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(parameter.name)
        if isinstance(value, torch.fx.Node) and not storages_of(value).isdisjoint(storages):
            return True
    return False
