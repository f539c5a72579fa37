"""Loops over the first dimension, `scan` and `map`, become `while_loop`.

    carry, ys = scan(step, [init], [xs], [extra])
        =>
    ys = empty_strided([n, ...])
    _, carry = while_loop(cond, body, (0, init), (ys, xs, extra, n))

    cond(i, ..., n):            i < n
    body(i, c, ys, xs, extra):  c, y = step(c, xs[i], extra);  ys[i] = y;  return i + 1, c

What is the same in every iteration, `xs` and the memory of the results included, is handed to the body, not carried
through it; the counter is a number of the host, so that no iteration waits for a device. A carry that the step hands
on unchanged is copied: after the loop it must share memory with nobody.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch

from ferrite.capture import torch_api, torch_operators
from ferrite.graph import (
    INDEX_INSIDE,
    body_of,
    compute,
    fake_value,
    innermost_first,
    leaves,
    mode_of,
    no_guards,
    produces_value,
    runs_on_values,
    storages_in,
)
from ferrite.passes.post_grad.higher_order import drop_unused_attributes, inherit, replace_items
from ferrite.passes.post_grad.sizes import SizeWriter
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import Writer

aten = torch.ops.aten


@graph_pass(stage="post_grad")
def decompose_scan_to_while_loop(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """A scan becomes a while_loop that writes each result into its place."""
    scan = torch_operators.higher_order("scan")
    return sum(decompose(module, scan, context) for module in innermost_first(gm))


@graph_pass(stage="post_grad")
def decompose_map_to_while_loop(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """A map becomes a while_loop that writes each result into its place."""
    return sum(decompose(module, torch_operators.higher_order("map_impl"), context) for module in innermost_first(gm))


def decompose(gm: torch.fx.GraphModule, target: Any, context: PassContext) -> int:
    mode = mode_of(gm.graph)
    found = gm.graph.find_nodes(op="call_function", target=target)
    for node in found:
        writer = Writer(gm.graph, mode)
        loop = StepLoop(gm, node, writer)
        with gm.graph.inserting_before(node):
            results = loop.write()
        inherit(writer.made, node, loop.name)
        replace_items(node, results)
        gm.graph.erase_node(node)
        context.fuel.spend()
        context.count(loop.name)
    if found:
        drop_unused_attributes(gm)
        gm.recompile()
    return len(found)


class StepLoop:
    """One loop on its way from a step graph to a while_loop."""

    def __init__(self, gm: torch.fx.GraphModule, node: torch.fx.Node, writer: Writer) -> None:
        step, *lists = node.args
        body = body_of(step) if isinstance(step, torch.fx.Node) else None
        if body is None or node.kwargs or len(lists) not in (2, 3):
            raise ValueError(f"{node.name} is no loop as torch writes them")
        self.gm, self.node, self.writer, self.step = gm, node, writer, body
        operands = [list(each) for each in lists if isinstance(each, (list, tuple))]
        self.init = operands[0] if len(operands) == 3 else []
        self.xs, self.extra = operands[-2:]
        if not self.xs:
            raise ValueError(f"{node.name} runs over nothing")
        self.name = f"decompose_{'scan' if len(operands) == 3 else 'map'}_to_while_loop"
        self.results = list(fake_value(node))
        self.sizes = SizeWriter(writer, node)
        self.mode = writer.fake_mode

    def write(self) -> dict[int, Any]:
        """The loop as nodes; by what each item of the old one's value is replaced."""
        carries, outputs = len(self.init), self.results[len(self.init) :]
        buffers = [self.buffer(output) for output in outputs]
        length = fake_value(self.xs[0]).shape[0]
        if torch_api.known_equal(length, 0):  # the body cannot be traced on an element that is not there
            kept = [self.writer.call(aten.clone.default, operand) for operand in self.init]
            return dict(enumerate([*kept, *buffers]))
        self.init = [self.lying_as(fake, each) for fake, each in zip(self.results[:carries], self.init, strict=True)]
        written = [buffer for buffer in buffers if buffer is not None]
        given = [*written, *self.xs, *self.extra, self.sizes.node(length)]
        cond, body = self.condition(given), self.body(given, written)
        names = [self.attach(graph, what) for graph, what in ((cond, "cond"), (body, "body"))]
        loop = self.writer.call(torch_operators.higher_order("while_loop"), *names, (0, *self.init), tuple(given))
        kept = [self.writer.call(operator.getitem, loop, 1 + position) for position in range(carries)]
        return dict(enumerate([*kept, *buffers]))

    def lying_as(self, result: Any, operand: Any) -> Any:
        """What is carried into the first step, with the strides that every step gives it: a gradient may be one number
        for all elements at first."""
        value = fake_value(operand) if isinstance(operand, torch.fx.Node) else None
        if not isinstance(value, torch.Tensor) or not isinstance(result, torch.Tensor):
            return operand
        if all(map(torch_api.known_equal, value.stride(), result.stride())):
            return operand
        return self.writer.call(aten.copy.default, self.buffer(result), operand)

    def buffer(self, value: Any) -> torch.fx.Node | None:
        """Memory for one result of all iterations, laid out as it was."""
        if value is None:
            return None
        sizes, strides = self.sizes.nodes(value.shape), self.sizes.nodes(value.stride())
        return self.writer.call(aten.empty_strided.default, sizes, strides, dtype=value.dtype, device=value.device)

    def attach(self, module: torch.fx.GraphModule, what: str) -> torch.fx.Node:
        """Make a graph part of the module, under a name that is free."""
        count = 0
        while hasattr(self.gm, name := f"{self.node.name}_{what}_{count}"):
            count += 1
        setattr(self.gm, name, module)
        return self.writer.graph.get_attr(name)

    def inputs(self, graph: torch.fx.Graph, given: Iterable[Any]) -> list[torch.fx.Node]:
        """Inputs for the counter, the carries and what does not change, with values of their own."""
        length = fake_value(self.xs[0]).shape[0]
        made = [graph.placeholder("index")]
        made[0].meta["val"] = torch_operators.index_below(self.mode.shape_env, length)
        for position, operand in enumerate([*self.init, *given]):
            made.append(graph.placeholder(f"arg{position}"))
            value = fake_value(operand) if isinstance(operand, torch.fx.Node) else operand
            made[-1].meta["val"] = self.fresh(value)
        return made

    def fresh(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with self.mode, torch.no_grad(), no_guards(self.mode):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    def condition(self, given: list[Any]) -> torch.fx.GraphModule:
        graph = torch.fx.Graph()
        index, *_, length = self.inputs(graph, given)
        below = graph.call_function(operator.lt, (index, length))
        graph.output(below)
        return self.with_values(graph)

    def body(self, given: list[Any], buffers: list[torch.fx.Node]) -> torch.fx.GraphModule:
        graph = torch.fx.Graph()
        index, *inputs, _ = self.inputs(graph, given)
        ends = [len(self.init), len(buffers), len(self.xs), len(self.extra)]
        carried, memory, elements, extra = (
            inputs[sum(ends[:position]) : sum(ends[: position + 1])] for position in range(len(ends))
        )
        current = [element_of(x, index) for x in elements]
        results = self.copy_step(graph, [*carried, *current, *extra])
        kept, outputs = results[: len(self.init)], [each for each in results[len(self.init) :] if each is not None]
        for place, output in zip(memory, outputs, strict=True):
            slot = element_of(place, index)
            graph.call_function(aten.copy_.default, (slot, output))
        following = graph.call_function(operator.add, (index, 1))
        graph.output((following, *kept))
        module = self.with_values(graph)
        self.separate(module)
        return module

    def copy_step(self, graph: torch.fx.Graph, arguments: list[torch.fx.Node]) -> list[Any]:
        """The nodes of the step on other inputs; what it returns, flat."""
        placeholders = [node for node in self.step.graph.nodes if node.op == "placeholder"]
        new = dict(zip(placeholders, arguments, strict=True))
        for node in self.step.graph.nodes:
            if node.op == "output":
                return list(leaves(torch.fx.node.map_arg(node.args[0], new.__getitem__)))
            if node.op != "placeholder":
                new[node] = graph.node_copy(node, new.__getitem__)
        raise ValueError(f"the step of {self.node.name} returns nothing")

    def with_values(self, graph: torch.fx.Graph) -> torch.fx.GraphModule:
        """A module around a graph, with a true value for each node."""
        module = torch.fx.GraphModule(self.step, graph)
        inherit([node for node in graph.nodes if "val" not in node.meta], self.node, self.name)
        for node in graph.nodes:
            self.set_value(node)
        return module

    def set_value(self, node: torch.fx.Node) -> None:
        if node.op in ("placeholder", "output") or not produces_value(node) or not runs_on_values(node):
            return
        node.meta["val"], bindings = compute(node, self.mode)
        node.meta.pop("unbacked_bindings", None)
        if bindings:
            node.meta["unbacked_bindings"] = bindings

    def separate(self, module: torch.fx.GraphModule) -> None:
        """Copy each carry that is, or shares memory with, an input, a constant or a carry before it."""
        output = module.graph.output_node()
        index, *carries = leaves(output.args[0])
        taken = {
            storage
            for node in module.graph.nodes
            if node.op in ("placeholder", "get_attr")
            for storage in storages_in(fake_value(node))
        }
        own: list[Any] = [index]
        for carry in carries:
            if isinstance(carry, torch.fx.Node) and not taken.isdisjoint(storages_in(fake_value(carry))):
                with module.graph.inserting_before(output):
                    carry = module.graph.call_function(aten.clone.default, (carry,))
                inherit([carry], self.node, self.name)
                self.set_value(carry)
            if isinstance(carry, torch.fx.Node):
                taken |= storages_in(fake_value(carry))
            own.append(carry)
        output.args = (tuple(own),)
        module.recompile()


def element_of(tensor: torch.fx.Node, index: torch.fx.Node) -> torch.fx.Node:
    """What one iteration takes of a tensor: there is such an element, as the loop ends where the tensor does."""
    node = tensor.graph.call_function(aten.select.int, (tensor, 0, index))
    node.meta[INDEX_INSIDE] = True
    return node
