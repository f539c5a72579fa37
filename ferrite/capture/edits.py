"""What a stage of passes made of a graph, as plain data, and the same made of an equal graph without the passes.

    before = Before(gm)
    ...                                   the passes edit gm in place
    data = before.edits(gm)

    make(other, data)                     other had the same nodes: now it is what gm is

Nodes that stay are named by their places, so that they keep all that hangs on them: where an input comes from, lines of
the model. Nodes that were made have their metadata from one that was there, and are told which. Values that nodes stand
for are not kept: AOTAutograd computes its own. A few are read before that, those of outputs and of calls that nobody
reads; these are found again on a node that had a value that looks the same.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Sequence
from typing import Any

import torch

from ferrite.capture.as_data import Data, Described, NoData, at_path, rebuilt
from ferrite.capture.unused_random import dead_calls
from ferrite.graph.values import same_metadata

VALUE = "example_value"
# Metadata of nodes that nobody reads once the stage is over: values, and what passes note for each other.
LEFT_OUT = frozenset({VALUE, "val", "rewritten", "folded_from"})
CALLS = ("call_function", "call_method")


class Before:
    """A graph as it was before a stage. Holds what its nodes were: passes edit them in place."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self.nodes = list(gm.graph.nodes)
        self.places = {node: place for place, node in enumerate(self.nodes)}
        self.calls = [(node.op, node.target, node.args, node.kwargs) for node in self.nodes]
        self.names = [node.name for node in self.nodes]
        self.metadata = [dict(node.meta) for node in self.nodes]

    def edits(self, gm: torch.fx.GraphModule) -> list[Data] | None:
        """A row for each node of the graph as it is now; None where nothing was changed. NoData says why not."""
        nodes = list(gm.graph.nodes)
        self._check_ends(nodes)
        described, read = Described(nodes), values_read(gm.graph)
        rows = [self._row(node, described, node in read) for node in nodes]
        return None if rows == list(range(len(self.nodes))) else rows

    def _check_ends(self, nodes: Sequence[torch.fx.Node]) -> None:
        inputs, were = ([node for node in each if node.op == "placeholder"] for each in (nodes, self.nodes))
        if inputs != were or nodes[: len(inputs)] != inputs:
            raise NoData("passes changed its inputs")
        if nodes[-1] is not self.nodes[-1]:
            raise NoData("passes made another output")

    def _row(self, node: torch.fx.Node, described: Described, read: bool) -> Data:
        place = self.places.get(node)
        call = described.call(node.op, node.target, node.args, node.kwargs)
        if place is None:
            if node.op not in CALLS:
                raise NoData(f"passes made {node.name}, a {node.op}")
            made = {"call": call, "name": node.name, "like": self._origin(node)}
            return {**made, "value": self._place_of_value(node)} if read else made
        if node.name != self.names[place] or not same_notes(self.metadata[place], node.meta):
            raise NoData(f"passes changed what is noted on {node.name}")
        row: dict[str, Data] = {"is": place}
        if self._was_edited(place, call, described):
            if node.op not in (*CALLS, "output"):
                raise NoData(f"passes changed {node.name}, a {node.op}")
            row["call"] = call
        if not same_value(self.metadata[place].get(VALUE), node.meta.get(VALUE)):
            row["value"] = self._place_of_value(node) if read else None
        return row if len(row) > 1 else place

    def _was_edited(self, place: int, call: list[Data], described: Described) -> bool:
        try:
            was = described.call(*self.calls[place])
        except NoData:  # it had an operand that is gone
            return True
        return json.dumps(was) != json.dumps(call)  # as text: 1 and True are equal

    def _origin(self, node: torch.fx.Node) -> Data:
        """The node whose metadata a new one has, by place, and the keys of what it has from it."""
        noted = {key: value for key, value in node.meta.items() if key not in LEFT_OUT}
        if not noted:
            return None
        for place, held in enumerate(self.metadata):
            if all(key in held and same_note(held[key], value) for key, value in noted.items()):
                return [place, *noted]
        raise NoData(f"nothing had the metadata of {node.name}")

    def _place_of_value(self, node: torch.fx.Node) -> int:
        value = node.meta.get(VALUE)
        for place, held in enumerate(self.metadata):
            if same_value(held.get(VALUE), value):
                return place
        raise NoData(f"nothing had a value like that of {node.name}")


