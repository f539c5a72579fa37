"""Lower a captured graph to a program.

`walk` goes through its nodes, `apply` lowers each call, by the tables that `families` fills.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import CapturedGraph, torch_operators
from ferrite.ir import Expr, Index
from ferrite.ir.program import Program
from ferrite.lower import families
from ferrite.lower.builder import CPU, Builder, RandomThreads, no_threads
from ferrite.lower.probes import IN_EAGER, correct_forecasts
from ferrite.lower.walk import Walk
from ferrite.pipeline import Fuel

families.load()


@dataclass(frozen=True)
class LoweredProgram:
    """A program, and the objects that it names. `computed`: values by the node of the graph that they are of, as far as
    they are expressions: of several results each. `relations`: what is known of its sizes together, none of it
    negative: for whoever asks why a place is inside of a buffer."""

    program: Program
    objects: Mapping[str, Any]
    computed: Sequence[tuple[str, Expr]] = ()
    relations: Callable[[], tuple[Index, ...]] = tuple


def lower_graph(
    graph: CapturedGraph,
    kernels_on: Container[str] = CPU,
    random_threads: RandomThreads = no_threads,
    attention_on: Container[str] = (),
) -> LoweredProgram:
    """`kernels_on`: types of devices that kernels can be made for; on others every operator is a call.
    `random_threads`: of GPUs whose kernels can make eager's random numbers. `attention_on`: types of devices on which
    attention with functions of the user is a kernel."""
    about = graph.gm, graph.kind.value, graph.donated_inputs, graph.output_strides
    return lower_module(*about, kernels_on, random_threads, attention_on)


def call_instead(graph: torch.fx.Graph, reasons: Mapping[str, str]) -> bool:
    """From now on some nodes, by their names, are called in eager, and why. Views stay what they are: it is what they
    are views of that has to be computed. Whether that is news of any of them."""
    found = False
    for each in graph.nodes if reasons else ():
        if each.name not in reasons:
            continue
        node = each
        while is_view(node) and isinstance(node.args[0], torch.fx.Node):
            node = node.args[0]
        if IN_EAGER not in node.meta and torch_operators.is_operator(node.target) and not is_view(node):
            node.meta[IN_EAGER] = reasons[each.name]
            found = True
    return found


def call_without_fuel(graph: torch.fx.Graph, fuel: Fuel) -> None:
    """Operators are lowered as long as there is fuel, one unit each; the others are called in eager."""
    for node in graph.nodes:
        if torch_operators.is_operator(node.target) and not is_view(node) and IN_EAGER not in node.meta:
            if fuel.left:
                fuel.spend()
            else:
                node.meta[IN_EAGER] = "out of fuel"


def is_view(node: torch.fx.Node) -> bool:
    return torch_operators.is_operator(node.target) and torch_operators.is_view(node.target)


def lower_module(
    gm: torch.fx.GraphModule,
    name: str = "program",
    donated: frozenset[int] = frozenset(),
    output_strides: Sequence[Any] | None = None,
    kernels_on: Container[str] = CPU,
    random_threads: RandomThreads = no_threads,
    attention_on: Container[str] = (),
) -> LoweredProgram:
    correct_forecasts(gm)
    builder = Builder(gm.graph, kernels_on, random_threads=random_threads, attention_on=attention_on)
    program = Walk(gm, builder, donated, output_strides).run(name)
    return LoweredProgram(program, builder.objects, builder.computed, builder.sizes.relations)
