"""The walk over the nodes of a graph, in order, each by its row in the tables.

Order is the meaning, so calls, writes and effects are added as their nodes come. Everything else stays pending until
something needs it in memory: a call, an output, a write to what it reads, or the rule in `materialise`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ferrite.capture import size_facts, torch_operators
from ferrite.errors import NotLowered
from ferrite.graph import apart_in_memory, fake_value, model_line, storages_of
from ferrite.ir.program import Input, Origin, Output, Program
from ferrite.lower.allocate import with_allocations
from ferrite.lower.apply import apply
from ferrite.lower.builder import Builder
from ferrite.lower.calls import flat
from ferrite.lower.dead import live_operations
from ferrite.lower.device_operands import with_operands_beside
from ferrite.lower.inputs import attribute, bind_rest, new_input
from ferrite.lower.materialise import returned_nodes, uses_of, worth_keeping
from ferrite.lower.memory import copied, dense_strides, strides_in_storage
from ferrite.lower.outputs import body_outputs, program_outputs
from ferrite.lower.scalars import computed_size, number_of
from ferrite.lower.value import Value


class LoweringFailure(Exception):
    """Lowering one node failed; the cause is the original exception."""

    def __init__(self, node: torch.fx.Node) -> None:
        super().__init__(f"lowering {node.format_node()}")
        self.node = node


class Walk:
    """One graph being lowered: the builder of its program, and what each node became. `is_body`: another graph runs
    this one."""

    def __init__(
        self,
        gm: torch.fx.GraphModule,
        builder: Builder,
        donated: frozenset[int] = frozenset(),
        output_strides: Sequence[Any] | None = None,
        is_body: bool = False,
    ) -> None:
        self.gm, self.builder, self.is_body = gm, builder, is_body
        self.donated, self.output_strides = apart_in_memory(gm.graph, donated), output_strides
        self.values: dict[torch.fx.Node, Any] = {}
        self.inputs: list[Input] = []
        self.outputs: tuple[Output, ...] = ()
        self.uses, self.returned = uses_of(gm.graph), returned_nodes(gm.graph)
        if builder.sizes.computed is None:
            builder.sizes.computed = partial(computed_size, builder)

    def run(self, name: str) -> Program:
        builder = self.builder
        for position, node in enumerate(list(self.gm.graph.nodes)):
            builder.position, builder.node, builder.origin = position, node, Origin((node.name,), model_line(node))
            builder.assumes_sizes = size_facts.assumes_sizes(node)
            try:
                self.take(node)
            except (NotLowered, LoweringFailure):  # for what runs this graph as a part of itself
                raise
            except Exception as failure:
                raise LoweringFailure(node) from failure
        buffers, operations = tuple(builder.buffers.values()), tuple(builder.operations)
        program = Program(name, tuple(self.inputs), buffers, operations, self.outputs)
        return with_allocations(with_operands_beside(live_operations(program)))

    def take(self, node: torch.fx.Node) -> None:
        match node.op:
            case "placeholder":
                received, self.values[node] = new_input(self.builder, node, len(self.inputs) in self.donated)
                self.inputs.append(received)
                if node.next.op != "placeholder" and not self.is_body:
                    bind_rest(self.builder, self.values)
            case "get_attr":
                self.values[node] = attribute(self.builder, self.gm, node)
            case "call_function":
                self.values[node] = self.lower_node(node)
            case "output":
                self.outputs = self.outputs_of(node)
            case _:
                raise ValueError(f"a captured graph has no {node.op} nodes")

    def value_of(self, node: torch.fx.Node) -> Any:
        return self.values[node]

    def lower_node(self, node: torch.fx.Node) -> Any:
        args: Any
        kwargs: Any
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.value_of)
        out = fake_value(node)
        if node.target is operator.getitem and isinstance(args[0], (tuple, list)):
            source = node.args[0]
            return self.settle(node, args[0][args[1]], source if isinstance(source, torch.fx.Node) else node)
        if not torch_operators.is_operator(node.target) and not torch_operators.is_higher_order(node.target):
            return number_of(self.builder, node.target, args, kwargs, out)
        return self.settle(node, apply(self.builder, node.target, args, kwargs, out))

    def settle(self, node: torch.fx.Node, value: Any, made_by: torch.fx.Node | None = None) -> Any:
        """Decide whether a node's value goes to memory now. What is returned does, so that what it reads can go, unless
        it is returned as a view of that. `made_by`: what several results are of, where the node takes one of them."""
        if isinstance(value, Value) and value.box.expr is not None:
            self.builder.computed.append(((made_by or node).name, value.box.expr))
            is_new = bool(value.box.expr.loads) and value.box.bits_on is None
            leaves = is_new and any(user.op == "output" for user in node.users)
            if leaves or worth_keeping(value.box, self.uses[node]):
                self.builder.realise(value.box)
            self.builder.since_call.settled(node, value.box)
        elif isinstance(value, Value) and self.leaves_as_copy(node, value):
            fake = fake_value(node)
            value = copied(self.builder, value, dense_strides(self.builder, fake))
        return value

    def leaves_as_copy(self, node: torch.fx.Node, value: Value) -> bool:
        """Whether a value that is read out of memory, as by a `reshape` that no strides can say, is returned, itself or
        as a view. It is copied for that anyway: now, so that who reads it too reads the copy, and what it is a part of
        can go."""
        fake = fake_value(node)
        if not isinstance(fake, torch.Tensor) or node not in self.returned:
            return False
        own = storages_of(node)
        if not own or any(own & storages_of(operand) for operand in node.all_input_nodes):
            return False
        source = self.builder.buffers[self.builder.realise(value.box)]
        can_go = self.builder.buffers[source.storage].kind in ("owned", "donated")
        return can_go and strides_in_storage(self.builder, value) is None

    def outputs_of(self, node: torch.fx.Node) -> tuple[Output, ...]:
        results = flat(node.args[0]) if self.is_body else node.args[0]
        assert isinstance(results, (tuple, list))
        make = body_outputs if self.is_body else program_outputs
        return make(self.builder, self.values, results, self.output_strides or [None] * len(results))
