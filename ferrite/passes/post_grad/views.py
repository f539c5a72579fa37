"""Turn `view(size)` into `reshape(size)`.

A view was possible for the strides the trace saw. A layout chosen later may make it impossible; reshape copies then,
and is still a view otherwise. Values of the nodes stay true: under the traced strides both are the same view.
"""

from __future__ import annotations

import operator

import torch

from ferrite.pipeline import PassContext, graph_pass

aten = torch.ops.aten


@graph_pass(stage="post_grad", keeps_values=True)
def view_to_reshape(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Views by size become reshapes, which hold under any layout chosen later."""
    count = reshape_views(gm.graph)
    if count:
        context.fuel.spend()
        context.rewrites["view_to_reshape"] += count
    return count


def reshape_views(graph: torch.fx.Graph) -> int:
    """Rewrite a graph and all graphs nested in it, in place; how many views there were.

    Nested modules are recompiled; the caller does so for the module of `graph`, after its last pass.
    """
    owner = graph.owning_module
    rewritten = rewrite(graph)
    inside = nested(owner, graph) if owner is not None else []
    seen: set[torch.fx.Graph] = {graph}
    while inside:
        module = inside.pop()
        if module.graph in seen:
            continue
        seen.add(module.graph)
        count = rewrite(module.graph)
        if count:
            module.recompile()
        rewritten += count
        inside += nested(module, module.graph)
    return rewritten


def rewrite(graph: torch.fx.Graph) -> int:
    views = graph.find_nodes(op="call_function", target=aten.view.default)
    for node in views:
        node.target = aten.reshape.default
        if "size" in node.kwargs:  # reshape has another name for it
            node.kwargs = {("shape" if name == "size" else name): value for name, value in node.kwargs.items()}
    return len(views)


def nested(owner: torch.nn.Module, graph: torch.fx.Graph) -> list[torch.fx.GraphModule]:
    """The graph modules that a graph refers to, by names that may have dots in them."""
    names = dict.fromkeys(str(node.target) for node in graph.find_nodes(op="get_attr"))
    found = [operator.attrgetter(name)(owner) for name in names]
    return [module for module in found if isinstance(module, torch.fx.GraphModule)]
