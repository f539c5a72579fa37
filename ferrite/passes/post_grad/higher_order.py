"""Write out the operators that torch made functional by copying what they mutate.

    r = auto_functionalized_v2(op, by=2.0, _x_base_index=0, _x_slice_dim=0, ..., _all_bases=[b])
    y = r[1]; z = y + 1
        =>
    c = clone(b)
    v = slice(c, 0, ...)
    op(x=v, by=2.0)
    z = c + 1

Where `reinplace_inplaceable_ops` noted that nobody needs an operand's old contents, its copy is left out. The operator
may be a higher-order one, whose graphs then write into what they are given. Loops over a dimension, `scan` and `map`,
become `while_loop`: see `ferrite.passes.post_grad.loops`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ferrite.capture import torch_operators
from ferrite.graph import (
    USER_KERNEL,
    MetadataUpdater,
    body_of,
    fake_value,
    innermost_first,
    keep_names,
    model_line,
    same_metadata,
    schema_of,
)
from ferrite.passes.post_grad.functional_calls import NEEDS_NO_COPY, Called, called
from ferrite.passes.post_grad.overwriting import storage_of
from ferrite.passes.post_grad.sizes import SizeWriter
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import INHERITED, Writer

aten = torch.ops.aten


@graph_pass(stage="post_grad")
def decompose_auto_functionalized(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Functionalised operators become clones, where needed, and the mutating operator."""
    encodings: dict[Any, Write] = {
        torch_operators.higher_order("auto_functionalized"): write_first_encoding,
        torch_operators.higher_order("auto_functionalized_v2"): write_second_encoding,
    }
    return sum(decompose(module, encodings, context) for module in innermost_first(gm))


