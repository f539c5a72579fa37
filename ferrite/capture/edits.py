"""What a stage of passes made of a graph, as plain data, and the same made of an equal graph without the passes.

    before = Before(gm)
    ...                                   the passes edit gm in place
    data = before.edits(gm)

    make(other, data)                     other had the same nodes: now it is what gm is

Nodes that stay are named by their places, so that they keep all that hangs on them: where an input comes from, lines of
the model. Nodes that were made have their metadata from one that was there, and are told which. What passes say to the
partitioner is written down.

Values that nodes stand for are not kept. In a joint graph those of nodes that were made, and others that are no longer
what they were, are computed again, which the passes did, too. In a graph of torch calls they are not even computed:
AOTAutograd does that. A few are read before, those of outputs and of calls that nobody reads; these are found again on
a node that had a value that looks the same.
"""

from __future__ import annotations

import functools
import itertools
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ferrite.capture.calls_as_data import CallDescriber, Data, at_path, place_in, rebuilt
from ferrite.capture.unused_random import dead_calls
from ferrite.errors import NotCached
from ferrite.graph import alias_class, compute, mode_of, note_for_another, same_metadata

VALUE = "example_value"
COMPUTED = "val"
LINE = "stack_trace"
# Metadata of nodes that nobody reads once the stage is over: values, and what passes note for each other.
LEFT_OUT = frozenset({VALUE, COMPUTED, "rewritten", "folded_from"})
# What passes say to the partitioner.
SAID = frozenset({"partitioner_tag", "recompute"})
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
        """A row for each node of the graph as it is now; None where nothing was changed. NotCached says why not."""
        nodes = list(gm.graph.nodes)
        self._check_ends(nodes)
        described, read = CallDescriber(nodes), values_read(gm.graph)
        rows = [self._row(node, described, node in read) for node in nodes]
        return None if rows == list(range(len(self.nodes))) else rows

    def _check_ends(self, nodes: Sequence[torch.fx.Node]) -> None:
        inputs, were = ([node for node in each if node.op == "placeholder"] for each in (nodes, self.nodes))
        if inputs != were or nodes[: len(inputs)] != inputs:
            raise NotCached("passes changed its inputs")
        if nodes[-1] is not self.nodes[-1]:
            raise NotCached("passes made another output")

    def _row(self, node: torch.fx.Node, described: CallDescriber, read: bool) -> Data:
        place = self.places.get(node)
        if place is None:
            return self._row_of_made(node, described, read)
        was = self.metadata[place]
        said = {key: value for key, value in node.meta.items() if key in SAID and was.get(key) is not value}
        if node.name != self.names[place] or not same_notes({**was, **said}, node.meta):
            raise NotCached(f"passes changed what is noted on {node.name}")
        row: dict[str, Data] = {"is": place}
        if (call := self._edited_call(node, place, described)) is not None:
            if node.op not in (*CALLS, "output"):
                raise NotCached(f"passes changed {node.name}, a {node.op}")
            row["call"] = call
        if said:
            row["said"] = described.value(said)
        if self._has_another_value(node, was):
            row["computed"] = True
        if not same_value(was.get(VALUE), node.meta.get(VALUE)):
            row["value"] = self._place_of_value(node) if read else None
        return row if len(row) > 1 else place

    def _row_of_made(self, node: torch.fx.Node, described: CallDescriber, read: bool) -> Data:
        if node.op not in CALLS:
            raise NotCached(f"passes made {node.name}, a {node.op}")
        row: dict[str, Data] = {
            "call": described.call(node.op, node.target, node.args, node.kwargs),
            "name": node.name,
        }
        noted = {key: value for key, value in node.meta.items() if key not in LEFT_OUT}
        row["like"] = self._origin(noted)
        if noted and row["like"] is None:
            unsaid = {key: value for key, value in noted.items() if key not in SAID}
            row["like"] = self._origin(unsaid)
            row["said"] = described.value({key: value for key, value in noted.items() if key in SAID})
            if unsaid and row["like"] is None:
                raise NotCached(f"nothing had the metadata of {node.name}")
        if self._has_another_value(node, {}):
            row["computed"] = True
        elif read:
            row["value"] = self._place_of_value(node)
        return row

    def _has_another_value(self, node: torch.fx.Node, was: Mapping[str, Any]) -> bool:
        """Whether a value has to be computed; NotCached where that would not give what the passes left."""
        value = node.meta.get(COMPUTED)
        if value is was.get(COMPUTED):
            return False
        found, bound = compute(node, mode_of(node.graph))
        if bound or not same_metadata(found, value) or alias_class(node, found) != alias_class(node, value):
            raise NotCached(f"the value of {node.name} is not what its call gives")
        return True

    def _edited_call(self, node: torch.fx.Node, place: int, described: CallDescriber) -> Data | None:
        """What a node calls now; None where that is what it called before."""
        now = (node.op, node.target, node.args, node.kwargs)
        if all(map(operator.is_, now, self.calls[place])):  # arguments are never changed in place
            return None
        call = described.call(*now)
        try:
            was = described.call(*self.calls[place])
        except NotCached:  # it had an operand that is gone
            return call
        return call if json.dumps(was) != json.dumps(call) else None  # as text: 1 and True are equal

    def _origin(self, noted: Mapping[str, Any]) -> Data:
        """The node that had such metadata, by place, and the keys of what a new one has from it; None if none had."""
        if not noted:
            return None
        for place in self._places_by_line.get(noted.get(LINE), ()):
            held = self.metadata[place]
            if all(key in held and same_note(held[key], value) for key, value in noted.items()):
                return [place, *noted]
        return None

    @functools.cached_property
    def _places_by_line(self) -> dict[Any, list[int]]:
        """The places of nodes from one line of the model; under None those of all."""
        found: dict[Any, list[int]] = {None: list(range(len(self.nodes)))}
        for place, held in enumerate(self.metadata):
            if held.get(LINE) is not None:
                found.setdefault(held[LINE], []).append(place)
        return found

    def _place_of_value(self, node: torch.fx.Node) -> int:
        value = node.meta.get(VALUE)
        for place, held in enumerate(self.metadata):
            if same_value(held.get(VALUE), value):
                return place
        raise NotCached(f"nothing had a value like that of {node.name}")


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
    edited: list[tuple[torch.fx.Node, Any, Any, Any, Any]] = []
    try:
        kept = [row for row in rows if type(row) is int]
        if kept and not 0 <= min(kept) <= max(kept) < len(old):
            raise NotCached("there are no such nodes")
        new = [old[row] if type(row) is int else _node_of(row, graph, old, made) for row in rows]
        changed = [(new[place], place, row) for place, row in enumerate(rows) if type(row) is not int]
        calls = [_call(node, new[:place], row["call"]) for node, place, row in changed if "call" in row]
        notes = [(node, _notes(row, old)) for node, _place, row in changed]
        _check_ends(old, new)
        edited = [(node, node.op, node.target, node.args, node.kwargs) for node, *_call_of in calls]
        _set_calls(calls)
        _check_order(old, new)
        values = _computed([node for node, _place, row in changed if row.get("computed")], mode_of(graph))
    except BaseException:
        _set_calls(edited)
        for node in reversed(made):
            graph.erase_node(node)
        raise
    for node, note in notes:
        node.meta.update(note)
    for node, value in values.items():
        node.meta[COMPUTED] = value
    _arrange(graph, old, new)
    gm.recompile()


