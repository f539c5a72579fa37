"""Quantised regions in the form that other passes, and users' own, can read.

    options = InvokeQuant(codegen_low_precision=True)
    region = invoke_quant_packed(body, a, b, scheme="nf4", quant_options=options)
    y = region[0]
                                                =>      y = invoke_quant(body, a, b, scheme="nf4")

A call of `InvokeQuant(...)` is captured with its options as an object that a node makes, which no pass can read. Here
the options become metadata of the call, `meta["quant_options"]`, and a region with one result gives that result itself.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from ferrite.capture import torch_operators
from ferrite.graph import body_of
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import inherit


@graph_pass(stage="joint")
def canonicalize_quant_mapping(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Calls of quantised regions hold no objects: their options are metadata, one result is no tuple."""
    packed, plain = torch_operators.higher_order("invoke_quant_packed"), torch_operators.higher_order("invoke_quant")
    if packed is None or plain is None:
        return 0
    count = 0
    for call in gm.graph.find_nodes(op="call_function", target=packed):
        options = call.kwargs.get("quant_options")
        if options is not None and not makes_constant(options):
            continue  # somebody computes them: then they stay where they are
        unpacked = unpack(call, plain, options)
        if isinstance(options, torch.fx.Node) and not options.users:
            gm.graph.erase_node(options)
        unwrap_sole_result(unpacked)
        count += 1
    return count


def makes_constant(options: Any) -> bool:
    """Whether a node calls a class with constants only, so that what it makes is known now."""
    return isinstance(options, torch.fx.Node) and isinstance(options.target, type) and not options.all_input_nodes


def unpack(call: torch.fx.Node, plain: Any, options: torch.fx.Node | None) -> torch.fx.Node:
    graph = call.graph
    kept = {name: value for name, value in call.kwargs.items() if name != "quant_options"}
    with graph.inserting_before(call):
        unpacked = graph.call_function(plain, call.args, kept)
    inherit(unpacked, call)
    unpacked.meta["val"] = call.meta["val"]
    if options is not None:
        assert isinstance(options.target, type)
        unpacked.meta["quant_options"] = options.target(*options.args, **options.kwargs)
    call.replace_all_uses_with(unpacked)
    graph.erase_node(call)
    return unpacked


def unwrap_sole_result(call: torch.fx.Node) -> None:
    """Let a region that nobody else calls return its one result bare, if the call only picks that."""
    holder = call.args[0]
    body = body_of(holder) if isinstance(holder, torch.fx.Node) else None
    if body is None or len(holder.users) != 1 or len(call.users) != 1:  # type: ignore[union-attr]
        return
    (pick,) = call.users
    output = body.graph.output_node()
    results = output.args[0]
    if pick.target is not operator.getitem or pick.args[1] != 0:
        return
    if not isinstance(results, (list, tuple)) or len(results) != 1 or not isinstance(results[0], torch.fx.Node):
        return
    output.args = (results[0],)
    body.recompile()
    pick.replace_all_uses_with(call)
    call.meta["val"] = pick.meta["val"]
    call.graph.erase_node(pick)
