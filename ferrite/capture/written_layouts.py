"""Writes after which torch forgets how a tensor lies.

In eager a write in place leaves a tensor's strides as they are. AOTAutograd makes a new tensor of it, and what that one
is forecast to lie like may be something else. Later results are forecast by it, and whether `reshape` is a view or a
copy is decided by them:

    v = x.t() + 0                           v = x.t() + 0
    v.masked_fill_(v > 0, 1)                filled = v.masked_fill(v > 0, 1)      # contiguous
                                    =>      v.copy_(filled)                       # lies as v does
    w = v + 1                               w = v + 1
    flat = w.reshape(-1)                    flat = w.reshape(-1)                  # a copy, as in eager
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ferrite.capture import torch_api
from ferrite.capture.unused_random import stand_in
from ferrite.graph import called_name, fake_value, leaving_no_symbols, same_number, same_sizes

# They give a view or a copy, as strides have it.
BY_STRIDES = frozenset({"reshape", "reshape_as", "flatten", "ravel", "contiguous"})
AUGMENTED = {operator.ifloordiv: operator.floordiv}
# They draw otherwise in place than anew; their results are forecast right but for `bernoulli_`.
RANDOM = frozenset({"bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_"})


def keep_written_layouts(gm: torch.fx.GraphModule) -> None:
    """Write such tensors by copies, in place, where a later call goes by their strides."""
    if not any(called_name(node) in BY_STRIDES for node in gm.graph.nodes):
        return
    written = [node for node in gm.graph.nodes if is_write(node) and is_not_contiguous(fake_value(node.args[0]))]
    for node in written:
        made = misplaced(node)
        if made is not None:
            write_by_copy(node, made)
    if written:
        gm.recompile()


def is_write(node: torch.fx.Node) -> bool:
    if not node.args or not isinstance(node.args[0], torch.fx.Node):
        return False
    if node.op == "call_function":
        return node.target in AUGMENTED
    name = called_name(node)
    return node.op == "call_method" and name.endswith("_") and not name.endswith("__") and name not in RANDOM


def is_not_contiguous(value: Any) -> bool:
    """Whether elements do not lie in a row. Where they share memory, nothing can be copied into them."""
    if not torch_api.is_fake(value) or value.layout is not torch.strided:
        return False
    if any(same_number(stride, 0) for stride in value.stride()):
        return False
    with leaving_no_symbols(value.fake_mode):
        try:
            return not value.is_contiguous()
        except GuardOnDataDependentSymNode:  # data decides: nonzero(x) is, where it found one element
            return True


def misplaced(node: torch.fx.Node) -> torch.Tensor | None:
    """What a call would make anew, as torch forecasts it, where that lies otherwise than what the call writes."""
    mode: Any = torch_api.fake_mode_of(node.graph)
    try:
        with mode, torch.no_grad(), leaving_no_symbols(mode):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), stand_in)
            made = anew(node)(*args, **kwargs)
    except Exception:  # there is no such call, or it cannot be made alone
        return None
    before = fake_value(node.args[0])  # type: ignore[arg-type]
    is_elsewhere = same_sizes(made.shape, before.shape) and not same_sizes(made.stride(), before.stride())
    return made if is_elsewhere else None


def anew(node: torch.fx.Node) -> Any:
    """The function that computes what a call writes."""
    if node.op == "call_function":
        return AUGMENTED[node.target]  # type: ignore[index]
    name = called_name(node).removesuffix("_")
    return torch.ops.aten.zero.default if name == "zero" else getattr(torch.Tensor, name)


def write_by_copy(node: torch.fx.Node, value: torch.Tensor) -> None:
    graph, target = node.graph, node.args[0]
    with graph.inserting_before(node):
        made = graph.call_function(anew(node), node.args, node.kwargs)
        copied = graph.call_method("copy_", (target, made))
    notes = {key: note for key, note in node.meta.items() if key != "source_fn_stack"}
    made.meta = {**notes, "example_value": value}
    copied.meta = {**notes, "source_fn_stack": [("copy_", "copy_")]}
    node.replace_all_uses_with(copied)
    graph.erase_node(node)
