"""Keep the fake values of a graph true while passes edit it, without running the whole graph again.

The updater remembers, for each node, what was computed and from what. An update walks the nodes in order and runs those
that are new, were edited, or whose operands changed. Where the result says the same as before, the old value stays and
the users are left in peace: an edit costs what it changes, not what depends on it.

"The same" includes where a value lives: a view must stay a view of its operand's present storage. A fresh storage is as
good as the fresh storage it replaces.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable
from typing import Any

import torch

from ferrite.graph.autocast import autocast_at
from ferrite.graph.facts import bodies_of, body_of, fake_value, produces_value
from ferrite.graph.regions import mutates
from ferrite.graph.values import (
    AliasClass,
    MissingValue,
    alias_class,
    compute,
    fingerprint,
    fingerprint_of,
    mode_of,
    no_guards,
    parts_of_call,
    runs_on_values,
    same_form,
    same_metadata,
    same_sizes,
    sharing_of,
)

ABSENT = object()


class _Record:
    """A node as it was last seen: what it said, its value, and its operands' values.

    Most nodes are never edited, and most passes change nothing: what follows from these is worked out when asked for.
    """

    def __init__(self, node: torch.fx.Node) -> None:
        self.call = parts_of_call(node)
        self.value = node_value(node)
        self.operands = operand_values(node)

    @functools.cached_property
    def fingerprint(self) -> Hashable:
        return fingerprint_of(self.call)

    @functools.cached_property
    def aliases(self) -> AliasClass:
        """How the value shares memory with the operands'."""
        return sharing_of(self.operands, self.value) if self.value is not ABSENT else ()

    def still_says(self, node: torch.fx.Node) -> bool:
        call = parts_of_call(node)
        return all(map(operator.is_, self.call, call)) or self.fingerprint == fingerprint_of(call)


class BodyMismatch(ValueError):
    """A nested graph is called with values that it cannot have been traced for."""

    def __init__(self, message: str, node: torch.fx.Node) -> None:
        super().__init__(message)
        self.node = node


class MetadataUpdater:
    """Follows one graph, and the graphs nested in it. Build it while the values are true, update after edits."""

    def __init__(self, graph: torch.fx.Graph, mode: Any | None = None) -> None:
        self.graph = graph
        self.mode = mode or mode_of(graph)
        self.records: dict[torch.fx.Node, _Record] = {}
        self.bodies: dict[torch.fx.GraphModule, MetadataUpdater] = {}
        self.changed = False  # whether the last update changed anything that a caller of this graph can see
        self.corrected: set[torch.fx.Node] = set()  # since the last update
        for node in graph.nodes:
            self._remember(node)
            body = body_of(node)
            if body is not None and body not in self.bodies:
                self.bodies[body] = MetadataUpdater(body.graph, self.mode)

    def trust(self) -> None:
        """Take the values that stand on the nodes for true: an edit changed how calls are written, not what they do."""
        for node in self.graph.nodes:
            self._remember(node)

    def correct(self, node: torch.fx.Node, value: Any) -> None:
        """A value that the caller knows better than torch computes it: the next update tells its users."""
        node.meta["val"] = value
        self._remember(node)
        self.corrected.add(node)

    def update(self) -> int:
        """Make every value true again; how many nodes, nested ones included, got a value that is new or different.

        Operands must stand before their users. A node with an operand that has no value is left as it is.
        """
        self.mode = self.mode or mode_of(self.graph)
        if self.mode is None:
            return 0
        # A tensor remembers the symbol of its last nonzero() and the like. A node that takes another's place must bind
        # a symbol of its own, so what tensors remember is made to expire.
        self.mode.epoch += 1
        return self._update(self.mode)

    def _update(self, mode: Any) -> int:
        changed, self.corrected = self.corrected, set()
        seen: set[torch.fx.GraphModule] = set()  # a graph that several nodes call is updated for the first of them
        binders = self._binders()
        count = 0
        for node in self.graph.nodes:
            record = self.records.get(node)
            stale = self._edited(node) or any(operand in changed for operand in node.all_input_nodes)
            for body in bodies_of(node):
                inner = self._body(body, mode)
                if stale or inner.changed:
                    refresh_arguments(node, body, mode, body in seen)
                if body not in seen:
                    with autocast_at(node):
                        count += inner._update(mode)
                    seen.add(body)
                    if inner.changed:
                        body.recompile()  # running the caller runs the body's code
                stale = stale or inner.changed
            if not stale:
                continue
            if record is None and any(symbol in binders for symbol in node.meta.get("unbacked_bindings", ())):
                del node.meta["unbacked_bindings"]  # copied from a node that still binds these symbols
            if self._rerun(node, record, mode):
                changed.add(node)
                count += 1
            elif node.op == "output":
                changed.add(node)
        for inner in self.bodies.values():
            inner.changed = False
        self.changed = bool(changed)
        if len(self.records) > len(self.graph.nodes):
            alive = set(self.graph.nodes)
            self.records = {node: record for node, record in self.records.items() if node in alive}
        return count

    def _edited(self, node: torch.fx.Node) -> bool:
        record, value = self.records.get(node), node_value(node)
        if record is None or value is not record.value or not record.still_says(node):
            return True
        return value is ABSENT and runs_on_values(node) and produces_value(node)

    def _binders(self) -> set[Any]:
        """The unbacked symbols that the nodes known before this update bind."""
        recorded = (node for node in self.graph.nodes if node in self.records)
        return {symbol for node in recorded for symbol in node.meta.get("unbacked_bindings", ())}

    def _rerun(self, node: torch.fx.Node, record: _Record | None, mode: Any) -> bool:
        """Run one node; whether its users must know."""
        old = node_value(node)
        if node.op == "placeholder":
            self._remember(node)
            return record is None or old is not record.value
        if not produces_value(node) or not runs_on_values(node):
            self._remember(node)
            return False
        if record is not None and old is record.value and old is not ABSENT and says_the_same(node, record):
            self._remember(node)
            return False
        try:
            value, bindings = compute(node, mode)
        except MissingValue:
            self._remember(node)
            return False
        aliases = alias_class(node, value)
        # A value that a pass put there by itself may share a storage with the node it was copied from.
        trusted = record is not None and old is record.value and old is not ABSENT
        if trusted and record is not None and aliases == record.aliases and same_metadata(old, value):
            self._remember(node)
            return False
        node.meta["val"] = value
        node.meta.pop("unbacked_bindings", None)
        if bindings:
            node.meta["unbacked_bindings"] = bindings
        self._remember(node)
        return True

    def _remember(self, node: torch.fx.Node) -> None:
        self.records[node] = _Record(node)

    def _body(self, body: torch.fx.GraphModule, mode: Any) -> MetadataUpdater:
        if body not in self.bodies:
            self.bodies[body] = MetadataUpdater(body.graph, mode)
        return self.bodies[body]


