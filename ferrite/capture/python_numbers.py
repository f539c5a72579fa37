"""Numbers of Python's own generator, which Dynamo forecasts in another type than it hands them over.

`random.uniform(0, 1)` is drawn before a graph is called and comes as a tensor of no dimension, in double precision. The
graph was traced with one in single precision. Here the input is what it will be, and operators get it in the type they
were traced with; beside a tensor of double precision they compute with all of it, as they do with a number in eager:

    random_value_0: f32[]                  random_value_0: f64[]
    y = x * random_value_0         =>      to = random_value_0.to(torch.float32)
                                           y = x * to
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ferrite.capture import torch_state
from ferrite.graph import fake_value

WIDE = frozenset({torch.float64, torch.complex128})


def as_python_hands_them_over(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Sequence[Any]:
    """Correct the inputs of `gm` that are such numbers, in place; the examples that are true of them."""
    drawn = [node for node in torch_state.drawn_by_python(gm) if is_narrow(fake_value(node))]
    if not drawn:
        return example_inputs
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node in drawn:
        widen(node, inputs[-1])
    gm.recompile()
    examples = zip(inputs, example_inputs, strict=True)
    return [example.to(torch.float64) if node in drawn else example for node, example in examples]


def is_narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def widen(node: torch.fx.Node, last_input: torch.fx.Node) -> None:
    """Make an input one in double precision, and let operators that have none read it in the type it had."""
    users = [user for user in node.users if user.op != "output" and not is_wide(user)]
    narrow = fake_value(node)
    node.meta["example_value"] = narrow.to(torch.float64)
    if users:
        with node.graph.inserting_after(last_input):
            cast = node.graph.call_method("to", (node, narrow.dtype))
        cast.meta["example_value"] = narrow
        for user in users:
            user.replace_input_with(node, cast)


def is_wide(user: torch.fx.Node) -> bool:
    """Whether an operator reads a tensor of double precision."""
    values = map(fake_value, user.all_input_nodes)
    return any(isinstance(value, torch.Tensor) and value.dtype in WIDE for value in values)
