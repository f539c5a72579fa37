"""The laws of a graph between two passes; one that is broken is a bug of the pass that ran last.

G1  operands stand before their users, inside containers and keywords too, and in the same graph
G2  every node that computes something has a fake value
G3  running a node on its operands' values gives the value it has (`deep` only: it runs every node on fakes)
G4  inputs keep their count; outputs keep count, shape, dtype and device, and strides where they were given
G5  inputs and outputs share memory as they did, and are one and the same value where they were
G6  no guard was added
G7  users and uses agree, names are unique, attributes exist

G1, G2, G3 and G7 hold for nested graphs as well. G4 to G6 compare with a snapshot taken before the pass.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.graph.aliases import Place, Sharing, returned, sharing_matrix
from ferrite.graph.autocast import autocast_at
from ferrite.graph.facts import body_of, describe_value, fake_value, produces_value
from ferrite.graph.values import (
    CannotRun,
    MissingValue,
    alias_class,
    compute,
    mode_of,
    runs_on_values,
    same_metadata,
    same_number,
    same_sizes,
)

MANY_DIVISORS = 720_720  # every number up to 16 is one


class InvalidGraph(Exception):
    """A law of `ferrite.graph.verify` is broken."""

    def __init__(self, law: str, message: str, node: torch.fx.Node | None = None) -> None:
        super().__init__(f"law {law}: {message}")
        self.law = law
        self.node = node


@dataclass(frozen=True)
class Snapshot:
    """What a pass must keep of a graph."""

    inputs: int
    outputs: tuple[Any, ...]
    strides: tuple[Sequence[int | torch.SymInt] | None, ...]
    sharing: Sharing
    guards: int

    @staticmethod
    def of(gm: torch.fx.GraphModule, strides: Sequence[Sequence[int | torch.SymInt] | None] | None = None) -> Snapshot:
        """The graph as it is now; `strides`: those that outputs must have, by position, None where they are free."""
        outputs = tuple(_value(output) for output in returned(gm.graph))
        wanted = tuple(strides) if strides is not None else (None,) * len(outputs)
        inputs = sum(node.op == "placeholder" for node in gm.graph.nodes)
        return Snapshot(inputs, outputs, wanted, sharing_matrix(gm.graph), count_guards(gm.graph))


def verify_graph(gm: torch.fx.GraphModule, before: Snapshot | None = None, *, deep: bool = False) -> None:
    """Raise InvalidGraph if a law is broken. Linear; `deep` adds one run of every node on fake values."""
    # Running nodes must not hide that a pass added guards, so these are counted first.
    guards = count_guards(gm.graph)
    _verify_nodes(gm, deep, mode_of(gm.graph) if deep else None)
    if before is None:
        return
    _verify_outputs(gm.graph, before)
    _verify_sharing(before.sharing, sharing_matrix(gm.graph))
    if guards > before.guards:
        raise InvalidGraph("G6", f"{guards - before.guards} guards were added")


def count_guards(graph: torch.fx.Graph) -> int:
    return guards_in(mode_of(graph))


def guards_in(mode: Any | None) -> int:
    return len(mode.shape_env.guards) if mode is not None and mode.shape_env is not None else 0


def _verify_nodes(gm: torch.fx.GraphModule, deep: bool, mode: Any | None) -> None:
    nodes = list(gm.graph.nodes)
    operands = {node: dict.fromkeys(node.all_input_nodes) for node in nodes}
    inside, defined = set(nodes), set[torch.fx.Node]()
    for node in nodes:
        for operand in operands[node]:
            if operand not in inside:
                raise InvalidGraph("G1", f"{node.name} uses {operand.name}, which is not in the graph", node)
            if operand not in defined:
                raise InvalidGraph("G1", f"{node.name} stands before its operand {operand.name}", node)
            if node not in operand.users:
                raise InvalidGraph("G7", f"{node.name} is not among the users of its operand {operand.name}", node)
        for user in node.users:
            if user not in inside or node not in operands[user]:
                raise InvalidGraph("G7", f"{user.name} is among the users of {node.name} but does not use it", node)
        defined.add(node)
    try:
        gm.graph.lint()
    except Exception as problem:
        raise InvalidGraph("G7", str(problem)) from problem
    bodies: dict[torch.fx.GraphModule, torch.fx.Node] = {}
    for node in nodes:
        body = body_of(node)
        if body is not None:
            bodies.setdefault(body, next(iter(node.users), node))
        elif produces_value(node) and "val" not in node.meta:
            raise InvalidGraph("G2", f"{node.name} = {node.target} has no fake value", node)
    for body, caller in bodies.items():
        with autocast_at(caller):
            _verify_nodes(body, deep, mode)
        if deep:
            body.recompile()  # its callers are run, which must not run code from before an edit
    if deep and mode is not None:
        for node in nodes:
            _verify_value(node, mode)


def _verify_value(node: torch.fx.Node, mode: Any) -> None:
    if node.op in ("placeholder", "output") or not produces_value(node) or not runs_on_values(node):
        return
    stored = fake_value(node)
    try:
        value, _ = compute(node, mode)
    except MissingValue:
        return
    except CannotRun as problem:
        raise InvalidGraph("G3", str(problem), node) from problem
    if not same_metadata(stored, value):
        raise InvalidGraph("G3", f"{node.name} has {_in_full(stored)}, but computes {_in_full(value)}", node)
    if node.op != "get_attr" and alias_class(node, stored) != alias_class(node, value):
        raise InvalidGraph("G3", f"{node.name} shares memory with its operands otherwise than it computes", node)


def _verify_outputs(graph: torch.fx.Graph, before: Snapshot) -> None:
    inputs = sum(node.op == "placeholder" for node in graph.nodes)
    outputs = returned(graph)
    if inputs != before.inputs:
        raise InvalidGraph("G4", f"{inputs} inputs where there were {before.inputs}")
    if len(outputs) != len(before.outputs):
        raise InvalidGraph("G4", f"{len(outputs)} outputs where there were {len(before.outputs)}")
    for position, (output, old) in enumerate(zip(outputs, before.outputs, strict=True)):
        node = output if isinstance(output, torch.fx.Node) else None
        new, wanted = _value(output), before.strides[position]
        if not _same_outside(old, new):
            message = f"output {position} is {describe_value(new)}, was {describe_value(old)}"
            raise InvalidGraph("G4", message, node)
        if wanted is not None and isinstance(new, torch.Tensor) and not same_sizes(wanted, new.stride()):
            message = f"output {position} has strides {tuple(new.stride())} where {tuple(wanted)} are wanted"
            raise InvalidGraph("G4", message, node)


def _same_outside(old: Any, new: Any) -> bool:
    if isinstance(old, torch.Tensor):
        if not isinstance(new, torch.Tensor):
            return False
        kind = (old.dtype, old.device, old.layout) == (new.dtype, new.device, new.layout)
        return kind and len(old.shape) == len(new.shape) and all(map(_same_size, old.shape, new.shape))
    if isinstance(old, (int, torch.SymInt)) and isinstance(new, (int, torch.SymInt)):
        return _same_size(old, new)
    return same_metadata(old, new)


def _same_size(old: Any, new: Any) -> bool:
    """`x.view(2, -1, 4)` of other sizes, whose product is the same, has a size that torch writes otherwise. That both
    are equal may follow from what is divided without a rest, so they are tried with numbers of many divisors."""
    if same_number(old, new):
        return True
    expressions = [each.node.expr for each in (old, new) if isinstance(each, torch.SymInt)]
    if len(expressions) < 2:
        return False
    symbols = sorted(set().union(*(each.free_symbols for each in expressions)), key=str)
    for first in (11, 13):  # another prime for each symbol: what is only equal for equal symbols is not the same
        values = {symbol: MANY_DIVISORS * prime for symbol, prime in zip(symbols, _primes(first), strict=False)}
        one, other = (each.xreplace(values) for each in expressions)
        if one != other:
            return False
    return True


def _primes(first: int) -> Iterator[int]:
    return (each for each in itertools.count(first) if all(each % less for less in range(2, math.isqrt(each) + 1)))


def _verify_sharing(old: Sharing, new: Sharing) -> None:
    for what, before, after in (("share memory", old.storage, new.storage), ("are one", old.identity, new.identity)):
        for groups, verb in ((after - before, "now"), (before - after, "no longer all")):
            for group in groups:
                raise InvalidGraph("G5", f"{_name_places(group)} {verb} {what}")


def _name_places(group: frozenset[Place]) -> str:
    return ", ".join(f"{'input' if side == 'in' else 'output'} {position}" for side, position in sorted(group))


def _value(output: Any) -> Any:
    return fake_value(output) if isinstance(output, torch.fx.Node) else output


def _in_full(value: Any) -> str:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return describe_value(value)
    return f"{describe_value(value)} with strides {tuple(value.stride())} from {value.storage_offset()}"