def values_read(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Nodes whose values are looked at between this stage and AOTAutograd: outputs, and calls that nobody reads, which
    are tried out where they may draw random numbers."""
    dead = dead_calls(graph)
    return {
        *graph.output_node().all_input_nodes,
        *dead,
        *(operand for node in dead for operand in node.all_input_nodes),
    }


def same_value(first: Any, second: Any) -> bool:
    return first is second or same_metadata(first, second)


def same_notes(first: dict[str, Any], second: dict[str, Any]) -> bool:
    keys = (first.keys() | second.keys()) - LEFT_OUT
    return all(key in first and key in second and same_note(first[key], second[key]) for key in keys)


def same_note(first: Any, second: Any) -> bool:
    """Passes hand on copies."""
    return first is second or (
        type(first) is type(second) and type(first) in (str, int, list, dict) and first == second
    )


def make(gm: torch.fx.GraphModule, rows: Sequence[Data] | None) -> None:
    """Make of a graph what a stage made of its equal, in place. Where rows make no sense the graph stays as it was."""
    if rows is None:
        return
    graph, made = gm.graph, list[torch.fx.Node]()
    old = list(graph.nodes)
    try:
        new = [old[row] if type(row) is int else _node_of(row, graph, old, made) for row in rows]
        changed = [(place, row) for place, row in enumerate(rows) if type(row) is not int]
        calls = [_call(place, row["call"], new) for place, row in changed if "call" in row]
        values = [(new[place], _value_at(row["value"], old)) for place, row in changed if "value" in row]
        if len(set(new)) != len(new) or new[-1] is not old[-1]:
            raise NoData("it is not a graph")
    except BaseException:
        for node in reversed(made):
            graph.erase_node(node)
        raise
    for node, op, target, args, kwargs in calls:
        node.op, node.target, node.args, node.kwargs = op, target, args, kwargs
    for node, value in values:
        node.meta[VALUE] = value
    _arrange(graph, old, new)
    gm.recompile()


def _node_of(
    row: Data, graph: torch.fx.Graph, old: Sequence[torch.fx.Node], made: list[torch.fx.Node]
) -> torch.fx.Node:
    """The node that a row is about; one that was not there is made behind all others, without operands."""
    if "is" in row:
        place: int = row["is"]
        return old[place]
    node = graph.create_node("call_method", "", (), {}, row["name"])
    made.append(node)
    node.name = row["name"]
    like, *keys = row["like"] or (0,)
    node.meta = {key: copy.copy(old[like].meta[key]) for key in keys}
    return node


def _value_at(place: int | None, old: Sequence[torch.fx.Node]) -> Any:
    return None if place is None else old[place].meta.get(VALUE)


def _call(place: int, call: Data, new: Sequence[torch.fx.Node]) -> tuple[torch.fx.Node, str, Any, Any, Any]:
    op, path, args, kwargs = call
    before = new[:place]  # operands stand before their users
    target = at_path(path) if op == "call_function" else path
    return new[place], op, target, rebuilt(args, before), {} if kwargs is None else rebuilt(kwargs, before)


def _arrange(graph: torch.fx.Graph, old: Sequence[torch.fx.Node], new: Sequence[torch.fx.Node]) -> None:
    """Take out nodes that are no more, and put the others into their order."""
    stay = set(new)
    for node in reversed(old):
        if node not in stay:
            graph.erase_node(node)
    first = next(iter(graph.nodes))
    if first is not new[0]:
        first.prepend(new[0])
    for before, node in itertools.pairwise(new):
        if before.next is not node:
            before.append(node)
