"""Graphs as passes read them, as text: of two graphs with one text, passes make the same.

All that passes can read is in it: calls with every argument, names, since passes make new ones of them, what every
value looks like, contents of constants, what is known of symbols. Lines of the model are not. Of forward and backward
in one graph it is the text of a functional graph, with names, and with what is said to the partitioner.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from ferrite.cache.graph_text import PLAIN, READ, GraphText
from ferrite.capture import CallDescriber, torch_api, torch_operators
from ferrite.errors import NotCached
from ferrite.graph import PLACE, SYMBOLIC, attribute_of

# What only passes leave on nodes. They would find it.
OF_PASSES = frozenset({"val", "rewritten", "folded_from", PLACE})
NOTED = READ | OF_PASSES
VALUE = "example_value"


def captured_text(gm: torch.fx.GraphModule) -> dict[str, str]:
    """The components of a key that are about a graph of torch calls."""
    nodes = list(gm.graph.nodes)
    described, text = CallDescriber(nodes), GraphText()
    calls, values = [], []
    for node in nodes:
        call = described.call(node.op, node.target, node.args, node.kwargs)
        if not NOTED.isdisjoint(node.meta):
            call.append(noted(node, text, described))
        calls.append(call)
        value = node.meta.get(VALUE)
        if node.op == "placeholder":
            text.inputs.append(looks_of_input(node, value, text))
        elif node.op == "get_attr":
            text.attribute(constant(node))
        elif node.op == "call_module":
            raise NotCached(f"it calls the module {node.target}")
        else:
            text.operators.append(call[1])
            values.append(text.value(value))
    return {
        "operators": " ".join(text.operators),
        "declared": " ".join(declared(nodes, text)),
        "calls": json.dumps(calls),
        "names": " ".join([node.name for node in nodes]),
        "values": "\n".join(values),
        "constants": "; ".join(text.constants),
        "symbols": text.known_of_symbols(),
        **{f"input {place}": looks for place, looks in enumerate(text.inputs)},
    }


def joint_text(gm: torch.fx.GraphModule) -> dict[str, str]:
    """The same of a graph of forward and backward."""
    text = GraphText()
    text.add(gm)
    if text.bodies > 1:
        raise NotCached("it holds another graph, in which passes run, too")
    nodes = list(gm.graph.nodes)
    return {
        **text.components(),
        "names": " ".join([node.name for node in nodes]),
        "tags": " ".join([f"{node.meta.get('partitioner_tag')} {node.meta.get('recompute')}" for node in nodes]),
        **{f"input {place}": looks for place, looks in enumerate(text.inputs)},
    }


def looks_of_input(node: torch.fx.Node, value: Any, text: GraphText) -> str:
    if value is None:
        raise NotCached(f"nothing is known about its input {node.name}")
    if not torch_api.is_fake(value) and not isinstance(value, SYMBOLIC) and type(value) not in PLAIN:
        raise NotCached(f"its input {node.name} is a {type(value).__name__}, whose looks do not say all")
    parameter = " parameter" if isinstance(value, torch.nn.Parameter) else ""
    return text.value(value) + text.shared(value) + parameter


def constant(node: torch.fx.Node) -> torch.Tensor:
    attribute = attribute_of(node)
    if not isinstance(attribute, torch.Tensor):
        raise NotCached(f"it holds {node.target}, a {type(attribute).__name__}")
    return attribute


def noted(node: torch.fx.Node, text: GraphText, described: CallDescriber) -> str:
    if not OF_PASSES.isdisjoint(node.meta):
        raise NotCached("passes have been over it before")
    if node.meta.get("unbacked_bindings"):
        raise NotCached("data decides about sizes in it")
    return text.noted(node, described.places)


def declared(nodes: list[torch.fx.Node], text: GraphText) -> list[str]:
    """What operators say of themselves that are not torch's own."""
    called = dict.fromkeys(node.target for node in nodes if node.op == "call_function")
    chosen = (each for target in called for each in torch_operators.overloads(target))  # or to be chosen yet
    return [text.target(each) for each in dict.fromkeys(chosen) if torch_operators.is_operator(each)]