def node_value(node: torch.fx.Node) -> Any:
    return node.meta.get("val", ABSENT)


def operand_values(node: torch.fx.Node) -> tuple[Any, ...]:
    return tuple(map(fake_value, node.all_input_nodes))


def says_the_same(node: torch.fx.Node, record: _Record) -> bool:
    """Whether a call computes what it did, though on other operands: they look the same, and the result is memory of
    its own. What is made of them looks the same then, too, and need not be computed to be known.

    A node that names sizes which data decides (`x[:n]`) keeps those names, where its tensors are the very same and its
    numbers equal: torch would find another name now that it knows more of n, but others have the old one.
    """
    fresh = all(isinstance(part, tuple) and part[0] == "fresh" for tensor in record.aliases for part in tensor)
    names = bool(node.meta.get("unbacked_bindings"))
    if not (fresh or names) or mutates(node) or node.op == "get_attr" or bodies_of(node):
        return False
    new = operand_values(node)
    if len(new) != len(record.operands) or not same_form(record.fingerprint, fingerprint(node)):
        return False
    return all(
        one is other or (not (names and isinstance(one, torch.Tensor)) and same_metadata(one, other))
        for one, other in zip(record.operands, new, strict=True)
    )


def refresh_arguments(caller: torch.fx.Node, body: torch.fx.GraphModule, mode: Any, fixed: bool) -> None:
    """Give a nested graph's inputs the strides of what its caller now passes; `fixed`: another call has done so.

    Each input gets a storage of its own: how the arguments share memory is the business of each call.
    """
    operands = passed_to_bodies(caller)
    inputs = [node for node in body.graph.nodes if node.op == "placeholder"]
    if operands is None or len(operands) != len(inputs):
        return
    for operand, placeholder in zip(operands, inputs, strict=True):
        new = operand.meta.get("val") if isinstance(operand, torch.fx.Node) else None
        old = placeholder.meta.get("val")
        if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
            continue
        if (new.dtype, new.device, new.dim()) != (old.dtype, old.device, old.dim()):
            raise BodyMismatch(
                f"{caller.name} passes {operand} to {placeholder.name}, which is of another kind", caller
            )
        # The sizes of a loop's arguments are symbols of the loop's own: nothing can be said about those.
        if same_sizes(old.stride(), new.stride()) or not same_sizes(old.shape, new.shape):
            continue
        if fixed:
            raise BodyMismatch(f"{caller.name} passes {operand} in another layout than an earlier call", caller)
        with mode, torch.no_grad(), no_guards(mode):
            value = torch.empty_strided(new.shape, new.stride(), dtype=new.dtype, device=new.device)
        placeholder.meta["val"] = value


def passed_to_bodies(caller: torch.fx.Node) -> list[Any] | None:
    """What a higher-order operator hands to its nested graphs unchanged; None for one that cuts or adds arguments."""
    name = str(getattr(caller.target, "__name__", ""))
    args: Any = caller.args
    if name == "cond" and len(args) == 4:
        return list(args[3])
    if name in ("while_loop", "while_loop_stack_output") and len(args) == 4:
        return [*args[2], *args[3]]
    if name == "invoke_subgraph":
        return list(args[2:])
    return None
