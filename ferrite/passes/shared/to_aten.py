"""Bring any FX graph into the form that post-grad passes read: ATen operators with fake values.

Graphs that AOTAutograd made have it already. One exported at the level of torch calls (`x.clone()`, `operator.add`) is
traced again, on the fake values its inputs carry.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.errors import UserError
from ferrite.graph import fake_value, mode_of, schema_of


def to_aten(gm: torch.fx.GraphModule) -> None:
    """Rewrite `gm` in place to ATen operators, unless it consists of them."""
    if all(is_aten(node) for node in gm.graph.nodes):
        return
    inputs = [input_value(node) for node in gm.graph.nodes if node.op == "placeholder"]
    mode = mode_of(gm.graph)
    assert mode is not None
    with mode:
        traced = make_fx(lambda *args: torch.fx.Interpreter(gm).run(*args, enable_io_processing=False))(*inputs)
    for name, value in vars(traced).items():
        if name.startswith("_tensor_constant") and not hasattr(gm, name):
            setattr(gm, name, value)
    traced.graph.set_codegen(gm.graph._codegen)
    gm.graph = traced.graph


def is_aten(node: torch.fx.Node) -> bool:
    if node.op in ("placeholder", "output", "get_attr"):
        return True
    known = schema_of(node.target) is not None or node.target is operator.getitem
    return node.op == "call_function" and (known or "val" in node.meta)


def input_value(node: torch.fx.Node) -> Any:
    value = fake_value(node)
    if value is None:
        raise UserError(
            f"the graph's input {node.name!r} has no metadata",
            {"to change that": "export or trace the function with example inputs (torch.export, make_fx, Dynamo)"},
        )
    return value