def _node_of(
    row: Data, graph: torch.fx.Graph, old: Sequence[torch.fx.Node], made: list[torch.fx.Node]
) -> torch.fx.Node:
    """The node that a row is about; one that was not there is made behind all others, without operands."""
    if "is" in row:
        return old[place_in(old, row["is"])]
    node = graph.create_node("call_method", "", (), {}, row["name"])
    made.append(node)
    if node.name != row["name"]:  # what FX makes of a name that is taken, or that Python has no use for
        raise NotCached(f"{row['name']!r} cannot be the name of a node")
    like, *keys = row["like"] or (0,)
    node.meta = {key: note_for_another(old[place_in(old, like)].meta[key]) for key in keys}
    return node


def _notes(row: Data, old: Sequence[torch.fx.Node]) -> dict[str, Any]:
    """The metadata that a node gets."""
    notes = rebuilt(row["said"], ()) if "said" in row else {}
    if not SAID.issuperset(notes):
        raise NotCached("passes say nothing else to the partitioner")
    return {**notes, VALUE: _value_at(row["value"], old)} if "value" in row else notes


def _set_calls(calls: Sequence[tuple[torch.fx.Node, str, Any, Any, Any]]) -> None:
    for node, op, target, args, kwargs in calls:
        if node.target is not target:
            node.op, node.target = op, target
        node.args = args
        if kwargs or node.kwargs:
            node.kwargs = kwargs


def _computed(nodes: Sequence[torch.fx.Node], mode: Any) -> dict[torch.fx.Node, Any]:
    """The values of nodes, in order: one may be an operand of the next."""
    values: dict[torch.fx.Node, Any] = {}
    for node in nodes:
        values[node], bound = compute(node, mode, values)
        if bound:
            raise NotCached(f"the value of {node.name} is not what its call gives")
    return values


def _value_at(place: int | None, old: Sequence[torch.fx.Node]) -> Any:
    return None if place is None else old[place_in(old, place)].meta.get(VALUE)


def _call(node: torch.fx.Node, before: Sequence[torch.fx.Node], call: Data) -> tuple[torch.fx.Node, str, Any, Any, Any]:
    """`before`: operands stand before their users."""
    op, path, args, kwargs = call
    if op != "output" if node.op == "output" else op not in CALLS or node.op not in CALLS:
        raise NotCached(f"{node.name} cannot be a {op}")
    target = at_path(path) if op == "call_function" else path
    if not callable(target) if op == "call_function" else type(target) is not str:
        raise NotCached(f"{path!r} cannot be called")
    operands, settings = rebuilt(args, before), {} if kwargs is None else rebuilt(kwargs, before)
    if type(operands) is not tuple or type(settings) is not dict or not {str}.issuperset(map(type, settings)):
        raise NotCached(f"{node.name} has no arguments")
    return node, op, target, operands, settings


def _check_ends(old: Sequence[torch.fx.Node], new: Sequence[torch.fx.Node]) -> None:
    """NotCached, where a graph would have other inputs or outputs, or a node twice."""
    inputs = [node for node in old if node.op == "placeholder"]
    if len(set(new)) != len(new) or not new or new[-1] is not old[-1] or list(new[: len(inputs)]) != inputs:
        raise NotCached("it is not a graph")


def _check_order(old: Sequence[torch.fx.Node], new: Sequence[torch.fx.Node]) -> None:
    """NotCached, where a node would read one that is gone, or that stands behind it. Those with other calls read what
    stands before them; for the others it is enough that nodes keep their order."""
    stay = set(new)
    gone = [node for node in old if node not in stay]
    if any(user in stay for node in gone for user in node.users):
        raise NotCached("a node reads what is gone")
    was = set(old)
    if [node for node in old if node in stay] == [node for node in new if node in was]:
        return
    before = set[torch.fx.Node]()
    for node in new:
        if not before.issuperset(node.all_input_nodes):
            raise NotCached(f"{node.name} reads what is not there")
        before.add(node)


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