@graph_pass(stage="post_grad")
def decompose_triton_kernel_wrapper_functional(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Functionalised Triton kernels become clones, where needed, and the kernel."""
    functional = torch_operators.higher_order("triton_kernel_wrapper_functional")
    return sum(decompose(module, {functional: write_triton}, context) for module in innermost_first(gm))


# By what each item of a node's value is replaced; a node in its place replaces the value as a whole.
Results = dict[Any, Any]
Write = Callable[[Called, "OperandCopies"], Results | torch.fx.Node]


def decompose(gm: torch.fx.GraphModule, encodings: Mapping[Any, Write], context: PassContext) -> int:
    graph = gm.graph
    found = [node for node in graph.nodes if called(node).operator in encodings]
    if not found:
        return 0
    updater = MetadataUpdater(graph)
    for node in found:
        call = called(node)
        copies = OperandCopies(node, updater.mode)
        with graph.inserting_before(node):
            results = encodings[call.operator](call, copies)
            if call.token is not None:
                results = behind_token(call, results, copies.writer)
        inherit(copies.writer.made, node, "decompose")
        keep_names(fake_value(node), torch.fx.node.map_arg(results, fake_value), copies.writer.made, updater.mode)
        if isinstance(results, torch.fx.Node):
            node.replace_all_uses_with(results)
        else:
            replace_items(node, results)
        graph.erase_node(node)
        context.fuel.spend()
        context.count(call.operator.name())
    drop_unused_attributes(gm)
    updater.update()
    drop_self_copies(graph)
    gm.recompile()
    return len(found)


def behind_token(call: Called, results: Results | torch.fx.Node, writer: Writer) -> Results:
    """The results of a call that had an effect token around it.

    An operator that writes stays where it stands, so that no token need keep it there; those who read the token get one
    that is as new as the old one was.
    """
    token = writer.call(aten.clone.default, call.token)
    if isinstance(results, torch.fx.Node) or not all(isinstance(key, int) for key in results):
        return {0: token, 1: results}
    return {0: token, **{key + 1: item for key, item in results.items()}}


def replace_items(node: torch.fx.Node, results: Results) -> None:
    for user in list(node.users):
        if user.target is not operator.getitem:
            raise ValueError(f"{user.name} reads {node.name} otherwise than item by item")
        new = results[user.args[1]]
        if isinstance(new, torch.fx.Node):
            user.replace_all_uses_with(new)
        else:  # None, or a list of the tensors that stand for a list
            replace_by_structure(user, new)
        node.graph.erase_node(user)


def replace_by_structure(old: torch.fx.Node, new: Any) -> None:
    for user in list(old.users):
        if user.target is operator.getitem and new is not None:
            user.replace_all_uses_with(new[user.args[1]])
            old.graph.erase_node(user)
        else:
            swap = lambda operand: new if operand is old else operand  # noqa: E731
            user.args = torch.fx.node.map_arg(user.args, swap)
            user.kwargs = torch.fx.node.map_arg(user.kwargs, swap)


class OperandCopies:
    """Copies the operands of one node, but for those that need none."""

    def __init__(self, node: torch.fx.Node, mode: Any) -> None:
        self.node = node
        self.writer = Writer(node.graph, mode)
        self.sizes = SizeWriter(self.writer, node)
        self.kept = node.meta.get(NEEDS_NO_COPY, frozenset())

    def of(self, key: Any, operand: Any) -> Any:
        """A copy of an operand, or of each in a list; itself if nobody needs its old contents."""
        if isinstance(operand, (list, tuple)):
            return [self.of(key, item) for item in operand]
        if key in self.kept or not isinstance(operand, torch.fx.Node):
            return operand
        value = fake_value(operand)
        clone = self.writer.call(aten.clone.default, operand)
        if same_metadata(fake_value(clone), value):
            return clone
        # Recipes for views count in strides and from the start of the memory: both must stay as they are.
        self.writer.made.remove(clone)
        operand.graph.erase_node(clone)
        size, stride, offset = value.shape, value.stride(), value.storage_offset()
        length = offset + 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
        call, nodes = self.writer.call, self.sizes.nodes
        whole = call(aten.as_strided.default, operand, nodes([length]), [1], 0)
        copied = call(aten.clone.default, whole)
        return call(aten.as_strided.default, copied, nodes(size), nodes(stride), self.sizes.node(offset))


def write_first_encoding(call: Called, copies: OperandCopies) -> Results:
    names = call.mutable_arguments
    arguments = {**call.kwargs, **{name: copies.of(name, call.kwargs[name]) for name in names}}
    return results_of(call, copies.writer, arguments, [arguments[name] for name in names])


def write_second_encoding(call: Called, copies: OperandCopies) -> Results | torch.fx.Node:
    names = call.mutable_arguments
    given: Any = call.kwargs
    arguments = {name: given[name] for name in given if not is_recipe(name, names)}
    if any(f"_{name}_dtype" in given for name in names):
        return write_destinations(call.wrapped, names, given, arguments, copies.writer)
    bases = [copies.of(position, base) for position, base in enumerate(given.get("_all_bases", ()))]
    for name in names:
        if f"_{name}_length" not in given:
            arguments[name] = view_of(bases, given, f"_{name}", copies.writer)
        elif (length := given[f"_{name}_length"]) is None:
            arguments[name] = None
        else:
            arguments[name] = [view_of(bases, given, f"_{name}_{i}", copies.writer) for i in range(length)]
    return results_of(call, copies.writer, arguments, bases)


def is_recipe(name: str, mutable: list[str]) -> bool:
    return (
        name in ("_all_bases", "_op_schema") or name in mutable or any(name.startswith(f"_{each}_") for each in mutable)
    )


def view_of(bases: list[Any], given: dict[str, Any], prefix: str, writer: Writer) -> Any:
    """An argument made again from its base, as the recipe under a prefix says."""
    position = given[f"{prefix}_base_index"]
    if position is None:
        return None
    base = bases[position]
    if f"{prefix}_alias" in given:
        return writer.call(aten.alias.default, base)
    if f"{prefix}_slice_dim" in given:
        cut = (given[f"{prefix}_slice_{what}"] for what in ("dim", "start", "end"))
        return writer.call(aten.slice.Tensor, base, *cut)
    if f"{prefix}_size" in given:
        look = (given[f"{prefix}_{what}"] for what in ("size", "stride", "storage_offset"))
        return writer.call(aten.as_strided.default, base, *look)
    return base


def write_destinations(
    target: Any, names: list[str], given: dict[str, Any], arguments: dict[str, Any], writer: Writer
) -> Results | torch.fx.Node:
    """An operator that writes its results into memory it is given: nobody else has that, so it is made here."""
    for name in names:
        size, stride, dtype, device = (given[f"_{name}_{what}"] for what in ("size", "stride", "dtype", "device"))
        arguments[name] = writer.call(aten.empty_strided.default, size, stride, dtype=dtype, device=device)
    call = writer.call(target, **arguments)
    count = len(schema_of(target).returns)  # type: ignore[union-attr]
    if count == 1:
        return call
    return {index: writer.call(operator.getitem, call, index) for index in range(count)}


def results_of(call: Called, writer: Writer, arguments: dict[str, Any], mutated: list[Any]) -> Results:
    """Call the operator: its own results, of which nothing counts as one, and behind them what it wrote into."""
    if call.is_higher_order:
        args, kwargs = torch_operators.bind(call.schema, arguments)
        made = writer.call(call.wrapped, *args, **kwargs)
        count = len(call.value) - len(mutated)
    else:
        made = writer.call(call.wrapped, **arguments)
        count = len(call.schema.returns)  # type: ignore[union-attr]
    own: list[Any] = [None if count == 0 else made]
    if count > 1 or call.is_higher_order:
        own = [writer.call(operator.getitem, made, index) for index in range(count)]
    return dict(enumerate([*own, *mutated]))


def write_triton(call: Called, copies: OperandCopies) -> Results:
    given: Any = call.kwargs
    tensors = {name: copies.of(name, given["kwargs"][name]) for name in given["tensors_to_clone"]}
    rest = {name: item for name, item in given.items() if name != "tensors_to_clone"}
    mutation = torch_operators.higher_order("triton_kernel_wrapper_mutation")
    made = copies.writer.call(mutation, **{**rest, "kwargs": {**given["kwargs"], **tensors}})
    if USER_KERNEL in copies.node.meta:
        made.meta[USER_KERNEL] = copies.node.meta[USER_KERNEL]
    if "eager_input_vals" in copies.node.meta:
        args, kwargs = copies.node.meta["eager_input_vals"]
        made.meta["eager_input_vals"] = (args, {n: v for n, v in kwargs.items() if n != "tensors_to_clone"})
    return tensors


# --- shared by the passes that write ----------------------------------------------------------------------------------


def inherit(made: list[torch.fx.Node], origin: torch.fx.Node, name: str) -> None:
    """Say of new nodes which line of the model they come from, and which pass made them."""
    line = model_line(origin)
    for node in made:
        for key in INHERITED:
            if key in origin.meta:
                node.meta.setdefault(key, origin.meta[key])
        node.meta["rewritten"] = (name, (str(line),) if line is not None else ())


def drop_unused_attributes(gm: torch.fx.GraphModule) -> None:
    """Erase reads of attributes that nobody uses; nested graphs that nobody names any more leave the module."""
    unused = [node for node in gm.graph.find_nodes(op="get_attr") if not node.users]
    graphs = {str(node.target) for node in unused if body_of(node) is not None}
    for node in unused:
        gm.graph.erase_node(node)
    for name in graphs - {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}:
        gm.delete_submodule(name)


def drop_self_copies(graph: torch.fx.Graph) -> None:
    """Erase each copy_ of memory onto itself: what it would write was written in place."""
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        target, source = node.args[0], node.args[1]
        old, new = fake_value(target), fake_value(source) if isinstance(source, torch.fx.Node) else None
        if not isinstance(new, torch.Tensor) or storage_of(old) != storage_of(new) or not same_metadata(old, new):
            continue
        if node.users and source is target:
            continue  # it costs nothing, and what it returns is not the input node: outputs stay who they were
        node.replace_all_uses_with(source)
        graph.erase_node(node)
