"""How passes of this stage are made, and run alone: in between, calls are ATen overloads (see `spelling`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value, innermost_first, model_line
from ferrite.options import resolve
from ferrite.passes.pre_grad.canonical import CANONICAL, normalization_pass, spelling_pass
from ferrite.passes.pre_grad.metadata import add_values, values_to_examples
from ferrite.passes.pre_grad.numeric_check import numerics_checked
from ferrite.passes.pre_grad.torch_form import as_torch
from ferrite.pipeline import GraphPass, PassContext, Pipeline, graph_pass, run_pipeline, warn_once_about


@spelling_pass
def torch_spelling(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """What passes wrote gets its one form; calls of operators are spelled as torch functions again."""
    count = normalization_pass.function(gm, context) or 0
    return count + as_torch(gm) if context.options.pre_grad_level == "torch" else count


def run_alone(
    step: GraphPass, gm: torch.fx.GraphModule, example_inputs: Sequence[Any] = (), *, is_inference: bool = False
) -> torch.fx.GraphModule:
    """One pass, with the canonical form before it and torch's spelling after."""
    passes = dict.fromkeys((*CANONICAL, step, torch_spelling))
    context = PassContext(resolve({"strict": True}), is_inference)
    return run_stage(Pipeline(step.name, tuple(passes)), gm, example_inputs, context)


def run_stage(
    pipeline: Pipeline,
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    context: PassContext,
) -> torch.fx.GraphModule:
    add_values(gm, example_inputs)
    report = warn_once_about(gm, "pre_grad_passes(gm, inputs, ferrite.Options(strict=True))")
    with numerics_checked(pipeline, gm, example_inputs, context):
        run_pipeline(pipeline, gm, context, report)
    values_to_examples(gm)
    return gm


def reason_to_leave(gm: torch.fx.GraphModule) -> Refusal | None:
    """Why a graph cannot go through the stage; None if it can."""
    for node in (each for graph in innermost_first(gm) for each in graph.graph.nodes):
        if "functorch" in str(getattr(node.target, "__module__", None) or ""):
            why = f"{node.name} belongs to a transform of functions (vmap, grad), whose values have no storage"
            return Refusal(why, model_line(node))
        if node.op == "call_method" and node.target in RESHAPING_IN_PLACE:
            return Refusal(f"{node.name} changes the shape of a tensor in place", model_line(node))
        value = fake_value(node)
        if isinstance(value, torch.Tensor) and value.layout is torch.jagged:
            why = f"{node.name} is ragged: its size is a name, and no guard can compare two of them"
            return Refusal(why, model_line(node))
        if isinstance(value, torch.SymInt) and not torch_api.VALUES_KEEP_SYMBOLS:
            return Refusal("this torch settles symbolic sizes when it computes values: 2.13 does not")
    return None


# What earlier nodes' values say is no longer what they were.
RESHAPING_IN_PLACE = frozenset(
    {"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "resize_", "resize_as_", "set_"}
    | {"as_strided_", "detach_", "data"}
)

pre_grad_pass = functools.partial(graph_pass, stage="pre_grad", alone=run_alone)
