"""Fake values for graphs as Dynamo, or symbolic tracing, hands them over; and away again afterwards.

Dynamo leaves `example_value` on its nodes. A graph without is run on fake copies of the example inputs, node by node:
the inputs themselves are never run on, nor written to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import UserError
from ferrite.graph import (
    Storage,
    attribute_of,
    body_of,
    called_name,
    compute,
    fake_value,
    is_barrier,
    is_random,
    mode_of,
    mutates,
    no_guards,
    note_autocast,
    produces_value,
    same_metadata,
    same_number,
    same_sizes,
    storages_of,
)
from ferrite.passes.pre_grad.names import DTYPE_METHODS

# What may return its operand itself.
RETURNING_OPERAND = frozenset(
    {*DTYPE_METHODS, "to", "type", "type_as", "cpu", "contiguous", "flatten", "ravel"}
    | {"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d"}
)
EXPANDING = frozenset({"expand", "expand_as", "broadcast_to"})


def add_values(gm: torch.fx.GraphModule, example_inputs: Sequence[Any] = ()) -> None:
    """Give every node of a graph, and of the graphs inside it, a value under `val`."""
    for module in every_graph(gm):
        note_autocast(module)
        for node in module.graph.nodes:
            if "val" not in node.meta and "example_value" in node.meta:
                node.meta["val"] = node.meta["example_value"]
            elif "val" not in node.meta and node.op == "call_function" and is_barrier(node):
                node.meta["val"] = None  # it switches a mode, or may: never run here
            elif "val" not in node.meta and node.op == "placeholder" and module is not gm:
                node.meta["val"] = None  # an argument that a nested graph does not read
    mode = mode_of(gm.graph) or torch_api.fake_mode_for(example_inputs)
    inputs = iter(example_inputs)
    for node in gm.graph.nodes:
        example = next(inputs, None) if node.op == "placeholder" else None
        if "val" not in node.meta and produces_value(node):
            node.meta["val"] = value_of(gm, node, example, mode)
    for module in every_graph(gm):
        correct_values(module.graph, mode)


def correct_values(graph: torch.fx.Graph, mode: Any) -> None:
    """Values as eager has them, where Dynamo's are others.

    Where an operation returns its operand itself, Dynamo gives its result a copy: `x.to(x.dtype)`, `x.contiguous()`,
    dropout in eval mode. An expansion has other strides along dimensions of one: 0 in eager for `x.sum().expand(1)`, 1
    in Dynamo's value. Views of either are computed again.
    """
    changed: set[Storage] = set()
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or "val" not in node.meta:
            continue
        operand = node.args[0] if node.args else node.kwargs.get("input")
        if returns_operand(node, operand):
            changed |= storages_of(node)
            same = operand.meta["val"]
            node.meta["val"] = same.detach().requires_grad_(same.requires_grad)
        elif changed and not changed.isdisjoint(storages_of(node)):
            node.meta["val"], _ = compute(node, mode)
        if (strides := strides_of_expansion(node, operand)) is not None:
            value = fake_value(node)
            changed |= storages_of(node)
            with mode, torch.no_grad(), no_guards(mode):
                laid_out = value.as_strided(value.shape, strides, value.storage_offset())
            node.meta["val"] = laid_out.detach().requires_grad_(value.requires_grad)


def strides_of_expansion(node: torch.fx.Node, operand: Any) -> tuple[Any, ...] | None:
    """The strides that eager gives a tensor that is expanded, where its value has others; None for anything else."""
    if name_of(node) not in EXPANDING or not isinstance(operand, torch.fx.Node):
        return None
    value, source = fake_value(node), fake_value(operand)
    if not all(isinstance(each, torch.Tensor) and each.layout is torch.strided for each in (value, source)):
        return None
    strides: list[Any] = []  # the innermost first
    for place in range(1, value.ndim + 1):
        size = value.shape[-place]
        if not source.ndim:
            strides.append(0)
        elif place <= source.ndim:
            strides.append(source.stride()[-place] if same_number(source.shape[-place], size) else 0)
        else:  # a new dimension lies around the one before
            strides.append(strides[-1] * value.shape[1 - place] if same_number(size, 1) else 0)
    found = tuple(reversed(strides))
    return None if same_sizes(found, value.stride()) else found


def name_of(node: torch.fx.Node) -> str:
    """The name of what a node calls, without the overload: 'to' for `aten.to.dtype`, too."""
    return called_name(node).partition(".")[0]


def returns_operand(node: torch.fx.Node, operand: Any) -> bool:
    name = name_of(node)
    if name not in RETURNING_OPERAND or not isinstance(operand, torch.fx.Node) or is_random(node) or mutates(node):
        return False
    mine, theirs = fake_value(node), fake_value(operand)
    both = isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor)
    copied = name in DTYPE_METHODS or name == "to"
    asked = copied and (node.kwargs.get("copy") or any(argument is True for argument in node.args[1:]))
    return both and not asked and same_metadata(mine, theirs) and storages_of(node) != storages_of(operand)


def value_of(gm: torch.fx.GraphModule, node: torch.fx.Node, example: Any, mode: Any) -> Any:
    if node.op == "placeholder":
        if example is None and not node.args:
            raise UserError(
                f"the graph's input {node.name!r} has no metadata",
                {"to change that": "pass example inputs: ferrite.passes.pre_grad_passes(gm, example_inputs)"},
            )
        return mode.from_tensor(example, static_shapes=True) if isinstance(example, torch.Tensor) else example
    if node.op == "call_module":
        return module_value(gm.get_submodule(str(node.target)), node, mode)
    if node.op == "get_attr" and not isinstance(attribute_of(node), torch.Tensor):
        return attribute_of(node)
    return compute(node, mode)[0]


def module_value(module: torch.nn.Module, node: torch.fx.Node, mode: Any) -> Any:
    """What a module makes of fake values, with fake copies of its own tensors."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    state = {name: mode.from_tensor(tensor, static_shapes=True) for name, tensor in tensors}
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), fake_value)
    with mode, torch.no_grad():
        return torch.func.functional_call(module, state, args, kwargs)


def values_to_examples(gm: torch.fx.GraphModule) -> None:
    """Put the values back under the name that Dynamo gives them."""
    for module in every_graph(gm):
        for node in module.graph.nodes:
            if "val" in node.meta:
                node.meta["example_value"] = node.meta.pop("val")


def every_graph(gm: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """A graph and all graphs that it runs, each once."""
    seen: set[torch.fx.GraphModule] = set()
    waiting = [gm]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        yield module
        bodies = (body_of(node) for node in module.graph.nodes)
        waiting += [body for body in bodies if body is not None]
