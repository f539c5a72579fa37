"""One stage run on any graph, as users may: `ferrite.passes.post_grad_passes(gm)`.

Stages behind AOTAutograd read ATen operators with fake values. Its own graphs have that form already. One exported at
the level of torch calls (`x.clone()`, `operator.add`) is traced again, on the fake values its inputs carry.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.errors import UserError
from ferrite.graph import fake_value, mode_of, schema_of
from ferrite.options import Options, resolve
from ferrite.pipeline import Fuel, PassContext, Pipeline, run_pipeline, warn_once_about


def checked(options: Options | None) -> Options:
    """The options that were given, or the environment's, with every name of a pass or a rule looked up."""
    from ferrite.passes import checked_options  # which knows the passes of all stages

    return checked_options(options or resolve())


def run_aten_stage(
    pipeline: Pipeline, gm: torch.fx.GraphModule, is_inference: bool, options: Options | None, door: str
) -> torch.fx.GraphModule:
    """Run a stage of ATen operators on a graph, in place. One of torch calls is brought to ATen first.

    `door` is what the user called: a pass that fails is skipped, with a warning that says how to see the whole error.
    """
    options = checked(options)
    to_aten(gm)
    report = warn_once_about(gm, f"{door}(gm, options=ferrite.Options(strict=True))")
    run_pipeline(pipeline, gm, PassContext(options, is_inference, Fuel(options.fuel)), report)
    return gm


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
