"""Write into memory that nobody needs any more, instead of into a copy of it.

    b = zeros(9)                             b = zeros(9)
    c = index_put(b, [i], v)         =>      c = index_put_(b, [i], v)
    return c                                 return c

    y = index_put(x, [i], v)         =>      y = index_put_(x, [i], v)
    copy_(x, y)

    z = auto_functionalized_v2(op, base)     the same node, with a note that `base` needs no copy

`ferrite.passes.post_grad.memory` decides what may be overwritten. An operator with a twin that writes becomes the twin;
a write over a view becomes the view and a copy_ into it; of an operator that torch made functional by copying operands,
the node keeps a note for `decompose_auto_functionalized`, which writes it out.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.graph import fake_value
from ferrite.graph.facts import leaves
from ferrite.graph.updater import MetadataUpdater
from ferrite.graph.values import compute
from ferrite.passes.post_grad.higher_order import (
    NEEDS_NO_COPY,
    copied_operands,
    drop_self_copies,
    inherit,
    innermost_first,
    wraps,
)
from ferrite.passes.post_grad.memory import Memory, storage_of
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite.engine import Writer

aten = torch.ops.aten

# The first argument of each is what its twin, which takes the same arguments, writes into.
IN_PLACE = {
    "aten.index_put.default": "aten.index_put_.default",
    "aten._unsafe_index_put.default": "aten.index_put_.default",
    "aten.index_add.default": "aten.index_add_.default",
    "aten.index_copy.default": "aten.index_copy_.default",
    "aten.index_fill.int_Scalar": "aten.index_fill_.int_Scalar",
    "aten.index_fill.int_Tensor": "aten.index_fill_.int_Tensor",
    "aten.index_reduce.default": "aten.index_reduce_.default",
    "aten.masked_scatter.default": "aten.masked_scatter_.default",
    "aten.scatter.src": "aten.scatter_.src",
    "aten.scatter.value": "aten.scatter_.value",
    "aten.scatter.reduce": "aten.scatter_.reduce",
    "aten.scatter.value_reduce": "aten.scatter_.value_reduce",
    "aten.scatter_add.default": "aten.scatter_add_.default",
    "aten.scatter_reduce.two": "aten.scatter_reduce_.two",
    "_c10d_functional.all_reduce.default": "_c10d_functional.all_reduce_.default",
}
# Writing a tensor over a view of another: the view, and whether there is no way to do it but by writing.
VIEW_SCATTERS: dict[Any, tuple[Any, bool]] = {
    aten.slice_scatter.default: (aten.slice.Tensor, False),
    aten.select_scatter.default: (aten.select.int, False),
    aten.diagonal_scatter.default: (aten.diagonal.default, True),
    aten.as_strided_scatter.default: (aten.as_strided.default, True),
}


@functools.cache
def twins() -> dict[Any, Any]:
    """The operators of IN_PLACE that this torch has."""
    found = ((torch_api.find_operator(name), torch_api.find_operator(twin)) for name, twin in IN_PLACE.items())
    return {functional: twin for functional, twin in found if functional is not None and twin is not None}


@graph_pass(stage="post_grad")
def reinplace_inplaceable_ops(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Write into an operand that nobody reads any more, not into a copy of it."""
    return sum(reinplace(module, context) for module in innermost_first(gm))


def reinplace(gm: torch.fx.GraphModule, context: PassContext) -> int:
    graph = gm.graph
    candidates = [node for node in graph.nodes if node.target in twins() or node.target in VIEW_SCATTERS or wraps(node)]
    if not candidates:
        return 0
    updater = MetadataUpdater(graph)
    memory = Memory(graph)
    # Decisions first, edits afterwards: what is known of the memory stays true while it is asked.
    in_place = []
    count = 0
    for node in candidates:
        if not context.fuel.left:
            break
        if wraps(node):
            kept = frozenset(operands_to_keep(node, memory))
            done = len(kept) if kept != node.meta.get(NEEDS_NO_COPY, frozenset()) else 0
            node.meta[NEEDS_NO_COPY] = kept
        else:
            done = allowed(node, memory)
            in_place += [node] * done
        for _ in range(done):
            context.fuel.spend()
            context.count("reinplace_inplaceable_ops")
        count += done
    if count:
        for node in in_place:
            write_in_place(node, updater.mode)
        updater.update()
        drop_self_copies(graph)
        gm.recompile()
    return count


# --- operators with a twin, and writes over views ---------------------------------------------------------------------


def allowed(node: torch.fx.Node, memory: Memory) -> bool:
    """Whether an operator may write into its first argument; if so, its result lives there."""
    if not node.args:
        return False
    operand, result = node.args[0], fake_value(node)
    others = [leaf for leaf in leaves((node.args[1:], node.kwargs)) if isinstance(leaf, torch.fx.Node)]
    if memory.refusal(node, operand, result, others) is not None:
        return False
    if node.target in VIEW_SCATTERS and not profitable(node, memory):
        return False
    assert isinstance(operand, torch.fx.Node)
    memory.settle(result, storage_of(fake_value(operand)))
    return True


def profitable(node: torch.fx.Node, memory: Memory) -> bool:
    """Whether a write over a view saves memory traffic: not where the whole is computed element by element anyway."""
    operand = node.args[0]
    assert isinstance(operand, torch.fx.Node)
    must_write = VIEW_SCATTERS[node.target][1]
    in_input = memory.root(storage_of(fake_value(operand))) in memory.aliases.input_storages
    return must_write or in_input or not (elementwise(operand) and all(map(elementwise, node.users)))


def elementwise(node: torch.fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def write_in_place(node: torch.fx.Node, mode: Any) -> None:
    if node.target in twins():
        node.target = twins()[node.target]
        node.meta["val"], _ = compute(node, mode)
        return
    view, _ = VIEW_SCATTERS[node.target]
    operand, source, *where = node.args
    assert isinstance(operand, torch.fx.Node)
    writer = Writer(node.graph, mode)
    with node.graph.inserting_before(node):
        writer.call(aten.copy_.default, writer.call(view, operand, *where, **node.kwargs), source)
    inherit(writer.made, node, "reinplace_inplaceable_ops")
    node.replace_all_uses_with(operand)
    node.graph.erase_node(node)


# --- operators that torch made functional by copying ---------------------------------------------------------------


def operands_to_keep(node: torch.fx.Node, memory: Memory) -> list[Any]:
    """The operands that such a node need not copy. Of several that share memory one at most: the others are copied
    before it is written."""
    copied = copied_operands(node)
    # An argument that is written may be given a second time, to be read.
    names = {"_all_bases", *(key for key, _, _ in copied)}
    passed: dict[str, Any] = node.kwargs.get("kwargs", node.kwargs)  # type: ignore[assignment]
    others = [leaf for name, item in passed.items() if name not in names for leaf in leaves(item)]
    found = []
    for key, given, result in copied:
        pairs = list(zip(leaves(given), leaves(result), strict=True))
        pairs = [(operand, new) for operand, new in pairs if isinstance(operand, torch.fx.Node)]
        taken = list(others)
        for operand, new in pairs:
            if memory.refusal(node, operand, new, taken) is not None:
                break
            taken.append(operand)
        else:
            if pairs:
                found.append(key)
                others = taken
                for operand, new in pairs:
                    memory.settle(new, storage_of(fake_value(operand)))
    return found
